"""Run a step stage by stage: send operands ahead, run a stage, and keep its results where others read them.

Leaves on disk are read ahead of the stages and written behind them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_offload._disk.leaves import IN_MEMORY, READ, WRITE, Place, Token
from jax_offload._emit.region import Update, holds_driven_update, is_update
from jax_offload._host import cores
from jax_offload._host.stages import (
    BEFORE,
    DRIVEN,
    OnFiles,
    Part,
    Stage,
    Staged,
    arranged,
    in_turn,
    is_sent,
    linked,
    sending_rows,
    staged,
    stands_in,
)
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Var,
    holds_inside,
    inner_of,
    jax_fun,
    jit,
    values_of,
    variables,
)
from jax_offload._program.memory import (
    DEVICE_KIND,
    HOST_KIND,
    ambient_sharding,
    copy_on_host,
    is_explicit,
    is_host_aval,
    on_host,
    to_host,
    typed_sharding,
    with_kind,
)
from jax_offload._program.primitives import guarded
from jax_offload._program.private import without_dead_code
from jax_offload._program.program import Program, flat, is_load, is_store, numbered, structure, unguarded
from jax_offload._program.propagate import Facts, Node
from jax_offload._rewrite.canonical import dereferenced
from jax_offload._rewrite.rewritten import check_order, is_driven, tell

# While one stage runs, the leaves of this many other stages are read ahead, and as many are written behind, up to these
# bytes in each direction. Rows may be gigabytes long; then only the leaves of the current stage are read.
DEPTH, AT_ONCE = 2, 2**29


# ---- taken out of the step -------------------------------------------------------------------------------------------


def files_of(step: Program, args: Sequence[Any]) -> OnFiles:
    """Take the reads and writes of leaves on disk out of a step that is called with arguments like ``args``.

    Raises:
      ValueError: the step does something other than update such a leaf, or computes with its token.
    """
    reads: dict[Var, tuple[Atom, Place]] = {}
    written: dict[Var, tuple[Atom, Place]] = {}  # token -> the value to write, and its place
    eqns: list[Equation] = []
    for eqn in step.eqns:
        if is_update(eqn):
            _check_leaves(eqn, reads)
        if eqn.primitive is READ:
            reads[eqn.outvars[0]] = eqn.invars[0], eqn.params["place"]
        elif eqn.primitive is WRITE:
            written[eqn.outvars[0]] = eqn.invars[0], eqn.params["place"]
        else:
            _check_equation(eqn, reads, written)
            eqns.append(eqn)
    inputs, read = {*step.inputs}, {*variables(v for v, _ in reads.values())}
    given = all(isinstance(v, Var) and v in inputs for v, _ in reads.values())
    read_again = any(not read.isdisjoint(variables(eqn.invars)) for eqn in eqns)
    if not given or read_again or not reads.keys().isdisjoint(variables(step.outputs)):
        raise ValueError(_COMPUTES)
    arguments = step.inputs[len(step.consts) :]
    _check_tokens(step, read.union(v for v, x in zip(arguments, args, strict=True) if isinstance(x, Token)))
    found = {k: written[v] for k, v in enumerate(step.outputs) if isinstance(v, Var) and v in written}
    kept = {place for _, place in found.values()}
    homes = {place.home for place in kept}
    if lost := [place for _, place in reads.values() if place.home in homes and place not in kept]:
        raise ValueError(
            f"disk: the step updates a state and returns only a part of it, not {lost[0].name}, which is overwritten "
            "all the same. Fix: return the whole state."
        )
    parts: dict[Var, Part] = {v: (place, None) for v, (_, place) in reads.items()}
    writes = dict[Var, list[Part]]()
    for x, place in found.values():
        if x not in reads:
            writes.setdefault(cast(Var, x), []).append((place, None))
        elif (old := reads[cast(Var, x)][1]) != place:
            raise ValueError(
                f"disk: the update moves {old.name} unchanged to {place.name}, which may be overwritten by then. Fix: "
                "a select= that leaves them in memory."
            )
    rest = [v for k, v in enumerate(step.outputs) if k not in found]
    program = dataclasses.replace(step, inputs=[*step.inputs, *reads], eqns=eqns, outputs=[*rest, *writes])
    return OnFiles(program, rest, [*reads.values()], {k: place for k, (_, place) in found.items()}, parts, writes)


_COMPUTES = (
    "disk: the step computes with a state on disk outside its one update: it updates the state again, chooses between "
    "two states, or reads a leaf, for a norm perhaps. Fix: jo.jit(step), where the state goes from argument to one "
    "update to result. For several updates call such a step several times, or accumulate gradients in "
    "jo.offload(optax.MultiSteps(...), disk=...); skip= or lax.cond skips an update; and between "
    "two steps jo.to_device(optax.tree.get(state, 'mu')) reads a part of the state, and jo.save_args saves it."
)


def _check_leaves(eqn: Equation, reads: Mapping[Var, tuple[Atom, Place]]) -> None:
    """Raise ``ValueError`` where an update reads other leaves from disk than its ``offload`` keeps there."""
    update: Update = eqn.params["update"]
    on_disk = update.on_disk
    for v, x in zip(update.operands, eqn.invars, strict=True):
        there, known = isinstance(x, Var) and x in reads, v in on_disk
        if there and not known:
            raise ValueError(
                f"state: {reads[cast(Var, x)][1].name} is on disk, and this offload keeps it in memory. Fix: the "
                "offload, and the host_bytes, with which the state was made; into another one jo.to_host(tx, state) "
                "brings it, with a jo.disk(...) of another directory where some stays on disk."
            )
        if known and not there:
            raise ValueError(f"state: a leaf {v.aval.dtype}{list(v.aval.shape)} {IN_MEMORY}")


def _check_equation(eqn: Equation, reads: Mapping[Var, Any], written: Mapping[Var, Any]) -> None:
    used, updates = {*variables(eqn.invars)}, holds_driven_update(eqn)
    inside = holds_inside(eqn, lambda each: each.primitive in (READ, WRITE))
    if inside and not (updates and eqn.primitive.name in DRIVEN):  # whose branch, or body, is a step of its own
        raise stands_in(eqn, "disk") if updates else ValueError(_COMPUTES)
    if (not used.isdisjoint(reads) and not is_update(eqn)) or not used.isdisjoint(written):
        raise ValueError(_COMPUTES)


def _check_tokens(step: Program, tokens: Set[Var]) -> None:
    """Raise ``ValueError`` where an equation, perhaps in a branch, computes with a token."""

    def rule(eqn: Equation, are_tokens: Sequence[bool]) -> Sequence[bool] | None:
        if eqn.primitive is WRITE:
            return [True]
        moves = eqn.primitive is READ or is_update(eqn)
        if not moves and inner_of(eqn):
            return None  # the rule applies to the equations inside it
        if not moves and any(are_tokens):
            raise ValueError(_COMPUTES)
        return [False] * len(eqn.outvars)

    Facts[bool](False, any, rule, choice_counts=False).spread(step.eqns, dict.fromkeys(tokens, True))


# ---- run -------------------------------------------------------------------------------------------------------------


def _beside(sizes: Iterable[int]) -> int:
    """Return how many groups of these sizes, the nearest first, may be under way beside the current one."""
    return sum(total <= AT_ONCE for total in itertools.accumulate(itertools.islice(sizes, DEPTH)))


def _bytes_of(leaves: Iterable[Var]) -> int:
    return sum(nbytes(v.aval) for v in leaves)


Jit = Callable[..., Any]


class Driven:
    """A step that is compiled for arguments of certain types and shardings.

    Args:
      step: the step's closed jaxpr.
      args: arguments of these types and shardings.
      donated: whether each of them is donated.
      options: the compiler's options for programs of the device.
      for_sending: the options for programs that only send something to the host.
      segments: whether the pass before the update may be cut into several programs.
    """

    def __init__(
        self,
        step: ClosedJaxpr,
        args: Sequence[Any],
        donated: Sequence[bool],
        options: Mapping[str, Any],
        for_sending: Mapping[str, Any],
        segments: bool = True,
    ) -> None:
        if not is_driven(step):  # an update without results does not run
            step = ClosedJaxpr(without_dead_code(step.jaxpr, keep_inputs=True)[0], step.consts)
        program = dereferenced(flat(step, any_jit=True), any_jit=True)
        self.files = files_of(unguarded(program), args)
        found = staged(self.files)
        self._options = options, for_sending
        read = {*found.results, *(v for stage in found.stages for v in stage.inputs)}
        placed = places_of([x if v in read else None for v, x in zip(found.arguments, args, strict=False)])
        self._devices = {d for s in placed if s is not None for d in s.device_set} or {*ambient_sharding().device_set}
        if any(s.on_cores for s in found.stages):
            cores.cpu()  # raises an error now if there is none
        own = found.arguments[: len(placed)]
        self._everywhere = _everywhere(placed, self._devices)
        self._places: dict[Var, Sharding] = self.files.places(self._devices)
        self._places |= {v: s for v, s in zip(own, placed, strict=True) if s is not None} | found.scattered
        self._like = dict(found.next_of)
        # parameters in host memory that the step loads itself
        moves = [eqn for eqn in self.files.program.eqns if is_load(eqn) or is_store(eqn)]
        self._like |= {v: x for eqn in moves for x, v in zip(variables(eqn.invars), eqn.outvars, strict=True)}
        self.donated = {v for v, given in zip(own, donated, strict=True) if given}
        self._compiled, self._key_of = dict[Hashable, Jit](), numbered()
        self._step, tasks = self._scheduled(found, segments)
        self._bring = jit(lambda xs: xs, out_shardings=self._everywhere)
        writable, self._written = self._writable(tasks), list[Var]()  # what kernels overwrite
        self.tasks = [(task, self._run_by(task, writable)) for task in tasks]

    def _scheduled(self, step: Staged, segments: bool) -> tuple[Staged, list[Stage]]:
        """The step in the programs that overlap best, or, if the check finds a fault there, as first cut."""
        free = self.donated | {*self.files.reads}
        try:
            found = arranged(step, may_be_cut=segments and self._may_be_cut(step)) if len(step.stages) > 1 else step
            tasks = linked(found, free)
            nodes = [
                Node(task, task.inputs, [v for s in task.slices for v in s.outputs], takes={*task.over})
                for task in tasks
            ]
            check_order(nodes, [*found.consts, *found.arguments, *self.files.reads], found.results)
            return found, tasks
        except Exception as fault:
            tell("the step runs in fewer programs", fault)
            return step, linked(step, free)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Return the step's flat results, given its flat arguments."""
        arrays = [*self.constants, *self._arrays(args)]
        given = dict(zip([*self._step.consts, *self._step.arguments], arrays, strict=False))
        times = Counter(map(id, arrays))
        for v in self.donated:  # which the caller gives twice, or hands on from a branch: only a copy is ours
            if times[id(given[v])] > 1:
                given[v] = _copied(given[v])
        values = _Values(self, given)
        for k, (task, run) in enumerate(self.tasks):
            for following, _ in self.tasks[k + 1 : k + 2]:
                values.send(following)
            results = run(*values.operands(k, task))
            if k == 0:
                # behind the first program, whose gradients the cores wait for, and ahead of all others
                values.take(self._written)
            values.put(task, results)
            values.drop(task)
        return self._in_own_buffers(values.results(), args)

    def _in_own_buffers(self, results: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Replace results that are arguments, constants or each other with arrays of their own, as ``jax.jit`` does.

        The memory of a donated argument is handed over: on the device to a new array, as ``jax.jit`` deletes the old
        one.
        """
        own = {id(x) for v, x in zip(self._step.arguments, args, strict=False) if v in self.donated}
        others = {id(x) for x in (*args, *self.constants)} - own
        found, copied, renamed = dict(enumerate(results)), dict[int, jax.Array](), dict[int, jax.Array]()
        for k, x in enumerate(results):
            on_device = isinstance(x, jax.Array) and not on_host(x)
            if id(x) in others and not on_device:
                found[k] = _copied(x)
            elif id(x) in others:
                copied[k] = x
            elif id(x) in own and on_device:
                renamed[k] = x
            others.add(id(x))
        # One program copies all leaves, as a step may hand on hundreds. Those whose memory is taken come last.
        found |= _as_new(copied) if copied else {}
        found |= _renamed(renamed) if renamed else {}
        return [found[k] for k in range(len(results))]

    def committed(self, x: Any) -> Any:
        """Commit a result, as ``jax.jit`` does if an argument is committed, here a host leaf."""
        return jax.device_put(x, self._everywhere) if isinstance(x, jax.Array) and not x.committed else x

    def _arrays(self, xs: Sequence[Any]) -> list[Any]:
        """Convert numbers and NumPy arrays, which the caller may overwrite, as ``jax.jit`` does. jax's own arrays and
        the tokens of leaves on disk stay as they are."""
        others = {k: x for k, x in enumerate(xs) if not isinstance(x, jax.Array | Token)}
        brought = self._bring(others) if others else others
        return [brought.get(k, x) for k, x in enumerate(xs)]

    @functools.cached_property
    def constants(self) -> list[Any]:
        """What the step closes over, on its devices."""

        def moved(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return np.asarray(x)
            here = isinstance(x, Tracer) or not x.committed or x.sharding.device_set == self._devices
            return x if here else jax.device_put(x, with_kind(self._everywhere, str(x.sharding.memory_kind)))

        return self._arrays([moved(x) for x in self._step.consts.values()])

    @property
    def first(self) -> tuple[Stage, Callable[..., Sequence[Any]], Staged]:
        """Return the first task, its program without ``jit``, and the step."""
        task, program = self.tasks[0]
        return task, program.__wrapped__, self._step  # pyright: ignore[reportFunctionMemberAccess]

    def _may_be_cut(self, step: Staged) -> bool:
        """Whether the pass may be in several programs: each would reduce gradients of replicated parameters by itself.
        Files are read for one device at a time."""
        several = len(self._devices) > 1
        if self.files.reads and several:
            return False
        if len({device.process_index for device in self._devices}) > 1:
            return False
        updated = [v for v in step.next_of.values() if not is_host_aval(v.aval) and v.aval.ndim > 1]
        places = [self._place_of(v) for v in updated] if several else []
        return not any(s is None or s.is_fully_replicated for s in places)

    def _place_of(self, v: Var) -> Sharding | None:
        """Return a value's sharding, if it is known: the sharding of the value whose next value, or part, it is."""
        typed, mesh = typed_sharding(v.aval), getattr(self._everywhere, "mesh", None)
        if v not in self._places and mesh is not None and typed is not None and is_explicit(typed.mesh):
            return NamedSharding(mesh, typed.spec)  # with Explicit axes, what reads the value expects its type
        seen = set[Var]()
        while v not in self._places and v in self._like and v not in seen:
            seen.add(v)  # leaves may take each other's places
            v = self._like[v]
        return self._places.get(v)

    def place(self, v: Var) -> Sharding:
        """Return where a value belongs: replicated in its own memory, unless its sharding is known."""
        return with_kind(self._place_of(v) or self._everywhere, HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)

    def _program(self, task: Stage) -> Callable[..., Sequence[Any]]:
        """Make the program of a task; tasks that do the same share it."""
        jaxpr, made, places = task.jaxpr, [*task.outputs, *task.down], self.result_places(task)
        turns = [made.index(v) for v in self._step.in_turn if v in made] if task.name == BEFORE else []
        what = structure(jaxpr, self._key_of)
        key = what, task.name, len(task.down), task.reused, tuple(places), tuple(turns)
        if key in self._compiled:
            return self._compiled[key]
        n, alone = len(task.outputs), len(self._devices) == 1
        run = jax_fun(ClosedJaxpr(sending_rows(jaxpr, n) if alone else jaxpr, []))

        def program(*operands: Any) -> list[Any]:
            results = in_turn(run(*operands), turns)
            return guarded([*results[:n], *map(to_host, results[n:])], list(operands))

        program.__name__ = f"step_{task.name}"
        options = dict(self._options[task.sends] or {}) or None
        on_device = jit(program, donate_argnums=task.reused, out_shardings=places, compiler_options=options)
        self._compiled[key] = cores.program(jaxpr) if task.on_cores else on_device
        return self._compiled[key]

    def result_places(self, task: Stage) -> list[Sharding | None]:
        """Return the shardings of a program's results. The next value of a divided value is divided in the same way."""
        found: list[Sharding | None] = [None] * (len(task.outputs) + len(task.down))
        for k, v in enumerate(task.outputs):
            if isinstance(s := self._place_of(v), NamedSharding):
                found[k] = with_kind(s, HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)
        return found

    def _writable(self, tasks: Sequence[Stage]) -> set[Var]:
        """Return the donated leaves in host memory that the cores may overwrite: at most one task beside the first
        reads them."""
        if not cores.has_addresses(self._devices):
            return set()
        read_by = Counter(v for task in tasks[1:] for v in task.inputs)  # the first has been started by then
        found = {v for v in self.donated if read_by[v] == 1 and (is_host_aval(v.aval) or cores.on_cpus(self._devices))}
        # an argument without a place, such as a NumPy array, is not committed to these devices
        return {v for v in found if v in self._places and {*self._places[v].device_set} == self._devices}

    def _run_by(self, task: Stage, writable: Set[Var]) -> Callable[..., Sequence[Any]]:
        """Return the runner of a task: a program of XLA, one pass of the cores, or driven branches and loops."""
        if (eqn := task.inner) is not None:
            return _Inner(eqn, task, self._options)
        if not task.on_cores:
            return self._program(task)
        if (kernels := cores.kernels_of(task, self._step.next_of, writable & task.free)) is not None:
            self._written += [each.slice.inputs[i] for each in kernels for i in each.over]
            return functools.partial(cores.run_kernels, task, kernels)
        processes = len({device.process_index for device in self._devices})
        if processes > 1 and any(is_sent(v.aval) for v in task.inputs):
            raise ValueError(
                "update_on: an update that is more than arithmetic on elements (LAMB, Adafactor, Muon), or any without "
                f"numba, takes every leaf whole, and the step runs in {processes} processes. Fix: pip install "
                "jax_offload[cores] for AdamW and the like; else update_on='device', and shard_over= for less of the "
                "state."
            )
        return self._program(task)


class _Values:
    """The values of a running step: ``here`` in the step's own memory, ``there`` for the cores; and its files.

    Two variables may hold one array, as a branch may return its operands.
    """

    def __init__(self, step: Driven, given: dict[Var, Any]) -> None:
        self.here, self._there, self._step, self._files = given, dict[Var, Any](), step, step.files
        self._donated = {id(given[v]): given[v] for v in step.donated}
        self._reading: dict[Var, Future[jax.Array]] = {}
        self._writing: deque[tuple[int, list[Future[None]]]] = deque()  # groups with their bytes
        for token, leaf in self._files.given:
            leaf.home.check(token.val if isinstance(token, Literal) else given[token])
        for home in {leaf.home for parts in self._files.writes.values() for leaf, _ in parts}:
            home.check_commits()  # before anything that is donated is deleted

    def take(self, own: Sequence[Var]) -> None:
        """Make donated host leaves the step's own memory, which the cores may write."""
        taken = dict(zip(own, cores.taken_over([self.here[v] for v in own]), strict=True))
        self.here |= taken
        self._there |= taken

    def send(self, task: Stage) -> None:
        """Start to send the values that a task of the cores needs, if they exist already."""
        for v in task.inputs if task.on_cores else ():
            if v in self.here and v not in self._there:
                self._there[v] = cores.sent(self.here[v])

    def operands(self, number: int, task: Stage) -> list[Any]:
        """Return a task's operands. Files are read ahead, once older writes have ended; the pass waits for none."""
        while task.name != BEFORE and len(self._writing) > _beside(size for size, _ in reversed(self._writing)):
            for writing in self._writing.popleft()[1]:
                writing.exception()  # which is said when the step ends: other processes are in it too
        # the reads of this task, or else of the next that has any, and later reads that fit in ``AT_ONCE``
        coming = filter(None, (each.fetched for each, _ in self._step.tasks[number:]))
        nearest, *following = [*itertools.islice(coming, DEPTH + bool(task.fetched))] or [()]
        for v in itertools.chain(nearest, *following[: _beside(map(_bytes_of, following))]):
            if v not in self._reading:
                leaf, rows = self._files.reads[v]
                self._reading[v] = leaf.home.fetch(leaf.name, self._step.place(v), rows)
        self.here |= {v: self._reading.pop(v).result() for v in task.fetched}
        self.send(task)
        return values_of(self._there if task.on_cores else self.here, task.inputs)

    def put(self, task: Stage, results: Sequence[Any]) -> None:
        """Keep a task's results where others read them."""
        n = len(task.outputs)
        defined = dict(zip(task.outputs, results[:n], strict=True))
        if task.on_cores:
            self._there |= defined
            self.here |= {v: cores.brought_back(defined[v], self._step.place(v)) for v in task.up}
        else:
            self.here |= defined
            self._there |= zip(task.down, results[n:], strict=True)

    def drop(self, task: Stage) -> None:
        """Forget the values that a task reads last, and free those that were donated, unless another variable holds
        them. Start to write the results that are due, and forget them too."""
        gone = {v: self.here.pop(v, None) for v in (*task.over, *task.fetched)}
        for v in task.over:
            self._there.pop(v, None)
        own = [x for x in gone.values() if isinstance(x, jax.Array) and id(x) in self._donated]
        left = [x for x in own if not x.is_deleted()]
        live = {id(x) for x in (*self.here.values(), *self._there.values())} if left else set[int]()
        for x in left:
            if id(x) not in live:
                x.delete()
        if parts := [(v, *part) for v in task.due for part in self._files.writes[v]]:
            writing = [leaf.home.put(leaf.name, self.here[v], rows) for v, leaf, rows in parts]
            self._writing.append((_bytes_of(task.due), writing))
        for v in {*task.due}.difference(variables(self._files.outputs)):
            del self.here[v]

    def results(self) -> list[Any]:
        """Return the step's results."""
        others, leaves = values_of(self.here, self._files.outputs), self._files.returned
        tokens = {home: home.advance() for home in dict.fromkeys(leaf.home for leaf in leaves.values())}
        rest = iter(others)
        return [tokens[leaves[k].home] if k in leaves else next(rest) for k in range(len(others) + len(leaves))]


def places_of(args: Sequence[Any]) -> list[Sharding | None]:
    """Return the shardings of arguments; ``None`` for those that jax moves to the devices of the committed ones."""
    placed = [getattr(x, "sharding", None) for x in args]
    committed = [s if getattr(x, "committed", True) else None for x, s in zip(args, placed, strict=True)]
    found = committed if any(s is not None for s in committed) else placed
    devices = {d for s in found if s is not None for d in s.device_set}
    alone = SingleDeviceSharding(*devices, memory_kind=DEVICE_KIND) if len(devices) == 1 else None
    return [alone if s is None else s for s in found]


def _everywhere(placed: Sequence[Any], devices: Set[Any]) -> Sharding:
    """Return the replicated sharding on the arguments' mesh, or the only device's sharding."""
    meshes = (s.mesh for s in placed if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh))
    mesh = next((mesh for mesh in meshes if {*mesh.devices.flat} == devices), None)
    return SingleDeviceSharding(next(iter(devices))) if mesh is None else NamedSharding(mesh, PartitionSpec())


