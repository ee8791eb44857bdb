import jax, jax.numpy as jnp, optax
import jax_offload as jo

def loss(params, batch):
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])[0]
    return (x**2).mean()

params = {"layers": jax.random.normal(jax.random.key(0), (12, 256, 256)) / 16}
params = jax.device_put(params, jax.devices()[0])  # otherwise step 2 recompiles
batch = jnp.ones((8192, 256))
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

# 1. Plan, from params or a count. With FSDP add devices=8.
print(jo.plan(inner, "4.4B", param_dtype="float32", compute_dtype="bfloat16", chip="h100",
              tokens_per_step=65536, layers=36, width=3200))

# 2. Wrap, as the plan says.
tx = jo.offload(inner)

def step(params, state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    params, state = jo.update_params(tx, grads, state, params)
    return params, state, value

train = jo.pipelined(step, donate_argnums=(0, 1))  # without clipping: jo.jit, as jax.jit

# 3. Verify; on a CPU, for an H100.
state = tx.init(params)  # to verify: jo.abstract_state
target = "h100" if jax.default_backend() == "cpu" else None
print(jo.verify(train, params, state, batch, target=target))

# 4. Train. Each call runs the previous update first.
carry = params, state
for _ in range(4):
    carry, aux = train(carry, batch)
    print("loss", aux.now)
params, state = train.finish(carry)  # before you save
