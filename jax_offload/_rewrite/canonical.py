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
    Equation,
    Literal,
    Scan,
    Var,
    branches_of,
    effects_of,
    holds,
    holds_inside,
    jax_fun,
    jaxpr_of,
    renamed,
    run_equation,
    scan_of,
    sharded_like,
    values_of,
    variables,
)
from jax_offload._program.memory import is_host_aval, names_in, to_device, to_host, typed_sharding
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
from jax_offload._program.program import (
    Builder,
    Program,
    chosen,
    flat,
    is_load,
    is_store,
    kept_apart,
    rebuilt,
)
from jax_offload._program.propagate import Node, made_of, needed_for, topological
from jax_offload._program.slices import slice_of
from jax_offload._rewrite.inlined import with_program

WHOLE = PartitionSpec()
_ARITHMETIC = ELEMENTWISE - PLACED - {"optimization_barrier", MARK}


def canonical(program: Program) -> Program:
    """Return the step's program in the one form, with the same inputs and results."""
    program = always_updating(dereferenced(program))
    program = opened_around_layers(computing_on_the_device(program))
    return joined(unrolled(scanning_rows(program)))


def dereferenced(program: Program, *, any_jit: bool = False) -> Program:
    """Replace the mutable arrays that live inside a program by values."""
    if effects_of(REFERENCES).isdisjoint(map(type, program.effects)):
        return program
    return flat(without_references(program.closed), any_jit=any_jit)


def always_updating(program: Program) -> Program:
    """Move updates out of branches that hold nothing costly beside them, and choose between the branches' results.

    An update that continues from another update's state stays in its branch, and so do two that share a state, which
    would move twice.
    """

    def always(new: Builder, eqn: Equation, operands: list[Atom]) -> list[Atom] | None:
        if eqn.primitive.name != "cond" or eqn.effects or not holds_update(eqn):
            return None
        inside, (which, *given) = Builder(), operands
        results = [inside.call(flat(branch), given, always) for branch in branches_of(eqn)]
        updates = [each for each in inside.eqns if is_update(each)]
        leaves = [v for each in updates for v in variables(each.invars) if is_host_aval(v.aval)]
        once = len({*leaves}) == len(leaves) and {*program.inputs}.issuperset(leaves)
        if not once or not all(is_update(each) or is_cheap(each) for each in inside.eqns):
            return None
        new.eqns += inside.eqns
        return chosen(new, which, results)

    return rebuilt(program, always, {"cond"})


