"""How arrays lie in files: a leaf of the state as entries of the store, and the tree of a commit beside the state.

A leaf is divided into one box for each part that a device of this process has, and each box into ranges of rows. A
range is the same rows of every device's part along the leaf's first axis. The division is made with the files and
never changes. A run with another sharding, after ``resume`` for example, reads and writes the same boxes and assembles
its own parts from them.

The tree of a commit holds everything that is not on disk already: numbered arrays, and one array that describes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jax.tree_util import keystr

from jax_offload._disk.placeholder import Ends, OnDisk, Place, Range, is_on_disk, read_into
from jax_offload._disk.store import Entry
from jax_offload._program import memory
from jax_offload._program.arrays import is_array
from jax_offload._program.shardings import (
    Box,
    Parts,
    assembled,
    box_of_shape,
    boxes_of,
    covered,
    gathered,
    parts_here,
    shape_of,
    shards_of,
)

_TREE = "tree"  # the array that describes the others

# ---- a leaf of the state -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """A leaf in a store.

    Attributes:
      name, dtype: the leaf's name and dtype.
      shape: the leaf's shape, over all processes.
      rows: how many rows each device has.
      entries: the numbers of the leaf's entries in the store, each with its box.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int
    entries: list[tuple[int, Box]]

    @property
    def boxes(self) -> list[Box]:
        return [box for _, box in self.entries]

    @property
    def ends(self) -> Ends:
        """The rows of each device's part at which the ranges end."""
        return tuple(sorted({(box[0][1] - 1) % self.rows + 1 for box in self.boxes}))

    def shape_of(self, rows: Range | None) -> tuple[int, ...]:
        """The shape of an array with some ranges of every device's part."""
        first, *rest = self.shape
        return self.shape if rows is None else (first // self.rows * (rows[1] - rows[0]), *rest)

    def within(self, rows: Range | None) -> list[tuple[int, Box]]:
        """The entries of a range of rows, each with its box in an array of just these rows."""
        if rows is None:
            return list(self.entries)
        found = list[tuple[int, Box]]()
        for k, ((begin, end), *rest) in self.entries:
            shard, first = divmod(begin, self.rows)
            if rows[0] <= first and first + end - begin <= rows[1]:
                at = shard * (rows[1] - rows[0]) + first - rows[0]
                found.append((k, ((at, at + end - begin), *rest)))
        return found


def stored_in(entries: Iterable[Entry]) -> dict[str, Stored]:
    """Return the leaves of a store, by their names, from its entries."""
    found: dict[str, Stored] = {}
    for k, e in enumerate(entries):
        leaf = found.setdefault(e.path, Stored(e.path, np.dtype(e.dtype), e.leaf_shape, e.rows, []))
        leaf.entries.append((k, tuple((a, a + n) for a, n in zip(e.begin, e.shape, strict=True))))
    return found


def entries_of(leaf: Place) -> list[Entry]:
    """Make the entries of a leaf for new files: one for each range of each box."""
    shards = shards_of(leaf.sharding, leaf.shape)[0]
    size = leaf.shape[0] // shards
    step = max(1, leaf.rows // shards if leaf.rows else size)
    found = list[Entry]()
    for begin in range(0, size, step):
        for (first, _), *rest in boxes_of(leaf.sharding, leaf.shape):
            shape = (min(step, size - begin), *shape_of(tuple(rest)))
            at = (first + begin, *(start for start, _ in rest))
            found.append(Entry(leaf.name, shape, leaf.dtype.name, at, leaf.shape, size))
    return found


def check_covered(what: str, wanted: Iterable[Box], have: Sequence[Box]) -> None:
    """Raise ``ValueError`` where this process needs a part of a leaf that it does not have."""

    def said(box: Box) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in box)}]"

    for box in wanted:
        if not covered(box, have):
            raise ValueError(
                f"target: {what} is divided otherwise between processes than in the commit; here {said(box)} of it is "
                f"needed, and {' and '.join(map(said, have)) or 'nothing'} there. Fix: the mesh and the shardings of "
                "the run that was committed. Into others through a checkpoint: jo.save_args(tree) in that run, "
                "jo.restore(manager, target) in this."
            )


