"""Bytes and counts, as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


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
