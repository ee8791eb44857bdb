"""Store a state in fewer bits than its optimizer computes with.

Encoding happens on the device. It is elementwise except for one maximum per block, so it fuses with the update and may
run in chunks. Three rules hold for every format:

- A number of the format comes back exactly, however often it is encoded: an untouched moment does not drift.
- Rounding is stochastic if a seed is given, so that increments of less than half a step are not lost: the second
  moment of Adam, with ``b2=0.999``, moves by 0.1 % at a time, and bfloat16 has steps of 0.4 %.
- Nothing above 1e-36 becomes zero. A second moment that became zero would divide an update by ``eps`` alone (the
  "zero-point problem", Li et al. 2023, arXiv:2309.01507); one that is too large only makes a step small.
"""

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
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from jax_offload._disk.leaves import is_on_disk
from jax_offload._program import memory
from jax_offload._program.arrays import check_integer, first_matches, leaves_with_paths, nbytes, types_of
from jax_offload._program.memory import constrained, padded, shards_of, typed_sharding
from jax_offload._program.primitives import composite, opaque
from jax_offload._state.masters import masters_in
from jax_offload._state.placement import stays

SCALED = ("float16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8")
NAMES = ("float32", "bfloat16", *SCALED, *INTEGERS)
BLOCK = 128
_MIDDLE = 128.0  # the code of zero in a uint8 block that has a negative number
_SNAP = 1e-4  # as a part of a step: values this near a point of the map become that point, despite rounding errors
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
            given = name or str(self.dtype).lower().removeprefix("torch.")
            near = [] if name else difflib.get_close_matches(given, NAMES, n=1, cutoff=0.75)
            near = [_SHORT[given]] if given in _SHORT else near
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"storage: expected one of {', '.join(NAMES)}; got {self.dtype!r}.{hint}")
        object.__setattr__(self, "dtype", name)
        check_integer("storage: block", self.block, 1, "a number of elements > 0, an int", f"{BLOCK} is usual.")


# ---- arrays in these formats


def encode(x: jax.Array, seed: Any = None, *, storage: Storage) -> list[jax.Array]:
    """Encode ``x`` as values in the format's dtype and, if it has scales, a float32 per block, ``(..., blocks)``.

    ``seed``, a uint32, and the place in ``x`` decide the rounding; without one it is to nearest. NaN stays NaN.
    Infinity stays, or becomes NaN in formats without it. In the two 8-bit integers, which have neither, the whole block
    becomes NaN.
    """
    x, dtype = x.astype(jnp.float32), storage.dtype
    if dtype == "float32":
        return [x]
    if dtype == "bfloat16" and seed is None:
        return [x.astype(dtype)]
    bits = None if seed is None else _random_bits(seed, x)
    if dtype in INTEGERS:
        x = _where(lax.is_finite(x), x, math.inf)  # makes the whole block NaN; XLA's CPU loses NaN in a maximum
        blocks = _in_blocks(x, storage.block)
        scale = jnp.max(lax.abs(blocks), axis=-1)
        if dtype == "uint8":  # a block with a negative number has a negative scale
            scale = _where(jnp.min(blocks, axis=-1) < 0, -scale, scale)
        values = _to_code(x, _per_element(scale, x, storage.block), bits, dtype)
        return [values, _where(lax.is_finite(scale), scale, math.nan)]
    digits = jnp.finfo(dtype).nmant
    top = (2 - 2.0**-digits) * 2.0**127  # float32 overflows if it rounds up from there
    held = lax.clamp(lax.full_like(x, -top), x, lax.full_like(x, top))
    if dtype == "bfloat16":
        return [_where(lax.is_finite(x), _to_digits(held, digits, bits), x).astype(dtype)]
    blocks = _in_blocks(_where(lax.is_finite(x), lax.abs(held), 0), storage.block)
    scale, inverse = _powers_for(jnp.max(blocks, axis=-1), dtype)
    values = _to_float(held, _per_element(inverse, x, storage.block), bits, dtype)
    return [_where(lax.is_finite(x), values, x).astype(dtype), scale]


