# SPDX-License-Identifier: Apache-2.0
"""The keys of ``stage: dpo``, ``kto`` and ``rm`` of a LLaMA-Factory file, as settings of ``config/preference.py``.

``rules.py`` and ``run.py`` call this file; ``pairs.py`` reads the datasets of these stages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_mcore.arguments.fields import option
from lightning_mcore.config.preference import Preference, used_by
from lightning_mcore.config.value_checks import choices

PREFERENCE_STAGES = ("dpo", "kto", "rm")
PreferenceLossKey = Literal["sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo"]

_SETTINGS_BY_STAGE: dict[str, dict[str, str]] = {
    "dpo": {
        "pref_loss": "loss",
        "pref_beta": "beta",
        "pref_ftx": "sft_weight",
        "pref_bco_weight": "bco_weight",
        "dpo_label_smoothing": "label_smoothing",
        "simpo_gamma": "simpo_gamma",
        "ld_alpha": "ld_alpha",
        "ref_model": "reference",
    },
    "kto": {
        "pref_beta": "beta",
        "kto_chosen_weight": "desirable_weight",
        "kto_rejected_weight": "undesirable_weight",
        "ref_model": "reference",
    },
    "rm": {},
}
"""The keys of each stage, and the settings that they become."""
_LARGEST = {"dpo_label_smoothing": 0.5, "ld_alpha": 1.0}


@dataclass(frozen=True)
class PreferenceKeys:
    """The keys for learning from preferences; the defaults are LLaMA-Factory's."""

    pref_beta: float = option("How strongly the loss keeps the model close to the reference.", 0.1)
    pref_ftx: float = option("Weight of the chosen answer's cross entropy, which is added to the loss.", 0.0)
    pref_bco_weight: float = option("Weight of BCO's term.", 0.0)
    pref_loss: PreferenceLossKey = option("The loss of ``stage: dpo``; ``kto_pair`` is not supported.", "sigmoid")
    dpo_label_smoothing: float = option("Probability that a pair has the wrong order, 0 to 0.5.", 0.0)
    kto_chosen_weight: float = option("Weight of a desirable answer.", 1.0)
    kto_rejected_weight: float = option("Weight of an undesirable answer.", 1.0)
    simpo_gamma: float = option("The margin between the two rewards that SimPO aims for.", 0.5)
    ld_alpha: float | None = option(
        "Weight of the longer answer's tokens beyond the length of the shorter one; None for 1."
    )
    ref_model: str | None = option(
        "Folder or name of the reference model; None for the model as it is when training begins."
    )


def check_preferences(keys: PreferenceKeys, stage: str) -> None:
    """Raise ValueError for keys that have no effect in a stage or on its loss, and for values out of range."""
    if stage == "dpo" and keys.pref_loss == "kto_pair":
        raise ValueError(
            "pref_loss: kto_pair is not supported; choose sigmoid, hinge, ipo, orpo or simpo, or stage: kto with tagged"
            " answers"
        )
    for field in fields(PreferenceKeys):
        name, value = field.name, getattr(keys, field.name)
        if value == field.default:
            continue
        stages = [known for known, names in _SETTINGS_BY_STAGE.items() if name in names]
        if stage not in stages:
            raise ValueError(f"{name}: {value!r} is for stage: {choices(stages)}; leave it out, or choose that")
        of_setting = used_by(_SETTINGS_BY_STAGE[stage][name])
        losses = [loss for loss in get_args(PreferenceLossKey) if loss in of_setting]
        if stage == "dpo" and keys.pref_loss not in losses:
            raise ValueError(
                f"{name}: {value!r} has no meaning for pref_loss: {keys.pref_loss}; leave it out, or choose"
                f" {choices(losses)}"
            )
        if isinstance(value, int | float):
            _check_number(name, value)


def _check_number(name: str, value: float) -> None:
    largest = _LARGEST.get(name, math.inf)
    if not 0 <= value <= largest or not math.isfinite(value):
        raise ValueError(
            f"{name}: {value} is out of range; choose " + ("0 or more" if largest == math.inf else f"0 to {largest}")
        )
    if name == "pref_beta" and not value:
        raise ValueError("pref_beta: 0 leaves nothing to learn; choose a number above 0")


def preference_of(keys: PreferenceKeys, stage: str) -> dict[str, Any]:
    """Return the settings of ``Preference`` that checked keys ask for, in stage ``dpo``, ``kto`` or ``rm``.

    ``pref_loss: simpo`` with ``pref_beta: 2.5`` becomes ``{"loss": "simpo", "beta": 2.5}``.
    """
    loss = {"dpo": keys.pref_loss, "kto": "kto", "rm": "reward"}[stage]
    names: Mapping[str, str] = _SETTINGS_BY_STAGE[stage]
    given = {setting: getattr(keys, key) for key, setting in names.items() if key != "pref_loss"}
    defaults = {field.name: field.default for field in fields(Preference)}
    return {"loss": loss} | {name: value for name, value in given.items() if value != defaults[name]}


def preference_notes(keys: PreferenceKeys, stage: str, is_lora: bool) -> list[str]:
    """Return notes about what differs from LLaMA-Factory, for checked keys."""
    if stage == "rm":
        return [
            "stage: rm trains a score for each token, without the bias and the dropout of LLaMA-Factory's value head;"
            " exports are *ForSequenceClassification"
        ]
    if stage == "kto" or keys.pref_loss not in ("orpo", "simpo"):
        how = "its adapters switched off" if is_lora and keys.ref_model is None else "one pass before training"
        return [f"stage: {stage} never has a second model in memory; the reference comes from {how}"]
    return []
