"""Law 2: every optimizer of optax and optax.contrib gives the same numbers with its state on the host.

Single updates from equal states, wrapped whole and in part, in float32 and bfloat16; and some of each kind outside of
jit, in scan, cond and vmap, and differentiated. In whole steps, in every mode: tests/test_equivalence.py. optax's own
tests, on offloaded optimizers: tests/test_conformance.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jax_offload as jo
from tests.support.random_steps import OPTIMIZERS, WRAPPERS, is_float, matrices
from tests.support.trees import FAST, assert_same, eligible, kinds

DEVICE = jax.devices()[0]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")


def parameters(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Of few different shapes, because XLA compiles a loop for each. 40 rows are more than one chunk."""
    rng = np.random.default_rng(0)
    shapes = {"layers_2": (40, 8), "layers_10": (40, 8), "b": (8,), "mix": (8, 2, 4), "scale": ()}
    return {name: jnp.asarray(rng.normal(size=s) / 3, dtype) for name, s in shapes.items()}


def bowl(params: Any) -> jax.Array:
    """A convex loss that is cheap to compile, for what evaluates it, or its curvature, inside the update."""
    leaves = [p.astype(jnp.promote_types(p.dtype, jnp.float32)) for p in jax.tree.leaves(params)]
    return sum(jnp.mean((i + 1) * jnp.abs(p - 0.3) ** 2 + jnp.abs(p) ** 4) for i, p in enumerate(leaves))


@dataclasses.dataclass(frozen=True)
class Entry:
    """How to make one optimizer and how to call it.

    Attributes:
      make: the transformation.
      extra: the extra arguments that its update takes: some of ``value``, ``grad``, ``value_fn``, ``obj_fn``.
      per_example: whether its gradients have a leading axis of examples.
      params: from the parameters to what the optimizer calls parameters.
      grads: from their gradients to what its update takes.
      tolerance: of float32 updates, where they are differences of close numbers.
    """

    make: Callable[[], Any]
    extra: tuple[str, ...] = ()
    per_example: bool = False
    params: Callable[[Any], Any] = lambda params: params
    grads: Callable[[Any], Any] = lambda grads: grads
    tolerance: float = 1e-6


def per_example(clip: Any, *args: Any, **how: Any) -> Entry:
    """optax has these as functions of a tree of gradients, with the examples of the batch along axis 0."""
    clipped = optax.stateless(lambda grads, params: clip(grads, *args, **how)[0])
    return Entry(lambda: optax.chain(clipped, ADAM()), per_example=True)


def with_rate() -> dict[str, Callable[..., Any]]:
    """The optimizers of optax and optax.contrib that need nothing but a learning rate."""
    found = {}
    for name, make in [*vars(optax).items(), *vars(contrib).items()]:
        if name[0].islower() and not name.startswith("scale_by_") and inspect.isfunction(make):
            parameters = inspect.signature(make).parameters
            needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
            if "learning_rate" in parameters and needed in ([], ["learning_rate"]):
                found[name] = functools.partial(make, learning_rate=1e-2)
    return found


