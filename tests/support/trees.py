"""What tests ask of trees of arrays: where they are, and whether two are the same."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# XLA runs all of its passes. LLVM optimizes less, and compiles in half the time.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def kinds(tree: Any) -> list[str]:
    """The kind of memory of each leaf."""
    return jax.tree.leaves(kinds_of(tree))


def kinds_of(tree: Any) -> Any:
    """The same as a tree."""
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)


def assert_close(got: Any, want: Any, rtol: float) -> None:
    """Leaf by leaf ``‖a − b‖ ≤ rtol ‖b‖``, of equal shapes and types; keys bit by bit."""
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b) + 1e-12, name


def is_on_disk(x: Any) -> bool:
    """Whether ``x`` stands for a leaf on disk."""
    return type(x).__name__ == "OnDisk"


def handles(state: Any) -> list[Any]:
    """What stands in a state for leaves on disk."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_on_disk) if is_on_disk(x)]


def read(tree: Any) -> Any:
    """Copies of the values of all leaves, those on disk too, and of the data of keys."""

    def value(x: Any) -> Any:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(value, tree, is_leaf=is_on_disk)


def assert_equal(got: Any, want: Any) -> None:
    """Leaf by leaf the same values."""
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, jax.tree_util.keystr(path))


def gradients(params: Any, k: int = 0) -> Any:
    """Gradients that differ from element to element, and from step to step with ``k``."""
    return jax.tree.map(lambda p: (jnp.sin(3 * p.astype(jnp.float32) + k) + 0.1).astype(p.dtype), params)


def in_scope(traced: Any, what: str, platform: str = "cuda") -> list[tuple[str, str]]:
    """The leaf and the text of each operation that is lowered as a "prefetch", a "write-back" or an "update"."""
    text = traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)
    name = rf'^(#loc\d+) = loc\("[^"]*jax_offload/{what}/([^"]*)/[^/"]*"'
    scopes = dict(re.findall(name, text, re.MULTILINE))
    lines = ((line, re.search(r"loc\((#loc\d+)\)$", line)) for line in text.splitlines())
    return [(scopes[loc[1]], line) for line, loc in lines if loc and loc[1] in scopes]


def shardings_in(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def copied(tree: Any) -> Any:
    """``tree`` in new buffers of its own, which can be donated."""

    def copy(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.wrap_key_data(jax.random.key_data(x).copy()), x.sharding)
        return jax.device_put(np.array(x), x.sharding)

    return jax.tree.map(copy, tree)


def assert_same(got: Any, want: Any, what: str, tolerance: float = 1e-6) -> None:
    """Law 2, leaf by leaf: the tree, shapes and types are equal, and so are the numbers.

    Whole numbers, booleans and keys exactly; floats of 32 bits to ``‖a − b‖ ≤ tolerance ‖b‖``; floats of 16 bits to one
    unit in the last place of the larger of the two, element by element, in the leaf's own dtype. NaN and
    infinity must stand in the same places.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(got)
    assert treedef == jax.tree.structure(want), what
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        where = f"{what}: {jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        else:
            assert a.weak_type == b.weak_type, where
        x, y = np.asarray(a), np.asarray(b)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            assert np.array_equal(x, y), where
            continue
        bits, tiny = jnp.finfo(x.dtype).nmant, float(jnp.finfo(x.dtype).tiny)
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        x, y = x.astype(wide).ravel(), y.astype(wide).ravel()
        finite = np.isfinite(y)
        assert np.array_equal(x[~finite], y[~finite], equal_nan=True), f"{where}: {x[~finite]} instead of {y[~finite]}"
        x, y = x[finite], y[finite]
        if bits > 10:
            error, scale = np.linalg.norm(x - y), np.linalg.norm(y)
            assert error <= tolerance * scale, f"{where}: off by {error / max(scale, tiny):.1e}"
        elif x.size:
            ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.maximum(np.abs(x), np.abs(y)), tiny))) - bits)
            assert np.all(np.abs(x - y) <= ulp), f"{where}: off by {np.max(np.abs(x - y) / ulp):.1f} ulp"


def eligible(x: Any) -> bool:
    """Whether a leaf may be on the host at all: of rank >= 1, not empty, not a key."""
    return x.ndim > 0 and x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
