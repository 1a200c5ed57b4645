# SPDX-License-Identifier: Apache-2.0
"""``MCorePretrainingData``: Megatron's own rows, one order on every layout and across a resume, refusals on all ranks.

The datasets here say where each token comes from: document ``d`` of a dataset is a run of tokens ``first + d``.
"""

import functools
import importlib.util
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch import Tensor

from lightning_mcore import MCoreGPT
from lightning_mcore.data.pretraining.blend import Rows, _EndOfDocument
from lightning_mcore.data.pretraining.datamodule import MCorePretrainingData
from lightning_mcore.data.pretraining.index import (
    checksums_path,
    facts_path,
    read_index,
    write_dataset_checksums,
    write_index,
)
from tests.support.ranks import RanksFailedError, on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import make_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None,
        reason="this megatron-core was compiled for another Python",
    ),
]

SEQ_LENGTH = 8
VOCAB_SIZE = 256
EOD = 0


def make_dataset(prefix: Path, first: int, documents: int = 60) -> str:
    """Write documents of 5 to 24 tokens, the last of each the end-of-document token."""
    lengths = np.array([5 + 7 * number % 20 for number in range(documents)], dtype=np.int32)
    tokens = np.repeat(np.arange(first, first + documents), lengths).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = EOD
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    write_index(f"{prefix}.idx", lengths, np.uint16)
    return str(prefix)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Make two datasets of different tokens."""
    return [make_dataset(tmp_path / "a", 1), make_dataset(tmp_path / "b", 101)]


def make_data(paths: Any, **changed: Any) -> MCorePretrainingData:
    return MCorePretrainingData(paths, **{"seq_length": SEQ_LENGTH, "batch_size": 2, "num_workers": 0, **changed})


def train_rows(data: MCorePretrainingData) -> list[list[int]]:
    data.setup("fit")
    return [row for batch in data.train_dataloader() for row in batch["tokens"].tolist()]


# ---- rows


def test_labels_are_the_tokens_that_follow(two: list[str]) -> None:
    data = make_data(two[0], train_samples=40)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) == 20
    stream = np.fromfile(f"{two[0]}.bin", np.uint16).tolist()
    runs = "".join(chr(token) for token in stream)
    for batch in batches:
        assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
            "tokens": ((2, SEQ_LENGTH), torch.int64),
            "labels": ((2, SEQ_LENGTH), torch.int64),
            "loss_mask": ((2, SEQ_LENGTH), torch.float32),
            "position_ids": ((2, SEQ_LENGTH), torch.int64),
        }
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert batch["loss_mask"].all()
        assert torch.equal(batch["position_ids"], torch.arange(SEQ_LENGTH).expand(2, -1))
        for row, label in zip(batch["tokens"].tolist(), batch["labels"][:, -1].tolist(), strict=True):
            for part in "".join(map(chr, [*row, label])).split(chr(EOD)):
                assert part in runs


def test_positions_and_mask_follow_the_documents_on_request(two: list[str]) -> None:
    Path(facts_path(two[0])).write_text('{"eod_token_id": 0, "vocab_size": 256}')
    data = make_data(two[0], train_samples=40, reset_position_ids=True, eod_mask_loss=True)
    data.setup("fit")
    for batch in data.train_dataloader():
        for tokens, mask, positions in zip(batch["tokens"], batch["loss_mask"], batch["position_ids"], strict=True):
            assert torch.equal(mask, (tokens != EOD).float())
            wanted, place = [], 0
            for token in tokens.tolist():
                wanted.append(place)
                place = 0 if token == EOD else place + 1
            assert positions.tolist() == wanted


def test_splits_share_no_document(two: list[str]) -> None:
    data = make_data(two[0], split="60,20,20")
    data.setup("fit")
    data.setup("test")
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    seen = [{token for batch in loader for token in batch["tokens"].flatten().tolist()} - {EOD} for loader in loaders]
    assert seen[0] <= set(range(1, 37))
    assert seen[1] <= set(range(37, 49))
    assert seen[2] <= set(range(49, 61))
    assert all(len(tokens) > 9 for tokens in seen)


def test_weights_are_the_shares_of_the_rows(two: list[str]) -> None:
    rows = train_rows(make_data({two[0]: 3, two[1]: 1}, train_samples=200))
    from_b = [max(row) > 100 for row in rows]
    assert len(rows) == 200
    assert sum(from_b) == 50
    assert all(sum(from_b[:count]) in (count // 4, count // 4 + 1) for count in range(4, 200, 4))


def test_several_datasets_without_weights_are_read_once(two: list[str]) -> None:
    data = make_data(two, split="1")
    rows = train_rows(data)
    tokens = sum(np.fromfile(f"{prefix}.bin", np.uint16).size - 1 for prefix in two)
    assert len(rows) == tokens // SEQ_LENGTH // 2 * 2
    assert data.val_dataloader() == data.test_dataloader() == []
    first, second = ([row for batch in data.train_dataloader() for row in batch["tokens"].tolist()] for _ in range(2))
    assert first == second == rows  # of the same epoch; the sampler shuffles by epoch
    loader = data.train_dataloader()
    loader.sampler.set_epoch(1)
    other = [row for batch in loader for row in batch["tokens"].tolist()]
    assert other != rows


def test_each_split_may_have_its_own_datasets(two: list[str]) -> None:
    data = make_data(None, train_paths=two[0], val_paths={two[1]: 1.0}, train_samples=20, val_samples=6)
    assert max(max(row) for row in train_rows(data)) <= 60
    rows = [row for batch in data.val_dataloader() for row in batch["tokens"].tolist()]
    assert len(rows) == 6
    assert min(max(row) for row in rows) > 100
    assert data.test_dataloader() == []


@pytest.mark.parametrize("kind", ["one", "many", "weights", "alone"])
@on_ranks(2, timeout=120)
def test_the_rows_are_those_of_megatrons_builder(kind: str, two: list[str], tmp_path: Path) -> None:
    cache = str(tmp_path / "theirs")
    blend = {"one": [two[0]], "many": two, "weights": two, "alone": [two[0]]}[kind]
    weights = [0.75, 0.25] if kind == "weights" else None
    paths = dict(zip(two, [0.75, 0.25], strict=True)) if kind == "weights" else blend
    samples = {"many": 50, "weights": 112}.get(kind, 150)  # 112 * 0.75 is all that the first one holds, without surplus
    common: dict[str, Any] = {
        "random_seed": 7,
        "sequence_length": SEQ_LENGTH,
        "path_to_cache": cache,
        "tokenizer": _EndOfDocument(EOD),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    if kind == "alone":
        given: dict[str, Any] = {"blend_per_split": [(blend, None), None, None]}
        data = make_data(None, train_paths=paths, train_samples=samples, seed=7)
    else:
        given = {"blend": (blend, weights), "split": "80,20,0"}
        data = make_data(paths, split="80,20", train_samples=samples, seed=7)
    config = GPTDatasetConfig(**common, **given)
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 4, 0], lambda: True, config).build()[0]
    ours = train_rows(data)
    theirs = [theirs[number]["tokens"].tolist() for number in range(len(ours))]
    assert len(ours) >= 50
    assert ours == theirs


# ---- the order of a run


class Tokens(pl.Callback):
    """Writes down the rows of each optimizer step, of all data-parallel ranks."""

    def __init__(self) -> None:
        self.steps: dict[int, list[list[int]]] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        own = batch["tokens"]
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        rows = torch.stack(ranks, 1).flatten(0, 1)  # rank r reads the samples r, r + n, ...
        self.steps.setdefault(trainer.global_step, []).extend(rows.tolist())


class Gpt(MCoreGPT):
    """A small GPT that validates."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, seq_length: int = SEQ_LENGTH) -> None:
        sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
        super().__init__(vocab_size=vocab_size, seq_length=seq_length, transformer=sizes)


