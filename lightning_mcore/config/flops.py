# SPDX-License-Identifier: Apache-2.0
"""The floating-point operations of a training step, which ``model_tflops`` logs and ``lightning-mcore plan`` shows.

Only the model's own operations count, from its settings alone. Recomputed activations, padding to a capacity and
communication are not model FLOPs, so the number compares layouts and machines fairly.

Llama 3 8B has 7.50 billion weights in matrix products, output layer included: 15.0 GFLOP per token forward. Attention
over 8192 tokens adds 2.1. Forward and backward, that is 3 * 17.16 = 51.5 GFLOP per token.
"""

from collections.abc import Mapping
from typing import Any

from lightning_mcore.config.architecture import delta_net_channels, mixer_of, moe_layers, pattern_layers

_FORWARD_AND_BACKWARD = 3
"""In forward passes. A backward pass costs two: one for the input's gradient, one for the weight's."""
_FORWARD_AND_INPUT = 2
"""The same for a frozen weight, which has no gradient."""


def training_flops_per_token(
    fields: Mapping[str, Any], vocab_size: int, seq_length: int, trained: tuple[float, float] | None = None
) -> float:
    """Return the floating-point operations of training a GPT on one token, averaged over the positions of a sequence.

    Only matrix products count, with a multiplication and an addition as two operations; norms, activations and the
    embedding look-up do not. Causal attention counts only the used half of the matrix. An MTP layer costs as much as
    the last layer, plus the projection before it and another output layer. A gated delta net, Kimi delta attention and
    a Mamba 2 layer write and read their memory token by token; what they compute beyond that does not count.

    ``fields`` are fields of ``TransformerConfig`` by name, plus ``Architecture.sizes``; an absent one has Megatron's
    default. ``vocab_size`` includes padding. ``trained`` is for frozen weights: the multiplications per token with the
    weights that are still trained, and with the adapters' matrices.

    Source: ``num_floating_point_operations`` of megatron.training 0.19.2, which differs in two points: it leaves out
    the router and gives every layer full attention.
    """
    width, ahead = fields["hidden_size"], fields.get("mtp_num_layers") or 0
    layers = layer_flops(fields, seq_length)
    layers += [layers[-1]] * ahead
    scores = sum(parts["core_attn"] for parts in layers)  # products without weights: attention, delta-net memory
    products = sum(sum(parts.values()) for parts in layers) - scores
    products += ahead * _product(2 * width, width) + (1 + ahead) * _product(width, vocab_size)
    if trained is None:
        return _FORWARD_AND_BACKWARD * (products + scores)
    # With frozen weights: the gradient of each weight that is trained, and whole passes for adapters
    saved, added = (2 * count for count in trained)
    return _FORWARD_AND_BACKWARD * (scores + added) + _FORWARD_AND_INPUT * products + saved


def layer_flops(fields: Mapping[str, Any], seq_length: int) -> list[dict[str, float]]:
    """Return the operations of one token's forward pass through each layer, by part as ``recompute_modules`` has them.

    Those of ``core_attn`` have no weights. ``fields`` as in :func:`training_flops_per_token`.
    """
    linear, given = fields.get("linear_attention_freq") or [0] * fields["num_layers"], fields.get("layer_pattern")
    has_chunks = [flag and fields.get("attention_chunk") is not None for flag in rotated_layers(fields)]
    of_linear = "kimi_delta" if "linear_num_heads" in fields else "delta_net"
    pattern = ["*-"] * fields["num_layers"] if given is None else pattern_layers(given)
    layers = zip(moe_layers(fields), windowed_layers(fields), has_chunks, linear, pattern, strict=True)
    return [
        _mixer(fields, of_linear if is_linear else mixer_of(letters), seq_length, windowed, chunked)
        | (
            {"mlp": 0.0}
            if letters[-1] in "M*"
            else _moe(fields)
            if is_moe
            else {"mlp": _mlp(fields, _ffn_hidden_size(fields))}
        )
        for is_moe, windowed, chunked, is_linear, letters in layers
    ]


def _mixer(
    fields: Mapping[str, Any], mixer: str | None, seq_length: int, windowed: bool, chunked: bool
) -> dict[str, float]:
    if mixer is None:
        return {"attention": 0.0, "core_attn": 0.0}
    if mixer == "attention":
        return _attention(fields, seq_length, windowed, chunked)
    return {"delta_net": _delta_net, "kimi_delta": _kimi_delta, "mamba": _mamba}[mixer](fields)


def _product(rows: int, columns: int) -> int:
    """Operations of one token times a [rows, columns] matrix."""
    return 2 * rows * columns


