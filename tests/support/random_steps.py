"""Random training steps, run in every mode of the package and compared with plain optax under ``jax.jit``.

A recipe names one choice for each field of ``FIELDS``. ``recipe(seed, variant)`` draws one, ``differences`` runs it in
one of ``MODES``, and ``shrunk`` looks for the simplest recipe that still differs. The variants of a seed differ in the
fields of ``FREE`` only, so that one run of plain optax serves them all. From the command line::

    python -m tests.support.random_steps 0 100                          # hunts in 100 seeds, and shrinks what it finds
    python -m tests.support.random_steps 0 100 "jo.jit|jax.jit"         # only in these of ``MODES``
    python -m tests.support.random_steps '{"skip": "cond"}' "jo.jit"    # one step, and its placement; '{}': simplest
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import math
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax import contrib

import jax_offload as jo
from tests.support.sizes import set_sizes
from tests.support.trees import is_on_disk, read

AWAY = "parameters on the host"
PATHS = ("jax.jit", "jo.jit", "pipelined", "pipelined, host", "cores", "hybrid", "disk")
MODES = PATHS + tuple(f"{path}, {AWAY}" for path in PATHS)
CALLS, BATCH, CLASSES = 4, 4, 11
Recipe = dict[str, Any]
Net = namedtuple("Net", "first second third rest")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


# The first choice of each field is the simplest one, to which ``shrunk`` sets it; a choice that stands there
# several times is drawn more often.
FIELDS: dict[str, tuple[Any, ...]] = {
    # the model
    "x64 by": ("config", "config", "context"),
    "dtype": ("float64",) * 4 + ("float32", "float32", "bfloat16", "bfloat16 with masters", "float32 with masters"),
    "width": (8, 8, 64),
    "layers": (3, 2, 4, 1),
    "stack": ("scan",) * 4 + ("unrolled", "unrolled", "pairs", "nested", "reverse", "unroll", "axis 1", "indexed",
              "tied", "dict", "vmap", "nothing"),
    "second stack": (None, None, None, "scan", "unrolled", "pairs", "reverse"),
    "remat": (None, None, None, "all", "dots"),
    "bias": (False, True),
    "embed": (None, None, "tokens", "dense"),
    "head": (False, True),
    "scalar": (False, False, True),
    "unused leaf": (False, False, False, True),
    "further leaf": (None, None, None, None, "integers", "empty", "half", "odd shape"),
    "tree": ("dict", "dict", "odd dict", "tuple", "list", "namedtuple", "with None", "nested"),
    "oddity": (None, None, None, "literal", "literal carry", "constant", "twice", "unchanged", "numpy", "weak", "cond",
               "while", "int", "argument"),
    "oddity to": ("loss", "metrics", "nowhere"),
    "loss has aux": (False, False, True),
    # the step
    "gradients": (None, None, None, "scaled", "clipped", "by value", "cast", "nan_to_num"),
    "accumulate": (None,) * 5 + ("scan", "fori", "python", "scan and literal"),
    "form": ("update", "update_params"),
    "skip": (None,) * 4 + ("skip", "cond", "where", "select"),
    "loss scale": (False, False, False, True),
    "bad batch": (False, True),
    "second": (None,) * 5 + ("gan", "alternating", "in a cond", "plain beside", "same gradients"),
    "target": (None, None, None, "average", "copy", "old"),
    "count": (False, True),
    "key": (False, False, True),
    "metrics": ((), ("loss",), ("loss", "norm"), ("literal",), ("numpy",), ("batch",), ("lr",), ("twice",),
                ("odd dict",), ("none",), ("new norm", "loss"), ("change",), ("old",), ("new",), ("weak",),
                ("count in state",), ("loss", "literal", "batch", "new norm"), ("gradients",), ("moments",)),
    "results": ("tuple",) * 5 + ("list", "dict", "namedtuple", "nested", "metrics first"),
    "order of arguments": (0, 0, 1, 2, 3),
    "order of results": (0, 0, 1, 2, 3),
    "train state": (False, False, False, True),
    "jitted inside": (None,) * 5 + ("loss", "update", "step"),
    "finishes": (False, True),  # a pipelined loop begins again in the middle
    # how it is called
    "static": (None,) * 5 + ("bool int float", "strings", "None", "tuples", "numpy", "default", "enum", "function"),
    "static by": ("name", "number", "negative"),
    "donate": ("all", "all", "none", "parameters", "state", "others"),
    "donate by": ("name", "number"),
    "batch": ("numpy", "jax", "wide numpy", "keyword", "dict"),
    "lr": (None, None, None, "float", "numpy", "weak", "int"),
    "mesh": (None,) * 7 + ("replicated", "fsdp", "ZeRO-1", "explicit", "explicit ZeRO-1"),
    # the optimizer
    "optimizer": ("adamw",) * 4 + ("adam schedule", "sgd momentum", "sgd", "lion", "adafactor", "rmsprop", "adagrad",
                  "muon", "optimistic", "schedule_free", "lamb", "adan", "noisy", "novograd", "amsgrad", "radam",
                  "ademamix", "lookahead-like", "yogi", "sm3", "lbfgs-like", "prodigy", "by rates", "dog", "adabelief",
                  "adadelta", "adamax", "dadapt", "lars", "rprop", "simplified_ademamix"),
    "inside": (None,) * 5 + ("clip", "clip", "MultiSteps", "apply_if_finite", "masked", "partition", "inject", "ema",
               "zero_nans", "named_chain", "flatten", "conditionally", "plateau", "MultiSteps that skips", "mechanize"),
    "outside": (None,) * 7 + ("clip", "clip", "apply_if_finite", "masked", "partition", "inject", "ema"),
    # the options of jo.offload
    "fraction": (1.0,) * 5 + (0.5, 0.25, 0.0),
    "select": (None,) * 6 + ("w", "callable", "tree"),
    "min_bytes": (0, 0, 0, 300, None),
    "window": (None, None, 1, 1500, 2**20),
    "host_bytes": (0, 0, 3000),
    "storage": (None,) * 9 + ("bfloat16", "int8", "float16", "float8_e5m2", "float8_e4m3fn"),
    "pieces": ("as ever", "small"),  # small: a driven update goes slice by slice, and a stack by its rows
    "again": (None,) * 6 + ("new gradients", "same gradients"),  # the state is updated twice in a step
}  # fmt: skip

# Plain optax returns the same values by name, whatever these are.
FREE = (
    "x64 by", "form", "order of arguments", "order of results", "results", "finishes", "static by", "donate by",
    "fraction", "select", "min_bytes", "window", "host_bytes", "pieces",
)  # fmt: skip


def recipe(seed: int, variant: int = 0) -> Recipe:
    """Draws a recipe; most of it is simple, so that what is odd meets in pairs and triples rather than all at once."""
    whole, free = random.Random(seed), random.Random(f"{seed} {variant}")
    simple = whole.choice((0.0, 0.3, 0.6))
    r = {}
    for name, choices in FIELDS.items():
        rng = free if name in FREE else whole
        r[name] = choices[0] if rng.random() < simple else rng.choice(choices)
    if r["storage"]:  # it encodes moments of float32
        r |= {"dtype": "float32", "optimizer": "adamw"}
    if r["outside"] and r["skip"] == "skip":  # which a transformation around the offload does not see in its update
        r["form"] = "update_params"
    if r["mesh"]:  # XLA's maximum over devices drops a NaN
        r |= {"bad batch": False, "storage": None}
    return recipe(seed) if r["storage"] and variant else r  # whether a leaf is encoded depends on the options


def complete(odd: Recipe) -> Recipe:
    """A recipe that is simple but for the fields that are given."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in {**SIMPLE, **odd}.items()}


SIMPLE: Recipe = {name: choices[0] for name, choices in FIELDS.items()}


def odd(r: Recipe) -> Recipe:
    """The fields of a recipe that are not simple: ``complete`` makes the recipe again."""
    return {name: value for name, value in r.items() if value != SIMPLE[name]}


# ---- the model -------------------------------------------------------------------------------------------------------


def normal(name: str, *shape: int, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.standard_normal(shape) / np.sqrt(shape[-1] if shape else 1)).astype(dtype)


