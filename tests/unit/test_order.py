"""The order in which state is taken: as a trace tells it, as rules say, and as paths suggest."""

import jax
import jax.numpy as jnp
import pytest

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
