# SPDX-License-Identifier: Apache-2.0
"""The README and every page of ``docs/`` keep their promises: code runs, YAML is accepted, files and commands exist."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_mcore.cli import COMMANDS
from tests.distributed.test_pretraining_data import make_dataset
from tests.examples.test_examples import run_on_ranks
from tests.support.chats import characters, exchanges, write
from tests.support.factory_files import LLAMA3, MERGE_LORA, write_run
from tests.support.hf_models import save_tiny

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAPTOP = ROOT / "docs/start/laptop.md"
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(path: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def guide(name: str) -> Path:
    return ROOT / "docs" / "guides" / f"{name}.md"


@page
def test_the_code_of_a_page_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions and classes are only defined here, and what stands under ``if __name__`` is left to the tests below."""
    monkeypatch.chdir(tmp_path)
    for code in blocks(path, "python"):
        exec(compile(code, str(path), "exec"), {"__name__": "page"})


WITH_RUNS = [path for path in PAGES if blocks(path, "yaml")]
runs = pytest.mark.parametrize("path", WITH_RUNS, ids=lambda path: path.stem)


def files_of_the_runs(path: Path, folder: Path) -> list[Path]:
    """Write the runs of a page, and what a reader has beside them: a model, data, and the script of the page."""
    _save_model(folder / "base", max_position_embeddings=4096)
    write(folder / "chats.jsonl", exchanges(16))
    write(folder / "pairs.jsonl", [{"prompt": "q", "chosen": "a" * n, "rejected": "b"} for n in range(1, 9)])
    make_dataset(folder / "corpus", first=0)
    make_dataset(folder / "corpus_text_document", first=0, documents=2000)
    for code in blocks(path, "python")[:1]:
        (folder / "train.py").write_text(code)
    written = []
    for number, text in enumerate(blocks(path, "yaml")):
        written.append(folder / f"run{number}.yaml")
        written[-1].write_text(text)
    return written


