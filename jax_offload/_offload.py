"""Wrap an optax optimizer so that its state lives in pinned host memory; update and apply in one; move to the host."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from jax_offload._disk.disk import Disk
from jax_offload._disk.leaves import only_outside, opened
from jax_offload._emit.recipe import (
    checked_skip,
    old_where,
    replicated_into,
    returned,
    sharded_params,
    streamed,
    where_it_was,
    zero_where,
)
from jax_offload._emit.region import holds_update
from jax_offload._emit.run import put_whole
from jax_offload._program import memory
from jax_offload._program.arrays import Offloaded, is_array, is_traced, types_of
from jax_offload._program.memory import (
    DEFAULT_MIN_BYTES,
    Layouts,
    in_host_memory,
    inside_shard_map,
    loaded,
    on_host,
    sharding_of,
    stored,
    types_tell,
)
from jax_offload._program.primitives import Home, guarded, together
from jax_offload._program.private import traces
from jax_offload._rewrite.inlined import traced_step
from jax_offload._rewrite.rewritten import rewritten
from jax_offload._schedule.schedule import Options, merged
from jax_offload._state import arguments
from jax_offload._state.arguments import described
from jax_offload._state.masters import check_last_word
from jax_offload._state.placement import Policy, Select, marked, place, warn_of_nothing
from jax_offload._state.state import (
    check_typed,
    created,
    described_state,
    partitions,
    resharded,
    resharded_state,
    state_where_kept,
)
from jax_offload._state.storage import adopted, rules_of, warn_of_unstored, with_storage


def offload(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    fraction: Any = 1.0,
    select: Select = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    window: int | None = None,
    shard_over: str | Sequence[str] | None = None,
    storage: Any = None,
    update_on: Any = "device",
    disk: Disk | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep the state of ``inner`` in pinned host memory, and stream it through the device inside ``update``.

    The state keeps the tree, shapes and dtypes of ``inner``; only the memory kinds differ. The arithmetic is unchanged
    and runs on the device. ``init`` and ``update`` have optax's signatures and pass extra arguments on.

    Args:
      inner: any optax transformation, or an ``optax.MultiSteps``.
      fraction: the share of the eligible bytes, over all devices, that lives on the host: a float in [0, 1], or a
        pytree prefix of the parameters with a float for each subtree. Leaves are taken in the order of the backward
        pass that the paths suggest, ``layers_10`` before ``layers_2``, as close to the share as whole leaves allow.
        With 0, and without ``shard_over`` and ``storage``, the
        compiled program is the same as with ``inner`` alone; the other options are still checked.
      select: the parameters whose state may move: a pytree prefix of the parameters with bools; one or several regular
        expressions, searched in a parameter's path ``a/b/c``; or a function of that path and the state leaf. A rule
        that matches no parameter is an error, and so is a choice that selects no leaf.
      min_bytes: the size in bytes below which a state leaf stays on the device, 64 KiB by default. Scalars and PRNG
        keys always stay.
      window: the bytes of state that are on a device at a time while the state streams. A group of leaves that one
        update needs together, and that is larger than the window, goes through a loop in chunks of half a window if its
        rows can be updated independently; otherwise it is loaded whole. ``None`` makes room for two and a half of the
        largest usual groups, so that one loads while another is updated; it makes less room if that would be more than
        256 MiB and a large part of the state. ``jax_offload.placement`` prints the window and why it has that size,
        and how each leaf streams.
      shard_over: the mesh axes, such as ``"data"``, over which to divide the state of parameters that are replicated
        there (ZeRO-1, Rajbhandari et al. 2020). Leaves of their parameter's shape and of ``min_bytes`` or more are
        divided, along the first axis that divides evenly and is not sharded yet; in leaves with three or more axes the
        first axis, which counts the layers of a scanned model, is tried last. Gradients are scattered before the update
        and updates gathered after it; ``jax_offload.update_params`` gathers the new parameters instead.
      storage: the dtypes in which to store leaves: one dtype for all floating leaves except masters, or a mapping from
        paths in the state to dtypes, ``{"mu": "bfloat16", "nu": "uint8"}``. ``jax_offload.Storage`` lists the formats.
        A path is a regular expression that matches whole components of ``0/mu/layers/w``; the first match counts, and a
        path that matches nothing is an error. Leaves below ``min_bytes``, and leaves that would not shrink, keep their
        dtype. ``inner`` computes in its own dtypes: each chunk is decoded and encoded on the device, with stochastic
        rounding that depends on the step, the leaf and the position. Derivatives do not pass through a stored state.
        The state becomes a ``StoredState``, which ``jax_offload.to_plain`` and ``from_plain`` convert.
      update_on: who updates the state in host memory. With ``"device"`` the accelerator does. With ``"host"`` the
        host's cores do: gradients go down, parameters come up, and the state never moves (ZeRO-Offload, Ren et al.
        2021). A float in [0, 1] is the share of bytes that the cores update while the accelerator updates the rest;
        whole parameters go to one side, and the cores take those whose gradients appear first. A pytree prefix of the
        parameters sets it for each subtree. Rules, ``[("embed", "host"), ("layers_.*/mlp", 0.5)]``, are regular
        expressions searched in a parameter's path: the first match counts, unmatched parameters update on the device,
        and a rule that matches no parameter is an error. Only a step of ``jax_offload.jit`` or ``pipelined`` can do
        that (docs/host_cores.md).
      disk: a ``jax_offload.disk``, whose files hold the part of the state that exceeds its ``host_bytes``. Each step of
        ``jax_offload.jit`` reads that part, updates it on the device and writes it, group by group. A placeholder
        stands for such a leaf in the state, and ``numpy.asarray`` reads it; ``disk.commit`` saves the state. It
        cannot be combined with ``update_on`` (docs/disk.md).

    Returns:
      A transformation whose ``update`` leaves each state leaf where the options say, wherever it came from: a resident
      state becomes an offloaded one in its first step. Except with ``update_on`` or ``disk``, gradients and parameters
      may be in pinned host memory too: they are streamed with the state, and each update returns to the memory of its
      gradient. ``update(..., skip=)`` takes a bool, traced or not; where it is true the updates are zero and the state
      keeps every bit. A transformation around this one does not see the skip and still counts the step;
      ``update_params(..., skip=)`` skips it too. Outside any ``jit`` an update is compiled as ``jax.jit`` would compile
      it: it reads closures at the first call only, and recompiles when an extra argument that is a function, an int or
      a string changes.

    Raises:
      TypeError: ``inner`` is not an optax transformation, or is already an ``offload(...)``.
      ValueError: an option is out of range or does not fit the parameters, the platform has no pinned host memory, or a
        state belongs to another optimizer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
      >>> state = tx.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> step = jo.jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=(0, 1))
      >>> params, state = step(params, state, grads)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'
    """
    arguments.check_not_nested(inner)
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    arguments.check_inner(inner)
    said: dict[str, Any] = {
        "fraction": fraction, "select": select, "min_bytes": min_bytes, "window": window,
        "shard_over": shard_over, "update_on": update_on, "disk": disk,
    }  # fmt: skip
    policy = Policy(**said)
    rules = rules_of(storage)
    optimizer = inner = optax.with_extra_args_support(inner)
    inner = with_storage(inner, rules, min_bytes) if rules else inner
    nothing_moves = policy.moves_nothing and not policy.shard_over and not rules
    remembered = arguments.Remembered()
    home = Home()

    def init_fn(params: optax.Params) -> optax.OptState:
        arguments.check_not_nested()
        arguments.check_params(params)
        own = arguments.shardings_of(params)

        def create(params: Any) -> Any:
            with arguments.within(within_offload=True):
                state = inner.init(loaded(params))
            plan = place(policy, state, params)
            if any(leaf.host for leaf in plan):
                state = _on_devices_of(params, state)
            known = {**remembered.unambiguous(params), **own}  # of others out_shardings say how the state is divided
            state = stored(resharded_state(state, plan, params, known), [leaf.host for leaf in plan])
            state = guarded(state, home=home, where="init")
            if arguments.facts().runs:
                warn_of_nothing(plan, policy)
                rows = iter(plan)
                return jax.tree.map(lambda x: only_outside(x) if next(rows).disk else x, state)
            return marked(state, plan, disk)

        leaves = jax.tree.leaves(params)
        if not leaves or any(isinstance(x, Tracer) or not is_array(x) for x in leaves) or traces():
            state = create(params)
        else:
            # One compiled program, also in eager use: XLA makes a leaf, sends it to the host and makes the next, and a
            # sharded leaf is born sharded.
            rows, target = described_state(Offloaded(create, update_fn), params, remember=True)
            arguments.check_eager(params, rows, jax.tree.leaves(target))
            if disk is None:
                state = jax.jit(create, out_shardings=jax.tree.map(lambda x: x.sharding, target))(params)
            else:
                state = created(disk, create, params, target)
            home.reached |= any(map(on_host, jax.tree.leaves(state)))
        if rules and arguments.facts().remembers:
            warn_of_unstored(rules, state)
        remembered.remember(own)
        return state

    @arguments.compiled_where_eager(like=lambda updates, state, params=None, **_: updates if params is None else params)
    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        skip: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        skip = checked_skip(skip)
        arguments.check_not_nested()
        state, in_files = opened(state)
        state, params = arguments.from_host(state, params)
        arguments.check_no_state("updates", updates)
        arguments.check_no_state("params", params)
        arguments.check_gradients(updates, params)
        like = updates if params is None else params
        if rules:
            state = adopted(state, like, inner.init)
        from_types = arguments.shardings_of(like)
        from_memory = {p: s for p, s in inside_shard_map(remembered.unambiguous(like)).items() if p not in from_types}
        shardings = {**from_memory, **from_types}
        plan = place(policy, state, like)
        sharded: Layouts = {}
        if policy.shard_over:
            sharded = partitions(plan, like, shardings, remembered)
        arguments.arrived(home, jax.tree.leaves(state), plan)
        state = returned(state, plan)
        on_cores = frozenset(k for k, leaf in enumerate(plan) if leaf.on_cores)
        on_disk = frozenset(k for k, leaf in enumerate(plan) if leaf.disk)
        options = Options(
            window, shardings, sharded, on_cores=on_cores, on_disk=on_disk,
            remembered=frozenset(from_memory), unknown=arguments.without_sharding(like, shardings), home=home,
        )  # fmt: skip
        if (gathered := arguments.facts().gathered) is not None:
            gathered.append(options)
        gathered_outside = gathered is not None and not types_tell(updates)

        def recipe(given: Any, state: Any, params: Any, extra_args: Any, skip: Any) -> Any:
            """The usual recipe: load everything, update, store everything. Its trace is then cut into slices."""
            updates, old, params, extra_args = loaded((given, state, params, extra_args))
            like = updates if params is None else params
            updates, params = resharded(updates, sharded, params), sharded_params(params, options)
            try:
                with arguments.within(within_offload=True):
                    updates, new = inner.update(updates, old, params, **extra_args)
            except Exception as error:
                check_typed(sharded, error)
                arguments.check_state(inner.init, old, like, error)
                arguments.check_gradients(given, params, error)
                raise
            same = jax.tree.structure(new) == jax.tree.structure(state) and types_of(new) == types_of(state)
            arguments.check_shapes(inner.init, old, like, new, updates)
            check_last_word(updates, old)
            after = plan if same else place(policy, new, like)
            new = resharded_state(new, after, like, shardings, state if same else None)
            updates = zero_where(skip, updates)
            updates = updates if gathered_outside else resharded(updates, options.replicated)
            return where_it_was(updates, given), stored(old_where(skip, old, new), [leaf.host for leaf in after])

        args = updates, state, params, extra_args, skip
        # a step that has loaded its parameters recognizes their next values by the update's equation
        has_loaded = arguments.facts().loaded is not None
        if nothing_moves and not has_loaded and not any(map(on_host, jax.tree.leaves((updates, params)))):
            return recipe(*args)
        updates, state = streamed(recipe, args, next_of=(0, 1), options=options)
        return updates, in_files(state)

    return Offloaded(init_fn, update_fn).wrapping(offload, optimizer, storage=storage, **said)


