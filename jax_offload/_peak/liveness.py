"""How much device memory a traced program needs at once: an estimate, by the lifetimes of its buffers.

Nothing is compiled. What XLA does with equations is approximated by a few rules:

- Elementwise operations, broadcasts, slices and gathers are fused: their results exist only where a matmul, a loop or
  another operation that fuses with nothing reads them, and from then on. Until then what they read is alive.
- A buffer is free after its last use. A result takes the buffer of an operand of its size that is not read again; a
  slice written into a buffer that is not read again is written in place.
- A loop holds what it stacks from its beginning on, and beside it what one iteration needs at most: its carry, the rows
  that its matmuls read.
- Donated arguments are written over by the results of their type.
- On a TPU what a loop stacks in float32, and only matmuls read, takes half: they round it to bfloat16. Of stacked
  parameters in float32 there is a copy in half of the bytes beside a loop that only multiplies them.
- Operations run in the order of the trace; or each as soon as it can, which is the least that a scheduler might need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax_offload._base.flops import MATMULS
from jax_offload._base.jaxprs import Jaxpr
from jax_offload._ir.primitives import REDUCE
from jax_offload._peak.donated import paired_with
from jax_offload._peak.flattened import Flattened, Loop, Node, bodies, flattened, loop_of
from jax_offload._peak.rounded import rounded, rounded_ahead
from jax_offload._peak.sequence import FUSED, GATE, IN_PLACE, as_soon_as_they_can
from jax_offload._peak.sharded import ALONE, Division


@dataclasses.dataclass
class Event:
    """Something that runs: what it reads, what it makes, and bytes that it needs meanwhile.

    Attributes:
      node: what it does; ``None`` for what is only fused with what reads it.
      fused: whether it is made element by element, so that it may be written over what it reads.
      in_place: whether it changes a part of what it reads.
      over: a buffer that it reads and writes over, if it is not read again -> what it makes there.
      taken: buffers that become a loop's own, if they are not read again.
    """

    reads: list[int]
    makes: list[int]
    meanwhile: int = 0
    node: Node | None = None
    fused: bool = False
    in_place: bool = False
    over: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    taken: list[int] = dataclasses.field(default_factory=list[int])


def peak(
    jaxpr: Jaxpr, donated: Sequence[bool], *, early: bool = False, division: Division = ALONE,
    own: Sequence[int] | None = None, rounds: bool = False, slack: float = 0.0,
) -> int:  # fmt: skip
    """Bytes on a device at the worst moment, arguments and results included.

    Args:
      jaxpr: an open one, of a whole step.
      donated: for each of its inputs; its constants are not.
      early: whether operations run as soon as they can.
      division: how arrays are divided between devices.
      own: bytes of each input on one device, where that does not tell.
      rounds: whether matmuls round float32 to bfloat16, as on a TPU.
      slack: of what an iteration of a loop needs beside its carry, how much more it may be.
    """
    program = flattened(jaxpr, division)
    given = [False] * (len(program.inputs) - len(donated)) + list(donated)
    lives = Lives(program, early, division, rounds, slack)
    lives.sizes.update(zip(program.inputs[len(program.inputs) - len(own or ()) :], own or (), strict=True))
    paired = paired_with(program, given)
    lives.sizes.update((new, lives.sizes[old]) for new, old in paired.items())
    kept = [k for k, d in zip(program.inputs, given, strict=True) if not d]
    return lives.peak(owned=program.inputs, kept=kept, results=program.outputs, paired=paired)


class Lives:
    """Of a program's buffers."""

    def __init__(
        self, program: Flattened, early: bool, division: Division = ALONE, rounds: bool = False, slack: float = 0.0
    ) -> None:
        self.program, self.early, self.division, self.rounds, self.slack = program, early, division, rounds, slack
        self.halved = rounded(program) if rounds else set[int]()
        self.sizes = {k: n // 2 if k in self.halved else n for k, n in program.sizes.items()}
        self.full: dict[int, int] = {}  # a parameter that is divided -> the whole one, gathered for matmuls
        self.roots: dict[int, tuple[int, ...]] = {}  # of what is fused: the buffers that it is made of
        self.events: list[Event] = []
        self.later: dict[int, int] = {}  # the last operation that names an array
        self.inside: dict[tuple[int, bool], int] = {}

    def peak(
        self, owned: Iterable[int], kept: Iterable[int], results: Sequence[int], paired: dict[int, int],
        rows: Iterable[int] = (), stacked: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """Bytes at the worst moment.

        Args:
          owned: buffers that are there from the beginning, and count.
          kept: those of them that stay, whatever reads them.
          results: that are there at the end.
          paired: result -> the buffer that it is written over.
          rows: inputs that are slices of what is outside, and exist only where something reads them as a whole.
          stacked: results that are written into buffers outside as they are made.
        """
        wanted = {k for k in results if k >= 0}
        self.run(rows, wanted, {k for k in stacked if k >= 0})
        last: dict[int, int] = {}
        for at, event in enumerate(self.events):
            for k in event.reads:
                last[k] = at
        forever = {*kept} | wanted
        return self._worst({*owned}, forever, last, {new: old for new, old in paired.items()})

    def run(self, rows: Iterable[int], wanted: set[int], stacked: set[int]) -> None:
        """Makes the events."""
        for k in rows:
            self.roots[k] = ()
        nodes = as_soon_as_they_can(self.program.nodes, self.sizes) if self.early else self.program.nodes
        self.later = {k: at for at, node in enumerate(nodes) for k in node.reads}
        for at, node in enumerate(nodes):
            self._run(at, node, wanted)
        for k in stacked - wanted:  # fused with the write, or copied and freed
            if k in self.roots:
                self.events.append(Event(list(self.roots[k]), []))

    def _worst(self, owned: set[int], forever: set[int], last: dict[int, int], paired: dict[int, int]) -> int:
        """``owned``: buffers that nothing but their next values may be written over."""
        sizes, present, own = self.sizes, set(owned), set(owned)
        alive = worst = sum(sizes[k] for k in owned)
        for at, event in enumerate(self.events):
            dying = {k for k in event.reads if last[k] == at and k in present and k not in forever}
            for k in dying & {*event.taken}:
                present.discard(k)
                alive -= sizes[k]
            written = {produced: old for old, produced in event.over.items() if old in dying and old in present}
            for k in event.makes:
                old = paired.get(k)
                if old not in present or not (event.fused or last.get(old, -1) < at):
                    old = written.get(k)
                    old = None if old in own and not event.in_place else old
                if old is not None:
                    present.discard(old)
                    alive -= sizes[old]
                    if old in own:
                        own.add(k)
                        paired = {new: k if o == old else o for new, o in paired.items()}
                present.add(k)
                alive += sizes[k]
            worst = max(worst, alive + event.meanwhile)
            unread = (k for k in event.makes if k not in last and k not in forever)
            for k in {*dying, *unread} - own:
                if k in present:
                    present.discard(k)
                    alive -= sizes[k]
        return worst

    def _run(self, at: int, node: Node, wanted: set[int]) -> None:
        if node.name == GATE:
            return
        if node.name in FUSED and not (wanted & {*node.makes}):
            roots = tuple(dict.fromkeys(r for k in node.reads for r in self.roots.get(k, (k,))))
            self.roots.update(dict.fromkeys(node.makes, roots))
            return
        if node.name in FUSED or node.name in REDUCE:  # reads through what is fused with it
            reads = list(dict.fromkeys(r for k in node.reads for r in self.roots.get(k, (k,))))
            over = self._same_size(reads, node.makes)
            self.events.append(Event(reads, list(node.makes), over=over, node=node, fused=node.name in FUSED))
            return
        if node.name in IN_PLACE:
            target, *rest = node.reads
            # what is made of the old values, and is smaller, is made first
            pending = [k for k, roots in self.roots.items() if target in roots and self.later.get(k, 0) > at]
            self._exist([target, *(k for k in pending if 2 * self.sizes[k] <= self.sizes[target])])
            reads = [target, *(r for k in rest for r in self.roots.get(k, (k,)))]
            self.events.append(Event(reads, list(node.makes), over={target: node.makes[0]}, node=node, in_place=True))
            return
        self._exist(node.reads)
        loop = loop_of(node.eqn)
        if loop is not None:
            first = len(node.operands) - len(loop.body.invars) + loop.consts
            begun = node.operands[first : first + loop.carry]
            carried = [k for k in begun if k >= 0]
            stacked, carry = list(node.makes[loop.carry :]), list(node.makes[: loop.carry])
            self.sizes.update((new, self.sizes[old]) for old, new in zip(begun, carry, strict=True) if old >= 0)
            most = self._of_loop(loop, [self.sizes[k] for k in carry])
            most += int(self.slack * max(0, most - sum(self.sizes[k] for k in carry)))
            if self.rounds:
                copied = rounded_ahead(node, loop, self.program.types)
                most += sum(self.sizes[k] // 2 for k in {*copied} - self.halved)
            self.events.append(Event(list(node.reads), stacked, most, node=node, taken=carried))
            self.events.append(Event([], carry))
        elif inner := bodies(node.eqn):
            most = max(self._of_branch(body) for body in inner)
            self.events.append(Event(list(node.reads), list(node.makes), most, node=node))
        elif node.name in MATMULS and self.division.weights:
            gathered = [self._gathered(k, v.aval) for k, v in zip(node.operands, node.eqn.invars, strict=True)]
            produced = [(v.aval, k) for v, k in zip(node.eqn.outvars, node.makes, strict=True)]
            scattered = sum(self.division.gathered(aval, self.sizes[k]) for aval, k in produced)
            self.sizes.update((k, self.sizes[k] + self.division.summed(aval)) for aval, k in produced)
            if scattered:  # XLA runs the backward matmuls of a layer side by side
                gathered += [self.full[k] for k in [*self.full][-1:] if self.sizes[self.full[k]] == scattered]
            reads = [*node.reads, *(k for k in gathered if k != -1)]
            self.events.append(Event(reads, list(node.makes), scattered, node=node))
        else:
            self.events.append(Event(list(node.reads), list(node.makes), node=node))

    def _gathered(self, k: int, aval: Any) -> int:
        """The number of the whole one of a parameter; -1 where nothing is gathered."""
        beyond = self.division.gathered(aval, self.sizes[k]) if k >= 0 else 0
        if not beyond:
            return -1
        if k not in self.full:
            self.full[k] = new = -2 - len(self.full)
            self.sizes[new] = beyond
            self.events.append(Event([k], [new]))
        return self.full[k]

    def _same_size(self, reads: Sequence[int], makes: Sequence[int]) -> dict[int, int]:
        over: dict[int, int] = {}
        for k in makes:
            for r in reads:
                if r not in over and self.sizes[r] == self.sizes[k]:
                    over[r] = k
                    break
        return over

    def _exist(self, values: Iterable[int]) -> None:
        """From here on what is fused is a buffer of its own: something reads it that fuses with nothing."""
        for k in dict.fromkeys(values):
            if (roots := self.roots.pop(k, None)) is not None and self.sizes[k]:
                self.events.append(Event(list(roots), [k], over=self._same_size(roots, [k])))

    def _of_loop(self, loop: Loop, carried: Sequence[int]) -> int:
        """``carried``: bytes of what it carries on one device, as outside."""
        key = id(loop.body), self.early
        if key not in self.inside:
            program = flattened(loop.body, self.division)
            start = len(program.inputs) - len(loop.body.invars)
            inputs = program.inputs[start:]
            carry, rows = inputs[loop.consts : loop.consts + loop.carry], inputs[loop.consts + loop.carry :]
            lives = Lives(program, False, self.division, self.rounds)
            lives.inside = self.inside
            lives.sizes.update(dict.fromkeys(program.inputs[:start] + inputs[: loop.consts], 0))
            nexts = program.outputs[: loop.carry]
            lives.sizes.update(zip((*nexts, *carry), (*carried, *carried), strict=True))
            self.inside[key] = lives.peak(
                owned=carry, kept=(), results=nexts, paired=dict(zip(nexts, carry, strict=True)), rows=rows,
                stacked=program.outputs[loop.carry :],
            )  # fmt: skip
        return self.inside[key]

    def _of_branch(self, body: Jaxpr) -> int:
        program = flattened(body, self.division)
        lives = Lives(program, False, self.division, self.rounds)
        lives.inside = self.inside
        lives.sizes = {**lives.sizes, **dict.fromkeys(program.inputs, 0), **{k: 0 for k in program.outputs if k >= 0}}
        return lives.peak(owned=(), kept=(), results=program.outputs, paired={})
