# SPDX-License-Identifier: Apache-2.0
"""Every adapter folder that is written is read by PEFT, on the class of its base; PEFT's own folders are read here.

Logits are compared, and no adapter may be left as PEFT makes it. Matching of names is held to PEFT's own.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_mcore import LoRA, MCoreGPT, MCorePreference, MCoreVisionGPT, Preference, single_process
from lightning_mcore.arguments.llamafactory.export import FactoryExport
from lightning_mcore.config.lora import EXPERTS
from lightning_mcore.hf import find_family
from lightning_mcore.hf.adapters import check_held, is_translated, projection_names
from lightning_mcore.hf.family import complete_fields
from lightning_mcore.hf.source import HFSource
from lightning_mcore.hf.vision_families import with_tower
from lightning_mcore.interop.export_adapter import save_adapter
from tests.distributed.test_delta_net_folders import save_whole
from tests.parity.hf_training import LENGTH, LOGITS, text
from tests.support.hf_models import CONFIGS, UNKNOWN_TO_TRANSFORMERS, auto_model, config_content, save_tiny, tiny_folder
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.vision_models import CONFIGS as VISION
from tests.support.vision_models import vision_batch, vision_folder
from tests.unit.layers.test_multimodal import kinds_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
    # PEFT 0.21.2 looks for patterns among modules, not among parameters.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning"),
]

SIZES: dict[str, Any] = {"r": 3, "lora_alpha": 6}
_SEEN = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")

_BOTH = ["input_linear", "output_linear"]
WITHOUT_EXPERTS = {
    "gpt_oss": ["experts"],
    "granitemoe": _BOTH,
    "granitemoehybrid": [f"block_sparse_moe.{name}" for name in _BOTH],
    "llama4_text": ["feed_forward.experts"],
}
"""Families with one tensor for all experts of a layer, in an order that adapters cannot follow, and what it is."""
WITHOUT = WITHOUT_EXPERTS | {"nemotron_h": ["experts", "out_proj"]}
FAMILIES: dict[str, dict[str, Any]] = {
    family: {"exclude_modules": WITHOUT[family]} if family in WITHOUT else {} for family in (*CONFIGS, *VISION)
}
WITH_EXPERTS = [family for family, config in CONFIGS.items() if any("experts" in key for key in config)]
NOT_ADAPTED = ("lm_head", "_gate", "router.gate", "gate.wg", "feed_forward.router")
ONLY_STACKED = (*WITHOUT_EXPERTS, "kimi_linear", "mistral4", "nemotron_h")
STAY = ("deepseek_v3", "phi3", "gpt_oss", "granitemoe", "qwen3_5_moe_text", "qwen3_vl_moe", "kimi_linear")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "routers": ("gpt_oss", {"target_modules": ["q_proj", "router"]}),
    "a router in another module": ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}),
    "all norms": ("qwen3", {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}),
    "all norms beside a tower": ("qwen3_vl", {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}),
    "whole modules": ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["mlp"]}),
    "delta nets": ("qwen3_5_text", {"target_modules": ["o_proj"], "modules_to_save": ["linear_attn"]}),
    "convolutions that are one in memory": (
        "kimi_linear",
        {"target_modules": ["f_a_proj", "g_b_proj", "o_proj"], "modules_to_save": ["conv1d"]},
    ),
    "mamba": ("nemotron_h", {"target_modules": ["o_proj", "in_proj"]}),
    "narrow experts": ("nemotron_h, latent experts", {"target_modules": ["fc1_latent_proj", "fc2_latent_proj"]}),
    "sinks": ("gpt_oss", {"target_modules": ["lm_head"], "modules_to_save": ["self_attn"]}),
    "routers that weigh inputs": ("llama4_text", {"target_modules": ["q_proj", "router"]}),
    "some layers": ("llama", {"layers_to_transform": [1, 3]}),
    "some layers and a whole name": ("llama", {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]}),
    "a pattern in some layers": ("llama", {"target_modules": r".*\.(q|k)_proj", "layers_to_transform": 1}),
    "modules within one that is left out": ("llama", {"exclude_modules": ["mlp"]}),
    "ranks by whole name": (
        "qwen2_vl",
        {"target_modules": ATTENTION, "layers_to_transform": [1], "rank_pattern": {"layers.1.self_attn.q_proj": 2}},
    ),
    "patterns of which the first counts": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"v_proj": 2, "layers.1.self_attn.v_proj": 5},
            "alpha_pattern": {"q_proj": 12, "layers.1.self_attn.q_proj": 1},
        },
    ),
    "a tied embedding": (
        "qwen2",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "a tied embedding beside a tower": (
        "qwen2_vl",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "a tied embedding by both names": (
        "gemma2",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
}
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks of experts": (
        "deepseek_v3",
        {"rank_pattern": {"gate_proj": 5, "up_proj": 5}, "alpha_pattern": {"gate_proj": 10, "up_proj": 10}},
    ),
    "dense layers": ("qwen3_next", {"exclude_modules": ["experts"]}),
    "experts of some layers": ("deepseek_v3", {"layers_to_transform": [1, 2]}),
    "no shared experts": ("qwen2_moe", {"exclude_modules": ["shared_expert"]}),
    "lengths of shared experts": ("qwen2_moe", {"exclude_modules": ["experts"], "use_dora": True}),
}
CASES = {f"{name}, stacked": (family, settings, "stacked") for name, (family, settings) in SETTINGS.items()} | {
    f"{name}, {layout}": (family, settings, layout)
    for name, (family, settings) in OF_EXPERTS.items()
    for layout in ("stacked", "each")
}
# Those about names alone are held to PEFT below, and the parts of others are in rows that stay.
SOON = (
    *("routers", "whole modules", "delta nets", "convolutions that are one in memory", "mamba", "narrow experts"),
    *("sinks", "routers that weigh inputs", "ranks by whole name", "a tied embedding by both names"),
    "patterns of which the first counts",
)
STAY_OF_SETTINGS = [f"{name}, stacked" for name in (*SOON, "ranks of experts", "dense layers")]
STAY_OF_SETTINGS += ["experts of some layers, each", "lengths of shared experts, each"]


def kind_of(folder: str) -> Any:
    return MCoreVisionGPT if "vision_models_" in folder else MCoreGPT


def write(folder: str, out: str, settings: dict[str, Any], experts: Any, seed: int) -> Tensor:
    """Write random adapters, and return the logits of the model with them, [b, s, v]."""
    torch.manual_seed(seed)
    with single_process(), torch.no_grad():
        module = kind_of(folder).from_pretrained(folder, seq_length=48, lora=LoRA(**{**SIZES, **settings}))
        module.check_settings()
        module.configure_model()
        trained = [p for p in module.parameters() if p.requires_grad]
        for number, parameter in enumerate(trained):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise * 0.05)
        save_adapter(module, out, experts=experts)
        return logits_of(module)


def logits_of(module: Any) -> Tensor:
    module.eval()
    batch = text()
    if isinstance(module, MCoreVisionGPT):
        batch = module.on_before_batch_transfer(vision_batch(module.vision.model_type), 0)
    logits: Tensor = module.token_logits(batch)[0].detach()
    return logits


def read(folder: str, adapter: str, copy: str, experts: Any = "stacked") -> Tensor:
    """Read an adapter, write it again, and return the logits of the model with it."""
    with single_process(), torch.no_grad():
        module = kind_of(folder).from_pretrained(folder, seq_length=48, lora=adapter)
        module.check_settings()
        module.configure_model()
        save_adapter(module, copy, experts=experts)
        return logits_of(module)


def in_peft(folder: str, adapter: str, sees: bool) -> Tensor:
    """Return the logits of PEFT; each weight of the file must have a place, and each adapter a weight."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForImageTextToText

    content = config_content(folder)
    name = content["model_type"]
    config = AutoConfig.for_model(**{**content, "model_type": UNKNOWN_TO_TRANSFORMERS.get(name, name)})
    auto = AutoModelForImageTextToText if sees else auto_model()
    base = auto.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():  # which PEFT gives for adapters that are not in the file
        warnings.filterwarnings("error", "Found missing adapter keys")
        model = PeftModel.from_pretrained(base, adapter).eval()
    adapters = {key: parameter for key, parameter in model.named_parameters() if "lora_" in key}
    assert adapters
    assert [key for key, parameter in adapters.items() if not parameter.any()] == []
    batch, given = text(), {}
    if kind_of(folder) is MCoreVisionGPT:
        batch = vision_batch(name)
        given = {"mm_token_type_ids": kinds_of(batch["tokens"]), **{key: batch[key] for key in _SEEN if key in batch}}
    with torch.no_grad():
        logits: Tensor = model(input_ids=batch["tokens"], **given).logits
    return logits


