# SPDX-License-Identifier: Apache-2.0
"""The memory of an import and of an export is limited by a few tensors or files, not by the model."""

from pathlib import Path

import pytest

from tests.support.hf_folders import LlamaSizes, peak_memory, write_llama

pytestmark = pytest.mark.slow

SHARD = 16_000_000  # bytes of a file
LARGEST = 2 * 12_000 * 512  # bytes of the largest tensor
SIZES = LlamaSizes(hidden_size=512, layers=44, vocab_size=12_000)
ROOM = 16_000_000  # bytes for what has nothing to do with the size of the model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return the folder of a model of a few hundred MB, and its size in bytes."""
    folder = tmp_path_factory.mktemp("large") / "model"
    return folder, write_llama(folder, SIZES, SHARD)


@pytest.mark.filterwarnings("ignore")
def test_neither_way_holds_the_model_in_memory(model: tuple[Path, int], tmp_path: Path) -> None:
    folder, size = model
    assert size > 250_000_000
    imported = str(tmp_path / "imported.ckpt")
    reading, writing = peak_memory(
        f"lightning_mcore.hf.import_checkpoint({str(folder)!r}, {imported!r})",
        f"lightning_mcore.hf.export_checkpoint({imported!r}, {str(tmp_path / 'out')!r}, max_shard_size={SHARD})",
    )
    assert reading < 2 * LARGEST + ROOM < size / 4
    assert writing < 3 * SHARD + ROOM < size / 4
    for path in sorted(folder.glob("*.safetensors")):
        assert (tmp_path / "out" / path.name).stat().st_size == pytest.approx(path.stat().st_size, rel=0.01)
