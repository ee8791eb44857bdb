"""Wrappers that choose between the old and the new state of an ``offload`` inside them.

Such a choice needs both in one memory, and jax lets no type change in it: a state that comes from the device would stay
there. So the whole wrapper is the recipe: everything is loaded before, chosen on the device, and stored after, slice by
slice. It comes too late for that where only the ``update`` inside is asked, so ``optax.MultiSteps`` is told of it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax

from jax_offload._base.around import wrapped
from jax_offload._base.arrays import is_array
from jax_offload._base.memory import on_host, to_device, to_host
from jax_offload._base.on_disk import opened
from jax_offload._placement.home import returned
from jax_offload._plan.options import Options
from jax_offload._precision.storage import as_stored
from jax_offload._state.traced_init import traced_init
from jax_offload._update.streamed import streamed


def streamed_around(tx: Any, update: Callable[..., Any], updates: Any, state: Any, params: Any, extra_args: Any) -> Any:
    """``update`` of ``tx``, an ``offload`` somewhere in it; ``NotImplemented`` where it keeps nothing on the host."""
    like = updates if params is None else params
    try:
        rows, treedef = traced_init(tx, like)
    except Exception:  # init cannot run on what we have: the update itself says more
        return NotImplemented
    host = [leaf.host or leaf.disk for leaf, _ in rows]
    state, closed = opened(state)
    state = as_stored(state, jax.tree.unflatten(treedef, [aval for _, aval in rows]))
    if not any(host) or jax.tree.structure(state) != treedef:
        return NotImplemented
    moved = not all(on_host(x) for x, h in zip(jax.tree.leaves(state), host, strict=True) if h)

    state = returned(state, [leaf for leaf, _ in rows])

    def recipe(updates: Any, state: Any, params: Any, extra_args: Any) -> Any:
        loaded = jax.tree.map(lambda x: to_device(x) if is_array(x) else x, state)
        with wrapped(moved):
            updates, new = update(updates, loaded, params, **extra_args)
        leaves = [to_host(x) if h else x for x, h in zip(jax.tree.leaves(new), host, strict=True)]
        return updates, jax.tree.unflatten(treedef, leaves)

    args = (updates, state, params, extra_args)
    updates, state = streamed(recipe, args, next_of=(0, 1), options=Options(serialise=False))
    return updates, closed(state)


def adopt_multi_steps() -> None:
    """Lets ``optax.MultiSteps`` be wrapped around an ``offload``, as trainers do; others do not notice.

    It changes a class of optax, as there is no other place: ``MultiSteps`` calls the ``update`` inside it in a
    ``lax.cond``, with a state that the branches have been given already, and chooses between old and new state by
    itself; the transformation that it is given has no say in either. Where optax has changed what this relies on,
    nothing is changed, and a warning says so.
    """
    plain = optax.MultiSteps.update
    if hasattr(plain, "_jax_offload"):
        return

    if moved := _moved_in_optax(plain):
        warnings.warn(
            f"optax {optax.__version__} is made otherwise than jax_offload knows ({moved}): optax.MultiSteps around an "
            "offload(...) would not stream its state. Fix: offload(optax.MultiSteps(...)), and report this.",
            stacklevel=3,
        )
        return

    @functools.wraps(plain)
    def update(self: Any, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        given = functools.partial(plain, self)
        result = streamed_around(self, given, updates, state, params, extra_args)
        return given(updates, state, params, **extra_args) if result is NotImplemented else result

    update._jax_offload = True  # pyright: ignore[reportAttributeAccessIssue]
    optax.MultiSteps.update = update


def _moved_in_optax(update: Callable[..., Any]) -> str:
    """What of ``optax.MultiSteps`` is not as ``adopt_multi_steps`` knows it; empty where all is."""
    names = list(inspect.signature(update).parameters)
    if names != ["self", "updates", "state", "params", "extra_args"]:
        return f"MultiSteps.update takes {', '.join(names)}"
    bound = optax.MultiSteps(optax.identity(), 1).gradient_transformation().update
    return "" if getattr(bound, "__func__", None) is update else "MultiSteps has another update than its own"
