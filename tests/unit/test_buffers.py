"""Which operand's buffer a result overwrites: the leaf that it is the next value of, of its type, and once."""

import jax.numpy as jnp
import pytest

from jax_offload._ir.slices import cut
from jax_offload._plan.plan import Chunked, Whole
from jax_offload._plan.transfers import buffers, transfer_of
from tests.unit._programs import device, host, load, program_of, store

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

SHAPE = 64, 8, 128
WINDOW = 64 * 8 * 128  # bytes: a quarter of a leaf


def slice_and_next(fun, *args, next_of):
    """The only slice of an update, and for its results the operands that they are the next values of, by number."""
    program = program_of(fun, *args)
    (only,) = cut(program, False)
    (s,) = only.slices
    return s, {program.outputs[k]: program.inputs[i] for k, i in next_of.items()}


def test_a_result_overwrites_the_leaf_that_it_is_the_next_value_of():
    def update(g, m, n):
        m, n = load(m) + g, load(n) * load(m)
        return store(n), store(m)

    s, next_of = slice_and_next(update, device(*SHAPE), host(*SHAPE), host(*SHAPE), next_of={0: 2, 1: 1})
    assert [next_of[v] for v in s.outputs] == buffers(s, next_of)
    how = transfer_of(s, next_of, WINDOW)
    assert isinstance(how, Chunked) and list(how.buffers) == buffers(s, next_of)


def test_two_results_do_not_overwrite_one_leaf():
    """One array may be given as two arguments: the second result gets a buffer of its own."""

    def update(g, m):
        m = load(m)
        return g * m, g + m, store(m + g)

    s, next_of = slice_and_next(update, device(*SHAPE), host(*SHAPE), next_of={0: 0, 1: 0, 2: 1})
    first, second, stored = next_of
    found = dict(zip(s.outputs, buffers(s, next_of), strict=True))
    assert {v: found[v] for v in next_of} == {first: next_of[first], second: None, stored: next_of[stored]}
    how = transfer_of(s, next_of, WINDOW)
    assert isinstance(how, Chunked) and list(how.buffers) == [found[v] for v in s.outputs]


def test_two_leaves_on_the_host_do_not_become_one():
    """There is no second buffer on the host to write rows into: loaded whole, and said."""

    def update(g, m):
        m = load(m)
        return store(m + g), store(m * g)

    s, next_of = slice_and_next(update, device(*SHAPE), host(*SHAPE), next_of={0: 1, 1: 1})
    found = buffers(s, next_of)
    assert [v is None for v in found] == [False, True]
    assert transfer_of(s, next_of, WINDOW) == Whole("its next value is of another type, or not its own")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("memory", host(*SHAPE), lambda m: load(m) * 2.0),
        ("dtype", host(*SHAPE), lambda m: store((load(m) * 2.0).astype(jnp.bfloat16))),
        ("shape", host(*SHAPE), lambda m: store(load(m)[:, :4] * 2.0)),
    ],
)
def test_a_leaf_of_another_type_is_not_overwritten(name, old, new):
    s, next_of = slice_and_next(new, old, next_of={0: 0})
    assert buffers(s, next_of) == [None]
    how = transfer_of(s, next_of, WINDOW)
    if name == "memory":  # a leaf that comes back to the device: its rows go into a new array there
        assert isinstance(how, Chunked) and how.buffers == (None,)
    else:
        assert how == Whole("its next value is of another type, or not its own")


def test_what_comes_from_the_device_has_no_buffer_on_the_host():
    def update(g, m, n):
        return store(m * load(n)), store(load(n) + g)

    s, next_of = slice_and_next(update, device(*SHAPE), device(*SHAPE), host(*SHAPE), next_of={0: 1, 1: 2})
    found = dict(zip(s.outputs, buffers(s, next_of), strict=True))
    moved, stayed = next_of
    assert found == {moved: None, stayed: next_of[stayed]}
    assert transfer_of(s, next_of, WINDOW) == Whole("it moves to the host in this step")
