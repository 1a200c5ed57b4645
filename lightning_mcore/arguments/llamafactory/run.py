# SPDX-License-Identifier: Apache-2.0
"""Read a LLaMA-Factory training file as a run: sort its keys, and check that they fit together.

:func:`read_run` makes a :class:`FactoryRun` from a file, or raises one sentence that says why it cannot run. The run
holds the keys of ``keys.py``, the training and Megatron arguments, and the datasets. Reading a file builds no model,
reads no data, and imports neither Lightning nor megatron-core, so ``lightning-mcore plan`` can use it too.
``cli/llamafactory.py`` runs the result.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_mcore.arguments.fields import check_type
from lightning_mcore.arguments.llamafactory.datasets import DatasetEntry, read_datasets
from lightning_mcore.arguments.llamafactory.fp8 import Fp8Arguments
from lightning_mcore.arguments.llamafactory.freeze import trained_parts
from lightning_mcore.arguments.llamafactory.keys import REFUSED, FactoryKeys, notes_of, translated
from lightning_mcore.arguments.llamafactory.preference import preference_of
from lightning_mcore.arguments.llamafactory.rules import (
    OWN_KEYS,
    RAY_KEYS,
    check_keys,
    check_supported,
    own_keys,
    read_keys,
)
from lightning_mcore.arguments.llamafactory.vision import check_vision, vision_notes
from lightning_mcore.arguments.ray import RayArguments
from lightning_mcore.config.run import RunSettings, rows_of_pairs
from lightning_mcore.data.finetuning.chat import ChatTemplate, end_of_turn, named_template
from lightning_mcore.data.preprocess.tokenizer import auto_tokenizer
from lightning_mcore.hf.source import local_folder, seeing_name, sees_images

if TYPE_CHECKING:
    from lightning_mcore.arguments.llamafactory.data import FactoryData
    from lightning_mcore.arguments.training import Seq2SeqTrainingArguments
    from lightning_mcore.models.gpt import MCoreGPT

_PRECISIONS = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}
_BRIDGE = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")  # Megatron-Bridge's defaults


@dataclasses.dataclass(frozen=True)
class FactoryRun:
    """The run that a training file asks for."""

    keys: FactoryKeys
    arguments: "Seq2SeqTrainingArguments"
    train: tuple[DatasetEntry, ...]
    evaluation: tuple[DatasetEntry, ...]
    template: ChatTemplate | None  # None for the tokenizer's own
    notes: tuple[str, ...] = ()  # one for each key whose meaning differs slightly here
    ray: RayArguments = dataclasses.field(default_factory=RayArguments)

    @property
    def model_path(self) -> str:
        """Folder or name of the model."""
        return str(self.keys.model_name_or_path)

    def settings(self, on_cpu: bool | None = None) -> RunSettings:
        """Return the run as plain data; ``on_cpu=None`` means ``use_cpu``. ValueError if the model is not supported."""
        keys = self.keys
        settings = self.arguments.settings(self.model_path, seq_length=keys.cutoff_len, on_cpu=on_cpu)
        model, notes = dict(settings.model), [*self.notes, *settings.notes]
        if keys.lora is not None:
            model["lora"] = keys.lora
            if keys.merged_adapters:
                model["adapters"] = keys.merged_adapters
        if keys.finetuning_type == "freeze":
            model["train_only"] = trained_parts(keys)
        if keys.loraplus_lr_ratio is not None:
            names = ("loraplus_lr_ratio", "loraplus_lr_embedding")
            model["recipe"] = {**model["recipe"], **{name: getattr(keys, name) for name in names}}
        data = self.data_settings()
        if keys.learns_preferences:
            model["preference"] = preference_of(keys, keys.stage)
            # A pair takes two rows, so the batch size doubles.
            data = rows_of_pairs(model, data)
        if reads_images(self.model_path, [*self.train, *self.evaluation]):
            if (family := seeing_name(self.model_path, None)) is not None:
                model["family"] = family
            if keys.lora is None:
                model["freeze"] = keys.frozen_parts
            if model["transformer"].get("apply_rope_fusion") and self._has_joined_rows():
                # The fused kernel cannot give each row positions of its own, which images need.
                model["transformer"] = {**model["transformer"], "apply_rope_fusion": False}
                notes.append("apply_rope_fusion: True is for batches of one row that is not packed, so it is left out")
        ray = self.ray.ray_settings() if self.ray.use_ray else None
        return dataclasses.replace(settings, model=model, data=data, notes=tuple(notes), ray=ray)

    def _has_joined_rows(self) -> bool:
        """Return whether a batch has several rows, or a row several samples."""
        arguments = self.arguments
        return self.keys.packs or max(arguments.per_device_train_batch_size, arguments.per_device_eval_batch_size) > 1

    def model(self) -> "MCoreGPT":
        """Build the model, with the loss that the file asks for."""
        from lightning_mcore.arguments.build import make_model
        from lightning_mcore.arguments.llamafactory.dft_loss import DFTModel
        from lightning_mcore.models.gpt import MCoreGPT
        from lightning_mcore.models.vision import MCoreVisionGPT

        kind = MCoreVisionGPT if self._sees() else DFTModel if self.keys.use_dft_loss else MCoreGPT
        return make_model(self.settings(self.arguments.on_cpu).model, {}, kind)

    def _sees(self) -> bool:
        """Return whether the model sees images; downloads the config of a name on the hub."""
        local_folder(self.model_path, weights=False)
        sees = bool(reads_images(self.model_path, [*self.train, *self.evaluation]))
        # read_run could not check a name whose config was not downloaded yet.
        check_vision(self.keys, dataclasses.asdict(self.keys), sees)
        return sees

    def check_tokenizer(self) -> None:
        """Raise ValueError if a local model's tokenizer lacks a token of the template, before ranks are started."""
        if self.template is not None and os.path.isdir(self.model_path):
            end_of_turn(_tokenizer(self.model_path), self.template)

    def data_settings(self) -> dict[str, Any]:
        """Return the data module's arguments."""
        keys, arguments = self.keys, self.arguments
        return {
            **arguments.settings(seq_length=keys.cutoff_len).data,
            "pad_to_seq_length": not (keys.packs or arguments.allow_variable_seq_lengths()),
            "validation_share": keys.val_size,
            "packing": keys.packs,
            "streaming": keys.streaming,
            # A buffer of one sample keeps the order.
            "shuffle_buffer": 1 if keys.disable_shuffling else keys.buffer_size,
            "shuffle": not keys.disable_shuffling,
            "num_proc": keys.preprocessing_num_workers or 1,
            "cache_dir": keys.cache_dir,
        }

    def data(self) -> "FactoryData":
        """Build the data module, and load the tokenizer.

        Raises ValueError if the tokenizer cannot be loaded, or if the template does not fit it.
        """
        from lightning_mcore.arguments.llamafactory.data import FactoryData, FactoryReading

        keys = self.keys
        tokenizer = _tokenizer(self.model_path)
        template = self.template
        documents = keys.stage == "pt"
        if template is None and not documents and not isinstance(tokenizer.chat_template, str):
            # The tokenizer has no template, so messages are joined as plain text.
            template = named_template("empty")
        settings = self.data_settings()
        if keys.learns_preferences:
            return self._pairs(tokenizer, template, settings)
        reading = FactoryReading(
            loss_on="all" if keys.train_on_prompt else "last_assistant" if keys.mask_history else "assistant",
            template=template,
            # One token more than a row: n + 1 tokens fill a row of n, where each token learns its successor.
            longest=None if documents and keys.packs else keys.cutoff_len + 1,
            max_samples=keys.max_samples,
            seed=settings["seed"],
            documents=documents,
            joined=keys.packs,
        )
        train, evaluation = self._readings(reading)
        if not self._sees():
            return FactoryData(train, tokenizer, evaluation=evaluation, **settings)
        from lightning_mcore.arguments.llamafactory.images import FactoryVideos, FactoryVisionData, Limits

        of_videos = Limits("video", keys.video_max_pixels, keys.video_min_pixels)
        return FactoryVisionData(
            train,
            tokenizer,
            evaluation=evaluation,
            processor=self.model_path,
            media_dir=keys.dataset_dir if keys.media_dir is None else keys.media_dir,
            limits=Limits("image", keys.image_max_pixels, keys.image_min_pixels),
            videos=FactoryVideos(self.model_path, keys.video_fps, keys.video_maxlen, of_videos),
            **settings,
        )

    def _pairs(self, tokenizer: Any, template: ChatTemplate | None, settings: dict[str, Any]) -> "FactoryData":
        """Build the data module of a stage that learns from preferences."""
        from lightning_mcore.arguments.llamafactory.pairs import FactoryPairReading, FactoryPairs

        reading = FactoryPairReading(
            loss_on="last_assistant",
            template=template,
            max_samples=self.keys.max_samples,
            seed=settings["seed"],
            block=self.keys.preprocessing_batch_size,
        )
        train, evaluation = self._readings(reading)
        return FactoryPairs(train, tokenizer, evaluation=evaluation, **settings)

    def _readings(self, reading: Any) -> list[list[Any]]:
        """Return a reading for each dataset to train on, and for each to evaluate on."""
        return [[dataclasses.replace(reading, entry=entry) for entry in part] for part in (self.train, self.evaluation)]


