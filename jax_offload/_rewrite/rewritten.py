"""Rewrite a whole step so that updates run where their gradients are made, and check the rewritten step."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax

from jax_offload._disk.leaves import READ, WRITE
from jax_offload._emit.hoisted import scanned
from jax_offload._emit.region import Update, holds_update, is_update, marked
from jax_offload._emit.run import or_batched, runner
from jax_offload._program.jaxprs import (
    AXES,
    Atom,
    ClosedJaxpr,
    Equation,
    Var,
    effects_of,
    holds,
    holds_inside,
    jax_fun,
    jaxpr_of,
    located,
    only_callbacks,
    ordered,
    scan_of,
    sharded_like,
    variables,
)
from jax_offload._program.memory import is_host_aval
from jax_offload._program.primitives import gate_equation, is_loop
from jax_offload._program.private import without_dead_code
from jax_offload._program.program import Builder, Program, as_program, expanded, flat, rebuilt, unguarded
from jax_offload._program.propagate import Node, made_of, needed_for
from jax_offload._program.slices import Slice
from jax_offload._rewrite.canonical import Loop, canonical, inside_shard_maps, made_cheaply
from jax_offload._rewrite.inlined import Inlined, equation_of, put_gate
from jax_offload._rewrite.parts import Parts, decided, parts_of
from jax_offload._schedule.in_scan import InScan
from jax_offload._schedule.schedule import Gate, Planned, same_type


def rewritten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the step to run, with the same arguments and results."""
    if not any(map(holds_update, closed.jaxpr.eqns)) and not any(is_host_aval(v.aval) for v in closed.jaxpr.invars):
        return closed
    program = flat(closed)
    lost = unreturned(program)
    if lost is not None and not lost.meant:
        warnings.warn(
            f"jo.jit: {lost.why}. It runs as written, and hides no transfers. Fix: return the new parameters and "
            "the new state, as in `params, state = jo.update_params(tx, grads, state, params)`.",
            stacklevel=2,
        )
    if driven := [eqn for eqn in program.eqns if _holds_driven(eqn)]:
        on_disk = [eqn for eqn in driven if holds_update(eqn, lambda update: bool(update.on_disk))]
        option, at = ("disk=", on_disk[0]) if on_disk else ("update_on=", driven[0])
        why = f"{option} cuts the step at this update; without it the backward pass may hold the update"
        return _saying(closed, [located(why, at)])
    if lost is not None:
        return _saying(closed, [lost.why])
    try:
        whole = inside_shard_maps(program)
        plain = canonical(unguarded(whole))
        found = None if ordered(plain.effects) else parts_of(_noted_inside(plain))
        if found is not None and (found.moved or any(map(_runs_passes, plain.eqns))):
            program = _put_together(found)
            within = _in_loops(program, found.step.like)
            if found.moved or within is not program:
                return within.closed
    except Exception as fault:  # whatever is wrong with a rewritten step, the one that was written runs
        return _saying(closed, [tell("the step runs as written, and hides no transfers", fault)])
    if found is not None and found.step.updates:
        return _saying(closed, found.stays)
    return _by_step(whole) or _saying(closed, _why_not(program))


def is_driven(closed: ClosedJaxpr) -> bool:
    """Whether Python is to drive a step, because one of its results needs the host's cores or files."""
    eqns = closed.jaxpr.eqns
    return any(map(_holds_driven, eqns)) and any(map(_holds_driven, without_dead_code(closed.jaxpr)[0].eqns))


def _holds_driven(eqn: Equation) -> bool:
    """Whether an equation is or holds an update that Python drives, or uses a leaf on disk."""
    return holds_update(eqn, lambda update: update.driven) or holds(eqn, lambda each: each.primitive in (READ, WRITE))


