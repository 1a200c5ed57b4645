# SPDX-License-Identifier: Apache-2.0
"""Linear layers that only multiply have Megatron's results and gradients, and others stay as they are."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers as megatron_layers
from torch import Tensor

from lightning_mcore import LoRA, MCoreGPT, add_lora
from lightning_mcore.layers.adapted_layers import add_bias_apart
from lightning_mcore.layers.direct_linear import direct_products
from lightning_mcore.layers.latent_experts import WholeLinear
from lightning_mcore.layers.session import single_process

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Warning. tp_group is None")  # Megatron's

BIASED = {"add_bias_linear": True, "add_qkv_bias": True}  # linear_qkv adds its bias itself, the others do not


@pytest.fixture
def chunk() -> Any:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
    module = MCoreGPT(64, 16, {**sizes, **BIASED})
    with single_process():
        module.configure_model()
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        yield module.model.chunks[0]


def outputs(chunk: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, layer in chunk.named_modules():
        if isinstance(layer, megatron_layers.ColumnParallelLinear | megatron_layers.RowParallelLinear):
            found[name] = layer(torch.randn(3, 2, layer.weight.size(1), generator=generator))
    return found


@torch.no_grad()
def test_plain_layers_only_multiply_with_the_same_results(chunk: Any) -> None:
    expected = outputs(chunk)

    function = mock.Mock(side_effect=AssertionError)
    with (
        mock.patch.object(megatron_layers, "linear_with_grad_accumulation_and_async_allreduce", function),
        direct_products(chunk.modules()),
    ):
        found = outputs(chunk)

    assert len(found) == 5
    for name, (output, bias) in found.items():
        assert torch.equal(output, expected[name][0])
        assert bias is expected[name][1]
    assert not any("forward" in vars(layer) for layer in chunk.modules())


@torch.no_grad()
def test_layers_that_compute_more_are_left_as_they_are(chunk: Any) -> None:
    add_lora(chunk, LoRA(r=2, target_modules=["linear_qkv", "linear_fc2"]))
    adapted = [name for name, child in chunk.named_modules() if "lora" in dict(child.named_children())]
    for name, parameter in chunk.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter)
    chunk.output_layer.register_forward_hook(lambda layer, inputs, output: (2 * output[0], output[1]))
    expected = outputs(chunk)

    with direct_products(chunk.modules()):
        found = outputs(chunk)

    assert len(adapted) == 2
    compared: list[tuple[Tensor, Tensor]] = [(found[name][0], expected[name][0]) for name in found]
    assert all(torch.equal(value, other) for value, other in compared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_layers_below_adapters_only_multiply_with_the_same_gradients(chunk: Any, dtype: torch.dtype) -> None:
    add_lora(chunk, LoRA(r=2, target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]))
    adapted = [child for child in chunk.modules() if "lora" in dict(child.named_children())]
    for name, parameter in chunk.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter)
    chunk.to(dtype)
    tokens = torch.arange(32).view(2, 16)

    def loss_and_gradients() -> list[Tensor]:
        chunk.zero_grad()
        losses = chunk(tokens, torch.arange(16).expand(2, 16), None, labels=(3 * tokens) % 64)
        losses.sum().backward()
        return [losses.detach(), *(parameter.grad for parameter in chunk.parameters() if parameter.requires_grad)]

    own = megatron_layers.linear_with_frozen_weight
    with mock.patch.object(megatron_layers, "linear_with_frozen_weight", wraps=own) as megatrons:
        found = loss_and_gradients()
        direct_calls = megatrons.call_count
        for layer in adapted:
            type(layer).is_plain = False  # type: ignore[attr-defined]
        expected = loss_and_gradients()

    assert (direct_calls, megatrons.call_count) == (1, 1 + 5)  # the output layer has no adapter
    assert len(adapted) == 4
    assert len(found) == 1 + sum(parameter.requires_grad for parameter in chunk.parameters()) > 8
    assert all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))
    assert all(float(gradient.abs().sum()) > 0 for gradient in found)


def test_a_trained_layer_below_adapters_is_megatrons(chunk: Any) -> None:
    add_lora(chunk, LoRA(r=2, target_modules=["linear_proj"]))
    layer = chunk.decoder.layers[0].self_attention.linear_proj
    layer.weight.requires_grad_()

    function = mock.patch.object(
        megatron_layers, "linear_with_grad_accumulation_and_async_allreduce", side_effect=ZeroDivisionError
    )
    with function, pytest.raises(ZeroDivisionError):
        layer(torch.randn(3, 2, 32))


@torch.no_grad()
def test_a_frozen_layer_has_the_same_results_whatever_the_strides_of_a_single_sequence(chunk: Any) -> None:
    layer = chunk.requires_grad_(False).decoder.layers[0].mlp.linear_fc1
    inputs = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    expected, _ = layer(inputs)

    with direct_products([layer]):
        found, _ = layer(inputs)

    assert inputs.stride() == (32, 1024, 1)
    assert torch.equal(found, expected)


def test_under_autocast_a_frozen_layer_keeps_no_copy_of_its_weight(chunk: Any) -> None:
    add_lora(chunk, LoRA(r=2, target_modules=["linear_proj"]))
    layer = chunk.decoder.layers[0].self_attention.linear_proj
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), hooks:
        layer(torch.randn(3, 2, 32, requires_grad=True))

    of_its_size = [tensor for tensor in kept if tensor.numel() == layer.weight.numel()]
    assert [tensor.data_ptr() for tensor in of_its_size] == [layer.weight.data_ptr()]


def test_a_layer_that_gives_its_bias_a_gradient_adds_it_itself() -> None:
    config: Any = SimpleNamespace(params_dtype=torch.float32, perform_initialization=True, sequence_parallel=False)
    layer = WholeLinear(config, 2, 4, torch.nn.init.ones_, None, bias=True)  # type: ignore[arg-type]
    layer.weight.requires_grad_(False)
    add_bias_apart(layer)
    output, left = layer(torch.ones(3, 4))
    output.sum().backward()
    assert output.tolist() == [[4.0, 4.0]] * 3
    assert left is None
    assert layer.bias.grad.tolist() == [3.0, 3.0]
