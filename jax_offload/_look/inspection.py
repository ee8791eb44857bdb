"""Inspect what an executable really does with host memory; ``verify`` is the check for a user's own test."""

import dataclasses
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_offload._look.chips import HEADROOM, Chip, larger_share, usable
from jax_offload._look.chips import chip as chip_of
from jax_offload._look.compiled import BY_LAYERS, SAYS, Compiled, compiled
from jax_offload._look.hlo import SCOPE
from jax_offload._look.report import replaced
from jax_offload._look.text import aligned, in_bytes, in_mib, in_seconds
from jax_offload._look.timeline import (
    COLLECTIVES,
    COMPUTE,
    LOAD,
    STORE,
    UNKNOWN,
    Program,
    Segment,
    Timeline,
    Transfer,
    transfers,
)
from jax_offload._program.arrays import some

_LARGE = 64 * 2**20  # below it, loading all of a state at once costs nothing
# If more than this share of the loaded bytes is on the device at once, nothing holds the loads back. XLA for a TPU
# delays some loads by itself.
_MOST, _MOST_OF_A_STREAM = 0.5, 0.9


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something wrong and its fix; the leaf that it concerns, if one; whether ``verify`` raises it."""

    what: str
    leaf: str = ""
    error: bool = True

    def __str__(self) -> str:
        return f"{self.leaf}: {self.what}" if self.leaf else self.what


def problems(program: Compiled, schedule: Program, moved: Sequence[Transfer], window: int) -> tuple[Problem, ...]:
    """Return the faults of a step that is meant to be offloaded, errors first."""
    checks = _nothing_there, _not_where_they_should_be, _put_whole, _crossed, _too_large
    found = [problem for check in checks for problem in check(program)]
    found += [*_all_at_once(program, moved, window), *_host_arithmetic(schedule)]
    return tuple(sorted(found, key=lambda problem: not problem.error))


def _nothing_there(program: Compiled) -> Iterator[Problem]:
    given, module = program.given, program.module
    if any(x.host for x in given.values()) or program.host_elsewhere or module.uses_host:
        return
    state = [x.array.nbytes for x in given.values() if x.state]
    what = (
        f"; its optimizer state has {len(state)} leaves, {in_mib(sum(state))} MiB, on the device. Wrap the "
        "optimizer, jax_offload.offload(...), and make the state with its init; or move one that is there: "
        "jax_offload.to_host(tx, state)"
        if state
        else ", nor is it an optimizer's state: what no result needs is left out by the compiler. Give the step a "
        "state, and return the new one"
    )
    yield Problem(f"nothing that this step is given is in host memory{what}")


def _not_where_they_should_be(program: Compiled) -> Iterator[Problem]:
    given, results = program.given, program.module.given_back
    # Matched by type: a compiled program does not say which argument a result replaces. A gradient in host memory is
    # used up.
    taken = Counter(
        array for number, array in program.module.taken.items()
        if array.host and (number not in given or given[number].kept_on_host is not False)
    )  # fmt: skip
    on_host, on_device = (Counter(x for x in results.values() if x.host is host) for host in (True, False))
    for x in given.values():
        kept = x.kept_on_host
        if kept is None:  # no update is seen
            kept = x.state and on_host[x.array] > taken[x.array]
        if x.host and not x.array.host:
            what = (
                "is handed over in host memory, and the program takes it on the device. Leave in_shardings out, or let "
                "them name its memory"
            )
            yield Problem(what, x.name)
        elif kept and not x.host:
            what = (
                "belongs in host memory and arrives on the device, where it stays throughout the step. Move it before, "
                "jax_offload.to_host(tx, state), or restore into jax_offload.abstract_state(tx, params)"
            )
            yield Problem(what, x.name)
    # A function without an update, such as an evaluation, need not return what it reads.
    evaluates = all(x.kept_on_host is None for x in given.values())
    for array, times in taken.items():
        lost = times - on_host[array]
        if (min(lost, on_device[array]) if evaluates else lost) > 0:
            numbers = [number for number, x in program.module.taken.items() if x == array and x.host]
            alike = [given[number] for number in numbers if number in given]
            places = [(x, x.replaced_by) for x in alike]
            gone = [x.name for x, k in places if k is None or not results[(k,)[: len(results) > 1]].host]
            these = f"{array.dtype}{list(array.shape)}"
            what = (
                f"{lost} of {times} leaves {these} in host memory are not returned there: the next step finds them on "
                "the device. Return their next values, and where there are out_shardings, let them name host memory, "
                "as the sharding of the argument and of jax_offload.abstract_state(tx, params) do"
            )
            # what is donated has no other next value; a gradient of parameters only looks like one
            replaces = not evaluates or any(x.donated for x in alike)
            every = [program.module.arguments[number].scope for number in numbers]
            yield Problem(what, some(gone or every), error=replaces)


def _put_whole(program: Compiled) -> Iterator[Problem]:
    """Find arrays in host memory that the step itself loads whole: an error where they could be loaded by layers."""
    for x in program.given.values():
        if x.whole and x.array.nbytes >= _LARGE:
            what = f"is loaded as a whole, {in_mib(x.array.nbytes)} MiB: {x.whole}"
            yield Problem(what, x.name, error=x.whole == BY_LAYERS)


def _crossed(program: Compiled) -> Iterator[Problem]:
    """Find donated buffers that are paired with a result in another memory."""
    module = program.module
    for place, number in module.aliases.items():
        if module.taken[number].host != module.given_back[place].host:
            what = (
                f"is donated, and its buffer is given to result {place[0] if place else 0}, in another memory: that "
                "aborts on a CPU, and overwrites memory on a GPU. Return donated arguments in their order, or jit with "
                "jax_offload.jit"
            )
            yield Problem(what, module.arguments[number].scope)


def _too_large(program: Compiled) -> Iterator[Problem]:
    """Find a peak beyond the limit of ``plan``; it is an error if the chip does not have that much memory."""
    peak, chip = sum(program.parts.values()), program.chip
    if chip is None or peak <= (limit := usable(chip, chip.hbm_bytes)):
        return
    if peak > chip.hbm_bytes:
        what = (
            f"the peak is {in_bytes(peak)}, and {chip.name} has {in_bytes(chip.hbm_bytes)}: compute fewer tokens at a "
            "time, put a jax.checkpoint around each layer, use flash attention, compute the loss in chunks, or divide "
            "the parameters over more devices"
        )
    else:
        what = (
            f"the peak is {in_bytes(peak)}, and jax's share of {chip.name} less {HEADROOM:.0%} headroom is "
            f"{in_bytes(limit)}: the step {larger_share(chip, chip.hbm_bytes, peak)}"
        )
    yield Problem(what, error=peak > chip.hbm_bytes)


def _all_at_once(program: Compiled, moved: Sequence[Transfer], held: int) -> Iterator[Problem]:
    loaded = {t.leaf: t.nbytes for t in moved if t.loads and t.leaf != UNKNOWN}
    total = sum(loaded.values())
    ours = any(SCOPE.search(op.scope) for at in program.module.computations.values() for op in at.ops)
    if not any(given.host for given in program.given.values()) or not total or (ours and held < _LARGE):
        return
    if held >= (_MOST_OF_A_STREAM if ours else _MOST) * total:
        leaves = some(sorted(loaded, key=lambda leaf: (-loaded[leaf], leaf)))
        why = (
            "its leaves are loaded whole: jax_offload.placement(step, *args) says why"
            if ours
            else "nothing holds the loads back, as by the usual recipe of device_put, update, device_put: the step's "
            "peak does not fall. Let jax_offload.offload(...) load, update and store"
        )
        of = f"{in_mib(held)} MiB of the state are on the device at once, of {in_mib(total)} ({leaves})"
        yield Problem(f"{of}: {why}", error=not ours)


def _host_arithmetic(schedule: Program) -> Iterator[Problem]:
    found: dict[str, dict[str, None]] = {}
    for op in (op for at in schedule.module.run for op in at.ops):
        host = '_xla_compute_type="host"' in op.attributes or op.target == "HostExecute"
        if not host or op.opcode.endswith("-done"):
            continue
        bodies = op.called.get("calls") or op.called.get("called_computations")
        computed = [x for x in (bodies[0].ops if bodies else [op]) if x.opcode not in ("parameter", "copy", "tuple")]
        what = "is copied within host memory by the host's cores, as XLA does not write it in place"
        if computed:
            name = next((x.scope for x in (op, *computed) if x.scope), op.name)
            what = (
                f"{name} is computed by the host's cores, as its operand is in host memory: move it to the device "
                "first, jax_offload.to_device or jax.device_put(x, jax.memory.Space.Device)"
            )
        read = filter(None, map(schedule.buffers.name, op.operands))
        found.setdefault(what, {}).update(dict.fromkeys(read))
    yield from (Problem(what, some(sorted(leaves)), error=False) for what, leaves in found.items())


_UNSEEN_ON_A_CPU = (
    "whether the state streams or is on the device all at once, arithmetic on the host, and whether the step fits a "
    'chip: jax on a CPU leaves out the copies. Compile for a chip that need not be there: target="h200"'
)


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """What a compiled step does with device memory, host memory and the link between them; ``print`` it.

    ``jax_offload.inspect`` returns it. Figures are bytes on each device; the printed tables have MiB.

    Attributes:
      target: the chip for which the step was compiled, or the platform.
      peak: the peak of device memory in the step, from XLA's compiler.
      parts: the peak by kind, from XLA's compiler: parameters, state on the device, gradients that wait for their
        update, other arguments, new results (those that take no donated buffer), and temporaries (activations,
        gradients, the window).
      host: pinned host memory of the step's arguments, results and temporaries.
      host_temp: the temporaries among them. A program that streams in place has none.
      transfers: one for each leaf and direction between host and device.
      problems: the faults found; empty if all is well.
      timeline: the simulated run; ``None`` if the chip's figures are unknown.
      compiled_for: whether the step was compiled for an absent chip.
      program: ``"before"``, the first program, if the step runs as several programs.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx, params = jo.offload(optax.adamw(1e-3)), jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
      >>> step = jax.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
      >>> seen = jo.inspect(step, params, tx.init(params))
      >>> seen.problems, seen.peak == sum(seen.parts.values())
      ((), True)
    """

    target: str
    peak: int
    parts: Mapping[str, int]
    host: int
    host_temp: int
    transfers: tuple[Transfer, ...]
    problems: tuple[Problem, ...]
    timeline: Timeline | None
    compiled_for: bool
    program: str = ""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that ``verify`` raises."""
        return tuple(problem for problem in self.problems if problem.error)

    @property
    def loaded(self) -> int:
        """Bytes from the host in one step."""
        return sum(t.nbytes for t in self.transfers if t.loads)

    @property
    def stored(self) -> int:
        """Bytes to the host in one step."""
        return sum(t.nbytes for t in self.transfers if not t.loads)

    @property
    def unseen(self) -> str:
        """The faults that this program cannot show; empty if it can show all."""
        found = [_UNSEEN_ON_A_CPU] if self.target == "cpu" else []
        return ". ".join(found + ([f"the other programs. {SAYS}"] if self.program else []))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, without the timeline's segments."""
        found = dataclasses.asdict(dataclasses.replace(self, timeline=None))
        return found | {"unseen": self.unseen, "timeline": self.timeline and self.timeline.to_dict()}

    def __str__(self) -> str:
        how = "compiled, not run" if self.compiled_for else "compiled"
        parts = [(f"peak of device memory ({how})", in_mib(self.peak))]
        parts += [(f"  {name}", in_mib(nbytes)) for name, nbytes in self.parts.items() if in_mib(nbytes) != "0.00"]
        # XLA's analysis counts all memory of a CPU as device memory.
        host = ("pinned host memory: a CPU counts it above", "") if self.target == "cpu" else None
        parts += [host or ("pinned host memory", in_mib(self.host))]
        parts += [("  temporaries", in_mib(self.host_temp))] if self.host_temp else []
        which = f", program {self.program!r}" if self.program else ""
        tables: list[tuple[str, list[str]]] = [(f"device: {self.target}{which}", aligned([("", "MiB"), *parts], [1]))]
        if t := self.timeline:
            times = [("step", t.step), ("  compute", t.compute), ("  waits for transfers", t.exposed)]
            times += [("  waits for collectives", t.exposed_collectives)] if t.collectives else []
            rows = [(name, in_seconds(seconds)) for name, seconds in [*times, ("link alone, both ways", t.link)]]
            tables.append((f"simulated on {t.chip}, not measured", aligned([("", "time"), *rows])))
        if self.transfers:
            by_bytes = sorted(self.transfers, key=lambda t: (-t.nbytes, t.leaf, not t.loads))
            rows = [(t.leaf, "load" if t.loads else "store", in_mib(t.nbytes), f"{t.hidden:.0%}") for t in by_bytes]
            rows = rows if len(rows) <= 40 else [*rows[:39], (f"... and {len(rows) - 39} more", "", "", "")]
            tables.append(("transfers", aligned([("leaf", "way", "MiB", "hidden"), *rows], [2, 3])))
        rows = [("error" if p.error else "warning", str(p)) for p in self.problems]
        rows = rows or [("none", "")]
        rows += [("not seen", self.unseen)] if self.unseen else []
        tables.append(("problems", aligned(rows)))
        return "\n\n".join("\n  ".join([title, *lines]) for title, lines in tables)


