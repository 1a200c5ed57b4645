# SPDX-License-Identifier: Apache-2.0
"""A GPT of Megatron's parts: what ``MCoreGPT`` builds, with every supported release of megatron-core.

NVIDIA has deprecated ``GPTModel`` (a log message since 0.19) in favour of ``HybridModel``, which lacks some of its
arguments and is still changing. Both only arrange parts that are not deprecated: an embedding, rotary angles, a
``TransformerBlock``, multi-token prediction and an output layer, under ``LanguageModule``. :class:`GPTChunk` arranges
the same parts as ``GPTModel`` does, in the same order. So results are equal bit for bit, except for the losses of
multi-token prediction since 0.17, and each can read the other's checkpoints. It imports neither of the two models.

``MCoreGPT`` and ``hf_model`` build it, ``layers/vision.py`` derives from it, and your own module may use it too.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core import fp8_utils, tensor_parallel
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    tie_word_embeddings_state_dict,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from lightning_mcore.config.loss_chunks import LossChunkSize, tokens_of_chunk
from lightning_mcore.config.value_checks import require_choice
from lightning_mcore.layers.chunked_loss import Vocabulary, draws_numbers, in_chunks, logits_of_layer, summed_in_fp32
from lightning_mcore.layers.multi_token import add_losses_ahead
from lightning_mcore.layers.packed_sequences import all_real
from lightning_mcore.layers.score import HiddenStates

PositionEmbedding = Literal["learned_absolute", "rope", "yarn", "none"]

_MTP_TAKES_PADDING = "padding_mask" in inspect.signature(MultiTokenPredictionBlock.forward).parameters  # since 0.18


class GPTChunk(LanguageModule):  # type: ignore[misc]  # megatron-core has no type information
    """The layers of one virtual pipeline stage, with the embedding in the first and the output layer in the last.

    Args:
        config: Megatron's config of the model.
        transformer_layer_spec: The chunk's layers, as from ``gpt_block_spec``.
        vocab_size: Rows of the embedding: the vocabulary with its padding.
        max_sequence_length: Tokens of the longest sequence; learned positions have a row for each.
        pre_process: Whether this is the first chunk.
        post_process: Whether this is the last chunk.
        parallel_output: Whether logits stay split over the tensor-parallel ranks.
        share_embeddings_and_output_weights: Whether the output layer is the embedding's transpose.
        position_embedding_type: ``"yarn"`` reads ``yarn_*`` attributes of the config.
        rotary_percent: Part of each head's channels that is rotated.
        rotary_base: Base of the rotary angles.
        rope_scaling: Whether positions are stretched as in Llama 3.
        rope_scaling_factor: Factor of that stretch.
        seq_len_interpolation_factor: Factor by which all positions are divided; None for 1.
        mtp_block_spec: The chunk's layers of multi-token prediction, as from ``gpt_mtp_block_spec``; None for none.
        vp_stage: Number of the chunk on its rank; None with one chunk for each rank.

    Attributes:
        existing_tokens: Size of the vocabulary without padding, which has no part in the loss; None without padding.
        loss_chunk_size: Tokens that go through the output layer and the loss at once, as in ``MCoreStrategy``, which
            sets it.

    Source: ``GPTModel`` (megatron.core.models.gpt.gpt_model, 0.16.1 to 0.20).
    """

    existing_tokens: int | None = None
    loss_chunk_size: LossChunkSize = None
    _judged: tuple[Tensor, list[Tensor]] | None = None  # labels, and where to put the most probable tokens
    _kept: list[tuple[Tensor, Tensor | None]] | None = None

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules | ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        *,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: MultiTokenPredictionBlockSubmodules | None = None,
        vp_stage: int | None = None,
    ) -> None:
        require_choice("position_embedding_type", position_embedding_type, PositionEmbedding)
        super().__init__(config=config)
        # What Megatron's schedules, gradient sums and optimizers read of a model
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.mtp_process = mtp_block_spec is not None
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.parallel_output, self.rotary_base = parallel_output, rotary_base
        self._weights_stay = False

        # The order of these parts is the order of random draws and of parameters
        if pre_process or self.mtp_process:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size, max_sequence_length, position_embedding_type, tp_group=self.tp_group
            )
        rotary = {
            "kv_channels": config.kv_channels,
            "rotary_percent": rotary_percent,
            "rotary_interleaved": config.rotary_interleaved,
            "seq_len_interpolation_factor": seq_len_interpolation_factor,
            "rotary_base": rotary_base,
            "use_cpu_initialization": config.use_cpu_initialization,
        }
        self.rotary_pos_emb: Any = None
        if position_embedding_type == "rope" and not config.multi_latent_attention:
            self.rotary_pos_emb = RotaryEmbedding(
                **rotary, rope_scaling=rope_scaling, rope_scaling_factor=rope_scaling_factor, cp_group=self.cp_group
            )
        elif position_embedding_type == "yarn":
            self.rotary_pos_emb = _yarn(config, rotary)
        self.decoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        if position_embedding_type == "none" and config.multi_latent_attention:
            _rotate_by_nothing(self.decoder)
        if self.mtp_process:
            self.mtp = MultiTokenPredictionBlock(config, mtp_block_spec, vp_stage, self.pg_collection)
        if post_process:
            self._build_output_layer()
        if pre_process or post_process or self.mtp_process:
            self.setup_embeddings_and_output_layer()
        for name, module in self.named_modules():
            if hasattr(module, "finish_init"):
                module.finish_init(get_quant_config_or_none(name, config.quant_recipe))

    def _build_output_layer(self) -> None:
        config, layer = self.config, tensor_parallel.ColumnParallelLinear
        is_mup = getattr(config, "use_mup", False) and not self.share_embeddings_and_output_weights  # since 0.17
        # Megatron's schedules compute the layer's weight gradient from these after the last microbatch
        self.embedding_activation_buffer: list[Tensor] | None = None
        self.grad_output_buffer: list[Tensor] | None = None
        if config.defer_embedding_wgrad_compute:
            self.embedding_activation_buffer, self.grad_output_buffer = [], []
        in_mxfp8 = getattr(fp8_utils, "is_mxfp8_output_proj_active", None)  # since 0.19
        if in_mxfp8 is not None and in_mxfp8(config):
            engine = importlib.import_module("megatron.core.extensions.transformer_engine")
            layer = engine.TELMHeadColumnParallelLinear
        self.output_layer = layer(
            config.hidden_size,
            self.vocab_size,
            config=config,
            init_method=config.embedding_init_method if is_mup else config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=not self.parallel_output,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            embedding_activation_buffer=self.embedding_activation_buffer,
            grad_output_buffer=self.grad_output_buffer,
            tp_group=self.tp_group,
        )

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Take the activations of the stage before, [s / cp, b, h], / tp with sequence parallelism; a list has one."""
        [hidden] = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        self.decoder.set_input_tensor(hidden)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Run the chunk.

        Args:
            input_ids: Tokens, [b, s / cp] int64; packed rows are joined to [1, b * s / cp].
            position_ids: Positions of the tokens, like ``input_ids``.
            attention_mask: Pairs that are not attended to, [b, 1, s, s] bool; None for causal attention.
            decoder_input: Embeddings [s / cp, b, h] instead of those of ``input_ids``; None without.
            labels: Targets, like ``input_ids``; None to get logits.
            inference_context: Megatron's cache of keys and values; None without.
            packed_seq_params: Boundaries of packed sequences; None without.
            extra_block_kwargs: More arguments of Megatron's layers.
            runtime_gather_output: Whether to gather the logits of all tensor-parallel ranks; None for the opposite of
                ``parallel_output``.
            loss_mask: The tokens that count in multi-token prediction, like ``input_ids``; None for all.
            padding_mask: True for tokens that routers ignore, like ``input_ids``; None for none.
            places: True at the one position of a row whose logits are needed, like ``input_ids``; None for all.

        Returns:
            Activations for the next stage, [s / cp, b, h]; the loss of each token, [b, s / cp] fp32, if there are
            ``labels``; or else logits, [b, s / cp, v / tp], with ``inference_context`` those of the last token. With
            ``places``, [b, n, v / tp]: each stands for one of n equal parts of the positions, and counts in the part
            with the place.
        """
        self._begin_microbatch()
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        shared = {
            "attention_mask": attention_mask,
            "rotary_pos_emb": self._angles(inference_context, decoder_input, packed_seq_params),
            "packed_seq_params": packed_seq_params,
            **(extra_block_kwargs or {}),
        }
        hidden: Tensor = self.decoder(
            hidden_states=decoder_input, inference_context=inference_context, padding_mask=padding_mask, **shared
        )
        if self.config.mtp_num_layers and packed_seq_params is not None:
            # Megatron shifts tokens, labels and the loss mask by the boundaries of the real tokens
            # (`_roll_tensor_packed_seq` reads `cu_seqlens_q`, 0.16.1 to 0.20), as if there were no padding. With padded
            # boundaries, a sequence's last real token gets padding, which the loss mask hides.
            shared["packed_seq_params"] = packed_seq_params = all_real(packed_seq_params)
        looks_ahead = labels is not None or not self.post_process
        if self.mtp_process and looks_ahead:
            padding = {"padding_mask": padding_mask} if _MTP_TAKES_PADDING else {}
            hidden = self.mtp(input_ids, position_ids, hidden, embedding=self.embedding, **shared, **padding)
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.config.mtp_num_layers and (looks_ahead or not self.mtp_process):
            hidden = add_losses_ahead(self, hidden, labels, weight, loss_mask, packed_seq_params, runtime_gather_output)
        if inference_context is not None and labels is None:
            hidden = hidden[-1:]
        return self._losses_or_logits(hidden, labels, weight, places, runtime_gather_output)

    def _losses_or_logits(
        self, hidden: Tensor, labels: Tensor | None, weight: Tensor | None, places: Tensor | None, gathered: bool | None
    ) -> Tensor:
        """Return the losses or logits of hidden states, [s, b, h] or a sequence-parallel share, as the call wants."""
        if labels is not None:
            if self._kept is not None:
                self._kept.append((hidden, weight))
            return self.losses_of_hidden(hidden, labels, weight, gathered)
        if self._judged is not None:
            wanted, best = self._judged
            losses, tokens = self._in_chunks(hidden, wanted, weight, wants_best=True)
            best.append(tokens)
            return losses
        if places is not None and self.takes_any_rows:
            hidden = _picked(hidden, places, self.tp_group.rank())
        logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=gathered)
        transposed: Tensor = logits.transpose(0, 1).contiguous()
        return transposed

    def _angles(self, context: Any, hidden: Tensor | None, packed: PackedSeqParams | None) -> Any:
        """Return the angles, [s, 1, 1, channels] fp32, of whole sequences; None if layers rotate by themselves."""
        rotary = self.rotary_pos_emb
        if rotary is None:
            return None
        length = rotary.get_rotary_seq_len(context, self.decoder, hidden, self.config, packed)
        is_packed = packed is not None and packed.qkv_format == "thd"
        angles = rotary(length, packed_seq=is_packed, cp_group=packed.cp_group if packed is not None else None)
        return angles[0] if isinstance(angles, tuple) else angles  # YaRN also returns its scale

    def _begin_microbatch(self) -> None:
        """Tell Megatron's offloading of activations which chunk runs next, and that weights stay where they are.

        Source: ``preprocess_for_fine_grained_offloading`` and ``preprocess_for_paged_stash`` of ``GPTModel``.
        """
        config = self.config
        if getattr(config, "moe_paged_stash", False):
            stash = importlib.import_module("megatron.core.transformer.moe.paged_stash")
            stash.paged_stash_init_chunk_handler(vp_size=self.vp_size, vp_stage=self.vp_stage)
        if not config.fine_grained_activation_offloading:
            return
        own = {"pp_rank": self.pp_group.rank(), "vp_size": self.vp_size, "vp_stage": self.vp_stage}
        own["max_inflight_offloads"] = getattr(config, "fine_grained_offloading_max_inflight_offloads", None)
        names = inspect.signature(Offloading.init_chunk_handler).parameters  # three in 0.16, seven in 0.19
        Offloading.init_chunk_handler(**{name: own[name] if name in own else getattr(config, name) for name in names})
        if not self._weights_stay:
            keep = getattr(Offloading, "mark_not_offload", None) or Offloading.mark_not_offloadable
            for parameter in self.parameters():
                keep(parameter)
            self._weights_stay = True

    @contextlib.contextmanager
    def judging(self, labels: Tensor) -> Iterator[list[Tensor]]:
        """Let calls without labels return the losses of ``labels``, [b, s], instead of logits, inside the context.

        The list gets the most probable token at each position, [b, s] int64. Multi-token prediction does not run.
        """
        self._judged = labels, []
        try:
            yield self._judged[1]
        finally:
            self._judged = None

    @contextlib.contextmanager
    def keeping_states(self) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
        """Collect what calls with labels give to the output layer: hidden states, and the tied weight or None."""
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None

    def losses_of_hidden(
        self, hidden: Tensor, labels: Tensor, weight: Tensor | None = None, gathered: bool | None = None
    ) -> Tensor:
        """Return the loss of each token, [b, s] fp32; in chunks if their logits are many.

        ``hidden`` is [s, b, h] or a sequence-parallel share, ``labels`` [b, s]; ``weight`` and ``gathered`` are the
        output layer's.
        """
        if self.takes_chunks(labels) and not gathered:
            return self._in_chunks(hidden, labels, weight)[0]
        logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=gathered)
        return self.compute_language_model_loss(labels, logits)

    def takes_chunks(self, labels: Tensor) -> bool:
        """Return whether the losses of ``labels``, [b, s], are computed in chunks."""
        return self.parallel_output and self._tokens_of_chunk(labels) is not None

    def _in_chunks(
        self, hidden: Tensor, labels: Tensor, weight: Tensor | None, wants_best: bool = False
    ) -> list[Tensor]:
        """Return the loss of each token, and with ``wants_best`` the most probable one, [b, s] each."""
        return in_chunks(
            functools.partial(logits_of_layer, self.output_layer, weight),
            hidden,
            labels,
            self._tokens_of_chunk(labels) or labels.numel(),
            Vocabulary.of(self.existing_tokens or self.vocab_size, self._columns, self.tp_group),
            wants_best=wants_best,
            draws=draws_numbers(self.output_layer),
            trained=summed_in_fp32(self.output_layer, weight),
        )

    def _tokens_of_chunk(self, labels: Tensor) -> int | None:
        if not self.takes_any_rows:
            return None
        return tokens_of_chunk(
            self.loss_chunk_size,
            labels.numel(),
            self._columns,
            torch.is_grad_enabled(),
            bool(self.config.defer_embedding_wgrad_compute),
        )

    @property
    def takes_any_rows(self) -> bool:
        """Whether there is an output layer that takes any number of tokens; FP8 wants multiples."""
        return isinstance(getattr(self, "output_layer", None), tensor_parallel.ColumnParallelLinear)

    @property
    def _columns(self) -> int:
        """Logits of a token on this rank."""
        return self.vocab_size // (self.tp_group.size() if self.parallel_output else 1)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each token, [b, s] fp32; overwrites padding columns of ``logits``, [s, b, v / tp]."""
        if self.existing_tokens is not None and self.existing_tokens < self.vocab_size:
            first = logits.size(-1) * self.tp_group.rank() if self.parallel_output else 0
            padding = logits.detach()[..., max(0, self.existing_tokens - first) :]
            padding.fill_(torch.finfo(logits.dtype).min)  # their gradients are then zero without autograd
        losses: Tensor = super().compute_language_model_loss(labels, logits)
        return losses

    def shared_embedding_or_output_weight(self) -> Any:
        """Return the embedding's weight if the chunk has one, else the output layer's; None in between."""
        if self.pre_process or self.mtp_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the sharded state, with the names that ``GPTModel`` gives it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        if isinstance(getattr(self, "output_layer", None), HiddenStates):
            # LanguageModule would look up the output layer's weight
            return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)
        if self.mtp_process and not self.pre_process:  # LanguageModule does it itself in later releases
            name = f"{prefix}embedding.word_embeddings.weight"
            group = metadata["dp_cp_group"]
            weight = self.embedding.word_embeddings.weight
            tie_word_embeddings_state_dict(state, weight, name, tp_group=self.tp_group, dp_cp_group=group)
        return state


