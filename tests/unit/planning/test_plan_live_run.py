# SPDX-License-Identifier: Apache-2.0
"""A plan from Python objects is the plan of the same run as plain data."""

import logging
import os
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from lightning_mcore import MCoreGPT, MCoreModule, MCorePrecision, MCorePreference, MCoreStrategy, Recipe
from lightning_mcore.layers.spec import gpt_block_spec
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.planning.built import on_meta
from lightning_mcore.planning.live import plan_of, settings_of
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.planning.report import report
from tests.support.sentences import refuses
from tests.unit.planning.test_plan_rules import DENSE, run_with


def trainer_with(strategy: Any, **changes: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        accumulate_grad_batches=4,
        **changes,
    )


def test_a_plan_of_objects_is_that_of_the_settings() -> None:
    given: dict[str, Any] = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
    }
    module = MCoreGPT(vocab_size=256, seq_length=32, transformer=DENSE, recipe=Recipe(learning_rate=1e-3))
    plan = plan_of(trainer_with(MCoreStrategy(**given)), module, batch_size=2)
    settings = run_with(
        strategy=given, trainer={"accumulate_grad_batches": 4}, model={"recipe": {"learning_rate": 1e-3}}
    )
    expected = make_plan(settings, 4, 4)
    assert plan.errors == ()
    assert plan.to_dict() == expected.to_dict()


def test_a_preference_is_planned_with_two_rows_for_each_pair() -> None:
    data = type("Data", (), {"batch_size": 3, "seq_length": 32, "packing": False})()
    made = [
        MCorePreference(256, 32, {**DENSE, "hidden_dropout": 0.5}, preference={"loss": loss})
        for loss in ("sigmoid", "reward")
    ]
    plans = [plan_of(trainer_with(MCoreStrategy()), module, data) for module in made]
    for plan in plans:
        assert plan.errors == ()
        assert plan.batch is not None
        assert plan.batch.rows == 3 * 2 * 4 * 4
    assert ["under the reference are not counted" in " ".join(plan.assumptions) for plan in plans] == [True, False]
    language, reward = [plan.parameters for plan in plans]
    assert language is not None
    assert reward is not None
    assert language.total - reward.total == (256 - 1) * DENSE["hidden_size"]


def test_a_rank_that_torchrun_started_can_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert make_plan(run_with(), 4).errors == ()


@pytest.mark.parametrize("size", ["auto", None])
def test_a_loss_of_whole_logits_stays_a_choice(size: Any) -> None:
    strategies = {} if size == "auto" else {"loss_chunk_size": None}
    settings = settings_of(trainer_with(MCoreStrategy(**strategies)), MCoreGPT(256, 32, DENSE), batch_size=2)
    assert settings.strategy["loss_chunk_size"] == size


@pytest.mark.parametrize(
    "setting", [{"data_parallel_sharding": "optim_grads"}, {"use_layer_wise_distributed_optimizer": True}]
)
def test_how_ranks_share_the_state_is_read(setting: dict[str, Any]) -> None:
    settings = settings_of(trainer_with(MCoreStrategy(**setting)), MCoreGPT(256, 32, DENSE), batch_size=2)
    assert setting.items() <= settings.strategy.items()


def test_configs_precision_and_data_are_read() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    strategy = MCoreStrategy(ddp_config=DistributedDataParallelConfig(bucket_size=1000), micro_batch_size=2)
    trainer = trainer_with(strategy, plugins=MCorePrecision("16-mixed", loss_scale=8.0))
    module = MCoreGPT(vocab_size=256, seq_length=32, transformer=DENSE)
    data = type("Data", (), {"batch_size": 4, "seq_length": 16})()
    settings = settings_of(trainer, module, data)
    assert settings.strategy["ddp_config"] == {"bucket_size": 1000}
    assert settings.precision == {"precision": "16-mixed", "loss_scale": 8.0}
    assert settings.data == {"batch_size": 4, "seq_length": 16}
    assert make_plan(settings, 4).errors == ()


