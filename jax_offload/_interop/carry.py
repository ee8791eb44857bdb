"""What a call of a pipelined step returns: what it hands to the next call, and what is known of its batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_offload._interop.rotated import Kept, Rotated


class Aux(NamedTuple):
    """What a step returns beside what it carries, as far as it is known.

    Attributes:
      now: of this call's batch: a loss, a norm of gradients. ``None`` in the place of what needs the new parameters.
      late: that, of the batch of the call before; ``None`` in the place of the rest. ``None`` from ``start``.
      step: the number of this call's batch since ``start``, which has number 0; ``late`` is of ``step - 1``.
    """

    now: Any
    late: Any
    step: int


class Carry:
    """What one call of a pipelined step hands to the next: parameters and state that wait for an update, and what the
    update needs. A pytree, of arrays and the number of the step, not to be changed: its parameters are not the current
    ones, and of its state a row may be there twice, on the device too.

    To be saved: ``jax_offload.save_args(carry)``. To be restored: ``jax_offload.restore(manager, like)``, where
    ``like`` is a carry of the same step, from ``start``. What ``finish`` gives depends on no step, and is the better
    checkpoint.
    """

    def __init__(self, kept: Kept, step: Any, program: Rotated) -> None:
        self.kept, self.step, self.program, self.used = kept, step, program, False


_ATTRIBUTES = jax.tree_util.GetAttrKey("kept"), jax.tree_util.GetAttrKey("step")
jax.tree_util.register_pytree_with_keys(
    Carry,
    lambda carry: (tuple(zip(_ATTRIBUTES, (carry.kept, carry.step), strict=True)), carry.program),
    lambda program, children: Carry(*children, program),  # pyright: ignore[reportCallIssue, reportArgumentType]
)
