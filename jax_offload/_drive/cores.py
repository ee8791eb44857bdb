"""The host's cores: where the programs run that update what is in host memory, and how arrays come to them.

The programs run on jax's CPU backend, and see pinned host memory as arrays of it, without a copy. XLA copies what such
a view is donated for, so its programs make new buffers, which are pinned again by a copy where the platform does not
take them as they are. Only kernels (``kernel.py``) write in place what was donated. Where the step itself runs on a
CPU, they read and write its memory too.

With several accelerators kernels go shard by shard. XLA's programs update a leaf once, whole, for all of them: what is
divided between them is put together in host memory, one more copy, and its new values are divided again; of what is
replicated one copy is taken.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jax_offload._base.boxes import Box, box_of, box_of_shape, shape_of
from jax_offload._base.jaxprs import (
    Atom,
    EquationContext,
    Jaxpr,
    Literal,
    Var,
    closed,
    jax_fun,
    jaxpr_of,
    with_jaxprs,
)
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, copy_on_host, on_host, to_host, with_kind
from jax_offload._base.private import address_of

# Elements that a thread takes at least, and parts of an array for each thread, which may be kept waiting by others.
_AT_LEAST, _PARTS = 2**16, 8
_MOST_CORES = 4096  # of a host; more share their numbers
_ALIGNED = 64  # bytes; XLA takes memory with this alignment without a copy


@functools.cache
def cpu() -> Any:
    """The device of jax's CPU backend, which updates host leaves with the cores of this process's host.

    Raises:
      ValueError: jax was told to do without its CPU backend.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "update_on: jax runs without its CPU backend, which updates what is on the host. Fix: add ',cpu' to "
            "JAX_PLATFORMS, or update_on='device'."
        ) from error


def sent(x: Any) -> Any:
    """A value of the device on its way to host memory; scalars are read where they are. Waits for nothing.

    Put into a memory space, not into a sharding, jax runs a program, which comes after those that have begun; of
    several processes it takes no other way.
    """
    if not is_sent(x) or on_host(x) or on_cpus(x.sharding.device_set):
        return x
    if not x.is_fully_addressable:
        return to_host(x)
    return jax.device_put(x, with_kind(x.sharding, HOST_KIND), may_alias=False)


def lent(x: Any) -> Any:
    """What has been sent, as an operand of a program of XLA's: whole, once it is there."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.device_put(one_of(x), cpu())
    here = with_kind(SingleDeviceSharding(cpu()), x.sharding.memory_kind)
    return jax.device_put(np.asarray(one_of(x)), here, may_alias=True)


def brought_back(x: Any, sharding: Sharding, *, by_shards: bool) -> Any:
    """A result in the step's own memory, ``by_shards`` of a kernel; its copy is under way."""
    if by_shards:
        return _resharded_as(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.device_put(x, sharding)
    return jax.device_put(np.asarray(x), with_kind(sharding, x.sharding.memory_kind), may_alias=on_host(x))


def on_cpus(devices: Iterable[Any]) -> bool:
    """Whether all memory of these devices is the host's."""
    return all(device.platform == "cpu" for device in devices)


def is_sent(x: Any) -> bool:
    """Whether an array, or a type, comes to the cores through host memory: no scalar, no PRNG keys."""
    return len(x.shape) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def one_of(x: Any) -> Any:
    """A shard of what is the same on all devices, as a view of its memory; else the array."""
    return x.addressable_data(0) if isinstance(x, jax.Array) and x.is_fully_replicated else x


def _resharded_as(x: jax.Array, sharding: Sharding) -> jax.Array:
    """What was updated by parts, as it is to be; where it is to be divided otherwise the accelerators see to that."""
    if x.sharding == sharding:
        return x
    if not x.sharding.is_equivalent_to(with_kind(sharding, str(x.sharding.memory_kind)), x.ndim):
        x = jax.device_put(x, with_kind(x.sharding, DEVICE_KIND))
        x = jax.device_put(x, with_kind(sharding, DEVICE_KIND))
    return jax.device_put(x, sharding)


def replicas_of(x: Any) -> dict[Box, list[Any]]:
    """The boxes of an array that this process has, each with its replicas."""
    if not isinstance(x, jax.Array):
        return {box_of_shape(np.shape(x)): [x]}
    found: dict[Box, list[Any]] = {}
    for shard in x.addressable_shards:
        found.setdefault(box_of(shard.index, x.shape), []).append(shard.data)
    return found


def memory_of(x: jax.Array) -> Any:
    """An array's memory, to overwrite. XLA, which knows of no view then, still hands it over in the next step."""
    buffer = (ctypes.c_char * x.nbytes).from_address(address_of(jax.block_until_ready(x)))
    return np.frombuffer(buffer, x.dtype).reshape(x.shape)


def aligned(box: Box, dtype: Any) -> Any:
    """Memory for a part of a result."""
    shape = shape_of(box)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)


