"""``placement``: where each leaf lives and how it is streamed, read off the trace of an update or a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from jax_offload._disk.leaves import is_on_disk
from jax_offload._emit.region import Found, Update, updates_in
from jax_offload._emit.run import put_whole
from jax_offload._look.text import aligned, in_mib, terminal_width
from jax_offload._program import memory as _memory
from jax_offload._program.arrays import is_traced, some
from jax_offload._program.jaxprs import Var
from jax_offload._program.memory import sharding_of, shards_of
from jax_offload._schedule.schedule import Planned, Window, from_disk, merged
from jax_offload._state.arguments import described, is_state
from jax_offload._state.placement import Leaf, unmanaged
from jax_offload._state.state import described_state

# ---- any callable training step as a pure function, and as something that ``jax`` can trace and lower
#
# A step of ``flax.nnx.jit`` changes its arguments in place, one of ``equinox.filter_jit`` takes and returns functions
# among its arrays, and a method, a ``functools.partial`` or a lambda calls a jitted step. All of them come down to a
# function of arrays, which returns the step's results and the arrays that it changes.

_JIT = type(jax.jit(lambda: None))
_HINT = (
    "jax_offload traces this step with its arguments, without running it. Pass everything that it reads or changes as "
    "an argument, or pass the jitted function that it calls, step(*args)."
)


def fix_of(error: Exception, args: Any) -> str:
    """What to do where jax refuses arithmetic between memories, or a sharding of another memory; else empty."""
    if not isinstance(error, ValueError) or not re.search("^memory_space of|^Memory kinds passed", str(error)):
        return ""
    paths = jax.tree_util.tree_flatten_with_path(args)[0]
    hosted = (path[1:] for path, x in paths if getattr(sharding_of(x), "memory_kind", None) == _memory.HOST_KIND)
    names = some([*map(jax.tree_util.keystr, hosted)])
    return (
        f". Fix: jax_offload.jit, which loads what is in host memory ({names}), and in_shardings, if any, that "
        "name the memory of each argument; or load it in the step, jax_offload.to_device(x)"
    )


def may_be_step(x: Any) -> bool:
    """Whether ``x`` can be called, and tells what it computes: a program that is traced or compiled tells no update."""
    return callable(x) and not isinstance(x, jax.stages.Traced | jax.stages.Compiled)


def opened(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a step without the partials and bound methods around it, and its arguments with those that they add."""
    kwargs = dict(kwargs)
    while True:
        if isinstance(step, functools.partial):
            step, args, kwargs = step.func, (*step.args, *args), {**step.keywords, **kwargs}
        elif isinstance(step, types.MethodType):
            step, args = step.__func__, (step.__self__, *args)
        else:
            return step, args, kwargs


def unwrapped(step: Any) -> Callable[..., Any]:
    """Return the function under a ``jit``, to be traced without that ``jit``."""
    if hasattr(step, "whole_step"):  # which does not keep the step alive
        return functools.wraps(step, updated=())(lambda *args, **kwargs: step.whole_step(*args, **kwargs))
    # jax accepts no compiler_options in a jit inside another.
    return step.__wrapped__ if hasattr(step, "lower") and hasattr(step, "__wrapped__") else step


