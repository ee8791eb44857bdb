"""A small update through the features of ``jax.jit``: under ``jax.jit``, under ``jo.jit``, and driven from Python."""

import contextlib
import dataclasses
import functools
import gc
import pickle
import re
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo
from tests.support.random_steps import compiles

WAYS = ("update_on", "disk", "jit")  # most daily tests run only the first way, since random steps run under jit
HERE = jax.devices()[0]
FAR = jax.device_put(np.full(3, 2, np.float32), jax.devices()[1])
MOMENTUM = optax.sgd(0.1, momentum=0.9)
CONSTANT = jnp.ones(3)
RATES = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(8, 8)
DAILY = pytest.mark.daily("each way has a path of its own")


def mesh_of_two(axes=AxisType.Auto):
    return jax.make_mesh((2,), ("d",), axis_types=(axes,), devices=jax.devices()[:2])


def x_of(k):
    return np.arange(32, dtype=np.float32).reshape(4, 8) / 32 + k


def loss(p, x):
    return jnp.tanh(x @ p).var()


def updated(tx, p, s, g):
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s


def plain(tx, p, s, x):
    return updated(tx, p, s, jax.grad(loss)(p, x))


def with_flag(tx, p, s, x, flag=2):
    """True is not 1: a mean, or a factor."""
    factor = 3 if flag is True else getattr(flag, "factor", flag)
    return *updated(tx, p, s, jax.grad(loss)(p, x) * factor), factor * loss(p, x)


def hands_on(tx, p, s, x, ids, rate):
    return *plain(tx, p, s, x), {"ids": ids, "x": x, "rate": rate, "old": p}


def jitted_loss_with_constant(tx, p, s, x):
    @jax.jit
    def of_rows(p, x):
        y, rates = jax.lax.scan(lambda y, row: (jnp.tanh(y * row), RATES), x, p)
        return (y**2).mean() + (rates**2).mean()

    return updated(tx, p, s, jax.grad(of_rows)(p, x))


def loops(tx, p, s, n, x):
    """A loop whose condition reads what its carry begins with."""

    def body(carry):
        p, s, k = carry
        return *plain(tx, p, s, x), k + 1

    return jax.lax.while_loop(lambda carry: carry[2] < n + 2, body, (p, s, n))


def sums_in_a_reference(tx, p, s, x):
    """Gradients are added up in a mutable array, by a function with a jit of its own."""
    total = jax.new_ref(jnp.zeros_like(p))

    @jax.jit
    def add(rows):
        if jax.__version_info__ >= (0, 12):  # an older jax cannot run it
            rows, _ = jax.lax.optimization_barrier((rows, total))
        total[...] += jax.grad(loss)(p, rows)

    add(x)
    add(x + 1)
    return updated(tx, p, s, total[...])


def swaps(tx, p, s, x, a, b):
    """A loop that hands the caller's arrays on in its carry."""

    def body(carry):
        k, p, s, a, b = carry
        return k + 1, *plain(tx, p, s, x), b, a

    return *jax.lax.while_loop(lambda carry: carry[0] < 3 + x[0, 0], body, (0, p, s, a, b))[1:], a + 1


def ignores_a_state_in_a_branch(tx, p, s, x):
    """Functions inside of a branch are given the whole state, and do not read it."""
    total = jax.jit(lambda s, x: x.sum())

    def update():
        new, after = plain(tx, p, s, x)
        logged = jax.lax.cond(x[0, 0] > 0, lambda s, x: x.sum(), lambda s, x: x.max(), after, x)
        return new, after, total(after, x) + logged

    return jax.lax.cond(jnp.isfinite(x).all(), update, lambda: (p, s, total(s, x)))


def weak_in_one_branch(tx, p, s, x):
    """jax gives the results of a cond the types of its first branch, which are weak if it returns Python numbers."""

    def update():
        return *plain(tx, p, s, x), loss(p, x), 1.0

    def skip():
        return p, s, 0.0, loss(p, x)

    known = jax.lax.cond(True, lambda: jnp.float32(2), lambda: 0.0)
    return *jax.lax.cond(x[0, 0] > 0.5, update, skip), known


