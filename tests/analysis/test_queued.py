"""What an update in pieces exposes, on a schedule that is worked out by hand."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import jax_offload as jo
from jax_offload._analysis.chips import chip
from jax_offload._analysis.exposure import link_of
from jax_offload._analysis.queued import as_gated, in_pieces, through_the_window
from jax_offload._emit.find import updates_in
from jax_offload._report.report import traced
from jax_offload._step.rewritten import rewritten
from tests.aot.model import ADAMW, CLIPPED, step_of

MIB = 2**20
WIDTHS = (2048, 2048, 8192, 512, 32768, 128)  # between them layers of 16, 64, 16, 64 and 16 MiB, moments of twice that


def loss(params, x):
    for k in range(len(params)):
        x = jnp.tanh(x @ params[f"w{k}"])
    return (x**2).mean()


def step(inner):
    return plain(inner, rewritten)


def plain(inner, how=lambda step: step, tokens=8, **options):
    shapes = itertools.pairwise(WIDTHS)
    params = {f"w{k}": jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in enumerate(shapes)}
    tx = jo.offload(inner, **options)
    args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((tokens, 2048), jnp.float32)
    return traced(how(step_of(tx, loss, update_params=True)), *args)


def test_large_pieces_go_one_way_at_a_time():
    """In 32 MiB, from the last layer on 1, 4, 1, 4, 1: a load waits for the one before, and for the stores of the one
    before that. Loads end at 1, 5, 6, 13 and 14, stores at 2, 9, 10, 17 and 18, where the link both ways needs 11."""
    link = link_of(chip("h200"))
    unit = 32 * MIB / link.both
    assert in_pieces(step(ADAMW).jaxpr, chip("h200"), link) == pytest.approx(18 * unit, rel=0.03)


def test_through_the_window_nothing_is_hidden():
    """In 32 MiB loads of 1, 4, 1, 4, 1, with room for 10: they end at 1, 5, 6, 10, 11, and stores at 2, 9, 10, 14, 15.
    With room for 5 a load waits for the stores of the one before that: stores end at 2, 9, 10, 17 and 18."""
    link = link_of(chip("h200"))
    for room, end in (10, 15), (5, 18):
        trace = plain(ADAMW, window=room * 32 * MIB)
        found = [each.update for each in updates_in(trace)]
        assert through_the_window(found, link) == pytest.approx(end * 32 * MIB / link.both, rel=0.01)
        # of 8 tokens the arithmetic is next to nothing
        assert as_gated(trace.jaxpr, chip("h200"), link) == pytest.approx(end * 32 * MIB / link.both, rel=0.03)


def test_what_is_hidden_is_stored_after_its_gradient():
    """Of many tokens: all is loaded and stored on the way, but for the last slice, which is stored when all is made."""
    link = link_of(chip("h200"))
    trace = plain(ADAMW, tokens=32768, window=320 * MIB)
    assert as_gated(trace.jaxpr, chip("h200"), link) == pytest.approx(32 * MIB / link.both, rel=0.3)


def test_an_update_that_is_in_no_pieces():
    assert in_pieces(step(CLIPPED).jaxpr, chip("h200"), link_of(chip("h200"))) is None
