"""The command: what it prints, and its exit codes."""

import json
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("click", reason="needs click: pip install 'jax_offload[cli]'")
pytest.importorskip("rich", reason="needs rich: pip install 'jax_offload[cli]'")

import jax
from click.testing import CliRunner

import jax_offload as jo
from jax_offload._analysis import cli
from jax_offload._analysis import commands as commands_of
from jax_offload._analysis.commands import commands
from jax_offload._analysis.found import Problem, Transfer
from jax_offload._analysis.inspection import Inspection
from jax_offload._analysis.synthetic import described, shape_of
from tests.aot.harness import H200, require

MATRIX = 256 * 256 * 4
SEVEN = "plan --params 7e9 --param-dtype bfloat16 --master float32".split()


def run(*args):
    return CliRunner().invoke(commands, [str(a) for a in args])


def test_a_model_of_7e9():
    """12 bytes of state for each parameter, in the recommended line of code."""
    done = run(*SEVEN, "--chip", "h100", "--tokens", 65536, "--layers", 32, "--width", 4096, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    options = {option["name"]: option for option in found["options"]}
    n = 7 * 10**9 // 4096 * 4096
    assert options["resident"]["parameters"] == options["resident"]["gradients"] == 2 * n
    assert options["resident"]["state"] == pytest.approx(12 * n, rel=1e-6)
    assert options["offload"]["host"] == 12 * n
    assert options["offload"]["activations"] == 65536 * 32 * 4096 * 2
    assert found["recommended"] == "fraction" and options["resident"]["fits"] is False
    assert "jo.offload(jo.with_master_params(optax.adamw(1e-3)), fraction=" in options["fraction"]["code"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "activations; --layers and --tokens would tell"),
        (["--layers", 32], "activations; --tokens would tell"),
        (["--layers", 32, "--tokens", 65536], "activations: a checkpoint around each of 32 layers of width 4224"),
    ],
)
def test_what_is_said_of_activations(args, says):
    assert says in run(*SEVEN, *args, "--json").stdout


def test_it_prints_a_table():
    done = run(*SEVEN, "--chip", "h100", "--tokens", 65536)
    assert "resident" in done.stdout and "recommended:" in done.stdout and "fits" in done.stdout


def test_a_model_of_70e9_on_eight_devices():
    done = run("plan", "--params", "70e9", "--storage", "int8", "--master", "float32", "--chip", "h100", "--devices", 8,
               "--shard-over", "data", "--tokens", 65536, "--json")  # fmt: skip
    assert done.exit_code == 3  # parameters and gradients alone are 280 GB
    found = json.loads(done.stdout)
    given = next(option for option in found["options"] if option["name"] == "as given")
    # a master of 4 bytes, two moments of one byte with a scale of 4 for every 128; an eighth on each device
    assert given["host"] == pytest.approx((6 + 2 * 4 / 128) * 70e9 / 8, rel=1e-3)
    assert found["missing"] > 150 * 2**30


def test_fsdp_divides_parameters_too():
    """Width 8192 over eight devices: an eighth of everything on each."""
    model = "plan --params 70e9 --master float32 --layers 80 --width 8192 --tokens 65536 --chip h100".split()
    done = run(*model, "--devices", 8, "--fsdp", "--json")
    options = {option["name"]: option for option in json.loads(done.stdout)["options"]}
    n, offload = 70e9 // 8192 * 8192, options["offload"]
    assert offload["parameters"] == offload["gradients"] == n * 2 / 8
    assert offload["host"] == pytest.approx(12 * n / 8) and "ZeRO-1" not in options


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["plan"], 2, "--params: say how many"),
        ([*SEVEN, "--chip", "h900"], 4, "Known: a100"),
        ([*SEVEN, "--device-memory", "1GiB"], 3, ""),
        ([*SEVEN, "--device-memory", "much"], 2, "device_memory: expected"),
        ([*SEVEN, "--optimizer", "adamwww"], 2, "optax has no 'adamwww'"),
        ([*SEVEN, "--shard-over", "data"], 2, "give --devices"),
        ([*SEVEN, "--fsdp"], 2, "fsdp: divides parameters over several devices; give --devices"),
        ([*SEVEN, "--fsdp", "--devices", "8", "--shard-over", "data"], 2, "leave out the one or the other"),
        ([*SEVEN, "--fsdp", "--devices", "7", "--width", "4096"], 2, "devices: 7 do not divide the width, 4096"),
        ([*SEVEN, "--param-dtype", "bf17"], 2, "param-dtype: expected"),
        (["plan", "no_such_module:f"], 2, "No module named"),
        (["plan", "nonsense"], 2, "expected module:function"),
        (["plan", "a:f", "--params", "7e9", "--shard-over", "data"], 2, "--params, --shard-over: describes a model"),
        ([*SEVEN, "--devices", "0"], 2, "--devices"),
        ([*SEVEN, "--target", "h200"], 2, "--target: compiles a step, module:function"),
        (["plan", "--no-such-option"], 2, "No such option"),
        (["plan", "--params", "10"], 2, "--params: 10 are too few for 1 layer of width 128, 384 at least"),
        (["plan", "--params", "inf"], 2, "--params: expected a number from 1 to 1e+15; got inf"),
        (["plan", "--params", "nan"], 2, "--params: expected a number from 1 to 1e+15; got nan"),
        (["plan", "--params", "7e20"], 2, "--params: expected a number from 1 to 1e+15; got 7e+20"),
        ([*SEVEN, "--layers", "-3"], 2, "'--layers': -3 is not in the range"),
        ([*SEVEN, "--width", "0"], 2, "'--width': 0 is not in the range"),
        ([*SEVEN, "--tokens", "inf"], 2, "tokens_per_step: expected a number > 0; got inf"),
        ([*SEVEN, "--tokens", "0.5"], 2, "tokens_per_step: expected whole ones"),
        ([*SEVEN, "--param-dtype", "int32"], 2, "param-dtype: expected a floating dtype"),
        (["--version"], 0, jo.__version__),
    ],
)
def test_exit_codes(args, code, words):
    done = run(*args)
    assert done.exit_code == code and words in done.output


