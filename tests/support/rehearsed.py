# SPDX-License-Identifier: Apache-2.0
"""Runs to rehearse: what the processes of a rehearsal import to build them."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mcore import MCoreGPT, MCorePreference, MCoreStrategy, MuonWithAdamW
from lightning_mcore.callbacks import OffloadActivations
from lightning_mcore.config.run import RunSettings
from lightning_mcore.hf import adapters
from lightning_mcore.planning.machines import MACHINES
from lightning_mcore.rehearsal.processes import Failure, Job, Played, run_jobs
from lightning_mcore.rehearsal.settings import build_of
from lightning_mcore.strategy.precision import MCorePrecision
from tests.parity import hf_modules
from tests.support import toy
from tests.support.live_memory import LiveRun, parts_of

LENGTH, VOCABULARY = 32, 128
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "add_bias_linear": False}


EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
GATED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "ffn_hidden_size": 128,
}


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Texts(Dataset[dict[str, Tensor]]):
    """Rows of tokens; four sequences each if ``packed``, two answers to a prompt each if ``pairs``."""

    def __init__(self, packed: bool = False, pairs: bool = False) -> None:
        self.packed, self.pairs = packed, pairs

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {"tokens": torch.arange(LENGTH), "labels": torch.arange(LENGTH) + 1, "lengths": torch.tensor(LENGTH)}
        if self.packed:
            row |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), torch.arange(5) * (LENGTH // 4))
        if self.pairs:
            row |= {"sample_ids": torch.tensor(0), "loss_mask": (torch.arange(LENGTH) < LENGTH - 1).float()}
            row["reference_logps"] = torch.tensor(0.0, dtype=torch.float64)
        return row


def gpu_trainer(world: int, strategy: MCoreStrategy, **arguments: Any) -> pl.Trainer:
    """Return a Trainer on nodes of eight GPUs."""
    nodes = {"devices": min(world, 8), "num_nodes": max(1, world // 8)}
    return pl.Trainer(accelerator="gpu", strategy=strategy, **nodes, **arguments)


class ReadsLoss(pl.Callback):
    """A user's callback that needs a logged value on every rank."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if "val_loss" not in trainer.callback_metrics:
            raise RuntimeError("val_loss is not logged")


def watched_trainer(world: int, strategy: MCoreStrategy, **arguments: Any) -> pl.Trainer:
    """Return a Trainer that reads its validation loss."""
    return gpu_trainer(world, strategy, callbacks=[ReadsLoss()], **arguments)


def offloading_trainer(world: int, strategy: MCoreStrategy, **arguments: Any) -> pl.Trainer:
    """Return a Trainer that keeps activations in host memory."""
    return gpu_trainer(world, strategy, callbacks=[OffloadActivations(min_bytes=1)], **arguments)


