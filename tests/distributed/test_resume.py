# SPDX-License-Identifier: Apache-2.0
"""Exact resume: a run that goes on in a new process has the losses that the whole run had, to the last digit.

Each :class:`Case` is trained once as a whole, taking checkpoints at all kinds of moments on the way, and goes on from
each of them in other processes. What is compared is text: of every batch its epoch, its number, its samples; of every
step the loss as Python prints it.
"""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
    get_worker_info,
)

from lightning_mcore import MCoreCheckpointIO, MCoreGPT, Recipe
from lightning_mcore.checkpoint.files import record_file
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.strategy import checkpointing, resume
from lightning_mcore.strategy.precision import MCorePrecision
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.toy import FEATURES, PP2, SHARDED, WIDTH, Batch, PlainNet, Samples, fill, make_trainer

pytestmark = pytest.mark.distributed

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}


# What is trained


class Noisy(Samples):
    """Augments a sample with numbers of every generator."""

    def __getitem__(self, index: int) -> Batch:
        noise = random.random() + numpy.random.rand() + float(torch.rand(()))
        return {**super().__getitem__(index), "x": self.x[index] + 0.1 * noise}


class Dropping(PlainNet):
    """A plain module with dropout that validates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, 1))
        fill(self.net, seed=1)
        self.register_buffer("scale", torch.ones(()))

    def on_train_epoch_start(self) -> None:
        self.scale.fill_(1 + 0.1 * random.random())  # what hooks draw counts too

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.predictions(batch).mean() * torch.rand(()))


class Counting(Dropping):
    """Asks for the length of the run while it makes its optimizer, when the loops are not restored yet."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 1
        return super().configure_optimizers()


class Falling(Dropping):
    """Lowers its learning rate whenever the validation has not become better."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.predictions(batch).mean() * 0 + self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def text(size: int) -> list[dict[str, Tensor]]:
    """Return sentences of 8 tokens; the first says which it is."""
    tokens = torch.randint(32, (size, 9), generator=torch.Generator().manual_seed(1))
    return [{"tokens": row[:-1], "labels": row[1:], "index": torch.tensor(index)} for index, row in enumerate(tokens)]


class Gpt(MCoreGPT):
    """A small GPT with dropout; ``experts`` makes it a mixture."""

    def __init__(self, experts: bool = False) -> None:
        sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
        sizes |= {"hidden_dropout": 0.2, "attention_dropout": 0.2}
        if experts:
            sizes |= {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
        super().__init__(
            vocab_size=32, seq_length=8, transformer=sizes, recipe=Recipe(learning_rate=1e-2, min_learning_rate=1e-2)
        )


# How it is trained


class Watch(pl.Callback):
    """Writes down every batch and every step."""

    def __init__(self) -> None:
        self.batches: list[str] = []
        self.losses: list[str] = []
        self.batches_at_step = 0
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        parts = [batch] if "index" in batch else [part for part in batch.values() if part is not None]
        samples = [index for part in parts for index in part["index"].tolist()]
        self.batches.append(f"{trainer.current_epoch} {batch_idx} {samples}")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step != self._step:
            self._step, self.batches_at_step = trainer.global_step, len(self.batches)
            of_all = trainer.fit_loop.epoch_loop.total_batch_idx, trainer.fit_loop.epoch_loop._batches_that_stepped
            scale = getattr(trainer.optimizers[0], "loss_scale", None)
            self.losses.append(f"{self._step} {of_all} {scale} {float(outputs['loss'])!r}")


class Save(pl.Callback):
    """Takes checkpoints: ``"start 3"`` is before a batch of the whole run, ``"batch 3"``, ``"epoch 1"`` etc. after.

    Args:
        folder: Where to.
        moments: When.
        watch: What has been seen. Of each checkpoint the batches and the steps are kept that it has to go on after:
            batches since the last step are read again.
    """

    def __init__(self, folder: str, moments: tuple[str, ...], watch: Watch) -> None:
        self.folder = folder
        self.moments = moments
        self.watch = watch
        self.places: dict[str, tuple[int, int]] = {}
        self._validations = 0

    def save(self, trainer: pl.Trainer, moment: str) -> None:
        if moment in self.moments:
            self.places[moment] = self.watch.batches_at_step, len(self.watch.losses)
            trainer.save_checkpoint(f"{self.folder}/{moment}.ckpt")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, f"start {len(self.watch.batches)}")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, f"batch {len(self.watch.batches)}")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, f"epoch {trainer.current_epoch}")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._validations += 1
            self.save(trainer, f"validation {self._validations}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run to interrupt.

    Args:
        module: Makes the module.
        data: Makes the training loaders.
        strategy: Arguments of the strategy.
        world_size: Ranks.
        validates: Whether there is a validation loader.
        moments: When checkpoints are taken.
        trainer: More arguments of the trainer.
        stop: Optimizer steps after which another first run ends, with a checkpoint of its own.
        precision: Makes the precision plugin.
        windows: Batches in a step from each epoch on, for Lightning's scheduler; None for a constant number.
    """

    module: Callable[[], Any]
    data: Callable[[], Any]
    strategy: Any = field(default_factory=dict)
    world_size: int = 2
    validates: bool = False
    moments: tuple[str, ...] = ()
    trainer: Any = field(default_factory=dict)
    stop: int | None = None
    precision: Callable[[], MCorePrecision] | None = None
    windows: dict[int, int] | None = None


@dataclass(frozen=True)
class Run:
    """What a run saw on one rank."""

    batches: list[str]
    losses: list[str]
    places: dict[str, tuple[int, int]]


