"""Models that were chosen when time and peaks had become ranges, whose constants are the most that was seen before.

A Gemma: one head of keys and values for eight of queries, of 256 each, GeGLU eight times as wide as the model, logits
that are capped, the embedding used twice, scaled; the same clipped, for its turned steps. A ConvNeXt: depthwise
convolutions, a scan for each of four sizes. Gated layers in float32, for a TPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from tests.aot.forecasts import Model, on_chip
from tests.aot.harness import V5E
from tests.aot.model import ADAMW, CLIPPED
from tests.aot.unseen import leaf, model

HALF = jnp.bfloat16


def gemma(
    layers: int = 18, width: int = 2048, heads: int = 8, size: int = 256, inner: int = 16384, words: int = 32000,
    sequences: int = 4, context: int = 2048, said: str = "", tx: Any = None,
) -> Model:  # fmt: skip
    """Gemma 2B's shape with fewer words; float32 parameters, bfloat16 arithmetic."""

    def stack(*shape: int) -> Any:
        return leaf((layers, *shape))

    params = {
        "embed": leaf((words, width)),
        "norm": leaf((width,)),
        "layers": {
            "q": stack(width, heads * size), "kv": stack(width, 2 * size), "o": stack(heads * size, width),
            "gate": stack(width, inner), "up": stack(width, inner), "down": stack(inner, width),
            "norm_1": stack(width), "norm_2": stack(width),
        },
    }  # fmt: skip

    def norm(x: Any, scale: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)).astype(HALF)

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        h = norm(x, w["norm_1"])
        q = (h @ w["q"].astype(HALF)).reshape(sequences, context, heads, size)
        k, v = jnp.split((h @ w["kv"].astype(HALF)).reshape(sequences, context, 1, 2 * size), 2, -1)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(sequences, context, -1)
        x = x + y @ w["o"].astype(HALF)
        h = norm(x, w["norm_2"])
        gated = jax.nn.gelu(h @ w["gate"].astype(HALF)) * (h @ w["up"].astype(HALF))
        return x + gated @ w["down"].astype(HALF)

    def of(params: Any, tokens: Any) -> Any:
        table = params["embed"].astype(HALF)
        x = table[tokens[:, :-1]] * width**0.5
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x.astype(HALF), params["layers"])
        logits = 30 * jnp.tanh((norm(x, params["norm"]) @ table.T).astype(jnp.float32) / 30)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    batch = leaf((sequences, context + 1), jnp.int32)
    name = f"Gemma of 2.0B{said}"
    return model(name, tx or jo.offload(ADAMW), params, of, batch, sequences * context)


def convnext(
    widths: tuple[int, ...] = (256, 512, 1024, 2048), depths: tuple[int, ...] = (3, 3, 27, 3), images: int = 64
) -> Model:
    """ConvNeXt-XL at 224; float32 parameters, bfloat16 arithmetic."""
    params: dict[str, Any] = {"stem": leaf((4 * 4 * 3, widths[0])), "head": leaf((widths[-1], 1000))}
    for k, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        params[f"stage{k}"] = {
            "depthwise": leaf((depth, 7, 7, 1, width)), "up": leaf((depth, width, 4 * width)),
            "down": leaf((depth, 4 * width, width)), "norm": leaf((depth, 2, width)),
        }  # fmt: skip
        if k:
            params[f"down{k}"] = leaf((4 * widths[k - 1], width))

    @jax.checkpoint
    def block(x: Any, w: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, w["depthwise"].astype(HALF), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=x.shape[-1],
        ).astype(jnp.float32)  # fmt: skip
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        y = (y * w["norm"][0]).astype(HALF)
        return x + (jax.nn.gelu(y @ w["up"].astype(HALF)) @ w["down"].astype(HALF)) * w["norm"][1].astype(HALF)

    def halved(x: Any, by: int) -> Any:
        n, side, _, width = x.shape
        x = x.reshape(n, side // by, by, side // by, by, width).swapaxes(2, 3)
        return x.reshape(n, side // by, side // by, by * by * width)

    def of(params: Any, batch: Any) -> Any:
        pixels, labels = batch
        x = halved(pixels.astype(HALF), 4) @ params["stem"].astype(HALF)
        for k in range(len(widths)):
            x = halved(x, 2) @ params[f"down{k}"].astype(HALF) if k else x
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params[f"stage{k}"])
        logits = (x.mean((1, 2)) @ params["head"].astype(HALF)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    batch = leaf((images, 224, 224, 3)), leaf((images,), jnp.int32)
    return model("ConvNeXt-XL", jo.offload(ADAMW), params, of, batch, images * 56 * 56)


def gated(layers: int = 8, width: int = 2048, inner: int = 6144, tokens: int = 4096) -> Model:
    """Gated layers on a TPU, arithmetic in float32 too, and nothing rematerialised."""
    params = {
        "gate": leaf((layers, width, inner)), "up": leaf((layers, width, inner)), "down": leaf((layers, inner, width))
    }  # fmt: skip

    def layer(x: Any, w: Any) -> Any:
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def of(params: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2).mean()

    return on_chip(V5E, model(f"{layers} gated layers", jo.offload(ADAMW), params, of, leaf((tokens, width)), tokens))


def afterwards() -> Iterator[Model]:
    yield gemma()
    yield convnext()
    turned = gemma(said=", clipped", tx=jo.offload(CLIPPED))
    yield dataclasses.replace(turned, ways=("jo.pipelined", "gradients too"))
    yield gated()
