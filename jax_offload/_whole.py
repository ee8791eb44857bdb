"""A whole step, rewritten: updates run where their gradients are made."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax

from jax_offload._base.arrays import is_array
from jax_offload._base.donation import guarded
from jax_offload._base.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    jax_fun,
    jaxpr_of,
    nameless,
    scan_of,
)
from jax_offload._base.jaxprs import (
    closed as as_closed,
)
from jax_offload._emit.barriers import gate
from jax_offload._emit.deduplicate import functions
from jax_offload._emit.in_scan import one_after_the_other, scanned
from jax_offload._emit.loop import or_whole
from jax_offload._emit.region import KEPT_EFFECTS, Update, bound, is_update, marked
from jax_offload._emit.run import as_array
from jax_offload._emit.serialise import Serialise, serial_parts
from jax_offload._emit.transfers import Names
from jax_offload._ir.arrange import Node, arranged, needed
from jax_offload._ir.branches import scalars_hoisted
from jax_offload._ir.program import Program, flat
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.ahead import moves_ahead
from jax_offload._plan.in_scan import InScan, in_scan
from jax_offload._plan.interleave import Gate, Piece, interleaved
from jax_offload._plan.moves import moves_of
from jax_offload._plan.plan import Chunked


def whole(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, to be traced by ``jit``, with its updates inside the scans that make their gradients."""

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = [k for k, x in enumerate(leaves) if is_array(x)]
        if len(arrays) < len(leaves) and any(hasattr(x, "dtype") for x in leaves if not is_array(x)):
            return step(*args, **kwargs)  # mutable arrays

        def on_arrays(*values: Any) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
            args, kwargs = jax.tree.unflatten(treedef, filled.values())
            return step(*args, **kwargs)

        given = [leaves[k] for k in arrays]
        closed, result = jaxpr_of(on_arrays, *given)
        return jax.tree.unflatten(result, emitted(closed, given))

    return run


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A step with its update inlined.

    Attributes:
      program: it.
      own: the equations of the update, by identity, as they are in the update's own program.
      operands: the update's inputs -> what the step gives them.
      next_of: result -> the variable of the step that it is the next value of.
      stays: why leaves do not move.
    """

    program: Program
    update: Update
    own: Mapping[int, Equation]
    operands: Mapping[Var, Atom]
    next_of: Mapping[Var, Var]
    stays: tuple[str, ...] = ()


def inlined(program: Program) -> Inlined | None:
    """The program with its only update inlined; ``None`` where it has none, or several."""
    found = [eqn for eqn in program.eqns if is_update(eqn)]
    if len(found) != 1:
        return None
    update: Update = found[0].params["update"]
    recipe = scalars_hoisted(update.program)
    operands = dict(zip(recipe.inputs, found[0].invars, strict=True))
    given: dict[Var, Atom] = dict(operands)
    eqns: list[Equation] = []
    own: dict[int, Equation] = {}
    for eqn in program.eqns:
        if eqn is found[0]:
            for each in recipe.eqns:
                new = each.replace(invars=[_read(operands, v) for v in each.invars])
                own[id(new)] = each
                eqns.append(new)
            given |= {v: _read(operands, made) for v, made in zip(eqn.outvars, recipe.outputs, strict=True)}
        else:
            eqns.append(eqn.replace(invars=[_read(given, v) for v in eqn.invars]))
    # of an update that is the rest of one, not all arguments are left
    left = {v: operands[old] for v, old in update.next_values.items() if old in operands}
    next_of = {v: x for v, x in left.items() if not isinstance(x, Literal)}
    outputs = [_read(given, v) for v in program.outputs]
    shards = {x: n for v, n in recipe.shards.items() if v in operands and not isinstance(x := operands[v], Literal)}
    whole = dataclasses.replace(program, eqns=eqns, outputs=outputs, shards=shards)
    return Inlined(whole, update, own, operands, next_of)


def emitted(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The step's results, of its flat arguments."""
    plain = flat(closed)
    found = None if _is_ordered(closed) else inlined(plain)
    if found is None:
        return _as_it_is(closed, plain, _why_not(closed, plain), args)
    step, plans, moved = found, dict[int, InScan](), set[int]()
    scans = [
        (at, scan) for at, eqn in enumerate(step.program.eqns) if (scan := scan_of(eqn)) is not None and scan.length
    ]
    for at, scan in reversed(scans):
        moves, why = moves_of(step.program, scan, at, step.next_of, moved)
        step = dataclasses.replace(step, stays=(*step.stays, *why))
        if moves.moves:
            plans[at] = in_scan(step.program, scan, moves, ahead=False)
            moved |= moves.eqns
    for at, scan in scans:
        if at not in plans and id(step.program.eqns[at]) not in moved:
            moves, why = moves_ahead(step.program, scan, at, step.next_of, {*step.own}, moved)
            step = dataclasses.replace(step, stays=(*step.stays, *why))
            if moves.moves:
                plans[at] = in_scan(step.program, scan, moves, ahead=True)
                moved |= moves.eqns
    parts = _parts(step, plans, moved)
    if not plans and not any(isinstance(part, Gate) for part in parts):
        return _as_it_is(closed, plain, step.stays, args)
    program = step.program
    env: dict[Var, Any] = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    names = {x: name for v, name in step.update.names.items() if not isinstance(x := _read(step.operands, v), Literal)}
    for part in parts:
        if isinstance(part, Gate):
            gate(env, part.held, part.waits_for)
        else:
            env.update(_made(part, env, names))
    return guarded([as_array(v) if isinstance(v, Literal) else env[v] for v in program.outputs], list(args))


