"""Read, move, describe and convert a state that is partly on the host, through chains and wrappers.

The ``init`` of the whole transformation is traced, so that an ``offload`` anywhere inside it counts and nothing is
allocated.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr

from jax_offload._disk.disk import Disk
from jax_offload._disk.leaves import brought, is_on_disk, read_into
from jax_offload._program import memory
from jax_offload._program.arrays import by_key, is_like, key_of, leaves_with_paths, owners
from jax_offload._program.jaxprs import Literal, jaxpr_of, variables
from jax_offload._program.memory import Layouts, Shardings, on_host
from jax_offload._program.primitives import guarded, marks_in
from jax_offload._program.program import flat, structures, unguarded, without_round_trips
from jax_offload._program.propagate import needed_for
from jax_offload._program.slices import slice_of
from jax_offload._state import storage
from jax_offload._state.arguments import AROUND, Remembered, check_like, check_transformation, described
from jax_offload._state.placement import Leaf, unmanaged
from jax_offload._state.storage import Encoded, StoredState

# ---- how a state is divided between devices: as its parameters, or further (ZeRO-1)


def _divided(leaf: Leaf, own: Sharding, param: Sequence[int]) -> tuple[Sharding, str]:
    """Divide a parameter's sharding over the further mesh axes of a state leaf, or return it and say why not.

    The first axis of the array that divides evenly is divided, preferably one that is not sharded yet. In arrays of
    three or more axes the first axis is tried last: in a scanned model it counts the layers, and each layer's gradient
    can then be scattered to all devices as it appears.
    """
    if not leaf.shard_over:
        return own, ""
    if not isinstance(own, NamedSharding):
        raise ValueError(
            f"shard_over: {leaf.shard_over} are axes of a mesh, but parameter {leaf.param} is on {own}. Fix: give the "
            "parameters a NamedSharding (jax.device_put, or the out_shardings of their init)."
        )
    if len({*own.mesh.axis_types}) > 1:
        raise ValueError(
            f"shard_over: the parameters' mesh mixes types of axes, {own.mesh.axis_types}. Make all of them Auto, "
            "or all Explicit."
        )
    sizes = dict(own.mesh.shape)
    if unknown := [name for name in leaf.shard_over if name not in sizes]:
        raise ValueError(f"shard_over: the parameters' mesh has no axes {unknown}, only {tuple(sizes)}.")
    spec, shards = memory.padded(own.spec, len(param)), memory.shards_of(own, param)
    used = {name for entry in spec for name in memory.names_in(entry)}
    over = [name for name in leaf.shard_over if name not in used]
    parts = math.prod(sizes[name] for name in over)
    if parts == 1:
        return own, "sharded over these axes already" if used else "the axes have size 1"
    axes = [*range(1, len(param)), 0] if len(param) > 2 else range(len(param))
    for axis in sorted(axes, key=lambda axis: shards[axis] > 1):
        if param[axis] % (shards[axis] * parts) == 0:
            spec[axis] = (*memory.names_in(spec[axis]), *over) if spec[axis] is not None or len(over) > 1 else over[0]
            return own.update(spec=memory.spec_of(spec)), ""
    return own, f"no axis divides by {parts}"


def _owners_divided(plan: Sequence[Leaf], params: Any) -> dict[int | None, tuple[str, Any, Leaf]]:
    """Map the number of each parameter whose state ZeRO-1 divides to its path, its value and such a leaf."""
    flat = [(key_of(path), x) for path, x in leaves_with_paths(params)]
    return {leaf.owner: (*flat[leaf.owner], leaf) for leaf in plan if leaf.shard_over and leaf.owner is not None}


def partitions(plan: Sequence[Leaf], params: Any, shardings: Shardings, remembered: Remembered) -> Layouts:
    """Return the shardings, by path, of the parameters whose state ZeRO-1 divides; gradients and updates take them too.

    Raise ``ValueError`` if a sharding is not among the known ``shardings``; or inside ``shard_map``, where gradients
    cannot be divided over axes of the mesh.
    """
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"shard_over: update is traced inside shard_map, manual over {manual}. Take it out of shard_map, or leave "
            "shard_over out and divide the state yourself."
        )
    found: Layouts = {}
    for name, x, leaf in _owners_divided(plan, params).values():
        if name not in shardings:
            several = list(remembered.get(name, ()))
            raise ValueError(
                f"shard_over: parameter {name} was seen in several shardings, {several}, and with Auto mesh axes a "
                "trace does not tell which it is. Make an offload(...) for each model and mesh."
                if several
                else f"shard_over: the sharding of parameter {name} is not known: with Auto mesh axes a trace does not "
                "tell. Call tx.init on the parameters, or jax_offload.abstract_state(tx, params), before update is "
                "traced; an offload(...) that each step makes anew, as in inject_hyperparams, belongs around that."
            )
        sharding, why = _divided(leaf, shardings[name], x.shape)
        if not why and isinstance(sharding, NamedSharding):
            found[name] = sharding
    return found


def check_typed(sharded: Layouts, error: Exception) -> None:
    """Say what to do if an optimizer mixes divided arrays with others, which Explicit axes forbid."""
    branches = "must have equal" in str(error) and "@" in str(error)  # with Explicit axes a type says how it is divided
    if sharded and (branches or type(error).__name__ == "ShardingTypeError"):
        raise ValueError(
            "shard_over: on a mesh with Explicit axes this optimizer cannot mix divided gradients with undivided "
            "state, such as factored moments. Use Auto axes, or leave shard_over out."
        ) from error


def resharded(tree: Any, shardings: Mapping[str, Sharding], like: Any = None) -> Any:
    """Constrain the leaves of a tree like the parameters to the shardings that are given for their paths.

    Gradients of single examples stay unchanged, since they have one axis more than ``like``, the parameters.
    """
    if not shardings:
        return tree
    shapes = {path: np.shape(x) for path, x in by_key(like).items()}

    def one(path: Any, x: Any) -> Any:
        key, shape = key_of(path), np.shape(x)
        if on_host(x) or shapes.get(key, shape) != shape:  # a leaf on the host is divided once it is loaded
            return x
        return memory.constrained(x, shardings.get(key))

    return jax.tree_util.tree_map_with_path(one, tree)


def resharded_state(state: Any, plan: Sequence[Leaf], params: Any, shardings: Shardings, before: Any = None) -> Any:
    """Divide the leaves of a state further, as far as the shardings of their parameters are known.

    A leaf that is not divided further, such as a scale that stays on the device or a factored moment, is made of
    gradients that are. It keeps the sharding it had ``before`` the update: otherwise the second step would be another
    program, and a loop's carry would change its type. An ``init`` has no state before it.
    """
    owners = _owners_divided(plan, params)

    def one(x: Any, leaf: Leaf, old: Any) -> Any:
        if leaf.owner not in owners:
            return x
        name, param, _ = owners[leaf.owner]
        if name not in shardings or not (leaf.shard_over or np.ndim(x) == np.ndim(param)):
            return x if old is None else memory.constrained(x, memory.typed_sharding(jax.typeof(old)))
        sharding, why = _divided(leaf, shardings[name], np.shape(param))
        return x if why else memory.constrained(x, memory.fitted(sharding, np.shape(x)))

    leaves, treedef = jax.tree.flatten(state)
    olds = [None] * len(plan) if before is None else jax.tree.leaves(before)
    return jax.tree.unflatten(treedef, map(one, leaves, plan, olds))


# ---- a state that is not made: a row of the table and a type for every leaf


def described_state(tx: optax.GradientTransformation, params: Any, *, remember: bool = False) -> tuple[list[Leaf], Any]:
    """Return the row of the table of every state leaf, and the state as types with shardings and memory kinds."""
    rows, state = _traced_init(tx, params, remember=remember)
    types, treedef = jax.tree.flatten(state)
    arrays = jax.tree.leaves(params)
    owns = [_placed(x) for x in arrays]
    first = owns[0] if owns else memory.ambient_sharding()
    everywhere = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
    probes = _probed(tx.init, params, rows)
    for k, (leaf, x) in enumerate(zip(rows, types, strict=True)):
        own, param = (None, ()) if leaf.owner is None else (owns[leaf.owner], np.shape(arrays[leaf.owner]))
        sharding, why, told = everywhere, "", memory.typed_sharding(x)
        if own is not None and x.shape != () and is_like(leaf.path, x.shape, param):
            sharding, why = _divided(leaf, own, param)
            sharding = sharding if x.shape == param else memory.fitted(sharding, x.shape)
        elif isinstance(own, NamedSharding) and probes is not None and len(probes[k]) == len(x.shape):
            axis_of = {sizes: axis for axis, sizes in enumerate(zip(_distinct(param), param, strict=True))}
            sharding = memory.without_axes(own, [axis_of.get(sizes) for sizes in zip(probes[k], x.shape, strict=True)])
        if told is not None and isinstance(everywhere, NamedSharding) and memory.is_explicit(told.mesh):
            sharding = NamedSharding(everywhere.mesh, told.spec)  # with Explicit axes the types hold the shardings
        spec = f"P({', '.join(map(repr, sharding.spec))})" if isinstance(sharding, NamedSharding) else ""
        kind = memory.HOST_KIND if leaf.host or leaf.disk else memory.DEVICE_KIND
        sharding, parts = sharding.with_memory_kind(kind), math.prod(memory.shards_of(sharding, x.shape))
        types[k] = leaf.place.at(sharding) if leaf.place else memory.abstract(x.shape, x.dtype, sharding, x.weak_type)
        spec = f"{spec} ({why})" if why else spec
        rows[k] = dataclasses.replace(leaf, sharding=spec, shard_bytes=leaf.nbytes // parts)
    return rows, jax.tree.unflatten(treedef, types)


def _traced_init(tx: optax.GradientTransformation, params: Any, *, remember: bool = False) -> tuple[list[Leaf], Any]:
    """Return the row of the table of every state leaf, and the state as types, whose shardings are not known yet."""
    check_transformation(tx, "(tx, params)")
    with described(params, remember=remember):
        closed, treedef = jaxpr_of(lambda params: tx.init(params), params)  # a new function, as jax keeps traces
    state = jax.tree.unflatten(treedef, closed.out_avals)
    marks, rows = marks_in(closed), list[Leaf]()
    for (path, x), owner, v in zip(leaves_with_paths(state), owners(state, params), closed.jaxpr.outvars, strict=True):
        row, name = unmanaged(x) if isinstance(v, Literal) or v not in marks else marks[v], keystr(path)
        if (row.host or row.disk) and ".inner_opt_state" in name.removesuffix(row.path):
            raise ValueError(AROUND)
        rows.append(dataclasses.replace(row, path=name, owner=owner, host=memory.is_host_aval(x) and not row.disk))
    return rows, state


def _placed(param: Any) -> Sharding:
    loose = isinstance(param, jax.Array) and not isinstance(param, Tracer) and not param.committed
    found = None if loose and memory.mesh_is_set() else memory.sharding_of(param)
    return memory.ambient_sharding() if found is None else found


def _probed(init: Callable[[Any], Any], params: Any, rows: Sequence[Leaf]) -> list[tuple[int, ...]] | None:
    """Return the shapes of a state whose parameters have axes of different sizes; ``None`` if nothing needs them.

    They tell which axes of its parameter a factored moment has: a row factor of a square matrix has the shape of a
    column factor.
    """
    arrays, treedef = jax.tree.flatten(params)
    if any(leaf.owner is not None and len(leaf.shape) not in (0, np.ndim(arrays[leaf.owner])) for leaf in rows):
        changed = [jax.ShapeDtypeStruct(_distinct(np.shape(x)), x.dtype) for x in arrays]
        with contextlib.suppress(Exception), described(()):  # an ``init`` may read more than shapes
            found = jax.tree.leaves(jax.eval_shape(init, jax.tree.unflatten(treedef, changed)))
            return [x.shape for x in found] if len(found) == len(rows) else None
    return None


def _distinct(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return about the same sizes, all different; of two equal sizes the later one becomes the larger."""
    sizes, last = list(shape), 0
    for axis in sorted(range(len(shape)), key=lambda axis: (shape[axis], axis)):
        sizes[axis] = last = max(shape[axis], last + 1)
    return tuple(sizes)


