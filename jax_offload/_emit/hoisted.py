"""A scan with the update of stacked leaves inside, row by row, or only with loads of the rows that it reads.

In a backward pass, iteration i makes the gradient of layer i. At its end it updates layer i with state that the
iteration before has loaded. The next iteration stores the new state.

In a forward pass (``ahead``), iteration i begins with the update of layer i, with state that the iteration before has
loaded, and stores the new state. If the next iteration stored it, the new state would share a buffer of the loop with
the rows that are being stored, and the update would wait for these.

So both directions of the link have a whole iteration. Its arithmetic is divided into phases, and the leaves into as
many groups, which take turns: in each phase one group is stored while the one before it is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from jax_offload._emit.run import Buffers, Names, Values
from jax_offload._program.jaxprs import Literal, Scan, Var, as_array, values_of, variables
from jax_offload._program.memory import constrained, is_host_aval, shards_of, typed_sharding, zeros
from jax_offload._program.primitives import read_once, together
from jax_offload._program.rules import run_chunk
from jax_offload._schedule.in_scan import InScan, Nest


def scanned(plan: InScan, env: Mapping[Var, Any], names: Names) -> Values:
    """Run the scan with the moved equations inside; return the results of both."""
    scan = plan.scan

    def value(v: Any) -> Any:
        return as_array(v) if isinstance(v, Literal) else env[v]

    others, again = {v: value(v) for v in plan.others}, {k: k for k in plan.reread}
    emitter = Emitter(plan, _buffers(plan, names), others, scan, plan.kept, plan.fed, again)
    consts, init, hand = [value(v) for v in scan.consts], [value(v) for v in scan.init], emitter.first(env)
    xs = {k: value(v) for k, v in enumerate(scan.xs) if k not in plan.reread and k not in plan.fed}
    if not plan.ahead:
        # the first rows wait for the previous pass, since XLA would otherwise load and hold them ahead of it
        rows, init = together(([*hand.loaded.values()], init))
        hand.loaded = dict(zip(hand.loaded, rows, strict=True))
        hand.new = hand.new | hand.loaded
    emit = emitter.loop if plan.nest is None else functools.partial(emitter.nested, plan.nest)
    carried, ys, hand = emit(consts, init, xs, hand)
    emitter.buffers.exchange(hand.wholes, hand.new, plan.last_row, [], 0)
    produced = dict(zip(scan.carry, carried, strict=True)) | dict(zip(plan.kept, ys, strict=True))
    return produced | emitter.results(hand.wholes)


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
class Emitter:
    """Emits the iterations, the code before the first, and the code after the last.

    Attributes:
      others: the other operands of the updates.
      scan: the scan over layers: the plan's own, or the inner one of a nest.
      kept: its results that stay stacked.
      fed: number of one of its ``xs`` -> the result of an update whose rows it has.
      again: number of one of its ``xs`` -> number of the plan's that it rereads row by row.
      start: the number of its first layer.
      begins: whether its first iteration is the first of all.
    """

    plan: InScan
    buffers: Buffers
    others: Values
    scan: Scan
    kept: Sequence[Var]
    fed: Mapping[int, Var]
    again: Mapping[int, int]
    start: int = 0
    begins: bool = True

    @property
    def keys(self) -> tuple[Sequence[Var], ...]:
        """The variables that the loop carries, for each field of ``Hand``."""
        plan = self.plan
        return (*plan.hosts, *plan.in_place, *plan.new, *plan.sums), plan.loaded, () if plan.ahead else plan.stored

    def packed(self, hand: Hand) -> list[list[Any]]:
        return [[x[v] for v in vs] for vs, x in zip(self.keys, (hand.wholes, hand.loaded, hand.new), strict=True)]

    def unpacked(self, kept: Sequence[Sequence[Any]]) -> Hand:
        return Hand(*(dict(zip(vs, xs, strict=True)) for vs, xs in zip(self.keys, kept, strict=True)))

    def first(self, env: Mapping[Var, Any]) -> Hand:
        """The values that the first iteration starts with.

        An update after the scan's arithmetic has nothing to store in the first iteration. It stores the row that was
        loaded for it in the same place, or else zeros, which the second iteration overwrites.
        """
        plan = self.plan
        wholes = {v: env[v] for v in (*plan.hosts, *plan.in_place)} | {
            v: zeros(v.aval) for v in (*plan.new, *plan.sums)
        }
        loaded = self.buffers.exchange(wholes, {}, 0, plan.loaded, plan.first_row)
        absent = [v for v in plan.stored if v not in loaded]
        blank = {v: zeros(jax.eval_shape(lambda v=v: self.buffers.load(wholes, v, 0))) for v in absent}
        return Hand(wholes, loaded, loaded | blank)

    def results(self, wholes: Values) -> Values:
        """Return the results of the moved equations after the last iteration."""
        found: Values = {}
        for move in self.plan.moves:
            for v, old in zip(move.slice.outputs, move.how.buffers, strict=True):
                if v not in self.plan.feeds:
                    # without a pin XLA would divide the carry like values made from it
                    found[v] = constrained(wholes[v if old is None else old], self.plan.pins.get(v))
        return found

    def own_rows(self, hand: Hand, i: Any) -> Values:
        """Read the rows of operands on the device for iteration ``i``."""
        on_device = (*self.plan.in_place, *self.plan.new)
        rows = read_once([self.buffers.read(v, hand.wholes[v], i) for v in on_device])
        return dict(zip(on_device, rows, strict=True)) | {v: self.buffers.read(v, x, i) for v, x in self.others.items()}

    def update(self, hand: Hand, own: Values, i: Any, is_first: Any) -> Values:
        """Run the updates on the rows ``i``; return the new rows that the scan itself reads.

        Sums and new rows of arrays on the device are in ``hand.wholes`` then, new rows of host leaves in ``hand.new``.
        ``own``: the rows of the operands on the device.
        """
        given, hand.new, fed = own | hand.loaded, Values(), Values()
        for move in self.plan.moves:
            s = move.slice
            new = self.buffers.updated(s, move.how, [given[v] for v in s.inputs], i)
            fed.update(zip(s.outputs, new, strict=True))
            hand.new |= self.buffers.keep(s, move.how, new, hand.wholes, i, first=is_first, without=self.plan.feeds)
        return {v: fed[v] for v in self.fed.values()}

    def reread(self, place: int, own: Values, numbers: Any) -> Any:
        """Rows of one of the scan's ``xs``, computed from the rows of leaves that move and of other operands."""
        each = self.plan.reread[place]
        given = [own[v] for v in each.slice.inputs]
        (x,) = run_chunk(each.slice.core.jaxpr, each.how.dims, each.how.where, numbers, *given)
        return x

    def phases(self, hand: Hand, inner: Values, stored: Any, then: Any) -> Values:
        """Run the iteration's own arithmetic while it stores the rows ``stored`` and loads the rows ``then``."""
        plan, last, reads = self.plan, len(self.plan.groups) - 1, {*self.plan.loaded}
        found = Values()
        for phase, (s, group) in enumerate(zip(plan.body.slices, plan.groups, strict=True)):
            new = {v: hand.new[v] for v in group if v in hand.new}
            loaded = [v for v in plan.groups[phase - 1] if v in reads]
            fetched = self.buffers.exchange(hand.wholes, new, stored, loaded, then)
            inner.update(zip(s.outputs, s.run(*(inner[v] for v in s.inputs)), strict=True))
            if phase < last:
                self.gate(phase, hand, fetched, inner)
            found |= fetched
        return found

    def gate(self, phase: int, hand: Hand, fetched: Values, inner: Values) -> None:
        """Make everything that follows wait for this phase of the iteration, and for its transfers."""
        groups, body = self.plan.groups, self.plan.body
        following = [v for v in groups[phase + 1] if v in hand.new]
        # else XLA would store in the next phase too, which loads from the same buffers
        back = [v for v in groups[phase] if v in hand.new]
        gates = [gate for gate in [body.gates[phase]] if gate is not None]
        parts = [(inner, gates), (hand.new, following), (hand.wholes, back), (fetched, [*fetched])]
        values = iter(together([values[v] for values, vs in parts for v in vs]))
        for of, vs in parts:
            of.update({v: next(values) for v in vs})
        if gates and (held := [v for v in body.held(phase) if v not in gates]):
            # XLA for TPUs runs equations that need no gate before it, so the first phase would be most of the iteration
            both = [*gates, *held]
            inner.update(zip(both, _on(["tpu"], together, [inner[v] for v in both]), strict=True))

    def loop(self, consts: Sequence[Any], init: list[Any], xs: Mapping[int, Any], hand: Hand) -> Looped:
        """Run the scan with the updates inside, from these values on."""

        def iteration(carry: Any, rows: Any) -> Any:
            return self.iteration(consts, carry, rows)

        scan = self.scan
        # in a forward pass, the update of the second unrolled iteration would wait for the stores of the first
        unroll = 1 if self.plan.ahead else scan.unroll
        first = jnp.int32(0), init, *self.packed(hand)
        (_, carried, *packed), ys = jax.lax.scan(iteration, first, xs, scan.length, scan.reverse, unroll)
        return carried, ys, self.unpacked(packed)

    def nested(
        self, nest: Nest, consts: Sequence[Any], carried: list[Any], xs: Mapping[int, Any], hand: Hand
    ) -> Looped:
        """Run a nest, group by group: XLA copies rows only if their numbers depend on a single loop's counter."""
        outer, inner, body, n = nest.outer, nest.inner, nest.body, nest.inner.length
        in_body = dict(zip(inner.ys, inner.eqn.outvars[len(inner.carry) :], strict=True))
        fed = {j: self.fed[k] for j, k in nest.handed_on.items() if k in self.fed}
        reread, loading = self.plan.reread, {k for k, each in self.plan.reread.items() if each.slice.loads}
        again = {j: k for j, k in nest.handed_on.items() if k in loading and nest.hands_on([k])}
        results = dict(zip(self.scan.ys, body.outputs[len(outer.init) :], strict=True))
        read = {*nest.after.inputs, *variables(results[y] for y in self.kept)}
        kept = [y for y, v in in_body.items() if v in read]
        stacks = {y: list[Any]() for y in self.kept}

        def rows_of(k: int, x: Any, group: int) -> Any:
            if k in self.fed or k in again.values():
                return None  # its rows are made one by one
            if (each := reread.get(k)) is not None:
                wholes, start = self.others | hand.wholes, group * n
                own = {v: self.buffers.load(wholes, v, start, n) if is_host_aval(v.aval)
                       else self.buffers.read(v, wholes[v], start, n) for v in each.slice.inputs}  # fmt: skip
                return self.reread(k, own, start + jnp.arange(n))
            in_layers = not isinstance(x, Literal) and x in nest.layers
            return xs[k][group * n : (group + 1) * n] if in_layers else xs[k][group]

        order = sorted(range(outer.length), reverse=outer.reverse)
        for group in order:
            if loading - {*again.values()}:  # a whole group is loaded, and not ahead of the one before
                (*wholes, carried) = together([*hand.wholes.values(), carried])
                hand.wholes = dict(zip(hand.wholes, wholes, strict=True))
            rows = [rows_of(k, x, group) for k, x in enumerate(outer.xs)]
            env: Values = dict(zip(body.inputs, [*body.consts, *consts, *carried, *rows], strict=True))
            env.update(zip(nest.before.outputs, nest.before.run(*(env[v] for v in nest.before.inputs)), strict=True))
            own_consts, init, own_xs = inner.parted(values_of(env, inner.eqn.invars))
            emitter = dataclasses.replace(
                self, scan=inner, kept=kept, fed=fed, again=again, start=group * n, begins=group == order[0]
            )
            given = {j: x for j, x in enumerate(own_xs) if j not in fed and j not in again}
            made, ys, hand = emitter.loop(own_consts, init, given, hand)
            env.update(zip([*inner.carry, *(in_body[y] for y in kept)], [*made, *ys], strict=True))
            env.update(zip(nest.after.outputs, nest.after.run(*(env[v] for v in nest.after.inputs)), strict=True))
            carried = values_of(env, body.outputs[: len(outer.init)])
            for y, parts in stacks.items():
                parts += values_of(env, [results[y]])
        whole = [(y, parts[::-1] if outer.reverse else parts) for y, parts in stacks.items()]
        return carried, [jnp.concatenate(x) if y in in_body else jnp.stack(x) for y, x in whole], hand

    def iteration(self, consts: Sequence[Any], carry: Any, rows: Any) -> Any:
        """Run one iteration, as the body of a scan."""
        plan, scan, start = self.plan, self.scan, self.start
        k, carried, *packed = carry
        hand, last = self.unpacked(packed), start + scan.length - 1
        # XLA writes the counter's next value when every copy that reads it is done, so they read the minimum, which is
        # the counter too. The first iteration's ``before`` and the last one's ``after`` are clamped by the copies.
        i = last - k if scan.reverse else start + jnp.minimum(k, scan.length)
        before, after = (i + 1, i - 1) if scan.reverse else (i - 1, i + 1)
        own, is_first = self.own_rows(hand, i), self.begins & (k == 0)
        if plan.ahead:
            fed = self.update(hand, own, i, is_first)
            (*xs, carried) = together([*fed.values(), *hand.new.values(), carried])
            fed, hand.new = dict(zip(fed, xs, strict=False)), dict(zip(hand.new, xs[len(fed) :], strict=True))
            rows |= {place: jax.lax.squeeze(fed[v], (0,)) for place, v in self.fed.items()}
        given = own | hand.loaded
        rows |= {j: jax.lax.squeeze(self.reread(k, given, i[None]), (0,)) for j, k in self.again.items()}
        program = plan.body.program
        operands = [*program.consts, *consts, *carried, *(rows[j] for j in range(len(scan.xs)))]
        inner: Values = dict(zip(program.inputs, operands, strict=True))
        then = self.phases(hand, inner, i if plan.ahead else before, after)
        results = [as_array(v) if isinstance(v, Literal) else inner[v] for v in program.outputs]
        if not plan.ahead:
            # The update waits for all of the arithmetic: it overwrites buffers that are stored until then. And
            # for the last loads: a TPU would start them after it, into buffers that it has read.
            ready = [v for v in plan.groups[-2] if v in then]
            results, late = together((results, [then[v] for v in ready]))
            then |= zip(ready, late, strict=True)
        carried, produced = results[: len(carried)], dict(zip(scan.ys, results[len(carried) :], strict=True))
        if not plan.ahead:
            # laid out like the stack: a TPU would give the whole stack the layout of a matmul's result
            in_order = _on(["tpu"], lambda xs: [*map(_in_order, xs)], [x[None] for x in produced.values()])
            rows = dict(zip(produced, in_order, strict=True))
            self.update(hand, own | rows, i, is_first)
        hand.loaded = then
        return (k + 1, carried, *self.packed(hand)), [produced[y] for y in self.kept]


def _buffers(plan: InScan, names: Names) -> Buffers:
    def laid_out(v: Var, x: jax.Array) -> jax.Array:
        # XLA lays out gathered rows by the divided axis, and would give the whole stack that layout
        whole = _is_whole(plan.pins.get(v) or typed_sharding(v.aval), v.aval.shape)
        return _on(["tpu", "cuda"], _in_order, x) if whole else x

    return Buffers(plan.rows, plan.pins, names, laid_out=laid_out)


def _on(platforms: Sequence[str], run: Callable[..., Any], x: Any, *others: Any) -> Any:
    """Return ``run(x, *others)`` on these platforms and ``x`` elsewhere."""
    on_these = dict.fromkeys(platforms, run)
    return jax.lax.platform_dependent(x, *others, **on_these, default=lambda x, *_: x)


def _is_whole(sharding: NamedSharding | None, shape: tuple[int, ...]) -> bool:
    """Whether an array is whole on each of several devices."""
    return sharding is not None and sharding.mesh.size > 1 and math.prod(shards_of(sharding, shape)) == 1


def _in_order(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