def train(case: Case, folder: str, moments: tuple[str, ...] = (), resume: str | None = None, **arguments: Any) -> Run:
    """Train a case on this rank, from a checkpoint if there is one."""
    pl.seed_everything(7 if resume is None else 99, workers=True, verbose=False)  # what a resumed run draws is restored
    watch = Watch()
    save = Save(folder, moments, watch)
    strategy = dict(case.strategy)
    if case.precision is not None:
        strategy["precision_plugin"] = case.precision()
    callbacks: list[pl.Callback] = [watch, save]
    if case.windows is not None:
        callbacks.append(GradientAccumulationScheduler(dict(case.windows)))
    trainer = make_trainer(strategy, callbacks=callbacks, **(dict(case.trainer) | arguments))
    validation = [DataLoader(Samples(4), batch_size=2)] if case.validates else []
    trainer.fit(case.module(), case.data(), *validation, ckpt_path=resume)
    save.save(trainer, "end")
    return Run(watch.batches, watch.losses, save.places)


def train_whole(cases: dict[str, Case], folder: str) -> dict[str, Run]:
    """Train every case as a whole, and up to where it stops."""
    whole = {}
    for name, case in cases.items():
        whole[name] = train(case, f"{folder}/{name}", case.moments)
        if case.stop is not None:
            stopped = train(case, f"{folder}/{name}", ("end",), max_steps=case.stop)
            whole[name].places["end"] = stopped.places["end"]
    if dist.get_rank() == 0 and "plain-limited" in cases:
        as_version_1(Path(folder, "plain-limited", "batch 5.ckpt"))
    return whole


def as_version_1(checkpoint: Path) -> None:
    """Change a checkpoint to format version 1, which had the states of all ranks in one file."""
    io = MCoreCheckpointIO()
    manifest, contents = json.loads((checkpoint / "checkpoint.json").read_text()), io.read_contents(checkpoint)
    torch.save([io.load_rank_state(checkpoint, contents, rank) for rank in range(2)], checkpoint / "ranks.pt")
    state = torch.load(checkpoint / "lightning.pt", weights_only=True)
    del state["lightning_mcore/coordinates"]
    torch.save(state, checkpoint / "lightning.pt")
    files = {name: asdict(record_file(checkpoint / name)) for name in ("lightning.pt", "ranks.pt")}
    manifest |= {"format_version": 1, "files": manifest["files"] | files}
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))


def go_on(cases: dict[str, Case], folder: str) -> dict[str, dict[str, Run]]:
    """Go on from every checkpoint of every case."""
    return {
        name: {
            moment: train(case, folder, resume=f"{folder}/{name}/{moment}.ckpt")
            for moment in (*case.moments, *(("end",) if case.stop else ()))
        }
        for name, case in cases.items()
    }


def sentences(size: int, batch_size: int, **arguments: Any) -> DataLoader[Any]:
    """Return a loader over sentences."""
    return DataLoader(text(size), batch_size=batch_size, shuffle=True, **arguments)  # type: ignore[arg-type]


def noisy(size: int, batch_size: int, **arguments: Any) -> DataLoader[Batch]:
    """Return a loader over augmented samples."""
    return DataLoader(Noisy(size), batch_size=batch_size, **arguments)


def shuffled(size: int, batch_size: int, **arguments: Any) -> DataLoader[Batch]:
    """Return a loader whose order comes from torch's own generator."""
    return DataLoader(Samples(size), batch_size=batch_size, sampler=RandomSampler(Samples(size)), **arguments)


def generated(size: int, batch_size: int, **arguments: Any) -> DataLoader[Batch]:
    """Return a loader whose order comes from a generator of its own."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Samples(size), batch_size=batch_size, shuffle=True, generator=generator, **arguments)


class Shuffles:
    """A batch sampler of the user's own: batches of one to three, in an order that python draws."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(start, min(start + 1 + start % 3, self.size))) for start in range(0, self.size, 3)]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return -(-self.size // 3)


class Stream(IterableDataset[Batch]):
    """Samples without a length, in an order that is drawn when they are first asked for; parted among workers."""

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        samples = Samples(18)
        order = torch.randperm(18).tolist() if info is None else range(info.id, 18, info.num_workers)
        return (samples[index] for index in order)


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return 18


class Remembering:
    """A loader that keeps its own state, another one on each rank."""

    def __init__(self) -> None:
        self.done = 0
        self.epochs = 0
        self.restored = False

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Batch]:
        start = self.done if self.restored else 0
        self.epochs += not self.restored
        self.restored = False
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epochs)).tolist()
        rank = dist.get_rank()
        for number in range(start, 6):
            self.done = number + 1
            index = 12 * rank + order[2 * number]
            yield default_collate([Samples(24)[index], Samples(24)[12 * rank + order[2 * number + 1]]])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "epochs": self.epochs, "rank": dist.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == dist.get_rank()
        self.done, self.epochs, self.restored = state["done"], state["epochs"], True


class Hasty(Remembering):
    """Has no right state to return between loading one and the first batch, as LitData's loader."""

    def state_dict(self) -> dict[str, Any]:
        if self.restored:
            self.epochs = 1
        return super().state_dict()


class RememberingWithoutLength(Remembering):
    """Lightning reads it one batch ahead, to know which batch is the last."""

    __len__ = None  # type: ignore[assignment]


class Continuing(Remembering):
    """Begins an epoch where the one before was cut off, as a stream does."""

    def __iter__(self) -> Iterator[Batch]:
        samples, rank = Samples(48), dist.get_rank()
        for _ in range(6):
            self.done += 1
            yield default_collate([samples[24 * rank + (2 * self.done + number) % 24] for number in (0, 1)])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class ContinuingWithoutLength(Continuing):
    """Lightning reads it one batch ahead."""

    __len__ = None  # type: ignore[assignment]