# ---- a scan, taken apart


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

    @classmethod
    def of(cls, eqn: Equation, operands: Sequence[Atom], *, opened: bool = False) -> Loop | None:
        """Take an equation apart, if it is a scan. ``opened``: whether each ``jax.checkpoint`` inside is inlined."""
        scan = scan_of(eqn)
        if scan is None:
            return None
        program = flat(scan.body, opens=lambda _: opened)
        inputs = [Var(v.aval) for v in scan.body.jaxpr.invars]  # new, since two scans may have one body
        inside = Builder().inside(program, inputs)
        eqns, returned = inside.copy(*program.eqns), inside.read(program.outputs)
        parts = zip(scan.parted(inputs), scan.parted(operands), strict=True)
        consts, init, xs = (dict(zip(*part, strict=True)) for part in parts)
        carried = zip(init.values(), returned[: len(init)], scan.carry, strict=True)
        ys = dict(zip(scan.ys, returned[len(init) :], strict=True))
        return cls(scan, eqns, consts, dict(zip(init, carried, strict=True)), xs, ys)

    @property
    def returned(self) -> list[Atom]:
        """The results of an iteration."""
        return [*(last for _, last, _ in self.carry.values()), *self.ys.values()]

    @property
    def body(self) -> Program:
        """Return the equations that an iteration needs; ``consts``, the carry and a row of each stack are inputs."""
        eqns, _ = needed_for(self.eqns, variables(self.returned), kept=lambda eqn: bool(eqn.effects))
        inputs = [*self.consts, *self.carry, *self.xs]
        return Program(inputs, self.returned, eqns, [], self.scan.body.jaxpr.debug_info)

    def renew(self, body: Program) -> None:
        """Change the equations of the body, and what an iteration returns."""
        self.eqns, returned = body.eqns, iter(body.outputs)
        self.carry = {v: (first, next(returned), result) for v, (first, _, result) in self.carry.items()}
        self.ys = dict(zip(self.ys, returned, strict=True))

    def put(self, new: Builder) -> None:
        """Append the changed scan. Its results replace those of the original scan."""
        body = self.body
        read = {*variables(v for eqn in body.eqns for v in eqn.invars), *variables(body.outputs)}
        self.consts, self.xs = ({v: x for v, x in part.items() if v in read} for part in (self.consts, self.xs))
        run, n, m = jax_fun(self.body.closed), len(self.consts), len(self.consts) + len(self.carry)

        def scanned(*given: Any) -> list[Any]:
            carried, ys = self.scan.run(run, given[:n], given[n:m], given[m:])
            return [*carried, *ys]

        init = [first for first, _, _ in self.carry.values()]
        made = new.run(scanned, *self.consts.values(), *init, *self.xs.values(), like=self.scan.eqn)
        results = [*(result for _, _, result in self.carry.values()), *self.ys]
        new.names.update(zip(results, made, strict=True))


# ---- parameters in host memory


def computing_on_the_device(program: Program) -> Program:
    """Run elementwise arithmetic on arrays in host memory, such as the sum of parameters and updates, on the device."""

    def on_device(new: Builder, eqn: Equation, operands: list[Atom]) -> list[Atom] | None:
        if not is_host_aval(eqn.outvars[0].aval):
            return None

        def run(*xs: Any) -> list[Any]:
            return [to_host(x) for x in run_equation(eqn, [to_device(x) for x in xs], eqn.params)]

        return new.run(run, *operands, like=eqn)

    return rebuilt(program, on_device, _ARITHMETIC)


def made_cheaply(eqns: Iterable[Equation], start: Iterable[Var] = ()) -> set[Var]:
    """Return ``start``, the values that are loaded whole from host memory, and cheap functions of both."""
    found = {*start}
    for eqn in eqns:
        read, cheap = variables(eqn.invars), eqn.primitive.name in ELEMENTWISE | SHAPES
        if is_load(eqn) or (cheap and read and found.issuperset(read)):
            found.update(eqn.outvars)
    return found


def opened_around_layers(program: Program, layers: Set[Var] = frozenset()) -> Program:
    """Inline each ``jax.checkpoint`` that contains a scan over rows of parameters, such as one around a whole loss.

    The barrier that keeps recomputed values apart does not hold the layers, which need not be recomputed.

    Args:
      program: the program.
      layers: the inputs with parameters; by default those that an update reads, or all if there is no update.
    """
    updated = {v for eqn in program.eqns if is_update(eqn) for v in eqn.outvars}
    layers = made_cheaply(program.eqns, layers or {*_layers(program)} | updated or program.inputs)

    def opened(new: Builder, eqn: Equation, operands: list[Atom]) -> list[Atom] | None:
        if not holds_inside(eqn, is_loop) or layers.isdisjoint(variables(eqn.invars)):
            return None
        inner = flat(ClosedJaxpr(eqn.params["jaxpr"], []))
        inside = {v for v, x in zip(inner.inputs, eqn.invars, strict=True) if isinstance(x, Var) and x in layers}
        inner = opened_around_layers(inner, inside)
        xs = {v for each in inner.eqns if (scan := scan_of(each)) is not None for v in variables(scan.xs)}
        is_layer = [v in inside and not xs.isdisjoint(made_cheaply(inner.eqns, [v])) for v in inner.inputs]
        if not any(is_layer):
            return None
        apart = kept_apart(eqn) if eqn.params["differentiated"] else [False] * len(operands)
        held = [x for x, kept, layer in zip(operands, apart, is_layer, strict=True) if kept and not layer]
        return new.call(inner, _behind_a_barrier(new, operands, {*variables(held)}))

    return rebuilt(program, opened, CHECKPOINT)


