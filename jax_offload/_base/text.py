"""Rows of cells as text, and as HTML."""

from __future__ import annotations

import html
import shutil
from collections.abc import Collection, Sequence

NARROW = 80  # columns where there is no terminal: a log file, a test


def terminal_width() -> int:
    """Columns of the terminal, or ``$COLUMNS``; 80 where there is neither."""
    return max(shutil.get_terminal_size((NARROW, 24)).columns, NARROW)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, every column as wide as its widest cell; those of ``right`` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.rjust(w) if k in right else cell.ljust(w) for k, (cell, w) in enumerate(cells)).rstrip()

    return [line(row) for row in rows]


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table, its cells escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    said = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{said}{row(header, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