def windowed_layers(fields: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it uses ``window_size``: ``window_attn_skip_freq=2`` means layers 0, 2, 4, ...

    Source: ``is_layer_window_attention`` of megatron-core 0.16.1.
    """
    skip, num_layers = fields.get("window_attn_skip_freq"), fields["num_layers"]
    if skip is None:
        return [True] * num_layers
    if isinstance(skip, int):
        return [number % skip != 0 for number in range(1, num_layers + 1)]
    return [bool(flag) for flag in skip]


def rotated_layers(fields: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has rotary positions: ``no_rope_freq=4`` means all but layers 3, 7, 11, ...

    Source: ``TransformerConfig.__post_init__`` of megatron-core 0.16.1.
    """
    unrotated, num_layers = fields.get("no_rope_freq"), fields["num_layers"]
    if unrotated and isinstance(unrotated, int):
        return [(layer + 1) % unrotated != 0 for layer in range(num_layers)]
    return [not flag for flag in unrotated or [False] * num_layers]


def _attention(fields: Mapping[str, Any], seq_length: int, windowed: bool, chunked: bool) -> dict[str, float]:
    window = fields.get("window_size") if windowed else None
    chunk = fields["attention_chunk"] if chunked else seq_length
    count, rest = divmod(seq_length, chunk)
    # The mean over queries. A sequence of 10 in chunks of 4 is two of 4 and one of 2: (2 * 4 * 2 + 2 * 1) / 10 = 1.8
    keys = (count * chunk * _attended_keys(chunk, window) + rest * _attended_keys(rest, window)) / seq_length
    if fields.get("multi_latent_attention"):
        return _latent_attention(fields, keys)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    groups = _given(fields, "num_query_groups", heads)
    channels = _given(fields, "kv_channels", hidden // heads)
    queries = 3 if fields.get("attention_output_gate") else 2  # the query, the output and the gate have the same size
    projections = queries * _product(hidden, heads * channels) + 2 * _product(hidden, groups * channels)
    core = 2 * _product(1, heads * channels)  # scores, and the sum of the values
    return {"attention": projections, "core_attn": keys * core}


def _latent_attention(fields: Mapping[str, Any], keys: float) -> dict[str, float]:
    """Count multi-latent attention, as in DeepSeek-V2; defaults of ``MLATransformerConfig`` 0.16.1."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    rotated, value = fields.get("qk_pos_emb_head_dim", 64), fields.get("v_head_dim", 128)
    plain, latent = fields.get("qk_head_dim", 128), fields.get("kv_lora_rank", 512)
    query_latent, query = fields.get("q_lora_rank", 512), heads * (plain + rotated)
    # Down to the latent, and up to each head's key and value; all heads share the latent and the rotated part.
    projections, up = _product(hidden, latent + rotated), _product(latent, heads * (plain + value))
    if query_latent is None:
        projections += _product(hidden, query)
    else:
        projections, up = projections + _product(hidden, query_latent), up + _product(query_latent, query)
    projections += _product(heads * value, hidden)
    return {"attention": projections, "mla_up_proj": up, "core_attn": keys * _product(1, query + heads * value)}


def _delta_net(fields: Mapping[str, Any]) -> dict[str, float]:
    hidden, (keys, values, heads) = fields["hidden_size"], delta_net_channels(fields)
    # Query, key, value, output gate, and two numbers per value head: the decay and the strength of a write
    projections = _product(hidden, 2 * (keys + values + heads)) + _product(values, hidden)
    convolution = _product(fields["linear_conv_kernel_dim"], 2 * keys + values)
    memory = 3 * _product(fields["linear_key_head_dim"], values)  # a token asks what is there, writes, and reads
    return {"attention": projections + convolution, "core_attn": memory}


def _kimi_delta(fields: Mapping[str, Any]) -> dict[str, float]:
    hidden, heads, size = fields["hidden_size"], fields["linear_num_heads"], fields["linear_head_dim"]
    # Query, key, value, and how strong a write is; decays and gates through two matrices each
    projections = _product(hidden, 3 * heads * size + heads) + _product(heads * size, hidden)
    projections += 2 * (_product(hidden, size) + _product(size, heads * size))
    convolution = _product(fields["linear_conv_kernel_dim"], 3 * heads * size)
    return {"attention": projections + convolution, "core_attn": 3 * _product(size, heads * size)}


def _mamba(fields: Mapping[str, Any]) -> dict[str, float]:
    hidden, heads, rows = fields["hidden_size"], fields["mamba_num_heads"], fields["mamba_state_dim"]
    values, groups = heads * fields["mamba_head_dim"], fields["mamba_num_groups"] * rows
    # Gate and value, what writes and what reads of each group, and the step of each head
    projections = _product(hidden, 2 * (values + groups) + heads) + _product(values, hidden)
    convolution = _product(fields["mamba_conv_kernel_dim"], values + 2 * groups)
    return {
        "attention": projections + convolution,
        "core_attn": 2 * _product(rows, values),
    }  # a token writes, and reads


def _attended_keys(seq_length: int, window_size: tuple[int, int] | list[int] | None) -> float:
    """Return the mean number of keys that a causal query reads: half the sequence, less under a sliding window.

    A window of 4 keys (``(3, 0)``) in a sequence of 8: 4 - 4 * 4 / 16 = 3.
    """
    if window_size is None or window_size[0] < 0 or window_size[0] + 1 >= seq_length:
        return seq_length / 2
    window = window_size[0] + 1
    return window - window * window / (2 * seq_length)


def _mlp(fields: Mapping[str, Any], ffn_hidden_size: int, width: int | None = None) -> int:
    # Gate, up and down, or only up and down
    matrices = 3 if fields.get("gated_linear_unit") else 2
    return matrices * _product(width or fields["hidden_size"], ffn_hidden_size)


def _moe(fields: Mapping[str, Any]) -> dict[str, float]:
    router = _product(fields["hidden_size"], fields["num_moe_experts"])
    latent = _given(fields, "moe_latent_size", 0)
    expert = _mlp(fields, _given(fields, "moe_ffn_hidden_size", _ffn_hidden_size(fields)), latent)
    shared = _mlp(fields, _given(fields, "moe_shared_expert_intermediate_size", 0))
    routed = router + int(fields.get("moe_router_topk", 2)) * expert + 2 * _product(fields["hidden_size"], latent)
    return {"moe": routed, "shared_experts": shared}


def _ffn_hidden_size(fields: Mapping[str, Any]) -> int:
    return _given(fields, "ffn_hidden_size", 4 * fields["hidden_size"])


def _given(fields: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = fields.get(name)
    return otherwise if value is None else int(value)
