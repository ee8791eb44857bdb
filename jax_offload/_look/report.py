"""``placement``: where each leaf lives and how it moves, read off the trace of an update or of a step."""

import dataclasses
import functools
import itertools
import math
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from jax_offload._disk.leaves import is_on_disk
from jax_offload._emit.region import Found, Update, updates_in
from jax_offload._emit.run import put_whole
from jax_offload._look.text import aligned, in_mib, paragraph, terminal_width
from jax_offload._program import memory
from jax_offload._program.arrays import is_traced, some, types_of
from jax_offload._program.memory import in_host_memory
from jax_offload._schedule.schedule import Planned, Window, from_disk, merged
from jax_offload._state.arguments import described, is_state
from jax_offload._state.placement import Leaf, unmanaged
from jax_offload._state.state import described_state

# ---- any callable training step, as something that jax can trace and lower
#
# A step of ``flax.nnx.jit`` changes its arguments in place, one of ``equinox.filter_jit`` takes and returns functions
# among its arrays, and a method, a partial or a lambda calls a jitted step. Each becomes a function of arrays.

_JIT = type(jax.jit(lambda: None))


def may_be_step(x: Any) -> bool:
    """Return whether ``x`` can be called and traced: a program that is traced or compiled shows no update."""
    return callable(x) and not isinstance(x, jax.stages.Traced | jax.stages.Compiled)