def abstract_state(tx: optax.GradientTransformation, params: Any) -> Any:
    """Return the state of ``tx.init(params)`` as ``jax.ShapeDtypeStruct``s with shardings and memory kinds.

    Use it as a restore target: a checkpoint, even of a resident run, then lands where the options say. Use it to lower
    a step without data. Read the shardings for ``out_shardings`` off it: ``jax.tree.map(lambda x: x.sharding, ...)``.
    Nothing is allocated.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      params: the parameters, concrete or abstract. A state leaf of its parameter's shape takes the parameter's
        sharding, divided further if ``shard_over`` says so; a factored leaf takes the sharding of its remaining axes;
        other leaves are replicated over the same devices. Abstract parameters without a sharding count as
        unplaced: on the mesh that is set, or on the default device.

    Returns:
      A tree like the state, with the global shapes and the dtypes of its leaves.

    Raises:
      TypeError: ``tx`` is not a transformation.
      ValueError: the parameters are a state, or an option of an ``offload`` does not fit them.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((256, 256), "float32")}
      >>> mu = jo.abstract_state(jo.offload(optax.adamw(1e-3)), params)[0].mu["w"]
      >>> mu.shape, mu.dtype.name, mu.sharding.memory_kind
      ((256, 256), 'float32', 'pinned_host')
    """
    return described_state(tx, params, remember=True)[1]


