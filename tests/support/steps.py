"""Training steps of stacked layers, put together of a model, what is done to its gradients, and an optimizer.

Parameters whose name starts with ``layers`` are stacked, and scanned over. Their update can move into the scan that
makes their gradients; what is said of the rest here is that it need not.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_offload as jo
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved
from jax_offload._plan.in_scan import InScan

# To compile fast, and so that what is cast to bfloat16 is rounded there in every program.
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}
IN_SCAN = "in the scan that makes their gradients"
L, N = 3, 16
BATCH = 4


def normal(name: str, *shape: int, scale: float | None = None) -> np.ndarray[Any, Any]:
    """Normal ones, those of the name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    scale = scale if scale is not None else 1 / np.sqrt(shape[-1])
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def batch(k: int = 0, n: int = N) -> np.ndarray[Any, Any]:
    return normal(f"batch {k}", BATCH, n, scale=1.0)


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss of parameters and a batch, and what they are: arrays, or a function that makes them."""

    loss: Callable[[Any, Any], Any]
    params: Mapping[str, Any] | Callable[[], Any]
    width: int = N

    def init(self, dtype: Any = None) -> Any:
        params = self.params() if callable(self.params) else dict(self.params)
        return jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), params), jax.devices()[0])


def dense(x: Any, w: Any, b: Any = 0.0) -> Any:
    return x + jnp.tanh(x @ w + b)


def squared(x: Any) -> Any:
    return (x.astype(jnp.float32) ** 2).mean()


def stack(name: str, n: int = L, width: int = N, axis: int = 0) -> Any:
    return np.moveaxis(normal(name, n, width, width), 0, axis).copy()


def of_scan(body: Any = None, axis: int = 0, n: int = L, before: Any = None, width: int = N, **options: Any) -> Model:
    """One stack of weights; ``body``: of the activations and one layer's weights."""
    body = body or dense

    def loss(params: Any, x: Any) -> Any:
        w = params["layers"] if before is None else before(params["layers"])
        step = lambda x, w: (body(x, w).astype(x.dtype), None)  # noqa: E731
        return squared(lax.scan(step, x, jnp.moveaxis(w, axis, 0), **options)[0])

    return Model(loss, {"layers": stack("w", n, width, axis)}, width)


def with_bias() -> Model:
    def loss(params: Any, x: Any) -> Any:
        x = x @ params["embed"]
        x, _ = lax.scan(lambda x, p: (dense(x, *p), None), x, (params["layers_w"], params["layers_b"]))
        return squared(x @ params["head"])

    params = {"embed": normal("e", N, N), "head": normal("h", N, 8)}
    return Model(loss, params | {"layers_w": stack("w"), "layers_b": normal("b", L, N)})


def several_scans() -> Model:
    def loss(params: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (dense(x, w), None), x, params["layers_1"])
        x, _ = lax.scan(lambda x, w: (dense(x, w), None), x[:, :8], params["layers_2"], reverse=True)
        y, _ = lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, params["layers_3"])
        return squared(x + y)

    return Model(loss, {"layers_1": stack("1"), "layers_2": normal("2", 4, 8, 8), "layers_3": normal("3", L, 8, 8)})


def blocks() -> Model:
    """Several blocks an iteration, in a loop of Python."""

    def body(x: Any, w: Any) -> Any:
        for k in range(2):
            x = dense(x, w[k])
        return x

    loss = of_scan(body).loss
    return Model(loss, {"layers": normal("blocks", L, 2, N, N)})


def nested() -> Model:
    """Several blocks an iteration, in a scan of their own."""
    loss = of_scan(lambda x, w: lax.scan(lambda x, w: (dense(x, w), None), x, w)[0]).loss
    return Model(loss, {"layers": normal("blocks", L, 2, N, N)})


def broadcast() -> Model:
    """A weight that every layer uses: its gradient is carried."""

    def loss(params: Any, x: Any) -> Any:
        return squared(lax.scan(lambda x, w: (dense(x, w) @ params["all"], None), x, params["layers"])[0])

    return Model(loss, {"layers": stack("w"), "all": normal("all", N, N)})


def outputs() -> Model:
    """A scan that returns more than its carry."""

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = dense(x, w)
            return y, (y.mean(0), jnp.abs(y).max(), y)

        x, (means, largest, all_) = lax.scan(body, x, params["layers"])
        return squared(x) + squared(means) + 1e-2 * largest.sum() + 1e-2 * squared(all_)

    return Model(loss, {"layers": stack("w")})


