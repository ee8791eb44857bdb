"""Train a small GPT on real text, with the optimizer's state in host memory and gradients clipped by their norm.

python examples/train_lm.py --pipelined                  # hides the transfers: use this on an accelerator
python examples/train_lm.py                              # the same step under jax.jit, which waits for them
python examples/train_lm.py --resident --stop-at 50      # the same losses, with the state on the device
python examples/train_lm.py --pipelined --model 7b --context 2048  # on an H200, too small for --resident
python examples/train_lm.py --pipelined --parameters host  # the blocks' parameters are in host memory too
python examples/train_lm.py --disk DIR --host-bytes 1MiB # keeps the state beyond 1 MiB in files, and resumes
"""

import argparse
import time
from functools import partial
from pathlib import Path

import _extra

try:
    import _data
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from _gpt import GPT, SIZES, Config, generate
    from flax.training.train_state import TrainState
    from tqdm import tqdm

    import jax_offload as jo
except ModuleNotFoundError as error:
    raise _extra.missing(error) from error


def muon(schedule):
    # Blocks are stacked: a leaf with three axes is a matrix per layer, which muon would not guess.
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    def dimensions(params):
        return jax.tree.map(lambda p: matrix if p.ndim == 3 else None, params)

    return optax.contrib.muon(schedule, consistent_rms=0.2, muon_weight_dimension_numbers=dimensions)


STORAGE = {  # first and second moment of Adam, by their names in optax
    "float32": None,
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float8": {"mu": "float8_e4m3fn", "nu": "float16"},
    "float8_both": "float8_e4m3fn",
    "int8": {"mu": "int8", "nu": "uint8"},
}
OPTIMIZERS = {  # name: peak learning rate at width 128, schedule -> optimizer
    "adamw": (3e-3, partial(optax.adamw, b2=0.95, weight_decay=0.1)),
    "adafactor": (3e-3, optax.adafactor),
    "lion": (3e-4, partial(optax.lion, weight_decay=0.1)),
    "muon": (3e-3, muon),
    "schedule_free_adamw": (3e-3, lambda s: optax.contrib.schedule_free(optax.adamw(s, b1=0.0, b2=0.95), s)),
    "sgd": (1e-1, partial(optax.sgd, momentum=0.9)),
}


def in_bytes(text):
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return int(float(text[:-3]) * units[text[-3:]]) if text[-3:] in units else int(text)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=SIZES, default="tiny")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--lr", type=float, help="peak learning rate; by default one that suits optimizer and model")
    add("--fraction", type=float, default=1.0, help="the share of the state in host memory")
    add("--resident", action="store_true", help="plain optax, for comparison")
    add("--pipelined", action="store_true", help="each batch's update in the forward pass of the next one")
    add("--parameters", choices=["device", "host"], default="device", help="where the blocks' parameters live")
    add("--storage", choices=STORAGE, default="float32", help="the format of adamw's moments in host memory")
    add("--param-dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--master", choices=["none", "float32"], default="none", help="keep master parameters in the state")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=600)
    add("--stop-at", type=int, metavar="STEP", help="stop early, on the schedule of --steps")
    add("--batch", type=int, default=16)
    add("--context", type=int, default=128)
    add("--data", help="a text file or a folder; by default the sources of Python's standard library")
    add("--checkpoint-dir", type=Path, help="save here, and resume from what is here")
    add("--save-every", type=int, default=100)
    add("--disk", type=Path, metavar="DIR", help="keep the state here, and resume from what is here")
    add("--host-bytes", type=in_bytes, default=0, metavar="1MiB", help="the bytes of state in host memory, with --disk")
    add("--commit-every", type=int, default=100, metavar="STEPS", help="commit this often, with --disk")
    add("--sample", type=int, default=400, metavar="BYTES", help="the length of the text that the trained model writes")
    add("--blocking-saves", action="store_true", help="no copy of the state in host memory: training waits for saves")
    args = parser.parse_args(argv)
    if args.disk and (args.checkpoint_dir or args.resident or args.pipelined):
        parser.error("--disk: the files are the checkpoint, and the step is jo.jit's: leave the other option out")
    if args.parameters == "host" and (args.disk or args.resident):
        parser.error("--parameters host: the optimizer has to stream them: leave the other option out")
    return args


def optimizer(args, disk=None):
    peak, build = OPTIMIZERS[args.optimizer]
    peak = args.lr or peak * 128 / SIZES[args.model][1]  # wider models want smaller steps
    warmup = max(1, min(100, args.steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, args.steps, end_value=peak / 10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), build(schedule))
    if args.master != "none":
        tx = jo.with_master_params(tx, args.master)
    if args.resident:
        return tx
    return jo.offload(tx, fraction=args.fraction, storage=STORAGE[args.storage], disk=disk)


def loss_fn(params, apply_fn, batch):
    logits = apply_fn({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:].astype(jnp.int32)).mean()


def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), loss


# The state is donated, so that neither it nor the parameters exist twice.
train_step = jax.jit(step, donate_argnums=0)


# jo.jit reads and writes the part of the state that is in files, and loads parameters layer by layer.
whole_step = jo.jit(step, donate_argnums=0)


# Each update runs in the next batch's forward pass; the state is then a carry, until it is finished.
pipelined_step = jo.pipelined(step, donate_argnames="state")


def eval_params(state):
    inner = state.opt_state[-1]  # behind the clipping
    if not isinstance(inner, optax.contrib.ScheduleFreeState):
        return state.params
    return optax.contrib.schedule_free_eval_params(inner._replace(z=jo.to_device(inner.z)), state.params)


