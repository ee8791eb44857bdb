"""A tree of which some leaves are on disk, as what a commit holds beside them: arrays by number, and what they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jax_offload._base import memory
from jax_offload._base.on_disk import OnDisk, is_on_disk, landed

_TREE = "tree"  # the entry that says what the others are
Extra = dict[str, np.ndarray[Any, Any]]
_Found = Callable[[str], Any]  # from the name of a leaf on disk to what stands for it, or its values


def packed(tree: Any) -> tuple[Extra, dict[str, OnDisk]]:
    """The arrays of a tree and what they are; and by their names there the leaves that are on disk.

    Raises:
      TypeError: a leaf is no array, number or string.
    """
    extra: Extra = {}
    rows: list[dict[str, Any]] = []
    found: dict[str, OnDisk] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_on_disk)[0]:
        row: dict[str, Any] = {"path": keystr(path)}
        if is_on_disk(x):
            row["on disk"] = x.place.name
            found[x.place.name] = x
        elif isinstance(x, (bool, int, float, str)):
            row["value"] = x
        elif hasattr(x, "dtype"):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                row["key"], x = str(jax.random.key_impl(x)), jax.random.key_data(x)
            values = np.asarray(x)
            row |= {"dtype": values.dtype.name, "shape": list(values.shape)}
            # as bytes, as not all who write arrays know bfloat16
            extra[str(len(rows))] = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        else:
            what = type(x).__name__
            raise TypeError(f"tree: {keystr(path)} is a {what}; a commit holds arrays, numbers and strings.")
        rows.append(row)
    return {_TREE: np.frombuffer(json.dumps(rows).encode(), np.uint8), **extra}, found


def unpacked(extra: Mapping[str, np.ndarray[Any, Any]], target: Any, on_disk: _Found, *, lands: bool = False) -> Any:
    """The tree that was committed, each array where the target says.

    Args:
      extra: the commit's arrays.
      target: a tree of its structure; what is on disk, or any array, may be abstract.
      on_disk: of a leaf that is on disk what stands for it, or its values, by its name.
      lands: whether leaves go to the disks that the target names.

    Raises:
      ValueError: the target has other leaves, or of other types.
    """
    rows = json.loads(extra[_TREE].tobytes().decode())
    stored = {row["path"]: (k, row) for k, row in enumerate(rows)}
    wanted, treedef = jax.tree_util.tree_flatten_with_path(target, is_leaf=is_on_disk)
    names = {keystr(path) for path, _ in wanted}
    if names != stored.keys():
        raise ValueError(
            "target: its leaves are not those of the commit.\n"
            f"  only in the target {sorted(names - stored.keys())[:5]}\n"
            f"  only in the commit {sorted(stored.keys() - names)[:5]}\n"
            "Give a tree like the one that was given to commit: jo.abstract_state(tx, params) in the state's place."
        )
    likes = [like for _, like in wanted]
    paths = [keystr(path) for path, _ in wanted]

    def read(numbers: Sequence[int]) -> list[Any]:
        return [_leaf(*stored[paths[k]], paths[k], likes[k], extra, on_disk) for k in numbers]

    return jax.tree.unflatten(treedef, landed(likes, read) if lands else read(range(len(likes))))


def _leaf(number: int, row: Mapping[str, Any], path: str, like: Any, extra: Mapping[str, Any], on_disk: _Found) -> Any:
    if "value" in row:
        return row["value"]
    if "on disk" in row:
        x: Any = on_disk(row["on disk"])
    else:
        x = np.frombuffer(extra[str(number)].tobytes(), jnp.dtype(row["dtype"])).reshape(row["shape"])
        x = x if "key" not in row else jax.random.wrap_key_data(jnp.asarray(x), impl=row["key"])
    _check(path, like, x)
    if is_on_disk(x):
        return x
    if isinstance(like, np.ndarray):
        return x.copy()
    sharding = getattr(memory.off_our_mesh(like), "sharding", None)
    return jax.device_put(x, memory.ambient_sharding() if sharding is None else sharding)


def _check(path: str, like: Any, found: Any) -> None:
    """Raises ``ValueError`` where a leaf is of another type than was committed."""
    got = tuple(np.shape(like)) if not hasattr(like, "shape") else tuple(like.shape), getattr(like, "dtype", None)
    if got != (tuple(found.shape), found.dtype):
        raise ValueError(
            f"target: {path} is {got[1]}{list(got[0])}, and the commit has {found.dtype}{list(found.shape)}. Fix: the "
            "optimizer and the parameters of the run that was committed."
        )
