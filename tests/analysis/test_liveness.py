"""Lifetimes of buffers in traced programs, worked out by hand; and the forecast of a step."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from jax_offload._analysis import exposure
from jax_offload._analysis.chips import chip
from jax_offload._analysis.estimated_ways import forward_share, in_one_scan
from jax_offload._analysis.option import added
from jax_offload._analysis.streams import streams
from jax_offload._analysis.work import all_flops, seconds
from jax_offload._peak.donated import donations
from jax_offload._peak.liveness import peak
from jax_offload._peak.sharded import Division, collectives
from jax_offload._report.report import traced
from tests.aot.cases import device_sharding
from tests.aot.harness import H200, require
from tests.aot.model import ADAMW, CLIPPED, loss, parameters, step_of

MIB = 2**20
N = 512  # a matrix of 512×512 in float32 takes a MiB


def matrix(*lead):
    return jax.ShapeDtypeStruct((*lead, N, N), jnp.float32)


def at_peak(fun, *args, donate=(), early=False):
    """In MiB."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return peak(jaxpr, [k in donate for k in range(len(args))], early=early) / MIB


def test_what_is_fused_has_no_buffer():
    """The argument and the result."""
    assert at_peak(lambda x: jnp.tanh(2 * x) + 1, matrix()) == 2
    assert at_peak(lambda x: jnp.tanh(2 * x) + 1, matrix(), donate=[0]) == 1


def test_a_matmul_reads_and_makes_buffers():
    """x, the tanh that the matmul reads, the result."""
    assert at_peak(lambda x: jnp.tanh(x) @ x, matrix()) == 3
    assert at_peak(lambda x: x @ x, matrix()) == 2


def test_a_buffer_is_free_after_its_last_use():
    """x and two of the products at a time."""
    assert at_peak(lambda x: x @ x @ x @ x, matrix()) == 3
    assert at_peak(lambda x: ((x @ x).sum(), (x @ x.T).sum()), matrix()) == pytest.approx(2, abs=1e-3)


def test_a_reduction_does_not_make_what_it_reads():
    assert at_peak(lambda x: (jnp.exp(x) * x).sum(), matrix()) == pytest.approx(1, abs=1e-3)


def test_a_loop_holds_what_it_stacks_and_one_iteration():
    """8 matrices, 8 stacked, the row that is read, the carry and what becomes of it."""

    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: ((y := x @ w), y), x, ws)

    assert at_peak(scanned, matrix(), matrix(8)) == 1 + 8 + 8 + (1 + 1 + 1)


def test_a_slice_is_written_in_place():
    def write(x, row):
        return jax.lax.dynamic_update_slice(x, row, (0, 0, 0))

    assert at_peak(write, matrix(8), matrix(1), donate=[0]) == 9
    assert at_peak(write, matrix(8), matrix(1)) == 17  # a copy: the argument is not donated


def test_a_tpu_keeps_in_half_what_only_matmuls_read():
    """Eight rows of 1 MiB that a loop stacks for a second one; not where that adds them up, or asks for more."""

    def fun(x, read):
        last, rows = jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), c), x, None, length=8)
        return jax.lax.scan(lambda c, row: (read(c, row), None), last, rows)[0]

    def spared(read):
        jaxpr = jax.make_jaxpr(lambda x: fun(x, read))(matrix()).jaxpr
        as_it_is, on_a_tpu = (peak(jaxpr, [False], rounds=rounds) for rounds in (False, True))
        return (as_it_is - on_a_tpu) / MIB

    assert spared(lambda c, row: c @ row) == spared(lambda c, row: c @ row.T) == 4
    assert spared(lambda c, row: c @ row + row) == spared(lambda c, row: c + row) == 0
    assert spared(lambda c, row: jnp.matmul(c, row, precision="highest")) == 0


def test_a_tpu_rounds_the_parameters_that_a_loop_multiplies_ahead_of_it():
    """Eight matrices, and beside the loop a copy of all in half of the bytes; not of what it adds up too."""

    def more(read):
        jaxpr = jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda c, row: (read(c, row), None), x, w)[0])(
            matrix(), matrix(8)
        ).jaxpr
        as_it_is, on_a_tpu = (peak(jaxpr, [False, False], rounds=rounds) for rounds in (False, True))
        return (on_a_tpu - as_it_is) / MIB

    assert more(lambda c, row: c @ row) == more(lambda c, row: (c.astype("bfloat16") @ row.astype("bfloat16")) + c) == 4
    assert more(lambda c, row: c @ row + row) == more(lambda c, row: jnp.matmul(c, row, precision="highest")) == 0


