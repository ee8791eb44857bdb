"""A whole step, rewritten: updates run where their gradients are made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jax_offload._base.arrays import is_array
from jax_offload._base.donation import guarded
from jax_offload._base.jaxprs import jax_fun, scan_of
from jax_offload._emit.in_scan import scanned
from jax_offload._emit.region import Update, bound, is_update, marked
from jax_offload._emit.run import as_array
from jax_offload._emit.transfers import Names
from jax_offload._ir.program import Program, Var, flat
from jax_offload._ir.slices import slice_of
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
        closed, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(*given)
        return jax.tree.unflatten(jax.tree.structure(shapes), emitted(closed, given))

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
    own: Mapping[int, Any]
    operands: Mapping[Var, Any]
    next_of: Mapping[Var, Var]
    stays: tuple[str, ...] = ()


def inlined(program: Program) -> Inlined | None:
    """The program with its only update inlined; ``None`` where it has none, or several."""
    found = [eqn for eqn in program.eqns if is_update(eqn)]
    if len(found) != 1 or (update := found[0].params["update"]) is None:
        return None
    recipe = update.program
    operands = dict(zip(recipe.inputs, found[0].invars[-len(recipe.inputs) :], strict=True))
    given: dict[Var, Any] = dict(operands)
    eqns, own = [], {}
    for eqn in program.eqns:
        if eqn is found[0]:
            for each in recipe.eqns:
                new = each.replace(invars=[_read(operands, v) for v in each.invars])
                own[id(new)] = each
                eqns.append(new)
            given |= {v: _read(operands, made) for v, made in zip(eqn.outvars, update.made, strict=True)}
        else:
            eqns.append(eqn.replace(invars=[_read(given, v) for v in eqn.invars]))
    next_of = {v: operands[old] for v, old in update.next_of.items() if not isinstance(operands[old], jex.Literal)}
    whole = dataclasses.replace(program, eqns=eqns, outputs=[_read(given, v) for v in program.outputs])
    return Inlined(whole, update, own, operands, next_of)


def emitted(closed: Any, args: Sequence[Any]) -> list[Any]:
    """The step's results, of its flat arguments."""
    found = None if _is_ordered(closed) else inlined(flat(closed))
    if found is None:
        return jax_fun(closed)(*args)
    step, plans, moved = found, {}, set()
    for at in reversed(range(len(step.program.eqns))):
        if (scan := scan_of(step.program.eqns[at])) is not None:
            moves, why = moves_of(step.program, scan, at, step.next_of, moved)
            step = dataclasses.replace(step, stays=(*step.stays, *why))
            if moves.moves:
                plans[at] = in_scan(step.program, scan, moves)
                moved |= moves.eqns
    program = step.program
    env: dict[Var, Any] = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    names = {x: name for v, name in step.update.names.items() if not isinstance(x := _read(step.operands, v), jex.Literal)}
    for part in _parts(step, plans, moved):
        if isinstance(part, InScan):
            made = _scan_marked(part, [env[v] for v in part.operands], names)
        elif isinstance(part, _Rest):
            operands = [as_array(v) if isinstance(v, jex.Literal) else env[v] for v in part.operands]
            made = zip(part.update.program.outputs, bound(part.update, operands), strict=True)
        else:
            made = zip(part.outputs, part.run(*(env[v] for v in part.inputs)), strict=True)
        env.update(made)
    return guarded([as_array(v) if isinstance(v, jex.Literal) else env[v] for v in program.outputs], list(args))


def _scan_marked(plan: InScan, operands: Sequence[Any], names: Names) -> Iterable[tuple[Var, Any]]:
    makes = plan.makes

    def run(operands: Sequence[Any]) -> list[Any]:
        made = scanned(plan, dict(zip(plan.operands, operands, strict=True)), names)
        return [made[v] for v in makes]

    return zip(makes, marked(run, plan, operands), strict=True)


def _is_ordered(closed: Any) -> bool:
    """Whether the step has effects whose order would be lost."""
    return any(type(effect).__name__ not in ("DebugEffect", "IOEffect") for effect in closed.effects)


@dataclasses.dataclass(frozen=True)
class _Rest:
    """What is left of the update."""

    update: Update
    operands: list[Any]


