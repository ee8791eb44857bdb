"""Let the processes of a run agree. All of them must ask, in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

_BYTES = 4096  # that each says: one program for all that is told
LETTERS = 600  # of an error, six bytes each at most
T = TypeVar("T")


def several() -> bool:
    return jax.process_count() > 1


def allgathered(mine: Any) -> list[Any]:
    """Return each process's message, by its number. ``mine``: this process's message, a few KiB of JSON."""
    if not several():
        return [mine]
    from jax.experimental import multihost_utils

    said = json.dumps(mine).encode().ljust(_BYTES)
    if len(said) > _BYTES:
        raise ValueError(f"a message of {len(said)} bytes is too long, {_BYTES} at most: {said[:200]!r}")
    rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(said, np.uint8)))
    return [json.loads(row.tobytes()) for row in rows.reshape(-1, _BYTES)]


def everywhere(do: Callable[[], T], doing: str, undo: Callable[[T], Any] = lambda _: None) -> T:
    """Return the result of ``do`` if it succeeds in every process; otherwise raise in all of them.

    Raises:
      Exception: the error of ``do`` in this process.
      ValueError: ``do`` failed in another process; ``undo`` has been called here.
    """
    if not several():
        return do()
    result, error = None, None
    try:
        result = do()
    except Exception as raised:
        error = raised
    said = allgathered(None if error is None else f"{type(error).__name__}: {error}"[:LETTERS])
    if error is not None:
        raise error
    if failed := [(k, text) for k, text in enumerate(said) if text is not None]:
        undo(result)  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"{doing} failed in {len(failed)} of {len(said)} processes. Process {failed[0][0]}: {failed[0][1]}"
        )
    return result  # pyright: ignore[reportReturnType]
