"""A step as the compiler leaves it: the scheduled program, its memory, and what its arguments are.

A step that is driven runs as several programs, as the host's cores have a part in its update, or its state is on disk.
The first, "before", has its peak as a rule: the forward and the backward pass, and the gradients' way down.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from jax.tree_util import tree_flatten_with_path

from jax_offload._analysis.buffers import BATCH, GRADIENTS, PARAMETERS, STATE
from jax_offload._analysis.chips import Chip, chip, known_as
from jax_offload._analysis.hlo import Op, computations
from jax_offload._analysis.targets import Target, check_installed, compile_for, target_of
from jax_offload._base.around import step_described
from jax_offload._base.arrays import is_traced
from jax_offload._base.jaxprs import ClosedJaxpr
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, in_its_memory, is_host_aval, on_host
from jax_offload._base.on_disk import TOKEN, OnDisk, Place, is_on_disk
from jax_offload._base.private import options_of
from jax_offload._base.shardings import sharding_of
from jax_offload._drive.run import Driven
from jax_offload._drive.stages import BEFORE
from jax_offload._emit.find import holds_driven_update, kept_on_host, updates_in
from jax_offload._emit.region import Update
from jax_offload._interop.jit import Jitted
from jax_offload._interop.matching import names_of
from jax_offload._interop.pipelined import Pipelined
from jax_offload._interop.xla_options import compiler_options, options_for_sending
from jax_offload._report.callables import jitted, opened
from jax_offload._report.report import traced

SAYS = (
    "jo.jit drives this step in several programs, as the host's cores update a part of the state, or it is on disk. "
    f"This is the first, {BEFORE!r}: the forward and the backward pass; then the update comes, group by group. "
    "It is looked at in one piece, whatever programs jo.jit cuts it into"
)


@dataclasses.dataclass(frozen=True)
class First:
    """The first program of a driven step.

    Attributes:
      jitted: the program, a function of two dicts. It donates the first.
      args: these, abstract or not, by the arguments' names.
      elsewhere: the step's other arguments, by their names: other programs take them.
    """

    jitted: Any
    args: tuple[dict[str, Any], dict[str, Any]]
    elsewhere: Mapping[str, Any]


def is_driven(step: ClosedJaxpr) -> bool:
    """Whether the host's cores have a part in an update of a traced step, or some of its state is on disk."""
    return any(map(holds_driven_update, step.jaxpr.eqns))


def _has_files(args: Any) -> bool:
    return any(map(is_on_disk, jax.tree.leaves(args, is_leaf=is_on_disk)))


def in_memory(args: Any) -> Any:
    """A step's arguments with those on disk as they would be in host memory, abstract."""
    if not _has_files(args):
        return args
    place = _in(_device_of(jax.tree.leaves(args)), HOST_KIND)

    def moved(x: Any) -> Any:
        return in_its_memory(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)) if is_on_disk(x) else x

    return jax.tree.map(moved, args, is_leaf=is_on_disk)


class _Nowhere:
    """The home of leaves on disk in an abstract state: no step that is only looked at reads them."""

    def ends(self, name: str) -> tuple[int, ...]:
        return ()


def on_files(args: Any, step: ClosedJaxpr) -> Any:
    """A step's arguments with those on disk that its updates read there. ``step``: traced with them."""
    if _has_files(args):
        return args
    index_of = {v: k for k, v in enumerate(step.jaxpr.invars)}
    found = [(each, each.update.on_disk) for each in updates_in(step) if isinstance(each.update, Update)]
    there = {index_of[v] for each, leaves in found for v in each.inputs_of(leaves) if v in index_of}
    if not there:
        return args
    leaves, treedef = jax.tree.flatten(args)
    home, arrays = _Nowhere(), [k for k, x in enumerate(leaves) if is_traced(x)]
    for number in there:
        x = leaves[k := arrays[number]]
        there_to = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0], memory_kind=HOST_KIND)
        place = Place(home, f"leaf {number}", tuple(x.shape), np.dtype(x.dtype), there_to)
        leaves[k] = OnDisk(jax.ShapeDtypeStruct((), TOKEN), place)
    return jax.tree.unflatten(treedef, leaves)


