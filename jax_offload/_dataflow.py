"""What each part of a traced update depends on: the update, cut into slices that need few host leaves each.

The update of an optimizer is traced once, as the *usual recipe*: every host leaf loaded, the whole update, every
host leaf stored. A slice is what remains of it for some results: for AdamW, one parameter's update and moments,
with the loads and stores of just these. No optimizer is known by name; whatever its equations say holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import partial_eval as pe

from jax_offload._memory import is_host_aval

Var = Any
Mask = int  # a set of small numbers, as the bits of an int


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function with nested ``jit`` inlined: ``outputs`` from ``inputs`` (constants first) by ``eqns``."""

    inputs: list[Var]
    outputs: list[Any]
    eqns: list[Any]
    consts: list[Any]
    debug_info: Any


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a program. ``run(*inputs) -> outputs``, both given as variables of the program."""

    inputs: list[Var]
    outputs: list[Var]
    jaxpr: Any
    run: Callable[..., list[Any]]

    @property
    def loads(self) -> list[Var]:
        """The host leaves that it needs."""
        return [v for v in self.inputs if is_host_aval(v.aval)]

    @property
    def stores(self) -> list[Var]:
        """The host leaves that it makes."""
        return [v for v in self.outputs if is_host_aval(v.aval)]


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """``fun``'s program for the types of ``args``, and the structure of its result."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    eqns: list[Any] = []
    consts: list[Any] = list(closed.consts)
    const_vars: list[Var] = list(closed.jaxpr.constvars)

    def walk(jaxpr: Any, env: dict[Var, Any], nested: bool) -> list[Any]:
        def read(v: Any) -> Any:
            return v if isinstance(v, jex.Literal) else env.get(v, v)

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if (inner := _inlinable(eqn)) is not None:
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
    program = Program([*const_vars, *closed.jaxpr.invars], outputs, eqns, consts, closed.jaxpr.debug_info)
    return _without_round_trips(program), jax.tree.structure(shapes)


def cut(program: Program) -> tuple[Slice, list[Slice]]:
    """The program as a prelude and slices, each of which can run by itself once the prelude has.

    Two results belong to one slice where they need a host leaf in common: then loading it once serves both. What
    needs no host leaf and serves several slices, or is a number (a global norm, a learning rate), is the prelude's.
    """
    hosts = {v: 1 << i for i, v in enumerate(v for v in program.inputs if is_host_aval(v.aval))}
    needs_host: dict[Var, Mask] = dict(hosts)
    for eqn in program.eqns:
        for v, mask in zip(eqn.outvars, _forward(eqn, needs_host), strict=True):
            needs_host[v] = mask

    # the roots: every result, and every effect (a callback, say), which must happen though nobody reads it
    inputs = set(program.inputs)
    results = [v for v in program.outputs if not isinstance(v, jex.Literal) and v not in inputs]
    effects = [eqn for eqn in program.eqns if eqn.effects]
    masks = [needs_host.get(v, 0) for v in results] + [
        _union(needs_host.get(v, 0) for v in eqn.invars if not isinstance(v, jex.Literal)) for eqn in effects
    ]
    group_of = _groups(masks)  # 0 is the prelude

    needed_by: dict[Var, Mask] = {}
    for v, group in zip(results, group_of, strict=False):
        needed_by[v] = needed_by.get(v, 0) | 1 << group
    effect_of = {id(eqn): 1 << g for eqn, g in zip(effects, group_of[len(results) :], strict=True)}
    members: dict[int, list[Any]] = {0: []}
    prelude_vars: set[Var] = set()
    for eqn in reversed(program.eqns):
        needs = [0 if isinstance(v, jex.DropVar) else needed_by.get(v, 0) for v in eqn.outvars]
        for k, v in enumerate(eqn.outvars):
            shared = needs[k] & 1 or needs[k].bit_count() > 1 or (needs[k] and v.aval.shape == ())
            if shared and not needs_host.get(v, 0):
                prelude_vars.add(v)
                needs[k] = 1
        total = _union(needs) | effect_of.get(id(eqn), 0)
        for group in _bits(total):
            members.setdefault(group, []).append(eqn)
        for v, mask in zip(eqn.invars, _backward(eqn, needs, effect_of.get(id(eqn), 0)), strict=True):
            if not isinstance(v, jex.Literal):
                needed_by[v] = needed_by.get(v, 0) | mask

    outputs: dict[int, dict[Var, None]] = {g: {} for g in members}
    for v, group in zip(results, group_of, strict=False):
        outputs[0 if v in prelude_vars else group][v] = None
    slices = []
    for group in sorted(set(members) - {0}):
        part = _slice(program, members[group][::-1], list(outputs[group]), available=prelude_vars)
        slices.append(part)
        outputs[0].update((v, None) for v in part.inputs if v in prelude_vars)
    return _slice(program, members[0][::-1], list(outputs[0])), slices


