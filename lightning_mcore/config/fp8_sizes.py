# SPDX-License-Identifier: Apache-2.0
"""What FP8 needs of the sizes of model and microbatch: multiples of the block that a recipe scales together.

``strategy/fp8_checks.py`` and ``lightning-mcore plan`` refuse with it what lacks them. Pure arithmetic.

Source: ``get_fp8_align_size`` of megatron-core (0.16.1) and the shape rules of TransformerEngine's linear layers (2.x).
"""

from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.model_shape import ModelShape


def check_model(settings: FP8Settings, shape: ModelShape, tensor_parallel_size: int, expert_tensor_size: int) -> None:
    """Refuse matrices whose sizes, on each rank, the recipe cannot cut into blocks.

    Args:
        settings: What was asked for.
        shape: The model's sizes; those that are unknown are not checked.
        tensor_parallel_size: Ranks that share a matrix.
        expert_tensor_size: Ranks that share a matrix of an expert.

    Raises:
        ValueError: A size is not a multiple of the recipe's alignment.
    """
    heads, head_size = shape.num_attention_heads, shape.head_size
    groups = shape.num_query_groups or heads
    sizes: list[tuple[str, int | None, int]] = [("hidden_size", shape.hidden_size, 1)]
    if heads is not None and groups is not None and head_size is not None:
        sizes.append(("num_attention_heads * kv_channels", heads * head_size, tensor_parallel_size))
        qkv = (heads + 2 * groups) * head_size
        sizes.append(("(num_attention_heads + 2 * num_query_groups) * kv_channels", qkv, tensor_parallel_size))
    if shape.has_dense_layers:
        sizes.append(("ffn_hidden_size", shape.feed_forward_size, tensor_parallel_size))
    if shape.num_moe_experts is not None:
        expert_size = shape.moe_ffn_hidden_size or shape.feed_forward_size
        sizes.append(("moe_ffn_hidden_size", expert_size, expert_tensor_size))
        shared = shape.moe_shared_expert_intermediate_size
        sizes.append(("moe_shared_expert_intermediate_size", shared, tensor_parallel_size))
    for name, size, ranks in sizes:
        if size is not None and size % (ranks * settings.alignment):
            shared_by = f" / {ranks} tensor-parallel ranks" if ranks > 1 else ""
            raise ValueError(
                f"fp8_recipe={settings.recipe!r} needs multiples of {settings.alignment}, and {name}={size}{shared_by} "
                f"is none; make it a multiple of {ranks * settings.alignment}"
            )


def check_layers(settings: FP8Settings, num_layers: int, pipeline_model_parallel_size: int) -> None:
    """Refuse more layers in bf16 at an end than a pipeline stage holds, as ``TransformerConfig`` does.

    Raises:
        ValueError: There are more.
    """
    most = num_layers // pipeline_model_parallel_size
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        count = getattr(settings, name)
        if settings.first_last_layers_bf16 and count > most:
            raise ValueError(
                f"{name}={count} is more than the {most} layers of a pipeline stage; choose at most {most}"
            )


def check_microbatch(settings: FP8Settings, shape: tuple[int, int] | None, layout: ParallelLayout) -> None:
    """Refuse microbatches whose number of tokens, on each rank, the recipe cannot cut into blocks.

    Args:
        settings: What was asked for.
        shape: (sequence length, rows), before any rank takes its share; None where it is not known.
        layout: The strategy's layout.

    Raises:
        ValueError: The number is not a multiple of the recipe's alignment.
    """
    if not settings.is_on or shape is None:
        return
    ranks = layout.context_parallel_size * (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    seq_length, rows = shape
    if seq_length * rows % (ranks * settings.alignment):
        raise ValueError(
            f"fp8_recipe={settings.recipe!r} needs a multiple of {settings.alignment} tokens in each microbatch on each"
            f" rank, and seq_length={seq_length} * {rows} rows / {ranks} ranks is none; make the tokens of a"
            f" microbatch, with padding, a multiple of {ranks * settings.alignment}"
        )
