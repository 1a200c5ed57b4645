# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer behind the torch optimizer that the user made.

``configure_optimizers`` returns an ordinary torch optimizer; LR schedulers, ``LearningRateMonitor`` and the user keep
references to it. :class:`MCoreOptimizer` replaces it: an instance of the same class that shares its ``param_groups``,
but whose ``step`` is Megatron's. There are two kinds:

* **rebuilt**: Adam, AdamW and SGD become Megatron's optimizer of that name with the same groups. With the distributed
  optimizer, it is sharded over the data-parallel ranks.
* **wrapped**: any other optimizer, and every optimizer of a plain module, does its own stepping. Megatron only prepares
  the gradients, keeps fp32 copies of bf16 parameters, and clips.

``factory.py`` makes both.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from torch.optim import Optimizer

from lightning_mcore.parallel.groups import process_group

if TYPE_CHECKING:
    from lightning_mcore.optimizer.loss_scale import AgreedGradScaler

# One of the four fields by which Megatron tells groups apart on loading; it has no other use, so it carries our index.
GROUP_INDEX = "is_decoupled_lr"
# Others of these fields (megatron-core 0.19); torch's LR schedulers keep values of their own under these names.
_IDENTIFY = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult")
# Kernel options of a group; an offloaded optimizer has its own for each device.
_OF_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable")


@dataclass
class _Gradients:
    """What has happened to the gradients since they were zeroed."""

    # Shared with Lightning's wrapper, which sets its own attributes when zero_grad runs on it.
    are_ready: bool = False
    are_summed: bool = False


