"""``jo.plan`` from sizes: bytes that are exact, a fit that leaves nothing out, and a verdict."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.analysis.test_cli import run

ADAMW, LION = optax.adamw(1e-3), optax.lion(1e-4)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
GIB, NOTHING = 2**30, "Nothing fits: "
HALF = {"w": jax.ShapeDtypeStruct((64, 4096, 4096), "bfloat16")}  # 2 GiB; resident 8 GiB


def dense(layers, width, unrolled=False):
    """The shapes of a transformer of 12 width² a layer, in one array a kind or one a layer."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    if unrolled:
        return {f"layer_{k}/{name}": shape for k in range(layers) for name, shape in shapes.items()}
    return {name: (layers, *shape) for name, shape in shapes.items()}


FACTORS = {"a": (32, 4096, 16), "b": (32, 16, 4096)}
MODELS = {  # the optimizer, about so many parameters, and their dtype
    "1e9": (ADAMW, dense(20, 2048), "bfloat16"),
    "1e9, unrolled": (LION, dense(20, 2048, unrolled=True), "float32"),
    "7e9, masters": (jo.with_master_params(ADAMW), dense(32, 4096), "bfloat16"),
    "7e9, accumulated": (optax.MultiSteps(ADAMW, 4), dense(32, 4096), "bfloat16"),
    "7e9, factors alone": (optax.masked(ADAMW, {"a": True, "b": True}), FACTORS, "float32"),
    "13e9, clipped": (CLIPPED, dense(40, 5120), "bfloat16"),
    "47e9 of 8 experts": (
        ADAMW, {"attention": (32, 4096, 10240), "up": (32, 8, 4096, 2 * 14336), "down": (32, 8, 14336, 4096)},
        "bfloat16",
    ),
    "2e9, a ViT": (
        ADAMW, {"patch": (588, 1664), "qkv": (48, 1664, 4992), "out": (48, 1664, 1664), "up": (48, 1664, 8192),
                "down": (48, 8192, 1664), "norm": (48, 2, 1664)}, "float32",
    ),
    "unequal layers, with biases": (
        CLIPPED, {f"conv_{k}/{name}": shape for k in range(8, 14)
                  for name, shape in (("kernel", (3, 3, 2**k, 2 ** (k + 1))), ("bias", (2 ** (k + 1),)))}, "float32",
    ),
    "70e9, masters, clipped": (jo.with_master_params(CLIPPED), dense(80, 8192), "bfloat16"),
    "405e9": (ADAMW, dense(126, 16384), "bfloat16"),
}  # fmt: skip
WAYS = [(1, False), (8, True), (8, False), (64, True), (64, False)]  # devices, and whether parameters are divided
ONCE = list(zip(MODELS, (WAYS * 3)[: len(MODELS)], strict=True))
DAILY = pytest.mark.daily("every model once")
EACH = [pytest.param(name, *way, marks=[DAILY] if (name, way) in ONCE else [])
        for name, way in itertools.product(MODELS, WAYS)]  # fmt: skip


def placed(shapes, dtype="bfloat16", devices=1, divided=False):
    """Abstract parameters on a mesh, of the CPU's devices as far as there are so many, else of none."""
    if devices > len(jax.devices()):
        mesh = AbstractMesh((devices,), ("data",))
    else:
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def leaf(shape):
        axis = max(range(len(shape)), key=lambda k: (shape[k] % devices == 0, shape[k]))
        spec = P(*(["data" if k == axis else None for k in range(len(shape))] if divided else []))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return {name: leaf(shape) for name, shape in shapes.items()}


