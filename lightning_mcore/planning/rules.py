# SPDX-License-Identifier: Apache-2.0
"""Find the faults of a run before it starts: all that our own rules find, not only the first.

Megatron's config stops at the first fault of a model. That fault is listed; the next one appears once it is corrected.

:class:`RuleBook` collects refusals. :class:`PlannedStrategy` holds the valid settings of ``MCoreStrategy`` and
``MCorePrecision``, and reports the faults of the others. The functions after it check an ``MCoreGPT`` by itself, on its
layout, and with its batch. The rules are those of the classes (``config/rules/``, ``optimizer/rules.py``, the parts
themselves). Megatron's own rules run when its ``TransformerConfig`` is built here, and Lightning's when a ``Trainer``
is built (``signatures.py``). The strategy is built too, with its valid arguments, because its part of Megatron's config
comes from it.

:func:`check_run` goes through a run in the order in which it would start: the arguments of Trainer, strategy and
precision, the model's, the layout on the devices, the model on the layout, the microbatches.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import nn

from lightning_mcore.arguments.build import make_strategy
from lightning_mcore.config.architecture import check_architecture, set_architecture
from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.field_homes import REQUIRED, check_owned_by_precision, ddp_fields_of, fusion_defaults
from lightning_mcore.config.fp8 import FP8Settings, check_layers, check_microbatch, check_model
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.positions import check_positions
from lightning_mcore.config.rules import strategy as strategy_rules
from lightning_mcore.config.rules.model import (
    check_average_in_collective,
    check_fields,
    check_normalization,
    check_without_transformer_engine,
)
from lightning_mcore.config.run import RunSettings, class_and_arguments
from lightning_mcore.config.text import counted, unknown_name
from lightning_mcore.config.value_checks import accepts, choices_of, require_size
from lightning_mcore.layers.multi_token import check_multi_token
from lightning_mcore.layers.spec import resolve_transformer_impl
from lightning_mcore.layers.transformer_config import build_transformer_config, field_faults
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.models.vision import check_parts
from lightning_mcore.optimizer.rules import (
    check_kind,
    megatron_fields,
    optimizer_config_faults,
    optimizer_device_faults,
    optimizer_option_faults,
)
from lightning_mcore.parallel.stage_layers import check_uniform_recompute
from lightning_mcore.planning.adapters import check_adapters, with_adapters
from lightning_mcore.planning.arguments import arguments_of_gpt
from lightning_mcore.planning.grid import GlobalBatch, global_batch
from lightning_mcore.planning.model import GPTFields, backend_of
from lightning_mcore.planning.preference import assumptions_of_preference, faults_of_pairs
from lightning_mcore.planning.signatures import (
    Arguments,
    fields_of,
    lightning_faults,
    may_never_end,
    of_config,
    of_model,
    of_precision,
    of_strategy,
    of_trainer,
)
from lightning_mcore.planning.vision import assumptions_of_vision, check_first_stage, with_images, with_tower
from lightning_mcore.strategy.overlap import TensorParallelOverlap
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.strategy import MCoreStrategy
from lightning_mcore.te_cpu.load import is_prepared

T = TypeVar("T")
_LAYOUT = tuple(field.name for field in dataclass_fields(ParallelLayout))
_FP8 = tuple(field.name for field in dataclass_fields(FP8Settings))
_SIZES = ("num_distributed_optimizer_instances", "bucket_size")
_MISSING = re.compile(r"\bTE\b")
"""Part of Megatron's message if TransformerEngine is missing or has another version than it needs."""

_ASK_TRANSFORMER_ENGINE = ("apply_rope_fusion", "fused_single_qkv_rope", "moe_permute_fusion", "use_te_activation_func")
"""Fields for which Megatron's config looks for TransformerEngine, except those of FP8."""


