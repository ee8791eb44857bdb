"""Number formats for a stored state: how float32 becomes 16 or 8 bits, and comes back. Pure functions of arrays.

Encoding happens on the device, elementwise but for one maximum per block, so that it fuses with the update and may run
in chunks. Three rules hold for every format here:

- What the format has comes back exactly, however often it is encoded: an untouched moment does not drift.
- Rounding is stochastic where a seed is given, so that increments of less than half a step are not lost: the second
  moment of Adam, with ``b2=0.999``, moves by 0.1 % at a time, and bfloat16 has steps of 0.4 %.
- Nothing but zero becomes zero. A second moment that did would divide an update by ``eps`` alone (the "zero-point
  problem", Li et al. 2023, arXiv:2309.01507); too large a one only makes a step small.
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
from jax_offload._base.elementwise import elementwise
from jax_offload._base.shardings import constrained, padded, shards_of, typed_sharding

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class _Float:
    """A binary floating-point format: bits of its mantissa, exponents of its least normal and its largest binade."""

    mantissa: int
    least: int
    largest: int


# Blocks are scaled by a power of two so that their largest magnitude is at most the least of the last binade: rounding
# up then neither overflows nor changes the scale.
_SCALED = {"float16": _Float(10, -14, 15), "float8_e4m3fn": _Float(3, -6, 8), "float8_e5m2": _Float(2, -14, 15)}
_BITS = {"int8": 7, "uint8": 8}
NAMES = ("float32", "bfloat16", *_SCALED, *_BITS)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
_SHORT |= dict.fromkeys(("fp8", "f8", "float8", "fp8_e4m3", "e4m3", "float8_e4m3"), "float8_e4m3fn")
_SHORT |= dict.fromkeys(("fp8_e5m2", "e5m2"), "float8_e5m2")
_SNAP = 1e-4  # of a step: a value this near a point of the map is that point: the arithmetic is off by 7e-5 at most


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a leaf of the state is stored: ``jo.offload(inner, storage={"mu": jo.Storage("int8", block=256)})``.

    Args:
      dtype: one of

        - ``"float32"``: as it is.
        - ``"bfloat16"``: the range of float32, 8 bits of precision. 2 bytes per element.
        - ``"float16"``: 11 bits of precision, each block scaled by a power of two, as second moments do not fit its
          range (as in FP8-LM, Peng et al. 2023, arXiv:2310.18313). 2 bytes and the scale.
        - ``"float8_e4m3fn"``, ``"float8_e5m2"``: the same with 4 and 3 bits (FP8-LM; Micikevicius et al. 2022,
          arXiv:2209.05433). For the first moment. 1 byte and the scale.
        - ``"int8"``: the dynamic map of Dettmers et al. 2022 (8-bit optimizers, arXiv:2110.02861), blocks scaled by
          their largest magnitude; seven octades of 8 where the paper has decades of 10, so that every point is exact in
          binary, and with both ends of each, so that the largest of a block is. 1 byte and the scale.
        - ``"uint8"``: for second moments: the unsigned map, of the square root; what is negative becomes NaN. 1 byte
          and the scale.
      block: elements along the last axis that share a scale, which is a float32. ``"float32"`` and ``"bfloat16"``
        have none.

    Leaves that would not become smaller (with a last axis of 1, say) stay as they are.

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
    """The format that was probably meant, in words; empty where it is another dtype's name, or none is near."""
    name = dtype or str(given).lower().removeprefix("torch.")
    near = [_SHORT[name]] if name in _SHORT else difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
    return f" Did you mean {near[0]!r}?" if near and (name in _SHORT or not dtype) else ""


