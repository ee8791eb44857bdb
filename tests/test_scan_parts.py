"""A backward scan over layers in several programs: the first layers are updated while it goes on.

Another CPU device stands in the place of the CPU backend beside an accelerator.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._base.memory import is_host_aval
from jax_offload._drive import by_parts, loops, row_groups, run, scan_parts, segments, stages
from jax_offload._drive.cores import Cores
from jax_offload._drive.pieces import InTurn, Joined
from tests.support.optimizers import assert_same, copied
from tests.support.slow import slow

pytestmark = [
    pytest.mark.skipif(not loops.has_numba(), reason="numba is not installed (extra cores)"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
LAYERS, WIDTH = 4, 128  # a row of the gradient is large enough to go down by itself
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.setattr(run, "cores_beside", lambda devices: Cores(jax.devices()[1]))
    monkeypatch.setattr(row_groups, "GROUP_BYTES", 2 * 4 * WIDTH * WIDTH)  # AdamW's state of a layer


@pytest.fixture
def uncut(monkeypatch):
    """Lets a test run the same step in one program."""
    return lambda: monkeypatch.setattr(run, "in_segments", lambda step, *_: (step, "a test"))


def model(layers=LAYERS, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"w": (layers, WIDTH, WIDTH), "b": (layers, WIDTH)}
    tree = {name: jax.random.normal(key, shape) / 12 for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    ends = {"embed": (32, WIDTH), "head": (WIDTH, 4 * WIDTH)}  # of which the head is large
    tree |= {
        name: jax.random.normal(key, shape) / 12 for (name, shape), key in zip(ends.items(), keys[2:], strict=False)
    }
    return jax.device_put(jax.tree.map(lambda x: x.astype(dtype), tree), jax.devices()[0])


def loss_of(reverse=False, unroll=1, cast=None, remat=False):
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]), x.mean()

    def loss(params, x):
        x = x @ params["embed"].T @ params["embed"]
        layers = {name: params[name] for name in ("w", "b")}
        layers = layers if cast is None else jax.tree.map(lambda w: w.astype(cast), layers)
        one = jax.checkpoint(layer) if remat else layer
        x, means = jax.lax.scan(one, x.astype(layers["w"].dtype), layers, reverse=reverse, unroll=unroll)
        return ((x @ params["head"]).astype(jnp.float32) ** 2).mean() + means.astype(jnp.float32).sum()

    return loss


def step_of(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return *jo.update_params(tx, grads, state, params), value

    return step


def offload(inner=ADAMW, update_on="host"):
    return jo.offload(inner, min_bytes=512, update_on=update_on)


def tasks_of(step):
    ((driven, _),) = step._driven._programs.values()
    return driven, [task for task, _ in driven._tasks]


def joined_of(tasks):
    return [piece for task in tasks for piece in task.stage.pieces if isinstance(piece, Joined)]


CASES = {
    "plain": {},
    "in reverse": {"reverse": True},
    "unrolled twice": {"unroll": 2},
    "checkpointed": {"remat": True},
    "five layers": {"layers": 5},
    "bfloat16 in the pass": {"cast": jnp.bfloat16},
    "not donated": {"donate": ()},
    "masters": {"inner": jo.with_master_params(ADAMW), "dtype": jnp.bfloat16},
    "some stay on the device": {"update_on": {"w": "host", "b": "device", "embed": "host", "head": "device"}},
}


@pytest.mark.parametrize("case", CASES)
def test_values(case, uncut, monkeypatch):
    """Of two steps, bit for bit those of one program, and plain optax's; sharding and memory kinds; what is donated."""
    if case != "checkpointed":  # parts of one layer
        monkeypatch.setattr(scan_parts, "LEAST", 0.15)
    of = dict(CASES[case])
    inner, dtype, donate = of.pop("inner", ADAMW), of.pop("dtype", jnp.float32), of.pop("donate", (0, 1))
    params, tx = model(of.pop("layers", LAYERS), dtype), offload(inner, of.pop("update_on", "host"))
    loss, results = loss_of(**of), []
    plain = jax.jit(step_of(inner, loss))
    for cut in True, False:
        step, given = jo.jit(step_of(tx, loss), donate_argnums=donate), (params, tx.init(params))
        if not cut:
            uncut()
        for _ in range(2):
            want = plain(*jo.to_device(given), X)
            before = jax.tree.map(lambda x: (x.sharding, x.sharding.memory_kind), given)
            given = copied(given)
            got = step(*given, X)
            if dtype == jnp.float32:  # else gradients are rounded where fusions end, which are others
                assert_same(jo.to_device(got), want, "an update")
            assert jax.tree.map(lambda x: (x.sharding, x.sharding.memory_kind), got[:2]) == before
            assert all(x.is_deleted() is bool(donate) for x in jax.tree.leaves(given) if x.ndim)
            given = got[:2]
        driven, tasks = tasks_of(step)
        assert bool(joined_of(tasks)) is cut and (driven.one_program == "") is cut
        rows = [max(end - begin for begin, end in piece.ranges) for piece in joined_of(tasks)]
        assert {*rows} == ({1 if case == "checkpointed" else 3 if case == "five layers" else 2} if cut else set())
        in_turn = any(isinstance(piece, InTurn) for task in tasks for piece in task.stage.pieces)
        assert in_turn is (case == "some stay on the device")
        results.append(jax.tree.map(np.asarray, jo.to_device(got)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_its_programs():
    """No program returns a stack of large rows on the device; a part's rows are in host memory, made in its scan."""
    step, params = jo.jit(step_of(tx := offload(), loss_of()), donate_argnums=(0, 1)), model()
    step(copied(params), tx.init(params), X)
    _, tasks = tasks_of(step)
    programs = [task for task in tasks if task.stage.name == stages.BEFORE]
    (w,) = [piece for piece in joined_of(tasks) if piece.outputs[0].aval.ndim == 3]
    assert len(programs) >= len(w.inputs) == LAYERS and w.ranges[0][1] == LAYERS and w.ranges[-1][0] == 0
    assert all(is_host_aval(v.aval) and v.aval.shape[1:] == (WIDTH, WIDTH) for v in w.inputs)
    made_by = [next(k for k, task in enumerate(programs) if v in task.outputs) for v in w.inputs]
    assert made_by == sorted({*made_by})  # each by another
    gradients = {w.outputs[0].aval.shape, *(v.aval.shape for v in w.inputs)}
    on_device = [v for task in programs for v in (*task.outputs, *task.down) if not is_host_aval(v.aval)]
    assert not [v for v in on_device if v.aval.shape in gradients]


def test_what_stays_in_one_scan(monkeypatch):
    """Clipping needs all gradients first; gradients that are returned, or updated by no loop, are one array."""

    def why(inner, returned=False):
        tx, params, loss = offload(inner), model(), loss_of()

        def step(params, state, x):
            grads = jax.grad(loss)(params, x)
            return *jo.update_params(tx, grads, state, params), grads if returned else 0

        step = jo.jit(step)
        step(params, tx.init(params), X)
        driven, tasks = tasks_of(step)
        assert joined_of(tasks) == []
        return driven.one_program

    assert why(CLIPPED) == segments.ALL_FIRST
    why(optax.lamb(1e-2))
    why(ADAMW, returned=True)
    monkeypatch.setattr(row_groups, "GROUP_BYTES", 2**26)  # no leaf is more than one group
    why(ADAMW)


def test_repeats_bit_for_bit():
    def train():
        step, params = jo.jit(step_of(tx := offload(), loss_of()), donate_argnums=(0, 1)), copied(model())
        state = tx.init(params)
        for _ in range(5):
            params, state, _ = step(params, state, X)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, jo.to_device(state)))]

    assert train() == train()


