"""``jo.plan`` of an optimizer: numbers worked out by hand, and what cannot be."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._analysis import dram as memory_of_the_host
from jax_offload._analysis import on_cores, table
from jax_offload._analysis import plan as planning
from jax_offload._analysis.host import POOL_DEFAULT, HostMemory, host_memory
from jax_offload._analysis.units import bytes_of, in_bytes, in_seconds

MIB, GIB = 2**20, 2**30
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
STACKED = {"w": jax.ShapeDtypeStruct((24, 4096, 4096), jnp.float32)}  # 1536 MiB, and its state 3072


def test_the_readme_s_stacked_model():
    """Parameters and gradients 1536 each, state 3072, a window of 256, in MiB."""
    forecast = jo.plan(ADAMW, STACKED)
    resident, offload = forecast["resident"], forecast["offload"]
    assert (resident.parameters, resident.gradients, resident.window) == (1536 * MIB, 1536 * MIB, 0)
    assert (resident.state, resident.host, resident.loaded, resident.stored) == (3072 * MIB + 4, 0, 0, 0)
    assert resident.peak == 6144 * MIB + 4
    assert (offload.state, offload.host, offload.loaded, offload.stored) == (4, *[3072 * MIB] * 3)
    assert (offload.window, offload.peak) == (256 * MIB, (3072 + 256) * MIB + 4)
    assert forecast["bfloat16"].host == forecast["bfloat16"].loaded == 1536 * MIB
    # a byte each, and a float32 scale for every 128
    assert forecast["int8"].host == 768 * MIB + 2 * 4 * 24 * 4096 * 4096 // 128
    assert "pipelined" not in [option.name for option in forecast.options]


def test_time():
    """100 GB/s both ways at once: 3 GiB each way in 64 ms; 6 operations for each of 403 million parameters."""
    forecast = jo.plan(ADAMW, STACKED, chip="h100", tokens_per_step=16384)
    n, offload = 24 * 4096**2, forecast["offload"]
    link, compute = 8 * n / 50e9, 16384 * 6 * n / 320e12
    assert offload.link == pytest.approx(link)
    assert offload.link_serial == pytest.approx(16 * n / 55e9)
    assert forecast.compute == pytest.approx(compute)
    assert offload.exposed == 0 and offload.hidden == 1  # the backward pass takes 83 ms
    assert offload.hidden_from == pytest.approx(link / (2 / 3 * 6 * n / 320e12), abs=1)
    few = jo.plan(ADAMW, STACKED, chip="h100", tokens_per_step=8192)["offload"]
    assert few.exposed == pytest.approx(link - compute / 2 * 2 / 3)
    assert few.overhead == pytest.approx(few.exposed / (compute / 2))


def test_a_norm_of_all_gradients_hides_nothing_but_in_the_next_forward_pass():
    forecast = jo.plan(CLIPPED, STACKED, chip="h100", tokens_per_step=65536)
    assert forecast["offload"].exposed == forecast["offload"].link
    assert forecast["pipelined"].exposed == 0
    assert "jo.pipelined" in forecast["pipelined"].code
    scheduled = jo.plan(optax.adamw(optax.linear_schedule(1e-3, 0, 10)), STACKED)  # a number, but of no gradient
    assert "pipelined" not in [option.name for option in scheduled.options]


def test_gradients_that_wait_on_the_host():
    """Another 1.5 GiB of them there, and once more over the link each way; a third of a step hides it."""
    forecast = jo.plan(CLIPPED, STACKED, chip="h100", tokens_per_step=16384)
    row, turned, bytes_ = forecast["gradients too"], forecast["pipelined"], 4 * 24 * 4096**2
    assert row.gradients == 0 and row.host == turned.host + bytes_ == 3 * bytes_
    assert (row.loaded, row.stored) == (turned.loaded + bytes_, turned.stored + bytes_)
    assert row.peak == turned.peak - bytes_ + row.window - turned.window
    assert row.exposed == pytest.approx(3 * bytes_ / 50e9 - forecast.compute / 3)
    assert row.exposed > turned.exposed
    assert 'gradients="host"' in row.code and "gradients too" not in [o.name for o in jo.plan(ADAMW, STACKED).options]


def test_the_smallest_fraction_that_fits():
    """Eight leaves of 64 MiB: parameters and gradients 1024, state 1024. 1536 leave room for 512 and the window."""
    params = {f"w{i}": jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for i in range(8)}
    forecast = jo.plan(ADAMW, params, device_memory="1.5GiB")
    assert forecast["resident"].fits is False
    found = forecast["fraction"]
    assert forecast.recommended is found and found.fits
    assert found.peak <= 1536 * MIB < found.peak + MIB  # one more leaf would not stay, and the window has the rest
    code = found.code.split("; ")[0].removeprefix("tx = ")
    placed = jo.placement(eval(code, {"jo": jo, "inner": ADAMW}), params)
    assert placed.host_bytes == found.host
    by_default = jo.plan(jo.offload(ADAMW, fraction=0.63), params)["as given"]
    assert (by_default.host, "window=" in code) == (found.host, True) and by_default.window < found.window
    assert "leaves activations no room" in " ".join(str(forecast).split())
    # a card's own memory is not used up, and a window that was given stays
    assert (
        "window="
        not in jo.plan(ADAMW, params, chip=dataclasses.replace(jo.chip("h100"), hbm_bytes=1536 * MIB))["fraction"].code
    )
    given = jo.plan(jo.offload(ADAMW, window=64 * MIB), params, device_memory="1.5GiB")["fraction"]
    assert given.window <= 64 * MIB and given.code.count("window=") == 1 and "window=67108864" in given.code


def test_what_is_given_may_be_small_enough_to_stay():
    """In 8 bits 792 MiB of state beside 3072 of parameters and gradients: nothing is called a fraction that is none."""
    given = jo.offload(ADAMW, storage={"mu": "int8", "nu": "uint8"})
    forecast = jo.plan(given, STACKED, chip="h100", device_memory="4GiB")
    assert forecast.recommended is forecast["resident as given"] and forecast.recommended.host == 0
    assert "fraction=0)" in forecast.recommended.code and "fraction" not in [o.name for o in forecast.options]
    assert "nothing has to be offloaded" in " ".join(str(forecast).split())


def test_the_largest_window_where_nothing_else_fits():
    """1536 + 1536 and a window of 256 are too much for 3200 MiB; 128 is not."""
    forecast = jo.plan(ADAMW, STACKED, device_memory=3201 * MIB)
    assert forecast["offload"].fits is False
    assert forecast["window"].window == 128 * MIB and forecast["window"].fits
    assert "window=134217728" in forecast["window"].code


def test_an_impossible_budget_says_what_is_missing():
    forecast = jo.plan(ADAMW, STACKED, device_memory="3GB")
    assert forecast.recommended is None
    assert forecast.missing == min(option.peak for option in forecast.options) - 3 * 10**9
    assert "short of" in repr(forecast) and "nothing fits" in forecast.summary()


def test_where_nothing_fits_what_saves_memory_would_change_it():
    """Parameters and gradients 3072 MiB, a window of 256 on two thirds of that: two devices that divide them. No way
    that is slower or faster is offered, and no accumulation."""
    forecast = jo.plan(ADAMW, STACKED, chip="h100", tokens_per_step=512, device_memory="2GiB")
    assert forecast.recommended is None and forecast["offload"].overhead > 0
    assert forecast.changes == (
        "2 times as many devices, which divide parameters, gradients and state (FSDP): on each 1.50 GiB of them "
        "instead of 3.00 GiB",
    )


def test_what_would_change_it_says_what_it_costs(monkeypatch):
    """Where nothing is added, less host memory at no cost comes first. The sum of micro-batches needs room."""
    gib = HostMemory(2 * GIB, None, POOL_DEFAULT)
    monkeypatch.setattr(planning, "host_memory", lambda: gib)
    hidden = jo.plan(ADAMW, STACKED, chip="h100", tokens_per_step=16384, device_memory="5GiB")
    assert hidden.recommended.overhead == 0 and hidden.changes[0].startswith("int8: ")
    (disk,) = [change for change in hidden.changes if change.startswith("on disk: ")]
    assert disk == hidden.changes[-1] and ", and adds +" in disk and "instead of 0" in disk
    for memory, offered in ("5GiB", True), ("3.5GiB", False):
        few = jo.plan(ADAMW, STACKED, chip="h100", tokens_per_step=512, device_memory=memory)
        assert any("accumulating" in change for change in few.changes) is offered, memory


def test_resident_is_recommended_where_it_fits():
    assert jo.plan(ADAMW, STACKED, chip="h200").recommended.name == "resident"


def test_on_a_mesh_bytes_are_per_device_and_the_state_can_be_divided():
    mesh = AbstractMesh((8, 2), ("data", "model"))
    sharding = NamedSharding(mesh, P(None, None, "model"))
    params = {"w": jax.ShapeDtypeStruct((24, 4096, 4096), jnp.float32, sharding=sharding)}
    forecast = jo.plan(ADAMW, params, mesh=mesh, chip="h100", tokens_per_step=2**20)
    assert forecast.devices == (16, 8)
    assert forecast["offload"].parameters == 768 * MIB and forecast["offload"].host == 1536 * MIB
    assert forecast["ZeRO-1"].host == forecast["ZeRO-1"].loaded == 192 * MIB
    assert "shard_over='data'" in forecast["ZeRO-1"].code
    assert forecast.per_host(forecast["ZeRO-1"]) == 8 * 192 * MIB
    assert forecast.compute == pytest.approx(2**20 * 6 * 24 * 4096**2 / 16 / 320e12)


def test_a_tpu_multiplies_float32_as_bfloat16_unless_asked_for_more():
    """Both take the time of bfloat16; a GPU multiplies float32 by its own speed."""
    n, chip = 24 * 4096**2, jo.chip("v5e")

    def compute(name, precision=None):
        with jax.default_matmul_precision(precision):
            return jo.plan(ADAMW, STACKED, chip=name, tokens_per_step=4096).compute

    assert compute("v5e") == compute("v5e", "bfloat16") == pytest.approx(6 * n * 4096 / chip.reached.bf16)
    assert compute("v5e", "highest") == pytest.approx(6 * n * 4096 / chip.reached.f32)
    assert compute("h100") == pytest.approx(6 * n * 4096 / jo.chip("h100").reached.f32)


def test_a_number_is_no_parameter():
    with pytest.raises(TypeError, match=r"params: plan takes arrays.*\['w'\] is 3.0, a float. Give jnp.asarray"):
        jo.plan(ADAMW, {"w": 3.0})


def test_what_is_given_already():
    given = jo.offload(ADAMW, select="w", storage="bfloat16")
    assert [option.name for option in jo.plan(given, STACKED).options] == ["resident", "as given", "on the cores"]
    chained = optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW))
    forecast = jo.plan(chained, STACKED)
    assert [option.name for option in forecast.options] == ["as given"]
    assert forecast["as given"].host == 3072 * MIB and "jo.offload(chain)" in repr(forecast)
    assert [option.name for option in jo.plan(jo.offload(ADAMW), STACKED).options][:2] == ["resident", "offload"]


def test_parameters_of_which_some_are_on_a_mesh():
    on = NamedSharding(AbstractMesh((8,), ("data",)), P())
    params = STACKED | {"b": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=on)}
    with pytest.raises(ValueError, match=r"params: \['b'\] is on the mesh {'data': 8}, and \['w'\] is on none"):
        jo.plan(ADAMW, params)
    with pytest.raises(TypeError, match=r"mesh: expected a jax.sharding.Mesh or an AbstractMesh; got 'data'"):
        jo.plan(ADAMW, params, mesh="data")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"chip": "h900"}, "'h900' is not known. Known: a100"),
        ({"tokens_per_step": 0}, "tokens_per_step: expected a number > 0; got 0"),
        ({"flops_per_token": -1.0}, "flops_per_token"),
        ({"device_memory": "80 apples"}, "device_memory: expected a number of bytes"),
        ({"device_memory": 80}, 'device_memory: got 80, which is 80 bytes, not even 1 MiB. Say "80GiB"'),
        ({"mesh": AbstractMesh((8,), ("data",))}, r"\['w'\] is not on the mesh {'data': 8}"),
    ],
)
def test_bad_input(kwargs, words):
    with pytest.raises(ValueError, match=words):
        jo.plan(ADAMW, STACKED, **kwargs)


def test_the_state_in_place_of_the_parameters():
    with pytest.raises(ValueError, match="there is an optimizer's state"):
        jo.plan(ADAMW, jax.eval_shape(ADAMW.init, STACKED))
    with pytest.raises(TypeError, match="plan"):
        jo.plan(STACKED, ADAMW)
    with pytest.raises(TypeError, match="plan: device_mem: a step's keyword arguments go to plan"):
        jo.plan(ADAMW, STACKED, device_mem="80GiB")


def test_it_prints():
    forecast = jo.plan(CLIPPED, STACKED, chip="h100", tokens_per_step=65536, device_memory="5GiB")
    lines = repr(forecast).splitlines()
    assert max(map(len, lines)) <= 80
    assert "exact: parameters" in repr(forecast) and "estimated: hidden" in repr(forecast)
    assert forecast._repr_html_().startswith("<table>") and "jo.pipelined" in forecast._repr_html_()
    found = json.loads(json.dumps(forecast.to_dict()))
    assert found["recommended"] == forecast.recommended.name
    assert found["host"]["per_host_bytes"]["offload"] == 3072 * MIB


def test_bytes_as_people_write_them():
    assert [bytes_of("x", text) for text in ("80GiB", "16e9", "1.5 kb", 3)] == [80 * GIB, 16 * 10**9, 1500, 3]
    assert [in_bytes(n) for n in (0, 999, 1536, 80 * GIB)] == ["0 B", "999 B", "1.50 KiB", "80.0 GiB"]


def test_seconds_as_people_read_them():
    said = [in_seconds(t) for t in (0, 3.24e-9, 1e-6, 0.00004567, 0.0019, 0.0999, 0.12345, 12.345)]
    assert said == ["0", "0.0032 µs", "1.0 µs", "45.7 µs", "1.9 ms", "99.9 ms", "123 ms", "12.35 s"]


def test_a_link_that_loads_at_another_speed_than_it_stores():
    """What is left of one direction goes at the speed of that one alone."""
    link = jo.types.Link(load=10.0, store=20.0, both=5.0)
    assert link.seconds(30, 10) == 10 / 5 + 20 / 10
    assert link.seconds(10, 50) == 10 / 5 + 40 / 20
    assert link.one_after_the_other(30, 10) == 30 / 10 + 10 / 20


def test_host_memory_is_that_of_all_devices_of_a_host(monkeypatch):
    """3 GiB of state over 8 of 16 devices: 1.5 GiB of each of two, and 12 GiB of a host."""
    there = NamedSharding(AbstractMesh((8, 2), ("data", "model")), P(None, None, "model"))
    params = {"w": jax.ShapeDtypeStruct((24, 4096, 4096), jnp.float32, sharding=there)}

    def why_not(gib):
        monkeypatch.setattr(planning, "host_memory", lambda: HostMemory(gib * GIB, None, POOL_DEFAULT))
        return jo.plan(ADAMW, params)["offload"].why_not

    assert "the host has 11.0 GiB available, and the state takes 12.0" in why_not(11) and not why_not(13)


@pytest.mark.parametrize(
    ("gib", "said"),
    [(3, "24.0 GiB, by its figures: it suffices"), (2, "16.0 GiB, by its figures: it is 8.00 GiB short")],
)
def test_whether_the_chip_s_host_suffices(gib, said, tmp_path):
    """3 GiB of state on each of eight: 24 of a host, by the figures of the chip; this host is another."""
    path = tmp_path / "mine.toml"
    path.write_text(f'like = "h100"\ndram_bytes = {gib * GIB}\n')
    there = NamedSharding(AbstractMesh((8,), ("data",)), P("data"))
    params = {"w": jax.ShapeDtypeStruct((192, 4096, 4096), jnp.float32, sharding=there)}
    forecast = jo.plan(ADAMW, params, chip=path)
    assert f"a host of 8 mine has {said}" in table._host(forecast, forecast["offload"]) and forecast["offload"].fits
    assert forecast.to_dict()["chip_host"] == gib * GIB


def test_the_host_s_memory_is_measured_and_counts(monkeypatch):
    monkeypatch.setattr(memory_of_the_host, "ARRAY", 2**22)
    mine = dataclasses.replace(jo.chip("h100"), dram_bandwidth=jo.measure_link().dram)
    row = jo.plan(ADAMW, STACKED, chip=mine)["on the cores"]
    assert 1e8 < row.dram / row.cores == mine.dram_bandwidth < 1e13

    def no_cpu(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_cpu)
    assert memory_of_the_host.dram_bandwidth() is None


def test_the_link_of_what_is_no_device():
    with pytest.raises(TypeError, match=r"device: expected a jax.Device, of jax.local_devices.*got 'foo'"):
        jo.measure_link("foo")


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    2097152 kB\n"}


def test_the_cgroup_of_version_2(tmp_path):
    """The least of all groups on the way up; files that can be given back do not count as used."""
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{GIB // 2}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
    }
    found = host_memory(tree(tmp_path, MEMINFO | files))
    assert (found.available, found.cgroup, found.usable) == (2 * GIB, 3 * GIB // 4, 3 * GIB // 4)
    assert "cgroup leaves 0.8 GiB" in found.why_not(GIB) and not found.why_not(GIB // 2)


def test_the_cgroup_of_version_1(tmp_path):
    """In a container the group's own path is not there."""
    files = {
        "proc/self/cgroup": "5:cpu,memory:/docker/123\n2:pids:/docker/123\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
    }
    assert host_memory(tree(tmp_path, MEMINFO | files)).cgroup == GIB
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_memory(tmp_path).cgroup is None