def gpt_run(
    world: int = 1,
    precision: str = "bf16-mixed",
    accumulate: int = 2,
    transformer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    packed: bool = False,
    folder: str | None = None,
    kind: type[pl.LightningModule] | None = None,
    trainer: Callable[..., pl.Trainer] = gpu_trainer,
    **strategy: Any,
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run of a tiny GPT, new or from a folder, with rows of 32 tokens in batches of two."""
    made = trainer(
        world, MCoreStrategy(**strategy), precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=1.0
    )
    loader = DataLoader(Texts(packed, "preference" in (model or {})), batch_size=2)
    if folder is not None:
        return made, MCoreGPT.from_pretrained(folder, seq_length=LENGTH, **(model or {})), (loader, loader)
    sizes = {"vocab_size": VOCABULARY, "seq_length": LENGTH, **(model or {})}
    kind = MCorePreference if "preference" in sizes else kind or MCoreGPT
    return made, kind(transformer={**SIZES, **(transformer or {})}, **sizes), (loader, loader)


def file_run(
    model: dict[str, Any], world: int = 1, image_tokens: int | None = None, **strategy: Any
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts that ``lightning-mcore rehearse`` makes of a file, with batches of two rows."""
    settings = RunSettings(
        strategy=strategy,
        precision={"precision": "bf16-mixed"},
        model=model,
        trainer={"accelerator": "gpu", "accumulate_grad_batches": 2, "max_steps": 10},
        data={"batch_size": 2},
        image_tokens=image_tokens,
    )
    return build_of(settings, world, min(world, 8))[0]()


def taught_run(
    student: str, teacher: str, world: int, image_tokens: int | None = None, **strategy: Any
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a distillation between the models of two folders, which matches hidden states too."""
    setting = {"teacher": teacher, "intermediate_layer_pairs": [[1, 1], [1, 4], [4, 4]]}
    model = {"path": student, "seq_length": LENGTH, "distillation": setting}
    return file_run(model, world, image_tokens, **strategy)


def embedding_run(path: str, world: int, **strategy: Any) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run that compares texts."""
    return file_run({"path": path, "seq_length": LENGTH, "embedding": {}}, world, **strategy)


def reranking_run(path: str, world: int, **strategy: Any) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run that scores documents by two tokens."""
    return file_run({"path": path, "seq_length": LENGTH, "reranker": {"tokens": [5, 90]}}, world, **strategy)


def undigested_run(**arguments: Any) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run that fails if weights are digested, which takes minutes for a large model."""

    def refuse(places: Tensor) -> Tensor:
        raise RuntimeError("a rehearsal has no values to digest")

    adapters._odd = refuse  # in a process of its own
    return gpt_run(**arguments)


def hf_run(
    path: str, world: int = 1, kind: type[hf_modules.FineTuning] = hf_modules.FineTuning, **strategy: Any
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run of a module that wraps a Hugging Face model."""
    loader = DataLoader(hf_modules.Texts(), batch_size=4, collate_fn=hf_modules.collate)
    trainer = gpu_trainer(world, MCoreStrategy(**strategy), precision="bf16-mixed")
    return trainer, kind(path, ours=True), (loader, loader)


def net_run(
    kind: type[pl.LightningModule], world: int = 1, **strategy: Any
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run of a module of ``toy.py``, which evaluates with torchmetrics."""
    loader = toy.loader(64, 4)
    return gpu_trainer(world, MCoreStrategy(**strategy), accumulate_grad_batches=2), kind(), (loader, loader)


class WithMuon(MCoreGPT):
    """A GPT whose matrices are trained with Muon."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        matrices = [p for name, p in named if "layers" in name and p.dim() == 2]
        others = [p for name, p in named if not ("layers" in name and p.dim() == 2)]
        return MuonWithAdamW(matrices, others, lr=0.02, adamw_lr=0.01)


class Writing(MCoreGPT):
    """A GPT that continues prompts when it is validated."""

    def on_validation_epoch_end(self) -> None:
        for temperature in (0.0, 1.0):
            tokens = self.generate([3, 4], 2, temperature, top_k=5)
            if len(tokens) != 4 or not all(0 <= token < VOCABULARY for token in tokens):
                raise RuntimeError(f"no continuation of two tokens: {tokens}")


def live_run(
    run: LiveRun, trainer: Callable[..., pl.Trainer] = gpu_trainer
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run that is also measured on ranks without a GPU."""
    made = trainer(
        run.world,
        MCoreStrategy(**run.strategy),
        plugins=[MCorePrecision(run.precision)],  # type: ignore[arg-type]
        accumulate_grad_batches=run.microbatches,
        use_distributed_sampler=run.family is None,
    )
    module, loader = parts_of(run, steps=2)
    return made, module, (loader,)


@torch.library.custom_op("rehearsed::double", mutates_args=())
def double(value: Tensor) -> Tensor:
    """An operator without a fake kernel."""
    return 2 * value


class Plain(pl.LightningModule):
    """A module that is not split, and reads a value in its step."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 256, bias=False)  # 1 MiB in fp32
        self.fault = fault

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layer(batch)
        if self.fault == "value":
            output = output[output > 0]
        if self.fault == "device":
            output = output + torch.ones(256)
        if self.fault == "operator":
            output = double(output)
        loss = output.sum()
        if loss.item() > 1:
            raise ValueError("the loss is too large")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain_run(fault: str = "", rows: int = 64) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run of ``Plain``."""
    trainer = pl.Trainer(accelerator="gpu", devices=1, strategy=MCoreStrategy())
    if fault == "file":
        torch.load("no-such-rows.pt")
    return trainer, Plain(fault), (DataLoader(torch.ones(rows, 1024), batch_size=8),)


def run_of_file(file: str) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run whose step stands in a file, and reads a value on its second line."""
    step = "def training_step(self, batch, batch_idx):\n    return self.layer(batch).sum() * batch.sum().item()"
    names: dict[str, Any] = {}
    exec(compile(step, file, "exec"), names)
    trainer, _, data = plain_run()
    return trainer, type("OfFile", (Plain,), names)(), data


def job(build: Any, *ranks: int, assume: dict[str, float] | None = None, device: str = "h100") -> Job:
    """Return a run to rehearse, with its default ranks if none are given."""
    return Job(build, ranks or None, 8, MACHINES[device], assume or {})


def play(jobs: dict[str, Job]) -> dict[str, Played | Failure]:
    """Rehearse runs, one after the other, in one process."""
    return dict(zip(jobs, run_jobs(list(jobs.values()), lambda rank, what: None), strict=True))


def selected(request: Any) -> list[str]:
    """Return the parameter ``name`` of the selected tests of the file of a module's fixture."""
    items = [item for item in request.session.items if item.fspath == request.node.fspath and hasattr(item, "callspec")]
    return sorted({item.callspec.params["name"] for item in items if "name" in item.callspec.params})


def stuck_run(record: Path) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Write the processes of the rehearsal to a file, and never end."""
    partial_file = record.with_suffix(".part")
    partial_file.write_text(f"{os.getppid()} {os.getpid()}")
    partial_file.replace(record)
    time.sleep(600)
    raise AssertionError
