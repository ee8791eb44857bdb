"""Primitives: jax's by their effect on the elements of their operands, and our own.

Our own are functions that stay one equation, marks, barriers, and the guard of donated buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.tree_util import keystr  # pyright: ignore[reportUnknownVariableType]

from jax_offload._program.arrays import leaves_with_paths
from jax_offload._program.jaxprs import (
    ClosedJaxpr,
    Equation,
    Var,
    called_by,
    holds_jaxprs,
    jaxpr_of,
    jit,  # pyright: ignore[reportUnknownVariableType]
)
from jax_offload._program.memory import DEVICE_KIND, on_host, to_host
from jax_offload._program.private import (
    equation_of,
    lowered_as_barrier,
    manual_axes_of,
    nonzero,
    results_of_main,
    set_rules,
    take_back_aliases,
)

# ---- a primitive with a lowering of its own


def identity_primitive(name: str, lower: Callable[..., list[Any]]) -> Any:
    """Make a primitive that returns its operands, one result for each, and is lowered by ``lower``.

    It is linear, and derivatives pass through it, so that it is in the program of a gradient too, which may need no
    result of the function itself. Unused results are removed together with their operands.
    """
    primitive = _without_rules(name)

    def bind_all_but_zeros(tangents: Sequence[Any], *_: Any, **params: Any) -> list[Any]:
        arrays = [i for i, t in enumerate(tangents) if nonzero(t)]
        new = primitive.bind(*(tangents[i] for i in arrays), **params) if arrays else ()
        bound = dict(zip(arrays, new, strict=True))
        return [bound.get(i, t) for i, t in enumerate(tangents)]

    def derived(values: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
        return primitive.bind(*values, **params), bind_all_but_zeros(tangents, **params)

    set_rules(primitive, lower=lower, jvp=derived, transpose=bind_all_but_zeros, dce=_without_unused)
    return primitive


def _without_rules(name: str) -> Any:
    """Make a primitive that returns its operands, also under ``vmap``, and has no other rules yet."""

    def same(*values: Any, **params: Any) -> list[Any]:
        return list(values)

    def batched(values: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], Sequence[Any]]:
        return primitive.bind(*values, **params), dims

    primitive: Any = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(same)
    primitive.def_abstract_eval(same)
    set_rules(primitive, batch=batched)
    return primitive


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    eqn = rest[-1]  # jax 0.12 puts which operands are live before it
    if not any(used):
        return list(used), None
    invars, outvars = ([v for v, u in zip(vs, used, strict=True) if u] for vs in (eqn.invars, eqn.outvars))
    return list(used), eqn.replace(invars=invars, outvars=outvars)


# ---- functions that stay one equation of a program until they are lowered

_COMPOSITE = "jax_offload_composite"


def composite(fun: Callable[..., Sequence[jax.Array]], *xs: jax.Array, **static: Hashable) -> list[jax.Array]:
    """``fun(*xs, **static)``, several arrays, as one equation.

    Cutting and planning a program take as long as it has equations. An encoder has a dozen for each leaf, and only a
    chunk of the leaf needs to look into them.

    Args:
      fun: has no effects and no transfers between memories. It makes each of its results, and none twice.
      xs: arrays.
      static: the other arguments of ``fun``.
    """
    return list(_jitted(fun, tuple(sorted(static.items())))(*xs))


@functools.cache
def _jitted(fun: Callable[..., Any], static: tuple[tuple[str, Hashable], ...]) -> Callable[..., Any]:
    def run(*xs: Any) -> Any:
        return fun(*xs, **dict(static))

    run.__name__ = _COMPOSITE
    return jit(run)


def is_composite(eqn: Equation) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == _COMPOSITE


# ---- marks: equations that do nothing, and say about a value what its type does not
#
# They are found by reading the trace. A program (``_program/program``) has none, and lowering drops them.

MARK = "jax_offload_mark"


@dataclasses.dataclass(frozen=True, eq=False)
class _Said:
    """Any value as a parameter of an equation, which must be hashable."""

    what: Any


def mark(x: jax.Array, says: Any) -> jax.Array:
    """Return ``x``, marked: from here on the trace says ``says`` about it."""
    return _mark.bind(x, says=_Said(says))[0]


def mark_of(x: Any) -> Any:
    """The mark of a traced value, if its last operation was to mark it."""
    eqn = equation_of(x)
    return eqn.params["says"].what if eqn is not None and eqn.primitive is _mark else None


def marks_in(step: ClosedJaxpr) -> dict[Var, Any]:
    """Map each marked variable at the top of a closed jaxpr to its mark."""
    return {eqn.outvars[0]: eqn.params["says"].what for eqn in step.jaxpr.eqns if eqn.primitive is _mark}


def _lower_mark(context: Any, *values: Any, says: Any) -> list[Any]:
    return list(values)


_mark = identity_primitive(MARK, _lower_mark)


# ---- jax's primitives by their effect on the elements of their operands

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt
    ceil clamp clz complex conj convert_element_type copy cos cosh device_put digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg
    nextafter not optimization_barrier or population_count pow real reduce_precision rem reshard
    round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh xor""".split()
) | {MARK}
PLACED = frozenset("device_put sharding_constraint reshard".split())  # the primitives that say where a value is
# `_COMBINE` in `rules.py` joins the chunks' results of these; a primitive without an entry needs all rows at once.
REDUCE = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor reduce_prod argmax argmin".split())
CHECKPOINT = frozenset(("checkpoint", "remat2"))
SHAPES = frozenset("broadcast_in_dim iota pad reshape slice squeeze transpose".split())  # they compute nothing
_OTHERS = frozenset(  # they rearrange elements, make random ones, or belong to derivatives
    """concatenate dynamic_slice dynamic_update_slice mulhi name one_minus_square random_bits random_clone
    random_fold_in random_seed random_split random_unwrap random_wrap rev rng_bit_generator split stack threefry2x32
    tile unstack""".split()
)
CHEAP = ELEMENTWISE | REDUCE | SHAPES | _OTHERS


