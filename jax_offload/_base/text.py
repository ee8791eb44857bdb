"""What is printed: rows of cells as lines, bytes and seconds as words, and text as HTML."""

from __future__ import annotations

import html
import shutil
from collections.abc import Collection, Sequence

NARROW = 80  # columns where there is no terminal: a log file, a test


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


def preformatted(shown: object) -> str:
    """Return what ``print`` shows, as HTML for a notebook."""
    return f"<pre>{html.escape(str(shown))}</pre>"


def in_bytes(n: float) -> str:
    """Format bytes in the largest binary unit that gives at least 1, with at most four digits."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(n) >= 1000 and len(units) > 1:
        n /= 1024
        del units[0]
    digits = 0 if units[0] == "B" or abs(n) >= 100 else 1 if abs(n) >= 10 else 2
    return f"{n:.{digits}f} {units[0]}"


def in_seconds(seconds: float) -> str:
    """Format seconds in s, ms or µs, with at least two significant digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    unit, n = ("ms", 1e3 * seconds) if seconds >= 1e-3 else ("µs", 1e6 * seconds)
    return f"{n:.{1 if n < 99.95 else 0}f} {unit}" if n >= 0.95 else f"{n:.2g} {unit}" if n else "0"
