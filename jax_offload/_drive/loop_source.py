"""The source of a loop that does a slice's arithmetic element by element: each number is read once, and written once.

XLA's compiler for CPUs makes a pass over the arrays for each result. A loop for all of them reads less: AdamW's moves
28 bytes a parameter instead of 40. What is in it is decided by the equations, not by the optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_offload._base.jaxprs import Equation, Jaxpr, Literal, Var, closed, variables
from jax_offload._ir.program import flat

BFLOAT16 = jnp.dtype(jnp.bfloat16)
# In the loop a bfloat16 number is a float32 one, rounded after each operation, but not where the next one makes it
# float32: as XLA's CPU code does.
_TYPES = {np.dtype(t): t for t in ("float32", "int32", "uint32", "uint16", "bool")} | {BFLOAT16: "float32"}
_STORED = {BFLOAT16: "uint16"}


@dataclasses.dataclass(frozen=True)
class LoopSource:
    """A function ``kernel(start, stop, *arrays, *scalars)`` over elements of flat arrays.

    Attributes:
      text: of the function, its body by the names of ``names``.
      operands: the places of the slice's inputs that are arrays, then of those that are scalars, as the kernel takes
        them; the arrays of its results stand between, but for those that are written over an operand.
      over: result -> the input that it is written over.
      types: of the kernel's arguments after the first two, as numpy has them: ``float32[]`` is an array.
    """

    text: str
    arrays: tuple[int, ...]
    scalars: tuple[int, ...]
    over: Mapping[int, int]
    types: tuple[str, ...]


class _NoLoop(Exception):
    """An equation is not arithmetic on elements that compiles to the same numbers."""


def loop_source(jaxpr: Jaxpr, over: Mapping[int, int]) -> LoopSource | None:
    """The loop of a slice; ``None`` where an equation of it is none of elements.

    Args:
      jaxpr: of the slice, transfers and all; on the cores they are nothing.
      over: result -> input, by their places: the arrays that are written in place.
    """
    try:
        return _source(jaxpr, over)
    except _NoLoop:
        return None


def _source(jaxpr: Jaxpr, over: Mapping[int, int]) -> LoopSource:
    program = flat(closed(jaxpr), any_jit=True)
    outputs = variables(program.outputs)
    (shape, *more) = {v.aval.shape for v in outputs} or {()}
    if more or shape == () or program.consts or len(outputs) < len(program.outputs):
        raise _NoLoop
    if {v.aval.shape for v in program.inputs} - {(), shape}:
        raise _NoLoop
    arrays = tuple(i for i, v in enumerate(program.inputs) if v.aval.shape == shape)
    scalars = tuple(i for i, v in enumerate(program.inputs) if i not in arrays)
    results = tuple(k for k in range(len(outputs)) if k not in over)
    names: dict[Var, str] = {}
    unrounded: dict[Var, str] = {}
    lines: list[str] = []
    for i in arrays:
        names[program.inputs[i]] = f"x{i}"
        lines.append(f"x{i} = {_loaded(f'a{i}[i]', program.inputs[i])}")
    for i in scalars:
        names[program.inputs[i]] = f"s{i}"
        _type_of(program.inputs[i])
    for eqn in program.eqns:
        widens = eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == np.float32
        known = names | {v: unrounded[v] for v in variables(eqn.invars) if v in unrounded} if widens else names
        for v, text in zip(eqn.outvars, _result(eqn, [_operand(v, known) for v in eqn.invars]), strict=True):
            if v.aval.shape not in ((), shape):
                raise _NoLoop
            names[v] = f"v{len(names)}"
            if v.aval.dtype == BFLOAT16 and eqn.primitive.name not in _EXACT:
                unrounded[v] = f"w{len(names)}"
                lines.append(f"{unrounded[v]} = float32({text})")
                text = f"rounded({unrounded[v]})"
            lines.append(f"{names[v]} = {_type_of(v)}({text})")
    for k, v in enumerate(outputs):
        target = f"a{over[k]}" if k in over else f"r{k}"
        lines.append(f"{target}[i] = {_stored(names[v], v)}")
    taken = [*(f"a{i}" for i in arrays), *(f"r{k}" for k in results)]
    head = f"def kernel(start, stop, {', '.join([*taken, *(f's{i}' for i in scalars)])}):"
    # of each array its own part: numba then knows that no index is negative, or it does not vectorise
    parts = [f"    {name} = {name}[start:stop]" for name in taken]
    body = [f"        {line}" for line in lines]
    text = "\n".join([head, *parts, f"    for i in range({taken[0]}.size):", *body, ""])
    of_arrays = [program.inputs[i] for i in arrays] + [outputs[k] for k in results]
    types = [f"{stored_type(v.aval.dtype)}[]" for v in of_arrays]
    types += [_type_of(program.inputs[i]) for i in scalars]
    return LoopSource(text, arrays, scalars, dict(over), tuple(types))


def as_scalar(x: Any) -> Any:
    """A number as a loop takes it."""
    number = np.asarray(x)[()]
    return np.float32(number) if number.dtype == BFLOAT16 else number


def stored_type(dtype: Any) -> str:
    """numpy's name of the type in which a loop reads and writes an array."""
    return _STORED.get(dtype) or str(dtype)