def inspect(
    step: Any, *args: Any, target: str | None = None, chip: str | Chip | None = None, **kwargs: Any
) -> Inspection:
    """Compile a step and say what it does with device memory, host memory and the link between them.

    It compiles for the devices of the arguments, or for an absent chip, and reads the scheduled program. Nothing runs,
    and nothing is allocated on a device. On a CPU jax leaves out the copies between memories, so there are no transfers
    to see and the peak says little; pass ``target``. ``unseen`` lists what stays unknown.

    Args:
      step: a training step, jitted with its donation, or by ``jax_offload.jit``; or the result of
        ``jax_offload.pipelined``, whose second call is inspected.
      *args: the step's arguments, concrete or abstract (``jax.ShapeDtypeStruct`` with a sharding). For a pipelined
        step, the original step's arguments, or the call's.
      target: a chip to compile for: ``"h200"``, ``"h100"``, ``"v5e:2x2"``, or ``v5p`` and ``v6e`` with a topology. It
        needs the extra ``aot``, and arguments that are abstract or on the CPU.
      chip: the chip whose speeds the simulation uses, as ``jax_offload.chip`` takes it; the target's if left out.
      **kwargs: the step's keyword arguments.

    Returns:
      An ``Inspection``.

    Raises:
      TypeError: ``step`` is none of these.
      ValueError: the target or the chip is not known, its compiler is not installed, or it has too few devices.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx, params = jo.offload(optax.adamw(1e-3)), jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
      >>> step = jax.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
      >>> print(jo.inspect(step, params, tx.init(params)))  # doctest: +ELLIPSIS
      device: cpu
      ...
      problems
        none...
    """
    program = compiled(step, args, kwargs, target)
    own = program.chip and (program.chip.beside_others if program.module.devices > 1 else program.chip)
    speeds = own if chip is None else chip
    # Without the chip's figures the schedule still tells what lives when; its times are then discarded.
    schedule = Program(program.module, chip_of("h200" if speeds is None else speeds))
    run, m, parts = schedule.timeline(), program.memory, program.parts
    # The first of several programs sends the operands of the host's cores.
    moved = transfers(run, "gradients" if program.program else UNKNOWN)
    host = m.host_argument_size_in_bytes + m.host_output_size_in_bytes - m.host_alias_size_in_bytes
    return Inspection(
        target=program.target,
        peak=sum(parts.values()),
        parts=parts,
        host=host + m.host_temp_size_in_bytes,
        host_temp=m.host_temp_size_in_bytes,
        transfers=moved,
        problems=problems(program, schedule, moved, run.window),
        timeline=None if speeds is None else run,
        compiled_for=program.compiled_for,
        program=program.program,
    )