def encode(x: jax.Array, storage: Storage, seed: Any = None) -> tuple[jax.Array, jax.Array | None]:
    """``x`` as values in the storage's dtype, of its shape, and a float32 scale per block, of shape ``(..., blocks)``.

    Args:
      x: of shape ``(..., n)`` and any floating dtype.
      storage: the format. bfloat16 has no scale.
      seed: uint32, of which the rounding is a function, and of the place in ``x``; ``None``: to nearest.

    NaN stays NaN. Infinity stays, or becomes NaN in formats without it. In the two 8-bit integers, which have neither,
    a whole block becomes NaN with it.
    """
    x = x.astype(jnp.float32)
    if storage.dtype == "float32":
        return x, None
    if storage.dtype == "bfloat16":
        return elementwise(_to_bfloat16, x, *_places(x, seed), strides=_strides(x)), None
    magnitude = elementwise(_magnitude, _in_blocks(x, storage.block), dtype=storage.dtype)
    largest = jnp.max(magnitude, axis=-1)
    scale = elementwise(_scale, largest, dtype=storage.dtype) if storage.dtype in _SCALED else largest
    values = elementwise(
        _to_float if storage.dtype in _SCALED else _to_code,
        *(x, _per_element(scale, x, storage.block), *_places(x, seed)),
        dtype=storage.dtype,
        strides=_strides(x),
    )
    return values, scale if storage.dtype in _SCALED else elementwise(_or_nan, largest)


def decode(values: jax.Array, scale: jax.Array | None, storage: Storage) -> jax.Array:
    """What ``encode`` was given, as far as the format has it, in float32."""
    if scale is None:
        return values.astype(jnp.float32)
    wide = _per_element(scale, values, storage.block)
    if storage.dtype in _SCALED:
        return values.astype(jnp.float32) * wide
    return elementwise(_from_code, values, wide, dtype=storage.dtype)


@functools.lru_cache(1024)
def encoded_shapes(shape: tuple[int, ...], storage: Storage) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shapes of what ``encode`` returns."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    values, scale = jax.eval_shape(lambda x: encode(x, storage), x)
    return values.shape, None if scale is None else scale.shape


def mixed(x: Any) -> Any:
    """A uint32 whose bits all depend on all bits of ``x`` (the finalizer of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


# Of the element x, for which XLA has one operation (see ``elementwise``):


def _magnitude(x: jax.Array, *, dtype: str) -> jax.Array:
    """What counts for the largest of its block. In integers infinity where a whole block becomes NaN, as the largest of
    a block is not always NaN where one is: XLA's CPU loses it in vectors."""
    if dtype in _SCALED:
        return _where(lax.is_finite(x), lax.abs(_held(x, dtype)), 0)
    valid = lax.is_finite(x) if dtype == "int8" else lax.is_finite(x) & (x >= 0)
    return _where(valid, lax.abs(x), math.inf)


def _scale(largest: jax.Array, *, dtype: str) -> jax.Array:
    """The power of two that brings the largest of a block to the format's last binade."""
    power = _clamped(_ceil_log2(largest) - _SCALED[dtype].largest, 126)
    return lax.bitcast_convert_type((power + 127) << 23, jnp.float32)


def _or_nan(largest: jax.Array) -> jax.Array:
    return _where(largest == math.inf, lax.full_like(largest, math.nan), largest)


