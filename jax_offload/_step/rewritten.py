"""Rewrite a whole step so that updates run where their gradients are made."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
from jax.core import Tracer

from jax_offload._base.barriers import gate
from jax_offload._base.donation import guarded
from jax_offload._base.jaxprs import (
    ClosedJaxpr,
    Equation,
    Literal,
    Scan,
    Var,
    holds,
    jax_fun,
    jaxpr_of,
    located,
    only_callbacks,
    ordered,
    scan_of,
    sharded_like,
    values_of,
    variables,
    without_dead_code,
)
from jax_offload._base.jaxprs import (
    closed as as_closed,
)
from jax_offload._base.memory import is_host_aval, on_host
from jax_offload._base.on_disk import READ, WRITE, is_on_disk
from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.hoisted import scanned
from jax_offload._emit.region import Update, bound, marked
from jax_offload._emit.rows import Names, or_batched
from jax_offload._emit.run import functions
from jax_offload._ir.program import Program, expanded, flat, replaced, traced_for, without_effects_of_axes
from jax_offload._ir.propagate import Node
from jax_offload._ir.slices import Slice
from jax_offload._plan.in_scan import InScan
from jax_offload._plan.plan import Gate, Planned
from jax_offload._step.canonical import canonical, inside_shard_maps
from jax_offload._step.checked import CannotRewrite, check_order, check_program, tell
from jax_offload._step.cut import unguarded
from jax_offload._step.loaded import traced_step
from jax_offload._step.parts import Parts, parts_of
from jax_offload._step.returned import unreturned

Drive = Callable[[ClosedJaxpr, Any, Set[int | str]], Any]


def rewritten(step: Callable[..., Any], drive: Drive | None = None, *, as_written: bool = False) -> Callable[..., Any]:
    """``step``, to be traced by ``jit``, with its updates inside the scans that make their gradients.

    Args:
      step: a function; arguments of it that hold no traced value are static.
      drive: called if Python is to drive the step, or a part of its state is on disk and so cannot be an operand of a
        program, with the closed jaxpr, the structure of the results, and the numbers and names of static arguments;
        returns the value that replaces the results. ``None``: the step stays unchanged.
      as_written: whether the updates stay where they are; parameters in host memory are loaded all the same.
    """

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        fixed = [i for i, x in enumerate(args) if _is_static(x)]
        named = {name: x for name, x in kwargs.items() if _is_static(x)}
        given = {name: x for name, x in kwargs.items() if name not in named}
        fun = functools.partial(step, **named) if named else step
        closed, result = traced_step(fun, *args, static=fixed, named=given)
        on_disk = any(map(is_on_disk, jax.tree.leaves((args, kwargs), is_leaf=is_on_disk)))
        if drive is not None and (on_disk or is_driven(closed)):
            return drive(closed, result, {*fixed, *named})
        leaves = jax.tree.leaves(([x for i, x in enumerate(args) if i not in fixed], given))
        results = emitted(closed, leaves) if _updates(closed) and not as_written else jax_fun(closed)(*leaves)
        return jax.tree.unflatten(result, results)

    return run


def _updates(closed: ClosedJaxpr) -> bool:
    """Whether a function is a step: it updates something, or uses a leaf on disk."""
    return any(holds_update(eqn) or eqn.primitive in (READ, WRITE) for eqn in closed.jaxpr.eqns)


def _is_static(x: Any) -> bool:
    """Whether an argument of a jitted function is static; for arguments without leaves it does not matter."""
    leaves = jax.tree.leaves(x)
    try:
        return not any(isinstance(leaf, (Tracer, jax.Array)) for leaf in leaves) and hash(x) is not None
    except TypeError:
        return False


def is_driven(closed: ClosedJaxpr) -> bool:
    """Whether Python is to drive a step, because one of its results needs the host's cores or files."""
    eqns = closed.jaxpr.eqns
    return any(map(_holds_driven, eqns)) and any(map(_holds_driven, without_dead_code(closed.jaxpr)[0].eqns))


