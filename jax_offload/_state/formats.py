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
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_offload._program.arrays import check_integer, nbytes
from jax_offload._program.shardings import constrained, padded, shards_of, typed_sharding

SCALED = ("float16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8")
_MIDDLE = 128.0  # the code of zero in a uint8 block that has a negative number
_SNAP = 1e-4  # as a part of a step: values this near a point of the map become that point, despite rounding errors


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
        - ``"float8_e4m3fn"``, ``"float8_e5m2"``: the same, with 4 and 3 bits of precision (FP8-LM; Micikevicius et al.
          2022, arXiv:2209.05433). For the first moment. 1 byte and the scale.
        - ``"int8"``: the dynamic map of Dettmers et al. 2022 (8-bit optimizers, arXiv:2110.02861), with blocks scaled
          by their largest magnitude. Its seven ranges differ by factors of 8 instead of the paper's 10, so that every
          point is exact in binary. Both ends of each range are points, so that a block's largest number is exact too.
          For the first moment. 1 byte and the scale.
        - ``"uint8"``: an unsigned map of the square root, for second moments. A block that holds a negative number uses
          the map of ``"int8"``, and has a negative scale. 1 byte and the scale.
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
        check_integer("storage: block", self.block, 1, "a number of elements > 0, an int", f"{BLOCK} is usual.")


def _meant(given: Any, dtype: str) -> str:
    """Suggest the format that was probably meant; empty for the name of another dtype, or if none is near."""
    name = dtype or str(given).lower().removeprefix("torch.")
    near = [_SHORT[name]] if name in _SHORT else difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
    return f" Did you mean {near[0]!r}?" if near and (name in _SHORT or not dtype) else ""


def encode(x: jax.Array, seed: Any = None, *, storage: Storage) -> list[jax.Array]:
    """Encode ``x`` as values in the format's dtype and, if it has scales, a float32 per block, ``(..., blocks)``.

    NaN stays NaN. Infinity stays, or becomes NaN in formats without it. In the two 8-bit integers, which have neither,
    the whole block becomes NaN.

    Args:
      x: of shape ``(..., n)`` and any floating dtype.
      seed: a uint32 that, with the place in ``x``, decides the rounding; ``None`` rounds to nearest.
      storage: the format.
    """
    x, dtype = x.astype(jnp.float32), storage.dtype
    if dtype == "float32":
        return [x]
    bits = None if seed is None else _random_bits(seed, x)
    if dtype == "bfloat16":
        return [_to_bfloat16(x, bits)]
    blocks = _in_blocks(x, storage.block)
    scale = jnp.max(_magnitude(blocks, dtype), axis=-1)
    if dtype in SCALED:
        scale = _power_for(scale, dtype)
        return [_to_float(x, _per_element(scale, x, storage.block), bits, dtype), scale]
    if dtype == "uint8":  # a block with a negative number has a negative scale
        scale = _where(jnp.max(_where(blocks < 0, lax.full_like(blocks, 1), 0), axis=-1) > 0, -scale, scale)
    values = _to_code(x, _per_element(scale, x, storage.block), bits, dtype)
    return [values, _where(lax.abs(scale) == math.inf, lax.full_like(scale, math.nan), scale)]


def decode(values: jax.Array, scale: jax.Array | None = None, *, storage: Storage) -> list[jax.Array]:
    """Decode what ``encode`` returns to one float32 array."""
    if scale is None:
        return [values.astype(jnp.float32)]
    wide = _per_element(scale, values, storage.block)
    if storage.dtype in SCALED:
        return [values.astype(jnp.float32) * wide]
    return [_from_code(values, wide, storage.dtype)]


@functools.lru_cache(1024)
def encoded_bytes(shape: tuple[int, ...], storage: Storage) -> int:
    """Return the bytes of an array of this shape once it is encoded."""
    encoded = jax.eval_shape(functools.partial(encode, storage=storage), jax.ShapeDtypeStruct(shape, jnp.float32))
    return sum(map(nbytes, encoded))


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


# ---- single numbers


