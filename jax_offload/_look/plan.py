"""``plan``: whether a training step fits, what to write, and what it costs, before anything runs."""

from __future__ import annotations

import bisect
import dataclasses
import inspect as signatures
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_map_with_path

from jax_offload._disk.disk import Disk
from jax_offload._emit.region import Moved, Update
from jax_offload._look.answer import ON_A_HOST, OPERATIONS, RECOMPUTING, Plan, Row
from jax_offload._look.chips import Chip
from jax_offload._look.chips import chip as chip_of
from jax_offload._look.compiled import target_of
from jax_offload._look.inspection import inspect
from jax_offload._look.report import of_transformation, replaced
from jax_offload._look.text import bytes_of, count_of, in_bytes, in_seconds
from jax_offload._look.timeline import compute_time
from jax_offload._offload import offload
from jax_offload._program import memory
from jax_offload._program.arrays import Offloaded, key_of, nbytes
from jax_offload._program.jaxprs import Var
from jax_offload._program.memory import in_host_memory, names_in, sharding_of, shards_of
from jax_offload._program.propagate import NEEDS
from jax_offload._state.arguments import check_inner, check_params, shardings_of
from jax_offload._state.state import described_state
from jax_offload._step.jit import jit
from jax_offload._step.pipelined import Pipelined, pipelined

RECOMPUTED = 17  # elements that the one layer under recomputation holds, for each token and column of its width
GATHERED = 3  # layers that are whole on a device where parameters are divided: in use, prefetched, and a gradient
TRIES = 3  # how many fractions are tried
FLOATING = ("bfloat16", "float16", "float32", "float64")
AXIS = "data"  # the mesh axis of a model that is only known by its number of parameters
PER_WIDTH = 128  # such a model has this many columns of width per layer, and its width is a multiple of this

_RUN: dict[str, Callable[..., Any]] = {"jax.jit": jax.jit, "jo.jit": jit, "jo.pipelined": pipelined}


