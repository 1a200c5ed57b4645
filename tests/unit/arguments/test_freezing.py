# SPDX-License-Identifier: Apache-2.0
"""Which weights ``train_only`` and LLaMA-Factory's keys of ``finetuning_type: freeze`` choose, and what is refused."""

from typing import Any

import pytest

from lightning_mcore import LoRA, MCoreGPT, MCorePreference
from lightning_mcore.arguments.llamafactory.freeze import trained_parts
from lightning_mcore.arguments.llamafactory.keys import FactoryKeys
from tests.support.hf_models import read_tensors, tiny_folder
from tests.support.sentences import refuses

LAYERS = 4  # of the tiny models


@pytest.mark.parametrize(
    ("keys", "layers", "modules", "extra"),
    [
        ({}, [2, 3], [""], []),
        ({"freeze_trainable_layers": -1}, [0], [""], []),
        ({"freeze_trainable_layers": 9, "freeze_trainable_modules": "mlp"}, range(LAYERS), ["mlp."], []),
        (
            {"freeze_trainable_modules": "self_attn, input_layernorm", "freeze_extra_modules": "embed_tokens,norm"},
            [2, 3],
            ["self_attn.", "input_layernorm."],
            ["embed_tokens", "norm"],
        ),
        ({"freeze_trainable_layers": 0, "freeze_extra_modules": "lm_head"}, [], [""], ["lm_head"]),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_file_trains_what_llamafactory_trains(
    family: str, keys: dict[str, Any], layers: Any, modules: list[str], extra: list[str]
) -> None:
    """Layers by their number and module; outside of layers, every weight whose name contains a module's."""
    folder = str(tiny_folder(family))
    parts = trained_parts(FactoryKeys(model_name_or_path=folder, finetuning_type="freeze", **keys))
    names = [name for name, _ in read_tensors(folder)]
    wanted = {
        name
        for name in names
        if any(name.startswith(f"model.layers.{layer}.{module}") for layer in layers for module in modules)
        or any(word in name for word in extra)
    }
    assert {name for name in names if any(part in name for part in parts)} == wanted
    MCoreGPT.from_pretrained(folder, train_only=parts).check_settings()


def test_a_module_that_some_layers_lack_is_trained_in_the_others() -> None:
    """Behind Kimi Linear's first layer, experts take the place of its MLP."""
    folder, keys = str(tiny_folder("kimi_linear")), {"freeze_trainable_layers": -2, "freeze_trainable_modules": "mlp"}
    parts = trained_parts(FactoryKeys(model_name_or_path=folder, finetuning_type="freeze", **keys))  # type: ignore[arg-type]
    assert parts == ["model.layers.0.mlp."]
    MCoreGPT.from_pretrained(folder, train_only=parts).check_settings()


@pytest.mark.parametrize("stage", ["sft", "rm"])
@pytest.mark.parametrize("modules", ["mlp", "mlp,self_attn"])
def test_a_module_that_no_chosen_layer_has_is_refused(stage: str, modules: str) -> None:
    folder, keys = str(tiny_folder("kimi_linear")), {"stage": stage, "freeze_trainable_modules": modules}
    names = [name.split(".")[2:4] for name, _ in read_tensors(folder) if name.startswith("model.layers.")]
    count = len({layer for layer, _ in names}) - 1  # all but the first
    keys["freeze_trainable_layers"] = count
    assert ["0", "mlp"] in names
    with refuses(ValueError, f"freeze_trainable_modules: {modules} has 'mlp', which the layers chosen by"):
        trained_parts(FactoryKeys(model_name_or_path=folder, finetuning_type="freeze", **keys))  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 0])
def test_the_score_of_a_reward_model_is_always_trained(layers: int) -> None:
    """LLaMA-Factory adds it after it has frozen the weights. DeepSeek's ``e_score_correction_bias`` is not a score."""
    folder, keys = str(tiny_folder("deepseek_v3")), {"freeze_trainable_layers": layers}
    parts = trained_parts(FactoryKeys(model_name_or_path=folder, stage="rm", finetuning_type="freeze", **keys))
    assert parts == ["model.layers.3."] * layers + ["score.weight"]
    assert not [name for name, _ in read_tensors(folder) if "score.weight" in name]
    MCorePreference.from_pretrained(folder, preference={"loss": "reward"}, train_only=parts).check_settings()


@pytest.mark.parametrize(
    "keys",
    [
        {"freeze_trainable_layers": 0},
        {"freeze_trainable_modules": "attn"},
        {"freeze_extra_modules": "q_proj"},
    ],
)
def test_what_a_file_cannot_train_is_refused(keys: dict[str, Any]) -> None:
    with refuses(ValueError, *keys):
        trained_parts(FactoryKeys(model_name_or_path=str(tiny_folder("llama")), finetuning_type="freeze", **keys))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"train_only": "norm"}, TypeError),
        ({"train_only": []}, ValueError),
        ({"train_only": ["norm"], "lora": LoRA()}, ValueError),
        ({"train_only": ["lm_haed"]}, ValueError),
        ({"train_only": ["q_proj"]}, ValueError),
    ],
)
def test_a_choice_of_weights_that_cannot_be_is_a_sentence(settings: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *settings):
        MCoreGPT.from_pretrained(str(tiny_folder("llama")), **settings).check_settings()


def test_the_output_layer_of_a_tied_model_is_its_embedding() -> None:
    with refuses(ValueError, "name 'embed_tokens', which trains both"):
        MCoreGPT.from_pretrained(str(tiny_folder("qwen2")), train_only=["lm_head"]).check_settings()


@pytest.mark.parametrize(
    ("family", "part"), [("llama", "layers.9."), ("llama", "model.layers.4.mlp"), ("nemotron_h", "layers.40.mixer")]
)
def test_a_layer_that_the_model_lacks_is_refused_with_those_that_it_has(family: str, part: str) -> None:
    with refuses(ValueError, f"train_only has {part!r}, but the model's layers have the numbers 0 to "):
        MCoreGPT.from_pretrained(str(tiny_folder(family)), train_only=[part]).check_settings()
