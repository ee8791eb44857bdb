"""Store a state in fewer bits than its optimizer computes with.

Encoding happens on the device. It is elementwise except for one maximum per block, so it fuses with the update and may
run in chunks. Three rules hold for every format:

- A number of the format comes back exactly, however often it is encoded: an untouched moment does not drift.
- Rounding is stochastic if a seed is given, so that increments of less than half a step are not lost: the second
  moment of Adam, with ``b2=0.999``, moves by 0.1 % at a time, and bfloat16 has steps of 0.4 %.
- Nothing above 1e-36 becomes zero. A second moment that became zero would divide an update by ``eps`` alone (the
  "zero-point problem", Li et al. 2023, arXiv:2309.01507); one that is too large only makes a step small.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from jax_offload._disk.leaves import is_on_disk
from jax_offload._program import memory
from jax_offload._program.arrays import check_integer, first_matches, leaves_with_paths, nbytes, types_of
from jax_offload._program.memory import constrained, padded, shards_of, typed_sharding
from jax_offload._program.primitives import composite, opaque
from jax_offload._state.masters import MasterState
from jax_offload._state.placement import stays

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

    Leaves that would not shrink, such as those with a last axis of 1, keep their dtype.

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
    least = ((lax.bitcast_convert_type(largest, jnp.int32) - 1) >> 23) - 126  # the least with 2**least >= largest
    power = _clamped(least - last, 126)
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
    values = lax.sign(x) * _to_grid(scaled, jnp.finfo(dtype), None if bits is None else _noise(bits))
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
    """Round the magnitude of ``x`` to the numbers of a format but zero, still in float32."""
    binade = jnp.maximum(_power_below(x), 2.0**info.minexp)
    # 2^mantissa / binade
    steps = jnp.uint32((254 + info.nmant) << 23) - lax.bitcast_convert_type(binade, jnp.uint32)
    count = jnp.abs(x) * lax.bitcast_convert_type(steps, jnp.float32)
    below = jnp.floor(count) if noise is not None else lax.round(count, lax.RoundingMethod.TO_NEAREST_EVEN)
    count = below if noise is None else below + (noise < count - below)
    return jnp.maximum(count, 1) * (binade * 2.0**-info.nmant)


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


# ---- a state in these formats

Rules = tuple[tuple[str | None, Storage], ...]  # ``None`` matches every leaf


@functools.partial(
    # sorted by name, so that a dict of both has its leaves in the same order
    jax.tree_util.register_dataclass,
    data_fields=["values", "values_scale"],
    meta_fields=["storage", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A stored leaf of the state.

    Attributes:
      values: an array of the leaf's shape and the format's dtype.
      values_scale: a float32 array of shape ``(..., blocks)``; ``None`` if the format has no scales.
      storage: the format.
      dtype: the name of the dtype that the optimizer sees.
    """

    values: Any
    values_scale: Any
    storage: Storage
    dtype: str


class StoredState(NamedTuple):
    """The state of ``offload(..., storage=)``.

    Attributes:
      rounds: the number of updates, an int32 scalar, which seeds stochastic rounding.
      inner_state: the state of the wrapped transformation, in which some leaves are ``Encoded``, with the fields
        ``values`` and ``values_scale``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> state = jo.offload(optax.adamw(1e-3), storage={"mu": "int8"}).init(params)
      >>> mu = state.inner_state[0].mu["w"]
      >>> int(state.rounds), mu.values.dtype.name, mu.values.shape, mu.values_scale.shape
      (0, 'int8', (256, 256), (256, 2))
    """

    rounds: Any
    inner_state: Any


def rules_of(storage: Any) -> Rules:
    """Check ``storage`` as ``offload`` takes it."""
    if storage is None:
        return ()
    if not isinstance(storage, Mapping):
        return ((None, _format(storage)),)
    first_matches("storage", list(storage), [])  # which raises if one is no regular expression
    return tuple((rule, _format(value)) for rule, value in storage.items())


def _format(value: Any) -> Storage:
    if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
        raise ValueError(f"storage: expected a dtype, or a mapping from paths of the state to dtypes; got {value!r}.")
    return value if isinstance(value, Storage) else Storage(value)


