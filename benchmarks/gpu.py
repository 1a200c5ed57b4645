# SPDX-License-Identifier: Apache-2.0
"""Benchmark training steps on a GPU: against a bare Megatron loop, with FP8, packing, recomputation, and saves.

All runs use one device and one process. Figures are medians over steps after warm-up; every step waits for the GPU.

=========  =============================================================================================================
overhead   ours against a bare Megatron loop in the same process: each step of ours is followed by one of the bare loop
lightning  ours against Lightning's DDP and FSDP with the transformers model of the same size
recipes    bf16 against each FP8 and FP4 recipe of the device: step time, FLOP/s, peak memory, and plan's estimate
packing    several samples per row against one per row: real tokens per second
recompute  activations kept or recomputed: step time, peak memory, and plan's estimate
loss       all logits of a row at once or the loss in chunks: four layers, a vocabulary of 131,072, one row of 4,096,
           32,768 or 131,072 tokens per step, full recomputation
save       how long a synchronous and an asynchronous save delay a step
=========  =============================================================================================================

    python -m benchmarks.gpu                              # all parts; make gpu runs each one separately
    python -m benchmarks.gpu --pieces recipes --size 3b
    python -m benchmarks.gpu --device cpu --tiny          # only exercises the code; writes nothing

The results, with versions, commit and device, go to benchmarks/results/.
"""

import argparse
import gc
import importlib
import importlib.metadata
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.overhead import REPOSITORY, BareLoop, RandomTokens, circumstances, write_results
from lightning_mcore import MCoreGPT, MCorePrecision, MCoreStrategy, Recipe
from lightning_mcore.config.field_homes import fusion_defaults
from lightning_mcore.config.flops import training_flops_per_token
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.layers.spec import gpt_block_spec
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.parallel.groups import close_process_groups
from lightning_mcore.planning.live import plan_of
from lightning_mcore.strategy.fp8_checks import FP8Machine, check_machine

LLAMA: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
EXPERTS = {"num_moe_experts": 16, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}


def sized(layers: int, hidden: int, inner: int, heads: int, groups: int) -> dict[str, Any]:
    """Return the fields of a model of this size."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": inner}
    return LLAMA | sizes | {"num_attention_heads": heads, "num_query_groups": groups}


SIZES = {
    "tiny": sized(2, 128, 256, 4, 2),
    "1b": sized(24, 2048, 8192, 16, 8),
    "3b": sized(28, 3072, 8192, 24, 8),
    "moe": sized(12, 1024, 2048, 16, 8) | EXPERTS | {"moe_ffn_hidden_size": 1024},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
RECIPES = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
CHUNK = 1024  # tokens of a chunk of the loss
WARM_UP = 5  # warm-up steps; everything is compiled before the last of them
LEARNING_RATE = 1e-4
MIB = 2**20


@dataclass(frozen=True)
class Run:
    """One training run to measure.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        transformer: The model's ``TransformerConfig`` fields.
        seq_length: Tokens per row.
        rows: Rows per microbatch.
        microbatches: Microbatches per step.
        steps: Measured steps, after the warm-up.
        recipe: One of ``RECIPES``.
        data: Dataset to load; None for full rows of random tokens.
        vocab_size: Vocabulary size.
        loss_chunk_size: Tokens per chunk of the loss; None for all logits of a row at once.
    """

    device: str
    transformer: dict[str, Any]
    seq_length: int
    rows: int
    microbatches: int
    steps: int
    recipe: str = "bf16"
    data: Callable[["Run"], DataLoader[Any]] | None = None
    vocab_size: int = 32_768
    loss_chunk_size: int | None = None

    @property
    def impl(self) -> str:
        """The layers: TransformerEngine's if it is installed and either the device is a GPU or the recipe needs it."""
        return "transformer_engine" if HAVE_TE and (self.device == "cuda" or self.recipe != "bf16") else "local"

    @property
    def precision(self) -> MCorePrecision:
        """The number formats of the run."""
        name = "fp4_recipe" if self.recipe == "nvfp4" else "fp8_recipe"
        fp8: dict[str, Any] = {} if self.recipe == "bf16" else {name: self.recipe}
        return MCorePrecision("bf16-mixed", **fp8)

    @property
    def samples(self) -> int:
        """Number of samples: twice as many as the run reads."""
        return 2 * (WARM_UP + self.steps + 1) * self.microbatches * self.rows

    def loader(self) -> DataLoader[Any]:
        """Return the loader of the run's data."""
        if self.data is not None:
            return self.data(self)
        return DataLoader(RandomTokens(self.samples, self.seq_length), batch_size=self.rows)


