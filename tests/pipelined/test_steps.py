"""``jo.pipelined`` has the values and placements of the plain loop, for optimizers, steps and carried values.

Random steps (tests/test_random_steps.py) have the rest.
"""

import copy
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    CLIPPED,
    DEVICE,
    HOST,
    IN_FORWARD,
    WIDTH,
    advance,
    assert_as_plain,
    assert_placed,
    batch,
    finished,
    loop,
    loss_of,
    moved,
    now,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import assert_close, copied, shardings_in

BATCHES = [batch(k) for k in range(5)]


def pipelined(step, **options):
    return jo.pipelined(step, donate_argnums=(0, 1), **options)


@pytest.mark.oldest("the turned step")
def test_what_waits_is_updated_on_the_cores():
    """tests/test_equivalence.py covers the other paths."""
    assert_as_plain(
        step_of, offloaded(CLIPPED, update_on="host"), CLIPPED, jo.pipelined, batches=BATCHES, gradients="host"
    )


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_a_skipped_update_in_the_forward_pass_changes_no_bit(gradients):
    """Though the state moves: each slice of the update chooses, and the codes of its moments are as they were."""
    tx = offloaded(CLIPPED, storage={"mu": "int8", "nu": "bfloat16"})

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        bad = ~jnp.isfinite(optax.tree.norm(grads))
        return *jo.update_params(tx, grads, state, params, skip=bad), value

    train = pipelined(step, gradients=gradients)
    params, state = parameters(), tx.init(parameters())
    assert any(moved(jo.placement(train, params, state, batch(0)), IN_FORWARD).values())
    carry, _ = train((params, state), batch(0))
    carry, _ = train(carry, jax.tree.map(lambda x: x * jnp.inf, batch(2)))
    before, places = jax.tree.map(np.asarray, carry.kept[0]), shardings_in(carry.kept[0])
    carry, _ = train(carry, batch(3))
    after = carry.kept[0]
    assert {*after} == {*before} and len(before) > 6 and shardings_in(after) == places
    for name, x in before.items():
        assert (x.dtype, x.tobytes()) == (after[name].dtype, np.asarray(after[name]).tobytes()), name
    carry, _ = train(carry, batch(4))
    assert any(x.tobytes() != np.asarray(carry.kept[0][name]).tobytes() for name, x in before.items())


# ---- carried values and late results


def test_what_is_known_late_and_a_look_at_the_parameters():
    """Of each result the call returns what it knows, and the next one the rest. A look sees what ``finish`` returns."""
    tx = offloaded(CLIPPED)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        new, state = jo.update_params(tx, grads, state, params)
        change = optax.tree.norm(jax.tree.map(jnp.subtract, new, params))
        known = jax.lax.cond(True, lambda: value, lambda: 0.0)  # of a weak type, as the branch that is not taken
        return new, state, {"loss": known, "norms": {"gradient": optax.tree.norm(grads), "update": change}}

    train = pipelined(step)
    carry, returned = advance(train, (parameters(), tx.init(parameters())), BATCHES)
    assert [aux.step for aux in returned] == list(range(5)) and returned[0].late is None
    assert all(aux.now["norms"]["update"] is None and aux.now["loss"] > 0 for aux in returned)
    assert all(aux.now["loss"].weak_type for aux in returned)
    assert all(aux.late["loss"] is None and aux.late["norms"]["gradient"] is None for aux in returned[1:])
    looked, again = train.params(carry), train.params(carry)  # it leaves the carry as it was
    assert_close(again, looked, 0)
    (params, _), results = finished(train, carry, returned)
    assert all(found["norms"]["update"] > 0 for found in results)
    assert_close(params, looked, 1e-6)


def test_another_batch_shape_and_one_compile_of_each(caplog):
    tx, batches = offloaded(CLIPPED), [batch(k, size=8 if k % 3 else 4) for k in range(7)]
    wanted, losses = loop(step_of(CLIPPED), (parameters(), CLIPPED.init(parameters())), batches)
    train = pipelined(step_of(tx))
    with jax.log_compiles():
        carry, returned = advance(train, (parameters(), tx.init(parameters())), batches)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("train") == 3  # 4 then 8, 8 then 8, 8 then 4
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-4)


