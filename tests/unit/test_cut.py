"""How an update falls into slices and passes: on programs of a few equations, by the rules of ``_ir.slices.cut``.

Whatever the cut, its parts one after the other are the whole: every test that looks at a cut also runs it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_offload._base.jaxprs import jax_fun
from jax_offload._ir.program import flat, without_round_trips
from jax_offload._ir.slices import cut, joined
from tests.unit._programs import device, host, inputs_of, load, program_of, run, store, values_of

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


def loads(passes):
    """Of every pass, of every slice the names of the host leaves."""
    return [[set(s.loads) for s in each.slices] for each in passes]


def primitives(s):
    return [eqn.primitive.name for eqn in s.jaxpr.eqns]


W = 6, 4
LEAF, GRAD = host(*W), device(*W)


def test_independent_leaves_are_slices_of_their_own():
    def update(g, h, m, n):
        return store(load(m) + g), store(load(n) * h)

    program, passes = passes_of(update, GRAD, GRAD, LEAF, LEAF)
    g, h, m, n = inputs_of(program, 0, 1, 2, 3)
    assert [(s.inputs, s.stores) for s in passes[0].slices] == [
        ([m, g], [program.outputs[0]]),
        ([n, h], [program.outputs[1]]),
    ]
    assert loads(passes) == [[{m}, {n}]]
    assert passes[0].prelude.jaxpr.eqns == []


def test_results_that_need_a_leaf_in_common_share_a_slice():
    """One that needs both m and v joins them, with m's other result."""

    def update(g, m, v, n):
        new, second = load(m) + g, load(v) + g * g
        return new / (second + 20), store(new), store(second), store(load(n) + g)

    program, passes = passes_of(update, GRAD, LEAF, LEAF, LEAF)
    _, m, v, n = inputs_of(program, 0, 1, 2, 3)
    assert loads(passes) == [[{m, v}, {n}]]
    assert [len(s.outputs) for s in passes[0].slices] == [3, 1]
    assert primitives(passes[0].slices[0]).count("device_put") == 4  # each of both is loaded once


def test_leaves_are_joined_through_others():
    def update(a, b, c, d):
        return load(a) + load(b), load(b) + load(c), load(d) + 1

    program, passes = passes_of(update, LEAF, LEAF, LEAF, LEAF)
    a, b, c, d = program.inputs
    assert loads(passes) == [[{a, b, c}, {d}]]


def rate_update(count, g, m, n):
    rate = 1.0 / (count + 30.0)
    return store(load(m) - rate * g), store(load(n) - rate * g), count + 1


def test_a_learning_rate_is_made_once_ahead():
    program, passes = passes_of(rate_update, device(), GRAD, LEAF, LEAF)
    (each,) = passes
    assert primitives(each.prelude) == ["add", "div", "add"]
    (rate,) = next(eqn.outvars for eqn in each.prelude.jaxpr.eqns if eqn.primitive.name == "div")
    assert {rate, program.outputs[2]} <= set(each.prelude.outputs)
    g, m, n = inputs_of(program, 1, 2, 3)
    assert [set(s.inputs) for s in each.slices] == [{g, m, rate}, {g, n, rate}]


def test_a_number_of_one_slice_alone_is_made_ahead_too():
    """A scalar inside would be computed for every chunk."""
    _, passes = passes_of(lambda count, m: store(load(m) * jnp.sqrt(count)), device(), LEAF)
    assert primitives(passes[0].prelude) == ["sqrt"]
    assert primitives(passes[0].slices[0]) == ["device_put", "mul", "device_put"]


def test_what_serves_several_slices_is_made_ahead_but_for_elementwise_arithmetic():
    """Which is cheaper made anew than kept as an array."""

    def update(g, p, m, n):
        cheap, product = jnp.sin(g) * 2, g @ p
        return store(load(m) + cheap + product), store(load(n) - cheap - product)

    _, passes = passes_of(update, device(4, 4), device(4, 4), host(4, 4), host(4, 4))
    (each,) = passes
    assert primitives(each.prelude) == ["dot_general"]
    assert [primitives(s).count("sin") for s in each.slices] == [1, 1]


