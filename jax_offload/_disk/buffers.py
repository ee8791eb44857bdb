"""Host memory of the disk tier: page-aligned buffers, counted."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np

from jax_offload._disk.layout import padded


def _pages(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, padded(max(nbytes, 1)))
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2**21:
        pages.madvise(mmap.MADV_HUGEPAGE)  # a disk is given 512 times fewer pages to pin
    return pages


def aligned(nbytes: int) -> np.ndarray:
    """Bytes whose address is a multiple of a page's length, as ``O_DIRECT`` wants it; given back with the last view."""
    return np.frombuffer(_pages(nbytes), np.uint8)[:nbytes]


class Buffers:
    """A pool of aligned buffers: one comes back when nothing has a view of it any more, a jax array say.

    ``nbytes`` is what they hold now, in use or not; ``most`` the most that was. Any thread may ask.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._back: deque[mmap.mmap] = deque()  # without the lock, as an array may end in a thread that has it
        self._lock = threading.Lock()
        self.nbytes = 0
        self.most = 0

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer of at least ``nbytes``: the smallest free one that has them, else a new one for a free one."""
        with self._lock:
            while self._back:
                self._free.append(self._back.popleft())
            fits = [k for k, pages in enumerate(self._free) if len(pages) >= nbytes]
            if fits:
                pages = self._free.pop(min(fits, key=lambda k: len(self._free[k])))
            else:
                if self._free:
                    self.nbytes -= len(self._free.pop())
                pages = _pages(nbytes)
                self.nbytes += len(pages)
                self.most = max(self.most, self.nbytes)
        # The base of every view of it, and of every view of those, as NumPy has it.
        lent = np.frombuffer(pages, np.uint8)
        weakref.finalize(lent, self._back.append, pages).atexit = False
        return lent
