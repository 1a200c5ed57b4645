# SPDX-License-Identifier: Apache-2.0
"""Products of several adapters are added to their own rows of a layer's output."""

import pytest
import torch
from torch import Tensor

from lightning_mcore.layers.adapter_products import Places, Run, add_products

# Which adapter each row of a layer belongs to, "." for none; all its adapters; its equal parts
LAYERS = {
    "one": ("aaaa", "a", 1),
    "in turn": ("aaabbb", "ab", 1),
    "grouped": ("aabcaabc", "abc", 2),
    "with a gap": ("aa.baa.b", "ab", 2),
    "no pattern": ("aabacb", "abc", 1),
    "unequal parts": ("abbaab", "ab", 1),
    "rows of one on this rank": ("aaaa", "ab", 1),
}


def places_of(owners: str, names: str) -> Places:
    runs: list[Run] = []
    counted = dict.fromkeys(names, 0)
    for start, owner in enumerate(owners):
        if owner == ".":
            continue
        if start and owners[start - 1] == owner:
            runs[-1] = Run(runs[-1].adapter, runs[-1].start, runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(Run(names.index(owner), start, counted[owner], 1))
        counted[owner] += 1
    return Places.of(runs, len(names), len(owners))


GIVEN = {
    "a parameter": lambda output: output,
    "computed": lambda output: output * 1,
    "a view": lambda output: (output * 1).view(output.shape),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("padding", [0, 1])  # rows of a B after its own
@pytest.mark.parametrize("layer", LAYERS)
def test_sums_and_gradients_are_those_of_one_matrix_row_by_row(layer: str, padding: int, given: str) -> None:
    (owners, names, parts), rank = LAYERS[layer], 3
    places = places_of(owners, names)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    output, hidden = random(5, 2, len(owners)), random(5, 2, rank * len(names))
    all_b = [random(owners.count(name) + padding, rank) for name in names]
    whole, counted = [], dict.fromkeys(names, 0)
    for owner in owners:
        row = torch.zeros(rank * len(names), dtype=torch.float64)
        if owner != ".":
            index = names.index(owner)
            row = torch.cat((row[: rank * index], all_b[index][counted[owner]], row[rank * (index + 1) :]))
            counted[owner] += 1
        whole.append(row)
    inputs, weights = [output, hidden, *all_b], random(5, 2, len(owners)).detach()

    found = add_products(GIVEN[given](output), hidden, all_b, places)
    expected = output + hidden @ torch.stack(whole).t()

    assert places.parts == parts
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(each, inputs, weights, materialize_grads=True) for each in (found, expected))
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other)
