# SPDX-License-Identifier: Apache-2.0
"""A base in 4 bits is that of bitsandbytes on every layout, and adapters on it are those of PEFT over Linear4bit."""

import functools
import importlib.util
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from lightning_mcore import LoRA, MCoreGPT, MCorePreference, MCoreStrategy, Preference, Recipe, single_process
from lightning_mcore.interop.export_adapter import save_adapter
from lightning_mcore.layers.lora import Projection, Rows
from lightning_mcore.layers.quantized import NF4Weight, check_blocks
from tests.distributed.test_lora import train, whole
from tests.parity.hf_training import LENGTH, Seen, _mean, predict_and_step, text
from tests.parity.test_lora import ATTENTION, Adapted, WatchedAdapters, _folders, _generator, adapted_differences
from tests.parity.test_preference import Data
from tests.support.hf_models import save_tiny
from tests.support.layouts import Layout
from tests.support.ranks import RanksFailedError, on_ranks, run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import Watch, make_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("adapters in 4 bits"),  # they share references
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
]

LAYOUTS = (Layout(), Layout(tp=2, sp=True), Layout(tp=2, pp=2))


@functools.cache
def base() -> str:
    """A tiny model whose rows hold whole blocks on two ranks."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 384}
    return str(save_tiny("llama", Path(_folders().name) / "wide", **sizes))


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
    folder = str(Path(_folders().name) / "adapter")
    adapted.save_pretrained(folder)
    batch = text()
    logits = adapted(batch["tokens"]).logits
    loss = _mean(logits, batch["labels"])
    loss.backward()
    gradients = {name.replace(".default", ""): parameter.grad for name, parameter in trained.items()}
    return Adapted(logits.detach(), loss.item(), gradients, folder)


def train_step(folder: str, adapter: str, layout: Layout) -> Seen:
    """Predict with the quantized model and its adapter, and train it for a step."""
    module = WatchedAdapters.from_pretrained(folder, seq_length=LENGTH, lora={"path": adapter, "quantization": "nf4"})
    return predict_and_step(module, layout)


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, "tp2-sp"))
def test_a_step_on_4_bits_is_that_of_peft_over_bitsandbytes(layout: Layout) -> None:
    wanted = reference()
    ranks = run_ranks(layout.world_size, train_step, base(), wanted.folder, layout, timeout=120)
    assert adapted_differences(wanted, ranks) == {}


def test_rows_without_whole_blocks_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    """A model that fits one rank alone is refused on two."""
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    narrow = str(save_tiny("llama", tmp_path, **sizes))
    lora = {"quantization": "nf4"}
    MCoreGPT.from_pretrained(narrow, lora=lora).check_settings()
    sentence = (
        r"linear_fc2.weight has 96 columns on each rank, and quantization='nf4' keeps blocks of 64; choose a smal"
    )
    with pytest.raises(RanksFailedError, match=sentence) as refused:
        run_ranks(2, train, narrow, Layout(tp=2), lora, steps=1)
    assert "check_settings" in str(refused.value)
    with pytest.raises(ValueError, match=sentence):
        check_blocks({"decoder.layers.0.mlp.experts.experts.linear_fc2.weight": 192}, 1, 2)


@functools.cache
def experts() -> str:
    """A tiny model whose experts have rows of whole blocks."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
    return str(save_tiny("qwen3_moe", Path(_folders().name) / "experts", **sizes))


