"""The Python of README and docs runs as it is printed: a page's blocks one after the other, in one namespace.

The README's quick start needs nothing but itself. The pages speak of a model that the reader has; here it is this one.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_offload as jo
from jax_offload._base.on_disk import OnDisk

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ELSEWHERE = {
    "trainers.md": "make trainers runs them",
    "multihost.md": "tests/test_multihost.py runs its example",
    "inspect.md": "compiles for a chip that is not there: tests/analysis",
}


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def run(page: str, namespace: dict[str, Any]) -> dict[str, Any]:
    for k, block in enumerate(blocks(page)):
        exec(compile(block, f"{page}, block {k}", "exec"), namespace)
    return namespace


def loss(params, batch):
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch.astype(params["layers"].dtype), params["layers"])[0]
    return (x.astype(jnp.float32) ** 2).mean()


class Reader:
    """What the reader of a page has already."""

    def __init__(self, folder: Path, dtype: Any = jnp.float32) -> None:
        w = jax.random.normal(jax.random.key(0), (4, 128, 128), dtype) / 12
        self.params = jax.device_put({"layers": w}, jax.devices()[0])
        self.batch = jax.random.normal(jax.random.key(1), (8, 128))
        self.inner = optax.adamw(1e-3)
        self.tx = jo.offload(self.inner, min_bytes=0)
        self.state = self.tx.init(self.params)
        self.grads = jax.grad(loss)(self.params, self.batch)
        self.folder = folder

    @property
    def namespace(self) -> dict[str, Any]:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.params)
        own = {name: getattr(self, name) for name in ("params", "batch", "inner", "tx", "state", "grads", "folder")}
        common = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "jo": jo, "partial": partial, "loss": loss}
        tree = {"params": self.params, "opt_state": self.state}
        modules = {"dataclasses": dataclasses, "pickle": pickle}
        found = common | own | modules | {"shapes": shapes, "tree": tree, "i": 0}

        def step(params, state, batch):
            updates, state = found["tx"].update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        found["step"] = step
        return found


def test_code_fits_the_page():
    """The site shows 96 characters of a line, and the rest under the icon that copies it; messages wrap."""
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    code = {page.name: fence.findall(page.read_text()) for page in (ROOT / "docs").glob("*.md")}
    lines = [(name, line) for name, found in code.items() for kind, text in found if kind != "text"
             for line in text.splitlines()]  # fmt: skip
    assert len(lines) > 200
    assert not [(name, line) for name, line in lines if len(line) > 96]


def test_the_readme():
    found = run("README.md", {})
    assert found["state"][0].mu["layers"].sharding.memory_kind == "pinned_host"
    assert float(found["value"]) >= 0 and int(found["state"][0].count) == 3


def test_recipes(tmp_path):
    found = run("docs/recipes.md", Reader(tmp_path).namespace)
    for state in (found["train_state"].opt_state, nnx.state(found["optimizer"])["opt_state"]):
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.nbytes >= 2**16}
        assert kinds == {"pinned_host"}
    assert jax.tree.leaves(found["average"])[0].sharding.memory_kind == "device"


def test_which_option_when(tmp_path):
    found = run("docs/options.md", Reader(tmp_path).namespace)
    assert found["state"][1][0].mu["layers"].sharding.memory_kind == "pinned_host"


def test_host_or_device(tmp_path):
    found = run("docs/host_or_device.md", Reader(tmp_path).namespace)
    state = found["tx"].init(found["params"])
    _, state = found["step"](found["params"], state, found["batch"])
    assert state[0].mu["layers"].sharding.memory_kind == "pinned_host"


def test_on_disk(tmp_path):
    """Twice, the second time from the last commit, and then into memory."""
    *page, moves = blocks("docs/disk.md")
    for step in (3, 6):
        found = Reader(tmp_path).namespace
        exec("\n".join(page).replace("/nvme/run", str(tmp_path / "run")), found)
        assert isinstance(found["state"][0].mu["layers"], OnDisk) and found["disk"].last_commit == step
        if step == 3:
            found["disk"].close()
    with ocp.CheckpointManager(tmp_path / "orbax") as found["manager"]:
        exec(moves, found)
    for state in found["new_state"], found["tree"]["opt_state"]:
        assert state[0].mu["layers"].sharding.memory_kind == "pinned_host"
    found["disk"].close()


def test_checkpoints(tmp_path):
    namespace = Reader(tmp_path / "checkpoints").namespace
    *others, weights, part = blocks("docs/checkpoints.md")
    for i, block in enumerate(others):
        exec(block, namespace | {"i": i} if i else namespace)
    manager = namespace["ocp"].CheckpointManager
    with manager(tmp_path / "weights") as namespace["manager"]:
        namespace["manager"].save(0, args=jo.save_args({"params": namespace["params"]}))
        exec(weights, namespace)
    with manager(tmp_path / "checkpoints") as namespace["manager"]:
        exec(part, namespace | {"step": 0})
    assert namespace["state"][0].mu["layers"].sharding.memory_kind == "pinned_host"


def test_precision(tmp_path):
    given = Reader(tmp_path, jnp.bfloat16)
    first, *others = blocks("docs/precision.md")
    namespace = given.namespace
    exec(first.split("\n")[0], namespace)
    namespace["state"] = namespace["tx"].init(given.params)
    exec(first.split("\n")[1], namespace)
    assert namespace["params"]["layers"].dtype == jnp.bfloat16
    plain = Reader(tmp_path).namespace
    from flax.training.dynamic_scale import DynamicScale

    plain |= {"scale": DynamicScale(), "loss_fn": loss, "old_tx": plain["tx"], "new_tx": plain["tx"]}
    for block in others:
        exec(block, plain)
        if "storage=" in block:
            plain["new_tx"] = plain["tx"]
            plain["tx"] = plain["old_tx"]
        if "from_plain" in block:
            plain["tx"] = plain["new_tx"]
    assert plain["state"].inner_state[0].mu["layers"].values.sharding.memory_kind == "pinned_host"


def test_sharding(tmp_path):
    namespace = Reader(tmp_path).namespace
    namespace["params_at"] = jax.tree.map(lambda x: x.sharding, namespace["params"])
    assert jo.placement(run("docs/sharding.md", namespace | {"inner": optax.adamw(1e-3)})["tx"], {"w": jnp.ones(4)})


def test_should_i_offload(tmp_path, capsys):
    run("docs/should_i_offload.md", Reader(tmp_path).namespace)
    assert "resident" in capsys.readouterr().out


def test_state(tmp_path):
    given = Reader(tmp_path)
    (tmp_path / "state.pickle").write_bytes(pickle.dumps(jax.device_get(given.state)))
    with (tmp_path / "state.pickle").open("rb") as file:
        found = run("docs/state.md", given.namespace | {"file": file})
    assert found["state"][0].mu["layers"].sharding.memory_kind == "pinned_host"


def test_the_front_page(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = run("docs/index.md", {})
    assert found["state"][0].mu["layers"].sharding.memory_kind == "pinned_host"
    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)[1]
    printed = capsys.readouterr().out
    assert shown in printed and "resident" in printed


def test_what_is_searched_for_in_troubleshooting_is_what_is_said(tmp_path):
    """The headings are parts of messages: of ours as the code has them, of jax's and XLA's where a test quotes them."""
    page = (ROOT / "docs/troubleshooting.md").read_text().split("## No message")[0]
    code = [path.read_text() for folder in ("jax_offload", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    literals = "".join("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)) for text in code)
    said = re.sub(r"\{[^{}]*\}", "", literals) + (ROOT / "docs/state.md").read_text()
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    others = "E1200", "Donation requested", "RESOURCE_EXHAUSTED", "PjRtBuffer's"  # XLA's, which no CPU says
    for heading in headings:
        parts = [part.strip(" `") for part in re.split(r"\.\.\.|`add`|'pinned_host'", heading)]
        assert heading.startswith(others) or all(part in said for part in parts), heading
    assert len(headings) > 15
    namespace = Reader(tmp_path).namespace
    run("docs/troubleshooting.md", namespace | {"step": jax.jit(namespace["step"])})


def test_no_page_is_left_out():
    here = Path(__file__).read_text()
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if blocks(f"docs/{path.name}")]
    assert pages and all(f"docs/{name}" in here or name in ELSEWHERE for name in pages)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page):
    """To files of the repository, and to headings in them."""
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        name, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = folder / name if name else ROOT / page
        assert target.exists(), link
        slugs = {
            re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in target.read_text().splitlines()
            if line.startswith("#")
        } if heading else set()  # fmt: skip
        assert not heading or heading in slugs, link


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