def test_gradients_go_as_soon_as_they_can():
    """Four layers, w - g: all gradients in the order of the trace, one at a time early."""

    def step(ws, x):
        def out(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return h.sum()

        grads = jax.grad(out)(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]

    x = jax.ShapeDtypeStruct((1, N), jnp.float32)
    jaxpr = jax.make_jaxpr(step)([matrix()] * 4, x).jaxpr
    given = donations(jaxpr, 5)
    assert given == [True] * 4 + [False]
    in_order, early = (peak(jaxpr, given, early=each) / MIB for each in (False, True))
    assert in_order == pytest.approx(8, abs=0.1) and early == pytest.approx(5, abs=0.1)


def test_operations_and_seconds():
    """Two matmuls of 2·512³ operations, in a loop of three."""

    def fun(x):
        return jax.lax.scan(lambda x, _: (x @ x @ x, None), x, None, length=3)[0]

    jaxpr = jax.make_jaxpr(fun)(matrix()).jaxpr
    assert all_flops(jaxpr) == 3 * 2 * 2 * N**3
    h200 = chip("h200")
    by_operations, by_memory = 2 * N**3 / h200.reached.f32, 3 * MIB / h200.reached.hbm
    assert seconds(jaxpr, h200) == pytest.approx(6 * max(by_operations, by_memory), rel=0.5)


def step_and_args(tx, stacked, tokens=512):
    params = parameters(24, 4096, stacked, None)
    x = jax.ShapeDtypeStruct((tokens, 4096), jnp.float32)
    return step_of(tx, loss), (params, jo.abstract_state(tx, params), x)


# What XLA compiles for an H200, in MiB: docs/peaks.md and docs/overlap.md. Held to less than the 10 % that are
# promised, as they are what the rules were made on.
COMPILED = [
    (False, ADAMW, "resident", 5048),
    (False, CLIPPED, "resident", 6160),
    (True, CLIPPED, "resident", 6496),
    (False, ADAMW, "jax.jit", 2048),
    (False, CLIPPED, "jax.jit", 3272),
    (True, ADAMW, "jax.jit", 3424),
    (True, CLIPPED, "jax.jit", 3424),
    (True, ADAMW, "jo.jit", 2264),
]


@pytest.mark.parametrize(("stacked", "inner", "way", "compiled"), COMPILED)
def test_the_estimated_peak_is_near_the_compiled_one(stacked, inner, way, compiled):
    step, args = step_and_args(jo.offload(inner), stacked)
    option = jo.plan(step, *args)[way]
    assert option.peak / MIB == pytest.approx(compiled, rel=0.05)
    low, high = option.peak_range
    assert low <= compiled * MIB <= high
    assert (high < 1.1 * option.peak) is stacked


def test_a_step_s_forecast():
    """3 GiB each way; nothing hidden under jax.jit, all of it under jo.jit; docs/overlap.md has +36 % and +3 %."""
    step, args = step_and_args(jo.offload(ADAMW), True, 16384)
    forecast = jo.plan(step, *args, chip="h200", tokens_per_step=16384)
    plain, own = forecast["jax.jit"], forecast["jo.jit"]
    assert (plain.loaded, plain.stored, plain.host, plain.parameters, plain.gradients) == (
        *[3072 * MIB] * 3,
        *[1536 * MIB] * 2,
    )
    assert plain.overhead == pytest.approx(0.36, abs=0.05) and own.overhead == pytest.approx(0.03, abs=0.05)
    assert own.window == 384 * MIB  # three rows of two moments
    assert own.loaded == own.stored == 3200 * MIB  # compiled too: one of 24 rows moves twice
    assert forecast.recommended.name == "resident"  # it fits, and adds nothing
    least, most = own.exposed_range
    assert least == own.exposed < most < own.link and plain.exposed_range == (plain.exposed, plain.exposed)
    assert added(own) == f"+{own.overhead:.1%}".removesuffix("%") + f"–{own.overhead_range[1]:.1%}" in str(forecast)
    assert "when a copy begins is XLA's choice" in str(forecast)
    tight = jo.plan(step, *args, chip="h200", tokens_per_step=16384, device_memory="12GiB")
    assert tight["resident"].fits is False and tight.recommended is tight["jo.jit"]
    assert "plan(make, tx) solves" in str(tight) and "plan(make, tx)" not in str(forecast)
    assert own.peak == own.parameters + own.gradients + own.state + own.window + own.activations


def test_a_softmax_reads_its_rows_once():
    """16 MiB written by the matmul; read once, written once by XLA's kernel for GPUs. A TPU reads them three times."""

    def fun(q, k):
        return jax.nn.softmax(q @ k) @ k.T

    n = 2048
    x = jax.ShapeDtypeStruct((n, n), jnp.float32)
    jaxpr = jax.make_jaxpr(fun)(x, x).jaxpr
    h200, matmuls = chip("h200"), 2 * 2 * n**3 / chip("h200").reached.f32
    assert seconds(jaxpr, h200) == pytest.approx(matmuls + 2 * 4 * n * n / h200.reached.hbm, rel=0.01)
    v5e = chip("v5e")  # whose matmuls of float32 are of bfloat16, unless more is asked for
    assert seconds(jaxpr, v5e) == pytest.approx(4 * n**3 / v5e.reached.bf16 + 4 * 4 * n * n / v5e.reached.hbm, rel=0.02)
    with jax.default_matmul_precision("highest"):
        jaxpr = jax.make_jaxpr(fun)(x, x).jaxpr
    assert seconds(jaxpr, v5e) == pytest.approx(4 * n**3 / v5e.reached.f32 + 4 * 4 * n * n / v5e.reached.hbm, rel=0.02)


def test_chunks_that_move_alone():
    """A loop of 24 chunks: the first is loaded, and the last stored, while nothing goes the other way."""
    step, args = step_and_args(jo.offload(CLIPPED), True)
    moved = streams(traced(step, *args))
    row = jo.plan(step, *args, chip="h200", tokens_per_step=512)["jax.jit"]
    link = exposure.link_of(chip("h200"))
    assert (moved.looped, moved.unpaired) == (3072 * MIB, moved.looped // 24)
    rest = moved.looped - moved.unpaired
    assert row.exposed == pytest.approx(rest / link.both + 2 * moved.unpaired / link.load)
    assert row.exposed > row.link and row.hidden == 0


@pytest.mark.parametrize(("stacked", "way", "simulated"), [(True, "jo.jit", 0.0625), (False, "jax.jit", 0.0623)])
def test_an_update_s_own_arithmetic_hides_nothing(stacked, way, simulated):
    """Of 64 ms of link at 512 tokens, where the step computes for 9 to 13 ms: it reads what has come. Seconds simulated
    from the schedule that is compiled for an H200; without that rule 5 ms less were predicted."""
    step, args = step_and_args(jo.offload(ADAMW), stacked)
    option = jo.plan(step, *args, chip="h200", tokens_per_step=512)[way]
    assert option.exposed == pytest.approx(simulated, rel=0.03)


def test_the_resident_row():
    """The state beside the rest, none of it on the host, and nothing that moves."""
    step, args = step_and_args(jo.offload(CLIPPED), True)
    row = jo.plan(step, *args, chip="h200")["resident"]
    assert (row.state, row.host, row.loaded, row.stored, row.exposed) == (3072 * MIB + 4, 0, 0, 0, 0)
    assert "without offload" in row.code


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.long("compiles five programs"))])
def test_compiled_rows(train):
    """Those of ``inspect``; the pipelined row too, where the step itself is given: it is turned round."""
    require(H200)
    tx = jo.offload(CLIPPED, min_bytes=0)
    params = parameters(4, 512, True, device_sharding(H200))
    args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    step = step_of(tx, loss, update_params=True)
    turned = jo.pipelined(step, donate_argnames=("params", "state"))
    forecast = jo.plan(turned if train else step, *args, target=H200)
    assert dict(forecast.labels)["peak, host"] == "compiled for h200, not run" and forecast.chip == H200
    jitted = {"jax.jit": jax.jit(step, donate_argnums=(0, 1)), "jo.jit": jo.jit(step, donate_argnums=(0, 1))}
    hosted = jo.pipelined(step, donate_argnames=("params", "state"), gradients="host")
    for name, each in (jitted | {"jo.pipelined": turned} | ({} if train else {"gradients too": hosted})).items():
        report, row = jo.inspect(each, *args, target=H200), forecast[name]
        assert (row.peak, row.host, row.exposed) == (report.peak, report.host, pytest.approx(report.timeline.exposed))
        assert row.peak == row.parameters + row.gradients + row.state + row.window + row.activations
        assert row.exposed_range is row.overhead_range is None
    assert forecast["resident"].peak > forecast["jax.jit"].peak and forecast["resident"].host == 0
    assert any(note.startswith("gradients too is estimated: give") for note in forecast.notes) is train
    # whose arguments have no names: it stays estimated, and says so
    without = jo.plan(lambda *args: step(*args), *args, target=H200)
    assert any(
        "jo.pipelined and gradients too are estimated" in note for note in without.notes
    ) and "jo.pipelined" in str(without)


