"""What runs on the oldest supported jax with ``make test``: what rests on jax's moving parts, by name.

The numbers of every optimizer, most of what is compiled, and the benchmarks are the newest jax's in the daily run;
``make test FULL=1`` runs all daily tests on both.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

NAMED = {
    "unit/": "the stages, on jax's own jaxprs",
    "test_region.py": "the update's equation: binding, transformations, lowering",
    "test_plan.py::test_the_plan_is_what_is_emitted[a": "the plan that is printed is the one that is emitted",
    "test_plan.py::test_an_": "the same of an iteration; effects",
    "test_donation.py::test_donation_crosses_no_memory_kinds": "aliases between memories, of which jax decides",
    "test_donation.py::test_donation_with_out_shardings": "aliases that jax takes for it",
    "test_donation.py::test_donation_wherever": "a primitive under jax's transformations",
    "test_donation.py::test_donation_of_": "what jax forwards, and what is static",
    "test_donation.py::test_donation_through": "export",
    "test_donation.py::test_donation_ahead": "lowering and compiling apart",
    "test_donation.py::test_donation_is_loud": "what jax may move",
    "test_compile_once.py": "committed arguments and weak types",
    "test_eager.py": "updates outside of jit",
    "test_update_on.py::test_a_driven_step": "the step, cut and driven",
    "test_update_on.py::test_as_beside": "what is sent between backends",
    "test_update_on.py::test_what_is_": "views of host memory, and what jax says of donation",
    "test_update_on.py::test_beside": "the same beside an accelerator",
    "test_update_on.py::test_memory": "memory that is not ours to write",
    "test_update_on.py::test_sharded": "meshes of driven steps",
    "test_update_on.py::test_static": "arguments as jit takes them",
    "test_elementwise.py": "a primitive with a lowering of its own",
    "test_composite.py": "the same",
    "test_formats.py": "arithmetic of few bits",
    "test_state.py": "shardings and memory kinds of states",
    "test_placement.py": "types of memory in a trace",
    "test_report.py::test_chunks": "what is printed of them",
    "test_report.py::test_each_offload": "windows and orders of several",
    "test_errors.py": "messages that quote jax",
    "test_deduplicate.py": "jits that are called many times",
    "test_serialise.py": "barriers",
    "test_restored.py": "arrays as a checkpoint gives them",
    "test_options.py": "options of XLA by platform",
    "test_wrappers.py": "wrappers around an offload",
    "test_docstrings.py::test_example[": "every example",
    "test_interleaved.py": "pieces and gates of an unrolled step",
    "test_opened.py": "what is computed again, and primitives of which each has its own",
    "test_sharded.py::test_zero_1": "meshes with Auto and Explicit axes",
    "test_sharded.py::test_under_shard_map": "shard_map",
    "test_sharded.py::test_a_mesh_of_mixed_axes": "both kinds of axes",
    "test_sharded.py::test_init_under_jit": "shardings of abstract parameters",
    "test_disk_sharded.py::test_as_in_host_memory": "arrays put together of parts, in host memory",
    "test_disk_by_rows.py::test_sharded": "types of rows of a divided leaf, in host memory",
    "test_flax.py": "boxes and nnx, for which jax's shardings changed",
    "test_stream.py::test_small_pieces": "a loop that runs once",
    "test_stream.py::test_vmap": "batching",
    "test_stream.py::test_grad": "derivatives through an update",
    "test_optimizers.py::test_scan[adamw": "scans and loops",
    "test_optimizers.py::test_cond[MultiSteps": "branches",
    "test_optimizers.py::test_vmap[adafactor": "batching of factored leaves",
    "test_optimizers.py::test_grad": "derivatives by a state",
    "test_storage.py::test_sharded": "encoders under Shardy",
    "test_skip.py::test_a_skipped": "branches over host memory",
    "test_skip.py::test_sharded": "the same on a mesh",
    "test_master.py::test_parameters_follow": "masters, step by step",
    "test_checkpoint.py::test_every_placement": "restores into every placement",
    "in_scan/test_values.py::test_models[flax": "the whole step, with Flax's scans",
    "in_scan/test_values.py::test_models[nested": "scans in scans",
    "in_scan/test_values.py::test_models[checkpoint": "jax.checkpoint in a scan",
    "in_scan/test_sharded.py::test_sharded": "the whole step on a mesh",
    "in_scan/test_steps.py::test_steps": "steps as people write them",
    "pipelined/test_values.py::test_clipped": "the turned step",
    "pipelined/test_sharded.py::test_fully_sharded": "the turned step on a mesh",
    "aot/test_timeline.py": "reading what XLA prints",
    "aot/test_link.py": "reading what XLA prints",
    "aot/test_donation.py": "aliases in compiled programs",
    "aot/test_peak.py::test_unrolled_step": "what that jax's XLA makes of gates",
    "aot/test_peak.py::test_copies_overlap": "what that jax's XLA hides",
    "aot/test_peak.py::test_reductions_over_a_stacked": "what that jax's XLA makes of loops",
    "aot/test_whole.py::test_24_scanned_layers": "what that jax's XLA makes of the whole step",
    "aot/test_whole.py::test_on_four_devices": "and of its collectives",
}


def chosen(items: Sequence[pytest.Item], complete: bool) -> set[pytest.Item]:
    """Those of the tests that are named.

    Args:
      items: the collected tests.
      complete: whether these are all, so that a name that no test begins with is an error.
    """
    found = {name: [item for item in items if item.nodeid.startswith(f"tests/{name}")] for name in NAMED}
    missing = [name for name, tests in found.items() if not tests]
    if complete and missing:
        raise pytest.UsageError(f"tests/support/oldest.py: no test's name begins with {missing}.")
    return {item for tests in found.values() for item in tests}
