"""The commands of ``jax-offload``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click  # pyright: ignore[reportMissingImports]  (an extra)
import jax
from click.core import ParameterSource  # pyright: ignore[reportMissingImports]
from jax.sharding import AbstractMesh, Mesh
from rich.console import Console
from rich.table import Table

from jax_offload import __version__
from jax_offload._analysis.doctor import examine
from jax_offload._analysis.forecast import Forecast
from jax_offload._analysis.inspection import inspect as inspect_of
from jax_offload._analysis.optimizer import NO_ACTIVATIONS, of_optimizer
from jax_offload._analysis.plan import plan as plan_of
from jax_offload._analysis.plan import setting_of
from jax_offload._analysis.synthetic import described
from jax_offload._analysis.table import heading, rows, sentences, tiers
from jax_offload._analysis.targets import prepare
from jax_offload._analysis.units import bytes_of
from jax_offload._analysis.ways import disk_of

EXIT_CODES = """\b
Exit codes:
  0  it fits; all is well
  2  an option is wrong
  3  nothing fits the device memory
  4  the chip or the drive is not known
  5  parameters are not on the mesh
  6  the step offloads nothing, or not really: inspect says why
  7  this machine cannot offload: the doctor says why
  8  what the commands need is not installed
  9  the function of yours raises, or its module does
  10  it may fit: the memory is between the ends of the estimate, and --target settles it"""
WRONG, NOTHING_FITS, NOT_KNOWN, NOT_ON_THE_MESH, NOT_REAL, SELF_TEST_FAILED, NOT_INSTALLED, RAISES, MAYBE = range(2, 11)
MOST = 1e15  # parameters, of a model that options describe
PICTURES = (".png", ".svg", ".json")


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """What the library says of its arguments, as a line and an exit code."""
    try:
        yield
    except (ValueError, TypeError) as error:
        click.echo(f"jax-offload: {error}", err=True)
        raise SystemExit(_code_of(error)) from error


def _code_of(error: Exception) -> int:
    says = str(error)
    match says.partition(":")[0]:
        case "chip" | "drive":
            return NOT_KNOWN
        case "target":  # a chip to compile for
            return NOT_KNOWN if "Known: " in says else NOT_INSTALLED if "pip install" in says else WRONG
        case "params" if "on the mesh" in says:
            return NOT_ON_THE_MESH
        case "step" if isinstance(error, ValueError):
            return NOT_REAL
        case _:
            return WRONG


@click.command(epilog=EXIT_CODES)
@click.argument("target", required=False)
@click.option("--params", type=float, help="How many parameters: 7e9.")
@click.option("--optimizer", default="adamw", show_default=True, help="A name in optax or optax.contrib.")
@click.option("--param-dtype", default="bfloat16", show_default=True)
@click.option("--master", help="Dtype of master parameters: float32.")
@click.option("--storage", help="How moments are stored: bfloat16, int8, ...")
@click.option("--clip", is_flag=True, help="Clip gradients by their global norm.")
@click.option("--chip", help="The accelerator: h100, v5e, ..., or a .toml of yours.")
@click.option("--tokens", type=float, help="Tokens per step, over all devices.")
@click.option(
    "--layers", type=click.IntRange(min=1), help="With --tokens: activations too, a checkpoint around each layer."
)
@click.option(
    "--width",
    type=click.IntRange(min=1),
    help="Of a layer; where one of these two is left out it follows from --params.",
)
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--shard-over", help="Divide the state over these devices, an axis of that name (ZeRO-1).")
@click.option("--fsdp", is_flag=True, help="Divide parameters, gradients and state over these devices.")
@click.option("--device-memory", help="What a step may use of one device: 80GiB.")
@click.option("--target", "compile_for", help="Compile a step of TARGET for this chip: h200, v5e:2x2 (minutes).")
@click.option("--disk", is_flag=True, help="Keep on disk what is beyond --host-bytes.")
@click.option("--host-bytes", help="With --disk: of the state what stays in host memory: 64GiB.  [default: 0]")
@click.option("--drive", help="What the disk is: pm9a3, pm9d3a, 990pro, or a .toml of yours.  [default: pm9a3]")
@click.option("--drives", type=click.IntRange(min=1), default=1, show_default=True, help="With --disk: how many.")
@click.option("--commit-every", type=click.IntRange(min=1), help="With --disk: of how many steps one is committed.")
@click.option("--json", "as_json", is_flag=True, help="All figures, as JSON.")
def plan(target: str | None, as_json: bool, **options: Any) -> None:
    """Whether a model fits, how much slower offloading makes it, and the line of code to write.

    Of a model that the options describe, or of TARGET, "module:function": a function without arguments that returns
    (optimizer, parameters), with the parameters' mesh as a third where they are to be on one; or (step, *arguments); or
    (make, optimizer), where make(optimizer) returns (step, *arguments), for a row by each way to offload. Abstract
    arguments best: jax.eval_shape(init).
    """
    _on_the_cpu()
    if options["compile_for"]:
        prepare()
    with errors():
        forecast = _of_target(target, options) if target else _of_description(options)
    if as_json:
        click.echo(json.dumps(forecast.to_dict(), indent=1))
    else:
        show(forecast)
    if forecast.recommended is None:
        raise SystemExit(NOTHING_FITS)
    if forecast.maybe:
        raise SystemExit(MAYBE)


@click.command(epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def doctor(as_json: bool) -> None:
    """What this machine has for offloading, a measured link, and a self-test that streams and compares."""
    report = examine()
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=1))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for check in report.checks:
            table.add_row({"ok": "✓", "note": "!", "bad": "✗"}[check.kind], check.name, check.says)
        console = Console(highlight=False)
        console.print(table)
        console.print(f"verdict: {report.verdict}\nnext: {report.next_step}", markup=False)
    if not report.ok:
        raise SystemExit(SELF_TEST_FAILED)


@click.command(epilog=EXIT_CODES)
@click.argument("step")
@click.option("--target", help="A chip to compile for that need not be there: h200, v5e:2x2 (pip install '.[aot]').")
@click.option("--timeline", help="Where to save its simulated run: .png, .svg, or .json for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def inspect(step: str, target: str | None, timeline: str | None, as_json: bool) -> None:
    """What a compiled step really does with device memory, host memory and the link.

    STEP is "module:function": a function without arguments that returns (step, *arguments), the step jitted with its
    donation.
    """
    if target is not None:
        _on_the_cpu()
        prepare()
    with errors():
        if timeline:
            _check_picture(timeline)
        result = inspect_of(*_pair(step, load(step), "(step, *arguments)"), target=target)
        if timeline and result.timeline is None:
            raise ValueError("timeline: the chip's figures are not known; give --target.")
        if timeline and result.timeline is not None:
            result.timeline.save(timeline)
    click.echo(json.dumps(result.to_dict(), indent=1) if as_json else str(result))
    if result.errors:
        raise SystemExit(NOT_REAL)


def _check_picture(path: str) -> None:
    """Before minutes of compiling."""
    if Path(path).suffix not in PICTURES:
        raise ValueError(f"--timeline: {path!r} ends with {Path(path).suffix!r}; expected {', '.join(PICTURES)}.")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"--timeline: there is no folder {folder!r}.")


def _on_the_cpu() -> None:
    """Nothing runs: no accelerator is to be started, or asked for."""
    with contextlib.suppress(RuntimeError):  # it is up already
        jax.config.update("jax_platforms", "cpu")


def _of_description(given: dict[str, Any]) -> Forecast:
    if given["compile_for"]:
        raise ValueError("--target: compiles a step, module:function; a model that options describe has --chip.")
    if given["params"] is None:
        raise ValueError("--params: say how many parameters the model has, 7e9; or give module:function.")
    if not 1 <= given["params"] <= MOST:  # a NaN is neither
        raise ValueError(f"--params: expected a number from 1 to {MOST:g}; got {given['params']:g}.")
    tokens, layers, width = given["tokens"], given["layers"], given["width"]
    setting = setting_of(given["chip"], tokens, None, given["device_memory"], given["drive"])
    if not given["disk"] and (given["host_bytes"] or given["drives"] > 1 or given["commit_every"]):
        raise ValueError("--disk: is what --host-bytes and --drives are for, and --commit-every; give it too.")
    host_bytes = bytes_of("host-bytes", given["host_bytes"]) if given["host_bytes"] else 0
    model = described(
        int(given["params"]), given["optimizer"], given["param_dtype"], master=given["master"],
        storage=given["storage"], clip=given["clip"], layers=layers, width=width, devices=given["devices"],
        shard_over=given["shard_over"], fsdp=given["fsdp"],
        disk=disk_of(given["drives"], host_bytes, given["commit_every"] or 1) if given["disk"] else None,
    )  # fmt: skip
    missing = [option for option, value in (("--layers", layers or width), ("--tokens", tokens)) if not value]
    activations, said = None, f"{NO_ACTIVATIONS}; {' and '.join(missing)} would tell"
    if tokens and not missing:  # what a checkpoint around each layer keeps: its input
        itemsize = model.params["mlp"].dtype.itemsize
        activations = int(tokens) // given["devices"] * model.layers * model.width * itemsize
        said = f"activations: a checkpoint around each of {model.layers} layers of width {model.width}"
    said += "; the layers that FSDP gathers are not in these peaks" if given["fsdp"] else ""
    forecast = of_optimizer(model.tx, model.params, setting, None, activations, model.called)
    notes = (said, *(note for note in forecast.notes if note != NO_ACTIVATIONS))
    return dataclasses.replace(forecast, notes=notes)


def _of_target(target: str, given: dict[str, Any]) -> Forecast:
    source = click.get_current_context().get_parameter_source
    taken = ("chip", "tokens", "device_memory", "compile_for", "drive")
    other = [key for key in given if key not in taken and source(key) is not ParameterSource.DEFAULT]
    if other:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in other)
        raise ValueError(f"{names}: describes a model, and {target} has its own; leave out the one or the other.")
    loaded = _pair(target, load(target), "(optimizer, parameters), (step, *arguments) or (make, optimizer)")
    keywords = {key: given[key] for key in ("chip", "device_memory", "drive")} | {"tokens_per_step": given["tokens"]}
    if len(loaded) == 3 and isinstance(loaded[2], Mesh | AbstractMesh):
        *loaded, keywords["mesh"] = loaded
    return plan_of(*loaded, **keywords, target=given["compile_for"])


def _pair(target: str, loaded: Any, wanted: str) -> Any:
    if not isinstance(loaded, tuple | list) or len(loaded) < 2:
        raise ValueError(f"{target}: expected {wanted}; got a {type(loaded).__name__}.")
    return loaded


def load(target: str) -> Any:
    """What the function ``module:function`` returns; modules of the working directory are found too."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target}: expected module:function.")
    sys.path.insert(0, "")
    with _of_theirs(target):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # one that it imports
                raise
            raise click.BadParameter(f"{target}: {error}") from error
    if not callable(function := getattr(found, name, None)):
        has = f"has a {type(function).__name__} of that name" if hasattr(found, name) else "has nothing of that name"
        raise ValueError(f"{target}: expected a function without arguments; {module} {has}.")
    with _of_theirs(target):
        return function()


@contextlib.contextmanager
def _of_theirs(target: str) -> Iterator[None]:
    """What their code raises is told with its traceback, and is not taken for an error of an option."""
    try:
        yield
    except click.ClickException:
        raise
    except Exception as error:
        traceback.print_exception(error)
        click.echo(f"jax-offload: {target} raises {type(error).__name__}: {error}", err=True)
        raise SystemExit(RAISES) from error


def show(forecast: Forecast) -> None:
    console = Console(highlight=False)
    chosen = [option.name for option in forecast.options if option is forecast.recommended]
    for header, *body in filter(None, (rows(forecast), tiers(forecast))):
        table = Table(*header, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for cells in body:
            table.add_row(*cells, style="bold" if cells[0] in chosen else None)
        console.print(table)
    for sentence in sentences(forecast):
        console.print(sentence, markup=False)
    if forecast.recommended is not None:
        console.print(
            heading(forecast), *forecast.recommended.code.split("; "), sep="\n  ", markup=False, soft_wrap=True
        )


commands = click.Group(
    "jax-offload",
    commands=[plan, inspect, doctor],
    help="Know before a run whether it fits, and see whether this machine can offload.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(__version__, prog_name="jax-offload")(commands)
