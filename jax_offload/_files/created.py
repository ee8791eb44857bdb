"""A state of which a part is on disk, made leaf by leaf: never is the whole of it in any memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Sharding

from jax_offload._base.around import described
from jax_offload._base.jaxprs import ClosedJaxpr, Jaxpr, closed, jax_fun, jaxpr_of, nameless, without_dead_code
from jax_offload._base.on_disk import only_outside
from jax_offload._files.files import Disk
from jax_offload._ir.shares import structure
from jax_offload._placement.placement import Leaf, Policy, place


def refused(state: Any, policy: Policy, params: Any) -> Any:
    """``state`` of a traced ``init``: an error where it is lowered, as no program makes files."""
    leaves, treedef = jax.tree.flatten(state)
    rows = place(policy, state, params)
    return jax.tree.unflatten(treedef, [only_outside(x) if r.disk else x for x, r in zip(leaves, rows, strict=True)])


def created(
    disk: Disk, create: Callable[[Any], Any], params: Any, placed: Sequence[tuple[Leaf, Any, Sharding]], treedef: Any
) -> optax.OptState:
    """The state that ``create(params)`` is, with those leaves on disk whose rows say so; each is made by itself."""
    with described(params):
        traced, _ = jaxpr_of(create, params)
    values, compiled = [*traced.consts, *jax.tree.leaves(params)], dict[Hashable, Any]()
    places = {k: leaf.place for k, (leaf, _, _) in enumerate(placed) if leaf.place is not None}
    arrays = (_run(traced, [k], values, [placed[k][2]], compiled)[0] for k in places)
    found = dict[int, Any](zip(places, disk.fill([*places.values()], arrays), strict=True))
    rest = [k for k in range(len(placed)) if k not in places]
    found |= zip(rest, _run(traced, rest, values, [placed[k][2] for k in rest], compiled), strict=True)
    return jax.tree.unflatten(treedef, [found[k] for k in range(len(placed))])


def _run(
    traced: ClosedJaxpr, wanted: Sequence[int], values: Sequence[Any], places: Sequence[Sharding], compiled: Any
) -> list[Any]:
    """Some results of a traced init, compiled once for all that are alike."""
    inner = traced.jaxpr
    inputs, outputs = [*inner.constvars, *inner.invars], [inner.outvars[k] for k in wanted]
    program = Jaxpr([], inputs, outputs, inner.eqns, inner.effects, nameless(inner.debug_info))
    jaxpr, used = without_dead_code(program)
    key = structure(jaxpr), tuple(places)
    if key not in compiled:
        compiled[key] = jax.jit(jax_fun(closed(jaxpr)), out_shardings=list(places))
    return compiled[key](*(x for x, u in zip(values, used, strict=True) if u))
