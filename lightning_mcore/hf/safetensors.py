# SPDX-License-Identifier: Apache-2.0
"""The weights of a Hugging Face model on the disk: read any rectangle of a tensor, write files tensor by tensor.

A model is one ``model.safetensors``, or several files with an index. Opening a :class:`SafetensorsFolder` reads only
headers, and checks that every file has the length that its header gives, so a broken download is found before a model
is built. A rectangle is a view of the mapped file: values are read only when they are copied, and copied only once.
A model without such files may have those of ``torch.save`` (``pytorch_model.bin``), which torch maps without running
code from them.
``safe_open`` of safetensors does not read ahead: for columns of a matrix on a cold disk it takes twice as long.

:func:`write_safetensors` keeps only one tensor in memory. The header says where each tensor will lie, which is known
before the first tensor is. ``save_file`` of safetensors needs all tensors at once, writes a file that only this user
may read, and uses the page cache, which is slower than a good disk (``checkpoint/writer.py``).

Weights in MXFP4 are dequantised as they are read (``mxfp4.py``).

Source: safetensors 0.8, "Format" in its README: 8 bytes with the length of the header, the header as JSON, the tensors.
"""

import json
import logging
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes
from lightning_mcore.checkpoint.writer import ChecksummedFile, tensor_bytes
from lightning_mcore.hf.files import (
    INDEX_FILE,
    PICKLED_FILE,
    PICKLED_INDEX_FILE,
    SINGLE_FILE,
    read_header,
    read_json,
)
from lightning_mcore.hf.mxfp4 import BLOCKS, SCALES, dequantise, dequantised_shape
from lightning_mcore.hf.weight_rules import Shape, index_of

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_log = logging.getLogger(__name__)

