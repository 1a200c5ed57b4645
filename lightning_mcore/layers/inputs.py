# SPDX-License-Identifier: Apache-2.0
"""The inputs of a language model: a batch, dense or packed, as the model takes it.

:class:`ModelInputs` is a rank's share of a batch as the arguments of Megatron's ``GPTModel``. A packed batch becomes
one long sequence in the ``thd`` format, with its boundaries and with what the layers must know about padding.
``MCoreModule.forward_step`` reads it; ``losses.py`` turns the loss of each token into the loss of the batch.

A batch is a dict of [b, s] tensors: ``tokens``, ``labels`` (already shifted; -100 without a target), and
optionally ``loss_mask`` (1 where a token counts, 0 elsewhere), ``position_ids``, and ``lengths`` [b], the number of
tokens of each row without padding. A packed batch, as ``data/packing/rows.py`` makes it, also has the boundaries of its
sub-sequences, ``cu_seqlens`` and ``cu_seqlens_padded``, [b, n + 1].
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_mcore.config.value_checks import neighbours
from lightning_mcore.layers.packed_sequences import (
    OF_ROWS,
    PackedSequences,
    all_real,
    packed_sequences,
    split_packed_rows,
)
from lightning_mcore.parallel.context import sequence_of_tokens, split_for_context_parallel

_OF_SEQUENCES = (*OF_ROWS, "sample_ids", "reference_logps", "desirable")
IGNORED_LABEL = -100
"""The label of a token without a target, as in Hugging Face and torch."""


@dataclass(frozen=True)
class ModelInputs:
    """A rank's share of a batch, as the model takes it.

    Attributes:
        tokens: [b, s / cp] int64, packed [1, b * s / cp]; the tensors below have the same shape.
        position_ids: The position of each token in its sequence, int64.
        labels: The target of each token, int64, 0 if it has none; None for a batch without labels.
        loss_mask: 1 where a token counts, fp32; None without labels.
        samples: The number of the sample of each token, int64: a row, or a sub-sequence of a packed row.
        num_samples: Number of samples; some may have no token that counts.
        padding: Bool, True on padding; None if the batch does not mark padding.
        packed: The boundaries of a packed batch; None for a dense one.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor | None
    loss_mask: Tensor | None
    samples: Tensor
    num_samples: int
    padding: Tensor | None
    packed: PackedSequences | None

    @classmethod
    def of(cls, batch: dict[str, Tensor], cp_rank: int = 0, cp_size: int = 1) -> "ModelInputs":
        """Read a batch that has been split for this context-parallel rank.

        Args:
            batch: Tensors of [b, s / cp], dense or packed, with the dtypes above; token ids are int64.
            cp_rank: Rank in the context-parallel group.
            cp_size: Number of ranks in that group.

        Raises:
            ValueError: The boundaries of a packed batch contradict each other or its length, or the ranks cannot share
                a sub-sequence.
        """
        tokens, labels = batch["tokens"], batch.get("labels")
        loss_mask = batch.get("loss_mask")
        if labels is not None:
            ignored = labels == IGNORED_LABEL
            counts = (~ignored).float()
            loss_mask = counts if loss_mask is None else loss_mask * counts
            labels = labels.masked_fill(ignored, 0)
        if is_packed(batch):
            return cls._packed(batch, labels, loss_mask, cp_rank, cp_size)
        places = split_for_context_parallel(_arange(tokens, tokens.size(1) * cp_size), cp_rank, cp_size)
        samples = torch.arange(tokens.size(0), device=tokens.device)[:, None].expand_as(tokens)
        padding = places >= batch["lengths"][:, None] if "lengths" in batch else None
        positions = batch.get("position_ids", places)
        return cls(tokens, positions, labels, loss_mask, samples, tokens.size(0), padding, None)

    @classmethod
    def _packed(
        cls, batch: dict[str, Tensor], labels: Tensor | None, loss_mask: Tensor | None, cp_rank: int, cp_size: int
    ) -> "ModelInputs":
        real, padded = batch["cu_seqlens"], batch["cu_seqlens_padded"]
        tokens = batch["tokens"]
        rows, row_length = tokens.size(0), tokens.size(1) * cp_size
        packed = packed_sequences(real, padded, row_length, cp_size)
        index = sequence_of_tokens(padded, row_length, cp_size)  # within the row
        place = split_packed_rows(_arange(tokens, row_length), padded, cp_rank, cp_size) - padded.gather(1, index)
        num_sequences = real.size(1) - 1
        row = torch.arange(rows, device=tokens.device)[:, None]
        return cls(
            tokens=tokens.reshape(1, -1),
            position_ids=batch.get("position_ids", place).reshape(1, -1),
            labels=None if labels is None else labels.reshape(1, -1),
            loss_mask=None if loss_mask is None else loss_mask.reshape(1, -1),
            samples=(row * num_sequences + index).reshape(1, -1),
            num_samples=rows * num_sequences,
            padding=(place >= real.diff(dim=1).gather(1, index)).reshape(1, -1),
            packed=packed,
        )

    def arguments(self, config: TransformerConfig, boundaries_on_host: bool = False) -> dict[str, Any]:
        """Return the arguments of ``GPTModel`` besides tokens, positions, mask and labels, without those that are None.

        Args:
            config: The config of the model.
            boundaries_on_host: Whether its layers take the boundaries of packed sequences in tensors on the host.

        Raises:
            ValueError: Megatron's fused rotary embedding of packed rows would ignore a setting.
        """
        arguments: dict[str, Any] = {}
        if self.packed is not None:
            _check_fused_rotation(config)
            # Multi-token prediction of a plain GPTModel reads boundaries only from cu_seqlens_q, padded or not.
            packed = all_real(self.packed) if config.mtp_num_layers else self.packed
            arguments["packed_seq_params"] = packed if boundaries_on_host else packed.on(self.tokens.device)
        if self.padding is not None and config.num_moe_experts is not None:
            arguments["padding_mask"] = self.padding
        if self.loss_mask is not None and config.mtp_num_layers:
            arguments["loss_mask"] = self.loss_mask
        return arguments


