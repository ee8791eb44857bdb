"""Which cases of a table run daily, by name; the others are marked, with the reason.

``make test`` runs what has no mark, ``make test FULL=1`` what is ``long`` too, ``pytest --everything`` also what is
``exhaustive``. The cases of a table are named here and not counted: every n-th of them left out whatever stood there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def rows(
    cases: Iterable[Any],
    why: str,
    *,
    daily: Collection[Any] | Callable[..., bool],
    never: Collection[Any] | Callable[..., bool] = (),
) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``.

    Args:
      cases: values, tuples of them where a test takes several, or ``pytest.param``.
      why: what is long about all of them.
      daily: those that run daily, by their id where they have one and else by value; or a function of a case's values.
      never: those that run with ``--everything`` only.

    Raises:
      ValueError: one of those named is no case (it was renamed, or is gone), none is daily, or one is both.
    """
    cases = [case if hasattr(case, "marks") else pytest.param(*_values(case)) for case in cases]
    often, seldom = (_chosen(cases, chosen) for chosen in (daily, never))
    if not any(often):
        raise ValueError("daily: names no case. A test of which nothing runs daily is marked itself.")
    both = [case for case, a, b in zip(cases, often, seldom, strict=True) if a and b]
    if both:
        raise ValueError(f"{both} are daily and never.")
    marked = []
    for case, is_daily, is_never in zip(cases, often, seldom, strict=True):
        marks = () if is_daily else ((pytest.mark.exhaustive if is_never else pytest.mark.long)(why),)
        marked.append(pytest.param(*case.values, id=case.id, marks=(*case.marks, *marks)))
    return marked


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def _chosen(cases: list[Any], chosen: Collection[Any] | Callable[..., bool]) -> list[bool]:
    if callable(chosen):
        return [bool(chosen(*case.values)) for case in cases]
    names = [case.id or (case.values if len(case.values) > 1 else case.values[0]) for case in cases]
    missing = [name for name in chosen if name not in names]
    if missing:
        raise ValueError(f"{missing} are no cases of this table, which has {names}.")
    return [name in chosen for name in names]
