# SPDX-License-Identifier: Apache-2.0
"""Rules for optimizers, and for ``MCoreStrategy(optimizer_config=...)``.

``optimizer_config`` is Megatron's ``OptimizerConfig`` for settings without another place: optimizer offload, the
precision-aware optimizer and its dtypes, and ``log_num_zeros_in_grad``
(:attr:`~lightning_mcore.optimizer.megatron.MCoreOptimizer.num_zeros_in_grad`). Learning rates belong to the torch
optimizer, clipping to the Trainer, number formats to the precision, sharding to the strategy's arguments. A field that
repeats one of these is an error, and so is an option that would do nothing or that the device does not support.

Each rule is checked as early as it can be: :func:`check_optimizer_config` at construction,
:func:`optimizer_device_faults` when the trainer meets the model, :func:`check_kind` and :func:`optimizer_option_faults`
in ``factory.py``, on every rank, before Megatron creates anything. The ``faults`` are generators over plain data: a run
raises the first sentence, ``lightning-mcore plan`` collects all.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_mcore.config.field_homes import (
    OFFLOAD_FIELDS,
    OPTIMIZER_HOMES,
    OPTIMIZER_NOT_AVAILABLE,
    OTHER_OPTIMIZER_PREFIXES,
    TORCH_OPTIMIZER,
)
from lightning_mcore.config.rules import raise_first

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig
    from torch.optim import Optimizer

    from lightning_mcore.optimizer.trial import LooksAt

_NOT_IN_MEGATRON = ("amsgrad", "maximize", "dampening", "nesterov")
# On a rank's part of a matrix, these would compute wrong numbers without an error, because they look at the whole
# matrix or at its norm. By name, because their packages may not be installed; a subclass counts as its parents. Others
# are recognized by a trial (trial.py), which cannot create all of these.
_WHOLE_MATRICES = {
    "adafactor",
    "came",
    "distributedshampoo",
    "galoreadamw",
    "lamb",
    "lars",
    "lars8bit",
    "muon",
    "muonwithadamw",
    "novograd",
    "shampoo",
    "soap",
}
_GATHERS_MATRICES = {"muonwithadamw"}
_ALL_PARAMETERS = {"lbfgs"}
_OF_AWARE_OPTIMIZER = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def check_optimizer_config(config: "OptimizerConfig | None", distributed: bool) -> None:
    """Raise ``ValueError`` for fields that are set elsewhere, and options whose requirements are missing."""
    from megatron.core.optimizer import OptimizerConfig

    if config is None:
        return
    if not isinstance(config, OptimizerConfig):
        raise TypeError(f"optimizer_config={config!r} is not an OptimizerConfig; make one from megatron.core.optimizer")
    defaults = OptimizerConfig()
    names = [name for name in vars(defaults) if name in OptimizerConfig.__dataclass_fields__]
    if config.use_precision_aware_optimizer:  # Megatron itself turns it off if TransformerEngine is too old for it
        names.remove("store_param_remainders")
    given = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(defaults, name)}
    raise_first(optimizer_config_faults(given, distributed))


def optimizer_config_faults(given: Mapping[str, Any], distributed: bool) -> Iterator[str]:
    """Yield a sentence for each field without Megatron's default that is set elsewhere or lacks another field."""
    for name, value in given.items():
        if name in OPTIMIZER_HOMES:
            yield f"optimizer_config.{name}={value!r} is set in another place: use {OPTIMIZER_HOMES[name]}"
        elif name.startswith(OTHER_OPTIMIZER_PREFIXES):
            yield f"optimizer_config.{name}={value!r} is set in another place: use {TORCH_OPTIMIZER}"
        elif name in OPTIMIZER_NOT_AVAILABLE:
            yield f"optimizer_config.{name}={value!r} is not available: {OPTIMIZER_NOT_AVAILABLE[name]}; leave it out"
    if given.get("use_distributed_optimizer") and not distributed:
        yield (
            "optimizer_config.use_distributed_optimizer=True contradicts the strategy, which does not shard the"
            " optimizer; set MCoreStrategy(use_distributed_optimizer=True)"
        )
    yield from _offload_faults(given)
    yield from megatron_config_faults(given, distributed)


def megatron_config_faults(given: Mapping[str, Any], distributed: bool) -> Iterator[str]:
    """Yield a sentence for each combination that Megatron's config rejects with an assertion.

    Source: ``OptimizerConfig.__post_init__`` (megatron-core 0.16.1 and 0.19.2).
    """
    if given.get("use_precision_aware_optimizer"):
        if not (distributed or given.get("use_distributed_optimizer")):
            yield (
                "optimizer_config.use_precision_aware_optimizer=True needs the distributed optimizer; set"
                " MCoreStrategy(use_distributed_optimizer=True)"
            )
        return
    for name in _OF_AWARE_OPTIMIZER:
        if name in given:
            yield (
                f"optimizer_config.{name}={given[name]} needs use_precision_aware_optimizer=True, because it "
                "describes that optimizer's state; set both"
            )


