"""``placement``: traces an update or a step, and reads from it where each leaf lives and how it is streamed."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.extend.core as jex
import optax
from jax.sharding import NamedSharding

from jax_offload._base import memory as _memory
from jax_offload._base.around import described
from jax_offload._base.arrays import is_traced
from jax_offload._base.on_disk import is_on_disk
from jax_offload._base.shardings import shards_of
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Update
from jax_offload._placement.placement import Leaf, unmanaged
from jax_offload._plan.options import claimed, merged
from jax_offload._plan.plan import Planned
from jax_offload._plan.transfers import from_disk
from jax_offload._report.callables import opened, unwrapped
from jax_offload._report.printed import ARGUMENT, Placement
from jax_offload._state.state import abstract_leaves, placed_leaves

_ORDER = "order: guessed from the parameters' paths; "
_READ, _SAY = "placement(step, *args) reads it from the step", "the step does not tell it, offload(order=) does"
_ASK = "tx.init(params) or abstract_state(tx, params) before the step tells them, for parameters of one sharding"


def guessed(updates: Sequence[Update], *, of_step: bool) -> tuple[str, ...]:
    """The facts on which these updates rely that neither their arguments nor the trace around them show."""
    orders = [_ORDER + (_SAY if of_step else _READ)] if any(map(_in_guessed_order, updates)) else []
    return tuple(dict.fromkeys([*orders, *(each for update in updates for each in _shardings(update, of_step))]))


def _in_guessed_order(update: Update) -> bool:
    """Whether several slices of an ``offload`` without ``order`` are loaded in an order that nothing tells."""
    free = {v for v, claim in claimed(update.claims).items() if claim.options.order is None}
    return not update.ordered and sum(not free.isdisjoint(p.slice.loads) for p in update.planned) > 1


def _shardings(update: Update, of_step: bool) -> Iterator[str]:
    known = merged([each.options for each in update.claims])
    by_sharding: dict[str, list[str]] = {}
    for path in sorted(known.remembered):
        sharding = known.shardings[path]
        if sharding.num_devices > 1:  # on one there is nothing to decide
            text = f"P({', '.join(map(repr, sharding.spec))})" if isinstance(sharding, NamedSharding) else str(sharding)
            by_sharding.setdefault(text, []).append(path)
    if by_sharding:
        each = "; ".join(f"{text} of {_some(paths)}" for text, paths in by_sharding.items())
        yield f"shardings: remembered from init, or from where they were asked for: {each}"
    if (unknown := known.unknown - known.shardings.keys()) and update.planned:
        none = f"not known of {_some(unknown)}" if of_step else f"{len(unknown)} of the parameters have none"
        yield f"shardings: {none}, counted as on one device" + (f"; {_ASK}" if of_step else "")


def _some(paths: Sequence[str] | Set[str]) -> str:
    first, *rest = sorted(paths)
    return f"{first} and {len(rest)} more" if rest else first


_UNSEEN = "not loaded by an update in what was traced; under vmap and derivatives none is seen"
_PUT = "whole, by a device_put of the step itself, which no window limits"
_NO_UPDATE = "no update of an offload was seen in it (under vmap and derivatives none is)"


def placement(tx: optax.GradientTransformation | Callable[..., Any], *args: Any, **extra_args: Any) -> Placement:
    """Say where each leaf of the optimizer state lives and why, and how ``update`` brings it to the device.

    ``placement(tx, params)`` traces the ``update`` of a transformation with an ``offload`` anywhere inside it. It
    guesses the order of loading from the paths, and ``guessed`` says so.

    ``placement(step, *args)`` traces a training step, jitted or not: the schedule that it really emits, in the order in
    which its gradients appear. The rows are all arguments in host memory, by their paths in the arguments.

    Args:
      tx: the transformation, or the step.
      *args: the parameters, or the step's arguments, static ones too. Concrete or abstract; nothing is allocated.
      **extra_args: what ``tx.update`` needs besides gradients, state and parameters, or the step's keyword arguments.

    Returns:
      A ``Placement``, to print or read. If the function to trace raises, ``unknown`` says so.

    Raises:
      TypeError: ``tx`` is neither a transformation nor a function.
      ValueError: the parameters are a state, or an option of an ``offload`` does not fit them.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((256, 256), "float32")}
      >>> print(jo.placement(jo.offload(optax.adamw(1e-3)), params))  # doctest: +ELLIPSIS +NORMALIZE_WHITESPACE
         MiB  leaves  shape    dtype    state leaf
      ---------------------------------------------------------
      pinned_host, 0.50 MiB: eligible; whole, 2 leaves together
        0.50       2  256×256  float32  [0].{mu,nu}['w']
      device, 0.00 MiB: rank 0
        0.00       1  ()       int32    [0].count
      optimizer state: 0.50 MiB, of which 0.50 MiB (100.0%) in pinned_host and 0.00 MiB on the device
      window: 1.25 MiB on each device: ...
    """
    if isinstance(tx, optax.GradientTransformation | optax.MultiSteps):
        if len(args) != 1:
            raise TypeError(f"placement(tx, params): expected the parameters alone; got {len(args)} arguments.")
        return _of_transformation(tx, *args, **extra_args)
    if not callable(tx):
        raise TypeError(
            f"tx: expected an optax.GradientTransformation or a step, a function; got a "
            f"{type(tx).__name__}. The order is placement(tx, params) or placement(step, *args)."
        )
    return _of_step(tx, args, extra_args)


def _of_transformation(tx: Any, params: Any, **extra_args: Any) -> Placement:
    placed, treedef = placed_leaves(tx, params)
    # The types that a step is handed; with Explicit axes they say how each leaf is divided.
    state = jax.tree.unflatten(treedef, abstract_leaves(placed))

    def update(params: Any, state: Any, extra_args: Any) -> list[Any]:
        optax.with_extra_args_support(tx).update(params, state, params, **extra_args)
        return [x if isinstance(x, jax.Array) else 0 for x in jax.tree.leaves(state)]

    with described(params):
        trace, unknown = trace_of(update, params, state, extra_args)
    table = _table([leaf for leaf, _, _ in placed], unknown, _loads(trace))
    return dataclasses.replace(table, guessed=guessed(_updates(trace), of_step=False))


def _of_step(step: Any, args: Any, kwargs: Any) -> Placement:
    step, args, kwargs = opened(step, args, kwargs)
    step = unwrapped(step)

    def call(args: Any, kwargs: Any) -> list[Any]:
        given = jax.tree.leaves((args, kwargs))  # the step may change its arguments in place
        step(*args, **kwargs)
        return [x if isinstance(x, jax.Array) else 0 for x in given]  # static, or mutable

    with described():
        trace, unknown = trace_of(call, args, kwargs)
    flat = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_on_disk)[0]
    rows, loads = [_argument(jax.tree_util.keystr(path[1:]), x) for path, x in flat], _loads(trace)
    table = _table(rows, unknown, loads)
    away = any(row.host or row.disk for row in rows)
    updates = _updates(trace)
    return dataclasses.replace(
        table,
        leaves=tuple(leaf for leaf in table.leaves if leaf.host or leaf.disk or leaf.streams),
        stays=(_NO_UPDATE,) if trace is not None and away and not updates_in(trace) else loads.stays,
        elsewhere=loads.elsewhere,
        guessed=guessed(updates, of_step=True),
        in_turn=_in_turn(updates),
    )


def _argument(path: str, x: Any) -> Leaf:
    """Return the row of a step's argument."""
    row, disk = unmanaged(x), is_on_disk(x)
    sharding: Any = getattr(x, "sharding", None)
    mesh = isinstance(sharding, NamedSharding) and sharding.num_devices > 1
    return dataclasses.replace(
        row,
        path=path,
        host=not disk and getattr(sharding, "memory_kind", None) == _memory.HOST_KIND,
        sharding=f"P({', '.join(map(repr, sharding.spec))})" if mesh else "",
        shard_bytes=row.nbytes // math.prod(shards_of(sharding, row.shape)),
        why=ARGUMENT,
        disk=disk,
    )


