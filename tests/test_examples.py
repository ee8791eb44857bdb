"""The examples run, and do what they show."""

import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.words import words

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs ``train_lm`` on a small text; tells how often its step was compiled."""
    folder = tmp_path_factory.mktemp("train_lm")
    text = folder / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(1000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import train_lm

        def train(*args):
            small = "--model test --batch 4 --context 32".split()
            args = [*small, "--data", text, *args]
            before = train_lm.train_step._cache_size()
            result = train_lm.main(list(map(str, args)))
            return {**result, "compiled": train_lm.train_step._cache_size() - before}

        yield train


@pytest.fixture(scope="module")
def uninterrupted(train):
    return train("--steps", 6)


def kinds(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.nbytes >= 2**16}


@pytest.mark.long("trains a GPT")
def test_offloaded_and_resident_losses_agree(train, uninterrupted, capsys):
    resident = train("--steps", 6, "--resident")
    np.testing.assert_allclose(uninterrupted["losses"], resident["losses"], rtol=0, atol=1e-4)
    for result, kind in ((uninterrupted, "pinned_host"), (resident, "device")):
        assert kinds(result["state"].opt_state) == {kind}
        assert kinds(result["state"].params) == {"device"}
        assert result["compiled"] == 1
        before, after = result["held_out"]
        assert after < before - 0.5


@pytest.mark.long("trains a GPT")
@pytest.mark.parametrize("how", [[], ["--pipelined"]])
def test_with_parameters_on_the_host_the_losses_agree(train, uninterrupted, capsys, how):
    found = train("--steps", 6, "--parameters", "host", *how)
    np.testing.assert_allclose(found["losses"], uninterrupted["losses"], rtol=0, atol=1e-4)
    state = found["state"]
    assert kinds(state.params["blocks"]) == kinds(state.opt_state) == {"pinned_host"}


RESUMED = {
    "a checkpoint": ("--checkpoint-dir", "--save-every"),
    "a checkpoint, pipelined": ("--checkpoint-dir", "--save-every", "--pipelined"),
    "files": ("--disk", "--commit-every", "--host-bytes", "0.25MiB"),
}


@pytest.mark.long("trains a GPT twice")
@pytest.mark.parametrize("how", RESUMED)
def test_a_resumed_run_goes_on_as_if_uninterrupted(train, uninterrupted, tmp_path, capsys, how):
    folder, every, *more = RESUMED[how]
    options = ("--steps", 6, folder, tmp_path / "run", every, 2, *more)
    first = train(*options, "--stop-at", 3)
    capsys.readouterr()
    rest = train(*options)
    printed = capsys.readouterr().out
    order = ["parameters on", "disk, " if how == "files" else "pinned_host", "resumed at step 3", "held-out", "sample:"]
    assert sorted(order, key=printed.index) == order
    exact = how == "a checkpoint"
    np.testing.assert_allclose(
        first["losses"] + rest["losses"], uninterrupted["losses"], rtol=0, atol=0 if exact else 1e-4
    )
    assert first["held_out"][1] == pytest.approx(rest["held_out"][0], abs=0 if "pipelined" not in how else 1e-4)
    assert int(rest["state"].step) == 6
    if how != "files":
        assert kinds(rest["state"].opt_state) == {"pinned_host"}
        assert rest["compiled"] == ("pipelined" not in how)  # which has programs of its own


@pytest.mark.long("trains a GPT")
def test_bfloat16_parameters_with_masters_and_moments_in_8_bits(train):
    # in the smaller model the moments, once in 8 bits, are below min_bytes
    run = "--model", "tiny", "--batch", 2, "--context", 64, "--steps", 4
    result = train(*run, "--param-dtype", "bfloat16", "--master", "float32", "--storage", "int8")
    state = result["state"]
    dtypes = {(x.dtype.name, x.sharding.memory_kind) for x in jax.tree.leaves(state.opt_state) if x.nbytes >= 2**16}
    assert dtypes == {("float32", "pinned_host"), ("int8", "pinned_host"), ("uint8", "pinned_host")}
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    masters = state.opt_state.inner_state.master
    for p, master in zip(jax.tree.leaves(state.params), jax.tree.leaves(masters), strict=True):
        # apply_updates misses where the old value was more than 2^15 times the new, by 2^-24 of the old at most
        np.testing.assert_allclose(np.float32(p), np.float32(np.asarray(master).astype(p.dtype)), rtol=0, atol=2.0**-32)
    assert result["compiled"] == 1
    assert result["held_out"][1] < result["held_out"][0]


def test_model_sizes_are_what_their_names_say(train):
    import _gpt

    sizes = {"10m": 10e6, "125m": 125e6, "350m": 350e6, "1.3b": 1.3e9, "2.7b": 2.7e9, "7b": 7e9}
    for name, size in sizes.items():
        model = _gpt.GPT(_gpt.Config(*_gpt.SIZES[name], context=256))
        params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 256), np.int32))
        assert sum(x.size for x in jax.tree.leaves(params)) == pytest.approx(size, rel=0.1)


def test_nnx_finetune(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import nnx_finetune

    result = nnx_finetune.main(steps=20, width=128)
    assert kinds(result["optimizer"].opt_state) == {"pinned_host"}
    assert np.mean(result["losses"][-5:]) < np.mean(result["losses"][:5])
    assert result["step"]._cache_size() == 1


@pytest.fixture
def demo(monkeypatch, tmp_path, capsys):
    """The demo at the size of a toy: what it shows, its picture and what it printed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo

    def run(*args):
        text, picture = tmp_path / "text.txt", tmp_path / "demo.png"
        text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(1000)))
        toy = "--compiled test --tokens 2 32 --model test --batch 2 --context 16 --steps 6 --sample 8".split()
        shown = demo.main([*toy, "--data", str(text), "--picture", str(picture), *args])
        return shown, picture, capsys.readouterr().out

    return run


