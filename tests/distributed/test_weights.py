# SPDX-License-Identifier: Apache-2.0
"""Weights alone: a new run from those of another, the whole model in one process, and what does not fit."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_mcore import MCoreGPT, Recipe, single_process
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import PP2, Watch, make_trainer, texts

pytestmark = pytest.mark.distributed

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True}
quiet = pytest.mark.filterwarnings("ignore")  # in this process warnings are errors, and Megatron has many


data = partial(texts, 16, 8, vocab_size=16, batch_size=2)


class StartsFrom(MCoreGPT):
    """A GPT that starts from a checkpoint."""

    path: str = ""
    strict: bool = True

    def configure_model(self) -> None:
        super().configure_model()
        if self.path:
            self.load_weights(self.path, strict=self.strict)


def make(path: str = "", strict: bool = True, vocab_size: int = 16, padded: int = 128, **sizes: Any) -> StartsFrom:
    """Return the GPT of these tests, with other sizes as told."""
    pl.seed_everything(len(path), verbose=False)
    module = StartsFrom(
        vocab_size=vocab_size,
        seq_length=8,
        transformer=SIZES | sizes,
        recipe=Recipe(learning_rate=1e-2),
        make_vocab_size_divisible_by=padded,
    )
    module.path, module.strict = path, strict
    return module


def save(strategy: Any, path: str) -> float:
    """Train and save on this rank; return the validation loss."""
    trainer, module = make_trainer(strategy, max_epochs=1), make()
    trainer.fit(module, data())
    trainer.save_checkpoint(path)
    return float(trainer.validate(module, data(), verbose=False)[0]["val_loss"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """Return a checkpoint that was saved in two halves, and its validation loss."""
    path = str(tmp_path_factory.mktemp("weights") / "trained.ckpt")
    return path, run_ranks(2, save, TP2, path, timeout=120)[0]


def validate_from(strategies: list[Any], path: str) -> list[float]:
    """Return the validation loss of a new run from the weights, under each strategy."""
    return [
        float(make_trainer(strategy).validate(make(path), data(), verbose=False)[0]["val_loss"])
        for strategy in strategies
    ]


def test_any_layout_and_strategy_starts_from_the_weights(saved: tuple[str, float]) -> None:
    path, loss = saved
    for losses in run_ranks(2, validate_from, [PP2, TP2, {}, "ddp"], path, timeout=120):
        assert losses == pytest.approx([loss] * 4, rel=1e-6)


def fine_tune(path: str) -> tuple[float, float, int]:
    """Train from the weights with a fresh optimizer; return the first loss, the optimizer's steps, and ours."""
    watch = Watch()
    trainer = make_trainer(PP2, max_epochs=1, callbacks=[watch], use_distributed_sampler=False)  # in the order given
    module = make(path)
    trainer.fit(module, data())
    [steps] = {float(state["step"]) for state in module.optimizers().state.values()}
    return watch.seen.losses[0], steps, trainer.global_step


@quiet
def test_fine_tuning_starts_from_the_weights_with_a_fresh_optimizer(saved: tuple[str, float]) -> None:
    path, _ = saved
    with single_process(), torch.no_grad():
        module = MCoreGPT.load_from_checkpoint(path)
        first = float(module.training_step(next(iter(data())), 0)["loss"])
    for loss, steps, global_step in run_ranks(2, fine_tune, path, timeout=120):
        assert loss == pytest.approx(first, rel=1e-6)
        assert steps == global_step == 8


@quiet
def test_the_whole_model_is_loaded_in_one_process(saved: tuple[str, float]) -> None:
    path, loss = saved
    module = StartsFrom.load_from_checkpoint(path)
    assert isinstance(module, StartsFrom)
    assert not dist.is_initialized()
    assert module.recipe.learning_rate == 1e-2
    [metrics] = make_trainer("auto").validate(module, data(), verbose=False)
    assert metrics["val_loss"] == pytest.approx(loss, rel=1e-6)
    other = StartsFrom.load_from_checkpoint(path, recipe=Recipe(learning_rate=0.5))
    assert other.hparams["recipe"]["learning_rate"] == 0.5
    for name, value in module.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, other.state_dict()[name]), name


# What does not fit


@on_ranks(2, timeout=120)
def test_weights_of_another_model_are_refused_by_name(saved: tuple[str, float], tmp_path: Path) -> None:
    path, _ = saved
    for module, about in (
        (make(path, vocab_size=20), "vocab_size=16, but this one has vocab_size=20"),
        (make(path, ffn_hidden_size=32), "linear_fc1.weight ([2, 64, 16] in it, [2, 32, 16] in the model)"),
        (make(path, num_layers=4), "linear_fc1.weight ([2, 64, 16] in it, [4, 64, 16] in the model)"),
        (make(path, qk_layernorm=True), "it lacks decoder.layers.self_attention.k_layernorm."),
        (make(f"{tmp_path}/absent.ckpt"), "absent.ckpt"),
        (make(__file__), "test_weights.py"),
    ):
        with refuses((ValueError, FileNotFoundError), about):
            make_trainer(PP2).validate(module, data(), verbose=False)
    with refuses(ValueError, "does not fit this model: it lacks decoder.layers.self_attention.k_layernorm."):
        make_trainer(PP2, max_epochs=3).fit(make(qk_layernorm=True), data(), ckpt_path=path)
    with refuses(RuntimeError, "this process is one of 2 connected ranks"):
        MCoreGPT.load_from_checkpoint(path)


@on_ranks(2, timeout=120)
def test_another_padding_of_the_vocabulary_and_other_names_of_layers_are_refused_with_what_sets_them(
    saved: tuple[str, float], tmp_path: Path
) -> None:
    with refuses(ValueError, "set vocab_size and make_vocab_size_divisible_by so that the vocabulary has 128 rows"):
        make_trainer(PP2).validate(make(saved[0], padded=64), data(), verbose=False)
    trainer, apart = make_trainer(TP2), f"{tmp_path}/apart.ckpt"
    trainer.validate(make(hetereogenous_dist_checkpoint=True), data(), verbose=False)
    trainer.save_checkpoint(apart, weights_only=True)
    with refuses(ValueError, "set hetereogenous_dist_checkpoint=True in the model's config"):
        make_trainer(PP2).validate(make(apart), data(), verbose=False)
    make_trainer(PP2).validate(make(apart, hetereogenous_dist_checkpoint=True), data(), verbose=False)


def load_what_fits(path: str) -> list[str]:
    """Load into a model with more parameters, not strictly; return the warnings."""
    module = make(path, strict=False, qk_layernorm=True)
    trainer = make_trainer(PP2)  # which silences Lightning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(module, data(), verbose=False)
    with pytest.raises(RuntimeError, match=r"after self\.pipeline"):
        make().load_weights(path)
    return [str(warning.message) for warning in caught]


def test_what_fits_is_loaded_where_names_need_not_agree(saved: tuple[str, float]) -> None:
    first, _ = run_ranks(2, load_what_fits, saved[0], timeout=120)
    assert any("it lacks decoder.layers.self_attention.k_layernorm" in text for text in first)