def numbered() -> Model:
    """A scan over weights, whole numbers and keys as well, with a branch inside."""

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, p: Any) -> Any:
            w, i, key = p
            noise = jax.random.bernoulli(key, 0.9, x.shape)
            y = lax.cond(i % 2 == 0, lambda: dense(x, w), lambda: jnp.sin(x @ w))
            return jnp.where(noise, y, x), None

        keys = jax.random.split(jax.random.key(0), L)
        return squared(lax.scan(body, x, (params["layers"], jnp.arange(L), keys))[0])

    return Model(loss, {"layers": stack("w")})


def regularised() -> Model:
    plain = of_scan()

    def loss(params: Any, x: Any) -> Any:
        return plain.loss(params, x) + 1e-2 * (params["layers"] ** 2).sum() + 1e-3 * jnp.abs(params["layers"]).sum()

    return Model(loss, plain.params)


def tied() -> Model:
    """The same weights in two scans."""

    def loss(params: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (dense(x, w), None), x, params["layers"])
        return squared(lax.scan(lambda x, w: (dense(x, w.T), None), x, params["layers"])[0])

    return Model(loss, {"layers": stack("w")})


def normed() -> Model:
    """Layers as people write them: a norm with a scale, two matmuls, biases, and a head that is not stacked."""

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, p: Any) -> Any:
            h = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
            return x + jax.nn.gelu(h @ p["up"] + p["b"]) @ p["down"], None

        return squared(lax.scan(body, x, params["layers"])[0] @ params["head"])

    layers = {"scale": np.ones((L, N), np.float32), "up": normal("up", L, N, 2 * N), "b": normal("b", L, 2 * N)}
    return Model(loss, {"layers": layers | {"down": normal("down", L, 2 * N, N)}, "head": normal("h", N, 8)})


@jax.custom_vjp
def _matmul(x: Any, w: Any) -> Any:
    return x @ w


_matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, jnp.clip(saved[0].T @ g, -1.0, 1.0)))


@jax.custom_jvp
def _tanh(x: Any) -> Any:
    return jnp.tanh(x)


_tanh.defjvp(lambda primals, tangents: ((y := jnp.tanh(primals[0])), (1 - y * y) * tangents[0]))


def checkpointed(policy: Any = None) -> Model:
    def body(x: Any, w: Any) -> Any:
        y = checkpoint_name(x @ w, "product")
        return x + jnp.tanh(y) @ w

    return of_scan(jax.checkpoint(body, policy=policy))


def batched() -> Model:
    plain = of_scan()
    return Model(lambda p, x: jax.vmap(lambda x: plain.loss(p, x))(x[:, None]).mean(), plain.params)


class Block(nn.Module):
    """Of Flax."""

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + jnp.tanh(nn.Dense(N, name="dense")(nn.LayerNorm(name="norm")(x))), None


def of_flax(axis: int, remat: bool = False, shared: bool = False, **options: Any) -> Model:
    """``nn.scan`` over blocks, with parameters along ``axis``."""
    block = nn.remat(Block, prevent_cse=False) if remat else Block
    if shared:
        scanned = nn.scan(block, variable_broadcast="params", split_rngs={"params": False}, length=L, **options)
    else:
        scanned = nn.scan(block, variable_axes={"params": axis}, split_rngs={"params": True}, length=L, **options)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x, _ = scanned(name="layers")(nn.Dense(N, name="embed")(x), None)
            return nn.Dense(8, name="head")(x)

    net = Net()
    init = functools.cache(lambda: net.init(jax.random.key(0), batch())["params"])
    return Model(lambda params, x: squared(net.apply({"params": params}, x)), init)


