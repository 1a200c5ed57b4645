# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore``: every command is found, what is wrong is one sentence, and every option is reachable."""

import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

import lightning_mcore
from lightning_mcore import MCoreModule, MCoreStrategy, cli
from lightning_mcore.cli import quick_checks
from lightning_mcore.cli.command import run_command, sentence
from lightning_mcore.cli.fit import SHORT_NAMES, CommandCLI, TrainingCLI
from lightning_mcore.cli.guard import Beginning
from lightning_mcore.config.text import unknown_name
from tests.support.ranks import on_ranks
from tests.support.sentences import says

pytestmark = pytest.mark.slow

TINY = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  max_steps: 2
  strategy:
    class_path: lightning_mcore.MCoreStrategy
    init_args:
      micro_batch_size: 2
model:
  class_path: lightning_mcore.MCoreGPT
  init_args:
    vocab_size: 64
    seq_length: 16
    transformer: {num_layers: 2, hidden_size: 16, num_attention_heads: 2}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told and line in told for name, (_, line) in cli.COMMANDS.items())


def test_an_unknown_command_names_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fti"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'fti'; did you mean 'fit'?\n"


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().out == cli.overview() + "\n"


WRONG_FILES = {
    "top": "trainr: {max_steps: 3}\n",
    "model": "model: {class_path: MCoreGPT, init_args: {vocab_siz: 8}}\n",
    "field": "model: {class_path: MCoreGPT, init_args: {transformer: {num_layrs: 2}}}\n",
    "latent": "model: {class_path: MCoreGPT, init_args: {transformer: {kv_lora_rank: 8}}}\n",
    "home": "model: {class_path: lightning_mcore.MCoreGPT, init_args: {transformer: {bf16: true}}}\n",
    "callback": "trainer: {callbacks: [{class_path: M}, {class_path: SaveHFModel, init_args: {foldr: a}}]}\n",
}

EARLY = {
    "no file": ["fit", "--config", "nix.yaml"],
    "no file to plan": ["plan", "nix.yaml"],
    "no file of LLaMA-Factory": ["llamafactory", "nix.yaml"],
    "option": ["fit", "--config", "{tiny}", "--trainer.max_stepps=3"],
    "option of the strategy": ["fit", "--config", "{tiny}", "--trainer.strategy.tensor_parallel_size=2"],
    "key": ["fit", "--config", "{wrong}"],
    "misspelt --config": ["fit", "--confg", "{tiny}"],
    "misspelt --trainer": ["fit", "--config", "{tiny}", "--trainr.devices=3"],
    "option of another command": ["fit", "--config", "{tiny}", "--return_predictions", "true"],
    "option of the model": ["validate", "--config", "{tiny}", "--model.vocab_siz=8"],
    "option of data named on the command line": ["fit", "--data=MCorePretrainingData", "--data.seq_lenth=8"],
    "key at the top": ["fit", "--config", "{top}"],
    "key of the model": ["fit", "--config", "{model}"],
    "field of the model": ["fit", "--config", "{field}"],
    "field of multi-latent attention": ["fit", "--config", "{latent}"],
    "field of the strategy in the model": ["fit", "--config", "{home}"],
    "key of a callback": ["fit", "--config", "{callback}"],
}


