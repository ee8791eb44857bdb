"""Every optimizer of optax and optax.contrib, with arguments, and a small problem to run them on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib


def network(dtype: Any) -> Any:
    """Parameters of a small network: a table, two layers, a rank-3 leaf, biases, a scalar, a head.

    Few different shapes, because XLA compiles a loop for each. 40 rows are more than one chunk of a streamed leaf.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)

    return {
        "embed": {"table": normal(40, 8)},
        "layers_2": {"b": normal(8), "w": normal(40, 8)},
        "layers_10": {"b": normal(8), "w": normal(40, 8)},
        "mix": normal(8, 2, 4),
        "scale": jnp.asarray(0.5, dtype),
        "head": normal(40, 8),
    }


TOKENS = np.random.default_rng(1).integers(0, 40, size=(6, 9))


def losses(params: Any, tokens: Any = TOKENS) -> jax.Array:
    """Next-token losses of the network, one for every sequence, in float32."""
    x = params["embed"]["table"][tokens]
    h = jnp.tanh((x + params["layers_2"]["b"]) @ params["layers_2"]["w"].T)
    x = x + jnp.tanh(h @ params["layers_10"]["w"] + params["layers_10"]["b"])
    x = x + params["scale"] * jnp.einsum("std,dhk->sthk", x, params["mix"]).reshape(x.shape)
    logits = (x @ params["head"].T).astype(jnp.float32)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(tokens)[:, 1:]).mean(1)


def mean_loss(params: Any) -> jax.Array:
    return losses(params).mean()


def bowl(params: Any) -> jax.Array:
    """A convex loss that is cheap to compile, for what evaluates it, or its curvature, inside the update."""
    leaves = [p.astype(jnp.promote_types(p.dtype, jnp.float32)) for p in jax.tree.leaves(params)]
    return sum(jnp.mean((i + 1) * jnp.abs(p - 0.3) ** 2 + jnp.abs(p) ** 4) for i, p in enumerate(leaves))


@dataclasses.dataclass(frozen=True)
class Entry:
    """How to make one optimizer and how to call it.

    Attributes:
      make: the transformation.
      extra: the extra arguments that its update takes: some of ``value``, ``grad``, ``value_fn``, ``obj_fn``.
      scale: what its updates are multiplied with before they are applied, outside the wrapper: 1 for an optimizer, a
        small negative number for a transformation whose output is a direction.
      per_example: whether its gradients have a leading axis of examples.
      complex: whether it is for complex parameters.
      state: whether it has state of rank >= 1, which must be on the host.
      loss: of the network's parameters.
      params: from the network's parameters to what the optimizer calls parameters, and
      network: back.
      grads: from the gradient for the optimizer's parameters to what its update takes.
      tolerance: of float32 updates, where they are differences of close numbers.
    """

    make: Callable[[], optax.GradientTransformation]
    extra: tuple[str, ...] = ()
    scale: float = 1.0
    per_example: bool = False
    complex: bool = False
    state: bool = True
    loss: Callable[[Any], jax.Array] = mean_loss
    params: Callable[[Any], Any] = lambda params: params
    network: Callable[[Any], Any] = lambda params: params
    grads: Callable[[Any], Any] = lambda grads: grads
    tolerance: float = 1e-6


def _direction(make: Callable[[], Any], scale: float = -1e-2, **options: Any) -> Entry:
    return Entry(make, scale=scale, **options)


def _stateless(make: Callable[[], Any], scale: float = -1e-1, **options: Any) -> Entry:
    return Entry(make, scale=scale, state=False, **options)


def decay(step: Any) -> Any:
    return 1e-2 / (1.0 + 0.1 * step)


def matrices(params: Any) -> Any:
    """A mask: the parameters of rank two and more."""
    return jax.tree.map(lambda p: jnp.ndim(p) >= 2, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if jnp.ndim(p) >= 2 else "rest", params)


