"""Decide which state leaves live in host memory, from shapes, dtypes and paths alone.

Nothing here asks for a device, so every process of a multi-host run and every trace reaches the same answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jax_offload._disk.disk import Disk
from jax_offload._disk.leaves import Place
from jax_offload._program.arrays import (
    check_integer,
    is_array,
    is_like,
    leaves_with_paths,
    matches,
    names_of,
    nbytes,
    owners,
)
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
    of_params, of_state = leaves_with_paths(params), leaves_with_paths(state)
    backward = backward_ranks(params)
    names = names_of([path for path, _ in of_params])
    fraction, select, share = (each.of(params, names) for each in (policy.fraction, policy.select, policy.update_on))

    leaves: list[Leaf] = []
    asked: list[bool] = []  # the values of select for the leaves that may move
    fractions: list[Governing] = []  # None: the leaf stays
    for k, ((path, x), i) in enumerate(zip(of_state, owners(state, params), strict=True)):
        why, name, selected = stays(x, policy.min_bytes), keystr(path), select(i)
        like_param = not why and i is not None and is_like(name, np.shape(x), np.shape(of_params[i][1]))
        if not why and (selected is None or fraction(i) is None):
            why = "belongs to no one parameter"
        elif not why and selected is not None:
            asked.append(bool(selected[1](names[i], x) if i is not None and callable(selected[1]) else selected[1]))
            why = "" if asked[-1] else "not selected"
        fractions.append(None if why else fraction(i))
        rank = (len(backward) if i is None else backward[i]) * len(of_state) + k
        param, over = None if i is None else names[i], policy.shard_over if like_param else ()
        found = dataclasses.replace(unmanaged(x), path=name, param=param, owner=i, why=why, rank=rank, shard_over=over)
        leaves.append(found)
    if asked and not any(asked):
        raise ValueError(
            f"select: {policy.select.given!r} selects none of the {len(asked)} leaves that may move. A function is "
            f"called with a parameter's path and a leaf; the paths are {', '.join(names[:8])}. Fix: select some of "
            "these, or write fraction=0 instead, which moves nothing."
        )
    hosts = _first_leaves(leaves, fractions, whole=False)
    leaves = [
        leaf if said is None else dataclasses.replace(
            leaf, host=k in hosts, why="eligible" if k in hosts else f"beyond fraction={said[1]:g}")
        for k, (leaf, said) in enumerate(zip(leaves, fractions, strict=True))
    ]  # fmt: skip
    if policy.disk is not None:
        leaves = _with_disk(leaves, policy.disk.host_bytes)
    cores = _first_leaves(leaves, [share(leaf.owner) if leaf.host else None for leaf in leaves], whole=True)
    return [dataclasses.replace(leaf, on_cores=True) if k in cores else leaf for k, leaf in enumerate(leaves)]


def marked(state: Any, plan: Sequence[Leaf], disk: Disk | None) -> Any:
    """Mark each leaf of ``state`` in the trace with its row of the table, and its place on the disk if it is there.

    Chains and wrappers pass leaves on untouched, so the table finds the marks whatever is around an ``offload``.
    """
    together = Counter[Hashable]()  # bytes of a row, over all leaves of a parameter that have as many rows
    keys = [(leaf.path if leaf.owner is None else leaf.owner, leaf.shape[:1]) for leaf in plan]
    for key, leaf in zip(keys, plan, strict=True):
        together[key] += leaf.nbytes // max(1, leaf.shape[0]) if leaf.disk else 0

    def one(x: Any, leaf: Leaf, key: Hashable) -> Any:
        if leaf.disk:
            rows = rows_in_part(together[key], x.ndim, x.shape[0])
            leaf = dataclasses.replace(leaf, place=Place(disk, leaf.path, tuple(x.shape), np.dtype(x.dtype), rows=rows))
        return mark(x, leaf) if is_array(x) else x

    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, map(one, leaves, plan, keys))


def warn_of_nothing(plan: Sequence[Leaf], policy: Policy) -> None:
    """Warn if nothing will be offloaded, unless ``fraction=0`` asks for it."""
    moved = policy.moves_nothing or any(leaf.host or leaf.shard_over for leaf in plan)
    if not moved and any(leaf.nbytes and leaf.shape for leaf in plan):
        reasons = sorted({leaf.why for leaf in plan if leaf.nbytes and leaf.shape})
        largest = max(leaf.nbytes for leaf in plan)
        warnings.warn(
            f"offload() leaves the whole optimizer state on the device ({', '.join(reasons)}; the largest leaf has "
            f"{largest} bytes). See jax_offload.placement(tx, params); lower min_bytes or raise fraction.",
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


def _first_leaves(leaves: Sequence[Leaf], said: Sequence[Governing], *, whole: bool) -> set[int]:
    """Choose the leaves that make up a share of the bytes, in the order in which their gradients appear.

    The last gradients of the backward pass have the least work left to hide behind, so the share leaves out their
    state. Each subtree has its own share, and the error in bytes is the smallest possible.

    Args:
      leaves: the leaves of a state.
      said: for each leaf, the subtree that governs it and the subtree's share; ``None`` for an ungoverned leaf.
      whole: whether the leaves of a parameter stay together.

    Returns:
      The numbers of the chosen leaves.
    """
    found = set[int]()
    for each in dict.fromkeys(governing for governing in said if governing is not None):
        groups = _in_order(leaves, [k for k, governing in enumerate(said) if governing == each], whole=whole)
        sums = np.cumsum([0] + [sum(leaves[k].nbytes for k in group) for group in groups])
        count = int(np.argmin(np.abs(sums - float(each[1]) * sums[-1])))
        found |= {k for group in groups[:count] for k in group}
    return found


def _with_disk(leaves: list[Leaf], host_bytes: int) -> list[Leaf]:
    """Put on disk the leaves that exceed ``host_bytes`` of host memory.

    Whole parameters stay in memory, first those whose gradients appear last: the state of the others is read while
    the gradients are computed.
    """
    left, disk = host_bytes, set[int]()
    for group in reversed(_in_order(leaves, [k for k, leaf in enumerate(leaves) if leaf.host], whole=True)):
        size = sum(leaves[i].nbytes for i in group)
        left, fits = (left - size, True) if size <= left else (left, False)
        disk |= set() if fits else {*group}
    why = f"beyond host_bytes={host_bytes}"
    return [dataclasses.replace(x, disk=True, why=why) if i in disk else x for i, x in enumerate(leaves)]


def _in_order(leaves: Sequence[Leaf], chosen: Sequence[int], *, whole: bool) -> list[list[int]]:
    """Group the chosen leaves in the order of the backward pass; with ``whole``, one group for each parameter."""
    found: dict[Hashable, list[int]] = {}
    for k in sorted(chosen, key=lambda k: leaves[k].rank):
        owner = leaves[k].owner if whole else None
        found.setdefault(("leaf", k) if owner is None else owner, []).append(k)
    return list(found.values())


# ---- the options, checked and read for each parameter


_SIDES = {"device": 0.0, "host": 1.0}


def _share(x: Any) -> float | None:
    is_number = isinstance(x, (int, float, np.floating)) and not isinstance(x, bool)
    return float(x) if is_number and 0 <= x <= 1 else None


# For each option with values for parameters: a value's meaning, ``None`` if it has none, and the text of an error.
_MEANINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fraction": (
        _share,
        "a float in [0, 1], or a pytree prefix of the parameters with one per subtree; got {!r}. fraction=0.5 "
        "offloads half of the eligible bytes.",
    ),
    "select": (
        lambda x: bool(x) if isinstance(x, (bool, np.bool_)) else None,
        "regular expressions, a callable on (path, leaf), or a pytree prefix of the parameters with a bool per "
        "subtree; got {!r}.",
    ),
    "update_on": (
        lambda x: _SIDES.get(x) if isinstance(x, str) else _share(x),
        "'device', 'host', the share in [0, 1] that the host's cores update, a pytree prefix of the "
        "parameters with one of these per subtree, or pairs of a regular expression and one of these; got {!r}. With "
        "update_on=0.3 the cores update 30 % of the bytes in host memory, with [('embed', 'host')] the embedding.",
    ),
}


class Choice:
    """An option that has a value for each parameter.

    Attributes:
      given: the option as the caller wrote it.
      rules: regular expressions: the first that is found in a parameter's path gives its value, which is 0 if none is
        found; ``None`` if the option is not given by rules.
      values: the values of the rules, or a prefix of the parameters' tree with values; or a function.
    """

    rules: tuple[str, ...] | None = None

    def __init__(self, name: str, given: Any) -> None:
        self.name, self.given = name, given
        self.values: Any = given
        values = given
        if self.is_function:
            with contextlib.suppress(ValueError):  # a builtin may have no signature
                try:
                    inspect.signature(given).bind("path", None)
                except TypeError as error:
                    raise TypeError(
                        "select: a callable is called with a parameter's path and a state leaf: "
                        f'{error}. For example select=lambda path, leaf: "embed" in path.'
                    ) from error
            return
        if name == "select" and _are_strings(given):
            self.rules = (given,) if isinstance(given, str) else tuple(given)
            values = (True,) * len(self.rules)
        elif name == "update_on" and _are_rules(given):
            self.rules, values = zip(*given, strict=True)
        meaning, expected = _MEANINGS[name]

        def one(x: Any) -> Any:
            if (found := meaning(x)) is None:
                raise ValueError(f"{name}: expected {expected.format(given)}")
            return found

        self.values = one(None) if values is None else jax.tree.map(one, values)

    @property
    def is_function(self) -> bool:
        """Whether it is a ``select`` function of a path and a leaf; another option's prefix may be a callable model."""
        return self.name == "select" and callable(self.values)

    def of(self, params: Any, names: Sequence[str]) -> Callable[[int | None], Governing]:
        """Return the option as a function of a parameter's number, which is ``None`` for a leaf without a parameter.

        Args:
          params: the parameters.
          names: their paths.
        """
        if self.is_function:
            return lambda i: None if i is None else (0, self.values)
        if self.rules is None and jax.tree_util.all_leaves([self.values]):
            return lambda i: (0, self.values)
        if not names:
            return lambda i: None
        if self.rules is not None:
            leaves, above = [*self.values, 0.0], matches(self.name, self.rules, names)
        else:
            leaves, treedef = jax.tree.flatten(self.values)
            try:
                above = jax.tree.leaves(jax.tree.broadcast(jax.tree.unflatten(treedef, range(len(leaves))), params))
            except ValueError as error:
                raise ValueError(
                    f"{self.name}: expected a single value or a pytree prefix of the parameters.\n"
                    f"  got        {self.given!r}\n  parameters {jax.tree.structure(params)}\n{error}"
                ) from error
        return lambda i: None if i is None else (above[i], leaves[above[i]])


