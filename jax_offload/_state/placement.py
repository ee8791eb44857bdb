"""Decide which state leaves live where, from shapes, dtypes and paths alone.

Nothing here asks for a device, so every process of a multi-host run and every trace reaches the same answer.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jax_offload._disk.disk import Disk
from jax_offload._disk.leaves import Place
from jax_offload._program.arrays import check_integer, is_like, leaves_with_paths, matches, names_of, nbytes, owners
from jax_offload._program.memory import DEFAULT_MIN_BYTES
from jax_offload._program.primitives import mark
from jax_offload._schedule.schedule import backward_ranks, rows_in_part

Select = Any  # None | bool prefix tree | Callable[[str, ShapeDtypeStruct], bool] | str | Sequence[str]
Governing = tuple[int, Any] | None  # the subtree or rule that governs a parameter, and its value


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where one state leaf lives, and why: a row of the table that ``jax_offload.placement`` returns.

    Attributes:
      path: the leaf's path in the state, or in the arguments of a step, as ``jax.tree_util.keystr`` prints it.
      shape: the global shape.
      dtype: the name of the dtype in which the leaf is stored, or of its type if it is not an array.
      nbytes: the size in bytes over all devices, with replicas counted once.
      param: the path ``a/b/c`` of the parameter to which the leaf belongs; ``None`` if there is none.
      owner: that parameter's number in flattening order.
      host: whether the leaf lives in pinned host memory.
      why: the rule that decided; "argument" in the table of a step.
      rank: the leaf's place in the order in which leaves are taken, the order of the backward pass.
      shard_over: the mesh axes over which the leaf is divided beyond its parameter's.
      sharding: the leaf's ``PartitionSpec`` as text; empty without a mesh.
      shard_bytes: the size in bytes on each device.
      streams: how ``update`` brings the leaf to the device: whole or in chunks, how often, and why.
      on_cores: whether the host's cores update it.
      disk: whether it is on disk instead of in pinned host memory.
      place: the ``jax_offload.disk`` and its leaf, if it is on disk; ``None`` otherwise.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((256, 256), "float32")}
      >>> leaf = jo.placement(jo.offload(optax.adamw(1e-3)), params).leaves[1]
      >>> leaf.path, leaf.param, leaf.shape, leaf.nbytes, leaf.host
      ("[0].mu['w']", 'w', (256, 256), 262144, True)
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    param: str | None
    owner: int | None
    host: bool
    why: str
    rank: int
    shard_over: tuple[str, ...] = ()
    sharding: str = ""
    shard_bytes: int = 0
    streams: str = ""
    on_cores: bool = False
    disk: bool = False
    place: Place | None = dataclasses.field(default=None, repr=False, compare=False)


def place(policy: Policy, state: Any, params: Any) -> list[Leaf]:
    """Return one ``Leaf`` for every leaf of ``state`` (arrays or abstract values), in flattening order."""
    of_params, of_state, whose = leaves_with_paths(params), leaves_with_paths(state), owners(state, params)
    names = names_of([path for path, _ in of_params])
    ranks = [*backward_ranks(params), len(names)]  # the last one, as in the lists of governing values, is of no one

    def governing(choice: Choice) -> list[Governing]:
        of = choice.of(params, names)
        return [of[-1 if i is None else i] for i in whose]

    leaves, asked, fractions = list[Leaf](), list[bool](), governing(policy.fraction)
    for k, ((path, x), i, select) in enumerate(zip(of_state, whose, governing(policy.select), strict=True)):
        param, name, why = None if i is None else names[i], keystr(path), stays(x, policy.min_bytes)
        like_param = not why and i is not None and is_like(name, np.shape(x), np.shape(of_params[i][1]))
        if not why and (select is None or fractions[k] is None):
            why = "belongs to no one parameter"
        elif not why and select is not None:
            asked.append(bool(select[1](param, x) if callable(select[1]) else select[1]))
            why = "" if asked[-1] else "not selected"
        rank, over = ranks[-1 if i is None else i] * len(of_state) + k, policy.shard_over if like_param else ()
        row = dataclasses.replace(unmanaged(x), path=name, param=param, owner=i, why=why, rank=rank, shard_over=over)
        leaves.append(row)
    if asked and not any(asked):
        raise ValueError(
            f"select: {policy.select.given!r} selects none of the {len(asked)} leaves that may move. A function is "
            f"called with a parameter's path and a leaf; the paths are {', '.join(names[:8])}. Fix: select some of "
            "these, or write fraction=0 instead, which moves nothing."
        )
    fractions = [None if leaf.why else said for leaf, said in zip(leaves, fractions, strict=True)]
    hosts = _first(leaves, fractions, whole=False)
    host_bytes = math.inf if policy.disk is None else policy.disk.host_bytes
    room, disk = host_bytes, set[int]()
    # Whole parameters stay in memory, first those whose gradients appear last: the others' state is read meanwhile.
    for group in reversed(_in_order(leaves, hosts, whole=True)):
        if (size := sum(leaves[k].nbytes for k in group)) <= room:
            room -= size
        else:
            disk.update(group)
    cores = _first(leaves, [x if k in hosts else None for k, x in enumerate(governing(policy.update_on))], whole=True)
    for k, said in enumerate(fractions):
        if said is not None:
            why = f"beyond host_bytes={host_bytes}" if k in disk else "eligible"
            why = why if k in hosts else f"beyond fraction={said[1]:g}"
            leaves[k] = dataclasses.replace(leaves[k], why=why, host=k in hosts, disk=k in disk, on_cores=k in cores)
    return leaves


def _first(leaves: Sequence[Leaf], said: Sequence[Governing], *, whole: bool) -> set[int]:
    """Choose the first leaves of the backward pass that make up each subtree's share of its bytes, as near as possible.

    The last gradients have the least work left to hide behind. ``said`` holds for each leaf its subtree and the share,
    ``None`` for a leaf that stays out; ``whole`` keeps the leaves of a parameter together.
    """
    found = set[int]()
    for each in {x for x in said if x is not None}:
        groups = _in_order(leaves, [k for k, governing in enumerate(said) if governing == each], whole=whole)
        sums = np.cumsum([0, *(sum(leaves[k].nbytes for k in group) for group in groups)])
        count = int(np.argmin(np.abs(sums - each[1] * sums[-1])))
        found.update(*groups[:count])
    return found


def _in_order(leaves: Sequence[Leaf], chosen: Iterable[int], *, whole: bool) -> list[list[int]]:
    """Group the chosen leaves in the order of the backward pass; with ``whole``, one group for each parameter."""
    found: dict[Hashable, list[int]] = {}
    for k in sorted(chosen, key=lambda k: leaves[k].rank):
        owner = leaves[k].owner if whole else None
        found.setdefault(("leaf", k) if owner is None else owner, []).append(k)
    return list(found.values())


def marked(state: Any, plan: Sequence[Leaf], disk: Disk | None) -> Any:
    """Mark each leaf of ``state`` in the trace with its row of the table, and its place on the disk if it is there.

    Chains and wrappers pass leaves on untouched, so the table finds the marks whatever is around an ``offload``.
    """

    def key(leaf: Leaf) -> Hashable:
        return leaf.path if leaf.owner is None else leaf.owner, leaf.shape[:1]

    row_bytes = Counter[Hashable]()  # over all leaves of a parameter that have as many rows
    for leaf in plan:
        row_bytes[key(leaf)] += leaf.nbytes // leaf.shape[0] if leaf.disk else 0

    def one(x: Any, leaf: Leaf) -> Any:
        if leaf.disk:
            rows = rows_in_part(row_bytes[key(leaf)], x.ndim, x.shape[0])
            leaf = dataclasses.replace(leaf, place=Place(disk, leaf.path, tuple(x.shape), np.dtype(x.dtype), rows=rows))
        return x if leaf.why == "not an array" else mark(x, leaf)

    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, map(one, leaves, plan))


def warn_of_nothing(plan: Sequence[Leaf], policy: Policy) -> None:
    """Warn if nothing will be offloaded, unless ``fraction=0`` asks for it."""
    arrays = [leaf for leaf in plan if leaf.nbytes and leaf.shape]
    if arrays and not policy.moves_nothing and not any(leaf.host or leaf.shard_over for leaf in plan):
        warnings.warn(
            "offload() leaves the whole optimizer state on the device "
            f"({', '.join(sorted({leaf.why for leaf in arrays}))}; the largest leaf has "
            f"{max(leaf.nbytes for leaf in plan)} bytes). See jax_offload.placement(tx, params); lower min_bytes or "
            "raise fraction.",
            stacklevel=2,
        )


def unmanaged(x: Any) -> Leaf:
    """Return the row of a leaf that no ``offload`` manages."""
    dtype = getattr(x, "dtype", type(x))
    return Leaf("", np.shape(x), dtype, nbytes(x), None, None, False, "outside any offload", 0)


def stays(x: Any, min_bytes: int) -> str:
    """Return why a leaf stays on the device whatever the options say; empty if it may move."""
    if getattr(x, "dtype", None) is None:
        return "not an array"
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "PRNG key"
    if np.ndim(x) == 0:
        return "rank 0"
    if nbytes(x) == 0:
        return "empty"
    return f"< min_bytes={min_bytes}" if nbytes(x) < min_bytes else ""


# ---- the options, checked and read for each parameter


_SIDES = ("device", "host")
_EXPECTED = {
    "fraction": (
        "a float in [0, 1], or a pytree prefix of the parameters with one per subtree; got {!r}. fraction=0.5 "
        "offloads half of the eligible bytes."
    ),
    "select": (
        "regular expressions, a callable on (path, leaf), or a pytree prefix of the parameters with a bool per "
        "subtree; got {!r}."
    ),
    "update_on": (
        "'device', 'host', the share in [0, 1] that the host's cores update, a pytree prefix of the "
        "parameters with one of these per subtree, or pairs of a regular expression and one of these; got {!r}. With "
        "update_on=0.3 the cores update 30 % of the bytes in host memory, with [('embed', 'host')] the embedding."
    ),
}


class Choice:
    """An option that has a value for each parameter: one for all, a prefix of their tree, or rules by path.

    Of the ``rules``, regular expressions, the first that is found in a parameter's path gives its value, which is 0 if
    none is found. ``select`` may also be a function.
    """

    def __init__(self, name: str, given: Any) -> None:
        self.name, self.given, self.values = name, given, given
        self.rules: tuple[str, ...] | None = None
        if name == "select" and callable(given):
            try:
                inspect.signature(given).bind("path", None)
            except ValueError:  # a builtin may have no signature
                pass
            except TypeError as error:
                raise TypeError(
                    f"select: a callable is called with a parameter's path and a state leaf: {error}. For example "
                    'select=lambda path, leaf: "embed" in path.'
                ) from error
            return
        if name == "select" and _are_strings(given):
            self.rules = (given,) if isinstance(given, str) else tuple(given)
            self.values = (1.0,) * len(self.rules)
        elif name == "update_on" and _are_rules(given):
            self.rules, values = zip(*given, strict=True)
            self.values = tuple(map(self._meant, values))
        else:
            self.values = self._meant(None) if given is None else jax.tree.map(self._meant, given)

    def _meant(self, x: Any) -> float:
        """Return the share that a value stands for."""
        if self.name == "update_on" and isinstance(x, str) and x in _SIDES:
            return float(x == "host")
        is_bool, is_share = isinstance(x, (bool, np.bool_)), isinstance(x, (int, float, np.floating)) and 0 <= x <= 1
        if not (is_bool if self.name == "select" else is_share and not is_bool):
            raise ValueError(f"{self.name}: expected {_EXPECTED[self.name].format(self.given)}")
        return float(x)

    def of(self, params: Any, names: Sequence[str]) -> list[Governing]:
        """Return what governs each parameter, by its path, and at the end what governs a leaf of no parameter."""
        if self.name == "select" and callable(self.values):
            return [*((0, self.values) for _ in names), None]
        if self.rules is None and jax.tree_util.all_leaves([self.values]):
            return [(0, self.values)] * (len(names) + 1)
        leaves, treedef = jax.tree.flatten(self.values)
        if not names:
            above = []
        elif self.rules is not None:
            leaves, above = [*leaves, 0.0], matches(self.name, self.rules, names)
        else:
            try:
                above = jax.tree.leaves(jax.tree.broadcast(jax.tree.unflatten(treedef, range(len(leaves))), params))
            except ValueError as error:
                raise ValueError(
                    f"{self.name}: expected a single value or a pytree prefix of the parameters.\n"
                    f"  got        {self.given!r}\n  parameters {jax.tree.structure(params)}\n{error}"
                ) from error
        return [*((k, leaves[k]) for k in above), None]


def _are_strings(said: Any) -> bool:
    return isinstance(said, str) or (isinstance(said, Sequence) and all(isinstance(x, str) for x in said))


def _are_rules(update_on: Any) -> bool:
    """Return whether these are pairs that begin with a regular expression; ``("host", "device")`` is a prefix tree."""
    given = update_on if isinstance(update_on, (list, tuple)) else ()
    pairs = [x for x in given if isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[0], str)]
    return bool(pairs) and len(pairs) == len(given) and not all(rule in _SIDES for rule, _ in pairs)


class Policy:
    """The checked placement options of ``offload``, which documents them."""

    def __init__(
        self,
        fraction: Any = 1.0,
        select: Select = None,
        min_bytes: int = DEFAULT_MIN_BYTES,
        window: int | None = None,
        shard_over: Any = None,
        update_on: Any = "device",
        disk: Any = None,
    ) -> None:
        check_integer("min_bytes", min_bytes, 0, "a number of bytes >= 0, an int", "2**16 are 64 KiB.")
        if window is not None:
            check_integer("window", window, 1, "a number of bytes > 0, an int, or None", "2**28 are 256 MiB.")
        axes = (shard_over,) if isinstance(shard_over, str) else () if shard_over is None else shard_over
        if shard_over is not None and (not axes or not _are_strings(axes)):
            raise ValueError(f"shard_over: expected the name of a mesh axis, or several; got {shard_over!r}.")
        if len({*axes}) < len(axes):
            raise ValueError(f"shard_over: names an axis twice: {shard_over!r}.")
        if disk is not None and not isinstance(disk, Disk):
            named = repr(disk) if isinstance(disk, str | PurePath) else "'/nvme/run'"
            raise TypeError(f"disk: expected a jo.disk(directory, ...), got {disk!r}. Fix: disk=jo.disk({named}).")
        self.fraction, self.select = Choice("fraction", fraction), Choice("select", True if select is None else select)
        self.update_on, self.min_bytes, self.shard_over = Choice("update_on", update_on), min_bytes, tuple(axes)
        self.disk: Disk | None = disk
        self.moves_nothing = self.fraction.values == 0
        on_device = self.update_on.values == 0
        if self.moves_nothing and not (on_device and disk is None):
            name = "update_on" if disk is None else "disk"
            raise ValueError(f"{name}: with fraction=0 nothing leaves the device. Fix: leave one of them out.")
        if disk is not None and not on_device:
            raise ValueError(
                f"disk: the device updates leaves on disk; got update_on={update_on!r} too. Fix: leave one of them out."
            )
