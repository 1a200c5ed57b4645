# SPDX-License-Identifier: Apache-2.0
"""The kernels that stand in for compiled ones, against plain formulas in fp64 and the derivatives of those."""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.te_cpu import experts, gemm, layers, quantize
from lightning_mcore.te_cpu.enums import DType, enums
from lightning_mcore.te_cpu.extension import ABSENT, Refused

FP32 = DType.kFloat32


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-3)


def gradients(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad.double())


def call(a: Tensor, ta: bool, b: Tensor, tb: bool, out: Tensor | None = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"bias": None, "gelu": False, "gelu_in": None, "grad": False, "accumulate": False}
    arguments |= changes
    return gemm.generic_gemm(
        a, ta, b, tb, out, None, FP32, arguments["bias"], None, arguments["gelu"], arguments["gelu_in"],
        arguments["grad"], None, 0, arguments["accumulate"], False, alpha=arguments.get("alpha", 1.0),
    )  # fmt: skip


def test_a_product_and_its_gradients() -> None:
    weight, x, dy, bias = numbers(24, 16), numbers(3, 5, 16, seed=1), numbers(3, 5, 24, seed=2), numbers(24, seed=3)
    dx, dweight, dbias = gradients(functional.linear, dy, x, weight, bias)
    close(call(weight, True, x, False, bias=bias)[0], functional.linear(x.double(), weight.double(), bias.double()))
    close(call(weight, False, dy, False, grad=True)[0], dx)
    product, bias_gradient = call(x, False, dy, True, bias=bias, grad=True)[:2]
    close(product, dweight)
    close(bias_gradient, dbias)
    start = numbers(24, 16, seed=4)
    close(call(x, False, dy, True, start.clone(), accumulate=True, alpha=2.0)[0], start.double() + 2 * dweight)


def test_gelu_of_a_product() -> None:
    weight, x, dy = numbers(24, 16), numbers(5, 16, seed=1), numbers(5, 8, seed=2)
    product, _, before, _ = call(weight, True, x, False, gelu=True)
    exact = functional.linear(x.double(), weight.double())
    close(product, functional.gelu(exact, approximate="tanh"))
    close(before, exact, 0.01)  # bf16
    later, values = numbers(8, 24, seed=3), numbers(5, 24, seed=4)
    (expected,) = gradients(
        lambda v: functional.linear(functional.gelu(v, approximate="tanh"), later.double()), dy, values
    )
    close(call(later, False, dy, False, gelu=True, gelu_in=values, grad=True)[0], expected)


@pytest.mark.parametrize("single", [False, True])
def test_a_product_for_each_expert(single: bool) -> None:
    splits = [3, 0, 4]
    weights, x = [numbers(6, 5, seed=i) for i in range(3)], numbers(7, 5, seed=9)
    tokens = list(torch.split(x, splits))
    out = [torch.full((7, 6), 9.0)] if single else [torch.full((n, 6), 9.0) for n in splits]
    empty = [torch.empty(0)] * 3
    rest = ([], 0, False, True, 0)
    gemm.te_general_grouped_gemm(weights, True, tokens, False, out, FP32, splits, empty, None, single, [], False, *rest)
    expected = torch.cat([part.double() @ weight.double().t() for part, weight in zip(tokens, weights, strict=True)])
    close(torch.cat(out), expected)