def on_abstract(x: Any) -> bool:
    """Whether the mesh that an argument is on has no devices."""
    return isinstance(getattr(sharding_of(x), "mesh", None), jax.sharding.AbstractMesh)


def first_program(
    step: ClosedJaxpr,
    leaves: Sequence[Any],
    donated: Sequence[bool],
    shown: Sequence[Any] | None = None,
) -> First:
    """The first program of a traced step.

    Args:
      step: the traced step.
      leaves: its flat arguments.
      donated: whether each of them is donated.
      shown: the same arguments, with the arrays on disk in place of their tokens.

    Raises:
      ValueError: Python cannot drive the step.
    """
    if any(on_abstract(x) for x in leaves):
        raise ValueError(
            "step: its arguments are on an AbstractMesh, and a step that is driven from Python (update_on=, disk=) is "
            "cut for devices. Give a Mesh of as many, which may be the CPU's: "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8."
        )
    driven = Driven(step, leaves, donated, {}, {}, segments=False)
    task, program, inputs = driven.first
    names = _names(step, len(leaves))
    at = {v: k for k, v in enumerate(inputs)}
    wanted, free = [at[v] for v in task.inputs if v in at], {*task.reused}
    given = [
        {names[k]: in_its_memory(leaves[k]) for p, k in enumerate(wanted) if (p in free) is own}
        for own in (True, False)
    ]
    consts = driven.consts

    def before(donated: dict[str, Any], rest: dict[str, Any]) -> list[Any]:
        values = donated | rest
        return list(program(*(values[names[at[v]]] if v in at else consts[v] for v in task.inputs)))

    device = _device_of(leaves)
    hosted = [is_host_aval(v.aval) for v in task.outputs] + [True for _ in task.down]
    out = [_in(device, HOST_KIND if host else DEVICE_KIND) for host in hosted]
    taken = {*wanted}
    return First(
        jax.jit(before, donate_argnums=0, out_shardings=out),
        (given[0], given[1]),
        {name: x for k, (name, x) in enumerate(zip(names, shown or leaves, strict=True)) if k not in taken},
    )


def _device_of(leaves: Sequence[Any]) -> Any:
    """The sharding of the first of them that has one."""
    places = map(sharding_of, leaves)
    return next((s for s in places if s is not None), None) or SingleDeviceSharding(jax.devices()[0])


def _in(sharding: Any, kind: str) -> Any:
    (device, *_) = sharding.device_set
    return SingleDeviceSharding(device, memory_kind=kind)


def _names(step: ClosedJaxpr, n: int) -> list[str]:
    """The names of the arguments, each unique."""
    names = [str(name) for name in step.jaxpr.debug_info.arg_names or ()][-n:]
    names = names if len(names) == n else [f"argument {k}" for k in range(n)]
    return [name if name and names.index(name) == k else f"{name or 'argument'} {k}" for k, name in enumerate(names)]


def leaves_of(args: Any) -> list[Any]:
    """The arrays in a step's arguments."""
    return [x for x in jax.tree.leaves(args) if is_traced(x)]


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that is handed to a step.

    Attributes:
      path: its name, as far as that is known: with or without the name of the step's argument that it is in.
      host: whether it is in host memory when it is handed over.
      state: whether it belongs to the state of an optimizer.
      dtype, nbytes: of the array.
      gradient: whether it waits for the update, between two calls of a pipelined step.
      kept_on_host: whether the update that owns it keeps it in host memory; ``None`` where no update of an ``offload``
        is seen in the step.
    """

    path: str
    host: bool
    state: bool
    dtype: str
    nbytes: int
    gradient: bool = False
    kept_on_host: bool | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
      text: the scheduled module.
      lowered: StableHLO, where it is known.
      peak, host, host_temp: bytes, as XLA has them.
      given: the arguments, as handed over, by the number that they have in the program.
      target: the chip's or the platform's name.
      chip: of which there are figures, if so.
      program: which of several programs of a step this is; empty where it is all of it.
      elsewhere: the arguments that the others take.
    """

    text: str
    lowered: str
    peak: int
    host: int
    host_temp: int
    given: Mapping[int, Argument]
    target: str
    chip: Chip | None
    compiled_for: bool
    program: str = ""
    elsewhere: tuple[Argument, ...] = ()

    @property
    def roles(self) -> dict[int, str]:
        """What the arguments are: a parameter is of no state, and has the type of a result."""
        found = computations(self.text)["ENTRY"]
        root = next((op for op in found if op.root), found[-1])
        results = {(array.dtype, array.shape) for array in root.leaves.values()}
        roles: dict[int, str] = {}
        for number, op in arguments_of(found).items():
            given = self.given.get(number)
            array = op.arrays[0] if op.arrays else None
            floating = array is not None and re.match(r"bf|f\d", array.dtype)
            if given is not None and given.state:
                roles[number] = STATE
            elif given is not None and given.gradient and floating:
                roles[number] = GRADIENTS
            elif floating and array is not None and array.shape and (array.dtype, array.shape) in results:
                roles[number] = PARAMETERS
            else:
                roles[number] = BATCH
        return roles