# ---- a state that is moved or converted


def to_device(state: Any) -> Any:
    """Move every host leaf of ``state`` to device memory, to read, log or compute with it outside ``update``.

    jax raises if arithmetic outside ``update`` mixes memories. Move only the part that you read,
    ``jo.to_device(state[0].mu)``: the whole state need not fit on the device. Leaves on disk are read.

    Args:
      state: a state or a part of one, concrete or traced. Leaves that are not a ``jax.Array`` stay unchanged.

    Returns:
      A tree like ``state``. Shapes, dtypes and shardings stay; only memory kinds change.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> state = jo.offload(optax.adamw(1e-3)).init(params)
      >>> mu = jo.to_device(optax.tree.get(state, "mu"))
      >>> float(optax.tree.norm(mu))
      0.0
    """

    def on_device(x: Any) -> Any:
        if is_on_disk(x):
            return jax.device_put(x.read(), x.sharding.with_memory_kind(memory.DEVICE_KIND))
        return memory.to_device(x) if isinstance(x, jax.Array) else x

    return guarded(jax.tree.map(on_device, state, is_leaf=is_on_disk), state)


def state_where_kept(tx: Any, state: Any, params: Any = None, *, plain: bool = False) -> Any:
    """Move every leaf of ``state`` to where ``tx`` keeps it; encode the leaves of a ``plain`` state first."""
    params = _params_like(tx, state) if params is None else params
    # Tracers do not tell shardings: under jit the next update divides the leaves.
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((state, params)))
    rows, wanted = (_traced_init if traced else described_state)(tx, params)
    if plain:
        try:
            state = storage.stored_like(wanted, state)
        except (ValueError, TypeError) as error:
            raise ValueError(f"state: not a plain state of tx for these parameters: {error}. {_GIVE_PARAMS}") from error
    check_like(state, wanted, _GIVE_PARAMS, dtypes=True)
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_on_disk)
    if any(map(is_on_disk, leaves)) or any(leaf.disk for leaf in rows):
        return jax.tree.unflatten(treedef, brought(leaves, None if traced else jax.tree.leaves(wanted)))

    def moved(x: Any, leaf: Leaf, like: Any) -> Any:
        if not traced and (leaf.shard_over or not getattr(x, "committed", False)):
            return jax.device_put(x, like.sharding)
        x = jnp.asarray(x)  # keeps its sharding, because abstract parameters may have none
        return memory.to_host(x) if leaf.host else memory.to_device(x)

    return guarded(jax.tree.unflatten(treedef, map(moved, leaves, rows, jax.tree.leaves(wanted))), state)


