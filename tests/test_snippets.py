"""The Python of README and docs runs as printed: a page's blocks one after the other, in one namespace.

The README needs nothing but itself. The other pages speak of a model that the reader has; here ``Reader`` provides it.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from os.path import commonprefix
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.array_serialization import serialization

import jax_offload as jo
from tests.support.steps import assert_placed
from tests.support.trees import assert_equal, kinds

pytestmark = pytest.mark.daily("the docs")

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
# The most words on each page, or on several pages together.
WORDS = {
    "README.md": 500, "docs/plan.md": 900, "docs/step.md": 1200, "docs/frameworks.md docs/trainers.md": 1100,
    "docs/options.md": 700, "docs/precision.md": 700, "docs/sharding.md": 1200, "docs/state.md": 1300,
    "docs/host_cores.md": 600, "docs/disk.md": 1000, "docs/inspect.md": 700, "docs/command_line.md": 400,
    "docs/recipes.md": 900, "docs/troubleshooting.md": 1200, "docs/migrate.md": 600, "docs/how_it_works.md": 900,
    "docs/api.md": 100, "docs/what_hides.md": 710, "CONTRIBUTING.md": 900,
}  # fmt: skip
TRAIN_STATE = "A TrainState"  # a section of docs/state.md that continues docs/frameworks.md
# Sections whose code needs a package that the test environment may lack.
LONG_LOOP = pytest.mark.long("trains the same loop")
PACKAGES = {"Equinox": "equinox", "Haiku": "haiku", "Tunix": "tunix"}


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def run(page: str, namespace: dict[str, Any], without: str = "") -> dict[str, Any]:
    skipped = in_section(without, page) if without else []
    for k, block in enumerate(block for block in blocks(page) if block not in skipped):
        block = re.sub(r', target="[\w:]+"', "", block)  # ``tests/analysis`` compiles for chips that are absent
        exec(compile(block, f"{page}, block {k}", "exec"), namespace)
    return namespace


def loss(params, batch):
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch.astype(params["layers"].dtype), params["layers"])[0]
    return (x.astype(jnp.float32) ** 2).mean()


class Reader:
    """What the reader of a page already has: a model, its optimizer and state, a step, and folders."""

    def __init__(self, folder: Path) -> None:
        w = jax.random.normal(jax.random.key(0), (4, 128, 128)) / 12
        self.params = jax.device_put({"layers": w}, jax.devices()[0])
        self.batch = jax.random.normal(jax.random.key(1), (8, 128))
        self.inner = optax.adamw(1e-3)
        self.tx = jo.offload(self.inner, min_bytes=0)
        self.state = self.tx.init(self.params)
        self.folder, self.weights_folder = folder / "run", folder / "weights"

    @property
    def namespace(self) -> dict[str, Any]:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.params)
        found = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "jo": jo, "loss": loss, "pickle": pickle, "i": 0}
        found |= vars(self) | {"shapes": shapes, "make_params": lambda: shapes}

        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            params, state = jo.update_params(found["tx"], grads, state, params)
            return params, state, value

        found["step"] = step
        return found


def moments(state: Any) -> Any:
    """The largest leaf of a state: a moment."""
    return max(jax.tree.leaves(state), key=lambda x: x.nbytes)


def test_code_fits_the_page():
    """The site shows 96 characters of a line, and the rest under the icon that copies it; messages wrap."""
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    code = {page.name: fence.findall(page.read_text()) for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    lines = [(name, line) for name, found in code.items() for kind, text in found if kind != "text"
             for line in text.splitlines()]  # fmt: skip
    assert len(lines) > 200
    assert not [(name, line) for name, line in lines if len(line) > 96]


def words(pages: Iterable[Path]) -> int:
    return sum(bool(re.search(r"\w", word)) for page in pages for word in page.read_text().split())


@pytest.mark.parametrize("pages", [*WORDS])
def test_pages_are_short(pages):
    assert words(ROOT / page for page in pages.split()) <= WORDS[pages]


def test_the_documentation_is_short():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages} | {"CONTRIBUTING.md"} == {*" ".join(WORDS).split()}
    assert words(pages) <= 14_500
    assert words((ROOT / "notes").glob("*.md")) <= 6_000
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120


def shown(page: str) -> list[str]:
    """The lines of a page's sample outputs."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [line for kind, text in fences if not kind for line in text.splitlines()]


