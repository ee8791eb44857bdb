"""Update and apply in one: the public ``update_params``."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jax_offload._disk.placeholder import opened
from jax_offload._emit.recipe import checked_skip, old_where, replicated_into, sharded_params, streamed, where_it_was
from jax_offload._program.memory import loaded
from jax_offload._program.shardings import types_tell
from jax_offload._schedule.options import merged
from jax_offload._state.arguments import check_managed, check_not_in_multi_steps, check_transformation
from jax_offload._state.around import compiled_where_eager, from_host, gathering, load


@compiled_where_eager(like=lambda tx, grads, state, params, **_: params)
def update_params(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    skip: Any = None,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Update the parameters: ``tx.update`` and ``optax.apply_updates`` in one, without a tree of updates.

    The loop that streams the state writes the new parameters in place of the old ones. That saves memory where the
    updates could not take the gradients' memory, for example with bfloat16 parameters and float32 arithmetic.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      grads: the gradients, a tree like ``params`` with the same shapes.
      state: the state of ``tx``.
      params: the parameters. Those in pinned host memory, and such gradients, are streamed with the state.
      skip: a bool, traced or not. Where it is true, parameters and state keep every bit; the state is streamed all
        the same. Pass ``~is_finite`` of flax's ``DynamicScale``. It must be the same on all devices.
      **extra_args: arguments for ``tx.update``.

    Returns:
      The new parameters, with the dtypes and in the memory of the old ones, and the new state.

    Raises:
      ValueError: gradients, state and parameters do not fit each other or ``tx``, or are in the wrong order.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3))
      >>> step = jax.jit(functools.partial(jo.update_params, tx), donate_argnums=(1, 2))
      >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
      >>> params, state = step(grads, state, params)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'
    """
    skip = checked_skip(skip)
    check_transformation(tx, "(tx, grads, state, params)")
    check_not_in_multi_steps(tx, state)
    tx = optax.with_extra_args_support(tx)
    state, stored = opened(state)
    state, params = from_host((state, params))

    def recipe(grads: Any, state: Any, params: Any, extra_args: Any, skip: Any) -> Any:
        old, (grads, params, extra_args) = params, loaded((grads, params, extra_args))
        with gathering() as options:
            try:
                updates, after = tx.update(grads, state, params, **extra_args)
            except ValueError as error:
                check_managed(state, error)
                raise
        given = merged(options)
        new = optax.apply_updates(params if types_tell(updates) else sharded_params(params, given), updates)
        new, after = old_where(skip, (params, state), (replicated_into(params, new, given), after))
        return where_it_was(new, old), after

    params, state = streamed(recipe, (grads, state, params, extra_args, skip), next_of=(2, 1))
    return jax.tree.map(load, params), stored(state)
