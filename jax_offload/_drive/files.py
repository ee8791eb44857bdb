"""What of a step is on disk: taken out of its program, of which it is then inputs and results."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from typing import Any, Protocol, cast

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._base.jaxprs import Atom, Equation, Var, inner_of, renamed, variables
from jax_offload._base.memory import HOST_KIND
from jax_offload._base.on_disk import IN_MEMORY, READ, WRITE, Ends, Place, Range
from jax_offload._drive.stages import DRIVEN, Staged
from jax_offload._emit.find import holds_driven_update, is_update
from jax_offload._ir.program import Program


class Files(Protocol):
    """The home of leaves on disk, as a step that runs sees it.

    Attributes:
      depth: how many groups are read ahead, and written behind.
    """

    depth: int

    def check(self, token: Any) -> None:
        """Raises where the token is of another version than what is on disk."""
        ...

    def ends(self, name: str) -> Ends:
        """Where the ranges of a leaf's rows end that are together in files."""
        ...

    def fetch(self, name: str, sharding: Sharding, rows: Range | None = None) -> Future[jax.Array]:
        """The leaf, or some ranges of it, being read."""
        ...

    def put(self, name: str, x: jax.Array, rows: Range | None = None) -> Future[None]:
        """Its next value, being written once it is there."""
        ...

    def advance(self) -> Any:
        """The token of the next version, all of whose leaves have been put; raises where something failed."""
        ...


@dataclasses.dataclass(frozen=True)
class OnFiles:
    """A step without its reads and writes.

    Attributes:
      program: it. What is read are inputs, its last; what is written are results, its last.
      reads: such an input -> the token that it is read by, and which leaf it is.
      writes: of each such result the leaf that it is the next value of; one that is handed on is not written.
      tokens: the numbers of the step's results that are tokens -> their leaves.
    """

    program: Program
    reads: Mapping[Var, tuple[Atom, Place]]
    writes: Sequence[Place]
    tokens: Mapping[int, Place]

    @property
    def n_others(self) -> int:
        """How many results there are that are no tokens."""
        return len(self.program.outputs) - len(self.writes)

    @property
    def ends(self) -> dict[Var, Ends]:
        """Of what is read, and of results that are written and nothing else: where ranges of rows end in the files."""
        times = Counter(variables(self.program.outputs))
        used = {v for eqn in self.program.eqns for v in variables(eqn.invars)}
        written = zip(self.program.outputs[self.n_others :], self.writes, strict=True)
        found = {v: leaf for v, (_, leaf) in self.reads.items()}
        found |= {v: leaf for v, leaf in written if isinstance(v, Var) and times[v] == 1 and v not in used}
        return {v: home_of(leaf).ends(leaf.name) for v, leaf in found.items()}

    def places(self, devices: Set[Any]) -> dict[Var, Sharding]:
        """Where what is read is to be, in a step on these devices: on one of them all is there.

        Raises:
          ValueError: the state is divided between other devices.
        """
        alone = SingleDeviceSharding(next(iter(devices)), memory_kind=HOST_KIND) if len(devices) == 1 else None
        for _, leaf in self.reads.values():
            if alone is None and not leaf.on_its_way.device_set <= devices:
                raise ValueError(
                    f"disk: the state is on {_devices(leaf.on_its_way.device_set)}, {leaf.name} as {leaf.on_its_way}, "
                    f"and the step runs on {_devices(devices)}. Fix: disk.resume(target) with the shardings that the "
                    "parameters have now, jo.abstract_state(tx, params) in the state's place."
                )
        here = {v: leaf.on_its_way for v, (_, leaf) in self.reads.items()}
        return {v: s if alone is None or s.device_set == devices else alone for v, s in here.items()}

    def check(self, step: Staged) -> None:
        """Raises ``ValueError`` where what the updates read from disk is not what ``offload`` keeps there."""
        used = {v for stage in step.stages for v in stage.reads}
        for v, (_, leaf) in self.reads.items():
            if v in used and not step.host_leaves.get(v):
                raise ValueError(
                    f"state: {leaf.name} is on disk, and this offload keeps it in memory. Fix: the offload, and the "
                    "host_bytes, with which the state was made; into another one jo.to_host(tx, state) brings it, with "
                    "a jo.disk(...) of other directories where some stays on disk."
                )
        for v, known in step.host_leaves.items():
            if known and v not in self.reads:
                raise ValueError(f"state: a leaf {v.aval.dtype}{list(v.aval.shape)} {IN_MEMORY}")