def test_an_expert_without_tokens_has_no_gradient() -> None:
    x, dy = [numbers(3, 5), numbers(0, 5)], [numbers(3, 6), numbers(0, 6)]
    out, bias = [torch.full((6, 5), 9.0), torch.full((6, 5), 9.0)], [torch.ones(6), torch.ones(6)]
    rest = ([], 0, False, True, 0)
    gemm.te_general_grouped_gemm(x, False, dy, True, out, FP32, [3, 0], bias, None, False, [], True, *rest)
    close(out[0], dy[0].double().t() @ x[0].double())
    close(bias[0], dy[0].double().sum(0))
    assert out[1].count_nonzero() == bias[1].count_nonzero() == 0


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_and_their_gradients(zero_centered: bool) -> None:
    x, weight, bias, dz = numbers(6, 32), numbers(32, seed=1), numbers(32, seed=2), numbers(6, 32, seed=3)
    one = 1.0 if zero_centered else 0.0

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + one)

    y, _, rsigma = layers.rmsnorm_fwd(x, weight, 1e-5, None, None, FP32, 0, zero_centered)
    close(y, rms(x.double(), weight.double()))
    dx, dweight = gradients(rms, dz, x, weight)
    for actual, expected in zip(
        layers.rmsnorm_bwd(dz, x, rsigma, weight, 0, zero_centered), (dx, dweight), strict=True
    ):
        close(actual, expected)
    close(layers.rmsnorm_bwd_add(dz, x, dz, rsigma, weight, 0, zero_centered)[0], dx + dz.double())

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (32,), weight + one, bias, 1e-5)

    y, mean, rsigma = layers.layernorm_fwd(x, weight, bias, 1e-5, None, None, FP32, 0, zero_centered)
    close(y, layer_norm(x.double(), weight.double(), bias.double()))
    expected = gradients(layer_norm, dz, x, weight, bias)
    for one_of, exact in zip(
        layers.layernorm_bwd(dz, x, mean, rsigma, weight, 0, zero_centered), expected, strict=True
    ):
        close(one_of, exact)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x * (x > 0),
    "srelu": lambda x: (x * (x > 0)) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATES = {"glu": lambda x: 1 / (1 + torch.exp(-x)), "swiglu": PLAIN["silu"]} | {
    name.replace("lu", "glu"): PLAIN[name] for name in ("gelu", "qgelu", "relu", "srelu")
}


@pytest.mark.parametrize("name", [*PLAIN, *GATES])
def test_activations_and_their_gradients(name: str) -> None:
    x = 3 * numbers(7, 16)

    def formula(x: Tensor) -> Tensor:
        return PLAIN[name](x) if name in PLAIN else GATES[name](x[..., :8]) * x[..., 8:]

    exact = formula(x.double())
    close(layers.ACTIVATIONS[name](x, None), exact)
    dy = numbers(*exact.shape, seed=1)
    (dx,) = gradients(formula, dy, x)
    close(layers.ACTIVATIONS[f"d{name}"](dy, x, None), dx)
    if name in PLAIN:
        bias, again = layers.ACTIVATIONS[f"dbias_d{name}"](dy, x, None)
        close(again, dx)
        close(bias, dx.sum(0))


