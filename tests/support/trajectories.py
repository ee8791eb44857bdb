"""Training runs of twenty steps, put together of what people combine: against the same steps with plain optax.

What a bug of a rewritten step would need is here at once: batches that overflow in the middle and at the end, counts
that decide (schedules, bias correction, several steps in one), numbers of a batch that an update needs later, an
average of parameters carried beside, and a state in fewer bits, divided between devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved
from tests.support.steps import FAST, difference

STEPS, LAYERS, WIDTH, ROWS = 20, 5, 128, 64
BAD = (7, 8, STEPS - 1)  # those of the batches that overflow, where a run has such
CLIP = 0.05


def rate(step: Any) -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, STEPS, 1e-3)(step)


def adamw(learning_rate: Any = 1e-2) -> optax.GradientTransformation:
    """Its ``eps`` is large: where a gradient is about 0, rounding else decides about the sign of an update."""
    return optax.adamw(learning_rate, eps=1e-3, weight_decay=1e-2)


def plateau() -> optax.GradientTransformationExtraArgs:
    """Reads ``value=``: what falls is no progress for it, so it lowers the rate again and again."""
    return optax.contrib.reduce_on_plateau(0.7, patience=2, cooldown=1, rtol=1.0)


def several(inner: Any, k: int = 3) -> Any:
    return optax.MultiSteps(inner, k).gradient_transformation()


def _labels(params: Any) -> Any:
    return {name: "matrices" if "layer" in name else "rest" for name in params}


INNER: dict[str, Callable[[], Any]] = {
    "adamw": adamw,
    "schedule": lambda: adamw(rate),
    "injected": lambda: optax.inject_hyperparams(adamw)(rate),
    "plateau": lambda: optax.chain(adamw(), plateau()),
    "MultiSteps": lambda: several(adamw(rate)),
    "apply_if_finite": lambda: optax.apply_if_finite(adamw(rate), 5),
    "ema": lambda: optax.chain(adamw(rate), optax.ema(0.9)),
    "amsgrad": lambda: optax.amsgrad(rate, eps=1e-3),
    "rmsprop": lambda: optax.rmsprop(rate, momentum=0.9, eps=1e-2, centered=True),
    "sgd": lambda: optax.sgd(rate, momentum=0.9, nesterov=True),
    "noise": lambda: optax.chain(optax.add_noise(1e-3, 0.5, 0), adamw(rate)),
    "partition": lambda: optax.partition({"matrices": adamw(rate), "rest": optax.sgd(1e-1, momentum=0.9)}, _labels),
    "lamb": lambda: optax.lamb(rate, eps=1e-3),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(1e-1), 1e-1, b1=0.9),
    "lookahead of slow ones": lambda: optax.chain(adamw(rate), optax.trace(0.5)),
}  # fmt: skip
SKIPS = ("skip", "where", "scale")
MESHES = {  # of layers, stacked or not; options of the offload
    "fsdp": (P("data", None), {}),
    "columns": (P(None, "data"), {}),
    "zero": (P(), {"shard_over": "data"}),
    "both": (P(None, "model"), {"shard_over": "data"}),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run is made of; ``repr`` of it makes it again.

    Attributes:
      way: ``jo.jit``, or ``pipelined`` with its gradients on the ``device`` or the ``host``.
      inner, clip, guard: the optimizer, by its name; where the norm of gradients is clipped (``inside`` of the offload,
        or ``outside``); and what is done about a batch that overflows.
      average: an average of the new parameters is carried beside.
      finishes: a turned step is finished and started again in the middle.
    """

    way: str = "jo.jit"
    layers: str = "scanned"
    inner: str = "schedule"
    clip: str = "none"
    guard: str = "none"
    storage: str | None = None
    masters: bool = False
    fraction: float = 1.0
    window: int | None = 2**20
    update: bool = False
    average: bool = False
    microbatches: int = 1
    checkpoint: bool = False
    mesh: str | None = None
    explicit: bool = False
    finishes: bool = False

    def optimizer(self) -> Any:
        inner = INNER[self.inner]()
        inner = optax.chain(optax.clip_by_global_norm(CLIP), inner) if self.clip == "inside" else inner
        return jo.with_master_params(inner) if self.masters else inner

    def outer(self, tx: Any) -> Any:
        return optax.chain(optax.clip_by_global_norm(CLIP), tx) if self.clip == "outside" else tx

    def offloaded(self) -> Any:
        options: dict[str, Any] = {"min_bytes": 1024, "window": self.window, "fraction": self.fraction}
        options |= {} if self.storage is None else {"storage": self.storage}
        return self.outer(jo.offload(self.optimizer(), **options, **(MESHES[self.mesh][1] if self.mesh else {})))

    def plain(self) -> Any:
        return self.outer(self.optimizer())


