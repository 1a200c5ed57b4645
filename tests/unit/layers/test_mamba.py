# SPDX-License-Identifier: Apache-2.0
"""The memory of a Mamba 2 layer in chunks equals the memory token by token, also with a kernel."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.config.architecture import pattern_layers
from lightning_mcore.layers.mamba import scan_by_kernel, state_space
from tests.support import tiny
from tests.support.hf_models import VOCAB_SIZE, auto_model, save_tiny
from tests.unit.layers.test_recurrent_layers import gpt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")  # where the layers run in this process


def token_by_token(
    write: Tensor, read: Tensor, value: Tensor, step: Tensor, decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    found = []
    for token in range(value.size(2)):
        along, toward = (part[:, :, token, :, None, None] for part in (write, read))
        new = step[:, :, None, token, :, None] * along * value[:, :, None, token]
        memory = memory * decay[:, :, None, token, :, None].exp() + new
        found.append((toward * memory).sum(2))
    return torch.stack(found, dim=2), memory


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("begins", [False, True])
def test_chunks_equal_token_by_token(length: int, begins: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    write, read = (torch.randn(2, 3, length, 5, generator=generator).double() for _ in range(2))
    value = torch.randn(2, 3, length, 2, 4, generator=generator).double()
    step, decay = torch.rand(2, 2, 3, length, 2, generator=generator).double()
    memory = torch.randn(2, 3, 5, 2, 4, generator=generator).double()
    expected = token_by_token(write, read, value, step, -decay, torch.zeros_like(memory) if begins else memory)
    found = state_space(write, read, value, step, -decay, None if begins else memory)
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-11, rtol=0)


@pytest.mark.parametrize("begins", [False, True])
def test_the_kernel_is_given_what_its_reference_takes(begins: bool) -> None:
    """The reference is that of transformers, which it calls where the kernel is not installed."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    generator = torch.Generator().manual_seed(1)
    write, read = (torch.randn(2, 3, 150, 5, generator=generator).requires_grad_() for _ in range(2))
    value = torch.randn(2, 3, 150, 2, 4, generator=generator).requires_grad_()
    step = torch.rand(2, 3, 150, 2, generator=generator).requires_grad_()
    rate = (-torch.rand(3, 1, 2, generator=generator)).requires_grad_()
    memory = None if begins else torch.randn(2, 3, 5, 2, 4, generator=generator)
    given = (write, read, value, step, rate)
    wanted = state_space(write, read, value, step, rate * step, memory)
    found = scan_by_kernel(mamba2_chunk_scan, torch.float32, rate, write, read, value, step, memory)
    gradients = [torch.autograd.grad(sum(part.square().sum() for part in of), given) for of in (found, wanted)]
    for ours, expected in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_steps_of_nemotron_have_no_lower_limit(tmp_path: Path) -> None:
    """As in Megatron and in NVIDIA's own code with kernels; transformers raises them to ``time_step_min``."""
    from transformers import AutoConfig

    save_tiny("nemotron_h", tmp_path, layers_block_type=["linear_attention", "mlp"] * 2)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: tensors[name] - 9.0 for name in tensors if name.endswith("dt_bias")}  # softplus(-9) = 1.2e-4
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = torch.arange(1, 49)[None]
    with single_process(), torch.no_grad():
        module = MCoreGPT.from_pretrained(tmp_path, seq_length=48)
        module.configure_model()
        ours = module.eval().token_logits({"tokens": tokens, "labels": tokens})[0][..., :VOCAB_SIZE]
    apart = {}
    for least in (0.001, 1e-30):  # the published value, and none
        config = AutoConfig.from_pretrained(tmp_path, time_step_min=least)
        model = auto_model().from_pretrained(tmp_path, config=config, attn_implementation="eager").eval()
        with torch.no_grad():
            apart[least] = (model(tokens, use_cache=False).logits - ours).abs().max()
    assert apart[1e-30] < 1e-5
    assert apart[0.001] > 1e-3


def test_vectors_of_a_group_are_not_copied_for_its_heads() -> None:
    """Kept for backward, of 512 tokens: fewer numbers than heads times rows, for which each head had a copy."""
    write, read = (torch.randn(1, 1, 512, 128, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 1, 512, 16, 8, requires_grad=True)
    step, decay = torch.ones(1, 1, 512, 16, requires_grad=True), torch.full((1, 1, 512, 16), -0.1, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state_space(write, read, value, step, decay)
    scores, memories = 512 * 64 * (2 * 16 + 1), 8 * 128 * 16 * 8
    assert sum(kept.values()) < scores + 3 * memories + 512 * 16 * 128


def test_a_memory_that_has_decayed_away_keeps_gradients_finite() -> None:
    write, read = (torch.randn(1, 1, 70, 4, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 1, 70, 1, 4, requires_grad=True)
    step, decay = torch.ones(1, 1, 70, 1, requires_grad=True), torch.full((1, 1, 70, 1), -1e3, requires_grad=True)
    found, _ = state_space(write, read, value, step, decay)
    found.sum().backward()
    for part in (write, read, value, step, decay):
        assert part.grad is not None
        assert part.grad.isfinite().all()


def test_layers_of_a_pattern_have_one_part_or_two() -> None:
    assert pattern_layers("[M-]M*[*E]-E") == ("M-", "M", "*", "*E", "-", "E")


def test_weights_before_the_residual_start_as_for_one_part_a_layer() -> None:
    with single_process():
        for pattern, parts in (("M-", 2), ("[M-][*-]", 4)):
            torch.manual_seed(1)
            module = gpt({"layer_pattern": pattern, "mamba": dict(tiny.MAMBA)}, hidden_size=128, ffn_hidden_size=512)
            module.configure_model()
            last = module.model.chunks[0].decoder.layers[-1].mlp.linear_fc2.weight
            assert last.std().item() == pytest.approx(0.02 / parts**0.5, rel=0.05)
