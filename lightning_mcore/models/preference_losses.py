# SPDX-License-Identifier: Apache-2.0
"""The losses of preference training, as functions of one log-probability per answer.

Notation: ``lp`` is the log-probability of an answer given its prompt, the sum over its tokens; ``ref`` is the same
under the reference model; ``lp - ref`` is the answer's *log ratio*, and ``beta * (lp - ref)`` its *reward*. ``delta``
is the chosen answer's log ratio minus the rejected one's.

All tensors are floats of shape [n], one value per pair (for KTO: per answer), and so are the results: nothing is summed
or averaged here. Pass fp32 or fp64, because ``delta`` is a small difference of large numbers. The functions know
nothing about layouts; ``preference.py`` calls them.

Sources: Rafailov et al. 2023 (DPO), Mitchell 2023 (cDPO), Chowdhury et al. 2024 (robust), Zhao et al. 2023 (SLiC, the
hinge), Azar et al. 2023 (IPO), Hong et al. 2024 (ORPO), Meng et al. 2024 (SimPO), Ethayarajh et al. 2024 (KTO), Jung et
al. 2024 (BCO), Liu et al. 2024 (LD-DPO).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_mcore.config.preference import Preference


def sigmoid_loss(delta: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return DPO's loss, ``-log sigmoid(beta * delta)``; with ``label_smoothing``, cDPO's."""
    # delta 5 and beta 0.1 are a margin of 0.5: the loss is 0.474, and 0.524 with a smoothing of 0.1
    margin = beta * delta
    if not label_smoothing:
        return -logsigmoid(margin)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def robust_loss(delta: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return an unbiased estimate of DPO's loss, from pairs with the wrong order at a probability below 0.5."""
    margin = beta * delta
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def hinge_loss(delta: Tensor, beta: float) -> Tensor:
    """Return ``max(0, 1 - beta * delta)``, with ``delta`` from sums over an answer's tokens."""
    return torch.relu(1 - beta * delta)


def ipo_loss(delta: Tensor, beta: float) -> Tensor:
    """Return ``(delta - 1 / (2 * beta)) ** 2``, with ``delta`` from means over an answer's tokens."""
    return (delta - 1 / (2 * beta)) ** 2


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return ORPO's ``-log sigmoid`` of the log of the ratio of two answers' odds, ``p / (1 - p)``.

    ``chosen`` and ``rejected`` are mean log-probabilities per token. ORPO's whole loss is ``beta`` times this, minus
    ``chosen``.
    """
    # An answer of probability 1 has infinite odds: it counts as one just below 1
    least = -torch.finfo(chosen.dtype).eps
    chosen, rejected = chosen.clamp(max=least), rejected.clamp(max=least)
    # log(1 - p) from log p: expm1 is exact where p is near 1
    odds = (chosen - rejected) - (torch.log(-torch.expm1(chosen)) - torch.log(-torch.expm1(rejected)))
    return -logsigmoid(odds)


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """Return ``-log sigmoid(beta * (chosen - rejected) - gamma)``, from mean log-probabilities per token."""
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def kto_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return KTO's loss of single answers: ``1 - sigmoid`` of how far the reward is on the right side of the mean.

    ``log_ratio`` comes from sums, ``desirable`` is [n] bool, and ``kl`` estimates the divergence from the reference, a
    scalar without gradient.
    """
    good = desirable.to(log_ratio)
    weight = desirable_weight * good + undesirable_weight * (1 - good)
    return weight * torch.sigmoid(beta * (1 - 2 * good) * (log_ratio - kl))  # 1 - sigmoid(x) is sigmoid(-x)


def bco_term(chosen_reward: Tensor, rejected_reward: Tensor, baseline: Tensor | float) -> Tensor:
    """Return BCO's term, which separates chosen and rejected answers by a mean reward.

    The rewards are ``beta`` times log ratios; ``baseline`` is the mean of all rewards so far, a scalar without
    gradient.
    """
    return -logsigmoid(chosen_reward - baseline) - logsigmoid(baseline - rejected_reward)


def reward_model_loss(chosen: Tensor, rejected: Tensor, center: float = 0.0) -> Tensor:
    """Return ``-log sigmoid(chosen - rejected) + center * (chosen + rejected) ** 2``, from scores."""
    return -logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2


OF_PAIRS: Mapping[str, Callable[[Preference, Tensor, Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda given, chosen, rejected, delta: sigmoid_loss(delta, given.beta, given.label_smoothing),
    "robust": lambda given, chosen, rejected, delta: robust_loss(delta, given.beta, given.label_smoothing),
    "hinge": lambda given, chosen, rejected, delta: hinge_loss(delta, given.beta),
    "ipo": lambda given, chosen, rejected, delta: ipo_loss(delta, given.beta),
    "orpo": lambda given, chosen, rejected, delta: given.beta * odds_ratio_loss(chosen, rejected) - chosen,
    "simpo": lambda given, chosen, rejected, delta: simpo_loss(chosen, rejected, given.beta, given.simpo_gamma),
}
"""The losses of pairs, by name, each [n].

They take the settings, the log-probabilities of the chosen and of the rejected answers (each [n], sums or means), and
how much more the model prefers the chosen answers than the reference does (``delta``, [n]).
"""
