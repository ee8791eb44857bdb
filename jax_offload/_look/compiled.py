"""A compiled step: the scheduled program, its memory, and the roles of its arguments.

A driven step, whose update runs on the host's cores or whose state is on disk, runs as several programs. The first one,
"before", usually has the step's peak: it is the forward and the backward pass, and sends the gradients down.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.experimental import topologies
from jax.tree_util import tree_flatten_with_path

from jax_offload._disk.leaves import TOKEN, OnDisk, Place, is_on_disk
from jax_offload._emit.region import holds_driven_update, kept_on_host
from jax_offload._emit.run import put_whole
from jax_offload._host.driver import Driven
from jax_offload._host.stages import BEFORE
from jax_offload._look.chips import Chip, chip, known_as
from jax_offload._look.hlo import EMPTY, Array, Module
from jax_offload._look.report import AHEAD, fix_of, jitted, may_be_step, of_states, opened, replaced
from jax_offload._program import private
from jax_offload._program.memory import HOST_KIND, in_its_memory, is_host_aval, sharding_of
from jax_offload._rewrite.rewritten import rewritten
from jax_offload._state.arguments import described
from jax_offload._step.jit import Jitted, Step, options_for_sending
from jax_offload._step.pipelined import Pipelined
from jax_offload._step.rotated import names_of

SAYS = (
    "jo.jit drives this step in several programs, as the host's cores update a part of the state, or it is on disk. "
    f"This is the first, {BEFORE!r}: the forward and the backward pass; then the update comes, group by group. "
    "It is looked at in one piece, whatever programs jo.jit cuts it into"
)
BY_LAYERS = "jax_offload.jit(step) loads it layer by layer"
_NOT_BY_ROWS = "no layer reads it by rows; params = jax_offload.to_host(params, loss, batch) keeps it on the device"
_ON_ABSTRACT = (
    "step: its arguments are on an AbstractMesh, and a step that is driven from Python (update_on=, disk=) is cut for "
    "devices. Give a Mesh of as many, which may be the CPU's: XLA_FLAGS=--xla_force_host_platform_device_count=8."
)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array among the arguments of a step.

    Attributes:
      name: its path; before compilation, perhaps without the name of the argument that contains it.
      host: whether it is in host memory when it is handed over.
      state: whether it belongs to the state of an optimizer.
      gradient: whether it waits for the update, between two calls of a pipelined step.
      kept_on_host: whether the update that owns it keeps it in host memory; ``None`` if no update of an ``offload`` is
        visible in the step.
      replaced_by: the number of the result that replaces it in the next step; ``None`` if no result has its type.
      whole: why the step itself loads it whole from host memory; empty if it does not.
      donated: whether the caller donates it.
      array: its type in the program.
    """

    name: str
    host: bool
    state: bool
    gradient: bool = False
    kept_on_host: bool | None = None
    replaced_by: int | None = None
    whole: str = ""
    donated: bool = False
    array: Array = EMPTY


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
      module: the scheduled program.
      memory: XLA's figures.
      given: the arguments that are known, by the number that they have in the program.
      target: the chip's or the platform's name.
      chip: its figures, where there are any.
      compiled_for: whether it was compiled for a chip that is not there.
      program: which of several programs of a step this is; empty where it is all of it.
      host_elsewhere: whether another program of the step takes an array in host memory.
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
    def parts(self) -> dict[str, int]:
        """The peak of device memory by kind, in bytes; XLA's analysis counts all memory of a CPU as device memory."""
        m = self.memory
        parts: dict[str, int] = {"parameters": 0, "state on the device": 0, "gradients": 0, "other arguments": 0}
        results = Counter(self.module.given_back.values())
        for number, array in self.module.taken.items():
            given, floating = self.given.get(number), re.match(r"bf|f\d", array.dtype)
            kind = "other arguments"
            if given is not None and given.state:
                kind = "state on the device"
            elif given is not None and given.gradient and floating:
                kind = "gradients"
            elif floating and array.shape and results[array] > 0:
                kind = "parameters"  # returned, and part of no state
            results[array] -= 1
            parts[kind] += 0 if array.host and self.target != "cpu" else array.nbytes
        parts["other arguments"] += m.argument_size_in_bytes - sum(parts.values())  # a TPU pads them
        parts["new results"] = m.output_size_in_bytes - m.alias_size_in_bytes
        return {kind: nbytes for kind, nbytes in (parts | {"temporaries": m.temp_size_in_bytes}).items() if nbytes}