def _type_of(v: Any) -> str:
    try:
        return _TYPES[v.aval.dtype]
    except (KeyError, TypeError):
        raise _NoLoop from None


def _loaded(text: str, v: Any) -> str:
    _type_of(v)
    return f"from_bfloat16({text})" if v.aval.dtype == BFLOAT16 else text


def _stored(text: str, v: Any) -> str:
    return f"to_bfloat16({text})" if v.aval.dtype == BFLOAT16 else text


def _operand(v: Any, names: Mapping[Var, str]) -> str:
    if not isinstance(v, Literal):
        return names[v]
    if np.ndim(v.val) != 0:
        raise _NoLoop
    value = np.asarray(v.val).item()
    text = repr(value) if math.isfinite(value) else f"({'nan' if value != value else 'inf' if value > 0 else '-inf'})"
    return f"{_type_of(v)}({text})"


_SAME = ("copy", "copy_p", "stop_gradient", "device_put", "broadcast_in_dim", "sharding_constraint", "reshard")
# Of floats and whole numbers alike. Comparisons with NaN are false, so maxima look for it: jax's hand it on.
_TEXTS = {
    "add": "{0} + {1}",
    "add_any": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "square": "{0} * {0}",
    "abs": "abs({0})",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "max": "{0} if ({0} > {1}) or ({0} != {0}) else {1}",
    "min": "{0} if ({0} < {1}) or ({0} != {0}) else {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shift_left": "{0} << {1}",
    "clamp": "{0} if {1} < {0} else ({2} if {1} > {2} else {1})",
} | dict.fromkeys(_SAME, "{0}")
_OF_FLOATS = {
    "div": "{0} / {1}",
    "sqrt": "sqrt({0})",
    "rsqrt": "float32(1) / sqrt({0})",
    "sign": "{0} if ({0} != {0}) or ({0} == float32(0)) else copysign(float32(1), {0})",
    "is_finite": "abs({0}) < float32(inf)",
}
# What makes no number that bfloat16 does not have.
_EXACT = {*_SAME, "select_n", "max", "min", "clamp", "neg", "abs", "sign"}
_EXACT |= {"convert_element_type", "reduce_precision", "optimization_barrier"}  # or is rounded there


def _result(eqn: Equation, operands: Sequence[str]) -> list[str]:
    name, first = eqn.primitive.name, eqn.invars[0].aval if eqn.invars else None
    if name == "optimization_barrier":
        return list(operands)
    if len(eqn.outvars) != 1 or first is None or eqn.effects:
        raise _NoLoop
    if name == "broadcast_in_dim" and first.shape not in ((), eqn.outvars[0].aval.shape):
        raise _NoLoop
    if name in _TEXTS:
        return [_TEXTS[name].format(*operands)]
    if name in _OF_FLOATS and first.dtype in (np.float32, BFLOAT16):
        return [_OF_FLOATS[name].format(*operands)]
    if name in _SPECIAL:
        return [_SPECIAL[name](eqn, operands)]
    raise _NoLoop


def _integer_pow(eqn: Equation, operands: Sequence[str]) -> str:
    y = eqn.params["y"]
    if not 1 <= y <= (2 if eqn.outvars[0].aval.dtype == BFLOAT16 else 4):  # of more, each product is rounded
        raise _NoLoop
    return " * ".join([operands[0]] * y)


def _select(eqn: Equation, operands: Sequence[str]) -> str:
    if len(operands) != 3 or eqn.invars[0].aval.dtype != bool:
        raise _NoLoop
    return f"{operands[2]} if {operands[0]} else {operands[1]}"


def _convert(eqn: Equation, operands: Sequence[str]) -> str:
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if jnp.issubdtype(old, jnp.floating) and not jnp.issubdtype(new, jnp.floating):
        raise _NoLoop  # what is out of range differs
    return f"rounded(float32({operands[0]}))" if new == BFLOAT16 and old != BFLOAT16 else operands[0]


def _bits(eqn: Equation, operands: Sequence[str]) -> str:
    if (eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) != (BFLOAT16, np.uint16):
        raise _NoLoop
    return f"to_bfloat16({operands[0]})"


def _reduce_precision(eqn: Equation, operands: Sequence[str]) -> str:
    if (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) != (8, 7):
        raise _NoLoop
    return f"rounded({operands[0]})"


def _not(eqn: Equation, operands: Sequence[str]) -> str:
    return f"not {operands[0]}" if eqn.invars[0].aval.dtype == bool else f"~{operands[0]}"


_SPECIAL: dict[str, Callable[[Equation, Sequence[str]], str]] = {
    "integer_pow": _integer_pow,
    "select_n": _select,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bits,
    "reduce_precision": _reduce_precision,
    "not": _not,
}