def test_the_first_program():
    """One command prints what the README and the page of ``verify`` show, whose figures vary with jax's version."""
    pytest.importorskip("jax_cuda13_plugin", reason="verify compiles for an H100")
    program = ROOT / "examples/quickstart.py"
    assert program.read_text() == blocks("README.md")[0]
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True,
                          env={**os.environ, "COLUMNS": "96"})  # fmt: skip

    def words_of(line: str) -> str:
        return " ".join(re.sub(r"\b\d[\d.]*( ?[µm]?s\b)?", "#", line).split())

    printed = {words_of(line) for line in done.stdout.splitlines()}
    output = [line for page in ("README.md", "docs/inspect.md") for line in shown(page)]
    samples = [line for line in output if line.strip(". ") and not line.startswith(("pip", "JAX"))]
    assert len(samples) >= 20
    assert not [line for line in samples if words_of(line) not in printed]
    assert [line for line in shown("README.md") if "GiB" in line] == shown("docs/plan.md")[:2]


def test_the_readme():
    program, train_state = blocks("README.md")
    found: dict[str, Any] = {}
    exec(program.replace('"h100" if', "None if"), found)
    assert moments(found["state"]).sharding.memory_kind == "pinned_host"
    exec(train_state, found)
    params, tx, train = (found[name] for name in ("params", "tx", "train"))
    run, aux = train(TrainState.create(apply_fn=None, params=params, tx=tx), found["batch"])
    run = train.finish(run)
    assert moments(run.opt_state).sharding.memory_kind == "pinned_host"
    assert (run.step, aux.now < found["aux"].now) == (1, True)


RECIPES = pytest.param("recipes", marks=pytest.mark.long("many steps"))


@pytest.mark.parametrize("page", ["step", "options", RECIPES, "state", "precision", "sharding", "host_cores"])
def test_a_page(page, tmp_path):
    found = run(f"docs/{page}.md", Reader(tmp_path).namespace, without=TRAIN_STATE if page == "state" else "")
    if page == "host_cores":
        found["state"] = found["step"](found["params"], found["tx"].init(found["params"]), found["batch"])[1]
    moment = moments(found["state"])
    assert moment.sharding.memory_kind == "pinned_host"
    if page == "precision":
        assert found["small"]["layers"].dtype == jnp.bfloat16
        assert found["state"].inner_state[0].mu["layers"].values.dtype == jnp.int8
    if page == "sharding":
        assert moment.sharding.shard_shape(moment.shape) != moment.shape


def in_section(title: str, page: str = "docs/frameworks.md") -> list[str]:
    """The code of a section of a page, by default of the one that shows the training loop."""
    return BLOCK.findall(re.split(rf"\n##+ {title}\n", (ROOT / page).read_text())[1].split("\n##")[0])


def run_twice(code: str, found: dict[str, Any]) -> None:
    """Run a training loop with an empty folder, and once more from the checkpoint that it left."""
    batch = found["batch"]
    for done in (0, 4):
        found |= {"batch": batch, "done": done, "manager": ocp.CheckpointManager(found["folder"])}
        exec(compile(code, "docs/frameworks.md", "exec"), found)
        found["manager"].wait_until_finished()
        assert (found["done"], found["manager"].latest_step()) == (done, done + 4)
        found["manager"].close()