def _to_bfloat16(x: jax.Array, *place: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    if not place:
        return x.astype(jnp.bfloat16)
    largest = float(jnp.finfo(jnp.bfloat16).max)  # so that what is finite does not overflow
    bits = lax.bitcast_convert_type(_clamped(x, largest), jnp.uint32)
    bits = (bits + (_random_bits(*place, strides=strides) >> 16)) & jnp.uint32(0xFFFF0000)
    return _where(lax.is_finite(x), lax.bitcast_convert_type(bits, jnp.float32), x).astype(jnp.bfloat16)


def _to_float(x: jax.Array, scale: jax.Array, *place: jax.Array, dtype: str, strides: tuple[int, ...]) -> jax.Array:
    noise = _noise(*place, strides=strides) if place else None
    inverse = jnp.uint32(254 << 23) - lax.bitcast_convert_type(scale, jnp.uint32)  # of a power of two
    values = _to_grid(_held(x, dtype) * lax.bitcast_convert_type(inverse, jnp.float32), _SCALED[dtype], noise)
    return _where(lax.is_finite(x), values, x).astype(dtype)


def _to_code(x: jax.Array, largest: jax.Array, *place: jax.Array, dtype: str, strides: tuple[int, ...]) -> jax.Array:
    part = _magnitude(x, dtype=dtype) / _where(largest > 0, largest, 1)
    noise = _noise(*place, strides=strides, margin=_SNAP) if place else None
    signed = dtype == "int8"
    code = _to_map(part if signed else lax.sqrt(part), _BITS[dtype], noise, squared=not signed)
    return (lax.sign(x) * code).astype(dtype)  # what is zero has no sign


def _from_code(code: jax.Array, largest: jax.Array, *, dtype: str) -> jax.Array:
    code = code.astype(jnp.float32)
    point = _point(lax.abs(code), _BITS[dtype])
    return lax.sign(code) * point * largest if dtype == "int8" else point * point * largest


def _noise(*place: jax.Array, strides: tuple[int, ...], margin: float = 0.0) -> jax.Array:
    """A number in [margin, 1 - margin)."""
    unit = (_random_bits(*place, strides=strides) >> 8).astype(jnp.float32) * (2.0**-24 * (1 - 2 * margin))
    return unit + margin if margin else unit


def _random_bits(seed: jax.Array, *place: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """A uint32 for each place. A counter, mixed: the same in chunks, and on however many devices.

    Only its upper bits are used, which the last line of the finalizer (see ``mixed``) does not make better.
    """
    number = sum((index * jnp.uint32(stride) for index, stride in zip(place, strides, strict=True)), jnp.uint32(0))
    number = number ^ seed
    number = (number ^ (number >> 16)) * jnp.uint32(0x85EBCA6B)
    return (number ^ (number >> 13)) * jnp.uint32(0xC2B2AE35)


def _held(x: jax.Array, dtype: str) -> jax.Array:
    top = (2 - 2.0 ** -_SCALED[dtype].mantissa) * 2.0**127  # what rounds up from there is not in float32
    return _clamped(x, top)


def _clamped(x: jax.Array, most: float) -> jax.Array:
    """In ``x``'s own dtype, whatever that of a Python number is."""
    return lax.clamp(lax.full_like(x, -most), x, lax.full_like(x, most))


def _where(condition: jax.Array, x: jax.Array, y: Any) -> jax.Array:
    """``jnp.where`` is a function of its own in the program, which a ``map`` may not call."""
    return lax.select(condition, x, y if isinstance(y, jax.Array) else lax.full_like(x, y))


def _to_grid(x: jax.Array, form: _Float, noise: jax.Array | None) -> jax.Array:
    """``x`` rounded to the numbers of a format, still in float32."""
    binade = jnp.maximum(_power_below(x), 2.0**form.least)
    # of 1: 2^mantissa / binade
    steps = jnp.uint32((254 + form.mantissa) << 23) - lax.bitcast_convert_type(binade, jnp.uint32)
    count = jnp.abs(x) * lax.bitcast_convert_type(steps, jnp.float32)
    below = jnp.floor(count) if noise is not None else lax.round(count, lax.RoundingMethod.TO_NEAREST_EVEN)
    count = below if noise is None else below + (noise < count - below)
    return lax.sign(x) * jnp.maximum(count, 1) * (binade * 2.0**-form.mantissa)


def _to_map(x: jax.Array, bits: int, noise: jax.Array | None, *, squared: bool) -> jax.Array:
    """Numbers in [0, 1] as codes of the dynamic map, at least 1; ``squared``: rounding keeps the mean of their squares.

    A code of n + 1 binary digits lies in the octade (8^-(k+1), 8^-k], k = bits - 1 - n, which has 2^n points, evenly
    apart. So codes are a linear function of x in each octade, and a continuous one in all.
    """
    thirds = (lax.bitcast_convert_type(x, jnp.int32) - 1 >> 23) + (3 * bits - 127)  # ceil(log2(x)) + 3 bits - 1
    n = (jnp.maximum(thirds, 0) * (11 << 18)) & 0x7F800000  # a third of it, where a float has its exponent
    points = lax.bitcast_convert_type(n + (127 << 23), jnp.float32)
    steps = lax.bitcast_convert_type(((124 + 3 * bits) << 23) - (n + n), jnp.float32)  # 8^(bits - 1) / points^2
    place = x * steps * (8 / 7)  # from zero, in steps of the octade
    code = place + (points * (6 / 7) - 1)
    if squared:
        below = jnp.floor(code)
        share = code - below
        both = place + place - share
        code = below + share * both / (both - share + 1)
    return jnp.maximum(jnp.floor(code + (0.5 if noise is None else noise)), 1)


def _point(code: jax.Array, bits: int) -> jax.Array:
    """The number that a code of the dynamic map, a float, stands for; exact."""
    n = _power_below(code)
    return n * n * (7 * code - 6 * n + 7) * 2.0 ** (-3 * bits)


def _power_below(x: jax.Array) -> jax.Array:
    """The largest power of two that is not above a normal number; 0 of zero and subnormal ones."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & 0x7F800000, jnp.float32)


def _ceil_log2(x: jax.Array) -> jax.Array:
    """The exponent of the least power of two that is not less than x > 0."""
    return ((lax.bitcast_convert_type(x, jnp.int32) - 1) >> 23) - 126


def _strides(x: jax.Array) -> tuple[int, ...]:
    return tuple(math.prod(x.shape[axis + 1 :]) % 2**32 for axis in range(x.ndim))


def _places(x: jax.Array, seed: Any) -> list[jax.Array]:
    """For every element of ``x`` the seed and its index along each axis; nothing where there is no seed."""
    if seed is None:
        return []
    sharding = typed_sharding(jax.typeof(x))
    seeds = lax.broadcast_in_dim(seed, x.shape, (), out_sharding=sharding)
    return [seeds, *(lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding) for axis in range(x.ndim))]


def _per_element(scale: jax.Array, x: jax.Array, block: int) -> jax.Array:
    """The scale of its block for every element of ``x``."""
    return _as_rows(jnp.broadcast_to(scale[..., None], (*scale.shape, min(block, x.shape[-1]))), x)


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """``(..., n)`` as ``(..., blocks, block)``, the last block filled with zeros."""
    block = min(block, x.shape[-1])
    rest = -x.shape[-1] % block
    shape = (*x.shape[:-1], (x.shape[-1] + rest) // block, block)
    typed = typed_sharding(jax.typeof(x))
    if typed is not None:  # the types want to be told; a device has whole blocks, or all of them
        spec = padded(typed.spec, x.ndim)
        last = spec[-1] if not rest and shape[-2] % shards_of(typed, x.shape)[-1] == 0 else None
        x = constrained(x, typed.update(spec=PartitionSpec(*spec[:-1], last)))
        typed = typed.update(spec=PartitionSpec(*spec[:-1], last, None))
    if rest:
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, rest, 0)])
    return lax.reshape(x, shape, out_sharding=typed)


def _as_rows(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """``(..., blocks, block)`` as ``(..., n)``, like ``like``."""
    typed = typed_sharding(jax.typeof(blocks))
    if typed is not None:
        typed = typed.update(spec=PartitionSpec(*padded(typed.spec, blocks.ndim)[:-1]))
    flat = lax.reshape(blocks, (*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1]), out_sharding=typed)
    if flat.shape != like.shape:
        flat = lax.slice_in_dim(flat, 0, like.shape[-1], axis=-1)
    return constrained(flat, typed_sharding(jax.typeof(like)))
