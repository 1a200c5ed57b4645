# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine on fake GPUs: its own Python code, with the kernels of ``te_cpu``.

What a layer keeps for the backward pass, gathers and waits for is decided by TransformerEngine's Python code, which
runs as on a GPU. Its kernels are compiled there. Here each one is a function in plain PyTorch, which ``Counts`` takes
for one operator; a kernel that only writes into tensors that exist has nothing to do::

    layer  →  tex.generic_gemm(weight, input, ...)  →  around  →  counts.in_kernel(te_cpu.gemm.generic_gemm)
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mcore.layers import spec
from lightning_mcore.rehearsal.counts import Counts
from lightning_mcore.strategy import fp8_checks
from lightning_mcore.te_cpu import extension, load

WORKSPACE = "cuBLAS workspace"
"""What holds the memory that matrix products need for themselves; ``plan`` leaves it out."""

_IN_PLACE = """
    multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_adam_fp8
    multi_tensor_adam_param_remainder multi_tensor_scale multi_tensor_scale_tensor multi_tensor_sgd
"""


def _norms(chunk: int, overflow: Tensor, lists: Any, per_tensor: bool = False, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors together, [1] fp32, and with ``per_tensor`` each one's."""
    return torch.empty(1), torch.empty(len(lists[0]) if per_tensor else 0)


_WITHOUT_VALUES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_IN_PLACE.split(), lambda *args, **kwargs: None),
    "multi_tensor_l2norm": _norms,
    "multi_tensor_unscale_l2norm": _norms,
}
"""Kernels of optimizers. ``te_cpu`` has none of them, except one that looks for infinite values."""
_STREAMS = 4
"""Streams on which a GPU multiplies the matrices of several experts, each with a workspace of its own."""


def of_engine(counts: Counts) -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` with which TransformerEngine runs on fake tensors, if it is there."""
    if not load.is_prepared():
        return []

    def around(name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name.startswith("get_"):  # a question that the host answers
            return _STREAMS if name == "get_num_cublas_streams" else kernel(*args, **kwargs)
        return counts.in_kernel(partial(_WITHOUT_VALUES.get(name, kernel), *args, **kwargs))

    def workspace(*args: Any) -> Any:
        made = get_workspace(*args)
        counts.claim(made if isinstance(made, list) else [made], WORKSPACE)
        return made

    package = "transformer_engine.pytorch"
    products = importlib.import_module(f"{package}.cpp_extensions.gemm")
    get_workspace = products.get_cublas_workspace
    attention = importlib.import_module(f"{package}.attention.dot_product_attention.utils")
    quantized = importlib.import_module(f"{package}.quantized_tensor").QuantizedTensor
    return [
        (extension, "around", around),
        (products, "get_cublas_workspace", workspace),
        # As for a TransformerEngine with its CUDA library
        *((user, "is_prepared", lambda: False) for user in (spec, fp8_checks)),
        (torch.version, "cuda", "13.0"),
        (
            importlib.import_module(f"{package}.utils"),
            "_get_device_compute_capability",
            lambda device: torch.cuda.get_device_capability(),
        ),
        (quantized, "__new__", staticmethod(quantized.__new__.__wrapped__)),  # not on the CPU
        (attention, "get_attention_backend", _for_fake_tensors(attention.get_attention_backend)),
        (FakeTensor, "__torch_dispatch__", staticmethod(_of_parts(FakeTensor.__torch_dispatch__))),
    ]


def _for_fake_tensors(choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the choice of an attention: fused attention is for ordinary and quantized tensors alone."""
    return lambda params: choose(replace(params, qkv_type=Tensor) if params.qkv_type is FakeTensor else params)


def _of_parts(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fake tensor's dispatch, by which a quantized tensor calls operators on its data, naming its own type."""

    def call(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = tuple(kind for kind in types if not issubclass(kind, FakeTensor))
        if others and not any(isinstance(item, others) for item in args):
            return func(*args, **(kwargs or {}))
        return dispatch(func, types, args, kwargs)

    return call
