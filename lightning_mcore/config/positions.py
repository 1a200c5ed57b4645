# SPDX-License-Identifier: Apache-2.0
"""The position settings of ``MCoreGPT``: check them, and turn them into arguments of ``GPTChunk``.

Megatron spreads these settings over arguments of its model and attributes of its config, and ignores some if others are
set; such pairs raise. Multi-latent attention does its own rotation, which fields of its config control.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lightning_mcore.config.architecture import Architecture
from lightning_mcore.config.value_checks import require_choice, require_flag, require_instance, require_number

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

PositionEmbedding: TypeAlias = Literal["rope", "yarn", "learned_absolute", "none"]

YARN_DEFAULTS: dict[str, Any] = {
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "correction_range_round_to_int": True,
}
"""Defaults of ``yarn``, where only ``rotary_scaling_factor`` is required. Names are Megatron's without ``yarn_``."""

# Megatron's own ways to stretch positions, and their values when off
_STRETCHED_OTHERWISE = {"rope_scaling": False, "seq_len_interpolation_factor": None}
_ROTARY_DEFAULTS = {"rotary_percent": 1.0, "rope_scaling": False, "seq_len_interpolation_factor": None}


def check_positions(settings: Mapping[str, Any], transformer: Mapping[str, Any]) -> None:
    """Raise for position settings that are wrong, contradict each other, or would be ignored."""
    kind = settings["position_embedding_type"]
    require_choice("position_embedding_type", kind, PositionEmbedding)
    _check_values(settings)
    latent = transformer.get("multi_latent_attention", False)
    if latent and kind == "yarn":
        raise ValueError(
            "position_embedding_type='yarn' does not work with multi_latent_attention; set rope_type='yarn' in"
            " transformer"
        )
    if latent and kind == "none" and transformer.get("rope_type") != "rope":
        raise ValueError(
            "position_embedding_type='none' with multi_latent_attention needs rope_type='rope', whose angles can be 0;"
            " set it in transformer"
        )
    for name, nothing in _ROTARY_DEFAULTS.items():
        # Multi-latent attention rotates its own channels, and reads only rotary_percent of these.
        ignored = kind != "rope" or (latent and name != "rotary_percent")
        if settings[name] != nothing and ignored:
            where = "multi_latent_attention" if latent else f"position_embedding_type={kind!r}"
            raise ValueError(f"{name}={settings[name]!r} has no effect with {where}; leave it out")
    if kind == "yarn" and transformer.get("rotary_interleaved"):
        raise ValueError("rotary_interleaved=True is not available with position_embedding_type='yarn'; leave it out")
    _check_yarn(kind, settings["yarn"])
    architecture, length = Architecture.of(settings.get("architecture")), settings["seq_length"]
    if isinstance(length, int):  # anything else is rejected elsewhere
        architecture.check_length(f"seq_length={length}", length)
    # The ways in Architecture replace Megatron's wavelengths, so a second way would be lost.
    if architecture.stretch is None:
        return
    given = [name for name, nothing in _STRETCHED_OTHERWISE.items() if settings[name] != nothing]
    if kind != "rope" or latent or given:
        other = given[0] if given else "multi_latent_attention" if latent else f"position_embedding_type={kind!r}"
        raise ValueError(f"architecture has stretch, which does not work with {other}; leave out one of the two")


def _check_values(settings: Mapping[str, Any]) -> None:
    for name in ("rotary_percent", "rotary_base", "rope_scaling_factor"):
        require_number(name, settings[name])
    if settings["rotary_percent"] > 1:
        raise ValueError(f"rotary_percent={settings['rotary_percent']} is a share of each head; choose 1 or less")
    require_flag("rope_scaling", settings["rope_scaling"])
    factor = settings["seq_len_interpolation_factor"]
    if factor is not None:
        require_number("seq_len_interpolation_factor", factor, above=1.0)


def _check_yarn(kind: str, yarn: Mapping[str, Any] | None) -> None:
    require_instance("yarn", yarn, Mapping)
    if (kind == "yarn") != (yarn is not None):
        raise ValueError(
            "position_embedding_type='yarn' and yarn={'rotary_scaling_factor': ...} need each other; give both, or none"
        )
    known = ["rotary_scaling_factor", *YARN_DEFAULTS]
    for name in yarn or ():
        if name not in known:
            raise ValueError(f"yarn has no setting {name!r}; choose from {', '.join(known)}")
    if yarn is not None and "rotary_scaling_factor" not in yarn:
        raise ValueError("yarn lacks rotary_scaling_factor, by which the original positions are stretched; give it")


def gpt_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position arguments of ``GPTChunk``."""
    names = ("position_embedding_type", "rotary_base", "rope_scaling_factor", *_ROTARY_DEFAULTS)
    return {name: settings[name] for name in names}


def set_yarn(config: "TransformerConfig", yarn: Mapping[str, Any] | None) -> None:
    """Set the attributes of the config that ``GPTChunk`` reads with ``position_embedding_type="yarn"``."""
    for name, value in ({**YARN_DEFAULTS, **yarn} if yarn is not None else {}).items():
        setattr(config, f"yarn_{name}", value)
