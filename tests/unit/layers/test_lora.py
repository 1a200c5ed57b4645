# SPDX-License-Identifier: Apache-2.0
"""The settings of adapters: what they mean, and the sentence for each that cannot be."""

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file

from lightning_mcore import LoRA, MCoreGPT, MCoreVisionGPT, SaveHFModel, single_process
from lightning_mcore.arguments import LoraArguments, TrainingArguments, parse_arguments
from lightning_mcore.hf import find_family
from lightning_mcore.hf.adapters import projection_names
from lightning_mcore.hf.peft_folder import given_lora, read_lora
from lightning_mcore.hf.peft_tensors import require_stackable
from lightning_mcore.layers.adapted_layers import merging
from lightning_mcore.layers.quantized import check_quantization
from lightning_mcore.planning.arguments import arguments_in_use
from tests.support.hf_models import tiny_folder
from tests.support.sentences import refuses
from tests.support.vision_models import vision_folder

FIELDS = {"num_layers": 2, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "num_moe_experts": 4}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"r": 0}, ValueError),
        ({"r": 2.5}, TypeError),
        ({"rank_pattern": {"q_proj": 0}}, ValueError),
        ({"rank_pattern": ["q_proj"]}, TypeError),
        ({"lora_alpha": "16"}, TypeError),
        ({"lora_dropout": 1.0}, ValueError),
        ({"lora_dropout": "no"}, TypeError),
        ({"init_lora_weights": "pissa"}, ValueError),
        ({"target_modules": []}, ValueError),
        ({"target_modules": "all"}, ValueError),
        ({"target_modules": "(q"}, ValueError),
        ({"modules_to_save": "lm_head"}, TypeError),
        ({"layers_to_transform": [-1]}, TypeError),
        ({"quantization": "int8"}, ValueError),
        ({"quantization": "nf4", "use_dora": True}, ValueError),
        ({"rank": 4}, ValueError),
    ],
)
def test_a_setting_that_cannot_be_is_a_sentence(settings: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *settings):
        LoRA.of(settings)


def test_ranks_and_scales_follow_patterns() -> None:
    lora = LoRA(r=4, lora_alpha=8, rank_pattern={"q_proj": 16, r"layers\.1\..*up_proj": 2}, alpha_pattern={"q_proj": 4})
    assert lora.rank("model.layers.0.self_attn.q_proj") == 16
    assert lora.scale("model.layers.0.self_attn.q_proj") == 0.25
    assert lora.rank("model.layers.1.mlp.up_proj") == 2
    assert lora.scale("model.layers.0.mlp.up_proj") == 2
    assert LoRA(r=4, lora_alpha=8, use_rslora=True).scale("model.layers.0.mlp.up_proj") == 4


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 2 * (4 + 4 * 3)),  # attention and each expert; not the router
        ({"target_modules": ["q_proj", "v_proj"]}, 2 * 2),
        ({"target_modules": r".*\.(q|k)_proj", "layers_to_transform": 1}, 2),
        ({"exclude_modules": ["experts"]}, 2 * 4),
        ({"exclude_modules": ["o_proj", "experts.0"]}, 2 * (3 + 3 * 3)),
        ({"target_modules": ["q_proj", "gate"], "modules_to_save": ["q_proj"]}, 2),
    ],
)
def test_names_choose_projections(settings: dict[str, Any], count: int) -> None:
    lora, names = LoRA(**settings), projection_names(find_family("mixtral"), FIELDS)
    names = [name.replace("block_sparse_moe", "mlp") for name in names]
    lora.check_targets(names)
    assert sum(lora.adapts(name) for name in names) == count


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_porj"]},
        {"modules_to_save": ["lm_haed"]},
        {"target_modules": ".*nothing"},
        {"target_modules": "q_proj"},
        {"modules_to_save": ["up_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["gate_up"]},
        {"layers_to_transform": [7]},
        {"layers_to_transform": [0, 9]},
        {"rank_pattern": {"q_prj": 4}},
        {"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 4}},
        {"target_parameters": ["experts.gate_up_prj"]},
    ],
)
def test_targets_that_match_nothing_are_refused_before_anything_is_built(settings: dict[str, Any]) -> None:
    module = MCoreGPT.from_pretrained(str(tiny_folder("llama")), lora=LoRA(**settings))
    with refuses(ValueError, *settings):
        module.check_settings()


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "LOHA"},
        {"peft_type": "XLORA"},
        {"bias": "all"},
        {"alora_invocation_tokens": [1, 2]},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "loftq"},
        {"layers_pattern": "h"},
        {"r": -1},
    ],
)
def test_other_adapters_are_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, **change}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with refuses(ValueError, *change):
        read_lora(str(tmp_path))


