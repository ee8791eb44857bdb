"""Check the arguments of ``init`` and ``update``; errors and warnings name the leaf and the argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr

from jax_offload._disk.leaves import is_on_disk
from jax_offload._program import memory
from jax_offload._program.donation import Home
from jax_offload._program.memory import on_host
from jax_offload._program.paths import leaves_with_paths, names_of
from jax_offload._program.trace import was_on_host
from jax_offload._state.around import facts
from jax_offload._state.placement import Leaf

_ORDER = "The order is tx.update(updates, state, params), and jo.update_params(tx, grads, state, params)."


def check_inner(inner: Any, argument: str = "inner") -> None:
    """Raise ``TypeError`` if ``inner`` is not a transformation but, for example, the function that makes one."""
    if isinstance(inner, optax.GradientTransformation):
        return
    name = getattr(inner, "__name__", "") if callable(inner) else ""
    fix = f"Call it first: {name}(learning_rate)." if name else "For example optax.adamw(1e-3)."
    raise TypeError(f"{argument}: expected an optax.GradientTransformation, got {inner!r}. {fix}")


def check_transformation(tx: Any, call: str) -> None:
    """Raise ``TypeError`` if ``tx`` is not a transformation but, for example, the parameters."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"tx: expected an optax.GradientTransformation, got a {type(tx).__name__}. The order of arguments is "
            f"{call}."
        )


AROUND = (
    "tx: optax.MultiSteps is around an offload(...). It chooses between the old and the new state in every call, so "
    "the whole state would be copied between memories at once. Fix: jo.offload(optax.MultiSteps(optimizer, k))."
)


def check_not_in_multi_steps(tx: Any, state: Any) -> None:
    """Raise ``ValueError`` if an ``offload`` inside a ``MultiSteps`` keeps the state on the host."""
    around = isinstance(getattr(tx.update, "__self__", None), optax.MultiSteps)
    if around and any(on_host(x) or is_on_disk(x) for x in jax.tree.leaves(state, is_leaf=is_on_disk)):
        raise ValueError(AROUND)


def check_params(params: Any) -> None:
    """Raise ``ValueError`` for a state in the parameters' place, and ``TypeError`` for a leaf that is not an array."""
    check_no_state("params", params, "Give the tree that the model computes with, as in tx.init(params).")
    for path, x in leaves_with_paths(params):
        if not isinstance(x, Number) and not any(hasattr(x, name) for name in ("shape", "__jax_array__")):
            what = f"{keystr(path)} is a {type(x).__name__}" if path else f"got {x!r}"
            raise TypeError(
                f"params: expected arrays, or values with shape and dtype; {what}. Leave out the leaves that receive "
                "no gradient."
            )


