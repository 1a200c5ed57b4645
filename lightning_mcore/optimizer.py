# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer behind the torch optimizer that the user made.

``configure_optimizers`` returns an ordinary torch optimizer; LR schedulers, ``LearningRateMonitor`` and the user hold
on to it. :class:`MCoreOptimizer` stands in its place: an instance of the same class that shares its ``param_groups``,
but whose ``step`` is Megatron's. There are two kinds:

* **rebuilt**: Adam, AdamW and SGD become Megatron's optimizer of that name with the same groups (sharded over the
  data-parallel ranks with the distributed optimizer). At each step its groups take the learning rate, weight decay,
  betas and so on from the user's groups, which the LR scheduler moves.
* **wrapped**: any other optimizer, and every optimizer of a plain module, does its own stepping; Megatron only prepares
  the gradients, keeps fp32 copies where the parameters are bf16, and clips.

Lightning calls ``training_step``, ``zero_grad``, ``backward``. After the schedule, which has run backward inside
``training_step``, that ``zero_grad`` must not touch the gradients; the schedule zeroes the buffers before it starts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mcore.process_groups import process_group

# One of the four fields by which Megatron tells groups apart on loading; it has no other use, so it carries our index.
_GROUP_INDEX = "is_decoupled_lr"


@dataclass(frozen=True)
class OptimizerSetting:
    """How Megatron runs the optimizer.

    Args:
        inline: Lightning's own loop runs backward (plain modules), not Megatron's schedule.
        low_precision: Parameters are bf16, the optimizer works on fp32 copies.
        distributed: Shard optimizer state and fp32 copies over the data-parallel ranks.
        overlap_param_gather: The sharded step leaves gathering the parameters to the next forward.
        expert_parallel: Experts live on different ranks, so their gradients have a norm group of their own.
    """

    inline: bool
    low_precision: bool
    distributed: bool
    overlap_param_gather: bool
    expert_parallel: bool


