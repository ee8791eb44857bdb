"""How large a window is, what goes through it at once, and in which way: as ``placement`` says before a step runs."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo

KIB, MIB, GIB = 2**10, 2**20, 2**30
MOMENTUM = optax.sgd(1e-3, momentum=0.9)  # a leaf of the state for each parameter


def placed(shapes, inner=MOMENTUM, sharding=None, **options):
    """The placement for parameters of these shapes, or of so many rows of 4 KiB."""
    shapes = [(s, 1024) if isinstance(s, int) else s for s in shapes]
    params = {f"w{k}": jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for k, s in enumerate(shapes)}
    return jo.placement(jo.offload(inner, min_bytes=0, **options), params)


EIGHTH, USUAL = "an eighth of the state", "two and a half of its usual pieces"
ON_8 = jax.sharding.NamedSharding(jax.make_mesh((8,), ("d",)), jax.sharding.PartitionSpec("d"))
WINDOWS = {  # shapes, options, the window's bytes, why, and whether small pieces run in a loop of their own
    "one piece of 8 MiB": ([2048], {}, MIB, "1 MiB, the least", False),
    "one piece of more": ([2304], {}, 9 * MIB // 8, EIGHTH, False),
    "2 GiB": ([2**19], {}, 256 * MIB, "256 MiB, less than its usual pieces", False),
    "8 GiB": ([2**21], {}, 256 * MIB, "256 MiB, less than its usual pieces", False),
    "16 GiB": ([2**22], {}, 512 * MIB, "a 32nd of the state, less than its usual pieces", False),
    "an embedding of less than a fifth does not count": ([2560] * 8 + [5120], {}, 25 * MIB, USUAL, False),
    "an embedding of more does": ([5376] + [2560] * 8, {}, 101 * MIB // 8, EIGHTH, False),
    "pieces of 8 MiB": ([2048] * 9, {}, 20 * MIB, USUAL, False),
    "smaller ones run in a loop of their own": ([2044] * 9, {}, 5 * 2044 * 4 * KIB // 2, USUAL, True),
    "given, small": ([256] * 4, {"window": MIB}, MIB, "as given", False),
    "given, large": ([256] * 4, {"window": GIB}, GIB, "as given", False),
    "two leaves that need each other are one piece": (
        [(256, 256)] * 4 + [(8, 8)], {"inner": optax.adam(1e-3)}, 5 * 512 * KIB // 2, USUAL, True
    ),
    "divided pieces count on one device, and do not run apart": (
        [(256, 256)] * 4, {"sharding": ON_8}, 5 * 32 * KIB // 2, USUAL, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS)
def test_the_window(case):
    shapes, options, nbytes, why, apart = WINDOWS[case]
    (window,) = placed(shapes, **options).windows
    assert (window.nbytes, window.why, bool(window.own_loop)) == (nbytes, why, apart)


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
    found = [leaf.streams for leaf in placed([(256, 256)] * 4, normed(), window=window).leaves if leaf.host]
    assert all(("2 times" in way or "; then " in way) == twice for way in found)
