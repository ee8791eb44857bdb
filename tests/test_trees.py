"""Random pytrees: whatever the containers, shapes and dtypes, an offloaded update is the resident one."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_offload as jo

settings.register_profile(
    "trees", deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trees")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


class Node(flax.struct.PyTreeNode):
    kernel: Any
    name: str = flax.struct.field(pytree_node=False, default="node")


SHAPES = [(), (0,), (1,), (7,), (3, 5), (1, 9), (2, 0, 3), (13, 2), (5, 3, 4)]
leaves = st.builds(
    lambda shape, dtype, seed: jax.device_put(
        np.random.default_rng(seed).normal(size=shape).astype(np.float32), jax.devices()[0]
    ).astype(dtype),
    st.sampled_from(SHAPES),
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    st.integers(0, 99),
)
trees = st.recursive(
    leaves | st.none(),
    lambda children: st.one_of(
        st.dictionaries(st.sampled_from(["w", "b", "layers_2", "layers_10"]), children, max_size=3),
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
        st.builds(Node, children),
    ),
    max_leaves=6,
)
INNER = [optax.adamw(1e-2), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))]


def prefixes(params, values):
    """A prefix tree of the parameters: one value for the whole, or one for every child."""
    children, treedef = jax.tree.flatten(params, is_leaf=lambda x: x is not params)
    if jax.tree.structure(params) == jax.tree.structure(0) or not children:
        return st.just(values[0])
    return st.tuples(*(st.sampled_from(values) for c in children)).map(
        lambda v: jax.tree.unflatten(treedef, [x if c is not None else None for x, c in zip(v, children, strict=True)])
    )


def check(inner, tx, params):
    state = inner.init(params)
    grads = jax.tree.map(lambda p: (p * 2).astype(p.dtype), params)
    expected = jax.jit(inner.update)(grads, state, params)
    offloaded = tx.init(params)
    result = jax.jit(tx.update)(grads, offloaded, params)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    where = [leaf.host for leaf in jo.placement(tx, params).leaves]
    for got in (offloaded, result[1]):
        assert [x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(got)] == where
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        ulp = 1e-6 if a.dtype == jnp.float32 else float(jnp.finfo(a.dtype).eps) if a.dtype.kind not in "iub" else 0
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=ulp, atol=1e-8)
    for leaf in jo.placement(tx, params).leaves:
        assert not leaf.host or (leaf.shape and leaf.nbytes)  # rank-0 and empty leaves stay


@given(trees, st.sampled_from(INNER), st.sampled_from([0.3, 0.5, 1.0]), st.sampled_from([1, 64, None]))
def test_any_tree(params, inner, fraction, window):
    check(inner, jo.offload(inner, fraction=fraction, min_bytes=0, window=window), params)


@given(st.data(), trees)
def test_prefix_trees(data, params):
    fraction = data.draw(prefixes(params, [1.0, 0.5, 0.0]))
    select = data.draw(prefixes(params, [True, False]))
    if isinstance(fraction, float) and fraction == 0.0:
        return
    check(INNER[0], jo.offload(INNER[0], fraction=fraction, select=select, min_bytes=0), params)