@pytest.mark.parametrize("kind", ["scaled_softmax", "scaled_masked_softmax", *layers._CAUSAL])
def test_softmax_and_its_gradient(kind: str) -> None:
    scores, mask = numbers(2, 3, 5, 7), torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    mask[0, :, :, 4:] = True
    blocked = {"scaled_softmax": mask & False, "scaled_masked_softmax": mask}.get(kind)
    if blocked is None:
        blocked = torch.arange(7)[None, :] > torch.arange(5)[:, None] + 2

    def formula(scores: Tensor) -> Tensor:
        return torch.softmax((scores * 0.3).masked_fill(blocked, -math.inf), -1)

    extra = (mask,) if kind == "scaled_masked_softmax" else ()
    result = layers.SOFTMAX[f"{kind}_forward"](scores, *extra, 0.3)
    close(result, formula(scores.double()))
    dy = numbers(2, 3, 5, 7, seed=1)
    close(layers.SOFTMAX[f"{kind}_backward"](dy, result, 0.3), gradients(formula, dy, scores)[0])


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Multiply pairs of channels by ``exp(i * angle)``."""
    size = angles.shape[-1]
    pairs = (x[..., :size:2], x[..., 1:size:2]) if interleaved else x[..., :size].chunk(2, -1)
    turned = (
        torch.complex(*(part.contiguous() for part in pairs))
        * torch.polar(torch.ones_like(angles), angles)[..., :: 2 if interleaved else 1][..., : size // 2]
    )
    joined = (
        torch.stack((turned.real, turned.imag), -1).flatten(-2)
        if interleaved
        else torch.cat((turned.real, turned.imag), -1)
    )
    return torch.cat((joined, x[..., size:]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["NVTE_SBHD", "NVTE_BSHD", "NVTE_THD"])
def test_rotary_positions_and_their_gradient(form: str, interleaved: bool) -> None:
    half = torch.arange(12)[:, None] * 0.7 ** torch.arange(3)
    angles = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    freqs, kind = angles[:, None, None], enums("2.11.0")["NVTE_QKV_Format"][form]
    if form == "NVTE_THD":
        x, bounds = numbers(12, 2, 8), torch.tensor([0, 5, 12])
        own = angles[torch.cat((torch.arange(5), torch.arange(7)))][:, None]
    else:
        x, bounds = numbers(12, 3, 2, 8), None
        own = angles[:, None, None]
    as_rows = x.transpose(0, 1).contiguous() if form == "NVTE_BSHD" else x
    result = layers.fused_rope_forward(as_rows, freqs, None, kind, interleaved, bounds, 1, 0)
    result = result.transpose(0, 1) if form == "NVTE_BSHD" else result
    close(result, rotated(x.double(), own.double(), interleaved))
    dy = numbers(*as_rows.shape, seed=1)
    dx = layers.fused_rope_backward(dy, freqs, None, kind, interleaved, bounds, 1, 0)
    (exact,) = gradients(
        lambda x: rotated(x.transpose(0, 1) if form == "NVTE_BSHD" else x, own.double(), interleaved),
        dy.transpose(0, 1) if form == "NVTE_BSHD" else dy,
        as_rows,
    )
    close(dx, exact)


def test_rotary_positions_of_context_parallel_ranks() -> None:
    freqs = (torch.arange(8)[:, None] * torch.tensor([1.0, 0.5])).repeat(1, 2)[:, None, None]
    x, kind = numbers(8, 1, 2, 4), enums("2.11.0")["NVTE_QKV_Format"]["NVTE_SBHD"]
    whole = layers.fused_rope_forward(x, freqs, None, kind, False, None, 1, 0)
    for rank, rows in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        assert torch.equal(layers.fused_rope_forward(x[rows], freqs, None, kind, False, None, 2, rank), whole[rows])


def test_fused_queries_keys_and_values_are_rotated_apart() -> None:
    kind = enums("2.11.0")["NVTE_QKV_Format"]["NVTE_SBHD"]
    freqs, qkv = numbers(6, 1, 1, 4), numbers(6, 2, 2, 16)
    q, k, v = layers.fused_qkv_rope_forward(qkv, freqs, freqs, None, [8, 4, 4], kind, False, 1, 0)
    assert torch.equal(
        q, layers.fused_rope_forward(qkv[..., :8].reshape(6, 2, 4, 4), freqs, None, kind, False, None, 1, 0)
    )
    assert torch.equal(v, qkv[..., 12:])
    grads = [numbers(*tensor.shape, seed=7) for tensor in (q, k, v)]
    back = layers.fused_qkv_rope_backward(*grads, freqs, freqs, [8, 4, 4], kind, False, 1, 0)
    assert back.shape == qkv.shape
    assert (back * qkv).sum() == pytest.approx(float(sum((a * b).sum() for a, b in zip((q, k, v), grads, strict=True))))


def test_lists_are_scaled() -> None:
    tensors, noop, out = [numbers(4), numbers(5, seed=1)], torch.zeros(1), [torch.zeros(4), torch.zeros(5)]
    quantize.multi_tensor_scale(0, noop, [tensors, out], 3.0)
    assert torch.equal(torch.cat(out), torch.cat(tensors) * 3)
    assert not noop
    quantize.multi_tensor_scale(0, noop, [[torch.tensor([math.inf])], [torch.zeros(1)]], 1.0)
    assert noop


def test_tokens_go_to_their_experts_and_back() -> None:
    chosen = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
    x, probs = numbers(5, 4), numbers(5, 3, seed=1).abs()
    row_map = experts.make_row_id_map(chosen, 5, 3)
    order = [(e, t) for e in range(3) for t in range(5) if chosen[t, e]]
    rows, _, row_probs = experts.permute_with_mask_map(x, row_map, probs, None, 5, 3, 7, 4, None)
    assert torch.equal(rows, torch.stack([x[t] for _, t in order]))
    assert row_probs is not None
    assert row_probs.tolist() == [float(probs[t, e]) for e, t in order]
    y = numbers(7, 4, seed=2)

    def merged(y: Tensor, probs: Tensor) -> Tensor:
        return torch.stack([sum((y[i] * probs[t, e] for i, (e, t) in enumerate(order) if t == token), torch.zeros(4))
                            for token, t in enumerate(range(5))])  # fmt: skip

    close(experts.unpermute_with_mask_map(y, row_map, probs, None, 5, 3, 4)[0], merged(y.double(), probs.double()))
    dy = numbers(5, 4, seed=3)
    actual = experts.unpermute_with_mask_map_bwd_with_merging_probs(dy, row_map, y, probs, 5, 3, 7, 4)
    for one_of, exact in zip(actual, gradients(merged, dy, y, probs), strict=True):
        close(one_of, exact)


def test_chunks_are_sorted_and_sorted_back() -> None:
    x, probs = numbers(9, 2), numbers(9)
    sizes, order = torch.tensor([2, 4, 3]), torch.tensor([2, 0, 1])
    row_map = experts.make_chunk_sort_map(sizes, order, 9, 3)
    moved, moved_probs = experts.sort_chunks_by_map(x, row_map, probs, 9, 2, True)
    parts = torch.split(x, [2, 4, 3])
    assert torch.equal(moved, torch.cat((parts[2], parts[0], parts[1])))
    back = experts.sort_chunks_by_map(moved, row_map, moved_probs, 9, 2, False)
    assert torch.equal(back[0], x)
    assert torch.equal(back[1], probs)  # type: ignore[arg-type]


def test_rows_of_experts_are_padded_and_unpadded() -> None:
    x, padded = numbers(5, 2), torch.ones(12, 2)
    experts.fused_multi_row_padding(x, padded, [2, 3], [4, 8])
    assert torch.equal(padded[[0, 1, 4, 5, 6]], x)
    assert padded[[2, 3, 7, 8, 9, 10, 11]].count_nonzero() == 0
    back = torch.zeros(5, 2)
    experts.fused_multi_row_unpadding(padded, back, [4, 8], [2, 3])
    assert torch.equal(back, x)


def test_the_loss_of_logits_and_its_gradient() -> None:
    logits, target = numbers(2, 3, 7), torch.tensor([[1, 2, -100], [0, 6, 3]])

    def formula(logits: Tensor) -> Tensor:
        losses = -torch.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return losses * (target >= 0)

    losses, gradient = experts.cross_entropy_forward(logits, target, 0.0, False, None, -100)
    close(losses, formula(logits.double()))
    dy = numbers(2, 3, seed=1)
    close(experts.cross_entropy_backward(gradient, dy), gradients(formula, dy, logits)[0])


def test_a_fused_layer_has_the_gradients_that_finite_differences_have() -> None:
    import transformer_engine.pytorch as te

    with cpu_runtime():
        torch.manual_seed(0)
        layer = te.LayerNormLinear(16, 24, bias=True, normalization="RMSNorm", params_dtype=torch.float32)
        x, dy = numbers(32, 16).requires_grad_(), numbers(32, 24, seed=1)
        (layer(x) * dy).sum().backward()
        assert x.grad is not None
        for tensor in (x, *layer.parameters()):
            grad, direction = tensor.grad, numbers(*tensor.shape, seed=2)
            with torch.no_grad():
                sides = []
                for sign in (1, -1):
                    tensor.add_(sign * 1e-2 * direction)
                    sides.append(float((layer(x.detach() if tensor is not x else x) * dy).sum()))
                    tensor.sub_(sign * 1e-2 * direction)
            assert (sides[0] - sides[1]) / 2e-2 == pytest.approx(float((grad * direction).sum()), rel=5e-3, abs=0.02)


def test_every_name_of_the_compiled_module_is_there_or_listed() -> None:
    import transformer_engine
    import transformer_engine_torch

    folder = Path(transformer_engine.__file__).parent / "pytorch"
    files = [*folder.glob("*.py")]
    for name in ("module", "tensor", "attention", "cpp_extensions", "optimizers"):
        files += (folder / name).rglob("*.py")
    used = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tex":
                used.add(node.attr)
            if isinstance(node, ast.ImportFrom) and node.module == "transformer_engine_torch":
                used |= {alias.name for alias in node.names} - {"*"}
    assert len(used) > 90
    missing = {name for name in used if isinstance(getattr(transformer_engine_torch, name), Refused)}
    assert missing <= ABSENT, f"neither there nor listed: {sorted(missing - ABSENT)}"


def test_a_kernel_that_is_not_there_is_refused_in_one_sentence() -> None:
    import transformer_engine_torch

    with pytest.raises(NotImplementedError, match="kernel 'copy_to_kv_cache' is not available on the CPU; leave out"):
        transformer_engine_torch.copy_to_kv_cache()
