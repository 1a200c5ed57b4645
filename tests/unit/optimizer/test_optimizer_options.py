# SPDX-License-Identifier: Apache-2.0
"""Megatron's options for optimizers, gradients and communication: what is taken, and what is refused by name."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jsonargparse
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch import nn

from lightning_mcore import CommunicationOptions, MCoreStrategy, MuonWithAdamW, ParallelLayout
from lightning_mcore.optimizer.megatron import MCoreOptimizer, RebuiltOptimizer, WrappedOptimizer, optimizer_class
from lightning_mcore.optimizer.rules import (
    check_kind,
    check_optimizer_config,
    check_state,
    megatron_fields,
    optimizer_device_faults,
    optimizer_option_faults,
)
from lightning_mcore.optimizer.trial import looks_at
from lightning_mcore.parallel import groups as process_groups
from lightning_mcore.parallel.chunks import wrap_chunks
from lightning_mcore.strategy.gradient_settings import GradientSettings
from lightning_mcore.strategy.overlap import TensorParallelOverlap, queue_hint, user_buffer_arguments
from tests.support.sentences import refuses, says

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"


def config(**fields: Any) -> OptimizerConfig:
    """Return a config whose own checks, some of which import TransformerEngine, have not run."""
    made = OptimizerConfig()
    for name, value in fields.items():
        assert name in OptimizerConfig.__dataclass_fields__
        setattr(made, name, value)
    return made


# OptimizerConfig

USER, PRECISION = "configure_optimizers", "precision"
HOMES = {
    "lr": (0.1, USER),
    "min_lr": (0.1, USER),
    "decoupled_lr": (0.1, USER),
    "weight_decay": (0.5, USER),
    "apply_wd_to_qk_layernorm": (True, USER),
    "adam_beta1": (0.5, USER),
    "adam_eps": (1.0, USER),
    "decoupled_weight_decay": (False, USER),
    "sgd_momentum": (0.5, USER),
    "optimizer": ("sgd", USER),
    "muon_momentum": (0.5, USER),
    "clip_grad": (0.5, "gradient_clip_val"),
    "bf16": (True, PRECISION),
    "fp16": (True, PRECISION),
    "params_dtype": (torch.bfloat16, PRECISION),
    "fp8_recipe": ("delayed", PRECISION),
    "reuse_grad_buf_for_mxfp8_param_ag": (True, PRECISION),
    "loss_scale": (8.0, PRECISION),
    "initial_loss_scale": (8.0, PRECISION),
    "hysteresis": (3, PRECISION),
    "overlap_param_gather": (True, "overlap_param_gather"),
    "use_distributed_optimizer": (True, "use_distributed_optimizer=True"),
    "timers": (print, "profiler"),
    "barrier_with_L1_time": (True, "profilers"),
    "overlap_param_gather_with_optimizer_step": (True, "sharded checkpoints"),
}


@pytest.mark.parametrize("name", HOMES)
def test_a_field_of_the_optimizer_that_has_another_home_is_refused_by_name(name: str) -> None:
    value, home = HOMES[name]
    with refuses(ValueError, f"optimizer_config.{name}=") as refusal:
        MCoreStrategy(optimizer_config=config(**{name: value}))
    assert home in str(refusal.value)


OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    "fields",
    [
        {**OFFLOAD, "optimizer_offload_fraction": 0.0},
        {**OFFLOAD, "optimizer_offload_fraction": 1.5},
        {**OFFLOAD, "use_precision_aware_optimizer": False},
        {"optimizer_offload_fraction": 0.5},
        {"overlap_cpu_optimizer_d2h_h2d": True},
        {"pin_cpu_grads": False},
    ],
)
def test_an_offload_that_does_nothing_is_refused(fields: dict[str, Any]) -> None:
    with refuses(ValueError, *fields):
        check_optimizer_config(config(**fields), distributed=True)


@pytest.mark.parametrize(
    ("fields", "device_type", "sums_in_fp32"),
    [
        (OFFLOAD, "cpu", False),
        ({"use_precision_aware_optimizer": True}, "cpu", False),
        ({"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16}, "cuda", True),
    ],
)
def test_what_the_device_or_the_precision_cannot_do(
    fields: dict[str, Any], device_type: str, sums_in_fp32: bool
) -> None:
    first, *_ = optimizer_device_faults(vars(config(**fields)), device_type, sums_in_fp32)
    says(first, *fields)
    assert not [*optimizer_device_faults(vars(config(**OFFLOAD)), "cuda", sums_in_fp32=False)]


def adamw(*, decoupled: bool = True) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1)


def test_offload_and_types_of_state_need_an_optimizer_that_megatron_makes() -> None:
    aware, offload = vars(config(use_precision_aware_optimizer=True)), vars(config(**OFFLOAD))
    (fault,) = optimizer_option_faults(aware, {}, "RMSprop")
    assert "needs torch's Adam or AdamW, got RMSprop" in fault
    (fault,) = optimizer_option_faults(offload, megatron_fields(adamw(decoupled=False)) or {}, "Adam")
    assert "optimizer_cpu_offload=True needs torch's AdamW, got Adam" in fault
    assert not [*optimizer_option_faults(offload, megatron_fields(adamw()) or {}, "AdamW")]


def test_the_config_must_be_one() -> None:
    with refuses(TypeError, "is not an OptimizerConfig; make one from"):
        MCoreStrategy(optimizer_config={"lr": 0.1})  # type: ignore[arg-type]


def test_what_has_no_other_home_is_taken() -> None:
    given = config(log_num_zeros_in_grad=True, config_logger_dir="somewhere")
    assert MCoreStrategy(optimizer_config=given).optimizer_config is given
    everything = config(**OFFLOAD, exp_avg_dtype=torch.bfloat16, pin_cpu_grads=False, use_distributed_optimizer=True)
    check_optimizer_config(everything, distributed=True)


# Optimizers that look at more than an element


class Adafactor(torch.optim.SGD):
    """Stands for that of transformers, which is known by its name."""


class MyAdafactor(Adafactor):
    """A subclass of one."""


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


ONE = {"inline": False, "distributed": False, "tensor_parallel_size": 1, "expert_model_parallel_size": 1}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: torch.optim.Muon(matrix(), lr=0.1), id="muon"),
        pytest.param(lambda: torch.optim.Adafactor(matrix(), lr=0.1), id="adafactor"),
        pytest.param(lambda: MyAdafactor(matrix(), lr=0.1), id="by-name"),
    ],
)
def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_split(optimizer: Any) -> None:
    check_kind(optimizer(), **ONE)
    for case in ({"tensor_parallel_size": 2}, {"distributed": True}, {"expert_model_parallel_size": 2}):
        with refuses(TypeError):
            check_kind(optimizer(), **{**ONE, **case})
    check_kind(optimizer(), **{**ONE, "expert_model_parallel_size": 2, "layer_wise": True})


def test_muon_with_adamw_is_taken_where_matrices_are_split() -> None:
    muon = MuonWithAdamW(matrix(), [])
    check_kind(muon, **{**ONE, "tensor_parallel_size": 2})
    check_kind(muon, **{**ONE, "tensor_parallel_size": 2, "expert_model_parallel_size": 2, "layer_wise": True})
    with refuses(TypeError, "use_layer_wise_distributed_optimizer=True instead"):
        check_kind(muon, **{**ONE, "distributed": True})


def step_by(scales: Any) -> type[torch.optim.Optimizer]:
    """Return a class of optimizers whose step is the gradient times what ``scales`` makes of all gradients."""

    class Scaled(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float = 0.0) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            parameters = self.param_groups[0]["params"]
            for parameter, scale in zip(parameters, scales([p.grad for p in parameters]), strict=True):
                parameter.sub_(parameter.grad * scale, alpha=self.param_groups[0]["lr"])

    return Scaled


ByElements = step_by(lambda gradients: [gradient.abs() for gradient in gradients])
ByNorms = step_by(lambda gradients: [1 / gradient.norm() for gradient in gradients])
ByAll = step_by(lambda gradients: [1 / torch.stack([g.norm() for g in gradients]).norm()] * len(gradients))
AtRandom = step_by(lambda gradients: [torch.rand(1) for _ in gradients])
NeedsAClosure = step_by(lambda gradients: 1 / 0)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (ByElements, "elements"),
        (ByNorms, "matrices"),
        (ByAll, "parameters"),
        (AtRandom, None),
        (NeedsAClosure, None),
        (torch.optim.Adafactor, "matrices"),
        (torch.optim.RMSprop, "elements"),
    ],
    ids=["elements", "norms", "all", "random", "fails", "adafactor", "rmsprop"],
)
def test_a_trial_shows_what_an_optimizer_looks_at(kind: Any, seen: str | None) -> None:
    [parameter] = matrix()
    before = torch.get_rng_state()
    assert looks_at(kind([parameter])) == seen
    assert torch.equal(torch.get_rng_state(), before)
    assert not parameter.any()


def test_an_optimizer_is_rejected_by_what_a_trial_shows() -> None:
    split, stages = {**ONE, "tensor_parallel_size": 2}, {**ONE, "pipeline_model_parallel_size": 2}
    check_kind(ByElements(matrix()), **split)
    check_kind(ByNorms(matrix()), **stages)
    check_kind(ByAll(matrix()), **ONE)
    with refuses(TypeError, "tensor_model_parallel_size=2"):
        check_kind(ByNorms(matrix()), **split)
    for layout, size in ((split, "tensor_model_parallel_size=2"), (stages, "pipeline_model_parallel_size=2")):
        with refuses(TypeError, size):
            check_kind(ByAll(matrix()), **layout)
    with refuses(TypeError, "looks at all parameters at once, and use_layer_wise_distributed_optimizer=True"):
        check_kind(ByAll(matrix()), **{**ONE, "layer_wise": True})


class Coded(torch.Tensor):
    """Stands for a state of another package, which only its optimizer reads."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None


