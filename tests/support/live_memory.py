# SPDX-License-Identifier: Apache-2.0
"""How much memory a run really takes on each rank, by kind: what ``lightning-mcore plan`` is compared with.

A tiny ``MCoreGPT`` is trained for one step on ranks that are already there. State is measured as the storages of
parameters, gradient buffers and optimizer; activations as the most that PyTorch's allocator gave out between the start
of the first microbatch and the step of the optimizer.
"""

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mcore import MCoreEmbedding, MCoreGPT, MCorePreference, MCoreReranker, MCoreVisionGPT
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.vision import Vision
from lightning_mcore.optimizer.parts import optimizer_parts
from lightning_mcore.planning.rules import check_run
from lightning_mcore.planning.state_memory import RankMemory, rank_memory
from lightning_mcore.strategy.precision import MCorePrecision
from tests.support.toy import make_trainer
from tests.support.vision_models import CONFIGS, IMAGE_TOKEN, VIDEO_TOKEN, vision_batch, vision_config


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run to measure and to plan.

    Args:
        world: Ranks.
        strategy: Arguments of ``MCoreStrategy``.
        precision: As in ``MCorePrecision``.
        model: Arguments of ``MCoreGPT``, or of ``MCoreVisionGPT`` without ``vision``.
        rows: Rows of a microbatch.
        microbatches: Microbatches of a step.
        packed: Whether a row is four sequences.
        family: Of a model that sees; its tower is added to the model's arguments.
        images: Sizes in patches of the images of each row.
    """

    world: int
    strategy: dict[str, Any] = field(default_factory=dict)
    precision: str = "32-true"
    model: dict[str, Any]
    rows: int = 1
    microbatches: int = 1
    packed: bool = False
    family: str | None = None
    images: tuple[tuple[int, int, int], ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the module."""
        if self.family is None:
            return self.model
        width = {"embed_dim": 64, "mlp_ratio": 4, "hidden_size": 64, "intermediate_size": 256}
        if self.family != "qwen2_vl":
            del width["embed_dim"], width["mlp_ratio"]
        config = vision_config(self.family, vision_config={**CONFIGS[self.family]["vision_config"], **width})
        vision = Vision(self.family, config.vision_config.to_dict(), IMAGE_TOKEN, VIDEO_TOKEN, (2, 1, 1))
        return {**self.model, "vision": vision.plain()}

    @property
    def layout(self) -> ParallelLayout:
        names = ParallelLayout.__dataclass_fields__
        return ParallelLayout(**{name: value for name, value in self.strategy.items() if name in names})

    def planned(self, rank: int) -> RankMemory:
        """Return what the plan says of a rank."""
        tokens = sum(height * width // 4 for _, height, width in self.images) or None
        settings = RunSettings(
            strategy=self.strategy,
            precision={"precision": self.precision},
            model=self.arguments,
            trainer={"accelerator": "cpu", "accumulate_grad_batches": self.microbatches, "max_steps": 1},
            data={"batch_size": self.rows, "packing": self.packed},
            image_tokens=tokens,
        )
        run = check_run(settings, self.world)
        assert run.errors == ()
        return rank_memory(run.sizes, self.layout.coordinates(rank, self.world).pipeline_model_parallel_rank)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens that look random, each one sequence or four."""

    def __init__(self, size: int, length: int, vocab_size: int, packed: bool, pairs: bool) -> None:
        self.pairs = pairs
        self.offsets = torch.arange(5) * (length // 4) if packed else None
        self.text = torch.randint(vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {"tokens": self.text[index, :-1], "labels": self.text[index, 1:]}
        row["lengths"] = torch.tensor(self.text.size(1) - 1)
        if self.pairs:  # neighbours are the two answers, whose last token has no label
            row |= {"sample_ids": torch.tensor(0), "relevance": torch.tensor(float(index % 2))}
            row["loss_mask"] = (torch.arange(self.text.size(1) - 1) < self.text.size(1) - 2).float()
        if self.offsets is not None:
            row |= {"cu_seqlens": self.offsets, "cu_seqlens_padded": self.offsets}
        return row


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operators return, from then until it is given back, whoever does that.

    PyTorch's profiler would not do: it does not see what the threads of a process group give back. Each piece of memory
    is rounded up to a multiple of ``unit`` bytes.
    """

    def __init__(self, unit: int = 1) -> None:
        super().__init__()
        self.unit = unit
        self.now = self.peak = 0
        there = (tensor.untyped_storage() for tensor in gc.get_objects() if type(tensor) in (Tensor, Parameter))
        self._seen = WeakIdKeyDictionary(dict.fromkeys(there, True))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._seen:
                self._count(tensor.untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._seen[storage] = True
        size = -(-storage.nbytes() // self.unit) * self.unit
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._give_back, size)

    def _give_back(self, size: int) -> None:
        self.now -= size


class Measure(pl.Callback):
    """Measures a step."""

    def __init__(self) -> None:
        self.live: LiveBytes | None = None
        self.found: dict[str, int] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.live is None:
            self.live = LiveBytes()
            self.live.__enter__()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.found["activations"] = self.live.peak

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        chunks: Any = trainer.strategy._chunks  # type: ignore[attr-defined]
        buffers = [buffer for chunk in chunks.ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        parameters = [parameter for chunk in chunks.ddp for parameter in chunk.parameters()]
        weights = storages(parameters)
        state: list[Tensor] = []
        for part in optimizer_parts(trainer.optimizers[0].megatron):  # type: ignore[attr-defined]
            if part.is_stub_optimizer:
                continue
            state += [value for values in part.optimizer.state.values() for value in values.values()]
            state += [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        state = [
            value for value in state if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in weights
        ]
        self.found["weights"] = sum(weights.values())
        self.found["gradients"] = sum(storages(buffer.grad_data for buffer in buffers).values())
        self.found["optimizer"] = sum(storages(state).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each piece of memory that tensors lie in."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def measured(runs: dict[str, LiveRun]) -> dict[str, dict[str, int]]:
    """Train each run for one step on these ranks, and return what this rank holds."""
    torch.set_num_threads(1)
    return {name: _measure(run) for name, run in runs.items()}


def _measure(run: LiveRun) -> dict[str, int]:
    pl.seed_everything(1, verbose=False)
    measure = Measure()
    scale = {"initial_loss_scale": 1.0} if run.precision.startswith("16") else {}  # else the first step is skipped
    trainer = make_trainer(
        run.strategy,
        plugins=[LightningEnvironment(), MCorePrecision(run.precision, **scale)],  # type: ignore[arg-type]
        max_steps=1,
        accumulate_grad_batches=run.microbatches,
        callbacks=[measure],
        use_distributed_sampler=run.family is None,
    )
    trainer.fit(*parts_of(run))
    return measure.found


def parts_of(run: LiveRun, steps: int = 1) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """Return the module of a run, and data for a number of steps."""
    kinds = {"preference": MCorePreference, "embedding": MCoreEmbedding, "reranker": MCoreReranker}
    of_text = next((kind for name, kind in kinds.items() if name in run.model), MCoreGPT)
    kind = of_text if run.family is None else MCoreVisionGPT
    microbatches = steps * run.microbatches
    if run.family is not None:
        sizes: list[Any] = [[run.images] * run.rows, [[]] * run.rows]
        batches = [vision_batch(run.family, run.model["seq_length"], *sizes, seed) for seed in range(microbatches)]
        return kind(**run.arguments), DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    count = run.world * run.rows * microbatches
    rows = Rows(count, run.model["seq_length"], run.model["vocab_size"], run.packed, of_text is not MCoreGPT)
    return kind(**run.arguments), DataLoader(rows, batch_size=run.rows)