_GIVE_PARAMS = (
    "If you left out params, they were read off the state, which cannot show them in the case of masters, factored "
    "moments, and moments of another dtype: pass params, (tx, state, params)."
)


def to_plain(tx: optax.GradientTransformation, state: Any) -> Any:
    """Decode a state of ``storage=``: return the state that the optimizers inside ``tx`` would hold without it.

    Each leaf stays in its memory; ``jo.to_device`` moves it. The conversion goes leaf by leaf, so the whole state need
    not fit on the device, and it is exact. A state without ``storage=`` is returned unchanged.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      state: the state of ``tx``, or a part of it such as ``optax.tree.get(state, "mu")``.

    Returns:
      A tree like the state of the optimizers inside, with its shapes and dtypes.

    Raises:
      TypeError: ``tx`` is not a transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3), storage={"mu": "int8", "nu": "uint8"})
      >>> plain = jo.to_plain(tx, tx.init(params))
      >>> plain[0].mu["w"].dtype.name, plain[0].mu["w"].sharding.memory_kind
      ('float32', 'pinned_host')
    """
    if found := [x for x in jax.tree.leaves(state, is_leaf=is_on_disk) if is_on_disk(x)]:
        raise ValueError(
            f"jo.to_plain: {len(found)} leaves of the state are on disk, the first is {found[0]!r}. Fix: "
            "jo.to_device(part) reads a part of the state; jo.to_host(tx, state), with a tx without disk=, all of it."
        )
    check_transformation(tx, "(tx, state)")  # the stored state tells everything else
    return storage.plain(state, lambda x: storage.in_place(storage.decoded, x) if isinstance(x, Encoded) else x)


