# SPDX-License-Identifier: Apache-2.0
"""What describes a checkpoint: its manifest ``checkpoint.json``, and Megatron's ``.metadata`` and ``common.pt``.

The manifest is JSON, so that a checkpoint can be inspected without the code that wrote it::

    {"format": "lightning_mcore", "format_version": 2, "global_step": 400, ...,
     "files": {"__0_0.distcp": {"size": 1048576, "crc32": "9ae0daaf"}, ...}}

``strategy/checkpointing.py`` puts the entries of :func:`describe` into every checkpoint, ``files.py`` adds the files.
Before a load, :func:`check_model` and :func:`check_optimizer` compare the manifest with the run. This module also makes
the errors for paths that are not checkpoints. It opens no files, and imports torch only where it describes tensors.
"""

import contextlib
import dataclasses
import errno
import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lightning_mcore.config.layout import ParallelLayout

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.optim import Optimizer

MANIFEST_FILE = "checkpoint.json"
FORMAT = "lightning_mcore"
FORMAT_VERSION = 2  # 1 had the states of all ranks in one file
LIGHTNING_FILE = "lightning.pt"  # loops, callbacks, hyper-parameters, LR schedulers, datamodule
OLD_RANKS_FILE = "ranks.pt"  # in format version 1: a list over the global ranks
COMMON_FILE = "common.pt"  # Megatron-LM's arguments
_COMMON_OBJECT = "common_state/shard_0_1"  # the same since megatron-core 0.19
METADATA_FILE = ".metadata"  # names, shapes and places of the tensors
MEGATRON_FILES = ("metadata.json", METADATA_FILE)  # of every torch_dist checkpoint
DELETED_FIRST = (MANIFEST_FILE, METADATA_FILE)  # without these, the rest is not taken for a checkpoint
# Unpickling can run anything, so only these classes are accepted in .metadata, and objects in common.pt become inert.
# Source: torch.distributed.checkpoint.filesystem.FileSystemWriter.finish, torch 2.6 to 2.13.
_NUMBERS = {"FloatStorage": "<f", "DoubleStorage": "<d", "IntStorage": "<i", "LongStorage": "<q"}
_PLAIN = (bool, int, float, str, type(None))
_SECTIONS = ("model", "contents", "layout", "versions", "tensors")
_TORCH_CHECKPOINT = "torch.distributed.checkpoint"
_ADMITTED = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},  # of megatron-core 0.15
    f"{_TORCH_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_TORCH_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_TORCH_CHECKPOINT}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """The manifest's entry for one file."""

    size: int
    crc32: str  # 8 hexadecimal digits


def encode_manifest(manifest: Mapping[str, Any], files: Mapping[str, FileRecord]) -> bytes:
    """Return the manifest as bytes, with format, version and files filled in."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION}
    records = {name: dataclasses.asdict(files[name]) for name in sorted(files)}
    return json.dumps({**head, **manifest, **head, "files": records}, indent=1).encode()


def decode_manifest(path: str, text: bytes) -> dict[str, Any]:
    """Return the manifest in ``text``; ``ValueError`` if it is not one, is damaged, or is of a newer format version."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(path, f"{MANIFEST_FILE} is not complete JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of lightning_mcore: its {MANIFEST_FILE} was written by another program; give "
            "the path of a checkpoint"
        )
    version = manifest.get("format_version")
    if not isinstance(version, int):
        raise damaged(path, f"{MANIFEST_FILE} does not give its format_version")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has checkpoint format {version}, but this lightning_mcore supports formats up to {FORMAT_VERSION};"
            f" install the version that wrote it ({_writer(manifest)}) or a later one"
        )
    if not _describes_files(manifest.get("files")):
        raise damaged(path, f"{MANIFEST_FILE} does not list its files")
    for section in _SECTIONS:
        if not isinstance(manifest.get(section) or {}, dict):
            raise damaged(path, f"{section!r} in {MANIFEST_FILE} is not a mapping")
    return manifest


def some_of(names: Collection[str], most: int) -> str:
    """Return the first ``most`` names in alphabetical order, and the number of the others, as text."""
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def no_checkpoint(path: str, names: Collection[str]) -> ValueError:
    """Return the error for a directory without a manifest, given the names in it."""
    if is_interrupted(names):
        return interrupted(path)
    if is_megatron(names):
        return ValueError(
            f"{path} is a checkpoint of Megatron-LM or another program and does not say how to build its model; resume"
            " from it with trainer.fit(..., ckpt_path=path), or start from its weights with self.load_weights(path) in"
            " configure_model"
        )
    inside = [name for name in sorted(names) if name.endswith(".ckpt") or name.startswith("iter_")]
    advice = f"did you mean {path.rstrip('/')}/{inside[-1]}" if inside else "give the path of a checkpoint"
    return ValueError(f"{path} is a directory, but not a checkpoint: it has no {MANIFEST_FILE}; {advice}")