Steps = dict[int, list[list[int]]]


def fit(paths: Any, batch_size: int, accumulate: int, **changed: Any) -> tuple[Steps, float]:
    """Rank function: train, and return the rows of each step and the last loss of the validation."""
    of_data = ("train_samples", "seed", "split")
    data = make_data(paths, batch_size=batch_size, **{key: changed.pop(key) for key in of_data if key in changed})
    save_to, ckpt_path = changed.pop("save_to", None), changed.pop("ckpt_path", None)
    watch = Tokens()
    callbacks: list[pl.Callback] = [watch]
    if save_to is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(save_to, filename="{step}", every_n_train_steps=2, save_top_k=-1))
        changed["enable_checkpointing"] = True
    trainer = make_trainer({}, callbacks=callbacks, accumulate_grad_batches=accumulate, **{"max_steps": 6, **changed})
    trainer.fit(Gpt(), datamodule=data, ckpt_path=ckpt_path)
    return watch.steps, float(trainer.callback_metrics["val_loss"]) if "val_loss" in trainer.callback_metrics else 0.0


def rows_of(paths: Any, samples: int) -> list[list[int]]:
    return train_rows(make_data(paths, split="1", train_samples=samples))


def test_the_order_is_the_same_on_other_ranks_and_after_a_resume(tmp_path: Path) -> None:
    paths = {make_dataset(tmp_path / "a", 1, documents=16): 0.6, make_dataset(tmp_path / "b", 101, documents=16): 0.4}
    save_to = str(tmp_path / "saved")
    fit_on = functools.partial(run_ranks, split="1", timeout=120)
    [(alone, _)] = fit_on(1, fit, paths, 4, 2, save_to=save_to)
    assert [len(rows) for rows in alone.values()] == [8] * 6
    assert [row for rows in alone.values() for row in rows] == rows_of(paths, 48)
    assert rows_of(paths, 40) != rows_of(paths, 48)[:40]  # which is why the number is in the checkpoint
    rest = {step: rows for step, rows in alone.items() if step >= 4}
    for steps, _ in fit_on(2, fit, paths, 4, 1):
        assert steps == alone
    resumed = fit_on(2, fit, paths, 2, 2, ckpt_path=f"{save_to}/step=4.ckpt")
    for steps, _ in resumed:
        assert steps == rest
    [(shorter, _)] = fit_on(1, fit, paths, 4, 2, ckpt_path=f"{save_to}/step=4.ckpt", max_steps=5)
    assert shorter == {4: alone[4]}


