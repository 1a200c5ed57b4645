# SPDX-License-Identifier: Apache-2.0
"""FP8 through TransformerEngine: the settings, and the fields of Megatron's configs that they set.

In FP8 the matrix products of TransformerEngine's linear layers run on 8-bit numbers; everything else stays in bf16, and
the optimizer in fp32. A *recipe* defines how numbers are scaled to 8 bits:

=============  ==========================================  ======================  ===================  =============
recipe         scale                                       compute capability      TransformerEngine    alignment
=============  ==========================================  ======================  ===================  =============
delayed        one per tensor, from earlier steps          8.9 or more             1.0                  16
tensorwise     one per tensor, from the tensor itself      8.9 or more             2.2                  16
blockwise      one per block of 128 or 128 x 128 elements  9.0 or more, CUDA 12.9  2.3                  128
mxfp8          one per block of 32 elements                10.0 to below 12.0      2.1                  32
nvfp4          one per block of 16, and one per tensor     10.0, CUDA 12.8         2.8                  32
=============  ==========================================  ======================  ===================  =============

:class:`FP8Settings` holds the arguments of :class:`~lightning_mcore.MCorePrecision`, checked against each other, and
the fields that they set in each of Megatron's three configs. ``strategy/fp8_checks.py`` rejects settings that the
machine or the shapes do not support.

Sources: ``TransformerConfig.__post_init__``, ``get_fp8_recipe`` and ``TEDelayedScaling`` of megatron-core (0.16.1 and
0.19.2).
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from lightning_mcore.config.layout import ModelShape, ParallelLayout
from lightning_mcore.config.value_checks import require_choice, require_flag, require_size

FP8Format: TypeAlias = Literal["e4m3", "hybrid"]
FP8Recipe: TypeAlias = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
FP4Recipe: TypeAlias = Literal["nvfp4"]
AmaxComputeAlgo: TypeAlias = Literal["most_recent", "max"]

# Both sides of a matrix must be multiples of this.
ALIGNMENT: dict[str, int] = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 32}

# The recipes that read each option; the others would ignore it.
_READ_BY: dict[str, tuple[str, ...]] = {
    "fp8_margin": ("delayed",),
    "fp8_amax_history_len": ("delayed",),
    "fp8_amax_compute_algo": ("delayed",),
    "fp8_wgrad": ("delayed",),
    "tp_only_amax_red": ("delayed",),
    "fp8_dot_product_attention": ("delayed", "tensorwise"),
    "fp8_multi_head_attention": ("delayed",),
    "first_last_layers_bf16": ("tensorwise", "blockwise", "mxfp8", "nvfp4"),
    "num_layers_at_start_in_bf16": tuple(ALIGNMENT),
    "num_layers_at_end_in_bf16": tuple(ALIGNMENT),
    "reuse_grad_buf_for_mxfp8_param_ag": ("mxfp8",),
}
# The fields that are whole numbers; the others without choices are flags.
_COUNTS = ("fp8_amax_history_len", "fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


@dataclass(frozen=True)
class FP8Settings:
    """The FP8 arguments of ``MCorePrecision``, which documents them, with Megatron's names and defaults."""

    fp8: FP8Format | None = None
    fp8_recipe: FP8Recipe | None = None
    fp8_param: bool = False
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: AmaxComputeAlgo = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    tp_only_amax_red: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    fp4_recipe: FP4Recipe | None = None

    def __post_init__(self) -> None:
        """Check the values, then the settings against each other."""
        self._check_values()
        # Without fp8, fp8_recipe and fp4_recipe, which turn FP8 or FP4 on
        changed = [field.name for field in fields(self)[2:-1] if getattr(self, field.name) != field.default]
        if self.fp4_recipe is not None and (self.fp8 is not None or self.fp8_recipe is not None):
            given = "fp8" if self.fp8_recipe is None else "fp8_recipe"
            raise ValueError(
                f"fp4_recipe={self.fp4_recipe!r} with {given}={getattr(self, given)!r} asks for two number formats;"
                " leave one of them out"
            )
        if not self.is_on:
            if changed:
                raise ValueError(
                    f"{changed[0]}={getattr(self, changed[0])!r} does nothing without FP8; "
                    f"set fp8_recipe to one of {get_args(FP8Recipe)}, or leave it out"
                )
            return
        for name in changed:
            readers = _READ_BY.get(name, get_args(FP8Recipe))
            if self.recipe not in readers:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not available with {asked_for(self.recipe)}; "
                    f"choose {' or '.join(map(repr, readers))}, or leave it out"
                )
        if not self.first_last_layers_bf16:
            for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
                if name in changed:
                    raise ValueError(f"{name} does nothing without first_last_layers_bf16=True; set both")
        if self.recipe == "mxfp8" and self.fp8_param != self.reuse_grad_buf_for_mxfp8_param_ag:
            raise ValueError(
                f"fp8_param={self.fp8_param} with fp8_recipe='mxfp8' contradicts reuse_grad_buf_for_mxfp8_param_ag="
                f"{self.reuse_grad_buf_for_mxfp8_param_ag}: MXFP8 weights are gathered in the buffer of the gradients;"
                " set both or neither"
            )

    def _check_values(self) -> None:
        choices = {"fp8": FP8Format, "fp8_recipe": FP8Recipe, "fp4_recipe": FP4Recipe}
        choices["fp8_amax_compute_algo"] = AmaxComputeAlgo
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in choices:
                require_choice(field.name, value, choices[field.name], or_none=field.default is None)
            elif field.name in _COUNTS:
                require_size(field.name, value, at_least=1 if field.name == "fp8_amax_history_len" else 0)
            else:
                require_flag(field.name, value)

    def check_optimizer(self, distributed: bool, overlap_param_gather: bool, cpu_offload: bool) -> None:
        """Raise ValueError for FP8 weights that the strategy's optimizer cannot keep.

        It must be sharded (``distributed``), and with offload to the host the recipe must be ``"delayed"``. MXFP8
        weights cannot be gathered during the forward pass. Source: ``validate_args`` in megatron/training/arguments.py
        (0.19).
        """
        if self.fp8_param and cpu_offload and self.recipe != "delayed":
            raise ValueError(
                f"fp8_param=True with fp8_recipe={self.recipe!r} is not available with"
                " optimizer_config.optimizer_cpu_offload=True; choose fp8_recipe='delayed', or leave one of them out"
            )
        if self.fp8_param and not distributed:
            raise ValueError(
                "fp8_param=True needs the distributed optimizer, which keeps the fp32 copies of FP8 weights; set"
                " MCoreStrategy(use_distributed_optimizer=True)"
            )
        if self.reuse_grad_buf_for_mxfp8_param_ag and overlap_param_gather:
            raise ValueError(
                "reuse_grad_buf_for_mxfp8_param_ag=True with overlap_param_gather=True is not available: the gradients"
                " are zeroed while the weights still wait in their buffer; set overlap_param_gather=False"
            )

    @property
    def is_on(self) -> bool:
        """Whether a format or a recipe is given."""
        return self.fp8 is not None or self.fp8_recipe is not None or self.fp4_recipe is not None

    @property
    def format(self) -> FP8Format:
        """The format, if FP8 is on."""
        return self.fp8 or "hybrid"

    @property
    def recipe(self) -> FP8Recipe | FP4Recipe:
        """The recipe, if FP8 or FP4 is on."""
        return self.fp4_recipe or self.fp8_recipe or "delayed"

    @property
    def alignment(self) -> int:
        """The number that must divide the sizes of matrices."""
        return ALIGNMENT[self.recipe]

    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig``; an empty dict without FP8."""
        if not self.is_on:
            return {}
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["reuse_grad_buf_for_mxfp8_param_ag"], own["fp4_recipe"]
        # FP4 has no margin, history or algorithm; the layers at the ends may stay in bf16.
        if self.fp4_recipe is not None:
            of_layers = {name: value for name, value in own.items() if name.endswith(("_in_bf16", "_layers_bf16"))}
            return {**of_layers, "fp4": "e2m1", "fp4_recipe": self.fp4_recipe}
        return {**own, "fp8": self.format, "fp8_recipe": self.recipe}

    def ddp_fields(self) -> dict[str, Any]:
        """Return the fields of ``DistributedDataParallelConfig``; an empty dict without FP8."""
        return self._with_buffer({"fp8_param_gather": self.fp8_param})

    def optimizer_fields(self) -> dict[str, Any]:
        """Return the fields of ``OptimizerConfig``; an empty dict without FP8."""
        return self._with_buffer({"fp8_recipe": self.recipe})

    def _with_buffer(self, fields: dict[str, Any]) -> dict[str, Any]:
        if not self.is_on or self.fp4_recipe is not None:
            return {}
        return {**fields, "reuse_grad_buf_for_mxfp8_param_ag": self.reuse_grad_buf_for_mxfp8_param_ag}


def asked_for(recipe: str) -> str:
    """Return the argument of ``MCorePrecision`` that asks for a recipe, as text for messages."""
    return f"fp4_recipe={recipe!r}" if recipe in get_args(FP4Recipe) else f"fp8_recipe={recipe!r}"


def check_model(settings: FP8Settings, shape: ModelShape, tensor_parallel_size: int, expert_tensor_size: int) -> None:
    """Raise ValueError for matrices whose sizes on each rank the recipe cannot divide into blocks.

    Unknown sizes are not checked. A ``ffn_hidden_size`` of 11008 on 8 tensor-parallel ranks is 1376 per rank: a
    multiple of 16 and 32, but not of 128, so ``"blockwise"`` raises.
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
                f"{asked_for(settings.recipe)} needs multiples of {settings.alignment}, and "
                f"{name}={size}{shared_by} is not one; make it a multiple of {ranks * settings.alignment}"
            )