def interrupted(path: str) -> ValueError:
    """Return the error for a checkpoint whose save was interrupted."""
    return ValueError(f"{path} is not a complete checkpoint, because its save was interrupted; use another one")


def damaged(path: str, what: str) -> ValueError:
    """Return the error for a checkpoint that has changed since it was saved; ``what`` names the file and the fault."""
    return ValueError(f"{path} is damaged: {what}; use another checkpoint or a copy of this one")


@contextlib.contextmanager
def saving(path: str) -> Iterator[None]:
    """Turn a disk error into one sentence about ``path``, with the same ``errno``; a context manager or decorator."""
    try:
        yield
    except OSError as error:
        raise _unsaved(path, error) from error


def _unsaved(path: str, error: OSError) -> OSError:
    advice = {
        errno.ENOSPC: "free some space there or keep fewer checkpoints",
        errno.EDQUOT: "free some space there or keep fewer checkpoints",
        errno.EROFS: "save to a writable disk",
        errno.EACCES: "save to a directory that this user may write to",
        errno.EPERM: "save to a directory that this user may write to",
    }
    what = (error.strerror or str(error)).lower()
    return OSError(error.errno, f"{path} could not be saved: {what}; {advice.get(error.errno or 0, 'check the disk')}")


def is_interrupted(names: Collection[str]) -> bool:
    """Return whether a directory with these names is a checkpoint of ours that lacks its manifest."""
    # Rank 0 writes lightning.pt with its tensors, so a crash may leave only .distcp files of other ranks.
    shards = any(name.endswith(".distcp") for name in names)
    return MANIFEST_FILE not in names and (LIGHTNING_FILE in names or (shards and not is_megatron(names)))


def is_megatron(names: Collection[str]) -> bool:
    """Return whether a directory with these files is a ``torch_dist`` checkpoint that another program wrote."""
    return all(name in names for name in MEGATRON_FILES) and not {MANIFEST_FILE, LIGHTNING_FILE} & {*names}


def may_be_replaced(names: Collection[str]) -> bool:
    """Return whether a directory with these files is empty or a checkpoint, complete or not, of any format."""
    return not names or MANIFEST_FILE in names or METADATA_FILE in names or is_interrupted(names)


def _writer(manifest: Mapping[str, Any]) -> str:
    versions = manifest.get("versions")
    return f"lightning_mcore {versions.get('lightning_mcore')}" if isinstance(versions, dict) else "unknown"


def _describes_files(files: Any) -> bool:
    """Return whether ``files`` of an untrusted manifest lists only files inside its own directory."""
    return isinstance(files, dict) and all(
        isinstance(record, dict)
        and isinstance(record.get("size"), int)
        and isinstance(record.get("crc32"), str)
        and not {"", ".."} & {*name.split("/")}
        for name, record in files.items()
    )


def versions() -> dict[str, str]:
    """Return the versions of this package and of those that it runs on."""
    import lightning
    import megatron.core
    import torch

    return {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "megatron-core": megatron.core.__version__.partition("+")[0],
        "lightning_mcore": version("lightning-mcore"),
    }


