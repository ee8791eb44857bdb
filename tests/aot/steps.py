"""Steps of several models, with abstract arguments, for compiled tests and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from jax_offload._step.rewritten import rewritten as whole
from tests.aot.cases import device_sharding
from tests.aot.harness import H200, Measured, measure, mesh_for
from tests.aot.model import ADAMW, CLIPPED, loss, parameters, step_of

TURNED: dict[str, Literal["device", "host"]] = {"jo.pipelined": "device", "gradients too": "host"}


@dataclasses.dataclass(frozen=True)
class Model:
    """A step and its abstract arguments: parameters, state, batch; the first two are donated."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    tokens: int
    ways: tuple[str, ...] = ("jax.jit", "jo.jit")
    devices: int = 1
    chip: str = H200

    def compiled(self, way: str) -> Measured:
        options = jo.compiler_options("cuda" if self.chip == H200 else "tpu")
        if way in TURNED:
            turned = jo.pipelined(self.step, donate_argnames=("params", "state"), gradients=TURNED[way])
            it, args, _ = turned.turned(*self.args)
            return measure(self.chip, it.whole_step, args, (0, 1), None, options)
        out = jax.tree.map(lambda a: a.sharding, self.args[:2])
        returned = jax.eval_shape(self.step, *self.args)
        out = (*out, *([device_sharding(self.chip)] * (len(returned) - 2)))
        step = whole(self.step) if way == "jo.jit" else self.step
        return measure(self.chip, step, self.args, (0, 1), out, options, self.devices)


def toys() -> Iterator[Model]:
    """The rows of docs/peaks.md, and its times at 16,384 tokens."""
    for stacked in True, False:
        for inner, tokens in (ADAMW, 512), (CLIPPED, 512), (ADAMW, 16384), (CLIPPED, 16384):
            params = parameters(24, 4096, stacked, device_sharding(H200))
            name = f"24×4096², {'stacked' if stacked else 'unrolled'}{', clipped' if inner is CLIPPED else ''}"
            yield _model(name, jo.offload(inner), params, loss, _batch((tokens, 4096)), tokens)
    params = parameters(24, 4096, True, device_sharding(H200))
    outside = optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW))
    yield _model("24×4096², stacked, clipped outside", outside, params, loss, _batch((512, 4096)), 512)


def sharded(layers: int = 24, width: int = 4096, tokens: int = 512) -> Iterator[Model]:
    """On four devices, so many tokens on each: parameters divided (FSDP), and the state alone (ZeRO-1)."""
    mesh = mesh_for(H200, (4,), ("data",))

    def placed(*spec: str | None) -> Any:
        return NamedSharding(mesh, PartitionSpec(*spec), memory_kind="device")

    for name, stacked, spec, over in (
        ("FSDP, stacked", True, (None, "data"), None),
        ("FSDP, unrolled", False, ("data",), None),
        ("ZeRO-1, stacked", True, (), "data"),
        ("ZeRO-1, unrolled", False, (), "data"),
        ("replicated, stacked", True, (), None),
    ):
        params, tx = parameters(layers, width, stacked, placed(*spec)), jo.offload(ADAMW, shard_over=over)
        x = jax.ShapeDtypeStruct((4 * tokens, width), jnp.float32, sharding=placed("data"))
        step = step_of(tx, loss, update_params=True)
        args = params, jo.abstract_state(tx, params), x
        yield Model(f"4 devices, {layers}×{width}², {name}", step, args, 4 * tokens, devices=4)


def mixture(layers: int = 12, width: int = 2048, experts: int = 8, tokens: int = 4096, capacity: int = 1024) -> Model:
    """Two of eight experts for each token, with a capacity, dispatched by one-hot matmuls; bfloat16 arithmetic."""
    params = {
        "router": _leaf((layers, width, experts)),
        "up": _leaf((layers, experts, width, 2 * width)),
        "down": _leaf((layers, experts, 2 * width, width)),
        "attention": _leaf((layers, width, width)),
    }

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
        x = x + jnp.tanh(x @ w["attention"])
        gates, chosen = jax.lax.top_k(jax.nn.softmax((x @ w["router"]).astype(jnp.float32)), 2)
        one = jax.nn.one_hot(chosen, experts).sum(1)
        place = jax.nn.one_hot(((jnp.cumsum(one, 0) - 1) * one).astype(jnp.int32), capacity, dtype=jnp.bfloat16)
        route = one[..., None].astype(jnp.bfloat16) * place
        inside = jnp.einsum("tec,td->ecd", route, x)
        outcome = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inside, w["up"])), w["down"])
        weight = (jax.nn.one_hot(chosen, experts) * gates[..., None]).sum(1).astype(jnp.bfloat16)
        return x + jnp.einsum("tec,te,ecd->td", route, weight, outcome)

    def of_tokens(params: Any, x: Any) -> Any:
        out, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x.astype(jnp.bfloat16), params)
        return (out.astype(jnp.float32) ** 2).mean()

    return _model("mixture of 8 experts", jo.offload(ADAMW), params, of_tokens, _batch((tokens, width)), tokens)


def vit(
    said: str = "", tx: Any = None, layers: int = 32, width: int = 1280, heads: int = 16, images: int = 64
) -> Model:
    """ViT-H/14 at 224: 256 patches, pre-norm blocks, nothing rematerialised but the blocks; bfloat16 arithmetic."""
    patches = 256
    params = {
        "patch": _leaf((14 * 14 * 3, width)),
        "places": _leaf((patches, width)),
        "blocks": {
            "qkv": _leaf((layers, width, 3 * width)),
            "out": _leaf((layers, width, width)),
            "up": _leaf((layers, width, 4 * width)),
            "down": _leaf((layers, 4 * width, width)),
            "scale": _leaf((layers, 2, width)),
        },
        "head": _leaf((width, 1000)),
    }

    def norm(x: Any, scale: Any) -> Any:
        x = x.astype(jnp.float32)
        return ((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale).astype(
            jnp.bfloat16
        )

    @jax.checkpoint
    def block(x: Any, w: Any) -> Any:
        h = norm(x, w["scale"][0])
        q, k, v = jnp.split(h @ w["qkv"].astype(jnp.bfloat16), 3, -1)
        q, k, v = (a.reshape(images, patches, heads, -1) for a in (q, k, v))
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["out"].astype(jnp.bfloat16)
        h = jax.nn.gelu(norm(x, w["scale"][1]) @ w["up"].astype(jnp.bfloat16))
        return x + h @ w["down"].astype(jnp.bfloat16)

    def of_images(params: Any, batch: Any) -> Any:
        pixels, labels = batch
        x = pixels.astype(jnp.bfloat16) @ params["patch"].astype(jnp.bfloat16) + params["places"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["blocks"])
        logits = (x.mean(1) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    batch = _batch((images, patches, 14 * 14 * 3)), _batch((images,), jnp.int32)
    name = f"ViT-H/14, {said}" if said else "ViT-H/14"
    return _model(name, tx or jo.offload(ADAMW), params, of_images, batch, images * patches)


def _leaf(shape: tuple[int, ...]) -> Any:
    return _batch(shape)


def _batch(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=device_sharding(H200))


def _model(name: str, tx: Any, params: Any, of: Callable[..., Any], batch: Any, tokens: int) -> Model:
    return Model(name, step_of(tx, of), (params, jo.abstract_state(tx, params), batch), tokens)
