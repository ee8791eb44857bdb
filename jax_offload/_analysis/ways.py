"""The ways to run an optimizer that a forecast compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from jax_offload._analysis.option import ON_DISK
from jax_offload._base.arrays import Offloaded
from jax_offload._base.shardings import names_in, sharding_of
from jax_offload._files.files import Disk
from jax_offload._offload import DEFAULT_MIN_BYTES, offload

ON_THE_CORES = "on the cores"
_DEFAULTS: Mapping[str, Any] = {
    "fraction": 1.0, "select": None, "min_bytes": DEFAULT_MIN_BYTES, "window": None, "order": None,
    "shard_over": None, "storage": None, "update_on": "device", "disk": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Way:
    """An optimizer, and how its step runs.

    Attributes:
      name, code: as an ``Option`` has them.
      tx: the transformation.
      ahead: whether the update runs in the forward pass of the next batch (``jo.pipelined``).
      pending: whether the gradients wait for it on the host.
      same_numbers: whether it computes what was given.
    """

    name: str
    code: str
    tx: Any
    ahead: bool = False
    pending: bool = False
    same_numbers: bool = True


def inner_of(tx: Any) -> tuple[Any, dict[str, Any]]:
    """What an ``offload`` wraps, with the options that it was given beyond the defaults; else ``tx`` itself."""
    if isinstance(tx, Offloaded) and tx.inner is not None:
        return tx.inner, {k: v for k, v in tx.options.items() if v is not _DEFAULTS[k] and v != _DEFAULTS[k]}
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx, {}


def way(name: str, inner: Any, called: str, options: Mapping[str, Any], **kwargs: Any) -> Way:
    said = "".join(f", {key}={'jo.' if key == 'disk' else ''}{value!r}" for key, value in options.items())
    more = ', gradients="host"' if kwargs.get("pending") else ""
    step = f'jo.pipelined(step, donate_argnames=("params", "state"){more})' if kwargs.get("ahead") else _JIT
    return Way(name, f"tx = jo.offload({called}{said}); step = {step}", offload(inner, **options), **kwargs)


_JIT = "jo.jit(step, donate_argnums=(0, 1))"


def without_cores(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "update_on"}


def on_disk(inner: Any, called: str, options: Mapping[str, Any], host_bytes: int) -> Way:
    """With so much of the state in host memory, and the rest in files."""
    return way(ON_DISK, inner, called, {**options, "disk": disk_of(1, host_bytes)})


def disk_of(drives: int, host_bytes: int, commit_every: int = 1) -> Disk:
    """Files that nobody makes, on so many drives."""
    return Disk([Path(f"/nvme{k or ''}/run") for k in range(drives)], host_bytes, commit_every=commit_every)


def drives_of(options: Mapping[str, Any]) -> int:
    """Over how many drives an offload's files are spread: a directory is taken for one."""
    return len(options["disk"].directories) if "disk" in options else 1


def commits_of(options: Mapping[str, Any]) -> int:
    """Of how many steps one is committed; 1: of as many as somebody calls it for."""
    return options["disk"].commit_every if "disk" in options else 1


def resident(inner: Any, called: str) -> Way:
    return Way("resident", f"tx = {called}; step = jax.jit(step, donate_argnums=(0, 1))", inner)


@dataclasses.dataclass(frozen=True)
class Known:
    """What decides which other ways there are.

    Attributes:
      norm: whether the update waits for all gradients, so that only the next forward pass can hide it.
      alone: whether the devices are those of one host, whose cores may do for them, and there are few leaves.
      wide: whether bfloat16 would make a moment smaller.
      eight: the rules for moments in 8 bits; ``None`` where there are none.
      axes: those of the parameters' mesh along which none of them is divided.
    """

    norm: bool
    alone: bool
    wide: bool
    eight: Mapping[str, str] | None
    axes: tuple[str, ...]


def known(inner: Any, params: Any, norm: bool, alone: bool) -> Known:
    state = jax.eval_shape(inner.init, params)
    return Known(norm, alone, has_wide(state), eight_bits(state), replicated_axes(jax.tree.leaves(params)))


def ways(inner: Any, given: Mapping[str, Any], called: str, known: Known) -> Sequence[Way]:
    """Besides the resident one and the one that is given."""
    found: list[Way] = []
    if "disk" in given:
        in_memory = {key: value for key, value in given.items() if key != "disk"}
        found.append(way("in host memory", inner, called, in_memory))
    elif (streamed := without_cores(given)) != given:
        given = streamed
        found.append(way("on the device", inner, called, given))
    elif known.alone:
        found.append(way(ON_THE_CORES, inner, called, {**given, "update_on": "host"}))
    if known.norm:
        found.append(way("pipelined", inner, called, given, ahead=True))
        found.append(way("gradients too", inner, called, given, ahead=True, pending=True))
    if "storage" not in given:
        smaller: list[tuple[str, Any]] = [("bfloat16", "bfloat16")] if known.wide else []
        smaller += [("int8", known.eight)] if known.eight else []
        found += [way(name, inner, called, {**given, "storage": storage}, ahead=known.norm, same_numbers=False)
                  for name, storage in smaller]  # fmt: skip
    if not {*given} & {"shard_over", "disk"} and known.axes:
        over = known.axes[0] if len(known.axes) == 1 else known.axes
        found.append(way("ZeRO-1", inner, called, {**given, "shard_over": over}, ahead=known.norm))
    return found


def eight_bits(state: Any) -> dict[str, str] | None:
    """Rules for float32 moments in 8 bits, by the names of optax's states; ``None`` where there are none."""
    dtypes: dict[str, set[Any]] = {"mu": set(), "nu": set()}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        for name in dtypes.keys() & keystr(path, simple=True, separator="/").split("/"):
            dtypes[name] |= {x.dtype} if getattr(x, "ndim", 0) else set()
    floating = {name for name, of in dtypes.items() if jnp.dtype(jnp.float32) in of and all(map(_is_floating, of))}
    return {name: dtype for name, dtype in (("mu", "int8"), ("nu", "uint8")) if name in floating} or None


def _is_floating(dtype: Any) -> bool:
    """Of integers there are no fewer bits to be had."""
    return jnp.issubdtype(dtype, jnp.floating)


def has_wide(state: Any) -> bool:
    """Whether bfloat16 would make a moment smaller; masters stay as they are."""
    return any("master" not in path for path, _ in _wide(state))


def _wide(state: Any) -> list[tuple[str, Any]]:
    """The float32 arrays, by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [(keystr(path, simple=True, separator="/"), x) for path, x in leaves
            if getattr(x, "ndim", 0) and x.size and x.dtype == jnp.float32]  # fmt: skip


def replicated_axes(params: Iterable[Any]) -> tuple[str, ...]:
    """The axes of the parameters' mesh along which none of them is divided."""
    shardings = [s for x in params if isinstance(s := sharding_of(x), NamedSharding)]
    if not shardings:
        return ()
    used = {name for s in shardings for entry in s.spec for name in names_in(entry)}
    return tuple(name for name, size in shardings[0].mesh.shape.items() if size > 1 and name not in used)
