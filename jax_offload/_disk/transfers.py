"""Groups between memory and files: their blocks, all at once, in threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from jax_offload._disk.blocks import Opened, read_block, write_block
from jax_offload._disk.buffers import Buffers
from jax_offload._disk.files import Files
from jax_offload._disk.late import LateSource
from jax_offload._disk.layout import ALIGNED, Block, Group
from jax_offload._disk.queues import together

Striped = tuple[Opened, ...]  # a file of each directory


@dataclass(frozen=True)
class Source:
    """Arrays of a group, to be written. Blocks are taken from where they lie if that can be, else put together."""

    pieces: tuple[np.ndarray, ...]  # bytes
    begins: tuple[int, ...]  # of each in the group

    @classmethod
    def of(cls, group: Group, arrays: Sequence[np.ndarray]) -> Source:
        pieces = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)
        return cls(tuple(pieces), group.begins)

    def in_place(self, block: Block, direct: bool) -> np.ndarray | None:
        """A block's bytes where they are, without a copy: of one array, and for ``direct`` at an aligned address."""
        for piece, begin in zip(self.pieces, self.begins, strict=True):
            if begin <= block.begin < begin + piece.nbytes:
                start = block.begin - begin
                found = piece[start : start + block.nbytes]
                complete = found.nbytes == block.nbytes
                return found if complete and not (direct and _address(found) % ALIGNED) else None
        return None

    def gather(self, block: Block, memory: np.ndarray) -> None:
        """Puts a block together; zeros between the arrays."""
        end = block.begin + block.nbytes
        filled = block.begin
        for piece, begin in zip(self.pieces, self.begins, strict=True):
            first, last = max(begin, block.begin), min(begin + piece.nbytes, end)
            if first < last:
                memory[filled - block.begin : first - block.begin] = 0
                memory[first - block.begin : last - block.begin] = piece[first - begin : last - begin]
                filled = last
        memory[filled - block.begin : block.nbytes] = 0


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class Transfers:
    """Reads and writes of groups, in threads of their own. What a block is put together in is taken from ``buffers``:
    one for each thread that writes."""

    def __init__(self, files: Files, reads: Executor, writes: Executor, buffers: Buffers) -> None:
        self._files = files
        self._reads, self._writes = reads, writes
        self._buffers = buffers

    def read(
        self, files: Striped, group: Group, buffer: np.ndarray, checksums: Sequence[int], what: str
    ) -> Future[list[None]]:
        """Fills ``buffer`` with a group."""

        def one(block: Block, checksum: int) -> None:
            memory = buffer[block.begin : block.begin + block.nbytes]
            read_block(self._files, files[block.directory], memory, block.offset, checksum, what)

        jobs = [partial(one, block, checksum) for block, checksum in zip(group.blocks, checksums, strict=True)]
        return together(self._reads, jobs)

    def write(self, files: Striped, group: Group, source: Source | LateSource, what: str) -> Future[list[int]]:
        """Writes a group. The checksums of its blocks."""

        def one(block: Block) -> int:
            file = files[block.directory]
            memory = source.in_place(block, file.direct)
            if memory is not None:
                return write_block(self._files, file, memory, block.offset, what)
            memory = self._buffers.take(block.nbytes)[: block.nbytes]
            source.gather(block, memory)
            return write_block(self._files, file, memory, block.offset, what)

        return together(self._writes, [partial(one, block) for block in group.blocks])
