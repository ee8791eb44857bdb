"""Checkpointed blocks of several matrices under ``jo.jit``: opened, so that gates stand between their gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jax_offload as jo
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.primitives import CHECKPOINT
from jax_offload._ir.program import flat
from jax_offload._ir.slices import Slice
from jax_offload._plan.gates import Gate, Piece, is_heavy_equation
from jax_offload._step import inlined, rewritten
from jax_offload._step.parts import Parts, parts_of
from tests.support.trees import assert_close, equations

pytestmark = pytest.mark.oldest("what is computed again, and primitives of which each has its own")

LAYERS, WIDTH, ROWS = 4, 256, 64
STEPS = 20
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
OPTIONS = {"min_bytes": 1024, "window": 2**20}  # a window that is given: pieces this small would run apart
ONE = {"up": (WIDTH, WIDTH)}
SEVERAL = {"up": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,), "down": (4 * WIDTH, WIDTH), "norm": (2, WIDTH)}


@pytest.fixture
def with_time(monkeypatch):
    monkeypatch.setattr(inlined, "FLOPS_PER_BYTE", 0)  # as if there were many tokens


def parameters(block):
    keys = iter(jax.random.split(jax.random.key(0), LAYERS * len(block)))
    made = {f"block_{k}": {n: 0.05 * jax.random.normal(next(keys), s) for n, s in block.items()} for k in range(LAYERS)}
    return jax.device_put(made, jax.devices()[0])


def apply(x, p):
    if "norm" not in p:
        return jnp.tanh(x @ p["up"])
    scale, shift = p["norm"]  # taken out of a leaf: no part of the pass
    y = checkpoint_name((1 + scale) * x + shift, "normed")
    return x + jnp.tanh(y @ p["up"] + p["bias"]) @ p["down"]


def loss(params, x):
    for k in range(LAYERS):
        x = jax.checkpoint(apply)(x, params[f"block_{k}"])
    return (x**2).mean()


def without_checkpoints(params, x):
    for k in range(LAYERS):
        x = apply(x, params[f"block_{k}"])
    return (x**2).mean()


def batch(k, rows=ROWS):
    return jax.random.normal(jax.random.key(100 + k), (rows, WIDTH))


def step_of(tx, loss=loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return *jo.update_params(tx, grads, state, params), value

    return step


def parts(block, rows=ROWS, fraction=1.0, model=loss):
    tx, params = jo.offload(ADAMW, fraction=fraction, **OPTIONS), parameters(block)
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    found = parts_of(flat(jax.make_jaxpr(step_of(tx, model))(params, tx.init(params), x)))
    assert found is not None
    return found.parts


def blocks_left(found):
    slices = [part.slice if isinstance(part, Piece) else part for part in found]
    eqns = [eqn for part in slices if isinstance(part, Slice) for eqn in part.jaxpr.eqns]
    return sum(eqn.primitive.name in CHECKPOINT for eqn in eqns)


@pytest.mark.parametrize(
    ("block", "rows", "left"),
    [
        (SEVERAL, ROWS, LAYERS),  # the link takes longer than the passes
        (SEVERAL, 65536, 0),
        (ONE, 65536, LAYERS),  # nothing to put between
    ],
)
def test_which_blocks_are_opened(block, rows, left):
    assert blocks_left(parts(block, rows)) == left


def nested(params, x):
    inner = jax.checkpoint(apply)
    for k in range(LAYERS):
        x = jax.checkpoint(lambda x, p: inner(jnp.sin(x), p))(x, params[f"block_{k}"])
    return (x**2).mean()


def may_be_merged(params, x, apart=False):
    for k in range(LAYERS):
        x = jax.checkpoint(apply, prevent_cse=apart)(x, params[f"block_{k}"])
    return (x**2).mean()


def may_be_merged_in_part(params, x):
    return may_be_merged(params, x, (True, False))


@pytest.mark.parametrize(
    ("model", "gates"), [(nested, 2 * LAYERS), (may_be_merged, LAYERS), (may_be_merged_in_part, LAYERS)]
)
def test_blocks_in_blocks_are_opened_and_none_that_is_not_kept_apart(with_time, model, gates):
    """Of a block in a block, what it computes again stays one equation: that makes no gradients."""
    found = parts(SEVERAL, model=model)
    assert blocks_left(found) == LAYERS
    assert gates <= sum(isinstance(part, Gate) for part in found) < 2 * gates + LAYERS
    tx, params = jo.offload(ADAMW, **OPTIONS), parameters(SEVERAL)
    (ours, _, _), (plain, _, _) = (
        jitted(step_of(inner, model))(params, inner.init(params), batch(0))
        for jitted, inner in ((jo.jit, tx), (jax.jit, ADAMW))
    )
    assert_close(ours, plain, 1e-5)


def test_operands_are_kept_apart_one_by_one():
    """As jax lowers ``prevent_cse`` of each argument."""
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), prevent_cse=(True, False))
    both = jax.make_jaxpr(jax.grad(lambda w, x: block(x, w).sum()))(jnp.ones((WIDTH, 8)), batch(0))
    found = [eqn for eqn in flat(both, opens=lambda _: True).eqns if eqn.primitive.name == "optimization_barrier"]
    assert [v.aval.shape for eqn in found for v in eqn.invars].count((WIDTH, 8)) == 0 < len(found)


def test_a_pass_after_the_update_leaves_its_blocks_open(with_time):
    """A second loss, of new parameters, is made of the update's results, and so of the gradients."""

    def twice(tx):
        def step(params, state, x):
            params, state, value = step_of(tx)(params, state, x)
            return params, state, value, (x @ params["block_0"]["up"]).mean()

        return step

    tx, params = jo.offload(ADAMW, **OPTIONS), parameters(SEVERAL)
    found = parts_of(flat(jax.make_jaxpr(twice(tx))(params, tx.init(params), batch(0))))
    assert found is not None and blocks_left(found.parts) == 0


