"""One engine that propagates facts through the equations of a program, forward and backward.

A kind of fact is a rule: what an equation's results are, given its operands. The engine enters branches, calls and
loops.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, TypeVar

from jax_offload._program.jaxprs import Atom, Equation, Inner, Jaxpr, Literal, Var, inner_of, variables
from jax_offload._program.primitives import is_composite

T = TypeVar("T")
Mask = int  # a set of small numbers, as the bits of an int


@dataclasses.dataclass(frozen=True)
class Facts(Generic[T]):
    """A kind of fact about values, and how an equation hands it from its operands to its results.

    Attributes:
      nothing: the fact about a constant, and about a variable that no rule mentions.
      join: the fact about a value that is made of several, or is one of several.
      rule: the facts about an equation's results, given the equation and the facts about its operands. Without one, and
        where it returns ``None``, they follow from the jaxprs that the equation runs, or are the join of its operands'
        facts where it runs none.
      entered: the names of the primitives whose jaxprs the engine enters; ``None``: all.
      choice_counts: whether what chooses a branch is one of the values that the results are made of.
    """

    nothing: T
    join: Callable[[Iterable[T]], T]
    rule: Callable[[Equation, Sequence[T]], Sequence[T] | None] | None = None
    entered: frozenset[str] | None = None
    choice_counts: bool = True

    def read(self, env: Mapping[Var, T], atoms: Iterable[Atom]) -> list[T]:
        """The facts about some operands."""
        return [self.nothing if isinstance(v, Literal) else env.get(v, self.nothing) for v in atoms]

    def spread(self, eqns: Iterable[Equation], env: dict[Var, T]) -> dict[Var, T]:
        """``env``, extended by the facts about the equations' results."""
        for eqn in eqns:
            env.update(zip(eqn.outvars, self.after(eqn, self.read(env, eqn.invars)), strict=True))
        return env

    def through(self, jaxpr: Jaxpr, given: Sequence[T]) -> list[T]:
        """The facts about a jaxpr's results, given the facts about its inputs."""
        return self.read(self.spread(jaxpr.eqns, dict(zip(jaxpr.invars, given, strict=True))), jaxpr.outvars)

    def after(self, eqn: Equation, given: Sequence[T]) -> Sequence[T]:
        """The facts about an equation's results, given the facts about its operands."""
        if self.rule is not None and (found := self.rule(eqn, given)) is not None:
            return found
        # Through the equations inside, not from a set of operands for each result: in a cond around all of an update
        # those sets together grow with the square of the leaves.
        enters = (self.entered is None or eqn.primitive.name in self.entered) and not is_composite(eqn)
        inner = inner_of(eqn) if enters else []
        made = [each for each in (self._run(each, given) for each in inner) if len(each) == len(eqn.outvars)]
        if not made:
            return [self.join(given)] * len(eqn.outvars)
        common = given[: inner[0].first if self.choice_counts else 0]
        return [self.join([*common, *each]) for each in zip(*made, strict=True)]

    def _run(self, inner: Inner, given: Sequence[T]) -> list[T]:
        """The facts about a jaxpr's results; a loop runs until an iteration adds nothing."""
        facts, carried = list(given[inner.first :]), inner.carried
        while True:
            made = self.through(inner.jaxpr, facts)
            before = facts[carried.start : carried.stop]
            made[: len(carried)] = map(self.join, zip(before, made, strict=False))
            if made[: len(carried)] == before:
                return made
            facts[carried.start : carried.stop] = made[: len(carried)]


def union(masks: Iterable[Mask]) -> Mask:
    total = 0
    for mask in masks:
        total |= mask
    return total


# Which operands results depend on. ``partial_eval.dce_jaxpr`` cuts into these in the same way; a loop is one equation.
_CUT_INTO = frozenset(("cond", "jit", "pjit", "closed_call", "custom_jvp_call"))
NEEDS = Facts[Mask](0, union, entered=_CUT_INTO)


def forward(eqn: Equation, env: Mapping[Var, Mask]) -> Sequence[Mask]:
    """For each result, the union of the facts in ``env`` about the operands on which it depends."""
    return NEEDS.after(eqn, NEEDS.read(env, eqn.invars))


def backward(eqn: Equation, needs: Sequence[Mask], effect: Mask) -> list[Mask]:
    """For each operand, the union of the needs of the results that depend on it, and of an effect."""
    total = needs[0] if len(needs) == 1 else union(needs)
    if eqn.primitive.name not in _CUT_INTO or is_composite(eqn) or not (inner := inner_of(eqn)):
        return [total | effect] * len(eqn.invars)
    found = [_needs_of_inputs(each.jaxpr, needs) for each in inner]
    return [total | effect] * inner[0].first + [union(each) | effect for each in zip(*found, strict=True)]


