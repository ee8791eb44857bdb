"""A traced function as a flat list of equations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jax_offload._program.jaxprs import (
    Atom,
    ClosedJaxpr,
    DebugInfo,
    Equation,
    Jaxpr,
    Literal,
    Var,
    branches_of,
    called_by,
    inner_of,
    jaxpr_like,
    jaxpr_of,
    nameless,
    renamed,
    run_equation,
    says_nothing_of_placement,
    variables,
    with_jaxprs,
)
from jax_offload._program.memory import Shards, Space, is_host_aval, on_host, to_device, to_host, zeros
from jax_offload._program.primitives import (
    CHEAP,
    CHECKPOINT,
    GUARD,
    MARK,
    PLACED,
    can_be_cut,
    equation_of_together,
    is_cheap,
    is_composite,
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
        eqns = [eqn for eqn in self.eqns if eqn.primitive.name in PLACED or eqn.primitive.name not in CHEAP]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in made)
        return Jaxpr([], [*read], [], eqns, self.effects, nameless(self.debug_info))

    @functools.cached_property
    def jaxpr(self) -> Jaxpr:
        """The program as an open jaxpr."""
        n, debug_info = len(self.consts), nameless(self.debug_info)
        return Jaxpr(self.inputs[:n], self.inputs[n:], self.outputs, self.eqns, self.effects, debug_info)

    @property
    def closed(self) -> ClosedJaxpr:
        """The program as a closed jaxpr."""
        return ClosedJaxpr(self.jaxpr, self.consts)

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Self]:
        """Reduce a program without constants to some results; return the inputs that it needs, and the program."""
        if any(map(can_be_cut, self.eqns)):
            jaxpr, needed = without_dead_code(self.jaxpr, used)
            eqns, outputs = jaxpr.eqns, jaxpr.outvars
        else:  # jax's own function enters every equation, which takes longer
            outputs = [*itertools.compress(self.outputs, used)]
            eqns, read = needed_for(self.eqns, variables(outputs), kept=lambda eqn: bool(eqn.effects))
            needed = [v in read for v in self.inputs]
        inputs = [*itertools.compress(self.inputs, needed)]
        return needed, dataclasses.replace(self, inputs=inputs, outputs=outputs, eqns=eqns)


@dataclasses.dataclass
class Builder:
    """A list of equations under construction.

    Attributes:
      eqns: the equations so far.
      names: variable -> the value that stands for it.
      renews: whether ``follow`` gives the equations new variables as results.
    """

    eqns: list[Equation] = dataclasses.field(default_factory=list[Equation])
    names: dict[Var, Atom] = dataclasses.field(default_factory=dict[Var, Atom])
    renews: bool = False

    def read(self, atoms: Iterable[Atom]) -> list[Atom]:
        """The values that stand for these."""
        names = self.names
        return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms] if names else [*atoms]

    def put(self, eqn: Equation, operands: list[Atom] | None = None) -> None:
        """Append an equation, which keeps its results. ``operands``: the values that stand for its operands."""
        operands = self.read(eqn.invars) if operands is None else operands
        self.eqns.append(eqn if operands == eqn.invars else eqn.replace(invars=operands))

    def copy(self, *eqns: Equation, results: Mapping[Var, Var] | None = None, line: Any = None) -> list[Equation]:
        """Append equations, whose results become ``results`` or else new variables; return all equations.

        ``line``: the traceback of all of them; by default each keeps its own.
        """
        known = results or {}
        for eqn in eqns:
            outvars = [known.get(v) or type(v)(v.aval) for v in eqn.outvars]
            source = eqn.source_info.replace(traceback=line) if line else eqn.source_info
            self.eqns.append(eqn.replace(invars=self.read(eqn.invars), outvars=outvars, source_info=source))
            self.names.update(zip(eqn.outvars, outvars, strict=True))
        return self.eqns

    def inside(self, program: Program, operands: Sequence[Atom]) -> Builder:
        """Return a builder that appends to the same equations, and knows a program's inputs by these operands."""
        consts = [Literal(x, v.aval) for v, x in zip(program.inputs, program.consts, strict=False)]
        return Builder(self.eqns, dict(zip(program.inputs, [*consts, *operands], strict=True)), renews=True)

    def follow(self, eqns: Iterable[Equation], rebuild: Rebuild | None = None, of: Set[str] | None = None) -> Builder:
        """Append equations, but ``rebuild`` those whose primitives are ``of`` these names; return the builder."""
        for eqn in eqns:
            operands = self.read(eqn.invars)
            named = of is None or eqn.primitive.name in of
            results = rebuild(self, eqn, operands) if rebuild is not None and named else None
            if results is not None:
                self.names.update(zip(eqn.outvars, results, strict=True))
            elif self.renews:
                self.copy(eqn)
            else:
                self.put(eqn, operands)
        return self

    def call(self, program: Program, operands: Sequence[Atom], rebuild: Rebuild | None = None) -> list[Atom]:
        """Append a program's equations for these operands, or what ``rebuild`` makes of them; return its results."""
        return self.inside(program, operands).follow(program.eqns, rebuild).read(program.outputs)

    def run(self, fun: Callable[..., Any], *operands: Atom, like: Equation | None = None) -> list[Atom]:
        """Append the equations of ``fun`` for these operands; return its results.

        ``like``: an equation from the same line of the user's program.
        """
        with source_info_util.user_context(like.source_info.traceback) if like else nullcontext():
            return self.call(flat(jaxpr_of(fun, *(v.aval for v in operands))[0]), operands)


