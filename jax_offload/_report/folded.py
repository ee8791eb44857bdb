"""Leaves that are alike but for a number in their path, or a field of the state, as one row."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from jax_offload._placement.placement import Leaf

# What may differ: a number (a layer's), or a field that is all letters (.mu and .nu). What stands between them may not.
_PIECES = re.compile(r"(\d+|\.[A-Za-z_]+(?!\w))")


@dataclasses.dataclass(frozen=True)
class Row:
    """Leaves of one shape, dtype and sharding that live in one memory for one reason, and stream in one way.

    Attributes:
      path: of all of them: ``[0].{mu,nu}['layers_{00..23}']['w']``.
      leaves: those leaves, in the order of the state.
    """

    path: str
    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


def folded(leaves: Sequence[Leaf]) -> list[Row]:
    """Rows for all of the leaves, the largest first; each row's paths are all those that its path can be read as."""
    rows = [(tuple((piece,) for piece in _PIECES.split(leaf.path)), (leaf,)) for leaf in leaves]
    for k in range(1, max((len(path) for path, _ in rows), default=0), 2):
        groups: dict[object, list[tuple[tuple[tuple[str, ...], ...], tuple[Leaf, ...]]]] = {}
        for path, of in rows:
            a_number = k < len(path) and path[k][0].isdigit()
            groups.setdefault((_what_shows(of[0]), path[:k], path[k + 1 :], a_number), []).append((path, of))
        rows = [_joined(same, k) for same in groups.values()]
    place = {id(leaf): i for i, leaf in enumerate(leaves)}
    found = [Row(_path(path), tuple(sorted(of, key=lambda leaf: place[id(leaf)]))) for path, of in rows]
    return sorted(found, key=lambda row: (-row.nbytes, place[id(row.leaves[0])]))


def _what_shows(leaf: Leaf) -> object:
    return leaf.shape, str(leaf.dtype), leaf.sharding, leaf.host, leaf.disk, leaf.why, leaf.streams


def _joined(
    rows: Sequence[tuple[tuple[tuple[str, ...], ...], tuple[Leaf, ...]]], k: int
) -> tuple[tuple[tuple[str, ...], ...], tuple[Leaf, ...]]:
    """One row of rows whose paths differ in piece ``k`` alone."""
    path = rows[0][0]
    pieces = tuple(dict.fromkeys(piece for path, _ in rows if k < len(path) for piece in path[k]))
    leaves = tuple(itertools.chain.from_iterable(of for _, of in rows))
    return (path if k >= len(path) else (*path[:k], pieces, *path[k + 1 :])), leaves


def _path(pieces: Sequence[tuple[str, ...]]) -> str:
    return "".join(each[0] if len(each) == 1 else _several(each) for each in pieces)


def _several(pieces: Sequence[str]) -> str:
    if pieces[0].startswith("."):
        return f".{{{','.join(piece[1:] for piece in pieces)}}}"
    pieces_in_order = sorted(pieces, key=lambda piece: (int(piece), piece))
    runs: list[list[str]] = []
    for number in pieces_in_order:
        if runs and int(runs[-1][-1]) + 1 == int(number):
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"{{{','.join(f'{run[0]}..{run[-1]}' if len(run) > 2 else ','.join(run) for run in runs)}}}"
