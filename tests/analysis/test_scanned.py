"""What an iteration of a scan hides: a loop in it runs whole, whatever of it is needed."""

import jax
import jax.numpy as jnp
import pytest

import jax_offload as jo
from jax_offload._analysis.scanned import _needed
from jax_offload._analysis.work import seconds

H200 = jo.chip("h200")
X = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def of(fun):
    return jax.make_jaxpr(fun)(X).jaxpr


def test_a_loop_is_not_taken_apart():
    """Of two carried values the first is asked for, and each is a matmul in each of eight iterations."""

    def both(x):
        return jax.lax.scan(lambda c, _: ((c[0] @ c[0], c[1] @ c[1]), None), (x, x), None, length=8)[0]

    jaxpr = of(both)
    alone = seconds(of(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=8)[0]), H200)
    assert seconds(jaxpr, H200) == pytest.approx(2 * alone, rel=0.05)
    for output in 0, 1:
        assert _needed(jaxpr, output, H200) == pytest.approx(2 * alone, rel=0.05)


def test_a_loop_that_is_not_needed_does_not_count():
    def apart(x):
        looped, _ = jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=8)
        return x @ x, looped

    jaxpr, once = of(apart), seconds(of(lambda x: x @ x), H200)
    assert _needed(jaxpr, 0, H200) == pytest.approx(once)
    assert _needed(jaxpr, 1, H200) == pytest.approx(8 * once, rel=0.05)  # and a copy of what it begins with
