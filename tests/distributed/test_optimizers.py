# SPDX-License-Identifier: Apache-2.0
"""Optimizers, clipping and communication options on split models give the numbers of ``strategy="auto"`` on one rank.

Every run is trained twice: on one rank by Lightning alone, with torch's own optimizer, and on two (or four) under ours.
The largest difference that was measured over the table is 1.2e-7 in a weight; the tolerance is that of
``test_pipelined_module.py``.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mcore import CommunicationOptions, MCoreGPT, MuonWithAdamW
from lightning_mcore.optimizer.megatron import MCoreOptimizer, RebuiltOptimizer
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import (
    FEATURES,
    NUM_LAYERS,
    OVERLAPPED,
    PP2,
    SHARDED,
    TP2,
    VP2,
    Batch,
    MakeOptimizer,
    Memory,
    PlainNet,
    Samples,
    StagedNet,
    fill,
    loader,
    make_trainer,
    run_fit,
    weights,
)

pytestmark = pytest.mark.distributed

LAYER_WISE = {"use_layer_wise_distributed_optimizer": True}
BY_NORM = {"gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
WIDE = 16

Configure = Callable[[pl.LightningModule], Any]


class Halves(MegatronModule):
    """Two matrices, the first cut by columns and the second by rows; the same weights at every tensor size."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = False
        arguments: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_, "bias": True}
        self.up = ColumnParallelLinear(FEATURES, WIDE, gather_output=False, **arguments)
        self.down = RowParallelLinear(WIDE, 1, input_is_parallel=True, skip_bias_add=False, **arguments)
        rank, size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        up, down = fill(nn.Linear(FEATURES, WIDE), seed=1), fill(nn.Linear(WIDE, 1), seed=2)
        for parameter, whole, dim in (
            (self.up.weight, up.weight, 0),
            (self.up.bias, up.bias, 0),
            (self.down.weight, down.weight, 1),
        ):
            parameter.data.copy_(whole.data.chunk(size, dim)[rank])
        self.down.bias.data.copy_(down.bias.data)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing: there is no stage before."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[b, s, 1]``."""
        return self.down(self.up(x)[0].tanh())[0]


CUT_ALONG = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Net(StagedNet):
    """The pipelined toy model with an optimizer of the run's choice."""

    def __init__(self, configure: Configure) -> None:
        super().__init__()
        self.configure = configure

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = (self.predictions(batch) - batch["y"]).square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class SplitNet(Net):
    """The tensor-parallel toy model."""

    def build_chunk(self, **_: Any) -> nn.Module:
        return Halves(self.config)


class Frozen(Net):
    """Does not train its embedding and its second layer."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))

    frozen = ("embedding", "layers.1.")


class FrozenStage(Frozen):
    """Does not train what is the first of two stages."""

    frozen = ("embedding", "layers.0.", "layers.1.")


# What configure_optimizers returns


def only(make: MakeOptimizer) -> Configure:
    """One group, and a learning rate that moves at every step."""

    def configure(module: pl.LightningModule) -> Any:
        optimizer = make(module.parameters())
        return [optimizer], [{"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 12), "interval": "step"}]

    return configure


def two_rates(module: pl.LightningModule) -> torch.optim.Optimizer:
    """A learning rate and a weight decay of their own for the first layer of the model."""
    named = list(module.named_parameters())
    first = [p for name, p in named if "embedding" in name or ".up." in name]
    others = [p for name, p in named if not ("embedding" in name or ".up." in name)]
    groups = [{"params": first, "lr": 0.05, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def decoupled(module: pl.LightningModule) -> Any:
    """Two rates that move apart."""
    optimizer = two_rates(module)
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.8**step])
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def one_cycle(module: pl.LightningModule) -> Any:
    """Two rates and the momentum move."""
    optimizer = two_rates(module)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=12)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def layerwise(module: pl.LightningModule) -> Any:
    """A group for each layer of the whole model; a stage leaves some of them empty."""
    parts = ["embedding", *(f"layers.{layer}." for layer in range(NUM_LAYERS)), "head"]
    named = list(module.named_parameters())
    groups = [
        {"params": [p for name, p in named if part in name], "lr": 0.03 * 0.7**depth}
        for depth, part in enumerate(reversed(parts))
    ]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def tensor_rate(module: pl.LightningModule) -> Any:
    """The learning rate is a tensor."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.01))
    return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def muon(module: pl.LightningModule) -> Any:
    """Muon for the matrices of the layers, AdamW for embedding, head and biases, and rates that move."""
    inner = ("layers.", "up.", "down.")  # of the pipelined and of the tensor-parallel model
    named = list(module.named_parameters())
    hidden = [p for name, p in named if any(part in name for part in inner) and p.dim() == 2]
    others = [p for name, p in named if not (any(part in name for part in inner) and p.dim() == 2)]
    optimizer = MuonWithAdamW(hidden, others, lr=0.02, adamw_lr=0.01)
    return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


