# SPDX-License-Identifier: Apache-2.0
"""Lightning's table of a model, for one that is split over ranks.

Lightning's ModelSummary counts the parameters of rank 0 and calls them "Total params". Under a layout that splits the
model, :func:`summaries_of_the_whole` makes it count the whole model, and adds rank 0's part as the column "Params per
Device", which Lightning's callbacks also show for DeepSpeed::

      | Name  | Type     | Params | Params per Device | Mode  | FLOPs
    ----------------------------------------------------------------------
    0 | model | Pipeline | 295 K  | 74.0 K            | train | 0
    ----------------------------------------------------------------------
    295 K     Trainable params
    0         Non-trainable params
    295 K     Total params
"""

import contextlib
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from torch.nn import Parameter

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.chunks import count_whole


class WholeSummary(Summary):
    """A summary, as deep as in Lightning, that counts the whole model's parameters; collective over the world."""

    def __init__(self, model: pl.LightningModule, max_depth: int, layout: ParallelLayout) -> None:
        super().__init__(model, max_depth)
        modules = dict(model.named_modules())
        parts: dict[str, list[Parameter]] = {name: [*modules[name].parameters()] for name in self.layer_names}
        parts["all of it"] = [*model.parameters()]
        parts["its trained part"] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._whole = count_whole(parts, layout)

    @property
    def param_nums(self) -> list[int]:
        """The parameters of each layer."""
        return [self._whole[name] for name in self.layer_names]

    @property
    def total_parameters(self) -> int:
        """The parameters of the model."""
        return self._whole["all of it"]

    @property
    def trainable_parameters(self) -> int:
        """Those that are trained."""
        return self._whole["its trained part"]

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        data = super()._get_summary_data()
        place = [name for name, _ in data].index("Params") + 1
        rows = [get_human_readable_count(number) for number in super().param_nums]
        rows += ["n/a"] * (len(data[0][1]) - len(rows))  # of parameters outside of all layers
        return [*data[:place], ("Params per Device", rows), *data[place:]]


def summaries_of_the_whole(trainer: pl.Trainer, layout: ParallelLayout) -> contextlib.ExitStack:
    """Let the trainer's ModelSummary callbacks count the whole model until the end of the context."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, ModelSummary)]  # type: ignore[attr-defined]
    stack = contextlib.ExitStack()
    for callback in callbacks:
        stack.enter_context(attributes_set([callback], {"_summary": partial(_summary, callback, layout)}))
    return stack


def _summary(callback: ModelSummary, layout: ParallelLayout, trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    return WholeSummary(module, callback._max_depth, layout)
