"""What hides in which steps: about thirty kinds of training steps, rows of the table in ``compiled.py``.

Every network has twelve layers of 2048² float32 parameters, and every pass sees 16,384 tokens.
"""

import tests.conftest  # noqa: F401, I001  (first: it sets up jax's CPU devices)
import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import jax_offload as jo

PAGE = Path(__file__).parents[2] / "docs" / "what_hides.md"
MARK = "<!-- python -m tests.aot.compiled --write -->"
LAYERS, WIDTH, TOKENS, HALF = 12, 2048, 16384, 8192
HIDDEN = 0.10  # the share of the link's time that a hidden step exposes
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
DEVICE = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="device")

Tree = Any


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of step.

    Attributes:
      title: what the step is.
      make: returns the step, its abstract arguments and the positions of the donated ones, given ``jo.offload`` or
        ``resident`` to wrap its optimizers with.
      way: ``"jo.jit"`` or ``"pipelined"``.
      package: the package that the step needs.
    """

    title: str
    make: Callable[[Callable[[Any], Any]], tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]
    way: str = "jo.jit"
    package: str = "jax"

    target: ClassVar[str] = "h200"
    mesh: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return f"{self.title} | {self.way}"

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=DEVICE)


STACK, BATCH, FOUR = array(LAYERS, WIDTH, WIDTH), array(TOKENS, WIDTH), array(4, TOKENS, WIDTH)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def scanned(params: jax.Array, x: jax.Array, **options: Any) -> jax.Array:
    body = jax.checkpoint(layer)
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, params, **options)[0]


def mean_square(x: jax.Array) -> jax.Array:
    return (x**2).mean()


def of_step(step: Callable[..., Any], params: Tree = STACK, inner: Any = ADAMW, batch: Any = BATCH) -> Any:
    """A step of (optimizer, parameters, state, batch), with one network and one optimizer."""

    def make(wrap: Callable[[Any], Any]) -> Any:
        tx = wrap(inner)
        return partial(step, tx), (params, jo.abstract_state(tx, params), batch), (0, 1)

    return make


def one(loss: Callable[[Tree, Any], jax.Array], params: Tree = STACK, inner: Any = ADAMW, batch: Any = BATCH) -> Any:
    """A step that differentiates a loss and updates."""

    def step(tx: Any, params: Tree, state: Tree, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return *jo.update_params(tx, grads, state, params), value

    return of_step(step, params, inner, batch)


def loss_of(network: Callable[..., jax.Array], **options: Any) -> Callable[[Tree, Any], jax.Array]:
    return lambda params, batch: mean_square(network(params, batch, **options))


# --- one optimizer ---------------------------------------------------------------------------------------------------

UNROLLED = {f"w{k}": array(WIDTH, WIDTH) for k in range(LAYERS)}
MATRICES = tuple(array(WIDTH, WIDTH) for _ in range(LAYERS))


def unrolled(params: Tree, x: jax.Array) -> jax.Array:
    for w in jax.tree.leaves(params):
        x = layer(x, w)
    return x


def in_groups(params: Tree, x: jax.Array) -> jax.Array:
    """Four layers in each ``jax.checkpoint``."""
    for k in range(0, LAYERS, 4):
        x = jax.checkpoint(unrolled)(params[k : k + 4], x)
    return x


def of_words(params: Tree, words: jax.Array) -> jax.Array:
    logits = unrolled(params["layers"], params["embedding"][words]) @ params["head"]
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, words[:, None], 1)[:, 0]).mean()


VOCABULARY = 4096
WORDS = {"layers": MATRICES, "embedding": array(VOCABULARY, WIDTH), "head": array(WIDTH, VOCABULARY)}


def accumulated(tx: Any, params: Tree, state: Tree, batches: Any, metrics: bool = False) -> Any:
    def add(total: Tree, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of(scanned))(params, batch)
        return jax.tree.map(jnp.add, total, grads), {"loss": value, "norm": jnp.abs(value)} if metrics else None

    grads, seen = jax.lax.scan(add, jnp.zeros_like(params), batches)
    return *jo.update_params(tx, grads / 4, state, params), jax.tree.map(jnp.mean, seen)


def skipped(tx: Any, params: Tree, state: Tree, batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss_of(scanned))(params, batch)
    finite = jnp.isfinite(optax.tree.norm(grads))
    if tx is ADAMW:
        updates, new = tx.update(grads, state, params)
        keep = partial(jnp.where, finite)
        return *jax.tree.map(keep, (optax.apply_updates(params, updates), new), (params, state)), value
    return *jo.update_params(tx, grads, state, params, skip=~finite), value


def sharpness_aware(tx: Any, params: Tree, state: Tree, batch: Any) -> Any:
    """The gradient is taken where the loss is worst nearby: two passes one after the other."""
    slope = jax.grad(loss_of(scanned))
    up = slope(params, batch)
    grads = slope(params + 0.05 * up / optax.tree.norm(up), batch)
    return jo.update_params(tx, grads, state, params)


def into_refs(tx: Any, params: Tree, state: Tree, batches: Any) -> Any:
    total = jax.new_ref(jnp.zeros_like(params))

    def add(carry: Any, batch: Any) -> Any:
        total[...] += jax.grad(loss_of(scanned))(params, batch)
        return carry, None

    jax.lax.scan(add, None, batches)
    return jo.update_params(tx, jax.freeze(total) / 4, state, params)


def microbatched(tx: Any, params: Tree, state: Tree, batch: Any) -> Any:
    mean = optax.microbatching.AccumulationType.MEAN
    grads_of = jax.grad(loss_of(scanned))
    grads = optax.microbatch(grads_of, argnums=1, microbatch_size=TOKENS, accumulator=mean)(params, batch)
    return jo.update_params(tx, grads, state, params)


# --- several updates -------------------------------------------------------------------------------------------------


def both(a: Tree, b: Tree, x: jax.Array, network: Callable[..., jax.Array] = scanned) -> jax.Array:
    return mean_square(network(b, network(a, x)))


def pair(step_of: Callable[..., Any], inner: Any = ADAMW, other: Any = None, params: Tree = STACK) -> Any:
    """A step with two networks, an optimizer for each."""

    def make(wrap: Callable[[Any], Any]) -> Any:
        tx, ty = wrap(inner), (wrap(inner) if other is None else other)
        args = (params, params, jo.abstract_state(tx, params), jo.abstract_state(ty, params), BATCH)
        return step_of(tx, ty), args, (0, 1, 2, 3)

    return make


def simultaneous(tx: Any, ty: Any) -> Any:
    """Two networks, an optimizer for each, both updated from one backward pass."""

    def step(a: Tree, b: Tree, s: Tree, t: Tree, x: Any) -> Any:
        ga, gb = jax.grad(both, (0, 1))(a, b, x)
        (a, s), (b, t) = jo.update_params(tx, ga, s, a), jo.update_params(ty, gb, t, b)
        return a, b, s, t

    return step


def alternating(tx: Any, ty: Any, network: Callable[..., jax.Array] = scanned) -> Any:
    """The second network's gradient is taken where the first one is new, as in a GAN."""
    loss = partial(both, network=network)

    def step(a: Tree, b: Tree, s: Tree, t: Tree, x: Any) -> Any:
        a, s = jo.update_params(tx, jax.grad(loss)(a, b, x), s, a)
        b, t = jo.update_params(ty, jax.grad(loss, 1)(a, b, x), t, b)
        return a, b, s, t

    return step


