"""``jo.plan``, ``inspect`` and ``verify`` with a state on disk: bytes tier by tier, time, wear, by hand."""

import dataclasses
import json
import threading
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from click.testing import CliRunner
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._analysis import on_disk as model_of_files
from jax_offload._analysis import plan as planning
from jax_offload._analysis.commands import commands
from jax_offload._analysis.drives import known_drives
from jax_offload._analysis.host import HostMemory
from jax_offload._analysis.on_disk import AHEAD, BEHIND, HELD, files_in
from jax_offload._analysis.programs import ONE, Programs
from jax_offload._base.memory import is_host_aval
from jax_offload._drive import stages
from jax_offload._emit.find import updates_in
from jax_offload._files.files import Disk
from jax_offload._files.under_way import UnderWay
from jax_offload._plan import by_rows

MIB, DAY = 2**20, 86_400
ADAMW = optax.adamw(1e-3)
# Eight parameters of 64 MiB, each with 128 of moments: a group of its own.
EIGHT = {f"w{k}": jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for k in range(8)}
GROUP, N = 128 * MIB, 8 * 4096**2
MINE = jo.types.Drive("mine", read=4e9, write=2e9, capacity=1e12, writes_per_day=1)


@pytest.fixture(autouse=True)
def a_group_each(monkeypatch):
    monkeypatch.setattr(by_rows, "PART_BYTES", GROUP)


def on_disk(*directories, host_bytes=2 * GROUP, inner=ADAMW, depth=2, commit_every=1, **options):
    files = jo.disk(*directories or ("/somewhere",), host_bytes=host_bytes, depth=depth, commit_every=commit_every)
    return jo.offload(inner, disk=files, **options)


@pytest.mark.parametrize("name", known_drives())
def test_every_figure_of_a_drive_has_a_source(name):
    drive = jo.drive(name)
    figures = {f.name for f in dataclasses.fields(jo.types.Drive)} - {"name", "sources"}
    assert set(drive.sources) == figures | {"sheet"} and drive.sources["sheet"].startswith("https://")
    assert 1e9 < drive.write <= drive.read < 2e10 and 1e11 < drive.capacity < 1e14 and drive.writes_per_day < 10


def test_a_pass_in_several_programs():
    """Of two groups of the cores, 2 s each, one begins after a quarter of 8 s, one at the end; or after two of 2 s.
    Files of a second each way: beside the first program five are read, and the last three of the step before written;
    when four are through four more are, and the last three read."""
    cut = Programs((0.25, 0.25, 0.5), ((0, 1), (2, 1)))
    assert [cut.beside(4.0, compute) for compute in (8.0, 2.0)] == [2.0, 1.5]
    assert [Programs(groups=((0, 1), (0, 1))).beside(4.0, 8.0), ONE.beside(4.0, 8.0)] == [0, 0]
    files = model_of_files.Files((model_of_files.Group(1, 1, 1, 1, 1),) * 8)
    slow = jo.types.Drive("slow", read=1, write=1, capacity=99, writes_per_day=1)
    third = Programs((0.25, 0.25, 0.5), ((1, 1),) * 4 + ((2, 1),) * 4)
    hidden = [[files.hidden(slow, 1, compute, each) for each in (ONE, third)] for compute in (40.0, 4.0)]
    assert hidden == [[8, 15], [4, 4]]
    assert files.hidden(slow, 1, 40.0, cut) == 8  # of other groups: nothing is known of these


