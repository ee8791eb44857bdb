"""Three models chosen when the rules of the estimate were done, unlike those that they were made on.

A state-space model with a scan over time inside of the scan over layers; a U-Net, unrolled, of convolutions; an encoder
and a decoder, each a scan, with tied embeddings and masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from tests.aot.cases import device_sharding
from tests.aot.forecasts import Model
from tests.aot.harness import H200
from tests.aot.model import ADAMW, step_of


def leaf(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=device_sharding(H200))


def model(name: str, tx: Any, params: Any, of: Any, batch: Any, tokens: int) -> Model:
    step = step_of(tx, of, update_params=True)
    return Model(name, step, (params, jo.abstract_state(tx, params), batch), tokens)


def state_space(layers: int = 24, width: int = 2048, inner: int = 4096, states: int = 16, tokens: int = 2048) -> Model:
    """Mamba-like: projections in and out, a causal convolution, and a selective scan over time in chunks of 128."""
    params = {
        "in": leaf((layers, width, 2 * inner)),
        "conv": leaf((layers, 4, inner)),
        "select": leaf((layers, inner, 2 * states + 64)),
        "rate": leaf((layers, 64, inner)),
        "decay": leaf((layers, inner, states)),
        "skip": leaf((layers, inner)),
        "out": leaf((layers, inner, width)),
        "norm": leaf((layers, width)),
    }
    sequences = 8

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        h = (x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
        h, gate = jnp.split((h * w["norm"].astype(jnp.bfloat16)) @ w["in"].astype(jnp.bfloat16), 2, -1)
        padded = jnp.pad(h, ((0, 0), (3, 0), (0, 0)))
        h = jax.nn.silu(sum(padded[:, k : k + h.shape[1]] * w["conv"][k].astype(jnp.bfloat16) for k in range(4)))
        selected = h @ w["select"].astype(jnp.bfloat16)
        into, out, low = selected[..., :states], selected[..., states : 2 * states], selected[..., 2 * states :]
        rate = jax.nn.softplus(low @ w["rate"].astype(jnp.bfloat16)).astype(jnp.float32)

        @jax.checkpoint
        def chunk(s: Any, given: Any) -> Any:
            def at(s: Any, given: Any) -> Any:
                h, rate, into, out = given
                decay = jnp.exp(-rate[..., None] * jnp.exp(w["decay"]))
                s = decay * s + (rate * h)[..., None] * into[:, None, :]
                return s, (s * out[:, None, :]).sum(-1)

            return jax.lax.scan(at, s, given)

        by_time = jax.tree.map(
            lambda a: a.swapaxes(0, 1).reshape(-1, 128, a.shape[0], a.shape[2]), (h, rate, into, out)
        )
        start = jnp.zeros((sequences, inner, states), jnp.float32)
        _, y = jax.lax.scan(chunk, start, by_time)
        y = y.reshape(-1, sequences, inner).swapaxes(0, 1).astype(jnp.bfloat16) + h * w["skip"].astype(jnp.bfloat16)
        return x + (y * jax.nn.silu(gate)) @ w["out"].astype(jnp.bfloat16)

    def of(params: Any, x: Any) -> Any:
        out, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x.astype(jnp.bfloat16), params)
        return (out.astype(jnp.float32) ** 2).mean()

    batch = leaf((sequences, tokens // sequences, width))
    return model("state-space model", jo.offload(ADAMW), params, of, batch, tokens)


def unet(width: int = 320, images: int = 16, side: int = 64) -> Model:
    """Of a diffusion model: two residual blocks of convolutions at each of four sizes, skips across, unrolled."""
    widths, params = [width, 2 * width, 4 * width, 4 * width], {}
    down = [(widths[max(k - 1, 0)] if j == 0 else w, w) for k, w in enumerate(widths) for j in range(2)]
    for k, (a, b) in enumerate(down):
        params[f"down{k}"] = {"a": leaf((3, 3, a, b)), "b": leaf((3, 3, b, b)), "skip": leaf((1, 1, a, b))}
    for k, (a, b) in enumerate(reversed(down)):
        params[f"up{k}"] = {"a": leaf((3, 3, 2 * b, a)), "b": leaf((3, 3, a, a)), "skip": leaf((1, 1, 2 * b, a))}
    params["first"], params["last"] = leaf((3, 3, 4, width)), leaf((3, 3, width, 4))

    def conv(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w.astype(jnp.bfloat16), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x: Any) -> Any:
        y = x.astype(jnp.float32).reshape(*x.shape[:3], 32, -1)
        y = (y - y.mean((1, 2, 4), keepdims=True)) * jax.lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
        return y.reshape(x.shape).astype(jnp.bfloat16)

    def block(x: Any, w: Any) -> Any:
        h = conv(jax.nn.silu(norm(x)), w["a"])
        return conv(x, w["skip"]) + conv(jax.nn.silu(norm(h)), w["b"])

    def of(params: Any, x: Any) -> Any:
        h, kept = conv(x.astype(jnp.bfloat16), params["first"]), []
        for k in range(8):
            h = block(h, params[f"down{k}"])
            kept.append(h)
            if k % 2 and k < 7:
                h = h.reshape(h.shape[0], h.shape[1] // 2, 2, h.shape[2] // 2, 2, -1).mean((2, 4)).astype(jnp.bfloat16)
        for k in range(8):
            if k % 2 == 0 and k:
                h = jnp.repeat(jnp.repeat(h, 2, 1), 2, 2)
            h = block(jnp.concatenate([h, kept.pop()], -1), params[f"up{k}"])
        return ((conv(h, params["last"]).astype(jnp.float32) - x) ** 2).mean()

    batch = leaf((images, side, side, 4))
    return model("U-Net", jo.offload(ADAMW), params, of, batch, images * side * side)


def encoder_decoder(
    layers: int = 24, width: int = 1024, inner: int = 4096, words: int = 32128, tokens: int = 8192
) -> Model:
    """T5-like: bfloat16 parameters with float32 masters, one embedding for both sides and the head."""
    half = jnp.bfloat16

    def stack(*names: str) -> dict[str, Any]:
        shapes = {"up": (layers, width, inner), "down": (layers, inner, width), "norm": (layers, 3, width)}
        return {name: leaf(shapes.get(name, (layers, width, width)), half) for name in names}

    own = ("q", "k", "v", "o", "up", "down", "norm")
    params = {
        "embedding": leaf((words, width), half),
        "encoder": stack(*own),
        "decoder": stack(*own, "cross_q", "cross_k", "cross_v", "cross_o"),
    }
    sequences, heads = 16, 16

    def norm(x: Any, scale: Any) -> Any:
        return (x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6)).astype(half) * scale

    def attention(x: Any, y: Any, q: Any, k: Any, v: Any, o: Any, causal: bool) -> Any:
        parts = (a.reshape(*a.shape[:2], heads, -1) for a in (x @ q, y @ k, y @ v))
        return jax.nn.dot_product_attention(*parts, is_causal=causal).reshape(x.shape) @ o

    def feed(x: Any, w: Any) -> Any:
        return x + jax.nn.relu(norm(x, w["norm"][1]) @ w["up"]) @ w["down"]

    @jax.checkpoint
    def encode(x: Any, w: Any) -> Any:
        h = norm(x, w["norm"][0])
        return feed(x + attention(h, h, w["q"], w["k"], w["v"], w["o"], False), w)

    @jax.checkpoint
    def decode(x: Any, w: Any, encoded: Any) -> Any:
        h = norm(x, w["norm"][0])
        x = x + attention(h, h, w["q"], w["k"], w["v"], w["o"], True)
        h = norm(x, w["norm"][2])
        return feed(x + attention(h, encoded, w["cross_q"], w["cross_k"], w["cross_v"], w["cross_o"], False), w)

    def of(params: Any, batch: Any) -> Any:
        source, target = batch
        table = params["embedding"]
        encoded, _ = jax.lax.scan(lambda x, w: (encode(x, w), None), table[source], params["encoder"])
        x, _ = jax.lax.scan(lambda x, w: (decode(x, w, encoded), None), table[target], params["decoder"])
        logits = (x @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    batch = leaf((sequences, tokens // sequences), jnp.int32), leaf((sequences, tokens // sequences), jnp.int32)
    tx = jo.offload(jo.with_master_params(ADAMW))
    return model("encoder and decoder, masters", tx, params, of, batch, tokens)


def unseen() -> Iterator[Model]:
    yield state_space()
    yield unet()
    yield encoder_decoder()
