"""What may move into a scan: rows found backwards, phases of an iteration, and parts in an order that works."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_offload._base.jaxprs import flops, scan_of
from jax_offload._ir.propagate import Node, makers, needed, topological
from jax_offload._plan.hoist import NEEDS_ALL, Hoist, pulled
from jax_offload._plan.rules import Rows
from tests.unit._programs import device, host, load, program_of, store

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

L, N = 4, 3


def equation(fun, *shapes):
    """The last equation of a function, and its variables."""
    return jax.make_jaxpr(fun)(*(jnp.zeros(shape) for shape in shapes)).jaxpr.eqns[-1]


@pytest.mark.parametrize(
    ("fun", "shapes", "dim", "expected"),
    [
        (lambda x: jnp.tanh(x), [(L, N)], 0, [Rows(0)]),
        (lambda x: jnp.tanh(x), [(N, L)], 1, [Rows(1)]),
        (lambda x, y: x * y, [(L, N), (L, N)], 0, [Rows(0), Rows(0)]),
        (lambda x: 2.0 * x, [(L, N)], 0, [None, Rows(0)]),  # a literal has no rows
        (lambda x: x.T, [(N, L)], 0, [Rows(1)]),
        (lambda x: jnp.transpose(x, (2, 0, 1)), [(N, N, L)], 0, [Rows(2)]),
        (lambda x: lax.broadcast_in_dim(x, (L, N), ()), [()], 0, [None]),
        (lambda x: lax.broadcast_in_dim(x, (L, N), (0,)), [(L,)], 0, [Rows(0)]),
        (lambda: lax.iota(jnp.float32, L), [], 0, []),
        (lambda x: x.reshape(L, N * N), [(L, N, N)], 0, [Rows(0)]),
        (lambda x: lax.squeeze(x, (1,)), [(L, 1, N)], 0, [Rows(0)]),
        (lambda x: x[:, :2], [(L, N)], 0, [Rows(0)]),
        (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))), [(L, N)], 0, [Rows(0), None]),
        # not made of rows, not cheaply, or another row
        (lambda x: x[1:], [(L + 1, N)], 0, None),
        (lambda x: lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0))), [(L - 1, N)], 0, None),
        (lambda x: lax.broadcast_in_dim(x, (L, N), (1,)), [(N,)], 1, None),
        (lambda x: jnp.cumsum(x, 0), [(L, N)], 0, None),
        (lambda x, y: x @ y, [(L, N), (N, N)], 0, None),
        (lambda x: x.sum(2), [(L, N, N)], 0, None),
        (lambda x: lax.rev(x, (0,)), [(L, N)], 0, None),
    ],
)
def test_pulled(fun, shapes, dim, expected):
    eqn = equation(fun, *shapes)
    assert pulled(eqn, {eqn.outvars[0]: Rows(dim)}, L) == expected


def test_pulled_wants_rows():
    eqn = equation(jnp.tanh, (L, N))
    assert pulled(eqn, {eqn.outvars[0]: None}, L) is None
    assert pulled(eqn, {}, L) is None


def test_flops():
    assert flops(equation(lambda x, w: x @ w, (2, N), (N, L))) == 2 * 2 * N * L
    looped = equation(lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w)[0], (2, N), (L, N, N))
    assert flops(looped) == L * 2 * 2 * N * N
    assert flops(equation(jnp.tanh, (L, N))) == 0
    either = equation(lambda p, x: lax.cond(p[0] > 0, lambda: x @ x, lambda: x), (1,), (N, N))
    assert flops(either) == 2 * N**3
    filters = equation(lambda x, k: lax.conv(x, k, (1, 1), "VALID"), (1, 2, 5, 5), (7, 2, 3, 3))
    assert flops(filters) == 2 * (7 * 3 * 3) * (2 * 3 * 3)  # results, and products for each


def nodes_of(*parts, kept=()):
    """Nodes of letters: ``"ab>c"`` reads a and b and makes c."""
    found = [part.split(">") for part in parts]
    return [
        Node(part, list(reads), list(makes), part in kept) for part, (reads, makes) in zip(parts, found, strict=True)
    ]


def test_needed():
    nodes = nodes_of("x>a", "x>b", "a>c", "b>d", ">e", kept=("b>d",))
    assert makers(nodes) == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    assert needed(nodes, ["c"], kept=False) == {0, 2}
    assert needed(nodes, ["c"]) == {0, 1, 2, 3}
    assert needed(nodes, ["x"], kept=False) == set()


def test_topological():
    nodes = nodes_of("x>a", "c>b", "a>c", "bc>d", "x>e")
    order = [node.payload for node in topological(nodes, {0, 1, 2, 3, 4})]
    assert order == ["x>a", "a>c", "c>b", "bc>d", "x>e"]  # as it was, but what b needs before it
    assert [node.payload for node in topological(nodes, {1})] == ["x>a", "a>c", "c>b"]


def test_topological_in_a_circle():
    with pytest.raises(RuntimeError, match="need each other"):
        topological(nodes_of("b>a", "a>b"), {0, 1})


def scanned(update):
    """The moves of a step: a scan over ``[L, N]`` gradients, then ``update`` of them, and a moment on the host.

    ``update`` returns the new moment, which is the next value of the moment.
    """

    def step(xs, mu, *rest):
        ys = lax.scan(lambda c, x: (c + x, jnp.sin(c)), jnp.zeros(N), xs)[1]
        return update(ys, mu, *rest)

    program = program_of(step, device(L, N), host(L, N), device(L, N), device())
    (at,) = [k for k, eqn in enumerate(program.eqns) if scan_of(eqn)]
    scan = scan_of(program.eqns[at])
    next_of = {program.outputs[0]: program.inputs[1]}
    moves = Hoist(program, at, next_of).behind()
    return program, scan, moves, moves.why


def names(move):
    return [eqn.primitive.name for eqn in move.slice.jaxpr.eqns]


def test_an_update_moves():
    program, scan, moves, why = scanned(lambda g, mu, p, t: (store(0.9 * load(mu) + g), p + 1))
    (move,) = moves.moves
    assert not why and not moves.kept and move.how.axis == 0
    assert names(move).count("device_put") == 2
    assert dict(zip(move.slice.inputs, move.how.dims, strict=True)) == {scan.ys[0]: Rows(0), program.inputs[1]: Rows(0)}
    assert move.how.buffers == (program.inputs[1],)


def test_what_is_known_moves_with_it():
    """A regulariser's gradient is made row by row; a scalar comes whole."""
    program, _scan, moves, _why = scanned(lambda g, mu, p, t: (store(t * load(mu) + g + jnp.sin(2.0 * p)),))
    (move,) = moves.moves
    dims = dict(zip(move.slice.inputs, move.how.dims, strict=True))
    assert dims[program.inputs[2]] == Rows(0) and dims[program.inputs[3]] is None and "sin" in names(move)


