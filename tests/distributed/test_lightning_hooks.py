# SPDX-License-Identifier: Apache-2.0
"""Every hook fires as often, and in the order, that ``strategy="ddp"`` shows.

:class:`Recorder` notes each hook of a callback, of the module and of the datamodule with the counters at that moment.
The same fit, validate, test and predict run under ddp and under ours; the two sequences are equal, line by line, for a
plain module and for one built with ``pipeline()``, on one stage and on two.

By nature one thing differs with ``pipeline()``: a window of ``accumulate_grad_batches`` runs at its last batch. So the
calls of ``training_step`` are taken out of the sequence, and it is checked where they are instead.
"""

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.toy import PP2, Batch, PlainNet, StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed


Events = list[str]
_NOT_HOOKS = {"on_gpu", "on_step"}  # properties of the module, not hooks
_MORE_OF_MODULE = (
    "setup",
    "teardown",
    "prepare_data",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
_MORE_OF_CALLBACK = ("setup", "teardown", "state_dict", "load_state_dict")


def hooks_of(kind: type, more: tuple[str, ...]) -> list[str]:
    names = [n for n in dir(kind) if n.startswith("on_") and n not in _NOT_HOOKS and callable(getattr(kind, n, None))]
    return [*names, *more]


def noted(kind: type, prefix: str, name: str) -> Callable[..., Any]:
    """Return a method that notes its call and does what it did before."""
    original = getattr(kind, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.note(f"{prefix}.{name}")
        return original(self, *args, **kwargs)

    return hook


class Recorder(pl.Callback):
    """Notes the hooks of a callback; the others write into its list too."""

    def __init__(self) -> None:
        self.events: Events = []
        self.trainer: pl.Trainer | None = None

    def note(self, what: str) -> None:
        if self.trainer is None:
            self.events.append(what)
            return
        loop = self.trainer.fit_loop.epoch_loop
        self.events.append(f"{what} epoch={self.trainer.current_epoch} batch={loop.batch_idx} {loop.global_step}")


for _name in hooks_of(pl.Callback, _MORE_OF_CALLBACK):
    setattr(Recorder, _name, noted(pl.Callback, "callback", _name))


class Noted:
    """Mixed into a module: notes its hooks and steps."""

    recorder: Recorder

    def note(self, what: str) -> None:
        self.recorder.note(what)

    def training_step(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        self.note("module.training_step")
        loss = (self.predictions(batch).float() - batch["y"]).square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("module.validation_step")
        self.evaluate("val", batch)

    def test_step(self: Any, batch: Batch, batch_idx: int) -> None:
        self.note("module.test_step")
        self.evaluate("test", batch)

    def predict_step(self: Any, batch: Batch, batch_idx: int) -> Any:
        self.note("module.predict_step")
        return self.predictions(batch)


def with_hooks(module: type) -> Any:
    """Return the module's class with every hook noted."""
    names = hooks_of(pl.LightningModule, _MORE_OF_MODULE)
    own = {name: noted(module, "module", name) for name in names}
    own["configure_optimizers"] = noted_optimizers
    return type(f"Noted{module.__name__}", (Noted, module), own)


def noted_optimizers(self: Any) -> Any:
    self.note("module.configure_optimizers")
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(pl.LightningDataModule):
    """A datamodule that notes what it is asked."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def note(self, what: str) -> None:
        self.recorder.note(what)

    def train_dataloader(self) -> Any:
        self.note("data.train_dataloader")
        return loader(14, 2)

    def val_dataloader(self) -> Any:
        self.note("data.val_dataloader")
        return [loader(4, 2), loader(2, 2)]

    def test_dataloader(self) -> Any:
        self.note("data.test_dataloader")
        return loader(4, 2)

    def predict_dataloader(self) -> Any:
        self.note("data.predict_dataloader")
        return loader(4, 2)


_OF_DATA = ("prepare_data", "setup", "teardown", "on_exception", "state_dict", "load_state_dict")
for _name in _OF_DATA:
    setattr(Data, _name, noted(pl.LightningDataModule, "data", _name))


class Stop(Exception):  # noqa: N818 - not an error
    """Ends a run in the middle."""


class Raises(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise Stop


FITS: dict[str, dict[str, Any]] = {
    "each-batch": {"num_sanity_val_steps": 1},
    "windows": {"accumulate_grad_batches": 3, "max_epochs": 2, "gradient_clip_val": 0.5},
    "val-inside": {"accumulate_grad_batches": 2, "val_check_interval": 3},
    "steps": {"accumulate_grad_batches": 2, "max_steps": 3, "limit_val_batches": 0},
    "no-val": {"accumulate_grad_batches": 2, "limit_val_batches": 0},
}


def record(module: type, strategy: Any, folder: str) -> dict[str, Events]:
    """Return the events of each fit, and of validate, test, predict and a run that fails."""
    found: dict[str, Events] = {}
    paths = {}
    for name, arguments in FITS.items():
        kept = ModelCheckpoint(f"{folder}/{name}", every_n_epochs=1, save_last=True)
        found[name], *_ = events(module, strategy, "fit", kept, enable_checkpointing=True, **arguments)
        paths[name] = kept.last_model_path
    for name in ("each-batch", "no-val"):  # one that stopped in an epoch goes on in it, which is not so under ddp
        found[f"resumed {name}"], *_ = events(module, strategy, "fit", ckpt_path=paths[name], max_epochs=2)
    for way in ("validate", "test", "predict"):
        found[way], *_ = events(module, strategy, way)
    found["failed"], error = events(module, strategy, "fit", Raises())
    assert error is Stop
    return found


def events(module: type, strategy: Any, way: str, *callbacks: Any, ckpt_path: Any = None, **arguments: Any) -> Any:
    """Run once; return the events, and the class of what was raised."""
    recorder = Recorder()
    net = with_hooks(module)()
    net.recorder = recorder
    trainer = make_trainer(strategy, callbacks=[recorder, *callbacks], use_distributed_sampler=False, **arguments)
    recorder.trainer = trainer
    error = None
    try:
        getattr(trainer, way)(net, datamodule=Data(recorder), ckpt_path=ckpt_path)
    except Stop as stop:
        error = type(stop)
    return recorder.events, error


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: Any) -> dict[type, dict[str, Events]]:
    folder = tmp_path_factory.mktemp("ddp")
    return {
        module: run_ranks(1, record, module, "ddp", str(folder / module.__name__), timeout=120)[0]
        for module in (PlainNet, StagedNet)
    }


RUNS: dict[str, tuple[int, type, dict[str, Any]]] = {
    "plain": (1, PlainNet, {}),
    "plain-dp2-sharded": (2, PlainNet, {"use_distributed_optimizer": True}),
    "pipelined-one-stage": (1, StagedNet, {}),
    "pp2": (2, StagedNet, PP2),
}


@pytest.mark.parametrize("name", RUNS)
def test_hooks_fire_as_often_and_in_the_order_of_ddp(ddp: Any, name: str, tmp_path: Path) -> None:
    world_size, module, strategy = RUNS[name]
    for number, rank in enumerate(run_ranks(world_size, record, module, strategy, str(tmp_path), timeout=180)):
        for run, ours in rank.items():
            expected = ddp[module][run]
            if number > 0:  # under ddp too, only the first rank of a machine prepares data
                expected = [event for event in expected if ".prepare_data" not in event]
            if module is StagedNet:
                check_training_steps(ours, FITS.get(run, {}).get("accumulate_grad_batches", 1))
                ours, expected = ([e for e in both if ".training_step" not in e] for both in (ours, expected))
            first = next(
                (i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b),
                min(map(len, (ours, expected))),
            )
            assert ours[first : first + 4] == expected[first : first + 4], f"{run}: event {first}"
            assert len(ours) == len(expected)
        happened = {event.split(" ")[0] for events in rank.values() for event in events}
        assert happened >= {"module.on_before_zero_grad", "callback.on_exception", "callback.on_save_checkpoint"}


def check_training_steps(ours: Events, window: int) -> None:
    """Check that each window runs at once, after its last batch began, and that every batch runs once."""
    names = [event.split(" ")[0] for event in ours]
    runs = [(name, len(list(group))) for name, group in groupby(names)]
    sizes = [size for name, size in runs if name == "module.training_step"]
    batches = Counter(names)["module.on_train_batch_start"]
    assert sum(sizes) == batches
    assert all(size <= window for size in sizes)
    before = [runs[i - 1][0] for i, (name, _) in enumerate(runs) if name == "module.training_step"]
    assert set(before) <= {"module.on_train_batch_start", "module.optimizer_step"}
