"""A traced training step, cut at its updates: what comes before, the updates, and what comes after.

The step in one piece runs inside one ``jit``. Cut, its updates can run elsewhere than its model: turned around, so that
they lie beside the next forward pass; on the host; or in groups, while their state could come from files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_offload._base.donation import is_guard
from jax_offload._base.jaxprs import Atom, ClosedJaxpr, Equation, ordered, renamed, values_of, variables
from jax_offload._base.on_disk import READ
from jax_offload._emit.find import holds_update
from jax_offload._ir.program import Program, Var, flat
from jax_offload._ir.slices import Slice, slice_of


@dataclasses.dataclass(frozen=True)
class Cut:
    """A step as three parts that run one after the other.

    Attributes:
      program: the step.
      before: the forward and the backward pass, and all else that needs no result of an update: the loss, a metric.
      update: the updates, and what lies between two of them.
      after: what needs their results, and no update needs.
    """

    program: Program
    before: Slice
    update: Slice
    after: Slice

    @property
    def parts(self) -> tuple[Slice, Slice, Slice]:
        return self.before, self.update, self.after

    @property
    def crossing(self) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
        """What is made before the updates and read in or after them, gradients say; and what they make for after."""
        before, update, after = self.parts
        later = {*update.inputs, *after.inputs}
        return tuple(v for v in before.outputs if v in later), tuple(v for v in update.outputs if v in {*after.inputs})

    def run(self, args: Sequence[Any], jit: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f) -> list:
        """The step's results, flat, of its flat arguments; each part wrapped in ``jit``."""
        env = dict(zip(self.program.inputs, [*self.program.consts, *args], strict=True))
        for part in self.parts:
            env.update(zip(part.outputs, jit(part.run)(*(env[v] for v in part.inputs)), strict=True))
        return values_of(env, self.program.outputs)


def cut_step(step: ClosedJaxpr | Program) -> Cut:
    """A step's closed jaxpr, or its program, cut at its updates.

    A ``jit`` around all or a part of it is gone through, and what it says of donation, shardings and compiling is not
    kept. What else an update stands in goes with it as a whole: a branch, a loop (``skip=``, gradient accumulation that
    updates inside), ``shard_map``, ``jax.checkpoint``.

    Raises:
      ValueError: no ``offload`` updates anything in the step, or it has effects whose order a cut would lose.
    """
    program = unguarded(step if isinstance(step, Program) else flat(step, any_jit=True))
    marks = [holds_update(eqn) or eqn.primitive is READ for eqn in program.eqns]  # a leaf is read where it is updated
    if not any(map(holds_update, program.eqns)):
        raise ValueError(
            "step: has no update of an offload(...) in it that can be seen; call tx.update or jo.update_params, and "
            "not under vmap or a derivative."
        )
    if effects := ordered(program.effects):
        raise ValueError(
            f"step: has effects whose order a cut would lose: {', '.join(effects)}. Leave out mutable arrays, "
            "and set ordered=False."
        )
    follows = _reached(program.eqns, marks, lambda eqn: (eqn.invars, eqn.outvars))
    leads = _reached(program.eqns[::-1], marks[::-1], lambda eqn: (eqn.outvars, eqn.invars))[::-1]
    places = [
        1 if mark or (after and ahead) else 2 if after else 0
        for mark, after, ahead in zip(marks, follows, leads, strict=True)
    ]
    parts: list[list[Equation]] = [[], [], []]
    for eqn, place in zip(program.eqns, _constants_where_used(program, places), strict=True):
        parts[place].append(eqn)

    reads = [{v for eqn in eqns for v in variables(eqn.invars)} for eqns in parts]
    results = {*variables(program.outputs)}
    slices = []
    for k, eqns in enumerate(parts):
        wanted = results.union(*reads[k + 1 :])
        outputs = [v for eqn in eqns for v in eqn.outvars if v in wanted]
        slices.append(slice_of(eqns, outputs, program.debug_info, _NO_SHARDS))
    return Cut(program, *slices)


def unguarded(program: Program) -> Program:
    """The program without what keeps donation safe, which whoever jits its parts does."""
    names: dict[Var, Atom] = {}
    eqns: list[Equation] = []
    for eqn in program.eqns:
        ins = [renamed(names, v) for v in eqn.invars]
        if is_guard(eqn):
            names.update(zip(eqn.outvars, ins, strict=True))
        else:
            eqns.append(eqn.replace(invars=ins))
    return dataclasses.replace(program, eqns=eqns, outputs=[renamed(names, v) for v in program.outputs])


def _constants_where_used(program: Program, places: Sequence[int]) -> list[int]:
    """The places, but that what is made of no argument is made where it is first read, and does not cross."""
    defined: set[Var] = {*program.inputs}  # of something
    constant = []
    for eqn in program.eqns:
        of_something = any(v in defined for v in variables(eqn.invars))
        constant.append(not of_something and not eqn.effects)
        if of_something:
            defined.update(eqn.outvars)
    first: dict[Var, int] = dict.fromkeys(variables(program.outputs), 0)
    found = list(places)
    for k in reversed(range(len(found))):
        eqn = program.eqns[k]
        if constant[k] and found[k] == 0:
            found[k] = min((first[v] for v in eqn.outvars if v in first), default=0)
        for v in variables(eqn.invars):
            first[v] = min(first.get(v, found[k]), found[k])
    return found


_NO_SHARDS: Mapping[Var, Any] = {}


def _reached(
    eqns: Sequence[Equation],
    marks: Sequence[bool],
    ends: Callable[[Equation], tuple[Sequence[Atom], Sequence[Atom]]],
) -> list[bool]:
    """For every equation whether a marked one lies before it, along the edges that ``ends`` gives."""
    reached: set[Var] = set()
    found = []
    for eqn, mark in zip(eqns, marks, strict=True):
        start, end = ends(eqn)
        hit = any(v in reached for v in variables(start))
        found.append(hit)
        if hit or mark:
            reached.update(variables(end))
    return found
