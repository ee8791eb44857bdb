"""Keep master parameters: the optimizer's own, more precise copy of the model's parameters."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_offload._program.arrays import Offloaded
from jax_offload._program.memory import loaded, on_host
from jax_offload._program.primitives import mark, mark_of
from jax_offload._state.arguments import check_inner, check_on_device

LANDING = "brings a parameter to its master"  # marks such an update in the trace


class MasterState(NamedTuple):
    """State of ``with_master_params``.

    Attributes:
      master: a tree like the parameters, in the masters' dtype; ``optax.MaskedNode`` for parameters that need none.
        With ``low_bits``: the int16 bits that the parameter lacks.
      inner_state: the state of the wrapped transformation.
    """

    master: Any
    inner_state: Any


class WithMasterParams(optax.GradientTransformationExtraArgs):
    """The result of ``with_master_params``, whose type shows that an optimizer is wrapped already."""


def with_master_params(
    inner: optax.GradientTransformation, dtype: Any = jnp.float32, *, low_bits: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Update a float32 copy of the parameters, which the parameters then follow.

    This is mixed precision training (Micikevicius et al. 2018, arXiv:1710.03740).
    ``jo.offload(jo.with_master_params(optax.adamw(1e-3)))`` keeps the copies, the *master parameters*, in host memory
    and streams them with the moments. ``inner`` sees gradients and parameters in ``dtype``. Parameters that are already
    as precise as ``dtype`` get no master.

    Each parameter becomes exactly ``master.astype(param.dtype)`` if the old and the new value are zero or normal,
    their difference is finite, and the old value is less than 2^15 (bfloat16) or 2^12 (float16) times the new one in
    magnitude, unless the new one is zero. The updates have dtype ``dtype``.

    If you change a parameter from outside, by loading weights or swapping in an average, its master follows: the next
    update starts from the new value. The comparison is element by element and bit by bit, so that rounding within the
    bounds above cannot cause it. Beyond them, the master drops the amount that the parameter missed, at most 2^-24 of
    the parameter's old magnitude.

    Args:
      inner: any optax transformation that is not offloaded itself.
      dtype: the floating dtype of the masters.
      low_bits: for bfloat16 parameters, whether to keep only the 16 bits by which a float32 master differs: 2 bytes per
        parameter instead of 4. The master is read off both, so it follows a changed parameter by itself, to within half
        a unit in its last place. The parameter is then the master rounded to nearest with ties away from zero, because
        ties to even would make the bits ambiguous. Where ``optax.apply_updates`` would miss that value, beyond the
        bounds above, the master takes the value on which the parameter lands.

    Returns:
      A transformation whose state has the fields ``master`` and ``inner_state``. ``master`` is a tree like the
      parameters, with an ``optax.MaskedNode`` for each parameter without a master.

    Raises:
      TypeError: ``inner`` is not an optax transformation, or is an ``offload(...)``, which goes outside.
      ValueError: ``dtype`` is not floating or lacks the range of a parameter's dtype; a parameter that needs a master
        has fewer than 16 bits; ``low_bits`` is set and ``dtype`` is not float32 or a parameter is float16; ``update``
        is called without ``params`` or with other parameters than ``init``; or a chain inside an ``offload`` changes
        the updates behind the masters.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256), "bfloat16")}, jax.devices()[0])
      >>> tx = jo.offload(jo.with_master_params(optax.adamw(1e-3)))
      >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
      >>> params, state = jo.update_params(tx, grads, state, params)
      >>> params["w"].dtype.name, state.master["w"].dtype.name, state.master["w"].sharding.memory_kind
      ('bfloat16', 'float32', 'pinned_host')
    """
    if isinstance(inner, Offloaded):
        raise TypeError(f"inner: {_ORDER}")
    if isinstance(inner, WithMasterParams):
        raise TypeError("inner: is a with_master_params(...) already; wrap an optimizer once.")
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    check_inner(inner)
    with contextlib.suppress(TypeError):
        dtype = np.dtype(dtype)
    if not isinstance(dtype, np.dtype) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype: expected a floating dtype for master parameters, got {dtype!r}.")
    if not isinstance(low_bits, bool):
        raise ValueError(f"low_bits: expected True or False; got {low_bits!r}.")
    if low_bits and dtype != jnp.float32:
        raise ValueError(f"low_bits: completes bfloat16 to float32, so dtype must be float32; got {dtype}.")
    inner = optax.with_extra_args_support(inner)

    def needs_master(p: Any) -> bool:
        if not jnp.issubdtype(p.dtype, jnp.floating) or jnp.finfo(p.dtype).nmant >= jnp.finfo(dtype).nmant:
            return False
        if jnp.finfo(p.dtype).maxexp > jnp.finfo(dtype).maxexp:
            raise ValueError(f"dtype: masters of {dtype} have not the range of a parameter of {p.dtype}. Use float32.")
        if p.dtype.itemsize < 2:
            raise ValueError(f"params: masters are for parameters of 16 bits and more; got one of {p.dtype}.")
        if low_bits and p.dtype != jnp.bfloat16:
            raise ValueError(f"low_bits: completes bfloat16 parameters; got one of {p.dtype}. Set low_bits=False.")
        return True

    def init_fn(params: Any) -> MasterState:
        def kept(p: Any) -> Any:
            if not needs_master(p):
                return optax.MaskedNode()
            return jnp.zeros(p.shape, jnp.int16) if low_bits else p.astype(dtype)

        params = loaded(params)
        inner_state = inner.init(jax.tree.map(lambda p: p.astype(dtype) if needs_master(p) else p, params))
        return _in_order(MasterState(jax.tree.map(kept, params), inner_state))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError("params: with_master_params needs them; call tx.update(grads, state, params).")
        check_on_device(updates, params, "with_master_params alone streams nothing", state.master)
        leaves, treedef = jax.tree.flatten(params)
        try:
            kept = treedef.flatten_up_to(state.master)
        except (ValueError, TypeError) as error:
            raise ValueError(f"state: its masters do not fit parameters with the tree {treedef}: {error}") from error
        join, land = (_joined, _landing) if low_bits else (_following, _rounding)
        have_masters = [k for k, m in enumerate(kept) if not isinstance(m, optax.MaskedNode)]
        masters, grads = [*leaves], treedef.flatten_up_to(updates)
        for k in have_masters:
            masters[k], grads[k] = join(leaves[k], kept[k]), grads[k].astype(dtype)
        updates, inner_state = inner.update(
            treedef.unflatten(grads), state.inner_state, treedef.unflatten(masters), **extra_args
        )
        steps = treedef.flatten_up_to(updates)
        for k in have_masters:
            step, kept[k] = land(leaves[k], masters[k] + steps[k].astype(dtype))
            steps[k] = mark(step, LANDING)
        return treedef.unflatten(steps), _in_order(MasterState(treedef.unflatten(kept), inner_state))

    return WithMasterParams(init_fn, update_fn)