def can_be_cut(eqn: Equation) -> bool:
    """Whether an equation may hold equations that its results do not need."""
    return eqn.primitive.name not in CHEAP and not is_composite(eqn) and holds_jaxprs(eqn.params)


def is_cheap(eqn: Equation) -> bool:
    """Whether an equation takes about as long as its operands are read: it is no part of a pass through a network."""
    name = eqn.primitive.name
    return name in CHEAP or (name in ("jit", "pjit") and all(map(is_cheap, called_by(eqn).jaxpr.eqns)))


def is_loop(eqn: Equation) -> bool:
    return eqn.primitive.name in ("scan", "while")


# ---- barriers: a function for each use, which says what XLA would do without it
#
# Nothing comes out of an ``optimization_barrier`` before all of its operands exist, and XLA knows nothing of what
# comes out. Its outputs are to be used from then on in place of its inputs: one without used outputs is optimised
# away.

T = TypeVar("T")


def _barrier(values: Any) -> Any:
    return jax.lax.optimization_barrier(values)  # pyright: ignore[reportUnknownMemberType]


def gate(env: dict[Var, Any], held: Sequence[Var], waits_for: Sequence[Var]) -> None:
    """Make values in ``env`` wait for others: host leaves, for example, for the stores that make room for them.

    XLA's scheduler hoists every host-to-device copy to the start of a program, because nothing holds it back; then
    every loaded leaf lives until its update, and the peak is a resident state's.

    Inside ``shard_map`` only values that vary over the same axes wait for each other: jax 0.10 would make all outputs
    vary over all axes.
    """
    for varying in {manual_axes_of(env[v]) for v in held}:
        waiting, first = ([v for v in vs if manual_axes_of(env[v]) == varying] for vs in (held, waits_for))
        if first:
            names = [*waiting, *first]
            env.update(zip(names, _GATE.bind(*(env[v] for v in names)), strict=True))