def parameters(r: Recipe, name: str) -> dict[str, Any]:
    """The parameters by name, before ``packed``."""
    n, width = r["layers"], r["width"]
    params: dict[str, Any] = {}
    for at, kind in ((1, r["stack"]), (2, r["second stack"])):
        if kind in (None, "nothing"):
            continue
        shape = (n, 2, width, width) if kind == "nested" else (n, width, width)
        w = normal(f"{name} w{at}", *shape)
        w = np.moveaxis(w, 0, 1).copy() if kind == "axis 1" else w
        b = normal(f"{name} b{at}", n, width) / 3
        params[f"w{at}"] = list(w) if kind == "unrolled" else w
        if kind == "dict":
            params[f"w{at}"] = {f"layer_{k}": {"w": w[k]} for k in reversed(range(n))}
        if r["bias"]:
            params[f"b{at}"] = b
    if r["embed"] is not None:
        params["embed"] = normal(f"{name} e", CLASSES if r["embed"] == "tokens" else width, width)
    if r["head"] or not params:
        params["head"] = normal(f"{name} h", width, 3)
    if r["scalar"]:
        params["scale"] = np.float64(0.7)
    if r["unused leaf"]:
        params["unused"] = normal(f"{name} u", 5)
    dtype, further = r["dtype"].split()[0], FURTHER.get(r["further leaf"])
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    return params | {"table": further(f"{name} t", dtype)} if further else params


FURTHER: dict[str, Callable[[str, Any], jax.Array]] = {
    "integers": lambda name, dtype: jnp.arange(6, dtype=jnp.int32),
    "empty": lambda name, dtype: jnp.zeros((0, 3), dtype),
    "half": lambda name, dtype: jnp.asarray(normal(name, 5, 4), jnp.float16),
    "odd shape": lambda name, dtype: jnp.asarray(normal(name, 33, 1, 7), dtype),
}
TREES: dict[str, Callable[[dict[str, Any], list[Any]], Any]] = {  # made of a dict of parameters, or of their list
    "dict": lambda params, values: params,
    "odd dict": lambda params, values: dict(reversed(params.items())),
    "tuple": lambda params, values: tuple(values),
    "list": lambda params, values: values,
    "namedtuple": lambda params, values: Net(*(values + [None] * 3)[:3], tuple(values[3:])),
    "with None": lambda params, values: {"none": None, "empty": {}, "net": (params, None), "zzz": ()},
    "nested": lambda params, values: {"model": {"inner": {name: {"value": x} for name, x in params.items()}}},
}


def packed(r: Recipe, params: dict[str, Any]) -> Any:
    """The parameters in the containers of the recipe; ``unpacked`` is its inverse."""
    return TREES[r["tree"]](params, [params[name] for name in sorted(params)])


def unpacked(r: Recipe, tree: Any, names: list[str]) -> dict[str, Any]:
    by_name = packed(r, {name: name for name in names})
    return dict(zip(jax.tree.leaves(by_name), jax.tree.structure(by_name).flatten_up_to(tree), strict=True))


def layer(r: Recipe) -> Callable[[Any, Any, Any], Any]:
    def body(x: Any, w: Any, b: Any) -> Any:
        return x + jnp.tanh(x @ w + b)

    policy = {"dots": jax.checkpoint_policies.dots_saveable}.get(r["remat"])
    return jax.checkpoint(body, policy=policy) if r["remat"] else body


ONES = np.linspace(0.9, 1.1, BATCH)[:, None]


def size_of(x: Any) -> Any:
    """A mean of squares: in a mean of values of both signs, rounding errors grow without a bound."""
    return jnp.mean(x * x)


def looped(y: Any, k: Any) -> Any:
    n = lax.while_loop(lambda n: n < k + 2, lambda n: n + 1, 0)
    return lax.fori_loop(0, 2, lambda i, y: jnp.sin(y) + i * n, y)


# Each takes the activations after a layer, its number, its weights and a carried value, and returns new activations, a
# new carried value and a result.
ODDITIES: dict[str, Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]] = {
    "literal": lambda y, k, w, extra: (y, extra, {"zero": 0.0, "one": 1, "true": True, "size": size_of(y)}),
    "literal carry": lambda y, k, w, extra: (y, 2.0, None),
    "constant": lambda y, k, w, extra: (y, extra, (jnp.zeros(3), np.arange(2.0))),
    "twice": lambda y, k, w, extra: (y, extra, [size_of(y)] * 2 + [y] * 2),
    "unchanged": lambda y, k, w, extra: (y, extra, (w, k)),
    "numpy": lambda y, k, w, extra: (y * ONES.astype(y.dtype), extra, None),
    "weak": lambda y, k, w, extra: (y, extra + 1.0, extra),
    "while": lambda y, k, w, extra: (looped(y, k), extra, None),
    "int": lambda y, k, w, extra: (y, extra, {"k": k, "most": jnp.argmax(y)}),
    "argument": lambda y, k, w, extra: (y, extra, extra),
}


def oddly(oddity: str | None, run: Callable[[], Any], k: Any, w: Any, extra: Any) -> tuple[Any, Any, Any]:
    if oddity == "cond":
        return *lax.cond(k % 2 == 0, lambda: (run(), 1.0), lambda: (0.5 * run(), 2.0)), None
    return ODDITIES[oddity](run(), k, w, extra) if oddity else (run(), extra, None)


def stacked(r: Recipe, kind: str, x: Any, w: Any, b: Any) -> tuple[Any, Any]:
    """The activations after a stack of layers, and what is odd about it."""
    one, n = layer(r), r["layers"]
    first: Any = jnp.float32(1.5) if r["oddity"] == "argument" else 1.0 if r["oddity"] else 0.0
    zero = jnp.zeros(r["width"], x.dtype)

    def body(carry: Any, p: Any) -> Any:
        (x, extra), (ws, bs, k) = carry, p
        if kind == "pairs":
            (ws, bs) = ws
        if kind == "indexed":
            ws = w[k]
        bs = zero if bs is None else bs

        def run() -> Any:
            if kind == "nested":
                return lax.scan(lambda x, w: (one(x, w, bs).astype(x.dtype), None), x, ws)[0]
            if kind == "vmap":
                return jax.vmap(lambda row: one(row, ws, bs))(x)
            return one(x, ws, bs).astype(x.dtype)

        y, extra, ys = oddly(r["oddity"], run, k, ws, extra)
        return (y.astype(x.dtype), extra), ys

    if kind in ("unrolled", "dict"):
        carry, found = (x, first), list[Any]()
        for k in range(n):
            wk = w[f"layer_{k}"]["w"] if kind == "dict" else w[k]
            carry, y = body(carry, (wk, None if b is None else b[k], jnp.int32(k)))
            found.append(y)
        return carry[0], (found, carry[1])
    ws = None if kind == "indexed" else jnp.moveaxis(w, 1, 0) if kind == "axis 1" else w
    xs: Any = ((ws, b), None, jnp.arange(n)) if kind == "pairs" else (ws, b, jnp.arange(n))
    (x, extra), ys = lax.scan(body, (x, first), xs, reverse=kind == "reverse", unroll=2 if kind == "unroll" else 1)
    if kind == "tied":
        (x, extra), _ = lax.scan(body, (x, extra), xs)
    return x, (ys, extra)


def loss_of(r: Recipe, names: list[str]) -> Callable[..., Any]:
    """A loss of parameters, a batch and a key: a scalar, and with it what ``loss has aux`` says."""

    def loss(tree: Any, batch: Any, key: Any, other: Any = None) -> Any:
        params = unpacked(r, tree, names)
        x = params["embed"][batch["ids"]] if r["embed"] == "tokens" else batch["x"].astype(r["dtype"].split()[0])
        x = x @ params["embed"] if r["embed"] == "dense" else x
        if key is not None:
            x = x * jax.random.bernoulli(key, 0.8, x.shape)
        found: list[Any] = []
        for at, kind in ((1, r["stack"]), (2, r["second stack"])):
            if kind not in (None, "nothing"):
                x, ys = stacked(r, kind, x, params[f"w{at}"], params.get(f"b{at}"))
                found.append(ys)
        x = x * params["scale"] if r["scalar"] else x
        x = x @ params["head"] if "head" in params else x
        value = jnp.mean((x.astype(jnp.promote_types(x.dtype, jnp.float32)) - 0.3) ** 2)
        if "table" in params and is_float(params["table"]):
            value = value + 0.01 * jnp.sum(jnp.sin(params["table"].astype(value.dtype)))
        if other is not None:
            leaves = [p for p in jax.tree.leaves(other) if is_float(p) and p.size]
            value = value + 0.01 * sum(jnp.mean(jnp.sin(p.astype(value.dtype))) for p in leaves)
        if r["oddity to"] == "loss":
            floats = [y for y in jax.tree.leaves(found) if jnp.issubdtype(jnp.result_type(y), jnp.inexact)]
            value = value + 1e-3 * sum(jnp.mean(jnp.asarray(y, value.dtype) ** 2) for y in floats)
        aux = {"odd": found if r["oddity to"] == "metrics" else None}
        aux |= {"z": 0.0, "a": True, "x": size_of(x)} if r["loss has aux"] else {}
        return value.astype(jnp.promote_types(value.dtype, jnp.float32)), aux

    return jax.jit(loss) if r["jitted inside"] == "loss" else loss


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def schedule(count: Any) -> Any:
    return 1e-2 / (1.0 + 0.1 * count)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.ndim(p) >= 2, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if jnp.ndim(p) >= 2 else "rest", params)


