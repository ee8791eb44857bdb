"""Encode and decode numbers in few bits, each by itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class _Float:
    """A binary floating-point format: its mantissa bits, and the exponents of its least normal and largest binade."""

    mantissa: int
    least: int
    largest: int


# A block is scaled by a power of two, so that its largest magnitude is at most the least of the last binade: then
# rounding up neither overflows nor changes the scale.
SCALED = {"float16": _Float(10, -14, 15), "float8_e4m3fn": _Float(3, -6, 8), "float8_e5m2": _Float(2, -14, 15)}
INTEGERS = ("int8", "uint8")
_MIDDLE = 128.0  # the code of zero in a uint8 block that has a negative number
_SNAP = 1e-4  # as a part of a step: values this near a point of the map become that point, despite rounding errors


def mixed(x: Any) -> Any:
    """Return a uint32 whose bits all depend on all bits of ``x`` (the finalizer of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def magnitude(x: jax.Array, *, dtype: str) -> jax.Array:
    """Return the magnitude that counts for the largest of a block.

    In the integer formats NaN counts as infinity, which makes the whole block NaN: XLA's CPU loses NaN in a maximum.
    """
    if dtype in SCALED:
        return _where(lax.is_finite(x), lax.abs(_held(x, dtype)), 0)
    return _where(lax.is_finite(x), lax.abs(x), math.inf)


def negative(x: jax.Array) -> jax.Array:
    """Return 1 for a negative number, else 0."""
    return _where(x < 0, lax.full_like(x, 1), 0)


def with_sign(largest: jax.Array, negative: jax.Array) -> jax.Array:
    """Return the scale of a ``uint8`` block, which is negative if one of the block's numbers is."""
    return _where(negative > 0, -largest, largest)


def scale_of(largest: jax.Array, *, dtype: str) -> jax.Array:
    """Return the power of two that brings the largest of a block to the format's last binade."""
    power = _clamped(_ceil_log2(largest) - SCALED[dtype].largest, 126)
    return lax.bitcast_convert_type((power + 127) << 23, jnp.float32)


def or_nan(scale: jax.Array) -> jax.Array:
    return _where(lax.abs(scale) == math.inf, lax.full_like(scale, math.nan), scale)


def to_bfloat16(x: jax.Array, *place: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    if not place:
        return x.astype(jnp.bfloat16)
    largest = float(jnp.finfo(jnp.bfloat16).max)  # finite numbers must not overflow
    bits = lax.bitcast_convert_type(_clamped(x, largest), jnp.uint32)
    bits = (bits + (_random_bits(*place, strides=strides) >> 16)) & jnp.uint32(0xFFFF0000)
    return _where(lax.is_finite(x), lax.bitcast_convert_type(bits, jnp.float32), x).astype(jnp.bfloat16)


def to_float(x: jax.Array, scale: jax.Array, *place: jax.Array, dtype: str, strides: tuple[int, ...]) -> jax.Array:
    noise = _noise(*place, strides=strides) if place else None
    inverse = jnp.uint32(254 << 23) - lax.bitcast_convert_type(scale, jnp.uint32)  # the inverse of a power of two
    values = _to_grid(_held(x, dtype) * lax.bitcast_convert_type(inverse, jnp.float32), SCALED[dtype], noise)
    return _where(lax.is_finite(x), values, x).astype(dtype)


def to_code(x: jax.Array, scale: jax.Array, *place: jax.Array, dtype: str, strides: tuple[int, ...]) -> jax.Array:
    part = magnitude(x, dtype=dtype) / _where(scale != 0, lax.abs(scale), 1)
    noise = _noise(*place, strides=strides, margin=_SNAP) if place else None
    if dtype == "int8":
        return (lax.sign(x) * _to_map(part, 21, noise)).astype(dtype)  # zero has no sign
    signed = scale < 0
    root = _where(signed, part, lax.sqrt(part))
    code = lax.sign(x) * _to_map(root, _thrice_bits(signed), noise, squared=~signed)
    return (code + _where(signed, lax.full_like(code, _MIDDLE), 0)).astype(dtype)


def from_code(code: jax.Array, scale: jax.Array, *, dtype: str) -> jax.Array:
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


def _noise(*place: jax.Array, strides: tuple[int, ...], margin: float = 0.0) -> jax.Array:
    """Return random numbers in [margin, 1 - margin)."""
    unit = (_random_bits(*place, strides=strides) >> 8).astype(jnp.float32) * (2.0**-24 * (1 - 2 * margin))
    return unit + margin if margin else unit


def _random_bits(seed: jax.Array, *place: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """Return a random uint32 for each place: a mixed counter, which is the same in chunks and on any devices.

    Only the upper bits are used, which the last line of the finalizer (see ``mixed``) does not improve.
    """
    number = sum((index * jnp.uint32(stride) for index, stride in zip(place, strides, strict=True)), jnp.uint32(0))
    number = number ^ seed
    number = (number ^ (number >> 16)) * jnp.uint32(0x85EBCA6B)
    return (number ^ (number >> 13)) * jnp.uint32(0xC2B2AE35)


def _held(x: jax.Array, dtype: str) -> jax.Array:
    top = (2 - 2.0 ** -SCALED[dtype].mantissa) * 2.0**127  # float32 overflows if it rounds up from there
    return _clamped(x, top)


def _clamped(x: jax.Array, most: float) -> jax.Array:
    """Clamp in ``x``'s own dtype, whatever dtype a Python number has."""
    return lax.clamp(lax.full_like(x, -most), x, lax.full_like(x, most))


def _where(condition: jax.Array, x: jax.Array, y: Any) -> jax.Array:
    """Select without ``jnp.where``, which is a function in the program that a ``map`` may not call."""
    return lax.select(condition, x, y if isinstance(y, jax.Array) else lax.full_like(x, y))


def _to_grid(x: jax.Array, form: _Float, noise: jax.Array | None) -> jax.Array:
    """Round ``x`` to the numbers of a format, still in float32."""
    binade = jnp.maximum(_power_below(x), 2.0**form.least)
    # 2^mantissa / binade
    steps = jnp.uint32((254 + form.mantissa) << 23) - lax.bitcast_convert_type(binade, jnp.uint32)
    count = jnp.abs(x) * lax.bitcast_convert_type(steps, jnp.float32)
    below = jnp.floor(count) if noise is not None else lax.round(count, lax.RoundingMethod.TO_NEAREST_EVEN)
    count = below if noise is None else below + (noise < count - below)
    return lax.sign(x) * jnp.maximum(count, 1) * (binade * 2.0**-form.mantissa)


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
