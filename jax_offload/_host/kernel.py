"""Runs an elementwise update on the host's cores in one pass: each number is read once, and written once, in place.

XLA's compiler for CPUs makes a pass over the arrays for each result. One kernel for all results reads less: AdamW's
moves 28 bytes a parameter instead of 40. It is generated from the update's equations and compiled by numba (extra
``cores``). Each process updates the parts of a leaf that its own accelerators hold, and one copy of a replicated leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload._host import cores
from jax_offload._host.stages import Task
from jax_offload._program.jaxprs import ClosedJaxpr, Equation, Jaxpr, Literal, Var, values_of, variables
from jax_offload._program.memory import DEVICE_KIND, HOST_KIND, is_host_aval, with_kind
from jax_offload._program.program import flat
from jax_offload._program.shardings import Box, assembled, gathered
from jax_offload._program.slices import Slice

# A kernel computes bfloat16 in float32 and rounds after each operation, except where the next operation widens the
# result to float32: XLA's CPU code does the same.
BFLOAT16 = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function ``kernel(start, stop, *arrays, *results, *scalars)`` that updates a range of flat arrays.

    Attributes:
      text: its source.
      signature: its type, in numba's notation.
      arrays, scalars: the positions of the update's inputs that are arrays, and of the inputs that are scalars.
      over: position of an input -> position of the result that overwrites it; other results are arguments.
    """

    text: str
    signature: str
    arrays: tuple[int, ...]
    scalars: tuple[int, ...]
    over: Mapping[int, int]

    def run(self, arrays: Sequence[Any], scalars: Sequence[Any]) -> None:
        """Update arrays of one shape, in all threads."""
        parts = [np.ascontiguousarray(x).reshape(-1) for x in arrays]
        parts = [x.view(np.uint16) if x.dtype == BFLOAT16 else x for x in parts]
        numbers = [np.asarray(cores.one_of(x))[()] for x in scalars]
        numbers = [np.float32(x) if x.dtype == BFLOAT16 else x for x in numbers]
        run = _compiled(self.text, self.signature)
        cores.on_all_threads(parts[0].size, lambda start, stop: run(start, stop, *parts, *numbers))


class OnePass:
    """The updates of a task by kernels, one after the other; a function of arrays in host memory.

    A result is divided between devices in the same way as the operand of its update that has the most parts.

    Args:
      task: the task.
      kernels: one for each of its slices.

    Attributes:
      written: the inputs that results overwrite; whoever calls must own their memory.
    """

    def __init__(self, task: Task, kernels: Sequence[Kernel]) -> None:
        self._task, self._updates = task, [*zip(task.slices, kernels, strict=True)]
        self.written = [s.inputs[i] for s, kernel in self._updates for i in kernel.over]

    def __call__(self, *operands: Any) -> list[Any]:
        env = dict(zip(self._task.inputs, operands, strict=True))
        for s, kernel in self._updates:
            env.update(zip(s.outputs, _updated(kernel, values_of(env, s.inputs), s.outputs), strict=True))
        return [env[v] for v in self._task.outputs]


def _updated(kernel: Kernel, given: Sequence[Any], results: Sequence[Var]) -> list[jax.Array]:
    """Return the results of an update, box by box of the operand that has the most."""
    shards = {i: cores.replicas_of(given[i]) for i in kernel.arrays}
    like = max(shards, key=lambda i: len(shards[i]))
    in_place = {i: k for i, k in kernel.over.items() if shards[i].keys() == shards[like].keys()}
    parts = {i: [(own, cores.memory_of(data)) for own, (data, *_) in each.items()] for i, each in shards.items()}
    made: list[list[tuple[Box, Any]]] = [[] for _ in results]
    for box in shards[like]:
        arrays = {i: gathered(each, box) for i, each in parts.items()}
        arrays |= {i: np.array(arrays[i], order="C") for i in kernel.over.keys() - in_place.keys()}
        new = {k: arrays[i] for i, k in kernel.over.items()}
        fresh = {k: cores.aligned(box, v.aval.dtype) for k, v in enumerate(results) if k not in new}
        kernel.run([*arrays.values(), *fresh.values()], [given[i] for i in kernel.scalars])
        for k, x in (new | fresh).items():
            made[k].append((box, x))
    for first, *others in (each for i in in_place for each in shards[i].values()):
        for other in others:
            cores.memory_of(other)[...] = cores.memory_of(first)
    found = {k: given[i] for i, k in in_place.items()}
    for k, v in enumerate(results):
        if k not in found:
            place = with_kind(given[like].sharding, HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)
            found[k] = assembled(made[k], place, given[like].shape)
    return [found[k] for k in range(len(results))]


def one_pass(task: Task, next_of: Mapping[Var, Var], own: Set[Var]) -> OnePass | None:
    """Return kernels for a task of the cores; ``None`` if one of its updates is not elementwise, or without numba.

    Args:
      task: the task.
      next_of: result -> the variable whose next value it is.
      own: the inputs that may be overwritten.
    """
    times = Counter(v for s in task.slices for v in s.inputs)
    own = {v for v in own if times[v] == 1}
    try:
        kernels = [kernel_of(s.jaxpr, _over(s, next_of, own)) for s in task.slices] if cores.has_numba() else None
    except _NotElementwise:
        return None
    return None if kernels is None else OnePass(task, kernels)


