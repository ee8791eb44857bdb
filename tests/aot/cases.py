"""The step that the peak table is about: checkpointed ``tanh(x @ w)`` layers, whose optimizer state dominates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from jax_offload._step.rewritten import rewritten
from tests.aot.harness import MIB, Measured, measure, mesh_for
from tests.aot.model import loss, parameters, step_of
from tests.aot.zoo import Model

OPTIONS = jo.compiler_options("cuda")


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner`` with float32 moments and arithmetic, whatever the parameters' dtype."""

    def up(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(up(updates), state, up(params))

    return optax.GradientTransformation(lambda p: inner.init(up(p)), update)


def measure_update(
    target: str,
    tx: optax.GradientTransformation,
    params: Any,
    loss: Callable[[Any, Any], jax.Array],
    batch: Any,
    *,
    options: dict[str, Any] | None = None,
    update_params: bool = False,
    skip: bool | str = False,
    whole: bool = False,
    n: int = 1,
) -> Measured:
    """One training step, compiled for ``target``: abstract ``params`` with shardings; parameters and state donated.

    ``skip``: whether it skips the update where a gradient is not finite; ``"outside"``: by a choice
    around it, as in flax's example of a DynamicScale.
    """
    state = jo.abstract_state(tx, params)

    step = step_of(tx, loss, update_params=update_params, skip=skip)
    out = jax.tree.map(lambda a: a.sharding, (params, state))
    return measure(target, rewritten(step) if whole else step, (params, state, batch), (0, 1), out, options, n)


def measure_step(
    target: str,
    tx: optax.GradientTransformation,
    *,
    n_layers: int = 24,
    width: int = 4096,
    stacked: bool = False,
    batch: int = 512,
    dtype: Any = jnp.float32,
    **kwargs: Any,
) -> Measured:
    """The step of ``tx`` on the toy network."""
    sharding = device_sharding(target)
    params = parameters(n_layers, width, stacked, sharding, dtype)
    x = jax.ShapeDtypeStruct((batch, width), dtype, sharding=sharding)
    return measure_update(target, tx, params, loss, x, **kwargs)


def measure_pipelined(
    target: str,
    tx: optax.GradientTransformation,
    params: Any,
    loss: Callable[[Any, Any], jax.Array],
    batch: Any,
    *,
    gradients: Literal["device", "host"] = "device",
    n: int = 1,
    options: dict[str, Any] | None = OPTIONS,
) -> Measured:
    """The step that ``jo.pipelined`` itself makes, with nothing said of where its results go."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return *jo.update_params(tx, grads, state, params), value

    train = jo.pipelined(step, donate_argnames=("params", "state"), gradients=gradients)
    turned, args, _ = train.turned(params, jo.abstract_state(tx, params), batch)
    return measure(target, turned.whole_step, args, (0, 1), None, options, n)


def measure_sharded(
    target: str,
    tx: optax.GradientTransformation,
    spec: PartitionSpec,
    *,
    n_layers: int = 24,
    width: int = 4096,
    stacked: bool = False,
    batch: int = 512,
    n: int = 4,
    **kwargs: Any,
) -> Measured:
    """The step of ``tx`` on ``n`` devices, parameters sharded as ``spec`` says over ``data``; ``batch`` per device."""
    mesh = mesh_for(target, (n,), ("data",))
    params = parameters(n_layers, width, stacked, NamedSharding(mesh, spec, memory_kind="device"))
    rows = NamedSharding(mesh, PartitionSpec("data"), memory_kind="device")
    x = jax.ShapeDtypeStruct((n * batch, width), jnp.float32, sharding=rows)
    return measure_update(target, tx, params, loss, x, n=n, **kwargs)


def measure_divided(
    target: str, tx: optax.GradientTransformation, model: Model, tokens: int, **kwargs: Any
) -> Measured:
    """The step of ``tx`` on four devices, each leaf divided along its first axis that four divides, and the batch;
    ``tokens`` per device."""
    mesh = mesh_for(target, (4,), ("data",))

    def put(shape: tuple[int, ...], dtype: Any, axis: int | None) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, "data")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec, memory_kind="device"))

    def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        axes = [k for k, n in enumerate(shape) if n % 4 == 0 and len(shape) > 1]
        return put(shape, model.dtype, axes[0] if axes else None)

    params = jax.tree.map(leaf, model.params, is_leaf=lambda x: isinstance(x, tuple))
    return measure_update(target, tx, params, model.loss, put(*model.batch(4 * tokens), 0), n=4, **kwargs)


@dataclasses.dataclass(frozen=True)
class Point:
    """Of the grid on which defaults are compared with the resident step: AdamW, 512 tokens per device."""

    n_layers: int
    width: int
    stacked: bool = False
    clip: bool = False
    update_params: bool = False
    devices: int = 1

    @property
    def state(self) -> float:
        """MiB on each device."""
        return 8 * self.n_layers * self.width**2 / self.devices / MIB

    def inner(self) -> optax.GradientTransformation:
        adamw = optax.adamw(1e-3)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw) if self.clip else adamw

    def measured(self, target: str, tx: optax.GradientTransformation) -> Measured:
        model = {"n_layers": self.n_layers, "width": self.width, "stacked": self.stacked}
        if self.devices == 1:
            return measure_step(target, tx, **model, update_params=self.update_params)
        spec = PartitionSpec(None, "data") if self.stacked else PartitionSpec("data")
        return measure_sharded(target, tx, spec, **model, n=self.devices, update_params=self.update_params)


def bounded(resident: float) -> float:
    """The peak, in MiB, that a default may have where the resident step has this one."""
    return resident + max(resident / 100, 1)


def device_sharding(target: str) -> NamedSharding:
    return NamedSharding(mesh_for(target), PartitionSpec(), memory_kind="device")
