"""``jo.jit``: what an update must move past, every model, optimizer and change of gradients, by ``update`` and without.

Traced only, so that none is left out. What comes of it is in ``test_values``, for 20 steps and fewer of them.
"""

import itertools

import pytest

import jax_offload as jo
from tests.support.in_scan import MODEL, assert_moved, model_of
from tests.support.steps import GRADIENTS, LOGS, MODELS, OPTIMIZERS, Case, batch

BY_UPDATE = pytest.param(True, marks=pytest.mark.long("as by update_params"), id="update")
UPDATE = pytest.mark.parametrize("update", [pytest.param(False, id="update_params"), BY_UPDATE])
# factored moments of what is not factored: a leaf of one element
NO_ROWS = {"adafactor": ("v_row['layers_b']", "v_col['layers_b']", "v['layers_w']")}


def assert_moves(case, stays=()):
    model, tx = model_of(case.model), case.tx()
    params = model.init(case.dtype)
    step = jo.jit(case.step(tx, model.loss), donate_argnums=(0, 1))
    assert_moved(step, params, tx.init(params), batch(0, model.width), stays=stays)


@UPDATE
@pytest.mark.parametrize("model", MODELS)
def test_models(model, update):
    assert_moves(Case(model, update=update))


@UPDATE
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer, update):
    assert_moves(Case(MODEL, optimizer=optimizer, update=update), NO_ROWS.get(optimizer, ()))


@UPDATE
@pytest.mark.parametrize(
    ("gradients", "log"), [*itertools.product(GRADIENTS, ["nothing"]), *itertools.product(["as they are"], LOGS)]
)
def test_gradients_and_what_is_logged(gradients, log, update):
    assert_moves(Case(MODEL, gradients, log=log, update=update))