def parameters(run: Run) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / WIDTH**0.5
    layers = {"layers": w} if run.layers == "scanned" else {f"layer_{k}": x for k, x in enumerate(w)}
    rest = {"head": rng.standard_normal((WIDTH, 8), np.float32) / 8, "bias": np.zeros(8, np.float32)}
    dtype = jnp.bfloat16 if run.masters else jnp.float32
    return jax.tree.map(lambda x: np.asarray(x, dtype), layers | rest)


def batch(k: int, bad: bool) -> dict[str, Any]:
    x = np.random.default_rng(100 + k).standard_normal((ROWS, WIDTH), np.float32)
    return {"x": x * (np.float32(np.inf) if bad and k in BAD else np.float32(1)), "y": np.sin(2 * x[:, :8])}


def loss_of(run: Run, mesh: Any) -> Callable[[Any, Any], Any]:
    def gathered(w: Any) -> Any:
        if mesh is None:
            return w
        place = NamedSharding(mesh, P(*[None] * w.ndim))
        return jax.reshard(w, place) if run.explicit else jax.lax.with_sharding_constraint(w, place)

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ gathered(w).astype(jnp.float32))

    layer = jax.checkpoint(layer) if run.checkpoint else layer

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        if run.layers == "scanned":
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for k in range(LAYERS):
                x = layer(x, params[f"layer_{k}"])
        y = x @ gathered(params["head"]).astype(jnp.float32) + gathered(params["bias"]).astype(jnp.float32)
        return ((jnp.tanh(y) - batch["y"]) ** 2).mean()

    return loss


def step_of(run: Run, tx: Any, loss: Any, plain: bool) -> Callable[..., Any]:
    """Of what is carried, a dict, and a batch. ``plain``: with what any optax has."""

    def gradients(params: Any, batch: Any) -> Any:
        if run.microbatches == 1:
            return jax.value_and_grad(loss)(params, batch)

        def add(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), value

        parts = jax.tree.map(lambda x: x.reshape(run.microbatches, -1, *x.shape[1:]), batch)
        grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return values.mean(), jax.tree.map(lambda g: g / run.microbatches, grads)

    def step(carried: Any, batch: Any) -> Any:
        params, state = carried["params"], carried["state"]
        new = dict(carried)
        if run.guard == "scale":
            new["scale"], finite, value, grads = carried["scale"].value_and_grad(loss)(params, batch)
        else:
            value, grads = gradients(params, batch)
            finite = jnp.isfinite(optax.tree.norm(grads))
        norm = optax.tree.norm(grads)
        extra = {"value": value} if run.inner == "plateau" else {}
        bad = {} if plain or run.guard not in ("skip", "scale") else {"skip": ~finite}
        if run.masters or (not plain and not run.update):
            after = jo.update_params(tx, grads, state, params, **extra, **bad)
        else:
            updates, after_state = tx.update(grads, state, params, **extra)
            after = optax.apply_updates(params, updates), after_state
        if run.guard in SKIPS and not bad:
            after = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, (params, state))
        new["params"], new["state"] = after
        if run.average:
            new["average"] = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, carried["average"], after[0])
        change = optax.tree.norm(jax.tree.map(lambda a, b: (a - b).astype(jnp.float32), after[0], params))
        return new, {"loss": value, "norm": norm, "change": change}

    return step


