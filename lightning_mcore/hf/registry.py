# SPDX-License-Identifier: Apache-2.0
"""Find families of Hugging Face models by name.

This package's families are in ``families.py`` and ``vision_families.py``. Another package registers its own in its
``pyproject.toml``, and they can then be found by name::

    [project.entry-points."lightning_mcore.families"]
    gemma = "my_package.gemma:FAMILY"

Nothing is registered at run time, so a name means the same in every process.

A path such as ``my_package.gemma:FAMILY`` is imported only if the user gives it. A downloaded file may name any module,
so ``config.json`` and checkpoints may only name registered families (:func:`recorded_family`).
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from lightning_mcore.hf.families import FAMILIES
from lightning_mcore.hf.family import HIDDEN, SCORING, Family, complete_fields
from lightning_mcore.hf.vision_families import VISION_LANGUAGE_FAMILIES

ENTRY_POINTS = "lightning_mcore.families"

_LIMITS = "each of their layers has a limit of its own for activations"
_WIDER_HEADS = "their layers without a window have wider heads than those with one"
_WITH_TOWER = "their language model is read only from a folder of its own, without the vision tower"
UNSUPPORTED: dict[str, tuple[str, str]] = {
    "bailing_hybrid": ("the decays of their linear attention have a lower bound", "kimi_linear"),
    "falcon_h1": ("each of their layers has Mamba 2 beside attention", "granitemoehybrid"),
    "gemma3": (_WITH_TOWER, "gemma3_text"),
    "gemma3n": ("each of their layers has embeddings of its own", "gemma3_text"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), (_WIDER_HEADS, "gemma3_text")),
    "glm5_next": ("each of their layers has several residual streams", "glm_moe_dsa"),
    "jamba": ("they have Mamba 1 layers", "granitemoehybrid"),
    "kimi_k25": (_WITH_TOWER, "kimi_k2"),
    "mimo_v2_flash": ("their layers with a window have twice as many key heads as the others", "gpt_oss"),
    "minimax_m3_vl": ("each query attends only to the blocks of tokens that an indexer selects", "minimax_m2"),
    "mistral3": (_WITH_TOWER, "ministral3"),
    "mistral_large4": ("each query attends only to the tokens that an indexer selects", "mistral4"),
    **dict.fromkeys(("step3p5", "step3p7"), (_LIMITS, "qwen3_moe")),
}
"""Well-known model types that are not supported: what Megatron and this package lack, and the nearest family. The
text models of these types, such as ``gemma4_text``, are not supported either, unless they are a family."""
_SEE_IMAGES = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm5_next", "kimi_k25", "minimax_m3_vl", "mistral3")


def family_names() -> list[str]:
    """Return the names of all families of text models: the ``model_type`` of their ``config.json``."""
    return [*FAMILIES, *sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))]


def find_family(name: str) -> Family:
    """Return the family that the user names.

    Args:
        name: Its ``model_type``, or the path of a :class:`Family`, such as ``"my_package.gemma:FAMILY"``. Either may
            end in ``"+score"`` for reward models and classifiers, or ``"+hidden"`` for models without a head.

    Raises:
        ValueError: There is no such family; the message lists the families that exist.
    """
    if name.endswith(SCORING):
        return find_family(name.removesuffix(SCORING)).scoring()
    if name.endswith(HIDDEN):
        return find_family(name.removesuffix(HIDDEN)).without_head()
    return _import(name) if ":" in name else registered_family(name)


def recorded_family(name: str) -> Family:
    """Return the family that a checkpoint names. A path is looked up among imported modules, never imported."""
    if name.endswith(SCORING):
        return recorded_family(name.removesuffix(SCORING)).scoring()
    if name.endswith(HIDDEN):
        return recorded_family(name.removesuffix(HIDDEN)).without_head()
    if ":" not in name:
        return registered_family(name)
    module, _, attribute = name.partition(":")
    # Through __dict__, because a module's __getattr__ could import something
    family = getattr(sys.modules.get(module), "__dict__", {}).get(attribute)
    if not isinstance(family, Family):
        raise ValueError(
            f"the checkpoint names the family {name!r}, and a file must not choose which code is imported; if it is "
            f"your own, name it yourself: family={name!r} (--family {name})"
        )
    return family


def registered_family(name: str) -> Family:
    """Return the family of a ``model_type``, from this package or another installed one."""
    # An installed package may replace one of our families
    registered = next((entry.value for entry in entry_points(group=ENTRY_POINTS) if entry.name == name), None)
    if registered is not None:
        return _import(registered)
    for families in (FAMILIES, VISION_LANGUAGE_FAMILIES):
        if name in families:
            return families[name]
    lacking = UNSUPPORTED.get(name.removesuffix("_text"))
    if lacking is not None:
        raise ValueError(
            f"models of type {name!r} are not supported, because {lacking[0]}; the nearest family is {lacking[1]!r}"
            + (", or for images 'qwen3_vl'" if name in _SEE_IMAGES else "")
        )
    raise ValueError(
        f"models of type {name!r} are not supported; choose {', '.join(family_names())}, or give your own family, "
        "family='package.module:FAMILY', which the guide \"Add a family\" shows how to write"
    )


def _import(path: str) -> Family:
    module, _, attribute = path.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ValueError(f"family={path!r} is not the path of a family; give 'package.module:FAMILY'")
    try:
        family = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"family={path!r} cannot be imported: {error}; give 'package.module:FAMILY'") from error
    if not isinstance(family, Family):
        raise ValueError(f"family={path!r} is a {type(family).__name__}, not a Family; give the path of one")
    return family


def family_and_fields(model: Mapping[str, Any], family: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Return the family whose weight names an ``MCoreGPT`` uses, and all fields of the model.

    ``model`` are the arguments of ``MCoreGPT``. With ``family=None``, it is the family of its Hugging Face model, or
    the nearest one. Raises ValueError if a checkpoint names a user's own family and the user has not.
    """
    transformer = model["transformer"]
    # A model trained from scratch has no family; these names fit it best
    nearest = "qwen3_moe" if transformer.get("num_moe_experts") else "qwen3"
    nearest = "deepseek_v3" if transformer.get("multi_latent_attention") else nearest
    origin = model.get("hf") or {}
    by_setting = {"kimi_delta": "kimi_linear", "indexer": "deepseek_v32"}
    architecture = model.get("architecture") or {}
    nearest = next((name for setting, name in by_setting.items() if architecture.get(setting)), nearest)
    named = family or _with_tower(origin) or origin.get("family") or nearest
    named_alike = ("vocab_size", "share_embeddings_and_output_weights", "architecture")
    own = {name: model[name] for name in named_alike if name in model}
    known = find_family(family) if family else recorded_family(named)  # a file imports no code
    return known, complete_fields({**transformer, **own})


def _with_tower(origin: Mapping[str, Any]) -> str | None:
    """Return the family name of a folder with a vision tower whose language model was read; None for other models."""
    name = str((origin.get("config") or {}).get("model_type"))
    known = FAMILIES.get(name)
    # WITH_TOWERS has such folders (qwen3_5) under a name of their own, with the text family's model_type (qwen3_5_text)
    is_read_as_text = known is not None and known.model_type != name and known.model_type == origin.get("family")
    return name if is_read_as_text else None
