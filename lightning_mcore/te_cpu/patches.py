# SPDX-License-Identifier: Apache-2.0
"""Make TransformerEngine and megatron-core run on the CPU where they expect a GPU.

TransformerEngine rejects tensors that are not on a GPU, and asks for the GPU's compute capability. Here it takes every
tensor for one on a GPU of compute capability 9.0, which supports every FP8 recipe. Only its own modules are
changed, once, when this room loads it.

In megatron-core, :func:`megatron_names` are replaced. What it takes from any TransformerEngine, even for models without
its layers, is replaced in ``parallel/cpu_runtime.py``.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import CustomOpDef
from torch.overrides import TorchFunctionMode

from lightning_mcore.te_cpu import load

_CAPABILITY = (9, 0)
_ATTENTION = "attention.dot_product_attention"
_ASK_FOR_CUDA = (
    ("module.base", "TransformerEngineBaseModule", "prepare_forward"),
    (f"{_ATTENTION}.dot_product_attention", "DotProductAttention", "forward"),
    (f"{_ATTENTION}.backends", "FusedAttention", "forward"),
    ("permutation", "_moe_permute_mask_map", "forward"),
    ("permutation", "_moe_unpermute_mask_map", "forward"),
    ("permutation", "_moe_chunk_sort", "forward"),
)


class _SeenOnCuda(TorchFunctionMode):
    """Makes every tensor's ``is_cuda`` True."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return func(*args, **(kwargs or {}))


def _seen_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        with _SeenOnCuda():
            result = function(*args, **kwargs)
        return _entered(result) if isinstance(result, contextlib.AbstractContextManager) else result

    return seen


@contextlib.contextmanager
def _entered(manager: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    """Enter a context while tensors seem to be on a GPU; they do not in the body of the ``with`` block."""
    with contextlib.ExitStack() as stack:
        with _SeenOnCuda():
            value = stack.enter_context(manager)
        yield value


def _with_a_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            return function(*args, **kwargs)

    return made


class _WaitedOnce:
    """A message being sent, which can be waited for twice; with gloo a second wait would not end."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait until the message has arrived."""
        if self._work is not None:
            self._work.wait()
        self._work = None


def _waited_once(communicate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(communicate)
    def sent(*args: Any, **kwargs: Any) -> Any:
        return [_WaitedOnce(work) for work in communicate(*args, **kwargs)]

    return sent


def _made_on_the_cpu(new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def made(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **(kwargs | {"device": torch.device("cpu")}))

    return made


def _stays(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Move a quantized tensor; a device alone changes nothing, because all but meta are the CPU.

    Source: ``_FromMXFP8Func`` and ``_FromNVFP4Func`` (2.20.2) move a tensor to the GPU, where they then dequantize it.
    """
    stays = not args and kwargs.keys() == {"device"} and str(kwargs["device"]) != "meta"
    return tensor if stays else torch.Tensor.to(tensor, *args, **kwargs)


def patch_transformer_engine() -> None:
    """Change TransformerEngine's modules so that they run on the CPU."""

    def part(name: str) -> Any:
        return importlib.import_module(f"transformer_engine.pytorch.{name}")

    base = part("module.base").TransformerEngineBaseModule
    base.__init__ = _with_a_device(base.__init__)
    for name, owner, method in _ASK_FOR_CUDA:
        holder = getattr(part(name), owner, None)
        if holder is None:  # a separate function in later releases
            continue
        is_static = isinstance(vars(holder).get(method), staticmethod)
        wrapped = _seen_on_cuda(getattr(holder, method))
        setattr(holder, method, staticmethod(wrapped) if is_static else wrapped)
    quantized = part("quantized_tensor").QuantizedTensor
    quantized.__new__ = _made_on_the_cpu(quantized.__new__)
    part("quantized_tensor").QuantizedTensorStorage.to = _stays
    distributed = part("distributed")  # recomputation restores the random states of the GPU
    distributed._lazy_init = lambda: None
    distributed._lazy_call = lambda call, **kwargs: call()
    parallel = part(f"{_ATTENTION}.context_parallel")
    parallel.flash_attn_p2p_communicate = _waited_once(parallel.flash_attn_p2p_communicate)
    for operator in vars(part("permutation")).values():  # in 2.20
        if isinstance(operator, CustomOpDef):
            operator.register_kernel("cpu", _seen_on_cuda(operator._init_fn))
    part("utils")._get_device_compute_capability = lambda device: _CAPABILITY
    quantization = part("quantization")
    quantization.check_recipe_support = lambda recipe: None
    for name in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        setattr(quantization, f"check_{name}_support", lambda: (True, ""))


def _coalescing_for_gloo(coalescing: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's ``_coalescing_manager``, which sends several collectives together, for lists of several dtypes."""

    # gloo reads all tensors of a list in the dtype of the first, so such a list is sent one by one.
    @contextlib.contextmanager
    def apart(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        one_by_one: list[Any] = []
        with coalescing(group, async_ops=async_ops) as manager:
            yield manager
            world: Any = torch.distributed.distributed_c10d._world
            operations = world.pg_coalesce_state[group or torch.distributed.group.WORLD]
            if len({operation.tensor.dtype for operation in operations}) > 1:
                one_by_one = list(operations)
                operations.clear()
        for operation in one_by_one:
            work = operation.op(operation.dst_tensor, operation.tensor, group=group, async_op=True)
            manager.append(work)
        if not async_ops:
            manager.wait()

    return apart


def megatron_names() -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` for names of megatron-core (0.16.1 to 0.19.2)."""
    if not load.is_prepared():
        return []
    coalescing = _coalescing_for_gloo(torch.distributed.distributed_c10d._coalescing_manager)
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    return [(torch.distributed, "_coalescing_manager", coalescing), (buffers, "_coalescing_manager", coalescing)]
