"""Estimated peaks, beside those that are compiled for an H200: within 10 % where layers are in one scan."""

import re
from pathlib import Path

import pytest

import jax_offload as jo
from tests.aot.forecasts import mixture, sharded, vit
from tests.aot.frozen import frozen
from tests.aot.harness import H200, MIB, require
from tests.aot.unseen import unseen


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
    option = jo.plan(model.step, *model.args, chip=H200)[way]
    compiled = model.compiled(way)
    time = compiled.timeline(H200)
    assert option.exposed == pytest.approx(time.exposed, abs=0.05 * time.step)
    assert option.peak / MIB == pytest.approx(compiled.peak, rel=0.1)
    assert option.loaded / MIB == pytest.approx(compiled.loaded, rel=0.01)
    assert option.stored / MIB == pytest.approx(compiled.stored, rel=0.01)
    assert option.host / MIB == pytest.approx(compiled.host_arguments, rel=0.01)


# What docs/estimates.md publishes and gives reasons for: predicted added time less the simulated one, of the step
TIMES = {
    ("U-Net", "jax.jit"): -0.29,
    ("encoder and decoder, masters", "jo.jit"): -0.11,
    ("GPT 1.3B, unrolled", "jax.jit"): -0.10,
    ("GPT 1.3B, 6 scans", "jo.jit"): 0.06,
    ("DiT-XL/2", "jo.jit"): -0.08,
    ("24×4096², stacked, clipped", "gradients too"): -0.06,
    ("v5e: ViT-H/14", "jo.jit"): -0.11,
    ("4 devices, 24×4096², FSDP, unrolled", "jo.jit"): -0.07,
}
# and the estimated peak, of the compiled one
PEAKS = {
    ("Llama 1.1B, masters", "jax.jit"): 0.82,
    ("Llama 1.1B, masters", "jo.jit"): 0.87,
    ("v5e: 24×4096², stacked", "jax.jit"): 1.35,
    ("v5e: 24×4096², stacked", "jo.jit"): 1.49,
    ("v5e: ViT-H/14", "jax.jit"): 0.91,
}


@pytest.mark.exhaustive("minutes to compile")
@pytest.mark.parametrize("way", ["jax.jit", "jo.jit"])
@pytest.mark.parametrize("model", [*unseen(), *frozen()], ids=lambda model: model.name)
def test_models_unlike_those(model, way):
    """Time within 5 % of the step and peaks within 10 % of their range, or as far off as the page says."""
    require(H200)
    option, compiled = jo.plan(model.step, *model.args, chip=H200)[way], model.compiled(way)
    low, high = (n / MIB / PEAKS.get((model.name, way), 1.0) for n in option.peak_range)
    assert 0.9 * low <= compiled.peak <= 1.1 * high
    time = compiled.timeline(H200)
    assert (option.exposed - time.exposed) / time.step == pytest.approx(TIMES.get((model.name, way), 0.0), abs=0.05)
    assert option.loaded / MIB == pytest.approx(compiled.loaded, rel=0.01)


def test_the_page_has_no_other_misses():
    """Every row of the table is within 5 points of the step, and not marked as missed, but for those named above."""
    row = re.compile(r"\| (.+), \d+ tokens \| `(.+)` \| .* \| .* \| (.*) \| (\d+)% \| (\d+)% \|")
    rows = row.findall((Path(__file__).parents[2] / "docs/estimates.md").read_text())
    assert len(rows) > 50
    assert {(name, way) for name, way, _, a, b in rows if abs(int(a) - int(b)) > 5} == {*TIMES}
    assert {(name, way) for name, way, miss, _, _ in rows if "missed" in miss} == {*PEAKS}


@pytest.mark.parametrize("way", [pytest.param("jax.jit", marks=pytest.mark.long("as jo.jit's")), "jo.jit"])
def test_on_four_devices(way):
    """Per device. Layers in one scan within 10 %; others within the range, as XLA gathers ahead what it wants to."""
    require(H200)
    for model in sharded(8, 2048, 256):
        row, compiled = jo.plan(model.step, *model.args)[way], model.compiled(way)
        low, high = (n / MIB for n in row.peak_range)
        slack = 0.1 if low == high else 0.0
        assert (1 - slack) * low <= compiled.peak <= (1 + slack) * high, model.name
        assert (low == high) is ("stacked" in model.name)
        assert (row.loaded / MIB, row.stored / MIB) == pytest.approx((compiled.loaded, compiled.stored), rel=0.01)
        assert row.host / MIB == pytest.approx(compiled.host_arguments, rel=0.01)
