# SPDX-License-Identifier: Apache-2.0
"""The norm of the torch backend, the choice of a backend, and the specs that Megatron builds its layers from."""

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import Tensor

from lightning_mcore import MCoreGPT
from lightning_mcore.layers import spec as backend
from lightning_mcore.layers.activations import xielu
from lightning_mcore.layers.norms import LatentNorm
from lightning_mcore.layers.session import single_process
from lightning_mcore.layers.spec import TorchAttention, TorchNorm, gpt_block_spec, resolve_transformer_impl
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from tests.support.sentences import refuses

MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall"}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 8}


def config_of(**fields: Any) -> TransformerConfig:
    return build_transformer_config({**MODEL, **{name: fields.pop(name) for name in LATENT if name in fields}}, fields)


# The norm


def reference_norm(hidden: Tensor, norm: TorchNorm, centred: bool) -> Tensor:
    """Normalise in double precision, written out."""
    hidden = hidden.double()
    if norm.bias is not None:
        hidden = hidden - hidden.mean(-1, keepdim=True)
    hidden = hidden / (hidden.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    hidden = hidden * (norm.weight.double() + centred)
    return hidden if norm.bias is None else hidden + norm.bias.double()


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1.6e-2)])
def test_norm_and_its_gradients(kind: str, centred: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Relative to the largest value; measured: 1.8e-7 in fp32, 7.9e-3 in bf16."""
    config = config_of(normalization=kind, layernorm_zero_centered_gamma=centred, params_dtype=dtype)
    norm = TorchNorm(config, 32, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.1 * torch.randn(32, generator=generator))
    hidden, weights = (torch.randn(7, 2, 32, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    inputs = [hidden, *norm.parameters()]

    actual, expected = norm(hidden), reference_norm(hidden, norm, centred)

    assert actual.dtype is dtype
    pairs = [(actual, expected)]
    pairs += zip(
        torch.autograd.grad(actual, inputs, weights),
        torch.autograd.grad(expected, inputs, weights.double()),
        strict=True,
    )
    for value, reference in pairs:
        assert (value.double() - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_stream_kept_in_fp32_is_normalised_there_and_rounded_once(kind: str) -> None:
    config = config_of(normalization=kind, params_dtype=torch.bfloat16, fp32_residual_connection=True)
    norm = TorchNorm(config, 32)
    hidden = torch.randn(7, 2, 32, generator=torch.Generator().manual_seed(1))

    actual, exact = norm(hidden), reference_norm(hidden, norm, centred=False)

    assert actual.dtype is torch.bfloat16
    assert (actual.double() - exact).abs().max() <= 2**-8 * exact.abs().max()  # half a unit of the last of 8 bits


@pytest.mark.parametrize("centred", [False, True])
def test_a_fresh_norm_only_normalises(centred: bool) -> None:
    norm = TorchNorm(config_of(layernorm_zero_centered_gamma=centred), 32)

    assert torch.equal(norm(torch.eye(32)), torch.nn.functional.layer_norm(torch.eye(32), (32,)))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_of_norms_are_summed_over_ranks_that_split_the_sequence(kind: str, split: bool) -> None:
    config = config_of(normalization=kind, tensor_model_parallel_size=2, sequence_parallel=split)

    marks = {parameter.sequence_parallel for parameter in TorchNorm(config, 32).parameters()}

    assert marks == {split}


def test_names_and_dtype_of_the_weights_are_those_of_megatrons_norms() -> None:
    norms = {
        kind: TorchNorm(config_of(normalization=kind, params_dtype=torch.bfloat16), 32)
        for kind in ("LayerNorm", "RMSNorm")
    }

    assert list(norms["LayerNorm"].state_dict()) == ["weight", "bias"]
    assert list(norms["RMSNorm"].state_dict()) == ["weight"]
    assert {tensor.dtype for norm in norms.values() for tensor in norm.state_dict().values()} == {torch.bfloat16}
    assert "RMSNorm, 32, eps=1e-05" in str(norms["RMSNorm"])


def test_an_unknown_norm_is_refused() -> None:
    with refuses(ValueError, "normalization='L2Norm'"):
        TorchNorm(config_of(normalization="L2Norm"), 32)


# The choice of a backend


@pytest.mark.parametrize(
    ("choice", "device", "installed", "expected"),
    [
        ("auto", "cuda", True, "transformer_engine"),
        ("auto", "cuda", False, "local"),
        ("auto", "cpu", True, "local"),
        ("auto", "cpu", False, "local"),
        ("local", "cuda", True, "local"),
        ("local", "cpu", False, "local"),
        ("transformer_engine", "cuda", True, "transformer_engine"),
    ],
)
def test_transformer_engine_is_chosen_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, choice: Any, device: str, installed: bool, expected: str
) -> None:
    monkeypatch.setattr(backend, "HAVE_TE", installed)

    assert resolve_transformer_impl(choice, device) == expected


@pytest.mark.parametrize(
    ("choice", "device", "installed", "error"),
    [
        ("transformer_engine", "cuda", False, ModuleNotFoundError),
        ("transformer_engine", "cpu", True, ValueError),
        ("transformer_engine", "cpu", False, ValueError),
        ("te", "cuda", True, ValueError),
    ],
)
def test_a_backend_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    choice: Any,
    device: str,
    installed: bool,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(backend, "HAVE_TE", installed)

    with refuses(error):
        resolve_transformer_impl(choice, device)


# Specs


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend to be a pipeline rank: specs ask for nothing else of the process groups."""

    def pretend(pp_rank: int) -> None:
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: pp_rank)

    pretend(0)
    return pretend