def _picked(hidden: Tensor, places: Tensor, rank: int) -> Tensor:
    """Return the hidden states at one place of each row, [1, b, h]; zeros if the place is on another rank.

    ``hidden`` is [s, b, h], or one tensor-parallel rank's share of it; ``places``, [b, s], is True at most once a row.
    The output layer then gathers the ranks' states. With s = 8 on two ranks and the place 3:

        places 0 0 0 1 | 0 0 0 0        picked: state 3 | zeros        logits: those of state 3, and of zeros
    """
    by_rank = places.reshape(len(places), -1, hidden.size(0))  # [b, ranks, s / ranks]
    here = by_rank[:, rank if by_rank.size(1) > 1 else 0]
    return torch.where(here.t()[..., None], hidden, 0.0).sum(0, keepdim=True)


def _rotate_by_nothing(decoder: TransformerBlock) -> None:
    """Set all angles of multi-latent attention to 0, because it always rotates."""
    for layer in decoder.layers:
        rotation = getattr(layer.self_attention, "rotary_pos_emb", None)
        if rotation is not None:  # None in a layer with a memory
            rotation.inv_freq = torch.zeros_like(rotation.inv_freq)


def _yarn(config: TransformerConfig, rotary: dict[str, Any]) -> Any:
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    settings = {name: getattr(config, f"yarn_{name}") for name in (*names, "correction_range_round_to_int")}
    return YarnRotaryEmbedding(**rotary, **settings, scaling_factor=config.yarn_rotary_scaling_factor)
