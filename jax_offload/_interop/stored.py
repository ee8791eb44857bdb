"""What a checkpoint has, and whether a target fits it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jax_offload._base import memory
from jax_offload._interop.checksums import is_key


class Damaged(Exception):
    """What is stored cannot be read, or is not what was saved."""


def reading(read: Any, *args: Any, **kwargs: Any) -> Any:
    """``read(...)``, where any error but one of memory or of the platform means that what is stored is damaged.

    orbax and tensorstore raise whatever the first broken byte leads to: ``ValueError``, ``KeyError``, JSON and Unicode
    errors, a bare ``Exception``.
    """
    try:
        return read(*args, **kwargs)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise Damaged(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}") from error


def named(tree: Any) -> tuple[list[str], list[Any]]:
    """The leaves of a tree and their names, alike for named tuples and for the dicts that orbax keeps of them."""
    with_paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = ["/".join(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in with_paths]
    return names, [x for _, x in with_paths]


def some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "") or "nothing"


def check_target(target: Any, stored: dict[str, Any], folder: Any) -> None:
    """Raises ``ValueError`` for a target of another tree, shape or dtype, or without a place.

    orbax would convert dtypes without a word, and choose the device.
    """
    wanted = dict(zip(*named(target), strict=True))
    if wanted.keys() != stored.keys():
        raise ValueError(
            f"target: its leaves are not those of the checkpoint in {folder}.\n"
            f"  only in the target     {some(wanted.keys() - stored.keys())}\n"
            f"  only in the checkpoint {some(stored.keys() - wanted.keys())}\n"
            "Give a target for all that was saved. What the checkpoint lacks, an optimizer state say, make anew with "
            f"tx.init(params) after the restore; parts of what it has: docs/state.md."
            f"{_other_storage(wanted, stored)}"
        )
    for name, x in wanted.items():
        if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
            raise ValueError(
                f"target: leaf {name!r} has no sharding; orbax would put it on the device. jo.abstract_state(tx, "
                "params) has them for a state; for others: jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )
        if is_key(x) or not hasattr(x, "dtype"):
            continue
        got = reading(lambda leaf: (tuple(leaf.shape), np.dtype(leaf.dtype)), stored[name])
        if got != (tuple(x.shape), np.dtype(x.dtype)):
            raise ValueError(
                f"target: leaf {name!r} is {np.dtype(x.dtype).name}{list(x.shape)}, and the checkpoint in {folder} has "
                f"{got[1].name}{list(got[0])}. Restore it as it was saved, and convert afterwards."
            )


def _other_storage(wanted: Collection[str], stored: Collection[str]) -> str:
    """What to do where one of two trees has leaves in fewer bits that the other has not."""
    encoded = [{x.rpartition("/")[0] for x in names if x.endswith("/values")} for names in (wanted, stored)]
    if encoded[0] == encoded[1]:
        return ""
    return (
        " One of the two has moments in fewer bits (storage=): restore with the optimizer that was saved, and convert: "
        "jo.from_plain(tx, jo.to_plain(saved_tx, state), params)."
    )


def default_target(stored: Any) -> Any:
    """Where a leaf goes that nobody gave a target for."""
    if stored.sharding is None:  # no jax.Array: a NumPy array, or a number
        zero = np.zeros((), stored.dtype)
        if stored.shape:
            return np.broadcast_to(zero, stored.shape)
        return zero.item() if np.asarray(zero.item()).dtype == zero.dtype else zero  # Python's numbers are of 64 bits
    sharding = _recorded(stored.sharding) or memory.ambient_sharding()
    kind = memory.HOST_KIND if stored.shape else memory.DEVICE_KIND
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=memory.with_kind(sharding, kind))


def _recorded(sharding: Any) -> Sharding | None:
    """The sharding that orbax recorded, where its devices exist here."""
    try:
        return sharding.to_jax_sharding()
    except Exception:  # another machine's, in one way or another
        return None
