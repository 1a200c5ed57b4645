# SPDX-License-Identifier: Apache-2.0
"""A batch, dense or packed, as a language model takes it.

:class:`ModelInputs` turns a rank's share of a batch into the arguments of a ``GPTChunk``. A packed batch becomes one
long sequence in the ``thd`` format, with its boundaries and with what the layers must know about padding.
``MCoreModule.forward_step`` calls it; ``losses.py`` turns each token's loss into the loss of the batch.

A batch is a dict of [b, s] tensors: ``tokens``, ``labels`` (already shifted; -100 without a target), and optionally
``loss_mask`` (1 where a token counts, 0 elsewhere), ``position_ids``, ``lengths`` [b], the number of tokens of each row
without padding, and ``source_ids`` [b], where each row comes from. A packed batch, as ``data/packing/rows.py`` makes
it, also has the boundaries of its sub-sequences, ``cu_seqlens`` and ``cu_seqlens_padded``, [b, n + 1]; its
``source_ids`` are [b, n].
"""

from collections.abc import Mapping, Sequence
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
from lightning_mcore.parallel.context import sequence_at, split_for_context_parallel

# Not counted in tokens, even where the second dimension happens to equal s.
_OF_SEQUENCES = (*OF_ROWS, "sample_ids", "source_ids", "reference_logps", "desirable")
IGNORED_LABEL = -100
"""The label of a token without a target, as in Hugging Face and torch."""


@dataclass(frozen=True)
class ModelInputs:
    """A rank's share of a batch, as the model takes it."""

    tokens: Tensor  # [b, s / cp] int64, packed [1, b * s / cp], as are the tensors below
    position_ids: Tensor
    labels: Tensor | None  # 0 for a token without a target
    loss_mask: Tensor | None  # fp32; None without labels
    samples: Tensor  # each token's sample number: its row, or its sub-sequence of a packed row
    num_samples: int
    padding: Tensor | None  # None if the batch does not mark it
    packed: PackedSequences | None
    sources: Tensor | None  # each token's source; None if the batch does not name sources

    @classmethod
    def of(cls, batch: dict[str, Tensor], cp_rank: int = 0, cp_size: int = 1, hybrid: bool = False) -> "ModelInputs":
        """Read a batch that has been split for this context-parallel rank, perhaps with ``hybrid_context_parallel``."""
        tokens, labels = tokens_of(batch), batch.get("labels")
        loss_mask = batch.get("loss_mask")
        if labels is not None:
            ignored = labels == IGNORED_LABEL
            counts = (~ignored).float()
            loss_mask = counts if loss_mask is None else loss_mask * counts
            labels = labels.masked_fill(ignored, 0)
        if is_packed(batch):
            return cls._packed(batch, labels, loss_mask, cp_rank, cp_size, hybrid)
        places = split_for_context_parallel(_arange(tokens, tokens.size(1) * cp_size), cp_rank, cp_size)
        samples = torch.arange(tokens.size(0), device=tokens.device)[:, None].expand_as(tokens)
        padding = places >= batch["lengths"][:, None] if "lengths" in batch else None
        positions = batch.get("position_ids", places)
        sources = _of_samples(batch.get("source_ids"), samples)
        return cls(tokens, positions, labels, loss_mask, samples, tokens.size(0), padding, None, sources)

    @classmethod
    def _packed(
        cls,
        batch: dict[str, Tensor],
        labels: Tensor | None,
        loss_mask: Tensor | None,
        cp_rank: int,
        cp_size: int,
        hybrid: bool,
    ) -> "ModelInputs":
        # Two sequences of 3 and 2 tokens, each padded to 4: cu_seqlens 0 3 5, cu_seqlens_padded 0 4 8.
        #     index (sample)   0 0 0 0 1 1 1 1
        #     place            0 1 2 3 0 1 2 3    position within its sequence
        #     padding          . . . x . . x x    where place >= 3, and >= 2
        # On 2 context-parallel ranks, rank 0 has places 0 3 0 3, rank 1 places 1 2 1 2.
        real, padded = batch["cu_seqlens"], batch["cu_seqlens_padded"]
        tokens = batch["tokens"]
        rows, row_length = tokens.size(0), tokens.size(1) * cp_size
        packed = packed_sequences(real, padded, row_length, cp_size, cp_rank if hybrid else None)
        position = split_packed_rows(_arange(tokens, row_length), padded, cp_rank, cp_size, hybrid)
        index = sequence_at(padded, position)
        place = position - padded.gather(1, index)
        num_sequences = real.size(1) - 1
        row = torch.arange(rows, device=tokens.device)[:, None]
        samples = (row * num_sequences + index).reshape(1, -1)
        return cls(
            tokens=tokens.reshape(1, -1),
            position_ids=batch.get("position_ids", place).reshape(1, -1),
            labels=None if labels is None else labels.reshape(1, -1),
            loss_mask=None if loss_mask is None else loss_mask.reshape(1, -1),
            samples=samples,
            num_samples=rows * num_sequences,
            padding=(place >= real.diff(dim=1).gather(1, index)).reshape(1, -1),
            packed=packed,
            sources=_of_samples(batch.get("source_ids"), samples),
        )

    def arguments(self, config: TransformerConfig, boundaries_on_host: bool = False) -> dict[str, Any]:
        """Return ``GPTChunk``'s keyword arguments besides tokens, positions, mask and labels; None is left out.

        ``boundaries_on_host`` is for layers that read packed boundaries on the host. Raises ValueError if Megatron's
        fused rotary embedding of packed rows would ignore a setting.
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
    """Reject fused rotary embeddings of packed rows where Megatron's kernel would rotate differently.

    Source: ``apply_rotary_pos_emb`` (megatron-core 0.16.1 and 0.19.2).
    """
    is_yarn = not config.multi_latent_attention and getattr(config, "yarn_rotary_scaling_factor", None) is not None
    ignored = "rotary_interleaved=True" if config.rotary_interleaved else "YaRN's scale" if is_yarn else None
    if config.apply_rope_fusion and ignored is not None:
        raise ValueError(f"apply_rope_fusion=True with packed rows would ignore {ignored}; set apply_rope_fusion=False")


def is_packed(batch: Any) -> bool:
    """Return whether a batch's rows hold several sequences each; ValueError if one of the two boundaries is absent."""
    if not isinstance(batch, dict) or not any(name in batch for name in OF_ROWS):
        return False
    missing = [name for name in OF_ROWS if name not in batch]
    if missing:
        raise ValueError(f"a packed batch lacks {missing[0]}; give both cu_seqlens and cu_seqlens_padded")
    return True


