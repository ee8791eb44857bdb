"""The plans of a dozen optimizers, printed: what a change does to any of them is in its diff.

``UPDATE_PLANS=1 python -m pytest tests/unit/test_plan_snapshots.py`` writes them anew, for the newest jax and the
oldest alike.
"""

import os
from pathlib import Path

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from jax_offload._emit.find import updates_in

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

PLANS = Path(__file__).parent / "plans"


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


PARAMS = {
    "embed": shape(4096, 64),
    "layers": {"b": shape(64), "w": shape(6, 64, 256), "w_out": shape(6, 256, 64)},
    "head": shape(64, 4096),
    "norm": shape(6, 64),
}
HALF = jax.tree.map(lambda x: shape(*x.shape, dtype=jnp.bfloat16), PARAMS)
GIVEN = {"window": 2**18}


def matrices(params):
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim >= 2 else "rest", params)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
# name -> transformation, parameters
CASES = {
    "adamw": (jo.offload(optax.adamw(1e-3), min_bytes=0), PARAMS),
    "adamw in chunks": (jo.offload(optax.adamw(1e-3), min_bytes=0, **GIVEN), PARAMS),
    "adam with clip": (jo.offload(CLIPPED, min_bytes=0, **GIVEN), PARAMS),
    "adafactor": (jo.offload(optax.adafactor(1e-3, 32), min_bytes=0, **GIVEN), PARAMS),
    "lamb": (jo.offload(optax.lamb(1e-3), min_bytes=0, **GIVEN), PARAMS),
    "lion": (jo.offload(optax.lion(1e-3), min_bytes=0, **GIVEN), PARAMS),
    "sgd with momentum": (jo.offload(optax.sgd(1e-3, momentum=0.9), order=["layers", "head"], **GIVEN), PARAMS),
    "muon": (jo.offload(optax.contrib.muon(1e-3), min_bytes=2**10, **GIVEN), PARAMS),
    "prodigy": (jo.offload(optax.contrib.prodigy(1.0), min_bytes=0, **GIVEN), PARAMS),
    "schedule_free": (jo.offload(optax.contrib.schedule_free_adamw(1e-3), min_bytes=0, **GIVEN), PARAMS),
    "MultiSteps": (jo.offload(optax.MultiSteps(CLIPPED, 2), min_bytes=0, **GIVEN), PARAMS),
    "partition": (
        optax.partition(
            {
                "matrix": jo.offload(optax.adam(1e-3), min_bytes=0, **GIVEN),
                "rest": jo.offload(optax.lion(1e-3), min_bytes=0, window=2**20),
            },
            labels,
        ),
        PARAMS,
    ),
    "masked": (jo.offload(optax.masked(optax.adamw(1e-3), matrices), min_bytes=0, **GIVEN), PARAMS),
    "masters": (jo.offload(jo.with_master_params(optax.adamw(1e-3)), min_bytes=0, **GIVEN), HALF),
    "int8": (
        jo.offload(optax.adamw(1e-3), min_bytes=0, storage={"mu": "int8", "nu": "uint8"}, **GIVEN),
        PARAMS,
    ),
}


def plan_of(tx, params):
    """What the plan of one update says, in the order in which it runs."""
    lines: list[str] = []

    def update(grads, params):
        state = tx.init(params)
        jo.update_params(tx, grads, state, params)
        return state

    traced, state = jax.make_jaxpr(update, return_shape=True)(params, params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    names = {v: path for v, path in zip(traced.jaxpr.outvars, paths, strict=True) if not isinstance(v, jex.Literal)}
    for each in updates_in(traced):
        names_of = iter([[names[v] for v in of] for of, _ in each.loads])
        for number, of_pass in enumerate(each.update.plan.passes, 1):
            lines.append(f"pass {number}{', in a loop of its own' if of_pass.in_own_loop else ''}")
            lines += [f"  {said}" for said in [str(of_pass.serial or "")] if said]
            for k, p in enumerate(of_pass.slices):
                lines.append(f"  {k}: {' + '.join(next(names_of))}")
                waits = [f"{p.transfer}, window of {p.window.nbytes} bytes ({p.window.why})"]
                waits += [f"once {p.once_stored} is stored"] if p.once_stored >= 0 else []
                waits += [f"once the gradient of {p.once_produced} is made"] if p.once_produced is not None else []
                lines.append(f"     {', '.join(waits)}; stores {len(p.slice.stores)}")
        lines.append(f"loads {each.update.plan.loaded_bytes} bytes, stores {each.update.plan.stored_bytes}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_on_record(name):
    found, path = plan_of(*CASES[name]), PLANS / f"{name.replace(' ', '_')}.txt"
    if os.environ.get("UPDATE_PLANS"):
        path.write_text(found)
    assert found == path.read_text(), f"the plan of {name} is another one; UPDATE_PLANS=1 records it"


def test_no_record_is_left_over():
    assert {path.stem for path in PLANS.glob("*.txt")} == {name.replace(" ", "_") for name in CASES}
