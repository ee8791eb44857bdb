"""What transfers cost: a model of the link and of what hides it, the same for every option.

- A step takes ``compute`` seconds without transfers: its operations, at the speed that large matmuls reach.
- The link alone takes ``link`` seconds: all that goes to the device and all that comes from it at the same time, and
  what is left of the one after the other is through.
- Of that as much is hidden as the part of the step's arithmetic takes beside which the update runs: the backward pass
  (``jo.jit``), which is two thirds of a step without rematerialisation; the forward pass (``jo.pipelined``), a third;
  nothing, where the update waits for a norm of all gradients.
- The rest is added to the step. No latency, no contention for device memory, no launches.
"""

from __future__ import annotations

import dataclasses

import jax

from jax_offload._analysis.chips import Chip

ROUNDED = (None, "default", "fastest", "bfloat16")  # precisions of matmuls at which a TPU rounds what they read
BACKWARD, FORWARD = 2 / 3, 1 / 3


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes per second between a device and its host; what ``jax_offload.measure_link`` returns.

    Attributes:
      load: from the host alone.
      store: to the host alone.
      both: each way, while both are busy.
      dram: read and written by the host's cores, for each of its accelerators: what a ``Chip`` has as
        ``dram_bandwidth``. ``None`` where it is not known.

    Example:
      >>> import jax_offload as jo
      >>> link = jo.types.Link(load=55e9, store=55e9, both=50e9)
      >>> link.seconds(loaded=10**9, stored=10**9)  # together, 0.02; one after the other 0.036
      0.02
    """

    load: float
    store: float
    both: float
    dram: float | None = None

    def seconds(self, loaded: int, stored: int) -> float:
        """Of copies both ways at once, then of the rest of one."""
        together = min(loaded, stored)
        return together / self.both + (loaded - together) / self.load + (stored - together) / self.store

    def one_after_the_other(self, loaded: int, stored: int) -> float:
        return loaded / self.load + stored / self.store


def link_of(chip: Chip) -> Link:
    return Link(chip.host_link, chip.host_link, chip.host_link_both / 2, chip.dram_bandwidth)


def speed(chip: Chip, dtype: str) -> float:
    """Operations per second of large matmuls of a dtype."""
    return chip.reached.bf16 if dtype in ("bfloat16", "float16") else chip.reached.f32


def multiplied(chip: Chip, dtype: str) -> str:
    """In which dtype matmuls compute, of arrays of this one: a TPU rounds these to bfloat16, unless jax is asked for
    more (``jax_default_matmul_precision``)."""
    rounds = chip.platform == "tpu" and jax.config.jax_default_matmul_precision in ROUNDED  # pyright: ignore
    return "bfloat16" if rounds else dtype


def exposed(link: float, compute: float, share: float) -> float:
    """Seconds that transfers add to a step, that ``share`` of its arithmetic can hide."""
    return max(0.0, link - share * compute)


def tokens_to_hide(link: float, share: float, seconds_per_token: float) -> int | None:
    """From how many tokens per step on nothing is exposed; ``None`` where nothing hides it."""
    if not link:
        return 0
    return None if not share or not seconds_per_token else -int(-link // (share * seconds_per_token))
