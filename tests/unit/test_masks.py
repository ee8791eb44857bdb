"""Sets of small numbers as bits: which of them belong together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_offload._ir.propagate import groups

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ([], []),
        ([0b001, 0b010, 0b100], [1, 2, 3]),
        ([0b01, 0, 0b10], [1, 0, 2]),
        ([0b01, 0b10, 0b11], [1, 1, 1]),  # the last joins two that were known
        ([0b0001, 0b0010, 0b0100, 0b1010, 0b1100], [1, 2, 2, 2, 2]),
    ],
)
def test_what_belongs_together(masks, expected):
    assert groups(masks) == expected


@given(st.lists(st.integers(0, 2**7 - 1), max_size=12))
def test_as_found_by_trying_all_pairs(masks):
    together = {i: {i} for i, mask in enumerate(masks) if mask}
    for i in together:
        for j in together:
            if masks[i] & masks[j]:
                joined = together[i] | together[j]
                for k in joined:
                    together[k] = joined
    found = groups(masks)
    assert [bool(n) for n in found] == [bool(mask) for mask in masks]
    for i in together:
        assert {j for j in together if found[j] == found[i]} == together[i]
