# SPDX-License-Identifier: Apache-2.0
"""``LoraArguments``: the settings of adapters, with ROLL's names.

``config/lora.py`` has the settings that this class translates to, and their checks.
"""

import dataclasses
from typing import Any

from lightning_mcore.arguments.fields import check_types
from lightning_mcore.arguments.llamafactory.rules import errors_in_file_keys
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.text import split_names

_PATTERN_CHARACTERS = "*$|("  # a target that contains one of these is a regular expression


@dataclasses.dataclass
class LoraArguments:
    """Which adapters to train; :meth:`model_settings` returns arguments for ``TrainingArguments.model``.

    Args:
        lora_target: Endings of projection names, separated by commas; ``all`` or ``all-linear``; a regular expression
            that matches whole names; None for no adapters.
        lora_rank: Rank of the adapters.
        lora_alpha: The scale of the adapters is this divided by the rank; None for twice the rank.
        lora_dropout: Dropout probability before the adapters.
        additional_target: Endings of names of modules that are trained in full, separated by commas.
        adapter_name_or_path: PEFT folder of an adapter to train further, with the settings in that folder.
        autocast_adapter_dtype: Has no effect: the run's precision decides the dtype of adapters, and the optimizer
            keeps fp32 copies of 16-bit weights.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is not allowed, or two contradict each other.
    """

    lora_target: str | None = None
    lora_rank: int = 8
    lora_alpha: int | None = None
    lora_dropout: float = 0.0
    additional_target: str | None = None
    adapter_name_or_path: str | None = None
    autocast_adapter_dtype: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        check_types(self)
        if self.adapter_name_or_path is not None and self.lora_target is not None:
            raise ValueError(
                f"lora_target={self.lora_target!r} contradicts adapter_name_or_path={self.adapter_name_or_path!r},"
                " whose adapter_config.json has the settings; leave one of them out"
            )
        # LoRA checks the other values; its errors then name lora_rank instead of r.
        with errors_in_file_keys():
            self.model_settings()

    def model_settings(self) -> dict[str, Any]:
        """Return arguments for ``TrainingArguments.model``: ``lora``, or an empty dict without adapters."""
        if self.adapter_name_or_path is not None:
            return {"lora": self.adapter_name_or_path}
        target: Any = self.lora_target
        if target is None:
            return {}
        # "q_proj,v_proj" becomes a list of endings; ".*layers\\.0\\..*" stays text, which LoRA reads as a pattern.
        if target in ("all", "all-linear"):
            target = "all-linear"
        elif not any(character in target for character in _PATTERN_CHARACTERS):
            target = split_names(target)
        return {
            "lora": LoRA(
                r=self.lora_rank,
                lora_alpha=2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha,
                lora_dropout=self.lora_dropout,
                target_modules=target,
                modules_to_save=None if self.additional_target is None else split_names(self.additional_target),
            )
        }
