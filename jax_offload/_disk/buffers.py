"""Host memory of the disk tier: page-aligned buffers, counted."""

from __future__ import annotations

import mmap
import threading

import numpy as np

from jax_offload._disk.layout import padded


def aligned(nbytes: int) -> np.ndarray:
    """Bytes whose address is a multiple of a page's length, as ``O_DIRECT`` wants it; given back with the last view."""
    if not nbytes:
        return np.empty(0, np.uint8)
    pages = mmap.mmap(-1, padded(nbytes))
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2**21:
        pages.madvise(mmap.MADV_HUGEPAGE)  # a disk is given 512 times fewer pages to pin
    return np.frombuffer(pages, np.uint8)[:nbytes]


def owner(array: np.ndarray) -> np.ndarray:
    """The NumPy array at the end of a chain of views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Buffers:
    """A pool of aligned buffers: what is given back serves the next that needs as much or less.

    ``nbytes`` is what they hold now, in use or not; ``most`` the most that was. Any thread may ask.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._taken: dict[int, np.ndarray] = {}  # by id of the owner, so that any view of a buffer finds it
        self._lock = threading.Lock()
        self.nbytes = 0
        self.most = 0

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer of at least ``nbytes``: the smallest free one that has them, else a new one for a free one."""
        with self._lock:
            fits = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
            if fits:
                chosen = min(fits, key=lambda buffer: buffer.nbytes)
                self._free = [buffer for buffer in self._free if buffer is not chosen]
                self._taken[id(chosen)] = chosen
                return chosen
            if self._free:
                self.nbytes -= self._free.pop().nbytes
            return self._new(nbytes)

    def take_new(self, nbytes: int) -> np.ndarray:
        """A buffer of exactly ``nbytes`` in whole pages, to be kept: no free one is used for it, or dropped."""
        with self._lock:
            return self._new(nbytes)

    def _new(self, nbytes: int) -> np.ndarray:
        made = owner(aligned(max(nbytes, 1)))
        self._taken[id(made)] = made
        self.nbytes += made.nbytes
        self.most = max(self.most, self.nbytes)
        return made

    def give(self, array: np.ndarray) -> bool:
        """Takes back the buffer that ``array`` is a view of. False where that is none of ours, or was given before."""
        with self._lock:
            buffer = self._taken.pop(id(owner(array)), None)
            if buffer is not None:
                self._free.append(buffer)
            return buffer is not None

    def holds(self, array: np.ndarray) -> bool:
        """Whether ``array`` is a view of a buffer that was taken and not given back."""
        with self._lock:
            return id(owner(array)) in self._taken

    def drop_free(self) -> None:
        """Gives free buffers back to the system."""
        with self._lock:
            self.nbytes -= sum(buffer.nbytes for buffer in self._free)
            self._free = []