def _slice(program: Program, eqns: list[Any], outputs: list[Var], available: set[Var] = frozenset()) -> Slice:  # pyright: ignore
    made = {v for eqn in eqns for v in eqn.outvars} - available
    free = dict.fromkeys(
        v for vs in [*(eqn.invars for eqn in eqns), outputs] for v in vs
        if not isinstance(v, jex.Literal) and v not in made
    )  # fmt: skip
    inputs = list(free)
    # an equation of which only some results are wanted (a cond) may still name the others: let dce cut inside it
    eqns = [_renamed(eqn, available) for eqn in eqns]
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    debug_info = program.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = jex.Jaxpr([], inputs, outputs, eqns, effects, debug_info)
    if any(True for eqn in eqns for _ in jex.jaxprs_in_params(eqn.params)):
        jaxpr, used = pe.dce_jaxpr(jaxpr, [True] * len(outputs))
        inputs = [v for v, u in zip(inputs, used, strict=True) if u]
    fun = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))  # pyright: ignore[reportPrivateImportUsage]
    return Slice(inputs, outputs, jaxpr, fun)


def _renamed(eqn: Any, available: set[Var]) -> Any:
    """``eqn`` without the results that are given already, so that a slice does not define one of its inputs."""
    if not any(v in available for v in eqn.outvars):
        return eqn
    return eqn.replace(outvars=[jex.Var(v.aval) if v in available else v for v in eqn.outvars])


def _without_round_trips(program: Program) -> Program:
    """Results that are a host leaf loaded and stored again, untouched, become that leaf: nothing moves."""
    made_by = {v: eqn for eqn in program.eqns for v in eqn.outvars if eqn.primitive.name == "device_put"}
    inputs = set(program.inputs)

    def origin(v: Any) -> Any:
        source = v
        while not isinstance(source, jex.Literal) and source in made_by:
            source = made_by[source].invars[0]
        untouched = not isinstance(source, jex.Literal) and source in inputs and source.aval == v.aval
        return source if untouched else v

    return dataclasses.replace(program, outputs=[origin(v) for v in program.outputs])


def _inlinable(eqn: Any) -> Any | None:
    """The jaxpr of a nested ``jit`` that says nothing about placement; optax and jnp put them around helpers."""
    if eqn.primitive.name not in ("jit", "pjit") or any(eqn.params["donated_invars"]):
        return None
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    layouts = (*eqn.params["in_layouts"], *eqn.params["out_layouts"])
    plain = all(type(s).__name__ == "UnspecifiedValue" for s in shardings) and all(x is None for x in layouts)
    return eqn.params["jaxpr"] if plain and not eqn.params["compiler_options_kvs"] else None


# ---- which results need which operands: sets as bit masks, one pass forward and one backward --------------------


def _reach(eqn: Any) -> list[Mask] | None:
    """For each result of an equation, the operands it depends on; ``None``: every result on all of them.

    Looks inside ``cond`` and calls, as ``partial_eval.dce_jaxpr`` does when it cuts them. Loops count as a whole.
    """
    if eqn.primitive.name == "cond":
        branches = [_reach_jaxpr(b.jaxpr) for b in eqn.params["branches"]]
        return [_union(masks) << 1 | 1 for masks in zip(*branches, strict=True)]
    if eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return _reach_jaxpr(inner.jaxpr)
    return None


def _reach_jaxpr(jaxpr: Any) -> list[Mask]:
    env: dict[Var, Mask] = {v: 1 << i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _forward(eqn, env), strict=True))
    return [0 if isinstance(v, jex.Literal) else env.get(v, 0) for v in jaxpr.outvars]


def _forward(eqn: Any, env: dict[Var, Mask]) -> list[Mask]:
    ins = [0 if isinstance(v, jex.Literal) else env.get(v, 0) for v in eqn.invars]
    reach = _reach(eqn)
    if reach is None:
        return [_union(ins)] * len(eqn.outvars)
    return [_union(ins[i] for i in _bits(mask)) for mask in reach]


def _backward(eqn: Any, needs: Sequence[Mask], effect: Mask) -> list[Mask]:
    reach = _reach(eqn)
    if reach is None:
        return [_union(needs) | effect] * len(eqn.invars)
    masks = [effect] * len(eqn.invars)
    for need, mask in zip(needs, reach, strict=True):
        if need:
            for i in _bits(mask):
                masks[i] |= need
    return masks


def _groups(masks: Sequence[Mask]) -> list[int]:
    """Numbers from 1 for masks that share a bit, directly or through others; 0 for the empty mask."""
    parent: dict[int, int] = {}

    def find(i: int) -> int:
        while parent.setdefault(i, i) != i:
            parent[i] = i = parent[parent[i]]
        return i

    for mask in masks:
        first, *rest = list(_bits(mask)) or [-1]
        for bit in rest:
            parent[find(bit)] = find(first)
    number: dict[int, int] = {}
    return [0 if not m else number.setdefault(find(next(_bits(m))), len(number) + 1) for m in masks]


def _union(masks: Any) -> Mask:
    total = 0
    for mask in masks:
        total |= mask
    return total


def _bits(mask: Mask) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
