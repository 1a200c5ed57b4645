# SPDX-License-Identifier: Apache-2.0
"""Over what the loss of a language model is a mean, and which models have losses that only one of the two fits.

``MCoreModule`` and ``MCoreGPT`` ask before they train, ``parallel/chunks.py`` before it wraps a model,
``lightning-mcore plan`` before there is one. Pure arithmetic.
"""

from typing import Any, Literal, TypeAlias, get_args

LossNormalization: TypeAlias = Literal["tokens", "samples"]


def check_normalization(normalization: LossNormalization, config: Any) -> None:
    """Refuse a mean that nobody computes.

    Args:
        normalization: Over what the loss is a mean.
        config: The model's, or any object with its fields.

    Raises:
        ValueError: It is unknown, or losses of layers would be weighed by tokens and divided by samples.
    """
    if normalization not in get_args(LossNormalization):
        raise ValueError(f"loss normalization {normalization!r} is unknown; choose 'tokens' or 'samples'")
    if normalization == "tokens" or not config.calculate_per_token_loss:
        return
    coefficients = config.moe_aux_loss_coeff
    balanced = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    routed = config.num_moe_experts is not None
    for name, is_there in {
        "moe_aux_loss_coeff": routed and balanced and config.moe_router_load_balancing_type != "none",
        "moe_z_loss_coeff": routed and bool(config.moe_z_loss_coeff),
        "mtp_num_layers": bool(config.mtp_num_layers),
    }.items():
        if is_there:
            raise ValueError(
                f"loss normalization 'samples' with {name}={getattr(config, name)}, a loss that Megatron weighs by"
                " tokens; choose 'tokens', or leave that loss out"
            )


def check_average_in_collective(average_in_collective: bool, config: Any) -> None:
    """Refuse to average gradients over ranks where the loss is a sum over tokens.

    Args:
        average_in_collective: Of ``ddp_config``.
        config: The model's, or any object with its fields.

    Raises:
        ValueError: As said.

    Source: ``DistributedDataParallel.__init__`` (megatron-core 0.16.1 and 0.19.2).
    """
    if average_in_collective and config.calculate_per_token_loss:
        raise ValueError(
            "ddp_config.average_in_collective=True averages over ranks, and calculate_per_token_loss=True of the model"
            " asks for a sum over tokens; set one of them to False"
        )
