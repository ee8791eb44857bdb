"""Making a state that is partly on disk leaf by leaf, so that the whole of it is never in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Sharding

from jax_offload._base.around import described
from jax_offload._base.jaxprs import Jaxpr, closed, jax_fun, jaxpr_of, nameless, variables
from jax_offload._base.on_disk import only_outside
from jax_offload._disk.disk import Disk
from jax_offload._ir.conds import structure
from jax_offload._ir.program import Program, flat, without_round_trips
from jax_offload._placement.placement import Leaf, Policy, place
from jax_offload._step.cut import unguarded


def refused(state: Any, policy: Policy, params: Any) -> Any:
    """Make the state of a traced ``init`` an error when it is lowered, as no program makes files."""
    leaves, treedef = jax.tree.flatten(state)
    rows = place(policy, state, params)
    return jax.tree.unflatten(treedef, [only_outside(x) if r.disk else x for x, r in zip(leaves, rows, strict=True)])


def created(
    disk: Disk, create: Callable[[Any], Any], params: Any, placed: Sequence[tuple[Leaf, Any, Sharding]], treedef: Any
) -> optax.OptState:
    """Return ``create(params)`` with the leaves on disk that ``placed`` puts there, each made by itself."""
    with described(params):
        traced, _ = jaxpr_of(create, params)
    maker = _Maker(unguarded(without_round_trips(flat(traced))), jax.tree.leaves(params))
    places = {k: leaf.place for k, (leaf, _, _) in enumerate(placed) if leaf.place is not None}
    arrays = (maker.run([k], [placed[k][2]])[0] for k in places)
    found = dict[int, Any](zip(places, disk.fill([*places.values()], arrays), strict=True))
    rest = [k for k in range(len(placed)) if k not in places]
    found |= zip(rest, maker.run(rest, [placed[k][2] for k in rest]), strict=True)
    return jax.tree.unflatten(treedef, [found[k] for k in range(len(placed))])


class _Maker:
    """Makes some results of a traced init at a time; leaves that are alike share a program."""

    def __init__(self, init: Program, params: Sequence[Any]) -> None:
        self._init, self._values = init, dict(zip(init.inputs, [*init.consts, *params], strict=True))
        self._maker = {v: k for k, eqn in enumerate(init.eqns) for v in eqn.outvars}
        self._compiled = dict[Hashable, Any]()

    def run(self, wanted: Sequence[int], places: Sequence[Sharding]) -> list[Any]:
        """Return the results of these numbers in these places."""
        outputs = [self._init.outputs[k] for k in wanted]
        needed, read = set[int](), {v: None for v in variables(outputs)}
        reading = list(read)
        while reading:
            if (k := self._maker.get(reading.pop())) is not None and k not in needed:
                needed.add(k)
                reading += (new := dict.fromkeys(variables(self._init.eqns[k].invars)))
                read |= new
        eqns, inputs = [self._init.eqns[k] for k in sorted(needed)], [v for v in read if v in self._values]
        effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns))
        jaxpr = Jaxpr([], inputs, outputs, eqns, effects, nameless(self._init.debug_info))
        key = structure(jaxpr), tuple(places)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(jax_fun(closed(jaxpr)), out_shardings=list(places))
        return self._compiled[key](*(self._values[v] for v in inputs))
