"""Marks are in a trace, and in nothing that runs."""

import jax
import jax.numpy as jnp
import pytest

from jax_offload._base.own_primitives import MARK, mark, mark_of, marks_in
from jax_offload._base.private import equation_of
from jax_offload._ir.program import flat, without_round_trips

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


def marked_twice(x):
    y = mark(x * 2, "double")
    return y, mark(y + 1, "more") * 3


def test_a_trace_says_which_results_were_marked():
    step = jax.make_jaxpr(marked_twice)(1.0)
    marks, outputs = marks_in(step), step.jaxpr.outvars
    assert [marks.get(v) for v in outputs] == ["double", None]
    assert sorted(marks.values()) == ["double", "more"]


def test_a_traced_value_tells_its_mark_until_something_happens_to_it():
    found = []

    def f(x):
        y, z = marked_twice(x)
        found.extend(map(mark_of, (x, y, y + 0, z)))
        return z

    jax.make_jaxpr(f)(1.0)
    assert found == [None, "double", None, None]
    assert mark_of(jnp.ones(3)) is None


def test_a_program_has_none():
    program = without_round_trips(flat(jax.make_jaxpr(marked_twice)(1.0)))
    assert [eqn.primitive.name for eqn in program.eqns] == ["mul", "add", "mul"]


def test_lowered_they_are_gone():
    text = jax.jit(marked_twice).lower(1.0).as_text()
    assert MARK not in text and text.count("stablehlo.multiply") == 2


def test_derivatives_and_batches_pass():
    assert (jax.vmap(jax.grad(lambda x: marked_twice(x)[1]))(jnp.ones(3)) == 6).all()
    assert jax.jvp(lambda x: marked_twice(x)[1], (1.0,), (1.0,))[1] == 6


def test_a_tracer_whose_parts_have_moved_is_an_error(monkeypatch):
    found = []

    def f(x):
        monkeypatch.delattr(type(x), "parent")
        with pytest.raises(RuntimeError, match=r"no 'parent' in DynamicJaxprTracer.*report this"):
            equation_of(x)
        monkeypatch.undo()
        found.append(x)
        return x

    jax.make_jaxpr(f)(1.0)
    assert found