def compiled(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: str | None) -> Compiled:
    """Compile a step, jitted or not, for its own devices or for ``target``."""
    to = None if target is None else target_of(target)  # before a trace starts jax: its plugins read the environment
    if len(args) == 1 and isinstance(args[0], optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(
            "step: expected a training step and its arguments; got a function and an optimizer, the (make, tx) of "
            "plan. Give what make(tx) returns: inspect(*make(tx))."
        )
    if not may_be_step(step):
        raise TypeError(
            f"step: expected a training step, jitted or not, and its arguments; got a {type(step).__name__}."
        )
    try:
        return _compiled(step, args, kwargs, to)
    except ValueError as error:
        if not (fix := fix_of(error, (args, kwargs))):
            raise
        raise ValueError(f"step: {error}{fix}.") from error


def _compiled(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], to: Target | None) -> Compiled:
    kept = carried = None
    if isinstance(step, Pipelined):
        step, args, carried = step.turned(*args, **kwargs)
        kwargs, whole = {}, step.trace(*args)
    else:
        step, args, kwargs = jitted(*opened(step, *jax.tree.map(in_its_memory, on_files((args, dict(kwargs))))))
        whole = as_written = step.trace(*args, **kwargs)
        if isinstance(step, Jitted):  # which takes updates apart
            if any(map(holds_driven_update, whole.jaxpr.jaxpr.eqns)):
                return _first_program(step.without_static(args, dict(kwargs)), whole, to)
            with described():
                as_written = jax.jit(Step(step._fun, as_written=True), **step._options).trace(*args, **kwargs)
        kept = kept_on_host(as_written.jaxpr)
    own = step.compiling(to.platform, args, kwargs) if to and isinstance(step, Jitted) else private.options_of(whole)
    given = _given(whole, kept, carried, as_jitted=not isinstance(step, Jitted) and carried is None)
    return _lowered(whole, (args, kwargs), to, given, own)


def _lowered(step: Any, given: Any, to: Target | None, arguments: Sequence[Argument], options: Any) -> Compiled:
    """Lower and compile a traced step with its (args, kwargs), for a target or for its own devices."""
    if to is None:
        executable: Any = step.lower().compile()
        shardings = jax.tree.leaves(executable.input_shardings)  # of those arguments that the program has kept
        device = next((device for s in shardings for device in s.device_set), jax.local_devices()[0])
        named = known_as(device.device_kind)
        name, its_chip = (device.device_kind, chip(named)) if named else (device.platform, None)
        text, memory = executable.as_text(), executable.memory_analysis()
    else:
        wheel = "jax-cuda13-plugin" if to.platform == "cuda" else "libtpu"
        if importlib.util.find_spec(wheel.replace("-", "_")) is None:
            raise ValueError(
                f"target: {wheel}, which compiles for {to.name}, is not installed: pip install 'jax_offload[aot]'."
            )
        places = [s for x in jax.tree.leaves(given) if (s := getattr(x, "sharding", None)) is not None]
        if elsewhere := [d.platform for s in places for d in s.device_set if d.platform != "cpu"]:
            raise ValueError(
                f"target: to compile for {to.name} the arguments must be abstract or on the CPU; some are on "
                f"{elsewhere[0]}. Start jax with JAX_PLATFORMS=cpu, or hand over jax.ShapeDtypeStructs on a mesh of "
                "jax.devices('cpu')."
            )
        lowered = step.lower(lowering_platforms=(to.platform,)).compiler_ir("stablehlo")
        executable = compile_for(to, lowered, max((len(s.device_set) for s in places), default=1), dict(options))
        name, its_chip = to.name, to.chip
        text, memory = executable.hlo_modules()[0].to_string(), executable.get_compiled_memory_stats()
    module = Module(text)
    return Compiled(module, memory, _numbered(module, arguments), name, its_chip, compiled_for=to is not None)


# -- what the arguments are