def test_what_needs_no_import_is_said_before_torch_is_imported(tmp_path: Path, tiny: str) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("trainer: {max_stepps: 3}\n")
    files = {"tiny": tiny, "wrong": wrong}
    for name, text in WRONG_FILES.items():
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(text)
    cases = [[word.format(**files) for word in words] for words in EARLY.values()]
    code = f"""
import contextlib, io, sys
from lightning_mcore import cli
for words in {cases!r}:
    assert cli.main(words) == 2, words
for name in ("fit", "predict"):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert cli.main([name, "--help"]) == 0
    assert "--trainer.strategy.tensor_model_parallel_size" in told.getvalue()
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(EARLY)
    for line in lines:
        assert line.startswith("error: ")
        says(line.removeprefix("error: "))


def test_what_only_jsonargparse_can_judge_is_left_to_it(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text("trainer: {max_steps: 2}\ntrainer: {max_steps: 3}\n")
    for value in (str(twice), '{"trainer": {"max_steps": 2}}', "store://folder/run.yaml"):
        quick_checks.refuse_early("fit", ["--config", value])


def test_the_short_help_names_options_that_exist() -> None:
    options = re.findall(r"^  (--\S+) ", cli.training_help("fit"), re.MULTILINE)
    trainer = inspect.signature(pl.Trainer.__init__).parameters
    strategy = inspect.signature(MCoreStrategy.__init__).parameters
    for option in options:
        owner, _, name = option.removeprefix("--").rpartition(".")
        known = {"trainer": trainer, "trainer.strategy": strategy}.get(owner)
        assert known is None or name in known, option


def test_every_option_is_known_before_its_owner_is_imported() -> None:
    assert quick_checks._arguments_of_trainer() == [*inspect.signature(pl.Trainer.__init__).parameters][1:]
    for kind in SHORT_NAMES:
        assert quick_checks._arguments_of_class(kind.__name__) in ([], [*inspect.signature(kind).parameters])
    assert quick_checks._arguments_of_class("mcore") == [*inspect.signature(MCoreStrategy).parameters]


def test_the_same_name_in_another_package_is_not_judged_early(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: {class_path: own.MCoreGPT, init_args: {size: 8, transformer: {depth: 2}}}\n")
    quick_checks.refuse_early("fit", ["--config", str(path), "--model.width=3"])


@pytest.mark.parametrize("command", cli.TRAINING)
def test_every_option_of_a_command_is_known_before_it_is_imported(command: str) -> None:
    known: set[str] = set()

    class Asked(CommandCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            known.update(self._subcommand_parsers[command]._option_string_actions)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Asked(args=[command])
    roots = {name.removeprefix("--").partition(".")[0] for name in known if name.startswith("--")}
    assert roots == {"config", "help", *quick_checks._ROOTS, *quick_checks._MORE_ROOTS.get(command, ())}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("--trainer.gradient_accumulation_steps", "set accumulate_grad_batches of the trainer"),
        ("per_device_train_batch_size", "set batch_size of the data"),
        ("packing", "set packing of the data"),
        ("task_type", "the class of the model says what is trained; leave it out"),
        ("--tensor-model-parallel-size", "set it in the strategy"),
        ("group_by_length", "rows of equal length are not collected; packing leaves almost no padding"),
    ],
)
def test_a_name_of_transformers_or_peft_is_answered_with_ours(name: str, remedy: str) -> None:
    assert unknown_name("option", name, ["eval_batch_size"]) == f"unknown option {name!r}; {remedy}"
    # Not where there is such a name
    assert remedy not in unknown_name("option", name, [name.removeprefix("--").rpartition(".")[2].replace("-", "_")])


def test_an_older_name_of_transformers_is_answered_with_its_new_one() -> None:
    for name, new in (("no_cuda", "use_cpu"), ("evaluation_strategy", "eval_strategy")):
        assert unknown_name("key of run.yaml", name, ["do_eval", new]).endswith(f"; did you mean {new!r}?")


def test_training_data_is_read_after_the_sanity_check_and_may_still_be_a_wrong_setting() -> None:
    trainer: Any = None
    beginning = Beginning()
    over = []
    for happens in ("on_sanity_check_start", "on_sanity_check_end", "on_train_start"):
        getattr(beginning, happens)(trainer, trainer)
        over.append(beginning.is_over)
    assert over == [True, False, True]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (None, 0, ""),
        (ValueError("one\n thing"), 2, "error: one thing\n"),
        (TypeError(), 2, "error: TypeError\n"),
        (FileNotFoundError(2, "No such file or directory", "a.yaml"), 2, "error: No such file or directory: a.yaml\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_command_ends_with_a_sentence_and_a_code(
    raised: BaseException | None, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        if raised is not None:
            raised.with_traceback(None)
            raise raised

    assert run_command(command) == code
    assert capsys.readouterr().err == said
    assert run_command(lambda: 1) == 1


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "lightning_mcore.cli", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize("words", [["plan", "--help"], ["plan", "examples/configs/llama3_8b_bf16.yaml"]])
@on_ranks(1, open_group=False)
def test_a_command_whose_reader_has_read_enough_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.argv = ["lightning-mcore", *words]
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        sys.exit(cli.console())
    sys.stdout.flush()  # as at the end of a program
    assert (end.value.code, said.getvalue()) == (0, "")


def test_a_connection_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def break_off() -> None:
        raise BrokenPipeError("the store has closed the connection")

    assert run_command(break_off) == 2
    assert capsys.readouterr().err == "error: the store has closed the connection\n"


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(AttributeError):
        run_command(lambda: None.missing)  # type: ignore[attr-defined]


def test_a_misspelt_option_of_a_command_names_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    for name, option, neighbour in (
        ("preprocess", "--tokeniser", "--tokenizer"),
        ("import", "--familly", "--family"),
        ("export", "--max-shard-sise=1GB", "--max-shard-size"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main([name, "a", "b", option, "x"])
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert f"unknown option '{option.partition('=')[0]}'; did you mean '{neighbour}'?" in told


STRATEGY = "--trainer.strategy.init_args"
FAULTS = {
    "option": ["--trainer.max_stepps=3"],
    "abbreviation": ["--trainer.max_step=3"],
    "abbreviation of a field": ["--model.recipe.learning_rat=3"],
    "abbreviation before the config is printed": ["--seed_ever=3", "--print_config"],
    "type": ["--trainer.max_steps=abc"],
    "argument of the strategy": ["--trainer.strategy.tensor_model_parallel_sizes=2"],
    "below init_args": [f"{STRATEGY}.micro_batch_sise=2"],
    "field of a config": [f"{STRATEGY}.communication.use_sharpp=true"],
    "choice": ["--model.transformer_impl=fooo"],
    "precision": ["--trainer.precision=bf17"],
    "fp8": ["--trainer.precision=fp8"],
    "transformer-engine": ["--trainer.precision=transformer-engine"],
    "checkpoint": ["--ckpt_path=/nope"],
    "class of another than the file's": ["--model.class_path=lightning_mcore.MCoreGTP"],
    "short name": ["--model=MCoreGTP"],
    "class": ["--model=lightning_mcore.MCoreGTP"],
    "module": ["--model=lightning_core.MCoreGPT"],
    "no option": ["max_steps=3"],
    "a file alone": ["run.yaml"],
    "short name of a field": ["--model.recipe.lr=0.1"],
    "layout": ["--trainer.strategy.sequence_parallel=true"],
    "field of the model": ["--model.transformer.hiden_size=4"],
    "null": ["--model.recipe=null"],
    "two homes": ["--optimizer=torch.optim.AdamW", "--model.recipe.learning_rate=0.1"],
    "optimizer": ["--optimizer=Adafacto"],
    "a scheduler alone": ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"],
    "strategy": ["--trainer.strategy=mcoree"],
    "accelerator": ["--trainer.accelerator=gpu"],
}
OF_OTHERS = {  # and then the words are others'
    "precision": "trainer.precision='bf17' does not fit; choose 64 or 32 or 16 or",
    "strategy": "invalid strategy name: `strategy='mcoree'`",
    "no YAML": "is not YAML: ",
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_one_sentence(name: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--config", tiny, *FAULTS[name]]) == 2
    told(capsys, OF_OTHERS.get(name))


def told(capsys: pytest.CaptureFixture[str], part: str | None = None) -> None:
    """Take in the sentence that a command ends with, of which ``part`` is ours."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error") or "usage" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    if part is None:
        says(lines[0].removeprefix("error: "))
    else:
        assert part in lines[0]