def decode(values: jax.Array, scale: jax.Array | None = None, *, storage: Storage) -> list[jax.Array]:
    """Decode what ``encode`` returns to one float32 array."""
    numbers = values.astype(jnp.float32)
    if scale is not None:
        wide = _per_element(scale, values, storage.block)
        numbers = _from_code(numbers, wide, storage.dtype) if storage.dtype in INTEGERS else numbers * wide
    return [numbers]


def encoded_bytes(shape: Sequence[int], storage: Storage) -> int:
    """Return the bytes of an array of this shape once it is encoded."""
    blocks = 0 if storage.dtype in ("float32", "bfloat16") else -(-shape[-1] // min(storage.block, shape[-1]))
    return math.prod(shape) * jnp.dtype(storage.dtype).itemsize + math.prod(shape[:-1]) * blocks * 4


def _per_element(scale: jax.Array, x: jax.Array, block: int) -> jax.Array:
    """Return the scale of its block for every element of ``x``."""
    wide = jnp.broadcast_to(scale[..., None], (*scale.shape, min(block, x.shape[-1])))
    typed = typed_sharding(jax.typeof(wide))
    if typed is not None:
        typed = typed.update(spec=PartitionSpec(*padded(typed.spec, wide.ndim)[:-1]))
    flat = lax.reshape(wide, (*scale.shape[:-1], scale.shape[-1] * wide.shape[-1]), out_sharding=typed)
    if flat.shape != x.shape:
        flat = lax.slice_in_dim(flat, 0, x.shape[-1], axis=-1)
    return constrained(flat, typed_sharding(jax.typeof(x)))


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


def _where(condition: jax.Array, x: jax.Array, y: Any) -> jax.Array:
    """Select as ``jnp.where`` does, without a call in the program."""
    return lax.select(condition, x, y if isinstance(y, jax.Array) else lax.full_like(x, y))


def _float_of(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


# ---- numbers in the floating formats


def _powers_for(largest: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Return a power of two and its inverse: divided by it, ``largest`` is at most the least of the last binade.

    Rounding up then neither overflows nor changes the scale.
    """
    last = math.frexp(float(jnp.finfo(dtype).max))[1] - 1
    least = ((lax.bitcast_convert_type(largest, jnp.int32) - 1) >> 23) - 126  # the least with 2**least >= largest
    power = lax.clamp(lax.full_like(least, -126), least - last, lax.full_like(least, 126))
    return _float_of((127 + power) << 23), _float_of((127 - power) << 23)


def _to_float(x: jax.Array, inverse: jax.Array, noise: jax.Array | None, dtype: str) -> jax.Array:
    """Scale and round to the numbers of a format but zero, still in float32.

    Subnormal numbers are as far apart as the smallest normal ones, so they round like these.
    """
    info, size = jnp.finfo(dtype), lax.abs(x) * inverse
    up = _where(size < 2.0**info.minexp, lax.full_like(x, 2.0**info.minexp), 0)
    size = jnp.maximum(_to_digits(size + up, info.nmant, noise) - up, 2.0 ** (info.minexp - info.nmant))
    return lax.sign(x) * size


def _to_digits(x: jax.Array, digits: int, noise: jax.Array | None) -> jax.Array:
    """Round to so many binary digits behind the first, whose next number is the next one in float32's bits, too.

    Without noise, ties go to the even number, as in ``astype``.
    """
    rest, bits = 23 - digits, lax.bitcast_convert_type(x, jnp.uint32)
    up = ((bits >> rest) & 1) + jnp.uint32(2 ** (rest - 1) - 1) if noise is None else noise >> (32 - rest)
    return _float_of((bits + up) & jnp.uint32(2**32 - 2**rest))


# ---- numbers in the dynamic map of the integers
#
# A code of n + 1 binary digits lies in the octade (8^-(k+1), 8^-k], k = bits - 1 - n, which has 2^n points, evenly
# apart. So codes are a linear function of the number in each octade, and a continuous one in all. The bits are counted
# without the sign, and three times, as an octade is three binades.


def _thrice_bits(scale: jax.Array, dtype: str) -> Any:
    return 21 if dtype == "int8" else 24 - 3 * (scale < 0).astype(jnp.int32)


def _to_code(x: jax.Array, scale: jax.Array, bits: jax.Array | None, dtype: str) -> jax.Array:
    thrice = _thrice_bits(scale, dtype)
    part = lax.abs(x) / _where(scale != 0, lax.abs(scale), 1)
    root = part if dtype == "int8" else _where(scale < 0, part, lax.sqrt(part))
    thirds = (lax.bitcast_convert_type(root, jnp.int32) - 1 >> 23) + (thrice - 127)  # ceil(log2(root)) + thrice - 1
    n = (jnp.maximum(thirds, 0) * (11 << 18)) & 0x7F800000  # a third of it, where a float has its exponent
    points = _float_of(n + (127 << 23))
    steps = _float_of(((124 + thrice) << 23) - (n + n))  # 8^(bits - 1) / points^2
    place = root * steps * (8 / 7)  # from zero, in steps of the octade
    code = place + (points * (6 / 7) - 1)
    if dtype == "uint8":  # the nearer number, or the mean, is one of the squares
        below = jnp.floor(code)
        share = code - below
        both = place + place - share
        code = _where(scale < 0, code, below + share * both / (both - share + 1))
    unit = 0.5 if bits is None else (bits >> 8).astype(jnp.float32) * (2.0**-24 * (1 - 2 * _SNAP)) + _SNAP
    code = jnp.floor(code + unit)
    code = lax.sign(x) * jnp.maximum(code, 1)  # zero has no sign
    return (code if dtype == "int8" else code + _where(scale < 0, lax.full_like(code, _MIDDLE), 0)).astype(dtype)


def _from_code(code: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    code = code if dtype == "int8" else code - _where(scale < 0, lax.full_like(code, _MIDDLE), 0)
    thrice, size = _thrice_bits(scale, dtype), lax.abs(code)
    n = _float_of(lax.bitcast_convert_type(size, jnp.uint32) & 0x7F800000)  # the power of two that is not above it
    unit = 2.0**-thrice if isinstance(thrice, int) else _float_of((127 - thrice) << 23)
    point = n * n * (7 * size - 6 * n + 7) * unit
    sign = lax.sign(code)
    return (sign if dtype == "int8" else _where(scale < 0, lax.neg(sign), point)) * point * scale


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
    """A stored leaf of the state."""

    values: Any  # an array of the leaf's shape and the format's dtype
    values_scale: Any  # a float32 array of shape (..., blocks); None if the format has no scales
    storage: Storage
    dtype: str  # the name of the dtype that the optimizer sees


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


def is_node(x: Any) -> bool:
    return isinstance(x, (StoredState, Encoded)) or is_on_disk(x)


def rules_of(storage: Any) -> Rules:
    """Check ``storage`` as ``offload`` takes it."""
    of_paths = isinstance(storage, Mapping)
    first_matches("storage", list(storage) if of_paths else [], [])  # an error for no regular expression
    given = storage if of_paths else {} if storage is None else {None: storage}
    for x in given.values():
        if isinstance(x, (Mapping, Sequence)) and not isinstance(x, str):
            raise ValueError(f"storage: expected a dtype, or a mapping from paths of the state to dtypes; got {x!r}.")
    return tuple((rule, x if isinstance(x, Storage) else Storage(x)) for rule, x in given.items())


def formats(rules: Rules, state: Any, params: Any, min_bytes: int) -> list[Storage | None]:
    """Return the format of every leaf of a plain state; ``None`` for a leaf that keeps its dtype.

    The first rule counts that matches whole components of a path in the state, ``0/mu/layers/w``. One that matches no
    leaf, or a leaf that no format can store, is an error.
    """
    flat = leaves_with_paths(state)
    arrays = [k for k, (_, x) in enumerate(flat) if not stays(x, 0)]
    names = [keystr(flat[k][0], simple=True, separator="/") for k in arrays]
    patterns = ["" if rule is None else f"(?:^|(?<=/))(?:{rule})(?=/|$)" for rule, _ in rules]
    first, unused = first_matches("storage", patterns, names)
    unmatched = [rules[k][0] for k in unused if rules[k][0] is not None]
    if unmatched and jax.tree.leaves(params):  # optax probes with placeholders
        fix = f"Rules match whole components of these paths: {', '.join(names)}."
        none = "This optimizer keeps none, so there is nothing to store in fewer bits: leave storage out."
        raise ValueError(f"storage: {unmatched} match no state leaf of rank 1 or more. {fix if names else none}")
    masters = {id(x) for x in masters_in(state)}
    found: list[Storage | None] = [None] * len(flat)
    for k, name, number in zip(arrays, names, first, strict=True):
        if number < len(rules):
            x, (rule, storage) = flat[k][1], rules[number]
            why = _unfit(x, storage, id(x) in masters)
            if why and (rule is not None or (jnp.issubdtype(x.dtype, jnp.floating) and id(x) not in masters)):
                raise ValueError(f"storage: {rule or storage.dtype!r}, for the state leaf {name}: {why}")
            shrinks = not why and not stays(x, min_bytes) and encoded_bytes(np.shape(x), storage) < nbytes(x)
            found[k] = storage if shrinks else None
    return found


def _unfit(x: Any, storage: Storage, master: bool) -> str:
    """Return why a leaf cannot be stored in this format; empty if it can."""
    if master:
        return "it is a master parameter. Take it out; with_master_params(dtype=, low_bits=) says how masters are kept."
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"it is {x.dtype}, and only floating numbers are stored in fewer bits. Take it out."
    if x.dtype.itemsize > 4:
        return f"it is {x.dtype}, whose range exceeds float32's. Take it out."
    if x.dtype.itemsize < 4 and storage.dtype in INTEGERS:
        return (
            f"it is {x.dtype}, which cannot hold the numbers of {storage.dtype}, so it would drift. optax makes "
            "moments in the parameters' dtype. Use float32 ones: jo.offload(jo.with_master_params(inner), "
            "storage=...), or for mu alone optax.adamw(..., mu_dtype=jnp.float32). Or use a format that fits 16 bits, "
            "'float8_e4m3fn' or 'float8_e5m2'; or give no format for this leaf, which takes 2 bytes already."
        )
    return ""


def warn_of_unstored(rules: Rules, state: Any) -> None:
    """Warn of complex leaves, which one dtype for all leaves cannot store."""
    flat = leaves_with_paths(state.inner_state)
    left = [keystr(path) for path, x in flat if not stays(x, 0) and jnp.issubdtype(x.dtype, jnp.complexfloating)]
    if left and rules[0][0] is None:
        warnings.warn(
            f"storage: {rules[0][1].dtype!r} leaves {len(left)} complex leaves of the state unchanged, the first is "
            f"{left[0]}: no format stores complex numbers. To avoid this warning, name the other leaves, such as "
            "storage={'mu/layers': 'bfloat16'}; or train real and imaginary parts apart "
            "(optax.contrib.split_real_and_imaginary).",
            stacklevel=5,
        )


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
        before = plain(state, lambda x: decoded(x) if isinstance(x, Encoded) else x)
        updates, after = inner.update(updates, before, params, **extra_args)
        olds, treedef = jax.tree.flatten(state.inner_state, is_leaf=is_node)
        leaves = list(zip(olds, jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
        # a leaf that the update passes through keeps its codes
        changed = [k for k, (old, was, new) in enumerate(leaves) if isinstance(old, Encoded) and new is not was]
        kept = [old if isinstance(old, Encoded) else new for old, _, new in leaves]
        seeds = composite(_seeds, state.rounds, n=len(changed)) if changed else []
        for k, seed in zip(changed, seeds, strict=True):
            kept[k] = encoded(leaves[k][2], olds[k].storage, seed, olds[k].dtype)
        return updates, StoredState(state.rounds + 1, jax.tree.unflatten(treedef, kept))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _seeds(rounds: jax.Array, *, n: int) -> list[jax.Array]:
    """Return a seed for each of ``n`` leaves. The number of the round is mixed, which makes the rounds independent.

    Each seed is made of an opaque copy of the one before: XLA compiles the operation, which is then the same, once.
    """
    seeds = [opaque(mixed(rounds.astype(jnp.uint32)))]
    for _ in range(n - 1):
        seeds.append(opaque(jax.lax.add(seeds[-1], np.uint32(0x9E3779B9))))
    return seeds


def encoded(x: jax.Array, storage: Storage, seed: Any = None, dtype: str | None = None) -> Encoded:
    values, *scale = composite(encode, x, *([] if seed is None else [seed]), storage=storage)
    return Encoded(values, scale[0] if scale else None, storage, dtype or np.dtype(x.dtype).name)


def decoded(x: Encoded) -> jax.Array:
    return composite(decode, *jax.tree.leaves(x), storage=x.storage)[0].astype(x.dtype)


def plain(state: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a state without its stored nodes. ``leaf`` maps its leaves, which may be ``Encoded`` or on disk."""

    def one(x: Any) -> Any:
        return plain(x.inner_state, leaf) if isinstance(x, StoredState) else leaf(x)

    return jax.tree.map(one, state, is_leaf=is_node)


def stored_like(wanted: Any, state: Any) -> Any:
    """Encode a plain state like ``wanted``, each leaf in its place; ``rounds`` starts at 0."""

    def one(wanted: Any, x: Any) -> Any:
        if isinstance(wanted, StoredState):
            return StoredState(np.zeros((), np.int32), stored_like(wanted.inner_state, x))
        if not isinstance(wanted, Encoded):
            return x
        got, expected = (np.dtype(x.dtype).name, np.shape(x)), (wanted.dtype, wanted.values.shape)
        if got != expected:
            raise ValueError(f"a leaf is {got[0]}{list(got[1])}, and tx has {expected[0]}{list(expected[1])}")
        return in_place(encoded, x, wanted.storage)

    return jax.tree.map(one, wanted, state, is_leaf=is_node)


def in_place(convert: Callable[..., Any], x: Any, *options: Any) -> Any:
    """Return ``convert(x, *options)`` in the memory of ``x``, a leaf, plain or ``Encoded``: a state, which need not fit
    on the device, is converted leaf by leaf."""
    new = convert(jax.tree.map(memory.to_device, x), *options)
    return jax.tree.map(memory.to_host, new) if memory.on_host(jax.tree.leaves(x)[0]) else new


def adopted(state: Any, params: Any, init: Callable[[Any], Any]) -> StoredState:
    """Check that a state is stored as ``init`` stores it, and restore its nodes: ``nnx.update`` makes dicts of them.

    A leaf keeps that format even if the first update returns it in another dtype: momentum of a bfloat16 or integer
    leaf becomes float32 in some optimizers.
    """
    wanted = jax.eval_shape(lambda params: init(memory.loaded(params)), params)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Encoded))
    if not any(isinstance(x, Encoded) for x in nodes) and types_of(state) == types_of(wanted):
        state = jax.tree.unflatten(jax.tree.structure(wanted), jax.tree.leaves(state))
    fix = "Convert it: jo.from_plain(tx, jo.to_plain(old_tx, state)), params given where their tree is not in it."
    if not isinstance(state, StoredState):
        raise ValueError(f"state: is a {type(state).__name__}, not one that offload(..., storage=) keeps. {fix}")
    flat = tree_flatten_with_path(state.inner_state, is_leaf=is_node)[0]
    for (path, x), like in zip(flat, jax.tree.leaves(wanted.inner_state, is_leaf=is_node), strict=False):
        got, says = (getattr(each, "storage", None) for each in (x, like))
        if got != says:
            raise ValueError(
                f"state: {keystr(path)} is stored as {got or x.dtype}, and storage says {says or like.dtype}. {fix}"
            )
    return state