def together(values: T) -> T:
    """Return the arrays of a tree so that whatever uses one of them waits for all.

    XLA's schedulers put off what only a later result asks for: the reduction of a gradient to its part of a norm, or a
    phase of an iteration beside transfers.
    """
    return _barrier(values)


def read_once(rows: Sequence[Any]) -> list[Any]:
    """Read rows of buffers on the device before they are overwritten.

    XLA copies a buffer that two of its fusions still read.
    """
    return _barrier(list(rows))


def written_after(new: Any, read: Any) -> tuple[Any, Any]:
    """Make rows that are written into a buffer wait until its other rows have been read.

    XLA copies a buffer that is read and written at the same time: all of it, in every iteration of a loop.
    """
    return _barrier((new, read))


def opaque(x: Any) -> Any:
    """Hide a number's value from XLA, which computes in advance with every value that it knows.

    XLA would unroll a loop that is known to run once, and would not update in place. It would store the zeros of a
    skipped update as a tree of their own. It would not write a choice with a known outcome over the rejected value, and
    on a TPU would copy each parameter twice. It would make a constant, with its own kernel, of every leaf's seed.
    """
    return _barrier(x)


def gate_equation() -> Equation:
    """An equation of the primitive of ``gate``, to be replaced by one with other operands and results."""
    return jaxpr_of(_GATE.bind, jax.ShapeDtypeStruct((), np.int32))[0].jaxpr.eqns[0]


def equation_of_together(values: Mapping[Var, Var]) -> Equation:
    """``together`` as an equation. ``values`` maps each operand to its result."""
    (eqn,) = jaxpr_of(together, jax.ShapeDtypeStruct((), np.int32))[0].jaxpr.eqns
    return eqn.replace(invars=list(values), outvars=list(values.values()))


