"""Stopping and going on with ``jo.pipelined``: at any step, from checkpoints, and of what memory is donated."""

import copy

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jax_offload as jo
from tests.support.steps import (
    CLIPPED,
    advance,
    assert_placed,
    batch,
    loop,
    now,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import assert_close, copied


def pipelined(step, **options):
    return jo.pipelined(step, donate_argnums=(0, 1), **options)


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
