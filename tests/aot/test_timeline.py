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
from tests.aot.model import loss
from tests.support.steps import step_of

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


def after(*lines, before="", header="HloModule m, is_scheduled=true", chip=CHIP, **figures):
    """A schedule, and the figures of its timeline; ``window`` is in matrices."""
    return (lines, before, header, chip), figures


def copies(*lines, **figures):
    """The same of copies beside a matmul: the bytes and the time of the link follow from the lines."""
    loads, stores = sum(line in (L, K, N) for line in lines), lines.count(S)
    moved = {"loaded": loads * MATRIX, "stored": stores * MATRIX, "link": 0.5 * max(loads, stores)}
    return after(*lines, **moved | figures)


def fusion(lines, result, seconds, nested=False):
    """The same of a fusion of a stack, a row and an index."""
    before, called = computation("%f", *lines, parameters=ROWS_IN), "f"
    if nested:
        before += computation("%o", f"ROOT %x = {result} fusion(%p, %q, %i), calls=%f", parameters=ROWS_IN)
        called = "o"
    operation = f"%x = {result} fusion(%stack, %a, %k), calls=%{called}"
    return after(STACKED, "%k = s32[] constant(0)", operation, before=before, compute=seconds)


def loop(attributes, body, count, *, ahead=(), behind=(), **figures):
    before = computation("%body", *body) + computation("%c", f"%k = s32[]{{:T(128)}} constant({count})")
    return after(*ahead, f"%w = (s32[]) while(%t), condition=%c, body=%body{attributes}", *behind, before=before,
                 **figures)  # fmt: skip


TRIPS = ', backend_config={"known_trip_count":{"n":"7"}}'
BRANCHES = computation("%nothing") + computation("%matmul", DOT)
COPIES_BOTH = (L, S, L_DONE, S_DONE)
BF16 = [f"%{x} = bf16[256,256]{{1,0:S(1)}} parameter({n})" for n, x in enumerate("cd")]

# Collectives. A device sends its quarter, or one that it got, three times: 3/4 of a matrix, 0.1875 s.
GATHER = f"%g = ((f32[64,256]{{1,0}}), {M}) all-gather-start(%shard), replica_groups={{GROUPS}}, dimensions={{0}}"
GATHERED = f"%g-done = {M} all-gather-done(%g)"
SHARD = "%shard = f32[64,256]{1,0} parameter(3)"
FOUR = "replica_groups={{0,1,2,3}}"
GROUPS = "{{0,1,2,3}}", "[1,4]<=[4]", "{}", "mesh['x'=4] {'x'}", "mesh['x'=2,'y'=2] {'x','y'}", "mesh['y'=8] {'y':(2)4}"
ON_FOUR, ON_EIGHT = (f"HloModule m, num_partitions={n}" for n in (4, 8))
HEADERS = {each: ON_FOUR if each == "{}" else ON_EIGHT for each in GROUPS}
OTHERS = {"all-reduce": 0.375, "reduce-scatter": 0.1875, "all-to-all": 0.1875, "collective-permute": 0.25}
WRAPPED = f"%s = (({M}), {M}, u32[]) async-start(%a), calls=%wrapped"
UNWRAPPED = f"%t = (({M}), {M}, u32[]) async-update(%s)", f"%u = {M} async-done(%t)"
OWN_GATHER = "%g = f32[256,256]{1,0} all-gather(%shard), channel_id=6, replica_groups={{0,1,2,3}}"
OF_A_TPU = '%k = (u32[]) custom-call(%g), custom_call_target="AsyncCollective'
THREE_PARTS = {"start": [OWN_GATHER, OF_A_TPU + 'Start"'], "between": [OWN_GATHER, DOT],
               "done": [OWN_GATHER, OF_A_TPU + 'Done"']}  # fmt: skip
SCATTER = "%all-reduce-scatter.1"

