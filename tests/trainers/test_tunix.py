"""Tunix's ``PeftTrainer``: full, LoRA, accumulated, resumed; on one device and on a mesh of eight.

On a mesh it shards the optimizer before the first step with bare specs, which moves the whole state to the device.
"""

import contextlib
import functools
import unittest.mock
import warnings

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jax_offload as jo
from tests.trainers._common import INNER, STEPS, assert_same_losses, kinds

peft_trainer = pytest.importorskip("tunix.sft.peft_trainer", exc_type=ImportError)
env_utils = pytest.importorskip("tunix.utils.env_utils", exc_type=ImportError)

VOCABULARY, WIDTH = 32, 16


@pytest.fixture(autouse=True)
def as_tunix_does():
    """Its models switch off that flax shards variables when they are made."""
    import flax

    before = flax.config.flax_always_shard_variable
    env_utils.setup_sharding_environment()
    yield
    flax.config.update("flax_always_shard_variable", before)


class Model(nnx.Module):
    def __init__(self, rngs, lora):
        init = nnx.initializers.lecun_normal()

        def linear(n_in, n_out, *names):
            kernel = nnx.with_partitioning(init, names)
            if lora:
                return nnx.LoRALinear(n_in, n_out, lora_rank=4, kernel_init=kernel, rngs=rngs)
            return nnx.Linear(n_in, n_out, kernel_init=kernel, rngs=rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.up = linear(WIDTH, 4 * WIDTH, None, "fsdp")
        self.down = linear(4 * WIDTH, VOCABULARY, "fsdp", None)

    def __call__(self, tokens, positions, cache, attention_mask):
        return self.down(nnx.gelu(self.up(self.embed(tokens)))), None


def batches(n):
    rng = np.random.default_rng(0)
    for _ in range(n):
        tokens = rng.integers(0, VOCABULARY, (8, 12))
        yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


class Watch:
    """Losses of the completed updates, and where the state is before each step."""

    def __init__(self):
        self.losses, self.memories, self.trainer = [], [], None

    def on_train_start(self, trainer):
        self.trainer = trainer

    def on_train_end(self, trainer):
        pass

    def on_train_step_start(self, trainer):
        self.memories.append(kinds(trainer.optimizer.opt_state))

    def on_train_step_end(self, trainer, step, loss):
        self.losses.append(float(loss))


def make_mesh(shape):
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,)) if shape == "mesh" else contextlib.nullcontext()


def optimizer(kind):
    """Where gradients accumulate, ``MultiSteps`` stands inside ``offload``; Tunix counts microbatches as steps."""
    return optax.MultiSteps(INNER, 2) if kind == "accumulate" else INNER


def offloaded(kind):
    return jo.offload(optimizer(kind), min_bytes=0)


def train(tx, shape, kind, *, steps=STEPS, folder=None, ahead=False):
    """Steps of a trainer that goes on where the folder's last checkpoint ends.

    ``ahead``: its step is built where no mesh is set, so that it does not move the state, and what a restore has put on
    the device is moved before.
    """

    @nnx.jit
    def make():
        model = Model(nnx.Rngs(0), lora=kind == "lora")
        if shape == "mesh":
            state = nnx.state(model)
            nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    with (mesh := make_mesh(shape)):
        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=STEPS + 1,
            max_steps=steps,
            checkpoint_root_directory=None if folder is None else str(folder),
        )
        trainer = peft_trainer.PeftTrainer(make(), tx, config)
        trainer.with_gen_model_input_fn(lambda x: {**vars(x), "positions": None, "attention_mask": None})
        trainer.with_training_hooks(watch := Watch())
    if ahead:
        moved = trainer.optimizer
        of = nnx.LoRAParam if kind == "lora" else nnx.Param
        state, params = nnx.as_pure(moved.opt_state), nnx.as_pure(nnx.state(trainer.model, of))
        nnx.update(moved.opt_state, nnx.state(jo.to_host(moved.tx, state, params)))
        with unittest.mock.patch.object(jax, "jit", jo.jit):
            trainer.jit_train_and_eval_step(cache_nnx_graph=True)
    with mesh:
        trainer.train(batches(STEPS))
    return watch


@functools.cache
def expected_losses(shape, kind):
    return train(optimizer(kind), shape, kind).losses


@contextlib.contextmanager
def only_on_a_mesh(shape):
    """The warning that names what has moved the state: where it was moved."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    moved = [str(w.message) for w in caught if "arrive at update in device memory" in str(w.message)]
    assert bool(moved) == (shape == "mesh")
    assert all("PeftTrainer" in text for text in moved)


@pytest.mark.parametrize("shape", ["one device", "mesh"])
@pytest.mark.parametrize("kind", ["full", "lora", "accumulate"])
def test_peft_trainer(kind, shape):
    with only_on_a_mesh(shape):
        watch = train(offloaded(kind), shape, kind)
    assert_same_losses(watch.losses, expected_losses(shape, kind))
    assert watch.memories[0] == ({"device"} if shape == "mesh" else {"pinned_host"})
    assert watch.memories[1:] == [{"pinned_host"}] * (len(watch.memories) - 1)
    assert len(watch.memories) == STEPS


@pytest.mark.parametrize(("kind", "shape"), [("full", "one device"), ("accumulate", "one device"), ("lora", "mesh")])
def test_checkpoint_and_resume(kind, shape, tmp_path):
    first = train(offloaded(kind), shape, kind, steps=5, folder=tmp_path)
    rest = train(offloaded(kind), shape, kind, folder=tmp_path)
    assert (len(first.losses), len(rest.losses)) == (5, STEPS - 5)
    assert_same_losses(first.losses + rest.losses, expected_losses(shape, kind))
    assert rest.memories[1:] == [{"pinned_host"}] * (len(rest.memories) - 1)


def test_a_plain_run_goes_on_offloaded(tmp_path):
    """A checkpoint of the plain optimizer, and one of the offloaded, are the same."""
    first = train(INNER, "one device", "full", steps=5, folder=tmp_path)
    rest = train(offloaded("full"), "one device", "full", steps=9, folder=tmp_path)
    last = train(INNER, "one device", "full", folder=tmp_path)
    assert_same_losses(first.losses + rest.losses + last.losses, expected_losses("one device", "full"))
    assert kinds(nnx.state(rest.trainer.optimizer)) == {"pinned_host"}


@pytest.mark.parametrize(("kind", "resumed"), [("full", False), ("accumulate", False), ("lora", True)])
def test_a_step_that_is_built_ahead_leaves_the_state_on_the_host(kind, resumed, tmp_path):
    """What docs/trainers.md says that a user can do."""
    losses = train(offloaded(kind), "mesh", kind, steps=5, folder=tmp_path).losses if resumed else []
    with only_on_a_mesh("one device"):
        watch = train(offloaded(kind), "mesh", kind, folder=tmp_path if resumed else None, ahead=True)
    assert_same_losses(losses + watch.losses, expected_losses("mesh", kind))
    assert watch.memories == [{"pinned_host"}] * len(watch.memories)