def plan(
    tx: Any,
    params: Any,
    *args: Any,
    chip: str | Chip | None = None,
    tokens_per_step: float | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    activations: int | str | None = None,
    layers: int | None = None,
    width: int | None = None,
    devices: int = 1,
    replicated: bool = False,
    param_dtype: str = "bfloat16",
    compute_dtype: str | None = None,
    disk: bool = False,
    target: str | None = None,
) -> Plan:
    """Say whether a model fits, what to write, and what offloading adds to a step. ``print`` the answer.

    ``plan(tx, params)`` answers from sizes. Bytes of parameters, gradients, state, window and host memory are exact:
    the code that places and schedules the state counts them. With ``layers``, ``width`` and ``tokens_per_step`` a
    stated formula for transformers gives the activations; otherwise they are absent, and a row says how small they must
    be. Times come from one model, which is printed with its inputs.

    ``plan(make, tx, *args)`` answers for your own step. ``make(tx, *args)`` returns ``(step, *arguments)`` with a
    state from ``jax_offload.abstract_state(tx, params)``, and is called once for each row. With ``target`` XLA's
    compiler for that chip gives each row's peak and schedule, in seconds per row; without it only the exact parts are
    known.

    Parameters in host memory (``jax_offload.to_host(params)``) count as host memory, and each pass and the update
    load them; the resident rows have them on the device.

    A row fits if no part is missing and its sum is at most the memory that jax takes of the device, less a headroom of
    5%. On a GPU jax takes 75%, or the share in ``XLA_PYTHON_CLIENT_MEM_FRACTION``.

    Args:
      tx: the optimizer, offloaded already or not; or ``make``, the function that makes a step.
      params: the parameters, concrete or abstract, with their shardings; or their count, ``13e9`` or ``"13B"``, for a
        transformer of equal layers. With ``make``, the optimizer.
      *args: further arguments of ``make``.
      chip: the accelerator, a ``Chip`` or a name that ``jax_offload.chip`` takes; the target's if left out.
      tokens_per_step: the tokens in a step, over all devices. Times need them.
      device_memory: the memory of one device, in bytes or as text such as ``"80GiB"``; the chip's if left out. If the
        whole state does not fit, ``plan`` finds the smallest share that has to move.
      host_memory: the memory of each host, in bytes or as text; the chip's figure if left out.
      activations: the activations on one device, in bytes or as text, if you know them.
      layers: the number of layers of the transformer.
      width: the width of a layer.
      devices: the number of devices over which the parameters are divided (FSDP), if ``params`` is a number.
      replicated: whether every device holds all parameters instead, if ``params`` is a number.
      param_dtype: the dtype of the parameters, if ``params`` is a number.
      compute_dtype: the dtype of activations and matmuls, such as ``"bfloat16"``; the parameters' if left out.
      disk: whether to add a row with the state on disk.
      target: a chip to compile a step for, as ``jax_offload.inspect`` takes it (extra ``aot``).

    Returns:
      A ``Plan``. Its ``recommended`` row is ``None`` if nothing fits.

    Raises:
      TypeError: ``tx`` is neither an optimizer nor a function.
      ValueError: the chip or the target is not known, a number is out of range, the step cannot be made, or an option
        for a count is given together with parameters.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((64, 4096, 4096), "bfloat16")}
      >>> found = jo.plan(optax.adamw(1e-3), params, device_memory="12GiB", activations="1GiB")
      >>> found["resident"].fits, round(found["resident"].peak / 2**30, 1)
      (False, 9.0)
      >>> found.recommended.code
      'tx = jo.offload(inner, fraction=0.5); step = jo.jit(step, donate_argnums=(0, 1))'
    """
    if target is not None and chip is None:
        chip = target_of(target).chip
    known, said, make = None if chip is None else chip_of(chip), list[str](), None
    if callable(tx) and isinstance(params, optax.GradientTransformation | optax.MultiSteps):
        make, tx = Maker(tx, args, target), params
        params = make.parameters(_inner_of(tx)[0])
        if target is None:
            extra = "pip install 'jax_offload[aot]' and target=\"h100\""
            said.append(f"nothing is compiled: {extra} give each row's peak and time")
    elif args:
        raise TypeError(
            f"plan(tx, params) takes the parameters alone, and plan(make, tx) a function that makes a step; got "
            f"{2 + len(args)} arguments. To look at one step: jo.inspect(step, *args, target=...)."
        )
    elif target is not None:
        raise ValueError(
            f"target: compiles a step, plan(make, tx, target={target!r}), and an optimizer alone is no step. Give "
            f"chip={target!r} instead."
        )
    inner, given = _inner_of(tx)
    check_inner(inner, "tx")
    dtypes = {"param_dtype": param_dtype} | ({} if compute_dtype is None else {"compute_dtype": compute_dtype})
    for name, of in dtypes.items():
        if str(of) not in FLOATING:
            raise ValueError(f"{name}: expected one of {', '.join(FLOATING)}; got {of!r}.")
    counts = {"tokens_per_step": tokens_per_step, "layers": layers, "width": width}
    tokens, layers, width = (None if n is None else count_of(name, n) for name, n in counts.items())
    if isinstance(params, int | float | str | np.number) and not isinstance(params, bool):
        n, count = count_of("params", params), count_of("devices", devices)
        params, of, wide = _model_of(n, param_dtype, count, replicated, layers, width)
        how = "" if count == 1 else ", whole on each device" if replicated else ", divided over the devices (FSDP)"
        said.append(f"model: {of} equal layers of width {wide}{how}")
        layers, width = (None, None) if layers is None and width is None else (of, wide)
    else:
        of_a_count = {"devices": devices, "replicated": replicated, "param_dtype": param_dtype}
        defaults = plan.__kwdefaults__ or {}
        if ignored := [f"{name}={x!r}" for name, x in of_a_count.items() if x != defaults[name]]:
            raise ValueError(
                f"{', '.join(ignored)}: for a model that a number describes; these parameters have their own dtype and "
                "shardings. Fix: give abstract parameters with the shardings of the run (jax.sharding.AbstractMesh "
                'needs no devices), or their number, jo.plan(tx, "13B", devices=8).'
            )
    check_params(params)
    params = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jax.ShapeDtypeStruct((), jnp.result_type(x)), params)
    leaves = jax.tree.leaves(params)
    dtype = str(max(leaves, key=nbytes).dtype) if leaves else "float32"
    dtype = dtype if compute_dtype is None else str(compute_dtype)
    count = max((s.num_devices for x in leaves if (s := sharding_of(x)) is not None), default=1)
    known = known.beside_others if known is not None and count > 1 else known
    of_layers = layers is not None and width is not None
    operations = RECOMPUTING if of_layers and (activations is not None or tokens) else OPERATIONS
    if activations is not None:
        activations = bytes_of("activations", activations)
        said.append(f"activations: {in_bytes(activations)} on each device, as given")
    elif layers is not None and width is not None and tokens is not None:
        size, whole = jnp.dtype(dtype).itemsize, sum(map(nbytes, leaves))
        activations = -(-tokens // count) * width * size * (layers + RECOMPUTED)
        formula = f"tokens on a device × width × {size} bytes × (layers + {RECOMPUTED})"
        if sum(map(own_bytes, leaves)) < whole:
            activations, formula = activations + GATHERED * whole // layers, f"{formula} + {GATHERED} gathered layers"
        said.append(
            f"activations: {formula} = {in_bytes(activations)}, a checkpoint around each of {layers} layers of width "
            f"{width}, flash attention, and a loss in chunks (Korthikanti et al. 2022)"
        )
    if away := sum(own_bytes(x) for x in leaves if in_host_memory(x)):
        said.append(
            f"parameters: {in_bytes(away)} in host memory, loaded for the forward and for the backward pass and stored "
            "once; only a target gives the rows of layers that are on the device at a time"
        )
    multiplied = sum(math.prod(np.shape(x)) for x in leaves if np.ndim(x) >= 2)
    compute = known and tokens and compute_time(known, operations * multiplied * tokens / count, dtype)
    if known and compute and (make is None or target is None):
        speed = f"{1e-12 / compute_time(known, 1.0, dtype):.4g} TFLOP/s"
        speed += f" on each of {count} devices" if count > 1 else ""
        repeated = "the checkpoint repeats 2" if operations == RECOMPUTING else "none repeated"
        said.append(
            f"{dtype} arithmetic: {tokens:,} tokens × {operations} operations per matrix parameter ({repeated}), at "
            f"{speed}: {in_seconds(compute)}"
        )
    limit, host = (known.hbm_bytes, known.dram_bytes) if known else (None, None)
    setting = Plan(
        chip=known,
        devices=count,
        compute=compute,
        operations=operations,
        device_memory=limit if device_memory is None else bytes_of("device_memory", device_memory),
        host_memory=host if host_memory is None else bytes_of("host_memory", host_memory) // min(count, ON_A_HOST),
    )
    rows = Rows(inner, params, activations, setting, make, said)
    if not isinstance(tx, Offloaded) and any(leaf.host or leaf.disk for leaf in described_state(inner, params)[0]):
        options = [rows.judged("as given", inner, "tx unchanged", "jo.jit")]
        said.append("an offload inside of a chain: for other rows give jo.offload(the whole chain)")
    else:
        options = rows.table(given, disk)
    n = sum(math.prod(np.shape(x)) for x in leaves)
    state = [x for x in jax.tree.leaves(jax.eval_shape(inner.init, params)) if getattr(x, "ndim", 0)]
    kinds = [" and ".join(sorted({str(x.dtype) for x in xs})) or "none" for xs in (leaves, state)]
    per = f"{sum(map(nbytes, state)) / max(1, n):.3g} bytes a parameter"
    first = f"{n:,} parameters in {kinds[0]}; state in {kinds[1]}, {per}; {count} device{'s' * (count > 1)}"
    return dataclasses.replace(setting, options=tuple(options), said=(first, *said))


class Rows:
    """The rows for one optimizer and its parameters; ``said`` takes remarks, such as a row that cannot be compiled."""

    def __init__(
        self, inner: Any, params: Any, activations: int | None, setting: Plan, make: Maker | None, said: list[str]
    ) -> None:
        self.inner, self.params, self.activations, self.setting = inner, params, activations, setting
        self.make, self.said = make, said

    def judged(self, name: str, tx: Any, code: str, run: str, same: bool = True) -> Row:
        """Return the row of an optimizer in a step of ``run``, compiled if there is a target."""
        code = f"{code}; step = {run}(step, donate_argnums=(0, 1))"
        row = exact(tx, self.params, run, name=name, code=code, activations=self.activations, same_numbers=same)
        if row.disk:
            self.said.append(
                f"{name}: only the compiler knows the window, the memory of one group's program, and the chip's "
                f"figures do not include the disk's speed; each step reads {in_bytes(row.disk)} and writes as many"
            )
        compute = None
        if self.make is not None and self.make.target is not None:
            row, compute = self.make.compiled(row, tx, run, self.setting.chip)
        return self.setting.judged(row, compute)

    def row(self, name: str, options: Mapping[str, Any], run: str = "jo.jit") -> list[Row]:
        """Return the row of an ``offload`` with these options; or none, with a note, if your step cannot run so."""
        text = "".join(f", {key}={'jo.' if key == 'disk' else ''}{value!r}" for key, value in options.items())
        code, same = f"tx = jo.offload(inner{text})", "storage" not in options
        try:
            return [self.judged(name, offload(self.inner, **options), code, run, same)]
        except (TypeError, ValueError) as error:
            if self.make is None:
                raise
            self.said.append(f"no row {name!r}: {str(error).splitlines()[0]}")
            return []

    def table(self, given: Mapping[str, Any], disk: bool) -> list[Row]:
        """Return all rows, eight at most. ``given``: the options of the offload that was given."""
        axes = () if {"shard_over", "disk"} & given.keys() else _replicated_axes(self.params)
        over = given.get("shard_over") or (axes[0] if len(axes) == 1 else axes)
        base, zero = ({**given, "shard_over": over}, " ZeRO-1") if over else (given, "")
        rows = [self.judged("resident", self.inner, "tx = inner", "jax.jit")]
        if over and not given.keys() & {"disk", "storage"}:
            rows += self.row("resident ZeRO-1", {"shard_over": over, "fraction": 0.0}, "jax.jit")
        rows += self.row("as given" if given else "offload", given)
        if over:
            rows += self.row("offload ZeRO-1", base)
        on_device = {key: value for key, value in base.items() if key not in ("disk", "update_on")}
        run = "jo.pipelined" if any(row.waits for row in rows) and "disk" not in given else "jo.jit"
        if run == "jo.pipelined":
            rows += self.row(f"pipelined{zero}", on_device, run)
        if any(map(in_host_memory, jax.tree.leaves(self.params))):
            return rows  # the cores and files update parameters on the device
        if not any(row.fits for row in rows if row.name.startswith("resident")) and "fraction" not in given:
            rows += self._smallest_fraction(rows[-1], on_device, run)
        # neither update_on nor disk accepts fraction=0
        moving, on_device = ({k: x for k, x in of.items() if (k, x) != ("fraction", 0)} for of in (given, on_device))
        if self.setting.devices <= ON_A_HOST and not given.keys() & {"update_on", "disk", "shard_over"}:
            rows += self.row("cores", {**moving, "update_on": "host"})
        if disk and "disk" not in given:
            rows += self.row("disk", {**on_device, "disk": Disk("/nvme/run")})
        return rows

    def _smallest_fraction(self, whole: Row, options: Mapping[str, Any], run: str) -> list[Row]:
        """Return the row of the smallest fraction that fits, to 0.01; none if a part of the sum is not known."""
        usable = self.setting.usable
        if usable is None or whole.missing or whole.peak > usable or not whole.host:
            return []

        def moved(hundredths: int) -> int:
            leaves = described_state(offload(self.inner, **{**options, "fraction": hundredths / 100}), self.params)[0]
            return sum(leaf.shard_bytes for leaf in leaves if leaf.host)

        least = whole.host - (usable - whole.peak + (whole.window or 0))  # without a window, which takes room too
        for _ in range(TRIES):
            hundredths = 1 + bisect.bisect_left(range(1, 100), least, key=moved)  # whole leaves move
            hundredths = max(hundredths, math.ceil(100 * moved(min(hundredths, 99)) / whole.host))
            if hundredths > 99:
                return []
            row = self.row("fraction", {**options, "fraction": hundredths / 100}, run)
            if not row or (over := row[0].peak - usable) <= 0:
                return row
            least = moved(hundredths) + over
        self.said.append(f"no row 'fraction': none of {TRIES} shares tried fits")
        return []


class Maker:
    """Makes the step for each row, and compiles it for the target."""

    def __init__(self, make: Callable[..., Any], args: Sequence[Any], target: str | None) -> None:
        self.make, self.args, self.target = make, args, target
        self._donated: tuple[int, ...] = ()
        self._resident: float | None = None  # the seconds of arithmetic in the first row, for steps of several programs

    def parameters(self, inner: optax.GradientTransformation) -> Any:
        """Return the parameters, abstract, that ``make`` hands to the optimizer's ``init``."""
        seen: list[Any] = []

        def init(params: Any) -> Any:
            places = shardings_of(params)

            def abstract(path: Any, x: Any) -> Any:
                place = places.get(key_of(path))
                if in_host_memory(x):
                    place = (place or memory.ambient_sharding()).with_memory_kind(memory.HOST_KIND)
                return memory.abstract(np.shape(x), x.dtype, place)

            seen.append(tree_map_with_path(abstract, params))
            return inner.init(params)

        update = optax.with_extra_args_support(inner).update
        step, args = self._made(optax.GradientTransformationExtraArgs(init, update), "resident")
        if not seen:
            raise ValueError(
                "make: it has made no state of the optimizer that it is given. Return (step, params, state, ...) with "
                "state = jo.abstract_state(tx, params)."
            )
        self._donated = tuple(replaced(args, jax.eval_shape(step, *args)))
        return seen[0]

    def compiled(self, row: Row, tx: Any, run: str, chip: Chip | None) -> tuple[Row, float | None]:
        """Return a row with the compiler's figures, and the seconds of the step's arithmetic."""
        step, args = self._made(tx, row.name)
        row = dataclasses.replace(row, compiled=self.target)
        try:
            found = inspect(_RUN[run](step, donate_argnums=self._donated), *args, target=self.target, chip=chip)
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler gives up if memory does not suffice
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return dataclasses.replace(row, fits=False, why="more than the compiler can place"), None
        # A program leaves out the arguments that it does not read, which stay on the device all the same.
        arguments = sum(n for kind, n in found.parts.items() if kind not in ("new results", "temporaries"))
        left = found.peak - min(row.parameters + row.state, arguments)
        window, host = min(row.window or 0, left), max(row.host, found.host)
        row = dataclasses.replace(row, window=window, gradients=0, activations=left - window, host=host)
        if (time := found.timeline) is None or found.program:  # of several programs this is only the first
            return row, self._resident
        self._resident = self._resident or time.compute
        moved = {"loaded": found.loaded, "stored": found.stored, "link": time.link, "added": time.exposed}
        return dataclasses.replace(row, **moved), time.compute

    def _made(self, tx: Any, name: str) -> tuple[Any, tuple[Any, ...]]:
        """Return a step for one row, and its arguments."""
        try:
            step, *args = self.make(tx, *self.args)
            step = step.step if isinstance(step, Pipelined) else step
            step = getattr(step, "__wrapped__", step) if hasattr(step, "lower") else step  # each row jits it again
            signatures.signature(step).bind(*args)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"plan(make, tx): make(tx) is called once for each row, here for {name!r}, and is to return (step, "
                "*arguments): a step that can be called with these arguments, the state among them from "
                f"jo.abstract_state(tx, params) of the tx that it is given. {error}"
            ) from error
        return step, _on_device(tuple(args)) if name.startswith("resident") else tuple(args)


