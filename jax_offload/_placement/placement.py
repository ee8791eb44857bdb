"""Which state leaves live in host memory. Pure functions of shapes, dtypes and paths.

Nothing here asks for a device, so every process of a multi-host run, and every trace, comes to the same answer.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jax_offload._base.arrays import is_array, is_integer, is_like, nbytes
from jax_offload._base.on_disk import Place
from jax_offload._base.own_primitives import mark
from jax_offload._base.paths import names_of, owners
from jax_offload._placement.by_parameter import Select, is_scalar, per_parameter, selector, subtrees
from jax_offload._placement.cores import first_up_to
from jax_offload._plan.order import Order, ranks


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where one state leaf lives, and why: a row of the table that ``jax_offload.placement`` returns.

    Attributes:
      path: the leaf's path in the state, or in the arguments of a step, as ``jax.tree_util.keystr`` prints it.
      shape: the global shape.
      dtype: the dtype in which the leaf is stored; its type if it is not an array.
      nbytes: the size in bytes over all devices, with replicas counted once.
      param: the path ``a/b/c`` of the parameter to which the leaf belongs; ``None`` if there is none.
      owner: that parameter's number in flattening order.
      host: whether the leaf lives in pinned host memory.
      why: the rule that decided; "argument" in the table of a step.
      rank: the leaf's place in the order in which leaves are taken, that of the backward pass.
      shard_over: the mesh axes over which the leaf is divided beyond its parameter's.
      sharding: the leaf's ``PartitionSpec`` as text; empty without a mesh.
      shard_bytes: the size in bytes on each device.
      streams: how ``update`` brings the leaf to the device: whole or in chunks, how often, and why.
      window: the ``window`` of its ``offload``, in bytes.
      order: the ``order`` of its ``offload``.
      on_cores: whether the host's cores update it.
      disk: whether it is on disk instead of in pinned host memory.
      place: which leaf of which ``jax_offload.disk`` it is then.

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
    window: int | None = None
    order: Order = None
    on_cores: bool = False
    disk: bool = False
    place: Place | None = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The placement options of ``offload``, checked."""

    fraction: Any
    select: Select
    min_bytes: int
    order: Order = None
    shard_over: tuple[str, ...] = ()
    update_on: Any = 0.0
    host_bytes: int | None = None  # of what may be in host memory; the rest is on disk. None: there is no disk

    def __post_init__(self) -> None:
        for f in jax.tree.leaves(self.fraction):
            if isinstance(f, bool) or not isinstance(f, (int, float, np.floating)) or not 0 <= f <= 1:
                raise ValueError(
                    "fraction: expected a float in [0, 1], or a pytree prefix of the parameters with one per "
                    f"subtree; got {self.fraction!r}. fraction=0.5 offloads half of the eligible bytes."
                )
        if not is_integer(self.min_bytes) or self.min_bytes < 0:
            raise ValueError(
                f"min_bytes: expected a number of bytes >= 0, an int; got {self.min_bytes!r}. 2**16 are 64 KiB."
            )
        if self.order is not None and (
            not isinstance(self.order, Sequence)
            or isinstance(self.order, str)
            or not all(isinstance(rule, str) for rule in self.order)
        ):
            raise ValueError(
                "order: expected regular expressions, in the order in which the gradients of what they match appear "
                f"in the backward pass; got {self.order!r}. For example order=['head', 'layers', 'embed']."
            )


def place(policy: Policy, state: Any, params: Any) -> list[Leaf]:
    """One ``Leaf`` for every leaf of ``state`` (arrays or abstract values), in the order of its flattening."""
    paths_params = jax.tree_util.tree_flatten_with_path(params)[0]
    owner = owners([path for path, _ in paths_params])
    paths_state = jax.tree_util.tree_flatten_with_path(state)[0]
    order = ranks(state, params, policy.order)
    names = names_of([path for path, _ in paths_params])
    fractions = per_parameter("fraction", policy.fraction, params, names)
    selected = selector(policy.select, params, [(name, p) for name, (_, p) in zip(names, paths_params, strict=True)])
    by_params = policy.select is not None or not is_scalar(policy.fraction)

    leaves: list[Leaf] = []
    asked: list[bool] = []  # what select says of the leaves that may move
    groups: list[float | None] = []  # the fraction that governs a leaf; None: it stays
    for index, (path, x) in enumerate(paths_state):
        i = owner(path)
        why, governing, name = stays(x, policy.min_bytes), None, keystr(path)
        like_param = not why and i is not None and is_like(name, np.shape(x), np.shape(paths_params[i][1]))
        if not why and i is None and by_params:
            why = "belongs to no one parameter"
        if not why and i is not None:
            asked.append(selected(i, x))
            why = "" if asked[-1] else "not selected"
        if not why:
            governing = float(fractions[i] if i is not None else policy.fraction)
        groups.append(governing)
        leaves.append(
            Leaf(name, np.shape(x), getattr(x, "dtype", type(x)), nbytes(x),
                 None if i is None else names[i], i, False, why, order[index],
                 policy.shard_over if like_param else ())
        )  # fmt: skip
    if callable(policy.select) and asked and not any(asked):
        raise ValueError(
            f"select: {policy.select!r} selects no leaf of the state, of the {len(asked)} that may move. It is called "
            f"with a parameter's path and a state leaf; the paths are {', '.join(names[:8])}."
        )
    placed = _take(leaves, groups, subtrees("fraction", policy.fraction, params, names, owner, paths_state))
    placed = placed if policy.host_bytes is None else _with_disk(placed, policy.host_bytes)
    shares = per_parameter("update_on", policy.update_on, params, names)
    return _with_cores(placed, shares, subtrees("update_on", policy.update_on, params, names, owner, paths_state))


