"""What a traced update moves, read off its plan: exact, in bytes on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_offload._analysis.on_cores import NONE, Share, share_of
from jax_offload._analysis.on_disk import NO_FILES, Files, files_in
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved, Update
from jax_offload._ir.masks import forward
from jax_offload._plan.plan import Chunked, InIterations, OnCores, Planned


@dataclasses.dataclass(frozen=True)
class Streams:
    """Of one step.

    Attributes:
      loaded, stored: bytes of state that come from the host, and go to it.
      window: bytes of state on the device at a time while it streams.
      inside: of ``loaded`` those that a scan of the step loads beside its own arithmetic.
      looped: of ``loaded`` those that go through a loop of their own, beside which nothing else runs.
      unpaired: of ``looped`` the chunks that are loaded first, and as many that are stored last: alone, either way.
      tail: bytes of the slice that is stored last of those that stream beside the backward pass.
      norm: whether the update waits for a number that is made of gradients: it can begin when all are there.
      cores: what the host's cores update where it is; none of the above is of that.
      files: what of it comes from disk, and goes there.
      as_files: the same, if all of it did.
    """

    loaded: int = 0
    stored: int = 0
    window: int = 0
    inside: int = 0
    looped: int = 0
    unpaired: int = 0
    tail: int = 0
    norm: bool = False
    cores: Share = NONE
    files: Files = NO_FILES
    as_files: Files = NO_FILES


def streams(trace: Any, on_a_host: int = 1) -> Streams:
    """Of a traced update, or of a traced step, a closed jaxpr. ``on_a_host``: how many devices share its cores."""
    updates = [each.update for each in updates_in(trace)]
    planned = [p for update in updates for p in update.planned if not isinstance(p.transfer, OnCores)]
    unmoved = [update for update in updates if isinstance(update, Update)]
    looped = [p for p in planned if p.in_chunks or p.window.own_loop]
    files = files_in(unmoved, on_a_host)
    beside = [p for p in planned if not isinstance(p.transfer, InIterations) and p not in looped]
    return Streams(
        loaded=sum(map(_loaded, planned)),
        stored=sum(_stored(update) for update in updates),
        window=files.window or windows_of(planned),
        inside=sum(_loaded(p) for p in planned if isinstance(p.transfer, InIterations)),
        looped=sum(p.slice.loaded_bytes for p in looped),
        unpaired=_unpaired(looped),
        tail=beside[-1].slice.loaded_bytes if beside else 0,
        norm=any(map(_waits_for_all, unmoved)),
        cores=share_of(
            (p for update in unmoved for p in update.planned),
            (update.operands[i] for update in unmoved for i in update.gradients),
            on_a_host,
        ),
        files=files,
        as_files=files_in(unmoved, on_a_host, all_away=True),
    )


def _unpaired(looped: Iterable[Planned]) -> int:
    """Of every loop over chunks a chunk; of slices that are whole and share a loop the last one."""
    chunks = sum(p.slice.loaded_bytes // p.transfer.count for p in looped if isinstance(p.transfer, Chunked))
    last = {id(p.window): p.slice.loaded_bytes for p in looped if not p.in_chunks}
    return chunks + sum(last.values())


def windows_of(planned: Iterable[Planned]) -> int:
    """Bytes of host leaves on the device at a time: each window, or all that streams through it if that is less."""
    through: dict[int, list[Planned]] = {}
    for p in planned:
        through.setdefault(id(p.window), []).append(p)
    return sum(min(sum(p.slice.loaded_bytes for p in ps), max(map(_at_once, ps))) for ps in through.values())


def _at_once(p: Planned) -> int:
    in_flight = 0 if isinstance(p.transfer, InIterations) else p.bytes_at_once
    return max(p.window.nbytes, in_flight)


def _stored(update: Update | Moved) -> int:
    old = update.next_values if isinstance(update, Update) else {}
    slices = [(p.slice, _repeated(p)) for p in update.planned if not isinstance(p.transfer, OnCores)]
    if isinstance(update, Update):
        slices += [(each.prelude, 0) for each in update.plan.passes]
    own = [(sum(_own(v, s.shards, old) for v in s.stores), rows) for s, rows in slices]
    return sum(n + (n // rows if rows else 0) for n, rows in own)


def _loaded(p: Planned) -> int:
    n, rows = p.slice.loaded_bytes, _repeated(p)
    return n + (n // rows if rows else 0)


def _repeated(p: Planned) -> int:
    """Inside a scan one row moves twice: of so many; 0 where none does."""
    return p.transfer.count if isinstance(p.transfer, InIterations) else 0


def _own(v: Var, shards: Mapping[Var, Sequence[int]], old: Mapping[Var, Var]) -> int:
    """Bytes on one device of a stored leaf, which is divided as the leaf that it is the next value of."""
    return nbytes(v.aval) // math.prod(shards.get(old.get(v, v), ()))


def _waits_for_all(update: Update) -> bool:
    """Whether a number made of gradients goes into a slice: a norm, or whether all are finite."""
    if len(update.plan.passes) > 1:
        return True
    gradients = {update.operands[i] for i in update.gradients}
    (only,) = update.plan.passes or (None,)
    if only is None:
        return False
    defined: dict[Var, int] = {v: int(v in gradients) for v in only.prelude.inputs}
    for eqn in only.prelude.jaxpr.eqns:
        defined.update(zip(eqn.outvars, forward(eqn, defined), strict=True))
    read = {v for p in only.slices for v in p.slice.inputs if not is_host_aval(v.aval)}
    return any(defined.get(v) and not v.aval.shape for v in only.prelude.outputs if v in read)
