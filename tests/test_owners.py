"""Each leaf of a state belongs to one parameter, whatever the containers of the parameters and of the state are."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.trees import kinds
from tests.test_optimizers import TABLE, matrices

SIZES = [(11, 13), (17, 19), (23,), (29, 31)]  # the sizes tell the parameters apart
ALIKE = [(11, 13), (11, 13), (11,), (11, 13)]  # and here only the places do


class Moments(NamedTuple):
    """Parameters that are named like the fields of a state."""

    mu: Any
    nu: Any
    count: Any
    inner_state: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b", "rest"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Layer:
    w: Any
    b: Any
    rest: Any


CONTAINERS = {
    "list": list,
    "tuple": tuple,  # as long as some chains
    "nested": lambda x: [(x[0], x[1]), [x[2], x[3]]],
    "pairs": lambda x: ((x[0], x[1]), (x[2], x[3])),
    "dict": lambda x: {"a": x[0], "b": {"a": x[1], "b": x[2]}, "matrix": x[3]},
    "numbers": lambda x: {0: x[0], 1: [x[1], x[2]], 2: x[3]},
    "NamedTuple": lambda x: Moments(*x),
    "dataclass": lambda x: Layer(x[0], x[1], x[2:]),
}


class Slots(NamedTuple):
    """What one parameter has in the state of an optimizer that keeps a node for each."""

    factors: Any
    moment: Any


def slots() -> optax.GradientTransformation:
    """Like Shampoo: a node with a list of matrices for each parameter."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: Slots([jnp.zeros((n, n)) for n in p.shape], jnp.zeros_like(p)), params)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def pair_of_trees() -> optax.GradientTransformation:
    """A state that is a plain tuple."""

    def init(params: Any) -> Any:
        return tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


OPTIMIZERS = {name: entry.make for name, entry in TABLE.items() if not entry.per_example}
OPTIMIZERS |= {
    "slots": slots,
    "pair of trees": pair_of_trees,
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
    for name in OPTIMIZERS.keys() - LEFT_OUT:
        if (name, container) == ("flatten", "NamedTuple"):
            continue  # its one vector stands where parameters of these names would
        dtype = jnp.bfloat16 if name == "masters" else jnp.float32
        leaves = jo.placement(OPTIMIZERS[name](), abstract(container, SIZES, dtype)).leaves
        found = [leaf.owner for leaf in leaves]
        for leaf in leaves:
            owners = [i for i, shape in enumerate(SIZES) if {*shape} & {*leaf.shape}]
            assert [leaf.owner] == (owners or [leaf.owner]), (name, leaf)
            assert owners or leaf.owner is None or not leaf.shape or 1 in leaf.shape, (name, leaf)
        if name != "slots" or container not in ("list", "tuple"):  # lists in lists, which only sizes tell apart
            alike = jo.placement(OPTIMIZERS[name](), abstract(container, ALIKE, dtype)).leaves
            assert [leaf.owner for leaf in alike] == found, name


@pytest.mark.parametrize("container", ["list", "tuple"])
def test_select_moves_the_leaves_of_what_it_names(container):
    params = CONTAINERS[container]([jnp.ones(shape) for shape in SIZES])
    tx = jo.offload(optax.sm3(1e-2), select=r"^1$", min_bytes=0)
    state = tx.init(jax.device_put(params, jax.devices()[0]))
    assert kinds(state) == ["pinned_host" if {*x.shape} & {*SIZES[1]} else "device" for x in jax.tree.leaves(state)]
    assert kinds(jo.abstract_state(tx, params)) == kinds(state)
