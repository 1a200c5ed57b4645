# SPDX-License-Identifier: Apache-2.0
"""What calls the functions and classes that pages define: each with a tiny model, for a step or two, on CPU ranks.

A function here gets the names of a page, after its code has run, on each of the page's ranks. The current folder is
that of ``tests/examples/test_doc_blocks.py``.
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_mcore import (
    MCoreFinetuningData,
    MCoreGPT,
    MCoreStrategy,
    MCoreVisionData,
    MCoreVisionGPT,
    single_process,
)
from tests.support import factory_images as images
from tests.support.chats import characters, exchanges, write
from tests.support.hf_models import save_tiny
from tests.support.toy import Memory, make_trainer
from tests.support.vision_models import save_vision

Names = dict[str, Any]
CALLS: dict[str, tuple[int, Callable[[Names], None]]] = {}
"""For a page: the number of its ranks, and what calls its functions."""
ELSEWHERE = {
    "README": "tests/examples/test_docs.py::test_the_users_own_model_runs_under_every_strategy",
    "own-model": "tests/examples/test_docs.py::test_the_users_own_model_runs_under_every_strategy",
    "data-libraries": "tests/distributed/test_data_libraries.py",
}
"""The pages whose functions other tests call."""
TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
WORDS = ["--use_cpu", "--max_steps", "2", "--logging_steps", "1", "--report_to", "none", "--output_dir", "runs"]


def of_page(name: str, ranks: int) -> Callable[[Callable[[Names], None]], Callable[[Names], None]]:
    def register(call: Callable[[Names], None]) -> Callable[[Names], None]:
        CALLS[name] = (ranks, call)
        return call

    return register


def fit(module: pl.LightningModule, *data: Any, ranks: int = 1, **sizes: int) -> None:
    """Train for a step, and validate if there is data for it."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=MCoreStrategy(**sizes),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, *data)


def chats() -> MCoreFinetuningData:
    return MCoreFinetuningData("chats.jsonl", "base", seq_length=64, batch_size=1)


@of_page("adapters", ranks=2)
def adapters(page: Names) -> None:
    page["finetune_adapters"]("base", "chats.jsonl", seq_length=64, accelerator="cpu")

    class Own(MCoreGPT):
        def configure_optimizers(self) -> Any:
            return page["optimizer_of"](self)

    fit(Own.from_pretrained("base", seq_length=64, lora=page["LoRA"](r=4)), chats(), ranks=2)
    fit(page["finetune_last_layers"]("deep"), chats(), ranks=2)


@of_page("add-a-family", ranks=1)
def add_a_family(page: Names) -> None:
    sys.modules["arcee_of_the_page"] = module = types.ModuleType("arcee_of_the_page")
    module.FAMILY = page["FAMILY"]  # type: ignore[attr-defined]
    folder = save_tiny("arcee", "arcee")
    assert page["largest_difference"](str(folder), "arcee_of_the_page:FAMILY") < 1e-4


@of_page("checkpoints", ranks=1)
def checkpoints(page: Names) -> None:
    with single_process():
        whole = page["whole_model"]("checkpoints/last.ckpt")
    import train  # the laptop's

    settings = {name: whole.hparams[name] for name in ("vocab_size", "seq_length", "transformer")}
    fit(page["FineTuned"](**settings), train.SourceText())


@of_page("data", ranks=4)
def data(page: Names) -> None:
    page["finetune"]("chats.jsonl", characters(), TINY, seq_length=64, accelerator="cpu")


@of_page("doors", ranks=2)
def doors(page: Names) -> None:
    page["train"]([*WORDS, "--tensor_model_parallel_size", "2"], "base", "chats.jsonl", devices=2)


@of_page("embeddings", ranks=4)
def embeddings(page: Names) -> None:
    page["embed"]("base", "queries.jsonl", accelerator="cpu")
    page["rerank"]("base", "queries.jsonl", accelerator="cpu")


@of_page("from-llamafactory", ranks=8)
def from_llamafactory(page: Names) -> None:
    page["args"].max_steps = 1
    page["finetune"]("base", write(Path("more.jsonl"), exchanges(500)))
    page["learn_preferences"]("base", "pairs.jsonl")


@of_page("from-megatron-lm", ranks=1)
def from_megatron_lm(page: Names) -> None:
    from megatron.core import dist_checkpointing

    settings: dict[str, Any] = {"vocab_size": 384, "seq_length": 64, "transformer": TINY}

    class Saving(MCoreGPT):
        def on_train_end(self) -> None:
            Path("checkpoints/iter_0001000").mkdir(parents=True)
            (chunk,) = self.model.chunks
            state = {"model": chunk.sharded_state_dict(), "iteration": 1000, "checkpoint_version": 3.0}
            dist_checkpointing.save(state, "checkpoints/iter_0001000")

    fit(Saving(**settings), chats())
    fit(page["FromMegatronLM"](**settings), chats())