CLOSE = {"madgrad": 5e-6, "schedule_free_adamw": 1e-5, "schedule_free_sgd": 1e-5}  # new parameters less old ones
SEARCHES = {"extra": ("value", "grad", "value_fn")}
ADAM = lambda: optax.adam(1e-2)  # noqa: E731
AROUND = {name: Entry(functools.partial(lambda wrap: wrap(ADAM()), wrap)) for name, wrap in WRAPPERS.items() if name}
TABLE = {name: Entry(make, tolerance=CLOSE.get(name, 1e-6)) for name, make in with_rate().items()} | AROUND | {
    **{name: Entry(OPTIMIZERS[name]) for name in ("adam schedule", "dadapt", "lbfgs-like", "prodigy")},
    "factored": Entry(OPTIMIZERS["adafactor"]),
    "plateau": dataclasses.replace(AROUND["plateau"], extra=("value",)),
    "adamw:masked": Entry(lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16, mask=matrices, nesterov=True)),
    "conditionally_transform": Entry(
        lambda: optax.chain(
            optax.conditionally_transform(optax.scale_by_adam(), lambda k: k % 3 != 2), optax.scale(-1e-2)
        )
    ),
    "a branch that is known": Entry(
        lambda: optax.chain(optax.conditionally_transform(optax.scale_by_adam(), lambda step: True), optax.scale(-1e-2))
    ),
    "dpsgd": Entry(lambda: contrib.dpsgd(1e-1, 1.0, 0.1, seed=0, momentum=0.9), per_example=True),
    "galore": Entry(lambda: optax.masked(contrib.galore(1e-2, rank=4, update_proj_gap=20), matrices)),
    "inject_stateful_hyperparams": Entry(
        lambda: optax.inject_stateful_hyperparams(optax.adam)(optax.schedules.WrappedSchedule(lambda k: 1e-2 / (1 + k)))
    ),
    "lbfgs": Entry(lambda: optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(4)), **SEARCHES),
    "backtracking": Entry(
        lambda: optax.chain(optax.scale(-1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)), **SEARCHES
    ),
    "lookahead": Entry(
        lambda: optax.lookahead(ADAM(), 3, 0.5),
        params=optax.LookaheadParams.init_synced,
        grads=lambda grads: grads.fast,
    ),
    "momo": Entry(contrib.momo, ("value",)),
    "momo_adam": Entry(contrib.momo_adam, ("value",), tolerance=1e-4),  # the rate is a small difference of large sums
    "per_example_global_norm_clip": per_example(optax.per_example_global_norm_clip, 3.0),
    "per_example_layer_norm_clip": per_example(optax.per_example_layer_norm_clip, 3.0, uniform=False),
    "sam": Entry(lambda: contrib.sam(ADAM(), optax.chain(contrib.normalize(), optax.sgd(1e-2)))),
    "schedule_free": Entry(lambda: contrib.schedule_free(optax.adamw(1e-2, b1=0.0), 1e-2), tolerance=1e-5),
    "sgd:momentum": Entry(lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True, accumulator_dtype=jnp.float32)),
    "sm3": Entry(lambda: optax.sm3(1e-2), params=lambda params: {**params, "scale": params["scale"][None]}),
    "sophia": Entry(lambda: contrib.sophia(1e-2, update_interval=3), ("obj_fn",)),
    "split_real_and_imaginary": Entry(
        lambda: contrib.split_real_and_imaginary(ADAM()),
        params=lambda params: jax.tree.map(lambda p: p.astype(jnp.complex64) * (1.0 + 0.5j), params),
    ),
    "with_extra_args_support": Entry(lambda: optax.with_extra_args_support(ADAM()), ("value",)),
}  # fmt: skip