@arguments.compiled_where_eager(like=lambda tx, grads, state, params, **_: params)
def update_params(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    skip: Any = None,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Update the parameters: ``tx.update`` and ``optax.apply_updates`` in one, without a tree of updates.

    The loop that streams the state writes the new parameters in place of the old ones. That saves memory where the
    updates could not take the gradients' memory, for example with bfloat16 parameters and float32 arithmetic.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      grads: the gradients, a tree like ``params`` with the same shapes.
      state: the state of ``tx``.
      params: the parameters. Those in pinned host memory, and such gradients, are streamed with the state.
      skip: a bool, traced or not. Where it is true, parameters and state keep every bit; the state is streamed all
        the same. Pass ``~is_finite`` of flax's ``DynamicScale``. It must be the same on all devices.
      **extra_args: arguments for ``tx.update``.

    Returns:
      The new parameters, with the dtypes and in the memory of the old ones, and the new state.

    Raises:
      ValueError: gradients, state and parameters do not fit each other or ``tx``, or are in the wrong order.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3))
      >>> step = jax.jit(functools.partial(jo.update_params, tx), donate_argnums=(1, 2))
      >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
      >>> params, state = step(grads, state, params)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'
    """
    skip = checked_skip(skip)
    arguments.check_transformation(tx, "(tx, grads, state, params)")
    arguments.check_not_in_multi_steps(tx, state)
    tx = optax.with_extra_args_support(tx)
    state, stored = opened(state)
    state, params = arguments.from_host(state, params)

    def recipe(grads: Any, state: Any, params: Any, extra_args: Any, skip: Any) -> Any:
        old, (grads, params, extra_args) = params, loaded((grads, params, extra_args))
        options: list[Any] = []
        with arguments.within(gathered=options):
            try:
                updates, after = tx.update(grads, state, params, **extra_args)
            except ValueError as error:
                arguments.check_managed(state, error)
                raise
        given = merged(options)
        new = optax.apply_updates(params if types_tell(updates) else sharded_params(params, given), updates)
        new, after = old_where(skip, (params, state), (replicated_into(params, new, given), after))
        return where_it_was(new, old), after

    params, state = streamed(recipe, (grads, state, params, extra_args, skip), next_of=(2, 1))
    return jax.tree.map(arguments.load, params), stored(state)


# ---- what lives in host memory, moved there


def to_host(tx: Any, state: Any = None, params: Any = None, *args: Any, select: Any = None, fraction: Any = 1.0) -> Any:
    """Move every leaf of ``state`` to where ``tx`` keeps it; or, ``to_host(params)``, parameters to host memory.

    Use it after ``to_device``, to migrate a running resident job, or after pickle or NumPy. NumPy arrays that belong in
    host memory go there directly.

    Parameters of layers may live in host memory under ``jax_offload.jit``, which loads them layer by layer.
    ``params = jo.to_host(params, loss, batch)`` traces ``loss(params, batch)`` and its gradient, and moves the
    parameters that are loaded this way. Parameters that would be loaded as a whole, such as an embedding beside a scan,
    stay on the device or return there; ``jax_offload.placement(step, ...)`` lists them. ``to_host(params)`` moves all.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it; or a tree of parameters, concrete, traced or
        abstract. Its arrays of 64 KiB and more move to pinned host memory, as far as the other arguments say.
      state: the state of ``tx``, in any memory; under ``jit``, donate it. For parameters, a loss or a step: a function
        whose first argument they are. It is traced and does not run.
      params: the parameters, concrete or abstract. If they are left out, their tree is read off the state, as
        ``optax.tree.map_params`` does. After a loss, its second argument.
      *args: the further arguments of the loss, concrete or abstract.
      select: for parameters, which of them move, as in ``jax_offload.offload(select=)``: regular expressions searched
        in their paths, ``"layers"``; a pytree prefix with a bool for each subtree; or a function of a path and a
        parameter.
      fraction: for parameters, the share of their bytes that moves, or a pytree prefix with one share per subtree.

    Returns:
      A tree like ``state``, with its shapes and dtypes, each leaf in the memory in which ``tx`` keeps it; or a tree
      like the parameters.

    Raises:
      TypeError: ``tx`` is not a transformation, or is one given together with ``select`` or ``fraction``.
      ValueError: the parameters' tree cannot be read off the state, or the state belongs to another optimizer;
        ``select`` or ``fraction`` does not fit the parameters, or the loss loads none of them layer by layer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> resident = optax.adamw(1e-3).init(params)
      >>> state = jo.to_host(jo.offload(optax.adamw(1e-3)), resident)
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    of_parameters = not issubclass(type(tx), (optax.GradientTransformation, optax.MultiSteps))
    returns = of_parameters and callable(state) and select is None  # a loss says of each parameter where it belongs
    if of_parameters and callable(state):
        args = args if params is None else (params, *args)
        select = _in_layers(tx, select, state, args)
    elif not of_parameters and (select is not None or fraction != 1.0):
        raise TypeError(
            f"select, fraction: choose which parameters move, jo.to_host(params, select=...); got select={select!r} "
            f"and fraction={fraction!r} beside a {type(tx).__name__}. Fix: leave them out, as tx says where its state "
            "lives: jo.offload(..., select=...)."
        )
    elif not of_parameters or state is not None or params is not None:
        return state_where_kept(tx, state, params)
    leaves, treedef = jax.tree.flatten(tx)
    pairs = zip(leaves, place(Policy(fraction, select), tx, tx), strict=True)
    moved = [x if not (leaf.host or (returns and in_host_memory(x))) else _in(x, leaf.host) for x, leaf in pairs]
    return guarded(jax.tree.unflatten(treedef, moved), tx)


