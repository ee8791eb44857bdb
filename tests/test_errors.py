"""Bad input: an error that names the argument, shows what was given, and says the fix."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo

pytestmark = [pytest.mark.oldest("messages that quote jax"), pytest.mark.daily("each is an error of its own")]

ADAM = optax.adam(1e-3)


def params(dtype=jnp.float32, **shapes):
    shapes = {"w": (32, 32), "b": (32,)} | shapes
    return jax.device_put({name: jnp.ones(shape, dtype) for name, shape in shapes.items()}, jax.devices()[0])


def offload(inner=ADAM, **options):
    return jo.offload(inner, min_bytes=0, **options)


NAN, PREFIX = float("nan"), r"expected .*prefix of the parameters(.|\n)*parameters"
OPTIONS = [
    ("fraction", [-0.1, 1.5, "half", True, {"w": 2.0, "b": 0.0}, NAN], r"expected .*\[0, 1\]"),
    ("fraction", [{"w": 1.0}, {"w": 1.0, "b": 1.0, "c": 1.0}, [1.0, 1.0]], PREFIX),
    ("select", [["w", "embedd"]], r".*'embedd'.*b, w"),
    ("select", [{"w": True}, {"w": 1.0, "b": 0.0}, 3], "expected"),
    ("select", [["w", "["]], "'\\[' is not a regular expression"),
    # one rule for a function, a pattern and a tree that select nothing
    ("select", [lambda path, leaf: "embed" in path, "embed", ["embed"], False, {"w": False, "b": False}], r".*\bw\b"),
    ("min_bytes", [-1, 0.5, None, True], "expected a number of bytes"),
    ("window", [0, -1, 1.5, True, "8MB", 8e6], r"expected a number of bytes .* 2\*\*28 are 256 MiB"),
]


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [(name, value, words) for name, values, words in OPTIONS for value in values],
    ids=lambda x: "callable" if callable(x) else str(x),
)
def test_options(name, given, words):
    """They are checked whatever the fraction: none does not hide what is wrong until it is more."""
    for others in ({"fraction": 0}, {"fraction": 0.5}, {}) if name != "fraction" and not callable(given) else ({},):
        for jit in (lambda init: init), jax.jit:
            with pytest.raises(ValueError, match=f"^{name}: {words}"):
                jit(jo.offload(ADAM, **{"min_bytes": 0, **others, name: given}).init)(params())


@pytest.mark.parametrize("fraction", [0, 1])
def test_options_that_are_right(fraction):
    tx = offload(fraction=fraction, select="w", window=1)
    for init in (tx.init, jax.jit(tx.init)):
        assert jax.tree.map(jnp.shape, init(params())) == jax.tree.map(jnp.shape, ADAM.init(params()))
    optax.tree.map_params(tx, lambda x: x, tx.init(params()))  # which probes with placeholders
    assert jo.placement(offload(select=lambda *given: True), params()).host_bytes


@pytest.mark.parametrize("options", [{}, {"storage": "bfloat16"}, {"fraction": 0.5}, {"update_on": "host"}])
def test_a_pickle_is_the_recipe(options):
    cloudpickle = pytest.importorskip("cloudpickle")
    tx = offload(jo.with_master_params(optax.chain(optax.clip_by_global_norm(1.0), ADAM)), **options)
    for _ in range(2):  # before and after init
        got, want = cloudpickle.loads(cloudpickle.dumps(tx)).init(params()), tx.init(params())
        assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, want)


NONE, UNLIKE = "tx: expected an optax.GradientTransformation, got a dict", r"not like .*Fix: .*\(tx, state, params\)"
NESTED = [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx), lambda tx: optax.apply_if_finite(tx, 3)]


def printing(tx):
    def step(state, params):
        jax.debug.print("{}", params["b"][0], ordered=True)
        return tx.update(params, state, params)

    return step


def jitted(step, tx):
    return jax.jit(step)(tx.init(params()), params())


def in_a_trace(ask):
    return jax.jit(lambda params: ask(jo.offload(ADAM), params) and params)(params())


TYPES = [
    (r"inner: expected an optax.GradientTransformation, got .*adam", lambda: jo.offload(optax.adam)),
    (r"inner: .*Call it first: adamw\(learning_rate\)", lambda: jo.offload(optax.adamw)),
    (r"inner: .*Call it first: adamw\(learning_rate\)", lambda: jo.with_master_params(optax.adamw)),
    (r"inner: .*got 0.001. For example optax.adamw\(1e-3\)", lambda: jo.offload(1e-3)),
    (r"Expected a callable value, got \{", lambda: jo.jit(params())),
    (rf"{NONE}.*\(tx, grads, state, params\)", lambda: jo.update_params(params(), *[params()] * 3)),
    *((rf"{NONE}.*\(tx, (params|state)\)", lambda look=look: look(params(), offload()))
      for look in (jo.abstract_state, jo.to_host, jo.from_plain, jo.to_plain)),
    # one rule, wherever the inner one stands
    *((r"inner: .*offload\(...\)", lambda around=around: offload(around(jo.offload(ADAM))).init(params()))
      for around in NESTED),
    # the error names the function that was called
    (r"update_params\(\) missing .*'params'", lambda: jo.update_params(params(), ADAM.init(params()), params())),
    (r"update_fn\(\) missing .*'state'", lambda: jo.offload(ADAM).update(params())),
    (r"placement\(tx, params\): .* got 0 arguments", lambda: jo.placement(offload())),
    (r"placement\(tx, params\): .* got 2 arguments", lambda: jo.placement(offload(), params, params)),
    (r"^select: .*too many positional arguments.*lambda path, leaf",
     lambda: jo.offload(ADAM, select=lambda path: True).init(params())),
]  # fmt: skip
VALUES = [
    (f"^state: got a NoneType.*{UNLIKE}", lambda: jo.to_host(offload())),
    (f"^state: got a dict.*{UNLIKE}", lambda: jo.to_host(offload(), params())),
    # docs/troubleshooting.md explains these errors of jax
    ("memory_space", lambda: jitted(lambda state, params: state[0].mu["w"] + params["w"], offload())),
    (re.escape("safe_zip() argument 1 has length"), lambda: jitted(printing(offload()), offload())),
    # a question about places inside a trace
    *((r"params: these are tracers.* Fix: call this function outside jax\.jit", lambda ask=ask: in_a_trace(ask))
      for ask in (jo.abstract_state, jo.placement, jo.plan)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "words", "call"), [*((TypeError, *each) for each in TYPES), *((ValueError, *each) for each in VALUES)]
)
def test_what_is_wrong_or_missing(error, words, call):
    with pytest.raises(error, match=words):
        call()


NEEDS = {  # an optimizer whose state does not show the parameters, and their dtype
    # the first line of the error names the argument that is missing; the rest shows two long trees
    r"^.*state: its tree is not.*left out params.*\(tx, state, params\).*\n": (
        jo.with_master_params(ADAM), jnp.bfloat16
    ),
    r"^params: this optimizer's init must see them; give them as params=\.": (
        optax.GradientTransformation(lambda p: jnp.zeros((2, *p["w"].shape)), ADAM.update), jnp.float32
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", NEEDS)
def test_a_state_that_does_not_tell_the_parameters(words):
    inner, dtype = NEEDS[words]
    tx, given = offload(inner), params(dtype)
    state = tx.init(given)
    with pytest.raises(ValueError, match=words):
        jo.to_host(tx, jo.to_device(state))
    back = jo.to_host(tx, jo.to_device(state), given)
    assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, state)


def test_platform_without_host_memory(monkeypatch):
    class Metal:
        platform = "metal"

        def addressable_memories(self):
            return [types.SimpleNamespace(kind="device")]

    given = params()
    monkeypatch.setattr(jax.sharding.Sharding, "addressable_devices", property(lambda self: {Metal()}))
    with pytest.raises(ValueError, match=r"metal.*no 'pinned_host' memory.*fraction=0"):
        offload().init(given)


def test_host_pool_too_small_names_the_variable(monkeypatch):
    """Only the GPU's pool is capped."""
    name, given, tx = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", jax.tree.map(np.asarray, params()), offload()
    monkeypatch.setenv(name, "0.000001")
    tx.init(given)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=rf"does not fit XLA's pool.*{name} to 1 before.*1.4 times"):
        tx.init(given)
    monkeypatch.setenv(name, "100")
    tx.init(given)


