"""The host's cores update a share of the state, in a step that is driven from Python: values, placement, donation.

On a CPU the step's own device is the host. The way of an accelerator, whose pinned memory another backend sees, is run
with another CPU device in the place of that backend.
"""

import contextlib
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._drive import cores, run, stages
from jax_offload._drive.cores import Cores, cores_beside
from tests.support import optimizers as table
from tests.support.optimizers import TABLE, assert_same, copied
from tests.support.rows import rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
NAMES = ["layer_1", "layer_2", "layer_3"]


def model(dtype=jnp.float32, device=None):
    w = {name: jax.random.normal(jax.random.key(k), (64, 64)) / 8 for k, name in enumerate(NAMES)}
    tree = {name: {"w": x.astype(dtype), "b": jnp.full(64, 0.1, dtype)} for name, x in w.items()}
    return jax.device_put(tree, device or jax.devices()[0])


def loss(params, x):
    for name in NAMES:
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return (x.astype(jnp.float32) ** 2).mean()


def step_of(tx, **extra):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params, **extra)
        return params, state, {"loss": value, "size": optax.global_norm(params)}

    return step


def offload(inner=CLIPPED, update_on="host", **options):
    return jo.offload(inner, min_bytes=1024, update_on=update_on, **options)


def from_the_same(step, plain, tx, params, xs=(X, X), donate=True):
    """Updates one after the other, each compared with the plain one of the same state, and the last results."""
    donated = {"donate_argnums": (0, 1)} if donate else {}
    step, plain = jo.jit(step, **donated), jax.jit(plain)
    state = tx.init(params)
    for x in xs:
        want = plain(params, jo.to_device(state), x)
        before = params, state
        got = step(copied(params) if donate else params, copied(state) if donate else state, x)
        kinds = [[x.sharding.memory_kind for x in jax.tree.leaves(s)] for s in (got[1], state)]
        assert kinds[0] == kinds[1]
        assert_same(jo.to_device(got), want, "one update")
        assert not donate or not any(x.is_deleted() for x in jax.tree.leaves(before))
        params, state = got[:2]
    return got


def stages_in(step):
    """The names of the stages of a driven step that has run with arguments of one kind."""
    ((driven, _),) = step._driven._programs.values()
    return [task.stage.name for task, _ in driven._tasks]


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(stages, "GROUP_BYTES", 1)


@pytest.fixture
def other_backend(monkeypatch):
    """Another CPU device in the place of the CPU backend beside an accelerator."""
    monkeypatch.setattr(run, "cores_beside", lambda devices: Cores(jax.devices()[1]))


@pytest.fixture(params=["here", "beside"])
def either(request):
    """The step's own device is the host, or it is beside an accelerator."""
    if request.param == "beside":
        request.getfixturevalue("other_backend")


# ---- the executor ------------------------------------------------------------------------------------------------


@pytest.mark.oldest("the step, cut and driven")
@pytest.mark.parametrize(
    "share", ["host", 0.3, 0.7, {"layer_1": "device", "layer_2": 0.5, "layer_3": "host"}, [("layer_[13]", "host")]]
)
def test_a_driven_step_is_the_step(share, small_groups):
    tx = offload(update_on=share)
    from_the_same(step_of(tx), step_of(CLIPPED), tx, model())


@pytest.mark.oldest("what is sent between backends")
@pytest.mark.usefixtures("other_backend", "small_groups")
@pytest.mark.parametrize("share", ["host", 0.3])
@pytest.mark.parametrize("donate", [True, False])
def test_as_beside_an_accelerator(share, donate):
    tx = offload(update_on=share)
    got = from_the_same(step_of(tx), step_of(CLIPPED), tx, model(), donate=donate)
    assert {x.sharding for x in jax.tree.leaves(got)} == {
        SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("device", "pinned_host")
    }


