"""Models as people unroll them, for peaks: leaves of many sizes, biases and norms. Abstract, nothing is allocated.

Each returns the shapes of its parameters, a function that gives the shape and dtype of a batch of so many tokens, and
the loss. The inputs of matmuls are kept for the backward pass unless they are checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CONTEXT = 2048  # tokens in a sequence
PATCHES = 256  # tokens in an image
VOCAB = 32000
DTYPE = jnp.bfloat16

Params = dict[str, Any]


Model = tuple[Any, Callable[[int], tuple[tuple[int, ...], Any]], Callable[[Any, jax.Array], jax.Array]]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return (y * scale + bias).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, mapped: bool = True) -> jax.Array:
    """Scores are made twice, ``mapped`` a sequence at a time: [batch, context, heads, size]."""
    one = jax.checkpoint(lambda qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal))
    return jax.lax.map(one, (q, k, v)) if mapped else one((q, k, v))


def nats(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy, the logits of one sequence at a time."""

    @jax.checkpoint
    def of_one(it: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = (it[0] @ head).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, it[1][:, None], 1)[:, 0]).mean()

    return jax.lax.map(of_one, (x, targets)).mean()


def gpt(layers: int = 6, width: int = 2048, heads: int = 16, kv_heads: int = 4) -> Model:
    """Grouped queries, gated MLPs, an embedding apart from the head, checkpointed blocks."""
    size, hidden = width // heads, 11 * width // 4
    block = {
        "norm_1": (width,), "q": (width, width), "k": (width, kv_heads * size), "v": (width, kv_heads * size),
        "o": (width, width), "norm_2": (width,), "gate": (width, hidden), "up": (width, hidden),
        "down": (hidden, width),
    }  # fmt: skip
    params = {f"block_{i}": block for i in range(layers)}
    params |= {"embed": (VOCAB, width), "head": (width, VOCAB), "norm": (width,)}

    def apply(x: jax.Array, p: Params) -> jax.Array:
        y = norm(x, p["norm_1"])
        q, k, v = ((y @ p[n]).reshape(*x.shape[:2], -1, size) for n in "qkv")
        x = x + attend(q, k, v, True).reshape(x.shape) @ p["o"]
        y = norm(x, p["norm_2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        for i in range(layers):
            x = jax.checkpoint(apply)(x, params[f"block_{i}"])
        return nats(norm(x, params["norm"]), params["head"], tokens[:, 1:])

    return params, lambda tokens: ((tokens // CONTEXT, CONTEXT + 1), jnp.int32), loss


def vit(layers: int = 8, width: int = 1024, *, checkpoint: bool = False, mapped: bool = True) -> Model:
    """Biases everywhere.

    ``mapped``: attention takes one image at a time, which gathers images that are divided between devices.
    """
    size = 64
    qkv = {n: (width, width) for n in "qkv"} | {f"{n}_bias": (width,) for n in "qkv"}
    block = qkv | {
        "o": (width, width), "o_bias": (width,), "up": (width, 4 * width), "up_bias": (4 * width,),
        "down": (4 * width, width), "down_bias": (width,), "norm_1": (2, width), "norm_2": (2, width),
    }  # fmt: skip
    params = {f"block_{i}": block for i in range(layers)}
    params |= {"patches": (768, width), "positions": (PATCHES, width), "norm": (2, width), "head": (width, 1000)}

    def apply(x: jax.Array, p: Params) -> jax.Array:
        y = layer_norm(x, *p["norm_1"])
        q, k, v = (y @ p[n] + p[f"{n}_bias"] for n in "qkv")
        q, k, v = (a.reshape(*x.shape[:2], -1, size) for a in (q, k, v))
        x = x + attend(q, k, v, False, mapped).reshape(x.shape) @ p["o"] + p["o_bias"]
        y = jax.nn.gelu(layer_norm(x, *p["norm_2"]) @ p["up"] + p["up_bias"])
        return x + y @ p["down"] + p["down_bias"]

    body = jax.checkpoint(apply) if checkpoint else apply

    def loss(params: Params, images: jax.Array) -> jax.Array:
        x = images @ params["patches"] + params["positions"]
        for i in range(layers):
            x = body(x, params[f"block_{i}"])
        logits = (layer_norm(x.mean(1), *params["norm"]) @ params["head"]).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()

    return params, lambda tokens: ((tokens // PATCHES, PATCHES, 768), DTYPE), loss


def convnet(stages: tuple[int, ...] = (2, 2, 2), width: int = 256) -> Model:
    """Bottleneck blocks as in a ResNet, with norms of channels; images of 224², one for every 128 tokens."""
    params: Params = {"stem": (7, 7, 3, width // 4), "stem_norm": (2, width // 4)}
    last, blocks = width // 4, list[tuple[str, int]]()
    for s, n in enumerate(stages):
        wide, thin = width << s, width << s >> 2
        for b in range(n):
            name = f"stage_{s}_{b}"
            params[name] = {
                "in": (1, 1, last, thin), "mid": (3, 3, thin, thin), "out": (1, 1, thin, wide),
                "norm_in": (2, thin), "norm_mid": (2, thin), "norm_out": (2, wide),
            } | ({"skip": (1, 1, last, wide)} if b == 0 else {})  # fmt: skip
            blocks.append((name, 2 if s and b == 0 else 1))
            last = wide
    params |= {"head": (last, 1000)}

    def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params: Params, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(layer_norm(conv(images, params["stem"], 4), *params["stem_norm"]))
        for name, stride in blocks:
            p = params[name]
            y = jax.nn.relu(layer_norm(conv(x, p["in"]), *p["norm_in"]))
            y = jax.nn.relu(layer_norm(conv(y, p["mid"], stride), *p["norm_mid"]))
            y = layer_norm(conv(y, p["out"]), *p["norm_out"])
            x = jax.nn.relu(y + (conv(x, p["skip"], stride) if "skip" in p else x))
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()

    return params, lambda tokens: ((tokens // 128, 224, 224, 3), DTYPE), loss


def mlp(layers: int = 8, width: int = 4096) -> Model:
    """A matrix, a bias and a norm in each layer."""
    block = {"w": (width, width), "bias": (width,), "norm": (2, width)}
    params = {f"layer_{i}": block for i in range(layers)}

    def loss(params: Params, x: jax.Array) -> jax.Array:
        for i in range(layers):
            p = params[f"layer_{i}"]
            x = x + jax.nn.gelu(layer_norm(x, *p["norm"]) @ p["w"] + p["bias"])
        return (x.astype(jnp.float32) ** 2).mean()

    return params, lambda tokens: ((tokens, width), DTYPE), loss
