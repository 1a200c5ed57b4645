# SPDX-License-Identifier: Apache-2.0
"""Megatron-core on CPU processes: the ``torch.cuda`` names that it needs, implemented on the CPU.

megatron-core uses ``torch.cuda`` in about 500 places, so arguments cannot keep it from doing so. This file and
``te_cpu/patches.py`` are the only ones that patch anything. Inside ``with cpu_runtime():`` those names mean the CPU;
after it everything is as before. The strategy enters it if its root device is the CPU and leaves it at teardown. A
module that runs Megatron layers under another strategy does the same.

Everything is a replaced attribute: torch functions that take a device (:func:`_functions_of_a_device`), and a table
(:func:`_replacements`), each entry with the Megatron call that needs it. It is re-entrant: the outermost ``with``
patches and restores, inner ones only count.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch.jit import _builtins

from lightning_mcore.te_cpu.patches import megatron_names

_CPU = torch.device("cpu")
_FACTORIES = """
    arange as_tensor asarray empty empty_like empty_permuted empty_strided eye full full_like linspace logspace normal
    ones ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor tensor tril_indices
    triu_indices zeros zeros_like
"""
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
_FSDP = "megatron.core.distributed.fsdp"
_depth = 0


@contextlib.contextmanager
def cpu_runtime() -> Iterator[None]:
    """Make the ``torch.cuda`` names that megatron-core uses mean the CPU inside the ``with`` block."""
    global _depth
    with contextlib.ExitStack() as stack:
        if _depth == 0:
            for owner, name, replacement in _replacements():
                stack.enter_context(_replaced(owner, name, replacement))
            stack.enter_context(_one_generator_is_expected())
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # Megatron compiles for CUDA only
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Make ``torch.compile`` return functions as they are, if this torch is built without CUDA."""
    # megatron-core compiles small functions while it is imported, and importing torch's compiler takes longer than
    # everything else in megatron-core.
    with contextlib.ExitStack() as stack:
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            stack.enter_context(_replaced(torch, "compile", _uncompiled))
        yield


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return _uncompiled if function is None else function


@contextlib.contextmanager
def gpu_runtime() -> Iterator[None]:
    """Replace names of megatron-core on a GPU without TransformerEngine, inside the ``with`` block.

    Layers with experts and multi-latent attention of 0.16 would fail, and each optimizer step would wait for the GPU
    once per parameter.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (*_absent_names(), *_many_tensors_at_once()):
            stack.enter_context(_replaced(owner, name, replacement))
        yield


@functools.cache
def _functions_of_a_device() -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` for the torch functions that take a device, the same at each call."""
    # With a TorchFunctionMode, a step of a small model takes a fifth longer.
    with _CPU:
        torch.empty(0)  # the device's context lists its functions at its first use
    named = [(torch, name) for name in _FACTORIES.split()] + [(torch.Tensor, name) for name in _METHODS.split()]
    return [
        *((owner, name, _cuda_means_cpu(getattr(owner, name))) for owner, name in named),
        (torch.Tensor, "to", _moves_to_the_cpu(torch.Tensor.to)),
        (torch.Tensor, "type", _says_a_type_of_cuda(torch.Tensor.type)),
    ]


def _cuda_means_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with ``device="cuda"`` read as the CPU, and ``pin_memory=True`` ignored."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    operator = _builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if operator:
        _builtins._register_builtin(call, operator)  # for torch.jit.script
    return call


