"""The host's cores, which update leaves in host memory: how arrays reach them, and how results come back.

Their programs run on jax's CPU backend, which sees pinned host memory as its own arrays, without a copy. XLA would copy
such a view if it were donated. So XLA's programs make new buffers, which are pinned again by a copy if the platform
does not take them as they are; only kernels (``kernel.py``) write donated state in place.

With several accelerators, kernels update shard by shard. XLA's programs update each leaf once, whole: the shards are
put together in host memory, one more copy, and the new values are divided again; of replicas, one is read.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jax_offload._disk.disk import allgathered
from jax_offload._program.jaxprs import Jaxpr, Literal, jaxpr_of, jit, nameless, run_equation, values_of, with_jaxprs
from jax_offload._program.memory import (
    DEVICE_KIND,
    HOST_KIND,
    copy_on_host,
    is_host_aval,
    on_host,
    to_device,
    to_host,
    with_kind,
)
from jax_offload._program.shardings import Box, box_of, shape_of

# The fewest elements in a part, and the number of parts for each thread: threads that are delayed take fewer.
_AT_LEAST, _PARTS = 2**16, 8
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
            "update_on: jax runs without its CPU backend, which updates leaves on the host. Fix: add ',cpu' to "
            "JAX_PLATFORMS, or update_on='device'."
        ) from error


def sent(x: Any) -> Any:
    """Start to copy a value to host memory, without waiting; scalars are read where they are.

    ``to_host`` runs a program, behind those that have begun. It is the only way jax has with several processes.
    """
    if not is_sent(x) or on_host(x) or on_cpus(x.sharding.device_set):
        return x
    if not x.is_fully_addressable:
        return to_host(x)
    return jax.device_put(x, with_kind(x.sharding, HOST_KIND), may_alias=False)


def lent(x: Any) -> Any:
    """Return a value that was sent as an operand of a program of XLA: whole, once it has arrived.

    Another CPU's array goes there by itself. A NumPy view of it would last until that program has ended, and whoever
    donates the array meanwhile would have it copied, and not deleted. Pinned memory is seen through such a view.
    """
    x = one_of(x)
    here = with_kind(SingleDeviceSharding(cpu()), x.sharding.memory_kind)
    return jax.device_put(x, here) if _is_plain(x, here) else jax.device_put(np.asarray(x), here, may_alias=True)


def brought_back(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Start to copy a result to the step's own memory. A kernel has made it on the step's devices already, which divide
    it otherwise if need be; a program of XLA has made it whole."""
    if x.sharding == sharding:
        return x
    as_it_is = with_kind(sharding, str(x.sharding.memory_kind))
    if x.sharding.device_set == sharding.device_set:
        if not x.sharding.is_equivalent_to(as_it_is, x.ndim):  # device memory divides it in another way
            x = jax.device_put(jax.device_put(x, with_kind(x.sharding, DEVICE_KIND)), with_kind(sharding, DEVICE_KIND))
    elif not _is_plain(x, sharding):
        return jax.device_put(np.asarray(x), as_it_is, may_alias=on_host(x))
    return jax.device_put(x, sharding)


def _is_plain(x: jax.Array, to: Sharding) -> bool:
    """Whether jax copies an array to other devices without NumPy: between CPUs, and PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended) or on_cpus(x.sharding.device_set | to.device_set)


def on_cpus(devices: Iterable[Any]) -> bool:
    """Whether all memory of these devices is the host's."""
    return all(device.platform == "cpu" for device in devices)


def is_sent(x: Any) -> bool:
    """Whether an array, or a type, comes to the cores through host memory: no scalar, no PRNG keys."""
    return len(x.shape) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def one_of(x: Any) -> Any:
    """Return one shard of a replicated array, a view of its memory; return any other array unchanged."""
    return x.addressable_data(0) if isinstance(x, jax.Array) and x.is_fully_replicated else x