def _behind_a_barrier(new: Builder, operands: Sequence[Atom], held: Set[Var]) -> list[Atom]:
    """Append a barrier for the ``held`` values; return all ``operands``, with the held ones behind it."""
    behind: dict[Var, Var] = {v: Var(v.aval) for v in dict.fromkeys(variables(operands)) if v in held}
    if behind:
        new.eqns.append(equation_of_together(behind))
    return [renamed(behind, v) for v in operands]


# ---- scans by rows


def scanning_rows(program: Program) -> Program:
    """Make rows the inputs and results of scans that read or make them by number, or move them between memories.

    A plan then sees which rows a scan reads, so that the step need not load whole parameters before the passes.
    """
    scans = [scan for eqn in program.eqns if (scan := scan_of(eqn)) is not None]
    leaves = {v for v in program.inputs if is_host_aval(v.aval)}
    # a policy of jax.checkpoint sends activations to host memory, where another scan reads them
    activations = {v for scan in scans for v in scan.ys} & {v for scan in scans for v in variables(scan.xs)}

    def by_rows(new: Builder, eqn: Equation, operands: list[Atom]) -> list[Atom] | None:
        moves = any(is_host_aval(v.aval) for v in [*operands, *eqn.outvars])
        loop = Loop.of(eqn, operands, opened=moves)
        if loop is None or not any([_by_number(loop, new), _in_one_memory(loop, new, leaves, activations)]):
            return None
        loop.put(new)
        for y in (y for y in eqn.outvars if is_host_aval(y.aval)):
            new.names[y] = new.run(to_host, new.names[y])[0]
        return new.read(eqn.outvars)

    return rebuilt(program, by_rows, {"scan"})


def _by_number(loop: Loop, new: Builder) -> bool:
    """Make arrays ``xs`` if each iteration reads only its own row, and sums ``ys`` if it adds only to its own row."""
    body, length, slices, sums = loop.body, loop.scan.length, dict[Var, list[Equation]](), dict[Var, Equation]()
    maker = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    uses = Counter(v for atoms in (*(eqn.invars for eqn in body.eqns), body.outputs) for v in variables(atoms))

    def is_row(row: Atom, whole: Atom) -> bool:
        return whole.aval.shape[:1] == (length,) and row.aval.shape == (1, *whole.aval.shape[1:])

    def used_once(v: Atom | None, *names: str) -> Equation | None:
        eqn = maker.get(v) if isinstance(v, Var) and uses[v] == 1 else None
        return eqn if eqn is not None and eqn.primitive.name in names else None

    for v in loop.consts:
        found = [eqn for eqn in body.eqns if eqn.primitive.name == "dynamic_slice" and eqn.invars[0] is v]
        if found and len(found) == uses[v] and all(is_row(eqn.outvars[0], v) for eqn in found):
            slices[v] = found
    for v, (first, last, _) in loop.carry.items():
        add = used_once(last, "add", "add_any")
        others = [x for x in add.invars if x is not v] if add is not None and uses[v] == 1 else []
        placed = used_once(others[0], "dynamic_update_slice") if len(others) == 1 else None
        zeros = placed is not None and _is_zeros(first, new.eqns) and _is_zeros(placed.invars[0], body.eqns)
        if placed is not None and zeros and is_row(placed.invars[1], v):
            sums[v] = placed
    starts = [eqn.invars[1:] for found in slices.values() for eqn in found]
    starts += [placed.invars[2:] for placed in sums.values()]
    if length < 2 or not starts or not _are_numbers(loop, new, starts):
        return False
    inside = Builder()
    for v, found in slices.items():
        (of_row,) = jaxpr_of(lambda rows: rows[0], found[0].outvars[0].aval)[0].out_avals
        loop.xs[row := Var(of_row)] = loop.consts[v]
        (whole,) = inside.run(lambda row: row[None], row)
        inside.names |= {eqn.outvars[0]: whole for eqn in found}
    for eqn in body.eqns:
        if eqn.outvars[0] not in inside.names:
            inside.put(eqn)
    returned, added = inside.read(body.outputs), inside.read(placed.invars[1] for placed in sums.values())
    made = [inside.run(lambda rows: rows[0], x)[0] for x in added]
    loop.renew(dataclasses.replace(body, eqns=inside.eqns, outputs=returned))
    loop.ys |= {loop.carry.pop(v)[2]: row for v, row in zip(sums, made, strict=True)}
    return True


