# SPDX-License-Identifier: Apache-2.0
"""A module built with ``pipeline()`` under Lightning's own strategies, and what a run leaves behind.

Megatron layers need process groups and, on the CPU, the CPU runtime. Under a strategy that is not ours the module opens
both for the run; every way out of the run closes them, and a run under MCoreStrategy works before and after.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from lightning_mcore import MCoreGPT, Recipe
from lightning_mcore.layers.session import SingleModelSession, single_process
from lightning_mcore.parallel.groups import process_groups_are_open
from tests.support import hygiene
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import PP2, Batch, StagedNet, loader, make_trainer, run_fit, weights

pytestmark = pytest.mark.distributed


class Guarded(StagedNet):
    """Builds its model once, as Lightning's documentation advises."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()


class Layers(MCoreGPT):
    """Real Megatron layers, which ask for groups and the device in every forward."""

    def __init__(self, guarded: bool) -> None:
        sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.1}
        super().__init__(vocab_size=16, seq_length=8, transformer=sizes, recipe=Recipe(learning_rate=1e-2))
        self.guarded = guarded

    def configure_model(self) -> None:
        if not (self.guarded and hasattr(self, "model")):
            super().configure_model()


class Text(torch.utils.data.Dataset[Batch]):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Batch:
        text = (torch.arange(9) + index) % 16
        return {"tokens": text[:-1], "labels": text[1:], "index": torch.tensor(index)}


def text() -> Any:
    return torch.utils.data.DataLoader(Text(), batch_size=2)


def run_everything(strategy: str, guarded: bool) -> dict[str, Any]:
    """Use one trainer and one module for everything that a trainer can do; return what was left behind each time."""
    names, had_group = hygiene.snapshot(), dist.is_initialized()
    module = Layers(guarded)
    trainer = make_trainer(strategy, max_epochs=2)
    callbacks = list(trainer.callbacks)
    left = {}
    losses = {}

    def look(name: str) -> None:
        found = hygiene.changes(names, hygiene.snapshot())
        found += ["groups"] if process_groups_are_open() or parallel_state.is_initialized() else []
        found += ["world"] if dist.is_initialized() and not (had_group or strategy != "auto") else []
        found += ["callbacks"] if trainer.callbacks != callbacks else []
        left[name] = found
        losses.update({key: float(value) for key, value in trainer.callback_metrics.items()})

    trainer.validate(module, text(), verbose=False)
    look("validate")
    before = losses["val_loss"]
    trainer.fit(module, text(), text())
    look("fit")
    trainer.validate(module, text(), verbose=False)
    look("validate again")
    trainer.test(module, text(), verbose=False)
    look("test")
    predictions = trainer.predict(module, text())
    look("predict")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, text(), text())
    look("fit again")
    return {"left": left, "learned": losses["val_loss"] < before, "predictions": len(predictions or [])}


@pytest.mark.parametrize("guarded", [False, True], ids=["rebuilt", "guarded"])
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "auto"), (2, "ddp")], ids=["auto", "ddp"])
def test_one_trainer_fits_validates_tests_and_predicts(world_size: int, strategy: str, guarded: bool) -> None:
    for rank in run_ranks(world_size, run_everything, strategy, guarded, open_group=strategy != "auto"):
        assert rank["left"] == {
            name: [] for name in ("validate", "fit", "validate again", "test", "predict", "fit again")
        }
        assert rank["learned"]
        assert rank["predictions"] == 8 // 2 // world_size


# Every way out


