# SPDX-License-Identifier: Apache-2.0
"""A plain module and a pipelined one, small enough that a whole ``fit`` takes a tenth of a second.

* :class:`PlainNet` is a LightningModule that knows nothing of this package.
* :class:`StagedNet` is an :class:`~lightning_mcore.MCoreModule` of four layers that may be cut into stages. Its weights
  depend on the place of a layer in the model alone, so every layout starts from the same model.

Both learn the same :class:`Samples` in the same steps, log the same values and keep what they see (:class:`Seen`).
The helpers at the end run them on ranks that are already there, as functions of ``run_ranks``.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric
from torchmetrics.aggregation import CatMetric, MeanMetric

from lightning_mcore import MCoreModule, MCoreStrategy
from lightning_mcore.parallel.pipeline import Pipeline

NUM_LAYERS = 4
WIDTH = 8
FEATURES = 4
SEQ_LENGTH = 4

Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2)

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VP2: dict[str, Any] = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2: dict[str, Any] = {"context_parallel_size": 2}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAPPED: dict[str, Any] = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}


class Samples(Dataset[Batch]):
    """The first ``size`` of 128 samples: ``x`` [s, f], ``y`` [s, 1] and the sample's own ``index``."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(128, SEQ_LENGTH, FEATURES, generator=generator)[:size]
        self.y = self.x.sum(-1, keepdim=True).tanh()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "y": self.y[index], "index": torch.tensor(index)}


def loader(size: int, batch_size: int, **arguments: Any) -> DataLoader[Batch]:
    """Return a DataLoader over the first ``size`` samples."""
    return DataLoader(Samples(size), batch_size=batch_size, **arguments)


def texts(rows: int, length: int, vocab_size: int, batch_size: int = 1, first: int = 0) -> DataLoader[Batch]:
    """Return a DataLoader over random rows of tokens, each with the next one as its label; ``first`` is the least."""
    drawn = torch.randint(first, vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    samples: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in drawn]
    return DataLoader(samples, batch_size=batch_size)


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay matrices and not vectors, at different rates."""
    parameters = list(parameters)
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == wanted] for wanted in (True, False))
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 0.05}], lr=0.01
    )


@dataclass
class Seen:
    """What a module saw on this rank.

    Attributes:
        batches: Indices of the samples of each training batch, if it has them.
        losses: For each optimizer step, the loss of its ``training_step``.
        gradients: For each optimizer step, every gradient that hooks see, flat; empty where they see none.
        logged: For each optimizer step, what ``train_loss`` then is in ``callback_metrics``.
        grad_norms: For each optimizer step, the norm that Megatron's optimizer measured.
    """

    batches: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)


class Watch(pl.Callback):
    """Fills in :class:`Seen` from the hooks of a callback, so that the module stays as a user wrote it."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, *_: Any) -> None:
        if isinstance(batch, dict) and "index" in batch:
            self.seen.batches.append(batch["index"].tolist())

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        trained = (p for p in pl_module.parameters() if p.requires_grad)  # with toggle_optimizer, this optimizer's
        gradients = [p.grad.flatten().clone() for p in trained if p.grad is not None]
        self.seen.gradients.append(torch.cat(gradients) if gradients else torch.zeros(0))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if outputs:
            self.seen.losses.append(float(outputs["loss"]))
        if "train_loss" in trainer.callback_metrics:
            self.seen.logged.append(float(trainer.callback_metrics["train_loss"]))
        self.seen.grad_norms.append(getattr(trainer.optimizers[0], "grad_norm", None))


