"""``plan``: whether a training step fits, what to write, and what it costs, before anything runs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_offload._analysis import roofline
from jax_offload._analysis.answer import ON_A_HOST, Plan, Row, Setting
from jax_offload._analysis.chips import Chip
from jax_offload._analysis.chips import chip as chip_of
from jax_offload._analysis.compile_rows import Steps
from jax_offload._analysis.sizes import (
    Sizes,
    devices_of,
    model_of,
    own_bytes,
    replicated_axes,
    sizes_of,
    smallest_share,
)
from jax_offload._analysis.targets import target_of
from jax_offload._analysis.units import bytes_of, count_of, in_bytes
from jax_offload._base.arrays import Offloaded, nbytes
from jax_offload._disk.option import disk as disk_option
from jax_offload._offload import DEFAULT_MIN_BYTES, offload
from jax_offload._placement.placement import unmanaged
from jax_offload._plan.decide import LEAST_WINDOW
from jax_offload._state.traced_init import placed_leaves
from jax_offload._update.arguments import check_inner, check_params

RECOMPUTED = 17  # elements that the one layer under recomputation holds, for each token and column of its width
GATHERED = 3  # layers that are whole on a device where parameters are divided: in use, prefetched, and a gradient
TRIES = 3  # of a fraction

_DEFAULTS: Mapping[str, Any] = {
    "fraction": 1.0, "select": None, "min_bytes": DEFAULT_MIN_BYTES, "window": None, "order": None,
    "shard_over": None, "storage": None, "update_on": "device", "disk": None,
}  # fmt: skip
_CODE = {
    "jax.jit": "step = jax.jit(step, donate_argnums=(0, 1))",
    "jo.jit": "step = jo.jit(step, donate_argnums=(0, 1))",
    "jo.pipelined": "step = jo.pipelined(step, donate_argnums=(0, 1))",
}


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
    flops_per_token: float | None = None,
    devices: int = 1,
    replicated: bool = False,
    param_dtype: str = "bfloat16",
    disk: bool = False,
    target: str | None = None,
) -> Plan:
    """Whether a model fits, what to write, and what offloading adds to a step. ``print`` the answer.

    ``plan(tx, params)`` answers from sizes. Bytes of parameters, gradients, state, window and host memory are exact:
    the code that places and schedules the state counts them. Activations follow from a stated formula of a transformer
    where ``layers``, ``width`` and ``tokens_per_step`` are given; otherwise they are absent, and a row says below what
    they have to stay. Time comes from one model, which is printed with its inputs.

    ``plan(make, tx, *args)`` answers for a step of yours. ``make(tx, *args)`` returns ``(step, *arguments)`` with a
    state from ``jax_offload.abstract_state(tx, params)``, and is called once for each row. With ``target`` XLA's
    compiler for that chip gives each row's peak and schedule, which takes seconds a row; without it only the exact
    parts are known.

    A row fits if its sum is not above what jax takes of the device's memory, less a headroom of 5 %, with no part
    missing. On a GPU jax takes 75 %, or ``XLA_PYTHON_CLIENT_MEM_FRACTION``.

    Args:
      tx: the optimizer, offloaded already or not; or ``make``, the function that makes a step.
      params: the parameters, concrete or abstract, with their shardings; or how many there are, ``13e9`` or ``"13B"``,
        for a transformer of equal layers. For ``make``: the optimizer.
      *args: further arguments of ``make``.
      chip: the accelerator, by a name that ``jax_offload.chip`` takes or a ``Chip``; the target's where it is left out.
      tokens_per_step: over all devices.
      device_memory: bytes of one device, or text such as ``"80GiB"``; the chip's where it is left out. Where the whole
        state does not fit, ``plan`` finds the smallest share that has to move.
      host_memory: bytes of each host, or text; the chip's figure where it is left out.
      activations: bytes of one device that they take, or text, where you know them.
      layers: of the transformer.
      width: of a layer.
      flops_per_token: operations of the forward and the backward pass; where it is left out 6 for each parameter of
        two or more axes.
      devices: of a model that a number describes; its parameters are divided over them (FSDP).
      replicated: whether such a model's parameters are whole on every device instead.
      param_dtype: of such a model's parameters.
      disk: whether to add a row with the state on disk.
      target: a chip to compile a step for, as ``jax_offload.inspect`` takes it (extra ``aot``).

    Returns:
      A ``Plan``. Its ``recommended`` row is ``None`` where nothing fits.

    Raises:
      TypeError: ``tx`` is neither an optimizer nor a function.
      ValueError: the chip or the target is not known, a number is out of range, or the step cannot be made.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((64, 4096, 4096), "bfloat16")}
      >>> found = jo.plan(optax.adamw(1e-3), params, device_memory="12GiB", activations="1GiB")
      >>> found["resident"].fits, round(found["resident"].peak / 2**30, 1)
      (False, 9.0)
      >>> found.recommended.code
      'tx = jo.offload(inner, fraction=0.5); step = jo.jit(step, donate_argnums=(0, 1))'
    """
    optimizers = optax.GradientTransformation | optax.MultiSteps
    of_step = callable(tx) and isinstance(params, optimizers)
    if target is not None and chip is None:
        chip = target_of(target).chip
    known = None if chip is None else chip_of(chip)
    if of_step:
        made = Steps(tx, args, target)
        tx, params = params, made.parameters(inner_of(params)[0])
    else:
        if callable(tx) and not isinstance(tx, optimizers) and not isinstance(params, int | float | str) and args:
            raise TypeError(
                "plan(make, tx) takes a function that makes a step of an optimizer, and the optimizer. To look at one "
                "step: jo.inspect(step, *args, target=...)."
            )
        if target is not None:
            raise ValueError(
                f"target: compiles a step, plan(make, tx, target={target!r}), and an optimizer alone is none. Give "
                f"chip={target!r} instead."
            )
        if args:
            raise TypeError(f"plan(tx, params): expected the parameters alone; got {1 + len(args)} arguments.")
        made = None
        check_inner(tx if not isinstance(tx, optax.MultiSteps) else tx.gradient_transformation(), "tx")
    said: list[str] = []
    if isinstance(params, int | float | str | np.number) and not isinstance(params, bool):
        n = count_of("params", params)
        n_devices = _whole("devices", devices)
        params, layers, width = _described(n, param_dtype, n_devices, replicated, layers, width, said)
    check_params(params)
    _check_arrays(params)
    setting = _setting(
        params, known, tokens_per_step, device_memory, host_memory, activations, layers, width, flops_per_token, said
    )
    if made is not None and not made.compiles:
        said.append(f"nothing is compiled: {made.advice}")
    return answer(tx, params, setting, said, made=made, disk=disk)


def answer(
    tx: Any, params: Any, setting: Setting, said: Sequence[str], *, made: Steps | None = None, disk: bool = False
) -> Plan:  # fmt: skip
    """``said``: what is assumed of the model."""
    inner, given = inner_of(tx)
    if not isinstance(tx, Offloaded) and _offloads_inside(inner, params):
        found = [_row(Way("as given", "tx as it is; " + _CODE["jo.jit"], tx), params, setting, made)]
        note = "an offload inside of a chain: for other rows give jo.offload(the whole chain)"
        return setting.plan(found, found, [*said, note], _dtypes(params, inner))
    rows = Rows(inner, given, params, setting, made)
    table = rows.of(disk)
    n, apart = setting.devices, [row for row in table if row.name.endswith(" ZeRO-1")]
    divided = [
        setting.judged(dataclasses.replace(
            row, name=row.name.removesuffix(" ZeRO-1"), parameters=row.parameters // n, gradients=row.gradients // n,
            fits=None,
        ))
        for row in (apart if all(row.fits is False for row in table) else [])
    ]  # fmt: skip
    spread = min(divided, key=_by_cost, default=None)
    return setting.plan(table, sorted(table, key=_by_cost), [*said, *rows.notes], _dtypes(params, inner), spread)


@dataclasses.dataclass(frozen=True)
class Way:
    """An optimizer, and how its step runs. ``run``: what compiles the step. ``same``: whether its numbers are those of
    the optimizer that was given."""

    name: str
    code: str
    tx: Any
    run: str = "jo.jit"
    same: bool = True


class Rows:
    """The rows for one optimizer and its parameters.

    Attributes:
      notes: what was found on the way, such as a row that could not be compiled.
    """

    def __init__(
        self, inner: Any, given: dict[str, Any], params: Any, setting: Setting, made: Steps | None = None
    ) -> None:
        self.inner, self.given, self.params = inner, given, params
        self.setting, self.made, self.notes = setting, made, list[str]()
        self.resident = Way("resident", f"tx = inner; {_CODE['jax.jit']}", inner, "jax.jit")
        self.offloaded = self.way("as given" if given else "offload", given)

    def way(self, name: str, options: Mapping[str, Any], run: str = "jo.jit") -> Way:
        text = "".join(f", {key}={'jo.' if key == 'disk' else ''}{value!r}" for key, value in options.items())
        changed = "storage" in options
        return Way(name, f"tx = jo.offload(inner{text}); {_CODE[run]}", offload(self.inner, **options), run,
                   not changed)  # fmt: skip

    def row(self, way: Way, sizes: Sizes | None = None) -> Row:
        return _row(way, self.params, self.setting, self.made, sizes)

    def of(self, disk: bool) -> list[Row]:
        """All of them, eight at most."""
        first, given = sizes_of(self.offloaded.tx, self.params), self.given
        axes = () if {"shard_over", "disk"} & given.keys() else replicated_axes(self.params)
        over = given.get("shard_over") or (axes[0] if len(axes) == 1 else axes)
        base = {**given, "shard_over": over} if over else given
        zero = " ZeRO-1" if over else ""
        found: list[Row | None] = [self.row(self.resident)]
        if over and not given.keys() & {"disk", "storage"}:
            found.append(self.row(self.way(f"resident{zero}", {"shard_over": over, "fraction": 0.0}, "jax.jit")))
        found.append(self.row(self.offloaded, first))
        if base is not given:
            found.append(self.row(self.way(f"offload{zero}", base)))
        on_device = {key: value for key, value in base.items() if key not in ("disk", "update_on")}
        waits, run = first.waits and "disk" not in given, "jo.jit"
        if waits:
            run = "jo.pipelined"
            found.append(self.tried(f"pipelined{zero if base is not given else ''}", on_device, run))
        rows = [row for row in found if row is not None]
        if not any(row.fits for row in rows if row.name.startswith("resident")):
            rows += self._solved(rows[-1], on_device, run)
        if self.setting.devices <= ON_A_HOST and not given.keys() & {"update_on", "disk", "shard_over"}:
            rows += filter(None, [self.tried("cores", {**given, "update_on": "host"}, "jo.jit")])
        if disk and "disk" not in given:
            rows.append(self.row(self.way("disk", {**on_device, "disk": disk_option("/nvme/run")})))
        if not any(row.fits is not False and row.same_numbers for row in rows) and "storage" not in given:
            rows += self._in_fewer_bits(on_device, run)
        return rows

    def tried(self, name: str, options: Mapping[str, Any], run: str) -> Row | None:
        """A row; or a note, where a step of yours cannot run so."""
        try:
            return self.row(self.way(name, options, run))
        except (TypeError, ValueError) as error:
            if self.made is None:
                raise
            self.notes.append(f"no row {name!r}: {str(error).splitlines()[0]}")
            return None

    def _solved(self, whole: Row, options: Mapping[str, Any], run: str) -> list[Row]:
        """The smallest fraction that fits, to 0.01; or the largest window, where the whole state does not fit with its
        own. None where a part of the sum is not known."""
        usable = self.setting.usable
        if usable is None or whole.missing or whole.window is None:
            return []
        if not whole.fits:
            window = (usable - whole.peak + whole.window) >> 20 << 20
            row = None if window < LEAST_WINDOW or "window" in options else self.tried(
                "window", {**options, "window": window}, run)  # fmt: skip
            return [row] if row is not None and row.fits else []
        leaves, best, smallest = sizes_of(self.way("", options).tx, self.params).leaves, None, 1.0
        room, lowest = usable - (whole.peak - whole.state), 0.0
        for _ in range(0 if "fraction" in options else TRIES):
            share = math.ceil(100 * max(smallest_share(leaves, room), lowest)) / 100
            if not 0 < share < smallest:
                break
            row = self.tried("fraction", {**options, "fraction": share}, run)
            if row is None or row.host >= whole.host:
                break
            if row.fits:
                best, smallest, room = row, share, usable - (row.peak - row.state)
            elif best is None:
                lowest = share + 0.01
            else:
                break
        return [] if best is None else [best]

    def _in_fewer_bits(self, options: Mapping[str, Any], run: str) -> list[Row]:
        rules = eight_bits(jax.eval_shape(self.inner.init, self.params))
        row = self.tried("int8 moments", {**options, "storage": rules}, run) if rules else None
        return [] if row is None else [row]


def _row(way: Way, params: Any, setting: Setting, made: Steps | None = None, sizes: Sizes | None = None) -> Row:
    sizes = sizes_of(way.tx, params, streams=way.run != "jax.jit") if sizes is None else sizes
    row = Row(
        name=way.name, code=way.code, parameters=sizes.parameters, gradients=sizes.parameters, state=sizes.state,
        window=sizes.window, activations=setting.activations, host=sizes.host, disk=sizes.disk, loaded=sizes.loaded,
        stored=sizes.stored, same_numbers=way.same,
    )  # fmt: skip
    chip, compute = setting.chip, setting.compute
    if chip is not None and not sizes.disk:
        hides = roofline.NOTHING if sizes.waits else roofline.BACKWARD
        hides = roofline.FORWARD if way.run == "jo.pipelined" else hides
        moved, added = roofline.link(chip, row.loaded, row.stored), None
        if on_cores := any(leaf.on_cores for leaf in sizes.leaves):
            state = sum(leaf.shard_bytes for leaf in sizes.leaves if leaf.on_cores)
            busy = roofline.cores(chip, state, sizes.loaded, sizes.stored)
            added = None if busy is None else max(moved, busy)
        else:
            added = roofline.added(moved, compute or 0.0, hides)
        each = setting.seconds_per_token
        least = None if each is None or on_cores else roofline.tokens_to_hide(moved, each, hides)
        row = dataclasses.replace(row, link=moved, added=added, hidden_from=least)
    elif not sizes.loaded and not sizes.disk:
        row = dataclasses.replace(row, added=0.0)
    if made is not None:
        row = made.compiled(row, way)
    return setting.judged(row)


def _by_cost(row: Row) -> tuple[Any, ...]:
    """Rows that fit first, then those that may; of these the ones with the same numbers, and the cheapest."""
    fits = {True: 0, None: 1, False: 2}[row.fits]
    order = ("resident", "fraction", "offload", "as given", "pipelined", "window", "cores", "disk", "int8")
    kind = next((k for k, name in enumerate(order) if row.name.startswith(name)), len(order))
    added = math.inf if row.added is None else round(row.added, 6)
    least = (added, kind, row.loaded + row.stored, row.disk)
    return (fits, not row.same_numbers, *least)


def inner_of(tx: Any) -> tuple[Any, dict[str, Any]]:
    """What an ``offload`` wraps, with the options that it was given beyond the defaults; else ``tx`` itself."""
    if isinstance(tx, Offloaded) and tx.inner is not None:
        return tx.inner, {k: v for k, v in tx.options.items() if v is not _DEFAULTS[k] and v != _DEFAULTS[k]}
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx, {}


def eight_bits(state: Any) -> dict[str, str] | None:
    """Rules for float32 moments in 8 bits, by the names of optax's states; ``None`` where there are none."""
    dtypes: dict[str, set[Any]] = {"mu": set(), "nu": set()}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        for name in dtypes.keys() & jax.tree_util.keystr(path, simple=True, separator="/").split("/"):
            dtypes[name] |= {x.dtype} if getattr(x, "ndim", 0) else set()
    floating = {name for name, of in dtypes.items() if of == {jnp.dtype(jnp.float32)}}
    return {name: dtype for name, dtype in (("mu", "int8"), ("nu", "uint8")) if name in floating} or None


