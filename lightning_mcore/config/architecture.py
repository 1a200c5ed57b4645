# SPDX-License-Identifier: Apache-2.0
"""Settings that some models have but Megatron's config lacks, as plain data.

``MCoreGPT(architecture={...})`` takes these settings by name. :class:`Architecture` has their defaults, which describe
Megatron's own layers. ``layers/variants.py`` has the modules. The settings become an attribute of Megatron's config,
because Megatron hands its config to every module. Pure data: no torch, no megatron-core.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_mcore.config.value_checks import require_size

LayerNorms = Literal["before", "around", "after", "parallel"]
HeadNorms = Literal["all_heads", "after_rotation", "unweighted"]

STRETCHES: dict[str, tuple[str, ...]] = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"),
}
"""The ways to stretch rotary wavelengths, and the keys of each, named as in transformers.

``llama3`` is Llama 3's rule with any constants. ``dynamic`` stretches by the length of the batch where it exceeds the
original length. ``longrope`` has two lists of factors: for lengths up to the original length, and for longer ones.
"""

DELTA_NET: tuple[str, ...] = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""The sizes of gated delta nets, named as in Megatron and transformers: heads, channels per head, and tokens that the
convolution sees."""

KIMI_DELTA: tuple[str, ...] = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
"""The sizes of Kimi delta attention, named as in transformers: heads, channels per head of queries, keys and values
each, and tokens that the convolution sees."""

MAMBA: tuple[str, ...] = (
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_state_dim",
    "mamba_conv_kernel_dim",
)
"""The sizes of Mamba 2 layers, named as in Megatron: heads, channels per head, groups of heads that share what writes
and reads their memory, rows of a memory, and tokens that the convolution sees."""

INDEXER: tuple[str, ...] = ("index_topk", "index_n_heads", "index_head_dim")
"""The sizes of an indexer, named as in transformers: tokens that it selects for each query, heads, channels per head of
queries and of the keys, which all heads share."""

Mixer = Literal["attention", "delta_net", "kimi_delta", "mamba"]

_ATTRIBUTE = "architecture"


