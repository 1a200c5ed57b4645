# SPDX-License-Identifier: Apache-2.0
"""What ``MCoreGPT`` refuses, alone and on a layout, worked out from plain data.

The model's config is a stand-in with the names and defaults of ``TransformerConfig`` (``config/signatures.py``), so
that the checks of ``config/field_support.py`` run on it as they are.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from lightning_mcore.config.checks import accepts, choices_of, is_callable, require_size
from lightning_mcore.config.field_homes import DEFAULTS, REQUIRED, SHORT_NAMES, check_home, check_lengths
from lightning_mcore.config.field_support import check_fields, check_without_transformer_engine
from lightning_mcore.config.fp8 import check_layers, check_microbatch, check_model
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.loss_normalization import check_average_in_collective, check_normalization
from lightning_mcore.config.positions import check_positions
from lightning_mcore.config.signatures import (
    GPT,
    RECIPE,
    dataclass_fields,
    parameters,
    source_file,
    transformer_arguments,
)
from lightning_mcore.config.text import unknown_name
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.optimizer.rules import check_sharded, refused_of_optimizer
from lightning_mcore.planning.batch import GlobalBatch
from lightning_mcore.planning.gpt_fields import GPTFields
from lightning_mcore.planning.rule_book import RuleBook
from lightning_mcore.planning.stage_layers import stage_layers
from lightning_mcore.planning.strategy_rules import StrategyRules
from lightning_mcore.planning.transformer_rules import refused_by_megatron


def check_gpt(book: RuleBook, model: Mapping[str, Any]) -> GPTFields | None:
    """Refuse arguments of ``MCoreGPT`` that are wrong on every layout.

    Args:
        book: Where refusals go.
        model: Its arguments.

    Returns:
        The sizes of the model; None where they are not known.
    """
    known = parameters(GPT)
    given = book.check_arguments("argument of MCoreGPT", model, known)
    missing = [name for name, argument in known.items() if argument.default is ... and name not in model]
    if missing:
        book.refuse(f"MCoreGPT lacks {' and '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}")
    for name in ("vocab_size", "seq_length", "make_vocab_size_divisible_by"):
        if name in given:
            book.attempt(lambda name=name: require_size(name, given[name]))  # type: ignore[misc]
    settings = {name: argument.default for name, argument in known.items()} | given
    transformer = given.get("transformer")
    recipe = book.check_arguments("field of Recipe", given.get("recipe") or {}, dataclass_fields(RECIPE))
    book.attempt(lambda: Recipe.of(recipe))
    if not isinstance(transformer, Mapping):
        return None
    right = _check_transformer(book, transformer)
    book.attempt(lambda: check_positions(settings, transformer))
    try:  # also of a model with wrong fields, so that errors further on are met as well
        return GPTFields.of({**given, "transformer": right})
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        if not book.errors:
            book.refuse(f"the sizes of the model do not add up: {error}")
        return None


def _check_transformer(book: RuleBook, transformer: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse fields by name and by value; return those that are right."""
    right: dict[str, Any] = {}
    latent = bool(transformer.get("multi_latent_attention"))
    known = transformer_arguments(latent)
    for name, value in transformer.items():
        homeless = len(book.errors)
        book.attempt(lambda name=name: check_home(name))  # type: ignore[misc]
        if len(book.errors) > homeless:
            continue
        if name not in known:
            in_latent = not latent and name in transformer_arguments(True)
            more = f"{name} is a field of multi-latent attention; set multi_latent_attention=True or remove it"
            book.refuse(more if in_latent else unknown_name("field of TransformerConfig", name, known))
        elif value is not None and not accepts(known[name].hint, value):
            book.refuse(f"{name}={value!r} does not fit; choose {choices_of(known[name].hint)}")
        elif is_callable(known[name].hint) and isinstance(value, str) and "." not in value and value not in SHORT_NAMES:
            book.refuse(unknown_name(f"function for {name}", value, SHORT_NAMES) + ", or give an import path")
        else:
            right[name] = value
    for name in REQUIRED:
        if name in transformer and (name in right or transformer[name] is None):
            book.attempt(lambda name=name: require_size(name, transformer[name]))  # type: ignore[misc]
    missing = [name for name in REQUIRED if name not in transformer]
    if missing:
        book.refuse(f"transformer lacks {' and '.join(missing)}; give {', '.join(REQUIRED)} at least")
    elif "num_layers" in right:
        book.attempt(lambda: check_lengths(right))
    return right


