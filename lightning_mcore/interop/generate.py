# SPDX-License-Identifier: Apache-2.0
"""transformers' ``generate`` for a model that is split over ranks, with a cache of keys and values.

transformers' own loop does the rest: greedy search, sampling, beam search, logits processors and stopping criteria. It
calls :class:`Generator`. All ranks of a model copy run the loop with the same logits and the same random state, so they
choose the same tokens.

:class:`KeyValueCache` has Megatron's memory of keys and values, the states of layers without these
(``layers/recurrent.py``), and the tokens that are in it. A call that continues these tokens runs only the new ones
through the model. The rows may come in another order, as in beam search. If the layers cannot use the cache, for
example under context parallelism, each call runs the whole sequences.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor
from torch.nn import functional
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.core_attention import TorchAttention
from lightning_mcore.layers.recurrent import RecurrentLayer, RecurrentState, states_of
from lightning_mcore.models.generation import evaluating
from lightning_mcore.parallel.groups import process_group

if TYPE_CHECKING:
    from lightning_mcore.interop.auto_model import HFModel

_ROOM = 64  # the memory grows by at least this many tokens


class Generator(GenerationMixin):
    """An :class:`~lightning_mcore.interop.auto_model.HFModel` as transformers' loop calls it."""

    main_input_name = "input_ids"
    # What GenerationMixin reads of a model: these two, the attributes set below, and the methods
    _is_stateful = False

    def __init__(self, model: "HFModel", use_cache: bool) -> None:
        self.config, self.generation_config = model.config, model.generation_config
        self.device, self.dtype = model.device, model.dtype
        self._model = model
        self._cache = KeyValueCache(model) if use_cache else None

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
        return {"input_ids": input_ids, "attention_mask": attention_mask}

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
        if self._cache is not None and self._cache.supports(attention_mask):
            return CausalLMOutput(logits=self._cache.last_logits(input_ids, attention_mask))
        return CausalLMOutput(logits=self._model.last_logits(input_ids, attention_mask))

    __call__ = forward


