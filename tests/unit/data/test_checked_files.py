# SPDX-License-Identifier: Apache-2.0
"""What is not as it was written is found before it is read: in a dataset, in a cache, in the checksums themselves."""

import logging
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from lightning_mcore.data import checked_files
from lightning_mcore.data.checked_files import (
    BLOCK,
    CheckedBlocks,
    cached_folder,
    checksums_of,
    fingerprints,
    read_checksums,
    write_checksums,
)


def content(size: int = 2 * BLOCK + 10) -> bytes:
    return np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()


def flip(path: Path, place: int) -> None:
    changed = bytearray(path.read_bytes())
    changed[place] ^= 4
    path.write_bytes(changed)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 1])
def test_every_block_has_its_checksum(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(content(size))
    sums = [zlib.crc32(content(size)[start : start + BLOCK]) for start in range(0, size, BLOCK)]
    found, of_blocks = checksums_of(str(tmp_path / "file"))
    assert (found, of_blocks.tolist()) == (size, sums)


def test_a_block_is_checked_before_anything_of_it_is_given_out(tmp_path: Path) -> None:
    file, sums = tmp_path / "file", str(tmp_path / "checksums")
    file.write_bytes(content())
    write_checksums(sums, {"file": checksums_of(str(file))})
    flip(file, BLOCK + 7)
    blocks = CheckedBlocks(str(file), sums, "file")
    assert blocks.read(np.uint16, 100, 50).tobytes() == content()[50:250]
    assert blocks.read(np.uint8, 10, 2 * BLOCK).tobytes() == content()[-10:]
    for place in (BLOCK - 1, BLOCK, BLOCK + 100):
        with pytest.raises(ValueError, match=rf"has changed since it was written: .* from byte {BLOCK} on$"):
            blocks.read(np.uint16, 1, place)
    file.write_bytes(content()[:-1])
    with pytest.raises(ValueError, match="has 131081 bytes, but had 131082 when it was written"):
        CheckedBlocks(str(file), sums, "file")


def test_checksums_that_are_damaged_are_refused_wherever_that_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content())
    sums = tmp_path / "checksums"
    write_checksums(str(sums), {"file": checksums_of(str(tmp_path / "file"))})
    whole = sums.read_bytes()
    assert read_checksums(str(sums)).files["file"][0] == len(content())
    for place in range(len(whole)):
        for changed in (
            whole[:place],
            whole[:place] + b"9" + whole[place:],
            whole[:place] + b"\0" + whole[place + 1 :],
        ):
            sums.write_bytes(changed)
            if changed != whole:
                with pytest.raises(ValueError, match="is damaged"):
                    read_checksums(str(sums))


def test_a_fingerprint_of_large_files_sees_what_is_put_in_and_the_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_files, "_WHOLE", BLOCK)
    monkeypatch.setattr(checked_files, "_SAMPLED", 3)
    file = tmp_path / "file"
    file.write_bytes(content(9 * BLOCK))
    first = fingerprints([str(file)])
    assert fingerprints([str(file)]) == first
    seen = {}
    for place in (0, BLOCK, 4 * BLOCK, 9 * BLOCK - 1):
        flip(file, place)
        seen[place] = fingerprints([str(file)]) != first
        flip(file, place)
    assert seen == {0: True, BLOCK: False, 4 * BLOCK: True, 9 * BLOCK - 1: True}
    monkeypatch.setattr(checked_files, "_WHOLE", 9 * BLOCK)
    whole = fingerprints([str(file)])
    flip(file, BLOCK)
    assert fingerprints([str(file)]) != whole


def test_a_folder_of_a_cache_is_made_again_when_it_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, made = tmp_path / "cache" / "key", []

    def make(partial: str) -> None:
        made.append(partial)
        (Path(partial) / "a").write_bytes(content())
        (Path(partial) / "b").write_bytes(b"")

    def damages() -> None:
        cached_folder(str(folder), make, "the things")
        assert (folder / "a").read_bytes() == content()

    damages()
    damages()
    assert len(made) == 1
    for number, damage in enumerate(
        [
            lambda: flip(folder / "a", 70_000),
            lambda: (folder / "a").write_bytes(content()[:-1]),
            lambda: (folder / "b").unlink(),
            lambda: (folder / "checksums").unlink(),
            lambda: flip(folder / "checksums", 3),
            lambda: os.replace(folder / "checksums", folder / "b"),
        ]
    ):
        damage()
        with caplog.at_level(logging.WARNING):
            damages()
        assert len(made) == number + 2
        assert len(caplog.messages) == number + 1
        assert caplog.messages[-1].startswith("the things are rebuilt: ")


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fail(partial: str) -> None:
        (Path(partial) / "half").write_text("half")
        raise ValueError("it cannot")

    with pytest.raises(ValueError, match="it cannot"):
        cached_folder(str(tmp_path / "key"), fail, "the things")
    assert list(tmp_path.rglob("half")) == []
    assert not (tmp_path / "key").exists()