def verify(step: Any, *args: Any, target: str | None = None, **kwargs: Any) -> Inspection:
    """Raise if a step does not offload, or does not fit the chip: one line for your script or a test.

    A step does not offload if nothing of the state is in host memory, if a leaf arrives on the device or does not
    return to the host although it should, if a donated buffer crosses memory kinds, if all of the state is on the
    device at once, as in the usual recipe, or if a parameter in host memory is loaded as a whole and
    ``jax_offload.jit`` would load it layer by layer. It does not fit if its peak exceeds the chip's memory; a peak
    beyond jax's share of the memory is a warning. How much is hidden is not checked. On a CPU, where jax leaves out the
    copies, what is on the device at once and the peak can be seen only with a ``target``; ``unseen`` then says so.

    Args:
      step: the step, as for ``jax_offload.inspect``.
      *args: the step's arguments.
      target: the chip to compile for, as for ``jax_offload.inspect``.
      **kwargs: the step's keyword arguments.

    Returns:
      The ``Inspection``, which may contain warnings.

    Raises:
      ValueError: the step does not offload or does not fit, with the reason and the fix; or what
        ``jax_offload.inspect`` raises.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx, params = jo.offload(optax.adamw(1e-3)), jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
      >>> step = jax.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
      >>> jo.verify(step, params, tx.init(params)).errors
      ()
    """
    found = inspect(step, *args, target=target, **kwargs)
    if found.errors:
        said = "\n".join(f"- {p}" for p in found.errors[:10])
        more = f"\nand {len(found.errors) - 10} more" if len(found.errors) > 10 else ""
        raise ValueError(f"verify(): this step fails, as compiled for {found.target}:\n{said}{more}")
    return found