@pytest.mark.parametrize(
    "more",
    [
        {"fan_in_fan_out": None},  # axolotl
        {"layers_pattern": "", "layers_to_transform": None},
        {"enable_lora": None, "merge_weights": False},  # PEFT 0.2
        {"auto_mapping": {"unsloth_fixed": True}, "revision": "main", "megatron_core": "megatron.core"},
    ],
)
def test_keys_of_published_adapters_that_change_nothing_are_read(more: dict[str, Any], tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4}
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    read = []
    for keys in ({}, more):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **keys}))
        read.append(read_lora(str(tmp_path)))
    assert read[0] == read[1]


@pytest.mark.parametrize(("field", "value"), [("lora_dropout", 0.5), ("use_dora", True)])
def test_what_experts_cannot_have_is_refused_before_anything_is_built(field: str, value: Any) -> None:
    module = MCoreGPT.from_pretrained(str(tiny_folder("qwen3_moe")), lora=LoRA(**{field: value}))
    with refuses(ValueError, f"{field}={value}"):
        module.check_settings()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"target_modules": ["gate"], "lora_dropout": 0.1}),
        ("qwen2_moe", {"target_modules": ["shared_expert_gate"], "use_dora": True}),
        ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
        ("llama", {"target_modules": ["q_proj", "input_layernorm"]}),
        ("qwen2", {"target_modules": ["embed_tokens"]}),
        ("glm4_moe, multi-token", {"target_modules": ["embed_tokens"]}),
        ("nemotron_h", {"target_modules": ["out_proj"]}),
        ("nemotron_h", {"exclude_modules": ["out_proj"]}),
    ],
)
def test_what_other_modules_cannot_have_is_refused_before_anything_is_built(
    family: str, settings: dict[str, Any]
) -> None:
    module = MCoreGPT.from_pretrained(str(tiny_folder(family)), lora=LoRA(**settings))
    with refuses(ValueError, *settings):
        module.check_settings()


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["input_linear"]},
        {"target_modules": ["input_linear"]},
        {},
    ],
)
@pytest.mark.filterwarnings("ignore:moe_ffn_hidden_size is not set")
def test_experts_in_one_tensor_are_refused(settings: dict[str, Any]) -> None:
    module = MCoreGPT.from_pretrained(str(tiny_folder("granitemoe")), lora=LoRA(**settings))
    with refuses(ValueError, *settings):
        module.check_settings()
    with single_process(), refuses(ValueError, *settings):
        module.configure_model()


def test_a_merged_adapter_of_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "target_modules": ["embed_tokens"], "r": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    save_file({f"{stem}A": torch.zeros(4, 101), f"{stem}B": torch.zeros(32, 4)}, tmp_path / "adapter_model.safetensors")
    MCoreGPT.from_pretrained(str(tiny_folder("llama")), adapters=[str(tmp_path)]).check_settings()
    with refuses(ValueError, "embed_tokens, which the model uses twice"):
        MCoreGPT.from_pretrained(str(tiny_folder("qwen2")), adapters=[str(tmp_path)]).check_settings()


def test_a_rank_that_would_have_padding_alone_is_refused() -> None:
    lora = LoRA(target_modules=["lm_head"])
    lora.check_vocabulary(["lm_head"], {"vocab_size": 101}, padded=128, ranks=4)
    with refuses(ValueError, "of whose 128 rows with their padding the"):
        lora.check_vocabulary(["lm_head"], {"vocab_size": 101}, padded=128, ranks=8)


