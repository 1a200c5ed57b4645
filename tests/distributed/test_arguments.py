# SPDX-License-Identifier: Apache-2.0
"""Every field of ``TrainingArguments`` is read back from a live run: configs of Megatron, objects of Lightning.

The arguments of a run are parsed from the words of a command line, a tiny model made on the spot is trained with what
``args.trainer``, ``args.model`` and ``args.data`` make, and the places of ``argument_table.py`` are read while it
trains, or from what it has saved.
"""

import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

from tests.support.argument_table import LIVE, Run
from tests.support.chats import characters, exchanges, write
from tests.support.hf_models import save_tiny
from tests.support.ranks import run_ranks
from tests.support.sentences import refuses
from tests.support.toy import Watch

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

SEQ_LENGTH = 64
OF_CHECKPOINT = "saved["


def filled(value: Any, out: str) -> Any:
    """Return a value of the table with the folder of the run in the place of ``{out}``."""
    return value.replace("{out}", out) if isinstance(value, str) else value


def words(values: dict[str, Any]) -> list[str]:
    """Return arguments as the words of a command line."""
    return [word for name, value in values.items() for word in (f"--{name}", *as_words(value))]


def as_words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


class Reader(pl.Callback):
    """Evaluates expressions on the objects of a run, in its last training step."""

    def __init__(self, run: Run, args: Any, data: Any) -> None:
        self.run, self.args, self.data = run, args, data
        self.read: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        chunks = strategy._chunks
        scope = {
            **{"args": self.args, "trainer": trainer, "strategy": strategy, "module": pl_module, "data": self.data},
            **{"os": os, "logging": logging, "torch": torch},
            "config": chunks.config,
            "ddp": chunks.ddp[0].ddp_config,
            "optimizer": strategy.optimizers[0],
            "megatron": strategy.optimizers[0].megatron.config,
            "scheduler": strategy.lr_scheduler_configs[0].scheduler,
            "checkpoint": trainer.checkpoint_callback,
            "callback": lambda name: next(c for c in trainer.callbacks if type(c).__name__ == name),
        }
        self.read = {
            landing.name: eval(landing.place, scope)
            for landing in self.run.landings
            if not landing.place.startswith(OF_CHECKPOINT)
        }


def read_live(name: str, folder: str, out: str) -> dict[str, Any]:
    """Train, and return what stands in the places of a run's table."""
    from lightning_mcore.arguments import parse_arguments

    warnings.filterwarnings("ignore")
    run = LIVE[name]
    values = {"output_dir": out, **{key: filled(value, out) for key, value in run.values.items()}}
    (args,) = parse_arguments(words(values))
    files = {"validation_files": f"{folder}/validation.jsonl", "cache_dir": f"{folder}/cache"}
    data = args.data(f"{folder}/train.jsonl", characters(), SEQ_LENGTH, overrides=files)
    reader = Reader(run, args, data)
    trainer = args.trainer(
        devices=run.world_size, plugins=LightningEnvironment(), callbacks=[reader], enable_model_summary=False
    )
    trainer.fit(args.model(f"{folder}/model", seq_length=SEQ_LENGTH), data)
    for landing in run.landings:
        if landing.place.startswith(OF_CHECKPOINT):
            reader.read[landing.name] = eval(landing.place, {"saved": look_at_checkpoint(Path(out))})
    return reader.read