def test_the_pinned_pool(monkeypatch, tmp_path):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    found = host_memory(tmp_path)
    assert found == HostMemory(None, None, POOL_DEFAULT)
    assert found.pool_advice(40 * GIB, "cuda") == "" and found.pool_advice(100 * GIB, "tpu") == ""
    assert found.pool_advice(50 * GIB, "cuda") == "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=69"  # 46.8 of 64 could be used
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    assert host_memory(tmp_path).pool == 200 * GIB
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "much")
    with pytest.raises(ValueError, match="expected a number of GiB"):
        host_memory(tmp_path)


def test_a_model_of_70e9_unrolled():
    """1,445 state leaves: one way is traced, in seconds; the others follow by their bytes, which are exact."""
    width, layers = 8192, 80
    shapes = {"qo": (width, 2 * width), "kv": (width, 2048), "up": (width, 57344), "down": (28672, width)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params = {f"layer_{i}": dict(layer) for i in range(layers)}
    n = layers * sum(a * b for a, b in shapes.values())
    forecast = jo.plan(ADAMW, params, chip="h200")
    assert forecast["offload"].host == forecast["offload"].loaded == 8 * n
    assert forecast["bfloat16"].host == forecast["bfloat16"].loaded == 4 * n
    assert "641 leaves" in repr(forecast)


@pytest.fixture(params=[True, False], ids=["loops", "passes"])
def numba(request, monkeypatch):
    monkeypatch.setattr(on_cores, "has_numba", lambda: request.param)
    return request.param


def test_the_cores_by_hand(numba):
    """Of AdamW in float32, per parameter: 8 bytes down and 4 up; through the host's memory 28 in one pass, or 40 in
    XLA's passes, 12 that cross, 24 of copies of what these make (docs/host_or_device.md)."""
    dram = 40 if numba else 76
    forecast, n = jo.plan(ADAMW, STACKED, chip="h100", tokens_per_step=16384), 24 * 4096**2
    row = forecast["on the cores"]
    assert (row.stored, row.loaded, row.dram) == (8 * n, 4 * n, dram * n)
    assert (row.window, row.state, row.host) == (0, 4, 12 * n)  # gradients land there too
    assert row.cores == pytest.approx(dram * n / 76.8e9)
    # loops cannot write a TPU's pinned memory: all of the new state is written, read and written again
    assert jo.plan(ADAMW, STACKED, chip="v5e")["on the cores"].dram == (64 if numba else 76) * n
    # in a loop a layer after the other comes up beside the next one's update; else all of them after it. The first
    # gradients are hidden behind the backward pass
    assert row.exposed == pytest.approx(dram * n / 76.8e9 + 4 * n / (24 if numba else 1) / 55e9)
    assert row.hidden_from is None and "update_on='host'" in row.code
    masters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), STACKED)
    row = jo.plan(jo.with_master_params(ADAMW), masters)["on the cores"]
    assert (row.loaded, row.stored) == (2 * n, 4 * n) and row.cores is row.overhead is None


