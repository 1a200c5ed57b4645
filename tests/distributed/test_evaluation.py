# SPDX-License-Identifier: Apache-2.0
"""Validation, test and prediction on data that the ranks do not divide: nothing hangs, every sample counts once.

What is logged is compared with the same numbers over the samples themselves, computed here without a trainer.
"""

import itertools
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import (
    CP2,
    FEATURES,
    NUM_LAYERS,
    PP2,
    VP2,
    WIDTH,
    Batch,
    PlainNet,
    Samples,
    StagedNet,
    fill,
    loader,
    make_trainer,
)

pytestmark = pytest.mark.distributed

ROWS = {"micro_batch_size": 1}
SIZES = range(1, 10)
BATCH_SIZES = {2: (1, 2, 4), 4: (2,)}  # by the number of ranks
TESTED = {1, 3, 8}  # sizes of batches of 2 that test() runs too: for fewer ranks, uneven, and for all alike


def errors_by_hand(staged: bool) -> Tensor:
    """Return the error of each of 16 samples under the weights that the toy modules start with."""
    samples = Samples(16)
    if not staged:
        predicted = PlainNet().net(samples.x)
    else:
        hidden = fill(nn.Linear(FEATURES, WIDTH), seed=100)(samples.x)
        for layer in range(NUM_LAYERS):
            hidden = hidden + fill(nn.Linear(WIDTH, WIDTH), seed=layer)(hidden).tanh()
        predicted = fill(nn.Linear(WIDTH, 1), seed=200)(hidden)
    return (predicted - samples.y).square().mean((1, 2)).detach().double()


def evaluate(module: Any, name: str, batch: Batch) -> None:
    """Log errors in every way there is: means, sums and extremes, by Lightning and by torchmetrics."""
    errors = (module.predictions(batch).float() - batch["y"]).square().mean((1, 2))
    module.log_dict({f"{name}_loss": errors.mean()}, sync_dist=True)  # which gives log() batch_size=None
    module.log_dict({f"{name}_min": errors.min(), f"{name}_other": 0.0}, reduce_fx="min", sync_dist=True)
    module.log(f"{name}_max", errors.max(), reduce_fx="max", sync_dist=True)
    module.log(f"{name}_rows", float(len(errors)), reduce_fx="sum", sync_dist=True)
    module.error.update(errors)
    module.indices.update(batch["index"])
    module.log(f"{name}_metric", module.error)


class Plain(PlainNet):
    evaluate = evaluate


class Staged(StagedNet):
    evaluate = evaluate


@pytest.mark.parametrize(
    ("staged", "world_size", "strategy"),
    [
        pytest.param(False, 2, {}, id="plain-dp2"),
        pytest.param(True, 2, {}, marks=pytest.mark.thorough, id="staged-dp2"),
        pytest.param(True, 2, PP2, marks=pytest.mark.thorough, id="pp2"),
        pytest.param(True, 4, PP2, marks=pytest.mark.thorough, id="pp2-dp2"),
        pytest.param(True, 4, VP2, id="pp2-vp2-dp2"),
        pytest.param(True, 4, CP2, id="cp2-dp2"),
        pytest.param(True, 2, ROWS, id="dp2-rows"),
        pytest.param(True, 4, {**VP2, **ROWS}, id="pp2-vp2-dp2-rows"),
        pytest.param(True, 4, {**PP2, **ROWS}, marks=pytest.mark.thorough, id="pp2-dp2-rows"),
    ],
)
@on_ranks("world_size", timeout=180)
def test_every_sample_counts_once_whatever_the_size(staged: bool, world_size: int, strategy: dict[str, Any]) -> None:
    module, errors = Staged() if staged else Plain(), errors_by_hand(staged)
    parts = strategy.get("context_parallel_size", 1)  # ranks that have a part of each sequence and count it
    for size, batch_size in itertools.product(SIZES, BATCH_SIZES[world_size]):
        for way in ("validate", "test") if batch_size == 2 and size in TESTED else ("validate",):
            trainer = make_trainer(strategy)
            getattr(trainer, way)(module, loader(size, batch_size), verbose=False)
            logged = {name.split("_")[1]: float(value) for name, value in trainer.callback_metrics.items()}
            known, case = errors[:size], f"{way}: {size} samples in batches of {batch_size}"
            assert sorted(module.indices.compute().flatten().long().tolist()) == sorted([*range(size)] * parts), case
            module.indices.reset()
            assert logged["rows"] == size * parts, case
            for name in ("loss", "metric"):
                assert logged[name] == pytest.approx(known.mean().item(), rel=1e-6), f"{name} of {case}"
            if parts == 1:  # otherwise a rank has the error of a part of the sequence
                assert logged["min"] == pytest.approx(known.min().item(), rel=1e-6), case
                assert logged["max"] == pytest.approx(known.max().item(), rel=1e-6), case


