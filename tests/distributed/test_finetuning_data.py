# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning data on ranks: every rank reads its part, a stream is resumed exactly, and a fault is told by all."""

import os
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_mcore import MCoreGPT, Recipe
from lightning_mcore.data.finetuning import datamodule, stream_reader
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from tests.distributed import test_resume
from tests.distributed.test_resume import Run, Save
from tests.support.chats import APPENDING, END, characters, exchanges, write
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import CP2, PP2, TP2, make_trainer

pytestmark = pytest.mark.distributed

ROWS = 61


class Watch(test_resume.Watch):
    """Writes down the samples of every batch, and every step; keeps where sub-sequences begin."""

    def __init__(self) -> None:
        super().__init__()
        self.padded: set[int] = set()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples = [number for number in batch["sample_ids"].flatten().tolist() if number >= 0]
        self.batches.append(f"{trainer.current_epoch} {samples}")
        if "cu_seqlens_padded" in batch:
            self.padded |= set(batch["cu_seqlens_padded"].flatten().tolist())


def gpt() -> MCoreGPT:
    """Return a GPT for the tokens of bytes, with dropout."""
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "hidden_dropout": 0.1}
    return MCoreGPT(
        vocab_size=260, seq_length=64, transformer=sizes, recipe=Recipe(learning_rate=1e-2, min_learning_rate=1e-2)
    )


def finetuning(folder: str, seq_length: int = 64, **options: Any) -> MCoreFinetuningData:
    """Return the data of the files in a folder."""
    return MCoreFinetuningData(f"{folder}/*.jsonl", characters(), seq_length, cache_dir=f"{folder}/cache", **options)


def train(
    strategy: Any, data: MCoreFinetuningData, folder: str = "", moments: tuple[str, ...] = (), **options: Any
) -> tuple[Run, Watch]:
    """Train on this rank, from a checkpoint if there is one."""
    resume = options.pop("resume", None)
    pl.seed_everything(7 if resume is None else 99, workers=True, verbose=False)
    watch = Watch()
    save = Save(folder, moments, watch)
    trainer = make_trainer(strategy, callbacks=[watch, save], **options)
    trainer.fit(gpt(), datamodule=data, ckpt_path=resume)
    return Run(watch.batches, watch.losses, save.places), watch


def write_once(path: Path, rows: list[Any]) -> None:
    """Write a file that all ranks read."""
    if dist.get_rank() == 0:
        write(path, rows)
    dist.barrier()


def samples(batches: list[str]) -> list[int]:
    """Return the numbers of the samples in what :class:`Watch` wrote down."""
    return [int(number) for batch in batches for number in batch.partition("[")[2][:-1].split(",")]


# Files


def learn(folder: str) -> dict[str, tuple[Run, set[int]]]:
    """Train on layouts, packed and padded; return what was read and where sub-sequences begin."""
    found = {}
    for name, strategy, packing in (
        ("dp2", {}, True),
        ("dp2-padded", {}, False),
        ("cp2", CP2, True),
        ("cp2-padded", CP2, False),
        ("pp2", PP2, True),
    ):
        data = finetuning(folder, batch_size=2, packing=packing, validation_share=0.1)
        run, watch = train(strategy, data, max_epochs=2)
        found[name] = run, watch.padded
    return found


@pytest.mark.slow
def test_every_layout_reads_its_part_and_learns(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", exchanges(36))
    first, second = run_ranks(2, learn, str(tmp_path), timeout=180)
    for name, (run, padded) in first.items():
        losses = [float(loss.split()[-1]) for loss in run.losses]
        assert losses[-1] < 0.8 * losses[0], name
        assert not name.startswith("cp2") or all(place % 4 == 0 for place in padded)
        other = second[name][0]
        if name.startswith("dp2"):
            assert not set(samples(run.batches[:4])) & set(samples(other.batches[:4]))
        else:
            assert run.batches == other.batches
    assert {place % 4 for place in first["dp2"][1]} != {0}
    assert len(first["dp2-padded"][0].batches) > len(first["dp2"][0].batches)


# A stream


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": ({"shuffle_buffer": 4}, {"accumulate_grad_batches": 2}),
    "padded-workers": ({"shuffle_buffer": 8, "packing": False, "batch_size": 4, "num_workers": 1}, {}),
}
MOMENTS = ("batch 3", "batch 4", "epoch 0")


