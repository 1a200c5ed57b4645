# SPDX-License-Identifier: Apache-2.0
"""What a rank does to its GPU, seen operator by operator: memory, collectives, waits.

Inside ``with Counts(...)``, tensors on the CPU are real and computed, and those on CUDA are fake: they have a shape and
a dtype, but no values. So everything that depends on values of the device (``.item()``, a copy to the host) is seen,
and answered with ones. On a GPU, such a read waits until all work before it is done.

PyTorch's ``MemTracker`` also follows storages, but it knows neither Megatron's optimizers nor which module holds what
at the peak, it stops at a second microbatch, and it takes time proportional to the modules at each operator.

Example::

    with Counts() as counts:
        weight = torch.ones(1024, 256, device="cuda")  # 1 MiB
        (weight @ weight.T).sum().item()  # 4 MiB, and 512 bytes
    counts.memory.peak  # 5,243,392
    counts.waits  # {("file.py:3", "reads a value"): 1}
"""

import contextlib
import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from megatron import core
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mcore.parallel.pipeline import Pipeline

_ALLOCATED = 512  # bytes of which PyTorch's CUDA allocator hands out multiples
_REAL_COPY = 2**20  # bytes up to which a copy to the host gets (assumed) values
_OURS = Path(__file__).parents[1]
# Beginnings of paths, because a user's project may lie in a folder named torch or lightning_mcore
_OF_TORCH = (f"{Path(torch.__file__).parent}{os.sep}", f"{_OURS / 'rehearsal'}{os.sep}")
_OF_OTHERS = (*_OF_TORCH, f"{_OURS / 'te_cpu'}{os.sep}", contextlib.__file__, functools.__file__)
# Megatron may be a checkout
_OF_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (_OURS, Path(core.__file__).parent))
# Functions that do not get 1 for what they read: whether gradients have overflowed, whether a metric has seen NaNs, and
# whether Megatron (0.19) clips some parameters separately
_ANSWERS = {"_unscale_main_grads_and_check_for_nan": 0, "_cast_and_nan_check_input": 0, "has_grad_norm_group": 0}

_KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
    "reduce_": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
aten = torch.ops.aten
# Operators whose output has as many elements as values say, and its shape if there are ``count`` of them
_COUNTED: dict[Any, Callable[[Any, int], list[int]]] = {
    aten.nonzero.default: lambda args, count: [count, args[0].dim()],
    aten.masked_select.default: lambda args, count: [count],
    aten.repeat_interleave.Tensor: lambda args, count: [count],
}


@dataclass
class Memory:
    """Bytes of the tensors that exist, and those at the peak, by holder: module and kind."""

    now: int = 0
    peak: int = 0
    held: Counter[tuple[str, str]] = field(default_factory=Counter)
    at_peak: Counter[tuple[str, str]] = field(default_factory=Counter)
    _is_newest: bool = False

    def add(self, size: int, holder: tuple[str, str]) -> None:
        """Count a new tensor."""
        self.now += size
        self.held[holder] += size
        if self.now > self.peak:
            self.peak, self._is_newest = self.now, True

    def free(self, size: int, holder: tuple[str, str]) -> None:
        """Count a tensor that has gone."""
        self.keep_holders()
        self.now -= size
        self.held[holder] -= size

    def keep_holders(self) -> None:
        """Copy the holders if this is the peak; memory that still grows need not be copied at each tensor."""
        if self._is_newest:
            self.at_peak, self._is_newest = self.held.copy(), False

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak, self._is_newest = self.now, True


