"""The command ``jax-offload``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jax_offload import __version__
from jax_offload._analysis.doctor import examine
from jax_offload._analysis.inspection import inspect
from jax_offload._analysis.plan import plan
from jax_offload._analysis.targets import prepare
from jax_offload._offload import offload
from jax_offload._precision.masters import with_master_params

EXIT_CODES = """Exit codes:
  0  it fits, or may; all is well
  2  an option is wrong
  3  nothing fits
  4  the chip is not known
  6  the offload of the step is not real: check says why
  7  this machine cannot offload: doctor says why
  8  the compiler for the target is not installed
  9  the function of yours raises, or its module does"""
PLAN = """Does it fit, what to write, what does it cost?

MODEL is a number of parameters, 13B or 13e9; or module:function, a function without
arguments that returns (optimizer, parameters), or (make, optimizer, ...), where
make(optimizer, ...) returns (step, *arguments)."""
CHECK = """Is the offload of a step real, and what does the step do with memory and the link?

STEP is module:function: a function without arguments that returns (step, *arguments),
the step jitted with its donation."""
WRONG, NOTHING_FITS, NOT_KNOWN, NOT_REAL, SELF_TEST_FAILED, NOT_INSTALLED, RAISES = 2, 3, 4, 6, 7, 8, 9
_MODEL = ("optimizer", "param_dtype", "master", "storage", "clip", "devices", "replicated")  # of a number alone


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
    top.add_argument("--version", action="version", version=f"jax-offload {__version__}")
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
    option("--chip", help="the accelerator: h100, v5e, ..., or a .toml of yours")
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
    said = "The offload is not real" if found.errors else "The offload is real"
    print(json.dumps(found.to_dict(), indent=1) if as_json else f"{said}, {where}.\n\n{found}")
    return NOT_REAL if found.errors else 0


def _doctor(as_json: bool) -> int:
    report = examine()
    print(json.dumps(report.to_dict(), indent=1) if as_json else report)
    return 0 if report.ok else SELF_TEST_FAILED


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
