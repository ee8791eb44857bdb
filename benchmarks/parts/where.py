"""The memory of arrays, by jax's record and by the driver, which knows their addresses."""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
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


def kinds(tree: Any) -> dict[str, str]:
    """Path -> memory kind; with the driver's word behind it where it says something else."""
    found = {}
    for path, x in tree_flatten_with_path(tree)[0]:
        believed, real = x.sharding.memory_kind, by_driver(x)
        name = keystr(path, simple=True, separator="/")
        found[name] = believed if real in (None, believed) else f"{believed}, in {real} by the driver"
    return found


def misplaced(tree: Any, expected: Any) -> list[str]:
    """Return the leaves whose memory differs from ``expected``, a tree of arrays or shapes."""
    wanted = [x.sharding.memory_kind for x in jax.tree.leaves(expected)]
    return [f"{path}: {kind}" for (path, kind), want in zip(kinds(tree).items(), wanted, strict=True) if kind != want]


def shared(tree: Any) -> list[str]:
    """Addresses at which live arrays of different memory kinds begin.

    Not on a CPU, whose memories are one: there a copy from one kind to another may be no copy.
    """
    at = defaultdict(set)
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and x.size and next(iter(x.devices())).platform != "cpu":
            for address in addresses(x):
                at[address].add(x.sharding.memory_kind)
    return [f"{address:#x}: {', '.join(sorted(found))}" for address, found in at.items() if len(found) > 1]
