# SPDX-License-Identifier: Apache-2.0
"""Every code block of the README and of ``docs/`` runs as printed, or its title says why it does not.

A page runs in a folder that holds what it takes for granted: a model, data, and the run of the laptop's page. In the
order of the page, files are saved, and commands, YAML and Python run. Everything that is shorter than printed stands
in :data:`SHORT`. What a page only defines is called by ``tests/examples/calls_of_pages.py``; a function that nothing
calls is a failure.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM

from lightning_mcore.cli import COMMANDS
from tests.distributed.test_pretraining_data import make_dataset
from tests.examples.calls_of_pages import CALLS, ELSEWHERE
from tests.examples.test_examples import SECONDS, run_on_ranks
from tests.support import factory_images as images
from tests.support.chats import characters, exchanges, write
from tests.support.clips import write_clip
from tests.support.factory_files import LLAMA3, MERGE_LORA, write_run
from tests.support.hf_models import save_tiny
from tests.support.pages import LANGUAGES, MARKS, OUTPUT, PAGES, REJECTED, ROOT, Block, blocks, check_output, commands
from tests.support.ranks import program_environment, run_ranks

LAPTOP = ROOT / "docs/start/laptop.md"
SHORT = {  # what is added to a command
    "fit": ["--trainer.max_steps=1", "--trainer.accumulate_grad_batches=1", "--trainer.limit_val_batches=1"],
    "validate": ["--trainer.limit_val_batches=1"],
    "llamafactory": ["--max_steps", "2"],
}
REPLACED = {  # what is changed in a block
    "max_steps=100": "max_steps=4",  # laptop
    "--save_steps 50": "--save_steps 1",  # from-llamafactory
    "checkpoint-50": "checkpoint-1",
    "vocab_size: 32000": "vocab_size: 2048",  # from-megatron-lm: minutes in bf16 on a CPU that only emulates it
}
FEWER_RANKS = {  # in the README, whose commands doors.md has too
    "--trainer.devices=8": "--trainer.devices=4",
    "sft.yaml --devices 8": "sft.yaml --devices 2",
}
# Several runs of four or eight ranks; other tests show what these pages are about.
THOROUGH = ("distillation", "doors", "embeddings", "from-llamafactory", "from-megatron-lm", "preference", "vision")
SCRIPT_RANKS = {"README": 4, "cluster": 2}  # of a program with devices of its own
CONSOLE = "import sys\n\nfrom lightning_mcore.cli import console\n\nassert console() == 0, sys.argv\n"
WITH_CODE = [path for path in PAGES if any(not block.marked and block.language != "text" for block in blocks(path))]


def test_every_block_runs_or_says_why_not() -> None:
    """What the languages and titles below do not name would be neither run nor marked."""
    for path in PAGES:
        found = blocks(path)
        fences = sum(line.lstrip().startswith("```") for line in path.read_text().splitlines())
        assert fences == 2 * len(found), f"{path}: a fence is not of the form ```language title=..."
        used = "".join(block.text for block in found if block.language == "bash" and not block.marked)
        used += inspect.getsource(CALLS[path.stem][1]) if path.stem in CALLS else ""
        for block in found:
            assert block.language in LANGUAGES, block.place
            saved = block.language in ("json", "dockerfile") or (block.language == "yaml" and block.file is not None)
            assert block.marked or not saved or str(block.file) in used, f"{block.place}: nothing uses this file"
            for title in block.titles:
                assert title in (*MARKS, OUTPUT, REJECTED) or re.fullmatch(r"[\w-]+(\.\w+)?", title), (
                    block.place,
                    title,
                )


def test_what_does_not_run_is_at_least_code(tmp_path: Path) -> None:
    """Python compiles, and bash reads the commands; torchrun accepts its words, and ours are commands that exist."""
    names = ("RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE")
    given = {"SLURM_SUBMIT_DIR": ".", **dict.fromkeys(names, "1")}
    script = tmp_path / "examples/launch_single_node.sh"
    script.parent.mkdir()
    script.touch(mode=0o755)
    ours = 0
    for block in (block for path in PAGES for block in blocks(path) if block.marked):
        if block.language == "python":
            compile(block.text, block.place, "exec")
        elif block.language == "bash":
            for words in commands(block.text, tmp_path, **given):
                ours += check_words(words, block.place)
    assert ours > 8


def check_words(words: list[str], place: str) -> bool:
    """Check a command that a test cannot run, and return whether it is one of ours, or starts one."""
    starter = next((word for word in words if word in ("torchrun", "lightning-mcore")), None)
    if starter is None:
        return False
    words = words[words.index(starter) + 1 :]  # alone, or after docker or srun
    if starter == "torchrun":
        words = get_args_parser().parse_args(words).training_script_args
    assert not words or words[0] in COMMANDS or words[0].startswith("--"), place
    return True


def prepare(path: Path, folder: Path) -> None:
    """Make what the reader of a page has: the laptop's run, models, data, and the folders of a clone."""
    (folder / "examples").mkdir()
    (folder / "examples/configs").symlink_to(ROOT / "examples/configs")
    words = characters()
    for name, layers in (("base", 2), ("deep", 32)) if path.stem == "adapters" else (("base", 2),):
        save_tiny("llama", folder / name, vocab_size=len(words), max_position_embeddings=4096, num_hidden_layers=layers)
        words.save_pretrained(folder / name)
    for name in ("MODEL", "HF_FOLDER", "path/of/the/model"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(folder / "base")
    rows = exchanges(64)
    for name in ("chats.jsonl", "corpus/0.jsonl", "data/0.jsonl"):
        write(folder / name, [{**row, "text": row["response"]} for row in rows])
    write(folder / "pairs.jsonl", [{"prompt": "q", "chosen": "a" * n, "rejected": "b"} for n in range(1, 41)])
    queries = ({"query": "q" * n, "positive": "a" * n, "negatives": ["b" * n]} for n in range(1, 41))
    write(folder / "queries.jsonl", queries)
    if path.stem != "data":  # which makes it
        make_dataset(folder / "corpus", first=0)
    make_dataset(folder / "corpus_text_document", first=0, documents=2000)
    if path.stem == "vision":
        images.write_file(folder / "vl", weights=True, videos=True)
        Image.new("RGB", (64, 64), "orange").save(folder / "cat.png")
        write_clip(folder / "cat.mp4", 8, 64, 64)
    Path(write_run(folder, LLAMA3)).rename(folder / "sft.yaml")
    if path.stem == "from-llamafactory":
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    (folder / "merge.yaml").write_text(yaml.safe_dump(MERGE_LORA | {"adapter_name_or_path": "adapter"}))
    if path != LAPTOP:
        for block in blocks(LAPTOP):
            if block.file in ("train.py", "run.yaml"):
                (folder / block.file).write_text(block.text)


class Reader:
    """Runs a page in a folder, as someone who follows it from top to bottom does."""

    def __init__(self, path: Path, folder: Path, capsys: pytest.CaptureFixture[str], in_full: bool = False) -> None:
        self.path, self.folder, self.capsys = path, folder, capsys
        self.in_full = in_full  # nothing is shortened
        self.program: list[Block] = []  # Python that has not run yet
        self.scripts: dict[str, Block] = {}  # files that have not run yet
        self.printed = ""

    def read(self) -> None:
        """Run the page."""
        replaced = {} if self.in_full else REPLACED | (FEWER_RANKS if self.path.stem == "README" else {})
        for block in blocks(self.path):
            text = block.text
            for printed, short in replaced.items():
                text = text.replace(printed, short)
            if block.file:
                (self.folder / block.file).write_text(text)
            if not block.marked:
                self.take(block, text)
        for name in list(self.scripts):
            self.run("python", name)
        self.run_python(to_the_end=True)

    def take(self, block: Block, text: str) -> None:
        """Do with a block what its language says."""
        if OUTPUT in block.titles:
            self.run_python()
            if self.in_full or self.path != LAPTOP:  # whose runs are shorter
                check_output(block.text, self.printed)
        elif block.language == "python" and block.file and "__main__" in text:
            self.scripts[block.file] = block
        elif block.language == "python":
            self.program.append(block)
        elif block.language == "yaml" and block.file is None:
            self.run_yaml(text)
        elif REJECTED in block.titles:
            self.printed = rejected(commands(text, self.folder)[0][1:], self.folder)
        elif block.language == "bash":
            self.printed = ""
            for words in commands(text, self.folder):
                self.run(*words)

    def run(self, program: str, *words: str) -> None:
        """Run a command on as many ranks as it starts."""
        if program == "python":
            script, ranks, more = self.folder / words[0], self.devices_of_script(words[0]), words[1:]
        else:
            script, ranks, more = self.folder / "console.py", self.devices(words), (*words, *self.short(words))
            script.write_text(CONSOLE)
        self.printed += run_on_ranks(self.capsys, ranks, str(script), *more, folder=self.folder)

    def devices_of_script(self, name: str) -> int:
        """Return the devices that a saved program names."""
        text = self.scripts.pop(name).text
        found = re.search(r"devices=(\d+)", text)
        return int(found[1]) if found else SCRIPT_RANKS.get(self.path.stem, 1)

    def devices(self, words: tuple[str, ...]) -> int:
        """Return the devices of a command, which are two CPU ranks in place of GPUs."""
        if words[0] not in ("fit", "validate", "llamafactory") or words[1] == "export":
            return 1
        given = re.search(r"--(?:trainer\.)?devices[= ](\d+)", " ".join(words))
        if given or words[0] == "llamafactory":
            return int(given[1]) if given else 1
        trainer = self.trainer(words)
        return 2 if trainer["accelerator"] == "gpu" else trainer.get("devices", 2)  # type: ignore[no-any-return]

    def trainer(self, words: tuple[str, ...]) -> dict[str, Any]:
        """Return the trainer's settings in the file of a command."""
        file = self.folder / words[words.index("--config") + 1]
        return yaml.safe_load(file.read_text())["trainer"]  # type: ignore[no-any-return]

    def short(self, words: tuple[str, ...]) -> list[str]:
        """Return what is added to a command."""
        if words[0] == "llamafactory":
            return [] if words[1] == "export" else SHORT["llamafactory"]
        added = [] if self.in_full else SHORT.get(words[0], [])
        return [*added, "--trainer.accelerator=cpu", f"--trainer.devices={self.devices(words)}"] if added else []

    def run_yaml(self, text: str) -> None:
        """Plan a run that no command on the page names, and train it; without Ray, which only starts ranks."""
        file = self.folder / "page.yaml"
        file.write_text(text)
        self.run("lightning-mcore", "plan", file.name)
        file.write_text(yaml.safe_dump({name: part for name, part in yaml.safe_load(text).items() if name != "ray"}))
        self.run("lightning-mcore", "fit", "--config", file.name)

    def run_python(self, to_the_end: bool = False) -> None:
        """Run the Python so far as one program; at the end of the page, also call what it defines."""
        name = self.path.stem if to_the_end else ""
        if self.program or name in CALLS:
            ranks = CALLS[name][0] if name in CALLS else SCRIPT_RANKS.get(self.path.stem, 1)
            texts = [(block.place, block.text) for block in self.program]
            unused = run_ranks(ranks, run_program, texts, name, str(self.folder), timeout=SECONDS, open_group=False)
            self.printed += self.capsys.readouterr().out
            if self.path.stem not in ELSEWHERE:
                assert set.intersection(*unused) == set(), "nothing calls these; call them in calls_of_pages.py"
        self.program = []


def rejected(words: list[str], folder: Path) -> str:
    """Run a command that must end with exit code 2, and return its error message."""
    command = [sys.executable, "-m", "lightning_mcore.cli", *words]
    done = subprocess.run(
        command, cwd=folder, env=program_environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def run_program(texts: list[tuple[str, str]], name: str, folder: str) -> set[str]:
    """Run the Python of a page on this rank, and what calls it, and return the functions that were not entered."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    functions: set[str] = set()
    entered: set[str] = set()
    names: dict[str, Any] = {"__name__": "__main__", "__entered__": entered.add}
    for code in [compile_noting(text, place, functions) for place, text in texts]:
        exec(code, names)
    if name in CALLS:
        CALLS[name][1](names)
    return functions - entered


def compile_noting(text: str, place: str, functions: set[str]) -> CodeType:
    """Compile a block whose functions and methods say that they are entered, and add their names to ``functions``."""
    tree = ast.parse(text, place)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.add(label := f"{place}: {node.name}, line {node.lineno}")
            node.body.insert(1 if ast.get_docstring(node) else 0, ast.parse(f"__entered__({label!r})").body[0])
    return compile(tree, place, "exec")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.thorough if path.stem in THOROUGH else ())
        for path in WITH_CODE
    ],
)
def test_the_page_runs_as_printed(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(path, tmp_path)
    reader = Reader(path, tmp_path, capsys)
    if path.stem in ("checkpoints", "hugging-face"):  # which begin with a checkpoint of the laptop's run
        sizes = (f"--trainer.strategy.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline"))
        reader.run("lightning-mcore", "fit", "--config", "run.yaml", "--trainer.devices=1", *sizes)
    reader.read()


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_journey_of_the_laptop_gives_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file and command of the page in turn, as a reader has them; numbers agree to a percent."""
    reader = Reader(LAPTOP, tmp_path, capsys, in_full=True)
    reader.read()
    here, in_transformers = re.findall(r"^b'    def .*$", reader.printed, re.MULTILINE)
    assert here == in_transformers
