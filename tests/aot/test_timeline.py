"""The simulated timeline against times worked out by hand, on a chip whose speeds make them short."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from jax_offload._look.hlo import Module
from jax_offload._look.timeline import Program
from tests.aot.harness import H200, V5E, array, require, scheduled
from tests.aot.model import loss, step_of

pytestmark = [pytest.mark.oldest("reading what XLA prints"), pytest.mark.daily("each is a form of what XLA prints")]

# A 256×256 float32 is 2**18 bytes, and a matmul of two takes 2 * 256**3 operations.
MATRIX, FLOPS = 2**18, 2 * 256**3
# With these a matmul takes 1 s, a copy of a matrix over the link 0.5 s, its passage through the interconnect 0.25 s,
# reading or writing it 0.125 s.
CHIP = dataclasses.replace(
    jo.chip("v5e"), host_link=2 * MATRIX, host_link_both=4 * MATRIX, bf16=2 * FLOPS, f32=FLOPS,
    hbm_bandwidth=8 * MATRIX, interconnect=4 * MATRIX,
)  # fmt: skip
NO_MEMORY = dataclasses.replace(CHIP, hbm_bandwidth=math.inf)  # it takes no time
READ = 0.125
M, ON_HOST = "f32[256,256]{1,0}", "f32[256,256]{1,0:S(5)}"
DOT = f"%d = {M} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
# Copies l, k, m to the device and s to the host: their starts, then their ends.
L, K, N = (f"%{name} = ({M}, {ON_HOST}, u32[]) copy-start(%h)" for name in "lkm")
S = f"%s = ({ON_HOST}, {M}, u32[]) copy-start(%a)"
L_DONE, K_DONE, N_DONE, S_DONE = (f"%{name}-done = {M} copy-done(%{name})" for name in "lkms")
PARAMETERS = (f"%a = {M} parameter(0)", f"%b = {M} parameter(1)", f"%h = {ON_HOST} parameter(2)")


def computation(name, *lines, parameters=PARAMETERS):
    return "\n".join([f"{name} (p: f32[]) -> f32[] {{", *(f"  {line}" for line in (*parameters, *lines)), "}\n\n"])


def played(text, chip=CHIP):
    return Program(Module(text), jo.chip(chip)).timeline()


def run(*lines, before="", header="HloModule m, is_scheduled=true", chip=CHIP):
    return played(f"{header}\n\n{before}{computation('ENTRY %main', *lines)}", chip)


def test_a_matmul():
    m = run(DOT)
    assert (m.step, m.compute, m.link, m.exposed) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (DOT, 1.0),
        (DOT.replace("f32", "bf16"), 1.0),  # its operands are float32
        (f"%d = {M} add(%a, %b)", 3 * READ),
        (f"%d = {M} copy(%a)", 2 * READ),
        ("%d = f32[256]{0} reduce(%a, %zero), dimensions={1}", READ * (1 + 1 / 256)),
        (f"%d = {M} bitcast(%a)", 0),
        ("%d = f32[256,256]{1,0:S(1)} add(%a, %b)", 2 * READ),  # what stays in the cache is free
        (f"%d = ({M}, s8[0]{{0}}) custom-call(%a, %b), custom_call_target=\"__cublas$gemm\", "
         'backend_config={"lhs_contracting_dimensions":["1"]}', 1.0),
        (f'%d = ({M}, s8[0]{{0}}) custom-call(%a, %b), custom_call_target="AllocateBuffer"', 0),
        (f"%d = {M} convolution(%a, %b), dim_labels=bf_io->bf", 1.0),
    ],
)  # fmt: skip
def test_single_operations(line, seconds):
    assert run(line).compute == pytest.approx(seconds)


def test_bfloat16_multiplies_faster():
    operands = [f"%{x} = bf16[256,256]{{1,0:S(1)}} parameter({n})" for n, x in enumerate("cd")]
    assert run(*operands, DOT.replace("%a, %b", "%c, %d")).compute == 0.5


@pytest.mark.parametrize(
    ("schedule", "step", "exposed"),
    [
        ([L, DOT, L_DONE], 1.0, 0.0),  # hidden
        ([L, L_DONE, DOT], 1.5, 0.5),  # not
        ([L, K, N, DOT, N_DONE], 1.5, 0.5),  # the third ends at 1.5 s
        ([L, K, L_DONE, DOT, K_DONE], 1.5, 0.5),  # one direction, one queue
        ([L, S, L_DONE, S_DONE], 0.5, 0.5),  # both directions at once
        ([L, L_DONE, S, S_DONE], 1.0, 1.0),  # in turn
        ([DOT, S], 1.5, 0.5),  # nothing waits for it but the end
    ],
)
def test_copies_beside_a_matmul(schedule, step, exposed):
    m = run(*schedule)
    loads, stores = sum(line in (L, K, N) for line in schedule), schedule.count(S)
    assert (m.step, m.exposed) == pytest.approx((step, exposed))
    assert (m.loaded, m.stored, m.link) == (loads * MATRIX, stores * MATRIX, 0.5 * max(loads, stores))


def test_both_ways_share_the_link():
    """At once they reach 1.5 times one way: the store has half of its speed until the load ends, and then all."""
    m = run(L, S, L_DONE, S_DONE, chip=dataclasses.replace(CHIP, host_link_both=3 * MATRIX))
    assert (m.step, m.exposed) == pytest.approx((0.75, 0.75))
    assert m.link == pytest.approx(2 / 3) and [s.end for s in m.segments] == pytest.approx([0.5, 0.75])
    in_turn = run(L, S, L_DONE, S_DONE, chip=dataclasses.replace(CHIP, host_link_both=2 * MATRIX))
    assert in_turn.step == pytest.approx(1.0)


def test_a_copy_that_is_not_asynchronous_is_exposed():
    m = run(f"%l = {M} copy(%h)")
    assert (m.step, m.exposed, m.loaded) == (0.5 + READ, 0.5, MATRIX)


def test_a_loop_runs_as_often_as_it_says():
    """Across its iterations a queue goes on."""
    body = computation("%body", L, DOT, L_DONE)
    condition = computation("%c", "%k = s32[]{:T(128)} constant(5)")
    loop = '%w = (s32[]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    m = run(loop, before=body + condition)
    assert (m.step, m.compute, m.link, m.exposed) == (7, 7, 3.5, 0)
    assert run(loop.replace("known", "un"), before=body + condition).step == 5


def test_a_copy_may_be_in_flight_across_a_loop():
    body, condition = computation("%body", DOT), computation("%c", "%k = s32[] constant(3)")
    loop = "%w = (s32[]) while(%t), condition=%c, body=%body"
    m = run(L, loop, L_DONE, before=body + condition)
    assert (m.step, m.exposed) == (3, 0)


@pytest.mark.parametrize(
    "line",
    [
        "%k = f32[] conditional(%i, %a, %a), branch_computations={%nothing, %matmul}",
        "%k = f32[] conditional(%p, %a, %a), true_computation=%matmul, false_computation=%nothing",
        "%k = f32[] call(%a), to_apply=%matmul",
    ],
)
def test_branches_and_calls(line):
    branches = computation("%nothing") + computation("%matmul", DOT)
    assert run(line, before=branches).step == 1


GATHER = f"%g = ((f32[64,256]{{1,0}}), {M}) all-gather-start(%shard), replica_groups={{GROUPS}}, dimensions={{0}}"
GATHERED = f"%g-done = {M} all-gather-done(%g)"
SHARD = "%shard = f32[64,256]{1,0} parameter(3)"


GROUPS = "{{0,1,2,3}}", "[1,4]<=[4]", "{}", "mesh['x'=4] {'x'}", "mesh['x'=2,'y'=2] {'x','y'}", "mesh['y'=8] {'y':(2)4}"


@pytest.mark.parametrize("groups", GROUPS)
def test_an_asynchronous_gather(groups):
    """A device sends its quarter, or one that it got, three times: 3/4 of a matrix, 0.1875 s."""
    gather, header = GATHER.replace("{GROUPS}", groups), "HloModule m, num_partitions=4"
    hidden = run(SHARD, gather, DOT, GATHERED, header=header)
    assert (hidden.step, hidden.compute, hidden.exposed_collectives) == (1, 1, 0)
    exposed = run(SHARD, gather, GATHERED, DOT, header=header)
    assert (exposed.step, exposed.compute, exposed.exposed_collectives) == (1.1875, 1, 0.1875)
    assert hidden.collectives == exposed.collectives == 0.1875
    assert hidden.exposed == exposed.exposed == 0


@pytest.mark.parametrize(
    ("opcode", "seconds"),
    [("all-reduce", 0.375), ("reduce-scatter", 0.1875), ("all-to-all", 0.1875), ("collective-permute", 0.25)],
)
def test_the_other_collectives(opcode, seconds):
    """Not asynchronous: nothing hides them. In what starts something asynchronous: a matmul does."""
    line = f"%r = {M} {opcode}(%a), replica_groups={{{{0,1,2,3}}}}"
    m = run(line, DOT)
    assert (m.step, m.compute, m.exposed_collectives) == pytest.approx((1 + seconds, 1, seconds))
    start = f"%s = (({M}), {M}, u32[]) async-start(%a), calls=%wrapped"
    done = [f"%t = (({M}), {M}, u32[]) async-update(%s)", f"%u = {M} async-done(%t)"]
    m = run(start, DOT, *done, before=computation("%wrapped", line))
    assert (m.step, m.collectives, m.exposed_collectives) == pytest.approx((1, seconds, 0))
    m = run(start, *done, DOT, before=computation("%wrapped", line))
    assert (m.step, m.exposed_collectives) == pytest.approx((1 + seconds, seconds))


def test_a_copy_runs_beside_a_collective():
    m = run(L, f"%r = {M} all-reduce(%a), replica_groups={{{{0,1,2,3}}}}", L_DONE)
    assert (m.step, m.exposed_collectives, m.exposed) == pytest.approx((0.5, 0.375, 0.125))


def test_a_tpu_starts_and_ends_a_collective_in_fusions():
    """It stands in a third too, around a matmul that runs meanwhile."""
    gather = "%g = f32[256,256]{1,0} all-gather(%shard), channel_id=6, replica_groups={{0,1,2,3}}"
    call = '%k = (u32[]) custom-call(%g), custom_call_target="AsyncCollective'
    parts = {"start": [gather, call + 'Start"'], "between": [gather, DOT], "done": [gather, call + 'Done"']}
    before = "".join(computation(f"%{name}", SHARD, *lines) for name, lines in parts.items())
    m = run(*(f"%x{name} = u32[] fusion(), calls=%{name}" for name in parts), before=before)
    assert (m.step, m.compute, m.collectives, m.exposed_collectives) == (1, 1, 0.1875, 0)


def test_a_tpus_scatter_is_an_all_reduce_in_a_fusion():
    name = "%all-reduce-scatter.1"
    before = computation(name, f"%r = {M} all-reduce(%a), replica_groups={{{{0,1,2,3}}}}")
    assert run(f"%f = f32[64,256]{{1,0}} fusion(%a), calls={name}", before=before).collectives == 0.1875


STACK, ROW = "f32[24,256,256]{2,1,0}", "f32[1,256,256]{2,1,0}"
ROWS_IN = (f"%p = {STACK} parameter(0)", f"%q = {M} parameter(1)", "%i = s32[] parameter(2)")
STACKED = f"%stack = {STACK} parameter(3)"


@pytest.mark.parametrize(
    ("lines", "result", "seconds"),
    [
        ([f"%n = {ROW} bitcast(%q)", f"ROOT %u = {STACK} dynamic-update-slice(%p, %n, %i, %i, %i)"], STACK, 2 * READ),
        ([f"ROOT %s = {ROW} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={{1,256,256}}"], ROW, 2 * READ),
        ([f"ROOT %s = {ROW} slice(%p), slice={{[0:1], [0:256], [0:256]}}"], ROW, 2 * READ),
        ([f"%w = {STACK} bitcast(%p)", f"ROOT %s = {ROW} slice(%w), slice={{[0:1], [0:256], [0:256]}}"], ROW, 2 * READ),
        # its rows are read, changed and written back
        ([f"%s = {ROW} dynamic-slice(%p, %i, %i, %i)", f"%n = {ROW} negate(%s)",
          f"ROOT %u = {STACK} dynamic-update-slice(%p, %n, %i, %i, %i)"], STACK, 2 * READ),
        # and returned beside
        ([f"%n = {ROW} bitcast(%q)", f"%u = {STACK} dynamic-update-slice(%p, %n, %i, %i, %i)",
          f"ROOT %t = ({STACK}, {ROW}) tuple(%u, %n)"], f"({STACK}, {ROW})", 2 * READ),
        # not in place
        ([f"%z = {STACK} broadcast(%i)", f"%n = {ROW} bitcast(%q)",
          f"ROOT %u = {STACK} dynamic-update-slice(%z, %n, %i, %i, %i)"], STACK, 25 * READ),
        ([f"ROOT %n = {STACK} negate(%p)"], STACK, 48 * READ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_a_fusion_reads_and_writes_rows_where_it_needs_no_more(lines, result, seconds, nested):
    before, called = computation("%f", *lines, parameters=ROWS_IN), "f"
    if nested and "(" not in result:
        before += computation("%o", f"ROOT %x = {result} fusion(%p, %q, %i), calls=%f", parameters=ROWS_IN)
        called = "o"
    m = run(STACKED, "%k = s32[] constant(0)", f"%x = {result} fusion(%stack, %a, %k), calls=%{called}", before=before)
    assert m.compute == pytest.approx(seconds, rel=1e-4)  # an index is read too


def test_a_fusion_around_a_matmul():
    """It takes as long as multiplying or as its memory, whichever is longer."""
    body = computation("%f", DOT, f"ROOT %t = {M} tanh(%d)", parameters=PARAMETERS[:2])
    assert run(f"%x = {M} fusion(%a, %b), calls=%f", before=body).compute == 1
    multiplied = f"%d = {M} dot(%q, %q), lhs_contracting_dims={{1}}"
    one = computation("%f", multiplied, f"ROOT %t = {STACK} add(%p, %d)", parameters=ROWS_IN[:2])
    assert run(STACKED, f"%x = {STACK} fusion(%stack, %a), calls=%f", before=one).compute == 49 * READ


def test_an_asynchronous_copy_within_the_device_runs_beside_a_matmul():
    body = computation("%f", f"ROOT %s = {ROW} dynamic-slice(%p, %i, %i, %i)", parameters=ROWS_IN)
    start = f"%s = (({STACK}, s32[]), {ROW}, u32[]) fusion-start(%stack), calls=%f"
    done = f"%t = {ROW} fusion-done(%s)"
    assert run(STACKED, start, DOT, done, before=body).step == 1
    m = run(STACKED, start, done, DOT, before=body)
    assert (m.step, m.compute, m.exposed) == pytest.approx((1 + 2 * READ, 1 + 2 * READ, 0))


IMAGES, FILTER = "f32[8,16,16,32]{3,2,1,0}", "f32[3,3,32,64]{3,2,1,0}"
MADE = f"%images = {IMAGES} parameter(3)", f"%filter = {FILTER} parameter(4)"
WINDOW = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
OUT = "f32[8,16,16,64]{3,2,1,0}"
SAME = 8 * 32 * 64 * (3 * 16) ** 2


@pytest.mark.parametrize(
    ("line", "products"),
    [
        (f"%c = {OUT} convolution(%images, %filter), {WINDOW}", SAME),
        (f"%c = ({OUT}, u8[0]{{0}}) custom-call(%images, %filter), {WINDOW}, "
         'custom_call_target="__cudnn$convForward"', SAME),
        (f"%c = ({FILTER}, u8[0]{{0}}) custom-call(%images, %out), {WINDOW}, "
         'custom_call_target="__cudnn$convBackwardFilter"', SAME),
        (f"%c = ({IMAGES}, u8[0]{{0}}) custom-call(%out, %filter), {WINDOW}, "
         'custom_call_target="__cudnn$convBackwardInput"', SAME),
        # a batch of 16 matmuls, as a TPU writes it
        ("%c = f32[16,256,64]{2,1,0} convolution(%l, %r), window={size=16 stride=15 lhs_dilate=16}, "
         "dim_labels=0bf_0io->0bf", 16 * 256 * 32 * 64),
    ],
)  # fmt: skip
def test_convolutions_multiply_no_holes(line, products):
    batch = ("%l = f32[16,256,32]{2,1,0} parameter(6)", "%r = f32[16,32,64]{2,1,0} parameter(7)")
    assert run(*MADE, f"%out = {OUT} parameter(5)", *batch, line, chip=NO_MEMORY).compute == pytest.approx(
        2 * products / FLOPS
    )


@pytest.mark.parametrize(("target", "matmuls"), [("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)])
def test_fused_attention(target, matmuls):
    """Of 4 heads of width 8, 16 tokens beside 32, twice. A mask saves nothing here."""
    q, k = (f"%{name} = bf16[2,{tokens},4,8]{{3,2,1,0}} parameter(6)" for name, tokens in (("q", 16), ("k", 32)))
    out = f'%o = (bf16[2,16,4,8]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="__cudnn${target}"'
    assert run(q, k, out, chip=NO_MEMORY).compute == pytest.approx(matmuls * 2 * (2 * 4 * 16 * 32 * 8) / (2 * FLOPS))


@pytest.mark.parametrize(("target", "chip"), [(H200, "h200"), (V5E, "v5e")])
def test_what_a_compiler_writes_is_understood(target, chip):
    """Two matmuls a layer backward and one forward, in bfloat16, and all of the state over the link."""
    require(target)
    n, width, tokens = 3, 1024, 2048
    tx, params = jo.offload(optax.adamw(1e-3), min_bytes=0), {"w": array(n, width, width, dtype=jnp.bfloat16)}
    args = params, jo.abstract_state(tx, params), array(tokens, width, dtype=jnp.bfloat16)
    text = scheduled(jax.jit(step_of(tx, loss), donate_argnums=(0, 1)), args, target)
    t = played(text, chip)
    assert t.loaded == t.stored == pytest.approx(n * width**2 * 4, rel=0.01)
    assert t.step == pytest.approx(t.compute + t.exposed) and t.collectives == 0
    one_a_second = {"bf16": 1.0, "f32": 1.0, "hbm_bandwidth": math.inf, "interconnect": math.inf}
    flops = played(text, dataclasses.replace(jo.chip(chip), **one_a_second)).compute
    # the first layer needs no gradient of what goes in, and the forward pass may be run again
    assert (3 * n - 1) * 2 * tokens * width**2 <= flops <= 4 * n * 2 * tokens * width**2
