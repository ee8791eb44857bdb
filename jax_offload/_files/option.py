"""The option ``disk``: files for what does not fit into host memory."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_offload._base.arrays import is_integer
from jax_offload._base.on_disk import Place
from jax_offload._drive.moving import DEPTH
from jax_offload._files.files import Disk
from jax_offload._placement.options import Policy
from jax_offload._placement.placement import Leaf
from jax_offload._plan.by_rows import rows_in_part


def disk(
    *directories: str | os.PathLike[str], host_bytes: int = 0, depth: int = DEPTH, commit_every: int = 1
) -> Disk:  # fmt: skip
    """Files for the part of a state that does not fit into host memory: ``jo.offload(inner, disk=jo.disk(folder))``.

    Each step reads that part, updates it on the device and writes it again, group by group, while the next group is
    read and the last one written. The step is one of ``jax_offload.jit``, which drives it from Python, and the numbers
    are those of a state in host memory (docs/disk.md).

    Nothing is kept but what ``commit`` has saved: after a crash the files are those of the last commit, whole. They
    take twice the bytes of the leaves in them, as a leaf is never written over the one that was committed.

    Args:
      *directories: one or several, on drives of their own, over which the leaves are spread. They are made. ``~`` is
        your home, and a relative one is of where the process is now.
      host_bytes: of the state that stays in pinned host memory, over all devices, what is replicated counted once:
        whole parameters at a time, those whose gradients come last; all else that ``offload`` would keep there is on
        disk. On top of it come buffers for what is under way: at most nine groups, of 64 to 128 MiB, or of one
        row, or of one parameter's leaves where the update does not keep their rows apart.
      depth: how many groups are read ahead, and how many written behind. Each more is three more groups of buffers,
        and pays where the pass runs in several programs that take longer than the files (docs/disk.md).
      commit_every: of how many steps one is due, as ``commit`` has it. ``jo.plan`` counts what that writes.

    Returns:
      A ``Disk``, for one ``offload``.

    Raises:
      TypeError: a directory is no path.
      ValueError: there is no directory, or a number is none that fits.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3), disk=jo.disk(tempfile.mkdtemp()))
      >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
      >>> step = jo.jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=(0, 1))
      >>> params, state = step(params, state, grads)
      >>> state[0].mu["w"]
      OnDisk([0].mu['w']: float32[256, 256])
    """
    if not directories:
        raise ValueError("directories: expected one or several paths, jo.disk('/nvme/run'); got none.")
    paths = [_path(each) for each in directories]
    if not is_integer(host_bytes) or host_bytes < 0:
        raise ValueError(
            f"host_bytes: expected a number of bytes >= 0, an int; got {host_bytes!r}. Fix: 16 * 2**30 is 16 GiB."
        )
    for name, value in (("depth", depth), ("commit_every", commit_every)):
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name}: expected an int >= 1; got {value!r}. Fix: leave it out, or {name}=10.")
    return Disk(paths, int(host_bytes), depth=int(depth), commit_every=int(commit_every))


def _path(given: Any) -> Path:
    """Absolute, as a process may go elsewhere while the files are in use."""
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(
            f"directories: expected paths, jo.disk('/nvme/run'), one argument each; got {given!r}, a "
            f"{type(given).__name__}. Fix: jo.disk(*paths) of several; a number of bytes is host_bytes=."
        )
    if not path:
        raise ValueError("directories: got an empty path. Fix: '.' is where the process is; is a variable not set?")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # there is no such user
        raise ValueError(f"directories: {path!r} is in no home: {error} Fix: a path without ~.") from error


def check_disk(given: Any, policy: Policy) -> None:
    """Raises where ``disk=`` is none, or does not go together with another option."""
    if given is None:
        return
    if not isinstance(given, Disk):
        raise TypeError(f"disk: expected a jo.disk(directory, ...), got {given!r}. Fix: disk=jo.disk({given!r}).")
    if policy.update_on != 0:
        raise ValueError(
            f"disk: the device updates what is on disk; got update_on={policy.update_on!r} too. Fix: leave one out."
        )
    if isinstance(policy.fraction, (int, float)) and policy.fraction == 0:
        raise ValueError("disk: with fraction=0 nothing leaves the device. Fix: leave one of both out.")


def budget_of(given: Any) -> int | None:
    """What may be in host memory, in bytes; ``None`` where there is no disk."""
    return given.host_bytes if isinstance(given, Disk) else None


def places_of(given: Any, plan: Sequence[Leaf], leaves: Sequence[Any]) -> list[Place | None]:
    """Which leaf of the disk each of a state is, by its name in the offload's state; ``None`` for one in memory."""
    together: dict[Hashable, int] = {}  # bytes of a row, of all leaves of a parameter that have as many
    keys = [
        (row.path if row.owner is None else row.owner, np.shape(x)[:1]) for row, x in zip(plan, leaves, strict=True)
    ]
    for key, row in zip(keys, plan, strict=True):
        if row.disk:
            together[key] = together.get(key, 0) + row.nbytes // max(1, row.shape[0])
    return [
        Place(
            given, row.path, tuple(x.shape), np.dtype(x.dtype), rows=rows_in_part(together[key], x.ndim, x.shape[0])
        ) if row.disk else None
        for key, row, x in zip(keys, plan, leaves, strict=True)
    ]  # fmt: skip
