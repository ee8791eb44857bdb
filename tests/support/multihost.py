"""Runs examples/multihost_lm.py in one of several processes and writes what this process sees of the result.

python -m tests.support.multihost REPORT.json [arguments of the example]
"""

import json
import math
import sys
from pathlib import Path

import jax
import multihost_lm

import jax_offload as jo


def axes(x):
    """For every axis the mesh axes that divide it; a spec may stop early, and name one with or without a tuple."""
    spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
    return [[] if names is None else [names] if isinstance(names, str) else list(names) for names in spec]


def describe(tree):
    """For every leaf where it is, and how many bytes of it this process holds."""
    rows = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        rows[jax.tree_util.keystr(path)] = {
            "shape": x.shape,
            "spec": axes(x),
            "shard": x.sharding.shard_shape(x.shape),
            "kind": x.sharding.memory_kind,
            "bytes": x.nbytes,
            "held": sum(math.prod(s.data.shape) * x.dtype.itemsize for s in x.addressable_shards),
        }
    return rows


def compiled_again(train, carry, batch):
    """How many programs are compiled if training goes on."""
    names = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: names.append(name))
    for _ in range(2):
        carry, aux = train(carry, batch)
        jax.block_until_ready(aux.now)
    return sum(name.endswith("backend_compile_duration") for name in names)


def main(report, *args):
    result = multihost_lm.main(args)
    tx, params, state = result["tx"], result["params"], result["state"]
    outcome = {
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "devices": [jax.device_count(), jax.local_device_count()],
        "mesh": dict(jax.tree.leaves(params)[0].sharding.mesh.shape),
        "losses": result["losses"],
        "placement": str(result["placement"]),
        "params": describe(params),
        "state": describe(state),
        # What works on one process without jit works on several too.
        "eager init": describe(tx.init(params)),
        "back on the host": describe(jo.to_host(tx, jo.to_device(state), params)),
        "compiled again": compiled_again(result["train"], (params, state), result["batch"]),
    }
    Path(report).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