def check_no_state(argument: str, tree: Any, fix: str = _ORDER) -> None:
    """Raise ``ValueError`` for an optimizer's state in the place of the parameters, or of gradients like them."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]:
        if is_state(x):
            where = f" in {keystr(path)}" if path else ""
            raise ValueError(
                f"{argument}: expected the parameters, or a tree like them, and there is an optimizer's state{where}, "
                f"a {type(x).__name__}. {fix}"
            )


def is_state(x: Any) -> bool:
    """Return whether ``x`` is a state of optax or of this package; optax names its trees of parameters otherwise."""
    kind = type(x)
    known = kind.__module__.partition(".")[0] in ("optax", "jax_offload")
    return known and isinstance(x, tuple) and kind.__name__.endswith("State")


def check_gradients(updates: Any, params: Any, cause: Exception | None = None) -> None:
    """Raise ``ValueError`` for a gradient of another shape than its parameter, or for other trees if an update failed.

    Gradients with more axes belong to single examples, which ``optax.contrib.dpsgd`` takes.
    """

    def names(tree: Any) -> list[str]:
        return names_of([path for path, _ in leaves_with_paths(tree)])

    if params is None:
        return
    if jax.tree.structure(updates) == jax.tree.structure(params):
        for k, (p, g) in enumerate(zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True)):
            if np.shape(g) != np.shape(p) and np.ndim(g) <= np.ndim(p):
                raise ValueError(
                    f"updates: the gradient of {names(params)[k] or 'params'} has the shape {np.shape(g)}, and the "
                    f"parameter {np.shape(p)}. Give gradients of the parameters that are given: jax.grad of a function "
                    "of params."
                )
    elif cause is not None and (given := {*names(updates)}) != (wanted := {*names(params)}):
        missing, more = (", ".join(sorted(x)[:5]) or "none" for x in (wanted - given, given - wanted))
        raise ValueError(
            f"updates: their tree differs from the parameters'; without a gradient: {missing}; without a parameter: "
            f"{more}. Give the gradients of these parameters: jax.grad of a function of params."
        ) from cause


def check_on_device(updates: Any, params: Any, why: str, state: Any = None) -> None:
    """Raise ``ValueError`` if parameters, gradients or a state are in host memory; ``why`` says why they cannot be."""
    for argument, tree in (("params", params), ("updates", updates), ("state", state)):
        for path, x in leaves_with_paths(tree):
            if on_host(x):
                raise ValueError(
                    f"{argument}: {keystr(path) or 'the array'} is in pinned host memory, and {why}. Fix: move them "
                    f"inside the step, {argument} = jo.to_device({argument}), or keep them on the device."
                )


def check_managed(state: Any, cause: Exception) -> None:
    """Raise ``ValueError`` if an update failed because no ``offload`` loads a state leaf from host memory."""
    names = [keystr(path) for path, x in leaves_with_paths(state) if on_host(x)]
    if names and "memory_space" in str(cause):
        raise ValueError(
            f"state: {len(names)} leaves are in pinned host memory, the first is {names[0]}, and no offload(...) in tx "
            "loads all of them. Fix: state = jo.to_host(tx, state), which moves each leaf to where tx keeps it."
        ) from cause


def check_state(init: Callable[[Any], Any], state: Any, like: Any, cause: Exception | None) -> None:
    """Raise ``ValueError`` if the state's tree or a leaf's shape is not the one that ``init`` gives."""
    try:
        expected = jax.eval_shape(init, like)
    except Exception:  # init cannot run on these parameters: the original error says more
        return
    check_like(state, expected, "state = tx.init(params) makes one for these.", cause)


def check_like(state: Any, expected: Any, fix: str, cause: Exception | None = None, *, dtypes: bool = False) -> None:
    """Raise ``ValueError`` if a state has another tree, or a leaf of another shape or dtype, than is expected."""
    flat, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_on_disk)
    if tree != jax.tree.structure(expected):
        raise ValueError(
            "state: its tree is not the one that this optimizer's init gives; was it made by another optimizer, or "
            f"for other parameters? {fix}\n  got      {tree}\n  expected {jax.tree.structure(expected)}"
        ) from cause
    for (path, x), wanted in zip(flat, jax.tree.leaves(expected), strict=True):
        dtype = getattr(x, "dtype", None)
        if np.shape(x) != wanted.shape or (dtypes and dtype != wanted.dtype):
            got = f"the shape {np.shape(x)}" + (f" and dtype {dtype}" if dtypes else "")
            gives = f"{wanted.shape}" + (f" and {wanted.dtype}" if dtypes else "")
            raise ValueError(
                f"state: {keystr(path)} has {got}, and this optimizer's init gives {gives}; was it made for other "
                f"parameters? {fix}"
            ) from cause


def shapes_of(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """Return the structure of a tree, and the shapes of its leaves."""
    return jax.tree.structure(tree), [np.shape(x) for x in jax.tree.leaves(tree)]


def arrived(home: Home, leaves: Sequence[Any], plan: Sequence[Leaf]) -> None:
    """Warn if a state that has been in host memory arrives at an ``update`` in device memory.

    A resident state, which has never been in host memory, is no fault: the update moves it there.
    """
    home.updates()
    at_home = [(x, leaf) for x, leaf in zip(leaves, plan, strict=True) if leaf.host and isinstance(x, jax.Array)]
    away = [(x, leaf) for x, leaf in at_home if not on_host(x)]
    if not facts().runs:
        return
    if at_home and not away:
        home.reached = True
    elif away and (home.reached or any(was_on_host(x) for x, _ in away)):
        size = sum(leaf.nbytes for _, leaf in away)
        home.tell(
            f"offload(): {len(away)} leaves of the optimizer state ({size} bytes, the first is {away[0][1].path}) "
            "were in host memory and arrive at update in device memory: something between has moved them. Trainers "
            "do with jax.lax.with_sharding_constraint or jax.device_put and shardings that name no memory (Tunix's "
            "PeftTrainer before its first step under `with mesh:`; MaxText in the step itself), restores without a "
            "target do, pickle and NumPy do. This update puts them back, but until it has, all of them are on the "
            "device; if they are moved at every step, nothing is gained. Fix: leave out the move, or "
            "jax_offload.to_host(tx, state) after it, or move with the shardings of "
            "jax_offload.abstract_state(tx, params). See docs/trainers.md."
        )


def check_eager(params: Any, rows: Sequence[Leaf], leaves: Sequence[Any]) -> None:
    """Check what only concrete parameters tell: whether the platform can hold the state, and if they are committed."""
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    state = [x for leaf, x in zip(rows, leaves, strict=True) if leaf.host]
    if not state and not any(leaf.disk for leaf in rows):
        return
    devices = {d for x in arrays for d in x.sharding.addressable_devices}
    memory.check_platform(devices)
    memory.check_host_pool(state, next(iter(devices)).platform if devices else jax.default_backend())
    in_bytes = any(x.dtype.itemsize == 1 for x in state)
    if in_bytes and any(d.platform == "tpu" for d in devices):
        warnings.warn(
            "storage: on a TPU XLA copies an 8-bit leaf that streams in chunks as a whole, at every chunk. "
            "bfloat16 and float16 stream as they should (docs/precision.md).",
            stacklevel=3,
        )
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    loose = [(path, x) for path, x in flat if not getattr(x, "committed", False)]
    if loose and not memory.mesh_is_set():
        path, first = loose[0]
        what = "" if isinstance(first, jax.Array) else ", a NumPy array"
        warnings.warn(
            "offload(): the parameters are not committed to a device (the first is "
            f"{keystr(path) or 'params itself'}{what}). jax commits whatever a step with host memory returns, so the "
            "second step would compile again. Fix: params = jax.device_put(params, jax.devices()[0]) (or a "
            "NamedSharding) before init, or jax.set_mesh.",
            stacklevel=3,
        )
