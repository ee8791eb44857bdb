"""Rewrite equivalent forms of a step into one form, the only one that placing updates has to know.

- Mutable arrays whose life is inside the step become values.
- A loop that takes its layers by their numbers, and sums their gradients up, becomes a scan over stacked layers.
- Rows that a scan loads from host memory, or stores there, move as a whole before it, or after it.
- A scan over layers that the step itself has stacked becomes the layers one after the other.
- Two independent scans over the same layers become one scan.
- An update of gradients that a ``shard_map`` makes, or of parameters that it reads, moves into it.
- Updates in a branch become one that always runs, and chooses between the results of all branches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
    effects_of,
    holds,
    jax_fun,
    jaxpr_of,
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
    on_host,
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
from jax_offload._program.private import without_dead_code, without_references
from jax_offload._program.program import (
    Builder,
    Program,
    as_program,
    flat,
    is_load,
    is_store,
    rebuilt,
    replaced,
)
from jax_offload._program.propagate import made_of, needed_for
from jax_offload._program.slices import Slice, slice_of
from jax_offload._rewrite.inlined import always_updating, with_program

_MOST_UNROLLED = 256


def canonical(program: Program) -> Program:
    """Return the step's program in the one form, with the same inputs and results."""
    program = reading_leaves(always_updating(dereferenced(program)))
    program = _opened(rebuilt(program, _on_the_device))
    for at in [k for k, eqn in enumerate(program.eqns) if eqn.primitive.name == "scan"][::-1]:
        program = _moved_as_a_whole(_by_rows(program, at), at)
    return _joined(_unrolled(program))


def dereferenced(program: Program, *, any_jit: bool = False) -> Program:
    """Replace the mutable arrays that live inside a program by values."""
    if not any(type(effect) in effects_of(REFERENCES) for effect in program.effects):
        return program
    return flat(without_references(program.closed), any_jit=any_jit)


# Parameters that a scan hands on -------------------------------------------------------------------------------------


