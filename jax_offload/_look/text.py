"""Text for people: tables as lines, bytes and seconds as words and back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping, Sequence

NARROW = 80  # columns where there is no terminal: a log file, a test
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def terminal_width() -> int:
    """Columns of the terminal, or ``$COLUMNS``; 80 where there is neither."""
    return max(shutil.get_terminal_size((NARROW, 24)).columns, NARROW)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows as lines, every column as wide as its widest cell; the columns ``right`` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.rjust(w) if k in right else cell.ljust(w) for k, (cell, w) in enumerate(cells)).rstrip()

    return [line(row) for row in rows]


def in_bytes(n: float) -> str:
    """Format bytes in the largest binary unit that gives at least 1, with at most four digits."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(n) >= 1000 and len(units) > 1:
        n /= 1024
        del units[0]
    digits = 0 if units[0] == "B" or abs(n) >= 100 else 1 if abs(n) >= 10 else 2
    return f"{n:.{digits}f} {units[0]}"


def in_mib(nbytes: float) -> str:
    """Format bytes as a number of MiB, for a table that names the unit."""
    return f"{nbytes / 2**20:.2f}"


def in_seconds(seconds: float) -> str:
    """Format seconds in s, ms or µs, with at least two significant digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    unit, n = ("ms", 1e3 * seconds) if seconds >= 1e-3 else ("µs", 1e6 * seconds)
    return f"{n:.{1 if n < 99.95 else 0}f} {unit}" if n >= 0.95 else f"{n:.2g} {unit}" if n else "0"


def bytes_of(argument: str, given: object) -> int:
    """Return ``given`` in bytes: a number, or text such as ``"80GiB"`` or ``"16e9"``.

    Raises:
      ValueError: it is neither, or not above zero. The message names ``argument``.
    """
    number = _number(given, _BYTES)
    if not 0 < number < 2**63:
        raise ValueError(f'{argument}: expected a number of bytes, or text such as "80GiB" or "16e9"; got {given!r}.')
    return int(number)


def count_of(argument: str, given: object) -> int:
    """Return ``given`` as a count: a number, or text such as ``"13B"``, ``"350M"`` or ``"13e9"``.

    Raises:
      ValueError: it is neither, or not from 1 to 1e15. The message names ``argument``.
    """
    number = _number(given, _COUNTS)
    if not 1 <= number <= 1e15:
        raise ValueError(f'{argument}: expected how many there are, 13e9 or "13B", up to 1e15; got {given!r}.')
    return round(number)


def _number(given: object, units: Mapping[str, float]) -> float:
    if not isinstance(given, str):
        return 0.0 if isinstance(given, bool) or not hasattr(given, "__float__") else float(given)  # pyright: ignore
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([a-z]*)\s*", given.lower())
    return 0.0 if not found or found[3] not in units else float(found[1] + (found[2] or "")) * units[found[3]]