@runs
def test_the_runs_of_a_page_are_accepted(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_mcore.cli import main

    monkeypatch.chdir(tmp_path)
    for file in files_of_the_runs(path, tmp_path):
        assert main(["plan", str(file)]) == 0, capsys.readouterr().err


@pytest.mark.slow
@runs
def test_the_runs_of_a_page_train(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step, on CPU ranks, which Ray need not start."""
    (tmp_path / "fit.py").write_text("from lightning_mcore.cli import console\n\nassert console() == 0\n")
    for file in files_of_the_runs(path, tmp_path):
        settings = yaml.safe_load(file.read_text())
        settings.pop("ray", None)
        ranks = 4 if path == LAPTOP else 2
        settings["trainer"] |= {"accelerator": "cpu", "devices": ranks, "max_steps": 1, "accumulate_grad_batches": 1}
        file.write_text(yaml.safe_dump(settings))
        output = run_on_ranks(capsys, ranks, str(tmp_path / "fit.py"), "fit", f"--config={file}", folder=tmp_path)
        assert "`max_steps=1` reached" in output


@page
def test_the_files_links_and_commands_of_a_page_exist(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"(?<![\w/.-])((?:lightning_mcore|tests|examples|benchmarks|docs)/[\w./-]*\w)", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    links = [link.partition("#")[0] for link in re.findall(r"\]\(((?!https?:)[^)]+)\)", text)]
    assert [link for link in links if link and not (path.parent / link).exists()] == []
    assert set(re.findall(r"^\s*lightning-mcore (\w+)", text, re.MULTILINE)) <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", "\n".join([*blocks(path, "bash"), *blocks(path, "")]))) <= targets


def test_the_commands_of_the_page_for_llamafactory_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the start of ranks, with tiny files of the names that the page has."""
    from torch.distributed.run import get_args_parser

    from lightning_mcore.arguments.llamafactory.export import FactoryExport
    from lightning_mcore.cli import guard, hf, main

    started: list[Any] = []
    monkeypatch.setattr(guard, "guarded", lambda run: started.append(run) or 0)
    monkeypatch.setattr(FactoryExport, "write", lambda self: started.append(self))
    monkeypatch.setattr(hf, "_export", lambda *args, **options: started.append((args, options)))
    monkeypatch.chdir(tmp_path)
    Path(write_run(tmp_path, LLAMA3)).rename("sft.yaml")
    Path("merge.yaml").write_text(yaml.safe_dump(MERGE_LORA))
    text = "\n".join(blocks(guide("from-llamafactory"), "bash")).replace("\\\n", " ")
    commands = [re.sub(r"\$\w+", "1", line).split() for line in text.splitlines() if line.strip()]
    for program, *words in commands:
        if program == "torchrun":
            given = get_args_parser().parse_args(words)
            assert (given.module, given.training_script) == (True, "lightning_mcore.cli")
            words = given.training_script_args
        assert main(words) == 0, (words, capsys.readouterr().err)
    assert [words[0] for words in commands].count("torchrun") == 1
    assert len(started) == len(commands) - 1  # all but plan


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


def test_every_page_has_its_place_in_the_site() -> None:
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES[1:])


def test_the_first_example_is_complete_within_forty_lines() -> None:
    lines = PAGES[0].read_text().splitlines()
    start, code = lines.index("```python"), blocks(PAGES[0], "python")[0]
    assert start + 1 + len(code.splitlines()) < 40
    assert "trainer.fit(" in code
    assert len(lines) <= 180


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    return save_tiny("arcee", tmp_path_factory.mktemp("tiny") / "arcee")


@pytest.mark.filterwarnings("ignore")  # in this process warnings are errors, and Megatron has many
def test_the_family_of_the_page_equals_transformers(
    arcee: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, table, proof = blocks(guide("add-a-family"), "python")
    (tmp_path / "family_of_the_page.py").write_text(table)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(proof, names)
    assert names["largest_difference"](str(arcee), "family_of_the_page:FAMILY") < 1e-4


@pytest.mark.slow
def test_the_first_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks(PAGES[0], "python")[0])
    output = run_on_ranks(capsys, 4, str(script), folder=tmp_path)
    assert "tp2 pp2" in output
    shown, printed = (re.findall(r"train_loss (\S+) -> (\S+)", text)[0] for text in (PAGES[0].read_text(), output))
    assert [float(loss) for loss in printed] == pytest.approx([float(loss) for loss in shown], rel=1e-2)


@pytest.mark.slow
def test_the_example_of_the_laptop_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks(LAPTOP, "python")[0].replace("max_steps=100", "max_steps=4"))
    output = run_on_ranks(capsys, 4, str(script), folder=tmp_path)
    assert "`max_steps=4` reached" in output
    assert re.search(r"4 steps, .* s, train_loss 5\.5\d+ -> ", output)


