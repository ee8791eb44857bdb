"""A gate: a value that waits for others.

XLA's scheduler hoists every host-to-device copy to the start of a program, because nothing holds it back; then every
loaded leaf lives until its update, and the peak is that of a resident state. A gate holds it back: an
``optimization_barrier`` over the host leaf and a value that earlier work produced, *whose outputs are used from then
on in place of both* (a barrier with an unused output is optimised away).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive

from jax_offload._base.memory import on_host, to_host
from jax_offload._base.private import lowered_as_barrier, nonzero, set_rules
from jax_offload._base.shardings import varying_over
from jax_offload._ir.program import Var


def gate(env: dict[Var, Any], held: Sequence[Var], waits_for: Sequence[Var]) -> None:
    """Inside ``shard_map`` only among what varies over the same axes: jax 0.10 makes all outputs vary over all."""
    for varying in {varying_over(env[v]) for v in held}:
        waiting, first = ([v for v in vs if varying_over(env[v]) == varying] for vs in (held, waits_for))
        if first:
            names = [*waiting, *first]
            env.update(zip(names, _GATE.bind(*(env[v] for v in names)), strict=True))


def _derived(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Tangents pass it one by one; jax may have those of host leaves on the device."""
    passed = [to_host(t) if nonzero(t) and on_host(x) else t for x, t in zip(values, tangents, strict=True)]
    return _GATE.bind(*values), passed


# What jax.lax.optimization_barrier is, by name too, for those who read equations; but for its derivatives.
_GATE = Primitive("optimization_barrier")
_GATE.multiple_results = True
_GATE.def_impl(lambda *values: list(values))
_GATE.def_abstract_eval(lambda *avals: list(avals))
set_rules(
    _GATE,
    lower=lambda context, *values: lowered_as_barrier(values),
    jvp=_derived,
    batch=lambda values, dims: (_GATE.bind(*values), dims),
)
