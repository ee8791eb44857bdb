"""Leaves that are alike are one row, whose path can be read as theirs and as no other's."""

import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import ShapeDtypeStruct as S
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


def rows_of(params, **options):
    """The paths in the rows of a printed table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "9999")
        lines = str(jo.placement(jo.offload(optax.trace(0.9), min_bytes=0, **options), params)).splitlines()
    return [line.split()[-1] for line in lines if re.match(r"  +[\d.]+ +\d+ ", line)]


def nested(*keys):
    """Parameters by their keys, all alike."""
    tree = {}
    for *outer, last in keys:
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = S((8, 8), jnp.float32)
    return tree


def paths_of(path):
    """All that a row's path can be read as."""

    def several(text):
        names = []
        for part in text.split(","):
            first, _, last = part.partition("..")
            names += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)] if last else [part]
        return names

    pieces = re.split(r"\{(.*?)\}", path)
    choices = [several(piece) if k % 2 else [piece] for k, piece in enumerate(pieces)]
    return {"".join(chosen) for chosen in itertools.product(*choices)}


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ([(f"layers_{i:02}", "w") for i in range(24)], ["['layers_{00..23}']['w']"]),
        ([("a0",), ("a1",), ("a3",), ("b0",)], ["['a{0,1,3}']", "['b0']"]),
        ([("a0", "q"), ("a0", "k")], ["['a0']['k']", "['a0']['q']"]),  # names are no numbers
        ([(f"a{i}", f"b{j}") for i in range(3) for j in range(4)], ["['a{0..2}']['b{0..3}']"]),
        ([("a0", "b0"), ("a0", "b1"), ("a1", "b0")], ["['a{0,1}']['b0']", "['a0']['b1']"]),
        ([("w",)], ["['w']"]),
    ],
)
def test_what_is_one_row(keys, rows):
    assert rows_of(nested(*keys)) == [f".trace{row}" for row in rows]


def test_a_state_that_is_one_array_and_none():
    assert (rows_of(S((8, 8), jnp.float32)), rows_of({})) == ([".trace"], [])


@settings(max_examples=20, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1))
def test_a_rows_path_is_read_as_its_leaves(chosen):
    found = rows_of(nested(*((f"layers_{i:02}", f"block{j}") for i, j in chosen)))
    leaves = [f".trace['layers_{i:02}']['block{j}']" for i, j in chosen]
    assert sorted(itertools.chain.from_iterable(map(paths_of, found))) == sorted(leaves)


def test_what_is_not_alike_stays_apart():
    """Another shape, type, sharding, memory: and the largest come first, then in order."""
    mesh = jax.make_mesh((8,), ("x",))
    one, other = (S((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))) for spec in ((), ("x",)))
    alike = S((8, 8), jnp.float32)
    for second in S((4, 4), jnp.float32), S((8, 8), jnp.bfloat16):
        assert rows_of({"a0": alike, "a1": second}) == [".trace['a0']", ".trace['a1']"]
        assert rows_of({"a0": second, "a1": alike}) == [".trace['a1']", ".trace['a0']"]
    assert len(rows_of({"a0": one, "a1": other})) == 2 > len(rows_of({"a0": one, "a1": one}))
    assert len(rows_of({"a0": alike, "a1": alike}, select="a0")) == 2


PARAMS = {f"layers_{i:02}": {"kernel_of_the_attention": S((512, 512), jnp.float32)} for i in range(100)}


@pytest.mark.parametrize("columns", [80, 132])
def test_a_deep_model_fits_a_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    params = {"a_long_name_for_what_stands_around_all_of_it": {"and_another_inside_of_it": PARAMS}}
    table = jo.placement(jo.offload(optax.adamw(1e-3), fraction=0.5), params)
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= columns and len(lines) < 20
    assert "[0].{mu,nu}['a_long_name" in "".join(line.strip() for line in lines)
    assert repr(table) == "Placement(201 leaves: 100.00 MiB in pinned_host, 100.00 MiB on the device)"