def _is_zeros(x: Atom, eqns: Sequence[Equation]) -> bool:
    if isinstance(x, Literal):
        return not np.any(x.val)
    made = next((eqn for eqn in eqns if x in eqn.outvars), None)
    return made is not None and made.primitive.name == "broadcast_in_dim" and _is_zeros(made.invars[0], ())


def _are_numbers(loop: Loop, new: Builder, starts: Sequence[Sequence[Atom]]) -> bool:
    """Whether all of these indices, where rows begin in the body of a loop, are the iteration's number and then zeros.

    They depend on no argument of the step, so they are computed here.
    """
    starting = [k for k, *_ in starts] + [x for _, *zeros in starts for x in zeros]
    ys, alone = {Var(v.aval): v for v in starting}, Builder([*new.eqns])
    dataclasses.replace(loop, ys=ys).put(alone)
    results = variables(alone.read(ys))
    whole = slice_of(needed_for(alone.eqns, results)[0], results, loop.body.debug_info, {})
    if whole.inputs or jaxpr_of(whole.run)[0].effects:  # an effect may differ between devices
        return False
    with jax.ensure_compile_time_eval():
        found = [np.asarray(x) for x in whole.run()]
    numbers, zeros = found[: len(starts)], found[len(starts) :]
    return all(np.array_equal(k, np.arange(loop.scan.length)) for k in numbers) and not any(map(np.any, zeros))


def _in_one_memory(loop: Loop, new: Builder, leaves: Set[Var], activations: Set[Var]) -> bool:
    """Take out of a scan the moves of rows between memories, and the results that it makes of leaves alone.

    A scan over the layers of an ``nnx`` module returns their parameters, unchanged, beside its own results.
    """
    of_leaves, loaded = made_cheaply(new.eqns, leaves), dict[Var, Var]()  # a row in host memory -> on the device
    rows = {v for v, x in loop.xs.items() if not of_leaves.isdisjoint(variables([x]))}

    def apart(inside: Builder, eqn: Equation, ins: list[Atom]) -> list[Atom] | None:
        if is_load(eqn) and ins[0] in rows:
            return [loaded.setdefault(ins[0], Var(eqn.outvars[0].aval))]
        if eqn.primitive.name == "optimization_barrier":
            return _behind_a_barrier(inside, ins, {*variables(ins)} - rows)
        return None

    loop.renew(rebuilt(loop.body, apart))
    for v, x in loaded.items():
        (loop.xs[x],) = new.run(to_device, loop.xs[v])
    made = made_cheaply((eqn for eqn in loop.eqns if not is_load(eqn)), [*rows, *loaded.values()])
    stored = {eqn.outvars[0]: eqn.invars[0] for eqn in loop.eqns if is_store(eqn)}
    changed, leaf_of = bool(loaded), {x: v for v, x in loaded.items()}
    for y, row in [*loop.ys.items()]:
        x = row if isinstance(row, Literal) or y in activations else stored.get(row, row)
        if isinstance(x, Var) and x in made:
            x = leaf_of.get(x, x) if is_host_aval(y.aval) else x
            alone = slice_of(needed_for(loop.eqns, [x])[0], [x], loop.body.debug_info, {})
            (new.names[y],) = new.run(jax.vmap(alone.run), *(loop.xs[v] for v in alone.inputs), like=loop.scan.eqn)
            del loop.ys[y]
        elif x is not row:
            loop.ys[y] = x
        changed |= loop.ys.get(y) is not row
    return changed


