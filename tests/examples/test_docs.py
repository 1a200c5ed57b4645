# SPDX-License-Identifier: Apache-2.0
"""The README and every page of ``docs/`` keep their promises: files, commands, settings and messages exist.

That their code runs is for ``test_doc_blocks.py``.
"""

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from lightning_mcore.cli import COMMANDS
from tests.examples.test_examples import run_on_ranks
from tests.support.pages import PAGES, ROOT, blocks

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def guide(name: str) -> Path:
    return ROOT / "docs" / "guides" / f"{name}.md"


@page
def test_the_files_links_and_commands_of_a_page_exist(path: Path) -> None:
    text = path.read_text()
    folders = "lightning_mcore|tests|examples|benchmarks|docs"
    named = set(re.findall(rf"(?<![\w/.-])(?<!--output )((?:{folders})/[\w./-]*\w)", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    links = [link.partition("#")[0] for link in re.findall(r"\]\(((?!https?:)[^)]+)\)", text)]
    assert [link for link in links if link and not (path.parent / link).exists()] == []
    assert set(re.findall(r"^\s*lightning-mcore (\w+)", text, re.MULTILINE)) <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", "\n".join(block.text for block in blocks(path, "bash")))) <= targets


def texts_in_the_code() -> Iterator[str]:
    """Yield the parts of strings between their placeholders."""
    for file in (ROOT / "lightning_mcore").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.split(r"%[sd]", node.value)


def test_the_messages_that_the_page_explains_are_in_the_code() -> None:
    known = "\n".join(texts_in_the_code())
    text = guide("when-it-goes-wrong").read_text()
    tables = re.findall(r"^\| Message \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    quoted = [
        message for row in "".join(tables).splitlines() for message in re.findall("`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(quoted) > 50
    parts = [part.strip() for message in quoted for part in message.split("…")]
    assert [part for part in parts if part not in known] == []


@pytest.mark.filterwarnings("ignore")  # of Megatron
def test_the_settings_beside_megatrons_flags_exist() -> None:
    import lightning.pytorch as pl
    from megatron.core.transformer import TransformerConfig

    from lightning_mcore import MCoreGPT, MCorePretrainingData, MCoreStrategy, Recipe

    homes = {
        "trainer": pl.Trainer,
        "strategy": MCoreStrategy,
        "model": MCoreGPT,
        "model.transformer": TransformerConfig,
        "model.recipe": Recipe,
        "data": MCorePretrainingData,
    }
    text = guide("from-megatron-lm").read_text()
    named = {name.rpartition(".")[::2] for name in re.findall(r"`((?:trainer|strategy|model|data)\.[a-z_.]+)", text)}
    assert len(named) > 50
    assert [name for home, name in sorted(named) if name not in signature(homes[home]).parameters] == []
    in_strategy = re.findall(r"^\| (.*) \| the same names in `strategy`", text, re.MULTILINE)
    in_transformer = re.findall(r"^\| (.*) \| the same names in `model.transformer`", text, re.MULTILINE)
    for home, rows in ((MCoreStrategy, in_strategy), (TransformerConfig, in_transformer)):
        flags = re.findall("`--([a-z-]+)`", "".join(rows))
        assert len(flags) > 5
        assert [flag for flag in flags if flag.replace("-", "_") not in signature(home).parameters] == []


@pytest.mark.filterwarnings("ignore")  # of Megatron
def test_the_settings_beside_the_trainers_arguments_exist() -> None:
    import lightning.pytorch as pl
    import transformers
    from lightning.pytorch.callbacks import ModelCheckpoint
    from megatron.core.transformer import TransformerConfig

    import lightning_mcore as ours
    from lightning_mcore.arguments.mapping import LANDINGS

    homes = {
        "trainer": [pl.Trainer],
        "strategy": [ours.MCoreStrategy],
        "model": [ours.MCoreGPT.from_pretrained, ours.MCorePreference.from_pretrained],
        "model.transformer": [TransformerConfig],
        "model.recipe": [ours.Recipe],
        "model.lora": [ours.LoRA],
        "model.preference": [ours.Preference],
        "data": [ours.MCoreFinetuningData, ours.MCorePreferenceData],
        "ModelCheckpoint": [ModelCheckpoint],
    }
    text = guide("from-trainer").read_text().replace("`trainer.strategy", "`strategy")  # as LANDINGS has it
    named = re.findall(r"`((?:trainer|strategy|model|data|ModelCheckpoint)\.[a-z_.]+)(?:: \w+)?`", text)
    others = ("trainer.validate", "trainer.test", "strategy", "ModelCheckpoint.best_model_path")  # not settings
    named = [name for name in named if name not in others]
    assert len(named) > 60
    places = [name.rpartition(".")[::2] for name in named]
    assert [name for home, name in places if not any(name in signature(each).parameters for each in homes[home])] == []
    adapters = re.search(r"under their own names: (.*?)\.", text, re.DOTALL)
    assert adapters is not None
    both = {*signature(ours.LoRA).parameters} & {*signature(LoraConfig).parameters}
    assert [name for name in re.findall("`(.*?)`", adapters[1]) if name not in both] == []
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    tables = re.findall(r"^\| `TrainingArguments` \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.split(" | ")[:2] for row in "".join(tables).splitlines()]
    of_trainer = [(name, place) for names, place in rows for name in re.findall("`(.*?)`", names)]
    assert len(of_trainer) > 40
    assert [name for name, _ in of_trainer if name not in theirs] == []
    # Where our own TrainingArguments keep a value as it is, the page names the same place.
    kept = [(name, place) for name, place in of_trainer if name in LANDINGS]
    assert len(kept) > 12
    assert [(name, place) for name, place in kept if f"`{LANDINGS[name]}`" not in place] == []


def test_every_page_has_its_place_in_the_site() -> None:
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES[1:])


def test_the_first_example_is_complete_within_forty_lines() -> None:
    lines = PAGES[0].read_text().splitlines()
    start, code = lines.index("```python"), blocks(PAGES[0], "python")[0].text
    assert start + 1 + len(code.splitlines()) < 40
    assert "trainer.fit(" in code
    assert len(lines) <= 180


_TRAIN_NET = """

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        text = (torch.arange(17) * (index + 1)) % 256
        return {"tokens": text[:-1], "labels": text[1:]}


if __name__ == "__main__":
    import sys

    import lightning.pytorch as pl

    from lightning_mcore import MCoreStrategy

    strategy = MCoreStrategy(pipeline_model_parallel_size=2) if sys.argv[1] == "mcore" else sys.argv[1]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if strategy == "auto" else 2, strategy=strategy, max_steps=4,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(Tokens(), batch_size=2))
    print("trained to", float(trainer.callback_metrics["train_loss"]), "in", trainer.global_step, "steps")
"""


def test_the_readme_has_the_model_of_the_guide() -> None:
    of_readme, of_guide = blocks(PAGES[0], "python")[1], blocks(guide("own-model"), "python")[0]
    assert of_readme.text == of_guide.text


_FILLED = """

class Filled(OwnNet):
    def build_chunk(self, **arguments):
        chunk = super().build_chunk(**arguments)
        for parameter in chunk.parameters():  # alike in all layers, so that they do not depend on the stages
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.data.normal_(std=0.1, generator=generator)
        return chunk
"""


# Run on two stages, then on one: all four layers were saved, each under its own number.
_SAVE_OR_LOAD = """
    if sys.argv[1] == "mcore":
        trainer.save_checkpoint("own.ckpt")
    else:
        assert len(Filled.load_from_checkpoint("own.ckpt").model.chunks[0].layers) == 4
"""


@pytest.mark.slow
def test_own_layers_train_the_same_in_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "net.py"
    code = "".join(block.text for block in blocks(guide("own-model"), "python") if not block.marked)
    # Lightning shuffles for distributed strategies, and logs the last microbatch's loss where a pipeline logs the mean
    same = "accumulate_grad_batches=1, use_distributed_sampler=False"
    train = _TRAIN_NET.replace("Net()", "Filled()").replace("accumulate_grad_batches=2", same)
    script.write_text(code + _FILLED + train + _SAVE_OR_LOAD)
    losses = []
    for strategy, ranks in ("mcore", 2), ("auto", 1):
        output = run_on_ranks(capsys, ranks, str(script), strategy, folder=tmp_path)
        losses.append(float(re.findall(r"trained to (\S+) in 4 steps", output)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_focal_loss_of_the_guide_is_that_of_its_formula() -> None:
    names: dict[str, Any] = {"torch": torch}
    [code] = [block.text for block in blocks(guide("own-model"), "python") if "FocalGPT" in block.text]
    exec(code, names)
    [found] = names["FocalGPT"].learned_losses(None, torch.tensor([math.log(4)]))
    assert found.item() == pytest.approx(0.75**2 * math.log(4))  # a token of probability 1/4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mcore", "ddp", pytest.param("auto", marks=pytest.mark.thorough)])
def test_the_users_own_model_runs_under_every_strategy(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "net.py"
    script.write_text(blocks(guide("own-model"), "python")[0].text + _TRAIN_NET)
    output = run_on_ranks(capsys, 1 if strategy == "auto" else 2, str(script), strategy, folder=tmp_path)
    loss = float(re.findall(r"trained to (\S+) in 4 steps", output)[0])
    assert 0 < loss < 6  # ln 256 = 5.5 before any step
