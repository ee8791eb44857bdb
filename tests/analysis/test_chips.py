"""The figures of accelerators: complete, with a source each, and measured with a known clock."""

import dataclasses
import itertools
from types import SimpleNamespace

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


def clock(monkeypatch, *seconds):
    """Runs that take so long, by the clock. The first run of a program, which compiles, is not timed."""
    times = itertools.chain.from_iterable((0.0, each) for each in seconds)
    monkeypatch.setattr(chips, "time", SimpleNamespace(perf_counter=times.__next__))


def test_each_way_alone_and_both_at_once_and_the_host_s_memory(monkeypatch):
    """The best of three; ``both`` is what both directions copy at once; two arrays are read, one is written."""
    monkeypatch.setattr(chips, "ARRAY", 2**12)
    runs = (3, 2, 5), (4, 6, 5), (9, 8, 7)  # to the device, to the host, both
    clock(monkeypatch, *itertools.chain(*runs), 4, 2, 3)
    found, copied = jo.chip.measured(), chips.ON_CPU * chips.PIECES
    assert (found.host_link, found.host_link_both) == pytest.approx((copied / 4, 2 * copied / 7))
    assert found.dram_bandwidth == pytest.approx(3 * 2**12 / 2)
    assert found.name == "cpu" and found.bf16 == jo.chip("h100").bf16
    assert (found.sources["host_link"], found.sources["bf16"]) == ("measured on this machine", "as h100")
    monkeypatch.setattr(chips, "_dram", lambda sharing: {})  # without jax's backend for the CPU
    clock(monkeypatch, *itertools.chain(*runs))
    assert jo.chip.measured().dram_bandwidth == jo.chip("h100").dram_bandwidth


def test_a_card_without_a_name_has_the_memory_that_jax_takes_its_share_of(monkeypatch):
    monkeypatch.setattr(chips, "_link", lambda device: {"host_link": 20e9, "host_link_both": 30e9})
    monkeypatch.setattr(chips, "_dram", lambda sharing: {"dram_bandwidth": 7e9})
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    stats = {"bytes_limit": 18 * 2**30}
    card = SimpleNamespace(device_kind="NVIDIA GeForce RTX 4090", platform="gpu", memory_stats=lambda: stats)
    assert jo.chip.measured(card).hbm_bytes == 24 * 2**30
