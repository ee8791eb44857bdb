"""Every way of donating and returning, in plain ``jax.jit`` on the device: values, memory kinds, buffers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

import jax_offload as jo
from benchmarks.parts import where
from tests.support.donations import CASES, STEPS, arrays, buffers, make

# A wrong reuse of a buffer may end the process: then a new one runs the rest.
ALONE = False
TIMED = False
VALUES = 1e-5  # the relative difference of a leaf: steps with and without donation are two programs
FRACTIONS = (1.0, 0.5)


def cases(toy: bool) -> list[str]:
    return [f"{case}; fraction {fraction}" for fraction in FRACTIONS for case in CASES]


def differences(a: Any, b: Any) -> dict[str, float]:
    """Map each path to the largest difference, divided by the largest number of ``b``; 0 if both leaves are 0."""

    def one(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.abs(x - y).max() / max(float(np.abs(y).max()), 1e-30))

    flat = tree_flatten_with_path((a, b))[0]
    half = len(flat) // 2
    pairs = zip(flat[:half], flat[half:], strict=True)
    return {keystr(path[1:], simple=True, separator="/"): one(x, y) for (path, x), (_, y) in pairs}


def fetched(tree: Any) -> Any:
    return jax.device_get(jo.to_device(tree))


def run(name: str, toy: bool) -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):  # two programs may multiply differently if fewer bits are allowed
        return compared(name)


def compared(name: str) -> dict[str, Any]:
    """Compare some steps with donation with the same steps without."""
    case, fraction = name.split("; fraction ")
    donate = CASES[case][1]
    tx = jo.offload(optax.adam(1e-2), fraction=float(fraction), min_bytes=0)
    step, args, following = make(case, tx)
    plain, expected = jax.jit(step), []
    for _ in range(STEPS):
        out = plain(*args)
        expected.append((fetched(out), where.kinds(out)))
        args = following(args, out)

    step, args, following = make(case, tx)  # in buffers of its own
    donating = jax.jit(step, donate_argnums=donate)
    wrong, worst, reused, kinds = [], 0.0, [], {}
    for i, (values, places) in enumerate(expected):
        given = arrays([args[k] for k in np.atleast_1d(donate)])
        out = donating(*args)
        kinds, found = where.kinds(out), differences(fetched(out), values)
        worst = max([worst, *found.values()])
        at = f"step {i}: "
        wrong += [f"{at}{path} is {x:.1e} apart" for path, x in found.items() if not x <= VALUES]
        wrong += [f"{at}{k} is in {kinds[k]}, undonated in {places[k]}" for k in kinds if kinds[k] != places[k]]
        wrong += [f"{at}one address, two memories: {x}" for x in where.shared((out, jax.live_arrays()))]
        gone, could = sum(x.is_deleted() for x in given), (buffers(given) & buffers(out)).total()
        reused.append([gone, could])
        if gone < could:
            wrong.append(f"{at}{gone} buffers were given up where {could} could be")
        args = following(args, out)
    return {"wrong": wrong, "apart": worst, "given_up_of_possible": reused, "memory_kinds": kinds}