_POLICIES = jax.checkpoint_policies
MODELS: dict[str, Callable[[], Model]] = {
    "scan": of_scan,
    "bias, embedding, head": with_bias,
    "blocks with norms": normed,
    "axis 1": functools.partial(of_scan, axis=1),
    "axis 2": functools.partial(of_scan, axis=2),
    "flax axis 0": functools.partial(of_flax, 0),
    "flax axis 1": functools.partial(of_flax, 1),
    "flax remat": functools.partial(of_flax, 0, remat=True),
    "flax unroll": functools.partial(of_flax, 0, unroll=2),
    "unroll 2": functools.partial(of_scan, n=4, unroll=2),
    "unroll 2 of 3": functools.partial(of_scan, unroll=2),
    "unroll all": functools.partial(of_scan, unroll=True),
    "reverse": functools.partial(of_scan, reverse=True),
    "reverse, axis 1": functools.partial(of_scan, axis=1, reverse=True),
    "one layer": functools.partial(of_scan, n=1),
    "two layers": functools.partial(of_scan, n=2),
    "several scans": several_scans,
    "blocks": blocks,
    "nested": nested,
    "broadcast": broadcast,
    "outputs": outputs,
    "numbered": numbered,
    "regularised": regularised,
    "custom_vjp": functools.partial(of_scan, lambda x, w: x + jnp.tanh(_matmul(x, w))),
    "custom_jvp": functools.partial(of_scan, lambda x, w: x + _tanh(x @ w)),
    "cast before": functools.partial(of_scan, before=lambda w: w.astype(jnp.bfloat16)),
    "cast inside": functools.partial(of_scan, lambda x, w: dense(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))),
    "scaled before": functools.partial(of_scan, before=lambda w: 0.5 * w + 0.1),
    "vmap": batched,
    "tied": tied,
    "as many layers as columns": functools.partial(of_scan, n=N),
    "as many layers as columns, axis 1": functools.partial(of_scan, n=N, axis=1),
    "no matmul": functools.partial(of_scan, lambda x, w: x * w[0] + w[1]),
    "checkpoint": checkpointed,
    "wide": functools.partial(of_scan, width=128),
    **{f"checkpoint: {name}": functools.partial(checkpointed, getattr(_POLICIES, name)) for name in (
        "everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots",
        "dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims",
    )},
    "checkpoint: these names": lambda: checkpointed(_POLICIES.save_only_these_names("product")),
    "checkpoint: all but names": lambda: checkpointed(_POLICIES.save_anything_except_these_names("product")),
    "checkpoint: any but names": lambda: checkpointed(_POLICIES.save_any_names_but_these("product")),
    "checkpoint: either": lambda: checkpointed(_POLICIES.save_from_both_policies(
        _POLICIES.dots_saveable, _POLICIES.save_only_these_names("product"))),
    "checkpoint: dots on the host": lambda: checkpointed(
        _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")),
    "checkpoint: names on the host": lambda: checkpointed(_POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["product"],
        offload_src="device", offload_dst="pinned_host")),
}  # fmt: skip


def _each(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return functools.partial(jax.tree.map, f)


def by_layer(grads: Any) -> Any:
    """Each layer clipped by its own norm."""

    def clipped(g: Any) -> Any:
        axes = tuple(range(1, g.ndim))
        return g / jnp.maximum(1.0, jnp.sqrt((g**2).sum(axes, keepdims=True)) / 1e-2)

    return jax.tree.map(clipped, grads)


# What is done to the gradients before the update.
GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "as they are": lambda g: g,
    "scaled": _each(lambda g: 0.5 * g),
    "averaged": _each(lambda g: g / jnp.float32(4)),
    "to float32": _each(lambda g: g.astype(jnp.float32)),
    "through bfloat16": _each(lambda g: g.astype(jnp.bfloat16).astype(g.dtype)),
    "clipped by value": _each(lambda g: jnp.clip(g, -1e-2, 1e-2)),
    "clipped by layer": by_layer,
    "without nans": _each(jnp.nan_to_num),
    "whole numbers": _each(lambda g: jnp.round(g * 256) / 256),
    "behind a barrier": _each(lax.optimization_barrier),
}


def log_norm(params: Any, grads: Any, new: Any) -> Any:
    return optax.tree.norm(grads)


def log_finite(params: Any, grads: Any, new: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))


def log_largest(params: Any, grads: Any, new: Any) -> Any:
    return jax.tree.map(lambda g: jnp.max(jnp.abs(g)), grads)


def log_layers(params: Any, grads: Any, new: Any) -> Any:
    return jax.tree.map(lambda g: (g**2).sum(tuple(range(1, g.ndim))), grads)


def log_change(params: Any, grads: Any, new: Any) -> Any:
    return optax.tree.norm(jax.tree.map(jnp.subtract, new, params))


# What the step returns beside.
LOGS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "nothing": lambda params, grads, new: (),
    "norm": log_norm,
    "finite": log_finite,
    "largest": log_largest,
    "norms of layers": log_layers,
    "norm of the change": log_change,
    "old parameters' norm": lambda params, grads, new: optax.tree.norm(params),
    "old parameters": lambda params, grads, new: jax.tree.map(lambda p: p + 1, params),
}


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "stack" if "layers" in str(path) else "rest", params)


