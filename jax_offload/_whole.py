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
from jax_offload._emit.in_scan import one_after_the_other, scanned
from jax_offload._emit.loop import or_whole
from jax_offload._emit.region import KEPT_EFFECTS, Update, bound, is_update, marked
from jax_offload._emit.run import as_array
from jax_offload._emit.transfers import Names
from jax_offload._ir.arrange import Node, arranged, needed
from jax_offload._ir.program import Program, flat
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.in_scan import InScan, in_scan
from jax_offload._plan.moves import moves_of


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
    if len(found) != 1 or (update := found[0].params["update"]) is None:
        return None
    recipe = update.program
    operands = dict(zip(recipe.inputs, found[0].invars[-len(recipe.inputs) :], strict=True))
    given: dict[Var, Atom] = dict(operands)
    eqns: list[Equation] = []
    own: dict[int, Equation] = {}
    for eqn in program.eqns:
        if eqn is found[0]:
            for each in recipe.eqns:
                new = each.replace(invars=[_read(operands, v) for v in each.invars])
                own[id(new)] = each
                eqns.append(new)
            given |= {v: _read(operands, made) for v, made in zip(eqn.outvars, update.made, strict=True)}
        else:
            eqns.append(eqn.replace(invars=[_read(given, v) for v in eqn.invars]))
    # of an update that is the rest of one, not all arguments are left
    left = {v: operands[old] for v, old in update.next_of.items() if old in operands}
    next_of = {v: x for v, x in left.items() if not isinstance(x, Literal)}
    whole = dataclasses.replace(program, eqns=eqns, outputs=[_read(given, v) for v in program.outputs])
    return Inlined(whole, update, own, operands, next_of)


def emitted(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The step's results, of its flat arguments."""
    plain = flat(closed)
    found = None if _is_ordered(closed) else inlined(plain)
    if found is None:
        return _as_it_is(closed, plain, _why_not(closed, plain), args)
    step, plans, moved = found, dict[int, InScan](), set[int]()
    for at in reversed(range(len(step.program.eqns))):
        if (scan := scan_of(step.program.eqns[at])) is not None and scan.length:
            moves, why = moves_of(step.program, scan, at, step.next_of, moved)
            step = dataclasses.replace(step, stays=(*step.stays, *why))
            if moves.moves:
                plans[at] = in_scan(step.program, scan, moves)
                moved |= moves.eqns
    if not plans:
        return _as_it_is(closed, plain, step.stays, args)
    program = step.program
    env: dict[Var, Any] = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    names = {x: name for v, name in step.update.names.items() if not isinstance(x := _read(step.operands, v), Literal)}
    for part in _parts(step, plans, moved):
        if isinstance(part, InScan):
            made = _scan_marked(part, [env[v] for v in part.operands], names)
        elif isinstance(part, _Rest):
            operands = [as_array(v) if isinstance(v, Literal) else env[v] for v in part.operands]
            made = zip(_vars(part.update.program.outputs), bound(part.update, operands), strict=True)
        else:
            made = zip(part.outputs, part.run(*(env[v] for v in part.inputs)), strict=True)
        env.update(made)
    return guarded([as_array(v) if isinstance(v, Literal) else env[v] for v in program.outputs], list(args))


def _scan_marked(plan: InScan, operands: Sequence[Any], names: Names) -> Iterable[tuple[Var, Any]]:
    makes = plan.makes

    def inside(*operands: Any) -> list[Any]:
        made = scanned(plan, dict(zip(plan.operands, operands, strict=True)), names)
        return [made[v] for v in makes]

    def apart(*operands: Any) -> list[Any]:
        made = one_after_the_other(plan, dict(zip(plan.operands, operands, strict=True)))
        return [made[v] for v in makes]

    run = or_whole(inside, apart)
    return zip(makes, marked(lambda operands: run(*operands), plan, operands), strict=True)


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
class _Rest:
    """What is left of the update."""

    update: Update
    operands: list[Atom]


def _parts(step: Inlined, plans: Mapping[int, InScan], moved: Set[int]) -> list[Slice | InScan | _Rest]:
    """The parts of the step, each after what it needs: slices, scans with updates inside, the rest of the update."""
    program, nodes = step.program, list[Node]()
    for k, eqn in enumerate(program.eqns):
        if k in plans:
            nodes.append(Node(plans[k], plans[k].operands, plans[k].makes))
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
        nodes[place] = Node(rest, list(reads), _vars(rest.update.program.outputs))
        results |= {*reads}
    order = arranged([node if k in wanted else Node(None, [], []) for k, node in enumerate(nodes)], wanted)

    parts: list[Slice | InScan | _Rest] = []
    for is_equations, group in itertools.groupby(order, lambda node: not isinstance(node.payload, InScan | _Rest)):
        if is_equations:
            eqns = [node.payload for node in group]
            outputs = [v for eqn in eqns for v in eqn.outvars if v in results]
            parts.append(slice_of(eqns, outputs, program.debug_info, program.shards))
        else:
            parts += [node.payload for node in group]
    return parts


def _rest(step: Inlined, eqns: Sequence[Equation], wanted: Set[Var]) -> _Rest:
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
    return _Rest(rest, [_read(step.operands, v) for v in inputs])


def _vars(atoms: Sequence[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _read(env: Mapping[Var, Atom], v: Atom) -> Atom:
    return v if isinstance(v, Literal) else env.get(v, v)