def formats(rules: Rules, state: Any, params: Any, min_bytes: int) -> list[Storage | None]:
    """Return the format of every leaf of a plain state; ``None`` for a leaf that keeps its dtype.

    A rule is a regular expression that matches whole components of a path in the state, ``0/mu/layers/w``. The first
    match counts.

    Raises:
      ValueError: a rule matches no leaf, or a leaf that no format can store.
    """
    flat = leaves_with_paths(state)
    names = [keystr(path, simple=True, separator="/") for path, x in flat if not stays(x, 0)]
    patterns = ["" if rule is None else f"(?:^|(?<=/))(?:{rule})(?=/|$)" for rule, _ in rules]
    first, unused = first_matches("storage", patterns, names)
    unused = [rule for k in unused if (rule := rules[k][0]) is not None]
    if unused and jax.tree.leaves(params):  # optax probes with placeholders
        fix = f"Rules match whole components of these paths: {', '.join(names)}."
        none = "This optimizer keeps none, so there is nothing to store in fewer bits: leave storage out."
        raise ValueError(f"storage: {unused} match no state leaf of rank 1 or more. {fix if names else none}")
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, MasterState))[0]
    masters = [(*path, jax.tree_util.GetAttrKey("master")) for path, x in nodes if isinstance(x, MasterState)]
    found = list[Storage | None]()
    matching = iter(zip(names, ([*rules, (None, None)][k] for k in first), strict=True))
    for path, x in flat:
        name, (rule, storage) = ("", (None, None)) if stays(x, 0) else next(matching)
        master = any(path[: len(prefix)] == prefix for prefix in masters)
        why = _unfit(x, storage, master) if storage is not None else ""
        if why and (rule is not None or (jnp.issubdtype(x.dtype, jnp.floating) and not master)):
            raise ValueError(f"storage: {rule or rules[0][1].dtype!r}, for the state leaf {name}: {why}")
        fits = storage is not None and not why and not stays(x, min_bytes)
        found.append(storage if fits and encoded_bytes(np.shape(x), storage) < nbytes(x) else None)
    return found


def _unfit(x: Any, storage: Storage, master: bool) -> str:
    """Return why a leaf cannot be stored in this format; empty if it can."""
    if master:
        return "it is a master parameter. Take it out; with_master_params(dtype=, low_bits=) says how masters are kept."
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"it is {x.dtype}, and only floating numbers are stored in fewer bits. Take it out."
    if x.dtype.itemsize > 4:
        return f"it is {x.dtype}, whose range exceeds float32's. Take it out."
    if x.dtype.itemsize < 4 and storage.dtype in ("int8", "uint8"):
        return (
            f"it is {x.dtype}, which cannot hold the numbers of {storage.dtype}, so it would drift. optax makes "
            "moments in the parameters' dtype. Use float32 ones: jo.offload(jo.with_master_params(inner), "
            "storage=...), or for mu alone optax.adamw(..., mu_dtype=jnp.float32). Or use a format that fits 16 bits, "
            "'float8_e4m3fn' or 'float8_e5m2'; or give no format for this leaf, which takes 2 bytes already."
        )
    return ""


def is_encoded(x: Any) -> bool:
    return isinstance(x, Encoded)


def is_stored(x: Any) -> bool:
    return isinstance(x, StoredState)


