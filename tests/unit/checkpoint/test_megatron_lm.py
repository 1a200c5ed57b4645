# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of Megatron-LM says of its run, without tensors."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from lightning_mcore.checkpoint.megatron_lm import MegatronProgress, optimizer_class, random_state
from lightning_mcore.parallel.random_state import RandomState, take_common
from tests.support.sentences import refuses

ARGUMENTS = {"data_parallel_size": 8, "micro_batch_size": 2, "seed": 7, "consumed_train_samples": 256}
ALONE = {
    f"{axis}_parallel_{kind}": int(kind == "size")
    for axis in ("tensor_model", "pipeline_model", "data")
    for kind in ("size", "rank")
}


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
        {0: {"optimizer": {"param_groups": [{"step": 3.0}]}}, 1: {}},
        {"optimizer": {"param_groups": [{"step": None}], "state": {"common_step": 3.0}}},
    ],
)
def test_the_optimizer_counts_its_own_steps(state: dict[Any, Any]) -> None:
    assert MegatronProgress.of("it", {"iteration": 4, "optimizer": state}, {}).adam_step == 3


@pytest.mark.parametrize("stored", [{"scale": torch.tensor([8.0])}, None])
def test_the_loss_scale_is_that_of_the_optimizer_if_it_has_one(stored: dict[str, Any] | None) -> None:
    common = {"iteration": 4, "optimizer": {"grad_scaler": stored}}
    assert MegatronProgress.of("it", common, {}).loss_scaling == (stored or {})


@pytest.mark.parametrize(("batches", "steps"), [([64] * 3, 3), ([64, 0, 64, 0, 64], 3), ([32, 64, 0, 64], 4)])
def test_the_schedule_waits_where_megatrons_did(batches: list[int], steps: int) -> None:
    """A zero is a step that fp16 skipped. If the batch grows, samples say nothing about steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    scheduler = OptimizerParamScheduler(optimizer, 0, 1, 0, 0, 10, "linear", 0, 0, 1, "constant")
    for size in batches:
        scheduler.step(size)
    consumed = sum(size or 64 for size in batches)
    common = {
        "iteration": len(batches),
        "args": Namespace(**(ARGUMENTS | {"consumed_train_samples": consumed})),
        "opt_param_scheduler": scheduler.state_dict(),
    }
    assert MegatronProgress.of("it", common, {}).schedule_steps == steps


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


def states_of_megatron(**changed: Any) -> dict[str, Any]:
    now = take_common()
    state = {"random_rng_state": now.python, "np_rng_state": now.numpy, "torch_rng_state": now.torch}
    return {**state, "cuda_rng_state": now.torch, "rng_tracker_states": {"model-parallel-rng": now.torch}, **changed}


@pytest.mark.parametrize(
    ("objects", "saved", "why"),
    [
        ([], [states_of_megatron()], "the checkpoint contains none"),
        (["rng_state/shard_0.0_2.1"], [states_of_megatron()], "pipeline_model_parallel_size=2"),
        (["rng_state/shard_0.0_1.1"], [states_of_megatron()] * 4, "they were saved on 4 data-parallel ranks"),
        (
            ["rng_state/shard_0.0_1.1"],
            [states_of_megatron(cuda_rng_state=torch.zeros(16, dtype=torch.uint8))],
            "of another kind of device",
        ),
        (["rng_state/shard_0.0_1.1"], [{"python_rng_state": 1}], "cannot be used"),
        (["rng_state/shard_0.0_1.1"], [states_of_megatron(random_rng_state=(3, (1, 2), None))], "cannot be used"),
        (["rng_state/shard_0.0_1.1"], None, "cannot be used"),
    ],
)
def test_random_states_that_do_not_fit_are_left_with_a_reason(objects: list[str], saved: Any, why: str) -> None:
    mine = ALONE | {"data_parallel_size": 2, "data_parallel_rank": 1}
    found = random_state(lambda _: saved, objects, mine, take_common())
    assert isinstance(found, str)
    assert why in found


def test_generators_that_an_older_release_did_not_have_keep_their_state() -> None:
    now = take_common()
    own = RandomState(now.python, now.numpy, now.torch, None, {"expert-parallel-rng": now.torch})
    found = random_state(lambda _: [states_of_megatron()], ["rng_state/shard_0.0_1.1"], ALONE, own)
    assert isinstance(found, RandomState)
    assert found.tracker is not None
    assert set(found.tracker) == {"expert-parallel-rng", "model-parallel-rng"}
