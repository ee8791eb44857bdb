"""``jo.jit``: the update inside of the scan that makes its gradients gives the values of plain optax."""

import itertools

import pytest

import jax_offload as jo
from tests.support.in_scan import WHY, check, model_of
from tests.support.rows import rows
from tests.support.steps import GRADIENTS, LOGS, MODELS, OPTIMIZERS, Case, batch, scans

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
SOME = ["lion", "multi_transform", "inject_hyperparams", "MultiSteps", "adafactor"]
BY_UPDATE = {
    *("scan", "blocks with norms", "axis 2", "flax axis 1", "flax unroll", "unroll 2 of 3", "reverse", "one layer"),
    *("several scans", "nested", "outputs", "regularised", "custom_jvp", "cast inside", "vmap", "no matmul", "wide"),
    *("as many layers as columns", "checkpoint: nothing_saveable", "checkpoint: checkpoint_dots"),
    *("checkpoint: checkpoint_dots_with_no_batch_dims", "checkpoint: all but names", "checkpoint: either"),
    "checkpoint: names on the host",
}
BY_UPDATE_PARAMS = {
    *("adamw", "adamw, schedule and mask", "sgd, momentum", "adagrad", "adan", "inject_hyperparams", "masked"),
    *("zero_nans", "MultiSteps"),
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


@pytest.mark.parametrize(
    "gradients", rows(GRADIENTS, WHY, daily=["scaled", "to float32", "clipped by layer", "behind a barrier"])
)
def test_gradients(gradients):
    check(Case(gradients=gradients, model="bias, embedding, head"))


@pytest.mark.parametrize("log", rows(LOGS, WHY, daily=["norm", "norms of layers", "old parameters"]))
def test_logs(log):
    check(Case(log=log, model="bias, embedding, head"))


@pytest.mark.long("more optimizers", but=["adafactor*"])
@pytest.mark.parametrize(
    ("optimizer", "update"),
    rows(
        itertools.product(OPTIMIZERS, (True, False)),
        WHY,
        daily=lambda name, update: name in SOME and update != (name in BY_UPDATE_PARAMS),
        never=lambda name, update: update == (name in BY_UPDATE_PARAMS),
    ),
)
def test_optimizers(optimizer, update):
    # what is not factored is a leaf of one element
    stays = ("v_row['layers_b']", "v_col['layers_b']", "v['layers_w']") if optimizer == "adafactor" else ()
    check(Case(optimizer=optimizer, model="bias, embedding, head", update=update), stays)


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(formats, marks=() if formats == ("int8", "uint8") else pytest.mark.long(WHY))
        for formats in [("bfloat16", "bfloat16"), ("int8", "uint8"), ("float16", "float16"), ("float8_e4m3fn", "uint8")]
    ],
)
def test_storage(formats):
    check(Case(options=(("storage", tuple(zip(("mu", "nu"), formats, strict=True))),)))


@pytest.mark.parametrize("gradients", rows(["as they are", "to float32"], WHY, daily=["to float32"]))
@pytest.mark.parametrize("update", [False, True], ids=["update_params", "update"])
def test_masters(update, gradients):
    """bfloat16 parameters with float32 masters in the state."""
    check(Case("blocks with norms", gradients=gradients, dtype="bfloat16", update=update))


@pytest.mark.parametrize("update", [False, True], ids=["update_params", "update"])
@pytest.mark.parametrize("fraction", rows([0.75, 0.5, 0.25], WHY, daily=[0.5]))
def test_fraction(fraction, update):
    """What stays on the device is updated in the scan too: no gradient is stacked."""
    case = Case("wide", options=(("fraction", fraction),), update=update)
    check(case)
