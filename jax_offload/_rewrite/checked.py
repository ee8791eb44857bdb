"""Check a step, as it is written and as it is rewritten.

A policy decides what runs where. If it leaves out an operand, or frees a buffer too early, the step that was written
runs instead: such a fault costs time, and never a crash or a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._program.donation import unguarded
from jax_offload._program.jaxprs import Atom, Var, variables
from jax_offload._program.memory import is_host_aval
from jax_offload._program.program import Program
from jax_offload._program.propagate import Node, made_of, needed_for
from jax_offload._schedule.transfers import same_type

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
    if not handed_on:
        return None
    _, used = needed_for(program.eqns, outputs)
    for eqn in filter(is_update, program.eqns):
        update: Update = eqn.params["update"]
        given = dict(zip(update.operands, eqn.invars, strict=True))
        made = [(x, v) for x, v in zip(update.program.outputs, eqn.outvars, strict=True) if isinstance(x, Var)]
        on_host = {x: v for x, v in made if x in update.names and is_host_aval(v.aval)}
        olds = {x: given.get(old) for x, old in update.next_values.items()}
        stale = [update.names[x] for x, v in on_host.items() if olds.get(x) in handed_on and v not in used]
        if stale and not any(v.aval.shape for v in results):
            return Unreturned("the step returns its state as it was, and of its update only numbers", meant=True)
        if stale:
            what = stale[0] + (f" and {len(stale) - 1} more" if stale[1:] else "")
            return Unreturned(
                f"the step returns {what} of the state as before the update, and not what that made of it"
            )
        others = [v for x, v in made if x not in update.names and v.aval.shape]  # updates, or new parameters
        as_it_was = others and all(any(same_type(v.aval, x.aval) for x in handed_on) for v in others)
        if as_it_was and used.isdisjoint(others) and not used.isdisjoint(on_host.values()):
            return Unreturned("the step returns the new state, and the parameters as they were")
    return None


# ---- a step as rewritten


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
        _check_types([*eqn.invars, *own.outputs], [*own.inputs[len(own.consts) :], *eqn.outvars])
        check_program(own)


def _check_types(have: Sequence[Atom], want: Sequence[Atom]) -> None:
    for x, v in zip(have, want, strict=True):
        if not same_memory(x, v):
            raise CannotRewrite(f"an update has {x.aval} in place of {v.aval}")


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
