# SPDX-License-Identifier: Apache-2.0
"""What the classes of a run refuse when they are built and meet, as far as nothing is allocated: plans are held to it.

One after the other, as the run builds them, and without the rules that ``plan`` asks all at once.
"""

from collections.abc import Mapping
from typing import Any

from lightning_mcore.config.run import RunSettings
from lightning_mcore.planning.arguments import arguments_of_gpt
from lightning_mcore.planning.rules import RuleBook


def real_errors(settings: RunSettings, devices: int) -> list[str]:
    """Return what the classes refuse.

    Args:
        settings: The run.
        devices: Ranks of the whole run.
    """
    import torch

    from lightning_mcore.arguments.build import make_precision, make_strategy
    from lightning_mcore.strategy.checks import check_device

    book = RuleBook()
    device = torch.device("cpu" if settings.trainer.get("accelerator") == "cpu" else "cuda")
    strategy = book.attempt(lambda: make_strategy(settings.strategy))
    precision = book.attempt(lambda: make_precision(settings.precision))
    module = book.attempt(lambda: _module(settings))
    if strategy is None or precision is None or module is None:
        return book.errors
    strategy.parallel_devices = [device]
    strategy.cluster_environment = _environment()
    if book.attempt(lambda: _assigned(strategy, precision)) is None:
        return book.errors
    book.attempt(lambda: strategy.layout.validate_world(devices))
    if not book.errors:
        book.attempt(lambda: check_device(strategy, devices))
    book.attempt(lambda: strategy.layout.validate_model(module.model_shape()))
    book.attempt(lambda: _check_module(module, strategy, device.type))
    book.attempt(lambda: _check_optimizer(module, strategy))
    book.attempt(lambda: _check_trainer(module, settings.trainer))
    if strategy.micro_batch_size is None:
        count = settings.trainer.get("accumulate_grad_batches") or 1
        book.attempt(lambda: strategy.layout.validate_microbatches(count, strategy.microbatch_group_size))
    return book.errors


def _module(settings: RunSettings) -> Any:
    from lightning_mcore.models.gpt import MCoreGPT

    book = RuleBook()
    arguments = arguments_of_gpt(book, settings.model)
    if book.errors:
        raise ValueError(book.errors[0])
    try:
        return MCoreGPT(**arguments)
    except TypeError as error:
        raise TypeError(f"MCoreGPT: {error}") from error


def _environment() -> Any:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    return LightningEnvironment()


def _assigned(strategy: Any, precision: Any) -> bool:
    strategy.precision_plugin = precision
    return True


def _check_module(module: Any, strategy: Any, device_type: str) -> None:
    """Build Megatron's config and check it, as ``MCoreGPT.check_settings`` does under a Trainer."""
    from lightning_mcore.config.architecture import set_architecture
    from lightning_mcore.config.rules import raise_first
    from lightning_mcore.config.rules.model import check_average_in_collective, check_normalization
    from lightning_mcore.config.rules.strategy import expert_faults
    from lightning_mcore.layers.multi_token import check_multi_token
    from lightning_mcore.layers.spec import check_backend, resolve_transformer_impl
    from lightning_mcore.layers.transformer_config import build_transformer_config

    owned = strategy.megatron_fields()
    if module.transformer.get("multi_latent_attention"):
        owned |= {name: module.hparams[name] for name in ("rotary_base", "rotary_percent")}
    used: Any
    config = build_transformer_config(module.transformer, owned)
    choice = module.hparams["transformer_impl"]
    if device_type == "cuda":  # whether TransformerEngine is installed, the machine of the run will say
        used = "transformer_engine" if choice == "auto" else choice
    else:
        used = resolve_transformer_impl(choice, device_type)
    set_architecture(config, module.architecture)
    check_backend(config, used, device_type)
    learned_positions = module.hparams["position_embedding_type"] == "learned_absolute"
    check_multi_token(config, module.hparams["share_embeddings_and_output_weights"], learned_positions)
    check_normalization(module.loss_normalization, config)
    check_average_in_collective(strategy.gradients.megatron_config().average_in_collective, config)
    raise_first(expert_faults(strategy.layout, strategy.root_device.type))


def _check_optimizer(module: Any, strategy: Any) -> None:
    """Make the optimizer on a parameter of its own, and ask whether it can do what the strategy asks of it."""
    from torch import nn, zeros

    from lightning_mcore.config.rules import raise_first
    from lightning_mcore.optimizer.rules import check_kind, megatron_fields, optimizer_option_faults

    optimizer = module.recipe.build_optimizer([("weight", nn.Parameter(zeros(1, 1)))])
    check_kind(
        optimizer,
        inline=False,
        distributed=strategy.gradients.distributed,
        tensor_parallel_size=strategy.layout.tensor_model_parallel_size,
        expert_model_parallel_size=strategy.layout.expert_model_parallel_size,
    )
    if strategy.optimizer_config is not None:
        fields = megatron_fields(optimizer) or {}
        raise_first(optimizer_option_faults(vars(strategy.optimizer_config), fields, type(optimizer).__name__))


def _check_trainer(module: Any, trainer: Mapping[str, Any]) -> None:
    """Ask Lightning's Trainer for its number of steps, and the recipe whether that is enough."""
    import lightning.pytorch as pl

    if trainer.get("sync_batchnorm"):
        raise ValueError("sync_batchnorm=True is not available for a model built with pipeline(); set it to False")
    lengths = {name: trainer[name] for name in ("max_epochs", "max_steps", "max_time") if name in trainer}
    real = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **lengths)
    endless = real.max_steps == -1 and real.max_epochs == -1
    module.recipe.check_end(None if endless else 1)
