"""Files of several processes: each has a store of its own, and a commit is one of all of them.

Each prepares it: all of it on its disk, beside the commit before. When all have, that is the commit. Each, when it
knows, swaps it in, and only then writes to where the one before lies; a process that ended between finds it prepared.
So of the one or two commits that each has, all have one, and the newest of these is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from jax_offload._base.on_disk import Place
from jax_offload._base.processes import allgathered, everywhere, several
from jax_offload._disk import manifest
from jax_offload._disk.files import Files
from jax_offload._disk.layout import Entry
from jax_offload._disk.manifest import Together
from jax_offload._disk.store import Store


def own(directories: Sequence[Path]) -> tuple[Path, ...]:
    """Those of this process, in those that were given: they may be on a drive of its own, or on one of all."""
    if not several():
        return tuple(directories)
    return tuple(each / f"process-{jax.process_index()}-of-{jax.process_count()}" for each in directories)


def about() -> dict[str, Any]:
    """Whose files they are."""
    said: dict[str, Any] = {"by": "jax_offload", "version": 1}
    return said | ({"process": jax.process_index(), "processes": jax.process_count()} if several() else {})


def check_count(directories: Sequence[Path]) -> None:
    """Raises ``ValueError`` where another number of processes has made files there."""
    first, now = Path(directories[0]), jax.process_count()
    counts = {int(each.parts[-2].rpartition("-")[2]) for each in first.glob(f"process-*-of-*/{manifest.NAME}")}
    counts |= {1} if (first / manifest.NAME).exists() else set()
    if counts and now not in counts:
        raise ValueError(
            f"disk: {first} has the commit of {min(counts)} processes, each of which has its part, and now there are "
            f"{now}. Fix: go on with {min(counts)}; or there jo.save_args(tree) to a checkpoint, and here "
            "jo.restore(manager, target)."
        )


def last_of_all(directories: Sequence[Path], files: Files | None) -> tuple[Together, int] | None:
    """The newest commit that each process has, and its step; ``None`` where there is none.

    Raises:
      ValueError: some have one, and others none.
    """

    def look() -> tuple[bool, list[Any]]:
        check_count(directories)
        mine = own(directories)
        commits = [[each.number, each.run, step] for each, step in Store.commits(mine, files=files)]
        return Store.exists(mine, files=files), commits

    swapped, found = zip(*allgathered(everywhere(look, "disk: looking for the last commit")), strict=True)
    if common := set.intersection(*({tuple(each) for each in commits} for commits in found)):
        number, run, step = max(common)
        return Together(number, run), step
    if not any(swapped):
        return None  # the first commit did not end
    if lost := [k for k, commits in enumerate(found) if not commits]:
        some = [k for k, commits in enumerate(found) if commits]
        step = max(step for commits in found for _, _, step in commits)
        raise ValueError(
            f"disk: process {lost[0]} has no commit in {own_of(directories, lost[0])}, and process {some[0]} that of "
            f"step {step}. Is a disk mounted, is each process on the host that it was on? Else restore from a "
            "checkpoint into directories that are empty."
        )
    raise ValueError(
        f"disk: the processes have no commit of one run in {', '.join(map(str, directories))}; number, run and step of "
        f"what they have: {found}. Fix: the directories of one run."
    )


def own_of(directories: Sequence[Path], process: int) -> Path:
    return Path(directories[0]) / f"process-{process}-of-{jax.process_count()}"


def created(directories: Sequence[Path], groups: Sequence[Sequence[Entry]], files: Files | None) -> Store:
    """An empty store of this process, where none has a commit."""

    def make() -> Store:
        check_count(directories)
        if Store.exists(own(directories), files=files):
            raise ValueError(
                f"disk: {directories[0]} holds the state of another run, or of an earlier one, as of its last "
                "commit. Fix: disk.resume(target) goes on with it; for a new run give directories of its own."
            )
        return Store.create(own(directories), groups, about=about(), files=files)

    if several() and (last := last_of_all(directories, files)) is not None:
        raise ValueError(
            f"disk: {directories[0]} holds the state of another run, or of an earlier one, as of step {last[1]}. Fix: "
            "disk.resume(target) goes on with it; for a new run give directories of its own."
        )
    return everywhere(make, "disk: making files", Store.close)


def opened(directories: Sequence[Path], files: Files | None) -> Store | None:
    """The store of this process at the last commit; of several processes all ask."""
    if not several():
        check_count(directories)
        exists = Store.exists(directories, files=files)
        return Store.open(directories, about=about(), files=files) if exists else None
    if (last := last_of_all(directories, files)) is None:
        return None

    def at() -> Store:
        return Store.open(own(directories), about=about(), files=files, together=last[0])

    return everywhere(at, "disk: opening the last commit", Store.close)


def opened_at_last(directories: Sequence[Path], files: Files | None) -> Store:
    """The same; ``ValueError`` where there is no commit."""
    if (store := opened(directories, files)) is None:
        raise ValueError(
            f"disk: there is no commit in {', '.join(map(str, directories))}. Fix: the directories of the run that is "
            "to go on, in their order; or tx.init(params) for a new one."
        )
    return store


def check_shared(leaves: Sequence[Place]) -> None:
    """Raises ``ValueError`` where a leaf is not on devices of all processes."""
    everyone = {*range(jax.process_count())}
    for leaf in leaves:
        if (on := {d.process_index for d in leaf.on_its_way.device_set}) != everyone:
            raise ValueError(
                f"disk: {leaf.name} is on devices of {len(on)} of the {len(everyone)} processes, {sorted(on)}, and "
                "their files are those of one state. Fix: parameters on a mesh of all devices, jax.make_mesh(...)."
            )


def committed(store: Store, step: int, beside: Callable[[], Any], run: str) -> None:
    """Commits in all processes, or in none, with the arrays beside the groups.

    Raises:
      ValueError: it failed in another process.
    """
    if not several():
        _ended(store.commit(step, beside()))
        return
    arrays = everywhere(beside, "disk.commit")
    together = Together(1 + (0 if store.together is None else store.together.number), run)
    try:
        everywhere(lambda: _ended(store.prepare(step, arrays, together)), "disk.commit")
        everywhere(lambda: _ended(store.swap()), "disk.commit, its last part,")
    except BaseException as error:
        store.stop(error)
        raise


def _ended(commit: Future[None]) -> None:
    """Waits for it; who is interrupted (Ctrl-C) does too, as what is written from lies in the caller's arrays."""
    try:
        commit.result()
    except KeyboardInterrupt:
        commit.exception()
        raise
