"""``jo.jit``: the update inside of the scan that makes its gradients gives the values of plain optax."""

import itertools

import pytest

import jax_offload as jo
from tests.support.in_scan import WHY, check, model_of
from tests.support.rows import rows
from tests.support.steps import MODELS, Case, batch, scans

# Daily what differs in where gradients and parameters stand in the scan; in CI every model once, by update_params or,
# as named, by update; with --everything each by both, and every policy of jax.checkpoint.
DAILY = [
    *("bias, embedding, head", "blocks with norms", "axis 1", "flax axis 0", "unroll 2 of 3", "reverse", "one layer"),
    *("several scans", "nested", "outputs", "numbered", "custom_vjp", "cast inside", "tied", "checkpoint"),
]
POLICIES = [
    *("checkpoint: nothing_saveable", "checkpoint: dots_with_no_batch_dims_saveable", "checkpoint: all but names"),
    "checkpoint: names on the host",
]
BY_UPDATE = {
    *("scan", "blocks with norms", "axis 2", "flax axis 1", "flax unroll", "unroll 2 of 3", "reverse", "one layer"),
    *("several scans", "nested", "outputs", "regularised", "custom_jvp", "cast inside", "vmap", "no matmul", "wide"),
    *("as many layers as columns", "checkpoint: nothing_saveable", "checkpoint: checkpoint_dots"),
    *("checkpoint: checkpoint_dots_with_no_batch_dims", "checkpoint: all but names", "checkpoint: either"),
    "checkpoint: names on the host",
}


@pytest.mark.long("more kinds of steps", but=["blocks with norms*", "several scans*"])
@pytest.mark.oldest("the whole step, with Flax's scans", only=["flax*", "nested*", "checkpoint*"])
@pytest.mark.parametrize(
    ("model", "update"),
    rows(
        itertools.product(MODELS, (True, False)),
        WHY,
        daily=lambda name, update: name in DAILY and update == (name in BY_UPDATE),
        never=lambda name, update: (
            update != (name in BY_UPDATE) or (name.startswith("checkpoint: ") and name not in POLICIES)
        ),
    ),
)
def test_models(model, update):
    check(Case(model, update=update))


@pytest.mark.parametrize("model", ["checkpoint: nothing_saveable", "cast before", "axis 1"])
def test_parameters_are_read_row_by_row(model):
    """Where the scan reads the parameters that it overwrites: as a whole there would be two of them."""
    case, model = Case(model), model_of(model)
    params, tx = model.init(), case.tx()
    (scan,) = scans(jo.jit(case.step(tx, model.loss)), params, tx.init(params), batch())
    (weights,) = (v for v in scan.in_place if v.aval.shape == params["layers"].shape)
    assert weights in {v for each in scan.reread.values() for v in each.slice.inputs}
    assert not any(v is weights for v in scan.scan.consts)
