"""One table: every optimizer on every path, on one device and divided, for layers of each kind, equals plain optax.

Both forms of the update run beside one run of plain optax.
"""

import functools
import itertools

import pytest

from tests.support.random_steps import FIELDS, MODES, OPTIMIZERS, Refused, complete, differences, odd, reference
from tests.support.rows import rows

WRAPPERS = [("inside", name) for name in dict.fromkeys(FIELDS["inside"]) if name] + [
    ("outside", name) for name in dict.fromkeys(FIELDS["outside"]) if name
]
INNER = [("optimizer", name) for name in OPTIMIZERS] + WRAPPERS
SHARDINGS = (None, "fsdp", "ZeRO-1")
MODELS = ("scan", "unrolled", "pairs")
TABLE = list(itertools.product(*(range(len(each)) for each in (INNER, SHARDINGS, MODELS, MODES))))


def _in_turn(inner, sharding, model, mode=None):
    """Each optimizer with a sharding, a model and a path that change from one optimizer to the next."""
    return (inner % 3, inner // 3 % 3) == (sharding, model) and mode in (None, inner % len(MODES))


def _step(inner, sharding, model):
    field, name = INNER[inner]
    return complete({
        field: name, "mesh": SHARDINGS[sharding], "stack": MODELS[model], "bias": True, "embed": "tokens", "head": True,
        "width": 64, "gradients": "clipped", "metrics": ("loss", "norm", "new norm"),
    })  # fmt: skip


@functools.lru_cache(maxsize=2)
def _plain(*step):
    return reference(_step(*step))


@pytest.mark.parametrize(
    ("inner", "sharding", "model", "mode"),
    rows(TABLE, "equivalence", daily=_in_turn, never=lambda *case: not _in_turn(*case[:3])),
    ids=str,
)
def test_equals_plain_optax(inner, sharding, model, mode):
    """Values, types, memory kinds and deletion of four steps, clipped by the global norm."""
    want = _plain(inner, sharding, model)
    assert not isinstance(want, Exception), want
    for form in FIELDS["form"]:
        r = _step(inner, sharding, model) | {"form": form}
        try:
            found = differences(r, MODES[mode], want)
        except Refused:
            continue
        assert not found, (MODES[mode], odd(r), found[:4])
