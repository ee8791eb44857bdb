"""A state that is stored in fewer bits than its optimizer computes with."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_offload._base import memory
from jax_offload._base.barriers import opaque
from jax_offload._base.own_primitives import composite
from jax_offload._base.paths import KeyPath
from jax_offload._placement.placement import stays
from jax_offload._precision.elements import mixed
from jax_offload._precision.formats import Storage, decode, encode, encoded_shapes
from jax_offload._precision.masters import MasterState

Rules = tuple[tuple[str | None, Storage], ...]  # ``None``: all that can be stored


@functools.partial(
    # in the order of their names, so that a dict of both has its leaves in the same order
    jax.tree_util.register_dataclass,
    data_fields=["values", "values_scale"],
    meta_fields=["storage", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A leaf of the state as it is stored.

    Attributes:
      values: of the leaf's shape, in the storage's dtype.
      values_scale: float32, of shape ``(..., blocks)``; ``None`` where the format has none.
      storage: the format.
      dtype: of the leaf that the optimizer sees, by name.
    """

    values: Any
    values_scale: Any
    storage: Storage
    dtype: str


class StoredState(NamedTuple):
    """The state of ``offload(..., storage=)``.

    Attributes:
      rounds: the number of updates, an int32 scalar, which seeds stochastic rounding.
      inner_state: the state of the wrapped transformation, with some leaves ``Encoded``. Their ``values`` have the
        leaf's shape and the format's dtype; their ``values_scale`` is a float32 for each block of the last axis, or
        ``None`` if the format has no blocks.

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
    """``storage`` as ``offload`` takes it, checked."""
    if storage is None:
        return ()
    if not isinstance(storage, Mapping):
        return ((None, _format(storage)),)
    for rule in storage:
        try:
            re.compile(rule)
        except (re.error, TypeError) as error:
            raise ValueError(f"storage: {rule!r} is not a regular expression: {error}.") from error
    return tuple((rule, _format(value)) for rule, value in storage.items())


def _format(value: Any) -> Storage:
    if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
        raise ValueError(f"storage: expected a dtype, or a mapping from paths of the state to dtypes; got {value!r}.")
    return value if isinstance(value, Storage) else Storage(value)


def formats(rules: Rules, state: Any, params: Any, min_bytes: int) -> list[Storage | None]:
    """For every leaf of a plain state how it is stored; ``None``: as it is.

    A rule is a regular expression that matches whole components of a path in the state, ``0/mu/layers/w``. The first
    that matches counts.

    Raises:
      ValueError: a rule matches nothing that can be stored otherwise, or a leaf that cannot be.
    """
    found: list[Storage | None] = []
    used: set[str | None] = {None}
    names = []  # of what a rule may match
    masters = _master_paths(state)
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        names.extend([] if stays(x, 0) else [name])
        matching = [] if stays(x, 0) else [each for each in rules if _match(each[0], name)]
        used.update(rule for rule, _ in matching)
        rule, storage = matching[0] if matching else (None, None)
        master = any(path[: len(prefix)] == prefix for prefix in masters)
        why = _unfit(x, storage, master) if storage is not None else ""
        if why and (rule is not None or (jnp.issubdtype(x.dtype, jnp.floating) and not master)):
            raise ValueError(f"storage: {rule or rules[0][1].dtype!r}, for the state leaf {name}: {why}")
        smaller = storage is not None and not why and not stays(x, min_bytes) and _is_smaller(x, storage)
        found.append(storage if smaller else None)
    unused = [rule for rule, _ in rules if rule not in used]
    if unused and jax.tree.leaves(params):  # optax probes with placeholders
        raise ValueError(
            f"storage: {unused} match no state leaf of rank 1 or more. "
            + (
                f"Rules match whole components of these paths: {', '.join(names)}."
                if names
                else "This optimizer keeps none, so there is nothing to store in fewer bits: leave storage out."
            )
        )
    return found


def check_unsigned(state: Any, found: Sequence[Storage | None], bounds: Sequence[tuple[float, float]]) -> None:
    """Raises ``ValueError`` where a leaf that may become negative is to be stored in an unsigned format.

    Args:
      state: a plain state.
      found: the format of each leaf.
      bounds: the least and the largest value of each leaf, as far as the optimizer's equations show them.
    """
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    rows = zip(flat, found, bounds, strict=True)
    if wrong := [path for (path, _), form, (least, _) in rows if form is not None and form.unsigned and not least >= 0]:
        name = jax.tree_util.keystr(wrong[0], simple=True, separator="/")
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(
            f"storage: uint8 is for what is never negative, and the equations of the optimizer's update do not show "
            f"that of the state leaf {name}{more}: a negative number would become NaN. Fix: 'int8' (or 'bfloat16') for "
            "it, and uint8 for second moments: storage={'mu': 'int8', 'nu': 'uint8'}."
        )


def _unfit(x: Any, storage: Storage, master: bool) -> str:
    """Why a leaf cannot be stored so; empty where it can."""
    if master:
        return "it is a master parameter. Take it out; with_master_params(dtype=, low_bits=) says how masters are kept."
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"it is {x.dtype}, and only floating numbers are stored in fewer bits. Take it out."
    if x.dtype.itemsize > 4:
        return f"it is {x.dtype}, of which float32 has not the range. Take it out."
    if x.dtype.itemsize < 4 and storage.dtype in ("int8", "uint8"):
        return (
            f"it is {x.dtype}, which has not the points of {storage.dtype}, so that it would drift. optax makes "
            "moments in the parameters' dtype. Float32 ones: jo.offload(jo.with_master_params(inner), storage=...), or "
            "for mu alone optax.adamw(..., mu_dtype=jnp.float32). Or a format that fits 16 bits: 'float8_e4m3fn', "
            "'float8_e5m2'; or give no format for this leaf, which takes 2 bytes as it is."
        )
    return ""


def _is_smaller(x: Any, storage: Storage) -> bool:
    shapes = encoded_shapes(np.shape(x), storage)
    sizes = [math.prod(shape) * n for shape, n in zip(shapes, (storage.itemsize, 4), strict=True) if shape is not None]
    return sum(sizes) < math.prod(np.shape(x)) * x.dtype.itemsize


def _match(rule: str | None, name: str) -> re.Match[str] | None:
    return re.search("" if rule is None else f"(?:^|(?<=/))(?:{rule})(?=/|$)", name)


def _master_paths(state: Any) -> list[KeyPath]:
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, MasterState))[0]
    return [(*path, jax.tree_util.GetAttrKey("master")) for path, x in nodes if isinstance(x, MasterState)]


def is_encoded(x: Any) -> bool:
    return isinstance(x, Encoded)


def stored(state: Any, found: Sequence[Storage | None]) -> StoredState:
    """A plain state in these formats, rounded to nearest."""
    leaves, treedef = jax.tree.flatten(state)
    kept = [x if storage is None else _encoded(x, storage, None) for x, storage in zip(leaves, found, strict=True)]
    return StoredState(jnp.zeros((), jnp.int32), jax.tree.unflatten(treedef, kept))


def plain(state: StoredState) -> Any:
    """The state that the optimizer sees."""
    return jax.tree.map(lambda x: _decoded(x) if is_encoded(x) else x, state.inner_state, is_leaf=is_encoded)


def next_stored(state: StoredState, before: Any, after: Any) -> StoredState:
    """``after``, a plain state that follows ``before``, in the formats of ``state``, whose plain state that was."""
    olds, treedef = jax.tree.flatten(state.inner_state, is_leaf=is_encoded)
    new = jax.tree.leaves(after)
    changed = [is_encoded(old) and x is not was for old, was, x in zip(olds, jax.tree.leaves(before), new, strict=True)]
    seeds, kept = iter(composite(_seeds, state.rounds, n=sum(changed)) if any(changed) else []), []
    for old, x, again in zip(olds, new, changed, strict=True):
        if again:
            kept.append(_encoded(x, old.storage, next(seeds), old.dtype))
        else:
            kept.append(old if is_encoded(old) else x)
    return StoredState(state.rounds + 1, jax.tree.unflatten(treedef, kept))


def _seeds(rounds: jax.Array, *, n: int) -> list[jax.Array]:
    """A seed for each of ``n`` leaves.

    Each counts on from the one before, which is opaque: so all are made by the same operation, which XLA compiles
    once. What rounds one element in one round has nothing to do with the next, as their number is mixed; between
    leaves it need not be mixed again.
    """
    seeds, number = [], mixed(rounds.astype(jnp.uint32))
    for _ in range(n):
        number = opaque(number)
        seeds.append(number)
        number = jax.lax.add(number, np.uint32(0x9E3779B9))
    return seeds


def as_stored(state: Any, like: Any) -> Any:
    """``state`` with the nodes of ``like``, where its leaves are the same: ``nnx.update`` makes dicts of them."""
    leaves, treedef = jax.tree.flatten(like)
    got = jax.tree.leaves(state)
    same = len(got) == len(leaves) and all(_type(a) == _type(b) for a, b in zip(got, leaves, strict=True))
    return jax.tree.unflatten(treedef, got) if same else state


def _type(x: Any) -> Any:
    return np.shape(x), getattr(x, "dtype", None)


def _encoded(x: jax.Array, storage: Storage, seed: Any, dtype: str | None = None) -> Encoded:
    values, *scale = composite(_encode, x, *([] if seed is None else [seed]), storage=storage)
    return Encoded(values, scale[0] if scale else None, storage, dtype or np.dtype(x.dtype).name)


def _decoded(x: Encoded) -> jax.Array:
    scale = [] if x.values_scale is None else [x.values_scale]
    return composite(_decode, x.values, *scale, storage=x.storage)[0].astype(x.dtype)


def _encode(x: jax.Array, seed: Any = None, *, storage: Storage) -> list[jax.Array]:
    values, scale = encode(x, storage, seed)
    return [values] if scale is None else [values, scale]


def _decode(values: jax.Array, scale: Any = None, *, storage: Storage) -> list[jax.Array]:
    return [decode(values, scale, storage)]


# Leaf by leaf: as whole trees neither state need fit on the device.


def decoded_in_place(x: Encoded) -> jax.Array:
    """The leaf, in the memory where its values are, sharded as they are."""
    return _converted(lambda x: _decoded(x), x, x.values)


def encoded_in_place(x: jax.Array, storage: Storage) -> Encoded:
    return _converted(lambda x: _encoded(x, storage, None), x, x)


def _converted(fun: Any, x: Any, like: jax.Array) -> Any:
    def convert(x: Any) -> Any:
        return fun(jax.tree.map(memory.to_device, x))

    new = convert(x) if isinstance(like, Tracer) else jax.jit(convert)(x)
    return jax.tree.map(memory.to_host, new) if memory.on_host(like) else new