# ---- layers that the step has stacked

_MOST_UNROLLED = 256


def unrolled(program: Program) -> Program:
    """Unroll the scans over stacks of parameters. Scans over stacks of batches stay."""
    layers, rows = _layers(program), dict[Var, list[Atom]]()  # a stack -> the rows to read instead

    def one_by_one(new: Builder, eqn: Equation, operands: list[Atom]) -> list[Atom] | None:
        how = eqn.primitive.name, eqn.params.get("axis")
        if how == ("stack", 0) and layers.keys() >= {*variables(eqn.invars)} and len(operands) <= _MOST_UNROLLED:
            rows[eqn.outvars[0]] = operands
        scan = scan_of(eqn)
        consts, carry, xs = ([], [], operands) if scan is None else scan.parted(operands)
        stacks = [x for x in variables(xs) if x in rows]
        if how == ("unstack", 0) and stacks:
            return rows[stacks[0]]
        if scan is None or not stacks:
            return None
        body, ys = flat(scan.body), dict[int, list[Atom]]()
        for k in sorted(range(scan.length), reverse=scan.reverse):
            row = [rows[x][k] if x in stacks else new.run(lambda x, k=k: x[k], x)[0] for x in xs]
            made = new.call(body, [*consts, *carry, *row])
            carry, ys[k] = made[: len(carry)], made[len(carry) :]
        for y, *row in zip(scan.ys, *(ys[k] for k in sorted(ys)), strict=True):
            (new.names[y],) = stack = variables(new.run(lambda *row: jnp.stack(row), *row))
            rows[stack[0]] = row
        return [*carry, *new.read(scan.ys)]

    return rebuilt(program, one_by_one, {"stack", "unstack", "scan"})


def _layers(program: Program) -> dict[Var, Var]:
    """Map the arguments of the step that an update reads, and casts of them, to the arguments."""
    read = {v for eqn in program.eqns if is_update(eqn) for v in variables(eqn.invars)}
    found = {v: v for v in program.inputs if v in read}
    for eqn in program.eqns:
        if eqn.primitive.name == "convert_element_type":
            found.update((eqn.outvars[0], found[v]) for v in variables(eqn.invars) if v in found)
    return found


# ---- two scans over the same layers


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
    pair, layers = [program.eqns[at], program.eqns[after]], _layers(program)
    first, second = (Loop.of(eqn, eqn.invars) for eqn in pair)
    if first is None or second is None or any(eqn.effects for eqn in pair):
        return None
    (*ours, read), (*theirs, also_read) = (
        (scan.length, scan.reverse, scan.unroll, {layers[v] for v in variables(scan.xs) if v in layers})
        for scan in (first.scan, second.scan)
    )
    if ours != theirs or read.isdisjoint(also_read):
        return None
    first.eqns += second.eqns
    for name in ("consts", "carry", "xs", "ys"):
        getattr(first, name).update(getattr(second, name))
    return _in_place_of(program, pair, [v for eqn in pair for v in variables(eqn.invars)], first.put)