class RuleBook:
    """Collects the sentences of refusals."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def attempt(self, check: Callable[[], T]) -> T | None:
        """Run a check and keep its refusal.

        Returns the result of the check; None if it refused.
        """
        try:
            return check()
        except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
            self.refuse(str(error))
            return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Run a check, keep its refusal, and return whether it passed."""
        before = len(self.errors)
        self.attempt(check)
        return len(self.errors) == before

    def collect(self, sentences: Iterable[str]) -> bool:
        """Keep the sentences of rules, and return whether there were none."""
        before = len(self.errors)
        for sentence in sentences:
            self.refuse(sentence)
        return len(self.errors) == before

    def refuse(self, sentence: str) -> None:
        """Keep a sentence, once."""
        text = " ".join(sentence.split())
        if text not in self.errors:
            self.errors.append(text)

    def check_arguments(self, where: str, given: Mapping[str, Any], known: Arguments) -> dict[str, Any]:
        """Refuse unknown names and values that do not have their type.

        Returns the valid arguments.
        """
        fitting = {}
        for name, value in given.items():
            if name not in known:
                self.refuse(unknown_name(where, name, known))
            elif not accepts(known[name].hint, value) and value != known[name].default:
                self.refuse(f"{where} {name}={value!r} does not fit; choose {choices_of(known[name].hint)}")
            else:
                fitting[name] = value
        return fitting


