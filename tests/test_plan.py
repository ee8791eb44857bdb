"""The plan is the program: a reader that knows nothing of plans counts what the emitted equations move."""

import dataclasses
import itertools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._base.jaxprs import without_dead_code
from jax_offload._emit import hoisted
from jax_offload._emit.find import emitted, updates_in
from jax_offload._plan.plan import Chunked
from tests.support.optimizers import TABLE, network
from tests.support.rows import rows
from tests.support.steps import MODELS, Case, batch, scans

HOST = jax.memory.Space.Host


@dataclasses.dataclass
class Moved:
    """Copies between the memories that a program makes when it runs, and their bytes."""

    loads: int = 0
    stores: int = 0
    loaded: int = 0
    stored: int = 0


def read(jaxpr, times=1, moved=None):
    """A scan runs as often as it says. A while loop, of which nobody knows, runs once here: ours do."""
    moved = moved or Moved()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            for before, after in zip(eqn.invars, eqn.outvars, strict=True):
                spaces = before.aval.memory_space == HOST, after.aval.memory_space == HOST
                size = after.aval.size * after.aval.dtype.itemsize
                if spaces == (True, False):
                    moved.loads, moved.loaded = moved.loads + times, moved.loaded + times * size
                elif spaces == (False, True):
                    moved.stores, moved.stored = moved.stores + times, moved.stored + times * size
        for inner in jex.jaxprs_in_params(eqn.params):
            read(getattr(inner, "jaxpr", inner), times * eqn.params.get("length", 1), moved)
    return moved


def planned(plans):
    found = Moved(loaded=sum(each.loaded_bytes for each in plans), stored=sum(each.stored_bytes for each in plans))
    for each in plans:
        for of_pass in each.passes:
            found.stores += len(of_pass.prelude.stores)
            for p in of_pass.slices:
                found.loads += p.loads
                found.stores += p.stores
    return found


STATEFUL = [name for name, entry in TABLE.items() if entry.state]


# Daily every optimizer once, in chunks; in each way some that differ in their passes, branches and rows.
_ALWAYS = ("adamw", "adafactor:factored", "MultiSteps", "lamb", "prodigy", "muon", "lion", "apply_if_finite")


@pytest.mark.oldest("the plan that is printed is the one that is emitted", only=["a*"])
@pytest.mark.parametrize(
    ("name", "window", "through"),
    rows(
        itertools.product(STATEFUL, (None, 400), ("update", "update_params")),
        "every optimizer in every way",
        daily=lambda name, window, through: name in _ALWAYS or (window, through) == (400, "update_params"),
    ),
)
def test_the_plan_is_what_is_emitted(name, window, through):
    entry = TABLE[name]
    tx = jo.offload(entry.make(), min_bytes=0, window=window)
    given = jax.tree.map(lambda p: p * (1 + 0.5j), network(jnp.float32)) if entry.complex else network(jnp.float32)
    params = jax.device_put(entry.params(given), jax.devices()[0])
    state = tx.init(params)

    def step(state, params):
        grads = entry.grads(jax.tree.map(jnp.cos, params))
        if entry.per_example:
            grads = jax.tree.map(lambda g: jnp.stack([g, -g]), grads)
        loss = lambda params: entry.loss(entry.network(params))  # noqa: E731
        extra = {"value": loss(params), "grad": grads, "value_fn": loss, "obj_fn": loss}
        extra = {name: extra[name] for name in entry.extra}
        if through == "update_params":
            return jo.update_params(tx, grads, state, params, **extra)
        return tx.update(grads, state, params, **extra)

    jaxpr = jax.make_jaxpr(step)(state, params)
    plans = [each.update.plan for each in updates_in(jaxpr)]
    assert len(plans) == 1
    assert read(emitted(jaxpr).jaxpr) == planned(plans)
    assert planned(plans).loads + planned(plans).stores > 0


@pytest.mark.parametrize(("shape", "window"), [((300, 64), 4000), ((300, 64), 50_000), ((2, 301, 24), 4000)])
def test_rows_that_fill_no_tile_are_stored_as_the_plan_says(shape, window):
    """What is left of them, and chunks of fewer than a tile has."""
    params = jax.device_put({"w": jnp.ones(shape)}, jax.devices()[0])
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, window=window)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    plans = [each.update.plan for each in updates_in(jaxpr)]
    assert any(p.in_chunks for each in plans for of_pass in each.passes for p in of_pass.slices)
    assert read(emitted(jaxpr).jaxpr) == planned(plans)