def own(x):
    """Bytes on one device."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return int(np.prod(shape, dtype=np.int64)) * x.dtype.itemsize


def named(row, inner):
    """The transformation of a row, from the code that it prints."""
    return eval(row.code.partition("; ")[0].removeprefix("tx = "), {"inner": inner, "jo": jo, "optax": optax})


@pytest.mark.parametrize(("name", "devices", "divided"), EACH)
def test_every_row_s_bytes_are_those_of_the_run(name, devices, divided):
    """The state is where its arrays would be, and what streams is all that is in host memory, once each way."""
    inner, shapes, dtype = MODELS[name]
    params = placed(shapes, dtype, devices, divided)
    found = jo.plan(inner, params, chip="h100", device_memory="9TB", host_memory="99TB", activations="1MiB")
    tight = jo.plan(inner, params, chip="h100", device_memory=int(found["offload"].peak * 1.5), activations="1MiB")
    assert 2 <= len(found.options) <= 8 and len(tight.options) <= 8
    for row in {row.name: row for row in (*tight.options, *found.options)}.values():
        tx = named(row, inner)
        state = [x for x in jax.tree.leaves(jo.abstract_state(tx, params)) if hasattr(x, "sharding")]
        host = [own(x) for x in state if x.sharding.memory_kind == "pinned_host"]
        parameters = sum(map(own, jax.tree.leaves(params)))
        assert (row.parameters, row.gradients, row.state) == (parameters, parameters, sum(map(own, state)) - sum(host))
        if row.name == "cores":  # gradients come down, and new parameters go up
            large = sum(own(x) for x in jax.tree.leaves(params) if x.size * x.dtype.itemsize >= 2**16)
            assert (row.loaded, row.window) == (large, 0) and row.host >= sum(host) + large
        else:
            assert row.host == row.loaded == row.stored == sum(host)
            windows = [w.nbytes for w in jo.placement(tx, params).windows] if host else []
            assert row.window == min(sum(windows), row.host)


def test_abstract_meshes_of_both_kinds_and_real_ones_agree():
    """An AbstractMesh has Explicit axes unless told otherwise: windows used to be counted whole there."""
    meshes = [jax.make_mesh((8,), ("data",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)]
    meshes += [AbstractMesh((8,), ("data",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)]

    def rows(mesh):
        w = jax.ShapeDtypeStruct((16, 1024, 4096), "bfloat16", sharding=NamedSharding(mesh, P(None, "data")))
        return jo.plan(CLIPPED, {"w": w}, chip="h100", tokens_per_step=4096, activations="1GiB").options

    first, *others = map(rows, meshes)
    assert all(other == first for other in others)
    assert first[1].window <= first[1].host / 8


@pytest.mark.parametrize("devices", [1, 8, 24, 64])
def test_a_model_has_as_many_parameters_as_were_asked_for(devices):
    for n in 1e9, 13e9, 70e9, 405e9:
        assert jo.plan(ADAMW, n, devices=devices)["resident"].parameters * devices == pytest.approx(2 * n, rel=1e-3)


@pytest.mark.parametrize("options", [[], ["--replicated"], ["--layers", "80"], ["--master", "float32", "--clip"]])
def test_the_command_gives_the_same_figures(options):
    """The same question in both forms; the number in each spelling."""
    keywords = {"replicated": "--replicated" in options, "layers": 80 if "--layers" in options else None}
    tx = jo.with_master_params(CLIPPED) if "--clip" in options else ADAMW
    given = {"chip": "h100", "devices": 8, "tokens_per_step": 131072, "device_memory": "80GiB", **keywords}
    found = jo.plan(tx, "70B", **given).to_dict()
    for model in "70B", "70e9":
        asked = "--chip h100 --devices 8 --tokens 131072 --device-memory 80GiB --json".split()
        said = run("plan", model, *asked, *options)
        printed = json.loads(said.stdout)
        for ours, theirs in zip(found["options"], printed["options"], strict=True):
            assert {k: v for k, v in ours.items() if k != "code"} == {k: v for k, v in theirs.items() if k != "code"}
        assert (found["verdict"], found["recommended"]) == (printed["verdict"], printed["recommended"])


def test_fits_counts_what_jax_takes(monkeypatch):
    """Three quarters of the device by default, less 5 %; on a TPU all of it."""
    usable = functools.partial(jo.plan, ADAMW, HALF, activations="1MiB")
    assert usable(device_memory="80GiB").usable == int(80 * GIB * 0.75 * 0.95)
    assert usable(device_memory="16GiB", chip="v5e").usable == int(16 * GIB * 0.95)
    limit = (8 * GIB + 2**21) / 0.95
    for share in ("0.5", "0.75", "0.9"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
        over, under = (usable(device_memory=int(limit / float(share) + n)) for n in (-(2**22), 2**22))
        assert (over["resident"].fits, under["resident"].fits) == (False, True)
        assert f"jax takes {float(share):.0%} (XLA_PYTHON_CLIENT_MEM_FRACTION)" in str(over).replace("\n  ", " ")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "much")
    with pytest.raises(ValueError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION: expected a share .* got 'much'"):
        usable(device_memory="80GiB")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert usable(device_memory="80GiB").usable == int(80 * GIB * 0.95)


@pytest.mark.parametrize("memory", [None, "80GiB", "80GB", "61GiB"])
def test_nothing_fits_while_a_part_is_missing(memory):
    """Without activations a row says below what they have to stay."""
    params = {"layers": jax.ShapeDtypeStruct((40, 5120, 65000), "bfloat16")}
    found = jo.plan(jo.offload(ADAMW), params, chip="h100", tokens_per_step=65536, device_memory=memory)
    assert not any(row.fits for row in found.options)
    for row in found.options:
        assert row.activations is None and row.room == found.usable - row.peak
        assert (row.fits is False) == (row.room < 0)
        assert row.fits is False or row.why.startswith("if activations stay below ")
    assert "fraction" not in [row.name for row in found.options]
    assert "Give activations, or layers, width and tokens" in found.verdict or "give activations" in found.verdict or (
        found.recommended is None)  # fmt: skip


def test_activations_follow_from_layers_width_and_tokens():
    """The inputs of 32 layers, and 17 elements a token and column for the one that is recomputed; else absent."""
    params = placed(dense(32, 4096))
    found = jo.plan(ADAMW, params, chip="h200", tokens_per_step=65536, layers=32, width=4096)
    assert found["resident"].activations == 65536 * 4096 * 2 * (32 + 17)
    assert "checkpoint around each of 32 layers" in " ".join(found.assumptions)
    for some in {"layers": 32, "width": 4096}, {"tokens_per_step": 65536, "layers": 32}, {}:
        assert jo.plan(ADAMW, params, chip="h200", **some)["resident"].activations is None
    divided = placed(dense(32, 4096), devices=8, divided=True)
    sharded = jo.plan(ADAMW, divided, chip="h200", tokens_per_step=65536, layers=32, width=4096)
    gathered = 3 * 12 * 4096**2 * 2  # two layers' parameters and a gradient are whole on a device
    assert sharded["resident"].activations == 8192 * 4096 * 2 * (32 + 17) + gathered
    assert all(row.fits in (True, False) for row in sharded.options) and sharded.recommended.fits


def test_device_memory_solves_for_the_smallest_fraction():
    """8 layers apart; a hundredth less does not fit."""
    params = placed(dense(8, 2048, unrolled=True))
    memory = int((params_bytes := 2 * 8 * 12 * 2048**2) * 2.8 / (0.75 * 0.95))
    found = jo.plan(ADAMW, params, device_memory=memory, activations=0.05 * GIB, chip="h100", tokens_per_step=512)
    row = found["fraction"]
    assert row.fits and found.recommended is row and found["resident"].fits is False
    share = float(row.code.partition("fraction=")[2].partition(")")[0])
    assert 0 < share < 1 and row.parameters == params_bytes
    less = jo.plan(jo.offload(ADAMW, fraction=share - 0.02), params, device_memory=memory, activations=0.05 * GIB)
    assert less["as given"].fits is False
    assert jo.plan(named(row, ADAMW), params, device_memory=memory, activations=0.05 * GIB)["as given"].peak == row.peak
    assert row.added < found["offload"].added
    short = jo.plan(ADAMW, params, device_memory=memory, activations=0.05 * GIB, host_memory=int(row.host / 0.89))
    assert short["fraction"].fits and short["offload"].why.startswith("host: ")  # the whole state is too much for it
    many = jo.plan(ADAMW, params, device_memory=memory, activations=0.05 * GIB, chip="h100", tokens_per_step=65536)
    assert many["fraction"].added == many["offload"].added == 0  # what stays is updated at once, and nothing waits


def test_the_smallest_fraction_of_few_large_leaves():
    """Shares that differ by less than a leaf move the same leaves; the next leaf is tried."""
    model = {"param_dtype": "float32", "compute_dtype": "bfloat16", "layers": 32, "width": 3072}
    found = jo.plan(CLIPPED, "4B", chip="h100", tokens_per_step=65536, **model)
    row, whole = found["fraction"], found["pipelined"]
    assert row.fits and 0 < whole.host - row.host < whole.room and found.recommended is row


def test_resident_zero_1_is_a_row_and_comes_before_offloading():
    found = jo.plan(ADAMW, placed(dense(32, 4096), devices=8), chip="h100", activations="10GiB", tokens_per_step=65536)
    assert [row.name for row in found.options][:4] == ["resident", "resident ZeRO-1", "offload", "offload ZeRO-1"]
    assert found["resident"].fits is False and found.recommended.name == "resident ZeRO-1"
    assert found.recommended.state == pytest.approx(found["resident"].state / 8, rel=1e-3)
    assert "fraction=0.0" in found.recommended.code and "shard_over='data'" in found.recommended.code


SHORT = {  # of what there is too little: the optimizer, the question, what the verdict says, and what helps
    "memory of a device": (
        ADAMW, {"replicated": True}, "Divide the parameters over the devices (FSDP), or take more or larger ones.",
        {"replicated": False},
    ),
    "memory of the host": (
        jo.with_master_params(CLIPPED), {"layers": 80, "host_memory": "256GiB"},
        "Take a host with more, a state on disk (disk=True), or more devices.", {"host_memory": "2TiB"},
    ),
    "memory for activations": (
        CLIPPED, {"layers": 80, "tokens_per_step": 262144}, "take fewer tokens a step, or more devices.",
        {"tokens_per_step": 65536},
    ),
}  # fmt: skip


@pytest.mark.daily("each has words of its own")
@pytest.mark.parametrize("name", SHORT)
def test_nothing_fits(name):
    """70e9 parameters on 8 devices. The verdict says what to change, and with that something fits."""
    inner, question, advice, change = SHORT[name]
    given = {"devices": 8, "chip": "h100", "tokens_per_step": 65536, **question}
    found = jo.plan(inner, "70B", **given)
    assert (found.recommended, found.code) == (None, "") and found.verdict.startswith("Nothing fits: ")
    assert found.verdict.endswith(advice) and found.verdict.count(". ") == 1
    enough = jo.plan(inner, "70B", **(given | change))
    assert enough.recommended.fits is not False and enough.recommended.code == enough.code
    if name == "memory of a device":
        assert enough.recommended.name == "offload" and enough["offload"].peak / GIB == pytest.approx(33.6, abs=0.1)
        assert "divided over the devices (FSDP)" in str(enough).replace("\n  ", " ")
    if name == "memory of the host":
        assert "pipelined needs 69.0 GiB more of the host's memory" in found.verdict and found["pipelined"].room > 0


LARGER = {  # the arguments, the row that fits in a larger share of the memory, and the first words of the verdict
    "than of another row": ({"device_memory": "10.5GiB", "activations": "1MiB"}, "resident", "With "),
    "where nothing fits": ({"device_memory": 4.2 * GIB / 0.75 + 5 * GIB, "activations": "5GiB"}, None, NOTHING),
    "without activations": ({"device_memory": 4.2 * GIB / 0.75}, None, NOTHING),
    "beside a small host": (
        {"device_memory": "12GiB", "host_memory": "1GiB", "activations": "1GiB"}, "resident",
        f"{NOTHING}fraction needs 1.10 GiB more of the host's memory for each device. ",
    ),
}  # fmt: skip


@pytest.mark.daily("each has words of its own")
@pytest.mark.parametrize("name", LARGER)
def test_a_larger_share_of_the_memory(name, monkeypatch):
    """The row does not fit into 75% of the memory; the verdict gives a share into which it fits, and the condition."""
    given, row, begins = LARGER[name]
    found = jo.plan(ADAMW, HALF, chip="h100", **given)
    share = re.search(r"With XLA_PYTHON_CLIENT_MEM_FRACTION=(0\.\d+) in the environment", found.verdict)[1]
    assert 0.75 < float(share) <= 0.95 and found.verdict.startswith(begins)
    if begins.startswith(NOTHING):
        *setting, line = found.code.splitlines()
        assert setting == [f"export XLA_PYTHON_CLIENT_MEM_FRACTION={share}"] and found.recommended is None
        assert found.code.replace("\n", "\n  ") in str(found)
        row = row or next(each.name for each in found.options if each.code == line)
    else:
        assert found.recommended.name != row and found.code == found.recommended.code
    assert found[row].fits is False
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    there = jo.plan(ADAMW, HALF, chip="h100", **given)[row]
    assert there.fits is (True if "activations" in given else None) and there.why in found.verdict


@pytest.mark.parametrize("other", [{"device_memory": "8.2GiB"}, {"chip": "v5e"}])
def test_no_larger_share(other):
    """A larger share would leave no headroom, and jax takes all memory of a TPU."""
    given = {"chip": "h100", "device_memory": "10.5GiB", "activations": "1MiB"} | other
    assert "XLA_PYTHON" not in jo.plan(ADAMW, HALF, **given).verdict


def test_accelerators_of_a_host_share_its_memory():
    """Alone a link reaches what was measured; eight share the host's memory, which the cores' row counts with."""
    one, eight = (jo.plan(ADAMW, 8e9 * n, chip="h100", devices=n, tokens_per_step=8) for n in (1, 8))
    assert (one["offload"].link, eight["offload"].link) == pytest.approx(
        (4 * 8e9 * 2 / 79e9, 4 * 8e9 * 2 / 64e9), rel=1e-2
    )
    assert "53 GB/s one way, 32 each way at once, assumed, DRAM 64 per card" in " ".join(eight.assumptions)
    assert "39.5 each way at once, measured, DRAM 64 per card" in " ".join(one.assumptions)
    measured = jo.plan(CLIPPED, "1B", chip="h100", param_dtype="float32", tokens_per_step=16384)  # notes/results.md
    assert measured["offload"].added == pytest.approx(0.30, abs=0.005)
    assert "nothing hides jo.jit's, which take turns" in " ".join(measured.assumptions)


def test_what_changes_numbers_is_marked_and_comes_last():
    """Fewer bits only where no other row fits; here the memory of the device, and then the host's, is what is short."""
    params = {"w": jax.ShapeDtypeStruct((16, 4096, 4096), "float32")}  # 1 GiB, moments 2 GiB
    given = {"chip": "h100", "activations": "1GiB", "tokens_per_step": 512}
    tx = jo.offload(ADAMW, storage="bfloat16")
    enough = jo.plan(tx, params, device_memory="12GiB", host_memory="3GiB", **given)
    assert not enough["as given"].same_numbers and enough.recommended.name == "resident" and "as given *" in str(enough)
    short = jo.plan(tx, params, device_memory="5GiB", host_memory="1.3GiB", **given)
    assert short.recommended.name == "as given" and "changes the numbers, as nothing else fits" in short.verdict
    whole = jo.plan(ADAMW, params, device_memory="5GiB", host_memory="1GiB", **given)
    assert whole["offload"].why == "host: 1.10 GiB over"


