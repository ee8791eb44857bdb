"""A traced function as a flat list of equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import partial_eval as pe

from jax_offload._base.jaxprs import closed
from jax_offload._base.memory import Space
from jax_offload._base.shardings import Shards

Var = Any
Expand = Callable[[Any], Any]  # an equation -> the closed jaxpr that takes its place, or None


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

    @property
    def effects(self) -> frozenset[Any]:
        return frozenset().union(*(eqn.effects for eqn in self.eqns))

    @property
    def closed(self) -> Any:
        """As a closed jaxpr."""
        nameless, n = self.debug_info._replace(arg_names=None, result_paths=None), len(self.consts)
        jaxpr = jex.Jaxpr(self.inputs[:n], self.inputs[n:], self.outputs, self.eqns, self.effects, nameless)
        return closed(jaxpr, self.consts)

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Program]:
        """What is left for some of the results, and which of the inputs that needs; for a program without constants."""
        jaxpr, needed = pe.dce_jaxpr(self.closed.jaxpr, list(used))
        return needed, dataclasses.replace(self, inputs=jaxpr.invars, outputs=jaxpr.outvars, eqns=jaxpr.eqns)


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """``fun``'s program for the types of ``args``, and the structure of its result."""
    jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return _without_round_trips(flat(jaxpr)), jax.tree.structure(shapes)


def flat(step: Any, *, any_jit: bool = False, expand: Expand | None = None) -> Program:
    """A closed jaxpr as a program.

    Args:
      step: the jaxpr.
      any_jit: whether each ``jit`` is inlined, whatever it says of placement.
      expand: what takes the place of which equations, in branches and loops too.
    """
    eqns: list[Any] = []
    consts: list[Any] = list(step.consts)
    const_vars: list[Var] = list(step.jaxpr.constvars)

    def inline(eqn: Any, operands: list[Any]) -> Any | None:
        inner = None if expand is None else expand(eqn)
        return _inlinable(eqn, operands, any_jit) if inner is None else inner

    def named(inner: Any) -> list[Var]:
        # the same inner jaxpr may be called many times: its constants and variables get new names each time
        names = [jex.Var(v.aval) for v in inner.jaxpr.constvars]
        const_vars.extend(names)
        consts.extend(inner.consts)
        return names

    outputs = _walk(step.jaxpr, {}, eqns, inline, named, expand)
    return Program([*const_vars, *step.jaxpr.invars], outputs, eqns, consts, step.jaxpr.debug_info)


def _walk(
    jaxpr: Any,
    env: dict[Var, Any],
    eqns: list[Any],
    inline: Callable[[Any, list[Any]], Any | None],
    named: Callable[[Any], list[Any]],
    expand: Expand | None,
    nested: bool = False,
) -> list[Any]:
    """Appends a jaxpr's equations to ``eqns``, with what is inlined in the places of its calls; gives its results."""

    def read(v: Any) -> Any:
        return v if isinstance(v, jex.Literal) else env.get(v, v)

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        if (inner := inline(eqn, ins)) is not None:
            ins = ins[len(ins) - len(inner.jaxpr.invars) :]  # without a cond's index
            scope = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*named(inner), *ins], strict=True))
            results = _walk(inner.jaxpr, scope, eqns, inline, named, expand, True)
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        outs = eqn.outvars
        if nested:
            outs = [v if isinstance(v, jex.DropVar) else jex.Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
        params = eqn.params if expand is None else _expanded(eqn.params, expand)
        eqns.append(eqn.replace(invars=ins, outvars=outs, params=params))
    return [read(v) for v in jaxpr.outvars]


def _expanded(params: dict[str, Any], expand: Expand) -> dict[str, Any]:
    """An equation's parameters, with the equations in their jaxprs expanded; the same where there are none to be."""
    if not any(True for _ in jex.jaxprs_in_params(params)):
        return params

    def one(value: Any) -> Any:
        if type(value) in (tuple, list):
            new = [one(x) for x in value]
            return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
        if not isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):  # pyright: ignore[reportPrivateImportUsage]
            return value
        jaxpr = getattr(value, "jaxpr", value)
        new = expanded(jaxpr, expand)
        return value if new is jaxpr else new if value is jaxpr else value.replace(jaxpr=new)

    found = {name: one(value) for name, value in params.items()}
    return params if all(found[name] is value for name, value in params.items()) else found


def expanded(jaxpr: Any, expand: Expand) -> Any:
    """An open jaxpr, with the equations in it expanded; itself where there are none to be."""

    def as_literals(inner: Any) -> list[Any]:
        pairs = zip(inner.consts, inner.jaxpr.constvars, strict=True)
        return [jex.Literal(x, v.aval) for x, v in pairs]

    eqns: list[Any] = []
    outputs = _walk(jaxpr, {}, eqns, lambda eqn, _: expand(eqn), as_literals, expand)
    same = all(a.primitive is b.primitive and a.params is b.params for a, b in zip(eqns, jaxpr.eqns, strict=False))
    return jaxpr if same and len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns, outvars=outputs)


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
