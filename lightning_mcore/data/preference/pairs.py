# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers to a prompt, and batches of them, padded or packed, for ``MCorePreference``.

A batch of pairs is a batch as in ``packing/rows.py``, in which sequences 2i and 2i + 1 are the two answers of a pair:
the chosen one, then the rejected one. Each sequence is the prompt and the answer, and ``loss_mask`` is 1 where the
*label* is a token of the answer. Both have the number of the pair as their ``sample_ids``.

* Padded: n pairs are 2n rows. ``tokens``, ``labels``, ``position_ids`` [2n, s] int64, ``loss_mask`` [2n, s] fp32,
  ``lengths`` [2n] int64, ``sample_ids`` [2n] int64. ``MCoreStrategy(micro_batch_size=...)`` counts rows and must be
  even.
* Packed: a row contains several pairs, the two answers of each as neighbouring sub-sequences. ``tokens``, ``labels``,
  ``position_ids`` and ``loss_mask`` [b, s], ``cu_seqlens`` and ``cu_seqlens_padded`` [b, k + 1] int32, ``sample_ids``
  [b, k] int64, with k even; rows with fewer pairs end in empty sub-sequences.

Two entries may be added, [2n] for a padded batch and [b, k] for a packed one:

* ``reference_logps``, fp64: log-probability of each answer under the reference model, summed over its tokens. Losses
  with a reference need it, unless the model has adapters that can be switched off.
* ``desirable``, bool, for KTO. There, sequence 2i is an example's prompt and answer, and sequence 2i + 1 the same
  prompt with another example's answer, from which KTO estimates its KL term; both have the example's tag.

