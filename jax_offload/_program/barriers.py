"""Barriers: a function for each use, which says what XLA would do without it.

Nothing comes out of an ``optimization_barrier`` before all of its operands exist, and XLA knows nothing of what
comes out. Its outputs are to be used from then on in place of its inputs: one without used outputs is optimised away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive

from jax_offload._program.jaxprs import Equation, Var, jaxpr_of
from jax_offload._program.memory import on_host, to_host
from jax_offload._program.private import lowered_as_barrier, manual_axes_of, nonzero, set_rules

T = TypeVar("T")


def gate(env: dict[Var, Any], held: Sequence[Var], waits_for: Sequence[Var]) -> None:
    """Make values in ``env`` wait for others: host leaves, for example, for the stores that make room for them.

    XLA's scheduler hoists every host-to-device copy to the start of a program, because nothing holds it back; then
    every loaded leaf lives until its update, and the peak is a resident state's.

    Inside ``shard_map`` only values that vary over the same axes wait for each other: jax 0.10 would make all outputs
    vary over all axes.
    """
    for varying in {manual_axes_of(env[v]) for v in held}:
        waiting, first = ([v for v in vs if manual_axes_of(env[v]) == varying] for vs in (held, waits_for))
        if first:
            names = [*waiting, *first]
            env.update(zip(names, _GATE.bind(*(env[v] for v in names)), strict=True))


def together(values: T) -> T:
    """Return the arrays of a tree so that whatever uses one of them waits for all.

    XLA's schedulers put off what only a later result asks for: the reduction of a gradient to its part of a norm, or a
    phase of an iteration beside transfers.
    """
    return jax.lax.optimization_barrier(values)


def read_once(rows: Sequence[Any]) -> list[Any]:
    """Read rows of buffers on the device before they are overwritten.

    XLA copies a buffer that two of its fusions still read.
    """
    return jax.lax.optimization_barrier(list(rows))


def written_after(new: Any, read: Any) -> tuple[Any, Any]:
    """Make rows that are written into a buffer wait until its other rows have been read.

    XLA copies a buffer that is read and written at the same time: all of it, in every iteration of a loop.
    """
    new, read = jax.lax.optimization_barrier((new, read))
    return new, read


def opaque(x: Any) -> Any:
    """Hide a number's value from XLA, which computes in advance with every value that it knows.

    XLA would unroll a loop that is known to run once, and would not update in place. It would store the zeros of a
    skipped update as a tree of their own. It would not write a choice with a known outcome over the rejected value, and
    on a TPU would copy each parameter twice. It would make a constant, with its own kernel, of every leaf's seed.
    """
    return jax.lax.optimization_barrier(x)


def gate_equation() -> Equation:
    """An equation of the primitive of ``gate``, to be replaced by one with other operands and results."""
    return jaxpr_of(lambda x: _GATE.bind(x), jax.ShapeDtypeStruct((), np.int32))[0].jaxpr.eqns[0]


def equation_of_together(values: Mapping[Var, Var]) -> Equation:
    """``together`` as an equation. ``values`` maps each operand to its result."""
    avals = [jax.ShapeDtypeStruct((), np.int32) for _ in values]
    (eqn,) = jaxpr_of(lambda *xs: together(xs), *avals)[0].jaxpr.eqns
    return eqn.replace(invars=list(values), outvars=list(values.values()))


def _derived(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Pass tangents through one by one; jax may have put the tangents of host leaves on the device."""
    passed = [to_host(t) if nonzero(t) and on_host(x) else t for x, t in zip(values, tangents, strict=True)]
    return _GATE.bind(*values), passed


# The same as jax.lax.optimization_barrier, also by name, except for its derivatives.
_GATE = Primitive("optimization_barrier")
_GATE.multiple_results = True
_GATE.def_impl(lambda *values: list(values))
_GATE.def_abstract_eval(lambda *avals: list(avals))
set_rules(
    _GATE,
    lower=lambda context, *values: lowered_as_barrier(values),
    lower_for_cpu=lambda context, *values: values,  # nothing is copied there, so nothing is to be ordered
    jvp=_derived,
    batch=lambda values, dims: (_GATE.bind(*values), dims),
)