def test_its_stages(small_groups):
    for share, want in [
        ("host", ["before", "cores", "cores", "cores", "after"]),
        (0.4, ["before", "device", "cores", "after"]),
    ]:
        tx = offload(update_on=share)
        step, params = jo.jit(step_of(tx)), model()
        step(params, tx.init(params), X)
        assert stages_in(step) == want
    (driven, _), = step._driven._programs.values()  # fmt: skip
    assert len([t for t, _ in driven._tasks if t.down]) == 1  # gradients come out of the first program in host memory


def test_groups_that_are_alike_share_a_program(small_groups):
    tx = offload()
    step, params = jo.jit(step_of(tx)), model()
    step(params, tx.init(params), X)
    ((driven, _),) = step._driven._programs.values()
    assert len({id(driven._program(task)) for task, _ in driven._tasks if task.stage.on_cores}) == 1


def test_compiled_once_and_anew_for_other_types():
    tx = offload()
    step, params = jo.jit(step_of(tx), donate_argnums=(0, 1)), model()
    state = tx.init(params)
    for _ in range(3):
        params, state, _ = step(params, state, X)
    assert len(step._driven._programs) == 1
    ((driven, _),) = step._driven._programs.values()
    assert {program._cache_size() for task, program in driven._tasks if not task.stage.on_cores} == {1}
    step(params, state, X[:4])
    assert len(step._driven._programs) == 2


@pytest.mark.oldest("views of host memory, and what jax says of donation")
@pytest.mark.parametrize("numba", [True, False])
def test_what_is_donated_is_updated_in_its_buffers(numba, monkeypatch):
    if not numba:
        monkeypatch.setattr(cores, "has_numba", lambda: False)
    tx = offload()
    step, params = jo.jit(step_of(tx), donate_argnums=(0, 1)), model()
    state = tx.init(params)
    params, state, _ = step(params, state, X)
    given = params, state
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.ndim == 2]
    params, state, _ = step(params, state, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    assert where == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.ndim == 2]


@pytest.mark.oldest("views of host memory, and what jax says of donation")
def test_what_is_not_donated_stays(small_groups):
    tx, params = offload(), model()
    state = tx.init(params)
    before = jax.tree.map(np.array, (params, state))
    step = jo.jit(step_of(tx))
    first, second = step(params, state, X), step(params, state, X)
    jax.tree.map(np.testing.assert_array_equal, before, (params, state))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def addresses(state):
    leaves = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == "pinned_host"]
    return [shard.data.unsafe_buffer_pointer() for x in leaves for shard in x.addressable_shards]


@pytest.mark.oldest("the same beside an accelerator")
@pytest.mark.skipif(not cores.has_numba(), reason="numba is not installed (extra cores)")
@pytest.mark.usefixtures("other_backend", "small_groups")
def test_beside_an_accelerator_donated_state_is_written_in_place():
    """Where it was donated; where it was not, it keeps its numbers, and the new one lies elsewhere."""
    tx, params = offload(optax.adamw(1e-2)), model()
    state, x = tx.init(params), jnp.asarray(X)
    kept = jax.tree.map(np.array, jo.to_device(state))
    plain = jax.jit(step_of(optax.adamw(1e-2)))
    want = plain(*plain(params, jo.to_device(state), x)[:2], x)
    where = addresses(state)
    step = jo.jit(step_of(tx))
    _, new, _ = step(params, state, x)
    assert where and {*where}.isdisjoint(addresses(new))
    jax.tree.map(np.testing.assert_array_equal, jo.to_device(state), kept)
    donated, given = jo.jit(step_of(tx), donate_argnums=(0, 1)), state
    params = copied(params)
    for _ in range(2):
        params, state, last = donated(params, state, x)
    assert addresses(state) == where and all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert_same(jo.to_device((params, state, last)), want, "in place")


