"""A GPT in plain JAX, scanned or unrolled."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

EMBED, POSITIONS, BLOCKS = 0, 1, 2  # numbers of the leaves, from which their first values are hashed
MATRICES = {"qkv": (1, 3), "attention": (1, 1), "up": (1, 4), "down": (4, 1)}  # rows, columns in widths of the model
STDDEV = 0.02


class Shape(NamedTuple):
    """A GPT: pre-norm blocks, tied embeddings, matrices without biases."""

    layers: int
    width: int
    heads: int
    vocab: int = 50304
    context: int = 2048


def hashed(rows: int, columns: int, leaf: jax.Array | int) -> jax.Array:
    """float32[rows, columns], uniform with standard deviation 0.02: murmur3's finalizer of each number's place."""
    x = jax.lax.iota(jnp.uint32, rows * columns) + jnp.uint32(leaf) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    x = x ^ (x >> 16)
    unit = (x >> 8).astype(jnp.float32) * jnp.float32(2**-24) - 0.5  # exact
    return (unit * jnp.float32(STDDEV * 12**0.5)).reshape(rows, columns)


def block(shape: Shape, layer: jax.Array | int) -> Any:
    d = shape.width
    first = jnp.uint32(BLOCKS) + jnp.uint32(len(MATRICES)) * jnp.uint32(layer)
    matrices = {name: hashed(r * d, c * d, first + i) for i, (name, (r, c)) in enumerate(MATRICES.items())}
    return matrices | {"norm_attention": jnp.ones(d), "norm_mlp": jnp.ones(d)}


def init(shape: Shape, scans: int) -> Any:
    """The parameters, float32; the blocks stacked in ``scans`` groups, or one by one."""
    if scans and shape.layers % scans:
        raise ValueError(f"scans: {shape.layers} layers do not make {scans} equal groups.")
    params = {
        "embed": hashed(shape.vocab, shape.width, EMBED),
        "positions": hashed(shape.context, shape.width, POSITIONS),
        "norm": jnp.ones(shape.width),
    }
    if not scans:
        return params | {f"block_{i:03d}": block(shape, i) for i in range(shape.layers)}
    groups = jnp.arange(shape.layers).reshape(scans, -1)
    return params | {f"blocks_{i:03d}": jax.lax.map(partial(block, shape), group) for i, group in enumerate(groups)}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def attend(implementation: str | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, [batch, context, heads, size]."""
    attention = partial(jax.nn.dot_product_attention, is_causal=True)
    if implementation == "cudnn":
        return attention(q, k, v, implementation="cudnn")
    # XLA's own keeps every score for the backward pass: so a sequence at a time, and its scores twice.
    return jax.lax.map(jax.checkpoint(lambda one: attention(*one)), (q, k, v))


def apply_block(heads: int, attention: str | None, x: jax.Array, p: Any) -> jax.Array:
    w = {name: p[name].astype(x.dtype) for name in MATRICES}
    y = (norm(x, p["norm_attention"]) @ w["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    y = attend(attention, *(y[:, :, i] for i in range(3)))
    x = x + y.reshape(x.shape) @ w["attention"]
    return x + jax.nn.gelu(norm(x, p["norm_mlp"]) @ w["up"]) @ w["down"]


def loss(shape: Shape, attention: str | None, dtype: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of ``tokens``, int32[batch, context + 1]; matrices and activations in ``dtype``.

    Only the input of each block is kept for the backward pass, and the logits of one sequence exist at a time.
    """
    embed = params["embed"].astype(dtype)
    x = embed[tokens[:, :-1]] + params["positions"].astype(dtype)
    body = jax.checkpoint(partial(apply_block, shape.heads, attention))
    for name in sorted(name for name in params if name.startswith("block")):
        if name.startswith("blocks"):
            x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, params[name])
        else:
            x = body(x, params[name])

    @jax.checkpoint
    def nats(sequence: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = sequence
        logits = (norm(x, params["norm"]) @ embed.T).astype(jnp.float32)
        at_target = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=1) - at_target).sum()

    return jax.lax.map(nats, (x, tokens[:, 1:])).sum() / (tokens.shape[0] * shape.context)