def jitted(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return a step with the methods ``trace`` and ``lower``, and the arguments that these take.

    A function from ``jax.jit`` or ``jax_offload.jit`` stays unchanged. Any other callable is jitted: arguments that are
    not arrays are static, and an argument is donated if a ``jit`` inside donates all of it. The function returns the
    step's result if that is made of arrays and no argument has changed; else a pair of lists: the arrays in the result,
    and the arrays in the arguments that have changed in place.
    """
    if isinstance(step, _JIT) or hasattr(step, "whole_step"):
        return step, args, kwargs
    leaves, treedef = jax.tree.flatten((args, dict(kwargs)))

    @functools.wraps(step, updated=())
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        arrays = iter(jax.tree.leaves((args, kwargs)))
        args, kwargs = jax.tree.unflatten(treedef, [next(arrays) if is_traced(x) else x for x in leaves])
        given = jax.tree.leaves((args, kwargs))
        results = jax.tree.leaves(result := step(*args, **kwargs))
        changed = [new for old, new in zip(given, jax.tree.leaves((args, kwargs)), strict=True) if new is not old]
        if not changed and all(map(is_traced, results)):
            return result
        return [x for x in results if is_traced(x)], changed

    args, kwargs = jax.tree.unflatten(treedef, [x if is_traced(x) else None for x in leaves])
    try:
        traced = jax.jit(of_arrays).trace(*args, **kwargs).jaxpr.jaxpr
    except Exception as error:
        error.add_note(_HINT)
        raise
    calls = [(eqn.invars, flags) for eqn in traced.eqns if (flags := eqn.params.get("donated_invars"))]
    donated = {v for operands, flags in calls for v, is_donated in zip(operands, flags, strict=True) if is_donated}
    by_place, by_name = jax.tree.unflatten(jax.tree.structure((args, kwargs)), [v in donated for v in traced.invars])
    positions = [k for k, x in enumerate(by_place) if (flags := jax.tree.leaves(x)) and all(flags)]
    names = [name for name, x in by_name.items() if (flags := jax.tree.leaves(x)) and all(flags)]
    return jax.jit(of_arrays, donate_argnums=positions, donate_argnames=names), args, kwargs


def replaced(args: Sequence[Any], results: Any) -> dict[int, Any]:
    """Match a step's arguments, by their place, with the results that replace them in the next step.

    An argument takes the first unused result that has its structure, shapes and dtypes.
    """

    def types_of(x: Any) -> Any:
        leaves, treedef = jax.tree.flatten(x)
        leaves = [jax.typeof(leaf) if isinstance(leaf, bool | int | float | complex) else leaf for leaf in leaves]
        return treedef, [(getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]

    left = [results, *(results if isinstance(results, tuple | list) else ())]
    found: dict[int, Any] = {}
    for k, argument in enumerate(args):
        same = next((i for i, x in enumerate(left) if jax.tree.leaves(x) and types_of(x) == types_of(argument)), None)
        if same is not None:
            found[k] = left.pop(same)
    return found


def of_states(tree: Any) -> list[bool]:
    """Say for each leaf whether it is in an optimizer's state."""
    parts = jax.tree.leaves(tree, is_leaf=lambda x: is_state(x) or is_on_disk(x))
    return [is_state(x) for x in parts for _ in jax.tree.leaves(x, is_leaf=is_on_disk)]


ARGUMENT = "argument"  # why a row of a step's table is there
_HEADER = ("MiB", "leaves", "shape", "dtype", "sharding", "state leaf")
_RIGHT = (0, 1)
_SHARDING = 4
# Paths in one row may differ in a number (a layer's) or in a field of letters only (.mu and .nu).
_PIECES = re.compile(r"(\d+|\.[A-Za-z_]+(?!\w))")


@dataclasses.dataclass(frozen=True, repr=False)
class Placement:
    """The table that says where each leaf lives and why, and how it streams; ``print`` it.

    ``jax_offload.placement`` returns it. Sizes are in bytes; the printed table has MiB. It shows one group for each
    memory, reason and way of streaming, the largest first, and one row for leaves that are alike
    (``['layers_{00..23}']``, ``.{mu,nu}``). It is as wide as the terminal, or 80 columns.

    Attributes:
      leaves: a ``Leaf`` for every state leaf; for a step, for every argument in host memory, and for each large one
        that stays on the device beside parameters in host memory.
      unknown: why ``update`` could not be traced; empty if it could.
      windows: for each ``offload`` that streams something, the bytes of state on each device at a time, ``nbytes``, and
        ``why`` there are so many.
      stays: for a step of ``jax_offload.jit``, why leaves are not updated inside its passes, or only at their
        end.
      guessed: facts that the trace does not show, and their sources: the order of the backward pass, the shardings
        of parameters.
      in_turn: for a step, which gradients wait for each other, so that no backward pass is put off.
      elsewhere: for a step, how it loads host arrays that are not its arguments: arrays that it makes itself, or that
        one update makes for another.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((256, 256), "float32")}
      >>> table = jo.placement(jo.offload(optax.adamw(1e-3)), params)
      >>> table.host_bytes, table.device_bytes  # two moments, and the count of steps
      (524288, 4)
      >>> table
      Placement(3 leaves: 0.50 MiB in pinned_host, 0.00 MiB on the device)
    """

    leaves: tuple[Leaf, ...]
    unknown: str = ""
    windows: tuple[Window, ...] = ()
    stays: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    in_turn: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in pinned host memory, with replicas counted once."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.host)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state that stay in device memory, with replicas counted once."""
        return sum(leaf.nbytes for leaf in self.leaves if not leaf.host and not leaf.disk)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the state on disk, which every step reads and writes; the files take twice as many."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.disk)

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes of pinned host memory that the state takes for each device."""
        return sum(leaf.shard_bytes for leaf in self.leaves if leaf.host)

    def __repr__(self) -> str:
        return (
            f"Placement({len(self.leaves)} leaves: {in_mib(self.host_bytes)} MiB in {_memory.HOST_KIND}, "
            f"{in_mib(self.device_bytes)} MiB on the device"
            + (f", {in_mib(self.disk_bytes)} MiB on disk)" if self.disk_bytes else ")")
        )

    def __str__(self) -> str:
        width = terminal_width()
        lines = _text(self.leaves, width)
        lines.insert(1, "-" * min(width, max(map(len, lines))))
        for sentence in _sentences(self):
            lines += textwrap.wrap(sentence, width, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)


def placement(tx: optax.GradientTransformation | Callable[..., Any], *args: Any, **extra_args: Any) -> Placement:
    """Say where each leaf of the optimizer state lives and why, and how ``update`` brings it to the device.

    ``placement(tx, params)`` traces the ``update`` of a transformation with an ``offload`` anywhere inside it. It
    guesses the order of loading from the paths, and ``guessed`` says so.

    ``placement(step, *args)`` traces a training step, jitted or not: the schedule that it really emits, in the order in
    which its gradients appear. The rows are all arguments in host memory, by their paths in the arguments; ``bound[0]``
    is the first argument that a method or a ``functools.partial`` adds.

    Args:
      tx: the transformation, or the step.
      *args: the parameters, or the step's arguments, including static ones, concrete or abstract; nothing is allocated.
      **extra_args: the arguments that ``tx.update`` needs besides gradients, state and parameters, or the step's
        keyword arguments.

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
        return of_transformation(tx, *args, **extra_args)[0]
    if not may_be_step(tx):
        raise TypeError(
            f"tx: expected an optax.GradientTransformation or a step, a function; got a "
            f"{type(tx).__name__}. The order is placement(tx, params) or placement(step, *args)."
        )
    return _of_step(tx, args, extra_args)


_UNSEEN = "not loaded by an update in what was traced; under vmap and derivatives none is seen"
_PUT = (
    "whole, by a device_put of the step itself, which no window limits; keep what no layer reads by rows on "
    "the device, with jo.to_host(params, loss, batch) or select="
)
AHEAD = "its update runs ahead of the pass that reads the new parameters; offload(select=) keeps it on the device"
_BESIDE = "stays on the device, beside parameters in host memory"
_NO_UPDATE = "no update of an offload was seen in it (under vmap and derivatives none is)"


def of_transformation(tx: Any, params: Any, **extra_args: Any) -> tuple[Placement, list[Found]]:
    """Return the table of a transformation, and the updates in its trace; none if it cannot be traced."""
    rows, state = described_state(tx, params)

    def update(state: Any, params: Any, extra_args: Any) -> None:
        gradients = _memory.loaded(params)  # the passes make them on the device
        optax.with_extra_args_support(tx).update(gradients, state, params, **extra_args)

    with described(params):
        trace, unknown = trace_of(update, state, params, extra_args)
    return _table(rows, jax.tree.leaves(state), [True] * len(rows), trace, unknown, of_step=False)


def _of_step(step: Any, args: Any, kwargs: Any) -> Placement:
    given = len(args)
    step, args, kwargs = opened(step, args, kwargs)
    bound, step = len(args) - given, unwrapped(step)

    def call(args: Any, kwargs: Any) -> None:
        step(*args, **kwargs)

    with described():
        trace, unknown = trace_of(call, args, kwargs)
    flat = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_on_disk)[0]
    rows = [_argument(_name(path, bound), x) for path, x in flat]
    # the state of a split nnx.Optimizer is no tuple of optax, but its path holds flax's name for it
    states = [own or "opt_state" in row.path for row, own in zip(rows, of_states((args, kwargs)), strict=True)]
    table = _table(rows, jax.tree.leaves((args, kwargs)), states, trace, unknown, of_step=True)[0]
    return dataclasses.replace(table, leaves=(*table.leaves, *_beside([path for path, _ in flat], rows, states)))


