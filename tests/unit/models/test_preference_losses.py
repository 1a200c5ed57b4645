# SPDX-License-Identifier: Apache-2.0
"""Each loss of preference training and its derivatives, in fp64, against the same formula written in another way.

And against what TRL's own functions gave: ``tests/trl_losses.py`` writes that file.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_mcore import MCorePreference
from lightning_mcore.config.preference import LOSSES, PreferenceLoss
from lightning_mcore.models import preference_losses as losses
from lightning_mcore.models.preference import _Answers

BETA = 0.3


def sums() -> tuple[Tensor, Tensor]:
    """Return log ratios of chosen and rejected answers, on both sides of every kink, [7]."""
    return (
        torch.tensor([-30.0, -2.0, -0.5, 0.0, 0.4, 3.0, 40.0], dtype=torch.float64, requires_grad=True),
        torch.tensor([5.0, 1.0, -0.5, 0.0, -3.1, 0.2, -20.0], dtype=torch.float64, requires_grad=True),
    )


def means() -> tuple[Tensor, Tensor]:
    """Return mean log-probabilities of chosen and rejected answers, [5]."""
    return (
        torch.tensor([-8.0, -2.0, -0.7, -0.1, -1e-3], dtype=torch.float64, requires_grad=True),
        torch.tensor([-0.05, -2.0, -1.1, -6.0, -0.3], dtype=torch.float64, requires_grad=True),
    )


def softplus(x: Tensor) -> Tensor:
    """Return ``log(1 + e^x)``, which is ``-log sigmoid(-x)``."""
    return torch.logaddexp(x, torch.zeros_like(x))


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    p, q = chosen.exp(), rejected.exp()
    return torch.log1p(q * (1 - p) / (p * (1 - q)))


Pairs = Callable[[Tensor, Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], Pairs, Pairs]] = {
    "sigmoid": (sums, lambda c, r: losses.sigmoid_loss(c - r, BETA), lambda c, r: softplus(BETA * (r - c))),
    "cdpo": (
        sums,
        lambda c, r: losses.sigmoid_loss(c - r, BETA, 0.2),
        lambda c, r: 0.8 * softplus(BETA * (r - c)) + 0.2 * softplus(BETA * (c - r)),
    ),
    "robust": (
        sums,
        lambda c, r: losses.robust_loss(c - r, BETA, 0.2),
        # softplus(-x) = softplus(x) - x
        lambda c, r: softplus(BETA * (r - c)) - 0.2 / 0.6 * BETA * (c - r),
    ),
    "hinge": (
        sums,
        lambda c, r: losses.hinge_loss(c - r, BETA),
        lambda c, r: (1 - BETA * (c - r) + (1 - BETA * (c - r)).abs()) / 2,
    ),
    "ipo": (
        sums,
        lambda c, r: losses.ipo_loss(c - r, BETA),
        lambda c, r: (c - r).square() - (c - r) / BETA + 1 / (4 * BETA**2),
    ),
    "orpo": (means, losses.odds_ratio_loss, odds_ratio),
    "simpo": (
        means,
        lambda c, r: losses.simpo_loss(c, r, BETA, 0.5),
        lambda c, r: softplus(-BETA * (c - r - 0.5 / BETA)),
    ),
    "bco": (
        sums,
        lambda c, r: losses.bco_term(BETA * c, BETA * r, 0.7),
        lambda c, r: softplus(0.7 - BETA * c) + softplus(BETA * r - 0.7),
    ),
    "reward model": (
        sums,
        lambda c, r: losses.reward_model_loss(c, r, 0.01),
        lambda c, r: softplus(r - c) + 0.01 * (c.square() + 2 * c * r + r.square()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_derivatives_are_those_of_its_formula(name: str) -> None:
    inputs, ours, formula = CASES[name]
    values, gradients = [], []
    for function in (ours, formula):
        given = inputs()
        value = function(*given)
        values.append(value)
        gradients.append(torch.stack(torch.autograd.grad(value.sum(), given)))
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_every_loss_has_a_row_and_every_loss_of_pairs_a_formula() -> None:
    assert tuple(LOSSES) == get_args(PreferenceLoss)
    assert set(losses.OF_PAIRS) == {name for name, kind in LOSSES.items() if kind.reads == "pairs"}


def test_kto_weighs_both_kinds_and_holds_the_divergence_constant() -> None:
    ratios, _ = sums()
    desirable = torch.tensor([True, False, True, False, False, True, True])
    value = losses.kto_loss(ratios, desirable, 0.6, BETA, 2.0, 0.7)
    shifted = BETA * (ratios - 0.6)
    expected = torch.where(desirable, 2 / (1 + shifted.exp()), 0.7 / (1 + (-shifted).exp()))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    (own,) = torch.autograd.grad(value.sum(), ratios, retain_graph=True)
    (other,) = torch.autograd.grad(expected.sum(), ratios)
    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def test_the_first_loss_is_log_2_and_1_over_4_beta_squared() -> None:
    same = torch.zeros(3)
    assert losses.sigmoid_loss(same, 0.1).tolist() == pytest.approx([0.6931471805599453] * 3, abs=1e-7)
    assert losses.ipo_loss(same.double(), 0.1).tolist() == pytest.approx([25.0] * 3, abs=1e-12)


def test_the_odds_ratio_is_finite_for_answers_of_probability_near_1() -> None:
    sure = torch.tensor([0.0, -1e-7, -5.0], requires_grad=True)
    value = losses.odds_ratio_loss(sure, torch.tensor([-1.0, -1.0, 0.0]))
    (gradient,) = torch.autograd.grad(value.sum(), sure)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


OF_TRL: dict[str, Any] = json.loads(Path(__file__).with_name("trl_losses.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", OF_TRL["results"])
def test_a_loss_its_derivatives_and_rewards_are_those_of_trl(name: str) -> None:
    wanted = OF_TRL["results"][name]
    transformer = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    module = MCorePreference(32, 16, transformer, preference=wanted["preference"])
    alone: Any = SimpleNamespace(strategy=SimpleNamespace(reduce=lambda values, **_: values))
    module.trainer = alone
    logps, reference, lengths = (torch.tensor(OF_TRL[key]).double() for key in ("logps", "reference", "lengths"))
    has_reference = module.preference.needs_reference
    answers = _Answers(
        logps.requires_grad_(), lengths, reference if has_reference else None, torch.ones(len(logps)).bool()
    )
    if name == "kto":
        module.log = lambda *_, **__: None  # type: ignore[method-assign]
        each, values = module._kto(answers, torch.tensor(OF_TRL["desirable"]).repeat_interleave(2), "val_")
    else:
        each, values = (module._rewards if name == "reward" else module._pairs)(answers)
    (derivatives,) = torch.autograd.grad(each.sum(), logps)
    rewards = torch.stack([values[f"rewards/{kind}"][0].detach() for kind in ("chosen", "rejected")])
    for found, key in ((each.detach(), "losses"), (derivatives, "derivatives"), (rewards, "rewards")):
        torch.testing.assert_close(found, torch.tensor(wanted[key], dtype=torch.float64), rtol=1e-12, atol=1e-12)
