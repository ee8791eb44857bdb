"""Training steps of stacked layers, and the one comparison of a step of ours with the plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from tests.support.trees import assert_close, copied, kinds

HOST, DEVICE = "pinned_host", "device"
IN_BACKWARD, IN_FORWARD = "in the scan that makes their gradients", "in the scan that reads the parameters"
LAYERS, WIDTH = 4, 64  # the stack's gradient is just large enough to wait in host memory
ADAMW = optax.adamw(1e-2)
CLIP = optax.clip_by_global_norm(0.5)
CLIPPED = optax.chain(CLIP, ADAMW)


def offloaded(tx: Any, **options: Any) -> optax.GradientTransformation:
    return jo.offload(tx, **{"min_bytes": 1024} | options)


def committed(tree: Any) -> Any:
    return jax.device_put(tree, jax.devices()[0])


def parameters(axis: int = 0, dtype: Any = jnp.float32, seed: int = 0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 2)
    layers = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    head = jax.random.normal(keys[1], (WIDTH, 8)) / WIDTH**0.5
    params = {"layers": jnp.moveaxis(layers, 0, axis), "head": head, "bias": jnp.zeros(8)}
    return committed(jax.tree.map(lambda p: p.astype(dtype), params))


def batch(k: int, size: int = 8) -> dict[str, Any]:
    x = np.random.default_rng(k).standard_normal((size, WIDTH), np.float32)
    return committed({"x": x, "y": np.sin(x[:, :8])})


def layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w.astype(x.dtype))


def model(params: Any, x: Any, axis: int = 0, unrolled: bool = False, layer: Any = layer) -> Any:
    layers = jnp.moveaxis(params["layers"], axis, 0)
    if unrolled:
        for w in layers:
            x = layer(x, w)
    else:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, layers)
    return x @ params["head"].astype(x.dtype) + params["bias"].astype(x.dtype)


def loss_of(params: Any, batch: Any, **how: Any) -> Any:
    return ((model(params, batch["x"], **how) - batch["y"]) ** 2).mean()


def apart(n: int = 4, width: int = WIDTH, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Square layers, each of them a leaf."""
    w = {f"layer_{k}": jax.random.normal(jax.random.key(k), (width, width)) / width**0.5 for k in range(1, n + 1)}
    return committed({name: x.astype(dtype) for name, x in w.items()})


def loss_apart(params: Any, x: Any) -> Any:
    for name in sorted(params):
        x = jnp.tanh(x.astype(params[name].dtype) @ params[name])
    return (x.astype(jnp.float32) ** 2).mean()


def new_params(tx: Any, form: str, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    if form == "update_params":
        return jo.update_params(tx, grads, state, params, **extra)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def step_of(tx: Any, form: str = "update_params", loss: Any = loss_of, **how: Any) -> Callable[..., Any]:
    """(params, state, batch) -> (params, state, loss)."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(functools.partial(loss, **how))(params, batch)
        params, state = new_params(tx, form, grads, state, params)
        return params, state, value

    return step


def loop(step: Callable[..., Any], carried: Sequence[Any], batches: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Run the plain loop; return the carried values after every step, and the other results of each."""
    jitted = jax.jit(step)
    every, others = [], []
    for each in batches:
        *carried, other = jitted(*carried, each)
        every.append(tuple(carried))
        others.append(other)
    return every, others


def advance(train: Any, carried: Sequence[Any], batches: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The same through ``pipelined``, not finished yet: the carry and every ``Aux``."""
    carry, returned = carried if len(carried) > 1 else carried[0], []
    for each in batches:
        carry, aux = train(carry, each)
        returned.append(aux)
    return carry, returned


def now(returned: Sequence[Any]) -> list[Any]:
    return [aux.now for aux in returned]


def finished(train: Any, carry: Any, returned: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What ``finish`` gives, and the other results of every step, those that were known late in their places."""
    carried, last = train.finish(carry, with_late=True)
    lates = [aux.late for aux in returned[1:]] + [last]
    both = functools.partial(jax.tree.map, lambda a, b: b if a is None else a, is_leaf=lambda x: x is None)
    return carried, [both(aux.now, late) for aux, late in zip(returned, lates, strict=True)]


def assert_placed(got: Any, like: Any) -> None:
    """Types, shardings and kinds of memory."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype, x.sharding.memory_kind) == (y.shape, y.dtype, y.sharding.memory_kind)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def assert_as_plain(
    make: Callable[[Any], Any],
    tx: Any,
    plain: Any,
    way: Callable[..., Any] = jo.jit,
    *,
    params: Any = None,
    there: Any = None,
    batches: Sequence[Any] = (),
    rtol: float = 1e-4,
    **options: Any,
) -> jo.types.Placement:
    """Check some steps against plain optax: values, types, shardings, memories and one compile.

    Args:
      make: from an optimizer to a step of (params, state, batch) that returns (params, state, others).
      tx, plain: the optimizer with and without ``jo.offload``.
      way: ``jo.jit`` or ``jo.pipelined``; ``options`` are its own.
      there: the parameters where our step has them, in host memory.

    Returns:
      The placement of our step.
    """
    params, batches = params or parameters(), batches or [batch(k) for k in range(3)]
    wanted, others = loop(make(plain), (params, plain.init(params)), batches)
    params = params if there is None else there
    state, step = tx.init(params), way(make(tx), **{"donate_argnums": (0, 1)} | options)
    table = jo.placement(step, params, state, batches[0])
    assert not table.unknown, table.unknown
    carried, results = copied((params, state)), []
    if way is jo.pipelined:
        carried, results = finished(step, *advance(step, carried, batches))
    else:
        for each in batches:
            *carried, other = step(*carried, each)
            results.append(other)
        assert step._cache_size() == 1
    assert_placed(tuple(carried), (params, state))
    assert_close(results, others, rtol)
    assert_close(carried[0], wanted[-1][0], rtol)
    if jax.tree.structure(carried[1]) == jax.tree.structure(wanted[-1][1]):
        assert_close(carried[1], wanted[-1][1], 10 * rtol)
    assert HOST in kinds(state)
    return table


def moved(table: jo.types.Placement, where: str = IN_BACKWARD) -> dict[str, bool]:
    """Of the leaves in host memory: whether their update moves into that scan."""
    return {leaf.path: where in leaf.streams for leaf in table.leaves if leaf.host}


def placement(step: Any, tx: Any, *rest: Any, params: Any = None, **kwargs: Any) -> jo.types.Placement:
    params = params or parameters()
    return jo.placement(step, params, tx.init(params), *(rest or (batch(0),)), **kwargs)


def all_moved(table: jo.types.Placement, where: str = IN_BACKWARD) -> bool:
    """Whether the update of the stack moves into that scan, and nothing else is said."""
    found = {path: inside for path, inside in moved(table, where).items() if "layers" in path}
    return bool(found) and all(found.values()) and not table.stays