def reads_images(path: str, datasets: Sequence[DatasetEntry]) -> bool | None:
    """Return whether a run reads its model with a vision tower; None if the model's config has not been downloaded.

    A model that may be read either way (Qwen3.5) is read with its tower if a dataset has images or videos.
    """
    sees = sees_images(path)
    if sees is not False or not any(entry.columns.images or entry.columns.videos for entry in datasets):
        return sees
    return seeing_name(path, None) is not None


def read_run(path: str | None, overrides: Sequence[str] = ()) -> FactoryRun:
    """Return the run of a training file after its changes (``key=value``); no path means the changes alone."""
    given = read_keys(path, overrides)
    own = own_keys(given)
    model = str(own.model_name_or_path)
    # None: the model is a name on the hub, and its config is not on this machine; FactoryRun._sees checks later.
    sees = sees_images(model)
    depends = sees is False and seeing_name(model, None) is not None  # on the datasets
    check_supported(given)
    if sees is not None and not depends:
        check_vision(own, given, sees)
    check_keys(own, given)
    arguments = _arguments(own, given)
    template = _template(own)
    accepted = None if depends else sees
    train = read_datasets(own.dataset, own.dataset_dir, accepted) if own.dataset else []
    evaluation = read_datasets(own.eval_dataset, own.dataset_dir, accepted) if own.eval_dataset else []
    if depends:
        sees = reads_images(model, [*train, *evaluation])
        check_vision(own, given, bool(sees), depends)
    _check_datasets(own, train, evaluation)
    ray = RayArguments(**{key: value for key, value in given.items() if key in RAY_KEYS})
    ray.refuse_address()
    notes = (*notes_of(own), *(vision_notes(own, own.train_on_prompt) if sees else ()))
    return FactoryRun(own, arguments, tuple(train), tuple(evaluation), template, notes, ray)


