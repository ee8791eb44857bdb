"""A whole step in parts: its update inlined, and each part of it where it is to run. Decided here, not emitted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, located, renamed, scan_of, variables
from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._ir.peel import peeled, why_not_peeled
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program
from jax_offload._ir.propagate import Mask, Node, forward, needed, topological, union
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.gates import Gate, Piece, in_turn, interleaved
from jax_offload._plan.hoist import MICROBATCHES, Hoist
from jax_offload._plan.in_scan import CannotHoist, InScan
from jax_offload._plan.plan import Chunked
from jax_offload._step.canonical import canonical
from jax_offload._step.inlined import Inlined, inlined, opened


@dataclasses.dataclass(frozen=True)
class Rest:
    """The part of an update that does not move."""

    update: Update
    operands: list[Atom]

    def saying(self, why: tuple[str, ...]) -> Rest:
        """The same part, with the reason why it does not move."""
        return dataclasses.replace(self, update=dataclasses.replace(self.update, stays=why))


IN_A_SHARD_MAP = "its gradients are made inside a shard_map; call the update inside the same shard_map"
Part = Slice | InScan | Rest | Piece | Gate


@dataclasses.dataclass(frozen=True)
class Parts:
    """A step, taken apart.

    Attributes:
      step: the step, with its updates inlined.
      parts: the parts in an order that respects their needs: slices, scans with updates inside, and the rest of the
        update, in one piece or in pieces between gates.
      moved: whether a part of the update runs elsewhere.
      sums_up: the scans that carry sums of its gradients.
    """

    step: Inlined
    parts: list[Part]
    moved: bool
    sums_up: tuple[Equation, ...] = ()

    def saying_of_microbatches(self, why: str) -> Parts:
        """The same step, with the reason why the last microbatch does not host the update."""
        if not why:
            return self
        stays = tuple(f"{MICROBATCHES}: {why}" if each.startswith(MICROBATCHES) else each for each in self.step.stays)
        parts: list[Part] = [part.saying(stays) if isinstance(part, Rest) else part for part in self.parts]
        return dataclasses.replace(self, step=dataclasses.replace(self.step, stays=stays), parts=parts)


def parts_of(plain: Program) -> Parts | None:
    """The parts that a step runs in, of the step's program; ``None`` where it has no update, or several.

    Where gradients are summed up over microbatches, the last one runs apart if its backward pass can host the update.
    12x4096x4096, microbatches of 16384 tokens, compiled for an H200: 0.07 of the transfers exposed, and not 1.05. Where
    the step begins with the update, for the gradients of the batch before, the first one's forward pass can.
    """
    plain = opened(plain)
    found = inlined(plain)
    if found is None:
        return None
    parts = _decided(found)
    if parts.moved:
        return parts
    place_of = {v: at for at, eqn in enumerate(plain.eqns) for v in eqn.outvars}  # a scan's results are the same there
    summing = [place_of[eqn.outvars[0]] for eqn in parts.sums_up if eqn.outvars[0] in place_of]
    ways = [(at, False) for at in summing] or [(at, True) for at in _reading_updated(plain)]
    whys: list[str] = []
    for at, first in ways:
        why = why_not_peeled(plain, at)
        again = None if why else inlined(opened(canonical(peeled(plain, at, first=first))))
        if again is not None:
            decided = _decided(again, apart=True)
            if decided.moved:
                return decided
            whys += decided.step.stays
        whys += [why] if why else []
    return parts.saying_of_microbatches("; ".join(dict.fromkeys(whys)))


def _reading_updated(plain: Program) -> list[int]:
    """The scans that read the update's results as a whole: over microbatches, in a step that begins with the update."""
    defined, found = set[Var](), list[int]()
    for at, eqn in enumerate(plain.eqns):
        if is_update(eqn) or not defined.isdisjoint(variables(eqn.invars)):
            scan = scan_of(eqn)
            if scan is not None and not defined.isdisjoint(variables(scan.consts)):
                found.append(at)
            defined.update(eqn.outvars)
    return found


