"""A traced update, cut into slices that need few host leaves each.

The update of an optimizer is traced once, as the *usual recipe*: every host leaf loaded, all of the update, every host
leaf stored. A slice is what remains of it for some results: for AdamW, one parameter's update and moments, with the
loads and stores of just these. No optimizer is known by name; whatever its equations say holds.

Forward, each variable is told which host leaves it needs, and in which pass it is known. Its results then fall into
parts, and backward each equation goes to the parts that need it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import (
    Atom,
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Effects,
    Equation,
    Jaxpr,
    Literal,
    Var,
    jax_fun,
    nameless,
    variables,
)
from jax_offload._program.memory import Shards, is_host_aval
from jax_offload._program.primitives import ELEMENTWISE, REDUCE, can_be_cut
from jax_offload._program.private import without_dead_code
from jax_offload._program.program import Builder, Program
from jax_offload._program.propagate import LATEST, Mask, add_needs, backward, bits, forward, groups, union

# ---- dependence

Root = Var | int  # an int is the identity of an equation with an effect


@dataclasses.dataclass(frozen=True)
class Known:
    """The facts about a program's variables, found by reading it forward.

    Attributes:
      needs_host: the host leaves that each variable needs, except through a scalar that is computed ahead.
      earliest: the first pass in which a variable can be known; 0 for variables that are not here.
      scalars: the scalars computed ahead, each with its host leaves and the pass in which these are loaded.
      summaries: see ``is_summary``.
    """

    needs_host: dict[Var, Mask]
    earliest: dict[Var, int]
    scalars: dict[Var, tuple[Mask, int]]
    summaries: set[Var]

    @property
    def last(self) -> int:
        """The number of the last pass, which stores the host leaves: earlier passes need their old values."""
        return max(self.earliest.values(), default=0)


class Wanted(NamedTuple):
    """A root, the host leaves that it needs, and its pass."""

    root: Root
    needs: Mask
    at: int


@dataclasses.dataclass
class Part:
    """A part of the program that becomes a prelude or a slice.

    Attributes:
      at: the number of its pass.
      eqns: its equations, the last one first until all are found.
      outputs: the values that it provides.
      given: the results of its equations that other parts provide.
    """

    at: int
    eqns: list[Equation] = dataclasses.field(default_factory=list[Equation])
    outputs: list[Var] = dataclasses.field(default_factory=list[Var])
    given: set[Var] = dataclasses.field(default_factory=set[Var])


def read(program: Program, scalars_ahead: bool) -> Known:
    """Read a program forward. A scalar that is computed ahead from host leaves is known one pass later."""
    on_host = (v for v in program.inputs if is_host_aval(v.aval))
    known = Known({v: 1 << i for i, v in enumerate(on_host)}, {}, {}, set())
    for eqn in program.eqns:
        if (known.summaries or eqn.primitive.name in REDUCE) and is_summary(eqn, known.summaries):
            known.summaries.update(v for v in eqn.outvars if v.aval.shape)
        earliest = (
            LATEST.after(eqn, LATEST.read(known.earliest, eqn.invars)) if known.earliest else [0] * len(eqn.outvars)
        )
        for v, mask, at in zip(eqn.outvars, forward(eqn, known.needs_host), earliest, strict=True):
            ahead = scalars_ahead and mask and v.aval.shape == ()
            if ahead:
                known.scalars[v] = mask, at
            known.needs_host[v], at = (0, at + 1) if ahead else (mask, at)
            if at:
                known.earliest[v] = at
    return known


def is_summary(eqn: Equation, summaries: Set[Var]) -> bool:
    """Whether its result is a reduction over all rows of an array, small beside it, or arithmetic on such."""
    name = eqn.primitive.name
    if name in REDUCE:
        few = 32 * math.prod(eqn.outvars[0].aval.shape) <= math.prod(eqn.invars[0].aval.shape)
        return 0 in eqn.params["axes"] and few
    if not summaries:
        return False
    if name not in ELEMENTWISE and name not in ("broadcast_in_dim", "reshape", "squeeze"):
        return False
    out = eqn.outvars[0].aval
    arrays = [v for v in eqn.invars if v.aval.shape]
    return bool(arrays) and all(
        not isinstance(v, Literal) and v in summaries and math.prod(v.aval.shape) == math.prod(out.shape)
        for v in arrays
    )


def roots_of(program: Program, known: Known) -> list[Wanted]:
    """Scalars computed ahead, results, and effects such as a callback, which must happen although nobody reads them."""
    last = known.last
    roots = [Wanted(v, mask, at) for v, (mask, at) in known.scalars.items()]
    others: dict[Root, list[Var]] = {v: [v] for v in results_of(program) if v not in known.scalars}
    for root, read in (others | {id(eqn): variables(eqn.invars) for eqn in program.eqns if eqn.effects}).items():
        mask = union(known.needs_host.get(v, 0) for v in read)
        roots.append(Wanted(root, mask, last if mask else LATEST.join(known.earliest.get(v, 0) for v in read)))
    return roots


def results_of(program: Program) -> list[Var]:
    """The outputs that its equations make, each once."""
    inputs = set(program.inputs)
    return list(dict.fromkeys(v for v in program.outputs if not isinstance(v, Literal) and v not in inputs))


def parts_of(roots: Sequence[Wanted], last: int) -> tuple[list[Part], dict[Root, int]]:
    """Return the parts, still without equations (all preludes, then the slices), and the number of each root's part.

    Roots of a pass that need a host leaf in common go together. Roots that need none go to the prelude.
    """
    most = union(each.needs for each in roots).bit_length()
    numbers = groups([each.needs << each.at * most for each in roots])  # passes share no bits
    at_of = {k: each.at for each, k in zip(roots, numbers, strict=True) if k}
    parts = [Part(at) for at in (*range(last + 1), *at_of.values())]
    return parts, {each.root: last + k if k else each.at for each, k in zip(roots, numbers, strict=True)}


def divide(program: Program, known: Known, parts: Sequence[Part], number_of: Mapping[Root, int]) -> None:
    """Put the program's equations, last one first, into the parts that need them, and say which part provides what.

    A variable that one part provides to others is that part's result.
    """
    needed_by: dict[Var, Mask] = {v: 1 << number_of[v] for v in results_of(program)}
    provider: dict[Var, int] = {}
    preludes = (2 << known.last) - 1
    for eqn in reversed(program.eqns):
        effect = 1 << number_of[id(eqn)] if id(eqn) in number_of else 0
        needs = [0 if isinstance(v, DropVar) else needed_by.get(v, 0) for v in eqn.outvars]
        provided: list[Var] = []
        for k, v in enumerate(eqn.outvars):
            if needs[k] and not known.needs_host[v] and _is_provided(eqn, v, needs[k], known, preludes):
                provider[v] = number_of[v] if v in known.scalars else known.earliest.get(v, 0)
                needs[k] = 1 << provider[v]
                provided.append(v)
        for part in bits(union(needs) | effect):
            parts[part].eqns.append(eqn)
            parts[part].given.update(v for v in provided if provider[v] != part)
        add_needs(needed_by, eqn.invars, backward(eqn, needs, effect))
    for part in parts:
        part.eqns.reverse()
    for v in dict.fromkeys([*results_of(program), *provider]):
        parts[provider.get(v, number_of.get(v, 0))].outputs.append(v)


def _is_provided(eqn: Equation, v: Var, needs: Mask, known: Known, preludes: Mask) -> bool:
    """Whether one part makes a variable that needs no host leaf, so that no other part makes it again."""
    shared = needs & preludes or needs.bit_count() > 1
    again = eqn.primitive.name in ELEMENTWISE  # cheaper computed again than kept, as an array, between its uses
    return bool(v.aval.shape == () or v in known.summaries or (shared and not again) or eqn.effects)


# ---- a slice without its loads and stores, so that a loop can load ahead of the update


@dataclasses.dataclass(frozen=True)
class Core:
    """The part of a slice that runs on the device.

    Attributes:
      jaxpr: takes the slice's operands, with ``loads`` already loaded, and returns its results, not yet stored.
      loads: the host leaves among the operands that are loaded once and have no other use. A ``cond`` in which another
        ``offload`` loads a leaf is another use.
    """

    jaxpr: Jaxpr
    loads: frozenset[Var]


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a program: ``outputs`` from ``inputs``, both given as variables of the program.

    Attributes:
      shards: how the program's inputs are divided between devices.
    """

    inputs: list[Var]
    outputs: list[Var]
    jaxpr: Jaxpr
    shards: Mapping[Var, Shards] = dataclasses.field(default_factory=dict[Var, Shards])

    @property
    def run(self) -> Callable[..., list[Any]]:
        """``run(*inputs) -> outputs``, all at once."""
        return jax_fun(ClosedJaxpr(self.jaxpr, []))

    @functools.cached_property
    def core(self) -> Core:
        """The slice without its loads and stores."""
        moves = {
            out: v
            for eqn in self.jaxpr.eqns
            if eqn.primitive.name == "device_put" and len(eqn.invars) == 1
            for v, out in zip(variables(eqn.invars), eqn.outvars, strict=False)
        }
        loads = {out: v for out, v in moves.items() if v in {*self.loads} and not is_host_aval(out.aval)}
        others = [eqn for eqn in self.jaxpr.eqns if loads.keys().isdisjoint(eqn.outvars)]
        kept = {v for eqn in others for v in variables(eqn.invars)}
        on_device = {v: Var(out.aval) for out, v in loads.items() if v not in kept}
        new = Builder(names={out: on_device[v] for out, v in loads.items() if v in on_device})
        for eqn in self.jaxpr.eqns:
            if new.names.keys().isdisjoint(eqn.outvars):
                new.put(eqn)
        stored = {out: v for out, v in moves.items() if is_host_aval(out.aval)}
        outputs = new.read([stored.get(v, v) for v in self.outputs])
        inputs = [on_device.get(v, v) for v in self.inputs]
        jaxpr = Jaxpr([], inputs, outputs, new.eqns, self.jaxpr.effects, self.jaxpr.debug_info)
        return Core(without_dead_code(jaxpr, keep_inputs=True)[0], frozenset(on_device))

    @functools.cached_property
    def loads(self) -> list[Var]:
        """The host leaves that it needs."""
        return [v for v in self.inputs if is_host_aval(v.aval)]

    @functools.cached_property
    def stores(self) -> list[Var]:
        """The host leaves that it makes."""
        return [v for v in self.outputs if is_host_aval(v.aval)]

    @property
    def pins(self) -> dict[Var, NamedSharding]:
        """The shardings that the trace constrains operands and results to; with Explicit axes, types tell them.

        A choice between two values is divided as they are, because XLA may divide it in another way.
        """
        eqns = [eqn for eqn in self.jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
        found = {eqn.invars[0]: eqn.params["sharding"] for eqn in reversed(eqns) if eqn.invars[0] in self.inputs}
        found |= {eqn.outvars[0]: eqn.params["sharding"] for eqn in eqns}
        for eqn in self.jaxpr.eqns if found else ():
            if eqn.primitive.name == "select_n" and (cases := found.keys() & {*variables(eqn.invars[1:])}):
                found[eqn.outvars[0]] = found[cases.pop()]
        return found

    @functools.cached_property
    def loaded_bytes(self) -> int:
        """Bytes of ``loads`` on one device."""
        return sum(nbytes(v.aval) // math.prod(self.shards.get(v, ())) for v in self.loads)

    @functools.cached_property
    def decoded_bytes(self) -> int:
        """Bytes of ``loads`` on one device, decoded to float32 where they are stored in fewer bits."""
        return sum(
            math.prod(v.aval.shape) * max(4, v.aval.dtype.itemsize) // math.prod(self.shards.get(v, ()))
            for v in self.loads
        )


def repeats_effects(program: Program, passes: Sequence[Pass]) -> bool:
    """Whether an effect of the program, such as a callback, would happen in more than one slice."""
    slices = [s for each in passes for s in (each.prelude, *each.slices)]
    return sum(bool(eqn.effects) for s in slices for eqn in s.jaxpr.eqns) > sum(bool(e.effects) for e in program.eqns)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Slices that can run in any order, one at a time, after the prelude, which loads nothing."""

    prelude: Slice
    slices: list[Slice]


def cut(program: Program, scalars_ahead: bool) -> list[Pass]:
    """The program as passes over the host leaves, in slices.

    Two results belong to one slice if they need a host leaf in common, because loading it once serves both. A value
    that needs no host leaf belongs to the prelude if it serves several slices, is a scalar (a learning rate, the
    gradients' norm), or summarises all rows (``adaptive_grad_clip``'s norm of each column, which would keep the rows
    together). Elementwise arithmetic on arrays stays in the slices, and each slice that needs it repeats it.

    A scalar that is reduced from the leaves of many parameters (a norm over accumulated gradients, prodigy's sums), or
    from all rows of one (LAMB's trust ratio), makes everything that uses it need all of them at once.
    ``scalars_ahead`` makes such a scalar a result of its own, one pass ahead: each leaf, or chunk of a leaf, is loaded
    once for its part of the scalar, and once more for the equations that use the scalar.
    """
    done = _cuts.setdefault(program, {})
    if scalars_ahead not in done:
        done[scalars_ahead] = _cut(program, scalars_ahead)
    return done[scalars_ahead]


# A program is cut where gates try its slices, and again where it is lowered in one piece.
_cuts = weakref.WeakKeyDictionary[Program, dict[bool, list[Pass]]]()


def _cut(program: Program, scalars_ahead: bool) -> list[Pass]:
    known = read(program, scalars_ahead)
    parts, number_of = parts_of(roots_of(program, known), known.last)
    divide(program, known, parts, number_of)
    slices = [slice_of(part.eqns, part.outputs, program.debug_info, program.shards, part.given) for part in parts]
    passes = [Pass(prelude, []) for prelude in slices[: known.last + 1]]
    for part, s in [*zip(parts, slices, strict=True)][known.last + 1 :]:
        if s.jaxpr.eqns:
            passes[part.at].slices.append(s)
    return passes


def slice_of(
    eqns: list[Equation],
    outputs: list[Var],
    debug_info: DebugInfo,
    shards: Mapping[Var, Shards],
    given: Set[Var] = frozenset(),
) -> Slice:
    """The slice of some equations and results.

    Args:
      eqns, outputs: the equations and results to include.
      debug_info, shards: taken from the program.
      given: the variables that other parts provide.
    """
    defined = {v for eqn in eqns for v in eqn.outvars} - given
    read = [v for vs in [*(eqn.invars for eqn in eqns), outputs] for v in vs if not isinstance(v, Literal)]
    inputs = [v for v in dict.fromkeys(read) if v not in defined]
    # a cond with only some wanted results may still name the others: let dce cut inside it
    eqns = [_without(eqn, given) for eqn in eqns] if given else eqns
    effects: Effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns if eqn.effects))
    jaxpr = Jaxpr([], inputs, outputs, eqns, effects, nameless(debug_info))  # the names are the program's
    if any(map(can_be_cut, eqns)):
        jaxpr, used = without_dead_code(jaxpr)
        inputs = [v for v, u in zip(inputs, used, strict=True) if u]
    return Slice(inputs, outputs, jaxpr, shards)


def consecutive(
    parts: Sequence[list[Equation]], results: Sequence[Atom], debug_info: DebugInfo, shards: Mapping[Var, Shards]
) -> list[Slice]:
    """The slices of parts that run one after the other; each provides what later ones or ``results`` read."""
    wanted, found = {*variables(results)}, list[Slice]()
    for eqns in reversed(parts):
        outputs = [v for eqn in eqns for v in eqn.outvars if v in wanted]
        found.append(slice_of(eqns, outputs, debug_info, shards))
        wanted.update(v for eqn in eqns for v in variables(eqn.invars))
    return found[::-1]


def _without(eqn: Equation, given: Set[Var]) -> Equation:
    """``eqn`` without the results that are given already, so that a slice does not define one of its inputs."""
    if given.isdisjoint(eqn.outvars):
        return eqn
    return eqn.replace(outvars=[Var(v.aval) if v in given else v for v in eqn.outvars])