def test_a_state_that_shards_cannot_hold_is_rejected() -> None:
    [parameter] = matrix()
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"step": 3, "momentum": torch.zeros(2, 2), "scale": torch.tensor(1.0)}
    check_state(optimizer, tensor_parallel_size=2)
    optimizer.state[parameter] |= {"rows": torch.zeros(2)}
    check_state(optimizer, tensor_parallel_size=1)
    with refuses(TypeError, "SGD keeps 'rows' of shape [2]"):
        check_state(optimizer, tensor_parallel_size=2)
    optimizer.state[parameter] = {"momentum": torch.zeros(2, 2).as_subclass(Coded)}
    with refuses(TypeError, "SGD keeps 'momentum' as Coded"):
        check_state(optimizer, tensor_parallel_size=1)


def test_an_optimizer_of_all_parameters_is_refused_in_a_pipeline() -> None:
    with refuses(TypeError, "LBFGS evaluates the step several times"):
        check_kind(torch.optim.LBFGS(matrix()), **ONE)
    check_kind(torch.optim.LBFGS(matrix()), **{**ONE, "inline": True})


def test_an_elementwise_optimizer_is_taken_where_matrices_are_split() -> None:
    for kind in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adamax):
        check_kind(kind(matrix(), lr=0.1), **{**ONE, "tensor_parallel_size": 2})