def test_what_serves_one_slice_alone_is_made_in_it():
    _, passes = passes_of(lambda g, p, m: store(load(m) + g @ p), device(4, 4), device(4, 4), host(4, 4))
    assert passes[0].prelude.jaxpr.eqns == []
    assert sorted(primitives(passes[0].slices[0])) == ["add", "device_put", "device_put", "dot_general"]


def test_a_result_without_host_leaves_belongs_to_the_prelude():
    program, passes = passes_of(lambda g, p, m: (p - g, store(load(m) + g)), GRAD, GRAD, LEAF)
    assert passes[0].prelude.outputs == [program.outputs[0]]
    assert [s.outputs for s in passes[0].slices] == [[program.outputs[1]]]


def clipped_columns(g, m):
    norms = jnp.sqrt(jnp.sum(g * g, axis=0, keepdims=True))
    return store(load(m) + g / (norms + 1))


@pytest.mark.parametrize(("rows", "ahead"), [(32, True), (31, False)])
def test_a_few_numbers_of_all_rows_are_made_ahead(rows, ahead):
    """They would keep the rows together. Few: a 32nd of what they are reduced from."""
    _, passes = passes_of(clipped_columns, device(rows, 4), host(rows, 4))
    (each,) = passes
    assert ("reduce_sum" in primitives(each.prelude)) == ahead
    assert ("reduce_sum" in primitives(each.slices[0])) != ahead
    assert ("sqrt" in primitives(each.prelude)) == ahead  # arithmetic on such is such
    assert "div" in primitives(each.slices[0])


def test_what_is_made_of_them_otherwise_is_not():
    """Of arithmetic it is known that it stays small beside the leaf."""

    def update(g, m):
        return store(load(m) + jnp.sort(jnp.sum(g * g, axis=0, keepdims=True)))

    _, passes = passes_of(update, device(64, 4), host(64, 4))
    assert "reduce_sum" in primitives(passes[0].prelude)
    assert [name for name in primitives(passes[0].slices[0]) if name != "device_put"] == ["sort", "add"]


def test_numbers_of_each_row_are_not_made_ahead():
    def update(g, m):
        return store(load(m) + g / (jnp.sum(g * g, axis=1, keepdims=True) + 1))

    _, passes = passes_of(update, device(2, 64), host(2, 64))
    assert passes[0].prelude.jaxpr.eqns == []


def norm_update(g, m, n):
    norm = jnp.sqrt((load(m) ** 2).sum() + (load(n) ** 2).sum())
    return store(load(m) / norm + g), store(load(n) / norm), norm


def test_a_norm_over_leaves_needs_all_of_them_at_once():
    program, passes = passes_of(norm_update, GRAD, LEAF, LEAF)
    assert loads(passes) == [[{*program.inputs[1:]}]]


def test_a_norm_over_leaves_apart_is_a_pass_ahead():
    """Each leaf is loaded for its part, the parts are added up on the device, and each is loaded again."""
    program, passes = passes_of(norm_update, GRAD, LEAF, LEAF, apart=True)
    _, m, n = program.inputs
    assert loads(passes) == [[{m}, {n}], [{m}, {n}]]
    first, second = passes
    assert first.prelude.jaxpr.eqns == []
    assert [primitives(s)[-1] for s in first.slices] == ["reduce_sum", "reduce_sum"]
    parts = [s.outputs for s in first.slices]
    assert [len(p) for p in parts] == [1, 1] and not any(s.stores for s in first.slices)
    assert second.prelude.inputs == [parts[0][0], parts[1][0]]
    assert program.outputs[2] in second.prelude.outputs
    assert [s.stores for s in second.slices] == [[program.outputs[0]], [program.outputs[1]]]