def _in_turn(updates: Sequence[Update]) -> tuple[str, ...]:
    """How the preludes of these updates take gradients in turn, in words."""
    passes = [each for update in updates for each in update.passes]
    return tuple(dict.fromkeys(each.in_turn for each in passes if each.in_turn))


@dataclasses.dataclass(frozen=True)
class _Loads:
    """How a traced function loads its leaves.

    Attributes:
      of: each of the leaves that it returns.
      put: which of them the step itself moves to the device, as it does where an update runs ahead of a scan.
      from_disk: of a slice, by its id, how it comes from disk, if it does.
      times: of a slice, by its id, how often it runs, in scans of the step.
      unlisted: slices that load none of these.
      stays: why updates are not within the passes.
    """

    of: list[list[Planned]] = dataclasses.field(default_factory=list[list[Planned]])
    put: Sequence[bool] = ()
    from_disk: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    times: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    unlisted: list[Planned] = dataclasses.field(default_factory=list[Planned])
    stays: tuple[str, ...] = ()

    def how(self, p: Planned) -> str:
        """Describe a planned slice in words."""
        transfer, n, times = self.from_disk.get(id(p)) or str(p.transfer), len(p.slice.loads), self.times.get(id(p), 1)
        together, iterations = f"{n} leaves together" if n > 1 else "", f"in each of {times} iterations"
        return ", ".join(filter(None, [transfer, together, iterations if times > 1 else ""]))

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """How slices move whose leaves are in no row, because another update or the step itself makes them."""
        said = Counter((self.how(p), p.window.nbytes) for p in self.unlisted)
        ways = {f"{how}, through {nbytes / 2**20:.2f} MiB": n for (how, nbytes), n in said.items()}
        return tuple(f"{how}; {n} of these" if n > 1 else how for how, n in ways.items())