def mixed(x: Any) -> Any:
    """Return a uint32 whose bits all depend on all bits of ``x`` (the finalizer of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _random_bits(seed: Any, x: jax.Array) -> jax.Array:
    """Return a random uint32 for each element: its mixed place, which is the same in chunks and on any devices."""
    sharding = typed_sharding(jax.typeof(x))
    strides = [jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32) for axis in range(x.ndim)]
    indices = (lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding) for axis in range(x.ndim))
    return mixed(sum(map(operator.mul, indices, strides), jnp.uint32(0)) ^ seed)


def _magnitude(x: jax.Array, dtype: str) -> jax.Array:
    """Return the magnitude that counts for the largest of a block.

    In the integer formats NaN counts as infinity, which makes the whole block NaN: XLA's CPU loses NaN in a maximum.
    """
    if dtype in SCALED:
        return _where(lax.is_finite(x), lax.abs(_held(x, dtype)), 0)
    return _where(lax.is_finite(x), lax.abs(x), math.inf)


def _power_for(largest: jax.Array, dtype: str) -> jax.Array:
    """Return the power of two by which a block's largest magnitude becomes at most the least of the last binade.

    Rounding up then neither overflows nor changes the scale.
    """
    last = math.frexp(float(jnp.finfo(dtype).max))[1] - 1
    power = _clamped(_ceil_log2(largest) - last, 126)
    return lax.bitcast_convert_type((power + 127) << 23, jnp.float32)


def _to_bfloat16(x: jax.Array, noise: jax.Array | None) -> jax.Array:
    if noise is None:
        return x.astype(jnp.bfloat16)
    largest = float(jnp.finfo(jnp.bfloat16).max)  # finite numbers must not overflow
    bits = lax.bitcast_convert_type(_clamped(x, largest), jnp.uint32)
    bits = (bits + (noise >> 16)) & jnp.uint32(0xFFFF0000)
    return _where(lax.is_finite(x), lax.bitcast_convert_type(bits, jnp.float32), x).astype(jnp.bfloat16)


def _to_float(x: jax.Array, scale: jax.Array, bits: jax.Array | None, dtype: str) -> jax.Array:
    inverse = jnp.uint32(254 << 23) - lax.bitcast_convert_type(scale, jnp.uint32)  # the inverse of a power of two
    scaled = _held(x, dtype) * lax.bitcast_convert_type(inverse, jnp.float32)
    values = _to_grid(scaled, jnp.finfo(dtype), None if bits is None else _noise(bits))
    return _where(lax.is_finite(x), values, x).astype(dtype)


def _to_code(x: jax.Array, scale: jax.Array, bits: jax.Array | None, dtype: str) -> jax.Array:
    part = _magnitude(x, dtype) / _where(scale != 0, lax.abs(scale), 1)
    noise = None if bits is None else _noise(bits, _SNAP)
    if dtype == "int8":
        return (lax.sign(x) * _to_map(part, 21, noise)).astype(dtype)  # zero has no sign
    signed = scale < 0
    root = _where(signed, part, lax.sqrt(part))
    code = lax.sign(x) * _to_map(root, _thrice_bits(signed), noise, squared=~signed)
    return (code + _where(signed, lax.full_like(code, _MIDDLE), 0)).astype(dtype)


def _from_code(code: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    code = code.astype(jnp.float32)
    if dtype == "int8":
        return lax.sign(code) * _point(lax.abs(code), 21) * scale
    signed = scale < 0
    code = code - _where(signed, lax.full_like(code, _MIDDLE), 0)
    point = _point(lax.abs(code), _thrice_bits(signed))
    return _where(signed, lax.neg(lax.sign(code)), point) * point * scale


def _thrice_bits(signed: jax.Array) -> jax.Array:
    """Return three times the number of bits without the sign, as an octade of 8 is three binades."""
    return 24 - 3 * signed.astype(jnp.int32)


def _noise(bits: jax.Array, margin: float = 0.0) -> jax.Array:
    """Return random numbers in [margin, 1 - margin)."""
    unit = (bits >> 8).astype(jnp.float32) * (2.0**-24 * (1 - 2 * margin))
    return unit + margin if margin else unit


def _held(x: jax.Array, dtype: str) -> jax.Array:
    top = (2 - 2.0 ** -jnp.finfo(dtype).nmant) * 2.0**127  # float32 overflows if it rounds up from there
    return _clamped(x, top)


def _clamped(x: jax.Array, most: float) -> jax.Array:
    """Clamp in ``x``'s own dtype, whatever dtype a Python number has."""
    return lax.clamp(lax.full_like(x, -most), x, lax.full_like(x, most))


