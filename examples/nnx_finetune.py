"""Train an nnx model on Python's source and fine-tune it on its manual, with the optimizer's state in host memory."""

from pydoc_data.topics import topics

import _extra

try:
    import _data
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import jax_offload as jo
except ModuleNotFoundError as error:
    raise _extra.missing(error) from error

CONTEXT, BATCH = 16, 256


class Model(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * 32, width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(self.embed(x).reshape(len(x), -1))))


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1].astype(jnp.int32)).mean()


def train(model, tx, data, steps):
    # Under jit, all that the optimizer holds is committed to the model's device: the step compiles once.
    optimizer = nnx.jit(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))(model)
    graph, arrays = nnx.split((model, optimizer))

    @jo.jit(donate_argnums=0)  # takes arrays only; nnx.jit would hide no transfers
    def step(arrays, batch):
        model, optimizer = both = nnx.merge(graph, arrays)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return nnx.state(both), loss

    losses = []
    for i in range(steps):
        arrays, loss = step(arrays, _data.batch(data, i, BATCH, CONTEXT))
        losses.append(float(loss))
    nnx.update((model, optimizer), arrays)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return optimizer, losses, step


def main(steps=200, width=1024):
    model = Model(width, nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
    train(model, optax.adamw(3e-3), _data.load(), steps)  # the usual way

    tx = jo.offload(optax.adamw(1e-3))
    print(jo.placement(tx, nnx.state(model, nnx.Param)))
    manual = np.frombuffer("".join(topics.values()).encode(), np.uint8)
    optimizer, losses, step = train(model, tx, manual, steps)
    return {"losses": losses, "optimizer": optimizer, "step": step}


if __name__ == "__main__":
    main()
