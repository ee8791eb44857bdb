"""Prints tables of peaks as Markdown. Compiled, not run: the figures are the compiler's for the named chip.

``python -m tests.aot.table [h200] [v5e]`` prints peaks; ``python -m tests.aot.table sharded`` that of
docs/sharding.md, per device, on four of them; ``python -m tests.aot.table precision`` those of docs/precision.md. Each
takes a few minutes on two cores. ``python -m tests.aot.table defaults`` prints that of notes/results.md, in half an
hour. ``python -m tests.aot.table time`` prints simulated step times, of the model in ``timeline``, in two minutes.
``python -m tests.aot.table matrix axis=value,value sample=number`` prints peaks of whole models (``matrix``).
``python -m tests.aot.table played`` simulated steps that notes/results.md has beside a second simulator's.
``python -m tests.aot.table quoted`` those of the losses that were reported of such models (``quoted``).
"""

import tests.conftest  # noqa: F401, I001  (first: it sets up jax's CPU devices)
import dataclasses
import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from benchmarks.in_jax import gpt
from benchmarks.harness import systems
from benchmarks.harness.cases import SHAPES
from benchmarks.in_jax.system import program
from benchmarks.in_jax.recipe import usual_recipe
from benchmarks.harness.systems import OURS, RECIPE, RESIDENT
from jax.sharding import PartitionSpec as P
from jax_offload._step.rewritten import rewritten as whole_step

from tests.aot.biases import biases
from tests.aot.cases import (
    Point,
    bounded,
    device_sharding,
    measure_pipelined,
    measure_sharded,
    measure_step,
    measure_update,
)
from tests.aot.harness import H200, MIB, V5E, V5E_2X2, Measured, measure
from tests.aot.matrix import matrix
from tests.aot.model import ADAMW, CLIPPED, loss, parameters, two_by_two
from tests.aot.model import ROWS as ON_A_GPU
from tests.aot.played import played
from tests.aot.quoted import quoted

NAMES = {H200: "H200", V5E: "TPU v5e", V5E_2X2: "v5e 2×2"}

_, _, STACKED, CLIPPED_INSIDE, _ = ON_A_GPU
# target, model, stacked, resident optimizer, ours
ROWS = [
    *((H200, *row) for row in ON_A_GPU),
    (V5E, "stacked layers", *STACKED[1:]),
    (V5E, *CLIPPED_INSIDE),
]


# model, stacked, inner optimizer
SHARDED = [
    ("unrolled", False, ADAMW),
    ("unrolled, clipping inside", False, CLIPPED),
    ("stacked", True, ADAMW),
    ("stacked, clipping inside", True, CLIPPED),
    ("stacked, MultiSteps", True, optax.MultiSteps(ADAMW, 2).gradient_transformation()),
]


def sharded() -> None:
    print(
        "| compiled for | model | parameters | resident | `update` | `update_params` | in + out | collectives |\n"
        "|---|---|---|---:|---:|---:|---:|---|"
    )
    for target in H200, V5E_2X2:
        for model, stacked, inner in SHARDED:
            if target == V5E_2X2 and not stacked:
                continue  # minutes to compile
            fsdp = P(None, "data") if stacked else P("data")
            for name, spec, tx in [
                ("replicated", P(), jo.offload(inner)),
                ("replicated, ZeRO-1", P(), jo.offload(inner, shard_over="data")),
                ("sharded", fsdp, jo.offload(inner)),
            ]:
                resident, plain, own = (
                    measure_sharded(target, each, spec, stacked=stacked, update_params=last)
                    for each, last in ((inner, False), (tx, False), (tx, True))
                )
                said = ", ".join(f"{n} {kind}" for kind, n in sorted(own.collectives.items()))
                moved = f"{own.loaded:.0f} + {own.stored:.0f}"
                peaks = f"{resident.peak:.0f} | {plain.peak:.0f} | {own.peak:.0f}"
                host = "4×H200" if target == H200 else NAMES[target]
                print(f"| {host} | {model} | {name} | {peaks} | {moved} | {said} |", flush=True)
    print(
        "\nAdamW, float32, 24 layers of 4096×4096, batch 512 per device; MiB per device. "
        f"jax {jax.__version__}, optax {optax.__version__}."
    )


