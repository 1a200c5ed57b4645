# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore plan --check``: the real objects of a run are built, as far as nothing is allocated.

The rules of ``plan`` mirror those of Lightning's, Megatron's and our own classes. This asks the classes themselves, at
the price of importing Lightning and megatron-core; so does the test that holds both together.
"""

from typing import Any

from lightning_mcore.planning.rule_book import RuleBook
from lightning_mcore.planning.run_rules import arguments_of_gpt
from lightning_mcore.run_settings import RunSettings


def real_errors(settings: RunSettings, devices: int) -> list[str]:
    """Return what the classes refuse.

    Args:
        settings: The run.
        devices: Ranks of the whole run.
    """
    import torch

    from lightning_mcore.arguments.lightning_objects import make_precision, make_strategy

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
        book.attempt(lambda: strategy._check_device(devices))
    book.attempt(lambda: strategy.layout.validate_model(module.model_shape()))
    book.attempt(lambda: _check_module(module, strategy, device.type))
    if strategy.micro_batch_size is None:
        count = settings.trainer.get("accumulate_grad_batches") or 1
        book.attempt(lambda: strategy.layout.validate_microbatches(count, strategy.microbatch_group_size))
    return book.errors


def _module(settings: RunSettings) -> Any:
    from lightning_mcore.gpt import MCoreGPT

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
    from lightning_mcore.backend import resolve_transformer_impl
    from lightning_mcore.field_support import check_fields
    from lightning_mcore.loss_normalization import check_normalization
    from lightning_mcore.multi_token import check_multi_token
    from lightning_mcore.parallelism import _check_expert_tensor_parallel
    from lightning_mcore.transformer_fields import build_transformer_config

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
    check_fields(config, used, device_type)
    check_multi_token(config, module.hparams["share_embeddings_and_output_weights"])
    check_normalization(module.loss_normalization, config)
    _check_expert_tensor_parallel(strategy.layout, strategy.root_device)
