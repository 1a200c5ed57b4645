# SPDX-License-Identifier: Apache-2.0
"""``TrainingArguments``: transformers' training arguments and Megatron's in one object, and the run that it describes.

Creating the object checks the values and uses no device. transformers' class needs ``accelerate`` to choose a device,
and a GPU for bf16; here the strategy chooses the device, so arguments can be read on machines without a GPU.
``mapping.py`` says where each field goes; ``build.py`` makes Lightning's objects.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from transformers import Seq2SeqTrainingArguments as HFSeq2SeqTrainingArguments
from transformers import TrainingArguments as HFTrainingArguments

from lightning_mcore.arguments.deepspeed import deepspeed_note, zero_stage
from lightning_mcore.arguments.fields import check_types
from lightning_mcore.arguments.mapping import newest_checkpoint, run_settings
from lightning_mcore.arguments.megatron import MegatronArguments
from lightning_mcore.arguments.training_rules import (
    REFUSED,
    TEXT_METRICS,
    check_course,
    check_foreign,
    check_loggers,
    check_metric,
    check_training,
    check_validation,
)
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.value_checks import require_choice
from lightning_mcore.parallel.megatron_import import import_megatron

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from lightning_mcore import MCoreFinetuningData, MCoreGPT, MCorePrecision, MCoreStrategy

_TOUCH_DEVICES = ("bf16", "bf16_full_eval", "tf32")  # transformers would look for a GPU that has them
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


@dataclasses.dataclass
class TrainingArguments(MegatronArguments, HFTrainingArguments):
    """transformers' training arguments and Megatron's; a transformers field that is not supported raises if it is set.

    ``activation_checkpointing=True`` (or ``gradient_checkpointing``, its old name) means
    ``recompute_granularity="full"``. ``bf16`` accumulates gradients in fp32 and sets
    ``accumulate_allreduce_grads_in_fp32``. ``deepspeed``, a DeepSpeed config, sets ``use_distributed_optimizer`` if its
    ZeRO stage is 1 or more.

    Raises:
        FileNotFoundError: ``additional_configs`` or ``deepspeed`` names a file that does not exist.
        TypeError: A value has another type.
        ValueError: A value is not available, contradicts another one, or needs one that is not set.
    """

    def __post_init__(self) -> None:
        """Check every value, then the fields against each other, and let transformers process its own."""
        resume: Any = self.resume_from_checkpoint
        if isinstance(resume, bool):  # Trainer.train takes a bool, and so may a YAML file
            self.resume_from_checkpoint = str(resume).lower()
        # Our checks come first: transformers would rewrite values, or raise with advice that does not fit here.
        check_foreign(self, self._foreign())
        self._check_types()
        self._take_deepspeed()
        MegatronArguments.__post_init__(self)
        check_training(self)
        if self.bf16:
            self.accumulate_allreduce_grads_in_fp32 = True
        self._let_transformers_read()
        # After transformers, which parses lr_scheduler_kwargs and report_to from text.
        check_course(self)
        check_loggers(list(self.report_to or []))

    def _take_deepspeed(self) -> None:
        """Turn on the distributed optimizer for a ZeRO stage from 1; ``settings`` has a note that says so."""
        self._notes: tuple[str, ...] = ()
        if self.deepspeed is None:
            return
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        self.use_distributed_optimizer |= zero_stage(self.deepspeed, values) > 0
        self._notes = (deepspeed_note(self.deepspeed),)
        self.deepspeed = None  # otherwise transformers would start DeepSpeed

    def _check_types(self) -> None:
        check_types(self, may_be_none=REFUSED)  # HfArgumentParser turns their lists into None

    @staticmethod
    def _foreign() -> type:
        return HFTrainingArguments

    def _let_transformers_read(self) -> None:
        """Run transformers' own ``__post_init__`` without the fields that make it look for a device or warn."""
        names = [name for name in (*_TOUCH_DEVICES, *_CHECKPOINTING) if hasattr(self, name)]
        kept = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, None if name == "tf32" or name in _CHECKPOINTING else False)
        metric, accelerator = self.greater_is_better, self.accelerator_config
        try:
            HFTrainingArguments.__post_init__(self)  # type: ignore[no-untyped-call]
        finally:
            # transformers renames gradient_checkpointing with a warning; here both names get the value.
            checkpointing = any(kept.get(name) for name in _CHECKPOINTING)
            for name in names:
                setattr(self, name, checkpointing if name in _CHECKPOINTING else kept[name])
            self.accelerator_config = accelerator  # accelerate's defaults as an object, if it is installed
        if metric is None and self.metric_for_best_model is not None:  # transformers looks only at the end of the name
            self.greater_is_better = not self.metric_for_best_model.endswith(("loss", "perplexity"))

    @property
    def _setup_devices(self) -> "torch.device":
        """The CPU. transformers sets up its device here; in this package the strategy does so when training starts."""
        self._n_gpu = 0
        self.distributed_state = None
        import torch

        return torch.device("cpu")

    @property
    def stages(self) -> list[str]:
        """The stages of ``do_train``, ``do_eval`` and ``do_predict``, in this order, with Lightning's names."""
        # With do_train, evaluation is part of fit.
        names = {"fit": self.do_train, "validate": self.do_eval and not self.do_train, "predict": self.do_predict}
        return [name for name, wanted in names.items() if wanted]

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint to resume from; ``resume_from_checkpoint="true"`` means the newest in ``output_dir``.

        Raises:
            FileNotFoundError: ``output_dir`` has no checkpoint.
        """
        given = self.resume_from_checkpoint
        if given is None or given.lower() in ("false", "true"):
            return newest_checkpoint(str(self.output_dir)) if given and given.lower() == "true" else None
        return given

    def settings(
        self,
        model_path: str | None = None,
        *,
        seq_length: int | None = None,
        devices: int | str | None = None,
        num_nodes: int | None = None,
        on_cpu: bool | None = None,
    ) -> RunSettings:
        """Return the run as plain data, without building anything or importing Lightning or Megatron.

        Args:
            model_path: Folder of the Hugging Face model, or its name on the hub; None for another model.
            seq_length: Tokens per row; None for the longest that the model supports.
            devices: Ranks on each machine; None for as many as the Trainer finds.
            num_nodes: Machines; None for one.
            on_cpu: Whether the run is on a CPU, where switches of GPU kernels are dropped; None for ``use_cpu``.

        Raises:
            ValueError: The model has experts, and a field does not allow them.
        """
        settings = run_settings(
            self, model_path, seq_length=seq_length, devices=devices, num_nodes=num_nodes, on_cpu=on_cpu
        )
        return dataclasses.replace(settings, notes=(*self._notes, *settings.notes))

    @property
    def on_cpu(self) -> bool:
        """Whether a run on this machine is on the CPU: ``use_cpu`` is set, or there is no GPU."""
        import torch

        return bool(self.use_cpu) or not torch.cuda.is_available()

    def strategy(self) -> "MCoreStrategy":
        """Build the strategy."""
        import_megatron()
        from lightning_mcore.arguments.build import make_strategy

        return make_strategy(self.settings(on_cpu=self.on_cpu).strategy)

    def precision(self) -> "MCorePrecision":
        """Build the precision plugin."""
        import_megatron()
        from lightning_mcore.arguments.build import make_precision

        return make_precision(self.settings().precision)

    def trainer(self, **overrides: Any) -> "pl.Trainer":
        """Seed everything, and build a Trainer with strategy, precision, callbacks and loggers.

        Args:
            overrides: Arguments of ``Trainer``, such as ``devices`` and ``num_nodes``, that replace the run's;
                ``callbacks`` and ``plugins`` are added instead.

        Raises:
            ModuleNotFoundError: A logger in ``report_to`` is not installed.
            TypeError: ``Trainer`` has no such argument.
        """
        import_megatron()
        from lightning_mcore.arguments.build import make_trainer

        return make_trainer(self, self.settings(on_cpu=self.on_cpu), overrides)

    def model(
        self,
        path: str,
        *,
        seq_length: int | None = None,
        transformer: Mapping[str, Any] | None = None,
        lora: Any = None,
        adapters: list[str] | None = None,
        preference: Any = None,
        embedding: Any = None,
        reranker: Any = None,
    ) -> "MCoreGPT":
        """Build the model from a Hugging Face model, with the optimizer and fields of these arguments.

        Args:
            path: Its folder or its name on the hub.
            seq_length: Tokens per row; None for the longest that the model supports.
            transformer: More fields of ``TransformerConfig``; the arguments override them.
            lora: Adapters to train, as for ``MCoreGPT.from_pretrained``; ``LoraArguments`` makes them.
            adapters: PEFT adapters to merge first, as for ``MCoreGPT.from_pretrained``.
            preference: A ``Preference``, for an ``MCorePreference`` that learns from pairs of answers; ``DPOConfig``
                makes one.
            embedding: An ``Embedding``, for an ``MCoreEmbedding``.
            reranker: A ``Reranker``, for an ``MCoreReranker``.

        Raises:
            FileNotFoundError: There is no such model.
            ValueError: It is not supported, or a field does not fit it.
        """
        from lightning.pytorch.utilities import rank_zero_info

        import_megatron()
        from lightning_mcore.arguments.build import make_model
        from lightning_mcore.config.preference import Preference
        from lightning_mcore.models.kinds import kind_of

        kinds = {"preference": preference, "embedding": embedding, "reranker": reranker}
        kinds = {name: value for name, value in kinds.items() if value is not None}
        kind_of(kinds)  # raises for two
        loss = None if preference is None else Preference.of(preference).loss
        # Which metrics exist depends on the loss, so this check could not run earlier.
        more = kinds | {name: value for name, value in {"lora": lora, "adapters": adapters}.items() if value}
        check_metric(self.metric_for_best_model, loss, next((kind for kind in TEXT_METRICS if kind in more), None))
        settings = self.settings(path, seq_length=seq_length, on_cpu=self.on_cpu)
        for note in settings.notes:
            rank_zero_info(note)
        return make_model({**settings.model, **more}, transformer or {})

    def data(
        self,
        train_files: str | list[str],
        tokenizer: Any,
        seq_length: int,
        *,
        pairs: bool = False,
        queries: Literal["embedding", "reranker"] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> "MCoreFinetuningData":
        """Build the data module for fine-tuning on files.

        Args:
            train_files: Files, as for ``MCoreFinetuningData``.
            tokenizer: A tokenizer, as for ``MCoreFinetuningData``.
            seq_length: Tokens per row.
            pairs: Read pairs of answers with ``MCorePreferenceData``; ``per_device_train_batch_size`` counts pairs.
            queries: Read queries with texts, with ``MCoreEmbeddingData`` or ``MCoreRerankingData``;
                ``per_device_train_batch_size`` counts queries.
            overrides: Other arguments of ``MCoreFinetuningData``, such as ``validation_files``.

        Raises:
            ValueError: A setting is not allowed.
        """
        import_megatron()
        from lightning_mcore.arguments.build import make_data
        from lightning_mcore.data.embedding.datamodule import MCoreEmbeddingData, MCoreRerankingData
        from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
        from lightning_mcore.data.preference.datamodule import MCorePreferenceData

        settings, given = self.settings(seq_length=seq_length).data, overrides or {}
        check_validation(self, given)
        if pairs and queries:
            raise ValueError(f"pairs=True and queries={queries!r} are two kinds of data; leave one of them out")
        require_choice("queries", queries, Literal["embedding", "reranker"], or_none=True)
        readers: dict[str | None, type[MCoreFinetuningData]] = {
            "embedding": MCoreEmbeddingData,
            "reranker": MCoreRerankingData,
        }
        kind = MCorePreferenceData if pairs else readers.get(queries, MCoreFinetuningData)
        return make_data({"train_files": train_files, "tokenizer": tokenizer, **settings, **given}, kind)

    def seed_everything(self) -> None:
        """Seed all random number generators with ``seed``, also in loader workers, as ``trainer`` does."""
        import_megatron()
        from lightning_mcore.arguments.build import seed_everything

        seed_everything(self)


@dataclasses.dataclass
class Seq2SeqTrainingArguments(TrainingArguments, HFSeq2SeqTrainingArguments):
    """:class:`TrainingArguments` with transformers' sequence-to-sequence fields, which raise if they are set.

    Raises:
        FileNotFoundError: ``additional_configs`` names a file that does not exist.
        TypeError: A value has another type.
        ValueError: A value is not available, contradicts another one, or needs one that is not set.
    """

    @staticmethod
    def _foreign() -> type:
        return HFSeq2SeqTrainingArguments
