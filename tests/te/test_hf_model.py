# SPDX-License-Identifier: Apache-2.0
"""The model in Hugging Face's shape on TransformerEngine's layers: FP8 copies of weights follow the weights."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreModule, MCorePrecision, MCoreStrategy
from lightning_mcore.hf import hf_model
from tests.parity.hf_modules import Writer, write_each
from tests.support.hf_models import VOCAB_SIZE, tiny_folder
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

STEPS = 3
ROWS = torch.randint(3, VOCAB_SIZE, (STEPS, 32), generator=torch.Generator().manual_seed(1))


class Net(MCoreModule):
    """Trains with large steps, and evaluates after each: as usual, and with weights that are quantised in each call."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.found: list[list[Tensor]] = []

    def configure_model(self) -> None:
        self.model = hf_model(self, self.folder, transformer_impl="transformer_engine")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.model(**batch).loss
        prompt = batch["input_ids"][:, :16]
        options: Any = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
        self.found[-1] += [loss, self.model.generate(prompt, **options).scores[0]]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append([])
        layers: list[Any] = [layer for layer in self.modules() if hasattr(layer, "is_first_microbatch")]
        assert layers
        self.eval()
        with torch.no_grad():
            for never_cached in (False, True):
                for layer in layers:
                    layer.disable_parameter_transpose_cache = never_cached
                self.validation_step(batch, 0)
        for layer in layers:
            layer.disable_parameter_transpose_cache = False
        self.train()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def evaluated_after_each_step(folder: str) -> list[list[Tensor]]:
    """Return the loss and the scores of the next token after each step: cached copies first, then fresh ones."""
    pl.seed_everything(3, verbose=False)
    net = Net(folder)
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    precision = MCorePrecision("bf16-mixed", fp8_recipe="tensorwise")
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=MCoreStrategy(), plugins=[precision], max_steps=STEPS, **quiet
    )
    trainer.fit(net, DataLoader([{"input_ids": row, "labels": row} for row in ROWS], batch_size=1))
    return net.found


def test_evaluation_and_generation_use_the_weights_of_the_last_step(tmp_path: Path) -> None:
    found = run_ranks(1, evaluated_after_each_step, str(tiny_folder("llama")), timeout=60)[0]
    assert len(found) == STEPS
    for loss, scores, fresh_loss, fresh_scores in found:
        assert torch.equal(loss, fresh_loss)
        assert torch.equal(scores, fresh_scores)
    assert len({float(each[0]) for each in found}) == STEPS  # the steps change the loss


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("llama", TP2),
    "latent": ("deepseek_v3", TP2),
    "window": ("mistral", {"pipeline_model_parallel_size": 2}),
    "experts": ("mixtral", {"expert_model_parallel_size": 2}),
}


def write_with_transformer_engine(runs: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`write_each` does."""
    Writer.transformer_impl = "transformer_engine"
    return write_each(runs)


def test_padded_prompts_are_continued_with_a_cache_as_transformers_does() -> None:
    runs = {name: (str(tiny_folder(model)), layout) for name, (model, layout) in LAYOUTS.items()}
    of_transformers = {model: (str(tiny_folder(model)), "auto") for model, _ in LAYOUTS.values()}
    one = run_ranks(1, write_each, of_transformers)[0]
    for found in run_ranks(2, write_with_transformer_engine, runs, timeout=120):
        for name, (model, _) in LAYOUTS.items():
            tokens, _, widths = found[name]
            assert torch.equal(tokens, one[model][0]), name
            assert widths[1:] == [1] * (len(widths) - 1), name


def test_context_parallel_ranks_continue_padded_prompts_as_one_rank_of_the_torch_backend() -> None:
    # In bf16, because TransformerEngine's attention splits no fp32 sequences
    plugin = MCorePrecision("bf16-mixed")
    folders = {name: str(tiny_folder(name)) for name in ("llama", "deepseek_v3")}
    alone = {name: (path, {"precision_plugin": plugin}) for name, path in folders.items()}
    split = {name: (path, {"precision_plugin": plugin, "context_parallel_size": 2}) for name, path in folders.items()}
    one = run_ranks(1, write_each, alone)[0]
    for found in run_ranks(2, write_with_transformer_engine, split, timeout=120):
        for name in folders:
            tokens, _, widths = found[name]
            assert torch.equal(tokens, one[name][0]), name
            assert widths[1:] == [1] * (len(widths) - 1), name
