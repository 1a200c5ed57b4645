# SPDX-License-Identifier: Apache-2.0
"""Adapters equal PEFT's on every layout: logits, the loss, and each gradient of a training step, in fp32.

The adapters have random A and B, for with B = 0 nothing flows through A. The embedding is trained whole beside them:
its gradient shows what flows to the layers below.
"""

import functools
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_mcore import LoRA
from lightning_mcore.hf.peft_tensors import adapter_pieces
from tests.parity.global_tensors import whole_gradients
from tests.parity.hf_training import LENGTH, Part, Reference, Seen, Watched, _mean, differences, predict_and_step, text
from tests.support.hf_models import tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("adapters"),  # they share references
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
    pytest.mark.filterwarnings(
        "ignore:The following rank_pattern keys did not match:RuntimeWarning"
    ),  # but of parameters
]

LOGITS = 1e-5
ROUNDING = 1e-6  # of the greatest logit, beside LOGITS: so much PEFT's own logits in fp32 differ from those in fp64

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
STACKED_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KIMI = ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj", "kv_b_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("llama", {"target_modules": [*ATTENTION, *MLP], "modules_to_save": ["embed_tokens"]}),
    "query and value": ("qwen3", {"target_modules": ["q_proj", "v_proj"], "r": 3}),
    "patterns": (
        "qwen2",
        {
            "target_modules": [*ATTENTION, *MLP],
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
            "alpha_pattern": {"k_proj": 5},
            "use_rslora": True,
        },
    ),
    "some layers": ("mistral", {"target_modules": ATTENTION, "layers_to_transform": [3]}),
    "lengths": ("llama", {"target_modules": [*ATTENTION, *MLP], "use_dora": True, "modules_to_save": ["embed_tokens"]}),
    "one key head": ("llama, one key head", {"target_modules": ATTENTION, "rank_pattern": {"k_proj": 2}}),
    "lengths of one key head": ("llama, one key head", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "lengths with biases": ("qwen2", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "latent attention": ("deepseek_v3", {"target_modules": LATENT, "modules_to_save": ["embed_tokens"]}),
    "output layer": ("llama", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True}),
    "lengths of the output layer": ("llama", {"target_modules": ["lm_head"], "use_dora": True}),
    "delta nets": (
        "qwen3_next",
        {"target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"], "use_dora": True},
    ),
    "delta nets in parts": ("qwen3_5_text", {"target_modules": "all-linear"}),
    "Kimi delta attention": ("kimi_linear", {"target_modules": KIMI}),
    "lengths of Kimi delta attention": ("kimi_linear", {"target_modules": KIMI, "use_dora": True}),
    "mamba": ("granitemoehybrid, dense", {"target_modules": [*ATTENTION, "in_proj", "out_proj", "input_linear"]}),
    "layers of one part": (
        "nemotron_h",
        {
            "target_modules": ["in_proj", "q_proj", "up_proj", "down_proj"],
            "exclude_modules": ["experts"],
            "use_dora": True,
        },
    ),
    "narrow experts": (
        "nemotron_h, latent experts",
        {"target_modules": ["o_proj", "fc1_latent_proj", "fc2_latent_proj"], "use_dora": True},
    ),
    "joined projections": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "lengths of joined projections": ("glm4", {"target_modules": ["q_proj", "gate_up_proj"], "use_dora": True}),
    "router": ("mixtral", {"target_modules": ["v_proj"], "target_parameters": ["gate.weight"]}),
    "gates": ("qwen2_moe", {"target_modules": ["shared_expert_gate"], "target_parameters": ["gate.weight"]}),
    "shared expert": ("qwen2_moe", {"target_modules": [*ATTENTION, *MLP]}),
    "stacked experts": (
        "deepseek_v3",
        {
            "target_modules": ["o_proj"],
            "target_parameters": [
                "experts.gate_up_proj",
                "experts.down_proj",
                "shared_experts.up_proj.weight",
                "mlp.down_proj.weight",
                "gate.weight",
            ],
            "rank_pattern": {"gate_up_proj": 3},
            "modules_to_save": ["embed_tokens"],
        },
    ),
    "stacked experts alone": ("mixtral", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
}

OF_SHARED = [f"{module}.{name}.weight" for module in ("mlp", "shared_experts") for name in MLP]
EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    "every target of mistral": ("mistral", {"target_modules": "all-linear"}),
    "every target of qwen3": ("qwen3", {"target_modules": "all-linear", "use_dora": True}),
    "every target of mixtral": ("mixtral", {"target_modules": ATTENTION, "target_parameters": STACKED_EXPERTS}),
    "every target of qwen2_moe": (
        "qwen2_moe",
        {"target_modules": [*ATTENTION, *MLP], "target_parameters": STACKED_EXPERTS},
    ),
    "every target of qwen3_moe": ("qwen3_moe", {"target_modules": ATTENTION, "target_parameters": STACKED_EXPERTS}),
    "every target of deepseek_v3": (
        "deepseek_v3",
        {"target_modules": LATENT, "target_parameters": [*STACKED_EXPERTS, *OF_SHARED]},
    ),
}
CASES |= EVERY
CASES |= {
    "every target of glm4_moe": (
        "glm4_moe",
        {"target_modules": ATTENTION, "target_parameters": [*STACKED_EXPERTS, *OF_SHARED], "use_rslora": True},
    ),
}

EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {"target_modules": [*ATTENTION, *MLP]}),
    "some experts": ("deepseek_v3", {"target_modules": r".*\.mlp\.experts\.[0-4]\.(up|down)_proj|.*o_proj"}),
}
"""PEFT does not make such adapters any more; the step with them is transformers' with the changed weights."""

EXPERT_LAYOUTS: tuple[Layout, ...] = (
    Layout(),
    Layout(tp=2, sp=True),  # experts are cut like the rest: expert_tensor_parallel_size=2
    Layout(moe=True, dp=2, ep=2),
    Layout(moe=True, tp=2, sp=True, ep=2, etp=1),
    Layout(moe=True, dp=2, pp=2, ep=2),
)

ROUTERS = ("router", "gates")
JOINED = ("joined projections", "lengths of joined projections")
STACKED = ("stacked experts", "stacked experts alone")
LAYOUTS: dict[Layout, tuple[str, ...]] = {
    Layout(): tuple(CASES),
    Layout(tp=2): (
        "all",
        "query and value",
        "patterns",
        "some layers",
        "lengths",
        "lengths with biases",
        "embedding",
        "lengths of the output layer",
        "one key head",
        *JOINED,
    ),
    Layout(tp=2, sp=True): (
        "one key head",
        "lengths of one key head",
        "all",
        "lengths",
        "lengths with biases",
        "latent attention",
        "shared expert",
        "embedding",
        "output layer",
        "delta nets",
        "Kimi delta attention",
        "lengths of Kimi delta attention",
        "mamba",
        "layers of one part",
        "narrow experts",
        *JOINED,
        "gates",
        "stacked experts",
    ),
    Layout(pp=2): ("all", "output layer", "some layers", "patterns", "embedding"),
    Layout(pp=2, vp=2): ("all", "some layers"),
    Layout(cp=2): ("all", "lengths", "latent attention", "delta nets in parts", "Kimi delta attention", "mamba"),
    Layout(moe=True, dp=2, ep=2): STACKED,
    Layout(moe=True, tp=2, sp=True, ep=2, etp=1): (*STACKED, *ROUTERS),
    Layout(moe=True, dp=2, pp=2, ep=2): STACKED,
    Layout(tp=2, pp=2, sp=True): ("all", "shared expert"),
    Layout(tp=2, cp=2, sp=True): ("all", "patterns", "lengths", *STACKED, "embedding", *ROUTERS),
}


@dataclass(frozen=True)
class Adapted(Reference):
    """What a step of a model with an adapter by PEFT gives; gradients by the names of the adapter's file.

    Attributes:
        folder: Of the adapter.
    """

    folder: str


