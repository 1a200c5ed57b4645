# SPDX-License-Identifier: Apache-2.0
"""Fused attention and context parallelism's arithmetic on packed rows, against plain formulas in fp64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore.te_cpu import attention as kernels
from lightning_mcore.te_cpu.enums import enums

KINDS = enums("2.11.0")
HEADS, GROUPS, WIDTH = 4, 2, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(q: Tensor, k: Tensor, v: Tensor, mask: str, window: tuple[int, int]) -> Tensor:
    """Attention of one sequence: [s, h, d], key by key."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    shift = k.shape[0] - q.shape[0] if "CAUSAL" not in mask or "BOTTOM_RIGHT" in mask else 0
    rows = []
    for i in range(q.shape[0]):
        seen = [
            j
            for j in range(k.shape[0])
            if ("CAUSAL" not in mask or j <= i + shift)
            and (window[0] < 0 or j >= i + shift - window[0])
            and (window[1] < 0 or j <= i + shift + window[1])
        ]
        weights = torch.softmax(torch.einsum("hd,jhd->hj", q[i], k[seen]) * 0.3, -1)
        rows.append(torch.einsum("hj,jhd->hd", weights, v[seen]))
    return torch.stack(rows)


def arguments(
    layout: str, mask: str, window: tuple[int, int], dropout: float = 0.0, release: str = "2.11"
) -> list[Any]:
    """Return what stands before the bounds, as TransformerEngine gives it."""
    formats = [KINDS["NVTE_QKV_Format"]["NVTE_SBHD"]] * 2 if release == "2.20" else []
    kinds = (KINDS["NVTE_Bias_Type"](0), KINDS["NVTE_Mask_Type"][f"NVTE_{mask}_MASK"], KINDS["NVTE_Softmax_Type"](0))
    last = [True] if release == "2.20" else []
    return [0.3, dropout, True, KINDS["NVTE_QKV_Layout"][layout], *formats, *kinds, list(window), *last]


@pytest.mark.parametrize("release", ["2.11", "2.20"])
@pytest.mark.parametrize(
    ("mask", "window"),
    [("NO", (-1, -1)), ("CAUSAL", (-1, 0)), ("CAUSAL", (2, 0)), ("CAUSAL_BOTTOM_RIGHT", (-1, 0)), ("NO", (2, 1))],
)
@pytest.mark.parametrize("layout", ["NVTE_SBHD_SBHD_SBHD", "NVTE_BSHD_BSHD_BSHD", "NVTE_THD_THD_THD"])
def test_attention_and_its_gradients(layout: str, mask: str, window: tuple[int, int], release: str) -> None:
    packed = layout == "NVTE_THD_THD_THD"
    longer = 3 if mask == "CAUSAL_BOTTOM_RIGHT" else 0  # keys before the first query
    lengths = [5, 3] if packed else [6, 6]
    bounds = [
        torch.tensor([0, *itertools.accumulate(n + more for n in lengths)], dtype=torch.int32) for more in (0, longer)
    ]
    gaps = [2, 2] if packed else [0, 0]  # padding behind each sequence
    padded = [
        torch.tensor(
            [0, *itertools.accumulate(n + gap + more for n, gap in zip(lengths, gaps, strict=True))], dtype=torch.int32
        )
        for more in (0, longer)
    ]
    sizes = [int(padded[0][-1]), int(padded[1][-1])] if packed else [6, 6 + longer]
    lead = [(size,) if packed else (size, 2) if "SBHD" in layout else (2, size) for size in sizes]
    q, dout = numbers(*lead[0], HEADS, WIDTH), numbers(*lead[0], HEADS, WIDTH, seed=3)
    k, v = numbers(*lead[1], GROUPS, WIDTH, seed=1), numbers(*lead[1], GROUPS, WIDTH, seed=2)
    name = f"PADDING_{mask}".replace("PADDING_NO", "PADDING") if packed else mask
    settings = arguments(layout, name, window, release=release)
    given_padded = padded if packed else [None, None]

    def rows(tensor: Tensor, row: int, which: int) -> Tensor:
        if packed:
            start, length = int(padded[which][row]), int(bounds[which][row + 1] - bounds[which][row])
            return tensor[start : start + length]
        return tensor[:, row] if "SBHD" in layout else tensor[row]

    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    exact = [plain(rows(leaves[0], i, 0), rows(leaves[1], i, 1), rows(leaves[2], i, 1), mask, window) for i in range(2)]
    sum((one * rows(dout.double(), i, 0)).sum() for i, one in enumerate(exact)).backward()  # type: ignore[union-attr]

    out, statistics, state = kernels.fused_attn_fwd(
        6, 6 + longer, True, *settings, *bounds, q, k, v, torch.float32, *given_padded
    )
    for i, one in enumerate(exact):
        assert (rows(out, i, 0).double() - one).abs().max() < 1e-5
    assert statistics.shape == ((sizes[0], HEADS, 1) if packed else (2, HEADS, 6, 1))
    middle = [] if release == "2.20" else [None]
    found = kernels.fused_attn_bwd(
        6, 6 + longer, *settings, True, *bounds, q, k, v, out, dout, torch.float32, *middle, [statistics, state],
        *given_padded,
    )  # fmt: skip
    for gradient, leaf in zip(found, leaves, strict=False):
        assert leaf.grad is not None
        assert (gradient.double() - leaf.grad).abs().max() < 1e-5
        if packed:
            assert gradient[5:7].count_nonzero() == 0 or longer