def continuing() -> CombinedLoader:
    """Return two loaders that go on where they were cut off, side by side."""
    return CombinedLoader({"long": Continuing(), "short": Continuing()}, "min_size")


def torchdata(size: int, **arguments: Any) -> Any:
    """Return a loader that makes its iterator, and draws its order, when its state is asked for."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Samples(size), batch_size=2, shuffle=True, **arguments)


class Numbered(IterableDataset[Batch]):
    """Samples without a length, in order."""

    def __iter__(self) -> Iterator[Batch]:
        return map(Samples(12).__getitem__, range(12))


def torchdata_stream() -> Any:
    """Return a loader without a length that makes its iterator when its state is asked for."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbered(), batch_size=2)


class Pairs(Dropping):
    """Learns from two loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [super(Pairs, self).training_step(part, batch_idx) for part in batch.values() if part is not None]
        return torch.stack(losses).mean()


def pairs(mode: Any) -> CombinedLoader:
    """Return two loaders of different lengths, side by side."""
    return CombinedLoader({"long": noisy(20, 2, shuffle=True), "short": noisy(10, 2, shuffle=True)}, mode)


def mixed() -> CombinedLoader:
    """Return loaders that go on in three ways, side by side."""
    return CombinedLoader({"own": Remembering(), "data": noisy(12, 2, shuffle=True), "read": Reader()}, "min_size")


def beside() -> CombinedLoader:
    """Return a loader that keeps its own state, beside one that does not."""
    return CombinedLoader({"own": Remembering(), "data": noisy(24, 2, shuffle=True)}, "min_size")


class CountingPairs(Pairs, Counting):
    """Learns from two loaders, and asks for the length of the run early."""


def own_batches(size: int) -> DataLoader[Batch]:
    """Return a loader with a batch sampler of the user's own."""
    return DataLoader(Noisy(size), batch_sampler=Shuffles(size))  # type: ignore[arg-type]


def stream(dataset: Callable[[], Any], **arguments: Any) -> DataLoader[Batch]:
    """Return a loader over a stream."""
    return DataLoader(dataset(), batch_size=4, **arguments)


class Reader:
    """Anything that can be iterated, in the place of a loader."""

    def __iter__(self) -> Iterator[Batch]:
        return (default_collate([Samples(12)[index], Samples(12)[index + 1]]) for index in range(0, 12, 2))

    def __len__(self) -> int:
        return 6


