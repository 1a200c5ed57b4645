# SPDX-License-Identifier: Apache-2.0
"""``micro_batch_size`` cuts evaluation batches: what comes out is what comes out of whole batches on one rank.

The other side is Lightning's own ``"auto"`` strategy, which cuts nothing.
"""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.aggregation import SumMetric

from lightning_mcore import MCoreGPT, data_shard
from lightning_mcore.strategy.pipeline_runner import PipelineRunner
from tests.parity.global_tensors import fill_weights
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import PP2, VP2, Batch, StagedNet, loader, make_trainer, texts

pytestmark = pytest.mark.distributed

TWO_ROWS = {"micro_batch_size": 2}
EP2 = {"expert_model_parallel_size": 2}
Pair = namedtuple("Pair", "count errors")


class Returning(StagedNet):
    """Returns everything that a step may return, and keeps what its hooks get and which rows its steps see."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.rows: list[int] = []

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.rows.append(len(batch["x"]))
        predicted = self.predictions(batch)
        loss = functional.mse_loss(predicted, batch["y"])
        tokens = batch["index"] + 1
        weighed = (predicted.mean((1, 2)) * tokens).sum() / tokens.sum()
        self.error.update((predicted - batch["y"]).square().mean((1, 2)))
        self.log("val_metric", self.error)
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log("val_weighed", weighed, batch_size=tokens.sum())
        self.log("val_rows", float(len(predicted)), reduce_fx="sum")
        return {
            "predicted": predicted,
            "mean": loss,
            "number": loss.item(),
            "pair": Pair(len(predicted), (predicted - batch["y"]).square().mean((1, 2))),
            "names": [f"row {index}" for index in batch["index"].tolist()],
            "both": [batch["x"], predicted],
            "weighed": {"loss": weighed, "num_tokens": tokens.sum()},
            "nothing": None,
            "kind": "validation",
        }

    predict_step = validation_step
    test_step = validation_step

    def log(self, *args: Any, **kwargs: Any) -> None:
        if not self.trainer.predicting:
            super().log(*args, **kwargs)

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)

    on_test_batch_end = on_validation_batch_end


def evaluate(strategy: Any) -> dict[str, Any]:
    """Validate, test and predict five samples in batches of four."""
    module, found = Returning(), {}
    for way in ("validate", "test"):
        trainer = make_trainer(strategy)
        getattr(trainer, way)(module, loader(5, 4), verbose=False)
        found[way] = {name: float(value) for name, value in trainer.callback_metrics.items()}, module.outputs
        module.outputs = []
    found["predict"] = make_trainer(strategy).predict(module, loader(5, 4))
    found["rows"] = max(module.rows)
    return found


def assert_same(found: Any, wanted: Any) -> None:
    """Compare numbers closely, and everything else exactly."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, Tensor | float):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (1, TWO_ROWS),
        pytest.param(2, {**PP2, **TWO_ROWS}, marks=pytest.mark.thorough),
        (2, {**VP2, "micro_batch_size": 3}),
    ],
    ids=["one", "pp2", "pp2-vp2"],
)
def test_what_a_step_logs_and_returns_is_that_of_whole_batches(world_size: int, strategy: dict[str, Any]) -> None:
    [whole] = run_ranks(1, evaluate, "auto")
    for rank in run_ranks(world_size, evaluate, strategy):
        assert rank["rows"] == strategy["micro_batch_size"]
        for way in ("validate", "test", "predict"):
            assert_same(rank[way], whole[way])


@on_ranks(2)
def test_the_parts_of_a_batch_go_through_the_pipeline_together() -> None:
    strategy = {**PP2, **TWO_ROWS}
    module, seen = StagedNet(), list[int]()
    trainer = make_trainer(strategy)
    run = PipelineRunner.run_schedule

    def counting(self: Any, forward_chunk: Any, microbatches: Any, *rest: Any, **others: Any) -> Any:
        seen.append(len(microbatches))
        return run(self, forward_chunk, microbatches, *rest, **others)

    PipelineRunner.run_schedule = counting  # type: ignore[method-assign]
    try:
        trainer.validate(module, loader(9, 8), verbose=False)
    finally:
        PipelineRunner.run_schedule = run  # type: ignore[method-assign]
    assert seen == [4, 1]


class Apart(StagedNet):
    """Returns what cannot be joined."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.predictions(batch)[:, : len(batch["x"])]


@on_ranks(2)
def test_outputs_that_cannot_be_joined_are_refused_on_every_stage() -> None:
    with refuses(ValueError, "predict_step returned tensors of shapes [1, 1, 1] and [2, 2, 1]"):
        make_trainer({**PP2, **TWO_ROWS}).predict(Apart(), loader(3, 3))


class Gathering(StagedNet):
    """Talks to the other model copies in each step."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate("val", batch)
        self.trainer.strategy.reduce(batch["x"].sum())