# name, parameters' dtype, optimizer
INT8 = {"mu": "int8", "nu": "uint8"}
MASTERS = jo.with_master_params(ADAMW)
PRECISION = [
    ("float32", jnp.float32, jo.offload(ADAMW)),
    ("bfloat16", jnp.float32, jo.offload(ADAMW, storage="bfloat16")),
    ("float16", jnp.float32, jo.offload(ADAMW, storage="float16")),
    ("float8_e4m3fn, nu float16", jnp.float32, jo.offload(ADAMW, storage={"mu": "float8_e4m3fn", "nu": "float16"})),
    ("int8, nu uint8", jnp.float32, jo.offload(ADAMW, storage=INT8)),
    ("masters, resident", jnp.bfloat16, MASTERS),
    ("masters", jnp.bfloat16, jo.offload(MASTERS)),
    ("masters, int8, nu uint8", jnp.bfloat16, jo.offload(MASTERS, storage=INT8)),
    ("low bits", jnp.bfloat16, jo.offload(jo.with_master_params(ADAMW, low_bits=True))),
    ("low bits, int8, nu uint8", jnp.bfloat16, jo.offload(jo.with_master_params(ADAMW, low_bits=True), storage=INT8)),
]


def precision() -> None:
    print(
        "| model | stored | host, B/parameter | in + out | peak | both directions | across a matmul |\n"
        "|---|---|---:|---:|---:|---:|---:|"
    )
    n = 24 * 4096**2 / MIB
    for stacked in True, False:
        for name, dtype, tx in PRECISION:
            options = None if stacked else jo.compiler_options("cuda")
            m = measure_step(H200, tx, stacked=stacked, dtype=dtype, update_params=True, options=options)
            moved = f"{m.host_arguments / n:.2f} | {m.loaded / n:.2f} + {m.stored / n:.2f}"
            shares = f"{m.duplex:.0%} | {m.hidden:.0%}" if m.loaded else "|"
            model = "stacked" if stacked else "unrolled"
            print(f"| {model} | {name} | {moved} | {m.peak:.0f} | {shares} |", flush=True)
    print(
        "\nAdamW, `update_params`, 24 layers of 4096×4096, batch 512, compiled for an H200; peaks in MiB, bytes per "
        f"parameter. jax {jax.__version__}, optax {optax.__version__}.\n"
    )
    print("| compiled for | model | | peak | host temporaries | in + out |\n|---|---|---|---:|---:|---:|")
    ways = {"no skip": False, "`skip=`": True, "`jnp.where` over the new and the old, outside": "outside"}
    for target, stacked in (H200, True), (H200, False), (V5E, True):
        for way, skip in ways.items():
            model = f"{NAMES[target]} | {'stacked' if stacked else 'unrolled'} | {way}"
            try:
                m = measure_step(target, jo.offload(ADAMW), stacked=stacked, update_params=True, skip=skip)
            except jax.errors.JaxRuntimeError as error:
                print(f"| {model} | does not compile: {str(error).splitlines()[0][:60]} | | |", flush=True)
                continue
            print(f"| {model} | {m.peak:.0f} | {m.host_temp:.0f} | {m.loaded:.0f} + {m.stored:.0f} |", flush=True)


# layers, width
GRID = [
    (8, 128), (2, 256), (16, 256), (4, 512), (12, 512), (3, 1024), (12, 1024), (3, 2048), (48, 512), (32, 768),
    (12, 1536), (2, 4096), (4, 4096), (48, 1024), (24, 4096), (6, 8192), (48, 8192),
]  # fmt: skip
GRID_OF_8 = [(8, 128), (16, 256), (12, 512), (12, 1024), (12, 1536), (2, 4096), (12, 4096), (24, 4096)]