HALF = partial(MCorePrecision, "16-mixed", initial_loss_scale=2.0**22, loss_scale_window=2)
OWN = {"use_distributed_sampler": False}
CASES: dict[str, Case] = {
    "plain": Case(  # 6 batches in an epoch, the last one short; a validation after every third
        module=Dropping,
        data=partial(noisy, 22, 2, shuffle=True),
        validates=True,
        moments=("batch 2", "batch 3", "batch 6", "batch 8", "epoch 0", "validation 1", "validation 2", "validation 3"),
        trainer={"max_epochs": 3, "val_check_interval": 3},
        stop=4,
    ),
    "plain-windows": Case(  # two steps of 3 batches and one of 1; checkpoints also between steps
        module=Dropping,
        data=partial(noisy, 28, 2, shuffle=True),
        validates=True,
        moments=("batch 2", "batch 3", "batch 5", "batch 7", "batch 9", "batch 12", "epoch 0", "validation 1"),
        trainer={"max_epochs": 2, "val_check_interval": 2, "accumulate_grad_batches": 3},
        stop=2,
    ),
    "plain-scheduled": Case(  # Lightning's scheduler acts only at the start of an epoch
        module=Dropping,
        data=partial(noisy, 28, 2, shuffle=True),
        moments=("batch 2", "batch 8", "batch 10", "batch 12", "epoch 0", "batch 17"),
        trainer={"max_epochs": 3},
        windows={0: 1, 1: 3, 2: 2},
    ),
    "gpt-scheduled": Case(
        module=Gpt,
        data=partial(sentences, 14, 2),
        strategy=PP2,
        moments=("batch 2", "batch 10", "epoch 0"),
        trainer={"max_epochs": 2},
        windows={0: 1, 1: 3},
    ),
    "plain-steps": Case(  # max_steps makes Lightning restart in another way
        module=Dropping,
        data=partial(noisy, 16, 2, shuffle=True),
        validates=True,
        moments=("batch 3", "batch 4", "batch 6", "epoch 0", "epoch 1"),
        trainer={"max_steps": 11},
        stop=4,
    ),
    "plateau": Case(
        module=Falling,
        data=partial(noisy, 12, 2, shuffle=True),
        validates=True,
        moments=("batch 4", "epoch 0", "epoch 1", "validation 1", "validation 2"),
        trainer={"max_epochs": 4},
    ),
    "plain-limited": Case(
        module=Dropping,
        data=partial(noisy, 64, 2, shuffle=True, drop_last=True),
        moments=("batch 2", "batch 5", "batch 7", "epoch 0"),
        trainer={"max_epochs": 2, "limit_train_batches": 5},
        strategy=SHARDED,
    ),
    "workers": Case(
        module=Dropping,
        data=partial(shuffled, 12, 2, num_workers=2),
        moments=("batch 2", "batch 6", "batch 8", "epoch 0"),
        trainer={"max_epochs": 2, **OWN},
        world_size=1,
        stop=2,
    ),
    "workers-stay": Case(
        module=Counting,
        data=partial(generated, 12, 2, num_workers=2, persistent_workers=True),
        moments=("batch 2", "batch 8", "epoch 0"),
        trainer={"max_epochs": 3, **OWN},
        world_size=1,
    ),
    "reloaded": Case(  # Lightning loads the data twice before a resumed run goes on
        module=Counting,
        data=partial(noisy, 16, 2),
        moments=("batch 6", "epoch 0", "batch 2"),
        trainer={"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
    ),
    "reloaded-again": Case(  # the same loader
        module=Counting,
        data=partial(generated, 12, 2, num_workers=1),
        moments=("batch 2", "batch 8", "epoch 0"),
        trainer={"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, **OWN},
        world_size=1,
    ),
    "random-sampler": Case(
        module=Dropping,
        data=partial(shuffled, 12, 2),
        validates=True,
        moments=("batch 2", "batch 8", "epoch 0"),
        trainer={"max_epochs": 2, **OWN},
        world_size=1,
    ),
    "batch-sampler": Case(
        module=Dropping,
        data=partial(own_batches, 18),
        moments=("batch 2", "batch 8", "epoch 0"),
        trainer={"max_epochs": 2, **OWN},
        world_size=1,
    ),
    "stream": Case(
        module=Dropping,
        data=partial(stream, Stream),
        moments=("batch 2", "batch 3", "batch 8", "epoch 0"),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 2},
        world_size=1,
        stop=2,
    ),
    "stream-workers": Case(
        module=Dropping,
        data=partial(stream, SizedStream, num_workers=2),
        moments=("batch 2", "batch 8", "epoch 0"),
        trainer={"max_epochs": 2},
        world_size=1,
    ),
    "iterable": Case(
        module=Dropping,
        data=Reader,
        moments=("batch 2", "batch 8", "epoch 0"),
        trainer={"max_epochs": 2},
        world_size=1,
    ),
    "cycle": Case(
        module=Pairs,
        data=partial(pairs, "max_size_cycle"),
        moments=("batch 2", "batch 5", "batch 7", "epoch 0"),
        trainer={"max_epochs": 2, **OWN},
        world_size=1,
    ),
    "longest": Case(
        module=Pairs,
        data=partial(pairs, "max_size"),
        moments=("batch 2", "batch 7", "epoch 0"),
        trainer={"max_epochs": 2},
        world_size=1,
    ),
    "mixed": Case(
        module=Pairs,
        data=mixed,
        moments=("batch 2", "batch 5"),
        trainer={"max_epochs": 1},
        world_size=1,
    ),
    "stateful": Case(
        module=Dropping,
        data=Remembering,
        moments=("batch 2", "batch 6", "epoch 0", "batch 8"),
        trainer={"max_epochs": 2},
    ),
    "stateful-hasty": Case(
        module=Dropping,
        data=Hasty,
        moments=("batch 2", "batch 8"),
        trainer={"max_epochs": 2},
    ),
    "stateful-counted": Case(
        module=Counting,
        data=Remembering,
        moments=("batch 2", "batch 6", "epoch 0", "batch 8"),
        trainer={"max_epochs": 2},
    ),
    "stateful-unsized": Case(
        module=Dropping,
        data=RememberingWithoutLength,
        moments=("batch 2", "batch 6", "epoch 0", "batch 8"),
        trainer={"max_epochs": 2},
    ),
    "stateful-limited": Case(
        module=Dropping,
        data=Remembering,
        validates=True,
        moments=("batch 2", "batch 4", "start 4", "epoch 0", "batch 6", "validation 2"),
        trainer={"max_epochs": 3, "limit_train_batches": 4, "val_check_interval": 2},
    ),
    "stateful-unsized-limited": Case(
        module=Dropping,
        data=RememberingWithoutLength,
        validates=True,
        moments=("batch 2", "batch 4", "epoch 0", "batch 6", "validation 2"),
        trainer={"max_epochs": 3, "limit_train_batches": 4, "val_check_interval": 2},
    ),
    "stateful-continuing-limited": Case(
        module=Dropping,
        data=Continuing,
        moments=("start 1", "batch 2", "batch 4", "epoch 0", "start 5", "batch 6"),
        trainer={"max_epochs": 3, "limit_train_batches": 4},
    ),
    "stateful-continuing-windows": Case(
        module=Dropping,
        data=Continuing,
        moments=("batch 2", "start 3", "epoch 0"),
        trainer={"max_epochs": 3, "limit_train_batches": 4, "accumulate_grad_batches": 4},
    ),
    "torchdata-windows": Case(
        module=Dropping,
        data=partial(torchdata, 16),
        moments=("batch 2", "batch 6", "epoch 0", "start 9", "batch 10", "start 11"),
        trainer={"max_epochs": 3, "accumulate_grad_batches": 4, **OWN},
        world_size=1,
    ),
    "stateful-continuing-beside": Case(
        module=Pairs,
        data=continuing,
        moments=("batch 1", "epoch 0"),
        trainer={"max_epochs": 3, "limit_train_batches": 4},
        world_size=1,
    ),
    "stateful-beside-counted": Case(
        module=CountingPairs,
        data=beside,
        moments=("batch 2", "epoch 0", "batch 8"),
        trainer={"max_epochs": 3},
    ),
    "stateful-validated": Case(
        module=Dropping,
        data=Remembering,
        validates=True,
        moments=("batch 6", "validation 1", "validation 2", "epoch 0"),
        trainer={"max_epochs": 2, "val_check_interval": 3},
    ),
    "stateful-windows": Case(
        module=Dropping,
        data=Remembering,
        moments=("batch 2", "batch 3", "batch 4", "batch 5", "start 5", "batch 8", "batch 10"),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 3},
    ),
    "stateful-unsized-windows": Case(
        module=Dropping,
        data=RememberingWithoutLength,
        moments=("batch 2", "batch 3", "batch 4", "batch 5", "start 5", "batch 8", "batch 10"),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 3},
    ),
    "stateful-start": Case(
        module=Dropping,
        data=Remembering,
        moments=("start 1", "start 3", "start 6", "start 7", "start 9"),
        trainer={"max_epochs": 2},
    ),
    "stateful-unsized-start": Case(
        module=Dropping,
        data=RememberingWithoutLength,
        moments=("start 1", "start 3", "start 6", "start 7", "batch 7"),
        trainer={"max_epochs": 2},
    ),
    "stateful-unsized-continuing": Case(
        module=Dropping,
        data=ContinuingWithoutLength,
        moments=("start 1", "batch 4", "epoch 0", "start 5", "batch 6"),
        trainer={"max_epochs": 3, "limit_train_batches": 4},
    ),
    "stateful-beside-start": Case(
        module=Pairs,
        data=beside,
        moments=("start 1", "start 7"),
        trainer={"max_epochs": 2},
    ),
    "torchdata-unsized": Case(
        module=Dropping,
        data=torchdata_stream,
        moments=("start 1", "batch 2", "epoch 0", "start 7", "batch 8"),
        trainer={"max_epochs": 3, "accumulate_grad_batches": 2},
        world_size=1,
    ),
    "torchdata-limited": Case(
        module=Dropping,
        data=partial(torchdata, 16),
        moments=("batch 2", "batch 4", "epoch 0", "batch 6", "start 7"),
        trainer={"max_epochs": 3, "limit_train_batches": 4, **OWN},
        world_size=1,
    ),
    "torchdata": Case(
        module=Dropping,
        data=partial(torchdata, 12, num_workers=1),
        moments=("batch 2", "batch 6", "epoch 0", "start 8"),
        trainer={"max_epochs": 2, **OWN},
        world_size=1,
    ),
    "plain-start": Case(
        module=Dropping,
        data=partial(noisy, 22, 2, shuffle=True),
        moments=("start 1", "start 3", "start 6", "start 9"),
        trainer={"max_epochs": 2},
    ),
    "generator": Case(
        module=Dropping,
        data=partial(generated, 12, 2),
        moments=("batch 2", "batch 8", "epoch 0"),
        trainer={"max_epochs": 2, **OWN},
        world_size=1,
    ),
    "gpt-pp2": Case(
        module=Gpt,
        data=partial(sentences, 16, 2, num_workers=2),
        strategy=PP2,
        moments=("batch 7", "batch 12"),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 2},
        stop=3,
    ),
    "gpt-tp2": Case(
        module=Gpt,
        data=partial(sentences, 8, 2),
        strategy=TP2,
        moments=("batch 2", "batch 6", "epoch 0"),
        trainer={"max_epochs": 2, "gradient_clip_val": 1.0},
    ),
    "gpt-ep2": Case(
        module=partial(Gpt, experts=True),
        data=partial(sentences, 16, 2),
        strategy=EP2,
        moments=("batch 2", "batch 6", "epoch 0"),
        trainer={"max_epochs": 2},
    ),
    "gpt-fp16": Case(
        module=Gpt,
        data=partial(sentences, 16, 2),
        precision=HALF,
        strategy=SHARDED,
        moments=("batch 1", "batch 3", "batch 6", "epoch 0"),
        trainer={"max_epochs": 3},
    ),
    "plain-fp16": Case(
        module=Dropping,
        data=partial(noisy, 16, 2),
        precision=HALF,
        moments=("batch 1", "batch 3", "batch 6", "epoch 0"),
        trainer={"max_epochs": 3},
    ),
}