def opened(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a step without the partials and bound methods around it, and its arguments with those that they add."""
    kwargs = dict(kwargs)
    while isinstance(step, functools.partial | types.MethodType):
        if isinstance(step, types.MethodType):
            step = functools.partial(step.__func__, step.__self__)
        step, args, kwargs = step.func, (*step.args, *args), {**step.keywords, **kwargs}
    return step, args, kwargs


def _with_arrays(tree: Any, arrays: Iterable[Any]) -> Any:
    """Return ``tree`` with these arrays in the places of its own."""
    arrays = iter(arrays)
    return jax.tree.map(lambda x: next(arrays) if is_traced(x) else x, tree)


def jitted(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return a step with the methods ``trace`` and ``lower``, and the arguments that these take.

    What is jitted stays unchanged. For any other callable, an argument is donated if a ``jit`` inside donates all of
    it, and the result is a pair of lists (arrays of the result, changed arguments) if it is not made of arrays alone.
    """
    if isinstance(step, _JIT) or hasattr(step, "whole_step"):
        return step, args, kwargs
    whole = args, dict(kwargs)

    @functools.wraps(step, updated=())
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_arrays(whole, jax.tree.leaves((args, kwargs)))
        given = jax.tree.leaves((args, kwargs))
        results = jax.tree.leaves(result := step(*args, **kwargs))
        changed = [new for old, new in zip(given, jax.tree.leaves((args, kwargs)), strict=True) if new is not old]
        if not changed and all(map(is_traced, results)):
            return result
        return [x for x in results if is_traced(x)], changed

    args, kwargs = jax.tree.map(lambda x: x if is_traced(x) else None, whole)
    try:
        jaxpr = jax.jit(of_arrays).trace(*args, **kwargs).jaxpr.jaxpr
    except Exception as error:
        error.add_note(
            "jax_offload traces this step with its arguments, without running it. Pass everything that it reads or "
            "changes as an argument, or pass the jitted function that it calls, step(*args)."
        )
        raise
    calls = [(eqn.invars, flags) for eqn in jaxpr.eqns if (flags := eqn.params.get("donated_invars"))]
    gone = {v for operands, flags in calls for v, is_donated in zip(operands, flags, strict=True) if is_donated}
    by_place, by_name = _with_arrays((args, kwargs), [v in gone for v in jaxpr.invars])

    def donated(arguments: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [key for key, x in arguments if (flags := jax.tree.leaves(x)) and all(flags)]

    call = jax.jit(of_arrays, donate_argnums=donated(enumerate(by_place)), donate_argnames=donated(by_name.items()))
    return call, args, kwargs


def replaced(args: Sequence[Any], results: Any) -> dict[int, Any]:
    """Match arguments, by place, with the results that replace them in the next step: the first ones of their types."""

    def kind_of(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, types_of([jax.typeof(x) if isinstance(x, bool | int | float | complex) else x for x in leaves])

    left = [x for x in (results, *(results if isinstance(results, tuple | list) else ())) if jax.tree.leaves(x)]
    found: dict[int, Any] = {}
    for k, argument in enumerate(args):
        same = next((i for i, x in enumerate(left) if kind_of(x) == kind_of(argument)), None)
        if same is not None:
            found[k] = left.pop(same)
    return found


def of_states(tree: Any) -> list[bool]:
    """Say for each leaf whether it is in an optimizer's state."""
    parts = jax.tree.leaves(tree, is_leaf=lambda x: is_state(x) or is_on_disk(x))
    return [is_state(x) for x in parts for _ in jax.tree.leaves(x, is_leaf=is_on_disk)]


def fix_of(error: Exception, args: Any) -> str:
    """Return the fix if jax refuses arithmetic between memories, or a sharding of another memory; else empty."""
    if not isinstance(error, ValueError) or not re.search("^memory_space of|^Memory kinds passed", str(error)):
        return ""
    hosted = [keystr(path[1:]) for path, x in tree_flatten_with_path(args)[0] if in_host_memory(x)]
    return (
        f". Fix: jax_offload.jit, which loads what is in host memory ({some(hosted)}), and in_shardings, if any, that "
        "name the memory of each argument; or load it in the step, jax_offload.to_device(x)"
    )


def _traced(fun: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Return the closed jaxpr of a function of the arrays in its arguments; or an empty one, and why it raises."""

    def of_arrays(*arrays: Any) -> None:
        fun(*_with_arrays(args, arrays))

    try:
        arrays = [memory.in_its_memory(x) for x in jax.tree.leaves(args) if is_traced(x)]
        return jax.jit(of_arrays).trace(*arrays).jaxpr, ""
    except Exception as error:
        why = (str(error).splitlines() or [""])[0] + fix_of(error, args)
        return jax.make_jaxpr(lambda: None)(), f"it raises {type(error).__name__}: {why}"


# ---- the table

ARGUMENT = "argument"  # why a row of a step's table is there
AHEAD = "its update runs ahead of the pass that reads the new parameters; offload(select=) keeps it on the device"
_UNSEEN = "not loaded by an update in what was traced; under vmap and derivatives none is seen"
_PUT = (
    "whole, by a device_put of the step itself, which no window limits; keep what no layer reads by rows on "
    "the device, with jo.to_host(params, loss, batch) or select="
)
_BESIDE = "stays on the device, beside parameters in host memory"
_TELLS = "; tx.init(params) or abstract_state(tx, params) before the step tells them, for parameters of one sharding"
_NO_UPDATE = "no update of an offload was seen in it (under vmap and derivatives none is)"


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
        return _total(leaf for leaf in self.leaves if leaf.host)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state that stay in device memory, with replicas counted once."""
        return _total(leaf for leaf in self.leaves if not leaf.host and not leaf.disk)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the state on disk, which every step reads and writes; the files take twice as many."""
        return _total(leaf for leaf in self.leaves if leaf.disk)

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes of pinned host memory that the state takes for each device."""
        return sum(leaf.shard_bytes for leaf in self.leaves if leaf.host)

    def __repr__(self) -> str:
        on_device, disk = f"{in_mib(self.device_bytes)} MiB on the device", f"{in_mib(self.disk_bytes)} MiB on disk"
        parts = [f"{in_mib(self.host_bytes)} MiB in {memory.HOST_KIND}", on_device] + [disk] * bool(self.disk_bytes)
        return f"Placement({len(self.leaves)} leaves: {', '.join(parts)})"

    def __str__(self) -> str:
        return "\n".join([*_lines(self.leaves), *(line for said in _sentences(self) for line in paragraph(said))])


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
      optimizer state: 0.50 MiB, with 0.50 MiB (100.0%) in pinned_host and 0.00 MiB on the device
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
    step, given, kwargs = opened(tx, args, extra_args)
    if hasattr(step, "whole_step"):  # jax accepts no compiler_options in a jit inside another
        step = step.whole_step
    elif hasattr(step, "lower"):
        step = getattr(step, "__wrapped__", step)
    call, rows = (given, kwargs), [*_arguments((given, kwargs), len(given) - len(args))]
    with described():
        return _table(rows, lambda args, kwargs: step(*args, **kwargs), call, of_step=True)[0]


def of_transformation(tx: Any, params: Any, **extra_args: Any) -> tuple[Placement, list[Found]]:
    """Return the table of a transformation, and the updates in its trace; none if it cannot be traced."""
    rows, state = described_state(tx, params)

    def update(state: Any, params: Any, extra_args: Any) -> None:
        gradients = memory.loaded(params)  # the passes make them on the device
        optax.with_extra_args_support(tx).update(gradients, state, params, **extra_args)

    with described(params):
        return _table([(row, True) for row in rows], update, (state, params, extra_args), of_step=False)


def _arguments(call: tuple[Any, Any], bound: int) -> Iterator[tuple[Leaf, bool]]:
    """Yield a row for each leaf of the arguments, some bound to a method or a partial, and whether it is in a state."""
    found, hosted = list[tuple[Any, Leaf, bool]](), set[Any]()
    leaves = tree_flatten_with_path(call, is_leaf=is_on_disk)[0]
    for (path, x), of_state in zip(leaves, of_states(call), strict=True):
        row, k, sharding = unmanaged(x), getattr(path[1], "idx", None), getattr(x, "sharding", None)
        name = keystr(path[1:]) if k is None else (f"bound[{k}]" if k < bound else f"[{k - bound}]") + keystr(path[2:])
        row = dataclasses.replace(
            row, path=name, why=ARGUMENT, disk=is_on_disk(x), host=in_host_memory(x) and not is_on_disk(x),
            sharding=_spec(sharding) if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 else "",
            shard_bytes=row.nbytes // math.prod(memory.shards_of(sharding, row.shape)),
        )  # fmt: skip
        # the state of a split nnx.Optimizer is no tuple of optax, but its path holds flax's name for it
        of_state = of_state or "opt_state" in name
        found.append((path[:2], row, of_state))
        hosted |= {path[:2]} if row.host and not of_state else set()

    for argument, row, of_state in found:
        large = row.nbytes >= memory.DEFAULT_MIN_BYTES and not (of_state or row.host or row.disk)
        yield (dataclasses.replace(row, streams=_BESIDE) if large and argument in hosted else row), of_state


def _spec(sharding: Any) -> str:
    return f"P({', '.join(map(repr, sharding.spec))})" if isinstance(sharding, NamedSharding) else str(sharding)


def _table(
    rows: Sequence[tuple[Leaf, bool]], fun: Callable[..., Any], args: tuple[Any, ...], *, of_step: bool
) -> tuple[Placement, list[Found]]:
    """Trace a function, and return the table of its first arguments, each in a state or not, and the updates in it."""
    trace, unknown = _traced(fun, *args)
    found, arguments = updates_in(trace), iter(trace.jaxpr.invars)
    of_row = [next(arguments, None) if is_traced(x) else None for x in jax.tree.leaves(args)[: len(rows)]]
    put, moves = put_whole(trace.jaxpr.eqns), {v: list[tuple[str, Planned]]() for v in of_row}
    elsewhere, windows, shown = Counter[str](), dict[int, Window](), list[Leaf]()
    for each in found:
        for (variables, p), how in zip(each.loads, _ways(each), strict=True):
            own = [v for v in variables if v in moves]
            for v in own:
                moves[v].append((how, p))
            if p.slice.loads and not own:
                elsewhere[f"{how}, through {in_mib(p.window.nbytes)} MiB"] += 1
    for (row, of_state), v in zip(rows, of_row, strict=True):
        said = [f"whole, which no window limits: {AHEAD}" if of_state and found else _PUT] if v in put else []
        said += [how for how, _ in moves[v]] or [_UNSEEN] * ((row.host or row.disk) and not said and not unknown)
        text = f"{said[0]} ({len(said)} times)" if len(said) > 1 == len({*said}) else "; then ".join(said)
        shown.append(dataclasses.replace(row, streams=text or row.streams))
        for p in (p for _, p in moves[v] if not p.on_cores):
            window = windows.setdefault(id(p.window), dataclasses.replace(p.window, leaf=row.path))
            windows[id(p.window)] = dataclasses.replace(window, nbytes=max(window.nbytes, p.bytes_at_once))
    updates = [each.update for each in found if isinstance(each.update, Update)]
    table = Placement(tuple(shown), unknown, tuple(windows.values()), guessed=_guessed(updates, of_step))
    stays = [*(why for u in updates for why in u.stays), *(p.exposed for each in found for _, p in each.loads)]
    stays += [_NO_UPDATE] * (not found and not unknown and any(leaf.host or leaf.disk for leaf in shown))
    of_steps = {
        "leaves": tuple(leaf for leaf in shown if leaf.host or leaf.disk or leaf.streams),
        "stays": tuple(dict.fromkeys(filter(None, stays))),
        "elsewhere": tuple(f"{how}; {n} of these" if n > 1 else how for how, n in elsewhere.items()),
        "in_turn": tuple(dict.fromkeys(each.in_turn for u in updates for each in u.passes if each.in_turn)),
    }
    return (dataclasses.replace(table, **of_steps) if of_step else table), found


def _ways(each: Found) -> Iterator[str]:
    """Yield how each slice of an update moves, in words."""
    update = each.update
    for p in update.planned:
        said = [str(p.transfer)]
        if isinstance(update, Update) and update.on_disk:
            said = [from_disk(p, update.next_values, update.on_disk)]
        said += [f"{n} leaves together"] if (n := len(p.slice.loads)) > 1 else []
        yield ", ".join([*said, *([f"in each of {each.times} iterations"] if each.times > 1 else [])])


def _guessed(updates: Sequence[Update], of_step: bool) -> tuple[str, ...]:
    """Return the facts on which updates rely that neither their arguments nor the trace around them show."""
    said: dict[str, None] = {}
    for update in updates:
        if not update.ordered and sum(bool(p.slice.loads) for p in update.planned) > 1:
            tells = "the step does not tell it" if of_step else "placement(step, *args) reads it from the step"
            said[f"order: guessed from the parameters' paths; {tells}"] = None
        known = merged(update.options)
        paths: dict[str, list[str]] = {}
        for path in sorted(known.remembered):
            if known.shardings[path].num_devices > 1:
                paths.setdefault(_spec(known.shardings[path]), []).append(path)
        if each := "; ".join(f"{spec} of {some(of)}" for spec, of in paths.items()):
            said[f"shardings: remembered from init, or from where they were asked for: {each}"] = None
        if (unknown := known.unknown - known.shardings.keys()) and update.planned:
            none = f"not known of {some(sorted(unknown))}" if of_step else f"{len(unknown)} of the parameters have none"
            said[f"shardings: {none}, counted as on one device" + _TELLS * of_step] = None
    return tuple(said)


# ---- as it prints

_HEADER = ("MiB", "leaves", "shape", "dtype", "sharding", "state leaf")
# Paths in one row may differ in a number (a layer's) or in a field of letters only (.mu and .nu).
_PIECES = re.compile(r"(\d+|\.[A-Za-z_]+(?!\w))")
_Row = tuple[list[list[str]], list[Leaf]]  # the choices for each piece of a path, and the leaves with these paths


def _total(leaves: Iterable[Leaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _folded(leaves: Sequence[Leaf]) -> list[_Row]:
    """Make rows, the largest first, of leaves that show the same: a row's path is read as theirs, and as no other."""
    rows: list[_Row] = [([[piece] for piece in _PIECES.split(leaf.path)], [leaf]) for leaf in leaves]
    for k in range(1, max((len(path) for path, _ in rows), default=0), 2):
        joined: dict[object, _Row] = {}
        for path, of in rows:
            x, kind = of[0], k < len(path) and path[k][0].isdigit()
            shown = x.shape, str(x.dtype), x.sharding, x.host, x.disk, x.why, x.streams
            first, together = joined.setdefault((*shown, kind, str(path[:k]), str(path[k + 1 :])), (path, []))
            together += of
            if first is not path:
                first[k] += [piece for piece in path[k] if piece not in first[k]]
        rows = list(joined.values())
    return sorted(rows, key=lambda row: -_total(row[1]))


def _choices(pieces: Sequence[str]) -> str:
    """Return one text for the choices in a row's path: ``3``, ``{0..5,7}``, ``.{mu,nu}``."""
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].startswith("."):
        return f".{{{','.join(piece[1:] for piece in pieces)}}}"
    numbers = enumerate(sorted(pieces, key=lambda piece: (int(piece), piece)))
    runs = [[n for _, n in run] for _, run in itertools.groupby(numbers, lambda place: int(place[1]) - place[0])]
    return f"{{{','.join(f'{run[0]}..{run[-1]}' if len(run) > 2 else ','.join(run) for run in runs)}}}"


def _lines(leaves: Sequence[Leaf]) -> list[str]:
    """Return the header, and for each memory, reason and way a heading with its rows, the largest first."""
    width, sizes = terminal_width(), Counter[tuple[str, str]]()
    groups: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for path, of in _folded(leaves):
        leaf, nbytes, shape = of[0], _total(of), "×".join(map(str, of[0].shape)) or "()"
        where = "disk" if leaf.disk else memory.HOST_KIND if leaf.host else memory.DEVICE_KIND
        group = where, "; ".join(filter(None, (leaf.why, leaf.streams)))
        cells = in_mib(nbytes), str(len(of)), shape, str(leaf.dtype), leaf.sharding, "".join(map(_choices, path))
        groups.setdefault(group, []).append(cells)
        sizes[group] += nbytes
    by_size = sorted(groups, key=lambda group: -sizes[group])
    rows = [_HEADER, *(cells for group in by_size for cells in groups[group])]
    shown = [k for k, name in enumerate(_HEADER[:-1]) if name != "sharding" or any(leaf.sharding for leaf in leaves)]
    facts = [f"  {fact}" for fact in aligned([[row[k] for k in shown] for row in rows], right=(0, 1))]
    margin = max(map(len, facts)) + 2
    lines = iter([
        [fact.ljust(margin) + path] if margin + len(path) <= width
        else [fact, *paragraph(path, begin=" " * 6, indent=" " * 6)]
        for fact, (*_, path) in zip(facts, rows, strict=True)
    ])  # fmt: skip
    found = next(lines)
    for where, why in by_size:
        found += paragraph(f"{where}, {in_mib(sizes[where, why])} MiB: {why}", indent="    ")
        found += [line for _ in groups[where, why] for line in next(lines)]
    return [found[0], "-" * min(width, max(map(len, found))), *found[1:]]


def _sentences(table: Placement) -> Iterator[str]:
    """Yield the sentences under the table."""
    host, disk, total, what = table.host_bytes, table.disk_bytes, _total(table.leaves), "optimizer state"
    if all(leaf.why == ARGUMENT for leaf in table.leaves):
        beside = ", and arrays beside them" * any(leaf.streams == _BESIDE for leaf in table.leaves)
        what = f"arguments that are, or arrive, in host memory{beside}"
    summary = (
        f"{what}: {in_mib(total)} MiB, with {in_mib(host)} MiB ({host / (total or 1):.1%}) in {memory.HOST_KIND} "
        f"and {in_mib(table.device_bytes)} MiB on the device"
    )
    if disk:
        summary += f"; {in_mib(disk)} MiB ({disk / total:.1%}) on disk, read and written in every step"
    if any(leaf.sharding for leaf in table.leaves):
        summary += f"; for each device {in_mib(table.host_bytes_per_device)} MiB in {memory.HOST_KIND}"
    yield summary
    for window in table.windows:
        own_loop = window.own_loop.split("; ")[0] if table.stays else window.own_loop  # under jo.jit, they give the fix
        alone = f"; streamed once the backward pass is over, {own_loop}" if own_loop else ""
        first = f" (from {window.leaf} on)" if len(table.windows) > 1 else ""
        yield f"window: {in_mib(window.nbytes)} MiB on each device: {window.why}{alone}{first}"
    yield from (f"beside these leaves, arrays that the step makes itself: {how}" for how in table.elsewhere)
    yield from (f"before anything is loaded: {what}" for what in table.in_turn)
    yield from table.guessed
    yield from (f"not updated within the passes of the step: {why}" for why in table.stays)
    if table.unknown:
        yield f"how it streams is not known: {table.unknown}"