def test_a_group_is_one_pass_where_all_of_it_is(monkeypatch):
    """LAMB's norms are no loop. A leaf with 128 MiB of moments is a group of its own."""
    n = 4096**2
    params = {name: jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for name in "ab"}
    tx = optax.partition({"adam": optax.adamw(1e-3), "lamb": optax.lamb(1e-3)}, {"a": "adam", "b": "lamb"})
    found = {}
    for numba in True, False:
        monkeypatch.setattr(on_cores, "has_numba", lambda numba=numba: numba)
        found[numba] = [jo.plan(x, params)["on the cores"].dram for x in (optax.lamb(1e-3), tx)]
    assert found[False] == [2 * 76 * n] * 2 and found[True] == [2 * 76 * n, (40 + 76) * n]


def test_the_cores_are_recommended_where_they_pay(tmp_path):
    """Clipped, and behind a slow link: half of what the device's update moves hides behind the backward pass."""
    masters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), STACKED)
    clipped = jo.with_master_params(CLIPPED)

    def named(dram, tokens=65536, tx=clipped, memory="3GiB"):
        path = tmp_path / "mine.toml"
        path.write_text(f'like = "h100"\nhost_link = 2e9\ndram_bandwidth = {dram}\n')
        return jo.plan(tx, masters, chip=path, tokens_per_step=tokens, device_memory=memory).recommended

    assert named(4e12).name == "on the cores"
    assert named(5e9).name != "on the cores"
    assert named(4e12, tokens=None).name != "on the cores"
    assert named(4e12, memory="80GiB").name == "resident"
    assert jo.plan(jo.offload(clipped, update_on="host"), masters).recommended.name == "on the device"


