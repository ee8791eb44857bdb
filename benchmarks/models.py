"""Models that people know, compiled for an H200 and simulated: the table of results in the README.

    JAX_PLATFORMS=cpu python -m benchmarks.models [gpt-1.3b gpt-7b llama-8b vit-h moe] [--out FILE]

Each model is compiled three ways: with plain optax (resident), by the usual recipe (``device_put`` the state in,
update, ``device_put`` it out, under ``jax.jit``) and with ``jo.offload`` and ``jo.pipelined``. Gradients are clipped by
their global norm. Without names all models are compiled, in about half an hour on two cores; nothing runs on a GPU.
Results go to ``benchmarks/results/models.json`` after every program, and the table is printed at the end.

Needs ``pip install '.[aot]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import jax_offload as jo
from benchmarks.parts.recipe import usual_recipe

OUT = Path(__file__).parent / "results" / "models.json"
HALF, FULL = jnp.bfloat16, jnp.float32
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer whose blocks are stacked, scanned and rematerialized.

    Args:
      title: the name in the table.
      layers, width, heads, kv_heads, hidden: the shape of a block.
      words: the size of the vocabulary, or the number of classes.
      sequences, context: the batch, in sequences (or images) of tokens (or patches).
      gated: whether the feed-forward layer is SwiGLU, with three matrices.
      experts: the number of experts, of which each token takes two; 0 for a dense model.
      patch: the numbers in an image patch; 0 for a model of text.
      dtype: the parameters' dtype; with bfloat16 the state holds float32 master parameters.
    """

    title: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    words: int
    sequences: int
    context: int
    gated: bool = False
    experts: int = 0
    patch: int = 0
    dtype: Any = FULL

    @property
    def tokens(self) -> int:
        return self.sequences * self.context

    @property
    def inner(self) -> optax.GradientTransformation:
        return jo.with_master_params(CLIPPED) if self.dtype == HALF else CLIPPED

    def shapes(self) -> dict[str, Any]:
        rows = (self.layers, self.experts) if self.experts else (self.layers,)
        head_size = self.width // self.heads
        blocks = {
            "q": (self.layers, self.width, self.width),
            "kv": (self.layers, self.width, 2 * self.kv_heads * head_size),
            "out": (self.layers, self.width, self.width),
            "up": (*rows, self.width, self.hidden),
            "down": (*rows, self.hidden, self.width),
            "norms": (self.layers, 2, self.width),
        }
        if self.gated:
            blocks["gate"] = (*rows, self.width, self.hidden)
        if self.experts:
            blocks["router"] = (self.layers, self.width, self.experts)
        first = {"patches": (self.patch, self.width)} if self.patch else {"embed": (self.words, self.width)}
        return {**first, "blocks": blocks, "head": (self.width, self.words)}

    def loss(self, params: Any, batch: Any) -> Any:
        inputs, labels = batch
        x = inputs.astype(HALF) @ params["patches"].astype(HALF) if self.patch else params["embed"][inputs].astype(HALF)
        x, _ = jax.lax.scan(lambda x, w: (self.block(x, w), None), x, params["blocks"])
        x = x.mean(1) if self.patch else x
        logits = (x @ params["head"].astype(HALF)).astype(FULL)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def block(self, x: Any, w: Any) -> Any:
        return jax.checkpoint(self._block)(x, w)

    def _block(self, x: Any, w: Any) -> Any:
        w = jax.tree.map(lambda a: a.astype(HALF), w)
        split = (self.sequences, self.context, -1, self.width // self.heads)
        h = _norm(x, w["norms"][0])
        k, v = jnp.split(h @ w["kv"], 2, -1)
        q, k, v = (a.reshape(split) for a in (h @ w["q"], k, v))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=not self.patch).reshape(x.shape) @ w["out"]
        h = _norm(x, w["norms"][1])
        return x + (self._experts(h, w) if self.experts else _feed_forward(h, w))

    def _experts(self, h: Any, w: Any) -> Any:
        """Each token goes to two experts, each of which takes a quarter of the tokens at most."""
        flat = h.reshape(-1, self.width)
        capacity = 2 * len(flat) // self.experts
        gates, chosen = jax.lax.top_k(jax.nn.softmax((flat @ w["router"]).astype(FULL)), 2)
        one = jax.nn.one_hot(chosen, self.experts).sum(1)
        place = ((jnp.cumsum(one, 0) - 1) * one).astype(jnp.int32)
        route = one[..., None].astype(HALF) * jax.nn.one_hot(place, capacity, dtype=HALF)
        weight = (jax.nn.one_hot(chosen, self.experts) * gates[..., None]).sum(1).astype(HALF)
        made = jax.vmap(_feed_forward)(jnp.einsum("tec,td->ecd", route, flat), {k: w[k] for k in ("up", "down")})
        return jnp.einsum("tec,te,ecd->td", route, weight, made).reshape(h.shape)


