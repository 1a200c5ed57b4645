# SPDX-License-Identifier: Apache-2.0
"""``DistributingParallelArguments``: how a model is split, recomputed and quantised, with mcore_adapter's names.

None keeps the checkpoint's value, or Megatron's default if the checkpoint has none; only ``calculate_per_token_loss``
has a default of ours. The help texts say where mcore_adapter's default differs and would overwrite the checkpoint or
contradict Megatron. ``megatron_rules.py`` has the rules between fields; ``mapping.py`` says where each field goes.

``additional_configs`` sets fields of Megatron's ``TransformerConfig`` that have no argument. A name that is also an
argument sets that argument if it is None; two different values raise. ``mapping.py`` passes fields of the strategy or
the precision plugin to them. An unknown name raises and suggests the nearest known one, as does a field that other code
fills in (:data:`_ELSEWHERE`).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from lightning_mcore.arguments.fields import check_types, flag, option
from lightning_mcore.arguments.megatron_rules import check_distribution, interleaving_of
from lightning_mcore.arguments.parse import parse_arguments
from lightning_mcore.config.text import json_object, split_names, unknown_name

_KEEPS = "Default: the checkpoint's (mcore_adapter overwrites it with False)."


@dataclasses.dataclass
class DistributingParallelArguments:
    """How a model is split, recomputed and quantised; each field's help text explains it.

    Raises:
        FileNotFoundError: ``additional_configs`` names a file that does not exist.
        TypeError: A value has another type.
        ValueError: A value is not available, contradicts another one, or needs one that is not set.
    """

    tensor_model_parallel_size: int | None = option(
        "Number of ranks across which each weight matrix is split. Default: 1."
    )
    pipeline_model_parallel_size: int | None = option(
        "Number of pipeline stages across which the layers are split. Default: 1."
    )
    sequence_parallel: bool = flag(
        "Split the activations between tensor-parallel regions over the same ranks. Needs tensor parallelism, and is "
        "needed by tensor and expert parallelism together.",
        default=False,
    )
    virtual_pipeline_model_parallel_size: int | None = option(
        "Chunks of layers on each stage (interleaved schedule). Default: one, or what pipeline_model_parallel_layout"
        " says."
    )
    context_parallel_size: int | None = option("Number of ranks across which each sequence is split. Default: 1.")
    expert_model_parallel_size: int | None = option(
        "Number of ranks across which the experts are distributed. Default: 1."
    )
    expert_tensor_parallel_size: int | None = option(
        "Number of ranks across which each expert's matrices are split. Default: tensor_model_parallel_size."
    )
    account_for_embedding_in_pipeline_split: bool | None = flag("Count the embedding as a layer of the pipeline.")
    account_for_loss_in_pipeline_split: bool | None = flag("Count the loss as a layer of the pipeline.")
    pipeline_model_parallel_layout: str | None = option(
        "Which layers each stage holds, as Megatron writes it, such as 'E,t*3|t*4,L'; it fixes the virtual pipeline."
    )
    overlap_p2p_comm: bool | None = flag(
        "Send between stages while computing; only with the interleaved schedule. Default: on with it, off without"
        " (mcore_adapter: True, and turned off without it)."
    )
    variable_seq_lengths: bool = flag(
        "Pad the rows of each batch only to the longest of the batch; stages then exchange shapes. Without it, and "
        "with a pipeline, all rows have the full length. Not with the allgather dispatcher of experts.",
        default=False,
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        "Recompute activations in backward: whole layers ('full') or parts of them ('selective'). 'full' without"
        " recompute_method and recompute_num_layers means 'uniform' and 1."
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        "With 'full': groups of layers over all of them ('uniform'), or the first of each stage ('block');"
        " mcore_adapter offers 'recompute', which Megatron rejects."
    )
    # HfArgumentParser looks only at the first two of these types, so None must come second.
    recompute_modules: str | None | list[str] = option(  # noqa: RUF036
        "With 'selective': parts, separated by commas or as a list, of core_attn, moe_act, layernorm, mla_up_proj,"
        " mlp, moe, shared_experts. Default: core_attn."
    )
    recompute_num_layers: int | None = option("With 'full': layers of a group ('uniform'), or of a stage ('block').")
    bias_activation_fusion: bool | None = flag(f"Fuse bias and activation. {_KEEPS}")
    apply_rope_fusion: bool | None = flag(f"Fuse rotary positions; needs TransformerEngine. {_KEEPS}")
    cross_entropy_loss_fusion: bool | None = flag(f"Fuse the cross entropy, at any tensor-parallel size. {_KEEPS}")
    moe_layer_recompute: bool | None = flag(
        "Recompute the layers of experts in backward: adds 'moe' to recompute_modules, as Megatron does. Not with"
        f" recompute_granularity='full'. {_KEEPS}"
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] | None = option(
        "How tokens travel to experts; 'flex' (DeepEP) is not available. Default: the checkpoint's, or else"
        " alltoall (mcore_adapter overwrites it with allgather and does not offer flex)."
    )
    moe_aux_loss_coeff: float | None = option("Weight of the loss that balances experts.")
    moe_grouped_gemm: bool | None = flag("Use one kernel for all experts of a rank; needs TransformerEngine.")
    moe_expert_capacity_factor: float | None = option("Tokens that an expert takes, as a multiple of an even share.")
    moe_pad_expert_input_to_capacity: bool | None = flag(
        "Pad each expert's tokens to its capacity; needs moe_expert_capacity_factor."
    )
    moe_token_drop_policy: Literal["probs", "position"] | None = option("Which tokens beyond the capacity are dropped.")
    moe_shared_expert_overlap: bool | None = flag(
        f"Compute the shared expert while tokens travel; needs the alltoall dispatcher. {_KEEPS}"
    )
    moe_enable_routing_replay: bool | None = flag(
        "Record and replay the choices of routers, for reinforcement learning. Not available yet."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = option("Number format of the router.")
    mtp_num_layers: int | None = option(
        "Layers of multi-token prediction; 0 for none. Default: the checkpoint's (mcore_adapter: 0, which drops them)."
    )
    calculate_per_token_loss: bool | None = flag(
        "Give each token the same weight over all microbatches and ranks, as transformers' Trainer does, instead of "
        "each microbatch. Default: yes (mcore_adapter: False, and its gradients are then wrong under context "
        "parallelism)."
    )
    transformer_impl: Literal["local", "transformer_engine"] | None = option(
        "The layers to use: plain PyTorch or TransformerEngine. Default: TransformerEngine where it is installed and "
        "the device is a GPU."
    )
    cuda_graph_impl: Literal["local", "transformer_engine"] | None = option("Capture CUDA graphs. Not available yet.")
    cuda_graph_scope: str = option("What CUDA graphs capture. Not available yet.", default="full")
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = option(
        "How tensors are scaled to FP8; turns FP8 on (in mcore_adapter it does nothing alone). Needs bf16."
    )
    fp8_param: bool = flag("Keep the weights in FP8, and gather them in FP8; needs FP8.", default=False)
    fp8: Literal["e4m3", "hybrid"] | None = option("Format of FP8. Default: hybrid if there is an fp8_recipe.")
    additional_configs: dict[str, Any] | str | None = dataclasses.field(
        default_factory=dict,
        metadata={"help": "More fields of Megatron's TransformerConfig: a JSON object, or the path of such a file."},
    )

    def __post_init__(self) -> None:
        """Check every value, then the fields against each other."""
        self._check_types()
        extra = load_additional_configs(self.additional_configs)
        rest = fill_from_additional(self, extra)
        # Some of additional_configs have become fields of this object.
        if len(rest) < len(extra):
            self._check_types()
        self.additional_configs = extra
        if self.recompute_modules is not None:
            self.recompute_modules = split_names(self.recompute_modules)
        check_distribution(self, rest)
        # Last, because it needs a layout without faults.
        self.virtual_pipeline_model_parallel_size = interleaving_of(self)

    def _check_types(self) -> None:
        check_types(self)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields of ``additional_configs`` that are not fields of this class."""
        assert isinstance(self.additional_configs, dict)
        own = {field.name for field in dataclasses.fields(self)}
        return {name: value for name, value in self.additional_configs.items() if name not in own}

    def get_config_dict(self) -> dict[str, Any]:
        """Return the fields that are not None, ``additional_configs`` included."""
        own = {field.name for field in dataclasses.fields(DistributingParallelArguments)} - {"additional_configs"}
        given = {name: getattr(self, name) for name in sorted(own)}
        return {**self.extra_fields, **{name: value for name, value in given.items() if value is not None}}

    def allow_variable_seq_lengths(self) -> bool:
        """Return whether a step's microbatches may differ in length, as they always may without a pipeline."""
        return self.variable_seq_lengths or (self.pipeline_model_parallel_size or 1) == 1

    @classmethod
    def from_json_file(cls, json_file_path: str) -> Self:
        """Make the arguments from a JSON file.

        Args:
            json_file_path: A file ``.json`` with one object that maps field names to values.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is not a JSON object, a name is unknown, or a value is not allowed.
        """
        made: Self = parse_arguments(json_file_path, cls)[0]
        return made