def test_muon_with_adamw_is_torchs_two_optimizers() -> None:
    generator = torch.Generator().manual_seed(0)
    together, apart = (
        [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))] for _ in range(2)
    )
    one = MuonWithAdamW([together[0]], together[1:], lr=0.1, adamw_lr=0.05, adamw_weight_decay=0.2)
    two = (
        torch.optim.Muon([apart[0]], lr=0.1),
        torch.optim.AdamW(apart[1:], lr=0.05, betas=(0.9, 0.95), weight_decay=0.2),
    )
    for step in range(4):
        for mine, its in zip(together, apart, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            its.grad = mine.grad.clone()
        for optimizer in (one, *two):
            optimizer.step()
        if step == 1:  # loading replaces groups and state
            one.load_state_dict(one.state_dict())
    for mine, its in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=0)  # the factor of a shape is applied in another order
    with pytest.raises(ValueError, match="2D"):
        MuonWithAdamW([together[1]], [])


# From a file


def test_the_options_come_from_a_configuration_file() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(MCoreStrategy, "strategy")
    options = {"communication": {"batch_p2p_comm": False}, "optimizer_config": {"log_num_zeros_in_grad": True}}
    arguments = {PP: 2, **options, "ddp_config": {"bucket_size": 100}}
    given = {"class_path": "lightning_mcore.MCoreStrategy", "init_args": arguments}
    strategy = parser.instantiate_classes(parser.parse_object({"strategy": given})).strategy
    assert strategy.communication == CommunicationOptions(batch_p2p_comm=False)
    assert strategy.optimizer_config.log_num_zeros_in_grad
    assert strategy.gradients.ddp_config.bucket_size == 100


# DistributedDataParallelConfig


