"""What compiling ahead needs of jax beyond its documented API, for devices that may only be described: see ``private``.

| needed | for | seen in jax |
|---|---|---|
| the options of XLA's compiler, a list of devices, and ``compile`` of a client | ``compiled`` | 0.10 to 0.12 |
| the options of XLA's compiler that a jitted function was given | ``options_of`` | 0.10 to 0.12 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from jax_offload._base.private import _part_of


def options_of(traced: Any) -> dict[str, Any]:
    """The ``compiler_options`` of the ``jit`` that a ``jax.stages.Traced`` is from."""
    return dict(_part_of(traced, "_params")["compiler_options_kvs"])


def compiled(module: Any, devices: Sequence[Any], ids: Sequence[int], options: Mapping[str, Any]) -> Any:
    """The executable of a StableHLO module, divided between devices.

    Args:
      module: lowered for their platform.
      devices: of one client, which compiles.
      ids: their numbers in the program.
      options: of XLA.
    """
    config = _part_of(xla_client, "CompileOptions")()
    config.num_replicas, config.num_partitions = 1, len(devices)
    build = config.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    build.device_assignment = _part_of(xla_client, "DeviceAssignment").create(np.array([ids]))
    config.env_option_overrides = list(options.items())
    chosen = _part_of(xla_client, "_xla", "DeviceList")(tuple(devices))
    return devices[0].client.compile(module, chosen, config)
