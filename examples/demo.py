"""Show in one picture that offloading keeps the losses and lowers device memory, and where the time goes.

It trains a small GPT with its state in host memory, and for some steps with plain optax. Then it compiles the
same step, with a model of 7e9 parameters, for a GPU that need not be here, and takes its figures from ``jo.inspect``.

python examples/demo.py                                  # make demo
python examples/demo.py --model 1.3b --steps 200         # it passes other options on to train_lm.py
"""

import argparse
import os
from pathlib import Path

import _extra

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # silence XLA's remarks on a step that does not fit
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # and on a compiler for GPUs without CUDA

try:
    import _picture
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import train_lm
    from _gpt import GPT, SIZES, Config
    from flax.training.train_state import TrainState

    import jax_offload as jo
except ModuleNotFoundError as error:
    raise _extra.missing(error) from error

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# The parts of jo.inspect's peak by their names in the picture; all others are "temporary".
NAMES = {"state on the device": "optimizer state", "parameters": "parameters"}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--picture", type=Path, default="demo.png")
    add("--beside", type=int, default=100, metavar="STEPS", help="length of the resident run")
    add("--chip", choices=["h100", "h200"], default="h200", help="the chip to compile for")
    add("--compiled", choices=SIZES, default="7b", metavar="MODEL", help="the model to compile")
    add("--tokens", type=int, nargs=2, default=(16, 2048), metavar=("BATCH", "CONTEXT"), help="its tokens")
    return parser.parse_known_args(argv)


def trained(args, rest):
    """Train both ways; return the runs by name."""
    print("== the state in host memory", flush=True)
    runs = {"offloaded": train_lm.main(["--pipelined", *rest])}
    if args.beside > 1:
        print("\n== for comparison: plain optax, the state on the device", flush=True)
        beside = ["--resident", "--stop-at", str(args.beside), "--sample", "0"]
        runs = {"resident": train_lm.main([*rest, *beside]), **runs}
    return runs


def measured(runs, rounds=15):
    """Return the median seconds of each run's step. The runs take turns, so that a disturbance hits all of them.

    The steps donate the states of the runs.
    """
    times = {name: [] for name in runs}
    for k in range(rounds + 2):
        for name, run in runs.items():
            seconds = run["again"]()
            times[name] += [seconds] if k > 1 else []  # the first two start the pipeline again
    return {name: float(np.median(each)) for name, each in times.items()}


def memories(tree):
    """Return the bytes of a tree's arrays by memory kind, without scalars such as counts."""
    found = {}
    for x in jax.tree.leaves(tree):
        if x.ndim:
            found[x.sharding.memory_kind] = found.get(x.sharding.memory_kind, 0) + x.nbytes
    return {"device" if kind != "pinned_host" else kind: nbytes for kind, nbytes in found.items()}


def usual_recipe(inner):
    """Wrap an optimizer as jax's documentation shows: move the state to the device, update, move it to the host."""

    def moved(state, memory):
        return jax.tree.map(lambda x: jax.device_put(x, memory) if x.ndim else x, state)

    def update(updates, state, params=None):
        updates, state = inner.update(updates, moved(state, DEVICE), params)
        return updates, moved(state, HOST)

    return optax.GradientTransformation(inner.init, update)


def steps(args):
    """Yield each way of the large model's step: its name, the jitted step, and its abstract arguments."""
    (batch, context), device = args.tokens, jax.devices("cpu")[0]
    options = train_lm.parse(["--model", args.compiled, "--context", str(context), "--batch", str(batch)])
    model = GPT(Config(*SIZES[args.compiled], context, jnp.bfloat16))
    _, params = train_lm.shapes_of(options, model, device)
    tx = train_lm.optimizer(options)
    options.resident = True
    inner = train_lm.optimizer(options)
    on_device = jax.sharding.SingleDeviceSharding(device)
    tokens = jax.ShapeDtypeStruct((batch, context + 1), jnp.uint8, sharding=on_device)
    ways = {
        "resident": (train_lm.train_step, inner, inner),
        "usual\nrecipe": (train_lm.train_step, usual_recipe(inner), tx),
        "jax_offload": (jo.pipelined(train_lm.step, donate_argnames="state"), tx, tx),
    }
    for name, (step, of, at) in ways.items():
        count = jax.ShapeDtypeStruct((), np.int32, sharding=on_device)
        opt_state = jo.abstract_state(at, params)
        state = TrainState(step=count, apply_fn=model.apply, params=params, tx=of, opt_state=opt_state)
        yield name, step, state, tokens


def compiled(args):
    """Yield the ways as XLA compiles them for the chip."""
    for name, step, state, tokens in steps(args):
        what = f"a {_picture.size(args.compiled)} GPT, {' '.join(name.split())}"
        print(f"compiling for an {args.chip.upper()}: {what}", flush=True)
        seen = jo.inspect(step, state, tokens, target=args.chip)
        parts = dict.fromkeys(_picture.PARTS, 0.0)
        for part, nbytes in seen.parts.items():
            parts[NAMES.get(part, "temporary")] += nbytes
        yield _picture.Way(name, parts, seen.host, seen.timeline.compute, seen.timeline.exposed, seen.timeline)


def ways(args):
    """Return how the ways are known, and the ways: none if XLA's compiler for the chip is not installed."""
    try:
        found = list(compiled(args))
    except ValueError as error:
        if "target" not in str(error):
            raise
        print(f"not compiled: {error}")
        return f"not compiled for an {args.chip.upper()}", []
    return f"compiled for an {args.chip.upper()}, not run", found


def lines(shown):
    """Say in lines what the picture says, in the same words."""
    both = [shown.run(name) for name in shown.losses] + shown.apart
    state = [f"{name} {shown.lives(name)}" for name in shown.state]
    return [
        f"{part:8} {', '.join(shown.titles[part])}: {'; '.join(said)}"
        for part, said in {
            "losses": both,
            "state": state,
            "memory": [f"{way.plain} {shown.peak(way)}" for way in shown.ways] + [shown.limit],
            "time": [f"{way.plain} {shown.time(way)}" for way in shown.ways],
        }.items()
    ]


def main(argv=None):
    args, rest = parse(argv)
    rest = ["--steps", "400", *rest]
    runs = trained(args, rest)
    print("\n== the same step with a large model", flush=True)
    how, found = ways(args)
    chip, device = jo.chip(args.chip), jax.devices()[0]
    state = {name: memories(run["state"].opt_state) for name, run in runs.items()}
    shown = _picture.Shown(
        model=f"a {_picture.size(train_lm.parse(rest).model)} GPT",
        losses={name: run["losses"] for name, run in runs.items()},
        seconds=measured(runs),
        state=state,
        device={"cpu": "this machine's CPU"}.get(device.platform, device.device_kind),
        large=f"a {_picture.size(args.compiled)} GPT, {args.tokens[0]} × {args.tokens[1]} tokens",
        chip=args.chip.upper(),
        capacity=chip.hbm_bytes,
        how=how,
        ways=found,
    )
    _picture.draw(shown, args.picture)
    print("\n" + "\n".join(lines(shown)) + f"\npicture  {args.picture}")
    return shown


if __name__ == "__main__":
    main()
