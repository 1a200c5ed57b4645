# SPDX-License-Identifier: Apache-2.0
"""``output_dir`` of a LLaMA-Factory run: what stands in it before, and the model that stands in it at the end.

There, as here, ``output_dir`` holds checkpoints (``checkpoint-<step>...``) while a run goes on, and then the model
in Hugging Face form beside them, so that the folder itself can be loaded. The model is first written to a folder in it,
whole, and then moved; ``config.json``, without which nothing loads it, moves last. A move that was interrupted is
finished when the next run begins.
"""

import json
import os
import re
from pathlib import Path

from lightning_mcore.checkpoint.storage.atomic import sync_directory

_CHECKPOINT = re.compile(r"checkpoint-(\d+)(-v\d+)?\.ckpt")
_PREEMPTED = re.compile(r"last-preempted(-v\d+)?\.ckpt")  # of enable_jit_checkpoint
_OF_A_MODEL = ("config.json", "model.safetensors", "model.safetensors.index.json")
_UNFINISHED = "unfinished-model"
_NAMES, _PART = ".files-of-the-model", ".part"  # what is moved, noted beside it


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


def is_waiting(output_dir: str) -> bool:
    """Return whether a whole model waits inside to be moved to its place, or is on its way there."""
    source = Path(unfinished(output_dir))
    return (source / _NAMES).is_file() or (source / _OF_A_MODEL[0]).is_file()


def move_in(output_dir: str) -> None:
    """Move the model that waits inside to its place, over one that stands there; where none waits, do nothing.

    Whatever moment the process dies at, the old model stands there, or the new one, or the next call finishes the move:
    the names of the new one are noted before the first file of the old one goes. Between, there is no ``config.json``,
    so that nobody loads parts of both.
    """
    source, target = Path(unfinished(output_dir)), Path(output_dir)
    if not is_waiting(output_dir):
        return
    if not (source / _NAMES).is_file():
        _note(source, sorted({path.name for path in source.iterdir()} - {_NAMES + _PART}))
    names = json.loads((source / _NAMES).read_text())
    config, *_ = _OF_A_MODEL
    if (source / config).exists():
        (target / config).unlink(missing_ok=True)
    for stale in (*target.glob("model*.safetensors"), target / _OF_A_MODEL[2]):
        if stale.name not in names:
            stale.unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: (name == config, name)):
        if (source / name).exists():
            os.replace(source / name, target / name)
    sync_directory(output_dir)
    (source / _NAMES).unlink()
    source.rmdir()


def _note(source: Path, names: list[str]) -> None:
    part = source / (_NAMES + _PART)
    with part.open("w") as file:
        json.dump(names, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, source / _NAMES)
