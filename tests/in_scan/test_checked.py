"""A rewritten step is checked before it runs: with a policy that is broken on purpose, the step that was written runs.

The hook is ``rewritten.parts_of``, the decision which part runs where: no public option breaks it.
"""

import dataclasses

import jax
import optax
import pytest

import jax_offload as jo
from jax_offload._ir.slices import Slice
from jax_offload._step import rewritten
from tests.support.pipelined import (
    advance,
    assert_close,
    assert_placed,
    batch,
    copied,
    loop,
    parameters,
    pipelined,
    step_of,
)
from tests.support.trees import FAST

pytestmark = pytest.mark.filterwarnings("always:jax_offload")
BATCHES = [batch(k) for k in range(3)]


def without_a_part(parts):
    return parts[1:]


def with_results_exchanged(parts):
    return [
        dataclasses.replace(part, outputs=part.outputs[::-1]) if isinstance(part, Slice) else part for part in parts
    ]


def failing(parts):
    raise KeyError("a policy")


BROKEN = {
    "lacks": (without_a_part, "CannotRewrite: (a part reads|no part makes)"),
    "types": (with_results_exchanged, "CannotRewrite: a part makes .* in place of"),
    "fails": (failing, "KeyError: 'a policy'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_policy_costs_time_and_no_number(kind, monkeypatch):
    broken, why = BROKEN[kind]
    decided = rewritten.parts_of

    def parts_of(program):
        found = decided(program)
        return None if found is None else dataclasses.replace(found, parts=broken(found.parts))

    monkeypatch.setattr(rewritten, "parts_of", parts_of)
    params, tx = parameters(), jo.offload(optax.adamw(1e-2), min_bytes=0)  # whose update moves into the scan
    inner = optax.adamw(1e-2)
    wanted, _ = loop(step_of(inner, "update"), (params, inner.init(params)), BATCHES)
    step, state = step_of(tx), tx.init(params)
    jitted, got = jo.jit(step, donate_argnums=(0, 1), compiler_options=FAST), copied((params, state))
    with pytest.warns(UserWarning, match=f"the step runs as it is written, .* its rewriting failed .{why}"):
        *got, _ = jitted(*got, BATCHES[0])
    for each in BATCHES[1:]:
        *got, _ = jitted(*got, each)
    train = pipelined(step)
    with pytest.warns(UserWarning, match=f"its rewriting failed .{why}"):
        carry, _ = advance(train, copied((params, state)), BATCHES)
    ours = train.finish(carry)
    for new, after in (got, ours):
        assert_close(new, wanted[-1][0], 1e-4)
        assert_placed(new, params)
        assert_placed(after, state)
    assert "its rewriting failed" in str(jo.placement(jitted, params, state, jax.tree.map(lambda x: x, BATCHES[0])))
