"""The tree of a commit: all that is not on disk already, as numbered arrays and one array that describes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jax.tree_util import keystr

from jax_offload._base import memory
from jax_offload._base.arrays import is_array
from jax_offload._base.on_disk import OnDisk, is_on_disk, read_into
from jax_offload._base.shardings import Parts, assembled, box_of_shape, boxes_of, gathered, parts_here, shape_of
from jax_offload._disk.leaves import check_covered

_TREE = "tree"  # the array that says what the others are
_Found = Callable[[str, Sharding], Any]  # a leaf's name and place in host memory -> its placeholder, or its values


def packed(tree: Any) -> tuple[dict[str, Any], dict[str, OnDisk]]:
    """Return the arrays of a tree that are not on disk, and its leaves that are, by their names there.

    The arrays are copied to the host when they are written, a few at a time; the tree must not change before that.

    Raises:
      TypeError: a leaf is not an array, a number or a string.
      ValueError: an array was donated.
    """
    beside, rows, found = dict[str, Any](), list[dict[str, Any]](), dict[str, OnDisk]()
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_on_disk)[0]:
        row: dict[str, Any] = {"path": keystr(path)}
        if is_on_disk(x):
            row["on disk"] = x.place.name
            found[x.place.name] = x
        elif isinstance(x, (bool, int, float, str)):
            row["value"] = x
        elif is_array(x):
            _check_stored(keystr(path), x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                row["key"], x = str(jax.random.key_impl(x)), jax.random.key_data(x)
            row |= {"dtype": np.dtype(x.dtype).name, "shape": list(np.shape(x))}
            if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
                parts = parts_here(x)
                row["parts"] = [box for box, _ in parts]
                beside |= {f"{len(rows)}.{k}": values for k, (_, values) in enumerate(parts)}
            else:
                # An array keeps its copy on the host for as long as it lives; the shard is another array.
                replicated = isinstance(x, jax.Array) and x.is_fully_replicated
                beside[str(len(rows))] = x.addressable_data(0) if replicated else x
        else:
            what = type(x).__name__
            raise TypeError(f"tree: {keystr(path)} is a {what}; a commit holds arrays, numbers and strings.")
        rows.append(row)
    return {_TREE: np.frombuffer(json.dumps(rows).encode(), np.uint8), **beside}, found


def _check_stored(path: str, x: Any) -> None:
    """Raise where an array has no values, or a dtype that could not be read again."""
    if isinstance(x, Tracer):
        raise TypeError(f"tree: {path} is traced. Fix: call disk.commit outside any jit, on the step's results.")
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(
            f"tree: {path} is {x.dtype}{list(x.shape)} that was donated to a step, and is deleted. Fix: commit the "
            "step's results instead of its arguments."
        )
    if isinstance(x.dtype, np.dtype) and (x.dtype.hasobject or not _is_named(x.dtype)):
        raise TypeError(
            f"tree: {path} is an array of {x.dtype!r}; a commit holds numbers in this machine's byte order. "
            "Fix: give text as a str; convert other dtypes with x.astype(...)."
        )


def _is_named(dtype: np.dtype[Any]) -> bool:
    """Whether the name of a dtype identifies it; names of text, records and other byte orders do not."""
    try:
        return jnp.dtype(dtype.name) == dtype
    except TypeError:
        return False


def unpacked(beside: Mapping[str, np.ndarray[Any, Any]], target: Any, on_disk: _Found, *, lands: bool = False) -> Any:
    """Return the tree that was committed, each array where the target says.

    Args:
      beside: the commit's arrays.
      target: a tree of the same structure; leaves on disk, and any array, may be abstract.
      on_disk: gives what stands for a leaf on disk, or its values.
      lands: whether leaves go to the disks that the target names.

    Raises:
      ValueError: the target has other leaves, or of other types.
    """
    rows = json.loads(beside[_TREE].tobytes().decode())
    stored = {row["path"]: (k, row) for k, row in enumerate(rows)}
    wanted, treedef = jax.tree_util.tree_flatten_with_path(target, is_leaf=is_on_disk)
    names = {keystr(path) for path, _ in wanted}
    if names != stored.keys():
        raise ValueError(
            "target: its leaves differ from the commit's.\n"
            f"  only in the target {sorted(names - stored.keys())[:5]}\n"
            f"  only in the commit {sorted(stored.keys() - names)[:5]}\n"
            "Give a tree like the committed one, with jo.abstract_state(tx, params) in the state's place, where tx is "
            "the optimizer of that run, with its storage= and its parameters' names."
        )
    likes = [like for _, like in wanted]
    paths = [keystr(path) for path, _ in wanted]

    def read(indices: Sequence[int]) -> list[Any]:
        return [_leaf(*stored[paths[k]], paths[k], likes[k], beside, on_disk) for k in indices]

    return jax.tree.unflatten(treedef, read_into(likes, read) if lands else read(range(len(likes))))


def _leaf(number: int, row: Mapping[str, Any], path: str, like: Any, beside: Mapping[str, Any], on_disk: _Found) -> Any:
    if "value" in row:
        return row["value"]
    place = _place_of(like)
    if "on disk" in row:
        x: Any = on_disk(row["on disk"], memory.with_kind(place, memory.HOST_KIND))
        _check(path, like, x)
        return x if is_on_disk(x) else _placed(x, like, place)
    shape, dtype = tuple(row["shape"]), jnp.dtype(row["dtype"])
    if "key" not in row:
        _check(path, like, jax.ShapeDtypeStruct(shape, dtype))
    parts = _parts_of(row, str(number), beside, dtype)
    boxes = [box for box, _ in parts]
    check_covered(path, boxes_of(place, shape), boxes)
    x = gathered(parts, box_of_shape(shape)) if place.is_fully_addressable else assembled(parts, place, shape)
    if "key" in row:
        x = jax.random.wrap_key_data(jnp.asarray(x), impl=row["key"])
        _check(path, like, x)
    return _placed(x, like, place)


def _placed(x: Any, like: Any, place: Sharding) -> Any:
    return np.array(x) if isinstance(like, np.ndarray) else jax.device_put(x, place)


def _parts_of(row: Mapping[str, Any], name: str, beside: Mapping[str, Any], dtype: Any) -> Parts:
    """The parts of an array in a commit: the whole, or what this process had."""
    boxes = {name: box_of_shape(row["shape"])}
    if "parts" in row:
        boxes = {f"{name}.{k}": tuple((begin, end) for begin, end in box) for k, box in enumerate(row["parts"])}
    return [(box, np.frombuffer(beside[k].tobytes(), dtype).reshape(shape_of(box))) for k, box in boxes.items()]


def _place_of(like: Any) -> Sharding:
    sharding = getattr(like, "sharding", None)
    return memory.ambient_sharding() if sharding is None else sharding


def _check(path: str, like: Any, found: Any) -> None:
    """Raise ``ValueError`` where a leaf is of another type than was committed."""
    got = tuple(np.shape(like)) if not hasattr(like, "shape") else tuple(like.shape), getattr(like, "dtype", None)
    if got != (tuple(found.shape), found.dtype):
        raise ValueError(
            f"target: {path} is {got[1]}{list(got[0])}, and the commit has {found.dtype}{list(found.shape)}. Fix: the "
            "optimizer and the parameters of the run that was committed."
        )