def is_moe(layer: ModuleSpec) -> bool:
    mlp = layer.submodules.mlp
    return (mlp.module if isinstance(mlp, ModuleSpec) else mlp.func) is MoELayer


@pytest.mark.usefixtures("stage")
def test_a_dense_spec_has_our_norms_and_core_attention() -> None:
    block = gpt_block_spec(config_of(), "local")

    assert block.layer_norm is TorchNorm
    assert len(block.layer_specs) == 4
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        assert attention.core_attention is TorchAttention
        assert layer.submodules.input_layernorm is layer.submodules.pre_mlp_layernorm is TorchNorm
        assert attention.q_layernorm is attention.k_layernorm is IdentityOp
        assert not is_moe(layer)


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize(("frequency", "pattern"), [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])])
def test_experts_stand_where_their_frequency_says(frequency: Any, pattern: list[int]) -> None:
    block = gpt_block_spec(config_of(**EXPERTS, moe_layer_freq=frequency), "local")

    assert [int(is_moe(layer)) for layer in block.layer_specs] == pattern
    assert {layer.submodules.pre_mlp_layernorm for layer in block.layer_specs} == {TorchNorm}


@pytest.mark.usefixtures("stage")
def test_norms_of_queries_and_keys_are_ours() -> None:
    attention = gpt_block_spec(config_of(qk_layernorm=True), "local").layer_specs[0].submodules.self_attention

    assert attention.submodules.q_layernorm is attention.submodules.k_layernorm is TorchNorm


@pytest.mark.usefixtures("stage")
def test_l2_norms_of_queries_and_keys_stay_megatrons() -> None:
    config = config_of()
    config.qk_l2_norm = True  # a field in later versions

    attention = gpt_block_spec(config, "local").layer_specs[0].submodules.self_attention.submodules

    assert attention.q_layernorm is attention.k_layernorm is L2Norm


