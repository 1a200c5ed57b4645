# SPDX-License-Identifier: Apache-2.0
"""A GPT small enough for every layout on two cores, and the numbers it is trained on.

Everything here is a function of its arguments alone: the same on every rank, in every process, at every layout. A
*recipe* says what a run computes; a layout (``tests/support/layouts.py``) says on how many ranks. The global batch of a
step is the same sequences whatever the layout; a data-parallel rank reads its part of them.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_token_prediction
from torch.nn import functional

from lightning_mcore.config.architecture import Architecture, set_architecture
from lightning_mcore.config.positions import set_yarn
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.multi_token import gpt_mtp_block_spec
from lightning_mcore.layers.spec import gpt_block_spec
from tests.support.layouts import Layout

VOCAB_SIZE = 128
SINCE_0_17 = hasattr(multi_token_prediction, "process_mtp_loss")
SEQ_LENGTH = 32  # tokens; cp4 cuts it into 8 slices of 4
TEXT_SIZE = 8  # sequences there are for one optimizer step

TRANSFORMER: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 64,
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
}

DELTA_NET = (
    ("linear_attention_freq", (1, 0)),
    ("linear_num_key_heads", 4),
    ("linear_num_value_heads", 8),
    ("linear_key_head_dim", 6),
    ("linear_value_head_dim", 10),
    ("linear_conv_kernel_dim", 3),
)
"""Gated delta nets for one of two layers."""

KIMI_DELTA = (
    ("linear_attention_freq", (1, 0)),
    ("linear_num_heads", 4),
    ("linear_head_dim", 6),
    ("linear_conv_kernel_dim", 3),
)
"""Kimi delta attention for one of two layers."""

MAMBA = (
    ("mamba_num_heads", 8),
    ("mamba_head_dim", 6),
    ("mamba_num_groups", 2),
    ("mamba_state_dim", 12),
    ("mamba_conv_kernel_dim", 3),
)
"""Sizes of Mamba 2 layers."""

HYBRID = (("layer_pattern", "[M-][*-]"), ("mamba", MAMBA))
"""Mamba 2 in one of two layers."""

CHUNKS = (
    ("attention_chunk", 6),
    ("head_norms", "unweighted"),
    (
        "query_growth",
        (("beta", 0.5), ("original_max_position_embeddings", 5), ("first_position", 1), ("unrotated_only", True)),
    ),
)
"""Attention of Llama 4: within chunks, or with queries that grow in the layers of ``no_rope_freq``."""

OF_ARCHITECTURE = (
    *("delta_net", "kimi_delta", "layer_pattern", "mamba", "indexer"),
    *("attention_chunk", "head_norms", "query_growth"),
)
"""The options that belong to the architecture."""

Batch = dict[str, torch.Tensor]
Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]
MaskKind = Literal["full", "thinned", "ragged"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run computes, whatever the layout.

    Args:
        precision: As in ``Trainer(precision=)``.
        token_weighted: Whether the loss is a sum over tokens divided by the token count of the whole step, instead of
            the mean over microbatches of each microbatch's mean.
        mask: Which tokens count: all; every first, second or fourth, alike in two neighbouring sequences, so that each
            part of a microbatch holds a power of two and ``sum / n * n`` is exact; or a prefix of uneven length.
        steps: Optimizer steps.
        global_batch_size: Sequences of one optimizer step, over all data-parallel ranks and microbatches; at most 8.
        micro_batch_size: Sequences of one microbatch on one data-parallel rank.
        aux_loss: ``moe_aux_loss_coeff`` of a mixture of experts.
        learning_rate: AdamW's.
        eps: AdamW's. It bounds how far a rounding error of a tiny gradient moves a weight.
        weight_decay: AdamW's, for every parameter.
        clip: Greatest norm of the gradients.
        initial_loss_scale: Where the loss scale of fp16 starts.
        loss_scale_window: Steps without overflow after which it doubles.
        options: Fields of the TransformerConfig that make another model of it, as items; a tuple stands for a list.
        model_options: Arguments of the model, as items.
        impl: ``transformer_impl``, whose layers the model is built from.
    """

    precision: Precision = "32-true"
    token_weighted: bool = False
    mask: MaskKind = "ragged"
    steps: int = 4
    global_batch_size: int = 8
    micro_batch_size: int = 1
    aux_loss: float = 0.0
    learning_rate: float = 1e-3
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    initial_loss_scale: float = 2.0**16
    loss_scale_window: int = 1000
    options: tuple[tuple[str, Any], ...] = ()
    model_options: tuple[tuple[str, Any], ...] = ()
    impl: Literal["local", "transformer_engine"] = "local"

    def num_microbatches(self, layout: Layout) -> int:
        """Microbatches of one step on one data-parallel rank."""
        count, rest = divmod(self.global_batch_size, layout.dp * self.micro_batch_size)
        assert rest == 0, f"{layout.id} does not divide the global batch"
        return count

    def shallow(self, layout: Layout) -> "Recipe":
        """Return the recipe of a model of two layers where no pipeline cuts it: what tp, cp, dp and ep do is alike."""
        return self if layout.pp > 1 else replace(self, options=(*self.options, ("num_layers", 2)))


