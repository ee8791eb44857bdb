"""Updates on the host's cores in one of several processes, and writes what this process sees of it.

All of a process's CPU devices but the last stand for accelerators; the last is that of the CPU backend beside them.

python tests/support/multihost_cores.py REPORT.json OPTIMIZER HOW [--coordinator ADDRESS --processes N --process-id I]
"""

import argparse
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._drive.cores import threads
from jax_offload._drive.kernel import OnePass
from jax_offload._interop.jit import Undone

WIDTH, STEPS = 64, 3
FLAG = r"(--xla_force_host_platform_device_count=)(\d+)"
OPTIMIZERS = {"clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), "lamb": optax.lamb(1e-2)}


def loss(params, x):
    return (jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()


def placed(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def step_of(tx):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return *jo.update_params(tx, grads, state, params), value

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("how", choices=("fsdp", "zero1"))
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = re.sub(FLAG, lambda m: f"{m[1]}{int(m[2]) + 1}", os.environ["XLA_FLAGS"])
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    local = jax.local_device_count()
    used = [
        d for k, d in enumerate(sorted(jax.devices(), key=lambda d: (d.process_index, d.id))) if k % local < local - 1
    ]
    mesh = Mesh(np.array(used).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rng, spec = np.random.default_rng(0), P("data", "model") if args.how == "fsdp" else P(None, "model")
    params = {
        name: placed(rng.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5, NamedSharding(mesh, spec))
        for name in "ab"
    }
    batches = [
        placed(rng.standard_normal((8, WIDTH), np.float32), NamedSharding(mesh, P("data"))) for _ in range(STEPS)
    ]
    inner = OPTIMIZERS[args.optimizer]
    more = {"shard_over": "data"} if args.how == "zero1" else {}
    tx = jo.offload(inner, min_bytes=0, update_on="host", **more)
    step, plain = jo.jit(step_of(tx), donate_argnums=(0, 1)), jax.jit(step_of(inner))
    state = tx.init(params)
    places = [x.sharding for x in jax.tree.leaves((params, state))]
    outcome = {"losses": [], "error": "", "off": 0.0, "by parts": 0}
    try:
        for x in batches:
            want = plain(params, jo.to_device(state), x)
            params, state, value = step(params, state, x)
            outcome["losses"].append(float(value))
            pairs = zip(jax.tree.leaves((params, state)), jax.tree.leaves(want[:2]), strict=True)
            off = jax.jit(lambda pairs: [jnp.abs(jo.to_device(a) - b).max() for a, b in pairs])(list(pairs))
            outcome["off"] = max(outcome["off"], *map(float, off))
        ((driven, _),) = Undone.found_in(step._outermost((params, state, x), {})(params, state, x)).programs.values()
        outcome["by parts"] = sum(isinstance(each, OnePass) for _, each in driven._tasks)
    except ValueError as error:
        outcome["error"] = str(error)
    outcome["threads"] = threads() if outcome["by parts"] else 0
    leaves = jax.tree.leaves((params, state))
    outcome["stayed"] = all(x.sharding == place for x, place in zip(leaves, places, strict=True))
    outcome["held"] = sum(s.data.nbytes for x in leaves for s in x.addressable_shards) if not outcome["error"] else 0
    outcome["kinds"] = [x.sharding.memory_kind for x in leaves]
    args.report.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