@dataclass
class Figures:
    """Measurements of a run.

    Args:
        seconds: Seconds of each step.
        bare: Seconds of each bare-loop step.
        tokens: Real tokens in each step.
        peak: Peak memory allocated by PyTorch, in bytes; 0 on the CPU.
        planned: Memory estimated by ``plan``, in bytes.
        model_flops: Floating-point operations of the model per token of a full row.
        attention: The attention kernels that TransformerEngine selected.
    """

    seconds: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    peak: int = 0
    planned: float = 0.0
    model_flops: float = 0.0
    attention: str = ""

    def summary(self) -> dict[str, Any]:
        """Return the medians as a JSON-compatible dict."""
        step = statistics.median(self.seconds)
        rate = statistics.median(n / s for n, s in zip(self.tokens, self.seconds, strict=True))
        found: dict[str, Any] = {
            "steps": len(self.seconds),
            "median_seconds": step,
            "tokens_per_second": rate,
            "model_tflops": rate * self.model_flops / 1e12,
            "peak_mebibytes": self.peak / MIB,
            "planned_mebibytes": self.planned / MIB,
            "attention": self.attention,
            "seconds": self.seconds,
        }
        if self.bare:
            found |= {"bare_median_seconds": statistics.median(self.bare), "bare_seconds": self.bare}
            found["ratio_of_medians"] = step / found["bare_median_seconds"]
            found["median_of_ratios"] = statistics.median(map(lambda a, b: a / b, self.seconds, self.bare))
        return found


def bare_loop(run: Run) -> BareLoop:
    """Return a bare Megatron loop with the model and data of a run."""
    fused = fusion_defaults(run.transformer) if run.impl == "transformer_engine" and run.device == "cuda" else {}
    config = build_transformer_config({**fused, **run.transformer}, run.precision.megatron_fields())
    impl: Any = run.impl
    model = GPTModel(
        config,
        gpt_block_spec(config, impl),
        vocab_size=run.vocab_size,
        max_sequence_length=run.seq_length,
        position_embedding_type="rope",
    )
    if run.device == "cuda":
        model.cuda()
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Float16Module(config, model)
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=LEARNING_RATE, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16),
        [wrapped],
        use_gloo_process_groups=False,
    )
    return BareLoop(wrapped, optimizer, run.loader(), run, run.device)


