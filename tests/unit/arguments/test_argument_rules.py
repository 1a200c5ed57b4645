# SPDX-License-Identifier: Apache-2.0
"""What argument classes refuse: wrong types and choices, unknown names, fields that contradict each other."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from lightning_mcore.arguments import (
    DistributingParallelArguments,
    Fp8Arguments,
    LoraArguments,
    MegatronArguments,
    RayArguments,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    parse_arguments,
)
from lightning_mcore.arguments.llamafactory.training import TrainingArguments as Composed
from lightning_mcore.arguments.mapping import _has_experts
from lightning_mcore.arguments.parallel import load_additional_configs
from tests.support.hf_models import save_tiny
from tests.support.sentences import refuses

PP2 = {"pipeline_model_parallel_size": 2}
CHECKPOINTING = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))
"""What this release of transformers calls it."""
EP2 = {"expert_model_parallel_size": 2}

CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"tensor_model_parallel_size": 0},
    {"sequence_parallel": True},
    EP2 | {"tensor_model_parallel_size": 2},
    {"virtual_pipeline_model_parallel_size": 2},
    {"overlap_p2p_comm": True},
    PP2 | {"pipeline_model_parallel_layout": "Et|tq"},
    PP2 | {"pipeline_model_parallel_layout": "Et|t|tL"},
    PP2 | {"pipeline_model_parallel_layout": "Et|tL", "virtual_pipeline_model_parallel_size": 2},
    PP2 | {"pipeline_model_parallel_layout": "Et|tL", "account_for_loss_in_pipeline_split": True},
    EP2 | {"variable_seq_lengths": True, "moe_token_dispatcher_type": "allgather"},
    {
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "allgather",
        "additional_configs": {"num_moe_experts": 4},
    },
    {"recompute_method": "uniform"},
    {"recompute_granularity": "selective", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block"},
    {"recompute_granularity": "full", "recompute_num_layers": 2},
    {"recompute_granularity": "selective", "recompute_modules": "mlp,core_atn"},
    {"recompute_modules": "mlp"},
    {"recompute_granularity": "full", "moe_layer_recompute": True},
    {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "allgather"},
    {"moe_pad_expert_input_to_capacity": True},
    {"mtp_num_layers": -1},
    {"fp8_param": True},
    {"use_megatron_fsdp": True},
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"},
    PP2 | {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    {"data_parallel_sharding_strategy": "optim_grads"},
    {"overlap_param_gather": True},
    {"overlap_param_gather": True, "use_distributed_optimizer": True},
    {"ddp_bucket_size": 100},
    {"ddp_average_in_collective": True},
    {"optimizer_cpu_offload": True},
    {"optimizer_cpu_offload": True, "use_distributed_optimizer": True, "optimizer_offload_fraction": 0.0},
    {"optimizer_offload_fraction": 0.5},
    {"optimizer_offload_fraction": 2.0},
    {"distrib_optim_fully_reshardable_mem_efficient": True},
    {"additional_configs": {"num_expert": 4}},
    {"additional_configs": {"params_dtype": "bf16"}},
    {"additional_configs": {"timers": 1}},
    {"additional_configs": {"fp4": "e2m1"}},
    {"moe_router_dtype": "fp32", "additional_configs": {"moe_router_dtype": "fp64"}},
    {"additional_configs": "[1]"},
    {"additional_configs": "{1}"},
)

OF_TRAINING: tuple[dict[str, Any], ...] = (
    {"bf16": True, "fp16": True},
    {"bf16_full_eval": True},
    {"fp8_recipe": "delayed"},
    {"bf16": True, "fp8": "hybrid", "fp8_param": True},
    {"optim": "adafactor"},
    {"optim": "sgd"},
    {"optim": "adamw_torch", "optimizer": "sgd"},
    {"optimizer": "sgd", "use_distributed_optimizer": True},
    {"lr_scheduler_type": "greedy"},
    {"lr_scheduler_type": "constant", "warmup_steps": 2},
    {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"foo": 1}},
    {"lr_scheduler_type": "cosine_with_min_lr"},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}},
    {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"min_lr": 0.1}},
    {"warmup_steps": 1.5},
    {"learning_rate": -1.0},
    {"weight_decay": -1.0},
    {"dataloader_num_workers": -1},
    {"adam_beta2": 1.0},
    {"seed": -1},
    {"num_train_epochs": 1.5},
    {"max_steps": 0},
    {"gradient_accumulation_steps": 0},
    {"max_grad_norm": -1.0},
    {"ddp_timeout": 0},
    {"ddp_backend": "mpi"},
    {"ddp_find_unused_parameters": True},
    {"average_tokens_across_devices": False},
    {"gradient_checkpointing": True, "recompute_granularity": "selective"},
    {CHECKPOINTING: True, "moe_layer_recompute": True},
    {"logging_strategy": "epoch"},
    {"logging_steps": 0},
    {"save_steps": 0.5},
    {"save_steps": 1.5},
    {"logging_first_step": True},
    {"eval_steps": 5},
    {"eval_on_start": True},
    {"save_strategy": "no", "save_hf_model": True},
    {"save_total_limit": 0},
    {"save_strategy": "best"},
    {"save_strategy": "best", "metric_for_best_model": "loss"},
    {"metric_for_best_model": "loss"},
    {"metric_for_best_model": "rouge"},
    {"greater_is_better": True},
    {"report_to": "comet_ml"},
    {"additional_configs": {"bf16": True}},
)

WRONG_TYPES: tuple[tuple[dict[str, Any], type[Exception]], ...] = (
    ({"tensor_model_parallel_size": "2"}, TypeError),
    ({"tensor_model_parallel_size": 2.0}, TypeError),
    ({"tensor_model_parallel_size": True}, TypeError),
    ({"sequence_parallel": "yes"}, TypeError),
    ({"sequence_parallel": None}, TypeError),
    ({"recompute_modules": [1]}, TypeError),
    ({"recompute_method": "recompute"}, ValueError),
    ({"moe_token_dispatcher_type": "all2all"}, ValueError),
    ({"optimizer": "muon"}, ValueError),
    ({"learning_rate": "1e-5"}, TypeError),
    ({"num_train_epochs": "3"}, TypeError),
    ({"eval_strategy": False}, ValueError),
    ({"lr_scheduler_type": 5}, ValueError),
    ({"lr_scheduler_type": "cosin"}, ValueError),
    ({"save_strategy": "never"}, ValueError),
    ({"gradient_accumulation_steps": None}, TypeError),
)


@pytest.mark.parametrize(
    "values",
    CONTRADICTIONS,
)
def test_contradictions_are_refused_by_every_class_that_has_the_fields(values: dict[str, Any], tmp_path: Path) -> None:
    for kind, more in ((MegatronArguments, {}), (TrainingArguments, {"output_dir": str(tmp_path)})):
        with refuses((ValueError, FileNotFoundError), *values):
            kind(**values, **more)


@pytest.mark.parametrize(
    "values",
    OF_TRAINING,
)
def test_contradictions_with_transformers_own_arguments(values: dict[str, Any], tmp_path: Path) -> None:
    for kind in (TrainingArguments, Seq2SeqTrainingArguments):
        with refuses(ValueError, *values):
            kind(output_dir=str(tmp_path), **values)


@pytest.mark.parametrize(
    ("values", "kind"),
    WRONG_TYPES,
)
def test_a_value_of_a_wrong_type_names_the_option_the_value_and_what_is_allowed(
    values: dict[str, Any], kind: type[Exception], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"output_dir": str(tmp_path), **values}), encoding="utf-8")
    for make in (lambda: parse_arguments(path), lambda: TrainingArguments.from_json_file(str(path))):
        with refuses(kind, *values):
            make()


def test_a_misspelt_name_has_a_neighbour_whichever_way_it_comes(tmp_path: Path) -> None:
    values = {"tensor_model_paralel_size": 2}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    right = "did you mean 'tensor_model_parallel_size'"
    for source in (values, path, [str(path)], ["--tensor_model_paralel_size", "2"], ["--tensor-model-paralel-size=2"]):
        with refuses(ValueError, right):
            parse_arguments(source)
    (tmp_path / "run.json").write_text(json.dumps(values), encoding="utf-8")
    with refuses(ValueError, right):
        DistributingParallelArguments.from_json_file(str(tmp_path / "run.json"))


def test_files_that_are_not_there_or_not_right(tmp_path: Path) -> None:
    for name in ("none.yaml", "none.json"):
        with pytest.raises(FileNotFoundError, match="is not a file"):
            parse_arguments(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        TrainingArguments.from_json_file(str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=r"additional_configs='none\.json' is not a file"):
        DistributingParallelArguments(additional_configs="none.json")
    for name, text in (("a.yaml", "a: ]"), ("b.json", "{"), ("c.yaml", "- 1"), ("d.json", "[]")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"is not|does not hold keys"):
            parse_arguments(tmp_path / name)

    for name in ("e.txt", "e"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
        with pytest.raises(ValueError, match="is neither YAML nor JSON"):
            parse_arguments(tmp_path / name)


def test_a_file_of_arguments_is_read_as_yaml_1_2_and_names_a_key_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: {tmp_path}\nlearning_rate: 1e-5\n", encoding="utf-8")
    (arguments,) = parse_arguments(path)
    assert arguments.learning_rate == 1e-5
    path.write_text("seed: 1\nseed: 2\n", encoding="utf-8")
    with refuses(ValueError, "'seed'"):
        parse_arguments(path)


def test_wrong_words_end_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--recompute_method", "recompute"], ["--tensor_model_parallel_size", "two"]):
        with pytest.raises(SystemExit) as end:
            parse_arguments(words)
        assert end.value.code == 2
        assert words[0] in capsys.readouterr().err.splitlines()[-1]


# ---- what is not refused


def test_a_dense_model_may_have_rows_of_different_lengths(tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path), "variable_seq_lengths": True}
    args = TrainingArguments(**given, moe_token_dispatcher_type="allgather")
    assert args.allow_variable_seq_lengths()
    args.settings()
    experts = tmp_path / "experts"
    experts.mkdir()
    (experts / "config.json").write_text(json.dumps({"num_experts": 8}), encoding="utf-8")
    with refuses(ValueError, "variable_seq_lengths=True"):
        args.settings(str(experts))
    TrainingArguments(**given).settings(str(experts))


@pytest.mark.parametrize(("stages", "asked", "allowed"), [(None, False, True), (2, False, False), (2, True, True)])
def test_rows_may_differ_without_stages_or_when_asked_for(stages: int | None, asked: bool, allowed: bool) -> None:
    args = DistributingParallelArguments(pipeline_model_parallel_size=stages, variable_seq_lengths=asked)
    assert args.allow_variable_seq_lengths() == allowed


def test_the_layout_string_fixes_the_virtual_pipeline() -> None:
    args = DistributingParallelArguments(**PP2, pipeline_model_parallel_layout="Et|t|t|tL")
    assert args.virtual_pipeline_model_parallel_size == 2
    plain = DistributingParallelArguments(**PP2, pipeline_model_parallel_layout="Et|tL")
    assert plain.virtual_pipeline_model_parallel_size is None


def test_bf16_accumulates_gradients_in_fp32(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True)
    assert args.accumulate_allreduce_grads_in_fp32
    assert args.precision().ddp_fields()["grad_reduce_in_fp32"]


def test_a_recipe_alone_turns_fp8_on(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True, fp8_recipe="tensorwise")
    assert args.precision().fp8.is_on


def test_full_recompute_alone_means_uniform_and_one_layer(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), recompute_granularity="full")
    transformer = args.settings().model["transformer"]
    assert (transformer["recompute_method"], transformer["recompute_num_layers"]) == ("uniform", 1)


def test_none_keeps_what_the_checkpoint_says(tmp_path: Path) -> None:
    assert TrainingArguments(output_dir=str(tmp_path)).settings().model["transformer"] == {}
    assert "transformer_impl" not in TrainingArguments(output_dir=str(tmp_path)).settings().model


def test_additional_configs_come_as_a_dict_as_text_and_as_a_file(tmp_path: Path) -> None:
    extra = {"num_moe_experts": 4, "moe_router_dtype": "fp64"}
    path = tmp_path / "extra.json"
    path.write_text(json.dumps(extra), encoding="utf-8")
    for given in (extra, json.dumps(extra), str(path)):
        args = DistributingParallelArguments(additional_configs=given, tensor_model_parallel_size=2)
        assert args.moe_router_dtype == "fp64"
        assert args.extra_fields == {"num_moe_experts": 4}
        config = args.get_config_dict()
        assert config.items() >= {**extra, "tensor_model_parallel_size": 2}.items()
        assert "pipeline_model_parallel_size" not in config


# ---- LLaMA-Factory's


def test_classes_that_share_a_field_are_parsed_together(tmp_path: Path) -> None:
    """``fp8`` is a format in one and a yes or no in the other; from words, a dict or a file."""
    values = {
        "output_dir": str(tmp_path),
        "bf16": True,
        "fp8": True,
        "fp8_backend": "te",
        "seed": 7,
        "report_to": "none",
    }
    (tmp_path / "run.json").write_text(json.dumps(values), encoding="utf-8")
    words = ["--output_dir", str(tmp_path), "--bf16", "--fp8", "--fp8_backend=te", "--seed", "7", "--report-to", "none"]
    for source in (words, values, str(tmp_path / "run.json")):
        arguments, fp8 = parse_arguments(source, TrainingArguments, Fp8Arguments)
        assert (fp8.fp8, fp8.fp8_backend) == (True, "te")
        assert (arguments.fp8, arguments.fp8_recipe, arguments.seed, arguments.bf16) == ("hybrid", "delayed", 7, True)
        assert arguments.additional_configs == {"fp8_amax_history_len": 16}
        assert parse_arguments(source, Fp8Arguments, TrainingArguments) == (fp8, arguments)
    for wrong, sentence in (
        (["--sed", "7"], "unknown option 'sed'; did you mean 'seed'"),
        (["--seed"], "--seed: it needs a value"),
        (["seven"], "'seven' belongs to no option"),
    ):
        with refuses(ValueError, sentence):
            parse_arguments(wrong, TrainingArguments, Fp8Arguments)
    first, second = parse_arguments(["--seed", "3", "--output_dir", "a"], TrainingArguments, Seq2SeqTrainingArguments)
    assert (first.seed, second.seed) == (3, 3)


def test_the_composed_arguments_are_those_of_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USE_RAY", raising=False)
    given = {"output_dir": str(tmp_path), "bf16": True, "seed": 7}
    composed = Composed(**given, ray_num_workers=4, fp8=True, fp8_backend="te", overwrite_output_dir=True)
    ray = RayArguments(ray_num_workers=4)
    parts = TrainingArguments(**Fp8Arguments(fp8=True, fp8_backend="te").merged_into(given))
    assert composed.settings() == parts.settings()
    assert composed.ray_settings() == ray.ray_settings()
    assert dataclasses.replace(composed, seed=8).settings() == dataclasses.replace(parts, seed=8).settings()
    words = [
        "--output_dir",
        str(tmp_path),
        "--bf16",
        "--seed",
        "7",
        "--ray_num_workers",
        "4",
        "--fp8",
        "--fp8_backend=te",
    ]
    assert parse_arguments([*words, "--overwrite_output_dir"], Composed) == (composed,)
    assert Composed(**given).settings() == TrainingArguments(**given).settings()
    with refuses(RuntimeError, "ray_num_workers=4"):
        composed.trainer()
    assert Composed(**given).launch(composed, lambda word: word, "here") == "here"
    with refuses(ValueError, "fp8_backend='torchao'"):
        Composed(**given, fp8=True, fp8_backend="torchao")
    with refuses(TypeError, "ray_num_workers='4'"):
        Composed(**given, ray_num_workers="4")  # type: ignore[arg-type]


def test_deepspeed_in_python_is_what_it_is_in_a_file(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}', encoding="utf-8")
    for given in (str(config), json.loads(config.read_text())):
        arguments = TrainingArguments(output_dir=str(tmp_path), deepspeed=given)
        assert (arguments.use_distributed_optimizer, arguments.deepspeed) == (True, None)
        [note] = arguments.settings().notes
        assert "(ZeRO stage 2) becomes use_distributed_optimizer: true" in note
    assert not TrainingArguments(output_dir=str(tmp_path), deepspeed={}).use_distributed_optimizer
    with refuses(ValueError, "asks for offload_param; leave it out"):
        TrainingArguments(
            output_dir=str(tmp_path), deepspeed={"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
        )
    with refuses(ValueError, "has gradient_accumulation_steps: 4, and"):
        TrainingArguments(
            output_dir=str(tmp_path), gradient_accumulation_steps=2, deepspeed={"gradient_accumulation_steps": 4}
        )
    with refuses(FileNotFoundError, "deepspeed: none.json is not a file"):
        TrainingArguments(output_dir=str(tmp_path), deepspeed="none.json")


def test_a_setting_of_adapters_is_refused_by_its_own_name() -> None:
    with refuses(ValueError, "lora_rank=0"):
        LoraArguments(lora_target="all", lora_rank=0)


def test_names_are_those_of_mcore_adapter(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"tensor_model_parallel_size": 2}))
    read = DistributingParallelArguments.from_json_file(json_file_path=str(tmp_path / "run.json"))
    assert read.tensor_model_parallel_size == 2
    for given in ("mlp, core_attn", ["mlp", "core_attn"]):
        arguments = DistributingParallelArguments(recompute_granularity="selective", recompute_modules=given)
        assert arguments.recompute_modules == ["mlp", "core_attn"]


def test_the_switches_of_gpus_are_left_out_on_a_cpu_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them chooses a kernel, a transport or a place in memory; the note has the names of the arguments."""
    given: dict[str, Any] = {
        **{"output_dir": str(tmp_path), "apply_rope_fusion": True, "moe_grouped_gemm": True, "ddp_backend": "nccl"},
        **{"transformer_impl": "transformer_engine", "use_distributed_optimizer": True, "optimizer_cpu_offload": True},
        **{"ddp_average_in_collective": True, "calculate_per_token_loss": False, "bias_activation_fusion": True},
        "additional_configs": {"attention_backend": "flash", "deallocate_pipeline_outputs": True, "qk_clip": True},
    }
    arguments = TrainingArguments(**given)
    assert arguments.settings().notes == ()
    assert arguments.settings().strategy["process_group_backend"] == "nccl"
    assert arguments.settings() == TrainingArguments(**given).settings(on_cpu=False)
    on_cpu = arguments.settings(on_cpu=True)
    [note] = on_cpu.notes
    assert note == (
        "on a CPU, transformer_impl, apply_rope_fusion, moe_grouped_gemm, attention_backend, ddp_backend,"
        " optimizer_cpu_offload, ddp_average_in_collective, deallocate_pipeline_outputs have no effect and are left"
        " out; the numbers are the same"
    )
    kept = {"bias_activation_fusion": True, "calculate_per_token_loss": False, "qk_clip": True}
    assert on_cpu.model["transformer"] == kept
    assert "transformer_impl" not in on_cpu.model
    assert not {"process_group_backend", "optimizer_config", "communication"} & on_cpu.strategy.keys()
    assert on_cpu.strategy["ddp_config"] == {"check_for_nan_in_grad": True}
    assert TrainingArguments(**given, use_cpu=True).settings() == dataclasses.replace(
        on_cpu, trainer={**on_cpu.trainer, "accelerator": "cpu"}
    )
    one = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, moe_grouped_gemm=True)
    assert one.settings().notes == (
        "on a CPU, moe_grouped_gemm has no effect and is left out; the numbers are the same",
    )
    without = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, moe_grouped_gemm=False)
    assert without.settings().model["transformer"]["moe_grouped_gemm"] is False
    assert without.settings().notes == ()
    folder = str(save_tiny("llama", tmp_path / "llama"))
    TrainingArguments(output_dir=str(tmp_path), use_cpu=True, apply_rope_fusion=True).model(folder)
    assert "on a CPU, apply_rope_fusion has no effect" in caplog.text