def ddp(**fields: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(**fields)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ddp_config": ddp(use_megatron_fsdp=True)},
        {"ddp_config": ddp(use_custom_fsdp=True)},
        {"ddp_config": ddp(data_parallel_sharding_strategy="optim")},
        {"ddp_config": ddp(fsdp_double_buffer=True)},
        {"ddp_config": ddp(check_for_large_grads=True)},
        {"ddp_config": ddp(delay_wgrad_compute=True)},
        {"ddp_config": ddp(bucket_size=0)},
        {"ddp_config": ddp(num_distributed_optimizer_instances=0)},
        {"ddp_config": ddp(num_distributed_optimizer_instances=2)},
        {"ddp_config": ddp(reduce_scatter_with_fp32_accumulation=True)},
        {"ddp_config": ddp(align_param_gather=True)},
        {"ddp_config": ddp(disable_symmetric_registration=True)},
        {
            "use_distributed_optimizer": True,
            "ddp_config": ddp(reduce_scatter_with_fp32_accumulation=True, average_in_collective=True),
        },
        {
            "use_distributed_optimizer": True,
            "ddp_config": ddp(reduce_scatter_with_fp32_accumulation=True, num_distributed_optimizer_instances=2),
        },
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "ddp_config": ddp(align_param_gather=True),
        },
        {"align_grad_reduce": True},
        {"align_grad_reduce": True, "overlap_grad_reduce": True},
        {"use_layer_wise_distributed_optimizer": True, "use_distributed_optimizer": True},
    ],
)
def test_an_option_of_gradients_that_cannot_be_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with refuses(ValueError, *arguments):
        MCoreStrategy(**arguments)


def test_instances_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    settings = GradientSettings(True, ddp_config=ddp(num_distributed_optimizer_instances=2))
    settings.check_run(ParallelLayout(context_parallel_size=2), 2, CPU)
    with refuses(ValueError, "=2 does not divide the data-parallel times"):
        settings.check_run(ParallelLayout(), 3, CPU)
    with refuses(ValueError, "=2 does not divide the expert"):
        settings.check_run(ParallelLayout(expert_model_parallel_size=4), 4, CPU)


def test_instances_need_a_package_of_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = GradientSettings(True, ddp_config=ddp(num_distributed_optimizer_instances=2))
    with refuses(ModuleNotFoundError, "needs the package einops"):
        settings.check_run(ParallelLayout(), 2, CUDA)


@pytest.mark.parametrize("name", ["average_in_collective", "nccl_ub"])
def test_options_of_nccl_are_refused_on_the_cpu(name: str) -> None:
    settings = GradientSettings(ddp_config=ddp(**{name: True}))
    settings.check_run(ParallelLayout(), 1, CUDA)
    with refuses(ValueError, f"{name}=True"):
        settings.check_run(ParallelLayout(), 1, CPU)


def test_an_average_over_ranks_contradicts_a_sum_over_tokens() -> None:
    per_token: Any = SimpleNamespace(calculate_per_token_loss=True)
    with refuses(ValueError, "average_in_collective=True"):
        wrap_chunks([nn.Linear(1, 1)], per_token, None, ddp(average_in_collective=True))


# CommunicationOptions


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"pipeline_model_parallel_comm_backend": "gloo"}, ValueError),
        ({"sharp_enabled_group": "tp", "use_sharp": True}, ValueError),
        ({"sharp_enabled_group": "dp"}, ValueError),
        ({"high_priority_stream_groups": ["dpcp"]}, ValueError),
        ({"nccl_communicator_config_path": "/nowhere.yaml"}, FileNotFoundError),
        ({"nccl_communicator_config_path": b"a"}, TypeError),
        ({"high_priority_stream_groups": "ep"}, TypeError),
        ({"use_sharp": 1}, TypeError),
        ({"batch_p2p_comm": "yes"}, TypeError),
    ],
)
def test_a_communication_option_that_is_wrong_in_itself(fields: Any, error: type[Exception]) -> None:
    with refuses(error, *fields):
        CommunicationOptions(**fields)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({PP: 4, VP: 2}, {"batch_p2p_comm": True}),
        ({PP: 2}, {"overlap_p2p_comm_warmup_flush": True}),
        ({}, {"use_sharp": True, "sharp_enabled_group": "dp_replica"}),
        ({}, {"pipeline_model_parallel_comm_backend": "ucc"}),
        ({PP: 2, VP: 2, "overlap_p2p_comm": False}, {}),
    ],
)
def test_a_communication_option_that_contradicts_the_strategy(arguments: Any, options: Any) -> None:
    with refuses(ValueError, *arguments, *options):
        MCoreStrategy(**arguments, communication=CommunicationOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"use_sharp": True},
        {"pipeline_model_parallel_comm_backend": "nccl"},
        {"high_priority_stream_groups": ["dp_cp"]},
        {"nccl_communicator_config_path": __file__},
        {"deallocate_pipeline_outputs": True},
    ],
)
def test_what_only_nccl_can_do_is_refused_on_the_cpu(options: dict[str, Any]) -> None:
    given = CommunicationOptions(**options)
    assert not list(given.device_faults("cuda"))
    [sentence] = given.device_faults("cpu")
    says(sentence, *options)


