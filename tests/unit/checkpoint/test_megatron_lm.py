# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of Megatron-LM says of its run, without tensors."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from lightning_mcore.checkpoint.megatron_lm import MegatronProgress, optimizer_class
from tests.support.sentences import refuses

ARGUMENTS = {"data_parallel_size": 8, "micro_batch_size": 2, "seed": 7, "consumed_train_samples": 256}


def test_the_microbatches_of_a_rank_follow_from_the_samples() -> None:
    progress = MegatronProgress.of("it", {"iteration": 4, "args": Namespace(**ARGUMENTS)}, {})
    assert (progress.batches, progress.iteration, progress.adam_step) == (16, 4, 4)


@pytest.mark.parametrize("missing", ARGUMENTS)
def test_without_one_of_the_arguments_the_data_begins_anew(missing: str) -> None:
    known = {name: value for name, value in ARGUMENTS.items() if name != missing}
    assert MegatronProgress.of("it", {"iteration": 4, "args": Namespace(**known)}, {}).batches == 0
    assert MegatronProgress.of("it", {"iteration": 4}, {}).batches == 0


def test_without_arguments_the_samples_of_megatron_bridge_count() -> None:
    progress = MegatronProgress.of("it", {"iteration": 4}, {"consumed_train_samples": torch.tensor(256)})
    assert (progress.batches, progress.data_parallel_size, progress.micro_batch_size) == (256, 1, 1)


@pytest.mark.parametrize(
    "state",
    [
        {"optimizer": {"param_groups": [{"step": 3, "params": []}]}},
        {0: {"optimizer": {"param_groups": [{"step": 3}]}}, 1: {}},
    ],
)
def test_the_optimizer_counts_its_own_steps(state: dict[Any, Any]) -> None:
    assert MegatronProgress.of("it", {"iteration": 4, "optimizer": state}, {}).adam_step == 3


def test_a_checkpoint_without_an_iteration_is_refused() -> None:
    with refuses(ValueError, "does not say after which iteration it was saved"):
        MegatronProgress.of("it", {"args": Namespace(**ARGUMENTS)}, {})


def test_the_optimizer_is_known_by_its_state() -> None:
    assert optimizer_class("it", ["optimizer.state.exp_avg.w", "optimizer.state.exp_avg_sq.w", "w"]) == "AdamW"
    assert optimizer_class("it", ["optimizer.state.momentum_buffer.w"]) == "SGD"
    assert optimizer_class("it", ["chained_1.optimizer.distributed.dp_group_idx_0.bucket_idx_0.exp_avg_sq"]) == "AdamW"


@pytest.mark.parametrize("names", [["w"], ["optimizer.state.fp32_param.w"]])
def test_a_checkpoint_without_optimizer_state_is_refused(names: list[str]) -> None:
    with refuses(ValueError, "has no optimizer state"):
        optimizer_class("it", names)


def test_nemo_counts_steps_and_samples_in_the_state_of_lightning() -> None:
    module = {"consumed_samples": 256}
    state = [{"optimizer": {"param_groups": [{"step": 3}]}}]
    common = {"global_step": 4, "callbacks": {}, "MockDataModule": module, "optimizer": state}
    progress = MegatronProgress.of("it", common, {})
    assert (progress.iteration, progress.adam_step, progress.consumed, progress.batches) == (4, 3, 256, 256)