ADAMW = only(partial(torch.optim.AdamW, lr=1e-2))
SGD = only(partial(torch.optim.SGD, lr=0.05, momentum=0.9))
RMSPROP = only(partial(torch.optim.RMSprop, lr=1e-3))
ADAGRAD = only(partial(torch.optim.Adagrad, lr=1e-2))
ADAMAX = only(partial(torch.optim.Adamax, lr=1e-2))
NADAM = only(partial(torch.optim.NAdam, lr=1e-2))


def ddp(**fields: Any) -> dict[str, Any]:
    """Return ``ddp_config`` as an argument of the strategy."""
    return {"ddp_config": DistributedDataParallelConfig(**fields)}


def talk(**fields: Any) -> dict[str, Any]:
    """Return ``communication`` as an argument of the strategy."""
    return {"communication": CommunicationOptions(**fields)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on several ranks and the one on one rank that it equals.

    Args:
        strategy: Arguments of MCoreStrategy.
        configure: What ``configure_optimizers`` returns.
        module: The class of the module.
        trainer: More arguments of the trainer, on both.
        accumulate: Batches of a step on one rank; data-parallel ranks share them.
        copies: Data-parallel size.
        world: Number of ranks.
    """

    strategy: dict[str, Any]
    configure: Configure = ADAMW
    module: type[Net] = Net
    trainer: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 2
    copies: int = 1
    world: int = 2


SPLIT: dict[str, Any] = {"strategy": TP2, "module": SplitNet}
GROUPS_OF_4 = {**VP2, "microbatch_group_size_per_vp_stage": 4}

RUNS: dict[str, Run] = {
    "tp2-decoupled": Run(**SPLIT, configure=decoupled),
    "tp2-one-cycle": Run(**SPLIT, configure=one_cycle),
    "tp2-rmsprop": Run(**SPLIT, configure=RMSPROP),
    "tp2-adagrad": Run(**SPLIT, configure=ADAGRAD),
    "tp2-by-value": Run(**SPLIT, trainer=BY_VALUE),
    "pp2-decoupled": Run(strategy=PP2, configure=decoupled),
    "pp2-one-cycle": Run(strategy=PP2, configure=one_cycle),
    "pp2-layerwise": Run(strategy=PP2, configure=layerwise),
    "pp2-tensor-rate": Run(strategy=PP2, configure=tensor_rate),
    "pp2-adagrad": Run(strategy=PP2, configure=ADAGRAD),
    "pp2-adamax": Run(strategy=PP2, configure=ADAMAX),
    "dp2-nadam": Run(strategy={}, configure=NADAM, copies=2),
    "pp2-muon": Run(strategy=PP2, configure=muon),
    "vp2-muon-by-norm": Run(strategy=VP2, configure=muon, trainer={"gradient_clip_val": 0.5}),
    "dp2-muon": Run(strategy={}, configure=muon, copies=2),
    "tp2-muon": Run(**SPLIT, configure=muon),
    "dp2-layer-wise-muon": Run(strategy=LAYER_WISE, configure=muon, copies=2, trainer=BY_NORM),
    "dp2-layer-wise-groups": Run(strategy=LAYER_WISE, configure=layerwise, copies=2),
    "dp2-layer-wise-adagrad": Run(strategy=LAYER_WISE, configure=ADAGRAD, copies=2, trainer=BY_VALUE),
    "pp2-dp2-layer-wise-muon": Run(strategy={**PP2, **LAYER_WISE}, configure=muon, copies=2, world=4),
    "tp2-dp2-layer-wise-muon": Run(
        strategy={**TP2, **LAYER_WISE}, module=SplitNet, configure=muon, copies=2, world=4, trainer=BY_NORM
    ),
    "pp2-by-value": Run(strategy=PP2, trainer=BY_VALUE),
    "pp2-by-value-sgd": Run(strategy=PP2, trainer=BY_VALUE, configure=SGD),
    "pp2-frozen": Run(strategy=PP2, module=Frozen),
    "pp2-frozen-sharded": Run(strategy={**PP2, **SHARDED}, module=Frozen, trainer={"gradient_clip_val": 0.5}),
    "pp2-frozen-stage": Run(strategy=PP2, module=FrozenStage, trainer={"gradient_clip_val": 0.5}),
    "pp2-frozen-stage-sharded": Run(strategy={**PP2, **SHARDED}, module=FrozenStage),
    "dp2-do-decoupled": Run(strategy=SHARDED, configure=decoupled, copies=2),
    "dp2-do-one-cycle": Run(strategy=SHARDED, configure=one_cycle, copies=2),
    "dp2-do-layerwise": Run(strategy=SHARDED, configure=layerwise, copies=2),
    "dp2-do-by-value": Run(strategy=SHARDED, trainer=BY_VALUE, copies=2),
    "dp2-overlapped-by-value": Run(strategy=OVERLAPPED, trainer=BY_VALUE, copies=2),
    "pp2-batched": Run(strategy={**PP2, **talk(batch_p2p_comm=True)}),
    "pp2-one-by-one": Run(strategy={**PP2, **talk(batch_p2p_comm=False)}),
    "vp2-flush": Run(strategy={**VP2, **talk(overlap_p2p_comm_warmup_flush=True)}, accumulate=4),
    "vp2-groups-of-4": Run(strategy=GROUPS_OF_4, accumulate=4),
    "vp2-groups-of-4-and-2": Run(strategy=GROUPS_OF_4, accumulate=6),
    "vp2-aligned": Run(strategy={**VP2, **OVERLAPPED, **ddp(align_param_gather=True)}),
    "vp2-reduced-together": Run(strategy={**VP2, **OVERLAPPED, "align_grad_reduce": True}),
    "pp2-dp2-reduced-together": Run(strategy={**PP2, **OVERLAPPED, "align_grad_reduce": True}, copies=2, world=4),
    "dp2-buckets": Run(strategy={**OVERLAPPED, **ddp(bucket_size=40)}, copies=2),
    "dp2-padded": Run(strategy={**SHARDED, **ddp(pad_buckets_for_high_nccl_busbw=True)}, copies=2),
    "dp2-fp32-sum": Run(strategy={**SHARDED, **ddp(reduce_scatter_with_fp32_accumulation=True)}, copies=2),
    "dp2-overlapped-after-fp32-sum": Run(strategy=OVERLAPPED, copies=2),
    "dp2-gloo-groups": Run(strategy={**SHARDED, **talk(create_gloo_process_groups=True)}, copies=2),
    "dp2-checked": Run(strategy=ddp(check_for_nan_in_grad=True), copies=2),
    "dp4-two-instances": Run(strategy={**SHARDED, **ddp(num_distributed_optimizer_instances=2)}, copies=4, world=4),
    "dp4-two-instances-overlapped": Run(
        strategy={**OVERLAPPED, **ddp(num_distributed_optimizer_instances=2)}, copies=4, world=4
    ),
}

THOROUGH = (  # what they combine is in runs that stay
    *("tp2-one-cycle", "tp2-rmsprop", "tp2-adagrad", "pp2-one-cycle", "pp2-adagrad", "vp2-muon-by-norm"),
    *("pp2-by-value-sgd", "pp2-frozen-stage-sharded", "dp2-do-decoupled", "dp2-overlapped-by-value"),
    *("vp2-groups-of-4", "dp2-overlapped-after-fp32-sum", "dp4-two-instances", "pp2-dp2-reduced-together"),
)


def fit(run: Run, ours: bool) -> dict[str, Any]:
    """Train on this rank."""
    module = run.module(run.configure)
    trainer = make_trainer(
        run.strategy if ours else "auto",
        accumulate_grad_batches=max(1, run.accumulate // run.copies) if ours else max(run.accumulate, run.copies),
        max_epochs=1,
        use_distributed_sampler=False,  # in order, so that a step has the same samples on one rank and on several
        limit_val_batches=0,
        **run.trainer,
    )
    sampler = None
    if ours and run.copies > 1:
        of_tensor_parallel = run.strategy.get("tensor_model_parallel_size", 1)
        copy = dist.get_rank() // of_tensor_parallel % run.copies
        sampler = DistributedSampler(Samples(24), run.copies, copy, shuffle=False)
    trainer.fit(module, loader(24, 2, sampler=sampler))
    return {"weights": weights(module), "loss": float(trainer.callback_metrics["train_loss"])}


def fit_all(ours: bool, names: list[str]) -> dict[str, dict[str, Any]]:
    """Train some runs on this rank."""
    return {name: fit(RUNS[name], ours) for name in names}


@functools.cache
def ranks_of(world: int, ours: bool, thorough: bool) -> list[dict[str, dict[str, Any]]]:
    """Return what each rank made of the runs of that many ranks, those of one mark, which are trained once."""
    names = [name for name, run in RUNS.items() if run.world == world and (name in THOROUGH) == thorough]
    ranks: list[dict[str, dict[str, Any]]] = run_ranks(
        world if ours else 1, fit_all, ours, names, timeout=240, open_group=ours
    )
    return ranks


def _chosen(name: str) -> Any:
    """Return the parameter of a run; runs of as many ranks are trained together, in one process."""
    kind = [pytest.mark.thorough] if name in THOROUGH else []
    return pytest.param(name, marks=[pytest.mark.xdist_group(f"optimizers-{RUNS[name].world}"), *kind])


def whole(ranks: list[dict[str, Tensor]], run: Run) -> dict[str, Tensor]:
    """Return the weights of the whole model."""
    if run.module is not SplitNet:
        return {name: value for rank in ranks for name, value in rank.items()}
    first, second, *_ = ranks
    return {n: torch.cat([v, second[n]], CUT_ALONG[n]) if n in CUT_ALONG else v for n, v in first.items()}


@pytest.mark.parametrize("name", [_chosen(name) for name in RUNS])
def test_trains_as_torchs_optimizer_on_one_rank(name: str) -> None:
    run, thorough = RUNS[name], name in THOROUGH
    [expected] = [rank[name] for rank in ranks_of(run.world, False, thorough)]
    ranks = [rank[name] for rank in ranks_of(run.world, True, thorough)]
    ours = whole([rank["weights"] for rank in ranks], run)
    assert ours.keys() == expected["weights"].keys()
    for parameter, value in ours.items():
        assert (value - expected["weights"][parameter]).abs().max().item() <= 5e-7, parameter
    for rank in ranks:
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for parameter, value in rank["weights"].items():  # every copy, not the last one alone
            assert run.module is SplitNet or torch.equal(value, ours[parameter]), parameter


@pytest.mark.xdist_group("optimizers-2")
def test_the_runs_are_not_all_alike() -> None:
    [alone] = ranks_of(2, False, False)
    heads = {name: run["weights"].get("head.weight", torch.zeros(1)) for name, run in alone.items()}
    different = ("pp2-decoupled", "pp2-layerwise", "pp2-by-value", "pp2-frozen", "pp2-frozen-stage")
    assert all(not torch.equal(heads["pp2-batched"], heads[name]) for name in different)


# Learning rates


def steps(make: Callable[[torch.optim.Optimizer], Any], **more: Any) -> Configure:
    """AdamW of two groups and a scheduler, as Lightning takes them."""

    def configure(module: pl.LightningModule) -> Any:
        optimizer = two_rates(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step", **more}}

    return configure


def of_transformers(name: str, **arguments: Any) -> Configure:
    """A schedule of the transformers package."""
    import transformers

    return steps(lambda optimizer: getattr(transformers, name)(optimizer, **arguments))


def chain(optimizer: torch.optim.Optimizer) -> Any:
    """Warm up, then decay."""
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def both(optimizer: torch.optim.Optimizer) -> Any:
    """Two schedules at once."""
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def schedules() -> dict[str, Configure]:
    """Every LR schedule that makes sense for a run of nine steps in three epochs."""
    warm = {"num_warmup_steps": 3, "num_training_steps": 10}
    wsd = {"num_warmup_steps": 2, "num_stable_steps": 4, "num_decay_steps": 4}
    return {
        "step": steps(partial(lr_scheduler.StepLR, step_size=3)),
        "multi-step": steps(partial(lr_scheduler.MultiStepLR, milestones=[2, 5])),
        "constant": steps(partial(lr_scheduler.ConstantLR, factor=0.5, total_iters=4)),
        "linear": steps(partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=5)),
        "exponential-epoch": steps(partial(lr_scheduler.ExponentialLR, gamma=0.5), interval="epoch"),
        "exponential-second": steps(partial(lr_scheduler.ExponentialLR, gamma=0.5), frequency=2),
        "polynomial": steps(partial(lr_scheduler.PolynomialLR, total_iters=8, power=2.0)),
        "cosine": steps(partial(lr_scheduler.CosineAnnealingLR, T_max=8)),
        "restarts": steps(partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3)),
        "cyclic": steps(partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=3)),
        "one-cycle": steps(partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.02], total_steps=11)),
        "multiplicative": steps(partial(lr_scheduler.MultiplicativeLR, lr_lambda=[lambda s: 0.9, lambda s: 0.8])),
        "sequential": steps(chain),
        "chained": steps(both),
        "plateau": steps(
            partial(lr_scheduler.ReduceLROnPlateau, mode="max", patience=0), interval="epoch", monitor="val_loss"
        ),
        "hf-cosine": of_transformers("get_cosine_schedule_with_warmup", **warm),
        "hf-restarts": of_transformers("get_cosine_with_hard_restarts_schedule_with_warmup", **warm, num_cycles=2),
        "hf-linear": of_transformers("get_linear_schedule_with_warmup", **warm),
        "hf-polynomial": of_transformers("get_polynomial_decay_schedule_with_warmup", **warm, power=2.0),
        "hf-inverse-sqrt": of_transformers("get_inverse_sqrt_schedule", num_warmup_steps=3),
        "hf-wsd": of_transformers("get_wsd_schedule", **wsd),
    }


class Rates(pl.Callback):
    """Keeps learning rate and momentum that each step used: Megatron's where Megatron steps."""

    def __init__(self) -> None:
        self.used: list[list[Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.before = self.read(trainer.optimizers[0].param_groups)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, MCoreOptimizer):
            assert isinstance(optimizer, RebuiltOptimizer)
            self.used.append(self.read(optimizer.megatron.param_groups))
        else:
            self.used.append(self.before)

    @staticmethod
    def read(groups: Iterable[dict[str, Any]]) -> list[Any]:
        return sorted((float(group["lr"]), tuple(group["betas"])) for group in groups)


def rates_of(strategy: Any) -> dict[str, list[list[Any]]]:
    """Return what every schedule made of the rates in nine steps."""
    used = {}
    for name, configure in schedules().items():
        rates = Rates()
        arguments = {"max_epochs": 3, "callbacks": [rates], "use_distributed_sampler": False}
        run_fit(Net(configure), strategy, loader(6, 2), loader(4, 2), **arguments)
        used[name] = rates.used
    return used


def test_every_lr_schedule_moves_megatrons_groups_as_it_moves_torchs() -> None:
    [expected] = run_ranks(1, rates_of, "auto", timeout=120, open_group=False)
    [ours] = run_ranks(1, rates_of, {}, timeout=120)
    assert len(expected) == 21
    for name, used in ours.items():
        assert used == expected[name], name
        assert len(used) == 9
        assert any(rates != used[0] for rates in used), f"{name} moved nothing"


# Zeros, NaN, timeouts


class Blind(Net):
    """Does not see the last feature, so that a column of its first matrix has no gradient."""

    def predictions(self, batch: Batch) -> Tensor:
        seen = torch.tensor([1.0, 1.0, 1.0, 0.0])
        return super().predictions({**batch, "x": batch["x"] * seen})


@on_ranks(2, timeout=120)
def test_zeros_in_the_gradients_are_counted_over_all_ranks() -> None:
    config = OptimizerConfig(log_num_zeros_in_grad=True)
    for strategy, configure, trainer in (
        (PP2, ADAMW, {}),
        (PP2, ADAMW, BY_VALUE),
        (PP2, RMSPROP, {}),
        (SHARDED, ADAMW, {}),
        ({}, ADAMW, {}),
    ):
        zeros: list[float] = []
        keep = pl.callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, *_, zeros=zeros: zeros.append(trainer.optimizers[0].num_zeros_in_grad)
        )
        run_fit(Blind(configure), {**strategy, "optimizer_config": config}, loader(8, 2), callbacks=[keep], **trainer)
        assert len(zeros) >= 2
        assert set(zeros) == {8.0}


class Breaks(PlainNet):
    """Its loss is not a number in the second step of the second rank."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if dist.get_rank() == 1 and batch_idx == 1 else loss


@on_ranks(2)
def test_a_nan_on_one_rank_ends_the_run_on_every_rank() -> None:
    for strategy in ({}, SHARDED):
        with refuses(RuntimeError, "the gradients contain NaN or infinity"):
            run_fit(Breaks(), {**strategy, **ddp(check_for_nan_in_grad=True)}, loader(12, 2))


@on_ranks(2, open_group=False)
def test_the_timeout_reaches_every_group_of_megatron() -> None:
    found: set[timedelta] = set()

    def look(*_: Any) -> None:
        for group in parallel_state._global_process_group_list or []:
            if group is not None and group.size() > 1:
                found.add(group._get_backend(torch.device("cpu")).options._timeout)

    watch = pl.callbacks.LambdaCallback(on_train_start=look)
    run_fit(StagedNet(), {**PP2, "timeout": timedelta(minutes=7)}, loader(4, 2), callbacks=[watch])
    assert found == {timedelta(minutes=7)}


# Overlapping the parameters' journey, with reads in between


class Saves(pl.Callback):
    """Saves in the middle of an epoch and reads the weights while nothing runs."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.save_checkpoint(f"{self.folder}/{trainer.current_epoch}.ckpt")


@on_ranks(2, timeout=120)
def test_overlapping_the_gathering_of_parameters_changes_nothing_around_validation_and_saving(tmp_path: Any) -> None:
    results = {}
    for kind, module in (("staged", StagedNet), ("plain", PlainNet)):
        for name, strategy in (("apart", SHARDED), ("overlapped", OVERLAPPED)):
            net, memory = module(), Memory()
            arguments = {"val_check_interval": 3, "num_sanity_val_steps": 2, "max_epochs": 2, "logger": memory}
            saves = Saves(f"{tmp_path}/{kind}-{name}")
            run_fit(net, strategy, loader(28, 2), loader(8, 2), callbacks=[saves], **arguments)
            results[f"{kind}-{name}"] = memory.values("val_loss"), weights(net)
    for kind in ("staged", "plain"):
        (losses, expected), (overlapped, found) = results[f"{kind}-apart"], results[f"{kind}-overlapped"]
        assert len(losses) >= 4
        assert losses == overlapped
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


# Averages of the weights


@on_ranks(2, timeout=120)
def test_averages_of_the_weights_are_those_of_ddp() -> None:
    results: dict[str, Any] = {}
    for kind, make in (
        ("ema", lambda: EMAWeightAveraging(decay=0.8)),
        ("swa", lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)),
    ):
        strategies = {"ddp": "ddp", "ours": {}} | ({"sharded": OVERLAPPED} if kind == "swa" else {})
        for name, strategy in strategies.items():
            torch.manual_seed(0)
            net, memory = PlainNet(), Memory()
            run_fit(net, strategy, loader(16, 2), loader(6, 2), callbacks=[make()], max_epochs=3, logger=memory)
            results[f"{kind}-{name}"] = memory.values("val_loss"), weights(net)
    for kind, strategy in (("ema", "ours"), ("swa", "ours"), ("swa", "sharded")):
        (losses, expected), (ours, found) = results[f"{kind}-ddp"], results[f"{kind}-{strategy}"]
        assert len(losses) == 3
        assert ours == pytest.approx(losses, rel=1e-6)  # a mean over samples, and Lightning's mean of means
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