class MCoreOptimizer(Optimizer):
    """The user's optimizer with Megatron's step.

    ``parameters`` are the user's, before Megatron put fp32 copies into the groups. If ``rebuilt``,
    ``megatron`` has its own groups, which follow the user's. If ``inline``, ``zero_grad`` also zeroes the gradient
    buffers.
    """

    def __init__(
        self,
        user: Optimizer,
        megatron: MegatronOptimizer,
        parameters: Sequence[torch.nn.Parameter],
        chunks: Sequence[DistributedDataParallel],
        rebuilt: bool,
        inline: bool,
        scaler: "AgreedGradScaler | None" = None,
    ) -> None:
        # Optimizer.__init__ is not called: groups, defaults and hooks belong to the user's optimizer.
        self.user = user
        self.megatron = megatron
        self.rebuilt = rebuilt
        self.grad_norm: float | None = None
        self.num_zeros_in_grad: float | None = None
        self.step_skipped = False
        self._chunks = chunks
        self._inline = inline
        self._clip_value = 0.0
        self._clip_by_value = False
        self._gradients = _Gradients()
        self._overflow = False
        self._scaler = scaler
        self._parameters = list(parameters)
        self.__class__ = _class_of(type(user))  # type: ignore[arg-type]  # a class can be hashed

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; ``LearningRateMonitor`` names its columns after it."""
        return self.user

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's groups, which LR schedulers change."""
        return self.user.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.user.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The user's defaults."""
        return self.user.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Optimizer state by parameter; with Megatron's own optimizer, the keys are the parameters it steps."""
        if not self.rebuilt:
            return self.user.state
        state: dict[Any, Any] = {}
        for part in self._parts:
            state.update(part.optimizer.state)
        return state

    @property
    def gradients_are_summed(self) -> bool:
        """Whether the gradients are already summed over the ranks."""
        return self._gradients.are_summed

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step; 1 without loss scaling."""
        return float(self._scaler.scale) if self._scaler is not None else 1.0

    @property
    def num_skipped_steps(self) -> int:
        """Steps of this run that were skipped because a gradient was inf or nan."""
        return self._scaler.num_skipped_steps if self._scaler is not None else 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, except those that the schedule has just computed."""
        # Under the schedule, backward has already run in training_step, before this zero_grad; keep its gradients.
        if not self._inline:
            return
        self.user.zero_grad(set_to_none)
        self.megatron.zero_grad(set_to_none)
        self._gradients.are_ready = self._gradients.are_summed = False
        # With several optimizers (a GAN), each may zero only its own part of the shared buffers.
        owns_all = self._owns_every_parameter
        if owns_all:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
        for parameter in self._own_parameters:
            parameter.grad = None
            if not owns_all and hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
                parameter.grad_added_to_main_grad = False

    def gradients_changed(self, are_summed: bool = False) -> None:
        """Record that backward has run, or will run under a schedule; the strategy calls it."""
        self._gradients.are_ready, self._gradients.are_summed = False, are_summed
        if self._scaler is not None:
            self._scaler.remember_scale()

    def unscale(self) -> None:
        """Divide the gradients by the loss scale now, if hooks and clipping see the same gradients as the step."""
        if self._scaler is not None and isinstance(self.megatron, FP32Optimizer):
            self._prepare_grads()

    def clip(self, value: float, by_value: bool) -> None:
        """Clip the gradients to ``value`` (norm or largest element; 0 for none) now, or remember it for the step."""
        if value <= 0:
            return
        # Gradients may still be in their buckets, or be only this rank's share: Megatron's step clips.
        if self.rebuilt:
            self._clip_value, self._clip_by_value = value, by_value
            return
        self._prepare_grads()
        if self._overflow:
            return
        if by_value:
            torch.nn.utils.clip_grad_value_(self.megatron.get_parameters(), value)
        else:
            self.grad_norm = self.megatron.clip_grad_norm(value)

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Run the closure (forward and backward) once, step, and return the closure's result.

        ``arguments`` go to the user's ``step``; ``TypeError`` if the step is Megatron's.
        """
        if closure is not None and self.stepped_by_user:  # LBFGS evaluates it several times
            return self.user.step(closure=lambda: self._evaluate(closure), **arguments)
        if arguments:
            raise TypeError(f"step({', '.join(arguments)}) is not available: the step is Megatron's; leave them out")
        if not self.rebuilt:
            return self._step_user(closure)
        result = closure() if closure is not None else None
        self.follow_user_groups()
        succeeded, self.grad_norm, self.num_zeros_in_grad = self._step_megatron()
        self.step_skipped = not succeeded
        self.user._opt_called = True  # type: ignore[attr-defined]  # what an LR scheduler looks for
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state: as the user's optimizer would, unless Megatron keeps fp32 copies of the parameters."""
        if self._has_main_parameters:
            return {"megatron": self.megatron.state_dict(), "param_groups": self._hyperparameters()}
        if self.rebuilt:
            self.user.state = defaultdict(dict, self.state)
        return self.user.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; ``ValueError`` if it lacks fp32 copies that are needed here."""
        if self._has_main_parameters:
            if "megatron" not in state_dict:
                raise ValueError(
                    "the checkpoint's optimizer state was saved in another precision or without Megatron, so it lacks"
                    " the fp32 copies of the parameters; load only its weights, or train in the precision of the save"
                )
            if self.rebuilt:
                self.megatron.load_state_dict(state_dict["megatron"])
            else:
                self._load_wrapped(state_dict["megatron"])
            for group, values in zip(self.user.param_groups, state_dict["param_groups"], strict=True):
                group.update(values)
            return
        self.user.load_state_dict(state_dict)
        if self.rebuilt:
            for part in self._parts:
                for group in part.optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter in self.user.state:
                            part.optimizer.state[parameter] = self.user.state[parameter]

    def _load_wrapped(self, state: dict[str, Any]) -> None:
        """Load like Megatron's ``load_state_dict``, which expects fields that only its own groups have."""
        self.user.load_state_dict(state["optimizer"])
        copies = itertools.chain(*self.megatron.fp32_from_float16_groups)
        saved = itertools.chain(*state["fp32_from_fp16_params"])
        for copy, value in zip(copies, saved, strict=True):
            copy.data.copy_(value.data)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, if the user's optimizer steps the parameters themselves; otherwise ``RuntimeError``."""
        if self.rebuilt or self._has_main_parameters:
            raise RuntimeError(
                "parameter groups are fixed once Megatron's optimizer exists; add them in configure_optimizers"
            )
        added = param_group["params"]
        parameters = [added] if isinstance(added, torch.Tensor) else added
        frozen = [parameter for parameter in parameters if not hasattr(parameter, "main_grad")]
        if frozen and process_group("dp").size() > 1:
            raise RuntimeError(
                f"{len(frozen)} parameters of the new group were frozen when training began, so their gradients would"
                " not be reduced over the data-parallel ranks; train them from the start, at a learning rate of 0"
            )
        self.user.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "user":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.user, name)

    def __repr__(self) -> str:
        return repr(self.user)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.user,)  # a pickled trainer carries the user's optimizer; Megatron's holds process groups

    @property
    def _own_parameters(self) -> list[Any]:
        """The original parameters (Megatron puts fp32 copies into the groups) and those added later."""
        return [*self._parameters, *itertools.chain(*(group["params"] for group in self.user.param_groups))]

    @property
    def _owns_every_parameter(self) -> bool:
        # requires_grad does not tell: toggle_optimizer() turns it off for the parameters of the other optimizers.
        own = {id(parameter) for parameter in self._own_parameters}
        return all(id(p) in own for chunk in self._chunks for p in chunk.parameters() if hasattr(p, "main_grad"))

    @property
    def _has_main_parameters(self) -> bool:
        """Whether Megatron steps copies (in fp32, or of this rank's share) instead of the parameters themselves."""
        return any(not isinstance(part, FP32Optimizer) for part in self._parts)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.user.param_groups]

    @property
    def _parts(self) -> list[MegatronOptimizer]:
        return [part for part in optimizer_parts(self.megatron) if not part.is_stub_optimizer]

    def follow_user_groups(self) -> None:
        """Copy the user's current hyperparameters into Megatron's groups; loads find state by them, too."""
        own = ("params", *_IDENTIFY, *(_OF_IMPLEMENTATION if self.megatron.config.optimizer_cpu_offload else ()))
        # Groups of lr 1e-4 and 3e-4 may be four of Megatron's, with GROUP_INDEX 1, 1, 2, 2 and these rates twice each.
        for group in self.megatron.param_groups:
            user_group = self.user.param_groups[int(group[GROUP_INDEX]) - 1]
            for name, value in user_group.items():
                if name not in own and (name in group or name == "lr"):
                    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
                    group[name] = value.item() if is_number else value
            if not self.megatron.config.optimizer_cpu_offload:
                group.update(fused_kernel(group))

    def _step_megatron(self) -> tuple[bool, float | None, float | None]:
        """Clip and step; return whether it did step, the norm before clipping, and the zeros in gradients."""
        value, by_value = self._clip_value, self._clip_by_value
        self._clip_value, self._clip_by_value = 0.0, False
        for part in self._parts:
            part.config.clip_grad = 0.0 if by_value else value
        if not by_value:
            result: tuple[bool, float | None, float | None] = self.megatron.step()
            return result
        # Megatron has no clipping by value, so its step is taken apart: prepare (True means overflow), clip, step.
        if self.megatron.prepare_grads():
            return False, None, None
        norm = self.megatron.get_grad_norm()
        for part in self._parts:
            _clamp_grads(part, value)
        return self.megatron.step_with_ready_grads(), norm, self._count_zeros()

    def _count_zeros(self) -> float | None:
        zeros: float | None = self.megatron.count_zeros() if self.megatron.config.log_num_zeros_in_grad else None
        return zeros

    def _step_user(self, closure: Callable[[], Any] | None) -> Any:
        result = self._evaluate(closure) if closure is not None else None
        self._prepare_grads()
        self.step_skipped = self._overflow
        if self.step_skipped:
            self.grad_norm = self.num_zeros_in_grad = None
            return result
        self.num_zeros_in_grad = self._count_zeros()
        self.megatron.step_with_ready_grads()
        return result

    @property
    def stepped_by_user(self) -> bool:
        """Whether the user's optimizer steps the model's own parameters, with the gradients as they are."""
        return not self.rebuilt and isinstance(self.megatron, FP32Optimizer) and self._scaler is None

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            result = closure()
        self._prepare_grads()
        self.num_zeros_in_grad = self._count_zeros()
        return result

    def _prepare_grads(self) -> None:
        """Hand Megatron's gradients to the parameters that are stepped, once: a second time would undo clipping."""
        if self._gradients.are_ready:
            return
        if self._inline and not self.rebuilt:
            self._prepare_shown_grads()
        else:
            self._overflow = self.megatron.prepare_grads()
        # Megatron's FP32Optimizer, for a plain module under autocast, does not unscale in prepare_grads.
        if self._scaler is not None and isinstance(self.megatron, FP32Optimizer):
            stepped = self.megatron.get_parameters()
            gradients = [parameter.grad for parameter in stepped if parameter.grad is not None]
            self._overflow = self._scaler.unscale(gradients, process_group("dp_cp"))
        self._gradients.are_ready = True

    def _prepare_shown_grads(self) -> None:
        """Prepare a plain module's gradients; a hook may have replaced the gradient that it was shown."""
        buffered = [p for p in self._own_parameters if hasattr(p, "main_grad")]
        if isinstance(self.megatron, FP32Optimizer) and all(p.main_grad.dtype == p.dtype for p in buffered):
            self._overflow = False
            return
        shown = [p for p in buffered if p.grad is not None]
        for parameter in shown:
            if parameter.grad is not parameter.main_grad:
                parameter.main_grad.copy_(parameter.grad)
        self._overflow = self.megatron.prepare_grads()
        for parameter in shown:
            parameter.grad = parameter.main_grad