def check_gpt_on_layout(
    book: RuleBook,
    fields: GPTFields,
    rules: StrategyRules,
    model: Mapping[str, Any],
    backend: str,
    device_type: str,
) -> None:
    """Refuse a model that does not fit the strategy: its sizes, Megatron's rules between fields, the backend.

    Args:
        book: Where refusals go.
        fields: The model.
        rules: The settings of strategy and precision.
        model: The arguments of ``MCoreGPT``.
        backend: ``"local"`` or ``"transformer_engine"``.
        device_type: ``"cuda"`` or ``"cpu"``.
    """
    layout = rules.layout
    if layout is None:
        return
    if backend == "transformer_engine" and device_type != "cuda":
        book.refuse(
            f"transformer_impl='transformer_engine' needs a CUDA device and this run is on {device_type!r};"
            " choose 'auto' or 'local'"
        )
    fits = book.passes(lambda: layout.validate_model(fields.shape))
    config = stand_in_config(fields, rules)
    for sentence in refused_by_megatron(config):
        book.refuse(sentence)
    if fits and fields.recompute.granularity == "full" and fields.recompute.method == "uniform":
        _check_uniform(book, fields, layout)
    book.attempt(lambda: check_fields(config, backend, device_type))  # type: ignore[arg-type]
    if device_type == "cpu" and importlib.util.find_spec("transformer_engine") is None:
        book.attempt(lambda: check_without_transformer_engine(config))
    _check_multi_token(book, config, fields)
    book.attempt(lambda: check_normalization(model.get("loss_normalization") or "tokens", config))
    averages = bool(rules.resolved("average_in_collective"))
    book.attempt(lambda: check_average_in_collective(averages, config))
    _check_optimizer(book, rules, str((model.get("recipe") or {}).get("optimizer") or "adamw"))
    if device_type == "cpu" and layout.expert_model_parallel_size > 1 and layout.expert_tensor_size > 1:
        book.refuse(
            f"expert_tensor_parallel_size={layout.expert_tensor_size} with expert_model_parallel_size="
            f"{layout.expert_model_parallel_size} needs collectives of uneven sizes, which gloo does not have on the"
            " CPU; set expert_tensor_parallel_size=1"
        )
    if rules.fp8 is not None and rules.fp8.is_on:
        fp8 = rules.fp8
        sizes = (layout.tensor_model_parallel_size, layout.expert_tensor_size)
        book.attempt(lambda: check_model(fp8, fields.shape, *sizes))
        book.attempt(lambda: check_layers(fp8, fields.num_layers, layout.pipeline_model_parallel_size))


