# SPDX-License-Identifier: Apache-2.0
"""Find the faults of a run before it starts: all that our own rules find, not only the first.

Megatron's config stops at the first fault of a model. That fault is listed; the next one appears once it is corrected.

:class:`RuleBook` collects refusals. The rules are those of the classes (``config/rules/``, ``optimizer/rules.py``, the
parts themselves). Megatron's own rules run when its ``TransformerConfig`` is built here, and Lightning's when a
``Trainer`` is built (``signatures.py``). The strategy is built too, with its valid arguments, because its part of
Megatron's config comes from it.

:func:`check_run` asks in the order in which ``fit`` refuses: the arguments of Trainer, strategy and precision, the
model's, the model on the layout, the layout on the devices, the microbatches.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from lightning.pytorch import Trainer
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import transformer_config
from megatron.core.transformer.moe import moe_utils
from torch import nn

from lightning_mcore.arguments.build import make_strategy
from lightning_mcore.config.architecture import set_architecture
from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.distillation import check_layer_pairs, check_teacher
from lightning_mcore.config.field_homes import REQUIRED, check_owned_by_precision, ddp_fields_of, fusion_defaults
from lightning_mcore.config.fp8 import FP8Settings, check_layers, check_microbatch, check_model
from lightning_mcore.config.inherited_arguments import Arguments, arguments_of
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.loss_chunks import check_chunked_loss, checked_chunk_size
from lightning_mcore.config.positions import check_positions
from lightning_mcore.config.rules import model as model_rules
from lightning_mcore.config.rules import strategy as strategy_rules
from lightning_mcore.config.run import RunSettings, class_and_arguments
from lightning_mcore.config.text import counted, unknown_name
from lightning_mcore.config.value_checks import require_size
from lightning_mcore.layers.multi_token import check_multi_token
from lightning_mcore.layers.spec import backend_checks, resolve_transformer_impl
from lightning_mcore.layers.transformer_config import build_transformer_config, field_faults
from lightning_mcore.layers.whole_documents import check_hybrid
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.models.vision import check_parts
from lightning_mcore.optimizer import rules as optimizer_rules
from lightning_mcore.planning import signatures
from lightning_mcore.planning.arguments import (
    arguments_of_gpt,
    assumptions_of_loss,
    check_adapters,
    faults_of_pairs,
    with_adapters,
    with_teacher,
)
from lightning_mcore.planning.formats import Formats, optimizer_of
from lightning_mcore.planning.grid import GlobalBatch, global_batch
from lightning_mcore.planning.measured import SEQUENCES
from lightning_mcore.planning.model import GPTFields, backend_of, layer_counts
from lightning_mcore.planning.signatures import fields_of, of_model
from lightning_mcore.planning.sizes import OVERLAPS, Sizes
from lightning_mcore.planning.vision import assumptions_of_vision, check_first_stage, with_images, with_tower
from lightning_mcore.strategy.overlap import TensorParallelOverlap
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.strategy import MCoreStrategy
from lightning_mcore.te_cpu.load import is_prepared

T = TypeVar("T")
P = ParamSpec("P")
_FUSED_BY_ENGINE = (
    *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
    *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
)
_SIZES = fields_of(ParallelLayout)
_CONFIGS: dict[str, Any] = {
    "ddp_config": DistributedDataParallelConfig,
    "optimizer_config": OptimizerConfig,
    "communication": CommunicationOptions,
}


class RuleBook:
    """Collects the sentences of refusals."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def attempt(self, check: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | None:
        """Run a check, keep its refusal, and return its result; None if it refused."""
        try:
            return check(*given, **named)
        except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
            self.collect([str(error)])
            return None

    def passes(self, check: Callable[P, object], *given: P.args, **named: P.kwargs) -> bool:
        """Run a check, keep its refusal, and return whether it passed."""
        return self.attempt(lambda: [check(*given, **named)]) is not None

    def collect(self, sentences: Iterable[str]) -> bool:
        """Keep each sentence once, and return whether there were none."""
        found = [" ".join(sentence.split()) for sentence in sentences]
        self.errors = list(dict.fromkeys([*self.errors, *found]))
        return not found

    def known_arguments(self, where: str, given: Mapping[str, Any], known: Arguments) -> dict[str, Any]:
        """Refuse unknown names, and return the other arguments."""
        self.collect([unknown_name(where, name, known) for name in given if name not in known])
        return {name: value for name, value in given.items() if name in known}