@functools.cache
def _class_of(user: type[Optimizer]) -> type[MCoreOptimizer]:
    """Return the one class of all adapters of a user's class, which derives from it, so ``isinstance`` holds."""
    return type(f"MCore{user.__name__}", (MCoreOptimizer, user), {})


def fused_kernel(group: Mapping[str, Any]) -> dict[str, bool]:
    """Return ``{"fused": True}`` for a torch optimizer's group on a GPU whose user chose no kernel.

    torch's default makes several passes over memory, with temporary tensors as large as the group. TransformerEngine's
    groups have no ``fused``.
    """
    chosen = [name for name in _OF_IMPLEMENTATION[1:] if group.get(name)]
    unset = "fused" in group and group["fused"] is None and group.get("foreach") is None and not chosen
    return {"fused": True} if unset and group["params"] and all(p.is_cuda for p in group["params"]) else {}


def _clamp_grads(part: MegatronOptimizer, value: float) -> None:
    """Clip each element of the gradients that ``part`` steps with; exact on a rank's share too."""
    for parameter in part.get_parameters():
        for name in ("grad", "decoupled_grad"):  # the second in a precision-aware optimizer
            if (gradient := getattr(parameter, name, None)) is not None:
                gradient.clamp_(-value, value)


def optimizer_after_run(optimizer: Optimizer) -> Optimizer:
    """Return the user's optimizer if it no longer needs Megatron, because it stepped the model's own parameters."""
    return optimizer.user if isinstance(optimizer, MCoreOptimizer) and optimizer.stepped_by_user else optimizer


def _itself(optimizer: Optimizer) -> Optimizer:
    return optimizer


def optimizer_parts(megatron: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the parts of Megatron's optimizer in order, including stubs; itself if it is not chained."""
    return list(getattr(megatron, "chained_optimizers", [megatron]))
