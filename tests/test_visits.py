"""Tracing an update takes time in proportion to the number of leaves, whatever wraps the optimizer."""

import collections
import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from jax_offload._emit.find import emitted, updates_in

PACKAGE = str(pathlib.Path(jo.__file__).parent)


def clip_adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


CASES = {
    "clip, adamw": clip_adamw,
    "apply_if_finite": lambda: optax.apply_if_finite(clip_adamw(), 3),
    "apply_if_finite, twice": lambda: optax.apply_if_finite(optax.apply_if_finite(clip_adamw(), 2), 3),
    "apply_if_finite, a jit inside": lambda: optax.apply_if_finite(jitted(clip_adamw()), 3),
    "MultiSteps": lambda: optax.MultiSteps(clip_adamw(), 4),
    "MultiSteps that may skip": lambda: optax.MultiSteps(clip_adamw(), 4, should_skip_update_fn=optax.skip_not_finite),
    "multi_transform": lambda: optax.multi_transform({"even": clip_adamw(), "odd": optax.sgd(0.1, 0.9)}, in_turn),
    "masters, bfloat16": lambda: jo.with_master_params(clip_adamw()),
    "8 bits": clip_adamw,
}
OPTIONS = {"8 bits": {"storage": {"mu": "int8", "nu": "uint8"}}}


def in_turn(params):
    return {name: ("even", "odd")[i % 2] for i, name in enumerate(params)}


def jitted(inner):
    return optax.GradientTransformation(inner.init, jax.jit(inner.update))


def model(leaves, dtype=jnp.float32):
    return jax.device_put({f"layers_{i}": jnp.ones((8, 8), dtype) for i in range(leaves)}, jax.devices()[0])


def lines_of_update(tx, params):
    state = tx.init(params)
    return lines(lambda: emitted(jax.make_jaxpr(tx.update)(params, state, params)))


def lines(run):
    """How many lines of this package, and of what cuts equations for it, run, while an update is traced say."""
    count = collections.Counter()

    def in_function(frame, event, arg):
        count[frame.f_code] += event == "line"
        return in_function

    def calls(frame, event, arg):
        code = frame.f_code
        return in_function if code.co_filename.startswith(PACKAGE) or "dce" in code.co_name else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        run()
    finally:
        sys.settrace(before)
    return sum(count.values())


@pytest.mark.long("more optimizers", but=["8 bits"])
@pytest.mark.parametrize("case", CASES)
def test_twice_the_leaves_are_twice_the_work(case):
    tx = jo.offload(CASES[case](), min_bytes=0, **OPTIONS.get(case, {}))
    few, once, twice = (model(n, jnp.bfloat16 if "bfloat16" in case else jnp.float32) for n in (2, 20, 40))
    lines_of_update(tx, few)  # what runs once
    assert lines_of_update(tx, twice) <= 2.05 * lines_of_update(tx, once)


def test_the_table_of_twice_the_leaves_is_twice_the_work():
    tx = jo.offload(clip_adamw(), min_bytes=0)
    few, once, twice = (lines(lambda n=n: str(jo.placement(tx, model(n)))) for n in (2, 20, 40))
    assert few < once < twice <= 2.05 * once


class Gone(list):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_a_plan_goes_through_the_inputs_as_often_for_more_leaves():
    tx = jo.offload(clip_adamw(), min_bytes=0)

    def times(leaves):
        params = model(leaves)
        (found,) = updates_in(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
        inputs = Gone(found.update.program.inputs)
        dataclasses.replace(found.update, program=dataclasses.replace(found.update.program, inputs=inputs)).passes  # noqa: B018
        return inputs.times

    assert times(4) == times(16)


def test_slices_of_a_branch_are_traced_once():
    tx = jo.offload(optax.apply_if_finite(clip_adamw(), 3), min_bytes=0, window=2**20)
    params = model(6)
    update = emitted(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    called = [id(eqn.params["jaxpr"]) for eqn in update.eqns if eqn.params.get("name") == "update_slice"]
    assert (len(set(called)), len(called)) == (1, 6)
