# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model that a parallel layout must divide, known before any parameter is made.

A module states them (``MCoreModule.model_shape``), ``ParallelLayout.validate_model`` checks them.
"""

from dataclasses import dataclass, fields
from typing import Any

from lightning_mcore.config.sizes import require_size


@dataclass(frozen=True)
class ModelShape:
    """What of a model the layout must divide; field names and defaults are those of ``TransformerConfig``.

    A size that is None takes the default Megatron derives from the others, and is not checked where there is none.
    ``num_moe_experts=None`` is a dense model, ``mtp_num_layers=None`` has no MTP layers. ``vocab_size`` is the padded
    one, ``seq_length`` counts tokens before any rank takes its share.
    """

    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    hidden_size: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    seq_length: int | None = None
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: int | list[int] = 1
    add_bias_linear: bool | None = None
    mtp_num_layers: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that no model has; zero MTP layers is Megatron's other word for none."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.type == (int | None):
                require_size(field.name, value, at_least=0 if field.name == "mtp_num_layers" else 1)

    @classmethod
    def from_config(cls, config: object, seq_length: int | None = None, vocab_size: int | None = None) -> "ModelShape":
        """Read the shape off any object with ``TransformerConfig``'s attributes, such as a namespace of its fields.

        Args:
            config: Attributes it lacks have Megatron's defaults; linear layers then have biases.
            seq_length: Tokens in a sequence; a ``TransformerConfig`` does not know it.
            vocab_size: Padded size of the vocabulary; a ``TransformerConfig`` does not know it.
        """
        known: dict[str, Any] = {field.name: getattr(config, field.name, None) for field in fields(cls)}
        known["add_bias_linear"] = getattr(config, "add_bias_linear", True)
        known |= {} if seq_length is None else {"seq_length": seq_length}
        known |= {} if vocab_size is None else {"vocab_size": vocab_size}
        return cls(**{name: value for name, value in known.items() if value is not None})

    @property
    def head_size(self) -> int | None:
        """Width of one attention head (``kv_channels``)."""
        if self.kv_channels is None and self.hidden_size is not None and self.num_attention_heads is not None:
            return self.hidden_size // self.num_attention_heads
        return self.kv_channels

    @property
    def feed_forward_size(self) -> int | None:
        """Inner width of a dense feed-forward layer (``ffn_hidden_size``)."""
        if self.ffn_hidden_size is None and self.hidden_size is not None:
            return 4 * self.hidden_size
        return self.ffn_hidden_size

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a feed-forward part that is not a mixture of experts."""
        every = self.moe_layer_freq
        return self.num_moe_experts is None or (every > 1 if isinstance(every, int) else 0 in every)