class PlannedStrategy:
    """The settings of strategy and precision, checked against each other.

    Args:
        book: Collects refusals.
        strategy: Arguments of ``MCoreStrategy``.
        precision: Arguments of ``MCorePrecision``.
        device_type: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(
        self, book: RuleBook, strategy: Mapping[str, Any], precision: Mapping[str, Any], device_type: str
    ) -> None:
        self._book = book
        self._device_type = device_type
        self.strategy = book.check_arguments("argument of MCoreStrategy", strategy, of_strategy())
        self.precision = book.check_arguments("argument of MCorePrecision", precision, of_precision())
        self.layout = book.attempt(lambda: ParallelLayout(**_given(self.strategy, _LAYOUT)))
        self.fp8 = book.attempt(lambda: FP8Settings(**_given(self.precision, _FP8)))
        self.ddp = self._options("ddp_config", of_config("ddp_config"))
        self.optimizer = self._options("optimizer_config", of_config("optimizer_config"))
        communication = self._options("communication", of_config("communication"))
        self.communication = book.attempt(lambda: CommunicationOptions(**communication))

    @property
    def precision_name(self) -> str:
        """The number format, such as ``"bf16-mixed"``."""
        return str(self.precision.get("precision") or "32-true")

    @property
    def overlap_p2p_comm(self) -> bool:
        """Whether stages send while computing, with the default filled in."""
        given = self.strategy.get("overlap_p2p_comm")
        interleaved = self.layout is not None and self.layout.is_interleaved
        return interleaved if given is None else bool(given)

    def resolved(self, name: str) -> Any:
        """Return a setting of gradients: the argument, or else the field of ``ddp_config``, or else the default."""
        return strategy_rules.resolved(self.strategy, self.ddp).get(name, of_config("ddp_config")[name].default)

    @property
    def all_strategy(self) -> dict[str, Any]:
        """The arguments of ``MCoreStrategy``, with its configs as dicts of the fields that are not defaults."""
        return {**self.strategy, "ddp_config": self.ddp, "optimizer_config": self.optimizer}

    @property
    def distributed(self) -> bool:
        """Whether the optimizer is sharded."""
        return bool(self.resolved("use_distributed_optimizer"))

    def check(self, world_size: int) -> None:
        """Refuse settings that contradict each other, the devices or their number; the model is checked later."""
        book, device_type = self._book, self._device_type
        precision = book.attempt(lambda: MCorePrecision(**self.precision))
        if precision is not None and precision.fp8.is_on:
            settings = (self.distributed, bool(self.resolved("overlap_param_gather")))
            offloads = bool(self.optimizer.get("optimizer_cpu_offload"))
            if device_type != "cpu" or not is_prepared():  # TransformerEngine of te_cpu
                book.collect(strategy_rules.fp8_device_faults(precision.fp8.recipe, device_type))
            book.attempt(lambda: precision.fp8.check_optimizer(*settings, offloads))
        sizes = {f"ddp_config.{name}": self.ddp[name] for name in _SIZES if name in self.ddp}
        sizes |= _given(self.strategy, ("micro_batch_size", "microbatch_group_size_per_vp_stage"))
        before = len(book.errors)
        for name, size in sizes.items():
            book.attempt(lambda name=name, size=size: require_size(name, size))  # type: ignore[misc]
        sized = len(book.errors) == before
        book.collect(strategy_rules.gradient_faults(self.strategy, self.ddp))
        owned = precision.ddp_fields() if precision is not None else ddp_fields_of(self.precision_name)
        book.attempt(lambda: check_owned_by_precision(self.ddp, owned))
        book.collect(optimizer_config_faults(self.optimizer, self.distributed))
        book.collect(optimizer_device_faults(self.optimizer, device_type, bool(owned["grad_reduce_in_fp32"])))
        layout = self.layout
        if layout is None:
            return
        self._check_overlaps(layout)
        if book.passes(lambda: layout.validate_world(world_size)) and sized:
            book.collect(strategy_rules.world_faults(self.ddp, layout, world_size, device_type))
        book.collect(strategy_rules.expert_faults(layout, device_type))

    def megatron_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's config that strategy and precision own."""
        without_optimizer = {**self.strategy, "ddp_config": self.ddp or None, "optimizer_config": None}
        strategy = self._book.attempt(lambda: make_strategy(without_optimizer))
        if strategy is None:  # refused above
            strategy = MCoreStrategy(**(vars(self.layout) if self.layout is not None else {}))
        strategy.parallel_devices = [torch.device(self._device_type)]
        strategy.cluster_environment = LightningEnvironment()
        quiet = RuleBook()  # refused above
        strategy._precision_plugin = quiet.attempt(lambda: MCorePrecision(**self.precision))
        return strategy.megatron_fields()

    def _options(self, name: str, known: Arguments) -> dict[str, Any]:
        """Return the fields of a config that differ from their defaults."""
        given = self.strategy.get(name)
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self._book.refuse(f"{name}={given!r} is not a mapping; give its fields by name")
            return {}
        right = self._book.check_arguments(f"field of {name}", class_and_arguments(given)[1], known)
        return {key: value for key, value in right.items() if value != known[key].default}

    def _check_overlaps(self, layout: ParallelLayout) -> None:
        book, given, device_type = self._book, self.strategy, self._device_type
        group = given.get("microbatch_group_size_per_vp_stage")
        if book.collect(strategy_rules.schedule_faults(given, self.ddp, layout)) and group is not None:
            book.attempt(lambda: layout.validate_microbatches(group, group))
        options, instances = self.communication, self.ddp.get("num_distributed_optimizer_instances", 1)
        if options is not None:
            book.collect(options.layout_faults(layout, self.overlap_p2p_comm, instances))
            book.collect(options.device_faults(device_type))
        enabled, path = bool(given.get("tp_comm_overlap")), given.get("tp_comm_overlap_cfg")
        if book.collect(strategy_rules.tensor_overlap_faults(enabled, path, layout)):
            book.attempt(lambda: TensorParallelOverlap(enabled, path, layout))
        book.collect(strategy_rules.tensor_overlap_device_faults(enabled, device_type))