def _given(
    step: Any, kept: Sequence[bool] | None = None, carried: Mapping[str, Any] | None = None, *, as_jitted: bool = False
) -> list[Argument]:
    """Describe the arguments of a traced step in jax's order.

    ``kept``: for each, whether the update that owns it keeps it in host memory. ``carried``: the arguments that a
    pipelined step carries. ``as_jitted``: whether to compare the step with what ``jax_offload.jit`` would make of it.
    """
    given, names = step.args_info, step.jaxpr.jaxpr.debug_info.arg_names  # jax makes new objects at each access
    put, nexts = _put_whole(step.jaxpr), _replacing(given[0], step.out_info)
    left = _put_whole(rewritten(step.jaxpr)) if as_jitted and any(put) else put
    by_name: dict[Any, bool] = dict(zip(names_of(carried), of_states(carried), strict=True)) if carried else {}
    found = list[Argument]()
    for k, ((path, info), aval, own) in enumerate(
        zip(tree_flatten_with_path(given)[0], step.jaxpr.in_avals, of_states(given), strict=True)
    ):
        host, own = is_host_aval(aval), own or by_name.get(getattr(path[-1], "key", None), False)
        waits = bool(carried) and getattr(path[1], "idx", None) == 1
        rest = AHEAD if own and (carried or kept is not None) else _NOT_BY_ROWS
        whole = (rest if left[k] else BY_LAYERS) if put[k] else ""
        own_kept = None if kept is None else kept[k]
        name = (names[k] if names else "") or ""
        found.append(Argument(name, host, host or own, waits, own_kept, nexts.get(id(info)), whole, info.donated))
    return found


def _put_whole(step: Any) -> list[bool]:
    found = put_whole(step.jaxpr.eqns)
    return [v in found for v in step.jaxpr.invars]


def _replacing(given: Sequence[Any], results: Any) -> dict[int, int]:
    """Map the ``id`` of each leaf of a step's arguments to the number of the result that replaces it."""
    leaves, numbers = jax.tree.leaves, {id(x): k for k, x in enumerate(jax.tree.leaves(results))}
    pairs = [
        pair for k, x in replaced(given, results).items() for pair in zip(leaves(given[k]), leaves(x), strict=True)
    ]
    return {id(old): numbers[id(new)] for old, new in pairs}


def _numbered(module: Module, given: Sequence[Argument]) -> dict[int, Argument]:
    """Return the arguments by number in the program, which leaves out unused ones and has jax's names for them."""
    found, left = dict[int, Argument](), list(given)
    for number, op in module.arguments.items():
        if (k := next((k for k, x in enumerate(left) if op.scope.endswith(x.name)), None)) is not None:
            found[number] = dataclasses.replace(left[k], name=op.scope, array=module.taken[number])
            left = left[k + 1 :]
    return found


# -- the first program of a step that is driven


def on_files(args: Any) -> Any:
    """Return a step's arguments with placeholders for those that an abstract state says are on disk."""
    token = jax.ShapeDtypeStruct((), TOKEN)
    return jax.tree.map(lambda x: OnDisk(token, x) if isinstance(x, Place) else x, args, is_leaf=is_on_disk)


def _first_program(given: tuple[Any, Any], whole: Any, to: Target | None) -> Compiled:
    """Compile the program before the update.

    Raises:
      ValueError: Python cannot drive the step.
    """
    leaves = jax.tree.leaves(given)
    if any(isinstance(getattr(sharding_of(x), "mesh", None), jax.sharding.AbstractMesh) for x in leaves):
        raise ValueError(_ON_ABSTRACT)
    donated = [info.donated for info in jax.tree.leaves(whole.args_info)]
    driven = Driven(whole.jaxpr, leaves, donated, ({}, {}), segments=False)
    task, program, of_step = driven.first
    at = {v: k for k, v in enumerate(of_step.arguments)}
    reused = {task.inputs[k] for k in task.reused}
    taken = {at[v]: v in reused for v in task.inputs if v in at}
    names = [name or "argument" for name in whole.jaxpr.jaxpr.debug_info.arg_names or [""] * len(leaves)]
    names = [name if names.index(name) == k else f"{name} {k}" for k, name in enumerate(names)]
    handed = [{names[k]: in_its_memory(leaves[k]) for k, own in taken.items() if own is is_donated}
              for is_donated in (True, False)]  # fmt: skip

    def before(donated: dict[str, Any], rest: dict[str, Any]) -> list[Any]:
        values = donated | rest
        return list(program(*(values[names[at[v]]] if v in at else of_step.consts[v] for v in task.inputs)))

    options = options_for_sending(jax.default_backend() if to is None else to.platform)
    jitted = jax.jit(before, donate_argnums=0, out_shardings=driven.result_places(task), compiler_options=options)
    first = jitted.trace(*handed)
    found = _lowered(first, (handed, {}), to, _given(first), options)
    others = [x for k, x in enumerate(jax.tree.leaves(given, is_leaf=is_on_disk)) if k not in taken]
    elsewhere = any(is_on_disk(x) or getattr(sharding_of(x), "memory_kind", None) == HOST_KIND for x in others)
    return dataclasses.replace(found, program=BEFORE, host_elsewhere=elsewhere)


