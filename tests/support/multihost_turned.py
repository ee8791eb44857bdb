"""Trains with ``jo.pipelined`` in one of several processes and writes what this process sees of it.

python tests/support/multihost_turned.py REPORT.json GRADIENTS [--coordinator ADDRESS --processes N --process-id I]
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo

LAYERS, WIDTH, BATCH, STEPS = 4, 128, 8, 3


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return ((x[:, :8] @ params["head"] - 1) ** 2).mean()


def placed(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("gradients", choices=("device", "host"))
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    shape = {"layers": (LAYERS, WIDTH, WIDTH), "head": (8, WIDTH)}
    specs = {"layers": P(None, "data"), "head": P()}
    params = {
        name: placed(rng.standard_normal(s, np.float32) / WIDTH**0.5, NamedSharding(mesh, specs[name]))
        for name, s in shape.items()
    }
    batches = [
        placed(rng.standard_normal((BATCH, WIDTH), np.float32), NamedSharding(mesh, P("data"))) for _ in range(STEPS)
    ]
    tx = jo.offload(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), min_bytes=0)

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return *jo.update_params(tx, grads, state, params), value

    train = jo.pipelined(step, donate_argnames=("params", "state"), gradients=args.gradients)
    carry, aux = train.start(params, tx.init(params), batches[0])
    values = [aux.now]
    for x in batches[1:]:
        carry, aux = train(carry, x)
        values.append(aux.now)
    waiting = Counter(x.sharding.memory_kind for x in jax.tree.leaves(carry) if np.shape(x) == shape["layers"])
    params, state = train.finish(carry)
    norms = jax.jit(lambda tree: [jnp.linalg.norm(jo.to_device(x)) for x in jax.tree.leaves(tree) if x.ndim])
    outcome = {
        "processes": jax.process_count(),
        "losses": [float(x) for x in values],
        "norms": [float(x) for x in norms((params, state))],
        "kinds": [x.sharding.memory_kind for x in jax.tree.leaves((params, state))],
        "waiting": waiting,
        "placement": str(jo.placement(train, params, state, batches[0])),
    }
    args.report.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