def test_a_name_of_several_classes_needs_its_path(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``AdamW`` is where bitsandbytes is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("twin_a", "twin_b"):
        (tmp_path / f"{name}.py").write_text("import torch\n\n\nclass TwinSGD(torch.optim.SGD):\n    pass\n")
        importlib.import_module(name)
    assert cli.main(["fit", "--config", tiny, "--optimizer=TwinSGD"]) == 2
    told(capsys)


def _in_file(change: Callable[[dict[str, Any]], Any]) -> str:
    content = yaml.safe_load(TINY)
    change(content)
    return yaml.safe_dump(content)


FILES = {
    "an empty key": _in_file(lambda all: all.update(modle={})),
    "a key": _in_file(lambda all: all.update(modle=1)),
    "of the trainer": _in_file(lambda all: all["trainer"].update(max_stepps=1)),
    "of the model": _in_file(lambda all: all["model"]["init_args"].update(seq_lenght=1)),
    "of the recipe": _in_file(lambda all: all["model"]["init_args"].update(recipe={"learning_ratee": 1})),
    "next to class_path": _in_file(lambda all: all["model"].update(init_arg={})),
    "a callback": _in_file(
        lambda all: all["trainer"].update(callbacks=[{"class_path": "lightning_mcore.SaveHFModell"}])
    ),
    "what lacks": _in_file(lambda all: all["model"]["init_args"].pop("seq_length")),
    "no model": _in_file(lambda all: all.pop("model")),
    "a value": _in_file(lambda all: all["trainer"].update(max_epochs="many")),
    "no keys": "just text",
    "no YAML": "a: [1",
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_in_a_file_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(FILES[name])
    assert cli.main(["fit", "--config", str(tmp_path / "run.yaml")]) == 2
    told(capsys, OF_OTHERS.get(name))


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--config", str(tmp_path / "no.yaml")]) == 2
    told(capsys)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*arguments, "--print_config"])
    return capsys.readouterr().out