def _made(part: Slice | InScan | Rest | Piece, env: Mapping[Var, Any], names: Names) -> Iterable[tuple[Var, Any]]:
    """What a part makes."""
    if isinstance(part, InScan):
        makes = part.makes

        def inside(*operands: Any) -> list[Any]:
            made = scanned(part, dict(zip(part.operands, operands, strict=True)), names)
            return [made[v] for v in makes]

        def apart(*operands: Any) -> list[Any]:
            made = one_after_the_other(part, dict(zip(part.operands, operands, strict=True)))
            return [made[v] for v in makes]

        run = or_whole(inside, apart)
        given = [env[v] for v in part.operands]
        return zip(makes, marked(lambda xs: run(*xs), given, part), strict=True)
    if isinstance(part, Rest):
        operands = [as_array(v) if isinstance(v, Literal) else env[v] for v in part.operands]
        return zip(_vars(part.update.program.outputs), bound(part.update, operands), strict=True)
    if isinstance(part, Piece) and part.how is not None:
        planned, s = part.how, part.slice

        def piece(operands: Sequence[Any]) -> list[Any]:
            inner = dict(zip(s.inputs, operands, strict=True))
            functions([planned], names)(planned, inner)
            return [inner[v] for v in s.outputs]

        return zip(s.outputs, marked(piece, [env[v] for v in s.inputs], part), strict=True)
    s = part.slice if isinstance(part, Piece) else part
    return zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True)


def _as_it_is(closed: ClosedJaxpr, plain: Program, why: tuple[str, ...], args: Sequence[Any]) -> list[Any]:
    """The step as it was, but that its updates say why."""
    if not why:
        return jax_fun(closed)(*args)
    noted = [_with_reasons(eqn, why) if is_update(eqn) else eqn for eqn in plain.eqns]
    jaxpr = Jaxpr([], plain.inputs, plain.outputs, noted, closed.effects, nameless(plain.debug_info))
    return jax_fun(as_closed(jaxpr))(*plain.consts, *args)


def _why_not(closed: ClosedJaxpr, plain: Program) -> tuple[str, ...]:
    """Why a step that is left as it is has no update that moves."""
    updates = sum(map(is_update, plain.eqns))
    if updates and _is_ordered(closed):
        return ("the step has effects whose order would be lost",) if not _has_refs(closed) else ()
    return (f"the step has {updates} updates, and only one alone moves",) if updates > 1 else ()


def _has_refs(closed: ClosedJaxpr) -> bool:
    return any(type(effect).__name__ not in KEPT_EFFECTS for effect in closed.effects)


def _with_reasons(eqn: Equation, why: tuple[str, ...]) -> Equation:
    return eqn.replace(params=eqn.params | {"update": dataclasses.replace(eqn.params["update"], stays=why)})


def _is_ordered(closed: ClosedJaxpr) -> bool:
    """Whether the step has effects whose order would be lost."""
    return any(type(effect).__name__ not in ("DebugEffect", "IOEffect") for effect in closed.effects)


@dataclasses.dataclass(frozen=True)
class Rest:
    """What is left of the update."""

    update: Update
    operands: list[Atom]


