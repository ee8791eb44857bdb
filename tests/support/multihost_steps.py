"""Trains in one of several processes, and writes what this process sees of it.

    python -m tests.support.multihost_steps REPORT.json KIND HOW [--coordinator ADDRESS --processes N --process-id I]

KIND is ``device`` or ``host``, where the gradients of ``jo.pipelined`` wait; or ``clipped`` or ``lamb``, which the
cores update. Then all of a process's CPU devices but the last stand for accelerators, and the last one stands for the
CPU backend beside them. HOW is ``fsdp`` or ``zero1``.
"""

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo

LAYERS, WIDTH, BATCH, STEPS = 4, 128, 8, 3
FLAG = r"(--xla_force_host_platform_device_count=)(\d+)"
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
OPTIMIZERS = {"device": CLIPPED, "host": CLIPPED, "clipped": CLIPPED, "lamb": optax.lamb(1e-2)}


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return ((x[:, :8] @ params["head"] - 1) ** 2).mean()


def placed(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def step_of(tx):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return *jo.update_params(tx, grads, state, params), value

    return step


def turned(tx, gradients, params, state, batches):
    """Losses, where what waits is, and the last parameters and state."""
    train = jo.pipelined(step_of(tx), donate_argnames=("params", "state"), gradients=gradients)
    outcome = {"placement": str(jo.placement(train, params, state, batches[0]))}
    carry, aux = train((params, state), batches[0])
    losses = [float(aux.now)]
    for x in batches[1:]:
        carry, aux = train(carry, x)
        losses.append(float(aux.now))
    shape = (LAYERS, WIDTH, WIDTH)
    waiting = Counter(x.sharding.memory_kind for x in jax.tree.leaves(carry) if np.shape(x) == shape)
    return outcome | {"losses": losses, "waiting": waiting}, train.finish(carry)


def on_the_cores(tx, inner, params, state, batches):
    """Losses, how far each step is from the plain one, the error that it raises, and the last parameters and state."""
    step, plain = jo.jit(step_of(tx), donate_argnums=(0, 1)), jax.jit(step_of(inner))
    outcome = {"losses": [], "error": "", "off": 0.0}
    try:
        for x in batches:
            want = plain(params, jo.to_device(state), x)
            params, state, value = step(params, state, x)
            outcome["losses"].append(float(value))
            pairs = zip(jax.tree.leaves((params, state)), jax.tree.leaves(want[:2]), strict=True)
            off = jax.jit(lambda pairs: [jnp.abs(jo.to_device(a) - b).max() for a, b in pairs])(list(pairs))
            outcome["off"] = max(outcome["off"], *map(float, off))
    except ValueError as error:
        outcome["error"] = str(error)
    return outcome, (params, state)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("kind", choices=OPTIMIZERS)
    parser.add_argument("how", choices=("fsdp", "zero1"))
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()
    waits = args.kind in ("device", "host")
    if not waits:
        os.environ["XLA_FLAGS"] = re.sub(FLAG, lambda m: f"{m[1]}{int(m[2]) + 1}", os.environ["XLA_FLAGS"])
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    local, devices = jax.local_device_count(), sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    used = [d for k, d in enumerate(devices) if waits or k % local < local - 1]
    mesh = Mesh(np.array(used).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "head": (8, WIDTH)}
    specs = {"layers": P(None, "data", "model") if args.how == "fsdp" else P(None, None, "model"), "head": P()}
    params = {
        name: placed(rng.standard_normal(shape, np.float32) / WIDTH**0.5, NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }
    batches = [
        placed(rng.standard_normal((BATCH, WIDTH), np.float32), NamedSharding(mesh, P("data"))) for _ in range(STEPS)
    ]
    inner = OPTIMIZERS[args.kind]
    options = {"shard_over": "data"} if args.how == "zero1" else {}
    tx = jo.offload(inner, min_bytes=0, **options, **({} if waits else {"update_on": "host"}))
    state = tx.init(params)
    places = [x.sharding for x in jax.tree.leaves((params, state))]
    if waits:
        outcome, after = turned(tx, args.kind, params, state, batches)
    else:
        outcome, after = on_the_cores(tx, inner, params, state, batches)
    leaves = jax.tree.leaves(after)
    norms = jax.jit(lambda tree: [jnp.linalg.norm(jo.to_device(x)) for x in jax.tree.leaves(tree) if x.ndim])
    gone = any(x.is_deleted() for x in leaves)  # an error came after the donation
    outcome |= {
        "processes": jax.process_count(),
        "norms": [] if gone else [float(x) for x in norms(after)],
        "kinds": [x.sharding.memory_kind for x in leaves],
        "stayed": all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(leaves, places, strict=True)),
        "held": 0 if gone else sum(s.data.nbytes for x in leaves for s in x.addressable_shards),
    }
    args.report.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
