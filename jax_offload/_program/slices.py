"""A traced update, cut into slices that need few host leaves each.

The update of an optimizer is traced once, as the *usual recipe*: every host leaf loaded, all of the update, every host
leaf stored. A slice is what remains of it for some results: for AdamW, one parameter's update and moments, with the
loads and stores of just these. No optimizer is known by name; whatever its equations say holds.

Forward, each variable is told which host leaves it needs, and in which pass it is known. Its results then fall into
parts, and backward each equation goes to the parts that need it.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from jax.sharding import NamedSharding

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import (
    Atom,
    DebugInfo,
    DropVar,
    Equation,
    Jaxpr,
    Var,
    jax_fun,
    variables,
)
from jax_offload._program.memory import Shards, is_host_aval
from jax_offload._program.primitives import ELEMENTWISE, REDUCE, can_be_cut
from jax_offload._program.private import without_dead_code
from jax_offload._program.program import Builder, Program, is_load, is_store
from jax_offload._program.propagate import Mask, add_needs, backward, bits, forward, groups, union

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


@dataclasses.dataclass(frozen=True, eq=False)
class Slice(Program):
    """A part of a program: its ``inputs`` and ``outputs`` are variables of the program, and it has no constants."""

    outputs: list[Var]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def run(self) -> Callable[..., list[Any]]:
        """``run(*inputs) -> outputs``, all at once."""
        return jax_fun(self.closed)

    @functools.cached_property
    def core(self) -> Core:
        """The slice without its loads and stores."""
        hosts = {*self.loads}
        loads = {eqn.outvars[0]: eqn.invars[0] for eqn in self.eqns if is_load(eqn) and eqn.invars[0] in hosts}
        kept = {v for eqn in self.eqns if loads.keys().isdisjoint(eqn.outvars) for v in variables(eqn.invars)}
        on_device = {v: Var(out.aval) for out, v in loads.items() if v not in kept}
        new = Builder(names={out: on_device[v] for out, v in loads.items() if v in on_device})
        for eqn in self.eqns:
            if new.names.keys().isdisjoint(eqn.outvars):
                new.put(eqn)
        stored = {eqn.outvars[0]: eqn.invars[0] for eqn in self.eqns if is_store(eqn)}
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
        eqns = [eqn for eqn in self.eqns if eqn.primitive.name == "sharding_constraint"]
        found = {eqn.invars[0]: eqn.params["sharding"] for eqn in reversed(eqns) if eqn.invars[0] in self.inputs}
        found |= {eqn.outvars[0]: eqn.params["sharding"] for eqn in eqns}
        for eqn in self.eqns if found else ():
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


# ---- the parts of a program


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


def repeats_effects(program: Program, passes: Sequence[Pass]) -> bool:
    """Whether an effect of the program, such as a callback, would happen in more than one slice."""
    slices = [s for each in passes for s in (each.prelude, *each.slices)]
    return sum(bool(eqn.effects) for s in slices for eqn in s.eqns) > sum(bool(e.effects) for e in program.eqns)


@dataclasses.dataclass(frozen=True)
class Known:
    """The facts about a program's variables, found by reading it forward.

    Attributes:
      leaves: the number of host leaves.
      needs: for each variable a bit for each host leaf that it needs, except through a scalar that is computed ahead.
        Above them are as many bits as passes come before the variable is known, so that a union has the latest pass.
      scalars: what the scalars that are computed ahead need.
      summaries: see ``is_summary``.
    """

    leaves: int
    needs: dict[Var, Mask]
    scalars: dict[Var, Mask] = dataclasses.field(default_factory=dict[Var, Mask])
    summaries: set[Var] = dataclasses.field(default_factory=set[Var])

    def parted(self, mask: Mask) -> tuple[Mask, int]:
        """The host leaves in a mask, and the number of passes."""
        return mask & ((1 << self.leaves) - 1), (mask >> self.leaves).bit_length()

    def of(self, atoms: Iterable[Var]) -> tuple[Mask, int]:
        """The host leaves that some variables need, and the first pass in which all are known."""
        return self.parted(union(self.needs.get(v, 0) for v in atoms))


def _read(program: Program, scalars_ahead: bool) -> Known:
    """Read a program forward. A scalar that is computed ahead from host leaves is known one pass later."""
    on_host = [v for v in program.inputs if is_host_aval(v.aval)]
    known = Known(len(on_host), {v: 1 << i for i, v in enumerate(on_host)})
    later = 1 << known.leaves
    for eqn in program.eqns:
        if is_summary(eqn, known.summaries):
            known.summaries.update(v for v in eqn.outvars if v.aval.shape)
        for v, mask in zip(eqn.outvars, forward(eqn, known.needs), strict=True):
            if scalars_ahead and mask & (later - 1) and v.aval.shape == ():
                known.scalars[v] = mask
                known.needs[v] = later | (mask >> known.leaves) * 2 * later
            else:
                known.needs[v] = mask
    return known


def is_summary(eqn: Equation, summaries: Set[Var]) -> bool:
    """Whether its result is a reduction over all rows of an array, small beside it, or arithmetic on such."""
    name = eqn.primitive.name
    if name in REDUCE:
        few = 32 * math.prod(eqn.outvars[0].aval.shape) <= math.prod(eqn.invars[0].aval.shape)
        return 0 in eqn.params["axes"] and few
    if not summaries or (name not in ELEMENTWISE and name not in ("broadcast_in_dim", "reshape", "squeeze")):
        return False
    arrays, size = [v for v in eqn.invars if v.aval.shape], math.prod(eqn.outvars[0].aval.shape)
    same = {v for v in variables(arrays) if v in summaries and math.prod(v.aval.shape) == size}
    return bool(arrays) and same.issuperset(arrays)


@dataclasses.dataclass
class _Part:
    """A part of the program that becomes a prelude or a slice.

    Attributes:
      eqns: its equations, the last one first.
      outputs: the values that it provides.
      given: the results of its equations that other parts provide.
    """

    eqns: list[Equation] = dataclasses.field(default_factory=list[Equation])
    outputs: list[Var] = dataclasses.field(default_factory=list[Var])
    given: set[Var] = dataclasses.field(default_factory=set[Var])


def _cut(program: Program, scalars_ahead: bool) -> list[Pass]:
    known = _read(program, scalars_ahead)
    inputs, last = {*program.inputs}, known.of(known.needs)[1]
    results = [v for v in dict.fromkeys(variables(program.outputs)) if v not in inputs]
    # Roots are scalars computed ahead, results, and effects such as a callback, by the identities of their equations.
    # The last pass stores the host leaves, because earlier ones need their old values.
    roots: dict[Var | int, tuple[Mask, int]] = {v: known.parted(mask) for v, mask in known.scalars.items()}
    others: dict[Var | int, list[Var]] = {v: [v] for v in results if v not in known.scalars}
    for root, read in (others | {id(eqn): variables(eqn.invars) for eqn in program.eqns if eqn.effects}).items():
        leaves, at = known.of(read)
        roots[root] = leaves, last if leaves else at
    # Preludes come first. Roots that need no host leaf go to them, and roots of a pass that share a leaf go together.
    numbers = groups([leaves << at * known.leaves for leaves, at in roots.values()])
    number_of = {root: last + k if k else at for (root, (_, at)), k in zip(roots.items(), numbers, strict=True)}
    parts = [_Part() for _ in range(last + 1 + max(numbers, default=0))]

    needed_by: dict[Var, Mask] = {v: 1 << number_of[v] for v in results}
    provider: dict[Var, int] = {}
    for eqn in reversed(program.eqns):
        effect = 1 << number_of[id(eqn)] if id(eqn) in number_of else 0
        needs = [0 if isinstance(v, DropVar) else needed_by.get(v, 0) for v in eqn.outvars]
        given: list[Var] = []
        for k, v in enumerate(eqn.outvars):
            if needs[k] and _is_provided(eqn, v, needs[k], known, (2 << last) - 1):
                provider[v] = number_of[v] if v in known.scalars else known.of([v])[1]
                needs[k] = 1 << provider[v]
                given.append(v)
        for part in bits(union(needs) | effect):
            parts[part].eqns.append(eqn)
            parts[part].given.update(v for v in given if provider[v] != part)
        add_needs(needed_by, eqn.invars, backward(eqn, needs, effect))
    for v in dict.fromkeys([*results, *provider]):
        parts[provider.get(v, number_of.get(v, 0))].outputs.append(v)

    slices = [slice_of(p.eqns[::-1], p.outputs, program.debug_info, program.shards, p.given) for p in parts]
    passes = [Pass(prelude, []) for prelude in slices[: last + 1]]
    pass_of = {number_of[root]: at for root, (_, at) in roots.items()}
    for number, s in enumerate(slices):
        if number > last and s.eqns:
            passes[pass_of[number]].slices.append(s)
    return passes


def _is_provided(eqn: Equation, v: Var, needs: Mask, known: Known, preludes: Mask) -> bool:
    """Whether one part makes a variable that needs no host leaf, so that no other part makes it again."""
    if known.of([v])[0]:
        return False
    shared = needs & preludes or needs.bit_count() > 1
    again = eqn.primitive.name in ELEMENTWISE  # cheaper computed again than kept, as an array, between its uses
    return bool(v.aval.shape == () or v in known.summaries or (shared and not again) or eqn.effects)


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
    made = {v for eqn in eqns for v in eqn.outvars} - given
    read = dict.fromkeys(v for atoms in (*(eqn.invars for eqn in eqns), outputs) for v in variables(atoms))
    inputs, eqns = [v for v in read if v not in made], [*eqns]
    for k, eqn in enumerate(eqns):  # none may define one of the inputs
        if not given.isdisjoint(eqn.outvars):
            eqns[k] = eqn.replace(outvars=[Var(v.aval) if v in given else v for v in eqn.outvars])
    whole = Slice(inputs, outputs, eqns, [], debug_info, shards)
    # a cond with only some wanted results may still name the others
    return whole.only([True] * len(outputs))[1] if any(map(can_be_cut, eqns)) else whole


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
