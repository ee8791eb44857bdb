"""The trace of a recipe (load all, update, store all), and of the offloads in it, whose leaves stream as each says."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax

from jax_offload._base.arrays import is_array
from jax_offload._base.shardings import (
    Layouts,
    Shardings,
)
from jax_offload._ir.program import Program, Var, trace
from jax_offload._plan.order import Order


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``offload`` was told, and has seen, about streaming.

    Attributes:
      window, order: its arguments.
      shardings: of the parameters, by path, as far as they are known.
      partitions: of the gradients, by the parameters' paths, where the state is divided further (ZeRO-1).
      serialise: whether gradients of what stays on the device wait for each other. Not where every one has an
        accumulator there: all would.
    """

    window: int | None = None
    order: Order = None
    shardings: Shardings = dataclasses.field(default_factory=dict)
    partitions: Layouts = dataclasses.field(default_factory=dict)
    serialise: bool = True

    @property
    def order_key(self) -> tuple[str, ...] | None:
        return None if self.order is None else tuple(self.order)

    @property
    def whole(self) -> Shardings:
        """Of the parameters whose state is divided further."""
        return {path: self.shardings[path] for path in self.partitions}


@dataclasses.dataclass(frozen=True)
class _Inside:
    """An ``offload`` whose recipe is part of the one that is traced, and the state's leaves as it got them."""

    options: Options
    leaves: list[Any]


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What is said while a recipe is traced: of the offloads in it, and which leaves are others that were loaded."""

    offloads: list[_Inside]
    loaded: list[tuple[Any, Any]]


# While a recipe is traced, every offload inside it is a recipe too, and says here what it was told: the whole is then
# cut and streamed at once, each leaf as its own offload says.
_INSIDE: contextvars.ContextVar[_Recipe | None] = contextvars.ContextVar("inside", default=None)


def loaded_from(state: Any, original: Any) -> None:
    """Says that the leaves of ``state`` are those of ``original``, loaded: a wrapper does it for what is inside it."""
    if (recipe := _INSIDE.get()) is not None:
        recipe.loaded.extend(zip(jax.tree.leaves(state), jax.tree.leaves(original), strict=True))


def own_offloads(options: Options | None, by_leaf: Sequence[Options] | None, state: Any) -> list[_Inside]:
    if options is None:
        return []
    leaves = jax.tree.leaves(state)
    groups: dict[Any, _Inside] = {}
    for x, of_leaf in zip(leaves, by_leaf or [options] * len(leaves), strict=True):
        key = of_leaf.window, of_leaf.order_key
        told = dataclasses.replace(options, window=of_leaf.window, order=of_leaf.order)
        groups.setdefault(key, _Inside(told, [])).leaves.append(x)
    return list(groups.values()) or [_Inside(options, [])]


def known_inside() -> Options:
    """What the offloads in the recipe that is being traced, so far, know of the parameters."""
    recipe = _INSIDE.get()
    return merged(recipe.offloads if recipe else [])


def merged(inside: list[_Inside]) -> Options:
    """What is known of the parameters: all that any of them knows."""
    return Options(
        shardings={path: s for each in inside for path, s in each.options.shardings.items()},
        partitions={path: s for each in inside for path, s in each.options.partitions.items()},
        serialise=all(each.options.serialise for each in inside),
    )


@dataclasses.dataclass(frozen=True)
class Traced:
    """A recipe's trace.

    Attributes:
      program: its inputs, but for the constants, are the arrays among the arguments' leaves.
      out_tree: of what the recipe returns.
      trees: of its arguments.
      arrays: the numbers of the arguments' leaves that are arrays.
      offloads: in the recipe.
      whose: number of an array -> that of the ``offload`` whose leaf it is.
    """

    program: Program
    out_tree: Any
    trees: tuple[Any, ...]
    arrays: list[int]
    offloads: list[_Inside]
    whose: Mapping[int, int]

    @property
    def inputs(self) -> list[Var]:
        """Of the program: one for each array."""
        return self.program.inputs[len(self.program.consts) :]

    @functools.cached_property
    def starts(self) -> list[int]:
        """The number of the first leaf of each argument."""
        return [0, *accumulate(tree.num_leaves for tree in self.trees)]

    @functools.cached_property
    def position(self) -> dict[int, int]:
        """Number of a leaf -> number of the array that it is."""
        return {i: k for k, i in enumerate(self.arrays)}

    def operands(self, args: tuple[Any, ...]) -> list[Any]:
        leaves = jax.tree.leaves(args)
        return [leaves[i] for i in self.arrays]

    def of_inputs(self, values: Sequence[Any]) -> dict[Var, Any]:
        """What is said of the arguments' leaves, as said of the program's inputs; ``None`` is nothing."""
        inputs, position = self.inputs, self.position
        return {inputs[position[i]]: x for i, x in enumerate(values) if x is not None and i in position}


def traced(
    recipe: Callable[..., tuple[Any, ...]],
    args: tuple[Any, ...],
    options: Options | None,
    by_leaf: Sequence[Options] | None,
) -> Traced:
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]
    offloads: list[_Inside] = []
    loaded: list[tuple[Any, Any]] = []
    whose: dict[int, int] = {}

    def on_arrays(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        args = jax.tree.unflatten(treedef, filled)
        offloads[:] = own_offloads(options, by_leaf, args[1])
        result = recipe(*args)
        position = {id(x): k for k, x in enumerate(values)}
        position |= {id(x): position[id(old)] for x, old in loaded if id(old) in position}
        for r, each in enumerate(offloads):
            whose.update((position[id(x)], r) for x in each.leaves if id(x) in position)
            each.leaves.clear()  # jax.checking_leaks sees tracers that outlive their trace
        loaded.clear()
        return result

    token = _INSIDE.set(_Recipe(offloads, loaded))
    try:
        program, out_tree = trace(on_arrays, *(leaves[i] for i in arrays))
    finally:
        _INSIDE.reset(token)
    return Traced(program, out_tree, tuple(treedef.children()), arrays, offloads, whose)


def joins_outer(own: Sequence[_Inside]) -> bool:
    """Whether another recipe is being traced around this one; then that one streams the leaves of these offloads."""
    if (outer := _INSIDE.get()) is None:
        return False
    outer.offloads.extend(own)
    return True
