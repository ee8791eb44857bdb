"""The pass before an update of the cores in several programs: the first gradients are updated while it goes on.

Another CPU device stands in the place of the CPU backend beside an accelerator; on a CPU itself nothing is cut.
"""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo
from jax_offload._base.jaxprs import Literal, jaxpr_of, values_of
from jax_offload._base.on_disk import is_on_disk
from jax_offload._drive import cuts, run, segments, stages
from jax_offload._drive.cores import Cores, cores_beside
from jax_offload._plan import by_rows
from tests.support.optimizers import assert_same, copied
from tests.support.slow import slow

pytestmark = [
    pytest.mark.usefixtures("small_groups"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
ADAMW = optax.adamw(1e-2)
N, WIDTH = 4, 256  # a layer is large, as of gradients in turn
X = np.random.default_rng(0).normal(size=(512, WIDTH)).astype(np.float32)


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.setattr(run, "cores_beside", lambda devices: Cores(jax.devices()[1]))


def model(device=None, layers=N):
    tree = {f"layer_{k}": jax.random.normal(jax.random.key(k), (WIDTH, WIDTH)) / 16 for k in range(layers)}
    return jax.device_put(tree, device or jax.devices()[0])


def plain_layer(x, w):
    return jnp.tanh(x @ w)


def loss_of(layer):
    def loss(params, x):
        for name in sorted(params):
            x = layer(x, params[name])
        return (x**2).mean()

    return loss


def step_of(tx, loss=None):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss or loss_of(plain_layer))(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, value

    return step


def offload(inner=ADAMW, update_on="host"):
    return jo.offload(inner, min_bytes=1024, update_on=update_on)


def driven_by(step):
    ((driven, _),) = step._driven._programs.values()
    return driven


def programs_of(driven):
    return [task for task, _ in driven._tasks if task.stage.name == stages.BEFORE]


def run_once(tx, loss=None, params=None):
    """The step's driver, after a step, and its results."""
    step, params = jo.jit(step_of(tx, loss)), model() if params is None else params
    got = step(params, tx.init(params), X)
    return driven_by(step), got


@pytest.fixture
def in_one_piece(monkeypatch):
    """Lets a test run a step uncut."""

    def uncut():
        monkeypatch.setattr(run, "in_segments", lambda step, *_: (step, "a test"))

    return uncut


def kinds(tree):
    return [(x.sharding, x.sharding.memory_kind) for x in jax.tree.leaves(tree)]


# ---- values --------------------------------------------------------------------------------------------------------

CHECKPOINTED = jax.checkpoint(plain_layer)
LOOPED = lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: plain_layer(x, w), x)  # noqa: E731  a scan in each layer
LAYERS = {"plain": plain_layer, "checkpointed": CHECKPOINTED, "looped": LOOPED}


@pytest.mark.long("more kinds of steps", only=["checkpointed*", "looped*"])
@pytest.mark.long("more donations", only=["plain-False*"])
@pytest.mark.parametrize("share", ["host", 0.6])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_values(layer, share, donate):
    """Of four steps, each against plain optax from the same state; memory kinds; what was not donated is there."""
    loss, tx, params = loss_of(LAYERS[layer]), offload(update_on=share), model()
    step = jo.jit(step_of(tx, loss), **({"donate_argnums": (0, 1)} if donate else {}))
    plain, state = jax.jit(step_of(ADAMW, loss)), tx.init(params)
    for _ in range(4):
        want = plain(params, jo.to_device(state), X)
        given = copied((params, state)) if donate else (params, state)
        got = step(*given, X)
        assert kinds(got[:2]) == kinds((params, state))
        assert_same(jo.to_device(got), want, "one update")
        large = [x for x in jax.tree.leaves(given) if x.ndim]
        assert all(x.is_deleted() == donate for x in large)
        params, state = got[:2]
    driven = driven_by(step)
    assert driven.one_program == "" and len(programs_of(driven)) > 1


@pytest.mark.parametrize(("share", "spec"), [("host", PartitionSpec("x")), (0.6, PartitionSpec(None, "x"))])
def test_values_on_several_devices(share, spec, monkeypatch):
    """Divided as they were."""
    monkeypatch.setattr(run, "cores_beside", lambda devices: Cores(jax.devices()[7]))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    params, x = model(NamedSharding(mesh, spec)), jax.device_put(X, NamedSharding(mesh, PartitionSpec("x")))
    tx = offload(update_on=share)
    step, plain, state = jo.jit(step_of(tx), donate_argnums=(0, 1)), jax.jit(step_of(ADAMW)), tx.init(params)
    for _ in range(2):
        want, before = plain(params, jo.to_device(state), x), kinds((params, state))
        got = step(copied(params), copied(state), x)
        assert_same(jo.to_device(got), want, "in several programs")
        assert kinds(got[:2]) == before
        params, state = got[:2]
    assert len(programs_of(driven_by(step))) > 1 and len(step._driven._programs) == 1


def test_its_programs():
    """A group's gradients are there before the last program, and what that reads of the first is freed with it."""
    driven, _ = run_once(offload())
    tasks, programs = [task for task, _ in driven._tasks], programs_of(driven)
    assert len(programs) >= 3 and tasks[: len(programs)] == programs
    first = next(task for task in tasks if task.stage.on_cores)
    early, *late = ({*task.down} for task in programs)
    assert not early.isdisjoint(first.inputs) and late[0].union(*late).isdisjoint(first.inputs)
    handed_on = {v for v in programs[0].outputs for task in programs[1:] if v in task.inputs}
    assert handed_on and frozenset[object]().union(*(task.free for task in programs)) >= handed_on


def test_gradients_that_stay_wait_for_each_other_in_each_program():
    driven, _ = run_once(offload(update_on=0.6))
    held = [[p for p in task.stage.pieces if isinstance(p, segments.InTurn)] for task in programs_of(driven)]
    assert sum(map(len, held)) > 1 and sum(p.large for pieces in held for p in pieces) == N


@pytest.mark.parametrize("share", ["host", 0.6])
def test_as_in_one_program(share, in_one_piece):
    """The same arithmetic in other programs: to the last bits."""
    tx = offload(update_on=share)
    cut, got = run_once(tx)
    in_one_piece()
    one, want = run_once(tx)
    assert len(programs_of(cut)) > 1 == len(programs_of(one))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)