@pytest.mark.long("compiles five programs")
def test_gradients_on_the_host_are_estimated_and_compiled():
    """The estimate is within a tenth of what is compiled; it needs a chip, which need not be there."""
    require(H200)
    step, args = step_and_args(jo.offload(CLIPPED), True, 16384)
    estimated = jo.plan(step, *args, chip=H200)
    train = jo.pipelined(step, donate_argnames=("params", "state"), gradients="host")
    row = jo.plan(train, *args, target=H200)["gradients too"]
    guess, gradients = estimated["gradients too"], estimated["jo.pipelined"].gradients
    first = 2 * 4096 * 4096 * 4  # of each moment, that row is handed on where no gradients wait on the host
    assert guess.peak == estimated["jo.pipelined"].peak - gradients - first
    assert guess.host == row.host == estimated["jo.pipelined"].host + gradients
    assert row.peak == pytest.approx(guess.peak, rel=0.1)


def test_an_optimizer_is_not_compiled():
    with pytest.raises(ValueError, match=r"target: compiles a step, plan\(step, \*args, target='h200'\)"):
        jo.plan(ADAMW, {"w": matrix()}, target=H200)


def test_a_clipped_step_is_recommended_pipelined():
    step, args = step_and_args(jo.offload(CLIPPED), True, 65536)
    forecast = jo.plan(jo.jit(step), *args, chip="h200", tokens_per_step=65536)
    memory = forecast["resident"].peak - 1
    tight = jo.plan(jo.jit(step), *args, chip="h200", tokens_per_step=65536, device_memory=memory)
    assert tight.recommended.name == "jo.pipelined"
    assert forecast["jo.jit"].hidden == 0 and forecast["jo.jit"].exposed >= forecast["jo.jit"].link


