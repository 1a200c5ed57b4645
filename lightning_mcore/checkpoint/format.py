# SPDX-License-Identifier: Apache-2.0
"""The format of a sharded checkpoint: names of its files, its manifest as text, and what is wrong with one.

The manifest is JSON, so that a checkpoint can be read without the code that wrote it::

    {"format": "lightning_mcore", "format_version": 1, "global_step": 400, ...,
     "files": {"__0_0.distcp": {"size": 1048576, "crc32": "9ae0daaf"}, ...}}

``manifest.py`` says what else stands in it. ``files.py`` writes and reads the files; every
refusal of a path or a file comes from here, so that they read the same. No torch, no files.
"""

import errno
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MANIFEST_FILE = "checkpoint.json"
FORMAT = "lightning_mcore"
FORMAT_VERSION = 1
LIGHTNING_FILE = "lightning.pt"  # Lightning's state: loops, callbacks, hyper-parameters, LR schedulers, datamodule
RANKS_FILE = "ranks.pt"  # a list over the global ranks
METADATA_FILE = ".metadata"  # names, shapes and places of the tensors
MEGATRON_FILES = ("metadata.json", METADATA_FILE)  # of a torch_dist checkpoint, whoever wrote it
DELETED_FIRST = (MANIFEST_FILE, METADATA_FILE)  # without these, nobody takes what is left for a checkpoint


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file.

    Args:
        size: Bytes.
        crc32: Checksum as 8 hexadecimal digits.
    """

    size: int
    crc32: str


def encode_manifest(manifest: Mapping[str, Any], files: Mapping[str, FileRecord]) -> bytes:
    """Return the text of the manifest; format, version and files are filled in."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION}
    records = {name: asdict(files[name]) for name in sorted(files)}
    return json.dumps({**head, **manifest, **head, "files": records}, indent=1).encode()


def decode_manifest(path: str, text: bytes) -> dict[str, Any]:
    """Return the manifest in ``text``.

    Raises:
        ValueError: It is no manifest, a damaged one, or of a newer version.
    """
    try:
        manifest = json.loads(text)
    except ValueError:
        raise damaged(path, f"{MANIFEST_FILE} is no JSON, or only a part of it") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no checkpoint of lightning_mcore, for its {MANIFEST_FILE} is of another program; give the path"
            " of a checkpoint"
        )
    version = manifest.get("format_version")
    if not isinstance(version, int):
        raise damaged(path, f"{MANIFEST_FILE} does not give its format_version")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, and this lightning_mcore reads versions up to {FORMAT_VERSION};"
            f" install the version that wrote it ({_writer(manifest)}) or a later one"
        )
    if not _describes_files(manifest.get("files")):
        raise damaged(path, f"{MANIFEST_FILE} does not list its files")
    return manifest


def some_of(names: Collection[str], most: int) -> str:
    """Return the first names in alphabetical order, and how many more there are than ``most``."""
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def no_checkpoint(path: str, names: Collection[str]) -> ValueError:
    """Return the error for a directory without a manifest.

    Args:
        path: The directory.
        names: What lies in it.
    """
    if is_interrupted(names):
        return interrupted(path)
    if is_megatron(names):
        return ValueError(
            f"{path} is a checkpoint of Megatron-LM or another program, from which no run here can go on, for it has no"
            f" {MANIFEST_FILE}; start from its weights with self.load_weights(path) in configure_model"
        )
    inside = [name for name in sorted(names) if name.endswith(".ckpt") or name.startswith("iter_")]
    advice = f"did you mean {path.rstrip('/')}/{inside[-1]}" if inside else "give the path of a checkpoint"
    return ValueError(f"{path} is a directory and no checkpoint, for it has no {MANIFEST_FILE}; {advice}")


def interrupted(path: str) -> ValueError:
    """Return the error for a checkpoint whose save did not come to its end."""
    return ValueError(f"{path} is no whole checkpoint, because its save was interrupted; use another one")


def damaged(path: str, what: str) -> ValueError:
    """Return the error for a checkpoint that is not as it was saved; ``what`` names the file."""
    return ValueError(f"{path} is damaged: {what}; use another checkpoint or a copy of this one")


def unsaved(path: str, error: OSError) -> OSError:
    """Return the error for a save that the disk refused, of the same class and number."""
    advice = {
        errno.ENOSPC: "free some space there or keep fewer checkpoints",
        errno.EDQUOT: "free some space there or keep fewer checkpoints",
        errno.EROFS: "save to a disk that can be written",
        errno.EACCES: "save to a directory that this user may write to",
        errno.EPERM: "save to a directory that this user may write to",
    }
    what = (error.strerror or str(error)).lower()
    return OSError(error.errno, f"{path} could not be saved: {what}; {advice.get(error.errno or 0, 'check the disk')}")


def is_interrupted(names: Collection[str]) -> bool:
    """Return whether the files of a directory are those of a checkpoint of ours that lacks its manifest."""
    shards = any(name.endswith(".distcp") for name in names)
    return MANIFEST_FILE not in names and (LIGHTNING_FILE in names or (shards and not is_megatron(names)))


def is_megatron(names: Collection[str]) -> bool:
    """Return whether the files of a directory are those of a ``torch_dist`` checkpoint that another program wrote."""
    return all(name in names for name in MEGATRON_FILES) and not {MANIFEST_FILE, LIGHTNING_FILE} & {*names}


def may_be_replaced(names: Collection[str]) -> bool:
    """Return whether a directory with these files is empty or a checkpoint, whole or not, of this or another format."""
    return not names or MANIFEST_FILE in names or METADATA_FILE in names or is_interrupted(names)


def _writer(manifest: Mapping[str, Any]) -> str:
    versions = manifest.get("versions")
    return f"lightning_mcore {versions.get('lightning_mcore')}" if isinstance(versions, dict) else "unknown"


def _describes_files(files: Any) -> bool:
    """Return whether the manifest, which anybody may have written, lists files and all of them in the directory."""
    return isinstance(files, dict) and all(
        isinstance(record, dict)
        and isinstance(record.get("size"), int)
        and isinstance(record.get("crc32"), str)
        and not {"", ".."} & {*name.split("/")}
        for name, record in files.items()
    )