class Steps(pl.Callback):
    """Times each optimizer step, and can run a bare-loop step after it.

    Args:
        run: The run.
        with_bare: Whether the bare loop runs too.
        after_step: Called after each step with its number; its time is not counted.
    """

    def __init__(self, run: Run, with_bare: bool, after_step: Callable[[pl.Trainer, int], None] | None = None) -> None:
        self.run, self.with_bare, self.after_step = run, with_bare, after_step
        self.figures = Figures()
        self.bare: BareLoop | None = None
        self.since = self.tokens = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if isinstance(pl_module, MCoreGPT):
            stage = plan_of(trainer, pl_module, batch_size=self.run.rows).fullest
            self.figures.planned = stage.memory.total if stage is not None else 0.0
        self.figures.model_flops = training_flops_per_token(
            self.run.transformer, self.run.vocab_size, self.run.seq_length
        )
        self.bare = bare_loop(self.run) if self.with_bare else None
        self.since = now(self.run.device)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        mask = batch.get("loss_mask")
        self.tokens += float(mask.sum()) if mask is not None else batch["tokens"].numel()
        if (batch_idx + 1) % self.run.microbatches:
            return
        between = now(self.run.device)
        self.figures.seconds.append(between - self.since)
        self.figures.tokens.append(self.tokens)
        if self.bare is not None:
            self.bare.step()
            self.figures.bare.append(now(self.run.device) - between)
        if self.after_step is not None:
            self.after_step(trainer, trainer.global_step)
        if trainer.global_step == WARM_UP and self.run.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.tokens, self.since = 0.0, now(self.run.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        figures = self.figures
        figures.peak = torch.cuda.max_memory_allocated() if self.run.device == "cuda" else 0
        figures.attention = chosen_attention()
        for values in (figures.seconds, figures.bare, figures.tokens):
            del values[:WARM_UP]
        self.bare = None


def now(device: str) -> float:
    """Wait for the device to finish, and return the time in seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def chosen_attention() -> str:
    """Return the kernels that TransformerEngine selected last, or ``"PyTorch"`` if it has not run."""
    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    module = sys.modules.get(name)
    chosen = getattr(module, "_attention_backends", {})
    kinds = [kind for kind in ("flash", "fused", "unfused") if chosen.get(f"use_{kind}_attention")]
    return " and ".join(kinds) or "PyTorch"


class OfTransformers(pl.LightningModule):
    """The same model as implemented in transformers, trained by Lightning alone.

    Args:
        run: The run whose model size it uses.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        fields = run.transformer
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=run.vocab_size,
                hidden_size=fields["hidden_size"],
                intermediate_size=fields["ffn_hidden_size"],
                num_hidden_layers=fields["num_layers"],
                num_attention_heads=fields["num_attention_heads"],
                num_key_value_heads=fields["num_query_groups"],
                max_position_embeddings=run.seq_length,
                use_cache=False,
            )
        )

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["tokens"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=self.device.type == "cuda")

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **rest: Any) -> None:
        # Lightning clips neither for a fused optimizer nor, by norm, for FSDP.
        whole = self.trainer.model
        if isinstance(whole, FullyShardedDataParallel):
            whole.clip_grad_norm_(gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


def fit(
    run: Run,
    with_bare: bool = False,
    after_step: Callable[[pl.Trainer, int], None] | None = None,
    peer: str | None = None,
) -> Figures:
    """Train, return the measurements, and free the device.

    Args:
        run: The run.
        with_bare: Whether the bare loop runs too.
        after_step: Called after each step.
        peer: A Lightning strategy that trains the transformers model instead of ours.
    """
    steps = Steps(run, with_bare, after_step)
    trainer = pl.Trainer(
        accelerator="gpu" if run.device == "cuda" else "cpu",
        devices=1,
        strategy=peer or MCoreStrategy(loss_chunk_size=run.loss_chunk_size),
        precision="bf16-mixed" if peer else None,
        plugins=None if peer else [run.precision],
        max_steps=WARM_UP + run.steps,
        accumulate_grad_batches=run.microbatches,
        gradient_clip_val=1.0,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    impl: Any = run.impl
    recipe = Recipe(learning_rate=LEARNING_RATE)
    model: pl.LightningModule
    if peer:
        model = OfTransformers(run)
    else:
        model = MCoreGPT(run.vocab_size, run.seq_length, run.transformer, recipe=recipe, transformer_impl=impl)
    try:
        trainer.fit(model, run.loader())
    finally:
        close_process_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
    figures = steps.figures
    del steps, trainer, model
    gc.collect()
    if run.device == "cuda":
        torch.cuda.empty_cache()
    return figures


# ---- the parts; each returns table rows


def overhead(run: Run) -> list[dict[str, Any]]:
    """Measure ours against the bare loop."""
    return [{"case": "ours beside the bare loop", **fit(run, with_bare=True).summary()}]


def lightning(run: Run) -> list[dict[str, Any]]:
    """Measure ours against Lightning's own strategies, which train the transformers model."""
    rows: list[dict[str, Any]] = [{"case": "MCoreStrategy", **fit(run).summary()}]
    for peer in ("ddp", "fsdp"):
        if run.device == "cpu" and peer == "fsdp":
            rows.append({"case": peer, "refused": "Lightning's FSDP needs a GPU"})
        elif "num_moe_experts" in run.transformer:
            rows.append({"case": peer, "refused": "transformers' Llama has no experts"})
        else:
            rows.append({"case": f"{peer}, transformers", **fit(run, peer=peer).summary()})
    return rows


def recipes(run: Run) -> list[dict[str, Any]]:
    """Measure bf16 and the FP8 recipes; if the device does not support a recipe, its row gives the reason."""
    rows: list[dict[str, Any]] = []
    for recipe in RECIPES:
        changed = with_changes(run, recipe=recipe)
        try:
            if recipe != "bf16":
                check_machine(changed.precision.fp8, FP8Machine.of(torch.device(run.device)))
        except (ValueError, ModuleNotFoundError) as error:
            rows.append({"case": recipe, "refused": str(error)})
            continue
        rows.append({"case": recipe, **fit(changed).summary()})
    return rows


def recompute(run: Run) -> list[dict[str, Any]]:
    """Measure with activations kept or recomputed."""
    return [
        {"case": name, **fit(with_changes(run, transformer=run.transformer | fields)).summary()}
        for name, fields in RECOMPUTE.items()
    ]


def loss(run: Run) -> list[dict[str, Any]]:
    """Measure rows of three lengths with all their logits and with the loss in chunks, one row per step."""
    rows: list[dict[str, Any]] = []
    transformer = run.transformer | RECOMPUTE["full"] | {"num_layers": 4}  # attention would hide the loss
    for length in (run.seq_length, 8 * run.seq_length, 32 * run.seq_length):
        steps = min(run.steps, 4 * 32 * run.seq_length // length)  # attention takes most of a long row
        for name, size in (("at once", None), ("in chunks", CHUNK)):
            one = with_changes(
                run,
                transformer=transformer,
                seq_length=length,
                microbatches=1,
                steps=steps,
                vocab_size=4 * run.vocab_size,
                loss_chunk_size=size,
            )
            case = f"{length:,} tokens, {name}"
            try:
                rows.append({"case": case, **fit(one).summary()})
            except torch.OutOfMemoryError:
                rows.append({"case": case, "refused": "out of memory"})
                gc.collect()
                torch.cuda.empty_cache()
    return rows


def with_changes(run: Run, **changes: Any) -> Run:
    """Return a copy of the run with some fields replaced."""
    return Run(**{**vars(run), **changes})


class Samples(Dataset[list[TokenSample]]):
    """Lists of samples of random lengths: either enough to fill a row, or one sample each.

    Args:
        run: Gives the row length and the number of samples.
        fills: Whether each list fills a row.
    """

    def __init__(self, run: Run, fills: bool) -> None:
        self.run, self.fills = run, fills

    def __len__(self) -> int:
        return self.run.samples

    def __getitem__(self, index: int) -> list[TokenSample]:
        generator = np.random.default_rng(index)
        samples, left = [], self.run.seq_length
        while left >= 16 and (self.fills or not samples):
            length = int(min(left - 1, max(8, generator.lognormal(np.log(self.run.seq_length / 8), 1.0))))
            tokens = generator.integers(0, self.run.vocab_size, length + 1)
            samples.append(TokenSample(tokens, None, 100 * index + len(samples)))
            left -= -(-length // 16) * 16  # build_row pads each sample like this
        return samples


def packed_data(run: Run) -> DataLoader[Any]:
    """Return a loader of packed rows."""
    return DataLoader(
        Samples(run, True),
        batch_size=run.rows,
        collate_fn=lambda lists: collate_rows([build_row(samples, run.seq_length, 16) for samples in lists]),
    )


def padded_data(run: Run) -> DataLoader[Any]:
    """Return a loader of rows with one sample each."""
    return DataLoader(
        Samples(run, False),
        batch_size=run.rows,
        collate_fn=lambda lists: collate_padded([samples[0] for samples in lists], row_length=run.seq_length),
    )


def packing(run: Run) -> list[dict[str, Any]]:
    """Measure packed rows against padded ones."""
    kinds = {"packed": packed_data, "padded": padded_data}
    return [{"case": name, **fit(with_changes(run, data=data)).summary()} for name, data in kinds.items()]


def save(run: Run) -> list[dict[str, Any]]:
    """Measure how long a save delays the trainer, and the steps during which files are written."""
    rows = []
    for name, is_asynchronous in (("synchronous", False), ("asynchronous", True)):
        stalls: list[float] = []
        with tempfile.TemporaryDirectory() as folder:

            def save_now(
                trainer: pl.Trainer,
                step: int,
                folder: str = folder,
                stalls: list[float] = stalls,
                later: bool = is_asynchronous,
            ) -> None:
                if step < WARM_UP or step % 5:
                    return
                plugin: Any = trainer.strategy.checkpoint_io
                plugin.async_save = later
                start = now(run.device)
                trainer.save_checkpoint(Path(folder) / f"{step}.ckpt")
                stalls.append(time.perf_counter() - start)
                shutil.rmtree(Path(folder) / f"{step - 5}.ckpt", ignore_errors=True)  # room for two

            found = fit(run, after_step=save_now).summary()
        later_stalls = stalls[1:] or stalls  # the first one allocates memory for the copy
        first = {"first_stall_seconds": stalls[0], "stall_seconds": statistics.median(later_stalls)}
        rows.append({"case": name, **first, **found})
    return rows


PIECES: dict[str, Callable[[Run], list[dict[str, Any]]]] = {
    "overhead": overhead,
    "lightning": lightning,
    "recipes": recipes,
    "packing": packing,
    "recompute": recompute,
    "loss": loss,
    "save": save,
}

COLUMNS = {
    "median_seconds": ("median s", "{:.4f}"),
    "bare_median_seconds": ("bare, median s", "{:.4f}"),
    "ratio_of_medians": ("ratio of medians", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "model_tflops": ("model TFLOP/s", "{:.1f}"),
    "peak_mebibytes": ("peak MiB", "{:,.0f}"),
    "planned_mebibytes": ("plan, MiB", "{:,.0f}"),
    "first_stall_seconds": ("first stall s", "{:.3f}"),
    "stall_seconds": ("stall s", "{:.3f}"),
    "attention": ("attention", "{}"),
    "refused": ("not measured", "{}"),
}


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, without empty columns."""
    used = [name for name in COLUMNS if any(name in row for row in rows)]
    heads = ["case", *(COLUMNS[name][0] for name in used)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [COLUMNS[name][1].format(row[name]) if name in row else "" for name in used]
        lines.append("| " + " | ".join([row["case"], *cells]) + " |")
    return "\n".join(lines)


def highest_tflops(device: str) -> float:
    """Return the peak speed of bf16 matrix products on the device, in TFLOP/s."""
    size = 8192 if device == "cuda" else 256
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = []
    for _ in range(20):
        start = now(device)
        left @ right
        seconds.append(now(device) - start)
    return 2 * size**3 / statistics.median(seconds[5:]) / 1e12


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that contain kernels."""
    found = {"CUDA": str(torch.version.cuda)}
    for package in ("transformer_engine", "flash_attn", "nvidia-cudnn-cu13", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Run the selected parts and, on a GPU, write the results."""
    parser = argparse.ArgumentParser(description="Measure our step on a GPU.")
    parser.add_argument("--pieces", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--tiny", action="store_true", help="a model and few steps that try the code, on any device")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA GPU; --device cpu --tiny tries the code")
    if options.device == "cpu":
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # otherwise Lightning would use all cores
    if options.tiny:
        options.size, options.seq_length, options.microbatches, options.steps = "tiny", 128, 2, 5
    output = options.output
    del options.output
    run = Run(
        device=options.device,
        transformer=SIZES[options.size],
        seq_length=options.seq_length,
        rows=options.rows,
        microbatches=options.microbatches,
        steps=options.steps,
        vocab_size=32_768 if options.device == "cuda" else 1024,
    )
    facts = {**circumstances(options), **versions(), "bf16 products, TFLOP/s": round(highest_tflops(run.device), 1)}
    measured = {}
    for name in options.pieces:
        print(f"measuring {name} ...", flush=True)
        measured[name] = PIECES[name](run)
        text = table(measured[name])
        if options.device == "cpu" or options.tiny:
            print(text)
            continue
        facts["device"] = torch.cuda.get_device_name()
        title = f"On a GPU: {name}, model {options.size}"
        length = "" if options.seq_length == 4096 else f"-{options.seq_length}"
        write_results(output, f"gpu-{name}-{options.size}{length}", title, facts, measured[name], text, "cuda")
    return measured


if __name__ == "__main__":
    main()
