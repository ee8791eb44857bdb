"""What each variable of a program depends on, and so which of its equations make up a part: the cut, but for slices.

Forward: which host leaves a variable needs, and in which pass it is known. Its results then fall into parts, and
backward each equation goes to those that need it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from jax_offload._base.jaxprs import DropVar, Equation, Literal, Var
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.masks import Mask, backward, forward, groups, union
from jax_offload._ir.primitives import ELEMENTWISE, REDUCE
from jax_offload._ir.program import Program
from jax_offload._ir.shares import Shares

Root = Var | int  # an equation with an effect is one by its identity


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a program's variables, read forward.

    Attributes:
      needs_host: the host leaves that each needs, by no scalar that is ahead.
      earliest: the first pass in which it can be known; those that are not here are known in the first of all.
      scalars: those ahead, each with the host leaves that it needs, and the pass in which these are loaded for it.
      summaries: see ``is_summary``.
    """

    needs_host: dict[Var, Mask]
    earliest: dict[Var, int]
    scalars: dict[Var, tuple[Mask, int]]
    summaries: set[Var]

    @property
    def last(self) -> int:
        """The number of the last pass. A host leaf is stored in it: until then its old value is needed."""
        return max(self.earliest.values(), default=0)


class Wanted(NamedTuple):
    """A root, the host leaves that it needs, and its pass."""

    root: Root
    needs: Mask
    at: int


@dataclasses.dataclass
class Part:
    """What becomes a prelude or a slice.

    Attributes:
      at: its pass.
      eqns: its equations, the last one first until all are found.
      outputs: what it provides.
      given: those of the results of its equations that others provide.
    """

    at: int
    eqns: list[Equation] = dataclasses.field(default_factory=list[Equation])
    outputs: list[Var] = dataclasses.field(default_factory=list[Var])
    given: set[Var] = dataclasses.field(default_factory=set[Var])


def read(program: Program, scalars_ahead: bool) -> Known:
    """Each variable from its operands; a scalar that is made of host leaves is known one pass later, if it is ahead."""
    on_host = (v for v in program.inputs if is_host_aval(v.aval))
    known = Known({v: 1 << i for i, v in enumerate(on_host)}, {}, {}, set())
    for eqn in program.eqns:
        if (known.summaries or eqn.primitive.name in REDUCE) and is_summary(eqn, known.summaries):
            known.summaries.update(v for v in eqn.outvars if v.aval.shape)
        earliest = forward(eqn, known.earliest, _latest) if known.earliest else [0] * len(eqn.outvars)
        for v, mask, at in zip(eqn.outvars, forward(eqn, known.needs_host), earliest, strict=True):
            ahead = scalars_ahead and mask and v.aval.shape == ()
            if ahead:
                known.scalars[v] = mask, at
            known.needs_host[v], at = (0, at + 1) if ahead else (mask, at)
            if at:
                known.earliest[v] = at
    return known


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


def roots_of(program: Program, known: Known) -> list[Wanted]:
    """Scalars that are ahead, results, and effects (a callback, say), which must happen though nobody reads them."""
    last = known.last
    roots = [Wanted(v, mask, at) for v, (mask, at) in known.scalars.items()]
    for v in results_of(program):
        if v not in known.scalars:
            mask = known.needs_host[v]
            roots.append(Wanted(v, mask, last if mask else known.earliest.get(v, 0)))
    for eqn in (eqn for eqn in program.eqns if eqn.effects):
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        mask = union(known.needs_host.get(v, 0) for v in operands)
        earliest = _latest(known.earliest.get(v, 0) for v in operands)
        roots.append(Wanted(id(eqn), mask, last if mask else earliest))
    return roots


def results_of(program: Program) -> list[Var]:
    """What its equations make of its outputs, each once."""
    inputs = set(program.inputs)
    return list(dict.fromkeys(v for v in program.outputs if not isinstance(v, Literal) and v not in inputs))


def parts_of(roots: Sequence[Wanted], last: int) -> tuple[list[Part], dict[Root, int]]:
    """The parts, without equations: the preludes of all passes, then the slices; and the number of each root's.

    Roots of a pass that need a host leaf in common go together, and to the prelude what needs none.
    """
    parts, number_of = [Part(at) for at in range(last + 1)], dict[Root, int]()
    for at in range(last + 1):
        here = [each for each in roots if each.at == at]
        groups_here = groups([each.needs for each in here])
        slices = len(parts) - 1
        number_of |= {each.root: slices + k if k else at for each, k in zip(here, groups_here, strict=True)}
        parts += [Part(at) for _ in range(max(groups_here, default=0))]
    return parts, number_of


def divide(
    program: Program, known: Known, parts: Sequence[Part], number_of: Mapping[Root, int], shares: Shares
) -> None:
    """Puts the program's equations into the parts that need them, from the last one on, and says who provides what.

    A variable that one part provides to others is that part's result.
    """
    needed_by: dict[Var, Mask] = {v: 1 << number_of[v] for v in results_of(program)}
    provider: dict[Var, int] = {}
    preludes = (2 << known.last) - 1
    for eqn in reversed(program.eqns):
        effect = 1 << number_of[id(eqn)] if id(eqn) in number_of else 0
        needs = [0 if isinstance(v, DropVar) else needed_by.get(v, 0) for v in eqn.outvars]
        provided: list[Var] = []
        for k, v in enumerate(eqn.outvars):
            if needs[k] and _is_provided(eqn, v, needs[k], known, preludes):
                provider[v] = number_of[v] if v in known.scalars else known.earliest.get(v, 0)
                needs[k] = 1 << provider[v]
                provided.append(v)
        for part, share in shares.of(eqn, needs, effect).items():
            parts[part].eqns.append(share)
            parts[part].given.update(v for v in provided if provider[v] != part)
        for v, mask in zip(eqn.invars, backward(eqn, needs, effect), strict=True):
            if mask and not isinstance(v, Literal):
                needed_by[v] = known_mask | mask if (known_mask := needed_by.get(v)) else mask
    for part in parts:
        part.eqns.reverse()
    for v in dict.fromkeys([*results_of(program), *provider]):
        parts[provider.get(v, number_of.get(v, 0))].outputs.append(v)


def _is_provided(eqn: Equation, v: Var, needs: Mask, known: Known, preludes: Mask) -> bool:
    """Whether one part makes a variable for all that need it: none of them makes it again."""
    if known.needs_host[v]:
        return False
    shared = needs & preludes or needs.bit_count() > 1
    again = eqn.primitive.name in ELEMENTWISE  # cheaper computed again than kept, as an array, between its uses
    return bool(v.aval.shape == () or v in known.summaries or (shared and not again) or eqn.effects)


def _latest(passes: Iterable[int]) -> int:
    return max(passes, default=0)
