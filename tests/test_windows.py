"""How large a window is, what goes through it at once, and in which way: as ``placement`` says before a step runs."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo

KIB, MIB, GIB = 2**10, 2**20, 2**30
MOMENTUM = optax.sgd(1e-3, momentum=0.9)  # a leaf of the state for each parameter


def placed(shapes, inner=MOMENTUM, **options):
    """The placement for parameters of these shapes, or of so many rows of 4 KiB."""
    shapes = [(s, 1024) if isinstance(s, int) else s for s in shapes]
    params = {f"w{k}": jax.ShapeDtypeStruct(s, jnp.float32) for k, s in enumerate(shapes)}
    return jo.placement(jo.offload(inner, min_bytes=0, **options), params)


EIGHTH, USUAL = "an eighth of the state", "two and a half of its usual pieces"
WINDOWS = {
    "one piece of 8 MiB": ([2048], MIB, "1 MiB, the least", False),
    "one piece of more": ([2304], 9 * MIB // 8, EIGHTH, False),
    "2 GiB": ([2**19], 256 * MIB, "256 MiB, less than its usual pieces", False),
    "8 GiB": ([2**21], 256 * MIB, "256 MiB, less than its usual pieces", False),
    "16 GiB": ([2**22], 512 * MIB, "a 32nd of the state, less than its usual pieces", False),
    "an embedding of less than a fifth does not count": ([2560] * 8 + [5120], 25 * MIB, USUAL, False),
    "an embedding of more does": ([5376] + [2560] * 8, 101 * MIB // 8, EIGHTH, False),
    "pieces of 8 MiB": ([2048] * 9, 20 * MIB, USUAL, False),
    "smaller ones run in a loop of their own": ([2044] * 9, 5 * 2044 * 4 * KIB // 2, USUAL, True),
}  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS)
def test_the_default_window(case):
    shapes, nbytes, why, apart = WINDOWS[case]
    (window,) = placed(shapes).windows
    assert (window.nbytes, window.why, bool(window.own_loop)) == (nbytes, why, apart)


@pytest.mark.parametrize("nbytes", [MIB, GIB])
def test_a_given_window_is_taken_whatever_the_state(nbytes):
    (window,) = placed([256] * 4, window=nbytes).windows
    assert (window.nbytes, window.why, window.own_loop) == (nbytes, "as given", "")


def test_two_leaves_that_need_each_other_are_one_piece():
    (window,) = placed([(256, 256)] * 4 + [(8, 8)], optax.adam(1e-3)).windows
    assert (window.nbytes, window.why) == (5 * 512 * KIB // 2, USUAL)


def test_pieces_of_a_divided_state_count_on_one_device_and_do_not_run_apart():
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("d",)), jax.sharding.PartitionSpec("d"))
    params = {f"w{k}": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding) for k in range(4)}
    (window,) = jo.placement(jo.offload(MOMENTUM, min_bytes=0), params).windows
    assert (window.nbytes, window.why, window.own_loop) == (5 * 32 * KIB // 2, USUAL, "")


def ways(shapes, inner=MOMENTUM, **options):
    return [leaf.streams for leaf in placed(shapes, inner, **options).leaves if leaf.host]


def test_what_is_no_larger_than_the_window_is_loaded_whole():
    whole, chunked = ways([(64, 8, 8), (65, 8, 8)], window=64 * 256)
    assert whole.startswith("whole") and "3 chunks of axis 0" in chunked


def normed():
    """Momentum scaled by the norm of all of it: the norm needs every leaf before any is updated."""
    trace = optax.trace(0.9)

    def update(updates, state, params=None):
        updates, state = trace.update(updates, state)
        norm = optax.global_norm(updates)
        return updates, state._replace(trace=jax.tree.map(lambda m: m / norm, state.trace))

    return optax.GradientTransformation(trace.init, update)


@pytest.mark.parametrize(("window", "twice"), [(MIB, False), (MIB - 4 * KIB, True)])
def test_a_second_pass_is_made_only_where_one_is_more_than_the_window(window, twice):
    found = ways([(256, 256)] * 4, normed(), window=window)
    assert all(("2 times" in way or "; then " in way) == twice for way in found)
