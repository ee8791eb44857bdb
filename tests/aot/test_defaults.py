"""With nothing but defaults no step is above the resident one, whatever the size of the model (MiB, compiled).

By more than the larger of 1 % and 1 MiB. The whole grid, state from 1 MiB to 24 GiB: ``python -m tests.aot.table
defaults``.
"""

import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.aot.cases import Point, bounded, in_float32, measure_step
from tests.aot.harness import H200, V5E, require
from tests.support.rows import rows

ADAMW = optax.adamw(1e-3)


@pytest.mark.long("compiles more of the same for a chip", but=["stacked and clipped"])
@pytest.mark.parametrize(
    "at",
    rows(
        [
            pytest.param(Point(12, 1536, stacked=True), id="stacked"),  # 651 of 501, before the window was a share
            pytest.param(
                Point(12, 1024, stacked=True, clip=True, update_params=True), id="stacked and clipped"
            ),  # 290 of 240
            pytest.param(Point(2, 4096, stacked=True), id="two layers"),  # 776 of 688
            pytest.param(Point(3, 2048, stacked=True, clip=True), id="three layers"),  # 292 of 256
            pytest.param(Point(2, 4096), id="two unrolled layers"),  # 584 of 480
            pytest.param(Point(8, 128), id="unrolled, 1 MiB of state"),  # 9.4 of 5.0
            pytest.param(Point(16, 256, clip=True, update_params=True), id="unrolled and clipped, 8 MiB"),  # 38 of 23
            pytest.param(Point(32, 768), id="unrolled, 144 MiB"),  # 306 of 296
            pytest.param(Point(12, 4096, stacked=True, devices=8), id="sharded"),  # 580 of 572
            pytest.param(Point(8, 128, stacked=True), id="stacked, 1 MiB of state"),
        ],
        "compiles two steps for an H200",
        daily=["stacked and clipped", "two layers", "unrolled and clipped, 8 MiB", "sharded"],
    ),
)
def test_never_above_resident(at):
    require(H200)
    resident, ours = at.measured(H200, at.inner()), at.measured(H200, jo.offload(at.inner()))
    assert ours.peak <= bounded(resident.peak)
    assert ours.host_arguments == pytest.approx(at.state, rel=0.01)  # not because it stayed
    assert ours.loaded == pytest.approx(ours.host_arguments, abs=0.1)
    assert ours.host_temp == 0


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    ("inner", "kwargs", "dtype"),
    rows(
        [
            pytest.param(optax.lion(1e-3), {}, jnp.float32, id="lion"),
            pytest.param(optax.sgd(1e-2, momentum=0.9), {}, jnp.float32, id="momentum"),
            pytest.param(optax.lamb(1e-3), {}, jnp.float32, id="lamb"),
            pytest.param(in_float32(ADAMW), {}, jnp.bfloat16, id="bfloat16 parameters"),
            pytest.param(ADAMW, {"storage": "bfloat16"}, jnp.float32, id="bfloat16 storage"),
            pytest.param(ADAMW, {"storage": {"mu": "int8", "nu": "uint8"}}, jnp.float32, id="int8 storage"),
        ],
        "compiles two steps for an H200",
        daily=["lamb", "bfloat16 storage"],
    ),
)
def test_other_optimizers_and_formats(inner, kwargs, dtype, stacked):
    require(H200)
    model = {"n_layers": 12, "width": 512, "stacked": stacked, "dtype": dtype, "update_params": True}
    resident, ours = (measure_step(H200, tx, **model) for tx in (inner, jo.offload(inner, **kwargs)))
    assert ours.peak <= bounded(resident.peak)
    assert ours.host_arguments > 0


@pytest.mark.long("compiles more of the same for a chip", but=["stacked"])
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(Point(12, 1024, stacked=True), id="stacked"),
        pytest.param(Point(4, 512), id="unrolled", marks=pytest.mark.long("compiles two steps for a TPU")),
    ],
)
def test_on_a_tpu(at):
    require(V5E)
    resident, ours = at.measured(V5E, ADAMW), at.measured(V5E, jo.offload(ADAMW))
    assert ours.peak <= bounded(resident.peak)
    assert ours.host_temp == 0