def placed(what: str, parts: Parts, shape: tuple[int, ...], sharding: Sharding) -> Any:
    """Put an array together from the parts that this process has: NumPy's, or of a sharding that divides it.

    Raises:
      ValueError: the sharding needs other parts.
    """
    check_covered(what, boxes_of(sharding, shape), [box for box, _ in parts])
    whole = box_of_shape(shape)
    return gathered(parts, whole) if sharding.is_fully_addressable else assembled(parts, sharding, shape)


# ---- the tree of a commit ------------------------------------------------------------------------------------------


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
    named = False  # the names of text, records and other byte orders do not identify them
    with contextlib.suppress(TypeError):
        named = not isinstance(x.dtype, np.dtype) or (np.dtype(x.dtype.name) == x.dtype and not x.dtype.hasobject)
    if not named:
        raise TypeError(
            f"tree: {path} is an array of {x.dtype!r}; a commit holds numbers in this machine's byte order. "
            "Fix: give text as a str; convert other dtypes with x.astype(...)."
        )


def unpacked(
    beside: Mapping[str, np.ndarray[Any, Any]],
    target: Any,
    on_disk: Callable[[str, Sharding], Any],
    *,
    lands: bool = False,
) -> Any:
    """Return the tree that was committed, each array where the target says.

    Args:
      beside: the commit's arrays.
      target: a tree of the same structure; leaves on disk, and any array, may be abstract.
      on_disk: returns the placeholder of a leaf, or its values, given its name and its place in host memory.
      lands: whether leaves go to the disks that the target names.

    Raises:
      ValueError: the target has other leaves, or of other types.
    """
    rows = json.loads(beside[_TREE].tobytes().decode())
    stored = {row["path"]: (str(k), row) for k, row in enumerate(rows)}
    wanted, treedef = jax.tree_util.tree_flatten_with_path(target, is_leaf=is_on_disk)
    likes = [(keystr(path), like) for path, like in wanted]
    if (names := {path for path, _ in likes}) != stored.keys():
        raise ValueError(
            "target: its leaves differ from the commit's.\n"
            f"  only in the target {sorted(names - stored.keys())[:5]}\n"
            f"  only in the commit {sorted(stored.keys() - names)[:5]}\n"
            "Give a tree like the committed one, with jo.abstract_state(tx, params) in the state's place, where tx is "
            "the optimizer of that run, with its storage= and its parameters' names."
        )

    def checked(path: str, like: Any, found: Any) -> Any:
        got = tuple(np.shape(like)) if not hasattr(like, "shape") else tuple(like.shape), getattr(like, "dtype", None)
        if got != (tuple(found.shape), found.dtype):
            raise ValueError(
                f"target: {path} is {got[1]}{list(got[0])}, and the commit has {found.dtype}{list(found.shape)}. Fix: "
                "the optimizer and the parameters of the run that was committed."
            )
        return found

    def leaf(path: str, like: Any) -> Any:
        name, row = stored[path]
        if "value" in row:
            return row["value"]
        place = getattr(like, "sharding", None) or memory.ambient_sharding()
        if "on disk" in row:
            x = checked(path, like, on_disk(row["on disk"], memory.with_kind(place, memory.HOST_KIND)))
        else:
            shape, dtype = tuple(row["shape"]), np.dtype(row["dtype"])
            if "key" not in row:
                checked(path, like, jax.ShapeDtypeStruct(shape, dtype))
            boxes = {name: box_of_shape(shape)}
            if "parts" in row:  # one of this process's parts
                boxes = {f"{name}.{k}": tuple(map(tuple, box)) for k, box in enumerate(row["parts"])}
            arrays = {box: np.frombuffer(beside[k].tobytes(), dtype).reshape(shape_of(box)) for k, box in boxes.items()}
            x = placed(path, [*arrays.items()], shape, place)
            x = checked(path, like, jax.random.wrap_key_data(jnp.asarray(x), impl=row["key"])) if "key" in row else x
        return x if is_on_disk(x) else np.array(x) if isinstance(like, np.ndarray) else jax.device_put(x, place)

    def read(indices: Sequence[int]) -> list[Any]:
        return [leaf(*likes[k]) for k in indices]

    found = read_into([like for _, like in likes], read) if lands else read(range(len(likes)))
    return jax.tree.unflatten(treedef, found)
