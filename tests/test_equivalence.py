"""One table: every optimizer on every path, on one device and divided, for layers of each kind, equals plain optax."""

import functools
import itertools

import jax
import pytest

from tests.support.random_steps import AWAY, FIELDS, MODES, OPTIMIZERS, check, complete, reference

AROUND = [("inside", name) for name in dict.fromkeys(FIELDS["inside"]) if name] + [
    ("outside", name) for name in dict.fromkeys(FIELDS["outside"]) if name
]
AROUND += [(where, clip) for clip in ("adaptive clip", "clip by block") for where in ("inside", "outside")]
AROUND += [("outside", "by group")]
OTHERS = [  # of a step around its update
    *(("skip", kind) for kind in dict.fromkeys(FIELDS["skip"]) if kind),
    *(("second", kind) for kind in dict.fromkeys(FIELDS["second"]) if kind),
    *(("again", kind) for kind in dict.fromkeys(FIELDS["again"]) if kind),
    ("storage", "int8"), ("dtype", "bfloat16 with masters"), ("metrics", ("loss", "gradients")), ("accumulate", "scan"),
    ("optimizer", "rotating"),
]  # fmt: skip
INNER = [("optimizer", name) for name in OPTIMIZERS if ("optimizer", name) not in OTHERS] + AROUND + OTHERS
SHARDINGS = (None, "fsdp", "ZeRO-1", "two axes", "explicit")
MODELS = ("scan", "unrolled", "pairs", "reverse", "unroll", "nested", "indexed", "axis 1")
WINDOWS = (None, 1, 2**14)
# Each optimizer on every path, with a sharding, a model and a form that change from one case to the next. With
# parameters in host memory each runs under jo.jit and on one of the other paths.
HOSTED = [mode for mode in range(len(MODES)) if AWAY in MODES[mode]]
DAILY, OLDEST = pytest.mark.daily("a slice of the table"), pytest.mark.oldest("a slice of the table")
CASES = [
    pytest.param(
        inner, mode, marks=[DAILY] * (inner % 4 == 0 and mode == inner // 4 % len(MODES)) + [OLDEST] * (inner % 12 == 0)
    )
    for inner, mode in itertools.product(range(len(INNER)), range(len(MODES)))
    if mode not in HOSTED or MODES[mode].startswith("jo.jit") or mode == HOSTED[inner % len(HOSTED)]
]


def _step(inner):
    field, name = INNER[inner]
    skips = field == "skip"
    return complete({
        "mesh": SHARDINGS[inner % len(SHARDINGS)] if not skips and field != "storage" else None,
        "stack": MODELS[inner // 3 % len(MODELS)], "bias": True, "embed": "dense" if skips else "tokens", "head": True,
        "width": 64, "gradients": "clipped", "metrics": ("loss", "norm", "new norm"), "bad batch": skips,
        **({"dtype": "float32"} if field == "storage" else {}), field: name,
    })  # fmt: skip


def _dtype(inner, mode):
    """The cores have kernels of 32 bits and less; with 64 bits numbers are compared more closely."""
    return {"dtype": "float32"} if MODES[mode].startswith(("cores", "hybrid")) and INNER[inner][0] != "dtype" else {}


@functools.lru_cache(maxsize=2)
def _plain(inner, dtype):
    return reference(_step(inner) | dict(dtype))


@pytest.mark.parametrize(("inner", "mode"), CASES)
def test_equals_plain_optax(inner, mode):
    """Values, types, memory kinds and deletion of four steps, clipped by the global norm."""
    dtype = _dtype(inner, mode)
    want = _plain(inner, tuple(dtype.items()))
    if isinstance(want, Exception) and _step(inner)["mesh"] == "explicit" and jax.__version_info__ < (0, 11):
        pytest.skip(f"jax 0.10 does not run the plain step on a mesh with Explicit axes: {want}")
    assert not isinstance(want, Exception), want
    pieces = FIELDS["pieces"][(inner + mode) // 2 % 2]
    r = (
        _step(inner)
        | dtype
        | {"form": FIELDS["form"][(inner + mode) % 2], "pieces": pieces, "window": WINDOWS[inner % 3]}
    )
    check(r, MODES[mode], want)
