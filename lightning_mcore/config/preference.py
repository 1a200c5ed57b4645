# SPDX-License-Identifier: Apache-2.0
"""The settings of training on preferences, as plain data: the loss, its parameters and its reference model.

``models/preference_losses.py`` has the losses, ``models/preference.py`` the module that trains with them. Files and
hyper-parameters hold them as a dict, which :meth:`Preference.of` reads.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.rules.model import weighted_by_tokens
from lightning_mcore.config.value_checks import Settings, choices, require_choice, require_flag, require_number

PreferenceLoss: TypeAlias = Literal["sigmoid", "robust", "hinge", "ipo", "orpo", "simpo", "kto", "reward"]
"""The losses. All but ``kto`` compare the two answers of a pair; ``reward`` trains a reward model."""


@dataclass(frozen=True)
class LossKind:
    """What a loss is computed from."""

    # "pairs": log-probabilities of two answers; "examples": of one answer; "scores": a reward model's for two answers
    reads: Literal["pairs", "examples", "scores"] = "pairs"
    needs_reference: bool = True
    is_of_means: bool = False  # mean log-probability of an answer's tokens, not their sum
    settings: tuple[str, ...] = ()  # besides the settings of all losses of its kind

    def uses(self, setting: str) -> bool:
        """Return whether the loss uses a setting of ``Preference``."""
        if setting in ("reference", "precompute_reference"):
            return self.needs_reference
        if setting == "beta":
            return self.reads != "scores"
        if setting in ("sft_weight", "ld_alpha"):
            return self.reads == "pairs"
        return setting == "loss" or setting in self.settings


LOSSES: Mapping[PreferenceLoss, LossKind] = {
    "sigmoid": LossKind(settings=("label_smoothing", "bco_weight")),
    "robust": LossKind(settings=("label_smoothing", "bco_weight")),
    "hinge": LossKind(settings=("bco_weight",)),
    "ipo": LossKind(is_of_means=True, settings=("bco_weight",)),
    "orpo": LossKind(needs_reference=False, is_of_means=True),
    "simpo": LossKind(needs_reference=False, is_of_means=True, settings=("simpo_gamma",)),
    "kto": LossKind("examples", settings=("desirable_weight", "undesirable_weight")),
    "reward": LossKind("scores", needs_reference=False, settings=("center_weight",)),
}
"""A row for each loss; ``models/preference_losses.py`` has the formulas."""

_OTHER_NAMES = {
    "kto_pair": "'kto', whose answers are tagged instead of paired",
    "dpo": "'sigmoid'",
    "cdpo": "'sigmoid' with label_smoothing",
    "slic": "'hinge'",
    "rm": "'reward'",
    "reward_model": "'reward'",
}


def used_by(setting: str) -> tuple[PreferenceLoss, ...]:
    """Return the losses that use a setting."""
    return tuple(loss for loss, kind in LOSSES.items() if kind.uses(setting))


@dataclass(frozen=True)
class Preference(Settings):
    """How a model learns which of two answers is the better one.

    Args:
        loss: ``"sigmoid"`` (DPO; with ``label_smoothing`` cDPO), ``"robust"``, ``"hinge"``, ``"ipo"``, ``"orpo"`` or
            ``"simpo"`` for pairs of answers; ``"kto"`` for single answers that are desirable or not; ``"reward"`` for a
            reward model, whose output layer gives each answer a score.
        beta: How strongly the loss keeps the model close to the reference; for SimPO the scale of the rewards, for ORPO
            the weight of the odds ratio.
        label_smoothing: Probability that a pair has the wrong order, 0 to 0.5; for ``"sigmoid"`` and ``"robust"``.
        simpo_gamma: The margin between the rewards that SimPO aims for.
        desirable_weight: Weight of a desirable answer in KTO.
        undesirable_weight: Weight of an undesirable answer in KTO.
        center_weight: Weight of the squared sum of the two scores, which keeps a reward model's scores around 0.
        sft_weight: Weight of the negative mean log-probability of the chosen answer's tokens, which is added to the
            loss of its pair.
        bco_weight: Weight of BCO's term, which compares the rewards of both answers with the mean reward so far; the
            loss becomes ``(loss + bco_weight * term) / (1 + bco_weight)``.
        ld_alpha: Weight, 0 to 1, of the longer answer's tokens beyond the length of the shorter one (LD-DPO), only for
            the trained model, and in its supervised loss too; None for 1.
        reference: Folder, hub name or checkpoint of the reference model; None for the model as it is when training
            begins, which with LoRA is the model without its adapters.
        precompute_reference: True computes the reference's log-probabilities once, before training, and keeps them with
            the data. False computes them in each step with the adapters switched off. None computes them before
            training unless the model's adapters can be switched off.

    Raises:
        ValueError: A value is out of range, or the loss does not use a setting.
        TypeError: A value has the wrong type.

    Examples:
        >>> from lightning_mcore import Preference
        >>> dpo = Preference(beta=0.05, sft_weight=0.2)
        >>> kto = Preference("kto", desirable_weight=1.5)
    """

    argument = "preference"
    loss: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_weight: float = 0.0
    sft_weight: float = 0.0
    bco_weight: float = 0.0
    ld_alpha: float | None = None
    reference: str | None = None
    precompute_reference: bool | None = None

    def __post_init__(self) -> None:
        if known := _OTHER_NAMES.get(str(self.loss)):
            raise ValueError(f"loss={self.loss!r} is unknown; did you mean {known}?")
        require_choice("loss", self.loss, PreferenceLoss)
        require_flag("precompute_reference", self.precompute_reference, or_none=True)
        if self.reference is not None and not isinstance(self.reference, str):
            raise TypeError(f"reference={self.reference!r} is not the path or name of a model; give one, or None")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Every float setting, and ld_alpha, whose default is None
            if isinstance(field.default, float) or (field.name == "ld_alpha" and value is not None):
                require_number(field.name, value, at_least=0)
            if value != field.default and not self.kind.uses(field.name):
                raise ValueError(
                    f"{field.name}={value!r} has no meaning for the loss {self.loss!r}; leave it out, or choose"
                    f" {choices(map(repr, used_by(field.name)))}"
                )
        if self.beta == 0:
            raise ValueError("beta=0 leaves nothing to learn; choose a number above 0")
        # The robust loss divides by 1 - 2 * label_smoothing.
        if self.label_smoothing > 0.5 or (self.loss == "robust" and self.label_smoothing == 0.5):
            below = "or more, below 0.5" if self.loss == "robust" else "to 0.5"
            raise ValueError(f"label_smoothing={self.label_smoothing} is too large; choose 0 {below}")
        if self.ld_alpha is not None and self.ld_alpha > 1:
            raise ValueError(f"ld_alpha={self.ld_alpha} is too large; choose 0 to 1")
        if self.reference is not None and self.precompute_reference is False:
            raise ValueError(
                f"reference={self.reference!r} with precompute_reference=False would need two models in memory; leave"
                " precompute_reference out"
            )

    @property
    def kind(self) -> LossKind:
        """What the loss is computed from."""
        return LOSSES[self.loss]

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.kind.needs_reference

    @property
    def gives_scores(self) -> bool:
        """Whether the model is a reward model, whose output layer gives each answer a score."""
        return self.kind.reads == "scores"


def can_be_off(lora: LoRA | None) -> bool:
    """Return whether a model with its adapters switched off is the one that training began with."""
    return lora is not None and not lora.modules_to_save


def faults_with_model(preference: Preference, lora: LoRA | None, config: Any) -> Iterator[str]:
    """Yield a sentence for each setting that a model with such a config does not allow."""
    weighted = weighted_by_tokens(config)
    if config.calculate_per_token_loss and weighted:
        yield (
            f"calculate_per_token_loss=True with {weighted[0]}={getattr(config, weighted[0])}: the loss is a mean"
            " over pairs, and Megatron weights that one by tokens; leave calculate_per_token_loss out"
        )
    if preference.precompute_reference is False and not can_be_off(lora):
        given = "no LoRA adapters" if lora is None else "LoRA with modules_to_save, which stay as trained"
        yield (
            f"precompute_reference=False with {given}: switching adapters off would not give the reference; leave"
            " it out"
        )
    if lora is None or lora.quantization is None or not preference.needs_reference:
        return
    if preference.reference is not None:
        yield (
            f"reference={preference.reference!r} with quantization='nf4': weights in 4 bits cannot make room for those"
            " of another model; leave reference out, and the model without its adapters is the reference"
        )
    if lora.modules_to_save:
        yield (
            f"modules_to_save={lora.modules_to_save} with quantization='nf4': the reference is the model without its"
            " adapters, and these modules stay as trained; leave modules_to_save out"
        )