@dataclass
class _Storage:
    size: int
    holder: tuple[str, str]
    is_counted: bool = True


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what happens inside the ``with`` block; CUDA tensors are fake there."""

    def __init__(
        self,
        group_names: Callable[[ProcessGroup], str] = lambda group: group.group_name,
        assume: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.memory = Memory()
        self.collectives: Counter[tuple[str, str]] = Counter()  # (kind, group): calls
        self.traffic: Counter[tuple[str, str]] = Counter()  # (kind, group): bytes
        self.waits: Counter[tuple[str, str]] = Counter()  # (file:line function, what)
        self.operators = 0
        self.notes: set[str] = set()  # what was assumed
        self.assume = assume or {}  # "file:line", to what it reads, or to how many elements it selects
        self.answers: dict[str, float] = dict(_ANSWERS)
        self.reads: dict[str, float] = {}  # the same for what the user's own lines have read
        self.group_names = group_names
        self.known: Any = WeakIdKeyDictionary()  # device tensors with assumed values
        self.selected: int | None = None  # how many elements masks select now
        self.is_stepping = False  # inside the optimizer
        self._storages: Any = WeakIdKeyDictionary()  # storage: _Storage
        self._in_kernel: list[_Storage] | None = None  # what the kernel that runs has made so far
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(3, device="cuda") then is a copy, which is seen
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        for hook in self._hooks:
            hook.remove()

    # ---- which module runs

    def name_modules(self, root: nn.Module) -> None:
        """Learn the names of modules; layers of a list share one, ``decoder.layers.*``."""
        for name, module in root.named_modules():
            self._names[id(module)] = ".".join("*" if part.isdigit() else part for part in name.split("."))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, Pipeline):  # a stage that is not the last leaves it by an exception, unseen
            return
        self._modules.append(self._names.get(id(module)) or type(module).__name__)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules and not isinstance(module, Pipeline):
            self._modules.pop()

    def _holder(self) -> tuple[str, str]:
        if self.is_stepping:
            return "", "optimizer's temporary memory"
        if self._modules:
            return self._modules[-1], "activations"
        return "", "gradients of activations" if torch._C._current_graph_task_id() >= 0 else "other"

    def claim(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what tensors are, such as ``weights``, however they came to be."""
        for tensor in (part for item in tensors for part in _parts(item)):
            known = self._storages.get(tensor.untyped_storage())
            if known is not None and known.holder[1] != kind:
                self.memory.held[known.holder] -= known.size
                known.holder = ("", kind)
                self.memory.held[known.holder] += known.size

    # ---- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # a fake tensor asks for its device this way
        if any(kind is not Tensor and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a quantized tensor, which calls operators on its parts
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # real memory can be pinned only with a real GPU
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        given = list(_tensors(args)) + list(_tensors(kwargs.values()))
        device = kwargs.get("device")
        if not any(isinstance(tensor, FakeTensor) for tensor in given) and not _is_cuda(device):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        if func is aten.equal.default:
            return _is_same(*args) or bool(self._assumed("compares values"))
        self.operators += not func.is_view
        if func in (aten.copy_.default, aten._to_copy.default):
            return self._copy(func, args, kwargs)
        if func is aten.empty_like.default and torch.device(device or "cuda").type == "cpu" and _is_small(args[0]):
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)  # to be read on the host
        func, args, kwargs = self._with_assumed_count(func, args, kwargs)
        with self.fake:
            output = func(*args, **kwargs)
        self._track(output)
        return output

    def _track(self, output: Any) -> None:
        for tensor in _tensors(output if isinstance(output, list | tuple) else (output,)):
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            size = -(-storage.nbytes() // _ALLOCATED) * _ALLOCATED
            known = self._storages.get(storage)
            if known is None:
                known = self._storages[storage] = _Storage(size, self._holder(), is_counted=self._in_kernel is None)
                if self._in_kernel is None:
                    self.memory.add(size, known.holder)
                else:
                    self._in_kernel.append(known)
                weakref.finalize(storage, self._free, known).atexit = False
            elif size != known.size:
                self._resize(known, size)

    def _resize(self, known: _Storage, size: int) -> None:
        self.memory.free(known.size, known.holder)
        known.size = size
        self.memory.add(size, known.holder)

    def _free(self, known: _Storage) -> None:
        if known.is_counted:
            self.memory.free(known.size, known.holder)
        known.size = 0

    def in_kernel(self, kernel: Callable[[], Any]) -> Any:
        """Call a kernel in plain PyTorch as the one operator that a GPU has: only what it leaves behind is counted."""
        if self._in_kernel is not None:  # of another kernel
            return kernel()
        self._in_kernel, before = [], self.operators
        try:
            with torch.device("cuda", torch.cuda.current_device()):
                return kernel()
        finally:
            made, self._in_kernel, self.operators = self._in_kernel, None, before + 1
            for known in made:
                if known.size:
                    known.is_counted = True
                    self.memory.add(known.size, known.holder)

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that computes on no tensors on a GPU, and none of whose fake ones count."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.operators
            try:
                return self.in_kernel(functools.partial(function, *args, **kwargs))
            finally:
                self.operators = before

        return call

    def resize_storage(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``UntypedStorage.resize_``, which no operator does."""

        def call(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if (known := self._storages.get(storage)) is not None:
                self._resize(known, -(-size // _ALLOCATED) * _ALLOCATED)
            return result

        return call

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy; between host and device, an ordinary copy waits for the device."""
        is_new = func is aten._to_copy.default
        source = args[0] if is_new else args[1]
        target = args[0].device if not is_new else torch.device(kwargs.get("device") or source.device)
        waits = not kwargs.get("non_blocking", False) and (is_new or len(args) < 3 or not args[2])
        value: float = 1
        if source.device.type != target.type and waits:
            if target.type == "cpu":
                value = self._assumed("copies to the host")
            else:
                self.wait("copies to the device")
        if target.type == "cpu":
            dtype = (kwargs.get("dtype") or source.dtype) if is_new else args[0].dtype
            if not is_new and not isinstance(args[0], FakeTensor):
                return args[0].fill_(value)
            if is_new and _is_small(source):
                known = self.known.get(source)
                return torch.full(source.shape, value, dtype=dtype) if known is None else known.to(dtype)
        with self.fake:
            output = func(*args, **kwargs)
        self._track(output)
        return output

    def _with_assumed_count(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a call whose output has the number of elements that is assumed for its line, if there is one."""
        masks = [item for item in args[1] or () if _is_mask(item)] if func is aten.index.Tensor else []
        if not masks and func not in _COUNTED:
            return func, args, kwargs
        given = self.selected if func is aten.masked_select.default else None
        count = given if given is not None else self._given(_caller())
        if count is None:
            return func, args, kwargs
        self._assumed("counts what values select", count)
        if func in _COUNTED:
            dtype = {"dtype": torch.long} if func is aten.nonzero.default else {}
            return aten.new_empty.default, (args[0], _COUNTED[func](args, int(count))), dtype
        # x[mask] with a mask of 2 dimensions is x[rows, columns].
        places = [
            place
            for item in args[1]
            for place in ([masks[0].new_empty(int(count), dtype=torch.long)] * item.dim() if _is_mask(item) else [item])
        ]
        return func, (args[0], places), kwargs

    def _read(self, tensor: Tensor) -> bool | int | float:
        answer = self._assumed("reads a value") if tensor.device.type == "cuda" else 1
        return bool(answer) if tensor.dtype == torch.bool else float(answer) if tensor.is_floating_point() else answer

    def _given(self, frame: Any) -> float | None:
        """Return what the user assumes for a line."""
        where = _place(frame)
        return next((value for place, value in self.assume.items() if f"/{where}".endswith(f"/{place}")), None)

    def _assumed(self, what: str, value: float | None = None) -> float:
        """Count a wait that depends on values, and return what they are assumed to be."""
        if self._in_kernel is not None:
            return 0  # sequences without tokens, and flags that are not set
        frame = _caller()
        self._wait_at(frame, what)
        given = self._given(frame) if value is None else value
        answer = self.answers.get(frame.f_code.co_name, 1) if given is None else given
        file = frame.f_code.co_filename
        if not (file.startswith(_OF_LIBRARIES) or "/site-packages/" in file or "/transformer_engine/" in file):
            self.reads[_place(frame)] = answer
        return answer

    def wait(self, what: str) -> None:
        """Count a wait for the device, at the line outside PyTorch that causes it."""
        self._wait_at(_caller(), what)

    def _wait_at(self, frame: Any, what: str) -> None:
        if self._in_kernel is None:
            self.waits[f"{_place(frame)} {frame.f_code.co_name}", what] += 1

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        kind = next((kind for start, kind in _KINDS.items() if start in name), name)
        groups = [item for item in args if isinstance(item, torch.ScriptObject) and "ProcessGroup" in str(item._type())]
        tensors = list(_tensors(args))
        if any(tensor.device.type == "cuda" for tensor in tensors):
            key = kind, self.group_names(ProcessGroup.unbox(groups[0]))
            self.collectives[key] += 1
            self.traffic[key] += _payload(args)
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        return func(*args, **kwargs)


def _caller() -> Any:
    """Return the frame of the line outside PyTorch and this package's rehearsals that runs now."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OF_OTHERS):
        frame = frame.f_back
    return frame


def _place(frame: Any) -> str:
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_of_torch(file: str) -> bool:
    """Return whether a source file is PyTorch's, or one of those that play a rehearsal."""
    return file.startswith(_OF_TORCH)


def short(file: str) -> str:
    """Return the path of a source file as it is imported: ``lightning_mcore/models/gpt.py``."""
    folders = [folder for folder in (os.getcwd(), *sys.path) if folder and file.startswith(f"{folder}{os.sep}")]
    return file[len(max(folders, key=len, default="")) :].lstrip(os.sep) if folders else file


def _payload(args: Any) -> int:
    """Return the bytes of a collective: of its input or its output, whichever is larger."""
    sides = (item if isinstance(item, list | tuple) else (item,) for item in args)
    return max((sum(tensor.numel() * tensor.element_size() for tensor in _tensors(side)) for side in sides), default=0)


def _tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _parts(tensor: Any) -> Iterator[Tensor]:
    """Yield a fake tensor, or those that a quantized tensor consists of: ``_data``, ``_scale_inv`` and the like."""
    parts = [tensor] if isinstance(tensor, FakeTensor) else [vars(tensor)[key] for key in vars(tensor) if key[0] == "_"]
    yield from (part for part in parts if isinstance(part, FakeTensor))  # not the optimizer's main_param


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory, which PyTorch then does not read to compare them."""
    known = [(it.untyped_storage()._cdata, it.storage_offset(), it.shape, it.stride()) for it in (one, other)]
    return known[0] == known[1]


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _REAL_COPY


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
