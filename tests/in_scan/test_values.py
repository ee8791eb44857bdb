"""``jo.jit``: the update inside of the scan that makes its gradients gives the values of plain optax."""

import pytest

import jax_offload as jo
from tests.support.in_scan import check, model_of
from tests.support.steps import Case, batch, scans

# What differs in where gradients and parameters stand in the scan; random steps have the rest.
MODELS = [
    *("bias, embedding, head", "axis 1", "flax axis 0", "unroll 2 of 3", "several scans", "outputs", "numbered"),
    *("custom_vjp", "cast inside", "checkpoint", "checkpoint: nothing_saveable", "checkpoint: names on the host"),
]
BY_UPDATE = {"unroll 2 of 3", "several scans", "outputs", "checkpoint: nothing_saveable"}


@pytest.mark.long("more kinds of steps", but=["several scans", "checkpoint"])
@pytest.mark.oldest("the whole step, with Flax's scans", only=["flax*", "checkpoint*"])
@pytest.mark.parametrize("model", MODELS)
def test_models(model):
    check(Case(model, update=model in BY_UPDATE))


@pytest.mark.parametrize("model", ["checkpoint: nothing_saveable", "cast before", "axis 1"])
def test_parameters_are_read_row_by_row(model):
    """Where the scan reads the parameters that it overwrites: as a whole there would be two of them."""
    case, model = Case(model), model_of(model)
    params, tx = model.init(), case.tx()
    (scan,) = scans(jo.jit(case.step(tx, model.loss)), params, tx.init(params), batch())
    (weights,) = (v for v in scan.in_place if v.aval.shape == params["layers"].shape)
    assert weights in {v for each in scan.reread.values() for v in each.slice.inputs}
    assert not any(v is weights for v in scan.scan.consts)
