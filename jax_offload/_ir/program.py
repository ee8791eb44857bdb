"""A traced function as a flat list of equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax_offload._base.jaxprs import (
    Atom,
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Equation,
    Jaxpr,
    Literal,
    Var,
    barrier,
    branches_of,
    called_by,
    jaxpr_of,
)
from jax_offload._base.jaxprs import (
    closed as as_closed,
)
from jax_offload._base.memory import Space
from jax_offload._base.shardings import Shards


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function with nested ``jit`` inlined: ``outputs`` from ``inputs`` (constants first) by ``eqns``.

    ``shards`` says of inputs how they are divided between devices, as far as that is known.
    """

    inputs: list[Var]
    outputs: list[Atom]
    eqns: list[Equation]
    consts: list[Any]
    debug_info: DebugInfo
    shards: Mapping[Var, Shards] = dataclasses.field(default_factory=dict[Var, Shards])


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """``fun``'s program for the types of ``args``, and the structure of its result."""
    closed, result = jaxpr_of(fun, *args)
    return _without_round_trips(flat(closed)), result


def flat(closed: ClosedJaxpr, *, any_jit: bool = False, checkpoints: bool = False) -> Program:
    """A closed jaxpr as a program.

    Args:
      closed: it.
      any_jit: whether each ``jit`` is inlined, whatever it says of placement.
      checkpoints: whether each ``jax.checkpoint`` is, behind the barrier that keeps what it computes again apart.
    """
    eqns: list[Equation] = []
    consts: list[Any] = list(closed.consts)
    const_vars: list[Var] = list(closed.jaxpr.constvars)

    def walk(jaxpr: Jaxpr, env: dict[Var, Atom], nested: bool) -> list[Atom]:
        def read(v: Atom) -> Atom:
            return v if isinstance(v, Literal) else env.get(v, v)

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            inner = _inlinable(eqn, ins, any_jit)
            if inner is None and checkpoints and eqn.primitive.name in ("remat2", "checkpoint"):
                inner = as_closed(eqn.params["jaxpr"])
                if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
                    behind = {v: Var(v.aval) for v in ins if not isinstance(v, Literal)}
                    eqns.append(barrier(behind))
                    ins = [v if isinstance(v, Literal) else behind[v] for v in ins]
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
            eqns.append(eqn.replace(invars=ins, outvars=outs))
        return [read(v) for v in jaxpr.outvars]

    outputs = walk(closed.jaxpr, {}, False)
    return Program([*const_vars, *closed.jaxpr.invars], outputs, eqns, consts, closed.jaxpr.debug_info)


def _without_round_trips(program: Program) -> Program:
    """What is loaded and stored again untouched, or stored and loaded, is what it was: nothing moves."""
    moved_from: dict[Var, Atom] = {}  # result of a move between memories -> what it was
    same: dict[Var, Atom] = {}

    def read(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else same.get(v, v)

    eqns: list[Equation] = []
    for eqn in program.eqns:
        ins = [read(v) for v in eqn.invars]
        if _is_move(eqn):
            (out,) = eqn.outvars
            moved_from[out] = origin = ins[0] if isinstance(ins[0], Literal) else moved_from.get(ins[0], ins[0])
            if not isinstance(origin, Literal) and origin.aval == out.aval and origin is not ins[0]:
                same[out] = origin
                continue
        eqns.append(eqn if all(a is b for a, b in zip(ins, eqn.invars, strict=True)) else eqn.replace(invars=ins))
    return dataclasses.replace(program, eqns=eqns, outputs=[read(v) for v in program.outputs])


def _is_move(eqn: Equation) -> bool:
    return eqn.primitive.name == "device_put" and all(isinstance(d, Space) for d in eqn.params["devices"])


def _inlinable(eqn: Equation, operands: list[Atom], any_jit: bool) -> ClosedJaxpr | None:
    """The jaxpr of a nested ``jit`` that says nothing about placement, or of a ``cond`` whose branch is known.

    optax and jnp put the former around helpers; ``MultiSteps`` that never skips is the latter.
    """
    if eqn.primitive.name == "cond" and isinstance(operands[0], Literal):
        return branches_of(eqn)[int(operands[0].val)]
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    if any_jit:
        return called_by(eqn)
    if any(eqn.params["donated_invars"]):
        return None
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    layouts = (*eqn.params["in_layouts"], *eqn.params["out_layouts"])
    plain = all(type(s).__name__ == "UnspecifiedValue" for s in shardings) and all(x is None for x in layouts)
    return called_by(eqn) if plain and not eqn.params["compiler_options_kvs"] else None
