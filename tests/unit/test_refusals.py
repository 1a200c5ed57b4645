# SPDX-License-Identifier: Apache-2.0
"""Wrong settings are refused in one sentence, on every rank, as soon as they can be known.

The tables are ordered by that moment: when the strategy is made, when the trainer is made, when the trainer meets the
model (before process groups or parameters exist), when the model has been built, and in the first step. Two ranks walk
through all of a table in one launch; each case is then a test of what became of it on both.
"""

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lightning_mcore import CommunicationOptions, MCoreGPT, MCoreModule, MCorePrecision, MCoreStrategy
from lightning_mcore import callbacks as ours
from lightning_mcore.optimizer.layer_wise import LayerWiseShares
from tests.support import hygiene
from tests.support.ranks import RanksFailedError, on_ranks, run_ranks
from tests.support.sentences import refuses, says
from tests.support.toy import Batch, PlainNet, StagedNet, loader, make_trainer, run_fit, texts

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
OWN_SCALER = torch.amp.GradScaler("cpu", init_scale=8.0)
DPS = "data_parallel_sharding"
FULLY_SHARDED = {DPS: "optim_grads_params"}
CP, EP, SP = "context_parallel_size", "expert_model_parallel_size", "sequence_parallel"


# When the strategy is made


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({TP: 0}, ValueError),
        ({TP: True}, TypeError),
        ({CP: "2"}, TypeError),
        ({VP: 2}, ValueError),
        ({PP: 2, VP: 1}, ValueError),
        ({SP: True}, ValueError),
        ({TP: 2, EP: 2}, ValueError),
        ({PP: 2, "pipeline_model_parallel_layout": "Et|xL"}, ValueError),
        ({"micro_batch_size": 0}, ValueError),
        ({"micro_batch_size": True}, TypeError),
        ({"micro_batch_size": 2.0}, TypeError),
        ({"loss_chunk_size": 0}, ValueError),
        ({"loss_chunk_size": "all"}, ValueError),
        ({"overlap_p2p_comm": True}, ValueError),
        ({PP: 2, VP: 2, "overlap_p2p_comm": 1}, TypeError),
        ({"communication": dict}, TypeError),
        ({"checkpoint_io": "x"}, TypeError),
        ({"cluster_environment": ()}, TypeError),
        ({"timeout": 30}, TypeError),
        ({"process_group_backend": 5}, TypeError),
        ({"process_group_backend": "glo"}, ValueError),
        ({TP: 2, SP: True, "tp_comm_overlap": True, "tp_comm_overlap_cfg": [1]}, TypeError),
        ({"ddp_config": {"bucket_size": 1}}, TypeError),
        ({DPS: "full_shard"}, ValueError),
        ({DPS: "optim"}, ValueError),
        ({DPS: "optim_grads_params", "use_distributed_optimizer": False}, ValueError),
        ({DPS: "optim_grads_params", "align_grad_reduce": True}, ValueError),
        ({DPS: "optim_grads", "ddp_config": DistributedDataParallelConfig(nccl_ub=True)}, ValueError),
        ({DPS: "optim_grads_params", PP: 2}, ValueError),
        ({"precision_plugin": MixedPrecision("16-mixed", "cpu", OWN_SCALER)}, ValueError),
    ],
)
def test_a_wrong_setting_of_the_strategy(arguments: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *arguments, "GradScaler"):
        MCoreStrategy(**arguments)


def test_a_misspelt_argument_is_not_swallowed() -> None:
    with pytest.raises(TypeError, match="'tensor_parallel_size'"):
        MCoreStrategy(tensor_parallel_size=8)  # type: ignore[call-arg]


def test_sizes_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        MCoreStrategy(2)  # type: ignore[misc]


# When the trainer is made


class ForeignPrecision(Precision):
    precision = "32-true"


class TransformerEnginePrecision(Precision):
    """Lightning makes its own only if TransformerEngine is installed."""