def _in_place_of(
    program: Program, these: Sequence[Equation], reads: Sequence[Var], put: Callable[[Builder], None]
) -> Program | None:
    """Return a program in which ``put`` replaces some equations; ``None`` if another one has to run between them.

    ``put`` appends equations that make the same results from the variables that it ``reads``.
    """
    gone, makes = {*map(id, these)}, [v for eqn in these for v in eqn.outvars]
    nodes = [Node(eqn, variables(eqn.invars), eqn.outvars) for eqn in program.eqns if id(eqn) not in gone]
    at = next(k for k, eqn in enumerate(program.eqns) if id(eqn) in gone)
    nodes.insert(at, Node(None, reads, makes))
    try:
        order = topological(nodes, range(len(nodes)))
    except RuntimeError:
        return None
    new = Builder()
    for node in order:
        if node.payload is None:
            put(new)
        else:
            new.put(node.payload)
    return dataclasses.replace(program, eqns=new.eqns, outputs=new.read(program.outputs))


# ---- updates beside a shard_map


def inside_shard_maps(program: Program) -> Program:
    """Move updates into the ``shard_map`` that makes their gradients, or that reads what they make, where each device
    has whole parameters. Parameters move between memories inside it, too, where scans can load their rows."""
    for eqn in reversed(program.eqns):  # a rewrite keeps the objects of earlier equations
        if _is_manual(eqn) and any(eqn is each for each in program.eqns):
            program = _with_inside(program, eqn) or program
    return program


def _is_manual(eqn: Equation) -> bool:
    """Whether a ``shard_map`` divides over all axes of its mesh, and types say nothing more about its results."""
    axes = eqn.params.get("newly_manual_axes", ())
    divides = eqn.primitive.name == "shard_map" and {*axes} == {*eqn.params["mesh"].axis_names}
    return divides and all(typed_sharding(v.aval) is None for v in eqn.outvars)


def _is_divided(spec: PartitionSpec) -> bool:
    return any(map(names_in, spec))


def _moves(eqn: Equation, this: Equation) -> bool:
    """Whether an equation may run inside a ``shard_map`` on whole values.

    An update may if every device is known to hold its operands whole.
    """
    if not is_update(eqn):
        return is_cheap(eqn) and not eqn.effects
    update: Update = eqn.params["update"]
    for options in update.options:
        shardings = [s for s in options.shardings.values() if isinstance(s, NamedSharding)]
        axes = {name for s in shardings for entry in s.spec for name in names_in(entry)}
        known = shardings and len(shardings) == len(options.shardings) and not options.unknown
        if not known or options.partitions or not axes.isdisjoint(this.params["newly_manual_axes"]):
            return False
    return not update.driven


def _before(eqns: Sequence[Equation], this: Equation) -> list[Equation]:
    """Find the equations ahead of a ``shard_map`` that can run inside it.

    These are loads of values that it reads whole, and updates at the beginning of the step whose results it reads, with
    the arithmetic on their gradients and on their results.
    """
    specs = zip(this.invars, this.params["in_specs"], strict=True)
    wanted = variables(v for v, spec in specs if not _is_divided(spec))
    found, _ = needed_for(eqns, wanted, through=lambda eqn: _moves(eqn, this))
    updated = made_of(found, is_update)
    ahead, _ = needed_for(eqns, [v for eqn in found if is_update(eqn) for v in variables(eqn.invars)])
    if not all(_moves(eqn, this) for eqn in ahead):
        updated, ahead = set[Var](), []
    loads = [eqn for eqn in found if is_load(eqn) and eqn.outvars[0] in wanted]
    taken = {*map(id, [*ahead, *loads])}
    return [eqn for eqn in found if id(eqn) in taken or not updated.isdisjoint(eqn.outvars)]


def _after(eqns: Sequence[Equation], this: Equation) -> list[Equation]:
    """Find the equations behind a ``shard_map`` that can run inside it.

    These are stores of its results and updates with its gradients, with the equations in between. They compute the same
    on every device, because they read only values that are whole there.
    """
    specs = zip(this.outvars, this.params["out_specs"], strict=True)
    made, behind = {v for v, spec in specs if not _is_divided(spec)}, made_of(eqns, lambda _: False, this.outvars)
    found = list[Equation]()
    for eqn in eqns:
        read = behind.intersection(variables(eqn.invars))
        if read and made >= read and _moves(eqn, this):
            found.append(eqn)
            made.update(eqn.outvars)
    return needed_for(found, (), kept=lambda eqn: is_update(eqn) or is_store(eqn))[0]