def _in_layers(params: Any, select: Any, step: Callable[..., Any], args: Any) -> Callable[[str, Any], bool]:
    """Say for each parameter whether a step, or the gradient of a loss, loads it by layers rather than as a whole.

    Raises:
      ValueError: it loads none so.
    """
    moves = [leaf.host for leaf in place(Policy(select=select), params, params)]
    leaves, treedef = jax.tree.flatten((params, args))
    arrays = [k for k, x in enumerate(leaves) if is_traced(x)]
    types = [_typed(leaves[k], k < len(moves) and moves[k]) for k in arrays]
    trains = [k for k in arrays if k < len(moves) and jnp.issubdtype(leaves[k].dtype, jnp.floating)]
    fun, tx = getattr(step, "__wrapped__", step) if hasattr(step, "lower") else step, offload(optax.sgd(1.0))

    def run(*values: Any) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
        params, args = jax.tree.unflatten(treedef, [*filled.values()])
        return fun(params, *args)

    def trained(*values: Any) -> Any:
        given = dict(zip(arrays, values, strict=True))

        def total(own: list[Any]) -> Any:
            results = jax.tree.leaves(run(*(given | dict(zip(trains, own, strict=True))).values()))
            return sum(jnp.sum(x) for x in results if jnp.issubdtype(jnp.result_type(x), jnp.floating))

        own = [given[k] for k in trains]
        return update_params(tx, jax.grad(total)(own), tx.init(own), own)

    with described([types[arrays.index(k)] for k in trains]):
        closed, _ = traced_step(run, *types)
        if not any(map(holds_update, closed.jaxpr.eqns)):  # a loss: a step updates with its gradient
            closed, _ = traced_step(trained, *types)
        found = rewritten(closed).jaxpr
    whole = put_whole(found.eqns)
    whole = {k for k, v in zip(arrays, found.invars, strict=True) if v in whole}
    if not any(by_layers := [moves and k not in whole for k, moves in enumerate(moves)]):
        raise ValueError(
            "to_host(params, loss, ...): the step loads no parameter layer by layer, and as a whole it would need the "
            "device's memory all the same. Fix: scan over stacked layers of 64 KiB and more each, or give the step "
            "in place of the loss; jo.placement(jo.jit(loss), jo.to_host(params), ...) says how each is loaded."
        )
    chosen = {id(x) for x, moves in zip(leaves, by_layers, strict=False) if moves}
    return lambda _, leaf: id(leaf) in chosen  # no tree: it might be a model, which can be called, too


