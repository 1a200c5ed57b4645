# SPDX-License-Identifier: Apache-2.0
"""The same model in other trainers and ours: Lightning's DDP and FSDP2, transformers' Trainer and bare Megatron.

A small Llama is trained in fp32 on the same rows of random tokens on two CPU ranks. Every trainer processes the same
number of tokens per step, uses AdamW with gradients clipped to a norm of 1, and reads the same Hugging Face folder.

==============  =====================================================================================================
ddp             Lightning's ``"ddp"`` with transformers' model
fsdp2           Lightning's ``ModelParallelStrategy`` with ``fully_shard`` over each layer of transformers' model
transformers    transformers' ``Trainer`` with its default optimizer
megatron        a bare Megatron loop with DP=2 and the layers of ``MCoreGPT``
ours ...        ``MCoreStrategy``: DP=2, DP=2 with the distributed optimizer, TP=2 with sequence parallelism, and PP=2
==============  =====================================================================================================

The trainers run in turn, each in its own processes, so that all of them see the same load on a shared machine. Each
turn gives the median time of its steps after warm-up. The figures are medians over rounds, and ratios are medians of
the ratios within each round. Memory is a rank's peak resident size minus its size before the model is built. PP=2
splits the rows of a step into four microbatches; the others process them at once.

    python -m benchmarks.peers
    python -m benchmarks.peers --sizes 20m --rounds 3 --forms ddp "ours dp2"

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import importlib.metadata
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers.utils import logging as transformers_logging

from benchmarks.lora import WARM_UP, Clock, _peak, median_step
from benchmarks.overhead import REPOSITORY, circumstances, megatron_loop, write_results
from lightning_mcore import MCoreGPT, MCoreStrategy, Recipe
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import open_process_groups
from tests.support.hf_models import save_tiny
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

RANKS = 2
LENGTH = 128  # tokens per row
ROWS = 8  # rows per step, over all ranks
SIZES: dict[str, dict[str, int]] = {
    "20m": {"num_hidden_layers": 8, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
    | {"num_key_value_heads": 6, "vocab_size": 8192},
    "120m": {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    | {"num_key_value_heads": 12, "vocab_size": 24_000},
}
OURS: dict[str, dict[str, Any]] = {
    "ours dp2": {},
    "ours dp2 sharded": {"use_distributed_optimizer": True},
    "ours tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ours pp2": {"pipeline_model_parallel_size": 2},
}
DDP = "ddp"
FORMS = (DDP, "fsdp2", "transformers", "megatron", *OURS)
LEARNING_RATE = 1e-4


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, the same in every process; ``labels`` are the tokens, as transformers expects."""

    def __init__(self, count: int, vocab_size: int) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocab_size, (count, LENGTH + 1), generator=drawn)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "labels": row}


