# SPDX-License-Identifier: Apache-2.0
"""``DPOConfig``: the settings of a loss over pairs of answers, with ROLL's names.

``config/preference.py`` has the settings that this class translates to, and their checks.
"""

import dataclasses
from typing import Any, Literal

from lightning_mcore.arguments.fields import check_types
from lightning_mcore.config.preference import Preference


@dataclasses.dataclass
class DPOConfig:
    """How a model learns from pairs of answers; :meth:`model_settings` returns them for ``TrainingArguments.model``.

    The reference is the model as it is when training begins. ``Preference``, which ``TrainingArguments.model`` also
    accepts, has more losses and can use another model as the reference.

    Args:
        beta: How strongly the loss keeps the model close to the reference; for ORPO, the weight of the odds ratio.
        pref_loss: ``sigmoid`` for DPO, or ``orpo``.
        label_smoothing: Probability that a pair has the wrong order, 0 to 0.5; only for ``sigmoid``.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is not allowed, or has no effect with ORPO.
    """

    beta: float = 0.1
    pref_loss: Literal["sigmoid", "orpo"] = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_types(self)
        if self.label_smoothing and self.pref_loss == "orpo":
            raise ValueError(
                f"label_smoothing={self.label_smoothing} has no meaning for pref_loss='orpo'; leave it out, or choose"
                " 'sigmoid'"
            )
        # Preference checks the other values.
        self.model_settings()

    def model_settings(self) -> dict[str, Any]:
        """Return arguments for ``TrainingArguments.model``."""
        return {"preference": Preference(self.pref_loss, beta=self.beta, label_smoothing=self.label_smoothing)}