def taken_over(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Donated arrays in memory of the step's own, where they are. Waits for nothing.

    They pass through a program that does nothing and that they are donated to. It runs when all programs that read
    them have ended, marks them as deleted for everybody else, and copies what is not XLA's own, as an array is that
    was made of NumPy's. On a GPU XLA refuses while somebody holds a NumPy view; then they are copied.
    """
    try:
        return _handed_over(tuple(x.sharding for x in arrays))(*arrays) if arrays else ()
    except jax.errors.JaxRuntimeError:
        if any(x.is_deleted() for x in arrays):
            raise
        copies = [copy_on_host(x) for x in arrays]
        for x in arrays:
            x.delete()
        return copies


@functools.lru_cache(256)
def _handed_over(shardings: tuple[Sharding, ...]) -> Callable[..., Sequence[jax.Array]]:
    donated = tuple(range(len(shardings)))
    return jax.jit(lambda *xs: xs, donate_argnums=donated, out_shardings=shardings)


@functools.cache
def has_numba() -> bool:
    """Whether kernels can be compiled (extra ``cores``)."""
    try:
        import numba  # noqa: F401  # pyright: ignore
    except ImportError:
        return False
    return True


def on_all_threads(size: int, run: Callable[[int, int], None]) -> None:
    """``run(start, stop)`` for parts of so many elements, by the threads that are free for them."""
    part = max(_AT_LEAST, -(-size // (_PARTS * threads())))
    starts = range(0, size, part)
    if len(starts) == 1:
        run(0, size)
    else:
        list(_pool().map(lambda start: run(start, min(start + part, size)), starts))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "jax_offload")


@functools.cache
def threads() -> int:
    """As many as the process may use cores; of those that others of the job may use too, its share."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    if jax.process_count() == 1:
        return len(cores)
    mine = np.zeros(_MOST_CORES, np.int32)
    mine[[core % _MOST_CORES for core in cores]] = 1
    host = np.int32(zlib.crc32(socket.gethostname().encode()) >> 1)
    # All processes are here, as each comes to its first kernel in the same step.
    hosts, masks = multihost_utils.process_allgather((host, mine))
    return max(1, int((mine / np.maximum(masks[hosts == host].sum(0), 1)).sum() + 1e-6))


_CONSTRAINTS = ("sharding_constraint", "reshard")


def run_undivided(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """A jaxpr for a mesh as a function of arrays that are whole, on one device: without constraints and shardings."""
    with _no_mesh():
        traced = jaxpr_of(lambda x: x + 1, jax.ShapeDtypeStruct((), np.float32))[0]
        return jax_fun(closed(_undivided(jaxpr, traced.jaxpr.eqns[0].ctx)))


def without_mesh(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` where no mesh is set: the step's is none of the cores'."""

    def called(*operands: Any) -> Any:
        with _no_mesh():
            return run(*operands)

    return called


def _no_mesh() -> Any:
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def _undivided(jaxpr: Jaxpr, context: EquationContext) -> Jaxpr:
    """``context``: of an equation that was traced without a mesh, as these know theirs."""
    names: dict[Var, Atom] = {}

    def read(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else names[v]

    def variable(v: Any) -> Any:
        names[v] = new = Var(v.aval.update(sharding=None)) if hasattr(v.aval, "sharding") else v
        return new

    consts, inputs = [variable(v) for v in jaxpr.constvars], [variable(v) for v in jaxpr.invars]
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CONSTRAINTS:
            names[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        operands = [read(v) for v in eqn.invars]
        inside = with_jaxprs(eqn.params, functools.partial(_undivided, context=context))
        params = {k: None if isinstance(x, Sharding) else x for k, x in inside.items()}
        results = [variable(v) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=operands, outvars=results, params=params, ctx=context))
    return Jaxpr(consts, inputs, [read(v) for v in jaxpr.outvars], eqns, jaxpr.effects, jaxpr.debug_info)