@dataclass(frozen=True)
class Architecture:
    """Architecture settings; the defaults describe Megatron's own layers.

    Args:
        layer_norms: Where a layer normalises: ``"before"`` attention and MLP; ``"after"`` each of them, on its output
            before the residual is added; ``"around"`` each of them, in both places; or ``"parallel"``, once before
            both: attention and MLP read the same, and both outputs are added to the residual.
        norm_bias: Whether LayerNorms have biases.
        head_norms: Norms of queries and keys, instead of ``qk_layernorm``'s: ``"all_heads"`` for one norm over
            all heads together, ``"after_rotation"`` for one over each head after its rotation, ``"unweighted"`` for the
            same without weights, and only in layers with rotary positions.
        attention_output_bias: Whether the output projection of attention has a bias even without ``add_bias_linear``.
        mlp_bias: Whether the projections of the MLP have biases even without ``add_bias_linear``.
        expert_bias: Whether routers and the projections of routed experts have biases even without ``add_bias_linear``,
            which Megatron does not support with ``expert_tensor_parallel_size`` above 1.
        embedding_scale: Factor applied to the token embeddings.
        residual_scale: Factor applied to the outputs of attention and MLP before they are added to the residual.
        logits_divisor: Number that the logits are divided by.
        logits_cap: Logits ``x`` become ``cap * tanh(x / cap)``; None for no cap.
        attention_cap: The same cap for attention scores.
        attention_chunk: Length in tokens of the chunks of a sequence within which layers with rotary positions attend;
            the layers of ``no_rope_freq`` attend to all earlier tokens. None for no chunks.
        window_rotary_base: Base of the rotary wavelengths in layers with a window, which are then not stretched; None
            for the wavelengths of the other layers.
        latent_epsilon: Epsilon of the norms inside multi-latent attention; None for ``layernorm_epsilon``.
        stretch: How to stretch rotary wavelengths where Megatron cannot: ``kind`` and its keys in ``STRETCHES``.
        query_growth: How queries grow with the position: ``beta`` and ``original_max_position_embeddings``. Queries at
            position ``p`` are multiplied by ``1 + beta * log(1 + p // original_max_position_embeddings)``. Optional are
            ``first_position``, the number from which ``p`` counts (0), and ``unrotated_only``, whether they grow only
            in the layers of ``no_rope_freq`` (False). None if they do not grow.
        softmax_choice_bias: Whether a softmax router has a fixed bias that affects only which experts are chosen.
        delta_net: Gated delta nets instead of attention: ``linear_attention_freq``, with 1 for each layer of the model
            that has one and 0 for the others, and the sizes in ``DELTA_NET``; None for attention in all layers.
        kimi_delta: Kimi delta attention instead of attention, likewise, with the sizes in ``KIMI_DELTA``.
        layer_pattern: What each layer consists of, by Megatron's letters: ``M`` Mamba 2, ``*`` attention, ``-`` an MLP,
            ``E`` experts. In ``"M-*E"`` there are four layers with one part each; in ``"[M-][*E]"`` there are two, with
            both parts, as other layers have them. None for attention and an MLP, or experts, in all layers.
        mamba: The sizes of Mamba 2 layers, those in ``MAMBA``; None without such layers.
        indexer: Indexers of latent attention: ``indexer_freq``, with 1 for each layer of the model that has one and 0
            for the others, which use the choice of a layer before, and the sizes in ``INDEXER``. Sequences have at most
            ``index_topk`` tokens, all of which are chosen. None without indexers.
    """

    layer_norms: LayerNorms = "before"
    norm_bias: bool = True
    head_norms: HeadNorms | None = None
    attention_output_bias: bool = False
    mlp_bias: bool = False
    expert_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    attention_cap: float | None = None
    attention_chunk: int | None = None
    window_rotary_base: float | None = None
    latent_epsilon: float | None = None
    stretch: Mapping[str, Any] | None = None
    query_growth: Mapping[str, Any] | None = None
    softmax_choice_bias: bool = False
    delta_net: Mapping[str, Any] | None = None
    kimi_delta: Mapping[str, Any] | None = None
    layer_pattern: str | None = None
    mamba: Mapping[str, Any] | None = None
    indexer: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> "Architecture":
        """Return settings from those that differ from the defaults; None for the defaults."""
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise TypeError(f"architecture={given!r} is not a dict; give its settings by name")
        for name, value in given.items():
            if name not in ARCHITECTURE_DEFAULTS:
                known = ", ".join(ARCHITECTURE_DEFAULTS)
                raise ValueError(f"architecture has no setting {name!r}; choose from {known}")
            _check(name, value)
        return cls(**given)

    @property
    def shared_heads(self) -> tuple[tuple[str, int], ...]:
        """What tensor- and context-parallel ranks share of layers with a memory: names of sizes, and the sizes."""
        found = list[tuple[str, int]]()
        if self.delta_net is not None:
            found.append(("linear_num_key_heads", self.delta_net["linear_num_key_heads"]))
        if self.kimi_delta is not None:
            found.append(("linear_num_heads", self.kimi_delta["linear_num_heads"]))
        if self.mamba is not None:
            found.append(("gcd(mamba_num_heads, mamba_num_groups * mamba_state_dim)", mamba_units(self.mamba)))
        return tuple(found)

    @property
    def delta_net_channels(self) -> tuple[int, int, int]:
        """The key channels and value channels of a gated delta net, and the number of its value heads."""
        assert self.delta_net is not None
        return delta_net_channels(self.delta_net)

    @property
    def kimi_delta_heads(self) -> tuple[int, int]:
        """The number of heads of Kimi delta attention, and the channels of each."""
        assert self.kimi_delta is not None
        return self.kimi_delta["linear_num_heads"], self.kimi_delta["linear_head_dim"]

    @property
    def mamba_channels(self) -> tuple[int, int, int]:
        """The value channels of a Mamba 2 layer, those of what all its groups write along, and its number of heads."""
        assert self.mamba is not None
        heads = self.mamba["mamba_num_heads"]
        return (
            heads * self.mamba["mamba_head_dim"],
            self.mamba["mamba_num_groups"] * self.mamba["mamba_state_dim"],
            heads,
        )

    def mixer(self, layer: int) -> Mixer | None:
        """Return what mixes tokens in a layer, counted from 0; None if nothing does."""
        for name in _OF_LAYERS:
            given = getattr(self, name)
            if given is not None and given["linear_attention_freq"][layer]:
                return name
        return "attention" if self.layer_pattern is None else mixer_of(pattern_layers(self.layer_pattern)[layer])

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has an MLP or experts."""
        return self.layer_pattern is None or pattern_layers(self.layer_pattern)[layer][-1] in _OF_MLP

    def has_indexer(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has an indexer."""
        return self.indexer is not None and bool(self.indexer["indexer_freq"][layer])

    @property
    def has_memories(self) -> bool:
        """Whether the settings say what mixes tokens in each layer; then layers may differ."""
        return any(getattr(self, name) is not None for name in (*_OF_LAYERS, "layer_pattern"))

    @property
    def has_half_layers(self) -> bool:
        """Whether layers of ``layer_pattern`` have one part each."""
        return self.layer_pattern is not None and any(len(layer) == 1 for layer in pattern_layers(self.layer_pattern))

    @property
    def uses_places(self) -> bool:
        """Whether attention uses where a token is in its sequence, and not only how far one is from another."""
        grows, chunk = self.query_growth is not None, self.attention_chunk is not None
        return grows or chunk or self.head_norms == "after_rotation"

    def check_length(self, given: str, length: int) -> None:
        """Reject sequences, ``given`` says which, in which an indexer would not select all tokens."""
        if self.indexer is not None and length > self.indexer["index_topk"]:
            raise ValueError(
                f"{given} exceeds index_topk={self.indexer['index_topk']}, up to which the model's indexers select all"
                " tokens, and attention to selected ones alone is not supported; choose"
                f" {self.indexer['index_topk']} tokens or fewer"
            )

    @property
    def sizes(self) -> dict[str, Any]:
        """What the operations of a token depend on, beside fields of ``TransformerConfig``."""
        own = {"layer_pattern": self.layer_pattern, "attention_chunk": self.attention_chunk}
        return {**(self.delta_net or {}), **(self.kimi_delta or {}), **(self.mamba or {}), **own}

    @property
    def fits_transformer_engine(self) -> bool:
        """Whether TransformerEngine's layers support these settings."""
        return not needs_torch_backend(vars(self))

    def check_transformer_engine(self) -> None:
        """Raise ValueError for settings that TransformerEngine's layers do not support."""
        for name in _needing_torch_backend(vars(self)):
            raise ValueError(
                f"architecture has {name}={getattr(self, name)!r}, which TransformerEngine's layers do not have; set"
                " transformer_impl='local'"
            )