def test_experts_in_4_bits_train_as_on_one_rank_and_go_on_where_they_were_saved(tmp_path: Path) -> None:
    """Also with an adapter that is continued; on the same layout bit for bit."""
    lora = {"r": 3, "lora_alpha": 6, "quantization": "nf4"}
    layout = Layout(moe=True, dp=2, ep=2, distributed_optimizer=True)
    first = str(tmp_path / "adapter")
    (alone,) = run_ranks(1, train, experts(), Layout(moe=True), lora, steps=4)
    undisturbed = run_ranks(2, train, experts(), layout, lora, steps=4)
    run_ranks(2, train, experts(), layout, lora, steps=2, save=str(tmp_path), adapter=first, experts="each")
    for rank in undisturbed:
        assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    resumed = run_ranks(2, train, experts(), layout, lora, steps=4, start=str(tmp_path / "step=2.ckpt"))
    assert all(torch.equal(data, whole(resumed)[place]) for place, data in whole(undisturbed).items())
    again = str(tmp_path / "again")
    run_ranks(1, copy_quantized, experts(), first, again)
    before, after = (load_file(f"{path}/adapter_model.safetensors") for path in (first, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def copy_quantized(folder: str, source: str, target: str) -> None:
    """Continue an adapter on weights in 4 bits, and write it again."""
    with single_process():
        module = MCoreGPT.from_pretrained(folder, lora={"path": source, "quantization": "nf4"})
        module.configure_model()
        assert any(isinstance(child, NF4Weight) for child in module.modules())
        save_adapter(module, target, experts="each")


def test_a_base_in_4_bits_trains_in_bf16() -> None:
    """Its weights are those of bitsandbytes from bf16, and its losses near those of fp32."""
    lora = {"r": 3, "lora_alpha": 6, "quantization": "nf4"}
    runs = {
        precision: run_ranks(2, train, base(), Layout(tp=2, sp=True), lora, steps=4, precision=precision)[0]
        for precision in ("32-true", "bf16-mixed")
    }
    assert runs["bf16-mixed"]["losses"] == pytest.approx(runs["32-true"]["losses"], rel=5e-3)
    assert runs["bf16-mixed"]["losses"] != runs["32-true"]["losses"]


def prefer(folder: str, cache: str) -> dict[str, list[float]]:
    """Return the losses of steps on pairs, on tagged answers and of a reward model over weights in 4 bits."""
    lora, recipe = LoRA(r=4, quantization="nf4"), Recipe(learning_rate=0.01, min_learning_rate=0.01)
    settings = {
        "dpo": Preference(),
        "computed before": Preference(precompute_reference=True),
        "kto": Preference("kto"),
        "reward": Preference("reward"),
    }
    found = {}
    for case, setting in settings.items():
        pl.seed_everything(1, verbose=False)  # the same adapters
        module = MCorePreference.from_pretrained(
            folder, seq_length=LENGTH, preference=setting, lora=lora, recipe=recipe
        )
        watch, data = Watch(), Data(f"{cache}/{case}", packed=False, case=case)
        data.batches = 2
        make_trainer(
            MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True),
            use_distributed_sampler=False,
            limit_val_batches=0,
            callbacks=[watch],
        ).fit(module, data)
        assert any(isinstance(child, NF4Weight) for child in module.modules())
        found[case] = watch.seen.logged
    return found


def test_preferences_are_learnt_over_4_bits_which_are_the_reference(tmp_path: Path) -> None:
    for losses in run_ranks(2, prefer, base(), str(tmp_path), timeout=120):
        assert losses["dpo"][0] == pytest.approx(math.log(2), abs=1e-7)
        assert losses["computed before"] == pytest.approx(losses["dpo"], abs=1e-6)
        assert losses["kto"][0] == 0.5
        assert all(abs(first - second) > 0.01 for first, second in losses.values())


@on_ranks(1)
def test_a_weight_in_4_bits_is_that_of_bitsandbytes() -> None:
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


@on_ranks(2)
def test_shards_in_4_bits_are_those_of_the_whole() -> None:
    """Quantized on two ranks apart, to the last bit; also of several projections whose rows alternate."""
    from bitsandbytes import functional

    rank, group = dist.get_rank(), dist.group.WORLD
    rows, columns = 96, 256
    for dtype in (torch.float32, torch.bfloat16):
        names = ("q_proj", "k_proj", "v_proj")
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(rows, columns, generator=generator).to(dtype) * (1 + i) for i in range(3)]
        for is_double in (False, True):
            quantized = [functional.quantize_4bit(t, quant_type="nf4", compress_statistics=is_double) for t in tensors]
            wanted = [functional.dequantize_4bit(*one) for one in quantized]
            half = rows // 2
            cut = [slice(rank * half + part * half // 2, rank * half + (part + 1) * half // 2) for part in (0, 1)]
            # Of each head group its rows of all three, as in linear_qkv.
            own = torch.cat([t[part] for part in cut for t in tensors])
            places = [
                Projection(
                    name,
                    tuple(
                        Rows((3 * part + i) * half // 2, rank * half + part * half // 2, half // 2) for part in (0, 1)
                    ),
                    rows,
                    columns,
                    0,
                )
                for i, name in enumerate(names)
            ]
            stored = NF4Weight(own, places, group, 0, is_double)
            assert torch.equal(stored.dense(), torch.cat([t[part] for part in cut for t in wanted]))
            here = slice(rank * columns // 2, (rank + 1) * columns // 2)
            place = Projection("o_proj", (Rows(0, 0, rows),), rows, columns, rank * columns // 2)
            stored = NF4Weight(tensors[0][:, here], [place], group, 1, is_double)
            assert torch.equal(stored.dense(), wanted[0][:, here])
