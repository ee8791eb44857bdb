"""The option ``disk``: files for what does not fit into host memory, which leaves go there, and how they are made.

A state is made leaf by leaf, so that the whole of it is never in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Sharding

from jax_offload._base.around import described
from jax_offload._base.arrays import is_integer
from jax_offload._base.jaxprs import jaxpr_of, variables
from jax_offload._base.on_disk import Place, only_outside
from jax_offload._disk.disk import Disk
from jax_offload._ir.program import flat, structure, without_round_trips
from jax_offload._ir.propagate import needed_for
from jax_offload._ir.slices import slice_of
from jax_offload._placement.placement import Leaf, Policy, place
from jax_offload._plan.transfers import rows_in_part
from jax_offload._step.cut import unguarded


def disk(directory: str | os.PathLike[str], *, host_bytes: int = 0, commit_every: int = 1) -> Disk:
    """Keep in files the part of a state that does not fit into host memory.

    Use it as ``jo.offload(inner, disk=jo.disk(folder))``. Each step of ``jax_offload.jit``, which drives it from
    Python, reads that part group by group, updates it on the device and writes it again, while it reads the next group
    and writes the last one. The numbers are the same as in host memory (docs/disk.md).

    Only ``commit`` saves anything: after a crash the files hold the whole last commit. They take twice the bytes of
    their leaves, because new values never overwrite committed ones.

    Args:
      directory: the directory for the files, made if missing. A local NVMe drive is best, or a RAID, which is as fast
        as all of its drives together. ``~`` is your home, and a relative path starts at the current directory.
      host_bytes: how many bytes of the state stay in pinned host memory, over all devices, replicated bytes counted
        once: whole parameters, those whose gradients come last. Everything else that ``offload`` would keep there is
        on disk. Buffers come on top: at most nine groups of 64 to 128 MiB, or of one row, or of one
        parameter's leaves if the update does not keep their rows apart.
      commit_every: the number of steps from one due ``commit`` to the next.

    Returns:
      A ``Disk``, for one ``offload``.

    Raises:
      TypeError: ``directory`` is not a path.
      ValueError: the path is empty, its ``~`` has no home, or a number is not an integer in its range.

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
    if not is_integer(host_bytes) or host_bytes < 0:
        raise ValueError(
            f"host_bytes: expected a number of bytes >= 0, an int; got {host_bytes!r}. Fix: 16 * 2**30 is 16 GiB."
        )
    if not is_integer(commit_every) or commit_every < 1:
        raise ValueError(
            f"commit_every: expected an int >= 1; got {commit_every!r}. Fix: leave it out, or commit_every=10."
        )
    return Disk(_path(directory), int(host_bytes), int(commit_every))


def _path(given: Any) -> Path:
    """Make a path absolute, as the process may change its directory while the files are in use."""
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(
            f"directory: expected a path, jo.disk('/nvme/run'); got {given!r}, a {type(given).__name__}. Fix: one "
            "directory, on a RAID for several drives; a number of bytes is host_bytes=."
        )
    if not path:
        raise ValueError("directory: got an empty path. Fix: '.' is where the process is; is a variable not set?")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # there is no such user
        raise ValueError(f"directory: {path!r} is in no home: {error} Fix: a path without ~.") from error


def check_disk(given: Any, policy: Policy) -> None:
    """Raise where ``disk=`` is not a disk, or does not go together with another option."""
    if given is None:
        return
    if not isinstance(given, Disk):
        raise TypeError(f"disk: expected a jo.disk(directory, ...), got {given!r}. Fix: disk=jo.disk({given!r}).")
    if policy.update_on != 0:
        raise ValueError(
            f"disk: the device updates leaves on disk; got update_on={policy.update_on!r} too. Fix: leave one out."
        )
    if policy.fraction == 0:
        raise ValueError("disk: with fraction=0 nothing leaves the device. Fix: leave one of them out.")


def places_of(given: Any, plan: Sequence[Leaf], leaves: Sequence[Any]) -> list[Place | None]:
    """Map each leaf of a state to its leaf on the disk; ``None`` for a leaf in memory."""
    together: dict[Hashable, int] = {}  # bytes of a row, over all leaves of a parameter that have as many rows
    keys = [
        (row.path if row.owner is None else row.owner, np.shape(x)[:1]) for row, x in zip(plan, leaves, strict=True)
    ]
    for key, row in zip(keys, plan, strict=True):
        if row.disk:
            together[key] = together.get(key, 0) + row.nbytes // max(1, row.shape[0])
    return [
        Place(given, row.path, tuple(x.shape), np.dtype(x.dtype), rows=rows_in_part(together[key], x.ndim, x.shape[0]))
        if row.disk
        else None
        for key, row, x in zip(keys, plan, leaves, strict=True)
    ]


def refused(state: Any, policy: Policy, params: Any) -> Any:
    """Make the state of a traced ``init`` an error when it is lowered, as no program makes files."""
    leaves, treedef = jax.tree.flatten(state)
    rows = place(policy, state, params)
    return jax.tree.unflatten(treedef, [only_outside(x) if r.disk else x for x, r in zip(leaves, rows, strict=True)])


def created(
    disk: Disk, create: Callable[[Any], Any], params: Any, placed: Sequence[tuple[Leaf, Any, Sharding]], treedef: Any
) -> optax.OptState:
    """Return ``create(params)`` with the leaves on disk that ``placed`` puts there, each made by itself.

    Leaves that are alike share a program.
    """
    with described(params):
        traced, _ = jaxpr_of(create, params)
    init = unguarded(without_round_trips(flat(traced)))
    values = dict(zip(init.inputs, [*init.consts, *jax.tree.leaves(params)], strict=True))
    compiled = dict[Hashable, Any]()

    def made(wanted: Sequence[int]) -> list[Any]:
        outputs, where = [init.outputs[k] for k in wanted], tuple(placed[k][2] for k in wanted)
        eqns, _ = needed_for(init.eqns, variables(outputs))
        s = slice_of(eqns, outputs, init.debug_info, {})  # pyright: ignore[reportArgumentType]
        key = structure(s.jaxpr), where
        if key not in compiled:
            compiled[key] = jax.jit(s.run, out_shardings=[*where])
        return compiled[key](*(values[v] for v in s.inputs))

    places = {k: leaf.place for k, (leaf, _, _) in enumerate(placed) if leaf.place is not None}
    rest = [k for k in range(len(placed)) if k not in places]
    on_disk = disk.fill([*places.values()], (made([k])[0] for k in places))
    found = dict[int, Any]([*zip(places, on_disk, strict=True), *zip(rest, made(rest), strict=True)])
    return jax.tree.unflatten(treedef, [found[k] for k in range(len(placed))])
