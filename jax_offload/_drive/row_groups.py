"""A leaf of more than one group, beside one accelerator: the cores update it in groups of its rows.

While some rows are updated the next ones of its gradient and its parameter come down, and those before go up, into the
parameter's buffer where that was donated. That is for gradients that are whole only when nothing is left that could
hide their way: of stacked layers, which a loop makes at the pass's end, or which the step is given. All others go down
while the pass goes on, where a program of its own for their rows would wait for the whole pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.flops import flops
from jax_offload._base.jaxprs import Aval, Jaxpr, Var, variables
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval, to_host, with_kind
from jax_offload._drive.cores import is_sent
from jax_offload._drive.cuts import CHEAP
from jax_offload._drive.loop_source import loop_source
from jax_offload._drive.loops import has_numba
from jax_offload._drive.pieces import InTurn, Piece
from jax_offload._drive.stages import BEFORE, Stage, Staged

# Bytes of the state in a group of rows, as of a group of leaves; and groups on their way down ahead of the one that is
# updated. What has come up waits for no more than these on the device.
GROUP_BYTES = 2**26
AHEAD = 2
LEFT = 1 / 16  # of the pass's arithmetic, that hides nothing worth the name
LOOPS = ("scan", "while")

Ends = tuple[int, ...]
Range = tuple[int, int]


def ends_of(shape: Sequence[int], state: int) -> Ends:
    """Where the groups of a leaf's rows end. ``state``: bytes of what is updated with it in host memory."""
    n = shape[0] if shape else 0
    rows = max(1, n * GROUP_BYTES // max(1, state))
    return (*range(rows, n, rows), n)


def come_by_rows(step: Staged) -> dict[Var, Ends]:
    """What the cores read by its rows -> where the groups of these end, for steps of one accelerator."""
    if not has_numba():
        return {}
    found: dict[Var, Ends] = {}
    read_by = Counter(v for s in step.stages if s.on_cores for p in s.pieces for v in {*variables(p.inputs)})
    late = {*step.inputs} | _made_last(step.stages[0])
    for stage in (s for s in step.stages if s.on_cores):
        each = [(piece, ends_of_piece(piece)) for piece in stage.pieces]
        if all(len(ends) < 2 for _, ends in each) or not all(map(is_loop, stage.pieces)):
            continue
        for piece, ends in each:
            sent = [v for v in {*variables(piece.inputs)} if is_sent(v.aval) and not is_host_aval(v.aval)]
            if len(ends) > 1 and all(v in late and read_by[v] == 1 for v in sent):
                found |= dict.fromkeys(sent, ends)
    return found


def is_loop(piece: Piece) -> bool:
    """Whether the cores update it as a loop of elements."""
    return piece.jaxpr is not None and loop_source(piece.jaxpr, {}) is not None


def ends_of_piece(piece: Piece) -> Ends:
    """Where the groups of the rows that it updates end."""
    state = sum(nbytes(v.aval) for v in variables(piece.inputs) if is_host_aval(v.aval))
    return ends_of(piece.outputs[0].aval.shape, state)


def _made_last(first: Stage) -> set[Var]:
    """What a loop makes of which all but a little of the first program's arithmetic is over."""
    if first.name != BEFORE or not first.pieces or first.pieces[0].jaxpr is None:
        return set()
    pass_, *others = first.pieces
    assert pass_.jaxpr is not None
    late = of_last_loops(pass_.jaxpr)
    found = {x for v, x in zip(pass_.jaxpr.outvars, pass_.outputs, strict=True) if v in late}
    for each in (piece for piece in others if isinstance(piece, InTurn)):
        found |= {new for v, new in zip(variables(each.inputs), each.outputs, strict=True) if v in found}
    return found


def of_last_loops(jaxpr: Jaxpr) -> set[Any]:
    """Results of loops behind which little of the arithmetic is left, and what is made of these element by element."""
    done = [*itertools.accumulate(map(flops, jaxpr.eqns))]
    found = set[Any]()
    for eqn, so_far in zip(jaxpr.eqns, done, strict=True):
        loop = eqn.primitive.name in LOOPS and done[-1] - so_far <= LEFT * done[-1]
        if loop or (eqn.primitive.name in CHEAP and not found.isdisjoint(variables(eqn.invars))):
            found.update(eqn.outvars)
    return found


@dataclasses.dataclass
class Rows:
    """An array on the device, of whose rows a few groups are on their way down ahead of the one that is needed.

    Attributes:
      array: it; or, once some rows have been written, its successor.
      ends: of the groups.
    """

    array: jax.Array
    ends: Ends
    last: ClassVar[int] = 0  # of its groups, the first that comes when the pass is over
    _sent: list[jax.Array | None] = dataclasses.field(default_factory=list[jax.Array | None])

    @property
    def groups(self) -> Sequence[Range]:
        return [*itertools.pairwise((0, *self.ends))]

    @property
    def place(self) -> Sharding:
        return self.array.sharding

    def send(self, last: int) -> None:
        """All groups up to one start on their way."""
        for k in range(len(self._sent), min(last + 1, len(self.ends))):
            begin = self.ends[k - 1] if k else 0
            self._sent.append(_rows(self.array.sharding)(self.array, np.int32(begin), self.ends[k] - begin))

    def taken(self, k: int) -> Any:
        """A group, once it is there; the next ones are on their way."""
        self.send(k + AHEAD)
        there, self._sent[k] = self._sent[k], None
        return np.asarray(there)


class Parts:
    """A gradient in host memory in several arrays, each of some rows, which come one after the other.

    Args:
      arrays: they.
      ranges: of each its first row, and the one behind its last.
      rows: of a group.

    Attributes:
      groups: of rows, in the order in which they come.
      last: the first of them that comes when the pass is over.
    """

    def __init__(self, arrays: Sequence[jax.Array], ranges: Sequence[Range], rows: int) -> None:
        self._of = list[tuple[jax.Array, int]]()
        self.groups, self.last, self.place = list[Range](), 0, arrays[0].sharding
        for x, (first, behind) in zip(arrays, ranges, strict=True):
            self.last = len(self.groups)
            for begin in range(first, behind, rows):
                self.groups.append((begin, min(begin + rows, behind)))
                self._of.append((x, first))

    def taken(self, k: int) -> Any:
        """A group, once its array is there."""
        (begin, end), (x, first) = self.groups[k], self._of[k]
        return np.asarray(x)[begin - first : end - first]

    def is_first(self, k: int) -> bool:
        """Whether it may have to be waited for: it is the first of its array."""
        return k == 0 or self._of[k][0] is not self._of[k - 1][0]


@dataclasses.dataclass
class Copied:
    """A parameter on the device, and its copy on the host: the cores read this, and new rows are written over that."""

    array: jax.Array
    there: jax.Array


def due(of: Rows | Parts, k: int) -> int:
    """How many groups' new rows may have gone up once one is updated.

    What writes rows on the device is a program, and waits for the pass to be over: of the groups before, as many go up
    beside each of the last ones as get all of them there with the last.
    """
    n = len(of.groups)
    return -(-n * (k + 1 - of.last) // (n - of.last)) if k >= of.last else 0


def begun(aval: Aval, like: Rows | Parts, over: Rows | Copied | None) -> jax.Array:
    """What new rows of a leaf are written into: the old ones, or a new array where these are."""
    if over is not None:
        return over.array
    return jnp.zeros(aval.shape, aval.dtype, device=with_kind(like.place, DEVICE_KIND))


def written(x: jax.Array, rows: Any, begin: int, over: Rows | Copied | None) -> jax.Array:
    """``x``, which is given away, with rows that are on their way up. ``over``: the same array, with rows to come."""
    new = _written(x.sharding)(x, jax.device_put(rows, x.sharding, may_alias=True), np.int32(begin))
    if over is not None:
        over.array = new
    return new


@functools.lru_cache(256)
def _rows(place: Sharding) -> Callable[..., jax.Array]:
    def down(x: jax.Array, begin: jax.Array, rows: int) -> jax.Array:
        return to_host(jax.lax.dynamic_slice_in_dim(x, begin, rows))

    return jax.jit(down, static_argnums=2, out_shardings=with_kind(place, HOST_KIND))


@functools.lru_cache(256)
def _written(place: Sharding) -> Callable[..., jax.Array]:
    def write(x: jax.Array, rows: jax.Array, begin: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, rows, begin, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=place)