@pytest.mark.oldest("memory that is not ours to write")
@pytest.mark.skipif(not cores.has_numba(), reason="numba is not installed (extra cores)")
@pytest.mark.usefixtures("other_backend")
def test_memory_that_is_not_given_away_is_not_written(monkeypatch):
    """A GPU's XLA refuses to take what a NumPy view is held of: the view keeps its numbers, and the step is right."""

    def refused(*arrays):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Donation requested for buffer with external reference")

    monkeypatch.setattr(cores, "_handed_over", lambda places: refused)
    tx, params = offload(optax.adamw(1e-2)), model()
    state = tx.init(params)
    views = [np.asarray(x) for x in jax.tree.leaves(state)]
    before = [np.array(x) for x in views]
    want = jax.jit(step_of(optax.adamw(1e-2)))(params, jo.to_device(state), X)
    got = jo.jit(step_of(tx), donate_argnums=1)(params, state, X)
    assert_same(jo.to_device(got), want, "copied first")
    jax.tree.map(np.testing.assert_array_equal, views, before)
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.ndim == 2)


@pytest.mark.skipif(not cores.has_numba(), reason="numba is not installed (extra cores)")
@pytest.mark.usefixtures("other_backend", "small_groups")
def test_state_that_the_step_reads_too_is_not_written():
    """Another program reads the old moments: they have the old numbers, wherever it runs in the step."""
    tx, params = offload(optax.adamw(1e-2)), model()

    def step_with(tx):
        def step(params, state, x):
            new = step_of(tx)(params, state, x)
            return *new[:2], jax.tree.map(lambda x: jnp.sum(jo.to_device(x)), state)

        return step

    state = tx.init(params)
    plain = jax.jit(step_with(optax.adamw(1e-2)))
    params, state, _ = jo.jit(step_with(tx))(params, state, X)
    want, held = plain(params, jo.to_device(state), X), addresses(state)
    got = jo.jit(step_with(tx), donate_argnums=1)(params, state, X)
    assert_same(jo.to_device(got), want, "read too")
    # memory that is freed may be another leaf's then
    assert held and all(a != b for a, b in zip(held, addresses(got[1]), strict=True))


class WaitingCores(Cores):
    """Cores whose update of one parameter ends when the next one has been sent to them."""

    def __init__(self, cpu):
        vars(self).update(cpu=cpu, sends=[threading.Event() for _ in range(3)], updated=[])

    def sent(self, x):
        there = super().sent(x)
        if x.ndim == 2 and x.sharding.memory_kind == "device":
            next(event for event in self.sends if not event.is_set()).set()
        return there

    def brought_back(self, x, sharding):
        if x.ndim == 2 and sharding.memory_kind == "device":
            following = min(len(self.updated) + 1, len(self.sends) - 1)
            self.updated.append(self.sends[following].wait(120))
        return super().brought_back(x, sharding)


def test_the_next_group_is_on_its_way_while_one_is_updated(small_groups, monkeypatch):
    cores = WaitingCores(jax.devices()[1])
    monkeypatch.setattr(run, "cores_beside", lambda devices: cores)
    tx, params = offload(), model()
    jo.jit(step_of(tx))(params, tx.init(params), X)
    assert cores.updated == [True] * 3


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_split_is_deterministic(share, small_groups):
    tx = offload(optax.adamw(1e-2), update_on=share)

    def train():
        step, params = jo.jit(step_of(tx), donate_argnums=(0, 1)), model()
        state = tx.init(params)
        for _ in range(5):
            params, state, _ = step(params, state, X)
        return jax.tree.leaves((params, state))

    assert [np.asarray(x).tobytes() for x in train()] == [np.asarray(x).tobytes() for x in train()]


@pytest.mark.oldest("arguments as jit takes them")
def test_static_arguments_shardings_and_keywords():
    tx, params = offload(), model()
    state = tx.init(params)
    where = SingleDeviceSharding(jax.devices()[0])

    @functools.partial(
        jo.jit, static_argnames="times", donate_argnums=1, in_shardings=(where, None, None), out_shardings=None
    )
    def step(params, state, x, times):
        grads = jax.grad(loss)(params, x)
        grads = jax.tree.map(lambda g: times * g, grads)
        return jo.update_params(tx, grads, state, params)

    def plain(params, state, x, times):
        grads = jax.tree.map(lambda g: times * g, jax.grad(loss)(params, x))
        return jo.update_params(CLIPPED, grads, state, params)

    for times in 1, 2:
        got = step(params, copied(state), X, times)
        assert_same(jo.to_device(got), jax.jit(plain, static_argnums=3)(params, jo.to_device(state), X, times), "")
    assert len(step._driven._programs) == 2