def test_a_run_that_would_change_the_order_is_refused(two: list[str], tmp_path: Path) -> None:
    save_to = str(tmp_path / "saved")
    run_ranks(1, fit, two[0], 4, 1, save_to=save_to, max_steps=2, timeout=120)
    resume: dict[str, Any] = {"ckpt_path": f"{save_to}/step=2.ckpt", "timeout": 120}
    for changed, about in (
        ({"max_steps": 4}, "the run now needs 16 training samples, but the run of the checkpoint drew 8"),
        ({"train_samples": 12}, "train_samples=12, but the run of the checkpoint drew 8"),
        ({"seed": 5}, "seed was 1234 and is now 5"),
    ):
        with refuses(RanksFailedError, about):
            run_ranks(1, fit, two[0], 4, 1, **resume, **changed)
    [(steps, _)] = run_ranks(1, fit, two[0], 4, 1, train_samples=8, max_steps=4, **resume)
    assert list(steps) == [2, 3]
    whole = Path(f"{two[0]}.bin").read_bytes()
    Path(f"{two[0]}.bin").write_bytes(whole[:300] + bytes(16) + whole[316:])
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(1, fit, two[0], 4, 1, train_samples=8, max_steps=4, **resume)
    assert "the checkpoint was taken with other data: the content of the datasets was [" in failed.value.errors[0]


