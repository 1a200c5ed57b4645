# SPDX-License-Identifier: Apache-2.0
"""How many tokens go through the output layer and the loss at once: ``MCoreStrategy(loss_chunk_size=...)``."""

from typing import Literal

LossChunkSize = int | Literal["auto"] | None

_TOKENS = 1024  # rows of the output layer's matrix product; with fewer, a GPU is less busy
_FEW_LOGITS = 2**26  # 256 MiB in fp32, below which computing them again saves little


def tokens_of_chunk(
    size: LossChunkSize, tokens: int, columns: int, has_gradients: bool = True, defers_gradient: bool = False
) -> int | None:
    """Return the number of tokens of a chunk, None for all at once; ``columns`` are the logits of a token on a rank.

    4,096 tokens with 128,256 columns have 2**29 logits: ``"auto"`` makes four chunks of 1,024 tokens. It makes none of
    fewer than two whole chunks, which would compute all logits again to save less than half of them, and none if the
    output layer ``defers_gradient``, which Megatron would pair with the activations of other tokens.
    """
    if size == "auto":
        has_many = tokens >= 2 * _TOKENS and tokens * columns > _FEW_LOGITS
        size = _TOKENS if has_many and not (has_gradients and defers_gradient) else None
    if size is None and not has_gradients:  # then nothing is computed again
        size = _TOKENS
    return size if size is not None and size < tokens else None


def checked_chunk_size(size: LossChunkSize) -> LossChunkSize:
    """Return a size, or raise ValueError if it is not a :data:`LossChunkSize`."""
    if size not in (None, "auto") and (type(size) is not int or size < 1):
        raise ValueError(
            f"loss_chunk_size={size!r} is not a number of tokens; choose 1 or more, 'auto', or None for all tokens at"
            " once"
        )
    return size


def check_chunked_loss(size: LossChunkSize, defers_gradient: bool, is_ours: bool = True) -> None:
    """Raise ValueError if a model cannot take its loss in chunks of a given size, which ``"auto"`` does not ask for.

    ``is_ours`` says that its chunks are GPTChunks.
    """
    if size is None or size == "auto":
        return
    if not is_ours:
        raise ValueError(
            f"loss_chunk_size={size!r} needs a model built of GPTChunk from lightning_mcore.layers.gpt, whose loss can"
            " be taken in chunks; build it, or leave loss_chunk_size out"
        )
    if defers_gradient:
        raise ValueError(
            f"loss_chunk_size={size!r} with defer_embedding_wgrad_compute=True would pair gradients with the"
            " activations of other tokens; leave one of the two out"
        )