@pytest.mark.parametrize("field", ["tp_comm_overlap", "fp8_param"])
def test_settings_that_adapters_do_not_have_are_refused(field: str) -> None:
    with refuses(ValueError, f"{field}=True"):
        LoRA().check_layers(SimpleNamespace(**{field: True}), [])


def test_adapters_on_4_bits_are_not_merged_and_the_callback_says_so_before_anything_is_built() -> None:
    module = MCoreGPT.from_pretrained(str(tiny_folder("llama")), lora=LoRA(quantization="nf4"))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with refuses(ValueError, "quantization='nf4'"):
        SaveHFModel("merged").setup(trainer, module, "fit")
    SaveHFModel("adapter", adapter=True).setup(trainer, module, "fit")
    without = MCoreGPT.from_pretrained(str(tiny_folder("llama")))
    with refuses(ValueError, "lora="):
        SaveHFModel("adapter", adapter=True).setup(trainer, without, "fit")
    layer = torch.nn.Linear(2, 2)
    layer.quantized = True  # type: ignore[assignment]
    with refuses(ValueError, "quantization='nf4'"):
        merging(layer)


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("llama", {}, None),
        ("llama", {"q_proj": None}, r"lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("llama", {"v_proj": (4, 31)}, r"v_proj.lora_A.weight \(\[4, 31\] in it, \[4, 32\] in the model\)"),
        ("qwen3", {}, r"q_proj.lora_B.weight \(\[32, 4\] in it, \[64, 4\] in the model\)"),
    ],
    ids=["its own base", "partial", "another shape", "another base"],
)
def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_built(
    family: str, change: dict[str, Any], sentence: str | None, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"], "r": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(4):
        for name, outputs in (("q_proj", 32), ("v_proj", 16)):
            shapes = {"lora_A": change.get(name, (4, 32)), "lora_B": (outputs, 4)}
            for kind, shape in shapes.items():
                if shape is not None:
                    key = f"base_model.model.model.layers.{layer}.self_attn.{name}.{kind}.weight"
                    tensors[key] = torch.zeros(shape)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    for given in ({"lora": str(tmp_path)}, {"adapters": [str(tmp_path)]}):
        module = MCoreGPT.from_pretrained(str(tiny_folder(family)), **given)
        if sentence is None:
            module.check_settings()
            continue
        with pytest.raises(ValueError, match=sentence):
            module.check_settings()


@pytest.mark.parametrize("module", ["blocks.0.attn.qkv.lora_A", "merger.mlp.0"])
def test_an_adapter_of_a_vision_tower_is_refused_by_what_it_is(module: str, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "target_modules": ["q_proj", "qkv"], "modules_to_save": ["merger"], "r": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.model.visual.{module}.weight"
    save_file({name: torch.zeros(4, 24)}, tmp_path / "adapter_model.safetensors")
    for given in ({"lora": str(tmp_path)}, {"adapters": [str(tmp_path)]}):
        with refuses(ValueError, f"{name}, of the vision tower"):
            MCoreVisionGPT.from_pretrained(str(vision_folder("qwen2_5_vl")), 64, **given).check_settings()


@pytest.mark.parametrize("name", ["merger", "visual", "model.visual.merger", "multi_modal_projector"])
def test_a_vision_tower_is_not_saved_with_adapters(name: str) -> None:
    lora = LoRA(target_modules=["q_proj"], modules_to_save=[name])
    with refuses(ValueError, f"modules_to_save has {name!r}, a part of the"):
        MCoreVisionGPT.from_pretrained(str(vision_folder("qwen2_5_vl")), 64, lora=lora).check_settings()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weight: weight.fill_(math.nan), "lora_B.weight in "),
        (lambda weight: weight.fill_(math.inf), "lora_B.weight in "),
        (lambda weight: weight.to(torch.int8), "holds int8"),
    ],
    ids=["NaN", "infinite", "integers"],
)
@pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size")
def test_an_adapter_with_damaged_weights_is_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4})
    )
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {stem.format(layer, "A"): torch.ones(4, 32) for layer in range(4)}
    tensors |= {stem.format(layer, "B"): torch.ones(32, 4) for layer in range(4)}
    tensors[stem.format(2, "B")] = change(tensors[stem.format(2, "B")])
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    for given in ({"lora": str(tmp_path)}, {"adapters": [str(tmp_path)]}):
        module = MCoreGPT.from_pretrained(str(tiny_folder("llama")), **given)
        with single_process(), refuses(ValueError, sentence):
            module.configure_model()


