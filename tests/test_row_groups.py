"""Stacked layers that the cores update in groups of rows: values, buffers, and what is under way meanwhile.

Another CPU device stands in the place of the CPU backend beside an accelerator.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._drive import by_parts, loops, row_groups, run, segments
from jax_offload._drive.cores import Cores
from tests.support.optimizers import assert_same, copied

pytestmark = [
    pytest.mark.skipif(not loops.has_numba(), reason="numba is not installed (extra cores)"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
LAYERS, WIDTH = 8, 64
ROW = 2 * 4 * WIDTH * WIDTH  # bytes of AdamW's state of a layer
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)))


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.setattr(run, "cores_beside", lambda devices: Cores(jax.devices()[1]))
    monkeypatch.setattr(row_groups, "GROUP_BYTES", 3 * ROW)  # of eight layers three, three and two
    monkeypatch.setattr(segments, "with_scan_in_parts", lambda step: step)  # test_scan_parts.py


def model(dtype=jnp.float32):
    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 8
    return jax.device_put({"layers": w.astype(dtype), "head": jnp.eye(WIDTH, dtype=dtype)}, jax.devices()[0])


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return ((x @ params["head"]).astype(jnp.float32) ** 2).mean()


def unrolled(params, x):
    for k in range(LAYERS):
        x = jnp.tanh(x @ params["layers"][k])
    return ((x @ params["head"]) ** 2).mean()


def step_of(tx, loss=loss, **extra):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return *jo.update_params(tx, grads, state, params, **extra), value

    return step


def offload(inner=ADAMW, **options):
    return jo.offload(inner, **{"min_bytes": 1024, "update_on": "host", **options})


def by_rows(step):
    """What the cores took by rows in a step that has run with arguments of one kind: where the groups end."""
    ((driven, _),) = step._driven._programs.values()
    return sorted((v.aval.shape, ends) for task, _ in driven._tasks for v, ends in task.by_rows.items())


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.ndim == 3]


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize(
    ("inner", "dtype", "share"),
    [
        (ADAMW, jnp.float32, "host"),
        (CLIPPED, jnp.float32, {"layers": "host", "head": "device"}),
        (optax.adamw(1e-2, mu_dtype=jnp.bfloat16), jnp.bfloat16, "host"),
    ],
    ids=["AdamW", "clipped, the head on the device", "bfloat16"],
)
def test_values_placement_and_buffers(inner, dtype, share, donate):
    tx, params = offload(inner, update_on=share), model(dtype)
    step, plain = jo.jit(step_of(tx), donate_argnums=(0, 1) if donate else ()), jax.jit(step_of(inner))
    state = tx.init(params)
    for _ in range(2):
        want = plain(params, jo.to_device(state), X)
        given, where = (params, state), pointers(state)
        before, places = jax.tree.map(np.array, jo.to_device(given)), [x.sharding for x in jax.tree.leaves(given)]
        got = step(params, state, X)
        assert_same(jo.to_device(got), want, "by rows")
        assert places == [x.sharding for x in jax.tree.leaves(got[:2])]
        assert {x.memory_kind for x in places} == {"device", "pinned_host"}
        assert where and (where == pointers(got[1])) is donate  # the state is written in place where it was donated
        if not donate:
            jax.tree.map(np.testing.assert_array_equal, before, jo.to_device(given))
        params, state = got[:2]
    ends = (6, 8) if dtype == jnp.bfloat16 else (3, 6, 8)  # whose state is half
    assert by_rows(step) == [((LAYERS, WIDTH, WIDTH), ends)] * 2  # the gradient and the parameter


def test_donated_parameters_are_written_in_their_buffer():
    tx, params = offload(), copied(model())
    step, state = jo.jit(step_of(tx), donate_argnums=(0, 1)), tx.init(params)
    params, state, _ = step(params, state, X)
    where = pointers(params)
    params, state, _ = step(params, state, X)
    assert pointers(params) == where


def test_a_step_that_may_be_skipped():
    """Its update stands in a loop that is driven, which the gradients come to as they are: by rows too."""
    tx, params = offload(), model()
    state = tx.init(params)

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        return jo.update_params(tx, grads, state, params, skip=~jnp.isfinite(optax.global_norm(grads)))

    want = jax.jit(step_of(ADAMW))(params, jo.to_device(state), X)[:2]
    step = jo.jit(step, donate_argnums=1)
    for x, expected in (X * np.nan, (params, jo.to_device(state))), (X, want):
        assert_same(jo.to_device(step(params, copied(state), x)), expected, "skipped, or not")


def test_repeats_bit_for_bit():
    def train():
        tx, params = offload(update_on={"layers": "host", "head": "device"}), copied(model())
        step, state = jo.jit(step_of(tx), donate_argnums=(0, 1)), tx.init(params)
        for _ in range(5):
            params, state, _ = step(params, state, X)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, jo.to_device(state)))]

    assert train() == train()


def test_what_goes_whole(monkeypatch):
    """An unrolled pass hides the way of gradients; an update of whole leaves; several devices; a small leaf."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.device_put(model(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    for inner, fun, params in [
        (ADAMW, unrolled, model()),
        (optax.lamb(1e-2), loss, model()),
        (ADAMW, loss, replicated),
    ]:
        tx = offload(inner)
        step = jo.jit(step_of(tx, fun))
        step(params, tx.init(params), X)
        assert by_rows(step) == []
    monkeypatch.setattr(row_groups, "GROUP_BYTES", LAYERS * ROW)
    tx = offload()
    step = jo.jit(step_of(tx))
    step(model(), tx.init(model()), X)
    assert by_rows(step) == []