def _norm(x: Any, scale: Any) -> Any:
    y = x.astype(FULL)
    return (y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5)).astype(HALF) * scale


def _feed_forward(h: Any, w: Any) -> Any:
    if "gate" in w:
        return (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return jax.nn.gelu(h @ w["up"]) @ w["down"]


MODELS = {
    "gpt-1.3b": Model("GPT 1.3B", 24, 2048, 16, 16, 8192, 50304, 8, 2048),
    "gpt-7b": Model("GPT 7B", 32, 4096, 32, 32, 16384, 50304, 8, 2048),
    "llama-8b": Model("Llama 8B, bfloat16, float32 masters", 32, 4096, 32, 8, 14336, 128256, 4, 4096, True, dtype=HALF),
    "vit-h": Model("ViT-H/14", 32, 1280, 16, 16, 5120, 1000, 64, 256, patch=588),
    "moe": Model("MoE 1.9B, 8 experts", 12, 2048, 16, 16, 4096, 32000, 8, 2048, experts=8),
}


def resident_step(model: Model) -> Callable[..., Any]:
    return _step(model, model.inner)


def recipe_step(model: Model) -> Callable[..., Any]:
    return _step(model, usual_recipe(model.inner))


def offloaded_step(model: Model) -> Callable[..., Any]:
    tx = jo.offload(model.inner)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(model.loss)(params, batch)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, value

    return jo.pipelined(step, donate_argnames=("params", "state"))


def _step(model: Model, tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


WAYS = {"resident": resident_step, "usual recipe": recipe_step, "jax_offload": offloaded_step}


def measured(model: Model, way: str) -> dict[str, Any]:
    at = SingleDeviceSharding(jax.devices("cpu")[0])

    def leaf(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

    params = jax.tree.map(lambda s: leaf(s, model.dtype), model.shapes(), is_leaf=lambda s: isinstance(s, tuple))
    rows = model.sequences, model.context
    images = leaf((*rows, model.patch), FULL), leaf(rows[:1], jnp.int32)
    batch = images if model.patch else (leaf(rows, jnp.int32), leaf(rows, jnp.int32))
    tx = jo.offload(model.inner, fraction=0) if way == "resident" else jo.offload(model.inner)
    seen = jo.inspect(WAYS[way](model), params, jo.abstract_state(tx, params), batch, target="h200")
    time = seen.timeline
    assert time is not None
    parameters = sum(x.size for x in jax.tree.leaves(params))
    return {
        "title": model.title, "tokens": model.tokens, "parameters": parameters, "way": way, "peak": seen.peak,
        "host": seen.host, "step": time.step, "exposed": time.exposed, "link": time.link,
    }  # fmt: skip


def table(results: dict[str, Any]) -> list[str]:
    lines = [
        f"| {{}} | tokens | {' | '.join(f'{way}, GiB' for way in WAYS)} | {' | '.join(f'{way}, s' for way in WAYS)} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines[0] = lines[0].format("model")
    for name, model in MODELS.items():
        if all(f"{name} {way}" in results for way in WAYS):
            rows = [results[f"{name} {way}"] for way in WAYS]
            peaks = " | ".join(f"{row['peak'] / 2**30:.1f}" for row in rows)
            times = " | ".join(f"{row['step']:.2f}" for row in rows)
            lines.append(f"| {model.title} | {model.tokens:,} | {peaks} | {times} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.models or MODELS:
        for way in WAYS:
            results[f"{name} {way}"] = measured(MODELS[name], way) | {"jax": jax.__version__}
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