def transformer_fields(layout: Layout, recipe: Recipe) -> dict[str, Any]:
    """Return the TransformerConfig fields that are the model's own: none of layout or precision.

    The uneven split of a pipeline by layer counts is a property of the model in Megatron, so it is here.
    """
    fields = dict(TRANSFORMER)
    if layout.moe:
        fields |= EXPERTS | {"moe_aux_loss_coeff": recipe.aux_loss}
    if layout.first is not None:
        fields["num_layers_in_first_pipeline_stage"] = layout.first
    if layout.last is not None:
        fields["num_layers_in_last_pipeline_stage"] = layout.last
    if recipe.token_weighted:
        fields["calculate_per_token_loss"] = True
    return fields | {name: list(value) if isinstance(value, tuple) else value for name, value in recipe.options}


def make_config(fields: dict[str, Any]) -> TransformerConfig:
    """Return Megatron's config for these fields, of which some belong to the architecture."""
    own = {name: value for name, value in fields.items() if name not in OF_ARCHITECTURE}
    config = (MLATransformerConfig if own.get("multi_latent_attention") else TransformerConfig)(**own)
    if given := architecture_of_fields(fields):
        set_architecture(config, Architecture.of(given))
    return config


def architecture_of_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that belong to the architecture."""
    given = {name: fields[name] for name in OF_ARCHITECTURE if name in fields}
    return {name: dict(value) if isinstance(value, list | tuple) else value for name, value in given.items()}


def build_gpt(
    config: TransformerConfig,
    layout: Layout,
    recipe: Recipe,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    is_reference: bool = False,
) -> LanguageModule:
    """Build the chunk of the tiny model that holds the layers of ``vp_stage`` on this pipeline rank.

    It is ours, or as a reference Megatron's own ``GPTModel``, except where that divides the losses of multi-token
    prediction by other numbers.
    """
    block = gpt_block_spec(config, recipe.impl, vp_stage=vp_stage)
    arguments: dict[str, Any] = {"position_embedding_type": "rope"} | dict(recipe.model_options)
    if "yarn" in arguments:
        set_yarn(config, dict(arguments.pop("yarn")))
    if config.mtp_num_layers:
        arguments["mtp_block_spec"] = gpt_mtp_block_spec(config, recipe.impl, vp_stage=vp_stage)
    divides_otherwise = config.mtp_num_layers and recipe.token_weighted and SINCE_0_17
    return (GPTModel if is_reference and not divides_otherwise else GPTChunk)(
        config,
        block,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=layout.tied,
        vp_stage=vp_stage,
        **arguments,
    )


def model_arguments(batch: Batch, config: TransformerConfig) -> dict[str, torch.Tensor | None]:
    """Return what the model is called with: the mask only where its own losses want it."""
    arguments = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "labels": batch["labels"]}
    if config.mtp_num_layers:
        arguments["loss_mask"] = batch["loss_mask"]
    return {**arguments, "attention_mask": None}


def microbatches(recipe: Recipe, layout: Layout, dp_rank: int, step: int) -> list[Batch]:
    """Return what data-parallel rank ``dp_rank`` reads in ``step``, not yet cut for context parallelism.

    Microbatch ``m`` of all ranks together holds neighbouring sequences, so that a layout only changes who reads them.
    """
    batch = text(recipe.mask, step)
    size = recipe.micro_batch_size
    starts = [(m * layout.dp + dp_rank) * size for m in range(recipe.num_microbatches(layout))]
    return [{name: tensor[start : start + size] for name, tensor in batch.items()} for start in starts]


def text(mask: MaskKind, step: int) -> Batch:
    """Return the ``[8, s]`` tokens, labels (shifted), loss mask and position ids of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB_SIZE, (TEXT_SIZE, SEQ_LENGTH + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": _loss_mask(mask, generator),
        "position_ids": torch.arange(SEQ_LENGTH).expand(TEXT_SIZE, -1).contiguous(),
    }


def _loss_mask(mask: MaskKind, generator: torch.Generator) -> torch.Tensor:
    positions = torch.arange(SEQ_LENGTH)[None]
    if mask == "thinned":
        strides = 2 ** torch.randint(0, 3, (TEXT_SIZE // 2, 1), generator=generator)
        return (positions % strides.repeat_interleave(2, 0) == 0).float()
    if mask == "ragged":
        lengths = torch.randint(1, SEQ_LENGTH + 1, (TEXT_SIZE, 1), generator=generator)
        return (positions < lengths).float()
    return torch.ones(TEXT_SIZE, SEQ_LENGTH)