def twice(tx: Any, params: Tree, state: Tree, batches: Any) -> Any:
    for k in range(2):
        params, state = jo.update_params(tx, jax.grad(loss_of(scanned))(params, batches[k]), state, params)
    return params, state


def in_a_branch(tx: Any, ty: Any) -> Any:
    def step(a: Tree, b: Tree, s: Tree, t: Tree, x: Any) -> Any:
        value, (ga, gb) = jax.value_and_grad(both, (0, 1))(a, b, x)
        a, s = jo.update_params(tx, ga, s, a)
        b, t = jax.lax.cond(value > 0, lambda: jo.update_params(ty, gb, t, b), lambda: (b, t))
        return a, b, s, t

    return step


def with_a_target(wrap: Callable[[Any], Any]) -> Any:
    tx = wrap(ADAMW)

    def step(params: Tree, target: Tree, state: Tree, x: Any) -> Any:
        def loss(params: Tree) -> jax.Array:
            return mean_square(scanned(params, x) - jax.lax.stop_gradient(scanned(target, x)))

        params, state = jo.update_params(tx, jax.grad(loss)(params), state, params)
        return params, optax.incremental_update(params, target, 0.01), state

    return step, (STACK, STACK, jo.abstract_state(tx, STACK), BATCH), (0, 1, 2)


def partitioned(wrap: Callable[[Any], Any]) -> Any:
    params = {"a": STACK, "b": STACK}
    tx = optax.partition({"a": wrap(ADAMW), "b": wrap(optax.sgd(1e-3, momentum=0.9))}, {"a": "a", "b": "b"})

    def step(params: Tree, state: Tree, x: Any) -> Any:
        grads = jax.grad(lambda p: both(p["a"], p["b"], x))(params)
        return jo.update_params(tx, grads, state, params)

    return step, (params, jo.abstract_state(tx, params), BATCH), (0, 1)


# --- layers in other shapes ------------------------------------------------------------------------------------------