def test_a_leaf_is_stored_in_the_last_pass():
    """Though its next value needs no number: until then the old one is read."""

    def update(g, m):
        return load(m) / (load(m) ** 2).sum(), store(load(m) + g)

    program, passes = passes_of(update, GRAD, LEAF, apart=True)
    assert [[s.stores for s in each.slices] for each in passes] == [[[]], [[program.outputs[1]]]]


def test_a_number_and_an_array_of_one_equation():
    """The array's slice is given the number, which the equation that makes both does not make once more."""

    scaled = jax.jit(lambda m: m * np.arange(4, dtype=np.float32))  # a branch with constants is not divided

    def update(ok, m):
        def new(m):
            return scaled(m), (m * m).sum()

        x, norm = lax.cond(ok, new, lambda m: (m, jnp.float32(1)), load(m))
        return store(x / norm)

    program, passes = passes_of(update, device(dtype=bool), LEAF, apart=True)
    assert loads(passes) == [[{program.inputs[1]}]] * 2
    first, second = (each.slices[0] for each in passes)
    (cond,) = (eqn for eqn in second.jaxpr.eqns if eqn.primitive.name == "cond")
    assert first.outputs[0].aval.shape == () and first.outputs[0] in second.inputs
    assert [v.aval.shape for v in cond.outvars] == [W]


def test_a_norm_of_what_a_norm_has_scaled_is_a_third_pass():
    def update(m):
        x = load(m) / jnp.sqrt((load(m) ** 2).sum())
        return store(x / (1 + jnp.abs(x).sum()))

    program, passes = passes_of(update, LEAF, apart=True)
    assert loads(passes) == [[{program.inputs[0]}]] * 3
    assert loads(passes_of(update, LEAF)[1]) == [[{program.inputs[0]}]]


def test_a_number_of_gradients_takes_no_pass():
    """It is on the device, so that apart or not it goes to the prelude."""

    def update(g, m, n):
        norm = jnp.sqrt((g * g).sum())
        return store(load(m) + g / norm), store(load(n) + g / norm)

    for apart in False, True:
        program, passes = passes_of(update, GRAD, LEAF, LEAF, apart=apart)
        assert loads(passes) == [[{program.inputs[1]}, {program.inputs[2]}]]
        assert passes[0].prelude.outputs[0].aval.shape == ()


def test_dead_code_is_gone():
    def update(g, m, n):
        unused = load(n) @ g.T  # noqa: F841
        return store(load(m) + g), g

    program, passes = passes_of(update, GRAD, LEAF, LEAF)
    assert "dot_general" in [eqn.primitive.name for eqn in program.eqns]
    (s,) = passes[0].slices
    assert s.loads == [program.inputs[1]]
    assert sorted(primitives(s)) == ["add", "device_put", "device_put"]
    assert passes[0].prelude.jaxpr.eqns == [] and passes[0].prelude.outputs == []


def test_dead_code_inside_of_a_branch_is_gone():
    """The leaf whose result nobody wants is not loaded."""

    def update(ok, g, m, n):
        _, n = lax.cond(ok, lambda m, n: (load(m) + g, load(n) - g), lambda m, n: (load(m), load(n)), m, n)
        return store(n)

    program, passes = passes_of(update, device(dtype=bool), GRAD, LEAF, LEAF)
    assert loads(passes) == [[{program.inputs[3]}]]


def test_a_branch_is_divided_between_slices():
    """A ``cond`` that serves two slices is a ``cond`` for each, with the leaves of that alone."""

    def update(ok, g, m, n):
        def new(m, n):
            return load(m) + g, load(n) - g

        m, n = lax.cond(ok, new, lambda m, n: (load(m), load(n)), m, n)
        return store(m), store(n)

    program, passes = passes_of(update, device(dtype=bool), GRAD, LEAF, LEAF)
    m, n = program.inputs[2:]
    assert loads(passes) == [[{m}, {n}]]
    for s in passes[0].slices:
        (cond,) = (eqn for eqn in s.jaxpr.eqns if eqn.primitive.name == "cond")
        assert len(cond.outvars) == 1
        assert sorted(len(branch.jaxpr.eqns) for branch in cond.params["branches"]) == [1, 2]