def shifted(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as Megatron expects them: ``tokens`` and ``labels``, [b, s] int64."""
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


class HuggingFaceModule(pl.LightningModule):
    """A transformers model in a LightningModule, as tutorials write it.

    Args:
        folder: Folder of the model.
        shard: Whether to shard each layer, and the rest of the model, across all ranks.
    """

    def __init__(self, folder: str, shard: bool) -> None:
        super().__init__()
        self.folder, self.shard = folder, shard

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model = _transformers_model(self.folder)
        if self.shard:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = Recipe()
        return torch.optim.AdamW(self.parameters(), LEARNING_RATE, recipe.betas, recipe.eps, recipe.weight_decay)


def _transformers_model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def train(form: str, folder: str, size: str, steps: int) -> dict[str, float]:
    """Train in one way on this rank; return the step time in seconds and the peak memory in bytes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    before = _peak()
    rows = Rows(ROWS * (steps + WARM_UP), SIZES[size]["vocab_size"])
    ways: dict[str, Callable[..., float]] = {"transformers": _with_transformers, "megatron": _bare_megatron}
    seconds = ways.get(form, _with_lightning)(form, folder, rows, steps)
    return {"seconds": seconds, "peak": _peak() - before}


def _with_lightning(form: str, folder: str, rows: Rows, steps: int) -> float:
    clock = Clock()
    layout = OURS.get(form)
    microbatches = 4 if form == "ours pp2" else 1
    ranks = RANKS if layout is None or "dp2" in form else 1  # ranks that read different rows
    data: DataLoader[Any]
    module: pl.LightningModule
    if layout is None:
        strategy: Any = DDP if form == DDP else ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
        module = HuggingFaceModule(folder, shard=form != DDP)
        data = DataLoader(rows, batch_size=ROWS // ranks)
    else:
        strategy = MCoreStrategy(**layout)
        recipe = Recipe(learning_rate=LEARNING_RATE, min_learning_rate=LEARNING_RATE)
        module = MCoreGPT.from_pretrained(folder, seq_length=LENGTH, recipe=recipe)
        data = DataLoader(rows, batch_size=ROWS // ranks // microbatches, collate_fn=shifted)
    make_trainer(
        strategy,
        max_steps=steps + WARM_UP,
        max_epochs=-1,
        accumulate_grad_batches=microbatches,
        gradient_clip_val=1.0,
        callbacks=[clock],
    ).fit(module, data)
    return clock.median


def _with_transformers(form: str, folder: str, rows: Rows, steps: int) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=f"{folder}-{form}",
        per_device_train_batch_size=ROWS // RANKS,
        max_steps=steps + WARM_UP,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=_transformers_model(folder), args=arguments, train_dataset=rows, callbacks=[Ends()]).train()
    return median_step(ends)


def _bare_megatron(form: str, folder: str, rows: Rows, steps: int) -> float:
    sizes = argparse.Namespace(microbatches=1, seq_length=LENGTH, rows=ROWS // RANKS)
    config = json.loads((Path(folder) / "config.json").read_text())
    fields = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
    }
    mine = rows.tokens[dist.get_rank() :: RANKS]
    batches = DataLoader(TensorDataset(mine[:, :-1], mine[:, 1:]), batch_size=ROWS // RANKS)
    named = ({"tokens": tokens, "labels": labels} for tokens, labels in batches)
    ends: list[float] = []
    with cpu_runtime():
        open_process_groups(MCoreStrategy().layout, seed=1, timeout=timedelta(minutes=5))
        loop = megatron_loop(fields, config["vocab_size"], {}, named, sizes)
        for _ in range(steps + WARM_UP):
            loop.step()
            ends.append(time.perf_counter())
    return median_step(ends)


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model size in all ways in turn; the slowest rank and the rank with the most memory count."""
    turns: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="peers_") as folder:
        save_tiny("llama", folder, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, **SIZES[size])
        for turn in range(options.rounds):
            turns.append({})
            for form in options.forms:
                ranks = run_ranks(
                    RANKS, train, form, folder, size, options.steps, timeout=1200, open_group=form == "megatron"
                )
                turns[-1][form] = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
                print(f"{size}, turn {turn + 1}, {form}: {turns[-1][form]}", flush=True)
    medians = {
        form: {name: statistics.median(turn[form][name] for turn in turns) for name in ("seconds", "peak")}
        for form in options.forms
    }
    over_ddp = {
        form: {name: statistics.median(turn[form][name] / turn[DDP][name] for turn in turns) for name in medians[form]}
        for form in options.forms
        if DDP in options.forms
    }
    return {"size": size, "medians": medians, "over_ddp": over_ddp, "turns": turns}


def table(size: dict[str, Any]) -> str:
    """Return the results of one size as Markdown."""
    lines = [
        "| model | form | tokens/s | of ddp's | peak of a rank, MiB | of ddp's |",
        "|---|---|---|---|---|---|",
    ]
    for form, median in size["medians"].items():
        over = size["over_ddp"].get(form)
        speed, memory = (f"{1 / over['seconds']:.2f}", f"{over['peak']:.2f}") if over else ("", "")
        rate, peak = ROWS * LENGTH / median["seconds"], median["peak"] / 2**20
        lines.append(f"| {size['size']} | {form} | {rate:,.0f} | {speed} | {peak:,.0f} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Train one model by all that users would pick instead.")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=7, help="turns of all forms")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn that count")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options) | {
        "transformers": importlib.metadata.version("transformers"),
        "a step": f"{ROWS} rows of {LENGTH} tokens on {RANKS} ranks together, fp32, AdamW",
    }
    for size in options.sizes:
        found = measure(size, options)
        title = f"One model ({size}), trained by what users would pick"
        write_results(options.output, f"peers_{size}", title, facts, found, table(found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
