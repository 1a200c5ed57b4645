# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an ``MCoreGPT`` in a plan: alone, on its layout, and with its batch.

The rules are those of the module; Megatron's own are asked of its ``TransformerConfig``, which is built here.
"""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import nn, zeros

from lightning_mcore.config.checks import require_size
from lightning_mcore.config.field_homes import REQUIRED
from lightning_mcore.config.fp8 import check_layers, check_microbatch, check_model
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.positions import check_positions
from lightning_mcore.config.rules.model import (
    check_average_in_collective,
    check_fields,
    check_normalization,
    check_without_transformer_engine,
)
from lightning_mcore.layers.multi_token import check_multi_token
from lightning_mcore.layers.spec import resolve_transformer_impl
from lightning_mcore.layers.transformer_config import build_transformer_config, field_faults
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.optimizer.rules import check_kind, megatron_fields, refused_of_optimizer
from lightning_mcore.parallel.pipeline import check_uniform_recompute
from lightning_mcore.planning.batch import GlobalBatch
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.rule_book import RuleBook
from lightning_mcore.planning.signatures import fields_of, of_model
from lightning_mcore.planning.strategy import PlannedStrategy

_MISSING = re.compile(r"\binstall\b|\bTE\b|[Tt]ransformer.?[Ee]ngine")
"""Found in what Megatron says where TransformerEngine is not installed, or not the version that it wants."""


def check_gpt(book: RuleBook, model: Mapping[str, Any]) -> GPTFields | None:
    """Refuse arguments of ``MCoreGPT`` that are wrong on every layout.

    Args:
        book: Where refusals go.
        model: Its arguments.

    Returns:
        The sizes of the model; None where they are not known.
    """
    known = of_model()
    given = book.check_arguments("argument of MCoreGPT", model, known)
    missing = [name for name, argument in known.items() if argument.default is ... and name not in model]
    if missing:
        book.refuse(f"MCoreGPT lacks {' and '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}")
    for name in ("vocab_size", "seq_length", "make_vocab_size_divisible_by"):
        if name in given:
            book.attempt(lambda name=name: require_size(name, given[name]))  # type: ignore[misc]
    settings = settings_of_gpt(given)
    transformer = given.get("transformer")
    recipe = book.check_arguments("field of Recipe", given.get("recipe") or {}, fields_of(Recipe))
    book.attempt(lambda: Recipe.of(recipe))
    if not isinstance(transformer, Mapping):
        return None
    wrong = dict(field_faults(transformer))
    book.collect(wrong.values())
    right = {name: value for name, value in transformer.items() if name not in wrong}
    for name in REQUIRED:
        if right.get(name) is not None:
            book.attempt(lambda name=name: require_size(name, right[name]))  # type: ignore[misc]
    book.attempt(lambda: check_positions(settings, transformer))
    try:  # also of a model with wrong fields, so that errors further on are found as well
        return GPTFields.of({**given, "transformer": right})
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        if not book.errors:
            book.refuse(f"the sizes of the model do not add up: {error}")
        return None


def settings_of_gpt(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, the defaults filled in."""
    return {name: argument.default for name, argument in of_model().items()} | dict(model)


def check_gpt_on_layout(book: RuleBook, fields: GPTFields, rules: PlannedStrategy) -> None:
    """Refuse a model whose sizes the layout or FP8 cannot divide.

    Args:
        book: Where refusals go.
        fields: The model.
        rules: The settings of strategy and precision.
    """
    layout, fp8 = rules.layout, rules.fp8
    if layout is None:
        return
    book.attempt(lambda: layout.validate_model(fields.shape))
    if fp8 is not None and fp8.is_on:
        sizes = (layout.tensor_model_parallel_size, layout.expert_tensor_size)
        book.attempt(lambda: check_model(fp8, fields.shape, *sizes))
        book.attempt(lambda: check_layers(fp8, fields.num_layers, layout.pipeline_model_parallel_size))


def check_in_megatron(
    book: RuleBook, fields: GPTFields, rules: PlannedStrategy, model: Mapping[str, Any], backend: str, device_type: str
) -> None:
    """Build Megatron's config and the optimizer, and refuse what they or our layers refuse.

    Args:
        book: Where refusals go.
        fields: The model.
        rules: The settings of strategy and precision.
        model: The arguments of ``MCoreGPT``.
        backend: ``"local"`` or ``"transformer_engine"``.
        device_type: ``"cuda"`` or ``"cpu"``.
    """
    settings, used = settings_of_gpt(model), backend
    if device_type != "cuda":  # whether a machine with GPUs has TransformerEngine, it is to say itself
        used = book.attempt(lambda: resolve_transformer_impl(backend, device_type)) or "local"  # type: ignore[arg-type]
    _check_optimizer(book, rules, settings)
    owned = rules.megatron_fields()
    if fields.attention is not None:
        owned |= {name: settings[name] for name in ("rotary_base", "rotary_percent")}
    config: Any = _config(book, fields, owned, device_type)
    if config is None:
        return
    book.attempt(lambda: check_fields(config, used, device_type))  # type: ignore[arg-type]
    book.attempt(lambda: check_uniform_recompute(config))
    book.attempt(lambda: check_multi_token(config, bool(settings["share_embeddings_and_output_weights"])))
    book.attempt(lambda: check_normalization(settings["loss_normalization"], config))
    book.attempt(lambda: check_average_in_collective(bool(rules.resolved("average_in_collective")), config))
    if device_type == "cpu" and not HAVE_TE:
        book.attempt(lambda: check_without_transformer_engine(config))


def _config(book: RuleBook, fields: GPTFields, owned: Mapping[str, Any], device_type: str) -> Any:
    """Build Megatron's config; None where Megatron refuses it, or finds a library missing that only GPUs need."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run shows what Megatron warns of
            return build_transformer_config(fields.transformer, owned)
    except (ValueError, ImportError, TypeError, AttributeError) as error:
        if HAVE_TE or device_type != "cuda" or (isinstance(error, ValueError) and not _MISSING.search(str(error))):
            book.refuse(str(error))
        return None


def _check_optimizer(book: RuleBook, rules: PlannedStrategy, settings: Mapping[str, Any]) -> None:
    """Make the optimizer for one parameter, and refuse it where it cannot do what the strategy asks of it."""
    quiet = RuleBook()  # what is wrong with the recipe is refused already
    recipe = quiet.attempt(lambda: Recipe.of(settings["recipe"] or {}))
    if recipe is None:
        return
    made = recipe.build_optimizer([("weight", nn.Parameter(zeros(1, 1)))])
    layout = rules.layout or ParallelLayout()
    sizes = (layout.tensor_model_parallel_size, layout.expert_model_parallel_size)
    book.attempt(
        lambda: check_kind(
            made,
            inline=False,
            distributed=rules.distributed,
            tensor_parallel_size=sizes[0],
            expert_model_parallel_size=sizes[1],
        )
    )
    book.collect(refused_of_optimizer(rules.optimizer, megatron_fields(made) or {}, type(made).__name__))


def check_batch(book: RuleBook, fields: GPTFields, rules: PlannedStrategy, batch: GlobalBatch) -> None:
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