def _over(s: Slice, next_of: Mapping[Var, Var], own: Set[Var]) -> dict[int, int]:
    """Map the inputs that a slice overwrites to their next values, by position."""

    def type_of(v: Var) -> Any:
        return v.aval.shape, v.aval.dtype, v.aval.weak_type, is_host_aval(v.aval)

    old = {k: next_of[v] for k, v in enumerate(s.outputs) if next_of.get(v) in own}
    return {s.inputs.index(x): k for k, x in old.items() if x in s.inputs and type_of(x) == type_of(s.outputs[k])}


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


def kernel_of(jaxpr: Jaxpr, over: Mapping[int, int]) -> Kernel:
    """Generate the kernel of an update.

    Args:
      jaxpr: the update's; its transfers do nothing on the cores.
      over: input -> the result that overwrites it, by their positions.

    Raises:
      _NotElementwise: one of its equations is not elementwise.
    """
    program = flat(ClosedJaxpr(jaxpr, []), any_jit=True)
    inputs, outputs = program.inputs, variables(program.outputs)
    (shape, *more) = {v.aval.shape for v in outputs} or {()}
    every = {v.aval.shape for v in (*inputs, *(v for eqn in program.eqns for v in eqn.outvars))}
    if more or shape == () or program.consts or len(outputs) < len(program.outputs) or every - {(), shape}:
        raise _NotElementwise
    arrays = tuple(i for i, v in enumerate(inputs) if v.aval.shape == shape)
    scalars = tuple(i for i, v in enumerate(inputs) if v.aval.shape == ())
    names = {v: f"x{i}" for i, v in enumerate(inputs)}
    unrounded: dict[Var, str] = {}
    lines = [f"x{i} = {_converted('from', f'a{i}[i]', inputs[i])}" for i in arrays]
    for eqn in program.eqns:
        widens = eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == np.float32
        operands = [_operand(v, names | unrounded if widens else names) for v in eqn.invars]
        texts = operands if eqn.primitive.name == "optimization_barrier" else [_expression(eqn, operands)]
        for v, text in zip(eqn.outvars, texts, strict=True):
            names[v] = f"v{len(names)}"
            if v.aval.dtype == BFLOAT16 and eqn.primitive.name not in _EXACT:
                unrounded[v] = f"w{len(names)}"
                lines.append(f"{unrounded[v]} = float32({text})")
                text = f"rounded({unrounded[v]})"
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
    types = [f"Array({_stored_type(v)}, 1, 'C', {name not in targets.values()})" for name, v in taken.items()]
    types += [_type_of(inputs[i]) for i in scalars]
    signature = f"void(int64, int64, {', '.join(types)})".replace("bool", "boolean")
    return Kernel("\n".join(lines), signature, arrays, scalars, dict(over))


def _type_of(v: Any) -> str:
    name = "float32" if v.aval.dtype == BFLOAT16 else str(v.aval.dtype)
    if name not in ("float32", "int32", "uint32", "uint16", "bool"):
        raise _NotElementwise
    return name


def _stored_type(v: Any) -> str:
    return "uint16" if v.aval.dtype == BFLOAT16 else _type_of(v)


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
} | dict.fromkeys(_SAME, "{0}")
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
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.outvars) != 1 or not eqn.invars or eqn.effects:
        raise _NotElementwise
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if name in _OPERATORS:
        return f"{operands[0]} {_OPERATORS[name]} {operands[1]}"
    if name in _TEXTS:
        return _TEXTS[name].format(*operands)
    if name in _TEXTS_OF_FLOATS and old in (np.float32, BFLOAT16):
        return _TEXTS_OF_FLOATS[name].format(*operands)
    if name == "integer_pow" and 1 <= params["y"] <= (2 if new == BFLOAT16 else 4):  # XLA rounds each product
        return " * ".join([operands[0]] * params["y"])
    if name == "select_n" and len(operands) == 3 and str(old) == "bool":
        return f"{operands[2]} if {operands[0]} else {operands[1]}"
    if name == "convert_element_type" and (jnp.issubdtype(new, jnp.floating) or not jnp.issubdtype(old, jnp.floating)):
        return f"rounded(float32({operands[0]}))" if new == BFLOAT16 and old != BFLOAT16 else operands[0]
    if name == "bitcast_convert_type" and (old, new) == (BFLOAT16, np.uint16):
        return f"to_bfloat16({operands[0]})"
    if name == "reduce_precision" and (params["exponent_bits"], params["mantissa_bits"]) == (8, 7):
        return f"rounded({operands[0]})"
    if name == "not":
        return f"not {operands[0]}" if str(old) == "bool" else f"~{operands[0]}"
    raise _NotElementwise
