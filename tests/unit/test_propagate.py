"""Facts through equations: which values are made of which, forward and backward, and which sets belong together."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jax_offload._base.jaxprs import without_dead_code
from jax_offload._ir.program import flat
from jax_offload._ir.propagate import NEEDS, groups, needs_of

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


def straight(a, b, c):
    return a * b, jnp.sin(c), 3.0


def branched(a, b, c):
    return lax.cond(a[0] > 0, lambda: (b, c * 2), lambda: (b + 1, c))


def called(a, b, c):
    return jax.jit(lambda x, y: (x + 1, y * 2))(a, b), jax.nn.relu(c)


def looped(a, b, c):
    return lax.fori_loop(0, 3, lambda _, carry: (carry[1], carry[0]), (a, b)), c


@pytest.mark.parametrize("fun", [straight, branched, called])
def test_what_a_result_needs_is_what_is_left_for_it(fun):
    """As jax's own elimination of dead code leaves it, which cuts through branches and calls too."""
    jaxpr = jax.make_jaxpr(fun)(*[jnp.ones(3)] * 3).jaxpr
    needs = NEEDS.through(jaxpr, [1 << k for k in range(3)])
    for k, mask in enumerate(needs):
        used = without_dead_code(jaxpr, [k == i for i in range(len(needs))])[1]
        assert mask == sum(1 << i for i, u in enumerate(used) if u)
    _, readers = needs_of(jaxpr.invars, jaxpr.eqns, jaxpr.outvars, [1 << k for k in range(len(needs))])
    assert [[m >> k & 1 for m in readers] for k in range(len(needs))] == [[m >> i & 1 for i in range(3)] for m in needs]


def test_a_loop_is_one_equation():
    program = flat(jax.make_jaxpr(looped)(*[jnp.ones(3)] * 3))
    env = NEEDS.spread(program.eqns, {v: 1 << k for k, v in enumerate(program.inputs)})
    assert NEEDS.read(env, program.outputs) == [0b11, 0b11, 0b100]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 7), max_size=4), max_size=8))
def test_sets_that_share_a_member_belong_together(sets):
    found = groups([sum(1 << k for k in each) for each in sets])
    together = [{*each} for each in sets if each]
    for _ in sets:  # as found by joining what meets, until nothing does
        together = [set().union(*(other for other in together if other & each)) for each in together]
    want = [next((each for each in together if each & own), None) for own in sets]
    assert [number == 0 for number in found] == [each is None for each in want]
    for i, a in enumerate(want):
        for j, b in enumerate(want):
            assert (found[i] == found[j]) == (a == b)