def _parts(step: Inlined, plans: Mapping[int, InScan], moved: set[int]) -> list[Any]:
    """The parts of the step, each after what it needs: slices, scans with updates inside, the rest of the update."""
    program = step.program
    nodes: list[Any] = [plans.get(k, eqn) for k, eqn in enumerate(program.eqns) if id(eqn) not in moved]
    made: dict[Var, int] = {}
    for k, node in enumerate(nodes):
        made.update((v, k) for v in (node.makes if isinstance(node, InScan) else node.outvars))

    def reads(k: int) -> list[Any]:
        node = nodes[k]
        return [v for v in (node.operands if isinstance(node, InScan) else node.invars) if not isinstance(v, jex.Literal)]

    # what is needed at all, and what a scan with updates inside needs, and so stands before it
    needed: set[int] = set()
    ahead: set[int] = set()

    def want(variables: Sequence[Any], into: set[int]) -> None:
        todo = [made[v] for v in variables if not isinstance(v, jex.Literal) and v in made]
        while todo:
            k = todo.pop()
            if k not in into:
                into.add(k)
                todo += [made[v] for v in reads(k) if v in made]

    want(program.outputs, needed)
    for k, node in enumerate(nodes):
        if not isinstance(node, InScan) and node.effects:
            needed.add(k)
            want(reads(k), needed)
    for k, node in enumerate(nodes):
        if isinstance(node, InScan):
            want(reads(k), ahead)
    rest = [k for k in sorted(needed) if not isinstance(nodes[k], InScan) and id(nodes[k]) in step.own and k not in ahead]
    inside = {*rest}
    place = rest[0] if rest else None

    order: list[Any] = []
    done: set[int] = set()
    state: dict[str, Any] = {"rest": None}

    def visit(k: int) -> None:
        stack = [(k, False)]
        while stack:
            k, ready = stack.pop()
            if k in inside:
                k = place
            if k in done:
                continue
            members = rest if k == place else [k]
            if ready:
                done.update(members)
                order.append(k)
                continue
            stack.append((k, True))
            for m in reversed(members):
                stack += [(made[v], False) for v in reads(m) if v in made and made[v] not in inside and made[v] not in done]

    for k in sorted(needed):
        visit(k)

    results = {v for v in program.outputs if not isinstance(v, jex.Literal)}
    wanted = results | {v for k in needed if k not in inside for v in reads(k)} 
    parts: list[Any] = []
    run: list[Any] = []

    def flush() -> None:
        if run:
            outputs = [v for eqn in run for v in eqn.outvars if v in wanted or v in rest_reads]
            parts.append(slice_of(run, outputs, program.debug_info, {}))
            run.clear()

    rest_reads = {v for k in rest for v in reads(k)}
    for k in order:
        if k == place:
            flush()
            parts.append(_rest(step, [nodes[j] for j in rest], wanted))
        elif isinstance(nodes[k], InScan):
            flush()
            parts.append(nodes[k])
        else:
            run.append(nodes[k])
    flush()
    return parts


def _rest(step: Inlined, eqns: Sequence[Any], wanted: set[Var]) -> _Rest:
    """The update of what does not move."""
    update, recipe = step.update, step.update.program
    own = [step.own[id(eqn)] for eqn in eqns]
    made = {v for eqn in own for v in eqn.outvars}
    outputs = [v for eqn in own for v in eqn.outvars if v in wanted]
    read = {v for eqn in own for v in eqn.invars if not isinstance(v, jex.Literal)} - made
    inputs = [v for v in recipe.inputs if v in read]
    inputs += sorted(read - {*inputs}, key=str)
    position = {v: k for k, v in enumerate(inputs)}
    args = recipe.inputs[len(recipe.consts) :]
    gradients = tuple(position[args[i]] for i in update.gradients if args[i] in position)
    program = dataclasses.replace(recipe, inputs=inputs, outputs=outputs, eqns=list(own), consts=[])
    rest = dataclasses.replace(update.replanned(program, gradients), stays=step.stays)
    return _Rest(rest, [_read(step.operands, v) for v in inputs])


def _read(env: Mapping[Var, Any], v: Any) -> Any:
    return v if isinstance(v, jex.Literal) else env.get(v, v)