def test_the_machine_that_asks_does_not_count():
    """Neither its memory nor its disk nor its cgroup: the question is about an H100."""
    found = jo.plan(CLIPPED, "13B", chip="h100", tokens_per_step=16384)
    assert found.host_memory == found.chip.dram_bytes
    assert not any("disk" in line for line in str(found).splitlines())


def test_clipping_is_hidden_by_the_next_forward_pass():
    """An update that waits for the norm of all gradients is hidden by nothing; pipelined by a third of the step."""
    found = jo.plan(CLIPPED, "13B", chip="h100", tokens_per_step=16384)
    in_turn, at_once = found["offload"].link, found["pipelined"].link
    assert (in_turn, at_once) == pytest.approx((8 * 13e9 / 53e9, 8 * 13e9 / 79e9), rel=1e-3)
    assert found["offload"].added == pytest.approx(in_turn)
    assert found["pipelined"].added == pytest.approx(at_once - found.compute / 3)
    assert found.compute == pytest.approx(6 * 13e9 * 16384 / 650e12, rel=1e-3)
    assert found.recommended.name == "pipelined" and "jo.pipelined" in found.recommended.code
    again = jo.plan(CLIPPED, "13B", chip="h100", tokens_per_step=16384, layers=40, width=5120)
    assert again.compute / found.compute == pytest.approx(8 / 6, rel=0.01)  # the layers run once more in a checkpoint
    assert again["pipelined"].added == pytest.approx(found["pipelined"].added, rel=0.01)
    plain = jo.plan(ADAMW, "13B", chip="h100", tokens_per_step=16384)
    assert "pipelined" not in [row.name for row in plain.options]
    exposed = [jo.plan(ADAMW, "13B", chip="h100", tokens_per_step=n)["offload"].added for n in (16_400, 16_500)]
    assert exposed[0] > 0 == exposed[1]