class Holder:
    """A batch in which Lightning finds no tensors."""

    def __init__(self, rows: list[Batch]) -> None:
        self.x = torch.stack([row["x"] for row in rows])


def ragged(rows: list[Batch]) -> Batch:
    """Return a batch with ``index + 1`` rows of each sample."""
    return {"x": torch.cat([row["x"].expand(int(row["index"]) + 1, -1, -1) for row in rows])}


class RowCounting(PlainNet):
    """Logs how many rows the batches have."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x = batch.x if isinstance(batch, Holder) else batch["x"]
        self.log("rows", float(len(x)), reduce_fx="sum", sync_dist=True, batch_size=1)


@on_ranks(2)
def test_batches_with_any_number_of_rows_for_each_sample_stay_whole() -> None:
    sizes = {8: 8, 7: 8}  # 7 samples on 2 ranks: one has the first sample again, which cannot be cut off
    for size, seen in sizes.items():
        for collate, rows in ((Holder, seen), (ragged, sum(range(1, size + 1)) + seen - size)):
            trainer = make_trainer({})
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.validate(RowCounting(), loader(size, 2, collate_fn=collate), verbose=False)
            assert trainer.callback_metrics["rows"] == rows, f"{collate.__name__} of {size}"
            told = any("count twice" in str(warning.message) for warning in caught)
            assert told == (size == 7 and trainer.global_rank == 1)


# Several loaders, loaders of the user's own, the sanity check


def own_loaders() -> dict[str, Any]:
    """Return loaders of five samples in which something is not as usual."""
    samples = Samples(9)
    subset = SubsetRandomSampler([8, 1, 3, 6, 5], generator=torch.Generator().manual_seed(0))
    return {
        "several": [loader(5, 2), loader(3, 2), loader(1, 4)],
        "sampler": DataLoader(samples, batch_size=2, sampler=subset),
        "not-batched": DataLoader([{k: v[None] for k, v in samples[i].items()} for i in range(5)], batch_size=None),
        "drop-last": DataLoader(Samples(5), batch_size=2, drop_last=True),
        "workers": DataLoader(Samples(5), batch_size=2, num_workers=2, persistent_workers=True),
        "at-once": CombinedLoader({"a": loader(5, 2), "b": loader(9, 2)}, "max_size"),
    }


class Counting(Staged):
    """Counts the samples of each loader; takes two loaders at once too."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[int, list[int]] = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if "a" in batch:
            batch = batch["b"]
        self.evaluate("val", batch)

    def on_validation_epoch_end(self) -> None:
        self.counted = {len(self.counted): sorted(self.indices.compute().flatten().long().tolist())}
        self.indices.reset()


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [pytest.param(2, {}, marks=pytest.mark.thorough, id="dp2"), pytest.param(4, PP2, id="pp2-dp2")],
)
@on_ranks("world_size", timeout=120)
def test_loaders_of_the_user(world_size: int, strategy: dict[str, Any]) -> None:
    errors, found = errors_by_hand(staged=True), {}
    for name, data in own_loaders().items():
        module = Counting()
        results = make_trainer(strategy).validate(module, data, verbose=False)
        found[name] = [{k.split("/")[0]: v for k, v in result.items()} for result in results], module.counted[0]
    for name, samples in {
        "sampler": [1, 3, 5, 6, 8],
        "not-batched": list(range(5)),
        "drop-last": list(range(4)),
        "workers": list(range(5)),
    }.items():
        [logged], counted = found[name]
        assert counted == samples, name
        assert logged["val_rows"] == len(samples), name
        for metric in ("val_loss", "val_metric"):
            assert logged[metric] == pytest.approx(errors[samples].mean().item(), rel=1e-6), name
    each, counted = found["several"]
    assert counted == [0, 0, 0, 1, 1, 2, 2, 3, 4]
    for logged, size in zip(each, (5, 3, 1), strict=True):
        assert logged["val_rows"] == size
        assert logged["val_loss"] == pytest.approx(errors[:size].mean().item(), rel=1e-6)
    assert set(found["at-once"][1]) == set(range(9))  # Lightning's own count where loaders are read side by side