def test_a_pipelined_step_is_planned_as_the_step_that_it_turns_round():
    step, args = step_and_args(jo.offload(CLIPPED), True)
    expected = jo.plan(step, *args, chip="h200")
    for given in step, jax.jit(step), jo.jit(step):
        train = jo.pipelined(given, donate_argnames=("params", "state"))
        assert jo.plan(train, *args, chip="h200").options == expected.options


def test_a_step_that_is_pipelined_has_that_row_without_clipping_too():
    """As many tokens as it says hide its transfers, and no fewer: the first row is there from the call before."""
    step, args = step_and_args(jo.offload(ADAMW), True, 4096)
    train = jo.pipelined(step, donate_argnames=("params", "state"))
    forecast = jo.plan(train, *args, chip="h200", tokens_per_step=4096)
    row = forecast["jo.pipelined"]
    assert row.exposed > 0 and "gradients too" in [option.name for option in forecast.options]
    assert "jo.pipelined" not in [option.name for option in jo.plan(step, *args).options]
    for tokens, hidden in (row.hidden_from * 1.1, True), (row.hidden_from * 0.9, False):
        step, args = step_and_args(jo.offload(ADAMW), True, int(tokens))
        exposed = jo.plan(train, *args, chip="h200")["jo.pipelined"].exposed
        assert (exposed == pytest.approx(0.0, abs=1e-9)) is hidden
    assert forecast["jo.jit"].hidden_from is None and "a pipelined row tells it" in str(forecast)


def test_keyword_arguments_of_a_step():
    step, args = step_and_args(jo.offload(ADAMW), True)

    def scaled(params, state, batch, *, bias, scale=1.0):
        return step(params, state, scale * batch + bias[0, 0])

    alone = jo.plan(lambda p, s, b, bias: scaled(p, s, b, bias=bias, scale=2.0), *args, matrix(), chip="h200")
    named = [jo.plan(each, *args, bias=matrix(), scale=2.0, chip="h200") for each in (scaled, jo.jit(scaled))]
    assert all(each.options == alone.options for each in named)


@pytest.mark.parametrize(
    ("name", "value"), [("mesh", jax.sharding.AbstractMesh((1,), ("data",))), ("flops_per_token", 6e9)]
)
def test_what_a_step_has_by_itself(name, value):
    step, args = step_and_args(jo.offload(ADAMW), True)
    with pytest.raises(ValueError, match=rf"^{name}: of plan\(tx, params\) alone.*Leave it out"):
        jo.plan(step, *args, **{name: value})


