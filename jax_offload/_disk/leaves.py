"""A leaf of a state that is on disk: its placeholder in trees and traces, its moves, and its parts in files.

Such a leaf is never an operand of a program. In the state's tree an ``OnDisk`` stands for it: a pytree node whose one
child is a token, the version of the state. Outside traces a token has no value, so computing with it is an error; in a
trace it is a number. In a traced update ``READ`` makes the leaf, in host memory, from the token, and ``WRITE`` makes a
token from the next value; in between, the leaf is updated like any host leaf. The driver takes both equations out of
the step; in any other program they are an error when it is lowered.

In files an array is divided into one box for each part that a device of this process has, and a leaf's box further
into ranges of rows. A range is the same rows of every device's part along the leaf's first axis. The division is made
with the files and never changes. A run with another sharding, after ``resume`` for example, reads and writes the same
boxes and assembles its own parts from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.sharding import Sharding
from jax.tree_util import keystr

from jax_offload._program import memory
from jax_offload._program.arrays import is_array, nbytes, some
from jax_offload._program.memory import Box, HostStruct, Parts, shape_of
from jax_offload._program.primitives import identity_primitive
from jax_offload._program.private import set_rules, trace_as

TOKEN = np.dtype(np.float32)  # a floating type, so that jnp.isfinite does not pass it by
VERSIONS = 2**24  # whole numbers below this are exact in it
Range = tuple[int, int]  # rows of a leaf, the same ones of every device's part along its first axis
Ends = tuple[int, ...]  # the row after each range that files keep together; the last is the number of rows
_BATCH = 2**26  # bytes of leaves that are in memory together on their way to a disk


# ---- the placeholder of a leaf ---------------------------------------------------------------------------------------


class Place(HostStruct):
    """A leaf on disk: its type, with its sharding in host memory if that is known, and its identity.

    To others it is the type of a leaf that belongs in host memory.

    Attributes:
      home: the ``jax_offload.disk`` that has it; two are never equal.
      name: its name there.
      rows: how many rows new files keep together; 0 for all.
    """

    __slots__ = ("home", "name", "rows")

    def __init__(
        self, home: Any, name: str, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None = None, rows: int = 0
    ) -> None:
        super().__init__(shape, dtype, sharding=sharding)
        self.home, self.name, self.rows = home, name, rows

    def at(self, sharding: Sharding) -> Place:
        return Place(self.home, self.name, self.shape, self.dtype, sharding, self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.home, self.name) == (other.home, other.name) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.name, super().__hash__()))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


_FIX = "jo.to_device reads it to compute with, jo.save_args saves it"


class UpdatedFromDisk(ValueError):
    """An update whose state is on disk was put into a program for the device."""

    def __init__(self) -> None:
        super().__init__(
            "disk: a state on disk is no part of a program for the device. Fix: jo.jit(step), called and not lowered, "
            "outside of any other jit, vmap, derivative or jax.disable_jit(): it reads, updates and writes the state "
            "group by group."
        )


class NotInMemory(AttributeError, TypeError):
    """Something asks a leaf on disk for more than its type: also an ``AttributeError``, so that ``hasattr`` works."""

    def __init__(self, place: Place) -> None:
        super().__init__(
            f"disk: {place.name}, {place.dtype}{list(place.shape)}, is on disk, where only an update under jo.jit "
            "computes with it. Fix: jo.to_device(part of the state) reads it to compute with, "
            "numpy.asarray(leaf) to look at; args=jo.save_args(tree) saves it with orbax, and disk.commit(step, "
            "tree) where it is."
        )


def _refuse_to_compute(self: Token | OnDisk, *args: Any, **kwargs: Any) -> Any:
    raise NotInMemory(self.place)


class _Typed:
    """The attributes that tell the type of a leaf on disk."""

    __slots__ = ("place",)
    place: Place
    shape = property(attrgetter("place.shape"))
    dtype = property(attrgetter("place.dtype"))
    ndim = property(attrgetter("place.ndim"))
    size = property(attrgetter("place.size"))
    nbytes = property(lambda self: nbytes(self.place))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else NotInMemory(self.place)


class _SaysWhatToDo(type):
    """The class of the placeholders: jax and orbax print only the class of an object that they refuse."""

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__name__}', a leaf on disk: {_FIX}>"


class Token(_Typed, metaclass=_SaysWhatToDo):
    """The leaf that ``jax.tree.leaves`` returns for an array on disk, outside traces: the version of its state.

    It has the leaf's shape and dtype, and nothing else that an array has. Whatever asks for values gets
    a ``TypeError``: arithmetic, NumPy, jax's functions, programs other than a step that ``jax_offload.jit`` drives,
    pickle and orbax.
    """

    __slots__ = ("version",)

    def __init__(self, version: int, place: Place) -> None:
        self.version, self.place = version, place

    def __repr__(self) -> str:
        return f"OnDisk({self.place}; {_FIX})"

    __hash__ = object.__hash__


# what computes with an array
_OPERATORS = """add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos
abs divmod rdivmod invert and rand or ror xor rxor lshift rshift lt le gt ge eq ne bool int float complex index len iter
getitem jax_array array array_ufunc deepcopy copy reduce""".split()
_TYPE = jax.typeof(np.zeros((), TOKEN))
trace_as(Token, lambda _: _TYPE, _refuse_to_compute)


@jax.tree_util.register_pytree_with_keys_class
class OnDisk(_Typed, metaclass=_SaysWhatToDo):
    """The placeholder of a leaf on disk in a state.

    Its one child in the tree is a token, which changes with every update: using the state of an earlier step is an
    error, because they have been overwritten. ``numpy.asarray(leaf)`` reads the leaf, ``jax_offload.to_device`` reads
    it to compute with, and ``disk.commit`` and ``jax_offload.save_args`` save it. Arithmetic, pickle, plain orbax and
    programs other than a step of ``jax_offload.jit`` raise errors.

    Attributes:
      token: the version of the state.
      place: which leaf it is.
    """

    __slots__ = ("token",)

    def __init__(self, token: Any, place: Place) -> None:
        version = isinstance(token, np.ndarray | np.generic | jax.Array | int) and not isinstance(token, Tracer)
        self.token, self.place = Token(int(token), place) if version else token, place

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Place]:
        return ((jax.tree_util.GetAttrKey("token"), self.token),), self.place

    @classmethod
    def tree_unflatten(cls, place: Place, children: tuple[Any]) -> Any:
        (child,) = children
        # anything else is the leaf's value, or what a function has made of its type
        return cls(child, place) if _is_token(child) else child

    @property
    def sharding(self) -> Sharding:
        """The place of its values in host memory, on their way to the devices and back."""
        return self.place.sharding

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        parts, whole = memory.parts_of(self.read()), memory.box_of_shape(self.shape)
        if not memory.covered(whole, [box for box, _ in parts]):
            raise ValueError(
                f"disk: {self.place.name} is divided between processes, and this one has a part of it. Fix: "
                "jo.to_device(leaf), in all processes, gives the leaf divided."
            )
        return (np.array if copy else np.asarray)(memory.gathered(parts, whole), dtype)

    def read(self) -> jax.Array:
        """Read the leaf to its place in host memory."""
        if isinstance(self.token, Tracer):
            raise ValueError(
                f"disk: a step reads {self.place} outside its update; leaves on disk are read between steps. Fix: "
                "read a part of the state that the step has returned, jo.to_device(optax.tree.get(state, 'mu'))."
            )
        return self.place.home.array(self.place, self.token)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"disk: {self!r} cannot be pickled or copied, as its values are in files. Fix: jo.to_device(part of the "
            "state) reads it; disk.commit(step, tree) saves it where it is, and jo.save_args(tree) with orbax."
        )

    def __repr__(self) -> str:
        return f"OnDisk({self.place})"


def _is_token(x: Any) -> bool:
    """Whether an object is the version of a state, or a placeholder for one while jax traces or compares trees."""
    if type(x) is object or isinstance(x, Token | Tracer):
        return True
    return getattr(x, "shape", None) == () and getattr(x, "dtype", None) == TOKEN


trace_as(OnDisk, _refuse_to_compute, _refuse_to_compute)
# Both refuse to compute. A leaf that is taken out of the state by name does what it defines, and can be looked at.
_LOOKS = {f"__{name}__" for name in ("eq", "ne", "bool", "array_ufunc", "copy", "deepcopy")}
for _class, _allowed in (Token, {*vars(Token)}), (OnDisk, {*vars(OnDisk)} | _LOOKS):
    for _name in {f"__{name}__" for name in _OPERATORS} - _allowed:
        setattr(_class, _name, _refuse_to_compute)


def is_on_disk(x: Any) -> bool:
    return isinstance(x, OnDisk)


def opened(state: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Read the leaves of a state that are on disk; return a function that writes the next state's."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_on_disk)
    places = {path: x.place for path, x in flat if is_on_disk(x)}
    if not places:
        return state, lambda new: new

    def read(x: Any) -> Any:
        if is_on_disk(x) and isinstance(x.token, Token):  # outside of any trace
            raise UpdatedFromDisk
        return READ.bind(x.token, place=x.place) if is_on_disk(x) else x

    def closed(new: Any) -> Any:
        after, treedef = jax.tree_util.tree_flatten_with_path(new)
        if lost := places.keys() - {path for path, _ in after}:
            raise ValueError(f"disk: the update drops {places[min(lost, key=str)].name} from the state, which is kept.")
        leaves = [_write_leaf(places[path], x) if path in places else x for path, x in after]
        return jax.tree.unflatten(treedef, leaves)

    return jax.tree.map(read, state, is_leaf=is_on_disk), closed


def only_outside(x: jax.Array) -> jax.Array:
    """Return ``x``, a leaf of a traced ``init`` that belongs in files: an error when the trace is lowered."""
    why = "disk: tx.init makes files, and no program can. Fix: state = tx.init(params), outside of any jit; it makes "
    return _CANNOT_LOWER.bind(x, why=f"{why}leaf after leaf.")[0]


def not_from_disk(x: jax.Array) -> jax.Array:
    """Return ``x``, a leaf that is kept on disk and reaches an update in device memory: an error when it is lowered."""
    return _CANNOT_LOWER.bind(x, why=f"state: a leaf {IN_MEMORY}")[0]


def _write_leaf(place: Place, x: Any) -> OnDisk:
    if (x.shape, x.dtype) != (place.shape, place.dtype):
        raise ValueError(
            f"disk: the update makes {place.name} {x.dtype}{list(x.shape)}, and it is {place.dtype}{list(place.shape)} "
            "on disk, where a leaf keeps its type. Fix: give gradients the parameters' dtype, jax.tree.map("
            "lambda g, p: g.astype(p.dtype), grads, params); or keep the moments in float32 from the start, "
            "jo.with_master_params(inner); or leave the leaf in memory, by min_bytes= or select=."
        )
    return OnDisk(WRITE.bind(x, place=place), place)


def _refuse(*args: Any, **params: Any) -> Any:
    raise UpdatedFromDisk


def _raise(*args: Any, why: str) -> Any:
    raise ValueError(why)


IN_MEMORY = (
    "is in memory, and this offload keeps it on disk. Fix: tx.init(params) makes it there, and disk.resume(target) "
    "brings it back if it was made with this host_bytes; jo.to_host(tx, state) brings one of another there, with a "
    "jo.disk(...) with its own directory."
)
READ, WRITE = Primitive("jax_offload_read"), Primitive("jax_offload_write")
READ.def_impl(_refuse)
WRITE.def_impl(_refuse)
READ.def_abstract_eval(lambda token, place: jax.typeof(place))
WRITE.def_abstract_eval(lambda x, place: _TYPE)
for _primitive in READ, WRITE:
    set_rules(_primitive, lower=_refuse, jvp=_refuse, batch=_refuse)
_CANNOT_LOWER = identity_primitive("jax_offload_cannot_lower", _raise)


# ---- moves between steps: a few leaves in memory at a time -----------------------------------------------------------


def read_into(
    target: Sequence[Any], read: Callable[[Sequence[int]], Sequence[Any]], homes: Sequence[Any] = ()
) -> list[Any]:
    """Read leaves to where ``target``, their types, says; those that belong on disk are in memory a few at a time.

    ``read`` returns the values of the leaves of these numbers. Files are made for ``homes`` even without any leaf.
    """
    home_of = {k: like.home for k, like in enumerate(target) if isinstance(like, Place)}
    rest = [k for k in range(len(target)) if k not in home_of]
    found = dict(zip(rest, read(rest), strict=True))
    for home in dict.fromkeys([*homes, *home_of.values()]):
        mine = [k for k in home_of if home_of[k] is home]
        begins = itertools.accumulate((nbytes(target[k]) for k in mine), initial=0)
        batches = itertools.groupby(zip(mine, begins, strict=False), lambda each: each[1] // _BATCH)
        values = (read([k for k, _ in batch]) for _, batch in batches)
        found |= zip(mine, home.fill([target[k] for k in mine], values), strict=True)
    return [found[k] for k in range(len(target))]


def brought(leaves: Sequence[Any], target: Sequence[Any] | None) -> list[Any]:
    """Move leaves from memory or disk to memory or disk, each to where ``target`` says; ``None`` in a trace."""
    if target is None:
        raise ValueError(
            "state: is on disk, or goes there, and no program can move it. Fix: jo.to_host(tx, state) outside jit."
        )

    def moved(x: Any, like: Any) -> Any:
        x = x.read() if is_on_disk(x) else x
        return x if isinstance(like, Place) else jax.device_put(x, like.sharding)

    there = [(x.place.home, x.place.name) if is_on_disk(x) else None for x in leaves]
    if there == [(like.home, like.name) if isinstance(like, Place) else None for like in target]:  # no file changes
        return [x if is_on_disk(x) else moved(x, like) for x, like in zip(leaves, target, strict=True)]
    return read_into(target, lambda indices: [moved(leaves[k], target[k]) for k in indices])


# ---- in files --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in the files of this process: each of its boxes has a key in the store.

    Attributes:
      name, dtype, shape: the array's, over all processes.
      boxes: the parts that this process has, divided into ranges of rows.
      rows: how many rows each device has.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    boxes: Sequence[Box]
    rows: int = 0

    @classmethod
    def new(cls, leaf: Place) -> Stored:
        """Divide a leaf for new files."""
        shards = memory.shards_of(leaf.sharding, leaf.shape)[0]
        size = leaf.shape[0] // shards
        step = max(1, leaf.rows // shards if leaf.rows else size)
        whole = memory.boxes_of(leaf.sharding, leaf.shape)
        starts = [(start, min(start + step, size)) for start in range(0, size, step)]
        boxes = [((first + a, first + b), *rest) for a, b in starts for (first, _), *rest in whole]
        return cls(leaf.name, leaf.dtype.name, leaf.shape, boxes, size)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each key."""
        return {self.key(box): math.prod(shape_of(box)) * np.dtype(self.dtype).itemsize for box in self.boxes}

    @property
    def ends(self) -> Ends:
        """The rows of each device's part at which the ranges end."""
        return tuple(sorted({(box[0][1] - 1) % self.rows + 1 for box in self.boxes}))

    def key(self, box: Box) -> str:
        return f"{self.name}{_said(box)}"

    def within(self, rows: Range | None = None) -> tuple[tuple[int, ...], list[tuple[str, Box]]]:
        """Return the shape of an array of some ranges of every device's rows, and the keys and boxes that make it."""
        if rows is None:
            return tuple(self.shape), [(self.key(box), box) for box in self.boxes]
        found, n = list[tuple[str, Box]](), rows[1] - rows[0]
        for (begin, end), *rest in self.boxes:
            shard, first = divmod(begin, self.rows)
            if rows[0] <= first and first + end - begin <= rows[1]:
                at = shard * n + first - rows[0]
                found.append((self.key(((begin, end), *rest)), ((at, at + end - begin), *rest)))
        return (self.shape[0] // self.rows * n, *self.shape[1:]), found

    def read(self, read: Callable[[str], np.ndarray[Any, Any]], rows: Range | None = None) -> Parts:
        """Read the array, or some ranges of its rows, by a function that returns the bytes of a key."""
        _, found = self.within(rows)
        return [(box, read(key).view(np.dtype(self.dtype)).reshape(shape_of(box))) for key, box in found]

    def check_covers(self, wanted: Iterable[Box]) -> None:
        """Raise ``ValueError`` where this process needs a part of the array that it does not have."""
        for box in wanted:
            if not memory.covered(box, self.boxes):
                raise ValueError(
                    f"target: {self.name} is divided otherwise between processes than in the commit; here {_said(box)} "
                    f"of it is needed, and {' and '.join(map(_said, self.boxes)) or 'nothing'} there. Fix: the mesh "
                    "and the shardings of the run that was committed. Into others through a checkpoint: "
                    "jo.save_args(tree) in that run, jo.restore(manager, target) in this."
                )


def _said(box: Box) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in box)}]"


