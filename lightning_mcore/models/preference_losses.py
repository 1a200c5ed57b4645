# SPDX-License-Identifier: Apache-2.0
"""The losses of preference training, as functions of one log-probability for each answer.

Notation: ``lp`` is the log-probability of an answer given its prompt, the sum over its tokens; ``ref`` is that of the
reference model; ``lp - ref`` is the answer's *log ratio*, and ``beta * (lp - ref)`` its *reward*. ``delta`` is the log
ratio of the chosen answer less that of the rejected one.

All tensors are floats of the shape [n], one value for each pair (for KTO: each answer), and so are the results: nothing
is summed or averaged here. Give fp32 or fp64, because ``delta`` is a small difference of large numbers. The functions
know nothing about layouts.

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
    """Return the loss of DPO, ``-log sigmoid(beta * delta)``; with label smoothing that of cDPO.

    Args:
        delta: [n], of sums.
        beta: Scale of the rewards.
        label_smoothing: Probability that a pair has the wrong order.
    """
    margin = beta * delta
    if not label_smoothing:
        return -logsigmoid(margin)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def robust_loss(delta: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return an unbiased estimate, from pairs in doubtful order, of the loss of DPO on pairs in the right order.

    Args:
        delta: [n], of sums.
        beta: Scale of the rewards.
        label_smoothing: Probability that a pair has the wrong order, below 0.5.
    """
    margin = beta * delta
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def hinge_loss(delta: Tensor, beta: float) -> Tensor:
    """Return ``max(0, 1 - beta * delta)``; ``delta`` [n] is of sums."""
    return torch.relu(1 - beta * delta)


def ipo_loss(delta: Tensor, beta: float) -> Tensor:
    """Return ``(delta - 1 / (2 * beta)) ** 2``; ``delta`` [n] is of means over the tokens of an answer."""
    return (delta - 1 / (2 * beta)) ** 2


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return ORPO's ``-log sigmoid`` of the log of the ratio of the odds ``p / (1 - p)`` of two answers.

    ORPO's whole loss is ``beta`` times this, less ``chosen``.

    Args:
        chosen: [n] mean log-probability of a token of the chosen answer. An answer of probability 1, whose odds are
            infinite, counts as one just below.
        rejected: The same of the rejected answer.
    """
    least = -torch.finfo(chosen.dtype).eps
    chosen, rejected = chosen.clamp(max=least), rejected.clamp(max=least)
    # log(1 - p) from log p: expm1 is exact where p is near 1
    odds = (chosen - rejected) - (torch.log(-torch.expm1(chosen)) - torch.log(-torch.expm1(rejected)))
    return -logsigmoid(odds)


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """Return ``-log sigmoid(beta * (chosen - rejected) - gamma)``.

    Args:
        chosen: [n] mean log-probability of a token of the chosen answer.
        rejected: The same of the rejected answer.
        beta: Scale of the rewards.
        gamma: The margin between the rewards that is asked for.
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def kto_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return KTO's loss of single answers: ``1 - sigmoid`` of how far the reward is on the right side of the mean one.

    Args:
        log_ratio: [n], of sums.
        desirable: [n] bool.
        kl: Estimate of the divergence from the reference, a scalar without gradient.
        beta: Scale of the rewards.
        desirable_weight: Weight of a desirable answer.
        undesirable_weight: Weight of an undesirable one.
    """
    good = desirable.to(log_ratio)
    weight = desirable_weight * good + undesirable_weight * (1 - good)
    return weight * torch.sigmoid(beta * (1 - 2 * good) * (log_ratio - kl))  # 1 - sigmoid(x) is sigmoid(-x)


def bco_term(chosen_reward: Tensor, rejected_reward: Tensor, baseline: Tensor | float) -> Tensor:
    """Return BCO's term, which tells chosen and rejected answers from a mean reward.

    Args:
        chosen_reward: [n] ``beta`` times the log ratio of the chosen answer.
        rejected_reward: The same of the rejected answer.
        baseline: Mean of all rewards so far, a scalar without gradient.
    """
    return -logsigmoid(chosen_reward - baseline) - logsigmoid(baseline - rejected_reward)


def reward_model_loss(chosen: Tensor, rejected: Tensor, center: float = 0.0) -> Tensor:
    """Return the loss of a reward model, ``-log sigmoid(chosen - rejected) + center * (chosen + rejected) ** 2``.

    Args:
        chosen: [n] score of the chosen answer.
        rejected: The same of the rejected answer.
        center: Weight of the second term, which keeps the scores around 0.
    """
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
by how much the model prefers the chosen answers more than the reference does (``delta``, [n]).
"""