def test_what_is_returned_as_it_came_takes_no_slice():
    program, passes = passes_of(lambda g, m, n: (g, m, store(load(n)), 3.0), GRAD, LEAF, LEAF)
    assert program.outputs[:3] == program.inputs
    assert loads(passes) == [[]]
    assert passes[0].prelude.outputs == []


def effects(s):
    return sum(1 for eqn in s.jaxpr.eqns if eqn.effects)


def test_an_effect_happens_though_nobody_reads_it():
    calls = []

    def update(count, g, m, n):
        jax.debug.callback(lambda x: calls.append("count"), count)
        jax.debug.callback(lambda x: calls.append("leaf"), load(m) + g)
        return store(load(n) + g)

    program, passes = passes_of(update, device(), GRAD, LEAF, LEAF)
    jax.effects_barrier()
    assert sorted(calls) == ["count", "count", "leaf", "leaf"]  # the function itself has run as well
    (each,) = passes
    assert effects(each.prelude) == 1 and each.prelude.jaxpr.effects
    by_leaf = {s.loads[0]: effects(s) for s in each.slices}
    assert by_leaf == {program.inputs[2]: 1, program.inputs[3]: 0}


def test_an_effect_that_reads_a_leaf_joins_the_slice_of_that_leaf():
    def update(g, m, n):
        jax.debug.callback(lambda x: None, load(m))
        return store(load(m) + g), store(load(n) + g)

    program, passes = passes_of(update, GRAD, LEAF, LEAF)
    assert [(s.loads, effects(s)) for s in passes[0].slices] == [([program.inputs[1]], 1), ([program.inputs[2]], 0)]


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
    g, m, n = program.inputs
    assert set(one.inputs) == {g, m, n} and one.outputs == program.outputs
    assert [primitives(one).count(name) for name in ("exp", "device_put")] == [1, 4]
    values = dict(zip(program.inputs, values_of(program), strict=True))
    for got, want in zip(one.run(*(values[v] for v in one.inputs)), update(*values.values()), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_bytes_are_counted_on_one_device_and_as_float32():
    program = program_of(lambda m, n: store(load(m) + load(n)), host(8, 4, dtype=jnp.bfloat16), host(8, 4))
    (s,) = cut(program, False)[0].slices
    assert (s.loaded_bytes, s.decoded_bytes) == (64 + 128, 128 + 128)
    sharded = dataclasses.replace(s, shards={program.inputs[0]: (4, 2)})
    assert (sharded.loaded_bytes, sharded.decoded_bytes) == (8 + 128, 16 + 128)


def test_a_constant_may_be_moved():
    """A number that the optimizer writes out is a literal, which is no variable and no key."""

    def update(g, m):
        return store(load(m) + g * jax.device_put(0.5, jax.memory.Space.Device))

    program, passes = passes_of(update, GRAD, LEAF)
    assert loads(passes) == [[{inputs_of(program, 1)[0]}]]


def test_a_tree_that_is_moved_by_one_equation():
    """As ``jax.device_put(tree, memory)`` in an optimizer: each of its leaves is moved for itself."""
    there = jax.memory.Space.Host
    jaxpr = jax.make_jaxpr(lambda tree: jax.device_put(tree, there))([jnp.ones(2), jnp.ones((3, 3))])
    assert len(jaxpr.eqns) == 1
    program = without_round_trips(flat(jaxpr))
    assert [(len(eqn.invars), len(eqn.params["devices"])) for eqn in program.eqns] == [(1, 1)] * 2
    assert [v.aval.shape for v in program.outputs] == [(2,), (3, 3)]
    got = jax.jit(lambda *xs: jax_fun(program.closed)(*xs))(jnp.ones(2), jnp.ones((3, 3)))
    assert [x.sharding.memory_kind for x in got] == ["pinned_host"] * 2
