"""The GPT of ``in_jax/gpt.py`` in PyTorch, with the same first parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.cases import MATRICES, STDDEV, Shape

EMBED, POSITIONS, BLOCKS = 0, 1, 2  # as in in_jax/gpt.py
PIECE = 1 << 22  # numbers hashed at a time: what they need on the way stays small
MASK = 0xFFFFFFFF


def uniform(places: Tensor, leaf: int) -> Tensor:
    """``gpt.hashed``, of these places: int64 whose lower 32 bits are the uint32 of JAX."""
    x = (places + leaf * 0x9E3779B9) & MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    x = x ^ (x >> 16)
    return ((x >> 8).float() * 2**-24 - 0.5) * (STDDEV * 12**0.5)


@torch.no_grad()
def fill(weight: Tensor, leaf: int, *, transposed: bool) -> None:
    """Writes the first values. ``transposed``: ``weight`` is (out, in), as in ``nn.Linear``; in JAX it is (in, out)."""
    rows, columns = weight.shape
    down, across = (1, rows) if transposed else (columns, 1)
    along = torch.arange(columns, device=weight.device) * across
    step = max(1, PIECE // columns)
    for first in range(0, rows, step):
        part = weight[first : first + step]
        places = torch.arange(first, first + len(part), device=weight.device)[:, None] * down + along
        part.copy_(uniform(places, leaf))


def norm(x: Tensor, scale: Tensor) -> Tensor:
    """RMSNorm, in float32."""
    return F.rms_norm(x.float(), scale.shape, scale.float(), eps=1e-6).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        for name, (r, c) in MATRICES.items():
            setattr(self, name, nn.Linear(r * shape.width, c * shape.width, bias=False))
        self.norm_attention = nn.Parameter(torch.empty(shape.width))
        self.norm_mlp = nn.Parameter(torch.empty(shape.width))

    def first_values(self, layer: int) -> None:
        for i, name in enumerate(MATRICES):
            fill(getattr(self, name).weight, BLOCKS + len(MATRICES) * layer + i, transposed=True)
        nn.init.ones_(self.norm_attention)
        nn.init.ones_(self.norm_mlp)

    def body(self, x: Tensor) -> Tensor:
        qkv = self.qkv(norm(x, self.norm_attention)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))  # batch, heads, context, width of a head
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(norm(x, self.norm_mlp)), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)


class GPT(nn.Module):
    """Computes in autocast's type, or without autocast in that of the parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(shape.vocab, shape.width))
        self.positions = nn.Parameter(torch.empty(shape.context, shape.width))
        self.norm = nn.Parameter(torch.empty(shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))

    def first_values(self) -> None:
        """Of the parameters that are not a block's."""
        fill(self.embed, EMBED, transposed=False)
        fill(self.positions, POSITIONS, transposed=False)
        nn.init.ones_(self.norm)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of int64[batch, context + 1]. One sequence's logits exist at a time."""
        kind = tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.embed.dtype
        embed = self.embed.to(dtype)
        x = F.embedding(tokens[:, :-1], embed) + self.positions.to(dtype)
        for block in self.blocks:
            x = block(x)

        def nats(x: Tensor, targets: Tensor) -> Tensor:
            logits = F.linear(norm(x, self.norm), embed)
            return F.cross_entropy(logits.float(), targets, reduction="sum")

        sequences = zip(x, tokens[:, 1:], strict=True)
        each = [checkpoint(nats, *s, use_reentrant=False, preserve_rng_state=False) for s in sequences]
        return torch.stack(each).sum() / tokens[:, 1:].numel()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens)


def build(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    wrap: Callable[[nn.Module], object] = lambda module: None,
) -> GPT:
    """The model with its first values. ``wrap`` sees each block when it has its own, before the next, and the model."""
    with torch.device("meta"):
        model = GPT(shape).to(dtype)
    for layer, block in enumerate(model.blocks):
        block.to_empty(device=device).first_values(layer)
        wrap(block)
    model.to_empty(device=device, recurse=False).first_values()
    wrap(model)
    return model