def test_the_dtype_of_the_arithmetic():
    """bfloat16 beside float32 parameters: half the activations, the matmuls of bfloat16, the same state."""
    given = {"chip": "h100", "tokens_per_step": 16384, "layers": 32, "width": 2048, "param_dtype": "float32"}
    own, mixed = jo.plan(ADAMW, "1B", **given), jo.plan(ADAMW, "1B", **given, compute_dtype="bfloat16")
    assert mixed["offload"].activations * 2 == own["offload"].activations
    assert mixed.compute == pytest.approx(own.compute * 320 / 650, rel=1e-3)
    assert mixed["resident"].state == own["resident"].state and mixed["offload"].host == own["offload"].host


def test_what_is_printed():
    """A plan prints two sentences, a line of code, eight rows at most and the inputs, as in docs/plan.md."""
    found = jo.plan(CLIPPED, "13B", chip="h100", device_memory="80GiB", tokens_per_step=16384)
    table = str(found).partition("GiB on one device:")[2].partition("\n\n")[0]
    assert found.verdict.count(". ") == 1 and len(table.strip().splitlines()) <= 9
    assert found.describe(verbose=True).startswith(str(found)) and found.describe(verbose=True) != str(found)
    with pytest.raises(KeyError, match="'fast' is none of"):
        found["fast"]


