"""The command ``jax-offload``: ``plan``, ``check``, and ``doctor``, which asks whether this machine can offload."""

import argparse
import contextlib
import inspect as signatures
import json
import pkgutil
import platform
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax

import jax_offload
from jax_offload._look.chips import chip, host_memory
from jax_offload._look.compiled import prepare
from jax_offload._look.inspection import inspect, verify
from jax_offload._look.plan import plan
from jax_offload._look.text import aligned, in_bytes
from jax_offload._offload import offload, update_params
from jax_offload._program.memory import POOL_VARIABLE, pool_limit
from jax_offload._state.masters import with_master_params
from jax_offload._step.jit import jit

EXIT_CODES = """Exit codes:
  0  it fits, or may; all is well
  2  an option is wrong, or the compiler for the target is not installed
  3  nothing fits
  6  the step does not offload, or does not fit: check says why
  7  this machine cannot offload: doctor says why
  9  the function of yours raises, or its module does"""
PLAN = """Does it fit, what to write, what does it cost?

MODEL is a number of parameters, 13B or 13e9; or module:function, a function without
arguments that returns (optimizer, parameters), or (make, optimizer, ...), where
make(optimizer, ...) returns (step, *arguments)."""
CHECK = """Does a step fit and stream its state, and what does it do with memory and the link?

STEP is module:function: a function without arguments that returns (step, *arguments),
the step jitted with its donation."""
DOCTOR = "Can this machine offload? List versions and memories, measure the link, and run a self-test."
WRONG, NOTHING_FITS, FAILS, CANNOT_OFFLOAD, RAISES = 2, 3, 6, 7, 9
_OPTIMIZER = "optimizer", "clip", "master", "storage"  # of a number alone

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
        raise SystemExit(WRONG) from error
    if code:
        raise SystemExit(code)


def parser() -> argparse.ArgumentParser:
    """Return the parser. ``plan`` takes the keyword arguments of ``jax_offload.plan`` as options, with their texts."""
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
    model.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS)
    model.add_argument("--params", dest="model", help="the same as MODEL, where that is a number")
    texts = dict(re.findall(r"^  (\w+): ((?:.|\n   )*)", signatures.getdoc(plan) or "", re.MULTILINE))
    for name, given in signatures.signature(plan).parameters.items():
        if given.kind is signatures.Parameter.KEYWORD_ONLY:
            action = "store_true" if given.default is False else "store"
            said = texts.get(name, "").replace("``", "") + (f" (default: {given.default})" if given.default else "")
            option(f"--{name.replace('_', '-')}", action=action, default=given.default, help=said)
    option("--optimizer", help="a name in optax or optax.contrib; adamw if left out")
    option("--clip", action="store_true", help="clip gradients by their global norm")
    option("--master", help="dtype of master parameters: float32")
    option("--storage", help="how moments are stored: bfloat16 (changes the numbers)")
    option("--verbose", action="store_true", help="transfers and code of each row, and sources of figures")
    option = command("check", _check, CHECK)
    option("step", metavar="STEP")
    option("--target", help="a chip to compile for that need not be there: h200, v5e:2x2 (extra aot)")
    command("doctor", _doctor, DOCTOR)
    return top


def _plan(model: str, verbose: bool, as_json: bool, **given: Any) -> int:
    _on_the_cpu()
    called, own = "inner", {name: value for name in _OPTIMIZER if (value := given.pop(name))}
    if ":" not in model:
        tx, called = _optimizer(**own)
        found = plan(tx, model, **given)
    elif own:
        raise ValueError(f"{', '.join(f'--{name}' for name in own)}: {model} has an optimizer of its own.")
    else:
        found = plan(*load(model, "(optimizer, parameters) or (make, optimizer)"), **given)
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


def _on_the_cpu() -> None:
    """Keep jax on the CPU: nothing runs, so no accelerator must be started or queried."""
    prepare()
    with contextlib.suppress(RuntimeError):  # it is up already
        jax.config.update("jax_platforms", "cpu")


