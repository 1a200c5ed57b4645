# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model's weights on disk: read any rectangle of a tensor, write files tensor by tensor.

A model is one ``model.safetensors``, or several files with an index. Opening a :class:`SafetensorsFolder` reads only
headers; ``safe_open`` rejects a damaged or incomplete file, so a broken download is found before a model is built. A
rectangle is a view of the mapped file: values are read only when they are copied, and copied only once. A model without
safetensors may have files of ``torch.save`` (``pytorch_model.bin``), which torch maps without running code from them.
Weights in MXFP4 are dequantised as they are read (``mxfp4.py``).

:func:`write_safetensors` keeps only one tensor in memory. safetensors' own ``save_file`` needs all of them at once,
writes a file that only this user may read, and uses the page cache, which is slower than a good disk
(``checkpoint/writer.py``).

Source: safetensors 0.8, "Format" in its README: 8 bytes with the length of the header, the header as JSON, the tensors.
"""

import json
import logging
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes
from lightning_mcore.checkpoint.writer import ChecksummedFile, tensor_bytes
from lightning_mcore.hf.files import INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE, SINGLE_FILE, read_json
from lightning_mcore.hf.mxfp4 import BLOCKS, SCALES, dequantise, dequantised_shape
from lightning_mcore.hf.weight_rules import Shape, index_of

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FLOATS = {name: dtype for dtype, name in _NAMES.items()}
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_ALIGNMENT = 8  # bytes; the data starts at a multiple of this
_log = logging.getLogger(__name__)

_Entries = dict[str, tuple[str, Shape]]  # the dtype of each tensor, as safetensors calls it, and its shape


class SafetensorsFolder:
    """The tensors of a model.

    Opens ``model.safetensors`` or its index, or else ``pytorch_model.bin`` or its index. ``unread`` are suffixes of
    tensor names to ignore; one that ends with a dot is a prefix.
    """

    def __init__(self, folder: str, unread: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._unread = unread
        # By file name: what it contains, and the function that returns a tensor as a view
        self._opened: dict[str, tuple[_Entries, Callable[[str], Tensor]]] = {}
        self._places: dict[str, tuple[str, str]] = {}  # the file of each tensor, and its name there
        names = {*os.listdir(folder)}
        is_pickled = not {SINGLE_FILE, INDEX_FILE} & names and bool({PICKLED_FILE, PICKLED_INDEX_FILE} & names)
        single, self._index_file = (PICKLED_FILE, PICKLED_INDEX_FILE) if is_pickled else (SINGLE_FILE, INDEX_FILE)
        index, announced = self._index(single)
        for file in sorted(set(index.values())) if index else [single]:
            self._add(file, {name: name for name in self._open(file)[0] if not self._is_unread(name)})
        # Compare before names change below: gpt-oss's index lists its packed pairs
        if index:
            self._compare({name: file for name, file in index.items() if not self._is_unread(name)}, announced)
        self._join_packed()

    def read(self, name: str, start: Shape, shape: Shape, steps: Shape = ()) -> Tensor:
        """Return a rectangle of a tensor, of the stored dtype, as a view of the mapped file; do not write to it."""
        index = index_of(start, shape, steps)
        # Only weights in MXFP4 have a shape but no place under their own name
        if name not in self._places:
            return dequantise(self._view(name + BLOCKS), self._view(name + SCALES), index)
        return self._view(name)[index]

    @property
    def stored(self) -> StoredDtypes:
        """The dtypes of the tensors."""
        return StoredDtypes.of_tensors(self.dtypes, self.shapes)

    def files_of(self, name: str) -> set[str]:
        """Return the paths of the files that hold a tensor."""
        stored = (name,) if name in self._places else (name + BLOCKS, name + SCALES)
        return {os.path.join(self.folder, self._places[each][0]) for each in stored}

    def adopt(self, file_name: str, name: str, new_name: str) -> None:
        """Add one tensor of another file in the folder, under a new name; ValueError if the file lacks it."""
        if name not in self._open(file_name)[0]:
            raise ValueError(f"{self.folder}/{file_name} has no tensor {name}; give a file that has it, or remove it")
        self._add(file_name, {new_name: name})

    def put_under(self, prefix: str, stem: str, except_for: tuple[str, ...]) -> None:
        """Add a prefix to all names, if no name has it and the layers lack it.

        ``stem`` is how layer names should start, prefix included; names that start with ``except_for`` never have the
        prefix. With ``"model."`` and ``"model.layers."``, ``layers.0.mlp...`` becomes ``model.layers.0.mlp...`` and
        ``lm_head.weight`` stays.
        """
        if any(name.startswith(prefix) for name in self.shapes) or not stem.startswith(prefix):
            return
        if not any((prefix + name).startswith(stem) for name in self.shapes):
            return
        self.rename({"": prefix, **{name: name for name in except_for}})

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """Replace prefixes of all names; of several that a name has, the longest counts."""
        longest_first = sorted(prefixes, key=len, reverse=True)

        def renamed(name: str) -> str:
            found = next((prefix for prefix in longest_first if name.startswith(prefix)), "")
            return prefixes.get(found, found) + name.removeprefix(found)

        tables: tuple[dict[str, Any], ...] = (self.shapes, self.dtypes, self._places)
        for table in tables:
            entries = {renamed(name): value for name, value in table.items()}
            table.clear()
            table.update(entries)

    def _index(self, single: str) -> tuple[dict[str, str], Any]:
        """Return the file of each tensor and the total bytes, from the index; nothing if there is a single file."""
        if not os.path.exists(os.path.join(self.folder, self._index_file)):
            if os.path.exists(os.path.join(self.folder, single)):
                return {}, None
            others = sorted(name for name in os.listdir(self.folder) if name.endswith(_OTHER_FORMATS))
            raise FileNotFoundError(
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{f', only {others[0]}' if others else ''};"
                " give a model in safetensors, which save_pretrained of transformers writes"
            )
        content = read_json(self.folder, self._index_file)
        index, about = content.get("weight_map"), content.get("metadata")
        if not isinstance(index, dict) or not index or not all(map(_is_file_name, index.values())):
            raise ValueError(f"{self.folder}/{self._index_file} has no weight_map of file names; download it again")
        missing = sorted(name for name in set(index.values()) if not os.path.isfile(os.path.join(self.folder, name)))
        if missing:
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            raise FileNotFoundError(
                f"{self.folder} lacks {missing[0]}{more}, which {self._index_file} names; download the model again"
            )
        return index, about.get("total_size") if isinstance(about, dict) else None

    def _is_unread(self, name: str) -> bool:
        return any(name.startswith(part) if part.endswith(".") else name.endswith(part) for part in self._unread)

    def _open(self, file_name: str) -> tuple[_Entries, Callable[[str], Tensor]]:
        """Return what is in a file, and the function that returns a tensor of it as a view."""
        if file_name not in self._opened:
            path = os.path.join(self.folder, file_name)
            is_pickled = self._index_file == PICKLED_INDEX_FILE and not file_name.endswith(".safetensors")
            self._opened[file_name] = self._unpickled(path) if is_pickled else _safetensors(path)
        return self._opened[file_name]

    def _unpickled(self, path: str) -> tuple[_Entries, Callable[[str], Tensor]]:
        """Map a file of ``torch.save``; a file from before torch 1.6 is read into memory."""
        try:
            # Only zip files can be mapped, which torch writes since 1.6
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            tensors = {name: tensor for name, tensor in content.items() if not self._is_unread(name)}
            entries = {
                name: (_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape))
                for name, tensor in tensors.items()
            }
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} contains something other than tensors, or is damaged; save the model again with"
                " save_pretrained of transformers, which writes safetensors"
            ) from error
        return entries, tensors.__getitem__

    def _add(self, file_name: str, names: Mapping[str, str]) -> None:
        """Add a file's tensors, given as the name here and the name there."""
        entries, _ = self._open(file_name)
        for name, stored in names.items():
            kind, shape = entries[stored]
            # Bytes are accepted under MXFP4's names only; other integers are quantised weights or buffers
            is_packed = kind == "U8" and name.endswith((BLOCKS, SCALES))
            if kind not in _FLOATS and not is_packed:
                raise ValueError(
                    f"{name} in {self.folder}/{file_name} holds {kind}, as in a quantised model or a buffer without"
                    " weights; give the model in bf16, fp16 or fp32, and without such buffers"
                )
            self._places[name], self.shapes[name] = (file_name, stored), shape
            self.dtypes[name] = torch.uint8 if is_packed else _FLOATS[kind]

    def _view(self, name: str) -> Tensor:
        """Return a whole tensor, of its stored shape and dtype, as a view of its mapped file."""
        file_name, stored = self._places[name]
        return self._opened[file_name][1](stored)

    def _join_packed(self) -> None:
        """Replace the two byte tensors of each dequantised weight by the tensor that they stand for."""
        packed = {name for name, dtype in self.dtypes.items() if dtype == torch.uint8}
        for stem in sorted({name.removesuffix(BLOCKS).removesuffix(SCALES) for name in packed}):
            blocks, scales = self.shapes.pop(stem + BLOCKS, ()), self.shapes.pop(stem + SCALES, ())
            shape = dequantised_shape(blocks, scales)
            if shape is None or stem in self.shapes:
                raise ValueError(
                    f"{self.folder} has {stem}{BLOCKS} {list(blocks)} and {stem}{SCALES} {list(scales)}, which are not"
                    " one matrix in MXFP4; download the model again"
                )
            self.shapes[stem], self.dtypes[stem] = shape, torch.bfloat16
        self.dtypes = {name: self.dtypes[name] for name in self.shapes}

    def _compare(self, index: dict[str, str], announced: Any) -> None:
        """Reject an index that disagrees with the files; only warn of a wrong total size, which some models have."""
        found = {name: file for name, (file, _) in self._places.items()}
        wrong = sorted(name for name in index.keys() | found.keys() if index.get(name) != found.get(name))
        if wrong:
            raise ValueError(
                f"{self.folder}/{self._index_file} and the files disagree on {len(wrong)} tensors, first on"
                f" {wrong[0]}; download the model again"
            )
        size = sum(prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())
        if announced not in (None, size):
            rank_zero_only(_log.warning)(
                "%s/%s gives %s bytes of weights, but the files have %d; if that is unexpected, download the model "
                "again",
                *(self.folder, self._index_file, announced, size),
            )


def _safetensors(path: str) -> tuple[_Entries, Callable[[str], Tensor]]:
    """Open a safetensors file: read its header, and map it."""
    try:
        file: Any = safe_open(path, "pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(f"{path} is damaged ({reason}); download it again") from error
    return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}, file.get_tensor


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and os.path.basename(value) == value


def write_safetensors(
    path: str,
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write and flush a file; ``read`` returns each tensor once, contiguous and on the CPU."""
    # Widest first, so that each starts at a multiple of its item size: fp32 [2, 3] at bytes 0-23, bf16 [4] at 24-31
    names = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    with ChecksummedFile(path) as file:
        file.write(_header(names, tensors))
        for name in names:
            tensor = read(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (tensors[name][0], tuple(tensors[name][1]))
            file.write(tensor_bytes(tensor))


def _header(names: list[str], tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        start, end = end, end + prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