def test_layers_in_one_scan_or_not():
    for stacked in True, False:
        step, args = step_and_args(ADAMW, stacked)
        jaxpr = jax.make_jaxpr(step)(*args).jaxpr
        assert in_one_scan(jaxpr) is stacked
        assert forward_share(jaxpr, True) == pytest.approx(1 / 4, abs=0.01)


def test_a_step_that_offloads_nothing():
    step, args = step_and_args(ADAMW, True)
    with pytest.raises(ValueError, match=r"step: no update of an offload"):
        jo.plan(step, *args)


def test_it_says_what_does_not_fit():
    step, args = step_and_args(jo.offload(ADAMW), True)
    forecast = jo.plan(step, *args, device_memory="2GiB")
    assert forecast.recommended is None and forecast.missing > 0


def test_between_the_ends_of_an_estimate_it_may_fit():
    """And where it is below both, all that is said of what is missing is of the low end."""
    params, tx = parameters(3, 512, False, None), jo.offload(ADAMW)
    step, args = step_of(tx, loss), (params, jo.abstract_state(tx, params), matrix())
    known = jo.plan(step, *args)
    least, most = known["jo.jit"].peak_range
    between = jo.plan(step, *args, device_memory=(least + most) // 2)
    row = between["jo.jit"]
    assert row.fits is None and "may fit" in row.why_not and "maybe" in str(between)
    assert between.recommended is not None and between.missing == 0 and "which may fit" in between.summary()
    assert "jo.jit may fit: " in " ".join(str(between).split())
    assert jo.plan(step, *args, device_memory=most)["jo.jit"].fits is True
    sure = jo.plan(step, *args, device_memory=known["resident"].peak_range[1])
    assert sure.recommended.fits is True
    short = jo.plan(step, *args, device_memory=least - MIB)
    assert short.recommended is None and short.missing == MIB
    said = " ".join(str(short).split())
    assert "nothing fits: short of 1.00 MiB on each device." in said and "is at least 1.00 MiB short of memory" in said


def test_a_divided_parameter_is_gathered_for_its_matmuls():
    """On four devices, a weight of 1 MiB in quarters: x 0.5 (of 2), w 0.25, with the whole one until the second matmul.

    At the second one: x, w and the 0.75 that is missing of it, its operand 0.5, its result 0.5. A whole gradient, as
    it is made, has 0.75 more than its quarter.
    """
    w, x = matrix(), jax.ShapeDtypeStruct((2 * N, N), jnp.float32)
    division = Division(4, {(N, N): 4})

    def at_most(fun):
        jaxpr = jax.make_jaxpr(fun)(x, w).jaxpr
        return peak(jaxpr, [False, False], division=division) / MIB

    assert at_most(lambda x, w: x @ w @ w) == 0.5 + 0.25 + 0.75 + 0.5 + 0.5
    assert at_most(lambda x, w: x.T @ x + w) == 0.5 + 0.25 + 1


def test_what_comes_from_other_devices():
    """Of a MiB that is divided by four, three quarters for its matmuls, and as much of its gradient."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    w = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    replicated = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    assert collectives([w], [w], 4) == (0.75 * MIB, 0.75 * MIB)
    assert collectives([replicated], [replicated], 4) == (0, 0.75 * MIB)
    assert collectives([w], [w], 1)[1] == 0


def test_a_matmul_that_nobody_reads_before_a_loop_is_over_is_put_off():
    """As the head's gradient of a tied embedding: what both it and the loop's beginning are made of, 8 MiB, lives
    beside the loop, and an eighth; made before it, the gradient, 1 MiB, would instead."""

    def step(x, w, *, tied):
        wide = x @ w
        narrow = (wide.T @ x[:, : N // 8]).reshape(N, N)
        last, rows = jax.lax.scan(lambda c, _: ((d := jnp.tanh(c @ c)), d), wide @ w.T, None, length=16)
        return (last + narrow, rows) if tied else (last, rows, narrow)

    args = matrix(), jax.ShapeDtypeStruct((N, 8 * N), jnp.float32)
    at_once = at_peak(lambda *a: step(*a, tied=False), *args, early=True)
    assert at_peak(lambda *a: step(*a, tied=True), *args, early=True) == at_once + 8.125 - 1