# Fusions of rows.
STACK, ROW = "f32[24,256,256]{2,1,0}", "f32[1,256,256]{2,1,0}"
ROWS_IN = (f"%p = {STACK} parameter(0)", f"%q = {M} parameter(1)", "%i = s32[] parameter(2)")
STACKED = f"%stack = {STACK} parameter(3)"
AS_ROW, CUT = f"%n = {ROW} bitcast(%q)", "slice={[0:1], [0:256], [0:256]}"
SLICED = f"%s = {ROW} dynamic-slice(%p, %i, %i, %i)"
UPDATED = f"%u = {STACK} dynamic-update-slice(%p, %n, %i, %i, %i)"
FUSIONS = {  # what reads and writes rows where it needs no more
    "a row into a stack": ([AS_ROW, f"ROOT {UPDATED}"], STACK, 2 * READ),
    "a row of a stack": ([f"ROOT {SLICED}, dynamic_slice_sizes={{1,256,256}}"], ROW, 2 * READ),
    "a row of a stack by its number": ([f"ROOT %s = {ROW} slice(%p), {CUT}"], ROW, 2 * READ),
    "a row of a stack in other words": ([f"%w = {STACK} bitcast(%p)", f"ROOT %s = {ROW} slice(%w), {CUT}"], ROW,
                                        2 * READ),
    "a row that is changed": ([SLICED, f"%n = {ROW} negate(%s)", f"ROOT {UPDATED}"], STACK, 2 * READ),
    "a stack of its own": ([f"%z = {STACK} broadcast(%i)", AS_ROW, f"ROOT {UPDATED.replace('%p', '%z')}"], STACK,
                           25 * READ),
    "all of a stack": ([f"ROOT %n = {STACK} negate(%p)"], STACK, 48 * READ),
}  # fmt: skip
BESIDE = [AS_ROW, UPDATED, f"ROOT %t = ({STACK}, {ROW}) tuple(%u, %n)"], f"({STACK}, {ROW})", 2 * READ
IN_A_FUSION = computation("%f", DOT, f"ROOT %t = {M} tanh(%d)", parameters=PARAMETERS[:2])
SQUARE = f"%d = {M} dot(%q, %q), lhs_contracting_dims={{1}}"
INTO_A_STACK = computation("%f", SQUARE, f"ROOT %t = {STACK} add(%p, %d)", parameters=ROWS_IN[:2])
ONE_ROW = computation("%f", f"ROOT {SLICED}", parameters=ROWS_IN)
ROW_START = f"%s = (({STACK}, s32[]), {ROW}, u32[]) fusion-start(%stack), calls=%f"
ROW_DONE = f"%t = {ROW} fusion-done(%s)"

# Convolutions multiply no holes; attention of 4 heads of width 8, 16 tokens beside 32, twice: a mask saves nothing.
IMAGES, FILTER, OUT = "f32[8,16,16,32]{3,2,1,0}", "f32[3,3,32,64]{3,2,1,0}", "f32[8,16,16,64]{3,2,1,0}"
MADE = (f"%images = {IMAGES} parameter(3)", f"%filter = {FILTER} parameter(4)", f"%out = {OUT} parameter(5)",
        "%l = f32[16,256,32]{2,1,0} parameter(6)", "%r = f32[16,32,64]{2,1,0} parameter(7)")  # fmt: skip
WINDOW = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
SAME = 8 * 32 * 64 * (3 * 16) ** 2
CONVOLUTIONS = {
    "convolution": (f"%c = {OUT} convolution(%images, %filter), {WINDOW}", SAME),
    "cudnn, forward": (f"%c = ({OUT}, u8[0]{{0}}) custom-call(%images, %filter), {WINDOW}, "
                       'custom_call_target="__cudnn$convForward"', SAME),
    "cudnn, of the filter": (f"%c = ({FILTER}, u8[0]{{0}}) custom-call(%images, %out), {WINDOW}, "
                             'custom_call_target="__cudnn$convBackwardFilter"', SAME),
    "cudnn, of the images": (f"%c = ({IMAGES}, u8[0]{{0}}) custom-call(%out, %filter), {WINDOW}, "
                             'custom_call_target="__cudnn$convBackwardInput"', SAME),
    "a batch of 16 matmuls, as a TPU writes it": (
        "%c = f32[16,256,64]{2,1,0} convolution(%l, %r), window={size=16 stride=15 lhs_dilate=16}, "
        "dim_labels=0bf_0io->0bf", 16 * 256 * 32 * 64),
}  # fmt: skip
Q, V = (f"%{name} = bf16[2,{tokens},4,8]{{3,2,1,0}} parameter(6)" for name, tokens in (("q", 16), ("k", 32)))
ATTENDED = '%o = (bf16[2,16,4,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$'
OF_ONE = 2 * (2 * 4 * 16 * 32 * 8) / (2 * FLOPS)

