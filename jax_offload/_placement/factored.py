"""Which axes of its parameter a smaller state leaf has: a factored second moment, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_offload._base.around import described

Axes = tuple[int | None, ...]  # for each axis of a leaf the axis of its parameter; None: none of them


def axes_in_parameter(
    init: Callable[[Any], Any], params: Any, leaves: Sequence[tuple[int | None, tuple[int, ...]]]
) -> list[Axes | None]:
    """For each state leaf, given as (number of its parameter, shape), its axes; ``None`` where they are not known.

    A row factor of a square matrix has the shape of a column factor. So ``init`` is traced once more, with parameters
    all of whose axes differ: what their sizes become tells which is which.
    """
    flat, treedef = jax.tree.flatten(params)
    if all(i is None or len(shape) in (0, len(np.shape(flat[i]))) for i, shape in leaves):
        return [None] * len(leaves)
    changed = [jax.ShapeDtypeStruct(_distinct(np.shape(x)), x.dtype) for x in flat]
    try:
        with described(()):
            probe = jax.tree.leaves(jax.eval_shape(init, jax.tree.unflatten(treedef, changed)))
    except Exception:  # an init that looks at more than shapes
        return [None] * len(leaves)
    if len(probe) != len(leaves):
        return [None] * len(leaves)
    return [
        None if i is None else _axes(shape, x.shape, np.shape(flat[i]), changed[i].shape)
        for (i, shape), x in zip(leaves, probe, strict=True)
    ]


def _axes(
    leaf: tuple[int, ...], probe: tuple[int, ...], param: tuple[int, ...], changed: tuple[int, ...]
) -> Axes | None:
    if len(leaf) != len(probe):
        return None
    index = {n: axis for axis, n in enumerate(changed)}
    axes = [index.get(m) for m in probe]
    return tuple(a if a is not None and param[a] == n else None for a, n in zip(axes, leaf, strict=True))


def _distinct(shape: tuple[int, ...]) -> tuple[int, ...]:
    """About the same sizes, none twice; of equal ones a later axis is larger, as a stable sort would have it."""
    sizes, last = list(shape), 0
    for axis in sorted(range(len(shape)), key=lambda axis: (shape[axis], axis)):
        sizes[axis] = last = max(shape[axis], last + 1)
    return tuple(sizes)
