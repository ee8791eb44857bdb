"""A cut step as stages, one program each: the pass, the device's share of the update, groups of the cores, the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.barriers import opaque, together
from jax_offload._base.jaxprs import (
    Atom,
    DropVar,
    Equation,
    Jaxpr,
    Literal,
    Var,
    jax_fun,
    jaxpr_of,
    renamed,
    values_of,
    variables,
)
from jax_offload._base.memory import is_host_aval
from jax_offload._base.on_disk import Ends, Range
from jax_offload._drive.by_rows import ByRows, Piece, produced_once
from jax_offload._emit.find import holds_driven_update, is_update
from jax_offload._emit.region import Update, bound
from jax_offload._emit.run import functions
from jax_offload._ir.program import Program, structure
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._ir.trace import LARGE
from jax_offload._plan.plan import Chunked, Planned
from jax_offload._step.cut import Cut

# Bytes of state in a group. Updating them takes the cores a hundred times what starting a program takes, and the last
# group's parameters are all that comes back while nothing is updated.
GROUP_BYTES = 2**26
BEFORE = "before"  # the name of the stages that make the gradients
DRIVEN = ("while", "cond")  # what an update may stand in
GROUP = "group"  # the name of stages whose state is on disk, or beside a state on disk


def piece_of(s: Slice, inputs: Sequence[Atom] | None = None) -> Piece:
    """A slice as a piece. ``inputs``: its operands in the step, where they have other names there."""
    return Piece([*(s.inputs if inputs is None else inputs)], s.outputs, s.run, structure(s.jaxpr), s.jaxpr)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One program of a step: its pieces, one after the other.

    Attributes:
      on_cores: whether the host's cores run it.
      loop: a ``while`` or a ``cond`` of the step, which is driven from Python too, in the place of pieces.
    """

    name: str
    pieces: tuple[Piece, ...] = ()
    on_cores: bool = False
    loop: Equation | None = None

    @property
    def makes(self) -> list[Var]:
        if self.loop is not None:
            return _results(self.loop)
        return [v for piece in self.pieces for v in piece.outputs]

    @property
    def reads(self) -> list[Var]:
        if self.loop is not None:
            return list(dict.fromkeys(variables(self.loop.invars)))
        defined = {*self.makes}
        return list(dict.fromkeys(v for piece in self.pieces for v in variables(piece.inputs) if v not in defined))

    def run(self, env: dict[Var, Any]) -> None:
        for piece in self.pieces:
            env.update(zip(piece.outputs, piece.run(*values_of(env, piece.inputs)), strict=True))

    def kind(self, order: Sequence[Var]) -> Hashable:
        """Equal for stages that compute the same, with inputs and results in this order; ``None``: not known."""
        atoms = [v for piece in self.pieces for v in (*piece.inputs, *piece.outputs)]
        if any(piece.kind is None for piece in self.pieces) or any(isinstance(v, Literal) for v in atoms):
            return None
        number: dict[Var, int] = {}
        wiring = tuple(number.setdefault(v, len(number)) for v in variables(atoms))
        return tuple(piece.kind for piece in self.pieces), wiring, tuple(number[v] for v in order)