def _decided(found: Inlined, apart: bool = False) -> Parts:
    """Decide where the update runs. ``apart``: whether an iteration runs apart, and continues the sums."""
    step, plans, moved = found, dict[int, InScan](), set[int]()
    scans = [at for at, eqn in enumerate(step.program.eqns) if (scan := scan_of(eqn)) is not None and scan.length]
    stay_behind, stay_ahead, summing = dict[int, list[str]](), list[str](), list[int]()
    for at in reversed(scans):
        hoist = Hoist(step.program, at, step.next_of, step.waiting, claimed=moved)
        plan, stay_behind[at] = hoist.behind()
        if plan is not None:
            plans[at] = plan
            moved |= plan.eqns
        elif not apart and (how := hoist.sums_up(step.gradients)):
            stay_behind[at].append(how)
            summing.append(at)
    for at in scans:
        if at not in plans and id(step.program.eqns[at]) not in moved:
            read = {v for plan in plans.values() for v in plan.operands}
            plan, why = Hoist(step.program, at, step.next_of, claimed=moved, own={*step.own}, read=read).ahead()
            stay_ahead += why
            if plan is not None:
                plans[at] = plan
                moved |= plan.eqns
    awaited = _awaited(step, stay_behind, moved)
    stays = [*(why for at in stay_behind if at in awaited for why in stay_behind[at]), *stay_ahead]
    step = dataclasses.replace(step, stays=tuple(dict.fromkeys(stays)))
    parts, why = _parts(step, plans, moved)
    if why and not step.stays:
        made = _shard_map_of_gradients(step)
        why = why if made is None else located(IN_A_SHARD_MAP, made)
        step = dataclasses.replace(step, stays=(why,))
        parts = [part.saying(step.stays) if isinstance(part, Rest) else part for part in parts]
    moved_any = bool(plans) or any(isinstance(part, Gate) for part in parts)
    return Parts(step, parts, moved_any, tuple(step.program.eqns[at] for at in summing if at in awaited))


