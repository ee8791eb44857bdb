"""One table: every optimizer on every path, on one device and divided, for layers of each kind, equals plain optax."""

import contextlib
import functools
import itertools

import pytest

from tests.support.random_steps import FIELDS, MODES, OPTIMIZERS, Refused, complete, differences, odd, reference

WRAPPERS = [("inside", name) for name in dict.fromkeys(FIELDS["inside"]) if name] + [
    ("outside", name) for name in dict.fromkeys(FIELDS["outside"]) if name
]
WRAPPERS += [(where, clip) for clip in ("adaptive clip", "clip by block") for where in ("inside", "outside")]
INNER = [("optimizer", name) for name in OPTIMIZERS] + WRAPPERS
SHARDINGS = (None, "fsdp", "ZeRO-1")
MODELS = ("scan", "unrolled", "pairs")
# Each optimizer on every path, with a sharding, a model and a form that change from one case to the next.
DAILY, OLDEST = pytest.mark.daily("a slice of the table"), pytest.mark.oldest("a slice of the table")
CASES = [
    pytest.param(
        inner, mode, marks=[DAILY] * (inner % 4 == 0 and mode == inner % len(MODES)) + [OLDEST] * (inner % 12 == 0)
    )
    for inner, mode in itertools.product(range(len(INNER)), range(len(MODES)))
]


def _step(inner):
    field, name = INNER[inner]
    return complete({
        field: name, "mesh": SHARDINGS[inner % 3], "stack": MODELS[inner // 3 % 3], "bias": True, "embed": "tokens",
        "head": True, "width": 64, "gradients": "clipped", "metrics": ("loss", "norm", "new norm"),
    })  # fmt: skip


@functools.lru_cache(maxsize=2)
def _plain(inner):
    return reference(_step(inner))


@pytest.mark.parametrize(("inner", "mode"), CASES)
def test_equals_plain_optax(inner, mode):
    """Values, types, memory kinds and deletion of four steps, clipped by the global norm."""
    want = _plain(inner)
    assert not isinstance(want, Exception), want
    r = _step(inner) | {"form": FIELDS["form"][(inner + mode) % 2]}
    with contextlib.suppress(Refused):
        found = differences(r, MODES[mode], want)
        assert not found, (MODES[mode], odd(r), found[:4])