def test_fp8_of_llama_factory_is_transformer_engines(tmp_path: Path) -> None:
    for backend in ("auto", "te"):
        merged = Fp8Arguments(fp8=True, fp8_backend=backend).merged_into({"bf16": True, "output_dir": str(tmp_path)})
        fp8 = TrainingArguments(**merged).precision().fp8
        assert (fp8.format, fp8.recipe, fp8.fp8_amax_history_len) == ("hybrid", "delayed", 16)
    tensorwise = Fp8Arguments(fp8=True).merged_into({"fp8_recipe": "tensorwise"})
    assert tensorwise == {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    assert Fp8Arguments().merged_into({"a": 1}) == {"a": 1}
    for backend in ("torchao", "msamp"):
        with refuses(ValueError, f"fp8_backend='{backend}'"):
            Fp8Arguments(fp8=True, fp8_backend=backend)
    with refuses(ValueError, "fp8_enable_fsdp_float8_all_gather=True"):
        Fp8Arguments(fp8=True, fp8_enable_fsdp_float8_all_gather=True)
    with refuses(ValueError, "fp8=True"):
        Fp8Arguments(fp8_backend="te")
    with refuses(ValueError, "'auto'"):
        Fp8Arguments(fp8_backend="cublas")  # type: ignore[arg-type]


# ---- what is made


def test_the_trainer_takes_lightnings_arguments_and_no_others(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, save_strategy="no")
    with refuses(TypeError, "'device'"):
        args.trainer(device=2)
    trainer = args.trainer(devices=1, max_steps=5, enable_model_summary=False)
    assert trainer.max_steps == 5


def test_wandb_is_not_dropped(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), report_to="wandb", use_cpu=True)
    with refuses(ModuleNotFoundError, "report_to='wandb'"):
        args.trainer(devices=1)