@pytest.mark.parametrize(
    "section",
    [
        *("optax", "Flax nnx"),
        *(pytest.param(name, marks=LONG_LOOP) for name in ("annotated nnx", "Flax linen", "Equinox", "Haiku")),
    ],
)
def test_your_training_loop(section, tmp_path):
    """On a mesh of 8 devices, with the model of each framework."""
    if section in PACKAGES:
        pytest.importorskip(PACKAGES[section])
    page = (ROOT / "docs/frameworks.md").read_text()
    loop, unclipped = BLOCK.findall(page.partition("\n## ")[0])
    found = Reader(tmp_path).namespace
    if section == "optax":
        found["make_params"] = lambda: {"layers": jax.random.normal(jax.random.key(0), (4, 128, 128), jnp.bfloat16)}
        run_twice(loop, found)
        before = loop.partition("# 5. ")[0].replace("params(clipped)", "params(adamw)")
        run_twice(before + unclipped, found | {"folder": tmp_path / "unclipped"})
        wrapped = "tx = jo.offload(inner)"
        assert wrapped in loop and "  # resident: jo.inspect" in unclipped
        after = unclipped.replace("jo.jit", "jax.jit").replace("jo.verify", "jo.inspect")
        resident = found | {"folder": tmp_path / "resident"}
        exec(loop.partition("# 5. ")[0].replace(wrapped, "tx = inner") + after, resident)
        assert resident["train"]._cache_size() == 1
        assert moments(resident["state"]).sharding.memory_kind == "device"
    elif section == "annotated nnx":
        abstract = "graph, shapes = nnx.get_abstract_model(make_model, mesh)"
        assert f"`{abstract}`" in " ".join(page.split())
        kernel = "kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, 'data')), rngs="
        with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
            exec(in_section("Flax nnx")[0].replace("rngs=", kernel), found)
            run_twice(re.sub(r"(?m)^shapes = .*$", abstract, loop), found)
    else:
        exec(in_section(section)[0], found)
        run_twice(loop, found)
        if section == "Flax nnx":
            exec(in_section(section)[1], found)
            assert found["Model"](nnx.Rngs(0))(found["batch"]).shape == found["batch"].shape
    assert optax.tree.get(found["state"], "learning_rate") == jnp.float32(3e-4)
    moment = moments(found["state"])
    assert (moment.dtype, moment.sharding.memory_kind) == (jnp.float32, "pinned_host")
    assert moment.sharding.shard_shape(moment.shape) == (*moment.shape[:-1], moment.shape[-1] // 8)
    if section == "Flax linen":
        clipped, unclipped = in_section(TRAIN_STATE, "docs/state.md")
        start = clipped.partition("train = ")[0]
        resident = start + unclipped.replace("jo.jit", "jax.jit").replace("jo.verify", "jo.inspect")
        for code, memory in (clipped, "pinned_host"), (start + unclipped, "pinned_host"), (resident, "device"):
            found["folder"] = tmp_path / f"train_state_{len(code)}"
            names = found | ({"tx": found["inner"]} if code is resident else {})
            run_twice(code, names)
            state = names["run"].opt_state
            assert (names["run"].step, optax.tree.get(state, "learning_rate")) == (8, jnp.float32(3e-4))
            assert moments(state).sharding == moment.sharding.with_memory_kind(memory)
            assert code is not resident or names["train"]._cache_size() == 1


def changed(loop: str, change: str) -> str:
    """The loop with each line of ``change`` in place of the line that begins most like it, or before the named one."""
    lines = loop.splitlines()
    for line in change.splitlines():
        new, _, named = line.partition("  # before ")
        begins = named or new
        place = max(range(len(lines)), key=lambda k: len(commonprefix([lines[k].strip(), begins])))  # noqa: RUF071
        assert not named or lines[place].strip().startswith(named)
        indent = re.match(" *", lines[place])[0]
        lines[place : place + (not named)] = [indent + new]
    return "\n".join(lines)


def test_nnx_with_batch_statistics(tmp_path):
    """The loop with the page's changes computes as a plain step under ``nnx.jit`` does."""

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear, self.norm = nnx.Linear(128, 128, rngs=rngs), nnx.BatchNorm(128, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    @nnx.jit
    def plain(model, optimizer, batch):
        value, grads = nnx.value_and_grad(lambda model: ((model(batch) - batch) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    page = (ROOT / "docs/frameworks.md").read_text()
    start, part, loop = re.sub("1e-3|3e-4", "1e-2", BLOCK.search(page)[1]).partition("# 4. ")
    functions, change = in_section("Dropout and batch statistics")
    loop = changed(part + loop.replace("params, state", "params, state, others"), change)
    found = Reader(tmp_path).namespace | {"Model": Model}
    exec(re.sub(r"return nnx\.Linear.*", "return Model()", in_section("Flax nnx")[0]), found)
    run_twice(start + functions + loop, found)
    model = Model()
    optimizer = nnx.Optimizer(model, found["inner"], wrt=nnx.Param)
    for _ in range(8):
        value = plain(model, optimizer, found["batch"])
    np.testing.assert_allclose(found["aux"].now, value, rtol=1e-5)
    others = found["others"]
    assert moments(found["state"]).sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(found["params"]["linear"]["kernel"][...], model.linear.kernel[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(others["norm"]["mean"][...], model.norm.mean[...], rtol=1e-5, atol=1e-6)
    assert others["dropout"]["rngs"]["count"][...] == model.dropout.rngs.count[...] == 8


def test_an_nnx_optimizer(tmp_path):
    found = Reader(tmp_path).namespace
    exec(in_section("Flax nnx")[0], found)
    exec(in_section("An nnx.Optimizer")[0], found)
    assert found["optimizer"].step[...] == 1
    assert moments(nnx.state(found["optimizer"])).sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("ocdbt", [False, True])
def test_tensorstore(ocdbt, tmp_path, monkeypatch):
    """A state on a mesh, saved and read by the recipe: values, shardings and memories."""
    page = (ROOT / "docs/recipes.md").read_text().split("## A checkpoint of tensorstore arrays\n")[1]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    params = jax.device_put({"layers": jnp.linspace(0, 1, 2**16, dtype=jnp.bfloat16).reshape(4, 128, 128)}, sharding)
    tx = jo.offload(optax.adamw(1e-3), min_bytes=0)
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    namespace = {"jax": jax, "jo": jo, "tx": tx, "params": params, "state": state, "folder": tmp_path}
    spec_of = serialization.get_tensorstore_spec
    monkeypatch.setattr(serialization, "get_tensorstore_spec", lambda path: spec_of(path, ocdbt=ocdbt))
    exec(BLOCK.search(page)[1], namespace)
    assert namespace["state"] is not state
    assert kinds(namespace["state"]) == kinds(state)
    assert_placed(namespace["state"], jo.abstract_state(tx, params))
    assert_equal(namespace["state"], state)


def test_reading_a_plan(tmp_path, capsys, monkeypatch):
    """Without a target here: ``tests/analysis`` compiles for chips that are absent."""
    monkeypatch.setenv("COLUMNS", "96")
    found = Reader(tmp_path).namespace
    for block in blocks("docs/plan.md"):
        exec(block.replace('target="h200"', 'chip="h200"'), found)
    page = (ROOT / "docs/plan.md").read_text()
    shown = re.findall(r"```\n\n```\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 1 and shown[0] in capsys.readouterr().out
    assert found["found"]["pipelined"].fits and not found["found"]["resident"].fits
    on_one = {"chip": "h200", "tokens_per_step": 8192, "layers": 32, "width": 4096}
    assert jo.plan(found["inner"], "1B", **on_one).code.startswith("tx = inner; step = jax.jit(")


def test_on_disk(tmp_path):
    """Twice, the second time from the last commit, and then into memory."""
    *page, moves = blocks("docs/disk.md")
    page = "\n".join(page).replace("/nvme/run", str(tmp_path / "run"))
    for step in (3, 6):
        found = Reader(tmp_path).namespace
        exec(page.replace("params, state = step(", "params, state, _ = step("), found)
        assert hasattr(found["state"][0].mu["layers"], "shape") and found["disk"].last_commit == step
        if step == 3:
            found["disk"].close()
    with ocp.CheckpointManager(tmp_path / "orbax") as found["manager"]:
        exec(moves, found)
    for state in found["new_state"], found["tree"]["opt_state"]:
        assert state[0].mu["layers"].sharding.memory_kind == "pinned_host"
    found["disk"].close()


def test_looking_at_a_step(tmp_path):
    """Without a target here: ``tests/analysis`` compiles for chips that are absent."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("jax 0.10's profiler crashes in a process that has compiled for a chip that is not there")
    found = Reader(tmp_path).namespace
    found["train"] = jo.pipelined(found["step"], donate_argnums=(0, 1))
    code = "\n".join(blocks("docs/inspect.md"))
    code = re.sub(r', target="\w+"', "", code).replace('seen.timeline.save("step.json")', "")
    before, measured = code.split("measured = ", 1)
    exec(before, found)
    plain, pipelined = ("measured = " + measured).split("carry, aux")
    found["step"] = jax.jit(found["step"], donate_argnums=(0, 1))
    for code in plain, "carry, aux" + pipelined:
        found |= {"params": Reader(tmp_path).params, "state": Reader(tmp_path).state, "measured": None}
        exec(code, found)
        assert found["measured"].steps == 3


def test_what_is_searched_for_in_troubleshooting_is_what_is_said(tmp_path):
    """The headings are parts of messages: of ours as the code has them, of jax's and XLA's where a test quotes them."""
    page = (ROOT / "docs/troubleshooting.md").read_text().split("## No message")[0]
    code = [path.read_text() for folder in ("jax_offload", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    literals = "".join("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)) for text in code)
    said = re.sub(r"\{[^{}]*\}", "", literals) + (ROOT / "docs/state.md").read_text()
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    others = "E1200", "Donation requested", "RESOURCE_EXHAUSTED", "PjRtBuffer's", "Unable to load"  # no CPU says these
    for heading in headings:
        parts = [part.strip(" `") for part in re.split(r"\.\.\.|`add`|'pinned_host'", heading)]
        assert heading.startswith(others) or all(part in said for part in parts), heading
    assert len(headings) > 15
    namespace = Reader(tmp_path).namespace
    run("docs/troubleshooting.md", namespace | {"step": jax.jit(namespace["step"])})
