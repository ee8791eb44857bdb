"""A traced function as a flat list of equations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jax_offload._program.jaxprs import (
    AXES,
    Atom,
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Equation,
    Jaxpr,
    Literal,
    Var,
    branches_of,
    called_by,
    effects_of,
    inner_of,
    jaxpr_like,
    jaxpr_of,
    nameless,
    renamed,
    says_nothing_of_placement,
    variables,
    with_jaxprs,
)
from jax_offload._program.memory import Shards, Space, is_host_aval, to_device, to_host, zeros
from jax_offload._program.primitives import (
    CHEAP,
    CHECKPOINT,
    PLACED,
    can_be_cut,
    equation_of_together,
    is_cheap,
    is_composite,
    is_guard,
    is_mark,
)
from jax_offload._program.private import without_dead_code
from jax_offload._program.propagate import needed_for


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function with nested ``jit`` inlined: ``outputs`` from ``inputs`` (constants first) by ``eqns``.

    ``shards`` says how inputs are divided between devices, as far as that is known. For a whole step it also covers
    the next values of leaves.
    """

    inputs: list[Var]
    outputs: list[Atom]
    eqns: list[Equation]
    consts: list[Any]
    debug_info: DebugInfo
    shards: Mapping[Var, Shards] = dataclasses.field(default_factory=dict[Var, Shards])

    @functools.cached_property
    def effects(self) -> frozenset[Any]:
        return frozenset[Any]().union(*(eqn.effects for eqn in self.eqns))

    @property
    def placing_equations(self) -> Jaxpr:
        """The equations that jax looks for before it lowers: transfers, shardings, callbacks. jax goes through all
        equations four times for that, and most are arithmetic."""
        eqns = [eqn for eqn in self.eqns if eqn.primitive.name in PLACED or not is_cheap(eqn)]
        return Jaxpr([], read_from_outside(eqns), [], eqns, self.effects, nameless(self.debug_info))

    @functools.cached_property
    def jaxpr(self) -> Jaxpr:
        """The program as an open jaxpr."""
        n = len(self.consts)
        inputs = self.inputs[:n], self.inputs[n:]
        return Jaxpr(*inputs, self.outputs, self.eqns, self.effects, nameless(self.debug_info))

    @property
    def closed(self) -> ClosedJaxpr:
        """The program as a closed jaxpr."""
        return ClosedJaxpr(self.jaxpr, self.consts)

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Self]:
        """Reduce a program without constants to some results; return the inputs that it needs, and the program."""
        if all(used):  # jax's own way goes into every equation, and takes twice as long
            eqns, read = needed_for(self.eqns, variables(self.outputs), kept=lambda eqn: bool(eqn.effects))
            if not any(map(can_be_cut, eqns)):
                needed, inputs = [v in read for v in self.inputs], [v for v in self.inputs if v in read]
                same = len(eqns) == len(self.eqns) and all(needed)
                return needed, self if same else dataclasses.replace(self, inputs=inputs, eqns=eqns)
        jaxpr, needed = without_dead_code(self.jaxpr, used)
        inputs, eqns = list(jaxpr.invars), list(jaxpr.eqns)
        return needed, dataclasses.replace(self, inputs=inputs, outputs=list(jaxpr.outvars), eqns=eqns)


def read_from_outside(
    eqns: Sequence[Equation], outputs: Iterable[Atom] = (), given: Set[Var] = frozenset()
) -> list[Var]:
    """The variables that equations and outputs read, and that the equations do not make; ``given`` come from others."""
    made = {v for eqn in eqns for v in eqn.outvars} - given
    read = dict.fromkeys(v for atoms in (*(eqn.invars for eqn in eqns), outputs) for v in variables(atoms))
    return [v for v in read if v not in made]


def as_program(jaxpr: ClosedJaxpr) -> Program:
    """Return a closed jaxpr as a program with the same equations; nothing is inlined."""
    inner = jaxpr.jaxpr
    inputs = [*inner.constvars, *inner.invars]
    return Program(inputs, list(inner.outvars), list(inner.eqns), list(jaxpr.consts), inner.debug_info)


