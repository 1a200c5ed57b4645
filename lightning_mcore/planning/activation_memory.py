# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that one rank holds at its peak.

Most of it is what forward keeps for backward (``saved_tensors.py``), of every microbatch in flight
(``schedule.py``), minus what is recomputed. At its worst moment, backward needs more for a while: with the loss, the
logits in 16 bits and the gradient of the output layer; elsewhere the gradients of one feed-forward part, or a layer
that is recomputed. Pure arithmetic.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.saved_tensors import (
    NumberFormat,
    SavedTensor,
    embedding_rows,
    layer_rows,
    multi_token_rows,
    output_rows,
)
from lightning_mcore.planning.schedule import in_flight

_FP32 = 4


@dataclass(frozen=True)
class ActivationSetting:
    """The settings that activations depend on, besides model and layout.

    Args:
        micro_batch_size: Rows of a microbatch.
        num_microbatches: Microbatches of a step on one data-parallel rank.
        seq_length: Tokens of a row.
        form: The number format of activations.
        group_size: ``microbatch_group_size_per_vp_stage``; None is the pipeline size.
    """

    micro_batch_size: int
    num_microbatches: int
    seq_length: int
    form: NumberFormat
    group_size: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, before any rank takes its share."""
        return self.micro_batch_size * self.seq_length


@dataclass(frozen=True)
class _ChunkBytes:
    """Bytes of one microbatch in one chunk.

    Args:
        kept: Bytes that forward keeps for backward.
        output: Bytes kept after the last layer: final norm, logits, loss.
        at_output: Bytes that the worst moment of the loss takes beside ``kept``.
        in_layers: Bytes that the worst moment of a layer's backward takes beside ``kept``, minus ``output``.
    """

    kept: float
    output: float
    at_output: float
    in_layers: float

    @property
    def beside(self) -> float:
        """Bytes that backward of this chunk needs beside the kept ones."""
        return max(self.at_output, self.in_layers - self.output, 0.0)


def activation_memory(fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, setting: ActivationSetting) -> int:
    """Return the bytes of activations that a rank of a pipeline stage holds at its peak.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model.
        pipeline_rank: The stage, from 0.
        setting: Rows, tokens, microbatches and number formats.
    """
    meter = _Meter(fields, layout, setting)
    chunks = [meter.chunk(chunk) for chunk in stage_layers(fields, layout)[pipeline_rank]]
    moments = in_flight(layout, pipeline_rank, setting.num_microbatches, setting.group_size)
    peak = max(
        sum(count * chunk.kept for count, chunk in zip(counts, chunks, strict=True)) + chunks[index].beside
        for counts, index in moments
    )
    return round(peak)


@dataclass(frozen=True)
class _Meter:
    """Counts the bytes of the tensors of one microbatch on one rank."""

    fields: GPTFields
    layout: ParallelLayout
    setting: ActivationSetting

    @property
    def hidden(self) -> float:
        """Bytes of the hidden states between two layers."""
        return self._weigh(
            [SavedTensor("hidden states", self.fields.hidden_size, self.setting.form.element, "sequence")]
        )

    def chunk(self, chunk: ChunkLayers) -> _ChunkBytes:
        """Return the bytes of a microbatch in a chunk."""
        fields, form = self.fields, self.setting.form
        same = fields.adapters is None  # layers with the same feed-forward part
        kinds = {fields.is_moe[layer] if same else layer: layer for layer in chunk.layers}
        layers = {kind: self._layer(fields.is_moe[layer], layer) for kind, layer in kinds.items()}
        kept, again = self._recomputed([layers[fields.is_moe[n] if same else n] for n in chunk.layers])
        kept += self._weigh(embedding_rows(fields, form)) if chunk.embedding else 0.0
        output = self._weigh(output_rows(fields, form)) if chunk.output else 0.0
        output += self._ahead() * chunk.mtp
        # A GPU frees a sent output at once, a CPU in the backward pass.
        sent = self.hidden if form.is_local and not chunk.output else 0.0
        has_experts = any(fields.is_moe[layer] for layer in chunk.layers)
        return _ChunkBytes(
            kept=kept + output + sent,
            output=output,
            at_output=self._at_output() if chunk.output else 0.0,
            in_layers=again + self._in_layer(has_experts),
        )

    def _ahead(self) -> float:
        """Return the bytes that a layer of multi-token prediction keeps."""
        fields, setting = self.fields, self.setting
        rows = multi_token_rows(fields, setting.seq_length, setting.form)
        if fields.recompute.granularity == "full" and fields.recompute.method == "uniform":
            rows = [*embedding_rows(fields, setting.form), *output_rows(fields, setting.form)]
            return 2 * self.hidden + self._weigh(rows)
        return self._weigh(row for row in rows if not self._is_recomputed(row))

    def _layer(self, is_moe: bool, layer: int) -> tuple[float, float]:
        """Return the bytes that a layer keeps, and the bytes that it keeps if all of it is recomputed."""
        rows = layer_rows(self.fields, is_moe, self.setting.seq_length, self.setting.form, layer)
        return self._weigh(rows), self._weigh(row for row in rows if not self._is_recomputed(row))

    def _is_recomputed(self, row: SavedTensor) -> bool:
        modules = self.fields.recompute.modules
        return row.part in modules or (row.part == "shared_experts" and "moe" in modules)

    def _recomputed(self, layers: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return the bytes that the layers of a chunk keep, and those needed again while one is recomputed."""
        recompute = self.fields.recompute
        if not layers:
            return 0.0, 0.0
        if recompute.granularity == "selective":
            return sum(left for _, left in layers), max(whole - left for whole, left in layers)
        if recompute.granularity != "full":
            return sum(whole for whole, _ in layers), 0.0
        tp = self.layout.tensor_model_parallel_size
        shared = recompute.distribute and not self.layout.sequence_parallel
        hidden = self.hidden / (tp if shared else 1)
        if recompute.method == "block":
            again, rest = layers[: recompute.num_layers], layers[recompute.num_layers :]
            whole = sum(layer for layer, _ in rest)
            # The kept layers come after the recomputed ones, and are freed by then.
            return len(again) * hidden + whole, max(layer for layer, _ in again) - whole
        groups = [layers[at : at + recompute.num_layers] for at in range(0, len(layers), recompute.num_layers)]
        return len(groups) * hidden, max(sum(layer for layer, _ in group) for group in groups)

    def _at_output(self) -> float:
        """Return the bytes that the loss needs briefly: its copy of the logits, then the output layer's gradient."""
        fields, element = self.fields, self.setting.form.element
        rows = fields.padded_vocab_size / self.layout.tensor_model_parallel_size
        halves = element < _FP32
        copied = halves or bool(fields.transformer.get("cross_entropy_loss_fusion"))
        logits = self._tokens * rows * element if copied else 0.0
        # Whole sequences, and the gradient of the matrix; by then 16-bit gradients have replaced fp32 probabilities.
        trained = fields.adapters is None or any(name.startswith("output_layer.") for name in fields.adapters.of)
        gradient = rows * fields.hidden_size * element * trained + self._tokens * fields.hidden_size * element
        freed = self._tokens * rows * (_FP32 - element) if halves else 0.0
        return max(logits, gradient - freed)

    def _in_layer(self, is_moe: bool) -> float:
        """Return the bytes that backward of a feed-forward part needs briefly: gradients of inner and outer width."""
        fields, form = self.fields, self.setting.form
        rows = [SavedTensor("gradients", 3 * fields.hidden_size, form.element, "sequence")]
        inner = 2 if fields.gated_linear_unit else 1
        if is_moe and fields.experts is not None:
            outer = 2 * fields.hidden_size * fields.experts.topk
            rows.append(SavedTensor("gradients of experts", outer, form.element, "gathered"))
        else:
            rows.append(SavedTensor("inner gradients", inner * fields.ffn_hidden_size, form.element, "tensor"))
        return self._weigh(rows)

    @property
    def _tokens(self) -> float:
        """Tokens of a microbatch on this context-parallel rank."""
        return self.setting.tokens / self.layout.context_parallel_size

    def _weigh(self, rows: Iterable[SavedTensor]) -> float:
        """Return the bytes of tensors on this rank."""
        layout = self.layout
        tp, etp = layout.tensor_model_parallel_size, layout.expert_tensor_size
        sequences = 1 / (tp if layout.sequence_parallel else 1)
        share = {
            "tensor": 1 / tp,
            "sequence": sequences,
            "gathered": sequences * etp,
            "expert": sequences,
            "nobody": 1.0,
        }
        total = 0.0
        for row in rows:
            if row.shared in ("stacked", "stacked rows"):
                of_expert = row.part == "moe"
                ranks = layout.expert_model_parallel_size if of_expert else 1
                ranks *= (etp if of_expert else tp) if row.shared == "stacked rows" else 1
                total += row.width * row.element / ranks
                continue
            tokens = self._tokens if row.of_rows else self._tokens / self.setting.micro_batch_size
            total += row.width * row.element * tokens * share[row.shared]
        return total