def _put_together(found: Parts) -> Program:
    """Return the step's program, made of its parts in their order.

    Raises:
      CannotRewrite: a part lacks an operand, or makes another result.
    """
    program, new, barrier = found.step.program, Builder(), gate_equation()
    check_order(found.parts, program.inputs, variables(program.outputs))
    slices = [part.payload for part in found.parts if isinstance(part.payload, Planned)]
    run = runner(slices, found.step.names)
    for part in found.parts:
        this = part.payload
        if isinstance(this, Gate):
            put_gate(new, this, barrier)
        elif isinstance(this, Slice) or (isinstance(this, Planned) and not this.slice.loads):
            for eqn in (this if isinstance(this, Slice) else this.slice).jaxpr.eqns:
                new.put(eqn)
        else:
            results: Sequence[Atom] = part.makes
            if isinstance(this, Update):
                new.put(equation_of(dataclasses.replace(this, stays=found.stays), found.step.like))
                results = new.eqns[-1].outvars
            else:
                fun = _in_scan(found, part) if isinstance(this, InScan) else functools.partial(run, this)
                traced, _ = jaxpr_of(marked(fun, part.reads, this), *(v.aval for v in part.reads))
                results = new.call(as_program(traced), new.read(part.reads))
            for v, x in zip(part.makes, results, strict=True):
                if not same_memory(v, x):
                    raise CannotRewrite(f"a part makes {x.aval} in place of {v.aval}")
            new.names.update(zip(part.makes, results, strict=True))
    return dataclasses.replace(program, eqns=new.eqns, outputs=new.read(program.outputs))


def _in_scan(found: Parts, part: Node) -> Callable[..., list[Any]]:
    """Return a function that runs a scan with updates inside, given what it reads."""
    this: InScan = part.payload

    def run(*operands: Any) -> list[Any]:
        env = scanned(this, dict(zip(part.reads, operands, strict=True)), found.step.names)
        return [env[v] for v in part.makes]

    def one_by_one(*operands: Any) -> list[Any]:
        env = dict(zip(part.reads, operands, strict=True))
        return this.as_written.run(*(env[v] for v in this.as_written.inputs))

    return or_batched(run, one_by_one)


# ---- loops that run passes in each iteration, such as one over microbatches


def _runs_passes(eqn: Equation) -> bool:
    """Whether an equation is a loop with a loop inside, and neither updates nor effects."""
    inside = scan_of(eqn) is not None and not eqn.effects and holds_inside(eqn, is_loop)
    return inside and not holds_update(eqn)


def _in_loops(program: Program, like: Equation) -> Program:
    """Let such loops load rows of parameters, and add rows of gradients to their sums, in the scans inside them.

    Returns the same program where no loop can. ``like``: an equation of an update of the step.
    """
    changed = list[Loop]()

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        loop = Loop.of(eqn, operands) if _runs_passes(eqn) else None
        if loop is None:
            return None
        loaded = made_cheaply(new.eqns)
        again = {v for v, x in loop.consts.items() if isinstance(x, Var) and x in loaded}
        if (loop := _in_each_iteration(program, new.eqns, loop, again, like)) is None:
            return None
        changed.append(loop)
        loop.put(new)
        return new.read(eqn.outvars)

    found = rebuilt(program, rule, {"scan"})
    eqns, _ = needed_for(found.eqns, variables(found.outputs), kept=lambda eqn: bool(eqn.effects))
    return dataclasses.replace(found, eqns=eqns) if changed else program


def _in_each_iteration(
    program: Program, before: Sequence[Equation], loop: Loop, again: Set[Var], like: Equation
) -> Loop | None:
    """Return a loop with its body rewritten; ``None`` if its scans neither load nor add up rows.

    Args:
      program: the step.
      before: the equations ahead of the loop.
      again: the whole arrays that each iteration makes again from leaves, so that it loads only rows of them.
      like: the equation of one of the step's updates.
    """
    body, consts = Builder(), {v: x for v, x in loop.consts.items() if v not in again}
    leaves_of = dict[Var, set[Var]]()
    for v in again:
        eqns, needs = needed_for(before, variables([loop.consts[v]]))
        body.copy(*eqns)
        body.names[v] = body.read([loop.consts[v]])[0]
        leaves_of[v] = {x for x in needs if is_host_aval(x.aval)}
        consts |= {x: x for x in leaves_of[v]}
    for eqn in loop.eqns:
        body.put(eqn)
    tried = dataclasses.replace(loop, consts=consts)
    tried.renew(dataclasses.replace(tried.body, eqns=body.eqns, outputs=body.read(loop.returned)))
    plain = canonical(tried.body)
    operand_of = {**consts, **{v: first for v, (first, _, _) in loop.carry.items()}}
    shards = {v: program.shards[x] for v, x in operand_of.items() if isinstance(x, Var) and x in program.shards}
    carried = zip(plain.outputs, loop.carry, strict=False)
    next_of = {v: old for v, old in carried if isinstance(v, Var) and v not in plain.inputs}
    parts = decided(Inlined(dataclasses.replace(plain, shards=shards), (), {}, next_of, {}, like))
    whole = {v for part in parts.parts if isinstance(part.payload, Slice) for v in part.payload.loads}
    if stay := {v for v in again if not leaves_of[v].isdisjoint(whole)}:
        return _in_each_iteration(program, before, loop, again - stay, like)
    if not parts.moved:
        return None
    tried.renew(_put_together(parts))
    return tried