def begun(run: Run, tx: Any, params: Any) -> dict[str, Any]:
    carried = {"params": params, "state": tx.init(params)}
    carried |= {"average": jax.tree.map(jnp.copy, params)} if run.average else {}
    if run.guard == "scale":
        place = next(iter(params.values())).sharding if run.mesh is None else None
        scale = DynamicScale(growth_interval=3, scale=2.0**10)
        carried["scale"] = jax.tree.map(jnp.asarray, scale) if place is None else jax.device_put(scale, place)
    return carried


def bad_batches(run: Run) -> bool:
    return run.guard != "none" or run.inner == "apply_if_finite"


def expected(run: Run) -> tuple[list[Any], list[Any]]:
    """What is carried after every step, and what the step returned beside it."""
    tx = run.plain() if run.storage is None else dataclasses.replace(run, mesh=None).offloaded()
    carried = begun(run, tx, jax.device_put(parameters(run), jax.devices()[0]))
    step = jax.jit(step_of(run, tx, loss_of(run, None), plain=run.storage is None), compiler_options=FAST)
    every, beside = [], []
    for k in range(STEPS):
        carried, other = step(carried, jax.device_put(batch(k, bad_batches(run)), jax.devices()[0]))
        every.append(carried)
        beside.append(other)
    return every, beside


@dataclasses.dataclass
class Found:
    """What a rewritten run gave: see ``expected``; how many parts of its update moved; where all was at first."""

    carried: Any
    beside: list[dict[str, Any]]
    moved: int
    places: Any