def _measures(updates: Any) -> Any:
    """A measure with leaves of rank >= 1 for ``snapshot`` and ``monitor``."""
    return jax.tree.map(lambda u: jnp.abs(u).astype(jnp.float32), updates)


def every_third(step: Any) -> Any:
    return step % 3 != 2


def _without_scalars(params: Any) -> Any:
    """For sm3, which cannot do parameters of rank 0."""
    return {**params, "scale": params["scale"][None]}


def _few(params: Any) -> Any:
    """For what takes long to compile."""
    return {name: params[name] for name in ("layers_2", "layers_10", "scale")}


def _with_scalars(params: Any) -> Any:
    return {**params, "scale": params["scale"][0]}


_ADAM = lambda: optax.adam(1e-2)  # noqa: E731
_LINESEARCH = {"extra": ("value", "grad", "value_fn"), "loss": bowl, "params": _few}

# The parameter-free optimizers start where rounding does not decide about their growth: from smaller first steps, a
# change of 1e-7 in the parameters changes the resident optimizer's own losses by 1e-2.
# A name is that of the public factory; what stands behind a colon tells variants apart.
TABLE: dict[str, Entry] = {
    # ---- optimizers of optax
    "adabelief": Entry(lambda: optax.adabelief(1e-2)),
    "adadelta": Entry(lambda: optax.adadelta(1.0, weight_decay=1e-3)),
    "adafactor": Entry(lambda: optax.adafactor(1e-2)),
    "adafactor:factored": Entry(
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9, weight_decay_rate=1e-3)
    ),
    "adagrad": Entry(lambda: optax.adagrad(1e-1)),
    "adam": Entry(lambda: optax.adam(1e-2)),
    "adam:schedule": Entry(lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 60))),
    "adam:float32": Entry(lambda: optax.adam(1e-2, mu_dtype=jnp.float32)),
    "adamax": Entry(lambda: optax.adamax(1e-2)),
    "adamaxw": Entry(lambda: optax.adamaxw(1e-2, mask=matrices)),
    "adamw": Entry(lambda: optax.adamw(1e-2)),
    "adamw:masked": Entry(lambda: optax.adamw(decay, mu_dtype=jnp.bfloat16, mask=matrices, nesterov=True)),
    "adan": Entry(lambda: optax.adan(1e-2, weight_decay=1e-3)),
    "amsgrad": Entry(lambda: optax.amsgrad(1e-2)),
    "fromage": Entry(lambda: optax.fromage(1e-2), state=False),
    "lamb": Entry(lambda: optax.lamb(1e-2, weight_decay=1e-3)),
    "lars": Entry(lambda: optax.lars(1e-1, weight_decay=1e-3)),
    "lbfgs": Entry(lambda: optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(4)), **_LINESEARCH),
    "lbfgs:fixed": Entry(lambda: optax.lbfgs(1e-2, memory_size=3, linesearch=None), loss=bowl, params=_few),
    "lion": Entry(lambda: optax.lion(1e-3)),
    "nadam": Entry(lambda: optax.nadam(1e-2)),
    "nadamw": Entry(lambda: optax.nadamw(1e-2)),
    "noisy_sgd": Entry(lambda: optax.noisy_sgd(1e-1, key=0), state=False),
    "novograd": Entry(lambda: optax.novograd(1e-2)),
    "optimistic_adam": Entry(lambda: optax.optimistic_adam(1e-2)),
    "optimistic_adam_v2": Entry(lambda: optax.optimistic_adam_v2(1e-2)),
    "optimistic_gradient_descent": Entry(lambda: optax.optimistic_gradient_descent(1e-1)),
    "polyak_sgd": Entry(lambda: optax.polyak_sgd(0.5), ("value",), state=False),
    "polyak_sgd:plus": Entry(lambda: optax.polyak_sgd(0.5, variant="sps+"), ("value", "grad"), state=False),
    "radam": Entry(lambda: optax.radam(1e-2)),
    "rmsprop": Entry(lambda: optax.rmsprop(1e-2)),
    "rmsprop:centered": Entry(
        lambda: optax.rmsprop(1e-3, eps=1e-2, centered=True, momentum=0.9, nesterov=True, bias_correction=True)
    ),
    "rprop": Entry(lambda: optax.rprop(1e-3)),
    "sgd": Entry(lambda: optax.sgd(1e-1), state=False),
    "sgd:momentum": Entry(lambda: optax.sgd(decay, momentum=0.9, nesterov=True, accumulator_dtype=jnp.float32)),
    "sign_sgd": Entry(lambda: optax.sign_sgd(1e-3), state=False),
    "signum": Entry(lambda: optax.signum(1e-3)),
    "sm3": Entry(lambda: optax.sm3(1e-2), params=_without_scalars, network=_with_scalars),
    "yogi": Entry(lambda: optax.yogi(1e-2)),
    # ---- transformations of optax
    "adaptive_grad_clip": _stateless(lambda: optax.adaptive_grad_clip(1e-2)),
    "add_decayed_weights": _stateless(lambda: optax.add_decayed_weights(1e-2, mask=matrices)),
    "add_noise": _stateless(lambda: optax.add_noise(1e-2, 0.55, key=0)),
    "apply_every": _direction(lambda: optax.apply_every(3)),
    "centralize": _stateless(lambda: optax.centralize()),
    "clip": _stateless(lambda: optax.clip(1e-2)),
    "clip_by_block_rms": _stateless(lambda: optax.clip_by_block_rms(1e-2)),
    "clip_by_global_norm": _stateless(lambda: optax.clip_by_global_norm(1e-1)),
    "ema": _direction(lambda: optax.ema(0.9), -1e-1),
    "ema:float32": _direction(lambda: optax.ema(0.9, debias=False, accumulator_dtype=jnp.float32), -1e-1),
    "freeze": _stateless(lambda: optax.freeze(False)),
    "identity": _stateless(lambda: optax.identity()),
    "keep_params_nonnegative": _stateless(lambda: optax.keep_params_nonnegative(), 1e-2),
    "measure_with_ema": _direction(lambda: optax.measure_with_ema(_measures, 0.9)),
    "monitor": _direction(
        lambda: optax.monitor({"abs": _measures, "mean": optax.measure_with_ema(_measures, 0.9, debias=False)})
    ),
    "normalize_by_update_norm": _stateless(lambda: optax.normalize_by_update_norm()),
    "scale": _stateless(lambda: optax.scale(-1e-1), 1.0),
    "scale_by_adadelta": _direction(lambda: optax.scale_by_adadelta(), -1.0),
    "scale_by_adam": _direction(lambda: optax.scale_by_adam()),
    "scale_by_adamax": _direction(lambda: optax.scale_by_adamax()),
    "scale_by_adan": _direction(lambda: optax.scale_by_adan()),
    "scale_by_amsgrad": _direction(lambda: optax.scale_by_amsgrad(bias_correction_nu=False)),
    "scale_by_backtracking_linesearch": _stateless(
        lambda: optax.chain(optax.scale(-1.0), optax.scale_by_backtracking_linesearch(5)), 1.0, **_LINESEARCH
    ),
    "scale_by_backtracking_linesearch:store": Entry(
        lambda: optax.chain(optax.scale(-1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)),
        **_LINESEARCH,
    ),
    "scale_by_belief": _direction(lambda: optax.scale_by_belief()),
    "scale_by_distance_over_gradients": _direction(lambda: optax.scale_by_distance_over_gradients(), -1.0),
    "scale_by_factored_rms": _direction(lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4)),
    "scale_by_lbfgs": _direction(lambda: optax.scale_by_lbfgs(memory_size=3), loss=bowl, params=_few),
    "scale_by_learning_rate": _stateless(lambda: optax.scale_by_learning_rate(decay), 1.0),
    "scale_by_lion": _direction(lambda: optax.scale_by_lion(), -1e-3),
    "scale_by_novograd": _direction(lambda: optax.scale_by_novograd()),
    "scale_by_optimistic_gradient": _direction(lambda: optax.scale_by_optimistic_gradient(), -1e-1),
    "scale_by_param_block_norm": _stateless(lambda: optax.scale_by_param_block_norm()),
    "scale_by_param_block_rms": _stateless(lambda: optax.scale_by_param_block_rms()),
    "scale_by_polyak": _stateless(lambda: optax.scale_by_polyak(), -0.5, extra=("value",)),
    "scale_by_radam": _direction(lambda: optax.scale_by_radam()),
    "scale_by_rms": _direction(lambda: optax.scale_by_rms()),
    "scale_by_rprop": _direction(lambda: optax.scale_by_rprop(1e-3), 1.0),
    "scale_by_rss": _direction(lambda: optax.scale_by_rss()),
    "scale_by_schedule": _stateless(lambda: optax.scale_by_schedule(decay), -1.0),
    "scale_by_sign": _stateless(lambda: optax.scale_by_sign(), -1e-3),
    "scale_by_sm3": _direction(lambda: optax.scale_by_sm3(), params=_without_scalars, network=_with_scalars),
    "scale_by_stddev": _direction(lambda: optax.scale_by_stddev()),
    "scale_by_trust_ratio": _stateless(lambda: optax.scale_by_trust_ratio(), -1e-2),
    "scale_by_yogi": _direction(lambda: optax.scale_by_yogi()),
    "scale_by_zoom_linesearch": Entry(
        lambda: optax.chain(optax.scale(-1.0), optax.scale_by_zoom_linesearch(4)), **_LINESEARCH
    ),
    "set_to_zero": _stateless(lambda: optax.set_to_zero()),
    "snapshot": _direction(lambda: optax.snapshot("abs", _measures)),
    "stateless": _stateless(lambda: optax.stateless(lambda g, p: jax.tree.map(lambda g, p: g + 0.01 * p, g, p))),
    "stateless_with_tree_map": _stateless(lambda: optax.stateless_with_tree_map(lambda g, p: g + 0.01 * p)),
    "trace": _direction(lambda: optax.trace(0.9, nesterov=True)),
    "zero_nans": _stateless(lambda: optax.zero_nans()),
    # ---- wrappers of optax around an optimizer (more of them, inside and outside, in tests/test_optimizers.py)
    "MultiSteps": Entry(lambda: optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation()),
    "MultiSteps:skip": Entry(
        lambda: optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
            3,
            should_skip_update_fn=optax.skip_not_finite,
        ).gradient_transformation()
    ),
    "apply_if_finite": Entry(lambda: optax.apply_if_finite(optax.adamw(1e-2), 3)),
    "chain": Entry(lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2), optax.ema(0.9))),
    "conditionally_mask": Entry(lambda: optax.conditionally_mask(_ADAM(), every_third)),
    "conditionally_transform": Entry(
        lambda: optax.chain(optax.conditionally_transform(optax.scale_by_adam(), every_third), optax.scale(-1e-2))
    ),
    "flatten": Entry(lambda: optax.flatten(_ADAM())),
    "inject_hyperparams": Entry(
        lambda: optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(decay, weight_decay=1e-3)
    ),
    "inject_stateful_hyperparams": Entry(
        lambda: optax.inject_stateful_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(
            learning_rate=optax.schedules.WrappedSchedule(decay)
        )
    ),
    "lookahead": Entry(
        lambda: optax.lookahead(_ADAM(), 3, 0.5),
        params=optax.LookaheadParams.init_synced,
        network=lambda params: params.fast,
        grads=lambda grads: grads.fast,
    ),
    "masked": Entry(lambda: optax.masked(_ADAM(), matrices)),
    "multi_transform": Entry(lambda: optax.multi_transform({"matrix": _ADAM(), "rest": optax.set_to_zero()}, labels)),
    "named_chain": Entry(lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", _ADAM()))),
    "partition": Entry(lambda: optax.partition({"matrix": _ADAM(), "rest": optax.sgd(1e-1, 0.9)}, labels)),
    "selective_transform": Entry(
        lambda: optax.selective_transform(_ADAM(), freeze_mask=matrices(_few(network(jnp.float32)))),
        params=_few,
        loss=bowl,
    ),
    "with_extra_args_support": Entry(lambda: optax.with_extra_args_support(_ADAM()), ("value",)),
    # ---- optax.contrib
    "acprop": Entry(lambda: contrib.acprop(1e-2)),
    "ademamix": Entry(lambda: contrib.ademamix(1e-2, weight_decay=1e-3)),
    "adopt": Entry(lambda: contrib.adopt(1e-2)),
    "cocob": Entry(lambda: contrib.cocob()),
    "dadapt_adamw": Entry(lambda: contrib.dadapt_adamw(0.1, estim_lr0=1e-2)),
    "differentially_private_aggregate": _stateless(
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, key=0), per_example=True
    ),
    "dog": Entry(lambda: contrib.dog(init_step=("distance", 1e-2)), loss=bowl),
    "dowg": Entry(lambda: contrib.dowg(init_estim_sq_dist=1e-2), loss=bowl),
    "dpsgd": Entry(lambda: contrib.dpsgd(1e-1, 1.0, 0.1, seed=0, momentum=0.9), per_example=True),
    "galore": Entry(lambda: optax.masked(contrib.galore(1e-2, rank=4, update_proj_gap=20), matrices)),
    "hutchinson_estimator_diag_hessian": _direction(
        lambda: contrib.hutchinson_estimator_diag_hessian(), -1e-3, extra=("obj_fn",), loss=bowl
    ),
    "madgrad": Entry(lambda: contrib.madgrad(1e-2), tolerance=5e-6),  # its updates: new parameters less old ones
    "mechanize": Entry(lambda: contrib.mechanize(optax.adamw(1e-2), s_init=1e-3)),
    "momo": Entry(lambda: contrib.momo(1e-1), ("value",)),
    "momo_adam": Entry(lambda: contrib.momo_adam(1e-2), ("value",)),
    "muon": Entry(lambda: contrib.muon(1e-2)),
    "normalize": _stateless(lambda: contrib.normalize()),
    "prodigy": Entry(lambda: contrib.prodigy(0.1, estim_lr0=1e-2)),
    "reduce_on_plateau": Entry(
        lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=2, rtol=0.1)), ("value",)
    ),
    "sam": Entry(lambda: contrib.sam(optax.adam(1e-2), optax.chain(contrib.normalize(), optax.sgd(1e-2)))),
    "scale_by_acprop": _direction(lambda: contrib.scale_by_acprop()),
    "scale_by_ademamix": _direction(lambda: contrib.scale_by_ademamix()),
    "scale_by_adopt": _direction(lambda: contrib.scale_by_adopt()),
    "scale_by_cocob": _direction(lambda: contrib.scale_by_cocob(), 1.0),
    "scale_by_galore": Entry(
        lambda: optax.masked(contrib.scale_by_galore(rank=4, base_optimizer=optax.scale_by_adam()), matrices),
        scale=-1e-2,
    ),
    "scale_by_madgrad": _direction(lambda: contrib.scale_by_madgrad(1e-2), 1.0, tolerance=5e-6),
    "scale_by_muon": _direction(
        lambda: contrib.scale_by_muon(
            weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), tree)
        ),
        loss=bowl,
        params=lambda params: [params["layers_2"]["w"], params["layers_10"]["w"]],
    ),
    "scale_by_simplified_ademamix": _direction(lambda: contrib.scale_by_simplified_ademamix(), -1e-4),
    "schedule_free": Entry(lambda: contrib.schedule_free(optax.adamw(1e-2, b1=0.0), 1e-2), tolerance=1e-5),
    "schedule_free_adamw": Entry(lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=5), tolerance=1e-5),
    "schedule_free_sgd": Entry(lambda: contrib.schedule_free_sgd(1e-1), tolerance=1e-5),
    "simplified_ademamix": Entry(lambda: contrib.simplified_ademamix(1e-4)),
    "sophia": Entry(lambda: contrib.sophia(1e-2, update_interval=3), ("obj_fn",), loss=bowl),
    "split_real_and_imaginary": Entry(lambda: contrib.split_real_and_imaginary(_ADAM()), complex=True, loss=bowl),
}

