"""The manifest: what a store holds at its last commit, as a small file that is swapped whole.

There is a second one, on the last disk, swapped after the first. It is not that of an older commit, whose slots have
been written over: while a commit is made it is that of the one before, both of whose slots are still there.

Where several processes commit together, each with a store of its own, a commit stands in a third file before it is
swapped in: it counts when all have it there, and those that were not swapped then are when they are opened.
"""

from __future__ import annotations

import contextlib
import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_offload._disk.files import Files
from jax_offload._disk.layout import Entry

NAME, COPY, NEXT = "manifest.json", "manifest.copy.json", "manifest.next.json"
FORMAT = 1
_LOST = (
    "The groups' bytes are there, in two slots each, and nothing says any more which of them the last commit is, nor "
    "their checksums. Restore from a checkpoint into a new store."
)


@dataclass(frozen=True)
class Version:
    """Bytes in one of the two slots, with the checksums of their blocks."""

    slot: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, order=True)
class Together:
    """Which commit of several processes it is: its number, and the run that made it, as two may have made that."""

    number: int
    run: str


@dataclass(frozen=True)
class Manifest:
    """A commit. ``extra`` are arrays that are no group's: parameters, leaves of rank 0."""

    store: str
    step: int
    about: Mapping[str, Any]
    directories: int
    block: int
    groups: tuple[tuple[Entry, ...], ...]
    versions: tuple[Version, ...]
    extra: tuple[Entry, ...]
    extra_version: Version
    together: Together | None = None


def to_bytes(manifest: Manifest) -> bytes:
    """JSON of two entries, the second with the checksum of the first."""
    body = {
        "format": FORMAT,
        "store": manifest.store,
        "step": manifest.step,
        "about": manifest.about,
        "directories": manifest.directories,
        "block": manifest.block,
        "groups": [_entries(group) for group in manifest.groups],
        "versions": [_version(version) for version in manifest.versions],
        "extra": _entries(manifest.extra),
        "extra_version": _version(manifest.extra_version),
    }
    if manifest.together is not None:
        body["together"] = [manifest.together.number, manifest.together.run]
    return json.dumps({"manifest": body, "crc32": _checksum(body)}).encode()


class _Damaged(ValueError):
    """It is not what was written."""


def from_bytes(data: bytes, path: Path) -> Manifest:
    """The manifest. ``ValueError`` where it is damaged, or of a version of this library that is not this one's."""
    try:
        document = json.loads(data)
        body, checksum = document["manifest"], document["crc32"]
        intact = checksum == _checksum(body)
    except (ValueError, KeyError, TypeError):
        intact, body = False, {}
    if not intact:
        raise _Damaged(f"the manifest {str(path)!r} is damaged, {len(data)} bytes long")
    if body["format"] != FORMAT:
        raise ValueError(
            f"the store of {str(path)!r} has format {body['format']}, and this version reads {FORMAT}. Read it with "
            "the version of jax_offload that wrote it, and save a checkpoint."
        )
    return Manifest(
        store=body["store"],
        step=body["step"],
        about=body["about"],
        directories=body["directories"],
        block=body["block"],
        groups=tuple(_read_entries(group) for group in body["groups"]),
        versions=tuple(_read_version(version) for version in body["versions"]),
        extra=_read_entries(body["extra"]),
        extra_version=_read_version(body["extra_version"]),
        together=Together(*body["together"]) if "together" in body else None,
    )


def save(files: Files, directory: Path, name: str, data: bytes) -> None:
    """Swaps a small file: after a loss of power at any moment there is the one before or this one, whole."""
    temporary = directory / f"{name}.new"
    files.write(temporary, data)
    files.replace(temporary, directory / name)
    files.sync_directory(directory)


def places(directories: Sequence[Path]) -> tuple[tuple[Path, str], ...]:
    """Where the two are: the directory, and the name there."""
    return (Path(directories[0]), NAME), (Path(directories[-1]), COPY)


def save_both(files: Files, directories: Sequence[Path], manifest: Manifest) -> None:
    """Swaps the first, with which the commit is made, then the second."""
    for directory, name in places(directories):
        save(files, directory, name, to_bytes(manifest))


def save_next(files: Files, directories: Sequence[Path], manifest: Manifest) -> None:
    """A commit that counts when all processes have it so."""
    save(files, Path(directories[0]), NEXT, to_bytes(manifest))


def remove_next(files: Files, directories: Sequence[Path]) -> None:
    """Whatever was to be the next commit."""
    directory = Path(directories[0])
    with contextlib.suppress(FileNotFoundError):
        files.size(directory / NEXT)
        files.remove(directory / NEXT)
        files.sync_directory(directory)


