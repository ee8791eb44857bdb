"""Decide where each part of a whole step runs, with its updates inlined. Nothing is emitted here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

from jax_offload._base.jaxprs import Equation, Var, located, scan_of, variables
from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program
from jax_offload._ir.propagate import Mask, Node, forward, needed, topological, union
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.gates import in_turn, interleaved
from jax_offload._plan.hoist import MICROBATCHES, Hoist
from jax_offload._plan.in_scan import CannotHoist, InScan
from jax_offload._plan.plan import Gate, Planned, Whole, Window
from jax_offload._step.canonical import canonical, peeled, why_not_peeled
from jax_offload._step.inlined import Inlined, consisting_of, inlined, opened

AHEAD = (
    "a number made of all of its state, or of all rows of a leaf, takes a pass of its own, ahead; keep leaves on the "
    "device with fraction="
)
IN_A_SHARD_MAP = "its gradients are made inside a shard_map; call the update inside the same shard_map"


@dataclasses.dataclass(frozen=True)
class Parts:
    """A step, taken apart.

    Attributes:
      step: the step, with its updates inlined.
      parts: the parts in an order that respects their needs: slices, scans with updates inside, and the rest of the
        update, in one piece or in pieces between gates.
      moved: whether a part of the update runs elsewhere.
      stays: why leaves do not move.
      sums_up: the scans that carry sums of its gradients.
    """

    step: Inlined
    parts: list[Node]
    moved: bool
    stays: tuple[str, ...]
    sums_up: tuple[Equation, ...] = ()


def parts_of(plain: Program) -> Parts | None:
    """Take a step's program apart; ``None`` if it has no update.

    If gradients are summed up over microbatches, the last one runs by itself when its backward pass can host the
    update. If the step begins with the update, for the gradients of the batch before, the first one's forward pass can.
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
            whys += decided.stays
        whys += [why] if why else []
    why = "; ".join(dict.fromkeys(whys))  # the last microbatch does not host the update
    stays = (f"{MICROBATCHES}: {why}" if why and each.startswith(MICROBATCHES) else each for each in parts.stays)
    return dataclasses.replace(parts, stays=tuple(stays))


def _reading_updated(plain: Program) -> list[int]:
    """Find the microbatch scans that read whole results of an update at the beginning of the step."""
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
    if step.loads_whole:
        for at in scans:
            if at not in plans and (plan := Hoist(step.program, at, step.next_of).streaming()) is not None:
                plans[at] = plan
    awaited = _awaited(step, stay_behind, moved)
    stays = [*(why for at in stay_behind if at in awaited for why in stay_behind[at]), *stay_ahead]
    parts, why = _parts(step, plans, moved)
    if why and not stays:
        made = _shard_map_of_gradients(step)
        stays = [why if made is None else located(IN_A_SHARD_MAP, made)]
    moved_any = bool(plans) or any(isinstance(part.payload, Gate) for part in parts)
    sums_up = tuple(step.program.eqns[at] for at in summing if at in awaited)
    return Parts(step, parts, moved_any, tuple(dict.fromkeys(stays)), sums_up)


def _shard_map_of_gradients(step: Inlined) -> Equation | None:
    """The ``shard_map`` that makes gradients, if only elementwise arithmetic has changed them since."""
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
    """The places of the scans whose results an update outside any scan needs. Other scans, such as those that make the
    gradients of a rotated step, serve a later update."""
    bits = {at: 1 << k for k, at in enumerate(scans)}
    needs, found = dict[Var, Mask](), 0
    for at, eqn in enumerate(step.program.eqns):
        masks = forward(eqn, needs)
        needs.update((v, mask | bits.get(at, 0)) for v, mask in zip(eqn.outvars, masks, strict=True))
        if id(eqn) not in moved:
            found |= union(needs[v] for v in eqn.outvars if v in step.next_of and v.aval.shape)
    return {at for at, bit in bits.items() if bit & found}


def _parts(step: Inlined, plans: Mapping[int, InScan], moved: Set[int]) -> tuple[list[Node], str]:
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
            inside.setdefault(own, []).append(k)
    results = {*variables(program.outputs)}
    read_by = {k: {*nodes[k].reads} for k in wanted}
    left: dict[int, Update] = {}  # its place -> the rest of an update
    for number, which in inside.items():
        eqns = [nodes[k].payload for k in which]
        others = results.union(*(read_by[k] for k in wanted - {*which}))
        left[which[0]] = consisting_of(step.updates[number], eqns, others)
    results |= set[Var]().union(*(read_by[k] for k in wanted - {k for which in inside.values() for k in which}))
    wanted -= {k for which in inside.values() for k in which[1:]}
    for place, rest in left.items():
        results.update(rest.operands)
        gated = dataclasses.replace(rest, backward=None)
        nodes[place] = Node(gated, rest.operands, variables(rest.program.outputs))
    if left:
        nodes = [node if k in wanted else Node(None, [], []) for k, node in enumerate(nodes)]
        if not plans:
            order, why = _between_passes(step, nodes, sorted(wanted), [*left])
            if order is None:  # nothing but the update holds the passes back
                for place, rest in left.items():
                    nodes[place] = dataclasses.replace(nodes[place], payload=rest)
    if order is None:
        order = in_turn(topological(nodes, sorted(wanted))) if plans else topological(nodes, sorted(wanted))

    parts: list[Node] = []
    for is_equations, group in itertools.groupby(order, lambda node: isinstance(node.payload, Equation)):
        if is_equations:
            eqns = [node.payload for node in group]
            outputs = [v for eqn in eqns for v in eqn.outvars if v in results]
            whole = slice_of(eqns, outputs, program.debug_info, program.shards)
            parts.append(Node(whole, whole.inputs, whole.outputs))
        else:
            parts += group
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
            pieces += _pieces(nodes[place].payload)
        return interleaved(pieces, range(len(pieces)), outputs), ""
    except CannotHoist as stays:
        on_host = any(nodes[place].payload.planned for place in places)
        own = next(eqn for eqn in step.program.eqns if id(eqn) in step.own)
        why = located(str(stays), own) if on_host else ""
    try:
        return interleaved(nodes, which, outputs), why
    except CannotHoist:
        return None, why


def _pieces(rest: Update) -> list[Node]:
    """Return the rest of an update in pieces.

    Raises:
      CannotHoist: the pieces cannot run between the parts of the step.
    """
    update = dataclasses.replace(rest, gated=True)
    if len(update.passes) != 1:
        raise CannotHoist(AHEAD)
    (only,) = update.passes
    if only.in_own_loop:
        raise CannotHoist(f"it runs in a loop of its own, {only.slices[0].window.own_loop}; scan over stacked layers")
    if any(eqn.effects for eqn in update.program.eqns):
        raise CannotHoist("it has effects, such as a callback; call back from the step, not from the optimizer")
    window = only.slices[0].window if only.slices else Window(0, "nothing moves")
    apart = [s for s in only.first if isinstance(s, Slice)]
    first = [Planned(s, Whole(), window, tuple(v for v in s.outputs if v in update.next_values)[:1]) for s in apart]
    return [Node(p, p.slice.inputs, p.slice.outputs) for p in [*first, *only.slices] if p.slice.outputs]
