"""The option ``disk`` of ``offload``: which leaves of a state go to files, and how to make them.

A state is made leaf by leaf, so that the whole of it is never in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jax_offload._disk.disk import Disk
from jax_offload._disk.leaves import Place, only_outside, read_into
from jax_offload._program.jaxprs import jaxpr_of, variables
from jax_offload._program.program import flat, structure, without_round_trips
from jax_offload._program.propagate import needed_for
from jax_offload._program.slices import slice_of
from jax_offload._rewrite.cut import unguarded
from jax_offload._schedule.transfers import rows_in_part
from jax_offload._state.around import described
from jax_offload._state.placement import Leaf


def leaves_on(given: Any, plan: Sequence[Leaf], leaves: Sequence[Any]) -> list[Place | None]:
    """Map each leaf of a state to its leaf on the disk; ``None`` for a leaf in memory."""
    together = Counter[Hashable]()  # bytes of a row, over all leaves of a parameter that have as many rows
    keys = [(row.path if row.owner is None else row.owner, row.shape[:1]) for row in plan]
    for key, row in zip(keys, plan, strict=True):
        if row.disk:
            together[key] += row.nbytes // max(1, row.shape[0])

    def placed(key: Hashable, row: Leaf, x: Any) -> Place:
        rows = rows_in_part(together[key], x.ndim, x.shape[0])
        return Place(given, row.path, tuple(x.shape), np.dtype(x.dtype), rows=rows)

    return [placed(key, row, x) if row.disk else None for key, row, x in zip(keys, plan, leaves, strict=True)]


def refused(state: Any, plan: Sequence[Leaf]) -> Any:
    """Make each leaf of a traced ``init`` that belongs in files an error when it is lowered: no program makes files."""
    rows = iter(plan)
    return jax.tree.map(lambda x: only_outside(x) if next(rows).disk else x, state)


def created(disk: Disk, create: Callable[[Any], Any], params: Any, target: Any) -> optax.OptState:
    """Return ``create(params)``, each leaf made by itself, where ``target``, a tree of types, says.

    Leaves that are alike share a program.
    """
    with described(params):
        traced, _ = jaxpr_of(create, params)
    init = unguarded(without_round_trips(flat(traced)))
    values = dict(zip(init.inputs, [*init.consts, *jax.tree.leaves(params)], strict=True))
    targets, treedef = jax.tree.flatten(target)
    compiled = dict[Hashable, Any]()

    def made(k: int) -> Any:
        eqns, _ = needed_for(init.eqns, variables(init.outputs[k : k + 1]))
        s = slice_of(eqns, init.outputs[k : k + 1], init.debug_info, {})  # pyright: ignore[reportArgumentType]
        key = structure(s.jaxpr), targets[k].sharding
        if key not in compiled:
            compiled[key] = jax.jit(s.run, out_shardings=[targets[k].sharding])
        return compiled[key](*(values[v] for v in s.inputs))[0]

    return jax.tree.unflatten(treedef, read_into(targets, lambda indices: [*map(made, indices)], [disk]))