# What is loaded is held from its start to its last use; what a loop carries, once.
USED, AGAIN = f"%e = {M} add(%d, %l-done)", f"%g = {M} bitcast(%l-done)"
CARRIED = f"({M}, {ON_HOST})"
CARRYING = (
    f"%body (t: {CARRIED}) -> {CARRIED} {{\n  %t = {CARRIED} parameter(0)\n"
    f"  %x = {M} get-tuple-element(%t), index=0\n  %h = {ON_HOST} get-tuple-element(%t), index=1\n"
    f"  %y = {M} negate(%x)\n  {L}\n  {L_DONE}\n  ROOT %r = {CARRIED} tuple(%l-done, %h)\n}}\n\n"
    "%c (t: s32[]) -> pred[] {\n  %k = s32[] constant(3)\n}\n\n"
)

SCHEDULES = {
    "a matmul": after(DOT, step=1, compute=1, link=0, exposed=0),
    "a matmul whose operands are float32": after(DOT.replace("f32", "bf16"), compute=1),
    "a matmul of bfloat16": after(*BF16, DOT.replace("%a, %b", "%c, %d"), compute=0.5),
    "a sum": after(f"%d = {M} add(%a, %b)", compute=3 * READ),
    "a copy": after(f"%d = {M} copy(%a)", compute=2 * READ),
    "a reduction": after("%d = f32[256]{0} reduce(%a, %zero), dimensions={1}", compute=READ * (1 + 1 / 256)),
    "a bitcast": after(f"%d = {M} bitcast(%a)", compute=0),
    "a sum that stays in the cache": after("%d = f32[256,256]{1,0:S(1)} add(%a, %b)", compute=2 * READ),
    "a sum that stays in a part of the cache": after(
        "%d = f32[256,256]{1,0:T(8,128)S(1)SC(0:256)} add(%a, %b)", compute=2 * READ),
    "a sum in the same memory space of a GPU": after(
        "%d = f32[256,256]{1,0:S(1)} add(%a, %b)", chip=dataclasses.replace(CHIP, platform="cuda"), compute=3 * READ),
    "a matmul that is asynchronous": after(
        f"%s = (({M}), {M}, u32[]) async-start(%a), calls=%f", DOT, f"%t = {M} async-done(%s)", before=IN_A_FUSION,
        compute=2),
    "cublas": after(f"%d = ({M}, s8[0]{{0}}) custom-call(%a, %b), custom_call_target=\"__cublas$gemm\", "
                    'backend_config={"lhs_contracting_dimensions":["1"]}', compute=1),
    "an allocation": after(f'%d = ({M}, s8[0]{{0}}) custom-call(%a, %b), custom_call_target="AllocateBuffer"',
                           compute=0),
    "a matmul as a convolution": after(f"%d = {M} convolution(%a, %b), dim_labels=bf_io->bf", compute=1),
    # copies beside a matmul
    "hidden": copies(L, DOT, L_DONE, step=1, exposed=0),
    "not hidden": copies(L, L_DONE, DOT, step=1.5, exposed=0.5),
    "the third ends late": copies(L, K, N, DOT, N_DONE, step=1.5, exposed=0.5),
    "one direction, one queue": copies(L, K, L_DONE, DOT, K_DONE, step=1.5, exposed=0.5),
    "both directions at once": copies(*COPIES_BOTH, step=0.5, exposed=0.5),
    "both directions in turn": copies(L, L_DONE, S, S_DONE, step=1, exposed=1),
    "nothing waits for it but the end": copies(DOT, S, step=1.5, exposed=0.5),
    # the store has half of its speed until the load ends, and then all
    "1.5 times one way in both": copies(*COPIES_BOTH, chip=dataclasses.replace(CHIP, host_link_both=3 * MATRIX),
                                        step=0.75, exposed=0.75, link=2 / 3, loading=0.5, storing=0.75),
    "no more in both than one way": copies(*COPIES_BOTH, chip=dataclasses.replace(CHIP, host_link_both=2 * MATRIX),
                                           step=1, link=1),
    "less in both than one way": copies(*COPIES_BOTH, chip=dataclasses.replace(CHIP, host_link_both=MATRIX),
                                        step=1, link=2),
    "a copy that is not asynchronous": after(f"%l = {M} copy(%h)", step=0.5 + READ, exposed=0.5, loaded=MATRIX),
    # what the host's cores take from the device crosses the link, and host memory does not
    "arithmetic on the host's cores": after(
        f"%s = (({ON_HOST}, {M}), {ON_HOST}, u32[]) custom-call-start(%h, %a)", "%t = f32[] custom-call-done(%s)",
        step=0.5, loaded=0, stored=MATRIX),
    # loops and branches; across iterations a queue goes on
    "a loop that says how often": loop(TRIPS, (L, DOT, L_DONE), 5, step=7, compute=7, link=3.5, exposed=0),
    "a loop that counts": loop(TRIPS.replace("known", "un"), (L, DOT, L_DONE), 5, step=5),
    "a copy in flight across a loop": loop("", (DOT,), 3, ahead=(L,), behind=(L_DONE,), step=3, exposed=0),
    "branches": after("%k = f32[] conditional(%i, %a, %a), branch_computations={%nothing, %matmul}", before=BRANCHES,
                      step=1),
    "two branches": after("%k = f32[] conditional(%p, %a, %a), true_computation=%matmul, false_computation=%nothing",
                          before=BRANCHES, step=1),
    "a call": after("%k = f32[] call(%a), to_apply=%matmul", before=BRANCHES, step=1),
    # collectives
    **{f"a gather of {each}, hidden": after(
        SHARD, GATHER.replace("{GROUPS}", each), DOT, GATHERED, header=HEADERS[each], step=1, compute=1, exposed=0,
        collectives=0.1875, exposed_collectives=0) for each in GROUPS},
    **{f"a gather of {each}, exposed": after(
        SHARD, GATHER.replace("{GROUPS}", each), GATHERED, DOT, header=HEADERS[each], step=1.1875, compute=1, exposed=0,
        collectives=0.1875, exposed_collectives=0.1875) for each in GROUPS},
    **{f"{name}, which nothing hides": after(
        f"%r = {M} {name}(%a), {FOUR}", DOT, step=1 + s, compute=1, exposed_collectives=s)
       for name, s in OTHERS.items()},
    **{f"{name} in something asynchronous": after(
        WRAPPED, DOT, *UNWRAPPED, before=computation("%wrapped", f"%r = {M} {name}(%a), {FOUR}"), step=1,
        collectives=s, exposed_collectives=0) for name, s in OTHERS.items()},
    **{f"{name} in something asynchronous, exposed": after(
        WRAPPED, *UNWRAPPED, DOT, before=computation("%wrapped", f"%r = {M} {name}(%a), {FOUR}"), step=1 + s,
        exposed_collectives=s) for name, s in OTHERS.items()},
    "a copy beside a collective": after(L, f"%r = {M} all-reduce(%a), {FOUR}", L_DONE, step=0.5,
                                        exposed_collectives=0.375, exposed=0.125),
    "a gather that a TPU starts and ends in fusions": after(
        *(f"%x{name} = u32[] fusion(), calls=%{name}" for name in THREE_PARTS),
        before="".join(computation(f"%{name}", SHARD, *lines) for name, lines in THREE_PARTS.items()),
        step=1, compute=1, collectives=0.1875, exposed_collectives=0),
    "a gather that a TPU ends before a matmul": after(
        *(f"%x{name} = u32[] fusion(), calls=%{name}" for name in ("start", "done")), DOT,
        before="".join(computation(f"%{name}", SHARD, *lines) for name, lines in THREE_PARTS.items()),
        step=1.1875, exposed_collectives=0.1875),
    "a scatter that a TPU writes as an all-reduce in a fusion": after(
        f"%f = f32[64,256]{{1,0}} fusion(%a), calls={SCATTER}",
        before=computation(SCATTER, f"%r = {M} all-reduce(%a), {FOUR}"), collectives=0.1875),
    # fusions: around a matmul as long as multiplying or as its memory, whichever is longer
    **{name: fusion(*each) for name, each in FUSIONS.items()},
    **{f"{name}, nested": fusion(*each, nested=True) for name, each in FUSIONS.items()},
    "a stack returned beside its row": fusion(*BESIDE),
    "a fusion around a matmul": after(f"%x = {M} fusion(%a, %b), calls=%f", before=IN_A_FUSION, compute=1),
    "a fusion around a matmul and a stack": after(STACKED, f"%x = {STACK} fusion(%stack, %a), calls=%f",
                                                  before=INTO_A_STACK, compute=49 * READ),
    "a row copied beside a matmul": after(STACKED, ROW_START, DOT, ROW_DONE, before=ONE_ROW, step=1),
    "a row copied before a matmul": after(STACKED, ROW_START, ROW_DONE, DOT, before=ONE_ROW, step=1 + 2 * READ,
                                          compute=1 + 2 * READ, exposed=0),
    **{name: after(*MADE, line, chip=NO_MEMORY, compute=2 * products / FLOPS)
       for name, (line, products) in CONVOLUTIONS.items()},
    **{f"attention by {target}": after(Q, V, f'{ATTENDED}{target}"', chip=NO_MEMORY, compute=matmuls * OF_ONE)
       for target, matmuls in (("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5))},
    # windows
    "nothing is loaded": after(DOT, window=0),
    "one load": after(L, DOT, L_DONE, USED, window=1),
    "two loads in turn": after(L, L_DONE, DOT, USED, K, K_DONE, window=1),
    "two loads at once": after(L, L_DONE, DOT, K, USED, K_DONE, window=2),
    "a load that is used again": after(L, L_DONE, DOT, USED, AGAIN, K, K_DONE, f"ROOT %f = {M} negate(%g)", window=2),
    "a loop that loads the next": after(
        L, L_DONE, f"%i = {CARRIED} tuple(%l-done, %h)", f"%w = {CARRIED} while(%i), condition=%c, body=%body",
        before=CARRYING, window=1),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule(name):
    (lines, before, header, chip), figures = SCHEDULES[name]
    timeline = run(*lines, before=before, header=header, chip=chip)
    found = {figure: getattr(timeline, figure) / (MATRIX if figure == "window" else 1) for figure in figures}
    assert found == pytest.approx(figures, rel=1e-5, abs=1e-9)  # an index is read too


@pytest.mark.parametrize(("target", "chip"), [(H200, "h200"), (V5E, "v5e")])
def test_what_a_compiler_writes_is_understood(target, chip):
    """Two matmuls a layer backward and one forward, in bfloat16, and all of the state over the link."""
    require(target)
    n, width, tokens = 3, 1024, 2048
    tx, params = jo.offload(optax.adamw(1e-3), min_bytes=0), {"w": array(n, width, width, dtype=jnp.bfloat16)}
    args = params, jo.abstract_state(tx, params), array(tokens, width, dtype=jnp.bfloat16)
    text = scheduled(jax.jit(step_of(tx, "update", loss), donate_argnums=(0, 1)), args, target)
    t = played(text, chip)
    assert t.loaded == t.stored == pytest.approx(n * width**2 * 4, rel=0.01)
    assert t.step == pytest.approx(t.compute + t.exposed) and t.collectives == 0
    one_a_second = {"bf16": 1.0, "f32": 1.0, "hbm_bandwidth": math.inf, "interconnect": math.inf}
    flops = played(text, dataclasses.replace(jo.chip(chip), **one_a_second)).compute
    # the first layer needs no gradient of what goes in, and the forward pass may be run again
    assert (3 * n - 1) * 2 * tokens * width**2 <= flops <= 4 * n * 2 * tokens * width**2
