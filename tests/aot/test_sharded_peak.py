"""Per device, on four of them: peaks (MiB), what crosses the link, and what the devices say to each other."""

import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.aot.cases import bounded, measure_divided, measure_sharded
from tests.aot.harness import H200, require
from tests.aot.zoo import vit

ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
MULTI_STEPS = optax.MultiSteps(ADAMW, 2).gradient_transformation()


@pytest.mark.long("compiles for four devices")
@pytest.mark.parametrize(
    ("stacked", "tx", "update_params", "at_most"),
    [
        (False, ADAMW, True, 2000),  # 1536 parameters
        (False, CLIPPED, True, 2250),  # and 384 gradients
        (True, ADAMW, False, 3800),
        (True, CLIPPED, True, 2400),
        (True, MULTI_STEPS, True, 2450),
    ],
)
def test_zero_1(stacked, tx, update_params, at_most):
    """Gradients are scattered as they are reduced, each device moves its quarter, and what is new is gathered."""
    require(H200)
    m = measure_sharded(H200, jo.offload(tx, shard_over="data"), P(), stacked=stacked, update_params=update_params)
    assert m.peak <= at_most
    quarter = 1152 if tx is MULTI_STEPS else 768
    assert (m.host_arguments, m.loaded, m.stored) == pytest.approx((quarter,) * 3, abs=1)
    assert m.host_temp == 0
    assert m.collectives.get("all-reduce", 0) == (tx is CLIPPED)  # the norm
    # one for each leaf; or one in the scan that makes a layer's gradient, and one for the first chunk and the others
    assert m.collectives["reduce-scatter"] == (1 if stacked else 24)
    assert m.collectives["all-gather"] == (2 if stacked else 24)
    assert "all-to-all" not in m.collectives


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.long("a minute to compile for four devices")
def test_a_divided_transformer_is_not_above_resident():
    """A checkpointed ViT, 4096 tokens per device, under plain ``jit``: among the matmuls 1642 MiB, resident 818."""
    require(H200)
    model = vit(checkpoint=True, mapped=False)
    resident, m = (measure_divided(H200, tx, model, 4096) for tx in (ADAMW, jo.offload(ADAMW, fraction=0.25)))
    assert m.peak <= bounded(resident.peak) and m.host_temp == 0