@pytest.fixture
def busy():
    """Keeps the CPU busy meanwhile."""
    over, x = threading.Event(), np.eye(WIDTH, dtype=np.float32)

    def work():
        while not over.is_set():
            x @ x

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.exhaustive("seven hundred steps", only=["host-700", "0.6-700"])
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("share", "steps"),
    [("host", 20), (0.6, 20), *(pytest.param(s, 700, marks=pytest.mark.long("1,400 steps")) for s in ("host", 0.6))],
)
def test_repeats_bit_for_bit(share, steps):
    """Two loops of many steps, their inputs donated."""
    step = jo.jit(step_of(tx := offload(update_on=share)), donate_argnums=(0, 1))

    def train():
        params = model()
        state = tx.init(params)
        for _ in range(steps):
            params, state, _ = step(params, state, X)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, state))]

    assert train() == train() and len(programs_of(driven_by(step))) > 1


# ---- a state on disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """As beside an accelerator."""
    monkeypatch.setattr(run, "on_accelerators", lambda devices: True)
    with_files = jo.disk(tmp_path / "state")
    yield with_files
    with_files.close()


def names(driven):
    return [task.stage.name for task, _ in driven._tasks]


@pytest.mark.parametrize("rows", [False, True])
def test_values_on_disk(rows, disk, monkeypatch):
    """Groups run between the programs of the pass; each step against plain optax from the same state."""
    if rows:  # a layer's pieces follow each other, in the same parameter
        monkeypatch.setattr(by_rows, "PART_BYTES", WIDTH * WIDTH)
    tx, params = jo.offload(ADAMW, min_bytes=1024, disk=disk), model()
    step, plain, state = jo.jit(step_of(tx), donate_argnums=(0, 1)), jax.jit(step_of(ADAMW)), tx.init(params)
    for _ in range(4):
        want = plain(params, jo.to_device(state), X)
        params, state, value = step(params, state, X)
        assert_same(jo.to_device((params, state, value)), want, "one update")
        assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {"device"}
    found = names(driven_by(step))
    assert found[:3] == ["before", "before", "group"] and found.count("group") >= (2 * N if rows else N)
    assert found.index("group") < len(found) - 1 - found[::-1].index("before")


def test_a_group_waits_for_another_that_has_rows_of_its_parameter(disk, monkeypatch):
    """``order=`` has the layers against the order of their gradients, and a group has rows of two of them: the next
    one, whose gradient is there before, reads what that one has made of its parameter."""
    part = 2 * WIDTH * WIDTH  # bytes: a quarter of a layer's state
    monkeypatch.setattr(by_rows, "PART_BYTES", part)
    monkeypatch.setattr(stages, "GROUP_BYTES", 3 * part)
    tx, params = jo.offload(ADAMW, min_bytes=1024, disk=disk, order=[f"layer_{k}" for k in range(N)]), model()
    step, state = jo.jit(step_of(tx)), tx.init(params)
    want = jax.jit(step_of(ADAMW))(params, jo.to_device(state), X)
    got = step(params, state, X)
    assert_same(jo.to_device(got), want, "one update")
    found = names(driven_by(step))
    assert found == ["before"] * 2 + ["group"] * 6  # cut behind the last layer's gradient alone