def compare(folder: Path, out: Path, settings: dict[str, Any], experts: str, sees: bool, seed: int = 0) -> None:
    """Write an adapter; PEFT computes the same with it, and it comes back bit for bit."""
    first, second = str(out / "first"), str(out / "second")
    written = run_ranks(1, write, str(folder), first, settings, experts, seed, open_group=False)[0]
    wanted = in_peft(str(folder), first, sees)
    again = run_ranks(1, read, str(folder), first, second, experts, open_group=False)[0]
    for found in (written, again):
        logits = found[..., : wanted.size(-1)].reshape(wanted.shape)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=LOGITS)  # measured: 3e-5
    before, after = (load_file(f"{path}/adapter_model.safetensors") for path in (first, second))
    assert before.keys() == after.keys()
    if experts == "each" or not any(EXPERTS in key for key in before):  # the others have a gate and an up in one
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("family", thorough_but(FAMILIES, *STAY))
def test_peft_reads_the_adapters_of_every_linear_layer_of_a_family(family: str, tmp_path: Path) -> None:
    folder = vision_folder(family) if family in VISION else tiny_folder(family)
    compare(folder, tmp_path, FAMILIES[family], "stacked", family in VISION)


@pytest.mark.parametrize(
    "family",
    thorough_but([name for name in WITH_EXPERTS if name not in ONLY_STACKED], "qwen2_moe", "deepseek_v3"),
)
def test_peft_reads_a_pair_for_each_expert(family: str, tmp_path: Path) -> None:
    """Beside dense layers and shared experts whose projections have the same names."""
    compare(tiny_folder(family), tmp_path, {}, "each", sees=False)


