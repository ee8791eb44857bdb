"""The host's cores, which update leaves in host memory: how arrays reach them, and how results come back.

Their programs run on jax's CPU backend, which sees pinned host memory as its own arrays, without a copy. XLA would copy
such a view if it were donated. So XLA's programs make new buffers, which are pinned again by a copy if the platform
does not take them as they are; only kernels write donated state in place.

With several accelerators, kernels update shard by shard. XLA's programs update each leaf once, whole: the shards are
put together in host memory, one more copy, and the new values are divided again; of replicas, one is read.
"""

import ctypes
import dataclasses
import functools
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jax_offload._disk.disk import allgathered
from jax_offload._host.stages import Stage
from jax_offload._program import jaxprs, memory
from jax_offload._program.jaxprs import Equation, Jaxpr, Literal, Var, jit, values_of, variables
from jax_offload._program.memory import DEVICE_KIND, HOST_KIND, Box, is_host_aval, on_host, to_device
from jax_offload._program.program import flat
from jax_offload._program.slices import Slice

# ---- arrays on their way -------------------------------------------------------------------------------------------


@functools.cache
def cpu() -> Any:
    """The device of jax's CPU backend, which updates host leaves with the cores of this process's host.

    Raises:
      ValueError: jax was told to do without its CPU backend.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "update_on: jax runs without its CPU backend, which updates leaves on the host. Fix: add ',cpu' to "
            "JAX_PLATFORMS, or update_on='device'."
        ) from error


def on_cpus(devices: Iterable[Any]) -> bool:
    """Whether all memory of these devices is the host's."""
    return all(device.platform == "cpu" for device in devices)


def has_addresses(devices: Iterable[Any]) -> bool:
    """Whether these devices' host memory has addresses for us."""
    return all(device.platform in ("cpu", "gpu", "cuda", "rocm") for device in devices)


def sent(x: jax.Array) -> jax.Array:
    """Start to copy an array to host memory, without waiting.

    ``to_host`` runs a program, behind those that have begun. It is the only way jax has with several processes.
    """
    if on_host(x) or on_cpus(x.sharding.device_set):
        return x
    if not x.is_fully_addressable:
        return memory.to_host(x)
    return jax.device_put(x, x.sharding.with_memory_kind(HOST_KIND), may_alias=False)