def trained(params: Any) -> Any:
    return jax.tree.map(lambda p: "train" if is_float(p) else "keep", params)


def by_rates() -> optax.GradientTransformation:
    """AdamW with a NumPy constant for each parameter, made from the shapes."""

    scaled = lambda u: u * np.linspace(0.5, 1.5, u.size).reshape(u.shape).astype(u.dtype)  # noqa: E731
    return optax.chain(optax.adamw(1e-2), optax.stateless(lambda updates, _: jax.tree.map(scaled, updates)))


def keeping_gradients(all_of_them: bool) -> optax.GradientTransformation:
    """A transformation that keeps the last gradients, which are made before any state is read, and the ones before."""

    init = lambda p: {"last": jax.tree.map(jnp.zeros_like, p), "before": jax.tree.map(jnp.ones_like, p)}  # noqa: E731

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        scaled = jax.tree.map(
            lambda g, a, b: 1e-2 * (g + a + 2 * b).astype(g.dtype), updates, state["last"], state["before"]
        )
        before = state["before"] if all_of_them else jax.tree.map(lambda a: a + 1, state["last"])
        return scaled, {"last": updates, "before": before}

    return optax.GradientTransformation(init, update)


def rotating() -> optax.GradientTransformation:
    """A transformation whose two buffers change places, so that a new leaf is no leaf's next value."""

    return optax.GradientTransformation(
        lambda p: (jax.tree.map(jnp.zeros_like, p), jax.tree.map(jnp.ones_like, p)),
        lambda u, s, p=None: (optax.tree.scale(-1e-2, u), (s[1], jax.tree.map(jnp.add, u, s[0]))),
    )


def without_means() -> optax.GradientTransformation:
    """Momentum less the means of its columns: each needs all rows."""
    columns = optax.stateless(lambda g, _: jax.tree.map(lambda x: x - x.mean(axis=0, keepdims=True), g))
    return optax.chain(optax.trace(0.9), columns, optax.scale(-1e-2))


def with_slow_weights() -> optax.GradientTransformation:
    """A transformation that keeps parameters in its state, and takes them over every third step, like lookahead."""

    init = lambda p: {"slow": jax.tree.map(jnp.copy, p), "count": jnp.zeros((), jnp.int32)}  # noqa: E731

    def update(updates: Any, state: Any, params: Any) -> Any:
        sync = state["count"] % 3 == 2
        fast = jax.tree.map(lambda p, u: p + u, params, updates)
        slow = jax.tree.map(lambda f, s: jnp.where(sync, s + (0.5 * (f - s)).astype(s.dtype), s), fast, state["slow"])
        updates = jax.tree.map(lambda p, u, s: jnp.where(sync, s - p, u).astype(u.dtype), params, updates, slow)
        return updates, {"slow": slow, "count": state["count"] + 1}

    return optax.chain(optax.adam(1e-2), optax.GradientTransformation(init, update))


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "adam schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 60)),
    "sgd momentum": lambda: optax.sgd(schedule, momentum=0.9, nesterov=True),
    "sgd": lambda: optax.sgd(1e-1),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "rmsprop": lambda: optax.rmsprop(1e-3, eps=1e-2, centered=True, momentum=0.9),
    "adagrad": lambda: optax.adagrad(1e-1),
    "muon": lambda: contrib.muon(1e-2),
    "optimistic": lambda: optax.optimistic_gradient_descent(1e-1),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=1e-3),
    "adan": lambda: optax.adan(1e-2, weight_decay=1e-3),
    "noisy": lambda: optax.chain(optax.add_noise(1e-2, 0.55, key=0), optax.adam(1e-2)),
    "novograd": lambda: optax.novograd(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "ademamix": lambda: contrib.ademamix(1e-2, weight_decay=1e-3),
    "lookahead-like": with_slow_weights,
    "yogi": lambda: optax.yogi(1e-2),
    "sm3": lambda: optax.chain(optax.masked(optax.sm3(1e-2), matrices)),
    "lbfgs-like": lambda: optax.lbfgs(1e-2, memory_size=2, linesearch=None),
    "prodigy": lambda: contrib.prodigy(1e-1),
    "by rates": by_rates,
    "dog": lambda: contrib.dog(1e-1),
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(1.0),
    "adamax": lambda: optax.adamax(1e-2),
    "dadapt": lambda: contrib.dadapt_adamw(0.1, estim_lr0=1e-2),
    "lars": lambda: optax.chain(optax.lars(1e-1, weight_decay=1e-3), optax.apply_every(2)),
    "rprop": lambda: optax.rprop(1e-3),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(1e-4),
    "shifting": lambda: keeping_gradients(False),
    "shifting and keeping": lambda: keeping_gradients(True),
    "means of columns": without_means,
    "rotating": rotating,
}


