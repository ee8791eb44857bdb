"""The command: what it prints, and its exit codes."""

import contextlib
import io
import json
import runpy
import sys
from types import SimpleNamespace

import pytest

import jax_offload as jo
from tests.aot.harness import H200, require

pytestmark = pytest.mark.daily("each is a command")

MATRIX = 256 * 256 * 4
SEVEN = "plan 7B --param-dtype bfloat16 --master float32".split()


def run(*args):
    """What the command prints and returns, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jax-offload", *map(str, args)])
        try:
            runpy.run_module("jax_offload", run_name="__main__")
        except SystemExit as exited:
            code = exited.code or 0
    return SimpleNamespace(exit_code=code, stdout=out.getvalue(), output=out.getvalue() + err.getvalue())


def test_what_the_issue_asks_in_one_line():
    done = run(*"plan 13B --chip h100 --device-memory 80GiB --clip --tokens 16384".split())
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Pipelined fits if activations stay below 7.06 GiB on the device.")
    assert "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["plan"], 2, "one of the arguments MODEL --params is required"),
        (["plan", "7B", "--params", "7e9"], 2, "not allowed with argument"),
        ([*SEVEN, "--chip", "h900"], 2, "Known: a100"),
        ([*SEVEN, "--chip", "h100"], 0, "tx = jo.offload(jo.with_master_params(optax.adamw(1e-3))); step = "),
        ([*SEVEN, "--device-memory", "1GiB"], 3, "Nothing fits"),
        (
            ["plan", "13B", "--chip", "h100", "--device-memory", "64GiB"],
            3,
            "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",
        ),
        ([*SEVEN, "--device-memory", "much"], 2, "device_memory: expected"),
        ([*SEVEN, "--optimizer", "adamwww"], 2, "optax has no 'adamwww'"),
        (["plan", "no_such_module:f"], 2, "no_such_module:f: expected module:function; No module named"),
        (["plan", "nonsense"], 2, "params: expected how many there are"),
        (["plan", "a:f", "--clip", "--master", "float32"], 2, "--clip, --master: a:f has an optimizer of its own"),
        ([*SEVEN, "--target", "h200"], 2, "target: compiles a step"),
        (["plan", "7B", "--no-such-option"], 2, "unrecognized arguments: --no-such-option"),
        ([*SEVEN, "--tokens", "0.5"], 2, "tokens_per_step: expected"),
        ([], 2, "COMMAND"),
    ],
)
def test_exit_codes(args, code, words):
    done = run(*args)
    assert done.exit_code == code and words in done.output


def test_the_version_and_help():
    assert run("--version").stdout == f"jax-offload {jo.__version__}\n"
    assert "Exit codes" in run("plan", "--help").stdout
    assert all(word in run("-h").stdout for word in ("check", "doctor", "Exit codes"))


MINE = """
import jax, optax, jax_offload as jo
number = 3
def make_state():
    return optax.lion(1e-4), {"w": jax.ShapeDtypeStruct((4, 1024, 1024), "float32")}
def wrong():
    return 3
def strings():
    return optax.lion(1e-4), {"w": jax.ShapeDtypeStruct((4,), "float32"), "name": "abc"}
def raises():
    raise ValueError("of their own")
def of_each_way():
    def make(tx):
        def step(params, state):
            return jo.update_params(tx, jax.grad(lambda p: (p["w"] ** 2).sum())(params), state, params)
        params = make_state()[1]
        return step, params, jo.abstract_state(tx, params)
    return make, optax.adamw(1e-4)
"""
ODD = [  # the command, its exit code, and its output
    ("plan mine_for_test:wrong", 2, "mine_for_test:wrong"),
    ("plan mine_for_test:raises", 9, "ValueError: of their own"),
    ("plan mine_for_test:number", 2, "expected module:function, a function without arguments that returns"),
    ("plan mine_for_test:strings", 2, "params: expected arrays, or values with shape and dtype; ['name'] is a str"),
    ("plan mine_for_test:nothing", 2, "has no attribute 'nothing'"),
    ("check mine_for_test:of_each_way", 2, "the (make, tx) of plan. Give what make(tx) returns"),
    ("plan broken_for_test:f", 9, "No module named 'no_such_thing'"),
]


def test_a_function_of_yours(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(MINE)
    (tmp_path / "broken_for_test.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    sizes, rows = (json.loads(run("plan", f"mine_for_test:{name}", "--json").stdout)["options"]
                   for name in ("make_state", "of_each_way"))  # fmt: skip
    assert sizes[1]["host"] == 16 * 2**20
    assert [row["name"] for row in rows] == ["resident", "offload", "cores"]
    for asked, code, says in ODD:
        done = run(*asked.split())
        assert done.exit_code == code and says in done.output, done.output


STEPS = """
import jax, jax.numpy as jnp, optax, jax_offload as jo
x = jnp.ones((8, 256))
def of(tx, state):
    params = jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
    def loss(p, x):
        return jnp.tanh(x @ p).sum()
    step = jax.jit(lambda p, s, x: jo.update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1))
    return step, params, state(params), x
def offloaded():
    tx = jo.offload(optax.adamw(1e-3))
    return of(tx, tx.init)
def resident():
    tx = optax.adamw(1e-3)
    return of(tx, tx.init)
"""


def test_check_for_a_chip_that_is_not_there(tmp_path, monkeypatch):
    """256² float32: 256 KiB of parameters on the device, and each moment once to the device and once back."""
    require(H200)
    (tmp_path / "steps_for_test.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    done = run("check", "steps_for_test:offloaded", "--target", H200, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["target"], found["compiled_for"], found["problems"]) == (H200, True, [])
    assert (found["parts"]["parameters"], found["host"]) == (MATRIX, 2 * MATRIX)
    moved = {(t["leaf"], t["loads"], t["nbytes"]) for t in found["transfers"]}
    assert moved == {(f"s[0].{m}", way, MATRIX) for m in ("mu", "nu") for way in (True, False)}


def test_check(tmp_path, monkeypatch):
    (tmp_path / "steps_for_test.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    done = run("check", "steps_for_test:offloaded")
    assert done.exit_code == 0 and done.stdout.startswith("The step passes, on cpu.\n"), done.output
    assert "whether the state streams" in done.stdout
    done = run("check", "steps_for_test:resident")
    assert done.exit_code == 6 and done.stdout.startswith("The step fails, on cpu.\n")
    assert "nothing of the state is in host memory" in done.stdout.lower() or "error" in done.stdout
    assert json.loads(run("check", "steps_for_test:offloaded", "--json").stdout)["problems"] == []
    assert run("check", "steps_for_test:offloaded", "--target", "h900").exit_code == 2
