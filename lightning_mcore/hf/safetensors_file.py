# SPDX-License-Identifier: Apache-2.0
"""A safetensors file written tensor by tensor, so that none but the one being written need be in memory.

The format says in a header where each tensor will lie, which is known before the first is there. ``save_file`` of
safetensors wants all of them at once, its file can be read by this user alone, and it goes through the page cache of
the system, whose pages have to be found and cleared first. That takes longer than a good disk, so these files go past
it (``checkpoint/storage/direct_file.py``).

Source: the format in the README of safetensors 0.8; files of it are read by ``safe_open``.
"""

import json
import struct
from collections.abc import Callable, Mapping
from math import prod

import torch

from lightning_mcore.checkpoint.storage.direct_file import ChecksummedFile
from lightning_mcore.checkpoint.storage.torch_archive import tensor_bytes
from lightning_mcore.hf.weight_rules import Shape

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8  # bytes; where the data begin
_NO_CHECKSUM = 0  # nobody asks for that of the file


def write_safetensors(
    path: str,
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write a file, to the disk.

    Args:
        path: Where to; what is there is replaced.
        tensors: Type and shape of each tensor, by name.
        read: Returns a tensor on the CPU, given its name; called once for each.

    Raises:
        OSError: The disk refuses.
    """
    names = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)  # so that each begins at a multiple of its own
    with ChecksummedFile(path) as file:
        file.write(_header(names, tensors))
        for name in names:
            tensor = read(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (tensors[name][0], tuple(tensors[name][1]))
            file.write(tensor_bytes(tensor), _NO_CHECKSUM)


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
