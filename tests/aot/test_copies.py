"""Rows of host leaves are moved by the GPU's copy engines, in every loop, and not by a kernel that reads host memory.

XLA notes a copy of rows as ``dynamic_slice_config``; a slice of host memory without one becomes a kernel. A compiled
program with kernels looks as well hidden as one with copies, and took twice as long on an H100: see notes/xla.md.
"""

import re

import jax
import optax
import pytest

import jax_offload as jo
from tests.aot.compiled import CLIP, OFFLOAD, Row, jitted
from tests.aot.harness import H200, array, require, scheduled
from tests.aot.model import loss
from tests.support.steps import step_of

LAYERS, WIDTH, TOKENS = 6, 2048, 4096


def moves_in_loops(text):
    """Those copies between memories that start in the body of a loop, each with all that it calls."""
    parts = {m[1]: m[2] for m in re.finditer(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)}

    def called(line):
        inner = [parts[name] for name in re.findall(r"calls=%([\w.-]+)", line)]
        return "\n".join([line, *(called(each) for each in inner)])

    bodies = {parts[name] for name in re.findall(r"body=%([\w.-]+)", text)}
    lines = [line for body in bodies for line in body.splitlines() if "S(5)" in line]
    return [called(line) for line in lines if "slice-start" in line.split(" = ")[0]]


@pytest.mark.parametrize("way", ["jo.jit", "pipelined", "jit"])
def test_rows_are_copied_and_not_read_by_a_kernel(way):
    require(H200)
    step, args = jitted(Row("12x4096^2 scanned", TOKENS, CLIP if way == "pipelined" else OFFLOAD, way))
    step, args, *_ = step.turned(*args) if way == "pipelined" else (step, args)
    moves = moves_in_loops(scheduled(step, args))
    assert len(moves) == 4  # two moments, each way
    assert all("dynamic_slice_config" in move for move in moves)


def peak(step, args, **options):
    return jo.inspect(jo.jit(step, donate_argnums=(0, 1), **options), *args, target=H200).peak


@pytest.mark.parametrize(("unrolled", "concurrent"), [(False, True), (True, False)])
def test_graphs_are_concurrent_where_one_scan_moves_the_state(unrolled, concurrent):
    """The peaks with and without the option differ, and the step's own peak equals one of them."""
    require(H200)
    if jax.__version_info__ < (0, 11) and not unrolled:
        pytest.skip("the XLA of jax 0.10 needs the same memory with and without the option")
    tx = jo.offload(optax.adamw(1e-3))
    leaf = array(WIDTH, WIDTH)
    params = {f"w{k}": leaf for k in range(LAYERS)} if unrolled else {"w": array(LAYERS, WIDTH, WIDTH)}
    args = params, jo.abstract_state(tx, params), array(TOKENS, WIDTH)
    step = step_of(tx, loss=loss)
    with_it, without = (
        peak(step, args, compiler_options=jo.compiler_options("cuda", in_scan=x)) for x in (True, False)
    )
    assert with_it > without
    assert peak(step, args) == (with_it if concurrent else without)
