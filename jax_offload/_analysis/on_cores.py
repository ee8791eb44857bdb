"""What the host's cores take for their share of an update, as it is built today: bytes, and a model of the time.

``docs/host_or_device.md`` has the measurements. Gradients go down beside the backward pass, the cores begin when those
of its first program are there, parameters come up while the next group is updated, and the device's own share runs
meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax_offload._analysis.exposure import Link
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._drive.cores import has_numba, is_sent
from jax_offload._drive.kernel import kernel_of
from jax_offload._drive.stages import GROUP_BYTES
from jax_offload._drive.tasks import WRITABLE
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import OnCores, Planned

# What XLA's CPU code reads and writes of AdamW's arrays, in three passes, beside one pass over them: that of a group
# of which all slices are loops, where numba compiles them.
PASSES = 40 / 28
# Beside an accelerator the leaves that XLA's programs make are new buffers, and are copied into pinned ones: written,
# read, and written again. Loops write donated leaves in place.
COPIES = 3


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of a step's update that the cores make, for each accelerator.

    Attributes:
      loaded, stored: of the state, read and written where it is.
      gradients: that go down.
      down: what else does: parameters.
      up: what goes to the device: new parameters.
      last: of that, what the last group of slices makes, which comes up alone.
      worked: that the update itself reads and writes, in all of its passes. What is the same on all accelerators of a
        host is updated once for them.
      unlooped: of that, what is no loop of elements: its leaves are taken whole, which only one process can.
      copied: of the new state, what is no loop's and comes into pinned memory by a copy.
      assembled: of what is worked, what is put together of the accelerators' parts before, and divided again after.
    """

    loaded: int = 0
    stored: int = 0
    gradients: int = 0
    down: int = 0
    up: int = 0
    last: int = 0
    worked: int = 0
    unlooped: int = 0
    copied: int = 0
    assembled: int = 0

    @property
    def dram(self) -> int:
        """Bytes through the host's memory: of donated AdamW in float32 40 for each parameter, 76 in XLA's passes."""
        return self.worked + 2 * self.assembled + self.gradients + self.down + self.up + COPIES * self.copied

    def on(self, platform: str) -> Share:
        """The same beside accelerators of a platform: where loops cannot write pinned memory, a TPU's, all of the new
        state comes into it by a copy. Of AdamW 64 bytes for each parameter."""
        return self if platform in WRITABLE else dataclasses.replace(self, copied=self.stored)

    def exposed(
        self, link: Link, dram: float, hides: float, loaded: int, stored: int, beside: float = 0.0
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds that are added to a step; and of those, in which the link is waited for.

        Args:
          link: to the host.
          dram: bytes per second that the cores reach.
          hides: seconds of the backward pass, beside which gradients go down.
          loaded: bytes that come up in all, the device's own share of the state too.
          stored: bytes that go down in all.
          beside: seconds that the cores are at it while the pass still goes on.
        """
        late = max(0.0, self.gradients / link.store - hides)
        meanwhile = link.seconds(loaded, stored - self.gradients)
        cores = self.dram / dram - beside
        waits = late + max(0.0, meanwhile - cores) + self.last / link.load
        return waits + cores, waits


NONE = Share()


def share_of(planned: Iterable[Planned], gradients: Iterable[Var], on_a_host: int = 1) -> Share:
    """Of the slices that the cores run.

    Args:
      gradients: the variables that are.
      on_a_host: how many accelerators have the same cores.
    """
    on_cores, defined = [p for p in planned if isinstance(p.transfer, OnCores)], {*gradients}
    own, groups = [p.slice for p in on_cores], [[p.slice for p in group] for group in grouped(on_cores)]
    read = {v: _own(v, s) for s in own for v in s.inputs if not is_host_aval(v.aval) and is_sent(v.aval)}
    return Share(
        loaded=sum(s.loaded_bytes for s in own),
        stored=sum(map(_stored, own)),
        gradients=sum(n for v, n in read.items() if v in defined),
        down=sum(n for v, n in read.items() if v not in defined),
        up=sum(map(_up, own)),
        last=sum(map(_up, groups[-1])) if groups else 0,
        worked=sum(_worked(group, on_a_host) for group in groups),
        unlooped=sum(_moved(s) for s in own if not _is_loop(s)),
        copied=sum(_stored(s) for group in groups if not all(map(_is_loop, group)) for s in group),
        assembled=sum(_moved(s) for s in own if not _is_loop(s) and _parts(s) > 1),
    )


def grouped(planned: Iterable[Planned]) -> list[list[Planned]]:
    """Those that are one program, as ``_drive.stages`` makes them."""
    groups: list[list[Planned]] = []
    size = GROUP_BYTES
    for p in planned:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.slice.loaded_bytes
    return groups


def _own(v: Var, s: Slice) -> int:
    """What an accelerator has of an operand."""
    return nbytes(v.aval) // math.prod(s.shards.get(v, ()))


def _parts(s: Slice) -> int:
    """Into how many a slice's leaves are divided, the furthest: what is made of them is divided so too."""
    return max((math.prod(s.shards.get(v, ())) for v in s.inputs), default=1)


def _worked(group: Sequence[Slice], on_a_host: int) -> int:
    once = sum(_moved(s) * _parts(s) // max(_parts(s), on_a_host) for s in group)
    return once if all(map(_is_loop, group)) else int(PASSES * once)


def _moved(s: Slice) -> int:
    """What a pass over a slice's parts reads and writes."""
    parts, down = _parts(s), (v for v in {*s.inputs} if not is_host_aval(v.aval) and is_sent(v.aval))
    return s.loaded_bytes + sum(nbytes(v.aval) for v in down) // parts + _stored(s) + _up(s)


def _is_loop(s: Slice) -> bool:
    return has_numba() and kernel_of(s.jaxpr, {}) is not None


def _stored(s: Slice) -> int:
    return sum(nbytes(v.aval) for v in s.outputs if is_host_aval(v.aval)) // _parts(s)


def _up(s: Slice) -> int:
    return sum(nbytes(v.aval) for v in s.outputs if not is_host_aval(v.aval) and is_sent(v.aval)) // _parts(s)
