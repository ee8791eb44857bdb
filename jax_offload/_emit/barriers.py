"""A gate: a value that waits for others.

XLA's scheduler hoists every host-to-device copy to the start of a program, because nothing holds it back; then every
loaded leaf lives until its update, and the peak is that of a resident state. A gate holds it back: an
``optimization_barrier`` over the host leaf and a value that earlier work produced, *whose outputs are used from then
on in place of both* (a barrier with an unused output is optimised away).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_offload._base.memory import on_host, to_host
from jax_offload._base.shardings import varying_over
from jax_offload._ir.program import Var


def gate(env: dict[Var, Any], held: Sequence[Var], waits_for: Sequence[Var]) -> None:
    """Inside ``shard_map`` only among what varies over the same axes: jax 0.10 makes all outputs vary over all."""
    for varying in {varying_over(env[v]) for v in held}:
        waiting, first = ([v for v in vs if varying_over(env[v]) == varying] for vs in (held, waits_for))
        if first:
            names = [*waiting, *first]
            env.update(zip(names, _GATE([env[v] for v in names]), strict=True))


@jax.custom_jvp
def _together(values: list[Any]) -> list[Any]:
    """A gate. Tangents pass it one by one: those that are zero are made on the device, also of host leaves."""
    return jax.lax.optimization_barrier(values)


@_together.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (values,), (tangents,) = primals, tangents
    return _together(values), [to_host(t) if on_host(x) else t for x, t in zip(values, tangents, strict=True)]


_GATE = jax.jit(_together, inline=True)  # traced once for gates of equal types, and gone from the program