def tokens_of(batch: Any) -> Tensor:
    """Return a batch's tokens, [b, s]; TypeError or ValueError for a batch without them."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a batch is a {type(batch).__name__}; give a dict of tokens and labels, each of shape [rows, tokens]"
        )
    tokens = batch.get("tokens")
    if tokens is None:
        raise ValueError(
            f"a batch with {', '.join(map(str, batch))} has no tokens; give tokens and labels of shape [rows, tokens],"
            " where a token's label is the token that follows it"
        )
    if tokens.dim() != 2:
        raise ValueError(f"tokens have the shape {list(tokens.shape)}; give [rows, tokens]")
    found: Tensor = tokens
    return found


def microbatch_shape(batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return (sequence length, rows) of a microbatch as the layers see it: packed rows are joined, (b * s, 1)."""
    rows, length = tokens_of(batch).shape
    return (rows * length, 1) if is_packed(batch) else (length, rows)


def num_tokens(batch: dict[str, Tensor]) -> int | Tensor:
    """Return the number of tokens in a batch without known padding, an int or an int64 scalar on its device."""
    if is_packed(batch):
        return batch["cu_seqlens"][:, -1].sum()
    return batch["lengths"].sum() if "lengths" in batch else tokens_of(batch).numel()


def split_packed_batch(batch: dict[str, Tensor], rank: int, size: int, hybrid: bool = False) -> dict[str, Tensor]:
    """Return a context-parallel rank's share of a packed batch: two slices of each sub-sequence, [b, s / size].

    If ``hybrid``, fewer ranks may share a sub-sequence.
    Tensors without an entry for each token, such as the boundaries, are unchanged. Raises ValueError if the rows do not
    divide into ``2 * size`` slices.
    """
    length = batch["tokens"].size(1)
    if size > 1 and length % (2 * size):
        raise ValueError(
            f"a packed row of {length} tokens does not divide into 2 * context_parallel_size={2 * size} slices; choose"
            f" {neighbours(length, 2 * size)} tokens"
        )
    whole, padded = batch["tokens"].shape, batch["cu_seqlens_padded"]
    return {
        name: split_packed_rows(value, padded, rank, size, hybrid) if _is_of_tokens(name, value, whole) else value
        for name, value in batch.items()
    }


def check_vocabulary(batch: dict[str, Tensor], vocab_size: int) -> None:
    """Raise ValueError, with value and place, for a token outside the vocabulary, in batches on the host."""
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


def longest_sequence(batch: dict[str, Tensor]) -> int:
    """Return the tokens of the longest sequence, with its padding; 0 for a batch that is not on the host."""
    if batch["tokens"].is_cuda:
        return 0
    return int(batch["cu_seqlens_padded"].diff(dim=1).max()) if is_packed(batch) else batch["tokens"].size(1)


def check_places(batch: dict[str, Tensor], seq_length: int) -> None:
    """Raise ValueError if a sequence, with its padding, is longer than the model's ``seq_length`` learned positions.

    Only batches on the host are checked.
    """
    longest = longest_sequence(batch)
    if longest > seq_length:
        raise ValueError(
            f"a sequence has {longest} tokens, more than the seq_length={seq_length} positions of a model with"
            " position_embedding_type='learned_absolute'; give shorter sequences, or choose a larger seq_length"
        )


def check_sources(batch: dict[str, Tensor], names: Sequence[str]) -> None:
    """Raise ValueError for a source without a name; an empty sub-sequence has -1. Only host tensors are read."""
    ids = batch.get("source_ids") if isinstance(batch, dict) else None
    if ids is None or ids.is_cuda or not names:
        return
    samples = batch["cu_seqlens"][:, 1:] if is_packed(batch) else batch["tokens"][:, 0]
    if ids.shape != samples.shape:
        raise ValueError(
            f"source_ids has the shape {list(ids.shape)}, but the batch has {list(samples.shape)} samples; give one"
            " number for each"
        )
    if ids.max() >= len(names):
        raise ValueError(
            f"source_ids has the number {int(ids.max())}, but source_names has {len(names)} names; choose 0 to"
            f" {len(names) - 1}, or give more names"
        )


def _of_samples(values: Tensor | None, samples: Tensor) -> Tensor | None:
    """Return each token's value, like ``samples``, from a value for each sample."""
    return None if values is None else values.reshape(-1)[samples]


def _is_of_tokens(name: str, value: Any, whole: torch.Size) -> bool:
    """Return whether a value in a batch has one element, or one vector, for each token."""
    return isinstance(value, Tensor) and name not in _OF_SEQUENCES and value.shape[:2] == whole


def _arange(tokens: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=tokens.device).expand(tokens.size(0), -1)