def stream_whole(folder: str, data: str) -> dict[str, Run]:
    """Train every case for two epochs, taking checkpoints."""
    stream_reader.BATCHES_BETWEEN_STATES, stream_reader.OPEN_ROWS = 2, 2
    return {
        name: train({}, finetuning(data, streaming=True, **options), f"{folder}/{name}", MOMENTS, **trainer)[0]
        for name, (options, trainer) in two_epochs().items()
    }


def two_epochs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {name: (options, {**trainer, "max_epochs": 2}) for name, (options, trainer) in CASES.items()}


def stream_on(folder: str, data: str) -> dict[str, dict[str, Run]]:
    """Go on from every checkpoint of every case."""
    stream_reader.BATCHES_BETWEEN_STATES, stream_reader.OPEN_ROWS = 2, 2
    return {
        name: {
            moment: train(
                {}, finetuning(data, streaming=True, **options), resume=f"{folder}/{name}/{moment}.ckpt", **trainer
            )[0]
            for moment in MOMENTS
        }
        for name, (options, trainer) in two_epochs().items()
    }


def resume_elsewhere(folder: str, data: str) -> tuple[str, str]:
    """Return what a run on one rank says in the middle of an epoch, and its first batch after the end of one."""
    options, trainer = two_epochs()["packed"]
    with pytest.raises(ValueError, match="resume on 2, or from the end of an epoch") as raised:
        train({}, finetuning(data, streaming=True, **options), resume=f"{folder}/packed/batch 4.ckpt", **trainer)
    run, _ = train({}, finetuning(data, streaming=True, **options), resume=f"{folder}/packed/epoch 0.ckpt", **trainer)
    return str(raised.value), run.batches[0]


@pytest.mark.slow
def test_a_resumed_stream_is_the_stream_without_a_break_and_on_other_ranks_begins_the_next_epoch(
    tmp_path: Path,
) -> None:
    rows = exchanges(ROWS)
    write(tmp_path / "data/a.jsonl", rows[:20])
    write(tmp_path / "data/b.jsonl", rows[20:])
    arguments = (str(tmp_path / "runs"), str(tmp_path / "data"))
    whole = run_ranks(2, stream_whole, *arguments, timeout=180)
    resumed = run_ranks(2, stream_on, *arguments, timeout=180)
    for name in CASES:
        first, second = (run[name] for run in whole)
        assert len(first.batches) == len(second.batches), "one rank had more batches than the other"
        epochs = [samples([b for run in (first, second) for b in run.batches if b[0] == str(n)]) for n in (0, 1)]
        for epoch in epochs:
            assert len(epoch) == len(set(epoch))
            assert len(epoch) > 50
        assert epochs[0] != epochs[1]
        for run, again in zip(whole, resumed, strict=True):
            for moment in MOMENTS:
                batches, steps = run[name].places[moment]
                assert again[name][moment].batches == run[name].batches[batches:], (name, moment)
                assert again[name][moment].losses == run[name].losses[steps:], (name, moment)
    [(said, batch)] = run_ranks(1, resume_elsewhere, *arguments, timeout=120)
    assert said.startswith("the checkpoint contains dataloader states from the middle of an epoch on 2 data-parallel")
    assert batch.startswith("1 ")


# Faults