def _optimizer(
    optimizer: str = "adamw", clip: bool = False, master: str | None = None, storage: str | None = None
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
    return (offload(tx, storage=storage) if storage else tx), code


def load(name: str, wanted: str) -> Any:
    """Call ``module:function`` and return its result, at least two values. The working directory is searched too.

    An error that their code raises is printed with its traceback, and does not count as a wrong option.
    """
    sys.path.insert(0, "")
    try:
        made = pkgutil.resolve_name(name) if ":" in name else name
        found = made() if callable(made) else made
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError | AttributeError) else None
        if missing and f".{missing}." in f".{name.replace(':', '.')}.":  # Python looked for what the argument names
            raise ValueError(f"{name}: expected module:function; {error}.") from error
        traceback.print_exception(error)
        raise SystemExit(RAISES) from error
    if not isinstance(found, tuple | list) or len(found) < 2:
        raise ValueError(
            f"{name}: expected module:function, a function without arguments that returns {wanted}; got a "
            f"{type(found).__name__}."
        )
    return found


# -- doctor


def _doctor(as_json: bool) -> int:
    found, wrong = dict[str, str](), ""
    try:
        for name, says in _examined():
            found[name] = says
    except Exception as error:  # the report shows any error
        wrong = f"{type(error).__name__}: {error}"
    verdict = f"this machine cannot offload: {wrong}" if wrong else "this machine can offload"
    if as_json:
        print(json.dumps({"ok": not wrong, "verdict": verdict, "checks": found}, indent=1))
    else:
        print("\n".join([f"verdict: {verdict}", *aligned([*found.items()])]))
    return CANNOT_OFFLOAD if wrong else 0


def _examined() -> Iterator[tuple[str, str]]:
    """Yield what each check finds. The first one that fails raises."""
    modules = (f"{module.__name__} {module.__version__}" for module in (jax_offload, jax, jaxlib, optax))
    yield "versions", ", ".join([f"Python {platform.python_version()}", *modules])
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    said = f"{jax.local_device_count()} × {device.device_kind}, platform {device.platform}"
    said += f", {in_bytes(limit)} each for jax" if limit else ""
    said += ": no accelerator, so offloading gains nothing here" if device.platform == "cpu" else ""
    yield "devices", said
    there = "unknown" if (n := host_memory()) is None else in_bytes(n)
    yield "host memory", f"{there}; on a GPU a process pins {in_bytes(pool_limit())} of it at most ({POOL_VARIABLE})"
    found = chip.measured(device)
    said = f"{found.host_link / 1e9:.1f} GB/s one way, {found.host_link_both / 2e9:.1f} each way at once"
    said = "none on a CPU" if device.platform == "cpu" else said
    yield "link", f"{said}; the cores reach {found.dram_bandwidth / 1e9:.1f} GB/s of host memory for each device"
    yield "self-test", _self_test(device)


def _self_test(device: Any) -> str:
    """Train a small model offloaded and resident: the state has to be on the host, and the numbers alike.

    Its layers differ and are updated inside the backward scan, so a row that is loaded or stored in the wrong place
    shows in the numbers.
    """
    layers, width = ON_CPU if device.platform == "cpu" else ELSEWHERE
    inner = optax.adamw(1e-3)
    x = jax.device_put(jnp.asarray(np.random.default_rng(0).normal(size=(64, width)), jnp.float32), device)

    def loss(params: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2).mean()

    def trained(tx: Any, offloaded: bool) -> Any:
        scales = 1 + jnp.arange(layers, dtype=jnp.float32)[:, None, None] / layers
        params = jax.device_put(scales * jnp.eye(width, dtype=jnp.float32), device)
        state = tx.init(params)
        step = jit(lambda p, s, x: update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1))
        for _ in range(STEPS):
            params, state = step(params, state, x)
        if offloaded:
            verify(step, params, state, x)
        return np.asarray(params)

    resident = trained(inner, offloaded=False)
    off = float(np.linalg.norm(trained(offload(inner), offloaded=True) - resident) / np.linalg.norm(resident))
    if not off <= TOLERANCE:
        raise ValueError(f"{STEPS} steps differ from the resident ones by {off:.1e}: report it")
    return f"{STEPS} steps equal the resident ones to {off:.0e}, with the state in host memory"
