# SPDX-License-Identifier: Apache-2.0
"""Fields that nobody would carry out are refused by name, and the tables that say so name real fields."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules import model as field_support
from lightning_mcore.config.rules.model import check_fields
from lightning_mcore.layers.multi_token import check_multi_token, multi_token_prediction
from lightning_mcore.layers.spec import check_backend
from lightning_mcore.parallel.chunks import pipeline_config
from lightning_mcore.parallel.pipeline import Pipeline

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
    "use_mup",
    "use_transformer_engine_op_fuser",
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
    assert unknown <= ONLY_SINCE_0_17 | ONLY_IN_0_16


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
    ("name", "value", "choice"),
    [
        ("attention_backend", "flash", "choose 'auto' or 'local', or transformer_impl"),
        ("attention_softmax_in_fp32", False, "choose True, or transformer_impl"),
        ("cp_comm_type", "a2a", "choose None or 'all_gather', or transformer_impl"),
        ("masked_softmax_fusion", True, "choose False, or transformer_impl"),
        ("deterministic_mode", True, r"Trainer\(deterministic=True\)"),
    ],
)
def test_choices_that_the_torch_backend_does_not_have_are_refused(name: str, value: Any, choice: str) -> None:
    config = config_of(**{name: value})
    with pytest.raises(ValueError, match=f"^{name}={value!r} is not for the torch backend, because .*{choice}"):
        check_fields(config, "local")
    check_fields(config, "transformer_engine")


@pytest.mark.parametrize("name", ["is_hybrid_model", "mamba_num_heads", "mrope_section", "linear_attention_freq"])
def test_fields_of_other_models_are_refused_for_a_gpt_alone(name: str) -> None:
    config = config_of(**{name: other(name)})
    with pytest.raises(ValueError, match=f"^{name}=.* is for models other than a GPT; leave it out$"):
        check_fields(config, "local")
    check_fields(config)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"moe_token_dispatcher_type": "flex"}, r"^moe_token_dispatcher_type='flex' \(DeepEP.*; choose 'alltoall'"),
        (
            {"num_moe_experts": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "expert_tensor_parallel_size=1 with tensor_model_parallel_size=2 needs expert_model_parallel_size > 1",
        ),
        (
            {"num_moe_experts": 4, "expert_model_parallel_size": 2, "use_cpu_initialization": True},
            "use_cpu_initialization=True with expert_model_parallel_size=2: megatron-core draws the same experts",
        ),
        (
            {"fp32_residual_connection": True, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16},
            "would send fp32 where torch.bfloat16 is expected; choose 32-true or one stage",
        ),
        ({"attention_dropout": 1.5}, "attention_dropout=1.5 is not a share"),
        ({"num_moe_experts": 2, "moe_router_topk": 4}, "moe_router_topk=4 is more than num_moe_experts=2; choose 2"),
        (
            {"num_moe_experts": 2, "moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
            "moe_router_topk=2 does not fit moe_router_group_topk=1 groups of 1 experts; choose 1 to 1",
        ),
        (
            {"num_moe_experts": 2, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.01},
            "moe_aux_loss_coeff=0.01 with moe_router_load_balancing_type='sinkhorn'",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": True},
            "recompute_modules with 'mlp' needs add_bias_linear=False",
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
            | {"pipeline_model_parallel_size": 2},
            "recompute_num_layers=2 with recompute_method='uniform' does not divide the 1 layers",
        ),
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, "'te' needs TransformerEngine"),
    ],
)
def test_combinations_that_megatron_would_compute_wrongly_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_backend(config_of(**fields), "local", "cpu")


def test_a_model_of_ones_own_is_checked_too() -> None:
    chunk = torch.nn.Linear(2, 2)
    chunk.config = config_of(pipeline_dtype=torch.float32)  # type: ignore[assignment]
    pipeline = Pipeline([chunk], [True], ParallelLayout())
    owned = dict(vars(chunk.config))
    assert pipeline_config(pipeline, owned) is chunk.config
    chunk.config.gradient_accumulation_fusion = True
    with pytest.raises(ValueError, match=r"^gradient_accumulation_fusion=True needs CUDA, and this run is on 'cpu'"):
        pipeline_config(pipeline, owned)


@pytest.mark.parametrize(
    ("fields", "tied", "sentence"),
    [
        ({"context_parallel_size": 2}, False, "choose context_parallel_size=1"),
        ({"no_rope_freq": [1, 0], "calculate_per_token_loss": True}, False, "leave out one of the two"),
        ({"window_attn_skip_freq": [1, 0], "calculate_per_token_loss": True}, False, "leave out one of the two"),
        ({"pipeline_model_parallel_size": 2, "calculate_per_token_loss": True}, True, "choose one of the three"),
    ],
)
def test_multi_token_prediction_that_would_depend_on_the_layout_is_refused(
    fields: dict[str, Any], tied: bool, sentence: str
) -> None:
    config = config_of(mtp_num_layers=1, **fields)
    with pytest.raises(ValueError, match=f"mtp_num_layers=1.*{sentence}$"):
        check_multi_token(config, tied)
    check_multi_token(config_of(**fields), tied)
    check_multi_token(config_of(mtp_num_layers=1, calculate_per_token_loss=True), tied)


def test_multi_token_prediction_is_refused_with_recomputation_in_groups_of_several_layers() -> None:
    fields = {"num_layers": 2, "recompute_granularity": "full", "recompute_method": "uniform"}
    fields |= {"mtp_num_layers": 1, "calculate_per_token_loss": True}
    with pytest.raises(
        ValueError, match=r"^recompute_num_layers=2 with mtp_num_layers=1 .*; choose recompute_num_layers=1$"
    ):
        check_multi_token(config_of(**fields, recompute_num_layers=2))
    check_multi_token(config_of(**fields, recompute_num_layers=1))


def test_learned_positions_are_refused_where_multi_token_prediction_copies_their_table() -> None:
    fields = {"mtp_num_layers": 1, "calculate_per_token_loss": True}
    staged = config_of(**fields, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^learned positions with mtp_num_layers=1 and pipeline_model"):
        check_multi_token(staged, learned_positions=True)
    check_multi_token(staged)
    check_multi_token(config_of(**fields), learned_positions=True)


@pytest.mark.skipif(hasattr(multi_token_prediction, "process_mtp_loss"), reason="fixed in megatron-core 0.17")
def test_multi_token_prediction_that_could_divide_by_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"divides by zero .*; set calculate_per_token_loss=True"):
        check_multi_token(config_of(mtp_num_layers=1))


WINDOW = {"window_size": (8, 0), "context_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (WINDOW, r"window_size=\(8, 0\) with context_parallel_size=2 and cp_comm_type=None .* set cp_comm_type='all_g"),
        ({**WINDOW, "cp_comm_type": "p2p"}, "cp_comm_type='p2p' is not available: TransformerEngine sends"),
        ({**WINDOW, "cp_comm_type": ["a2a", "p2p"], "num_layers": 2}, "with context_parallel_size=2"),
        ({**WINDOW, "cp_comm_type": "a2a+p2p"}, r"cp_comm_type='a2a\+p2p' is not available: its process groups"),
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
    with pytest.raises(ValueError, match=sentence):
        check_fields(config, "transformer_engine", "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_a_dispatcher_that_has_never_run_is_refused_on_every_device(device: str | None) -> None:
    with pytest.raises(ValueError, match="moe_token_dispatcher_type='flex'"):
        check_fields(config_of(moe_token_dispatcher_type="flex"), "transformer_engine", device)