def test_options_reach_megatrons_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(process_groups.parallel_state, "initialize_model_parallel", lambda **given: seen.append(given))
    monkeypatch.setattr(process_groups, "seed_stage", lambda seed: None)
    process_groups.open_single_process()
    options = CommunicationOptions(use_sharp=True, high_priority_stream_groups=["ep"], create_gloo_process_groups=True)
    arguments = {"num_distributed_optimizer_instances": 3, **options.group_arguments()}
    try:
        process_groups.open_process_groups(ParallelLayout(), 1, process_groups.timedelta(seconds=61), arguments)
    finally:
        process_groups.close_process_groups()
    [given] = seen
    wanted = {
        "num_distributed_optimizer_instances": 3,
        "use_sharp": True,
        "sharp_enabled_group": None,
        "high_priority_stream_groups": ["ep"],
        "create_gloo_process_groups": True,
        "nccl_communicator_config_path": None,
        "pipeline_model_parallel_comm_backend": None,
        "distributed_timeout_minutes": 2,
    }
    assert {name: given[name] for name in wanted} == wanted


def test_options_reach_the_models_config() -> None:
    two, chunks = ParallelLayout(pipeline_model_parallel_size=2), ParallelLayout(**{PP: 2, VP: 2})
    plain = CommunicationOptions()
    assert plain.megatron_fields(two, False, CPU)["batch_p2p_comm"] is True
    assert plain.megatron_fields(chunks, True, CPU)["batch_p2p_comm"] is False
    assert plain.megatron_fields(two, False, CPU)["deallocate_pipeline_outputs"] is False
    assert plain.megatron_fields(two, False, CUDA)["deallocate_pipeline_outputs"] is True
    assert plain.megatron_fields(ParallelLayout(), False, CUDA)["deallocate_pipeline_outputs"] is False
    kept = dataclasses.replace(plain, deallocate_pipeline_outputs=False, batch_p2p_comm=False)
    assert not any(kept.megatron_fields(two, False, CUDA).values())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({PP: 2, "microbatch_group_size_per_vp_stage": 2}, ValueError),
        ({PP: 4, VP: 2, "microbatch_group_size_per_vp_stage": 3}, ValueError),
        ({PP: 2, VP: 2, "microbatch_group_size_per_vp_stage": 2.0}, TypeError),
    ],
)
def test_a_group_of_microbatches_that_cannot_be(arguments: Any, error: type[Exception]) -> None:
    with refuses(error, *arguments):
        MCoreStrategy(**arguments)


def test_a_run_takes_the_wanted_group_if_its_microbatches_fill_it() -> None:
    layout = ParallelLayout(**{PP: 2, VP: 2})
    assert [layout.microbatch_group_size(count, 4) for count in (2, 4, 5, 6, 8)] == [2, 4, 2, 4, 4]


# Tensor-parallel overlap

SEQUENCE = ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("given", "layout", "error"),
    [
        ((True, None), ParallelLayout(), ValueError),
        ((False, "x.yaml"), SEQUENCE, ValueError),
        ((True, "/nowhere.yaml"), SEQUENCE, FileNotFoundError),
        ((1, None), SEQUENCE, TypeError),
    ],
)
def test_an_overlap_that_cannot_be(given: Any, layout: ParallelLayout, error: type[Exception]) -> None:
    with refuses(error):
        TensorParallelOverlap(*given, layout)


def test_an_overlap_needs_cuda_and_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = TensorParallelOverlap(True, None, SEQUENCE)
    with refuses(ValueError, "'cpu'"):
        overlap.check_device(CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses(ModuleNotFoundError, "needs the package transformer_engine"):
        overlap.check_device(CUDA)
    TensorParallelOverlap(False, None, ParallelLayout()).check_device(CPU)


def model(**fields: Any) -> Any:
    """Return what the buffers read of a TransformerConfig."""
    defaults = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1, "first_last_layers_bf16": False}
    sizes = {"context_parallel_size": 2, "hidden_size": 64, TP: 4, "tp_comm_bootstrap_backend": "nccl", "fp8": None}
    return SimpleNamespace(**{**sizes, **defaults, **fields})


