"""A rewritten step is checked before it runs: with a policy that is broken on purpose, the step that was written runs.

The hooks are the decisions which part runs where: no public option breaks these.
"""

import dataclasses

import pytest

import jax_offload as jo
from jax_offload._emit.region import Update, is_update
from jax_offload._host import stages as driven
from jax_offload._rewrite import rewritten
from jax_offload._step import rotated
from tests.support.steps import ADAMW, assert_as_plain, offloaded, step_of

pytestmark = pytest.mark.filterwarnings("always:jax_offload")


def with_results_exchanged(parts):
    return [
        dataclasses.replace(part, makes=part.makes[::-1]) if isinstance(part.payload, Update) else part
        for part in parts
    ]


def failing(parts):
    raise KeyError("a policy")


def with_an_early_load(program, found):
    """The update's equation ahead of what makes its gradients."""
    return dataclasses.replace(found, eqns=sorted(found.eqns, key=lambda eqn: not is_update(eqn)))


def with_another_memory(program, found):
    """The update is given the gradients, and expects them in host memory."""
    given = next(eqn for eqn in program.eqns if is_update(eqn))
    made = next(eqn for eqn in found.eqns if is_update(eqn))
    ins = [v if v in program.inputs else given.invars[0] for v in made.invars]
    return dataclasses.replace(found, eqns=[eqn.replace(invars=ins) if eqn is made else eqn for eqn in found.eqns])


def parts_of(broken):
    return lambda found: found and dataclasses.replace(found, parts=broken(found.parts))


HOST = {"gradients": "host"}
WAITS = "gradients wait on the device, as its rewriting failed .CannotRewrite: "
BROKEN = [  # the decision, what breaks its result, the step, its options, and what is said
    *((rewritten, "parts_of", parts_of(broken), way, {}, f"its rewriting failed .{why}")
      for way in (jo.jit, jo.pipelined)
      for broken, why in ((lambda parts: parts[1:], "CannotRewrite: (a part reads|no part makes)"),
                          (with_results_exchanged, "CannotRewrite: a part makes .* in place of"),
                          (failing, "KeyError: 'a policy'"))),
    # the programs that overlap best lack one: the step runs in those that it was cut in
    (driven, "arranged", lambda found: dataclasses.replace(found, stages=found.stages[1:]), jo.jit, {},
     "runs in fewer programs, .* its rewriting failed .CannotRewrite: a part reads"),
    (rotated, "_of_update", with_an_early_load, jo.pipelined, HOST, WAITS + "a part reads .*, and none before"),
    (rotated, "_of_update", with_another_memory, jo.pipelined, HOST, WAITS + "an update has .* in place of"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "broken", "way", "options", "why"), BROKEN)
def test_a_broken_policy_costs_time_and_no_number(module, name, broken, way, options, why, monkeypatch):
    decide = getattr(module, name)

    def decided(program, *args, **how):
        found = decide(program, *args, **how)
        return broken(program, found) if module is rotated else broken(found)

    monkeypatch.setattr(module, name, decided)
    tx = offloaded(ADAMW, **({"update_on": "host"} if module is driven else {}))
    with pytest.warns(UserWarning, match=why):
        table = assert_as_plain(step_of, tx, ADAMW, way, **options)
    assert module is not rewritten or "its rewriting failed" in str(table)