@dataclasses.dataclass(frozen=True)
class Feature:
    """A step, how it is jitted, and the further arguments of its calls after parameters and state."""

    step: Callable
    calls: tuple = ((x_of(0),), (x_of(1),), (x_of(2),))
    options: dict = dataclasses.field(default_factory=dict)
    named: tuple = ()
    around: tuple = ()
    same: bool = False  # each call takes the same arrays


@functools.partial(jax.tree_util.register_dataclass, data_fields=["factor"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Config:
    """Hashable, and a pytree with an array in it."""

    factor: np.generic


TYPED = tuple((x_of(0), flag) for flag in (True, 1, 1.0, np.float32(1), True, Config(np.int64(4))))
NAMED = tuple({"flag": flag} for flag in (True, 1, np.int32(2), np.bool_(True)))
FEATURES = {
    "weak in one branch": Feature(weak_in_one_branch, ((x_of(1),), (x_of(0),))),
    "a loop": Feature(loops, ((jnp.int32(0), x_of(0)), (jnp.int32(5), x_of(0))), {"donate_argnums": (0, 1, 2)}),
    "a loop that swaps": Feature(swaps, ((x_of(0), jnp.ones(2), jnp.zeros(2)),) * 2, {"donate_argnums": (0, 1)}),
    "types": Feature(plain, ((x_of(0),), (x_of(1)[:2],), (x_of(0).astype(np.float16),), (jnp.asarray(x_of(2)),))),
    "static by number": Feature(with_flag, TYPED, {"static_argnums": 3}),
    "static by name": Feature(with_flag, ((x_of(0),),) * 4, {"static_argnames": "flag"}, NAMED),
    "static from the end, left out": Feature(with_flag, options={"static_argnums": -1}),
    "train or evaluate": Feature(
        lambda tx, p, s, x, train=True: plain(tx, p, s, x) if train else (p, s),
        ((x_of(0),),) * 4,
        {"static_argnames": "train"},
        tuple({"train": t} for t in (False, True, True, False)),
    ),
    "handed on": Feature(
        hands_on, ((x_of(0), np.arange(4), 0.5), (x_of(1), [1, 2], True), (x_of(1), np.int64(3), np.float64(2)))
    ),
    "handed on, donated": Feature(
        lambda tx, p, s, x, a: (*plain(tx, p, s, x), a), ((x_of(0), jnp.ones(3)),), {"donate_argnums": (0, 1, 3)}
    ),
    "results twice": Feature(
        lambda tx, p, s, x, y: (*plain(tx, p, s, x), [p, x, x, y, y, CONSTANT]),
        ((x_of(0), jnp.ones(2)),),
        {"donate_argnums": 3},
    ),
    "a jitted loss with a constant": Feature(jitted_loss_with_constant),
    "a constant from another device": Feature(lambda tx, p, s, x: (*plain(tx, p, s, x), FAR * x[0, 0])),
    "a state that a branch ignores": Feature(
        ignores_a_state_in_a_branch, ((x_of(0),), (x_of(1) * np.nan,), (x_of(1),))
    ),
    "one array twice": Feature(
        lambda tx, p, s, x, a, b: (*plain(tx, p, s, x), a + b), ((x_of(0), *(jnp.ones(4),) * 2),) * 2, same=True
    ),
    "shardings of the results": Feature(
        plain, options={"out_shardings": (jax.sharding.SingleDeviceSharding(HERE), None)}
    ),
    "an argument without use": Feature(
        lambda tx, p, s, x, a: plain(tx, p, s, x),
        ((x_of(0), jnp.ones(3)),),
        {"donate_argnums": (0, 1), "keep_unused": True},
    ),
    "a reference": Feature(sums_in_a_reference),
    "precision": Feature(plain, around=(None, functools.partial(jax.default_matmul_precision, "highest"), None)),
}


def offloaded(way, tmp_path, inner=MOMENTUM):
    how = {"jit": {}, "update_on": {"update_on": "host"}, "disk": {"disk": jo.disk(tmp_path / "state")}}[way]
    return jo.offload(inner, min_bytes=0, **how)


def begun(way, tmp_path, inner=MOMENTUM):
    """Return an optimizer, parameters and their state."""
    tx, p = offloaded(way, tmp_path, inner), jax.device_put(jnp.eye(8), HERE)
    return tx, p, tx.init(p)


def run(jit, tx, feature):
    """Return each call's results, its arrays, which of them it deletes, and the compiles when all calls run again."""
    step = jit(functools.partial(feature.step, tx), **feature.options)
    p = jax.device_put(jnp.eye(8) + 0.1, HERE)
    s, found, steady = tx.init(jnp.copy(p)), [], 0
    for again in (False, False, True):
        for k, call in enumerate(feature.calls):
            args = [jnp.copy(x) if isinstance(x, jax.Array) and not feature.same else x for x in call]
            around = feature.around[k] if k < len(feature.around) else None
            old, before = (p, args), compiles()
            with around() if around else contextlib.nullcontext():
                p, s, *rest = step(p, s, *args, **(feature.named[k] if feature.named else {}))
                jax.block_until_ready((p, rest))
            steady += compiles() - before if again else 0
            given = [x for x in jax.tree.leaves(old) if isinstance(x, jax.Array)]
            found.append((p, rest, given, [x.is_deleted() for x in given]))
            p = jnp.copy(p)
    return found, steady


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [pytest.param(k, marks=[DAILY] if k == "results twice" else []) for k in FEATURES])
def test_a_step_is_as_under_jit(name, way, tmp_path):
    """The caller may donate or delete a result, because it is no argument, no constant and no other result."""
    if name == "static from the end, left out" and jax.__version_info__ < (0, 11):
        pytest.skip("this jax counts from the end of the arguments that are given")
    want, _ = run(jax.jit, MOMENTUM, FEATURES[name])
    got, steady = run(jo.jit, offloaded(way, tmp_path), FEATURES[name])
    for k, ((p, rest, _, deleted), (p_want, rest_want, _, deleted_want)) in enumerate(zip(got, want, strict=True)):
        for x, y in zip(jax.tree.leaves((p, rest)), jax.tree.leaves((p_want, rest_want)), strict=True):
            assert isinstance(x, jax.Array), (k, type(x))
            assert (x.dtype, x.weak_type, x.shape) == (y.dtype, y.weak_type, y.shape), k
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-6, err_msg=f"call {k}")
        assert jax.tree.structure(rest) == jax.tree.structure(rest_want)
        assert deleted == deleted_want, k
    assert steady == 0
    kept = [x for *_, given, deleted in got for x, gone in zip(given, deleted, strict=True) if not gone]
    results = [x for p, rest, *_ in got for x in jax.tree.leaves((p, rest))]
    for k, result in enumerate(results):
        result.delete()
        assert not any(other.is_deleted() for other in (CONSTANT, *kept, *results[k + 1 :])), k