@pytest.mark.parametrize("name", ["fp8", "transformer-engine-float16"])
def test_a_precision_of_eight_bits_is_refused_with_its_setting(name: Any) -> None:
    with refuses(ValueError, "plugins=MCorePrecision"):
        MCorePrecision(name)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"plugins": TransformerEnginePrecision()}, TypeError),
        ({"precision": "64-true"}, TypeError),
        ({"plugins": MixedPrecision("16-mixed", "cpu", OWN_SCALER)}, ValueError),
        ({"plugins": ForeignPrecision()}, TypeError),
    ],
)
def test_a_precision_that_is_not_ours(arguments: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error):
        pl.Trainer(accelerator="cpu", devices=1, strategy="mcore", logger=False, **arguments)


def test_lightning_refuses_its_own_precision_without_transformer_engine() -> None:
    with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
        pl.Trainer(accelerator="cpu", devices=1, strategy="mcore", logger=False, precision="transformer-engine")


def test_gradients_in_fp32_contradict_a_precision_that_keeps_them_in_bf16() -> None:
    strategy = MCoreStrategy(ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True))
    with refuses(ValueError, "contradicts Trainer(precision"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true", logger=False)


# When the trainer meets the model


class BuiltLater(PlainNet):
    """Has a ``configure_model``, in which models are built that are too large for one process."""

    def configure_model(self) -> None:
        """Do nothing."""


class Validated(StagedNet):
    """Has batches for validation."""

    def val_dataloader(self) -> Any:
        """Return them."""
        return loader(4, 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that must be refused.

    Args:
        error: With what kind of exception.
        strategy: Arguments of the strategy.
        trainer: Arguments of the trainer.
        module: Makes the module.
        entry: The method of the trainer that is called.
    """

    error: type[Exception] = ValueError
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], pl.LightningModule] = StagedNet
    entry: str = "fit"


@dataclass(frozen=True)
class Outcome:
    """What became of a case on one rank."""

    error: type[BaseException] | None
    text: str
    raised_in: str
    opened_groups: bool
    configured: bool
    patched: list[str]


def gpt(**transformer: Any) -> Callable[[], pl.LightningModule]:
    """Return what makes a GPT with these sizes, small ones otherwise."""
    sizes = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 6, **transformer}
    seq_length = sizes.pop("seq_length", 16)
    return partial(MCoreGPT, vocab_size=32, seq_length=seq_length, transformer=sizes)


BEFORE_GROUPS: dict[str, Case] = {
    "accumulation": Case(trainer={"accumulate_grad_batches": 0}),
    "validation-at-a-time": Case(
        module=Validated, trainer={"val_check_interval": "00:00:00:01", "check_val_every_n_epoch": None}
    ),
    "world": Case(strategy={TP: 3}),
    "layers": Case(strategy={PP: 2}, module=gpt(num_layers=3)),
    "layers-before-the-world": Case(strategy={PP: 3}, module=gpt(num_layers=4)),
    "chunks": Case(strategy={PP: 2, VP: 3}, trainer={"accumulate_grad_batches": 2}, module=gpt()),
    "heads": Case(strategy={TP: 2}, module=gpt(num_attention_heads=3)),
    "query-groups": Case(strategy={TP: 2}, module=gpt(num_query_groups=3)),
    "feed-forward": Case(strategy={TP: 2}, module=gpt(ffn_hidden_size=49)),
    "experts": Case(strategy={EP: 2}, module=gpt(num_moe_experts=3)),
    "no-experts": Case(strategy={EP: 2}, module=gpt()),
    "sequence-cp": Case(strategy={CP: 2}, module=gpt(seq_length=18)),
    "sequence-sp": Case(strategy={TP: 2, SP: True}, module=gpt(seq_length=17)),
    "few-microbatches": Case(strategy={PP: 2, VP: 2}),
    "odd-microbatches": Case(strategy={PP: 2, VP: 2}, trainer={"accumulate_grad_batches": 3}),
    "plain-tp": Case(strategy={TP: 2}, module=PlainNet, error=TypeError),
    "plain-pp": Case(strategy={PP: 2}, module=PlainNet, error=TypeError),
    "plain-cp": Case(strategy={CP: 2}, module=PlainNet, error=TypeError),
    "plain-ep": Case(strategy={EP: 2}, module=PlainNet, error=TypeError),
    "plain-validate": Case(strategy={PP: 2}, module=PlainNet, entry="validate", error=TypeError),
    "layers-predict": Case(strategy={PP: 2}, module=gpt(num_layers=3), entry="predict"),
    "fully-sharded-alone": Case(strategy={TP: 2, **FULLY_SHARDED}, module=gpt()),
    "fully-sharded-experts": Case(strategy={EP: 2, **FULLY_SHARDED}, module=gpt(num_moe_experts=2)),
    "fully-sharded-plain": Case(strategy=FULLY_SHARDED, module=PlainNet, error=TypeError),
    "fully-sharded-fp16": Case(
        strategy={**FULLY_SHARDED, "precision_plugin": MCorePrecision("16-mixed")}, module=gpt()
    ),
    "fully-sharded-average": Case(
        strategy=FULLY_SHARDED, trainer={"callbacks": [ours.EMAWeightAveraging()]}, module=gpt()
    ),
    "precision-twice": Case(
        strategy={"precision_plugin": MCorePrecision("bf16-true")}, trainer={"precision": "bf16-mixed"}
    ),
    "groups-of-nccl": Case(strategy={"communication": CommunicationOptions(use_sharp=True)}),
    "average-in-gloo": Case(strategy={"ddp_config": DistributedDataParallelConfig(average_in_collective=True)}),
    "overlap-without-cuda": Case(strategy={TP: 2, SP: True, "tp_comm_overlap": True}),
    "half-a-group": Case(
        strategy={PP: 2, VP: 2, "microbatch_group_size_per_vp_stage": 4}, trainer={"accumulate_grad_batches": 2}
    ),
    "finder-as-a-callback": Case(trainer={"callbacks": [LearningRateFinder()]}, module=gpt()),
    "ema-of-a-pipeline": Case(trainer={"callbacks": [EMAWeightAveraging()]}),
    "swa-of-a-pipeline": Case(trainer={"callbacks": [StochasticWeightAveraging(swa_lrs=0.1)]}),
    "swa-of-what-is-built-later": Case(
        module=BuiltLater, trainer={"callbacks": [StochasticWeightAveraging(swa_lrs=0.1)]}
    ),
    "pruning-of-a-pipeline": Case(trainer={"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}),
    "ema-of-shards": Case(
        strategy={"use_distributed_optimizer": True}, module=PlainNet, trainer={"callbacks": [EMAWeightAveraging()]}
    ),
    "fp8-on-cpu": Case(strategy={"precision_plugin": MCorePrecision("bf16-mixed", fp8_recipe="tensorwise")}),
    "fp8-of-a-plain-module": Case(
        strategy={"precision_plugin": MCorePrecision("bf16-mixed", fp8="e4m3")}, module=PlainNet
    ),
    "nan-check-of-fp16": Case(
        strategy={
            "ddp_config": DistributedDataParallelConfig(check_for_nan_in_grad=True),
            "precision_plugin": MCorePrecision("16-mixed"),
        }
    ),
    "shared batch norm": Case(module=PlainNet, trainer={"sync_batchnorm": True}),
}


def attempt(case: Case) -> Outcome:
    """Run a case on this rank and tell what became of it."""
    names, had_groups = hygiene.snapshot(), dist.is_initialized()
    module = case.module()
    calls: list[None] = []
    configure = module.configure_model

    def count_and_configure() -> None:
        calls.append(None)
        configure()

    module.configure_model = count_and_configure  # type: ignore[method-assign]
    error: BaseException | None = None
    try:
        trainer = make_trainer(case.strategy, **{"max_steps": 2, **case.trainer})
        getattr(trainer, case.entry)(module, loader(8, 2))
    except Exception as raised:
        error = raised
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return Outcome(
        error=type(error) if error is not None else None,
        text=str(error),
        raised_in=frames[-1].filename if frames else "",
        opened_groups=dist.is_initialized() != had_groups or (parallel_state.is_initialized() and not had_groups),
        configured=bool(calls),
        patched=hygiene.changes(names, hygiene.snapshot()),
    )


def attempt_all(table: str) -> dict[str, Outcome]:
    """Run every case of a table on this rank, one after the other."""
    cases: dict[str, Case] = globals()[table]
    return {name: attempt(case) for name, case in cases.items()}


def check(outcomes: list[dict[str, Outcome]], name: str, case: Case) -> None:
    """What holds of every refusal: kind, text and place, the same on every rank, and nothing left patched."""
    for outcome in (rank[name] for rank in outcomes):
        assert outcome.error is case.error, outcome.text
        says(f"{case.error.__name__}: {outcome.text}")
        assert f"{os.sep}lightning_mcore{os.sep}" in outcome.raised_in
        assert outcome.text == outcomes[0][name].text
        assert outcome.patched == []


@pytest.fixture(scope="module")
def before_groups() -> list[dict[str, Outcome]]:
    return run_ranks(2, attempt_all, "BEFORE_GROUPS", open_group=False)


@pytest.mark.parametrize("name", BEFORE_GROUPS)
def test_refused_before_process_groups_or_parameters_exist(before_groups: Any, name: str) -> None:
    check(before_groups, name, BEFORE_GROUPS[name])
    assert not any(rank[name].opened_groups or rank[name].configured for rank in before_groups)


# When the model has been built


class Forgot(MCoreModule):
    """Builds its model without ``pipeline()``."""

    def configure_model(self) -> None:
        self.model = nn.Linear(4, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(batch["x"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherConfig(StagedNet):
    """Does not take a field of its TransformerConfig from the strategy."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.fields = fields

    def megatron_fields(self) -> dict[str, Any]:
        return {**super().megatron_fields(), **self.fields}


class NoConfig(StagedNet):
    """Builds chunks that are no Megatron modules."""

    def build_chunk(self, **_: Any) -> nn.Module:
        return nn.Linear(4, 1)


class Bare(MegatronModule):
    """A chunk of own layers, without what Megatron reads of a chunk."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(4, 1)


class BareChunks(StagedNet):
    """Builds chunks that lack everything."""

    def build_chunk(self, **_: Any) -> nn.Module:
        return Bare(self.config)


class Manual(StagedNet):
    """Wants to run backward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(StagedNet):
    """Overrides a hook that Megatron's schedule does not have."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class Outside(StagedNet):
    """Trains a parameter that no chunk holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Two(StagedNet):
    """Builds two models."""

    def configure_model(self) -> None:
        super().configure_model()
        self.teacher = self.pipeline(self.build_chunk)


class Partial(StagedNet):
    """Gives the optimizer only a part of the parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(self.parameters())[1:], lr=0.1)


def amsgrad_in_a_group(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "amsgrad": True}, {"params": others}], lr=0.1)


class TwoOptimizers(PlainNet):
    """Has an optimizer for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(layer.parameters()) for layer in (self.net[0], self.net[2])]


class TwoOptimizersOfOneStep(StagedNet):
    """Has two optimizers, for which Lightning recommends manual optimization."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW([parameter]) for parameter in list(self.parameters())[:2]]


class ByAll(torch.optim.SGD):
    """Steps by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / norm)
        return result


