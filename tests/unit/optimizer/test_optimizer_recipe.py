# SPDX-License-Identifier: Apache-2.0
"""The optimizer of ``MCoreGPT`` and the course of its learning rate, by name."""

import math
import warnings
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.saving import save_hparams_to_yaml
from torch import nn

from lightning_mcore import LoRA, MCoreGPT, Recipe
from tests.support.sentences import refuses


def rates(steps: int, total: float = 10, trainer: Any = None, **arguments: Any) -> list[float]:
    parameters = list(nn.Linear(2, 2).named_parameters())
    trainer = trainer or SimpleNamespace(estimated_stepping_batches=total, callbacks=[])
    recipe = cast(dict[str, Any], Recipe(**{"learning_rate": 1.0, **arguments}).build(parameters, trainer))
    seen = []
    for _ in range(steps):
        seen.append(recipe["optimizer"].param_groups[0]["lr"])
        recipe["optimizer"].step()
        recipe["lr_scheduler"]["scheduler"].step()
    return seen


def test_linear_rises_from_zero_and_falls_to_zero() -> None:
    assert rates(11, lr_scheduler_type="linear", warmup_steps=2) == pytest.approx(
        [0, 0.5, *[(10 - step) / 8 for step in range(2, 11)]]
    )


def test_cosine_of_transformers_starts_at_zero_while_ours_already_moves_the_weights() -> None:
    cosine = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)]
    assert rates(11, lr_scheduler_type="cosine", warmup_steps=2) == pytest.approx([0, 0.5, *cosine])
    assert rates(11, warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, *cosine])


@pytest.mark.parametrize(("max_steps", "end"), [(-1, 10), (6, 6), (30, 10)])
def test_the_course_ends_with_the_run_if_lightning_schedules_the_accumulation(max_steps: int, end: int) -> None:
    trainer = SimpleNamespace(
        estimated_stepping_batches=15 if max_steps < 0 else min(15, max_steps),  # one batch in each step
        callbacks=[GradientAccumulationScheduler({1: 2, 2: 4})],
        max_epochs=3,
        max_steps=max_steps,
        num_training_batches=5,  # 5, 3 and 2 steps
    )
    assert rates(12, trainer=trainer) == pytest.approx(rates(12, total=end))


def test_constant_stays_also_where_no_end_is_known() -> None:
    assert rates(4, total=math.inf, lr_scheduler_type="constant") == [1.0] * 4
    assert rates(4, total=math.inf, lr_scheduler_type="constant_with_warmup", warmup_steps=2) == [0, 0.5, 1, 1]


def test_options_reach_the_course() -> None:
    least = rates(11, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.25})
    assert least[0] == 1.0
    assert least[10] == pytest.approx(0.25)
    stable = {"num_decay_steps": 4}
    assert (
        rates(10, lr_scheduler_type="warmup_stable_decay", warmup_steps=2, lr_scheduler_kwargs=stable)[2:7] == [1] * 5
    )


def test_decay_steps_that_leave_no_room_for_the_warm_up_give_a_warning() -> None:
    options: dict[str, Any] = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 8},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates(10, warmup_steps=2, **options)
    with pytest.warns(UserWarning, match="warmup_steps=3 and num_decay_steps=8 are more than the 10 steps of the run"):
        rates(10, warmup_steps=3, **options)


def test_a_warm_up_below_one_is_a_share_of_all_steps_rounded_up() -> None:
    assert rates(5, lr_scheduler_type="constant_with_warmup", warmup_steps=0.25)[:4] == pytest.approx(
        [0, 1 / 3, 2 / 3, 1]
    )
    assert rates(3, warmup_steps=0.2) == rates(3, warmup_steps=2)


def test_sgd_and_its_momentum_and_the_eps_of_adamw() -> None:
    trainer = cast(Any, SimpleNamespace(estimated_stepping_batches=10, callbacks=[]))
    parameters = list(nn.Linear(2, 2).named_parameters())
    sgd = cast(Any, Recipe(optimizer="sgd", sgd_momentum=0.5).build(parameters, trainer))["optimizer"]
    assert type(sgd) is torch.optim.SGD
    assert [group["momentum"] for group in sgd.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in sgd.param_groups] == [0.1, 0.0]
    adamw = cast(Any, Recipe(eps=1e-6).build(parameters, trainer))["optimizer"]
    assert type(adamw) is torch.optim.AdamW
    assert adamw.defaults["eps"] == 1e-6


