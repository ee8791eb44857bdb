"""The forecast of a training step, from its trace."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_offload._analysis import exposure
from jax_offload._analysis.chips import Chip
from jax_offload._analysis.compiled_ways import DRIVEN, ESTIMATED, GIVES_UP, Compiler, compiled_labels, turned_round
from jax_offload._analysis.driven import First, first_program, in_memory, is_driven, on_files, on_the_device
from jax_offload._analysis.exposure import BACKWARD, FORWARD
from jax_offload._analysis.forecast import Forecast
from jax_offload._analysis.measured import devices_of
from jax_offload._analysis.optimizer import dtype_of
from jax_offload._analysis.option import Option
from jax_offload._analysis.queued import in_pieces
from jax_offload._analysis.resident import on_device, resident
from jax_offload._analysis.scanned import in_a_scan
from jax_offload._analysis.setting import Setting, of_the_cores, of_the_disk, priced
from jax_offload._analysis.streams import Streams, streams
from jax_offload._analysis.work import all_flops, seconds
from jax_offload._base.around import step_described
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import jax_fun
from jax_offload._base.memory import HOST_KIND, on_host
from jax_offload._base.on_disk import is_on_disk
from jax_offload._base.shardings import sharding_of, shards_of
from jax_offload._drive.stages import BEFORE
from jax_offload._emit.find import emitted, updates_in
from jax_offload._emit.region import Moved, Update
from jax_offload._interop.jit import Jitted
from jax_offload._interop.pipelined import Pipelined
from jax_offload._peak.donated import donations
from jax_offload._peak.flattened import flattened, loop_of
from jax_offload._peak.liveness import peak
from jax_offload._peak.sharded import Division, collectives, division_of, gathered_ahead
from jax_offload._plan.in_scan import InScan
from jax_offload._report.report import traced, unwrapped
from jax_offload._step.rewritten import rewritten

LABELS = (("host, each way, window", "exact"), ("peak, activations, hidden, added", "estimated, from the trace"))
# What XLA's scheduler puts off where the layers are not in one scan: the most that was seen above the estimate
# (docs/should_i_offload.md has the table).
UNROLLED = 1.35
RESIDENT = "the inner optimizer, without offload; step = jax.jit(step, donate_argnums=...)"
OWN, AHEAD = "jo.jit", "jo.pipelined"
DEVICE_WAYS = "jax.jit", OWN
SCANNED = 0.5  # of a step's operations in its two largest scans: one forward, one backward


def of_step(step: Callable[..., Any], args: Sequence[Any], setting: Setting, target: str | None = None) -> Forecast:
    """With its state on the device, under ``jax.jit``, under ``jo.jit`` and, where gradients are clipped by their norm,
    pipelined.

    ``target``: a chip to compile these for.
    """
    given = step.step if isinstance(step, Pipelined) else step
    base = given.__wrapped__ if isinstance(given, Jitted) else unwrapped(given)
    with step_described():
        drives, args = _drives(args), in_memory(args)
        leaves = [x for x in jax.tree.leaves(args) if hasattr(x, "dtype")]
        plain = traced(base, *args)
        driven = plain if is_driven(plain) else None
        if driven is None:
            own = traced(rewritten(base), *args)
        else:
            plain = on_the_device(plain)
            own = traced(rewritten(jax_fun(plain)), *leaves)
    setting = dataclasses.replace(setting, devices=devices_of(leaves), dtype=dtype_of(leaves), drives=drives)
    found = updates_in(plain)
    if not any(p for each in found for p in each.update.planned):
        raise ValueError(
            "step: no update of an offload(...) in it loads anything from the host. Give a step that calls tx.update "
            "or jo.update_params of tx = jo.offload(inner), with a state from jo.abstract_state(tx, params)."
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
    of_this = _Traced(leaves, gradients, setting, shards, division, _rematerialises(plain.jaxpr))
    there, at_home = on_device(leaves, gradients), resident(plain, gradients)
    here = dataclasses.replace(of_this, leaves=there, division=division_of(there, gradients, shards))
    options = [
        here.option("resident", RESIDENT, traced(at_home, *there)),
        of_this.option("jax.jit", "step = jax.jit(step, donate_argnums=...)", plain),
        of_this.option(OWN, "step = jo.jit(step, donate_argnums=...)", own),
    ]
    if streams(plain).norm:
        code = "step = jo.pipelined(step, donate_argnames=...)"
        options.append(of_this.option(AHEAD, code, plain, ahead=True))
        code = 'step = jo.pipelined(step, donate_argnames=..., gradients="host")'
        options.append(of_this.option("gradients too", code, plain, ahead=True, pending=True))
    first, starts = None, list[str]()
    if driven is not None:
        given_away = donations(emitted(plain).jaxpr, len(leaves))
        moved, filed = streams(driven, setting.devices[1]), on_files(args, driven)
        with step_described():
            own = traced(base, *filed) if moved.files.groups else driven
        first = first_program(own, [x for x in jax.tree.leaves(filed) if hasattr(x, "dtype")], given_away, leaves)
        options.insert(1, of_this.driven("step = jo.jit(step, donate_argnums=...)", moved, first, given_away))
        starts += [first.starts] if moved.cores.dram or moved.files.groups else []
    notes = ["every argument that a result is like counts as donated"]
    if driven is not None:
        notes.append(
            f"the peak of {DRIVEN!r} is that of {BEFORE!r}, the first of its programs, or of a group where that is "
            f"more, and its time a model's; {' and '.join(DEVICE_WAYS)} are of the same step without update_on and disk"
        )
        notes += [*starts, *of_the_cores(options, setting), *of_the_disk(options, setting)]
    if target is not None:
        turned = turned_round(step, base, args, plain)
        compiler = Compiler(target, plain, leaves, at_home, there, setting, turned, args, first)
        compiled_rows = [compiler.row(option) for option in options]
        if left := [each.name for each in options if not compiler.compiles(each.name)]:
            verb = "is" if len(left) == 1 else "are"
            notes.append(
                f"{' and '.join(left)} {verb} estimated: give what jo.pipelined returned, and it is compiled too"
            )
        notes += [o.why_not for o in compiled_rows if GIVES_UP in o.why_not or ESTIMATED in o.why_not]
        return setting.forecast(compiled_rows, notes=tuple(notes), labels=compiled_labels(target))
    if options[1].peak_range[0] < options[1].peak_range[1]:
        notes.append("layers that are not in one scan: XLA may put off what would free memory, so the peak is a range, "
                     "and begin loads late, so what is added is the least")  # fmt: skip
    if shards > 1:
        notes.append(f"on {shards} devices what has no parameter's shape counts as divided evenly")
        if gathered_ahead(leaves, gradients):
            notes.append("parameters divided along their first axis: a scan over it has XLA gather all of them before, "
                         "which these peaks leave out; divide another axis")  # fmt: skip
    return setting.forecast(options, notes=tuple(notes), labels=LABELS)


def _drives(args: Any) -> int:
    """Over how many drives a state on disk is spread: a directory is taken for one."""
    homes = {x.place.home for x in jax.tree.leaves(args, is_leaf=is_on_disk) if is_on_disk(x)}
    return max((len(getattr(home, "directories", ())) for home in homes), default=0) or 1


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A step's arguments, and the types of its gradients."""

    leaves: Sequence[Any]
    gradients: Sequence[Any]
    setting: Setting
    shards: int
    division: Division
    rematerialised: bool

    def option(self, name: str, code: str, trace: Any, *, ahead: bool = False, pending: bool = False) -> Option:
        moved, program = streams(trace), emitted(trace).jaxpr
        given = donations(program, len(program.invars))
        parameters, state, host = self._arguments(given)
        own = [0 if is_hosted(x) else _own(x) for x in self.leaves]
        estimated, in_order = (
            peak(program, given, early=early, division=self.division, own=own) for early in (True, False)
        )
        # XLA may scatter many gradients at once, and hold them whole until then
        put_together = sum(nbytes(x) - self.division.own(x) for x in self.gradients) if self.shards > 1 else 0
        most = estimated if in_one_scan(program) else max(in_order, int(UNROLLED * estimated)) + put_together
        gradients = sum(map(self.division.own, self.gradients))
        if moved.inside:
            gradients = max(0, gradients - moved.inside)  # those that are made and used in a scan never exist together
        rest = estimated - parameters - state - moved.window - gradients
        gradients, rest = max(0, gradients + min(0, rest)), max(0, rest)
        away = gradients if pending else 0  # they wait on the host
        option = Option(
            name, code, parameters, gradients - away, state, moved.window, rest, estimated - away,
            (estimated - away, most - away), host + away, moved.loaded + away, moved.stored + away,
        )  # fmt: skip
        option = priced(option, self.setting, 0.0)
        chip, compute = self.setting.chip, self.setting.compute
        if chip is None or compute is None or not option.link:
            return option
        moved = dataclasses.replace(moved, loaded=option.loaded, stored=option.stored)
        exposed = self._exposed(trace, program, moved, chip, compute, ahead)
        hidden = max(0.0, 1 - exposed / option.link)
        return dataclasses.replace(option, exposed=exposed, overhead=exposed / compute, hidden=hidden, hidden_from=None)

    def driven(self, code: str, moved: Streams, first: First, donated: Sequence[bool]) -> Option:
        """A step of whose update the host's cores make a part, by its first program."""
        inner = traced(first.jitted.__wrapped__, *first.args)
        given = [k < len(first.args[0]) for k in range(len(inner.jaxpr.invars))]
        beside = sum(_own(x) for x in first.elsewhere.values() if not is_hosted(x))
        estimated, in_order = (peak(inner.jaxpr, given, early=early) + beside for early in (True, False))
        scanned = in_one_scan(inner.jaxpr)
        most = estimated if scanned else max(in_order, int(UNROLLED * estimated))
        parameters, state, host = self._arguments(donated)
        rest = max(0, estimated - parameters - state)
        gradients = min(rest, sum(map(self.division.own, self.gradients)))
        cores, files = moved.cores, moved.files
        # a group has no activations beside it, but all gradients; and its part of the state
        group = parameters + sum(map(self.division.own, self.gradients)) + state + files.window if files.groups else 0
        estimated, most = max(estimated, group), max(most, group)
        option = Option(
            DRIVEN, code, parameters, gradients, state, files.window, rest - gradients, estimated, (estimated, most),
            host + cores.gradients - files.read + files.buffers, moved.loaded + cores.up,
            moved.stored + cores.gradients + cores.down, disk=files.read, read=files.read, written=files.written,
            buffers=files.buffers,
        )  # fmt: skip
        # the gradient of stacked layers is one array, which goes down when the scan is over
        return priced(option, self.setting, 0.0 if scanned else BACKWARD, cores, files)

    def _exposed(
        self, trace: Any, program: Any, moved: Streams, chip: Chip, compute: float, ahead: bool
    ) -> float:  # fmt: skip
        """What moves inside a scan is hidden behind that; the rest behind a part of the step, or nothing.

        Behind the updates themselves nothing is: they read what has come, and make what is to go. Nor is what nothing
        goes the other way with: of a loop its first chunk and its last.
        """
        link = exposure.link_of(chip)
        looped, unpaired = (0, 0) if ahead else (moved.looped, moved.unpaired)
        paired = looped - unpaired
        alone = link.seconds(paired, paired) + link.one_after_the_other(unpaired, unpaired)
        found = [each.update for each in updates_in(trace)]
        parts = [update for update in found if isinstance(update, Moved)]
        scans = [part.plan for part in parts if isinstance(part.plan, InScan)]
        gathered, reduced = (
            n / chip.reached.interconnect for n in collectives(self.leaves, self.gradients, self.shards)
        )
        # in a scan a row's update waits for its gradient's reduction, which so hides nothing
        beside = gathered / max(1, sum(plan.scan.length for plan in scans))
        inside = sum(in_a_scan(plan, link, chip, self.shards, beside, first=k == 0) for k, plan in enumerate(scans))
        rest = moved.inside + looped
        outside = link.seconds(moved.loaded - rest, max(0, moved.stored - rest))
        own = sum(seconds(p.slice.jaxpr, chip) for update in found for p in update.planned) / self.shards
        scanned = in_one_scan(program)
        share = forward_share(program, self.rematerialised) if ahead else 0.0 if moved.norm or scanned else BACKWARD
        last = 0.0 if ahead or not share else moved.tail / link.store
        behind = share * max(0.0, compute - own) + (0.0 if ahead or not share else gathered + reduced)
        left = max(0.0, outside - behind) + last
        queued = in_pieces(trace.jaxpr, chip, link) if self.shards == 1 and not ahead else None
        return max(alone + inside + left, queued or 0.0)  # the least, both

    def _arguments(self, donated: Sequence[bool]) -> tuple[int, int, int]:
        """Bytes on one device of parameters, of what else is handed from step to step, and of state on the host."""
        wanted = Counter((tuple(x.shape), str(x.dtype)) for x in self.gradients)
        parameters = state = host = 0
        for x, handed_on in zip(self.leaves, donated, strict=True):
            kind, own = (tuple(np.shape(x)), str(x.dtype)), _own(x)
            if is_hosted(x):
                host += own
            elif wanted[kind] > 0:
                wanted[kind] -= 1
                parameters += own
            elif handed_on:
                state += own
        return parameters, state, host