def describe(
    module: "LightningModule",
    layout: ParallelLayout,
    world_size: int,
    precision: str,
    use_distributed_optimizer: bool,
    config: Any,
    optimizers: "Sequence[Optimizer]",
) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without its tensors and files.

    ``precision`` is as in ``Trainer(precision=)``, ``config`` the TransformerConfig (None for a plain module).
    ``optimizers`` is empty if only weights are saved.
    """
    # module.trainer would raise here if the checkpoint is saved without a run; _trainer is None then.
    trainer = module._trainer
    return {
        "versions": versions(),
        "layout": dataclasses.asdict(layout),
        "world_size": world_size,
        "precision": precision,
        "use_distributed_optimizer": use_distributed_optimizer,
        "global_step": trainer.global_step if trainer is not None else 0,
        "epoch": trainer.current_epoch if trainer is not None else 0,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "class": f"{type(module).__module__}.{type(module).__qualname__}",
            "vocab_size": _vocabulary(module),
            "config": _config_fields(config),
        },
        "contents": {
            "weights": True,
            "optimizer": bool(optimizers),
            "optimizer_class": type(optimizers[0]).__name__ if optimizers else None,
        },
    }


def check_model(path: str, manifest: Mapping[str, Any], module: "LightningModule") -> None:
    """Raise ``ValueError`` if the checkpoint has another vocabulary size, which padded embeddings may hide."""
    # With make_vocab_size_divisible_by=128, vocabularies of 50,200 and 50,257 both have 50,304 rows.
    saved, own = (manifest.get("model") or {}).get("vocab_size"), _vocabulary(module)
    if saved is not None and own is not None and saved != own:
        raise ValueError(
            f"{path} was written by a model with vocab_size={saved}, but this one has vocab_size={own}; set "
            f"vocab_size={saved}"
        )


def check_optimizer(path: str, manifest: Mapping[str, Any], optimizers: "Sequence[Optimizer]") -> None:
    """Raise ``ValueError`` if the checkpoint has the state of an optimizer of another kind."""
    from torch.optim import Adam

    contents = manifest.get("contents") or {}
    saved, own = contents.get("optimizer_class"), [type(optimizer).__name__ for optimizer in optimizers]
    # The Adam variants keep the same state (exp_avg, exp_avg_sq, step), so each may resume from another.
    is_adam = saved in ("Adam", "AdamW", "FusedAdam") and any(isinstance(optimizer, Adam) for optimizer in optimizers)
    if saved not in own and not is_adam:
        raise ValueError(
            f"{path} contains the state of {saved}, but configure_optimizers returned {' and '.join(own)}; return"
            f" {saved}, or load only the weights with self.load_weights(path) in configure_model"
        )


def _vocabulary(module: "LightningModule") -> int | None:
    size = getattr(module, "vocab_size", None)
    return size if isinstance(size, int) else None


def _config_fields(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    values = {field.name: _json_value(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def _json_value(value: Any) -> Any:
    """Return a value in a form that JSON can hold; None if it has no such form."""
    import torch

    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
        return list(value)
    return getattr(value, "__name__", None)  # an activation function


def read_metadata(path: str, content: bytes) -> "Metadata":
    """Return the content of ``.metadata``; ValueError for classes and places that do not belong there."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read, because {METADATA_FILE} is damaged or unsafe: {error}; use another checkpoint"
        ) from error
    if not isinstance(metadata, Metadata):
        raise ValueError(
            f"{path} cannot be read: {METADATA_FILE} contains a {type(metadata).__name__}, not a Metadata;"
            " use another checkpoint"
        )
    for place in (metadata.storage_data or {}).values():
        name = place.relative_path
        if name.startswith("/") or ".." in name.split("/"):
            raise damaged(path, f"{METADATA_FILE} names {name}, which lies outside the checkpoint")
    return metadata


def read_common(content: bytes) -> dict[str, Any]:
    """Return the plain values in ``common.pt``, with numbers for tensors of one element; else an empty dict."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            found = _InertUnpickler(archive).load()
    except Exception:  # a damaged pickle can raise anything, and these values are optional
        return {}
    found = found[0] if isinstance(found, list) and found else found  # of megatron-core 0.19
    return found if isinstance(found, dict) else {}


def place_of_common(metadata: "Metadata") -> Any | None:
    """Return where the content of ``common.pt`` is, which megatron-core 0.19 writes among the tensors; None if not."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return (metadata.storage_data or {}).get(MetadataIndex(_COMMON_OBJECT))


def tensors_of(metadata: "Metadata") -> dict[str, dict[str, Any]]:
    """Return shape and dtype of every tensor, in the manifest's format."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def least_sizes(metadata: "Metadata") -> dict[str, int]:
    """Return the smallest possible size of each tensor file, in bytes, by name."""
    places: Mapping[Any, Any] = metadata.storage_data or {}
    sizes: dict[str, int] = {}
    for place in places.values():
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def size_of_tensor(shape: list[int], dtype: str) -> int:
    """Return the size of a tensor in bytes; 0 for a dtype that this version of torch does not know."""
    import torch

    kind = getattr(torch, dtype, None)
    return math.prod(shape) * kind.itemsize if isinstance(kind, torch.dtype) else 0


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        module = "pathlib" if module == "pathlib._local" else module  # what Python 3.13 writes
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
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        super().__init__(io.BytesIO(archive.read(self._name)))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _NUMBERS:
            return name
        found = {
            ("collections", "OrderedDict"): dict,
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, *_: storage,
        }
        return found.get((module, name), _Inert)

    def persistent_load(self, pid: Any) -> Any:
        """Return the number in the storage of a tensor; None if there are more."""
        _, kind, key, _, count = pid
        if count != 1 or kind not in _NUMBERS:
            return None
        return struct.unpack(_NUMBERS[kind], self._archive.read(self._name.removesuffix("data.pkl") + f"data/{key}"))[0]