class PlannedStrategy:
    """The settings of strategy and precision that are valid; ``book`` gets the refusals of the others."""

    def __init__(
        self, book: RuleBook, strategy: Mapping[str, Any], precision: Mapping[str, Any], device_type: str
    ) -> None:
        self._book = book
        self._device_type = device_type  # "cuda" or "cpu"
        self.strategy = book.known_arguments("argument of MCoreStrategy", strategy, arguments_of(MCoreStrategy))
        self.precision = book.known_arguments("argument of MCorePrecision", precision, arguments_of(MCorePrecision))
        given = {name: value for name, value in self.strategy.items() if value is not None}
        self.layout = book.attempt(ParallelLayout, **{name: given[name] for name in given if name in _SIZES})
        self.plugin = book.attempt(MCorePrecision, **self.precision)
        self.ddp, self.optimizer = self._options("ddp_config"), self._options("optimizer_config")
        self.communication = book.attempt(CommunicationOptions, **self._options("communication"))

    def _options(self, name: str) -> dict[str, Any]:
        """Return the fields of a config that differ from their defaults."""
        given, known = self.strategy.get(name), fields_of(_CONFIGS[name])
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self._book.collect([f"{name}={given!r} is not a mapping; give its fields by name"])
            return {}
        right = self._book.known_arguments(f"field of {name}", class_and_arguments(given)[1], known)
        return {key: value for key, value in right.items() if value != known[key]}

    @property
    def precision_name(self) -> str:
        """The number format, such as ``"bf16-mixed"``."""
        return str(self.precision.get("precision") or "32-true")

    @property
    def fp8(self) -> FP8Settings | None:
        """How linear layers compute in FP8 or FP4; None if they do not."""
        return self.plugin.fp8 if self.plugin is not None and self.plugin.fp8.is_on else None

    @property
    def has_fp8(self) -> bool:
        """Whether the device computes in FP8, with ``te_cpu`` also a CPU."""
        return self._device_type == "cuda" or is_prepared()

    @property
    def group_size(self) -> int | None:
        """Microbatches that an interleaved schedule runs through a chunk at once; None for the default."""
        return self.strategy.get("microbatch_group_size_per_vp_stage")

    def resolved(self, name: str) -> bool:
        """Return whether a setting is on: the argument, or else the field of ``ddp_config``, or else the default."""
        given = strategy_rules.resolved(self.strategy, self.ddp).get(name, self.strategy.get(name))
        if given is None and name == "overlap_p2p_comm":
            return self.layout is not None and self.layout.is_interleaved
        return bool(given)

    @property
    def all_strategy(self) -> dict[str, Any]:
        """The arguments of ``MCoreStrategy``, with its configs as dicts of the fields that are not defaults."""
        return {**self.strategy, "ddp_config": self.ddp, "optimizer_config": self.optimizer}

    @property
    def distributed(self) -> bool:
        """Whether the optimizer is sharded."""
        return self.resolved("use_distributed_optimizer")

    def check(self, world_size: int) -> None:
        """Refuse settings that contradict each other, or the devices; model and number of ranks are checked later."""
        book, device_type, fp8 = self._book, self._device_type, self.fp8
        if fp8 is not None:
            settings = (self.distributed, self.resolved("overlap_param_gather"))
            if not self.has_fp8:
                book.collect(strategy_rules.fp8_device_faults(fp8.recipe, device_type))
            book.attempt(fp8.check_optimizer, *settings, bool(self.optimizer.get("optimizer_cpu_offload")))
        names = ("micro_batch_size", "microbatch_group_size_per_vp_stage")
        of_ddp = ("num_distributed_optimizer_instances", "bucket_size")
        sizes = {f"ddp_config.{name}": self.ddp[name] for name in of_ddp if name in self.ddp}
        sizes |= {name: self.strategy[name] for name in names if self.strategy.get(name) is not None}
        sized = [book.passes(require_size, name, size) for name, size in sizes.items()]
        book.attempt(checked_chunk_size, self.strategy.get("loss_chunk_size", "auto"))
        book.collect(strategy_rules.gradient_faults(self.strategy, self.ddp))
        owned = self.plugin.ddp_fields() if self.plugin is not None else ddp_fields_of(self.precision_name)
        book.attempt(check_owned_by_precision, self.ddp, owned)
        book.collect(optimizer_rules.optimizer_config_faults(self.optimizer, self.distributed))
        sharding = self.strategy.get("data_parallel_sharding")
        book.collect(strategy_rules.sharding_faults(sharding, self.precision_name, fp8 is not None, self.optimizer))
        in_fp32 = bool(owned["grad_reduce_in_fp32"])
        book.collect(optimizer_rules.optimizer_device_faults(self.optimizer, device_type, in_fp32))
        if self.layout is not None:
            self._check_overlaps(self.layout)
            if all(sized) and RuleBook().passes(self.layout.validate_world, world_size):
                book.collect(strategy_rules.world_faults(self.ddp, self.layout, world_size, device_type))
                book.collect(strategy_rules.sharding_faults_on(sharding, self.layout, world_size))
            book.collect(strategy_rules.expert_faults(self.layout, device_type))

    def _check_overlaps(self, layout: ParallelLayout) -> None:
        book, given, device_type, group = self._book, self.strategy, self._device_type, self.group_size
        if book.collect(strategy_rules.schedule_faults(given, self.ddp, layout)) and group is not None:
            book.attempt(layout.validate_microbatches, group, group)
        if self.communication is not None:
            instances = self.ddp.get("num_distributed_optimizer_instances", 1)
            book.collect(self.communication.layout_faults(layout, self.resolved("overlap_p2p_comm"), instances))
            book.collect(self.communication.device_faults(device_type))
        enabled, path = bool(given.get("tp_comm_overlap")), given.get("tp_comm_overlap_cfg")
        if book.collect(strategy_rules.tensor_overlap_faults(enabled, path, layout)):
            book.attempt(TensorParallelOverlap, enabled, path, layout)
        book.collect(strategy_rules.tensor_overlap_device_faults(enabled, device_type))

    def megatron_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's config that strategy and precision own."""
        without_optimizer = {**self.strategy, "ddp_config": self.ddp or None, "optimizer_config": None}
        sizes = vars(self.layout) if self.layout is not None else {}
        strategy = self._book.attempt(make_strategy, without_optimizer) or MCoreStrategy(**sizes)
        strategy.parallel_devices = [torch.device(self._device_type)]
        strategy._precision_plugin = self.plugin
        return strategy.megatron_fields()


