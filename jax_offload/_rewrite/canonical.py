"""Rewrite equivalent forms of a step into one form, the only one that placing updates has to know.

- Mutable arrays whose life is inside the step become values.
- Updates in a branch become one that always runs, and chooses between the results of all branches.
- An update of gradients that a ``shard_map`` makes, or of parameters that it reads, moves into it.
- A loop that takes its layers by their numbers, and sums their gradients up, becomes a scan over stacked layers.
- Rows that a scan loads from host memory, or stores there, move as a whole before it, or after it.
- A scan over layers that the step itself has stacked becomes the layers one after the other.
- Two independent scans over the same layers become one scan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_offload._emit.region import Update, bound, holds_update, is_update
from jax_offload._program.jaxprs import (
    REFERENCES,
    Atom,
    ClosedJaxpr,
    DebugInfo,
    Equation,
    Literal,
    Scan,
    Var,
    branches_of,
    effects_of,
    holds,
    jax_fun,
    jaxpr_of,
    renamed,
    run_equation,
    scan_of,
    sharded_like,
    values_of,
    variables,
)
from jax_offload._program.memory import (
    is_host_aval,
    names_in,
    on_device_aval,
    to_device,
    to_host,
    typed_sharding,
)
from jax_offload._program.primitives import (
    CHECKPOINT,
    ELEMENTWISE,
    MARK,
    PLACED,
    SHAPES,
    equation_of_together,
    is_cheap,
    is_loop,
)
from jax_offload._program.private import without_references
from jax_offload._program.program import Builder, Program, as_program, chosen, flat, is_load, is_store, rebuilt
from jax_offload._program.propagate import made_of, needed_for
from jax_offload._program.slices import slice_of
from jax_offload._rewrite.inlined import with_program


def canonical(program: Program) -> Program:
    """Return the step's program in the one form, with the same inputs and results."""
    for rewrite in (
        dereferenced,
        always_updating,
        computing_on_the_device,
        opened_around_layers,
        scanning_rows,
        moving_whole_stacks,
        unrolled,
        joined,
    ):
        program = rewrite(program)
    return program


def dereferenced(program: Program, *, any_jit: bool = False) -> Program:
    """Replace the mutable arrays that live inside a program by values."""
    if not any(type(effect) in effects_of(REFERENCES) for effect in program.effects):
        return program
    return flat(without_references(program.closed), any_jit=any_jit)