# ---- what stands around, and inside --------------------------------------------------------------------------------

INSIDE = {
    "a schedule": optax.adam(optax.linear_schedule(1e-2, 0.0, 10)),
    "MultiSteps": optax.MultiSteps(CLIPPED, 2),
    "a norm over the state": optax.lamb(1e-2),
    "masters": jo.with_master_params(CLIPPED),
}


@pytest.mark.long("more kinds of steps", but=["beside-0.5-masters"])
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("share", ["host", 0.5])
def test_inside(name, share, small_groups, either):
    inner = INSIDE[name]
    plain = inner.gradient_transformation() if isinstance(inner, optax.MultiSteps) else inner
    params = model(jnp.bfloat16 if name == "masters" else jnp.float32)
    tx = offload(inner, share)
    from_the_same(step_of(tx), step_of(plain), tx, params, xs=(X, 2 * X, X))


@pytest.mark.long("more kinds of steps")
@pytest.mark.parametrize("share", ["host", 0.5])
def test_around(share):
    inner = offload(optax.adamw(1e-2), share)
    tx = optax.chain(optax.clip_by_global_norm(0.1), inner)
    from_the_same(step_of(tx), step_of(CLIPPED), tx, model(), xs=(X, 2 * X, X))


@pytest.mark.long("more kinds of steps", but=["beside-update"])
@pytest.mark.parametrize("through", ["update", "update_params"])
def test_a_skipped_step_changes_no_bit(through, small_groups, either):
    def step_with(tx, skipping):
        def step(params, state, x):
            grads = jax.grad(loss)(params, x)
            skip = {"skip": ~jnp.isfinite(optax.global_norm(grads))} if skipping else {}
            if through == "update_params":
                return jo.update_params(tx, grads, state, params, **skip)
            updates, state = tx.update(grads, state, params, **skip)
            return optax.apply_updates(params, updates), state

        return step

    tx = offload()
    got = from_the_same(step_with(tx, True), step_with(CLIPPED, False), tx, model())
    step = jo.jit(step_with(tx, True))
    after = step(*got, X * np.nan)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(after)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(got)
    ]
    assert not any(x.is_deleted() for x in jax.tree.leaves(got))
    donated = jo.jit(step_with(tx, True), donate_argnums=(0, 1))
    given = copied(got)
    after = donated(*given, X * np.nan)
    assert_same(jo.to_device(after), jo.to_device(got), "skipped and donated")
    assert_same(jo.to_device(donated(*after, X)), jo.to_device(step(*got, X)), "the next one")


@pytest.mark.long("more kinds of steps", but=["here-switch", "beside-apply_if_finite"])
@pytest.mark.parametrize("how", ["apply_if_finite", "cond", "switch"])
def test_an_update_in_a_branch(how, small_groups, either):
    """The branch that is taken runs, here one that changes nothing, as plain optax's does; what it hands on stays."""

    def step_with(tx):
        def step(params, state, x):
            grads = jax.grad(loss)(params, x)
            finite = jnp.isfinite(optax.global_norm(grads))

            def updated():
                return jo.update_params(tx, grads, state, params)

            def kept():
                return params, state

            if how == "cond":
                return jax.lax.cond(finite, updated, kept)
            if how == "switch":
                return jax.lax.switch(finite.astype(jnp.int32) * 9 - 1, [kept, kept, updated])  # clamped
            updates, state_ = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state_

        return step

    tx, plain = offload(), CLIPPED
    if how == "apply_if_finite":
        tx, plain = optax.apply_if_finite(tx, 2), optax.apply_if_finite(plain, 2)
    step, plain_step = jo.jit(step_with(tx), donate_argnums=(0, 1)), jax.jit(step_with(plain))
    params = model()
    state = tx.init(params)
    for x in (X, X * np.nan, X):
        want = plain_step(params, jo.to_device(state), x)
        before = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
        params, state = step(params, state, x)
        assert_same(jo.to_device((params, state)), want, "in a branch")
        assert kinds == [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)] and "pinned_host" in kinds
        same = [np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(params), strict=True)]
        assert all(same) if np.isnan(x).any() else not any(same)
    assert len(step._driven._programs) == 1