def nested(params: jax.Array, x: jax.Array) -> jax.Array:
    """The stack reshaped in the step, and rematerialized by groups."""
    groups = params.reshape(2, LAYERS // 2, WIDTH, WIDTH)
    return jax.lax.scan(lambda x, group: (jax.checkpoint(scanned)(group, x), None), x, groups)[0]


def of_two_kinds(params: Tree, x: jax.Array) -> jax.Array:
    def block(x: jax.Array, p: Tree) -> jax.Array:
        return jax.nn.gelu(jnp.tanh(x @ p["a"]) @ p["b"]) + x

    return jax.lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, params)[0]


# --- gradients made elsewhere ----------------------------------------------------------------------------------------


def data_parallel(inside: bool, inner: Any, wrap: Callable[[Any], Any]) -> Any:
    """Gradients made in a ``shard_map``, the update ``inside`` it or behind it."""
    tx = wrap(inner)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    whole, rows = NamedSharding(mesh, P(), memory_kind="device"), NamedSharding(mesh, P("data"), memory_kind="device")
    params = jax.ShapeDtypeStruct(STACK.shape, STACK.dtype, sharding=whole)
    batch = jax.ShapeDtypeStruct((4 * TOKENS, WIDTH), jnp.float32, sharding=rows)

    def local(params: Tree, batch: Any) -> Any:
        return jax.lax.pmean(jax.grad(loss_of(scanned))(params, batch), "data")

    grads_of = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)

    def step(params: Tree, state: Tree, batch: Any) -> Any:
        return jo.update_params(tx, grads_of(params, batch), state, params)

    def local_step(params: Tree, state: Tree, batch: Any) -> Any:
        return jo.update_params(tx, local(params, batch), state, params)

    if inside:
        step = jax.shard_map(local_step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
    return step, (params, jo.abstract_state(tx, params), batch), (0, 1)


@jax.custom_vjp
def custom(params: Tree, x: jax.Array) -> jax.Array:
    return scanned(params, x)


custom.defvjp(lambda p, x: jax.vjp(scanned, p, x), lambda vjp, g: vjp(g))


def penalized(params: Tree, x: jax.Array) -> jax.Array:
    """The gradient of a gradient, as in a gradient penalty."""
    value, slope = jax.value_and_grad(lambda x: mean_square(scanned(params, x)))(x)
    return value + mean_square(slope)


# --- frameworks ------------------------------------------------------------------------------------------------------


def linen(wrap: Callable[[Any], Any]) -> Any:
    from flax import linen as nn
    from flax.training.train_state import TrainState

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return jnp.tanh(nn.Dense(WIDTH, use_bias=False)(x)), None

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            scan = nn.scan(nn.remat(Block), {"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return scan()(x, None)[0]

    tx, model = wrap(ADAMW), Network()
    shapes = jax.eval_shape(model.init, jax.random.key(0), BATCH)["params"]
    params = jax.tree.map(lambda x: array(*x.shape), shapes)
    state = TrainState(step=array(dtype=jnp.int32), apply_fn=model.apply, params=params, tx=tx,
                       opt_state=jo.abstract_state(tx, params))  # fmt: skip

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: mean_square(state.apply_fn({"params": p}, batch)))(state.params)
        return state.apply_gradients(grads=grads)

    return step, (state, BATCH), (0,)


def nnx_functional(wrap: Callable[[Any], Any]) -> Any:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.w[...])

    def new() -> Any:
        return nnx.vmap(Block, in_axes=0, out_axes=0)(nnx.Rngs(0).split(LAYERS))

    graph, abstract = nnx.split(nnx.eval_shape(new))
    params = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), abstract)

    def loss(params: Tree, batch: Any) -> jax.Array:
        def body(x: Any, row: Any) -> Any:
            return nnx.merge(graph, row)(x), None

        return mean_square(jax.lax.scan(jax.checkpoint(body), batch, params)[0])

    return one(loss, params)(wrap)


def haiku(wrap: Callable[[Any], Any]) -> Any:
    import haiku as hk

    def network(x: Any) -> Any:
        stack = hk.experimental.layer_stack(LAYERS)
        return stack(hk.remat(lambda x: jnp.tanh(hk.Linear(WIDTH, with_bias=False)(x))))(x)

    model = hk.without_apply_rng(hk.transform(network))
    shapes = jax.eval_shape(model.init, jax.random.key(0), BATCH)
    return one(loss_of(model.apply), jax.tree.map(lambda x: array(*x.shape), shapes))(wrap)