def test_the_reader_can_tell(monkeypatch):
    """That it would see a leaf that is loaded twice, and a chunk more."""
    params = jax.device_put(network(jnp.float32), jax.devices()[0])
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, window=400)
    state = tx.init(params)
    jaxpr = jax.make_jaxpr(tx.update)(params, state, params)
    plans = [each.update.plan for each in updates_in(jaxpr)]
    twice = jax.make_jaxpr(lambda g, s, p: (tx.update(g, s, p), jo.to_device(s)))(params, state, params)
    assert read(emitted(twice).jaxpr) != planned(plans) == read(emitted(jaxpr).jaxpr)
    monkeypatch.setattr(Chunked, "count", property(lambda self: 9))
    assert read(emitted(jaxpr).jaxpr) != planned(plans)


def scans_that_move(jaxpr):
    """Those that copy between the memories, with the jaxpr in which they stand."""
    for eqn in jaxpr.eqns:
        inner = [getattr(each, "jaxpr", each) for each in jex.jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "scan" and read(inner[0]) != Moved():
            yield eqn, jaxpr
        else:
            for each in inner:
                yield from scans_that_move(each)


@pytest.mark.oldest("the same of an iteration; effects")
@pytest.mark.parametrize("ahead", [False, True])
def test_an_iteration_moves_a_row_of_every_leaf(ahead, monkeypatch):
    """Each is loaded once an iteration and stored once, but for what the first one finds and the last one leaves."""
    monkeypatch.setattr(hoisted, "_on_a_cpu", lambda run, x, _: x)  # a CPU reads the rows to be overwritten first
    case = Case("bias, embedding, head")
    model, tx = MODELS[case.model](), case.tx()
    params, x = model.init(case.dtype), jax.device_put(batch(0, model.width), jax.devices()[0])
    args, step = (params, tx.init(params), x), case.step(tx, model.loss)
    if ahead:
        step, args, _ = jo.pipelined(step, donate_argnames=("params", "state")).turned(*args)
    else:
        step = jo.jit(step)
    (plan,), ((scan, around),) = scans(step, *args), scans_that_move(emitted(step.trace(*args).jaxpr).jaxpr)

    body, _ = without_dead_code(scan.params["jaxpr"].jaxpr)
    slices, count = [p.slice for p in plan.planned], scan.params["length"]
    stores = [v for s in slices for v in s.stores]
    row = Moved(
        sum(len(s.loads) for s in slices), len(stores),
        sum(s.loaded_bytes for s in slices) // count, sum(v.aval.size * v.aval.dtype.itemsize for v in stores) // count,
    )  # fmt: skip
    assert {(p.transfer.count, p.transfer.ahead) for p in plan.planned} == {(count, ahead)}
    assert row.loads > 2 and read(body) == row

    beside = [eqn for eqn in around.eqns if eqn is not scan]
    outside = read(around.replace(eqns=beside))
    assert outside == (dataclasses.replace(row, stores=0, stored=0) if ahead else row)


@pytest.mark.oldest("the same of an iteration; effects")
@pytest.mark.parametrize("window", [None, 2**12])
@pytest.mark.parametrize("of_host", [True, False])
def test_an_effect_happens_once(of_host, window):
    """In a branch that makes an array and a number: it must not stand in two slices, nor in two passes."""
    calls = []

    def update(updates, state, params=None):
        def new(m):
            jax.debug.callback(lambda: calls.append(1))
            return m * 2, (m * m).sum()

        given = state["w"] + updates["w"] if of_host else updates["w"]
        x, n = jax.lax.cond(updates["w"][0, 0] > -9, new, lambda m: (m, 1.0), given)
        return {"w": x / n + state["w"], "v": state["v"] / n}, jax.tree.map(jnp.add, updates, state)

    inner = optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), update)
    params = jax.device_put({"w": jnp.ones((64, 8)), "v": jnp.ones((64, 8, 8))}, jax.devices()[0])
    tx = jo.offload(inner, min_bytes=0, window=window)
    got = jax.jit(tx.update)(params, tx.init(params), params)
    want = jax.jit(inner.update)(params, inner.init(params), params)
    jax.effects_barrier()
    assert len(calls) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