def _moves_to_the_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.to``, whose device may also be its first argument."""
    to = _cuda_means_cpu(to)

    @functools.wraps(to)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return to(tensor, *args, **kwargs)

    return call


def _made_on_the_cpu(init_data: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ShardedTensor.init_data``, whose ``torch.empty`` is a default argument and so the real one."""

    @functools.wraps(init_data)
    def call(tensor: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return init_data(tensor, _CPU if _is_cuda(device) else device, *args, **kwargs)

    return call


def _says_a_type_of_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` to say ``torch.cuda.FloatTensor`` for a CPU float tensor.

    Megatron's optimizers compare with that string.
    """

    @functools.wraps(type_of)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(tensor, *args, **kwargs)
        if args or kwargs or result.startswith("torch.cuda."):  # in a subclass
            return result
        return result.replace("torch.", "torch.cuda.", 1)

    return call


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Immediate:
    """Replaces a CUDA stream or event: CPU work is done when the call returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *args: Any, **kwargs: Any) -> "_Immediate":
        return _Immediate()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Immediate") -> float:
        return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class _CpuGenerators:
    """Replaces ``torch.cuda.default_generators``: the CPU's generator at every index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __iter__(self) -> Iterator[torch.Generator]:  # else a loop would never end
        yield torch.default_generator


class _CpuProperties:
    """Replaces the device properties that Megatron reads."""

    name = "cpu"
    major = minor = 0
    multi_processor_count = 1
    total_memory = 0


class _TorchOfCpu(types.ModuleType):
    """Replaces ``torch`` in a file that names a device: ``torch.device("cuda:cpu")`` is the CPU.

    It has nothing compiled, so ``torch.compiler.disable`` need not import torch's compiler.
    """

    compiler = types.SimpleNamespace(disable=_uncompiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: Any) -> torch.device:
        return _CPU if _is_cuda(name) else torch.device(name)


class _CpuAutocast(torch.amp.autocast_mode.autocast):
    """Replaces ``autocast("cuda")`` in the decorators of Megatron's autograd functions."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, dtype=dtype, enabled=enabled)


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing; torch.compile rejects one function under several of its names."""

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return do_nothing


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def _tensor_to_cpu(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace ``maybe_move_tensor_to_cpu``, which converts to numpy only from a GPU; gloo always needs numpy."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _frees_or_forgets(fsdp_buffers: Any) -> Callable[[Any, int], None]:
    """Wrap ``StorageResizeBasedBucketAllocator.free``."""
    free = fsdp_buffers.StorageResizeBasedBucketAllocator.free

    def call(self: Any, bucket_id: int) -> None:
        if bucket_id in self.buckets and not self.buckets[bucket_id].data.untyped_storage().resizable():
            del self.buckets[bucket_id]  # the next allocation makes another
        else:
            free(self, bucket_id)

    return call


def _waits_at_its_end(manager: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_coalescing_manager``: gloo's threads would go on writing into buckets that are freed in stream order."""

    @contextlib.contextmanager
    def call(group: Any, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with manager(group, device, async_ops) as works:
            yield works
        if async_ops:
            works.wait()

    return call


def _scale_in_place(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], scale: float
) -> None:
    """Scale gradients in place; ``local_multi_tensor_scale`` multiplies into a new tensor and copies it back."""
    if lists[0]:  # a rank may have no gradients, and torch rejects an empty list
        torch._foreach_mul_(list(lists[0]), scale)


def _drops_the_last_tokens(drop: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    """Wrap ``apply_router_token_dropping``: among equal numbers, topk takes the first on CUDA, any on the CPU."""

    @functools.wraps(drop)
    def call(probs: torch.Tensor, routing_map: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("drop_policy") != "position":
            return drop(probs, routing_map, *args, **kwargs)
        # Of 3 tokens, the first and last of which chose an expert, the order is 6 2 4: the last is dropped first
        tokens = len(routing_map)
        order = routing_map * tokens + torch.arange(tokens, 0, -1)[:, None]
        _, kept = drop(order, routing_map, *args, **{**kwargs, "drop_policy": "probs"})
        return probs * kept, kept

    return call


def _replacements() -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` with the Megatron code that needs it (0.16.1 to 0.19.2)."""
    cuda = torch.cuda
    is_autocast_enabled, get_autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    token_dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    router = importlib.import_module("megatron.core.transformer.moe.router")
    sharded_tensor = importlib.import_module("megatron.core.dist_checkpointing.mapping").ShardedTensor
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    fsdp_buffers = importlib.import_module(f"{_FSDP}.src.megatron_fsdp.param_and_grad_buffer")
    return [
        *_functions_of_a_device(),
        # exchange_utils: `init_data("cuda")`
        (sharded_tensor, "init_data", _made_on_the_cpu(sharded_tensor.init_data)),
        # `device=torch.cuda.current_device()` in every layer, buffer and communicator
        (cuda, "current_device", lambda: _CPU),
        (cuda, "set_device", _nothing()),
        # p2p_communication, timers, distributed_data_parallel
        (cuda, "synchronize", _nothing()),
        # schedules, optimizer offload
        (cuda, "empty_cache", _nothing()),
        (cuda, "memory_allocated", lambda *args, **kwargs: 0),
        # param_and_grad_buffer, token_dispatcher, shared_experts, p2p_communication
        (cuda, "Stream", _Immediate),
        (cuda, "Event", _Immediate),
        (cuda, "current_stream", lambda *args, **kwargs: _Immediate()),
        (cuda, "default_stream", lambda *args, **kwargs: _Immediate()),
        (cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext()),
        (cuda, "is_current_stream_capturing", lambda: False),
        # param_and_grad_buffer: `.cuda()`; Float16Module: `module.cuda()`
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (torch.nn.Module, "cuda", lambda self, *args, **kwargs: self),
        # tensor_parallel.random: the RNG tracker and checkpoint() fork and restore "the CUDA generator"
        (cuda, "get_rng_state", _get_rng_state),
        (cuda, "set_rng_state", _set_rng_state),
        (cuda.random, "get_rng_state", _get_rng_state),
        (cuda.random, "set_rng_state", _set_rng_state),
        (cuda, "manual_seed", torch.default_generator.manual_seed),
        (cuda, "default_generators", _CpuGenerators()),
        (importlib.import_module("megatron.core.tensor_parallel.random"), "_lazy_call", lambda call, **kwargs: call()),
        # fusions and optimizers query the compute capability
        (cuda, "get_device_properties", lambda *args, **kwargs: _CpuProperties()),
        (cuda, "get_device_capability", lambda *args, **kwargs: (0, 0)),
        # tensor_parallel.layers: `@custom_fwd` and `@custom_bwd` query CUDA's autocast
        (torch, "is_autocast_enabled", lambda kind="cpu": is_autocast_enabled("cpu" if kind == "cuda" else kind)),
        (torch, "get_autocast_dtype", lambda kind: get_autocast_dtype("cpu" if kind == "cuda" else kind)),
        (torch.amp.autocast_mode, "autocast", _CpuAutocast),
        # profiling ranges
        (cuda.nvtx, "range_push", _nothing()),
        (cuda.nvtx, "range_pop", _nothing()),
        *_absent_names(),
        # TransformerEngine on the CPU
        *megatron_names(),
        *_names_without_transformer_engine(),
        # A tensor that NumPy has seen, as a save shows it, cannot be resized, and so not freed
        (fsdp_buffers.StorageResizeBasedBucketAllocator, "free", _frees_or_forgets(fsdp_buffers)),
        (fsdp_buffers, "_coalescing_manager", _waits_at_its_end(fsdp_buffers._coalescing_manager)),
        # MegatronFSDP: `torch.device(f"cuda:{torch.cuda.current_device()}")`
        (importlib.import_module(f"{_FSDP}.src.megatron_fsdp.megatron_fsdp"), "torch", _TorchOfCpu("torch")),
        # clip_grad_by_total_norm_fp32
        (clip_grads, "multi_tensor_scale_impl", _scale_in_place),
        # token_dispatcher: split sizes for gloo's all_to_all
        (moe_utils, "maybe_move_tensor_to_cpu", _tensor_to_cpu),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _tensor_to_cpu),
        # TopKRouter.routing
        (router, "apply_router_token_dropping", _drops_the_last_tokens(router.apply_router_token_dropping)),
    ]


def _names_without_transformer_engine() -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, value)`` that megatron-core has where TransformerEngine and Apex are not installed.

    If they are, it takes their kernels even for models without TransformerEngine's layers, and these read the address
    of a CPU tensor as one on the GPU.
    """
    utils, optimizer, moe_utils, sharded, mixed, clip_grads = (
        importlib.import_module(f"megatron.core.{name}")
        for name in (
            "utils",
            "optimizer",
            "transformer.moe.moe_utils",
            "optimizer.distrib_optimizer",
            "optimizer.optimizer",
            "optimizer.clip_grads",
        )
    )
    return [
        (moe_utils, "te_general_gemm", None),
        (optimizer, "Adam", torch.optim.AdamW),
        (optimizer, "SGD", torch.optim.SGD),
        (optimizer, "USING_PYTORCH_OPTIMIZER", True),
        (sharded, "Adam", torch.optim.Adam),
        (sharded, "USING_TE_OPTIMIZER", False),
        (sharded, "USING_APEX_OPTIMIZER", False),
        (sharded, "HAVE_APEX_OR_TE", False),
        (mixed, "multi_tensor_applier", utils.local_multi_tensor_applier),
        (mixed, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
        (clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier),
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
        (clip_grads, "multi_tensor_scale_tensor_impl", None),
    ]


def _many_tensors_at_once() -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` for megatron-core's own functions on lists of gradients, on a GPU.

    ``local_multi_tensor_l2_norm`` copies the norm of each parameter to the host. Empty with TransformerEngine or Apex.
    """
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    if clip_grads.l2_norm_impl is not importlib.import_module("megatron.core.utils").local_multi_tensor_l2_norm:
        return []
    return [(clip_grads, "l2_norm_impl", _norm_of_all), (clip_grads, "multi_tensor_scale_impl", _scale_in_place)]


def _norm_of_all(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors together, [1] fp32, on their device."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(lists[0]), 2, torch.float32)))[None], None


class _NoLayer(torch.nn.Module):
    """Replaces the class of a layer that does not exist without TransformerEngine."""


def _absent_names() -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` for names that only TransformerEngine binds (0.16.1 to 0.20)."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    latent_attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    multi_token = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    replacements = [
        # moe_utils.RouterGatingLinearFunction reads it unconditionally; it is unbound without TransformerEngine
        (moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None)),
        # multi_latent_attention (0.16.1) mistakes its stand-in names for an installed TransformerEngine
        (latent_attention, "HAVE_TE", has_engine),
    ]
    fsdp = importlib.import_module(f"{_FSDP}.mcore_fsdp_adapter")
    if not has_engine and hasattr(fsdp, "TELinear"):
        # FullyShardedDataParallel (0.16.1) would call isinstance() with a stand-in for TransformerEngine's class
        replacements.append((fsdp, "TELinear", _NoLayer))
    asks = "is_inference_column_parallel_linear"
    if not has_engine and hasattr(multi_token, asks):
        # MultiTokenPredictionLayer (0.20) would call isinstance() with stand-ins for TransformerEngine's classes
        replacements.append((multi_token, asks, lambda module: False))
    return replacements


@contextlib.contextmanager
def _one_generator_is_expected() -> Iterator[None]:
    """Drop Megatron's warning that the CPU's generator changed while it used CUDA's: here they are the same."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


_ABSENT = object()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    # vars() and not getattr(): an attribute that the owner inherits must be deleted again, not set on it.
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
