"""Random steps: what ``jo.jit`` makes of them is what the plain step does, and what can move into a scan does."""

import functools

import jax
import numpy as np
import pytest

import jax_offload as jo
from tests.support.rows import rows
from tests.support.steps import (
    FAST,
    GRADIENTS,
    IN_SCAN,
    LOGS,
    OPTIMIZERS,
    batch,
    difference,
    random_features,
    random_model,
    training_step,
)

N_STEPS, DAILY, LONG, ALL = 3, 2, 8, 200
TRACED_DAILY = 12
NO_ROWS = ("v_row", "v_col", ".v[")  # of what Adafactor does not factor, a leaf of one element


class Made:
    """A random step, rewritten and plain, and what it begins with."""

    def __init__(self, seed):
        self.features = features = random_features(seed)
        model, inner = random_model(features), OPTIMIZERS[features.optimizer]()
        self.options = {k: dict(v) if isinstance(v, tuple) else v for k, v in features.options}
        self.inner = jo.with_master_params(inner) if features.dtype == "bfloat16" else inner
        self.tx = jo.offload(self.inner, min_bytes=0, **self.options)

        def gradients(grads):
            return functools.reduce(lambda grads, name: GRADIENTS[name](grads), features.gradients, grads)

        self.step_of = lambda tx, update: training_step(tx, model.loss, gradients, LOGS[features.log], update)
        self.step = jo.jit(self.step_of(self.tx, features.update), donate_argnums=(0, 1), compiler_options=FAST)
        self.params = model.init(features.dtype)
        self.state = self.tx.init(self.params)


def stays(features, path):
    """Whether the layers of a leaf are reduced together: a "layer" of ``by_layer`` is what the first axis counts, and
    the scale of a block is along the last one."""
    stack = next(dict(stack) for stack in features.stacks if dict(stack)["name"] in path)
    if "_bias" in path:
        return False
    last = 3 if stack["blocks"] else 2
    clipped = "clipped by layer" in features.gradients and stack["axis"] != 0
    return clipped or ("values_scale" in path and stack["axis"] == last)


@pytest.mark.parametrize("seed", rows(range(ALL), "random steps, traced", daily=lambda k: k < TRACED_DAILY))
def test_what_can_move_does(seed):
    """Every leaf of every scan; and what stays says why."""
    one = Made(seed)
    table = jo.placement(one.step, one.params, one.state, batch())
    layers = {row.path: IN_SCAN in row.streams for row in table.leaves if row.host and "layers" in row.path}
    if one.features.optimizer == "adafactor":
        layers = {path: moved for path, moved in layers.items() if not any(each in path for each in NO_ROWS)}
    expected = {path: not stays(one.features, path) for path in layers}
    assert layers == expected, (one.features, table.stays)
    assert all(expected.values()) or table.stays


def close(got, want, features, times=1):
    """Where something is rounded on the way, a few numbers may end on the other side."""
    rounded = {"through bfloat16", "whole numbers"} & {*features.gradients} or features.options
    casts = features.dtype == "bfloat16" or any(dict(stack)["cast"] for stack in features.stacks)
    rtol = times * (2e-3 if rounded or casts else 1e-5)
    errors = {path: error for path, error in difference(got, want).items() if not error <= rtol}
    assert not errors, (errors, features)


@pytest.mark.parametrize("seed", rows(range(ALL), "random steps", daily=lambda k: k < DAILY, never=lambda k: k >= LONG))
def test_random_step(seed):
    """Each step of the same state, and the parameters after steps of its own."""
    one = Made(seed)
    params, state, features = one.params, one.state, one.features
    if "storage" not in one.options:
        plain, resident = one.step_of(one.inner, True), one.inner.init(params)
    else:  # plain optax has no such state
        plain, resident = one.step_of(one.tx, False), state
    plain = jax.jit(plain, compiler_options=FAST)
    places = jax.tree.map(lambda x: x.sharding, (params, state))

    def placed(*values):
        return jax.device_put(jax.tree.map(np.asarray, values), places)

    own = placed(params, resident)
    for k in range(N_STEPS):
        got, want = one.step(*placed(params, resident), batch(k)), plain(params, resident, batch(k))
        assert jax.tree.map(lambda x: x.sharding, got[:2]) == places
        close(got, want, features)
        params, resident = want[:2]
        own = one.step(*own, batch(k))[:2]
    close(own[0], params, features, times=10)
