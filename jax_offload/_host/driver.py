"""A driven step as tasks over named values, which run in order while Python waits only for the host's cores.

A task is a program of the device or of the cores, the start of a copy between the two, or the start or the end of a
read or a write of files. Each value is forgotten after its last reader.
"""

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_offload._disk.leaves import Token
from jax_offload._host import cores, stages
from jax_offload._host.stages import BEFORE, Part, Stage, Staged, bytes_of, is_sent
from jax_offload._program import jaxprs, memory
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import ClosedJaxpr, Equation, Jaxpr, Literal, Var, jax_fun, jit, values_of, variables
from jax_offload._program.memory import DEVICE_KIND, HOST_KIND, is_host_aval, on_host, to_host
from jax_offload._program.primitives import guarded, opaque, together
from jax_offload._program.private import without_dead_code
from jax_offload._program.program import Builder, flat, is_load, is_store, structures, unguarded
from jax_offload._program.propagate import Node
from jax_offload._rewrite.canonical import dereferenced
from jax_offload._rewrite.rewritten import check_order, is_driven, tell

# While one stage runs, the leaves of this many other stages are read ahead, and as many are written behind, up to these
# bytes in each direction. Rows may be gigabytes long; then only the leaves of the current stage are read.
DEPTH, AT_ONCE = 2, 2**29


def _beside(sizes: Iterable[int]) -> int:
    """Return how many groups of these sizes, the nearest first, may be under way beside the current one."""
    return sum(total <= AT_ONCE for total in itertools.accumulate(itertools.islice(sizes, DEPTH)))


Options = tuple[Mapping[str, Any], Mapping[str, Any]]