# ---- reasons, in the updates of a step that stays as it was written

OUTSIDE = "update once, outside of it, with the gradients that jnp.where chooses"
SINGLE = "call jo.jit of a single step"


def _saying(closed: ClosedJaxpr, why: Iterable[str], but: Set[int] = frozenset()) -> ClosedJaxpr:
    """Return the same program with a reason in its updates, except those with the identities ``but``."""
    if not (stays := tuple(why)):
        return closed

    def with_reasons(eqn: Equation) -> Program | None:
        if not is_update(eqn) or id(eqn.params["update"]) in but:
            return None
        update = dataclasses.replace(eqn.params["update"], stays=stays)
        ins = [Var(v.aval) for v in eqn.invars]
        noted = eqn.replace(invars=ins, params=eqn.params | {"update": update})
        return Program(ins, [*eqn.outvars], [noted], [], closed.jaxpr.debug_info)

    return ClosedJaxpr(expanded(closed.jaxpr, with_reasons), closed.consts)


def _noted_inside(program: Program) -> Program:
    """Return a step with an update of its own and others in branches or loops, which then say why they stay there."""
    own = frozenset(id(eqn.params["update"]) for eqn in program.eqns if is_update(eqn))
    words = "another update runs in a {} of the step, and stays there; call it outside, and choose with skip="
    why = _inside(words, program)
    return flat(_saying(program.closed, why, own)) if own and why else program


def _inside(words: str, program: Program) -> dict[str, None]:
    """Say why updates in branches and loops stay there. ``words`` has gaps for the primitive and the fix."""
    inside = [(eqn.primitive.name, eqn) for eqn in program.eqns if not is_update(eqn) and holds_update(eqn)]
    return dict.fromkeys(
        located(words.format(name, OUTSIDE if name == "cond" else SINGLE), eqn) for name, eqn in inside
    )


def _why_not(program: Program) -> Iterable[str]:
    """Why no update moves in a step that stays unchanged."""
    if any(map(holds_update, program.eqns)) and (names := ordered(program.effects)):
        whose = "" if only_callbacks(program.effects) else f"of mutable arrays or checks ({', '.join(names)}) "
        having = next(eqn for eqn in program.eqns if ordered(eqn.effects))
        return [located(f"the step has effects {whose}whose order would be lost; use unordered ones", having)]
    return _inside("it runs in a {} of the step, and only what each step runs once moves; {}", program)


def _by_step(program: Program) -> ClosedJaxpr | None:
    """Rewrite the body of a loop over steps, or of a ``shard_map``, that holds a step's only update, as a step; and
    the bodies of other ``shard_map``s that load parameters from host memory."""
    holding = [eqn for eqn in program.eqns if holds_update(eqn)]
    if len(holding) > 1 or program.effects or not all(_is_sharded(eqn) or scan_of(eqn) for eqn in holding):
        return None

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if (loop := scan_of(eqn)) is not None and eqn in holding:
            step = jax_fun(rewritten(loop.body))
            return new.run(lambda *given: [*itertools.chain(*loop.run(step, *loop.parted(given)))], *operands, like=eqn)
        if _is_sharded(eqn) and (eqn in holding or any(is_host_aval(v.aval) for v in operands)):
            flat_body, axes = flat(ClosedJaxpr(eqn.params["jaxpr"], [])), effects_of(AXES)  # collectives need no order
            eqns = [each.replace(effects={e for e in each.effects if type(e) not in axes}) for each in flat_body.eqns]
            body = dataclasses.replace(flat_body, eqns=eqns).closed
            return new.run(sharded_like(eqn, lambda *given: jax_fun(rewritten(body))(*given)), *operands, like=eqn)
        return None

    return rebuilt(program, rule).closed


def _is_sharded(eqn: Equation) -> bool:
    """Whether it is a ``shard_map``, except one in which jax 0.10 lets everything behind a barrier vary over the
    mesh."""
    return eqn.primitive.name == "shard_map" and (not eqn.params["check_vma"] or jax.__version_info__ >= (0, 11))


# ---- a step as written: if it does not return the results of an update, that is probably a mistake


class Unreturned(NamedTuple):
    """The results of an update that a step does not return.

    Attributes:
      why: the reason in words.
      meant: whether that may be intended: the step returns numbers made of the update, and everything else unchanged.
    """

    why: str
    meant: bool = False