def defaults() -> None:
    print(
        "| layers | state | model | clipping | resident | `update` | `update_params` |\n"
        "|---|---:|---|---|---:|---:|---:|"
    )
    above = []
    for devices, sizes in (1, GRID), (8, GRID_OF_8):
        for (n_layers, width), stacked, clip in itertools.product(sizes, (True, False), (False, True)):
            forms = [Point(n_layers, width, stacked, clip, form, devices) for form in (False, True)]
            inner = forms[0].inner()
            resident = forms[0].measured(H200, inner).peak
            ours = [at.measured(H200, jo.offload(inner)).peak for at in forms]
            above += [at for at, peak in zip(forms, ours, strict=True) if peak > bounded(resident)]
            name = f"{n_layers}×{width}²" + (f", over {devices}" if devices > 1 else "")
            model = f"{'stacked' if stacked else 'unrolled'} | {'inside' if clip else ''}"
            peaks = " | ".join(f"{peak:.1f}" for peak in (resident, *ours))
            print(f"| {name} | {forms[0].state:.1f} | {model} | {peaks} |", flush=True)
    print(f"\nAdamW, float32, 512 tokens, compiled for an H200; MiB, per device. jax {jax.__version__}.")
    print(f"Above resident by more than the larger of 1 % and 1 MiB: {above or 'none'}.")


TOKENS = 16384


def time() -> None:
    print(
        "| model | clipping | | peak, MiB | step, ms | beside resident | exposed |\n|---|---|---|---:|---:|---:|---:|"
    )
    for stacked, inner in itertools.product((False, True), (ADAMW, CLIPPED)):
        resident = 0.0
        ways = [("resident", inner), ("usual recipe", usual_recipe(inner)), ("`offload`", jo.offload(inner))]
        for way, tx in [*ways, ("`offload`, `jo.jit`", jo.offload(inner))]:
            options, whole = jo.compiler_options("cuda"), "jo.jit" in way
            m = measure_step(H200, tx, stacked=stacked, batch=TOKENS, options=options, whole=whole)
            model = f"{'scanned' if stacked else 'unrolled'} | {'inside' if inner is CLIPPED else ''} | {way}"
            resident = _timed(model, m, resident)
    resident = 0.0
    for way, system in ("resident", RESIDENT), ("usual recipe", RECIPE), ("`offload`", OURS), ("`jo.jit`", OURS):
        case = systems.case(system, SHAPES["1.3b"], TOKENS, scans=1, clip=False)
        it = program(case, device_sharding(H200), jnp.bfloat16, "xla")
        step = whole_step(it.step) if "jo.jit" in way else it.step
        args = it.params, it.state, it.tokens
        m = measure(H200, step, args, (0, 1), it.shardings, jo.compiler_options("cuda"))
        resident = _timed(f"GPT 1.3B, one scan | | {way}", m, resident)
    print(
        f'\nAdamW, float32, 24 layers of 4096×4096, {TOKENS} tokens; GPT in bfloat16. `jo.compiler_options("cuda")`. '
        "Simulated from the "
        "schedule compiled for an H200, not measured. Exposed: what the step takes beyond its arithmetic, divided by "
        f"the time of the link alone. jax {jax.__version__}, optax {optax.__version__}."
    )


