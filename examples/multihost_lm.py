"""Train a small GPT on all devices of all processes, with sharded parameters, and the sharded state in host memory.

python examples/multihost_lm.py                                  # one process, all of its devices
srun python examples/multihost_lm.py --cluster auto              # jax finds the others: SLURM, TPU pods, Open MPI
python examples/multihost_lm.py --coordinator HOST:PORT --processes 2 --process-id 0      # and 1 elsewhere

Gradients are clipped by their norm, so jo.pipelined hides the transfers. docs/sharding.md says more.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import _extra

try:
    import _data
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from _gpt import GPT, SIZES, Config
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jax_offload as jo
except ModuleNotFoundError as error:
    raise _extra.missing(error) from error


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cluster", metavar="METHOD", help="auto, or a cluster_detection_method of jax.distributed.initialize")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens, if jax does not detect the cluster")
    add("--processes", type=int, help="their number, with --coordinator")
    add("--process-id", type=int, help="this process's number, with --coordinator")
    add("--fsdp", type=int, help="devices that share one copy of the parameters; by default all")
    add("--zero1", action="store_true", help="also divide the state over what --fsdp leaves")
    add("--window", type=int, metavar="BYTES", help="device memory through which the state streams")
    add("--model", choices=SIZES, default="tiny")
    add("--lr", type=float, default=3e-3)
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=16, help="sequences per step, over all devices")
    add("--context", type=int, default=128)
    add("--data", help="a text file or a folder, the same for every process; by default Python's standard library")
    add("--losses", type=Path, help="process 0 writes them here as JSON")
    args = parser.parse_args(argv)
    explicit = (args.coordinator, args.processes, args.process_id)
    if None in explicit and explicit != (None,) * 3:
        parser.error("--coordinator, --processes and --process-id belong together: give all three or none")
    return args


def connect(args):
    """Connect the processes, before anything asks jax for devices. On CPUs they talk through Gloo, jax's default."""
    if args.cluster:
        try:
            jax.distributed.initialize(cluster_detection_method=None if args.cluster == "auto" else args.cluster)
        except ValueError as error:
            raise SystemExit(f"--cluster {args.cluster}: jax finds none ({error}) Use --coordinator.") from error
    elif args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process_id)


def make_mesh(args):
    devices, fsdp = jax.device_count(), args.fsdp or jax.device_count()
    if devices % fsdp:
        raise SystemExit(f"--fsdp {fsdp} does not divide the {devices} devices of {jax.process_count()} processes")
    if args.batch % devices:
        raise SystemExit(f"--batch {args.batch} is not a multiple of the {devices} devices")
    return jax.make_mesh((devices // fsdp, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def param_sharding(mesh, x):
    """Divide the longest axis that the devices of "fsdp" divide evenly; vectors stay whole."""
    axes = [i for i, n in enumerate(x.shape) if x.ndim > 1 and n % mesh.shape["fsdp"] == 0]
    longest = max(axes, key=lambda i: x.shape[i], default=None)
    return NamedSharding(mesh, PartitionSpec(*("fsdp" if i == longest else None for i in range(x.ndim))))


def local_batch(args, sharding, data, step):
    """Return the batch of all processes; each feeds only the rows that its own devices need."""
    shape = (args.batch, args.context + 1)
    needed = {index[0].indices(args.batch) for index in sharding.addressable_devices_indices_map(shape).values()}
    rows = np.concatenate([np.arange(*index) for index in sorted(needed)])
    tokens = _data.batch(data, step, args.batch, args.context)[rows]
    return jax.make_array_from_process_local_data(sharding, tokens, shape)


def main(argv=None):
    args = parse(argv)
    connect(args)
    mesh = make_mesh(args)
    say = print if jax.process_index() == 0 else lambda *_: None
    model = GPT(Config(*SIZES[args.model], args.context))
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 10), max(2, args.steps))
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    tx = jo.offload(inner, window=args.window, shard_over="data" if args.zero1 else None)

    def init():
        return model.init(jax.random.key(0), jnp.zeros((1, args.context), jnp.int32))["params"]

    # Both are created where they belong, by one program on all processes: nothing is gathered, nothing is sent.
    params_at = jax.tree.map(partial(param_sharding, mesh), jax.eval_shape(init))
    params = jax.jit(init, out_shardings=params_at)()
    state_at = jax.tree.map(lambda x: x.sharding, jo.abstract_state(tx, params))
    state = jax.jit(tx.init, out_shardings=state_at)(params)
    placement = jo.placement(tx, params)
    say(f"{jax.process_count()} processes, {jax.device_count()} devices, mesh {dict(mesh.shape)}\n{placement}")

    def step(params, state, batch):
        def loss_fn(params):
            logits = model.apply({"params": params}, batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:].astype(jnp.int32)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, loss

    data, _ = _data.split(_data.load(args.data))
    batch_at = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    train = jo.pipelined(step, donate_argnums=(0, 1))
    carry, losses = (params, state), []
    for i in range(args.steps):
        batch = local_batch(args, batch_at, data, i)
        carry, aux = train(carry, batch)
        losses.append(float(aux.now))
        say(f"step {i + 1}: loss {losses[-1]:.4f}")
    params, state = train.finish(carry)
    if args.losses and jax.process_index() == 0:
        args.losses.write_text(json.dumps(losses))
    found = {"losses": losses, "params": params, "state": state, "tx": tx, "placement": placement}
    return found | {"train": train, "batch": batch}


if __name__ == "__main__":
    main()