# What is left to make test-thorough, each with the rows that have the same and more.
THOROUGH = {
    "gpt-scheduled": "plain-scheduled, gpt-pp2",
    "random-sampler": "workers",
    "generator": "workers-stay",
    "stream-workers": "stream, workers",
    "iterable": "mixed",
    "longest": "cycle",
    "stateful": "stateful-counted",
    "stateful-unsized": "stateful-unsized-start",
    "stateful-unsized-limited": "stateful-limited, stateful-unsized-start",
    "stateful-unsized-windows": "stateful-windows, stateful-unsized-start",
    "stateful-unsized-continuing": "stateful-continuing-windows, stateful-unsized-start",
    "stateful-continuing-limited": "stateful-limited, stateful-continuing-windows",
    "stateful-continuing-beside": "stateful-continuing-windows, stateful-beside-counted",
    "stateful-validated": "stateful-limited",
    "stateful-start": "stateful-limited, stateful-windows",
    "stateful-beside-start": "stateful-beside-counted, stateful-limited",
    "torchdata": "torchdata-windows, workers",
    "torchdata-limited": "torchdata-windows, stateful-limited",
    "gpt-tp2": "gpt-pp2",
    "plain-fp16": "gpt-fp16",
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[Run, dict[str, Run]]]]:
    """Train every case that is asked for, and go on from its checkpoints in new processes."""
    folder = str(tmp_path_factory.mktemp("resume"))
    results = {}
    asked_for = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    chosen = {name: case for name, case in CASES.items() if name in asked_for}
    for world_size in sorted({case.world_size for case in chosen.values()}):
        cases = {name: case for name, case in chosen.items() if case.world_size == world_size}
        whole = run_ranks(world_size, train_whole, cases, folder, timeout=240)
        resumed = run_ranks(world_size, go_on, cases, folder, timeout=240)
        for name in cases:
            results[name] = [(first[name], second[name]) for first, second in zip(whole, resumed, strict=True)]
    return results


@pytest.mark.parametrize("name", thorough_but(CASES, *CASES.keys() - THOROUGH.keys()))
def test_a_resumed_run_has_the_losses_and_batches_of_the_whole_one(runs: Any, name: str) -> None:
    for whole, resumed in runs[name]:
        assert len(set(whole.losses)) == len(whole.losses) > 2
        assert len(resumed) > 1
        for moment, run in resumed.items():
            batches, steps = whole.places[moment]
            assert 0 <= batches < len(whole.batches), moment
            assert run.batches == whole.batches[batches:], moment
            assert run.losses == whole.losses[steps:], moment


