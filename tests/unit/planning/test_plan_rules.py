# SPDX-License-Identifier: Apache-2.0
"""What ``plan`` refuses, the real classes refuse too, and what they take, it takes."""

import logging
import os
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from lightning_mcore.config.run import RunSettings
from lightning_mcore.planning.plan import make_plan
from tests.support import tiny
from tests.support.real_run import real_errors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

DENSE: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False}
MOE: dict[str, Any] = {
    **DENSE,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 64,
    "moe_router_load_balancing_type": "none",
}
LATENT: dict[str, Any] = {**DENSE, "multi_latent_attention": True, "kv_lora_rank": 32, "q_lora_rank": 32}


def run_with(
    transformer: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    precision: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    base: dict[str, Any] = DENSE,
) -> RunSettings:
    return RunSettings(
        strategy=strategy or {},
        precision=precision or {},
        model={"vocab_size": 256, "seq_length": 32, "transformer": {**base, **(transformer or {})}, **(model or {})},
        trainer={"accelerator": "cpu", "devices": 4, **(trainer or {})},
        data={"batch_size": 2, **(data or {})},
    )


def moe(transformer: dict[str, Any] | None = None, strategy: dict[str, Any] | None = None) -> RunSettings:
    return run_with(transformer, strategy, base=MOE)


DELTA_NET = {"delta_net": dict(tiny.DELTA_NET)}
KIMI_DELTA = {"kimi_delta": dict(tiny.KIMI_DELTA)}

