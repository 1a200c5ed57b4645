# SPDX-License-Identifier: Apache-2.0
"""``TrainingArguments`` as LLaMA-Factory composes them: training, Megatron, Ray and FP8 in one class.

Python code that used LLaMA-Factory's class imports this one; the command line uses ``run.py`` instead.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from lightning_mcore.arguments.fields import check_types, flag
from lightning_mcore.arguments.llamafactory.fp8 import Fp8Arguments
from lightning_mcore.arguments.ray import RayArguments
from lightning_mcore.arguments.training import Seq2SeqTrainingArguments
from lightning_mcore.arguments.training_rules import REFUSED
from lightning_mcore.config.ray import ON_RAY

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclasses.dataclass
class TrainingArguments(Fp8Arguments, RayArguments, Seq2SeqTrainingArguments):  # type: ignore[misc]  # two kinds of fp8
    """LLaMA-Factory's training arguments: ``Seq2SeqTrainingArguments`` with the fields of ``RayArguments`` and of FP8.

    ``fp8`` is a yes or no, and becomes the format that Megatron trains in. With ``ray_num_workers``, ``launch`` starts
    the workers. ``overwrite_output_dir`` has no effect in Python, where no run checks what the folder contains.

    Raises:
        FileNotFoundError: ``additional_configs`` names a file that does not exist.
        TypeError: A value has another type.
        ValueError: A value is not available, contradicts another one, or needs one that is not set.
    """

    overwrite_output_dir: bool = flag("Has no effect: no run in Python looks at what the folder holds.", default=False)

    def __post_init__(self) -> None:
        """Check every value, and translate LLaMA-Factory's FP8 into Megatron's."""
        asked: Any = self.fp8
        if not isinstance(asked, str):  # text is already a format, in a copy of other arguments
            fp8 = Fp8Arguments(asked, self.fp8_backend, self.fp8_enable_fsdp_float8_all_gather)
            names = ("fp8_recipe", "additional_configs")
            values = fp8.merged_into({name: getattr(self, name) for name in names})
            for name in ("fp8", *names):
                setattr(self, name, values.get(name))
        RayArguments.__post_init__(self)
        Seq2SeqTrainingArguments.__post_init__(self)

    def _check_types(self) -> None:
        """Check the types; ``fp8`` is already a format, and ``FP8Settings`` checks it."""
        given: Any = self.fp8
        # The field is declared as a bool, so show the check a bool.
        self.fp8 = given is not None
        try:
            check_types(self, may_be_none=REFUSED)
        finally:
            self.fp8 = given

    def trainer(self, **overrides: Any) -> "pl.Trainer":
        """Build a Trainer, as :meth:`Seq2SeqTrainingArguments.trainer` does; with Ray, in one of its workers.

        Args:
            overrides: Arguments of ``Trainer``.

        Raises:
            RuntimeError: Ray is to start the workers, and this process is not one of them.
        """
        if self.use_ray and ON_RAY not in os.environ:
            raise RuntimeError(
                f"ray_num_workers={self.ray_num_workers} asks for Ray's workers, and this is none of them; call"
                " arguments.launch(arguments, function) with a function that makes the trainer"
            )
        return super().trainer(**overrides)
