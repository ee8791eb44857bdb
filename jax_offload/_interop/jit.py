"""``jax.jit`` for a whole training step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_offload._base.donation import guarded


def jit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``jax.jit`` for a step with host memory in it, whoever moves it there: no donated buffer crosses memory kinds.

    A step that calls ``update``, ``update_params`` or ``init`` of an ``offload`` is as safe with plain ``jax.jit``.
    This one also covers functions in which only others move, or that hand a state on: the ``call`` of an exported
    step, a copy of the parameters beside the state.

    Args:
      fun: the function; where it is left out, a decorator is returned.
      **options: ``jax.jit``'s.

    Returns:
      What ``jax.jit`` returns.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
      >>> state = jo.offload(optax.adamw(1e-3)).init(params)
      >>> @functools.partial(jo.jit, donate_argnames="state")
      ... def reset(params, state):
      ...     return params, jax.tree.map(lambda x: x, state)
      >>> params, state = reset(params, state)
      >>> state[0].mu.sharding.memory_kind
      'pinned_host'
    """
    if fun is None:
        return functools.partial(jit, **options)

    @functools.wraps(fun)
    def step(*args: Any, **kwargs: Any) -> Any:
        return guarded(fun(*args, **kwargs), (args, kwargs))

    return jax.jit(step, **options)
