# SPDX-License-Identifier: Apache-2.0
"""``output_dir`` of a LLaMA-Factory run: what stands in it before, and the model that stands in it at the end.

There, as here, ``output_dir`` holds checkpoints (``checkpoint-<step>...``) while a run goes on, and then the model
in Hugging Face form beside them, so that the folder itself can be loaded. The model is first written to a folder in it,
whole, and then moved; ``config.json``, without which nothing loads it, moves last.
"""

import os
import re
import shutil
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint-(\d+)(-v\d+)?\.ckpt")
_PREEMPTED = re.compile(r"last-preempted(-v\d+)?\.ckpt")  # of enable_jit_checkpoint
_OF_A_MODEL = ("config.json", "model.safetensors", "model.safetensors.index.json")
_UNFINISHED = "unfinished-model"


def where_to_resume(output_dir: str, overwrite: bool) -> str | None:
    """Return the newest checkpoint in a folder; None to start anew.

    Args:
        output_dir: The folder; need not exist.
        overwrite: Whether to start anew whatever stands there.

    Raises:
        ValueError: A model stands there, and no checkpoint to go on from.
    """
    folder = Path(output_dir)
    if overwrite or not folder.is_dir():
        return None
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    preempted = [path for path in folder.iterdir() if _PREEMPTED.fullmatch(path.name)]
    newest = ([max(found)[1]] if found else []) + preempted
    if newest:
        return str(max(newest, key=lambda path: path.stat().st_mtime))
    there = [name for name in _OF_A_MODEL if (folder / name).exists()]
    if there:
        raise ValueError(
            f"output_dir: {output_dir} holds a model already ({there[0]}), and no checkpoint to go on from; choose"
            " another folder, or set overwrite_output_dir: true"
        )
    return None


def unfinished(output_dir: str) -> str:
    """Return the folder inside, to which the model is first written."""
    return os.path.join(output_dir, _UNFINISHED)


def clear(output_dir: str) -> None:
    """Remove what a run that ended early left of its model."""
    shutil.rmtree(unfinished(output_dir), ignore_errors=True)


def move_in(output_dir: str) -> None:
    """Move the model that has been written inside to its place, over one that stands there."""
    source, target = Path(unfinished(output_dir)), Path(output_dir)
    for stale in (*target.glob("model*.safetensors"), target / _OF_A_MODEL[2], target / _OF_A_MODEL[0]):
        stale.unlink(missing_ok=True)
    names = sorted((path.name for path in source.iterdir()), key=lambda name: (name == _OF_A_MODEL[0], name))
    for name in names:
        os.replace(source / name, target / name)
    source.rmdir()
