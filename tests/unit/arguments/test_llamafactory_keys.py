# SPDX-License-Identifier: Apache-2.0
"""Every key of a LLaMA-Factory file: supported, or refused with a reason; nothing silently."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.arguments import Seq2SeqTrainingArguments
from lightning_mcore.arguments.documents import read_file
from lightning_mcore.arguments.llamafactory.keys import REFUSED, FactoryKeys
from lightning_mcore.arguments.llamafactory.output import where_to_resume
from lightning_mcore.arguments.llamafactory.rules import RAY_KEYS
from lightning_mcore.arguments.llamafactory.run import FactoryRun, read_run
from lightning_mcore.cli import guard, main
from lightning_mcore.cli.llamafactory import run
from lightning_mcore.cli.plan import run as plan
from tests.support.factory_files import LLAMA3, QWEN3_LORA, QWEN3_MOE, TRAIN_LORA, write_run
from tests.support.sentences import refuses, says

# Of the model, the data, the fine-tuning, the generation, the training beyond transformers, and Megatron-Bridge.
_NAMES = """
model_name_or_path adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer resize_vocab split_special_tokens
add_tokens add_special_tokens new_special_tokens_config init_special_tokens model_revision low_cpu_mem_usage
rope_scaling flash_attn shift_attn mixture_of_depths use_unsloth use_unsloth_gc enable_liger_kernel moe_aux_loss_coef
disable_gradient_checkpointing use_reentrant_gc upcast_layernorm upcast_lmhead_output train_from_scratch infer_backend
offload_folder use_kv_cache use_v1_kernels infer_dtype hf_hub_token ms_hub_token om_hub_token print_param_status
trust_remote_code quantization_method quantization_bit quantization_type double_quantization quantization_device_map
image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps
video_maxlen use_audio_in_video audio_sampling_rate export_dir export_size export_device export_quantization_bit
export_quantization_dataset export_quantization_nsamples export_quantization_maxlen export_legacy_format
export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen
sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend use_kt kt_cpu_activation kt_weight_path
kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num
kt_lora_expert_intermediate_size template dataset eval_dataset dataset_dir media_dir cutoff_len train_on_prompt
mask_history streaming buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_batch_size
preprocessing_num_workers max_samples eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset packing
neat_packing tool_format default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system
freeze_trainable_layers freeze_trainable_modules freeze_extra_modules additional_target lora_alpha lora_dropout
lora_rank lora_target loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora pissa_init pissa_iter pissa_convert
create_new_adapter module_dropout oft_rank oft_block_size oft_target pref_beta pref_ftx pref_bco_weight pref_loss
dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm
ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model
reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha use_galore galore_target galore_rank
galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo apollo_target apollo_rank
apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front
use_badam badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode
badam_verbose use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key
swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret pure_bf16 stage finetuning_type use_llama_pro use_adam_mini
use_mca use_megatron_bridge use_hyper_parallel hyper_parallel_args hyper_parallel_cp_size use_muon use_dft_loss
use_asft_loss asft_alpha use_eaft_loss eaft_alpha freeze_vision_tower freeze_multi_modal_projector
freeze_language_model compute_accuracy disable_shuffling early_stopping_steps plot_loss
include_effective_tokens_per_second do_sample temperature top_p top_k num_beams max_length max_new_tokens
repetition_penalty length_penalty skip_special_tokens ray_num_workers ray_init_kwargs master_addr master_port
enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps
profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules fp8 fp8_backend
fp8_enable_fsdp_float8_all_gather overwrite_output_dir masked_softmax_fusion calculate_per_token_loss
use_packed_sequences mixed_precision megatron_pretrained_checkpoint export_hf_on_finish extra_config
"""
KEYS = _NAMES.split()
TRAINING = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
OWN = {field.name for field in dataclasses.fields(FactoryKeys)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("llama3"), {**LLAMA3, "cutoff_len": 48})


def read(file: str, *overrides: str) -> FactoryRun:
    return read_run(file, list(overrides))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_one_home(key: str) -> None:
    homes = [key in OWN, key in REFUSED, key in RAY_KEYS, key in TRAINING and key not in OWN]
    assert sum(homes) == 1


OF_TRANSFORMERS = {"deepspeed", "include_num_input_tokens_seen"}


def test_no_key_is_of_our_making() -> None:
    assert set(REFUSED) - set(KEYS) == {"kt_config"}
    assert set(KEYS) >= OWN - OF_TRANSFORMERS - {"sequence_packing", "warmup_ratio"}


ONE_OF_EACH_REASON = {reason: key for key, (_, reason) in REFUSED.items()}.values()


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_is_not_supported_passes_at_its_default_alone(file: str, key: str) -> None:
    default, reason = REFUSED[key]
    other = {bool: not default, int: 7, float: 0.77}.get(type(default), "other")
    with pytest.raises(ValueError, match=f"^{key}: ") as caught:
        read(file, f"{key}={other}")
    assert reason in str(caught.value)
    if key in ONE_OF_EACH_REASON:
        says(str(caught.value))
    assert read(file, f"{key}={'null' if default is None else default}").keys.stage == "sft"


def test_secrets_are_not_repeated(file: str) -> None:
    with refuses(ValueError, "hf_hub_token: ... asks for a model on a"):
        read(file, "hf_hub_token=hf_secret")


@pytest.mark.parametrize(
    ("override", "name", "expected"),
    [
        ("cutoff_len=64", "seq_length", 64),
        ("per_device_train_batch_size=3", "batch_size", 3),
        ("per_device_eval_batch_size=5", "eval_batch_size", 5),
        ("packing=true", "packing", True),
        ("neat_packing=true", "packing", True),
        ("use_packed_sequences=true", "packing", True),
        ("sequence_packing=true", "packing", True),
        ("disable_shuffling=true", "shuffle", False),
        ("val_size=0.25", "validation_share", 0.25),
        ("val_size=8", "validation_share", 8),
        ("buffer_size=5", "shuffle_buffer", 5),
        ("streaming=true", "streaming", True),
        ("preprocessing_num_workers=3", "num_proc", 3),
        ("preprocessing_num_workers=null", "num_proc", 1),
        ("dataloader_num_workers=1", "num_workers", 1),
        ("seed=3", "seed", 3),
        ("data_seed=4", "seed", 4),
        ("cache_dir=there", "cache_dir", "there"),
        ("pipeline_model_parallel_size=2", "pad_to_seq_length", True),
    ],
)
def test_a_key_of_the_data_lands_in_the_data_module(file: str, override: str, name: str, expected: Any) -> None:
    asked = read(file, override)
    assert asked.data_settings()[name] == expected
    assert read(file).data_settings()[name] != expected or override.endswith("null")
    if name != "streaming":
        assert getattr(asked.data(), name) == expected


@pytest.mark.parametrize(
    ("overrides", "name", "expected"),
    [
        (["train_on_prompt=true"], "loss_on", "all"),
        (["mask_history=true"], "loss_on", "last_assistant"),
        (["max_samples=7"], "max_samples", 7),
        (["cutoff_len=64"], "longest", 65),
        (["stage=pt"], "documents", True),
        (["stage=pt"], "longest", None),
        (["stage=pt"], "joined", True),
        (["stage=pt", "packing=false"], "joined", False),
    ],
)
def test_a_key_of_the_data_lands_in_its_reading(file: str, overrides: list[str], name: str, expected: Any) -> None:
    assert getattr(read(file, *overrides).data().reading, name) == expected
    assert getattr(read(file).data().reading, name) != expected or "packing=false" in overrides


@pytest.mark.parametrize(
    ("overrides", "name", "expected"),
    [
        ([], "name", "llama3"),
        (["default_system='Be brief.'"], "default_system", "Be brief."),
        (["template=qwen3"], "thinking", True),
        (["template=qwen3", "enable_thinking=false"], "thinking", False),
        (["template=qwen3", "preserve_thinking=true"], "keeps_thoughts", True),
    ],
)
def test_a_key_of_the_template_lands_in_it(file: str, overrides: list[str], name: str, expected: Any) -> None:
    template = read(file, *overrides).data().reading.template
    assert template is not None
    assert getattr(template, name) == expected


def test_without_a_template_the_tokenizer_says_how(file: str) -> None:
    without = read(file, "template=null").data().reading.template
    assert without is not None
    assert without.name == "empty"  # for a tokenizer that says nothing


@pytest.mark.parametrize(
    ("overrides", "name", "expected"),
    [
        (["moe_aux_loss_coef=0.01"], "moe_aux_loss_coeff", 0.01),
        (["bf16=null"], "bf16", True),
        (["mixed_precision=fp16_mixed", "bf16=false"], "fp16", True),
        (["mixed_precision=fp32", "bf16=false"], "bf16", False),
        (["fp8=true"], "fp8", "hybrid"),
        (["fp8=true", "fp8_backend=te"], "fp8", "hybrid"),
        (["fp8=e4m3"], "fp8", "e4m3"),
        (["fp8=false"], "fp8", None),
        (["masked_softmax_fusion=false"], "additional_configs", {"masked_softmax_fusion": False}),
        (["learning_rate=3e-6"], "learning_rate", 3e-6),
    ],
)
def test_a_key_of_the_training_lands_in_the_arguments(
    file: str, overrides: list[str], name: str, expected: Any
) -> None:
    if "bf16=null" in overrides:
        values = {key: value for key, value in LLAMA3.items() if key != "bf16"}
        file = write_run(Path(file).parent / "no-bf16", values)
        overrides = []
    assert getattr(read(file, *overrides).arguments, name) == expected


def test_a_run_of_megatron_bridge_has_its_defaults(tmp_path: Path) -> None:
    bridge = ("use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce")
    file = write_run(tmp_path, {key: value for key, value in LLAMA3.items() if key not in bridge})
    for overrides, expected in ((["use_megatron_bridge=true"], True), (["use_mca=true"], False), ([], False)):
        asked = read(file, *overrides)
        assert [getattr(asked.arguments, name) for name in bridge] == [expected] * 3


ZERO: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "fp16": {"enabled": "auto"}}


def of_one_optimizer(folder: Path) -> str:
    """Return a file that says nothing of a sharded optimizer."""
    left_out = ("use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce")
    return write_run(folder, {key: value for key, value in LLAMA3.items() if key not in left_out})


@pytest.mark.parametrize(("stage", "sharded"), [(0, False), (1, True), (2, True), (3, True)])
def test_a_stage_of_deepspeed_is_the_distributed_optimizer(tmp_path: Path, stage: int, sharded: bool) -> None:
    config = tmp_path / f"ds_z{stage}_config.json"
    config.write_text(json.dumps({**ZERO, "zero_optimization": {"stage": stage}}), encoding="utf-8")
    asked = read(of_one_optimizer(tmp_path), f"deepspeed={config}")
    assert bool(asked.arguments.use_distributed_optimizer) == sharded
    [note] = asked.notes
    assert note.startswith(f"deepspeed: {config} (ZeRO stage {stage}) becomes ")
    assert ("use_distributed_optimizer: true" in note) == sharded
    assert ("tensor_model_parallel_size" in note) == (stage == 3)
    assert asked.settings().notes == asked.notes  # where plan finds them


def test_deepspeed_may_stand_in_the_file_itself(tmp_path: Path) -> None:
    asked = read(of_one_optimizer(tmp_path), "deepspeed.zero_optimization.stage=1")
    assert asked.arguments.use_distributed_optimizer
    assert asked.notes[0].startswith("deepspeed: {...} (ZeRO stage 1) becomes")


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"optimizer": {"type": "Adam"}},
        {"scheduler": {"type": "WarmupLR"}},
        {"gradient_clipping": 0.5},
        {"train_micro_batch_size_per_gpu": 4},
        {"fp16": {"enabled": True}},
    ],
)
def test_what_deepspeed_would_do_otherwise_is_refused(tmp_path: Path, changes: Any) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**ZERO, **changes}), encoding="utf-8")
    with refuses(ValueError) as caught:
        read(of_one_optimizer(tmp_path), f"deepspeed={config}")
    assert str(caught.value).startswith(f"deepspeed: {config} ")


def test_a_config_of_deepspeed_that_contradicts_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file, config = of_one_optimizer(tmp_path), tmp_path / "ds.json"
    with refuses(FileNotFoundError, "is not a file; give the path of"):
        read(file, f"deepspeed={config}")
    for content, sentence in (("{", "is not JSON"), ("[" * 5000, "is not JSON"), ("[]", "holds a list, not an object")):
        config.write_text(content, encoding="utf-8")
        with refuses(ValueError, sentence):
            read(file, f"deepspeed={config}")
    config.write_text(json.dumps(ZERO), encoding="utf-8")
    with refuses(ValueError, "contradicts use_distributed_optimizer:"):
        read(file, f"deepspeed={config}", "use_distributed_optimizer=false")


def test_keys_that_megatron_carries_out_in_its_own_way_say_so(tmp_path: Path, file: str) -> None:
    asked = read(write_run(tmp_path, {key: value for key, value in LLAMA3.items() if key != "bf16"}), "pure_bf16=true")
    assert asked.arguments.bf16
    assert "fp32 copy of each weight" in asked.notes[0]
    for override in ("flash_attn=fa2", "enable_liger_kernel=true", "use_v1_kernels=true"):
        [note] = read(file, override).notes
        assert note.startswith(override.replace("=", ": ").replace("true", "True"))
        assert "Megatron's" in note
    assert read(file, "overwrite_cache=true").notes == ()


def test_a_count_of_tokens_is_replaced_by_their_speed(file: str) -> None:
    """LLaMA-Factory's web page writes this key into each file."""
    for value in ("true", "all"):
        [note] = read(file, f"include_num_input_tokens_seen={value}").notes
        assert "tokens_per_second" in note
    for value in ("false", "no"):
        assert read(file, f"include_num_input_tokens_seen={value}").notes == ()