WRONG: dict[str, tuple[RunSettings, str]] = {
    "a pair cut apart": (
        run_with(strategy={"micro_batch_size": 1}, model={"preference": {"loss": "sigmoid"}}),
        "micro_batch_size=1 cuts a pair apart",
    ),
    "a live reference without adapters": (
        run_with(model={"preference": {"precompute_reference": False}}),
        "precompute_reference=False with no LoRA adapters: switching adapters off would not give the reference",
    ),
    "pairs weighted by tokens": (
        run_with(
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "calculate_per_token_loss": True},
            model={"preference": {"loss": "orpo"}},
            base=MOE,
        ),
        "calculate_per_token_loss=True with moe_aux_loss_coeff=0.1: the loss is a mean over pairs",
    ),
    "a loss of another name": (run_with(model={"preference": {"loss": "dpo"}}), "did you mean 'sigmoid'"),
    # layout
    "sp without tp": (run_with(strategy={"sequence_parallel": True}), "sequence_parallel"),
    "vp without pp": (run_with(strategy={"virtual_pipeline_model_parallel_size": 2}), "virtual_pipeline"),
    "tp does not divide heads": (run_with(strategy={"tensor_model_parallel_size": 3}), "tensor_model_parallel_size=3"),
    "world": (run_with(strategy={"context_parallel_size": 3}), "does not divide the number of ranks"),
    "pp does not divide layers": (
        run_with(strategy={"pipeline_model_parallel_size": 4}, transformer={"num_layers": 6}),
        "pipeline_model_parallel_size=4",
    ),
    "ep without experts": (run_with(strategy={"expert_model_parallel_size": 2}), "expert_model_parallel_size"),
    "ep does not divide experts": (
        moe({"num_moe_experts": 3}, {"expert_model_parallel_size": 2}),
        "expert_model_parallel_size=2",
    ),
    "layout string": (
        run_with(strategy={"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|ttL"}),
        "num_layers=4",
    ),
    "layout letter": (
        run_with(strategy={"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|xtL"}),
        "'x'",
    ),
    "moe with tp and without sp": (moe(strategy={"tensor_model_parallel_size": 2}), "sequence_parallel"),
    "sequence": (run_with(strategy={"context_parallel_size": 2}, model={"seq_length": 30}), "seq_length=30"),
    "microbatches of the interleaved schedule": (
        run_with(
            strategy={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            trainer={"accumulate_grad_batches": 3},
        ),
        "num_microbatches=3",
    ),
    # overlaps
    "overlap_param_gather alone": (run_with(strategy={"overlap_param_gather": True}), "overlap_param_gather"),
    "align_grad_reduce alone": (run_with(strategy={"align_grad_reduce": True}), "align_grad_reduce"),
    "overlap_p2p without vp": (
        run_with(strategy={"pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}),
        "overlap_p2p_comm",
    ),
    "group size without vp": (
        run_with(strategy={"pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 2}),
        "microbatch_group_size_per_vp_stage",
    ),
    "tp overlap on the CPU": (
        run_with(strategy={"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}),
        "tp_comm_overlap",
    ),
    "tp overlap config alone": (run_with(strategy={"tp_comm_overlap_cfg": "no.yaml"}), "tp_comm_overlap_cfg"),
    "micro batch of 0": (run_with(strategy={"micro_batch_size": 0}), "micro_batch_size=0"),
    "warm-up overlap": (
        run_with(strategy={"communication": {"overlap_p2p_comm_warmup_flush": True}}),
        "overlap_p2p_comm_warmup_flush",
    ),
    "sharp on the CPU": (run_with(strategy={"communication": {"use_sharp": True}}), "use_sharp"),
    # gradients and optimizer
    "fsdp": (run_with(strategy={"ddp_config": {"use_megatron_fsdp": True}}), "use_megatron_fsdp"),
    "fully sharded pipeline": (
        run_with(strategy={"data_parallel_sharding": "optim_grads_params", "pipeline_model_parallel_size": 2}),
        "data_parallel_sharding='optim_grads_params' is not available with pipeline_model_parallel_size=2",
    ),
    "fully sharded over one rank": (
        run_with(strategy={"data_parallel_sharding": "optim_grads", "tensor_model_parallel_size": 4}),
        "data_parallel_sharding='optim_grads' shards over data-parallel and context-parallel ranks",
    ),
    "two values": (
        run_with(strategy={"overlap_grad_reduce": False, "ddp_config": {"overlap_grad_reduce": True}}),
        "overlap_grad_reduce",
    ),
    "instances": (
        run_with(strategy={"ddp_config": {"num_distributed_optimizer_instances": 2}}),
        "num_distributed_optimizer_instances",
    ),
    "align_param_gather": (run_with(strategy={"ddp_config": {"align_param_gather": True}}), "align_param_gather"),
    "average in collective on gloo": (
        run_with(strategy={"ddp_config": {"average_in_collective": True}}),
        "average_in_collective",
    ),
    "unknown field of ddp_config": (run_with(strategy={"ddp_config": {"bucket_sise": 4}}), "bucket_sise"),
    "learning rate in optimizer_config": (run_with(strategy={"optimizer_config": {"lr": 0.1}}), "optimizer_config.lr"),
    "clip in optimizer_config": (run_with(strategy={"optimizer_config": {"clip_grad": 2.0}}), "gradient_clip_val"),
    "offload nothing": (
        run_with(strategy={"optimizer_config": {"optimizer_cpu_offload": True}}),
        "optimizer_offload_fraction",
    ),
    "unknown argument of the strategy": (run_with(strategy={"tensor_parallel_size": 2}), "tensor_parallel_size"),
    # precision
    "unknown precision": (run_with(precision={"precision": "fp16"}), "precision='fp16'"),
    "loss scale without fp16": (run_with(precision={"precision": "bf16-mixed", "loss_scale": 8.0}), "loss scale"),
    "minimum above start": (
        run_with(precision={"precision": "16-mixed", "min_loss_scale": 2.0**20}),
        "min_loss_scale",
    ),
    "fp8 in fp32": (run_with(precision={"fp8_recipe": "delayed"}), "fp8_recipe"),
    "fp8 option without fp8": (run_with(precision={"precision": "bf16-mixed", "fp8_wgrad": False}), "fp8_wgrad"),
    "hysteresis of a constant scale": (
        run_with(precision={"precision": "16-mixed", "loss_scale": 128.0, "hysteresis": 3}),
        "hysteresis is for a dynamic scale",
    ),
    # what shows once the model or the optimizer is there
    "average in collective of a sum over tokens": (
        run_with(strategy={"ddp_config": {"average_in_collective": True}}, trainer={"accelerator": "gpu"}),
        "calculate_per_token_loss=True",
    ),
    "NaN ends a run that skips steps": (
        run_with(strategy={"ddp_config": {"check_for_nan_in_grad": True}}, precision={"precision": "16-mixed"}),
        "ddp_config.check_for_nan_in_grad=True contradicts",
    ),
    "FP8 gather of other weights": (
        run_with(
            strategy={"ddp_config": {"fp8_param_gather": True}, "use_distributed_optimizer": True},
            precision={"precision": "bf16-mixed", "fp8_recipe": "tensorwise"},
            trainer={"accelerator": "gpu"},
        ),
        "ddp_config.fp8_param_gather=True contradicts",
    ),
    "main gradients of another type": (
        run_with(
            strategy={
                "use_distributed_optimizer": True,
                "optimizer_config": {"use_precision_aware_optimizer": True, "main_grads_dtype": "torch.bfloat16"},
            },
            precision={"precision": "bf16-mixed"},
            trainer={"accelerator": "gpu"},
        ),
        "optimizer_config.main_grads_dtype",
    ),
    "moments of another type, alone": (
        run_with(strategy={"optimizer_config": {"exp_avg_dtype": "torch.bfloat16"}}),
        "optimizer_config.exp_avg_dtype",
    ),
    "sharded SGD": (
        run_with(strategy={"use_distributed_optimizer": True}, model={"recipe": {"optimizer": "sgd"}}),
        "use_distributed_optimizer=True needs torch's Adam or AdamW",
    ),
    "batch norm over ranks": (run_with(trainer={"sync_batchnorm": True}), "sync_batchnorm=True"),
    "a cosine without an end": (run_with(trainer={"max_epochs": -1}), "the number of steps is unknown"),
    "a course without an end": (
        run_with(trainer={"max_epochs": -1}, model={"recipe": {"lr_scheduler_type": "linear"}}),
        "lr_scheduler_type='linear' needs it",
    ),
    "betas": (run_with(model={"recipe": {"betas": [0.9, 1.5]}}), "betas"),
    "momentum": (run_with(model={"recipe": {"optimizer": "sgd", "sgd_momentum": -0.9}}), "sgd_momentum=-0.9"),
    "MXFP8 weights gathered in the forward pass": (
        run_with(
            strategy=dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True),
            precision={
                **{"precision": "bf16-mixed", "fp8_recipe": "mxfp8", "fp8_param": True},
                "reuse_grad_buf_for_mxfp8_param_ag": True,
            },
        ),
        "reuse_grad_buf_for_mxfp8_param_ag=True with overlap_param_gather=True",
    ),
    "unknown softmax": (run_with({"softmax_type": "sink"}), "softmax_type='sink' does not fit"),
    "window that looks ahead": (run_with({"window_size": [8, 4]}), "4 tokens ahead"),
    "recompute of TransformerEngine's norms": (
        run_with({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}),
        "recompute_modules with 'layernorm'",
    ),
    # the model
    "unknown field": (run_with({"num_layer": 4}), "did you mean num_layers?"),
    "field of the strategy": (run_with({"tensor_model_parallel_size": 2}), "belongs to the strategy"),
    "field of the precision": (run_with({"bf16": True}), "belongs to the precision"),
    "field of the module": (run_with({"rotary_base": 500000}), "argument of the module"),
    "wrong choice": (run_with({"normalization": "Norm"}), "'LayerNorm' or 'RMSNorm'"),
    "wrong type": (run_with({"num_layers": "four"}), "num_layers='four'"),
    "field of latent attention": (run_with({"kv_lora_rank": 8}), "multi_latent_attention"),
    "list of another length": (moe({"moe_layer_freq": [1, 0]}), "moe_layer_freq"),
    "needs TransformerEngine": (run_with({"moe_grouped_gemm": True}), "TransformerEngine"),
    "needs CUDA": (run_with({"gradient_accumulation_fusion": True}), "CUDA"),
    "not carried out": (run_with({"flash_decode": True}), "flash_decode"),
    "cuda graphs": (run_with({"cuda_graph_impl": "local"}), "CUDA graphs need random states"),
    "cuda graphs on a GPU": (
        run_with({"enable_cuda_graph": True}, trainer={"accelerator": "gpu"}),
        "CUDA graphs need random states",
    ),
    "part of cuda graphs": (run_with({"cuda_graph_warmup_steps": 5}), "cuda_graph_warmup_steps=5 is not available"),
    "dropout of 1": (run_with({"hidden_dropout": 1.0}), "hidden_dropout"),
    "full recompute without method": (run_with({"recompute_granularity": "full"}), "recompute_method"),
    "uniform recompute of uneven groups": (
        run_with({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}),
        "recompute_num_layers=3",
    ),
    "recompute of latent attention": (
        run_with({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}),
        "mla_up_proj",
    ),
    "capacity with sinkhorn": (
        moe({"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"}),
        "moe_expert_capacity_factor",
    ),
    "flex on the CPU": (moe({"moe_token_dispatcher_type": "flex"}), "flex"),
    "experts with biases and etp": (
        moe({"add_bias_linear": True}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        "add_bias_linear",
    ),
    "etp without ep": (
        moe(strategy={"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}),
        "expert_tensor_parallel_size=1",
    ),
    "ep with etp on the CPU": (
        moe(strategy={"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}),
        "gloo",
    ),
    "fused bias with relu": (
        run_with({"bias_activation_fusion": True, "activation_func": "relu"}),
        "bias_activation_fusion",
    ),
    "interleaved rotation of latent attention": (
        run_with({"rotary_interleaved": True}, base=LATENT),
        "rotary_interleaved",
    ),
    "multi-token prediction and cp": (
        run_with(
            {"mtp_num_layers": 1, "calculate_per_token_loss": False},
            {"context_parallel_size": 2},
        ),
        "mtp_num_layers",
    ),
    # arguments of the module
    "samples and an auxiliary loss": (
        run_with(
            {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"},
            base=MOE,
            model={"loss_normalization": "samples"},
        ),
        "samples",
    ),
    "unknown argument of MCoreGPT": (run_with(model={"seq_lenght": 32}), "did you mean 'seq_length'"),
    "unknown field of Recipe": (run_with(model={"recipe": {"lerning_rate": 0.1}}), "did you mean 'learning_rate'"),
    "yarn without factor": (run_with(model={"position_embedding_type": "yarn", "yarn": {}}), "rotary_scaling_factor"),
    "least above peak": (run_with(model={"recipe": {"min_learning_rate": 1.0}}), "min_learning_rate"),
    "unknown optimizer": (run_with(model={"recipe": {"optimizer": "lion"}}), "lion"),
    "no vocabulary": (run_with(model={"vocab_size": 0}), "vocab_size=0"),
    "flags of delta nets": (run_with({"num_layers": 4}, model={"architecture": DELTA_NET}), "give one for each layer"),
    "heads of delta nets": (
        run_with({"num_layers": 2}, {"context_parallel_size": 8}, model={"architecture": DELTA_NET}),
        "does not divide linear_num_key_heads=4",
    ),
    "latent attention without positions": (
        run_with(model={"position_embedding_type": "none"}, base=LATENT),
        "needs rope_type='rope'",
    ),
    "a learned activation with a gate": (
        run_with({"activation_func": "xielu", "gated_linear_unit": True}),
        "activation_func='xielu' does not work with gated_linear_unit=True",
    ),
    "TransformerEngine on the CPU": (run_with(model={"transformer_impl": "transformer_engine"}), "CUDA"),
}  # fmt: skip

RIGHT: dict[str, RunSettings] = {
    "plain": run_with(),
    "biases": run_with({"add_bias_linear": True}),
    "tp sp": run_with(strategy={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp": run_with(strategy={"pipeline_model_parallel_size": 2}),
    "pp vp": run_with(
        strategy={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        trainer={"accumulate_grad_batches": 4},
    ),
    "layout string": run_with(
        strategy={"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tttL"},
    ),
    "uneven": run_with({"num_layers_in_first_pipeline_stage": 1}, {"pipeline_model_parallel_size": 2}),
    "cp": run_with(strategy={"context_parallel_size": 2}),
    "do overlap": run_with(
        strategy=dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True)
    ),
    "ddp_config": run_with(strategy={"ddp_config": {"bucket_size": 1000}}),
    "fully sharded": run_with(strategy={"data_parallel_sharding": "optim_grads_params"}),
    "communication": run_with(strategy={"communication": {"create_gloo_process_groups": True}}),
    "zeros": run_with(strategy={"optimizer_config": {"log_num_zeros_in_grad": True}}),
    "bf16": run_with(precision={"precision": "bf16-mixed"}),
    "fp16": run_with(precision={"precision": "16-mixed", "loss_scale": 128.0}),
    "swiglu": run_with({"gated_linear_unit": True, "activation_func": "silu", "normalization": "RMSNorm"}),
    "gqa": run_with({"num_query_groups": 2, "kv_channels": 32, "qk_layernorm": True}),
    "window": run_with({"window_size": [8, 0], "window_attn_skip_freq": 2}),
    "full recompute": run_with(
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    ),
    "selective recompute": run_with({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}),
    "moe": moe(),
    "moe ep": moe({"moe_token_dispatcher_type": "alltoall"}, {"expert_model_parallel_size": 4}),
    "moe tp ep": moe(
        strategy={
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        }
    ),
    "moe shared": moe(
        {
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_overlap": True,
            "moe_token_dispatcher_type": "alltoall",
        }
    ),
    "moe capacity": moe({"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}),
    "moe sigmoid": moe({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
    "latent": run_with(base=LATENT),
    "multi-token": run_with({"mtp_num_layers": 1}),
    "yarn": run_with(model={"position_embedding_type": "yarn", "yarn": {"rotary_scaling_factor": 4.0}}),
    "learned": run_with(model={"position_embedding_type": "learned_absolute"}),
    "tied": run_with(model={"share_embeddings_and_output_weights": True}),
    "sgd": run_with(model={"recipe": {"optimizer": "sgd", "lr_scheduler_type": "linear", "warmup_steps": 0.1}}),
    "samples": run_with(model={"loss_normalization": "samples"}),
}


def test_the_tables_are_long_enough() -> None:
    assert len(WRONG) >= 40
    assert len(RIGHT) >= 20


@pytest.mark.parametrize("name", WRONG)
def test_what_the_classes_refuse_the_plan_refuses(name: str) -> None:
    settings, part = WRONG[name]
    errors = make_plan(settings, 4).errors
    assert any(part in error for error in errors), errors
    assert real_errors(settings, 4), "nobody refuses it when it runs"


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_classes_take_the_plan_takes(name: str) -> None:
    assert list(make_plan(RIGHT[name], 4).errors) == []
    assert real_errors(RIGHT[name], 4) == []


def test_all_errors_are_listed_and_not_only_the_first() -> None:
    settings = run_with(
        {"num_layer": 4, "recompute_granularity": "full"},
        {"tensor_model_parallel_size": 2, "overlap_param_gather": True, "pipeline_model_paralel_size": 2},
        {"precision": "fp8"},
        {"devises": 4},
    )
    errors = "\n".join(make_plan(settings, 3).errors)
    for part in ("num_layer;", "recompute_method", "which is 3", "overlap_param_gather", "paralel", "fp8", "devises"):
        assert part in errors, part


def test_all_that_the_cpu_and_the_layout_refuse_of_overlaps_is_listed() -> None:
    options = {"use_sharp": True, "high_priority_stream_groups": ["ep"], "overlap_p2p_comm_warmup_flush": True}
    errors = make_plan(run_with(strategy={"tp_comm_overlap": True, "communication": options}), 4).errors
    for part in (
        "tp_comm_overlap=True needs sequence_parallel=True",
        "tp_comm_overlap=True needs CUDA",
        "use_sharp=True is an option of NCCL",
        "high_priority_stream_groups=['ep'] is an option of NCCL",
        "overlap_p2p_comm_warmup_flush=True needs overlap_p2p_comm=True",
    ):
        assert any(part in error for error in errors), (part, errors)


def test_asking_the_trainer_changes_nothing_of_this_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level, torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(), {*os.environ}
    given = {"num_nodes": 2, "max_steps": 5, "deterministic": True, "benchmark": True, "gradient_clip_val": 1.0}
    assert list(make_plan(run_with(trainer={**given, "devices": 2}), 4).errors) == []
    after = logger.level, torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(), {*os.environ}
    assert rank_zero_only.rank == 3
    assert after == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, None),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type='flex'"),
        ({"moe_router_topk": 9}, "moe_router_topk=9 is more than num_moe_experts=4"),
        ({"moe_permute_fusion": True, "moe_router_topk": 9}, "moe_router_topk=9 is more than num_moe_experts=4"),
        ({"fine_grained_activation_offloading": True}, "refuses this model: assert "),
    ],
)
def test_a_model_in_fp8_for_gpus_is_checked_where_transformer_engine_is_missing(
    fields: dict[str, Any], sentence: str | None
) -> None:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 64, "moe_ffn_hidden_size": 64}
    settings = run_with(
        {**sizes, **fields},
        precision={"precision": "bf16-mixed", "fp8_recipe": "delayed"},
        trainer={"accelerator": "gpu", "devices": 1},
        base=MOE,
    )
    errors = make_plan(settings, 1).errors
    assert [sentence is not None and sentence in error for error in errors] == ([True] if sentence else [])


def test_fp8_on_a_cpu_has_one_reason() -> None:
    padded = {"moe_router_padding_for_fp8": True, "moe_grouped_gemm": True}
    fp8: Any = {"precision": {"precision": "bf16-mixed", "fp8_recipe": "delayed"}, "base": {**MOE, **LATENT}}
    [error] = make_plan(run_with(padded, **fp8), 4).errors
    assert error.startswith("FP8 needs a CUDA device, and this run is on 'cpu'")
    assert make_plan(run_with(padded, trainer={"accelerator": "gpu"}, **fp8), 4).errors == ()


def test_the_reason_of_the_model_comes_before_that_of_the_number_of_ranks() -> None:
    errors = make_plan(run_with(strategy={"pipeline_model_parallel_size": 3}), 4).errors
    assert [error.split(";")[0] for error in (errors[0], errors[-1])] == [
        "pipeline_model_parallel_size=3 does not divide num_layers=4",
        "pipeline_model_parallel_size=3 does not divide the number of ranks (devices * num_nodes), which is 4",
    ]


def test_a_window_that_only_the_torch_backend_refuses_is_planned_for_transformer_engine() -> None:
    plan = make_plan(run_with({"window_size": [8, 4]}, trainer={"accelerator": "gpu", "devices": 1}), 1)
    assert (plan.backend, plan.errors) == ("transformer_engine", ())
    assert plan.stages


def test_four_bit_weights_need_megatrons_layers() -> None:
    for layers, refused in (("auto", True), ("local", False)):
        fields = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu"}
        model = {"lora": {"quantization": "nf4"}, "transformer_impl": layers}
        plan = make_plan(run_with(fields, model=model, trainer={"accelerator": "gpu", "devices": 1}), 1)
        assert any("works on Megatron's own layers only" in error for error in plan.errors) == refused
        assert len(plan.errors) == refused


def test_rows_longer_than_the_model_expects_are_an_assumption() -> None:
    told = "rows of data.seq_length=64 tokens, although model.seq_length=32 is shorter"
    for length, wanted in ((32, False), (64, True)):
        plan = make_plan(run_with(data={"seq_length": length}), 4)
        assert plan.errors == ()
        assert (told in plan.assumptions) == wanted


def test_short_documents_that_may_stay_whole_are_an_assumption_and_need_rows_one_by_one() -> None:
    packed, length = {"packing": True, "batch_size": 2, "seq_length": 32}, "all packed rows are split over all"
    hybrid = {"context_parallel_size": 2, "hybrid_context_parallel": True, "micro_batch_size": 1}
    for strategy, data, wanted in (
        (hybrid, packed, True),
        (hybrid, {**packed, "packing": False}, False),
        ({"context_parallel_size": 2}, packed, False),
    ):
        plan = make_plan(run_with(strategy=strategy, data=data), 2)
        assert plan.errors == ()
        assert any(told.startswith(length) for told in plan.assumptions) == wanted
    [error] = make_plan(run_with(strategy={**hybrid, "micro_batch_size": None}, data=packed), 2).errors
    assert error.startswith("batch_size=2 puts several rows into a microbatch")