@pytest.mark.parametrize("cut", [True, False])
def test_layers_are_updated_while_the_pass_goes_on(cut, uncut, monkeypatch):
    """Those of the first parts before the last program has ended; new rows are written on the device after that."""
    if not cut:
        uncut()

    def loss(params, x):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(slow(x) @ w), None), x, params["w"])[0] ** 2).mean()

    params = {"w": model()["w"]}
    step, state = jo.jit(step_of(tx := offload(), loss)), tx.init(params)
    jax.block_until_ready(step(params, state, X))  # compiles
    driven, tasks = tasks_of(step)
    at = max(k for k, task in enumerate(tasks) if task.stage.name == stages.BEFORE)
    task, last_of_them = driven._tasks[at]
    last, updated, written = [], [], []

    def watched(*operands):
        last[:] = last_of_them(*operands)
        return last

    def over():
        return all(y.is_ready() for y in last)

    work, write = by_parts.work, by_parts.written
    monkeypatch.setattr(by_parts, "work", lambda parts: (updated.append(over()) if parts else None, work(parts))[1])
    monkeypatch.setattr(by_parts, "written", lambda *args: (written.append(over()), write(*args))[1])
    driven._tasks[at] = task, watched
    jax.block_until_ready(step(params, state, X))
    assert len(updated) == len(written) == LAYERS and all(written)
    assert updated[0] is not cut and updated[-1]


def test_how_many_go_up_beside_each_of_the_last():
    ranges = ((6, 8), (4, 6), (2, 4), (0, 2))
    parts = row_groups.Parts([jnp.zeros(2)] * 4, ranges, 1)
    assert parts.groups == [(6, 7), (7, 8), (4, 5), (5, 6), (2, 3), (3, 4), (0, 1), (1, 2)]
    assert [row_groups.due(parts, k) for k in range(8)] == [0, 0, 0, 0, 0, 0, 4, 8]


@pytest.mark.parametrize(("n", "reverse"), [(8, True), (8, False), (12, True), (5, False), (2, True)])
def test_parts_are_all_rows_in_the_order_of_the_scan(n, reverse):
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(reverse=not reverse)))(model(n), X).jaxpr
    at = scan_parts._last_large(jaxpr)
    scan = scan_parts.scan_of(jaxpr.eqns[at])
    assert scan.reverse is reverse
    ranges = scan_parts._ranges(jaxpr, at, scan, False)
    rows = [k for begin, end in ranges for k in (range(end - 1, begin - 1, -1) if reverse else range(begin, end))]
    assert rows == [*range(n)][:: -1 if reverse else 1] and 2 <= len(ranges) <= 8
