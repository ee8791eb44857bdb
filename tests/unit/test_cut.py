"""How an update falls into slices and passes: on programs of a few equations, by the rules of ``_ir.slices.cut``.

Whatever the cut, its parts one after the other are the whole: every test that looks at a cut also runs it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_offload._base.jaxprs import jax_fun
from jax_offload._ir.program import flat, without_round_trips
from jax_offload._ir.slices import cut, joined
from tests.unit._programs import device, host, load, program_of, run, store, values_of

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


def passes_of(fun, *args, apart=False):
    """The program and its passes, which are first shown to be the program."""
    program = program_of(fun, *args)
    passes = cut(program, apart)
    values = values_of(program)
    for got, want in zip(run(program, passes, values), jax.tree.leaves(fun(*values)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)
    stored = [s for each in passes for s in (each.prelude, *each.slices) if s.stores]
    assert all(any(s is t for t in (passes[-1].prelude, *passes[-1].slices)) for s in stored)  # old values serve before
    assert not any(each.prelude.loads for each in passes)
    return program, passes


def primitives(s):
    return [eqn.primitive.name for eqn in s.jaxpr.eqns if eqn.primitive.name != "device_put"]


W = 6, 4
LEAF, GRAD, SQUARE, NUMBER = host(*W), device(*W), (device(4, 4), host(4, 4)), device()


def independent(g, h, m, n):
    return store(load(m) + g), store(load(n) * h)


def in_common(g, m, v, n):
    new, second = load(m) + g, load(v) + g * g
    return new / (second + 20), store(new), store(second), store(load(n) + g)


def through_others(a, b, c, d):
    return load(a) + load(b), load(b) + load(c), load(d) + 1


def by_rate(count, g, m, n):
    rate = 1.0 / (count + 30.0)
    return store(load(m) - rate * g), store(load(n) - rate * g), count + 1


def shared(g, p, m, n):
    cheap, product = jnp.sin(g) * 2, g @ p
    return store(load(m) + cheap + product), store(load(n) - cheap - product)


def by_columns(g, m):
    return store(load(m) + g / (jnp.sqrt(jnp.sum(g * g, axis=0, keepdims=True)) + 1))


def sorted_columns(g, m):
    return store(load(m) + jnp.sort(jnp.sum(g * g, axis=0, keepdims=True)))


def by_rows(g, m):
    return store(load(m) + g / (jnp.sum(g * g, axis=1, keepdims=True) + 1))


def normed(g, m, n):
    norm = jnp.sqrt((load(m) ** 2).sum() + (load(n) ** 2).sum())
    return store(load(m) / norm + g), store(load(n) / norm), norm


def normed_twice(m):
    x = load(m) / jnp.sqrt((load(m) ** 2).sum())
    return store(x / (1 + jnp.abs(x).sum()))


def clipped(g, m, n):
    norm = jnp.sqrt((g * g).sum())
    return store(load(m) + g / norm), store(load(n) + g / norm)


def dead(g, m, n):
    unused = load(n) @ g.T  # noqa: F841
    return store(load(m) + g), g


def untouched(g, m, n):
    return g, m, store(load(n)), 3.0


def with_a_constant(g, m):
    return store(load(m) + g * jax.device_put(0.5, jax.memory.Space.Device))


CASES = {  # for every pass and slice the numbers of the host arguments; what is computed ahead; apart
    "leaves that share nothing": (independent, (GRAD, GRAD, LEAF, LEAF), [[{2}, {3}]], []),
    "one result needs two": (in_common, (GRAD, LEAF, LEAF, LEAF), [[{1, 2}, {3}]], []),
    "joined through others": (through_others, (LEAF,) * 4, [[{0, 1, 2}, {3}]], []),
    "a learning rate": (by_rate, (NUMBER, GRAD, LEAF, LEAF), [[{2}, {3}]], ["add", "div", "add"]),
    "a number of one slice": (lambda c, m: store(load(m) * jnp.sqrt(c)), (NUMBER, LEAF), [[{1}]], ["sqrt"]),
    "a product for two": (shared, SQUARE[:1] * 2 + SQUARE[1:] * 2, [[{2}, {3}]], ["dot_general"]),
    "a product for one": (lambda g, p, m: store(load(m) + g @ p), SQUARE[:1] * 2 + SQUARE[1:], [[{2}]], []),
    "no host leaf": (lambda g, p, m: (p - g, store(load(m) + g)), (GRAD, GRAD, LEAF), [[{2}]], ["sub"]),
    "few numbers of all rows": (by_columns, (device(32, 4), host(32, 4)), [[{1}]],
                                ["mul", "reduce_sum", "broadcast_in_dim", "sqrt", "add"]),
    "many numbers of all rows": (by_columns, (device(31, 4), host(31, 4)), [[{1}]], []),
    "sorted numbers": (sorted_columns, (device(64, 4), host(64, 4)), [[{1}]],
                       ["mul", "reduce_sum", "broadcast_in_dim"]),
    "a number of each row": (by_rows, (device(2, 64), host(2, 64)), [[{1}]], []),
    "a norm over leaves": (normed, (GRAD, LEAF, LEAF), [[{1, 2}]], []),
    "a norm over leaves, ahead": (normed, (GRAD, LEAF, LEAF), [[{1}, {2}]] * 2, []),
    "two norms": (normed_twice, (LEAF,), [[{0}]], []),
    "two norms, ahead": (normed_twice, (LEAF,), [[{0}]] * 3, []),
    "a norm of gradients": (clipped, (GRAD, LEAF, LEAF), [[{1}, {2}]], ["mul", "reduce_sum", "sqrt"]),
    "a norm of gradients, ahead": (clipped, (GRAD, LEAF, LEAF), [[{1}, {2}]], ["mul", "reduce_sum", "sqrt"]),
    "dead code": (dead, (GRAD, LEAF, LEAF), [[{1}]], []),
    "returned as it came": (untouched, (GRAD, LEAF, LEAF), [[]], []),
    "a constant that is moved": (with_a_constant, (GRAD, LEAF), [[{1}]], None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_slices_and_what_is_computed_ahead(case):
    fun, args, leaves, ahead = CASES[case]
    program, passes = passes_of(fun, *args, apart=case.endswith("ahead"))
    assert [[{program.inputs.index(v) for v in s.loads} for s in each.slices] for each in passes] == leaves
    assert ahead in (None, primitives(passes[0].prelude))


def effects(s):
    return sum(1 for eqn in s.jaxpr.eqns if eqn.effects)


def test_an_effect_happens_though_nobody_reads_it():
    calls = []

    def update(count, g, m, n):
        jax.debug.callback(lambda x: calls.append("count"), count)
        jax.debug.callback(lambda x: calls.append("leaf"), load(m) + g)
        return store(load(n) + g)

    program, (each,) = passes_of(update, NUMBER, GRAD, LEAF, LEAF)
    jax.effects_barrier()
    assert sorted(calls) == ["count", "count", "leaf", "leaf"]  # the function itself has run as well
    assert effects(each.prelude) == 1 and each.prelude.jaxpr.effects
    assert {s.loads[0]: effects(s) for s in each.slices} == {program.inputs[2]: 1, program.inputs[3]: 0}


def test_an_effect_waits_for_the_number_that_it_reads():
    def update(m):
        norm = (load(m) ** 2).sum()
        jax.debug.callback(lambda x: None, norm)
        return store(load(m) / norm)

    _, passes = passes_of(update, LEAF, apart=True)
    assert [effects(each.prelude) for each in passes] == [0, 1]
    assert not any(effects(s) for each in passes for s in each.slices)


def test_slices_as_one_have_what_both_have_once():
    def update(g, m, n):
        scale = jnp.exp(g)
        return store(load(m) + scale), store(load(n) - scale)

    program, passes = passes_of(update, GRAD, LEAF, LEAF)
    one = joined(*passes[0].slices)
    assert {*one.inputs} == {*program.inputs} and one.outputs == program.outputs
    assert primitives(one).count("exp") == 1
    values = dict(zip(program.inputs, values_of(program), strict=True))
    for got, want in zip(one.run(*(values[v] for v in one.inputs)), update(*values.values()), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_bytes_are_counted_on_one_device_and_as_float32():
    program = program_of(lambda m, n: store(load(m) + load(n)), host(8, 4, dtype=jnp.bfloat16), host(8, 4))
    (s,) = cut(program, False)[0].slices
    assert (s.loaded_bytes, s.decoded_bytes) == (64 + 128, 128 + 128)
    sharded = dataclasses.replace(s, shards={program.inputs[0]: (4, 2)})
    assert (sharded.loaded_bytes, sharded.decoded_bytes) == (8 + 128, 16 + 128)


def test_a_tree_that_is_moved_by_one_equation():
    """As ``jax.device_put(tree, memory)`` in an optimizer: each of its leaves is moved for itself."""
    there = jax.memory.Space.Host
    jaxpr = jax.make_jaxpr(lambda tree: jax.device_put(tree, there))([jnp.ones(2), jnp.ones((3, 3))])
    program = without_round_trips(flat(jaxpr))
    assert [(len(eqn.invars), len(eqn.params["devices"])) for eqn in program.eqns] == [(1, 1)] * 2
    got = jax.jit(lambda *xs: jax_fun(program.closed)(*xs))(jnp.ones(2), jnp.ones((3, 3)))
    assert [(x.shape, x.sharding.memory_kind) for x in got] == [((2,), "pinned_host"), ((3, 3), "pinned_host")]
