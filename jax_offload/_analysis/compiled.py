"""A compiled step: the scheduled program, its memory, and the roles of its arguments.

A driven step, whose update runs on the host's cores or whose state is on disk, runs as several programs. The first one,
"before", usually has the step's peak: it is the forward and the backward pass, and sends the gradients down.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from jax.tree_util import tree_flatten_with_path

from jax_offload._analysis.buffers import GRADIENTS, PARAMETERS, STATE
from jax_offload._analysis.chips import Chip, chip, known_as
from jax_offload._analysis.hlo import Module
from jax_offload._analysis.targets import Target, check_installed, compile_for, target_of
from jax_offload._base.around import described
from jax_offload._base.arrays import is_traced
from jax_offload._base.memory import HOST_KIND, in_its_memory, is_host_aval
from jax_offload._base.on_disk import TOKEN, OnDisk, Place, is_on_disk
from jax_offload._base.private import options_of
from jax_offload._base.shardings import sharding_of
from jax_offload._drive.run import Driven
from jax_offload._drive.stages import BEFORE
from jax_offload._emit.find import holds_driven_update, kept_on_host, updates_in
from jax_offload._emit.region import Update
from jax_offload._interop.jit import Jitted, compiler_options, options_for_sending
from jax_offload._interop.pipelined import Pipelined
from jax_offload._interop.rotated import names_of
from jax_offload._report.callables import jitted, opened
from jax_offload._step.rewritten import rewritten

SAYS = (
    "jo.jit drives this step in several programs, as the host's cores update a part of the state, or it is on disk. "
    f"This is the first, {BEFORE!r}: the forward and the backward pass; then the update comes, group by group. "
    "It is looked at in one piece, whatever programs jo.jit cuts it into"
)
_ON_ABSTRACT = (
    "step: its arguments are on an AbstractMesh, and a step that is driven from Python (update_on=, disk=) is cut for "
    "devices. Give a Mesh of as many, which may be the CPU's: XLA_FLAGS=--xla_force_host_platform_device_count=8."
)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array among the arguments of a step.

    Attributes:
      name: its name, or the end of it without the step's argument that contains the array.
      host: whether it is in host memory when it is handed over.
      state: whether it belongs to the state of an optimizer.
      gradient: whether it waits for the update, between two calls of a pipelined step.
      kept_on_host: whether the update that owns it keeps it in host memory; ``None`` if the step shows no update of an
        ``offload``.
    """

    name: str
    host: bool
    state: bool
    gradient: bool = False
    kept_on_host: bool | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
      module: the scheduled program.
      memory: XLA's figures.
      given: the arguments, as handed over, by the number that they have in the program.
      target: the chip's or the platform's name.
      chip: its figures, where there are any.
      compiled_for: whether it was compiled for a chip that is not there.
      program: which of several programs of a step this is; empty where it is all of it.
      host_elsewhere: whether the others take something that is in host memory.
    """

    module: Module
    memory: Any
    given: Mapping[int, Argument]
    target: str
    chip: Chip | None
    compiled_for: bool = False
    program: str = ""
    host_elsewhere: bool = False

    @property
    def roles(self) -> dict[int, str]:
        """The kinds of arguments by number: a parameter belongs to no state and has the type of a result."""
        results = {(array.dtype, array.shape) for array in self.module.entry.root.leaves.values()}
        roles: dict[int, str] = {}
        for number, op in self.module.arguments.items():
            given, array = self.given.get(number), op.array
            floating = array is not None and re.match(r"bf|f\d", array.dtype)
            if given is not None and given.state:
                roles[number] = STATE
            elif given is not None and given.gradient and floating:
                roles[number] = GRADIENTS
            elif floating and array is not None and array.shape and (array.dtype, array.shape) in results:
                roles[number] = PARAMETERS
        return roles


def compiled(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: str | None) -> Compiled:
    """Compile a step, jitted or not, lowered or compiled already, for its own devices or for ``target``."""
    to = None if target is None else target_of(target)  # before a trace starts jax: its plugins read the environment
    if isinstance(step, jax.stages.Compiled | jax.stages.Lowered):
        if args or kwargs or (target and isinstance(step, jax.stages.Compiled)):
            raise ValueError(
                "inspect(): a step that is lowered or compiled already takes no arguments and no target; got "
                f"{len(args) + len(kwargs)} arguments and target={target!r}. Give the step itself."
            )
        if target:
            raise ValueError(f"inspect(): a lowered step has its platform; target={target!r} needs the step itself.")
        executable = step.compile() if isinstance(step, jax.stages.Lowered) else step
        return _of_jax(executable, _given(step))
    if len(args) == 1 and isinstance(args[0], optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(
            "step: expected a training step and its arguments; got a function and an optimizer, the (make, tx) of "
            "plan. Give what make(tx) returns: inspect(*make(tx))."
        )
    if not callable(step):
        raise TypeError(f"step: expected a training step, jitted, lowered or compiled; got a {type(step).__name__}.")
    if isinstance(step, Pipelined):
        step, args, carried = step.turned(*args, **kwargs)
        whole = step.trace(*args)
        return _lowered(whole, (args, {}), to, _given(whole, carried=carried), _options(step, whole, args, {}, to))
    step, args, kwargs = jitted(*opened(step, args, kwargs))
    given, whole = (args, dict(kwargs)), step.trace(*args, **kwargs)
    if isinstance(step, Jitted) and any(map(holds_driven_update, whole.jaxpr.jaxpr.eqns)):
        return _first_program(step, given, whole, to)
    as_written = whole
    if isinstance(step, Jitted):  # which takes updates apart
        written = rewritten(step.__wrapped__, as_written=True)
        with described():
            as_written = jax.jit(written, **step._options).trace(*args, **kwargs)
    arguments = _given(whole, kept_on_host(as_written.jaxpr))
    return _lowered(whole, given, to, arguments, _options(step, whole, args, kwargs, to))


def _options(
    step: Any, whole: jax.stages.Traced, args: tuple[Any, ...], kwargs: Mapping[str, Any], to: Target | None
) -> Mapping[str, Any] | None:
    """Return the compiler's options for a step on ``to``: its own ones, if it has any."""
    if to is not None and isinstance(step, Jitted):
        return step.compiling(to.platform, args, kwargs)
    return options_of(whole)


