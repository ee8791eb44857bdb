"""Commits of one or several processes, each with its own store: a commit succeeds in all of them or in none.

First each process prepares the commit: all of its part is on disk, beside the previous commit. When all processes have
done so, the commit is valid. Then each swaps it in, and only after that overwrites the previous one; a process that was
killed in between finds the prepared commit. So each process has one or two commits, and the newest one that all
processes have is the last.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jax_offload._base.on_disk import Place
from jax_offload._base.processes import allgathered, everywhere, several
from jax_offload._disk.files import Files
from jax_offload._disk.store import NAME, Commit, Entry, Late, Store, commits


def own(directory: Path, process: int | None = None) -> Path:
    """The directory of a process, this one by default, within the given one."""
    if not several():
        return directory
    return directory / f"process-{jax.process_index() if process is None else process}-of-{jax.process_count()}"


def last_of_all(directory: Path, files: Files) -> Commit | None:
    """Find the newest commit that each process has; ``None`` where there is none. All processes must ask.

    Raises:
      ValueError: some have one and others none, or another number of processes made them.
    """

    def look() -> list[Any]:
        _check_count(directory)
        mine = own(directory)
        return [(mine / NAME).exists(), [[each.number, each.run, each.step] for each in commits(mine, files)]]

    said = allgathered(everywhere(look, "disk: looking for the last commit"))
    found = [[Commit(*each) for each in mine] for _, mine in said]
    if common := set[Commit].intersection(*map(set, found)):
        return max(common)
    if not any(swapped for swapped, _ in said):
        return None  # the first commit did not end
    if lost := [k for k, mine in enumerate(found) if not mine]:
        some = next(k for k, mine in enumerate(found) if mine)
        raise ValueError(
            f"disk: process {lost[0]} has no commit in {own(directory, lost[0])}, and process {some} the one of step "
            f"{max(found[some]).step}. Is a disk mounted, is each process on the host that it was on? Otherwise "
            "restore from a checkpoint into a directory that is empty."
        )
    raise ValueError(
        f"disk: the processes have no commit of the same run in {directory}, but {found}. Fix: give the directory "
        "of one run."
    )


def _check_count(directory: Path) -> None:
    """Raise ``ValueError`` where another number of processes has made files."""
    now = jax.process_count()
    counts = {int(each.parts[-2].rpartition("-")[2]) for each in directory.glob(f"process-*-of-*/{NAME}")}
    counts |= {1} if (directory / NAME).exists() else set()
    if counts and now not in counts:
        raise ValueError(
            f"disk: {directory} has the commit of {min(counts)} processes, each with its part, and now there "
            f"are {now}. Fix: go on with {min(counts)}; or save a checkpoint there, jo.save_args(tree), and here "
            "jo.restore(manager, target)."
        )


def create(directory: Path, entries: Sequence[Entry], files: Files) -> Store:
    """Make an empty store of this process. ``ValueError`` where there is a commit."""
    if (last := last_of_all(directory, files)) is not None:
        raise ValueError(
            f"disk: {directory} holds the state of another run, or of an earlier one, as of step {last.step}. Fix: "
            "disk.resume(target) goes on with it; for a new run give a directory of its own."
        )
    return everywhere(lambda: Store.create(own(directory), entries, files), "disk: making files", Store.close)


def open_last(directory: Path, files: Files) -> Store:
    """Open the store of this process at the last commit of all. ``ValueError`` where there is none."""
    if (last := last_of_all(directory, files)) is None:
        raise ValueError(
            f"disk: there is no commit in {directory}. Fix: the directory of the run that is to go on; or "
            "tx.init(params) for a new one."
        )
    return everywhere(lambda: Store.open(own(directory), last, files), "disk: opening the last commit", Store.close)


def commit(store: Store, step: int, beside: Callable[[], Mapping[str, Late]], run: str) -> None:
    """Commit in all processes or in none, with the arrays beside the state.

    Raises:
      ValueError: it failed in another process.
    """
    arrays = everywhere(beside, "disk.commit")
    try:
        halves = [everywhere(lambda: _whole(lambda: store.prepare(step, arrays, run)), "disk.commit")]
        halves.append(everywhere(lambda: _whole(store.swap), "disk.commit, its last part,"))
    except BaseException as error:
        store.stop(error)
        raise
    for interrupt in filter(None, halves):
        raise interrupt


def _whole(do: Callable[[], None]) -> KeyboardInterrupt | None:
    """Run ``do`` to its end in spite of Ctrl-C, because it reads the caller's arrays; return the interrupt, if any."""
    with ThreadPoolExecutor(1, "disk commit") as thread:
        future = thread.submit(do)
        try:
            future.result()
        except KeyboardInterrupt as interrupt:
            future.result()
            return interrupt
    return None


def check_leaves(leaves: Sequence[Place]) -> None:
    """Raise ``ValueError`` where two leaves have one name, or a leaf is not on devices of all processes."""
    name, times = Counter(leaf.name for leaf in leaves).most_common(1)[0] if leaves else ("", 1)
    if times > 1:
        raise ValueError(
            f"disk: {times} leaves of the state have the path {name}, and files find a leaf by its path. Fix: give the "
            "children of each pytree node keys of their own (jax.tree_util.register_pytree_with_keys)."
        )
    everyone = {*range(jax.process_count())}
    for leaf in leaves:
        if (on := {d.process_index for d in leaf.on_its_way.device_set}) != everyone:
            raise ValueError(
                f"disk: {leaf.name} is on devices of {len(on)} of the {len(everyone)} processes, {sorted(on)}, and "
                "their files hold one state. Fix: parameters on a mesh of all devices, jax.make_mesh(...)."
            )


def number_of(step: Any) -> int:
    """Return the number of a step, given as a Python integer, a NumPy integer or a jax array.

    Raises:
      ValueError: it is something else, or below 0.
    """
    try:
        found = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        found = -1
    if found < 0:
        said = repr(step) if isinstance(step, (int, float, str)) else f"a {type(step).__name__}"
        raise ValueError(f"step: expected an int >= 0; got {said}. The order is disk.commit(step, tree).")
    return found


def is_due(step: int, last: int | None, every: int, where: Path) -> bool:
    """Whether a step is due for a commit, given the step ``last`` of the last commit, or ``None``.

    Raises:
      ValueError: it is before the last commit.
    """
    if last is not None and step < last:
        raise ValueError(
            f"step: the last commit in {where} is of step {last}, and a run that is resumed goes on from there; got "
            f"{step}. Fix: count on from the step that disk.resume(target) gave; force=True commits it all the same."
        )
    return last is None or step % every == 0
