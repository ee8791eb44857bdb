"""Encode arrays in the number formats of a stored state, and decode them.

Encoding happens on the device. It is elementwise except for one maximum per block, so it fuses with the update and may
run in chunks. Three rules hold for every format:

- A number of the format comes back exactly, however often it is encoded: an untouched moment does not drift.
- Rounding is stochastic if a seed is given, so that increments of less than half a step are not lost: the second
  moment of Adam, with ``b2=0.999``, moves by 0.1 % at a time, and bfloat16 has steps of 0.4 %.
- Only zero becomes zero. A second moment that became zero would divide an update by ``eps`` alone (the "zero-point
  problem", Li et al. 2023, arXiv:2309.01507); one that is too large only makes a step small.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_offload._base.arrays import is_integer
from jax_offload._base.shardings import constrained, padded, shards_of, typed_sharding
from jax_offload._precision.elements import (
    INTEGERS,
    SCALED,
    from_code,
    magnitude,
    negative,
    or_nan,
    scale_of,
    to_bfloat16,
    to_code,
    to_float,
    with_sign,
)

BLOCK = 128
NAMES = ("float32", "bfloat16", *SCALED, *INTEGERS)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
_SHORT |= dict.fromkeys(("fp8", "f8", "float8", "fp8_e4m3", "e4m3", "float8_e4m3"), "float8_e4m3fn")
_SHORT |= dict.fromkeys(("fp8_e5m2", "e5m2"), "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Storage:
    """The format in which a leaf is stored: ``jo.offload(inner, storage={"mu": jo.Storage("int8", block=256)})``.

    Args:
      dtype: one of

        - ``"float32"``: unchanged.
        - ``"bfloat16"``: the range of float32, 8 bits of precision. 2 bytes per element.
        - ``"float16"``: 11 bits of precision. A power of two scales each block, because second moments do not fit the
          range (FP8-LM, Peng et al. 2023, arXiv:2310.18313). 2 bytes and the scale.
        - ``"float8_e4m3fn"``, ``"float8_e5m2"``: the same with 4 and 3 bits (FP8-LM; Micikevicius et al. 2022,
          arXiv:2209.05433). For the first moment. 1 byte and the scale.
        - ``"int8"``: the dynamic map of Dettmers et al. 2022 (8-bit optimizers, arXiv:2110.02861), with blocks scaled
          by their largest magnitude. It has seven ranges by factors of 8 instead of the paper's by factors of 10, so
          that every point is exact in binary, and both ends of each, so that a block's largest number is exact too. For
          the first moment. 1 byte and the scale.
        - ``"uint8"``: the unsigned map, of the square root, for second moments. A block with a negative number takes
          the map of ``"int8"``; the sign of its scale says so. 1 byte and the scale.
      block: the number of elements along the last axis that share a float32 scale. ``"float32"`` and ``"bfloat16"``
        have no scale.

    Leaves that would not become smaller, such as those with a last axis of 1, keep their dtype.

    Raises:
      ValueError: the dtype is not one of these, or the block is not positive.

    Example:
      >>> import optax, jax_offload as jo
      >>> jo.Storage("int8", block=256)
      Storage(dtype='int8', block=256)
      >>> tx = jo.offload(optax.adamw(1e-3), storage={"mu": jo.Storage("int8", block=256), "nu": "uint8"})
    """

    dtype: str
    block: int = BLOCK

    def __post_init__(self) -> None:
        try:
            name = self.dtype if self.dtype in NAMES else jnp.dtype(self.dtype).name
        except TypeError:
            name = ""
        if name not in NAMES:
            hint = _meant(self.dtype, name)
            raise ValueError(f"storage: expected one of {', '.join(NAMES)}; got {self.dtype!r}.{hint}")
        object.__setattr__(self, "dtype", name)
        if not is_integer(self.block) or self.block <= 0:
            raise ValueError(f"storage: block must be a number of elements > 0, an int; got {self.block!r}.")

    @property
    def itemsize(self) -> int:
        """Bytes of one element, without the scale."""
        return jnp.dtype(self.dtype).itemsize


def _meant(given: Any, dtype: str) -> str:
    """Suggest the format that was probably meant; empty for the name of another dtype, or if none is near."""
    name = dtype or str(given).lower().removeprefix("torch.")
    near = [_SHORT[name]] if name in _SHORT else difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
    return f" Did you mean {near[0]!r}?" if near and (name in _SHORT or not dtype) else ""


def encode(x: jax.Array, storage: Storage, seed: Any = None) -> tuple[jax.Array, jax.Array | None]:
    """Encode ``x`` as values in the format's dtype and a float32 scale for each block, of shape ``(..., blocks)``.

    Args:
      x: of shape ``(..., n)`` and any floating dtype.
      storage: the format. bfloat16 has no scale.
      seed: a uint32 that, with the place in ``x``, decides the rounding; ``None`` rounds to nearest.

    NaN stays NaN. Infinity stays, or becomes NaN in formats without it. In the two 8-bit integers, which have neither,
    the whole block becomes NaN.
    """
    x = x.astype(jnp.float32)
    if storage.dtype == "float32":
        return x, None
    if storage.dtype == "bfloat16":
        return to_bfloat16(x, *_places(x, seed), strides=_strides(x)), None
    blocks = _in_blocks(x, storage.block)
    scale = jnp.max(magnitude(blocks, dtype=storage.dtype), axis=-1)
    if storage.dtype in SCALED:
        scale = scale_of(scale, dtype=storage.dtype)
    elif storage.dtype == "uint8":
        scale = with_sign(scale, jnp.max(negative(blocks), axis=-1))
    values = (to_float if storage.dtype in SCALED else to_code)(
        *(x, _per_element(scale, x, storage.block), *_places(x, seed)),
        dtype=storage.dtype,
        strides=_strides(x),
    )
    return values, scale if storage.dtype in SCALED else or_nan(scale)


def decode(values: jax.Array, scale: jax.Array | None, storage: Storage) -> jax.Array:
    """Decode what ``encode`` returns to float32."""
    if scale is None:
        return values.astype(jnp.float32)
    wide = _per_element(scale, values, storage.block)
    if storage.dtype in SCALED:
        return values.astype(jnp.float32) * wide
    return from_code(values, wide, dtype=storage.dtype)


@functools.lru_cache(1024)
def encoded_shapes(shape: tuple[int, ...], storage: Storage) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shapes of the values and the scales that ``encode`` returns."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    values, scale = jax.eval_shape(lambda x: encode(x, storage), x)
    return values.shape, None if scale is None else scale.shape


def _strides(x: jax.Array) -> tuple[int, ...]:
    return tuple(math.prod(x.shape[axis + 1 :]) % 2**32 for axis in range(x.ndim))


def _places(x: jax.Array, seed: Any) -> list[jax.Array]:
    """Return the seed and the index along each axis for every element of ``x``; an empty list without a seed."""
    if seed is None:
        return []
    sharding = typed_sharding(jax.typeof(x))
    seeds = lax.broadcast_in_dim(seed, x.shape, (), out_sharding=sharding)
    return [seeds, *(lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding) for axis in range(x.ndim))]


def _per_element(scale: jax.Array, x: jax.Array, block: int) -> jax.Array:
    """Return the scale of its block for every element of ``x``."""
    return _as_rows(jnp.broadcast_to(scale[..., None], (*scale.shape, min(block, x.shape[-1]))), x)


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """Reshape ``(..., n)`` to ``(..., blocks, block)``, with the last block filled with zeros."""
    block = min(block, x.shape[-1])
    rest = -x.shape[-1] % block
    shape = (*x.shape[:-1], (x.shape[-1] + rest) // block, block)
    typed = typed_sharding(jax.typeof(x))
    if typed is not None:  # Explicit axes need the spec; a device holds whole blocks, or all of them
        spec = padded(typed.spec, x.ndim)
        last = spec[-1] if not rest and shape[-2] % shards_of(typed, x.shape)[-1] == 0 else None
        x = constrained(x, typed.update(spec=PartitionSpec(*spec[:-1], last)))
        typed = typed.update(spec=PartitionSpec(*spec[:-1], last, None))
    if rest:
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, rest, 0)])
    return lax.reshape(x, shape, out_sharding=typed)


def _as_rows(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Reshape ``(..., blocks, block)`` to the shape of ``like``."""
    typed = typed_sharding(jax.typeof(blocks))
    if typed is not None:
        typed = typed.update(spec=PartitionSpec(*padded(typed.spec, blocks.ndim)[:-1]))
    flat = lax.reshape(blocks, (*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1]), out_sharding=typed)
    if flat.shape != like.shape:
        flat = lax.slice_in_dim(flat, 0, like.shape[-1], axis=-1)
    return constrained(flat, typed_sharding(jax.typeof(like)))
