"""MaxText's pre-training on synthetic data and 8 devices, changed as docs/migrate.md says."""

import functools
import re
import textwrap
import types
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules

import jax_offload as jo
from tests.support.words import words
from tests.trainers._common import STEPS, assert_same_losses

train = pytest.importorskip("maxtext.trainers.pre_train.train", exc_type=ImportError)

from maxtext.configs import pyconfig  # noqa: E402
from maxtext.utils import sharding, train_utils  # noqa: E402

OFFLOADED = {"optimizer_memory_host_offload": True}
BLOCK = """\
  if config.optimizer_memory_host_offload:
    # state.optimizer is an NNX Optimizer module; state_mesh_shardings.optimizer
    # is an NNX State. Use nnx.state() to get a compatible State for device_put.
    device_opt_shardings = jax.tree_util.tree_map_with_path(
        maxtext_utils_nnx.move_memory_to_device,
        state_mesh_shardings.optimizer,
        is_leaf=lambda x: isinstance(x, NamedSharding),
    )
    opt_state = nnx.state(state.optimizer)
    new_opt_state = jax.device_put(opt_state, device_opt_shardings)
    nnx.update(state.optimizer, new_opt_state)
"""
COUNTS = """\
  def count_to_device(x):
      return x if x.ndim else jax.device_put(x, jax.memory.Space.Device)

  nnx.update(state.optimizer, jax.tree.map(count_to_device, nnx.state(state.optimizer)))
"""
KINDS = {
    "scanned": {"gradient_clipping_threshold": 0.0},
    "unrolled": {"gradient_clipping_threshold": 0.0, "scan_layers": False},
    "clipped": {"gradient_clipping_threshold": 0.1},
    "clipped, unrolled": {"gradient_clipping_threshold": 0.1, "scan_layers": False},
    "accumulated": {"gradient_clipping_threshold": 0.0, "gradient_accumulation_steps": 2},
    "accumulated, clipped": {"gradient_clipping_threshold": 0.1, "gradient_accumulation_steps": 2},
}


def configured(folder, **options):
    base = Path(pyconfig.__file__).parent / "base.yml"
    small = {
        "base_emb_dim": 64, "base_mlp_dim": 128, "base_num_decoder_layers": 3, "base_num_query_heads": 2,
        "base_num_kv_heads": 2, "head_dim": 16, "vocab_size": 64, "max_target_length": 16, "per_device_batch_size": 2,
        "attention": "dot_product", "dtype": "float32", "learning_rate": 1e-2, "steps": STEPS + 1,
    }  # fmt: skip
    run = {
        "run_name": "test", "base_output_directory": str(folder), "dataset_type": "synthetic",
        "enable_checkpointing": False, "enable_goodput_recording": False, "monitor_goodput": False,
        "skip_jax_distributed_system": True, "ici_fsdp_parallelism": 8,
    }  # fmt: skip
    return pyconfig.initialize(["train.py", str(base)], **run | small | options)


def patched(module, *edits):
    """A copy of a module with each edit made once in its source."""
    text = Path(module.__file__).read_text()
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    changed = types.ModuleType(module.__name__)
    changed.__file__ = module.__file__
    exec(compile(text, module.__file__, "exec"), vars(changed))
    return changed


def changed_as_documented(wrapped, entry):
    made = "tx = optimizers.get_optimizer(config, learning_rate_schedule, model, mesh=mesh)\n"
    jitted = [("p_train_step = jax.jit(", "p_train_step = jo.jit(")] if entry == "jo.jit" else []
    header = ("import jax\nimport numpy", "import jax\nimport jax_offload as jo\nimport numpy")
    utils = patched(train_utils, header, (made, f"{made}  tx = {wrapped}\n"), *jitted)
    return patched(train, (BLOCK, COUNTS)), utils


def run(config, trainer=train, utils=train_utils):
    """Losses, memory kinds of the moments after each step, and the placement of the first step."""
    _, _, shardings, _, mesh, _, _, loader, rampup, _, state = utils.setup_train_loop(config, None)
    graph, state = nnx.split(state)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    step, _ = utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, trainer.train_step, params_shardings=of_params
    )
    rng, losses, kinds, table = np.random.default_rng(0), [], [], None
    for _ in range(STEPS):
        batch = loader.load_next_batch(rampup_manager=rampup)
        for name in ("inputs", "targets"):  # MaxText's synthetic batch is one and the same
            tokens = rng.integers(0, config.vocab_size, batch[name].shape).astype(batch[name].dtype)
            batch[name] = jax.device_put(tokens, batch[name].sharding)
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            if table is None:
                table = jo.placement(step, state, batch)
                assert trainer is train or jo.verify(step, state, batch).problems == ()
            state, metrics = step(state, batch)
        losses.append(float(metrics["scalar"]["learning/loss"]))
        moments = [x for x in jax.tree.leaves(nnx.as_pure(state["optimizer"])) if x.ndim]
        kinds.append({x.sharding.memory_kind for x in moments})
    return losses, kinds, words(table)


@functools.cache
def plain(kind, folder):
    return run(configured(folder, **KINDS[kind]))[0]


@pytest.mark.parametrize(
    ("entry", "kind"), [*(("jo.jit", kind) for kind in KINDS), ("jax.jit", "scanned"), ("jax.jit", "clipped, unrolled")]
)
def test_pre_training(entry, kind, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    changed = changed_as_documented("jo.offload(tx, min_bytes=0)", entry)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*offload")
        losses, kinds, table = run(configured(folder, **KINDS[kind], **OFFLOADED), *changed)
    assert_same_losses(losses, plain(kind, folder))
    assert kinds == [{"pinned_host"}] * STEPS
    assert "takes a pass of its own" not in table
    hidden = "in the scan that makes their gradients" in table
    assert hidden == (entry == "jo.jit" and kind in ("scanned", "accumulated"))


def test_the_documentation_shows_these_changes():
    page = (
        (Path(__file__).parents[2] / "docs/migrate.md").read_text().partition("## MaxText\n")[2].partition("\n## ")[0]
    )
    assert textwrap.indent(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], "  ") == COUNTS
    said = " ".join(page.split())
    assert "`tx = jo.offload(tx, min_bytes=0)`" in said and "if config.optimizer_memory_host_offload:" in said


def test_clipping_inside_is_maxtexts_outside(tmp_path_factory):
    """Within the wrapped chain the norm is exact, and the gradients are held once."""
    folder = tmp_path_factory.getbasetemp()
    wrapped = "jo.offload(optax.chain(optax.clip_by_global_norm(0.1), tx), min_bytes=0)"
    changed = changed_as_documented(wrapped, "jo.jit")
    losses, kinds, _ = run(configured(folder, **KINDS["scanned"], **OFFLOADED), *changed)
    np.testing.assert_allclose(losses, plain("clipped", folder), rtol=1e-5)
    assert kinds == [{"pinned_host"}] * STEPS


def test_parameters_in_host_memory(tmp_path_factory):
    """MaxText's own option puts them there, and a load of a layer into the scan's body."""
    folder = tmp_path_factory.getbasetemp()
    options = KINDS["scanned"] | {"param_scan_axis": 0}
    expected = run(configured(folder, **options))[0]
    options |= OFFLOADED | {"parameter_memory_host_offload": True}
    losses, kinds, _ = run(
        configured(folder, **options), *changed_as_documented("jo.offload(tx, min_bytes=0)", "jo.jit")
    )
    assert_same_losses(losses, expected)
    assert kinds == [{"pinned_host"}] * STEPS