@pytest.mark.parametrize("name", thorough_but(CASES, *STAY_OF_SETTINGS))
def test_peft_reads_what_settings_describe(name: str, tmp_path: Path) -> None:
    family, settings, experts = CASES[name]
    folder = vision_folder(family) if family in VISION else tiny_folder(family)
    compare(folder, tmp_path, settings, experts, family in VISION)


@pytest.mark.parametrize(
    ("name", "stacked"), [("qwen3_5", False), pytest.param("qwen3_5_moe", True, marks=pytest.mark.thorough)]
)
@pytest.mark.filterwarnings("ignore")  # of Megatron, in this process
def test_peft_reads_adapters_of_a_language_model_on_the_class_with_its_tower(
    name: str, stacked: bool, tmp_path: Path
) -> None:
    save_whole(name, tmp_path / "whole", stacked)
    (tmp_path / "whole" / "tokenizer.json").write_text("{}")
    # Some draws magnify rounding: with seed 0, PEFT's fp32 is 1.0e-4 from its fp64 and ours 1.8e-4, of greatest 7.5.
    compare(tmp_path / "whole", tmp_path, {"modules_to_save": ["norm"]}, "stacked", sees=True, seed=2)
    assert (tmp_path / "first" / "tokenizer.json").read_text() == "{}"


def test_a_layout_that_peft_reads_in_no_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"experts='each' is not supported for models of this family"):
        run_ranks(1, write, str(vision_folder("qwen3_vl_moe")), str(tmp_path / "a"), {}, "each", 0, open_group=False)