def test_experts_that_differ_do_not_fit_the_stacked_layout() -> None:
    names = projection_names(find_family("qwen3_moe"), FIELDS)
    require_stackable(LoRA(rank_pattern={"up_proj": 4}, alpha_pattern={"up_proj": 4}), names)
    require_stackable(LoRA(target_modules=["q_proj"]), names)
    for settings in ({"rank_pattern": {"up_proj": 4}}, {"target_modules": r".*experts\.[01]\.up_proj"}):
        with refuses(ValueError, "experts.gate_up_proj differ in target"):
            require_stackable(LoRA(**settings), names)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_a_tied_output_layer_has_no_adapter_of_its_own(names: dict[str, Any]) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    module = MCoreGPT(32, 8, sizes, share_embeddings_and_output_weights=True, lora=LoRA(**names))
    with refuses(ValueError, "'lm_head'"):
        module.check_settings()


@pytest.mark.parametrize(
    ("impl", "base", "error"),
    [
        ("transformer_engine", "base", ValueError),
        ("local", None, ValueError),
        ("local", "base", ModuleNotFoundError),
    ],
)
def test_weights_in_4_bits_are_refused_where_they_cannot_be(
    impl: str, base: str | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses(error):
        check_quantization(impl, base)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with refuses(FileNotFoundError, "nowhere is not the folder of a PEFT"):
        read_lora(str(tmp_path / "nowhere"))
    with refuses(FileNotFoundError, "has no adapter_config.json; give the"):
        read_lora(str(tiny_folder("llama")))


def test_one_folder_to_merge_is_not_a_list() -> None:
    with refuses(TypeError, "adapters='adapter'"):
        MCoreGPT.from_pretrained(str(tiny_folder("llama")), adapters="adapter")  # type: ignore[arg-type]


def test_settings_beside_a_folder_are_those_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4})
    )
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    lora, path = given_lora({"path": str(tmp_path), "quantization": "nf4"})
    assert (lora.r, lora.quantization, path) == (4, "nf4", str(tmp_path))
    planned = arguments_in_use({"preference": {}, "transformer": {}, "lora": str(tmp_path)})["lora"]
    assert (planned.r, planned.lora_dropout) == (4, 0.0)
    with refuses(ValueError, "r=8"):
        given_lora({"path": str(tmp_path), "r": 8})


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with refuses(ValueError, "bin, which may run code when it is read"):
        read_lora(str(tmp_path))


def test_the_arguments_of_roll_make_adapters(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--lora_target", "q_proj,v_proj", "--lora_rank", "4", "--report_to", "none"]
    training, lora = parse_arguments(words, TrainingArguments, LoraArguments)
    model = training.model(str(tiny_folder("llama")), **lora.model_settings())
    assert (model.lora.r, model.lora.lora_alpha, model.lora.target_modules) == (4, 8, ["q_proj", "v_proj"])
    assert LoraArguments().model_settings() == {}
    for target, wanted in {"all": "all-linear", ".*(q|k)_proj": ".*(q|k)_proj"}.items():
        assert LoraArguments(lora_target=target).model_settings()["lora"].target_modules == wanted
    with refuses(ValueError, "lora_rank=0"):
        LoraArguments(lora_target="all", lora_rank=0)
    with refuses(ValueError, "lora_target='all'"):
        LoraArguments(lora_target="all", adapter_name_or_path="x")