WRAPPERS: dict[str | None, Callable[[Any], optax.GradientTransformation]] = {
    None: lambda inner: inner,
    "clip": lambda inner: optax.chain(optax.clip_by_global_norm(0.05), inner),
    "adaptive clip": lambda inner: optax.chain(optax.adaptive_grad_clip(0.05), inner),
    "clip by block": lambda inner: optax.chain(optax.clip_by_block_rms(0.01), inner),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "masked": lambda inner: optax.chain(optax.masked(inner, matrices), optax.scale(0.9)),
    "partition": lambda inner: optax.partition({"matrix": inner, "rest": optax.sgd(1e-1, momentum=0.9)}, labels),
    "inject": lambda inner: optax.inject_hyperparams(lambda factor: optax.chain(inner, optax.scale(factor)))(
        factor=lambda count: 1.0 / (1.0 + count)
    ),
    "ema": lambda inner: optax.chain(inner, optax.ema(0.9)),
    "zero_nans": lambda inner: optax.chain(optax.zero_nans(), inner),
    "named_chain": lambda inner: optax.named_chain(("clip", optax.clip(0.1)), ("inner", inner)),
    "flatten": optax.flatten,
    "conditionally": lambda inner: optax.conditionally_mask(inner, lambda count: count % 3 != 2),
    "plateau": lambda inner: optax.chain(inner, contrib.reduce_on_plateau(0.7, patience=1, cooldown=1, rtol=1.0)),
    "MultiSteps that skips": lambda inner: optax.MultiSteps(
        inner, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "mechanize": contrib.mechanize,
}
OPEN: list[Any] = []  # disks, which have threads and files until they are closed


def path_of(mode: str) -> str:
    """The mode without the place of the parameters."""
    return mode.removesuffix(f", {AWAY}")


def options(r: Recipe, params: Any, mode: str, folder: Path) -> dict[str, Any]:
    """The options of ``jo.offload``."""
    found: dict[str, Any] = {"fraction": r["fraction"], "window": r["window"]}
    if r["min_bytes"] is not None:
        found["min_bytes"] = r["min_bytes"]
    seen = jax.tree_util.tree_leaves_with_path(params)
    if r["outside"] in ("masked", "partition", "by group"):  # which hide the other leaves from the offload
        seen = [(path, p) for path, p in seen if p.ndim >= 2]
    first = jax.tree_util.keystr(seen[0][0], simple=True, separator="/")
    match r["select"]:
        case "w":
            found["select"] = re.escape(first)
        case "callable":
            found["select"] = lambda path, leaf: path == first or leaf.ndim > 2
        case "tree":
            found["select"] = jax.tree.map(lambda p: p.ndim >= 2, params)
    if r["storage"]:
        found["storage"] = {"mu": "int8"} if r["storage"] == "int8" else r["storage"]
    if r["mesh"] in ("ZeRO-1", "explicit ZeRO-1"):
        found["shard_over"] = "d"
    rules = [(re.escape(first), "host"), (".*", 0.5)] if r["pieces"] == "small" else 0.5
    found |= {"cores": {"update_on": "host"}, "hybrid": {"update_on": rules}}.get(path_of(mode), {})
    if path_of(mode) == "disk":
        OPEN.append(jo.disk(folder, host_bytes=r["host_bytes"]))
        found["disk"] = OPEN[-1]
    return found


def transformation(r: Recipe, params: Any, mode: str, folder: Path, *, plain: bool = False) -> Any:
    """The optimizer, offloaded but for ``plain``."""
    tx = WRAPPERS[r["inside"]](OPTIMIZERS[r["optimizer"]]())
    if r["further leaf"] == "integers":
        tx = optax.partition({"train": tx, "keep": optax.set_to_zero()}, trained)
    tx = jo.with_master_params(tx) if "masters" in r["dtype"] else tx
    if not plain and (mode != "plain" or r["storage"]):  # plain optax has no state in fewer bits
        tx = jo.offload(tx, **options(r, params, mode, folder))
    if r["outside"] == "by group":
        rest = optax.sgd(1e-1, momentum=0.9)
        if not plain and mode != "plain":
            by_default = {"pieces": "as ever", "select": None}  # rules name a parameter of the others
            rest = jo.offload(rest, **options(r | by_default, params, mode, folder / "rest"))
        return optax.partition({"matrix": tx, "rest": rest}, labels)
    return WRAPPERS[r["outside"]](tx)


# ---- where a state belongs -------------------------------------------------------------------------------------------


def misplaced(r: Recipe, mode: str, state: Any, params: Any) -> Iterator[str]:
    """What of a new state is elsewhere than the options say; nothing of this is read from the package."""
    least = 2**16 if r["min_bytes"] is None else r["min_bytes"]

    def size(leaves: list[Any]) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    def may_leave(x: Any) -> bool:
        return bool(x.shape) and size([x]) >= max(least, 1) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    leaves = [x for x in jax.tree.leaves(state, is_leaf=is_on_disk) if is_array(x)]
    on_disk = [x for x in leaves if is_on_disk(x)]
    on_host = [x for x in leaves if not is_on_disk(x) and x.sharding.memory_kind == "pinned_host"]
    moved, large = on_disk + on_host, [x for x in leaves if may_leave(x)]
    yield from (f"a leaf of shape {x.shape} left the device" for x in moved if not may_leave(x))
    disk = path_of(mode) == "disk"
    if (not disk and on_disk) or (disk and size(on_host) > r["host_bytes"]):
        yield f"{size(on_disk)} bytes are on disk, {size(on_host)} in host memory"
    if r["outside"] not in (None, "clip", "adaptive clip", "clip by block"):
        return  # which has leaves of its own that stay as they are
    wrong = abs(size(moved) - r["fraction"] * size(large))
    most = max((size([x]) for x in large), default=0) / 2 if 0 < r["fraction"] < 1 else 0
    if r["select"] is None and wrong > most:
        yield f"{size(moved)} bytes left the device, of {size(large)} that may, with fraction={r['fraction']}"
    by_path = {jax.tree_util.keystr(path): p for path, p in jax.tree_util.tree_leaves_with_path(params)}
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_on_disk) if r["mesh"] else []:
        # Its path tells whose leaf it is: the history of one parameter may have the shape of another.
        whose = max((end for end in by_path if jax.tree_util.keystr(path).endswith(end)), key=len, default=None)
        if whose is None or not isinstance(x, jax.Array) or x.shape != by_path[whose].shape:
            continue
        over = 2 if "ZeRO-1" in r["mesh"] and may_leave(x) and any(n % 2 == 0 for n in x.shape) else 1
        parts_of = lambda x: math.prod(x.sharding.shard_shape(x.shape))  # noqa: E731
        if parts_of(x) != parts_of(by_path[whose]) // over:
            yield f"{jax.tree_util.keystr(path)} of shape {x.shape} is divided into {parts_of(x)} elements a device"


# ---- the step --------------------------------------------------------------------------------------------------------

STATIC: dict[str, tuple[Any, ...]] = {
    "bool int float": (True, 1, 1.0),
    "strings": ("a", "b", "a"),
    "None": (None, 0, None),
    "tuples": ((1, 2), ("a", 2), ()),
    "numpy": (np.float32(1), np.float64(1), 1),
    "default": (),
    "enum": (Colour.RED, Colour.BLUE, Colour.RED),
    "function": (jnp.sin, jnp.cos, jnp.sin),
}


def factor_of(flag: Any) -> float:
    """A number that depends on a static argument and its type."""
    what = flag.__name__ if callable(flag) else repr((type(flag).__name__, flag))
    return 1.0 + zlib.crc32(what.encode()) % 5 / 5


def batches(r: Recipe) -> list[Any]:
    dtype = np.float64 if r["batch"] == "wide numpy" else np.float32
    found = [
        {"x": normal(f"x{k}", BATCH, r["width"], dtype=dtype) * 3, "ids": (np.arange(BATCH) * (k + 2)) % CLASSES}
        for k in range(CALLS)
    ]
    if r["bad batch"] and r["embed"] != "tokens":
        found[1]["x"][0, 0] = np.nan
    return found


def mapped(fun: Callable[[Any], Any], tree: Any) -> Any:
    """``fun`` of the leaves that are floats."""
    return jax.tree.map(lambda x: fun(x) if is_float(x) else x, tree)


def on_the_host(x: jax.Array) -> jax.Array:
    """An array in host memory, unless it is of rank 0."""
    return jax.device_put(x, jax.memory.Space.Host) if x.ndim else x