def unreturned(program: Program) -> Unreturned | None:
    """Find the updates' results that a step does not return; ``None`` if it has no updates, or returns all results.

    A state that is returned neither old nor new is not missed, because a step that inspects an update does that.
    """
    if not any(map(holds_update, program.eqns)):
        return None
    program = unguarded(program)
    outputs = {*variables(program.outputs)}
    results = made_of(program.eqns, holds_update) & outputs
    if not results:
        return Unreturned("nothing that the step returns is made by its update")
    handed_on = outputs & {*program.inputs}
    _, used = needed_for(program.eqns, outputs)
    for eqn in filter(is_update, program.eqns):
        update: Update = eqn.params["update"]
        given = dict(zip(update.operands, eqn.invars, strict=True))
        made = {x: v for x, v in zip(update.program.outputs, eqn.outvars, strict=True) if isinstance(x, Var)}
        state = [x for x, v in made.items() if x in update.names and is_host_aval(v.aval)]
        olds = {x: given.get(old) for x, old in update.next_values.items()}
        stale = [update.names[x] for x in state if olds.get(x) in handed_on and made[x] not in used]
        if stale and not any(v.aval.shape for v in results):
            return Unreturned("the step returns its state as it was, and of its update only numbers", meant=True)
        if stale:
            what = stale[0] + (f" and {len(stale) - 1} more" if stale[1:] else "")
            return Unreturned(
                f"the step returns {what} of the state as before the update, and not what that made of it"
            )
        others = [v for x, v in made.items() if x not in update.names and v.aval.shape]  # updates, or new parameters
        as_it_was = others and all(any(same_type(v.aval, x.aval) for x in handed_on) for v in others)
        if as_it_was and used.isdisjoint(others) and any(made[x] in used for x in state):
            return Unreturned("the step returns the new state, and the parameters as they were")
    return None


# ---- a step as rewritten
#
# A policy decides what runs where. If it leaves out an operand, or frees a buffer too early, the step that was
# written runs instead: such a fault costs time, and never a crash or a number.


class CannotRewrite(Exception):
    """A rewritten step is not the step that was written."""


def check_order(parts: Sequence[Node], given: Iterable[Var], results: Iterable[Var]) -> None:
    """Check that each operand is given or made earlier, and that no buffer is read after a part has taken it.

    Raises:
      CannotRewrite: one is not.
    """
    known, taken = {*given}, set[Var]()
    for part in parts:
        for v in part.reads:
            if v not in known:
                raise CannotRewrite(f"a part reads {v.aval}, and none before it makes that")
            if v in taken:
                raise CannotRewrite(f"a part reads {v.aval}, whose buffer an earlier part has taken")
        known.update(part.makes)
        taken |= part.takes
    for v in results:
        if v not in known:
            raise CannotRewrite(f"no part makes the result {v.aval}")
        if v in taken:
            raise CannotRewrite(f"a part takes the buffer of the result {v.aval}")


def check_program(program: Program) -> None:
    """Check the order of a program's equations, and that types and memory agree with what an update takes.

    Raises:
      CannotRewrite: an operand is missing, a value is made twice, or two types differ.
    """
    parts = [Node(eqn, variables(eqn.invars), eqn.outvars) for eqn in program.eqns]
    check_order(parts, program.inputs, variables(program.outputs))
    made = [*program.inputs, *(v for eqn in program.eqns for v in eqn.outvars)]
    if len({*made}) < len(made):
        raise CannotRewrite("two equations make one value")
    for eqn in filter(is_update, program.eqns):
        own: Program = eqn.params["update"].program
        have, want = [*eqn.invars, *own.outputs], [*own.inputs[len(own.consts) :], *eqn.outvars]
        for x, v in zip(have, want, strict=True):
            if not same_memory(x, v):
                raise CannotRewrite(f"an update has {x.aval} in place of {v.aval}")
        check_program(own)


def same_memory(x: Atom, v: Atom) -> bool:
    """Whether two values have one type, and are in one memory."""
    a, b = x.aval, v.aval
    return (a.shape, a.dtype, is_host_aval(a)) == (b.shape, b.dtype, is_host_aval(b))


def tell(what: str, fault: Exception) -> str:
    """Warn of a failed rewriting, and return why it failed. ``what``: what the step does instead."""
    why = f"its rewriting failed ({type(fault).__name__}: {str(fault).partition(chr(10))[0][:200]})"
    text = f"jax_offload: {what}, as {why}. Its numbers are right. Please report this with the step."
    warnings.warn(text, stacklevel=3)
    return why
