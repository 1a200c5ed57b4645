# SPDX-License-Identifier: Apache-2.0
"""What training on preferences changes in a planned run, by the rules of ``models/preference.py``."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from lightning_mcore.config.field_homes import DEFAULTS
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.preference import Preference, faults_with_model
from lightning_mcore.config.run import RunSettings
from lightning_mcore.hf.family import SCORING
from lightning_mcore.hf.peft_folder import given_lora
from lightning_mcore.hf.source import variant_name
from lightning_mcore.models.preference import arguments_of_base
from lightning_mcore.planning.grid import GlobalBatch


def family_to_read(model: Mapping[str, Any]) -> str | None:
    """Return the family by whose rules the weights at ``path`` are read; None for the one in its config.

    Raises FileNotFoundError if there is no such model, ValueError or TypeError if ``preference`` is wrong.
    """
    family = model.get("family")
    is_reward = "preference" in model and Preference.of(model["preference"]).gives_scores
    return variant_name(model["path"], family, SCORING) if is_reward else family


def arguments_in_use(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, with what ``MCorePreference`` changes in them.

    Raises FileNotFoundError if there is no such adapter, ValueError or TypeError for a wrong setting.
    """
    if "preference" not in model or not isinstance(model.get("transformer"), Mapping):
        return dict(model)
    setting, is_tied = Preference.of(model["preference"]), bool(model.get("share_embeddings_and_output_weights"))
    changed = arguments_of_base(setting, model["transformer"], _lora(model), is_tied)
    return {**model, **{name: value for name, value in changed.items() if name in model}}


def _lora(model: Mapping[str, Any]) -> LoRA | None:
    """Return the adapters of a model, also where they are given as a folder."""
    return None if model.get("lora") is None else given_lora(model["lora"])[0]


def faults_of_pairs(settings: RunSettings, model: Mapping[str, Any], batch: GlobalBatch | None) -> Iterator[str]:
    """Yield a sentence for each setting that the model does not allow, and if microbatches cut pairs apart."""
    if "preference" not in model:
        return
    config = SimpleNamespace(**(DEFAULTS | model["transformer"]))
    yield from faults_with_model(Preference.of(model["preference"]), _lora(model), config)
    if batch is None or settings.data.get("packing") or batch.micro_batch_size % 2 == 0:
        return
    yield f"micro_batch_size={batch.micro_batch_size} cuts a pair apart; choose an even number"


def assumptions_of_preference(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not counted, as part of a sentence."""
    if "preference" in model and Preference.of(model["preference"]).needs_reference:
        yield "the passes that compute log-probabilities under the reference are not counted"