def test_a_disk_where_it_is_asked_for():
    """All of the state; of the window at a time nothing is known, so that it does not fit for certain."""
    found = jo.plan(ADAMW, "13B", chip="h100", disk=True, tokens_per_step=65536, activations="1GiB")
    row = found["disk"]
    assert row.loaded == row.stored == row.disk and (row.link, row.added) == (None, None)
    assert "the disk's speed; each step reads 48.4 GiB and writes as many" in str(found).replace("\n  ", " ")
    assert row.disk == pytest.approx(4 * 13e9, rel=1e-3) and row.host == 0
    assert row.fits is None and row.missing == ("the window",)
    assert "disk" not in [r.name for r in jo.plan(ADAMW, "13B", chip="h100").options]
    assert "disk=" in row.code


def test_what_is_given_counts():
    """Options of an offload are kept; a chain around one is taken as it is."""
    given = jo.plan(jo.offload(ADAMW, fraction=0.5, window=2**28), "7B", chip="h100")
    assert [row.name for row in given.options][:2] == ["resident", "as given"]
    assert "fraction=0.5, window=268435456" in given["as given"].code
    for options in {"fraction": 0}, {"fraction": 0, "storage": "bfloat16"}:
        none = jo.plan(jo.offload(ADAMW, **options), "7B", chip="h100", disk=True)
        assert none["as given"].host == 0 < none["cores"].host and none["disk"].disk
    chain = jo.plan(optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW)), "7B", chip="h100")
    assert [row.name for row in chain.options] == ["as given"]
    assert chain["as given"].host == jo.plan(ADAMW, "7B", chip="h100")["offload"].host


