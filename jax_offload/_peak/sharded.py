"""How the arrays of a step are divided between devices, by their shapes: XLA decides, and a trace does not tell."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_offload._base.arrays import nbytes
from jax_offload._base.memory import HOST_KIND
from jax_offload._base.shardings import sharding_of, shards_of

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Division:
    """Of a step on several devices.

    What has a parameter's shape, or that of a row of stacked ones, is divided as that, or as its state where that is
    divided further (ZeRO-1); all else evenly. A matmul reads a whole parameter, which is gathered for it, and makes a
    whole gradient, which is scattered after it.

    Attributes:
      devices: how many.
      weights: shape of a parameter or of a row -> into how many parts it is divided.
    """

    devices: int = 1
    weights: Mapping[Shape, int] = dataclasses.field(default_factory=dict[Shape, int])

    def own(self, aval: Any) -> int:
        """Bytes on one device."""
        if not hasattr(aval, "dtype"):
            return 0
        return nbytes(aval) // self.weights.get(tuple(aval.shape), self.devices)

    def gathered(self, aval: Any, own: int) -> int:
        """Bytes that a matmul needs of an array beyond those on its device."""
        if tuple(getattr(aval, "shape", ())) not in self.weights:
            return 0
        return nbytes(aval) - max(own, self.own(aval))

    def summed(self, aval: Any) -> int:
        """Bytes of the gradient of a parameter that each device has whole, beside the part of it that one has made."""
        return nbytes(aval) if self.weights.get(tuple(getattr(aval, "shape", ()))) == 1 else 0


ALONE = Division()


def gathered_ahead(leaves: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Whether stacked parameters are divided along the axis that a scan goes over: XLA gathers all of them before."""
    wanted = {tuple(np.shape(x)) for x in parameters if np.ndim(x) > 2}
    return any(np.shape(x) in wanted and shards_of(sharding_of(x), np.shape(x))[0] > 1 for x in leaves)


def collectives(leaves: Sequence[Any], parameters: Sequence[Any], devices: int) -> tuple[float, float]:
    """Bytes that each device has from the others in a backward pass: of parameters that are gathered for it, and of
    gradients, which are reduced. ``leaves``: a step's arguments; ``parameters``: the types of the gradients."""
    wanted = {tuple(np.shape(x)) for x in parameters}
    there = [x for x in leaves if np.shape(x) in wanted and getattr(sharding_of(x), "memory_kind", None) != HOST_KIND]
    gathered = sum(nbytes(x) * (1 - 1 / math.prod(shards_of(sharding_of(x), np.shape(x)))) for x in there)
    return gathered, sum(map(nbytes, parameters)) * (1 - 1 / devices)


def division_of(leaves: Sequence[Any], parameters: Sequence[Any], devices: int) -> Division:
    """By a step's arguments, and the types of its gradients."""
    if devices == 1:
        return ALONE
    wanted = {tuple(np.shape(x)) for x in parameters if np.ndim(x) >= 2}
    weights: dict[Shape, int] = {}
    for x in leaves:
        shape, shards = tuple(np.shape(x)), shards_of(sharding_of(x), np.shape(x))
        if shape in wanted:
            weights[shape] = max(weights.get(shape, 1), math.prod(shards))
            for row in (shape[1:], (1, *shape[1:])) if len(shape) > 2 else ():
                weights[row] = max(weights.get(row, 1), math.prod(shards[1:]))
    return Division(devices, weights)