def test_nothing_to_offload_is_said_aloud():
    with pytest.warns(UserWarning, match=r"leaves the whole optimizer state on the device.*min_bytes"):
        jo.offload(ADAM).init(params())


def test_a_choice_between_memories_or_dtypes_outside_is_an_error_of_jax():
    """docs/troubleshooting.md says what to write instead: that works."""
    said = pytest.raises(TypeError, match="branches must have equal output types")
    outside = optax.apply_if_finite(offload(), 3)
    with said:
        jax.jit(outside.update)(params(), jo.to_device(outside.init(params())), params())
    jax.jit(outside.update)(params(), jo.to_host(outside, jo.to_device(outside.init(params()))), params())
    inside = offload(optax.apply_if_finite(ADAM, 3))
    jax.jit(inside.update)(params(), jo.to_device(inside.init(params())), params())
    state = offload(optax.lbfgs()).init(params())
    value_and_grad = jax.jit(lambda s: optax.value_and_grad_from_state(optax.tree.sum)(params(), state=s))
    with said:
        value_and_grad(state)
    value_and_grad(jo.to_device(state))
    small = params(jnp.bfloat16)
    masters = jo.offload(optax.apply_if_finite(jo.with_master_params(ADAM), 3))
    with said:
        masters.update(small, masters.init(small), small)
    masters = jo.offload(jo.with_master_params(ADAM))
    jo.update_params(masters, small, masters.init(small), small, skip=False)