@dataclasses.dataclass(frozen=True)
class _Known:
    """What the trace of a step says about its arguments.

    Attributes:
      carried: what a pipelined step carries, which it has in dicts, by names.
      arrays: the names of the arrays in the arguments, their types, and whether the update that owns them keeps them in
        host memory.
      options: of the step's own ``jit`` for XLA's compiler; ``None``: those of ``jax_offload.compiler_options``.
    """

    carried: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    arrays: Sequence[tuple[str, Any, bool | None]] = ()
    options: Mapping[str, Any] | None = None

    def of(self, given: Sequence[tuple[str, Any]]) -> list[tuple[str, bool | None]]:
        """For arrays with their paths, in the order of the arguments: the names, and the flags."""
        places = _places(given, [(name, x) for name, x, _ in self.arrays])
        known = [(name, kept) for name, _, kept in self.arrays]
        return [(path, None) if at is None else known[at] for (path, _), at in zip(given, places, strict=True)]


def _places(given: Sequence[tuple[str, Any]], named: Sequence[tuple[str, Any]]) -> list[int | None]:
    """Where arrays with their paths are among those that have names too, which are in the same order."""
    found: list[int | None] = []
    begin = 0
    for path, x in given:
        same = (
            (x.dtype, tuple(x.shape)) == (y.dtype, tuple(y.shape)) and name.endswith(path) for name, y in named[begin:]
        )
        at = next((k for k, is_same in enumerate(same, begin) if is_same), None)
        begin = begin if at is None else at + 1
        found.append(at)
    return found


