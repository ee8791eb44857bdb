"""Which steps a commit is due for: a pure rule, so that processes that ask for the same step decide alike."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any


def number_of(step: Any) -> int:
    """Of a step: a Python integer, NumPy's, or a jax array of one.

    Raises:
      ValueError: it is something else, or below 0.
    """
    try:
        found = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        found = -1
    if found < 0:
        said = repr(step) if isinstance(step, (int, float, str)) else f"a {type(step).__name__}"  # not all of a tree
        raise ValueError(f"step: expected an int >= 0; got {said}. The order is disk.commit(step, tree).")
    return found


def is_due(step: int, last: int | None, every: int, where: Path) -> bool:
    """Whether a step is, of every so many, after a commit of step ``last`` there, or after none.

    Raises:
      ValueError: it is before that.
    """
    if last is not None and step < last:
        raise ValueError(
            f"step: the last commit in {where} is of step {last}, and a run that is resumed goes on from there; got "
            f"{step}. Fix: count on from the step that disk.resume(target) gave; force=True commits it all the same."
        )
    return last is None or step % every == 0