def _own(x: Any) -> int:
    return nbytes(x) // math.prod(shards_of(sharding_of(x), np.shape(x)))


def is_hosted(x: Any) -> bool:
    """Whether an argument is in host memory, or will be."""
    return on_host(x) or getattr(sharding_of(x), "memory_kind", None) == HOST_KIND


def _gradients(found: Sequence[Any]) -> list[Any]:
    updates = [each.update for each in found if isinstance(each.update, Update)]
    return [update.operands[i].aval for update in updates for i in update.gradients]


def in_one_scan(jaxpr: Any) -> bool:
    """Whether a step's layers are in one scan: one loop forward, one backward, with half of its operations."""
    return sum(_two_scans(jaxpr)) >= max(1.0, SCANNED * all_flops(jaxpr))


def forward_share(jaxpr: Any, rematerialised: bool) -> float:
    """Of a step's operations, that of its forward pass: the smaller one of its scans; or, unrolled, a third, or a
    fourth where the backward pass makes activations anew."""
    if in_one_scan(jaxpr):
        return min(_two_scans(jaxpr)) / all_flops(jaxpr)
    return FORWARD * 3 / 4 if rematerialised else FORWARD


def _two_scans(jaxpr: Any) -> list[float]:
    """Operations of the two largest."""
    loops = (loop_of(node.eqn) for node in flattened(jaxpr).nodes)
    return sorted((all_flops(loop.body) * (loop.length or 1) for loop in loops if loop is not None), reverse=True)[:2]


def _rematerialises(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in ("checkpoint", "remat2", "remat") for eqn in jaxpr.eqns)