def gather() -> float:
    trainer = make_trainer({**PP2, "micro_batch_size": 1})
    trainer.validate(Gathering(), loader(5, 4), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def whole_loss() -> float:
    trainer = make_trainer("auto")
    trainer.validate(StagedNet(), loader(5, 4), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def test_a_step_that_communicates_runs_as_often_on_a_rank_with_repeated_samples() -> None:
    [whole] = run_ranks(1, whole_loss)
    assert run_ranks(4, gather) == pytest.approx([whole] * 4, rel=1e-6)


EXPERTS = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4, "moe_router_topk": 2}
EXPERTS |= {"moe_token_dispatcher_type": "alltoall", "add_bias_linear": False, "hidden_dropout": 0.0}


class Experts(MCoreGPT):
    """Starts from weights that do not depend on the layout."""

    def configure_model(self) -> None:
        is_new = not hasattr(self, "model")
        super().configure_model()
        if is_new:
            fill_weights(self.model.chunks)


def with_experts(strategy: Any, dispatch: dict[str, Any]) -> tuple[dict[str, float], list[Tensor]]:
    """Validate and predict rows that the model copies cannot divide evenly."""
    data = texts(7, 8, 64, batch_size=4)
    module = Experts(64, 8, EXPERTS | dispatch)
    [found] = make_trainer(strategy).validate(module, data, verbose=False)
    predicted: Any = make_trainer(strategy).predict(module, data)
    return found, predicted


ONE_ROW = {"micro_batch_size": 1}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
PADDED = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}  # room for all tokens


@pytest.mark.parametrize(
    ("strategy", "dispatch"),
    [
        pytest.param({**EP2, **ONE_ROW}, {}, id="ep2"),
        pytest.param({**EP2, **PP2, **ONE_ROW}, {}, id="ep2-pp2"),
        pytest.param(EP2, ALLGATHER, id="allgather"),
        pytest.param({**EP2, **TWO_ROWS}, ALLGATHER, id="allgather-parts"),
        pytest.param(EP2, PADDED, id="padded"),
    ],
)
def test_ranks_that_share_experts_run_equally_often(strategy: dict[str, Any], dispatch: dict[str, Any]) -> None:
    [(whole, predicted)] = run_ranks(1, with_experts, "auto", dispatch)
    ranks = run_ranks(2 * strategy.get("pipeline_model_parallel_size", 1), with_experts, strategy, dispatch)
    for rank, (found, own) in enumerate(ranks):
        assert found == pytest.approx(whole, rel=1e-5)
        assert torch.equal(torch.cat(own), torch.cat(predicted)[rank % 2 :: 2])


DENSE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.0}


class Rows(IterableDataset[Batch]):
    """Some of 7 rows; row i has i + 1 labels. Its length is unknown."""

    def __init__(self, first: int, end: int, skipped: tuple[int, ...] = ()) -> None:
        self.chosen = [row for row in range(first, end) if row not in skipped]

    def __iter__(self) -> Iterator[Batch]:
        rows: Any = texts(7, 8, 64).dataset
        for row in self.chosen:
            labels = rows[row]["labels"].clone()
            labels[row + 1 :] = -100
            yield {"tokens": rows[row]["tokens"], "labels": labels}


def on_streams(strategy: Any, model: dict[str, Any], first_copy: int, limit: int | None) -> dict[str, float]:
    """Validate streams, of which model copy 0 has the first rows, and copy 1 the others."""
    module = Experts(64, 8, model)

    class Streams(pl.LightningDataModule):
        def val_dataloader(self) -> Any:
            shares = [(0, first_copy), (first_copy, 7)]
            return DataLoader(Rows(*shares[data_shard(self.trainer).rank]), batch_size=2)

    trainer = make_trainer(strategy, limit_val_batches=limit)
    [found] = trainer.validate(module, datamodule=Streams(), verbose=False)
    return dict(found)


def all_rows(model: dict[str, Any], skipped: tuple[int, ...]) -> dict[str, float]:
    [found] = make_trainer("auto").validate(
        Experts(64, 8, model), DataLoader(Rows(0, 7, skipped), batch_size=1), verbose=False
    )
    return dict(found)


@pytest.mark.parametrize(
    ("strategy", "model", "limit", "skipped"),
    [({}, DENSE, 2, (4,)), (EP2, EXPERTS, None, ()), (EP2, EXPERTS, 2, (4,))],
    ids=["limit", "experts", "experts-limit"],
)
def test_every_row_of_unequal_streams_counts_once(
    strategy: dict[str, Any], model: dict[str, Any], limit: int | None, skipped: tuple[int, ...]
) -> None:
    [whole] = run_ranks(1, all_rows, model, skipped)
    for found in run_ranks(2, on_streams, strategy, model, 5, limit, timeout=40):
        assert found == pytest.approx(whole, rel=1e-5)


@on_ranks(2)
def test_a_copy_without_any_row_to_validate_ends_the_run_on_every_rank() -> None:
    with refuses(ValueError, "the val_dataloader has no batch on rank 1"):
        on_streams({}, DENSE, 7, None)