def _check_fused_rotation(config: TransformerConfig) -> None:
    """Refuse fused rotary embeddings of packed rows where Megatron's kernel would rotate otherwise.

    Source: ``apply_rotary_pos_emb`` (megatron-core 0.16.1 and 0.19.2).
    """
    is_yarn = not config.multi_latent_attention and getattr(config, "yarn_rotary_scaling_factor", None) is not None
    ignored = "rotary_interleaved=True" if config.rotary_interleaved else "YaRN's scale" if is_yarn else None
    if config.apply_rope_fusion and ignored is not None:
        raise ValueError(f"apply_rope_fusion=True with packed rows would ignore {ignored}; set apply_rope_fusion=False")


def is_packed(batch: Any) -> bool:
    """Return whether the rows of a batch hold several sequences each.

    Raises:
        ValueError: The batch has one kind of boundaries without the other.
    """
    if not isinstance(batch, dict) or not any(name in batch for name in OF_ROWS):
        return False
    missing = [name for name in OF_ROWS if name not in batch]
    if missing:
        raise ValueError(f"a packed batch lacks {missing[0]}; give both cu_seqlens and cu_seqlens_padded")
    return True


def microbatch_shape(batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return (sequence length, rows) of a microbatch as the layers see it; packed rows are joined.

    Args:
        batch: ``tokens`` [b, s] int64, and the other entries of a batch.
    """
    rows, length = batch["tokens"].shape
    return (rows * length, 1) if is_packed(batch) else (length, rows)


def num_tokens(batch: dict[str, Tensor]) -> int | Tensor:
    """Return the number of tokens in a batch without known padding, an int or an int64 scalar on its device."""
    if is_packed(batch):
        return batch["cu_seqlens"][:, -1].sum()
    return batch["lengths"].sum() if "lengths" in batch else batch["tokens"].numel()


def split_packed_batch(batch: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return a context-parallel rank's share of a packed batch: two slices of each sub-sequence.

    Args:
        batch: Whole packed rows, [b, s], of any dtype.
        rank: Rank in the context-parallel group.
        size: Number of ranks in that group.

    Returns:
        Tensors shaped like ``tokens`` as [b, s / size]; all others, the boundaries included, unchanged.

    Raises:
        ValueError: The rows do not divide into ``2 * size`` slices.
    """
    length = batch["tokens"].size(1)
    if size > 1 and length % (2 * size):
        raise ValueError(
            f"a packed row of {length} tokens does not divide into 2 * context_parallel_size={2 * size} slices; choose"
            f" {neighbours(length, 2 * size)} tokens"
        )
    whole, padded = batch["tokens"].shape, batch["cu_seqlens_padded"]
    return {
        name: split_packed_rows(value, padded, rank, size) if _is_of_tokens(name, value, whole) else value
        for name, value in batch.items()
    }


def check_vocabulary(batch: dict[str, Tensor], vocab_size: int) -> None:
    """Refuse tokens and labels outside the vocabulary.

    Only batches on the host are checked; reading one from a device would wait for it.

    Args:
        batch: ``tokens`` and ``labels``, [b, s] int64, dense or packed.
        vocab_size: Size of the vocabulary.

    Raises:
        ValueError: A token or label is outside; the message gives it and its place.
    """
    for name in ("tokens", "labels"):
        ids = batch.get(name) if isinstance(batch, dict) else None
        if not isinstance(ids, Tensor) or ids.is_cuda or ids.numel() == 0:
            continue
        wrong = (ids < 0) | (ids >= vocab_size)
        if name == "labels":
            wrong &= ids != IGNORED_LABEL
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            allowed = f"0 to {vocab_size - 1}" + (f", or {IGNORED_LABEL} for no target" if name == "labels" else "")
            raise ValueError(
                f"{name} hold {ids[tuple(place)].item()} at row {place[0]}, position {place[-1]}, outside the"
                f" vocabulary of vocab_size={vocab_size}; choose {allowed}"
            )


def check_places(batch: dict[str, Tensor], seq_length: int) -> None:
    """Refuse sequences that are longer than the learned positions of a model.

    Args:
        batch: ``tokens`` [b, s] int64, dense or packed; only a batch on the host is checked.
        seq_length: Number of positions, in tokens.

    Raises:
        ValueError: A row, or a sub-sequence of a packed row with its padding, is longer.
    """
    if batch["tokens"].is_cuda:
        return
    packed = is_packed(batch)
    longest = int(batch["cu_seqlens_padded"].diff(dim=1).max()) if packed else batch["tokens"].size(1)
    if longest > seq_length:
        raise ValueError(
            f"a sequence has {longest} tokens, more than the seq_length={seq_length} positions of a model with"
            " position_embedding_type='learned_absolute'; give shorter sequences, or choose a larger seq_length"
        )


def _is_of_tokens(name: str, value: Any, whole: torch.Size) -> bool:
    """Return whether a value of a batch has one element, or one vector, for each token."""
    return isinstance(value, Tensor) and name not in _OF_SEQUENCES and value.shape[:2] == whole


def _arange(tokens: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=tokens.device).expand(tokens.size(0), -1)
