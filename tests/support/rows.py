"""A table for ``pytest.mark.parametrize`` of which only some cases run daily."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

Chosen = Collection[Any] | Callable[..., bool]


def rows(cases: Iterable[Any], why: str, *, daily: Chosen, never: Chosen = ()) -> list[Any]:
    """Marks the cases that do not run daily as ``long``, and those that never do as ``exhaustive``.

    Args:
      cases: values, tuples of them where a test takes several, or ``pytest.param``.
      why: the reason that stands in the marks.
      daily: the cases that run daily: their ids or values, or a function of a case's values.
      never: the cases that run with ``--everything`` only.

    Returns:
      The cases, each as ``pytest.param``.

    Raises:
      ValueError: ``daily`` or ``never`` names a case that is not in the table.
    """
    params = [case if hasattr(case, "marks") else pytest.param(*_values(case)) for case in cases]
    names = [case.id or (case.values if len(case.values) > 1 else case.values[0]) for case in params]

    def chosen(by: Chosen) -> list[bool]:
        if callable(by):
            return [bool(by(*case.values)) for case in params]
        if missing := [name for name in by if name not in names]:
            raise ValueError(f"{missing} are no cases of this table, which has {names}.")
        return [name in by for name in names]

    marks = [() if d else (pytest.mark.exhaustive(why),) if n else (pytest.mark.long(why),)
             for d, n in zip(chosen(daily), chosen(never), strict=True)]  # fmt: skip
    return [pytest.param(*case.values, id=case.id, marks=(*case.marks, *mark))
            for case, mark in zip(params, marks, strict=True)]  # fmt: skip


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
