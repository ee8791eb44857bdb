"""The trace of a recipe (load all, update, store all), in which the offloads inside it are recipes too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax

from jax_offload._base.arrays import is_array
from jax_offload._base.jaxprs import jaxpr_of
from jax_offload._emit.find import holds_update, updates_in, without_updates
from jax_offload._emit.region import Update
from jax_offload._ir.program import Program, Var, flat, without_round_trips
from jax_offload._plan.options import Claim, Options


@dataclasses.dataclass(frozen=True)
class Traced:
    """A recipe's trace.

    Attributes:
      program: its inputs, but for the constants, are the arrays among the arguments' leaves.
      out_tree: of what the recipe returns.
      trees: of its arguments.
      arrays: the numbers of the arguments' leaves that are arrays.
      claims: of the ``offload`` whose recipe it is, and of those in it.
      sharded: the program that leaves updates divided which are gathered in ``program`` (ZeRO-1).
    """

    program: Program
    out_tree: Any
    trees: tuple[Any, ...]
    arrays: list[int]
    claims: tuple[Claim, ...] = ()
    sharded: Program | None = None

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


def traced(recipe: Callable[..., Any], args: tuple[Any, ...], options: Options | None = None) -> Traced:
    """``recipe``'s trace for ``args``, of which the second is the state.

    Every ``offload`` in it is an equation that carries its own recipe and what it was told. These recipes take the
    places of the equations, also in branches and loops, so that the whole is cut and streamed at once; and each leaf
    streams as its own ``offload`` says, whose operand it is.
    """
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]

    out_tree: list[Any] = []

    def on_arrays(values: list[Any]) -> list[Any]:  # with one argument, jax takes half the time of one for each array
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        results, tree = jax.tree.flatten(recipe(*jax.tree.unflatten(treedef, filled)))
        out_tree[:] = [tree]
        return results

    jaxpr, _ = jaxpr_of(on_arrays, [leaves[i] for i in arrays])
    found = updates_in(jaxpr) if any(map(holds_update, jaxpr.jaxpr.eqns)) else []
    inside = [(each, each.update) for each in found if isinstance(each.update, Update)]
    program = without_updates(jaxpr) if inside else without_round_trips(flat(jaxpr))
    sharded = without_updates(jaxpr, sharded=True) if any(update.sharded for _, update in inside) else None
    trace = Traced(program, out_tree[0], tuple(treedef.children()), arrays, sharded=sharded)
    claims = []
    if options is not None:
        start, end = trace.starts[1:3]
        own = {i - start: v for i, v in zip(arrays, trace.inputs, strict=True) if start <= i < end}
        of = [frozenset(v for k, v in own.items() if k in some) for some in (options.on_cores, options.on_disk)]
        claims.append(Claim(options, frozenset(own.values()), *of))
    for each, update in inside:
        claims += (
            Claim(c.options, *(frozenset(each.inputs_of(leaves)) for leaves in (c.leaves, c.on_cores, c.on_disk)))
            for c in update.claims
        )
    return dataclasses.replace(trace, claims=tuple(claims))
