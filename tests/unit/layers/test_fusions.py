# SPDX-License-Identifier: Apache-2.0
"""Which fused kernels a model and its optimizer get on a GPU, decided without one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mcore import MCoreGPT, MCoreModule
from lightning_mcore.config.field_homes import fusion_defaults
from lightning_mcore.config.run import RunSettings
from lightning_mcore.layers.inputs import ModelInputs
from lightning_mcore.models import gpt
from lightning_mcore.optimizer.parts import fused_kernel
from lightning_mcore.planning.rules import check_run
from tests.support.sentences import refuses

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {**SIZES, "gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
STRETCH = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 16
}
DENSE = ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2}
OF_EXPERTS = ("moe_grouped_gemm", "moe_permute_fusion")


@pytest.mark.parametrize(
    ("changes", "others", "expected"),
    [
        ({}, {}, DENSE),
        (EXPERTS, {}, (*DENSE, *OF_EXPERTS)),
        ({"apply_rope_fusion": False, "bias_dropout_fusion": True}, {}, ("bias_activation_fusion",)),
        ({"rotary_interleaved": True}, {}, DENSE[1:]),
        ({"multi_latent_attention": True}, {}, DENSE[1:]),
        ({}, {"position_embedding_type": "yarn"}, DENSE[1:]),
        ({"activation_func": "gelu"}, {}, (DENSE[0], DENSE[2])),  # Megatron's fused GELU is an approximation
        ({"activation_func_clamp_value": 7.0}, {}, (DENSE[0], DENSE[2])),
        ({"hidden_dropout": 0.1}, {}, DENSE[:2]),
        ({**EXPERTS, "add_bias_linear": True}, {}, (DENSE[0], *OF_EXPERTS)),
        ({**EXPERTS, "moe_expert_capacity_factor": 1.0}, {}, (*DENSE, OF_EXPERTS[0])),
        (EXPERTS, {"has_adapters": True}, (*DENSE, OF_EXPERTS[1])),
        ({}, {"architecture": {"stretch": STRETCH}}, DENSE[1:]),
    ],
    ids=str,
)
def test_fusions_are_on_where_they_compute_the_same(
    changes: dict[str, Any], others: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert fusion_defaults({**LLAMA, **changes}, **others) == dict.fromkeys(expected, True)


@pytest.mark.parametrize(("device", "impl", "fused"), [("cuda", "transformer_engine", True), ("cuda", "local", False)])
def test_a_model_on_a_gpu_gets_them(device: str, impl: Any, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MCoreGPT, "_device_type", lambda self: device)
    monkeypatch.setattr(gpt, "resolve_transformer_impl", lambda choice, device_type: choice)
    monkeypatch.setattr(gpt, "fusion_defaults", lambda *given: {"bias_dropout_fusion": True})
    config = MCoreGPT(64, 32, LLAMA, transformer_impl=impl)._build_config()
    assert config.bias_dropout_fusion == fused


def test_a_model_on_the_cpu_gets_none() -> None:
    config = MCoreGPT(64, 32, LLAMA)._build_config()
    assert not any(getattr(config, name) for name in (*DENSE, *OF_EXPERTS))


@pytest.mark.parametrize("stretch", [None, STRETCH])
def test_the_plan_has_those_of_the_run(stretch: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MCoreGPT, "_device_type", lambda self: "cuda")
    monkeypatch.setattr(MCoreGPT, "_impl", lambda self, device_type: "transformer_engine")
    model: dict[str, Any] = {"vocab_size": 64, "seq_length": 32, "transformer": LLAMA}
    model |= {"architecture": {"stretch": stretch}} if stretch else {}
    run = check_run(RunSettings(model=model, trainer={}), 1, "transformer_engine")
    assert run.fields is not None, run.errors
    planned = {name: run.fields.transformer.get(name, False) for name in DENSE}
    assert planned == {name: MCoreGPT(**model)._fusions().get(name, False) for name in DENSE}


@pytest.mark.parametrize(("backend", "said"), [("transformer_engine", True), ("local", False)])
def test_the_plan_names_them(backend: str, said: bool) -> None:
    settings = RunSettings(model={"vocab_size": 64, "seq_length": 32, "transformer": LLAMA}, trainer={})
    run = check_run(settings, 1, backend)
    sentence = "fused, unless model.transformer sets these fields: " + ", ".join(DENSE)
    assert (sentence in run.assumptions) == said
    assert run.fields is not None
    assert bool(run.fields.transformer.get("apply_rope_fusion")) == said


@pytest.mark.parametrize(
    "changes",
    [{"rotary_interleaved": True}, {"yarn_rotary_scaling_factor": 4.0}],
)
def test_fused_rotation_of_packed_rows_is_refused_where_it_ignores_a_setting(changes: dict[str, Any]) -> None:
    ends = torch.tensor([[0, 8]])
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.long), "cu_seqlens": ends, "cu_seqlens_padded": ends}
    fields = {"multi_latent_attention": False, "rotary_interleaved": False, "mtp_num_layers": None} | changes
    config: Any = SimpleNamespace(num_moe_experts=None, apply_rope_fusion=True, **fields)
    with refuses(ValueError, "apply_rope_fusion=True"):
        ModelInputs.of(batch).arguments(config)
    config.apply_rope_fusion = False
    assert "packed_seq_params" in ModelInputs.of(batch).arguments(config)


def test_torchs_optimizers_step_in_one_kernel_on_a_gpu_unless_another_was_chosen() -> None:
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), nn.Parameter(torch.zeros(1))
    plain = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
    assert fused_kernel({**plain, "params": [on_gpu]}) == {"fused": True}
    others = ({"foreach": False}, {"foreach": True}, {"fused": False}, {"capturable": True}, {"params": [on_cpu]})
    for changes in (*others, {"params": []}):
        assert fused_kernel({**plain, "params": [on_gpu], **changes}) == {}
    assert fused_kernel({"params": [on_gpu]}) == {}  # TransformerEngine's, which are fused


def test_a_fused_loss_leaves_the_logits_of_one_row_as_they_are() -> None:
    class Overwriting:
        config = SimpleNamespace(cross_entropy_loss_fusion=True)

        def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return logits.zero_().sum(-1).transpose(0, 1)

    module: Any = SimpleNamespace(_pipeline_of_step=lambda: SimpleNamespace(chunks=[Overwriting()], is_last=[True]))
    logits = torch.ones(1, 8, 16)
    MCoreModule.losses_of_logits(module, logits, SimpleNamespace(labels=torch.zeros(1, 8)))  # type: ignore[arg-type]
    assert bool((logits == 1).all())
