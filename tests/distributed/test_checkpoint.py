# SPDX-License-Identifier: Apache-2.0
"""Lightning's own checkpointing on models that no rank holds: written as directories, resumed bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.ranks import RanksFailedError, run_ranks
from tests.toy import PlainNet, StagedNet, loader, run_fit

PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def fit(net: type, strategy: Any, precision: Any, epochs: int, folder: str, resume: str | None) -> list[Any]:
    """Rank function: train for some epochs, saving each; return what the steps saw and the weights."""
    module = net()
    callbacks = [ModelCheckpoint(dirpath=folder, save_last=True)] if folder else []
    seen = run_fit(
        module,
        strategy,
        loader(16, 2),
        loader(4, 2),
        ckpt_path=resume,
        max_epochs=epochs,
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        enable_checkpointing=bool(folder),
        callbacks=callbacks,
    )
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return [seen.losses, seen.grad_norms, flat]


def resumes_exactly(world_size: int, net: type, strategy: Any, precision: str, folder: Path) -> None:
    run_ranks(world_size, fit, net, strategy, precision, 1, str(folder), None)
    whole = run_ranks(world_size, fit, net, strategy, precision, 2, "", None)
    resumed = run_ranks(world_size, fit, net, strategy, precision, 2, "", str(folder / "last.ckpt"))
    for (losses, norms, weights), (last_losses, last_norms, last_weights) in zip(whole, resumed, strict=True):
        assert len(last_losses) == len(losses) // 2 > 0
        assert last_losses == losses[len(last_losses) :]
        assert last_norms == norms[len(last_norms) :]
        assert torch.equal(weights, last_weights)


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, PIPELINE), (2, INTERLEAVED), (2, SHARDED), (4, {**PIPELINE, "use_distributed_optimizer": True})],
    ids=["pp2", "pp2-vp2", "dp2-do-overlap", "dp2-pp2-do"],
)
def test_a_split_model_resumes_bit_for_bit(
    world_size: int, strategy: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    resumes_exactly(world_size, StagedNet, strategy, precision, tmp_path)
    assert (tmp_path / "last.ckpt" / "meta.pt").is_file()
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_whole_model_is_one_file_and_resumes_bit_for_bit(precision: str, tmp_path: Path) -> None:
    resumes_exactly(2, PlainNet, {}, precision, tmp_path)
    assert (tmp_path / "last.ckpt").is_file()


@pytest.mark.distributed
@pytest.mark.parametrize("net", [PlainNet, StagedNet])
@pytest.mark.parametrize("first", ["ddp", "mcore"])
def test_one_file_goes_from_ddp_to_mcore_and_back(net: type, first: str, tmp_path: Path) -> None:
    strategies = {"ddp": "ddp", "mcore": {}}
    second = "mcore" if first == "ddp" else "ddp"
    run_ranks(2, fit, net, strategies[first], "32-true", 1, str(tmp_path), None)
    moved = run_ranks(2, fit, net, strategies[second], "32-true", 2, "", str(tmp_path / "last.ckpt"))
    stayed = run_ranks(2, fit, net, strategies[first], "32-true", 2, "", str(tmp_path / "last.ckpt"))
    for (_, _, weights), (_, _, expected) in zip(moved, stayed, strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.distributed
def test_a_directory_that_is_no_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, fit, StagedNet, PIPELINE, "32-true", 1, "", str(tmp_path))
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        assert "is a directory without meta.pt, so it is not a checkpoint of MCoreStrategy" in error