@of_page("hugging-face", ranks=4)
def hugging_face(page: Names) -> None:
    from transformers import AutoModelForCausalLM

    page["finetune_hf"]("base", "chats.jsonl", seq_length=64, accelerator="cpu")
    assert AutoModelForCausalLM.from_pretrained("finetuned").dtype == torch.bfloat16
    received: list[dict[str, torch.Tensor]] = []

    class Sending(MCoreGPT):
        def configure_callbacks(self) -> Any:
            return [
                page["SendWeights"](types.SimpleNamespace(load_weights=lambda weights: received.append(dict(weights))))
            ]

    module = Sending.from_pretrained("base", seq_length=64)
    fit(module, chats(), ranks=4, tensor_model_parallel_size=2)
    assert [weights["model.norm.weight"].dim() for weights in received] == [1] * module.trainer.is_global_zero


@of_page("plan", ranks=1)
def plan(page: Names) -> None:
    assert page["look"]().errors == ()


@of_page("distillation", ranks=4)
def distillation(page: Names) -> None:
    page["distill"]("base", "base", "chats.jsonl", seq_length=64, accelerator="cpu")
    if torch.distributed.get_rank() == 0:  # transformers writes on this rank only
        save_vision("qwen2_vl", Path("seeing"))
    torch.distributed.barrier()
    assert page["vision_student"]("seeing", "seeing").teacher.takes_images


@of_page("preference", ranks=8)
def preference(page: Names) -> None:
    pairs = [page["pair"](characters(), number, f"q{number}", "a" * number, "b") for number in range(1, 17)]
    page["prefer"]("base", pairs, accelerator="cpu")
    page["learn_preferences"]([*WORDS, "--tensor_model_parallel_size", "2", "--beta", "0.3"], "base", "pairs.jsonl")


@of_page("ray", ranks=1)
def ray(page: Names) -> None:
    page["start"](WORDS, "base", "chats.jsonl")


@of_page("tune", ranks=1)
def tune(page: Names) -> None:
    (file,) = Path("speed").rglob("metrics.csv")
    assert page["throughput"](file, skip=0) > 0


@of_page("vision", ranks=8)
def vision(page: Names) -> None:
    from PIL import Image
    from transformers import Qwen2VLProcessor

    page["finetune"]("vl/model", "chats.jsonl", ".", accelerator="cpu")
    processor = Qwen2VLProcessor(images.processor("qwen2_vl"), images.tokenizer(), images.video_processor("qwen2_vl"))

    class Telling(MCoreVisionGPT):
        def on_train_end(self) -> None:
            assert isinstance(page["describe"](self, processor, Image.open("cat.png")), str)
            assert isinstance(page["watch"](self, processor, "cat.mp4"), str)

    data = MCoreVisionData("chats.jsonl", "vl/model", seq_length=256, media_dir=".")
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    fit(Telling.from_pretrained("vl/model", seq_length=256), data, ranks=8, **sizes)


@of_page("your-hf-module", ranks=2)
def your_hf_module(page: Names) -> None:
    row = torch.arange(3, 19)
    batch = {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}

    loaders = [DataLoader([batch] * 4, batch_size=2) for _ in range(2)]  # type: ignore[arg-type]
    fit(page["FineTuning"]("base"), *loaders, ranks=2, tensor_model_parallel_size=2)

    class Trained(page["Distillation"]):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    fit(Trained("base", "base"), *loaders, ranks=2, tensor_model_parallel_size=2)
    fit(page["Frozen"]("base"), *loaders, ranks=2, tensor_model_parallel_size=2)


@of_page("watch", ranks=2)
def watch(page: Names) -> None:
    strategy, memory = MCoreStrategy(tensor_model_parallel_size=2), Memory()
    trainer = make_trainer(strategy, callbacks=[page["throughput"](strategy, 2)], max_steps=4, logger=memory)
    module = page["Measured"](vocab_size=64, seq_length=8, transformer=TINY)
    row = {"tokens": torch.arange(8), "labels": torch.arange(1, 9)}
    loader: Any = DataLoader([row] * 16, batch_size=4)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    found = [row for row in memory.rows if "train/samples_per_sec" in row]
    assert bool(found) == trainer.is_global_zero  # Lightning's monitor logs on rank 0
    flops = page["plan_of"](trainer, module, batch_size=4).work.model_flops if found else 0
    for values in found:
        batches = values["train/device/batches_per_sec"]
        assert abs(values["train/samples_per_sec"] / batches - 4) < 1e-9
        assert abs(values["train/flops_per_sec"] / batches / flops - 1) < 1e-6