def _where(condition: jax.Array, x: jax.Array, y: Any) -> jax.Array:
    """Select as ``jnp.where`` does, without a call in the program."""
    return lax.select(condition, x, y if isinstance(y, jax.Array) else lax.full_like(x, y))


def _to_grid(x: jax.Array, info: Any, noise: jax.Array | None) -> jax.Array:
    """Round ``x`` to the numbers of a format, still in float32."""
    binade = jnp.maximum(_power_below(x), 2.0**info.minexp)
    # 2^mantissa / binade
    steps = jnp.uint32((254 + info.nmant) << 23) - lax.bitcast_convert_type(binade, jnp.uint32)
    count = jnp.abs(x) * lax.bitcast_convert_type(steps, jnp.float32)
    below = jnp.floor(count) if noise is not None else lax.round(count, lax.RoundingMethod.TO_NEAREST_EVEN)
    count = below if noise is None else below + (noise < count - below)
    return lax.sign(x) * jnp.maximum(count, 1) * (binade * 2.0**-info.nmant)


def _to_map(x: jax.Array, thrice: Any, noise: jax.Array | None, squared: jax.Array | None = None) -> jax.Array:
    """Return the codes of the dynamic map, at least 1, for numbers in [0, 1].

    A code of n + 1 binary digits lies in the octade (8^-(k+1), 8^-k], k = bits - 1 - n, which has 2^n points, evenly
    apart. So codes are a linear function of x in each octade, and a continuous one in all.

    Args:
      x: the numbers.
      thrice: three times the number of bits.
      noise: random numbers that decide between two points; ``None`` takes the nearer one.
      squared: where stochastic rounding keeps the mean of the squares.
    """
    thirds = (lax.bitcast_convert_type(x, jnp.int32) - 1 >> 23) + (thrice - 127)  # ceil(log2(x)) + thrice - 1
    n = (jnp.maximum(thirds, 0) * (11 << 18)) & 0x7F800000  # a third of it, where a float has its exponent
    points = lax.bitcast_convert_type(n + (127 << 23), jnp.float32)
    steps = lax.bitcast_convert_type(((124 + thrice) << 23) - (n + n), jnp.float32)  # 8^(bits - 1) / points^2
    place = x * steps * (8 / 7)  # from zero, in steps of the octade
    code = place + (points * (6 / 7) - 1)
    if squared is not None:
        below = jnp.floor(code)
        share = code - below
        both = place + place - share
        code = _where(squared, below + share * both / (both - share + 1), code)
    return jnp.maximum(jnp.floor(code + (0.5 if noise is None else noise)), 1)


def _point(code: jax.Array, thrice: Any) -> jax.Array:
    """Return the exact number for a code of the dynamic map, which is given as a float."""
    n = _power_below(code)
    unit = 2.0**-thrice if isinstance(thrice, int) else lax.bitcast_convert_type((127 - thrice) << 23, jnp.float32)
    return n * n * (7 * code - 6 * n + 7) * unit


def _power_below(x: jax.Array) -> jax.Array:
    """Return the largest power of two that is not above a normal number; 0 for zero and subnormal numbers."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & 0x7F800000, jnp.float32)


def _ceil_log2(x: jax.Array) -> jax.Array:
    """Return the exponent of the least power of two that is not less than x > 0."""
    return ((lax.bitcast_convert_type(x, jnp.int32) - 1) >> 23) - 126
