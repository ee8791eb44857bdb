"""A small GPT, whose blocks are stacked and scanned: 35 layers compile as fast as one."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

VOCAB = 256  # bytes

# layers, width, heads. Bytes need next to no embedding: the layers alone make the count in the name.
SIZES = {
    "test": (2, 64, 2),
    "tiny": (4, 128, 2),
    "10m": (6, 384, 6),
    "125m": (18, 768, 12),
    "350m": (28, 1024, 16),
    "1.3b": (26, 2048, 16),
    "2.7b": (34, 2560, 20),
    "7b": (35, 4096, 32),
}


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    context: int
    dtype: jnp.dtype = jnp.float32  # of activations; parameters and logits are float32


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, _):
        c = self.config

        def dense(name, features, stddev=0.02):
            init = nn.initializers.normal(stddev)
            return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=init, name=name)

        def norm(name):
            return nn.LayerNorm(use_bias=False, dtype=c.dtype, name=name)

        # What a block adds to the stream starts small, so that the stream does not grow with depth.
        out = 0.02 / (2 * c.layers) ** 0.5

        y = dense("qkv", 3 * c.width)(norm("norm_attention")(x)).reshape(*x.shape[:2], 3, c.heads, -1)
        y = jax.nn.dot_product_attention(*jnp.unstack(y, axis=2), is_causal=True)
        x += dense("attention", c.width, out)(y.reshape(x.shape))

        y = jnp.square(nn.relu(dense("up", 4 * c.width)(norm("norm_mlp")(x))))
        x += dense("down", c.width, out)(y)
        return x, None


class GPT(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, (c.context, c.width))
        embed = nn.Embed(VOCAB, c.width, embedding_init=init, name="embed")
        x = (embed(tokens) + positions[: tokens.shape[1]]).astype(c.dtype)
        # Only each block's input is kept for the backward pass. scan already keeps XLA from merging the
        # recomputation with the forward pass, hence no prevent_cse.
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=c.layers,
        )
        x, _ = blocks(c, name="blocks")(x, None)
        x = nn.LayerNorm(use_bias=False, name="norm")(x)
        return nn.Dense(VOCAB, use_bias=False, kernel_init=init, name="head")(x)


def generate(params, apply_fn, prompt: bytes, key, context, length=400, temperature=0.7) -> str:
    """Continue the prompt to ``length`` bytes, with a whole forward pass for each: short to write, slow to run."""

    @jax.jit
    def sample(params, tokens):
        def body(i, tokens):
            # What the window holds from position i on is masked by causality.
            window = jax.lax.dynamic_slice(tokens, [jnp.maximum(i - context, 0)], [context])
            logits = apply_fn({"params": params}, window[None])[0, jnp.minimum(i, context) - 1]
            byte = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
            return tokens.at[i].set(byte)

        return jax.lax.fori_loop(len(prompt), length, body, tokens)

    tokens = jnp.zeros(max(length, context), jnp.int32).at[: len(prompt)].set(jnp.array(list(prompt)))
    return bytes(sample(params, tokens)[:length].tolist()).decode(errors="replace")
