"""A whole step, rewritten: updates run where their gradients are made."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
from jax_offload._emit.chunks import or_batched
from jax_offload._emit.find import holds_driven_update, holds_update, is_update
from jax_offload._emit.hoisted import scanned
from jax_offload._emit.region import Update, bound, marked
from jax_offload._emit.rows import Names
from jax_offload._emit.run import functions
from jax_offload._ir.program import Program, expanded, flat, replaced, traced_for, without_effects_of_axes
from jax_offload._ir.slices import Slice
from jax_offload._plan.gates import Gate, Piece
from jax_offload._plan.in_scan import InScan
from jax_offload._step.canonical import canonical
from jax_offload._step.checked import CannotRewrite, Runs, check_order, check_program, tell
from jax_offload._step.inlined import runs_one_twice
from jax_offload._step.parts import Part, Parts, Rest, parts_of
from jax_offload._step.returned import unreturned

Drive = Callable[[ClosedJaxpr, Any, Set[int | str]], Any]


def rewritten(step: Callable[..., Any], drive: Drive | None = None) -> Callable[..., Any]:
    """``step``, to be traced by ``jit``, with its updates inside the scans that make their gradients.

    Args:
      step: a function; arguments of it that hold no traced value are static.
      drive: returns what takes the place of the results where Python is to drive the step, or a part of its state is on
        disk, which is no operand of any program: given its closed jaxpr, the structure of the results, and the numbers
        and names of static arguments. ``None``: the step stays unchanged.
    """

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        fixed = [i for i, x in enumerate(args) if _is_static(x)]
        named = {name: x for name, x in kwargs.items() if _is_static(x)}
        given = {name: x for name, x in kwargs.items() if name not in named}
        fun = functools.partial(step, **named) if named else step
        closed, result = jaxpr_of(fun, *args, static=fixed, named=given)
        on_disk = any(map(is_on_disk, jax.tree.leaves((args, kwargs), is_leaf=is_on_disk)))
        if drive is not None and (on_disk or is_driven(closed)):
            return drive(closed, result, {*fixed, *named})
        leaves = jax.tree.leaves(([x for i, x in enumerate(args) if i not in fixed], given))
        results = emitted(closed, leaves) if _updates(closed) else jax_fun(closed)(*leaves)
        return jax.tree.unflatten(result, results)

    return run


def _updates(closed: ClosedJaxpr) -> bool:
    """Whether a function is a step: it updates something, or reads a leaf from disk."""
    return any(holds_update(eqn) or eqn.primitive in (READ, WRITE) for eqn in closed.jaxpr.eqns)


def _is_static(x: Any) -> bool:
    """Whether an argument of a jitted function is static; for arguments without leaves it does not matter."""
    leaves = jax.tree.leaves(x)
    try:
        return not any(isinstance(leaf, (Tracer, jax.Array)) for leaf in leaves) and hash(x) is not None
    except TypeError:
        return False


def is_driven(closed: ClosedJaxpr) -> bool:
    """Whether Python is to drive a step: for one of its results the host's cores update, or files are used."""

    def driven(eqn: Equation) -> bool:
        return holds_driven_update(eqn) or holds(eqn, lambda each: each.primitive in (READ, WRITE))

    return any(map(driven, closed.jaxpr.eqns)) and any(map(driven, without_dead_code(closed.jaxpr)[0].eqns))


