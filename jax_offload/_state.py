"""Reading, moving and describing a state that is partly on the host. Works through chains and wrappers.

Everything is read off the traced ``init`` of the whole transformation, so that an ``offload`` anywhere inside it
counts, and nothing is allocated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jax_offload import _memory
from jax_offload._placement import Leaf, noting, owners, unmanaged
from jax_offload._sharding import known
from jax_offload._stream import Load, loads_of_updates


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table of what lives where and why, and how it is streamed; ``print`` it.

    Attributes:
      leaves: a row for every state leaf.
      unknown: why ``update`` could not be traced; empty where it could.
    """

    leaves: tuple[Leaf, ...]
    unknown: str = ""

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in pinned host memory, over all devices."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.host)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state that stay in device memory, over all devices."""
        return sum(leaf.nbytes for leaf in self.leaves if not leaf.host)

    def __str__(self) -> str:
        rows = [("state leaf", "shape", "dtype", "MiB", "memory", "why", "streams")]
        for leaf in self.leaves:
            memory = _memory.HOST_KIND if leaf.host else _memory.DEVICE_KIND
            shape = "×".join(map(str, leaf.shape)) or "()"
            size = f"{leaf.nbytes / 2**20:.2f}"
            rows.append((leaf.path, shape, str(leaf.dtype), size, memory, leaf.why, leaf.streams))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(w) if k == 3 else cell.ljust(w) for k, (cell, w) in enumerate(
            zip(row, widths, strict=True))).rstrip() for row in rows]  # fmt: skip
        total = self.host_bytes + self.device_bytes
        share = self.host_bytes / total if total else 0.0
        summary = (
            f"optimizer state: {total / 2**20:.2f} MiB, of which {self.host_bytes / 2**20:.2f} MiB ({share:.1%}) in "
            f"{_memory.HOST_KIND} and {self.device_bytes / 2**20:.2f} MiB on the device"
        )
        notes = [f"how it streams is not known: {self.unknown}"] if self.unknown else []
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], summary, *notes])


def placement(tx: optax.GradientTransformation, params: Any, **extra_args: Any) -> Placement:
    """Where each leaf of ``tx``'s state lives and why, and how ``update`` brings it to the device.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      params: the parameters, concrete or abstract. Nothing is allocated.
      **extra_args: what ``tx.update`` needs besides gradients, state and parameters, to trace it.
    """
    leaves, _ = _traced_init(tx, params)
    streams, unknown = _streams(tx, params, extra_args)
    rows = []
    for (leaf, _), text in zip(leaves, streams, strict=True):
        hidden = leaf.host and not text and not unknown
        rows.append(dataclasses.replace(leaf, streams="in a branch or a loop around offload" if hidden else text))
    return Placement(tuple(rows), unknown)


def _streams(tx: optax.GradientTransformation, params: Any, extra_args: Any) -> tuple[list[str], str]:
    """How a traced ``update`` loads each leaf of the state, in words; and why it could not be traced."""
    found: list[list[Load]] = []

    def update(params: Any, extra_args: Any) -> None:
        leaves, treedef = jax.tree.flatten(tx.init(params))
        found.extend([] for _ in leaves)
        with loads_of_updates() as loads:
            optax.with_extra_args_support(tx).update(params, jax.tree.unflatten(treedef, leaves), params, **extra_args)
        index = {id(x): rows for x, rows in zip(leaves, found, strict=True)}
        for load in loads:
            for x in load.ids:
                if x in index:  # not in a cond or a loop of a wrapper around offload
                    index[x].append(load)

    leaves, treedef = jax.tree.flatten(extra_args)
    arrays = [k for k, x in enumerate(leaves) if hasattr(x, "dtype")]  # the others, functions say, stay as they are

    def with_arrays(params: Any, values: list[Any]) -> None:
        filled = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
        update(params, jax.tree.unflatten(treedef, filled.values()))

    try:
        jax.make_jaxpr(with_arrays)(params, [leaves[k] for k in arrays])
    except Exception as error:
        state = jax.eval_shape(tx.init, params)
        return [""] * len(jax.tree.leaves(state)), f"update raises {type(error).__name__}: {str(error).splitlines()[0]}"
    return [_in_words(loads) for loads in found], ""


def _in_words(loads: list[Load]) -> str:
    parts = [load.how + (f", {len(load.ids)} leaves together" if len(load.ids) > 1 else "") for load in loads]
    repeated = len(parts) > 1 and len(set(parts)) == 1
    return f"{parts[0]} ({len(parts)} times)" if repeated else "; then ".join(parts)


