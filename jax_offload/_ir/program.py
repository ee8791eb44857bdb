"""A traced function as a flat list of equations."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_offload._base.barriers import equation_of_together
from jax_offload._base.jaxprs import (
    Atom,
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Equation,
    Jaxpr,
    Literal,
    Var,
    branches_of,
    called_by,
    holds_equations,
    jaxpr_like,
    jaxpr_of,
    nameless,
    renamed,
    variables,
    with_jaxprs,
    without_dead_code,
)
from jax_offload._base.jaxprs import (
    closed as as_closed,
)
from jax_offload._base.memory import Space
from jax_offload._base.own_primitives import is_mark
from jax_offload._base.private import says_nothing_of_placement
from jax_offload._base.shardings import Shards
from jax_offload._ir.primitives import CHECKPOINT, ELEMENTWISE, PLACED
from jax_offload._ir.propagate import needed_for


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function with nested ``jit`` inlined: ``outputs`` from ``inputs`` (constants first) by ``eqns``.

    ``shards`` says of inputs how they are divided between devices, as far as that is known; of a whole step also of
    the next values of leaves.
    """

    inputs: list[Var]
    outputs: list[Atom]
    eqns: list[Equation]
    consts: list[Any]
    debug_info: DebugInfo
    shards: Mapping[Var, Shards] = dataclasses.field(default_factory=dict[Var, Shards])

    @functools.cached_property
    def effects(self) -> frozenset[Any]:
        return frozenset[Any]().union(*(eqn.effects for eqn in self.eqns))

    @property
    def placing_equations(self) -> Jaxpr:
        """What of it jax looks for before it lowers anything: transfers, shardings, callbacks, each kind of transfer
        once. jax goes through all equations four times for that, and most are arithmetic."""
        kinds: dict[Any, Equation] = {}
        for eqn in self.eqns:
            if (name := eqn.primitive.name) in PLACED or name not in ELEMENTWISE:
                kinds.setdefault(tuple(map(id, eqn.params.values())) if name == "device_put" else id(eqn), eqn)
        eqns = list(kinds.values())
        defined = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
        return Jaxpr([], [v for v in read if v not in defined], [], eqns, self.effects, nameless(self.debug_info))

    @property
    def closed(self) -> ClosedJaxpr:
        """As a closed jaxpr."""
        n = len(self.consts)
        inputs = self.inputs[:n], self.inputs[n:]
        jaxpr = Jaxpr(*inputs, self.outputs, self.eqns, self.effects, nameless(self.debug_info))
        return as_closed(jaxpr, self.consts)

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Program]:
        """What is left for some of the results, and which of the inputs that needs; for a program without constants."""
        if all(used):  # jax's own way goes into every equation, and takes twice as long
            eqns, read = needed_for(self.eqns, variables(self.outputs), kept=lambda eqn: bool(eqn.effects))
            if not any(eqn.primitive.name not in ELEMENTWISE and holds_equations(eqn) for eqn in eqns):
                needed, inputs = [v in read for v in self.inputs], [v for v in self.inputs if v in read]
                same = len(eqns) == len(self.eqns) and all(needed)
                return needed, self if same else dataclasses.replace(self, inputs=inputs, eqns=eqns)
        jaxpr, needed = without_dead_code(self.closed.jaxpr, used)
        inputs, eqns = list(jaxpr.invars), list(jaxpr.eqns)
        return needed, dataclasses.replace(self, inputs=inputs, outputs=list(jaxpr.outvars), eqns=eqns)


def as_program(jaxpr: ClosedJaxpr) -> Program:
    """A closed jaxpr as a program with its equations as they are, nothing inlined."""
    inner = jaxpr.jaxpr
    inputs = [*inner.constvars, *inner.invars]
    return Program(inputs, list(inner.outvars), list(inner.eqns), list(jaxpr.consts), inner.debug_info)


Expand = Callable[[Equation], Program | None]  # what takes the place of an equation