# Another number of data-parallel ranks


SIZE = 45  # samples; no batch below divides it


@dataclass(frozen=True)
class Deal:
    """A run on some data-parallel ranks, to go on on others."""

    ranks: int
    batch_size: int = 2
    drop_last: bool = False
    limit: int | None = None
    strategy: Any = field(default_factory=dict)

    def train(self, **arguments: Any) -> list[tuple[int, int, list[int]]]:
        """Return the epoch, the number and the samples of every batch of this rank."""
        pl.seed_everything(7, verbose=False)
        watch = Watch()
        data = DataLoader(Samples(SIZE), self.batch_size, shuffle=True, drop_last=self.drop_last)
        callbacks = [watch, *arguments.pop("callbacks", [])]
        trainer = make_trainer(self.strategy, callbacks=callbacks, max_epochs=2, limit_train_batches=self.limit)
        trainer.fit(PlainNet(), data, **arguments)
        return [(int(e), int(i), json.loads(ids)) for e, i, ids in (line.split(" ", 2) for line in watch.batches)]


def save_deals(deals: dict[str, tuple[Deal, int]], folder: str) -> None:
    """Train each, with a checkpoint after a batch."""
    for name, (deal, batches) in deals.items():
        save = Save(f"{folder}/{name}", (f"batch {batches}",), Watch())
        deal.train(callbacks=[save.watch, save])


def go_on_dealing(deals: dict[str, tuple[Deal, str]], folder: str) -> dict[str, Any]:
    """Go on with each from a checkpoint, and take another one after its first batch."""
    results = {}
    for name, (deal, path) in deals.items():
        save = Save(f"{folder}/{name}", ("batch 1",), Watch())
        results[name] = deal.train(ckpt_path=path, callbacks=[save.watch, save])
    return results


def in_order(ranks: list[list[tuple[int, int, list[int]]]], epoch: int) -> list[int]:
    """Return the samples that all ranks read in an epoch, in the order in which a distributed sampler deals them."""
    batches = zip(*([ids for e, _, ids in rank if e == epoch] for rank in ranks), strict=True)
    return [index for batch in batches for turn in zip(*batch, strict=True) for index in turn]


DEALS: dict[str, tuple[Deal, int, Deal]] = {
    "1 to 2": (Deal(1), 5, Deal(2)),
    "2 to 1": (Deal(2), 4, Deal(1)),
    "2 to 4": (Deal(2), 3, Deal(4)),
    "2 to 4, limited": (Deal(2, limit=8, strategy=SHARDED), 3, Deal(4, limit=4, strategy=SHARDED)),
    "2 to 4, without the rest": (Deal(2, drop_last=True), 3, Deal(4, drop_last=True)),
    "2 to 1, other batches": (Deal(2, strategy=SHARDED), 4, Deal(1, batch_size=3, strategy=SHARDED)),
    "2 to 2, other batches": (Deal(2), 4, Deal(2, batch_size=5)),
}