def test_accumulation():
    """The sums go and come with the moments in every call. Under a norm of them, a step loads them once or twice."""
    plain, clipped = (jo.plan(optax.MultiSteps(tx, 4), "7B", chip="h100") for tx in (ADAMW, CLIPPED))
    assert plain["resident"].state > jo.plan(ADAMW, "7B")["resident"].state
    assert plain["offload"].loaded == plain["offload"].stored == plain["offload"].host
    row, ahead = clipped["offload"], clipped["pipelined"]
    assert (row.loaded, row.link, row.added) == (None, None, None) and row.stored == row.host
    assert "once or twice as much from it" in clipped.describe(verbose=True)
    assert ahead.loaded == pytest.approx(ahead.host * 3 / 2, rel=1e-3) and ahead.added > 0


def test_an_update_that_needs_arguments_only_a_step_has():
    """It cannot be traced from sizes: what it loads, and for how long, is not known."""
    row = jo.plan(optax.contrib.momo(1e-2), "1B", chip="h100")["offload"]
    assert (row.window, row.loaded, row.added) == (None, None, None) and row.host > 0


TREE = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}


@pytest.mark.parametrize(
    ("params", "kwargs", "says"),
    [
        (TREE, {"chip": "h900"}, "chip: 'h900' is not known. Known: a100"),
        (TREE, {"tokens_per_step": 0}, "tokens_per_step: expected how many there are.* got 0"),
        (TREE, {"tokens_per_step": float("nan")}, "tokens_per_step: expected how many"),
        (TREE, {"device_memory": "much"}, "device_memory: expected a number of bytes, or text"),
        (TREE, {"host_memory": -1}, "host_memory: expected a number of bytes"),
        (TREE, {"activations": "lots"}, "activations: expected a number of bytes"),
        (TREE, {"layers": 0}, "layers: expected how many there are.* got 0"),
        (TREE, {"target": "h200"}, "target: compiles a step, plan.make, tx, target='h200'"),
        (TREE, {"devices": 8, "replicated": True}, r'devices=8, replicated=True: for a model .* jo.plan\(tx, "13B"'),
        (TREE, {"param_dtype": "float32"}, "param_dtype='float32': for a model that a number describes"),
        ("13X", {}, 'params: expected how many there are, 13e9 or "13B"'),
        (0, {}, "params: expected how many"),
        (float("inf"), {}, "params: expected how many"),
        (1e9, {"devices": 0}, "devices: expected how many"),
        (1e9, {"devices": 7, "width": 4096}, "width: 7 devices do not divide 4096 columns"),
        (1e9, {"param_dtype": "int8"}, "param_dtype: expected one of bfloat16"),
        (1e9, {"param_dtype": None}, "param_dtype: expected one of bfloat16"),
        (1e9, {"compute_dtype": "bf16"}, "compute_dtype: expected one of bfloat16"),
        (1e6, {"layers": 80, "width": 9999}, "are too few for 80 layers of width 9999"),
    ],
)
def test_what_is_wrong_is_told(params, kwargs, says):
    with pytest.raises(ValueError, match=says):
        jo.plan(ADAMW, params, **kwargs)


