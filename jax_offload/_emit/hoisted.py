"""A scan with the update of stacked leaves inside, row by row, or only with loads of the rows that it reads.

In a backward pass, iteration i makes the gradient of layer i. At its end it updates layer i with state that the
iteration before has loaded. The next iteration stores the new state.

In a forward pass (``ahead``), iteration i begins with the update of layer i, with state that the iteration before has
loaded, and stores the new state. If the next iteration stored it, the new state would share a buffer of the loop with
the rows that are being stored, and the update would wait for these.

So both directions of the link have a whole iteration. Its arithmetic is divided into phases, and the leaves into as
many groups, which take turns: in each phase one group is stored while the one before it is loaded.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jax_offload._emit.run import Buffers, Names, Values
from jax_offload._program.jaxprs import Literal, Scan, Var, values_of, variables
from jax_offload._program.memory import constrained, is_host_aval, shards_of, typed_sharding, zeros
from jax_offload._program.primitives import read_once, together
from jax_offload._program.rules import run_chunk
from jax_offload._schedule.in_scan import InScan, Nest


def scanned(plan: InScan, env: Mapping[Var, Any], names: Names) -> dict[Var, Any]:
    """Run the scan with the moved equations inside; return the results of both."""
    scan, pins = plan.scan, {v: s for move in plan.moves for v, s in move.slice.pins.items()}

    def laid_out(v: Var, x: jax.Array) -> jax.Array:
        # XLA lays out gathered rows by the divided axis, and would give the whole stack that layout
        sharding = pins.get(v) or typed_sharding(v.aval)
        gathered = sharding is not None and sharding.mesh.size > 1 and math.prod(shards_of(sharding, v.aval.shape)) == 1
        return _on(["tpu", "cuda"], _in_order, x) if gathered else x

    emitter = Emitter(plan, Buffers(plan.rows, pins, names, laid_out=laid_out), {v: env[v] for v in plan.others})
    consts, init, hand = values_of(env, scan.consts), values_of(env, scan.init), emitter.first(env)
    xs = {k: values_of(env, [v])[0] for k, v in enumerate(scan.xs) if k not in plan.reread and k not in plan.fed}
    if not plan.ahead:
        # the first rows wait for the previous pass, since XLA would otherwise load and hold them ahead of it
        hand.loaded, init = together((hand.loaded, init))
        hand.new |= {v: x for v, x in hand.loaded.items() if v in hand.new}
    if plan.nest is None:
        layers = Layers(scan, plan.kept, plan.fed, {k: k for k in plan.reread})
        carried, ys, hand = emitter.loop(layers, consts, init, xs, hand)
    else:
        carried, ys, hand = emitter.nested(plan.nest, consts, init, xs, hand)
    emitter.buffers.exchange(hand.wholes, hand.new, scan.length - 1 - first_row(scan), [], 0)
    found = dict(zip(scan.carry, carried, strict=True)) | dict(zip(plan.kept, ys, strict=True))
    for move in plan.moves:
        for v, old in zip(move.slice.outputs, move.how.buffers, strict=True):
            if v not in plan.feeds:
                # without a pin XLA would divide the carry like values made from it
                found[v] = constrained(hand.wholes[v if old is None else old], pins.get(v))
    return found


def first_row(scan: Scan) -> int:
    """Return the row that a scan's first iteration uses."""
    return scan.length - 1 if scan.reverse else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Hand:
    """The values that one iteration hands to the next.

    Attributes:
      wholes: the values of whole leaves: on the host, on the device, and sums.
      loaded: rows of host leaves, on the device, for this iteration.
      new: rows of host leaves that are not stored yet.
    """

    wholes: Values
    loaded: Values
    new: Values


Looped = tuple[list[Any], list[Any], Hand]  # a scan's final carry, its stacked results, and the last hand


@dataclasses.dataclass(frozen=True)
class Layers:
    """A scan over layers, or over the layers of one group of a nest.

    Attributes:
      scan: the scan.
      kept: its results that stay stacked.
      fed: number of one of its ``xs`` -> the result of an update whose rows it has.
      again: number of one of its ``xs`` -> number of the plan's that it rereads row by row.
      start: the number of its first layer.
      begins: whether its first iteration is the first of all.
    """

    scan: Scan
    kept: Sequence[Var]
    fed: Mapping[int, Var]
    again: Mapping[int, int]
    start: int = 0
    begins: bool = True


