"""The figures of accelerators: complete, with a source each, and readable from a user's file."""

import dataclasses
import tomllib

import pytest

import jax_offload as jo
from jax_offload._analysis.chips import _FILE, known_as, known_chips

pytestmark = pytest.mark.daily("each is a chip")

FIGURES = {f.name for f in dataclasses.fields(jo.types.Chip)} - {"name", "platform", "sources"}


@pytest.mark.parametrize("name", known_chips())
def test_every_figure_has_a_source(name):
    c = jo.chip(name)
    assert set(c.sources) == FIGURES | {"sheet"}
    assert c.sources["sheet"].startswith("https://")
    assert set(tomllib.loads(_FILE.read_text())[name]) == FIGURES | {"platform", "sources"}


@pytest.mark.parametrize("name", known_chips())
def test_figures_are_of_the_right_size(name):
    """Units: a figure in GB or in TFLOP/s would be off by 1e9. What is reached is below the peak."""
    c = jo.chip(name)
    assert 1e10 < c.hbm_bytes < 1e12 and 1e10 < c.dram_bytes < 1e12
    assert 1e14 < c.flops < 1e16 and 1e11 < c.hbm_bandwidth < 2e13
    assert 1e10 < c.host_link < 1e12 and c.host_link < c.host_link_both <= 2 * c.host_link
    assert c.reached.f32 < c.reached.bf16 < c.flops and c.reached.hbm < c.hbm_bandwidth
    assert c.reached.interconnect < c.interconnect


@pytest.mark.parametrize("name", known_chips())
def test_a_link_that_was_not_measured_reaches_no_more_than_the_one_that_was(name):
    measured, c = jo.chip("h100"), jo.chip(name)
    assert measured.sources["host_link_both"].startswith("measured")
    share = 0.5 * measured.host_link_both / measured.host_link
    assert c.host_link_both <= 2 * c.host_link * share * 1.01
    assert name == "h100" or c.sources["host_link_both"].startswith("assumed: ")


def test_names():
    assert jo.chip("H200") is jo.chip("nvidia h200") is jo.chip(jo.chip("h200"))
    assert jo.chip("TPU v5e") is jo.chip("v5e")
    with pytest.raises(ValueError, match=r"'mi300' is not known. Known: a100, h100, h200, b200, gh200, gb200, v5e"):
        jo.chip("mi300")
    with pytest.raises(TypeError, match="got a int"):
        jo.chip(100)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
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
    assert known_as(kind) == name
    if name is not None:
        assert jo.chip(kind) is jo.chip(name)


def test_a_users_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "h100"\nhost_link = 20e9\nhost_link_both = 30e9\nreached = {bf16 = 1e12}\n')
    c = jo.chip(path)
    assert (c.name, c.host_link, c.flops) == ("mine", 20e9, jo.chip("h100").flops)
    assert (c.reached.bf16, c.reached.hbm) == (1e12, 3.35e12 * 5 / 6)
    assert c.sources["flops"] == "as h100" and c.sources["host_link"] == str(path)
    path.write_text('like = "h100"\nflops = 3e12\nhost_link = 2e10\n')
    c = jo.chip(path)
    assert (c.reached.bf16, c.host_link_both) == (
        2e12,
        pytest.approx(1.49 * 2e10),
    )  # they follow from what the file says
    path.write_text("hbm_bytes = 1e10\nflops = 3e12\nhbm_bandwidth = 6e11\nhost_link = 1e10\ndram_bytes = 1e11\n")
    c = jo.chip(str(path))
    assert (c.host_link_both, c.reached.bf16, c.reached.hbm) == (pytest.approx(1.49e10), 2e12, 5e11)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("flops = 1e12", "lacks hbm_bytes, hbm_bandwidth, host_link, dram_bytes"),
        ('like = "h100"\nflop = 1', "has flop; a chip has platform, hbm_bytes"),
        ('like = "h100"\nflops = "fast"', "flops in .* is 'fast'; expected a number"),
        ('like = "h100"\nplatform = "rocm"', "platform in .* is 'rocm'; expected one of cuda, tpu"),
        ('like = "h100"\nreached = {fp8 = 1}', "reached in .* has fp8"),
        ("flops = = 3", "bad.toml is no TOML, .*line 1"),
    ],
)
def test_bad_files(tmp_path, text, says):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        jo.chip(path)
    with pytest.raises(ValueError, match="there is no file"):
        jo.chip(tmp_path / "none.toml")