@pytest.mark.parametrize(
    "arguments",
    [
        {"optimizer": "lion"},
        {"lr_scheduler_type": "cosin"},
        {"lr_scheduler_kwargs": {"min_lr": 1e-05}},
        {"lr_scheduler_type": "cosine", "min_learning_rate": 1e-05},
        {"lr_scheduler_type": "constant", "warmup_steps": 3},
        {"warmup_steps": 1.5},
        {"warmup_steps": -1},
        {"learning_rate": 0.0001, "min_learning_rate": 0.001},
        {"min_learning_rate": -1.0},
        {"betas": (0.9, 0.95, 0.99)},
        {"loraplus_lr_ratio": 0},
        {"loraplus_lr_ratio": 16, "optimizer": "muon"},
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any]) -> None:
    with refuses(ValueError, *arguments):
        Recipe(**arguments)


def test_a_recipe_that_does_not_fit_the_model_is_refused() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    with refuses(ValueError, "loraplus_lr_ratio=16"):
        MCoreGPT(32, 8, sizes, recipe=Recipe(loraplus_lr_ratio=16))
    with refuses(ValueError, "optimizer='muon'", "use_mup=True"):
        MCoreGPT(32, 8, {**sizes, "use_mup": True}, recipe=Recipe(optimizer="muon"))
    with refuses(ValueError, "loraplus_lr_ratio=16", "use_mup=True"):
        MCoreGPT(32, 8, {**sizes, "use_mup": True}, recipe=Recipe(loraplus_lr_ratio=16), lora=LoRA(r=2))


def test_muon_trains_the_matrices_inside_the_layers_at_the_rate_of_adamw() -> None:
    trainer = cast(Any, SimpleNamespace(estimated_stepping_batches=10, callbacks=[]))
    ends = [("embedding.word_embeddings.weight", nn.Parameter(torch.zeros(4, 2)))]
    ends += [("output_layer.weight", nn.Parameter(torch.zeros(4, 2)))]
    ends[-1][1].is_embedding_or_output_parameter = True  # type: ignore[attr-defined]  # as Megatron marks it
    inside = [(f"decoder.{name}", p) for name, p in nn.Linear(2, 2).named_parameters()]
    muon = cast(Any, Recipe(optimizer="muon", learning_rate=2e-3).build([*ends, *inside], trainer))["optimizer"]
    of_muon, matrices, vectors = muon.param_groups
    assert [group["params"] for group in (of_muon, matrices, vectors)] == [
        [inside[0][1]],
        [parameter for _, parameter in ends],
        [inside[1][1]],
    ]
    assert [group["weight_decay"] for group in muon.param_groups] == [0.1, 0.1, 0.0]
    assert {group["initial_lr"] for group in muon.param_groups} == {2e-3}
    assert of_muon["adjust_lr_fn"] == "match_rms_adamw"


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr_scheduler_type": "linear"},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1},
    ],
)
def test_a_course_that_needs_the_number_of_steps_says_so(arguments: dict[str, Any]) -> None:
    with refuses(ValueError, *arguments):
        rates(1, total=-1, **arguments)


def test_options_that_the_course_does_not_take_are_refused() -> None:
    with refuses(ValueError, "lr_scheduler_type='linear'"):
        rates(1, lr_scheduler_type="linear", lr_scheduler_kwargs={"min_lr": 0.1})


def test_what_is_not_a_number_is_refused() -> None:
    with refuses(TypeError, "learning_rate='1e-3'"):
        Recipe(learning_rate=cast(Any, "1e-3"))
    with refuses(TypeError, "recipe=0.1"):
        Recipe.of(cast(Any, 0.1))


@pytest.mark.parametrize("rate", [np.float32(0.25), np.array(0.25), torch.tensor(0.25), Fraction(1, 4)])
def test_numbers_of_other_libraries_become_pythons(rate: Any) -> None:
    recipe = Recipe(learning_rate=rate, betas=(rate, 0.5), warmup_steps=cast(Any, np.int64(3)))
    assert recipe == Recipe(learning_rate=0.25, betas=(0.25, 0.5), warmup_steps=3)
    assert type(recipe.learning_rate) is type(recipe.betas[0]) is float
    assert type(recipe.warmup_steps) is int