def _table(leaves: Sequence[Leaf], unknown: str, loads: _Loads) -> Placement:
    rows, windows = [], {}
    of, put = loads.of or [[] for _ in leaves], loads.put or [False for _ in leaves]
    for leaf, of_leaf, is_put in zip(leaves, of, put, strict=True):
        hidden = (leaf.host or leaf.disk) and not of_leaf and not unknown
        streams = (_PUT if is_put else _UNSEEN) if hidden else _in_words(of_leaf, loads)
        rows.append(dataclasses.replace(leaf, streams=streams))
        windows |= {id(p.window): dataclasses.replace(p.window, leaf=leaf.path) for p in of_leaf
                    if id(p.window) not in windows and not p.on_cores}  # fmt: skip
    return Placement(tuple(rows), unknown, tuple(windows.values()))


def trace_of(fun: Callable[..., list[Any]], *args: Any) -> tuple[Any, str]:
    """A function's closed jaxpr; or ``None``, and why it cannot be traced."""
    try:
        return traced(fun, *args), ""
    except Exception as error:
        return None, f"it raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _updates(traced: Any) -> list[Update]:
    found = [] if traced is None else updates_in(traced)
    return [each.update for each in found if isinstance(each.update, Update)]


def _loads(traced: Any) -> _Loads:
    """How a traced function, which returns leaves, loads these, and what else it loads."""
    if traced is None:
        return _Loads()
    leaves = traced.jaxpr.outvars
    index: dict[Any, list[Planned]] = {v: [] for v in leaves if not isinstance(v, jex.Literal)}
    found, unlisted = updates_in(traced), list[Planned]()
    for of, planned in (load for each in found for load in each.loads):
        for v in (rows := [v for v in of if v in index]):
            index[v].append(planned)
        if planned.slice.loads and not rows:
            unlisted.append(planned)
    updates = [each.update for each in found if isinstance(each.update, Update)]
    moves = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "device_put"]
    put = {
        x
        for eqn in moves
        for x, y in zip(eqn.invars, eqn.outvars, strict=True)
        if not isinstance(x, jex.Literal) and _memory.is_host_aval(x.aval) and not _memory.is_host_aval(y.aval)
    }
    return _Loads(
        of=[[] if isinstance(v, jex.Literal) else index[v] for v in leaves],
        put=[not isinstance(v, jex.Literal) and v in put for v in leaves],
        from_disk={id(p): from_disk(p, u.next_values, u.on_disk) for u in updates if u.on_disk for p in u.planned},
        times={id(p): each.times for each in found for p in each.update.planned},
        unlisted=unlisted,
        stays=tuple(dict.fromkeys(why for update in updates for why in update.stays)),
    )


def traced(fun: Callable[..., Any], *args: Any) -> Any:
    """Return the closed jaxpr of ``fun`` on the arrays in its arguments; others, such as functions, stay unchanged."""
    leaves, treedef = jax.tree.flatten(args)
    arrays = [k for k, x in enumerate(leaves) if is_traced(x)]

    def with_arrays(*values: Any) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
        return fun(*jax.tree.unflatten(treedef, filled.values()))

    return jax.jit(with_arrays).trace(*(_memory.in_its_memory(leaves[k]) for k in arrays)).jaxpr


def _in_words(loads: Sequence[Planned], ways: _Loads) -> str:
    said = [ways.how(p) for p in loads]
    repeated = len(said) > 1 and len(set(said)) == 1
    return f"{said[0]} ({len(said)} times)" if repeated else "; then ".join(said)
