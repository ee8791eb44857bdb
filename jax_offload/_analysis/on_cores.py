"""What the host's cores take for their share of an update, as it is built today: bytes, and a model of the time.

``docs/host_or_device.md`` has the measurements. Gradients go down beside the backward pass, the cores begin when the
last one is there, parameters come up while the next group is updated, and the device's own share runs meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jax_offload._analysis.exposure import Link
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._drive.cores import is_sent
from jax_offload._drive.stages import GROUP_BYTES
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import OnCores, Planned

# What XLA's CPU code reads and writes of AdamW's arrays, in three passes, beside one pass over them.
PASSES = 40 / 28
# Beside an accelerator new leaves are new buffers, and are copied into pinned ones: written, read, and written again.
COPIES = 3


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of a step's update that the cores make.

    Attributes:
      loaded, stored: of the state, read and written where it is.
      gradients: that go down.
      down: what else does: parameters.
      up: what goes to the device: new parameters.
      last: of that, what the last group of slices makes, which comes up alone.
    """

    loaded: int = 0
    stored: int = 0
    gradients: int = 0
    down: int = 0
    up: int = 0
    last: int = 0

    @property
    def dram(self) -> int:
        """Bytes through the host's memory: of AdamW in float32 76 for each parameter."""
        crossing = self.gradients + self.down + self.up
        return int(PASSES * (self.loaded + self.stored + crossing)) + crossing + COPIES * self.stored

    def exposed(self, link: Link, dram: float, hides: float, loaded: int, stored: int) -> tuple[float, float]:
        """Seconds that are added to a step; and of those, in which the link is waited for.

        Args:
          link: to the host.
          dram: bytes per second that the cores reach.
          hides: seconds of the backward pass, beside which gradients go down.
          loaded: bytes that come up in all, the device's own share of the state too.
          stored: bytes that go down in all.
        """
        late = max(0.0, self.gradients / link.store - hides)
        meanwhile = link.seconds(loaded, stored - self.gradients)
        cores = self.dram / dram
        waits = late + max(0.0, meanwhile - cores) + self.last / link.load
        return waits + cores, waits


NONE = Share()


def share_of(planned: Iterable[Planned], gradients: Iterable[Var]) -> Share:
    """Of the slices that the cores run. ``gradients``: the variables that are."""
    own, made = [p.slice for p in planned if isinstance(p.transfer, OnCores)], {*gradients}
    read = {v for s in own for v in s.inputs if not is_host_aval(v.aval) and is_sent(v.aval)}
    results = [v for s in own for v in s.outputs]
    return Share(
        loaded=sum(s.loaded_bytes for s in own),
        stored=sum(nbytes(v.aval) for v in results if is_host_aval(v.aval)),
        gradients=sum(nbytes(v.aval) for v in read & made),
        down=sum(nbytes(v.aval) for v in read - made),
        up=sum(map(_up, own)),
        last=_last(own),
    )


def _up(s: Slice) -> int:
    return sum(nbytes(v.aval) for v in s.outputs if not is_host_aval(v.aval) and is_sent(v.aval))


def _last(own: Iterable[Slice]) -> int:
    """Of the last group, as ``_drive.stages`` makes them."""
    size = up = last = 0
    for s in own:
        size, up = size + s.loaded_bytes, up + _up(s)
        last = up
        if size >= GROUP_BYTES:
            size = up = 0
    return last
