# SPDX-License-Identifier: Apache-2.0
"""Megatron's step behind the torch optimizer that the user made.

``configure_optimizers`` returns an ordinary torch optimizer: *the user's*. LR schedulers and callbacks hold on to it.
``factory.py`` puts an :class:`MCoreOptimizer` in its place, which looks like it from outside and makes the step with
one of Megatron's. There are two kinds:

- :class:`RebuiltOptimizer`, for Adam, AdamW and SGD: Megatron's own optimizer steps, and the user's never does.
- :class:`WrappedOptimizer`, for any other, and for an unsharded one of a plain module: Megatron's prepares the
  gradients, and the user's steps.

An example: the user returns ``AdamW(lr=1e-4)`` for one bf16 matrix of 8 elements, on two data-parallel ranks that shard
the optimizer::

    user's AdamW    on both ranks: a group with lr=1e-4 and the matrix; a scheduler lowers lr to 9e-5
    Megatron's      on rank 0: fp32 copies of elements 0-3, with their moments; on rank 1: of elements 4-7
    backward        sums the gradients over the ranks; each rank keeps those of its 4 elements
    step            copies lr=9e-5 into Megatron's group, turns the 4 gradients into fp32, clips them by the norm of all
                    8, steps the 4 copies, writes them to the matrix in bf16, and gathers the other rank's 4

Three words of this file. ``main_grad`` is a parameter's place in Megatron's gradient buffers, to which backward adds.
*Main parameters* are what is stepped in place of the model's parameters: fp32 copies, or one rank's share of them. To
*prepare* gradients is to turn ``main_grad`` into the ``grad`` of what is stepped.

``step`` first runs Lightning's closure. *Inline*, in a plain module, the closure runs backward itself; otherwise
Megatron's schedule has run it when ``training_step`` returns. So the calls come in this order::

    inline     training_step, zero_grad, backward, gradients_changed, unscale, clip_grad_norm
    schedule   training_step (forward, backward, gradients_changed), zero_grad (ignored), unscale, clip_grad_norm

==================  ==================================  ============================================
call                rebuilt                             wrapped
==================  ==================================  ============================================
``unscale``         nothing                             fp16 autocast: prepares, divides by the scale
``clip_grad_norm``  remembers the limit                 prepares, clips
rest of ``step``    Megatron prepares, clips and steps  prepares if nothing did; the user's ``step``
==================  ==================================  ============================================
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from torch.optim import Optimizer

from lightning_mcore.optimizer.layer_wise import LayerWiseShares
from lightning_mcore.optimizer.loss_scale import AgreedGradScaler
from lightning_mcore.optimizer.parts import clamp_gradients, follow_user_groups, parts_with_parameters
from lightning_mcore.optimizer.rules import check_state
from lightning_mcore.parallel.chunks import WrappedChunk, parameters_changed
from lightning_mcore.parallel.consensus import run_on_all_ranks
from lightning_mcore.parallel.groups import process_group

Closure = Callable[[], Any]


@dataclass
class Gradients:
    """What is known about the gradients of the last backward.

    Not attributes of the optimizer itself: ``self.optimizers()`` returns a LightningOptimizer, whose class derives from
    ours, and which reads our attributes by ``__getattr__``. If a method sets one there, it is set on that wrapper only.
    """

    are_summed: bool = False  # over the data-parallel ranks, so no backward may add to them
    are_prepared: bool = False
    overflowed: bool = False  # one was inf or nan when they were prepared
    norm: float | None = None  # before clipping, which measures it
    num_zeros: float | None = None
    max_norm: float = 0.0  # to which the step clips; 0 for none
    max_value: float = 0.0

    def forget(self) -> None:
        """Start over with new gradients."""
        vars(self).update(vars(Gradients()))


class MCoreOptimizer(Optimizer):
    """An optimizer whose step is Megatron's, around the user's; the base of both kinds.

    Its class also derives from the user's (:func:`optimizer_class`), so that ``isinstance(optimizer, AdamW)`` holds. An
    attribute comes from our classes, or else from the user's class, whose methods then run on this object, or else, by
    ``__getattr__``, from the user's optimizer: it keeps ``defaults``, ``state`` and hooks.
    """

    rebuilt: bool  # whether Megatron's own optimizer steps, instead of the user's

    def __init__(
        self,
        user: Optimizer,
        megatron: MegatronOptimizer,  # made for the user's by factory.py
        parameters: Sequence[torch.nn.Parameter],  # the user's, from before Megatron put fp32 copies into the groups
        chunks: Sequence[WrappedChunk],  # of the model, with the gradient buffers
        inline: bool,  # whether Lightning's loop runs backward
        scaler: AgreedGradScaler | None = None,  # None without loss scaling
        shares: LayerWiseShares | None = None,  # None if each rank steps all parameters
    ) -> None:
        # Not super().__init__(), which would create groups, state and hooks beside those of the user's optimizer.
        self.user = user
        self.megatron = megatron
        # Of the last step; norm and zeros are those of the whole model's gradients.
        self.step_skipped = False  # because a gradient was inf or nan
        self.grad_norm: float | None = None  # before clipping; None if nothing measured it
        self.num_zeros_in_grad: float | None = None  # None without OptimizerConfig.log_num_zeros_in_grad
        self.gradients = Gradients()
        self._original_parameters = list(parameters)
        self._chunks = chunks
        self._inline = inline
        self._scaler = scaler
        self._shares = shares

    # ---- what each kind does with a step

    def _step(self, closure: Closure | None, arguments: dict[str, Any]) -> Any:
        """Run the closure, prepare, step, call :meth:`_report`, and return the closure's result."""
        raise NotImplementedError

    def _report(self, stepped: bool, grad_norm: float | None, num_zeros_in_grad: float | None) -> None:
        """Publish what a step did; the order is that in which Megatron's ``step`` returns it."""
        self.step_skipped = not stepped
        self.grad_norm = grad_norm
        self.num_zeros_in_grad = num_zeros_in_grad

    @property
    def user_steps_alone(self) -> bool:
        """Whether the user's ``step`` is all of the step, on all parameters, and without a loss scale."""
        return self._steps_the_models_parameters and self._scaler is None

    @property
    def is_shared_out(self) -> bool:
        """Whether each data-parallel rank steps parameters of its own (the layer-wise distributed optimizer)."""
        return self._shares is not None

    @property
    def whole_groups(self) -> list[list[torch.Tensor]]:
        """The parameters of each of the user's groups, including those that other ranks step."""
        if self._shares is not None:
            return self._shares.groups
        return [group["params"] for group in self.param_groups]

    @property
    def _steps_the_models_parameters(self) -> bool:
        return not (self.rebuilt or self._has_main_parameters or self.is_shared_out)

    @property
    def _has_main_parameters(self) -> bool:
        return any(not isinstance(part, FP32Optimizer) for part in parts_with_parameters(self.megatron))

    # ---- a step: Lightning, the schedule and MCorePrecision call these

    def step(self, closure: Closure | None = None, **arguments: Any) -> Any:
        """Run the closure (forward and backward), step, and return the closure's result.

        ``arguments`` go to the user's ``step``; ``TypeError`` if the step is Megatron's.
        """
        if arguments and not self.user_steps_alone:
            raise TypeError(f"step({', '.join(arguments)}) is not available: the step is Megatron's; leave them out")
        result = self._step(closure, arguments)
        parameters_changed(self._chunks)
        self.user._opt_called = True  # type: ignore[attr-defined]  # or LR schedulers warn that it was never stepped
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, except those that a schedule has just computed."""
        if not self._inline:
            return
        self.gradients.forget()
        self.user.zero_grad(set_to_none)  # a class of the user's may do more in it
        self.megatron.zero_grad(set_to_none)  # those of main parameters
        for parameter in self._parameters:
            parameter.grad = None
        if self._owns_every_buffer:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            return
        # With several optimizers (a GAN), each may zero only its own part of the shared buffers.
        for parameter in self._parameters:
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
                parameter.grad_added_to_main_grad = False  # as zero_grad_buffer() does

    def gradients_changed(self, are_summed: bool = False) -> None:
        """Forget what was known about the gradients, because backward has run."""
        self.gradients.forget()
        self.gradients.are_summed = are_summed
        if self._scaler is not None:
            self._scaler.remember_scale()

    def unscale(self) -> None:
        """Divide the gradients by the loss scale before hooks see them; nothing here, where Megatron's step does it."""

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip by the norm over all ranks of the model, in the step, in place of any other clipping."""
        self.gradients.max_norm = max_norm
        self.gradients.max_value = 0.0

    def clip_grad_value(self, max_value: float) -> None:
        """Clip each element, in the step, in place of any other clipping."""
        self.gradients.max_norm = 0.0
        self.gradients.max_value = max_value

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step; 1 without loss scaling."""
        return float(self._scaler.scale) if self._scaler is not None else 1.0

    @property
    def num_skipped_steps(self) -> int:
        """Steps of this run that were skipped because a gradient was inf or nan."""
        return self._scaler.num_skipped_steps if self._scaler is not None else 0

    def _count_zeros(self) -> float | None:
        zeros: float | None = self.megatron.count_zeros() if self.megatron.config.log_num_zeros_in_grad else None
        return zeros

    # ---- parameters and their groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's groups, which LR schedulers change."""
        return self.user.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.user.param_groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, if the user's optimizer steps the model's own parameters; otherwise ``RuntimeError``."""
        if not self._steps_the_models_parameters:
            raise RuntimeError(
                "parameter groups are fixed once Megatron's optimizer exists; add them in configure_optimizers"
            )
        added = param_group["params"]
        parameters = [added] if isinstance(added, torch.Tensor) else added
        unbuffered = [parameter for parameter in parameters if not hasattr(parameter, "main_grad")]
        if unbuffered and process_group("dp_cp").size() > 1:
            raise RuntimeError(
                f"{len(unbuffered)} parameters of the new group were frozen when training began, so their gradients"
                " would not be reduced over the data-parallel ranks; train them from the start, at a learning rate of 0"
            )
        self.user.add_param_group(param_group)

    @property
    def _parameters(self) -> list[Any]:
        """The original parameters, and those in the groups: fp32 copies, or parameters that were added later."""
        return [*self._original_parameters, *itertools.chain(*(group["params"] for group in self.user.param_groups))]

    @property
    def _owns_every_buffer(self) -> bool:
        # Not by requires_grad, which toggle_optimizer() turns off for the other optimizers' parameters.
        own = {id(parameter) for parameter in self._parameters}
        return all(id(parameter) in own for parameter in self._of_model() if hasattr(parameter, "main_grad"))

    def _of_model(self) -> Iterator[torch.nn.Parameter]:
        """Yield all parameters of the model's chunks; the walk takes milliseconds."""
        for chunk in self._chunks:
            yield from chunk.parameters()

    @functools.cached_property
    def _without_buffers(self) -> list[torch.nn.Parameter]:
        """The model's parameters that have no place in the gradient buffers."""
        return [parameter for parameter in self._of_model() if not hasattr(parameter, "main_grad")]

    def _check_nothing_was_unfrozen(self) -> None:
        """Raise ``RuntimeError`` for a parameter whose gradient would not be summed over the ranks, or not be used."""
        # Only parameters that needed gradients when the model was wrapped have a place in the buffers.
        if self.user_steps_alone and process_group("dp_cp").size() == 1:
            return
        unfrozen = [parameter for parameter in self._without_buffers if parameter.grad is not None]
        if unfrozen:
            raise RuntimeError(
                f"{len(unfrozen)} parameters were frozen when training began and have gradients now, the first of shape"
                f" {list(unfrozen[0].shape)}, but Megatron reduces and steps only what was trained from the start; give"
                " them a group with a learning rate of 0 until then"
            )

    # ---- state, for checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as the user's optimizer would if there are no main parameters."""
        if not self._has_main_parameters:
            return self._user_state_dict()
        groups = []
        for group in self.user.param_groups:
            groups.append({name: value for name, value in group.items() if name != "params"})
        return {"megatron": self.megatron.state_dict(), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; ``ValueError`` if only one of both has main parameters."""
        if self._has_main_parameters:
            if "megatron" not in state_dict:
                raise ValueError(
                    "the checkpoint's optimizer state was saved in another precision or without Megatron, so it lacks"
                    " the fp32 copies of the parameters; load only its weights, or train in the precision of the save"
                )
            self._load_main_parameters(state_dict["megatron"])
            for group, values in zip(self.user.param_groups, state_dict["param_groups"], strict=True):
                group.update(values)
            return
        if "megatron" in state_dict:
            raise ValueError(
                "the checkpoint's optimizer state was saved in another precision, with fp32 copies of the parameters,"
                " which this run does not have; load only its weights, or train in the precision of the save"
            )
        self.user.load_state_dict(state_dict)

    def _user_state_dict(self) -> dict[str, Any]:
        """Return the state of the parameters in the user's groups."""
        return self.user.state_dict()

    def _load_main_parameters(self, state: dict[str, Any]) -> None:
        self.megatron.load_state_dict(state)

    # ---- looking like the user's optimizer

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; ``LearningRateMonitor`` names its columns after it."""
        return self.user

    def __getattr__(self, name: str) -> Any:
        return getattr(self.user, name)

    def __repr__(self) -> str:
        return repr(self.user)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.user,)  # a pickled trainer carries the user's optimizer; Megatron's holds process groups


class RebuiltOptimizer(MCoreOptimizer):
    """Megatron's Adam, AdamW or SGD in place of the user's.

    Until its step, gradients may be in their buckets, or be only this rank's share, so clipping waits for it.
    """

    rebuilt = True

    def _step(self, closure: Closure | None, arguments: dict[str, Any]) -> Any:
        # The user's step would call its hooks, which torch keeps in these dicts (2.9 to 2.13): the first before the
        # closure, the others after a step that was not skipped.
        for hook in self.user._optimizer_step_pre_hooks.values():
            hook(self, (self,), {})
        result = _evaluate(closure)
        self._check_nothing_was_unfrozen()
        follow_user_groups(self.megatron, self.user.param_groups)
        if self.gradients.max_value:
            self._clip_values_and_step(self.gradients.max_value)
        else:
            self._set_norm_limit(self.gradients.max_norm)
            self._report(*self.megatron.step())
        if not self.step_skipped:
            for hook in self.user._optimizer_step_post_hooks.values():
                hook(self, (self,), {})
        return result

    def _clip_values_and_step(self, max_value: float) -> None:
        # Megatron has no clipping by value, so its step is taken apart: prepare, clip, step.
        self._set_norm_limit(0.0)
        overflowed = self.megatron.prepare_grads()
        if overflowed:
            self._report(False, None, None)
            return
        norm = self.megatron.get_grad_norm()
        num_zeros = self._count_zeros()
        for part in parts_with_parameters(self.megatron):
            clamp_gradients(part, max_value)
        self._report(self.megatron.step_with_ready_grads(), norm, num_zeros)

    def _set_norm_limit(self, max_norm: float) -> None:
        for part in parts_with_parameters(self.megatron):
            part.config.clip_grad = max_norm  # 0 for none

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Megatron's state, by the parameters that it steps."""
        state: dict[Any, Any] = defaultdict(dict)
        for part in parts_with_parameters(self.megatron):
            state.update(part.optimizer.state)
        return state

    def _user_state_dict(self) -> dict[str, Any]:
        return Optimizer.state_dict(self)  # torch's, which puts Megatron's state and the user's groups together

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; ``ValueError`` if only one of both has main parameters."""
        super().load_state_dict(state_dict)
        if self._has_main_parameters:
            return
        for part in parts_with_parameters(self.megatron):
            for parameter in part.get_parameters():
                if parameter in self.user.state:  # into which torch has loaded it; the step is Megatron's
                    part.optimizer.state[parameter] = self.user.state.pop(parameter)


class WrappedOptimizer(MCoreOptimizer):
    """The user's optimizer inside one of Megatron's, which prepares its gradients.

    That is an ``FP32Optimizer``; or, for bf16 and fp16, a ``Float16OptimizerWithFloat16Params``, which puts fp32 copies
    into the user's groups as main parameters.
    """

    rebuilt = False
    _state_is_checked = False

    def unscale(self) -> None:
        """Divide by the loss scale now if the parameters are fp32; hooks never see the gradients of main parameters."""
        if self._scaler is not None and not self._has_main_parameters:
            self._prepare_grads()

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip by the norm over all ranks of the model, now."""
        self._prepare_grads()
        if not self.gradients.overflowed:
            self.gradients.norm = self.megatron.clip_grad_norm(max_norm)

    def clip_grad_value(self, max_value: float) -> None:
        """Clip each element, now."""
        self._prepare_grads()
        if not self.gradients.overflowed:
            torch.nn.utils.clip_grad_value_(self.megatron.get_parameters(), max_value)

    def _step(self, closure: Closure | None, arguments: dict[str, Any]) -> Any:
        if self.user_steps_alone:
            result = self._step_alone(closure, arguments)
        else:
            result = self._evaluate_and_prepare(closure)
            if not self.gradients.overflowed:
                self.megatron.step_with_ready_grads()  # calls the user's step
                if self._shares is not None:
                    self._shares.send_parameters()
        self._report(not self.gradients.overflowed, self.gradients.norm, self.gradients.num_zeros)
        if not (self._inline or self.step_skipped or self._state_is_checked):
            run_on_all_ranks(lambda: check_state(self.user, process_group("tp").size()))
            self._state_is_checked = True
        return result

    def _step_alone(self, closure: Closure | None, arguments: dict[str, Any]) -> Any:
        if closure is None:
            self._prepare_grads()
            return self.user.step(**arguments)
        # The user's step gets the closure, because it may run it several times (LBFGS).
        evaluate = functools.partial(self._evaluate_and_prepare, closure)
        return self.user.step(closure=evaluate, **arguments)

    def _evaluate_and_prepare(self, closure: Closure | None) -> Any:
        result = _evaluate(closure)
        self._prepare_grads()
        return result

    def _prepare_grads(self) -> None:
        """Prepare and unscale the gradients, once per backward: a second time would undo clipping."""
        gradients = self.gradients
        if gradients.are_prepared:
            return
        gradients.are_prepared = True
        self._check_nothing_was_unfrozen()
        if not self._inline:
            gradients.overflowed = self.megatron.prepare_grads()
        elif self._has_main_parameters:
            gradients.overflowed = self._prepare_visible_grads()
        else:
            # PlainModuleRunner has already made each buffer the grad of its parameter, for hooks. FP32Optimizer does
            # not know of a loss scale.
            gradients.overflowed = self._scaler is not None and self._unscale_visible_grads(self._scaler)
        if not gradients.overflowed:
            gradients.num_zeros = self._count_zeros()

    def _unscale_visible_grads(self, scaler: AgreedGradScaler) -> bool:
        """Divide each ``grad`` by the loss scale; return whether one overflowed on any rank."""
        scaled = [parameter.grad for parameter in self.megatron.get_parameters() if parameter.grad is not None]
        return scaler.unscale(scaled, process_group("dp_cp"))

    def _prepare_visible_grads(self) -> bool:
        """Prepare main parameters from the ``grad`` that hooks see, and restore it; return whether one overflowed."""
        visible = []
        for parameter in self._parameters:
            if hasattr(parameter, "main_grad") and parameter.grad is not None:
                visible.append(parameter)
        for parameter in visible:
            if parameter.grad is not parameter.main_grad:  # a hook has replaced it
                parameter.main_grad.copy_(parameter.grad)
        overflowed: bool = self.megatron.prepare_grads()
        for parameter in visible:
            parameter.grad = parameter.main_grad
        return overflowed

    def _load_main_parameters(self, state: dict[str, Any]) -> None:
        # Megatron's load_state_dict expects fields that only its own groups have. MCorePrecision loads the loss scale.
        self.user.load_state_dict(state["optimizer"])
        copies = itertools.chain(*self.megatron.fp32_from_float16_groups)
        saved = itertools.chain(*state["fp32_from_fp16_params"])
        for copy, value in zip(copies, saved, strict=True):
            copy.data.copy_(value.data)


@functools.cache
def optimizer_class(kind: type[MCoreOptimizer], user: type[Optimizer]) -> type[MCoreOptimizer]:
    """Return the class, such as ``MCoreAdamW``, that derives from ``kind`` and from the user's class."""
    switches = {name: _switch(name) for name in ("train", "eval") if kind is WrappedOptimizer and hasattr(user, name)}
    return type(f"MCore{user.__name__}", (kind, user), switches)


def _switch(name: str) -> Callable[[WrappedOptimizer], None]:
    """Return the method by which a schedule-free optimizer exchanges the weights to train with and to evaluate."""

    def switch(self: WrappedOptimizer) -> None:
        getattr(self.user, name)()
        if self._has_main_parameters:
            self.megatron._copy_main_params_to_model_params()
        parameters_changed(self._chunks)

    return switch


def _evaluate(closure: Closure | None) -> Any:
    """Run a closure, if there is one, with gradients on, which are off inside torch's steps."""
    with torch.enable_grad():
        return closure() if closure is not None else None


def optimizer_after_run(optimizer: Optimizer) -> Optimizer:
    """Return the user's optimizer if it steps alone, and so needs Megatron no longer; otherwise the optimizer."""
    return optimizer.user if isinstance(optimizer, MCoreOptimizer) and optimizer.user_steps_alone else optimizer


def _itself(optimizer: Optimizer) -> Optimizer:
    return optimizer
