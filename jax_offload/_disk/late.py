"""Arrays that are made when they are written, a few at a time: together they may be larger than memory."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_offload._disk.layout import Block, Group


@dataclass(frozen=True)
class Late:
    """``nbytes`` that ``make`` gives, in one axis; in the thread that writes them."""

    nbytes: int
    make: Callable[[], np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.nbytes,)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8)


class LateSource:
    """Late arrays of a group, each held from the first block that has some of it to the last. When the last one is
    written nothing of them is held, so that whoever waits for that may give them away."""

    def __init__(self, group: Group, arrays: Sequence[Late]) -> None:
        self._begins, starts = group.begins, [block.begin for block in group.blocks]
        self._arrays = [
            _Held(array, begin, bisect_left(starts, begin + array.nbytes) - bisect_right(starts, begin) + 1)
            for array, begin in zip(arrays, group.begins, strict=True)
        ]

    def in_place(self, block: Block, direct: bool) -> None:
        """None lies where it stays."""

    def gather(self, block: Block, memory: np.ndarray) -> None:
        """Puts a block together; zeros between the arrays."""
        memory[: block.nbytes] = 0
        end = block.begin + block.nbytes
        for each in self._arrays[max(0, bisect_right(self._begins, block.begin) - 1) : bisect_left(self._begins, end)]:
            if max(block.begin, each.begin) < min(end, each.begin + each.nbytes):
                each.copy(block, memory)


class _Held:
    def __init__(self, array: Late, begin: int, blocks: int) -> None:
        self.begin, self.nbytes = begin, array.nbytes
        self._make, self._blocks = array.make, blocks
        self._lock, self._values = threading.Lock(), list[np.ndarray]()

    def copy(self, block: Block, memory: np.ndarray) -> None:
        """What a block has of it."""
        with self._lock:
            if not self._values:
                self._values.append(self._make())
            (values,) = self._values
        first, last = max(self.begin, block.begin), min(self.begin + self.nbytes, block.begin + block.nbytes)
        memory[first - block.begin : last - block.begin] = values[first - self.begin : last - self.begin]
        del values
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._values.clear()
