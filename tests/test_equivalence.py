"""One table: every optimizer on every path, on one device and divided, for layers of each kind, equals plain optax.

Both forms of the update take turns.
"""

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
FORMS = ("update", "update_params")
TABLE = list(itertools.product(*(range(len(each)) for each in (INNER, MODES, SHARDINGS, MODELS, FORMS))))


def _in_turn(inner, mode, sharding, model, form):
    """Each optimizer on one path, with a sharding, a model and a form that change from one optimizer to the next."""
    n = len(MODES)
    return (inner % n, inner % 3, inner // 3 % 3, inner // n % 2) == (mode, sharding, model, form)


@pytest.mark.parametrize(
    ("inner", "mode", "sharding", "model", "form"),
    rows(TABLE, "equivalence", daily=_in_turn, never=lambda *case: not _in_turn(*case)),
    ids=str,
)
def test_equals_plain_optax(inner, mode, sharding, model, form):
    """Values, types, memory kinds and deletion of three steps, clipped by the global norm."""
    field, name = INNER[inner]
    r = complete({
        field: name, "mesh": SHARDINGS[sharding], "stack": MODELS[model], "bias": True, "embed": "tokens", "head": True,
        "width": 64, "gradients": "clipped", "metrics": ("loss", "norm", "new norm"), "form": FORMS[form],
    })  # fmt: skip
    want = reference(r)
    assert not isinstance(want, Exception), want
    try:
        found = differences(r, MODES[mode], want)
    except Refused:
        pytest.skip("the docs say that this raises an error")
    assert not found, (MODES[mode], odd(r), found[:4])