def _holds_driven(eqn: Equation) -> bool:
    """Whether an equation is or holds an update that Python drives, or uses a leaf on disk."""

    def driven(each: Equation) -> bool:
        return each.primitive in (READ, WRITE) or (is_update(each) and each.params["update"].driven)

    return holds(eqn, driven)


def emitted(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Emit the step into the current trace, and return its results for flat arguments."""
    program = flat(closed)
    lost = unreturned(program)
    if lost is not None and not lost.meant:
        warnings.warn(
            f"jo.jit: {lost.why}. It runs as written, and hides no transfers. Fix: return the new parameters and "
            "the new state, as in `params, state = jo.update_params(tx, grads, state, params)`.",
            stacklevel=2,
        )
    if any(map(_holds_driven, program.eqns)):
        return _as_it_is(closed, (_cut_at(program),), args)
    if lost is not None:
        return _as_it_is(closed, (lost.why,), args)
    try:
        whole = inside_shard_maps(program)
        plain = canonical(unguarded(whole))
        check_program(plain)
        found = None if ordered(plain.effects) else parts_of(_noted_inside(plain))
        if found is not None and found.moved:
            return _traced(found, args)
    except Exception as fault:  # whatever is wrong with a rewritten step, the one that was written runs
        return _as_it_is(closed, (tell("the step runs as written, and hides no transfers", fault),), args)
    if found is None:
        if (by_step := _by_step(whole.closed, whole)) is not None:
            return jax_fun(by_step)(*args)
        return _as_it_is(closed, _why_not(closed, program), args)
    return _as_it_is(closed, found.stays, args)


def _traced(found: Parts, args: Sequence[Any]) -> list[Any]:
    """Run the parts. They are traced and checked by themselves first, so that a failure leaves nothing in the trace."""
    traced, _ = jaxpr_of(lambda *args: _in_parts(found, args), *args)
    return jax_fun(traced)(*args)


def _in_parts(found: Parts, args: Sequence[Any]) -> list[Any]:
    """Run the parts one after the other on the program's values, and return the step's results.

    Raises:
      CannotRewrite: a part lacks an operand, or makes another result.
    """
    program, names = found.step.program, found.step.names
    check_order(found.parts, program.inputs, variables(program.outputs))
    env: dict[Var, Any] = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    for part in found.parts:
        if isinstance(part.payload, Gate):
            gate(env, part.payload.held, part.payload.waits_for)
            continue
        results = _run(part, [env[v] for v in part.reads], names, found.stays)
        for v, x in zip(part.makes, results, strict=True):
            if (x.shape, x.dtype, on_host(x)) != (v.aval.shape, v.aval.dtype, is_host_aval(v.aval)):
                raise CannotRewrite(f"a part makes {jax.typeof(x)} in place of {v.aval}")
            env[v] = x
    return guarded(values_of(env, program.outputs), list(args))


def _run(part: Node, operands: Sequence[Any], names: Names, stays: tuple[str, ...]) -> Sequence[Any]:
    """Run a part on its operands. ``stays``: why the rest of an update does not move."""
    this: Slice | InScan | Update | Planned = part.payload

    def named(operands: Sequence[Any]) -> dict[Var, Any]:
        return dict(zip(part.reads, operands, strict=True))

    def made(produced: Mapping[Var, Any]) -> list[Any]:
        return [produced[v] for v in part.makes]

    if isinstance(this, InScan):
        as_written = this.as_written

        def one_by_one(*xs: Any) -> list[Any]:
            given = named(xs)
            return as_written.run(*(given[v] for v in as_written.inputs))

        run = or_batched(lambda *xs: made(scanned(this, named(xs), names)), one_by_one)
        return marked(lambda xs: run(*xs), operands, part.reads, this)
    if isinstance(this, Update):
        return bound(dataclasses.replace(this, stays=stays), operands)
    if isinstance(this, Planned) and this.slice.loads:

        def piece(operands: Sequence[Any]) -> list[Any]:
            env = named(operands)
            functions([this], names)(this, env)
            return made(env)

        return marked(piece, operands, part.reads, this)
    return (this.slice if isinstance(this, Planned) else this).run(*operands)


def _cut_at(program: Program) -> str:
    on_disk = any(holds_update(eqn, lambda u: isinstance(u, Update) and bool(u.on_disk)) for eqn in program.eqns)
    why = "its state is on disk" if on_disk else "the host's cores update a part"
    return f"the step is cut at it, as {why}"


def _as_it_is(closed: ClosedJaxpr, why: tuple[str, ...], args: Sequence[Any]) -> list[Any]:
    """Run the step unchanged, except that its updates say why."""
    return jax_fun(_saying(closed, why))(*args)


def _noted_inside(program: Program) -> Program:
    """Return a step with an update of its own and others in branches or loops, which then say why they stay there."""
    own = frozenset(id(eqn.params["update"]) for eqn in program.eqns if is_update(eqn))
    inside = [eqn for eqn in program.eqns if not is_update(eqn) and holds_update(eqn)]
    if not own or not inside:
        return program
    words = "another update runs in a {} of the step, and stays there; call it outside, and choose with skip="
    why = dict.fromkeys(located(words.format(eqn.primitive.name), eqn) for eqn in inside)
    return flat(_saying(program.closed, tuple(why), own))


def _saying(closed: ClosedJaxpr, why: tuple[str, ...], but: Set[int] = frozenset()) -> ClosedJaxpr:
    """Return the same program with a reason in its updates, except those with the identities ``but``."""
    if not why:
        return closed

    def with_reasons(eqn: Equation) -> Program | None:
        if not is_update(eqn) or id(eqn.params["update"]) in but:
            return None
        update = dataclasses.replace(eqn.params["update"], stays=why)
        noted = eqn.replace(params=eqn.params | {"update": update})
        ins = [Var(v.aval) if isinstance(v, Literal) else v for v in eqn.invars]
        return Program(ins, list(eqn.outvars), [noted.replace(invars=ins)], [], closed.jaxpr.debug_info)

    return as_closed(expanded(closed.jaxpr, with_reasons), closed.consts)


def _by_step(closed: ClosedJaxpr, program: Program) -> ClosedJaxpr | None:
    """Rewrite the body of a loop over steps, or of a ``shard_map``, that holds a step's only update, as a step."""
    holding = [eqn for eqn in program.eqns if holds_update(eqn)]
    if len(holding) != 1 or closed.effects:
        return None
    (eqn,) = holding
    if (scan := scan_of(eqn)) is not None:
        run = functools.partial(_steps, scan)
    elif eqn.primitive.name == "shard_map" and not _varies_behind_barriers(eqn):
        body = without_effects_of_axes(flat(as_closed(eqn.params["jaxpr"]))).closed
        run = sharded_like(eqn, lambda *operands: emitted(body, operands))
    else:
        return None
    return replaced(program, program.eqns.index(eqn), traced_for(eqn, run)).closed


def _varies_behind_barriers(eqn: Equation) -> bool:
    """Whether jax lets everything that a barrier in a ``shard_map`` returns vary over its axes, as jax 0.10 does."""
    return eqn.params["check_vma"] and jax.__version_info__ < (0, 11)


def _steps(scan: Scan, *operands: Any) -> list[Any]:
    """Run a loop over steps, and emit each step by itself."""
    carry, ys = scan.run(lambda *args: emitted(scan.body, args), *scan.parted(operands))
    return [*carry, *ys]


def _why_not(closed: ClosedJaxpr, plain: Program) -> tuple[str, ...]:
    """Why no update moves in a step that stays unchanged."""
    inside = [eqn for eqn in plain.eqns if not is_update(eqn) and holds_update(eqn)]
    updates = [eqn for eqn in plain.eqns if is_update(eqn)]
    if (updates or inside) and (names := ordered(closed.effects)):
        whose = "" if only_callbacks(closed.effects) else f"of mutable arrays or checks ({', '.join(names)}) "
        having = next(eqn for eqn in plain.eqns if ordered(eqn.effects))
        return (located(f"the step has effects {whose}whose order would be lost; use unordered ones", having),)
    words = "it runs in a {} of the step, and only what each step runs once moves; call jo.jit of a single step"
    return tuple(located(words.format(eqn.primitive.name), eqn) for eqn in inside)