def _on_device(tree: Any) -> Any:
    """Return a tree of arrays with those in host memory as abstract arrays on the device."""
    kind = memory.DEVICE_KIND
    return jax.tree.map(
        lambda x: memory.abstract(x.shape, x.dtype, x.sharding.with_memory_kind(kind)) if in_host_memory(x) else x,
        tree,
    )


def _inner_of(tx: Any) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer inside an ``offload``, with the options that are not the defaults; else ``tx`` itself."""
    if isinstance(tx, Offloaded) and tx.inner is not None:
        defaults = offload.__kwdefaults__ or {}
        return tx.inner, {k: v for k, v in tx.options.items() if v is not defaults[k] and v != defaults[k]}
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx, {}


# -- exact bytes, by the code that places the state and schedules the update


def exact(tx: Any, params: Any, run: str, **fields: Any) -> Row:
    """Return the row of an optimizer in a step of ``run``; under ``jax.jit``, all stays on the device."""
    flat = jax.tree.leaves(params)
    whole = sum(map(own_bytes, flat))
    away = 0 if run == "jax.jit" else sum(own_bytes(x) for x in flat if in_host_memory(x))
    params = _on_device(params)
    leaves, _ = described_state(tx, params)
    hosted, disk = (sum(leaf.shard_bytes for leaf in leaves if getattr(leaf, where)) for where in ("host", "disk"))
    # The cores read gradients and parameters, and send new parameters up, as ``jax_offload.update_params`` has it.
    owners = {leaf.owner for leaf in leaves if leaf.on_cores}
    up = sum(own_bytes(x) for k, x in enumerate(flat) if k in owners)
    row = Row(
        **fields,
        parameters=whole - away,
        gradients=whole,
        state=sum(leaf.shard_bytes for leaf in leaves) - hosted - disk,
        window=0,
        host=hosted + 2 * up + away,
        disk=disk,
        loaded=0,
        stored=0,
        on_cores=sum(leaf.shard_bytes for leaf in leaves if leaf.on_cores),
        waits=False,
    )
    if run == "jax.jit":
        return row
    table, found = of_transformation(tx, params)
    if table.unknown:  # only a step has the arguments of its update
        return dataclasses.replace(row, window=None, loaded=None, stored=row.host + disk)
    updates = [each.update for each in found]
    slices = [p.slice for update in updates for p in update.planned if not p.on_cores]
    loaded, loads = sum(s.loaded_bytes for s in slices), Counter(v for s in slices for v in s.loads)
    # A leaf that a norm of the state reads first is loaded twice, unless a scan of the step holds both updates.
    doubtful = run == "jo.jit" and max(loads.values(), default=1) > 1
    return dataclasses.replace(
        row,
        window=None if disk else min(sum(window.nbytes for window in table.windows), loaded),
        loaded=None if doubtful else loaded + up + 2 * away,  # both passes load parameters from the host
        stored=sum(map(_stored, updates)) + 2 * up + away,
        waits=any(isinstance(update, Update) and _waits_for_all(update) for update in updates),
    )


def own_bytes(x: Any) -> int:
    """Return the bytes of an array on one device."""
    return nbytes(x) // math.prod(shards_of(sharding_of(x), np.shape(x)))


def _stored(update: Update | Moved) -> int:
    """Return the bytes that an update stores on one device: each leaf is divided like the leaf it replaces."""
    old: Mapping[Var, Var] = update.next_values if isinstance(update, Update) else {}
    slices = [p.slice for p in update.planned if not p.on_cores]
    slices += [each.prelude for each in update.passes] if isinstance(update, Update) else []
    return sum(nbytes(v.aval) // math.prod(s.shards.get(old.get(v, v), ())) for s in slices for v in s.stores)


def _waits_for_all(update: Update) -> bool:
    """Return whether gradients make a number that a slice needs: their norm, or whether all of them are finite."""
    if len(update.passes) != 1:
        return len(update.passes) > 1
    (only,) = update.passes
    gradients = {*update.gradients}
    made = NEEDS.spread(only.prelude.jaxpr.eqns, {v: int(v in gradients) for v in only.prelude.inputs})
    read = {v for p in only.slices for v in p.slice.inputs}
    return any(made.get(v) and not v.aval.shape for v in only.prelude.outputs if v in read)


# -- the parameters


def _replicated_axes(params: Any) -> tuple[str, ...]:
    """Return the axes of the parameters' mesh along which none of them is divided."""
    shardings = [s for x in jax.tree.leaves(params) if isinstance(s := sharding_of(x), NamedSharding)]
    used = {name for s in shardings for entry in s.spec for name in names_in(entry)}
    sizes = shardings[0].mesh.shape.items() if shardings else ()
    return tuple(name for name, size in sizes if size > 1 and name not in used)


