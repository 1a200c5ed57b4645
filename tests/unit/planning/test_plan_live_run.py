# SPDX-License-Identifier: Apache-2.0
"""A plan from Python objects is the plan of the same run as plain data."""

from typing import Any

import lightning.pytorch as pl

from lightning_mcore import MCoreGPT, MCorePrecision, MCorePreference, MCoreStrategy, Recipe
from lightning_mcore.planning.live import plan_of, settings_of
from lightning_mcore.planning.plan import make_plan
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
    with refuses(TypeError, "is not an MCoreGPT"):
        plan_of(trainer_with(MCoreStrategy()), pl.LightningModule())