def test_a_trainer_without_logger_has_no_learning_rate_to_log(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), report_to="csv", use_cpu=True)
    names = [type(callback).__name__ for callback in args.trainer(devices=1, logger=False).callbacks]  # type: ignore
    assert "LearningRateMonitor" not in names


def test_multi_token_prediction_of_a_checkpoint_stays_unless_it_is_dropped(tmp_path: Path) -> None:
    folder = str(save_tiny("deepseek_v3", tmp_path / "model", num_nextn_predict_layers=1))
    for given, layers in ((None, 1), (0, None)):
        args = TrainingArguments(output_dir=str(tmp_path), mtp_num_layers=given)
        assert args.model(folder).transformer["mtp_num_layers"] == layers


def test_true_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint="true")
    with refuses(FileNotFoundError, "resume_from_checkpoint='true'"):
        _ = args.ckpt_path
    for age, name in enumerate(("checkpoint-20.ckpt", "checkpoint-9.ckpt", "last-preempted.ckpt")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert args.ckpt_path == str(tmp_path / "checkpoint-20.ckpt")
    assert TrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint="false").ckpt_path is None


@pytest.mark.parametrize(("given", "read"), [(True, "true"), (False, "false")])
def test_resuming_is_a_yes_or_no_too_as_in_yaml(given: Any, read: str, tmp_path: Path) -> None:
    assert TrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint=given).resume_from_checkpoint == read