FAULTS: dict[str, tuple[dict[str, Any], str]] = {  # in files, in rows, and in one that only the other rank reads
    "line": ({}, "line 9 of"),
    "line-stream": ({"streaming": True}, "line 9 of"),
    "missing": ({"train_files": "nothing"}, "does not exist; give a file"),
    "long": ({"train_files": "long"}, "take more than the 64 tokens of a row"),
    "long-on-rank-1": ({"train_files": "long", "streaming": True, "shuffle_buffer": 1}, "row 9 of"),
    "small": ({"train_files": "small"}, "the dataset has 1 rows"),
    "small-stream": ({"train_files": "small", "streaming": True}, "has 1 row, too few for a batch"),
    "columns-stream": ({"train_files": "columns", "streaming": True}, "has the columns answer, prompt but"),
    "row": ({"train_files": "small", "seq_length": 66, "strategy": CP2}, "seq_length=66"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rows = tmp_path_factory.mktemp("faulty"), exchanges(8)
    for number, place in (("0", "broken"), ("1", "broken"), ("0", "long"), ("0", "small"), ("0", "columns")):
        write(folder / place / f"{number}.jsonl", rows[:1] if place == "small" else rows)
    with (folder / "broken/1.jsonl").open("a") as file:
        file.write('{"prompt": "q"\n')
    with (folder / "long/0.jsonl").open("a") as file:
        file.write('{"prompt": "p8", "response": "r8"}\n{"prompt": "p9", "response": "' + 99 * "r" + '"}\n')
    write(folder / "columns/1.jsonl", [{"prompt": "q", "answer": "a"}])
    return folder


@pytest.mark.parametrize("name", FAULTS)
@on_ranks(2)
def test_a_fault_is_told_by_every_rank_in_one_sentence(faulty: Path, name: str) -> None:
    changed, about = FAULTS[name]
    chosen: dict[str, Any] = {"train_files": "broken", "seq_length": 64, "strategy": {}, **changed}
    strategy, files = chosen.pop("strategy"), f"{faulty}/{chosen.pop('train_files')}/*.jsonl"
    data = MCoreFinetuningData(files, characters(), cache_dir=f"{faulty}/cache", batch_size=2, **chosen)
    with refuses((ValueError, FileNotFoundError), about):
        train(strategy, data, max_epochs=1)


def test_samples_are_dealt_out_without_overlap_in_a_stream_of_two_ranks(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", exchanges(ROWS))
    shares = run_ranks(2, read_stream, str(tmp_path), timeout=120)
    assert len(shares[0]) == len(shares[1]) == 30  # of 61: the rank with one more leaves it out
    assert len(set(chain(*shares))) == 60


def read_stream(folder: str) -> list[int]:
    """Return the numbers of the samples that this rank reads in an epoch."""
    data = finetuning(folder, streaming=True, packing=False)
    run, _ = train({}, data, max_epochs=1)
    return samples(run.batches)


def test_the_common_random_numbers_are_left_alone_by_a_stream(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", exchanges(8))
    data = finetuning(str(tmp_path), streaming=True, packing=False, num_workers=1)
    data.setup("fit")
    before = torch.get_rng_state()
    list(data.train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


# ---- data that changed between a checkpoint and a resume


def _write_tokenizer(folder: Path, change: str | None) -> None:
    template = APPENDING.replace("<|end|>", "<|end|> ") if change == "the chat template, which was " else APPENDING
    merges = ["aa"] if change == "the tokenizer, which was " else []
    characters(template, merges, eos_token=END).save_pretrained(f"{folder}/tokenizer")


@pytest.mark.parametrize("streaming", [False, True], ids=["files", "stream"])
@on_ranks(1, timeout=120)
def test_a_run_goes_on_with_the_data_that_it_had_or_says_what_changed(tmp_path: Path, streaming: bool) -> None:
    def fit(epochs: int, checkpoint: str | None = None) -> str:
        module = MCoreFinetuningData(
            f"{tmp_path}/a.jsonl",
            f"{tmp_path}/tokenizer",
            64,
            2,
            packing=False,
            cache_dir=f"{tmp_path}/cache",
            streaming=streaming,
        )
        saves = pl.callbacks.ModelCheckpoint(f"{tmp_path}/saved", "{step}", every_n_train_steps=6, save_top_k=-1)
        callbacks = [saves] if checkpoint is None else []
        trainer = make_trainer(
            {}, max_epochs=epochs, max_steps=12 * epochs, callbacks=callbacks, enable_checkpointing=checkpoint is None
        )
        sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                trainer.fit(MCoreGPT(vocab_size=384, seq_length=64, transformer=sizes), module, ckpt_path=checkpoint)
            except ValueError as error:
                return str(error)
        return " ".join(str(warning.message) for warning in warned if "training data" in str(warning.message))

    file, said = write(tmp_path / "a.jsonl", exchanges(24)), {}
    _write_tokenizer(tmp_path, None)
    first = fit(1)
    assert first == "", first
    whole, times = Path(file).read_text(), os.stat(file)
    for change in ("", "a.jsonl (", "the chat template, which was ", "the tokenizer, which was "):
        Path(file).write_text(whole.replace("q3", "z3") if change == "a.jsonl (" else whole)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + (change == "a.jsonl (")))
        _write_tokenizer(tmp_path, change)
        said[change] = fit(1, f"{tmp_path}/saved/step=6.ckpt"), fit(2, f"{tmp_path}/saved/step=12.ckpt")
    assert said.pop("") == ("", "")
    for change, (within, after) in said.items():
        assert within.startswith(
            "the checkpoint was taken in the middle of an epoch over different data, which differs in "
        )
        assert after.startswith("the run continues with different training data than before: it differs in ")
        assert change in within, change
        assert change in after, change


HYBRID = {"context_parallel_size": 2, "hybrid_context_parallel": True}


def resumed_hybrid(folder: str, data: str, streaming: bool) -> tuple[Run, dict[str, Run]]:
    """Train on rows of whole and of split documents, and go on from each checkpoint."""
    stream_reader.BATCHES_BETWEEN_STATES, stream_reader.OPEN_ROWS = 2, 4
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    whole, watch = train(HYBRID, finetuning(data, streaming=streaming), f"{folder}/hybrid", MOMENTS, **options)
    assert {place % 32 for place in watch.padded} - {0, 4, 8, 12, 16, 20, 24, 28}, "every document was padded"
    again = {
        moment: train(
            HYBRID, finetuning(data, streaming=streaming), resume=f"{folder}/hybrid/{moment}.ckpt", **options
        )[0]
        for moment in MOMENTS
    }
    return whole, again


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True], ids=["files", "stream"])
def test_a_run_with_whole_documents_resumes_bit_for_bit(tmp_path: Path, streaming: bool) -> None:
    write(tmp_path / "data/a.jsonl", [*exchanges(ROWS, 6), *exchanges(8, 40, seed=1)])
    for whole, again in run_ranks(2, resumed_hybrid, str(tmp_path), str(tmp_path / "data"), streaming, timeout=180):
        for moment in MOMENTS:
            batches, steps = whole.places[moment]
            assert again[moment].batches == whole.batches[batches:]
            assert again[moment].losses == whole.losses[steps:]


def go_on_in_other_rows(folder: str, data: str) -> list[tuple[int, list[int], list[int]]]:
    """Go on in the same rows and in others; return the number of warnings, and what was read before and after."""
    said: list[str] = []
    datamodule.rank_zero_warn = said.append  # type: ignore[assignment]  # make_trainer silences Lightning's warnings
    whole, _ = train({}, finetuning(data), folder, ("batch 2", "epoch 0"), max_epochs=1)
    found = []
    for moment, strategy in (("batch 2", {}), ("batch 2", CP2), ("epoch 0", CP2)):
        said.clear()
        run, _ = train(strategy, finetuning(data), resume=f"{folder}/{moment}.ckpt", max_epochs=2)
        warned = sum("packs samples into other rows" in text for text in said)
        rest = [batch for batch in run.batches if batch.startswith("0 ")]
        found.append((warned, samples(whole.batches[:2]), samples(rest) if rest else []))
    return found


def test_an_epoch_that_goes_on_in_other_rows_repeats_samples_and_a_warning_says_so(tmp_path: Path) -> None:
    write(tmp_path / "data/a.jsonl", exchanges(ROWS, 9))
    first, second = run_ranks(2, go_on_in_other_rows, str(tmp_path), str(tmp_path / "data"), timeout=120)
    assert [warned for warned, *_ in first] == [warned for warned, *_ in second] == [0, 1, 0]
    before = first[0][1] + second[0][1]
    same, other = before + first[0][2] + second[0][2], before + first[1][2]
    assert len(set(same)) == len(same)
    assert len(set(other)) < len(other)


@pytest.mark.parametrize(
    ("strategy", "options", "about"),
    [
        (HYBRID, {"batch_size": 2}, "batch_size=2 puts several rows into a microbatch"),
        ({**HYBRID, "micro_batch_size": 2}, {}, "micro_batch_size=2 puts several rows into a microbatch"),
        (
            {"hybrid_context_parallel": True},
            {},
            "needs context_parallel_size of 2 or more",
        ),
    ],
)
@on_ranks(2, timeout=120)
def test_what_has_no_whole_documents_is_refused(
    tmp_path: Path, strategy: dict[str, Any], options: dict[str, Any], about: str
) -> None:
    write_once(tmp_path / "a.jsonl", exchanges(8))
    with refuses(ValueError, about):
        train(strategy, finetuning(str(tmp_path), **options), max_epochs=1)


@on_ranks(4, timeout=180)
def test_a_stream_that_one_rank_of_each_copy_reads_is_the_same_stream(tmp_path: Path) -> None:
    """Two copies of two tensor-parallel ranks, packed and padded; only the ranks that read agree on each batch."""
    write_once(tmp_path / "a.jsonl", exchanges(ROWS))
    for packing in (True, False):
        read, sent = (
            train(
                {**TP2, "broadcast_batches": sends},
                finetuning(str(tmp_path), streaming=True, packing=packing),
                max_epochs=2,
            )[0]
            for sends in (False, True)
        )
        assert len(read.batches) > 10
        assert (sent.batches, sent.losses) == (read.batches, read.losses)
