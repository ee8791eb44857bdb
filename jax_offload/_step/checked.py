"""The check of what a step is rewritten to, before it runs.

A policy decides what runs where. If it leaves out an operand, or frees a buffer too early, the step that was written
runs instead: a fault costs time, and never a crash or a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from jax_offload._base.jaxprs import Atom, Equation, Var, inner_of, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.program import Program


class CannotRewrite(Exception):
    """A rewritten step is not the step that was written."""


class Runs(NamedTuple):
    """A part of a schedule.

    Attributes:
      reads: its operands.
      makes: its results.
      takes: operands whose buffers it overwrites or frees.
    """

    reads: Sequence[Var]
    makes: Sequence[Var]
    takes: Set[Var] = frozenset()


def check_order(parts: Sequence[Runs], given: Iterable[Var], results: Iterable[Var]) -> None:
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
    """Check the order of a program's equations, and the types and memory on both sides of each call and branch.

    Raises:
      CannotRewrite: an operand is missing, or two types differ.
    """
    parts = [Runs(variables(eqn.invars), eqn.outvars) for eqn in program.eqns]
    check_order(parts, program.inputs, variables(program.outputs))
    for eqn in program.eqns:
        _check_calls(eqn)


def _check_calls(eqn: Equation) -> None:
    for inner in inner_of(eqn):
        operands = eqn.invars[inner.first : inner.first + len(inner.jaxpr.invars)]
        if eqn.primitive.name == "cond":  # a loop slices its operands, and stacks its results
            jaxpr = inner.jaxpr
            pairs = [*zip(operands, jaxpr.invars, strict=True), *zip(jaxpr.outvars, eqn.outvars, strict=True)]
            for have, want in pairs:
                if _type(have) != _type(want):
                    raise CannotRewrite(f"a branch has {have.aval} in place of {want.aval}")
        for each in inner.jaxpr.eqns:
            _check_calls(each)


def _type(v: Atom) -> tuple[Any, ...]:
    return v.aval.shape, v.aval.dtype, is_host_aval(v.aval)


def tell(what: str, fault: Exception) -> str:
    """Warn of a failed rewriting, and return why it failed. ``what``: what the step does instead."""
    why = f"its rewriting failed ({type(fault).__name__}: {str(fault).partition(chr(10))[0][:200]})"
    text = f"jax_offload: {what}, as {why}. Its numbers are right. Please report this with the step."
    warnings.warn(text, stacklevel=3)
    return why