def _lowered(
    step: jax.stages.Traced,
    given: tuple[Any, Any],
    to: Target | None,
    arguments: Sequence[Argument],
    options: Mapping[str, Any] | None = None,
    sends: bool = False,
) -> Compiled:
    """Lower and compile a step.

    Args:
      step: the step, traced.
      given: its (args, kwargs).
      to: the chip to compile for; ``None``: the step's own devices.
      arguments: what it is given.
      options: the compiler's options for ``to``; ``None`` means ``jax_offload.compiler_options``.
      sends: whether it is the program before an update that runs elsewhere.
    """
    if to is None:
        lowered = step.lower()
        own = options_for_sending(jax.default_backend()) if sends else {}
        return _of_jax(lowered.compile(compiler_options=own) if own else lowered.compile(), arguments)
    check_installed(to)
    places = [s for x in jax.tree.leaves(given) if (s := getattr(x, "sharding", None)) is not None]
    if elsewhere := [d.platform for s in places for d in s.device_set if d.platform != "cpu"]:
        raise ValueError(
            f"target: to compile for {to.name} the arguments must be abstract or on the CPU; some are on "
            f"{elsewhere[0]}. Start jax with JAX_PLATFORMS=cpu, or hand over jax.ShapeDtypeStructs on a mesh of "
            "jax.devices('cpu')."
        )
    lowered = step.lower(lowering_platforms=(to.platform,))
    if options is None:
        options = (options_for_sending if sends else compiler_options)(to.platform)
    n = max((len(s.device_set) for s in places), default=1)
    executable = compile_for(to, lowered.compiler_ir("stablehlo"), n, dict(options))
    module, memory = Module(executable.hlo_modules()[0].to_string()), executable.get_compiled_memory_stats()
    return Compiled(module, memory, _numbered(module, arguments), to.name, to.chip, compiled_for=True)


def _of_jax(executable: Any, arguments: Sequence[Argument]) -> Compiled:
    """Read an executable for devices that are there."""
    shardings = jax.tree.leaves(executable.input_shardings)  # of those arguments that the program has kept
    devices = next((list(s.device_set) for s in shardings if s.device_set), None) or jax.local_devices()
    kind = devices[0].device_kind
    named, module = known_as(kind), Module(executable.as_text())
    given = _numbered(module, arguments)
    if len(shardings) == len(module.arguments):
        hosts = [s.memory_kind == HOST_KIND for s in shardings]
        given = {n: dataclasses.replace(x, host=hosts[n], state=x.state or hosts[n]) for n, x in given.items()}
    target, its_chip = (devices[0].platform, None) if named is None else (kind, chip(named))
    return Compiled(module, executable.memory_analysis(), given, target, its_chip)


# -- what the arguments are