def abstract_state(tx: optax.GradientTransformation, params: Any) -> Any:
    """The state that ``tx.init(params)`` would give, as ``ShapeDtypeStruct``s with shardings and memory kinds.

    An orbax restore target: with it a checkpoint, of a resident run too, lands where the options say.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      params: the parameters, concrete or abstract. A state leaf of its parameter's shape takes its sharding; others are
        replicated over the same devices. Abstract parameters without a sharding count as unplaced: on the mesh
        that is set, or on the default device.
    """
    leaves, treedef = _traced_init(tx, params)
    paths_params = jax.tree_util.tree_flatten_with_path(params)[0]
    shardings = [_sharding(x) for _, x in paths_params]
    everywhere = _replicated(shardings)
    abstract = []
    for leaf, aval in leaves:
        kind = _memory.HOST_KIND if leaf.host else _memory.DEVICE_KIND
        same = leaf.owner is not None and np.shape(paths_params[leaf.owner][1]) == aval.shape and aval.shape != ()
        sharding = shardings[leaf.owner] if same else everywhere  # pyright: ignore
        if isinstance(everywhere, NamedSharding) and not aval.sharding.mesh.empty and aval.sharding.mesh.explicit_axes:
            sharding = NamedSharding(everywhere.mesh, aval.sharding.spec)  # with Explicit axes the types tell
        weak = getattr(aval, "weak_type", False)
        abstract.append(
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_memory.with_kind(sharding, kind), weak_type=weak)
        )
    return jax.tree.unflatten(treedef, abstract)


def state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """The shardings of ``abstract_state``: for the ``out_shardings`` of a step, or of ``jax.jit(tx.init)``."""
    return jax.tree.map(lambda x: x.sharding, abstract_state(tx, params))


def to_device(state: Any) -> Any:
    """``state`` with every host leaf in device memory: to read, log, or compute with it outside ``update``.

    Arithmetic that mixes memories outside ``update`` is an error of jax. Move a part, not the whole:
    ``jo.to_device(state[0].mu)``. The whole state need not fit on the device.
    """
    return jax.tree.map(lambda x: _memory.to_device(x) if isinstance(x, jax.Array) else x, state)


def to_host(tx: optax.GradientTransformation, state: Any, params: Any = None) -> Any:
    """``state`` with every leaf where ``tx`` keeps it: after ``to_device``, or to migrate a running resident job.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      state: its state, in any memory. Under ``jit``, donate it.
      params: the parameters, concrete or abstract. Where they are left out, their tree is read off the state, as
        ``optax.tree.map_params`` does.

    Raises:
      ValueError: the parameters' tree cannot be read off the state, or the state is not ``tx``'s.
    """
    params = _params_like(tx, state) if params is None else params
    leaves, treedef = _traced_init(tx, params)
    got, got_tree = jax.tree.flatten(state)
    types = [(np.shape(x), getattr(x, "dtype", None)) for x in got]
    if got_tree == treedef and types != [(aval.shape, aval.dtype) for _, aval in leaves]:
        raise ValueError(
            "state: its shapes or dtypes are not those that tx.init gives for these parameters. If params were left "
            "out, the moments are not like the parameters (factored, or of another dtype): pass to_host(tx, state, "
            "params)."
        )
    if got_tree != treedef:
        raise ValueError(
            f"state: not the tree that tx.init gives.\n  got      {got_tree}\n  expected {treedef}\n"
            "If the parameters' tree could not be read off the state, pass params."
        )
    moved = [
        _memory.to_host(x) if leaf.host else _memory.to_device(x) for x, (leaf, _) in zip(got, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, moved)


def _traced_init(tx: optax.GradientTransformation, params: Any) -> tuple[list[tuple[Leaf, Any]], Any]:
    """For every state leaf its row of the table and its type; and the state's tree."""
    found: list[Any] = []

    def init(params: Any) -> Any:
        state = tx.init(params)
        with_paths = jax.tree_util.tree_flatten_with_path(state)[0]
        found.extend((path, rows.get(id(x))) for path, x in with_paths)
        return state

    with noting() as rows, known(params):
        closed, shapes = jax.make_jaxpr(init, return_shape=True)(params)
    owner = owners([path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]])
    leaves = []
    for (path, row), aval in zip(found, closed.out_avals, strict=True):
        row = row or unmanaged(aval)
        leaf = dataclasses.replace(
            row, path=jax.tree_util.keystr(path), owner=owner(path), host=_memory.is_host_aval(aval)
        )
        leaves.append((leaf, aval))
    return leaves, jax.tree.structure(shapes)


def _sharding(param: Any) -> Sharding:
    placed = getattr(param, "sharding", None)
    loose = isinstance(param, jax.Array) and not param.committed and _memory.mesh_is_set()
    return _memory.ambient_sharding() if placed is None or loose else placed


def _replicated(shardings: list[Sharding]) -> Sharding:
    first = shardings[0] if shardings else _memory.ambient_sharding()
    return NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first


@jax.tree_util.register_static
class _Params:
    """Stands for a whole tree of parameters in the probe of an init, and has no leaves."""


def _params_like(tx: optax.GradientTransformation, state: Any) -> Any:
    def is_probe(x: Any) -> bool:
        return isinstance(x, _Params)

    copies: list[Any] = []
    try:
        probe = tx.init(_Params())  # pyright: ignore[reportArgumentType]
        jax.tree.map(lambda p, part: copies.append(part) if is_probe(p) else None, probe, state, is_leaf=is_probe)
    except Exception as error:
        raise ValueError("params: this optimizer's init must see them; pass to_host(tx, state, params).") from error
    if not copies:
        raise ValueError("params: the state has no tree of their structure; pass to_host(tx, state, params).")
    return copies[0]