# From the checkpoint after one more batch of "2 to 1, other batches": 4 * 4 + 3 samples, no multiple of 3 or of 4.
AGAIN = {"as before": Deal(1, batch_size=3, strategy=SHARDED), "on 2 ranks": Deal(2, strategy=SHARDED)}


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[tuple[int, int, list[int]]]]]:
    """Save each deal, and go on with it as another; one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("deals")
    for ranks in (1, 2):
        run_ranks(ranks, save_deals, {k: (a, n) for k, (a, n, _) in DEALS.items() if a.ranks == ranks}, str(folder))
    results = {}
    for ranks in (1, 2, 4):
        deals = {k: (b, f"{folder}/{k}/batch {n}.ckpt") for k, (_, n, b) in DEALS.items() if b.ranks == ranks}
        resumed = run_ranks(ranks, go_on_dealing, deals, str(folder))
        results |= {name: [rank[name] for rank in resumed] for name in deals}
    for name, deal in AGAIN.items():
        deals = {name: (deal, f"{folder}/2 to 1, other batches/batch 1.ckpt")}
        results[name] = [rank[name] for rank in run_ranks(deal.ranks, go_on_dealing, deals, str(folder))]
    return results


@pytest.mark.parametrize("name", DEALS)
def test_no_sample_is_lost_or_repeated_on_another_number_of_ranks(dealt: Any, name: str) -> None:
    first, batches, second = DEALS[name]
    check_deal(dealt[name], second, batches * first.batch_size * first.ranks)


@pytest.mark.parametrize("name", AGAIN)
def test_no_sample_is_lost_or_repeated_after_a_second_interruption(dealt: Any, name: str) -> None:
    first, batches, second = DEALS["2 to 1, other batches"]
    check_deal(dealt[name], AGAIN[name], batches * first.batch_size * first.ranks + second.batch_size * second.ranks)


def check_deal(ranks: list[list[tuple[int, int, list[int]]]], deal: Deal, consumed: int) -> None:
    """Check what all ranks have read of two epochs, of which ``consumed`` samples of the first had been read."""
    turn = deal.batch_size * deal.ranks
    for epoch, start in ((0, consumed), (1, 0)):
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
        wanted = order[start:]
        wanted += order[: -len(wanted) % deal.ranks]  # the distributed sampler gives each rank as many
        if deal.limit is not None:  # whole batches, of which one has been read in part
            wanted = wanted[: (deal.limit - start // turn) * turn]
        elif deal.drop_last:
            wanted = wanted[: len(wanted) // turn * turn]
        assert in_order(ranks, epoch) == wanted
    share = -(-SIZE // deal.ranks)
    length = deal.limit or (share // deal.batch_size if deal.drop_last else -(-share // deal.batch_size))
    for rank in ranks:
        numbers = [number for epoch, number, _ in rank if epoch == 0]
        assert numbers == list(range(length - len(numbers), length))
        assert [number for epoch, number, _ in rank if epoch == 1] == list(range(length))


# Refusals


def two_streams() -> CombinedLoader:
    """Return two loaders."""
    return CombinedLoader({"a": stream(Stream), "b": stream(Stream)}, "min_size")


TO_REFUSE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "stream": (Dropping, partial(stream, Stream), {}),
    "own": (Dropping, partial(own_batches, 18), OWN),
    "stateful": (Dropping, Remembering, {}),
    "reader": (Dropping, Reader, {}),
}


def save_to_refuse(folder: str) -> None:
    """Take checkpoints that cannot be continued everywhere."""
    for name, (module, data, trainer) in TO_REFUSE.items():
        case = Case(module=module, data=data, trainer={"max_epochs": 1, **trainer})
        train(case, f"{folder}/{name}", ("batch 2", "epoch 0"))


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("refused"))
    run_ranks(1, save_to_refuse, folder)
    return folder


def begin_the_next_epoch(folder: str, name: str, about: str, data: Any = None) -> None:
    """Resume a case with other loaders: from the middle of an epoch it is refused, and from the end it goes on."""
    module, own, trainer = TO_REFUSE[name]
    case = Case(module=module, data=data or own, trainer={"max_epochs": 2, **trainer})
    with refuses(ValueError, about):
        train(case, folder, resume=f"{folder}/{name}/batch 2.ckpt")
    if data is not two_streams:
        assert train(case, folder, resume=f"{folder}/{name}/epoch 0.ckpt").batches[0].startswith("1 0 "), name


@on_ranks(2)
def test_what_cannot_go_on_in_an_epoch_says_so_and_begins_the_next_one(of_one_rank: str) -> None:
    begin_the_next_epoch(of_one_rank, "stream", "an iterable dataset without Lightning's distributed sampler")
    begin_the_next_epoch(of_one_rank, "own", "a train dataloader without Lightning's distributed sampler")
    begin_the_next_epoch(of_one_rank, "reader", "Reader without Lightning's distributed sampler")
    begin_the_next_epoch(of_one_rank, "stateful", "dataloader states from the middle of an epoch on 1")


@on_ranks(1)
def test_a_stateful_loader_whose_sampler_lightning_wraps_cannot_go_on_in_an_epoch(tmp_path: Path) -> None:
    case = Case(module=Dropping, data=partial(torchdata, 16), trainer={"max_epochs": 2})
    said: list[str] = []
    with mock.patch.object(resume, "rank_zero_warn", said.append):  # make_trainer silences Lightning's warnings
        train(case, str(tmp_path), ("start 1", "batch 2", "epoch 0"))
    assert len(said) == 1
    assert "cannot resume in the middle of an epoch" in said[0]
    with refuses(ValueError, "after 2 batches of an epoch, but lacks the order of its samples"):
        train(case, str(tmp_path), resume=f"{tmp_path}/batch 2.ckpt")
    for moment, batch in (("start 1", "0 0 "), ("epoch 0", "1 0 ")):
        with mock.patch.object(resume, "rank_zero_warn", said.append):
            assert train(case, str(tmp_path), resume=f"{tmp_path}/{moment}.ckpt").batches[0].startswith(batch)
    assert said == said[:1] * 3


@on_ranks(1)
def test_a_stateful_loader_without_batches_loses_its_order_too(tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    batches = list(DataLoader(Samples(16), batch_size=2))
    case = Case(module=Dropping, data=lambda: StatefulDataLoader(batches, batch_size=None, shuffle=True))
    train(case, str(tmp_path), ("batch 2",), max_epochs=1)
    with refuses(ValueError, "of an epoch, but lacks the order of its samples"):
        train(case, str(tmp_path), resume=f"{tmp_path}/batch 2.ckpt", max_epochs=1)


class Shuffling(Sampler[int]):
    """Draws an order from the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class OwnBatches(BatchSampler):
    """Keeps its class when Lightning gives it another sampler."""


SEEDED = {
    "none": dict,
    "random": lambda: {"sampler": RandomSampler(range(16))},
    "batches": lambda: {"batch_size": 1, "batch_sampler": OwnBatches(Shuffling(), 2, drop_last=True)},
    "epochs": lambda: {"sampler": Shuffling()},
    "order": lambda: {"sampler": [*reversed(range(16))]},
}


