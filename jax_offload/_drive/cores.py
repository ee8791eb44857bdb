"""The host's cores: where the programs run that update what is in host memory, and how arrays come to them.

On a CPU the step's own device is the host, so nothing moves, and donated state is updated in its buffers. With an
accelerator the programs run on jax's CPU backend, and see pinned host memory as arrays of it, without a copy. XLA
copies what such a view is donated for (0.10 to 0.12, tried on a CPU), so new leaves are new buffers, and are pinned
again by a copy where the platform does not take them as they are; only loops of elements (``by_parts.py``) write what
was donated in place.

With several accelerators loops of elements go part by part (``by_parts.py``). A leaf that is none of those' is updated
once, whole, for all of them: what is divided between them is put together in host memory, one more copy, and its new
values are divided again; of what is replicated one copy is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, on_host, to_host, with_kind


@dataclasses.dataclass(frozen=True)
class Cores:
    """Where host leaves are updated.

    Attributes:
      cpu: the device of jax's CPU backend; ``None`` where the step's own device is one.
    """

    cpu: Any = None

    def sent(self, x: Any) -> Any:
        """A value of the device on its way to host memory; scalars are read where they are. Waits for nothing.

        Put into a memory space, not into a sharding, jax runs a program, which comes after those that have begun; of
        several processes it takes no other way.
        """
        if self.cpu is None or not is_sent(x) or on_host(x):
            return x
        if not x.is_fully_addressable:
            return to_host(x)
        return jax.device_put(x, with_kind(x.sharding, HOST_KIND), may_alias=False)

    def lent(self, x: Any, *, assembled: bool = True) -> Any:
        """What has been sent, as an operand of a program of the cores: whole, once it is there, or as it was sent."""
        if self.cpu is None or not assembled:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return jax.device_put(one_of(x), self.cpu)
        here = with_kind(SingleDeviceSharding(self.cpu), x.sharding.memory_kind)
        return jax.device_put(np.asarray(one_of(x)), here, may_alias=True)

    def brought_back(self, x: Any, sharding: Sharding) -> Any:
        """A result of such a program in the step's own memory; its copy is under way."""
        if self.cpu is None:
            return x
        if self.cpu not in x.sharding.device_set:
            return _resharded_as(x, sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return jax.device_put(x, sharding)
        return jax.device_put(np.asarray(x), with_kind(sharding, x.sharding.memory_kind), may_alias=on_host(x))


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


def on_accelerators(devices: Iterable[Any]) -> bool:
    """Whether they are other than the host's cores."""
    return any(device.platform != "cpu" for device in devices)


def cores_beside(devices: Iterable[Any]) -> Cores:
    """The cores of the host of the devices that a step runs on.

    Raises:
      ValueError: jax was told to do without its CPU backend.
    """
    if not on_accelerators(devices := {*devices}):
        return Cores()
    try:
        return Cores(jax.local_devices(backend="cpu")[0])
    except RuntimeError as error:
        raise ValueError(
            "update_on: jax runs without its CPU backend, which updates what is on the host. Fix: add ',cpu' to "
            "JAX_PLATFORMS, or update_on='device'."
        ) from error