@pytest.mark.parametrize("rate", [True, np.bool_(True), torch.tensor(True), torch.tensor([0.25]), 1j, None])
def test_other_values_are_not_numbers(rate: Any) -> None:
    with refuses(TypeError, "learning_rate="):
        Recipe(learning_rate=rate)
    with refuses(TypeError, "warmup_steps="):
        Recipe(warmup_steps=rate)


def test_a_recipe_is_read_back_from_plain_data() -> None:
    recipe = Recipe(learning_rate=1.0, betas=cast(Any, [0.8, 0.9]), lr_scheduler_type="linear")
    assert recipe.betas == (0.8, 0.9)
    assert Recipe.of(recipe.plain()) == Recipe.of(recipe) == recipe


def test_hyper_parameters_that_name_the_fields_of_a_recipe_alone_are_read() -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    module = MCoreGPT(vocab_size=100, seq_length=16, transformer=sizes)
    module.on_load_checkpoint({"hyper_parameters": {"vocab_size": 100, "learning_rate": 0.5, "optimizer": "sgd"}})
    assert module.recipe == Recipe(learning_rate=0.5, optimizer="sgd")
    assert module.hparams["recipe"] == module.recipe.plain()
    module.on_load_checkpoint({"hyper_parameters": {"recipe": {}, "learning_rate": 0.25}})
    assert module.recipe.learning_rate == 0.5


SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


class WithRate(MCoreGPT):
    """Saves its own arguments, as a user's subclass may."""

    def __init__(self, note: int, recipe: Recipe = Recipe()) -> None:
        super().__init__(vocab_size=100, seq_length=16, transformer=SIZES, recipe=recipe)
        self.save_hyperparameters()


class WithOtherName(MCoreGPT):
    """Names the recipe otherwise, and saves it by that name."""

    def __init__(self, course: Recipe) -> None:
        super().__init__(vocab_size=100, seq_length=16, transformer=SIZES, recipe=course)
        self.save_hyperparameters("course")


class WithAnyArguments(MCoreGPT):
    """Passes on what it does not know."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)


def modules_of(recipe: Recipe) -> list[MCoreGPT]:
    given: dict[str, Any] = {"vocab_size": 100, "seq_length": 16, "transformer": SIZES, "recipe": recipe}
    return [MCoreGPT(**given), WithRate(0, recipe), WithOtherName(recipe), WithAnyArguments(**given)]


@pytest.mark.filterwarnings("ignore")  # there are no weights in this file
@pytest.mark.parametrize("index", range(4))
def test_a_recipe_is_plain_data_in_checkpoints_and_for_loggers(index: int, tmp_path: Path) -> None:
    recipe = Recipe(learning_rate=0.5)
    module = modules_of(recipe)[index]
    save_hparams_to_yaml(str(tmp_path / "hparams.yaml"), module.hparams_initial)
    kept = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    name = "course" if isinstance(module, WithOtherName) else "recipe"
    assert kept[name] == recipe.plain()
    assert kept["vocab_size"] == 100
    path = tmp_path / "last.ckpt"
    torch.save({"hyper_parameters": dict(module.hparams), "state_dict": {}, **VERSION}, path)
    assert torch.load(path, weights_only=True)["hyper_parameters"][name] == recipe.plain()
    read = type(module).load_from_checkpoint(path, weights_only=True, strict=False)
    assert read.recipe == recipe
    file = str(tmp_path / "hparams.yaml")
    read = type(module).load_from_checkpoint(path, hparams_file=file, strict=False)
    assert read.recipe == recipe


VERSION = {"pytorch-lightning_version": pl.__version__}


def test_fields_of_a_recipe_of_an_old_checkpoint_are_refused_where_a_constructor_takes_anything(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    arguments = {"vocab_size": 100, "seq_length": 16, "transformer": {}, "learning_rate": 0.5, "betas": (0.9, 0.95)}
    torch.save({"hyper_parameters": arguments, "state_dict": {}, **VERSION}, path)
    with refuses(ValueError, "was saved when learning_rate was"):
        WithAnyArguments.load_from_checkpoint(path)


def test_a_field_of_the_recipe_given_alone_when_a_checkpoint_is_loaded_is_refused() -> None:
    with refuses(ValueError, "recipe=Recipe(learning_rate=0.5"):
        MCoreGPT.load_from_checkpoint("last.ckpt", learning_rate=0.5)
