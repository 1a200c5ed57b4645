# SPDX-License-Identifier: Apache-2.0
"""The weights of a Hugging Face model on the disk: which tensors there are, and any rectangle of one.

A model is one ``model.safetensors``, or several files with an index. Only headers are read when a
:class:`SafetensorsFolder` is opened; a rectangle is read from the mapped file when it is asked for. Every file is
checked to be as long as its header says, so that a broken download is found before training.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_mcore.hf.hf_config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = {"F64", "F32", "F16", "BF16"}


class SafetensorsFolder:
    """The tensors of a model.

    Args:
        folder: Where ``model.safetensors``, or its index, lies.

    Attributes:
        folder: The same.
        shapes: Shape of every tensor, by name.

    Raises:
        FileNotFoundError: There are no safetensors, or one of the files is missing.
        ValueError: A file is damaged, the index does not fit the files, or the weights are quantised.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        index = self._index()
        for name in sorted(set(index.values())) if index is not None else [SINGLE_FILE]:
            self._read_header(name)
        if index is not None:
            self._compare(index)

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a rectangle of a tensor.

        Args:
            name: Of the tensor.
            start: Where the rectangle begins.
            shape: Its shape.

        Raises:
            ValueError: The file cannot be read.
        """
        with self._refusing(self._files[name]):
            file = self._handle(self._files[name])
            if shape == self.shapes[name]:
                whole: Tensor = file.get_tensor(name)
                return whole
            place = tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))
            part: Tensor = file.get_slice(name)[place]
            return part

    def _index(self) -> dict[str, str] | None:
        if not os.path.exists(os.path.join(self.folder, INDEX_FILE)):
            if not os.path.exists(os.path.join(self.folder, SINGLE_FILE)):
                raise FileNotFoundError(
                    f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; give a model in safetensors, which"
                    " transformers writes with save_pretrained"
                )
            return None
        index = read_json(self.folder, INDEX_FILE).get("weight_map")
        if not isinstance(index, dict) or any(os.path.basename(str(name)) != name for name in index.values()):
            raise ValueError(f"{self.folder}/{INDEX_FILE} has no weight_map of file names; download it again")
        return index

    def _read_header(self, file_name: str) -> None:
        if not os.path.exists(os.path.join(self.folder, file_name)):
            raise FileNotFoundError(f"{self.folder} lacks {file_name}, which its index names; download it again")
        with self._refusing(file_name):
            file = self._handle(file_name)
            for name in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise ValueError(
                        f"{name} in {self.folder}/{file_name} holds {part.get_dtype()}, as in a quantised model;"
                        " give the model in bf16, fp16 or fp32"
                    )
                self.shapes[name] = tuple(part.get_shape())
                self._files[name] = file_name

    def _compare(self, index: dict[str, str]) -> None:
        wrong = sorted(name for name in index.keys() | self._files.keys() if index.get(name) != self._files.get(name))
        if wrong:
            raise ValueError(
                f"{self.folder}/{INDEX_FILE} and the files do not agree on {len(wrong)} tensors, the first is"
                f" {wrong[0]}; download the model again"
            )

    def _handle(self, file_name: str) -> Any:
        if file_name not in self._open:
            self._open[file_name] = safe_open(os.path.join(self.folder, file_name), framework="pt")
        return self._open[file_name]

    @contextmanager
    def _refusing(self, file_name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.folder}/{file_name} is damaged, for {error}; download it again") from error


def dtype_of(folder: SafetensorsFolder, name: str) -> torch.dtype:
    """Return the type of a tensor's values."""
    return folder.read(name, (0,) * len(folder.shapes[name]), (0,) * len(folder.shapes[name])).dtype