class SameOptimizer(StagedNet):
    """Returns one optimizer object from every call, as if it had been fitted before."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        LayerWiseShares(optimizer)
        return optimizer


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1)


SHARDED = {"use_distributed_optimizer": True}
LAYER_WISE = {"use_layer_wise_distributed_optimizer": True}

AFTER_BUILDING: dict[str, Case] = {
    "fully-sharded-without-layers": Case(strategy=FULLY_SHARDED, module=StagedNet),
    "fully-sharded-forgot": Case(strategy=FULLY_SHARDED, module=Forgot),
    "forgot-pp": Case(strategy={PP: 2}, module=Forgot),
    "forgot-cp": Case(strategy={CP: 2}, module=Forgot),
    "rows-of-a-plain-module": Case(strategy={"micro_batch_size": 1}, module=PlainNet),
    "chunks-of-a-plain-module": Case(strategy={"loss_chunk_size": 8}, module=PlainNet),
    "config-tp": Case(module=partial(OtherConfig, tensor_model_parallel_size=2)),
    "config-pp": Case(strategy={PP: 2}, module=partial(OtherConfig, pipeline_model_parallel_size=1)),
    "config-dtype": Case(module=partial(OtherConfig, params_dtype=torch.bfloat16, bf16=True)),
    "config-bf16": Case(trainer={"precision": "bf16-mixed"}, module=partial(OtherConfig, bf16=False)),
    "no-config": Case(module=NoConfig, error=TypeError),
    "bare-chunk": Case(module=BareChunks, error=TypeError),
    "bare-stage": Case(strategy={PP: 2}, module=BareChunks, error=TypeError),
    "manual": Case(module=Manual),
    "own-backward": Case(module=OwnBackward),
    "outside": Case(module=Outside),
    "two-models": Case(module=Two),
    "ungrouped": Case(module=Partial),
    "lbfgs": Case(strategy=SHARDED, module=partial(PlainNet, torch.optim.LBFGS), error=TypeError),
    "layers-of-an-earlier-run": Case(strategy=LAYER_WISE, module=SameOptimizer, error=RuntimeError),
    "layers-of-a-plain-module": Case(strategy=LAYER_WISE, module=PlainNet),
    "step-by-all-of-layers": Case(strategy=LAYER_WISE, module=partial(StagedNet, ByAll), error=TypeError),
    "sgd": Case(strategy=SHARDED, module=partial(PlainNet, partial(torch.optim.SGD, lr=0.1)), error=TypeError),
    "amsgrad-of-a-group": Case(strategy=SHARDED, module=partial(PlainNet, amsgrad_in_a_group), error=TypeError),
    "adafactor-of-split-matrices": Case(
        strategy={TP: 2}, module=partial(StagedNet, torch.optim.Adafactor), error=TypeError
    ),
    "two-optimizers-of-shards": Case(strategy=SHARDED, module=TwoOptimizers, error=TypeError),
    "two-optimizers-of-a-pipeline": Case(strategy={PP: 2}, module=TwoOptimizersOfOneStep, error=TypeError),
    "lbfgs-of-a-pipeline": Case(strategy={PP: 2}, module=partial(StagedNet, torch.optim.LBFGS), error=TypeError),
    "sync-batchnorm": Case(trainer={"sync_batchnorm": True}),
    "few-rows": Case(strategy={PP: 2, VP: 2, "micro_batch_size": 2}),
    "odd-rows": Case(strategy={PP: 2, VP: 2, "micro_batch_size": 2}, trainer={"accumulate_grad_batches": 3}),
    "muon-of-split-matrices": Case(strategy={TP: 2}, module=partial(StagedNet, muon), error=TypeError),
}


@pytest.fixture(scope="module")
def after_building() -> list[dict[str, Outcome]]:
    return run_ranks(2, attempt_all, "AFTER_BUILDING")


@pytest.mark.parametrize("name", AFTER_BUILDING)
def test_refused_on_every_rank_when_the_model_has_been_built(after_building: Any, name: str) -> None:
    check(after_building, name, AFTER_BUILDING[name])


@on_ranks(1)
def test_a_field_of_the_config_given_beside_those_of_the_strategy() -> None:
    module = StagedNet(config={"sequence_parallel": False})
    with pytest.raises(TypeError, match="multiple values for keyword argument 'sequence_parallel'"):
        run_fit(module, {}, loader(4, 2))


# In the first step


class Step(StagedNet):
    """A module whose ``training_step`` is one of those below."""

    def __init__(self, step: Callable[[StagedNet, Batch], Any], **config: Any) -> None:
        super().__init__(config=config)
        self.step = step

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.step(self, batch)


def twice(module: StagedNet, batch: Batch) -> Any:
    return (module.predictions(batch) - module.predictions(batch)).square().mean()


def never(module: StagedNet, batch: Batch) -> Any:
    return batch["x"].mean()


def skips(module: StagedNet, batch: Batch) -> Any:
    return None


def with_tokens(module: StagedNet, batch: Batch) -> Any:
    return {"loss": module.predictions(batch).mean(), "num_tokens": 3}


def without_tokens(module: StagedNet, batch: Batch) -> Any:
    return module.predictions(batch).mean()


def nothing(module: StagedNet, batch: Batch) -> Any:
    module.predictions(batch)


def logs_a_vector(module: StagedNet, batch: Batch) -> Any:
    predictions = module.predictions(batch)
    module.log("vector", predictions)
    return predictions.mean()


def logs_with_a_function(module: StagedNet, batch: Batch) -> Any:
    loss = module.predictions(batch).mean()
    module.log("median", loss, reduce_fx=torch.median)
    return loss


def logs_over_a_group(module: StagedNet, batch: Batch) -> Any:
    loss = module.predictions(batch).mean()
    module.log("grouped", loss, sync_dist=True, sync_dist_group=dist.group.WORLD)
    return loss


IN_A_STEP: dict[str, Case] = {
    "twice": Case(module=partial(Step, twice), error=RuntimeError),
    "never": Case(module=partial(Step, never), error=RuntimeError),
    "skips": Case(module=partial(Step, skips), error=RuntimeError),
    "tokens": Case(module=partial(Step, with_tokens)),
    "no-tokens": Case(module=partial(Step, without_tokens, calculate_per_token_loss=True)),
    "nothing": Case(module=partial(Step, nothing), error=TypeError),
    "vector": Case(module=partial(Step, logs_a_vector)),
    "function": Case(module=partial(Step, logs_with_a_function)),
    "group": Case(module=partial(Step, logs_over_a_group)),
}


@pytest.fixture(scope="module")
def in_a_step() -> list[dict[str, Outcome]]:
    return run_ranks(1, attempt_all, "IN_A_STEP")


@pytest.mark.parametrize("name", IN_A_STEP)
def test_a_step_that_breaks_its_contract(in_a_step: Any, name: str) -> None:
    check(in_a_step, name, IN_A_STEP[name])


@on_ranks(2)
def test_rows_that_the_layout_does_not_divide() -> None:
    for strategy, length in (({TP: 2, SP: True}, 7), ({CP: 2}, 10)):
        for entry in ("fit", "validate"):
            with refuses(ValueError, f"{length} tokens"):
                getattr(make_trainer(strategy), entry)(gpt(num_layers=1)(), texts(2, length, 32))


@on_ranks(2)
def test_validation_at_a_time_is_no_matter_without_validation() -> None:
    times: dict[str, Any] = {"val_check_interval": "00:00:00:01", "check_val_every_n_epoch": None, "max_steps": 1}
    make_trainer({PP: 2}, limit_val_batches=0, **times).fit(Validated(), loader(4, 2))


class OwnOptimizer(MCoreGPT):
    """Has no schedule that would replace a rate that was found."""

    learning_rate = 1e-3

    def configure_optimizers(self) -> Any:
        """Return an optimizer alone."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