class Driven:
    """A step that is compiled for arguments of certain types and shardings.

    Args:
      step: the step's closed jaxpr.
      args: arguments of these types and shardings.
      donated: whether each of them is donated.
      options: the compiler's options for programs of the device, and for those that only send something to the host.
      segments: whether the pass before the update may be cut into several programs.
    """

    def __init__(
        self, step: ClosedJaxpr, args: Sequence[Any], donated: Sequence[bool], options: Options, segments: bool = True
    ) -> None:
        if not is_driven(step):  # an update without results does not run
            step = ClosedJaxpr(without_dead_code(step.jaxpr, keep_inputs=True)[0], step.consts)
        program = dereferenced(flat(step, any_jit=True), any_jit=True)
        self.files = stages.files_of(unguarded(program), args)
        found, self._options = stages.staged(self.files), options
        self._compiled, self._structure = dict[Hashable, Callable[..., Any]](), structures()
        read = {*found.results, *(v for stage in found.stages for v in stage.inputs)}
        placed = places_of([x if v in read else None for v, x in zip(found.arguments, args, strict=False)])
        own = found.arguments[: len(placed)]
        devices = {d for s in placed if s is not None for d in s.device_set}
        self._devices = devices or {*memory.ambient_sharding().device_set}
        if any(stage.on_cores for stage in found.stages):
            cores.cpu()  # raises an error now if there is none
        self._everywhere = _everywhere(placed, self._devices)
        self._places: dict[Var, Sharding] = self.files.places(self._devices)
        self._places |= {v: s for v, s in zip(own, placed, strict=True) if s is not None} | found.scattered
        # copies, and host parameters that the step loads itself, are placed like their originals, as next values are
        eqns = self.files.program.eqns
        moves = [eqn for eqn in eqns if is_load(eqn) or is_store(eqn) or eqn.primitive.name == "copy"]
        self._like = found.next_of | {eqn.outvars[0]: v for eqn in moves for v in variables(eqn.invars)}
        self.donated = {v for v, given in zip(own, donated, strict=True) if given}
        self._bring = jit(lambda xs: xs, out_shardings=self._everywhere)
        self._step, self._stages = self._scheduled(found, segments)

    def _scheduled(self, step: Staged, segments: bool) -> tuple[Staged, list[Stage]]:
        """The step in the programs that overlap best, or, if the check finds a fault there, as first cut."""
        free = self.donated | {*self.files.reads}
        try:
            found = stages.arranged(step, may_be_cut=segments and self._may_be_cut(step)) if step.stages else step
            linked = stages.linked(found, free)
            nodes = [Node(s, s.inputs, [v for each in s.slices for v in each.outputs], takes=s.free) for s in linked]
            check_order(nodes, [*found.consts, *found.arguments, *self.files.reads], found.results)
            return found, linked
        except Exception as fault:
            tell("the step runs in fewer programs", fault)
            return step, stages.linked(step, free)

    def _may_be_cut(self, step: Staged) -> bool:
        """Whether the pass may be in several programs: each would reduce gradients of replicated parameters by itself.
        Files are read for one device at a time."""
        if len(self._devices) == 1:
            return True
        updated = [v for v in step.next_of.values() if not is_host_aval(v.aval) and v.aval.ndim > 1]
        divided = all((s := self._place_of(v)) is not None and not s.is_fully_replicated for v in updated)
        return divided and not self.files.reads and len({d.process_index for d in self._devices}) == 1

    # ---- its tasks ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _todo(self) -> list[tuple[Node, list[Var]]]:
        """The tasks in order, each with the values that nobody reads after it."""
        tasks = [*self._tasks()]
        last = {v: k for k, task in enumerate(tasks) for v in (*task.reads, *task.makes)}
        gone: list[list[Var]] = [[] for _ in tasks]
        for v in last.keys() - {*variables(self.files.outputs)}:
            gone[last[v]].append(v)
        return [*zip(tasks, gone, strict=True)]

    def _tasks(self) -> Iterator[Node]:
        """Yield the tasks in order. The payload of each computes what it makes from what it reads."""
        order, files = self._stages, self.files
        by_device = {v for stage in order if not stage.on_cores for v in stage.inputs} | {*self._step.results}
        known, writing = {*self._step.consts, *self._step.arguments}, deque[tuple[int, list[Var]]]()  # groups, by bytes
        there, reading = dict[Var, Var](), dict[Var, Var]()  # values as the cores know them; reads that have begun
        writable, written = self._writable(order), list[Var]()  # what kernels overwrite
        runs = [self._run_by(stage, writable, written) for stage in order]

        def sends(stage: Stage) -> Iterator[Node]:
            for v in stage.inputs if stage.on_cores else ():
                if v in known and v not in there and is_sent(v.aval) and not is_host_aval(v.aval):
                    there[v] = Var(v.aval)
                    yield Node(lambda x: [cores.sent(x)], [v], [there[v]])

        for k, (stage, run, due) in enumerate(zip(order, runs, files.due(order), strict=True)):
            for following in order[k + 1 : k + 2] if k else ():
                yield from sends(following)
            while stage.name != BEFORE and len(writing) > _beside(size for size, _ in reversed(writing)):
                yield Node(_waited, writing.popleft()[1], [])  # the pass waits for no write
            for v in self._ahead(order[k:]):
                if v not in reading:
                    reading[v] = Var(v.aval)
                    yield Node(partial(_fetch, files.reads[v], self.place(v)), [], [reading[v]])
            arrived = {v: Var(v.aval) for v in stage.inputs if v in files.reads}  # a later stage reads it again
            yield from (Node(lambda begun: [begun.result()], [reading.pop(v)], [x]) for v, x in arrived.items())
            yield from sends(stage)
            there |= {v: Var(v.aval) for v in (stage.outputs if stage.on_cores else stage.down)}
            if stage.on_cores:
                yield Node(run, [there.get(v, v) for v in stage.inputs], [there[v] for v in stage.outputs])
                for v in (v for v in stage.outputs if v in by_device):
                    place = self.place(v)
                    yield Node(lambda x, to=place: [cores.brought_back(x, to)], [there[v]], [v])
            else:
                makes = [*stage.outputs, *(there[v] for v in stage.down)]
                yield Node(run, [arrived.get(v, v) for v in stage.inputs], makes)
            known.update(stage.outputs)
            if k == 0 and written:
                # behind the first program, whose gradients the cores wait for, and ahead of all others
                yield Node(cores.taken_over, written, written)
            if due:
                writes = [files.writes[v] for v in due]
                begun = [Var(v.aval) for v, parts in zip(due, writes, strict=True) for _ in parts]
                yield Node(partial(_put, writes), due, begun)
                writing.append((bytes_of(due), begun))

    def _ahead(self, order: Sequence[Stage]) -> list[Var]:
        """Return the leaves to read before a stage: its own, or else the next stage's, and later ones that fit in
        ``AT_ONCE``."""
        fetched = [[v for v in stage.inputs if v in self.files.reads] for stage in order]
        nearest, *following = [*itertools.islice(filter(None, fetched), DEPTH + bool(fetched[0]))] or [[]]
        return [*nearest, *itertools.chain(*following[: _beside(map(bytes_of, following))])]

    def _writable(self, order: Sequence[Stage]) -> set[Var]:
        """Return the donated leaves in host memory that the cores may overwrite: at most one stage beside the first
        reads them."""
        if not cores.has_addresses(self._devices):
            return set()
        read_by = Counter(v for stage in order[1:] for v in stage.inputs)  # the first has been started by then
        found = {v for v in self.donated if is_host_aval(v.aval) or cores.on_cpus(self._devices)}
        # an argument without a place, such as a NumPy array, is not committed to these devices
        placed = {v for v in found if v in self._places and {*self._places[v].device_set} == self._devices}
        return {v for v in placed if read_by[v] == 1}

    def _run_by(self, stage: Stage, writable: Set[Var], written: list[Var]) -> Callable[..., Sequence[Any]]:
        """Return the runner of a stage: a program of XLA, one pass of the cores, or driven branches and loops.

        Leaves in ``writable`` that kernels overwrite are added to ``written``.
        """
        if (eqn := stage.inner) is not None:
            return _inner(eqn, stage, self._options)
        if not stage.on_cores:
            return self._program(stage)
        if (found := cores.in_one_pass(stage, self._step.next_of, writable & stage.free)) is not None:
            written += found[1]
            return found[0]
        processes = len({device.process_index for device in self._devices})
        if processes > 1 and any(is_sent(v.aval) for v in stage.inputs):
            raise ValueError(
                "update_on: an update that is more than arithmetic on elements (LAMB, Adafactor, Muon), or any without "
                f"numba, takes every leaf whole, and the step runs in {processes} processes. Fix: pip install "
                "jax_offload[cores] for AdamW and the like; else update_on='device', and shard_over= for less of the "
                "state."
            )
        return self._program(stage)

    def _program(self, stage: Stage) -> Callable[..., Sequence[Any]]:
        """Make the program of a stage; stages that do the same share it."""
        jaxpr, n, places = stage.jaxpr, len(stage.outputs), self.result_places(stage)
        made = [*stage.outputs, *stage.down]
        turns = [made.index(v) for v in self._step.in_turn if v in made]
        key = self._structure(jaxpr), stage.name, n, stage.reused, tuple(places), tuple(turns)
        if key not in self._compiled:
            run = jax_fun(ClosedJaxpr(_sending_rows(jaxpr, n) if len(self._devices) == 1 else jaxpr, []))

            def program(*operands: Any) -> list[Any]:
                results = _in_turn(run(*operands), turns)
                return guarded([*results[:n], *map(to_host, results[n:])], list(operands))

            program.__name__ = f"step_{stage.name}"
            options = dict(self._options[stage.sends] or {}) or None
            on_device = jit(program, donate_argnums=stage.reused, out_shardings=places, compiler_options=options)
            self._compiled[key] = cores.program(jaxpr) if stage.on_cores else on_device
        return self._compiled[key]

    @property
    def first(self) -> tuple[Stage, Callable[..., Sequence[Any]], Staged]:
        """Return the first stage, its program without ``jit``, and the step."""
        program: Any = self._program(self._stages[0])
        return self._stages[0], program.__wrapped__, self._step

    # ---- where values belong -----------------------------------------------------------------------------------------

    def _place_of(self, v: Var) -> Sharding | None:
        """Return a value's sharding, if it is known: the sharding of the value whose next value, or part, it is."""
        typed, mesh = memory.typed_sharding(v.aval), getattr(self._everywhere, "mesh", None)
        if v not in self._places and mesh is not None and typed is not None and memory.is_explicit(typed.mesh):
            return NamedSharding(mesh, typed.spec)  # with Explicit axes, what reads the value expects its type
        seen = set[Var]()
        while v not in self._places and v in self._like and v not in seen:
            seen.add(v)  # leaves may swap places
            v = self._like[v]
        return self._places.get(v)

    def place(self, v: Var) -> Sharding:
        """Return where a value belongs: replicated in its own memory, unless its sharding is known."""
        place = self._place_of(v) or self._everywhere
        return place.with_memory_kind(HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)

    def result_places(self, stage: Stage) -> list[Sharding | None]:
        """Return the shardings of a program's results. The next value of a divided value is divided in the same way."""
        named = (self.place(v) if isinstance(self._place_of(v), NamedSharding) else None for v in stage.outputs)
        return [*named, *(None for _ in stage.down)]

    # ---- a call ------------------------------------------------------------------------------------------------------

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Return the step's flat results, given its flat arguments."""
        arrays = [*self.constants, *self._arrays(args)]
        values = dict(zip([*self._step.consts, *self._step.arguments], arrays, strict=False))
        times = Counter(map(id, arrays))
        for v in self.donated:  # which the caller gives twice, or hands on from a branch: only a copy is ours
            if times[id(values[v])] > 1:
                values[v] = _copied(values[v])
        # kept, so that no other object gets its id
        donated = {id(x): x for x in (values[v] for v in self.donated) if isinstance(x, jax.Array)}
        for token, leaf in self.files.given:
            leaf.home.check(token.val if isinstance(token, Literal) else values[token])
        for home in {leaf.home for parts in self.files.writes.values() for leaf, _ in parts}:
            home.check_commits()  # before anything that is donated is deleted
        for task, gone in self._todo:
            values.update(zip(task.makes, task.payload(*(values[v] for v in task.reads)), strict=True))
            _forget(values, gone, donated)
        leaves, rest = self.files.returned, iter(values_of(values, self.files.outputs))
        tokens = {home: home.advance() for home in dict.fromkeys(leaf.home for leaf in leaves.values())}
        for home in dict.fromkeys(leaf.home for _, leaf in self.files.given if leaf.home not in tokens):
            home.check_moves()  # of a state that the step reads and does not return
        n = len(leaves) + len(self.files.outputs)
        results = [tokens[leaves[k].home] if k in leaves else next(rest) for k in range(n)]
        # in host memory too, results are neither arguments nor each other, unless an argument is ours
        others = {id(x) for x in (*args, *self.constants)} - donated.keys()
        for k, x in enumerate(results):
            results[k] = _copied(x) if id(x) in others else x
            others.add(id(x))
        return results

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
            return x if here else jax.device_put(x, self._everywhere.with_memory_kind(str(x.sharding.memory_kind)))

        return self._arrays([moved(x) for x in self._step.consts.values()])

    def committed(self, x: Any) -> Any:
        """Commit a result, as ``jax.jit`` does if an argument is committed, here a host leaf."""
        return jax.device_put(x, self._everywhere) if isinstance(x, jax.Array) and not x.committed else x


