# SPDX-License-Identifier: Apache-2.0
"""``MCoreDistillation``: an ``MCoreGPT`` that learns from a teacher's probabilities, on every layout.

The model, its data, layouts, checkpoints and adapters are ``MCoreGPT``'s; only the training loss differs. When a fit
begins, each rank reads its part of the teacher's weights, in the student's number format. In training, each stage runs
the teacher's layers before the student's (``layers/distillation.py``). Validation, testing and prediction run the
student alone. With stored logits (``stored_logits.py``), the teacher runs once, before training.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_mcore.config.distillation import (
    Distillation,
    PairPlaces,
    check_layer_pairs,
    check_sight,
    check_teacher,
)
from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.positions import PositionEmbedding
from lightning_mcore.config.rules.model import LossNormalization
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import collate_padded, packing_multiples
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.hf.adapters import fingerprint
from lightning_mcore.hf.source import absolute, seeing_name
from lightning_mcore.hf.tokens import tokens_of
from lightning_mcore.layers.distillation import StudentChunk, TeacherChunk
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.inputs import is_packed
from lightning_mcore.layers.losses import token_mean
from lightning_mcore.layers.sampling import whole_sequence
from lightning_mcore.layers.spec import TransformerImpl
from lightning_mcore.models import generation
from lightning_mcore.models.gpt import Batch, MCoreGPT
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.models.stored_logits import StoredLogits, looks_complete
from lightning_mcore.parallel.chunks import cast_chunk
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.parallel.stage_layers import layers_of_chunks

_OWN = "own_samples"  # entry of a batch, [b] bool: the student's own answers
_TEACHER = "distillation_teacher"  # key of a checkpoint: the teacher's fingerprint
_OFF: dict[str, Any] = {  # of the teacher, whose weights come from its files
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mtp_num_layers": None,
    "perform_initialization": False,
}


@inherit_help(MCoreGPT)
class MCoreDistillation(MCoreGPT):
    """A GPT that learns from a teacher: its next-token probabilities and, if you pair layers, its hidden states.

    The teacher is split across the ranks like the student: tensor, sequence, pipeline, context and expert parallelism
    apply to both. It has no gradients, no optimizer state, and is not in checkpoints. A resumed run reads it again, and
    checks that it is the same. Both models must use the same tokens.

    Logs ``train_loss`` (the mixed loss), ``train_token_loss``, ``train_divergence`` and, with paired layers,
    ``train_intermediate_loss``; validation and testing log what ``MCoreGPT`` does, for the student alone, so
    ``val_loss`` is a token loss.

    The arguments are those of :class:`~lightning_mcore.MCoreGPT`, and ``distillation``. ``transformer_impl`` and
    ``make_vocab_size_divisible_by`` also apply to the teacher.

    Args:
        distillation: The teacher and the loss; :class:`~lightning_mcore.Distillation` has the settings.

    Raises:
        ValueError: A value is not allowed, or two contradict each other.
        TypeError: A value has the wrong type.

    Examples:
        A new student; ``MCoreDistillation.from_pretrained(path, distillation=...)`` starts from a Hugging Face model.

        >>> from lightning_mcore import Distillation, MCoreDistillation
        >>> sizes = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16}
        >>> teacher = Distillation("path/of/the/teacher", kd_ratio=0.5)
        >>> model = MCoreDistillation(32000, seq_length=2048, transformer=sizes, distillation=teacher)
    """

    with_images = "MCoreVisionDistillation"

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        transformer: dict[str, Any],
        distillation: Distillation | dict[str, Any],
        recipe: Recipe = Recipe(),
        position_embedding_type: PositionEmbedding = "rope",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        yarn: dict[str, Any] | None = None,
        share_embeddings_and_output_weights: bool = False,
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        loss_normalization: LossNormalization = "tokens",
        architecture: dict[str, Any] | None = None,
        hf: dict[str, Any] | None = None,
        lora: LoRA | dict[str, Any] | None = None,
        train_only: list[str] | None = None,
    ) -> None:
        arguments = passed_on(locals(), "distillation")
        setting = Distillation.of(distillation)
        super().__init__(**arguments)
        self._learn_by(setting)

    def _learn_by(self, setting: Distillation) -> None:
        self.distillation = setting
        self.teacher_mark: str | None = None  # identifies the teacher's weights
        self._path_of_teacher = absolute(setting.teacher)  # the working folder may change
        self._folder = None if setting.stored is None else absolute(setting.stored)
        self._stored: StoredLogits | None = None

    @classmethod
    def from_pretrained(  # type: ignore[override]  # with the distillation, which has no default
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
        lora: LoRA | dict[str, Any] | str | None = None,
        adapters: list[str] | None = None,
        train_only: list[str] | None = None,
    ) -> "MCoreDistillation":
        """Make a student from a Hugging Face model, and start from its weights on any layout.

        The arguments are those of :meth:`MCoreGPT.from_pretrained`, and ``distillation`` as in the constructor.

        Raises:
            FileNotFoundError: There is no such model, or no such adapter.
            ValueError: Its family is unknown, or its config asks for something that is not supported.
        """
        return cls._of_pretrained(**passed_on(locals()))

    # ---- the teacher

    @property
    def teacher(self) -> "Teacher":
        """The teacher, whose settings are read from its folder at the first use.

        Raises:
            FileNotFoundError: There is no such model.
            ValueError: It is not a language model, is not supported, or uses different tokens from the student's.
        """
        found: Teacher | None = self.__dict__.get("_own_teacher")
        if found is None:
            found = self._new_teacher(self._path_of_teacher)
            check_tokens(self, found)
            self.__dict__["_own_teacher"] = found  # not a submodule
        found._trainer = self._trainer
        return found

    def _new_teacher(self, path: str) -> "Teacher":
        return Teacher.of_student(path, self)

    def _arguments_of_teacher(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments that the teacher's chunks get for a batch instead of the student's."""
        return {}

    def check_settings(self) -> None:
        """Check the settings as ``MCoreGPT`` does; before training, also that the teacher fits student and layout.

        Raises:
            ValueError: ``top_k`` or ``stop_token`` is outside the vocabulary, or the teacher uses different tokens, is
                not a language model, or does not fit the layout.
        """
        super().check_settings()
        if self.distillation.top_k is not None and self.distillation.top_k > self.vocab_size:
            raise ValueError(
                f"top_k={self.distillation.top_k} is more than the {self.vocab_size} tokens of the vocabulary; lower it"
            )
        stop = self.distillation.stop_token
        if stop is not None and stop >= self.vocab_size:
            raise ValueError(
                f"stop_token={stop} is outside the student's vocabulary, so no answer would end; choose 0 to"
                f" {self.vocab_size - 1}"
            )
        if not self._fits or (self._folder is not None and looks_complete(self._folder)):
            return
        host = self._host()
        if host is not None:
            check_teacher(self.distillation.teacher, self.teacher.model_shape(), host.layout)
        try:
            self.teacher.check_settings()
        except ValueError as error:
            raise ValueError(f"the teacher {self.distillation.teacher} does not fit this run: {error}") from error
        pairs = self.distillation.intermediate_layer_pairs
        if pairs is not None:
            own = self._build_config()
            student, taught = map(layers_of_chunks, (own, self.teacher._build_config()))
            check_layer_pairs(pairs, student, taught, own.recompute_granularity == "full")

    @property
    def _fits(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    def configure_model(self) -> None:
        """Build this rank's chunks as ``MCoreGPT`` does; before training, also the teacher's chunks.

        Raises:
            ValueError: The stored logits belong to other data, other settings or another teacher.
        """
        self._stored = StoredLogits(self, self._folder) if self._fits and self._folder is not None else None
        super().configure_model()
        if not self._fits:
            return
        if self._stored is not None and self._stored.is_complete:
            self._learn_from_stored()
            return
        teacher = self.teacher
        if not hasattr(teacher, "model"):
            teacher.configure_model()
            mark = fingerprint(teacher)
            self._check_mark(mark)
            if self._stored is not None:
                self._stored.check_teacher(mark)
            self.teacher_mark = mark
            teacher.freeze()
            for chunk in teacher.model.chunks:
                if self.config.bf16 or self.config.fp16:
                    cast_chunk(self.config, chunk)
        if self._trainer is not None:
            teacher.to(self._trainer.strategy.root_device)
        places = self._places_of_pairs()
        for chunk, of_teacher in zip(self.model.chunks, teacher.model.chunks, strict=True):
            assert isinstance(chunk, StudentChunk)
            assert isinstance(of_teacher, TeacherChunk)
            number = (chunk.vp_stage or 0) * chunk.pp_group.size() + chunk.pp_group.rank()
            chunk.learn_from(of_teacher, self.distillation, self._common_tokens, places, number)

    def _places_of_pairs(self) -> PairPlaces | None:
        pairs = self.distillation.intermediate_layer_pairs
        if pairs is None:
            return None
        student, taught = layers_of_chunks(self.config), layers_of_chunks(self.teacher.config)
        return PairPlaces.of(pairs, student, taught, bool(self.config.mtp_num_layers))

    def on_fit_start(self) -> None:
        """Run the teacher over all training data, if its logits are to be stored and are not stored yet; collective."""
        super().on_fit_start()
        if self._stored is None or self._stored.is_complete:
            return
        self._stored.complete_with(self, self._common_tokens)
        self._learn_from_stored()

    @property
    def _common_tokens(self) -> int:
        """Number of tokens that student and teacher both have, the first of the larger vocabulary."""
        return min(self.vocab_size, self.teacher.vocab_size)

    def _learn_from_stored(self) -> None:
        """Learn from stored logits, and let the teacher go."""
        assert self._stored is not None
        self._check_mark(self._stored.teacher_mark)
        self.teacher_mark = self._stored.teacher_mark
        self._stored.lend()
        for chunk in self.model.chunks:
            assert isinstance(chunk, StudentChunk)
            chunk.learn_from(None, self.distillation, self._stored.tokens)
        self.__dict__.pop("_own_teacher", None)

    @property
    def _reads_stored(self) -> bool:
        return self._stored is not None and self._stored.is_complete

    def _new_chunk(self, *args: Any, **kwargs: Any) -> GPTChunk:
        return StudentChunk(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record which teacher the run uses."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[_TEACHER] = self.teacher_mark

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the run uses the teacher that it began with."""
        super().on_load_checkpoint(checkpoint)
        recorded = checkpoint.get(_TEACHER)
        self._check_mark(recorded)
        self.teacher_mark = recorded or self.teacher_mark

    def _check_mark(self, mark: str | None) -> None:
        if None not in (mark, self.teacher_mark) and mark != self.teacher_mark:
            raise ValueError(
                f"teacher={self.distillation.teacher!r} has other weights than the teacher of the run that wrote the"
                " checkpoint; give that one, or start a new run from the weights alone"
            )

    # ---- steps

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Replace the answers of some batches by the student's own; collective.

        Raises:
            ValueError: The rows of such a batch are packed.
        """
        super().on_train_batch_start(batch, batch_idx)
        setting = self.distillation
        # Of the place in the run alone, so that a resumed run chooses and samples the same
        place = [setting.seed, self.trainer.current_epoch, batch_idx]
        if np.random.default_rng(place).random() >= setting.on_policy:
            return
        if is_packed(batch):
            raise ValueError(
                f"on_policy={setting.on_policy} continues prompts, which packed rows do not have one by one; set"
                " packing=False in the data module"
            )
        rank, _ = data_parallel_place(self.trainer)
        generator = torch.Generator().manual_seed(int(np.random.default_rng([*place, rank]).integers(2**62)))
        # Tokens 5 6 7 8 with the loss mask 0 1 1 0: the label of 6 is the first of the answer, so the prompt is 5 6
        prompts = []
        for tokens, mask in zip(batch["tokens"].cpu(), batch["loss_mask"].cpu(), strict=True):
            prompts.append(tokens[: int((mask > 0).int().argmax()) + 1].tolist())
        most = setting.max_new_tokens
        rows = generation.continue_rows(self, prompts, most, setting.temperature, setting.stop_token, generator)
        samples = [
            TokenSample(np.array(row), np.arange(len(row)) >= len(prompt))
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        longest = torch.tensor(max(map(len, rows)), device=self.device)
        length = int(self.trainer.strategy.reduce(longest, reduce_op="max"))  # experts want it equal
        multiple = packing_multiples(self.trainer).row
        own = collate_padded(samples, multiple, -(-length // multiple) * multiple)
        own = {name: values.to(self.device) for name, values in own.items() if name != "sample_ids"}
        batch |= {**own, _OWN: torch.ones(len(rows), dtype=torch.bool, device=self.device)}

    def microbatch_shape(self, batch: Batch) -> tuple[int, int] | None:  # type: ignore[override]
        """Return what ``MCoreGPT`` does; None with pipeline stages, which also send the teacher's activations."""
        host, shape = self._host(), super().microbatch_shape(batch)
        if host is None or host.layout.pipeline_model_parallel_size == 1 or self._reads_stored:
            return shape
        host.layout.validate_rows(shape[0])  # which is not done for None
        return None

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean of a microbatch's mixed losses and, unless ``calculate_per_token_loss=False``, its weight."""
        stored = batch["teacher_top_k"] if self._reads_stored else None
        if stored is not None and is_packed(batch):
            stored = stored.flatten(0, 1)[None]  # as the model takes the tokens
        given = {} if self._reads_stored else self._arguments_of_teacher(batch)
        with self._on_chunks(lambda chunk: chunk.learning(given, stored)):
            found, inputs = self.token_losses(batch)
        assert inputs.loss_mask is not None
        losses, divergences = found[:2]
        names = ("train_token_loss", "train_divergence", "train_intermediate_loss")
        for name, values in zip(names, found, strict=False):
            mean, count = token_mean(values.detach(), inputs.loss_mask)
            self.log(name, mean, batch_size=count, sync_dist=True)  # type: ignore[arg-type]
        ratio: Any = self.distillation.kd_ratio
        if _OWN in batch:
            ratio = batch[_OWN][:, None].float()  # all ones: the student need not repeat its own words
        mixed = (1 - ratio) * losses + ratio * divergences
        for distances in found[2:]:
            mixed = mixed + self.distillation.intermediate_weight * distances
        return self._log_loss("train_loss", self.learned_losses(mixed), inputs)

    def teacher_top_k(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the teacher's most likely tokens and their log-probabilities, [b, s, 2k + 1], for a padded batch."""
        given = self._arguments_of_teacher(batch)
        with self._on_chunks(lambda chunk: chunk.storing(given)):
            found, _ = self.token_losses(batch)
        return found if self._host() is None else whole_sequence(found, process_group("cp"))

    @contextlib.contextmanager
    def _on_chunks(self, enter: Callable[[StudentChunk], Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for chunk in self._pipeline_of_step().chunks:
                assert isinstance(chunk, StudentChunk)
                stack.enter_context(enter(chunk))
            yield


class Teacher(MCoreGPT):
    """A student's teacher: the same layout, no gradients, and weights that are always read from its folder."""

    @classmethod
    def of_student(cls, path: str, student: MCoreGPT) -> Self:
        """Read the settings of the teacher at ``path``; ValueError if it is not a model of the student's kind."""
        given = student.hparams
        teacher = cls._of_pretrained(
            path,
            seeing_name(path, None) if cls.takes_images else None,
            student.seq_length,
            _OFF,
            None,
            None,
            make_vocab_size_divisible_by=given["make_vocab_size_divisible_by"],
            transformer_impl=given["transformer_impl"],
        )
        if teacher.lora is not None:
            raise ValueError(
                f"teacher={path!r} is a checkpoint of LoRA adapters; export it with lightning-mcore export, and give"
                " the merged model"
            )
        return teacher

    @classmethod
    def check_kind(cls, path: str, settings: dict[str, Any]) -> None:
        """Raise ValueError if one of teacher and student sees images and the other does not."""
        check_sight(path, "vision" in settings, cls.takes_images)
        super().check_kind(path, settings)

    @property
    def _resumes(self) -> bool:
        return False

    def megatron_fields(self) -> dict[str, Any]:
        """Return the strategy's fields; a dense teacher has no part in expert parallelism."""
        dense = {} if self.transformer.get("num_moe_experts") else {"expert_model_parallel_size": 1}
        return {**super().megatron_fields(), **dense}

    def _new_chunk(self, *args: Any, **kwargs: Any) -> GPTChunk:
        return TeacherChunk(*args, **kwargs)


def check_tokens(student: MCoreGPT, teacher: MCoreGPT) -> None:
    """Raise ValueError if the models' tokens differ, or their logits cannot be compared column by column.

    Qwen2.5 0.5B has 151,936 rows and 7B 152,064, for the same 151,665 tokens. With multiples of 512 both have 152,064.
    """
    path = teacher._starts_from or ""
    sizes = student.vocab_size, teacher.vocab_size
    both = tokens_of(student._starts_from), tokens_of(path)
    known = None not in both
    if known and both[0] != both[1]:
        raise ValueError(
            f"teacher={path!r} has another tokenizer than the student; give a teacher whose tokenizer.json has the same"
            " tokens"
        )
    longest = max((both[0] or {}).values(), default=0) + 1
    if sizes[0] != sizes[1] and (not known or longest > min(sizes)):
        raise ValueError(
            f"teacher={path!r} has a vocabulary of {sizes[1]} and the student of {sizes[0]}; give a teacher with the"
            " student's tokens"
        )
    if student.padded_vocab_size != teacher.padded_vocab_size:
        multiple = int(student.hparams["make_vocab_size_divisible_by"])
        while -(-sizes[0] // multiple) != -(-sizes[1] // multiple):
            multiple *= 2
        raise ValueError(
            f"the student's {sizes[0]} and the teacher's {sizes[1]} rows of the embedding are padded to"
            f" {student.padded_vocab_size} and {teacher.padded_vocab_size}; set"
            f" make_vocab_size_divisible_by={multiple}, which pads both to {-(-sizes[0] // multiple) * multiple}"
        )