class MCoreOptimizer(Optimizer):
    """The user's optimizer with Megatron's step.

    Args:
        user: What ``configure_optimizers`` returned.
        megatron: Megatron's optimizer over the same parameters.
        parameters: The parameters in the user's groups, before Megatron put fp32 copies in their place.
        chunks: The wrapped model chunks, whose gradient buffers it zeroes.
        rebuilt: Whether ``megatron`` has groups of its own that follow the user's.
        inline: Whether ``zero_grad`` also zeroes the gradient buffers.
    """

    def __init__(
        self,
        user: Optimizer,
        megatron: MegatronOptimizer,
        parameters: Sequence[torch.nn.Parameter],
        chunks: Sequence[DistributedDataParallel],
        rebuilt: bool,
        inline: bool,
    ) -> None:
        # Optimizer.__init__ is not called: groups, defaults and hooks are the user's optimizer's own.
        self.user = user
        self.megatron = megatron
        self.rebuilt = rebuilt
        self.grad_norm: float | None = None
        self.step_skipped = False
        self._chunks = chunks
        self._inline = inline
        self._clip_value = 0.0
        self._grads_are_ready = False
        self._parameters = list(parameters)
        self.__class__ = type(f"MCore{type(user).__name__}", (MCoreOptimizer, type(user)), {})

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; ``LearningRateMonitor`` names its columns after it."""
        return self.user

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's groups, which LR schedulers move."""
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
        """Optimizer state by parameter; with Megatron's own optimizer the keys are the parameters it works on."""
        if not self.rebuilt:
            return self.user.state
        return {p: s for part in self._parts for p, s in part.optimizer.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, except those that the schedule has just made (see the module's text)."""
        if not self._inline:
            return
        self.megatron.zero_grad(set_to_none)
        self._grads_are_ready = False
        owns_all = self._owns_every_parameter
        if owns_all:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
        for parameter in self._own_parameters:
            parameter.grad = None
            if not owns_all and hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
                parameter.grad_added_to_main_grad = False

    def clip(self, value: float, by_value: bool) -> None:
        """Clip the gradients now if they are whole, else remember the norm for the step.

        Args:
            value: The largest norm, or with ``by_value`` the largest element; 0 for no clipping.
            by_value: Clip each element instead of the norm of all.

        Raises:
            ValueError: ``by_value`` where Megatron's optimizer owns the gradients.
        """
        if value <= 0:
            return
        if self.rebuilt and by_value:
            raise ValueError('gradient_clip_algorithm="value" is not available with Megatron\'s optimizer; use "norm"')
        if self.rebuilt:
            self._clip_value = value
            return
        self._prepare_grads()
        if by_value:
            torch.nn.utils.clip_grad_value_(self.megatron.get_parameters(), value)
        else:
            self.grad_norm = self.megatron.clip_grad_norm(value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure (forward and backward), then step.

        Args:
            closure: What Lightning passes; evaluated once, before the step.

        Returns:
            What the closure returned.
        """
        if not self.rebuilt:
            return self._step_user(closure)
        result = closure() if closure is not None else None
        self._follow_user_groups()
        for part in self._parts:
            part.config.clip_grad = self._clip_value
        self._clip_value = 0.0
        succeeded, self.grad_norm, _ = self.megatron.step()
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
        """Load what :meth:`state_dict` returned.

        Raises:
            ValueError: The state has no fp32 copies of the parameters, which this precision needs.
        """
        if self._has_main_parameters:
            if "megatron" not in state_dict:
                raise ValueError(
                    "the checkpoint's optimizer state was saved in another precision or without Megatron, so it lacks"
                    " the fp32 copies of the parameters; load its weights alone, or train in the precision of the save"
                )
            self.megatron.load_state_dict(state_dict["megatron"])
            for group, values in zip(self.user.param_groups, state_dict["param_groups"], strict=True):
                group.update(values)
            return
        self.user.load_state_dict(state_dict)
        if self.rebuilt:
            for part in self._parts:
                for group in part.optimizer.param_groups:
                    part.optimizer.state.update(
                        {p: self.user.state[p] for p in group["params"] if p in self.user.state}
                    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, where the user's optimizer does its own stepping on the parameters themselves.

        Raises:
            RuntimeError: Megatron's optimizer has fixed its groups.
        """
        if self.rebuilt or self._has_main_parameters:
            raise RuntimeError(
                "parameter groups are fixed once Megatron's optimizer is made; add them in configure_optimizers"
            )
        self.user.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "user":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self.user, name)

    def __repr__(self) -> str:
        return repr(self.user)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.user,)  # a pickled trainer carries the user's optimizer; Megatron's holds process groups

    @property
    def _own_parameters(self) -> list[Any]:
        """The parameters as they were given (Megatron puts fp32 copies in the groups) and those added since."""
        return [*self._parameters, *(p for group in self.user.param_groups for p in group["params"])]

    @property
    def _owns_every_parameter(self) -> bool:
        own = {id(parameter) for parameter in self._own_parameters}
        return all(id(p) in own for chunk in self._chunks for p in chunk.parameters() if p.requires_grad)

    @property
    def _has_main_parameters(self) -> bool:
        """Whether Megatron steps copies of the parameters (in fp32, or of this rank's share) instead of themselves."""
        return any(not isinstance(part, FP32Optimizer) for part in self._parts)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.user.param_groups]

    @property
    def _parts(self) -> list[MegatronOptimizer]:
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in parts if not part.is_stub_optimizer]

    def _follow_user_groups(self) -> None:
        for group in self.megatron.param_groups:
            user_group = self.user.param_groups[int(group[_GROUP_INDEX]) - 1]
            group.update({k: v for k, v in user_group.items() if k != "params" and (k in group or k == "lr")})

    def _step_user(self, closure: Callable[[], Any] | None) -> Any:
        if isinstance(self.megatron, FP32Optimizer) and closure is not None:
            return self.user.step(closure=lambda: self._evaluate(closure))  # LBFGS evaluates it several times
        result = self._evaluate(closure) if closure is not None else None
        self._prepare_grads()
        self.megatron.step_with_ready_grads()
        self._grads_are_ready = False
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._grads_are_ready = False
        with torch.enable_grad():
            result = closure()
        self._prepare_grads()
        return result

    def _prepare_grads(self) -> None:
        """Hand Megatron's gradients to the parameters that are stepped, once: a second time would undo clipping."""
        if not self._grads_are_ready:
            self.megatron.prepare_grads()
            self._grads_are_ready = True


def _itself(optimizer: Optimizer) -> Optimizer:
    return optimizer