def _beside(paths: Sequence[Any], rows: Sequence[Leaf], states: Sequence[bool]) -> list[Leaf]:
    """Return the rows of the arrays that stay on the device in an argument whose other arrays, and no optimizer's
    state, are in host memory."""
    given = [(path, row) for path, row, of_state in zip(paths, rows, states, strict=True) if not of_state]
    partly = {path[:2] for path, row in given if row.host}
    return [
        dataclasses.replace(row, streams=_BESIDE)
        for path, row in given
        if path[:2] in partly and not row.host and not row.disk and row.nbytes >= _memory.DEFAULT_MIN_BYTES
    ]


def _name(path: tuple[Any, ...], bound: int) -> str:
    """Return an argument's path in the call; a method or a partial adds the first ``bound`` arguments."""
    k = getattr(path[1], "idx", None)
    if k is None:
        return jax.tree_util.keystr(path[1:])
    return (f"bound[{k}]" if k < bound else f"[{k - bound}]") + jax.tree_util.keystr(path[2:])


def _argument(path: str, x: Any) -> Leaf:
    """Return the row of a step's argument."""
    row, disk = unmanaged(x), is_on_disk(x)
    sharding: Any = getattr(x, "sharding", None)
    mesh = isinstance(sharding, NamedSharding) and sharding.num_devices > 1
    return dataclasses.replace(
        row,
        path=path,
        host=not disk and getattr(sharding, "memory_kind", None) == _memory.HOST_KIND,
        sharding=_spec(sharding) if mesh else "",
        shard_bytes=row.nbytes // math.prod(shards_of(sharding, row.shape)),
        why=ARGUMENT,
        disk=disk,
    )


