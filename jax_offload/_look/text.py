"""Text for people: tables and paragraphs as lines, bytes and seconds as words and back."""

import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

NARROW = 80  # columns where there is no terminal: a log file, a test
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BYTES = {"": 1, "b": 1} | {f"{unit}b": 1000**n for n, unit in enumerate("kmgt", 1)}
_BYTES |= {unit[0]: n for unit, n in _BYTES.items() if unit} | {unit.lower(): 1024**n for n, unit in enumerate(_UNITS)}


def terminal_width() -> int:
    """Return the columns of the terminal, or ``$COLUMNS``, and at least 80."""
    return max(shutil.get_terminal_size((NARROW, 24)).columns, NARROW)


def paragraph(text: str, *, begin: str = "", indent: str = "  ") -> list[str]:
    """Break a text into lines as wide as the terminal: the first one after ``begin``, the others after ``indent``."""
    return textwrap.wrap(text, terminal_width(), initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows as lines, every column as wide as its widest cell; the columns ``right`` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if k in right else "<" for k in range(len(widths))]
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [line.format(*row).rstrip() for row in rows]


def in_bytes(n: float) -> str:
    """Format bytes in the largest binary unit that gives at least 1, with at most four digits."""
    power = 0
    while abs(n) >= 1000 and power < len(_UNITS) - 1:
        n, power = n / 1024, power + 1
    digits = 0 if power == 0 or abs(n) >= 100 else 1 if abs(n) >= 10 else 2
    return f"{n:.{digits}f} {_UNITS[power]}"


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
    """Return ``given`` in bytes: a number from 1 on, or text."""
    return int(_number(argument, given, _BYTES, 'a number of bytes, or text such as "80GiB" or "16e9"', most=1e18))


def count_of(argument: str, given: object) -> int:
    """Return ``given`` as a count: a number from 1 to 1e15, or text."""
    return round(_number(argument, given, _COUNTS, 'how many there are, 13e9 or "13B", up to 1e15', most=1e15))


def _number(argument: str, given: Any, units: Mapping[str, float], expected: str, most: float) -> float:
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([a-z]*)\s*", str(given).lower())
    if isinstance(given, str):
        number = float(found[1] + (found[2] or "")) * units.get(found[3], 0) if found else 0.0
    else:
        number = float(given) if hasattr(given, "__float__") and not isinstance(given, bool) else 0.0
    if not 1 <= number <= most:
        raise ValueError(f"{argument}: expected {expected}; got {given!r}.")
    return number