def problem(entry: Entry, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """Parameters and gradients."""
    params = jax.device_put(entry.params(parameters(dtype)), DEVICE)
    grads = jax.tree.map(lambda p: (jnp.sin(3 * p) + 0.05).astype(p.dtype), entry.grads(params))
    if entry.per_example:
        grads = jax.tree.map(lambda g: jnp.stack([g, -0.5 * g, 2.0 * g]), grads)
    return params, grads


def updated(entry: Entry, tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
    """New parameters, new state, and what ``update`` returned."""
    extra = {"value": bowl(params), "grad": grads, "value_fn": bowl, "obj_fn": bowl}
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **{name: extra[name] for name in entry.extra})
    return optax.apply_updates(params, updates), state, updates


def assert_on_host(state: Any, resident: Any = None) -> None:
    """The leaves on the host are those that may be: for a batched ``state``, those of the unbatched resident one."""
    may = [eligible(x) for x in jax.tree.leaves(state if resident is None else resident)]
    assert [k == "pinned_host" for k in kinds(state)] == may


def test_table_has_every_optimizer():
    assert len(TABLE) > 70 and {"adamw", "muon", "sophia", "prodigy", "galore"} <= TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_same_values(name):
    """Whole in the smallest chunks and in part, in float32 and bfloat16, in one program: it compiles in less time."""
    entry = TABLE[name]
    inner = entry.make()
    txs = [inner, jo.offload(inner, min_bytes=0, window=1), jo.offload(inner, min_bytes=0, fraction=0.3)]
    problems = [problem(entry), problem(entry, jnp.bfloat16)]
    dtypes = (0,) if name in CLOSE else (0, 1)  # bfloat16 leaves a bit or two of such a difference
    cases = [(tx, which) for which in dtypes for tx in txs[: 3 - which]]

    first = [[i for _, i in cases].index(i) for _, i in cases]  # the resident case of each
    hosts = [[leaf.host for leaf in jo.placement(tx, problems[i][0]).leaves] for tx, i in cases]

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(params: Any, states: Any) -> Any:
        pairs = zip(cases, states, strict=True)
        return [updated(entry, tx, params[i], state, problems[i][1]) for (tx, i), state in pairs]

    params = [params for params, _ in problems]
    states = jax.jit(lambda params: [tx.init(params[i]) for tx, i in cases], compiler_options=FAST)(params)
    for k, state in zip(first, states, strict=True):
        assert_same(state, states[k], f"{name}: init")
    states = jax.tree.map(lambda x: jax.device_put(x, x.sharding), states)  # without weak types
    for n in range(4):
        results = step(params, states)
        for host, k, (new, state, updates) in zip(hosts, first, results, strict=True):
            assert_same(state, results[k][1], f"{name}, step {n}: state")
            assert_same(updates, results[k][2], f"{name}, step {n}: updates", entry.tolerance)
            assert_same(new, results[k][0], f"{name}, step {n}: parameters")
            assert [kind == "pinned_host" for kind in kinds(state)] == host
        params = [results[first[0]][0], results[first[-1]][0]]
        own = [jax.tree.map(lambda x: x.sharding, state) for _, state, _ in results]
        states = [jax.device_put(results[k][1], places) for k, places in zip(first, own, strict=True)]
    if any(map(eligible, jax.tree.leaves(states[0]))):
        assert_on_host(states[1])


# ---- eagerly, and under jax's transformations

# name in the table, window; 1 byte means the smallest chunks, in loops
MODES = {
    "adamw, chunks": ("adamw", 1), "MultiSteps, chunks": ("MultiSteps", 1), "MultiSteps": ("MultiSteps", None),
    "factored, chunks": ("factored", 1), "partition": ("partition", None), "muon": ("muon", None),
    "schedule_free_adamw": ("schedule_free_adamw", None), "prodigy": ("prodigy", None), "dpsgd": ("dpsgd", None),
    "inject": ("inject", None), "lbfgs-like": ("lbfgs-like", None), "momo": ("momo", None),
}  # fmt: skip


def eagerly(step: Any, init: Any, params: Any) -> Any:
    state = init(params)
    for _ in range(2):
        params, state = step(params, state)
    return params, state


def in_a_cond(step: Any, init: Any, params: Any) -> Any:
    state = init(params)
    for taken in True, False, True:
        flag = (jnp.ravel(jax.tree.leaves(params)[0])[0] < 1e6) == taken  # not known when it is traced
        params, state = jax.lax.cond(flag, step, lambda p, s: (p, s), params, state)
    return params, state


def under_vmap(step: Any, init: Any, params: Any) -> Any:
    """There whole leaves are loaded."""
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, 2.0 * x]), params)
    return jax.vmap(functools.partial(eagerly, step, init))(many)


def differentiated(step: Any, init: Any, params: Any) -> Any:
    """Differentiate two updates; the second one reads the state that the first one makes."""

    def scalar(params: Any) -> Any:
        parts = [x for x in jax.tree.leaves(jo.to_device(eagerly(step, init, params))) if is_float(x)]
        return sum(jnp.sum(jnp.sin(x) * (k + 1)) for k, x in enumerate(parts))

    return jax.value_and_grad(scalar)(params)


WAYS = {
    "eagerly": eagerly,
    "scan": lambda step, init, p: jax.lax.scan(lambda carry, _: (step(*carry), None), (p, init(p)), length=3)[0],
    "cond": in_a_cond,
    "vmap": under_vmap,
    "grad": differentiated,
}
CASES = [*itertools.product(MODES, [way for way in WAYS if way != "grad"])]
CASES += [(name, "grad") for name in ("adamw, chunks", "MultiSteps", "factored, chunks")]
DAILY = pytest.mark.daily("derivatives by a state")


@pytest.mark.oldest("scans, branches, batching of factored leaves, derivatives by a state")
@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(*case, marks=[DAILY] if case == ("adamw, chunks", "grad") else []) for case in CASES]
)
def test_around_an_update(name, way):
    """Outside of jit an update is compiled all the same, and op by op optax rounds otherwise: it is always jitted."""
    entry, window = TABLE[MODES[name][0]], MODES[name][1]
    inner = entry.make()
    tx, (params, grads) = jo.offload(inner, min_bytes=0, window=window), problem(entry)

    def step(tx: Any, params: Any, state: Any) -> Any:
        given = jax.tree.map(lambda g, p: g * p, grads, params) if way == "grad" else grads
        return updated(entry, tx, params, state, given)[:2]

    plain, ours = (functools.partial(WAYS[way], functools.partial(step, each), each.init) for each in (inner, tx))
    want, got = jax.jit(plain)(params), (ours if way == "eagerly" else jax.jit(ours))(params)
    assert_same(got, want, name, tolerance=1e-5)  # of several updates
    if way != "grad":
        assert_on_host(got[1], inner.init(params))