def _forget(values: dict[Var, Any], gone: Iterable[Var], donated: Mapping[int, Any]) -> None:
    """Forget values, and free the donated ones unless another variable holds them, as a branch may return its
    operands."""
    own = [x for x in [values.pop(v) for v in gone] if id(x) in donated and not x.is_deleted()]
    live = set(map(id, values.values())) if own else set[int]()
    for x in own:
        if id(x) not in live:
            x.delete()


def _fetch(part: Part, to: Sharding) -> list[Any]:
    leaf, rows = part
    return [leaf.home.fetch(leaf.name, to, rows)]


def _put(writes: Sequence[Sequence[Part]], *values: Any) -> list[Any]:
    each = ((x, part) for x, parts in zip(values, writes, strict=True) for part in parts)
    return [leaf.home.put(leaf.name, x, rows) for x, (leaf, rows) in each]


def _waited(*writing: Any) -> list[Any]:
    for each in writing:
        each.exception()  # the end of the step raises it, in all processes
    return []


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


def _inner(eqn: Equation, stage: Stage, options: Options) -> Callable[..., Sequence[Any]]:
    """Return a ``cond`` or a ``while`` of the step that holds an update, such as ``optax.apply_if_finite``.

    What decides is read on the host: the index of a branch, or a loop's condition. The branch that is taken, or the
    body, is driven.
    """
    params, driven = eqn.params, dict[int, Driven]()
    free = [isinstance(v, Literal) or v in stage.free for v in eqn.invars]  # a literal has a buffer of its own

    def run(k: int, body: ClosedJaxpr, given: Sequence[Any], free: Sequence[bool]) -> Sequence[Any]:
        if k not in driven:
            driven[k] = Driven(body, given, free, options)
        return driven[k](given)

    def branch(index: Any, *given: Any) -> Sequence[Any]:
        k = min(max(int(np.asarray(index)), 0), len(params["branches"]) - 1)
        return run(k, params["branches"][k], given, free[1:])

    def loop(*given: Any) -> Sequence[Any]:
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        # The body takes the buffers of its carry, so it gets copies of buffers that others hold.
        others = Counter(map(id, given))
        carry = [x if own and others[id(x)] == 1 else _copied(x) for x, own in zip(given, free, strict=True)][m:]
        while np.asarray(*condition(*itertools.compress([*given[:n], *carry], used))):
            carry = run(0, params["body_jaxpr"], [*given[n:m], *carry], [False] * (m - n) + [True] * len(carry))
        return carry

    if "cond_jaxpr" in params:
        reduced, used = without_dead_code(params["cond_jaxpr"].jaxpr)
        condition = jit(jax_fun(ClosedJaxpr(reduced, params["cond_jaxpr"].consts)))

    def called(*operands: Any) -> list[Any]:
        given = values_of(dict(zip(stage.inputs, operands, strict=True)), eqn.invars)
        results = (branch if "branches" in params else loop)(*given)
        return [results[eqn.outvars.index(v)] for v in stage.outputs]

    return called


