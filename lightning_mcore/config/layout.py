# SPDX-License-Identifier: Apache-2.0
"""The parallel layout: the number of ranks on each axis, and checks that it divides the world and the model.

Megatron finds wrong sizes late and in many places, some after process groups exist and some only on one rank, which
hangs the others. Here every wrong size raises early, on every rank, in one sentence: at construction, and as soon as
the world size (:meth:`ParallelLayout.validate_world`), the model's sizes (:meth:`ParallelLayout.validate_model`) and
the number of microbatches (:meth:`ParallelLayout.validate_microbatches`) are known. megatron-core 0.16.1 and 0.19.2
have the same rules. Pure arithmetic: no torch, no megatron-core.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning_mcore.config.pipeline_stages import check_layers, check_stages, parse_stages
from lightning_mcore.config.value_checks import (
    choices,
    divisors,
    make_fields_plain,
    neighbours,
    require_divides,
    require_flag,
    require_size,
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that the layout must divide, with the names and defaults of ``TransformerConfig``.

    A size that is None takes the default that Megatron derives from the others; without such a default it is not
    checked. ``num_moe_experts=None`` means a dense model, ``mtp_num_layers=None`` no layers of multi-token prediction.
    ``shared_heads`` says what ranks share of layers with a memory, which ``TransformerConfig`` does not have.
    ``vocab_size`` is the padded size, and ``seq_length`` counts tokens before they are split over ranks.
    """

    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    hidden_size: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    seq_length: int | None = None
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: int | list[int] = 1
    add_bias_linear: bool | None = None
    mtp_num_layers: int | None = None
    shared_heads: tuple[tuple[str, int], ...] = ()  # names and sizes
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    def __post_init__(self) -> None:
        """Raise for impossible sizes; zero MTP layers means none, as in Megatron."""
        for field in fields(self):
            value = getattr(self, field.name)
            # moe_layer_freq may be a list, and the flags are not sizes.
            if value is not None and field.type == (int | None):
                require_size(field.name, value, at_least=0 if field.name == "mtp_num_layers" else 1)

    @classmethod
    def from_config(cls, config: object, seq_length: int | None = None, vocab_size: int | None = None) -> "ModelShape":
        """Read the shape from any object with ``TransformerConfig``'s attributes, such as a namespace of its fields.

        Args:
            config: The object. A missing attribute has Megatron's default; linear layers, for example, have biases.
            seq_length: Tokens in a sequence, which ``TransformerConfig`` does not have.
            vocab_size: Padded vocabulary size, which ``TransformerConfig`` does not have.
        """
        known: dict[str, Any] = {field.name: getattr(config, field.name, None) for field in fields(cls)}
        known["add_bias_linear"] = getattr(config, "add_bias_linear", True)
        known |= {} if seq_length is None else {"seq_length": seq_length}
        known |= {} if vocab_size is None else {"vocab_size": vocab_size}
        return cls(**{name: value for name, value in known.items() if value is not None})

    @property
    def head_size(self) -> int | None:
        """Width of one attention head (``kv_channels``)."""
        if self.kv_channels is None and self.hidden_size is not None and self.num_attention_heads is not None:
            return self.hidden_size // self.num_attention_heads
        return self.kv_channels

    @property
    def feed_forward_size(self) -> int | None:
        """Inner width of a dense feed-forward layer (``ffn_hidden_size``)."""
        if self.ffn_hidden_size is None and self.hidden_size is not None:
            return 4 * self.hidden_size
        return self.ffn_hidden_size

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a feed-forward part that is not a mixture of experts."""
        every = self.moe_layer_freq
        return self.num_moe_experts is None or (every > 1 if isinstance(every, int) else 0 in every)


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank on every axis, with the names of ``parallel_state``; prints as ``tp1.pp0.cp0.dp1``."""

    tensor_model_parallel_rank: int
    pipeline_model_parallel_rank: int
    context_parallel_rank: int
    data_parallel_rank: int
    expert_tensor_parallel_rank: int
    expert_model_parallel_rank: int
    expert_data_parallel_rank: int

    def __str__(self) -> str:
        """Return the short form for logs and errors."""
        return (
            f"tp{self.tensor_model_parallel_rank}.pp{self.pipeline_model_parallel_rank}"
            f".cp{self.context_parallel_rank}.dp{self.data_parallel_rank}"
        )


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes, with Megatron's names; the rest of the world is data parallel.

    Args:
        tensor_model_parallel_size: Number of ranks across which each weight matrix is split.
        pipeline_model_parallel_size: Number of pipeline stages across which the layers are split.
        virtual_pipeline_model_parallel_size: Chunks of layers on each pipeline rank (interleaved schedule); None means
            one chunk. Filled in if ``pipeline_model_parallel_layout`` has several stages per rank.
        pipeline_model_parallel_layout: Layers of each stage as ``"E,t*3|t*4,L"`` or as lists of ``"embedding"``,
            ``"decoder"``, ``"mtp"`` and ``"loss"``; None splits the layers evenly.
        context_parallel_size: Number of ranks across which each sequence is split.
        expert_model_parallel_size: Number of ranks across which the experts are distributed, from the tensor, context
            and data axes.
        expert_tensor_parallel_size: Number of ranks across which each expert's matrices are split; None for
            ``tensor_model_parallel_size``.
        sequence_parallel: Whether norms and dropout split the sequence over the tensor-parallel ranks.
        hybrid_context_parallel: Whether some of the context-parallel ranks, or one, may have packed documents to
            themselves.

    Raises:
        TypeError: A size is not an int, a flag is not a bool, or the layout is neither a string nor lists of strings.
        ValueError: The sizes contradict each other.

    Examples:
        >>> from lightning_mcore import ParallelLayout
        >>> layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        >>> layout.describe(world_size=8)
        'tp2 pp2 cp1 dp2'
        >>> str(layout.coordinates(rank=5, world_size=8))
        'tp1.pp1.cp0.dp0'
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: str | list[list[str]] | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    hybrid_context_parallel: bool = False

    def __post_init__(self) -> None:
        """Check the values that depend on neither world nor model."""
        make_fields_plain(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int or (field.type == (int | None) and value is not None):
                require_size(field.name, value)
        require_flag("sequence_parallel", self.sequence_parallel)
        require_flag("hybrid_context_parallel", self.hybrid_context_parallel)
        self._check_combinations()
        if self.pipeline_model_parallel_layout is not None:
            pp, vp = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
            check_stages(self.pipeline_model_parallel_layout, pp, vp)
            if (chunks := len(self.pipeline_stages) // pp) > 1:
                # As in TransformerConfig.__post_init__, so that process groups and schedule see the same number.
                object.__setattr__(self, "virtual_pipeline_model_parallel_size", chunks)

    def _check_combinations(self) -> None:
        tp, vp = self.tensor_model_parallel_size, self.virtual_pipeline_model_parallel_size
        if vp == 1:
            raise ValueError("virtual_pipeline_model_parallel_size=1 interleaves nothing; choose None, or 2 or more")
        if vp is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={vp} needs pipeline_model_parallel_size of 2 or more, but it is"
                " 1; leave the virtual size None or raise the pipeline size"
            )
        if self.sequence_parallel and tp == 1:
            raise ValueError(
                "sequence_parallel=True needs tensor_model_parallel_size of 2 or more, but it is 1;"
                " set sequence_parallel=False or raise the tensor size"
            )
        if self.hybrid_context_parallel and self.context_parallel_size == 1:
            raise ValueError(
                "hybrid_context_parallel=True needs context_parallel_size of 2 or more, but it is 1;"
                " set hybrid_context_parallel=False or raise the context size"
            )
        if self.expert_model_parallel_size > 1:
            _check_moe_sequence_parallel(self, f"expert_model_parallel_size={self.expert_model_parallel_size}")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the model and read the same batches: tensor times pipeline times context."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def num_chunks(self) -> int:
        """Number of model chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def is_interleaved(self) -> bool:
        """Whether the interleaved schedule runs several chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size is not None

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel ranks of an expert, with Megatron's default filled in."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """The number that must divide a sequence length, so that ranks get equal shares: 8 with CP=2 and TP=4."""
        # Each context-parallel rank gets one slice from the front and one from the back, which balances causal
        # attention.
        slices = 2 if self.context_parallel_size > 1 else 1
        shares = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return self.context_parallel_size * math.lcm(slices, shares)

    @property
    def pipeline_stages(self) -> list[list[str]]:
        """The stages in ``pipeline_model_parallel_layout``, in layer order; empty if it is None."""
        layout = self.pipeline_model_parallel_layout
        return [] if layout is None else parse_stages(layout)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas that see different batches; expert parallelism does not lower it.

        Raises:
            ValueError: The model-parallel ranks do not divide the world.
        """
        axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return _share_of_world(world_size, {axis: getattr(self, axis) for axis in axes})

    def expert_data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas of each expert, over which its gradients are reduced.

        Raises:
            ValueError: The ranks of the experts do not divide the world.
        """
        axes = {axis: getattr(self, axis) for axis in ("expert_model_parallel_size", "pipeline_model_parallel_size")}
        return _share_of_world(world_size, {_name_of_expert_tensor_size(self): self.expert_tensor_size, **axes})

    def validate_world(self, world_size: int) -> None:
        """Check that this layout divides the world.

        Raises:
            ValueError: It does not.
        """
        self.data_parallel_size(world_size)
        self.expert_data_parallel_size(world_size)

    def validate_model(self, shape: ModelShape) -> None:
        """Check that this layout divides the model.

        Args:
            shape: The model's sizes; unknown ones are not checked.

        Raises:
            ValueError: Layers, heads, query groups, feed-forward width, vocabulary, experts or sequence do not fit.
        """
        pp, vp = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        check_layers(self.pipeline_model_parallel_layout, pp, vp, shape)
        _check_tensor(self, shape)
        _check_experts(self, shape)
        if shape.seq_length is not None:
            _check_sequence(self, shape.seq_length, f"seq_length={shape.seq_length}", "choose")

    def validate_rows(self, length: int) -> None:
        """Check that the ranks get equal shares of a batch's rows.

        Args:
            length: Tokens of a row, with padding; of all rows together if they are packed.

        Raises:
            ValueError: They do not.
        """
        _check_sequence(self, length, f"the row length of a batch, {length} tokens,", "pad or cut rows to")

    def validate_microbatches(self, num_microbatches: int, group_size: int | None = None) -> None:
        """Check that the schedule can run a number of microbatches, in training and in validation.

        Args:
            num_microbatches: Microbatches of one step.
            group_size: ``TransformerConfig.microbatch_group_size_per_vp_stage``; None for the pipeline size.

        Raises:
            TypeError: The number is not an int.
            ValueError: The number is below 1; or the schedule is interleaved, and the group size is below the pipeline
                size or the microbatches do not fill groups. With the default group size they do if their number is a
                multiple of the pipeline size.

        Source: ``forward_backward_pipelining_with_interleaving``. The other two schedules accept any number.
        """
        require_size("num_microbatches", num_microbatches)
        pp, vp = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        group = pp if group_size is None else group_size
        # Only the interleaved schedule runs microbatches in groups.
        if vp is None:
            return
        if group < pp:
            raise ValueError(
                f"microbatch_group_size_per_vp_stage={group} is less than pipeline_model_parallel_size={pp};"
                f" choose {pp} or more"
            )
        if not _fills_groups(num_microbatches, group, pp):
            near = range(max(1, num_microbatches - group), num_microbatches + 2 * group)
            fitting = [count for count in near if _fills_groups(count, group, pp)]
            below, above = [n for n in fitting if n < num_microbatches], [n for n in fitting if n > num_microbatches]
            raise ValueError(
                f"num_microbatches={num_microbatches} does not fill groups of {group}, as the interleaved schedule of"
                f" pipeline_model_parallel_size={pp} needs; choose {choices(below[-1:] + above[:1])} through"
                " Trainer(accumulate_grad_batches=...) or MCoreStrategy(micro_batch_size=...)"
            )

    def microbatch_group_size(self, num_microbatches: int, wanted: int) -> int:
        """Return the group size for one run of the interleaved schedule: ``wanted`` if possible, or the pipeline size.

        At the end of an epoch and in evaluation there may be too few microbatches for ``wanted``.
        """
        pp = self.pipeline_model_parallel_size
        return wanted if _fills_groups(num_microbatches, wanted, pp) else pp

    def coordinates(self, rank: int, world_size: int) -> Coordinates:
        """Return the place of ``rank`` on every axis.

        Raises:
            ValueError: The rank is outside the world, or the world does not fit the layout.

        Source: ``parallel_state.RankGenerator`` with order ``tp-cp-ep-dp-pp``, the leftmost axis varying fastest.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is outside world_size={world_size}; choose 0 to {world_size - 1}")
        dp, edp = self.data_parallel_size(world_size), self.expert_data_parallel_size(world_size)
        # TP=2, PP=2, 8 ranks: DP=2. Ranks 0 and 1 share matrices, ranks 0 and 2 see different batches, and ranks 0 and
        # 4 are two stages: rank 5 is tp1.pp1.cp0.dp0. Experts divide the same ranks of a stage differently.
        dense = _unravel(rank, (self.tensor_model_parallel_size, self.context_parallel_size, dp))
        expert = _unravel(rank, (self.expert_tensor_size, self.expert_model_parallel_size, edp))
        return Coordinates(
            tensor_model_parallel_rank=dense[0],
            pipeline_model_parallel_rank=dense[3],
            context_parallel_rank=dense[1],
            data_parallel_rank=dense[2],
            expert_tensor_parallel_rank=expert[0],
            expert_model_parallel_rank=expert[1],
            expert_data_parallel_rank=expert[2],
        )

    def in_words(self, world_size: int) -> str:
        """Return what is split how often, such as ``tensor 2, pipeline 2, data 2, sequence parallel``."""
        sizes = {
            "tensor": self.tensor_model_parallel_size,
            "pipeline": self.pipeline_model_parallel_size,
            "chunks on each rank": self.num_chunks,
            "context": self.context_parallel_size,
            "expert": self.expert_model_parallel_size,
            "data": self.data_parallel_size(world_size),
        }
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += ["hybrid context parallel"] if self.hybrid_context_parallel else []
        return ", ".join(parts) or "not split"

    def describe(self, world_size: int) -> str:
        """Return one line for the start of a run, such as ``tp2 pp2 vp2 cp1 dp1 sp``.

        It includes the expert-parallel sizes if experts are split over ranks.
        """
        virtual = f" vp{self.num_chunks}" if self.num_chunks > 1 else ""
        experts = ""
        if self.expert_model_parallel_size > 1 or self.expert_tensor_size != self.tensor_model_parallel_size:
            edp = self.expert_data_parallel_size(world_size)
            experts = f" ep{self.expert_model_parallel_size} etp{self.expert_tensor_size} edp{edp}"
        return (
            f"tp{self.tensor_model_parallel_size} pp{self.pipeline_model_parallel_size}{virtual}"
            f" cp{self.context_parallel_size} dp{self.data_parallel_size(world_size)}{experts}"
            f"{' sp' if self.sequence_parallel else ''}"
        )


def _fills_groups(num_microbatches: int, group: int, pp: int) -> bool:
    """Return whether all groups are full; the last one may be shorter, but not shorter than the pipeline."""
    # Groups of 6 on 4 stages: 6, 10, 11 and 12 microbatches fit; 7 to 9 would leave a last group of 1 to 3.
    rest = num_microbatches % group
    return num_microbatches >= group and (rest == 0 or rest >= pp)


def _check_moe_sequence_parallel(layout: ParallelLayout, because: str) -> None:
    """Reject experts with tensor but without sequence parallelism. Source: ``MoELayer.forward``, which raises late."""
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"{because} with tensor_model_parallel_size={layout.tensor_model_parallel_size} needs"
            " sequence_parallel=True; set it, or tensor_model_parallel_size=1"
        )


def _check_tensor(layout: ParallelLayout, shape: ModelShape) -> None:
    """Reject matrices that tensor ranks cannot share evenly. Source: ``Attention``, ``MLP``, ``VocabUtility``."""
    tp = layout.tensor_model_parallel_size
    for name, size in (
        ("num_attention_heads", shape.num_attention_heads),
        ("ffn_hidden_size", shape.feed_forward_size if shape.has_dense_layers else None),
        ("moe_shared_expert_intermediate_size", shape.moe_shared_expert_intermediate_size),
        ("padded vocab_size", shape.vocab_size),
    ):
        require_divides("tensor_model_parallel_size", tp, name, size)
    sharing = tp * layout.context_parallel_size  # a layer with a memory sees whole sequences of some of its heads
    for name, heads_of_memory in shape.shared_heads:
        require_divides("tensor_model_parallel_size * context_parallel_size", sharing, name, heads_of_memory)
    heads, groups, width = shape.num_attention_heads, shape.num_query_groups, shape.head_size
    if groups is None or heads is None:
        return
    require_divides("num_query_groups", groups, "num_attention_heads", heads)
    allowed = [size for size in divisors(heads) if groups % size == 0 or size % groups == 0]
    if tp not in allowed:
        raise ValueError(
            f"tensor_model_parallel_size={tp} neither divides num_query_groups={groups} nor is a multiple of it;"
            f" choose {choices(allowed)}"
        )
    # With fewer groups than ranks, Megatron splits the joint query, key and value matrix across group boundaries.
    if width is not None:
        require_divides("tensor_model_parallel_size", tp, "query, key and value rows", (heads + 2 * groups) * width)


def _check_experts(layout: ParallelLayout, shape: ModelShape) -> None:
    """Reject experts that ranks cannot share evenly. Source: ``BaseMoELayer``, ``TransformerConfig``."""
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_size
    etp_name = _name_of_expert_tensor_size(layout)
    if shape.num_moe_experts is None:
        if ep > 1:
            raise ValueError(
                f"expert_model_parallel_size={ep} needs a mixture of experts, but num_moe_experts is None;"
                " choose expert_model_parallel_size=1 or give the model experts"
            )
        return
    _check_moe_sequence_parallel(layout, f"num_moe_experts={shape.num_moe_experts}")
    require_divides("expert_model_parallel_size", ep, "num_moe_experts", shape.num_moe_experts)
    width = shape.moe_ffn_hidden_size or shape.feed_forward_size
    require_divides(etp_name, etp, "moe_ffn_hidden_size", width)
    if etp > 1 and shape.add_bias_linear:
        raise ValueError(
            f"{etp_name}={etp} needs experts without biases, but add_bias_linear=True;"
            " choose expert_tensor_parallel_size=1 or add_bias_linear=False"
        )


def _check_sequence(layout: ParallelLayout, length: int, shown: str, advice: str) -> None:
    """Reject a sequence that gives ranks unequal shares. Source: ``get_batch_on_this_cp_rank``, ``mappings``."""
    cp, tp = layout.context_parallel_size, layout.tensor_model_parallel_size
    reasons = [f"context_parallel_size={cp} (two slices a rank)"] if cp > 1 else []
    reasons += [f"sequence_parallel with tensor_model_parallel_size={tp}"] if layout.sequence_parallel else []
    unit = layout.sequence_multiple
    if length % unit:
        raise ValueError(
            f"{shown} is not a multiple of {unit}, as {' and '.join(reasons)} needs; {advice} "
            f"{neighbours(length, unit)}"
        )


def _name_of_expert_tensor_size(layout: ParallelLayout) -> str:
    name = "expert_tensor_parallel_size"
    return name if layout.expert_tensor_parallel_size is not None else f"{name}=tensor_model_parallel_size"


def _share_of_world(world_size: int, axes: dict[str, int]) -> int:
    require_size("world_size", world_size)
    size = math.prod(axes.values())
    if world_size % size:
        named = [f"{name}={value}" for name, value in axes.items() if value > 1]
        product = " * ".join(named) + (f" = {size}" if len(named) > 1 else "")
        raise ValueError(
            f"{product} does not divide the number of ranks (devices * num_nodes), which is {world_size}; choose sizes"
            f" whose product is {choices(divisors(world_size))}, or start {neighbours(world_size, size)} ranks"
        )
    return world_size // size


def _unravel(rank: int, sizes: Sequence[int]) -> list[int]:
    """Return the place of ``rank`` on each axis, the first varying fastest, and then on the remaining axis."""
    places = []
    for size in sizes:
        rank, place = divmod(rank, size)
        places.append(place)
    return [*places, rank]
