"""What hides in programs that others have written, with the two lines of each that change, compiled for an H200.

MaxText and Tunix are those that ``make trainers`` installs. The other programs are examples of their frameworks, not in
their packages; from the project's root, with checkouts in a folder that you name::

    git clone --depth 1 https://github.com/google-deepmind/dm-haiku FOLDER/haiku
    git clone --depth 1 https://github.com/google/flax FOLDER/flax
    git clone --depth 1 https://github.com/patrick-kidger/equinox FOLDER/equinox
    .venvs/trainers-3.13/bin/python -m tests.trainers.hides FOLDER [WORD ...]

It needs XLA's compiler for NVIDIA GPUs (``pip install jax-cuda13-plugin``). Words select programs. Nothing trains.
"""

import tests.conftest  # noqa: F401, I001  (first: it sets up jax's CPU devices)
import ast
import functools
import importlib
import json
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from tests.aot.harness import on_a_fixed_link

TOKENS, CONTEXT = 16384, 1024
MIB = 2**20
Made = tuple[Any, tuple[Any, ...]]  # a jitted step, and its arguments


def committed(tree: Any) -> Any:
    return jax.device_put(tree, jax.devices()[0])


def haiku(folder: Path, offloaded: bool) -> Made:
    """examples/transformer/train.py: unrolled layers, clipped."""
    sys.path.insert(0, str(folder / "haiku"))
    train = importlib.import_module("examples.transformer.train")
    train.MODEL_SIZE, train.KEY_SIZE, train.NUM_LAYERS, train.DROPOUT_RATE = 1024, 128, 8, 0.0
    inner = optax.chain(optax.clip_by_global_norm(train.GRAD_CLIP_VALUE), optax.adam(3e-4, b1=0.9, b2=0.99))
    tx = jo.offload(inner) if offloaded else inner
    train.optimiser, step = lambda: tx, train.update.__wrapped__
    tokens = jax.ShapeDtypeStruct((TOKENS // CONTEXT, CONTEXT), jnp.int32)
    data = train.dataset.Batch(tokens, tokens)
    params = abstract(jax.eval_shape(train.loss_fn.init, jax.random.key(0), data))
    rng, count = abstract((jax.eval_shape(jax.random.PRNGKey, 0), jax.ShapeDtypeStruct((), jnp.int32)))
    state = train.TrainingState(params, jo.abstract_state(tx, params), rng, count)
    return (jo.pipelined if offloaded else jax.jit)(step, donate_argnums=0), (state, abstract(data))


def abstract(tree: Any) -> Any:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def functions_of(path: Path, names: set[str], given: dict[str, Any]) -> dict[str, Any]:
    """Functions and classes of a script, without the rest of it, in which its data are read."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    exec(compile(tree, str(path), "exec"), given)
    return given


def nnx(folder: Path, offloaded: bool) -> Made:
    """examples/gemma of Flax: unrolled layers, its jax step."""
    from flax import nnx as flax_nnx

    sys.path.insert(0, str(folder / "flax/examples/gemma"))
    cfg, lib = importlib.import_module("transformer_cfg"), importlib.import_module("transformer")
    given = {"jax": jax, "jnp": jnp, "np": importlib.import_module("numpy"), "nnx": flax_nnx, "transformer_lib": lib}
    names = {"compute_weighted_cross_entropy", "nnx_train_step"}
    train_step = functions_of(folder / "flax/examples/gemma/train.py", names, given)["nnx_train_step"]
    config = cfg.TransformerConfig.gemma3_270m(num_layers=8, num_embed=8192, dtype=jnp.bfloat16)
    tx = optax.adamw(1e-3)
    tx = jo.offload(tx) if offloaded else tx

    class Only(flax_nnx.Module):
        def __init__(self, loss: Any) -> None:
            self.loss = loss

        def update(self, loss: Any, **_: Any) -> None:
            self.loss.update(loss=loss)

    model = lib.Transformer(config, rngs=flax_nnx.Rngs(params=0))
    rngs, metrics = flax_nnx.Rngs(dropout=0), Only(flax_nnx.metrics.Average("loss"))
    flax_nnx.update(model, committed(flax_nnx.state(model)))
    optimizer = flax_nnx.jit(lambda model: flax_nnx.Optimizer(model, tx, wrt=flax_nnx.Param))(model)
    graph, arrays = flax_nnx.split((model, optimizer, rngs, metrics))

    def step(arrays: Any, batch: Any) -> Any:
        objects = flax_nnx.merge(graph, arrays)
        model, optimizer, rngs, metrics = objects
        train_step(model, optimizer, rngs, batch, metrics)
        return flax_nnx.state(objects)

    tokens = jax.ShapeDtypeStruct((TOKENS // CONTEXT, CONTEXT), jnp.int32)
    batch = abstract({"inputs": tokens, "targets": tokens, "inputs_position": tokens})
    return (jo.jit if offloaded else jax.jit)(step, donate_argnums=0), (arrays, batch)


def equinox(folder: Path, offloaded: bool) -> Made:
    """docs/examples/vision_transformer.ipynb: unrolled layers."""
    import einops
    import equinox as eqx
    import jaxtyping

    names = {"PatchEmbedding", "AttentionBlock", "VisionTransformer", "compute_grads", "step_model"}
    given: dict[str, Any] = {"jax": jax, "jnp": jnp, "jr": jax.random, "eqx": eqx, "optax": optax, "einops": einops}
    given |= {name: getattr(jaxtyping, name) for name in ("Array", "Float", "PRNGKeyArray")} | {"channels": 3}
    given = functions_of(folder / "equinox/docs/examples/vision_transformer.ipynb", names, given)
    sizes = {"embedding_dim": 1024, "hidden_dim": 4096, "num_heads": 8, "num_layers": 8, "num_classes": 10}
    sizes |= {"dropout_rate": 0.1, "patch_size": 4, "num_patches": 64}
    model = given["VisionTransformer"](**sizes, key=jax.random.PRNGKey(0))
    tx = jo.offload(optax.adamw(1e-4)) if offloaded else optax.adamw(1e-4)
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(committed(arrays), static)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    arrays, static = eqx.partition((model, state), eqx.is_array)
    step_model = given["step_model"].__wrapped__

    def on_arrays(arrays: Any, images: Any, labels: Any, keys: Any) -> Any:
        model, state = eqx.combine(arrays, static)
        *new, loss = step_model(model, tx, state, images, labels, keys)
        return eqx.filter(tuple(new), eqx.is_array), loss

    many = TOKENS // 64
    shapes = ((many, 3, 32, 32), jnp.float32), ((many,), jnp.int32), ((many, 2), jnp.uint32)
    batch = abstract([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    return (jo.jit if offloaded else jax.jit)(on_arrays, donate_argnums=0), (arrays, *batch)


def maxtext(folder: Path, offloaded: bool) -> Made:
    """Pre-training, scanned layers, not clipped; on one device."""
    from flax import nnx as flax_nnx
    from flax.core.spmd import logical_axis_rules

    from tests.trainers import test_maxtext as of

    sizes = {
        "base_emb_dim": 1024, "base_mlp_dim": 4096, "base_num_decoder_layers": 8, "base_num_query_heads": 8,
        "base_num_kv_heads": 8, "head_dim": 128, "vocab_size": 8192, "max_target_length": CONTEXT,
        "per_device_batch_size": TOKENS // CONTEXT / len(jax.devices()), "dtype": "bfloat16",
        "gradient_clipping_threshold": 0.0, "ici_fsdp_parallelism": 1, "ici_data_parallelism": len(jax.devices()),
    }  # fmt: skip
    where = {"optimizer_memory_host_offload": True} if offloaded else {}
    config = of.configured(Path(tempfile.mkdtemp()), **sizes, **where)
    train, utils = of.train, of.train_utils
    if offloaded:
        train, utils = of.changed_as_documented("jo.offload(tx, min_bytes=0)", "jo.jit")
    _, _, shardings, _, mesh, _, _, loader, rampup, _, state = utils.setup_train_loop(config, None)
    graph, state = flax_nnx.split(state)
    of_params, shardings = of.sharding.maybe_update_params_sharding_with_opt(config, shardings)
    step, _ = utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train.train_step, params_shardings=of_params
    )
    batch = loader.load_next_batch(rampup_manager=rampup)
    CONTEXTS.append(lambda: jax.set_mesh(mesh))
    CONTEXTS.append(lambda: logical_axis_rules(config.logical_axis_rules))
    return step, (state, batch)


CONTEXTS: list[Callable[[], Any]] = []


def tunix(folder: Path, offloaded: bool) -> Made:
    """PeftTrainer, full parameters, its Llama 3; on one device."""
    from flax import nnx as flax_nnx
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    config = llama.ModelConfig(
        num_layers=8, vocab_size=8192, embed_dim=1024, hidden_dim=4096, num_heads=8, head_dim=128, num_kv_heads=8,
        rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    model = llama.Llama3(config, rngs=flax_nnx.Rngs(0))
    flax_nnx.update(model, committed(flax_nnx.state(model)))
    tx = jo.offload(optax.adamw(1e-5)) if offloaded else optax.adamw(1e-5)
    trainer = peft_trainer.PeftTrainer(model, tx, peft_trainer.TrainingConfig(eval_every_n_steps=10, max_steps=10))
    mask = jnp.ones((CONTEXT, CONTEXT), bool)[None]
    positions = jnp.arange(CONTEXT)[None]
    trainer.with_gen_model_input_fn(lambda x: {**vars(x), "positions": positions, "attention_mask": mask})
    with unittest.mock.patch.object(jax, "jit", jo.jit if offloaded else jax.jit):
        step, _ = trainer.jit_train_and_eval_step()
    tokens = jnp.ones((TOKENS // CONTEXT, CONTEXT), jnp.int32)
    inputs = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=jnp.ones_like(tokens))
    with flax_nnx.graphlib.update_context(step.func):  # the arrays with which nnx.jit calls the jitted function
        arrays, _ = step.func._get_pure_args_kwargs((*step.args, inputs), {})
    CONTEXTS.append(lambda: flax_nnx.graphlib.update_context(step.func))
    return step.func.jitted_fn, arrays


PROGRAMS = {
    "Haiku, examples/transformer": haiku,
    "Flax nnx, examples/gemma": nnx,
    "Equinox, docs/examples/vision_transformer": equinox,
    "MaxText, train.py": maxtext,
    "Tunix, PeftTrainer of Llama 3": tunix,
}


def main(folder: str, *words: str) -> None:
    print("| program | exposed | peak, resident | why not all |\n|---|---:|---:|---|")
    for title, make in PROGRAMS.items():
        if not all(word in title for word in words):
            continue
        try:
            found, why = [], ""
            for offloaded in (True, False):
                step, args = make(Path(folder), offloaded)
                run = functools.partial(jo.inspect, step, *args, target="h200", chip=on_a_fixed_link("h200"))
                with_contexts = functools.reduce(lambda f, c: functools.partial(within, c, f), CONTEXTS, run)
                found.append(with_contexts())
                if offloaded:
                    table = functools.partial(jo.placement, step, *args)
                    stays = functools.reduce(lambda f, c: functools.partial(within, c, f), CONTEXTS, table)().stays
                    why = "; ".join(stays)
                CONTEXTS.clear()
            ours, plain = found
            t = ours.timeline
            print(f"| {title} | {t.exposed / t.link:.2f} | {ours.peak / MIB:.0f}, {plain.peak / MIB:.0f} | {why} |",
                  flush=True)  # fmt: skip
        except Exception as error:
            print(f"{title}: {type(error).__name__}: {str(error)[:400]}", flush=True)


def within(context: Callable[[], Any], run: Callable[[], Any]) -> Any:
    with context():
        return run()


if __name__ == "__main__":
    main(*sys.argv[1:])