def _given(arguments: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def check_gpt(book: RuleBook, model: Mapping[str, Any]) -> GPTFields | None:
    """Refuse arguments of ``MCoreGPT`` that are wrong on every layout.

    Returns the sizes of the model; None if they are unknown.
    """
    owner, known = "MCoreVisionGPT" if "vision" in model else "MCoreGPT", of_model(sees="vision" in model)
    given = book.check_arguments(f"argument of {owner}", model, known)
    missing = [name for name, argument in known.items() if argument.default is ... and name not in model]
    if missing:
        book.refuse(f"{owner} lacks {' and '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}")
    for name in ("vocab_size", "seq_length", "make_vocab_size_divisible_by"):
        if name in given:
            book.attempt(lambda name=name: require_size(name, given[name]))  # type: ignore[misc]
    settings = settings_of_gpt(given)
    transformer = given.get("transformer")
    recipe = book.check_arguments("field of Recipe", given.get("recipe") or {}, fields_of(Recipe))
    book.attempt(lambda: Recipe.of(recipe).check_adapters(given.get("lora") is not None))
    if not isinstance(transformer, Mapping):
        return None
    wrong = dict(field_faults(transformer))
    book.collect(wrong.values())
    right = {name: value for name, value in transformer.items() if name not in wrong}
    for name in REQUIRED:
        if right.get(name) is not None:
            book.attempt(lambda name=name: require_size(name, right[name]))  # type: ignore[misc]
    book.attempt(lambda: check_positions(settings, transformer))
    arguments = {**given, "transformer": right}
    book.attempt(lambda: check_parts(arguments.get("freeze") or (), arguments.get("lora")))
    try:  # even for a model with wrong fields, to find later errors too
        fields = GPTFields.of(arguments)
        fields = with_tower(fields, arguments)
        return book.attempt(lambda: with_adapters(fields, arguments)) or fields
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        if not book.errors:
            book.refuse(f"the sizes of the model do not add up: {error}")
        return None


def settings_of_gpt(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, with defaults filled in."""
    return {name: argument.default for name, argument in of_model().items()} | dict(model)


def check_gpt_on_layout(book: RuleBook, fields: GPTFields, rules: PlannedStrategy) -> None:
    """Refuse a model whose sizes the layout or FP8 cannot divide."""
    layout, fp8 = rules.layout, rules.fp8
    if layout is None:
        return
    if book.passes(lambda: layout.validate_model(fields.shape)):
        book.attempt(lambda: check_first_stage(fields, layout))
    if fp8 is not None and fp8.is_on:
        sizes = (layout.tensor_model_parallel_size, layout.expert_tensor_size)
        book.attempt(lambda: check_model(fp8, fields.shape, *sizes))
        book.attempt(lambda: check_layers(fp8, fields.num_layers, layout.pipeline_model_parallel_size))


def check_in_megatron(
    book: RuleBook, fields: GPTFields, rules: PlannedStrategy, model: Mapping[str, Any], backend: str, device_type: str
) -> None:
    """Build Megatron's config and the optimizer, and collect the refusals of them and of our layers."""
    settings, used = settings_of_gpt(model), backend
    if device_type != "cuda":  # only a machine with GPUs knows whether it has TransformerEngine
        used = book.attempt(lambda: resolve_transformer_impl(backend, device_type)) or "local"  # type: ignore[arg-type]
    _check_optimizer(book, rules, settings)
    owned = rules.megatron_fields()
    if fields.attention is not None:
        owned |= {name: settings[name] for name in ("rotary_base", "rotary_percent")}
    config: Any = _config(book, fields, owned, backend, device_type)
    if config is None:
        return
    set_architecture(config, fields.architecture)
    book.attempt(lambda: check_architecture(config, used))
    book.attempt(lambda: check_fields(config, used, device_type))  # type: ignore[arg-type]
    book.attempt(lambda: check_uniform_recompute(config))
    book.attempt(lambda: check_adapters(fields, config, settings))
    tied, positions = settings["share_embeddings_and_output_weights"], settings["position_embedding_type"]
    book.attempt(lambda: check_multi_token(config, bool(tied), positions == "learned_absolute"))
    book.attempt(lambda: check_normalization(settings["loss_normalization"], config))
    book.attempt(lambda: check_average_in_collective(bool(rules.resolved("average_in_collective")), config))
    if device_type == "cpu" and not HAVE_TE:
        book.attempt(lambda: check_without_transformer_engine(config))


def _config(book: RuleBook, fields: GPTFields, owned: Mapping[str, Any], backend: str, device_type: str) -> Any:
    """Build Megatron's config; return None if Megatron refuses it.

    If only TransformerEngine is missing, which a machine with GPUs may have, the config is built without the fields
    that need it, and gets them afterwards, so that all other rules are checked.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run shows Megatron's warnings
        try:
            return build_transformer_config(fields.transformer, owned)
        except (ValueError, ImportError, TypeError, AttributeError) as error:
            is_missing = not isinstance(error, ValueError) or _MISSING.search(str(error))
            if HAVE_TE or device_type != "cuda" or backend == "local" or not is_missing:
                book.refuse(str(error))
                return None
        late = {
            name: value
            for name, value in {**fields.transformer, **owned}.items()
            if name.startswith("fp8") or name in _ASK_TRANSFORMER_ENGINE
        }
        early = [{name: given[name] for name in given.keys() - late.keys()} for given in (fields.transformer, owned)]
        config = book.attempt(lambda: build_transformer_config(*early))
    for name, value in late.items() if config is not None else ():
        setattr(config, name, value)
    return config


def _check_optimizer(book: RuleBook, rules: PlannedStrategy, settings: Mapping[str, Any]) -> None:
    """Create the optimizer for one parameter, and refuse it if it does not work with the strategy."""
    quiet = RuleBook()  # faults of the recipe are already collected
    recipe = quiet.attempt(lambda: Recipe.of(settings["recipe"] or {}))
    if recipe is None:
        return
    made = recipe.build_optimizer([("weight", nn.Parameter(torch.zeros(1, 1)))])
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
    book.collect(optimizer_option_faults(rules.optimizer, megatron_fields(made) or {}, type(made).__name__))


def check_batch(book: RuleBook, fields: GPTFields, rules: PlannedStrategy, batch: GlobalBatch) -> None:
    """Refuse microbatches that the schedule, the layout or FP8 cannot run."""
    layout, group = rules.layout, rules.strategy.get("microbatch_group_size_per_vp_stage")
    if layout is None:
        return
    book.attempt(lambda: layout.validate_microbatches(batch.num_microbatches, group))
    unit = layout.sequence_multiple
    if batch.seq_length % unit and fields.seq_length % unit == 0:
        book.refuse(
            f"data.seq_length={batch.seq_length} is not a multiple of {unit}, which the layout needs; choose"
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


OWN = "own"
"""The backend of a module whose layers are its own."""
_NOT_COUNTED = {"layernorm", "moe_act"}  # parts of recompute_modules that activation_memory.py does not know


@dataclass(frozen=True)
class CheckedRun:
    """A run after its checks."""

    errors: tuple[str, ...]  # a sentence for each refusal
    assumptions: tuple[str, ...]  # what is assumed because the settings do not give it, and the settings' notes
    rules: PlannedStrategy
    model: Mapping[str, Any]  # arguments of ``MCoreGPT``, with those of a Hugging Face config filled in
    fields: GPTFields | None  # None if unknown
    batch: GlobalBatch | None  # None if layout or sizes are wrong
    backend: str  # ``"local"``, ``"transformer_engine"`` or :data:`OWN`
    device_type: str  # ``"cuda"`` or ``"cpu"``
    is_computable: bool  # whether layout, devices and model fit each other

    @property
    def sizes(self) -> tuple[ParallelLayout, GPTFields, GlobalBatch]:
        """The layout, the model and the batch of a run that is computable."""
        assert self.rules.layout is not None
        assert self.fields is not None
        assert self.batch is not None
        return self.rules.layout, self.fields, self.batch


def check_run(settings: RunSettings, devices: int, backend: str | None = None, ask_others: bool = True) -> CheckedRun:
    """Check a run on so many ranks.

    ``backend`` None derives the layers from the model and the accelerator; :data:`OWN` is a model that no settings
    describe. ``ask_others`` also checks with Lightning's Trainer and Megatron's config, which takes some milliseconds.
    Raises ValueError if there are no devices.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} is too small; choose 1 or more")
    book, assumptions = RuleBook(), list(settings.notes)
    device_type = "cpu" if settings.trainer.get("accelerator") == "cpu" else "cuda"
    trainer = book.check_arguments("argument of Trainer", settings.trainer, of_trainer())
    book.collect(strategy_rules.trainer_faults(trainer))
    if ask_others:
        book.collect(lightning_faults(trainer))
    rules = PlannedStrategy(book, settings.strategy, settings.precision, device_type)
    rules.check(devices)
    model = (book.attempt(lambda: arguments_of_gpt(book, settings.model)) if backend != OWN else None) or {}
    used = backend or backend_of(model, device_type)
    fused = _fusions(model, used, device_type)
    built = {**model, "transformer": {**fused, **model["transformer"]}} if fused else model
    fields = check_gpt(book, built) if model else None
    if ask_others and fields is not None and may_never_end(trainer):
        _check_end(book, model)
    if fields is not None:
        check_gpt_on_layout(book, fields, rules)
        if ask_others:
            check_in_megatron(book, fields, rules, model, used, device_type)
    batch = _batch(book, settings, rules, fields, devices, assumptions)
    if batch is not None and fields is not None:
        check_batch(book, fields, rules, batch)
        text, length = fields, batch.seq_length
        fields = book.attempt(lambda: with_images(text, settings.image_tokens, length)) or fields
    is_computable = batch is not None and fields is not None and _fits(rules, fields)
    if model.get("transformer_impl", "auto") == "auto" and backend is None and used == "transformer_engine":
        assumptions.append(
            "layers of TransformerEngine, as transformer_impl='auto' chooses on GPUs (or use --backend local)"
        )
    if fields is not None and (unknown := sorted(fields.recompute.modules & _NOT_COUNTED)):
        assumptions.append(f"memory that recompute of {' and '.join(unknown)} saves is not counted")
    assumptions += _of_kernels(rules, fused)
    assumptions += [*assumptions_of_preference(model), *assumptions_of_vision(fields)]
    if fields is not None:
        book.collect(faults_of_pairs(settings, model, batch))
    return CheckedRun(
        tuple(book.errors), tuple(assumptions), rules, model, fields, batch, used, device_type, is_computable
    )


def _check_end(book: RuleBook, model: Mapping[str, Any]) -> None:
    """Refuse a learning-rate schedule that needs the number of steps if that is unknown."""
    try:
        recipe = Recipe.of(model.get("recipe") or {})
    except (TypeError, ValueError):
        return  # already refused
    book.attempt(lambda: recipe.check_end(None))


def _fusions(model: Mapping[str, Any], backend: str, device_type: str) -> dict[str, bool]:
    transformer = model.get("transformer")
    if backend != "transformer_engine" or device_type != "cuda" or not isinstance(transformer, Mapping):
        return {}
    settings = settings_of_gpt(model)
    positions, has_adapters = settings["position_embedding_type"], settings["lora"] is not None
    found = fusion_defaults(transformer, positions, has_adapters, settings["architecture"])
    return {**found, "apply_rope_fusion": False} if "vision" in model else found


def _of_kernels(rules: PlannedStrategy, fused: Mapping[str, bool]) -> Iterator[str]:
    if fused:
        yield f"fused, unless model.transformer sets these fields: {', '.join(n for n, on in fused.items() if on)}"
    if rules.fp8 is not None and rules.fp8.fp4_recipe is not None:
        yield "FP4 counts as bf16 in memory, and as FP8 in time"


def _batch(
    book: RuleBook,
    settings: RunSettings,
    rules: PlannedStrategy,
    fields: GPTFields | None,
    devices: int,
    assumptions: list[str],
) -> GlobalBatch | None:
    rows, length = settings.data.get("batch_size"), settings.data.get("seq_length")
    is_assumed = rows is None
    if rows is None:
        rows = rules.strategy.get("micro_batch_size") or 1
        assumptions.append(f"{counted(rows, 'row')} in a DataLoader batch (data.batch_size is not given)")
    if length is None and fields is not None:
        length = fields.seq_length
    layout = rules.layout
    if layout is None or length is None:
        return None
    try:
        layout.validate_world(devices)
    except ValueError:
        return None  # already refused
    batch = book.attempt(
        lambda: global_batch(rules.strategy, settings.trainer, rows, length, layout.data_parallel_size(devices))
    )
    return None if batch is None else replace(batch, is_assumed=is_assumed)


def _fits(rules: PlannedStrategy, fields: GPTFields) -> bool:
    try:
        if rules.layout is not None:
            rules.layout.validate_model(fields.shape)
    except ValueError:
        return False
    return rules.layout is not None
