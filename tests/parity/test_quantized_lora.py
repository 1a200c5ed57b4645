# SPDX-License-Identifier: Apache-2.0
"""A base in 4 bits is that of bitsandbytes on every layout, and adapters on it are those of PEFT over Linear4bit."""

import functools
import importlib.util
import tempfile
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_mcore import LoRA, MCoreGPT, single_process
from lightning_mcore.hf.peft_folder import read_lora
from lightning_mcore.layers.lora import Projection, Rows
from lightning_mcore.layers.quantized import NF4Weight
from tests.hf_models import save_tiny
from tests.layouts import Layout
from tests.parity.hf_training import LENGTH, Seen, _mean, predict_and_step, text
from tests.parity.test_lora import ATTENTION, Adapted, WatchedAdapters, _differences, _generator
from tests.ranks import RanksFailedError, run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
]

LAYOUTS = (Layout(), Layout(tp=2, sp=True), Layout(tp=2, pp=2))


@functools.cache
def base() -> str:
    """A tiny model whose rows hold whole blocks on two ranks."""
    folder = tempfile.mkdtemp(prefix="wide_")
    return str(save_tiny("llama", folder, hidden_size=256, intermediate_size=384))


@functools.cache
def reference() -> Adapted:
    """Run a step of a model of Linear4bit with a random adapter of PEFT, in fp32."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base(), dtype=torch.float32, attn_implementation="eager").train()
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            quantized = Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            quantized.weight = Params4bit(
                layer.weight.detach(), requires_grad=False, compress_statistics=True, quant_type="nf4"
            )
            parent, _, last = name.rpartition(".")
            setattr(model.model.get_submodule(parent), last, quantized.to("cpu"))
            assert quantized.weight.dtype == torch.uint8
            assert quantized.weight.quant_state.nested
    model.is_loaded_in_4bit = True
    adapted = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=[*ATTENTION, "down_proj"])
    )
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=_generator(name)))
    folder = tempfile.mkdtemp(prefix="adapter_")
    adapted.save_pretrained(folder)
    batch = text()
    logits = adapted(batch["tokens"]).logits
    loss = _mean(logits, batch["labels"])
    loss.backward()
    gradients = {name.replace(".default", ""): parameter.grad for name, parameter in trained.items()}
    return Adapted(folder, logits.detach(), loss.item(), gradients)


def train(folder: str, adapter: str, layout: Layout) -> Seen:
    """Predict with the quantized model and its adapter, and train it for a step."""
    lora = replace(read_lora(adapter), quantization="nf4")
    module = WatchedAdapters.from_pretrained(folder, seq_length=LENGTH, lora=lora)
    module._adapter = adapter
    return predict_and_step(module, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_a_step_on_4_bits_is_that_of_peft_over_bitsandbytes(layout: Layout) -> None:
    wanted = reference()
    ranks = run_ranks(layout.world_size, train, base(), wanted.folder, layout, timeout=120)
    assert _differences(wanted, ranks) == {}


def test_what_4_bits_do_not_have_is_refused() -> None:
    folder = tempfile.mkdtemp(prefix="narrow_")
    narrow = str(save_tiny("llama", folder, hidden_size=128, intermediate_size=96))
    with pytest.raises(RanksFailedError, match=r"down_proj has 96 columns on each rank, and quantization='nf4' keeps"):
        run_ranks(1, build, narrow)


def build(folder: str) -> None:
    """Build a quantized model."""
    with single_process():
        MCoreGPT.from_pretrained(folder, seq_length=LENGTH, lora=LoRA(quantization="nf4")).configure_model()


def test_a_weight_in_4_bits_is_that_of_bitsandbytes() -> None:
    run_ranks(1, compare_weight)


def compare_weight() -> None:
    """Compare a weight that is made of 4 bits with bitsandbytes' own."""
    from bitsandbytes import functional

    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    whole = [Projection("q_proj", (Rows(0, 0, 96),), 96, 128, 0)]
    for is_double in (False, True):
        codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=is_double)
        stored = NF4Weight(weight, whole, None, None, is_double)
        planned = weight.numel() * (4 + (8 / 64 + 32 / 64 / 256 if is_double else 32 / 64)) / 8
        kept = sum(buffer.numel() for name, buffer in stored.named_buffers() if name not in ("row", "offsets"))
        assert kept == pytest.approx(planned, abs=4)
        assert torch.equal(stored.dense(), functional.dequantize_4bit(codes, state))
        assert stored.bfloat16().dense().equal(functional.dequantize_4bit(codes, state))
