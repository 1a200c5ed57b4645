# SPDX-License-Identifier: Apache-2.0
"""The files that a run reads, for ``tests/mutations.py``: how each is written, and what is made of it.

Each reader goes the way of a user: a Trainer that resumes, ``from_pretrained``, a data module whose batches are taken,
``lightning-mcore plan`` of a file.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.mutations import RefusedError, Sample, digest
from tests.support.toy import PlainNet, StagedNet, loader, make_trainer

WORDS = ["<unk>", "<eod>", "the", "small", "house", "of", "number", *map(str, range(50))]


# ---- checkpoints


def _fit(folder: Path, module: pl.LightningModule, steps: int, resume: str | None = None) -> None:
    callback = ModelCheckpoint(folder / "runs", "{step}", every_n_train_steps=1)
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer({}, max_steps=steps, callbacks=[callback], enable_checkpointing=True)
    trainer.fit(module, loader(32, 4), ckpt_path=resume)


def _write_checkpoint(make: Callable[[], pl.LightningModule], folder: Path) -> None:
    _fit(folder, make(), 2)


def _resume(make: Callable[[], pl.LightningModule], folder: Path) -> str:
    module = make()
    _fit(folder, module, 3, str(folder / "runs" / "step=2.ckpt"))
    return digest(*module.state_dict().values())


def _only_weights(folder: Path) -> str:
    module = StagedNet.load_from_checkpoint(folder / "runs" / "step=2.ckpt")
    return digest(*module.state_dict().values())


def _checkpoint(name: str, file: str, make: Callable[[], pl.LightningModule]) -> Sample:
    return Sample(name, partial(_write_checkpoint, make), file, partial(_resume, make), sealed=True)


# ---- Hugging Face


def _write_hf(folder: Path, shard: str = "5GB") -> None:
    from tests.support.hf_models import save_tiny

    save_tiny("llama", folder / "model", max_shard_size=shard)


def _from_pretrained(folder: Path) -> str:
    from lightning_mcore import MCoreGPT
    from lightning_mcore.layers.session import single_process

    with single_process():
        module = MCoreGPT.from_pretrained(str(folder / "model"), seq_length=16)
        module.configure_model()
        return digest(*(value for value in module.state_dict().values() if isinstance(value, torch.Tensor)))


def _import(folder: Path) -> str:
    from lightning_mcore.interop.importing import import_checkpoint

    import_checkpoint(folder / "model", folder / "imported")
    return "imported"


# ---- data


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))


def _write_corpus(folder: Path) -> None:
    _tokenizer(folder)
    lines = [
        json.dumps({"text": f"the small house of number {number % 50} " * (3 + number % 5)}) for number in range(60)
    ]
    (folder / "t.jsonl").write_text("\n".join(lines) + "\n")


def _write_indexed(folder: Path) -> None:
    from lightning_mcore.cli.preprocess import run

    _write_corpus(folder)
    arguments = ["--output", str(folder / "c"), "--tokenizer", str(folder / "tokenizer.json"), "--no-append-eod"]
    assert run([str(folder / "t.jsonl"), *arguments]) == 0
    _indexed(folder)  # the cache


def _preprocess(folder: Path) -> str:
    from lightning_mcore.cli.preprocess import run

    arguments = ["--output", str(folder / "c"), "--tokenizer", str(folder / "tokenizer.json"), "--no-append-eod"]
    if run([str(folder / "t.jsonl"), *arguments]):
        raise RefusedError
    return digest((folder / "c.bin").read_bytes(), (folder / "c.idx").read_bytes())


def _indexed(folder: Path) -> str:
    from lightning_mcore import MCorePretrainingData

    data = MCorePretrainingData(str(folder / "c"), seq_length=16, batch_size=2, split="90,10,0", num_workers=0)
    data.setup("fit")
    return digest(*(batch[key] for batch in data.train_dataloader() for key in ("tokens", "labels")))


def _write_chats(folder: Path, suffix: str = ".jsonl") -> None:
    from tests.support.chats import characters, exchanges, write

    characters().save_pretrained(folder / "tokenizer")
    write(folder / "data" / f"a{suffix}", exchanges(20))
    _chats(folder)


def _chats(folder: Path) -> str:
    from lightning_mcore import MCoreFinetuningData

    data = MCoreFinetuningData(
        str(folder / "data" / "*"),
        str(folder / "tokenizer"),
        64,
        batch_size=2,
        cache_dir=str(folder / "cache"),
        num_workers=0,
    )
    data.prepare_data()
    data.setup("fit")
    return digest(*(value for batch in data.train_dataloader() for value in batch.values()))


# ---- files that describe a run


def _write_factory(folder: Path) -> None:
    from tests.support.factory_files import write_run

    keys: dict[str, Any] = {
        "model_name_or_path": "", "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "alpaca_en_demo",
        "template": "llama3", "cutoff_len": 64, "output_dir": "", "per_device_train_batch_size": 1, "max_steps": 2,
        "learning_rate": 1.0e-4, "bf16": False,
    }  # fmt: skip
    write_run(folder, keys)
    file = folder / "run.yaml"
    file.write_text(file.read_text().replace(f"{folder}/", ""))  # trials read a copy of the folder


def _factory_rows(folder: Path) -> str:
    from lightning_mcore.arguments.llamafactory.run import read_run

    os.chdir(folder)
    data = read_run("run.yaml").data()
    data.prepare_data()
    data.setup("fit")
    return digest(*(value for batch in data.train_dataloader() for value in batch.values()))


def _plan(file: str, folder: Path) -> str:
    import contextlib
    import io

    from lightning_mcore.cli.plan import run

    os.chdir(folder)
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        code = run([file, "--devices", "2", "--json"])
    if wrong.getvalue().startswith("error: "):
        raise RefusedError(wrong.getvalue())
    return f"{code} {said.getvalue()}"


CLI_FILE: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu", "devices": 2, "max_steps": 4, "precision": "bf16-mixed",
        "strategy": {
            "class_path": "lightning_mcore.MCoreStrategy",
            "init_args": {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
        },
    },
    "model": {
        "class_path": "lightning_mcore.MCoreGPT",
        "init_args": {
            "vocab_size": 128, "seq_length": 32, "recipe": {"learning_rate": 1.0e-3},
            "transformer": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
        },
    },
}  # fmt: skip


def _write_cli(folder: Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(CLI_FILE))


SAMPLES = [
    *(
        _checkpoint(f"checkpoint {file}", f"runs/step=2.ckpt/{file}", StagedNet)
        for file in ("checkpoint.json", "lightning.pt", ".metadata", "metadata.json", "__0_0.distcp")
    ),
    _checkpoint("one-file checkpoint", "runs/step=2.ckpt", PlainNet),
    Sample(
        "load_from_checkpoint",
        partial(_write_checkpoint, StagedNet),
        "runs/step=2.ckpt/*.distcp",
        _only_weights,
        sealed=True,
    ),
    Sample("HF config.json", _write_hf, "model/config.json", _from_pretrained),
    Sample("HF config.json, import", _write_hf, "model/config.json", _import),
    Sample("HF model.safetensors", _write_hf, "model/model.safetensors", _from_pretrained),
    Sample("HF index", partial(_write_hf, shard="20KB"), "model/model.safetensors.index.json", _from_pretrained),
    Sample("corpus jsonl", _write_corpus, "t.jsonl", _preprocess),
    Sample("corpus tokenizer.json", _write_corpus, "tokenizer.json", _preprocess),
    Sample("indexed .bin", _write_indexed, "c.bin", _indexed, sealed=True),
    Sample("indexed .idx", _write_indexed, "c.idx", _indexed, sealed=True),
    Sample("indexed cache", _write_indexed, "c.cache/*/*", _indexed, sealed=True),
    Sample("chats jsonl", _write_chats, "data/a.jsonl", _chats),
    Sample("chats parquet", partial(_write_chats, suffix=".parquet"), "data/a.parquet", _chats),
    Sample("chats cache", _write_chats, "cache/*/*/*", _chats, sealed=True),
    Sample("chats tokenizer.json", _write_chats, "tokenizer/tokenizer.json", _chats),
    Sample("chats tokenizer_config.json", _write_chats, "tokenizer/tokenizer_config.json", _chats),
    Sample("chats chat_template.jinja", _write_chats, "tokenizer/chat_template.jinja", _chats),
    Sample("LLaMA-Factory run.yaml", _write_factory, "run.yaml", partial(_plan, "run.yaml")),
    Sample("LLaMA-Factory dataset_info.json", _write_factory, "data/dataset_info.json", _factory_rows),
    Sample("LLaMA-Factory model config.json", _write_factory, "model/config.json", partial(_plan, "run.yaml")),
    Sample("CLI run.yaml", _write_cli, "run.yaml", partial(_plan, "run.yaml")),
]