def check_gpt(book: RuleBook, model: Mapping[str, Any]) -> GPTFields | None:
    """Refuse arguments of ``MCoreGPT`` that are wrong on every layout.

    Returns the sizes of the model; None if they are unknown.
    """
    owner, known = "MCoreVisionGPT" if "vision" in model else "MCoreGPT", of_model(sees="vision" in model)
    given = book.known_arguments(f"argument of {owner}", model, known)
    missing = [name for name, default in known.items() if default is ... and name not in model]
    if missing:
        book.collect([f"{owner} lacks {' and '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}"])
    for name in ("vocab_size", "seq_length", "make_vocab_size_divisible_by"):
        if name in given:
            book.attempt(require_size, name, given[name])
    uses_mup = bool((given.get("transformer") or {}).get("use_mup"))
    book.attempt(lambda: Recipe.of(given.get("recipe") or {}).check_model(given.get("lora") is not None, uses_mup))
    transformer = given.get("transformer")
    if not isinstance(transformer, Mapping):
        return None
    wrong = dict(field_faults(transformer))
    book.collect(wrong.values())
    right = {name: value for name, value in transformer.items() if name not in wrong}
    for name in REQUIRED:
        if right.get(name) is not None:
            book.attempt(require_size, name, right[name])
    book.attempt(check_positions, settings_of_gpt(given), transformer)
    book.attempt(check_parts, given.get("freeze") or (), given.get("lora"))
    if missing or any(right.get(name) is None for name in REQUIRED):
        return None
    arguments = {**given, "transformer": right}
    try:  # even for a model with wrong fields, to find later errors too
        fields = with_tower(GPTFields.of(arguments), arguments)
        fields = book.attempt(with_teacher, fields, arguments) or fields
        return book.attempt(with_adapters, fields, arguments) or fields
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        if not book.errors:
            book.collect([f"the sizes of the model do not add up: {error}"])
        return None