def place_next(policy: Policy, state: Any, plan: list[Leaf], after: Any, params: Any) -> list[Leaf]:
    """``place`` for the state that follows ``state``, of which ``plan`` is: the same where no leaf changes its type."""

    def types(tree: Any) -> list[Any]:
        return [(np.shape(x), getattr(x, "dtype", type(x))) for x in jax.tree.leaves(tree)]

    same = jax.tree.structure(after) == jax.tree.structure(state) and types(after) == types(state)
    return plan if same else place(policy, after, params)


def marked(state: Any, plan: Sequence[Leaf]) -> Any:
    """``state``, whose trace says of each leaf what was decided, where that is going to be read.

    Chains and wrappers pass leaves on untouched, so the table can say why whatever stands around an ``offload``.
    """
    leaves, treedef = jax.tree.flatten(state)
    rows = [mark(x, leaf) if is_array(x) else x for x, leaf in zip(leaves, plan, strict=True)]
    return jax.tree.unflatten(treedef, rows)


def warn_of_nothing(plan: Sequence[Leaf]) -> None:
    """Says aloud that nothing will be offloaded."""
    if not any(leaf.host or leaf.shard_over for leaf in plan) and any(leaf.nbytes and leaf.shape for leaf in plan):
        reasons = sorted({leaf.why for leaf in plan if leaf.nbytes and leaf.shape})
        largest = max(leaf.nbytes for leaf in plan)
        warnings.warn(
            f"offload() leaves the whole optimizer state on the device ({', '.join(reasons)}; the largest leaf has "
            f"{largest} bytes). See jax_offload.placement(tx, params); lower min_bytes or raise fraction.",
            stacklevel=2,
        )


def unmanaged(x: Any) -> Leaf:
    """The row of a leaf that no ``offload`` has seen."""
    dtype = getattr(x, "dtype", type(x))
    return Leaf("", np.shape(x), dtype, nbytes(x), None, None, False, "outside any offload", 0)


def stays(x: Any, min_bytes: int) -> str:
    """Why a leaf stays on the device whatever the options say; empty where it may move."""
    if getattr(x, "dtype", None) is None:
        return "not an array"
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "PRNG key"
    if np.ndim(x) == 0:
        return "rank 0"
    if nbytes(x) == 0:
        return "empty"
    return f"< min_bytes={min_bytes}" if nbytes(x) < min_bytes else ""


def _take(leaves: list[Leaf], fractions: list[float | None], subtree: list[int]) -> list[Leaf]:
    """Per subtree with a fraction of its own: leaves in backward order, up to where the error in bytes is smallest.

    The last gradients of the backward pass have the least work left to hide behind, so what stays is theirs.
    """
    host: set[int] = set()
    for group in sorted(set(subtree)):
        eligible = [i for i, s in enumerate(subtree) if s == group and fractions[i] is not None]
        eligible.sort(key=lambda i: leaves[i].rank)
        if not eligible:
            continue
        target = fractions[eligible[0]] * sum(leaves[i].nbytes for i in eligible)  # pyright: ignore[reportOptionalOperand]
        sums = np.cumsum([0] + [leaves[i].nbytes for i in eligible])
        host.update(eligible[: int(np.argmin(np.abs(sums - target)))])
    return [
        leaf if leaf.why else dataclasses.replace(
            leaf, host=i in host, why="eligible" if i in host else f"beyond fraction={fractions[i]:g}")
        for i, leaf in enumerate(leaves)
    ]  # fmt: skip


def _with_disk(leaves: list[Leaf], host_bytes: int) -> list[Leaf]:
    """The leaves, those marked that are on disk: of what ``offload`` keeps in host memory all that is beyond
    ``host_bytes``.

    What stays are whole parameters, those whose gradients come last: the state of the first is read while the
    gradients are made.
    """
    together: dict[Hashable, list[int]] = {}
    for i in sorted((i for i, leaf in enumerate(leaves) if leaf.host), key=lambda i: -leaves[i].rank):
        together.setdefault(leaves[i].path if leaves[i].owner is None else leaves[i].owner, []).append(i)
    left, disk = host_bytes, set[int]()
    for group in together.values():
        size = sum(leaves[i].nbytes for i in group)
        left, fits = (left - size, True) if size <= left else (left, False)
        disk |= set() if fits else {*group}
    why = f"beyond host_bytes={host_bytes}"
    return [dataclasses.replace(x, disk=True, why=why) if i in disk else x for i, x in enumerate(leaves)]


def _with_cores(leaves: list[Leaf], shares: Sequence[float], subtree: list[int]) -> list[Leaf]:
    """The leaves, those marked that the host's cores update: of what is in host memory, per subtree, the share that is
    said for its parameters."""
    found = set[int]()
    for group in sorted(set(subtree) - {-1}) if any(shares) else ():
        own = [i for i, s in enumerate(subtree) if s == group and leaves[i].host]
        whose = [leaves[i].owner for i in own]
        share = next((shares[i] for i in whose if i is not None), max(shares))
        sizes, ranks = [leaves[i].nbytes for i in own], [leaves[i].rank for i in own]
        found |= {own[k] for k in first_up_to(share, sizes, ranks, whose)}
    return [dataclasses.replace(leaf, on_cores=True) if i in found else leaf for i, leaf in enumerate(leaves)]