:class:`PairSource` is what a data module offers so that the reference can be computed before training: its method
``pair_sources()`` returns a dict with one for each split that is set up. :class:`PairDataset` is one for pairs in
memory.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.layers.inputs import is_packed


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two answers to a prompt.

    Args:
        chosen: The prompt with the better answer; its ``loss_mask`` marks the answer. For KTO, the example.
        rejected: The prompt with the other answer. For KTO, the example's prompt with another example's answer.
        desirable: For KTO, whether the example is desirable; None for a pair.
        reference: Log-probabilities of the two answers under the reference model; None if unknown.

    Raises:
        ValueError: An answer has no token, or the two have different numbers.
    """

    chosen: TokenSample
    rejected: TokenSample
    desirable: bool | None = None
    reference: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name, sample in zip(("chosen", "rejected"), self.sequences, strict=True):
            if sample.loss_mask is None or not sample.num_targets:
                raise ValueError(
                    f"the {name} answer of sample {sample.sample_id} has no token that its loss_mask marks; remove"
                    " pairs without an answer"
                )

        first, second = (sample.sample_id for sample in self.sequences)
        if first != second:
            raise ValueError(f"the answers of a pair have the sample_ids {first} and {second}; give both the same one")

    @property
    def sequences(self) -> tuple[TokenSample, TokenSample]:
        """The two sequences, in batch order."""
        return self.chosen, self.rejected

    @property
    def length(self) -> int:
        """Places that the pair takes in a row without padding, in tokens."""
        return self.chosen.length + self.rejected.length


class PairSource(Protocol):
    """The pairs of a split, as the pass that computes the reference reads them.

    Attributes:
        key: A digest of everything that decides the pairs and their order: files, template, lengths.
        folder: Folder for the reference's log-probabilities, such as the cache of the data.
        batch_size: Pairs in a batch of one data-parallel rank.
        reference: [pairs, 2] fp64, ``Pair.reference`` of each pair; None at first. The pass assigns it before the first
            batch is read, though perhaps after the loaders are made.
    """

    key: str
    folder: str
    batch_size: int
    reference: NDArray[np.float64] | None

    def __len__(self) -> int:
        """Return the number of pairs."""
        ...

    def take(self, indices: Sequence[int]) -> list[Pair]:
        """Return several pairs."""
        ...


class PairDataset(Dataset[Pair]):
    """Pairs in memory, as a dataset and as a :class:`PairSource`.

    Args:
        pairs: The pairs.
        folder: Folder for the reference's log-probabilities.
        batch_size: Pairs in a batch on one data-parallel rank while these are computed.

    Attributes:
        key: A digest of all tokens, masks and tags.
    """

    def __init__(self, pairs: Sequence[Pair], folder: str, batch_size: int = 8) -> None:
        self.folder, self.batch_size = folder, batch_size
        self.reference: NDArray[np.float64] | None = None
        self._pairs = pairs
        # Lengths separate the samples; little-endian int64 gives the same digest for every platform and token dtype.
        digest = hashlib.sha256()
        for pair in pairs:
            for sample in pair.sequences:
                digest.update(f"{len(sample.tokens)} {pair.desirable}".encode())
                digest.update(sample.tokens.astype("<i8").tobytes() + np.asarray(sample.loss_mask, bool).tobytes())
        self.key = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Pair:
        pair = self._pairs[index]
        if self.reference is None:
            return pair
        chosen, rejected = self.reference[index].tolist()
        return replace(pair, reference=(chosen, rejected))

    def take(self, indices: Sequence[int]) -> list[Pair]:
        """Return several pairs."""
        return [self[index] for index in indices]


def collate_padded_pairs(
    pairs: Sequence[Pair],
    multiple: int = 1,
    row_length: int | None = None,
    vocab_size: int | None = None,
    pad_token: int = 0,
) -> dict[str, Tensor]:
    """Return a padded batch of pairs.

    Args:
        pairs: One or more pairs, all or none of them with a reference and a tag.
        multiple: Row length is a multiple of this.
        row_length: Places in a row, in tokens; None for the longest sequence, rounded up to ``multiple``.
        vocab_size: Vocabulary size to check tokens against; None for no check.
        pad_token: Token written into padding.

    Returns:
        The batch, as described above.

    Raises:
        ValueError: There are no pairs, one does not fit, or a token is outside the vocabulary.
    """
    # A pair with the prompt 1 2 3 and the answers 4 5 and 9, not packed:
    #
    #   tokens     1 2 3 4      labels  0 0 4 5      loss_mask  0 0 1 1
    #              1 2 3 0              0 0 9 0                 0 0 1 0
    sequences = [sequence for pair in pairs for sequence in pair.sequences]
    return collate_padded(sequences, multiple, row_length, vocab_size, pad_token) | _of_pairs(pairs)


def build_pair_row(
    pairs: Sequence[Pair],
    row_length: int,
    multiple: int = 1,
    vocab_size: int | None = None,
    pad_token: int = 0,
) -> dict[str, Tensor]:
    """Return a packed row of pairs; :func:`collate_pair_rows` makes a batch of some.

    Args:
        pairs: One or more pairs, all or none of them with a reference and a tag.
        row_length: Places in the row, in tokens.
        multiple: Each sequence is padded to a multiple of this.
        vocab_size: Vocabulary size to check tokens against; None for no check.
        pad_token: Token written into padding.

    Returns:
        The row, with the dtypes above and without the batch axis.

    Raises:
        ValueError: As ``packing.rows.build_row``.
    """
    sequences = [sequence for pair in pairs for sequence in pair.sequences]
    return build_row(sequences, row_length, multiple, vocab_size, pad_token) | _of_pairs(pairs)


def collate_pair_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows of :func:`build_pair_row` of one length into a packed batch, [b, ...], with the dtypes of the rows.

    Raises:
        ValueError: There are no rows, or they differ in length.
    """
    batch = collate_rows(rows)
    most = batch["sample_ids"].size(1)
    for name in ("reference_logps", "desirable"):
        if name in rows[0]:
            values = [row[name] for row in rows]
            batch[name] = torch.stack([torch.nn.functional.pad(v, (0, most - v.numel())) for v in values])
    return batch