def _layers(params: Any) -> Any:
    return jax.tree.map(lambda label: label == "stack", _labels(params))


def _rest(params: Any) -> Any:
    return jax.tree.map(lambda label: label == "rest", _labels(params))


def _schedule(step: Any) -> Any:
    return 1e-2 / (1.0 + 0.1 * step)


# Those whose update keeps layers apart; of others see TOGETHER in tests/in_scan/test_leaves.py.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "adam, schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 60)),
    "adamw, schedule and mask": lambda: optax.adamw(_schedule, mask=_layers, mu_dtype=jnp.bfloat16),
    "lion": lambda: optax.lion(1e-3),
    "sgd, momentum": lambda: optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-2, eps=1e-2, centered=True, momentum=0.9),
    "adagrad": lambda: optax.adagrad(1e-1),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "adan": lambda: optax.adan(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(_schedule, weight_decay=1e-3),
    "multi_transform": lambda: optax.multi_transform(
        {"stack": optax.adam(1e-2), "rest": optax.sgd(1e-1, momentum=0.9)}, _labels
    ),
    "masked": lambda: optax.chain(optax.masked(optax.adam(1e-2), _layers), optax.masked(optax.sgd(1e-1), _rest)),
    "clip": lambda: optax.chain(optax.clip(1e-2), optax.adamw(1e-2)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adamw(1e-2)),
    "ema": lambda: optax.chain(optax.adamw(1e-2), optax.ema(0.9)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "adafactor": lambda: optax.adafactor(
        1e-2, min_dim_size_to_factor=8, clipping_threshold=None, multiply_by_parameter_scale=False
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, by the names of its parts.

    Attributes:
      update: whether by ``tx.update`` and ``optax.apply_updates``, not ``jo.update_params``.
      options: of ``jo.offload``.
      dtype: of the parameters.
    """

    model: str = "scan"
    gradients: str = "as they are"
    optimizer: str = "adamw"
    log: str = "nothing"
    update: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float32"

    def inner(self) -> optax.GradientTransformation:
        inner = OPTIMIZERS[self.optimizer]()
        return jo.with_master_params(inner) if self.dtype == "bfloat16" else inner

    def tx(self) -> optax.GradientTransformation:
        options = {k: dict(v) if isinstance(v, tuple) else v for k, v in self.options}
        return jo.offload(self.inner(), **{"min_bytes": 0, **options})

    def step(self, tx: optax.GradientTransformation, loss: Any) -> Callable[[Any, Any, Any], Any]:
        """Of parameters, state and batch; it returns the first two, the loss and what is logged."""
        return training_step(tx, loss, GRADIENTS[self.gradients], LOGS[self.log], self.update)


def training_step(
    tx: Any, loss: Any, gradients: Any = lambda g: g, log: Any = LOGS["nothing"], update: bool = False
) -> Callable[[Any, Any, Any], Any]:
    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        grads = gradients(grads)
        if update:
            updates, state = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
        else:
            new, state = jo.update_params(tx, grads, state, params)
        return new, state, value, log(params, grads, new)

    return step


def moved(step: Any, *args: Any, **kwargs: Any) -> dict[str, bool]:
    """Of the arguments that a step loads: whether their update moved into the scan that makes their gradients."""
    table = jo.placement(step, *args, **kwargs)
    assert not table.unknown, table.unknown
    return {row.path: IN_SCAN in row.streams for row in table.leaves}


def scans(step: Any, *args: Any, **kwargs: Any) -> list[InScan]:
    """The scans of a step of ``jo.jit`` with updates inside."""
    found = updates_in(step.trace(*args, **kwargs).jaxpr)
    plans = [each.update.plan for each in found if isinstance(each.update, Moved)]
    return [plan for plan in plans if isinstance(plan, InScan)]


def difference(got: Any, want: Any) -> dict[str, float]:
    """The relative norm of the difference of every leaf; types must agree, and where there are no numbers."""
    found: dict[str, float] = {}
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.float64(x), np.float64(y)
        assert np.array_equal(np.isfinite(x), np.isfinite(y)), path
        x, y = (np.where(np.isfinite(each), each, 0.0) for each in (x, y))
        found[jax.tree_util.keystr(path)] = float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0))
    return found