# ---- who owns a result


@DAILY
@pytest.mark.parametrize("way", WAYS)
def test_what_a_branch_hands_on_is_nobody_elses(way, tmp_path):
    """The old parameters are a result too, which the next step donates."""
    tx, p, state = begun(way, tmp_path)

    @functools.partial(jo.jit, donate_argnums=3)
    def step(p, s, x, target):
        new, s = jax.lax.cond(jnp.isfinite(x).all(), lambda: plain(tx, p, s, x), lambda: (p, s))
        return new, s, p

    target = jnp.copy(p)
    for x in (x_of(0) * np.nan, x_of(0) * np.nan, x_of(1)):
        new, state, target = step(p, state, x, target)
        assert not p.is_deleted() and not new.is_deleted()
        p = new
    assert float(jnp.abs(p - jnp.eye(8)).max()) > 0


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_donated_array_that_nothing_reuses_is_freed(way, tmp_path):
    """``jax.jit`` would keep such an array, and warn."""
    tx, p, s = begun(way, tmp_path)
    jo.jit(functools.partial(plain, tx), donate_argnums=2)(p, s, x := jax.device_put(x_of(0), HERE))
    assert x.is_deleted()


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_is_filled_anew_changes_no_result(way, tmp_path):
    tx, p, s = begun(way, tmp_path)
    step, x, ids, log = jo.jit(functools.partial(hands_on, tx)), x_of(0), np.arange(4), []
    for k in range(2):
        x[...], ids[...] = k, k
        p, s, out = step(p, s, x, ids, 0.5)
        jax.block_until_ready((p, out))
        log.append(out)
    assert [(int(out["ids"][0]), float(out["x"][0, 0])) for out in log] == [(0, 0), (1, 1)]