MODES = SimpleNamespace(UserBufferQuantizationMode=SimpleNamespace(FP8="fp8", NONE="none"))


def test_the_buffers_have_the_shape_of_a_microbatch_and_the_types_of_its_layers() -> None:
    given = user_buffer_arguments((128, 3), model(), {"qkv_fprop": {}}, MODES)
    assert given == {
        "shape": [192, 64],
        "tp_size": 4,
        "ub_cfgs": {"qkv_fprop": {}},
        "bootstrap_backend": "nccl",
        "quantization_modes": ["none"],
    }
    ends = user_buffer_arguments((128, 3), model(fp8="hybrid", first_last_layers_bf16=True), {}, MODES)
    assert ends["quantization_modes"] == ["fp8", "none"]


def test_the_buffers_are_made_once_for_one_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    engine = SimpleNamespace(**vars(MODES), initialize_ub=lambda **given: made.append(given), destroy_ub=made.clear)
    imported = {"transformer_engine.pytorch.module.base": engine}
    real = __import__("importlib").import_module
    monkeypatch.setattr("importlib.import_module", lambda name: imported.get(name) or real(name))
    path = tmp_path / "buffers.yaml"
    path.write_text("proj_fprop:\n  method: pipeline\n")
    overlap = TensorParallelOverlap(True, str(path), SEQUENCE)
    with refuses(ValueError, "needs to know the one shape of all"):
        overlap.open(None, model())
    for _ in range(2):
        overlap.open((128, 3), model())
    assert [given["ub_cfgs"] for given in made] == [{"proj_fprop": {"method": "pipeline"}}]
    with refuses(RuntimeError, "allocated buffers for microbatches of"):
        overlap.open((128, 1), model())
    overlap.close()
    assert made == []


@pytest.mark.parametrize(
    ("layout", "capability", "connections", "is_told"),
    [
        ({TP: 2}, (9, 0), None, True),
        ({"context_parallel_size": 2}, (9, 0), "8", True),
        ({TP: 2}, (9, 0), "1", False),
        ({TP: 2}, (10, 0), None, False),
        ({PP: 2}, (9, 0), None, False),
    ],
)
def test_a_gpu_that_may_overtake_its_communication_is_named(
    layout: dict[str, int], capability: tuple[int, int], connections: str | None, is_told: bool
) -> None:
    sentence = queue_hint(ParallelLayout(**layout), capability, connections)
    assert (sentence is not None) == is_told
    assert sentence is None or "CUDA_DEVICE_MAX_CONNECTIONS=1" in sentence


def test_the_adapters_of_a_class_share_one_class() -> None:
    def adapter(user: torch.optim.Optimizer) -> MCoreOptimizer:
        megatron: Any = None
        return optimizer_class(WrappedOptimizer, type(user))(user, megatron, [], [], inline=True)

    parameters = [nn.Parameter(torch.zeros(1))]
    one, other = (adapter(torch.optim.AdamW(parameters)) for _ in range(2))
    sgd = adapter(torch.optim.SGD(parameters, lr=0.1))
    assert type(one) is type(other)
    assert isinstance(one, torch.optim.AdamW)
    assert type(sgd) is not type(one)


def test_zeros_are_counted_before_a_step_that_may_reuse_the_memory_of_gradients() -> None:
    megatron = mock.MagicMock(chained_optimizers=[], param_groups=[])
    megatron.prepare_grads.return_value = False
    optimizer = RebuiltOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), megatron, [], [], inline=True)
    optimizer.clip_grad_value(1.0)
    optimizer.step()
    calls = [name for name, *_ in megatron.method_calls]
    assert calls == ["prepare_grads", "get_grad_norm", "count_zeros", "step_with_ready_grads"]


def test_a_decision_is_taken_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = MCoreStrategy()
    strategy.parallel_devices = [torch.device("meta")]  # where nothing can be read
    assert strategy.reduce_boolean_decision(True)
    opened = process_groups.open_single_process()
    try:
        for decision in (True, False):
            assert strategy.reduce_boolean_decision(decision) is decision
            assert strategy.reduce_boolean_decision(decision, all=False) is decision
    finally:
        if opened:
            torch.distributed.destroy_process_group()