class _Inner:
    """A ``cond`` or a ``while`` of the step that holds an update, such as ``optax.apply_if_finite``.

    What decides is read on the host: the index of a branch, or a loop's condition. The branch that is taken, or the
    body, is driven.
    """

    def __init__(self, eqn: Equation, task: Stage, options: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
        self._eqn, self._task, self._options = eqn, task, options
        self._places = [eqn.outvars.index(v) for v in task.outputs]
        # their buffers may be taken; literals have their own
        self._free = [isinstance(v, Literal) or v in task.free for v in eqn.invars]
        self._driven: dict[int, Driven] = {}
        if eqn.primitive.name == "while":
            condition, self._used = without_dead_code(eqn.params["cond_jaxpr"].jaxpr)
            self._condition = jit(jax_fun(ClosedJaxpr(condition, eqn.params["cond_jaxpr"].consts)))

    def __call__(self, *operands: Any) -> list[Any]:
        given = values_of(dict(zip(self._task.inputs, operands, strict=True)), self._eqn.invars)
        results = self._loop(given) if self._eqn.primitive.name == "while" else self._branch(*given)
        return [results[i] for i in self._places]

    def _branch(self, index: Any, *given: Any) -> Sequence[Any]:
        branches = self._eqn.params["branches"]
        k = min(max(int(np.asarray(index)), 0), len(branches) - 1)
        return self._run(k, branches[k], given, self._free[1:])

    def _loop(self, given: Sequence[Any]) -> Sequence[Any]:
        params = self._eqn.params
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        # The body takes the buffers of its carry, so it gets copies of buffers that others hold.
        others = Counter(map(id, given))
        carry = [x if own and others[id(x)] == 1 else _copied(x) for x, own in zip(given, self._free, strict=True)][m:]
        free = [False] * (m - n) + [True] * len(carry)
        while np.asarray(*self._condition(*itertools.compress([*given[:n], *carry], self._used))):
            carry = self._run(0, params["body_jaxpr"], [*given[n:m], *carry], free)
        return carry

    def _run(self, k: int, body: ClosedJaxpr, given: Sequence[Any], free: Sequence[bool]) -> Sequence[Any]:
        if k not in self._driven:
            self._driven[k] = Driven(body, given, free, *self._options)
        return self._driven[k](given)


def _copied(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    return copy_on_host(x) if on_host(x) else jnp.copy(x)


@jit
def _as_new(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return copies of arrays on the device."""
    return arrays


@functools.partial(jit, donate_argnums=0)
def _renamed(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return new arrays in the same memory."""
    return arrays