@on_ranks(1)
def test_a_learning_rate_finder_is_accepted_where_no_schedule_replaces_its_rate() -> None:
    sizes = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 6}
    finder = LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    for kind, entry in ((MCoreGPT, "validate"), (OwnOptimizer, "fit")):
        trainer = make_trainer({}, callbacks=[finder], max_steps=1)
        getattr(trainer, entry)(kind(vocab_size=32, seq_length=16, transformer=sizes), texts(2, 16, 32))


def _fit_two_stages(step: Callable[[StagedNet, Batch], Any]) -> None:
    run_fit(Step(step), {PP: 2}, loader(4, 2))


def test_a_step_without_the_model_fails_on_the_first_stage() -> None:
    with refuses(RanksFailedError, "called the model") as failure:
        run_ranks(2, _fit_two_stages, never)
    assert str(failure.value).startswith("rank 0 of 2 failed first: ")


@pytest.mark.parametrize("step", [twice, with_tokens])
def test_what_only_the_last_stage_can_notice_does_not_leave_the_others_hanging(step: Any) -> None:
    with refuses(RanksFailedError, "training_step") as failure:
        run_ranks(2, _fit_two_stages, step, grace=30.0)
    assert str(failure.value).startswith("rank 1 of 2 failed first: ")
    assert failure.value.unfinished == []
