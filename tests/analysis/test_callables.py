"""``verify``, ``inspect`` and ``placement`` take any callable step, and hold each leaf to the update that owns it."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_offload as jo
from tests.support.words import words

MOVED = pytest.mark.filterwarnings("ignore:offload\\(\\)")  # of a state that was moved on purpose
HOST, DEVICE = "pinned_host", "device"


def on_device(x):
    return jax.device_put(x, jax.devices()[0])


def two_optimizers(jit):
    """A step of a GAN: the generator's moments belong on the host, the discriminator's are too small for that."""
    generator, discriminator = on_device({"w": jnp.ones((256, 256))}), on_device({"w": jnp.ones((256, 1))})
    own, other = jo.offload(optax.adam(1e-3)), jo.offload(optax.adam(1e-3))
    states = own.init(generator), other.init(discriminator)

    @functools.partial(jit, donate_argnums=(0, 1, 2, 3))
    def step(g, d, sg, sd, x):
        def loss(g, d):
            return jnp.tanh(jnp.tanh(x @ g["w"]) @ d["w"]).mean()

        to_g, to_d = jax.grad(loss, argnums=(0, 1))(g, d)
        d, sd = jo.update_params(other, to_d, sd, d)
        g, sg = jo.update_params(own, to_g, sg, g)
        return g, d, sg, sd

    return step, generator, discriminator, *states, jnp.ones((4, 256))


@MOVED
@pytest.mark.parametrize("jit", [jax.jit, jo.jit])
def test_two_optimizers_with_leaves_of_the_same_name(jit):
    step, *args = two_optimizers(jit)
    found = jo.verify(step, *args)
    assert found.problems == ()
    args[2] = jo.to_device(args[2])
    told = jo.inspect(step, *args).errors
    assert [(p.leaf, "belongs in host memory" in p.what) for p in told] == [
        (f"sg[0].{m}['w']", True) for m in ("mu", "nu")
    ]


@MOVED
@pytest.mark.parametrize("jit", [jax.jit, jo.jit])
def test_leaves_of_one_type_of_which_some_stay_on_the_device(jit):
    """By type alone nothing tells which of four equal leaves belongs on the host."""
    params = on_device({k: jnp.ones((128, 128)) for k in "abcd"})
    tx = jo.offload(optax.sgd(1e-3, momentum=0.9), fraction=0.5, min_bytes=0)
    step = jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
    state = tx.init(params)
    assert jo.verify(step, params, state).problems == ()
    kinds = {k: x.sharding.memory_kind for k, x in state[0].trace.items()}
    assert sorted(kinds.values()) == [DEVICE, DEVICE, HOST, HOST]
    first = next(k for k, kind in kinds.items() if kind == HOST)
    moved = (state[0]._replace(trace={**state[0].trace, first: jo.to_device(state[0].trace[first])}), *state[1:])
    assert [p.leaf for p in jo.inspect(step, params, moved).errors] == [f"s[0].trace['{first}']"]


@MOVED
def test_a_state_that_the_step_does_not_use():
    """The compiler leaves its arguments out: the next ones, of the same names, do not take their places."""
    params = on_device({"w": jnp.ones((128, 128))})
    tx, small = jo.offload(optax.adam(1e-3)), jo.offload(optax.adam(1e-3), min_bytes=2**30)
    step = jax.jit(lambda p, unused, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 2))
    assert jo.verify(step, params, small.init(params), tx.init(params)).problems == ()
    told = jo.inspect(step, params, tx.init(params), jo.to_device(tx.init(params))).errors
    assert {p.leaf for p in told} == {"s[0].mu['w']", "s[0].nu['w']"}


def nnx_step(tx, jit=functools.partial(nnx.jit, donate_argnums=(0, 1))):
    model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
    nnx.update(model, on_device(nnx.state(model)))
    optimizer = nnx.jit(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))(model)

    @jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    return step, model, optimizer, jnp.ones((8, 128))


ADAMW = jo.offload(optax.adamw(1e-3))


@pytest.mark.parametrize("look", [jo.verify, jo.inspect])
def test_a_step_of_nnx_that_changes_its_arguments(look):
    step, *args = nnx_step(ADAMW)
    before = jax.tree.leaves(args)
    found = look(step, *args)
    assert found.problems == () and found.parts["state on the device"] >= 128 * 1024  # a CPU counts what is pinned
    for new, old in zip(jax.tree.leaves(args), before, strict=True):
        assert new is old and not new.is_deleted()  # nothing ran
    step(*args)
    assert args[1].opt_state[0].mu["kernel"].get_value().sharding.memory_kind == HOST
    table = jo.placement(step, *args)
    assert "whole, 2 leaves together" in words(table) and "not loaded" not in words(table)
    assert {leaf.path for leaf in table.leaves if leaf.host} == {
        f"[1].opt_state[0].{m}['kernel'].value" for m in ("mu", "nu")
    }


def test_a_resident_step_of_nnx_is_no_offload():
    step, *args = nnx_step(optax.adamw(1e-3))
    with pytest.raises(ValueError, match=r"its optimizer state has .* leaves, .* on the device. Wrap the optimizer"):
        jo.verify(step, *args)


class Trainer:
    def __init__(self):
        self.scale = 0.5

    def written(self, params, state, x, name="none"):
        assert name in ("none", "a name")
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean() * self.scale)(params)
        return *jo.update_params(ADAMW, grads, state, params), name

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def jitted(self, params, state, x):
        return self.written(params, state, x)[:2]

    @functools.partial(jo.jit, static_argnums=0, donate_argnums=(1, 2))
    def ours(self, params, state, x):
        return self.written(params, state, x)[:2]

    def calls(self, params, state, x):
        params, state = self.jitted(params, state, x)
        return {"params": params, "state": state, "trainer": self}


CALLABLES = {
    "method": lambda trainer: trainer.written,
    "jitted method": lambda trainer: trainer.jitted,
    "method by jo.jit": lambda trainer: trainer.ours,
    "method that calls a jitted one": lambda trainer: trainer.calls,
    "partial": lambda trainer: functools.partial(trainer.written, name="a name"),
    "partial of a jitted method": lambda trainer: functools.partial(trainer.jitted),
    "lambda": lambda trainer: lambda params, state, x: trainer.jitted(params, state, x),
}


@MOVED
@pytest.mark.parametrize("name", CALLABLES)
def test_any_callable(name):
    params, x = on_device({"w": jnp.ones((128, 128))}), jnp.ones((8, 128))
    step, state = CALLABLES[name](Trainer()), ADAMW.init(params)
    found = jo.verify(step, params, state, x)
    assert found.problems == ()
    donated = found.peak < 480 * 1024  # parameters and moments once, not twice
    assert donated or name in ("method", "partial")
    table = words(jo.placement(step, params, state, x))
    assert "whole, 2 leaves together" in table and "not loaded" not in table
    assert "[1][0].{mu,nu}['w']" in table  # the state is the second argument of the call
    with pytest.raises(ValueError, match=r"state\[0\].mu\['w'\]: belongs in host memory and arrives on the device"):
        jo.verify(step, params, jo.to_device(state), x)


def test_a_state_that_a_method_or_a_partial_holds():
    params, x = on_device({"w": jnp.ones((128, 128))}), jnp.ones((8, 128))
    held = functools.partial(Trainer().written, params, ADAMW.init(params))
    paths = {leaf.path for leaf in jo.placement(held, x).leaves}
    assert paths == {f"bound[2][0].{m}['w']" for m in ("mu", "nu")}


def test_what_cannot_be_traced_says_what_to_pass():
    step, model, optimizer, x = nnx_step(ADAMW)
    with pytest.raises(Exception) as closed_over:  # noqa: PT011
        jo.verify(lambda x: step(model, optimizer, x), x)
    assert "Pass everything that it reads or changes as an argument" in "".join(closed_over.value.__notes__)


@MOVED
@pytest.mark.parametrize("jit", [jax.jit, jo.jit])
def test_numbers_and_static_arguments_among_the_arrays(jit):
    params = on_device({"w": jnp.ones((128, 128))})
    names = {"static_argnames": "how", "donate_argnames": ("params", "state")}

    @functools.partial(jit, **names)
    def step(rate, params, how, flag, state):
        assert how == "plain"
        return jo.update_params(ADAMW, jax.tree.map(lambda x: rate * x * flag, params), state, params)

    state = ADAMW.init(params)
    assert jo.verify(step, 0.5, params, "plain", True, state=state).problems == ()
    told = jo.inspect(step, 0.5, params, "plain", True, state=jo.to_device(state)).errors
    assert [p.leaf for p in told] == ["state[0].mu['w']", "state[0].nu['w']"]