def test_settings_of_jax_make_another_program():
    tx, seen = offloaded(ADAMW), []

    def step(params, state, batch):
        seen.append(jax.config.jax_default_matmul_precision)
        return step_of(tx)(params, state, batch)

    train = pipelined(step)
    carry, _ = train((parameters(), tx.init(parameters())), batch(0))
    for precision in (None, "float32", "float32", None):
        with jax.default_matmul_precision(precision):
            carry, _ = train(carry, batch(1))
    train.finish(carry)
    assert seen == [None, "float32"]


class Both(NamedTuple):
    params: Any
    state: Any


HOLDERS = {
    "named tuple": Both,
    "tuple": lambda params, state: (params, state),
    "dict with its name": lambda params, both: {"params": params, "both": both},
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_one_carried_argument_that_holds_both(kind):
    """Random steps return a train state beside other results; here it is the only result and not the first argument."""
    tx, holder = offloaded(ADAMW), HOLDERS[kind]

    def step(batch, both):
        params, state = (both["params"], both["both"]) if isinstance(both, dict) else both
        return holder(*step_of(tx)(params, state, batch)[:2])

    both = holder(parameters(), tx.init(parameters()))
    train = jo.pipelined(step, donate_argnames="both")
    assert "not known" not in str(jo.placement(train, batch(0), both))
    carry, aux = train(copied(both), batch(0))
    assert aux.now == ()
    assert_close(train.finish(carry), jax.jit(step)(batch(0), both), 1e-5)


# ---- gradients="host"


def waiting(carry):
    """By shape, where each gradient waits and its dtype."""
    return {x.shape: (x.sharding.memory_kind, x.dtype) for x in carry.kept[1].values() if x.ndim > 1}


@pytest.mark.parametrize(
    ("axis", "unrolled", "dtype"),
    [(0, False, jnp.float32), (0, True, jnp.float32), (1, False, jnp.float32), (0, False, jnp.bfloat16)],
)
def test_large_gradients_wait_on_the_host(axis, unrolled, dtype):
    """After the first call and the next, in their own dtype, though the step casts them; the head's stays."""
    tx, params = offloaded(jo.with_master_params(CLIPPED)), parameters(axis, dtype)
    if dtype == jnp.bfloat16:
        params["layers"] = jnp.concatenate([params["layers"]] * 2)  # of 64 KiB

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch, axis=axis, unrolled=unrolled)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * 0.5, grads)
        return *jo.update_params(tx, grads, state, params), value

    train = pipelined(step, gradients="host")
    carry, _ = train((copied(params), tx.init(params)), batch(0))
    for _ in range(2):
        assert waiting(carry) == {params["layers"].shape: (HOST, dtype), (WIDTH, 8): (DEVICE, jnp.float32)}
        carry, _ = train(carry, batch(1))
    train.finish(carry)


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_gradients_wait_divided_like_their_parameters(gradients):
    """XLA by itself would keep some gradients whole on every device."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    home = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))  # noqa: E731
    params = jax.device_put(parameters(), {"layers": home(None, "d"), "head": home(), "bias": home()})
    tx, x = offloaded(CLIPPED), jax.device_put(batch(0), home("d"))
    carry, _ = pipelined(step_of(tx), gradients=gradients)((params, tx.init(params)), x)
    (found,) = (x for x in carry.kept[1].values() if x.shape == params["layers"].shape)
    assert found.sharding.is_equivalent_to(home(None, "d").with_memory_kind(found.sharding.memory_kind), found.ndim)
    assert found.sharding.memory_kind == (HOST if gradients == "host" else DEVICE)


def test_gradients_that_cannot_wait():
    tx, state = offloaded(CLIPPED), offloaded(CLIPPED).init(parameters())

    def branching(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        update = lambda: jo.update_params(tx, grads, state, params)  # noqa: E731
        return *jax.lax.cond(jnp.isfinite(value), update, lambda: (params, state)), value

    def of_the_head(params, state, batch):
        value, grads = jax.value_and_grad(lambda head: loss_of(parameters() | head, batch))(params)
        return *jo.update_params(tx, grads, state, params), value

    with pytest.raises(ValueError, match="gradients: expected 'device' or 'host', got 'disk'"):
        pipelined(step_of(tx), gradients="disk")
    with pytest.raises(ValueError, match="gradients='host': the step's update runs in a cond"):
        pipelined(branching, gradients="host")((parameters(), state), batch(0))
    head = {"head": parameters()["head"]}
    with pytest.raises(ValueError, match="gradients='host': none that the update reads is a float array of 64 KiB"):
        pipelined(of_the_head, gradients="host")((head, tx.init(head)), batch(0))


# ---- stopping and going on: at any step, from checkpoints


@pytest.mark.parametrize(("what", "gradients"), [("the carry", "host"), ("what finish gives", "device")])
def test_resume_from_a_checkpoint(what, gradients, tmp_path):
    """In a process of its own the restored carry has a program of that process: here, another ``pipelined``."""
    tx, batches = offloaded(CLIPPED), list(map(batch, range(6)))
    start = parameters(), tx.init(parameters())
    wanted, losses = loop(step_of(CLIPPED, "update"), (parameters(), CLIPPED.init(parameters())), batches)
    train = pipelined(step_of(tx), gradients=gradients)
    carry, returned = advance(train, copied(start), batches[:3])
    saved = carry if what == "the carry" else train.finish(carry)
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        manager.save(3, args=jo.save_args(saved))
    fresh = pipelined(step_of(tx), gradients=gradients)
    like = fresh(start, batches[0])[0] if what == "the carry" else start
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        back = jo.restore(manager, like)
    assert_placed(back.kept if what == "the carry" else back, saved.kept if what == "the carry" else saved)
    if what == "the carry":
        carry = back
        for each in batches[3:]:
            carry, aux = fresh(carry, each)
            returned.append(aux)
        assert [aux.step for aux in returned] == list(range(6))
        assert type(returned[-1].step) is int
    else:
        carry, rest = advance(fresh, back, batches[3:])
        returned += rest
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-5)
    assert_close(fresh.finish(carry)[0], wanted[-1][0], 1e-4)


def test_a_copy_of_a_carry_goes_on_by_itself():
    tx, batches = offloaded(CLIPPED), list(map(batch, range(3)))
    train = pipelined(step_of(tx))
    carry, _ = train((parameters(), tx.init(parameters())), batches[0])
    other = copied(carry)
    for each in batches[1:]:
        carry, _ = train(carry, each)
        other, aux = train(other, each)
    assert aux.step == 2
    assert_close(train.finish(carry), train.finish(other), 0)


def test_nothing_of_start_is_donated_before_the_first_call():
    tx = offloaded(CLIPPED)
    params, state = parameters(), tx.init(parameters())
    train = pipelined(step_of(tx))
    carry, _ = train((params, state), batch(0))
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))
    pending = jax.tree.leaves(carry.kept[1])
    following, _ = train(carry, batch(1))
    assert all(x.is_deleted() for x in jax.tree.leaves((params, pending)))
    kept = [x for x in jax.tree.leaves(following.kept[:1]) if x.ndim]
    assert not any(x.is_deleted() for x in jax.tree.leaves(following.kept))
    train.finish(following)
    assert kept and all(x.is_deleted() for x in kept)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "cloudpickle"])
def test_a_copy_of_a_step_runs(way):
    tx = offloaded(CLIPPED)
    train = pipelined(step_of(tx), gradients="host")
    if way == "cloudpickle":
        cloudpickle = pytest.importorskip("cloudpickle")
        again = cloudpickle.loads(cloudpickle.dumps(train))
    else:
        again = getattr(copy, way)(train)
    first, second = (each.finish(each((parameters(), tx.init(parameters())), batch(0))[0]) for each in (train, again))
    assert again is not train
    assert_close(first, second, 0)