def test_a_model_split_over_ranks_validates_on_it(two: list[str]) -> None:
    [(_, first), (_, second)] = run_ranks(
        2, fit, two[0], 2, 1, split="80,20", max_steps=2, val_check_interval=2, timeout=120
    )
    assert first == second > 0


def test_a_checkpoint_that_is_read_after_the_loader_was_made_is_refused(two: list[str]) -> None:
    data = make_data(two[0], train_samples=40)
    train_rows(data)
    state = data.state_dict()
    assert state["train_samples"] == 40
    data.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"the training loader was created with 40 samples before the checkpoint was read"
    ):
        data.load_state_dict({**state, "train_samples": 80})


# ---- index files


def test_index_files_are_made_once_for_each_content(two: list[str], tmp_path: Path) -> None:
    def folders() -> set[str]:
        return {path.name for path in (tmp_path / "cache").iterdir()}

    rows = train_rows(make_data(two[0], train_samples=40, cache_dir=str(tmp_path / "cache")))
    first = folders()
    assert len(first) == 1
    assert train_rows(make_data(two[0], train_samples=40, cache_dir=str(tmp_path / "cache"))) == rows
    assert folders() == first
    make_dataset(Path(two[0]), 30, documents=50)  # under the same name
    assert train_rows(make_data(two[0], train_samples=40, cache_dir=str(tmp_path / "cache"))) != rows
    assert len(folders() - first) == 1


