"""Random steps: what ``jo.jit`` makes of them is what the plain step does, whether or not the update moves."""

import jax
import numpy as np
import pytest

import jax_offload as jo
from tests.support.rows import rows
from tests.support.steps import (
    FAST,
    GRADIENTS,
    LOGS,
    OPTIMIZERS,
    batch,
    difference,
    moved,
    random_features,
    random_model,
    training_step,
)

N_STEPS, DAILY, LONG, ALL = 2, 2, 8, 200


def close(got, want, features):
    """Where something is rounded on the way, a few numbers may end on the other side."""
    rounded = {"through bfloat16", "whole numbers"} & {*features.gradients} or features.options
    casts = features.dtype == "bfloat16" or any(dict(stack)["cast"] for stack in features.stacks)
    rtol = 2e-3 if rounded or casts else 1e-5
    errors = {path: error for path, error in difference(got, want).items() if not error <= rtol}
    assert not errors, (errors, features)


@pytest.mark.parametrize("seed", rows(range(ALL), "random steps", daily=lambda k: k < DAILY, never=lambda k: k >= LONG))
def test_random_step(seed):
    features = random_features(seed)
    model, inner = random_model(features), OPTIMIZERS[features.optimizer]()
    options = {k: dict(v) if isinstance(v, tuple) else v for k, v in features.options}
    inner = jo.with_master_params(inner) if features.dtype == "bfloat16" else inner
    tx = jo.offload(inner, min_bytes=0, **options)

    def gradients(grads):
        for name in features.gradients:
            grads = GRADIENTS[name](grads)
        return grads

    def step_of(tx, update):
        return training_step(tx, model.loss, gradients, LOGS[features.log], update)

    params = model.init(features.dtype)
    state = tx.init(params)
    step = jo.jit(step_of(tx, features.update), donate_argnums=(0, 1), compiler_options=FAST)
    if "storage" not in options:
        plain, resident = step_of(inner, True), inner.init(params)
    else:  # plain optax has no such state
        plain, resident = step_of(tx, False), state
    plain = jax.jit(plain, compiler_options=FAST)
    assert any(moved(step, params, state, batch()).values()) or features.options, features
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    for k in range(N_STEPS):
        given = jax.device_put(jax.tree.map(np.asarray, (params, resident)), places)
        got, want = step(*given, batch(k)), plain(params, resident, batch(k))
        assert jax.tree.map(lambda x: x.sharding, got[:2]) == places
        close(got, want, features)
        params, resident = want[:2]
