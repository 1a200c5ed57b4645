# SPDX-License-Identifier: Apache-2.0
"""``MCoreVisionDistillation``: an ``MCoreVisionGPT`` that learns from a vision-language teacher, on every layout.

The losses and the teacher's way through a run are those of ``distillation.py``, the data, tower and layouts those of
``vision.py``. The teacher's first stage has a tower of its own, which sees the patches of the batch. So both models
must cut images alike. Only the positions of video frames may differ, because Qwen2.5-VL counts them in seconds.
"""

from collections.abc import Sequence
from typing import Any

from lightning_mcore.config.distillation import Distillation
from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.rules.model import LossNormalization
from lightning_mcore.config.vision import Vision
from lightning_mcore.data.multimodal import with_vision
from lightning_mcore.hf.pixels import check_pixels
from lightning_mcore.hf.source import seeing_name
from lightning_mcore.layers.distillation import VisionStudentChunk, VisionTeacherChunk
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.spec import TransformerImpl
from lightning_mcore.models.distillation import MCoreDistillation, Teacher
from lightning_mcore.models.gpt import Batch
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.parallel.stage_layers import layers_of_first_chunk

_POSITIONS = "teacher_rope_positions"  # entry of a batch, [b, s, 3] int64, if they are not the student's


@inherit_help(MCoreVisionGPT)
class MCoreVisionDistillation(MCoreDistillation, MCoreVisionGPT):
    """A vision-language model that learns from a vision-language teacher, which sees the same images and videos.

    It is to :class:`~lightning_mcore.MCoreVisionGPT` what :class:`~lightning_mcore.MCoreDistillation` is to
    ``MCoreGPT``, and logs the same. Both models must use the same tokens, cut images into the same patches, and
    normalize pixels alike.

    The arguments are those of :class:`~lightning_mcore.MCoreVisionGPT`, and ``distillation``. ``freeze`` and ``lora``
    only apply to the student.

    Args:
        distillation: The teacher and the loss; :class:`~lightning_mcore.Distillation` has the settings. ``on_policy``
            is not available.

    Raises:
        ValueError: A value is not allowed, or two contradict each other.
        TypeError: A value has the wrong type.
    """

    without_images = "MCoreDistillation"

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        transformer: dict[str, Any],
        vision: dict[str, Any],
        distillation: Distillation | dict[str, Any],
        recipe: Recipe = Recipe(),
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        share_embeddings_and_output_weights: bool = False,
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        loss_normalization: LossNormalization = "tokens",
        architecture: dict[str, Any] | None = None,
        freeze: Sequence[str] = (),
        lora: LoRA | dict[str, Any] | None = None,
        hf: dict[str, Any] | None = None,
    ) -> None:
        arguments = passed_on(locals(), "distillation")
        setting = Distillation.of(distillation)
        setting.check_seeing()
        super(MCoreDistillation, self).__init__(**arguments)  # MCoreDistillation's takes a text model's arguments
        self._learn_by(setting)

    @classmethod
    def from_pretrained(  # type: ignore[override]  # with the distillation, which has no default; no train_only
        cls,
        path: str,
        distillation: Distillation | dict[str, Any],
        seq_length: int | None = None,
        transformer: dict[str, Any] | None = None,
        recipe: Recipe = Recipe(),
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        loss_normalization: LossNormalization = "tokens",
        family: str | None = None,
        freeze: Sequence[str] = (),
        lora: LoRA | dict[str, Any] | str | None = None,
        adapters: list[str] | None = None,
    ) -> "MCoreVisionDistillation":
        """Make a student from a Hugging Face vision-language model, and start from its weights on any layout.

        The arguments are those of :meth:`MCoreVisionGPT.from_pretrained`, and ``distillation`` as in the constructor.

        Raises:
            FileNotFoundError: There is no such model, or no such adapter.
            ValueError: Its family is unknown or has no tower, or its config asks for something that is not supported.
        """
        family = seeing_name(path, family)
        return cls._of_pretrained(**passed_on(locals()))

    def _new_teacher(self, path: str) -> Teacher:
        teacher = VisionTeacher.of_student(path, self)
        self.vision.check_teacher(self.distillation.teacher, teacher.vision)
        check_pixels(self._starts_from, path)
        return teacher

    def _new_chunk(self, *args: Any, **kwargs: Any) -> GPTChunk:
        return VisionStudentChunk(*args, vision=self.vision, **kwargs)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Prepare a batch as ``MCoreVisionGPT`` does; also add the teacher's positions if they differ in videos.

        Raises:
            ValueError: As in :meth:`MCoreVisionGPT.on_before_batch_transfer`.
        """
        found = super().on_before_batch_transfer(batch, dataloader_idx)
        if "video_grid_thw" not in batch or not self._fits or self._reads_stored:
            return found
        teacher = self.teacher
        assert isinstance(teacher, VisionTeacher)
        if self.vision.times_as(teacher.vision):
            return found
        without = {name: value for name, value in batch.items() if name != "rope_positions"}  # the student's
        return {**found, _POSITIONS: with_vision(without, teacher.vision)["rope_positions"]}

    def _arguments_of_teacher(self, batch: Batch) -> dict[str, Any]:
        if _POSITIONS not in batch:
            return {}
        inputs = self.model_inputs({**batch, "rope_positions": batch[_POSITIONS]})
        return {"rope_positions": self._more_arguments(inputs)["rope_positions"]}


class VisionTeacher(Teacher, MCoreVisionGPT):
    """The teacher of a student that sees images."""

    def check_settings(self) -> None:
        """Check the settings as ``MCoreVisionGPT`` does."""
        layers = layers_of_first_chunk(self._build_config())
        Vision.check_first_stage(self.vision.deepstack, layers, self._starts_from)
        super().check_settings()

    def _new_chunk(self, *args: Any, **kwargs: Any) -> GPTChunk:
        return VisionTeacherChunk(*args, vision=self.vision, **kwargs)