def _derived(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Pass tangents through one by one; jax may have put the tangents of host leaves on the device."""
    passed = [to_host(t) if nonzero(t) and on_host(x) else t for x, t in zip(values, tangents, strict=True)]
    return _GATE.bind(*values), passed


def _lower_gate(context: Any, *values: Any) -> Sequence[Any]:
    return lowered_as_barrier(values)


def _lower_gate_for_cpu(context: Any, *values: Any) -> Sequence[Any]:
    return values  # nothing is copied there, so nothing is to be ordered


# The same as jax.lax.optimization_barrier, also by name, except for its derivatives.
_GATE = _without_rules("optimization_barrier")
set_rules(_GATE, lower=_lower_gate, lower_for_cpu=_lower_gate_for_cpu, jvp=_derived)


# ---- donation that respects memory kinds, in whatever ``jit`` an update is traced
#
# jax pairs each donated argument with a result of its shape and dtype, and XLA writes the result into the argument's
# buffer. jax means to compare memory kinds as well; but where the kind of a single argument or result is unknown (a
# result without ``out_shardings``, a NumPy batch) it ignores all kinds (``_set_up_aliases`` in
# ``jax/_src/interpreters/mlir.py``). New parameters may then be written into a moment in pinned host memory: the
# process aborts on a CPU, and memory is overwritten silently on a GPU.
#
# The pairs are attributes of the arguments of ``main``, set before its body is lowered. A lowering rule runs while
# the body is lowered, so a primitive in the body can take the pairs back: where one crosses memory kinds, all donated
# arguments are left to XLA (``jax.buffer_donor``), which knows their memories and pairs them. Programs in which no
# pair crosses stay unchanged.


def _lower(context: Any, *values: Any, names: tuple[str, ...], home: Home, where: str) -> list[Any]:
    take_back_aliases(context, DEVICE_KIND)
    check_returned(context, names, home, where)
    return list(values)


GUARD = "jax_offload_donation"
_guard = identity_primitive(GUARD, _lower)


def guarded(
    results: Any,
    given: Any = (),
    *,
    names: Sequence[str | None] | None = None,
    home: Home | None = None,
    where: str = "step",
) -> Any:
    """Return ``results``, guarded: no donated buffer of the program crosses memory kinds, and the user is warned if the
    program returns in device memory a result that is in host memory here.

    Args:
      results: a tree; the rule holds while any array of it that is new is used.
      given: the values from which the results are made. If nothing of both is in host memory, the program stays as it
        is.
      names: the path of each leaf in its state, ``None`` for a leaf of no state; by default the path in ``results``.
      home: the home of the ``offload`` whose state it is; by default of the one that was traced last.
      where: ``"init"`` where an init has made the state.
    """
    leaves, operands = jax.tree.leaves(results), jax.tree.leaves(given)
    if not any(on_host(x) for x in [*leaves, *operands]):
        return results
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    handed_on = {id(x) for x in operands}  # jax forwards these; as results they would be copied where nobody donates
    new = [i for i in arrays if id(leaves[i]) not in handed_on] or arrays
    paths = [keystr(path) for path, _ in leaves_with_paths(results)] if names is None else names
    at_home = tuple(path for path, x in zip(paths, leaves, strict=True) if path is not None and on_host(x))
    bound = _guard.bind(*(leaves[i] for i in new), names=at_home, home=home or Home.latest(), where=where)
    for i, x in zip(new, bound, strict=True):
        leaves[i] = x
    found = iter(leaves)

    def of_leaf(_: Any) -> Any:
        return next(found)

    return jax.tree.map(of_leaf, results)


# ---- where the state of one ``offload`` has been seen between updates
#
# A state is seen twice: as it comes to an update, whose types tell its memory, and where a program that returns it is
# lowered, whose results tell theirs. A ``jit`` with ``out_shardings`` that name no memory returns it on the device,
# whatever an update says. The user is told once.

_latest: list[Home] = []


class Home:
    """The facts about its state that one ``offload`` has seen.

    Attributes:
      reached: whether the state has been in host memory. A resident state that becomes an offloaded one has not.
    """

    def __init__(self) -> None:
        self.reached = False
        self._told = set[str]()

    def tell(self, what: str, where: str = "step") -> None:
        """Warn once for a step, and once for an init."""
        if where not in self._told:
            self._told.add(where)
            warnings.warn(what, stacklevel=3)

    def updates(self) -> None:
        """Note that an update of this ``offload`` is traced, so that the step returns its state next."""
        _latest[:] = [self]

    @staticmethod
    def latest() -> Home:
        """The home of the ``offload`` whose update was traced last."""
        return _latest[0] if _latest else Home()


def check_returned(context: Any, names: Sequence[str], home: Home, where: str) -> None:
    """Warn if the program that is lowered returns a leaf in device memory that belongs in host memory.

    Args:
      context: a lowering rule's context.
      names: the paths of the leaves in their state, or in a larger tree; the paths of results end with them.
      home: where the state is seen.
      where: whether a ``"step"`` or an ``"init"`` returns it.
    """
    results = [(_words(path), path, there) for path, there in results_of_main(context)]
    if sum(there for *_, there in results) >= len(names):
        return
    wanted, ends = [_words(name) for name in names], dict[tuple[str, ...], list[tuple[str, bool]]]()
    for parts, path, there in results:
        for n in {len(name) for name in wanted}:
            ends.setdefault(parts[max(len(parts) - n, 0) :], []).append((path, there))
    kept = [ends.get(name, []) for name in wanted]
    forced = [found for found in kept if found and not any(there for _, there in found)]
    if not forced:
        return
    first = forced[0][0][0]
    home.tell(
        f"offload(): {len(forced)} leaves of the optimizer state were in host memory and are returned in device memory "
        f"(the first is {first}) by a jit of the {where}, whose out_shardings name no memory kind. The "
        "whole state is on the device then, and nothing is gained. Fix: out_shardings with the shardings of "
        "jax_offload.abstract_state(tx, params) in the state's place, or None there; instead of jax.pmap, which always "
        "returns arrays so, jax.jit over a mesh. See docs/trainers.md.",
        where,
    )


def _words(path: str) -> tuple[str, ...]:
    return tuple(part for part in re.findall(r"\w+", path) if part != "value")  # nnx boxes each leaf
