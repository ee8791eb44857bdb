"""The parts of a peak, and a loop's iterations, beside what is worked out by hand."""

from types import SimpleNamespace

import pytest

import jax_offload as jo
from jax_offload._analysis.compiled import Argument, Compiled
from jax_offload._analysis.hlo import Module
from jax_offload._analysis.inspection import Loop, inspected
from tests.analysis.test_inspect import ADAMW, MIB, arguments, step
from tests.aot.harness import H200, require
from tests.aot.test_timeline import CHIP, MATRIX, ON_HOST, M, computation

X, Y = "f32[128,256]{1,0}", "bf16[128,256]{1,0}"
CARRIED = f"({ON_HOST}, {M}, {M})"
# An iteration loads a row, adds the gradient to it and stores it again.
BODY = computation(
    "%body",
    f"%r = {ON_HOST} get-tuple-element(%t), index=0",
    f"%w = {M} get-tuple-element(%t), index=1",
    f"%g = {M} get-tuple-element(%t), index=2",
    f"%l = ({M}, {ON_HOST}, u32[]) copy-start(%r)",
    f"%l-done = {M} copy-done(%l)",
    f'%e = {M} add(%l-done, %g), metadata={{op_name="jit(step)/jax_offload/update/mu/add"}}',
    f"%s = ({ON_HOST}, {M}, u32[]) copy-start(%e)",
    f"%s-done = {ON_HOST} copy-done(%s)",
    f"ROOT %o = {CARRIED} tuple(%s-done, %w, %g)",
    parameters=(f"%t = {CARRIED} parameter(0)",),
)
# Parameters, a batch, and a moment in host memory. The activation, in bfloat16, is returned, so that it stays.
STEP = computation(
    "ENTRY %main",
    f"%h = {Y} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
    f"%g = {M} dot(%x, %h), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, "
    'metadata={op_name="jit(step)/transpose(jvp())/dot_general"}',
    f"%i = {CARRIED} tuple(%m, %w, %g)",
    f'%loop = {CARRIED} while(%i), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"6"}}}}',
    f"%n = {ON_HOST} get-tuple-element(%loop), index=0",
    f"%p = {M} get-tuple-element(%loop), index=1",
    f"ROOT %out = ({M}, {ON_HOST}, {Y}) tuple(%p, %n, %h)",
    parameters=(
        f"%w = {M} parameter(0)",
        f"%x = {X} parameter(1)",
        f'%m = {ON_HOST} parameter(2), metadata={{op_name="state.mu"}}',
    ),
)
TEXT = "HloModule m, is_scheduled=true\n\n" + BODY + "%c (t: s32[]) -> pred[] {\n}\n\n" + STEP
GIVEN = {
    0: Argument("params", host=False, state=False),
    1: Argument("batch", host=False, state=False),
    2: Argument("state.mu", host=True, state=True),
}
SIZES = ("argument_size", "output_size", "alias_size", "host_argument_size", "host_output_size", "host_alias_size")
MEMORY = SimpleNamespace(
    temp_size_in_bytes=5 * MATRIX, host_temp_size_in_bytes=MATRIX, **{f"{name}_in_bytes": 0 for name in SIZES}
)


def test_by_hand():
    """Most is held in the loop: the gradient, what was loaded and its sum, beside the arguments and the activation."""
    report = inspected(Compiled(Module(TEXT), "", MEMORY, GIVEN, "h200", CHIP, compiled_for=True), None)
    assert (report.peak, report.host, report.host_temp) == (5 * MATRIX, MATRIX, MATRIX)
    assert report.parts == {
        "parameters": MATRIX,
        "other arguments": MATRIX // 2,
        "gradients": MATRIX,
        "activations": MATRIX // 4,
        "window": 2 * MATRIX,
        "rest": MATRIX // 4,  # to XLA's peak
    }
    assert report.loops == (Loop(("state.mu",), 6, 2 * MATRIX),)
    assert [(t.leaf, t.loads, t.nbytes, t.pieces) for t in report.transfers] == [
        ("state.mu", True, 6 * MATRIX, 6), ("state.mu", False, 6 * MATRIX, 6)
    ]  # fmt: skip


@pytest.mark.long("compiles more of the same for a chip", only=["4194304*"])
@pytest.mark.parametrize(("window", "chunks"), [(8 * MIB, 4), (4 * MIB, 8)])
def test_of_a_compiled_step(window, chunks):
    """8 layers of 1 MiB, two moments: a window holds two chunks of both, one that comes and one that goes."""
    require(H200)
    tx = jo.offload(ADAMW, min_bytes=0, window=window)
    report = jo.inspect(step(tx), *arguments(tx, n=8, stacked=True), target=H200)
    assert report.parts["parameters"] == 8 * MIB and report.parts["gradients"] >= 8 * MIB
    assert report.parts["other arguments"] == MIB / 2
    # the first chunk is loaded before the loop, the last one stored behind it
    assert [(loop.times, loop.nbytes) for loop in report.loops] == [(chunks - 1, 4 * 8 * MIB // chunks)]
    assert {(t.nbytes, t.pieces) for t in report.transfers} == {(8 * MIB, chunks)}
    assert report.timeline.window == window
