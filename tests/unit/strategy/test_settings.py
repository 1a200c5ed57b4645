# SPDX-License-Identifier: Apache-2.0
"""Each setting of gradients and of precision has one home, and reaches Megatron's config unchanged."""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from megatron.core.distributed import DistributedDataParallelConfig

from lightning_mcore.strategy.gradient_settings import GradientSettings
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.strategy import MCoreStrategy
from tests.support.sentences import refuses

NAMES = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def test_nothing_asked_for_is_the_config_of_megatron() -> None:
    assert GradientSettings().megatron_config() == DistributedDataParallelConfig()
    assert not GradientSettings().distributed


def test_arguments_reach_the_config() -> None:
    resolved = GradientSettings(True, True, True).megatron_config()
    assert all(getattr(resolved, name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_of_the_config_counts_as_if_it_were_an_argument(name: str) -> None:
    everything = DistributedDataParallelConfig(**dict.fromkeys(NAMES, True))
    assert getattr(GradientSettings(ddp_config=everything).megatron_config(), name)
    assert GradientSettings(ddp_config=everything).distributed


def test_what_has_no_argument_passes_through_and_the_given_config_stays_as_it_is() -> None:
    given = DistributedDataParallelConfig(bucket_size=123, check_for_nan_in_grad=True)
    before = dataclasses.asdict(given)
    resolved = GradientSettings(use_distributed_optimizer=True, ddp_config=given).megatron_config(
        {"grad_reduce_in_fp32": True}
    )
    assert resolved.bucket_size == 123
    assert resolved.use_distributed_optimizer
    assert resolved.grad_reduce_in_fp32
    assert dataclasses.asdict(given) == before


def test_the_check_for_nan_is_the_strategys_and_not_megatrons() -> None:
    """Megatron's raises on the rank that has one, while the others wait for it."""
    settings = GradientSettings(ddp_config=DistributedDataParallelConfig(check_for_nan_in_grad=True))
    assert settings.check_nan
    assert not settings.megatron_config().check_for_nan_in_grad
    assert not GradientSettings().check_nan


@pytest.mark.parametrize("name", NAMES)
def test_two_values_for_one_setting_are_refused(name: str) -> None:
    everything = DistributedDataParallelConfig(**dict.fromkeys(NAMES, True))
    with refuses(ValueError, f"{name}=False"):
        GradientSettings(**{name: False}, ddp_config=everything)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_value_in_both_places_is_no_contradiction(name: str) -> None:
    everything = DistributedDataParallelConfig(**dict.fromkeys(NAMES, True))
    assert getattr(GradientSettings(**{name: True}, ddp_config=everything).megatron_config(), name)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"use_distributed_optimizer": True},
        {"overlap_grad_reduce": True},
    ],
)
@pytest.mark.parametrize("in_config", [False, True], ids=["argument", "config"])
def test_an_overlap_without_what_it_needs_is_refused(arguments: dict[str, Any], in_config: bool) -> None:
    asked = {"overlap_param_gather": True}
    config = {"ddp_config": DistributedDataParallelConfig(**asked)} if in_config else asked
    with refuses(ValueError, "overlap_param_gather=True"):
        GradientSettings(**arguments, **config)


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_a_bool(name: str) -> None:
    with refuses(TypeError, f"{name}='yes'"):
        GradientSettings(**{name: "yes"})  # type: ignore[arg-type]


# Precision


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (Precision(), "32-true"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (HalfPrecision("16-true"), "16-true"),
        (MixedPrecision("16-mixed", "cpu"), "16-mixed"),
        (MCorePrecision("bf16-true"), "bf16-true"),
    ],
)
def test_the_plugin_of_lightning_is_translated(plugin: Precision, name: str) -> None:
    assert MCorePrecision.from_lightning(plugin).precision == name


@pytest.mark.parametrize(
    ("name", "dtype", "grad_reduce_in_fp32", "main_parameters", "main_parameters_of_a_plain_module"),
    [
        ("32-true", torch.float32, True, False, False),
        ("bf16-mixed", torch.bfloat16, True, True, False),
        ("bf16-true", torch.bfloat16, False, True, True),
        ("16-mixed", torch.float16, True, True, False),
        ("16-true", torch.float16, False, True, True),
    ],
)
def test_the_table_of_precisions(
    name: Any,
    dtype: torch.dtype,
    grad_reduce_in_fp32: bool,
    main_parameters: bool,
    main_parameters_of_a_plain_module: bool,
) -> None:
    precision = MCorePrecision(name)
    assert precision.dtype == dtype
    kind = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    check_nan = {"check_for_nan_in_grad": False} if kind == "fp16" else {}  # an overflow only skips a step
    assert precision.ddp_fields() == {"grad_reduce_in_fp32": grad_reduce_in_fp32, **check_nan}
    for inline, copies in ((False, main_parameters), (True, main_parameters_of_a_plain_module)):
        fields = precision.optimizer_fields(inline)
        assert fields["params_dtype"] == (dtype if copies else torch.float32)
        assert fields["bf16"] == (kind == "bf16" and copies)
        assert fields.get("fp16", False) == (kind == "fp16")
    fields = precision.megatron_fields()
    dtypes = {"params_dtype": dtype, "pipeline_dtype": dtype}
    assert fields == {"bf16": kind == "bf16", "fp16": kind == "fp16", **dtypes}


def test_a_rank_that_failed_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(DDPStrategy, "barrier", lambda _, name=None: waits.append(name))
    strategy = MCoreStrategy()
    strategy.barrier("in a run")
    monkeypatch.setattr("lightning_mcore.parallel.rank_watch.collectives_usable", lambda: False)
    strategy.barrier("after an exception")  # as in trainer.save_checkpoint, called by OnExceptionCheckpoint
    assert waits == ["in a run"]
