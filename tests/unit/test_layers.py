"""The folders are layers: a module imports what is below it, and nothing above."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo

pytestmark = [pytest.mark.oldest("the stages, on jax's own jaxprs"), pytest.mark.daily("each is a module")]

PACKAGE = Path(__file__).parents[2] / "jax_offload"
# From the bottom up; folders beside each other import nothing of each other.
LAYERS = [
    ["_program"],
    ["_disk", "_schedule"],
    ["_state"],
    ["_emit"],
    ["_rewrite"],
    ["_host"],
    ["_step"],
    ["_look"],
    ["names"],
]
FLOOR = {folder: floor for floor, folders in enumerate(LAYERS) for folder in folders}


MODULES = {
    ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def layer(module):
    folder = module.partition(".")[0]
    return "names" if folder in ("", "_offload", "__main__", "types") else folder


@functools.cache
def imports(module):
    """The modules of the package that a module imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax_offload":
            base = node.module.removeprefix("jax_offload").removeprefix(".")
            inside = {f"{base}.{alias.name}".strip(".") for alias in node.names} & MODULES.keys()
            found |= inside or {base}
    return found - {""}


def test_every_module_is_in_a_layer():
    assert {layer(module) for module in MODULES} == FLOOR.keys()
    assert sum(len(imports(module)) for module in MODULES) > 100


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module):
    for imported in imports(module):
        if (ours := layer(module)) != (theirs := layer(imported)) and (ours, theirs) != ("_look", "names"):
            assert FLOOR[theirs] < FLOOR[ours], f"{module} imports {imported}"


def test_the_store_knows_nothing_of_jax():
    """So that whatever is held to be safe of it needs no jax to be tried."""
    assert "import jax" not in MODULES["_disk.store"].read_text()
    assert not imports("_disk.store")


def test_what_only_looks_is_imported_when_asked_for():
    code = (
        "import sys, jax_offload as jo; before = [m for m in sys.modules if m.endswith(('.inspection', '_look.plan'))];"
        "jo.chip; print(before)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_no_circles():
    order = TopologicalSorter({module: imports(module) for module in MODULES}).static_order()
    assert set(order) >= MODULES.keys() - {""}


_MODULES = r"^\s*(from|import) jax\.(_src|interpreters|extend\.mlir)"
# attributes of tracers, of their trace and of its equations; buffers have a parent too, which is their own
_TRACERS = (
    r"|\b(in_tracers|tracing_eqns|DynamicJaxprTracer|constvar_to_val)\b|(?<!self|lder)\.parent\b|[\"'](parent|val)[\"']"
)
# jax.Array has unsafe_buffer_pointer among its public methods
PRIVATE = re.compile(_MODULES + r"|_getframe|unsafe_(?!buffer_pointer)|\._trace\b" + _TRACERS, re.MULTILINE)


@pytest.mark.parametrize(
    ("what", "module"),
    [
        (PRIVATE, "_program.private"),  # what jax may move: behind named functions, with a table of what it is for
        # barriers are used in a few ways, and each way explains once what XLA does without it
        (re.compile(r"optimization_barrier\("), "_program.primitives"),
        # what reaches an offload otherwise than through its arguments, with the reasons
        (re.compile(r"ContextVar\("), "_state.arguments"),
    ],
)
def test_it_stands_in_one_module(what, module):
    assert {name for name, path in MODULES.items() if what.search(path.read_text())} == {module}


@pytest.mark.parametrize("moved", ["parent", "in_tracers", "val"])
def test_loud_where_jax_has_moved(moved, monkeypatch):
    """Without this an update under plain ``jit`` would run among the matmuls, and nobody would know."""
    has = hasattr
    monkeypatch.setattr("builtins.hasattr", lambda x, name: name != moved and has(x, name))
    params = jax.device_put({"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}, jax.devices()[0])
    tx = jo.offload(optax.adam(1e-2), min_bytes=0)

    def step(params, state, x):
        return tx.update(jax.grad(lambda p: (jnp.tanh(x @ p["a"]) @ p["b"]).sum())(params), state, params)

    with pytest.raises(RuntimeError, match=f"no {moved!r} in"):
        jax.jit(step).lower(params, tx.init(params), jnp.ones((4, 64)))