def evaluate(state, data, args):
    loss, params = jax.jit(loss_fn, static_argnums=1), jo.to_device(eval_params(state))
    batches = [_data.batch(data, i, args.batch, args.context) for i in range(16)]
    return float(np.mean([loss(params, state.apply_fn, batch) for batch in batches]))


def shapes_of(args, model, device):
    """Return a function of a key that makes the parameters, and their shapes, committed to the device."""

    def init(key):
        params = model.init(key, jnp.zeros((1, args.context), jnp.int32))["params"]
        params = jax.tree.map(lambda p: p.astype(args.param_dtype), params)
        return params | {"blocks": jo.to_host(params["blocks"])} if args.parameters == "host" else params

    # All that the step takes is committed to the device: uncommitted arrays would compile it a second time.
    on_device = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.eval_shape(init, jax.random.key(args.seed))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), shapes)
    if args.parameters == "host":
        shapes["blocks"] = jo.to_host(shapes["blocks"])
    return init, shapes


def initial_state(args, model, tx, device, manager, disk):
    init, shapes = shapes_of(args, model, device)
    on_device = jax.sharding.SingleDeviceSharding(device)
    count = sum(x.size for x in jax.tree.leaves(shapes))
    print(f"{args.model}: {count / 1e6:,.1f}M parameters on {device.device_kind}")
    print("optimizer state resident" if args.resident else jo.placement(tx, shapes))

    step = (manager and manager.latest_step()) or 0
    if step:
        # The target says where each leaf belongs; it is read straight into that memory.
        items = jo.restore(manager, {"params": shapes, "opt_state": jo.abstract_state(tx, shapes)})
        print(f"resumed at step {step}")
    elif disk and disk.last_commit is not None:
        items, step = disk.resume({"params": shapes, "opt_state": jo.abstract_state(tx, shapes)})
        print(f"resumed at step {step}")
    elif disk:
        params = jax.jit(init, out_shardings=on_device)(jax.random.key(args.seed))
        items = {"params": params, "opt_state": tx.init(params)}  # which makes the files
    else:
        params_at = jax.tree.map(lambda x: x.sharding, shapes)
        params = jax.jit(init, out_shardings=params_at)(jax.random.key(args.seed))
        state_at = jax.tree.map(lambda x: x.sharding, jo.abstract_state(tx, shapes))
        opt_state = jax.jit(tx.init, out_shardings=state_at)(params)
        items = {"params": params, "opt_state": opt_state}
    return TrainState(step=jax.device_put(np.int32(step), on_device), apply_fn=model.apply, tx=tx, **items)


def main(argv=None):
    args = parse(argv)
    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    model = GPT(Config(*SIZES[args.model], args.context, dtype))
    train, held_out = _data.split(_data.load(args.data))
    manager = args.checkpoint_dir and ocp.CheckpointManager(
        args.checkpoint_dir.absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=args.save_every),
    )
    disk = jo.disk(args.disk, host_bytes=args.host_bytes) if args.disk else None
    state = initial_state(args, model, optimizer(args, disk), device, manager, disk)

    start, stop = int(state.step), min(args.stop_at or args.steps, args.steps)
    before = evaluate(state, held_out, args)
    print(f"held-out loss {before:.3f} nats per byte")
    losses, times, seconds, speed = [], [], 0.0, 0.0

    def one(batch):
        """Take a step; return its loss and its seconds."""
        nonlocal state
        began = time.perf_counter()
        if args.pipelined:
            state, aux = pipelined_step(state, batch)
            loss = aux.now
        else:
            state, loss = (whole_step if disk or args.parameters == "host" else train_step)(state, batch)
        return float(loss), time.perf_counter() - began

    bar = tqdm(range(start, stop), initial=start, total=stop, disable=None, unit="step")
    for i in bar:
        loss, took = one(_data.batch(train, i, args.batch, args.context))
        losses.append(loss)
        if i > start + args.pipelined:  # those before were compiled
            times.append(took)
            seconds = float(np.median(times))
            speed = args.batch * args.context / seconds
            report = f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s, {seconds * 1e3:.0f} ms per step"
            bar.set_postfix_str(report, refresh=False)
            if bar.disable and (i + 1) % max(1, args.steps // 20) == 0:  # no terminal, no bar
                print(f"step {i + 1} of {stop}: {report}, {seconds * (stop - i - 1):.0f} s left", flush=True)
        if disk and (i + 1 == stop or (i + 1) % args.commit_every == 0):
            disk.commit(i + 1, {"params": state.params, "opt_state": state.opt_state})
        if manager and (i + 1 == stop or manager.should_save(i + 1)):
            state = pipelined_step.finish(state) if args.pipelined else state
            items = {"params": state.params, "opt_state": state.opt_state}
            # Written while training goes on: the next step donates this memory, so the writer gets a copy of it.
            manager.save(i + 1, args=jo.save_args(items, copy=not args.blocking_saves), force=True)
            if args.blocking_saves:
                manager.wait_until_finished()

    if manager:
        manager.close()  # waits for the last save
    state = pipelined_step.finish(state) if args.pipelined else state
    after = evaluate(state, held_out, args)
    print(f"held-out loss {before:.3f} -> {after:.3f} nats per byte, {speed:,.0f} tokens/s")
    prompt, sample = b"\ndef ", ""
    if args.sample > len(prompt):
        params, key = jo.to_device(eval_params(state)), jax.random.key(1)
        sample = generate(params, model.apply, prompt, key, args.context, args.sample)
        print(f"sample:\n{sample}")
    if disk:
        disk.close()
    found = {"losses": losses, "held_out": (before, after), "state": state, "seconds": seconds, "sample": sample}
    return found | {"again": lambda: one(_data.batch(train, stop, args.batch, args.context))[1]}  # donates the state


if __name__ == "__main__":
    main()