def test_the_share_with_which_both_end_together():
    """20 leaves, clipped, so that nothing hides what the device streams. For n parameters the link takes 8 n / 50 GB/s,
    the cores 40 n / 76.8 GB/s: a quarter of them in as much time, when gradients and parameters share the link."""
    params = {f"w{i:02}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for i in range(20)}
    forecast = jo.plan(CLIPPED, params, chip="h100", tokens_per_step=16384)
    both, device, cores = forecast["on both"], forecast["offload"], forecast["on the cores"]
    share = float(both.code.split("update_on=")[1].split(")")[0])
    assert both.exposed < 0.98 * min(device.exposed, cores.exposed)
    assert both.dram == pytest.approx(share * cores.dram) and share == 0.25
    given = {s: jo.plan(jo.offload(CLIPPED, update_on=s), params, chip="h100", tokens_per_step=16384)["as given"]
             for s in (0.2, 0.25, 0.3)}  # fmt: skip
    assert given[0.25].exposed == both.exposed == min(row.exposed for row in given.values())
    assert "on both: the cores take 25%" in repr(forecast)
    # behind the backward pass the device's link takes nothing, and the cores would only add; nor without rates
    hidden = jo.plan(ADAMW, params, chip="h100", tokens_per_step=65536)
    assert hidden["offload"].exposed == 0
    for one in hidden, jo.plan(CLIPPED, params):
        assert "on both" not in [option.name for option in one.options]


def test_what_is_updated_on_the_cores_already(numba):
    """Half of eight layers: 4 stream, 4 stay; what else is compared is on the device."""
    params = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(8)}
    forecast, n = jo.plan(jo.offload(ADAMW, update_on=0.5), params, chip="h100"), 4 * 1024**2
    row = forecast["as given"]
    assert (row.dram, row.loaded, row.stored) == ((40 if numba else 76) * n, (8 + 4) * n, (8 + 8) * n)
    assert forecast["on the device"].dram == 0 and "on the cores" not in [o.name for o in forecast.options]


