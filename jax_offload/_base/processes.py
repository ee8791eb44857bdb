"""Let the processes of a run agree. All of them must ask, in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jax_offload._base.private import coordination

_BYTES = 4096  # that each says: one program for all that is told
_LETTERS = 600  # of an error, six bytes each at most
_PATIENCE = 30 * 60 * 1000  # ms, for processes that are slower: one may still compile
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


def failed_anywhere(mine: str, run: str, number: int) -> dict[int, str]:
    """Return the failures by the number of their process; empty if there are none.

    ``allgathered`` runs a program on the devices, which waits for everything that runs there. This goes from host to
    host: a step ends with it, and its programs run on.

    Args:
      mine: the failure in this process; empty if there is none.
      run: the name of the run.
      number: the number of the question in the run; each is asked once.
    """
    if not several():
        return {0: mine} if mine else {}
    service = coordination()
    if service is None:
        return {k: text for k, text in enumerate(allgathered(mine[:_LETTERS])) if text}
    place = f"jax_offload/{run}/{number}/"
    if mine:
        service.key_value_set(f"{place}{jax.process_index()}", mine)
    service.wait_at_barrier(f"jax_offload/{run}", _PATIENCE)
    return {int(key.rpartition("/")[2]): text for key, text in service.key_value_dir_get(place)}


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
    said = allgathered(None if error is None else f"{type(error).__name__}: {error}"[:_LETTERS])
    if error is not None:
        raise error
    if failed := [(k, text) for k, text in enumerate(said) if text is not None]:
        undo(result)  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"{doing} failed in {len(failed)} of {len(said)} processes. Process {failed[0][0]}: {failed[0][1]}"
        )
    return result  # pyright: ignore[reportReturnType]