def test_an_evaluation_needs_something_to_evaluate_on(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), eval_strategy="epoch")
    with refuses(ValueError, "eval_strategy='epoch'"):
        args.data("train.jsonl", "tokenizer", 64)
    assert args.data("train.jsonl", "tokenizer", 64, overrides={"validation_share": 0.1}).validation_share == 0.1


def test_what_transformers_does_with_its_arguments_works(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), bf16=True, tensor_model_parallel_size=2)
    assert json.loads(args.to_json_string())["tensor_model_parallel_size"] == 2
    assert "tensor_model_parallel_size=2" in str(args)
    assert (args.world_size, args.n_gpu) == (1, 0)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_what_transformers_writes_about_its_defaults_can_be_read(suffix: str, tmp_path: Path) -> None:
    for theirs, ours in (
        (transformers.TrainingArguments, TrainingArguments),
        (transformers.Seq2SeqTrainingArguments, Seq2SeqTrainingArguments),
    ):
        written = theirs(str(tmp_path), use_cpu=True).to_dict()
        assert (written["hub_token"], type(written["accelerator_config"])) == ("<HUB_TOKEN>", dict)
        path = tmp_path / f"run.{suffix}"
        path.write_text(json.dumps(written) if suffix == "json" else yaml.safe_dump(written), encoding="utf-8")
        (read,) = parse_arguments(path, ours)
        assert {name: read.to_dict()[name] for name in written} == written
        for name, value in (("hub_token", "<MY_TOKEN>"), ("accelerator_config", {"split_batches": True})):
            with refuses(ValueError, name):
                ours(**{**written, name: value})


