"""What every trainer's test needs."""

import jax
import numpy as np
import optax

import jax_offload as jo

STEPS = 12
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def offloaded():
    return jo.offload(INNER, min_bytes=0)


def kinds(state):
    """The memories of a state's arrays. Rank-0 leaves and PRNG keys stay on the device."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}


def assert_same_losses(losses, expected):
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert len(losses) >= STEPS and len(set(losses)) > 1
