# SPDX-License-Identifier: Apache-2.0
"""Compute a teacher's logits of all training data once, before training, and keep them in a folder.

``Distillation(top_k=64, stored="folder")`` keeps the teacher's 64 most likely tokens for each token that counts, their
log-probabilities, and the log-probability of all others together: 129 fp32 numbers, 516 bytes. The first run computes
them on its layout, by running the teacher over the samples in their order, and then trains without the teacher. Other
runs read them, on any layout, and never read the teacher.

The folder has two files. ``logits.f32`` has the numbers of all targets, sample after sample, which rank 0 appends; an
interrupted pass continues after the last complete sample, on any layout. ``logits.json`` identifies the teacher, the
data and its order by digests, so that logits of any other are rejected.

``MCoreDistillation`` opens the folder in ``configure_model``, and completes it when a fit starts.
"""

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_mcore.data.appended import appending
from lightning_mcore.data.packing.rows import packing_multiples
from lightning_mcore.models.forward_pass import results_of_samples
from lightning_mcore.models.generation import evaluating
from lightning_mcore.parallel.consensus import run_on_all_ranks, run_on_rank0

if TYPE_CHECKING:
    from lightning_mcore.models.distillation import MCoreDistillation

_DESCRIPTION, _NUMBERS = "logits.json", "logits.f32"


class StoredLogits:
    """The logits stored in a folder so far; the same on all ranks. Creating an object is collective.

    Attributes:
        teacher_mark: The teacher's fingerprint; None while there are no logits.
        tokens: Number of tokens that student and teacher have in common, if known.

    Raises:
        ValueError: The folder's logits belong to other data or settings, or the run's data has no fixed order.
    """

    def __init__(self, module: "MCoreDistillation", folder: str) -> None:
        setting = module.distillation
        self._name, self._folder = f"stored={setting.stored!r}", folder
        data: Any = getattr(module.trainer, "datamodule", None)
        found = run_on_all_ranks(getattr(data, "samples_to_store", lambda: None))
        if found is None:
            raise ValueError(
                f"{self._name} needs training data whose samples have a fixed order; give"
                " MCoreFinetuningData(streaming=False) or MCoreVisionData, or leave stored out"
            )
        self.samples, key = found
        assert setting.top_k is not None
        self.width = 2 * setting.top_k + 1
        self._about: dict[str, Any] = {"data": key, "top_k": setting.top_k, "temperature": setting.temperature}
        told, numbers = run_on_rank0(partial(_read, folder))
        self.teacher_mark: str | None = told.get("teacher")
        self.tokens: int = told.get("tokens", module.vocab_size)
        named = told.get("teacher_name", setting.teacher)
        if named != setting.teacher:
            rank_zero_warn(
                f"{self._name} has logits of teacher={named!r}, which a run with teacher={setting.teacher!r} reads all"
                " the same; give another folder if these are two models"
            )
        for name, now in self._about.items():
            if told and told[name] != now:
                what = "other training data, or another order of it" if name == "data" else f"{name}={told[name]}"
                raise ValueError(
                    f"{self._name} has logits for {what}; give what they were computed with, or another folder"
                )
        # The last sample may be cut off
        self.complete = int(np.searchsorted(self.samples.offsets, numbers // self.width, side="right")) - 1

    @property
    def is_complete(self) -> bool:
        """Whether all samples have their logits."""
        return self.complete == len(self.samples)

    def check_teacher(self, mark: str) -> None:
        """Raise ValueError if the folder already has logits of a teacher with another fingerprint."""
        if self.teacher_mark not in (None, mark):
            raise ValueError(
                f"{self._name} has logits of a teacher with other weights; give that teacher, or another folder"
            )

    def lend(self) -> None:
        """Give the samples access to their logits."""
        path = os.path.join(self._folder, _NUMBERS)

        def check() -> None:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{self._name} is not visible on every machine; give a folder on a shared disk")

        run_on_all_ranks(check)
        self.samples.teacher_table = path

    def complete_with(self, module: "MCoreDistillation", tokens: int) -> None:
        """Append the teacher's logits, over ``tokens`` common tokens, of the samples that lack them; collective."""
        told = {
            **self._about,
            "teacher": module.teacher_mark,
            "teacher_name": module.distillation.teacher,
            "tokens": tokens,
            "targets": int(self.samples.offsets[-1]),
        }
        run_on_rank0(partial(_describe, self._folder, told))
        self.tokens = tokens
        samples, trainer = self.samples, module.trainer
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        first, count = self.complete, len(samples)
        if first:
            rank_zero_info(f"the logits in {self._folder} continue at sample {first} of {count}")
        multiple = packing_multiples(trainer).row

        def batch_of(own: list[int], of_all: list[int]) -> dict[str, torch.Tensor]:
            length = -(-int(samples.lengths[of_all].max()) // multiple) * multiple
            made: dict[str, torch.Tensor] = data.padded(samples.take(own), multiple, length)
            return made

        each = data.batch_size
        what = f"logits of the training data under {module.distillation.teacher}"
        path = os.path.join(self._folder, _NUMBERS)
        size = int(samples.offsets[first]) * self.width * 4
        with appending(path, size, trainer.is_global_zero) as append, evaluating(module):
            for start, rows in results_of_samples(module, "teacher_top_k", batch_of, range(first, count), each, what):
                if not torch.isfinite(rows).all():
                    raise ValueError(
                        f"the teacher gives logits that are not finite to samples {start} to {start + len(rows) - 1} of"
                        " the training data; check its weights and the precision"
                    )
                if trainer.is_global_zero:
                    numbers = list(range(start, start + len(rows)))
                    for row, sample in zip(rows.numpy(), samples.take(numbers), strict=True):
                        counts = sample.loss_mask[1:] if sample.loss_mask is not None else slice(None)
                        of_tokens = row.reshape(-1, self.width)[: sample.length]
                        append(of_tokens[counts].astype("<f4"))
        self.complete = count


def looks_complete(folder: str) -> bool:
    """Return whether a folder has the logits of all data that it was made for, without checking which data that is."""
    told, numbers = _read(folder)
    return bool(told) and numbers == told["targets"] * (2 * told["top_k"] + 1)


def _read(folder: str) -> tuple[dict[str, Any], int]:
    """Return a folder's description and how many numbers it has; an empty one and 0 if it does not exist."""
    try:
        with open(os.path.join(folder, _DESCRIPTION), encoding="utf-8") as file:
            told: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return {}, 0
    path = os.path.join(folder, _NUMBERS)
    return told, os.path.getsize(path) // 4 if os.path.isfile(path) else 0


def _describe(folder: str, told: dict[str, Any]) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, _DESCRIPTION), "w", encoding="utf-8") as file:
        json.dump(told, file)