def test_a_printed_config_is_the_same_run(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested = {
        "ddp_config": {"class_path": "megatron.core.distributed.DistributedDataParallelConfig"},
        "optimizer_config": {
            "class_path": "megatron.core.optimizer.OptimizerConfig",
            "init_args": {"decoupled_weight_decay": True},
        },
        "communication": {
            "class_path": "lightning_mcore.CommunicationOptions",
            "init_args": {"create_gloo_process_groups": True},
        },
    }
    content = yaml.safe_load(TINY)
    content["trainer"]["strategy"]["init_args"] |= nested
    content["trainer"]["plugins"] = [
        {"class_path": "MCorePrecision", "init_args": {"precision": "bf16-mixed", "fp8_recipe": "tensorwise"}}
    ]
    content["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    once = printed(capsys, "fit", "--config", str(tmp_path / "run.yaml"))
    (tmp_path / "printed.yaml").write_text(once)
    assert printed(capsys, "fit", "--config", str(tmp_path / "printed.yaml")) == once
    arguments = yaml.safe_load(once)["trainer"]["strategy"]["init_args"]
    assert arguments["communication"]["create_gloo_process_groups"] is True
    assert "fp8_recipe: tensorwise" in once


def test_short_names_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model.vocab_size=64", "--model.seq_length=16", "--model.transformer={}"]
    strategy = ["--trainer.strategy=MCoreStrategy", "--trainer.strategy.micro_batch_size=2"]
    run = yaml.safe_load(printed(capsys, "fit", *strategy, "--model=MCoreGPT", *sizes))
    assert run["trainer"]["strategy"]["class_path"] == "lightning_mcore.MCoreStrategy"
    assert run["model"]["class_path"] == "lightning_mcore.MCoreGPT"
    models = ("MCoreVisionGPT", "MCorePreference")
    for name in (*models, "MCoreVisionData", "FP8Monitor"):  # known by their names alone, and then short of arguments
        key = "model" if name in models else "data" if name.endswith("Data") else "trainer.callbacks"
        more = [] if key == "model" else ["--model=MCoreGPT", *sizes]
        cli.main(["fit", f"--{key}={name}", *more, "--trainer.max_steps=x"])
        assert "unknown class" not in capsys.readouterr().err


def test_every_class_that_a_file_may_name_has_a_short_name() -> None:
    of_lightning = pl.Callback, pl.LightningModule, pl.LightningDataModule, Strategy, CheckpointIO, Precision
    public = [getattr(lightning_mcore, name) for name in lightning_mcore.__all__]
    classes = {kind for kind in public if isinstance(kind, type) and issubclass(kind, (*of_lightning, Optimizer))}
    assert set(SHORT_NAMES) == classes - {MCoreModule}  # a base class


def test_the_name_of_the_strategy_alone_is_enough(tiny: str) -> None:
    arguments = ["--config", tiny, "--trainer.strategy=MCoreStrategy"]
    built = TrainingCLI(run=False, args=arguments, parser_kwargs={"exit_on_error": False})
    assert isinstance(built.trainer.strategy, MCoreStrategy)


@pytest.mark.parametrize(
    ("option", "name", "texts"),
    [
        ("trainer.strategy", "MCoreStrategy", ["tensor_model_parallel_size", "Number of ranks"]),
        ("trainer.plugins", "MCorePrecision", ["fp8_recipe", "How tensors are scaled to FP8"]),
        ("model", "MCoreGPT", ["--model.recipe.lr_scheduler_type", "--model.transformer"]),
        ("data", "MCorePretrainingData", ["--data.reset_position_ids", "Let positions start again"]),
        ("optimizer", "torch.optim.AdamW", ["--optimizer.lr"]),
    ],
)
def test_help_shows_every_option_and_what_it_means(
    option: str, name: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["fit", f"--{option}.help", name])
    told = " ".join(capsys.readouterr().out.split())
    assert all(text in told for text in texts), told


def test_what_is_accepted_is_never_explained(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise AssertionError("jsonargparse decides")

    monkeypatch.setattr("lightning_mcore.cli.fit.explain", refuse)
    built = TrainingCLI(run=False, args=["--config", tiny], parser_kwargs={"exit_on_error": False})
    assert built.model.vocab_size == 64
    with pytest.raises(AssertionError, match="jsonargparse decides"):
        TrainingCLI(run=False, args=["--config", tiny, "--model=None"], parser_kwargs={"exit_on_error": False})


def test_a_transformer_engine_without_cuda_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    broken = "import ctypes; ctypes.CDLL('libno_such_cuda.so.13')"
    (tmp_path / "transformer_engine" / "__init__.py").write_text(broken)
    paths = [str(tmp_path), *filter(None, sys.path)]
    (tmp_path / "run.yaml").write_text("trainer: {}\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lightning_mcore.cli", "fit", "--config", str(tmp_path / "run.yaml")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: TransformerEngine is installed and cannot be imported: "), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the module of a command ``own``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_command", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "own", ("own_command", "does what the test says"))
    return tmp_path / "own_command.py"


def test_a_transformer_engine_without_core_is_one_sentence(
    own_command: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_command.write_text("import transformer_engine_without_core")
    own_command.with_name("transformer_engine_without_core.py").write_text("raise RuntimeError('no core.')")
    assert cli.main(["own"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: TransformerEngine is installed and cannot be imported: no core; install its core")
    assert told.count("\n") == 1


def test_the_garbage_collector_passes_over_what_a_command_imports(own_command: Path) -> None:
    own_command.write_text(
        "import gc\n"
        "while_imported = gc.isenabled()\n"
        "def run(arguments):\n"
        "    return int(while_imported or not gc.isenabled() or not gc.get_freeze_count())\n"
    )
    assert cli.main(["own"]) == 0


def test_an_error_while_transformer_engine_computes_is_not_taken_for_its_import() -> None:
    code = compile("def compute():\n    raise RuntimeError('no memory')", "<te>", "exec")
    place: dict[str, Any] = {"__name__": "transformer_engine.pytorch"}
    exec(code, place)
    with pytest.raises(RuntimeError) as raised:
        place["compute"]()
    assert sentence(raised.value) == "no memory"