@dataclasses.dataclass(frozen=True)
class Emitter:
    """Emits the iterations. ``others``: the other operands of the updates."""

    plan: InScan
    buffers: Buffers
    others: dict[Var, Any]

    def first(self, env: Mapping[Var, Any]) -> Hand:
        """The values that the first iteration starts with.

        An update after the scan's arithmetic has nothing to store in the first iteration. It stores the row that was
        loaded for it in the same place, or else zeros, which the second iteration overwrites.
        """
        plan = self.plan
        wholes = Values((v, env[v]) for v in (*plan.hosts, *plan.in_place))
        wholes |= {v: zeros(v.aval) for v in (*plan.new, *plan.sums)}
        loaded = self.buffers.exchange(wholes, {}, 0, plan.loaded, first_row(plan.scan))
        new = Values()
        for v in () if plan.ahead else plan.stored:
            blank = loaded.get(v)
            new[v] = zeros(jax.eval_shape(lambda v=v: self.buffers.load(wholes, v, 0))) if blank is None else blank
        return Hand(wholes, loaded, new)

    def loop(self, layers: Layers, consts: Sequence[Any], init: list[Any], xs: Mapping[int, Any], hand: Hand) -> Looped:
        """Run a scan with the updates inside, from these values on."""
        scan = layers.scan

        def iteration(state: Any, rows: Any) -> Any:
            k, carried, hand = state
            carried, produced = self.iteration(layers, consts, k, carried, rows, hand)
            return (k + 1, carried, hand), [produced[y] for y in layers.kept]

        # in a forward pass, the update of the second unrolled iteration would wait for the stores of the first
        unroll = 1 if self.plan.ahead else scan.unroll
        first = jnp.int32(0), init, hand
        (_, carried, hand), ys = jax.lax.scan(iteration, first, xs, scan.length, scan.reverse, unroll)
        return carried, ys, hand

    def iteration(
        self, layers: Layers, consts: Sequence[Any], k: Any, carried: Any, rows: Any, hand: Hand
    ) -> tuple[list[Any], dict[Var, Any]]:
        """Run iteration ``k``, with ``rows`` of the scan's ``xs``; return what it carries on, and its rows."""
        plan, scan, buffers = self.plan, layers.scan, self.buffers
        # XLA writes the counter's next value when every copy that reads it is done, so they read the minimum, which is
        # the counter too. The first iteration's ``before`` and the last one's ``after`` are clamped by the copies.
        i = layers.start + scan.length - 1 - k if scan.reverse else layers.start + jnp.minimum(k, scan.length)
        before, after = (i + 1, i - 1) if scan.reverse else (i - 1, i + 1)
        on_device = [*plan.in_place, *plan.new]
        own = dict(zip(on_device, read_once([buffers.read(v, hand.wholes[v], i) for v in on_device]), strict=True))
        own |= {v: buffers.read(v, x, i) for v, x in self.others.items()}
        given, is_first = own | hand.loaded, layers.begins & (k == 0)
        if plan.ahead:
            made = self.update(hand, given, i, is_first)
            fed = Values((v, made[v]) for v in layers.fed.values())
            fed, hand.new, carried = together((fed, hand.new, carried))
            rows |= {j: jax.lax.squeeze(fed[v], (0,)) for j, v in layers.fed.items()}
        rows |= {j: jax.lax.squeeze(self.reread(n, given, i[None]), (0,)) for j, n in layers.again.items()}
        operands = [*plan.body.consts, *consts, *carried, *(rows[j] for j in range(len(scan.xs)))]
        values = dict(zip(plan.body.inputs, operands, strict=True))
        then = self.arithmetic(values, hand, i if plan.ahead else before, after)
        results, new = values_of(values, plan.body.outputs), Values()
        if not plan.ahead:
            # The update waits for all of the arithmetic: it overwrites buffers that are stored until then. And
            # for the last loads: a TPU would start them after it, into buffers that it has read.
            results, late = together((results, Values((v, then[v]) for v in plan.phases[-1].loaded)))
            then |= late
        carried, produced = results[: len(carried)], dict(zip(scan.ys, results[len(carried) :], strict=True))
        if not plan.ahead:
            # laid out like the stack: a TPU would give the whole stack the layout of a matmul's result
            in_order = _on(["tpu"], lambda xs: [*map(_in_order, xs)], [x[None] for x in produced.values()])
            self.update(hand, given | dict(zip(produced, in_order, strict=True)), i, is_first)
            new = hand.new
        hand.loaded, hand.new = Values((v, then[v]) for v in plan.loaded), new
        return carried, produced

    def update(self, hand: Hand, given: Mapping[Var, Any], i: Any, is_first: Any) -> Values:
        """Run the updates on the rows numbered ``i`` and return the new rows. ``given`` holds the operands' rows.

        Sums and new rows of arrays on the device are in ``hand.wholes`` then, new rows of host leaves in ``hand.new``.
        """
        made, hand.new = Values(), Values()
        for move in self.plan.moves:
            new, stored = self.buffers.update(move.slice, move.how, given, hand.wholes, i, first=is_first)
            made |= new
            hand.new |= stored
        return made

    def reread(self, place: int, own: Mapping[Var, Any], numbers: Any) -> Any:
        """Rows of one of the scan's ``xs``, computed from the rows of leaves that move and of other operands."""
        each = self.plan.reread[place]
        given = [own[v] for v in each.slice.inputs]
        return run_chunk(each.slice.core.jaxpr, each.how.dims, each.how.where, numbers, *given)[0]

    def arithmetic(self, values: dict[Var, Any], hand: Hand, stored: Any, then: Any) -> Values:
        """Run the iteration's own arithmetic, from ``values`` on, while it stores the rows ``stored`` and loads the
        rows ``then``. All that follows a phase waits for it, and for its transfers."""
        phases, found = self.plan.phases, Values()
        for phase, following in zip(phases, [*phases[1:], None], strict=True):
            new = {v: hand.new[v] for v in phase.stored if v in hand.new}
            fetched = self.buffers.exchange(hand.wholes, new, stored, phase.loaded, then)
            s = phase.arithmetic
            values.update(zip(s.outputs, s.run(*(values[v] for v in s.inputs)), strict=True))
            if following is not None:
                gate = [phase.gate] if phase.gate is not None else []
                # without it, XLA would also store in the next phase, which loads from the same buffers
                written = [v for v in phase.stored if v in hand.new]
                late = [v for v in following.stored if v in hand.new]
                parts = (values, gate), (hand.new, late), (hand.wholes, written), (fetched, [*fetched])
                behind = together([[of[v] for v in vs] for of, vs in parts])
                for (of, vs), xs in zip(parts, behind, strict=True):
                    of.update(zip(vs, xs, strict=True))
                if gate and (held := [v for v in following.arithmetic.inputs if v in s.outputs and v not in gate]):
                    # XLA for TPUs runs equations that need no gate before it, so the first phase would be most of the
                    # iteration
                    both = [*gate, *held]
                    values.update(zip(both, _on(["tpu"], together, [values[v] for v in both]), strict=True))
            found |= fetched
        return found

    def nested(
        self, nest: Nest, consts: Sequence[Any], carried: list[Any], xs: Mapping[int, Any], hand: Hand
    ) -> Looped:
        """Run a nest, group by group: XLA copies rows only if their numbers depend on a single loop's counter."""
        plan, outer, inner, body, n = self.plan, nest.outer, nest.inner, nest.body, nest.inner.length
        in_body = dict(zip(inner.ys, inner.eqn.outvars[len(inner.carry) :], strict=True))
        results = dict(zip(plan.scan.ys, body.outputs[len(outer.init) :], strict=True))
        read = {*nest.after.inputs, *variables(results[y] for y in plan.kept)}
        kept = [y for y, v in in_body.items() if v in read]
        fed = {j: plan.fed[k] for j, k in nest.handed_on.items() if k in plan.fed}
        loading = {k for k, each in plan.reread.items() if each.slice.loads}
        again = {j: k for j, k in nest.handed_on.items() if k in loading and nest.hands_on([k])}
        stacks = {y: list[Any]() for y in plan.kept}

        def rows_of(k: int, x: Any, group: int) -> Any:
            """Return the rows of a group, or ``None`` if the rows are made one by one."""
            if k in plan.fed or k in again.values():
                return None
            if (each := plan.reread.get(k)) is not None:
                wholes, start = self.others | hand.wholes, group * n
                own = {v: self.buffers.load(wholes, v, start, n) if is_host_aval(v.aval)
                       else self.buffers.read(v, wholes[v], start, n) for v in each.slice.inputs}  # fmt: skip
                return self.reread(k, own, start + jnp.arange(n))
            in_layers = not isinstance(x, Literal) and x in nest.layers
            return xs[k][group * n : (group + 1) * n] if in_layers else xs[k][group]

        order = sorted(range(outer.length), reverse=outer.reverse)
        for group in order:
            if loading - {*again.values()}:  # a whole group is loaded, and not ahead of the one before
                hand.wholes, carried = together((hand.wholes, carried))
            rows = [rows_of(k, x, group) for k, x in enumerate(outer.xs)]
            env = dict(zip(body.inputs, [*body.consts, *consts, *carried, *rows], strict=True))
            env.update(zip(nest.before.outputs, nest.before.run(*(env[v] for v in nest.before.inputs)), strict=True))
            own_consts, init, own_xs = inner.parted(values_of(env, inner.eqn.invars))
            given = {j: x for j, x in enumerate(own_xs) if j not in fed and j not in again}
            layers = Layers(inner, kept, fed, again, start=group * n, begins=group == order[0])
            made, ys, hand = self.loop(layers, own_consts, init, given, hand)
            env.update(zip([*inner.carry, *(in_body[y] for y in kept)], [*made, *ys], strict=True))
            env.update(zip(nest.after.outputs, nest.after.run(*(env[v] for v in nest.after.inputs)), strict=True))
            carried = values_of(env, body.outputs[: len(outer.init)])
            for y, parts in stacks.items():
                parts += values_of(env, [results[y]])
        whole = [(y, parts[::-1] if outer.reverse else parts) for y, parts in stacks.items()]
        return carried, [jnp.concatenate(x) if y in in_body else jnp.stack(x) for y, x in whole], hand


def _on(platforms: Sequence[str], run: Callable[..., Any], x: Any) -> Any:
    """Return ``run(x)`` on these platforms and ``x`` elsewhere."""
    return jax.lax.platform_dependent(x, **dict.fromkeys(platforms, run), default=lambda x: x)


def _in_order(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