# ---- the tree of a commit --------------------------------------------------------------------------------------------


def packed(tree: Any, stored: Callable[[OnDisk], Stored]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe a tree in JSON, and return its arrays that are not on disk by their keys in a store.

    ``stored`` returns how a leaf on disk is divided. The arrays are copied to the host when they are written; the tree
    must not change before that. ``TypeError`` and ``ValueError`` if something would not come back.
    """
    rows, arrays = dict[str, Any](), dict[str, Any]()
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_on_disk)[0]:
        name, key = keystr(path), None
        if isinstance(x, (bool, int, float, str)):
            rows[name] = {"value": x}
            continue
        if is_on_disk(x):
            found = stored(x)
        elif is_array(x):
            _check_stored(name, x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                key, x = str(jax.random.key_impl(x)), jax.random.key_data(x)
            # An array keeps its copy on the host for as long as it lives; its parts are other arrays.
            parts = memory.parts_here(x) if isinstance(x, jax.Array) else [(memory.box_of_shape(x.shape), x)]
            found = Stored(name, np.dtype(x.dtype).name, x.shape, [box for box, _ in parts])
            arrays |= {found.key(box): values for box, values in parts}
        else:
            raise TypeError(f"tree: {name} is a {type(x).__name__}; a commit holds arrays, numbers and strings.")
        rows[name] = {"stored": vars(found), "key": key, "on disk": is_on_disk(x)}
    return rows, arrays


def on_disk(rows: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the leaves on disk of a tree that is described, by their names there."""
    found = (Stored(**row["stored"]) for row in rows.values() if row.get("on disk"))
    return {each.name: each for each in found}


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
    rows: Mapping[str, Any],
    target: Any,
    handle: Callable[[Stored, Sharding], OnDisk],
    read: Callable[[str], np.ndarray[Any, Any]],
    folder: Any,
) -> Any:
    """Return the tree that was described, each array where the target says, which may be abstract.

    ``handle`` returns the placeholder of a leaf on disk, given its place in host memory. ``read`` returns the bytes of
    a key of the other arrays. ``folder`` is the commit's directory, for errors.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(target, is_leaf=is_on_disk)
    wanted = [(keystr(path), like) for path, like in flat]

    def type_of(row: Mapping[str, Any]) -> Any:
        if "value" in row:
            return None
        found = jax.ShapeDtypeStruct(row["stored"]["shape"], row["stored"]["dtype"])
        return jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=row["key"]), found) if row["key"] else found

    def leaf(row: Mapping[str, Any], like: Any) -> Any:
        if "value" in row:
            return row["value"]
        stored, place = Stored(**row["stored"]), getattr(like, "sharding", None) or memory.ambient_sharding()
        if row["on disk"]:
            return handle(stored, place.with_memory_kind(memory.HOST_KIND))
        parts, shape = stored.read(read), tuple(stored.shape)
        stored.check_covers(memory.boxes_of(place, shape))
        if isinstance(like, np.ndarray | np.generic):
            x = np.array(memory.gathered(parts, memory.box_of_shape(shape)))
            return x if isinstance(like, np.ndarray) else x[()]
        if not isinstance(like, jax.Array):  # without x64, jax has no 64 bits for NumPy's
            parts = [(box, x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)) for box, x in parts]
        x = memory.assembled(parts, place, shape)
        return jax.device_put(jax.random.wrap_key_data(x, impl=row["key"]), place) if row["key"] else x

    check_target(
        dict(wanted), {name: type_of(row) for name, row in rows.items()}, "commit", folder,
        "Give a tree like the committed one, with jo.abstract_state(tx, params) in the state's place, where tx is the "
        "optimizer of that run, with its storage= and its parameters' names.",
    )  # fmt: skip
    return jax.tree.unflatten(treedef, [leaf(rows[name], like) for name, like in wanted])


def check_target(wanted: Mapping[str, Any], stored: Mapping[str, Any], what: str, folder: Any, fix: str) -> None:
    """Raise ``ValueError`` if a target has other leaves than a commit or a checkpoint, or other shapes or dtypes.

    ``stored``: the types of the leaves in ``what``, "commit" or "checkpoint", in ``folder``; ``None`` for a leaf that
    may have any. ``fix`` says which target has the right leaves.
    """
    if wanted.keys() != stored.keys():
        raise ValueError(
            f"target: its leaves differ from those in the {what} in {folder}.\n"
            f"  only in the {'target':<{len(what)}} {some(sorted(wanted.keys() - stored.keys()), 5) or 'nothing'}\n"
            f"  only in the {what:<6} {some(sorted(stored.keys() - wanted.keys()), 5) or 'nothing'}\n{fix}"
        )
    for name, x in wanted.items():
        have = stored[name]
        if isinstance(x, int | float | complex):
            x = np.asarray(x)  # a Python number is stored with the type that NumPy gives it
        if have is None or not hasattr(x, "dtype"):
            continue
        if (tuple(x.shape), x.dtype) != (tuple(have.shape), have.dtype):
            raise ValueError(
                f"target: leaf {name!r} is {x.dtype}{list(x.shape)}, and the {what} in {folder} has "
                f"{have.dtype}{list(have.shape)}. Restore it as it was saved, with that run's "
                "optimizer and parameters, and convert it afterwards."
            )
