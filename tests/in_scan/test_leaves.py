"""Which leaves are updated in the scan that makes their gradients, and which stay after it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.in_scan import ADAMW, WHY, model_of, reasons, same_steps
from tests.support.rows import rows
from tests.support.steps import FAST, L, N, batch, moved, normal, scans, training_step


def test_small_rows_stay_where_they_were():
    """On the device, and of a few bytes: they are updated together after the scan."""
    model = model_of("bias, embedding, head")
    params, tx = model.init(), jo.offload(optax.adamw(1e-2), min_bytes=L * N * N * 4)
    step = jo.jit(training_step(tx, model.loss))
    args = params, tx.init(params), batch()
    assert sum(moved(step, *args).values()) == 2  # of the weights' moments, which alone are on the host
    (scan,) = scans(step, *args)
    assert [y.aval.shape for y in scan.kept] == [(L, N)]


def test_no_layers():
    """A stack of none, as configurations have it; the other moves."""

    def loss(params, x):
        for name in ("layers_1", "layers_2"):
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params[name])
        return (x**2).mean()

    params = {"layers_1": np.zeros((0, N, N), np.float32), "layers_2": normal("w", L, N, N)}
    params, tx = jax.device_put(params, jax.devices()[0]), jo.offload(ADAMW, min_bytes=0)
    step = jo.jit(training_step(tx, loss), compiler_options=FAST)
    assert sum(moved(step, params, tx.init(params), batch()).values()) == 2
    same_steps(step, training_step(ADAMW, loss), tx, ADAMW, params)


def two_stacks(params, x):
    def body(x, p):
        return x + jnp.tanh(x @ p[0]) @ p[1], None

    return (jax.lax.scan(body, x, (params["layers_1"], params["layers_2"]))[0] ** 2).mean()


def test_a_leaf_that_two_gradients_meet():
    """One of them overwrites it; the other, which would read it or be written there too, stays."""

    def log(params, grads, new):
        return params["layers_1"] + grads["layers_2"]

    params = {name: normal(name, L, N, N) for name in ("layers_1", "layers_2")}
    params, tx = jax.device_put(params, jax.devices()[0]), jo.offload(ADAMW, min_bytes=0)
    step = jo.jit(training_step(tx, two_stacks, log=log, update=True), compiler_options=FAST)
    args = params, tx.init(params), batch()
    same_steps(step, training_step(ADAMW, two_stacks, log=log, update=True), tx, ADAMW, params)
    assert sum(moved(step, *args).values()) == 2 and "two gradients" in " ".join(reasons(step, *args))


def test_what_the_scan_reads_whole_is_not_overwritten_in_it():
    def loss(params, x):
        w = params["layers"]
        others = jax.lax.stop_gradient(w)

        @jax.checkpoint
        def body(x, p):
            v, i = p
            return x + jnp.tanh(x @ v) @ others[(i + 1) % L], None

        return (jax.lax.scan(body, x, (w, jnp.arange(L)))[0] ** 2).mean()

    params = jax.device_put({"layers": normal("w", L, N, N)}, jax.devices()[0])
    tx = jo.offload(ADAMW, min_bytes=0)
    step = jo.jit(training_step(tx, loss), compiler_options=FAST)
    (scan,) = scans(step, params, tx.init(params), batch())
    read = [v for v in scan.scan.consts if v.aval.shape == (L, N, N)]
    assert read and not {*scan.in_place} & {*read}
    same_steps(step, training_step(ADAMW, loss), tx, ADAMW, params)


def tower(layers, x):
    return (jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0] ** 2).mean()


@pytest.mark.parametrize("clipped", [True, False])
def test_a_scan_that_reads_parameters_silences_no_other(clipped):
    """What the clipped gradients of one tower wait for is no reason any more once it is updated where its parameters
    are read again; that of the other tower still is."""
    clip = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
    labels = {"layers_read": "clipped", "layers_other": "clipped too" if clipped else "as they are"}
    inner = optax.partition({"clipped": clip, "clipped too": clip, "as they are": ADAMW}, labels)
    params = {"layers_read": normal("read", L, N, N), "layers_other": normal("other", L + 1, N, N)}
    params, tx = jax.device_put(params, jax.devices()[0]), jo.offload(inner, min_bytes=0)

    def step_of(tx):
        def step(params, state, x):
            grads = jax.grad(lambda p: tower(p["layers_read"], x) + tower(p["layers_other"], x))(params)
            params, state = jo.update_params(tx, grads, state, params)
            return params, state, tower(params["layers_read"], x)

        return step

    step = jo.jit(step_of(tx), compiler_options=FAST)
    table = jo.placement(step, params, tx.init(params), batch())
    where = {leaf.path.split("layers_")[1]: leaf.streams for leaf in table.leaves}
    assert "in the scan that reads the parameters" in where["read']"]
    assert ("in the scan that makes" in where["other']"]) == (not clipped)
    assert any("needs all gradients" in why for why in table.stays) == clipped and len(table.stays) == clipped
    same_steps(step, step_of(inner), tx, inner, params)


# Of factored moments, those of what is not factored: a leaf of one element.
NO_ROWS = ("v_row['layers_b']", "v_col['layers_b']", "v['layers_w']")
# Optimizers that need something of all layers at once. What they do before that, moments say, may move.
TOGETHER = {
    "clip_by_global_norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), False),
    "clip_by_block_rms": (lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.adamw(1e-2)), False),
    "adaptive_grad_clip": (lambda: optax.chain(optax.adaptive_grad_clip(1e-2), optax.adamw(1e-2)), False),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adamw(1e-2), 3), False),
    "novograd": (lambda: optax.novograd(1e-2), False),
    "lamb": (lambda: optax.lamb(1e-2, weight_decay=1e-3), True),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), True),
    "muon": (lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=_matrices), True),
}


def _matrices(params):
    return jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers(1, 2) if p.ndim == 3 else None, params)


@pytest.mark.long("more optimizers", but=["clip_by_global_norm"])
@pytest.mark.parametrize("name", rows(TOGETHER, WHY, daily=["clip_by_global_norm", "apply_if_finite", "lamb", "muon"]))
def test_layers_together(name):
    inner, some = TOGETHER[name]
    model = model_of("bias, embedding, head")
    params = model.init()

    def step_of(tx):
        return training_step(tx, model.loss)

    tx = jo.offload(inner(), min_bytes=0)
    step = jo.jit(step_of(tx), compiler_options=FAST)
    args = params, tx.init(params), batch()
    moves = {path: inside for path, inside in moved(step, *args).items() if "layers" in path}
    if some:  # each leaf that has rows, so that no leaf is left to say why
        assert all(inside for path, inside in moves.items() if not any(each in path for each in NO_ROWS))
    else:
        assert not any(moves.values())
        assert any("needs all gradients" in why or "keep layers apart" in why for why in reasons(step, *args))
    same_steps(step, step_of(inner()), tx, inner(), params)