_IN_A_PICKLE = -1  # where a tensor begins that torch has mapped
_AHEAD_FROM = 1 << 20  # bytes from which to read ahead instead of page by page


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in the files.

    Args:
        file: The name of its file.
        dtype: Type of its values.
        begin: The byte at which the values begin in the file.
        shape: Its shape.
    """

    file: str
    dtype: torch.dtype
    begin: int
    shape: Shape


def _is_unread(name: str, unread: tuple[str, ...]) -> bool:
    return name.endswith(unread) or name.startswith(tuple(part for part in unread if part.endswith(".")))


class SafetensorsFolder:
    """The tensors of a model.

    Args:
        folder: The folder with ``model.safetensors`` or its index, or else ``pytorch_model.bin`` or its index.
        unread: Endings of the names of tensors to ignore; one with a dot at its end is a beginning.

    Attributes:
        folder: The argument.
        shapes: Shape of every tensor that is not ignored, by name.
        dtypes: The dtype of each such tensor, a floating-point type.

    Raises:
        FileNotFoundError: There are no safetensors files, or one of them is missing.
        ValueError: A file is damaged, the index does not match the files, or the weights are quantised.
    """

    def __init__(self, folder: str, unread: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._places: dict[str, _Place] = {}
        self._mapped: dict[str, mmap.mmap] = {}
        self._whole: dict[str, Tensor] = {}
        self._announced: Any = None  # bytes of all tensors, from the index
        names = os.listdir(folder)
        is_pickled = not {SINGLE_FILE, INDEX_FILE} & {*names} and bool({PICKLED_FILE, PICKLED_INDEX_FILE} & {*names})
        single, self._index_file = (PICKLED_FILE, PICKLED_INDEX_FILE) if is_pickled else (SINGLE_FILE, INDEX_FILE)
        index = self._index(single)
        for name in [single] if index is None else sorted(set(index.values())):
            if is_pickled:
                self._read_pickled(name, unread)
            else:
                self._read_header(name, unread)
        if index is not None:
            self._compare({name: file for name, file in index.items() if not _is_unread(name, unread)})
            self._compare_sizes()
        self._join_packed()

    def read(self, name: str, start: Shape, shape: Shape, steps: Shape = ()) -> Tensor:
        """Return a rectangle of a tensor, of the stored dtype, as a view of the mapped file; do not write to it.

        Args:
            name: Name of the tensor.
            start: The index at which the rectangle begins.
            shape: Its shape.
            steps: The distance between neighbouring values on each axis; empty if it is 1 everywhere.
        """
        if name not in self._places:
            return dequantise(self._view(name + BLOCKS), self._view(name + SCALES), index_of(start, shape, steps))
        whole = self._view(name)
        if shape == self.shapes[name]:
            self._announce(name, 0, whole.nbytes)
            return whole
        if shape:
            row = whole[0].nbytes if whole.numel() else 0
            self._announce(name, start[0] * row, shape[0] * row)
        return whole[index_of(start, shape, steps)]

    @property
    def stored(self) -> StoredDtypes:
        """The dtypes of the tensors."""
        return StoredDtypes.of_tensors(self.dtypes, self.shapes)

    def files_of(self, name: str) -> set[str]:
        """Return the paths of the files that hold a tensor."""
        stored = (name,) if name in self._places else (name + BLOCKS, name + SCALES)
        return {os.path.join(self.folder, self._places[each].file) for each in stored}

    def adopt(self, file_name: str, name: str, new_name: str) -> None:
        """Add one tensor of another file in the folder, under a new name.

        Args:
            file_name: Name of the file.
            name: Name of the tensor in it.
            new_name: Its name here.

        Raises:
            ValueError: The file is damaged, or lacks the tensor.
        """
        known = set(self.shapes)
        self._read_header(file_name, ())
        if name not in self.shapes:
            raise ValueError(f"{self.folder}/{file_name} has no tensor {name}; give a file that has it, or remove it")
        for table in (self.shapes, self.dtypes, self._places):
            found: dict[str, Any] = table
            kept = found[name]
            for other in found.keys() - known:
                del found[other]
            found[new_name] = kept

    def put_under(self, prefix: str, stem: str, except_for: tuple[str, ...]) -> None:
        """Add a prefix to all names, if none has it and those of layers lack it.

        Args:
            prefix: The prefix.
            stem: How names of layers should begin, the prefix included.
            except_for: How names begin that never have it.
        """
        if any(name.startswith(prefix) for name in self.shapes) or not stem.startswith(prefix):
            return
        if not any((prefix + name).startswith(stem) for name in self.shapes):
            return
        tables: tuple[dict[str, Any], ...] = (self.shapes, self.dtypes, self._places, self._whole)
        for table in tables:
            renamed = {name if name.startswith(except_for) else prefix + name: table[name] for name in table}
            table.clear()
            table.update(renamed)

    # ---- headers

    def _read_pickled(self, file_name: str, unread: tuple[str, ...]) -> None:
        """Map the tensors of a file of ``torch.save``; one of before torch 1.6 is read into memory."""
        path = os.path.join(self.folder, file_name)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            tensors = {name: tensor for name, tensor in content.items() if not _is_unread(name, unread)}
            kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"{path} holds something other than tensors, or is damaged ({reason}); save the model again with"
                " save_pretrained of transformers, which writes safetensors"
            ) from error
        for name, tensor in tensors.items():
            if tensor.dtype not in _FLOATS.values():
                raise self._no_weights(file_name, name, kinds[name])
            shape = tuple(tensor.shape)
            self._places[name], self._whole[name] = _Place(file_name, tensor.dtype, _IN_A_PICKLE, shape), tensor
            self.shapes[name], self.dtypes[name] = shape, tensor.dtype

    def _index(self, single: str) -> dict[str, str] | None:
        """Return the file of each tensor, by name; None if there is only one file."""
        if not os.path.exists(os.path.join(self.folder, self._index_file)):
            if not os.path.exists(os.path.join(self.folder, single)):
                raise FileNotFoundError(self._without_safetensors())
            return None
        content = read_json(self.folder, self._index_file)
        index, about = content.get("weight_map"), content.get("metadata")
        self._announced = about.get("total_size") if isinstance(about, dict) else None
        if not isinstance(index, dict) or not index or not all(map(_is_file_name, index.values())):
            raise ValueError(f"{self.folder}/{self._index_file} has no weight_map of file names; download it again")
        missing = sorted(name for name in set(index.values()) if not os.path.isfile(os.path.join(self.folder, name)))
        if missing:
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            raise FileNotFoundError(
                f"{self.folder} lacks {missing[0]}{more}, which {self._index_file} names; download the model again"
            )
        return index

    def _without_safetensors(self) -> str:
        others = sorted(name for name in os.listdir(self.folder) if name.endswith(_OTHER_FORMATS))
        found = f", only {others[0]}" if others else ""
        return (
            f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}; give a model in safetensors, which"
            " save_pretrained of transformers writes"
        )

    def _read_header(self, file_name: str, unread: tuple[str, ...]) -> None:
        path = os.path.join(self.folder, file_name)
        header, first = read_header(path)
        ranges: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            kind, shape, begin, last = self._entry(file_name, name, entry)
            ranges.append((begin, last, name))
            if not _is_unread(name, unread):
                dtype = self._type(file_name, name, kind)
                if last - begin != prod(shape) * dtype.itemsize:
                    raise self._unreadable(file_name, name)
                self._places[name] = _Place(file_name, dtype, first + begin, shape)
                self.shapes[name], self.dtypes[name] = shape, dtype
        end = 0
        for begin, last, name in sorted(ranges):
            if begin != end:  # the format allows no gaps and no shared bytes
                raise self._unreadable(file_name, name)
            end = last
        size = os.path.getsize(path)
        if first + end != size:
            raise ValueError(
                f"{path} is damaged: it has {size} bytes, and its header describes {first + end}; download it again"
            )

    def _entry(self, file_name: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        """Return dtype, shape, begin and end of a tensor; the last two in bytes after the header."""
        try:
            (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable(file_name, name) from error
        sizes = (begin, end, *shape)
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes) or begin > end:
            raise self._unreadable(file_name, name)
        return str(entry.get("dtype")), shape, begin, end

    def _join_packed(self) -> None:
        """Replace the pairs of tensors of dequantised weights by the tensors that they stand for."""
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

    def _type(self, file_name: str, name: str, kind: str) -> torch.dtype:
        if kind == "U8" and name.endswith((BLOCKS, SCALES)):
            return torch.uint8
        if kind not in _FLOATS:
            raise self._no_weights(file_name, name, kind)
        return _FLOATS[kind]

    def _no_weights(self, file_name: str, name: str, kind: str) -> ValueError:
        return ValueError(
            f"{name} in {self.folder}/{file_name} holds {kind}, as in a quantised model or a buffer without"
            " weights; give the model in bf16, fp16 or fp32, and without such buffers"
        )

    def _unreadable(self, file_name: str, name: str) -> ValueError:
        return ValueError(
            f"{self.folder}/{file_name} is damaged: its header has no valid place for {name}; download it again"
        )

    def _compare(self, index: dict[str, str]) -> None:
        found = {name: place.file for name, place in self._places.items()}
        wrong = sorted(name for name in index.keys() | found.keys() if index.get(name) != found.get(name))
        if wrong:
            raise ValueError(
                f"{self.folder}/{self._index_file} and the files disagree on {len(wrong)} tensors, first on"
                f" {wrong[0]}; download the model again"
            )

    def _compare_sizes(self) -> None:
        """Warn if the index gives another total size than the files; some published models have it wrong."""
        found = sum(prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())
        if self._announced not in (None, found):
            rank_zero_only(_log.warning)(
                "%s/%s gives %s bytes of weights, but the files have %d; if that is unexpected, download the model "
                "again",
                *(self.folder, self._index_file, self._announced, found),
            )

    # ---- values

    def _view(self, name: str) -> Tensor:
        """Return a whole tensor, of its stored shape and dtype, in the memory of its mapped file."""
        if name not in self._whole:
            place = self._places[name]
            shape = place.shape
            count = prod(shape) * place.dtype.itemsize
            if count == 0:
                return torch.empty(shape, dtype=place.dtype)
            values = torch.frombuffer(self._map(place.file), dtype=torch.uint8, count=count, offset=place.begin)
            if place.begin % place.dtype.itemsize:
                values = values.clone()  # a view would not be aligned
            self._whole[name] = values.view(place.dtype).view(shape)
        return self._whole[name]

    def _map(self, file_name: str) -> mmap.mmap:
        if file_name not in self._mapped:
            with open(os.path.join(self.folder, file_name), "rb") as file:
                self._mapped[file_name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapped[file_name]

    def _announce(self, name: str, begin: int, length: int) -> None:
        """Read ahead a range of bytes of a tensor, most of which will be used."""
        if length < _AHEAD_FROM or not hasattr(mmap, "MADV_WILLNEED"):
            return
        place = self._places[name]
        if place.begin == _IN_A_PICKLE:
            return
        first = (place.begin + begin) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map(place.file).madvise(mmap.MADV_WILLNEED, first, place.begin + begin + length - first)


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and os.path.basename(value) == value


_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8  # bytes; alignment of the data


def write_safetensors(
    path: str,
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write a file, and flush it to the disk.

    Args:
        path: Where to write; an existing file is replaced.
        tensors: Type and shape of each tensor, by name.
        read: Returns the tensor with a given name, contiguous, on the CPU, with that dtype and shape; called once for
            each.

    Raises:
        OSError: The disk reports an error.
    """
    names = sorted(
        tensors, key=lambda name: -tensors[name][0].itemsize
    )  # so that each begins at a multiple of its item size
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
