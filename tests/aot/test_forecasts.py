"""Estimated peaks, beside those that are compiled for an H200: within 10 % where layers are in one scan."""

import pytest

import jax_offload as jo
from tests.aot.forecasts import mixture, vit
from tests.aot.harness import H200, MIB, require


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (mixture, "jo.jit"),
        pytest.param(mixture, "jax.jit", marks=pytest.mark.exhaustive("minutes to compile")),
        pytest.param(vit, "jax.jit", marks=pytest.mark.exhaustive("minutes to compile")),
        pytest.param(vit, "jo.jit", marks=pytest.mark.exhaustive("minutes to compile")),
    ],
)
def test_models_that_the_rules_were_not_made_on(make, way):
    require(H200)
    model = make()
    option = jo.plan(model.step, *model.args)[way]
    compiled = model.compiled(way)
    assert option.peak / MIB == pytest.approx(compiled.peak, rel=0.1)
    assert option.loaded / MIB == pytest.approx(compiled.loaded, rel=0.01)
    assert option.stored / MIB == pytest.approx(compiled.stored, rel=0.01)
    assert option.host / MIB == pytest.approx(compiled.host_arguments, rel=0.01)