def _spec(sharding: Any) -> str:
    return f"P({', '.join(map(repr, sharding.spec))})" if isinstance(sharding, NamedSharding) else str(sharding)


def _table(
    rows: Sequence[Leaf], leaves: Sequence[Any], states: Sequence[bool], trace: Any, unknown: str, *, of_step: bool
) -> tuple[Placement, list[Found]]:
    """Return the table of a traced function, and the updates in it.

    Args:
      rows: a row for each of ``leaves``.
      leaves: the first leaves of the function's arguments.
      states: whether each of them is in an optimizer's state.
      trace: its closed jaxpr; ``None`` if it cannot be traced, for the reason ``unknown``.
      of_step: whether it is a step, and not the update of a transformation.
    """
    found = [] if trace is None else updates_in(trace)
    updates = [each.update for each in found if isinstance(each.update, Update)]
    arguments = iter(() if trace is None else trace.jaxpr.invars)
    of_row: list[Var | None] = [next(arguments, None) if is_traced(x) else None for x in leaves]
    loads: dict[Var | None, list[tuple[str, Planned]]] = {v: [] for v in of_row}
    elsewhere, windows, shown = Counter[str](), dict[int, Window](), list[Leaf]()
    for each in found:
        for (of, p), how in zip(each.loads, _ways(each), strict=True):
            own = [v for v in of if v in loads]
            for v in own:
                loads[v].append((how, p))
            if p.slice.loads and not own:
                elsewhere[f"{how}, through {in_mib(p.window.nbytes)} MiB"] += 1
    put = set() if trace is None else put_whole(trace.jaxpr.eqns)
    for row, v, of_state in zip(rows, of_row, states, strict=True):
        of = [] if v is None else loads[v]
        hidden = (row.host or row.disk) and not of and not unknown
        own = [f"whole, which no window limits: {AHEAD}" if of_state and found else _PUT] if v in put else []
        streams = _UNSEEN if hidden and not own else _in_words([*own, *(how for how, _ in of)])
        shown.append(dataclasses.replace(row, streams=streams))
        for _, p in of:
            if not p.on_cores:
                window = windows.setdefault(id(p.window), dataclasses.replace(p.window, leaf=row.path))
                if p.bytes_at_once > window.nbytes:
                    windows[id(p.window)] = dataclasses.replace(window, nbytes=p.bytes_at_once)
    table = Placement(tuple(shown), unknown, tuple(windows.values()), guessed=guessed(updates, of_step=of_step))
    if not of_step:
        return table, found
    away = trace is not None and any(row.host or row.disk for row in rows)
    passes = [each for update in updates for each in update.passes]
    stays = [*(why for u in updates for why in u.stays), *(p.exposed for each in found for _, p in each.loads)]
    table = dataclasses.replace(
        table,
        leaves=tuple(leaf for leaf in shown if leaf.host or leaf.disk or leaf.streams),
        stays=tuple(dict.fromkeys(filter(None, stays))) if found or not away else (_NO_UPDATE,),
        elsewhere=tuple(f"{how}; {n} of these" if n > 1 else how for how, n in elsewhere.items()),
        in_turn=tuple(dict.fromkeys(each.in_turn for each in passes if each.in_turn)),
    )
    return table, found


