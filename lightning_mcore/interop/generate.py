# SPDX-License-Identifier: Apache-2.0
"""transformers' ``generate`` for a model that is split over ranks, with a cache of keys and values.

transformers' own loop does the rest: greedy search, sampling, beam search, logits processors and stopping criteria. It
calls :class:`Generator` with whole rows. All ranks of a model copy run the loop with the same logits and the same
random state, so they choose the same tokens. What else may end a text, such as a time limit, the copy's first rank
decides.

If each row continues a row of the previous call by one token, only that token runs through the model
(``layers/token_cache.py``). Beam search may reorder, repeat and drop rows.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.modeling_outputs import CausalLMOutput

from lightning_mcore.models.generation import LastLogits, last_logits
from lightning_mcore.parallel.groups import process_group

if TYPE_CHECKING:
    from lightning_mcore.interop.auto_model import HFModel


class Generator(GenerationMixin):
    """An :class:`~lightning_mcore.interop.auto_model.HFModel` as transformers' loop calls it."""

    main_input_name = "input_ids"
    # What GenerationMixin reads of a model: these two, the attributes set below, and the methods
    _is_stateful = False

    def __init__(self, model: "HFModel", logits: LastLogits) -> None:
        self.config, self.generation_config = model.config, model.generation_config
        self.device, self.dtype = model.device, model.dtype
        self._last_logits = _Continued(logits)

    def can_generate(self) -> bool:
        """Return True: the model returns logits over the vocabulary."""
        return True

    def get_experts_implementation(self) -> dict[str, str]:
        """Return an empty dict: transformers' settings for experts are not used."""
        return {}

    def prepare_inputs_for_generation(  # transformers rejects arguments that are not named
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        use_cache: bool | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of a call: the whole sequences, [b, s] int64, and their mask, [b, s] or None."""
        if attention_mask is not None:
            # With synced_gpus, a rank that has finished is called for the others: its mask grows, its rows do not.
            attention_mask = attention_mask[:, : input_ids.size(1)]
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Return transformers' and the user's criteria; the first rank decides by those that see more than tokens."""
        see_tokens = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
        return StoppingCriteriaList(
            each if isinstance(each, see_tokens) else _OfFirstRank(each, self.device)
            for each in super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool | None = None
    ) -> CausalLMOutput:
        """Return the logits of the last token, [b, 1, v] fp32.

        ``input_ids`` are whole sequences, [b, s] int64; ``attention_mask`` [b, s] is 0 for padding on the left, None
        without padding. Raises ValueError if rows are padded on the right.
        """
        if attention_mask is not None and bool((attention_mask[:, -1] == 0).any()):
            raise ValueError(
                "generate() got prompts with padding on the right, after which no token can follow; pad them on the"
                " left (padding_side='left')"
            )
        return CausalLMOutput(logits=self._last_logits(input_ids, attention_mask)[:, None])

    __call__ = forward


class _OfFirstRank(StoppingCriteria):
    """A criterion that may differ between ranks, such as a time limit: the model copy's first rank decides."""

    def __init__(self, criterion: StoppingCriteria, device: torch.device) -> None:
        self._criterion, self._device = criterion, device

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = self._criterion(input_ids, scores, **kwargs)
        return _of_first_rank(torch.as_tensor(ends).expand(len(input_ids)).int(), self._device).bool()


class _Continued:
    """Which rows the cache holds, so that a call runs only the tokens that follow them."""

    def __init__(self, logits: LastLogits) -> None:
        self._logits = logits
        self._tokens: Tensor | None = None  # the tokens in the cache, [b, n] int64; -1 for padding

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the logits after each row's last token, [b, v] fp32, the same on all ranks of the model copy.

        ``tokens`` are whole rows, [b, s] int64; ``attention_mask`` [b, s] is 0 for padding on the left, None without.
        """
        marked = tokens if attention_mask is None else tokens.masked_fill(attention_mask == 0, -1)
        held, self._tokens = self._tokens, marked
        # The first call runs a prompt of 10 tokens, the second only token 10
        if not self._logits.has_cache or held is None or held.size(1) + 1 != marked.size(1):
            return self._logits.of_prompt(tokens, attention_mask)
        same = (marked[:, None, :-1] == held[None]).all(dim=-1)  # [b, rows in the cache]
        # Beam search repeats and drops rows; order says which cached row each row continues
        order = same.int().argmax(dim=1)
        is_known, is_moved = torch.stack(
            (same.any(dim=1).all(), (order != torch.arange(len(order), device=order.device)).any())
        ).tolist()
        if not is_known:
            return self._logits.of_prompt(tokens, attention_mask)
        is_moved = is_moved or len(order) != len(held)
        return self._logits.of_next(tokens[:, -1], order if is_moved else None)


@contextlib.contextmanager
def ready_to_generate(model: "HFModel", use_cache: bool) -> Iterator[LastLogits]:
    """Put a model into evaluation mode, lend it a cache, and give all its ranks one random state."""
    seed = _of_first_rank(torch.randint(2**31, ()), model.device).cpu()
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        last_logits(model, model.pipeline, model.vocab_size, use_cache) as logits,
        torch.random.fork_rng(devices=devices),
    ):
        torch.manual_seed(int(seed))
        yield logits


def _of_first_rank(value: Tensor, device: torch.device) -> Tensor:
    """Return the value of the model copy's first rank, on the device."""
    shared = value.to(device, copy=True)
    # Broadcast within TP, then CP, then PP: after the three, all ranks of a model copy have the same value
    for axis in ("tp", "cp", "pp"):
        group = process_group(axis)
        if group.size() > 1:
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
    return shared
