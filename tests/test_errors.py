"""Bad input: an error that names the argument, shows what was given, and says the fix."""

import functools
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


NONE = "tx: expected an optax.GradientTransformation, got a dict"


def params():
    return jax.device_put({"w": jnp.ones((32, 32)), "b": jnp.ones(32)}, jax.devices()[0])


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
    tx = jo.offload(ADAM, fraction=fraction, select="w", window=1, min_bytes=0)
    for init in (tx.init, jax.jit(tx.init)):
        assert jax.tree.map(jnp.shape, init(params())) == jax.tree.map(jnp.shape, ADAM.init(params()))
    optax.tree.map_params(tx, lambda x: x, tx.init(params()))  # which probes with placeholders
    assert jo.placement(jo.offload(ADAM, select=lambda *given: True, min_bytes=0), params()).host_bytes


NESTED = [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx), lambda tx: optax.apply_if_finite(tx, 3)]


@pytest.mark.parametrize("options", [{}, {"storage": "bfloat16"}, {"fraction": 0.5}, {"update_on": "host"}])
def test_a_pickle_is_the_recipe(options):
    cloudpickle = pytest.importorskip("cloudpickle")
    tx = jo.offload(jo.with_master_params(optax.chain(optax.clip_by_global_norm(1.0), ADAM)), min_bytes=0, **options)
    for _ in range(2):  # before and after init
        again = cloudpickle.loads(cloudpickle.dumps(tx))
        got, want = again.init(params()), tx.init(params())
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, want)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jo.offload(optax.adam), r"inner: expected an optax.GradientTransformation, got .*adam"),
        (lambda: jo.offload(optax.adamw), r"inner: .*Call it first: adamw\(learning_rate\)"),
        (lambda: jo.with_master_params(optax.adamw), r"inner: .*Call it first: adamw\(learning_rate\)"),
        (lambda: jo.offload(1e-3), r"inner: .*got 0.001. For example optax.adamw\(1e-3\)"),
        (lambda: jo.jit(params()), r"Expected a callable value, got \{"),
        (lambda: jo.update_params(params(), *[params()] * 3), rf"{NONE}.*\(tx, grads, state, params\)"),
        *(
            (lambda look=look: look(params(), jo.offload(ADAM, min_bytes=0)), rf"{NONE}.*\(tx, (params|state)\)")
            for look in (jo.abstract_state, jo.to_host, jo.from_plain, jo.to_plain)
        ),
        *(  # one rule, wherever the inner one stands
            (
                lambda around=around: jo.offload(around(jo.offload(ADAM)), min_bytes=0).init(params()),
                r"inner: .*offload\(...\)",
            )
            for around in NESTED
        ),
        # a missing argument is one of the function that was called
        (lambda: jo.update_params(params(), ADAM.init(params()), params()), r"update_params\(\) missing .*'params'"),
        (lambda: jo.offload(ADAM).update(params()), r"update_fn\(\) missing .*'state'"),
        (lambda: jo.placement(jo.offload(ADAM)), r"placement\(tx, params\): .* got 0 arguments"),
        (lambda: jo.placement(jo.offload(ADAM), params, params), r"placement\(tx, params\): .* got 2 arguments"),
        (
            lambda: jo.offload(ADAM, select=lambda path: True).init(params()),
            r"^select: .*too many positional arguments.*lambda path, leaf",
        ),
    ],
)
def test_what_is_of_another_type_or_missing(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_platform_without_host_memory(monkeypatch):
    class Metal:
        platform = "metal"

        def addressable_memories(self):
            return [types.SimpleNamespace(kind="device")]

    given = params()
    monkeypatch.setattr(jax.sharding.Sharding, "addressable_devices", property(lambda self: {Metal()}))
    with pytest.raises(ValueError, match=r"metal.*no 'pinned_host' memory.*fraction=0"):
        jo.offload(ADAM, min_bytes=0).init(given)


def test_masters_do_not_tell_the_parameters():
    """The first line of the error names the argument that is missing; the rest shows two long trees."""
    tx = jo.offload(jo.with_master_params(ADAM), min_bytes=0)
    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    state = tx.init(given)
    with pytest.raises(ValueError, match=r"^.*state: its tree is not.*left out params.*\(tx, state, params\).*\n"):
        jo.to_host(tx, state)
    assert jax.tree.structure(jo.to_host(tx, state, given)) == jax.tree.structure(state)


def test_an_init_that_computes_with_the_parameters_needs_them():
    """A stand-in for a whole tree has no shapes."""
    tx = jo.offload(optax.GradientTransformation(lambda p: jnp.zeros((2, *p["w"].shape)), ADAM.update), min_bytes=0)
    state = tx.init(params())
    with pytest.raises(ValueError, match=r"^params: this optimizer's init must see them; give them as params=\."):
        jo.to_host(tx, jo.to_device(state))
    assert jo.to_host(tx, jo.to_device(state), params()).sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("args", [(), (params,)])
def test_what_is_not_the_state_is_named(args):
    with pytest.raises(ValueError, match=r"^state: got a (NoneType|dict).*not like .*Fix: .*\(tx, state, params\)"):
        jo.to_host(jo.offload(ADAM, min_bytes=0), *(make() for make in args))


def test_host_pool_too_small_names_the_variable(monkeypatch):
    """Only the GPU's pool is capped."""
    name, given = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", jax.tree.map(np.asarray, params())
    tx = jo.offload(ADAM, min_bytes=0)
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


def test_mixed_memory_outside_update_is_an_error_of_jax():
    tx = jo.offload(ADAM, min_bytes=0)
    state = tx.init(params())
    with pytest.raises(ValueError, match="memory_space"):
        jax.jit(lambda s, p: s[0].mu["w"] + p["w"])(state, params())


def test_an_ordered_effect_beside_host_memory_is_an_error_of_jax():
    tx = jo.offload(ADAM, min_bytes=0)

    def step(state, params):
        jax.debug.print("{}", params["b"][0], ordered=True)
        return tx.update(params, state, params)

    with pytest.raises(ValueError, match=re.escape("safe_zip() argument 1 has length")):
        jax.jit(step)(tx.init(params()), params())


def test_a_choice_between_memories_or_dtypes_outside_is_an_error_of_jax():
    """docs/troubleshooting.md says what to write instead: that works."""
    said = pytest.raises(TypeError, match="branches must have equal output types")
    outside = optax.apply_if_finite(jo.offload(ADAM, min_bytes=0), 3)
    with said:
        jax.jit(outside.update)(params(), jo.to_device(outside.init(params())), params())
    jax.jit(outside.update)(params(), jo.to_host(outside, jo.to_device(outside.init(params()))), params())
    inside = jo.offload(optax.apply_if_finite(ADAM, 3), min_bytes=0)
    jax.jit(inside.update)(params(), jo.to_device(inside.init(params())), params())
    state = jo.offload(optax.lbfgs(), min_bytes=0).init(params())
    value_and_grad = jax.jit(lambda s: optax.value_and_grad_from_state(optax.tree.sum)(params(), state=s))
    with said:
        value_and_grad(state)
    value_and_grad(jo.to_device(state))
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    masters = jo.offload(optax.apply_if_finite(jo.with_master_params(ADAM), 3))
    with said:
        masters.update(small, masters.init(small), small)
    masters = jo.offload(jo.with_master_params(ADAM))
    jo.update_params(masters, small, masters.init(small), small, skip=False)


def other(**shapes):
    shapes = {"w": (32, 32), "b": (32,)} | shapes
    return jax.device_put({name: jnp.ones(shape) for name, shape in shapes.items()}, jax.devices()[0])


def with_shapes(start, shapes, given):
    return {rf"{start} has the shape {re.escape(str(s))}.*32, 32": functools.partial(given, other(w=s)) for s in shapes}


ANY, PLACES = r"(.|\n)*", r".* an optimizer.s state.* tx.update\(updates, state, params\)"
UPDATES = {
    "eager": lambda tx, *args: tx.update(*args),
    "jitted": lambda tx, *args: jax.jit(tx.update)(*args),
    "update_params": lambda tx, *args: jo.update_params(tx, *args),
}
MISFITS = {  # updates, state and parameters that an update of ``tx`` is given, by what is said of them
    **with_shapes(
        "updates: the gradient of w",
        [(32, 16), (1, 32), (32,), ()],
        lambda wrong, tx: (wrong, tx.init(params()), params()),
    ),
    **with_shapes(
        r"state: \[0\].mu\['w'\]", [(32, 16), (1, 32)], lambda wrong, tx: (params(), tx.init(wrong), params())
    ),
    r"state: \[0\].mu\['w'\] has the shape \(32, 32\).*gives \(1, 32\)": lambda tx: (
        other(w=(1, 32)), tx.init(params()), other(w=(1, 32))
    ),
    "^updates: their tree .*gradient: b; without a parameter: none": lambda tx: (
        {"w": params()["w"]}, tx.init(params()), params()
    ),
    "^updates: their tree .*gradient: none; without a parameter: c": lambda tx: (
        other(c=(3,)), tx.init(params()), params()
    ),
    "params": lambda tx: (params(), tx.init(params()), None),
    f"params: {PLACES}": lambda tx: (params(), params(), tx.init(params())),
    f"updates: {PLACES}": lambda tx: (tx.init(params()), params(), params()),
    f"state: its tree is not{ANY}'b'": lambda tx: (params(), tx.init({"w": params()["w"]}), params()),
    f"state: its tree is not{ANY}TraceState{ANY}expected": lambda tx: (
        params(), optax.sgd(1.0, momentum=0.9).init(params()), params()
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("error")  # nothing has moved the state
@pytest.mark.parametrize("how", UPDATES)
@pytest.mark.parametrize("words", MISFITS)
def test_arguments_of_an_update_that_do_not_fit(words, how):
    for storage in (None, "bfloat16") if words.startswith("params: ") else (None,):
        tx = jo.offload(optax.adamw(1e-3), min_bytes=0, storage=storage)
        with pytest.raises(ValueError, match=words):
            UPDATES[how](tx, *MISFITS[words](tx))


@pytest.mark.parametrize("look", [jo.placement, jo.abstract_state, lambda tx, s: tx.init(s)])
@pytest.mark.parametrize("storage", [None, "bfloat16"])
def test_a_state_in_the_place_of_the_parameters(look, storage):
    tx = jo.offload(ADAM, min_bytes=0, storage=storage)
    state = tx.init(params())
    where = r" in \[0\]" if storage is None else ""
    for given, words in ((state, where), ({"params": params(), "opt": state}, r" in \['opt'\]")):
        with pytest.raises(ValueError, match=rf"params: expected the parameters.*an optimizer's state{words}.*State"):
            look(tx, given)


@pytest.mark.parametrize("asks", [jo.abstract_state, jo.placement, jo.plan])
def test_a_question_about_places_inside_a_trace_names_the_fix(asks):
    with pytest.raises(ValueError, match=r"params: these are tracers.* Fix: call this function outside jax\.jit"):
        jax.jit(lambda params: asks(jo.offload(optax.adam(1e-3)), params) and params)({"w": jnp.ones((8, 8))})