NOT_FACTORIES: dict[str, str] = {
    # public, and without an annotation of what they return
    "bias_correction": "a moment, not a transformation",
    "matrix_inverse_pth_root": "linear algebra",
    "schedule_free_eval_params": "reads a state",
    "sigmoid_binary_cross_entropy": "a loss",
    "update_infinity_moment": "a moment, not a transformation",
    "update_moment": "a moment, not a transformation",
    "update_moment_per_elem_norm": "a moment, not a transformation",
}


def public_factories() -> set[str]:
    """What optax and optax.contrib offer that returns a transformation, or does not say what it returns."""
    found = set()
    for module in (optax, contrib):
        for name, value in vars(module).items():
            if name.startswith("_") or not callable(value):
                continue
            if inspect.isclass(value):
                if hasattr(value, "gradient_transformation"):
                    found.add(name)
            elif name[0].islower():
                returns = inspect.signature(value).return_annotation
                if returns is inspect.Signature.empty or "GradientTransformation" in str(returns):
                    found.add(name)
    return found


# ---- comparing -------------------------------------------------------------------------------------------------


def copied(tree: Any) -> Any:
    """``tree`` in new buffers of its own, which can be donated."""

    def copy(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.wrap_key_data(jax.random.key_data(x).copy()), x.sharding)
        return jax.device_put(np.array(x), x.sharding)

    return jax.tree.map(copy, tree)