# A checkpoint in between


class EightBits(torch.optim.Optimizer):
    """Momentum in 8 bits, with a scale for each row, as bitsandbytes has one for each block."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.move(parameter, self.state[parameter], group["lr"])

    def move(self, parameter: nn.Parameter, state: dict[str, Tensor], lr: float) -> None:
        if not state:
            state["codes"] = torch.zeros(parameter.shape, dtype=torch.uint8)
            state["scales"] = torch.zeros(len(parameter), *[1] * (parameter.dim() - 1))
        momentum = 0.9 * (state["codes"].float() - 128) * state["scales"] + parameter.grad
        rows = tuple(range(1, parameter.dim()))
        state["scales"] = momentum.abs().amax(rows, keepdim=True) / 100 if rows else momentum.abs() / 100
        state["codes"] = ((momentum / state["scales"].clamp_min(1e-12)).round() + 128).to(torch.uint8)
        parameter.sub_(momentum, alpha=lr)


class OnlyRows(EightBits):
    """Keeps nothing of the shape of a matrix, and a number that no two parameters share, as transformers' Adafactor."""

    def move(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        assert parameter.grad is not None
        rows = parameter.grad.square().mean(tuple(range(1, parameter.dim())), keepdim=True) + 1e-6
        state["squares"] = state.get("squares", 0) * 0.9 + rows
        state["size"] = parameter.square().mean()
        parameter.sub_(parameter.grad / state["squares"].sqrt(), alpha=lr)


KEPT = {  # rounding to 8 bits does not stay within the tolerance of the table above
    "pp2-8-bits": Run(strategy=PP2, configure=only(EightBits)),
    "pp2-only-rows": Run(strategy=PP2, configure=only(OnlyRows)),
    "dp2-8-bits": Run(strategy={}, configure=only(EightBits), copies=2),
}
RESUMED = {
    2: (
        *(*KEPT, "pp2-muon", "pp2-adamax", "pp2-layerwise"),
        *("pp2-frozen-stage", "pp2-frozen-stage-sharded", "dp2-do-one-cycle"),
    ),
    4: ("dp4-two-instances", "dp4-two-instances-overlapped"),
}


def stop_and_go_on(run: Run, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after two epochs, at once and with a checkpoint in between."""
    data = loader(8 * run.copies, 2)
    at_once, first, second = (run.module(run.configure) for _ in range(3))
    run_fit(at_once, run.strategy, data, max_epochs=2)
    trainer = make_trainer(run.strategy, max_epochs=1)
    trainer.fit(first, data)
    trainer.save_checkpoint(path)
    run_fit(second, run.strategy, data, max_epochs=2, ckpt_path=path)
    return weights(at_once), weights(second)


@pytest.mark.parametrize("world", RESUMED)
@on_ranks("world", timeout=120)
def test_an_optimizer_goes_on_where_it_stopped(world: int, tmp_path: Any) -> None:
    runs = RUNS | KEPT
    for name in runs.keys() & RESUMED[world]:
        expected, found = stop_and_go_on(runs[name], f"{tmp_path}/{name}.ckpt")
        assert all(torch.equal(value, found[parameter]) for parameter, value in expected.items()), name


@on_ranks(2)
def test_statistics_of_a_part_of_a_matrix_are_rejected_at_the_first_step() -> None:
    with refuses(TypeError, "EightBits keeps 'scales' of shape [8, 1]"):
        run_fit(SplitNet(only(EightBits)), TP2, loader(4, 2))


class TwoSets(torch.optim.RMSprop):
    """Evaluates other weights than it trains, as schedule-free optimizers do: here their negatives."""

    @torch.no_grad()
    def eval(self) -> None:
        torch._foreach_neg_(list(itertools.chain(*(group["params"] for group in self.param_groups))))

    train = eval


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@on_ranks(1)
def test_the_modes_of_an_optimizer_reach_the_weights_of_the_model(precision: str) -> None:
    seen: list[dict[str, Tensor]] = []

    def look(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        optimizer: Any = module.optimizers()
        seen.append(weights(module))
        optimizer.eval()
        seen.append(weights(module))
        optimizer.train()
        seen.append(weights(module))

    watch = pl.callbacks.LambdaCallback(on_train_end=look)
    run_fit(StagedNet(partial(TwoSets, lr=0.01)), {}, loader(4, 2), precision=precision, callbacks=[watch])
    trained, exchanged, back = seen
    assert all(torch.equal(exchanged[name], -value) for name, value in trained.items())
    assert all(torch.equal(back[name], value) for name, value in trained.items())


# What goes wrong on one rank is told on all


def trainable_only(module: pl.LightningModule) -> torch.optim.Optimizer:
    """Leave out frozen parameters, so that a frozen stage has none."""
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)


@on_ranks(2, timeout=30)
def test_an_optimizer_without_parameters_on_one_stage_fails_on_both() -> None:
    with refuses((ValueError, RuntimeError), "empty parameter list in configure_optimizers"):
        run_fit(FrozenStage(trainable_only), PP2, loader(4, 2))


class NoEmptyGroups(StagedNet):
    """Leaves out the groups that are empty on a stage: only the first has an embedding."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        embedding = [p for name, p in self.named_parameters() if "embedding" in name]
        others = [p for name, p in self.named_parameters() if "embedding" not in name]
        return torch.optim.AdamW([{"params": group} for group in (embedding, others) if group], lr=0.01)


@on_ranks(2, timeout=30)
def test_groups_that_only_one_stage_has_are_rejected_on_both() -> None:
    with refuses((ValueError, RuntimeError), "on rank 0, but [1] on rank 1"):
        run_fit(NoEmptyGroups(), PP2, loader(4, 2))


class TiedInTwoGroups(MCoreGPT):
    """Gives the embedding a rate of its own, by its name, which its copy on the last stage does not have."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        embedding = [p for name, p in self.named_parameters() if "embedding" in name]
        others = [p for name, p in self.named_parameters() if "embedding" not in name]
        return torch.optim.AdamW([{"params": embedding, "lr": 0.001}, {"params": others}], lr=0.01)


@on_ranks(2, timeout=30)
def test_copies_of_a_tied_embedding_in_different_groups_are_rejected() -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    model = TiedInTwoGroups(32, 8, sizes, share_embeddings_and_output_weights=True)
    with refuses((ValueError, RuntimeError), "share their weight"):
        run_fit(model, PP2, DataLoader([{"tokens": torch.arange(8), "labels": torch.arange(8)}] * 4, batch_size=2))


class UnfreezeLater(pl.Callback):
    """Adds a group in the second epoch, as BaseFinetuning does."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


@on_ranks(2)
def test_a_group_that_is_added_during_training_is_refused_in_a_pipeline() -> None:
    with refuses(RuntimeError, "parameter groups are fixed once Megatron's optimizer exists"):
        run_fit(Frozen(ADAMW), PP2, loader(4, 2), max_epochs=2, callbacks=[UnfreezeLater()])


@on_ranks(2)
def test_a_group_is_refused_where_context_parallel_ranks_would_not_reduce_its_gradients() -> None:
    with refuses(RuntimeError, "were frozen when training began"):
        layout = {"context_parallel_size": 2}
        run_fit(Frozen(RMSPROP), layout, loader(4, 2), max_epochs=2, callbacks=[UnfreezeLater()])


# The user's hooks and Megatron's numbers


class Hooked(StagedNet):
    """Its optimizer has hooks of its step, the first of which moves the learning rate."""

    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        super().__init__(make_optimizer)
        self.fired: list[str] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(lambda *_: self.fired.append("after"))
        return optimizer

    def before(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        self.fired.append("before")
        optimizer.param_groups[0]["lr"] = 0.0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=1.0), partial(torch.optim.RMSprop, lr=1.0)])
