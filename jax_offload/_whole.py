"""A whole step, rewritten: updates run where their gradients are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jax_offload._base.donation import guarded
from jax_offload._base.jaxprs import scan_of
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.in_scan import scanned
from jax_offload._emit.region import Update, bound, is_update
from jax_offload._emit.run import as_array
from jax_offload._ir.program import Program, Var, flat
from jax_offload._ir.slices import slice_of
from jax_offload._plan.in_scan import InScan, in_scan
from jax_offload._plan.moves import moves_of


def rewritten(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, its updates inside the scans that make their gradients, where that can be."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))

        def on_leaves(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return step(*args, **kwargs)

        closed, shapes = jax.make_jaxpr(on_leaves, return_shape=True)(*leaves)
        results = emitted(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A step with its update inlined.

    Attributes:
      program: it.
      own: the equations of the update, by identity, as they are in the update's own program.
      operands: the update's inputs -> what the step gives them.
      next_of: result -> the variable of the step that it is the next value of.
    """

    program: Program
    update: Update
    own: Mapping[int, Any]
    operands: Mapping[Var, Any]
    next_of: Mapping[Var, Var]


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
    program = flat(closed)
    step = inlined(program)
    plans: list[tuple[int, InScan]] = []
    claimed: set[int] = set()
    if step is not None:
        program = step.program
        for at in reversed(range(len(program.eqns))):
            if (scan := scan_of(program.eqns[at])) is not None:
                moves, why = moves_of(program, scan, at, step.next_of, claimed)
                if moves.moves:
                    plans.append((at, in_scan(program, scan, moves)))
                    claimed |= moves.eqns
    if step is None or not plans:
        return jex.jaxpr_as_fun(closed)(*args)
    env = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    names = {v: name for r, name in step.update.names.items() if not isinstance(v := _read(step.operands, r), jex.Literal)}
    for node in _ordered(step, dict(plans), claimed):
        if isinstance(node, InScan):
            env.update(scanned(node, env, names))
        elif isinstance(node, _Rest):
            values = bound(node.update, [env[v] if not isinstance(v, jex.Literal) else as_array(v) for v in node.operands])
            env.update(zip(node.update.program.outputs, values, strict=True))
        else:
            env.update(zip(node.outputs, node.run(*(env[v] for v in node.inputs)), strict=True))
    return guarded([as_array(v) if isinstance(v, jex.Literal) else env[v] for v in program.outputs], list(args))


@dataclasses.dataclass(frozen=True)
class _Rest:
    """What is left of the update."""

    update: Update
    operands: list[Any]


def _ordered(step: Inlined, plans: Mapping[int, InScan], moved: set[int]) -> list[Any]:
    """The parts of the step, each after what it needs: slices, scans with updates inside, the rest of the update."""
    program = step.program
    nodes: list[Any] = [plans.get(k, eqn) for k, eqn in enumerate(program.eqns) if id(eqn) not in moved]
    made: dict[Var, int] = {}
    for k, node in enumerate(nodes):
        made.update((v, k) for v in (node.makes if isinstance(node, InScan) else node.outvars))

    def reads(k: int) -> list[Any]:
        node = nodes[k]
        return [v for v in (node.reads if isinstance(node, InScan) else node.invars) if not isinstance(v, jex.Literal)]

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
    return _Rest(update.replanned(program, gradients), [_read(step.operands, v) for v in inputs])


def _read(env: Mapping[Var, Any], v: Any) -> Any:
    return v if isinstance(v, jex.Literal) else env.get(v, v)