def train(folder: str, values: dict[str, Any]) -> list[float]:
    """Train a Llama with arguments, and return its losses."""
    from lightning_mcore.arguments import TrainingArguments

    warnings.filterwarnings("ignore")
    args = TrainingArguments(**{"use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, **values})
    watch = Watch()
    files = {"validation_files": f"{folder}/validation.jsonl", "cache_dir": f"{folder}/cache"}
    data = args.data(f"{folder}/train.jsonl", characters(), SEQ_LENGTH, overrides=files)
    ranks = torch.distributed.get_world_size()
    trainer = args.trainer(devices=ranks, plugins=LightningEnvironment(), callbacks=watch, enable_model_summary=False)
    trainer.fit(args.model(f"{folder}/model", seq_length=SEQ_LENGTH), data, ckpt_path=args.ckpt_path)
    return watch.seen.logged


def look_at_checkpoint(out: Path) -> dict[str, Any]:
    path = next(path for path in out.iterdir() if path.suffix == ".ckpt")
    return {
        "sharding": torch.load(path / "common.pt")["content_metadata"]["distrib_optim_sharding_type"],
        "shards": len(list(path.glob("*.distcp"))),
        "backend": json.loads((path / "metadata.json").read_text(encoding="utf-8"))["sharded_backend"],
    }


def make_files(folder: Path, family: str, **model: Any) -> None:
    """Write a model, and data to train on and to validate on."""
    save_tiny(family, folder / "model", vocab_size=300, **model)
    write(folder / "train.jsonl", exchanges(24))
    write(folder / "validation.jsonl", exchanges(8, seed=1))


@pytest.mark.parametrize("name", LIVE)
def test_every_field_of_a_run_is_where_the_table_says(name: str, tmp_path: Path) -> None:
    run, out = LIVE[name], str(tmp_path / "out")
    make_files(tmp_path, run.family, **run.model)
    expected = {landing.name: filled(landing.expected, out) for landing in run.landings}
    for read in run_ranks(run.world_size, read_live, name, str(tmp_path), out, timeout=180):
        assert {key: read[key] for key in expected} == expected


@pytest.mark.parametrize("chunks", [2, pytest.param(None, marks=pytest.mark.thorough)])
def test_when_gradients_are_reduced_changes_no_loss(chunks: int | None, tmp_path: Path) -> None:
    make_files(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    values = {
        "output_dir": str(tmp_path / "out"),
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": chunks,
        "overlap_grad_reduce": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "save_strategy": "no",
    }
    losses = [
        run_ranks(4, train, str(tmp_path), {**values, "delay_grad_reduce": d}, timeout=180) for d in (True, False)
    ]
    assert losses[0] == losses[1]
    assert losses[0][0][-1] < losses[0][0][0]


def test_checkpoints_are_named_limited_and_resumed_from(tmp_path: Path) -> None:
    make_files(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    out = tmp_path / "out"
    values = {
        "output_dir": str(out),
        "use_distributed_optimizer": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "save_steps": 1,
        "save_total_limit": 2,
        "save_hf_model": True,
    }
    whole = run_ranks(2, train, str(tmp_path), values, timeout=180)
    kept = ["checkpoint-3.ckpt", "checkpoint-3.ckpt-hf", "checkpoint-4.ckpt", "checkpoint-4.ckpt-hf"]
    assert sorted(path.name for path in out.iterdir()) == kept
    more = {**values, "output_dir": str(tmp_path / "more"), "resume_from_checkpoint": str(out / kept[0])}
    assert run_ranks(2, train, str(tmp_path), more, timeout=180) == [losses[3:] for losses in whole]


def test_the_best_checkpoint_is_that_of_the_metric(tmp_path: Path) -> None:
    make_files(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    out = tmp_path / "out"
    values = {
        "output_dir": str(out),
        "learning_rate": 1e-2,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
    }
    run_ranks(1, follow, str(tmp_path), values, timeout=180)
    assert [path.name for path in out.iterdir()] == ["checkpoint-4.ckpt"]


def follow(folder: str, values: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Train on one rank, evaluate where ``do_eval`` asks for it, and return the steps of evaluations and losses."""
    from lightning_mcore.arguments import TrainingArguments

    warnings.filterwarnings("ignore")
    args = TrainingArguments(**{"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 2, **values})
    watch, steps = Watch(), list[int]()
    evaluations = pl.callbacks.LambdaCallback(on_validation_end=lambda trainer, _: steps.append(trainer.global_step))
    files = {"validation_files": f"{folder}/validation.jsonl", "cache_dir": f"{folder}/cache"}
    data = args.data(f"{folder}/train.jsonl", characters(), SEQ_LENGTH, overrides=files)
    more: list[Any] = [watch, evaluations]
    trainer = args.trainer(devices=1, plugins=LightningEnvironment(), callbacks=more, enable_model_summary=False)
    model = args.model(f"{folder}/model", seq_length=SEQ_LENGTH)
    trainer.fit(model, data, ckpt_path=args.ckpt_path)
    if values.get("do_eval"):
        assert "val_loss" in trainer.validate(model, data, verbose=False)[0]
    return steps, watch.seen.logged


OF_STEPS = {"max_steps": 14, "save_steps": 6, "save_total_limit": 3, "eval_strategy": "steps", "eval_steps": 5}
BY_EPOCHS = {"max_steps": 7, "save_strategy": "epoch", "eval_strategy": "epoch"}
ACCUMULATED = {"num_train_epochs": 2, "gradient_accumulation_steps": 4, "save_steps": 4}


@pytest.mark.parametrize(
    ("values", "evaluated", "saved"),
    [  # 12 batches make an epoch
        (OF_STEPS, [5, 10, 14], [6, 12, 14]),
        (BY_EPOCHS, [7], [7]),
        (ACCUMULATED | {"eval_strategy": "steps", "eval_steps": 4}, [4, 6], [4, 6]),
        (ACCUMULATED, [], [4, 6]),
        ({"max_steps": 2, "do_eval": True, "save_strategy": "no"}, [2], []),
    ],
)
def test_what_is_saved_and_evaluated_when(
    values: dict[str, Any], evaluated: list[int], saved: list[int], tmp_path: Path
) -> None:
    """As transformers' Trainer: at every n-th step, the ends of epochs among them, and after the last one."""
    make_files(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    out = tmp_path / "out"
    ((steps, _),) = run_ranks(1, follow, str(tmp_path), {"output_dir": str(out), **values}, timeout=180)
    assert steps == evaluated
    assert {path.name for path in out.glob("*")} == {f"checkpoint-{step}.ckpt" for step in saved}


def test_a_resumed_run_saves_no_step_twice_and_ends_alike(tmp_path: Path) -> None:
    make_files(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    out, values = tmp_path / "out", {"gradient_accumulation_steps": 3, "save_steps": 2, "lr_scheduler_type": "constant"}
    values |= {"output_dir": str(out)}
    ((_, whole),) = run_ranks(1, follow, str(tmp_path), {**values, "max_steps": 5}, timeout=180)
    for path in out.iterdir():
        if path.name != "checkpoint-2.ckpt":
            shutil.rmtree(path)
    more = {**values, "max_steps": 5, "resume_from_checkpoint": True}
    ((_, rest),) = run_ranks(1, follow, str(tmp_path), more, timeout=180)
    assert rest[-1] == whole[-1]
    assert sorted(path.name for path in out.iterdir()) == [f"checkpoint-{step}.ckpt" for step in (2, 4, 5)]


@pytest.mark.parametrize(
    ("strategy", "saved"),  # an epoch has 4 steps
    [({"save_strategy": "steps", "save_steps": 2}, (6, 7)), ({"save_strategy": "epoch"}, (8, 12))],
    ids=["steps", "epochs"],
)
def test_no_more_checkpoints_stay_after_a_resume(
    strategy: dict[str, Any], saved: tuple[int, ...], tmp_path: Path
) -> None:
    make_files(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    out = tmp_path / "out"
    values = {"output_dir": str(out), "gradient_accumulation_steps": 3, "save_total_limit": 2, **strategy}
    run_ranks(1, follow, str(tmp_path), {**values, "max_steps": 4}, timeout=180)
    more = {**values, "max_steps": 7 if "save_steps" in strategy else 12, "resume_from_checkpoint": True}
    run_ranks(1, follow, str(tmp_path), more, timeout=180)
    assert {path.name for path in out.iterdir()} == {f"checkpoint-{step}.ckpt" for step in saved}


def test_an_evaluation_before_the_first_step_is_logged(tmp_path: Path) -> None:
    make_files(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    out = tmp_path / "out"
    values = {"output_dir": str(out), "max_steps": 1, "eval_strategy": "epoch", "eval_on_start": True}
    run_ranks(1, follow, str(tmp_path), {**values, "report_to": "csv", "save_strategy": "no"}, timeout=180)
    header, first, *_ = (out / "logs" / "version_0" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert row["step"] == "0"
    assert float(row["val_loss"]) > 0


def learned_from_queries(base: str, file: str, out: str, kind: Any, metric: str) -> tuple[Any, ...]:
    """Train on queries for three steps, keep the best checkpoint, and return what is there."""
    from lightning_mcore.arguments import TrainingArguments, parse_arguments

    given = {
        **{"output_dir": out, "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
        **{"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_cpu": True, "learning_rate": 0.01},
        **{"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "report_to": "none"},
        **{"metric_for_best_model": metric, "gradient_accumulation_steps": 2},
    }
    (args,) = parse_arguments(words(given), TrainingArguments)
    model = args.model(base, seq_length=SEQ_LENGTH, **{kind: {"negatives": 1} if kind == "embedding" else {}})
    data = args.data(file, base, SEQ_LENGTH, queries=kind, overrides={"validation_files": file, "cache_dir": out})
    trainer = args.trainer(devices=2, plugins=[LightningEnvironment()])
    trainer.fit(model, data)
    return trainer.global_step, type(model).__name__, trainer.checkpoint_callback.monitor


@pytest.mark.parametrize(("kind", "metric"), [("embedding", "mrr"), ("reranker", "ndcg")])
def test_arguments_train_on_queries_and_keep_the_best(kind: str, metric: str, tmp_path: Path) -> None:
    from tests.parity.test_embedding import embedding_base, write_queries

    base, file = embedding_base(tmp_path / "base"), write_queries(tmp_path / "a.jsonl", 24)
    found = run_ranks(2, learned_from_queries, base, file, str(tmp_path / "out"), kind, metric, timeout=120)
    names = {"embedding": "MCoreEmbedding", "reranker": "MCoreReranker"}
    assert found == [(3, names[kind], f"val_{metric}")] * 2


def test_arguments_for_queries_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from lightning_mcore.arguments import TrainingArguments

    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "save_strategy": "best"}
    args = TrainingArguments(**given, eval_strategy="steps", metric_for_best_model="perplexity", report_to="none")
    with refuses(ValueError, "metric_for_best_model='perplexity' is not logged"):
        args.model("model", reranker={})
    with refuses(ValueError, "preference and reranker are given"):
        args.model("model", preference={}, reranker={})
    more: dict[str, Any] = {"overrides": {"validation_share": 0.5}}
    with refuses(ValueError, "pairs=True and queries='reranker'"):
        args.data("a.jsonl", None, SEQ_LENGTH, pairs=True, queries="reranker", **more)
    with refuses(ValueError, "queries='rerankers'"):
        args.data("a.jsonl", None, SEQ_LENGTH, queries="rerankers", **more)  # type: ignore[arg-type]