def settings_of_gpt(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, with defaults filled in."""
    return {**of_model(), **model}


def check_gpt_on_layout(book: RuleBook, fields: GPTFields, rules: PlannedStrategy) -> bool:
    """Refuse a model that layout or FP8 cannot divide, and return whether the layout can."""
    layout, fp8 = rules.layout, rules.fp8
    if layout is None:
        return False
    fits = book.passes(layout.validate_model, fields.shape)
    if fits:
        book.attempt(check_first_stage, fields, layout)
    if fits and fields.teacher is not None:
        fits = book.passes(check_teacher, fields.teacher_path, fields.teacher.shape, layout)
        if fits:
            book.attempt(check_first_stage, fields.teacher, layout, fields.teacher_path)
        if fits and fields.layer_pairs:
            own, taught = (layer_counts(model, layout) for model in (fields, fields.teacher))
            recomputes = fields.recompute_granularity == "full"
            book.attempt(check_layer_pairs, fields.layer_pairs, own, taught, recomputes)
    if fp8 is not None:
        book.attempt(check_model, fp8, fields.shape, layout.tensor_model_parallel_size, layout.expert_tensor_size)
        book.attempt(check_layers, fp8, fields.num_layers, layout.pipeline_model_parallel_size)
    return fits


def check_in_megatron(
    book: RuleBook, fields: GPTFields, rules: PlannedStrategy, model: Mapping[str, Any], backend: str, device_type: str
) -> None:
    """Build Megatron's config and the optimizer, and collect the refusals of them and of our layers."""
    settings, used = settings_of_gpt(model), backend
    if device_type != "cuda":  # only a machine with GPUs knows whether it has TransformerEngine
        used = book.attempt(resolve_transformer_impl, backend, device_type) or "local"  # type: ignore[arg-type]
    owned = rules.megatron_fields()
    if fields.transformer.get("multi_latent_attention"):
        owned |= {name: settings[name] for name in ("rotary_base", "rotary_percent")}
    with warnings.catch_warnings(), _with_transformer_engine():
        warnings.simplefilter("ignore")  # the run shows Megatron's warnings
        config: Any = book.attempt(build_transformer_config, fields.transformer, owned)
    if config is None:
        return
    set_architecture(config, fields.architecture)
    if rules.fp8 is None or rules.has_fp8:  # else that has been said
        for check in backend_checks(config, used, device_type):  # type: ignore[arg-type]
            book.attempt(check)
    book.attempt(check_adapters, fields, config, settings, used)
    tied, positions = settings["share_embeddings_and_output_weights"], settings["position_embedding_type"]
    chunk_size = rules.strategy.get("loss_chunk_size", "auto")
    book.attempt(check_chunked_loss, chunk_size, config.defer_embedding_wgrad_compute)
    book.attempt(check_multi_token, config, bool(tied), positions == "learned_absolute")
    if rules.layout is not None and rules.layout.hybrid_context_parallel:
        book.attempt(check_hybrid, config, "MCoreVisionGPT" if "vision" in model else None)
    book.attempt(model_rules.check_normalization, settings["loss_normalization"], config)
    book.attempt(model_rules.check_average_in_collective, rules.resolved("average_in_collective"), config)
    if device_type == "cpu" and not HAVE_TE:
        book.attempt(model_rules.check_without_transformer_engine, config)


@contextlib.contextmanager
def _with_transformer_engine() -> Iterator[None]:
    """Let Megatron's config find TransformerEngine inside the ``with`` block: only the machine of the run knows."""
    with contextlib.ExitStack() as stack:
        if not HAVE_TE:
            stack.enter_context(mock.patch.object(transformer_config, "is_te_min_version", return_value=True))
            stack.enter_context(mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb", True))
            named: dict[str, Any] = {"create": True, **dict.fromkeys(_FUSED_BY_ENGINE, True)}
            stack.enter_context(mock.patch.multiple(moe_utils, **named))
        yield


def _check_optimizer(book: RuleBook, rules: PlannedStrategy, recipe: Recipe) -> None:
    """Create the optimizer for one parameter, and refuse it if it does not work with the strategy."""
    made, layout = recipe.build_optimizer([("weight", nn.Parameter(torch.zeros(1, 1)))]), rules.layout
    book.attempt(
        optimizer_rules.check_kind,
        made,
        inline=False,
        distributed=rules.distributed,
        layer_wise=rules.resolved("use_layer_wise_distributed_optimizer"),
        tensor_parallel_size=layout.tensor_model_parallel_size if layout is not None else 1,
        expert_model_parallel_size=layout.expert_model_parallel_size if layout is not None else 1,
    )
    of_kind = optimizer_rules.megatron_fields(made) or {}
    book.collect(optimizer_rules.optimizer_option_faults(rules.optimizer, of_kind, type(made).__name__))


def check_batch(book: RuleBook, fields: GPTFields, rules: PlannedStrategy, batch: GlobalBatch) -> None:
    """Refuse microbatches that the schedule, the layout or FP8 cannot run."""
    layout, fp8, length = rules.layout, rules.fp8, batch.seq_length
    if layout is None:
        return
    book.attempt(layout.validate_microbatches, batch.num_microbatches, rules.group_size)
    unit = layout.sequence_multiple
    if length % unit and fields.seq_length % unit == 0:
        needed = f"data.seq_length={length} is not a multiple of {unit}, which the layout needs"
        book.collect([f"{needed}; choose {-(-length // unit) * unit}"])
    if length > fields.seq_length and fields.learned_positions:
        learned = f"the {fields.learned_positions} learned positions of the model"
        book.collect([f"data.seq_length={length} is more than {learned}; make them equal"])
    if fp8 is not None:
        book.attempt(check_microbatch, fp8, (length, batch.micro_batch_size), layout)


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
    devices: int  # ranks of the run
    is_packed: bool  # whether rows hold several sequences each
    is_computable: bool  # whether layout, devices and model fit each other

    @property
    def layout(self) -> ParallelLayout | None:
        """The parallel sizes; None if they are wrong."""
        return self.rules.layout

    @property
    def sizes(self) -> Sizes:
        """The sizes of a run that is computable.

        Raises ValueError if precision, optimizer or backend are unknown.
        """
        rules = self.rules
        assert rules.layout is not None
        assert self.fields is not None
        assert self.batch is not None
        layers = self.backend, self.is_packed, self.device_type == "cuda"
        formats = Formats.of(rules.precision, rules.all_strategy, optimizer_of(self.model), *layers)
        of_loss = rules.strategy.get("loss_chunk_size", "auto")
        overlaps = frozenset(name for name in OVERLAPS if rules.resolved(name))
        return Sizes(self.fields, rules.layout, self.devices, self.batch, formats, of_loss, rules.group_size, overlaps)


def check_run(settings: RunSettings, devices: int, backend: str | None = None) -> CheckedRun:
    """Check a run on so many ranks.

    ``backend`` None derives the layers from the model and the accelerator; :data:`OWN` is a model that no settings
    describe. Raises ValueError if there are no devices.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} is too small; choose 1 or more")
    book, fits = RuleBook(), False
    device_type = "cpu" if settings.trainer.get("accelerator") == "cpu" else "cuda"
    trainer = book.known_arguments("argument of Trainer", settings.trainer, arguments_of(Trainer))
    book.collect(strategy_rules.trainer_faults(trainer))
    book.collect(signatures.lightning_faults(trainer))
    rules = PlannedStrategy(book, settings.strategy, settings.precision, device_type)
    rules.check(devices)
    model = (book.attempt(arguments_of_gpt, book, settings.model) if backend != OWN else None) or {}
    used = backend or backend_of(model, device_type)
    fused = book.attempt(_fusions, model, used, device_type) or {}
    built = {**model, "transformer": {**fused, **model["transformer"]}} if fused else model
    fields = check_gpt(book, built) if model else None
    if fields is not None:
        recipe = RuleBook().attempt(Recipe.of, model.get("recipe") or {})  # refused by check_gpt if it is wrong
        if recipe is not None and signatures.may_never_end(trainer):
            book.attempt(recipe.check_end, None)
        fits = check_gpt_on_layout(book, fields, rules)
        if recipe is not None:
            _check_optimizer(book, rules, recipe)
        check_in_megatron(book, fields, rules, model, used, device_type)
    # Last, because a reader can change the layout to fit the model, and then the number of ranks may fit too.
    divides = rules.layout is not None and book.passes(rules.layout.validate_world, devices)
    batch = _batch(book, settings, rules, fields, devices) if divides else None
    if batch is not None and fields is not None:
        check_batch(book, fields, rules, batch)
        fields = book.attempt(with_images, fields, settings.image_tokens, batch.seq_length) or fields
    if fields is not None:
        book.collect(faults_of_pairs(settings, model, batch))
    if _is_hybrid(settings, rules):
        sizes = {name: settings.data.get(name) or 1 for name in ("batch_size", "eval_batch_size")}
        book.collect(strategy_rules.packed_row_faults(rules.strategy.get("micro_batch_size"), sizes))
    is_chosen = model.get("transformer_impl", "auto") == "auto" and backend is None and used == "transformer_engine"
    assumptions = (*settings.notes, *_assumptions(settings, rules, model, fields, is_chosen, fused))
    found = (tuple(book.errors), assumptions, rules, model, fields, batch, used, device_type, devices)
    return CheckedRun(*found, bool(settings.data.get("packing")), fits and batch is not None)


def _fusions(model: Mapping[str, Any], backend: str, device_type: str) -> dict[str, bool]:
    transformer = model.get("transformer")
    if backend != "transformer_engine" or device_type != "cuda" or not isinstance(transformer, Mapping):
        return {}
    settings = settings_of_gpt(model)
    positions, has_adapters = settings["position_embedding_type"], settings["lora"] is not None
    found = fusion_defaults(transformer, positions, has_adapters, settings["architecture"])
    return {**found, "apply_rope_fusion": False} if "vision" in model else found


def _assumptions(
    settings: RunSettings,
    rules: PlannedStrategy,
    model: Mapping[str, Any],
    fields: GPTFields | None,
    is_chosen: bool,
    fused: Mapping[str, bool],
) -> Iterator[str]:
    """Yield what is assumed, or is not counted; ``is_chosen`` is whether layers of TransformerEngine are a default."""
    if settings.data.get("batch_size") is None:
        yield f"{counted(_rows(settings, rules), 'row')} in a DataLoader batch (data.batch_size is not given)"
    length = settings.data.get("seq_length")
    if fields is not None and length is not None and length > fields.seq_length:
        yield f"rows of data.seq_length={length} tokens, although model.seq_length={fields.seq_length} is shorter"
    if is_chosen:
        yield "layers of TransformerEngine, as transformer_impl='auto' chooses on GPUs (or use --backend local)"
    if fields is not None and (unknown := sorted(fields.recomputed & _NOT_COUNTED)):
        yield f"memory that recompute of {' and '.join(unknown)} saves is not counted"
    if fused:
        yield f"fused, unless model.transformer sets these fields: {', '.join(n for n, on in fused.items() if on)}"
    if rules.fp8 is not None and rules.fp8.fp4_recipe is not None:
        yield "FP4 counts as bf16 in memory, and as FP8 in time"
    own = fields.architecture if fields is not None else None
    if own is not None and settings.data.get("packing") and any((own.delta_net, own.kimi_delta, own.mamba)):
        yield f"{SEQUENCES} sequences of equal length in each packed row"
    if _is_hybrid(settings, rules):
        yield "all packed rows are split over all context-parallel ranks; rows of shorter documents take less than that"
    yield from assumptions_of_loss(model)
    yield from assumptions_of_vision(fields)


def _is_hybrid(settings: RunSettings, rules: PlannedStrategy) -> bool:
    """Return whether some packed rows may be split and others not."""
    is_hybrid = rules.layout is not None and rules.layout.hybrid_context_parallel
    return is_hybrid and bool(settings.data.get("packing"))


def _rows(settings: RunSettings, rules: PlannedStrategy) -> Any:
    given = settings.data.get("batch_size")
    return rules.strategy.get("micro_batch_size") or 1 if given is None else given


def _batch(
    book: RuleBook, settings: RunSettings, rules: PlannedStrategy, fields: GPTFields | None, devices: int
) -> GlobalBatch | None:
    length, layout = settings.data.get("seq_length"), rules.layout
    length = fields.seq_length if length is None and fields is not None else length
    if layout is None or length is None:
        return None
    dp = layout.data_parallel_size(devices)
    batch = book.attempt(global_batch, rules.strategy, settings.trainer, _rows(settings, rules), length, dp)
    return None if batch is None else replace(batch, is_assumed=settings.data.get("batch_size") is None)