class Shares(pl.LightningDataModule):
    """One or several loaders for each stage, of which each model copy has its own rows."""

    def __init__(self, *shares: tuple[tuple[int, int], ...], is_stream: bool) -> None:
        super().__init__()
        self.shares = shares
        self.is_stream = is_stream

    def predict_dataloader(self) -> Any:
        rank = data_shard(self.trainer).rank  # type: ignore[arg-type]
        streams = [Rows(*share[rank]) for share in self.shares]
        data: list[Any] = streams if self.is_stream else [list(stream) for stream in streams]
        return [DataLoader(rows, batch_size=2) for rows in data]

    val_dataloader = test_dataloader = predict_dataloader


class Counted(Experts):
    """Counts the rows that it predicts, and lets the ranks meet at the end."""

    def configure_model(self) -> None:
        super().configure_model()
        self.rows = SumMetric()

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.rows.update(len(batch["tokens"]))
        return super().predict_step(batch, batch_idx)

    def on_predict_epoch_end(self) -> None:
        self.trainer.strategy.reduce(torch.zeros(1))


TWO_LOADERS = ((0, 5), (5, 7)), ((0, 1), (1, 7))


def predicted_shares(strategy: Any, dispatch: dict[str, Any], is_stream: bool) -> tuple[list[list[Tensor]], float]:
    """Predict two loaders, of which each model copy has rows of its own."""
    module = Counted(64, 8, EXPERTS | dispatch)
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    found: Any = trainer.predict(module, datamodule=Shares(*TWO_LOADERS, is_stream=is_stream))
    return found, float(module.rows.compute())


@pytest.mark.parametrize("is_stream", [True, False], ids=["streams", "lists"])
@pytest.mark.parametrize(
    ("strategy", "dispatch"),
    [pytest.param(EP2, {}, id="ep2"), ({**EP2, **PP2}, {}), (EP2, ALLGATHER)],
    ids=["ep2", "ep2-pp2", "allgather"],
)
def test_ranks_that_share_experts_may_predict_unequally_many_batches(
    strategy: dict[str, Any], dispatch: dict[str, Any], is_stream: bool
) -> None:
    [whole] = run_ranks(1, predicted_rows, dispatch)
    stages = strategy.get("pipeline_model_parallel_size", 1)
    ranks = run_ranks(2 * stages, predicted_shares, strategy, dispatch, is_stream, timeout=40)
    for rank, (found, _) in enumerate(ranks):
        for batches, shares in zip(found, TWO_LOADERS, strict=True):
            first, end = shares[rank % 2]
            assert [len(batch) for batch in batches] == [2] * ((end - first) // 2) + [1] * ((end - first) % 2)
            assert torch.equal(torch.cat(batches), whole[first:end])
    assert [count for _, count in ranks] == [14.0] * len(ranks)


def predicted_rows(dispatch: dict[str, Any]) -> Tensor:
    """Predict all rows, one at a time."""
    found: Any = make_trainer("auto").predict(Experts(64, 8, EXPERTS | dispatch), DataLoader(Rows(0, 7)))
    return torch.cat(found)


class Sized(Rows):
    """Says that it has as many rows as all copies together."""

    def __len__(self) -> int:
        return 20


class SizedShares(Shares):
    """A stream for each model copy, with the length of all together."""

    def predict_dataloader(self) -> Any:
        return DataLoader(Sized(*self.shares[0][data_shard(self.trainer).rank]), batch_size=2)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_stream_with_the_length_of_all_shares_is_predicted_to_its_end() -> None:
    data = SizedShares(((0, 5), (5, 7)), is_stream=True)
    trainer = make_trainer(EP2, use_distributed_sampler=False)
    for _ in range(2):
        found: Any = trainer.predict(Counted(64, 8, EXPERTS), datamodule=data)
        assert [len(batch) for batch in found] == [[2, 2, 1], [2]][trainer.global_rank]


@on_ranks(2)
def test_a_copy_without_any_row_to_predict_ends_the_run_on_every_rank() -> None:
    with refuses(ValueError, "the predict_dataloader has no batch on rank 1"):
        make_trainer(EP2).predict(Counted(64, 8, EXPERTS), datamodule=Shares(((0, 7), (7, 7)), is_stream=True))


@pytest.mark.parametrize(("way", "prefix"), [("validate", "val"), ("test", "test")])
@on_ranks(2)
def test_ranks_that_share_experts_evaluate_equally_many_batches_of_known_lengths(way: str, prefix: str) -> None:
    data = Shares(((0, 3), (3, 6)), ((0, 5), (5, 7)), is_stream=False)
    with refuses(ValueError, f"the {prefix}_dataloader 1 has 3 batches on rank 0 and 1 on rank 1"):
        getattr(make_trainer(EP2, use_distributed_sampler=False), way)(Experts(64, 8, EXPERTS), datamodule=data)


@on_ranks(4)
def test_ranks_that_share_no_experts_may_predict_unequally_many_batches() -> None:
    found: Any = make_trainer(EP2).predict(Experts(64, 8, EXPERTS), texts(6, 8, 64, batch_size=1))
    assert len(found) == (2 if dist.get_rank() < 2 else 1)