class Step:
    """A step of a recipe in one mode: the function, and what it begins with."""

    def __init__(self, r: Recipe, mode: str, folder: Path) -> None:
        self.r, self.mode = r, mode
        # jax.jit loads nothing by itself, and an update on cores or with a disk takes parameters on the device
        self.moves = AWAY in mode and not mode.startswith(("jo.jit", "pipelined"))
        raw = parameters(r, "net")
        self.names = sorted(raw)
        params = self.placed(packed(r, raw))
        self.loss = loss_of(r, self.names)
        tx = transformation(r, params, mode, folder / "one")
        self.txs = [tx]
        resident = (mode == "plain" and not r["storage"]) or r["fraction"] == 0.0
        self.misplaced, self.plain = list[str](), None
        carried: dict[str, Any] = {"params": params, "state": self.created(tx, params, resident)}
        if r["second"]:
            other = self.placed(packed(r, parameters(r, "critic")))
            plain = r["second"] == "plain beside"
            self.txs.append(transformation(r, other, mode, folder / "two", plain=plain))
            self.plain = self.txs[1] if plain else None
            carried |= {"critic": other, "critic_state": self.created(self.txs[1], other, plain or resident)}
        if r["target"]:
            carried["target"] = self.placed(packed(r, parameters(r, "target")))
        if r["count"] or r["second"] in ("alternating", "in a cond"):
            carried["count"] = self.placed(np.int32(0))
        if r["loss scale"]:
            carried["scale"] = self.placed({"scale": np.float32(4), "good": np.int32(0)})
        if r["key"]:
            carried["key"] = jax.device_put(jax.random.key(3), self.sharding())
        if AWAY in mode:
            carried["params"] = jax.tree.map(on_the_host, carried["params"])
        if r["train state"]:
            carried = {"train": {"state": carried.pop("state"), "params": carried.pop("params")}, **carried}
        self.carried = carried
        self.arguments = [*carried]
        random.Random(r["order of arguments"]).shuffle(self.arguments) if r["order of arguments"] else None
        self.arguments += ["batch"] + (["lr"] if r["lr"] else []) + (["flag"] if r["static"] else [])
        self.returned = [*carried, "metrics"]
        random.Random(r["order of results"]).shuffle(self.returned) if r["order of results"] else None
        self.result_type = namedtuple("Result", self.returned)
        if r["results"] == "metrics first":
            self.returned = ["metrics", *(name for name in self.returned if name != "metrics")]

    def sharding(self, *shape: int) -> Any:
        kind = self.r["mesh"]
        if kind is None:
            return jax.sharding.SingleDeviceSharding(jax.devices()[1])  # the first one stands for the host's cores
        types = (AxisType.Explicit if "explicit" in kind else AxisType.Auto,)
        if kind == "two axes":
            mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=types * 2, devices=jax.devices()[1:5])
            spec = ["d", "t"] if len(shape) >= 2 and shape[-1] % 2 == shape[-2] % 2 == 0 else [None] * len(shape)
            return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - len(spec)), *spec))
        mesh = jax.make_mesh((2,), ("d",), axis_types=types, devices=jax.devices()[1:3])
        divided = kind == "fsdp" and len(shape) >= 2 and shape[-1] % 2 == 0
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "d") if divided else PartitionSpec())

    def created(self, tx: Any, params: Any, plain: bool) -> Any:
        """A state that shares no buffer with the parameters, as the step may donate both; plain optax shares some."""
        state = tx.init(params)
        if self.mode != "plain" and tx is not self.plain:
            self.misplaced += misplaced(self.r, self.mode, state, params)
        if not plain:
            return state
        home = lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else self.sharding()  # noqa: E731
        return jax.tree.map(lambda x: jax.device_put(jnp.copy(x), home(x)), state)

    def placed(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), self.sharding(*np.shape(x))), tree)

    @property
    def function(self) -> Callable[..., Any]:
        default, kind = {"flag": 3} if self.r["static"] == "default" else {}, inspect.Parameter.POSITIONAL_OR_KEYWORD
        of = lambda name: inspect.Parameter(name, kind, default=default.get(name, inspect.Parameter.empty))  # noqa: E731
        signature = inspect.Signature(list(map(of, self.arguments)))

        def step(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return self.body(dict(bound.arguments))

        step.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        if self.r["jitted inside"] != "step" or not self.mode.startswith(("plain", "jax.jit", "jo.jit")):
            return step
        return jax.jit(step, static_argnames=("flag",) if self.r["static"] else ())

    def body(self, given: dict[str, Any]) -> Any:
        r = self.r
        if r["train state"]:
            given |= given.pop("train")
        new: dict[str, Any] = {}
        batch, there = given["batch"], given["params"]
        by_rows = path_of(self.mode) == "jax.jit" and r["form"] == "update_params" and r["skip"] in (None, "skip")
        if self.moves:
            given["params"] = jo.to_device(there)
        key = given.get("key")
        if key is not None:
            new["key"], key = jax.random.split(key)
        scale = given["scale"]["scale"] if r["loss scale"] else None
        self.slope = lambda params: self.gradients(params, batch, key, given.get("target"), scale)[2]
        value, aux, grads = self.gradients(given["params"], batch, key, given.get("target"), scale)
        if scale is not None:
            finite = jnp.isfinite(optax.tree.norm(grads)) & jnp.isfinite(value)
            good = jnp.where(finite, given["scale"]["good"] + 1, 0)
            scale = jnp.where(finite, jnp.where(good == 2, 2 * scale, scale), scale / 2)
            new["scale"] = {"good": good, "scale": scale}
        if r["lr"]:
            grads = mapped(lambda g: (g * given["lr"]).astype(g.dtype), grads)
        if r["static"]:
            grads = mapped(lambda g: g * factor_of(given["flag"]), grads)
        updated = there if by_rows else given["params"]
        new["params"], new["state"] = self.update(0, grads, given["state"], updated, value)
        if self.moves:
            there = new["params"] if by_rows else jax.tree.map(on_the_host, new["params"])
            new["params"] = jo.to_device(there)
        if "count" in given:
            new["count"] = given["count"] + 1
        if r["second"]:
            new["critic"], new["critic_state"] = self.second(given, new, batch, key, grads)
        match r["target"]:
            case "average":
                mixed = lambda t, p: (0.9 * t + 0.1 * p).astype(t.dtype) if is_float(t) else t  # noqa: E731
                new["target"] = jax.tree.map(mixed, given["target"], new["params"])
            case "copy":
                new["target"] = jax.tree.map(jnp.copy, new["params"])
            case "old":
                old = given["params"]  # returned as it came it would stay in host memory
                new["target"] = jax.tree.map(jnp.copy, old) if AWAY in self.mode else old
        new["metrics"] = self.metrics(given, new, value, grads, aux)
        if self.moves:
            new["params"] = there
        if r["train state"]:
            new["train"] = {"state": new.pop("state"), "params": new.pop("params")}
        values = [new[name] for name in self.returned]
        match r["results"]:
            case "list":
                return values
            case "dict":
                return dict(zip(self.returned, values, strict=True))
            case "namedtuple":
                return self.result_type(*values)
            case "nested":
                return values[0], tuple(values[1:])
        return tuple(values)

    def carried_of(self, result: Any) -> dict[str, Any]:
        """The results of a step by name."""
        match self.r["results"]:
            case "dict":
                return result
            case "nested":
                result = (result[0], *result[1])
        return dict(zip(self.returned, result, strict=False))

    def gradients(self, params: Any, batch: Any, key: Any, other: Any, scale: Any = None) -> tuple[Any, Any, Any]:
        """The loss, what it says beside, and the gradients; these divided by ``scale``, with which the loss grows."""
        r = self.r

        def grad(*args: Any) -> Any:
            def scaled(*args: Any) -> Any:
                value, aux = self.loss(*args)
                return (value if scale is None else value * scale), aux

            (value, aux), grads = jax.value_and_grad(scaled, has_aux=True, allow_int=True)(*args)
            grads = jax.tree.map(lambda g, p: g if is_float(p) else jnp.zeros_like(p), grads, args[0])
            if scale is not None:
                value, grads = value / scale, mapped(lambda g: (g / scale).astype(g.dtype), grads)
            return (value, aux), grads

        if r["accumulate"] is None:
            (value, aux), grads = grad(params, batch, key, other)
        else:
            micro = jax.tree.map(lambda x: jnp.reshape(x, (2, -1, *jnp.shape(x)[1:])), batch)
            if r["oddity"] == "numpy":  # its constant has one row for each example
                micro = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), batch)
            zeros = jax.tree.map(jnp.zeros_like, params)

            def body(sums: Any, one: Any) -> Any:
                (value, aux), grads = grad(params, one, key, other)
                kept = {"value": value, "aux": aux} | ({"no": 0.0} if r["accumulate"] == "scan and literal" else {})
                return jax.tree.map(jnp.add, sums, grads), kept

            if r["accumulate"] == "fori":
                part = lambda i: jax.tree.map(lambda x: x[i], micro)  # noqa: E731
                grads = lax.fori_loop(0, 2, lambda i, sums: body(sums, part(i))[0], zeros)
                value, aux = optax.tree.norm(grads), None
            elif r["accumulate"] == "python":
                grads, kept = zeros, []
                for i in range(2):
                    grads, one = body(grads, jax.tree.map(lambda x, i=i: x[i], micro))
                    kept.append(one)
                value, aux = kept[0]["value"] + kept[1]["value"], [each["aux"] for each in kept]
            else:
                grads, kept = lax.scan(body, zeros, micro)
                value, aux = kept.pop("value").mean(), kept
        match r["gradients"]:
            case "scaled":
                grads = mapped(lambda g: 0.5 * g, grads)
            case "clipped":
                norm = optax.tree.norm(grads)
                grads = mapped(lambda g: (g * jnp.minimum(1.0, 0.05 / (norm + 1e-9))).astype(g.dtype), grads)
            case "by value":
                grads = mapped(lambda g: jnp.clip(g, -1e-2, 1e-2), grads)
            case "cast":
                grads = mapped(lambda g: g.astype(jnp.float32), grads)
            case "nan_to_num":
                grads = jax.tree.map(jnp.nan_to_num, grads)
        return value, aux, grads

    def update(self, at: int, grads: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any]:
        """New parameters and state of the first or the second network; of the first after two updates, maybe."""
        if at == 0 and self.r["again"]:
            params, state = self.updated_once(at, grads, state, params, value)
            if self.r["again"] == "new gradients":
                loads = AWAY in self.mode and not self.mode.startswith(("jo.jit", "pipelined"))
                grads = self.slope(jo.to_device(params) if loads else params)
        return self.updated_once(at, grads, state, params, value)

    def updated_once(self, at: int, grads: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any]:
        r, tx = self.r, self.txs[at]
        plain = self.mode == "plain" or (at == 1 and r["second"] == "plain beside")
        bad = ~jnp.isfinite(value)

        def updated(grads: Any, state: Any, params: Any, **skip: Any) -> Any:
            extra = skip | ({"value": value} if r["inside"] == "plateau" else {})
            if r["form"] == "update_params" and not plain:
                return jo.update_params(tx, grads, state, params, **extra)
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        run = jax.jit(updated) if r["jitted inside"] == "update" else updated
        if at == 1 or r["skip"] is None:
            return run(grads, state, params)
        if r["skip"] == "skip" and not plain:
            return updated(grads, state, params, skip=bad)
        if r["skip"] == "cond":
            return lax.cond(bad, lambda: (params, state), lambda: run(grads, state, params))
        if r["skip"] in ("skip", "select"):  # what skip= promises
            return jax.tree.map(lambda a, b: jnp.where(bad, a, b), (params, state), updated(grads, state, params))
        grads = jax.tree.map(lambda g: jnp.where(bad, jnp.zeros_like(g), g), grads)
        return run(grads, state, params)

    def second(self, given: Any, new: Any, batch: Any, key: Any, grads: Any) -> tuple[Any, Any]:
        old = given["critic"], given["critic_state"]

        def run() -> Any:
            if self.r["second"] == "same gradients":
                return self.update(1, grads, old[1], old[0], 0.0)
            value, _, own = self.gradients(old[0], batch, key, new["params"])
            return self.update(1, own, old[1], old[0], value)

        match self.r["second"]:
            case "alternating":
                return lax.cond(given["count"] % 2 == 0, run, lambda: old)
            case "in a cond":
                value, _, own = self.gradients(old[0], batch, key, None)
                return lax.cond(
                    given["count"] % 3 != 1, lambda: self.update(1, own, old[1], old[0], value), lambda: old
                )
        return run()

    def metrics(self, given: Any, new: Any, value: Any, grads: Any, aux: Any) -> Any:
        r, norm = self.r, optax.tree.norm
        makes: dict[str, Callable[[], Any]] = {
            "loss": lambda: value,
            "norm": lambda: norm(grads),
            "literal": lambda: {"float": 1.0, "int": 7, "bool": False},
            "numpy": lambda: (np.arange(3), np.float64(2)),
            "batch": lambda: given["batch"],
            "lr": lambda: given.get("lr"),
            "twice": lambda: [value, value, {"again": value}],
            "odd dict": lambda: {"z": value, "a": norm(new["params"]), "m": norm(grads)},
            "none": lambda: None,
            "new norm": lambda: norm(new["params"]),
            "change": lambda: norm(jax.tree.map(jnp.subtract, new["params"], given["params"])),
            "old": lambda: {"old": given["params"]},
            "new": lambda: {"new": jax.tree.map(jnp.copy, new["params"])},
            "weak": lambda: jnp.asarray(2.0) * 1.0,
            "count in state": lambda: [x + 1 for x in found_in(new["state"], "count") if x.ndim == 0],
            "gradients": lambda: {"grads": grads},
            "moments": lambda: [norm(on_device(x)) for x in found_in(new["state"], "mu")],
        }

        def found_in(state: Any, name: str) -> list[Any]:
            return [x for _, x in optax.tree.get_all_with_path(state, name)]

        def on_device(x: Any) -> Any:
            return jo.to_device(x) if self.mode != "plain" or r["storage"] else x

        found: list[Any] = [aux] if r["oddity to"] == "metrics" or r["loss has aux"] else []
        return {"metrics": found + [makes[name]() for name in r["metrics"]]}


