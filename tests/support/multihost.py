"""Runs examples/multihost_lm.py in one of several processes and writes what this process sees of the result.

python -m tests.support.multihost REPORT.json [arguments of the example]
"""

import json
import sys
from pathlib import Path

import jax
import multihost_lm

import jax_offload as jo


def describe(tree):
    """For every leaf its memory, the mesh axes that divide each of its axes, its bytes, and those on each device."""
    rows = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]  # a spec may stop early,
        axes = [[names] if isinstance(names, str) else list(names or ()) for names in spec]  # and name one by itself
        (held,) = {shard.data.nbytes for shard in x.addressable_shards}
        rows[jax.tree_util.keystr(path)] = [x.sharding.memory_kind, axes, x.nbytes, held]
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
