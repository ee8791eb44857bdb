"""Leaves on disk, given to orbax: each is read when orbax writes it, so that few are in memory at a time.

orbax takes arrays, and copies those of NumPy before it writes them in the background. What is given to it is an array
without memory, whose copy reads the leaf when tensorstore asks for its values. That is no promise of orbax's, so it is
tried before it is relied on.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_offload._base.on_disk import OnDisk, is_on_disk, read_to
from jax_offload._interop.checksums import checksums

_Read = Callable[[], np.ndarray[Any, Any]]


class Late(np.ndarray):
    """An array of zeros in one element's memory. ``read`` gives its values."""

    read: _Read

    def __deepcopy__(self, memo: Any) -> Any:
        return _WhenAsked(self)


class _WhenAsked:
    """What tensorstore takes for an array."""

    def __init__(self, leaf: Late) -> None:
        self.shape, self.dtype, self.ndim, self._read = leaf.shape, leaf.dtype, leaf.ndim, leaf.read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self._read()


def late(shape: tuple[int, ...], dtype: Any, read: _Read) -> Late:
    found = np.broadcast_to(np.zeros((), dtype), shape).view(Late)
    found.read = read
    return found


def read_late(ocp: Any, tree: Any) -> Any:
    """A tree whose leaves on disk are read when orbax writes them.

    Those that are divided between processes are read now, as orbax asks only one of these for an array of NumPy.

    Raises:
      ValueError: this orbax would write something else in their place.
    """

    def sharded(x: Any) -> bool:
        return is_on_disk(x) and not x.sharding.is_fully_addressable

    tree = jax.tree.map(lambda x: read_to(x, x.sharding) if sharded(x) else x, tree, is_leaf=is_on_disk)
    if not any(map(is_on_disk, jax.tree.leaves(tree, is_leaf=is_on_disk))):
        return tree
    if not _works(ocp):
        raise ValueError(
            "jo.save_args: leaves of the state are on disk, and this orbax does not read them when it writes them. "
            "Fix: disk.commit(step, tree) saves the state where it is; jo.restore(disk, target) reads that."
        )
    return jax.tree.map(lambda x: _late(x) if is_on_disk(x) else x, tree, is_leaf=is_on_disk)


def sums_of(leaves: list[Any]) -> list[int]:
    """Their checksums; of those that are read late one after the other."""
    here = iter(checksums([x for x in leaves if not isinstance(x, Late)]))
    return [checksums([x.read()])[0] if isinstance(x, Late) else next(here) for x in leaves]


def _late(leaf: OnDisk) -> Late:
    home, name, token = leaf.place.home, leaf.place.name, leaf.token
    return late(leaf.shape, leaf.dtype, lambda: home.array(name, token))


@functools.cache
def _works(ocp: Any) -> bool:
    want = np.arange(6, dtype=np.float32).reshape(2, 3)
    with tempfile.TemporaryDirectory() as folder, ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        tree = {"x": late(want.shape, want.dtype, lambda: want)}
        checkpointer.save(Path(folder) / "x", args=ocp.args.StandardSave(tree))
        found = checkpointer.restore(Path(folder) / "x", args=ocp.args.StandardRestore({"x": np.zeros_like(want)}))
    return np.array_equal(found["x"], want)