class Policy:
    """The checked placement options of ``offload``, which documents them.

    Raises:
      ValueError: an option is out of range, or two do not go together.
    """

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
        if len(set(axes)) < len(axes):
            raise ValueError(f"shard_over: names an axis twice: {shard_over!r}.")
        if disk is not None and not isinstance(disk, Disk):
            named = repr(disk) if isinstance(disk, str | PurePath) else "'/nvme/run'"
            raise TypeError(f"disk: expected a jo.disk(directory, ...), got {disk!r}. Fix: disk=jo.disk({named}).")
        self.fraction, self.select = Choice("fraction", fraction), Choice("select", True if select is None else select)
        self.update_on = Choice("update_on", update_on)
        self.min_bytes, self.shard_over, self.disk = min_bytes, tuple(axes), disk
        on_device = self.update_on.values == 0
        if self.moves_nothing and not (on_device and disk is None):
            name = "update_on" if disk is None else "disk"
            raise ValueError(f"{name}: with fraction=0 nothing leaves the device. Fix: leave one of them out.")
        if disk is not None and not on_device:
            raise ValueError(
                f"disk: the device updates leaves on disk; got update_on={update_on!r} too. Fix: leave one of them out."
            )

    @property
    def moves_nothing(self) -> bool:
        """Whether ``fraction=0`` keeps everything on the device."""
        return self.fraction.values == 0


def _are_strings(said: Any) -> bool:
    """Return whether an option is one string or several."""
    return isinstance(said, str) or (isinstance(said, Sequence) and all(isinstance(x, str) for x in said))


def _are_rules(update_on: Any) -> bool:
    """Return whether these are pairs that begin with a regular expression; ``("host", "device")`` is a prefix tree."""
    return (
        isinstance(update_on, (list, tuple))
        and bool(update_on)
        and all(isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[0], str) for x in update_on)
        and not all(rule in _SIDES for rule, _ in update_on)
    )
