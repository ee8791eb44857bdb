"""Twenty steps of what people combine, under ``jo.jit`` and ``jo.pipelined``: the numbers of plain optax."""

import dataclasses

import pytest

from jax_offload._interop import jit as interop_jit
from tests.support import trajectories
from tests.support.rows import rows
from tests.support.trajectories import Run, compared, random_run

WHY = "trains for 20 steps, plain and rewritten"
TURNED, WAITING = "pipelined, device", "pipelined, host"
# name: the run, and whether its update moves to where the step's passes are
RUNS: dict[str, tuple[Run, bool]] = {
    "unrolled": (Run(layers="unrolled"), True),
    "unrolled, checkpointed, update": (Run(layers="unrolled", checkpoint=True, update=True), True),
    "unrolled, half": (Run(layers="unrolled", fraction=0.5, inner="injected"), True),
    "unrolled, int8": (Run(layers="unrolled", storage="int8", average=True), True),
    "unrolled, bfloat16": (Run(layers="unrolled", storage="bfloat16", update=True), True),
    "unrolled, masters": (Run(layers="unrolled", masters=True), True),
    "unrolled, a partition": (Run(layers="unrolled", inner="partition", average=True), True),
    "unrolled, skip": (Run(layers="unrolled", guard="skip"), False),
    "unrolled, loss scale": (Run(layers="unrolled", guard="scale", inner="injected"), False),
    "unrolled, MultiSteps": (Run(layers="unrolled", inner="MultiSteps", update=True), True),
    "scanned, skip, plateau": (Run(guard="skip", inner="plateau", average=True), False),
    "scanned, loss scale, masters": (Run(guard="scale", masters=True), False),
    "scanned, int8, microbatches": (Run(storage="int8", microbatches=2), True),
    "scanned, where, MultiSteps": (Run(guard="where", inner="MultiSteps", update=True), True),
    "scanned, ema, half": (Run(inner="ema", fraction=0.5, update=True, average=True), True),
    "fsdp, unrolled": (Run(layers="unrolled", mesh="fsdp", clip="inside"), False),
    "fsdp, Explicit, skip": (Run(mesh="fsdp", explicit=True, guard="skip"), False),
    "zero, int8, Explicit, loss scale": (Run(mesh="zero", storage="int8", explicit=True, guard="scale"), False),
    "zero, scanned": (Run(mesh="zero", inner="injected"), True),
    "turned, unrolled, skip": (Run(TURNED, "unrolled", clip="inside", guard="skip", finishes=True), True),
    "turned, unrolled, int8": (Run(TURNED, "unrolled", clip="inside", storage="int8"), True),
    "turned, unrolled, plateau, average": (Run(TURNED, "unrolled", "plateau", "outside", average=True), True),
    "turned, unrolled, where": (Run(TURNED, "unrolled", clip="inside", guard="where", update=True), True),
    "turned, scanned, loss scale": (Run(TURNED, clip="inside", guard="scale", finishes=True), True),
    "turned, scanned, masters, skip": (Run(TURNED, clip="inside", masters=True, guard="skip"), True),
    "turned, bfloat16, injected": (Run(TURNED, "scanned", "injected", "inside", storage="bfloat16"), True),
    "turned, zero, Explicit": (Run(TURNED, clip="inside", mesh="zero", explicit=True, finishes=True), True),
    "turned, fsdp, int8, unrolled": (Run(TURNED, "unrolled", clip="inside", mesh="fsdp", storage="int8"), True),
    "turned, microbatches, skip": (Run(TURNED, clip="inside", microbatches=4, guard="skip"), True),
    "waiting, unrolled": (Run(WAITING, "unrolled", clip="inside", average=True, finishes=True), True),
    "waiting, scanned, masters": (Run(WAITING, clip="inside", masters=True), True),
    "waiting, scanned, int8, average": (Run(WAITING, clip="inside", storage="int8", average=True), True),
    "waiting, skip": (Run(WAITING, clip="inside", guard="skip", finishes=True), True),
    "waiting, unrolled, loss scale": (Run(WAITING, "unrolled", clip="inside", guard="scale"), True),
    "turned, apply_if_finite": (Run(TURNED, "scanned", "apply_if_finite", "inside"), True),
    "turned, zero, skip": (Run(TURNED, clip="inside", mesh="zero", explicit=True, guard="skip"), True),
    "waiting, fsdp": (Run(WAITING, clip="outside", mesh="fsdp", update=True), True),
}  # fmt: skip
DAILY = ["unrolled, skip", "turned, unrolled, skip"]


@pytest.fixture(autouse=True)
def compile_fast(monkeypatch):
    monkeypatch.setattr(interop_jit, "compiler_options", lambda platform: trajectories.FAST)


@pytest.mark.exhaustive(
    "trains for 20 steps, plain and rewritten",
    but=[
        "scanned, loss*",
        "scanned, where*",
        "fsdp, Explicit*",
        "zero, int8*",
        "turned, unrolled, plateau*",
        "turned, scanned, loss*",
        "turned, zero*",
        "turned, fsdp*",
        "waiting, unrolled",
        "waiting, skip*",
        "turned, apply*",
        "turned, unrolled, skip",
        "unrolled, skip",
    ],
)
@pytest.mark.parametrize("name", rows(RUNS, WHY, daily=DAILY))
def test_twenty_steps(name):
    run, moves = RUNS[name]
    assert (compared(run) > 0) == moves


@pytest.mark.exhaustive("trains 200 random runs for 20 steps")
@pytest.mark.parametrize("seed", range(200))
def test_random_runs(seed):
    compared(random_run(seed))


def test_a_wrong_run_is_noticed(monkeypatch):
    """Of a schedule that is one step late, at step 20."""
    run = Run("pipelined, device", "scanned", clip="inside")
    late = dataclasses.replace(run, inner="adamw")
    monkeypatch.setitem(trajectories.INNER, "adamw", lambda: trajectories.adamw(lambda k: trajectories.rate(k - 1)))
    monkeypatch.setattr(trajectories, "trained", lambda _, trained=trajectories.trained: trained(late))
    with pytest.raises(AssertionError):
        compared(run)
