# SPDX-License-Identifier: Apache-2.0
"""Read the pickles ``.metadata`` and ``common.pt`` of a ``torch_dist`` checkpoint without running code from them.

``.metadata`` holds the names, shapes, types and places of all tensors. It is a pickle, and a pickle can run anything.
:func:`read_metadata` accepts only the classes that ``torch.distributed.checkpoint`` writes there, so a checkpoint from
an untrusted source can be shown safely. ``common.pt`` holds Megatron-LM's arguments: :func:`read_common` takes the
plain values and replaces all others by empty objects. ``commands.py`` shows both.

Source: ``torch.distributed.checkpoint.filesystem.FileSystemWriter.finish``, torch 2.6 to 2.13.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_mcore.checkpoint.manifest import METADATA_FILE

COMMON_FILE = "common.pt"

_CHECKPOINT = "torch.distributed.checkpoint"
_ADMITTED = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},  # of megatron-core 0.15
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}


def read_metadata(path: str, content: bytes) -> Metadata:
    """Return the content of ``.metadata``; only the classes that belong there are accepted.

    Args:
        path: The path of the checkpoint, named in errors.
        content: The bytes of the file.

    Raises:
        ValueError: It is damaged, or holds something else.
    """
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} cannot be read, because {METADATA_FILE} is damaged or unsafe: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} cannot be read: {METADATA_FILE} holds a {type(metadata).__name__}, not a Metadata")
    return metadata


def read_common(content: bytes) -> dict[str, Any]:
    """Return the plain values in ``common.pt``; an empty dict if it cannot be read.

    Args:
        content: The bytes of the file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            found = _InertUnpickler(io.BytesIO(archive.read(name))).load()
    except Exception:  # a damaged pickle can raise anything, and these values are optional
        return {}
    return found if isinstance(found, dict) else {}


def tensors_of(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Return shape and dtype of every tensor, in the manifest's format."""
    return {
        name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def least_sizes(metadata: Metadata) -> dict[str, int]:
    """Return the smallest size in bytes that each tensor file can have, by name."""
    places: Mapping[Any, Any] = metadata.storage_data or {}
    sizes: dict[str, int] = {}
    for place in places.values():
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def tensor_bytes(shape: list[int], dtype: str) -> int:
    """Return the size of a tensor in bytes; 0 for a dtype that this version of torch does not know."""
    kind = getattr(torch, dtype, None)
    return math.prod(shape) * kind.itemsize if isinstance(kind, torch.dtype) else 0


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


class _Inert:
    """A replacement for an object of any class: keeps its plain attributes and does nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return dict if (module, name) == ("collections", "OrderedDict") else _Inert

    def persistent_load(self, pid: Any) -> Any:
        return None  # the bytes of a tensor