def brought_back(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Start to copy a result to the step's own memory. A kernel has made it on the step's devices already, which divide
    it otherwise if need be; a program of XLA has made it whole."""
    if x.sharding.device_set != sharding.device_set:
        return _copied(x, sharding, may_alias=on_host(x))
    if not x.sharding.is_equivalent_to(sharding.with_memory_kind(str(x.sharding.memory_kind)), x.ndim):
        # device memory divides it in another way
        x = jax.device_put(x, x.sharding.with_memory_kind(DEVICE_KIND))
        x = jax.device_put(x, sharding.with_memory_kind(DEVICE_KIND))
    return x if x.sharding == sharding else jax.device_put(x, sharding)


def _copied(x: jax.Array, to: Sharding, may_alias: bool) -> jax.Array:
    """Copy an array to other devices: through NumPy, unless it is on CPUs, or holds PRNG keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or on_cpus(x.sharding.device_set | to.device_set):
        return jax.device_put(x, to)
    return jax.device_put(np.asarray(x), to, may_alias=may_alias)


def one_of(x: Any) -> Any:
    """Return one shard of a replicated array, a view of its memory; return any other array unchanged."""
    return x.addressable_data(0) if isinstance(x, jax.Array) and x.is_fully_replicated else x


def taken_over(*arrays: jax.Array) -> Sequence[jax.Array]:
    """Make donated arrays the step's own, in their memory, without waiting.

    They are donated to a program that does nothing. It runs when all programs that read them have ended, marks them as
    deleted for everybody else, and copies memory that is not XLA's own, such as NumPy's. A GPU refuses while somebody
    holds a NumPy view; then they are copied.
    """
    try:
        return _handed_over(tuple(x.sharding for x in arrays))(*arrays)
    except jax.errors.JaxRuntimeError:
        if any(x.is_deleted() for x in arrays):
            raise
        copies = [memory.copy_on_host(x) for x in arrays]
        for x in arrays:
            x.delete()
        return copies


@functools.lru_cache(256)
def _handed_over(shardings: tuple[Sharding, ...]) -> Callable[..., Sequence[jax.Array]]:
    return jax.jit(lambda *xs: xs, donate_argnums=range(len(shardings)), out_shardings=shardings)


# ---- programs of XLA -------------------------------------------------------------------------------------------------


def program(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """Compile a jaxpr as a program of XLA on the cores. It takes operands that were sent.

    It runs without the step's mesh, which does not contain the cores.
    """
    run = jit(_undivided(jaxpr))

    def lent(x: Any) -> Any:
        """An operand, whole, once it has arrived.

        A NumPy view of another CPU's array would last until the program has ended, and whoever donates the array
        meanwhile would have it copied, and not deleted. Pinned memory is seen through such a view.
        """
        x = one_of(x)
        return _copied(x, SingleDeviceSharding(cpu(), memory_kind=x.sharding.memory_kind), may_alias=True)

    def called(*operands: Any) -> list[Any]:
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            return run(*map(lent, operands))

    return called


def _undivided(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """Return a jaxpr for a mesh as a function of whole arrays on one device, without constraints and shardings. Its
    operands may be in host memory, whatever its types say."""

    def inside(inner: Jaxpr) -> Jaxpr:
        """Change an open jaxpr, a branch or the body of a loop, in the same way."""
        inputs = [*inner.constvars, *inner.invars]
        types = [v.aval.update(sharding=None) if hasattr(v.aval, "sharding") else v.aval for v in inputs]
        traced = jaxprs.jaxpr_of(_undivided(inner), *types)[0].jaxpr
        n, info = len(inner.constvars), jaxprs.nameless(traced.debug_info)
        return Jaxpr(traced.invars[:n], traced.invars[n:], traced.outvars, traced.eqns, traced.effects, info)

    def step_cores(*operands: Any) -> list[Any]:
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        env = {v: x if is_host_aval(v.aval) else to_device(x) for v, x in zip(inputs, operands, strict=True)}
        for eqn in jaxpr.eqns:
            results = given = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if eqn.primitive.name not in ("sharding_constraint", "reshard"):
                params = jaxprs.with_jaxprs(eqn.params, inside)
                params = {k: None if isinstance(x, Sharding) else x for k, x in params.items()}
                results = jaxprs.run_equation(eqn, given, params)
            env.update(zip(eqn.outvars, results, strict=True))
        return values_of(env, jaxpr.outvars)

    return step_cores


# ---- kernels: an elementwise update in one pass, which reads each number once and writes it in place -----------------
#
# XLA's compiler for CPUs makes a pass over the arrays for each result. One kernel for all results reads less: AdamW's
# moves 28 bytes a parameter instead of 40. It is generated from the update's equations and compiled by numba (extra
# ``cores``). Each process updates the parts of a leaf that its own accelerators hold, and one copy of a replicated
# leaf.
#
# A kernel computes bfloat16 in float32 and rounds after each operation, except where the next operation widens the
# result to float32: XLA's CPU code does the same.

BFLOAT16 = np.dtype(jnp.bfloat16)
# The fewest elements in a part, and the number of parts for each thread: threads that are delayed take fewer.
_AT_LEAST, _PARTS = 2**16, 8
_ALIGNED = 64  # bytes; XLA takes memory with this alignment without a copy


@functools.cache
def has_numba() -> bool:
    """Whether kernels can be compiled (extra ``cores``)."""
    try:
        import numba  # noqa: F401  # pyright: ignore
    except ImportError:  # it also refuses a NumPy that is newer than itself
        return False
    return True


@functools.cache
def threads() -> int:
    """Return the number of cores that this process may use: its share of those that other processes may use too."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    # all processes are here, as each comes to its first kernel in the same step
    said = allgathered([socket.gethostname(), hex(sum(1 << core for core in mine))])
    masks = [int(mask, 16) for host, mask in said if host == socket.gethostname()]
    return max(1, int(sum(1 / sum(mask >> core & 1 for mask in masks) for core in mine) + 1e-6))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "jax_offload")


def _memory_of(x: jax.Array) -> Any:
    """Return an array's memory as a view; a copy where it has no address, or another layout than row by row.

    XLA does not know of the view, so that it can still donate the array.
    """
    layout = cast(Any, x).format.layout
    if not has_addresses(x.sharding.device_set) or layout.major_to_minor != tuple(range(x.ndim)):
        return np.asarray(x)
    buffer = (ctypes.c_char * x.nbytes).from_address(jax.block_until_ready(x).unsafe_buffer_pointer())
    return np.frombuffer(buffer, x.dtype).reshape(x.shape)


def _aligned(box: Box, dtype: Any) -> Any:
    """Allocate memory for a part of a result, aligned as XLA takes it without a copy."""
    shape = memory.shape_of(box)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An update of one slice: ``kernel(start, stop, *arrays, *results, *scalars)`` updates a range of flat arrays.

    Attributes:
      slice: the update.
      text: the kernel's source.
      signature: its type, in numba's notation.
      arrays, scalars: the positions of the update's inputs that are arrays, and of the inputs that are scalars.
      over: position of an input -> position of the result that overwrites it; other results are arguments. The
        caller must own the memory of these inputs.
    """

    slice: Slice
    text: str
    signature: str
    arrays: tuple[int, ...]
    scalars: tuple[int, ...]
    over: Mapping[int, int]

    def update(self, given: Sequence[Any]) -> list[jax.Array]:
        """Return the results, made box by box and divided like the operand that has the most boxes."""
        replicas: dict[int, dict[Box, list[jax.Array]]] = {i: {} for i in self.arrays}
        for i, boxes in replicas.items():
            for shard in given[i].addressable_shards:
                boxes.setdefault(memory.box_of(shard.index, given[i].shape), []).append(shard.data)
        parts = {i: [(box, _memory_of(x)) for box, (x, *_) in each.items()] for i, each in replicas.items()}
        like = max(replicas, key=lambda i: len(replicas[i]))
        in_place = {i: k for i, k in self.over.items() if replicas[i].keys() == replicas[like].keys()}
        made: list[list[tuple[Box, Any]]] = [[] for _ in self.slice.outputs]
        for box in replicas[like]:
            arrays = {i: memory.gathered(each, box) for i, each in parts.items()}
            arrays |= {i: np.array(arrays[i], order="C") for i in self.over.keys() - in_place.keys()}
            new = {k: arrays[i] for i, k in self.over.items()}
            fresh = {k: _aligned(box, v.aval.dtype) for k, v in enumerate(self.slice.outputs) if k not in new}
            self._run([*arrays.values(), *fresh.values()], [given[i] for i in self.scalars])
            for k, x in (new | fresh).items():
                made[k].append((box, x))
        for first, *others in (each for i in in_place for each in replicas[i].values()):
            for other in others:
                _memory_of(other)[...] = _memory_of(first)
        found = {k: given[i] for i, k in in_place.items()}
        for k, v in enumerate(self.slice.outputs):
            if k not in found:
                place = given[like].sharding.with_memory_kind(HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)
                found[k] = memory.assembled(made[k], place, given[like].shape)
        return [found[k] for k in range(len(made))]

    def _run(self, arrays: Sequence[Any], scalars: Sequence[Any]) -> None:
        """Update arrays of one shape; each part runs in the next free thread."""
        flat = [np.ascontiguousarray(x).reshape(-1) for x in arrays]
        flat = [x.view(np.uint16) if x.dtype == BFLOAT16 else x for x in flat]
        numbers = [np.asarray(one_of(x))[()] for x in scalars]
        numbers = [np.float32(x) if x.dtype == BFLOAT16 else x for x in numbers]
        run, size = _compiled(self.text, self.signature), flat[0].size
        part = max(_AT_LEAST, -(-size // (_PARTS * threads())))
        pieces = [(start, min(start + part, size)) for start in range(0, size, part)]
        list((_pool().map if len(pieces) > 1 else map)(lambda piece: run(*piece, *flat, *numbers), pieces))


def in_one_pass(
    stage: Stage, next_of: Mapping[Var, Var], own: Set[Var]
) -> tuple[Callable[..., list[Any]], list[Var]] | None:
    """Return a stage of the cores as a function of arrays in host memory, which runs its kernels one after the other,
    and the inputs that they overwrite; ``None`` if one of its updates is not elementwise, or without numba.

    Args:
      stage: the stage.
      next_of: result -> the variable whose next value it is.
      own: the inputs that may be overwritten.
    """

    def type_of(v: Var) -> Any:
        return v.aval.shape, v.aval.dtype, v.aval.weak_type, is_host_aval(v.aval)

    if not has_numba():
        return None
    times, kernels, written = Counter(v for s in stage.slices for v in s.inputs), list[Kernel](), list[Var]()
    for s in stage.slices:
        old = {k: next_of[v] for k, v in enumerate(s.outputs) if v in next_of and next_of[v] in own & {*s.inputs}}
        over = {k: v for k, v in old.items() if times[v] == 1 and type_of(v) == type_of(s.outputs[k])}
        try:
            kernels.append(kernel_of(s, {s.inputs.index(v): k for k, v in over.items()}))
        except _NotElementwise:
            return None
        written += over.values()

    def run(*operands: Any) -> list[Any]:
        env = dict(zip(stage.inputs, operands, strict=True))
        for each in kernels:
            env.update(zip(each.slice.outputs, each.update(values_of(env, each.slice.inputs)), strict=True))
        return values_of(env, stage.outputs)

    return run, written


@functools.lru_cache(256)
def _compiled(text: str, signature: str) -> Callable[..., None]:
    """Compile a kernel, once for all leaves that are updated alike, whatever their shapes."""
    import numba  # pyright: ignore

    scope: dict[str, Any] = {name: getattr(np, name) for name in ("float32", "int32", "uint32", "uint16")}
    scope |= {"sqrt": math.sqrt, "copysign": math.copysign, "inf": math.inf, "nan": math.nan} | _roundings()
    exec(text, scope)
    return numba.njit(signature, nogil=True, error_model="numpy", fastmath={"contract"})(scope["kernel"])


@functools.cache
def _roundings() -> dict[str, Any]:
    """Return conversions from the bits of bfloat16 to float32 and back, which round to nearest even and keep NaN."""
    import numba  # pyright: ignore

    @numba.njit
    def from_bfloat16(bits: Any) -> Any:
        return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

    @numba.njit
    def to_bfloat16(x: Any) -> Any:
        bits = np.float32(x).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)) if x == x else np.uint16(0x7FC0)

    @numba.njit
    def rounded(x: Any) -> Any:
        return from_bfloat16(to_bfloat16(x))

    return {"from_bfloat16": from_bfloat16, "to_bfloat16": to_bfloat16, "rounded": rounded}


class _NotElementwise(Exception):
    """An equation is not elementwise, or a kernel would compute other numbers than XLA."""


def kernel_of(s: Slice, over: Mapping[int, int]) -> Kernel:
    """Generate the kernel of a slice, whose transfers do nothing on the cores. For ``over``, see ``Kernel``.

    Raises:
      _NotElementwise: one of its equations is not elementwise.
    """
    program = flat(s.closed, any_jit=True)
    inputs, outputs = program.inputs, variables(program.outputs)
    (shape, *more) = {v.aval.shape for v in outputs} or {()}
    every = {v.aval.shape for v in (*inputs, *(v for eqn in program.eqns for v in eqn.outvars))}
    if more or shape == () or program.consts or len(outputs) < len(program.outputs) or every - {(), shape}:
        raise _NotElementwise
    arrays = tuple(i for i, v in enumerate(inputs) if v.aval.shape == shape)
    scalars = tuple(i for i, v in enumerate(inputs) if v.aval.shape == ())
    names = {v: f"x{i}" for i, v in enumerate(inputs)}
    wide = dict[Var, str]()  # values in bfloat16 before they are rounded
    lines = [f"x{i} = {_converted('from', f'a{i}[i]', inputs[i])}" for i in arrays]
    for eqn in program.eqns:
        widens = eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == np.float32
        operands = [_operand(v, names | wide if widens else names) for v in eqn.invars]
        texts = operands if eqn.primitive.name == "optimization_barrier" else [_expression(eqn, operands)]
        for v, text in zip(eqn.outvars, texts, strict=True):
            names[v] = f"v{len(names)}"
            if v.aval.dtype == BFLOAT16 and eqn.primitive.name not in _EXACT:
                wide[v] = f"w{len(names)}"
                lines.append(f"{wide[v]} = float32({text})")
                text = f"rounded({wide[v]})"
            lines.append(f"{names[v]} = {_type_of(v)}({text})")
    targets = {k: f"r{k}" for k in range(len(outputs))} | {k: f"a{i}" for i, k in over.items()}
    lines += [f"{targets[k]}[i] = {_converted('to', names[v], v)}" for k, v in enumerate(outputs)]
    taken = {f"a{i}": inputs[i] for i in arrays}
    taken |= {name: outputs[k] for k, name in targets.items() if name not in taken}
    # numba vectorises the loop over slices only: it sees then that no index is negative
    lines = [
        f"def kernel(start, stop, {', '.join([*taken, *(names[inputs[i]] for i in scalars)])}):",
        *(f"    {name} = {name}[start:stop]" for name in taken),
        f"    for i in range({next(iter(taken))}.size):",
        *(f"        {line}" for line in lines),
    ]
    stored = {name: "uint16" if v.aval.dtype == BFLOAT16 else _type_of(v) for name, v in taken.items()}
    types = [f"Array({stored[name]}, 1, 'C', {name not in targets.values()})" for name in taken]
    types += [_type_of(inputs[i]) for i in scalars]
    signature = f"void(int64, int64, {', '.join(types)})".replace("bool", "boolean")
    return Kernel(s, "\n".join(lines), signature, arrays, scalars, over)


def _type_of(v: Any) -> str:
    name = "float32" if v.aval.dtype == BFLOAT16 else str(v.aval.dtype)
    if name not in ("float32", "int32", "uint32", "uint16", "bool"):
        raise _NotElementwise
    return name


def _converted(way: str, text: str, v: Any) -> str:
    return f"{way}_bfloat16({text})" if v.aval.dtype == BFLOAT16 else text


def _operand(v: Any, names: Mapping[Var, str]) -> str:
    if isinstance(v, Literal) and np.ndim(v.val) != 0:
        raise _NotElementwise
    return f"{_type_of(v)}({np.asarray(v.val).item()!r})" if isinstance(v, Literal) else names[v]


_OPERATORS = {"add": "+", "add_any": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shift_left": "<<"}
_OPERATORS |= {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_SAME = ("copy", "copy_p", "stop_gradient", "device_put", "broadcast_in_dim", "sharding_constraint", "reshard")
# jax's max and min return NaN if an operand is NaN. Comparisons with NaN are false, so these look for it.
_TEXTS = {
    "neg": "-{0}",
    "square": "{0} * {0}",
    "abs": "abs({0})",
    "max": "{0} if ({0} > {1}) or ({0} != {0}) else {1}",
    "min": "{0} if ({0} < {1}) or ({0} != {0}) else {1}",
    "clamp": "{0} if {1} < {0} else ({2} if {1} > {2} else {1})",
    **{name: f"{{0}} {operator} {{1}}" for name, operator in _OPERATORS.items()},
    **dict.fromkeys(_SAME, "{0}"),
}
_TEXTS_OF_FLOATS = {
    "div": "{0} / {1}",
    "sqrt": "sqrt({0})",
    "rsqrt": "float32(1) / sqrt({0})",
    "sign": "{0} if ({0} != {0}) or ({0} == float32(0)) else copysign(float32(1), {0})",
    "is_finite": "abs({0}) < float32(inf)",
}
# Operations whose result needs no rounding to bfloat16, because it is exact or rounded already.
_EXACT = {*_SAME, "select_n", "max", "min", "clamp", "neg", "abs", "sign"}
_EXACT |= {"convert_element_type", "reduce_precision", "optimization_barrier"}


def _expression(eqn: Equation, operands: Sequence[str]) -> str:
    """Write an equation with one result as a Python expression."""
    if len(eqn.outvars) != 1 or not eqn.invars or eqn.effects:
        raise _NotElementwise
    first, params = operands[0], eqn.params
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    from_float, to_float = (jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
    texts = _TEXTS | _TEXTS_OF_FLOATS if old in (np.float32, BFLOAT16) else _TEXTS
    match eqn.primitive.name:
        case name if name in texts:
            return texts[name].format(*operands)
        case "integer_pow" if 1 <= params["y"] <= (2 if new == BFLOAT16 else 4):  # XLA rounds each product
            return " * ".join([first] * params["y"])
        case "select_n" if len(operands) == 3 and str(old) == "bool":
            return f"{operands[2]} if {first} else {operands[1]}"
        case "convert_element_type" if to_float or not from_float:
            return f"rounded(float32({first}))" if new == BFLOAT16 and old != BFLOAT16 else first
        case "bitcast_convert_type" if (old, new) == (BFLOAT16, np.uint16):
            return f"to_bfloat16({first})"
        case "reduce_precision" if (params["exponent_bits"], params["mantissa_bits"]) == (8, 7):
            return f"rounded({first})"
        case "not":
            return f"not {first}" if str(old) == "bool" else f"~{first}"
        case _:
            raise _NotElementwise