def _known(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Known:
    """What the trace of a step tells."""
    whole, kwargs = step.trace(*args, **kwargs), dict(kwargs)
    jaxpr = whole.jaxpr.jaxpr
    names = jaxpr.debug_info.arg_names or [None for _ in jaxpr.invars]
    named = [(name or "", v.aval) for name, v in zip(names, jaxpr.invars, strict=True)]
    with step_described():  # as the step is written: ``jax_offload.jit`` takes updates apart
        kept = kept_on_host(traced(lambda args, kwargs: step.__wrapped__(*args, **kwargs), args, kwargs))
    options = step._options.get("compiler_options") if isinstance(step, Jitted) else options_of(whole)
    flags = dict[int | None, bool]()
    if kept is not None:
        leaves = [(_path(path), x) for path, x in tree_flatten_with_path((args, kwargs))[0] if is_traced(x)]
        flags = dict(zip(_places(leaves, named), kept, strict=True))
    return _Known(arrays=[(name, x, flags.get(k)) for k, (name, x) in enumerate(named)], options=options)


def _path(path: tuple[Any, ...]) -> str:
    """The path of an array in (args, kwargs), without the argument that it is in."""
    return jax.tree_util.keystr(path[2:]) if len(path) > 1 else ""


def arguments_of(entry: Sequence[Op]) -> dict[int, Op]:
    """The arguments of a program, by number."""
    return {int(op.rest.partition(")")[0]): op for op in entry if op.opcode == "parameter"}


def compiled(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: str | None) -> Compiled:
    """A step, jitted or not, lowered or compiled, for its own devices or for ``target``."""
    to = None if target is None else target_of(target)  # before a trace starts jax: its plugins read the environment
    if isinstance(step, jax.stages.Compiled | jax.stages.Lowered):
        if args or kwargs or (target and isinstance(step, jax.stages.Compiled)):
            raise ValueError(
                "inspect(): a step that is lowered or compiled already takes no arguments and no target; got "
                f"{len(args) + len(kwargs)} arguments and target={target!r}. Give the step itself."
            )
        lowered = step if isinstance(step, jax.stages.Lowered) else None
        if lowered is not None and target:
            raise ValueError(f"inspect(): a lowered step has its platform; target={target!r} needs the step itself.")
        return _of_jax(lowered.compile() if lowered is not None else step, lowered)
    if len(args) == 1 and isinstance(args[0], optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(
            "step: expected a training step and its arguments; got a function and an optimizer, the (make, tx) of "
            "plan. Give what make(tx) returns: inspect(*make(tx))."
        )
    if not callable(step):
        raise TypeError(f"step: expected a training step, jitted, lowered or compiled; got a {type(step).__name__}.")
    if isinstance(step, Pipelined):
        step, args, carried = step.turned(*args, **kwargs)
        return _of_step(step, args, {}, to, _Known(carried))
    step, args, kwargs = jitted(*opened(step, args, kwargs))
    if isinstance(step, Jitted) and (first := _first_of(step, args, kwargs)) is not None:
        return of_first(first, target)
    return _of_step(step, args, kwargs, to, _known(step, args, kwargs))


def _of_step(step: Any, args: Any, kwargs: Any, to: Target | None, known: _Known) -> Compiled:
    if to is not None:
        return _for_target(step, args, kwargs, to, known)
    lowered = step.lower(*args, **kwargs)
    return _of_jax(lowered.compile(), lowered, known)


def _first_of(step: Jitted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> First | None:
    """Of a step that is driven in several programs the first."""
    traced, given = step.trace(*args, **kwargs), (args, dict(kwargs))
    if not is_driven(traced.jaxpr):
        return None
    donated, there = [info.donated for info in jax.tree.leaves(traced.args_info)], on_files(given, traced.jaxpr)
    traced = step.trace(*there[0], **there[1]) if there is not given else traced
    return first_program(traced.jaxpr, leaves_of(there), donated, leaves_of(in_memory(given)))


def of_first(first: First, target: str | None) -> Compiled:
    """The first program of a driven step."""
    if target is None:
        lowered = first.jitted.lower(*first.args)
        options = options_for_sending(jax.default_backend())
        found = _of_jax(lowered.compile(compiler_options=options or None), lowered)
    else:
        to = target_of(target)
        found = _for_target(first.jitted, first.args, {}, to, _Known(), options_for_sending(to.platform))
    others = (_argument(name, x, on_host(x) or getattr(x.sharding, "memory_kind", None) == HOST_KIND, state=True)
              for name, x in first.elsewhere.items())  # fmt: skip
    return dataclasses.replace(found, program=BEFORE, elsewhere=tuple(others))


def _of_jax(executable: Any, lowered: Any, known: _Known = _Known()) -> Compiled:
    memory = executable.memory_analysis()
    shardings = jax.tree.leaves(executable.input_shardings)  # of those arguments that the program has kept
    devices = next((list(s.device_set) for s in shardings if s.device_set), None) or jax.local_devices()
    kind = devices[0].device_kind
    named = known_as(kind)
    target, figures = (devices[0].platform, None) if named is None else (kind, chip(named))
    text = executable.as_text()
    given = _numbered(text, _given(executable.args_info, known))
    if len(shardings) == len(arguments_of(computations(text)["ENTRY"])):
        hosts = [s.memory_kind == HOST_KIND for s in shardings]
        given = {n: dataclasses.replace(x, host=hosts[n], state=x.state or hosts[n]) for n, x in given.items()}
    return _compiled(text, lowered, memory, given, target, figures, compiled_for=False)


def _for_target(step: Any, args: Any, kwargs: Any, to: Target, known: _Known, options: Any = None) -> Compiled:
    check_installed(to)
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves((args, dict(kwargs)))]
    n = max((len(s.device_set) for s in shardings if s is not None), default=1)
    if any(d.platform != "cpu" for s in shardings if s is not None for d in s.device_set):
        raise ValueError(
            f"target: to compile for {to.name} the arguments must be abstract or on the CPU; some are on "
            f"{next(d.platform for s in shardings if s is not None for d in s.device_set)}. Start jax with "
            "JAX_PLATFORMS=cpu, or hand over jax.ShapeDtypeStructs on a mesh of jax.devices('cpu')."
        )
    lowered = step.trace(*args, **kwargs).lower(lowering_platforms=(to.platform,))
    options = known.options if options is None else options
    if options is None:
        is_ours = isinstance(step, Jitted)
        options = step.compiling(to.platform, args, kwargs) if is_ours else compiler_options(to.platform)
    executable = compile_for(to, lowered.compiler_ir("stablehlo"), n, dict(options))
    text = executable.hlo_modules()[0].to_string()
    return _compiled(
        text,
        lowered,
        executable.get_compiled_memory_stats(),
        _numbered(text, _given((args, dict(kwargs)), known)),
        to.name,
        to.chip,
        compiled_for=True,
    )


def _compiled(
    text: str,
    lowered: Any,
    m: Any,
    given: Mapping[int, Argument],
    target: str,
    figures: Chip | None,
    *,
    compiled_for: bool,
) -> Compiled:
    return Compiled(
        text=text,
        lowered=lowered.as_text() if lowered is not None else "",
        peak=m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes,
        host=m.host_argument_size_in_bytes
        + m.host_output_size_in_bytes
        - m.host_alias_size_in_bytes
        + m.host_temp_size_in_bytes,
        host_temp=m.host_temp_size_in_bytes,
        given=given,
        target=target,
        chip=figures,
        compiled_for=compiled_for,
    )


def _given(tree: Any, known: _Known) -> list[Argument]:
    """The arrays in a step's (args, kwargs), in jax's order."""
    arrays = [(path, x) for path, x in tree_flatten_with_path(tree)[0] if hasattr(x, "dtype") and hasattr(x, "shape")]
    states, by_name = _states(tree), _states_by_name(known.carried)
    found: list[Argument] = []
    names = known.of([(_path(path), x) for path, x in arrays])
    for (path, x), (name, kept) in zip(arrays, names, strict=True):
        host = getattr(getattr(x, "sharding", None), "memory_kind", None) == HOST_KIND
        state = host or _below(path, states) or getattr(path[-1] if path else None, "key", None) in by_name
        waits = bool(known.carried) and len(path) > 1 and getattr(path[1], "idx", None) == 1
        found.append(dataclasses.replace(_argument(name, x, host, state, waits), kept_on_host=kept))
    return found


def _argument(path: str, x: Any, host: bool, state: bool, waits: bool = False) -> Argument:
    size = jax.numpy.dtype(x.dtype).itemsize if jax.numpy.issubdtype(x.dtype, jax.numpy.number) else 1
    return Argument(path, host, state, str(x.dtype), size * math.prod(x.shape), waits)


def _below(path: tuple[Any, ...], states: set[tuple[Any, ...]]) -> bool:
    return any(path[:k] in states for k in range(len(path) + 1))


def _states_by_name(carried: Mapping[str, Any]) -> set[str]:
    states, paths = _states(carried), tree_flatten_with_path(carried)[0]
    return {name for name, (path, _) in zip(names_of(carried), paths, strict=True) if _below(path, states)}


def _states(tree: Any) -> set[tuple[Any, ...]]:
    """The paths of the subtrees that are of a state: classes of optax and of ours are."""

    def is_state(x: Any) -> bool:
        module = type(x).__module__ or ""
        return module.split(".")[0] in ("optax", "jax_offload") and not hasattr(x, "shape")

    return {path for path, x in tree_flatten_with_path(tree, is_leaf=is_state)[0] if is_state(x)}


def _numbered(text: str, given: Sequence[Argument]) -> dict[int, Argument]:
    """The arguments by their number in the program, which leaves out unused ones; jax names them by their paths."""
    found: dict[int, Argument] = {}
    at = 0
    for number, op in sorted(arguments_of(computations(text)["ENTRY"]).items()):
        for k in range(at, len(given)):
            if op.scope.endswith(given[k].path):
                found[number], at = given[k], k + 1
                break
    return found
