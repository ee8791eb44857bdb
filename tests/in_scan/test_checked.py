"""A rewritten step is checked before it runs: with a policy that is broken on purpose, the step that was written runs.

The hooks are the decisions which part runs where: no public option breaks these.
"""

import dataclasses

import pytest

import jax_offload as jo
from jax_offload._emit.region import Update, is_update
from jax_offload._host import driver as driven
from jax_offload._rewrite import rewritten
from jax_offload._step import rotated
from tests.support.steps import ADAMW, assert_as_plain, offloaded, step_of

pytestmark = pytest.mark.filterwarnings("always:jax_offload")


def without_a_part(parts):
    return parts[1:]


def with_results_exchanged(parts):
    return [
        dataclasses.replace(part, makes=part.makes[::-1]) if isinstance(part.payload, Update) else part
        for part in parts
    ]


def failing(parts):
    raise KeyError("a policy")


BROKEN = {
    "lacks": (without_a_part, "CannotRewrite: (a part reads|no part makes)"),
    "types": (with_results_exchanged, "CannotRewrite: a part makes .* in place of"),
    "fails": (failing, "KeyError: 'a policy'"),
}


@pytest.mark.parametrize("way", [jo.jit, jo.pipelined])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_policy_costs_time_and_no_number(kind, way, monkeypatch):
    broken, why = BROKEN[kind]
    decided = rewritten.parts_of

    def parts_of(program):
        found = decided(program)
        return None if found is None else dataclasses.replace(found, parts=broken(found.parts))

    monkeypatch.setattr(rewritten, "parts_of", parts_of)
    with pytest.warns(UserWarning, match=f"its rewriting failed .{why}"):
        table = assert_as_plain(step_of, offloaded(ADAMW), ADAMW, way)
    assert "its rewriting failed" in str(table)


def test_a_broken_cut_of_a_driven_step_costs_time_and_no_number(monkeypatch):
    """The programs that overlap best lack one: the step runs in those that it was cut in."""
    cut = driven.arranged

    def arranged(step, **how):
        step = cut(step, **how)
        return dataclasses.replace(step, stages=step.stages[1:])

    monkeypatch.setattr(driven, "arranged", arranged)
    with pytest.warns(
        UserWarning, match="runs in fewer programs, .* its rewriting failed .CannotRewrite: a part reads"
    ):
        assert_as_plain(step_of, offloaded(ADAMW, update_on="host"), ADAMW)


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
    of_update = rotated._of_update
    monkeypatch.setattr(rotated, "_of_update", lambda program, *args: broken(program, of_update(program, *args)))
    with pytest.warns(
        UserWarning, match=f"gradients wait on the device, as its rewriting failed .CannotRewrite: {why}"
    ):
        assert_as_plain(step_of, offloaded(ADAMW), ADAMW, jo.pipelined, gradients="host")