def always_updating(program: Program) -> Program:
    """Move updates out of branches that hold nothing costly beside them, and choose between the branches' results.

    An update that continues from another update's state stays in its branch, and so do two that share a state, which
    would move twice.
    """
    inputs = {*program.inputs}

    def leaves_of(branch: Program) -> set[int]:
        read = {v for eqn in branch.eqns if is_update(eqn) for v in variables(eqn.invars)}
        return {k for k, v in enumerate(branch.inputs) if v in read and is_host_aval(v.aval)}

    def without_branches(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if eqn.effects or not holds_update(eqn):
            return None
        branches = [rebuilt(flat(branch), without_branches, {"cond"}) for branch in branches_of(eqn)]
        if not all(is_update(each) or is_cheap(each) for branch in branches for each in branch.eqns):
            return None
        leaves = [leaves_of(branch) for branch in branches]
        if sum(map(len, leaves)) > len(set[int]().union(*leaves)):
            return None
        which, *given = operands
        return chosen(new, which, [new.call(branch, given) for branch in branches])

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        follows = any(is_host_aval(v.aval) and v not in inputs for v in variables(operands))
        return None if follows else without_branches(new, eqn, operands)

    return rebuilt(program, rule, {"cond"})


# A scan, taken apart ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Loop:
    """A scan, taken apart so that its operands and results can change before it is put together.

    Attributes:
      scan: the scan as it was.
      eqns: the equations of its body.
      consts: each input of the body that is read whole -> the operand.
      carry: each carried input -> its first value, the value that an iteration returns, and the scan's result.
      xs: each input that is a row -> the stack.
      ys: each stacked result of the scan -> the row that an iteration makes.
    """

    scan: Scan
    eqns: list[Equation]
    consts: dict[Var, Atom]
    carry: dict[Var, tuple[Atom, Atom, Var]]
    xs: dict[Var, Atom]
    ys: dict[Var, Atom]
    debug_info: DebugInfo

    @classmethod
    def of(cls, eqn: Equation, operands: Sequence[Atom], *, opened: bool = False) -> Loop | None:
        """Take an equation apart, if it is a scan. ``opened``: whether each ``jax.checkpoint`` inside is inlined."""
        if (scan := scan_of(eqn)) is None:
            return None
        body = flat(scan.body, opens=lambda _: opened)
        inputs = [Var(v.aval) for v in scan.body.jaxpr.invars]
        new = Builder().inside(body, inputs)  # new variables, since two scans may have one body
        eqns, outputs = new.copy(*body.eqns), new.read(body.outputs)
        (of_consts, of_carry, of_xs), (consts, init, xs) = scan.parted(inputs), scan.parted(operands)
        m = len(init)
        carry = dict(zip(of_carry, zip(init, outputs[:m], scan.carry, strict=True), strict=True))
        whole, rows = dict(zip(of_consts, consts, strict=True)), dict(zip(of_xs, xs, strict=True))
        ys = dict(zip(scan.ys, outputs[m:], strict=True))
        return cls(scan, eqns, whole, carry, rows, ys, body.debug_info)

    @property
    def body(self) -> Program:
        """Return the equations that an iteration needs; ``consts``, the carry and a row of each stack are inputs."""
        eqns, _ = needed_for(self.eqns, variables(self.returned), kept=lambda eqn: bool(eqn.effects))
        return Program([*self.consts, *self.carry, *self.xs], self.returned, eqns, [], self.debug_info)

    @property
    def returned(self) -> list[Atom]:
        """The results of an iteration."""
        return [*(new for _, new, _ in self.carry.values()), *self.ys.values()]

    def renew(self, eqns: list[Equation], returned: Sequence[Atom]) -> None:
        """Change the equations of the body, and what an iteration returns."""
        self.eqns, made = eqns, iter(returned)
        self.carry = {v: (first, next(made), out) for v, (first, _, out) in self.carry.items()}
        self.ys = {y: next(made) for y in self.ys}

    def put(self, new: Builder) -> None:
        """Append the changed scan. Its results replace those of the original scan."""
        body = jax_fun(self.body.closed)
        n, m = len(self.consts), len(self.consts) + len(self.carry)

        def run(*given: Any) -> list[Any]:
            carry, ys = self.scan.run(body, given[:n], given[n:m], given[m:])
            return [*carry, *ys]

        init = [first for first, _, _ in self.carry.values()]
        results = new.run(run, *self.consts.values(), *init, *self.xs.values(), like=self.scan.eqn)
        new.names.update(zip([*(out for *_, out in self.carry.values()), *self.ys], results, strict=True))


def _with_loops(program: Program, change: Callable[[Builder, Loop], bool], *, opened: bool = False) -> Program:
    """Return the program with changed scans. ``change`` appends a new form of a scan and returns True, or False."""

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        loop = Loop.of(eqn, operands, opened=opened)
        return new.read(eqn.outvars) if loop is not None and change(new, loop) else None

    return rebuilt(program, rule, {"scan"})


# Parameters in host memory ------------------------------------------------------------------------------------------

_ARITHMETIC = ELEMENTWISE - PLACED - {"optimization_barrier", MARK}


def computing_on_the_device(program: Program) -> Program:
    """Run elementwise arithmetic on arrays in host memory, such as the sum of parameters and updates, on the device."""

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if not is_host_aval(eqn.outvars[0].aval):
            return None
        if not eqn.outvars[0].aval.shape or not all(is_host_aval(v.aval) for v in operands if v.aval.shape):
            return None

        def run(*xs: Any) -> list[Any]:
            return [to_host(x) for x in run_equation(eqn, [to_device(x) for x in xs], eqn.params)]

        return new.run(run, *operands, like=eqn)

    return rebuilt(program, rule, _ARITHMETIC)


def made_cheaply(eqns: Iterable[Equation], start: Iterable[Var] = ()) -> set[Var]:
    """Return ``start``, the values that are loaded whole from host memory, and cheap functions of both."""
    found = {*start}
    for eqn in eqns:
        ins = variables(eqn.invars)
        if is_load(eqn) or (ins and eqn.primitive.name in ELEMENTWISE | SHAPES and found.issuperset(ins)):
            found.update(eqn.outvars)
    return found


def _barrier_without(layers: Set[Var], new: Builder, eqn: Equation, operands: Sequence[Atom]) -> list[Atom]:
    """Append the barrier that keeps recomputed values apart, without the layers that need not be recomputed."""
    kept = {x: v for x, v in zip(operands, eqn.outvars, strict=True) if isinstance(x, Var) and x not in layers}
    if kept:
        new.eqns.append(equation_of_together(kept))
    return [renamed(kept, x) for x in operands]


def opened_around_layers(program: Program) -> Program:
    """Inline each ``jax.checkpoint`` that contains a scan over rows of parameters, such as one around a whole loss."""
    updates = [eqn for eqn in program.eqns if is_update(eqn)]  # the body of a loop has none
    read = {v for eqn in updates for v in variables(eqn.invars)} if updates else {*program.inputs}
    made = {v for eqn in updates for v in eqn.outvars}
    layers = made_cheaply(program.eqns, read & {*program.inputs} | made)

    def scans_over_layers(eqn: Equation) -> bool:
        if eqn.primitive.name not in CHECKPOINT or layers.isdisjoint(variables(eqn.invars)):
            return False
        body = flat(ClosedJaxpr(eqn.params["jaxpr"], []), opens=lambda _: True)
        inside = {v for v, x in zip(body.inputs, eqn.invars, strict=True) if isinstance(x, Var) and x in layers}
        inside = made_cheaply(body.eqns, inside)
        return any(not inside.isdisjoint(variables(scan.xs)) for scan in filter(None, map(scan_of, body.eqns)))

    around = {id(eqn) for eqn in program.eqns if scans_over_layers(eqn)}
    known = {v for eqn in program.eqns for v in eqn.outvars}

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        return None if not known.isdisjoint(eqn.outvars) else _barrier_without(layers, new, eqn, operands)

    if not around:
        return program
    return rebuilt(flat(program.closed, opens=lambda eqn: id(eqn) in around), rule, {"optimization_barrier"})


def moving_whole_stacks(program: Program) -> Program:
    """Take the moves of rows between memories out of scans, and the rows that an iteration makes of leaves alone.

    No step should load its parameters as a whole before the passes, but in this form a plan sees which rows a scan
    reads. A scan over the layers of an ``nnx`` module returns their parameters, unchanged, beside its own results.
    """
    readers = [{*variables(eqn.invars)} for eqn in program.eqns if eqn.primitive.name == "scan"]
    leaves = {v for v in program.inputs if is_host_aval(v.aval)}

    def change(new: Builder, loop: Loop) -> bool:
        readers.pop(0)
        # a policy of jax.checkpoint sends activations to host memory, where another scan reads them
        activations = set[Var]().union(*readers) & loop.ys.keys()
        of_leaves = made_cheaply(new.eqns, leaves)
        stack_of = {v: x for v, x in loop.xs.items() if isinstance(x, Var) and x in of_leaves}
        if not stack_of and not any(is_host_aval(y.aval) for y in loop.ys.keys() - activations):
            return False
        on_device = {v: Var(on_device_aval(v.aval)) if is_host_aval(v.aval) else v for v in stack_of}
        rows, body = {*on_device.values()}, Builder(names={**on_device})
        stored = dict[Var, Atom]()
        for eqn in loop.eqns:
            ins = body.read(eqn.invars)
            if eqn.primitive.name == "optimization_barrier":
                body.names.update(zip(eqn.outvars, _barrier_without(rows, body, eqn, ins), strict=True))
            elif is_load(eqn) and not is_host_aval(ins[0].aval):
                body.names[eqn.outvars[0]] = ins[0]
            elif any(is_host_aval(v.aval) != is_host_aval(x.aval) for x, v in zip(ins, eqn.invars, strict=True)):
                return False  # it needs a row in host memory
            else:
                body.put(eqn, ins)
                stored |= {eqn.outvars[0]: ins[0]} if is_store(eqn) else {}
        loop.renew(body.eqns, body.read(loop.returned))
        if any(is_host_aval(v.aval) != is_host_aval(made.aval) for v, (_, made, _) in loop.carry.items()):
            return False
        cheap = made_cheaply((eqn for eqn in loop.eqns if not is_load(eqn)), rows)
        again = {y: v for y, v in loop.ys.items() if isinstance(v, Var) and v in cheap}
        loop.ys = {y: v if y in activations else renamed(stored, v) for y, v in loop.ys.items() if y not in again}
        if any(is_host_aval(v.aval) for y, v in loop.ys.items() if y not in activations):
            return False
        if not (again or stored or rows - on_device.keys()):
            return False
        wholes = {on_device[v]: new.run(to_device, x)[0] if is_host_aval(x.aval) else x for v, x in stack_of.items()}
        leaf_of = dict(zip(wholes.values(), stack_of.values(), strict=True))
        loop.xs = {v: x for v, x in loop.xs.items() if v not in stack_of} | wholes
        loop.put(new)
        for y, v in again.items():
            made = slice_of(needed_for(loop.eqns, [v])[0], [v], loop.debug_info, {})
            stacks = [wholes[x] for x in made.inputs]
            (new.names[y],) = new.run(lambda *xs, made=made: jax.vmap(made.run)(*xs), *stacks, like=loop.scan.eqn)
        for y in loop.scan.ys:
            if is_host_aval(y.aval) and not is_host_aval((x := new.names[y]).aval):
                new.names[y] = leaf_of[x] if x in leaf_of else new.run(to_host, x)[0]
        return True

    return _with_loops(program, change, opened=True)


# Layers by their numbers -------------------------------------------------------------------------------------------


def scanning_rows(program: Program) -> Program:
    """Scan over rows where a scan reads rows of a whole array, or adds rows to a sum, by its iteration's number."""

    def change(new: Builder, loop: Loop) -> bool:
        if loop.scan.length < 2 or any(eqn.effects for eqn in loop.eqns):
            return False
        taken, summed = _rows_taken(loop), _rows_summed(loop, new.eqns)
        starts = [eqn.invars[1:] for each in taken.values() for eqn in each]
        starts += [placed.invars[2:] for placed in summed.values()]
        if not starts or not _are_numbers(loop, new.eqns, starts):
            return False
        body = Builder()
        for v, slices in taken.items():
            (of_row,) = jaxpr_of(lambda rows: rows[0], slices[0].outvars[0].aval)[0].out_avals
            loop.xs[row := Var(of_row)] = loop.consts.pop(v)
            body.names |= dict.fromkeys((eqn.outvars[0] for eqn in slices), body.run(lambda row: row[None], row)[0])
        for eqn in loop.eqns:
            if eqn.outvars[0] not in body.names:
                body.put(eqn)
        for v, placed in summed.items():
            *_, out = loop.carry.pop(v)
            (loop.ys[out],) = body.run(lambda rows: rows[0], *body.read([placed.invars[1]]))
        loop.renew(body.eqns, body.read(loop.returned))
        loop.put(new)
        return True

    return _with_loops(program, change)


def _rows_taken(loop: Loop) -> dict[Var, list[Equation]]:
    """Map each array that the body reads only row by row to the equations that read its rows."""
    readers: dict[Var, list[Equation]] = {v: [] for v in loop.consts if v not in variables(loop.returned)}
    for eqn in loop.eqns:
        for v in {*variables(eqn.invars)} & readers.keys():
            readers[v].append(eqn)

    def is_row(eqn: Equation, v: Var) -> bool:
        if eqn.primitive.name != "dynamic_slice" or v in eqn.invars[1:]:
            return False
        return _has_rows(v, eqn.params["slice_sizes"], loop.scan.length)

    return {v: eqns for v, eqns in readers.items() if eqns and all(is_row(eqn, v) for eqn in eqns)}


def _rows_summed(loop: Loop, before: Sequence[Equation]) -> dict[Var, Equation]:
    """Map each carried sum that begins with zeros, and to which the body adds nothing but a row among zeros, to the
    equation that places this row."""
    maker = {v: eqn for eqn in loop.eqns for v in eqn.outvars}
    uses = Counter(v for eqn in loop.eqns for v in variables(eqn.invars)) + Counter(variables(loop.returned))
    found = dict[Var, Equation]()
    for v, (first, total, _) in loop.carry.items():
        add = None if isinstance(total, Literal) else maker.get(total)
        if add is None or add.primitive.name not in ("add", "add_any") or v not in add.invars:
            continue
        placed = next((maker[x] for x in variables(add.invars) if x in maker), None)
        if placed is None or placed.primitive.name != "dynamic_update_slice":
            continue
        zeros, row, *_ = placed.invars
        alone = all(uses[x] == 1 for x in variables([v, total, *placed.outvars]))
        if not alone or not _is_zeros(first, before):
            continue
        if _has_rows(zeros, row.aval.shape, loop.scan.length) and _is_zeros(zeros, loop.eqns):
            found[v] = placed
    return found


def _has_rows(whole: Atom, row: Sequence[int], length: int) -> bool:
    return whole.aval.shape[:1] == (length,) and tuple(row) == (1, *whole.aval.shape[1:])


def _is_zeros(x: Atom, eqns: Sequence[Equation]) -> bool:
    if isinstance(x, Literal):
        return not np.any(x.val)
    made = next((eqn for eqn in eqns if x in eqn.outvars), None)
    return made is not None and made.primitive.name == "broadcast_in_dim" and _is_zeros(made.invars[0], ())


def _are_numbers(loop: Loop, before: Sequence[Equation], starts: Sequence[Sequence[Atom]]) -> bool:
    """Whether all of these indices, where rows begin in the body of a loop, are the iteration's number and then zeros.

    They depend on no argument of the step, so they are computed here.
    """
    starting = list(dict.fromkeys(v for each in starts for v in variables(each)))
    ys, probe = [Var(v.aval) for v in starting], Builder([*before])
    dataclasses.replace(loop, ys=dict(zip(ys, starting, strict=True))).put(probe)
    results = variables(probe.read(ys))
    whole = slice_of(needed_for(probe.eqns, results)[0], results, loop.debug_info, {})
    if whole.inputs or (constant := jaxpr_of(whole.run)[0]).effects:  # an effect: another number on each device
        return False
    with jax.ensure_compile_time_eval():
        value_of: dict[Atom, Any] = dict(zip(starting, map(np.asarray, jax_fun(constant)()), strict=True))
    numbers = np.arange(loop.scan.length)

    def is_constant(x: Atom, wanted: Any) -> bool:
        return bool(np.all((x.val if isinstance(x, Literal) else value_of[x]) == wanted))

    return all(is_constant(k, numbers) and all(is_constant(x, 0) for x in zeros) for k, *zeros in starts)


# Layers that the step has stacked ------------------------------------------------------------------------------------

_MOST_UNROLLED = 256


def unrolled(program: Program) -> Program:
    """Unroll the scans over stacks of parameters. Scans over stacks of batches stay."""
    layers = _layers(program)
    rows: dict[Atom, Sequence[Atom]] = {}  # a stack -> its rows, which are read instead

    def rows_of(x: Atom) -> Sequence[Atom]:
        return () if isinstance(x, Literal) else rows.get(x, ())

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        name, in_rows = eqn.primitive.name, eqn.params.get("axis") == 0
        if (
            name == "stack"
            and in_rows
            and len(operands) <= _MOST_UNROLLED
            and all(v in layers for v in variables(eqn.invars))
        ):
            rows[eqn.outvars[0]] = operands
        if name == "unstack" and in_rows:
            return rows_of(operands[0]) or None
        loop = Loop.of(eqn, operands) if any(map(rows_of, operands)) else None
        if loop is None or not any(map(rows_of, loop.xs.values())):
            return None
        carry, ys = [first for first, *_ in loop.carry.values()], list[list[Atom]]()
        order = -1 if loop.scan.reverse else 1
        for k in range(loop.scan.length)[::order]:
            row = [rows_of(x)[k] if rows_of(x) else new.run(lambda x, k=k: x[k], x)[0] for x in loop.xs.values()]
            results = new.call(loop.body, [*loop.consts.values(), *carry, *row])
            carry, made = results[: len(carry)], results[len(carry) :]
            ys.append(made)
        for y, made in zip(loop.ys, zip(*ys[::order], strict=True), strict=True):
            (new.names[y],) = stack = variables(new.run(lambda *xs: jnp.stack(xs), *made))
            rows[stack[0]] = made
        return [*carry, *new.read(loop.ys)]

    return rebuilt(program, rule, {"stack", "unstack", "scan"})


def _layers(program: Program) -> dict[Var, Var]:
    """Map the arguments of the step that an update reads, and casts of them, to the arguments."""
    read = {v for eqn in program.eqns if is_update(eqn) for v in variables(eqn.invars)}
    found = {v: v for v in program.inputs if v in read}
    for eqn in program.eqns:
        if eqn.primitive.name == "convert_element_type" and isinstance(v := eqn.invars[0], Var) and v in found:
            found[eqn.outvars[0]] = found[v]
    return found


# Two scans over the same layers ------------------------------------------------------------------------------------


def joined(program: Program) -> Program:
    """Join each scan with the next loop, if both run over the rows of one array and neither needs the other.

    Two passes through one network become one, as in a siamese network, or for the chosen and the rejected answers of
    DPO. One iteration then computes for as long as both, and makes the sum of both gradients.
    """
    loops = [at for at, eqn in enumerate(program.eqns) if holds(eqn, is_loop)]
    for at, after in itertools.pairwise(loops):
        if (both := _both(program, at, after)) is not None:
            return joined(both)
    return program


def _both(program: Program, at: int, after: int) -> Program | None:
    """Return the program with one scan in place of the scans ``at`` and ``after``; ``None`` if they are not alike."""
    eqns, layers = program.eqns, _layers(program)
    one, other = (Loop.of(eqns[k], eqns[k].invars) for k in (at, after))
    if one is None or other is None:
        return None
    (n, reverse, unroll), others = ((each.scan.length, each.scan.reverse, each.scan.unroll) for each in (one, other))
    read, also_read = ({layers[v] for v in variables(each.xs.values()) if v in layers} for each in (one, other))
    before, _ = needed_for(eqns[at:after], variables(eqns[after].invars))
    moved = {*map(id, before)}
    if (n, reverse, unroll) != others or read.isdisjoint(also_read) or id(eqns[at]) in moved:
        return None
    if any(eqn.effects for eqn in (*before, eqns[at], eqns[after])):
        return None
    new = Builder([*eqns[:at], *before])
    dataclasses.replace(
        one,
        eqns=one.eqns + other.eqns,
        consts=one.consts | other.consts,
        carry=one.carry | other.carry,
        xs=one.xs | other.xs,
        ys=one.ys | other.ys,
    ).put(new)
    for eqn in eqns[at + 1 :]:
        if eqn is not eqns[after] and id(eqn) not in moved:
            new.put(eqn)
    return dataclasses.replace(program, eqns=new.eqns, outputs=new.read(program.outputs))


# Updates beside a shard_map -----------------------------------------------------------------------------------------


def inside_shard_maps(program: Program) -> Program:
    """Move updates into the ``shard_map`` that makes their gradients, or that reads what they make, where each device
    has whole parameters. Parameters move between memories inside it, too, where scans can load their rows."""
    around = {at: eqn for at, eqn in enumerate(program.eqns) if eqn.primitive.name == "shard_map" and _is_manual(eqn)}
    found = ((at, find(program, at)) for find in (_after_shard_map, _before_shard_map) for at in around)
    host, moved = next((each for each in found if each[1]), (None, []))
    if host is None and any(holds_update(eqn) and eqn.primitive.name != "shard_map" for eqn in program.eqns):
        return program
    for at, eqn in reversed(around.items()):  # the equations of the ones before it stay the same objects
        program = _with_inside(program, eqn, moved if at == host else [])
    return program


def _is_manual(this: Equation) -> bool:
    """Whether a ``shard_map`` divides over all axes of its mesh, and types say nothing more about its results."""
    axes = {*this.params["mesh"].axis_names}
    return this.params["newly_manual_axes"] == axes and not any(typed_sharding(v.aval) for v in this.outvars)


def _after_shard_map(program: Program, at: int) -> list[Equation]:
    """Find the updates of the gradients that a ``shard_map`` makes, and the equations between them and it.

    All of them compute the same on every device, from values that are whole there.
    """
    this = program.eqns[at]
    divided = {v for v, spec in zip(this.outvars, this.params["out_specs"], strict=True) if any(spec)}
    made, stays, found = {*this.outvars} - divided, divided, list[Equation]()
    for eqn in program.eqns[at + 1 :]:
        ins = {*variables(eqn.invars)}
        if not stays.isdisjoint(ins) or (not made.isdisjoint(ins) and not _moves(eqn, this)):
            stays.update(eqn.outvars)
        elif not made.isdisjoint(ins):
            made.update(eqn.outvars)
            found.append(eqn)
    return needed_for(found, {v for eqn in found if is_update(eqn) for v in eqn.outvars})[0]


def _before_shard_map(program: Program, at: int) -> list[Equation]:
    """Find the updates with which a step begins, if a ``shard_map`` reads what they make whole, the equations between
    them and it, and the last arithmetic on their gradients."""
    this, eqns = program.eqns[at], program.eqns[:at]
    made = made_of(eqns, is_update)
    found = [eqn for eqn in eqns if not made.isdisjoint(eqn.outvars)]
    specs = zip(this.invars, this.params["in_specs"], strict=True)
    read = {v: any(spec) for v, spec in specs if isinstance(v, Var) and v in made}
    if not read or any(read.values()) or not all(_moves(eqn, this) for eqn in found):
        return []
    updates = [eqn for eqn in found if is_update(eqn)]
    gradients = [v for eqn in updates for v in eqn.params["update"].gradients]
    first, _ = needed_for(eqns, gradients, lambda eqn: eqn.primitive.name in ELEMENTWISE and not eqn.effects)
    after, _ = needed_for(found, {*read, *(v for eqn in updates for v in eqn.outvars)})
    wanted = {*map(id, first), *map(id, after)}
    return [eqn for eqn in eqns if id(eqn) in wanted]


def _moves(eqn: Equation, this: Equation) -> bool:
    """Whether an equation may run inside a ``shard_map`` on whole values."""
    if is_update(eqn):
        return _is_whole(eqn.params["update"], this.params["newly_manual_axes"])
    return is_cheap(eqn) and not eqn.effects


def _is_whole(update: Update, manual: Set[str]) -> bool:
    """Whether each device is known to hold all operands of an update whole."""
    for options in update.options:
        specs = [s.spec if isinstance(s, NamedSharding) else None for s in options.shardings.values()]
        if options.partitions or options.unknown or not specs or None in specs:
            return False
        if any(not manual.isdisjoint(names_in(entry)) for spec in specs for entry in spec or ()):
            return False
    return not update.driven


def _with_inside(program: Program, this: Equation, moved: Sequence[Equation]) -> Program:
    """Return the program with equations ahead of a ``shard_map``, or behind it, inside of it: those ``moved``, which
    compute with whole values, the loads of what it reads, and the stores of what it makes."""
    at, whole = next(k for k, eqn in enumerate(program.eqns) if eqn is this), PartitionSpec()
    ahead, gone = {*map(id, program.eqns[:at])}, {id(this), *map(id, moved)}
    inside = {v for eqn in moved for v in eqn.outvars}
    leaf_of = {eqn.outvars[0]: eqn.invars[0] for eqn in program.eqns if is_load(eqn)}
    uses = Counter(v for eqn in program.eqns if id(eqn) not in gone for v in {*variables(eqn.invars)})
    uses.update(variables(program.outputs))
    stores = [(v, eqn) for eqn in program.eqns if is_store(eqn) for v in variables(eqn.invars) if uses[v] == 1]
    spec_of = dict.fromkeys(inside, whole) | dict(zip(this.outvars, this.params["out_specs"], strict=True))
    results = [v for v in spec_of if uses[v]]
    stored = {v: eqn for v, eqn in stores if v in spec_of}
    # a value is passed once, or new parameters could not overwrite the old ones
    operands = dict[tuple[Any, str], tuple[Atom, PartitionSpec]]()

    def key_of(v: Atom, spec: PartitionSpec) -> tuple[Any, str]:
        x = renamed(leaf_of, v)
        key = id(x), str(spec)
        operands.setdefault(key, (x, spec))
        return key

    specs = zip(this.invars, this.params["in_specs"], strict=True)
    passed = [(v, None if {*variables([v])} & inside else key_of(v, spec)) for v, spec in specs]
    read = [v for eqn in moved for v in variables(eqn.invars)]
    others = [(v, key_of(v, whole)) for v in read if v not in inside and v not in this.outvars]
    loads = any(v is not operands[key][0] for v, key in (*passed, *others) if key is not None)
    if not (moved or loads or stored):
        return program
    body = jax_fun(ClosedJaxpr(this.params["jaxpr"], []))

    def run(*given: Any) -> list[Any]:
        value_of = dict(zip(operands, given, strict=True))

        def value(v: Atom, key: tuple[Any, str]) -> Any:
            return value_of[key] if v is operands[key][0] else to_device(value_of[key])

        env = {v: value(v, key) for v, key in others}
        _evaluate((eqn for eqn in moved if id(eqn) in ahead), env)
        made = body(*(value(v, key) if key else values_of(env, [v])[0] for v, key in passed))
        env.update(zip(this.outvars, made, strict=True))
        _evaluate((eqn for eqn in moved if id(eqn) not in ahead), env)
        return [to_host(env[v]) if v in stored else env[v] for v in results]

    specs = {"in_specs": [spec for _, spec in operands.values()], "out_specs": [spec_of[v] for v in results]}
    given = [v for v, _ in operands.values()]
    late = made_of(program.eqns, lambda eqn: id(eqn) in gone)
    front = {id(eqn) for eqn in program.eqns[:at] if late.isdisjoint(variables(eqn.invars))}
    front = {*front, *map(id, needed_for(program.eqns, variables(given))[0])} - gone
    new = Builder([eqn for eqn in program.eqns if id(eqn) in front])
    made = new.run(sharded_like(this.replace(params=this.params | specs), run), *given, like=this)
    new.names.update(zip((stored[v].outvars[0] if v in stored else v for v in results), made, strict=True))
    gone |= front | {*map(id, stored.values())}
    for eqn in program.eqns:
        if id(eqn) not in gone:
            new.put(eqn)
    outputs = new.read(program.outputs)
    wanted = {*variables(outputs), *(v for eqn in new.eqns for v in variables(eqn.invars))}
    new.eqns = [eqn for eqn in new.eqns if not is_load(eqn) or eqn.outvars[0] in wanted]
    return dataclasses.replace(program, eqns=new.eqns, outputs=outputs)


def _evaluate(eqns: Iterable[Equation], env: dict[Var, Any]) -> None:
    """Run equations inside a ``shard_map``, where nothing divides values further."""
    for eqn in eqns:
        given = values_of(env, eqn.invars)
        if is_update(eqn):
            given = bound(_retraced(eqn.params["update"], given), given)
        elif eqn.primitive.name != "sharding_constraint":
            given = run_equation(eqn, given, eqn.params)
        env.update(zip(eqn.outvars, given, strict=True))


def _retraced(update: Update, given: Sequence[Any]) -> Update:
    """Return an update for the inside of a ``shard_map``, where types differ."""
    old = update.program

    def run(*operands: Any) -> list[Any]:
        env = dict(zip(old.inputs, [*old.consts, *operands], strict=True))
        _evaluate(old.eqns, env)
        return values_of(env, old.outputs)

    new = as_program(jaxpr_of(run, *given)[0])
    names = dict(zip(update.operands, new.inputs[len(new.consts) :], strict=True))
    names |= {v: x for v, x in zip(old.outputs, new.outputs, strict=True) if isinstance(v, Var)}
    return dataclasses.replace(with_program(update, new, names), manual=True, take_turns=False)
