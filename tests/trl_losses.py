# SPDX-License-Identifier: Apache-2.0
"""Writes what the loss functions of TRL give, for ``tests/unit/models/test_preference_losses.py`` to compare with.

It calls the functions of TRL's trainers themselves, with an object in place of the trainer that has the attributes that
they read. TRL 0.24.0 is the release that LLaMA-Factory uses; it needs transformers 4, so run this in an environment of
its own:

    pip install trl==0.24.0 "transformers<5"
    python -m tests.trl_losses

IPO, ORPO and SimPO get means over the tokens of an answer, as LLaMA-Factory gives them to TRL.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).parent / "unit" / "models" / "trl_losses.json"

INPUTS: dict[str, list[Any]] = {  # eighths, so that means in fp32 are exact
    "logps": [
        [-21.125, -14.5],
        [-3.5, -9.25],
        [-7.0, -7.0],
        [-0.75, -62.875],
        [-40.25, -2.125],
        [-12.625, -30.5],
        [-5.375, -4.875],
        [-18.0, -26.75],
    ],
    "reference": [
        [-20.5, -15.75],
        [-5.125, -6.0],
        [-7.0, -7.0],
        [-9.375, -31.25],
        [-11.5, -8.625],
        [-13.25, -29.0],
        [-4.125, -6.5],
        [-25.5, -19.875],
    ],
    "lengths": [[9, 5], [3, 4], [2, 7], [1, 40], [17, 3], [6, 11], [2, 3], [8, 8]],
    "desirable": [True, False, False, True, True, False, True, True],
}
"""[n, 2] log-probabilities of chosen and rejected answers, for KTO of examples and partners; and tags of examples."""

Result = tuple[Tensor, Sequence[Tensor]]  # losses and rewards


def _trainer(**attributes: Any) -> Any:
    """Return what stands in for a trainer."""
    accelerator = SimpleNamespace(
        device="cpu", use_distributed=False, gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    return SimpleNamespace(
        accelerator=accelerator,
        **{"reference_free": False, "f_divergence_type": None, "label_smoothing": 0.0} | attributes,
    )


def _columns(values: Tensor) -> tuple[Tensor, Tensor]:
    chosen, rejected = values.unbind(1)
    return chosen, rejected


def _dpo(kind: str, **attributes: Any) -> Callable[[Tensor, dict[str, Tensor]], Result]:
    """Return a loss of ``DPOTrainer``."""
    from trl import DPOTrainer

    def losses(logps: Tensor, inputs: dict[str, Tensor]) -> Result:
        reference = inputs["reference"]
        if kind == "ipo":
            logps, reference = logps / inputs["lengths"], reference / inputs["lengths"]
        found, *rewards = DPOTrainer.dpo_loss(_trainer(**attributes), *_columns(logps), *_columns(reference), kind)
        return found, rewards

    return losses


def _with_bco(weight: float, beta: float) -> Callable[[Tensor, dict[str, Tensor]], Result]:
    """Return DPO's loss with BCO's term, added as LLaMA-Factory adds it."""
    from trl.trainer.utils import RunningMoments

    def losses(logps: Tensor, inputs: dict[str, Tensor]) -> Result:
        found, rewards = _dpo("sigmoid", beta=beta)(logps, inputs)
        term, _ = _dpo("bco_pair", beta=beta, running=RunningMoments(_trainer().accelerator))(logps, inputs)
        return (found + weight * term) / (1 + weight), rewards

    return losses


def _orpo(beta: float) -> Callable[[Tensor, dict[str, Tensor]], Result]:
    """Return ORPO's loss: the term of ``ORPOTrainer``, added to the loss of the chosen answer."""
    from trl import ORPOTrainer

    def losses(logps: Tensor, inputs: dict[str, Tensor]) -> Result:
        chosen, rejected = _columns(logps / inputs["lengths"])
        term, *rewards = ORPOTrainer.odds_ratio_loss(_trainer(beta=beta), chosen, rejected)
        return -chosen - term, rewards[:2]

    return losses


def _simpo(beta: float, gamma: float) -> Callable[[Tensor, dict[str, Tensor]], Result]:
    """Return SimPO's loss, which is one of ``CPOTrainer``."""
    from trl import CPOTrainer

    def losses(logps: Tensor, inputs: dict[str, Tensor]) -> Result:
        trainer = _trainer(beta=beta, simpo_gamma=gamma, loss_type="simpo", alpha=0.0)
        found, *rewards = CPOTrainer.cpo_loss(trainer, *_columns(logps / inputs["lengths"]))
        return found, rewards

    return losses


