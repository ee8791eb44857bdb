"""How large a window is, what goes through it at once, and what waits for room in it: the rules of ``_plan.decide``."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jax_offload._ir.slices import cut
from jax_offload._plan.decide import (
    SMALL_PIECES,
    Region,
    _fitted,
    _must_be_back,
    _usual,
    _window,
    default_window,
    passes_of,
)
from jax_offload._plan.plan import Chunked, Whole, Window
from tests.unit._programs import device, host, load, program_of, store

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("state", "nbytes", "why"),
    [
        (0, MIB, "1 MiB, the least"),
        (8 * MIB, MIB, "1 MiB, the least"),
        (8 * MIB + 8, MIB + 1, "an eighth of the state"),
        (2 * GIB - 8, 256 * MIB - 1, "an eighth of the state"),
        (2 * GIB, 256 * MIB, "256 MiB, less than its usual pieces"),
        (8 * GIB + 31, 256 * MIB, "256 MiB, less than its usual pieces"),
        (8 * GIB + 32, 256 * MIB + 1, "a 32nd of the state, less than its usual pieces"),
        (64 * GIB, 2 * GIB, "a 32nd of the state, less than its usual pieces"),
    ],
)
def test_the_default_for_slices_that_are_larger(state, nbytes, why):
    assert default_window(state) == Window(nbytes, why)


@pytest.mark.parametrize(
    ("sizes", "usual"),
    [
        ([], 0),
        ([5], 5),
        ([3, 3, 3], 3),
        ([10] * 8 + [20], 10),  # the embedding is a fifth of all: it does not count
        ([21] + [10] * 8, 21),  # and now it does
        ([1, 1, 1, 1, 6], 6),
    ],
)
def test_the_usual_slice_is_that_within_which_four_fifths_of_the_state_are(sizes, usual):
    assert _usual(sizes) == usual


@pytest.mark.parametrize(
    ("sizes", "window", "back"),
    [
        ([4, 4, 4, 4], 4, [-1, 0, 1, 2]),  # one at a time
        ([4, 4, 4, 4], 7, [-1, 0, 1, 2]),
        ([4, 4, 4, 4], 8, [-1, -1, 0, 1]),
        ([4, 4, 4, 4], 16, [-1, -1, -1, -1]),
        ([1, 1, 6, 1, 1], 8, [-1, -1, -1, 0, 1]),
        ([9, 1, 9], 8, [-1, 0, 1]),  # a slice that is larger than the window is alone in it
    ],
)
def test_what_must_be_stored_before_a_slice_is_loaded(sizes, window, back):
    assert [_must_be_back(sizes, k, window) for k in range(len(sizes))] == back


# ---- programs: for each leaf m of the state a gradient g


def momentum(*shapes, dtype=jnp.float32):
    """``m + g`` of each leaf: one is loaded and one stored."""

    def update(*args):
        gradients, leaves = args[: len(shapes)], args[len(shapes) :]
        return [store(load(m) + g) for g, m in zip(gradients, leaves, strict=True)]

    program = program_of(update, *(device(*s, dtype=dtype) for s in shapes), *(host(*s, dtype=dtype) for s in shapes))
    return program, dict(zip(program.outputs, program.inputs[len(shapes) :], strict=True))


def adam(*shapes):
    """Of each parameter two leaves, which need each other."""

    def update(*args):
        n = len(shapes)
        gradients, first, second = args[:n], args[n : 2 * n], args[2 * n :]
        new = [(load(m) + g, load(v) + g * g) for g, m, v in zip(gradients, first, second, strict=True)]
        return [
            *(m / (v + 1) for m, v in new), *(store(m) for m, _ in new), *(store(v) for _, v in new)
        ]  # fmt: skip

    program = program_of(update, *(device(*s) for s in shapes), *(host(*s) for s in shapes * 2))
    return program, dict(zip(program.outputs, program.inputs, strict=True))


def hosts(next_of):
    return frozenset(v for v in next_of.values() if v.aval.memory_space == jax.memory.Space.Host)


def window_of(program, next_of, given=None, shards=None, **how):
    program = dataclasses.replace(program, shards=shards or {})
    (only,) = cut(program, False)
    slices = [dataclasses.replace(s, shards=program.shards) for s in only.slices]
    return _window(Region(hosts(next_of), given), [s.loaded_bytes for s in slices], program, **how)


SQUARE = 256, 256  # 256 KiB


def test_a_given_window_is_taken_whatever_the_state():
    program, next_of = momentum(*[SQUARE] * 4)
    assert window_of(program, next_of, 123) == (Window(123, "as given"), 123)
    assert window_of(program, next_of, 2**40) == (Window(2**40, "as given"), 2**40)


def test_the_default_has_room_for_two_and_a_half_usual_slices():
    program, next_of = adam(*[SQUARE] * 4, (8, 8))
    chosen, large = window_of(program, next_of)
    assert chosen == Window(5 * 512 * KIB // 2, "two and a half of its usual pieces", own_loop=SMALL_PIECES)
    # of this state the default for larger slices is 1 MiB: up to twice that no pass is made for an embedding
    assert large == 2 * MIB


def test_the_default_is_smaller_where_the_usual_slice_is_larger_than_that():
    program, next_of = momentum((2048, 1024))  # 8 MiB: the whole state
    chosen, large = window_of(program, next_of)
    assert chosen == Window(MIB, "1 MiB, the least")
    assert large == 2 * MIB


@pytest.mark.parametrize(
    ("leaves", "usual"), [([2048] * 2, 8 * MIB), ([2048], None), ([2048, 512], None), ([65537] * 3, None)]
)
def test_pieces_between_gates_may_be_half_of_the_state(leaves, usual):
    """Not more, which goes in chunks of an eighth, nor above 256 MiB."""
    program, next_of = momentum(*[(rows, 1024) for rows in leaves])
    state = 4 * KIB * sum(leaves)
    free, gated = (window_of(program, next_of, gated=gated)[0] for gated in (False, True))
    assert free == default_window(state) and free.nbytes < 4 * KIB * min(leaves)
    assert gated == (free if usual is None else Window(5 * usual // 2, "two and a half of its usual pieces"))


@pytest.mark.parametrize(("rows", "apart"), [(2047, True), (2048, False)])
def test_slices_below_8_mib_run_apart(rows, apart):
    """Eight of them, so that the window, an eighth of the state, is no less."""
    program, next_of = momentum(*[(rows, 1024)] * 9)
    chosen, _ = window_of(program, next_of)
    assert chosen == Window(
        5 * rows * 4 * KIB // 2, "two and a half of its usual pieces", SMALL_PIECES if apart else ""
    )


def test_slices_of_a_divided_state_do_not_run_apart_and_count_on_one_device():
    program, next_of = momentum(*[SQUARE] * 4)
    shards = dict.fromkeys(hosts(next_of), (4, 2))
    chosen, _ = window_of(program, next_of, shards=shards)
    assert chosen == Window(5 * 32 * KIB // 2, "two and a half of its usual pieces", own_loop="")
    unsharded, _ = window_of(program, next_of, shards=dict.fromkeys(hosts(next_of), (1, 1)))
    assert unsharded.own_loop
    late, _ = window_of(program, next_of, shards=shards, own_loop="put off")
    assert late.own_loop == "put off"
    given, _ = window_of(program, next_of, 123, shards=shards, own_loop="put off")
    assert given.own_loop == "put off"


def fitted(program, next_of, nbytes):
    window = Window(nbytes, "")
    return _fitted(cut(program, False)[0].slices, next_of, window)


def test_what_is_no_larger_than_the_window_is_loaded_whole():
    program, next_of = momentum((64, 8, 8), (65, 8, 8))
    planned = fitted(program, next_of, 64 * 256)
    assert [p.slice.loads[0].aval.shape[0] for p in planned if isinstance(p.transfer, Whole)] == [64]
    assert [(p.transfer.shape, str(p.transfer)) for p in planned if isinstance(p.transfer, Chunked)] == [
        ((65, 8, 8), "3 chunks of axis 0")
    ]


def test_what_cannot_be_chunked_says_why():
    def update(m):
        return store(jnp.sort(load(m), axis=0))

    program = program_of(update, host(64, 8, 8))
    (p,) = fitted(program, {program.outputs[0]: program.inputs[0]}, 4 * KIB)
    assert p.transfer == Whole("sort")
    assert (p.bytes_at_once, p.bytes_in_flight) == (16 * KIB, 4 * KIB)


def shared(planned):
    """How many leaves each loop has."""
    return sorted(len(p.slice.loads) for p in planned if p.in_chunks)


ROW = 8 * 8 * 4  # bytes of a row of (·, 8, 8)


def test_leaves_of_as_many_rows_share_a_loop():
    """One direction of the link at a time is used by a loop over one leaf."""
    program, next_of = momentum((64, 8, 8), (64, 8, 8), (32, 8, 8), (64, 8, 8))
    planned = fitted(program, next_of, 16 * ROW)
    assert shared(planned) == [1, 3]
    together = max(planned, key=lambda p: len(p.slice.loads))
    assert isinstance(together.transfer, Chunked)
    assert together.transfer.rows == 2  # of each of three: less than half of the window
    assert together.slice.stores == [program.outputs[k] for k in (0, 1, 3)]


@pytest.mark.parametrize(("rows", "loops"), [(4, [2, 2]), (6, [1, 3]), (8, [4]), (2, [1, 1, 1, 1]), (3, [1, 1, 1, 1])])
def test_they_share_it_as_long_as_one_row_of_each_fits_half_of_the_window(rows, loops):
    program, next_of = momentum(*[(64, 8, 8)] * 4)
    assert shared(fitted(program, next_of, rows * ROW)) == loops


def test_two_leaves_of_one_slice_share_their_loop_with_no_other():
    program, next_of = adam((64, 8, 8), (64, 8, 8))
    assert shared(fitted(program, next_of, 16 * ROW)) == [2, 2]


# ---- plans


def planned(program, next_of, *regions, rank=lambda v: 0):
    return passes_of(program, next_of, regions, rank, manual=False)


def windows(plan):
    return {v: p.window.nbytes for each in plan for p in each.slices for v in p.slice.loads}


def test_every_region_has_its_own_window():
    program, next_of = momentum(SQUARE, SQUARE, SQUARE)
    a, b, c = next_of.values()
    plan = planned(program, next_of, Region(frozenset({a}), MIB), Region(frozenset({b}), 3 * MIB),
                   Region(frozenset({c}), None))  # fmt: skip
    assert windows(plan) == {a: MIB, b: 3 * MIB, c: 5 * 256 * KIB // 2}


def test_a_slice_of_two_regions_takes_the_smaller_window():
    program = program_of(lambda a, b: store(load(a) + load(b)), host(*SQUARE), host(*SQUARE))
    a, b = program.inputs
    for first, second in (MIB, 2 * MIB), (2 * MIB, MIB), (None, MIB):
        plan = planned(program, {}, Region(frozenset({a}), first), Region(frozenset({b}), second))
        assert windows(plan) == {a: MIB, b: MIB}


def norms(shapes):
    """Each leaf by the norm of all."""

    def update(*leaves):
        norm = sum((load(m) ** 2).sum() for m in leaves)
        return [store(load(m) / norm) for m in leaves]

    program = program_of(update, *(host(*s) for s in shapes))
    return program, dict(zip(program.outputs, program.inputs, strict=True))


def test_a_second_pass_is_made_only_where_one_is_more_than_the_window():
    program, next_of = norms([SQUARE] * 4)
    region = Region(hosts(next_of), MIB)
    assert [len(each.slices) for each in planned(program, next_of, region)] == [1]
    region = Region(hosts(next_of), MIB - 1)
    assert [len(each.slices) for each in planned(program, next_of, region)] == [4, 4]


def test_a_second_pass_is_not_made_where_it_does_not_help():
    """The rows of the sorted leaf depend on each other, norm or not."""

    def update(m):
        return store(jnp.sort(load(m), axis=0) / (load(m) ** 2).sum())

    program = program_of(update, host(*SQUARE))
    next_of = {program.outputs[0]: program.inputs[0]}
    (only,) = planned(program, next_of, Region(hosts(next_of), 64 * KIB))
    assert [str(p.transfer).split(":")[0] for p in only.slices] == ["whole"]


def test_slices_are_loaded_in_the_order_of_the_backward_pass_once_there_is_room():
    program, next_of = momentum(*[SQUARE] * 5)
    leaves = [*next_of.values()]
    places = dict(zip(leaves, [3, 0, 4, 1, 2], strict=True))
    (only,) = planned(program, next_of, Region(hosts(next_of), 2 * 256 * KIB), rank=places.__getitem__)
    assert [p.slice.loads for p in only.slices] == [[leaves[k]] for k in (1, 3, 4, 0, 2)]
    assert [p.once_stored for p in only.slices] == [-1, -1, 0, 1, 2]
    # the gradient of the first slice that is still in the window; none where that is its own
    assert [p.once_produced for p in only.slices] == [None, 0, 1, 2, 3]
    assert [p.token for p in only.slices] == [tuple(p.slice.stores) for p in only.slices]
    assert not only.in_own_loop  # the window is given


def test_the_first_chunk_of_a_loop_waits_for_its_own_gradient():
    program, next_of = momentum((64, 8, 8), (32, 8, 8))
    (only,) = planned(program, next_of, Region(hosts(next_of), 16 * ROW))
    assert all(p.in_chunks for p in only.slices)
    assert [p.once_produced for p in only.slices] == [0, 1]
    assert [p.bytes_at_once for p in only.slices] == [16 * ROW] * 2


@pytest.mark.parametrize(("dtype", "apart"), [(jnp.float32, True), (jnp.bfloat16, True), (jnp.float16, False)])
def test_small_slices_run_in_a_loop_of_their_own_and_carry_their_buffers(dtype, apart):
    """But in float16, where XLA rounds as a fusion ends."""
    program, next_of = momentum(SQUARE, SQUARE, dtype=dtype)
    (only,) = planned(program, next_of, Region(hosts(next_of), None))
    assert only.in_own_loop == apart
    assert (only.carried or next_of) == next_of
    assert all(bool(p.window.own_loop) == apart for p in only.slices)


def test_a_new_leaf_on_the_host_has_no_buffer_to_carry():
    program, next_of = momentum(SQUARE, SQUARE)
    first = dict([next(iter(next_of.items()))])
    (only,) = passes_of(program, first, [Region(hosts(next_of), None)], lambda v: 0, manual=False)
    assert not only.in_own_loop and not any(p.window.own_loop for p in only.slices)
    (only,) = passes_of(program, next_of, [Region(hosts(next_of), None)], lambda v: 0, manual=True)
    assert not only.in_own_loop  # nor inside shard_map
