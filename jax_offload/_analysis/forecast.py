"""What ``plan`` returns: a value, to be printed or read."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_offload._analysis.drives import Drive
from jax_offload._analysis.host import HostMemory
from jax_offload._analysis.option import Option
from jax_offload._analysis.table import Printed


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast(Printed):
    """What a model and its optimizer will need, way by way, and which way is recommended; ``print`` it.

    What ``jax_offload.plan`` returns. In a notebook it shows itself as a table.

    Attributes:
      options: a row for every way, an ``Option``.
      recommended: the way to take; ``None`` where none fits.
      device_memory: bytes of one device that are there; ``None`` where that is not known.
      devices: how many the parameters are on, and how many of them share a host.
      host: what this host, on which it was computed, has for pinned memory.
      chip: the name of the accelerator; empty where none was given.
      chip_host: bytes of its host's memory, for each accelerator, by its figures; ``None`` where none was given.
      platform: ``"cuda"`` or ``"tpu"``.
      drive: what a state on disk is on; ``None`` where there is none.
      drives: over how many it is spread.
      tokens_per_step: over all devices.
      flops_per_token: operations of the forward and the backward pass.
      compute: seconds of arithmetic of a step; ``None`` where they are not known.
      changes: what would change the cost most, each with its figure, best first.
      notes: what was assumed, and what is missing.
      labels: which of the numbers are exact, and which estimated.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((32, 4096, 4096), "bfloat16")}
      >>> forecast = jo.plan(optax.adamw(1e-3), params, chip="h100", tokens_per_step=65536)
      >>> forecast.recommended.name
      'resident'
    """

    options: tuple[Option, ...]
    recommended: Option | None
    device_memory: int | None
    devices: tuple[int, int]
    host: HostMemory
    chip: str = ""
    chip_host: int | None = None
    platform: str = ""
    drive: Drive | None = None
    drives: int = 1
    tokens_per_step: int | None = None
    flops_per_token: float | None = None
    compute: float | None = None
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> Option:
        """The row of that name."""
        for option in self.options:
            if option.name == name:
                return option
        raise KeyError(f"{name!r} is none of {[option.name for option in self.options]}")

    def to_dict(self) -> dict[str, Any]:
        """All of it as what JSON has: bytes and seconds."""
        found = dataclasses.asdict(self)
        found["recommended"] = None if self.recommended is None else self.recommended.name
        found["missing"] = self.missing
        found["labels"] = dict(self.labels)
        found["host"]["per_host_bytes"] = {option.name: self.per_host(option) for option in self.options}
        return found
