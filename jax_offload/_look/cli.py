"""The command ``jax-offload``: ``plan``, ``check``, and ``doctor``, which asks whether this machine can offload."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import platform
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax

import jax_offload
from jax_offload._look.chips import chip, host_memory
from jax_offload._look.compiled import prepare
from jax_offload._look.inspection import inspect
from jax_offload._look.plan import plan
from jax_offload._look.text import aligned, in_bytes
from jax_offload._offload import offload, update_params
from jax_offload._program.memory import HOST_KIND, POOL_HEADROOM, POOL_VARIABLE, pool_limit
from jax_offload._state.masters import with_master_params
from jax_offload._step.jit import jit

EXIT_CODES = """Exit codes:
  0  it fits, or may; all is well
  2  an option is wrong
  3  nothing fits
  4  the chip is not known
  6  the step does not offload, or does not fit: check says why
  7  this machine cannot offload: doctor says why
  8  the compiler for the target is not installed
  9  the function of yours raises, or its module does"""
PLAN = """Does it fit, what to write, what does it cost?

MODEL is a number of parameters, 13B or 13e9; or module:function, a function without
arguments that returns (optimizer, parameters), or (make, optimizer, ...), where
make(optimizer, ...) returns (step, *arguments)."""
CHECK = """Does a step fit and stream its state, and what does it do with memory and the link?

STEP is module:function: a function without arguments that returns (step, *arguments),
the step jitted with its donation."""
WRONG, NOTHING_FITS, NOT_KNOWN, FAILS, SELF_TEST_FAILED, NOT_INSTALLED, RAISES = 2, 3, 4, 6, 7, 8, 9
_MODEL = ("optimizer", "param_dtype", "master", "storage", "clip", "devices", "replicated")  # of a number alone

STEPS = 5
TOLERANCE = 1e-5  # of the resident run's numbers; XLA may round otherwise where a fusion ends
ON_CPU, ELSEWHERE = (4, 256), (16, 2048)  # layers and width of the model of the self-test


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line with ``argv``, or with the arguments of the process."""
    given = vars(parser().parse_args(argv))
    run = given.pop("run")
    try:
        code = run(**given)
    except (ValueError, TypeError) as error:
        print(f"jax-offload: {error}", file=sys.stderr)
        raise SystemExit(_code_of(error)) from error
    if code:
        raise SystemExit(code)