def equinox(wrap: Callable[[Any], Any]) -> Any:
    import equinox as eqx

    new = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key))
    model = eqx.filter_eval_shape(new, jax.random.split(jax.random.key(0), LAYERS))
    shapes, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss(params: Tree, batch: Any) -> jax.Array:
        body = jax.checkpoint(lambda x, row: jnp.tanh(jax.vmap(eqx.combine(row, static))(x)))
        return mean_square(jax.lax.scan(lambda x, row: (body(x, row), None), batch, params)[0])

    return one(loss, jax.tree.map(lambda x: array(*x.shape), shapes))(wrap)


KINDS = [
    Kind("layers in a scan", one(loss_of(scanned))),
    Kind("unrolled layers", one(loss_of(unrolled), UNROLLED)),
    Kind("unrolled layers, four in each checkpoint", one(loss_of(in_groups), MATRICES)),
    Kind("unrolled layers, an embedding and a head", one(of_words, WORDS, batch=array(TOKENS, dtype=jnp.int32))),
    Kind("layers in a scan, clipped", one(loss_of(scanned), inner=CLIPPED)),
    Kind("layers in a scan, clipped", one(loss_of(scanned), inner=CLIPPED), "pipelined"),
    Kind("unrolled layers, clipped", one(loss_of(unrolled), UNROLLED, CLIPPED), "pipelined"),
    Kind("skip where a gradient is not finite", of_step(skipped)),
    Kind("skip where a gradient is not finite", of_step(skipped), "pipelined"),
    Kind("two passes for one update, as in SAM", of_step(sharpness_aware)),
    Kind("microbatches in a scan", of_step(accumulated, batch=FOUR)),
    Kind("microbatches in a scan, with metrics", of_step(partial(accumulated, metrics=True), batch=FOUR)),
    Kind("two networks, updated at once", pair(simultaneous)),
    Kind("two networks in turn, as in a GAN", pair(alternating)),
    Kind("two unrolled networks in turn", pair(partial(alternating, network=unrolled), params=UNROLLED)),
    Kind("one network updated twice", of_step(twice, batch=array(2, TOKENS, WIDTH))),
    Kind("two networks, clipped separately", pair(simultaneous, CLIPPED), "pipelined"),
    Kind("one of two updates in a cond", pair(in_a_branch)),
    Kind("plain optax beside an offload", pair(simultaneous, other=optax.sgd(1e-3))),
    Kind("a target network", with_a_target),
    Kind("optax.partition around two offloads", partitioned),
    Kind("a stack reshaped for a nested scan", one(loss_of(nested))),
    Kind("a stack reshaped for a nested scan, clipped", one(loss_of(nested), inner=CLIPPED), "pipelined"),
    Kind("layers stacked in the step", one(loss_of(lambda p, x: scanned(jnp.stack(p), x)), MATRICES)),
    Kind("one stack in two scans, as in DPO", one(loss_of(lambda p, x: scanned(p, x[:HALF]) - scanned(p, x[HALF:])))),
    Kind("a scan over pairs of layers", one(loss_of(of_two_kinds), {"a": STACK, "b": STACK})),
    Kind("a scan with unroll=2", one(loss_of(partial(scanned, unroll=2)))),
    Kind("fori_loop by index", one(loss_of(
        lambda p, x: jax.lax.fori_loop(0, LAYERS, lambda k, x: jax.checkpoint(layer)(x, p[k]), x)))),
    Kind("the whole step in a shard_map", partial(data_parallel, True, ADAMW)),
    Kind("shard_map, the update outside", partial(data_parallel, False, ADAMW)),
    Kind("shard_map, the update outside, clipped", partial(data_parallel, False, CLIPPED), "pipelined"),
    Kind("gradients summed in a Ref", of_step(into_refs, batch=FOUR)),
    Kind("optax.microbatch", of_step(microbatched, batch=array(4 * TOKENS, WIDTH))),
    Kind("custom_vjp around the network", one(loss_of(custom))),
    Kind("the gradient of a gradient", one(penalized)),
    Kind("linen nn.scan, TrainState", linen, package="flax"),
    Kind("nnx, split and merged", nnx_functional, package="flax"),
    Kind("Equinox, partitioned", equinox, package="equinox"),
    Kind("Haiku layer_stack", haiku, package="haiku"),
]  # fmt: skip


def resident(inner: Any) -> Any:
    return inner


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows in Markdown, as the page has them."""
    lines = ["| step | run with | exposed | peak, resident | where, or why not |", "|---|---|---:|---:|---|"]
    for kind in KINDS:
        if (row := rows.get(kind.name)) is None:
            continue
        where = "the next forward pass" if kind.way == "pipelined" else "the backward pass"
        what = where if row["exposed"] <= HIDDEN else row["why"] or f"{where}, in part"
        lines.append(
            f"| {kind.title} | `jo.{kind.way.removeprefix('jo.')}` | {row['exposed']:.2f} | "
            f"{row['peak']:.0f}, {row['resident']:.0f} | {what} |"
        )
    return "\n".join(lines)