def _with_inside(program: Program, this: Equation) -> Program | None:
    """Move equations ahead of a ``shard_map`` and behind it into it, and return the program; ``None`` if none move."""
    at, params = next(k for k, eqn in enumerate(program.eqns) if eqn is this), this.params
    before, after = _before(program.eqns[:at], this), _after(program.eqns[at + 1 :], this)
    if not before and not after:
        return None
    inner = [*before, this, *after]
    gone, made = {*map(id, inner)}, {v for eqn in inner for v in eqn.outvars}
    rest = [v for eqn in program.eqns if id(eqn) not in gone for v in variables(eqn.invars)]
    read, specs = {*rest, *variables(program.outputs)}, dict(zip(this.outvars, params["out_specs"], strict=True))
    moved = [eqn for eqn in inner if not is_load(eqn) or eqn.outvars[0] not in read]  # a load that others read stays
    results = [v for eqn in moved for v in eqn.outvars if v in read]
    given = [(v, spec if _is_divided(spec) else WHOLE) for v, spec in zip(this.invars, params["in_specs"], strict=True)]
    whole = [(v, WHOLE) for eqn in inner if eqn is not this for v in eqn.invars]
    # a value is passed once, or new parameters could not overwrite the old ones
    passed = list(dict.fromkeys((v, s) for v, s in (*given, *whole) if isinstance(v, Var) and v not in made))

    def inside(*args: Any) -> list[Any]:
        values = dict(zip(passed, args, strict=True))
        env = {v: x for (v, spec), x in values.items() if spec is WHOLE}
        _evaluate(before, env)
        inputs = [values[v, s] if isinstance(v, Var) and _is_divided(s) else values_of(env, [v])[0] for v, s in given]
        env.update(zip(this.outvars, jax_fun(ClosedJaxpr(params["jaxpr"], []))(*inputs), strict=True))
        _evaluate(after, env)
        return [env[v] for v in results]

    def put(new: Builder) -> None:
        in_specs, out_specs = tuple(spec for _, spec in passed), tuple(specs.get(v, WHOLE) for v in results)
        changed = this.replace(params={**params, "in_specs": in_specs, "out_specs": out_specs})
        found = new.run(sharded_like(changed, inside), *new.read(v for v, _ in passed), like=this)
        new.names.update(zip(results, found, strict=True))

    return _in_place_of(program, moved, [v for v, _ in passed], put)


def _evaluate(eqns: Iterable[Equation], env: dict[Var, Any]) -> None:
    """Run equations inside a ``shard_map``, where nothing divides values further."""
    for eqn in eqns:
        values = values_of(env, eqn.invars)
        if is_update(eqn):
            values = bound(_retraced(eqn.params["update"], values), values)
        elif eqn.primitive.name != "sharding_constraint":
            values = run_equation(eqn, values, eqn.params)
        env.update(zip(eqn.outvars, values, strict=True))


def _retraced(update: Update, operands: Sequence[Any]) -> Update:
    """Return an update for the inside of a ``shard_map``, where types differ."""
    program = update.program

    def run(*values: Any) -> list[Any]:
        env = dict(zip(program.inputs, [*program.consts, *values], strict=True))
        _evaluate(program.eqns, env)
        return values_of(env, program.outputs)

    new = flat(jaxpr_of(run, *operands)[0])
    pairs = zip([*update.operands, *program.outputs], [*new.inputs[len(new.consts) :], *new.outputs], strict=True)
    found = with_program(update, new, {v: x for v, x in pairs if isinstance(v, Var)})
    return dataclasses.replace(found, manual=True, take_turns=False)