def emitted(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The step's results, of its flat arguments."""
    program = flat(closed)
    lost = unreturned(program)
    if lost is not None and not lost.meant:
        warnings.warn(
            f"jo.jit: {lost.why}. It runs as written, and hides no transfers. Fix: return the new parameters and "
            "the new state, as in `params, state = jo.update_params(tx, grads, state, params)`.",
            stacklevel=2,
        )
    if any(map(holds_driven_update, program.eqns)) or any(eqn.primitive in (READ, WRITE) for eqn in program.eqns):
        return _as_it_is(closed, (_cut_at(program),), args)
    if lost is not None:
        return _as_it_is(closed, (lost.why,), args)
    try:
        plain = canonical(program)
        check_program(plain)
        found = None if ordered(plain.effects) else parts_of(_noted_inside(plain))
        if found is not None and found.moved:
            return _traced(found, args)
    except Exception as fault:  # whatever is wrong with a rewritten step, the one that was written runs
        return _as_it_is(closed, (tell("the step runs as written, and hides no transfers", fault),), args)
    if found is None:
        if (by_step := _by_step(closed, program)) is not None:
            return jax_fun(by_step)(*args)
        return _as_it_is(closed, _why_not(closed, program), args)
    return _as_it_is(closed, found.step.stays, args)


def _traced(found: Parts, args: Sequence[Any]) -> list[Any]:
    """The results of the parts, traced and checked by themselves first: a step that fails leaves nothing behind."""
    traced, _ = jaxpr_of(lambda *args: _in_parts(found, args), *args)
    return jax_fun(traced)(*args)


def _in_parts(found: Parts, args: Sequence[Any]) -> list[Any]:
    """Run the parts one after the other on the program's values, and return the step's results.

    Raises:
      CannotRewrite: a part lacks an operand, or makes another result.
    """
    step, program = found.step, found.step.program
    check_order([*map(_as_run, found.parts)], program.inputs, variables(program.outputs))
    env: dict[Var, Any] = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    names = step.names
    for part in found.parts:
        if isinstance(part, Gate):
            gate(env, part.held, part.waits_for)
            continue
        for v, x in _results_of(part, env, names):
            if (x.shape, x.dtype, on_host(x)) != (v.aval.shape, v.aval.dtype, is_host_aval(v.aval)):
                raise CannotRewrite(f"a part makes {jax.typeof(x)} in place of {v.aval}")
            env[v] = x
    return guarded(values_of(env, program.outputs), list(args))


def _as_run(part: Part) -> Runs:
    """A part as the check sees it. It takes no buffer: where another part reads what one overwrites, XLA copies."""
    match part:
        case Slice():
            return Runs(part.inputs, part.outputs)
        case Gate():
            return Runs([*part.held, *part.waits_for], ())
        case InScan():
            return Runs(part.operands, part.makes)
        case Piece():
            return Runs(part.slice.inputs, part.slice.outputs)
        case Rest():
            return Runs(variables(part.operands), variables(part.update.program.outputs))


def _results_of(part: Slice | InScan | Rest | Piece, env: Mapping[Var, Any], names: Names) -> Iterable[tuple[Var, Any]]:
    """The results of a part."""
    if isinstance(part, InScan):
        makes, as_written = part.makes, part.as_written

        def inside(*operands: Any) -> list[Any]:
            produced = scanned(part, dict(zip(part.operands, operands, strict=True)), names)
            return [produced[v] for v in makes]

        def one_by_one(*operands: Any) -> list[Any]:
            given = dict(zip(part.operands, operands, strict=True))
            return as_written.run(*(given[v] for v in as_written.inputs))

        run = or_batched(inside, one_by_one)
        given = [env[v] for v in part.operands]
        return zip(makes, marked(lambda xs: run(*xs), given, part), strict=True)
    if isinstance(part, Rest):
        operands = values_of(env, part.operands)
        return zip(variables(part.update.program.outputs), bound(part.update, operands), strict=True)
    if isinstance(part, Piece) and part.how is not None:
        planned, s = part.how, part.slice

        def piece(operands: Sequence[Any]) -> list[Any]:
            inner = dict(zip(s.inputs, operands, strict=True))
            functions([planned], names)(planned, inner)
            return [inner[v] for v in s.outputs]

        return zip(s.outputs, marked(piece, [env[v] for v in s.inputs], part), strict=True)
    s = part.slice if isinstance(part, Piece) else part
    return zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True)


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
    words = "another update runs in a {} of the step, and stays there"
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
    """A step whose only update stands in a loop over steps or in a ``shard_map``, inside which is a step of its own."""
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
    """Whether all that a barrier in a ``shard_map`` returns varies over its axes, as jax 0.10 has it."""
    return eqn.params["check_vma"] and jax.__version_info__ < (0, 11)


def _steps(scan: Scan, *operands: Any) -> list[Any]:
    """A loop over steps, each emitted for itself."""
    carry, ys = scan.run(lambda *args: emitted(scan.body, args), *scan.parted(operands))
    return [*carry, *ys]


def _why_not(closed: ClosedJaxpr, plain: Program) -> tuple[str, ...]:
    """Why no update of an unchanged step moves."""
    inside = [eqn for eqn in plain.eqns if not is_update(eqn) and holds_update(eqn)]
    updates = [eqn for eqn in plain.eqns if is_update(eqn)]
    if (updates or inside) and (names := ordered(closed.effects)):
        whose = "" if only_callbacks(closed.effects) else f"of mutable arrays or checks ({', '.join(names)}) "
        having = next(eqn for eqn in plain.eqns if ordered(eqn.effects))
        return (located(f"the step has effects {whose}whose order would be lost", having),)
    if runs_one_twice([eqn.params["update"] for eqn in updates]):
        return (located("the step calls one jitted update several times; take the inner jit away", updates[-1]),)
    words = "it runs in a {} of the step, and only what each step runs once moves"
    return tuple(located(words.format(eqn.primitive.name), eqn) for eqn in inside)