def flat(
    step: ClosedJaxpr,
    *,
    any_jit: bool = False,
    any_call: bool = False,
    opens: Callable[[Equation], bool] = lambda _: False,
) -> Program:
    """A closed jaxpr as a program.

    Args:
      step: the jaxpr.
      any_jit: whether each ``jit`` is inlined, whatever it says about placement.
      any_call: whether every equation that runs a jaxpr once is inlined (checkpoints, derivatives, ``shard_map``), for
        a program that is read and does not run.
      opens: whether a ``jax.checkpoint`` is inlined, behind the barrier that keeps recomputed values apart.
    """
    eqns: list[Equation] = []
    consts: list[Any] = list(step.consts)
    const_vars: list[Var] = list(step.jaxpr.constvars)

    def walk(jaxpr: Jaxpr, names: dict[Var, Atom], nested: bool) -> list[Atom]:
        own = Builder(eqns, names)
        for eqn in jaxpr.eqns:
            ins = own.read(eqn.invars)
            inner = _run_once(eqn) if any_call else _inlinable(eqn, ins, any_jit)
            if inner is None and eqn.primitive.name in CHECKPOINT and opens(eqn):
                inner = ClosedJaxpr(eqn.params["jaxpr"], [])
                apart = kept_apart(eqn) if eqn.params["differentiated"] else ()
                if behind := {v: Var(v.aval) for v in variables(itertools.compress(ins, apart))}:
                    eqns.append(equation_of_together(behind))
                    ins = [renamed(behind, v) for v in ins]
            if inner is not None:
                ins = ins[len(ins) - len(inner.jaxpr.invars) :]  # without a cond's index
                # the same inner jaxpr may be called many times: its constants and variables get new names each time
                consts_here = [Var(v.aval) for v in inner.jaxpr.constvars]
                const_vars.extend(consts_here)
                consts.extend(inner.consts)
                scope = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*consts_here, *ins], strict=True))
                own.names.update(zip(eqn.outvars, walk(inner.jaxpr, scope, True), strict=True))
                continue
            if nested:
                own.copy(eqn)
            else:
                own.put(eqn, ins)
            if len(ins) > 1 and eqn.primitive.name == "device_put":
                eqns.extend(_leaf_by_leaf(eqns.pop()))
        return own.read(jaxpr.outvars)

    outputs = walk(step.jaxpr, {}, False)
    return Program([*const_vars, *step.jaxpr.invars], outputs, eqns, consts, step.jaxpr.debug_info)


def kept_apart(eqn: Equation) -> Sequence[bool]:
    """For each operand of a ``jax.checkpoint``, whether jax puts it behind a barrier where values are recomputed."""
    said: bool | tuple[bool, ...] = eqn.params["prevent_cse"]
    return said if isinstance(said, tuple) else (said,) * len(eqn.invars)


def _leaf_by_leaf(eqn: Equation) -> Iterator[Equation]:
    """Split the move of a whole tree into moves of its leaves, each with its own place."""
    of_leaf: dict[Any, dict[str, Any]] = {}  # a handful of ways, for hundreds of leaves
    for v, out, *said in zip(eqn.invars, eqn.outvars, *eqn.params.values(), strict=True):
        params = of_leaf.setdefault(tuple(map(id, said)), {k: (x,) for k, x in zip(eqn.params, said, strict=True)})
        yield eqn.replace(invars=[v], outvars=[out], params=params)