def make_optimizer(
    user: Optimizer, chunks: Sequence[DistributedDataParallel], setting: OptimizerSetting
) -> MCoreOptimizer:
    """Put Megatron's step behind a torch optimizer.

    Collective over the world.

    Args:
        user: A torch optimizer over parameters of the chunks.
        chunks: The model chunks, wrapped in Megatron's DistributedDataParallel.
        setting: How Megatron runs it.

    Returns:
        An optimizer of the user's class.

    Raises:
        TypeError: The optimizer cannot be rebuilt where it must be.
        ValueError: A parameter of the model needs gradients but is in no group.
    """
    rebuildable = _rebuilt_fields(user) is not None
    if (setting.distributed or setting.expert_parallel) and not rebuildable:
        need = "use_distributed_optimizer=True" if setting.distributed else "expert_model_parallel_size > 1"
        raise TypeError(
            f"{need} needs torch's Adam, AdamW or SGD without amsgrad, maximize, dampening or nesterov; "
            f"got {type(user).__name__}"
        )
    rebuilt = setting.distributed or (rebuildable and not setting.inline)
    parameters = [parameter for group in user.param_groups for parameter in group["params"]]
    megatron = _rebuild(user, chunks, setting) if rebuilt else _wrap(user, setting)
    return MCoreOptimizer(user, megatron, parameters, chunks, rebuilt=rebuilt, inline=setting.inline)


def _rebuilt_fields(user: Optimizer) -> dict[str, Any] | None:
    """Return the fields of Megatron's OptimizerConfig that make the same optimizer, None where there are none."""
    d = user.defaults
    if d.get("maximize") or d.get("amsgrad") or d.get("nesterov") or d.get("dampening"):
        return None
    if type(user) in (Adam, AdamW):
        decoupled = type(user) is AdamW or bool(d.get("decoupled_weight_decay"))
        beta1, beta2 = d["betas"]
        return {
            "optimizer": "adam",
            "lr": float(d["lr"]),
            "weight_decay": d["weight_decay"],
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": d["eps"],
            "decoupled_weight_decay": decoupled,
        }
    if type(user) is SGD:
        return {
            "optimizer": "sgd",
            "lr": float(d["lr"]),
            "weight_decay": d["weight_decay"],
            "sgd_momentum": d["momentum"],
        }
    return None


def _config(fields: dict[str, Any], setting: OptimizerSetting) -> OptimizerConfig:
    return OptimizerConfig(
        bf16=setting.low_precision,
        params_dtype=torch.bfloat16 if setting.low_precision else torch.float32,
        use_distributed_optimizer=setting.distributed,
        overlap_param_gather=setting.overlap_param_gather,
        clip_grad=0.0,
        **fields,
    )


def _rebuild(
    user: Optimizer, chunks: Sequence[DistributedDataParallel], setting: OptimizerSetting
) -> MegatronOptimizer:
    fields = _rebuilt_fields(user)
    assert fields is not None
    _check_every_parameter_is_grouped(user, chunks)
    hyperparameters = (
        ("lr", "weight_decay", "betas", "eps")
        if fields["optimizer"] == "adam"
        else (
            "lr",
            "weight_decay",
            "momentum",
        )
    )
    overrides = {}
    for index, group in enumerate(user.param_groups, start=1):
        key = ParamKey(with_name_predicate=_MemberOf(index, group["params"]).predicate())
        values = {name: group[name] for name in hyperparameters}
        overrides[key] = {_GROUP_INDEX: index, **values, "lr": float(group["lr"])}
    return get_megatron_optimizer(
        _config(fields, setting), list(chunks), config_overrides=overrides, use_gloo_process_groups=False
    )


class _MemberOf:
    """Tells Megatron which parameters belong to a user's group."""

    def __init__(self, index: int, parameters: list[torch.nn.Parameter]) -> None:
        self._index = index
        self._members = {id(parameter) for parameter in parameters}

    def predicate(self) -> ParamWithNamePredicate:
        return ParamWithNamePredicate(
            name=f"group_{self._index}", fn=lambda parameter, name: id(parameter) in self._members
        )


def _check_every_parameter_is_grouped(user: Optimizer, chunks: Sequence[DistributedDataParallel]) -> None:
    grouped = {id(parameter) for group in user.param_groups for parameter in group["params"]}
    named = (pair for chunk in chunks for pair in chunk.module.named_parameters())
    missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in grouped]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters need gradients but are in no group of the optimizer, the first is "
            f"{missing[0]!r}; add them in configure_optimizers or freeze them with requires_grad_(False)"
        )


def _wrap(user: Optimizer, setting: OptimizerSetting) -> MegatronOptimizer:
    config = _config({"optimizer": "sgd", "lr": 0.0}, setting)
    if setting.low_precision:
        megatron: MegatronOptimizer = Float16OptimizerWithFloat16Params(user, config, None, _no_initial_state)
    else:
        megatron = FP32Optimizer(user, config, _no_initial_state)
    megatron.grad_stats_parallel_group = process_group("model")
    megatron.tp_group = process_group("tp")
    return megatron


def _no_initial_state(optimizer: Optimizer, config: OptimizerConfig | None = None) -> None:
    """Leave the state to the user's optimizer, which makes it at its first step."""