def files_of(step: Program) -> OnFiles:
    """What of a step is on disk.

    Raises:
      ValueError: it does something with such a leaf but update it, or with what stands for it.
    """
    reads: dict[Var, tuple[Atom, Place]] = {}
    written: dict[Var, tuple[Atom, Place]] = {}  # token -> what is written
    same: dict[tuple[Atom, Place], Var] = {}
    names: dict[Var, Atom] = {}
    eqns: list[Equation] = []
    for eqn in step.eqns:
        eqn = eqn.replace(invars=[renamed(names, v) for v in eqn.invars]) if names else eqn
        if eqn.primitive is READ:
            key = eqn.invars[0], eqn.params["place"]
            if (first := same.setdefault(key, eqn.outvars[0])) is not eqn.outvars[0]:
                names[eqn.outvars[0]] = first
            else:
                reads[first] = key
        elif eqn.primitive is WRITE:
            written[eqn.outvars[0]] = eqn.invars[0], eqn.params["place"]
        else:
            _check_equation(eqn, reads, written)
            eqns.append(eqn)
    if not reads and not written:
        return OnFiles(step, {}, [], {})
    inputs, tokens = {*step.inputs}, {*variables(v for v, _ in reads.values())}
    known = all(isinstance(v, Var) and v in inputs for v, _ in reads.values())
    if not known or any(not tokens.isdisjoint(variables(eqn.invars)) for eqn in eqns):
        raise ValueError(_COMPUTES)
    outputs = [renamed(names, v) for v in step.outputs]
    if any(isinstance(v, Var) and v in reads for v in outputs):
        raise ValueError(_COMPUTES)
    found = {k: written[v] for k, v in enumerate(outputs) if isinstance(v, Var) and v in written}
    kept = {place for _, place in found.values()}
    homes = {place.home for place in kept}
    if lost := [place for _, place in reads.values() if place.home in homes and place not in kept]:
        raise ValueError(
            f"disk: the step updates a state and returns a part of it, not {lost[0].name}, which is written over all "
            "the same. Fix: return the whole state."
        )
    again = [(x, place) for x, place in found.values() if isinstance(x, Var) and x in reads]  # as it was
    moved = [(reads[x][1], place) for x, place in again if reads[x][1] != place]
    if moved:
        old, new = moved[0]
        raise ValueError(
            f"disk: the update moves {old.name} as it is to {new.name}, which may have been written over by then. Fix: "
            "select= that leaves them in memory."
        )
    writes = [(x, place) for x, place in found.values() if not isinstance(x, Var) or x not in reads]
    rest = [v for k, v in enumerate(outputs) if k not in found]
    program = dataclasses.replace(
        step, inputs=[*step.inputs, *reads], eqns=eqns, outputs=[*rest, *(x for x, _ in writes)],
    )  # fmt: skip
    return OnFiles(program, reads, [place for _, place in writes], {k: place for k, (_, place) in found.items()})


_COMPUTES = (
    "disk: the step computes with a state on disk outside of its one update: updates it again, chooses between two "
    "states, or reads a leaf, for a norm say. Fix: jo.jit(step), in which the state goes from argument to one update "
    "to result. For several updates call such a step several times, or accumulate gradients in "
    "jo.offload(optax.MultiSteps(...), disk=...); skip= or lax.cond is for an update that is not to be; and between "
    "two steps jo.to_device(optax.tree.get(state, 'mu')) reads a part of the state, and jo.save_args saves it."
)


def _check_equation(eqn: Equation, reads: Mapping[Var, Any], written: Mapping[Var, Any]) -> None:
    used = {*variables(eqn.invars)}
    driven = eqn.primitive.name in DRIVEN and holds_driven_update(eqn)  # its body, or a branch, is a step of its own
    inside = not driven and _holds_files(eqn)
    if (not used.isdisjoint(reads) and not is_update(eqn)) or not used.isdisjoint(written) or inside:
        raise ValueError(_COMPUTES)


def _holds_files(eqn: Equation) -> bool:
    """Whether something is read or written in a branch or a loop of the step."""
    return any(inner.holds(lambda each: each.primitive in (READ, WRITE)) for inner in inner_of(eqn))


def _devices(devices: Set[Any]) -> str:
    return ", ".join(sorted(map(str, devices)))


def home_of(leaf: Place) -> Files:
    """Where it is."""
    return cast(Files, leaf.home)
