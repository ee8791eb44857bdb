"""One of several processes that save arrays together, restore them cut otherwise, and then find them damaged.

python -m tests.support.checksums FOLDER PORT PROCESSES PROCESS
"""

import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_offload as jo

SHAPE = (16, 64)
CUTS = [(("a", "b"), None), (None, ("a", "b")), ("b", "a"), ("a", None), (None, None)]


def main(folder, port, processes, process):
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    values = np.random.default_rng(0).integers(0, 2**32, SHAPE, dtype=np.uint32)

    def cut(spec, kind):
        sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)
        return jax.make_array_from_callback(SHAPE, sharding, lambda index: values[index])

    arrays = [cut(spec, kind) for spec in CUTS for kind in ("device", "pinned_host")]
    stored = jo.save_args([*arrays, values]).custom_metadata["jax_offload"]["checksums"]
    assert len({*stored.values()}) == 1 and len(stored) == len(arrays) + 1

    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=jo.save_args({"x": cut(CUTS[0], "pinned_host")}))
        manager.wait_until_finished()
        target = {"x": jax.ShapeDtypeStruct(SHAPE, np.uint32, sharding=arrays[3].sharding)}
        back = jo.restore(manager, target)["x"]
        assert back.sharding == arrays[3].sharding
        for shard in back.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
        multihost_utils.sync_global_devices("restored")
        if process == "0":
            damage(folder, values)
        multihost_utils.sync_global_devices("damaged")
        with pytest.raises(ValueError, match="is damaged: other values than were saved in 1 of 1 leaves"):
            jo.restore(manager, target)
        print("noticed")


def damage(folder, values):
    """Two words in each other's place, which are stored as they are."""
    words, changed = values[3, 4:6].tobytes(), values[3, 5:3:-1].tobytes()
    [path] = [p for p in Path(folder).rglob("*") if p.is_file() and words in p.read_bytes()]
    path.write_bytes(path.read_bytes().replace(words, changed))


if __name__ == "__main__":
    main(*sys.argv[1:])
