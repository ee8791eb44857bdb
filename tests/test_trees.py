"""Any pytree of parameters: the state's tree, numbers and placement are right whatever the containers are.

Nested containers, scalars, empty trees, leaves of size zero, mixed dtypes, ``None``, dataclasses and Flax nodes, odd
shapes; and prefix trees of all these for ``fraction`` and ``select``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax
import flax.struct
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import strategies as st

import jax_offload as jo
from tests.support.trees import FAST, assert_same, kinds
from tests.test_optimizers import TABLE, matrices

DEVICE = jax.devices()[0]

hypothesis.settings.register_profile(
    "trees", deadline=None, max_examples=25, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
settings = hypothesis.settings(hypothesis.settings.get_profile("trees"))
few = hypothesis.settings(settings, max_examples=12)


# ---- random parameters ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class Layer:
    w: Any
    b: Any
    name: str = "layer"


@flax.struct.dataclass
class Block:
    attention: Any
    mlp: Any
    heads: int = flax.struct.field(pytree_node=False, default=4)


SHAPES = [(), (1,), (3,), (5,), (2, 3), (7, 1), (1, 1, 1), (4, 2, 3), (0,), (3, 0), (0, 2, 1)]
DTYPES = [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16]
KEYS = ["w", "b", "layers_2", "layers_10", "0", "a/b", "mu", "nu", "[0]", ""]  # some look like parts of paths


def _array(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    return jax.device_put(jnp.asarray(np.random.default_rng(seed).normal(size=shape) + 0.5, dtype), DEVICE)


arrays = st.builds(_array, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 99))
numpy_arrays = st.builds(np.asarray, arrays)


def _containers(children: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(
        st.dictionaries(st.sampled_from(KEYS), children, max_size=4),
        st.dictionaries(st.integers(0, 12), children, max_size=3),
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
        st.builds(Layer, children, children),
        st.builds(Block, children, children),
        st.dictionaries(st.sampled_from(KEYS), children, max_size=3).map(FrozenDict),
        st.dictionaries(st.sampled_from(["kernel", "bias"]), arrays.map(nnx.Param), max_size=2).map(nnx.State),
    )


trees = st.recursive(st.one_of(arrays, arrays, arrays, numpy_arrays, st.none()), _containers, max_leaves=8).filter(
    lambda params: params is not None  # which optax takes for parameters that were forgotten
)


def prefixes(draw: Any, params: Any, values: st.SearchStrategy) -> Any:
    """A prefix tree of ``params`` with random ``values`` as leaves."""
    return jax.tree.map(lambda _: draw(values), params, is_leaf=lambda _: draw(st.integers(0, 2)) == 0)


OPTIMIZERS = {name: TABLE[name].make for name in ("adamw", "factored", "clip", "MultiSteps", "masked")}


def gradients(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.asarray(0.3 * p + 0.1, p.dtype), params)


def assert_as_resident(inner: Any, tx: Any, params: Any, *, jitted: bool = False) -> Any:
    """Two updates from init, compared with the resident optimizer; returns the state, checked to be placed."""
    grads = gradients(params)
    arrays = jax.tree.map(jnp.asarray, params)  # where jax is called with numpy's scalars, numpy's types win
    # eagerly, a 16-bit intermediate is rounded where it is stored and not where XLA fuses over it
    narrow = any(x.dtype.itemsize < 4 for x in jax.tree.leaves(arrays))
    tolerance = 4e-3 if narrow and not jitted else 1e-6
    resident, state = jax.device_put(inner.init(params), DEVICE), tx.init(params)
    assert_same(state, resident, "init")
    host = ["pinned_host" if leaf.host else "device" for leaf in jo.placement(tx, params).leaves]
    assert kinds(state) == host
    update, plain = tx.update, inner.update
    if jitted:
        update, plain = (jax.jit(f, compiler_options=FAST) for f in (update, plain))
    for i in range(2):
        want, resident = plain(grads, resident, arrays)
        got, state = update(grads, state, params)
        assert_same(got, want, f"updates {i}", tolerance)
        assert_same(state, resident, f"state {i}", tolerance)
        assert kinds(state) == host
        assert "pinned_host" not in kinds(got)
    assert_same(jo.to_host(tx, jo.to_device(state), params), state, "there and back")
    return state


# ---- tests -----------------------------------------------------------------------------------------------------------


@few
@hypothesis.given(
    params=trees, name=st.sampled_from(list(OPTIMIZERS)), window=st.sampled_from([None, 1, 40]), data=st.data()
)
def test_random_trees_jitted(params, name, window, data):
    """With shares for any prefix of the tree: 1.0 moves all that may move, and 0.0 nothing."""
    inner, fraction = OPTIMIZERS[name](), prefixes(data.draw, params, st.sampled_from([0.0, 0.5, 1.0]))
    tx = jo.offload(inner, min_bytes=0, window=window, fraction=fraction)
    assert_as_resident(inner, tx, params, jitted=True)
    shares = jax.tree.leaves(jax.tree.broadcast(fraction, params))
    for leaf in jo.placement(tx, params).leaves:
        if leaf.owner is not None and leaf.nbytes and leaf.shape and shares[leaf.owner] != 0.5:
            assert leaf.host == (shares[leaf.owner] == 1.0), leaf


SINGLE = [_array((3, 2), jnp.float32, 0), [], {"a": None, "b": []}, Pair((), {}), Layer(None, None)]


@pytest.mark.parametrize("params", SINGLE, ids=lambda params: type(params).__name__)
@pytest.mark.parametrize("name", ["factored", "MultiSteps"])
def test_no_leaves_and_one(name, params):
    """The path of a single leaf is empty: a state leaf belongs to it all the same."""
    inner = OPTIMIZERS[name]()
    for options in {}, {"fraction": 0.5}, {"select": lambda path, leaf: True}, {"select": True}, {"window": 1}:
        state = assert_as_resident(inner, jo.offload(inner, min_bytes=0, **options), params)
        assert not isinstance(params, jax.Array) or "fraction" in options or "pinned_host" in kinds(state)


def test_python_scalars():
    params = {"temperature": 0.5, "w": _array((3,), jnp.float32, 0)}
    inner, grads = optax.adam(1e-2), jax.tree.map(lambda p: 0.3 * p, params)
    tx = jo.offload(inner, min_bytes=0)
    state = tx.init(params)
    assert kinds(state) == ["device", "device", "pinned_host", "device", "pinned_host"]
    assert_same(tx.update(grads, state, params), inner.update(grads, inner.init(params), params), "python scalars")


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node whose children have the same key."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("w"), x) for x in self.children], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("other", [(3, 2), (3,)])
def test_two_leaves_of_one_path(other, disk):
    """In memory they are told apart by their places; files know leaves by their paths."""
    params, inner = Twins(_array((3, 2), jnp.float32, 0), _array(other, jnp.float32, 1)), optax.adam(1e-2)
    assert_as_resident(inner, jo.offload(inner, min_bytes=0), params)
    with pytest.raises(ValueError, match=r"disk: 2 leaves of the state have the path \[0\].mu.w"):
        jo.offload(inner, min_bytes=0, disk=disk).init(params)


# ---- each leaf of a state belongs to one parameter, whatever the containers of both are


SIZES = [(11, 13), (17, 19), (23,), (29, 31)]  # the sizes tell the parameters apart
ALIKE = [(11, 13), (11, 13), (11,), (11, 13)]  # and here only the places do


class Moments(NamedTuple):
    """Parameters that are named like the fields of a state."""

    mu: Any
    nu: Any
    count: Any
    inner_state: Any


CONTAINERS = {
    "list": list,
    "tuple": tuple,  # as long as some chains
    "nested": lambda x: [(x[0], x[1]), [x[2], x[3]]],
    "pairs": lambda x: ((x[0], x[1]), (x[2], x[3])),
    "dict": lambda x: {"a": x[0], "b": {"a": x[1], "b": x[2]}, "matrix": x[3]},
    "numbers": lambda x: {0: x[0], 1: [x[1], x[2]], 2: x[3]},
    "NamedTuple": lambda x: Moments(*x),
    "dataclass": lambda x: Layer(x[0], x[1:]),
}


class Slots(NamedTuple):
    """What one parameter has in the state of an optimizer that keeps a node for each."""

    factors: Any
    moment: Any


def keeping(init: Any) -> Any:
    """Return an optimizer that keeps its state and does nothing else."""
    return lambda: optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


WITH_LEAVES = {name: entry.make for name, entry in TABLE.items() if not entry.per_example}
WITH_LEAVES |= {
    "slots": keeping(  # as in Shampoo, a node with a list of matrices for each parameter
        lambda params: jax.tree.map(lambda p: Slots([jnp.zeros((n, n)) for n in p.shape], jnp.zeros_like(p)), params)
    ),
    "pair of trees": keeping(lambda params: tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))),
    "chain of two": lambda: optax.chain(optax.scale_by_sm3(), optax.trace(0.9)),
    "chain of four": lambda: optax.chain(optax.trace(0.9), optax.scale_by_sm3(), optax.ema(0.9), optax.scale(1.0)),
    "mu alone": lambda: optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.scale(1.0)),
    "masked sm3": lambda: optax.masked(optax.sm3(1e-2), matrices),
    "labels like parameters": lambda: optax.partition(
        {"a": optax.sm3(1e-2), "b": optax.adam(1e-2)},
        lambda params: jax.tree.map(lambda p: "b" if np.ndim(p) > 1 else "a", params),
    ),
    "stored sm3": lambda: jo.offload(optax.sm3(1e-2), storage="bfloat16", min_bytes=0),
    "masters": lambda: jo.with_master_params(optax.sm3(1e-2), jnp.float32),
}
# what cannot be given any tree of parameters
LEFT_OUT = {"lookahead", "scale_by_muon", "selective_transform", "split_real_and_imaginary"}


def abstract(container: str, sizes: list[tuple[int, ...]], dtype: Any) -> Any:
    return CONTAINERS[container]([jax.ShapeDtypeStruct(shape, dtype) for shape in sizes])


@pytest.mark.parametrize("container", CONTAINERS)
def test_whose_a_leaf_is(container):
    """As its sizes tell; and the same if all parameters have the same shape."""
    for name in WITH_LEAVES.keys() - LEFT_OUT:
        if (name, container) == ("flatten", "NamedTuple"):
            continue  # its one vector stands where parameters of these names would
        dtype = jnp.bfloat16 if name == "masters" else jnp.float32
        leaves = jo.placement(WITH_LEAVES[name](), abstract(container, SIZES, dtype)).leaves
        found = [leaf.owner for leaf in leaves]
        for leaf in leaves:
            owners = [i for i, shape in enumerate(SIZES) if {*shape} & {*leaf.shape}]
            assert [leaf.owner] == (owners or [leaf.owner]), (name, leaf)
            assert owners or leaf.owner is None or not leaf.shape or 1 in leaf.shape, (name, leaf)
        if name != "slots" or container not in ("list", "tuple"):  # lists in lists, which only sizes tell apart
            alike = jo.placement(WITH_LEAVES[name](), abstract(container, ALIKE, dtype)).leaves
            assert [leaf.owner for leaf in alike] == found, name