def turned() -> None:
    """The step that ``jo.pipelined`` makes of a clipped one, beside the plain loop."""
    print(
        "| model | storage | tokens | peak, MiB | step, ms | beside resident | exposed |\n"
        "|---|---|---:|---:|---:|---:|---:|"
    )
    sharding, options = device_sharding(H200), jo.compiler_options("cuda")
    stacked = {"w": jax.ShapeDtypeStruct((12, 2, 4096, 4096), jnp.float32, sharding=sharding)}
    unrolled = parameters(24, 4096, False, sharding)
    cases = [("12×(2×4096²), scanned", stacked, two_by_two, tokens) for tokens in (TOKENS, 2 * TOKENS)]
    cases.append(("24×4096², unrolled", unrolled, loss, TOKENS))
    shape = SHAPES["1.3b"]
    gpts = jax.eval_shape(lambda: gpt.init(shape, 1))
    gpts = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=sharding), gpts)
    cases.append(("GPT 1.3B, one scan", gpts, functools.partial(gpt.loss, shape, None, jnp.bfloat16), TOKENS))
    for model, params, model_loss, tokens in cases:
        x = jax.ShapeDtypeStruct((tokens, 4096), jnp.float32, sharding=sharding)
        if params is gpts:
            x = jax.ShapeDtypeStruct((tokens // shape.context, shape.context + 1), jnp.int32, sharding=sharding)
        resident = measure_update(H200, CLIPPED, params, model_loss, x, options=options)
        time = _timed(f"{model} | resident | {tokens}", resident, 0.0)
        for storage in (None, "bfloat16", {"mu": "int8", "nu": "uint8"}) if tokens == TOKENS else (None,):
            tx = jo.offload(CLIPPED, storage=storage)
            plain = measure_update(H200, tx, params, model_loss, x, options=options)
            _timed(f"{model} | {_name(storage)}, plain loop | {tokens}", plain, time)
            m = measure_pipelined(H200, tx, params, model_loss, x)
            _timed(f"{model} | {_name(storage)}, `jo.pipelined` | {tokens}", m, time)
            m = measure_pipelined(H200, tx, params, model_loss, x, gradients="host")
            _timed(f"{model} | {_name(storage)}, gradients on the host | {tokens}", m, time)


def unrolled() -> None:
    """Peaks of unrolled layers of which a share is on the host, or that are clipped outside."""
    print("| | resident | `jax.jit` | `jo.jit` |\n|---|---:|---:|---:|")
    sharding, options = device_sharding(H200), jo.compiler_options("cuda")

    def row(name: str, tx: Any, inner: Any, *model: Any, **kwargs: Any) -> None:
        ways = (inner, False), (tx, False), (tx, True)
        peaks = [measure_update(H200, t, *model, whole=w, options=options, **kwargs).peak for t, w in ways]
        print(f"| {name} | {' | '.join(f'{peak:.0f}' for peak in peaks)} |", flush=True)

    x = jax.ShapeDtypeStruct((TOKENS, 4096), jnp.float32, sharding=sharding)
    toy = parameters(24, 4096, False, sharding), loss, x
    row("24×4096², `fraction=0.5`", jo.offload(ADAMW, fraction=0.5), ADAMW, *toy, update_params=True)
    shape = dataclasses.replace(SHAPES["1.3b"], layers=6)
    params = jax.eval_shape(lambda: gpt.init(shape, 0))
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=sharding), params)
    tokens = jax.ShapeDtypeStruct((TOKENS // shape.context, shape.context + 1), jnp.int32, sharding=sharding)
    model = params, functools.partial(gpt.loss, shape, None, jnp.bfloat16), tokens
    for fraction in (0.5, 0.1):
        tx = jo.offload(ADAMW, fraction=fraction)
        row(f"GPT 1.3B, 6 layers, bfloat16, `fraction={fraction}`", tx, ADAMW, *model, update_params=True)
    outside = optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW))
    row("the same, clipping outside, `update`", outside, CLIPPED, *model)


def _name(storage: Any) -> str:
    return "float32" if storage is None else storage if isinstance(storage, str) else "int8"


def _timed(model: str, m: Measured, resident: float) -> float:
    """Prints a row of ``time``; returns the resident step's time, which is the first one's."""
    t = m.timeline(H200)
    resident = resident or t.step
    beside, exposed = (f"{t.step / resident - 1:+.0%}", f"{t.exposed_share:.2f}") if t.link else ("–", "–")
    print(f"| {model} | {m.peak:.0f} | {1e3 * t.step:.0f} | {beside} | {exposed} |", flush=True)
    return resident


def main(targets: list[str]) -> None:
    print("| compiled for | model | resident | usual recipe | `jax_offload` |\n|---|---|---:|---:|---:|")
    for target, model, stacked, inner, ours in ROWS:
        if targets and target.split(":")[0] not in targets:
            continue
        peaks = [measure_step(target, tx, stacked=stacked).peak for tx in (inner, usual_recipe(inner), ours)]
        resident, recipe, own = (f"{peak:.0f}" for peak in peaks)
        print(f"| {NAMES[target]} | {model} | {resident} | {recipe} | **{own}** |", flush=True)
    print(
        f"\nAdamW, float32, 24 layers of 4096×4096, batch 512; MiB. jax {jax.__version__}, optax {optax.__version__}."
    )


if __name__ == "__main__":
    tables = {
        "sharded": sharded,
        "precision": precision,
        "defaults": defaults,
        "time": time,
        "turned": turned,
        "unrolled": unrolled,
        "biases": biases,
        "played": played,
    }
    if sys.argv[1:2] == ["matrix"]:
        sys.exit(matrix(sys.argv[2:]))
    if sys.argv[1:2] == ["quoted"]:
        sys.exit(quoted(sys.argv[2:]))
    tables[sys.argv[1]]() if sys.argv[1:2] and sys.argv[1] in tables else main(sys.argv[1:])