@dataclasses.dataclass
class Builder:
    """Equations that are being put together.

    Attributes:
      eqns: the equations so far.
      names: variable -> the value that stands for it.
    """

    eqns: list[Equation] = dataclasses.field(default_factory=list[Equation])
    names: dict[Var, Atom] = dataclasses.field(default_factory=dict[Var, Atom])

    def read(self, atoms: Iterable[Atom]) -> list[Atom]:
        """The values that stand for these."""
        names = self.names
        return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms] if names else [*atoms]

    def put(self, eqn: Equation, operands: list[Atom] | None = None) -> None:
        """Append an equation, which keeps its results. ``operands``: the values that stand for its operands."""
        ins = self.read(eqn.invars) if operands is None else operands
        self.eqns.append(eqn if all(map(operator.is_, ins, eqn.invars)) else eqn.replace(invars=ins))

    def copy(
        self, *eqns: Equation, results: Mapping[Var, Var] = MappingProxyType({}), line: Any = None
    ) -> list[Equation]:
        """Append equations, whose results become ``results`` or else new variables; return all equations.

        ``line``: the traceback of all of them; by default each keeps its own.
        """
        for eqn in eqns:
            outs = [v if isinstance(v, DropVar) else results.get(v) or Var(v.aval) for v in eqn.outvars]
            source = eqn.source_info if line is None else eqn.source_info.replace(traceback=line)
            self.eqns.append(eqn.replace(invars=self.read(eqn.invars), outvars=outs, source_info=source))
            self.names.update(zip(eqn.outvars, outs, strict=True))
        return self.eqns

    def inside(self, program: Program, operands: Sequence[Atom]) -> Builder:
        """Return a builder that appends to the same equations, and knows a program's inputs by these operands."""
        consts = [Literal(x, v.aval) for x, v in zip(program.consts, program.inputs, strict=False)]
        return Builder(self.eqns, dict(zip(program.inputs, [*consts, *operands], strict=True)))

    def call(self, program: Program, operands: Sequence[Atom]) -> list[Atom]:
        """Append a program's equations for these operands; return its results."""
        inner = self.inside(program, operands)
        inner.copy(*program.eqns)
        return inner.read(program.outputs)

    def run(self, fun: Callable[..., Any], *operands: Atom, like: Equation | None = None) -> list[Atom]:
        """Append the equations of ``fun`` for these operands; return its results.

        ``like``: an equation from the same line of the user's program.
        """
        line = nullcontext() if like is None else source_info_util.user_context(like.source_info.traceback)
        with line:
            return self.call(flat(jaxpr_of(fun, *(v.aval for v in operands))[0]), operands)


# Given the builder, an equation and its operands, the results that replace the equation's; ``None``: it stays.
Rebuild = Callable[[Builder, Equation, list[Atom]], Sequence[Atom] | None]


def rebuilt(program: Program, rebuild: Rebuild) -> Program:
    """Return a program in which other equations take the place of some."""
    new = Builder()
    for eqn in program.eqns:
        if (results := rebuild(new, eqn, operands := new.read(eqn.invars))) is None:
            new.put(eqn, operands)
        else:
            new.names.update(zip(eqn.outvars, results, strict=True))
    return dataclasses.replace(program, eqns=new.eqns, outputs=new.read(program.outputs))


def replaced(program: Program, this: Equation, run: Callable[..., Any]) -> Program:
    """``program`` with ``run`` in the place of an equation, of the same operands and results."""
    return rebuilt(program, lambda new, eqn, ins: new.run(run, *ins, like=eqn) if eqn is this else None)


