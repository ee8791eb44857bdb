"""Parameters and gradients in pinned host memory go through the window of the state, compiled for an H200."""

import jax
import optax
import pytest

import jax_offload as jo
from tests.aot.cases import device_sharding
from tests.aot.harness import H200, require
from tests.aot.model import parameters


@pytest.mark.parametrize("stacked", [False, True])
def test_each_byte_crosses_the_link_once(stacked):
    """In: parameters, gradients and both moments; out: what is new. The device holds less than half of one of them."""
    require(H200)
    params = parameters(24, 4096, stacked, device_sharding(H200).with_memory_kind("pinned_host"))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    tx = jo.offload(optax.adamw(1e-3))
    step = jax.jit(lambda params, state, grads: jo.update_params(tx, grads, state, params), donate_argnums=(0, 1))
    report = jo.inspect(step, params, jo.abstract_state(tx, params), params, target=H200)
    assert (report.loaded, report.stored) == (4 * size, 3 * size)
    assert report.peak < size / 2
    assert report.host_temp == 0
    assert not report.errors, report.errors