def slow(inner):
    """An optimizer whose program on the cores runs for longer than Python takes to end the step."""

    def update(grads, state, params):
        grads, state = inner.update(grads, state, params)
        y = jax.lax.fori_loop(0, 300, lambda _, y: jnp.sin(y @ y), jnp.tile(grads, (32, 32)))
        return grads + 0 * y.sum() * params, state

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.parametrize("who", ["the step", "the next program", "nobody, as somebody holds a view of them"])
def test_parameters_that_the_cores_read_are_donated_as_under_jit(who, tmp_path):
    """While a program of the cores still reads them: the step returns the old ones, or the caller donates them next."""
    found = []
    for jit, tx in (jax.jit, slow(MOMENTUM)), (jo.jit, offloaded("update_on", tmp_path, slow(MOMENTUM))):
        p = jax.device_put(jnp.eye(8), HERE)
        step = jit(lambda p, s, x, tx=tx: (*plain(tx, p, s, x), p), donate_argnums=0 if who == "the step" else ())
        step(jnp.copy(p), s := tx.init(p), x_of(0))  # compiled
        p = jnp.copy(p)
        view = np.asarray(p) if "view" in who else None
        _, _, old = step(p, s, x_of(0))
        if who != "the step":
            old = jax.jit(lambda p: p, donate_argnums=0)(p)
        np.testing.assert_array_equal(old, np.eye(8))
        found.append(p.is_deleted())
        assert view is None or np.array_equal(view, old)
    assert found == ["view" not in who] * 2


# ---- how often and where programs run


SETTINGS = {
    "no tracer outlives its trace": jax.checking_leaks,
    "no transfer that nobody asked for": functools.partial(jax.transfer_guard, "disallow"),
    "jax finds no fault in the programs": functools.partial(jax.enable_checks, True),
    "no key is used twice": jax.debug_key_reuse,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_forbid(setting, way, tmp_path):
    with jax.checking_leaks():
        tx, p, s = begun(way, tmp_path)
    step, x = functools.partial(plain, tx), jax.device_put(x_of(0), HERE)
    jitted, train = jo.jit(step), jo.pipelined(step, donate_argnames=("p", "s"))
    for _ in range(2):
        with SETTINGS[setting]():
            p, s = jitted(p, s, x)
    if way != "disk":
        with SETTINGS[setting]():
            p, s = train.finish(train((p, s), x)[0])
    assert np.isfinite(p).all()


@pytest.mark.parametrize("optimizer", [MOMENTUM, optax.optimistic_gradient_descent(0.1)])
@pytest.mark.parametrize("sharding_of", ["the parameters", "shard_map"])
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("way", WAYS)
def test_one_compile_on_a_mesh(way, axes, sharding_of, optimizer, tmp_path):
    mesh, whole, rows = mesh_of_two(axes), PartitionSpec(), PartitionSpec("d", None)
    tx = offloaded(way, tmp_path, optimizer)

    def by_shard_map(tx, p, s, x):
        return updated(tx, p, s, jax.shard_map(jax.grad(loss), in_specs=(whole, rows), out_specs=whole)(p, x))

    with jax.set_mesh(mesh):
        function, *specs = (by_shard_map, whole, rows) if sharding_of == "shard_map" else (plain, rows, whole)
        p, x = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((jnp.eye(8), x_of(0)), specs, strict=True))
        step, s = jo.jit(functools.partial(function, tx), donate_argnums=(0, 1)), tx.init(p)
        p, s = step(p, s, x)
        before = compiles()
        for _ in range(2):
            p, s = step(p, s, x)
        assert compiles() == before


@pytest.mark.parametrize("donated", [(0, 1), (0, 1, 3)])
def test_all_leaves_that_a_driven_step_hands_on_take_one_program(donated, tmp_path):
    tx = offloaded("update_on", tmp_path)

    def compiled(sizes):
        step = jo.jit(lambda p, s, x, frozen: (*plain(tx, p, s, x), frozen), donate_argnums=donated)
        p, x, *frozen = jax.device_put([jnp.eye(8), jnp.asarray(x_of(0)), *map(jnp.ones, sizes)], HERE)
        s, before = tx.init(p), compiles()
        *_, handed_on = step(p, s, x, frozen)
        assert [each.sum() for each in jax.device_get(handed_on)] == [*sizes]
        return compiles() - before

    compiled((3,))
    assert compiled((101, 102, 103, 104)) <= compiled((111,))