def trained(run: Run) -> Found:
    tx, params = run.offloaded(), parameters(run)
    if run.mesh is None:
        return _trained(run, tx, None, jax.device_put(params, jax.devices()[0]), jax.devices()[0])
    kinds = (AxisType.Explicit if run.explicit else AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    spec = MESHES[run.mesh][0]
    with jax.set_mesh(mesh):
        specs = {k: {3: P(None, *spec), 2: spec if "layer" in k else P(), 1: P()}[x.ndim] for k, x in params.items()}
        params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
        return _trained(run, tx, mesh, params, NamedSharding(mesh, P("data")))


def _trained(run: Run, tx: Any, mesh: Any, params: Any, place: Any) -> Found:
    step, carried = step_of(run, tx, loss_of(run, mesh), plain=False), begun(run, tx, params)
    batches = [jax.device_put(batch(k, bad_batches(run)), place) for k in range(STEPS)]
    places, beside = jax.tree.map(lambda x: x.sharding, carried), []
    if run.way == "jo.jit":
        outputs = {"out_shardings": (places, None)} if mesh is not None else {}
        jitted = jo.jit(step, donate_argnums=0, compiler_options=FAST, **outputs)
        moved = _moved(jitted.trace(carried, batches[0]).jaxpr)
        for each in batches:
            carried, other = jitted(carried, each)
            beside.append(other)
        same_types = run.guard != "scale"  # those begin with weak types, and uncommitted
        assert jitted._cache_size() == 1 or not same_types
    else:
        gradients: Any = "host" if "host" in run.way else "device"
        train = jo.pipelined(step, donate_argnames="carried", gradients=gradients)
        turned, args, _ = train.turned(carried, batches[0])
        moved = _moved(turned.trace(*args).jaxpr)
        half = STEPS // 2 - 1 if run.finishes else STEPS
        for part in filter(None, (batches[:half], batches[half:])):
            carry, aux = train.start(carried, part[0])
            for each in part[1:]:
                beside.append(dict(aux.now))
                carry, aux = train(carry, each)
                beside[-1] = _joined(beside[-1], aux.late)
            carried, late = train.finish(carry, with_late=True)
            beside.append(_joined(aux.now, late))
    return Found(carried, beside, moved, places)


def _joined(now: Any, late: Any) -> dict[str, Any]:
    assert all((now[k] is None) != (late[k] is None) for k in now), (now, late)
    return {k: late[k] if now[k] is None else now[k] for k in now}


def _moved(jaxpr: Any) -> int:
    return sum(isinstance(each.update, Moved) for each in updates_in(jaxpr))


def compared(run: Run) -> int:
    """Trains both ways; an ``AssertionError`` says what differs. Returns how many parts of the update moved."""
    every, others = expected(run)
    found = trained(run)
    low = run.storage is not None or run.masters
    rtol = 3e-2 if low else 1e-3
    for k, (got, want) in enumerate(zip(found.beside, others, strict=True)):
        for name in want:
            a, b = float(got[name]), float(want[name])
            near = 5e-2 if low and name != "loss" else 1e-2 if low or name != "loss" else 1e-4
            assert (not np.isfinite(a) and not np.isfinite(b)) or abs(a - b) <= near * abs(b) + 1e-7, (k, name, a, b)
    for name in {*every[-1]} - {"state"}:
        errors = difference(jo.to_device(found.carried[name]), every[-1][name])
        assert all(error <= rtol for error in errors.values()), (name, errors)
    state = jo.to_device(found.carried["state"])
    plain, ours = jax.tree.leaves(every[-1]["state"]), jax.tree.leaves(state)
    assert len(plain) == len(ours)
    for a, b in zip(ours, plain, strict=True):
        if b.dtype == jnp.bool_ or (jnp.issubdtype(b.dtype, jnp.integer) and not b.ndim):
            np.testing.assert_array_equal(a, b)  # counts, flags
    if not low:
        errors = difference(state, every[-1]["state"])
        assert all(error <= 5e-3 for error in errors.values()), errors
    before, leaves = jax.tree_util.tree_flatten_with_path(found.places)[0], jax.tree.leaves(found.carried)
    for (path, place), x in zip(before, leaves, strict=True):
        assert place.memory_kind == x.sharding.memory_kind, path
        assert place.is_equivalent_to(x.sharding, x.ndim), (path, place, x.sharding)
    # a quarter of what is one stack and a small head may round to nothing
    may_stay = run.layers == "scanned" and run.fraction < 0.5
    assert may_stay or "pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(found.carried["state"])}
    return found.moved


def random_run(seed: int) -> Run:
    """One that may be: what cannot is taken out, see ``_possible``."""
    rng = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    while True:
        run = Run(
            way=one_of("jo.jit", "jo.jit", "pipelined, device", "pipelined, device", "pipelined, host"),
            layers=one_of("scanned", "unrolled"),
            inner=one_of(*INNER),
            clip=one_of("none", "none", "inside", "outside"),
            guard=one_of("none", "none", *SKIPS),
            storage=one_of(None, None, None, "bfloat16", "int8"),
            masters=one_of(False, False, False, True),
            fraction=one_of(1.0, 1.0, 0.5, 0.25),
            window=one_of(2**20, 2**20, None, 2**14),
            update=one_of(False, True),
            average=one_of(False, False, True),
            microbatches=one_of(1, 1, 1, 2, 4),
            checkpoint=one_of(False, True),
            mesh=one_of(None, None, None, *MESHES),
            explicit=one_of(False, True),
            finishes=one_of(False, True),
        )
        if _possible(run):
            return run


def _possible(run: Run) -> bool:
    waits_on_host = run.way == "pipelined, host"
    several_steps = run.inner == "MultiSteps"
    return not (
        (waits_on_host and (run.guard == "where" or several_steps or run.inner == "apply_if_finite"))
        or (waits_on_host and run.masters and run.layers == "unrolled")  # gradients of 32 KiB
        or (run.guard in ("skip", "scale") and run.update)  # no argument of update
        or (run.guard == "scale" and run.microbatches > 1)
        or (run.masters and (run.update or run.clip == "outside" or run.storage is not None))
        or (run.storage is not None and run.inner in ("schedule_free", "noise"))
        or (run.mesh is None and run.explicit)
        or (run.mesh is not None and run.microbatches > 1)
        or (run.way == "jo.jit" and run.finishes)
    )
