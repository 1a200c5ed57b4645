# SPDX-License-Identifier: Apache-2.0
"""Fields that nobody would carry out are refused by name, and the tables that say so name real fields."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules import model as field_support
from lightning_mcore.config.rules.model import check_fields
from lightning_mcore.layers.multi_token import check_multi_token, multi_token_prediction
from lightning_mcore.layers.spec import check_backend
from lightning_mcore.parallel.chunks import pipeline_config
from lightning_mcore.parallel.pipeline import Pipeline
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
TABLES: dict[str, Any] = {
    "NEEDS_TRANSFORMER_ENGINE": field_support.NEEDS_TRANSFORMER_ENGINE,
    "NEEDS_CUDA": field_support.NEEDS_CUDA,
    "TORCH_BACKEND_VALUES": field_support.TORCH_BACKEND_VALUES,
    "NOT_AVAILABLE": field_support.NOT_AVAILABLE,
    "NOT_OF_A_GPT": field_support.NOT_OF_A_GPT,
}
ONLY_SINCE_0_17 = {
    "cuda_graph_modules",
    "expert_gtp_weight_remat_size",
    "flash_attention_version",
    "fused_residual_rmsnorm",
    "gtp_weight_remat_size",
    "mla_down_proj_fusion",
    "moe_paged_stash",
    "moe_permute_fusion_into_hybridep",
    "moe_single_grouped_bias",
    "moe_single_grouped_weight",
    "mtp_hybrid_override_pattern",
    "overlap_dispatch_backward_with_experts_wgrad",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert",
    "use_transformer_engine_op_fuser",
}
ONLY_SINCE_0_20 = {
    "batch_invariant_backend",
    "enable_mhc_connections",
    "gdp_cutedsl_kernel",
    "gdp_num_chunk_states_to_recompute",
    "gdp_num_householder",
    "gtp_remat_opt_in_modules",
    "mhc_init_gating_factor",
    "mhc_num_residual_streams",
    "mhc_recompute_layer_num",
    "mhc_sinkhorn_iterations",
    "moe_combine_bwd_dtype",
    "moe_dispatch_fwd_dtype",
    "moe_use_grouped_tensor",
    "mtp_hsm",
}
ONLY_IN_0_16 = {"moe_extended_tp"}


def config_of(**fields: Any) -> TransformerConfig:
    """Return a config that Megatron has checked, and then been given what some version refuses itself."""
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def other(name: str) -> Any:
    """Return a value that is not the default of a field."""
    default = FIELDS[name].default
    return {bool: not default, int: 77, str: "other"}.get(type(default), "other")


def test_no_field_is_in_two_tables() -> None:
    names = [name for table in TABLES.values() for name in table]
    assert len(names) == len(set(names)) > 60


def test_tables_name_fields_of_megatron() -> None:
    names = {name for table in TABLES.values() for name in table}
    unknown = names - {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert unknown <= ONLY_SINCE_0_17 | ONLY_SINCE_0_20 | ONLY_IN_0_16


def test_what_megatron_defaults_to_is_accepted_everywhere() -> None:
    for impl in ("local", "transformer_engine", None):
        for device_type in ("cpu", "cuda", None):
            check_fields(config_of(), impl, device_type)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(name for name in field_support.NEEDS_TRANSFORMER_ENGINE if name in FIELDS))
def test_what_needs_transformer_engine_is_refused_with_the_torch_backend_alone(name: str) -> None:
    config = config_of(**{name: other(name)})
    with pytest.raises(
        ValueError, match=f"^{name}=.* needs TransformerEngine; choose .*, or transformer_impl="
    ) as caught:
        check_fields(config, "local", "cpu")
    assert "\n" not in str(caught.value)
    check_fields(config, "transformer_engine", "cuda")
    check_fields(config, None, "cpu")


@pytest.mark.parametrize("name", sorted(name for name in field_support.NEEDS_CUDA if name in FIELDS))
def test_what_needs_cuda_is_refused_on_the_cpu(name: str) -> None:
    config = config_of(**{name: other(name)})
    with pytest.raises(ValueError, match=f"^{name}=.* needs CUDA, and this run is on 'cpu'; leave it out$"):
        check_fields(config, None, "cpu")
    check_fields(config, "local", "cuda")


@pytest.mark.parametrize("name", sorted(name for name in field_support.NOT_AVAILABLE if name in FIELDS))
def test_what_nothing_around_the_model_would_do_is_refused_for_every_model(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* is not available: .*; leave it out$"):
        check_fields(config_of(**{name: other(name)}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_backend", "flash"),
        ("attention_softmax_in_fp32", False),
        ("cp_comm_type", "a2a"),
        ("masked_softmax_fusion", True),
        ("deterministic_mode", True),
    ],
)
def test_choices_that_the_torch_backend_does_not_have_are_refused(name: str, value: Any) -> None:
    config = config_of(**{name: value})
    with refuses(ValueError, f"{name}={value!r}"):
        check_fields(config, "local")
    check_fields(config, "transformer_engine")


@pytest.mark.parametrize("name", ["is_hybrid_model", "mamba_num_heads", "mrope_section", "linear_attention_freq"])
def test_fields_of_other_models_are_refused_for_a_gpt_alone(name: str) -> None:
    config = config_of(**{name: other(name)})
    with pytest.raises(ValueError, match=f"^{name}=.* is for models other than a GPT; leave it out$"):
        check_fields(config, "local")
    check_fields(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_token_dispatcher_type": "flex"},
        {"num_moe_experts": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"num_moe_experts": 4, "expert_model_parallel_size": 2, "use_cpu_initialization": True},
        {"fp32_residual_connection": True, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16},
        {"attention_dropout": 1.5},
        {"num_moe_experts": 2, "moe_router_topk": 4},
        {"moe_latent_size": 8, "num_moe_experts": None},
        {"moe_latent_size": 0, "num_moe_experts": 2},
        {"moe_latent_size": 8, "num_moe_experts": 2, "moe_shared_expert_overlap": True},
        {"num_moe_experts": 2, "moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
        {"num_moe_experts": 2, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.01},
        {"num_moe_experts": 2, "moe_router_load_balancing_type": "aux-loss", "moe_aux_loss_coeff": 0.01},
        {"num_moe_experts": 2, "moe_aux_loss_coeff": [0.01, 0.1]}
        | {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
        {"num_moe_experts": 2, "moe_aux_loss_coeff": [0.0], "moe_router_load_balancing_type": ["quantile_balancing"]},
        {"num_moe_experts": 2, "moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.01},
        {"num_moe_experts": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": [0.01]},
        {"num_moe_experts": 2, "moe_aux_loss_coeff": -0.01},
        {"num_moe_experts": 2, "moe_router_topk": 0},
        {"num_moe_experts": 2, "moe_expert_capacity_factor": 1.0, "tensor_model_parallel_size": 2}
        | {"moe_token_dispatcher_type": "alltoall", "expert_tensor_parallel_size": 2},
        {"num_moe_experts": 2, "moe_layer_freq": 0},
        {"apply_residual_connection_post_layernorm": True},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
        | {"pipeline_model_parallel_size": 2},
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    ],
)
def test_combinations_that_megatron_would_compute_wrongly_are_refused(fields: dict[str, Any]) -> None:
    with refuses(ValueError, *fields):
        check_backend(config_of(**fields), "local", "cpu")


def test_split_experts_may_drop_tokens_on_a_gpu_and_with_padding_on_the_cpu() -> None:
    fields = {"num_moe_experts": 2, "moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": "alltoall"}
    split = {**fields, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    check_fields(config_of(**split), "local", "cuda")
    check_fields(config_of(**split, moe_pad_expert_input_to_capacity=True), "local", "cpu")
    check_fields(config_of(**fields, expert_model_parallel_size=2), "local", "cpu")


def test_quantile_balancing_is_for_releases_that_have_it() -> None:
    fields = {"num_moe_experts": 2, "moe_router_load_balancing_type": "quantile_balancing"}
    config = config_of(**fields)
    if "moe_router_quantile_balancing_ema" not in FIELDS:
        with pytest.raises(ValueError, match="needs a newer megatron-core"):
            check_backend(config, "local", "cpu")
        config.moe_router_quantile_balancing_ema = 0.0
    check_backend(config, "local", "cpu")
    config.moe_router_num_groups = 1
    with refuses(ValueError, "moe_router_num_groups=1"):
        check_backend(config, "local", "cpu")


def test_a_model_of_ones_own_is_checked_too() -> None:
    chunk = torch.nn.Linear(2, 2)
    chunk.config = config_of(pipeline_dtype=torch.float32)  # type: ignore[assignment]
    chunk.model_type, chunk.set_input_tensor = ModelType.encoder_or_decoder, print  # type: ignore[assignment]
    pipeline = Pipeline([chunk], [True], ParallelLayout())
    owned = dict(vars(chunk.config))
    assert pipeline_config(pipeline, owned) is chunk.config
    chunk.config.gradient_accumulation_fusion = True
    with refuses(ValueError, "gradient_accumulation_fusion=True"):
        pipeline_config(pipeline, owned)


@pytest.mark.parametrize(
    ("fields", "tied"),
    [
        ({"context_parallel_size": 2}, False),
        ({"no_rope_freq": [1, 0], "calculate_per_token_loss": True}, False),
        ({"window_attn_skip_freq": [1, 0], "calculate_per_token_loss": True}, False),
        ({"pipeline_model_parallel_size": 2, "calculate_per_token_loss": True}, True),
    ],
)
def test_multi_token_prediction_that_would_depend_on_the_layout_is_refused(fields: dict[str, Any], tied: bool) -> None:
    config = config_of(mtp_num_layers=1, **fields)
    with refuses(ValueError, "mtp_num_layers=1"):
        check_multi_token(config, tied)
    check_multi_token(config_of(**fields), tied)
    check_multi_token(config_of(mtp_num_layers=1, calculate_per_token_loss=True), tied)


def test_multi_token_prediction_is_refused_with_recomputation_in_groups_of_several_layers() -> None:
    fields = {"num_layers": 2, "recompute_granularity": "full", "recompute_method": "uniform"}
    fields |= {"mtp_num_layers": 1, "calculate_per_token_loss": True}
    with refuses(ValueError, "recompute_num_layers=2"):
        check_multi_token(config_of(**fields, recompute_num_layers=2))
    check_multi_token(config_of(**fields, recompute_num_layers=1))


def test_learned_positions_are_refused_where_multi_token_prediction_copies_their_table() -> None:
    fields = {"mtp_num_layers": 1, "calculate_per_token_loss": True}
    staged = config_of(**fields, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    with refuses(ValueError, "mtp_num_layers=1"):
        check_multi_token(staged, learned_positions=True)
    check_multi_token(staged)
    check_multi_token(config_of(**fields), learned_positions=True)


def test_losses_ahead_of_a_model_that_is_not_ours_are_refused_where_its_megatron_divides_by_other_numbers() -> None:
    is_late = hasattr(multi_token_prediction, "process_mtp_loss")  # since 0.17
    by_tokens, split = {"calculate_per_token_loss": True}, {"context_parallel_size": 2}
    config = config_of(mtp_num_layers=1, **({**by_tokens, **split} if is_late else {}))
    # Not refuses(): the sentence depends on the release
    with pytest.raises(ValueError, match="context_parallel_size=2" if is_late else "calculate_per_token_loss=True"):
        check_multi_token(config, is_ours=False)
    check_multi_token(config)
    check_multi_token(config_of(mtp_num_layers=1, **({} if is_late else {**by_tokens, **split})), is_ours=False)


WINDOW = {"window_size": (8, 0), "context_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (WINDOW, "window_size=(8"),
        ({**WINDOW, "cp_comm_type": "p2p"}, "cp_comm_type='p2p'"),
        ({**WINDOW, "cp_comm_type": ["a2a", "p2p"], "num_layers": 2}, "context_parallel_size=2"),
        ({**WINDOW, "cp_comm_type": "a2a+p2p"}, "cp_comm_type='a2a+p2p'"),
        ({**WINDOW, "cp_comm_type": "all_gather"}, None),
        ({**WINDOW, "cp_comm_type": "a2a"}, None),
        ({"window_size": (8, 0)}, None),
        ({"context_parallel_size": 2}, None),
    ],
)
def test_windows_under_context_parallelism_ask_transformer_engine_for_what_it_has(
    fields: dict[str, Any], sentence: str | None
) -> None:
    config = config_of(**fields)
    if sentence is None:
        check_fields(config, "transformer_engine", "cuda")
        return
    with refuses(ValueError, sentence):
        check_fields(config, "transformer_engine", "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_a_dispatcher_that_has_never_run_is_refused_on_every_device(device: str | None) -> None:
    with refuses(ValueError, "moe_token_dispatcher_type='flex'"):
        check_fields(config_of(moe_token_dispatcher_type="flex"), "transformer_engine", device)
