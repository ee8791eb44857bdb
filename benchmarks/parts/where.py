"""The memory of arrays, by jax's record and by the driver, which knows their addresses."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
KINDS = {1: "pinned_host", 2: "device"}  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


@functools.cache
def driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def addresses(x: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def by_driver(x: jax.Array) -> str | None:
    """The kind of memory that an array's address is in; ``None``: the driver does not tell, or there is none.

    ``memory_kind`` is what jax believes. A device buffer that was reused for a host leaf would still be called one.
    """
    if driver() is None:
        return None
    found = set()
    for address in addresses(x):
        kind = ctypes.c_uint(0)
        if driver().cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, ctypes.c_uint64(address)):
            return None
        found.add(KINDS.get(kind.value))
    return found.pop() if len(found) == 1 else None


def kind_of(x: jax.Array) -> str:
    """Its memory kind; with the driver's word behind it where it says something else."""
    believed, real = x.sharding.memory_kind, by_driver(x)
    return believed if real in (None, believed) else f"{believed}, in {real} by the driver"


def kinds(tree: Any) -> dict[str, str]:
    """The memory kind of each path."""
    return {keystr(path, simple=True, separator="/"): kind_of(x) for path, x in tree_flatten_with_path(tree)[0]}


def misplaced(tree: Any, expected: Any) -> list[str]:
    """Return the leaves whose memory differs from ``expected``, a tree of arrays or shapes."""
    wanted = [x.sharding.memory_kind for x in jax.tree.leaves(expected)]
    return [f"{path}: {kind}" for (path, kind), want in zip(kinds(tree).items(), wanted, strict=True) if kind != want]
