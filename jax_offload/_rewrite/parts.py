"""Decide where each part of a whole step runs, with its updates inlined. Nothing is emitted here.

For each scan it tries the policies one after the other: run updates in the scan that makes their gradients
(``Hoist.into_backward``), only load parameters by rows (``Hoist.streaming``), run updates in the scan that reads their
new parameters (``Hoist.into_forward``). If no scan takes an update, gates may hold its pieces between the passes. To
add a policy:

1. Add a method to ``Hoist`` (``_schedule/hoist.py``) that returns an ``InScan`` or ``None``, and the reasons why other
   updates stay. Call it in ``decided`` ahead of the policies that it should precede: the first plan with updates for a
   scan counts, and replaces one that only loads. A reason ends with a fix; ``placement`` prints it.
2. Describe what an iteration does by fields of ``InScan`` (``_schedule/in_scan.py``). ``moves`` are the updates inside,
   ``eqns`` the equations that leave their place, ``kept`` the stacked results that still exist. ``_parts`` runs
   the other equations of an update after the passes. ``placement`` prints ``RowWise`` (``_schedule/schedule.py``) for
   each move: let its field ``scan``, which ``Hoist._move`` sets, name the policy.
3. Emit it in ``Emitter.iteration`` (``_emit/hoisted.py``). ``update`` runs the moves on row ``i``. ``arithmetic`` runs
   the scan's body; meanwhile it stores row ``before`` (in a forward pass ``i``) and loads row ``after``. ``Buffers``
   (``_emit/run.py``) reads and writes the rows. A policy that updates only some rows in the scan keeps the gradients of
   all (``kept``). ``Buffers.update`` writes rows on the device as soon as it has made them. There the policy replaces
   the other rows' new values with the old ones (``given[old]`` for each ``old`` in ``how.buffers``), and leaves these
   rows out of sums; the scan still loads them, and stores them unchanged. In ``scanned``, after the last ``exchange``,
   the policy loads, updates and stores them.
4. ``rewritten`` puts the parts together and checks operands, buffers and types. If a check fails, the step runs as
   written, with a warning. No check notices a row that is never updated; the tests of random steps do.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload._disk.leaves import READ
from jax_offload._emit.region import Update, holds_update, is_update
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Equation, Var, jax_fun, located, ordered, scan_of, variables
from jax_offload._program.memory import is_host_aval
from jax_offload._program.primitives import ELEMENTWISE, SHAPES, together
from jax_offload._program.program import Builder, Program, is_load, rebuilt, unguarded
from jax_offload._program.propagate import Node, made_of, needed, needed_for, topological
from jax_offload._program.slices import Slice, consecutive, slice_of
from jax_offload._rewrite.canonical import canonical
from jax_offload._rewrite.inlined import Inlined, consisting_of, inlined, opened
from jax_offload._schedule.gates import in_turn, interleaved, is_heavy
from jax_offload._schedule.hoist import LEAST_ROW, MICROBATCHES, Hoist
from jax_offload._schedule.in_scan import CannotHoist, InScan
from jax_offload._schedule.schedule import WHOLE, Gate, Planned, Window

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
    """Take a step's program apart; return ``None`` if it has no update.

    If gradients are summed up over microbatches, the last one runs by itself when its backward pass can host the
    update. If the step begins with the update, for the gradients of the batch before, the first one's forward pass can.
    """
    plain = opened(plain)
    found = inlined(plain)
    if found is None:
        return None
    parts, whys = decided(found), list[str]()
    if parts.moved:
        return parts
    place_of = {v: at for at, eqn in enumerate(plain.eqns) for v in eqn.outvars}  # a scan's results are the same there
    summing = [place_of[eqn.outvars[0]] for eqn in parts.sums_up if eqn.outvars[0] in place_of]
    updated = made_of(plain.eqns, is_update)
    scans = [(at, scan) for at, eqn in enumerate(plain.eqns) if (scan := scan_of(eqn)) is not None]
    reading = [at for at, scan in scans if not updated.isdisjoint(variables(scan.consts))]
    for at in summing or reading:
        try:
            again = inlined(opened(canonical(peeled(plain, at, first=not summing))))
        except CannotHoist as stays:
            whys.append(str(stays))
            continue
        assert again is not None  # the updates are still there
        apart = decided(again, apart=True)
        if apart.moved:
            return apart
        whys += apart.stays
    why = "; ".join(dict.fromkeys(whys))  # the last microbatch does not host the update
    stays = (f"{MICROBATCHES}: {why}" if why and each.startswith(MICROBATCHES) else each for each in parts.stays)
    return dataclasses.replace(parts, stays=tuple(stays))


def decided(found: Inlined, apart: bool = False) -> Parts:
    """Decide where the update runs. ``apart``: whether an iteration runs apart, and continues the sums."""
    step, eqns = found, found.program.eqns
    scans = [at for at, eqn in enumerate(eqns) if (scan := scan_of(eqn)) is not None and scan.length]
    plans, streams, moved = dict[int, InScan](), dict[int, InScan](), set[int]()
    stay_behind, stay_ahead, sums = dict[int, list[str]](), list[str](), dict[int, str]()

    def hoist(at: int, **known: Any) -> Hoist:
        read = {v for plan in plans.values() for v in plan.operands}
        read.update(v for plan in streams.values() for v in plan.hosts)
        return Hoist(step.program, at, step.next_of, step.waiting, step.own, moved, read, **known)

    for at in reversed(scans):
        plan, stay_behind[at] = hoist(at).into_backward()
        if plan is not None:
            plans[at] = plan
            moved |= plan.eqns
        if not apart and (how := hoist(at).sums_up(step.gradients)):
            sums[at] = how
    streams |= {at: plan for at in scans if at not in plans and (plan := hoist(at).streaming()) is not None}
    reread = {at: plan.loads_again for at, plan in {**streams, **plans}.items()}
    for at in scans:
        if at not in plans and id(eqns[at]) not in moved:
            plan, why = hoist(at, reread=reread).into_forward()
            stay_ahead += why
            if plan is not None:
                plans[at] = plan
                moved |= plan.eqns
    plans = {**streams, **plans}
    moved = moved.union(*(plan.eqns for plan in plans.values()))
    # report only scans that these updates wait for: in a rotated step, others make gradients for the next update
    left = [v for eqn in eqns if id(eqn) not in moved for v in eqn.outvars if v in step.next_of and v.aval.shape]
    _, awaited = needed_for(eqns, left)
    awaited = [at for at in stay_behind if not awaited.isdisjoint(eqns[at].outvars)]
    # a host leaf waits for a sum of gradients that it reads as an array, not for a number such as their norm
    on_host = [v for v in left if is_host_aval(v.aval)]
    _, arrays = needed_for(eqns, on_host, lambda eqn: any(v.aval.shape for v in eqn.outvars))
    summed = {at: why for at, why in sums.items() if not arrays.isdisjoint(eqns[at].outvars)}
    stays = [*(why for at in awaited for why in stay_behind[at]), *(summed[at] for at in awaited if at in summed)]
    stays += stay_ahead
    parts, why = _parts(step, plans, moved)
    if why and not stays:
        _, gradients = needed_for(eqns, step.gradients, lambda eqn: eqn.primitive.name in ELEMENTWISE)
        maps = [eqn for eqn in eqns if eqn.primitive.name == "shard_map"]
        made = [eqn for eqn in maps if not gradients.isdisjoint(eqn.outvars)]
        stays = [located(IN_A_SHARD_MAP, made[-1]) if made else why]
    moved_any = bool(plans) or any(isinstance(part.payload, Gate) for part in parts)
    sums_up = tuple(eqns[at] for at in sums if at in awaited)
    return Parts(step, parts, moved_any, tuple(dict.fromkeys(stays)), sums_up)


def _parts(step: Inlined, plans: Mapping[int, InScan], moved: Set[int]) -> tuple[list[Node], str]:
    """The parts of the step in an order that respects their needs: slices, scans with updates inside, and the rest of
    each update, in one piece or in pieces between gates; and why in one piece."""
    program, outputs, nodes = step.program, variables(step.program.outputs), list[Node]()
    for k, eqn in enumerate(program.eqns):
        if k in plans:
            nodes.append(Node(plans[k], plans[k].operands, plans[k].makes, kept=True))
        elif id(eqn) not in moved:
            nodes.append(Node(eqn, variables(eqn.invars), eqn.outvars, bool(eqn.effects)))
    nodes = [nodes[k] for k in sorted(needed(nodes, outputs))]
    # the part of an update that a scan needs, such as a learning rate, stands before it
    ahead = needed(nodes, [v for node in nodes if isinstance(node.payload, InScan) for v in node.reads], kept=False)
    kept = [(node, None if k in ahead else step.own.get(id(node.payload))) for k, node in enumerate(nodes)]
    nodes, rests = list[Node](), dict[int, Update]()
    for node, number in kept:
        if number is None:
            nodes.append(node)
        elif number not in rests:
            inside = [each.payload for each, its in kept if its == number]
            read = {*outputs}.union(*(each.reads for each, its in kept if its != number))
            rests[number] = rest = consisting_of(step.updates[number], inside, read)
            nodes.append(Node(rest, rest.operands, variables(rest.program.outputs)))

    order, why = None, ""
    if plans:
        order = in_turn(topological(nodes, range(len(nodes))))
    elif rests or not step.updates:
        order, why = _between_passes(step, nodes)
    for node in order or ():
        if isinstance(node.payload, Update):  # the step's gates hold the passes back, so the update needs none
            node.payload = dataclasses.replace(node.payload, backward=None)
    order = topological(nodes, range(len(nodes))) if order is None else order

    parts, read = list[Node](), {*outputs}.union(*(node.reads for node in order))
    for is_equations, group in itertools.groupby(order, lambda node: isinstance(node.payload, Equation)):
        if is_equations:
            eqns = [node.payload for node in group]
            whole = slice_of(eqns, [v for eqn in eqns for v in eqn.outvars if v in read], program.debug_info, {})
            parts.append(Node(whole, whole.inputs, whole.outputs))
        else:
            parts += group
    return parts, why


def _between_passes(step: Inlined, nodes: Sequence[Node]) -> tuple[list[Node] | None, str]:
    """The order with the rests of the updates between the passes: in pieces, or else each in one, and why; ``None`` if
    there is no place for gates."""
    outputs = variables(step.program.outputs)
    nodes, why = _loaded_where_read(step, nodes, outputs), ""
    rests = [node.payload for node in nodes if isinstance(node.payload, Update)]
    if not rests and not any(isinstance(node.payload, Planned) for node in nodes):
        return None, ""
    on_host = any(is_host_aval(v.aval) for rest in rests for v in rest.operands)
    for divides in True, False:
        try:
            of_node = (_pieces(n.payload) if divides and isinstance(n.payload, Update) else [n] for n in nodes)
            return interleaved([*itertools.chain.from_iterable(of_node)], outputs), why
        except CannotHoist as stays:
            why = why or (located(str(stays), step.like) if on_host else "")
    return None, why


def _loaded_where_read(step: Inlined, nodes: Sequence[Node], outputs: Sequence[Var]) -> list[Node]:
    """Load each parameter in host memory where a pass reads it, and again where a pass reads it much later.

    Gates hold these loads like loads of a state. A leaf is loaded again if others have been loaded since.
    """
    loads = [node.payload for node in nodes if isinstance(node.payload, Equation) and is_load(node.payload)]
    large = {id(eqn): n for eqn in loads if (n := nbytes(eqn.outvars[0].aval)) >= LEAST_ROW}
    if not large:
        return [*nodes]
    how = f"{WHOLE}: where a pass reads it"
    window = Window(2 * max(large.values()), "two of the layers that passes read")
    made, alone = set[Var](), list[Equation]()  # values made of leaves alone, and their equations
    before, lasting, done, found = Builder(), dict[Var, tuple[Var, int]](), 0, list[Node]()
    stay = {*outputs, *(v for node in nodes if not isinstance(node.payload, Equation) for v in node.reads)}
    for node in nodes:
        if not isinstance(node.payload, Equation):
            found.append(node)
            continue
        eqn = node.payload.replace(invars=before.read(node.payload.invars))
        ins, name = variables(eqn.invars), eqn.primitive.name
        again = [v for v in dict.fromkeys(ins) if v in made]
        if name == "optimization_barrier" and again:  # its values are recomputed, and leaves are loaded anew anyway
            pairs = [*zip(eqn.invars, eqn.outvars, strict=True)]
            before.names.update((v, x) for x, v in pairs if x in again and v not in stay)
            pairs = [(x, v) for x, v in pairs if v not in before.names]
            eqn = eqn.replace(invars=[x for x, _ in pairs], outvars=[v for _, v in pairs])
        elif id(node.payload) in large or (again and name in ELEMENTWISE | SHAPES and made.issuperset(ins)):
            alone.append(eqn)
            made.update(eqn.outvars)
        elif again and is_heavy(node):
            new = Builder()
            for v in again:
                if v not in lasting or done > lasting[v][1]:
                    copied = Builder()
                    copied.copy(*needed_for(alone, [v])[0])
                    (x,) = variables(copied.read([v]))
                    s = slice_of(copied.eqns, [x], step.program.debug_info, step.program.shards)
                    done += s.loaded_bytes
                    lasting[v] = x, done + s.loaded_bytes
                    found.append(Node(Planned(s, how, window, (x,)), s.inputs, s.outputs))
                new.names[v] = lasting[v][0]
            eqn = eqn.replace(invars=new.read(eqn.invars))
        found.append(Node(eqn, variables(eqn.invars), eqn.outvars, node.kept))
    kept = needed(found, outputs)
    return [node for k, node in enumerate(found) if k in kept]


def _pieces(rest: Update) -> list[Node]:
    """Return the rest of an update in pieces.

    Raises:
      CannotHoist: the pieces cannot run between the parts of the step.
    """
    update = dataclasses.replace(rest, gated=True, backward=None)
    if len(update.passes) != 1:
        raise CannotHoist(AHEAD)
    (only,) = update.passes
    if only.carried is not None:
        raise CannotHoist(f"it runs in a loop of its own, {only.slices[0].window.own_loop}; scan over stacked layers")
    if any(eqn.effects for eqn in update.program.eqns):
        raise CannotHoist("it has effects, such as a callback; call back from the step, not from the optimizer")
    window = only.slices[0].window if only.slices else Window(0, "nothing moves")
    apart = [s for s in only.first if isinstance(s, Slice)]
    first = [Planned(s, WHOLE, window, tuple(v for v in s.outputs if v in update.next_values)[:1]) for s in apart]
    return [Node(p, p.slice.inputs, p.slice.outputs) for p in [*first, *only.slices] if p.slice.outputs]


# ---- one iteration by itself: the microbatch whose pass can host the update
#
# This is the last one, whose backward pass completes the sum of all gradients, or the first one, whose forward pass is
# the first to read new parameters.


def peeled(program: Program, at: int, *, first: bool = False) -> Program:
    """Take the last iteration, or the first, out of equation ``at`` of ``program``, a scan, and inline it.

    Raises:
      CannotHoist: no iteration of it can run by itself.
    """
    eqn = program.eqns[at]
    scan = scan_of(eqn)
    if scan is None or not scan.length:
        raise CannotHoist("it has no iterations")
    if eqn.effects:
        raise CannotHoist("it has effects, such as a callback, whose order would change; call back after the scan")
    if any(is_host_aval(v.aval) for v in (*scan.xs, *scan.ys)):
        raise CannotHoist("it reads or makes rows in host memory, which would be copied there; load them before it")
    body = jax_fun(scan.body)
    in_front = first != scan.reverse  # which row the iteration reads
    apart, others = (0, slice(1, None)) if in_front else (-1, slice(-1))
    numbers = np.arange(scan.length, dtype=np.int32)[others]

    def run(*operands: Any) -> list[Any]:
        consts, init, xs = scan.parted(operands)

        def one(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            produced = body(*consts, *carry, *x)
            return produced[: len(init)], [row[None] for row in produced[len(init) :]]

        def by_number(*given: Any) -> list[Any]:  # slices of batches would be copies
            return body(*given[:-1], *(jax.lax.dynamic_index_in_dim(x, given[-1], keepdims=False) for x in xs))

        mine = [x[apart] for x in xs]
        carry, y = one(init, mine) if first or scan.length == 1 else (init, [])
        if scan.length == 1:
            return [*carry, *y]
        carry, ys = scan.run(by_number, consts, carry, [numbers], scan.length - 1)
        if not first:
            # It waits for the others: its pass needs nothing from them, and would keep its activations beside theirs.
            carry, y = one(*together((carry, mine)))
        pairs = zip(y, ys, strict=True) if in_front else zip(ys, y, strict=True)
        return [*carry, *map(jnp.concatenate, pairs)]

    return rebuilt(program, lambda new, each, given: new.run(run, *given, like=eqn) if each is eqn else None)


# ---- a step, cut at its updates into the part before, the updates, and the part after
#
# A step in one piece runs inside one ``jit``. The updates of a cut step can run apart from its model: beside the next
# forward pass, on the host, or in groups whose state comes from files.


@dataclasses.dataclass(frozen=True)
class Cut:
    """A step as three parts that run one after the other.

    Attributes:
      program: the step.
      before: the forward and the backward pass, and everything else that needs no result of an update (a loss).
      update: the updates, and the equations between two of them.
      after: the equations that need results of an update, and that no update needs.
    """

    program: Program
    before: Slice
    update: Slice
    after: Slice


def cut_step(program: Program) -> Cut:
    """Cut a step's program, in which every ``jit`` is inlined, at its updates.

    A branch, a loop (gradient accumulation that updates inside), ``shard_map`` or ``jax.checkpoint`` that holds an
    update belongs to the updates as a whole.

    Raises:
      ValueError: no ``offload`` updates anything in the step, or it has effects whose order a cut would lose.
    """
    program = unguarded(program)
    if not any(map(holds_update, program.eqns)):
        raise ValueError(
            "step: has no update of an offload(...) in it that can be seen; call tx.update or jo.update_params, with "
            "one array or more, and not under vmap or a derivative."
        )
    if effects := ordered(program.effects):
        raise ValueError(
            f"step: has effects whose order a cut would lose: {', '.join(effects)}. Fix: ordered=False for "
            "callbacks; an argument that the step returns anew in the place of a jax.new_ref made outside."
        )
    eqns, parts = program.eqns, [list[Equation](), list[Equation](), list[Equation]()]
    # a leaf is read where it is updated
    marked = {id(eqn) for eqn in eqns if holds_update(eqn) or eqn.primitive is READ}
    follows = made_of(eqns, lambda eqn: id(eqn) in marked)
    leads = {id(eqn) for eqn in needed_for(eqns, (), kept=lambda eqn: id(eqn) in marked)[0]}
    varies = made_of(eqns, lambda _: False, program.inputs)
    first_read = dict.fromkeys(variables(program.outputs), 0)  # a value -> the first part that reads it
    for eqn in reversed(eqns):
        ins, place = variables(eqn.invars), 0
        if id(eqn) in marked or not follows.isdisjoint(ins):
            place = 1 if id(eqn) in leads else 2
        elif varies.isdisjoint(ins) and not eqn.effects:  # a constant does not cross from one part to another
            place = min((first_read[v] for v in eqn.outvars if v in first_read), default=0)
        first_read.update((v, min(first_read.get(v, place), place)) for v in ins)
        parts[place].append(eqn)
    parts = [part[::-1] for part in parts]
    return Cut(program, *consecutive(parts, program.outputs, program.debug_info, {}))


# Operands may be a little larger than the value that is computed from them again (a softmax from its exponentials and
# their sums), because their own operands may be smaller (scores in bfloat16).
SLACK = 1.05


def computed_again(wanted: Set[Var], free: Set[Var], eqns: Sequence[Equation]) -> tuple[list[Equation], set[Var]]:
    """Return the equations that are repeated where values are read, and the values that must get there for them.

    Going backwards, each value gives way to its operands if they are no larger. The last arithmetic on a gradient (a
    scale, a cast to more bytes) then follows the gradient.

    Args:
      wanted: the values that are read.
      free: the values that are there anyway.
      eqns: the cheap equations among the ones that make the values.
    """
    need, again = {*wanted} - free, list[Equation]()
    for eqn in reversed(eqns):
        if len(eqn.outvars) == 1 and (v := eqn.outvars[0]) in need and v.aval.shape and not eqn.effects:
            more = {*variables(eqn.invars)} - free - need
            if sum(nbytes(x.aval) for x in more if x.aval.shape) <= SLACK * nbytes(v.aval):
                need = (need - {v}) | more
                again.append(eqn)
    return again[::-1], need