def _copied(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    return memory.copy_on_host(x) if on_host(x) else jnp.copy(x)


# ---- within one of the programs --------------------------------------------------------------------------------------

LEAST_ROW = 2**16  # bytes; smaller rows go down together, at the end of the program


def _sending_rows(jaxpr: Jaxpr, n: int) -> Jaxpr:
    """Let scans send the results after the first ``n`` to host memory row by row, if nothing else in it reads them.

    Such a stack never exists on the device, and its rows are copied during the matmuls of the pass.
    """
    times = Counter(v for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for v in variables(atoms))
    sent = {v for v in variables(jaxpr.outvars[n:]) if times[v] == 1}
    hosts: dict[Var, Var] = {}
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        scan = jaxprs.scan_of(eqn)
        ys = [y for y in scan.ys if y in sent and nbytes(y.aval) >= scan.length * LEAST_ROW] if scan else []
        if scan is not None and ys and not scan.body.consts:
            hosts |= {y: Var(cast(Any, y.aval).update(memory_space=jax.memory.Space.Host)) for y in ys}
            body, new = scan.body.jaxpr, Builder([*scan.body.jaxpr.eqns])
            rows = body.outvars[len(scan.carry) :]
            with eqn.ctx.manager:
                rows = [new.run(to_host, x)[0] if y in hosts else x for x, y in zip(rows, scan.ys, strict=True)]
            traced = ClosedJaxpr(jaxprs.jaxpr_like(body, new.eqns, [*body.outvars[: len(scan.carry)], *rows]), [])
            # not unrolled: rows of several iterations would be put together in host memory
            params = eqn.params | {"jaxpr": traced, "unroll": 1}
            eqn = eqn.replace(params=params, outvars=[hosts.get(v, v) for v in eqn.outvars])
        eqns.append(eqn)
    return jaxprs.jaxpr_like(jaxpr, eqns, [jaxprs.renamed(hosts, v) for v in jaxpr.outvars]) if hosts else jaxpr


def _in_turn(results: Sequence[Any], turns: Sequence[int]) -> list[Any]:
    """Let each of some results wait for the one before, and the smallest of the others wait for all.

    Nothing else asks for gradients that stay on the device: XLA would put their matmuls off to the end of the program,
    and keep the activations of all layers. Gradients that are all copied to the host need no such order.
    """
    found, turns = list(results), [k for k in turns if not on_host(results[k])]
    if len(turns) < 2:
        return found
    # XLA must compute each gradient when its turn comes, because one of its numbers counts, times a zero unknown to XLA
    read, zero = opaque(jnp.int32(0)), opaque(jnp.int32(0))
    for k in turns:
        found[k], read = together((found[k], read))
        first = jax.lax.slice(found[k], [0] * found[k].ndim, [1] * found[k].ndim).reshape(())
        read |= jnp.real(first).astype(jnp.int32) & zero
    others = {*range(len(found))}.difference(turns)
    others = [k for k in others if not on_host(found[k]) and not jnp.issubdtype(found[k].dtype, jax.dtypes.extended)]
    last = min(others or turns, key=lambda k: nbytes(jax.typeof(found[k])))
    found[last] = jnp.where(read == 0, found[last], jnp.zeros((), found[last].dtype))
    return found