@pytest.mark.parametrize("storage", ["bfloat16", {"mu": "int8", "nu": "uint8"}])
def test_stored_in_fewer_bits(storage, either):
    """As on the device, whose rounding is the same function of the step and the place."""
    txs = [offload(optax.adamw(1e-2), on, storage=storage) for on in ("host", "device")]
    results = []
    for tx in txs:
        params = model()
        step, state = jo.jit(step_of(tx)), tx.init(params)
        for _ in range(3):
            params, state, _ = step(params, state, X)
        results.append(jo.to_device(params))
    assert_same(*results, "three steps", tolerance=1e-5)


@pytest.mark.usefixtures("other_backend")
def test_a_state_is_the_same_whoever_updates_it():
    """Leaf for leaf what it is on the device, abstract too, so that a checkpoint of one is restored as another; and one
    may change from step to step."""
    txs, params = [offload(update_on=on) for on in ("host", 0.5, "device")], model()
    states, targets = [tx.init(params) for tx in txs], [jo.abstract_state(tx, params) for tx in txs]
    for same in states, targets:
        kinds = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree) for tree in same]
        assert kinds[0] == kinds[1] == kinds[2] and "pinned_host" in str(kinds[0])
    plain = [jo.to_plain(tx, state) for tx, state in zip(txs, states, strict=True)]
    assert all(jax.tree.structure(each) == jax.tree.structure(CLIPPED.init(params)) for each in plain)
    state, step = states[0], jax.jit(step_of(CLIPPED))
    for tx in txs:
        want = step(params, jo.to_device(state), X)
        params, state, _ = got = jo.jit(step_of(tx))(params, state, X)
        assert_same(jo.to_device(got), want, "whoever")


def test_a_train_state():
    params = model()

    def trained(tx, jit):
        state = TrainState.create(apply_fn=loss, params=copied(params), tx=tx)

        def step(state, x):
            value, grads = jax.value_and_grad(state.apply_fn)(state.params, x)
            return state.apply_gradients(grads=grads), value

        step = jit(step, donate_argnums=0)
        for _ in range(3):
            state, _ = step(state, X)
        return state

    got = trained(offload(optax.adamw(1e-2)), jo.jit)
    want = trained(optax.adamw(1e-2), jax.jit)
    assert_same(jo.to_device(got.params), want.params, "parameters", tolerance=1e-5)
    assert got.opt_state[0].mu["layer_1"]["w"].sharding.memory_kind == "pinned_host"


@pytest.mark.long("more shardings", but=["ZeRO-1-inner1-0.5"])
@pytest.mark.oldest("meshes of driven steps")
@pytest.mark.parametrize("share", ["host", 0.5])
@pytest.mark.parametrize("inner", [optax.adamw(1e-2), CLIPPED])
@pytest.mark.parametrize("how", ["as the parameters", "ZeRO-1"])
def test_sharded(inner, share, how, small_groups):
    sharded(inner, share, how, jax.make_mesh((4, 2), ("data", "model")))


