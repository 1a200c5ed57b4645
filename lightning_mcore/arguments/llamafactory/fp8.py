# SPDX-License-Identifier: Apache-2.0
"""``Fp8Arguments``: LLaMA-Factory's way to ask for FP8, and what it means here.

It is a class of its own, beside ``TrainingArguments``, for ``fp8`` is a yes or no here and the name of a format there.

:meth:`Fp8Arguments.merged_into` turns the one into the other. LLaMA-Factory names four backends; FP8 here is
TransformerEngine's, so ``auto`` and ``te`` mean it and the others are refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lightning_mcore.arguments.fields import check_types, flag, option
from lightning_mcore.arguments.parallel import load_additional_configs

_OTHER_BACKENDS = {
    "torchao": "torchao's FP8 is for torch's own linear layers, and Megatron's layers are not",
    "msamp": "MS-AMP replaces optimizer and layers with its own, which Megatron does not run",
}


@dataclasses.dataclass
class Fp8Arguments:
    """FP8 as LLaMA-Factory asks for it; each field's meaning is its help text.

    Raises:
        TypeError: A value is of another type.
        ValueError: The backend is not available, or something is asked for without FP8.
    """

    fp8: bool = flag("Train in FP8 through TransformerEngine; needs bf16.", default=False)
    fp8_backend: Literal["auto", "te", "torchao", "msamp"] = option(
        "Who computes in FP8: TransformerEngine ('auto' or 'te'); torchao and msamp are refused.", default="auto"
    )
    fp8_enable_fsdp_float8_all_gather: bool = flag("Gather FP8 shards of FSDP. Not available.", default=False)

    def __post_init__(self) -> None:
        """Check the values, and refuse what is not TransformerEngine's."""
        check_types(self)
        if self.fp8_backend in _OTHER_BACKENDS:
            raise ValueError(
                f"fp8_backend={self.fp8_backend!r} is not available: {_OTHER_BACKENDS[self.fp8_backend]}; choose 'auto'"
                " or 'te', which is TransformerEngine"
            )
        if self.fp8_enable_fsdp_float8_all_gather:
            raise ValueError(
                "fp8_enable_fsdp_float8_all_gather=True is an option of FSDP, which Megatron's data parallelism is not;"
                " leave it out, or set fp8_param=True with use_distributed_optimizer=True to gather weights in FP8"
            )
        if self.fp8_backend != "auto" and not self.fp8:
            raise ValueError(f"fp8_backend={self.fp8_backend!r} does nothing without fp8=True; set both")

    def merged_into(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of ``TrainingArguments`` with FP8 as LLaMA-Factory means it, where it is asked for.

        That is TransformerEngine's hybrid format, scaled by the largest values of the last 16 steps.

        Args:
            values: Arguments by name; an ``fp8_recipe`` among them stays.
        """
        given = dict(values)
        if not self.fp8:
            return given
        if given.get("fp8") is None:
            given["fp8"] = "hybrid"
        if given.get("fp8_recipe") in (None, "delayed"):
            extra = load_additional_configs(given.get("additional_configs"))
            given["additional_configs"] = {"fp8_amax_history_len": 16, **extra}
            given["fp8_recipe"] = "delayed"
        return given