def undamaged(files: Files, directories: Sequence[Path]) -> list[Manifest]:
    """The last commit, and what was to be the next, as far as there are such."""
    found = [load(files, directories)] if exists(files, directories) else []
    path = Path(directories[0]) / NEXT
    try:
        found.append(from_bytes(files.read(path), path))
    except _Damaged as error:
        warnings.warn(f"{error}. Check the disk.", stacklevel=2)
    except FileNotFoundError:
        pass
    return found


def load_together(files: Files, directories: Sequence[Path], together: Together) -> Manifest:
    """The commit that processes have agreed on."""
    for found in undamaged(files, directories):
        if found.together == together:
            return found
    raise ValueError(
        f"the store in {str(directories[0])!r} has lost its commit number {together.number} since processes agreed on "
        "it: another run is in its directory. End that, or give this one a directory of its own."
    )


def exists(files: Files, directories: Sequence[Path]) -> bool:
    """Whether there is one, whole or not. ``ValueError`` where it is, and the directories are in another order."""

    def found(directory: Path, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            files.size(directory / name)
            return True
        return False

    if any(found(*place) for place in places(directories)):
        return True
    if lost := [each for each in directories if found(Path(each), NAME) or found(Path(each), COPY)]:
        raise ValueError(
            f"{str(lost[0])!r} has a store's commit, as the first of its directories has, and the last; here they are "
            f"{[str(each) for each in directories]}. Give those that it was made with, in their order."
        )
    return False


def mend(files: Files, directories: Sequence[Path], manifest: Manifest) -> None:
    """Writes anew what of both is not this one; else it might be read one day, and be of slots written over since."""
    for directory, name in places(directories):
        path = directory / name
        try:
            data = files.read(path)
            if data == to_bytes(manifest):
                continue
            from_bytes(data, path)  # whole, and of a commit that was not the last
        except (FileNotFoundError, _Damaged) as error:
            what = error if isinstance(error, _Damaged) else f"the manifest {str(path)!r} is not there"
            warnings.warn(f"{what}. The other one is whole: step {manifest.step}. Check the disk.", stacklevel=2)
        save(files, directory, name, to_bytes(manifest))


def load(files: Files, directories: Sequence[Path]) -> Manifest:
    """That of the store in ``directories``: the second where the first is damaged or lost."""
    found: Manifest | None = None
    wrong: list[ValueError] = []
    for directory, name in places(directories):
        path = directory / name
        try:
            found = found or from_bytes(files.read(path), path)
        except FileNotFoundError:
            wrong.append(ValueError(f"the manifest {str(path)!r} is not there"))
        except _Damaged as error:
            wrong.append(error)
    if found is None and any(isinstance(error, _Damaged) for error in wrong):
        raise ValueError(f"{'; '.join(map(str, wrong))}. {_LOST}")
    if found is None:
        raise ValueError(
            f"{str(directories[0])!r} has no {NAME}: there is no store, or it ended before its first commit. Make one; "
            "nothing was in it."
        )
    manifest = found
    if manifest.directories != len(directories):
        raise ValueError(
            f"the store is striped over {manifest.directories} directories, and {len(directories)} are given: "
            f"{[str(directory) for directory in directories]}. Give those it was made with, in their order."
        )
    return manifest


def check_about(manifest: Manifest, about: Mapping[str, Any], directory: Path) -> None:
    """``ValueError`` where the store is about something else than ``about``, an optimizer or a model say."""
    wanted = plain(about)
    found = manifest.about
    differ = sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))
    if differ:
        listed = "; ".join(f"{key} is {found.get(key)!r} there and {wanted.get(key)!r} here" for key in differ)
        raise ValueError(
            f"the store in {str(directory)!r} is another's: {listed}. Give the directory of this one, or none in which "
            "there is a store yet."
        )


def plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON: tuples are lists. ``TypeError`` where JSON cannot hold it."""
    return json.loads(json.dumps(dict(about)))


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _entries(entries: Sequence[Entry]) -> list[Any]:
    return [
        [entry.path, list(entry.shape), entry.dtype, list(entry.begin), *([list(s)] if (s := entry.full_shape) else [])]
        for entry in entries
    ]


def _read_entries(entries: Sequence[Any]) -> tuple[Entry, ...]:
    return tuple(
        Entry(path, tuple(shape), dtype, tuple(begin), *map(tuple, full_shape))
        for path, shape, dtype, begin, *full_shape in entries
    )


def _version(version: Version) -> list[Any]:
    return [version.slot, list(version.checksums)]


def _read_version(version: Any) -> Version:
    return Version(version[0], tuple(version[1]))
