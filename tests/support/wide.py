"""What is left to ``make test FULL=1``, on the newest jax: cases much like those beside them. And what is left to
``pytest --everything``: those that would take that run, which CI has 90 minutes for, beyond an hour.

The daily run is for whoever changes something and waits for it; of each of these tables it keeps what ``DAILY`` names.
A test that is long by itself is marked where it stands (``long``, ``exhaustive``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

COMPILES = "compiles more of the same for a chip"
OPTIMIZERS = "more optimizers"
SHARDINGS = "more shardings"
STEPS = "more kinds of steps"
PROCESSES = "starts processes"
RANDOM = "random cases"

WIDE = {
    "analysis/test_doctor.py::test_the_doctor_tells": PROCESSES,
    "analysis/test_inspect.py::test_broken_steps[usual recipe-v5e:1x1-False]": COMPILES,
    "analysis/test_inspect.py::test_of_a_chip": COMPILES,
    "analysis/test_inspect.py::test_one_leaf_that_is_left_on_the_device[v5e": COMPILES,
    "analysis/test_inspect_parts.py::test_of_a_compiled_step[4194304": COMPILES,
    "aot/test_by_rows.py": COMPILES,
    "aot/test_defaults.py": COMPILES,
    "aot/test_donation.py": COMPILES,
    "aot/test_matrix.py": COMPILES,
    "aot/test_peak.py": COMPILES,
    "aot/test_precision.py": COMPILES,
    "aot/test_segments.py::test_peak": COMPILES,
    "aot/test_sharded_peak.py": COMPILES,
    "aot/test_trainers.py": COMPILES,
    "aot/test_turned.py": COMPILES,
    "aot/test_update_on.py": COMPILES,
    "aot/test_whole.py": COMPILES,
    "bench/test_disk.py::test_runs": PROCESSES,
    "bench/test_paired.py::test_every_system_runs": PROCESSES,
    "disk/test_kills.py::test_killed_at_any_call": PROCESSES,
    "bench/test_run.py::test_one_command": PROCESSES,
    "bench/test_run.py::test_systems_train": PROCESSES,
    "test_checkpoint.py::test_every_placement": SHARDINGS,
    "test_checkpoint.py::test_damage_to_any_file": RANDOM,
    "test_clipping.py::test_peak": COMPILES,
    "test_convert.py::test_to_plain_and_back": "more formats",
    "test_convert.py::test_a_checkpoint_changes": "more formats",
    "test_damage.py::test_damage_to_orbaxs_metadata": "more damages",
    "test_damage.py::test_metadata_that_says": "more damages",
    "test_damage.py::test_processes_sum_up": PROCESSES,
    "test_damage.py::test_random_damage": RANDOM,
    "test_disk.py::test_every_optimizer": OPTIMIZERS,
    "test_disk.py::test_optimizers": OPTIMIZERS,
    "test_disk.py::test_as_in_host_memory_bit_for_bit": "more of host memory",
    "test_disk.py::test_host_bytes[": "more of host memory",
    "test_disk.py::test_stored_in_fewer_bits": "more formats",
    "test_disk_around.py::test_an_update_that_is_skipped_is_not_written": STEPS,
    "test_disk_around.py::test_multi_steps_around": STEPS,
    "test_disk_moves.py::test_a_store_restores_into_memory": "more formats",
    "test_disk_moves.py::test_orbax_saves_from_a_disk": "more formats",
    "test_disk_moves.py::test_to_host_moves": "more formats",
    "test_disk_sharded.py::test_a_batch_divided": SHARDINGS,
    "test_disk_sharded.py::test_a_commit_is_resumed": SHARDINGS,
    "test_disk_sharded.py::test_as_in_host_memory": SHARDINGS,
    "test_disk_sharded.py::test_masters": SHARDINGS,
    "test_disk_sharded.py::test_optimizers": OPTIMIZERS,
    "test_disk_sharded.py::test_stored_in_fewer_bits": "more formats",
    "test_disk_by_rows.py": "more kinds of parts",
    "test_disk_kills.py::test_killed_at_any_moment": PROCESSES,
    "test_disk_processes.py::test_as_in_host_memory": PROCESSES,
    "test_docstrings.py::test_examples_on_one_device": "every example again",
    "test_donation.py::test_donation_computes_the_same": "more donations",
    "test_donation.py::test_donation_on_several_devices": SHARDINGS,
    "test_donation.py::test_donation_that_crosses_nothing": "more donations",
    "test_donation.py::test_donation_without_the_guard_crosses_kinds": "why there is a guard",
    "test_examples.py::test_a_resumed_run": "trains a GPT",
    "test_examples.py::test_in_files": "trains a GPT",
    "test_examples.py::test_offloaded_and_resident_losses_agree": "trains a GPT",
    "in_scan/test_leaves.py::test_layers_together": OPTIMIZERS,
    "in_scan/test_values.py::test_models": STEPS,
    "in_scan/test_values.py::test_optimizers": OPTIMIZERS,
    "in_scan/test_steps.py::test_steps": STEPS,
    "test_interleaved.py::test_the_numbers_of_the_plain_step": STEPS,
    "test_interleaved.py::test_the_step_turned_round": STEPS,
    "test_multihost.py::test_an_update_that_needs": PROCESSES,
    "test_multihost.py::test_each_process_updates": PROCESSES,
    "test_multihost.py::test_processes_train_as_one": PROCESSES,
    "test_optimizers.py::test_cond": OPTIMIZERS,
    "test_optimizers.py::test_eagerly": OPTIMIZERS,
    "test_optimizers.py::test_grad": OPTIMIZERS,
    "test_optimizers.py::test_same_values": OPTIMIZERS,
    "test_optimizers.py::test_scan": OPTIMIZERS,
    "test_optimizers.py::test_sharded_parameters": SHARDINGS,
    "test_optimizers.py::test_traces_where": OPTIMIZERS,
    "test_optimizers.py::test_vmap": OPTIMIZERS,
    "test_optimizers.py::test_wrappers_inside_and_outside": OPTIMIZERS,
    "test_one_pass.py::test_values_placement_and_buffers": OPTIMIZERS,
    "pipelined/test_pending.py::test_bfloat16": STEPS,
    "pipelined/test_pending.py::test_clipped_adamw": STEPS,
    "pipelined/test_pending.py::test_optimizers": OPTIMIZERS,
    "pipelined/test_values.py::test_clipped_adamw": STEPS,
    "pipelined/test_sharded.py::test_a_state_divided_further": SHARDINGS,
    "pipelined/test_sharded.py::test_fully_sharded": SHARDINGS,
    "pipelined/test_values.py::test_masters_of": STEPS,
    "pipelined/test_values.py::test_optimizers": OPTIMIZERS,
    "pipelined/test_arguments.py::test_arguments_of_every_kind": STEPS,
    "test_put_off.py::test_the_numbers": STEPS,
    "test_report.py::test_chunks_of_a_sharded": SHARDINGS,
    "test_segments.py::test_on_disk_repeats": "as the values",
    "test_segments.py::test_values[checkpointed": STEPS,
    "test_segments.py::test_values[looped": STEPS,
    "test_segments.py::test_values[plain-False": "more donations",
    "test_sharded.py::test_clipping_is_by_the_global_norm": SHARDINGS,
    "test_sharded.py::test_masters_that_are_divided": SHARDINGS,
    "test_sharded.py::test_state_is_sharded": SHARDINGS,
    "test_sharded.py::test_zero_1": SHARDINGS,
    "test_skip.py::test_a_skipped_update_changes_no_bit": STEPS,
    "test_skip.py::test_dynamic_scale": STEPS,
    "test_storage.py::test_sharded": SHARDINGS,
    "test_storage.py::test_steps_equal": "more formats",
    "test_storage.py::test_what_the_message": "more formats",
    "test_stream.py::test_grad": "more derivatives",
    "test_stream.py::test_one_update_equals_resident": OPTIMIZERS,
    "test_stream.py::test_small_pieces_of_replicated": SHARDINGS,
    "test_stream.py::test_update_params_is": OPTIMIZERS,
    "test_trees.py::test_empty_trees": OPTIMIZERS,
    "test_trees.py::test_flax_modules": RANDOM,
    "test_trees.py::test_fraction_is_any_prefix": RANDOM,
    "test_trees.py::test_random_trees": RANDOM,
    "test_trees.py::test_select_is_any_prefix": RANDOM,
    "test_update_on.py::test_a_skipped_step_changes_no_bit": STEPS,
    "test_update_on.py::test_an_update_in_a_branch": STEPS,
    "test_update_on.py::test_around": STEPS,
    "test_update_on.py::test_every_optimizer": OPTIMIZERS,
    "test_update_on.py::test_inside": STEPS,
    "test_update_on.py::test_sharded": SHARDINGS,
    "test_visits.py::test_twice_the_leaves": OPTIMIZERS,
    "test_wrappers.py::test_a_state_that_was_moved_is_named[True": STEPS,
    "test_wrappers.py::test_multi_steps": STEPS,
}

# Of those, what runs daily all the same.
DAILY = (
    "aot/test_by_rows.py::test_the_parameter_is_updated_in_place[False]",
    "aot/test_defaults.py::test_never_above_resident[stacked and clipped]",
    "aot/test_defaults.py::test_on_a_tpu[stacked]",
    "aot/test_donation.py::test_every_host_leaf_keeps_its_buffer[params-grads, params, state-h200]",
    "aot/test_donation.py::test_the_order_of_results_costs_nothing[h200]",
    "aot/test_peak.py::test_clipped_updates_use_both_directions_of_the_link[inside]",
    "aot/test_peak.py::test_copies_overlap_with_the_backward_pass",
    "aot/test_peak.py::test_reductions_over_a_stacked_leaf_are_put_together_from_its_chunks[lamb]",
    "aot/test_peak.py::test_stacked_step_peaks_near_parameters_and_gradients",
    "aot/test_peak.py::test_unrolled_step_peaks_near_its_parameters[adamw]",
    "aot/test_precision.py::test_fewer_bits_move_fewer_bytes_at_no_higher_a_peak[storage4-2.1-True]",
    "aot/test_precision.py::test_a_skipped_step_touches_no_host_buffer[True-h200",
    "aot/test_sharded_peak.py::test_zero_1[h200-False-tx2-True-2250]",
    "aot/test_turned.py::test_scanned_and_clipped[16384-None",
    "aot/test_update_on.py::test_gradients_go_down_as_they_are_made[host-512",
    "aot/test_whole.py::test_24_scanned_layers",
    "aot/test_whole.py::test_on_four_devices[False-spec1",
    "test_checkpoint.py::test_every_placement_restores_into_every_other[fraction 1, 8 devices, ZeRO-1]",
    "bench/test_disk.py::test_runs[False]",
    "disk/test_kills.py::test_killed_at_any_call[0]",
    "pipelined/test_sharded.py::test_a_state_divided_further_than_its_parameters[AxisType.Auto-update-0.25]",
    "test_damage.py::test_random_damage[True]",
    "test_convert.py::test_to_plain_and_back[False-int8]",
    "test_damage.py::test_damage_to_orbaxs_metadata_offers_the_fallback[cut in half]",
    "test_damage.py::test_metadata_that_says_something_else[True]",
    "test_donation.py::test_donation_computes_the_same[params -> params, state-",
    "test_donation.py::test_donation_that_crosses_nothing_is_left_as_it_is[params -> params, state-",
    "test_donation.py::test_donation_without_the_guard_crosses_kinds[params -> params, state-",
    "test_disk.py::test_every_optimizer[adamw]",
    "test_disk.py::test_optimizers[lamb]",
    "test_disk.py::test_as_in_host_memory_bit_for_bit[4096-each]",
    "test_disk.py::test_as_in_host_memory_bit_for_bit[None-one]",
    "test_disk.py::test_host_bytes[32767",
    "test_disk.py::test_host_bytes[81920",
    "test_disk.py::test_stored_in_fewer_bits[storage1]",
    "test_disk_around.py::test_an_update_that_is_skipped_is_not_written[update-None-{}]",
    "test_disk_around.py::test_an_update_that_is_skipped_is_not_written[update_params-AxisType.Auto",
    "test_disk_around.py::test_multi_steps_around[{}]",
    "test_disk_moves.py::test_a_store_restores_into_memory[storage2",
    "test_disk_moves.py::test_orbax_saves_from_a_disk_and_restores_into_any_placement[bfloat16",
    "test_disk_moves.py::test_to_host_moves_a_running_job_there_and_back[None",
    "test_disk_sharded.py::test_a_batch_divided_between_devices[data]",
    "test_disk_sharded.py::test_a_commit_is_resumed_in_another_sharding[zero]",
    "test_disk_sharded.py::test_as_in_host_memory[sharded-AxisType.Auto]",
    "test_disk_sharded.py::test_as_in_host_memory[zero-AxisType.Explicit]",
    "test_disk_sharded.py::test_masters[data]",
    "test_disk_sharded.py::test_optimizers[adafactor]",
    "test_disk_sharded.py::test_stored_in_fewer_bits[{'mu'",
    "test_disk_by_rows.py::test_as_in_host_memory[adamw-16384]",
    "test_disk_by_rows.py::test_parts_are_written_while_later_ones_are_read",
    "test_disk_by_rows.py::test_rows_in_a_part",
    "test_disk_by_rows.py::test_sharded[rows-AxisType.Auto]",
    "test_disk_by_rows.py::test_the_ranges_stay[larger]",
    "test_disk_by_rows.py::test_the_table_says_how",
    "in_scan/test_leaves.py::test_layers_together[clip_by_global_norm]",
    "in_scan/test_values.py::test_models[blocks with norms",
    "in_scan/test_values.py::test_models[several scans",
    "in_scan/test_values.py::test_optimizers[adafactor",
    "in_scan/test_steps.py::test_steps[skipping]",
    "in_scan/test_steps.py::test_steps[in_cond]",
    "test_interleaved.py::test_the_numbers_of_the_plain_step[outside-0.5-True]",
    "test_interleaved.py::test_the_step_turned_round[inside-loss]",
    "test_multihost.py::test_processes_train_as_one_with_the_step_turned_round[device]",
    "test_optimizers.py::test_cond[MultiSteps",
    "test_optimizers.py::test_grad[adamw, chunks",
    "test_optimizers.py::test_same_values[adamw]",
    "test_optimizers.py::test_same_values[adafactor:factored]",
    "test_optimizers.py::test_scan[adamw",
    "test_optimizers.py::test_scan[MultiSteps]",
    "test_optimizers.py::test_traces_where_the_plain_optimizer_does[apply_if_finite]",
    "test_optimizers.py::test_traces_where_the_plain_optimizer_does[lookahead]",
    "test_optimizers.py::test_traces_where_the_plain_optimizer_does[momo]",
    "test_optimizers.py::test_vmap[adafactor",
    "test_optimizers.py::test_wrappers_inside_and_outside[MultiSteps, clip]",
    "test_one_pass.py::test_values_placement_and_buffers[adamw-True]",
    "pipelined/test_pending.py::test_clipped_adamw[update-how3]",
    "pipelined/test_values.py::test_clipped_adamw[update_params-how1]",
    "pipelined/test_values.py::test_clipped_adamw[update-how0]",
    "pipelined/test_sharded.py::test_fully_sharded[AxisType.Auto-specs0-device]",
    "test_put_off.py::test_the_numbers_of_the_resident_step[outside, half-True]",
    "test_sharded.py::test_state_is_sharded_like_its_parameters[lamb-1-AxisType.Auto]",
    "test_report.py::test_chunks_of_a_sharded_leaf_need_no_collectives[shape0",
    "test_report.py::test_chunks_of_a_sharded_leaf_need_no_collectives[shape2",
    "test_sharded.py::test_zero_1[sharded-update-1",
    "test_sharded.py::test_zero_1[replicated-update_params-1",
    "test_trees.py::test_empty_trees[adafactor",
    "test_trees.py::test_empty_trees[MultiSteps",
    "test_update_on.py::test_an_update_in_a_branch[here-switch]",
    "test_update_on.py::test_an_update_in_a_branch[beside-apply_if_finite]",
    "test_skip.py::test_a_skipped_update_changes_no_bit_and_the_next_goes_on[True-stored]",
    "test_skip.py::test_a_skipped_update_changes_no_bit_and_the_next_goes_on[True-masters]",
    "test_storage.py::test_sharded[int8-data-AxisType.Auto]",
    "test_stream.py::test_grad_through_update[None]",
    "test_stream.py::test_one_update_equals_resident_whatever_the_window[lamb-rows]",
    "test_stream.py::test_one_update_equals_resident_whatever_the_window[clip-bf16]",
    "test_stream.py::test_update_params_is_update_and_apply_updates[offload-clip]",
    "test_trees.py::test_random_trees_jitted",
    "test_update_on.py::test_a_skipped_step_changes_no_bit[beside-update]",
    "test_update_on.py::test_every_optimizer[adamw]",
    "test_update_on.py::test_every_optimizer[lamb]",
    "test_update_on.py::test_inside[beside-0.5-masters]",
    "test_update_on.py::test_sharded[ZeRO-1-inner1-0.5]",
    "test_update_on.py::test_sharded_beside_accelerators[ZeRO-1-inner1-0.5-AxisType.Auto]",
    "test_update_on.py::test_sharded_beside_accelerators[as the parameters-inner2-host-AxisType.Explicit]",
    "test_visits.py::test_twice_the_leaves_are_twice_the_work[8 bits]",
    "test_wrappers.py::test_multi_steps_around[chained-host]",
)


# Minutes each, or many of one kind.
SELDOM = {
    "aot/test_matrix.py::test_no_peak_is_above_resident": "compiles whole models, minutes each",
    "aot/test_matrix.py::test_peaks_fall": "compiles whole models, minutes each",
    "aot/test_segments.py::test_peak[GPT": "compiles whole models, minutes each",
    "aot/test_segments.py::test_peak_of_a_state_on_disk[GPT": "compiles whole models, minutes each",
    "aot/test_turned.py::test_an_unrolled_transformer_is_never": "compiles whole models, minutes each",
    "aot/test_whole.py::test_a_tpu_copies_across_the_matmuls": "a TPU's compiler takes its time",
    "aot/test_whole.py::test_layers_with_biases": "compiles whole models, minutes each",
    "aot/test_whole.py::test_on_four_devices": COMPILES,
    "aot/test_whole.py::test_on_four_tpus": "a TPU's compiler takes its time",
    "bench/test_gpu.py::test_the_values_of_steps_turned_round": "more of what tests/pipelined runs",
    "bench/test_run.py::test_systems_train": PROCESSES,
    "test_disk.py::test_every_optimizer": OPTIMIZERS,
    "test_disk_kills.py::test_killed_at_any_moment_it_goes_on_bit_for_bit[100": "a hundred processes",
    "test_disk_product.py": "ninety states on disk",
    "test_segments.py::test_repeats": "seven hundred steps",
    "test_trajectories.py::test_twenty_steps": "trains for 20 steps, plain and rewritten",
    "test_update_on.py::test_every_optimizer": OPTIMIZERS,
}

# Of those, what CI runs all the same, beside what is daily.
OFTEN = (
    "aot/test_matrix.py::test_no_peak_is_above_resident[mlp | 65536 | 1.0",
    "aot/test_whole.py::test_on_four_devices[True-spec0-16384]",
    "aot/test_whole.py::test_on_four_devices[True-spec1-16384]",
    "bench/test_gpu.py::test_the_values_of_steps_turned_round[clip",
    "bench/test_run.py::test_systems_train_as_resident_does[jax_offload, jo.jit",
    "bench/test_run.py::test_systems_train_as_resident_does[usual recipe",
    "test_disk_product.py::test_an_update_is_that_of_a_state_in_memory[lamb",
    *(f"test_{of}.py::test_every_optimizer[{name}" for of in ("disk", "update_on") for name in
      ("ada", "apply_if_finite", "lion", "multi_transform", "nadam", "polyak", "reduce_on", "schedule_free", "sgd")),
    *(f"test_trajectories.py::test_twenty_steps[{name}" for name in (
        "scanned, loss", "scanned, where", "fsdp, Explicit", "zero, int8", "turned, unrolled, plateau",
        "turned, scanned, loss", "turned, zero", "turned, fsdp", "waiting, unrolled]", "waiting, skip",
        "turned, apply")),
)  # fmt: skip


def seldom(items: Sequence[pytest.Item], complete: bool) -> dict[pytest.Item, tuple[str, str]]:
    """Which of the tests run with ``--everything`` only: the mark's name, and its reason.

    Args:
      items: the collected tests.
      complete: whether these are all, so that a name that no test begins with is an error.
    """
    not_daily = {item for item in items if item.get_closest_marker("long")} | left_out(items, complete).keys()
    found = _named(items, complete, SELDOM, OFTEN, "exhaustive")
    return {item: why for item, why in found.items() if item in not_daily}


def left_out(items: Sequence[pytest.Item], complete: bool) -> dict[pytest.Item, tuple[str, str]]:
    """Which of the tests a daily run leaves out: the mark's name, and its reason.

    Args:
      items: the collected tests.
      complete: whether these are all, so that a name that no test begins with is an error.
    """
    return _named(items, complete, WIDE, DAILY, "wide")


def _named(
    items: Sequence[pytest.Item], complete: bool, left: Mapping[str, str], kept: tuple[str, ...], mark: str
) -> dict[pytest.Item, tuple[str, str]]:
    """The tests whose name begins with one that is left out, but with none that is kept."""
    ids = [item.nodeid.removeprefix("tests/") for item in items]
    missing = [name for name in (*left, *kept) if not any(each.startswith(name) for each in ids)]
    if complete and missing:
        raise pytest.UsageError(f"tests/support/wide.py: no test's name begins with {missing}.")
    reasons = (next((why for name, why in left.items() if each.startswith(name)), None) for each in ids)
    return {
        item: (mark, why)
        for item, each, why in zip(items, ids, reasons, strict=True)
        if why is not None and not each.startswith(kept)
    }
