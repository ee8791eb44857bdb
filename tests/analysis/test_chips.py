"""The figures of accelerators: complete, with a source each, and measured with a known clock."""

import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace

import jax
import pytest

import jax_offload as jo
from jax_offload._look import chips

pytestmark = pytest.mark.daily("each is a chip")

NAMES = "a100 h100 h200 b200 gh200 gb200 v5e v5p v6e".split()
FIGURES = {f.name for f in dataclasses.fields(jo.types.Chip)} - {"name", "platform", "sources"}


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source_and_its_unit(name):
    """A figure in GB or in TFLOP/s would be off by 1e9. A link that was not measured reaches no more in both directions
    at once, beside one direction alone, than the link that was."""
    c, measured = jo.chip(name), jo.chip("h100")
    assert set(c.sources) == FIGURES | {"sheet"} and c.sources["sheet"].startswith("https://")
    assert 1e10 < c.hbm_bytes < 1e12 and 1e10 < c.dram_bytes < 1e12
    assert 1e13 < c.f32 < c.bf16 < 1e16 and 1e11 < c.hbm_bandwidth < 2e13 and 5e10 < c.interconnect < 1e12
    assert 1e10 < c.host_link < 1e12 and c.host_link < c.host_link_both <= 2 * c.host_link
    assert c.sources["host_link_both"].startswith("measured" if name == "h100" else "assumed: ")
    assert c.host_link_both / c.host_link <= measured.host_link_both / measured.host_link * 1.01


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("TPU v5e", "v5e"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("TPU v4", None),
        ("cpu", None),
    ],
)
def test_what_jax_calls_them(kind, name):
    """Another card of that name, with other figures, is not taken for it."""
    if name is not None:
        assert jo.chip(kind) is jo.chip(name) is jo.chip(jo.chip(name)) and jo.chip(kind).name == name
        return
    with pytest.raises(ValueError, match=rf"'{kind}' is not known. Known: {', '.join(NAMES)};"):
        jo.chip(kind)


def test_types_that_are_wrong():
    with pytest.raises(TypeError, match="got a int"):
        jo.chip(100)
    with pytest.raises(TypeError, match=r"device: expected a jax.Device, of jax.local_devices\(\); got 'foo'"):
        jo.chip.measured("foo")


HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
ALONE = {(HOST, DEVICE): 50e9, (DEVICE, HOST): 40e9}  # bytes per second, by where from and where to
BOTH = 30e9  # of each, where both are busy
SLOWER = (100.0, 3.0, 1.0, 2.0)  # the runs of a program, beside its best: the first one is not counted


class Machine:
    """A clock, and programs that move it on by the time of their copies. ``copied``: bytes, of each program's runs."""

    def __init__(self):
        self.now, self.copied = 0.0, []

    def jit(self, move, out_shardings):
        kinds = [sharding.memory_kind for sharding in jax.tree.leaves(out_shardings)]

        def compiled(*args):
            traced = jax.make_jaxpr(move)(*args)
            moved = Counter()
            for x, y, kind in zip(traced.in_avals, traced.out_avals, kinds, strict=True):
                assert (kind == "pinned_host") == (y.memory_space == HOST)
                moved[x.memory_space, y.memory_space] += x.size * x.dtype.itemsize
            seconds = max(n / (BOTH if len(moved) == 2 else ALONE[way]) for way, n in moved.items())
            runs = iter(SLOWER)

            def program(*args):
                self.now += seconds * next(runs)
                self.copied[-1] += moved.total()
                return args

            self.copied.append(0)
            return program

        return SimpleNamespace(lower=lambda *args: SimpleNamespace(compile=lambda compiler_options: compiled(*args)))


def test_each_way_alone_and_both_at_once(monkeypatch):
    """The best of three; ``both`` is what one way has while the other is busy. It copies what its docstring says: 16
    GiB in four runs each, with the pieces that an accelerator has."""
    machine, dram = Machine(), [7e9, None]
    monkeypatch.setattr(chips, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    monkeypatch.setattr(chips, "dram_bandwidth", lambda: dram.pop(0))
    monkeypatch.setattr(jax, "jit", machine.jit)
    found = jo.chip.measured()
    assert (found.host_link, found.host_link_both, found.dram_bandwidth) == pytest.approx((40e9, 60e9, 7e9))
    assert found.name == "cpu" and found.bf16 == jo.chip("h100").bf16
    assert (found.sources["host_link"], found.sources["bf16"]) == ("measured on this machine", "as h100")
    assert [n * chips.PIECE / chips.ON_CPU / 2**30 for n in machine.copied] == [4, 4, 8]
    assert jo.chip.measured().dram_bandwidth == jo.chip("h100").dram_bandwidth


def test_a_card_without_a_name_has_the_memory_that_jax_takes_its_share_of(monkeypatch):
    monkeypatch.setattr(chips, "_link", lambda device: (20e9, 20e9, 15e9))
    monkeypatch.setattr(chips, "dram_bandwidth", lambda: 7e9)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    stats = {"bytes_limit": 18 * 2**30}
    card = SimpleNamespace(device_kind="NVIDIA GeForce RTX 4090", platform="gpu", memory_stats=lambda: stats)
    assert jo.chip.measured(card).hbm_bytes == 24 * 2**30


def test_the_host_s_memory_by_the_best_of_three(monkeypatch):
    """Two arrays are read and one is written; the first run, which compiles, is not timed."""
    monkeypatch.setattr(chips, "ARRAY", 2**12)
    took = [(1.0, 5.0), (6.0, 8.0), (9.0, 12.0)]
    monkeypatch.setattr(chips, "time", SimpleNamespace(perf_counter=itertools.chain(*took).__next__))
    assert chips.dram_bandwidth() == 3 * 2**12 / 2