# ---- running it ------------------------------------------------------------------------------------------------------

_compiles = Counter()


def _listen(event: str, duration: float, **kwargs: Any) -> None:
    _compiles[event] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiles() -> int:
    return _compiles["/jax/core/compile/backend_compile_duration"]


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or is_on_disk(x)


def types(tree: Any) -> Any:
    """What a result is: an array, its type, and whether it is weak."""

    def of(x: Any) -> str:
        if isinstance(x, jax.Array) or is_on_disk(x):
            return f"{np.dtype(x.dtype) if is_on_disk(x) else x.dtype}{' weak' * getattr(x, 'weak_type', False)}"
        return f"{type(x).__name__} {getattr(x, 'dtype', '')}"

    return jax.tree.map(of, tree, is_leaf=is_on_disk)


def memory_of(x: jax.Array) -> str:
    """The kind of memory of an array, as jax records it; ``benchmarks`` asks the driver."""
    return x.sharding.memory_kind


def places(tree: Any) -> Any:
    """The kind of memory of each leaf, and its devices."""

    def of(x: Any) -> str:
        if is_on_disk(x):
            return "disk"
        return f"{memory_of(x)} on {sorted(d.id for d in x.sharding.device_set) if x.ndim else 'any'}"

    return jax.tree.map(of, tree, is_leaf=is_on_disk)


def parts(tree: Any) -> Any:
    """The shape of a device's part of each leaf."""
    of = lambda x: x.sharding.shard_shape(x.shape) if hasattr(x, "sharding") and x.ndim else None  # noqa: E731
    return [of(x) for x in jax.tree.leaves(tree, is_leaf=is_on_disk)]


def torn(tree: Any) -> Iterator[str]:
    """The leaves whose copies on several devices are not the same to the bit."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_on_disk)[0]:
        if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            copies = {(str(shard.index), np.asarray(shard.data).tobytes()) for shard in x.addressable_shards}
            if len(copies) > len({index for index, _ in copies}):
                yield jax.tree_util.keystr(path)


class Record:
    """What calls of a step have returned: a list of dicts by name of the carried arguments and ``metrics``."""

    def __init__(self, step: Step) -> None:
        self.values: list[dict[str, Any]] = []
        self.types: list[dict[str, Any]] = []
        self.parts = [{name: parts(x) for name, x in step.carried.items()}]
        self.wrong = [f"after init {line}" for line in step.misplaced]
        self.copies = step.r["mesh"] is not None and step.mode != "plain"
        self.last_compiles = 0
        self.deleted: list[str] = []
        self.kept: list[str] = []  # although it was donated

    def add(self, result: dict[str, Any]) -> None:
        self.values.append(read(result))
        self.types.append(types(result))
        self.parts.append({name: parts(x) for name, x in result.items() if name in self.parts[0]})
        self.wrong += [f"copies differ: {path}" for path in torn(result)] if self.copies else []


DONATED: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "none": lambda name: False,
    "parameters": lambda name: name in ("params", "train", "target", "critic"),
    "state": lambda name: "state" in name or name == "train",
    "others": lambda name: name not in ("params", "state", "train"),
}


def rest_of(step: Step, k: int) -> dict[str, Any]:
    """The arguments of a call that are not carried."""
    r = step.r
    batch = step.placed(batches(r)[k]) if r["batch"] == "jax" else batches(r)[k]
    found: dict[str, Any] = {"batch": batch}
    if r["lr"]:
        weak = jnp.asarray(0.5) if r["mesh"] is None else 0.5
        found["lr"] = {"float": 0.5, "numpy": np.float32(0.5), "weak": weak, "int": 2}[r["lr"]]
    if r["static"] and STATIC[r["static"]]:
        found["flag"] = STATIC[r["static"]][min(k, 2)]
    return found


@contextlib.contextmanager
def x64(on: bool, by: str) -> Iterator[None]:
    """Arrays of 64 bits, said to this thread or to all."""
    if by == "context":
        with jax.enable_x64(on):
            yield
        return
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", on)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextlib.contextmanager
def built(r: Recipe, mode: str, folder: Path) -> Iterator[Step]:
    """Yield the step of a recipe, under its settings."""
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(x64(r["dtype"] == "float64", r["x64 by"]))
        if r["pieces"] == "small":
            patch = contexts.enter_context(pytest.MonkeyPatch.context())
            set_sizes(patch.setattr, group=1, part=4 * r["width"] ** 2 * jnp.dtype(r["dtype"].split()[0]).itemsize)
        step = Step(r, mode, folder)
        if "explicit" in str(r["mesh"]):
            contexts.enter_context(jax.set_mesh(step.sharding().mesh))
        yield step


def run(r: Recipe, mode: str, folder: Path) -> Record:
    """Call a step several times, each time with the results of the last call."""
    with built(r, mode, folder) as step:
        return pipelined(step) if mode.startswith("pipelined") else jitted(step)


def placement_of(r: Recipe, mode: str) -> Any:
    """Return the placement of a step, which is only traced, in a mode that is not pipelined."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), built(r, mode, Path(folder)) as step:
        warnings.simplefilter("ignore")
        given = {**step.carried, **rest_of(step, 0)}
        call = (jax.jit if path_of(mode) == "jax.jit" else jo.jit)(step.function, **options_of_jit(step, []))
        try:
            return jo.placement(call, *[given[name] for name in step.arguments if name in given])
        finally:
            while OPEN:
                OPEN.pop().close()