def flat(
    step: ClosedJaxpr,
    *,
    any_jit: bool = False,
    opens: Callable[[Equation], bool] = lambda _: False,
) -> Program:
    """A closed jaxpr as a program.

    Args:
      step: the jaxpr.
      any_jit: whether each ``jit`` is inlined, whatever it says of placement.
      opens: of a ``jax.checkpoint``, whether it is, behind the barrier that keeps what it computes again apart.
    """
    eqns: list[Equation] = []
    consts: list[Any] = list(step.consts)
    const_vars: list[Var] = list(step.jaxpr.constvars)

    def walk(jaxpr: Jaxpr, env: dict[Var, Atom], nested: bool) -> list[Atom]:
        def read(v: Atom) -> Atom:
            return v if isinstance(v, Literal) else env.get(v, v)

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            inner = _inlinable(eqn, ins, any_jit)
            if inner is None and eqn.primitive.name in CHECKPOINT and opens(eqn):
                inner = as_closed(eqn.params["jaxpr"])
                if behind := {v: Var(v.aval) for v in _kept_apart(eqn, ins)}:
                    eqns.append(equation_of_together(behind))
                    ins = [v if isinstance(v, Literal) else behind.get(v, v) for v in ins]
            if inner is not None:
                ins = ins[len(ins) - len(inner.jaxpr.invars) :]  # without a cond's index
                # the same inner jaxpr may be called many times: its constants and variables get new names each time
                names = [Var(v.aval) for v in inner.jaxpr.constvars]
                const_vars.extend(names)
                consts.extend(inner.consts)
                scope = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*names, *ins], strict=True))
                env.update(zip(eqn.outvars, walk(inner.jaxpr, scope, True), strict=True))
                continue
            outs = eqn.outvars
            if nested:
                outs = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, outs, strict=True))
            here = eqn.replace(invars=ins, outvars=outs)
            eqns.extend([here] if len(ins) == 1 or eqn.primitive.name != "device_put" else _leaf_by_leaf(here))
        return [read(v) for v in jaxpr.outvars]

    outputs = walk(step.jaxpr, {}, False)
    return Program([*const_vars, *step.jaxpr.invars], outputs, eqns, consts, step.jaxpr.debug_info)


def _kept_apart(eqn: Equation, ins: Sequence[Atom]) -> list[Var]:
    """The operands of a ``jax.checkpoint`` that jax lowers it with behind a barrier."""
    said: bool | tuple[bool, ...] = eqn.params["prevent_cse"] if eqn.params["differentiated"] else False
    each = said if isinstance(said, tuple) else (said,) * len(ins)
    return [v for v, apart in zip(ins, each, strict=True) if apart and not isinstance(v, Literal)]


def _leaf_by_leaf(eqn: Equation) -> Iterator[Equation]:
    """Split the move of a whole tree into moves of its leaves, each with its own place."""
    of_leaf: dict[Any, dict[str, Any]] = {}  # a handful of ways, for hundreds of leaves
    for v, out, *said in zip(eqn.invars, eqn.outvars, *eqn.params.values(), strict=True):
        params = of_leaf.setdefault(tuple(map(id, said)), {k: (x,) for k, x in zip(eqn.params, said, strict=True)})
        yield eqn.replace(invars=[v], outvars=[out], params=params)


