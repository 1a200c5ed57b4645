# SPDX-License-Identifier: Apache-2.0
"""Compare how the image processors of a model and its teacher scale pixels before they cut them into patches."""

import os
from typing import Any

from lightning_mcore.hf.files import read_json
from lightning_mcore.hf.source import is_hub_name, local_folder

_SCALES = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")


def check_pixels(student: str | None, teacher: str) -> None:
    """Raise ValueError if the processors of two folders or hub names scale pixels differently; both may have none."""
    own, taught = _scales_of(student), _scales_of(teacher)
    for name in own.keys() & taught.keys():
        if own[name] != taught[name]:
            raise ValueError(
                f"teacher={teacher!r} reads images with {name}={taught[name]} and the student with {own[name]}, so the"
                " two cannot see the same images; give a teacher whose processor scales pixels as the student's"
            )


def _scales_of(path: str | None) -> dict[str, Any]:
    """Return the settings of a model's image processor that scale pixels, as far as its files say them."""
    if path is None or not (os.path.isdir(path) or is_hub_name(path)):
        return {}
    folder = local_folder(path)
    # transformers 5 writes the first file for a whole processor, and prefers it
    for file, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        if os.path.isfile(os.path.join(folder, file)):
            content = read_json(folder, file)
            found = content if key is None else content.get(key)
            if found is not None:
                return {name: found[name] for name in _SCALES if name in found}
    return {}
