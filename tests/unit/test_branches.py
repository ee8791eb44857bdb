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


def norm(*arrays):
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in arrays))


def clipped(index, m, n, g):
    m, n = load(m), load(n)

    def scaled():
        scale = 1 / norm(m, n, g)
        return m * scale, n * scale

    return lax.switch(index, [lambda: (m, n), scaled])


def of_the_device(index, m, g, rate):
    m = load(m)
    return lax.switch(index, [lambda: m, lambda: m * (rate / (1 + norm(g)))])


def of_another_norm(index, m, n):
    m, n = load(m), load(n)

    def normed():
        scaled = n / norm(m)
        return scaled / norm(scaled)

    return lax.switch(index, [lambda: n, normed])


def normed_twice(index, m, n):
    m, n = load(m), load(n)

    def normed():
        by = norm(m, n)
        by = norm(m / by, n / by)
        return m / by, n / by

    return lax.switch(index, [lambda: (m, n), normed])


def nested(index, m, g, rate):
    m = load(m)
    return lax.switch(index, [lambda: m, lambda: lax.cond(index > 0, lambda: m / norm(m), lambda: m)])


def several_nested(index, m, n, g, rate):
    m, n = load(m), load(n)

    def inner():
        scale, decay = 1 / norm(g), jnp.sqrt(norm(g) + rate)
        return m * scale - decay * m, n * scale

    return lax.switch(index, [lambda: (m, n), lambda: lax.cond(index > 0, inner, lambda: (m, n))])


HOISTED = {  # the parts of norms in each cond ahead; what the branch is left with
    "parts, then what is made of them": (clipped, (host(4, 3), host(5), device(7)), [3, 0], ["mul", "mul"]),
    "nothing is loaded for it": (of_the_device, (host(4, 3), device(4, 3), device()), [1], ["mul"]),
    "one needs another": (of_another_norm, (host(4, 3), host(5)), [1, 0, 1, 0], ["div", "div"]),
    "a second norm is in parts too": (normed_twice, (host(4, 3), host(5)), [2, 0, 2, 0], ["div", "div"]),
    "a cond inside": (nested, (host(4, 3), device(4, 3), device()), [1, 0], None),
    "several scalars of a cond inside": (several_nested, (host(4, 3), host(5), device(7), device()), None, None),
}  # fmt: skip


def effect(m):
    jax.debug.callback(lambda _: None, m.sum())
    return m / norm(m)


def drawn(m):
    return m + jax.random.normal(jax.random.wrap_key_data(m[:2].view(jnp.uint32)), m.shape)


LEFT = {
    "nothing is loaded": (lambda i, m: lax.switch(i, [jnp.copy, lambda m: m / norm(m)], m), (device(4, 3),)),
    "which branch is taken is loaded": (
        lambda i, k, m: lax.switch(load(k), [jnp.copy, lambda m: m / norm(m)], m),
        (host(dtype=jnp.int32), device(4, 3)),
    ),
    "an effect happens once": (lambda i, m: lax.switch(i, [jnp.copy, effect], load(m)), (host(4, 3),)),
    "nobody uses it": (lambda i, m: lax.switch(i, [lambda m: (m, 0.0), lambda m: (-m, 1.0)], load(m)), (host(4, 3),)),
    "a key is no number": (lambda i, m: lax.switch(i, [jnp.copy, drawn], load(m)), (host(4),)),
    "a scalar of scalars is cheap": (
        lambda i, m, rate: lax.switch(i, [lambda m: m, lambda m: m * jnp.sqrt(rate)], load(m)),
        (host(4, 3), device()),
    ),
}


def hoisted(fun, args):
    """The program before and after, and the ``cond``s of the latter."""
    program = program_of(fun, device(dtype=jnp.int32), *args)
    found = scalars_hoisted(program)
    return program, found, [eqn for eqn in found.eqns if eqn.primitive.name == "cond"]


def names_of(jaxpr):
    """Of the equations, those of a ``cond`` inside instead of it."""
    return [
        name
        for eqn in jaxpr.eqns
        for name in (names_of(branches_of(eqn)[1].jaxpr) if eqn.primitive.name == "cond" else [eqn.primitive.name])
    ]


@pytest.mark.parametrize("case", HOISTED)
def test_scalars_are_made_ahead(case):
    fun, args, parts, left = HOISTED[case]
    program, found, (*aheads, rest) = hoisted(fun, args)
    assert {v.aval.shape for ahead in aheads for v in ahead.outvars} == {()}
    assert {*aheads[-1].outvars} <= {*rest.invars}
    if parts is not None:
        assert [names_of(branches_of(ahead)[1].jaxpr).count("dot_general") for ahead in aheads] == parts
    remaining = names_of(branches_of(rest)[1].jaxpr)
    assert {"dot_general", "sqrt"}.isdisjoint(remaining) and (left is None or remaining == left)
    _, *values = values_of(program)
    for index in map(jnp.int32, range(2)):
        for x, y in zip(jax_fun(found.closed)(index, *values), jax_fun(program.closed)(index, *values), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("case", LEFT)
def test_what_stays_in_its_branch(case):
    program, found, conds = hoisted(*LEFT[case])
    assert len(conds) == 1 and found.eqns == list(program.eqns)