def test_dropout_is_the_same_in_both_directions() -> None:
    q, k, v = (numbers(6, 1, HEADS, WIDTH, seed=i) for i in range(3))
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    settings = arguments("NVTE_SBHD_SBHD_SBHD", "CAUSAL", (-1, 0), dropout=0.5)
    torch.manual_seed(0)
    out, statistics, state = kernels.fused_attn_fwd(
        6, 6, True, *settings, bounds, bounds, q, k, v, torch.float32, None, None
    )
    dout = numbers(6, 1, HEADS, WIDTH, seed=5)
    gradients = kernels.fused_attn_bwd(
        6, 6, *settings, True, bounds, bounds, q, k, v, out, dout, torch.float32, None, [statistics, state], None, None
    )
    # with the probabilities fixed, attention is linear in the values
    assert float((gradients[2] * v).sum()) == pytest.approx(float((dout * out).sum()), rel=1e-4)
    again = kernels.fused_attn_fwd(6, 6, True, *settings, bounds, bounds, q, k, v, torch.float32, None, None)[0]
    assert not torch.equal(again, out)


def test_parts_of_packed_rows_give_the_whole() -> None:
    """Two steps of context parallelism: all keys at once, or first halves of the keys and then the rest."""
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    x = numbers(10, HEADS, WIDTH)
    halves = [kernels.thd_read_half_tensor(x, bounds, half) for half in (0, 1)]
    assert torch.equal(halves[0], x[[0, 1, 4, 5, 6]])
    assert torch.equal(halves[1], x[[2, 3, 7, 8, 9]])
    assert torch.equal(kernels.thd_read_half_tensor(x.expand(2, -1, -1, -1), bounds, 1)[1], halves[1])
    scores, values = numbers(10, HEADS, 6, seed=1).double(), numbers(6, HEADS, WIDTH, seed=2).double()
    steps = []
    for part in (slice(0, 4), slice(4, 6)):
        statistics = torch.logsumexp(scores[..., part], -1)
        out = torch.einsum("thj,jhd->thd", torch.exp(scores[..., part] - statistics[..., None]), values[part])
        steps.append((out.float(), statistics.float().t().contiguous()))
    second = kernels._half(bounds, 1)
    total = steps[0][1].clone()
    of_step = steps[1][1][:, second]
    kernels.thd_second_half_lse_correction(total, of_step, bounds, True)
    out = torch.zeros(10, HEADS, WIDTH)
    kernels.thd_out_correction(out, steps[0][0], total, steps[0][1], bounds, False, True)
    kernels.thd_out_correction(out, steps[1][0][second], total, of_step, bounds, True, True)
    whole = torch.einsum("thj,jhd->thd", torch.softmax(scores, -1), values)
    assert (out[second] - whole[second]).abs().max() < 1e-5
    first = kernels._half(bounds, 0)
    assert torch.allclose(out[first], steps[0][0][first])
    assert torch.equal(kernels.thd_read_second_half_lse(total, bounds, True, 5), total[:, second])


@pytest.mark.parametrize(("first", "second"), [("add", "copy"), ("copy", "add"), ("add", "none"), ("none", "copy")])
def test_gradients_of_parts_are_put_together(first: str, second: str) -> None:
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    grad, step = numbers(10, 2, 4), numbers(10 if "none" not in (first, second) else 5, 2, 4, seed=1)
    expected = grad.clone()
    for how, index in ((first, [0, 1, 4, 5, 6]), (second, [2, 3, 7, 8, 9])):
        if how != "none":
            own = step[index] if len(step) == 10 else step
            expected[index] = own + grad[index] if how == "add" else own
    kernels.thd_grad_correction(grad, step, bounds, first, second)
    assert torch.equal(grad, expected)


def test_context_parallel_ranks_share_each_sequence() -> None:
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert kernels.thd_get_partitioned_indices(bounds, 12, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert kernels.thd_get_partitioned_indices(bounds, 12, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_packed_sequences_become_rows_and_come_back() -> None:
    bounds, x = torch.tensor([0, 3, 5], dtype=torch.int32), numbers(5, 2)
    rows = kernels.convert_thd_to_bshd(x, bounds, 2, 4)
    assert torch.equal(rows[1], torch.cat((x[3:], torch.zeros(2, 2))))
    assert torch.equal(kernels.convert_bshd_to_thd(rows, bounds, 5), x)


def test_fp8_attention_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        NotImplementedError, match="fp8_dot_product_attention=True is not available on the CPU; leave it"
    ):
        kernels.get_fused_attn_backend(
            True, KINDS["DType"]["kFloat8E4M3"], None, None, KINDS["NVTE_Bias_Type"](0), 0, 0
        )