# ---- a step as it ran: the profiler's trace as a timeline


def measured(segments: Sequence[Segment], steps: int) -> Timeline:
    """Return the timeline of the segments of some steps.

    Raises:
      ValueError: nothing ran.
    """
    if not segments:
        raise ValueError("profile(): the trace has nothing of a device or of XLA: may this user profile it?")
    first = min(s.begin for s in segments)
    moved = [dataclasses.replace(s, begin=s.begin - first, end=s.end - first) for s in segments]
    found = Timeline(tuple(moved), steps=steps)
    return dataclasses.replace(found, link=max(found.loading, found.storing))


def profile(step: Any, *args: Any, steps: int = 3) -> Timeline:
    """Run a step several times under jax's profiler, and say where its time went.

    The step must return its donated arguments: a result with the structure, shapes and dtypes of one takes its place
    in the next run. It runs once before measuring, to compile. Donated arguments are gone afterwards. Profile a step of
    ``jax_offload.pipelined`` with its carry: ``profile(train, carry, batch)``, after a first call.

    On jax 0.10 the profiler crashes in a process that has compiled for a ``target``. This function reads the traces of
    GPUs and CPUs. For a TPU, look at jax's own trace, ``jax.profiler.trace``; it names the leaf of each transfer.

    Args:
      step: a training step, jitted.
      *args: its arguments, on the devices.
      steps: how many runs to measure.

    Returns:
      A ``Timeline`` to print, with the figures of one step. Its ``step`` is from the beginning of the first operation
      to the end of the last, divided by the number of steps. The ``timeline`` of ``jax_offload.inspect`` has the same
      figures, simulated.

    Raises:
      ValueError: ``steps`` is below 1, a donated argument is not returned, the devices are TPUs, or the trace is empty.

    Example:
      >>> import jax, jax.numpy as jnp, jax_offload as jo
      >>> step = jax.jit(lambda w, x: w - 0.1 * x.T @ (x @ w), donate_argnums=0)
      >>> seen = jo.profile(step, jnp.ones((256, 256)), jnp.ones((64, 256)), steps=2)
      >>> seen.steps, seen.step > 0, abs(seen.step - seen.compute - seen.exposed - seen.idle) < 1e-9
      (2, True, True)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"profile(): steps={steps!r}; expected a whole number from 1 on.")
    if jax.default_backend() == "tpu":
        raise ValueError(
            "profile(): the traces of TPUs are not read. Look at the trace itself (jax.profiler.trace; transfers have "
            "their leaves' names), and at jax_offload.inspect."
        )
    step = step if hasattr(step, "lower") else jax.jit(step)
    args = _following(args, jax.block_until_ready(step(*args)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                args = _following(args, jax.block_until_ready(step(*args)))
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0])) if files else None
        return measured([] if data is None else segments_of(data), steps)


def _following(args: tuple[Any, ...], results: Any) -> tuple[Any, ...]:
    """Return the arguments of the next step: results in place of donated arguments, else the same ones."""
    gone = [any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(arg)) for arg in args]
    found = replaced([arg if is_gone else None for arg, is_gone in zip(args, gone, strict=True)], results)
    if lost := [k for k, is_gone in enumerate(gone) if is_gone and k not in found]:
        raise ValueError(
            f"profile(): argument {lost[0]} is donated, and no result has its structure and types. Return it."
        )
    return tuple(found.get(k, arg) for k, arg in enumerate(args))


# The names of XLA's collectives and of NCCL's kernels.
_COLLECTIVE = re.compile(
    "(all-gather|all-reduce|reduce-scatter|(ragged-)?all-to-all|collective-)|.*nccl", re.IGNORECASE
)


def segments_of(data: Any) -> list[Segment]:
    """Return the segments of the first GPU of a ``jax.profiler.ProfileData``, else of the CPU's threads."""
    planes = sorted(data.planes, key=lambda plane: plane.name)
    for kind, wanted in ("/device:GPU:", "Stream"), ("/host:CPU", ""):
        if plane := next((plane for plane in planes if plane.name.startswith(kind)), None):
            events = [e for line in plane.lines if line.name.startswith(wanted) for e in line.events if e.duration_ns]
            if not wanted:
                events = [event for event in events if any(key == "hlo_op" for key, _ in event.stats)]
            return sorted(filter(None, map(_segment, events)), key=lambda s: s.begin)
    return []


def _segment(event: Any) -> Segment | None:
    """Return the segment of an event; ``None`` if it is a copy within the device."""
    name, begin, lane, nbytes = event.name, event.start_ns / 1e9, COMPUTE, 0
    plain = name.replace(" ", "").lower()
    if plain.startswith("memcpy"):
        lane = LOAD if "h2d" in plain or "htod" in plain else STORE if "d2h" in plain or "dtoh" in plain else ""
        # A GPU's trace says: kind_src:... size:1048576 ...
        size = re.search(r"\bsize:(\d+)", str(dict(event.stats).get("memcpy_details")))
        nbytes = int(size[1]) if size else 0
    elif _COLLECTIVE.match(name):
        lane = COLLECTIVES
    return Segment(lane, begin, begin + event.duration_ns / 1e9, name, nbytes) if lane else None
