"""What is left to ``make test FULL=1``, on the newest and the oldest jax: cases much like those beside them.

The daily run is for whoever changes something and waits for it; of each of these tables it keeps what ``DAILY`` names.
A test that is long by itself is marked where it stands (``long``, the newest jax alone).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

COMPILES = "compiles more of the same for a chip"
OPTIMIZERS = "more optimizers"
SHARDINGS = "more shardings"
STEPS = "more kinds of steps"
PROCESSES = "starts processes"
RANDOM = "random cases"

WIDE = {
    "analysis/test_cli.py::test_the_doctor_tells": PROCESSES,
    "analysis/test_inspect.py::test_broken_steps[usual recipe-v5e:1x1-False]": COMPILES,
    "analysis/test_inspect.py::test_of_a_chip": COMPILES,
    "analysis/test_inspect.py::test_one_leaf_that_is_left_on_the_device[v5e": COMPILES,
    "analysis/test_inspect_sharded.py::test_a_plan_of_a_stack": COMPILES,
    "analysis/test_liveness.py::test_compiled_rows": COMPILES,
    "aot/test_defaults.py": COMPILES,
    "aot/test_donation.py": COMPILES,
    "aot/test_forecasts.py::test_models": COMPILES,
    "aot/test_forecasts.py::test_on_four_devices": COMPILES,
    "aot/test_matrix.py": COMPILES,
    "aot/test_peak.py": COMPILES,
    "aot/test_precision.py": COMPILES,
    "aot/test_sharded_peak.py": COMPILES,
    "aot/test_trainers.py": COMPILES,
    "aot/test_turned.py": COMPILES,
    "aot/test_update_on.py": COMPILES,
    "aot/test_whole.py": COMPILES,
    "bench/test_paired.py::test_every_system_runs": PROCESSES,
    "bench/test_run.py::test_one_command": PROCESSES,
    "bench/test_run.py::test_systems_train": PROCESSES,
    "test_checkpoint.py::test_every_placement": SHARDINGS,
    "test_clipping.py::test_peak": COMPILES,
    "test_convert.py::test_to_plain_and_back": "more formats",
    "test_convert.py::test_a_checkpoint_changes": "more formats",
    "test_disk.py::test_every_optimizer": OPTIMIZERS,
    "test_disk.py::test_optimizers": OPTIMIZERS,
    "test_disk_processes.py::test_as_in_host_memory": PROCESSES,
    "test_donation.py::test_donation_on_several_devices": SHARDINGS,
    "test_examples.py::test_a_resumed_run": "trains a GPT",
    "test_examples.py::test_offloaded_and_resident_losses_agree": "trains a GPT",
    "test_in_scan.py::test_layers_together": OPTIMIZERS,
    "test_in_scan.py::test_models": STEPS,
    "test_in_scan.py::test_optimizers": OPTIMIZERS,
    "test_in_scan.py::test_steps": STEPS,
    "test_interleaved.py::test_the_numbers_of_the_plain_step": STEPS,
    "test_interleaved.py::test_the_step_turned_round": STEPS,
    "test_multihost.py::test_processes_train_as_one": PROCESSES,
    "test_numbers.py::test_cond": OPTIMIZERS,
    "test_numbers.py::test_eagerly": OPTIMIZERS,
    "test_numbers.py::test_grad": OPTIMIZERS,
    "test_numbers.py::test_same_numbers": OPTIMIZERS,
    "test_numbers.py::test_sharded_parameters": SHARDINGS,
    "test_numbers.py::test_vmap": OPTIMIZERS,
    "test_numbers.py::test_wrappers_inside_and_outside": OPTIMIZERS,
    "test_one_pass.py::test_values_placement_and_buffers": OPTIMIZERS,
    "test_pending.py::test_clipped_adamw": STEPS,
    "test_pending.py::test_optimizers": OPTIMIZERS,
    "test_pipelined.py::test_clipped_adamw": STEPS,
    "test_pipelined.py::test_fully_sharded": SHARDINGS,
    "test_pipelined.py::test_masters_of": STEPS,
    "test_pipelined.py::test_optimizers": OPTIMIZERS,
    "test_pipelined.py::test_arguments_of_every_kind": STEPS,
    "test_put_off.py::test_the_numbers": STEPS,
    "test_random_steps.py": RANDOM,
    "test_sharded.py::test_clipping_is_by_the_global_norm": SHARDINGS,
    "test_sharded.py::test_masters_that_are_divided": SHARDINGS,
    "test_sharded.py::test_state_is_sharded": SHARDINGS,
    "test_sharded.py::test_zero_1": SHARDINGS,
    "test_skip.py::test_a_skipped_update_changes_no_bit": STEPS,
    "test_skip.py::test_dynamic_scale": STEPS,
    "test_snippets.py::test_recipes": "all recipes of a page",
    "test_storage.py::test_sharded": SHARDINGS,
    "test_storage.py::test_steps_equal": "more formats",
    "test_storage.py::test_what_the_message": "more formats",
    "test_stream.py::test_grad": "more derivatives",
    "test_stream.py::test_one_update_equals_resident": OPTIMIZERS,
    "test_stream.py::test_small_pieces_of_replicated": SHARDINGS,
    "test_stream.py::test_update_params_is": OPTIMIZERS,
    "test_trees.py::test_flax_modules": RANDOM,
    "test_trees.py::test_fraction_is_any_prefix": RANDOM,
    "test_trees.py::test_random_trees": RANDOM,
    "test_trees.py::test_select_is_any_prefix": RANDOM,
    "test_update_on.py::test_around": STEPS,
    "test_update_on.py::test_every_optimizer": OPTIMIZERS,
    "test_update_on.py::test_inside": STEPS,
    "test_update_on.py::test_sharded": SHARDINGS,
    "test_visits.py::test_twice_the_leaves": OPTIMIZERS,
    "test_wrappers.py::test_a_state_that_was_moved_is_named[True": STEPS,
    "test_wrappers.py::test_multi_steps": STEPS,
    "unit/test_chunk_rules.py::test_rows_that_stay_apart[iota along": "a second with no rule to it",
}

# Of those, what runs daily all the same.
DAILY = (
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
    "test_convert.py::test_to_plain_and_back[False-int8]",
    "test_disk.py::test_every_optimizer[adamw]",
    "test_disk.py::test_optimizers[lamb]",
    "test_in_scan.py::test_layers_together[clip_by_global_norm]",
    "test_in_scan.py::test_models[blocks with norms",
    "test_in_scan.py::test_models[several scans",
    "test_in_scan.py::test_optimizers[adafactor",
    "test_in_scan.py::test_steps[skipping]",
    "test_in_scan.py::test_steps[in_cond]",
    "test_interleaved.py::test_the_numbers_of_the_plain_step[outside-0.5-True]",
    "test_interleaved.py::test_the_step_turned_round[inside-loss]",
    "test_multihost.py::test_processes_train_as_one_with_the_step_turned_round",
    "test_numbers.py::test_cond[MultiSteps",
    "test_numbers.py::test_eagerly[dpsgd]",
    "test_numbers.py::test_grad[adamw, chunks",
    "test_numbers.py::test_same_numbers[adamw]",
    "test_numbers.py::test_same_numbers[adafactor:factored]",
    "test_numbers.py::test_same_numbers[MultiSteps:skip]",
    "test_numbers.py::test_same_numbers[muon]",
    "test_numbers.py::test_same_numbers[lamb]",
    "test_numbers.py::test_vmap[adafactor",
    "test_numbers.py::test_wrappers_inside_and_outside[MultiSteps, clip]",
    "test_one_pass.py::test_values_placement_and_buffers[adamw-True]",
    "test_pending.py::test_clipped_adamw[update-how3]",
    "test_pipelined.py::test_clipped_adamw[update_params-how1]",
    "test_pipelined.py::test_clipped_adamw[update-how0]",
    "test_pipelined.py::test_fully_sharded[AxisType.Auto-specs0-device]",
    "test_put_off.py::test_the_numbers_of_the_resident_step[outside, half-True]",
    "test_sharded.py::test_masters_that_are_divided_further_than_their_parameters[adamw-True",
    "test_sharded.py::test_state_is_sharded_like_its_parameters[lamb-1-AxisType.Auto]",
    "test_sharded.py::test_zero_1[",
    "test_skip.py::test_a_skipped_update_changes_no_bit_and_the_next_goes_on[True-stored]",
    "test_skip.py::test_a_skipped_update_changes_no_bit_and_the_next_goes_on[True-masters]",
    "test_storage.py::test_sharded[int8-data-AxisType.Auto]",
    "test_stream.py::test_grad_through_update[None]",
    "test_stream.py::test_one_update_equals_resident_whatever_the_window[lamb-rows]",
    "test_stream.py::test_one_update_equals_resident_whatever_the_window[clip-bf16]",
    "test_stream.py::test_update_params_is_update_and_apply_updates[offload-clip]",
    "test_trees.py::test_random_trees_jitted",
    "test_update_on.py::test_every_optimizer[adamw]",
    "test_update_on.py::test_every_optimizer[lamb]",
    "test_update_on.py::test_inside[beside-0.5-masters]",
    "test_update_on.py::test_sharded[ZeRO-1-inner1-0.5]",
    "test_update_on.py::test_sharded_beside_accelerators[ZeRO-1-inner1-0.5-AxisType.Auto]",
    "test_update_on.py::test_sharded_beside_accelerators[as the parameters-inner2-host-AxisType.Explicit]",
    "test_visits.py::test_twice_the_leaves_are_twice_the_work[8 bits]",
    "test_wrappers.py::test_multi_steps_around[chained-host]",
)


def left_out(items: Sequence[pytest.Item], whole: bool) -> dict[pytest.Item, tuple[str, str]]:
    """Which of the tests a daily run leaves out: the mark's name, and its reason.

    Args:
      items: the collected tests.
      whole: whether these are all, so that a name that no test begins with is an error.
    """
    ids = [item.nodeid.removeprefix("tests/") for item in items]
    missing = [name for name in (*WIDE, *DAILY) if not any(each.startswith(name) for each in ids)]
    if whole and missing:
        raise pytest.UsageError(f"tests/support/wide.py: no test's name begins with {missing}.")
    reasons = (next((why for name, why in WIDE.items() if each.startswith(name)), None) for each in ids)
    return {
        item: ("wide", why)
        for item, each, why in zip(items, ids, reasons, strict=True)
        if why is not None and not each.startswith(DAILY)
    }