@pytest.mark.parametrize(
    ("spec", "options", "down", "up", "state"),
    [(P("data"), {}, (4, 4), 2, 4), (P(), {"shard_over": "data"}, (6, 8), 2, 4), (P(), {}, (8, 8), 4, 8)],
    ids=["FSDP", "ZeRO-1", "replicated"],
)  # fmt: skip
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_the_cores_of_several_accelerators(spec, options, down, up, state, axes, numba):
    """Two of a host, bytes for each and parameter: its part goes down, is updated once for both, and comes up. What is
    no loop is put together before and divided after. With Explicit axes ZeRO-1's gradients go down whole."""
    there = NamedSharding(AbstractMesh((2,), ("data",), axis_types=(axes,)), spec)
    params = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=there) for i in range(8)}
    tx, n = jo.offload(ADAMW, update_on="host", **options), 8 * 1024**2
    row = jo.plan(tx, params, chip="h100")["as given"]
    down = down[axes == AxisType.Explicit]
    assert (row.loaded, row.stored) == (up * n, down * n) and row.fits
    once, put_together = (14, 0) if numba else (20, 0 if state == 8 else 28)
    assert row.dram == (once + put_together + down + up + (0 if numba else 3 * state)) * n


def test_leaves_that_are_taken_whole_are_those_of_one_host(numba):
    there = NamedSharding(AbstractMesh((16,), ("data",)), P("data"))  # eight on a host
    params = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=there) for i in range(8)}
    for inner, fits in (ADAMW, numba), (optax.lamb(1e-3), False):
        row = jo.plan(jo.offload(inner, update_on="host"), params, chip="h100")["as given"]
        assert row.fits is fits and ("takes leaves whole, on one host alone" in row.why_not) is not fits