def _given(step: Any, kept: Sequence[bool] | None = None, carried: Mapping[str, Any] | None = None) -> list[Argument]:
    """Describe the arguments of a traced, lowered or compiled step in jax's order.

    Args:
      step: the step.
      kept: for each of them whether the update that owns it keeps it in host memory.
      carried: what a pipelined step carries, which it has in dicts, by names.
    """
    paths = [path for path, _ in tree_flatten_with_path(step.args_info)[0]]
    if isinstance(step, jax.stages.Traced):
        avals, names = step.jaxpr.in_avals, step.jaxpr.jaxpr.debug_info.arg_names or [""] * len(paths)
    else:  # a lowered step does not name the arguments
        avals, names = jax.tree.leaves(step.in_avals), [jax.tree_util.keystr(path[2:]) for path in paths]
    states, by_name, found = _states(step.args_info), _states_by_name(carried or {}), list[Argument]()
    for k, (path, aval, name) in enumerate(zip(paths, avals, names, strict=True)):
        host = is_host_aval(aval)
        state = host or _below(path, states) or getattr(path[-1], "key", None) in by_name
        waits = bool(carried) and getattr(path[1], "idx", None) == 1
        found.append(Argument(name or "", host, state, waits, None if kept is None else kept[k]))
    return found


def _below(path: tuple[Any, ...], states: Set[tuple[Any, ...]]) -> bool:
    return any(path[:k] in states for k in range(len(path) + 1))


def _states(tree: Any) -> set[tuple[Any, ...]]:
    """Return the paths of an optimizer's states: subtrees whose class is one of optax's or of this package."""

    def is_state(x: Any) -> bool:
        return type(x).__module__.split(".")[0] in ("optax", "jax_offload") and not hasattr(x, "shape")

    return {path for path, x in tree_flatten_with_path(tree, is_leaf=is_state)[0] if is_state(x)}


def _states_by_name(carried: Mapping[str, Any]) -> set[str]:
    states, paths = _states(carried), tree_flatten_with_path(carried)[0]
    return {name for name, (path, _) in zip(names_of(carried), paths, strict=True) if _below(path, states)}


def _numbered(module: Module, given: Sequence[Argument]) -> dict[int, Argument]:
    """Return the arguments by number in the program, which leaves out unused ones and has jax's names for them."""
    found, left = dict[int, Argument](), list(given)
    for number, op in sorted(module.arguments.items()):
        if (k := next((k for k, x in enumerate(left) if op.scope.endswith(x.name)), None)) is not None:
            found[number], left = left[k], left[k + 1 :]
    return found


# -- the first program of a step that is driven


class _Nowhere:
    """The home of leaves on disk in an abstract state: no step that is only looked at reads them."""

    def ends(self, name: str) -> tuple[int, ...]:
        return ()


def on_files(args: Any, step: Any) -> Any:
    """Return a step's arguments, with those on disk that its updates read there. ``step``: traced with them."""
    if any(map(is_on_disk, jax.tree.leaves(args, is_leaf=is_on_disk))):
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


def _first_program(step: Jitted, given: tuple[Any, Any], whole: Any, to: Target | None) -> Compiled:
    """Compile the program before the update.

    Raises:
      ValueError: Python cannot drive the step.
    """
    leaves = jax.tree.leaves(given)
    if any(isinstance(getattr(sharding_of(x), "mesh", None), jax.sharding.AbstractMesh) for x in leaves):
        raise ValueError(_ON_ABSTRACT)
    donated = [info.donated for info in jax.tree.leaves(whole.args_info)]
    if (given := on_files(as_given := given, whole.jaxpr)) is not as_given:
        whole = step.trace(*given[0], **given[1])
    leaves = [x for x in jax.tree.leaves(given) if is_traced(x)]
    driven = Driven(whole.jaxpr, leaves, donated, {}, {}, segments=False)
    task, program, of_step = driven.first
    at = {v: k for k, v in enumerate(of_step.arguments)}
    taken = [at[v] for v in task.inputs if v in at]
    names = [name or "argument" for name in whole.jaxpr.jaxpr.debug_info.arg_names or [""] * len(leaves)]
    names = [name if names.index(name) == k else f"{name} {k}" for k, name in enumerate(names)]
    handed = [{names[k]: in_its_memory(leaves[k]) for p, k in enumerate(taken) if (p in {*task.reused}) is own}
              for own in (True, False)]  # fmt: skip

    def before(donated: dict[str, Any], rest: dict[str, Any]) -> list[Any]:
        values = donated | rest
        return list(program(*(values[names[at[v]]] if v in at else of_step.consts[v] for v in task.inputs)))

    first = jax.jit(before, donate_argnums=0, out_shardings=driven.result_places(task)).trace(*handed)
    found = _lowered(first, (handed, {}), to, _given(first), sends=True)
    arrays = filter(is_traced, jax.tree.leaves(given, is_leaf=is_on_disk))
    others = [x for k, x in enumerate(arrays) if k not in taken]
    elsewhere = any(is_on_disk(x) or getattr(sharding_of(x), "memory_kind", None) == HOST_KIND for x in others)
    return dataclasses.replace(found, program=BEFORE, host_elsewhere=elsewhere)