def plain(state: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a state without its stored nodes. ``leaf`` maps its leaves, which may be ``Encoded`` or on disk."""

    def one(x: Any) -> Any:
        return plain(x.inner_state, leaf) if is_stored(x) else leaf(x)

    return jax.tree.map(one, state, is_leaf=lambda x: is_stored(x) or is_encoded(x) or is_on_disk(x))


def next_stored(state: StoredState, before: Any, after: Any) -> StoredState:
    """Encode ``after`` as ``state`` is; leaves that are the same as in ``before``, its plain form, stay encoded."""
    olds, treedef = jax.tree.flatten(state.inner_state, is_leaf=is_encoded)
    new = jax.tree.leaves(after)
    changed = [is_encoded(old) and x is not was for old, was, x in zip(olds, jax.tree.leaves(before), new, strict=True)]
    seeds, kept = iter(composite(_seeds, state.rounds, n=sum(changed)) if any(changed) else []), []
    for old, x, again in zip(olds, new, changed, strict=True):
        now = old if is_encoded(old) else x
        kept.append(encoded(x, old.storage, next(seeds), old.dtype) if again else now)
    return StoredState(state.rounds + 1, jax.tree.unflatten(treedef, kept))


def _seeds(rounds: jax.Array, *, n: int) -> list[jax.Array]:
    """Return a seed for each of ``n`` leaves.

    Each seed is computed from an opaque copy of the one before, so that all come from the same operation, which XLA
    compiles once. The number of the round is mixed, which makes the rounds independent.
    """
    seeds, number = [], mixed(rounds.astype(jnp.uint32))
    for _ in range(n):
        number = opaque(number)
        seeds.append(number)
        number = jax.lax.add(number, np.uint32(0x9E3779B9))
    return seeds


def encoded(x: jax.Array, storage: Storage, seed: Any = None, dtype: str | None = None) -> Encoded:
    values, *scale = composite(encode, x, *([] if seed is None else [seed]), storage=storage)
    return Encoded(values, scale[0] if scale else None, storage, dtype or np.dtype(x.dtype).name)


def decoded(x: Encoded) -> jax.Array:
    return composite(decode, *jax.tree.leaves(x), storage=x.storage)[0].astype(x.dtype)


def stored_like(wanted: Any, x: Any) -> Any:
    """Encode a node or a leaf of a plain state like ``wanted``, each leaf in its place; ``rounds`` starts at 0."""
    if is_stored(wanted):
        inner = jax.tree.map(stored_like, wanted.inner_state, x, is_leaf=is_encoded)
        return StoredState(np.zeros((), np.int32), inner)
    if not is_encoded(wanted):
        return x
    got, expected = (np.shape(x), np.dtype(x.dtype).name), (wanted.values.shape, wanted.dtype)
    if got != expected:
        raise ValueError(f"a leaf is {got[1]}{list(got[0])}, and tx has {expected[1]}{list(expected[0])}")
    return in_place(encoded, x, wanted.storage)


def with_storage(
    inner: optax.GradientTransformationExtraArgs, rules: Rules, min_bytes: int
) -> optax.GradientTransformationExtraArgs:
    """Keep the state of ``inner`` in the formats of the rules: decode it for each update and encode it afterwards."""

    def init_fn(params: Any) -> StoredState:
        state = inner.init(params)
        leaves, treedef = jax.tree.flatten(state)
        found = zip(leaves, formats(rules, state, params, min_bytes), strict=True)
        kept = [x if storage is None else encoded(x, storage) for x, storage in found]
        return StoredState(jnp.zeros((), jnp.int32), jax.tree.unflatten(treedef, kept))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, StoredState]:
        before = plain(state, lambda x: decoded(x) if is_encoded(x) else x)
        new, after = inner.update(updates, before, params, **extra_args)
        return new, next_stored(state, before, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def warn_of_unstored(rules: Rules, state: Any) -> None:
    """Warn of complex leaves, which one dtype for all leaves cannot store."""
    flat = jax.tree_util.tree_flatten_with_path(state.inner_state)[0]
    left = [keystr(path) for path, x in flat if not stays(x, 0) and jnp.issubdtype(x.dtype, jnp.complexfloating)]
    if left and rules[0][0] is None:
        warnings.warn(
            f"storage: {rules[0][1].dtype!r} leaves {len(left)} complex leaves of the state unchanged, the first is "
            f"{left[0]}: no format stores complex numbers. To avoid this warning, name the other leaves, such as "
            "storage={'mu/layers': 'bfloat16'}; or train real and imaginary parts apart "
            "(optax.contrib.split_real_and_imaginary).",
            stacklevel=5,
        )


def adopted(state: Any, params: Any, init: Callable[[Any], Any]) -> StoredState:
    """Check the state that is given to an update of ``with_storage``, and restore its nodes.

    ``nnx.update`` turns the nodes into dicts. A leaf keeps the format in which ``init`` stores it even if the first
    update returns it in another dtype: momentum of a bfloat16 or integer leaf becomes float32 in some optimizers.

    Raises:
      ValueError: a leaf is not stored as ``init`` stores it.
    """
    wanted = jax.eval_shape(lambda params: init(memory.loaded(params)), params)
    if not any(map(is_encoded, jax.tree.leaves(state, is_leaf=is_encoded))) and types_of(state) == types_of(wanted):
        state = jax.tree.unflatten(jax.tree.structure(wanted), jax.tree.leaves(state))
    fix = "Convert it: jo.from_plain(tx, jo.to_plain(old_tx, state)), params given where their tree is not in it."
    if not isinstance(state, StoredState):
        raise ValueError(f"state: is a {type(state).__name__}, not one that offload(..., storage=) keeps. {fix}")
    flat = jax.tree_util.tree_flatten_with_path(state.inner_state, is_leaf=is_encoded)[0]
    for (path, x), like in zip(flat, jax.tree.leaves(wanted.inner_state, is_leaf=is_encoded), strict=False):
        got, says = (getattr(each, "storage", None) for each in (x, like))
        if got != says:
            raise ValueError(
                f"state: {keystr(path)} is stored as {got or x.dtype}, and storage says {says or like.dtype}. {fix}"
            )
    return state


def in_place(convert: Callable[..., Any], x: Any, *options: Any) -> Any:
    """Return ``convert(x, *options)`` in the memory and with the sharding of ``x``, a leaf, plain or ``Encoded``.

    States are converted leaf by leaf, because the whole state need not fit on the device.
    """
    arrays = jax.tree.leaves(x)
    new = (_converted if isinstance(arrays[0], Tracer) else _compiled)(convert, x, options)
    return jax.tree.map(memory.to_host, new) if memory.on_host(arrays[0]) else new


def _converted(convert: Callable[..., Any], x: Any, options: tuple[Any, ...]) -> Any:
    return convert(jax.tree.map(memory.to_device, x), *options)


_compiled = jax.jit(_converted, static_argnums=(0, 2))
