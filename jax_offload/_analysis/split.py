"""How much of an update the host's cores take, where they and the device do it together: by the model of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax_offload._analysis.on_cores import Share
from jax_offload._analysis.streams import Streams

PARTS = 20  # shares are multiples of a 20th: leaves go whole, and rates are not known better
WORTH = 0.02  # of the better of both alone, that a split has to spare to be a way of its own


def best_share(device: Streams, cores: Streams, seconds: Callable[[Streams], float | None]) -> float | None:
    """The cores' share with which a step takes least; ``None`` where one of both alone does as well, or is all that is
    known.

    The device's share streams while the cores do theirs, and behind nothing else; so it is where both end together.

    Args:
      device: what moves where the device updates all.
      cores: what moves where the host's cores do.
      seconds: that an update adds to a step.
    """
    added = [seconds(between(device, cores, k / PARTS)) for k in range(PARTS + 1)]
    alone = seconds(device), seconds(cores)
    if any(each is None for each in (*added, *alone)):
        return None
    times = [each for each in added if each is not None]
    k = min(range(PARTS + 1), key=times.__getitem__)
    least = min(each for each in alone if each is not None)
    return k / PARTS if 0 < k < PARTS and times[k] < (1 - WORTH) * least else None


def between(device: Streams, cores: Streams, share: float) -> Streams:
    """What moves where the cores update a share, by the bytes."""
    scaled = {f.name: int(share * getattr(cores.cores, f.name)) for f in dataclasses.fields(Share)}
    scaled["last"] = min(cores.cores.last, scaled["up"])  # a group's, however many there are
    return dataclasses.replace(
        device,
        loaded=int((1 - share) * device.loaded),
        stored=int((1 - share) * device.stored),
        cores=Share(**scaled),
    )
