# SPDX-License-Identifier: Apache-2.0
"""Read the weights in a sharded checkpoint piece by piece in one process, for the offline export.

A checkpoint in Megatron's ``torch_dist`` format, ours or Megatron-LM's, holds each tensor as rectangles in several
files, as its layout split it. :class:`StoredTensors` lists these rectangles by the whole names of their tensors
(:attr:`~StoredTensors.places`) and reads them from mapped files. It needs no process groups and no GPU, and only the
memory of the pages that were read last.
"""

import os
import zlib
from collections import OrderedDict
from threading import Lock

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint.manifest import METADATA_FILE, damaged, least_sizes, read_metadata
from lightning_mcore.checkpoint.reader import ShardReader
from lightning_mcore.hf.export_plan import Place
from lightning_mcore.hf.weight_map import whole_names
from lightning_mcore.hf.weight_rules import Shape

_OF_AN_OPTIMIZER = ("optimizer.", "chained_", "optimizer_")  # prefixes of the names of optimizer state
_MAPPED = 64 << 20  # bytes of pieces that stay mapped, because they may hold the next tensor


class StoredTensors:
    """The weights of a checkpoint.

    Args:
        path: A directory on a disk of this machine.

    Attributes:
        path: The argument.
        is_ours: Whether ``MCoreStrategy`` wrote it; others have no checksums of files and do not describe their model.
        shapes: Shapes of the tensors, by whole name.
        places: Rectangles that they consist of, by whole name.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        ValueError: It is not a sharded checkpoint, or it is damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if not checkpoint_files.writes_directly(path):
            raise ValueError(f"{path} is not on a disk of this machine; download it, and give the folder")
        fs, self._root = checkpoint_files.open_store(path)
        self.is_ours = not checkpoint_files.is_megatron_checkpoint(path)
        manifest = checkpoint_files.check_sizes(path) if self.is_ours else None
        content = self._read(METADATA_FILE)
        if manifest is not None and f"{zlib.crc32(content):08x}" != manifest["files"][METADATA_FILE]["crc32"]:
            raise damaged(path, f"the checksum of {METADATA_FILE} differs from the one in the manifest")
        self._metadata = read_metadata(path, content)
        for name, size in least_sizes(self._metadata).items():
            checkpoint_files.check_size(fs, self._root, path, name, size, or_more=True)
        self._readers = {check: self._reader(check) for check in (True, False)}
        self._lock = Lock()
        self._checked: set[MetadataIndex] = set()
        self._open: OrderedDict[MetadataIndex, Tensor] = OrderedDict()
        self.shapes: dict[str, Shape] = {}
        self.places: dict[str, list[Place]] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(_OF_AN_OPTIMIZER):
                self._add(key, entry)

    def read(self, place: Place) -> Tensor:
        """Return a rectangle, of shape ``place.shape`` and the stored dtype, in the memory of the mapped file.

        Its checksum is compared once. Any thread may call this.

        Raises:
            ValueError: It is damaged.
        """
        index, layer = place.source
        stored = self._piece(index)
        return stored if layer is None else stored[layer]

    def _add(self, key: str, entry: TensorStorageMetadata) -> None:
        dtype = entry.properties.dtype
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        for name, (stored, shape) in whole_names(key, tuple(entry.size)).items():
            self.shapes[name] = shape
            self.places[name] = places = []
            for start, size in chunks:
                index = MetadataIndex(key, start)
                if stored.layer is None:
                    places.append(Place(start, size, dtype, (index, None)))
                elif start[0] <= stored.layer < start[0] + size[0]:
                    places.append(Place(start[1:], size[1:], dtype, (index, stored.layer - start[0])))

    def _piece(self, index: MetadataIndex) -> Tensor:
        with self._lock:
            if index in self._open:
                self._open.move_to_end(index)
                return self._open[index]
        reader = self._readers[index not in self._checked]
        piece = reader.read_piece(index)
        with self._lock:
            self._checked.add(index)
            self._open[index] = piece
            while len(self._open) > 1 and sum(tensor.nbytes for tensor in self._open.values()) > _MAPPED:
                self._open.popitem(last=False)
        return piece

    def _reader(self, check: bool) -> ShardReader:
        return ShardReader(self.path, self._metadata, self._locate, check, weights_only=True)

    def _locate(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _read(self, name: str) -> bytes:
        with open(self._locate(name), "rb") as file:
            return file.read()
