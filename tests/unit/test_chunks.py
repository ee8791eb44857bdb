"""Which equations keep rows apart: an update made of them runs in chunks, and any other on whole leaves, for a reason.

Each case is a leaf of one state, and a function that makes its next value. All of them run in one program. The operands
of sums are small whole numbers, so that no order of summation rounds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo
from tests.support.trees import FAST

pytestmark = [pytest.mark.oldest("jaxprs as jax traces them"), pytest.mark.daily("each is a rule")]

ROWS, COLUMNS = 40, 8  # more rows than the smallest chunk has
M = np.arange(COLUMNS * COLUMNS, dtype=np.float32).reshape(COLUMNS, COLUMNS) % 3
WHOLE = np.arange(ROWS * ROWS, dtype=np.float32).reshape(ROWS, ROWS) % 3
F32, I32 = jnp.float32, jnp.int32
KEY = jax.random.key(0)


def whole_numbers(dtype):
    """Whole numbers that are not in order; the last chunk has the largest, and not the smallest."""
    mixed = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) * 7 % 11 - 4
    return jnp.asarray(mixed + np.arange(ROWS)[:, None] // 16, dtype)


def between_0_and_1(dtype):
    return jnp.linspace(0.1, 0.9, ROWS * COLUMNS, dtype=dtype).reshape(ROWS, COLUMNS)


@jax.custom_jvp
def custom_jvp(x):
    return 2 * x


custom_jvp.defjvp(lambda x, t: (custom_jvp(*x), 2 * t[0]))


@jax.custom_vjp
def custom_vjp(x):
    return 2 * x


custom_vjp.defvjp(lambda x: (custom_vjp(x), None), lambda _, t: (2 * t,))


def dot(lhs, rhs, contract, batch=((), ()), **how):
    return lax.dot_general(lhs, rhs, (contract, batch), **how)


def column(x):
    """A number for each row, as a column."""
    return x.reshape(-1, 1).astype(F32)


def each_row(x):
    """A number for each row of any array."""
    return column(x.reshape(ROWS, -1).sum(1))


def gram(x):
    """A positive definite matrix for each row."""
    x = x.reshape(ROWS, 2, 4)
    return dot(x, x, ((2,), (2,)), ((0,), (0,))) + jnp.eye(2)


REDUCE = {
    "sum": (lax.reduce_sum, F32), "max": (lax.reduce_max, F32), "min": (lax.reduce_min, F32),
    "prod": (lax.reduce_prod, F32), "and": (lax.reduce_and, I32), "or": (lax.reduce_or, I32),
    "xor": (lax.reduce_xor, I32),
}  # fmt: skip
# By name: the next value of a leaf x, of a gradient y with as many rows, and a number n that is 1.
ONCE = {
    "arithmetic of rows": lambda x, y, n: x * y + x,
    "arithmetic with a number": lambda x, y, n: x * n + 1.0,
    "arithmetic with a column": lambda x, y, n: x + y[:, :1],
    "arithmetic with a constant of the same shape": lambda x, y, n: x * WHOLE[:, :COLUMNS],
    "arithmetic with a row": lambda x, y, n: x + M[:1],
    "iota along the rows": lambda x, y, n: x + lax.broadcasted_iota(F32, x.shape, 0),
    "iota along another axis": lambda x, y, n: x + lax.broadcasted_iota(F32, x.shape, 1),
    "iota of a vector": lambda x, y, n: x + column(lax.iota(F32, ROWS)),
    "broadcast of rows": lambda x, y, n: lax.broadcast_in_dim(x, (2, *x.shape), (1, 2)).sum(0),
    "broadcast of a number": lambda x, y, n: x + jnp.broadcast_to(n, x.shape),
    "broadcast of a literal": lambda x, y, n: x + lax.full(x.shape, 3.0),
    "anything without rows": lambda x, y, n: x + jnp.sort(n * M[0]),
    "a choice by a number": lambda x, y, n: lax.select_n(n > 0, x, y),
    "a barrier": lambda x, y, n: sum(lax.optimization_barrier((x, n * M[0]))),
    "jit": lambda x, y, n: jax.jit(lambda x, y: (x + y, n))(x, y)[0],
    "jit in jit": lambda x, y, n: jax.jit(lambda x: jax.jit(jnp.transpose)(x) * 2)(x).T,
    "jit with a constant": lambda x, y, n: jax.jit(lambda x: x @ M)(x),
    "jit with a constant of the same shape": lambda x, y, n: jax.jit(lambda x: x * WHOLE[:, :COLUMNS])(x),
    "jit with a key": lambda x, y, n: jax.jit(lambda x: x + jax.random.bernoulli(KEY, shape=(1, COLUMNS)))(x),
    "custom_jvp": lambda x, y, n: custom_jvp(x),
    "custom_vjp": lambda x, y, n: custom_vjp(x),
    "cond": lambda x, y, n: lax.cond(n > 0, lambda x: x + y, lambda x: x * y, x),
    "cond with a constant": lambda x, y, n: lax.cond(n > 0, lambda x: x @ M, lambda x: x, x),
    "cond among three": lambda x, y, n: lax.switch(n.astype(I32), (lambda x: x, lambda x: x + 1, lambda x: -x), x),
    "rows × a matrix": lambda x, y, n: x @ M,
    "a matrix × rows": lambda x, y, n: dot(M, x, ((1,), (1,))).T,
    "rows as the batch": lambda x, y, n: x + column(dot(x, y, ((1,), (1,)), ((0,), (0,)))),
    "rows as the second batch": lambda x, y, n: dot(
        x.reshape(1, ROWS, 2, 4), y.reshape(1, ROWS, 4, 2), ((3,), (2,)), ((0, 1), (0, 1))
    ).reshape(ROWS, 4) @ M[:4],
    "merged rows as the batch": lambda x, y, n: x + dot(
        x.reshape(-1, 4), y.reshape(-1, 4), ((1,), (1,)), ((0,), (0,))
    ).reshape(ROWS, 2) @ M[:2],
    "cholesky of each row's matrix": lambda x, y, n: jnp.linalg.cholesky(gram(x)).reshape(ROWS, 4) @ M[:4],
    "qr of each row's matrix": lambda x, y, n: x + sum(map(each_row, jnp.linalg.qr(x.reshape(ROWS, 2, 4)))),
    "triangular_solve of each row's matrix": lambda x, y, n: lax.linalg.triangular_solve(
        gram(x), y.reshape(ROWS, 2, 4), left_side=True
    ).reshape(x.shape),
    "pad of another axis": lambda x, y, n: lax.pad(x, 9.0, ((0, 0, 0), (1, 2, 0)))[:, 3:],
    "argmax of each row": lambda x, y, n: x + column(lax.argmax(x, 1, I32)),
    "argmin of each row": lambda x, y, n: x + column(lax.argmin(x, 1, I32)),
    "a reduction around the rows": lambda x, y, n: x + column(x.reshape(1, ROWS, COLUMNS).sum((0, 2))),
    "reduce_sum in 16 bits of each row": lambda x, y, n: x + column(lax.reduce_sum(x.astype(jnp.bfloat16), axes=(1,))),
    "squeeze": lambda x, y, n: lax.squeeze(x.reshape(1, ROWS, 1, COLUMNS), (0, 2)),
    "slice with strides of 1": lambda x, y, n: x + lax.slice(x, (0, 2), (ROWS, 3), (1, 1)),
    "slice of merged rows": lambda x, y, n: lax.slice(x.reshape(-1, 4), (0, 1), (2 * ROWS, 3)).reshape(ROWS, 4) @ M[:4],
    "transpose": lambda x, y, n: jnp.transpose(x.reshape(ROWS, 2, 4), (2, 0, 1)).transpose(1, 2, 0).reshape(x.shape),
    "transpose of merged rows": lambda x, y, n: x.reshape(-1, 4).T.T.reshape(x.shape),
    "reshape that merges and parts": lambda x, y, n: x.ravel().reshape(x.shape),
    "reshape that adds an axis": lambda x, y, n: x.reshape(1, *x.shape).sum(0),
    **{f"reduce_{name} of each row": lambda x, y, n, of=of: (x + column(of(x, axes=(1,))).astype(x.dtype))
       for name, (of, _) in REDUCE.items()},
    **{f"{name} along another axis": lambda x, y, n, of=getattr(lax, name): of(x, axis=1)
       for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
}  # fmt: skip
# Each chunk makes a part of this number, which the state keeps beside its leaf.
PARTS = {
    **{f"reduce_{name} over all rows": lambda x, y, n, of=of: of(x, axes=(0, 1)) for name, (of, _) in REDUCE.items()},
    "a reduction over everything": lambda x, y, n: x.sum(),
    "a reduction inside": lambda x, y, n: jax.jit(jnp.sum)(x),
    "a norm of merged rows": lambda x, y, n: (x.ravel() ** 2).sum(),
    "contracted rows": lambda x, y, n: dot(x, y, ((0, 1), (0, 1))),
}
# What runs on whole leaves: the equation at which rows meet.
STAYS = {
    "rows × rows": (lambda x, y, n: x @ y.T @ x, "dot_general of rows with rows"),
    "rows and a whole": (lambda x, y, n: x + column((n * WHOLE[:COLUMNS]).sum(0)), "add of rows and a whole"),
    "rows contracted with a whole": (lambda x, y, n: WHOLE @ x, "dot_general"),
    "branches: rows here, rows there": (
        lambda x, y, n: lax.cond(n > 0, lambda x: x.ravel(), lambda x: x.T.ravel(), x).reshape(x.shape),
        "reshape|cond whose",
    ),
    "a reduction used as a number": (lambda x, y, n: x / x.sum(), "div of a reduction over all rows"),
    "inside of a branch": (lambda x, y, n: lax.cond(n > 0, lambda x: jnp.sort(x, 0), lambda x: x, x), "sort"),
    "contracted rows, rounded to 16 bits": (
        lambda x, y, n: x + dot(x, y, ((0,), (0,)), preferred_element_type=jnp.bfloat16).astype(F32).sum(0),
        "dot_general of rows with rows",
    ),
    "a sum in bfloat16 over rows": (
        lambda x, y, n: x + lax.reduce_sum(x.astype(jnp.bfloat16), axes=(0,)).astype(F32), "reduce_sum"),
    "two with rows that are not elementwise": (lambda x, y, n: jnp.concatenate([x, x])[::2], "concatenate"),
    "rows that say where": (lambda x, y, n: jnp.asarray(M)[x.astype(I32)[:, 0] % 3], "gather|jit"),
    "pad of the rows": (lambda x, y, n: lax.pad(x, 9.0, ((1, -1, 0), (0, 0, 0))), "pad"),
    "argmax over rows": (lambda x, y, n: x + lax.argmax(x, 0, I32), "argmax"),
    "slice of the rows": (lambda x, y, n: x + x[3:4], "slice"),
    "reshape that splits the rows": (lambda x, y, n: x + x.reshape(2, -1, COLUMNS).sum((0, 1)), "reshape"),
    "reshape to where no row ends": (lambda x, y, n: x + x.reshape(64, 5).sum(), "reshape"),
    "cumsum along the rows": (lambda x, y, n: lax.cumsum(x, 0), "cumsum"),
    "cumlogsumexp along the rows": (lambda x, y, n: lax.cumlogsumexp(x, 0), "cumlogsumexp"),
    "qr of the rows as one matrix": (lambda x, y, n: jnp.linalg.qr(x)[0], "qr"),
    "eigh, whose signs are free": (lambda x, y, n: x + sum(map(each_row, jnp.linalg.eigh(gram(x)))), "eigh"),
    "sort along the rows": (lambda x, y, n: lax.sort(x, dimension=0), "sort"),
    "what is not known": (lambda x, y, n: lax.rev(x, (1,)), "rev"),
    "a loop": (lambda x, y, n: lax.fori_loop(0, 3, lambda _, x: x + 1, x), "scan|while"),
}  # fmt: skip
UNARY = """acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
    floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh abs""".split()
BINARY = "add atan2 complex div eq ge gt le lt max min mul ne nextafter pow rem sub".split()
ELEMENTWISE = {
    **{name: lambda x, y, of=getattr(lax, name): of(x) for name in UNARY},
    **{name: lambda x, y, of=getattr(lax, name): of(x, y) for name in BINARY},
    **{name: lambda x, y, of=getattr(lax, name): of(lax.complex(x, y)) for name in ("conj", "imag", "real")},
    "acosh": lambda x, y: lax.acosh(x + 1),
    "add_any": lambda x, y: jax.grad(lambda z: (z * x + z * y).sum())(x),
    "bitcast_convert_type": lambda x, y: lax.bitcast_convert_type(x, I32),
    "clamp": lambda x, y: lax.clamp(y / 2, x, y),
    "convert_element_type": lambda x, y: x.astype(jnp.bfloat16),
    "copy": lambda x, y: jnp.copy(x),
    "integer_pow": lambda x, y: lax.integer_pow(x, 3),
    "reduce_precision": lambda x, y: lax.reduce_precision(x, 5, 7),
    **({"log2": lambda x, y: jnp.log2(x)} if hasattr(lax, "log2") else {}),  # a primitive since jax 0.12
    "select_n": lambda x, y: lax.select_n(x > y, x, y),
    "sharding_constraint": lambda x, y: lax.with_sharding_constraint(
        x, NamedSharding(jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec())
    ),
    "stop_gradient": lambda x, y: lax.stop_gradient(x),
}
INTEGERS = {
    **{name: lambda x, y, of=getattr(lax, f"bitwise_{name}"): of(x, y) for name in ("and", "or", "xor")},
    **{name: lambda x, y, of=getattr(lax, name): of(x) for name in ("clz", "population_count")},
    **{f"shift_{kind}": lambda x, y, of=getattr(lax, f"shift_{kind}"): of(x, abs(y) % 5)
       for kind in ("left", "right_arithmetic", "right_logical")},
    "not": lambda x, y: lax.bitwise_not(x),
}  # fmt: skip


CASES = ONCE | PARTS | {name: fun for name, (fun, _) in STAYS.items()}
CASES |= {  # casts the primitive's result to the leaf's type
    f"{name}, elementwise": lambda x, y, n, of=of: jnp.real(of(x, y)).astype(x.dtype)
    for name, of in (ELEMENTWISE | INTEGERS).items()
}
TYPES = {f"reduce_{name} {of}": dtype for name, (_, dtype) in REDUCE.items() for of in ("of each row", "over all rows")}
TYPES |= {f"{name}, elementwise": I32 for name in INTEGERS}


def first(name):
    return (between_0_and_1 if name.partition(",")[0] in ELEMENTWISE else whole_numbers)(TYPES.get(name, F32))


def update(updates, state, params=None):
    def following(name, x):
        y = updates["small" if name.partition(",")[0] in ELEMENTWISE else "whole"]
        return CASES[name](x, y.astype(x.dtype), updates["n"])

    parts = {f"{name}, its part": following(name, state[name]) for name in PARTS}
    return updates, parts | {name: state[name] + 1 if name in PARTS else following(name, state[name]) for name in CASES}


def init(params):
    x = {name: first(name) for name in CASES}
    shapes = {name: jax.eval_shape(PARTS[name], x[name], x[name], params["n"]) for name in PARTS}
    return x | {f"{name}, its part": jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}


INNER = optax.GradientTransformation(init, update)


@functools.cache
def found():
    """How each leaf streams, and its next value by the package and by plain optax: one program each."""
    grads = {"whole": whole_numbers(F32)[::-1], "small": between_0_and_1(F32)[::-1], "n": jnp.float32(1)}
    params = jax.device_put(grads, jax.devices()[0])
    tx = jo.offload(INNER, min_bytes=0, window=1)
    streams = {leaf.path: leaf.streams for leaf in jo.placement(tx, params).leaves}
    got, want = (jax.jit(each.update, compiler_options=FAST)(params, each.init(params))[1] for each in (tx, INNER))
    return streams, got, want


def check(name, rtol=0.0):
    streams, got, want = found()
    assert got[name].dtype == want[name].dtype and got[name].sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(np.asarray(got[name], F32), np.asarray(want[name], F32), rtol=rtol)
    return streams[f"[{name!r}]"]


@pytest.mark.parametrize("name", ONCE)
def test_rows_that_stay_apart(name):
    assert check(name, 3e-7 if name.startswith("cumlog") else 0.0) == "2 chunks of axis 0"


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_result_are_put_together(name):
    assert check(name).startswith("2 chunks of axis 0")
    _, got, want = found()
    np.testing.assert_array_equal(got[f"{name}, its part"], want[f"{name}, its part"])


def test_a_result_with_several_indices_a_row_that_stays_on_the_device():
    def update(updates, state, params=None):
        x = state["x"] + updates
        return updates, {"x": x, "merged": x[:, :2].ravel()}

    inner = optax.GradientTransformation(lambda p: {"x": 0 * p, "merged": jnp.zeros(2000)}, update)
    grads = jax.device_put(jnp.arange(8000.0).reshape(1000, 8), jax.devices()[0])
    tx = jo.offload(inner, min_bytes=2**14, window=2**14)
    got, want = (jax.jit(each.update)(grads, each.init(grads))[1] for each in (tx, inner))
    np.testing.assert_array_equal(got["merged"], want["merged"])
    (streams,) = (leaf.streams for leaf in jo.placement(tx, grads).leaves if leaf.host)
    assert streams == "whole: a result has no such axis"


@pytest.mark.parametrize("name", STAYS)
def test_rows_that_meet_or_may(name):
    assert check(name, 1e-6).startswith("whole")
    reason = found()[0][f"[{name!r}]"]
    assert any(word in reason for word in STAYS[name][1].split("|")), reason


@pytest.mark.parametrize("name", ELEMENTWISE | INTEGERS)
def test_an_elementwise_primitive(name):
    """Some functions of XLA's are off by an ulp or two where a vector register is not full."""
    grads = (between_0_and_1(F32), between_0_and_1(F32)) if name in ELEMENTWISE else (whole_numbers(I32),) * 2
    assert f" {name}" in str(jax.make_jaxpr((ELEMENTWISE | INTEGERS)[name])(*grads))  # the primitive, by jax's name
    assert check(f"{name}, elementwise", 3e-7) == "2 chunks of axis 0"
