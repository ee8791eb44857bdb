"""A traced function as a flat list of equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jex

from jax_offload._base.jaxprs import barrier, closed as as_closed
from jax_offload._base.memory import Space
from jax_offload._base.shardings import Shards

Var = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function with nested ``jit`` inlined: ``outputs`` from ``inputs`` (constants first) by ``eqns``.

    ``shards`` says of inputs how they are divided between devices, as far as that is known.
    """

    inputs: list[Var]
    outputs: list[Any]
    eqns: list[Any]
    consts: list[Any]
    debug_info: Any
    shards: Mapping[Var, Shards] = dataclasses.field(default_factory=dict)


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """``fun``'s program for the types of ``args``, and the structure of its result."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return _without_round_trips(flat(closed)), jax.tree.structure(shapes)


def flat(closed: Any, *, any_jit: bool = False, checkpoints: bool = False) -> Program:
    """A closed jaxpr as a program.

    Args:
      closed: it.
      any_jit: whether each ``jit`` is inlined, whatever it says of placement.
      checkpoints: whether each ``jax.checkpoint`` is, behind the barrier that keeps what it computes again apart.
    """
    eqns: list[Any] = []
    consts: list[Any] = list(closed.consts)
    const_vars: list[Var] = list(closed.jaxpr.constvars)

    def walk(jaxpr: Any, env: dict[Var, Any], nested: bool) -> list[Any]:
        def read(v: Any) -> Any:
            return v if isinstance(v, jex.Literal) else env.get(v, v)

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            inner = _inlinable(eqn, ins, any_jit)
            if inner is None and checkpoints and eqn.primitive.name in ("remat2", "checkpoint"):
                inner = as_closed(eqn.params["jaxpr"])
                if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
                    behind = {v: jex.Var(v.aval) for v in ins if not isinstance(v, jex.Literal)}
                    eqns.append(barrier(behind))
                    ins = [v if isinstance(v, jex.Literal) else behind[v] for v in ins]
            if inner is not None:
                ins = ins[len(ins) - len(inner.jaxpr.invars) :]  # without a cond's index
                # the same inner jaxpr may be called many times: its constants and variables get new names each time
                names = [jex.Var(v.aval) for v in inner.jaxpr.constvars]
                const_vars.extend(names)
                consts.extend(inner.consts)
                scope = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*names, *ins], strict=True))
                env.update(zip(eqn.outvars, walk(inner.jaxpr, scope, True), strict=True))
                continue
            outs = eqn.outvars
            if nested:
                outs = [v if isinstance(v, jex.DropVar) else jex.Var(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, outs, strict=True))
            eqns.append(eqn.replace(invars=ins, outvars=outs))
        return [read(v) for v in jaxpr.outvars]

    outputs = walk(closed.jaxpr, {}, False)
    return Program([*const_vars, *closed.jaxpr.invars], outputs, eqns, consts, closed.jaxpr.debug_info)


def _without_round_trips(program: Program) -> Program:
    """What is loaded and stored again untouched, or stored and loaded, is what it was: nothing moves."""
    moved_from: dict[Var, Any] = {}  # result of a move between memories -> what it was
    same: dict[Var, Any] = {}

    def read(v: Any) -> Any:
        return v if isinstance(v, jex.Literal) else same.get(v, v)

    eqns = []
    for eqn in program.eqns:
        ins = [read(v) for v in eqn.invars]
        if _is_move(eqn):
            (out,) = eqn.outvars
            moved_from[out] = origin = moved_from.get(ins[0], ins[0])
            if not isinstance(origin, jex.Literal) and origin.aval == out.aval and origin is not ins[0]:
                same[out] = origin
                continue
        eqns.append(eqn if all(a is b for a, b in zip(ins, eqn.invars, strict=True)) else eqn.replace(invars=ins))
    return dataclasses.replace(program, eqns=eqns, outputs=[read(v) for v in program.outputs])


def _is_move(eqn: Any) -> bool:
    return eqn.primitive.name == "device_put" and all(isinstance(d, Space) for d in eqn.params["devices"])


def _inlinable(eqn: Any, operands: list[Any], any_jit: bool) -> Any | None:
    """The jaxpr of a nested ``jit`` that says nothing about placement, or of a ``cond`` whose branch is known.

    optax and jnp put the former around helpers; ``MultiSteps`` that never skips is the latter.
    """
    if eqn.primitive.name == "cond" and isinstance(operands[0], jex.Literal):
        return eqn.params["branches"][int(operands[0].val)]
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    if any_jit:
        return eqn.params["jaxpr"]
    if any(eqn.params["donated_invars"]):
        return None
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    layouts = (*eqn.params["in_layouts"], *eqn.params["out_layouts"])
    plain = all(type(s).__name__ == "UnspecifiedValue" for s in shardings) and all(x is None for x in layouts)
    return eqn.params["jaxpr"] if plain and not eqn.params["compiler_options_kvs"] else None
