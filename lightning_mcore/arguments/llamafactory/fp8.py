# SPDX-License-Identifier: Apache-2.0
"""``Fp8Arguments``: how LLaMA-Factory asks for FP8.

The class is separate from ``TrainingArguments`` because ``fp8`` is a yes or no here, and the name of a format there;
:meth:`Fp8Arguments.merged_into` translates. LLaMA-Factory has four backends. ``auto`` and ``te`` mean
TransformerEngine, which runs FP8 here; the other two raise.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lightning_mcore.arguments.fields import check_types, flag, option
from lightning_mcore.arguments.parallel import load_additional_configs

_OTHER_BACKENDS = {
    "torchao": "torchao's FP8 works on torch's own linear layers, and Megatron's layers are different",
    "msamp": "MS-AMP replaces the optimizer and layers with its own, which Megatron cannot run",
}


@dataclasses.dataclass
class Fp8Arguments:
    """LLaMA-Factory's options for FP8; each field's help text explains it.

    Raises:
        TypeError: A value has another type.
        ValueError: The backend is not available, or an option needs FP8.
    """

    fp8: bool = flag("Train in FP8 through TransformerEngine; needs bf16.", default=False)
    fp8_backend: Literal["auto", "te", "torchao", "msamp"] = option(
        "What computes in FP8: TransformerEngine ('auto' or 'te'); torchao and msamp are not available.", default="auto"
    )
    fp8_enable_fsdp_float8_all_gather: bool = flag("Gather FP8 shards of FSDP. Not available.", default=False)

    def __post_init__(self) -> None:
        """Check the values, and reject options of other backends."""
        check_types(self)
        if self.fp8_backend in _OTHER_BACKENDS:
            raise ValueError(
                f"fp8_backend={self.fp8_backend!r} is not available: {_OTHER_BACKENDS[self.fp8_backend]}; choose "
                "'auto' or 'te', which mean TransformerEngine"
            )
        if self.fp8_enable_fsdp_float8_all_gather:
            raise ValueError(
                "fp8_enable_fsdp_float8_all_gather=True is an option of FSDP, and data parallelism is Megatron's here;"
                " leave it out, or set fp8_param=True with use_distributed_optimizer=True to gather weights in FP8"
            )
        if self.fp8_backend != "auto" and not self.fp8:
            raise ValueError(f"fp8_backend={self.fp8_backend!r} does nothing without fp8=True; set both")

    def merged_into(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of ``TrainingArguments``, with LLaMA-Factory's FP8 added if it is on.

        Args:
            values: Arguments by name; a given ``fp8`` or ``fp8_recipe`` is kept.
        """
        given = dict(values)
        if not self.fp8:
            return given
        if given.get("fp8") is None:
            given["fp8"] = "hybrid"
        # FP8 then means the hybrid format, scaled by the largest values of the last 16 steps.
        if given.get("fp8_recipe") in (None, "delayed"):
            extra = load_additional_configs(given.get("additional_configs"))
            given["additional_configs"] = {"fp8_amax_history_len": 16, **extra}
            given["fp8_recipe"] = "delayed"
        return given
