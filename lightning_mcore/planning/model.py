# SPDX-License-Identifier: Apache-2.0
"""The sizes of an ``MCoreGPT`` that determine memory and parameters, and the layers of each pipeline rank.

The rest of ``planning`` takes a model as :class:`GPTFields`. Other files check whether the values are allowed
(``layers/transformer_config.py``, ``config/layout.py``); here they are not checked.

:func:`stage_layers` splits the layers, chunk by chunk: as ``pipeline_model_parallel_layout`` says, or as Megatron does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lightning_mcore.config.architecture import Architecture, Mixer, moe_layers, needs_torch_backend
from lightning_mcore.config.distillation import HiddenLoss, PairPlaces, StatesOf
from lightning_mcore.config.field_homes import DEFAULTS
from lightning_mcore.config.layout import ModelShape, ParallelLayout
from lightning_mcore.config.lora import AdaptedModel
from lightning_mcore.config.preference import Preference
from lightning_mcore.config.reranking import Reranker
from lightning_mcore.config.vision import Vision
from lightning_mcore.parallel.stage_layers import layers_of_chunks
from lightning_mcore.planning.signatures import fields_of

FP32 = 4
"""Bytes of a number in fp32."""


_OF_ATTENTION = (
    *("linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"),
    *("linear_in", "linear_out"),
)
WEIGHTS_OF_PARTS = {
    "attention": tuple(f"self_attention.{name}." for name in _OF_ATTENTION),
    "mla_up_proj": ("self_attention.linear_q_up_proj.", "self_attention.linear_kv_up_proj."),
    "mlp": ("mlp.linear_",),
    "moe": ("mlp.experts.", "mlp.router.", "mlp.fc1_latent_proj.", "mlp.fc2_latent_proj."),
    "shared_experts": ("mlp.shared_experts.",),
}
"""How the names of the weights of each part of a layer begin; scores of attention have none."""


def part_of(weight: str) -> str:
    """Return the part of a layer that has a weight, by its name within the layer."""
    return next((part for part, starts in WEIGHTS_OF_PARTS.items() if weight.startswith(starts)), "attention")


class LayerKind(NamedTuple):
    """What a layer consists of; layers of one kind have the same parts."""

    mixer: Mixer | None
    has_mlp: bool  # or experts
    is_moe: bool
    has_indexer: bool = False

    @property
    def letters(self) -> str:
        """The layer in a ``layer_pattern``."""
        found = {"mamba": "M", "attention": "*"}.get(str(self.mixer), "") + ("E" if self.is_moe else "-") * self.has_mlp
        return found if len(found) == 1 else f"[{found}]"


@dataclass(frozen=True)
class GPTFields:
    """The sizes of a GPT; any field of ``TransformerConfig`` is an attribute too, with its default filled in."""

    vocab_size: int  # number of existing tokens
    padded_vocab_size: int  # rows of the embedding
    seq_length: int  # tokens of a sequence
    learned_positions: int  # rows of the embedding of positions; 0 with rotary positions or none
    rotary_channels: int  # channels of a head that are rotated; 0 for none
    tied: bool  # whether the output layer is the embedding's transpose
    is_moe: tuple[bool, ...]  # for each layer, whether its feed-forward part is a mixture of experts
    shape: ModelShape  # the sizes that a layout must divide, for ``ParallelLayout.validate_model``
    transformer: Mapping[str, Any]  # the given fields of ``TransformerConfig``
    architecture: Architecture = field(default_factory=Architecture)  # what Megatron's config has no field for
    scores: bool = False  # whether the output layer gives each token one score, as in a reward model, instead of logits
    judged_tokens: int = 0  # number of tokens whose logits a reranker computes; 0 for the whole vocabulary's
    encodes: bool = False  # whether there is no output layer, as in a model of vectors
    adapters: AdaptedModel | None = None  # what is trained beside frozen weights; None where all are
    tower: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # shape and part, by name
    frozen: frozenset[str] = frozenset()  # parts of a vision-language model that are not trained
    vision: Vision | None = None  # the settings of the tower; None for a text-only model
    image_tokens: int = 0  # tokens of images in a row; 0 if unknown
    teacher: "GPTFields | None" = None  # of a model that learns from another one
    teacher_path: str = ""
    layer_pairs: tuple[tuple[int, int], ...] = ()  # layers of model and teacher whose hidden states are compared
    hidden_loss: HiddenLoss = "mse"  # how they are compared
    copies_of_logits: float = 0.0  # fp32 copies of logits that the divergence from the teacher needs at once

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """All fields of ``TransformerConfig``."""
        return _with_defaults(self.transformer)

    def __getattr__(self, name: str) -> Any:
        """Return a field of ``TransformerConfig``."""
        if "transformer" not in vars(self) or name not in self.values:
            raise AttributeError(name)
        return self.values[name]

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """With ``recompute_granularity="selective"``: the recomputed parts of a layer."""
        if self.recompute_granularity != "selective":
            return frozenset()
        parts = frozenset(_given_or(self.values, "recompute_modules", ["core_attn"]))
        return parts | ({"shared_experts"} if "moe" in parts else set())  # which are a part of the experts' layer

    def kind(self, layer: int) -> "LayerKind":
        """Return what a layer, counted from 0, consists of."""
        own = self.architecture
        return LayerKind(own.mixer(layer), own.has_mlp(layer), self.is_moe[layer], own.has_indexer(layer))

    @property
    def output_size(self) -> int:
        """Rows of the output layer that are used."""
        return 0 if self.encodes else 1 if self.scores else self.judged_tokens or self.padded_vocab_size

    @property
    def has_logits(self) -> bool:
        """Whether the output layer gives each token logits over the vocabulary."""
        return not self.scores and not self.encodes and not self.judged_tokens

    @property
    def projected_width(self) -> int:
        """Channels to which hidden states are projected before a teacher's are compared; 0 without projections."""
        wide = 0 if self.teacher is None or not self.layer_pairs else self.teacher.hidden_size
        return 0 if wide == self.hidden_size else wide

    def width_of(self, states: Iterable[StatesOf]) -> int:
        """Return the channels of hidden states of this model's and its teacher's layers."""
        taught = 0 if self.teacher is None else self.teacher.hidden_size
        return sum(taught if each.is_teacher else self.hidden_size for each in states)

    @property
    def subtracts_mean(self) -> bool:
        """Whether norms subtract the mean."""
        return bool(self.normalization == "LayerNorm")

    @property
    def query_width(self) -> int:
        """Channels of a head of queries and keys, the rotated ones included."""
        if self.multi_latent_attention:
            return int(self.qk_head_dim + self.qk_pos_emb_head_dim)
        return int(self.kv_channels)

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "GPTFields":
        """Read all arguments of ``MCoreGPT``; those of ``from_pretrained`` must be resolved before.

        Raises ValueError for settings of the architecture, a preference or a reranker that are wrong.
        """
        given: Mapping[str, Any] = model["transformer"]
        values, architecture = _with_defaults(given), Architecture.of(model.get("architecture"))
        multiple = int(_given_or(model, "make_vocab_size_divisible_by", 128))
        padded = -(-model["vocab_size"] // multiple) * multiple
        positions = _given_or(model, "position_embedding_type", "rope")
        rotated = int(values["kv_channels"] * _given_or(model, "rotary_percent", 1.0))
        if values["multi_latent_attention"]:
            rotated, positions = values["qk_pos_emb_head_dim"], "rope"
        sizes = SimpleNamespace(**given, shared_heads=architecture.shared_heads)
        return cls(
            vocab_size=model["vocab_size"],
            padded_vocab_size=padded,
            seq_length=model["seq_length"],
            learned_positions=model["seq_length"] if model.get("position_embedding_type") == "learned_absolute" else 0,
            rotary_channels=rotated if positions in ("rope", "yarn") else 0,
            tied=bool(model.get("share_embeddings_and_output_weights")),
            is_moe=tuple(moe_layers(given)),
            shape=ModelShape.from_config(sizes, seq_length=model["seq_length"], vocab_size=padded),
            transformer=given,
            architecture=architecture,
            scores=_scores(model),
            judged_tokens=len(Reranker.of(model["reranker"]).tokens or []) if "reranker" in model else 0,
            encodes="embedding" in model,
        )


def _scores(model: Mapping[str, Any]) -> bool:
    """Return whether a model has a score layer."""
    if "reranker" in model:
        return Reranker.of(model["reranker"]).tokens is None
    return "preference" in model and Preference.of(model["preference"]).gives_scores


def _given_or(values: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    value = values.get(name)
    return otherwise if value is None else value


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of Megatron's config, with the defaults that it derives from others."""
    known = fields_of(MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig)
    values = {**known, **DEFAULTS}
    values |= {name: value for name, value in given.items() if value is not None or name == "q_lora_rank"}
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    derived = {"num_query_groups": heads, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden}
    derived |= {"recompute_num_layers": 1, "mtp_num_layers": 0, "moe_shared_expert_intermediate_size": 0}
    derived["moe_ffn_hidden_size"] = int(_given_or(values, "ffn_hidden_size", 4 * hidden))
    values |= {name: int(_given_or(values, name, size)) for name, size in derived.items()}
    if values["qk_l2_norm"]:
        values["qk_layernorm"] = False
    if values["moe_layer_recompute"]:  # Megatron's older name for it
        modules = given.get("recompute_modules") or ["core_attn"]
        of_given = modules if values["recompute_granularity"] == "selective" else []
        values |= {"recompute_granularity": "selective", "recompute_modules": [*of_given, "moe"]}
    return values


def backend_of(model: Mapping[str, Any], device_type: str) -> str:
    """Return the layers of a model, ``"local"`` or ``"transformer_engine"``, on GPUs with TransformerEngine."""
    choice: str = model.get("transformer_impl") or "auto"
    if choice != "auto":
        return choice
    is_local = device_type != "cuda" or needs_torch_backend(model.get("architecture"))
    return "local" if is_local else "transformer_engine"


@dataclass(frozen=True)
class ChunkLayers:
    """The part of the model that one virtual stage of one pipeline rank holds."""

    layers: tuple[int, ...]  # indices of its decoder layers in the whole model, from 0, in order
    embedding: bool  # whether the chunk has the embedding
    output: bool  # whether the chunk has the output layer and the loss
    mtp: int = 0  # layers of multi-token prediction; with any, it has an embedding, perhaps a copy
    pairs: int = 0  # number of pairs of hidden states, a student's and a teacher's, that it compares
    kept: tuple[StatesOf, ...] = ()  # states of its layers that are compared, here or later
    sent: tuple[StatesOf, ...] = ()  # states that it sends to the next chunk, for pairs of layers on two chunks
    received: tuple[StatesOf, ...] = ()


def stage_layers(fields: GPTFields, layout: ParallelLayout) -> list[list[ChunkLayers]]:
    """Return the chunks of every pipeline rank, indexed by pipeline rank, then by virtual stage."""
    pp, chunks, stages = layout.pipeline_model_parallel_size, layout.num_chunks, layout.pipeline_stages
    counts, last = layer_counts(fields, layout), pp * chunks - 1
    mtp = [stage.count("m") for stage in stages] if stages else [0] * last + [fields.mtp_num_layers]
    starts = [0, *accumulate(counts)]
    places = _places_of_pairs(fields, counts, layout)

    def chunk(stage: int) -> ChunkLayers:
        numbers = range(starts[stage], starts[stage] + counts[stage])
        own = ChunkLayers(tuple(numbers), embedding=stage == 0, output=stage == last, mtp=mtp[stage])
        if places is None:
            return own
        kept, sent, received = map(tuple, (places.kept_in(stage), places.sent_by(stage), places.sent_by(stage - 1)))
        return replace(own, pairs=len(places.compared_in(stage)), kept=kept, sent=sent, received=received)

    return [[chunk(index * pp + rank) for index in range(chunks)] for rank in range(pp)]


def layer_counts(fields: GPTFields, layout: ParallelLayout) -> list[int]:
    """Return what ``layers_of_chunks`` does, from the sizes alone."""
    if layout.pipeline_stages:
        return [stage.count("t") for stage in layout.pipeline_stages]
    sizes = tuple(fields.values[name] for name in _OF_SPLIT)
    return _counts(sizes, layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size)


def _places_of_pairs(fields: GPTFields, counts: Sequence[int], layout: ParallelLayout) -> PairPlaces | None:
    """Return where paired layers are, from the layers of each chunk; None without pairs, or if a layer is missing."""
    if fields.teacher is None or not fields.layer_pairs:
        return None
    taught = layer_counts(fields.teacher, layout)
    if any(not 1 <= own <= sum(counts) or not 1 <= other <= sum(taught) for own, other in fields.layer_pairs):
        return None
    return PairPlaces.of(fields.layer_pairs, counts, taught, bool(fields.mtp_num_layers))


_OF_SPLIT = (
    *("num_layers", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


@lru_cache(maxsize=1024)
def _counts(sizes: tuple[Any, ...], pp: int, vp: int | None) -> list[int]:
    """Return what Megatron does with the values of ``_OF_SPLIT`` on ``pp`` stages of ``vp`` chunks."""
    config: Any = SimpleNamespace(
        **dict(zip(_OF_SPLIT, sizes, strict=True)),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        pipeline_model_parallel_layout=None,
    )
    return layers_of_chunks(config)
