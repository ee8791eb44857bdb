"""Store a state in fewer bits than its optimizer computes with."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import keystr

from jax_offload._program import memory
from jax_offload._program.arrays import nbytes, types_of
from jax_offload._program.barriers import opaque
from jax_offload._program.own_primitives import composite
from jax_offload._program.paths import KeyPath, first_matches, leaves_with_paths
from jax_offload._state.formats import Storage, decode, encode, encoded_bytes, mixed
from jax_offload._state.masters import MasterState
from jax_offload._state.placement import stays

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
    found, masters = list[Storage | None](), _master_paths(state)
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


def _master_paths(state: Any) -> list[KeyPath]:
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, MasterState))[0]
    return [(*path, jax.tree_util.GetAttrKey("master")) for path, x in nodes if isinstance(x, MasterState)]


def is_encoded(x: Any) -> bool:
    return isinstance(x, Encoded)


def is_stored(x: Any) -> bool:
    return isinstance(x, StoredState)


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
    scale = [] if x.values_scale is None else [x.values_scale]
    return composite(decode, x.values, *scale, storage=x.storage)[0].astype(x.dtype)


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
        before = jax.tree.map(lambda x: decoded(x) if is_encoded(x) else x, state.inner_state, is_leaf=is_encoded)
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
    wanted = jax.eval_shape(init, params)
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