def replicas_of(x: jax.Array) -> dict[Box, list[jax.Array]]:
    """Map the boxes of an array that this process has to their replicas."""
    found: dict[Box, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        found.setdefault(box_of(shard.index, x.shape), []).append(shard.data)
    return found


def memory_of(x: jax.Array) -> Any:
    """Return an array's memory as a view; a copy where it has no address, or another layout than row by row.

    XLA does not know of the view, so that it can still donate the array.
    """
    layout = cast(Any, x).format.layout
    if not has_addresses(x.sharding.device_set) or layout.major_to_minor != tuple(range(x.ndim)):
        return np.asarray(x)
    buffer = (ctypes.c_char * x.nbytes).from_address(jax.block_until_ready(x).unsafe_buffer_pointer())
    return np.frombuffer(buffer, x.dtype).reshape(x.shape)


def has_addresses(devices: Iterable[Any]) -> bool:
    """Whether these devices' host memory has addresses for us."""
    return all(device.platform in ("cpu", "gpu", "cuda", "rocm") for device in devices)


def aligned(box: Box, dtype: Any) -> Any:
    """Allocate memory for a part of a result, aligned as XLA takes it without a copy."""
    shape = shape_of(box)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)


def taken_over(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Make donated arrays the step's own, in their memory, without waiting.

    They are donated to a program that does nothing. It runs when all programs that read them have ended, marks them as
    deleted for everybody else, and copies memory that is not XLA's own, such as NumPy's. A GPU refuses while somebody
    holds a NumPy view; then they are copied.
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
    """Call ``run(start, stop)`` for all parts of an array of ``size`` elements, each in the next free thread."""
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
    """Return the number of cores that this process may use: its share of those that other processes may use too."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    # all processes are here, as each comes to its first kernel in the same step
    said = allgathered([socket.gethostname(), hex(sum(1 << core for core in mine))])
    masks = [int(mask, 16) for host, mask in said if host == socket.gethostname()]
    return max(1, int(sum(1 / sum(mask >> core & 1 for mask in masks) for core in mine) + 1e-6))


_CONSTRAINTS = ("sharding_constraint", "reshard")


def program(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """Compile a jaxpr as a program of XLA on the cores. It takes operands that were sent.

    It runs without the step's mesh, which does not contain the cores.
    """
    run = jit(_run_undivided(jaxpr))

    def called(*operands: Any) -> list[Any]:
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            return run(*map(lent, operands))

    return called


def _run_undivided(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """Return a jaxpr for a mesh as a function of whole arrays on one device, without constraints and shardings. Its
    operands may be in host memory, whatever its types say."""

    def step_cores(*operands: Any) -> list[Any]:
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        env = {v: x if is_host_aval(v.aval) else to_device(x) for v, x in zip(inputs, operands, strict=True)}
        for eqn in jaxpr.eqns:
            results = given = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if eqn.primitive.name not in _CONSTRAINTS:
                inside = with_jaxprs(eqn.params, _undivided)
                results = run_equation(
                    eqn, given, {k: None if isinstance(x, Sharding) else x for k, x in inside.items()}
                )
            env.update(zip(eqn.outvars, results, strict=True))
        return values_of(env, jaxpr.outvars)

    return step_cores


def _undivided(jaxpr: Jaxpr) -> Jaxpr:
    """Return an open jaxpr, a branch or the body of a loop, without constraints and shardings."""
    types = [
        cast(Any, v.aval).update(sharding=None) if hasattr(v.aval, "sharding") else v.aval
        for v in (*jaxpr.constvars, *jaxpr.invars)
    ]
    traced = jaxpr_of(_run_undivided(jaxpr), *types)[0].jaxpr
    n = len(jaxpr.constvars)
    return Jaxpr(
        traced.invars[:n], traced.invars[n:], traced.outvars, traced.eqns, traced.effects, nameless(traced.debug_info)
    )
