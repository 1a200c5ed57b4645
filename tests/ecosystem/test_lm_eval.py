# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness: a model in training, on any layout, gets the scores of the folder that it exports."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCoreStrategy
from lightning_mcore.hf import as_hf_model, export_model, hf_model
from tests.support.hf_models import save_tiny
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("qwen2", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": ("qwen2", {"pipeline_model_parallel_size": 2}),
    "cp2": ("qwen2", {"context_parallel_size": 2}),
    "ep2": ("mixtral", {"expert_model_parallel_size": 2}),
    "dp2": ("qwen2", {}),
}
TOLERANCE = 1e-4  # of sums of up to 30 log-probabilities, between -2 and -8 each
QUESTIONS = [("w5 w17 w3", ["w40 w41", "w7", "w9 w10 w11"]), ("w60 w61", ["w62", "w63 w64"]), ("w90", ["w91", "w92"])]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "words": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"max_gen_toks": 6, "until": ["\n\n"], "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
Scores = dict[str, tuple[dict[str, Any], list[Any]]]


def write_tasks(folder: Path) -> str:
    """Write a task of each output type, on data in a file; return their folder."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": q, "choices": c}) + "\n" for q, c in QUESTIONS))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        text = "" if name == "text" else "{{question}}"
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, "doc_to_text": text, **task}))
    return str(folder)


def evaluate(model: Any, tokenizer: str, tasks: str) -> Scores | None:
    """Return the metrics of each task, and the model's answers to each request; the harness returns them on rank 0."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    harness = HFLM(pretrained=model, tokenizer=words, batch_size=2, device="cpu", max_length=32)
    manager = TaskManager(include_path=tasks, include_defaults=False)
    found = simple_evaluate(harness, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    if found is None:
        return None
    answers = {
        name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in found["samples"].items()
    }
    metrics = {name: {key: value for key, value in found["results"][name].items() if "," in key} for name in TASKS}
    return {name: (metrics[name], answers[name]) for name in TASKS}


class Evaluated(pl.LightningModule):
    """A module written for transformers, which the harness evaluates while it is validated."""

    def __init__(self, path: str, tasks: str, out: str) -> None:
        super().__init__()
        self.path, self.tasks, self.out = path, tasks, out

    def configure_model(self) -> None:
        self.model = hf_model(self, self.path)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model(batch, labels=batch)

    def on_validation_epoch_end(self) -> None:
        self.scores = evaluate(self.model, self.path, self.tasks)
        self.model.save_pretrained(self.out)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class EvaluatedGPT(MCoreGPT):
    """An ``MCoreGPT``, which the harness evaluates while it is validated, on rows of other shapes than it trains on."""

    paths = ("", "", "")  # of the model, the tasks and the folder to write

    def on_validation_epoch_end(self) -> None:
        path, tasks, out = self.paths
        with as_hf_model(self) as model:
            self.scores = evaluate(model, path, tasks)
        super().on_validation_epoch_end()
        export_model(self, out)


def evaluate_gpts(runs: dict[str, tuple[str, str, str, dict[str, Any]]]) -> dict[str, Scores | None]:
    """Train an ``MCoreGPT`` on each layout for two steps; return the scores of a validation after them."""
    found = {}
    for name, (path, tasks, out, layout) in runs.items():
        module: Any = EvaluatedGPT.from_pretrained(path, seq_length=16)
        module.paths = (path, tasks, out)
        tokens = torch.randint(3, 90, (8, 17), generator=torch.Generator().manual_seed(1))
        rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
        loader: Any = DataLoader(rows, batch_size=2)
        make_trainer(MCoreStrategy(**layout), max_steps=2, val_check_interval=2).fit(module, loader, loader)
        found[name] = module.scores
    return found


def evaluate_each(runs: dict[str, tuple[str, str, str, dict[str, Any]]]) -> dict[str, Scores | None]:
    """Train on each layout for two steps; return the scores of a validation after them."""
    found = {}
    for name, (path, tasks, out, layout) in runs.items():
        pl.seed_everything(1, verbose=False)
        module = Evaluated(path, tasks, out)
        loader: Any = DataLoader(torch.randint(3, 90, (8, 16)), batch_size=2)  # type: ignore[arg-type]
        make_trainer(MCoreStrategy(**layout), max_steps=2, val_check_interval=2).fit(module, loader, loader)
        found[name] = module.scores
    return found


def evaluate_folders(folders: dict[str, str], tasks: str) -> dict[str, Scores | None]:
    """Return the scores of models that transformers reads."""
    return {name: evaluate(folder, folder, tasks) for name, folder in folders.items()}


@pytest.mark.works_with(
    "lm_eval", "scores of a model in training on TP, PP, CP, EP and DP: same as for the exported folder"
)
def test_a_model_in_training_gets_the_scores_of_its_exported_folder(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_tasks(tasks)
    models = {model: str(save_tiny(model, tmp_path / model, tokenizer=True)) for model, _ in LAYOUTS.values()}
    runs = {
        name: (models[model], str(tasks), str(tmp_path / name), layout) for name, (model, layout) in LAYOUTS.items()
    }
    compare_with_folders(run_ranks(2, evaluate_each, runs, timeout=300), runs, str(tasks))


@pytest.mark.works_with(
    "lm_eval", "scores of an MCoreGPT in training on TP, PP and CP: same as for the exported folder"
)
def test_an_mcore_gpt_in_training_gets_the_scores_of_its_exported_folder(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_tasks(tasks)
    path = str(save_tiny("qwen2", tmp_path / "qwen2", tokenizer=True))
    runs = {name: (path, str(tasks), str(tmp_path / name), LAYOUTS[name][1]) for name in ("tp2", "pp2", "cp2")}
    compare_with_folders(run_ranks(2, evaluate_gpts, runs, timeout=300), runs, str(tasks))


def compare_with_folders(ranks: list[Any], runs: dict[str, tuple[str, str, str, dict[str, Any]]], tasks: str) -> None:
    """Compare the scores of models in training with those that transformers gives the folders that they wrote."""
    expected = run_ranks(1, evaluate_folders, {name: out for name, (*_, out, _) in runs.items()}, tasks, timeout=300)
    assert not any(ranks[1].values())
    for name in runs:
        for task in TASKS:
            metrics, answers = ranks[0][name][task]
            wanted, told = expected[0][name][task]
            assert metrics == pytest.approx(wanted, rel=TOLERANCE), (name, task)
            assert_close(answers, told)
    trained = ranks[0]["tp2"]["words"][1]
    assert any(len(set(text.split())) > 1 for [text] in trained), trained  # not one word again and again


def assert_close(found: Any, wanted: Any) -> None:
    """Compare nested lists of log-probabilities, flags and texts."""
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    else:
        assert found == (pytest.approx(wanted, abs=TOLERANCE) if isinstance(wanted, float) else wanted)