def test_small_leaves_on_the_device_hold_nothing_up(disk):
    """Their update needs all of their gradients, and stands beside numbers that the groups wait for."""

    def loss(params, x):
        return loss_of(lambda x, p: plain_layer(x, p["w"]) + p["b"])(params, x)

    params = {name: {"w": w, "b": jnp.zeros(WIDTH)} for name, w in model().items()}
    params = jax.device_put(params, jax.devices()[0])
    tx = jo.offload(ADAMW, min_bytes=2048, disk=disk)
    step, state = jo.jit(step_of(tx, loss)), tx.init(params)
    want = jax.jit(step_of(ADAMW, loss))(params, jo.to_device(state), X)
    got = step(params, state, X)
    assert_same(jo.to_device(got), want, "one update")
    assert names(driven_by(step))[:3] == ["before", "before", "group"]


@pytest.mark.long("as the values")
@pytest.mark.usefixtures("busy")
def test_on_disk_repeats_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "on_accelerators", lambda devices: True)

    def train(folder):
        with contextlib.closing(jo.disk(tmp_path / folder)) as disk:
            tx, params = jo.offload(ADAMW, min_bytes=1024, disk=disk), model()
            step, state = jo.jit(step_of(tx), donate_argnums=(0, 1)), tx.init(params)
            for _ in range(25):
                params, state, _ = step(params, state, X)
            assert len(programs_of(driven_by(step))) > 1
            return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, jo.to_device(state)))]

    assert train("a") == train("b")


# ---- overlap -------------------------------------------------------------------------------------------------------


class Watched(Cores):
    """Cores that write down, of each parameter that they have updated, whether the backward pass was over by then."""

    def __init__(self, cpu):
        vars(self).update(cpu=cpu, log=[], last=[])

    def brought_back(self, x, sharding):
        if x.ndim == 2 and sharding.memory_kind == "device":
            self.log.append(all(y.is_ready() for y in self.last))
        return super().brought_back(x, sharding)


@pytest.mark.parametrize(("cut", "devices"), [(True, 1), (False, 1), (True, 2)])
def test_updates_begin_before_the_backward_pass_ends(cut, devices, in_one_piece, monkeypatch):
    if not cut:
        in_one_piece()
    cores = Watched(jax.devices()[7])
    monkeypatch.setattr(run, "cores_beside", lambda devices: cores)
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    tx, params = offload(), model(NamedSharding(mesh, PartitionSpec("x")))
    step, state = jo.jit(step_of(tx, loss_of(lambda x, w: plain_layer(slow(x), w)))), tx.init(params)
    jax.block_until_ready(step(params, state, X))  # compiles
    driven = driven_by(step)
    at = len(programs_of(driven)) - 1
    task, last_of_them = driven._tasks[at]

    def watched(*operands):
        vars(cores)["last"] = produced = last_of_them(*operands)
        return produced

    driven._tasks[at] = task, watched
    cores.log.clear()
    jax.block_until_ready(step(params, state, X))
    assert len(cores.log) == N and (at > 0) is cut
    assert not cores.log[0] if cut else all(cores.log)


@pytest.mark.parametrize("cut", [True, False])
def test_files_are_written_before_the_backward_pass_ends(cut, disk, in_one_piece, monkeypatch):
    if not cut:
        in_one_piece()
    tx, params = jo.offload(ADAMW, min_bytes=1024, disk=disk), model(layers=2 * N)
    loss, state = loss_of(lambda x, w: plain_layer(slow(x), w)), tx.init(params)
    step = jo.jit(step_of(tx, loss), donate_argnums=(0, 1))
    params, state, _ = jax.block_until_ready(step(params, state, X))  # compiles
    home = next(x for x in jax.tree.leaves(state, is_leaf=is_on_disk) if is_on_disk(x)).place.home
    driven, last, over, put = driven_by(step), [], [], home.put
    at = max(k for k, name in enumerate(names(driven)) if name == "before")
    task, last_of_them = driven._tasks[at]

    def watched(*operands):
        produced = last_of_them(*operands)
        last.append(produced[0] + 0)  # groups are given what it makes
        return produced

    def written(*what):
        writing = put(*what)
        writing.add_done_callback(lambda _: over.append(bool(last) and last[0].is_ready()))
        return writing

    driven._tasks[at] = task, watched
    monkeypatch.setattr(home, "put", written)
    params, state, _ = jax.block_until_ready(step(params, state, X))
    disk.commit(2, {"params": params, "state": state})  # waits for all writes
    assert len(over) == 4 * N and (not over[0] if cut else all(over))