def _kto(beta: float, desirable: float, undesirable: float) -> Callable[[Tensor, dict[str, Tensor]], Result]:
    """Return the loss of ``KTOTrainer``, in the order of the examples."""
    from trl import KTOTrainer

    def losses(logps: Tensor, inputs: dict[str, Tensor]) -> Result:
        good = inputs["desirable"]
        trainer = _trainer(
            beta=beta, calculate_KL=True, loss_type="kto", desirable_weight=desirable, undesirable_weight=undesirable
        )
        given = [(values[good, 0], values[~good, 0], values[:, 1]) for values in (logps, inputs["reference"])]
        sorted_losses, *rewards, _ = KTOTrainer.kto_loss(trainer, *given[0], *given[1])
        order = torch.cat([good.nonzero(), (~good).nonzero()]).squeeze(1)
        return torch.zeros_like(sorted_losses).index_copy(0, order, sorted_losses), rewards

    return losses


def _reward(center: float) -> Callable[[Tensor, dict[str, Tensor]], Result]:
    """Return the loss of ``RewardTrainer``, which gives means, of one pair at a time; its scores are the rewards."""
    from trl import RewardTrainer

    def losses(logps: Tensor, inputs: dict[str, Tensor]) -> Result:
        def of_pair(scores: Tensor) -> Tensor:
            trainer = _trainer(
                model=torch.nn.Identity(),
                args=SimpleNamespace(center_rewards_coefficient=center),
                _metrics=defaultdict(lambda: defaultdict(list)),
                _total_train_tokens=0,
            )
            batch = {"attention_mask": torch.ones(2, 1)}
            found: Tensor = RewardTrainer.compute_loss(
                trainer, lambda **_: SimpleNamespace(logits=scores[:, None]), batch
            )
            return found

        return torch.stack([of_pair(scores) for scores in logps]), _columns(logps.detach())

    return losses


def cases() -> dict[str, tuple[dict[str, Any], Callable[[Tensor, dict[str, Tensor]], Result]]]:
    """Return the settings of ``Preference`` and the function of TRL of each case."""
    smooth = {"beta": 0.3, "label_smoothing": 0.2}
    return {
        "sigmoid": ({"beta": 0.3}, _dpo("sigmoid", beta=0.3)),
        "cdpo": (smooth, _dpo("sigmoid", **smooth)),
        "robust": ({"loss": "robust", **smooth}, _dpo("robust", **smooth)),
        "hinge": ({"loss": "hinge", "beta": 0.3}, _dpo("hinge", beta=0.3)),
        "ipo": ({"loss": "ipo", "beta": 0.3}, _dpo("ipo", beta=0.3)),
        "bco": ({"beta": 0.25, "bco_weight": 0.7}, _with_bco(0.7, 0.25)),
        "orpo": ({"loss": "orpo", "beta": 0.3}, _orpo(0.3)),
        "simpo": ({"loss": "simpo", "beta": 2.0, "simpo_gamma": 0.8}, _simpo(2.0, 0.8)),
        "kto": (
            {"loss": "kto", "beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6},
            _kto(0.3, 1.3, 0.6),
        ),
        "reward": ({"loss": "reward", "center_weight": 0.01}, _reward(0.01)),
    }


def main() -> None:
    """Write the file."""
    import transformers
    import trl

    inputs = {name: torch.tensor(values) for name, values in INPUTS.items()}
    inputs |= {name: inputs[name].double() for name in ("logps", "reference", "lengths")}
    results = {}
    for name, (settings, function) in cases().items():
        logps = inputs["logps"].clone().requires_grad_()
        losses, rewards = function(logps, inputs)
        (derivatives,) = torch.autograd.grad(losses.sum(), logps)
        means = [float(values.mean()) for values in rewards]
        results[name] = {
            "preference": settings,
            "losses": losses.tolist(),
            "derivatives": derivatives.tolist(),
            "rewards": means,
        }
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    found = {"versions": versions, **INPUTS}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    lines.append(
        '  "results": {\n'
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in results.items())
        + "\n  }"
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