def expanded(jaxpr: Jaxpr, expand: Callable[[Equation], Program | None]) -> Jaxpr:
    """An open jaxpr with programs in the place of equations, also inside others; itself where there are none.

    ``expand``: returns the program that takes an equation's place.
    """
    new = Builder()
    for eqn in jaxpr.eqns:
        if (program := expand(eqn)) is not None:
            new.names.update(zip(eqn.outvars, new.call(program, new.read(eqn.invars)), strict=True))
            continue
        cheap = eqn.primitive.name in CHEAP  # for these the search in the parameters would take longer than all else
        params = eqn.params if cheap else with_jaxprs(eqn.params, lambda inner: expanded(inner, expand))
        new.put(eqn if params is eqn.params else eqn.replace(params=params))
    same = len(new.eqns) == len(jaxpr.eqns) and all(map(operator.is_, new.eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr_like(jaxpr, new.eqns, new.read(jaxpr.outvars))


def decomposed(eqns: Iterable[Equation]) -> list[Equation]:
    """The equations, composite ones as those that they stand for, of the same operands and results."""
    new = Builder()
    for eqn in eqns:
        if is_composite(eqn):
            inner = flat(called_by(eqn))
            results = dict(zip(variables(inner.outputs), eqn.outvars, strict=True))
            new.inside(inner, eqn.invars).copy(*inner.eqns, results=results)
        else:
            new.put(eqn)
    return new.eqns


def without_effects_of_axes(program: Program) -> Program:
    """Drop the effects that jax records for collectives inside ``shard_map``: their order is free."""
    eqns = [eqn.replace(effects=frozenset(e for e in eqn.effects if type(e) not in effects_of(AXES)))
            if eqn.effects else eqn for eqn in program.eqns]  # fmt: skip
    return dataclasses.replace(program, eqns=eqns)


def without_round_trips(program: Program) -> Program:
    """The program without moves that change nothing.

    A value that is loaded and stored again untouched, or stored and loaded, is unchanged. So is a value put into the
    sharding that it was just put into: an offload and one inside it both do that. A value loaded twice is loaded once.
    A mark does nothing.
    """
    moved_from: dict[Var, Atom] = {}  # result of a move between memories -> its operand
    loaded: dict[Var, Var] = {}  # values in host memory -> the same on the device
    constrained: dict[Var, Any] = {}  # result of a sharding constraint -> the sharding

    def known(_: Builder, eqn: Equation, ins: list[Atom]) -> Sequence[Atom] | None:
        if is_mark(eqn):
            return ins
        if _is_move(eqn):
            (out,), x = eqn.outvars, ins[0]
            moved_from[out] = origin = x if isinstance(x, Literal) else moved_from.get(x, x)
            if isinstance(origin, Var) and origin.aval == out.aval and origin is not x:
                return [origin]
            if isinstance(x, Var) and is_host_aval(x.aval) and not is_host_aval(out.aval):
                if x in loaded and loaded[x].aval == out.aval:
                    return [loaded[x]]
                loaded[x] = out
        elif eqn.primitive.name in ("sharding_constraint", "reshard"):
            (out,), x, said = eqn.outvars, ins[0], (eqn.params, eqn.outvars[0].aval)
            if isinstance(x, Var) and constrained.get(x) == said:
                return [x]
            constrained[out] = said
        return None

    return rebuilt(program, known)


def _is_move(eqn: Equation) -> bool:
    return eqn.primitive.name == "device_put" and all(isinstance(d, Space) for d in eqn.params["devices"])


def is_load(eqn: Equation) -> bool:
    """Whether an equation moves a value from host memory to the device."""
    return _is_move(eqn) and is_host_aval(eqn.invars[0].aval) and not is_host_aval(eqn.outvars[0].aval)


def load_of(store: Equation) -> Equation:
    """The equation that loads what another equation has stored."""
    (h,), (v,) = store.outvars, store.invars
    (load,) = jaxpr_of(to_device, h.aval)[0].jaxpr.eqns
    return load.replace(invars=[h], outvars=[cast(Var, v)])


def is_store(eqn: Equation) -> bool:
    """Whether an equation moves a value from the device to host memory."""
    return _is_move(eqn) and is_host_aval(eqn.outvars[0].aval) and not is_host_aval(eqn.invars[0].aval)


def _run_once(eqn: Equation) -> ClosedJaxpr | None:
    """The jaxpr that an equation runs once, where its inputs and results are the equation's."""
    inner = [] if eqn.primitive.name in ("cond", "while", "scan") else inner_of(eqn)
    if not inner or len(inner[0].jaxpr.outvars) != len(eqn.outvars):
        return None
    called: Any = called_by(eqn)
    return called if hasattr(called, "consts") else ClosedJaxpr(called, [])  # a checkpoint's jaxpr is open


def _inlinable(eqn: Equation, operands: list[Atom], any_jit: bool) -> ClosedJaxpr | None:
    """The jaxpr of a nested ``jit`` that says nothing about placement, or of a ``cond`` whose branch is known.

    optax and jnp put the former around helpers; ``MultiSteps`` that never skips is the latter.
    """
    if eqn.primitive.name == "cond" and isinstance(operands[0], Literal):
        return branches_of(eqn)[int(operands[0].val)]
    if eqn.primitive.name in ("eval_jaxpr", "closed_call"):  # of a backward pass, and of mutable arrays
        return called_by(eqn)
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    inlined = not is_composite(eqn) and (any_jit or says_nothing_of_placement(eqn))
    return called_by(eqn) if inlined else None


# ---- programs that do the same


def structure(jaxpr: Jaxpr, key_of: Callable[[Any], Hashable] | None = None) -> Hashable:
    """Equal for jaxprs that differ in the names of variables only.

    ``key_of``: of types, settings and parameters; for many jaxprs one of ``numbered``.
    """
    key_of, named = key_of or _hashable, {v: k for k, v in enumerate(jaxpr.invars)}

    def read(v: Atom) -> Hashable:
        return (key_of(v.aval), np.asarray(v.val).tobytes()) if isinstance(v, Literal) else named[v]

    found: list[Hashable] = [key_of(v.aval) for v in jaxpr.invars]
    for eqn in jaxpr.eqns:
        found += [eqn.primitive, key_of(eqn.ctx), len(eqn.invars), *[read(v) for v in eqn.invars]]
        for name, value in eqn.params.items():
            found += [name, key_of(value)]
        for v in eqn.outvars:
            found.append(key_of(v.aval))
            named[v] = len(named)
    return (*found, *[read(v) for v in jaxpr.outvars])


def numbered() -> Callable[[Any], Hashable]:
    """A function that gives equal objects one number, and hashes each object once. A program's equations share types
    and parameters, and jax takes as long to hash a type as this takes for the rest of an equation."""
    indices: dict[Hashable, int] = {}
    known: dict[int, tuple[Any, int]] = {}  # with the object itself, so that nothing else gets its id

    def number(x: Any) -> int:
        if (found := known.get(id(x))) is None:
            found = known[id(x)] = x, indices.setdefault((x.__class__, _hashable(x)), len(indices))
        return found[1]

    return number


def _hashable(value: Any) -> Hashable:
    """Return a key for ``value``; a value that is not hashable, such as a jaxpr with arrays, equals only itself."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def unguarded(program: Program) -> Program:
    """The program without its donation guards, because whoever jits its parts adds guards again."""
    guards = any(map(is_guard, program.eqns))
    return rebuilt(program, lambda _, eqn, ins: ins if is_guard(eqn) else None) if guards else program


# ---- branches, replaced by choices
#
# ``apply_if_finite`` puts all of an update into a branch, and with it the global norm of a clip. Cut leaf by leaf,
# every part of such a branch would compute the norm of everything again, and none could run in chunks or inside a
# scan. Both branches of cheap arithmetic, and a choice for each result, stream as any other update does.


def without_branches(program: Program) -> Program:
    """Return a program that runs all branches of its ``cond``s, and chooses between their results.

    Costly equations (a matmul, a loop) still run only where their branch is taken. A ``cond`` with an effect stays.
    """
    if not any(eqn.primitive.name == "cond" for eqn in program.eqns):
        return program
    return without_round_trips(rebuilt(program, _chosen))


def _chosen(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
    """Choose each result of a ``cond`` from its branches' results; ``None`` for any other equation."""
    if eqn.primitive.name != "cond" or eqn.effects:
        return None
    branches = [rebuilt(flat(branch), _chosen) for branch in branches_of(eqn)]
    inner = [each for branch in branches for each in branch.eqns]
    dear = [each for each in inner if not is_cheap(each)]
    if dear and (len(dear) == len(inner) or any(map(_makes_keys, dear))):
        return None
    which, *given = operands
    results = list[list[Atom]]()
    for k, branch in enumerate(branches):
        inside = new.inside(branch, given)
        inside.copy(*(each if is_cheap(each) else _only_in(eqn, which, k, each) for each in branch.eqns))
        results.append(inside.read(branch.outputs))
    return [choice(new, which, cases) for cases in zip(*results, strict=True)]


def _makes_keys(eqn: Equation) -> bool:
    return any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars)


def _only_in(cond: Equation, which: Atom, k: int, eqn: Equation) -> Equation:
    """Put an equation of branch ``k`` of a ``cond`` into a ``cond`` of its own, with zeros in the other branches."""
    reads = list(dict.fromkeys(variables(eqn.invars)))
    inputs = [Var(v.aval) for v in reads]
    (run,) = Builder(names=dict(zip(reads, inputs, strict=True))).copy(eqn)
    taken = Program(inputs, [*run.outvars], [run], [], branches_of(cond)[0].jaxpr.debug_info).closed
    other, _ = jaxpr_of(lambda *_: [zeros(v.aval) for v in eqn.outvars], *(v.aval for v in inputs))
    branches = tuple(taken if i == k else other for i in range(len(branches_of(cond))))
    return cond.replace(invars=[which, *reads], outvars=eqn.outvars, params={**cond.params, "branches": branches})


def choice(new: Builder, which: Atom, cases: Sequence[Atom]) -> Atom:
    """Choose one of several values. Values in host memory are loaded, and the chosen one is stored."""
    first = cases[0]
    if all(x is first for x in cases):
        return first
    if not is_host_aval(first.aval):
        return new.run(jax.lax.select_n, which, *cases)[0]
    loaded = [new.run(to_device, x)[0] for x in cases]
    return new.run(to_host, *new.run(jax.lax.select_n, which, *loaded))[0]