def reading_leaves(program: Program) -> Program:
    """Let updates read leaves in host memory instead of the whole copies that a pass has loaded and handed on.

    A scan over the layers of an ``nnx`` module returns their parameters, unchanged, beside its own results.
    """
    leaves = {v for v in program.inputs if is_host_aval(v.aval)}
    leaf_of = {eqn.outvars[0]: x for eqn in program.eqns if is_load(eqn) and (x := eqn.invars[0]) in leaves}
    if not leaf_of or not any(map(is_update, program.eqns)):
        return program
    loaded = {*leaf_of}

    def read(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if loaded.isdisjoint(variables(operands)):
            return None
        if (scan := scan_of(eqn)) is not None:
            body, m = flat(scan.body), len(scan.init)
            count = len(scan.xs)
            rows = zip(body.inputs[len(body.inputs) - count :], operands[len(operands) - count :], strict=True)
            row_of = {v: x for v, x in rows if isinstance(x, Var) and x in loaded}
            new.put(eqn, operands)
            handed_on = [row_of.get(v) if isinstance(v, Var) else None for v in body.outputs[m:]]
            return [*eqn.outvars[:m], *(x or v for x, v in zip(handed_on, eqn.outvars[m:], strict=True))]
        if not is_update(eqn) or (update := eqn.params["update"]).driven:
            return None
        given = [
            leaf_of.get(x, x) if isinstance(x, Var) and v not in update.names else x
            for x, v in zip(operands, update.operands, strict=True)
        ]
        if given == operands:
            return None
        return new.run(lambda *xs: bound(_loading(update, xs), xs), *given, like=eqn)

    return rebuilt(program, read)


def _loading(update: Update, given: Sequence[Any]) -> Update:
    """Return an update that loads its operands that are now in host memory."""
    old = update.program
    on_device = [not is_host_aval(v.aval) for v in update.operands]

    def run(*operands: Any) -> list[Any]:
        loads = zip(operands, on_device, strict=True)
        return jax_fun(old.closed)(*(to_device(x) if there and on_host(x) else x for x, there in loads))

    new = as_program(jaxpr_of(run, *given)[0])
    names = dict(zip(update.operands, new.inputs[len(new.consts) :], strict=True))
    names |= {v: x for v, x in zip(old.outputs, new.outputs, strict=True) if isinstance(v, Var)}
    return with_program(update, new, names)


# Checkpoints around scans over layers -------------------------------------------------------------------------------


def _opened(program: Program) -> Program:
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
        scans = filter(None, map(scan_of, body.eqns))
        return any(not inside.isdisjoint(variables(scan.xs)) for scan in scans)

    around = {id(eqn) for eqn in program.eqns if scans_over_layers(eqn)}
    if not around:
        return program
    known = {v for eqn in program.eqns for v in eqn.outvars}

    def without_layers(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        """The barrier that keeps recomputed values apart, without the values that a scan reads by rows."""
        if eqn.primitive.name != "optimization_barrier" or not known.isdisjoint(eqn.outvars):
            return None
        kept = {x: v for x, v in zip(operands, eqn.outvars, strict=True) if isinstance(x, Var) and x not in layers}
        new.eqns.append(equation_of_together(kept))
        return [kept.get(x, x) if isinstance(x, Var) else x for x in operands]

    return rebuilt(flat(program.closed, opens=lambda eqn: id(eqn) in around), without_layers)


# Updates beside a shard_map -----------------------------------------------------------------------------------------


def inside_shard_maps(program: Program) -> Program:
    """Move updates into the ``shard_map`` that makes their gradients, or that reads what they make, where each device
    has whole parameters. Parameters move between memories inside it, too, where scans can load their rows."""
    for find in (_after_shard_map, _before_shard_map):
        for at, eqn in enumerate(program.eqns):
            if eqn.primitive.name == "shard_map" and _is_manual(eqn) and (moved := find(program, at)):
                return _transfers_inside(_moved_inside(program, at, moved))
    is_outside = any(holds_update(eqn) and eqn.primitive.name != "shard_map" for eqn in program.eqns)
    return program if is_outside else _transfers_inside(program)


def _transfers_inside(program: Program) -> Program:
    """Let each ``shard_map`` load what it reads, and store what it makes for host memory."""
    origins = {eqn.outvars[0]: eqn.invars[0] for eqn in program.eqns if is_load(eqn)}
    readers = Counter(v for eqn in program.eqns for v in {*variables(eqn.invars)})
    readers.update(variables(program.outputs))
    stored = {v for eqn in program.eqns if is_store(eqn) for v in variables(eqn.invars) if readers[v] == 1}

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if is_store(eqn) and is_host_aval(operands[0].aval):
            return operands
        if eqn.primitive.name != "shard_map" or not _is_manual(eqn):
            return None
        specs = eqn.params["in_specs"]
        of = [None if isinstance(v, Literal) else origins.get(v) for v in eqn.invars]
        store = [v in stored for v in eqn.outvars]
        if not any(store) and all(x is None for x in of):
            return None
        given = [v if x is None else x for v, x in zip(operands, of, strict=True)]
        # an array is passed once, or new parameters could not overwrite the old ones
        keys = [(id(v), str(spec)) for v, spec in zip(given, specs, strict=True)]
        places = {key: k for k, key in reversed([*enumerate(keys)])}
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        body = jax_fun(ClosedJaxpr(eqn.params["jaxpr"], []))

        def run(*values: Any) -> list[Any]:
            own = (values[numbers[key]] for key in keys)
            made = body(*(v if x is None else to_device(v) for v, x in zip(own, of, strict=True)))
            return [to_host(y) if moves else y for y, moves in zip(made, store, strict=True)]

        once = [places[key] for key in numbers]
        this = eqn.replace(params=eqn.params | {"in_specs": [specs[k] for k in once]})
        return new.run(sharded_like(this, run), *(given[k] for k in once), like=eqn)

    found = rebuilt(program, rule)
    read = {*variables(found.outputs), *(v for eqn in found.eqns for v in variables(eqn.invars))}
    return dataclasses.replace(found, eqns=[e for e in found.eqns if not is_load(e) or e.outvars[0] in read])


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
    made, found, gradients = set[Var](), list[Equation](), list[Var]()
    for eqn in eqns:
        if not is_update(eqn) and made.isdisjoint(variables(eqn.invars)):
            continue
        if not _moves(eqn, this):
            return []
        made.update(eqn.outvars)
        found.append(eqn)
        gradients += eqn.params["update"].gradients if is_update(eqn) else []
    specs = zip(this.invars, this.params["in_specs"], strict=True)
    read = {v: any(spec) for v, spec in specs if isinstance(v, Var) and v in made}
    if not read or any(read.values()):
        return []
    first, _ = needed_for(eqns, gradients, lambda eqn: eqn.primitive.name in ELEMENTWISE and not eqn.effects)
    after, _ = needed_for(found, {*read, *(v for eqn in found if is_update(eqn) for v in eqn.outvars)})
    wanted = {*map(id, first), *map(id, after)}
    return [eqn for eqn in eqns if id(eqn) in wanted]


def _moves(eqn: Equation, this: Equation) -> bool:
    """Whether an equation may run inside a ``shard_map`` on whole values."""
    if is_update(eqn):
        return _is_whole(eqn.params["update"], this.params["newly_manual_axes"])
    return is_cheap(eqn) and not eqn.effects


def _is_whole(update: Update, manual: Set[str]) -> bool:
    """Whether each device is known to hold all operands of an update whole."""
    for claim in update.claims:
        specs = [s.spec if isinstance(s, NamedSharding) else None for s in claim.options.shardings.values()]
        if claim.options.partitions or claim.options.unknown or not specs or None in specs:
            return False
        if any(not manual.isdisjoint(names_in(entry)) for spec in specs for entry in spec or ()):
            return False
    return not update.driven


def _moved_inside(program: Program, at: int, moved: Sequence[Equation]) -> Program:
    """Return the program with equations ahead of the ``shard_map`` at equation ``at``, or behind it, inside of it."""
    this, ahead = program.eqns[at], {*map(id, program.eqns[:at])}
    gone = {id(this), *map(id, moved)}
    inside = {v for eqn in moved for v in eqn.outvars}
    passed = [k for k, v in enumerate(this.invars) if isinstance(v, Literal) or v not in inside]
    in_specs = [this.params["in_specs"][k] for k in passed]
    # a whole operand is passed once, or new parameters could not overwrite the old ones
    whole = {v: k for k, spec in zip(passed, in_specs, strict=True)
             if isinstance(v := this.invars[k], Var) and not any(spec)}  # fmt: skip
    there = {*whole, *inside, *this.outvars}
    others = list(dict.fromkeys(v for eqn in moved for v in variables(eqn.invars) if v not in there))
    read = {*variables(program.outputs)}
    read.update(v for eqn in program.eqns if id(eqn) not in gone for v in variables(eqn.invars))
    kept = [v in read for v in this.outvars]
    results = [v for eqn in moved for v in eqn.outvars if v in read]
    body = jax_fun(ClosedJaxpr(this.params["jaxpr"], []))

    def run(*operands: Any) -> list[Any]:
        own = dict(zip(passed, operands, strict=False))
        env = {v: own[k] for v, k in whole.items()} | dict(zip(others, operands[len(passed) :], strict=True))
        _evaluated([eqn for eqn in moved if id(eqn) in ahead], env)
        given = {k: env[v] for k, v in enumerate(this.invars) if isinstance(v, Var) and k not in own} | own
        made = body(*(given[k] for k in range(len(this.invars))))
        env.update(zip(this.outvars, made, strict=True))
        _evaluated([eqn for eqn in moved if id(eqn) not in ahead], env)
        return [*itertools.compress(made, kept), *values_of(env, results)]

    specs = {"in_specs": in_specs, "out_specs": [*itertools.compress(this.params["out_specs"], kept)]}
    this_one = this.replace(params=this.params | specs)
    around = sharded_like(this_one, run, [PartitionSpec()] * len(others), [PartitionSpec()] * len(results))
    before, _ = needed_for(program.eqns[at + 1 :], others)
    late = made_of(program.eqns, lambda eqn: id(eqn) in gone)
    front = [*(eqn for eqn in program.eqns[:at] if late.isdisjoint(variables(eqn.invars))), *before]
    first = {*map(id, front)} - gone
    new = Builder([eqn for eqn in front if id(eqn) in first])
    operands = [*(this.invars[k] for k in passed), *others]
    made = new.run(around, *operands, like=this)
    new.names.update(zip([*itertools.compress(this.outvars, kept), *results], made, strict=True))
    for eqn in program.eqns:
        if id(eqn) not in gone | first:
            new.put(eqn)
    return dataclasses.replace(program, eqns=new.eqns, outputs=new.read(program.outputs))


def _evaluated(eqns: Sequence[Equation], env: dict[Var, Any]) -> None:
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
        _evaluated(old.eqns, env)
        return values_of(env, old.outputs)

    new = as_program(jaxpr_of(run, *given)[0])
    names = dict(zip(update.operands, new.inputs[len(new.consts) :], strict=True))
    names |= {v: x for v, x in zip(old.outputs, new.outputs, strict=True) if isinstance(v, Var)}
    return dataclasses.replace(with_program(update, new, names), manual=True, take_turns=False)


# Layers by their numbers -------------------------------------------------------------------------------------------


def _by_rows(program: Program, at: int) -> Program:
    """Make a scan over rows of equation ``at``, a scan that reads and sums up rows by its iteration's number."""
    scan = scan_of(program.eqns[at])
    assert scan is not None
    body, n, m = flat(scan.body), len(scan.consts), len(scan.init)
    if scan.length < 2 or body.consts or body.effects:
        return program
    maker = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    readers: dict[Var, list[Equation]] = {}
    for eqn in body.eqns:
        for v in {*variables(eqn.invars)}:
            readers.setdefault(v, []).append(eqn)
    read: dict[int, list[Equation]] = {}  # number of a const -> the equations that read its rows
    for k, v in enumerate(body.inputs[:n]):
        own = readers.get(v, [])
        if own and v not in variables(body.outputs) and all(_takes_a_row(eqn, v, scan.length) for eqn in own):
            read[k] = own
    summed: dict[int, tuple[Equation, Equation]] = {}  # number of a carry -> the sum, and the row among zeros
    for k, v in enumerate(body.inputs[n : n + m]):
        out = body.outputs[k]
        if isinstance(out, Literal) or body.outputs.count(out) > 1 or v in body.outputs:
            continue
        add = maker.get(out)
        if add is None or add.primitive.name not in ("add", "add_any") or readers.get(v) != [add]:
            continue
        row = next((maker[x] for x in variables(add.invars) if x in maker), None)
        if row is None or not _places_a_row(row, maker, scan.length) or not _is_zeros(scan.init[k], program.eqns):
            continue
        if out not in readers and readers[row.outvars[0]] == [add] and row.outvars[0] not in body.outputs:
            summed[k] = add, row
    starts = [eqn.invars[1:] for each in read.values() for eqn in each]
    starts += [row.invars[2:] for _, row in summed.values()]
    if not starts or not _are_numbers_of_rows(program, at, body, starts):
        return program
    return replaced(program, program.eqns[at], _over_rows(scan, body, read, summed))


def _takes_a_row(eqn: Equation, v: Var, length: int) -> bool:
    if eqn.primitive.name != "dynamic_slice" or eqn.invars[0] is not v or v in eqn.invars[1:]:
        return False
    return v.aval.shape[0] == length and eqn.params["slice_sizes"] == (1, *v.aval.shape[1:])


def _places_a_row(eqn: Equation, maker: dict[Var, Equation], length: int) -> bool:
    if eqn.primitive.name != "dynamic_update_slice":
        return False
    whole, row = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    return whole[0] == length and row == (1, *whole[1:]) and _is_zeros(eqn.invars[0], maker.values())


def _is_zeros(x: Atom, eqns: Any) -> bool:
    if isinstance(x, Literal):
        return not np.any(x.val)
    made = next((eqn for eqn in eqns if x in eqn.outvars), None)
    return made is not None and made.primitive.name == "broadcast_in_dim" and _is_zeros(made.invars[0], ())


def _are_numbers_of_rows(program: Program, at: int, body: Program, starts: Sequence[Sequence[Atom]]) -> bool:
    """Whether all of these indices, where rows begin in the body of a scan, are the iteration's number and then zeros.

    They depend on no argument of the step, so they are computed here.
    """
    eqn = program.eqns[at]
    scan = scan_of(eqn)
    assert scan is not None
    atoms = list(dict.fromkeys(v for each in starts for v in each if not isinstance(v, Literal)))
    m = len(scan.init)
    numbered = jax_fun(dataclasses.replace(body, outputs=[*body.outputs[:m], *atoms]).closed)
    before = slice_of(program.eqns[:at], variables(eqn.invars), program.debug_info, {})

    def run(*inputs: Any) -> list[Any]:
        env = dict(zip(before.outputs, before.run(*inputs), strict=True))
        return scan.run(numbered, *scan.parted(values_of(env, eqn.invars)))[1]

    traced, _ = jaxpr_of(run, *(v.aval for v in before.inputs))
    jaxpr, needed = without_dead_code(traced.jaxpr)
    if any(needed) or jaxpr.effects:  # an effect notes, for one, that a number is another on each device
        return False
    with jax.ensure_compile_time_eval():
        values = dict(zip(atoms, map(np.asarray, jax_fun(ClosedJaxpr(jaxpr, traced.consts))()), strict=True))
    number = np.arange(scan.length)

    def is_constant(x: Atom, wanted: Any) -> bool:
        return bool(np.all((x.val if isinstance(x, Literal) else values[x]) == wanted))

    return all(is_constant(k, number) and all(is_constant(x, 0) for x in zeros) for k, *zeros in starts)


def _over_rows(
    scan: Scan,
    body: Program,
    read: Mapping[int, Sequence[Equation]],
    summed: Mapping[int, tuple[Equation, Equation]],
) -> Callable[..., list[Any]]:
    """Return the scan that reads the consts ``read`` by rows and stacks the rows that the carries ``summed`` add up."""
    n, m = len(scan.consts), len(scan.init)
    rows = {k: Var(own[0].outvars[0].aval) for k, own in read.items()}
    new = Builder(names={each.outvars[0]: rows[k] for k, own in read.items() for each in own})
    gone = {id(each) for group in (*read.values(), *summed.values()) for each in group}
    for each in body.eqns:
        if id(each) not in gone:
            new.put(each)
    inputs = [v for k, v in enumerate(body.inputs) if k not in read and k - n not in summed]
    carried = [k for k in range(m) if k not in summed]
    outputs = [*(body.outputs[k] for k in carried), *body.outputs[m:], *(row.invars[1] for _, row in summed.values())]
    taken = dataclasses.replace(body, inputs=[*inputs, *rows.values()], outputs=new.read(outputs), eqns=new.eqns)
    run_body = jax_fun(taken.closed)

    def with_rows(*args: Any) -> list[Any]:
        k = len(args) - len(rows)
        results = run_body(*args[:k], *(row[None] for row in args[k:]))
        k = len(results) - len(summed)
        return [*results[:k], *(row[0] for row in results[k:])]

    def run(*operands: Any) -> list[Any]:
        consts, init, xs = scan.parted(operands)
        whole = [x for k, x in enumerate(consts) if k not in read]
        carry, ys = scan.run(with_rows, whole, [init[k] for k in carried], [*xs, *(consts[k] for k in read)])
        found = dict(zip(carried, carry, strict=True)) | dict(zip(summed, ys[len(ys) - len(summed) :], strict=True))
        return [*(found[k] for k in range(m)), *ys[: len(ys) - len(summed)]]

    return run


# Rows in host memory -------------------------------------------------------------------------------------------------


def _moved_as_a_whole(program: Program, at: int) -> Program:
    """Take the moves of rows between memories out of equation ``at``, a scan, and the rows of leaves that it hands on.

    No step should load its parameters as a whole before the passes, but in this form a plan sees which rows a scan
    reads.
    """
    scan = scan_of(program.eqns[at])
    assert scan is not None
    loaded = made_cheaply(program.eqns[:at])
    leaves = loaded | {v for v in program.inputs if is_host_aval(v.aval)}
    of_leaves = [k for k, x in enumerate(scan.xs) if isinstance(x, Var) and x in leaves]
    # a policy of jax.checkpoint sends activations to host memory, where another scan reads them
    activations = {v for eqn in program.eqns[at + 1 :] if eqn.primitive.name == "scan" for v in variables(eqn.invars)}
    if not of_leaves and not any(is_host_aval(y.aval) and y not in activations for y in scan.ys):
        return program
    body, m = flat(scan.body, opens=lambda _: True), len(scan.init)
    rows = body.inputs[len(body.inputs) - len(scan.xs) :]
    on_device = {v: Var(on_device_aval(v.aval)) for k in of_leaves if is_host_aval((v := rows[k]).aval)}
    new = _without_loads(body, on_device)
    outputs = [] if new is None else new.read(body.outputs)
    if new is None or [is_host_aval(v.aval) for v in outputs[:m]] != [is_host_aval(v.aval) for v in body.outputs[:m]]:
        return program
    row_of, cheap = {on_device.get(rows[k], rows[k]): k for k in of_leaves}, set[Var]()
    stores = dict[Var, Atom]()
    for eqn in new.eqns:
        ins = variables(eqn.invars)
        if eqn.primitive.name == "optimization_barrier":
            row_of |= {v: row_of[x] for x, v in zip(eqn.invars, eqn.outvars, strict=True) if x in row_of}
        elif is_store(eqn):
            stores[eqn.outvars[0]] = eqn.invars[0]
        elif ins and eqn.primitive.name in ELEMENTWISE | SHAPES and all(v in row_of or v in cheap for v in ins):
            cheap.update(eqn.outvars)
    made = list[Atom]()  # rows that the body still makes
    again = dict[int, Slice]()  # number of one of the ys -> the slice that makes it from leaves
    for j, v in enumerate(outputs[m:]):
        if isinstance(v, Var) and (v in row_of or v in cheap):
            eqns, _ = needed_for(new.eqns, [v], through=lambda eqn: cheap.issuperset(eqn.outvars))
            again[j] = slice_of(eqns, [v], body.debug_info, {})
        elif scan.ys[j] in activations or isinstance(v, Literal):
            made.append(v)
        else:
            made.append(stores.get(v, v))
            if is_host_aval(made[-1].aval):
                return program
    if not (on_device or again or stores):
        return program
    results = [*outputs[:m], *made]
    eqns, _ = needed_for(new.eqns, variables(results), kept=lambda eqn: bool(eqn.effects))
    inputs = [on_device.get(v, v) for v in body.inputs]
    run_body = jax_fun(dataclasses.replace(body, inputs=inputs, outputs=results, eqns=eqns).closed)

    def run(*operands: Any) -> list[Any]:
        consts, init, xs = scan.parted(operands)
        wholes = [to_device(x) for x in xs]
        carry, ys = scan.run(run_body, [*body.consts, *consts], init, wholes)
        rest = iter(ys)
        for j, y in enumerate(scan.ys):
            if j not in again:
                x = next(rest)
            elif again[j].jaxpr.eqns:
                x = jax.vmap(lambda *rows, s=again[j]: s.run(*rows)[0])(*(wholes[row_of[v]] for v in again[j].inputs))
            else:
                (v,) = again[j].outputs
                x = (xs if is_host_aval(y.aval) else wholes)[row_of[v]]
            carry.append(to_host(x) if is_host_aval(y.aval) else x)
        return carry

    return replaced(program, program.eqns[at], run)


_ARITHMETIC = ELEMENTWISE - PLACED - {"optimization_barrier", MARK}


def _on_the_device(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
    """Run elementwise arithmetic on arrays in host memory, such as the sum of parameters and updates, on the device."""
    if eqn.primitive.name not in _ARITHMETIC or not is_host_aval(eqn.outvars[0].aval):
        return None
    if not eqn.outvars[0].aval.shape or not all(is_host_aval(v.aval) for v in operands if v.aval.shape):
        return None

    def run(*xs: Any) -> list[Any]:
        return [to_host(x) for x in run_equation(eqn, [to_device(x) for x in xs], eqn.params)]

    return new.run(run, *operands, like=eqn)


def made_cheaply(eqns: Sequence[Equation], start: Iterable[Var] = ()) -> set[Var]:
    """Return ``start``, the values that are loaded whole from host memory, and cheap functions of both."""
    found = {*start}
    for eqn in eqns:
        ins = variables(eqn.invars)
        if is_load(eqn) or (ins and eqn.primitive.name in ELEMENTWISE | SHAPES and found.issuperset(ins)):
            found.update(eqn.outvars)
    return found


def _without_loads(body: Program, on_device: Mapping[Var, Var]) -> Builder | None:
    """Build a body's equations for rows that are on the device; ``None`` if one needs a row in host memory.

    ``on_device``: the variables that stand for rows in host memory.
    """
    new = Builder(names={**on_device})
    for eqn in body.eqns:
        ins = new.read(eqn.invars)
        moved = [is_host_aval(v.aval) and not is_host_aval(x.aval) for x, v in zip(ins, eqn.invars, strict=True)]
        if not any(moved):
            new.put(eqn, ins)
        elif is_load(eqn):
            new.names[eqn.outvars[0]] = ins[0]
        elif eqn.primitive.name == "optimization_barrier":
            outs = [Var(x.aval) if m else v for x, v, m in zip(ins, eqn.outvars, moved, strict=True)]
            new.names.update(zip(eqn.outvars, outs, strict=True))
            new.eqns.append(eqn.replace(invars=ins, outvars=outs))
        else:
            return None
    return new


# Layers that the step has stacked ------------------------------------------------------------------------------------


def _unrolled(program: Program) -> Program:
    """Unroll the scans over stacks of parameters. Scans over stacks of batches stay."""
    layers, stacks = _layers(program), set[Var]()
    for eqn in program.eqns:
        if eqn.primitive.name == "stack" and eqn.params["axis"] == 0 and len(eqn.invars) <= _MOST_UNROLLED:
            stacks.update(eqn.outvars if all(isinstance(v, Var) and v in layers for v in eqn.invars) else ())
    if not any(eqn.primitive.name == "scan" and not stacks.isdisjoint(variables(eqn.invars)) for eqn in program.eqns):
        return program
    rows: dict[Atom, list[Atom]] = {}  # a stack -> its rows, which are read instead

    def rule(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
        if not stacks.isdisjoint(eqn.outvars):
            rows[eqn.outvars[0]] = operands
        if eqn.primitive.name == "unstack" and eqn.params["axis"] == 0 and rows_of(operands[0]):
            return rows[operands[0]]
        scan = scan_of(eqn)
        if scan is None or not any(map(rows_of, (parted := scan.parted(operands))[2])):
            return None
        body, (consts, carry, xs), ys = flat(scan.body), parted, list[list[Atom]]()
        for k in range(scan.length)[:: -1 if scan.reverse else 1]:
            each = (rows_of(x)[k] if rows_of(x) else new.run(lambda x, k=k: x[k], x)[0] for x in xs)
            results = new.call(body, [*consts, *carry, *each])
            carry, y = results[: len(carry)], results[len(carry) :]
            ys.append(y)
        for y in zip(*ys[:: -1 if scan.reverse else 1], strict=True):
            carry += new.run(lambda *xs: jnp.stack(xs), *y)
            rows[carry[-1]] = list(y)
        return carry

    def rows_of(x: Atom) -> list[Atom]:
        return [] if isinstance(x, Literal) else rows.get(x, [])

    return rebuilt(program, rule)


def _layers(program: Program) -> dict[Var, Var]:
    """Map the arguments of the step that an update reads, and casts of them, to the arguments."""
    read = {v for eqn in program.eqns if is_update(eqn) for v in variables(eqn.invars)}
    found = {v: v for v in program.inputs if v in read}
    for eqn in program.eqns:
        if eqn.primitive.name == "convert_element_type" and isinstance(v := eqn.invars[0], Var) and v in found:
            found[eqn.outvars[0]] = found[v]
    return found


# Two scans over the same layers ------------------------------------------------------------------------------------


def _joined(program: Program) -> Program:
    """Join each scan with the next loop, if both run over the rows of one array and neither needs the other.

    Two passes through one network become one, as in a siamese network, or for the chosen and the rejected answers of
    DPO. One iteration then computes for as long as both, and makes the sum of both gradients.
    """
    loops = [at for at, eqn in enumerate(program.eqns) if holds(eqn, is_loop)]
    joined = (_both(program, at, after) for at, after in itertools.pairwise(loops))
    both = next((each for each in joined if each is not None), None)
    return program if both is None else _joined(both)


def _both(program: Program, at: int, after: int) -> Program | None:
    """Return the program with one scan in place of the scans ``at`` and ``after``; ``None`` if they are not alike."""
    eqns = program.eqns
    one, other = scan_of(eqns[at]), scan_of(eqns[after])
    if one is None or other is None:
        return None
    if (one.length, one.reverse, one.unroll) != (other.length, other.reverse, other.unroll):
        return None
    layers = _layers(program)
    read, also_read = ({layers[v] for v in variables(scan.xs) if v in layers} for scan in (one, other))
    before, _ = needed_for(eqns[at:after], variables(eqns[after].invars))
    moved = {*map(id, before)}
    if read.isdisjoint(also_read) or id(eqns[at]) in moved:
        return None
    if any(eqn.effects for eqn in (*before, eqns[at], eqns[after])):
        return None
    run_one, run_other = jax_fun(one.body), jax_fun(other.body)
    operands = [*eqns[at].invars, *eqns[after].invars]
    n, m, k = len(eqns[at].invars), len(one.init), len(one.ys)

    def run(*given: Any) -> list[Any]:
        (consts, init, xs), (more, after_init, rows) = one.parted(given[:n]), other.parted(given[n:])

        def body(*args: Any) -> list[Any]:
            carry, row = args[: m + len(after_init)], args[m + len(after_init) :]
            made = run_one(*consts, *carry[:m], *row[: len(xs)])
            also = run_other(*more, *carry[m:], *row[len(xs) :])
            return [*made[:m], *also[: len(after_init)], *made[m:], *also[len(after_init) :]]

        carry, ys = one.run(body, [], [*init, *after_init], [*xs, *rows])
        return [*carry[:m], *ys[:k], *carry[m:], *ys[k:]]

    new = Builder([*eqns[:at], *before])
    results = new.run(run, *operands, like=eqns[at])
    new.names.update(zip([*eqns[at].outvars, *eqns[after].outvars], results, strict=True))
    for eqn in eqns[at + 1 :]:
        if eqn is not eqns[after] and id(eqn) not in moved:
            new.put(eqn)
    return dataclasses.replace(program, eqns=new.eqns, outputs=new.read(program.outputs))
