"""What an iteration of a scan hides; and what moves between scans."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from jax_offload._analysis import scanned
from jax_offload._analysis.estimated_ways import _scans
from jax_offload._analysis.exposure import link_of
from jax_offload._analysis.scanned import LATE, hidden_at, in_scans
from jax_offload._report.report import traced
from jax_offload._step.rewritten import rewritten
from tests.aot.model import step_of

H200 = jo.chip("h200")
X = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def plans():
    """Of two scans of four layers, in the order of the backward pass. A row is two moments of 1 MiB."""
    params = {name: jax.ShapeDtypeStruct((4, 512, 512), jnp.float32) for name in "ab"}
    tx = jo.offload(optax.adamw(1e-3), min_bytes=0)

    def loss(params, x):
        for name in "ab":
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[name])[0]
        return (x**2).mean()

    args = params, jo.abstract_state(tx, params), X
    return _scans(traced(rewritten(step_of(tx, loss, update_params=True)), *args))


def test_between_scans_both_directions_are_busy():
    """The last row of one is stored while the first of the next is loaded; or one after the other."""
    link, row = link_of(H200), 2 * 2**20
    least, most = in_scans(plans(), link, H200, 1, beside=1.0)  # so much hides all that iterations move
    assert least == pytest.approx(row / link.both + row / link.store)
    assert most == pytest.approx(2 * row / link.store + row / link.load)


@pytest.mark.parametrize(("name", "late"), [("h200", LATE), ("v5e", 0.0)])
def test_a_later_phase_begins_to_load_late(name, late, monkeypatch):
    """Two phases of a second, with 0.75 to move in each of four iterations: half of the second one's has passed."""
    (plan, _), chip = plans(), jo.chip(name)
    monkeypatch.setattr(scanned, "_behind_each", lambda plan, chip: [1.0, 1.0])
    monkeypatch.setattr(scanned, "_moving", lambda plan, link: [0.75, 0.75])
    least, most = in_scans([plan], jo.types.Link(1e18, 1e18, 1e18), chip, 1, 0.0)
    assert least == pytest.approx(0, abs=1e-9) and most == pytest.approx(4 * max(0, late - 0.25), abs=1e-9)
    assert hidden_at([plan], link_of(chip), chip, 1) == 0.75