# Settings that only this package's own torch modules have
_TORCH_BACKEND_ONLY = (
    *("layer_norms", "norm_bias", "head_norms", "attention_output_bias", "mlp_bias", "expert_bias"),
    *("attention_cap", "attention_chunk", "latent_epsilon", "query_growth", "delta_net", "kimi_delta"),
    *("layer_pattern", "mamba"),
)

ARCHITECTURE_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Architecture)}
"""All settings with their defaults."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "layer_norms": get_args(LayerNorms),
    "head_norms": (None, *get_args(HeadNorms)),
    **dict.fromkeys(
        ("norm_bias", "attention_output_bias", "mlp_bias", "expert_bias", "softmax_choice_bias"), (False, True)
    ),
}


def delta_net_channels(sizes: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the key channels and value channels of a gated delta net, and the number of its value heads.

    16 key heads and 32 value heads of 128 channels each: 2048, 4096 and 32.
    """
    keys, heads = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"], sizes["linear_num_value_heads"]
    return keys, heads * sizes["linear_value_head_dim"], heads


_OF_LAYERS: tuple[Mixer, ...] = ("delta_net", "kimi_delta")  # settings that say which layers have such a memory
_FREQ: Mapping[str, str] = {**dict.fromkeys(_OF_LAYERS, "linear_attention_freq"), "indexer": "indexer_freq"}
"""Settings that have a flag for each layer, and the key of the flags."""
_OF_MIXER: Mapping[str, Mixer] = {"M": "mamba", "*": "attention"}
_OF_MLP = "-E"
_OTHER_LETTERS = {
    "G": "is for gated delta nets; the setting delta_net says which layers have them",
    "D": "is for an attention that this package does not have",
    "+": "is for latent attention, which does not work with a pattern here",
    "|": "ends a pipeline stage; pipeline_model_parallel_layout of MCoreStrategy says where stages end",
    "/": "begins multi-token prediction, which does not work with a pattern here",
}