ANY, PLACES = r"(.|\n)*", r".* an optimizer.s state.* tx.update\(updates, state, params\)"
UPDATES = {
    "eager": lambda tx, *args: tx.update(*args),
    "jitted": lambda tx, *args: jax.jit(tx.update)(*args),
    "update_params": lambda tx, *args: jo.update_params(tx, *args),
}
W = {"w": params()["w"]}
MISFITS = {  # updates, state and parameters that an update of ``tx`` is given, by what is said of them
    **{rf"updates: the gradient of w has the shape {re.escape(str(s))}.*32, 32":
       lambda tx, s=s: (params(w=s), tx.init(params()), params()) for s in ((32, 16), (1, 32), (32,), ())},
    **{rf"state: \[0\].mu\['w'\] has the shape {re.escape(str(s))}.*32, 32":
       lambda tx, s=s: (params(), tx.init(params(w=s)), params()) for s in ((32, 16), (1, 32))},
    r"state: \[0\].mu\['w'\] has the shape \(32, 32\).*gives \(1, 32\)":
        lambda tx: (params(w=(1, 32)), tx.init(params()), params(w=(1, 32))),
    "^updates: their tree .*gradient: b; without a parameter: none": lambda tx: (W, tx.init(params()), params()),
    "^updates: their tree .*gradient: none; without a parameter: c":
        lambda tx: (params(c=(3,)), tx.init(params()), params()),
    "params": lambda tx: (params(), tx.init(params()), None),
    f"params: {PLACES}": lambda tx: (params(), params(), tx.init(params())),
    f"updates: {PLACES}": lambda tx: (tx.init(params()), params(), params()),
    f"state: its tree is not{ANY}'b'": lambda tx: (params(), tx.init(W), params()),
    f"state: its tree is not{ANY}TraceState{ANY}expected":
        lambda tx: (params(), optax.sgd(1.0, momentum=0.9).init(params()), params()),
}  # fmt: skip


@pytest.mark.filterwarnings("error")  # nothing has moved the state
@pytest.mark.parametrize("how", UPDATES)
@pytest.mark.parametrize("words", MISFITS)
def test_arguments_of_an_update_that_do_not_fit(words, how):
    for storage in (None, "bfloat16") if words.startswith("params: ") else (None,):
        tx = offload(optax.adamw(1e-3), storage=storage)
        with pytest.raises(ValueError, match=words):
            UPDATES[how](tx, *MISFITS[words](tx))


@pytest.mark.parametrize("look", [jo.placement, jo.abstract_state, lambda tx, s: tx.init(s)])
@pytest.mark.parametrize("storage", [None, "bfloat16"])
def test_a_state_in_the_place_of_the_parameters(look, storage):
    tx = offload(storage=storage)
    state = tx.init(params())
    where = r" in \[0\]" if storage is None else ""
    for given, words in ((state, where), ({"params": params(), "opt": state}, r" in \['opt'\]")):
        with pytest.raises(ValueError, match=rf"params: expected the parameters.*an optimizer's state{words}.*State"):
            look(tx, given)