def _offloads_inside(tx: Any, params: Any) -> bool:
    rows = placed_leaves(tx, params)[0]
    return any(leaf.why != (outside := unmanaged(aval).why) and bool(outside) for leaf, aval, _ in rows)


def _described(
    n: int, dtype: str, devices: int, replicated: bool, layers: int | None, width: int | None, said: list[str]
) -> tuple[Any, int | None, int | None]:
    """The parameters of a model that a number describes; and its layers and width, where any of them was given."""
    layers = None if layers is None else _whole("layers", layers)
    width = None if width is None else _whole("width", width)
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"param_dtype: expected a floating dtype such as bfloat16 or float32; got {dtype!r}.")
    params, of, wide = model_of(n, dtype, devices, replicated, layers, width)
    how = "" if devices == 1 else ", whole on each device" if replicated else ", divided over the devices (FSDP)"
    said.append(f"model: {of} equal layers of width {wide}, 12 width² parameters each{how}")
    return (params, None, None) if layers is None and width is None else (params, of, wide)


def _setting(
    params: Any, chip: Chip | None, tokens: Any, memory: Any, host: Any, activations: Any, layers: Any, width: Any,
    flops: Any, said: list[str],
) -> Setting:  # fmt: skip
    """Checked; with what follows from the parameters."""
    tokens = None if tokens is None else _whole("tokens_per_step", tokens)
    layers = None if layers is None else _whole("layers", layers)
    width = None if width is None else _whole("width", width)
    if flops is not None and (isinstance(flops, bool) or not 0 < flops < math.inf):
        raise ValueError(f"flops_per_token: expected a number above 0; got {flops!r}.")
    devices, leaves = devices_of(params), jax.tree.leaves(params)
    by_dtype: Counter[str] = Counter()
    for x in leaves:
        by_dtype[str(x.dtype)] += nbytes(x)
    dtype = by_dtype.most_common(1)[0][0] if by_dtype else "float32"
    matrices = sum(math.prod(np.shape(x)) for x in leaves if np.ndim(x) >= 2)
    if activations is not None:
        activations = bytes_of("activations", activations)
        said.append(f"activations: {in_bytes(activations)} on each device, as given")
    elif None not in (layers, width, tokens):
        size, every = jnp.dtype(dtype).itemsize, sum(map(nbytes, leaves))
        activations = -(-tokens // devices) * width * size * (layers + RECOMPUTED)
        formula = f"tokens on a device × width × {size} bytes × (layers + {RECOMPUTED})"
        if sum(map(own_bytes, leaves)) < every:
            activations += GATHERED * every // layers
            formula += f" + {GATHERED} gathered layers"
        said.append(
            f"activations: {formula} = {in_bytes(activations)}, a checkpoint around each of {layers} layers of width "
            f"{width}, flash attention, and a loss in chunks (Korthikanti et al. 2022)"
        )
    if host is not None:
        host = bytes_of("host_memory", host) // min(devices, ON_A_HOST)
    return Setting(
        chip=chip, tokens=tokens, devices=devices, activations=activations, dtype=dtype,
        flops_per_token=float(flops) if flops is not None else float(roofline.OPERATIONS * matrices),
        device_memory=bytes_of("device_memory", memory) if memory is not None else chip.hbm_bytes if chip else None,
        host_memory=host if host is not None else chip.dram_bytes if chip else None, host_given=host is not None,
        parameters=sum(math.prod(np.shape(x)) for x in leaves),
    )  # fmt: skip


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 1 <= value < math.inf:
        raise ValueError(f"{name}: expected a whole number, 1 or more; got {value!r}.")
    return int(value)


def _check_arrays(params: Any) -> None:
    """Raises ``TypeError`` for a Python number: optax takes it, but what it will be has no bytes yet."""
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not hasattr(x, "dtype"):
            raise TypeError(
                f"params: plan takes arrays, or what has shape and dtype; {jax.tree_util.keystr(path)} is {x!r}, a "
                f"{type(x).__name__}. Give jnp.asarray({x!r}), or jax.ShapeDtypeStruct((), 'float32')."
            )


def _dtypes(params: Any, inner: Any) -> str:
    """The types of parameters and state, as they count."""
    n = sum(math.prod(np.shape(x)) for x in jax.tree.leaves(params))
    state = [x for x in jax.tree.leaves(jax.eval_shape(inner.init, params)) if getattr(x, "ndim", 0)]

    def of(leaves: Sequence[Any]) -> str:
        return " and ".join(sorted({str(x.dtype) for x in leaves})) or "none"

    per = sum(map(nbytes, state)) / max(1, n)
    return f"{n:,} parameters in {of(jax.tree.leaves(params))}; state in {of(state)}, {per:.3g} bytes a parameter"
