# SPDX-License-Identifier: Apache-2.0
"""What was silently wrong or missing in the strategy's predecessor, and the test that would catch it here.

NeMo 2.x had a Megatron strategy for Lightning, and its users paid for the rows below. Each row names what went wrong
there and one or more tests of this project; a row whose test has been renamed or removed fails.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Regression:
    """One row.

    Args:
        name: A short name.
        what: What went wrong.
        caught_by: Tests as ``folder/file::function``.
    """

    name: str
    what: str
    caught_by: tuple[str, ...]


LAYOUTS = "parity/test_layouts::test_layout_agrees_with_one_rank"
LOOP = "parity/test_loop::test_strategy_equals_the_bare_loop_bit_for_bit"
HOOKS = "distributed/test_pipelined_module::test_every_hook_and_counter_of_lightning_is_where_it_is_without_us"
REFUSED = "unit/test_refusals::test_refused_before_process_groups_or_parameters_exist"
STAGED = "distributed/test_pipelined_module::test_trains_as_under_lightning_on_one_rank"
LOGGED = "distributed/test_logging::test_a_value_is_about_the_whole_step_and_every_rank_has_it"
FOLLOWED = "distributed/test_logging::test_early_stopping_and_checkpoints_follow_the_score_alike_on_every_rank"
RESUMED = "distributed/test_checkpoint::test_a_resumed_run_continues_bit_for_bit"
OPTIONS = "distributed/test_lightning_options::test_the_loops_do_what_they_do_under_ddp"
ORDER = "distributed/test_lightning_hooks::test_hooks_fire_as_often_and_in_the_order_of_ddp"
NUMBERS = "distributed/test_lightning_logs::test_every_number_on_every_rank"
LENGTH = "distributed/test_run_length_and_seed::test_a_run_is_as_long_for_schedules_as_under_ddp"
WAITS = "distributed/test_fp16::test_a_schedule_by_step_waits_for_steps_that_are_made_and_the_scale_is_logged"
KNOWN = "distributed/test_checkpoint::test_what_a_user_knows_of_checkpoints_works"

WRONG_NUMBERS = (
    Regression(
        "misspelt-arguments",
        "a misspelt argument of the strategy was swallowed, and training ran without parallelism",
        (
            "unit/test_refusals::test_a_misspelt_argument_is_not_swallowed",
            "unit/test_architecture::test_no_public_signature_swallows_a_misspelt_argument",
        ),
    ),
    Regression(
        "accumulation",
        "accumulate_grad_batches=N threw away the gradients of N-1 batches",
        (LOOP, STAGED, "distributed/test_plain_module::test_trains_as_under_ddp"),
    ),
    Regression(
        "weight-of-a-validation-batch",
        "the epoch's val_loss weighed the first batch as one sample and the others as a batch",
        ("distributed/test_evaluation::test_every_sample_counts_once_whatever_the_size",),
    ),
    Regression(
        "loss-scale",
        "fp16 had no loss scaling, and gradients vanished",
        (
            "parity/test_fp16::test_fp16_equals_the_bare_loop_through_overflows",
            "parity/test_fp16::test_fp16_stays_near_fp32",
        ),
    ),
    Regression("hidden-skips", "steps that fp16 skipped were hidden, and the learning rate went on", (WAITS,)),
    Regression(
        "unreduced-gradients",
        "gradients were not reduced over data-parallel ranks if the optimizer came from configure_optimizers",
        (LAYOUTS, "distributed/test_plain_module::test_trains_as_under_ddp"),
    ),
    Regression(
        "data-after-resume",
        "after a resume the second epoch read the tail of the data again, or ended early",
        (RESUMED,),
    ),
    Regression(
        "random-state-after-resume",
        "random states were not in the checkpoint, so dropout differed after a resume",
        (RESUMED, "distributed/test_checkpoint::test_a_gpt_resumes_bit_for_bit"),
    ),
    Regression(
        "users-dataloader",
        "the user's DataLoader was rebuilt without its shuffle, sampler, workers and generator",
        ("distributed/test_data::test_the_sampler_workers_and_generator_of_the_user_are_kept",),
    ),
    Regression(
        "erased-model-fields",
        "defaults of the strategy overwrote fields of the model's config",
        (
            "unit/test_refusals::test_a_field_of_the_config_given_beside_those_of_the_strategy",
            "unit/test_refusals::test_refused_on_every_rank_when_the_model_has_been_built",
        ),
    ),
    Regression(
        "module-without-config",
        "a module without Megatron's config was trained without the parallelism that was asked for",
        (REFUSED, "unit/test_refusals::test_refused_on_every_rank_when_the_model_has_been_built"),
    ),
    Regression(
        "several-steps-counted-as-batches",
        "steps, batches and microbatches were mixed up in limits, intervals and LR schedules",
        (HOOKS, STAGED, OPTIONS),
    ),
    Regression(
        "length-of-schedules", "a schedule over the run was N times too long, or ended after its warm-up", (LENGTH,)
    ),
    Regression(
        "rate-by-epoch",
        "schedules by epoch never stepped",
        ("distributed/test_optimizers::test_every_lr_schedule_moves_megatrons_groups_as_it_moves_torchs",),
    ),
    Regression("half-of-the-batches", "limit_val_batches=0.5 switched validation off", (OPTIONS,)),
    Regression(
        "seed",
        "the user's seed did not reach the weights of Megatron's layers",
        ("distributed/test_run_length_and_seed::test_the_seed_of_the_user_is_that_of_every_weight",),
    ),
    Regression(
        "validation-counted-as-training",
        "batches of validation moved counters of training",
        (OPTIONS, "distributed/test_experts::test_losses_of_routers_are_logged_on_every_rank_of_every_layout"),
    ),
    Regression(
        "short-last-window",
        "a short last accumulation window was dropped, with the validation after it, or hung a pipeline",
        ("parity/test_survival::test_a_short_last_window_weighs_what_it_weighs_in_lightning", HOOKS),
    ),
    Regression(
        "context-parallel-scale",
        "gradients under context parallelism were off by its size",
        ("parity/test_context_scale::test_gradient_has_the_scale_of_the_formula", LAYOUTS),
    ),
    Regression(
        "mixed-precision-string",
        'Trainer(precision="bf16-mixed") put autocast over a model that nobody converted',
        (LOOP, "unit/strategy/test_settings::test_the_plugin_of_lightning_is_translated"),
    ),
)

BROKEN_FEATURES = (
    Regression("logging", "values logged in a step were recorded on the last stage alone, or hung", (LOGGED, NUMBERS)),
    Regression(
        "sync-dist",
        "sync_dist averaged over tensor- and pipeline-parallel ranks too",
        ("distributed/test_logging::test_sync_dist_is_the_mean_over_model_copies_and_nothing_else_is",),
    ),
    Regression(
        "monitors",
        "EarlyStopping saw zeros on most ranks and stopped the run",
        (FOLLOWED, "distributed/test_lightning_logs::test_callbacks_and_schedulers_decide_alike"),
    ),
    Regression("accumulation-scheduler", "GradientAccumulationScheduler lost gradients", (OPTIONS,)),
    Regression(
        "averaging-callbacks",
        "callbacks that average weights averaged something else, or did nothing",
        ("distributed/test_optimizers::test_averages_of_the_weights_are_those_of_ddp",),
    ),
    Regression(
        "timeout",
        "timeout= was accepted and ignored",
        ("distributed/test_optimizers::test_the_timeout_reaches_every_group_of_megatron",),
    ),
    Regression(
        "megatron-fsdp",
        "asking for Megatron's FSDP built a config that contradicted itself",
        ("unit/optimizer/test_optimizer_options::test_an_option_of_gradients_that_cannot_be_is_refused_by_name",),
    ),
    Regression(
        "fp8-fields",
        "defaults of the precision erased FP8 fields, after the configs had been checked",
        (
            "unit/config/test_fp8::test_a_recipe_or_a_format_alone_turns_fp8_on",
            "unit/config/test_field_support::test_what_needs_transformer_engine_is_refused_with_the_torch_backend_alone",
        ),
    ),
    Regression(
        "streams-of-other-lengths",
        "a dataset without a length failed, or hung a pipeline",
        (
            OPTIONS,
            "distributed/test_lightning_options::test_uneven_streams_are_evaluated_and_each_rank_writes_its_own_predictions",
        ),
    ),
    Regression(
        "ignored-fields",
        "fields that nobody read were skipped without a word",
        ("unit/config/test_field_support::test_what_nothing_around_the_model_would_do_is_refused_for_every_model",),
    ),
    Regression(
        "manual-optimization",
        "manual optimization never stepped, and nothing said so",
        (REFUSED, "distributed/test_plain_module::test_trains_as_under_ddp"),
    ),
    Regression("training-step-under-interleaving", "training_step was never called with virtual stages", (STAGED,)),
    Regression("hooks", "hooks around zero_grad, backward and batch transfer never fired", (HOOKS, ORDER)),
    Regression(
        "predict",
        "predict failed without a loss, and only the last stage had the result",
        ("distributed/test_evaluation::test_predict_gives_each_sample_once_and_alike_on_every_stage",),
    ),
    Regression("best-checkpoint", 'ckpt_path="best" named a file that was a folder', (KNOWN,)),
    Regression("gradient-clipping", "gradient_clip_val raised or did nothing", (LOOP, STAGED)),
    Regression(
        "groups-already-open",
        "with torch.distributed already open Megatron's groups were never made",
        ("distributed/test_session::test_strategies_and_layouts_follow_each_other_in_one_process",),
    ),
    Regression("plain-trainer", "Lightning's own Trainer and ModelCheckpoint did not work", (KNOWN, FOLLOWED)),
    Regression(
        "sanity-validation",
        "sanity validation was switched off with pipelines",
        (
            HOOKS,
            "distributed/test_evaluation::test_the_sanity_check_and_validation_within_an_epoch_leave_no_trace_in_each_other",
        ),
    ),
    Regression(
        "modes-after-validation",
        "validation left frozen modules, or virtual stages, in the wrong mode",
        ("unit/models/test_gpt::test_evaluation_mode_gives_each_module_its_own_mode_back",),
    ),
)

HYGIENE = (
    Regression(
        "other-trainers",
        "any other Trainer in the process broke, for loops and classes stayed patched",
        (
            "distributed/test_session::test_strategies_and_layouts_follow_each_other_in_one_process",
            "distributed/test_session::test_an_exception_leaves_nothing_behind",
            "unit/test_architecture::test_only_the_cpu_runtime_patches",
        ),
    ),
    Regression(
        "wrong-settings",
        "checks stood in a front end as bare assertions, and Trainer.fit passed them by",
        (REFUSED, "unit/config/test_layout::test_a_model_the_layout_does_not_divide_is_refused"),
    ),
    Regression(
        "needs-a-gpu",
        "no step could run on a CPU, and no test ran one",
        ("distributed/test_gpt::test_two_ranks_learn_log_and_generate_alike",),
    ),
    Regression(
        "plain-modules",
        "a module had to have config, data_step, forward_step, loss_reduction and a special optimizer",
        ("distributed/test_plain_module::test_trains_as_under_ddp",),
    ),
    Regression(
        "parity-with-one-device",
        "nothing compared the numbers with those of one device",
        (LAYOUTS,),
    ),
    Regression(
        "several-fits",
        "a second fit, validation or test in one process failed",
        (
            "parity/test_survival::test_fits_of_other_layouts_follow_in_one_process",
            "distributed/test_session::test_one_trainer_fits_validates_tests_and_predicts",
        ),
    ),
)

TABLE = (*WRONG_NUMBERS, *BROKEN_FEATURES, *HYGIENE)


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the test functions of a file such as ``unit/config/test_layout``."""
    path = TESTS / f"{file}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("regression", TABLE, ids=lambda regression: regression.name)
def test_a_regression_of_the_predecessor_has_its_test(regression: Regression) -> None:
    assert regression.caught_by
    for test in regression.caught_by:
        file, _, function = test.partition("::")
        assert function in functions_of(file), f"{regression.what}: {test} is not there"


def test_a_name_stands_for_one_row() -> None:
    assert len({regression.name for regression in TABLE}) == len(TABLE)