def _check_optimizer(book: RuleBook, rules: StrategyRules, name: str) -> None:
    """Refuse an optimizer that cannot do what the strategy asks of it."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "adamw": ("AdamW", {"optimizer": "adam", "decoupled_weight_decay": True}),
        "sgd": ("SGD", {"optimizer": "sgd"}),
    }
    if name not in kinds:
        return  # refused already
    shown, fields = kinds[name]
    if rules.distributed:
        book.attempt(lambda: check_sharded(fields, shown))
    for sentence in refused_of_optimizer(rules.optimizer, fields, shown):
        book.refuse(sentence)


def check_batch(book: RuleBook, fields: GPTFields, rules: StrategyRules, batch: GlobalBatch) -> None:
    """Refuse microbatches that the schedule, the layout or FP8 cannot run."""
    layout, group = rules.layout, rules.strategy.get("microbatch_group_size_per_vp_stage")
    if layout is None:
        return
    book.attempt(lambda: layout.validate_microbatches(batch.num_microbatches, group))
    unit = layout.sequence_multiple
    if batch.seq_length % unit and fields.seq_length % unit == 0:
        book.refuse(
            f"data.seq_length={batch.seq_length} is not a multiple of {unit}, which the layout asks for; choose"
            f" {-(-batch.seq_length // unit) * unit}"
        )
    if batch.seq_length > fields.seq_length and fields.learned_positions:
        book.refuse(
            f"data.seq_length={batch.seq_length} is more than the {fields.learned_positions} learned positions of the"
            " model; make them equal"
        )
    if rules.fp8 is not None and rules.fp8.is_on:
        fp8 = rules.fp8
        book.attempt(lambda: check_microbatch(fp8, (batch.seq_length, batch.micro_batch_size), layout))


def stand_in_config(fields: GPTFields, rules: StrategyRules) -> Any:
    """Return an object with the attributes that Megatron's config of this run would have, as far as rules read them."""
    layout, fp8 = rules.layout or ParallelLayout(), rules.fp8
    half = not rules.precision_name.startswith("32")
    owned = {name: value for name, value in vars(layout).items() if value is not None}
    owned["expert_tensor_parallel_size"] = layout.expert_tensor_size
    owned["pipeline_dtype"] = SimpleNamespace(itemsize=2 if half else 4, name=rules.precision_name)
    owned["tp_comm_overlap"] = bool(rules.strategy.get("tp_comm_overlap"))
    owned["overlap_p2p_comm"] = rules.overlap_p2p_comm
    config = _stand_in_class(fields.attention is not None)()
    values = {**DEFAULTS, **fields.transformer, **owned, **(fp8.transformer_fields() if fp8 is not None else {})}
    for name, value in values.items():
        setattr(config, name, value)
    config.activation_func = _short(config.activation_func)
    config.attention_backend = str(config.attention_backend).removeprefix("AttnBackend.")
    if config.apply_query_key_layer_scaling:
        config.attention_softmax_in_fp32 = True
    if config.recompute_modules is None:
        config.recompute_modules = ["core_attn"]
    return config


@cache
def _stand_in_class(latent: bool) -> type:
    named = [
        (name, Any, field(default=None if argument.default is ... else _plain(argument.default)))
        for name, argument in transformer_arguments(latent).items()
    ]
    return make_dataclass("TransformerConfig", named)


def _plain(default: Any) -> Any:
    text = default if isinstance(default, str) else None
    return (
        text.removeprefix("AttnBackend.")
        if text is not None
        else tuple(default)
        if isinstance(default, list)
        else default
    )


def _short(function: Any) -> str:
    return str(function).rpartition(".")[2]


def _check_uniform(book: RuleBook, fields: GPTFields, layout: ParallelLayout) -> None:
    group = fields.recompute.num_layers
    counts = {len(chunk.layers) for stage in stage_layers(fields, layout) for chunk in stage}
    uneven = sorted(count for count in counts if count % group)
    if uneven:
        book.refuse(
            f"recompute_num_layers={group} with recompute_method='uniform' does not divide the {uneven[0]} layers of a"
            " pipeline stage's chunk; choose a divisor, or recompute_method='block'"
        )


def _check_multi_token(book: RuleBook, config: Any, fields: GPTFields) -> None:
    """Mirror ``multi_token.check_multi_token``."""
    layers = fields.mtp_num_layers
    if not layers:
        return
    newer = importlib.util.find_spec("megatron") is not None and _counts_own_tokens()
    if config.context_parallel_size > 1 and (newer or not config.calculate_per_token_loss):
        book.refuse(
            f"mtp_num_layers={layers} with context_parallel_size={config.context_parallel_size}: each rank divides that"
            " loss by its own tokens; choose context_parallel_size=1"
        )
    if not newer and not config.calculate_per_token_loss:
        book.refuse(
            f"mtp_num_layers={layers} with calculate_per_token_loss=False divides by zero where a mask leaves a"
            " microbatch no tokens; set calculate_per_token_loss=True"
        )
    for name in ("no_rope_freq", "window_attn_skip_freq"):
        if isinstance(getattr(config, name, None), list):
            book.refuse(f"mtp_num_layers={layers} with a list in {name}, which ends with num_layers; leave out one")
    if fields.tied and config.pipeline_model_parallel_size > 1:
        book.refuse(
            f"share_embeddings_and_output_weights=True with mtp_num_layers={layers} and pipeline_model_parallel_size="
            f"{config.pipeline_model_parallel_size} gives the last stage a weight that it does not use; choose one"
        )


@cache
def _counts_own_tokens() -> bool:
    """Whether the installed megatron-core is 0.17 or newer."""
    return "def process_mtp_loss" in source_file("megatron/core/transformer/multi_token_prediction.py").read_text(
        "utf-8"
    )