@pytest.mark.long(
    "more shardings", but=["ZeRO-1-inner1-0.5-AxisType.Auto", "as the parameters-inner2-host-AxisType.Explicit"]
)
@pytest.mark.oldest("meshes of driven steps")
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("share", ["host", 0.5])
@pytest.mark.parametrize("inner", [optax.adamw(1e-2), CLIPPED, optax.lamb(1e-2), optax.adafactor(1e-2)])
@pytest.mark.parametrize("how", ["as the parameters", "ZeRO-1"])
def test_sharded_beside_accelerators(inner, share, how, kind, monkeypatch):
    monkeypatch.setattr(run, "cores_beside", lambda devices: Cores(jax.devices()[7]))
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(kind, kind))
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        sharded(inner, share, how, mesh)


@pytest.mark.skipif(not cores.has_numba(), reason="numba is not installed (extra cores)")
@pytest.mark.parametrize("how", ["as the parameters", "ZeRO-1"])
def test_kernels_go_by_shards_beside_accelerators(how, monkeypatch):
    """What is divided stays so: nothing is put together, and each element is updated once, of replicas too."""
    put_together, elements, on_all_threads = [], [], cores.on_all_threads

    class Counting(Cores):
        def lent(self, x, *, assembled: bool = True):
            put_together.append(x.shape) if assembled and x.ndim else None
            return super().lent(x, assembled=assembled)

    monkeypatch.setattr(cores, "on_all_threads", lambda n, run: elements.append(n) or on_all_threads(n, run))
    monkeypatch.setattr(run, "cores_beside", lambda devices: Counting(jax.devices()[7]))
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    sharded(optax.adamw(1e-2), "host", how, mesh, in_place=True)
    assert not put_together
    assert sum(elements) == 2 * sum(x.size for x in jax.tree.leaves(model()) if 4 * x.size >= 1024)