def check_layers(settings: FP8Settings, num_layers: int, pipeline_model_parallel_size: int) -> None:
    """Raise ValueError for more bf16 layers at one end than a pipeline stage holds, as ``TransformerConfig`` does."""
    most = num_layers // pipeline_model_parallel_size
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        count = getattr(settings, name)
        if settings.first_last_layers_bf16 and count > most:
            raise ValueError(
                f"{name}={count} is more than the {most} layers of a pipeline stage; choose at most {most}"
            )


def check_microbatch(settings: FP8Settings, shape: tuple[int, int] | None, layout: ParallelLayout) -> None:
    """Raise ValueError for microbatches whose tokens on each rank the recipe cannot divide into blocks.

    ``shape`` is (sequence length, rows) before it is split over ranks. 4096 tokens and 2 rows on CP=2, TP=4 with
    sequence parallelism are 8192 / 8 = 1024 tokens per rank; all recipes accept that.
    """
    if not settings.is_on or shape is None:
        return
    ranks = layout.context_parallel_size * (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    seq_length, rows = shape
    if seq_length * rows % (ranks * settings.alignment):
        raise ValueError(
            f"{asked_for(settings.recipe)} needs a multiple of {settings.alignment} tokens in each microbatch on each"
            f" rank, and seq_length={seq_length} * {rows} rows / {ranks} ranks is not one; make the tokens of a"
            f" microbatch, with padding, a multiple of {ranks * settings.alignment}"
        )


def without_shape(settings: FP8Settings, error: str) -> str:
    """Return what to change after TransformerEngine's ``error`` about a microbatch whose shape was not known before."""
    return (
        f"{asked_for(settings.recipe)} needs a multiple of {settings.alignment} tokens in each microbatch on each rank;"
        f" pad the rows of each batch so that it has one ({error})"
    )


TRANSFORMER_FIELDS = tuple(
    f.name for f in fields(FP8Settings) if f.name not in ("reuse_grad_buf_for_mxfp8_param_ag", "fp4_recipe")
)
"""The fields of ``TransformerConfig`` for FP8, which the precision owns."""