# Given the builder, an equation and its operands, the results that replace the equation's; ``None``: it stays.
Rebuild = Callable[[Builder, Equation, list[Atom]], Sequence[Atom] | None]


def rebuilt(program: Program, rebuild: Rebuild, of: Set[str] | None = None) -> Program:
    """Return a program after ``rebuild`` replaced some equations, only those with primitives ``of`` these names."""
    if of is not None and not any(eqn.primitive.name in of for eqn in program.eqns):
        return program
    new = Builder().follow(program.eqns, rebuild, of)
    return dataclasses.replace(program, eqns=new.eqns, outputs=new.read(program.outputs))


def expanded(jaxpr: Jaxpr, expand: Callable[[Equation], Program | None]) -> Jaxpr:
    """An open jaxpr with programs in the place of equations, also inside others; itself where there are none.

    ``expand``: returns the program that takes an equation's place.
    """

    def rebuild(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if (program := expand(eqn)) is not None:
            return new.call(program, operands)
        if eqn.primitive.name in CHEAP:  # searching its parameters would take too long
            return None
        params = with_jaxprs(eqn.params, lambda inner: expanded(inner, expand))
        new.put(eqn if params is eqn.params else eqn.replace(params=params), operands)
        return eqn.outvars

    new = Builder().follow(jaxpr.eqns, rebuild)
    return jaxpr if new.eqns == jaxpr.eqns else jaxpr_like(jaxpr, new.eqns, new.read(jaxpr.outvars))


def decomposed(eqns: Iterable[Equation]) -> list[Equation]:
    """The equations, composite ones as those that they stand for, of the same operands and results."""
    new = Builder()
    for eqn in eqns:
        if is_composite(eqn):
            program = flat(called_by(eqn))
            results = dict(zip(variables(program.outputs), eqn.outvars, strict=True))
            new.inside(program, eqn.invars).copy(*program.eqns, results=results)
        else:
            new.put(eqn)
    return new.eqns


def as_program(jaxpr: ClosedJaxpr) -> Program:
    """Return a closed jaxpr as a program with the same equations; nothing is inlined."""
    of = jaxpr.jaxpr
    return Program([*of.constvars, *of.invars], [*of.outvars], [*of.eqns], [*jaxpr.consts], of.debug_info)


def flat(
    step: ClosedJaxpr,
    *,
    any_jit: bool = False,
    any_call: bool = False,
    opens: Callable[[Equation], bool] = lambda _: False,
) -> Program:
    """Inline the calls in a closed jaxpr, and return it as a program.

    Args:
      step: the jaxpr.
      any_jit: whether each ``jit`` is inlined, whatever it says about placement.
      any_call: whether every equation that runs a jaxpr once is inlined (checkpoints, derivatives, ``shard_map``), for
        a program that is read and does not run.
      opens: whether a ``jax.checkpoint`` is inlined, behind the barrier that keeps recomputed values apart.
    """

    def called(eqn: Equation, operands: list[Atom]) -> ClosedJaxpr | None:
        name = eqn.primitive.name
        if name == "cond":  # its branch may be known, as in a ``MultiSteps`` that never skips
            return branches_of(eqn)[int(index.val)] if isinstance(index := operands[0], Literal) else None
        plain = name in ("jit", "pjit") and not is_composite(eqn) and (any_jit or says_nothing_of_placement(eqn))
        once = name in CHECKPOINT and opens(eqn)
        if any_call and name not in ("scan", "while"):
            once = [len(inner.jaxpr.outvars) for inner in inner_of(eqn)][:1] == [len(eqn.outvars)]
        if not (plain or once or name in ("eval_jaxpr", "closed_call")):  # of references or backward passes
            return None
        found: Any = called_by(eqn)
        return found if hasattr(found, "consts") else ClosedJaxpr(found, [])  # a checkpoint's jaxpr is open

    def inline(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if eqn.primitive.name == "device_put" and len(operands) > 1:
            new.follow(_leaf_by_leaf(eqn), inline)
            return new.read(eqn.outvars)
        if eqn.primitive.name in CHEAP or (jaxpr := called(eqn, operands)) is None:
            return None
        if eqn.primitive.name in CHECKPOINT and not any_call:
            pairs = zip(operands, kept_apart(eqn), strict=True)
            apart = {v: Var(v.aval) for v in variables(v for v, kept in pairs if kept)}
            new.eqns += [equation_of_together(apart)] if apart else []
            operands = [renamed(apart, v) for v in operands]
        given = operands[len(operands) - len(jaxpr.jaxpr.invars) :]  # leave out the number of a branch
        own = [Var(v.aval) for v in jaxpr.jaxpr.constvars]
        consts.update(zip(own, jaxpr.consts, strict=True))
        return new.call(dataclasses.replace(as_program(jaxpr), consts=[]), [*own, *given], inline)

    consts, program = dict[Var, Any](), as_program(step)  # calls' constants: no rule knows rows of literals
    found, n = rebuilt(program, inline), len(program.consts)
    inputs = [*program.inputs[:n], *consts, *program.inputs[n:]]
    return dataclasses.replace(found, inputs=inputs, consts=[*program.consts, *consts.values()])


def _leaf_by_leaf(eqn: Equation) -> Iterator[Equation]:
    """Split the move of a whole tree into moves of its leaves, each with its own place."""
    ways = dict[Hashable, dict[str, Any]]()  # hundreds of leaves share a few
    for k, (x, v) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        way = {name: each[k : k + 1] for name, each in eqn.params.items()}
        yield eqn.replace(invars=[x], outvars=[v], params=ways.setdefault((*way.values(),), way))


def kept_apart(eqn: Equation) -> Sequence[bool]:
    """Say for each operand of a ``jax.checkpoint`` whether jax puts it behind a barrier when it recomputes values."""
    said: bool | tuple[bool, ...] = eqn.params["differentiated"] and eqn.params["prevent_cse"]
    return said if isinstance(said, tuple) else [said] * len(eqn.invars)


# ---- moves between memories


def _is_move(eqn: Equation, to_host: bool) -> bool:
    if eqn.primitive.name != "device_put" or not isinstance(eqn.params["devices"][0], Space):
        return False
    return is_host_aval(eqn.invars[0].aval) != to_host and is_host_aval(eqn.outvars[0].aval) == to_host


def is_load(eqn: Equation) -> bool:
    """Whether an equation moves a value from host memory to the device."""
    return _is_move(eqn, to_host=False)


def is_store(eqn: Equation) -> bool:
    """Whether an equation moves a value from the device to host memory."""
    return _is_move(eqn, to_host=True)


def without_round_trips(program: Program) -> Program:
    """Return the program without moves that change nothing, and without marks.

    A value that is loaded and stored again, or stored and loaded again, does not change. Neither does a value that gets
    the sharding it just got, as from an offload and another one inside it. A value that is loaded twice is loaded once.
    """
    same = dict[Atom, list[Var]]()  # a value -> its copies in the other memory
    placed = dict[Atom, Any]()  # result of a sharding constraint -> the constraint

    def rebuild(_: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        (x,), (v,) = operands, eqn.outvars
        if eqn.primitive.name == MARK:
            return operands
        if isinstance(x, Literal):
            return None
        if is_load(eqn) or is_store(eqn):
            if found := [y for y in same.get(x, ()) if y.aval == v.aval]:
                return found[:1]
            same[v] = [x]
            if is_load(eqn):
                same.setdefault(x, []).append(v)
        elif eqn.primitive.name != "device_put":  # a sharding constraint
            if placed.get(x) == (eqn.params, v.aval):
                return operands
            placed[v] = eqn.params, v.aval
        return None

    return rebuilt(program, rebuild, {*PLACED, MARK})


def unguarded(program: Program) -> Program:
    """Return the program without its donation guards, because whoever jits its parts adds guards again."""
    return rebuilt(program, lambda new, eqn, operands: operands, {GUARD})


# ---- programs that do the same


def structures() -> Callable[[Jaxpr], Hashable]:
    """Return a function that gives equal keys to jaxprs that differ only in the names of their variables.

    It hashes each type, setting and parameter once, because equations share them, and hashing a type takes as long as
    the rest of an equation. An unhashable one, such as an array, equals only itself.
    """
    numbers = dict[Hashable, int]()
    known = dict[int, tuple[int, Any]]()  # keeps the object, so that no other gets its id

    def number(x: Any) -> int:
        if id(x) not in known:
            try:
                known[id(x)] = numbers.setdefault((x.__class__, x), len(numbers)), x
            except TypeError:
                known[id(x)] = numbers.setdefault(id(x), len(numbers)), x
        return known[id(x)][0]

    def structure(jaxpr: Jaxpr) -> Hashable:
        names = {v: k for k, v in enumerate(jaxpr.invars)}
        found: list[Hashable] = [number(v.aval) for v in jaxpr.invars]

        def read(v: Atom) -> Hashable:
            if not isinstance(v, Literal):
                return names[v]
            is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
            return number(v.aval), number(v.val) if is_key else np.asarray(v.val).tobytes()

        for eqn in jaxpr.eqns:
            found += [eqn.primitive, number(eqn.ctx), *eqn.params, *map(number, eqn.params.values())]
            found += [len(eqn.invars), *map(read, eqn.invars)]
            for v in eqn.outvars:
                found.append(number(v.aval))
                names[v] = len(names)
        return (*found, *map(read, jaxpr.outvars))

    return structure


# ---- branches, replaced by choices
#
# ``apply_if_finite`` puts all of an update into a branch, and with it the global norm of a clip. Cut leaf by leaf,
# every part of such a branch would compute the norm of everything again, and none could run in chunks or inside a
# scan. Both branches of cheap arithmetic, and a choice for each result, stream as any other update does.


def without_branches(program: Program) -> Program:
    """Return a program that runs all branches of its ``cond``s, and chooses between their results.

    Costly equations (a matmul, a loop) still run only where their branch is taken. A ``cond`` with an effect stays.
    """
    always = rebuilt(program, _always, {"cond"})
    return program if always is program else without_round_trips(always)


def _always(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
    """Run all branches of a ``cond``, and choose between their results."""
    if eqn.effects:
        return None
    (which, *given), results = operands, list[list[Atom]]()
    branches = [rebuilt(flat(branch), _always, {"cond"}) for branch in branches_of(eqn)]
    eqns = [each for branch in branches for each in branch.eqns]
    costly = [each for each in eqns if not is_cheap(each)]
    keys = [v for each in costly for v in each.outvars if jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)]
    if costly and (len(costly) == len(eqns) or keys):
        return None
    for k, branch in enumerate(branches):

        def only_here(new: Builder, eqn: Equation, operands: list[Atom], k: int = k) -> Sequence[Atom] | None:
            """Put a costly equation into a ``cond`` of its own, with zeros in the other branches."""
            if is_cheap(eqn):
                return None
            cases: list[Callable[..., Any]] = [lambda *_: [zeros(v.aval) for v in eqn.outvars]] * len(branches)
            cases[k] = lambda *xs: run_equation(eqn, xs, eqn.params)

            def run(number: Any, *xs: Any) -> Any:
                return jax.lax.switch(number, cases, *xs)  # pyright: ignore

            return new.run(run, which, *operands, like=eqn)

        results.append(new.call(branch, given, only_here))
    return chosen(new, which, results)


def chosen(new: Builder, which: Atom, results: Sequence[Sequence[Atom]]) -> list[Atom]:
    """Choose one of several lists of values. Load values from host memory, and store the chosen ones there."""
    n, all_cases = len(results), [*zip(*results, strict=True)]
    differing = [cases for cases in all_cases if any(x is not cases[0] for x in cases)]

    def run(which: Any, *values: Any) -> list[Any]:
        made = [jax.lax.select_n(which, *map(to_device, values[k : k + n])) for k in range(0, len(values), n)]
        return [to_host(x) if on_host(case) else x for x, case in zip(made, values[::n], strict=True)]

    made = iter(new.run(run, which, *itertools.chain(*differing)))
    return [next(made) if any(x is not cases[0] for x in cases) else cases[0] for cases in all_cases]