def test_drives_of_a_users_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "pm9a3"\nwrite = 1e9\n')
    drive = jo.drive(path)
    assert (drive.name, drive.write, drive.read, drive.sources["read"]) == ("mine", 1e9, 6.5e9, "as pm9a3")
    assert jo.drive("PM9A3") is jo.drive("pm9a3") and jo.drive(drive) is drive
    assert MINE.seconds(read=8e9, written=1e9) == 2.5 and MINE.per_day == 1e12
    for text, says in (
        ("read = 1e9", "lacks write, capacity, writes_per_day"),
        ('like = "pm9a3"\nspeed = 1', "has speed; a drive has read"),
        ('like = "pm9a3"\nread = 0', "read in .* is 0; expected a number above 0"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            jo.drive(path)
    for wrong, error in (("ssd", ValueError), (tmp_path / "none.toml", ValueError), (3, TypeError)):
        with pytest.raises(error, match=r"drive: .*Known"):
            jo.plan(ADAMW, EIGHT, drive=wrong)


def test_bytes_tier_by_tier():
    """Two parameters' state stays in host memory, six are read and written; six groups are under way."""
    forecast = jo.plan(on_disk(), EIGHT)
    row, memory = forecast["as given"], forecast["in host memory"]
    assert (AHEAD, HELD, BEHIND) == (5, 6, 3)
    assert (row.disk, row.read, row.written) == (6 * GROUP,) * 3
    assert (row.buffers, row.host) == (6 * GROUP, (2 + 6) * GROUP)
    assert (row.window, row.state, row.peak) == (GROUP, 4, 2 * 4 * N + GROUP + 4)
    assert (row.loaded, row.stored) == (8 * GROUP,) * 2  # all of it goes up and comes down
    assert (memory.disk, memory.buffers, memory.io, memory.per_day, memory.host) == (0, 0, None, None, 8 * GROUP)
    assert not {"on the cores", "pipelined", "ZeRO-1"} & {option.name for option in forecast.options}
    assert row.code.startswith("tx = jo.offload(inner, disk=jo.disk('/somewhere', host_bytes=268435456))")


def test_what_is_clipped_is_not_pipelined_on_disk():
    names = [o.name for o in jo.plan(on_disk(inner=optax.chain(optax.clip_by_global_norm(1.0), ADAMW)), EIGHT).options]
    assert names == ["resident", "as given", "in host memory", "bfloat16", "int8"]


def test_time_where_the_drive_takes_longer():
    """At 4 and 2 GB/s 0.2 and 0.4 s; 16,384 tokens take 41 ms, which all hide some of it."""
    forecast = jo.plan(on_disk(), EIGHT, chip="h100", tokens_per_step=16384, drive=MINE)
    row, compute = forecast["as given"], 16384 * 6 * N / 320e12
    io = 6 * GROUP / 4e9 + 6 * GROUP / 2e9
    assert row.io == pytest.approx(io) and io > 0.6
    assert row.exposed == pytest.approx(io - compute) and row.overhead == pytest.approx((io - compute) / compute)
    assert row.hidden == pytest.approx(compute / io)
    assert row.per_day == pytest.approx(6 * GROUP * DAY / io)  # the step takes as long as its files
    assert row.link_serial == pytest.approx(16 * GROUP / 55e9)
    assert forecast["int8"].io < row.io / 3 and forecast["int8"].overhead < row.overhead


def test_time_where_the_arithmetic_takes_longer():
    """Five groups are read while gradients are made; of those written last three, two have nothing on disk."""
    forecast = jo.plan(on_disk(), EIGHT, chip="h100", tokens_per_step=10**6, drive=MINE)
    row, compute = forecast["as given"], 10**6 * 6 * N / 320e12
    hidden = 5 * GROUP / 4e9 + GROUP / 2e9
    assert compute > 2 and row.exposed == pytest.approx(6 * GROUP / 4e9 + 6 * GROUP / 2e9 - hidden)
    assert row.per_day == pytest.approx(6 * GROUP * DAY / (compute + row.exposed))


def test_behind_the_gradients_are_so_many_groups_and_no_more():
    """Of sixteen groups five are read, and three written."""
    sixteen = {f"w{k:02}": x for k, x in enumerate([EIGHT["w0"]] * 16)}
    row = jo.plan(on_disk(host_bytes=0), sixteen, chip="h100", tokens_per_step=10**6, drive=MINE)["as given"]
    assert row.buffers == row.host == HELD * GROUP
    assert row.exposed == pytest.approx((16 - AHEAD) * GROUP / 4e9 + (16 - BEHIND) * GROUP / 2e9)


def test_a_deeper_disk_hides_more_and_takes_more():
    """Nine groups are read behind the gradients, and five written; behind each of four programs, if that takes long."""
    sixteen = {f"w{k:02}": x for k, x in enumerate([EIGHT["w0"]] * 16)}
    given = {"chip": "h100", "tokens_per_step": 10**6, "drive": MINE}
    row = jo.plan(on_disk(host_bytes=0, depth=4), sixteen, **given)["as given"]
    assert row.buffers == row.host == 10 * GROUP and "depth=4" in row.code
    assert row.exposed == pytest.approx((16 - 9) * GROUP / 4e9 + (16 - 5) * GROUP / 2e9)
    slow, groups = (
        jo.types.Drive("slow", read=1, write=1, capacity=99, writes_per_day=1),
        (model_of_files.Group(1, 1, 1, 1, 1),),
    )
    four = Programs((0.25,) * 4, tuple((k // 8, 1) for k in range(32)))
    hidden = [model_of_files.Files(groups * 32, depth=d).hidden(slow, 1, 1000.0, four) for d in (2, 4)]
    assert hidden[0] < hidden[1]


def test_commits_where_the_disk_says_how_often():
    """Parameters and what of the state is not on disk, written each tenth step, in its time and in what wears the
    drive; else they are told, and in no figure."""
    given = {"chip": "h100", "tokens_per_step": 16384, "drive": MINE}
    forecast, without = (jo.plan(on_disk(commit_every=n), EIGHT, **given) for n in (10, 1))
    row, plain, compute = forecast["as given"], without["as given"], forecast.compute
    commit = 4 * N + 2 * GROUP + 4
    assert row.commit == plain.commit == commit and plain.commits_per_day is None
    assert (row.io, row.hidden) == (plain.io, plain.hidden)
    assert row.exposed == pytest.approx(plain.exposed + commit / 2e9 / 10)
    assert row.commits_per_day == pytest.approx(DAY / 10 / (compute + row.exposed))
    assert row.per_day == pytest.approx((6 * GROUP + commit / 10) * DAY / (compute + row.exposed))
    said, plainly = (" ".join(str(each).split()) for each in (forecast, without))
    assert "a commit writes 768 MiB more" in said and "one in 10 steps," in said and "commit_every=10" in row.code
    assert "in none of these figures, as jo.disk(..., commit_every=n) does not say when; the files take" in plainly


def test_a_drive_that_is_faster_than_the_link():
    fast = dataclasses.replace(MINE, read=1e13, write=1e13)
    row = jo.plan(on_disk(), EIGHT, chip="h100", tokens_per_step=10**6, drive=fast)["as given"]
    assert row.exposed == row.link_serial and row.hidden == 0


def test_several_drives_share_it():
    one, two = (jo.plan(on_disk(*d), EIGHT, chip="h100", tokens_per_step=16384, drive=MINE) for d in ("a", "ab"))
    assert two.drives == 2 and two["as given"].io == pytest.approx(one["as given"].io / 2)
    assert two["as given"].exposed == pytest.approx(two["as given"].io - two.compute)
    assert two["as given"].per_day == pytest.approx(one["as given"].per_day)  # half of it, twice as often


def test_without_a_chip_the_time_of_the_files_is_known():
    row = jo.plan(on_disk(), EIGHT, drive=MINE)["as given"]
    assert row.io and row.exposed is row.overhead is row.link is None
    assert row.per_day == pytest.approx(6 * GROUP * DAY / row.io)
    assert "at most 105 TiB a day" in str(jo.plan(on_disk(), EIGHT, drive=MINE)).replace("\n  ", " ")


def test_wear_is_told_and_warned_of():
    """0.768 GiB in a step of 0.604 s: 115 TB a day on a drive that is rated for 1."""
    said = str(jo.plan(on_disk(), EIGHT, chip="h100", tokens_per_step=16384, drive=MINE)).replace("\n  ", " ")
    times = 6 * GROUP * DAY / (6 * GROUP / 4e9 + 6 * GROUP / 2e9) / 1e12
    assert round(times, 1) == 115.2
    assert f"warning: as given: 768 MiB written in a step, 105 TiB a day on the drive, {times:.1f} times the" in said
    assert f"five years' worth in {5 * 365 / times:.0f} days" in said
    strong = dataclasses.replace(MINE, writes_per_day=200)
    said = str(jo.plan(on_disk(), EIGHT, chip="h100", tokens_per_step=16384, drive=strong)).replace("\n  ", " ")
    assert "warning" not in said and "105 TiB a day on the drive, of 182 TiB that it is rated for" in said


def test_the_tiers_are_one_table():
    forecast = jo.plan(on_disk(), EIGHT, chip="h100", tokens_per_step=16384, drive=MINE)
    lines = str(forecast).splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("as given") and "under way" in line)
    device, host, disk = (lines[at + k].split() for k in (2, 3, 4))
    assert device == ["device", "1.00", "GiB", "128", "MiB", "arithmetic", "41.2", "ms"]
    assert host == ["host", "256", "MiB", "768", "MiB", "1.00", "GiB", "each", "way", "39.0", "ms"]
    assert disk == ["disk", "2", "x", "768", "MiB", "–", "768", "MiB", "each", "way", "604", "ms"]
    assert forecast._repr_html_().count("<table>") == 2 and "disk" in lines[0]
    assert "under way" not in str(jo.plan(ADAMW, EIGHT)) and " disk" not in str(jo.plan(ADAMW, EIGHT)).splitlines()[0]
    found = json.loads(json.dumps(forecast.to_dict()))
    assert found["drive"]["write"] == 2e9 and found["drives"] == 1 and found["options"][1]["disk"] == 6 * GROUP


def test_a_drive_that_is_too_small():
    small = dataclasses.replace(MINE, capacity=1e9)
    row = jo.plan(on_disk(), EIGHT, drive=small)["as given"]
    assert "the files take 3.00 GiB, and there is room for 954 MiB" in row.why_not  # a commit's in two slots too


@pytest.mark.parametrize(("spec", "shard_over", "shards"), [(P("data"), None, 2), (P(), "data", 2), (P(), None, 1)])
def test_devices_of_a_host_share_its_drives(spec, shard_over, shards):
    """Two devices have half of the state each, or all of it, and the files have it once."""
    there = NamedSharding(AbstractMesh((2,), ("data",)), spec)
    params = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for k, x in EIGHT.items()}
    tx = on_disk(host_bytes=0, shard_over=shard_over)
    row = jo.plan(tx, params, chip="h100", drive=MINE, tokens_per_step=10**6)["as given"]
    assert row.fits is not False and not row.why_not
    assert (row.disk, row.read, row.written, row.buffers) == (*(8 * GROUP // shards,) * 3, HELD * GROUP // shards)
    assert row.io == pytest.approx(8 * GROUP / 4e9 + 8 * GROUP / 2e9)
    compute = 10**6 * 6 * N / 2 / 320e12
    waits = (8 - AHEAD) * GROUP / 4e9 + (8 - BEHIND) * GROUP / 2e9
    assert compute > AHEAD * GROUP / 4e9 + BEHIND * GROUP / 2e9 and row.exposed == pytest.approx(waits)
    assert row.per_day == pytest.approx(8 * GROUP * DAY / (compute + waits))
    small = dataclasses.replace(MINE, capacity=16 * GROUP - 1)
    assert "the files take 3.00 GiB" in jo.plan(tx, params, drive=small)["as given"].why_not


def with_host_memory(monkeypatch, available):
    monkeypatch.setattr(planning, "host_memory", lambda: HostMemory(available, None, 64 * 2**30))


def test_files_are_advised_where_host_memory_is_short(monkeypatch):
    """1 GiB of state. Of 900 MiB, less what fragments and six groups, nothing is left for it."""
    with_host_memory(monkeypatch, 900 * MIB)
    forecast = jo.plan(ADAMW, EIGHT)
    row = forecast["on disk"]
    assert (row.disk, row.host) == (8 * GROUP, 6 * GROUP) and "host_bytes=0" in row.code
    assert f"where this is the host, 1.00 GiB of the state on disk, {row.io * 1e3:.0f} ms of reading" in str(
        forecast.notes
    )
    assert forecast.recommended.name == "offload"  # another host may have the memory: said, not decided
    with_host_memory(monkeypatch, 2000 * MIB)
    assert "on disk" not in [option.name for option in jo.plan(ADAMW, EIGHT).options]


def test_what_host_memory_is_left_stays_in_use(monkeypatch):
    """24 GiB of state; of 20 a third is for what fragments, and 0.75 GiB for six groups: 13 whole ones are left."""
    with_host_memory(monkeypatch, 20 * 2**30)
    row = jo.plan(ADAMW, {f"w{k}": EIGHT["w0"] for k in range(192)})["on disk"]
    assert "host_bytes=13958643712" in row.code and 13958643712 == 13 * 2**30
    assert row.host == 13 * 2**30 + 6 * GROUP and row.disk == 11 * 2**30


STACKED = {"w": jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32)}
MIXED = optax.chain(optax.stateless(lambda g, _: jax.tree.map(lambda x: x - x.mean(0), g)), optax.trace(0.9))


def test_a_stacked_leaf_goes_by_its_layers(monkeypatch):
    """Eight layers of 128 MiB are eight groups, as eight parameters are."""
    with_host_memory(monkeypatch, 900 * MIB)
    for params in STACKED, EIGHT:
        row = jo.plan(ADAMW, params)["on disk"]
        assert (row.disk, row.buffers, row.window) == (8 * GROUP, 6 * GROUP, GROUP)
    row = jo.plan(on_disk(host_bytes=0, window=32 * MIB), STACKED)["as given"]
    assert (row.buffers, row.window) == (6 * GROUP, 32 * MIB)


@pytest.mark.parametrize("part", [64 * MIB, GROUP])
def test_a_stacked_leaf_is_as_it_runs(part, tmp_path, monkeypatch):
    """The groups of `plan` are those of the driver; of which each part of the files is one."""
    monkeypatch.setattr(by_rows, "PART_BYTES", part // 2**10)
    monkeypatch.setattr(stages, "GROUP_BYTES", part // 2**10)
    monkeypatch.setattr(model_of_files, "GROUP_BYTES", part // 2**10)
    params = jax.device_put({"w": jnp.ones((9, 128, 128)), "b": jnp.ones((9, 128))}, jax.devices()[0])
    tx = jo.offload(ADAMW, min_bytes=0, disk=jo.disk(tmp_path))
    state, step = tx.init(params), jo.jit(lambda p, s: jo.update_params(tx, p, s, p))
    groups = files_in([each.update for each in updates_in(step.trace(params, state).jaxpr)]).groups
    step(params, state)
    ((driven, _),) = step._driven._programs.values()
    tasks = [task for task, _ in driven._tasks if task.stage.name == "group"]
    ran = [sum(v.aval.dtype.itemsize * v.aval.size for v in task.inputs if is_host_aval(v.aval)) for task in tasks]
    assert [group.read for group in groups] == [group.written for group in groups] == ran and len(ran) > 4


def test_files_are_not_advised_where_one_leaf_is_all(monkeypatch):
    """Where rows depend on each other a parameter's state is read whole."""
    with_host_memory(monkeypatch, 300 * MIB)
    forecast = jo.plan(MIXED, STACKED)
    assert "on disk" not in [option.name for option in forecast.options]
    assert "a disk would not help on this host: 512 MiB of its memory" in str(forecast.notes)


def test_who_asked_for_a_disk_is_not_told_to_do_without_memory(monkeypatch):
    """On the resident's device there is no room; in this host's memory neither."""
    with_host_memory(monkeypatch, 1000 * MIB)
    forecast = jo.plan(on_disk(host_bytes=0), EIGHT, device_memory="1.2GiB")
    assert forecast.recommended.disk and forecast["in host memory"].why_not
    with_host_memory(monkeypatch, 2**40)
    assert jo.plan(on_disk(), EIGHT, chip="h100", tokens_per_step=2**17, device_memory="1.4GiB").recommended.name == (
        "in host memory"
    )


def test_many_leaves_go_by_their_bytes():
    params = {f"w{k}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for k in range(256)}  # 8 MiB of state each
    forecast = jo.plan(on_disk(host_bytes=0), params)
    row, half = forecast["as given"], forecast["bfloat16"]
    assert row.disk == row.read == 2048 * MIB and row.buffers == HELD * 64 * MIB
    assert half.disk == half.read == 1024 * MIB and half.buffers == HELD * 64 * MIB


# ---- of a step -------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    found = jo.disk(tmp_path / "a", tmp_path / "b", host_bytes=2**20)
    yield found
    found.close()


def job_on(disk):
    params = jax.device_put({f"w{k}": jnp.ones((256, 256)) for k in range(12)}, jax.devices()[0])
    tx = jo.offload(ADAMW, disk=disk)

    def step(params, state, x):
        def loss(params):
            y = x
            for w in params.values():
                y = jnp.tanh(y @ w)
            return (y**2).mean()

        return jo.update_params(tx, jax.grad(loss)(params), state, params)

    return tx, jo.jit(step, donate_argnums=(0, 1)), params, jnp.ones((16, 256))


def test_plan_of_a_step(disk):
    """Twelve parameters of 256 KiB; 2 of 12 in host memory, 10 on disk; concrete or abstract, the same."""
    tx, step, params, x = job_on(disk)
    forecast = jo.plan(step, params, tx.init(params), x, chip="h100", drive=MINE)
    row = forecast["as given"]
    assert (row.disk, row.read, row.written, row.buffers) == (5 * MIB,) * 4 and row.host == 6 * MIB
    assert (row.loaded, row.stored, row.window) == (6 * MIB,) * 3
    assert forecast.drives == 2 and row.io == pytest.approx((5 * MIB / 4e9 + 5 * MIB / 2e9) / 2)
    assert row.peak >= 2 * 3 * MIB + row.window and forecast["jo.jit"].host == 6 * MIB
    assert row.commit == 4 * MIB + 4  # parameters, the state in host memory, and a count
    abstract = jo.plan(step, params, jo.abstract_state(tx, params), x, chip="h100", drive=MINE)["as given"]
    one = dataclasses.replace(row, io=2 * row.io, exposed=abstract.exposed, overhead=abstract.overhead,
                              hidden=abstract.hidden, per_day=abstract.per_day)  # fmt: skip
    assert abstract == one  # but for the drives, which it does not tell


def test_inspect_and_verify_of_a_step(disk):
    """The first of its programs has no transfers: forward and backward."""
    tx, step, params, x = job_on(disk)
    for state in tx.init(params), jo.abstract_state(tx, params):
        report = jo.inspect(step, params, state, x)
        assert report.program == "before" and not report.transfers and report.problems == ()
        assert report.parts["parameters"] == 3 * MIB and report.peak >= 6 * MIB
        assert "or it is on disk" in report.unseen
        assert jo.verify(step, params, state, x).errors == ()


@pytest.mark.parametrize(
    ("depth", "ahead", "behind"), [(2, AHEAD, BEHIND), pytest.param(3, 7, 4, marks=pytest.mark.long("another depth"))]
)
def test_it_is_as_the_driver_does(depth, ahead, behind, tmp_path, monkeypatch):
    """Beside an accelerator a write waits for the gradients. Until then so many groups are being read; when the step
    has been driven, so many are still being written."""
    monkeypatch.setattr(stages, "GROUP_BYTES", 1)
    disk = jo.disk(tmp_path, depth=depth)
    tx, fetched, put, written = jo.offload(ADAMW, disk=disk), [], [], []
    go, last, first = threading.Event(), threading.Event(), 2 * (16 - behind)  # two moments each
    params = jax.device_put({f"w{k:02}": jnp.ones((256, 256)) for k in range(16)}, jax.devices()[0])
    state, step = tx.init(params), jo.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
    fetching, putting, writing = Disk.fetch, Disk.put, UnderWay._write

    def held(self, name, *rest):
        """By the order in which the driver hands them on: that in which threads come here is no order."""
        (go if put.index(name) < first else last).wait(120)
        written.append(name)
        writing(self, name, *rest)

    monkeypatch.setattr(Disk, "fetch", lambda self, name, *args: fetched.append(name) or fetching(self, name, *args))
    monkeypatch.setattr(Disk, "put", lambda self, name, *args: put.append(name) or putting(self, name, *args))
    monkeypatch.setattr(UnderWay, "_write", held)
    driven = threading.Thread(target=step, args=(params, state))
    driven.start()
    while len(fetched) < 2 * ahead:
        time.sleep(0.01)
    time.sleep(0.5)
    assert len(fetched) == 2 * ahead and not written
    go.set()
    driven.join(60)
    assert not driven.is_alive() and len(fetched) == len(put) == 32
    while len(written) < first:  # the driver waits for no more than it must
        time.sleep(0.01)
    assert set(written) == set(put[:first])
    last.set()
    disk.close()


# ---- on the command line ---------------------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(commands, [str(a) for a in args])


def test_on_the_command_line():
    seven = "plan --params 7e9 --master float32 --chip h100 --tokens 65536".split()
    done = run(
        *seven, "--disk", "--host-bytes", "16GiB", "--drives", 4, "--drive", "990pro", "--commit-every", 9, "--json"
    )
    found = json.loads(done.stdout)
    assert found["drive"]["name"] == "990pro" and found["drives"] == 4
    row = next(option for option in found["options"] if option["name"] == "as given")
    assert 0 < row["disk"] == row["read"] < 12 * 7e9 and row["host"] - row["buffers"] <= 16 * 2**30
    assert row["commits_per_day"] > 0 and row["commit"] > 14e9 and "commit_every=9" in row["code"]
    assert "under way" in run(*seven, "--disk").output
    for args, code, says in (
        ([*seven, "--commit-every", 9], 2, "--disk: is what --host-bytes and --drives are for, and --commit-every"),
        ([*seven, "--host-bytes", "1GiB"], 2, "--disk: is what --host-bytes and --drives are for, and --commit-every"),
        ([*seven, "--disk", "--drive", "floppy"], 4, "'floppy' is not known. Known: pm9a3"),
        ([*seven, "--disk", "--host-bytes", "much"], 2, "host-bytes: expected a number of bytes"),
        ([*seven, "--disk", "--devices", 2], 2, "plan counts files for one device yet; got 2"),
    ):
        done = run(*args)
        assert done.exit_code == code and says in done.output, done.output