@DAILY
@pytest.mark.parametrize("way", WAYS)
def test_callbacks_run_once_a_step(way, tmp_path):
    """Callbacks before, in and after the update run once, even if nothing reads their results."""
    log = []

    def told(what, x):
        jax.debug.callback(lambda _: log.append(what), x)

    def update(grads, state, params=None):
        told("gradient", grads.sum())
        updates, state = MOMENTUM.update(grads, state, params)
        told("moment", optax.tree.norm(state))
        return updates, state

    def step(p, s, x):
        told("before", x.sum())
        p, s = plain(tx, p, s, x)
        told("after", p.sum())
        return p, s

    tx, p, s = begun(way, tmp_path, optax.GradientTransformation(MOMENTUM.init, update))
    jax.block_until_ready(jo.jit(step)(p, s, x_of(0))[0])
    jax.effects_barrier()
    assert sorted(log) == ["after", "before", "gradient", "moment"]


@pytest.mark.parametrize("way", WAYS)
def test_arguments_on_two_devices(way, tmp_path):
    """jax's own error names the user's arguments; an argument that the step does not read may be anywhere."""
    tx, p, s = begun(way, tmp_path)
    step = jo.jit(lambda p, s, x, far, use: (*plain(tx, p, s, x), far if use else x), static_argnums=4)
    p, s, _ = step(p, s, x_of(0), FAR, False)
    assert p.sharding.device_set == {HERE}
    with pytest.raises(ValueError, match=r"incompatible devices.*argument p of .*argument far of"):
        step(p, s, x_of(0), FAR, True)