@on_ranks(1)
def test_step_hooks_of_the_users_optimizer_run(make: MakeOptimizer, precision: str) -> None:
    module = Hooked(make)
    before: dict[str, Tensor] = {}
    start = pl.callbacks.LambdaCallback(on_train_start=lambda *_: before.update(weights(module)))
    run_fit(module, {}, loader(4, 2), precision=precision, callbacks=[start])
    assert module.fired == ["before", "after"] * 2
    assert all(torch.equal(value, before[name]) for name, value in weights(module).items())  # at a rate of 0


class ClipsTheFirstStep(PlainNet):
    """Manual optimization; reads the norm after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float | None] = []

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.predictions(batch) - batch["y"]).square().mean())
        if batch_idx == 0:
            self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        self.norms.append(optimizer.grad_norm)


@on_ranks(1)
def test_a_step_that_is_not_clipped_does_not_show_the_norm_of_another() -> None:
    module = ClipsTheFirstStep()
    run_fit(module, {}, loader(6, 2))
    first, *others = module.norms
    assert first is not None
    assert others == [None, None]


@on_ranks(1)
def test_zeros_are_counted_once_in_a_step() -> None:
    config = OptimizerConfig(log_num_zeros_in_grad=True)
    for kind in (PlainNet, StagedNet):
        for precision in ("32-true", "bf16-true"):
            with mock.patch.object(megatron_optimizer, "count_zeros_fp32", return_value=0.0) as count:
                module = kind(partial(torch.optim.RMSprop, lr=1e-3))
                run_fit(module, {"optimizer_config": config}, loader(4, 2), precision=precision)
            assert count.call_count == 2, precision


class PartlyInBf16(PlainNet):
    """A plain module that keeps one layer in bf16, whatever the precision of the run."""

    def configure_model(self) -> None:
        self.net[2].to(torch.bfloat16)

    def predictions(self, batch: Batch) -> Tensor:
        return self.net[2](self.net[:2](batch["x"]).bfloat16())


@on_ranks(1)
def test_parameters_that_cannot_take_the_dtype_of_their_gradients_are_refused() -> None:
    run_fit(PartlyInBf16(), SHARDED, loader(4, 2))
    with refuses(ValueError, "2 parameters are trained in torch.bfloat16"):
        run_fit(PartlyInBf16(), {}, loader(4, 2))


def _read_state(optimizer: Any) -> int:
    assert len(optimizer.state_dict()["state"]) == len(optimizer.param_groups[0]["params"])
    return len(optimizer.user.state)


@on_ranks(1)
def test_reading_the_state_changes_nothing() -> None:
    kept = []
    read = pl.callbacks.LambdaCallback(on_train_end=lambda trainer, _: kept.append(_read_state(trainer.optimizers[0])))
    run_fit(StagedNet(), {}, loader(4, 2), callbacks=[read])
    assert kept == [0]
