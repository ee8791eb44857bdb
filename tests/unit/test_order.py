"""The order of the backward pass: as a trace tells it, as rules say, and as paths suggest."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_offload._base.trace import is_constrained, production_order
from jax_offload._plan.order import ranks

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def order_of(params, **given):
    """The parameters' names, in the order in which their state is taken."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/")
             for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]  # fmt: skip
    places = ranks(params, params, **given)
    return [names[k] for k in sorted(range(len(names)), key=places.__getitem__)]


def tree(*names):
    return dict.fromkeys(names, X)


# ---- production_order


def found(fun, *args):
    """What ``production_order`` says of the results of ``fun`` while it is traced."""
    orders = []

    def traced(*args):
        values = fun(*args)
        orders.append(production_order(values))
        return values

    jax.make_jaxpr(traced)(*args)
    return orders[0]


def earlier_first(by_gradient):
    return sorted(range(len(by_gradient)), key=by_gradient.__getitem__)


def test_a_value_is_born_with_its_equation():
    def fun(x, y):
        first, middle, last = jnp.sin(x), jnp.cos(y), jnp.tanh(x)
        return [last, first, middle]

    assert found(fun, X, X) == [2, 0, 1]


@pytest.mark.parametrize(
    "after",
    [
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x * 0.5,
        lambda x: x / 3.0,
        lambda x: (x * 0.5).astype(jnp.bfloat16) / 7,
        lambda x: x * jnp.float32(2),
        lambda x: jnp.where(jnp.isfinite(x), x, 0),
        lambda x: jnp.clip(x, -1, 1),
        lambda x: jnp.nan_to_num(x),
    ],
    ids=["cast", "times", "divided", "all", "a strong scalar", "where", "clip", "nan_to_num"],
)
def test_casts_and_scales_are_looked_through(after):
    """They come in the order of the tree, once all gradients are there."""

    def fun(x, y):
        early, late = jnp.tanh(x), jnp.sin(y)
        return [after(late), after(early)]

    by_gradient = found(fun, X, X)
    assert by_gradient is not None
    assert earlier_first(by_gradient) == [1, 0]


def test_a_function_that_does_more_is_not_looked_through():
    """One that gives gradients may take parameters of their shape."""
    layer = jax.jit(lambda w: jnp.tanh(w) * 2)
    assert found(lambda x, y: [layer(y), layer(x)], X, X) == [0, 1]


def test_a_traced_scale_is_looked_through():
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    assert found(lambda x, scale: [jnp.sin(x) * scale, jnp.cos(x) * scale], X, scale) == [0, 2]


def test_a_product_of_two_alike_is_not():
    """Which of both it would be is not known."""
    assert found(lambda x, y: [jnp.sin(x) * jnp.cos(y)], X, X) == [2]


def test_a_sum_is_not():
    assert found(lambda x, y: [jnp.sin(x) + 1.0], X, X) == [1]


def test_arguments_and_arrays_have_no_production_order():
    assert found(lambda x: [jnp.sin(x), x], X) is None
    assert production_order([jnp.ones(3)]) is None
    assert production_order([]) is None


def test_gradients_are_produced_last_layer_first():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum()

    by_gradient = found(jax.grad(loss), [X, X, X], X)
    assert by_gradient is not None
    assert earlier_first(by_gradient) == [2, 1, 0]


def test_a_sharding_that_was_said_is_seen_through_casts_too():
    sharding = NamedSharding(jax.make_mesh((1,), ("d",)), PartitionSpec())
    orders = []

    def fun(x):
        said = jax.lax.with_sharding_constraint(jnp.sin(x), sharding)
        orders.extend(map(is_constrained, (said, said.astype(jnp.bfloat16) * 2, said + 1, jnp.cos(x), x)))
        return said

    jax.make_jaxpr(fun)(X)
    assert orders == [True, True, False, False, False]
    assert not is_constrained(jnp.ones(3))


# ---- ranks


def test_without_more_paths_tell_backwards_and_as_people_count():
    assert order_of(tree("embed", "layers_2", "layers_10", "head")) == ["layers_10", "layers_2", "head", "embed"]
    assert order_of(tree("a/2/w", "a/10/w", "a/10/b")) == ["a/10/w", "a/10/b", "a/2/w"]
    assert order_of([X] * 11)[0] == "10"


def test_production_order_goes_before_paths():
    assert order_of(tree("a", "b", "c"), produced=[5, 9, 1]) == ["c", "a", "b"]


def test_produced_at_once_paths_decide():
    assert order_of(tree("a", "b", "c"), produced=[4, 1, 4]) == ["b", "c", "a"]


def test_production_order_of_another_tree_is_not_taken():
    assert order_of(tree("a", "b", "c"), produced=[1, 2]) == ["c", "b", "a"]
    assert order_of(tree("a", "b", "c"), produced=None) == ["c", "b", "a"]


def test_rules_go_before_production_order_and_the_rest_comes_last():
    names = tree("head", "layers_1", "layers_2", "embed", "norm")
    production_order = [0, 4, 3, 2, 1]
    assert order_of(names, order=["embed", "layers"], produced=production_order) == [
        "embed", "layers_2", "layers_1", "norm", "head"
    ]  # fmt: skip


def test_the_first_rule_that_matches_counts():
    assert order_of(tree("a1", "a2", "b1"), order=["2", "a", "b|2"]) == ["a2", "a1", "b1"]


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"order: no parameter's path matches \['heda'\]"):
        ranks(tree("head"), tree("head"), ["heda"])


def test_a_leaf_of_the_state_has_its_parameters_place_then_its_own():
    params = tree("a", "b")
    state = {"count": jax.ShapeDtypeStruct((), jnp.int32), "mu": params, "nu": params}
    # leaves: count, mu/a, mu/b, nu/a, nu/b; what is no parameter's comes last
    assert ranks(state, params) == [2 * 5 + 0, 1 * 5 + 1, 0 * 5 + 2, 1 * 5 + 3, 0 * 5 + 4]
    assert len(set(ranks(state, params))) == 5


def test_no_parameters_no_rules():
    assert ranks({"x": X}, {}, ["anything"]) == [0]
