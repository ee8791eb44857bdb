"""Rows of cells as text, and text as HTML."""

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