class Fails(StagedNet):
    """Raises at a certain place of a run."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where = where
        self.raised = error

    def configure_model(self) -> None:
        super().configure_model()
        self.fail("configure_model")

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.fail("training_step")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("on_before_optimizer_step")

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.fail("validation_step")

    def on_train_end(self) -> None:
        self.fail("on_train_end")

    def fail(self, where: str) -> None:
        if where == self.where:
            raise self.raised


PLACES = (
    "configure_model",
    "configure_optimizers",
    "training_step",
    "on_before_optimizer_step",
    "validation_step",
    "on_train_end",
)


def fail_everywhere(strategy: Any) -> dict[str, list[str]]:
    """Let a run end at every place; return what was left, and whether the next run under ours works."""
    names, had_group = hygiene.snapshot(), dist.is_initialized()
    left = {}
    for place in PLACES:
        for error in (ValueError(place), KeyboardInterrupt()):
            module = Fails(place, error)
            with pytest.raises((ValueError, SystemExit, KeyboardInterrupt)):
                run_fit(module, strategy, loader(8, 2), loader(4, 2))
            found = hygiene.changes(names, hygiene.snapshot())
            ours = isinstance(strategy, dict)  # like the default group, ours outlive a run
            found += ["groups"] if process_groups_are_open() and not ours else []
            found += ["world"] if strategy == "auto" and dist.is_initialized() and not had_group else []
            found += ["log"] if "log" in vars(module) else []
            found += ["main_grad"] if any(hasattr(p, "main_grad") for p in module.parameters()) else []
            left[f"{place}, {type(error).__name__}"] = found
    return left


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "auto"), (2, "ddp"), (2, {})], ids=["auto", "ddp", "mcore"])
def test_an_exception_leaves_nothing_behind(world_size: int, strategy: Any) -> None:
    for rank in run_ranks(world_size, fail_everywhere, strategy, open_group=strategy != "auto", timeout=120):
        assert rank == {f"{place}, {error}": [] for place in PLACES for error in ("ValueError", "KeyboardInterrupt")}


# One strategy after another


@on_ranks(2, timeout=120)
def test_strategies_and_layouts_follow_each_other_in_one_process() -> None:
    ways: list[Any] = [{}, PP2, "ddp", {"tensor_model_parallel_size": 2}, "ddp", PP2, {}]
    outcomes = []
    for strategy in ways:
        module = Guarded()
        seen = run_fit(module, strategy, loader(8, 2))
        outcomes.append((str(strategy), seen.losses, {name: value.tolist() for name, value in weights(module).items()}))
    by_strategy: dict[str, Any] = {}
    for strategy, *result in outcomes:
        assert by_strategy.setdefault(strategy, result) == result, f"{strategy} came out otherwise the second time"


@pytest.mark.parametrize("strategy", ["ddp", {}], ids=["ddp", "mcore"])
@on_ranks(2)
def test_a_run_under_ours_works_after_one_that_failed(strategy: Any) -> None:
    first = run_fit(StagedNet(), PP2, loader(8, 2)).losses
    with pytest.raises(ValueError, match="training_step"):
        run_fit(Fails("training_step", ValueError("training_step")), strategy, loader(8, 2))
    second = run_fit(StagedNet(), PP2, loader(8, 2)).losses
    assert len(first) == 4
    assert first == second


# The module's own rules


@on_ranks(2)
def test_a_module_built_for_one_layout_is_not_run_on_another() -> None:
    module = StagedNet()
    run_fit(module, "ddp", loader(4, 2))
    with refuses(RuntimeError, "create a new module and load its weights"):
        run_fit(module, PP2, loader(4, 2))


@on_ranks(1, open_group=False, timeout=120)
def test_a_model_is_called_between_two_runs() -> None:
    torch.set_num_threads(1)
    module = Layers(guarded=False)
    make_trainer("auto", max_steps=1).fit(module, text())
    names = hygiene.snapshot()
    with single_process(), torch.no_grad():
        logits = module.model(torch.arange(8)[None], torch.arange(8)[None], None)
    left = [*hygiene.changes(names, hygiene.snapshot()), process_groups_are_open()]
    make_trainer("auto", max_steps=1).fit(Layers(guarded=False), text())
    assert left == [False]
    assert logits.shape == (1, 8, 128)


def test_pipeline_without_a_trainer_says_what_it_needs() -> None:
    with pytest.raises(RuntimeError, match=r"call it in configure_model\(\), which the Trainer runs"):
        StagedNet().pipeline(StagedNet().build_chunk)


def outside_a_step() -> list[Any]:
    """Call a part of a model where there is no schedule, and a method through it."""
    results: list[Any] = []

    class Asks(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            batch = next(iter(loader(2, 2)))
            with pytest.raises(RuntimeError, match="this rank holds only a part of the model"):
                pl_module.model(batch["x"])
            results.append(pl_module.run_forward("predict_step", batch)["y"].tolist())

    run_fit(StagedNet(), PP2, loader(4, 2), callbacks=[Asks()])
    return results


def test_a_part_of_a_model_is_called_through_run_forward_alone() -> None:
    first, second = run_ranks(2, outside_a_step)
    assert first == second
    assert len(first) == 1


def test_there_is_one_session_for_a_trainer() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        trainer = make_trainer("auto")
        SingleModelSession.attach(trainer)
        SingleModelSession.attach(trainer)
        [session] = [callback for callback in trainer.callbacks if isinstance(callback, SingleModelSession)]
        assert process_groups_are_open()
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        session.teardown(trainer, StagedNet(), "fit")
    assert not process_groups_are_open()
    assert session not in trainer.callbacks