@pytest.fixture
def latent_is_buildable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what keeps megatron-core 0.16 from latent attention without TransformerEngine."""
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)


@pytest.mark.usefixtures("stage", "latent_is_buildable")
def test_latent_attention_has_our_norms_and_core_attention() -> None:
    attention = gpt_block_spec(config_of(**LATENT, qk_layernorm=True), "local").layer_specs[0].submodules.self_attention

    assert attention.module is multi_latent_attention.MLASelfAttention
    assert attention.submodules.core_attention is TorchAttention
    assert issubclass(attention.submodules.q_layernorm, TorchNorm)
    assert attention.submodules.kv_layernorm is LatentNorm


@pytest.mark.parametrize(
    ("rank", "vp_stage", "fields", "layers"),
    [
        (0, None, {"pipeline_model_parallel_size": 2}, [0, 1]),
        (1, None, {"pipeline_model_parallel_size": 2}, [2, 3]),
        (1, None, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}, [3]),
        (0, 1, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, [2]),
        (1, 1, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, [3]),
        (0, None, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t*3L"}, [0]),
        (1, None, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t*3L"}, [1, 2, 3]),
    ],
)
def test_a_chunk_has_the_layers_of_its_stage(
    stage: Any, rank: int, vp_stage: int | None, fields: dict[str, Any], layers: list[int]
) -> None:
    pattern = [1, 1, 0, 1]
    stage(rank)
    config = config_of(**EXPERTS, **fields, moe_layer_freq=pattern, pipeline_dtype=torch.float32)

    block = gpt_block_spec(config, "local", vp_stage)

    assert [int(is_moe(layer)) for layer in block.layer_specs] == [pattern[layer] for layer in layers]


@pytest.mark.usefixtures("stage", "latent_is_buildable")
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {},
            {
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
        (EXPERTS, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}),
        (
            LATENT | EXPERTS,
            {
                "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
                "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
            },
        ),
    ],
)
def test_checkpoints_name_norms_as_transformer_engine_does(fields: dict[str, Any], names: dict[str, str]) -> None:
    layer = gpt_block_spec(config_of(**fields), "local").layer_specs[0]

    assert layer.submodules.sharded_state_dict_keys_map == names


@pytest.mark.usefixtures("stage")
def test_the_spec_of_transformer_engine_is_handed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def record(config: TransformerConfig, **arguments: Any) -> Any:
        calls.append(arguments)
        return get_gpt_decoder_block_spec(config, **(arguments | {"use_transformer_engine": False}))

    monkeypatch.setattr(backend, "get_gpt_decoder_block_spec", record)

    block = gpt_block_spec(config_of(softmax_type="learnable"), "transformer_engine", vp_stage=None)

    assert calls == [{"use_transformer_engine": True, "qk_l2_norm": False, "vp_stage": None}]
    assert block.layer_norm is not TorchNorm


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_grouped_gemm", True),
        ("persist_layer_norm", True),
        ("memory_efficient_layer_norm", True),
        ("qk_clip", True),
        ("fp8", "hybrid"),
        ("apply_rope_fusion", True),
        ("experimental_attention_variant", "dsa"),
        ("normalization", "L2Norm"),
        ("recompute_modules", ["layernorm"]),
        ("window_size", (8, 4)),
    ],
)
def test_what_only_transformer_engine_can_do_is_refused_before_a_module_is_built(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    config = config_of()
    config.recompute_granularity = "selective"
    monkeypatch.setattr(backend, "HAVE_TE", False)
    setattr(config, field, value)  # Megatron's own checks of some of these differ from version to version

    with refuses(ValueError):
        gpt_block_spec(config, "local")


@pytest.mark.usefixtures("stage")
def test_latent_attention_that_megatron_cannot_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)

    with refuses(ValueError, "multi_latent_attention=True"):
        gpt_block_spec(config_of(**LATENT), "local")


# Versions of TransformerEngine


@pytest.mark.parametrize(
    ("megatron_core", "transformer_engine", "tested"),
    [
        ("0.16.1", "2.9.0", True),
        ("0.16.1", "2.11.0+c188b53", True),
        ("0.16.1", "2.12.0", False),
        ("0.16.1", "2.20.2", False),
        ("0.19.2", "2.20.2", True),
        ("0.19.2", "2.14.0.dev0", True),
        ("0.17.0", "2.11.0", False),
        ("0.19.2", "2.21.0", False),
    ],
)
def test_a_transformer_engine_that_was_not_tested_is_named(
    megatron_core: str, transformer_engine: str, tested: bool
) -> None:
    sentence = backend.untested_versions(megatron_core, transformer_engine)
    assert (sentence is None) == tested
    if sentence is not None:
        assert f"TransformerEngine {transformer_engine} is untested with megatron-core {megatron_core}" in sentence


# Each tensor-parallel rank has experts of its own.
SPREAD = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("megatron_core", "transformer_engine", "sizes", "refused"),
    [
        ("0.18.2", "2.14.0", {"tensor_model_parallel_size": 2}, True),
        ("0.17.1", "2.20.2", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, True),
        ("0.16.1", "2.13.0", {"tensor_model_parallel_size": 2}, True),
        ("0.19.2", "2.20.2", {"tensor_model_parallel_size": 2}, False),
        ("0.18.2", "2.12.0", {"tensor_model_parallel_size": 2}, False),
        ("0.18.2", "2.14.0", {}, False),
        ("0.18.2", "2.14.0", {**SPREAD, "expert_tensor_parallel_size": 1}, False),
        ("0.18.2", "2.14.0", {"tensor_model_parallel_size": 2, "moe_grouped_gemm": False}, False),
    ],
)
def test_releases_that_leave_slices_of_experts_out_of_the_norm_are_refused(
    megatron_core: str, transformer_engine: str, sizes: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"megatron-core": megatron_core, "transformer-engine": transformer_engine}
    monkeypatch.setattr(backend, "installed_version", versions.get)
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_grouped_gemm": True, "add_bias_linear": False}
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **experts | sizes)
    sentence = f"megatron-core {megatron_core} with TransformerEngine {transformer_engine} leaves experts out of"
    with pytest.raises(ValueError, match=sentence) if refused else contextlib.nullcontext():
        backend.check_backend(config, "transformer_engine", "cuda")


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
def test_transformer_engine_splits_sequences_in_half_precision_only() -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "context_parallel_size": 2}
    backend.check_backend(TransformerConfig(bf16=True, **sizes), "transformer_engine", "cuda")
    with refuses(ValueError, "context_parallel_size=2 with TransformerEngine's attention needs bf16 or fp16"):
        backend.check_backend(TransformerConfig(**sizes), "transformer_engine", "cuda")


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
@pytest.mark.parametrize("fields", [{"gated_linear_unit": True}, {"num_moe_experts": 4, "moe_ffn_hidden_size": 16}])
def test_a_learned_activation_in_a_gate_or_an_expert_is_refused(fields: dict[str, Any]) -> None:
    given = {"activation_func": xielu, "add_bias_linear": False, **fields}
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **given)
    with refuses(ValueError, "activation_func='xielu'"):
        backend.check_backend(config, "local", "cpu")


def test_choosing_an_untested_transformer_engine_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    versions = {"megatron-core": "0.16.1", "transformer-engine": "2.20.2"}
    monkeypatch.setattr(backend, "HAVE_TE", True)
    monkeypatch.setattr(backend, "installed_version", versions.get)
    backend._warn_of_versions.cache_clear()
    for _ in range(2):
        assert resolve_transformer_impl("auto", "cuda") == "transformer_engine"
    assert [record.name for record in caplog.records if "is untested with" in record.message] == [
        "lightning_mcore.layers.spec"
    ]
    backend._warn_of_versions.cache_clear()


def test_the_extra_of_this_package_installs_what_was_tested() -> None:
    root = Path(__file__).resolve().parents[3]
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["te"]
    bounds = [Requirement(line) for line in extra]
    assert {str(requirement.specifier) for requirement in bounds} == {
        str(SpecifierSet(tested)) for tested in backend.TESTED_TRANSFORMER_ENGINE.values()
    }
    for python, megatron_core in (("3.11", "0.16.1"), ("3.12", "0.19.2"), ("3.13", "0.19.2")):
        [chosen] = [r for r in bounds if r.marker is not None and r.marker.evaluate({"python_version": python})]
        newest = {"<2.12,>=2.9": "2.11.0", "<2.21,>=2.14": "2.20.2"}[str(chosen.specifier)]
        assert chosen.specifier.contains(newest)
        assert backend.untested_versions(megatron_core, newest) is None


# A whole model in one process of a machine with a GPU


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_whole_model_is_built_on_one_device() -> None:
    transformer = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "moe_layer_freq": [0, 1],
        "mtp_num_layers": 1,
        "normalization": "RMSNorm",
        "perform_initialization": False,
    }
    module = MCoreGPT(vocab_size=64, seq_length=16, transformer=transformer)
    with cpu_runtime(), single_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))  # stands for a GPU
        module.configure_model()
    named = [*module.model.named_parameters(), *module.model.named_buffers()]
    assert len(named) > 20
    assert [name for name, tensor in named if tensor.device.type != "meta"] == []
