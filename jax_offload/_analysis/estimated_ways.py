"""The rows of a step's forecast, estimated from its trace."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jax_offload._analysis import exposure
from jax_offload._analysis.chips import Chip
from jax_offload._analysis.compiled_ways import DRIVEN
from jax_offload._analysis.driven import First
from jax_offload._analysis.exposure import BACKWARD, FORWARD
from jax_offload._analysis.option import Option
from jax_offload._analysis.queued import as_gated, in_pieces, through_the_window
from jax_offload._analysis.scanned import first_rows, hidden_at, in_scans
from jax_offload._analysis.setting import Setting, priced
from jax_offload._analysis.streams import Streams, streams
from jax_offload._analysis.work import all_flops, seconds
from jax_offload._base.arrays import nbytes
from jax_offload._base.memory import HOST_KIND, on_host
from jax_offload._base.shardings import sharding_of, shards_of
from jax_offload._emit.find import emitted, updates_in
from jax_offload._emit.region import Moved
from jax_offload._peak.donated import donations
from jax_offload._peak.flattened import flattened, loop_of
from jax_offload._peak.liveness import peak
from jax_offload._peak.sharded import ALONE, Division, collectives
from jax_offload._plan.in_scan import InScan
from jax_offload._report.report import traced

# What XLA's scheduler puts off where the layers are not in one scan: the most that was seen above the estimate
# (docs/should_i_offload.md has the table).
UNROLLED = 1.35
# And the most that was seen below it, 9 % (24 layers on four devices: 1664 MiB, 1832 estimated; docs/estimates.md).
BELOW = 0.9
# The same of layers in one scan: of what an iteration needs beside its carry, where its matmuls wait for each other as
# little (GPT 2.7B: 23968 MiB, 22934 estimated with 1657 of that; a Llama's attention 11535, and 9474 with 3414), and
# below (24 layers clipped outside: 4616 MiB, 4744 estimated).
ITERATION, BELOW_SCANNED = 0.65, 0.97
# A TPU fuses what is elementwise into matmuls, and has some arrays in the memory of its cores: of what an iteration
# needs the most by which it was less (24 layers, a v5e: 7808 MiB, 8256 estimated with 832 of that).
FUSED = 0.55
SCANNED = 0.5  # of a step's operations in its two largest scans: one forward, one backward


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step's arguments, and the types of its gradients."""

    leaves: Sequence[Any]
    gradients: Sequence[Any]
    setting: Setting
    shards: int
    division: Division
    rematerialised: bool

    def option(
        self, name: str, code: str, trace: Any, *, ahead: bool = False, pending: bool = False, turned: Any = None
    ) -> Option:  # fmt: skip
        """``turned``: the trace of the turned step, of which the time is that."""
        moved, program = streams(trace), emitted(trace).jaxpr
        kept = 0 if turned is None else sum(map(first_rows, _scans(turned)))
        moved = dataclasses.replace(moved, window=moved.window + kept)
        given = donations(program, len(program.invars))
        parameters, state, host = self._arguments(given)
        own = [0 if is_hosted(x) else _own(x) for x in self.leaves]
        fused, estimated, in_order = (n + kept for n in self._peaks(program, given, own))
        # XLA may scatter many gradients at once, and hold them whole until then
        put_together = sum(nbytes(x) - self.division.own(x) for x in self.gradients) if self.shards > 1 else 0
        most = in_order if in_one_scan(program) else max(in_order, int(UNROLLED * estimated)) + put_together
        gradients = sum(map(self.division.own, self.gradients))
        if moved.inside:
            gradients = max(0, gradients - moved.inside)  # those that are made and used in a scan never exist together
        rest = estimated - parameters - state - moved.window - gradients
        gradients, rest = max(0, gradients + min(0, rest)), max(0, rest)
        away = gradients if pending else 0  # they wait on the host
        least = estimated - away
        below = BELOW_SCANNED if in_one_scan(program) else BELOW
        least = max(parameters + state, min(fused - away, int(below * least)))
        option = Option(
            name, code, parameters, gradients - away, state, moved.window, rest, estimated - away,
            (least, most - away), host + away, moved.loaded + away, moved.stored + away,
        )  # fmt: skip
        option = priced(option, self.setting, 0.0)
        chip, compute = self.setting.chip, self.setting.compute
        if chip is None or compute is None or not option.link:
            return option
        moved = dataclasses.replace(moved, loaded=option.loaded, stored=option.stored)
        if turned is not None and any(isinstance(each.update, Moved) for each in updates_in(turned)):
            exposed, most = self._exposed(turned, emitted(turned).jaxpr, streams(turned), chip, compute, False)
            times, tokens = hidden_at(_scans(turned), exposure.link_of(chip), chip, self.shards), self.setting.tokens
            start = None if times is None or tokens is None else math.ceil(times * tokens)
        else:
            exposed, most = self._exposed(trace, program, moved, chip, compute, ahead)
            start = self._hidden_from(trace, program, moved, chip, compute) if ahead else None
        return dataclasses.replace(
            option, exposed=exposed, overhead=exposed / compute, exposed_range=(exposed, most),
            overhead_range=(exposed / compute, most / compute), hidden=max(0.0, 1 - exposed / option.link),
            hidden_from=start,
        )  # fmt: skip

    def driven(self, code: str, moved: Streams, first: First, donated: Sequence[bool]) -> Option:
        """A step of whose update the host's cores make a part, by its first program."""
        inner = traced(first.jitted.__wrapped__, *first.args)
        given = [k < len(first.args[0]) for k in range(len(inner.jaxpr.invars))]
        beside = sum(_own(x) for x in first.elsewhere.values() if not is_hosted(x))
        scanned = in_one_scan(inner.jaxpr)
        fused, estimated, in_order = (n + beside for n in self._peaks(inner.jaxpr, given, None))
        most = in_order if scanned else max(in_order, int(UNROLLED * estimated))
        parameters, state, host = self._arguments(donated)
        least = max(parameters + state, min(fused, int((BELOW_SCANNED if scanned else BELOW) * estimated)))
        rest = max(0, estimated - parameters - state)
        gradients = min(rest, sum(map(self.division.own, self.gradients)))
        cores, files = moved.cores, moved.files
        # a group has no activations beside it, but all gradients; and its part of the state
        group = parameters + sum(map(self.division.own, self.gradients)) + state + files.window if files.groups else 0
        least, estimated, most = (max(n, group) for n in (least, estimated, most))
        option = Option(
            DRIVEN, code, parameters, gradients, state, files.window, rest - gradients, estimated, (least, most),
            host + cores.gradients - files.read + files.buffers, moved.loaded + cores.up,
            moved.stored + cores.gradients + cores.down, disk=files.read, read=files.read, written=files.written,
            buffers=files.buffers,
        )  # fmt: skip
        # the gradient of stacked layers is one array, which goes down when the scan is over
        return priced(option, self.setting, 0.0 if scanned else BACKWARD, cores, files, first.cut)

    def _peaks(self, program: Any, given: Sequence[bool], own: Sequence[int] | None) -> tuple[int, int, int]:
        """With as much fused as was seen; with each operation as early as it can be; and in the order of the trace, or,
        of layers in one scan, with as much more in an iteration as was seen: there too XLA puts off what would free
        memory."""
        scanned, division = in_one_scan(program), self.division if own else ALONE
        find = partial(peak, program, given, division=division, own=own, rounds=self.setting.rounds)
        early = find(early=True)
        least = find(early=True, slack=-FUSED) if scanned and self.setting.rounds else early
        return least, early, find(early=scanned, slack=ITERATION if scanned else 0.0)

    def _exposed(
        self, trace: Any, program: Any, moved: Streams, chip: Chip, compute: float, ahead: bool
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds, at least and at most. What moves inside a scan is hidden behind that; the rest behind a part of the
        step, or nothing, and where XLA's scheduler alone says when, behind nothing at most.

        Behind the updates themselves nothing is: they read what has come, and make what is to go. Nor is what nothing
        goes the other way with: of a loop its first chunk and its last.
        """
        link = exposure.link_of(chip)
        looped, unpaired = (0, 0) if ahead else (moved.looped, moved.unpaired)
        paired = looped - unpaired
        alone = link.seconds(paired, paired) + link.one_after_the_other(unpaired, unpaired)
        found = [each.update for each in updates_in(trace)]
        scans = _scans(trace)
        gathered, reduced = (
            n / chip.reached.interconnect for n in collectives(self.leaves, self.gradients, self.shards)
        )
        # in a scan a row's update waits for its gradient's reduction, which so hides nothing
        beside = gathered / max(1, sum(plan.scan.length for plan in scans))
        inside, late = in_scans(scans, link, chip, self.shards, beside)
        rest = moved.inside + looped
        outside = link.seconds(moved.loaded - rest, max(0, moved.stored - rest))
        own = self._of_updates(trace, chip)
        scanned = in_one_scan(program)
        share = forward_share(program, self.rematerialised) if ahead else 0.0 if moved.norm or scanned else BACKWARD
        last = 0.0 if ahead or not share else moved.tail / link.store
        behind = share * max(0.0, compute - own) + (0.0 if ahead or not share else gathered + reduced)
        left = max(0.0, outside - behind) + last
        if self.shards == 1 and not ahead and (queued := in_pieces(trace.jaxpr, chip, link)) is not None:
            least = max(alone + inside + left, queued)
            return least, least  # gates say when
        if ahead or not share:
            return alone + inside + left, alone + late + left
        if self.shards == 1:
            left = max(left, as_gated(trace.jaxpr, chip, link))
        return alone + inside + left, alone + late + max(left, through_the_window(found, link))

    def _of_updates(self, trace: Any, chip: Chip) -> float:
        """Seconds of the updates' own arithmetic, which reads what has come."""
        planned = (p for each in updates_in(trace) for p in each.update.planned)
        return sum(seconds(p.slice.jaxpr, chip) for p in planned) / self.shards

    def _hidden_from(self, trace: Any, program: Any, moved: Streams, chip: Chip, compute: float) -> int | None:
        """The tokens per step from which the forward pass of the next batch hides all transfers, where its arithmetic
        grows with them, and that of the update does not. Of the other ways a part is never hidden."""
        if not self.setting.tokens:
            return None
        link, own = exposure.link_of(chip).seconds(moved.loaded, moved.stored), self._of_updates(trace, chip)
        hides = forward_share(program, self.rematerialised) * (compute - own)
        return math.ceil(self.setting.tokens * link / hides) if hides > 0 else None

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


def _scans(trace: Any) -> list[InScan]:
    """Those with updates inside."""
    parts = [each.update for each in updates_in(trace) if isinstance(each.update, Moved)]
    return [part.plan for part in parts if isinstance(part.plan, InScan)]


def _own(x: Any) -> int:
    return nbytes(x) // math.prod(shards_of(sharding_of(x), np.shape(x)))


def is_hosted(x: Any) -> bool:
    """Whether an argument is in host memory, or will be."""
    return on_host(x) or getattr(sharding_of(x), "memory_kind", None) == HOST_KIND


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


def rematerialises(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in ("checkpoint", "remat2", "remat") for eqn in jaxpr.eqns)
