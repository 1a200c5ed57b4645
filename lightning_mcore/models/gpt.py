# SPDX-License-Identifier: Apache-2.0
"""``MCoreGPT``: a GPT, dense or with experts, ready to train on every layout.

A LightningModule around a GPT built from megatron-core's parts. Plain data, ``transformer={...}``, describes the model
with the fields of Megatron's ``TransformerConfig``. The strategy and ``Trainer(precision=...)`` decide how it is split
and in which number formats it computes. The steps below do not mention ranks or stages. Follow them in your own module:
build in ``configure_model``, and call ``self.model(...)`` once in each step.

A batch is a dict of [b, s] tensors: ``tokens``, ``labels`` (already shifted: the target at ``tokens[i]`` is
``labels[i]``; -100 for no target) and, optionally, ``loss_mask`` (1 where a token counts, 0 elsewhere) and
``position_ids`` (for learned positions; rotary positions count from the start of the row). The row ``tokens`` 5 6 7 8
has ``labels`` 6 7 8 -100. Rows may be packed (``data/packing/best_fit.py``): each sub-sequence then sees only itself.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any, Literal, Self

import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import AttributeDict
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lightning_mcore.checkpoint.model_state import TRAINED_ONLY
from lightning_mcore.config.architecture import Architecture, set_architecture
from lightning_mcore.config.distillation import Distillation
from lightning_mcore.config.embedding import Embedding
from lightning_mcore.config.field_homes import fusion_defaults
from lightning_mcore.config.inherited_arguments import arguments_of, passed_on
from lightning_mcore.config.layout import ModelShape
from lightning_mcore.config.lora import LoRA, check_train_only
from lightning_mcore.config.positions import PositionEmbedding, check_positions, gpt_arguments, set_yarn
from lightning_mcore.config.preference import Preference
from lightning_mcore.config.reranking import Reranker
from lightning_mcore.config.rules.model import LossNormalization, check_normalization
from lightning_mcore.config.value_checks import plain_values, require_flag, require_size
from lightning_mcore.data.finetuning.chat import ChatTemplate, end_of_turn
from lightning_mcore.data.multimodal import INPUTS
from lightning_mcore.hf.adapters import (
    adapted_model,
    add_adapters,
    check_held,
    fingerprint,
    frozen_columns,
    projection_names,
)
from lightning_mcore.hf.freezing import check_trained, train_only
from lightning_mcore.hf.peft_folder import check_folders, given_lora, load_adapter, merge_folders
from lightning_mcore.hf.peft_tensors import can_stack
from lightning_mcore.hf.pretrained import keep_wide, load_pretrained, pieces_of_module
from lightning_mcore.hf.registry import family_and_fields
from lightning_mcore.hf.source import absolute, pretrained_settings, require_head
from lightning_mcore.hf.tokens import difference_from_model, lost_in_export
from lightning_mcore.layers import sampling
from lightning_mcore.layers.activations import learn_activations
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.inputs import (
    ModelInputs,
    check_places,
    check_sources,
    check_vocabulary,
    longest_sequence,
    microbatch_shape,
)
from lightning_mcore.layers.losses import source_means, token_mean
from lightning_mcore.layers.metrics import TokenAccuracy, TokenPerplexity
from lightning_mcore.layers.multi_token import check_multi_token, gpt_mtp_block_spec
from lightning_mcore.layers.quantized import check_blocks, check_quantization
from lightning_mcore.layers.spec import TransformerImpl, check_backend, gpt_block_spec, resolve_transformer_impl
from lightning_mcore.layers.token_cache import TokenCache
from lightning_mcore.layers.transformer_config import build_transformer_config, check_transformer_fields
from lightning_mcore.layers.variants import change_ends
from lightning_mcore.layers.whole_documents import check_hybrid
from lightning_mcore.models import generation
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.models.speed import SpeedLogs
from lightning_mcore.parallel.chunks import built_chunks
from lightning_mcore.parallel.consensus import run_on_rank0
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.parallel.known_warnings import ignore_warnings_of_methods
from lightning_mcore.strategy.strategy import MCoreStrategy

Batch = dict[str, Tensor]
_BASE = "lora_base_digest"  # not "lora_base", an older digest


def _with_plain_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (Recipe, LoRA, Preference, Distillation, Embedding, Reranker)
    return {name: value.plain() if isinstance(value, kinds) else value for name, value in saved.items()}


class MCoreGPT(SpeedLogs):
    """A GPT language model with its training recipe, by default AdamW with linear warm-up and cosine decay.

    Logs ``train_loss``, ``val_loss`` and ``test_loss`` (means over tokens), ``val_perplexity`` and ``val_accuracy`` (of
    the next token; also ``test_``), and at each optimizer step ``grad_norm`` (before clipping), ``tokens_per_second``
    (of all ranks together, without known padding and validation time) and ``model_tflops`` (per device, in TFLOP/s;
    ``config/flops.py`` says what is counted). A callback's ``on_train_batch_end`` runs before the module logs these
    three, so it sees those of the step before in ``trainer.callback_metrics``. The strategy adds the losses of routers
    and of multi-token prediction (``strategy/logs/auxiliary.py``).

    Args:
        vocab_size: Number of existing tokens. The embedding is padded; see ``make_vocab_size_divisible_by``.
        seq_length: Tokens per sequence, for which the layout is checked and ``plan`` estimates memory and speed. Longer
            rows are trained too, and need more memory; a model with learned positions raises an error.
        transformer: Fields of Megatron's ``TransformerConfig`` (``MLATransformerConfig`` with
            ``multi_latent_attention``); ``num_layers``, ``hidden_size`` and ``num_attention_heads`` at least. They are
            plain data: an activation by its name, such as ``"silu"``, and any other function by its import path.
            Defaults are Megatron's except ``hidden_dropout=0.0``, ``attention_dropout=0.0`` and
            ``calculate_per_token_loss=True``.
        recipe: Optimizer and learning rate; :class:`~lightning_mcore.Recipe` has the fields and their defaults.
        position_embedding_type: Rotary, rotary stretched as in YaRN, a learned embedding of each position, or none.
        rotary_percent: Fraction of a head's channels that is rotated.
        rotary_base: Base of the rotary wavelengths.
        rope_scaling: Stretch long wavelengths as Llama 3 does, from 8192 positions.
        rope_scaling_factor: How much to stretch them.
        seq_len_interpolation_factor: Divides all positions; None for 1.
        yarn: With ``position_embedding_type="yarn"``: ``rotary_scaling_factor``, and values that differ from
            ``positions.YARN_DEFAULTS``; otherwise None.
        share_embeddings_and_output_weights: Whether the output layer is the embedding's transpose.
        make_vocab_size_divisible_by: The embedding has a multiple of this many rows, whatever the layout, so that the
            numbers are the same on all of them. ``tensor_model_parallel_size`` must divide the padded size.
        transformer_impl: The layers to use: ``"local"`` (plain PyTorch), ``"transformer_engine"``, or ``"auto"``, which
            uses TransformerEngine if it is installed and the device is a GPU. On a GPU, TransformerEngine's layers get
            the fused kernels of ``config/field_homes.py`` unless ``transformer`` sets these fields.
        architecture: Parts of the model for which Megatron's config has no field, such as norms after attention and MLP
            or an embedding factor: the settings of ``config/architecture.py``, by name; None for none.
        loss_normalization: ``"tokens"`` for the mean of the loss over tokens; ``"samples"`` for the mean over samples
            (rows, or the sub-sequences of packed rows) of each sample's mean over tokens.
        hf: The Hugging Face model that it was made from; filled in by :meth:`from_pretrained`.
        lora: Train low-rank adapters and freeze the rest; :class:`~lightning_mcore.LoRA` has the settings. Checkpoints
            then hold only the trained parameters if the frozen weights come from :meth:`from_pretrained`; otherwise all
            weights. None for no adapters.
        train_only: Parts of the Hugging Face names of weights to train, such as ``["layers.31.", "lm_head"]``; all
            others are frozen. None trains all weights.

    Raises:
        ValueError: A value is not allowed, or a field of ``transformer`` is unknown or set in another place.
        TypeError: A size is not an int.

    Examples:
        A new model; ``MCoreGPT.from_pretrained(path)`` starts from a Hugging Face model.

        >>> from lightning_mcore import MCoreGPT, Recipe
        >>> sizes = {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16}
        >>> model = MCoreGPT(32000, seq_length=2048, transformer=sizes, recipe=Recipe(learning_rate=1e-3))
    """

    takes_images = False
    """Whether a batch may hold images and videos."""

    with_images: str | None = "MCoreVisionGPT"
    """Name of the class that trains such a model on images and videos; None if there is none."""

    head = ""
    """Suffix of a family's name for models with this output layer: ``SCORING``, ``HIDDEN`` or none."""

    source_names: Sequence[str] = ()
    """The names that ``source_ids`` in a batch refer to; if empty, the data module's."""

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        transformer: dict[str, Any],
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
        super().__init__()
        ignore_warnings_of_methods(type(self))
        # save_hyperparameters() below reads these names
        transformer, yarn, architecture, hf, lora, train_only = map(
            plain_values, (transformer, yarn, architecture, hf, lora, train_only)
        )
        self.lora = None if lora is None else LoRA.of(lora)
        self.train_only = train_only
        if train_only is not None:
            check_train_only(train_only, lora is not None)
        self.recipe = Recipe.of(recipe)
        self.recipe.check_model(self.lora is not None, bool(transformer.get("use_mup")))
        self.save_hyperparameters()
        self.hparams["recipe"] = self.recipe.plain()  # even if a subclass has an argument of this name
        for name in ("vocab_size", "seq_length", "make_vocab_size_divisible_by"):
            require_size(name, self.hparams[name])
        require_flag("share_embeddings_and_output_weights", share_embeddings_and_output_weights)
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.loss_normalization = loss_normalization
        self.transformer = check_transformer_fields(transformer)
        check_positions(self._positions, self.transformer)
        self.architecture = Architecture.of(architecture)
        # 50257 tokens with multiples of 128 make 50304 rows
        self.padded_vocab_size = -(-vocab_size // make_vocab_size_divisible_by) * make_vocab_size_divisible_by
        self.metrics = nn.ModuleDict()
        for stage in ("val", "test"):
            self.metrics[f"{stage}_perplexity"] = TokenPerplexity()
            self.metrics[f"{stage}_accuracy"] = TokenAccuracy(vocab_size)
        self._config: TransformerConfig | None = None
        # What configure_model reads, once
        self._starts_from = None if self.lora is None else self.lora.base_model_name_or_path
        self._merged = [] if self.lora is None else list(self.lora.merged_adapters or [])
        self._adapter: str | None = None
        self._base: str | None = None  # digest of the frozen weights
        self._given_family: str | None = None  # a path in hparams comes from a file and is not imported

    @classmethod
    def from_pretrained(
        cls,
        path: str,
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
    ) -> "MCoreGPT":  # LightningCLI cannot resolve Self
        """Make a module from a Hugging Face model, and start from its weights on any layout.

        The weights are read when the model is built; each rank reads the parts that it holds. A run that resumes from
        its own checkpoint does not read them. A subclass must accept the constructor arguments of this class.

        Args:
            path: Folder of the model, in safetensors, its name on the Hugging Face hub, or a checkpoint from
                ``lightning-mcore import`` or from a run of this class. A checkpoint of adapters continues them.
            seq_length: Tokens per sequence; None for the longest that the model supports.
            transformer: Fields of ``TransformerConfig`` that override the model's config.
            recipe: Optimizer and learning rate, as in the constructor.
            make_vocab_size_divisible_by: The embedding has a multiple of this many rows, whatever the layout.
            transformer_impl: ``"local"``, ``"transformer_engine"`` or ``"auto"``, as in the constructor.
            loss_normalization: Mean of the loss over ``"tokens"`` or ``"samples"``, as in the constructor.
            family: The kind of model: a ``model_type``, or ``"package.module:FAMILY"`` for your own; None for the
                family in its config.
            lora: Train low-rank adapters and freeze the weights, as in the constructor; or a PEFT folder, or its name
                on the hub, to continue its adapters. ``{"path": folder, "quantization": "nf4"}`` continues them on
                4-bit weights.
            adapters: Folders or names of PEFT adapters to merge into the weights first, one after another.
            train_only: Parts of the Hugging Face names of weights to train, as in the constructor.

        Raises:
            FileNotFoundError: There is no such model, or no such adapter.
            ValueError: Its family is unknown, or its config asks for something that is not supported.
        """
        return cls._of_pretrained(**passed_on(locals()))

    @classmethod
    def _of_pretrained(
        cls,
        path: str,
        family: str | None,
        seq_length: int | None,
        transformer: dict[str, Any] | None,
        lora: LoRA | dict[str, Any] | str | None,
        adapters: list[str] | None,
        **arguments: Any,
    ) -> Self:
        """Make a module from a Hugging Face model; ``arguments`` are more arguments of the constructor."""
        own = pretrained_settings(path, family, seq_length, transformer)
        cls.check_kind(path, own)
        if arguments.get("train_only") is None:
            arguments.pop("train_only", None)  # a subclass may not have it
        if isinstance(adapters, str):
            raise TypeError(f"adapters={adapters!r} is not a list; give [{adapters!r}]")
        merged = [absolute(adapter) for adapter in adapters or []]
        stored = own.get("lora") is not None  # a checkpoint of adapters, which knows its base
        if stored and (lora is not None or merged):
            raise ValueError(f"{path} is a checkpoint of LoRA adapters and continues them; leave lora and adapters out")
        continued: str | None = None
        if lora is not None:
            settings, continued = given_lora(lora)
            base = absolute(path)
            own["lora"] = replace(settings, base_model_name_or_path=base, merged_adapters=merged or None)
        module = cls(**own, **arguments)
        require_head(path, own["hf"]["family"], module.head)
        module._given_family = family or module._given_family
        if module.head:
            module._name_family()
        if stored:
            module._adapter = absolute(path)
            return module
        module._starts_from = absolute(path)  # the working folder may change
        module._merged = merged
        module._adapter = None if continued is None else absolute(continued)
        return module

    @classmethod
    def check_kind(cls, path: str, settings: dict[str, Any]) -> None:
        """Raise ValueError for the settings of another kind of model, and drop settings that are not arguments here."""
        if "vision" in settings:
            remedy = f"take {cls.with_images}" if cls.with_images else "give a text-only model"
            raise ValueError(f"{path} also sees images, which {cls.__name__} does not; {remedy}")

    @property
    def config(self) -> TransformerConfig:
        """Megatron's config: the fields of ``transformer`` and the fields that the strategy owns."""
        if self._config is None:
            self._config = self._build_config()
        return self._config

    def check_settings(self) -> None:
        """Check that Megatron and the machine support the settings, without parameters and process groups.

        Raises:
            ValueError: The model's fields and the strategy's contradict each other, or these layers or this device do
                not support a field.
            ModuleNotFoundError: TransformerEngine is asked for but not installed.
        """
        config = self._build_config()
        device_type = self._device_type()
        check_backend(config, self._impl(device_type), device_type)
        learned_positions = self._positions["position_embedding_type"] == "learned_absolute"
        check_multi_token(config, self.hparams["share_embeddings_and_output_weights"], learned_positions)
        check_normalization(self.loss_normalization, config)
        self._check_finder()
        is_new = self._trainer is not None and not (self.hparams["hf"] or self._resumes or hasattr(self, "model"))
        is_own = type(self).configure_model.__module__.startswith("lightning_mcore.")  # another may load weights
        if is_new and is_own and not config.perform_initialization:
            raise ValueError(
                "perform_initialization=False leaves a new model's weights uninitialized; remove it, or start from a"
                " model's folder (from_pretrained) or a checkpoint (load_weights or ckpt_path)"
            )
        if self._hybrid:
            check_hybrid(config, type(self).__name__ if hasattr(self, "vision") else None)
        if self.lora is not None:
            names = projection_names(*self.hf_names())
            self.lora.check_targets(names, strict=self._adapter is None)
            check_held(*self.hf_names(), self.lora)
            self.lora.check_layers(config, names)
            vocabulary = {**self.transformer, **self.hparams}
            self.lora.check_vocabulary(names, vocabulary, self.padded_vocab_size, config.tensor_model_parallel_size)
            if self.lora.quantization:
                impl, base = resolve_transformer_impl(self.hparams["transformer_impl"], device_type), self._starts_from
                check_quantization(impl, self.lora.base_model_name_or_path)
                named, fields = self._given_family, self.hf_names()[1]
                columns = {} if base is None else frozen_columns(base, named, fields, self.lora)
                check_blocks(columns, config.tensor_model_parallel_size, config.expert_tensor_parallel_size or 1)
        if self.train_only is not None:
            check_trained(*self.hf_names(), self.train_only)
        if self._starts_from is not None:
            # A resumed run takes its adapters from its checkpoint, so the folder may be gone
            given = [] if self._adapter is None or self._resumes else [self._adapter]
            check_folders(self._starts_from, [*self._merged, *given], self._given_family)

    def _check_finder(self) -> None:
        """Reject Lightning's finder as a callback: the recipe's schedule would replace its rate after one step."""
        is_own = type(self).configure_optimizers.__module__.startswith("lightning_mcore.")  # another has no recipe
        fits = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        for callback in self.trainer.callbacks if fits and is_own else ():  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateFinder) and not callback._early_exit:  # set by Tuner
                raise ValueError(
                    f"{type(callback).__name__} sets the learning rate for one step only, because the recipe's schedule"
                    " replaces it; remove the callback, and call Tuner(trainer).lr_find(model, data) before fit, which"
                    " sets recipe.learning_rate"
                )

    def configure_model(self) -> None:
        """Build this rank's chunks, then read weights, freeze them and add adapters, in this order."""
        if not hasattr(self, "model"):
            self._config = None  # left by a run that ended before a model was built
        self.model = self.pipeline(self.build_chunk)
        if self.hparams["hf"]:
            # Before any weight is read, so that fp32 weights keep their bits
            keep_wide(self, self.hf_names, self.hparams["hf"])
        # Adapters' checkpoints lack the base's weights, so a resumed run with lora reads them again
        if self._starts_from is not None and (self.lora is not None or not self._resumes):
            self._start_from(self._starts_from)
            self._starts_from = None  # the next run keeps the trained weights
        if hasattr(self.model.chunks[0], TRAINED_ONLY):
            return  # from an earlier run
        if self.train_only is not None:
            shapes = pieces_of_module(self).shapes
            trained = train_only(built_chunks(self), shapes, *self.hf_names(), self.train_only)
            self.trained_products = trained.multiplications(topk=self.config.moe_router_topk)
        if self.lora is not None:
            if self._base is None:
                self._base = fingerprint(self)
            adapted = adapted_model(pieces_of_module(self).shapes, *self.hf_names(), self.lora)
            self.trained_products = adapted.multiplications(topk=self.config.moe_router_topk)
            add_adapters(built_chunks(self), *self.hf_names(), self.lora)
            if self._adapter is not None and not self._resumes:
                load_adapter(self, self._adapter, self.lora)

    def _start_from(self, path: str) -> None:
        """Read a model's weights, merge adapters into them, and remember what identifies the base of new adapters."""
        load_pretrained(self, path, self._given_family)
        base = None if self.lora is None else fingerprint(self)
        # Layouts round merged weights differently, so the base is identified by the unmerged weights and each adapter
        marks = merge_folders(self, self._merged)
        if base is not None:
            self._base = " ".join([base, *marks])

    def _name_family(self) -> None:
        """Read the weights by the rules of another output layer; a base's config names a language model's."""
        named = (self.hparams["hf"] or {}).get("family", ":")
        if self._given_family is None and ":" not in named:  # a path in a file is not imported
            self._given_family = named

    def hf_names(self) -> tuple[Any, dict[str, Any]]:
        """Return the family that names the projections, and the settings of the model."""
        return family_and_fields({**self.hparams, "transformer": self.transformer}, self._given_family)

    def export_options(self) -> dict[str, list[str]]:
        """Return what ``lightning-mcore export`` can write from a checkpoint of this module, and its options for each.

        Returns:
            ``{"export": []}``; with adapters, the options for the ``"adapter"`` alone, and for the ``"merged"`` model
            unless the base is quantized.
        """
        if self.lora is None:
            return {"export": []}
        family, fields = self.hf_names()
        stacked = can_stack(self.lora, projection_names(family, fields))
        options = {"adapter": ["--adapter", *([] if stacked else ["--experts", "each"])]}
        return options if self.lora.quantization else {**options, "merged": []}

    @property
    def _resumes(self) -> bool:
        """Whether the weights come from a run's checkpoint."""
        return self._trainer is not None and self._trainer.ckpt_path is not None

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save arguments as Lightning does, with :class:`Recipe` and :class:`LoRA` as plain data.

        Args:
            args: Names of arguments, or values to save; without them, all arguments.
            ignore: Names of arguments to skip.
            frame: Frame of the constructor; the caller's by default.
            logger: Whether to pass them to the logger.
        """
        current = inspect.currentframe()
        # Lightning looks for arguments in its caller's frame, which would be this method
        frame = frame if frame is not None or current is None else current.f_back
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        self.hparams.update(_with_plain_settings(self.hparams))

    @property
    def hparams_initial(self) -> AttributeDict:
        """The constructor's saved arguments for loggers, with recipes and LoRA settings as plain data."""
        return AttributeDict(_with_plain_settings(super().hparams_initial))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the adapters' base."""
        if self._base is not None:
            checkpoint[_BASE] = self._base

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the weights to the checkpoint; read a recipe whose fields were saved as separate hyper-parameters."""
        recorded = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        self._check_base(checkpoint.get(_BASE), dict(recorded.get("lora") or {}))
        if self.lora is None:
            self._starts_from = None
        # Checkpoints from before Recipe existed have learning_rate and the like among the hyper-parameters
        flat = {name: recorded[name] for name in self.recipe.plain() if name in recorded}
        if self._trainer is None and flat and "recipe" not in recorded and self.recipe == Recipe():
            self.recipe = Recipe(**flat)
            self.hparams["recipe"] = self.recipe.plain()

    def _check_base(self, base: str | None, recorded: Mapping[str, Any]) -> None:
        """Reject a checkpoint of adapters in a model without any or on another base; ``recorded`` are its settings."""
        if base is None:
            return
        if self.lora is None:
            raise ValueError(
                "this checkpoint holds LoRA adapters, and the model has none; give it lora=, with the settings of the"
                f" run that wrote it (r={recorded.get('r')}, target_modules={recorded.get('target_modules')!r})"
            )
        if self._base is None or base == self._base:
            return
        merged = recorded.get("merged_adapters") or []
        if merged != self._merged:
            raise ValueError(
                f"the adapters in this checkpoint were trained on a base with adapters={merged!r} merged into it, and"
                f" adapters={self._merged!r} is given; give from_pretrained() the same folders"
            )
        raise ValueError(
            "the adapters in this checkpoint were trained on another base than"
            f" {self.lora.base_model_name_or_path}; give the model that they belong to"
        )

    @classmethod
    def _check_given(cls, given: Mapping[str, Any]) -> None:
        """Raise ValueError for recipe fields that are given one by one."""
        own = inspect.signature(cls).parameters
        for name in Recipe().plain().keys() & given.keys() - own.keys():
            raise ValueError(f"{name} is a field of Recipe; give recipe=Recipe({name}={given[name]!r})")

    @classmethod
    def _check_recorded(cls, path: str, recorded: Mapping[str, Any]) -> None:
        """Raise ValueError for recipe fields saved one by one if the constructor would receive them as ``**kwargs``."""
        own = inspect.signature(cls).parameters
        flat = [name for name in Recipe().plain() if name in recorded and name not in own]
        takes_any = any(given.kind is given.VAR_KEYWORD for given in own.values())
        if flat and takes_any and "recipe" not in recorded:
            raise ValueError(
                f"{path} was saved when {flat[0]} was an argument of MCoreGPT, and {cls.__name__} would pass it on "
                "with its **kwargs; create the module yourself and call load_weights(path) in its configure_model()"
            )

    @property
    def learning_rate(self) -> float:
        """``recipe.learning_rate``; Lightning's learning rate finder reads and sets it, between two runs."""
        return self.recipe.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.recipe = replace(self.recipe, learning_rate=value)
        self.hparams["recipe"] = self.recipe.plain()

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTChunk:
        """Build one chunk, with the embedding if ``pre_process``, and with the output layer if ``post_process``."""
        impl = self._impl(self._device_type())
        chunk = self._new_chunk(
            self.config,
            gpt_block_spec(self.config, impl, vp_stage),
            vocab_size=self.padded_vocab_size,
            max_sequence_length=self.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=self.hparams["share_embeddings_and_output_weights"],
            mtp_block_spec=gpt_mtp_block_spec(self.config, impl, vp_stage),
            vp_stage=vp_stage,
            **gpt_arguments(self._positions),
        )
        chunk.existing_tokens = self.vocab_size
        change_ends(chunk, self.architecture)
        learn_activations(chunk)
        return chunk

    def _new_chunk(self, *args: Any, **kwargs: Any) -> GPTChunk:
        return GPTChunk(*args, **kwargs)

    def model_shape(self) -> ModelShape:
        """Return the sizes that the layout must divide; builds nothing."""
        fields = SimpleNamespace(**self.transformer, shared_heads=self.architecture.shared_heads)
        return ModelShape.from_config(fields, seq_length=self.seq_length, vocab_size=self.padded_vocab_size)

    def microbatch_shape(self, batch: Batch) -> tuple[int, int]:
        """Return ``(sequence length, rows)`` of a microbatch; packed rows are joined."""
        return microbatch_shape(batch)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Check on the host that tokens and labels are in the vocabulary and that there are no images.

        Sequences must fit learned positions and a sparse attention's indexer; others may exceed ``seq_length``.

        Raises:
            ValueError: The batch has a fault; a label outside the vocabulary would silently have no loss. Ranks that
                read other data learn of the error when this rank ends.
        """
        images = [name for name in INPUTS if name in batch]
        if images and not self.takes_images:
            other = f"train {self.with_images}, or " if self.with_images else ""
            raise ValueError(
                f"a batch has {images[0]}, which {type(self).__name__} would ignore; {other}leave images and videos out"
                " of the data"
            )
        check_vocabulary(batch, self.vocab_size)
        check_sources(batch, self._names_of_sources())
        if self._positions["position_embedding_type"] == "learned_absolute":
            check_places(batch, self.seq_length)
        if self.architecture.indexer is not None:
            longest = longest_sequence(batch)
            self.architecture.check_length(f"a sequence of {longest} tokens", longest)
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean loss of a microbatch and, unless ``calculate_per_token_loss=False``, its weight."""
        losses, inputs = self.token_losses(batch)
        return self._log_loss("train_loss", self.learned_losses(losses), inputs)

    def learned_losses(self, losses: Tensor) -> Tensor:
        """Return the token losses that training and evaluation average; a subclass may change them.

        Args:
            losses: The cross entropy of each of this rank's tokens in fp32, without a sum or mean: [b, s / cp], or [1,
                b * s / cp] for a packed batch.

        Returns:
            Losses of the same shape and type.
        """
        return losses

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Measure each of several dataloaders separately."""
        self._forget_last_loader("val", batch_idx, dataloader_idx)

    def on_test_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Measure each of several dataloaders separately."""
        self._forget_last_loader("test", batch_idx, dataloader_idx)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss``, ``val_perplexity`` and ``val_accuracy`` for each dataloader."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``test_loss``, ``test_perplexity`` and ``test_accuracy`` for each dataloader."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most probable next token after each position, [b, s] int64."""
        if self._is_of_gpt_chunks:  # in chunks, without the logits of a whole row; the losses are not used
            inputs = self.model_inputs(batch)
            _, best = self._judge(inputs, inputs.tokens)
        else:
            logits, _ = self.token_logits(batch)
            best = sampling.vocab_parallel_argmax(logits, self.vocab_size, process_group("tp"))
        best = best.view(len(batch["tokens"]), -1)  # packed rows were joined into one
        boundaries, hybrid = batch.get("cu_seqlens_padded"), self._hybrid
        return sampling.gather_sequence(best, process_group("cp"), boundaries, hybrid)

    def next_logits(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the logits after position ``batch["last"]`` of each sequence, [b, vocab_size] fp32."""
        inputs = self.model_inputs(batch)
        asked = inputs.position_ids == batch["last"][:, None]
        arguments = self._more_arguments(inputs)
        arguments.pop("loss_mask", None)
        if self._is_of_gpt_chunks:  # others compute the logits of the whole prompt
            arguments["places"] = asked
        logits = self._pipeline_of_step()(inputs.tokens, inputs.position_ids, None, **arguments)
        return sampling.logits_at(logits, asked, self.vocab_size, process_group("tp"), process_group("cp"))

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        *,
        top_p: float = 1.0,
        eos_token_id: int | list[int] | None = None,
    ) -> list[int]:
        """Continue a prompt, one token at a time, with a cache of keys and values.

        Collective: every rank calls it with the same arguments while the trainer runs, for example in a callback's
        ``on_train_end``. Without a trainer, call it on the whole model in ``with single_process():``; a model that does
        not come from ``load_from_checkpoint`` needs ``configure_model()`` first. Once there are more than
        ``seq_length`` tokens, each new one runs the whole model over the last ``seq_length``. Settings have the
        meaning that transformers' ``generate`` gives them; unlike there, no token ends the text by default.

        Args:
            prompt: Tokens to continue, at least one.
            max_new_tokens: Tokens to add.
            temperature: Divides the logits; 0 always chooses the most probable token.
            top_k: Sample only among this many of the most probable tokens; None for all.
            seed: Random seed for sampling.
            top_p: Sample only among the most probable tokens that together have this probability; 1 for all.
            eos_token_id: A token, or several, that end the text; the one that ends it is returned. None for no end.

        Returns:
            The prompt and the new tokens, the same on every rank.

        Raises:
            ValueError: The prompt is empty, a token is outside the vocabulary, a number is out of range, or the model
                gives something else than tokens.
        """
        if self._gives is not None:
            raise ValueError(f"{self._gives} and no next tokens; generate with a language model")
        return generation.continue_prompt(self, prompt, max_new_tokens, temperature, top_k, seed, top_p, eos_token_id)

    def on_train_start(self) -> None:
        """Warn if the data has another tokenizer than the model, a template that exports lack, or longer rows."""
        super().on_train_start()
        for warning in run_on_rank0(lambda: list(self._differences_from_data())):
            rank_zero_warn(warning)

    def _differences_from_data(self) -> Iterator[str]:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        tokenizer: Any = getattr(data, "tokenizer", None)
        length = getattr(data, "seq_length", None)
        path = self.hparams["hf"] and self.hparams["hf"].get("path")
        if path and hasattr(tokenizer, "get_vocab") and (told := difference_from_model(path, tokenizer.get_vocab())):
            yield told
        reading = getattr(data, "reading", None)
        template = getattr(reading, "template", None)
        if path and isinstance(template, ChatTemplate) and not getattr(reading, "documents", False):
            yield from lost_in_export(path, tokenizer, template.name, end_of_turn(tokenizer, template))
        if isinstance(length, int) and length > self.seq_length:
            yield (
                f"data.seq_length={length} is longer than the model's seq_length={self.seq_length}: rows are trained in"
                f" full, but generation sees only the last {self.seq_length} tokens of a longer text; make them equal"
            )

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return the optimizer, with weight decay only on matrices, and its learning-rate schedule.

        Raises:
            ValueError: The learning rate decays, but the number of steps is unknown.
        """
        everything = list(self.named_parameters())
        trained = [(name, parameter) for name, parameter in everything if parameter.requires_grad]
        width_mult = self.config.mup_width_mult if self.transformer.get("use_mup") else 1.0
        return self.recipe.build(trained or everything, self.trainer, width_mult)  # a stage may train nothing

    def _of_sequences(self, batch: Batch) -> tuple[Tensor, ModelInputs, Tensor]:
        """Return the last stage's output, the inputs that it is of, and the tokens of each sequence, [sequences]."""
        output, inputs = self.token_logits(batch)
        lengths = batch["cu_seqlens"].diff(dim=1) if inputs.packed is not None else batch["lengths"]
        return output, inputs, lengths.reshape(-1)

    @property
    def _counts_batch(self) -> bool:
        """Whether this batch counts; it does not if it is repeated because other ranks have one more."""
        strategy = self.trainer.strategy
        return not isinstance(strategy, MCoreStrategy) or strategy.logs.counts

    def _log_means(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Log means with the numbers that they are means over; the step's loss is also shown by progress bars."""
        for name, (mean, count) in values.items():
            shown = name in ("train_loss", "val_loss", "test_loss")
            self.log(name, mean.detach().float(), batch_size=count, sync_dist=True, prog_bar=shown)  # type: ignore[arg-type]

    def _log_loss(self, name: str, losses: Tensor, inputs: ModelInputs) -> Any:
        """Return a step's loss, and log it with its weight; without one, with the number of tokens."""
        assert inputs.loss_mask is not None
        loss = self.normalized_loss(losses, inputs, self.loss_normalization)
        mean, weight = (
            (loss["loss"], loss["num_tokens"]) if isinstance(loss, dict) else token_mean(losses, inputs.loss_mask)
        )
        # A batch with 900 tokens counts three times one with 300
        self.log(name, mean.detach(), batch_size=weight, sync_dist=True, prog_bar=True)  # type: ignore[arg-type]
        names = self._names_of_sources()
        if names and inputs.sources is not None:
            means, counts = source_means(losses, inputs, len(names))
            for source, mean, count in zip(names, means, counts, strict=True):
                self.log(f"{name}/{source}", mean, batch_size=count, sync_dist=True)
        return loss

    def _names_of_sources(self) -> Sequence[str]:
        """Return the names of the data's sources: this module's, or the data module's; empty if neither has any."""
        data = getattr(self._trainer, "datamodule", None)
        return self.source_names or getattr(data, "source_names", ())

    def _forget_last_loader(self, stage: str, batch_idx: int, dataloader_idx: int) -> None:
        """Empty the metrics between two dataloaders; Lightning has computed them, and resets them after the last."""
        if batch_idx == 0 and dataloader_idx > 0:
            metrics: Any = self.metrics
            for name in metrics:
                if name.startswith(f"{stage}_"):
                    metrics[name].reset()

    def _evaluate(self, stage: str, batch: Batch) -> None:
        losses, best, inputs = self._judged(batch)
        self._log_loss(f"{stage}_loss", self.learned_losses(losses), inputs)
        metrics: Any = self.metrics
        metrics[f"{stage}_perplexity"].update(losses, inputs.loss_mask)
        metrics[f"{stage}_accuracy"].update(best, inputs.labels, inputs.loss_mask)
        for name in (f"{stage}_perplexity", f"{stage}_accuracy"):
            self.log(name, metrics[name], on_step=False, on_epoch=True)

    def _judged(self, batch: Batch) -> tuple[Tensor, Tensor, ModelInputs]:
        """Return the loss of each token and the most probable one, [b, s / cp], and the inputs; on the last stage.

        A model of other chunks than GPTChunk returns the logits, [b, s / cp, v / tp], instead of the tokens.
        """
        if not self._is_of_gpt_chunks:
            logits, inputs = self.token_logits(batch)
            return self.losses_of_logits(logits, inputs), logits, inputs
        inputs = self.model_inputs(batch)
        assert inputs.labels is not None, "losses need labels"
        return *self._judge(inputs, inputs.labels), inputs

    def _judge(self, inputs: ModelInputs, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each of the labels and the most probable token, [b, s / cp], without whole logits."""
        pipeline = self._pipeline_of_step()
        arguments = self._more_arguments(inputs)
        arguments.pop("loss_mask", None)
        with contextlib.ExitStack() as stack:
            best: list[Tensor] = []
            chunk: Any = pipeline.last_chunk
            if chunk is not None:
                best = stack.enter_context(chunk.judging(labels))
            losses: Tensor = pipeline(inputs.tokens, inputs.position_ids, None, **arguments)
        return losses, best[0]

    @property
    def _gives(self) -> str | None:
        """What the model gives instead of next tokens, in words; None for a language model."""
        return None

    @property
    def takes_cache(self) -> bool:
        """Whether :meth:`generate` can keep keys and values: the layers can, and ``next_logits`` is not overridden."""
        return type(self).next_logits is MCoreGPT.next_logits and TokenCache.fits(self._pipeline_of_step())

    @property
    def _is_of_gpt_chunks(self) -> bool:
        return all(isinstance(chunk, GPTChunk) for chunk in self._pipeline_of_step().chunks)

    def _build_config(self) -> TransformerConfig:
        owned = self.megatron_fields()
        if self.transformer.get("multi_latent_attention"):  # its attention does the rotation
            owned |= {name: self.hparams[name] for name in ("rotary_base", "rotary_percent")}
        if self.architecture.has_half_layers:  # weights before the residual start as for one part a layer
            owned |= {"is_hybrid_model": True}
        config = build_transformer_config({**self._fusions(), **self.transformer}, owned)
        set_yarn(config, self._positions["yarn"])
        set_architecture(config, self.architecture)
        return config

    @property
    def _positions(self) -> dict[str, Any]:
        """The arguments, with defaults for those that a subclass lacks, as ``MCoreVisionGPT`` some about positions."""
        return {**arguments_of(MCoreGPT), **self.hparams}

    def _fusions(self) -> dict[str, bool]:
        device_type = self._device_type()
        if device_type != "cuda" or self._impl(device_type) == "local":
            return {}
        kind, architecture = self._positions["position_embedding_type"], self.hparams["architecture"]
        return fusion_defaults(self.transformer, kind, self.lora is not None, architecture)

    def _impl(self, device_type: str) -> Literal["local", "transformer_engine"]:
        choice = self.hparams["transformer_impl"]
        if choice == "auto" and not self.architecture.fits_transformer_engine:
            return "local"
        return resolve_transformer_impl(choice, device_type)

    def _device_type(self) -> str:
        if self._trainer is not None:
            return str(self._trainer.strategy.root_device.type)
        return "cuda" if torch.cuda.is_available() else "cpu"