class PlainNet(pl.LightningModule):
    """Two linear layers and nothing about ranks.

    Args:
        make_optimizer: Makes the optimizer from the parameters.
    """

    def __init__(self, make_optimizer: MakeOptimizer = ADAMW) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        fill(self.net, seed=1)
        self.make_optimizer = make_optimizer
        self.error = MeanMetric()
        self.indices = CatMetric()

    def predictions(self, batch: Batch) -> Tensor:
        """Return ``[b, s, 1]``."""
        return self.net(batch["x"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.predictions(batch).float(), batch["y"].float())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate("test", batch)

    def evaluate(self, name: str, batch: Batch) -> None:
        """Log the mean over samples as Lightning and as torchmetrics count it, and which samples they were."""
        errors = (self.predictions(batch).float() - batch["y"]).square().mean((1, 2))
        self.log(f"{name}_loss", errors.mean(), sync_dist=True)
        self.error.update(errors)
        self.indices.update(batch["index"])
        self.log(f"{name}_metric", self.error)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"index": batch["index"], "y": self.predictions(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Stage(MegatronModule):
    """A chunk of the toy model: its share of the layers, with embedding and head where the model begins and ends."""

    def __init__(
        self,
        config: TransformerConfig,
        layers: Iterable[int],
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config)
        self.vp_stage = vp_stage
        self.pre_process = pre_process
        self.post_process = post_process
        self.share_embeddings_and_output_weights = False
        self.model_type = ModelType.encoder_or_decoder
        self.input_tensor: Tensor | None = None
        if pre_process:
            self.embedding = fill(nn.Linear(FEATURES, WIDTH), seed=100)
        self.layers = nn.ModuleDict({str(layer): fill(nn.Linear(WIDTH, WIDTH), seed=layer) for layer in layers})
        if post_process:
            self.head = fill(nn.Linear(WIDTH, 1), seed=200)
        self.to(config.params_dtype)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the output of the stage before."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[b, s, 1]`` at the end of the model, else ``[s, b, h]``."""
        hidden = self.embedding(x).transpose(0, 1).contiguous() if self.pre_process else self.input_tensor
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden).transpose(0, 1) if self.post_process else hidden


class StagedNet(MCoreModule):
    """The pipelined toy model.

    Args:
        make_optimizer: Makes the optimizer from the parameters.
        config: More fields of its TransformerConfig.
    """

    def __init__(self, make_optimizer: MakeOptimizer = ADAMW, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.more_config = config or {}
        self.model: Pipeline | None = None
        self.error = MeanMetric()
        self.indices = CatMetric()
        self.times_configured = 0

    def configure_model(self) -> None:
        self.times_configured += 1
        fields = {"num_layers": NUM_LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4}
        self.config = TransformerConfig(**fields, **self.megatron_fields(), **self.more_config)
        self.model = self.pipeline(self.build_chunk)

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """Build the chunk of this stage; chunks go round the stages."""
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        chunks = stages * (self.config.virtual_pipeline_model_parallel_size or 1)
        chunk = (vp_stage or 0) * stages + parallel_state.get_pipeline_model_parallel_rank()
        share = NUM_LAYERS // chunks
        return Stage(self.config, range(chunk * share, (chunk + 1) * share), pre_process, post_process, vp_stage)

    def predictions(self, batch: Batch) -> Tensor:
        """Return ``[b, s, 1]``."""
        assert self.model is not None
        return self.model(batch["x"])

    training_step = PlainNet.training_step
    validation_step = PlainNet.validation_step
    test_step = PlainNet.test_step
    evaluate = PlainNet.evaluate
    predict_step = PlainNet.predict_step
    configure_optimizers = PlainNet.configure_optimizers


def fill(module: nn.Module, seed: int) -> nn.Module:
    """Give a module weights that depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    return module


class Memory(Logger):
    """Keeps what Lightning sends to loggers, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Lightning hands over the module's own."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({name: float(value) for name, value in metrics.items()})

    def values(self, name: str) -> list[float]:
        """Return every value that was logged under a name, in order."""
        return [row[name] for row in self.rows if name in row]


def world_size() -> int:
    """Return the number of ranks of this run, whether the default process group is open yet or not."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def make_trainer(strategy: Any, **arguments: Any) -> pl.Trainer:
    """Return a quiet Trainer over the CPU ranks that are already running, one epoch unless ``arguments`` say more.

    Args:
        strategy: As the Trainer takes it; a dict stands for the arguments of :class:`MCoreStrategy`.
        arguments: More arguments of the Trainer.
    """
    warnings.filterwarnings("ignore", module="lightning")
    logger = logging.getLogger("lightning.pytorch")
    if logger.level != logging.ERROR:  # setLevel clears a cache of each of two thousand loggers
        logger.setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size(),
        "strategy": MCoreStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        "plugins": [LightningEnvironment()],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    if "max_steps" not in arguments:
        quiet["max_epochs"] = 1
    return pl.Trainer(**{**quiet, **arguments})


def run_fit(module: pl.LightningModule, strategy: Any, *data: Any, ckpt_path: Any = None, **arguments: Any) -> Seen:
    """Fit a module and return what it saw.

    Args:
        module: What to train.
        strategy: As :func:`make_trainer`.
        data: The training and validation dataloaders.
        ckpt_path: What to resume from.
        arguments: More arguments of the Trainer.
    """
    watch = Watch()
    callbacks = [watch, *arguments.pop("callbacks", [])]
    trainer = make_trainer(strategy, callbacks=callbacks, **arguments)
    trainer.fit(module, *data, ckpt_path=ckpt_path)
    return watch.seen


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the parameters on this rank, by the name that they have in the whole model."""
    model = getattr(module, "model", None)
    parts = model.chunks if isinstance(model, Pipeline) else [module]
    return {name: p.detach().clone() for part in parts for name, p in part.named_parameters()}


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return the torchmetrics objects of a module."""
    return [child for child in module.modules() if isinstance(child, Metric)]