@functools.cache
def reference(case: str) -> Adapted:
    """Run a step of a tiny model with a random adapter, with PEFT in fp32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    family, settings = CASES[case]
    base = AutoModelForCausalLM.from_pretrained(
        tiny_folder(family), dtype=torch.float32, attn_implementation="eager"
    ).train()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6, **settings}))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=_generator(name))
                parameter.copy_(parameter * (1 + 0.1 * noise) if "magnitude" in name else noise * 0.05)
    folder = tempfile.mkdtemp(dir=_folders().name)
    # As PEFT does on its own, with a copy of the frozen embedding and output layer that have adapters.
    model.save_pretrained(folder, save_embedding_layers=case == "embedding")
    batch = text()
    logits = model(batch["tokens"]).logits
    loss = _mean(logits, batch["labels"])
    loss.backward()
    gradients = {
        name.replace(".default", "").replace(".modules_to_save", "").replace("vector.weight", "vector"): parameter.grad
        for name, parameter in trained.items()
    }
    return Adapted(logits.detach(), loss.item(), gradients, folder)


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="adapters_")  # removed when this process ends


@functools.cache
def reference_of_experts(case: str) -> Adapted:
    """Run a step of a tiny model whose weights are W + scale * B A, which autograd follows to A and B."""
    from transformers import AutoModelForCausalLM

    family, settings = EXPERTS[case]
    lora = LoRA(r=3, lora_alpha=6, **settings)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder(family), dtype=torch.float32, attn_implementation="eager"
    ).train()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    trained: dict[str, Tensor] = {}

    def changed(name: str, weight: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        if not lora.adapts(module):
            return weight
        a, b = torch.empty(lora.r, weight.shape[1]), torch.empty(weight.shape[0], lora.r)
        for kind, tensor in (("lora_A", a), ("lora_B", b)):
            key = f"base_model.model.{module}.{kind}.weight"
            trained[key] = tensor.normal_(std=0.05, generator=_generator(key)).requires_grad_()
        return weight + lora.scale(module) * b @ a

    for name, weight in weights.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            halves = [weight[:, : weight.shape[1] // 2], weight[:, weight.shape[1] // 2 :]]
            parts = [
                [changed(f"{stem}.{expert}.{part}_proj.weight", rows) for expert, rows in enumerate(half)]
                for part, half in zip(("gate", "up"), halves, strict=True)
            ]
            weights[name] = torch.cat([torch.stack(part) for part in parts], 1)
        elif last == "down_proj":
            weights[name] = torch.stack(
                [changed(f"{stem}.{expert}.{last}.weight", rows) for expert, rows in enumerate(weight)]
            )
        elif weight.dim() == 2:
            weights[name] = changed(name, weight)
    folder = tempfile.mkdtemp(dir=_folders().name)
    save_file({key: tensor.detach() for key, tensor in trained.items()}, f"{folder}/adapter_model.safetensors")
    Path(folder, "adapter_config.json").write_text(
        json.dumps({"r": lora.r, "lora_alpha": lora.lora_alpha, "peft_type": "LORA", **settings})
    )
    batch = text()
    logits = torch.func.functional_call(model, weights, (batch["tokens"],)).logits
    loss = _mean(logits, batch["labels"])
    loss.backward()
    # An expert that no token chose has gradients of zero.
    gradients = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in trained.items()}
    return Adapted(logits.detach(), loss.item(), gradients, folder)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))


class WatchedAdapters(Watched):
    """Keeps the gradients of adapters under their names in PEFT's file."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients: dict[int, Tensor] = {}
        for chunk in self.trainer.strategy._chunks.ddp:
            gradients |= whole_gradients(chunk)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        kept = [parameter.data.clone() for parameter in trained]
        for parameter in trained:
            parameter.data.copy_(gradients[parameter.data_ptr()])
        pieces = adapter_pieces(self, self.lora)
        self.gradients = [Part(piece.key, piece.start, piece.data.detach().clone(), piece.view) for piece in pieces]
        for parameter, old in zip(trained, kept, strict=True):
            parameter.data.copy_(old)


def train(adapters: dict[str, tuple[str, str]], layout: Layout) -> dict[str, Seen]:
    """Predict with several models and their adapters, one after the other, and train each for one step."""
    return {case: _train(folder, adapter, layout) for case, (folder, adapter) in adapters.items()}


def _train(folder: str, adapter: str, layout: Layout) -> Seen:
    module = WatchedAdapters.from_pretrained(folder, seq_length=LENGTH, lora=adapter)
    return predict_and_step(module, layout)


STAY = ("one", "tp2-sp", "pp2", "cp2", "moe-tp2-sp-ep2-etp1")
SPLIT = {case for layout, cases in LAYOUTS.items() if layout.id in STAY[1:] for case in cases}


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, *STAY))
def test_a_step_with_adapters_is_that_of_peft(layout: Layout) -> None:
    left = {*EVERY, *(SPLIT if layout == Layout() else ())}
    cases = [case for case in LAYOUTS[layout] if case not in left]
    _compare(layout, {case: (CASES[case][0], reference(case)) for case in cases})


@pytest.mark.thorough
def test_a_step_with_adapters_of_every_target_and_on_one_rank_is_that_of_peft() -> None:
    _compare(Layout(), {case: (CASES[case][0], reference(case)) for case in CASES if case in {*EVERY, *SPLIT}})


@pytest.mark.parametrize("layout", thorough_but(EXPERT_LAYOUTS, "tp2-sp", "moe-tp2-sp-ep2-etp1"))
def test_a_step_with_adapters_of_experts_is_that_of_changed_weights(layout: Layout) -> None:
    _compare(layout, {case: (EXPERTS[case][0], reference_of_experts(case)) for case in EXPERTS})


def _compare(layout: Layout, cases: dict[str, tuple[str, Adapted]]) -> None:
    adapters = {case: (str(tiny_folder(family)), wanted.folder) for case, (family, wanted) in cases.items()}
    ranks = run_ranks(layout.world_size, train, adapters, layout, timeout=120)
    found = {case: adapted_differences(wanted, [seen[case] for seen in ranks]) for case, (_, wanted) in cases.items()}
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


def adapted_differences(wanted: Adapted, ranks: list[Seen]) -> dict[str, float]:
    """Return what differs by more than it may, of which the logits may also differ by how PEFT's own are rounded."""
    return differences(wanted, ranks, LOGITS + ROUNDING * wanted.logits.abs().max().item())
