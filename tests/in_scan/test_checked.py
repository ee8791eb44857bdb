"""A rewritten step is checked before it runs: with a policy that is broken on purpose, the step that was written runs.

The hooks are the decisions which part runs where: no public option breaks these.
"""

import dataclasses

import jax
import optax
import pytest

import jax_offload as jo
from jax_offload._drive import run as driven
from jax_offload._emit.find import is_update
from jax_offload._interop import pending
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
        dataclasses.replace(part, makes=part.makes[::-1]) if isinstance(part.payload, Slice) else part for part in parts
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
    with pytest.warns(UserWarning, match=f"the step runs as written, .* its rewriting failed .{why}"):
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


def test_a_broken_cut_of_a_driven_step_costs_time_and_no_number(monkeypatch):
    """The programs that overlap best lack one: the step runs in those that it was cut in."""
    cut = driven.in_segments

    def in_segments(step):
        step = cut(step)
        return dataclasses.replace(step, stages=step.stages[1:])

    monkeypatch.setattr(driven, "in_segments", in_segments)
    inner, params = optax.adamw(1e-2), parameters()
    tx = jo.offload(inner, min_bytes=0, update_on="host")
    wanted, _ = loop(step_of(inner, "update"), (params, inner.init(params)), BATCHES)
    got = copied((params, tx.init(params)))
    jitted = jo.jit(step_of(tx), donate_argnums=(0, 1), compiler_options=FAST)
    with pytest.warns(
        UserWarning, match="runs in fewer programs, .* its rewriting failed .CannotRewrite: a part reads"
    ):
        *got, _ = jitted(*got, BATCHES[0])
    for each in BATCHES[1:]:
        *got, _ = jitted(*got, each)
    assert_close(got[0], wanted[-1][0], 1e-4)


def with_an_early_load(program, found):
    """The update's equation ahead of what makes its gradients."""
    eqns = sorted(found.eqns, key=lambda eqn: not is_update(eqn))
    return dataclasses.replace(found, eqns=eqns)


def with_another_memory(program, found):
    """The update is given the gradients, and expects them in host memory."""
    given = next(eqn for eqn in program.eqns if is_update(eqn))
    made = next(eqn for eqn in found.eqns if is_update(eqn))
    ins = [v if v in program.inputs else given.invars[0] for v in made.invars]
    return dataclasses.replace(found, eqns=[eqn.replace(invars=ins) if eqn is made else eqn for eqn in found.eqns])


@pytest.mark.parametrize(
    ("broken", "why"),
    [(with_an_early_load, "a part reads .*, and none before"), (with_another_memory, "an update has .* in place of")],
)
def test_gradients_that_cannot_wait_on_the_host_wait_on_the_device(broken, why, monkeypatch):
    of_update = pending._of_update
    monkeypatch.setattr(pending, "_of_update", lambda program, *args: broken(program, of_update(program, *args)))
    params, tx, inner = parameters(), jo.offload(optax.adamw(1e-2), min_bytes=0), optax.adamw(1e-2)
    wanted, _ = loop(step_of(inner, "update"), (params, inner.init(params)), BATCHES)
    train = pipelined(step_of(tx), gradients="host")
    with pytest.warns(
        UserWarning, match=f"gradients wait on the device, as its rewriting failed .CannotRewrite: {why}"
    ):
        carry, _ = advance(train, copied((params, tx.init(params))), BATCHES)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-4)