def test_a_crash_leaves_no_half_of_the_index_files(
    two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, saved = np.save, []

    def save_or_crash(path: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(path)
        if len(saved) == 3:
            Path(path).write_bytes(b"half")
            raise KeyboardInterrupt
        real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("numpy.save", save_or_crash)
        with pytest.raises(KeyboardInterrupt):
            train_rows(make_data(two[0], train_samples=40))
    assert len(train_rows(make_data(two[0], train_samples=40))) == 40


# ---- refusals


@pytest.mark.parametrize(
    ("changed", "about"),
    [
        ({"seq_length": 0}, "seq_length=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"paths": []}, "data_paths is empty"),
        ({"paths": None}, "no data is given; give data_paths, or"),
        ({"paths": ["a", "a"]}, "data_paths names a dataset twice"),
        ({"paths": [1]}, "data_paths=[1]"),
        ({"paths": {"a": 1, "b": -0.5}}, "data_paths gives b the weight -0.5"),
        ({"paths": {"a": 0}}, "data_paths gives a the weight 0"),
        ({"paths": {"a": float("nan")}}, "data_paths gives a the weight nan"),
        ({"split": "90,5,3,2"}, "split='90,5,3,2'"),
        ({"split": "90;10"}, "split='90;10'"),
        ({"split": "0,0,0"}, "split='0,0,0' has no positive share"),
        ({"val_paths": "b"}, "data_paths and val_paths are both given"),
        ({"paths": None, "train_paths": "a", "split": "1"}, "split='1' divides data_paths, which is not given"),
    ],
)
def test_wrong_arguments_are_one_sentence(changed: dict[str, Any], about: str) -> None:
    with refuses((ValueError, TypeError), about):
        make_data(**{"paths": "a", **changed})


def lose(name: str) -> Callable[[list[str]], None]:
    return lambda two: Path(two[0] + name).unlink()


def leave(two: list[str]) -> None:
    """Leave the datasets as they are."""


Spoil = Callable[[list[str]], Any]
REFUSALS: dict[str, tuple[Spoil, dict[str, Any], dict[str, int], type[Exception], str]] = {
    "no bin": (lose(".bin"), {}, {}, FileNotFoundError, "a.bin does not exist"),
    "no idx": (lose(".idx"), {}, {}, FileNotFoundError, "a.idx does not exist"),
    "a file": (lambda two: two.__setitem__(0, two[0] + ".bin"), {}, {}, ValueError, "a.bin is a file"),
    "too small": (
        lambda two: make_dataset(Path(two[0]), 1, documents=10),
        {"split": "969,30,1"},
        {},
        ValueError,
        "has 0 tokens in 0 of its 10 documents, but a sample of seq_length=8 needs 9",
    ),
    "more than there is": (leave, {"paths": 2, "train_samples": 5000}, {}, ValueError, "fewer than the 5000 requested"),
    "less than a batch": (leave, {"train_samples": 3}, {}, ValueError, "the dataset has 3 samples, fewer than the 4"),
    "no end of document": (leave, {"reset_position_ids": True}, {}, ValueError, "reset_position_ids=True"),
    "vocabulary": (
        lambda two: Path(facts_path(two[0])).write_text('{"vocab_size": 300}'),
        {},
        {},
        ValueError,
        "vocab_size=256",
    ),
    "longer than the model": (
        leave,
        {},
        {"seq_length": 4},
        ValueError,
        "seq_length=8 exceeds the model's seq_length=4",
    ),
    "cache": (
        lambda two: Path(two[0] + ".cache").write_text("a file"),
        {},
        {},
        OSError,
        "cannot be written to cache_dir",
    ),
    "no training data": (leave, {"split": "0,1"}, {}, ValueError, "there is no data to train on"),
}


def refuse(paths: Any, changed: dict[str, Any], model: dict[str, int], kind: type[Exception], about: str) -> None:
    """Rank function: expect that a fit is refused."""
    warnings.filterwarnings("ignore")
    with refuses(kind, about):
        make_trainer({}, max_steps=3).fit(Gpt(**model), datamodule=make_data(paths, **changed))


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_data_is_one_sentence_on_every_rank(case: str, two: list[str]) -> None:
    spoil, changed, *rest = REFUSALS[case]
    spoil(two)
    changed = {"split": "80,20", **changed}
    run_ranks(2, refuse, two if changed.pop("paths", 1) == 2 else two[0], changed, *rest, timeout=120)


def test_a_megatron_core_without_its_compiled_part_is_refused(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"^megatron\.core\.datasets\.helpers_cpp, the compiled part of"):
        make_data(two[0]).setup("fit")


def test_weights_without_an_end_are_refused(two: list[str]) -> None:
    data = make_data({two[0]: 1, two[1]: 2})
    data.setup("fit")
    with pytest.raises(ValueError, match=r"repeat forever; set train_samples, or Trainer\(max_steps=...\)"):
        data.train_dataloader()


def test_a_loader_before_setup_is_refused(two: list[str]) -> None:
    with pytest.raises(RuntimeError, match="the train data is not set up yet; call setup"):
        make_data(two[0]).train_dataloader()


def test_more_validation_than_there_is_is_refused(two: list[str]) -> None:
    data = make_data(two[0], split="80,20", val_samples=500)
    data.setup("validate")
    with pytest.raises(ValueError, match=r"val_samples=500 is more than the \d+ rows of the split; choose"):
        data.val_dataloader()


def test_the_command_line_takes_all_forms_of_paths() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MCorePretrainingData, "data")
    for paths in ("a", ["a", "b"], {"a": 0.3, "b": 0.7}):
        given = parser.parse_object({"data": {"data_paths": paths, "seq_length": 8, "batch_size": 2}})
        assert given.data.data_paths == paths
        parser.instantiate_classes(given)


# ---- files that are not as they were written


class _Runs:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.mark),)


def with_checksums(prefix: str, vocab_size: int = 256) -> str:
    """Give a dataset the checksums that preprocess leaves beside one."""
    Path(facts_path(prefix)).write_text(f'{{"eod_token_id": 0, "vocab_size": {vocab_size}}}')
    write_dataset_checksums(checksums_path(prefix), f"{prefix}.bin", f"{prefix}.idx", facts_path(prefix))
    return prefix