def _on_devices_of(params: Any, state: Any) -> Any:
    """Return a state that is made in the user's program so that the program runs on the parameters' devices.

    Zeros need no parameter, and jax drops the arguments that nothing needs. The program would then run on one device,
    and what it returns in host memory stays there, while plain zeros go to the devices of the next step.
    """
    leaves, treedef = jax.tree.flatten(state)
    traced = [x for x in jax.tree.leaves(params) if isinstance(x, Tracer) and not on_host(x)]
    made = [k for k, x in enumerate(leaves) if isinstance(x, jax.Array)]
    if made and traced and not memory.mesh_is_set():
        smallest = min(made, key=lambda k: leaves[k].size)
        leaves[smallest], *_ = together([leaves[smallest], *traced])
    return jax.tree.unflatten(treedef, leaves)


def _typed(x: Any, hosted: bool) -> Any:
    """The type of an array in one of the memories. The sharding of a tracer is not known, and nothing runs."""
    anywhere = SingleDeviceSharding(jax.devices()[0]) if isinstance(x, Tracer) else None
    place = sharding_of(x) or anywhere or memory.ambient_sharding()
    kind = memory.HOST_KIND if hosted else memory.DEVICE_KIND
    return memory.abstract(x.shape, x.dtype, place.with_memory_kind(kind), getattr(x, "weak_type", False))


def _in(x: Any, hosted: bool) -> Any:
    """Move an array to one of the memories; an abstract array gets that memory in its type."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return _typed(x, hosted)
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return memory.well_typed(memory.to_host(x)) if hosted else memory.to_device(x)