def test_another_strategy_or_module_is_refused() -> None:
    with refuses(TypeError, "is not MCoreStrategy"):
        plan_of(trainer_with("ddp"), MCoreGPT(vocab_size=256, seq_length=32, transformer=DENSE))
    with refuses(ValueError, "LightningModule builds no model with pipeline()"):
        plan_of(trainer_with(MCoreStrategy()), pl.LightningModule())


class Net(MCoreModule):
    """A module of a user, with a GPT of Megatron's in it."""

    def __init__(self, transformer: dict[str, Any], tied: bool) -> None:
        super().__init__()
        self.transformer_fields, self.tied = transformer, tied

    def configure_model(self) -> None:
        self.model = self.pipeline(self.build_chunk)

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        config = build_transformer_config(self.transformer_fields, self.megatron_fields())
        return GPTModel(
            config,
            gpt_block_spec(config, "local", vp_stage),
            vocab_size=256,
            max_sequence_length=32,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="rope",
        )


MOE = DENSE | {"num_moe_experts": 4, "moe_layer_freq": [0, 1] * 2, "moe_token_dispatcher_type": "alltoall"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "experts": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "use_distributed_optimizer": True,
    },
    "interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_any_module_with_a_pipeline_is_planned_from_its_chunks(layout: str, tied: bool) -> None:
    """Its chunks are built rank by rank, so that they also check the layout of MCoreGPT's one-rank parameters."""
    trainers = [trainer_with(MCoreStrategy(**LAYOUTS[layout]), num_nodes=2) for _ in range(2)]
    module = Net(MOE, tied)
    own = plan_of(trainers[0], module, batch_size=2)
    gpt = MCoreGPT(vocab_size=256, seq_length=32, transformer=MOE, share_embeddings_and_output_weights=tied)
    expected = plan_of(trainers[1], gpt, batch_size=2)

    assert own.errors == expected.errors == ()
    assert (own.grid, own.timeline) == (expected.grid, expected.timeline)
    assert own.parameters is not None
    assert expected.parameters is not None
    assert own.parameters.total == expected.parameters.total
    for ours, theirs in zip(own.stages, expected.stages, strict=True):
        assert (ours.chunks, ours.parameters) == (theirs.chunks, theirs.parameters)
        assert replace(ours.memory, activations=0) == replace(theirs.memory, activations=0)
    assert not hasattr(module, "model")
    assert not dist.is_initialized()
    assert "activations, operations, traffic and time are not counted" in report(own)


def test_megatron_warns_in_the_run_and_not_in_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")  # warns of itself since megatron-core 0.19
    with on_meta():
        logger.warning("in the plan")
    logger.warning("in the run")

    assert [record.message for record in caplog.records] == ["in the run"]


def test_a_plan_leaves_the_attention_backend_to_the_run() -> None:
    before = dict(os.environ)
    plan_of(trainer_with(MCoreStrategy()), Net(DENSE | {"attention_backend": "local"}, tied=False), batch_size=2)
    assert dict(os.environ) == before


def test_a_module_whose_model_needs_values_is_refused() -> None:
    class Loads(Net):
        def configure_model(self) -> None:
            super().configure_model()
            next(self.model.parameters()).sum().item()

    with refuses(ValueError, "Loads.configure_model() fails with weights that have no values"):
        plan_of(trainer_with(MCoreStrategy()), Loads(DENSE, False))


def test_a_module_is_not_planned_beside_the_groups_of_a_run() -> None:
    from lightning_mcore.parallel.groups import open_single_process

    open_single_process()
    try:
        with refuses(RuntimeError, "plan it in a new process"):
            plan_of(trainer_with(MCoreStrategy()), Net(DENSE, False))
        module = MCoreGPT(vocab_size=256, seq_length=32, transformer=DENSE)
        assert plan_of(trainer_with(MCoreStrategy()), module).parameters is not None
    finally:
        dist.destroy_process_group()
