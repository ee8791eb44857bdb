"""Leaves that are alike are one row, whose path can be read as theirs and as no other's."""

import dataclasses
import itertools
import json
import re

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import ShapeDtypeStruct as S

import jax_offload as jo
from jax_offload._placement.placement import unmanaged
from jax_offload._report.printed import folded

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

LEAF = dataclasses.replace(unmanaged(S((8, 8), jnp.float32)), host=True)


def leaves(*paths, **changed):
    return [dataclasses.replace(LEAF, path=path, **changed) for path in paths]


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
    ("paths", "rows"),
    [
        (
            [f"[0].{moment}['layers_{i:02}']['w']" for moment in ("mu", "nu") for i in range(24)],
            ["[0].{mu,nu}['layers_{00..23}']['w']"],
        ),
        (["['a0']", "['a1']", "['a3']", "['b0']"], ["['a{0,1,3}']", "['b0']"]),
        (["['a0']['q']", "['a0']['k']"], ["['a0']['q']", "['a0']['k']"]),  # names are no numbers
        ([f"['a{i}']['b{j}']" for i in range(3) for j in range(4)], ["['a{0..2}']['b{0..3}']"]),
        (["['a0']['b0']", "['a0']['b1']", "['a1']['b0']"], ["['a{0,1}']['b0']", "['a0']['b1']"]),
        (["['w']"], ["['w']"]),
        ([""], [""]),  # a state that is one array
        ([], []),
    ],
)
def test_what_is_one_row(paths, rows):
    assert [row.path for row in folded(leaves(*paths))] == rows


@given(st.sets(st.tuples(st.sampled_from(["mu", "nu"]), st.integers(0, 12), st.integers(0, 3)), min_size=1))
def test_a_rows_path_is_read_as_its_leaves(chosen):
    found = folded(leaves(*(f"[0].{m}['layers_{i:02}'].blocks[{j}]" for m, i, j in sorted(chosen))))
    assert sum(len(row.leaves) for row in found) == len(chosen)
    for row in found:
        assert paths_of(row.path) == {leaf.path for leaf in row.leaves}


OTHER = {"shape": (4, 4), "dtype": jnp.dtype(jnp.int8), "host": False, "why": "rank 0", "streams": "whole"}


@pytest.mark.parametrize(("field", "value"), [*OTHER.items(), ("sharding", "P('x')")])
def test_what_is_not_alike_stays_apart(field, value):
    assert len(folded([*leaves("['a0']"), *leaves("['a1']", **{field: value})])) == 2


def test_the_largest_first_and_then_in_order():
    small, large = leaves("['a']", "['b']"), leaves("['c']", nbytes=2 * LEAF.nbytes)
    assert [row.path for row in folded([*small, *large])] == ["['c']", "['a']", "['b']"]


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


def test_a_table_as_a_dictionary_and_as_html():
    table = jo.placement(jo.offload(optax.adamw(1e-3)), {"<w>": S((512, 512), jnp.float32)})
    found = json.loads(table.to_json())
    assert found == table.to_dict() and found["host_bytes"] == 2 * 4 * 512**2
    assert {leaf["path"]: leaf["host"] for leaf in found["leaves"]} == {leaf.path: leaf.host for leaf in table.leaves}
    assert found["leaves"][1]["shape"] == [512, 512] and found["windows"][0]["nbytes"] == table.windows[0].nbytes
    html = table._repr_html_()
    heading = "pinned_host, 2.00 MiB: eligible; 4 chunks of axis 0, 2 leaves together"
    assert html.count("<table>") == 1 and f">{heading}</th></tr>" in html
    assert 'nowrap">512×512</td>' in html and 'nowrap">[0]' not in html  # a path may be broken, and nothing else
    assert "&lt;w&gt;" in html and "<w>" not in html and "<p>optimizer state: 2.00 MiB" in html