def parser() -> argparse.ArgumentParser:
    how: dict[str, Any] = {"epilog": EXIT_CODES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    top = argparse.ArgumentParser("jax-offload", description="Know before a run whether it fits.", **how)
    top.add_argument("--version", action="version", version=f"jax-offload {jax_offload.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, says: str) -> Any:
        found = commands.add_parser(name, help=says.partition("\n")[0], description=says, **how)
        found.set_defaults(run=run)
        found.add_argument("--json", action="store_true", dest="as_json", help="all figures, as JSON")
        return found.add_argument

    option = command("plan", _plan, PLAN)
    model = commands.choices["plan"].add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="MODEL")
    model.add_argument("--params", help="the same as MODEL, where that is a number")
    option("--chip", help="the accelerator: h100, v5e, ...")
    option("--device-memory", help="of one device: 80GiB; the chip's where it is left out")
    option("--host-memory", help="of each host: 256GiB; the chip's figure where it is left out")
    option("--activations", help="of one device, where you know them: 10GiB")
    option("--target", help="compile the step of module:function for this chip: h100, v5e:2x2 (extra aot)")
    option("--tokens", dest="tokens_per_step", help="a step, over all devices")
    option("--layers", help="with --tokens, gives activations by a formula")
    option("--width", help="of a layer; follows from the number where --layers is given")
    option("--disk", action="store_true", help="add a row with the state on disk")
    option("--optimizer", help="a name in optax or optax.contrib (default: adamw)")
    option("--param-dtype", help="(default: bfloat16)")
    option("--compute-dtype", help="of activations and matmuls (default: the parameters')")
    option("--master", help="dtype of master parameters: float32")
    option("--storage", help="how moments are stored: bfloat16 (changes the numbers)")
    option("--clip", action="store_true", help="clip gradients by their global norm")
    option("--devices", help="over which parameters are divided (FSDP; default: 1)")
    option("--replicated", action="store_true", help="keep parameters whole on every device instead")
    option("--verbose", action="store_true", help="transfers and code of each row, and sources of figures")
    option = command("check", _check, CHECK)
    option("step", metavar="STEP")
    option("--target", help="a chip to compile for that need not be there: h200, v5e:2x2 (extra aot)")
    command("doctor", _doctor, "Can this machine offload? List versions, measure the link, and run a self-test.")
    return top


def _code_of(error: Exception) -> int:
    says = str(error)
    if says.startswith(("chip:", "target:")) and "Known: " in says:
        return NOT_KNOWN
    return NOT_INSTALLED if says.startswith("target:") and "pip install" in says else WRONG


def _plan(model: str | None, params: str | None, verbose: bool, as_json: bool, **given: Any) -> int:
    model, called = model or params or "", "inner"
    _on_the_cpu()
    of_model = {name: value for name in _MODEL if (value := given.pop(name)) not in (None, False)}
    if ":" in model:
        if other := [f"--{name.replace('_', '-')}" for name in of_model]:
            raise ValueError(f"{', '.join(other)}: of a model that a number describes; {model} has its own.")
        found = plan(*load(model, "(optimizer, parameters) or (make, optimizer)"), **given)
    else:
        own = ("optimizer", "master", "storage", "clip")
        tx, called = _optimizer(**{name: of_model.pop(name) for name in own if name in of_model})
        found = plan(tx, model, **of_model, **given)
    said = json.dumps(found.to_dict(), indent=1) if as_json else found.describe(verbose)
    print(re.sub(r"\binner\b", called, said))
    return NOTHING_FITS if found.recommended is None and found.usable is not None else 0


def _check(step: str, target: str | None, as_json: bool) -> int:
    if target is not None:
        _on_the_cpu()
    found = inspect(*load(step, "(step, *arguments)"), target=target)
    where = f"compiled for {found.target}" if found.compiled_for else f"on {found.target}"
    said = "The step fails" if found.errors else "The step passes"
    print(json.dumps(found.to_dict(), indent=1) if as_json else f"{said}, {where}.\n\n{found}")
    return FAILS if found.errors else 0


def _doctor(as_json: bool) -> int:
    checks = examine()
    bad, notes = ([check for check in checks if check.kind == kind] for kind in ("bad", "note"))
    verdict = "this machine can offload" + "; note: " * bool(notes) + ", ".join(check.name for check in notes)
    if bad:
        verdict = "this machine cannot offload yet: " + ", ".join(check.name for check in bad)
    first = [check.next for check in (*bad, *notes) if check.next] or ["jax-offload plan module:function --chip NAME"]
    if as_json:
        found = {
            "ok": not bad,
            "verdict": verdict,
            "next_step": first[0],
            "checks": list(map(dataclasses.asdict, checks)),
        }
        print(json.dumps(found, indent=1))
    else:
        marks = {"ok": "✓", "note": "!", "bad": "✗"}
        lines = aligned([(marks[check.kind], check.name, check.says) for check in checks])
        print("\n".join([f"verdict: {verdict}", f"next: {first[0]}", *lines]))
    return SELF_TEST_FAILED if bad else 0


def _on_the_cpu() -> None:
    """Keep jax on the CPU: nothing runs, so no accelerator must be started or queried."""
    prepare()
    with contextlib.suppress(RuntimeError):  # it is up already
        jax.config.update("jax_platforms", "cpu")


def _optimizer(
    optimizer: str = "adamw", master: str | None = None, storage: str | None = None, clip: bool = False
) -> tuple[Any, str]:
    """Return the optimizer that the options describe, and its code."""
    home = next((m for m in (optax, optax.contrib) if optimizer[:1] != "_" and hasattr(m, optimizer)), None)
    if home is None:
        raise ValueError(f"--optimizer: optax has no {optimizer!r}. Use a name in optax: adamw, adam, lion or sgd.")
    code = f"{'optax' if home is optax else 'optax.contrib'}.{optimizer}(1e-3)"
    try:
        tx: Any = getattr(home, optimizer)(1e-3)
    except Exception as error:
        raise ValueError(f"--optimizer: {code} raises {type(error).__name__}: {error}") from error
    if clip:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
        code = f"optax.chain(optax.clip_by_global_norm(1.0), {code})"
    if master is not None:
        dtype = "" if master == "float32" else f", {master!r}"
        tx, code = with_master_params(tx, master), f"jo.with_master_params({code}{dtype})"
    if storage is not None:
        tx = offload(tx, storage=storage)
    return tx, code


def load(name: str, wanted: str) -> Any:
    """Call ``module:function`` and return its result, at least two values. The working directory is searched too.

    An error that their code raises is printed with its traceback, and does not count as a wrong option.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name}: expected module:function.")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), function, None)
        found = made() if callable(made) else None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{name}: No module named {module!r}") from error
        traceback.print_exception(error)
        print(f"jax-offload: {name} raises {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(RAISES) from error
    if not callable(made):
        has = "nothing" if made is None else f"a {type(made).__name__}"
        raise ValueError(f"{name}: expected a function without arguments; {module} has {has} of that name.")
    if not isinstance(found, tuple | list) or len(found) < 2:
        raise ValueError(f"{name}: expected {wanted}; got a {type(found).__name__}.")
    return found


# -- doctor: installed packages, memories, the link, and a short run


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report. ``next``: the next thing to do if it is not ok."""

    name: str
    kind: Literal["ok", "note", "bad"]
    says: str
    next: str = ""


def examine() -> list[Check]:
    """Run all checks, which takes a few seconds."""
    modules = [f"{module.__name__} {module.__version__}" for module in (jax_offload, jax, jaxlib, optax)]
    found = [Check("versions", "ok", ", ".join([f"Python {platform.python_version()}", *modules]))]
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        return [*found, Check("devices", "bad", f"jax finds none: {error}", "install jax for this machine")]
    found += [_devices(device), _kinds(device), _host_memory(), _pool(device)]
    if all(check.kind != "bad" for check in found):
        found += [_link(device), _self_test(device)]
    return found


def _devices(device: Any) -> Check:
    said = f"{jax.local_device_count()} × {device.device_kind}, platform {device.platform}"
    if device.platform == "cpu":
        said += ": no accelerator, so offloading gains nothing here"
        return Check("devices", "note", said, "run it on the machine with the accelerator")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return Check("devices", "ok", said + (f", {in_bytes(limit)} each for jax" if limit else ""))


def _kinds(device: Any) -> Check:
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_KIND in kinds:
        return Check("memories", "ok", ", ".join(kinds))
    return Check("memories", "bad", f"{', '.join(kinds)}: no {HOST_KIND}", "use a jax with pinned_host memory: 0.10 on")


def _host_memory() -> Check:
    named = zip(("available", "left by the cgroup"), host_memory(), strict=True)
    said = [f"{in_bytes(n)} {what}" for what, n in named if n is not None]
    return Check("host memory", "ok" if said else "note", ", ".join(said) or "not known")


def _pool(device: Any) -> Check:
    try:
        limit = pool_limit()
    except ValueError as error:
        return Check("pinned pool", "bad", str(error), f"set {POOL_VARIABLE} to a number of GiB, or leave it out")
    pool = f"{in_bytes(limit)} in a process ({POOL_VARIABLE})"
    if device.platform not in ("gpu", "cuda", "rocm"):
        return Check("pinned pool", "ok", f"XLA sets no limit on this platform; on a GPU {pool}")
    usable = min((n for n in host_memory() if n is not None), default=0)
    if usable > 2 * limit:
        fix = f"set {POOL_VARIABLE} to {POOL_HEADROOM:g} times what the state needs, before jax starts"
        return Check("pinned pool", "note", f"{pool}, of {in_bytes(usable)} available", fix)
    return Check("pinned pool", "ok", pool)


def _link(device: Any) -> Check:
    found = chip.measured(device)
    said = f"{found.host_link / 1e9:.1f} GB/s one way, {found.host_link_both / 2e9:.1f} each way at once"
    said = "none on a CPU" if device.platform == "cpu" else said
    said += f"; the cores reach {found.dram_bandwidth / 1e9:.1f} GB/s of the host's memory for each device"
    return Check("link", "ok", said)


def _self_test(device: Any) -> Check:
    """Train a small model offloaded and resident: the state has to be on the host, and the numbers alike.

    Its layers differ and are updated inside the backward scan, so a row that is loaded or stored in the wrong place
    shows in the numbers.
    """
    layers, width = ON_CPU if device.platform == "cpu" else ELSEWHERE
    inner = optax.adamw(1e-3)
    x = jax.device_put(jnp.asarray(np.random.default_rng(0).normal(size=(64, width)), jnp.float32), device)

    def loss(params: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2).mean()

    def trained(tx: Any) -> tuple[Any, Any]:
        scales = 1 + jnp.arange(layers, dtype=jnp.float32)[:, None, None] / layers
        params = jax.device_put(scales * jnp.eye(width, dtype=jnp.float32), device)
        state = tx.init(params)
        step = jit(lambda p, s, x: update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1))
        for _ in range(STEPS):
            params, state = step(params, state, x)
        return np.asarray(params), {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}

    try:
        (ours, kinds), (resident, _) = trained(offload(inner)), trained(inner)
    except Exception as error:  # the report shows any error
        return Check("self-test", "bad", f"{type(error).__name__}: {str(error).splitlines()[0]}", "report it")
    off = float(np.linalg.norm(ours - resident) / np.linalg.norm(resident))
    if kinds != {HOST_KIND}:
        return Check("self-test", "bad", f"the state ended in {sorted(map(str, kinds))}", "report it")
    if not off <= TOLERANCE:
        return Check("self-test", "bad", f"{STEPS} steps differ from the resident ones by {off:.1e}", "report it")
    return Check("self-test", "ok", f"{STEPS} steps equal the resident ones to {off:.0e}; the state is in {HOST_KIND}")