@pytest.mark.thorough
def test_the_journey_of_the_laptop_gives_what_the_page_shows(tmp_path: Path) -> None:
    """Every file and command of the page in turn, as a reader has them; numbers agree to a percent."""
    commands = {
        "python": sys.executable,
        "lightning-mcore": f"{sys.executable} -m lightning_mcore.cli",
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output, printed, shown = "", [], 0
    for name, language, text in re.findall(
        r"(?:Save this as `([\w.]+)`[^`]*)?^```(\w+)\n(.*?)^```", LAPTOP.read_text(), re.DOTALL | re.MULTILINE
    ):
        if name:
            (tmp_path / name).write_text(text)
        elif language == "text":
            check_output(text, output)
            shown += 1
        elif language == "bash" and "pip install" not in text:
            output = ""
            for line in text.splitlines():
                program, _, rest = line.partition(" ")
                done = subprocess.run(
                    [*commands[program].split(), *shlex.split(rest)],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=400,
                    check=False,
                )
                assert done.returncode == 0, done.stderr
                output += done.stdout + done.stderr
                printed.append(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")
    assert shown == 3
    here, _, in_transformers = printed[-3:]
    assert here == in_transformers
    assert here.startswith("b'    def ")


NUMBER = re.compile(r"\d+\.\d+")


def check_output(shown: str, output: str) -> None:
    """Assert that each line of a page is a line of the output, but for ``...`` and a percent of each decimal number."""
    lines = output.splitlines()
    for line in shown.splitlines():
        if line == "...":
            continue
        pattern = ".*".join(NUMBER.sub("#", part).replace("#", "\0") for part in line.split("..."))
        wanted = re.compile(re.escape(pattern).replace(re.escape(".*"), ".*").replace("\0", r"(\d+\.\d+)"))
        found = [match for match in map(wanted.fullmatch, lines) if match]
        assert found, f"{line!r} is not in\n{output}"
        numbers = [float(number) for number in NUMBER.findall(line)]
        assert [float(number) for number in found[0].groups()] == pytest.approx(numbers, rel=1e-2)


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
    assert of_readme == of_guide


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mcore", "ddp", pytest.param("auto", marks=pytest.mark.thorough)])
def test_the_users_own_model_runs_under_every_strategy(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "net.py"
    script.write_text(blocks(guide("own-model"), "python")[0] + _TRAIN_NET)
    output = run_on_ranks(capsys, 1 if strategy == "auto" else 2, str(script), strategy, folder=tmp_path)
    loss = float(re.findall(r"trained to (\S+) in 4 steps", output)[0])
    assert 0 < loss < 6  # ln 256 = 5.5 before any step


_FINETUNE = """

if __name__ == "__main__":
    from tests.support.chats import characters

    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    finetune("chats.jsonl", characters(), shape, seq_length=64, accelerator="cpu")
"""


@pytest.mark.thorough
def test_the_example_of_packed_fine_tuning_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "finetune.py"
    script.write_text(blocks(guide("data"), "python")[0] + _FINETUNE)
    write(tmp_path / "chats.jsonl", exchanges(30))
    output = run_on_ranks(capsys, 4, str(script), folder=tmp_path)
    assert "train data: packed 27 of 27 samples" in output
    assert "`max_epochs=1` reached" in output


_ARGUMENTS = """

if __name__ == "__main__":
    layout = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "--use_cpu"]
    recipe = ["--gradient_accumulation_steps", "2", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none"]
    batch = ["--output_dir", "runs", "--per_device_train_batch_size", "2"]
    train([*layout, *recipe, *batch], "model", "chats.jsonl", devices=2)
"""


def _save_model(folder: Path, **sizes: int) -> None:
    tokenizer = characters()
    save_tiny("llama", folder, vocab_size=len(tokenizer), **sizes)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_the_example_of_arguments_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks(guide("doors"), "python")[1] + _ARGUMENTS)
    write(tmp_path / "chats.jsonl", exchanges(60))
    _save_model(tmp_path / "model", max_position_embeddings=2048)
    output = run_on_ranks(capsys, 2, str(script), folder=tmp_path)
    assert "tp2 pp1" in output
    assert "`max_steps=3` reached" in output


@pytest.mark.thorough
def test_the_example_of_a_hugging_face_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    script = tmp_path / "finetune.py"
    run = 'finetune_hf("model", "chats.jsonl", seq_length=64, accelerator="cpu")'
    script.write_text(blocks(guide("hugging-face"), "python")[0] + f'\n\nif __name__ == "__main__":\n    {run}\n')
    write(tmp_path / "chats.jsonl", exchanges(24))
    _save_model(tmp_path / "model")
    output = run_on_ranks(capsys, 4, str(script), folder=tmp_path)
    assert "`max_epochs=1` reached" in output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned").dtype == torch.bfloat16


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
def test_the_example_of_adapters_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    script = tmp_path / "finetune.py"
    run = 'finetune_adapters("model", "chats.jsonl", seq_length=64, accelerator="cpu")'
    script.write_text(blocks(guide("adapters"), "python")[0] + f'\n\nif __name__ == "__main__":\n    {run}\n')
    write(tmp_path / "chats.jsonl", exchanges(24))
    _save_model(tmp_path / "model")
    output = run_on_ranks(capsys, 2, str(script), folder=tmp_path)
    assert "`max_epochs=1` reached" in output
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(exported[name], weight, rtol=2**-7, atol=1e-4)  # the run is in bf16


def test_the_example_of_plan_gives_a_plan() -> None:
    names: dict[str, object] = {"__name__": "page"}
    exec(blocks(guide("plan"), "python")[0], names)
    plan = names["look"]()  # type: ignore[operator]
    assert plan.errors == ()