def _offload_faults(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for an offload that offloads nothing or that Megatron-LM rejects (``validate_args``, 0.16)."""
    if not given.get("optimizer_cpu_offload"):
        for name in OFFLOAD_FIELDS:
            if name in given:
                yield (
                    f"optimizer_config.{name}={given[name]!r} does nothing without optimizer_cpu_offload=True; set both"
                )
        return
    fraction = given.get("optimizer_offload_fraction", 0.0)
    if not 0.0 < fraction <= 1.0:
        yield (
            f"optimizer_config.optimizer_offload_fraction={fraction} with optimizer_cpu_offload=True"
            f" {'offloads nothing' if fraction == 0 else 'is not a fraction'}; choose a number above 0, at most 1"
        )
    if not given.get("use_precision_aware_optimizer"):
        yield (
            "optimizer_config.optimizer_cpu_offload=True needs use_precision_aware_optimizer=True and the distributed"
            " optimizer, whose code Megatron's offload uses; set both"
        )


def optimizer_device_faults(given: Mapping[str, Any], device_type: str, sums_in_fp32: bool) -> Iterator[str]:
    """Yield a sentence for each option that the device or the precision does not support."""
    if given.get("optimizer_cpu_offload") and device_type != "cuda":
        yield (
            "optimizer_config.optimizer_cpu_offload=True moves optimizer state from a GPU to the host, but this run is"
            f" on {device_type!r}, where it is already; leave it out"
        )
    if given.get("use_precision_aware_optimizer") and device_type != "cuda":
        yield (
            "optimizer_config.use_precision_aware_optimizer=True needs the FusedAdam of TransformerEngine, which runs"
            f" on CUDA, but this run is on {device_type!r}; leave it out"
        )
    # A torch.dtype, or from a file the text "torch.bfloat16" or "bf16".
    kind = str(given.get("main_grads_dtype", "torch.float32"))
    if not kind.endswith(("float32", "fp32")) and sums_in_fp32:
        yield (
            f"optimizer_config.main_grads_dtype={kind} contradicts Trainer(precision=...), which"
            ' sums gradients in fp32; choose precision="bf16-true"'
        )


def optimizer_option_faults(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield a sentence for each option that the optimizer lacks; ``fields`` is empty if the user's own steps."""
    if given.get("use_precision_aware_optimizer") and fields.get("optimizer") != "adam":
        yield (
            f"optimizer_config.use_precision_aware_optimizer=True needs torch's Adam or AdamW, got {name}; leave it out"
        )
    if given.get("optimizer_cpu_offload") and not fields.get("decoupled_weight_decay"):
        yield (
            f"optimizer_config.optimizer_cpu_offload=True needs torch's AdamW, got {name}, whose weight decay"
            " Megatron's offload does not have; use AdamW"
        )


def megatron_fields(user: "Optimizer") -> dict[str, Any] | None:
    """Return the fields of Megatron's ``OptimizerConfig`` that give the same optimizer; None if there are none."""
    from torch.optim import SGD, Adam, AdamW

    d = user.defaults
    for group in user.param_groups:
        if any(group.get(name) for name in _NOT_IN_MEGATRON):
            return None
    # The exact type: a subclass may have its own step.
    if type(user) in (Adam, AdamW):
        decoupled = type(user) is AdamW or bool(d.get("decoupled_weight_decay"))
        beta1, beta2 = d["betas"]
        return {
            "optimizer": "adam",
            "lr": float(d["lr"]),
            "weight_decay": d["weight_decay"],
            "adam_beta1": float(beta1),
            "adam_beta2": float(beta2),
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


def what_needs_one_optimizer(inline: bool, distributed: bool, overlap_grad_reduce: bool) -> str | None:
    """Return what allows only one optimizer, because Megatron uses one for all parameters, or sums all at once."""
    reasons = {
        "a model built with pipeline()": not inline,
        "use_distributed_optimizer=True": distributed,
        "overlap_grad_reduce=True": overlap_grad_reduce,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def several_optimizers(because: str) -> TypeError:
    """Return the error for several optimizers."""
    return TypeError(
        f"configure_optimizers returned several optimizers, and {because} needs one over all parameters; create one"
        " with several parameter groups"
    )


def check_not_summed(optimizers: Iterable[Any]) -> None:
    """Raise ``RuntimeError`` if more gradients would be added to gradients that are already summed over the ranks."""
    # With shards, backward would add to a buffer that already holds the sum, and the sum would be counted twice.
    if any(optimizer.gradients.are_summed for optimizer in optimizers):
        raise RuntimeError(
            "backward ran again before zero_grad(), and with use_distributed_optimizer or overlap_grad_reduce the"
            " gradients are already summed over the ranks then; add the losses up, or set both to False"
        )


def check_kind(
    user: "Optimizer",
    *,
    inline: bool,
    distributed: bool,
    layer_wise: bool = False,
    tensor_parallel_size: int,
    expert_model_parallel_size: int,
    pipeline_model_parallel_size: int = 1,
    may_skip_steps: bool = False,
) -> None:
    """Raise ``TypeError`` for an optimizer that cannot be rebuilt but must be, or needs more than a rank holds.

    ``inline`` means that Lightning's own loop runs backward; ``tensor_parallel_size`` includes expert matrices.
    """
    fields, name = megatron_fields(user), type(user).__name__
    if distributed and (fields is None or fields["optimizer"] != "adam"):
        because = ", which needs whole matrices" if _is_one_of(user, _WHOLE_MATRICES) else ""
        can_share = not inline and not _is_one_of(user, _ALL_PARAMETERS)
        instead = "; set use_layer_wise_distributed_optimizer=True instead, which shards any optimizer"
        raise TypeError(
            "use_distributed_optimizer=True needs torch's Adam or AdamW without amsgrad or maximize; "
            f"got {name}{because}{instead if can_share else ''}"
        )
    if expert_model_parallel_size > 1 and fields is None and not layer_wise:
        raise TypeError(
            "expert_model_parallel_size > 1 needs torch's Adam, AdamW or SGD without amsgrad, maximize, dampening or "
            f"nesterov; got {name}; with use_layer_wise_distributed_optimizer=True, any optimizer trains experts"
        )
    if not inline and _is_one_of(user, _ALL_PARAMETERS):
        raise TypeError(
            f"{name} evaluates the step several times and looks at all parameters at once, which a model built with"
            " pipeline() cannot give it; use another optimizer, such as AdamW"
        )
    if may_skip_steps and _is_one_of(user, _ALL_PARAMETERS):
        raise TypeError(
            f"{name} evaluates the step several times, and loss scaling may skip a step; use another optimizer, or"
            " Trainer(precision='32-true') or 'bf16-mixed'"
        )
    splits = tensor_parallel_size > 1 or pipeline_model_parallel_size > 1 or layer_wise
    seen = _looks_at(user) if fields is None and splits else "elements"
    if tensor_parallel_size > 1 and seen == "matrices" and not _is_one_of(user, _GATHERS_MATRICES):
        raise TypeError(
            f"{name} looks at whole matrices, and tensor_model_parallel_size={tensor_parallel_size} leaves each rank a"
            " part of them; set the tensor sizes to 1, or use MuonWithAdamW, which gathers them, or an optimizer that"
            " is elementwise, such as AdamW"
        )
    if seen == "parameters" and layer_wise:
        raise TypeError(
            f"{name} looks at all parameters at once, and use_layer_wise_distributed_optimizer=True leaves each rank a"
            " part of them; set it to False, or use an optimizer that steps each parameter for itself, such as AdamW"
        )
    if seen == "parameters":
        raise TypeError(
            f"{name} looks at all parameters at once, and tensor_model_parallel_size={tensor_parallel_size} with"
            f" pipeline_model_parallel_size={pipeline_model_parallel_size} leaves each rank a part of them; set both to"
            " 1, or use an optimizer that steps each parameter for itself, such as AdamW"
        )


def check_state(user: "Optimizer", tensor_parallel_size: int) -> None:
    """Raise ``TypeError`` if the state after a step cannot be stored in shards that every layout can read.

    A tensor of the parameter's shape is stored in shards, as the parameter is, and any other as a whole.
    """
    from torch import Tensor

    name = type(user).__name__
    for parameter, state in user.state.items():
        is_split = tensor_parallel_size > 1 and getattr(parameter, "tensor_model_parallel", False)
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            # The protocol of torch's subclasses that consist of other tensors, such as codes and scales.
            if hasattr(value, "__tensor_flatten__"):
                raise TypeError(
                    f"{name} keeps {key!r} as {type(value).__name__}, which sharded checkpoints cannot store; use AdamW"
                    " with use_distributed_optimizer=True, or a plain LightningModule, which is saved as one file"
                )
            # Block scales of 8-bit states, [n / 256], or means of rows and columns.
            if is_split and value.dim() > 0 and value.shape != parameter.shape:
                raise TypeError(
                    f"{name} keeps {key!r} of shape {list(value.shape)} for a parameter of shape"
                    f" {list(parameter.shape)}, which no other layout could read because"
                    f" tensor_model_parallel_size={tensor_parallel_size} splits that parameter; set it to 1, or use"
                    " AdamW with use_distributed_optimizer=True"
                )


def _looks_at(user: "Optimizer") -> "LooksAt | None":
    """Return what a step looks at, by the optimizer's name or else by a trial; None if both do not tell."""
    from lightning_mcore.optimizer.trial import looks_at

    return "matrices" if _is_one_of(user, _WHOLE_MATRICES) else looks_at(user)


def _is_one_of(user: "Optimizer", names: set[str]) -> bool:
    return any(parent.__name__.lower() in names for parent in type(user).__mro__)
