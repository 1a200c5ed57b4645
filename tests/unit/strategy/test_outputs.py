# SPDX-License-Identifier: Apache-2.0
"""What a step returns for the parts of a batch becomes what it would return for the whole batch."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mcore.strategy.outputs import join_outputs

ROWS = (2, 2, 1)


@dataclass
class Scores:
    scores: Tensor
    kind: str = "scores"


def rows_of(whole: Any) -> list[Any]:
    """Cut a value of five rows as the strategy cuts batches."""
    return [whole[:2], whole[2:4], whole[4:]]


def test_rows_come_back_in_order() -> None:
    whole = torch.arange(15).view(5, 3)
    assert torch.equal(join_outputs(rows_of(whole), ROWS), whole)
    assert torch.equal(
        join_outputs([whole[:2].view(1, 6), whole[2:4].view(1, 6), whole[4:].view(1, 3)], ROWS), whole.view(1, 15)
    )
    assert np.array_equal(join_outputs(rows_of(whole.numpy()), ROWS), whole.numpy())
    assert join_outputs(rows_of(list("abcde")), ROWS) == list("abcde")
    assert join_outputs([["a"], [], ["b", "c"]], ROWS) == ["a", "b", "c"]  # such as what was found in each part
    joined = join_outputs([Scores(part) for part in rows_of(whole)], ROWS)
    assert torch.equal(joined.scores, whole)
    assert joined.kind == "scores"
    joined = join_outputs([OrderedDict(x=part, y=(part, None)) for part in rows_of(whole)], ROWS)
    assert type(joined) is OrderedDict
    assert torch.equal(joined["x"], whole)
    assert torch.equal(joined["y"][0], whole)
    [first, second] = join_outputs([[part, part[:, 0]] for part in rows_of(whole)], ROWS)
    assert torch.equal(first, whole)
    assert torch.equal(second, whole[:, 0])


def test_scalars_are_weighed_by_rows_and_counts_are_added() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)]
    assert join_outputs(losses, ROWS) == 2.0
    assert join_outputs([loss.item() for loss in losses], ROWS) == 2.0
    assert join_outputs([loss.bfloat16() for loss in losses], ROWS).dtype == torch.bfloat16
    assert join_outputs([3, 1, 1], ROWS) == 5
    assert torch.equal(join_outputs([torch.tensor(3), torch.tensor(1), torch.tensor(1)], ROWS), torch.tensor(5))
    weighed = [{"loss": loss, "num_tokens": torch.tensor(n)} for loss, n in zip(losses, (1, 0, 3), strict=True)]
    weighed[1]["loss"] = torch.tensor(float("nan"))  # the mean over no tokens
    assert join_outputs(weighed, ROWS) == {"loss": torch.tensor(3.25), "num_tokens": torch.tensor(4)}
    assert join_outputs([None] * 3, ROWS) is None
    assert join_outputs([True] * 3, ROWS) is True


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(1, 3)], r"tensors of shapes \[1, 3\] and \[2, 3\] and"),
        ([1.0, None, 1.0], "NoneType and float, which cannot be joined"),
        ([{"a": 1}, {"b": 1}, {"a": 1}], "a dict with 'a' for some parts only"),
        ([True, False, True], "different objects of type bool"),
        (["x", "y", "z"], "different objects of type str"),
        ([(1, 2), (1,), (1, 2)], r"tuples with \[1, 2\] entries"),
    ],
)
def test_what_has_no_common_form_is_refused(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join_outputs(outputs, ROWS)