def options_of_jit(step: Step, names: list[str]) -> dict[str, Any]:
    """How a step is jitted that donates the arguments of these names, whose order does not matter."""
    r = step.r
    if r["donate by"] == "name":
        found: dict[str, Any] = {"donate_argnames": sorted(names, key=lambda name: zlib.crc32(name.encode()))}
    else:
        found = {"donate_argnums": tuple(step.arguments.index(name) for name in names)}
    if r["static"]:
        at = step.arguments.index("flag") - len(step.arguments) * (r["static by"] == "negative")
        found |= {"static_argnames": "flag"} if r["static by"] == "name" else {"static_argnums": at}
    return found


def widens(r: Recipe) -> bool:
    """Whether a step may move leaves: optimizers widen the state of a half leaf, and a fraction counts its bytes."""
    return r["further leaf"] == "half" and 0 < r["fraction"] < 1


def jitted(step: Step) -> Record:
    r, record = step.r, Record(step)
    jit = jax.jit if path_of(step.mode) in ("plain", "jax.jit") else jo.jit
    names = [name for name in step.carried if DONATED[r["donate"]](name)]
    call = jit(step.function, **options_of_jit(step, names))
    carried = step.carried
    home = None if step.mode == "plain" or widens(r) else places(carried)
    for k in range(CALLS):
        rest = rest_of(step, k)
        given = {name: carried.get(name, rest.get(name)) for name in step.arguments}
        if "flag" in given and "flag" not in rest:
            del given["flag"]
        before = compiles()
        if r["batch"] == "keyword":
            at = step.arguments.index("batch")
            by_name = {name: given[name] for name in step.arguments[at:] if name in given}
            result = call(*[given[name] for name in step.arguments[:at]], **by_name)
        else:
            result = call(*given.values())
        jax.block_until_ready(jax.tree.leaves(result))
        record.last_compiles = compiles() - before
        new = step.carried_of(result)
        record.add({name: new[name] for name in step.returned})
        for name in step.arguments:
            arrays = [x for x in jax.tree.leaves(given.get(name)) if isinstance(x, jax.Array)]
            gone = [x.is_deleted() for x in arrays]
            if any(gone) and name not in names:
                record.wrong.append(f"call {k}: {name} is deleted, and was not donated")
            if arrays and name in names and name in ("params", "target", "critic"):
                handed_on = {*map(id, jax.tree.leaves(result))} & {*map(id, arrays)}
                (record.deleted if all(gone) or handed_on else record.kept).append(f"call {k}: {name}")
        carried = {name: new[name] for name in carried}
        if home is not None and (moved := [*unequal(places(carried), home)]):
            record.wrong += [f"call {k}: placed {line}" for line in moved]
            break
    return record


def pipelined(step: Step) -> Record:
    r, record = step.r, Record(step)
    # Counts outside of an offload begin uncommitted, so that the second call of a program compiles again.
    # A program updates by the flag of one call and differentiates by that of the next.
    counted = r["outside"] is None and r["second"] != "plain beside" and r["static"] in (None, "default")
    carried = [name for name in step.arguments if name in step.carried]
    train = jo.pipelined(
        step.function,
        **options_of_jit(step, carried),
        gradients="host" if step.mode.startswith("pipelined, host") else "device",
    )
    home, results = places(step.carried), dict(step.carried)
    nows, lates = list[Any](), list[Any]()
    carry: Any = None
    for k in range(CALLS):
        rest = rest_of(step, k)
        before = compiles()
        if carry is None:
            first = [results[name] for name in carried]
            carry, aux = train(first if len(first) > 1 else first[0], **rest)
        else:
            carry, aux = train(carry, **rest)
            lates.append(aux.late)
        nows.append(aux.now)
        jax.block_until_ready(jax.tree.leaves((carry, aux.now, aux.late)))
        record.last_compiles = counted * (compiles() - before)
        if k == CALLS - 1 or (r["finishes"] and k == CALLS // 2 - 1):
            values, late = train.finish(carry, with_late=True)
            results, carry = dict(zip(carried, values if len(carried) > 1 else (values,), strict=True)), None
            jax.block_until_ready(jax.tree.leaves(results))
            lates.append(late)
            found = places({name: results[name] for name in step.carried})
            record.wrong += [] if widens(r) else [f"finish: placed {line}" for line in unequal(found, home)]
    for k, (now, late) in enumerate(zip(nows, lates, strict=True)):
        metrics = jax.tree.map(lambda a, b: b if a is None else a, now, late, is_leaf=lambda x: x is None)
        record.add({"metrics": metrics} if k < CALLS - 1 else {**results, "metrics": metrics})
    return record


def unequal(got: Any, want: Any) -> Iterator[str]:
    a, b = jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want)
    if len(a) != len(b):
        yield f"{len(a)} leaves instead of {len(b)}"
    for (path, x), y in zip(a, b, strict=False):
        if x != y:
            yield f"{jax.tree_util.keystr(path)}: {x} instead of {y}"


# In bfloat16 a step of this size multiplies a rounding error of 2**-7 by ten, as it does errors of wider dtypes.
TOLERANCE = {"float64": 1e-7, "float32": 2e-3, "bfloat16": 1e-1}


def compared(r: Recipe, got: Record, want: Record) -> list[str]:
    """The differences between two records."""
    found = list(got.wrong)
    tolerance = 3e-2 if r["storage"] else TOLERANCE[r["dtype"].split()[0]]
    if r["gradients"] == "cast":
        tolerance = max(tolerance, 2e-3)
    if r["further leaf"] == "half":
        tolerance = max(tolerance, 1e-2)
    for k, (new, old) in enumerate(zip(got.values, want.values, strict=False)):
        norms = largest_norms(old)
        for name, values in new.items():
            a, b = (jax.tree_util.tree_flatten_with_path(x)[0] for x in (values, old[name]))
            if len(a) != len(b):
                found.append(f"call {k}: {name}: {len(a)} leaves instead of {len(b)}")
                continue
            both = {jax.tree_util.keystr(path): (x, y) for (path, x), (_, y) in zip(a, b, strict=True)}
            for where, (x, y) in both.items():
                if where.endswith(".values_scale") and is_float(both[where.removesuffix("_scale")][0]):
                    continue  # compared with the codes
                # An average of differences of parameters, as in schedule_free, has the parameters' rounding errors.
                rounding = float(jnp.finfo(y.dtype).eps) * norms[y.shape] if ".ema" in where and is_float(y) else 0.0
                if is_float(x) and f"{where}_scale" in both:
                    # A rounding error may double the power of two that scales a row, which halves the row's codes.
                    mine, theirs = both[f"{where}_scale"]
                    blocks = np.repeat(mine / theirs, 128, axis=-1)[..., : x.shape[-1]]
                    x = np.asarray(x, np.float64) * blocks
                if (what := difference(x, y, tolerance, rounding)) is not None:
                    found.append(f"call {k}: {name}{where}: {what}")
            kinds = unequal(got.types[k][name], want.types[k][name])
            found += [f"call {k}: type of {name}{line}" for line in kinds]
    for k, (new, plain) in enumerate(zip(got.parts[1:], want.parts[1:], strict=not got.wrong)):
        for name, mine in new.items():
            rows = zip(mine, got.parts[0][name], plain[name], want.parts[0][name], strict=True)
            for x, first, theirs, whole in rows:
                free = r["mesh"] == "ZeRO-1" and first == whole  # Auto axes leave the division of a result to XLA
                if not free and x not in ((first,) if "ZeRO-1" in str(r["mesh"]) else (first, theirs)):
                    found.append(f"call {k}: {name}: {x} on a device instead of {theirs}, at first {first}")
    branches = r["second"] in ("alternating", "in a cond") or r["skip"] == "cond"  # compiled when they are first taken
    if not got.wrong and r["mesh"] is None and not branches and got.last_compiles > 0 and want.last_compiles == 0:
        found.append(f"{got.last_compiles} compiles in the last call")
    if r["mesh"] is None:
        found += [f"not deleted: {each}" for each in want.deleted if each in got.kept]
    return found