def _template(keys: FactoryKeys) -> ChatTemplate | None:
    """Return the template that the file names, with the file's changes to it."""
    if keys.template is None:
        return None
    named = named_template(keys.template)
    system = named.default_system if keys.default_system is None else keys.default_system
    return dataclasses.replace(
        named, default_system=system, thinking=keys.enable_thinking, keeps_thoughts=keys.preserve_thinking
    )


def _check_datasets(keys: FactoryKeys, train: list[DatasetEntry], evaluation: list[DatasetEntry]) -> None:
    if keys.streaming and (len(train) > 1 or train[0].num_samples is not None):
        raise ValueError(
            "streaming: True reads one whole dataset; name one without num_samples in dataset, or leave streaming out"
        )
    for entry in train + evaluation:
        _check_answers(keys.stage, entry)
    spoken = [e.name for e in train + evaluation if e.formatting != "alpaca" or not e.columns.prompt]
    if keys.stage == "pt" and spoken:
        raise ValueError(
            f"the dataset {spoken[0]!r} holds conversations, and stage: pt reads texts; give the column of the texts "
            "as prompt in dataset_info.json, or choose stage: sft"
        )


def _check_answers(stage: str, entry: DatasetEntry) -> None:
    """Raise for a dataset whose answers are not the kind that a stage learns from."""
    has = "pairs" if entry.ranking else "tagged answers" if entry.columns.kto_tag is not None else "single answers"
    needs = {"dpo": "pairs", "rm": "pairs", "kto": "tagged answers"}.get(stage, "single answers")
    says = {"pairs": "ranking: true", "tagged answers": "a kto_tag", "single answers": "neither ranking nor kto_tag"}
    fits = {"pairs": "dpo or rm", "tagged answers": "kto", "single answers": "sft"}
    if has != needs:
        raise ValueError(
            f"the dataset {entry.name!r} holds {has} ({says[has]} in dataset_info.json), and stage: {stage} learns from"
            f" {needs} ({says[needs]}); choose another dataset, or stage: {fits[has]}"
        )


def _arguments(keys: FactoryKeys, given: Mapping[str, Any]) -> "Seq2SeqTrainingArguments":
    """Return the training and Megatron arguments, including those that follow from other keys."""
    from lightning_mcore.arguments.training import Seq2SeqTrainingArguments

    values = {key: value for key, value in given.items() if key not in OWN_KEYS | RAY_KEYS | set(REFUSED)}
    if "output_dir" not in values:
        raise ValueError("output_dir is not given; give the folder for checkpoints and the model")
    if keys.use_megatron_bridge:
        # Only where the file says nothing: its own value comes later and wins.
        values = dict.fromkeys(_BRIDGE, True) | values
    if keys.warmup_ratio:
        values["warmup_steps"] = keys.warmup_ratio
    if keys.moe_aux_loss_coef is not None:
        values["moe_aux_loss_coeff"] = keys.moe_aux_loss_coef
    if keys.masked_softmax_fusion is not None:
        more = values.get("additional_configs") or {}
        check_type("additional_configs", more, dict[str, Any])
        values["additional_configs"] = {"masked_softmax_fusion": keys.masked_softmax_fusion} | dict(more)
    if keys.mixed_precision in _PRECISIONS:
        values[_PRECISIONS[keys.mixed_precision]] = True
    values = _with_fp8(keys, translated(keys, values))
    return Seq2SeqTrainingArguments(**values)


def _with_fp8(keys: FactoryKeys, values: dict[str, Any]) -> dict[str, Any]:
    """Translate ``fp8`` in the arguments if it is a yes or no; a format's name is kept."""
    fp8 = values.get("fp8")
    if isinstance(fp8, bool):
        del values["fp8"]
        return Fp8Arguments(fp8=fp8, fp8_backend=keys.fp8_backend).merged_into(values)
    # For its errors alone, about the backend.
    Fp8Arguments(fp8=bool(fp8), fp8_backend=keys.fp8_backend)
    return values


def _tokenizer(path: str) -> Any:
    """Return the tokenizer of a model."""
    try:
        return auto_tokenizer(path)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer of model_name_or_path={path!r} cannot be loaded: {error}; give a model that has one"
        ) from error
