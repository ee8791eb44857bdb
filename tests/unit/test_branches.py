"""Scalars out of branches: a ``cond`` of scalars alone ahead of one that needs leaves on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_offload._base.jaxprs import branches_of, jax_fun
from jax_offload._ir.conds import scalars_hoisted
from tests.unit._programs import device, host, load, program_of, values_of

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

SIZES = host(4, 3), device(4, 3), device()
INDEX = device(dtype=jnp.int32)


def hoisted(fun, *args):
    """The program before and after, and the ``cond``s of the latter."""
    program = program_of(fun, INDEX, *args)
    found = scalars_hoisted(program)
    return program, found, [eqn for eqn in found.eqns if eqn.primitive.name == "cond"]


def assert_as_before(program, found):
    """In every branch."""
    _, *values = values_of(program)
    for index in range(2):
        index = jnp.int32(index)
        for x, y in zip(jax_fun(found.closed)(index, *values), jax_fun(program.closed)(index, *values), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def norm(*arrays):
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in arrays))


def names_of(cond, branch=1):
    return [eqn.primitive.name for eqn in branches_of(cond)[branch].jaxpr.eqns]


def test_a_norm_of_what_is_loaded():
    """Each leaf's part of it, what is made of these, and what uses it: each takes the ones before as operands."""

    def clipped(index, m, n, g):
        m, n = load(m), load(n)

        def scaled():
            scale = 1 / norm(m, n, g)
            return m * scale, n * scale

        return lax.switch(index, [lambda: (m, n), scaled])

    program, found, (parts, total, rest) = hoisted(clipped, host(4, 3), host(5), device(7))
    assert {v.aval.shape for v in (*parts.outvars, *total.outvars)} == {()}
    assert {*parts.outvars} <= {*total.invars} and {*total.outvars} <= {*rest.invars}
    assert names_of(parts).count("dot_general") == 3 and "sqrt" not in names_of(parts)
    assert "sqrt" in names_of(total) and names_of(rest) == ["mul", "mul"]
    assert names_of(parts, 0) == names_of(total, 0) == []  # the other branch has zeros for them
    assert_as_before(program, found)


def test_a_scalar_of_what_is_on_the_device():
    """It needs nothing that is to be loaded, so what is made of such scalars is hoisted with them."""

    def scaled(index, m, g, rate):
        m = load(m)
        return lax.switch(index, [lambda: m, lambda: m * (rate / (1 + norm(g)))])

    program, found, (ahead, rest) = hoisted(scaled, *SIZES)
    assert [v.aval.shape for v in ahead.outvars] == [()]
    assert names_of(ahead)[-1] == "div" and names_of(rest) == ["mul"]
    assert_as_before(program, found)


def test_a_scalar_of_scalars_stays():
    """It is as cheap in every slice as the number itself."""
    fun = lambda index, m, g, rate: lax.switch(index, [lambda m: m, lambda m: m * jnp.sqrt(rate)], load(m))  # noqa: E731
    program, found, conds = hoisted(fun, *SIZES)
    assert len(conds) == 1 and found.eqns == list(program.eqns)


def test_a_scalar_that_needs_another_of_what_is_loaded():
    """Both are ahead of what uses them, but the second is not known where the first is: its leaves are loaded again."""

    def twice(index, m, n):
        m, n = load(m), load(n)

        def normed():
            scaled = n / norm(m)
            return scaled / norm(scaled)

        return lax.switch(index, [lambda: n, normed])

    program, found, (first, *more, rest) = hoisted(twice, host(4, 3), host(5))
    assert names_of(first).count("dot_general") == 1 and "sqrt" not in names_of(first)
    assert {*first.outvars} <= {*more[0].invars} and {*more[-1].outvars} <= {*rest.invars}
    assert names_of(rest) == ["div", "div"]
    assert_as_before(program, found)


def test_a_second_norm_is_in_parts_too():
    """What is made of a part waits for it: one ``cond`` with the parts of the second norm and the norm itself would
    have all leaves at once."""

    def twice(index, m, n):
        m, n = load(m), load(n)

        def normed():
            by = norm(m, n)
            by = norm(m / by, n / by)
            return m / by, n / by

        return lax.switch(index, [lambda: (m, n), normed])

    program, found, (*aheads, rest) = hoisted(twice, host(4, 3), host(5))
    assert [names_of(cond).count("dot_general") for cond in aheads] == [2, 0, 2, 0]
    assert [len(cond.outvars) for cond in aheads] == [2, 1, 2, 1] and names_of(rest) == ["div", "div"]
    assert_as_before(program, found)


def test_a_cond_inside_of_a_branch():
    """The scalars of the inner one get out of both."""

    def nested(index, m, g, rate):
        m = load(m)
        inner = lambda: lax.cond(index > 0, lambda: m / norm(m), lambda: m)  # noqa: E731
        return lax.switch(index, [lambda: m, inner])

    program, found, (part, total, rest) = hoisted(nested, *SIZES)
    assert {*part.outvars} <= {*total.invars} and {*total.outvars} <= {*rest.invars}
    (inner,) = (eqn for eqn in branches_of(rest)[1].jaxpr.eqns if eqn.primitive.name == "cond")
    assert names_of(inner) == ["div"]
    assert_as_before(program, found)


def test_several_scalars_of_a_cond_inside():
    """They leave the branch around it together: else each slice of what is around it would compute all of them."""

    def nested(index, m, n, g, rate):
        m, n = load(m), load(n)

        def inner():
            scale, decay = 1 / norm(g), jnp.sqrt(norm(g) + rate)
            return m * scale - decay * m, n * scale

        return lax.switch(index, [lambda: (m, n), lambda: lax.cond(index > 0, inner, lambda: (m, n))])

    program, found, (*aheads, rest) = hoisted(nested, host(4, 3), host(5), device(7), device())
    assert any(len(ahead.outvars) > 1 for ahead in aheads)
    (inside,) = (eqn for eqn in branches_of(rest)[1].jaxpr.eqns if eqn.primitive.name == "cond")
    assert {"dot_general", "sqrt", "cond"}.isdisjoint(names_of(inside))
    assert_as_before(program, found)


def effect(m):
    jax.debug.callback(lambda _: None, m.sum())
    return m / norm(m)


def drawn(m):
    return m + jax.random.normal(jax.random.wrap_key_data(m[:2].view(jnp.uint32)), m.shape)


@pytest.mark.parametrize(
    ("what", "fun", "args"),
    [
        ("nothing is loaded", lambda i, m: lax.switch(i, [jnp.copy, lambda m: m / norm(m)], m), (device(4, 3),)),
        ("which branch is taken is loaded", lambda i, k, m: lax.switch(load(k), [jnp.copy, lambda m: m / norm(m)], m),
         (host(dtype=jnp.int32), device(4, 3))),
        ("an effect happens once", lambda i, m: lax.switch(i, [jnp.copy, effect], load(m)), (host(4, 3),)),
        ("nobody uses it", lambda i, m: lax.switch(i, [lambda m: (m, 0.0), lambda m: (-m, 1.0)], load(m)),
         (host(4, 3),)),
        ("a key is no number", lambda i, m: lax.switch(i, [jnp.copy, drawn], load(m)), (host(4),)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_stays_in_its_branch(what, fun, args):
    program, found, conds = hoisted(fun, *args)
    assert len(conds) == 1 and found.eqns == list(program.eqns)
