# SPDX-License-Identifier: Apache-2.0
"""A flat range of a tensor is cut into blocks of it, and parameters are found where they are stored."""

import itertools
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from lightning_mcore.checkpoint.optimizer_state import PrecisionAwareShare, pieces_of, place_range
from lightning_mcore.checkpoint.rectangles import rectangles
from tests.support.sentences import refuses


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2)], ids=str)
def test_blocks_are_the_range_and_few(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    size = numbers.numel()
    for begin, end in itertools.combinations_with_replacement(range(size + 1), 2):
        blocks = rectangles(shape, begin, end)
        found = [
            numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] for offsets, sizes in blocks
        ]
        flat = torch.cat([block.reshape(-1) for block in found]) if found else torch.zeros(0, dtype=torch.long)
        assert flat.tolist() == list(range(begin, end)), (begin, end)
        assert len(blocks) <= max(2 * len(shape) - 1, 1)


def halves(key: str, tensor: torch.Tensor, replica_id: object, flattened_range: object) -> list[ShardedTensor]:
    """Store a tensor as a gated layer's is: its halves are parts of one global tensor, two of four along its rows."""
    first, second = tensor.chunk(2)
    return [
        ShardedTensor.from_rank_offsets(key, part, (1, index, 4), (0, 2, 3), prepend_axis_num=1, replica_id=(0, 0, 0))
        for part, index in ((first, 1), (second, 3))
    ]


def test_a_range_of_a_parameter_that_is_stored_in_halves_lies_where_megatron_puts_them() -> None:
    whole = torch.arange(3 * 8 * 3, dtype=torch.float32).view(3, 8, 3)  # layers, rows, columns
    local = torch.cat([whole[2, 2:4], whole[2, 6:8]]).contiguous()
    sharded = ShardedTensorFactory("weight", local, halves, lambda parts: torch.cat(parts), (0, 0, 0))
    assert [piece.start for piece in pieces_of(sharded)] == [0, 6]
    for begin, end in itertools.combinations(range(local.numel() + 1), 2):
        target = torch.full_like(whole, torch.nan)
        for block in place_range("state.{}", local.view(-1)[begin:end], sharded, begin):
            assert block.key == "state.weight"
            assert block.global_shape == (3, 8, 3)
            offsets = zip(block.global_offset, block.local_shape, strict=True)
            target[tuple(slice(o, o + s) for o, s in offsets)] = block.data
        filled = ~target.isnan()
        assert int(filled.sum()) == end - begin
        assert torch.equal(target[filled], whole[filled])


def test_parts_that_are_copies_cannot_be_placed() -> None:
    def transposed(key: str, tensor: torch.Tensor, replica_id: object, flattened_range: object) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, tensor.t().contiguous())

    sharded = ShardedTensorFactory("weight", torch.zeros(2, 3), transposed, lambda part: part.t())
    with refuses(RuntimeError, "weight is stored in parts that are not"):
        pieces_of(sharded)


class ScaledState:
    """Keeps the state of one parameter in fp16, divided by a scale, as Megatron's precision-aware optimizer does."""

    scale = 4.0

    def __init__(self) -> None:
        self.kept = {name: torch.zeros(6, dtype=torch.float16) for name in ("param", "exp_avg", "exp_avg_sq")}

    def _get_main_param_and_optimizer_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        unscaled = {name: value.float() * self.scale for name, value in self.kept.items()}
        return {**unscaled, "step": torch.tensor(3.0)}

    def _set_main_param_and_optimizer_states(self, parameter: torch.Tensor, found: dict[str, torch.Tensor]) -> None:
        for name, value in found.items():
            self.kept[name].copy_(value / self.scale)


def test_scaled_state_is_saved_and_loaded_without_its_scale() -> None:
    part: Any = ScaledState()
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    place = ShardedTensor.from_rank_offsets("weight", parameter)
    share = PrecisionAwareShare(part, parameter, parameter, {}, place, begin=0)
    assert share.has_copy
    targets = {**share.targets(["exp_avg"], {}), "param": share.target_of_copy()}
    assert {(target.dtype, target.shape) for target in targets.values()} == {(torch.float32, parameter.shape)}
    targets["exp_avg"].fill_(8.0)
    targets["param"].fill_(2.0)
    share.accept(targets)
    assert part.kept["exp_avg"].tolist() == [2.0] * 6
    assert share.copy().tolist() == [2.0] * 6
    assert {name: value.tolist() for name, value in share.tensors().items()} == {
        "exp_avg": [8.0] * 6,
        "exp_avg_sq": [0.0] * 6,
    }