def save_with_peft(folder: Path, out: Path, **settings: Any) -> Tensor:
    """Write random adapters with PEFT, and return their logits, [b, s, v], or the scores of rows."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    task = settings.pop("task_type", "CAUSAL_LM")
    auto = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
    model = get_peft_model(
        auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"),
        LoraConfig(task_type=task, **{**SIZES, **settings}),
    ).eval()
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise * 0.05)
        model.save_pretrained(out)
        logits: Tensor = model(text()["tokens"]).logits
    return logits


OF_PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": (
        "qwen2",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied, by the output layer": (
        "qwen2",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    ),
    "norms": ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}),
    "names of nothing": (
        "llama",
        {"target_modules": ["o_proj", "query"], "modules_to_save": ["classifier", "lm_head"]},
    ),
    "a whole name": ("llama", {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]}),
    "a container left out": (
        "llama",
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["mlp", "model.layers.0.mlp.up_proj"]},
    ),
}


@pytest.mark.parametrize("name", thorough_but(OF_PEFT, "tied", "tied, by the output layer", "norms"))
def test_adapters_of_peft_compute_the_same_here(name: str, tmp_path: Path) -> None:
    family, settings = OF_PEFT[name]
    wanted = save_with_peft(tiny_folder(family), tmp_path / "peft", **settings)
    words = str(tiny_folder(family)), str(tmp_path / "peft"), str(tmp_path / "again")
    found = run_ranks(1, read, *words, open_group=False)[0]
    torch.testing.assert_close(found[..., : wanted.size(-1)].view_as(wanted), wanted, rtol=0, atol=1e-4)
    logits = in_peft(words[0], words[2], sees=False)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)


def test_a_tied_embedding_that_is_trained_apart_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder("qwen2")
    save_with_peft(folder, tmp_path / "peft", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    sentence = r"modules_to_save=\['embed_tokens'\] means the embedding, which is the output layer too; PEFT trains a"
    for given in ({"lora": str(tmp_path / "peft")}, {"adapters": [str(tmp_path / "peft")]}):
        with pytest.raises(ValueError, match=sentence):
            MCoreGPT.from_pretrained(str(folder), **given).check_settings()  # type: ignore[arg-type]
    module = MCoreGPT.from_pretrained(str(folder), lora=LoRA(modules_to_save=["embed_tokens"]))
    with pytest.raises(ValueError, match=r"as one, here and in PEFT, give ensure_weight_tying=True, or"):
        module.check_settings()


def test_a_tied_embedding_and_its_copy_must_be_the_same(tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    save_with_peft(tiny_folder("qwen2"), tmp_path / "peft", **settings)
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] = tensors["base_model.model.lm_head.weight"] + 1
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(RanksFailedError, match=r"has ensure_weight_tying=True, and an output layer that differs from"):
        run_ranks(1, read, str(tiny_folder("qwen2")), str(tmp_path / "peft"), str(tmp_path / "again"), open_group=False)


def scores(folder: str, adapter: str, copy: str) -> Tensor:
    """Return the scores of all tokens by a reward model whose adapter is read, [b, s, 1]; write the adapter again."""
    with single_process(), torch.no_grad():
        preference = Preference("reward")
        module = MCorePreference.from_pretrained(folder, seq_length=LENGTH, preference=preference, lora=adapter)
        module.check_settings()
        module.configure_model()
        save_adapter(module, copy)
        return logits_of(module)


@pytest.mark.filterwarnings("ignore:Some weights of .* were not initialized")
def test_an_adapter_of_a_reward_model_is_read_as_peft_writes_it(tmp_path: Path) -> None:
    """It names ``classifier`` and ``score``, of which a model has one."""
    folder = save_tiny("llama", tmp_path / "llama", num_labels=1)
    wanted = save_with_peft(folder, tmp_path / "peft", target_modules=["q_proj"], task_type="SEQ_CLS")
    words = str(folder), str(tmp_path / "peft"), str(tmp_path / "again")
    found = run_ranks(1, scores, *words, open_group=False)[0]
    torch.testing.assert_close(found[:, -1].float(), wanted, rtol=0, atol=1e-5)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    head = load_file(tmp_path / "again" / "value_head.safetensors")  # for LLaMA-Factory
    assert torch.equal(head["v_head.summary.weight"], after["base_model.model.score.weight"])


def merge_by_file(folder: str, adapters: tuple[str, ...], out: str) -> None:
    """Merge adapters as a LLaMA-Factory file with ``export_dir`` does."""
    FactoryExport(folder, adapters, out, "5GB").write()


@pytest.mark.filterwarnings("ignore:Some weights of .* were not initialized")
def test_a_llamafactory_file_merges_an_adapter_with_its_score_layer(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = save_tiny("llama", tmp_path / "llama", num_labels=1)
    wanted = save_with_peft(folder, tmp_path / "peft", target_modules=["q_proj"], task_type="SEQ_CLS")
    run_ranks(1, merge_by_file, str(folder), (str(tmp_path / "peft"),), str(tmp_path / "out"), open_group=False)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        found = merged(text()["tokens"]).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Some weights of .* were not initialized")
def test_a_llamafactory_file_rejects_an_adapter_with_a_score_layer_before_another(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama", num_labels=1)
    for name, kind in (("scores", "SEQ_CLS"), ("plain", "CAUSAL_LM")):
        save_with_peft(folder, tmp_path / name, target_modules=["q_proj"], task_type=kind, modules_to_save=None)
    adapters = str(tmp_path / "scores"), str(tmp_path / "plain")
    with refuses(ValueError, "adapter_name_or_path"):
        merge_by_file(str(folder), adapters, str(tmp_path / "out"))


@pytest.mark.filterwarnings("ignore:Some weights of .* were not initialized")
def test_a_classifier_with_several_labels_is_refused_as_a_model_and_as_an_adapter(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, labels = save_tiny("llama", tmp_path / "llama", num_labels=3), str(tmp_path / "labels")
    save_with_peft(folder, tmp_path / "peft", target_modules=["q_proj"], task_type="SEQ_CLS")
    with refuses(ValueError, "is an adapter of a classifier with num_labels=3"):
        merge_by_file(str(folder), (str(tmp_path / "peft"),), str(tmp_path / "out"))
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(labels)
    with refuses(ValueError, "is a classifier with num_labels=3, and a reranker or reward model has one score"):
        MCorePreference.from_pretrained(labels, preference=Preference("reward"))


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "before-another"])
def test_a_llamafactory_file_that_merges_an_adapter_copies_its_value_head(others: int, tmp_path: Path) -> None:
    save_with_peft(tiny_folder("llama"), tmp_path / "peft", target_modules=["q_proj"])
    save_with_peft(tiny_folder("llama"), tmp_path / "other", target_modules=["q_proj"])
    head = {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.ones(1)}
    save_file(head, tmp_path / "peft" / "value_head.safetensors", {"format": "pt"})
    adapters = str(tmp_path / "peft"), *[str(tmp_path / "other")] * others
    run_ranks(1, merge_by_file, str(tiny_folder("llama")), adapters, str(tmp_path / "out"), open_group=False)
    copied = load_file(tmp_path / "out" / "value_head.safetensors")
    assert all(torch.equal(copied[key], head[key]) for key in head)


@pytest.mark.filterwarnings("ignore:Some weights of .* were not initialized")
@pytest.mark.parametrize("has_head", [True, False])
def test_a_reward_model_continues_an_adapter_that_has_no_score_layer(has_head: bool, tmp_path: Path) -> None:
    """LLaMA-Factory keeps the score layer in ``value_head.safetensors`` next to the adapter, or starts a new one."""
    folder = save_tiny("llama", tmp_path / "llama")
    logits = save_with_peft(folder, tmp_path / "peft", target_modules=["q_proj", "down_proj"], modules_to_save=None)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(9))
    if has_head:
        values = {"v_head.summary.weight": head, "v_head.summary.bias": torch.ones(1)}
        save_file(values, tmp_path / "peft" / "value_head.safetensors", {"format": "pt"})
    words = str(folder), str(tmp_path / "peft"), str(tmp_path / "again")
    found = run_ranks(1, scores, *words, open_group=False)[0]
    written = load_file(tmp_path / "again" / "adapter_model.safetensors")
    if has_head:
        assert torch.equal(written["base_model.model.score.weight"], head)
    # The logits are the hidden states times the output layer, which is as wide as it is high or higher
    output = load_file(folder / "model.safetensors")["lm_head.weight"]
    hidden = torch.linalg.lstsq(output.double(), logits.double().flatten(0, 1).T).solution.T
    wanted = (hidden @ written["base_model.model.score.weight"].double().T).view(*logits.shape[:2], 1)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4)


MATCHING: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["mlp.gate_proj", "lm_head", "model.layers.2.self_attn.q_proj"]}),
    ("llama", {"target_modules": ["mlp.gate_proj", "lm_head"], "layers_to_transform": [0, 2]}),
    ("llama", {"target_modules": ["embed_tokens", "q_proj"], "layers_to_transform": 1}),
    ("llama", {"target_modules": ["q_proj", "model.layers.3.mlp.up_proj"], "layers_to_transform": [0]}),
    ("llama", {"target_modules": r".*\.[23]\..*(q|up)_proj"}),
    ("llama", {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\..*"}),
    ("llama", {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["model.norm"]}),
    ("llama", {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]}),
    ("llama", {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["2.mlp", "embed_tokens"]}),
    ("llama", {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["layers.1"]}),
    ("llama", {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["head"]}),
    ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["q_norm"]}),
    ("gemma2", {"target_modules": ["q_proj"], "modules_to_save": ["layernorm"]}),
    ("qwen3_5_text", {"target_modules": "all-linear"}),
    ("qwen3_5_text", {"target_modules": ["q_proj", "out_proj"], "modules_to_save": ["linear_attn"]}),
    ("qwen3_5_text", {"target_modules": ["q_proj"], "modules_to_save": ["conv1d"]}),
    ("qwen3_moe", {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}),
    ("deepseek_v3", {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}),
    ("mixtral", {"target_modules": ["o_proj"], "target_parameters": ["gate.weight"]}),
]


@pytest.mark.parametrize(("family", "settings"), MATCHING, ids=str)
def test_names_mean_what_they_mean_to_peft(family: str, settings: dict[str, Any]) -> None:
    """Which projections get an adapter, and which modules are trained whole."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_folder(family)))
    there = {name for name, _ in base.named_modules()}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    adapted, saved = set(), set()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = key.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            stem, found, _ = name.partition(".lora_")
            (adapted if found else saved).add(stem.replace(".base_layer", "") if found else stem.rpartition(".")[0])
    lora, source = LoRA(**settings), HFSource.open(str(tiny_folder(family)))
    names = projection_names(source.family, complete_fields(source.fields))
    lora.check_targets(names)
    check_held(source.family, complete_fields(source.fields), lora)
    own = {name.replace(".block_sparse_moe.", ".mlp."): name for name in names}
    assert {name for name in own if lora.adapts(own[name]) and name in there} == adapted
    assert {name for name in own if lora.saves(own[name]) and name in there} == {name for name in saved if name in own}
    assert {name for name in saved if name not in own} <= {f"model.layers.{layer}.linear_attn" for layer in range(4)}