def sharded(inner, share, how, mesh, in_place=False):
    """Two updates of a state on a mesh: plain optax's numbers, and all of it where it was."""
    where = NamedSharding(mesh, P(None, "model") if mesh.axis_types[0] is AxisType.Auto else P())
    params = jax.tree.map(lambda p: jax.device_put(p, where if p.ndim == 2 else NamedSharding(mesh, P())), model())
    tx = offload(inner, share, **({"shard_over": "data"} if how == "ZeRO-1" else {}))
    state = tx.init(params)
    x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
    step, plain = jo.jit(step_of(tx), donate_argnums=(0, 1)), jax.jit(step_of(inner))
    want = plain(params, jo.to_device(state), x)
    places, where = [leaf.sharding for leaf in jax.tree.leaves((params, state))], addresses(state)
    got = step(params, state, x)
    assert not in_place or where == addresses(got[1])
    assert_same(jo.to_device(got), want, "sharded")
    for leaf, place in zip(jax.tree.leaves(got[:2]), places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert leaf.sharding.memory_kind == place.memory_kind
        shards = {(str(shard.index), np.asarray(shard.data).tobytes()) for shard in leaf.addressable_shards}
        assert len(shards) == len({index for index, _ in shards})  # replicas are the same to the last bit
    want = plain(got[0], jo.to_device(got[1]), x)
    assert_same(jo.to_device(step(*got[:2], x)), want, "sharded, once more")
    assert len(step._driven._programs) == 1


def test_axes_that_the_types_tell():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        params = jax.device_put(model(), NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        tx = offload(update_on=0.5)
        state = tx.init(params)
        want = jax.jit(step_of(CLIPPED))(params, jo.to_device(state), x)
        assert_same(jo.to_device(jo.jit(step_of(tx))(params, state, x)), want, "explicit")


# their state in host memory is never read, and the device stores the new one
WRITTEN_ONLY = {"scale_by_backtracking_linesearch:store", "scale_by_zoom_linesearch", "snapshot"}


@pytest.mark.long("more optimizers", but=["adamw", "lamb"])
@pytest.mark.exhaustive(
    "more optimizers",
    but=[
        "ada*",
        "apply_if_finite*",
        "lion*",
        "multi_transform*",
        "nadam*",
        "polyak*",
        "reduce_on*",
        "schedule_free*",
        "sgd*",
        "lamb",
    ],
)
@pytest.mark.parametrize(
    "name",
    rows(sorted(TABLE), "all of them take minutes", daily=["adamw", "lamb", "MultiSteps:skip", "prodigy", "muon"]),
)
def test_every_optimizer(name):
    """One update from the same state, the second after a first: as plain optax, whoever updates."""
    entry = TABLE[name]
    params = table.network(jnp.float32)
    if entry.complex:
        params = jax.tree.map(lambda p: p * (1.0 + 0.5j), params)
    params = jax.device_put(entry.params(params), jax.devices()[0])

    def step_with(tx):
        def step(params, state, value, grads):
            def of_params(p):
                return entry.loss(entry.network(p))

            extra = {"value": value, "grad": grads, "value_fn": of_params, "obj_fn": of_params}
            update = optax.with_extra_args_support(tx).update
            updates, state = update(grads, state, params, **{k: extra[k] for k in entry.extra})
            scaled = jax.tree.map(lambda u: (entry.scale * u).astype(u.dtype), updates)
            return optax.apply_updates(params, scaled), state, updates

        return step

    @jax.jit
    def gradients(params):
        if entry.per_example:
            one = jax.grad(lambda p, t: table.losses(entry.network(p), t[None])[0])
            return entry.loss(entry.network(params)), jax.vmap(one, (None, 0))(params, jnp.asarray(table.TOKENS))
        value, grads = jax.value_and_grad(lambda p: entry.loss(entry.network(p)))(params)
        return value, entry.grads(grads)

    plain_tx = entry.make()
    tx = jo.offload(entry.make(), min_bytes=0, update_on="host")
    step, plain = jo.jit(step_with(tx), donate_argnums=(0, 1)), jax.jit(step_with(plain_tx))
    state = tx.init(params)
    for k in range(2):
        value, grads = gradients(params)
        want = plain(params, jo.to_device(state), value, grads)
        before = params
        params, state, updates = step(copied(params), copied(state), value, grads)
        assert_same((params, jo.to_device(state)), want[:2], f"step {k}")
        if entry.tolerance:  # schedule_free's updates are differences of nearly equal numbers
            updates, want = (optax.apply_updates(before, u) for u in (updates, want[2]))
        else:
            want = want[2]
        assert_same(updates, want, f"step {k}: updates")
    has_state = any(table.eligible(x) for x in jax.tree.leaves(state))
    assert (step._driven is not None) == (has_state and name not in WRITTEN_ONLY)


# ---- which leaves, and what is said ---------------------------------------------------------------------------------


def test_the_first_gradients_go_to_the_cores():
    params = model()
    table = jo.placement(offload(update_on=0.4), params)
    cores = {leaf.param for leaf in table.leaves if leaf.on_cores}
    assert cores == {"layer_3/w"}
    assert "updated on the host's cores" in str(table)
    streams = {leaf.param: leaf.streams for leaf in table.leaves if leaf.host}
    assert streams["layer_3/w"] == "updated on the host's cores, 2 leaves together"
    assert "cores" not in streams["layer_1/w"]
    shown = jo.placement(jo.jit(step_of(offload())), params, offload().init(params), X)
    assert {leaf.streams for leaf in shown.leaves if leaf.host} == {"updated on the host's cores, 2 leaves together"}
    assert shown.stays == ("the step is cut at it, as the host's cores update a part",)


def test_shares_go_by_whole_parameters():
    params = {name: jnp.ones((64, 64)) for name in "abcd"}
    for share, want in ((0.6, "cd"), (0.4, "cd"), (0.2, "d"), (0.1, ""), (1.0, "abcd")):
        assert on_cores(share, params) == {*want}
    assert on_cores("host", {}) == set()
    assert on_cores({"a": "host", "b": "device", "c": 0.5, "d": [0.0, "host"]}, params | {"d": [params["a"]] * 2}) == {
        "a", "d/1"
    }  # fmt: skip


def on_cores(update_on, params):
    leaves = jo.placement(jo.offload(optax.adamw(1e-2), min_bytes=0, update_on=update_on), params).leaves
    return {leaf.param for leaf in leaves if leaf.on_cores}


def test_rules_by_path():
    """The first that is found in a path counts; where none is, it is the device. A share is of what a rule is for."""
    rules = [("layer_2", "device"), ("layer_[23]/w", "host"), ("layer_1", 0.6)]
    table = jo.placement(offload(update_on=rules), params := model())
    assert {leaf.param for leaf in table.leaves if leaf.on_cores} == {"layer_3/w", "layer_1/w"}
    assert {leaf.param for leaf in table.leaves if leaf.host and not leaf.on_cores} >= {"layer_2/w"}
    assert not any(leaf.on_cores for leaf in jo.placement(offload(update_on=[("layer_1", 0.0)]), params).leaves)
    # two names of places are a prefix, as of two parameters
    assert on_cores([("host", "device")], [(jnp.ones((64, 64)), jnp.ones((64, 64)))]) == {"0/0"}


@pytest.mark.parametrize("rules", [[("layer_9", "host")], [("layer_(", "host")], [("layer_1", "host"), ("layer_2", 2)]])
def test_bad_rules(rules):
    says = {"layer_9": "no parameter's path matches", "layer_(": "is not a regular expression"}.get(
        rules[0][0], "share in"
    )
    with pytest.raises(ValueError, match=f"update_on: .*{says}"):
        offload(update_on=rules).init(model())


@pytest.mark.parametrize("value", ["cpu", True, -0.1, 1.5, None, {"a": "gpu"}, [("a", "gpu")]])
def test_bad_values(value):
    with pytest.raises(ValueError, match=r"update_on: expected 'device', 'host', the share in \[0, 1\]"):
        jo.offload(optax.adamw(1e-2), update_on=value)


def test_a_prefix_that_does_not_fit():
    tx = jo.offload(optax.adamw(1e-2), update_on={"other": "host"})
    with pytest.raises(ValueError, match="update_on: expected a single value or a pytree prefix"):
        tx.init(model())


def test_nothing_in_host_memory_to_update():
    with pytest.raises(ValueError, match=r"update_on: with fraction=0"):
        jo.offload(optax.adamw(1e-2), fraction=0, update_on="host")


def test_what_looks_at_a_step_says_which_of_its_programs():
    """The first, with the peak."""
    tx, params = offload(update_on=0.5), model()
    state, step = tx.init(params), jo.jit(step_of(tx), donate_argnums=(0, 1))
    report = jo.verify(step, params, state, X)
    assert report.program == "before" and "drives this step in several programs" in str(report)
    assert jo.profile(step, params, state, X, steps=1).simulated is None


def test_somebody_elses_program():
    tx, params = offload(), model()
    state, step = tx.init(params), step_of(tx)
    for other in (
        lambda: jax.jit(step)(params, state, X),
        lambda: jax.jit(jo.jit(step))(params, state, X),
        lambda: jo.jit(step).lower(params, state, X),
        lambda: tx.update(params, state, params),
        lambda: jax.jit(jax.vmap(lambda g: tx.update(g, state, params)[0]))(jax.tree.map(lambda p: p[None], params)),
    ):
        with pytest.raises(ValueError, match=r"update_on: .* Fix: jo\.jit\(step\)"):
            other()


def test_in_a_scan_of_the_step():
    tx, params = offload(), model()

    def scanned(params, state, xs):
        return jax.lax.scan(lambda c, x: (step_of(tx)(*c, x)[:2], None), (params, state), xs)[0]

    with pytest.raises(ValueError, match="update_on: the update stands in a scan of the step"):
        jo.jit(scanned)(params, tx.init(params), jnp.stack([X, X]))


def test_the_cores_beside_which_devices():
    @dataclasses.dataclass(frozen=True)
    class Device:
        platform: str = "gpu"

    assert cores_beside([Device(), Device()]).cpu in jax.devices("cpu")
    assert cores_beside(jax.devices()).cpu is None
