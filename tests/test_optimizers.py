"""Law 2: every optimizer of optax and optax.contrib gives the same numbers with its state on the host.

Wrapped whole and in part, under jit with donation, eagerly, in scan, cond and vmap, and differentiated. CPU tests prove
values and placement, never memory or speed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import jax_offload as jo
from tests.support import optimizers as table
from tests.support.optimizers import TABLE, Entry, assert_same, copied, eligible
from tests.support.rows import rows
from tests.support.trees import FAST, kinds

STEPS = 50
DEVICE = jax.devices()[0]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]


# ---- training several variants of one optimizer side by side -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """Variants of one optimizer on the same parameters; the first is resident, the measure of the others."""

    label: str
    params: Any
    variants: dict[str, optax.GradientTransformation]


@functools.cache
def gradients(loss: Callable, network: Callable, per_example: bool, grads: Callable) -> Callable:
    """``[params] -> [(value, gradient)]``, jitted once for all optimizers, so that everyone gets the same numbers."""

    def one(params: Any) -> tuple[Any, Any]:
        if per_example:
            tokens = jnp.asarray(table.TOKENS)
            of_example = jax.grad(lambda p, t: table.losses(network(p), t[None])[0])
            return loss(network(params)), jax.vmap(of_example, (None, 0))(params, tokens)
        value, gradient = jax.value_and_grad(lambda p: loss(network(p)))(params)
        return value, grads(gradient)

    return jax.jit(lambda many: [one(params) for params in many])


def updated(entry: Entry, tx: Any, params: Any, state: Any, value: Any, grads: Any) -> tuple[Any, Any, Any]:
    """New parameters, new state, and what ``update`` returned."""

    def of_params(p: Any) -> Any:
        return entry.loss(entry.network(p))

    extra = {"value": value, "grad": grads, "value_fn": of_params, "obj_fn": of_params}
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **{name: extra[name] for name in entry.extra})
    scaled = jax.tree.map(lambda u: (entry.scale * u).astype(u.dtype), updates)
    return optax.apply_updates(params, scaled), state, updates


def parameters(entry: Entry, dtype: Any = jnp.float32, only: tuple[str, ...] = ()) -> Any:
    params = {name: p for name, p in table.network(dtype).items() if not only or name in only}
    if entry.complex:
        params = jax.tree.map(lambda p: p * (1.0 + 0.5j), params)
    return jax.device_put(entry.params(params), DEVICE)


class Training:
    """All variants of all runs in one program, which compiles in little more than the time of one of them.

    ``step`` donates parameters and states. Its ``out_shardings`` are given: a jitted function without them pairs what
    it donates by shape alone, and a program with resident and host states side by side needs better.
    """

    def __init__(self, entry: Entry, runs: list[Run]) -> None:
        self.entry = entry
        self.names = [(run, name) for run in runs for name in run.variants]
        self.txs = [run.variants[name] for run, name in self.names]
        self.first = [next(k for k, (other, _) in enumerate(self.names) if other is run) for run, _ in self.names]
        self.params = [copied(run.params) for run, _ in self.names]
        init = jax.jit(
            lambda params: [tx.init(p) for tx, p in zip(self.txs, params, strict=True)], compiler_options=FAST
        )
        self.states = init(self.params)
        self.updates: list[Any] = []
        self.losses: list[list[float]] = []
        self._compiled: dict[Any, Any] = {}

    def step(self) -> None:
        gradient = gradients(self.entry.loss, self.entry.network, self.entry.per_example, self.entry.grads)
        grads = gradient(self.params)
        args = (self.params, self.states, grads)
        tree = jax.tree.structure(args)
        if tree not in self._compiled:  # monitor's state grows in its first step
            self._compiled[tree] = self._compile(args)
        self.losses.append([float(value) for value, _ in grads])
        self.params, self.states, self.updates = self._compiled[tree](*args)
        assert all(p.is_deleted() for p in jax.tree.leaves(args[0])), "parameters were not donated"

    def equalize(self) -> None:
        """Gives every variant the resident parameters and state, where it keeps them."""
        for i, k in enumerate(self.first):
            if i != k:
                self.params[i] = copied(self.params[k])
                put = jax.tree.map(
                    lambda x, own: jax.device_put(x, own.sharding), copied(self.states[k]), self.states[i]
                )
                self.states[i] = put

    def compare(self, what: str) -> None:
        for i, k in enumerate(self.first):
            if i != k:
                run, name = self.names[i]
                where = f"{run.label}, {name}, {what}"
                assert_same(self.states[i], self.states[k], f"{where}: state")
                if self.updates:
                    assert_same(self.updates[i], self.updates[k], f"{where}: updates", self.entry.tolerance)
                    assert_same(self.params[i], self.params[k], f"{where}: parameters")

    def _compile(self, args: Any) -> Any:
        def step(params: Any, states: Any, grads: Any) -> Any:
            results = [
                updated(self.entry, tx, p, s, value, g)
                for tx, p, s, (value, g) in zip(self.txs, params, states, grads, strict=True)
            ]
            return tuple(list(column) for column in zip(*results, strict=True))

        traced = jax.jit(step, donate_argnums=(0, 1)).trace(*args)
        shardings = [
            SingleDeviceSharding(
                DEVICE, memory_kind="pinned_host" if x.memory_space == jax.memory.Space.Host else "device"
            )
            for x in traced.jaxpr.out_avals
        ]
        out = jax.tree.unflatten(jax.tree.structure(traced.out_info), shardings)
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=out, compiler_options=FAST)


def assert_placed(run: Run, name: str, state: Any) -> None:
    """Every leaf is on the device, and in the memory, where ``jo.placement`` says."""
    rows = jo.placement(run.variants[name], run.params).leaves
    leaves = jax.tree.leaves(state)
    if len(rows) == len(leaves):  # not for monitor, whose state grows in its first step
        assert kinds(state) == ["pinned_host" if row.host else "device" for row in rows], f"{run.label}, {name}"
    assert all(x.sharding.device_set == {DEVICE} for x in leaves), f"{run.label}, {name}"
    assert all(eligible(x) for x in leaves if x.sharding.memory_kind == "pinned_host"), f"{run.label}, {name}"


def assert_same_numbers(entry: Entry, runs: list[Run]) -> Training:
    """Init and single updates from equal states as in law 2, losses of donated steps to 1e-4."""
    training = Training(entry, runs)
    training.compare("init")
    training.states = copied(training.states)  # without weak types, which some optimizers lose in their first step
    for i in range(STEPS):
        if i == 2:  # "every k steps" is every 3 in this file: an update that does something
            training.equalize()
        training.step()
        if i in (0, 2):
            training.compare(f"step {i}")
    for (run, name), state in zip(training.names, training.states, strict=True):
        if run.variants[name] is not next(iter(run.variants.values())):
            assert_placed(run, name, state)
    losses = np.asarray(training.losses)
    for i, k in enumerate(training.first):
        run, name = training.names[i]
        assert np.all(np.isfinite(losses[:, i])), f"{run.label}, {name}: the test's problem diverges"
        error = np.abs(losses[:, i] - losses[:, k]) / np.maximum(1.0, np.abs(losses[:, k]))
        assert error.max() <= 1e-4, f"{run.label}, {name}: losses off by {error.max():.1e} at step {error.argmax()}"
    return training


# ---- every optimizer, whole ---------------------------------------------------------------------------------------


def test_table_has_every_public_factory():
    names = {name.partition(":")[0] for name in TABLE}
    public = table.public_factories()
    missing = public - names - set(table.NOT_FACTORIES)
    assert not missing, f"public in optax or optax.contrib: give them an entry in TABLE: {sorted(missing)}"
    assert not (names | set(table.NOT_FACTORIES)) - public, "no longer in optax"
    assert len(public) > 100


# Daily one of each kind: elementwise, with norms of leaves or of all, factored, with matrices, counters, branches, keys
# or losses in the state. CI has all of them; what they are made of, and their variants, are for --everything.
_DAILY = ["adamw", "adafactor:factored", "lamb", "lion", "muon", "prodigy", "schedule_free_adamw", "sgd", "sm3", "adan"]
_DAILY += ["MultiSteps:skip", "apply_if_finite", "conditionally_mask", "inject_hyperparams", "partition", "lookahead"]
_DAILY += ["lbfgs", "momo", "dpsgd", "monitor", "ema", "galore", "split_real_and_imaginary"]
_SELDOM = [n for n in TABLE if n.startswith("scale_by_") or (":" in n and n not in _DAILY)]


@pytest.mark.long("more optimizers", but=["adamw", "adafactor:factored"])
@pytest.mark.parametrize("name", rows(TABLE, "trains for 50 steps, four times", daily=_DAILY, never=_SELDOM))
def test_same_values(name, request):
    entry = TABLE[name]
    inner = entry.make()
    assert jo.offload(inner, fraction=0).init is inner.init
    variants = {"resident": inner, "fraction 1": jo.offload(inner, min_bytes=0, window=1)}  # in the smallest chunks
    halves = (0.3, 0.5) if request.config.getoption("--everything") else (0.3,)
    if entry.state:
        variants |= {f"fraction {f}": jo.offload(inner, fraction=f, min_bytes=0) for f in halves}
    dtypes = [jnp.float32] if entry.complex else [jnp.float32, jnp.bfloat16]
    runs = [Run(np.dtype(dtype).name, parameters(entry, dtype), variants) for dtype in dtypes]
    if not request.config.getoption("--everything"):
        runs[1:] = [dataclasses.replace(run, variants=dict(list(variants.items())[:2])) for run in runs[1:]]
    training = assert_same_numbers(entry, runs)

    for (_, variant), state in zip(training.names, training.states, strict=True):
        may = [eligible(x) for x in jax.tree.leaves(state)]
        host = [kind == "pinned_host" for kind in kinds(state)]
        assert any(may) == entry.state
        if variant == "fraction 1":
            assert host == may
        elif variant == "resident":
            assert not any(host)
        elif sum(may) > 3:
            assert 0 < sum(host) < sum(may)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_injected_hyperparameter_can_be_changed(place):
    if place == "inside":
        tx = jo.offload(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), min_bytes=0)
    else:
        adam = lambda learning_rate: jo.offload(optax.adam(learning_rate), min_bytes=0)  # noqa: E731
        tx = optax.inject_hyperparams(adam)(learning_rate=1e-2)
    params = parameters(TABLE["adam"])
    update = jax.jit(tx.update, compiler_options=FAST)
    state = tx.init(params)
    assert state.hyperparams["learning_rate"].sharding.memory_kind == "device"
    first, state = update(params, state)
    state.hyperparams["learning_rate"] = jax.device_put(jnp.float32(0.0), DEVICE)
    second, state = update(params, state)
    state.hyperparams["learning_rate"] = state.hyperparams["learning_rate"] + 2e-2
    third, state = update(params, state)
    assert all(np.any(np.asarray(u)) for u in jax.tree.leaves(first))
    assert not any(np.any(np.asarray(u)) for u in jax.tree.leaves(second))
    np.testing.assert_allclose(third["head"], 2 * first["head"], rtol=1e-4)


# ---- eagerly, and under jax's transformations -----------------------------------------------------------------------

# name in the table, window; 1 byte means the smallest chunks, in loops
MODES = {
    **{
        name: (name, None)
        for name in (
            "adamw", "adafactor:factored", "MultiSteps", "partition", "muon", "schedule_free_adamw", "prodigy",
            "inject_hyperparams", "lbfgs:fixed", "dpsgd", "momo",
        )
    },
    "adamw, chunks": ("adamw", 1),
    "MultiSteps, chunks": ("MultiSteps", 1),
    "adafactor:factored, chunks": ("adafactor:factored", 1),
}  # fmt: skip


def problem(name: str, window: int | None = None) -> tuple[Entry, Any, Any, Any, Any, Any]:
    """An entry of the table with a resident and an offloaded optimizer; parameters of a part of the network, a value
    and gradients."""
    entry = dataclasses.replace(TABLE[name], loss=table.bowl)
    params = parameters(entry, only=("layers_2", "layers_10", "mix", "scale"))
    value, grads = jax.value_and_grad(lambda p: table.bowl(entry.network(p)))(params)
    grads = jax.tree.map(lambda g: g + 0.05, entry.grads(grads))
    if entry.per_example:
        grads = jax.tree.map(lambda g: jnp.stack([g, -0.5 * g, 2.0 * g]), grads)
    inner = entry.make()
    return entry, inner, jo.offload(inner, min_bytes=0, window=window), params, value, grads


def assert_on_host(state: Any, resident: Any = None) -> None:
    """The leaves on the host are those that may be: for a batched ``state``, those of the unbatched resident one."""
    may = [eligible(x) for x in jax.tree.leaves(state if resident is None else resident)]
    assert [k == "pinned_host" for k in kinds(state)] == may


@pytest.mark.long("more optimizers", but=["adafactor:factored", "MultiSteps", "dpsgd", "prodigy"])
@pytest.mark.parametrize("name", MODES)
def test_eagerly(name):
    entry, inner, tx, params, value, grads = problem(*MODES[name])
    state = tx.init(params)
    resident = jax.device_put(inner.init(params), DEVICE)
    # Outside of jit an update is compiled all the same. Op by op optax rounds otherwise, and the updates of
    # schedule_free's first step are nothing but rounding.
    plain = jax.jit(lambda p, s: updated(entry, inner, p, s, value, grads))
    for _ in range(2):
        got, want = updated(entry, tx, params, state, value, grads), plain(params, resident)
        assert_same(got, want, name, tolerance=1e-5 if "muon" in name else 1e-6)
        assert all(k == "device" for k in kinds(got[2]))
        params, state, _ = got
        resident = want[1]
        if name != "monitor":
            assert_on_host(state)


@pytest.mark.long("more optimizers", but=["adamw*", "MultiSteps"])
@pytest.mark.oldest("scans and loops", only=["adamw*"])
@pytest.mark.parametrize("name", MODES)
def test_scan(name):
    entry, inner, tx, params, value, grads = problem(*MODES[name])

    @functools.partial(jax.jit, compiler_options=FAST)
    def steps(*states: Any) -> Any:
        def run(tx: Any, state: Any) -> Any:
            def body(carry: Any, _: Any) -> Any:
                new_params, state, updates = updated(entry, tx, *carry, value, grads)
                return (new_params, state), updates

            return jax.lax.scan(body, (params, state), length=3)

        return [run(t, s) for t, s in zip((inner, tx), states, strict=True)]

    want, got = steps(inner.init(params), tx.init(params))
    assert_same(got, want, name, tolerance=1e-5)  # of three updates
    assert_on_host(got[0][1])


@pytest.mark.long("more optimizers", but=["MultiSteps*"])
@pytest.mark.oldest("branches", only=["MultiSteps*"])
@pytest.mark.parametrize("name", MODES)
def test_cond(name):
    entry, inner, tx, params, value, grads = problem(*MODES[name])

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(flag: Any, *states: Any) -> Any:
        def run(tx: Any, state: Any) -> Any:
            return jax.lax.cond(
                flag, lambda s: updated(entry, tx, params, s, value, grads)[:2], lambda s: (params, s), state
            )

        return [run(t, s) for t, s in zip((inner, tx), states, strict=True)]

    states = [inner.init(params), tx.init(params)]
    for flag in True, False, True:
        want, got = step(flag, *states)
        assert_same(got, want, f"{name}, {flag}")
        assert_on_host(got[1])
        if not flag:
            assert_same(got, (params, states[1]), name)
        states = [want[1], got[1]]


@pytest.mark.long("more optimizers", but=["adafactor*"])
@pytest.mark.oldest("batching of factored leaves", only=["adafactor*"])
@pytest.mark.parametrize("name", MODES)
def test_vmap(name):
    """Over stacked parameters, gradients and states; there whole leaves are loaded."""
    entry, inner, tx, params, value, grads = problem(*MODES[name])

    def stacked(tree: Any) -> Any:
        return jax.device_put(jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, 2.0 * x]), tree), DEVICE)

    many = stacked((params, value, grads))

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(params: Any, value: Any, grads: Any) -> Any:
        def run(tx: Any) -> Any:
            state = jax.vmap(tx.init)(params)
            p, state, _ = jax.vmap(lambda *args: updated(entry, tx, *args))(params, state, value, grads)
            return jax.vmap(lambda *args: updated(entry, tx, *args))(p, state, value, grads)

        return [run(t) for t in (inner, tx)]

    want, got = step(*many)
    assert_same(got, want, name)
    assert_on_host(got[1], inner.init(params))


@pytest.mark.long("more optimizers", but=["adamw, chunks*"])
@pytest.mark.oldest("derivatives by a state")
@pytest.mark.parametrize(
    ("name", "jitted"),
    rows(
        [("adamw", False), ("adamw", True), ("adamw, chunks", True), ("adafactor:factored, chunks", True),
         ("MultiSteps", True), ("partition", True), ("inject_hyperparams", True)],
        "compiles derivatives of two updates",
        daily=[("adamw", False), ("adamw, chunks", True), ("MultiSteps", True)],
    ),
)  # fmt: skip
def test_grad(name, jitted):
    """Through two updates, by parameters, gradients and the state that they start from."""
    entry, inner, tx, params, value, grads = problem(*MODES[name])
    warm = updated(entry, inner, params, inner.init(params), value, grads)[1]
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(warm)]

    def scalar(tx: Any, params: Any, grads: Any, moving: Any, state: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        moving = iter(moving)
        state = jax.tree.unflatten(treedef, [next(moving) if f else x for f, x in zip(floats, leaves, strict=True)])
        new, state, _ = updated(entry, tx, params, state, value, grads)
        _, state, updates = updated(entry, tx, new, state, value, grads)
        parts = jax.tree.leaves((updates, jo.to_device(state)))
        return sum(jnp.sum(jnp.sin(x) * (k + 1)) for k, x in enumerate(parts) if jnp.issubdtype(x.dtype, jnp.floating))

    def differentiated(tx: Any, state: Any) -> Any:
        moving = [x for f, x in zip(floats, jax.tree.leaves(state), strict=True) if f]
        return jax.value_and_grad(functools.partial(scalar, tx), argnums=(0, 1, 2))(params, grads, moving, state)

    state = jo.to_host(tx, warm, params)
    both = [functools.partial(differentiated, t) for t in (inner, tx)]
    if jitted:
        both = [jax.jit(f, compiler_options=FAST) for f in both]
    want, got = both[0](warm), both[1](state)
    got = (got[0], (*got[1][:2], jo.to_device(got[1][2])))
    assert all(np.all(np.isfinite(np.asarray(x))) for x in jax.tree.leaves(want))
    assert_same(got, want, name, tolerance=1e-5)