def assert_same(got: Any, want: Any, what: str, tolerance: float = 1e-6) -> None:
    """Law 2, leaf by leaf: the tree, shapes and types are equal, and so are the numbers.

    Whole numbers, booleans and keys exactly; floats of 32 bits to ``‖a − b‖ ≤ tolerance ‖b‖``; floats of 16 bits to one
    unit in the last place of the larger of the two, element by element, in the leaf's own dtype. NaN and
    infinity must stand in the same places.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(got)
    assert treedef == jax.tree.structure(want), what
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        where = f"{what}: {jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        else:
            assert a.weak_type == b.weak_type, where
        x, y = np.asarray(a), np.asarray(b)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            assert np.array_equal(x, y), where
            continue
        bits, tiny = jnp.finfo(x.dtype).nmant, float(jnp.finfo(x.dtype).tiny)
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        x, y = x.astype(wide).ravel(), y.astype(wide).ravel()
        finite = np.isfinite(y)
        assert np.array_equal(x[~finite], y[~finite], equal_nan=True), f"{where}: {x[~finite]} instead of {y[~finite]}"
        x, y = x[finite], y[finite]
        if bits > 10:
            error, scale = np.linalg.norm(x - y), np.linalg.norm(y)
            assert error <= tolerance * scale, f"{where}: off by {error / max(scale, tiny):.1e}"
        elif x.size:
            ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.maximum(np.abs(x), np.abs(y)), tiny))) - bits)
            assert np.all(np.abs(x - y) <= ulp), f"{where}: off by {np.max(np.abs(x - y) / ulp):.1f} ulp"


def eligible(x: jax.Array) -> bool:
    """Whether a leaf may be on the host at all: of rank >= 1, not empty, not a key."""
    return x.ndim > 0 and x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