def test_a_name_that_is_like_no_other_is_not_answered_with_the_first_of_hundreds(tmp_path: Path) -> None:
    with refuses(ValueError, "'torchdynamo', which is like none of the "):
        parse_arguments({"output_dir": str(tmp_path), "torchdynamo": None})


def in_fresh_process(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_classes_without_transformers_import_nothing_heavy() -> None:
    script = """
import sys
from lightning_mcore.arguments import DistributingParallelArguments, Fp8Arguments, MegatronArguments, RayArguments
DistributingParallelArguments(tensor_model_parallel_size=2)
MegatronArguments(use_distributed_optimizer=True)
RayArguments(), Fp8Arguments()
print([name for name in ("torch", "transformers", "lightning", "megatron.core") if name in sys.modules])
"""
    assert in_fresh_process(script).strip() == "[]"


def test_training_arguments_touch_no_device_and_need_no_accelerate() -> None:
    script = """
import importlib.util
import sys
find_spec = importlib.util.find_spec
hidden = ("accelerate", "peft")  # which imports it
importlib.util.find_spec = lambda name, *rest: None if name in hidden else find_spec(name, *rest)
import torch
def refuse(*_):
    raise AssertionError("a device was asked for")
torch.cuda.set_device = refuse
from lightning_mcore.arguments import TrainingArguments
args = TrainingArguments(output_dir="x", bf16=True, tf32=True, fp8_recipe="delayed")
settings = args.settings(devices=8)
heavy = [name for name in ("lightning", "megatron.core", "accelerate") if name in sys.modules]
print(heavy, torch.cuda.is_initialized(), torch.get_float32_matmul_precision(), settings.trainer["devices"])
"""
    assert in_fresh_process(script).strip() == "[] False highest 8"  # TF32 is set when the trainer is made


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\xff", "not text in UTF-8: .*; save it in UTF-8", id="utf-8"),
        pytest.param(b"[" * 100_000, "not JSON: .*; use less nesting and shorter numbers", id="deep"),
        pytest.param(b'{"a": ' + b"1" * 5000 + b"}", "not JSON: .*; use less nesting and shorter numbers", id="long"),
    ],
)
def test_a_damaged_file_of_arguments_is_refused_in_a_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"run\.json is {message}$"):
        TrainingArguments.from_json_file(str(path))
    with pytest.raises(ValueError, match=r"additional_configs=.*run\.json' is not JSON: .*; give an object"):
        load_additional_configs(str(path))
    with pytest.raises(ValueError, match=r"ray_init_kwargs=.* is not JSON"):
        RayArguments(ray_init_kwargs=content.decode("latin-1"))


@pytest.mark.parametrize("content", [b"\xff", b"[" * 5000, b'{"num_experts": "a", "num_local_experts": [1]}'])
def test_a_damaged_config_has_no_experts_until_the_model_is_opened(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert not _has_experts(str(tmp_path))


def test_a_trainer_from_arguments_hides_hints_about_packages_that_are_not_installed(tmp_path: Path) -> None:
    program = (
        "from lightning_mcore.arguments import TrainingArguments\n"
        f"TrainingArguments(output_dir={str(tmp_path)!r}, use_cpu=True, report_to='none').trainer(devices=2)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "not installed" not in done.stderr
