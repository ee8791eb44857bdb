"""What each part of a traced update depends on: the update, cut into slices that need few host leaves each.

The update of an optimizer is traced once, as the *usual recipe*: every host leaf loaded, all of the update, every host
leaf stored. A slice is what remains of it for some results: for AdamW, one parameter's update and moments, with the
loads and stores of just these. No optimizer is known by name; whatever its equations say holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from jax.sharding import NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import (
    DebugInfo,
    DropVar,
    Effects,
    Equation,
    Jaxpr,
    Literal,
    Var,
    closed,
    holds_equations,
    jax_fun,
    nameless,
    without_dead_code,
)
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import Shards
from jax_offload._ir.masks import Mask, backward, forward, groups, union
from jax_offload._ir.primitives import ELEMENTWISE, REDUCE
from jax_offload._ir.program import Program
from jax_offload._ir.shares import Shares


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a program: ``outputs`` from ``inputs``, both given as variables of the program.

    Attributes:
      shards: of the program's inputs, how they are divided between devices.
    """

    inputs: list[Var]
    outputs: list[Var]
    jaxpr: Jaxpr
    shards: Mapping[Var, Shards] = dataclasses.field(default_factory=dict[Var, Shards])

    @property
    def run(self) -> Callable[..., list[Any]]:
        """``run(*inputs) -> outputs``, all at once."""
        return jax_fun(closed(self.jaxpr))

    @functools.cached_property
    def loads(self) -> list[Var]:
        """The host leaves that it needs."""
        return [v for v in self.inputs if is_host_aval(v.aval)]

    @functools.cached_property
    def stores(self) -> list[Var]:
        """The host leaves that it makes."""
        return [v for v in self.outputs if is_host_aval(v.aval)]

    @property
    def pins(self) -> dict[Var, NamedSharding]:
        """The shardings that the trace says operands have, and gives results; with Explicit axes the types tell."""
        eqns = [eqn for eqn in self.jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
        operands = {eqn.invars[0]: eqn.params["sharding"] for eqn in reversed(eqns) if eqn.invars[0] in self.inputs}
        return operands | {eqn.outvars[0]: eqn.params["sharding"] for eqn in eqns}

    @functools.cached_property
    def loaded_bytes(self) -> int:
        """Bytes of ``loads`` on one device."""
        return sum(nbytes(v.aval) // math.prod(self.shards.get(v, ())) for v in self.loads)

    @functools.cached_property
    def decoded_bytes(self) -> int:
        """Bytes of ``loads`` on one device once they are float32, as what is stored in fewer bits is for the update."""
        return sum(
            math.prod(v.aval.shape) * max(4, v.aval.dtype.itemsize) // math.prod(self.shards.get(v, ()))
            for v in self.loads
        )


def repeats_effects(program: Program, passes: Sequence[Pass]) -> bool:
    """Whether what happens once in the program, a callback say, would happen in more than one slice."""
    slices = [s for each in passes for s in (each.prelude, *each.slices)]
    return sum(bool(eqn.effects) for s in slices for eqn in s.jaxpr.eqns) > sum(bool(e.effects) for e in program.eqns)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Slices that can run one after the other, in any order, once the prelude, which loads nothing, has run."""

    prelude: Slice
    slices: list[Slice]


def joined(a: Slice, b: Slice) -> Slice:
    """Both slices as one. They have no effects: what has is not put into a loop."""
    inputs, outputs = (list(dict.fromkeys([*u, *v])) for u, v in ((a.inputs, b.inputs), (a.outputs, b.outputs)))
    defined = {v for eqn in a.jaxpr.eqns for v in eqn.outvars}
    # Both may compute a scale.
    eqns = [*a.jaxpr.eqns, *(eqn for eqn in b.jaxpr.eqns if not defined.issuperset(eqn.outvars))]
    jaxpr = Jaxpr([], inputs, outputs, eqns, a.jaxpr.effects, a.jaxpr.debug_info)
    return Slice(inputs, outputs, jaxpr, a.shards)


def cut(program: Program, scalars_ahead: bool) -> list[Pass]:
    """The program as passes over the host leaves, in slices.

    Two results belong to one slice where they need a host leaf in common: then loading it once serves both. What needs
    no host leaf belongs to the prelude if it serves several slices, is a scalar (a learning rate, the gradients' norm),
    or summarises all rows (``adaptive_grad_clip``'s norm of each column: it would keep the rows together). Elementwise
    arithmetic on arrays does not, though several slices need it: each does its own.

    Where a scalar is reduced from the leaves of many parameters (a norm over accumulated gradients, prodigy's sums), or
    from all rows of one (LAMB's trust ratio), everything that uses it needs all of them at once. ``scalars_ahead``
    makes such a scalar a result of its own, one pass ahead: each leaf, or chunk of it, is loaded for its part of the
    scalar, and once more for what uses that.
    """
    needs_host: dict[Var, Mask] = {v: 1 << i for i, v in enumerate(v for v in program.inputs if is_host_aval(v.aval))}
    stage: dict[Var, int] = {}  # the pass before which a variable cannot be known
    scalars: dict[Var, tuple[Mask, int]] = {}
    summaries: set[Var] = set()
    for eqn in program.eqns:
        if (summaries or eqn.primitive.name in REDUCE) and is_summary(eqn, summaries):
            summaries.update(v for v in eqn.outvars if v.aval.shape)
        stages = forward(eqn, stage, _latest) if stage else [0] * len(eqn.outvars)
        for v, mask, at in zip(eqn.outvars, forward(eqn, needs_host), stages, strict=True):
            ahead = scalars_ahead and mask and v.aval.shape == ()
            if ahead:
                scalars[v] = mask, at
            needs_host[v], at = (0, at + 1) if ahead else (mask, at)
            if at:
                stage[v] = at

    # The roots: scalars, results, and effects (a callback, say), which must happen though nobody reads them. A host
    # leaf is stored in the last pass: until then its old value is needed.
    last = max(stage.values(), default=0)
    inputs = set(program.inputs)
    results = {v: None for v in program.outputs if not isinstance(v, Literal) and v not in inputs}
    roots: list[tuple[Var | int, Mask, int]] = [(v, mask, at) for v, (mask, at) in scalars.items()]
    roots += [(v, needs_host[v], last if needs_host[v] else stage.get(v, 0)) for v in results if v not in scalars]
    for eqn in (eqn for eqn in program.eqns if eqn.effects):
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        mask = union(needs_host.get(v, 0) for v in operands)
        roots.append((id(eqn), mask, last if mask else max((stage.get(v, 0) for v in operands), default=0)))
    parts: dict[Var | int, int] = {}  # root -> the number of its part: preludes 0..last, then the slices
    stages_of = list(range(last + 1))
    for at in range(last + 1):
        here = [(root, mask) for root, mask, s in roots if s == at]
        for (root, _), group in zip(here, groups([mask for _, mask in here]), strict=True):
            parts[root] = at if group == 0 else len(stages_of) + group - 1
        stages_of += [at] * (len({parts[root] for root, _ in here if parts[root] > last}))

    # Backward: who needs what. A variable that one part provides to others is that part's result.
    needed_by: dict[Var, Mask] = {v: 1 << parts[v] for v in results}
    provider: dict[Var, int] = {}
    members: list[list[Equation]] = [[] for _ in stages_of]
    given: list[set[Var]] = [set() for _ in stages_of]  # what others provide of the results of a part's equations
    shares, preludes = Shares(), (2 << last) - 1
    for eqn in reversed(program.eqns):
        effect = 1 << parts[id(eqn)] if id(eqn) in parts else 0
        needs = [0 if isinstance(v, DropVar) else needed_by.get(v, 0) for v in eqn.outvars]
        provided: list[Var] = []
        for k, v in enumerate(eqn.outvars):
            if not needs[k] or needs_host[v]:
                continue
            shared = needs[k] & preludes or needs[k].bit_count() > 1
            again = eqn.primitive.name in ELEMENTWISE  # cheaper computed again than kept, as an array, between its uses
            if v.aval.shape == () or v in summaries or (shared and not again) or eqn.effects:
                provider[v] = parts[v] if v in scalars else stage.get(v, 0)
                needs[k] = 1 << provider[v]
                provided.append(v)
        for part, share in shares.of(eqn, needs, effect).items():
            members[part].append(share)
            if provided:
                given[part].update(v for v in provided if provider[v] != part)
        for v, mask in zip(eqn.invars, backward(eqn, needs, effect), strict=True):
            if mask and not isinstance(v, Literal):
                needed_by[v] = known | mask if (known := needed_by.get(v)) else mask

    outputs: list[dict[Var, None]] = [{} for _ in stages_of]
    for v in [*results, *provider]:
        outputs[provider.get(v, parts.get(v, 0))][v] = None
    slices = [
        slice_of(
            members[part][::-1],
            list(outputs[part]),
            program.debug_info,
            program.shards,
            given=given[part],
            can_be_cut=shares.can_be_cut,
        )
        for part in range(len(stages_of))
    ]
    return [
        Pass(
            slices[at],
            [
                s
                for s, s_at in zip(slices[last + 1 :], stages_of[last + 1 :], strict=True)
                if s_at == at and s.jaxpr.eqns
            ],
        )
        for at in range(last + 1)
    ]


def _latest(stages: Iterable[int]) -> int:
    return max(stages, default=0)


def is_summary(eqn: Equation, summaries: Set[Var]) -> bool:
    """Whether its result is a reduction over all rows of an array, small beside it, or arithmetic on such."""
    name = eqn.primitive.name
    if name in REDUCE:
        few = 32 * math.prod(eqn.outvars[0].aval.shape) <= math.prod(eqn.invars[0].aval.shape)
        return 0 in eqn.params["axes"] and few
    if not summaries:
        return False
    if name not in ELEMENTWISE and name not in ("broadcast_in_dim", "reshape", "squeeze"):
        return False
    out = eqn.outvars[0].aval
    arrays = [v for v in eqn.invars if v.aval.shape]
    return bool(arrays) and all(
        not isinstance(v, Literal) and v in summaries and math.prod(v.aval.shape) == math.prod(out.shape)
        for v in arrays
    )


def slice_of(
    eqns: list[Equation],
    outputs: list[Var],
    debug_info: DebugInfo,
    shards: Mapping[Var, Shards],
    given: Set[Var] = frozenset(),
    can_be_cut: Callable[[Equation], bool] = holds_equations,
) -> Slice:
    """The slice of some equations and results.

    Args:
      eqns, outputs: they.
      debug_info, shards: of the program.
      given: the variables that other parts provide.
      can_be_cut: whether an equation may hold what its results do not need.
    """
    defined = {v for eqn in eqns for v in eqn.outvars} - given
    read = [v for vs in [*(eqn.invars for eqn in eqns), outputs] for v in vs if not isinstance(v, Literal)]
    inputs = [v for v in dict.fromkeys(read) if v not in defined]
    # an equation of which only some results are wanted (a cond) may still name the others: let dce cut inside it
    eqns = [_without(eqn, given) for eqn in eqns] if given else eqns
    effects: Effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns if eqn.effects))
    jaxpr = Jaxpr([], inputs, outputs, eqns, effects, nameless(debug_info))  # the names are the program's
    if any(map(can_be_cut, eqns)):
        jaxpr, used = without_dead_code(jaxpr)
        inputs = [v for v, u in zip(inputs, used, strict=True) if u]
    return Slice(inputs, outputs, jaxpr, shards)


def _without(eqn: Equation, given: Set[Var]) -> Equation:
    """``eqn`` without the results that are given already, so that a slice does not define one of its inputs."""
    if given.isdisjoint(eqn.outvars):
        return eqn
    return eqn.replace(outvars=[Var(v.aval) if v in given else v for v in eqn.outvars])