def _ways(each: Found) -> Iterator[str]:
    """Yield how each slice of an update moves, in words."""
    update = each.update
    disk = update.on_disk if isinstance(update, Update) else ()
    for p in update.planned:
        n = len(p.slice.loads)
        transfer = from_disk(p, update.next_values, disk) if disk and isinstance(update, Update) else str(p.transfer)
        iterations = f"in each of {each.times} iterations" if each.times > 1 else ""
        yield ", ".join(filter(None, [transfer, f"{n} leaves together" if n > 1 else "", iterations]))


def _in_words(said: Sequence[str]) -> str:
    repeated = len(said) > 1 and len(set(said)) == 1
    return f"{said[0]} ({len(said)} times)" if repeated else "; then ".join(said)


def trace_of(fun: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Trace a function on the arrays in its arguments; others, such as functions, stay unchanged.

    Returns:
      Its closed jaxpr and an empty text; or ``None``, and why it cannot be traced.
    """
    leaves, treedef = jax.tree.flatten(args)
    arrays = [k for k, x in enumerate(leaves) if is_traced(x)]

    def with_arrays(*values: Any) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
        return fun(*jax.tree.unflatten(treedef, filled.values()))

    try:
        return jax.jit(with_arrays).trace(*(_memory.in_its_memory(leaves[k]) for k in arrays)).jaxpr, ""
    except Exception as error:
        why = (str(error).splitlines() or [""])[0] + fix_of(error, args)
        return None, f"it raises {type(error).__name__}: {why}"


_ORDER = "order: guessed from the parameters' paths; "
_READ, _SAY = "placement(step, *args) reads it from the step", "the step does not tell it"
_ASK = "tx.init(params) or abstract_state(tx, params) before the step tells them, for parameters of one sharding"


def guessed(updates: Sequence[Update], *, of_step: bool) -> tuple[str, ...]:
    """Return the facts on which updates rely that neither their arguments nor the trace around them show."""
    said: dict[str, None] = {}
    for update in updates:
        if not update.ordered and sum(bool(p.slice.loads) for p in update.planned) > 1:
            said[_ORDER + (_SAY if of_step else _READ)] = None
        known = merged([each.options for each in update.claims])
        by_sharding: dict[str, list[str]] = {}
        for path in sorted(known.remembered):
            if (sharding := known.shardings[path]).num_devices > 1:  # on one there is nothing to decide
                by_sharding.setdefault(_spec(sharding), []).append(path)
        if by_sharding:
            each = "; ".join(f"{text} of {some(paths)}" for text, paths in by_sharding.items())
            said[f"shardings: remembered from init, or from where they were asked for: {each}"] = None
        if (unknown := known.unknown - known.shardings.keys()) and update.planned:
            none = f"not known of {some(sorted(unknown))}" if of_step else f"{len(unknown)} of the parameters have none"
            said[f"shardings: {none}, counted as on one device" + (f"; {_ASK}" if of_step else "")] = None
    return tuple(said)


# ---- as it prints

Row = tuple[list[list[str]], list[Leaf]]  # for each piece of a path, the choices; and the leaves that have these paths


def _folded(leaves: Sequence[Leaf]) -> list[Row]:
    """Make rows of leaves that show the same beside their paths, the largest first.

    A row's path can be read as the paths of all its leaves, and as no other.
    """
    rows: list[Row] = [([[piece] for piece in _PIECES.split(leaf.path)], [leaf]) for leaf in leaves]
    for k in range(1, max((len(path) for path, _ in rows), default=0), 2):
        joined: dict[object, Row] = {}
        for path, of in rows:
            x, key = of[0], id(path)
            if k < len(path):
                shown = x.shape, str(x.dtype), x.sharding, x.host, x.disk, x.why, x.streams
                key = shown, str(path[:k]), str(path[k + 1 :]), path[k][0].isdigit()
            first, together = joined.setdefault(key, (path, []))
            together += of
            if first is not path:
                first[k] += [piece for piece in path[k] if piece not in first[k]]
        rows = list(joined.values())
    return sorted(rows, key=lambda row: -_total(row[1]))


def _total(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _choices(pieces: Sequence[str]) -> str:
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].startswith("."):
        return f".{{{','.join(piece[1:] for piece in pieces)}}}"
    runs: list[list[str]] = []
    for number in sorted(pieces, key=lambda piece: (int(piece), piece)):
        if runs and int(runs[-1][-1]) + 1 == int(number):
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"{{{','.join(f'{run[0]}..{run[-1]}' if len(run) > 2 else ','.join(run) for run in runs)}}}"


def _cells(row: Row) -> tuple[str, ...]:
    (path, leaves), leaf = row, row[1][0]
    shape = "×".join(map(str, leaf.shape)) or "()"
    return in_mib(_total(leaves)), str(len(leaves)), shape, str(leaf.dtype), leaf.sharding, "".join(map(_choices, path))


def _text(leaves: tuple[Leaf, ...], width: int) -> list[str]:
    """Return the header, and for each memory, reason and way of streaming a heading with its rows, the largest first.

    A path that is too long has a line of its own. Without a mesh there is no column for shardings.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in _folded(leaves):
        leaf = row[1][0]
        memory = "disk" if leaf.disk else _memory.HOST_KIND if leaf.host else _memory.DEVICE_KIND
        groups.setdefault((memory, leaf.why, leaf.streams), []).append(row)
    sizes = {group: sum(_total(of) for _, of in rows) for group, rows in groups.items()}
    by_size = sorted(groups, key=lambda group: -sizes[group])
    rows = [_HEADER, *(_cells(row) for group in by_size for row in groups[group])]
    if not any(leaf.sharding for leaf in leaves):
        rows = [(*row[:_SHARDING], *row[_SHARDING + 1 :]) for row in rows]
    facts = aligned([row[:-1] for row in rows], _RIGHT)
    margin = 2 + max(map(len, facts)) + 2
    lines = iter([
        [f"  {fact}".ljust(margin) + path] if margin + len(path) <= width
        else [f"  {fact}", *textwrap.wrap(path, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        for fact, (*_, path) in zip(facts, rows, strict=True)
    ])  # fmt: skip
    found = next(lines)
    for group in by_size:
        memory, why, streams = group
        heading = f"{memory}, {in_mib(sizes[group])} MiB: {'; '.join(filter(None, (why, streams)))}"
        found += textwrap.wrap(heading, width, subsequent_indent="    ", break_on_hyphens=False)
        found += [line for _ in groups[group] for line in next(lines)]
    return found


def _sentences(table: Placement) -> list[str]:
    """The sentences under the table."""
    host, disk = table.host_bytes, table.disk_bytes
    total = host + disk + table.device_bytes
    of_step = all(leaf.why == ARGUMENT for leaf in table.leaves)
    beside = ", and arrays beside them" * any(leaf.streams == _BESIDE for leaf in table.leaves)
    what = f"arguments that are, or arrive, in host memory{beside}" if of_step else "optimizer state"
    summary = (
        f"{what}: {in_mib(total)} MiB, of which {in_mib(host)} MiB ({host / total if total else 0.0:.1%}) in "
        f"{_memory.HOST_KIND} and {in_mib(table.device_bytes)} MiB on the device"
    )
    if disk:
        summary += f"; {in_mib(disk)} MiB ({disk / total:.1%}) on disk, read and written in every step"
    if any(leaf.sharding for leaf in table.leaves):
        summary += f"; for each device {in_mib(table.host_bytes_per_device)} MiB in {_memory.HOST_KIND}"
    windows = [
        f"window: {in_mib(w.nbytes)} MiB on each device: {w.why}"
        + (f"; streamed once the backward pass is over, {w.own_loop}" if w.own_loop else "")
        + (f" (from {w.leaf} on)" if len(table.windows) > 1 else "")
        for w in table.windows
    ]
    stays = [f"not updated within the passes of the step: {why}" for why in table.stays]
    unknown = [f"how it streams is not known: {table.unknown}"] if table.unknown else []
    in_turn = [f"before anything is loaded: {what}" for what in table.in_turn]
    elsewhere = [f"beside these leaves, arrays that the step makes itself: {how}" for how in table.elsewhere]
    return [summary, *windows, *elsewhere, *in_turn, *table.guessed, *stays, *unknown]