def test_the_dft_loss_is_a_model_of_its_own(file: str) -> None:
    for override, name in (("use_dft_loss=true", "DFTModel"), ("use_dft_loss=false", "MCoreGPT")):
        assert type(read(file, override).model()).__name__ == name


def test_a_file_is_a_run_as_plain_data(file: str) -> None:
    settings = read_run(file, ["tensor_model_parallel_size=2"]).settings()
    assert settings.strategy["tensor_model_parallel_size"] == 2
    assert settings.model["path"] == str(Path(file).parent / "model")
    assert (settings.model["seq_length"], settings.data["seq_length"], settings.data["batch_size"]) == (48, 48, 1)
    assert settings.trainer["max_steps"] == 6
    assert settings.precision["precision"] == "bf16-mixed"


def test_the_file_of_the_model_with_experts_is_a_run(tmp_path: Path) -> None:
    settings = read_run(write_run(tmp_path, QWEN3_MOE, "qwen3_moe")).settings()
    assert settings.strategy["pipeline_model_parallel_size"] == 4
    assert settings.model["transformer"]["moe_grouped_gemm"] is True
    assert settings.model["recipe"]["lr_scheduler_type"] == "constant"
    assert settings.trainer["accumulate_grad_batches"] == 8


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 3e-6\nb: 1\nc: 1.5E+3\nd: e5\ne: '3e-6'\nf: .5\ng: true\nh: 2_000\n", encoding="utf-8")
    found = read_file(str(path), "a file", ["b=2e-5", "i.j=1", "k=[1, 2]"])
    assert found == {
        **{"a": 3e-6, "b": 2e-5, "c": 1500.0, "d": "e5", "e": "3e-6", "f": 0.5, "g": True, "h": 2000},
        **{"i": {"j": 1}, "k": [1, 2]},
    }


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"stage": "pt"}', encoding="utf-8")
    assert read_file(str(path), "a file", ["stage=sft"]) == {"stage": "sft"}