@pytest.mark.parametrize(("world_size", "strategy"), [(2, {}), (4, PP2)], ids=["dp2", "pp2-dp2"])
@on_ranks("world_size", timeout=120)
def test_the_sanity_check_and_validation_within_an_epoch_leave_no_trace_in_each_other(
    world_size: int, strategy: dict[str, Any]
) -> None:
    module, held = Staged(), [loader(5, 2), loader(3, 2)]
    trainer = make_trainer(strategy, num_sanity_val_steps=2, val_check_interval=2)
    trainer.fit(module, loader(16, 2), held)
    trainer.validate(module, held, verbose=False)
    rows = {name: float(value) for name, value in trainer.callback_metrics.items() if "rows" in name}
    assert rows == {"val_rows/dataloader_idx_0": 5.0, "val_rows/dataloader_idx_1": 3.0}


# Prediction


def predict(staged: bool, strategy: Any) -> dict[int, list[tuple[int, Tensor]]]:
    """Return the samples whose predictions this rank got, with the predictions, for several sizes."""
    module, found = Staged() if staged else Plain(), {}
    for size in (2, 5, 7):
        outputs = make_trainer(strategy).predict(module, loader(size, 2))
        assert outputs is not None
        pairs = [pair for output in outputs for pair in zip(output["index"].tolist(), output["y"], strict=True)]
        found[size] = pairs
    return found


@pytest.mark.parametrize(
    ("staged", "world_size", "strategy"), [(False, 2, {}), (True, 4, PP2)], ids=["plain-dp2", "pp2-dp2"]
)
def test_predict_gives_each_sample_once_and_alike_on_every_stage(staged: bool, world_size: int, strategy: Any) -> None:
    errors, samples = errors_by_hand(staged), Samples(16)
    ranks = run_ranks(world_size, predict, staged, strategy)
    for size in (2, 5, 7):
        pairs = [*ranks[0][size], *ranks[1][size]]
        assert sorted(index for index, _ in pairs) == list(range(size))
        for index, predicted in pairs:
            error = (predicted - samples.y[index]).square().mean().item()
            assert error == pytest.approx(errors[index].item(), rel=1e-5)
        for rank, other in zip(ranks[:2], ranks[2:], strict=False):
            assert str(rank[size]) == str(other[size])


@pytest.mark.parametrize(
    ("world_size", "strategy", "ranks"), [(2, {}, "1 rank,"), (4, PP2, "2 ranks,")], ids=["dp2", "pp2-dp2"]
)
@on_ranks("world_size")
def test_predict_with_fewer_rows_than_data_parallel_ranks_is_refused_on_all_of_them(
    world_size: int, strategy: Any, ranks: str
) -> None:
    module = Staged() if strategy else Plain()
    trainer = make_trainer(strategy)
    for loaders in (loader(1, 2), [loader(5, 2), loader(1, 2)]):
        with refuses(ValueError, f"run on at most {ranks}"):
            trainer.predict(module, loaders)
    assert trainer.predict(module, loader(2, 2))