# Fields of TransformerConfig that additional_configs must not set, with the reason
_ELSEWHERE = {
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"), "it follows from bf16 and fp16"
    ),
    **dict.fromkeys(("bf16", "fp16"), "it is an argument of its own, outside additional_configs"),
    **dict.fromkeys(
        ("fp4", "fp4_recipe", "fp4_param"),
        "FP4 is chosen by trainer(plugins=MCorePrecision('bf16-mixed', fp4_recipe='nvfp4'))",
    ),
    **dict.fromkeys(
        ("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        "the strategy fills it in while it runs the model",
    ),
    **dict.fromkeys(
        ("rotary_base", "rotary_percent", "rotary_scaling_factor"), "positions come from the checkpoint's config"
    ),
}


def load_additional_configs(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return ``additional_configs`` as a dict, from a dict, JSON text, or the path of a JSON file."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    is_text = given.lstrip().startswith("{")
    if not is_text and not Path(given).is_file():
        raise FileNotFoundError(
            f"additional_configs={given!r} is not a file; give the path of a JSON file, or a JSON object"
        )
    return json_object(f"additional_configs={given!r:.500}", given if is_text else Path(given).read_bytes())


def fill_from_additional(arguments: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Set arguments that are None from ``additional_configs``, and return the fields that are not arguments."""
    if not extra:
        return {}
    from megatron.core.transformer.transformer_config import MLATransformerConfig  # takes seconds

    fields = {field.name: field for field in dataclasses.fields(arguments)}
    # The subclass with multi-latent attention has all fields.
    known = MLATransformerConfig.__dataclass_fields__
    rest = {}
    for name, value in extra.items():
        # An argument that TransformerConfig does not have, such as use_distributed_optimizer, is an unknown name here.
        if name in fields and name != "additional_configs" and name in known:
            _take(arguments, name, value)
            continue
        if name not in known:
            raise ValueError(unknown_name("key of additional_configs", name, known))
        if name in _ELSEWHERE:
            raise ValueError(f"additional_configs has {name}={value!r}, but {_ELSEWHERE[name]}; remove it")
        rest[name] = value
    return rest


def _take(arguments: Any, name: str, value: Any) -> None:
    """Set an argument that is None; ValueError if it already has another value."""
    own = getattr(arguments, name)
    if own is None:
        setattr(arguments, name, value)
        return
    if name == "recompute_modules":
        own, value = split_names(own), split_names(value) if isinstance(value, str) else value
    if own != value:
        raise ValueError(f"{name}={own!r} contradicts {name}={value!r} in additional_configs; set it in one place")
