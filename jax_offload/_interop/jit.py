"""``jax.jit`` for a whole training step."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jax_offload._base.donation import guarded
from jax_offload._base.memory import mesh_is_set, on_host, under_jit
from jax_offload._base.on_disk import UpdatedFromDisk
from jax_offload._drive.jitted import DrivenJit
from jax_offload._emit.region import UpdatedOnCores
from jax_offload._interop.xla_options import compiler_options, options_for_sending
from jax_offload._step.rewritten import rewritten


def jit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``jax.jit`` for a training step: it sees the whole step, and hides transfers in its scans.

    Where a ``lax.scan`` makes the gradients of stacked layers, their update runs inside that scan, each layer's as soon
    as its gradient is there, while the state of its neighbours moves. The stacked gradients then never exist. Numbers
    are those of the plain step. What needs all gradients first (clipping by their norm) is updated after the scan, as
    under ``jax.jit``; ``jax_offload.placement(step, *args)`` says what is updated where, and why.

    It sets ``jax_offload.compiler_options`` for the default backend, unless ``compiler_options`` are given. And no
    donated buffer crosses memory kinds, whoever moves something there. A step that calls ``update``,
    ``update_params`` or ``init`` is as safe with plain ``jax.jit``; this one also covers functions that only hand a
    state on: the ``call`` of an exported step, a copy of the parameters beside the state.

    Args:
      fun: the function; where it is left out, a decorator is returned.
      **options: ``jax.jit``'s.

    Returns:
      The step, with the methods of what ``jax.jit`` returns.

    Raises:
      TypeError: ``fun`` is not a function; at the first call, an option is none of ``jax.jit``'s.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> layers = jax.device_put(jnp.full((4, 256, 256), 0.01), jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3))
      >>> def loss(layers, x):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0].sum()
      >>> step = jo.jit(lambda p, s, x: jo.update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1))
      >>> layers, state = step(layers, tx.init(layers), jnp.ones((8, 256)))
      >>> state[0].mu.sharding.memory_kind
      'pinned_host'
    """
    if fun is None:
        return functools.partial(jit, **options)
    if not callable(fun):
        raise TypeError(f"fun: expected a step, a function; got a {type(fun).__name__}. Fix: jo.jit(step, ...).")
    return Jitted(fun, options)


class Jitted:
    """A step under ``jax.jit``, made when it is first needed: before, jax may not ask which backend there is.

    Inside of another ``jit`` it is plain: jax takes ``compiler_options`` from the outermost only.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: dict[str, Any],
        rewrite: Callable[[Callable[..., Any]], Callable[..., Any]] = rewritten,
    ) -> None:
        functools.update_wrapper(self, fun)
        self._options, self._rewrite = options, rewrite
        self._driven: DrivenJit | None = None
        self._was_called = False

    @functools.cached_property
    def whole_step(self) -> Callable[..., Any]:
        """What is traced."""
        step = self._rewrite(self.__wrapped__)

        @functools.wraps(self.__wrapped__)
        def guarded_step(*args: Any, **kwargs: Any) -> Any:
            return guarded(step(*args, **kwargs), (args, kwargs))

        return guarded_step

    @functools.cached_property
    def _inner(self) -> Any:
        return jax.jit(self.whole_step, **{k: v for k, v in self._options.items() if k != "compiler_options"})

    @functools.cached_property
    def _jitted(self) -> Any:
        options: dict[str, Any] = {"compiler_options": compiler_options(jax.default_backend()) or None}
        options.update(self._options)
        return jax.jit(self.whole_step, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if under_jit():
            return self._inner(*args, **kwargs)
        if not self._was_called:
            self._was_called = True
            _warn_of_uncommitted(_donated(self.__wrapped__, self._options, args, kwargs))
        if self._driven is None:
            try:
                return self._jitted(*args, **kwargs)
            except (UpdatedOnCores, UpdatedFromDisk):  # that it is, its first trace tells
                platform, given = jax.default_backend(), self._options.get("compiler_options")
                for_all = compiler_options(platform) if given is None else given
                for_sending = options_for_sending(platform) if given is None else given
                self._driven = DrivenJit(self._jitted, self.__wrapped__, self._options, for_all, for_sending)
        return self._driven(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def _donated(fun: Callable[..., Any], options: dict[str, Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that are donated, by their names: what a step carries on."""
    nums, names = options.get("donate_argnums", ()), options.get("donate_argnames", ())
    try:
        given = inspect.signature(fun).bind(*args, **kwargs).arguments
        order = list(given)
        chosen = {names} if isinstance(names, str) else {*(names or ())}
        chosen |= {order[i] for i in ([nums] if isinstance(nums, int) else nums or ())}
    except (TypeError, ValueError, IndexError):  # jax says what is wrong
        return {}
    return {name: x for name, x in given.items() if name in chosen}


def _warn_of_uncommitted(carried: dict[str, Any]) -> None:
    """Warns where parameters that nobody has placed stand beside a state in host memory: eager ``init`` does, and a
    traced one cannot. Counts, of rank 0, are left: optax and flax make them so."""
    flat = jax.tree_util.tree_flatten_with_path(carried)[0]
    if mesh_is_set() or not any(isinstance(x, jax.Array) and on_host(x) for _, x in flat):
        return
    for (argument, *path), x in flat:
        if isinstance(x, jax.Array | np.ndarray) and x.ndim and not getattr(x, "committed", False):
            warnings.warn(
                f"jo.jit: {argument.key}{keystr(tuple(path))} is not committed to a device, and the state beside it "
                "is in host memory. jax commits whatever a step with host memory returns, so the second step would "
                f"compile again. Fix: {argument.key} = jax.device_put({argument.key}, jax.devices()[0]) (or a "
                "NamedSharding) before the first step, or jax.set_mesh.",
                stacklevel=3,
            )
            return