def largest_norms(tree: Any) -> dict[tuple[int, ...], float]:
    """Return for each shape the largest norm of an array of floats."""
    found: dict[tuple[int, ...], float] = {}
    for x in filter(is_float, jax.tree.leaves(tree)):
        found[x.shape] = max(found.get(x.shape, 0.0), float(np.linalg.norm(np.nan_to_num(np.asarray(x, np.float64)))))
    return found


def difference(x: Any, y: Any, tolerance: float, rounding: float = 0.0) -> str | None:
    """Say how two arrays differ, if by more than ``tolerance`` times the norm of the second plus ``rounding``."""
    if x.shape != y.shape:
        return f"shape {x.shape} instead of {y.shape}"
    # Where the last bit of a moment differs, its code may be the next one; only zero lies between the codes -1 and 1.
    apart = np.abs(x.astype(int) - y) if x.dtype == y.dtype == np.int8 else None
    if apart is not None and np.all((apart <= 1) | ((apart == 2) & (x == -y))):
        return None
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return None if np.array_equal(x, y) else f"{x} instead of {y}"
    x, y = np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return "not finite in other places"
    error, norm = np.linalg.norm(x[finite] - y[finite]), np.linalg.norm(y[finite])
    return None if error <= tolerance * norm + rounding + 1e-9 else f"off by {error / max(norm, 1e-30):.1e}"


# ---- what is documented not to work ----------------------------------------------------------------------------------


def in_a_branch(r: Recipe) -> bool:
    """Whether the update is one of several, or in a branch or a loop of the step."""
    return bool(r["second"] or r["skip"] or r["accumulate"] or r["again"]) or r["outside"] == "apply_if_finite"


REFUSED: list[tuple[str, Callable[[Recipe, str], bool], str]] = [
    ("pipelined", lambda r, m: True, "its update runs the model again"),
    ("pipelined", lambda r, m: r["results"] == "nested", "the next value of each"),
    ("pipelined", lambda r, m: bool(r["second"] or r["target"]), "Return a dict with the carried arguments' names"),
    ("", lambda r, m: r["mesh"] == "explicit ZeRO-1", "shard_over: on a mesh with Explicit axes"),
    ("disk", lambda r, m: "moments" in r["metrics"], "outside its update"),
    ("disk", lambda r, m: r["optimizer"] == "rotating", "unchanged to"),
    ("disk", lambda r, m: r["skip"] == "select" or bool(r["again"]), "outside its one update"),
    ("disk", lambda r, m: r["gradients"] == "cast" or r["further leaf"] == "half", "where a leaf keeps its type"),
    # An optimizer may change the type of a state in its first update: a state of 16 bits, the momentum of integers, or
    # a state that keeps gradients of another type.
    (
        "pipelined",
        lambda r, m: r["further leaf"] in ("half", "integers") or "bfloat16" in r["dtype"] or r["gradients"] == "cast",
        "tree, shapes (and|or) dtypes",
    ),
    ("", lambda r, m: r["select"] is not None, "selects none of the"),
    ("pipelined, host", lambda r, m: True, "none that the update reads is a float array of 64 KiB"),
    ("pipelined, host", lambda r, m: in_a_branch(r), "Use gradients='device'"),
]


def refusal(r: Recipe, mode: str, error: Exception) -> bool:
    """Whether the docs say that this recipe raises this error in this mode."""
    return isinstance(error, ValueError | TypeError) and any(
        mode.startswith(where) and when(r, mode) and re.search(text, str(error)) for where, when, text in REFUSED
    )


def allowed(r: Recipe, mode: str) -> bool:
    """Whether the options of a recipe go with a mode; only gradients of 64 KiB and more wait on the host."""
    if mode.startswith("pipelined, host") and (r["width"] < 64 or in_a_branch(r)):
        return False
    return mode.startswith(("jax.jit", "jo.jit")) or r["fraction"] != 0.0


def variants(seed: int, many: int) -> list[tuple[Recipe, str]]:
    """Recipes that one run of plain optax serves, each in a mode of its own where the options allow as many."""
    first, found = random.Random(seed).randrange(len(MODES)), []
    for variant in range(many):
        r = recipe(seed, variant)
        modes = [mode for mode in MODES if allowed(r, mode)]
        found.append((r, modes[(first + variant) % len(modes)]))
    return found


def reference(r: Recipe) -> Record | Exception:
    """Plain optax under ``jax.jit``, or the error that it raises."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run(r, "plain", Path(folder))
        except Exception as error:
            return error


class Refused(Exception):
    """The package raises an error that its docs promise."""


def differences(r: Recipe, mode: str, want: Record) -> list[str]:
    """How a recipe in a mode differs from plain optax; an error is a difference.

    Raises:
      Refused: the docs say that this recipe raises an error in this mode, and it does.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            try:
                found = compared(r, run(r, mode, Path(folder)), want)
            finally:
                while OPEN:
                    OPEN.pop().close()
            return found + [text for each in warned if "rewriting failed" in (text := str(each.message))]
        except Exception as error:
            if refusal(r, mode, error):
                raise Refused(str(error)) from error
            where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            return [f"{type(error).__name__}: {str(error)[:400]} [{' '.join(where[-4:])}]"]


def check(r: Recipe, mode: str, want: Record) -> None:
    with contextlib.suppress(Refused):
        found = differences(r, mode, want)
        assert not found, (mode, odd(r), found[:4])


def kind_of(lines: list[str]) -> str:
    """What failures of one kind have in common."""
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?|\[.*", "#", lines[0])[:60] if lines else ""


def shrunk(r: Recipe, mode: str, lines: list[str], seconds: float = 60) -> tuple[Recipe, list[str]]:
    """The simplest recipe that was found to fail likewise: halves of what is odd are made simple, then quarters."""
    until, kind = time.monotonic() + seconds, kind_of(lines)
    size = max(1, len(odd(r)) // 2)
    while size:
        names = [*odd(r)]
        for at in range(0, len(names), size):
            trial = {**r, **{name: SIMPLE[name] for name in names[at : at + size]}}
            if time.monotonic() > until:
                return r, lines
            want = reference(trial)
            if isinstance(want, Exception):
                continue
            with contextlib.suppress(Refused):
                found = differences(trial, mode, want)
                if found and kind_of(found) == kind:
                    r, lines = trial, found
        size = size // 2 if size > 1 or len(odd(r)) == len(names) else 1
    return r, lines


def hunt(seeds: range, modes: Sequence[str] = MODES, many: int = 4) -> None:
    """Prints the differences of random steps, and shrinks the first of each kind.

    Args:
      seeds: of the recipes.
      modes: those to run.
      many: how many variants of a seed run.
    """
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in seeds:
        want = reference(recipe(seed))
        if isinstance(want, Exception):
            counts["plain raises"] += 1
            print(f"# {seed} plain raises {type(want).__name__}: {str(want)[:150]!r} {odd(recipe(seed))}", flush=True)
            continue
        for r, mode in variants(seed, many):
            if mode not in modes:
                continue
            try:
                lines = differences(r, mode, want)
            except Refused as error:
                counts[f"{mode}: refused"] += 1
                print(f"# {seed} {mode} refused: {str(error)[:80]}", flush=True)
                continue
            counts[f"{mode}: {'different' if lines else 'same'}"] += 1
            if lines:
                kinds[kind_of(lines)] += 1
                print(f"DIFFERENT {seed} {mode!r} {kind_of(lines)} {odd(r)}", flush=True)
                if kinds[kind_of(lines)] == 1:
                    small, lines = shrunk(r, mode, lines)
                    print(f"SMALL {mode!r} {json.dumps(odd(small))}\n    " + "\n    ".join(lines[:3]), flush=True)
        if seed % 10 == 9:
            jax.clear_caches()
            print(f"# {seed} {dict(sorted(counts.items()))}", flush=True)
    print(f"# end {dict(sorted(counts.items()))}\n# {kinds.most_common()}", flush=True)


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  (XLA reads its flags when jax first looks for devices)

    assert len(jax.devices()) >= 5, "run it with JAX_PLATFORMS=cpu"
    if sys.argv[1].startswith("{"):
        given = complete(json.loads(sys.argv[1]))
        plain = reference(given)
        if not (isinstance(plain, Exception) or sys.argv[2].startswith("pipelined")):
            print(placement_of(given, sys.argv[2]))
        print(
            plain if isinstance(plain, Exception) else "\n".join(differences(given, sys.argv[2], plain)) or "the same"
        )
    else:
        hunt(range(int(sys.argv[1]), int(sys.argv[2])), sys.argv[3].split("|") if sys.argv[3:] else MODES)