class KeyValueCache:
    """Keys and values of the tokens that a model has processed, or states of memories, and the next logits."""

    def __init__(self, model: "HFModel") -> None:
        self._model = model
        self._tokens: Tensor | None = None  # the tokens in memory, [b, n] int64; -1 for padding
        self._context: Any = None
        architecture = architecture_of(model.pipeline.chunks[0].config)
        # Padding shifts positions. That is harmless unless a layer uses a position itself, not the difference of two.
        self._takes_masks = not architecture.uses_places and any(
            isinstance(layer, TorchAttention | RecurrentLayer) for layer in model.modules()
        )

    def supports(self, attention_mask: Tensor | None) -> bool:
        """Return whether the layers can use a cache on this layout with this mask: [b, s], 0 for padding, None without.

        With padding, the layers must be able to hide it, and positions must be relative, because padding shifts them.
        """
        layout = self._model.pipeline.layout
        return layout.context_parallel_size == 1 and (attention_mask is None or self._takes_masks)

    def last_logits(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the logits after each row's last token, [b, 1, v] fp32, the same on all ranks of the model copy.

        ``tokens`` are whole sequences, [b, s] int64; ``attention_mask`` [b, s] is 0 for padding on the left, None
        without it.
        """
        padding = None if attention_mask is None else attention_mask == 0
        marked = tokens if padding is None else tokens.masked_fill(padding, -1)
        # The first call runs a prompt of 10 tokens from position 0, the second only token 10, with start=10
        start = self._start(marked)
        pipeline, group = self._model.pipeline, process_group("pp")
        positions = torch.arange(start, tokens.size(1), device=tokens.device).expand(tokens.size(0), -1)
        whole: Tensor | None = pipeline(
            tokens[:, start:],
            positions,
            _hidden(padding, start),
            inference_context=self._context,
            runtime_gather_output=True,
        )
        self._context.sequence_len_offset = tokens.size(1)
        self._context.enable_decode_mode()
        self._tokens = marked
        if whole is None:
            logits = torch.empty(tokens.size(0), 1, self._model.vocab_size, device=tokens.device)
        else:
            logits = whole[:, -1:, : self._model.vocab_size].float().contiguous()  # 0.19 returns logits of all tokens
        if group.size() > 1:
            dist.broadcast(logits, src=dist.get_global_rank(group, group.size() - 1), group=group)
        return logits

    def _start(self, marked: Tensor) -> int:
        """Return how many tokens of each row of [b, s] are cached, after ordering the cached rows like these."""
        rows, length = marked.shape
        held = 0 if self._tokens is None else self._tokens.size(1)
        same = None
        if self._tokens is not None and 0 < held < length:
            same = (marked[:, None, :held] == self._tokens[None]).all(dim=-1)  # [b, rows in memory]
        if same is None or not bool(same.any(dim=1).all()):
            self._context = StaticInferenceContext(rows, length + _ROOM)
            return 0
        # Beam search repeats and drops rows; order says which cached row each row continues
        order = same.int().argmax(dim=1)
        is_moved = len(order) != same.size(1) or not bool((order == torch.arange(rows, device=order.device)).all())
        if is_moved or length > self._context.max_sequence_length:
            self._rearrange(order, length)
        return held

    def _rearrange(self, order: Tensor, length: int) -> None:
        """Put the cached rows into an order, [b] int64, and make room for ``length`` tokens."""
        context = self._context
        # Grow by the whole length, so that copies of the memory stay rare: from 74 tokens for a prompt of 10 to 149
        more = max(0, length - context.max_sequence_length) and max(length, _ROOM)
        for layer, memory in context.key_value_memory_dict.items():
            taken = (part[:, order] for part in memory)
            context.key_value_memory_dict[layer] = tuple(
                # Keys and values are [tokens, rows, ...]: pad the first axis at its end
                functional.pad(part, (0, 0) * (part.dim() - 1) + (0, more))
                for part in taken
            )
        states = states_of(context)
        for layer, state in states.items():
            states[layer] = RecurrentState(*(part[order] for part in state))
        context.max_sequence_length += more
        context.max_batch_size = len(order)


def _hidden(padding: Tensor | None, start: int) -> Tensor | None:
    """Return a mask of keys that queries from ``start`` on must not see, [b, 1, s - start, s] bool; None for none.

    ``padding`` is [b, s] bool. Padding sees itself, because the softmax of a query that sees no key is not defined. For
    padding True True False False and start 2, both rows of the mask are True True False False.
    """
    if padding is None or not bool(padding.any()):
        return None
    itself = torch.eye(padding.size(1), dtype=torch.bool, device=padding.device)[start:]
    return padding[:, None, None] & ~itself


@contextlib.contextmanager
def ready_to_generate(model: "HFModel") -> Iterator[None]:
    """Put a model into evaluation mode, without sequence parallelism, and with one random state for all its ranks."""
    seed = torch.randint(2**31, ())
    # Broadcast within TP, then CP, then PP: after the three, all ranks of a model copy have the same seed
    for axis in ("tp", "cp", "pp"):
        group = process_group(axis)
        if group.size() > 1:
            shared = seed.to(model.device)
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
            seed = shared.cpu()
    devices = [model.device] if model.device.type == "cuda" else []
    with evaluating(model), _whole_activations(model), torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(seed))
        yield


@contextlib.contextmanager
def _whole_activations(model: "HFModel") -> Iterator[None]:
    """Switch sequence parallelism off inside the block if there is a cache, because one token cannot be split."""
    if not model.pipeline.layout.sequence_parallel or not KeyValueCache(model).supports(None):
        yield
        return
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    configs = {id(config): config for layer in model.modules() if (config := getattr(layer, "config", None))}
    with contextlib.ExitStack() as stack:
        for owner in (*model.modules(), *configs.values()):
            for name in names:
                if getattr(owner, name, False) is True:
                    stack.callback(setattr, owner, name, True)
                    setattr(owner, name, False)
        yield
