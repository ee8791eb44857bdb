"""The checksum of a block notices what disks do."""

import numpy as np
import pytest

from jax_offload._disk.blocks import checksum_of

PAGE = 4096


@pytest.fixture
def block():
    return np.random.default_rng(0).integers(0, 256, 67 * PAGE, np.uint8)  # a piece, and three pages of another


def flipped(block, *bits):
    changed = block.copy()
    for byte, bit in bits:
        changed[byte] ^= 1 << bit
    return changed


def swapped(block, one, other, nbytes):
    changed = block.copy()
    changed[one : one + nbytes], changed[other : other + nbytes] = (
        block[other : other + nbytes],
        block[one : one + nbytes],
    )
    return changed


@pytest.mark.parametrize("byte", [0, 7, 8, PAGE - 1, PAGE, 64 * PAGE - 1, 64 * PAGE, 67 * PAGE - 1])
def test_one_bit(block, byte):
    assert {checksum_of(flipped(block, (byte, bit))) for bit in range(8)}.isdisjoint({checksum_of(block)})


def test_bits_that_make_up_for_each_other_in_a_sum():
    """The same bit of two words, once set and once cleared: in a row, in a column, in different pieces."""
    block = np.zeros(67 * PAGE, np.uint8)
    block[8] = 4
    for other in (16, PAGE - 8, PAGE + 8, 5 * PAGE + 8, 64 * PAGE + 8, 66 * PAGE):
        assert checksum_of(flipped(block, (8, 2), (other, 2))) != checksum_of(block)


@pytest.mark.parametrize("nbytes", [8, 512, PAGE])
@pytest.mark.parametrize("other", [512, PAGE, 3 * PAGE + 512, 64 * PAGE])
def test_what_is_in_another_place(block, nbytes, other):
    if other % nbytes == 0 and nbytes <= other:
        assert checksum_of(swapped(block, 0, other, nbytes)) != checksum_of(block)


def test_what_was_not_written(block):
    for page in (0, 1, 63, 64, 66):
        changed = block.copy()
        changed[page * PAGE : (page + 1) * PAGE] = 0
        assert checksum_of(changed) != checksum_of(block)


def test_bytes_at_any_address(block):
    room = np.zeros(block.nbytes + 1, np.uint8)
    room[1:] = block
    assert checksum_of(room[1:]) == checksum_of(block)