def test_wrong_input_is_one_sentence_and_exit_code_2(file: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([file, "lerning_rate=1e-5"]) == 2
    said = capfd.readouterr().err
    assert said == "error: unknown option 'lerning_rate'; did you mean 'learning_rate'?\n"


def test_a_share_of_warm_up_has_its_older_name_too(file: str) -> None:
    assert read(file, "warmup_steps=0", "warmup_ratio=0.25").arguments.warmup_steps == 0.25
    with refuses(ValueError, "warmup_ratio: 0.25 and warmup_steps: 2"):
        read(file, "warmup_ratio=0.25")
    with refuses(ValueError, "warmup_ratio: 1.5 is not a share"):
        read(file, "warmup_steps=0", "warmup_ratio=1.5")


def test_allowing_code_that_is_not_run_is_no_error(file: str) -> None:
    assert read(file, "trust_remote_code=true").keys.trust_remote_code


def test_a_file_that_asks_for_nothing_is_refused(file: str) -> None:
    with refuses(ValueError, "neither training nor evaluation is asked"):
        read(file, "do_train=false")


def test_a_preempted_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    for age, name in enumerate(("checkpoint-20.ckpt", "last-preempted.ckpt", "checkpoint-100.ckpt")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    assert where_to_resume(str(tmp_path), False) == str(tmp_path / "checkpoint-100.ckpt")
    (tmp_path / "checkpoint-100.ckpt").rmdir()
    assert where_to_resume(str(tmp_path), False) == str(tmp_path / "last-preempted.ckpt")


@pytest.fixture(scope="module")
def adapters_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("qwen3"), QWEN3_LORA, "qwen3")


LAYOUTS_OF_ADAPTERS = (
    [],
    ["tensor_model_parallel_size=2", "sequence_parallel=true"],
    ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"],
    ["tensor_model_parallel_size=2", "context_parallel_size=2", "use_distributed_optimizer=true"],
)


@pytest.mark.parametrize("name", TRAIN_LORA)
def test_examples_of_adapters_are_planned_on_every_layout_or_refused(
    name: str, adapters_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more, sentence = TRAIN_LORA[name]
    words = [f"{key}={json.dumps(value)}" for key, value in more.items()]
    if sentence is not None:
        with refuses(ValueError, sentence):
            read_run(adapters_file, words)
        return
    for layout in LAYOUTS_OF_ADAPTERS:
        assert plan([adapters_file, *words, *layout, "--devices", "4"]) == 0
        assert "tp" in capsys.readouterr().out


def test_a_ratio_of_learning_rates_is_that_of_the_recipe(adapters_file: str) -> None:
    recipe = read_run(adapters_file, ["loraplus_lr_ratio=16", "loraplus_lr_embedding=1e-5"]).model().recipe
    assert (recipe.loraplus_lr_ratio, recipe.loraplus_lr_embedding) == (16, 1e-5)


@pytest.mark.parametrize("alpha", ["null", "0"])
def test_no_alpha_and_an_alpha_of_0_are_twice_the_rank(adapters_file: str, alpha: str) -> None:
    """As in LLaMA-Factory; adapters with a scale of 0 would never learn."""
    assert read_run(adapters_file, [f"lora_alpha={alpha}"]).settings().model["lora"]["lora_alpha"] == 16


def test_adapters_are_merged_or_continued_as_llamafactory_does(adapters_file: str) -> None:
    """All but the last are merged, with create_new_adapter all of them."""
    new = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    keys = {name: value for name, value in read_file(adapters_file, "a file").items() if not name.startswith("lora_")}
    without = Path(adapters_file).with_name("without.yaml")
    without.write_text(json.dumps(keys))
    cases: dict[str, tuple[list[str], Any, Any]] = {
        "a, b,c": ([], "c", ["a", "b"]),
        "[a, b]": (["adapter_folder=in"], "b/in", ["a/in"]),
        "a": ([], "a", None),
        "a,b": (["create_new_adapter=true"], new, ["a", "b"]),
    }
    for given, (words, lora, merged) in cases.items():
        file = adapters_file if isinstance(lora, dict) else str(without)
        model = read_run(file, [f"adapter_name_or_path={given}", *words]).settings().model
        assert model.get("adapters") == merged
        found = model["lora"]
        assert (found if isinstance(lora, str) else {key: found[key] for key in lora}) == lora

    model = read_run(str(without), ["adapter_name_or_path=a", "quantization_bit=4"]).settings().model
    assert model["lora"] == {"path": "a", "quantization": "nf4", "double_quantization": True}


def test_a_template_that_the_tokenizer_does_not_fit_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_run(tmp_path, LLAMA3)
    for path in (tmp_path / "model").glob("tokenizer*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace("<|eot_id|>", "<|eos_id|>"), encoding="utf-8")
    monkeypatch.setattr(guard, "guarded", lambda _: pytest.fail("ranks are started"))
    for command in (["llamafactory"], ["plan", "--devices", "1"]):
        assert main([command[0], file, *command[1:]]) == 2
        told = capsys.readouterr().err
        assert "ends turns with the token '<|eot_id|>', which this tokenizer does not have; choose the temp" in told


EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "llamafactory").iterdir())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_commands_that_an_example_names_accept_it(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand in its first comment; the model and the datasets of the repository are tiny ones here."""
    commands = [
        line[1:].split() for line in example.read_text().splitlines() if line.startswith("#     lightning-mcore")
    ]
    assert {words[1] for words in commands} == {"plan", "llamafactory"}
    write_run(tmp_path, QWEN3_LORA, "qwen3_moe", info={"identity": {"file_name": "alpaca_en_demo.json"}})
    (tmp_path / "LLaMA-Factory").mkdir()
    (tmp_path / "data").rename(tmp_path / "LLaMA-Factory" / "data")
    monkeypatch.chdir(tmp_path)
    shutil.copy(example, tmp_path)
    started = []
    monkeypatch.setattr(guard, "guarded", lambda run: started.append(run) or 0)
    for _, command, *words in commands:
        assert main([command, *words, "model_name_or_path=model"]) == 0, capsys.readouterr().err
    assert len(started) == 1
    assert "ep4" in capsys.readouterr().out
