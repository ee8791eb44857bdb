"""The forecast of a training step, from its trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_offload._analysis.compiled_ways import (
    DRIVEN,
    ESTIMATED,
    GIVES_UP,
    TURNED,
    Compiler,
    compiled_labels,
    turned_round,
)
from jax_offload._analysis.driven import first_program, in_memory, is_driven, on_files, on_the_device
from jax_offload._analysis.estimated_ways import Traced, rematerialises
from jax_offload._analysis.forecast import Forecast
from jax_offload._analysis.measured import devices_of
from jax_offload._analysis.optimizer import dtype_of
from jax_offload._analysis.option import Option, added
from jax_offload._analysis.resident import on_device, resident
from jax_offload._analysis.setting import Setting, of_the_cores, of_the_disk
from jax_offload._analysis.streams import streams
from jax_offload._analysis.work import all_flops, seconds
from jax_offload._base.around import step_described
from jax_offload._base.jaxprs import jax_fun
from jax_offload._base.on_disk import is_on_disk
from jax_offload._drive.moving import DEPTH
from jax_offload._drive.stages import BEFORE
from jax_offload._emit.find import emitted, updates_in
from jax_offload._emit.region import Update
from jax_offload._files.files import Disk
from jax_offload._interop.jit import Jitted
from jax_offload._interop.pipelined import Pipelined
from jax_offload._peak.donated import donations
from jax_offload._peak.sharded import division_of, gathered_ahead
from jax_offload._report.callables import unwrapped
from jax_offload._report.report import traced
from jax_offload._step.rewritten import rewritten

LABELS = (("host, each way, window", "exact"), ("peak, activations, hidden, added", "estimated, from the trace"))
RESIDENT = "the inner optimizer, without offload; step = jax.jit(step, donate_argnums=...)"
OWN, (AHEAD, PENDING) = "jo.jit", TURNED
DEVICE_WAYS = "jax.jit", OWN
SOLVES = (
    "plan(make, tx) solves for the smallest fraction and the largest window that fit, where make(tx) makes the step"
)


def of_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    setting: Setting,
    target: str | None = None,
    named: Mapping[str, Any] | None = None,
) -> Forecast:
    """With its state on the device, under ``jax.jit``, under ``jo.jit`` and, where gradients are clipped by their norm
    or what is given is, pipelined.

    ``target``: a chip to compile these for. ``named``: keyword arguments of the step.
    """
    given = step.step if isinstance(step, Pipelined) else step
    base = given.__wrapped__ if isinstance(given, Jitted) else unwrapped(given)
    if named:
        base, args = _by_position(base), (*args, dict(named))
    with step_described():
        (drives, depth, commit_every), args = _disk(args), in_memory(args)
        leaves = [x for x in jax.tree.leaves(args) if hasattr(x, "dtype")]
        plain = traced(base, *args)
        driven = plain if is_driven(plain) else None
        if driven is None:
            own = traced(rewritten(base), *args)
        else:
            plain = on_the_device(plain)
            own = traced(rewritten(jax_fun(plain)), *leaves)
    setting = dataclasses.replace(
        setting, devices=devices_of(leaves), dtype=dtype_of(leaves), drives=drives, commit_every=commit_every
    )
    found = updates_in(plain)
    if not any(p for each in found for p in each.update.planned):
        raise ValueError(
            "step: no update of an offload(...) in it loads anything from the host. Give a step that calls tx.update "
            "or jo.update_params of tx = jo.offload(inner), with a state from jo.abstract_state(tx, params). Of a "
            "small model everything stays on the device: min_bytes=0 moves that too."
        )
    shards = setting.devices[0]
    if setting.chip is not None:
        work = seconds(emitted(plain).jaxpr, setting.chip) / shards
        setting = dataclasses.replace(setting, seconds=work)
    flops = all_flops(emitted(plain).jaxpr)
    if setting.tokens:
        setting = dataclasses.replace(setting, flops_per_token=flops / setting.tokens)
    gradients = _gradients(found)
    division = division_of(leaves, gradients, shards)
    of_this = Traced(leaves, gradients, setting, shards, division, rematerialises(plain.jaxpr))
    there, at_home = on_device(leaves, gradients), resident(plain, gradients)
    here = dataclasses.replace(of_this, leaves=there, division=division_of(there, gradients, shards))
    options = [
        here.option("resident", RESIDENT, traced(at_home, *there)),
        of_this.option("jax.jit", "step = jax.jit(step, donate_argnums=...)", plain),
        of_this.option(OWN, "step = jo.jit(step, donate_argnums=...)", own),
    ]
    if streams(plain).norm or isinstance(step, Pipelined):
        trains = {} if setting.chip is None else turned_round(step, base, args, plain, both=True)
        traces = {name: _turned(train, args) for name, train in trains.items()}
        for name, more in (AHEAD, ""), (PENDING, ', gradients="host"'):
            code, own = f"step = jo.pipelined(step, donate_argnames=...{more})", traces.get(name)
            options.append(of_this.option(name, code, plain, ahead=True, pending=name == PENDING, turned=own))
    first, starts = None, list[str]()
    if driven is not None:
        given_away = donations(emitted(plain).jaxpr, len(leaves))
        moved, filed = streams(driven, setting.devices[1]), on_files(args, driven)
        moved = dataclasses.replace(moved, files=dataclasses.replace(moved.files, depth=depth))
        with step_described():
            own = traced(base, *filed) if moved.files.groups else driven
        arrays = [x for x in jax.tree.leaves(filed) if hasattr(x, "dtype")]
        first = first_program(own, arrays, given_away, leaves, setting.rounds)
        options.insert(1, of_this.driven("step = jo.jit(step, donate_argnums=...)", moved, first, given_away))
        starts += [first.starts] if moved.cores.dram or moved.files.groups else []
    notes = ["every argument that a result is like counts as donated"]
    if driven is not None:
        notes.append(
            f"the peak of {DRIVEN!r} is that of {BEFORE!r}, the first of its programs, or of a group where that is "
            f"more, and its time a model's; {' and '.join(DEVICE_WAYS)} are of the same step without update_on and disk"
        )
        notes += [
            *starts,
            *of_the_cores(options, setting, first is not None and first.uncut),
            *of_the_disk(options, setting),
        ]
    if target is not None:
        turned = turned_round(step, base, args, plain)
        compiler = Compiler(target, plain, leaves, at_home, there, setting, turned, args, bool(named), first)
        compiled_rows = [compiler.row(option) for option in options]
        if left := [each.name for each in options if not compiler.compiles(each.name)]:
            verb = "is" if len(left) == 1 else "are"
            notes.append(
                f"{' and '.join(left)} {verb} estimated: give what jo.pipelined returned, and it is compiled too"
            )
        notes += [o.why_not for o in compiled_rows if GIVES_UP in o.why_not or ESTIMATED in o.why_not]
        notes += _solves(compiled_rows, setting)
        return setting.forecast(compiled_rows, notes=tuple(notes), labels=compiled_labels(target))
    notes += _solves(options, setting)
    if setting.chip is not None:
        given = "" if setting.tokens else ", where tokens_per_step is given"
        notes.append(
            f"hidden from how many tokens on: a pipelined row tells it{given}; of others the first load never is"
        )
    notes.append("XLA may put off what would free memory, so the peak is a range; wide where layers are in no scan")
    if any("–" in added(option) for option in options):
        notes.append("when a copy begins is XLA's choice, so what is added may be a range: at least with each as early "
                     "as it can be; at most, of updates in a scan, as late as was seen, of others with nothing "
                     "hidden; target= settles it")  # fmt: skip
    if shards > 1:
        notes.append(f"on {shards} devices what has no parameter's shape counts as divided evenly")
        if gathered_ahead(leaves, gradients):
            notes.append("parameters divided along their first axis: a scan over it has XLA gather all of them before, "
                         "which these peaks leave out; divide another axis")  # fmt: skip
    return setting.forecast(options, notes=tuple(notes), labels=LABELS)


def _by_position(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Of its arguments, and a dict of those with names as the last one."""
    return lambda *args: fun(*args[:-1], **args[-1])


def _turned(train: Pipelined, args: Sequence[Any]) -> Any:
    """The trace of a turned step; ``None`` where it cannot be turned round."""
    try:
        it, given, _ = train.turned(*args)
        with step_described():
            return traced(it.whole_step, *given)
    except (TypeError, ValueError):
        return None


def _solves(options: Sequence[Option], setting: Setting) -> list[str]:
    return [SOLVES] if setting.memory is not None and not options[0].fits else []


def _disk(args: Any) -> tuple[int, int, int]:
    """Over how many drives a state on disk is spread, a directory taken for one; its depth, and how often it is
    committed. An abstract state does not tell."""
    homes = [x.place.home for x in jax.tree.leaves(args, is_leaf=is_on_disk) if is_on_disk(x)]
    home = next((home for home in homes if isinstance(home, Disk)), None)
    return (1, DEPTH, 1) if home is None else (len(home.directories), home.depth, home.commit_every)


def _gradients(found: Sequence[Any]) -> list[Any]:
    updates = [each.update for each in found if isinstance(each.update, Update)]
    return [update.operands[i].aval for update in updates for i in update.gradients]