@pytest.mark.parametrize("way", WAYS)
def test_results_that_cannot_be_divided_raise_before_anything_is_donated(way, tmp_path):
    tx, mesh = offloaded(way, tmp_path), mesh_of_two()
    divided = NamedSharding(mesh, PartitionSpec("d"))
    step = jo.jit(
        lambda p, s, x: (*plain(tx, p, s, x), {"rest": x[:3]}),
        donate_argnums=(0, 1), out_shardings=(divided, None, {"rest": divided}),
    )  # fmt: skip
    p = jax.device_put(jnp.eye(8), NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(ValueError, match=r"partitioned 2 times, but the dimension size is 3") as error:
        step(p, tx.init(p), x_of(0))
    assert "result[2]['rest']" in str(error.value) or jax.__version_info__ < (0, 12)  # older jax names no result
    assert not p.is_deleted()


# ---- jo.jit itself --------------------------------------------------------------------------------------------------


def double(x, by=2):
    return x * by


def test_jax_finds_what_it_compiled_of_a_function():
    x = jnp.ones(3)
    jo.jit(double)(x)
    before = compiles()
    for _ in range(3):
        jo.jit(double)(x)
    assert compiles() == before


def test_what_a_function_closes_over_goes_with_it():
    big = jnp.ones(10)
    step = jo.jit((lambda big: lambda: big * 2)(big))
    step()
    seen = weakref.ref(big)
    del big, step
    gc.collect()
    assert seen() is None


def test_a_function_with_attributes_named_like_methods():
    def step(x):
        return x + 1

    step.trace = step.lower = "the function's own"
    jitted = jo.jit(step)
    assert jitted(1) == 2
    assert jitted.trace == jax.jit(step).trace == "the function's own"
    del step.lower
    assert jo.jit(step).lower(1).as_text() == jax.jit(step).lower(1).as_text()


class Net:
    by = 3
    __call__ = jo.jit(lambda self, x: self.by * x, static_argnums=0)


def wrapped_again():
    """A wrapper around a step is a function of its own."""
    named = functools.wraps(double)(jo.jit(functools.partial(double, by=4)))
    return named.__name__, named(3.0)


X = jnp.ones(3)
SQUARE = jo.jit(lambda x: x * x)
WORKS = {  # a use that works as with a function of jax.jit, and its result
    "a derivative": (lambda: (SQUARE(3.0), jo.jit(jax.grad(SQUARE))(3.0)), (9, 6)),
    "vmap": (lambda: jax.vmap(jo.jit(double))(jnp.ones((2, 3))).sum(), 12),
    "linearize": (lambda: jax.linearize(jo.jit(double), X)[1](X).sum(), 6),
    "a wrapper": (wrapped_again, ("double", 12)),
    "a method": (lambda: Net()(X).sum(), 9),
    "export": (lambda: jax.export.export(jo.jit(double))(X).call(X).sum(), 6),
    "pickle": (lambda: pickle.loads(pickle.dumps(STEP))(X, by=4).sum(), 12),
    "ahead of time": (lambda: STEP.lower(X, by=3).compile()(X).sum(), 9),
    "a trace": (lambda: STEP.trace(X, by=3).jaxpr.jaxpr.debug_info.arg_names[0], "x"),
    "one equation": (lambda: len(jax.make_jaxpr(STEP)(X).eqns), 1),
    "its names": (lambda: (STEP.__wrapped__, STEP.__name__), (double, "double")),
    "its class": (lambda: isinstance(STEP, jax.stages.Wrapped), True),
    "shapes without devices": (lambda: STEP.eval_shape(NOWHERE).shape, (4,)),
    "a trace without devices": (lambda: STEP.trace(NOWHERE).out_info.shape, (4,)),
}
STEP = jo.jit(double, static_argnames="by")
NOWHERE = jax.ShapeDtypeStruct(
    (4,), "float32", sharding=NamedSharding(jax.sharding.AbstractMesh((2,), ("d",)), PartitionSpec("d"))
)


def test_it_does_what_the_result_of_jax_jit_does():
    assert {name: does() for name, (does, _) in WORKS.items()} == {name: given for name, (_, given) in WORKS.items()}
    traces = []
    for _ in range(2):
        noted = jo.jit(traces.append)
        noted(X)
        noted.clear_cache()
    assert len(traces) == 2
    with jax.disable_jit():  # Python's own control flow
        assert jo.jit(lambda x: x + 1 if x.sum() > 2 else x)(X).sum() == 6


def test_in_the_place_of_jax_jit(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "jit", jo.jit)
    assert jax.jit(lambda x: x + 1)(X).sum() == 6
    tx, p, s = begun("jit", tmp_path)
    jax.jit(functools.partial(plain, tx))(p, s, x_of(0))


def test_errors_name_the_arguments_of_the_user():
    def chooses(params, batch):
        return params if batch["x"] > 0 else batch

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"chooses.*\n?.*batch\['x'\]") as error:
        jo.jit(chooses)(X, {"x": jnp.ones(())})
    assert "values[" not in str(error.value) and "on_arrays" not in str(error.value)
    for named, call in {
        "params": lambda: jo.jit(chooses)("text", {"x": 1}),
        "weak reference": lambda: jo.jit(type("S", (), {"__slots__": (), "__call__": lambda self, x: x})())(1),
        "no_such_option": lambda: jo.jit(chooses, no_such_option=1),
        "callable": lambda: jo.jit(None),
    }.items():
        with pytest.raises(TypeError, match=named):
            call()


def test_jax_speaks_of_the_users_function():
    three = functools.partial(double, by=3)  # a callable without a name
    three.of = "the user's"
    assert jo.jit(three).of == jax.jit(three).of == "the user's"
    assert jo.jit(three).__name__ == "double" and "jit_double" in jo.jit(three).lower(X).as_text()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        jo.jit(lambda x: jnp.log(x))(-X)
    by_halves, said = NamedSharding(mesh_of_two(), PartitionSpec("d")), list[list[str]]()
    for jit in jax.jit, jo.jit:
        with pytest.raises(ValueError, match="implies that array axis 0 is partitioned") as error:
            jit(double, out_shardings=by_halves)(X)
        said.append(re.findall(r"\w+\.py", str(error.value)))  # jax 0.10 names no line
    assert said[0] == said[1]
    with pytest.warns(DeprecationWarning, match="deprecated") as told:
        jo.jit(double, backend="cpu")(X)
    assert len(told) == 1
