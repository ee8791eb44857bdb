"""The table of places and ways of streaming, with reasons: a value, and its printed forms."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from jax_offload._base import memory as _memory
from jax_offload._base.text import aligned, preformatted, terminal_width
from jax_offload._placement.placement import Leaf
from jax_offload._plan.plan import Window

# Paths in one row may differ in a number (a layer's) or in a field of letters only (.mu and .nu).
_PIECES = re.compile(r"(\d+|\.[A-Za-z_]+(?!\w))")


@dataclasses.dataclass(frozen=True)
class Row:
    """Leaves of the same shape, dtype and sharding that live in one memory for one reason, and stream in one way.

    Attributes:
      path: the paths of all of them: ``[0].{mu,nu}['layers_{00..23}']['w']``.
      leaves: those leaves, in the order of the state.
    """

    path: str
    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


def folded(leaves: Sequence[Leaf]) -> list[Row]:
    """Make rows for all leaves, the largest first. A row's path stands for the paths of all its leaves."""
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


ARGUMENT = "argument"  # why a row of a step's table is there
_HEADER = ("MiB", "leaves", "shape", "dtype", "sharding", "state leaf")
_RIGHT = (0, 1)
_SHARDING = 4


@dataclasses.dataclass(frozen=True, repr=False)
class Placement:
    """The table that says where each leaf lives and why, and how it streams; ``print`` it.

    ``jax_offload.placement`` returns it. Sizes are in bytes; the printed table has MiB. It shows one group for each
    memory, reason and way of streaming, the largest first, and one row for leaves that are alike
    (``['layers_{00..23}']``, ``.{mu,nu}``). It is as wide as the terminal, or 80 columns.

    Attributes:
      leaves: a ``Leaf`` for every state leaf; for a step, for every argument in host memory.
      unknown: why ``update`` could not be traced; empty if it could.
      windows: for each ``offload`` that streams something, the bytes of state on each device at a time, ``nbytes``, and
        ``why`` there are so many.
      stays: for a step of ``jax_offload.jit``, why leaves are not updated inside its passes.
      guessed: facts that the trace does not show, and their sources: the order of the backward pass, the shardings
        of parameters.
      in_turn: for a step, which gradients wait for each other, so that no backward pass is put off.
      elsewhere: for a step, how it loads host arrays that are not its arguments: arrays that it makes itself, or that
        one update makes for another.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((256, 256), "float32")}
      >>> table = jo.placement(jo.offload(optax.adamw(1e-3)), params)
      >>> table.host_bytes, table.device_bytes  # two moments, and the count of steps
      (524288, 4)
      >>> table
      Placement(3 leaves: 0.50 MiB in pinned_host, 0.00 MiB on the device)
    """

    leaves: tuple[Leaf, ...]
    unknown: str = ""
    windows: tuple[Window, ...] = ()
    stays: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    in_turn: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in pinned host memory, with replicas counted once."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.host)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state that stay in device memory, with replicas counted once."""
        return sum(leaf.nbytes for leaf in self.leaves if not leaf.host and not leaf.disk)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the state on disk, which every step reads and writes; the files take twice as many."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.disk)

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes of pinned host memory that the state takes for each device."""
        return sum(leaf.shard_bytes for leaf in self.leaves if leaf.host)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types: bytes, shapes as lists, a dictionary for every leaf."""
        shown = ("path", "param", "nbytes", "shard_bytes", "host", "disk", "sharding", "why", "streams")
        leaves = [
            {name: getattr(leaf, name) for name in shown} | {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
            for leaf in self.leaves
        ]
        totals = ("host_bytes", "device_bytes", "disk_bytes", "host_bytes_per_device")
        windows = [{"nbytes": w.nbytes, "why": w.why, "own_loop": w.own_loop, "leaf": w.leaf} for w in self.windows]
        return {
            **{name: getattr(self, name) for name in totals},
            "leaves": leaves,
            "windows": windows,
            "unknown": self.unknown,
            "stays": list(self.stays),
            "guessed": list(self.guessed),
            "in_turn": list(self.in_turn),
            "elsewhere": list(self.elsewhere),
        }

    def to_json(self) -> str:
        """Return ``to_dict()`` as a line of JSON."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        return (
            f"Placement({len(self.leaves)} leaves: {_mib(self.host_bytes)} MiB in {_memory.HOST_KIND}, "
            f"{_mib(self.device_bytes)} MiB on the device"
            + (f", {_mib(self.disk_bytes)} MiB on disk)" if self.disk_bytes else ")")
        )

    def __str__(self) -> str:
        width = terminal_width()
        lines = _text(self.leaves, width)
        lines.insert(1, "-" * min(width, max(map(len, lines))))
        for sentence in _sentences(self):
            lines += textwrap.wrap(sentence, width, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)

    _repr_html_ = preformatted


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def _memory_of(leaf: Leaf) -> str:
    return "disk" if leaf.disk else _memory.HOST_KIND if leaf.host else _memory.DEVICE_KIND


def _cells(row: Row) -> tuple[str, ...]:
    leaf = row.leaves[0]
    shape = "×".join(map(str, leaf.shape)) or "()"
    return _mib(row.nbytes), str(len(row.leaves)), shape, str(leaf.dtype), leaf.sharding, row.path


def _text(leaves: tuple[Leaf, ...], width: int) -> list[str]:
    """Return the header, and for each memory, reason and way of streaming a heading with its rows, the largest first.

    A path that is too long has a line of its own. Without a mesh there is no column for shardings.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in folded(leaves):
        groups.setdefault((_memory_of(row.leaves[0]), row.leaves[0].why, row.leaves[0].streams), []).append(row)
    by_size = sorted(groups.items(), key=lambda group: -sum(row.nbytes for row in group[1]))
    rows = [_HEADER, *(_cells(row) for _, of_group in by_size for row in of_group)]
    if not any(leaf.sharding for leaf in leaves):
        rows = [(*row[:_SHARDING], *row[_SHARDING + 1 :]) for row in rows]
    facts = aligned([row[:-1] for row in rows], _RIGHT)
    margin = 2 + max(map(len, facts)) + 2
    lines = iter([
        [f"  {fact}".ljust(margin) + path] if margin + len(path) <= width
        else [f"  {fact}", *textwrap.wrap(path, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        for fact, (*_, path) in zip(facts, rows, strict=True)
    ])  # fmt: skip
    found = next(lines)
    for (memory, why, streams), of_group in by_size:
        said = "; ".join(filter(None, (why, streams)))
        heading = f"{memory}, {_mib(sum(row.nbytes for row in of_group))} MiB: {said}"
        found += textwrap.wrap(heading, width, subsequent_indent="    ", break_on_hyphens=False)
        found += [line for _ in of_group for line in next(lines)]
    return found


def _sentences(table: Placement) -> list[str]:
    """The sentences under the table."""
    host, disk = table.host_bytes, table.disk_bytes
    total = host + disk + table.device_bytes
    of_step = all(leaf.why == ARGUMENT for leaf in table.leaves)
    what = "arguments that are, or arrive, in host memory" if of_step else "optimizer state"
    summary = (
        f"{what}: {_mib(total)} MiB, of which {_mib(host)} MiB ({host / total if total else 0.0:.1%}) in "
        f"{_memory.HOST_KIND} and {_mib(table.device_bytes)} MiB on the device"
    )
    if disk:
        summary += f"; {_mib(disk)} MiB ({disk / total:.1%}) on disk, read and written in every step"
    if any(leaf.sharding for leaf in table.leaves):
        summary += f"; for each device {_mib(table.host_bytes_per_device)} MiB in {_memory.HOST_KIND}"
    windows = [
        f"window: {_mib(w.nbytes)} MiB on each device: {w.why}"
        + (f"; streamed once the backward pass is over, {w.own_loop}" if w.own_loop else "")
        + (f" (from {w.leaf} on)" if len(table.windows) > 1 else "")
        for w in table.windows
    ]
    stays = [f"not updated within the passes of the step: {why}" for why in table.stays]
    unknown = [f"how it streams is not known: {table.unknown}"] if table.unknown else []
    in_turn = [f"before anything is loaded: {what}" for what in table.in_turn]
    elsewhere = [f"beside these leaves, arrays that the step makes itself: {how}" for how in table.elsewhere]
    return [summary, *windows, *elsewhere, *in_turn, *table.guessed, *stays, *unknown]