_ORDER = (
    "offload(...) goes outside, so that masters and moments stream together: "
    "jo.offload(jo.with_master_params(inner)), not jo.with_master_params(jo.offload(inner))."
)


def _in_order(state: MasterState) -> MasterState:
    """Return the state; raise ``TypeError`` if an ``offload`` inside keeps leaves on the host."""
    if any(map(on_host, jax.tree.leaves(state.inner_state))):
        raise TypeError(_ORDER)
    return state


def check_last_word(updates: Any, state: Any) -> None:
    """Raise ``ValueError`` if a traced chain has changed the updates of masters.

    The parameter would then miss its master, and the master would follow it and lose the bits that it is kept for. Only
    chains with something behind the masters are checked: a wrapper may choose between updates.
    """

    def is_chain(x: Any) -> bool:
        return type(x) is tuple and bool(masters_in(x[:-1]))

    chained = any(map(is_chain, jax.tree.leaves(state, is_leaf=is_chain)))
    if chained and sum(mark_of(x) == LANDING for x in jax.tree.leaves(updates)) < len(masters_in(state)):
        raise ValueError(
            "inner: a chain changes the updates behind with_master_params, so that the parameters leave their "
            "masters in every step. Masters come last: not optax.chain(jo.with_master_params(x), y), but "
            "jo.with_master_params(optax.chain(x, y))."
        )


def masters_in(state: Any) -> list[Any]:
    """Return all masters in a state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MasterState))
    return jax.tree.leaves([node.master for node in nodes if isinstance(node, MasterState)])


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round as ``x.astype(dtype).astype(x.dtype)`` does, which XLA would simplify to ``x``."""
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp <= jnp.finfo(x.dtype).minexp:
        return normal
    # numbers that are subnormal in the narrower dtype, which reduce_precision would make zero
    steps = lax.round(x * 2.0 ** (info.nmant - info.minexp), lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(x) < 2.0**info.minexp, steps * 2.0 ** (info.minexp - info.nmant), normal)


def _following(p: jax.Array, master: jax.Array) -> jax.Array:
    """Return the master of ``p``, or ``p`` itself where it is not the rounded master: something has changed it."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[p.dtype.itemsize]
    was, now = (lax.bitcast_convert_type(x, unsigned) for x in (master.astype(p.dtype), p))  # XLA cannot look through
    same = (was == now) | (((was | now) << 1) == 0)  # p + -0 is +0
    return jnp.where(same, master, p.astype(master.dtype))


def _rounding(p: jax.Array, master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the update that brings ``p`` to the rounded master, and the master."""
    return rounded(master, p.dtype) - p.astype(master.dtype), master


def _joined(p: jax.Array, low: jax.Array) -> jax.Array:
    """Join a bfloat16 parameter and the bits that it lacks to its float32 master; zero, infinity and NaN stay."""
    high = lax.bitcast_convert_type(p, jnp.uint16).astype(jnp.int32) << 16
    master = lax.bitcast_convert_type(high + low.astype(jnp.int32), jnp.float32)
    return jnp.where((p == 0) | ~jnp.isfinite(p), p.astype(jnp.float32), master)


def _landing(p: jax.Array, master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the update that brings ``p`` to the rounded master, and the bits that it then lacks."""
    bits, nan, old = lax.bitcast_convert_type(master, jnp.int32), jnp.isnan(master), p.astype(jnp.float32)
    nearest = lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)  # ties away from zero
    target = jnp.where(nan, jnp.nan, nearest)
    update = target - old
    reached = lax.bitcast_convert_type(rounded(old + update, jnp.bfloat16), jnp.int32)
    low = bits - reached
    return update, jnp.where(nan | (low != low.astype(jnp.int16)), 0, low).astype(jnp.int16)