def from_plain(tx: optax.GradientTransformation, state: Any, params: Any = None) -> Any:
    """Encode a plain state as ``tx`` stores it, each leaf where ``tx`` keeps it.

    ``jo.from_plain(new_tx, jo.to_plain(old_tx, state))`` changes how a run stores its state. It rounds to nearest, and
    is exact if the format has the number. The conversion goes leaf by leaf: at most one host leaf is on the device at a
    time. The count of rounds, which seeds stochastic rounding, starts at 0 again.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      state: the state that plain optax would hold: from ``to_plain`` or from a resident run.
      params: the parameters, concrete or abstract. If they are left out, their tree is read off the state.

    Returns:
      The state as ``tx.init`` would return it, with these values.

    Raises:
      TypeError: ``tx`` is not a transformation.
      ValueError: the state is already stored, belongs to other optimizers, or the parameters' tree cannot be read off
        it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3), storage="bfloat16")
      >>> state = jo.from_plain(tx, optax.adamw(1e-3).init(params))
      >>> mu = state.inner_state[0].mu["w"].values
      >>> mu.dtype.name, mu.sharding.memory_kind
      ('bfloat16', 'pinned_host')
    """
    if any(isinstance(x, (StoredState, Encoded)) for x in jax.tree.leaves(state, is_leaf=storage.is_node)):
        raise ValueError("state: is stored, not plain; jo.to_plain(tx, state) gives the plain one.")
    return state_where_kept(tx, state, params, plain=True)


def _params_like(tx: optax.GradientTransformation, state: Any) -> Any:
    """Read the parameters' tree off a state of ``tx``, stored or plain: the largest part that is like them."""

    def like_param(x: Any) -> Any:
        array = x.values if isinstance(x, Encoded) else x
        if not hasattr(array, "dtype"):
            return x
        sharding = memory.sharding_of(array)
        sharding = None if sharding is None else sharding.with_memory_kind(memory.DEVICE_KIND)
        return jax.ShapeDtypeStruct(np.shape(array), x.dtype, sharding=sharding)

    check_transformation(tx, "(tx, state)")
    reached, copies = list[bool](), list[Any]()

    def init(params: Any) -> Any:
        found = storage.plain(tx.init(params), lambda x: x)
        reached.append(True)
        return found

    try:
        optax.tree.map_params(init, copies.append, storage.plain(state, like_param), is_leaf=lambda _: True)
    except Exception as error:
        if not reached:
            raise ValueError("params: this optimizer's init must see them; give them as params=.") from error
        raise ValueError(
            f"state: got a {type(state).__name__} that is not like the state that this optimizer's init gives. Fix: "
            "give its state, (tx, state), and params too if the init must see them, (tx, state, params)."
        ) from error
    if not copies:
        raise ValueError("params: the state has no tree of their structure; give them as params=.")
    return max(copies, key=lambda each: len(jax.tree.leaves(each)))


def created(disk: Disk, create: Callable[[Any], Any], params: Any, target: Any) -> optax.OptState:
    """Return ``create(params)`` where ``target`` says, each leaf made by itself: the whole may not fit into memory."""
    with described(params):
        traced, _ = jaxpr_of(create, params)
    init = unguarded(without_round_trips(flat(traced)))
    values = dict(zip(init.inputs, [*init.consts, *jax.tree.leaves(params)], strict=True))
    targets, treedef = jax.tree.flatten(target)
    compiled, structure = dict[Hashable, Any](), structures()  # similar leaves share a program

    def made(k: int) -> Any:
        eqns, _ = needed_for(init.eqns, variables(init.outputs[k : k + 1]))
        s = slice_of(eqns, init.outputs[k : k + 1], init.debug_info, {})  # pyright: ignore[reportArgumentType]
        key = structure(s.jaxpr), targets[k].sharding
        if key not in compiled:
            compiled[key] = jax.jit(s.run, out_shardings=[targets[k].sharding])
        return compiled[key](*(values[v] for v in s.inputs))[0]

    return jax.tree.unflatten(treedef, read_into(targets, lambda indices: [*map(made, indices)], [disk]))