def _shard_map_of_gradients(step: Inlined) -> Equation | None:
    """The ``shard_map`` that makes gradients, which at most elementwise arithmetic has changed since."""
    wanted = {*step.gradients}
    for eqn in reversed(step.program.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        if eqn.primitive.name == "shard_map":
            return eqn
        if eqn.primitive.name in ELEMENTWISE:
            wanted.update(variables(eqn.invars))
    return None


def _awaited(step: Inlined, scans: Iterable[int], moved: Set[int]) -> set[int]:
    """The scans (by their places) whose results an update outside any scan needs. The results of the others, such as
    the gradients of a rotated step, are for a later update."""
    bits = {at: 1 << k for k, at in enumerate(scans)}
    needs, found = dict[Var, Mask](), 0
    for at, eqn in enumerate(step.program.eqns):
        masks = forward(eqn, needs)
        needs.update((v, mask | bits.get(at, 0)) for v, mask in zip(eqn.outvars, masks, strict=True))
        if id(eqn) not in moved:
            found |= union(needs[v] for v in eqn.outvars if v in step.next_of and v.aval.shape)
    return {at for at, bit in bits.items() if bit & found}


def _parts(step: Inlined, plans: Mapping[int, InScan], moved: Set[int]) -> tuple[list[Part], str]:
    """The parts of the step in an order that respects their needs: slices, scans with updates inside, and the rest of
    the update, in one piece or in pieces between gates; and why in one piece."""
    order: list[Node] | None = None
    why = ""
    program, nodes = step.program, list[Node]()
    for k, eqn in enumerate(program.eqns):
        if k in plans:
            nodes.append(Node(plans[k], plans[k].operands, plans[k].makes, kept=True))
        elif id(eqn) not in moved:
            nodes.append(Node(eqn, variables(eqn.invars), eqn.outvars, bool(eqn.effects)))
    wanted = needed(nodes, variables(program.outputs))
    # the part of an update that a scan needs, such as a learning rate, stands before it
    ahead = needed(nodes, [v for node in nodes if isinstance(node.payload, InScan) for v in node.reads], kept=False)
    inside: dict[int, list[int]] = {}
    for k in sorted(wanted - ahead):
        if (own := step.own.get(id(nodes[k].payload))) is not None:
            inside.setdefault(own.update, []).append(k)
    results = {*variables(program.outputs)}
    read_by = {k: {*nodes[k].reads} for k in wanted}
    left: dict[int, Rest] = {}  # the place of an update's rest -> the rest
    for number, which in inside.items():
        eqns = [nodes[k].payload for k in which]
        others = results.union(*(read_by[k] for k in wanted - {*which}))
        left[which[0]] = _rest(step, number, eqns, others)
    results |= set[Var]().union(*(read_by[k] for k in wanted - {k for which in inside.values() for k in which}))
    wanted -= {k for which in inside.values() for k in which[1:]}
    for place, rest in left.items():
        reads = list(dict.fromkeys(variables(rest.operands)))
        results |= {*reads}
        gated = dataclasses.replace(rest, update=dataclasses.replace(rest.update, backward=None))
        nodes[place] = Node(gated, reads, variables(rest.update.program.outputs))
    if left:
        nodes = [node if k in wanted else Node(None, [], []) for k, node in enumerate(nodes)]
        if not plans:
            order, why = _between_passes(step, nodes, sorted(wanted), [*left])
            if order is None:  # nothing but the update holds the passes back
                for place, rest in left.items():
                    nodes[place] = dataclasses.replace(nodes[place], payload=rest)
    if order is None:
        order = in_turn(topological(nodes, sorted(wanted))) if plans else topological(nodes, sorted(wanted))

    parts: list[Any] = []
    for is_equations, group in itertools.groupby(order, lambda node: isinstance(node.payload, Equation)):
        if is_equations:
            eqns = [node.payload for node in group]
            outputs = [v for eqn in eqns for v in eqn.outvars if v in results]
            parts.append(slice_of(eqns, outputs, program.debug_info, program.shards))
        else:
            parts += [node.payload for node in group]
    return parts, why


def _between_passes(
    step: Inlined, nodes: Sequence[Node], which: Sequence[int], places: Sequence[int]
) -> tuple[list[Node] | None, str]:
    """The order with the rests of the updates, the nodes at ``places``, between the passes: in pieces, or else each in
    one, and why; ``None`` if there is no place for gates."""
    outputs = variables(step.program.outputs)
    try:
        pieces = [nodes[k] for k in which if k not in places]
        for place in places:
            pieces += _pieces(step, nodes[place].payload)
        return interleaved(pieces, range(len(pieces)), outputs), ""
    except CannotHoist as stays:
        on_host = any(nodes[place].payload.update.planned for place in places)
        own = next(eqn for eqn in step.program.eqns if id(eqn) in step.own)
        why = located(str(stays), own) if on_host else ""
    try:
        return interleaved(nodes, which, outputs), why
    except CannotHoist:
        return None, why


def _pieces(step: Inlined, rest: Rest) -> list[Node]:
    """The rest of an update in pieces.

    Raises:
      CannotHoist: the pieces cannot run between the parts of the step.
    """
    update, recipe = dataclasses.replace(rest.update, gated=True), rest.update.program
    if len(update.passes) != 1:
        raise CannotHoist("a number made of all of its state, or of all rows of a leaf, takes a pass of its own, ahead")
    (only,) = update.passes
    if only.in_own_loop:
        raise CannotHoist(f"it runs in a loop of its own, {only.slices[0].window.own_loop}")
    if any(eqn.effects for eqn in recipe.eqns):
        raise CannotHoist("it has effects, such as a callback")
    given = dict(zip(recipe.inputs, rest.operands, strict=True))
    variable = {v: x for v, x in given.items() if not isinstance(x, Literal)}

    def in_step(s: Slice) -> Slice:
        eqns = [eqn.replace(invars=[renamed(given, v) for v in eqn.invars]) for eqn in s.jaxpr.eqns]
        return slice_of(eqns, s.outputs, recipe.debug_info, step.program.shards)

    found = [Piece(in_step(part.slice), None, tuple(v for v in part.slice.outputs if v in update.next_values)[:1])
             for part in only.prelude_parts]  # fmt: skip
    for p in only.slices:
        s = in_step(p.slice)
        how = p.transfer
        if isinstance(how, Chunked):
            # an update may get one variable of the step twice, as gradient and as parameter: then it is one operand
            dims = {variable.get(v, v): dim for v, dim in zip(p.slice.inputs, how.dims, strict=True)}
            overwritten = tuple(v and variable.get(v, v) for v in how.buffers)
            how = dataclasses.replace(how, dims=tuple(dims[v] for v in s.inputs), buffers=overwritten)
        found.append(Piece(s, dataclasses.replace(p, slice=s, transfer=how), p.token))
    return [Node(piece, piece.slice.inputs, piece.slice.outputs) for piece in found if piece.slice.outputs]


def _rest(step: Inlined, number: int, eqns: Sequence[Equation], wanted: Set[Var]) -> Rest:
    """The rest of the update numbered ``number``."""
    update = step.updates[number]
    recipe = update.program
    own = [step.own[id(eqn)].equation for eqn in eqns]
    defined = {v for eqn in own for v in eqn.outvars}
    outputs: list[Atom] = [v for eqn in own for v in eqn.outvars if v in wanted]
    read = dict.fromkeys(v for eqn in own for v in variables(eqn.invars) if v not in defined)
    given = {*recipe.inputs}
    inputs = [v for v in recipe.inputs if v in read] + [v for v in read if v not in given]
    position = {v: k for k, v in enumerate(inputs)}
    args = recipe.inputs[len(recipe.consts) :]
    gradients = tuple(position[args[i]] for i in update.gradients if args[i] in position)
    program = dataclasses.replace(recipe, inputs=inputs, outputs=outputs, eqns=own, consts=[])
    rest = dataclasses.replace(update.replanned(program, gradients), stays=step.stays)
    return Rest(rest, [renamed(step.operands, v) for v in inputs])