def expanded(jaxpr: Jaxpr, expand: Expand, enters: Callable[[Equation], bool] = lambda _: True) -> Jaxpr:
    """An open jaxpr with equations in it expanded, and nothing inlined; itself where there are none to be.

    ``enters``: the equations whose jaxprs are looked into.
    """
    eqns: list[Equation] = []
    env: dict[Var, Atom] = {}
    taken: set[Var] = set()

    def read(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else env.get(v, v)

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        if (program := expand(eqn)) is not None:
            env.update(zip(eqn.outvars, _spliced(program, ins, eqns, taken), strict=True))
            continue
        params = _expanded_in(eqn.params, expand, enters) if enters(eqn) else eqn.params
        same = params is eqn.params and all(map(operator.is_, ins, eqn.invars))
        eqns.append(eqn if same else eqn.replace(invars=ins, params=params))
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    outputs = [read(v) for v in jaxpr.outvars]
    return jaxpr if same else jaxpr_like(jaxpr, eqns, outputs)


def _spliced(program: Program, operands: Sequence[Atom], eqns: list[Equation], taken: set[Var]) -> list[Atom]:
    """Appends a program's equations to ``eqns``, for these operands; gives its results.

    ``taken``: the variables of programs that are there already. A second one that has them too gets new ones.
    """
    consts = [Literal(x, v.aval) for x, v in zip(program.consts, program.inputs, strict=False)]
    env: dict[Var, Atom] = dict(zip(program.inputs, [*consts, *operands], strict=True))

    def read(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else env.get(v, v)

    for eqn in program.eqns:
        ins, outs = [read(v) for v in eqn.invars], eqn.outvars
        if not taken.isdisjoint(outs):
            outs = [v if isinstance(v, DropVar) else Var(v.aval) for v in outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        taken.update(outs)
        same = outs is eqn.outvars and all(map(operator.is_, ins, eqn.invars))
        eqns.append(eqn if same else eqn.replace(invars=ins, outvars=outs))
    return [read(v) for v in program.outputs]


def spliced(program: Program, operands: Sequence[Atom], eqns: list[Equation]) -> list[Atom]:
    """Appends a program's equations to ``eqns``, with variables of their own, for these operands; gives its results."""
    return _spliced(program, operands, eqns, {v for eqn in program.eqns for v in eqn.outvars})


def replaced(program: Program, at: int, by: Program) -> Program:
    """``program`` with another in the place of its equation ``at``, of the same operands and results."""
    eqns = program.eqns[:at]
    defined = _spliced(by, program.eqns[at].invars, eqns, set())
    env = dict(zip(program.eqns[at].outvars, defined, strict=True))
    eqns += [eqn.replace(invars=[renamed(env, v) for v in eqn.invars]) for eqn in program.eqns[at + 1 :]]
    return dataclasses.replace(program, eqns=eqns, outputs=[renamed(env, v) for v in program.outputs])


def _expanded_in(
    params: dict[str, Any], expand: Expand, enters: Callable[[Equation], bool] = lambda _: True
) -> dict[str, Any]:
    """An equation's parameters with the jaxprs in them expanded; the same object if nothing changes."""
    return with_jaxprs(params, lambda jaxpr: expanded(jaxpr, expand, enters))


def without_effects_of_axes(program: Program) -> Program:
    """Drop the effects that jax records for collectives inside ``shard_map``: their order is free."""
    eqns = [eqn.replace(effects=frozenset(e for e in eqn.effects if type(e).__name__ != "NamedAxisEffect"))
            if eqn.effects else eqn for eqn in program.eqns]  # fmt: skip
    return dataclasses.replace(program, eqns=eqns)


def without(program: Program, known: Callable[[Equation, Sequence[Atom]], Sequence[Atom] | None]) -> Program:
    """``program`` without the equations whose results are there already.

    ``known``: for an equation and its operands what its results are; ``None``: something new.
    """
    names: dict[Var, Atom] = {}
    eqns: list[Equation] = []
    for eqn in program.eqns:
        ins = [renamed(names, v) for v in eqn.invars] if names else eqn.invars
        if (results := known(eqn, ins)) is not None:
            names.update(zip(eqn.outvars, results, strict=True))
        else:
            eqns.append(eqn if all(map(operator.is_, ins, eqn.invars)) else eqn.replace(invars=ins))
    return dataclasses.replace(program, eqns=eqns, outputs=[renamed(names, v) for v in program.outputs])


def without_round_trips(program: Program) -> Program:
    """The program without moves that change nothing.

    What is loaded and stored again untouched, or stored and loaded, is what it was. So is what is put into the sharding
    that it was just put into: an offload and one inside it both do that. And a mark does nothing.
    """
    moved_from: dict[Var, Atom] = {}  # result of a move between memories -> what it was
    constrained: dict[Var, Any] = {}  # result of a sharding constraint -> what it says

    def known(eqn: Equation, ins: Sequence[Atom]) -> Sequence[Atom] | None:
        if is_mark(eqn):
            return ins
        if _is_move(eqn):
            (out,), x = eqn.outvars, ins[0]
            moved_from[out] = origin = x if isinstance(x, Literal) else moved_from.get(x, x)
            if isinstance(origin, Var) and origin.aval == out.aval and origin is not x:
                return [origin]
        elif eqn.primitive.name in ("sharding_constraint", "reshard"):
            (out,), x, said = eqn.outvars, ins[0], (eqn.params, eqn.outvars[0].aval)
            if isinstance(x, Var) and constrained.get(x) == said:
                return [x]
            constrained[out] = said
        return None

    return without(program, known)


def _is_move(eqn: Equation) -> bool:
    return eqn.primitive.name == "device_put" and all(isinstance(d, Space) for d in eqn.params["devices"])


def _inlinable(eqn: Equation, operands: list[Atom], any_jit: bool) -> ClosedJaxpr | None:
    """The jaxpr of a nested ``jit`` that says nothing about placement, or of a ``cond`` whose branch is known.

    optax and jnp put the former around helpers; ``MultiSteps`` that never skips is the latter.
    """
    if eqn.primitive.name == "cond" and isinstance(operands[0], Literal):
        return branches_of(eqn)[int(operands[0].val)]
    if eqn.primitive.name in ("eval_jaxpr", "closed_call"):  # of a backward pass, and of mutable arrays
        return called_by(eqn)
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    if any_jit:
        return called_by(eqn)
    return called_by(eqn) if says_nothing_of_placement(eqn.params) else None


def copy_of(eqn: Equation, env: dict[Var, Atom]) -> Equation:
    """The same equation, of what ``env`` says, with results of its own, which ``env`` then knows."""
    invars = [renamed(env, v) for v in eqn.invars]
    outs = [Var(v.aval) for v in eqn.outvars]
    env.update(zip(eqn.outvars, outs, strict=True))
    return eqn.replace(invars=invars, outvars=outs)


def only_equation(run: Callable[..., Any], *operands: Atom) -> Equation:
    """The only equation of ``run``, of these operands."""
    (eqn,) = jaxpr_of(run, *(v.aval for v in operands))[0].jaxpr.eqns
    return eqn.replace(invars=[*operands], outvars=[Var(eqn.outvars[0].aval)])
