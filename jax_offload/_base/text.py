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
    """Format rows as lines, every column as wide as its widest cell; the columns ``right`` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.rjust(w) if k in right else cell.ljust(w) for k, (cell, w) in enumerate(cells)).rstrip()

    return [line(row) for row in rows]


def html_table(
    header: Sequence[str], groups: Sequence[tuple[str, Sequence[Sequence[str]]]], right: Collection[int] = ()
) -> str:
    """A table with a line over the rows of each group, its cells escaped; columns of ``right`` end flush.

    Only the last column, of paths or of words, is broken into lines.
    """
    styles = [f"text-align: {'right' if k in right else 'left'}; white-space: nowrap" for k in range(len(header))]
    styles[-1] = styles[-1].removesuffix("; white-space: nowrap")

    def row(cells: Sequence[str], tag: str) -> str:
        filled = (f'<{tag} style="{s}">{html.escape(cell)}</{tag}>' for cell, s in zip(cells, styles, strict=True))
        return f"<tr>{''.join(filled)}</tr>"

    body = (
        f'<tr><th colspan="{len(header)}" style="text-align: left; padding-top: 0.8em">{html.escape(name)}</th></tr>'
        + "".join(row(cells, "td") for cells in rows)
        for name, rows in groups
    )
    return f"<table>{row(header, 'th')}{''.join(body)}</table>"