def _needs_of_inputs(jaxpr: Jaxpr, needs: Sequence[Mask]) -> list[Mask]:
    """The needs of a jaxpr's inputs, given the needs of its results."""
    env: dict[Var, Mask] = {}
    add_needs(env, jaxpr.outvars, needs)
    for eqn in reversed(jaxpr.eqns):
        add_needs(env, eqn.invars, backward(eqn, [env.get(v, 0) for v in eqn.outvars], 0))
    return [env.get(v, 0) for v in jaxpr.invars]


def add_needs(env: dict[Var, Mask], atoms: Sequence[Atom], masks: Sequence[Mask]) -> None:
    """Add needs to what is known about variables."""
    for v, mask in zip(atoms, masks, strict=True):
        if mask and not isinstance(v, Literal):
            env[v] = known | mask if (known := env.get(v)) else mask


def needed_for(
    eqns: Sequence[Equation],
    wanted: Iterable[Var],
    through: Callable[[Equation], bool] = lambda _: True,
    kept: Callable[[Equation], bool] = lambda _: False,
) -> tuple[list[Equation], set[Var]]:
    """Return, in order, the equations needed to make some variables, and these variables with all that they need.

    Args:
      eqns: the equations of a program.
      wanted: the variables.
      through: whether an equation counts, and the search goes on to its operands.
      kept: whether an equation is needed in any case.
    """
    needed, taken = {*wanted}, list[Equation]()
    for eqn in reversed(eqns):
        if (not needed.isdisjoint(eqn.outvars) and through(eqn)) or kept(eqn):
            taken.append(eqn)
            needed.update(variables(eqn.invars))
    return taken[::-1], needed


def made_of(eqns: Iterable[Equation], marked: Callable[[Equation], bool], start: Iterable[Var] = ()) -> set[Var]:
    """Return the variables that depend on the results of marked equations, or on ``start``, and these themselves."""
    found = {*start}
    for eqn in eqns:
        if marked(eqn) or not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def groups(masks: Sequence[Mask]) -> list[int]:
    """Numbers from 1 for masks that share a bit, directly or through others; 0 for the empty mask."""
    parent: dict[int, int] = {}

    def find(i: int) -> int:
        while (above := parent.setdefault(i, i)) != i:
            parent[i] = i = parent[above]
        return i

    for mask in dict.fromkeys(masks):  # often all are equal, and have a bit for each leaf
        roots = [find(bit) for bit in bits(mask)]
        parent.update(dict.fromkeys(roots, roots[0] if roots else 0))
    number: dict[int, int] = {}
    return [0 if not m else number.setdefault(find(next(bits(m))), len(number) + 1) for m in masks]


def bits(mask: Mask) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# ---- parts of a program, in order


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A part of a program or of a schedule.

    Attributes:
      payload: the part itself, known to whoever arranges or runs it.
      reads, makes: its operands and its results.
      kept: whether it stays although nobody reads its results.
      takes: the operands whose buffers it overwrites or frees.
    """

    payload: Any
    reads: Sequence[Var]
    makes: Sequence[Var]
    kept: bool = False
    takes: Set[Var] = frozenset()


def makers(nodes: Sequence[Node]) -> dict[Var, int]:
    """Variable -> the number of the node that makes it."""
    return {v: k for k, node in enumerate(nodes) for v in node.makes}


def needed(nodes: Sequence[Node], wanted: Sequence[Var], kept: bool = True) -> set[int]:
    """The numbers of the nodes needed to make ``wanted``, and with ``kept`` of the nodes that stay."""
    defined, number = makers(nodes), {node: k for k, node in enumerate(nodes)}
    roots = [defined[v] for v in wanted if v in defined] + [k for k, node in enumerate(nodes) if kept and node.kept]
    return {number[node] for node in topological(nodes, roots)}


def topological(nodes: Sequence[Node], which: Iterable[int]) -> list[Node]:
    """The nodes numbered ``which``, in that order, except that each comes after the nodes that it needs.

    Raises:
      RuntimeError: two of them need each other.
    """
    defined, order, begun, done = makers(nodes), list[Node](), set[int](), set[int]()
    for first in which:
        stack = [(first, False)]
        while stack:
            k, ready = stack.pop()
            if k in done:
                continue
            if ready:
                done.add(k)
                order.append(nodes[k])
                continue
            if k in begun:
                raise RuntimeError(f"parts of the step need each other, one of them {nodes[k].payload}; report this.")
            begun.add(k)
            stack.append((k, True))
            stack += [(defined[v], False) for v in reversed(nodes[k].reads) if v in defined and defined[v] not in done]
    return order