# ---- what stays one program ----------------------------------------------------------------------------------------


def scanned(params, x):
    return (jax.lax.scan(lambda x, w: (plain_layer(x, w), None), x, params["layers"])[0] ** 2).mean()


def with_callback(params, x):
    jax.debug.callback(lambda x: None, x.sum())
    return loss_of(plain_layer)(params, x)


def test_what_stays_one_program(monkeypatch):
    def why(tx, loss=None, params=None):
        driven, _ = run_once(tx, loss, params)
        assert len(programs_of(driven)) == 1
        return driven.one_program

    clipped = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
    assert why(offload(clipped)) == segments.ALL_FIRST
    stacked = {"layers": jnp.stack([*model().values()])}
    assert why(offload(), scanned, jax.device_put(stacked, jax.devices()[0])) == segments.TOGETHER
    assert why(offload(), with_callback) == segments.EFFECTS
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    assert why(offload(), None, model(NamedSharding(mesh, PartitionSpec()))) == segments.REPLICATED
    monkeypatch.setattr(stages, "GROUP_BYTES", 2**26)
    assert why(offload()) == segments.TOGETHER


def test_on_a_cpu_the_cores_run_the_pass_too(monkeypatch):
    monkeypatch.setattr(run, "cores_beside", cores_beside)
    driven, _ = run_once(offload())
    assert len(programs_of(driven)) == 1 and driven.one_program == segments.ON_A_CPU


# ---- the cut -------------------------------------------------------------------------------------------------------


def cuts_in(loss, layers):
    params = model(layers=layers)
    jaxpr = jaxpr_of(jax.grad(loss), params, X)[0].jaxpr
    produced = {v: k + 1 for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    return cuts.cuts_of(jaxpr, [produced[v] for v in jaxpr.outvars], [set() for _ in params])


def test_programs_are_at_most_eight():
    found = cuts_in(loss_of(plain_layer), 20)
    assert 4 <= len(found) < cuts.MOST and found == sorted({*found})


def test_a_state_on_disk_has_more_of_them(disk):
    """Of twenty layers, where the cores' pass has eight at most; no more than two groups are behind one."""
    tx, params = jo.offload(ADAMW, min_bytes=1024, disk=disk), model(layers=20)
    step = jo.jit(step_of(tx))
    step(params, tx.init(params), X)
    found = names(driven_by(step))
    assert found.count("before") > cuts.MOST
    assert " ".join(found).rpartition("before")[0].count("group group group") == 0


def test_too_little_is_left_for_a_program_of_its_own():
    """The first gradients are there when less than a sixteenth of the arithmetic is not yet done."""

    def behind(times):
        def loss(params, x):  # of its loop there is no gradient, as nothing in it is a parameter
            x = jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x[:WIDTH]), x)
            return loss_of(plain_layer)(params, x)

        return loss

    assert len(cuts_in(behind(4), 2)) == 1 and cuts_in(behind(40), 2) == []


@pytest.mark.parametrize("at", [[1], [3], [2, 5], [4, 9, 12]])
def test_parts_of_a_program_are_the_program(at):
    loss = loss_of(lambda x, w: jax.nn.softmax(jnp.tanh(x @ w) + x))
    closed, _ = jaxpr_of(jax.value_and_grad(loss), model(), X)
    jaxpr = closed.jaxpr
    results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    env = dict(zip(jaxpr.invars, jax.tree.leaves((model(), X)), strict=True))
    parts = cuts.parts_of(jaxpr, {*results}, at)
    assert len(parts) == len(at) + 1 and sum(len(part.jaxpr.eqns) for part in parts) >= len(jaxpr.eqns)
    matmuls = [eqn for part in parts for eqn in part.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(matmuls) == sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)  # none is done again
    for part in parts:
        env.update(zip(part.outputs, part.run(*(env[v] for v in part.inputs)), strict=True))
    want = functools.partial(jax.value_and_grad(loss))(model(), X)
    assert_same(values_of(env, jaxpr.outvars), jax.tree.leaves(want), "a program in parts")


def test_a_driver_is_made_once_a_step():
    """Nothing of the search runs in a later step."""
    tx, params = offload(), model()
    step, state = jo.jit(step_of(tx)), tx.init(params)
    for _ in range(3):
        params, state, _ = step(params, state, X)
    assert len(step._driven._programs) == 1