def check_pairs(batch: dict[str, Any], loss: str) -> None:
    """Raise unless a batch contains pairs that ``loss`` can learn from; only a batch on the host is checked.

    Args:
        batch: As described above.
        loss: Name of the loss. ``"kto"`` requires tags, ``"reward"`` the last tokens.

    Raises:
        ValueError: The number of sequences is odd, neighbours do not belong together or nothing shows that they do,
            tags are missing or superfluous, or last tokens are missing.
    """
    tokens = batch.get("tokens") if isinstance(batch, dict) else None
    if not isinstance(tokens, Tensor) or tokens.is_cuda:  # reading values on a GPU would stall it
        return
    packed = is_packed(batch)
    number = batch["cu_seqlens"].size(1) - 1 if packed else len(tokens)
    what = "a packed row" if packed else "a batch"
    if number % 2:
        raise ValueError(f"{what} has {number} sequences, an odd number; keep the two answers of a pair together")
    if "sample_ids" not in batch:
        raise ValueError(
            f"a batch with {', '.join(batch)} has no sample_ids, which say that neighbouring sequences are the answers"
            " of one pair; give pairs, or train with MCoreGPT"
        )
    first, second = batch["sample_ids"].reshape(-1, 2).unbind(1)
    if not torch.equal(first, second):
        wrong = int((first != second).nonzero()[0])
        raise ValueError(
            f"sequences {2 * wrong} and {2 * wrong + 1} of a batch come from samples {int(first[wrong])} and"
            f" {int(second[wrong])}, not from one pair; give pairs, or train with MCoreGPT"
        )
    if loss == "reward":
        _check_last_tokens(batch)
    is_kto = loss == "kto"
    if is_kto != ("desirable" in batch):
        raise ValueError(
            "the loss 'kto' needs 'desirable' in a batch, which says whether each example is desirable; add it"
            if is_kto
            else "a batch has 'desirable', which only the loss 'kto' reads; choose that loss, or give pairs"
        )


def _check_last_tokens(batch: dict[str, Any]) -> None:
    """Raise ValueError if the last place of a sequence has a label to learn: its last token is then only a label."""
    if is_packed(batch):
        lengths = batch["cu_seqlens"].diff(dim=1)  # [b, k]
        places = batch["cu_seqlens_padded"][:, :-1] + lengths - 1
    else:
        lengths = batch["lengths"][:, None]
        places = lengths - 1
    learnt = batch["loss_mask"].gather(1, places.clamp(min=0).long())
    if bool(((learnt > 0) & (lengths > 0)).any()):
        raise ValueError(
            "a reward model scores the last token of a sequence, but a batch has it only as a label; create the"
            " pairs using with_last_token()"
        )


def with_last_token(pair: Pair) -> Pair:
    """Return a pair whose last tokens are also inputs, for a reward model, which scores the last token of a sequence.

    Args:
        pair: A pair as any other loss takes it.

    Returns:
        The same with one more token at the end of both, which is a label only and counts nowhere.
    """

    def longer(sample: TokenSample) -> TokenSample:
        assert sample.loss_mask is not None
        tokens, mask = np.append(sample.tokens, sample.tokens[-1]), np.append(sample.loss_mask, False)
        return TokenSample(tokens, mask, sample.sample_id)

    return replace(pair, chosen=longer(pair.chosen), rejected=longer(pair.rejected))


def _of_pairs(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """Return the additional entries of a batch of pairs: one value for each of their sequences."""
    found: dict[str, Any] = {}
    if pairs[0].reference is not None:
        values = [value for pair in pairs for value in pair.reference or ()]
        found["reference_logps"] = torch.tensor(values, dtype=torch.float64)
    if pairs[0].desirable is not None:
        found["desirable"] = torch.tensor([bool(pair.desirable) for pair in pairs]).repeat_interleave(2)
    return found