def test_a_module_cannot_be_trained_whole_and_have_an_adapter() -> None:
    """PEFT ends with a TypeError."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["proj"]}
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    with pytest.raises(TypeError, match="modules_to_save"):
        get_peft_model(model, LoraConfig(**settings))
    module = MCoreGPT.from_pretrained(str(tiny_folder("llama")), lora=LoRA(**settings))
    with pytest.raises(ValueError, match=r"modules_to_save=\['proj'\] means model.layers.0.self_attn.q_proj, wh"):
        module.check_settings()


def test_the_families_whose_names_peft_translates_are_known() -> None:
    from peft.utils import transformers_weight_conversion as conversion

    for family in map(find_family, CONFIGS):
        name = family.config_class or family.model_type
        target = conversion._MODEL_TO_CONVERSION_PATTERN.get(name)
        assert is_translated(family) == (target in conversion._MOE_TARGET_MODULE_MAPPING), name


@pytest.mark.parametrize("family", [*CONFIGS, *VISION])
def test_all_linear_means_the_linear_layers_of_transformers(family: str) -> None:
    """And each routed expert; but not routers, gates of shared experts, indexers and the output layer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = vision_folder(family) if family in VISION else tiny_folder(family)
    content = config_content(folder)
    config = AutoConfig.for_model(**{**content, "model_type": UNKNOWN_TO_TRANSFORMERS.get(family, family)})
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if family in VISION else auto_model()).from_config(config)
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "visual" not in name and ".indexer." not in name
        if not name.endswith((*NOT_ADAPTED, *WITHOUT.get(family, ())))
    }
    source = HFSource.open(str(folder), with_tower(family) if family in VISION else None)
    lora, fields = LoRA(**FAMILIES[family]), complete_fields(source.fields)
    adapted = {name for name in projection_names(source.family, fields) if lora.adapts(name)}
    there = {name for name, _ in model.named_modules()}
    assert {name for name in adapted if EXPERTS not in name and name in there} == linear
    absent = {name for name in adapted - there if EXPERTS not in name}
    assert not any(name.startswith(("model.layers.0.mlp.", "lm_head")) for name in absent)