def test_a_gradient_that_is_returned_stays_too():
    _, scan, moves, _ = scanned(lambda g, mu, p, t: (store(load(mu) + g), g))
    assert moves.moves and moves.kept == {scan.ys[0]}


def test_a_logged_norm_is_summed_up():
    _, _, moves, _ = scanned(lambda g, mu, p, t: (store(load(mu) + g), jnp.sqrt((g**2).sum())))
    (move,) = moves.moves
    assert (
        len(move.how.out_dims) == 2
        and move.how.buffers[[type(d).__name__ for d in move.how.out_dims].index("Partial")] is None
    )


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (lambda g, mu, p, t: (store(load(mu) + g / jnp.sqrt((g**2).sum())),), NEEDS_ALL),
        (lambda g, mu, p, t: (store(load(mu) + jnp.cumsum(g, 0)),), "does not keep layers apart: cumsum"),
        (lambda g, mu, p, t: (store(load(mu) + g[::-1]),), "does not keep layers apart: rev"),
        (lambda g, mu, p, t: (store(load(mu)[::-1] + g),), "moves to the host"),  # made of other rows of it
        (lambda g, mu, p, t: (store(p + g), store(load(mu) * g)), "moves to the host"),
    ],
)
def test_reasons(update, expected):
    _program, _, moves, why = scanned(update)
    assert not moves.moves and any(expected in each for each in why), why
