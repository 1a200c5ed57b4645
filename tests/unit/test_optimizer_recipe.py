# SPDX-License-Identifier: Apache-2.0
"""The optimizer of ``MCoreGPT`` and the course of its learning rate, by name."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_mcore import MCoreGPT
from lightning_mcore.models.recipe import build_recipe

TRANSFORMER = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


def settings(**arguments: Any) -> dict[str, Any]:
    """Return the settings of a module, which its constructor has checked."""
    return dict(MCoreGPT(vocab_size=100, seq_length=16, transformer=TRANSFORMER, **arguments).hparams)


def rates(steps: int, total: float = 10, **arguments: Any) -> list[float]:
    parameters = list(nn.Linear(2, 2).named_parameters())
    trainer = cast(Any, SimpleNamespace(estimated_stepping_batches=total))
    recipe = cast(dict[str, Any], build_recipe(parameters, settings(learning_rate=1.0, **arguments), trainer))
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


def test_a_warm_up_below_one_is_a_share_of_all_steps_rounded_up() -> None:
    assert rates(5, lr_scheduler_type="constant_with_warmup", warmup_steps=0.25)[:4] == pytest.approx(
        [0, 1 / 3, 2 / 3, 1]
    )
    assert rates(3, warmup_steps=0.2) == rates(3, warmup_steps=2)


def test_sgd_and_its_momentum_and_the_eps_of_adamw() -> None:
    trainer = cast(Any, SimpleNamespace(estimated_stepping_batches=10))
    parameters = list(nn.Linear(2, 2).named_parameters())
    sgd = cast(Any, build_recipe(parameters, settings(optimizer="sgd", sgd_momentum=0.5), trainer))["optimizer"]
    assert type(sgd) is torch.optim.SGD
    assert [group["momentum"] for group in sgd.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in sgd.param_groups] == [0.1, 0.0]
    adamw = cast(Any, build_recipe(parameters, settings(eps=1e-6), trainer))["optimizer"]
    assert type(adamw) is torch.optim.AdamW
    assert adamw.defaults["eps"] == 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "lion"}, "optimizer='lion' is not available; choose one of"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type='cosin' is not available; choose one of"),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-5}}, "lr_scheduler_kwargs needs lr_scheduler_type"),
        ({"lr_scheduler_type": "cosine", "min_learning_rate": 1e-5}, "min_learning_rate=1e-05 belongs to the course"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "which has no warm-up"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5 is neither"),
    ],
)
def test_what_contradicts_itself_is_refused_in_the_constructor(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type='linear' needs it; set Trainer"),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1},
            "warmup_steps=0.1 is a share of the steps",
        ),
    ],
)
def test_a_course_that_needs_the_number_of_steps_says_so(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rates(1, total=-1, **arguments)


def test_options_that_the_course_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lr_scheduler_type='linear' with lr_scheduler_kwargs=.*min_lr"):
        rates(1, lr_scheduler_type="linear", lr_scheduler_kwargs={"min_lr": 0.1})
