# SPDX-License-Identifier: Apache-2.0
"""Every error of a run that is known before it starts: all of them, not only the first.

:func:`check_run` goes through a run in the order in which it would start: the arguments of Trainer, strategy and
precision, the model's, the layout on the devices, the model on the layout, the microbatches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mcore.config.fp8 import check_start
from lightning_mcore.config.rules.trainer import may_never_end, trainer_faults
from lightning_mcore.config.run import RunSettings
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.planning.batch import GlobalBatch, global_batch
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.model_rules import (
    check_batch,
    check_gpt,
    check_gpt_on_layout,
    check_in_megatron,
)
from lightning_mcore.planning.rule_book import RuleBook
from lightning_mcore.planning.signatures import of_model, of_trainer
from lightning_mcore.planning.strategy import PlannedStrategy


@dataclass(frozen=True)
class CheckedRun:
    """A run after the checks, as far as they came.

    Args:
        errors: A sentence for each thing that is refused.
        assumptions: What the settings do not say, and what was taken instead; and their notes.
        rules: The settings of strategy and precision.
        model: Arguments of ``MCoreGPT``, those of a Hugging Face config filled in.
        fields: The sizes of the model; None where they are unknown.
        batch: What a step reads; None where layout or sizes are wrong.
        backend: ``"local"`` or ``"transformer_engine"``.
        device_type: ``"cuda"`` or ``"cpu"``.
        stands: Whether layout, devices and model fit each other, so that the rest can be worked out.
    """

    errors: tuple[str, ...]
    assumptions: tuple[str, ...]
    rules: PlannedStrategy
    model: Mapping[str, Any]
    fields: GPTFields | None
    batch: GlobalBatch | None
    backend: str
    device_type: str
    stands: bool


def check_run(settings: RunSettings, devices: int, backend: str | None = None, ask_megatron: bool = True) -> CheckedRun:
    """Check a run.

    Args:
        settings: The run.
        devices: Ranks of the whole run.
        backend: Whose layers; None for what the model and the accelerator say.
        ask_megatron: Whether to build Megatron's config, which takes some milliseconds.

    Raises:
        ValueError: There are no devices.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} is too small; choose 1 or more")
    book, assumptions = RuleBook(), list(settings.notes)
    device_type = "cpu" if settings.trainer.get("accelerator") == "cpu" else "cuda"
    trainer = book.check_arguments("argument of Trainer", settings.trainer, of_trainer())
    book.collect(trainer_faults(trainer))
    rules = PlannedStrategy(book, settings.strategy, settings.precision, device_type)
    rules.check(devices)
    model = book.attempt(lambda: arguments_of_gpt(book, settings.model)) or {}
    fields = check_gpt(book, model) if model else None
    if "path" in settings.model and rules.fp8 is not None:
        fp8_param, path = rules.fp8.fp8_param, settings.model["path"]
        book.attempt(lambda: check_start(fp8_param, f"the weights of {path}"))
    if fields is not None and may_never_end(trainer):
        _check_end(book, model)
    used = backend or _backend(model, device_type)
    if fields is not None:
        check_gpt_on_layout(book, fields, rules)
        if ask_megatron:
            check_in_megatron(book, fields, rules, model, used, device_type)
    batch = _batch(book, settings, rules, fields, devices, assumptions)
    if batch is not None and fields is not None:
        check_batch(book, fields, rules, batch)
    stands = batch is not None and fields is not None and _stands(rules, fields)
    if model.get("transformer_impl", "auto") == "auto" and backend is None and device_type == "cuda":
        assumptions.append("layers of TransformerEngine, as transformer_impl='auto' takes on GPUs (--backend local)")
    return CheckedRun(tuple(book.errors), tuple(assumptions), rules, model, fields, batch, used, device_type, stands)


def arguments_of_gpt(book: RuleBook, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, those that follow from a Hugging Face config filled in.

    Args:
        book: Where refusals of arguments go.
        model: Arguments of ``MCoreGPT``, or with ``"path"`` those of ``MCoreGPT.from_pretrained``.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: There is no model, or it is of no known family.
    """
    if not model:
        raise ValueError("the run has no model; give MCoreGPT's arguments, or --model with a Hugging Face model")
    if "path" not in model:
        return dict(model)
    given = book.check_arguments("argument of MCoreGPT.from_pretrained", model, of_model(pretrained=True))
    from lightning_mcore.hf.source import planned_settings  # transformers takes two seconds

    names = ("path", "family", "seq_length", "transformer")
    source = planned_settings(given["path"], given.get("family"), given.get("seq_length"), given.get("transformer"))
    return {**{name: value for name, value in given.items() if name not in names}, **source}


def _check_end(book: RuleBook, model: Mapping[str, Any]) -> None:
    """Refuse a course of the learning rate that needs the number of steps."""
    try:
        recipe = Recipe.of(model.get("recipe") or {})
    except (TypeError, ValueError):
        return  # refused already
    book.attempt(lambda: recipe.check_end(None))


def _backend(model: Mapping[str, Any], device_type: str) -> str:
    choice = model.get("transformer_impl") or "auto"
    return choice if choice != "auto" else "transformer_engine" if device_type == "cuda" else "local"


def _batch(
    book: RuleBook,
    settings: RunSettings,
    rules: PlannedStrategy,
    fields: GPTFields | None,
    devices: int,
    assumptions: list[str],
) -> GlobalBatch | None:
    rows, length = settings.data.get("batch_size"), settings.data.get("seq_length")
    if rows is None:
        rows = rules.strategy.get("micro_batch_size") or 1
        assumptions.append(f"{rows} rows in a DataLoader batch (data.batch_size is not given)")
    if length is None and fields is not None:
        length = fields.seq_length
    layout = rules.layout
    if layout is None or length is None:
        return None
    try:
        layout.validate_world(devices)
    except ValueError:
        return None  # refused already
    return book.attempt(
        lambda: global_batch(rules.strategy, settings.trainer, rows, length, layout.data_parallel_size(devices))
    )


def _stands(rules: PlannedStrategy, fields: GPTFields) -> bool:
    try:
        if rules.layout is not None:
            rules.layout.validate_model(fields.shape)
    except ValueError:
        return False
    return rules.layout is not None
