"""The option ``disk`` of ``offload``: which leaves of a state go to files, and how they are made.

A state is made leaf by leaf, so that the whole of it is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Sharding

from jax_offload._base.around import described
from jax_offload._base.jaxprs import jaxpr_of, variables
from jax_offload._base.on_disk import Place, only_outside
from jax_offload._disk.disk import Disk
from jax_offload._ir.program import flat, structure, without_round_trips
from jax_offload._ir.propagate import needed_for
from jax_offload._ir.slices import slice_of
from jax_offload._placement.placement import Leaf, Policy, place
from jax_offload._plan.transfers import rows_in_part
from jax_offload._step.cut import unguarded


def check_disk(given: Any, policy: Policy) -> None:
    """Raise where ``disk=`` is not a disk, or does not go together with another option."""
    if given is None:
        return
    if not isinstance(given, Disk):
        raise TypeError(f"disk: expected a jo.disk(directory, ...), got {given!r}. Fix: disk=jo.disk({given!r}).")
    if policy.update_on != 0:
        raise ValueError(
            f"disk: the device updates leaves on disk; got update_on={policy.update_on!r} too. Fix: leave one out."
        )
    if policy.fraction == 0:
        raise ValueError("disk: with fraction=0 nothing leaves the device. Fix: leave one of them out.")


def places_of(given: Any, plan: Sequence[Leaf], leaves: Sequence[Any]) -> list[Place | None]:
    """Map each leaf of a state to its leaf on the disk; ``None`` for a leaf in memory."""
    together: dict[Hashable, int] = {}  # bytes of a row, over all leaves of a parameter that have as many rows
    keys = [
        (row.path if row.owner is None else row.owner, np.shape(x)[:1]) for row, x in zip(plan, leaves, strict=True)
    ]
    for key, row in zip(keys, plan, strict=True):
        if row.disk:
            together[key] = together.get(key, 0) + row.nbytes // max(1, row.shape[0])
    return [
        Place(given, row.path, tuple(x.shape), np.dtype(x.dtype), rows=rows_in_part(together[key], x.ndim, x.shape[0]))
        if row.disk
        else None
        for key, row, x in zip(keys, plan, leaves, strict=True)
    ]


def refused(state: Any, policy: Policy, params: Any) -> Any:
    """Make the state of a traced ``init`` an error when it is lowered, as no program makes files."""
    leaves, treedef = jax.tree.flatten(state)
    rows = place(policy, state, params)
    return jax.tree.unflatten(treedef, [only_outside(x) if r.disk else x for x, r in zip(leaves, rows, strict=True)])


def created(
    disk: Disk, create: Callable[[Any], Any], params: Any, placed: Sequence[tuple[Leaf, Any, Sharding]], treedef: Any
) -> optax.OptState:
    """Return ``create(params)`` with the leaves on disk that ``placed`` puts there, each made by itself.

    Leaves that are alike share a program.
    """
    with described(params):
        traced, _ = jaxpr_of(create, params)
    init = unguarded(without_round_trips(flat(traced)))
    values = dict(zip(init.inputs, [*init.consts, *jax.tree.leaves(params)], strict=True))
    compiled = dict[Hashable, Any]()

    def made(wanted: Sequence[int]) -> list[Any]:
        outputs, where = [init.outputs[k] for k in wanted], tuple(placed[k][2] for k in wanted)
        eqns, _ = needed_for(init.eqns, variables(outputs))
        s = slice_of(eqns, outputs, init.debug_info, {})  # pyright: ignore[reportArgumentType]
        key = structure(s.jaxpr), where
        if key not in compiled:
            compiled[key] = jax.jit(s.run, out_shardings=[*where])
        return compiled[key](*(values[v] for v in s.inputs))

    places = {k: leaf.place for k, (leaf, _, _) in enumerate(placed) if leaf.place is not None}
    rest = [k for k in range(len(placed)) if k not in places]
    on_disk = disk.fill([*places.values()], (made([k])[0] for k in places))
    found = dict[int, Any]([*zip(places, on_disk, strict=True), *zip(rest, made(rest), strict=True)])
    return jax.tree.unflatten(treedef, [found[k] for k in range(len(placed))])
