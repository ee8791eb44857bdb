"""Drives as figures: those of ``drives.toml``, and any other from a small file of the user's."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_offload._analysis.chips import figures_in

_FILE = Path(__file__).with_name("drives.toml")
DEFAULT = "pm9a3"  # of a data centre, PCIe 4: the slowest of those that are known
DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Drive:
    """One drive: bytes, bytes per second.

    Attributes:
      name: by which ``drive`` knows it.
      read: of it alone, as the data sheet has it.
      write: of that alone.
      capacity: of all of it.
      writes_per_day: how often its capacity may be written in a day, for the years of its warranty.
      sources: for each figure where it is published.

    Example:
      >>> import jax_offload as jo
      >>> mine = jo.types.Drive("mine", read=2.2e9, write=5.2e9, capacity=2e12, writes_per_day=0.3)
      >>> mine.seconds(read=22 * 10**8, written=52 * 10**8), mine.per_day / 1e9
      (2.0, 600.0)
    """

    name: str
    read: float
    write: float
    capacity: float
    writes_per_day: float
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def per_day(self) -> float:
        """Bytes that it is rated for a day."""
        return self.writes_per_day * self.capacity

    def seconds(self, read: float, written: float) -> float:
        """Of both: flash that is written is not read meanwhile."""
        return read / self.read + written / self.write


def drive(name: str | Path | Drive) -> Drive:
    """The figures of a drive.

    Args:
      name: one of those of the library (``pm9a3``, ``pm9d3a``, ``990pro``); the path of a file of your own,
        ``my_drive.toml``, with ``read``, ``write``, ``capacity`` and ``writes_per_day`` at its top level, where a
        ``like = "pm9a3"`` takes what it does not say from that drive; or a ``Drive``, which comes back.

    Returns:
      A ``Drive``.

    Raises:
      TypeError: ``name`` is none of these.
      ValueError: no drive has that name; or the file lacks a figure, or has one that is unknown or not a number.

    Example:
      >>> import jax_offload as jo
      >>> jo.drive("pm9a3").write / 1e9, jo.drive("990pro").writes_per_day
      (3.5, 0.33)
    """
    if isinstance(name, Drive):
        return name
    if not isinstance(name, str | Path):
        raise TypeError(f"drive: expected a name, a path or a Drive; got a {type(name).__name__}. Known: {_listed()}.")
    path = Path(name)
    if path.suffix == ".toml":
        return _of_file(path)
    found = _known().get(str(name).lower())
    if found is None:
        raise ValueError(
            f"drive: {str(name)!r} is not known. Known: {_listed()}; or the path of a .toml with another's figures."
        )
    return found


def known_drives() -> tuple[str, ...]:
    """The names that ``drive`` takes."""
    return tuple(_known())


def _listed() -> str:
    return ", ".join(known_drives())


@functools.cache
def _known() -> dict[str, Drive]:
    return {name: _parsed(name, table, name) for name, table in tomllib.loads(_FILE.read_text()).items()}


def _of_file(path: Path) -> Drive:
    if not path.exists():
        raise ValueError(f"drive: there is no file {str(path)!r}. Known without one: {_listed()}.")
    table = figures_in("drive", path)
    like = table.pop("like", None)
    base = {} if like is None else dataclasses.asdict(drive(like))
    sources = {key: f"as {like}" for key in base if key not in ("name", "sources")} | dict.fromkeys(table, str(path))
    name = table.pop("name", path.stem)
    return _parsed(name, base | table | {"name": name, "sources": sources | table.get("sources", {})}, str(path))


def _parsed(name: str, table: Mapping[str, Any], where: str) -> Drive:
    figures = [field.name for field in dataclasses.fields(Drive) if field.name not in ("name", "sources")]
    if unknown := table.keys() - {*figures, "name", "sources"}:
        raise ValueError(f"drive: {where} has {', '.join(sorted(unknown))}; a drive has {', '.join(figures)}.")
    if missing := [key for key in figures if key not in table]:
        raise ValueError(f'drive: {where} lacks {", ".join(missing)}. Add them, or a line like = "{DEFAULT}".')
    for key in figures:
        if isinstance(value := table[key], bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(
                f"drive: {key} in {where} is {value!r}; expected a number above 0, in bytes or per second."
            )
    return Drive(name, **{key: float(table[key]) for key in figures}, sources=dict(table.get("sources", {})))