# -- compiling for a chip that is not there
#
# The step is traced for the CPU's devices and lowered for the target's platform, and the module goes to a compile-only
# client of that platform's plugin: compile-only GPU devices report no memory spaces, and drop ``pinned_host``.

_GPUS = ("a100", "h100", "h200")
# Some topologies of each; there are more.
_TPUS = {"v5e": "1x1, 2x2, 2x4, 4x4, 8x8", "v5p": "1x1x1, 2x2x1, 2x2x2, 2x2x4", "v6e": "1x1, 2x2, 2x4, 4x4, 8x8"}
_CUDA_PLUGIN = "jax_plugins.xla_cuda13"
# Without these, libtpu queries the machine of a TPU.
_ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def prepare() -> None:
    """Set the environment variables that the plugins read, if nobody has; call it before jax asks for a platform."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for: its name as it was given, ``h200`` or ``v5e:2x2``, and its figures."""

    name: str
    chip: Chip

    @property
    def platform(self) -> str:
        """The platform for jax's lowering: ``cuda`` or ``tpu``."""
        return self.chip.platform


def target_of(name: str) -> Target:
    """Return the target of that name, and set the environment variables that its plugin reads.

    Raises:
      TypeError: ``name`` is not a string.
      ValueError: the target is not known, or a TPU's name has no topology.
    """
    if not isinstance(name, str):
        raise TypeError(f'target: expected the name of a chip, "h200" or "v5e:2x2"; got {name!r}.')
    prepare()
    kind, _, topology = name.lower().partition(":")
    if kind in _GPUS and not topology:
        return Target(kind, chip(kind))
    if kind in _TPUS:
        return Target(f"{kind}:{topology or '1x1'}", chip(kind))
    known = ", ".join((*_GPUS, *(f"{tpu}:2x2" for tpu in _TPUS)))
    raise ValueError(f"target: cannot compile for {name!r}. Known: {known} (of a TPU any topology).")


@functools.cache
def _devices(target: Target, n: int) -> list[Any]:
    """Return ``n`` devices of a target.

    If jax started before the environment was set, it has given up the plugin for GPUs and knows no topologies of cuda.
    The plugin is then initialized once more. A plugin that cannot describe a chip at all fails in the same way.
    """
    prepare()
    given: dict[str, Any] = {"platform": target.platform, "topology_name": target.name}
    if target.platform == "cuda":
        spec = Path(__file__).with_name(f"{target.name}.txtpb").read_text()
        given |= {"target_config": spec, "topology": f"1x1x{n}"}

    def described() -> list[Any]:
        return list(topologies.get_topology_desc(**given).devices)

    try:
        try:
            devices = described()
        except (NotImplementedError, ImportError):
            if target.platform != "cuda":
                raise
            importlib.import_module(_CUDA_PLUGIN).initialize()
            devices = described()
    except (NotImplementedError, ImportError) as error:
        raise ValueError(
            f"target: jax's plugin that compiles for {target.name} cannot describe a chip that is not there ({error}). "
            f"Its version has to be jax's own: pip install --upgrade 'jax_offload[aot]' 'jax=={jax.__version__}'."
        ) from error
    except jax.errors.JaxRuntimeError as error:
        kind, _, topology = target.name.partition(":")
        raise ValueError(
            f"target: {kind} has no topology {topology!r}: {str(error).splitlines()[0]}. Known: "
            f"{_TPUS.get(kind, 'none')} and larger ones."
        ) from error
    if len(devices) < n:
        raise ValueError(f"target: the step is for {n} devices, and {target.name} has {len(devices)}.")
    return devices[:n]


def compile_for(target: Target, module: Any, n: int, options: dict[str, Any]) -> Any:
    """Compile a StableHLO module, lowered for ``target.platform``, for ``n`` devices."""
    devices = _devices(target, n)
    ids = [device.id for device in devices] if target.platform == "tpu" else list(range(n))
    # Autotuning needs the device.
    tuned = {"xla_gpu_autotune_level": 0} if target.platform == "cuda" else {}
    return private.compiled(module, devices, ids, {**tuned, **options})
