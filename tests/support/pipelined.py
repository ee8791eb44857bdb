"""``jo.pipelined`` beside the plain loop of the same step: what the tests in ``tests/pipelined`` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import FAST
from tests.support.words import words

HOST, DEVICE = "pinned_host", "device"
STEPS, LAYERS, WIDTH = 20, 4, 64
CLIP = optax.clip_by_global_norm(0.5)
ADAMW = optax.chain(CLIP, optax.adamw(1e-2))


def offloaded(tx: Any = ADAMW, **options: Any) -> optax.GradientTransformation:
    return jo.offload(tx, **{"min_bytes": 1024} | options)


def parameters(axis: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    layers = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    head = jax.random.normal(keys[1], (WIDTH, 8)) / WIDTH**0.5
    params = {"layers": jnp.moveaxis(layers, 0, axis), "head": head, "bias": jnp.zeros(8)}
    return jax.device_put(jax.tree.map(lambda p: p.astype(dtype), params), jax.devices()[0])


def batch(k: int, size: int = 8) -> dict[str, Any]:
    x = np.random.default_rng(k).standard_normal((size, WIDTH), np.float32)
    return jax.device_put({"x": x, "y": np.sin(x[:, :8])}, jax.devices()[0])


def model(params: Any, x: Any, axis: int = 0, unrolled: bool = False) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w.astype(h.dtype)), None

    layers = jnp.moveaxis(params["layers"], axis, 0)
    if unrolled:
        for w in layers:
            x, _ = layer(x, w)
    else:
        x, _ = jax.lax.scan(layer, x, layers)
    return x @ params["head"].astype(x.dtype) + params["bias"].astype(x.dtype)


def loss_of(params: Any, batch: Any, **how: Any) -> Any:
    return ((model(params, batch["x"], **how) - batch["y"]) ** 2).mean()


def new_params(tx: Any, form: str, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    if form == "update_params":
        return jo.update_params(tx, grads, state, params, **extra)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def step_of(tx: Any, form: str = "update_params", loss: Any = loss_of, **how: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(functools.partial(loss, **how))(params, batch)
        params, state = new_params(tx, form, grads, state, params)
        return params, state, value

    return step


def copied(tree: Any) -> Any:
    """Each array in the memory in which it is."""

    def copy(x: Any) -> Any:
        return x if isinstance(x, int) else jo.to_host(y) if (y := jnp.copy(x)).sharding != x.sharding else y

    return jax.tree.map(copy, tree)


def loop(step: Callable[..., Any], carried: Sequence[Any], batches: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The plain loop: what is carried after every step, and the other results of each."""
    jitted = jax.jit(step, compiler_options=FAST)
    every, others = [], []
    for each in batches:
        *carried, other = jitted(*carried, each)
        every.append(tuple(carried))
        others.append(other)
    return every, others


def advance(train: Any, carried: Sequence[Any], batches: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The same through ``pipelined``, not finished yet: the carry and every ``Aux``."""
    carry, aux = train.start(*carried, batches[0])
    returned = [aux]
    for each in batches[1:]:
        carry, aux = train(carry, each)
        returned.append(aux)
    return carry, returned


def now(returned: Sequence[Any]) -> list[Any]:
    return [aux.now for aux in returned]


def assert_placed(got: Any, like: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.sharding.memory_kind == y.sharding.memory_kind
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def assert_close(got: Any, want: Any, atol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0, atol=atol)


def pipelined(step: Callable[..., Any], **options: Any) -> Any:
    return jo.pipelined(step, donate_argnames=("params", "state"), **options)


def in_the_scan(train: Any, *args: Any) -> bool:
    return "in the scan that reads the parameters" in words(jo.placement(train, *args))


def check(
    ours: Callable[..., Any],
    plain: Callable[..., Any],
    init: Callable[..., Any],
    plain_init: Callable[..., Any],
    params: Any = None,
    loss_atol: float = 1e-4,
    one: float = 1e-6,
    atol: float = 1e-3,
    scan: bool = True,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """The step ``ours`` through ``pipelined``, against ``plain`` in a loop: after one step, and after all.

    Args:
      one, atol: how far parameters may be off, after one step and after all.
      scan: whether the update moves into the scan that reads the parameters.
      options: of ``pipelined``.
    """
    params = parameters() if params is None else params
    batches = [batch(k) for k in range(STEPS)]
    wanted, losses = loop(plain, (params, plain_init(params)), batches)
    train, state = pipelined(ours, **options), init(params)
    for n in (1, STEPS):
        carry, returned = advance(train, copied((params, state)), batches[:n])
        got, after = train.finish(carry)
        np.testing.assert_allclose(now(returned), losses[:n], rtol=0, atol=loss_atol)
        assert_close(got, wanted[n - 1][0], one if n == 1 else atol)
        assert_placed(got, params)
        assert_placed(after, state)
    assert HOST in {x.sharding.memory_kind for x in jax.tree.leaves(after)}
    counts = [[int(x) for x in jax.tree.leaves(s) if x.dtype == jnp.int32 and not x.ndim]
              for s in (after, wanted[-1][1])]  # fmt: skip
    assert counts[0] == counts[1] and counts[0]
    assert in_the_scan(train, params, state, batch(0)) == scan
    assert float(losses[-1]) < float(losses[0]) / 2
    return train, returned


def gathered(p: Any, mesh: Mesh, axis_type: AxisType) -> Any:
    if axis_type == AxisType.Explicit:
        return jax.reshard(p, NamedSharding(mesh, P()))
    return jax.lax.with_sharding_constraint(p, NamedSharding(mesh, P()))


def broken(kind: str) -> tuple[Callable[..., Any], Any]:
    """A step that cannot be turned around, and its optimizer; ``kind``: why."""
    tx = offloaded()
    if kind == "line search":
        tx = offloaded(optax.chain(optax.adamw(1e-2), optax.scale_by_backtracking_linesearch(3)))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        if kind == "line search":
            again = functools.partial(loss_of, batch=batch)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=again)
            return optax.apply_updates(params, updates), state, value
        if kind == "no update":
            return jax.tree.map(jnp.subtract, params, grads), state, value
        if kind == "ordered":
            io_callback(lambda x: None, None, value, ordered=True)
        new, after = jo.update_params(tx, grads, state, params)
        return {
            "state not returned": (new, value),
            "state twice": (new, after, after, value),
            "dtype": (jax.tree.map(lambda p: p.astype(jnp.bfloat16), new), after, value),
            "as they were": (params, state, value),
            "old state": (new, state, value),
            "old parameters": (params, after, value),
        }.get(kind, (new, after, value))

    return step, tx
