"""The table of `docs/frameworks.md`: each cell has tests, and so has each failure that was found with frameworks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "frameworks.md"
FILES = {
    "Trainer": "test_integration_transformers.py",
    "Accelerate": "test_integration_accelerate.py",
    "Lightning": "test_integration_lightning.py",
}
CELLS = {
    "one process": {
        "Trainer": "test_without_a_freeze_it_is_plain_training_bit_for_bit test_the_front_freezes",
        "Accelerate": "test_watching_is_the_loop_alone_bit_for_bit[plain] "
        "test_it_freezes_and_counts_optimizer_steps[plain]",
        "Lightning": "test_watching_is_the_trainer_alone_bit_for_bit[plain] "
        "test_it_freezes_and_counts_optimizer_steps[plain]",
        "plain loop": "test_loop_equivalence:test_law_1_attached_but_never_freezing_is_the_plain_loop "
        "test_session:test_the_loop_goes_on_calling_its_own_model",
    },
    "two ranks": {
        "Trainer": "test_two_ranks_train_as_without_it test_two_ranks_freeze_alike",
        "Accelerate": "test_two_ranks_freeze_alike_and_watch_without_a_trace "
        "test_an_unprepared_model_among_several_processes_is_an_error_that_says_so",
        "Lightning": "test_two_ranks_freeze_alike_and_watch_without_a_trace",
        "plain loop": "test_outer_wrappers:test_an_outer_wrapper_is_followed_wherever_it_comes_from "
        "test_outer_wrappers:test_watching_under_an_outer_wrapper_changes_nothing "
        "test_outer_wrappers:test_a_bare_model_that_nothing_joins_is_declined",
    },
    "accumulation": {
        "Trainer": "test_without_a_freeze_it_is_plain_training_bit_for_bit[accumulation] "
        "test_the_front_freezes[accumulation]",
        "Accelerate": "test_watching_is_the_loop_alone_bit_for_bit[accumulation] "
        "test_it_freezes_and_counts_optimizer_steps[accumulation]",
        "Lightning": "test_watching_is_the_trainer_alone_bit_for_bit[accumulation] "
        "test_it_freezes_and_counts_optimizer_steps[accumulation]",
        "plain loop": "test_session:test_gradient_accumulation "
        "test_steps_of_frameworks:test_micro_batches_count_once_for_each_optimizer_step",
    },
    "mixed precision": {
        "Trainer": "test_without_a_freeze_it_is_plain_training_bit_for_bit[bf16] test_the_front_freezes[bf16]",
        "Accelerate": "test_watching_is_the_loop_alone_bit_for_bit[bf16] "
        "test_it_freezes_and_counts_optimizer_steps[bf16] "
        "test_a_step_skipped_for_an_overflow_is_not_counted",
        "Lightning": "test_watching_is_the_trainer_alone_bit_for_bit[bf16] "
        "test_it_freezes_and_counts_optimizer_steps[bf16]",
        "plain loop": "test_training_aids:test_it_goes_on_as_if_its_author_had_frozen_the_layers[Mixed]",
    },
    "LoRA": {
        "Trainer": "test_lora test_lora_with_gradients_at_the_input_saves_the_backward_pass",
        "Accelerate": "test_lora_trains_and_freezes",
        "Lightning": "test_lora_trains_and_freezes",
        "plain loop": "test_input_gradients:test_no_backward_pass_runs_through_frozen_lora_blocks "
        "test_input_gradients:test_trainable_prompts_are_declined_with_the_reason",
    },
    "compile": {
        "Trainer": "test_the_front_freezes[compile]",
        "Accelerate": "test_a_compiled_model_freezes",
        "Lightning": "test_a_compiled_model_freezes test_a_compiled_training_step_is_declined",
        "plain loop": "test_compile:test_fourteen_freezes_all_run_compiled_and_equal_to_eager "
        "test_compile:test_a_compiled_container_of_torch_is_followed_too",
    },
    "resume": {
        "Trainer": "test_a_resumed_training_equals_an_uninterrupted_one test_two_ranks_go_on_as_if_uninterrupted",
        "Accelerate": "test_a_loaded_state_goes_on_as_if_never_stopped_bit_for_bit",
        "Lightning": "test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit",
        "plain loop": "test_resume_equivalence:test_law_5_stop_and_resume_is_uninterrupted "
        "test_outer_wrappers:test_a_run_goes_on_frozen_under_a_wrapper_that_it_has_yet_to_see",
    },
    "cache": {
        "Trainer": "test_the_cache_serves_what_trainer_fetches_ahead",
        "Accelerate": "test_the_frozen_front_is_stored_and_served",
        "Lightning": "test_the_frozen_front_is_stored_and_served",
        "plain loop": "test_cache_equivalence:test_law_3_stored_is_computed test_compile:test_the_cache_is_declined",
    },
    "crash": {
        "Trainer": "test_an_error_leaves_the_model_as_a_plain_trainer_does",
        "Accelerate": "test_a_crash_leaves_the_model_as_it_was_found",
        "Lightning": "test_a_crash_leaves_the_model_as_it_was_found",
        "plain loop": "test_session:test_a_crash_in_a_with_block_leaves_the_frozen_model_as_it_was_found",
    },
}
FAILURES = {
    "a second DDP around a model that a framework wraps": "test_outer_wrappers:"
    "test_an_outer_wrapper_is_followed_wherever_it_comes_from",
    "LoRA with gradients at the input saves nothing": "test_input_gradients:"
    "test_no_backward_pass_runs_through_frozen_lora_blocks",
    "a wrapped scheduler and optimizer disable the default policy": "test_steps_of_frameworks:"
    "test_what_accelerate_prepares_is_measured_and_foreseen",
    "a model under mixed precision cannot be sent to the controller process": "test_copies:"
    "test_a_model_with_accelerates_mixed_precision_has_a_reference",
    "steps with a closure have no noise": "test_steps_of_frameworks:test_steps_with_a_closure_measure_the_same_noise",
    "the loop never calls the model in training": "test_session:test_the_loop_goes_on_calling_its_own_model "
    "test_session:test_a_loop_that_never_calls_the_model_in_training_is_told_at_its_first_step",
    "loaders that run ahead have no cache": "test_cache_loops:test_loops_that_run_ahead_of_the_model",
    "wrong use is accepted without a word": "test_steps_of_frameworks:"
    "test_micro_batches_count_once_for_each_optimizer_step "
    "test_steps_of_frameworks:test_more_steps_than_the_run_was_to_have_are_told_of_once "
    "test_steps_of_frameworks:test_what_is_no_scheduler_is_refused "
    "test_steps_of_frameworks:test_a_schedule_that_cannot_be_foreseen_is_told_of_once_at_attach "
    "test_run_face:test_a_second_attach_to_a_watched_model_is_refused_and_the_first_goes_on "
    "test_run_face:test_a_second_run_in_a_directory_says_so_once_and_is_reported_alone",
    "copies made while frozen stay frozen": "test_copies:test_a_copy_of_a_frozen_model_is_the_model_before_the_freeze",
    "a crash leaves the model frozen": "test_integration_transformers:"
    "test_an_error_leaves_the_model_as_a_plain_trainer_does",
}
"""What was found when the frameworks were first tried, the most serious first."""


def test_the_table_has_a_row_and_a_column_for_each_cell():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [line[0] for line in table[2:]] == list(CELLS) and all(cell for line in table[2:] for cell in line)
    assert all(table[0][1:] == list(row) for row in CELLS.values())


def test_pytest_finds_the_tests_of_each_cell_and_of_each_failure():
    for framework in ("transformers", "accelerate", "lightning", "peft"):
        pytest.importorskip(framework, reason=f"{framework} is not installed, and its tests are skipped whole")
    cells = [(FILES.get(framework, ""), cell) for row in CELLS.values() for framework, cell in row.items()]
    wanted = [
        path_of(name, file) for file, names in [*cells, *(("", f) for f in FAILURES.values())] for name in names.split()
    ]
    files = sorted({f"tests/{test.partition('::')[0]}" for test in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", *files]
    listed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=110, check=False)
    assert listed.returncode == 0, listed.stdout[-2000:]
    found = [line.removeprefix("tests/") for line in listed.stdout.splitlines() if "::" in line]
    known = {*found, *(line.partition("[")[0] for line in found)}
    assert [test for test in wanted if test not in known] == []


def path_of(name, file):
    """Return a test as pytest names it: with its file, and its parameter in brackets, if one is named."""
    module, _, function = name.rpartition(":")
    return f"{module}.py::{function}" if module else f"{file}::{function}"
