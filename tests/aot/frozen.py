"""Three models chosen when all rules of the estimate were frozen, of peaks and of time.

A Llama of grouped queries, rotated, with masters; a diffusion transformer whose layers are modulated by what they are
conditioned on; a language model of LSTM layers, whose scan over time is inside of the one over layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from tests.aot.forecasts import Model
from tests.aot.model import ADAMW
from tests.aot.unseen import leaf, model

HALF = jnp.bfloat16


def llama(
    layers: int = 22, width: int = 2048, heads: int = 32, groups: int = 4, inner: int = 5632, words: int = 32000,
    sequences: int = 4, context: int = 2048,
) -> Model:  # fmt: skip
    """TinyLlama's shape: RMSNorm, SwiGLU, a head of its own; bfloat16 parameters with float32 masters."""
    size = width // heads
    params = {
        "embed": leaf((words, width), HALF),
        "head": leaf((width, words), HALF),
        "norm": leaf((width,), HALF),
        "layers": {
            "q": leaf((layers, width, width), HALF),
            "k": leaf((layers, width, groups * size), HALF),
            "v": leaf((layers, width, groups * size), HALF),
            "o": leaf((layers, width, width), HALF),
            "gate": leaf((layers, width, inner), HALF),
            "up": leaf((layers, width, inner), HALF),
            "down": leaf((layers, inner, width), HALF),
            "norm_1": leaf((layers, width), HALF),
            "norm_2": leaf((layers, width), HALF),
        },
    }

    def norm(x: Any, scale: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5)).astype(HALF) * scale

    def rotated(x: Any, angles: Any) -> Any:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(HALF)

    def of(params: Any, tokens: Any) -> Any:
        rates = 10000.0 ** -(jnp.arange(size // 2) / (size // 2))
        angles = jnp.arange(context)[:, None] * rates

        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            h = norm(x, w["norm_1"])
            q, k, v = ((h @ w[name]).reshape(sequences, context, -1, size) for name in "qkv")
            y = jax.nn.dot_product_attention(rotated(q, angles), rotated(k, angles), v, is_causal=True)
            x = x + y.reshape(x.shape) @ w["o"]
            h = norm(x, w["norm_2"])
            return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]

        x = params["embed"][tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        logits = (norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    batch = leaf((sequences, context + 1), jnp.int32)
    tx = jo.offload(jo.with_master_params(ADAMW))
    return model("Llama 1.1B, masters", tx, params, of, batch, sequences * context)


def dit(layers: int = 28, width: int = 1152, heads: int = 16, images: int = 64) -> Model:
    """DiT-XL/2 on latents of 32×32×4: 256 patches; float32 parameters, bfloat16 arithmetic."""
    patches, pixels, waves = 256, 16, 256

    def stack(*shape: int) -> Any:
        return leaf((layers, *shape))

    params = {
        "patch": leaf((pixels, width)),
        "places": leaf((patches, width)),
        "time_1": leaf((waves, width)),
        "time_2": leaf((width, width)),
        "labels": leaf((1001, width)),
        "blocks": {
            "modulate": stack(width, 6 * width), "modulate_bias": stack(6 * width),
            "qkv": stack(width, 3 * width), "qkv_bias": stack(3 * width),
            "out": stack(width, width), "out_bias": stack(width),
            "up": stack(width, 4 * width), "up_bias": stack(4 * width),
            "down": stack(4 * width, width), "down_bias": stack(width),
        },
        "last_modulate": leaf((width, 2 * width)),
        "last": leaf((width, pixels)),
    }  # fmt: skip

    def half(tree: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(HALF), tree)

    def modulated(x: Any, shift: Any, scale: Any) -> Any:
        y = x.astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        return y.astype(HALF) * (1 + scale[:, None]) + shift[:, None]

    def of(params: Any, batch: Any) -> Any:
        latents, times, labels, noise = batch
        rates = jnp.exp(-jnp.log(10000.0) * jnp.arange(waves // 2) / (waves // 2))
        angles = times[:, None] * rates
        condition = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(HALF)
        outer = half({name: x for name, x in params.items() if name != "blocks"})
        condition = jax.nn.silu(jax.nn.silu(condition @ outer["time_1"]) @ outer["time_2"] + outer["labels"][labels])

        @jax.checkpoint
        def block(x: Any, w: Any) -> Any:
            w = half(w)
            parts = jnp.split(condition @ w["modulate"] + w["modulate_bias"], 6, -1)
            h = modulated(x, parts[0], parts[1]) @ w["qkv"] + w["qkv_bias"]
            q, k, v = (a.reshape(images, patches, heads, -1) for a in jnp.split(h, 3, -1))
            y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["out"] + w["out_bias"]
            x = x + parts[2][:, None] * y
            h = jax.nn.gelu(modulated(x, parts[3], parts[4]) @ w["up"] + w["up_bias"])
            return x + parts[5][:, None] * (h @ w["down"] + w["down_bias"])

        x = latents.astype(HALF) @ outer["patch"] + outer["places"]
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["blocks"])
        x = modulated(x, *jnp.split(condition @ outer["last_modulate"], 2, -1)) @ outer["last"]
        return ((x.astype(jnp.float32) - noise) ** 2).mean()

    images_of = leaf((images, patches, pixels))
    batch = images_of, leaf((images,)), leaf((images,), jnp.int32), images_of
    return model("DiT-XL/2", jo.offload(ADAMW), params, of, batch, images * patches)


def lstm(layers: int = 8, width: int = 2048, words: int = 32000, sequences: int = 64, context: int = 128) -> Model:
    """Stacked LSTMs over time, each beside its residual; float32 parameters and cells, bfloat16 arithmetic."""
    params = {
        "embed": leaf((words, width)),
        "layers": {
            "input": leaf((layers, width, 4 * width)),
            "recurrent": leaf((layers, width, 4 * width)),
            "bias": leaf((layers, 4 * width)),
        },
    }

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        given, recurrent = x @ w["input"].astype(HALF) + w["bias"].astype(HALF), w["recurrent"].astype(HALF)

        def at(carry: Any, given: Any) -> Any:
            cell, h = carry
            i, f, g, o = jnp.split((given + h @ recurrent).astype(jnp.float32), 4, -1)
            cell = jax.nn.sigmoid(f + 1) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = (jax.nn.sigmoid(o) * jnp.tanh(cell)).astype(HALF)
            return (cell, h), h

        start = jnp.zeros((sequences, width), jnp.float32), jnp.zeros((sequences, width), HALF)
        return x + jax.lax.scan(at, start, given)[1]

    def of(params: Any, tokens: Any) -> Any:
        table = params["embed"].astype(HALF)
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), table[tokens[:-1]], params["layers"])
        logits = (x @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    batch = leaf((context + 1, sequences), jnp.int32)
    return model("LSTM, 8 layers", jo.offload(ADAMW), params, of, batch, sequences * context)


def frozen() -> Iterator[Model]:
    yield llama()
    yield dit()
    yield lstm()