@pytest.mark.parametrize("blend", [False, True], ids=["one", "blend"])
def test_index_files_that_changed_are_made_anew_and_nothing_in_them_runs(
    two: list[str], tmp_path: Path, blend: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def rows() -> list[list[int]]:
        paths = {two[0]: 1.0, two[1]: 2.0} if blend else two[0]
        return train_rows(make_data(paths, train_samples=40, cache_dir=str(tmp_path / "cache")))

    first, mark = rows(), tmp_path / "mark"
    files = sorted((tmp_path / "cache").glob("*/*.npy"))
    assert len(files) == (8 if blend else 3)
    for file in files:
        whole = file.read_bytes()
        for bad in (pickle.dumps(_Runs(str(mark))), whole[:-5], whole[:-1] + b"\7"):
            file.write_bytes(bad)
            assert rows() == first
            assert file.read_bytes() == whole
    assert not mark.exists()
    assert sum("the index files of the dataset are rebuilt: " in line for line in caplog.messages) == 3 * len(files)
    # between the check and the moment at which a rank reads
    folder, request = files[0].parent, make_data(two[0], train_samples=40)._request(0, 40)
    if not blend:
        files[0].write_bytes(pickle.dumps(_Runs(str(mark))))
        with pytest.raises(ValueError, match="changed since it was checked"):
            Rows(request, str(folder))
        assert not mark.exists()


def test_a_copy_for_a_worker_opens_the_files_and_carries_none_of_them(two: list[str], tmp_path: Path) -> None:
    for paths in (two[0], {two[0]: 1.0, two[1]: 2.0}):
        data = make_data(paths, train_samples=400, cache_dir=str(tmp_path / "cache"))
        data.setup("fit")
        rows: Any = data.train_dataloader().dataset
        carried = pickle.dumps(rows)
        assert len(carried) < 2000
        copy = pickle.loads(carried)
        assert len(copy) == len(rows) == 400
        assert all(torch.equal(copy[number]["tokens"], rows[number]["tokens"]) for number in range(400))


def test_tokens_that_are_not_those_that_were_written_are_refused_when_they_are_read(two: list[str]) -> None:
    with_checksums(two[0])
    rows = train_rows(make_data(two[0], train_samples=40))
    file = Path(f"{two[0]}.bin")
    whole = file.read_bytes()
    stat = file.stat()
    file.write_bytes(whole[:300] + bytes(16) + whole[316:])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # so that nothing but the content says it
    with pytest.raises(ValueError, match=r"a\.bin has changed since it was written: .* differs from byte 0 on"):
        train_rows(make_data(two[0], train_samples=40))
    file.write_bytes(whole)
    assert train_rows(make_data(two[0], train_samples=40)) == rows


@pytest.mark.parametrize("file", [".idx", ".preprocess.json", ".checksums"])
def test_an_index_that_is_not_the_one_that_was_written_is_refused(two: list[str], file: str) -> None:
    with_checksums(two[0])
    path = Path(two[0] + file)
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"create the dataset|read unchecked"):
            make_data(two[0]).setup("fit")
    path.unlink()
    if file != ".idx":
        make_data(two[0]).setup("fit")


def test_an_index_of_megatron_that_contradicts_itself_is_refused(two: list[str]) -> None:
    path = Path(f"{two[0]}.idx")
    whole = path.read_bytes()
    make_data(two[0]).setup("fit")
    for place in range(18, len(whole)):  # behind magic, version and type, which are checked, too
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if place < len(whole) - 8 * 61 or place >= len(whole) - 8:
            with pytest.raises(ValueError, match="create the dataset"):
                read_index(two[0])
    path.write_bytes(whole + bytes(60))  # of a multimodal dataset, the mode of each sequence
    read_index(two[0])