@pytest.mark.long("compiles a GPT three times for an H200")
def test_the_demo_says_what_offloading_did(demo):
    shown, picture, printed = demo("--beside", "4")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [line.split()[0] for line in printed.splitlines()[-5:]] == ["losses", "state", "memory", "time", "picture"]
    import _picture
    from matplotlib.text import Text

    texts = [text.get_text() for text in _picture.draw(shown, picture).findobj(Text)]
    drawn = words(" ".join(texts)).replace(", ", " ")
    for name in ("losses", "state", "memory", "time"):
        assert words(" ".join(shown.titles[name])).replace(", ", " ") in drawn
    runs, peaks = map(shown.run, ("resident", "offloaded")), map(shown.peak, shown.ways)
    for said in (*runs, *shown.apart, shown.limit, *peaks):
        assert words(said).replace(", ", " ") in drawn and said in words(printed)
    assert [len(losses) for losses in shown.losses.values()] == [4, 6]
    np.testing.assert_allclose(*(losses[:4] for losses in shown.losses.values()), rtol=0, atol=1e-4)
    assert shown.state["resident"].keys() == {"device"}
    assert shown.state["offloaded"]["pinned_host"] > shown.state["offloaded"]["device"]
    assert all(seconds > 0 for seconds in shown.seconds.values())
    assert shown.how == "compiled for an H200, not run"
    resident, usual, ours = shown.ways
    assert resident.host == 0 < ours.host <= usual.host
    assert 0 < ours.peak < resident.peak and ours.timeline.segments
    assert ours.parts["optimizer state"] < 0.1 * resident.parts["optimizer state"]
    assert ours.parts["temporary"] < usual.parts["temporary"]


@pytest.mark.long("trains a GPT")
def test_the_demo_says_where_it_cannot_compile(demo, monkeypatch):
    def inspect(*_, **__):
        raise ValueError("target: jax-cuda13-plugin, which compiles for h200, is not installed.")

    monkeypatch.setattr("jax_offload.inspect", inspect)
    shown, picture, printed = demo("--beside", "0")
    assert shown.how == "not compiled for an H200" and shown.ways == []
    assert "not compiled: target: jax-cuda13-plugin" in printed and "not compiled for an H200" in printed
    assert shown.losses.keys() == {"offloaded"} and picture.stat().st_size > 10_000


@pytest.mark.parametrize("example", ["demo", "train_lm", "nnx_finetune", "multihost_lm"])
@pytest.mark.parametrize("package", ["flax", "jax_offload"])
def test_an_example_says_which_extra_it_needs(monkeypatch, example, package):
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("_data", "_gpt", "_extra", "_picture", "train_lm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"{package} is not installed.*pip install '\.\[examples\]'"):
        runpy.run_path(str(EXAMPLES / f"{example}.py"))
