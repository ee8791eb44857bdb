"""Where pieces of an update wait in an unrolled step: a place whose leaves are few goes with the next."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jax_offload._plan.interleave import _Spot, _Spots


def spots(*sizes):
    found = _Spots()
    for k, size in enumerate(sizes):
        leaf: Any = SimpleNamespace(aval=jax.ShapeDtypeStruct((size,), np.uint8))
        found.add(10 * k, _Spot(k, [leaf] if size else [], []))
    return found


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ((8, 8, 8, 8), [[0], [1], [2], [3]]),
        ((112, 25, 225, 112, 25, 225), [[0, 1], [2], [3, 4], [5]]),  # a U-Net's block
        ((56, 56, 6, 56, 56, 6), [[0], [1, 2], [3], [4, 5]]),
        ((4, 4, 1, 3, 4, 4, 1, 3), [[k] for k in range(8)]),  # o, beside up and beside qkv, is not small enough
        ((8, 0, 1, 8, 8), [[1], [0, 2], [3], [4]]),  # what moves nothing stays where it is
        ((1, 8), [[0], [1]]),  # nothing around is as large as both
        ((1,), [[0]]),
        ((), []),
    ],
)
def test_a_small_place_is_put_off_to_the_next(sizes, together):
    found = spots(*sizes)
    found.even_out()
    assert [found.pieces(at) for at in sorted(found.at)] == together