@pytest.mark.parametrize("sampler", thorough_but(SEEDED, "none", "batches"))
@on_ranks(1)
def test_a_stateful_loader_keeps_the_seed_of_lightnings_sampler(sampler: str, tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    case = Case(module=Dropping, data=lambda: StatefulDataLoader(Samples(16), **{"batch_size": 2} | SEEDED[sampler]()))
    whole = train(case, str(tmp_path), ("batch 11", "epoch 0"), max_epochs=3).batches
    for first, second in (("batch 11", "end"), ("epoch 0", "batch 4")):  # the end is saved after the run
        part = train(case, str(tmp_path), (second,), f"{tmp_path}/{first}.ckpt", max_epochs=2).batches
        assert part == whole[16 - len(part) : 16]
        rest = train(case, str(tmp_path), (), f"{tmp_path}/{second}.ckpt", max_epochs=3).batches
        assert rest == whole[24 - len(rest) :]


@pytest.mark.parametrize("evaluate", ["validate", "test", "predict"])
@on_ranks(1)
def test_a_checkpoint_that_is_saved_after_another_run_goes_on_in_the_epoch(evaluate: str, tmp_path: Path) -> None:
    runs = []
    for seed, steps, path in ((7, 8, None), (7, 2, None), (99, 8, f"{tmp_path}/last.ckpt")):
        pl.seed_everything(seed, verbose=False)
        watch, module = Watch(), Dropping()
        trainer = make_trainer({}, callbacks=[watch], max_steps=steps)
        trainer.fit(module, DataLoader(Samples(16), 2, shuffle=True), ckpt_path=path)
        getattr(trainer, evaluate)(module, DataLoader(Samples(4), 2))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        runs.append((watch.batches, watch.losses))
    for whole, first, rest in zip(*runs, strict=True):
        assert [*first, *rest] == whole


@on_ranks(1, timeout=120)
def test_other_loaders_cannot_go_on_in_an_epoch(of_one_rank: str, tmp_path: Path) -> None:
    for name in ("stream", "reader"):
        begin_the_next_epoch(of_one_rank, name, "over 1 dataloaders, but there are 2 now", two_streams)
    for name, was in (("stateful", "a dataloader that keeps its own state"), ("own", "a DataLoader of torch")):
        begin_the_next_epoch(of_one_rank, name, f"of {was}, but an iterable dataset", two_streams)
        begin_the_next_epoch(of_one_rank, name, f"of {was}, but an iterable dataset", partial(stream, Stream))
    for reader in (Reader, Remembering):
        begin_the_next_epoch(of_one_rank, "own", f"of a DataLoader of torch, but {reader.__name__}", reader)
    case = Case(module=Dropping, data=partial(shuffled, 12, 2), trainer={"max_epochs": 1, **OWN})
    train(case, str(tmp_path), ("batch 2",))
    case = Case(module=Dropping, data=partial(noisy, 12, 3, shuffle=True), trainer={"max_epochs": 1})
    with refuses(ValueError, "without Lightning's distributed sampler"):
        train(case, str(tmp_path), resume=f"{tmp_path}/batch 2.ckpt")
    case = Case(module=Dropping, data=partial(own_batches, 18), trainer={"max_epochs": 1, **OWN})
    again = train(case, str(tmp_path), resume=f"{of_one_rank}/reader/batch 2.ckpt")  # what was read is read again
    assert again.batches[0].startswith("0 2 ")  # and dropped


# A failure on all ranks


class OutOfStep(PlainNet):
    """Fails on all ranks; one of them has begun a collective that the other has not."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            if self.global_rank == 1:
                self.begun = dist.all_reduce(torch.ones(3), group=process_group("dp"), async_op=True)
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_ranks_that_failed_out_of_step_do_not_save(tmp_path: Path) -> None:
    path, log = tmp_path / "a.ckpt", list[str]()
    trainer = make_trainer({}, callbacks=[SaveOnException(str(path))], max_epochs=1)
    with (
        mock.patch.object(checkpointing._log, "error", lambda text, *values: log.append(text % values)),
        pytest.raises(ArithmeticError),
    ):
        trainer.fit(OutOfStep(), noisy(8, 2))
    assert log == [f"{path} is not saved: ranks 0 and 1 are out of step since the run that failed"]
    assert os.listdir(tmp_path) == []


# A batch that fails


class Failing(Dropping):
    """Fails in its fifth batch, once."""

    fails = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.fails and batch_idx == 4:
            raise ArithmeticError
        return loss


class SaveOnException(pl.Callback):
    """Takes a checkpoint when something fails."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


class Restarting(pl.Callback):
    """Notes what Lightning says to hooks about the restart, and the callbacks that are there."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note(trainer, trainer.fit_loop.epoch_loop.batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note(trainer, "end")

    def note(self, trainer: pl.Trainer, moment: Any) -> None:
        loop = trainer.fit_loop
        self.noted.append((trainer.current_epoch, moment, loop.restarting, loop.epoch_loop.restarting))


def restarts(strategy: Any, path: str, fails: bool = False) -> Any:
    """Resume, to the end of the next epoch or into another failure; return what hooks saw and which callbacks stay."""
    watch = Restarting()
    trainer = make_trainer(strategy, callbacks=[watch], max_epochs=2)
    Failing.fails = fails
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        trainer.fit(Failing(), noisy(16, 2, shuffle=True), ckpt_path=path)
    Failing.fails = False
    return watch.noted, trainer.callbacks == [watch]  # type: ignore[attr-defined]


@on_ranks(1)
def test_a_batch_that_failed_is_the_first_of_the_resumed_run(tmp_path: Path) -> None:
    case = Case(module=Failing, data=partial(noisy, 16, 2, shuffle=True), trainer={"max_epochs": 1})
    whole = train(case, tmp_path)
    Failing.fails = True
    pl.seed_everything(7, workers=True, verbose=False)
    trainer = make_trainer({}, callbacks=[SaveOnException(f"{tmp_path}/failed.ckpt")], max_epochs=1)
    with pytest.raises(ArithmeticError):
        trainer.fit(Failing(), case.data())
    Failing.fails = False
    resumed = train(case, tmp_path, resume=f"{tmp_path}/failed.ckpt")
    other = make_trainer("ddp", max_epochs=1)
    other.fit(Failing(), case.data(), ckpt_path=f"{tmp_path}/failed.ckpt")
    path = f"{tmp_path}/failed.ckpt"
    seen = [restarts("ddp", path), restarts({}, path), restarts({}, path, fails=True)]
    steps, (ddp, ours, failed) = other.global_step, seen
    assert resumed.batches == whole.batches[4:]
    assert resumed.losses == whole.losses[4:]
    assert steps == 8  # another strategy reads the file as ever
    assert ours == ddp  # to hooks the loop is restarting until the epoch is over
    assert [(epoch, restarting) for epoch, moment, restarting, _ in ours[0] if moment == "end"] == [
        (0, True),
        (1, False),
    ]
    assert failed == ([], True)