@functools.cache
def pattern_layers(pattern: str) -> tuple[str, ...]:
    """Return the letters of each layer of a pattern: ``"[M-]M*"`` has the layers ``M-``, ``M`` and ``*``."""
    said = f"layer_pattern={pattern!r}"
    for letter in pattern:
        if letter in _OTHER_LETTERS:
            raise ValueError(f"{said} has {letter!r}, which {_OTHER_LETTERS[letter]}; choose from M, *, - and E")
    if not re.fullmatch(r"(\[[M*][-E]\]|[M*E-])+", pattern):
        raise ValueError(
            f"{said} is not a pattern; write one of M, *, - and E for each layer with one part, and [M-], [ME], [*-] or"
            " [*E] for each layer with two"
        )
    return tuple(layer.strip("[]") for layer in re.findall(r"\[..\]|.", pattern))


def mixer_of(layer: str) -> Mixer | None:
    """Return what mixes tokens in a layer with these letters; None if nothing does."""
    return _OF_MIXER.get(layer[0])


def moe_layers(fields: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether its MLP is a mixture of experts: ``moe_layer_freq=2`` means layers 0, 2, 4, ...

    Source: ``get_gpt_decoder_block_spec`` of megatron-core 0.16.1.
    """
    num_layers: int = fields["num_layers"]
    if fields.get("num_moe_experts") is None:
        return [False] * num_layers
    frequency = fields.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        require_size("moe_layer_freq", frequency)
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(flag) for flag in frequency]


def mamba_units(sizes: Mapping[str, Any]) -> int:
    """Return into how many equal parts the heads of a Mamba 2 layer, and the rows of its groups' memories, divide.

    Granite 4 H Tiny has 48 heads in one group with 128 rows: 16 parts, of 3 heads and 8 rows.
    """
    return math.gcd(sizes["mamba_num_heads"], sizes["mamba_num_groups"] * sizes["mamba_state_dim"])


def _check_stretch(given: Any) -> None:
    keys = STRETCHES.get(str(given.get("kind"))) if isinstance(given, Mapping) else None
    if keys is None or given.keys() != {"kind", *keys}:
        kinds = " or ".join(f"{kind!r} with {', '.join(keys)}" for kind, keys in STRETCHES.items())
        raise ValueError(f"architecture has stretch={given!r}; give a dict with kind {kinds}")


def _check_layer(owner: str, sizes: tuple[str, ...], given: Any, *, many: str = "", few: str = "") -> None:
    """Raise ValueError unless ``given`` has these sizes, of which ``many`` is a multiple of ``few``, and its layers."""
    freq = _FREQ.get(owner)
    names = sizes if freq is None else (freq, *sizes)
    if not isinstance(given, Mapping) or given.keys() != set(names):
        raise ValueError(f"architecture has {owner}={given!r}; give a dict with {', '.join(names)}")
    flags = () if freq is None else given[freq]
    if not isinstance(flags, list | tuple) or any(flag not in (0, 1) for flag in flags):
        raise ValueError(f"{owner} has {freq}={flags!r}; give a list with a 0 or 1 for each layer")
    _check_sizes(owner, given, sizes)
    if many and given[many] % given[few]:
        raise ValueError(
            f"{owner} has {many}={given[many]}, which is not a multiple of {few}={given[few]}; choose such numbers"
        )


def _check_sizes(owner: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if isinstance(given[name], bool) or not isinstance(given[name], int) or given[name] < 1:
            raise ValueError(f"{owner} has {name}={given[name]!r}; give a whole number above 0")


def _check_pattern(given: Any) -> None:
    if not isinstance(given, str):
        raise ValueError(f"architecture has layer_pattern={given!r}; give a text of letters, such as 'M*-E'")
    pattern_layers(given)


def _check_query_growth(given: Any) -> None:
    keys, optional = {"beta", "original_max_position_embeddings"}, {"first_position", "unrotated_only"}
    if not isinstance(given, Mapping) or not keys <= given.keys() <= keys | optional:
        raise ValueError(
            f"architecture has query_growth={given!r}; give a dict with {' and '.join(sorted(keys))}, and optionally"
            f" {' and '.join(sorted(optional))}"
        )


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "stretch": _check_stretch,
    "delta_net": functools.partial(
        _check_layer, "delta_net", DELTA_NET, many="linear_num_value_heads", few="linear_num_key_heads"
    ),
    "kimi_delta": functools.partial(_check_layer, "kimi_delta", KIMI_DELTA),
    "query_growth": _check_query_growth,
    "attention_chunk": lambda given: _check_sizes("architecture", {"attention_chunk": given}, ("attention_chunk",)),
    "layer_pattern": _check_pattern,
    "mamba": functools.partial(_check_layer, "mamba", MAMBA, many="mamba_num_heads", few="mamba_num_groups"),
    "indexer": functools.partial(_check_layer, "indexer", INDEXER),
}


def _check(name: str, value: Any) -> None:
    if name in _CHECKS:
        if value is not None:
            _CHECKS[name](value)
        return
    choices = _CHOICES.get(name)
    if choices is not None:
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
            raise ValueError(f"architecture has {name}={value!r}; choose {' or '.join(map(repr, choices))}")
        return
    if value is None and ARCHITECTURE_DEFAULTS[name] is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"architecture has {name}={value!r}; give a number above 0")


def needs_torch_backend(given: Any) -> bool:
    """Return whether settings, which need not be valid, have one that TransformerEngine's layers do not support."""
    return bool(_needing_torch_backend(given if isinstance(given, Mapping) else {}))


def _needing_torch_backend(given: Mapping[str, Any]) -> list[str]:
    return [name for name in _TORCH_BACKEND_ONLY if name in given and given[name] != ARCHITECTURE_DEFAULTS[name]]


def check_architecture(config: Any, transformer_impl: str) -> None:
    """Raise ValueError for settings that the other fields of ``config``, or its layers, do not allow."""
    given = architecture_of(config)
    if transformer_impl == "transformer_engine":
        given.check_transformer_engine()
    latent, experts = config.multi_latent_attention, config.num_moe_experts
    softmax = config.moe_router_score_function == "softmax" and not config.moe_router_enable_expert_bias
    ranks, channels = config.tensor_model_parallel_size, (config.num_query_groups or 0) * (config.kv_channels or 0)
    # A norm over all heads has one weight per channel, which ranks share evenly.
    uneven = given.head_norms == "all_heads" and channels % ranks != 0
    # The setting, whether the model clashes with it, and the words for what it clashes with
    clashes: list[tuple[str, bool, str]] = [
        *(
            (name, latent, "multi_latent_attention=True")
            for name in ("head_norms", "window_rotary_base", "stretch", "delta_net", "layer_pattern")
        ),
        *(
            (name, bool(config.mtp_num_layers), f"mtp_num_layers={config.mtp_num_layers}")
            for name in ("delta_net", "kimi_delta", "layer_pattern")
        ),
        ("layer_pattern", given.layer_norms != "before", f"layer_norms={given.layer_norms!r}"),
        ("layer_pattern", given.delta_net is not None, "delta_net"),
        *((name, given.kimi_delta is not None, "kimi_delta") for name in ("delta_net", "layer_pattern")),
        ("attention_output_bias", latent, "multi_latent_attention=True"),
        ("head_norms", config.qk_layernorm, "qk_layernorm=True"),
        ("head_norms", uneven, f"tensor_model_parallel_size={ranks}; choose a divisor of its {channels} key channels"),
        ("attention_cap", config.softmax_type != "vanilla", f"softmax_type={config.softmax_type!r}"),
        *((name, not latent, "multi_latent_attention=False") for name in ("latent_epsilon", "indexer")),
        ("indexer", latent and config.q_lora_rank is None, "q_lora_rank=None"),
        ("expert_bias", not experts, "num_moe_experts=None"),
        ("softmax_choice_bias", not experts, "num_moe_experts=None"),
        ("softmax_choice_bias", not softmax, "a router that is not a softmax without a bias"),
        ("mlp_bias", bool(experts) and config.moe_layer_freq == 1, "experts in every layer"),
    ]
    for name, clashes_here, other in clashes:
        if clashes_here and getattr(given, name) != ARCHITECTURE_DEFAULTS[name]:
            advice = "" if ";" in other else "; change one of the two"
            raise ValueError(
                f"architecture has {name}={getattr(given, name)!r}, which does not work with {other}{advice}"
            )
    for name, freq in _FREQ.items():
        flags = (getattr(given, name) or {}).get(freq)
        if flags is not None and len(flags) != config.num_layers:
            raise ValueError(
                f"{name} has {len(flags)} numbers in {freq}, and the model has"
                f" num_layers={config.num_layers}; give one for each layer"
            )
    _check_layers(given, config.num_layers, moe_layers(vars(config)))


def _check_layers(given: Architecture, num_layers: int, have_experts: list[bool]) -> None:
    """Reject a pattern that the model's other settings contradict."""
    layers = pattern_layers(given.layer_pattern) if given.layer_pattern is not None else ()
    if (given.mamba is not None) != any("M" in layer for layer in layers):
        raise ValueError(
            f"architecture has layer_pattern={given.layer_pattern!r} and mamba={given.mamba!r}; give mamba's sizes if"
            " and only if layers of the pattern have an M"
        )
    if given.layer_pattern is None:
        return
    if len(layers) != num_layers:
        raise ValueError(
            f"layer_pattern={given.layer_pattern!r} has {len(layers)} layers, and the model has"
            f" num_layers={num_layers}; give as many"
        )
    wanted = ["E" in layer for layer in layers]
    if wanted != have_experts:
        one = f"moe_layer_freq={[int(flag) for flag in wanted]}" if any(wanted) else "num_moe_experts=None"
        raise ValueError(
            f"layer_pattern={given.layer_pattern!r} has experts in other layers than num_moe_experts and moe_layer_freq"
            f" say; set {one}{', and num_moe_experts' * (any(wanted) and not any(have_experts))}"
        )


def set_architecture(config: Any, architecture: Architecture) -> None:
    """Attach the settings to a Megatron config, which takes them to the modules."""
    setattr(config, _ATTRIBUTE, architecture)
    if architecture.has_memories or 0 in (architecture.indexer or {}).get("indexer_freq", ()):
        config.hetereogenous_dist_checkpoint = True  # layers that differ cannot be stacked
    factor = (architecture.stretch or {}).get("attention_factor", 1.0)
    # Megatron multiplies a rotation by 0.1 * mscale * log(scaling_factor) + 1. With a scaling factor of e**10, that is
    # mscale + 1: for a factor of 1.3, mscale is 0.3.
    if factor != 1.0:
        config.yarn_rotary_scaling_factor = math.e**10
        config.yarn_mscale, config.yarn_mscale_all_dim = factor - 1, 0.0


def architecture_of(config: Any) -> Architecture:
    """Return the settings of a Megatron config; the defaults if it has none."""
    found: Architecture = getattr(config, _ATTRIBUTE, _PLAIN)
    return found


_PLAIN = Architecture()
