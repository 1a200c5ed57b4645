# SPDX-License-Identifier: Apache-2.0
"""The arguments of a planned model, with those that a Hugging Face config gives."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.planning.preference import arguments_in_use, family_to_read
from lightning_mcore.planning.signatures import of_model

if TYPE_CHECKING:
    from lightning_mcore.planning.rules import RuleBook


def arguments_of_gpt(book: "RuleBook", model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, with those from a Hugging Face config filled in.

    Raises FileNotFoundError or ValueError if there is no model, or its family is unknown.
    """
    if not model:
        raise ValueError("the run has no model; give MCoreGPT's arguments, or --model with a Hugging Face model")
    if "path" not in model:
        return arguments_in_use(model)
    from lightning_mcore.hf.source import planned_settings, sees_images  # transformers takes two seconds

    sees = bool(sees_images(model["path"]))
    kind = MCoreVisionGPT if sees else MCoreGPT
    given = book.check_arguments(f"argument of {kind.__name__}.from_pretrained", model, of_model(True, sees))
    names = ("path", "family", "seq_length", "transformer")
    family = family_to_read(given)
    source = planned_settings(given["path"], family, given.get("seq_length"), given.get("transformer"))
    kind.check_kind(given["path"], source)
    return arguments_in_use({**{name: value for name, value in given.items() if name not in names}, **source})