def test_a_function_of_yours(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(
        textwrap.dedent("""
            import jax, optax
            def make_state():
                return optax.lion(1e-4), {"w": jax.ShapeDtypeStruct((4, 1024, 1024), "float32")}
            def wrong():
                return 3
            def strings():
                return optax.lion(1e-4), {"w": jax.ShapeDtypeStruct((4,), "float32"), "name": "abc"}
            def raises():
                raise ValueError("of their own")
            number = 3
            def not_on_the_mesh():
                return *make_state(), jax.sharding.AbstractMesh((8,), ("data",))
            def resident():
                tx, params = make_state()
                def step(params, state):
                    updates, state = tx.update(params, state, params)
                    return optax.apply_updates(params, updates), state
                return step, params, jax.eval_shape(tx.init, params)
            def of_each_way():
                import jax_offload as jo
                def make(tx):
                    def step(params, state):
                        return jo.update_params(tx, jax.grad(lambda p: (p["w"] ** 2).sum())(params), state, params)
                    params = make_state()[1]
                    return step, params, jo.abstract_state(tx, params)
                return make, optax.adamw(1e-4)
        """)
    )
    monkeypatch.chdir(tmp_path)
    done = run("plan", "mine_for_test:make_state", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["options"][1]["host"] == 16 * 2**20
    rows = json.loads(run("plan", "mine_for_test:of_each_way", "--json").stdout)["options"]
    assert {"resident", "jo.jit", "on the cores", "bfloat16", "int8"} <= {row["name"] for row in rows}
    assert run("plan", "mine_for_test:wrong").exit_code == 2
    assert run("plan", "mine_for_test:resident").exit_code == 6  # a step that offloads nothing
    for name, code, says in (
        ("raises", 9, "raises raises ValueError: of their own"),
        ("not_on_the_mesh", 5, "['w'] is not on the mesh {'data': 8}"),
        ("number", 2, "has a int of that name"),
        ("strings", 2, "params: expected arrays, or what has shape and dtype; ['name'] is a str"),
        ("nothing", 2, "has nothing of that name"),
    ):
        done = run("plan", f"mine_for_test:{name}")
        assert done.exit_code == code and says in done.output
    done = run("inspect", "mine_for_test:of_each_way")
    assert done.exit_code == 2 and "the (make, tx) of plan. Give what make(tx) returns" in done.output
    (tmp_path / "broken_for_test.py").write_text("import no_such_thing\n")
    done = run("plan", "broken_for_test:f")
    assert done.exit_code == 9 and "No module named 'no_such_thing'" in done.output


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


def test_between_the_ends_of_an_estimate_it_may_fit(tmp_path, monkeypatch):
    """As the API says it, and by an exit code of its own."""
    (tmp_path / "unrolled_for_test.py").write_text(
        textwrap.dedent("""
            import jax, jax.numpy as jnp, optax, jax_offload as jo
            def step():
                tx, w = jo.offload(optax.adamw(1e-3)), jax.ShapeDtypeStruct((512, 512), "float32")
                params = {"a": w, "b": w}
                def loss(p, x):
                    return (jnp.tanh(x @ p["a"]) @ p["b"]).sum()
                def step(p, s, x):
                    return jo.update_params(tx, jax.grad(loss)(p, x), s, p)
                return step, params, jo.abstract_state(tx, params), w
        """)
    )
    monkeypatch.chdir(tmp_path)
    target = "plan", "unrolled_for_test:step"
    rows = {row["name"]: row for row in json.loads(run(*target, "--json").stdout)["options"]}
    most = min(row["peak_range"][1] for row in rows.values())
    between = run(*target, "--device-memory", most - 1)
    assert between.exit_code == 10 and "maybe" in between.stdout and "recommended, and may fit:" in between.stdout
    surely = run(*target, "--device-memory", most)
    assert surely.exit_code == 0 and "recommended:" in surely.stdout


def test_inspect(tmp_path, monkeypatch):
    (tmp_path / "steps_for_test.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    done = run("inspect", "steps_for_test:offloaded")
    assert done.exit_code == 0 and "problems" in done.stdout, done.output
    assert json.loads(run("inspect", "steps_for_test:offloaded", "--json").stdout)["problems"] == []
    assert run("inspect", "steps_for_test:resident").exit_code == 6  # nothing is in host memory
    assert run("inspect", "steps_for_test:offloaded", "--timeline", "x.png").exit_code == 2
    assert run("inspect", "steps_for_test:offloaded", "--target", "h900").exit_code == 4
    assert "expected .png, .svg, .json" in run("inspect", "steps_for_test:offloaded", "--timeline", "x.gif").output
    assert "no folder 'no'" in run("inspect", "steps_for_test:offloaded", "--timeline", "no/x.png").output


def test_inspect_for_a_chip_that_is_not_there(tmp_path, monkeypatch):
    """256² float32: 256 KiB of parameters on the device, and each moment once to the device and once back."""
    require(H200)
    pytest.importorskip("matplotlib")
    (tmp_path / "steps_for_test.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    done = run("inspect", "steps_for_test:offloaded", "--target", H200, "--timeline", "out.png", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["target"], found["compiled_for"], found["problems"]) == (H200, True, [])
    assert (found["parts"]["parameters"], found["host"]) == (MATRIX, 2 * MATRIX)
    moved = {(t["leaf"], t["loads"], t["nbytes"]) for t in found["transfers"]}
    assert moved == {(f"s[0].{m}", way, MATRIX) for m in ("mu", "nu") for way in (True, False)}
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plan_for_a_chip_that_is_not_there(tmp_path, monkeypatch):
    """Its rows are compiled: peaks are the compiler's, whose resident one holds all four matrices."""
    require(H200)
    (tmp_path / "steps_for_test.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    done = run("plan", "steps_for_test:offloaded", "--target", H200, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["options"]}
    assert list(rows) == ["resident", "jax.jit", "jo.jit"] and found["recommended"] == "resident"
    assert [row["host"] for row in rows.values()] == [0, 2 * MATRIX, 2 * MATRIX]
    assert [row["loaded"] for row in rows.values()] == [0, 2 * MATRIX, 2 * MATRIX]
    assert 4 * MATRIX <= rows["resident"]["peak"] < 5 * MATRIX
    assert found["labels"]["peak, host"] == "compiled for h200, not run"


def test_a_warning_of_inspect_is_no_error(tmp_path, monkeypatch):
    """By the exit code; what is loaded and what is stored are told apart."""
    found = [Problem("a warning", error=False)]
    moved = Transfer("a", True, 3, 1, 1.0, ""), Transfer("b", False, 5, 1, 1.0, "")

    def inspect_of(*args, **kwargs):
        report = Inspection("h200", 0, {}, 0, 0, moved, (), tuple(found), None, compiled_for=True)
        assert (report.loaded, report.stored) == (3, 5)
        return report

    (tmp_path / "steps_for_test.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands_of, "inspect_of", inspect_of)
    done = run("inspect", "steps_for_test:offloaded")
    assert done.exit_code == 0 and "a warning" in done.stdout
    found.append(Problem("an error"))
    assert run("inspect", "steps_for_test:offloaded").exit_code == 6


def test_the_shape_of_a_model():
    assert shape_of(7 * 10**9, None, None) == (34, 4096)
    assert shape_of(70 * 10**9, 80, 8192) == (80, 8192)
    model = described(10**9, "sgd", "float32")
    assert sum(x.size for x in jax.tree.leaves(model.params)) == pytest.approx(10**9, abs=model.width)


def test_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 8
    assert "pip install 'jax_offload[cli]'" in capsys.readouterr().err


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "jax_offload", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout and "Exit codes" in done.stdout


def test_the_command_s_help():
    assert "Exit codes" in run("plan", "--help").stdout
    assert "doctor" in run("-h").stdout
