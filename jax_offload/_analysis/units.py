"""Bytes, seconds and counts, as people write and read them."""

from __future__ import annotations

import contextlib
import re

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def bytes_of(argument: str, given: object) -> int:
    """``given`` in bytes: a number, or text such as ``"80GiB"`` or ``"16e9"``.

    Raises:
      ValueError: it is neither, or not above zero. The message names ``argument``.
    """
    number: float | None = None
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        number = float(given)
    elif isinstance(given, str) and (found := re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", given.lower())):
        try:
            number = float(found[1]) * _UNITS[found[2]]
        except (KeyError, ValueError):
            number = None
    if number is None or not 0 < number < 2**63:
        raise ValueError(f'{argument}: expected a number of bytes, or text such as "80GiB" or "16e9"; got {given!r}.')
    return int(number)


def count_of(argument: str, given: object) -> int:
    """``given`` as a count: a number, or text such as ``"13B"``, ``"350M"`` or ``"13e9"``.

    Raises:
      ValueError: it is neither, or not from 1 to 1e15. The message names ``argument``.
    """
    number: float | None = None
    if isinstance(given, str) and (found := re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([kmbt]?)\s*", given.lower())):
        with contextlib.suppress(ValueError):
            number = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2]]
    elif not isinstance(given, str | bool):
        number = float(given)  # pyright: ignore[reportArgumentType]
    if number is None or not 1 <= number <= 1e15:
        raise ValueError(f'{argument}: expected how many there are, 13e9 or "13B", up to 1e15; got {given!r}.')
    return round(number)


def in_bytes(n: float) -> str:
    """In the largest binary unit that gives a number of 1 or more, four digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1000 or unit == "TiB":
            digits = 0 if unit == "B" or abs(n) >= 100 else 1 if abs(n) >= 10 else 2
            return f"{n:.{digits}f} {unit}"
        n /= 1024
    raise AssertionError


def in_seconds(seconds: float) -> str:
    """In s, ms or µs, with two significant digits at least."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    unit, n = ("ms", 1e3 * seconds) if seconds >= 1e-3 else ("µs", 1e6 * seconds)
    return f"{n:.{1 if n < 99.95 else 0}f} {unit}" if n >= 0.95 else f"{n:.2g} {unit}" if n else "0"