def test_nothing_computed_again_is_taken_from_the_forward_pass(with_time):
    """Each block that is opened is behind a barrier, as jax lowers a ``jax.checkpoint``."""
    tx, params = jo.offload(ADAMW, **OPTIONS), parameters(SEVERAL)
    step = jo.jit(step_of(tx))
    lowered = step.trace(params, tx.init(params), batch(0)).jaxpr
    tanhs = sum(eqn.primitive.name == "tanh" for eqn in equations(lowered))
    assert tanhs == 2 * LAYERS
    ours = jax.jit(step).lower(params, tx.init(params), batch(0)).compile().as_text()
    plain = jax.jit(jax.grad(loss)).lower(params, batch(0)).compile().as_text()
    assert ours.count(" tanh(") == plain.count(" tanh(")  # jax 0.10 on CPU takes them in both


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("clip", [False, True])
def test_the_numbers_of_the_plain_step(with_time, clip, fraction):
    inner = CLIPPED if clip else ADAMW
    tx = jo.offload(inner, fraction=fraction, **OPTIONS)
    plain, ours = jax.jit(step_of(inner)), jo.jit(step_of(tx), donate_argnums=(0, 1))
    params, mine = parameters(SEVERAL), parameters(SEVERAL)
    state, my_state = inner.init(params), tx.init(mine)
    for k in range(STEPS):
        params, state, value = plain(params, state, batch(k))
        mine, my_state, my_value = ours(mine, my_state, batch(k))
    assert_close((mine, my_value), (params, value), 1e-5)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(my_state) if leaf.size >= 4 * WIDTH]
    assert kinds.count("pinned_host") == len(kinds) if fraction == 1 else 0 < kinds.count("pinned_host") < len(kinds)


def test_small_leaves_move_with_their_neighbours(with_time):
    """The bias is loaded with a matrix: as many gates hold host leaves as there are matrices."""
    gates = [part for part in parts(SEVERAL) if isinstance(part, Gate)]
    holding = [gate for gate in gates if any(is_host_aval(v.aval) for v in gate.held)]
    assert len(holding) == 2 * LAYERS


@pytest.fixture
def turned(monkeypatch):
    """The gates of a clipped step that is turned round, of a model."""

    def gates_of(model):
        found = list[Parts | None]()
        monkeypatch.setattr(rewritten, "parts_of", lambda program: found.append(parts_of(program)) or found[-1])
        tx, params = jo.offload(CLIPPED, **OPTIONS), parameters(SEVERAL)
        train = jo.pipelined(step_of(tx, model), donate_argnames=("params", "state"))
        turned, args, _ = train.turned(params, jo.abstract_state(tx, params), batch(0))
        jax.eval_shape(turned.whole_step, *args)
        assert found[-1] is not None
        return [part for part in found[-1].parts if isinstance(part, Gate)]

    return gates_of


def test_a_gate_holds_what_the_pass_goes_on_with(turned):
    loading = [gate for gate in turned(without_checkpoints) if any(is_host_aval(v.aval) for v in gate.held)]
    assert len(loading) > LAYERS
    assert all(any(ROWS in v.aval.shape for v in gate.held) for gate in loading[1:])


def test_a_scale_is_no_part_of_a_pass():
    """It depends on no matmul: a gate that held it would hold nothing back."""
    program = flat(jax.make_jaxpr(jax.grad(without_checkpoints))(parameters(SEVERAL), batch(0)))
    names = {eqn.primitive.name for eqn in program.eqns}
    assert {"unstack", "tanh"} <= names or {"squeeze", "tanh"} <= names
    assert {eqn.primitive.name for eqn in program.eqns if is_heavy_equation(eqn)} == {"dot_general"}


def test_a_bias_has_its_gradient_before_the_pass_goes_on(turned):
    """Returned, not updated: XLA would put off the sum, and keep the cotangent that it is of."""
    waited = [v.aval for gate in turned(without_checkpoints) for v in gate.waits_for]
    assert [a.shape for a in waited if not is_host_aval(a)].count((4 * WIDTH,)) >= LAYERS