def test_where_the_groups_end():
    assert row_groups.ends_of((8, 4), 8 * ROW) == (3, 6, 8)
    assert row_groups.ends_of((2, 4), 100 * ROW) == (1, 2)  # a row is more than a group
    assert row_groups.ends_of((8, 4), ROW) == (8,)


class Link:
    """A link with injected delays: what comes down, and what goes up, one after the other, in the time of an update.

    ``log``: when each group began to come down, to be updated, to go up, and when it was through.
    """

    SECONDS = 0.04

    def __init__(self, monkeypatch):
        self.log, self.due = {"down": [], "update": [], "up": []}, {}
        send, taken, written, work = row_groups.Rows.send, row_groups.Rows.taken, row_groups._written, by_parts.work

        def sends(rows, last):
            sent = len(rows._sent)
            send(rows, last)
            self.due |= {(id(rows), k): self.moved("down", self.SECONDS / 2) for k in range(sent, len(rows._sent))}

        def takes(rows, k):
            result = taken(rows, k)
            time.sleep(max(0.0, self.due[id(rows), k] - time.monotonic()))
            return result

        def works(parts):
            begun = time.monotonic()
            work(parts)
            time.sleep(self.SECONDS if parts else 0.0)
            self.log["update"] += [(begun, time.monotonic())] if parts else []

        def writes(place):
            self.moved("up", self.SECONDS)
            return written(place)

        monkeypatch.setattr(row_groups.Rows, "send", sends)
        monkeypatch.setattr(row_groups.Rows, "taken", takes)
        monkeypatch.setattr(row_groups, "_written", writes)
        monkeypatch.setattr(by_parts, "work", works)

    def moved(self, way, seconds):
        begun = max([time.monotonic(), *(end for _, end in self.log[way][-1:])])
        self.log[way].append((begun, begun + seconds))
        return begun + seconds


def test_rows_come_down_and_go_up_while_others_are_updated(monkeypatch):
    monkeypatch.setattr(row_groups, "GROUP_BYTES", ROW)
    tx, params = offload(min_bytes=2 * 4 * WIDTH * WIDTH), model()  # the head stays
    step, state = jo.jit(step_of(tx)), tx.init(params)
    jax.block_until_ready(step(params, state, X))  # compiles
    link = Link(monkeypatch)
    jax.block_until_ready(step(params, state, X))
    down, update, up = (link.log[each] for each in ("down", "update", "up"))
    assert (len(down), len(update), len(up)) == (2 * LAYERS, LAYERS, LAYERS)  # a gradient and a parameter
    for k in range(LAYERS - 1):
        assert down[2 * k + 2][0] < update[k][1]  # the next group is on its way while this one is updated,
        assert up[k][0] < update[k + 1][1]  # and this one's parameter goes up while that is
    assert (
        up[-1][1] - down[0][0] < 0.7 * 3 * LAYERS * Link.SECONDS
    )  # one after the other it would be 3; in turn it is 1