def _model_of(
    n: int, dtype: str, devices: int, replicated: bool, layers: int | None, width: int | None
) -> tuple[dict[str, Any], int, int]:
    """Return ``n`` abstract parameters, to one row, with their layers and width: 12 width² in a layer, and the rest."""
    step = math.lcm(PER_WIDTH, 1 if replicated else devices)
    if width is None:
        ideal = (n / 12 / layers) ** 0.5 if layers else (PER_WIDTH * n / 12) ** (1 / 3)
        width = max(step, round(ideal / step) * step)
    if not replicated and width % devices:
        raise ValueError(f"width: {devices} devices do not divide {width} columns; give a multiple of {devices}.")
    layers = layers or max(1, round(n / (12 * width**2)))
    columns = min(12 * width, n // (layers * width))
    if columns < 3:
        raise ValueError(
            f"params: {n:g} are too few for {layers} layers of width {width}, {3 * layers * width:,} at least. Give "
            "fewer layers or a smaller width."
        )
    third, rest = columns // 3, (n - layers * width * columns) // width
    shapes: dict[str, Any] = {"attention": (layers, width, third), "mlp": (layers, width, columns - third)}
    shapes |= {"embed": (rest, width)} if rest else {}
    place = None
    if devices > 1:
        spec = PartitionSpec() if replicated else PartitionSpec(None, AXIS)
        place = NamedSharding(AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,)), spec)
    return {k: jax.ShapeDtypeStruct(s, jnp.dtype(dtype), sharding=place) for k, s in shapes.items()}, layers, width
