"""A step whose checkpointed blocks are opened, where gates are to stand between the gradients that one makes."""

from __future__ import annotations

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import DropVar, Equation, Literal, Var
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._ir.primitives import CHECKPOINT
from jax_offload._ir.program import Program, flat
from jax_offload._plan.decide import FLOPS_PER_BYTE
from jax_offload._plan.gates import is_heavy_equation


def opened(program: Program) -> Program:
    """``program`` with the equations of those ``jax.checkpoint`` inlined that make several large gradients.

    Such a block is one equation, with which all of its gradients come at once: no gate can hold one of them back, and
    beside copies XLA puts their matmuls off behind the same block's attention. What is computed again stays behind its
    barrier.

    A block inside such a block is one too.

    Not where the link needs more than half of the passes' time: a block is the larger piece, beside whose attention
    more is under way. Nor one of a single matrix, as there is nothing to put between. Nor one that XLA may merge with
    the forward pass (``prevent_cse=False``): across gates it does not.
    """
    updates = [eqn.params["update"] for eqn in program.eqns if is_update(eqn)]
    if not updates or not all(map(_has_time, updates)):
        return program
    while several := _making_several(program):
        program = flat(program.closed, opens=lambda eqn, several=several: id(eqn) in several)
    return program


def _has_time(update: Update) -> bool:
    moved = sum(nbytes(v.aval) for v in update.program.inputs if is_host_aval(v.aval))
    return update.backward is not None and update.backward.flops > FLOPS_PER_BYTE * moved


def _making_several(program: Program) -> set[int]:
    """The blocks, by identity, that make gradients of which the largest is at most half: results that nothing of a pass
    through the network needs, but an update, a norm, or who calls the step."""
    needed, found = set[Var](), set[int]()
    for eqn in reversed(program.eqns):
        if is_update(eqn):  # of its results a pass may be made, by which its gradients are none of it
            continue
        gradients = [nbytes(v.aval) for v in eqn.outvars if v not in needed and not isinstance(v, DropVar)]
        if _is_apart(eqn) and gradients and 2 * max(gradients) <= sum(gradients):
            found.add(id(eqn))
        if is_heavy_equation(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _is_apart(eqn: Equation) -> bool:
    """Whether it is a block that keeps all of what it computes again apart from the forward pass."""
    if eqn.primitive.name not in CHECKPOINT:
        return False
    said: bool | tuple[bool, ...] = eqn.params["prevent_cse"]
    return all(said) if isinstance(said, tuple) else said