def test_types_that_are_wrong():
    with pytest.raises(TypeError, match=r"tx: expected .*adamw.*Call it first: adamw\("):
        jo.plan(optax.adamw, {"w": jnp.ones((2, 2))})
    for tree in {"w": np.ones((64, 64), np.float32)}, {"a": {1: {("x", 2): jax.ShapeDtypeStruct((64, 64), "float32")}}}:
        assert jo.plan(jo.offload(ADAMW, min_bytes=0), tree)["as given"].host == 2 * 64 * 64 * 4
    assert jo.plan(ADAMW, {"w": 3.0})["resident"].parameters == 4
    with pytest.raises(TypeError, match=r"plan\(tx, params\) takes the parameters alone.* got 3 arguments"):
        jo.plan(ADAMW, {"w": jnp.ones((2, 2))}, 3)


def test_parameters_in_host_memory():
    """They count in host memory and on the link, and the resident row has them on the device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = {"layers": (8, 512, 512), "head": (512, 64)}
    params = {k: jax.ShapeDtypeStruct(s, "float32", sharding=place) for k, s in params.items()}
    layers, head = 8 * 512**2 * 4, 512 * 64 * 4
    there, loss = jo.to_host(params, select="layers"), lambda p, x: jax.lax.scan(layer, x, p["layers"])[0] @ p["head"]
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    for own in (False, True):

        def make(tx):
            state = jo.abstract_state(tx, there)

            def step(params, state, x):
                grads = jax.grad(lambda p: loss(p, x).sum())(params)
                return jo.update_params(tx, grads, state, params)

            return step, there, state, jax.ShapeDtypeStruct((8, 512), "float32", sharding=place)

        asked = (make, optax.adamw(1e-3)) if own else (optax.adamw(1e-3), there)
        found = jo.plan(*asked, chip="h200", tokens_per_step=8)
        away, resident = found["offload"], found["resident"]
        assert (away.parameters, resident.parameters) == (head, layers + head)
        assert (away.host, resident.host) == (3 * layers + 2 * head, 0)
        assert away.loaded == 4 * layers + 2 * head and away.stored == 3 * layers + 2 * head
        assert not {"cores", "disk"} & {row.name for row in found.options}
        assert "8.00 MiB in host memory" in str(found), found