def _parts(step: Inlined, plans: Mapping[int, InScan], moved: Set[int]) -> list[Slice | InScan | Rest | Piece | Gate]:
    """The parts of the step, each after what it needs: slices, scans with updates inside, what is left of the update,
    in one piece or in pieces between gates."""
    order: list[Node] | None = None
    apart: dict[int, Rest] = {}  # what is left of the update, for a step without gates
    program, nodes = step.program, list[Node]()
    for k, eqn in enumerate(program.eqns):
        if k in plans:
            nodes.append(Node(plans[k], plans[k].operands, plans[k].makes, kept=True))
        elif id(eqn) not in moved:
            nodes.append(Node(eqn, _vars(eqn.invars), eqn.outvars, bool(eqn.effects)))
    wanted = needed(nodes, _vars(program.outputs))
    # what of the update a scan needs, a learning rate say, stands before it
    ahead = needed(nodes, [v for node in nodes if isinstance(node.payload, InScan) for v in node.reads], kept=False)
    inside = {k for k in wanted - ahead if id(nodes[k].payload) in step.own}
    results = {*_vars(program.outputs)}.union(*(nodes[k].reads for k in wanted - inside))
    if inside:
        own = [nodes[k] for k in sorted(inside)]
        made = {v for node in own for v in node.makes}
        rest = _rest(step, [node.payload for node in own], results)
        reads = dict.fromkeys(v for node in own for v in node.reads if v not in made)
        place = min(inside)
        wanted = wanted - inside | {place}
        results |= {*reads}
        gated = dataclasses.replace(rest, update=dataclasses.replace(rest.update, passes=None))
        if not plans and (pieces := _pieces(step, gated)):
            among = [node for k, node in enumerate(nodes) if k in wanted - {place}] + pieces
            order = interleaved(among, range(len(among)), _vars(program.outputs))
        apart[id(gated)] = rest
        nodes[place] = Node(gated, list(reads), _vars(rest.update.program.outputs))
    nodes = [node if k in wanted else Node(None, [], []) for k, node in enumerate(nodes)]
    if inside and not plans and order is None and step.update.serialise is not Serialise.NONE:
        order = interleaved(nodes, sorted(wanted), _vars(program.outputs))
        if order is None:
            nodes = [dataclasses.replace(node, payload=apart.get(id(node.payload), node.payload)) for node in nodes]
    if order is None:
        order = arranged(nodes, sorted(wanted))

    parts: list[Any] = []
    for is_equations, group in itertools.groupby(order, lambda node: isinstance(node.payload, Equation)):
        if is_equations:
            eqns = [node.payload for node in group]
            outputs = [v for eqn in eqns for v in eqn.outvars if v in results]
            parts.append(slice_of(eqns, outputs, program.debug_info, program.shards))
        else:
            parts += [node.payload for node in group]
    return parts


def _pieces(step: Inlined, rest: Rest) -> list[Node]:
    """What is left of an update in pieces; none where they cannot run between the parts of the step."""
    update, recipe = rest.update, rest.update.program
    if len(update.plan.passes) != 1 or update.plan.passes[0].apart or update.serialise is Serialise.NONE:
        return []
    (only,) = update.plan.passes
    gradients = [recipe.inputs[i] for i in update.gradients]
    given = dict(zip(recipe.inputs, rest.operands, strict=True))
    renamed = {v: x for v, x in given.items() if not isinstance(x, Literal)}
    if len(renamed) < len(given) or any(eqn.effects for eqn in recipe.eqns):
        return []

    def in_step(s: Slice) -> Slice:
        eqns = [eqn.replace(invars=[_read(renamed, v) for v in eqn.invars]) for eqn in s.jaxpr.eqns]
        return slice_of(eqns, s.outputs, recipe.debug_info, recipe.shards)

    found = [Piece(in_step(part), None, tuple(v for v in part.outputs if v in update.results)[:1])
             for _, part in serial_parts(only.prelude, gradients)]  # fmt: skip
    for p in only.slices:
        s = in_step(p.slice)
        how = p.transfer
        if isinstance(how, Chunked):
            how = dataclasses.replace(how, buffers=tuple(v and renamed.get(v, v) for v in how.buffers))
        found.append(Piece(s, dataclasses.replace(p, slice=s, transfer=how), p.token))
    return [Node(piece, piece.slice.inputs, piece.slice.outputs) for piece in found if piece.slice.outputs]


def _rest(step: Inlined, eqns: Sequence[Equation], wanted: Set[Var]) -> Rest:
    """The update of what does not move."""
    update, recipe = step.update, step.update.program
    own = [step.own[id(eqn)] for eqn in eqns]
    made = {v for eqn in own for v in eqn.outvars}
    outputs: list[Atom] = [v for eqn in own for v in eqn.outvars if v in wanted]
    read = dict.fromkeys(v for eqn in own for v in _vars(eqn.invars) if v not in made)
    given = {*recipe.inputs}
    inputs = [v for v in recipe.inputs if v in read] + [v for v in read if v not in given]
    position = {v: k for k, v in enumerate(inputs)}
    args = recipe.inputs[len(recipe.consts) :]
    gradients = tuple(position[args[i]] for i in update.gradients if args[i] in position)
    program = dataclasses.replace(recipe, inputs=inputs, outputs=outputs, eqns=own, consts=[])
    rest = dataclasses.replace(update.replanned(program, gradients), stays=step.stays)
    return Rest(rest, [_read(step.operands, v) for v in inputs])


def _vars(atoms: Sequence[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _read(env: Mapping[Var, Atom], v: Atom) -> Atom:
    return v if isinstance(v, Literal) else env.get(v, v)