@dataclasses.dataclass(frozen=True)
class Staged:
    """A step as stages.

    Attributes:
      outputs: its results.
      next_of: result of an update -> the variable of the step that it is the next value of.
      in_turn: gradients that wait for one another, in the order of the backward pass.
      host_leaves: variable of the step -> whether ``offload`` keeps it on disk, for updates with a part on disk.
      scattered: gradients that such an update divides further (ZeRO-1) -> how. Its program has them so; made by another
        program, they would be reduced whole, and wait so on every device.
      parts: leaf on disk, read or made -> its parts, where it is read or written in some.
    """

    inputs: list[Var]
    consts: list[Any]
    stages: list[Stage]
    outputs: list[Atom]
    next_of: Mapping[Var, Var]
    in_turn: Sequence[Var] = ()
    host_leaves: Mapping[Var, bool] = dataclasses.field(default_factory=dict[Var, bool])
    scattered: Mapping[Var, NamedSharding] = dataclasses.field(default_factory=dict[Var, NamedSharding])
    parts: Mapping[Var, Sequence[tuple[Var, Range]]] = dataclasses.field(
        default_factory=dict[Var, Sequence[tuple[Var, Range]]]
    )

    @property
    def results(self) -> list[Var]:
        """The variables that the stages make for the caller; parts in place of leaves that are made in parts."""
        return [w for v in variables(self.outputs) for w in ([x for x, _ in self.parts.get(v, ())] or [v])]

    @property
    def with_one_piece_first(self) -> Staged:
        """The step whose first program is one piece, with its gradients in turn."""
        first, *later = self.stages
        pieces = [*first.pieces]
        if len(self.in_turn) > 1:
            pieces[:1] = _in_turn(pieces[0], self.in_turn)
        return dataclasses.replace(self, stages=[dataclasses.replace(first, pieces=(_joined(pieces),)), *later])


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Join pieces. Each equation of a later piece comes as soon as its operands exist, so that the update's groups wait
    for a learning rate, and not for the gradients of leaves that stay on the device."""
    outputs: list[Var] = []
    made: dict[Var, int] = {}  # by which equation of the first piece, the pass
    found: list[tuple[int, Equation]] = []
    for piece in pieces:
        assert piece.jaxpr is not None
        makes = [*zip(variables(piece.jaxpr.outvars), piece.outputs, strict=True)]
        outputs += [v for own, v in makes if own not in {*piece.jaxpr.invars}]  # others have a name
        names: dict[Var, Atom] = {**dict(makes), **dict(zip(piece.jaxpr.invars, piece.inputs, strict=True))}
        for k, eqn in enumerate(piece.jaxpr.eqns):
            ins, outs = [renamed(names, v) for v in eqn.invars], [cast(Var, renamed(names, v)) for v in eqn.outvars]
            at = k if piece is pieces[0] else max((made.get(v, -1) for v in variables(ins)), default=-1)
            found.append((at, eqn.replace(invars=ins, outvars=outs)))
            made.update(dict.fromkeys(outs, at))
    eqns = [eqn for _, eqn in sorted(found, key=lambda each: each[0])]
    return piece_of(slice_of(eqns, outputs, cast(Jaxpr, pieces[0].jaxpr).debug_info, {}))


def _in_turn(first: Piece, gradients: Sequence[Var]) -> list[Piece]:
    """Let each large gradient of the pass wait for the one before, and the smallest result wait for all.

    Nothing else asks for gradients that stay on the device: XLA would put their matmuls off to the end of the program,
    and keep the activations of all layers. Gradients that are all copied to the host need no such order.
    """
    others = [v for v in first.outputs if v not in {*gradients}]
    others = [v for v in others if not is_host_aval(v.aval) and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)]
    last = min(others or gradients, key=lambda v: nbytes(v.aval))
    held = list(dict.fromkeys([*gradients, last]))
    raw = {v: Var(v.aval) for v in held}

    def wait(*values: Any) -> list[Any]:
        # a number of each gradient, masked to nothing by an opaque zero, is made of it and is used
        found, read, zero = list(values), opaque(jnp.int32(0)), opaque(jnp.int32(0))
        for i, _ in enumerate(gradients):
            found[i], read = together((found[i], read))
            first = jax.lax.slice(found[i], [0] * found[i].ndim, [1] * found[i].ndim).reshape(())
            read |= jnp.real(first).astype(jnp.int32) & zero
        k = held.index(last)
        found[k] = jnp.where(read == 0, found[k], jnp.zeros((), found[k].dtype))
        return found

    traced, _ = jaxpr_of(wait, *(v.aval for v in held))
    turn = Piece([*raw.values()], held, wait, None, traced.jaxpr)
    return [dataclasses.replace(first, outputs=[raw.get(v, v) for v in first.outputs]), turn]


def staged(cut: Cut, ends: Mapping[Var, Ends] = MappingProxyType({})) -> Staged:
    """The stages of a step.

    Args:
      cut: the step.
      ends: of leaves on disk, read or made: where ranges of their rows end that are together in files.

    Raises:
      ValueError: a part of the update that the cores run stands in a scan or the like.
    """
    found = _Found(ByRows(ends))
    found.on_device(BEFORE, found.piece_of(cut.before))
    for eqn in cut.update.jaxpr.eqns:
        if not holds_driven_update(eqn):
            between = slice_of([eqn], _results(eqn), cut.program.debug_info, {})
            found.on_device("between", found.piece_of(between))
        elif eqn.primitive.name in DRIVEN:
            found.stages.append(Stage("loop", loop=eqn.replace(invars=found.in_step(eqn.invars))))
        elif is_update(eqn):
            found.add(eqn, cut.before)
        else:
            raise ValueError(
                f"update_on: the update stands in a {eqn.primitive.name} of the step, which cannot be cut there. Fix: "
                "update once a step, outside of scans and shard_map; skip= and a branch may skip it."
            )
    if cut.after.outputs:
        found.on_device("after", found.piece_of(cut.after))
    return found.staged(cut.program)


@dataclasses.dataclass
class _Found:
    """The stages of a step, as they are found.

    Attributes:
      rules: decides which slices are updated some rows at a time.
      names: variable of an update, or result of one -> the atom that stands for it in the stages.
      visited: the ids of the updates so far.
    """

    rules: ByRows
    stages: list[Stage] = dataclasses.field(default_factory=list[Stage])
    names: dict[Var, Atom] = dataclasses.field(default_factory=dict[Var, Atom])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    visited: set[int] = dataclasses.field(default_factory=set[int])
    in_turn: list[Var] = dataclasses.field(default_factory=list[Var])
    on_disk: dict[Var, bool] = dataclasses.field(default_factory=dict[Var, bool])
    scattered: dict[Var, NamedSharding] = dataclasses.field(default_factory=dict[Var, NamedSharding])

    def in_step(self, atoms: Sequence[Atom]) -> list[Atom]:
        return [renamed(self.names, v) for v in atoms]

    def on_device(self, name: str, *pieces: Piece) -> None:
        """Add pieces to the last program of the device, or begin another."""
        last = self.stages[-1] if self.stages else None
        if last is not None and not last.on_cores and last.loop is None and last.name != GROUP:
            self.stages[-1] = dataclasses.replace(last, pieces=(*last.pieces, *pieces))
        else:
            self.stages.append(Stage(name, pieces))

    def piece_of(self, s: Slice) -> Piece:
        return piece_of(s, self.in_step(s.inputs))

    def add(self, eqn: Equation, before: Slice) -> None:
        """Add the stages of an update."""
        update: Update = eqn.params["update"]
        if id(update) in self.visited:
            raise ValueError("step: runs one jitted update twice, which update_on cannot drive yet; unjit it.")
        self.visited.add(id(update))
        self.names.update(zip(update.operands, self.in_step(eqn.invars), strict=True))
        handed_on = [self.names.get(v, v) if v in {*update.operands} else v for v in update.program.outputs]
        self.names.update(zip(eqn.outvars, handed_on, strict=True))
        pairs = ((v, self.names.get(old)) for v, old in update.next_values.items())
        self.next_of.update((v, x) for v, x in pairs if isinstance(x, Var))
        if update.on_disk:
            self.add_from_disk(update, eqn)
        else:
            self.add_shares(update, eqn, before)

    def add_from_disk(self, update: Update, eqn: Equation) -> None:
        """Add groups of slices, or of some rows of them, for an update whose state is on disk."""
        hosts = ((self.names[v], v in update.on_disk) for v in update.operands if is_host_aval(v.aval))
        self.on_disk |= {v: known for v, known in hosts if isinstance(v, Var)}
        self.scattered |= {x: s for v, s in _scattered(update) if isinstance(x := self.names[v], Var)}
        defined = produced_once(update, eqn.outvars)
        for each in update.passes:
            self.on_device("scalars", self.piece_of(each.prelude))
            self.stages += _grouped(GROUP, [*self.pieces_of(each.slices, update, defined)], on_cores=False)

    def pieces_of(self, slices: Sequence[Planned], update: Update, defined: Mapping[Var, Var]) -> Iterator[Piece]:
        for p in slices:
            yield from self.rules.pieces(p, update, self.names, defined) or [self.planned_piece(p, update)]

    def planned_piece(self, p: Planned, update: Update) -> Piece:
        def run(*args: Any) -> list[Any]:
            env = dict(zip(p.slice.inputs, args, strict=True))
            functions([p], update.names, lowered=True)(p, env)
            return [env[v] for v in p.slice.outputs]

        how = (p.transfer.axis, p.transfer.rows, p.transfer.shape) if isinstance(p.transfer, Chunked) else None
        return Piece(self.in_step(p.slice.inputs), p.slice.outputs, run, (structure(p.slice.jaxpr), how))

    def add_shares(self, update: Update, eqn: Equation, before: Slice) -> None:
        """Add the device's part of an update, and the cores' part in groups."""
        device, cores = _shares(update)
        if len(self.stages) == 1:
            self.in_turn = _gradients_in_turn(update, device, eqn, {*before.outputs})
        first, *later = cores.passes
        self.on_device(BEFORE, self.piece_of(first.prelude))
        if device.planned:
            self.stages.append(Stage("device", (self.whole(device),)))
        elif any(v not in {*device.operands} for v in variables(device.program.outputs)):
            self.on_device(BEFORE, self.whole(device))
        self.stages += _grouped("cores", [self.piece_of(p.slice) for p in first.slices])
        for each in later:
            self.stages.append(Stage("scalars", (self.piece_of(each.prelude),), on_cores=True))
            self.stages += _grouped("cores", [self.piece_of(p.slice) for p in each.slices])

    def whole(self, update: Update) -> Piece:
        """Return an update as one piece, which streams as in any program of the device."""
        outputs = [v for v in variables(update.program.outputs) if v not in {*update.operands}]
        places = [update.program.outputs.index(v) for v in outputs]
        traced, _ = jaxpr_of(lambda *xs: [bound(update, xs)[k] for k in places], *(v.aval for v in update.operands))
        return Piece(self.in_step(update.operands), outputs, jax_fun(traced), None, traced.jaxpr)

    def staged(self, program: Program) -> Staged:
        outputs, rules = self.in_step(program.outputs), self.rules
        scattered = {v: s for v, s in self.scattered.items() if v not in {*variables(outputs)}}
        inputs, consts = [*rules.starts.values(), *program.inputs], [*map(np.int32, rules.starts), *program.consts]
        next_of = self.next_of | rules.next_of
        stages, turn = self.stages, self.in_turn
        return Staged(inputs, consts, stages, outputs, next_of, turn, self.on_disk, scattered, rules.parts)


def _scattered(update: Update) -> Iterator[tuple[Var, NamedSharding]]:
    """Return the gradients that an update divides first, with their shardings, where types do not tell."""
    gradients = {update.operands[i] for i in update.gradients}
    for eqn in update.program.eqns:
        if eqn.primitive.name == "sharding_constraint" and isinstance(v := eqn.invars[0], Var) and v in gradients:
            s = eqn.params["sharding"]
            yield from [(v, s)] if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) else []


def _results(eqn: Equation) -> list[Var]:
    return [v for v in eqn.outvars if not isinstance(v, DropVar)]


def _shares(update: Update) -> tuple[Update, Update]:
    """Divide an update into the device's part and the cores' part, by its plan."""
    cores = {v for p in update.planned if p.on_cores for v in p.slice.outputs}
    of_cores = [v in cores for v in update.program.outputs]
    _, device = update.only([not own for own in of_cores])
    _, host = update.only(of_cores)
    return device.updated_by(cores=False), host.updated_by(cores=True)


def _gradients_in_turn(update: Update, device: Update, eqn: Equation, defined: Set[Var]) -> list[Var]:
    """Return the large gradients if some of them stay on the device; none if their sharding is unknown."""
    pairs = zip(eqn.invars, update.operands, strict=True)
    stay = {*variables(v for v, own in pairs if own in {*device.operands})} & defined
    large = [v for i in update.gradients if (v := eqn.invars[i]) in defined and math.prod(v.aval.shape) >= LARGE]
    return [] if not update.take_turns or stay.isdisjoint(large) else [*variables(large)]


def _grouped(name: str, pieces: Sequence[Piece], *, on_cores: bool = True) -> Iterator[Stage]:
    """Group consecutive pieces into stages of about ``GROUP_BYTES`` each."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += sum(nbytes(v.aval) for v in variables(piece.inputs) if is_host_aval(v.aval))
        if size >= GROUP_BYTES or piece is pieces[-1]:
            yield Stage(name, tuple(group), on_cores=on_cores)
            group, size = [], 0
