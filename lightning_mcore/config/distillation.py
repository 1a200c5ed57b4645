# SPDX-License-Identifier: Apache-2.0
"""The settings of distillation, as plain data: the teacher, the divergence, layers to match, and their weights.

``layers/distillation.py`` computes the divergence, ``models/distillation.py`` has the module that trains with it. Files
and hyper-parameters hold the settings as a dict, which :meth:`Distillation.of` reads.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from lightning_mcore.config.layout import ModelShape, ParallelLayout
from lightning_mcore.config.value_checks import Settings, plain_values, require_choice, require_number, require_size

HiddenLoss = Literal["mse", "cosine"]


@dataclass(frozen=True)
class Distillation(Settings):
    """How a model learns from the probabilities that a teacher gives to each next token.

    The loss of a token is ``(1 - kd_ratio) * token loss + kd_ratio * divergence``. With the student's probabilities
    ``p``, the teacher's ``q`` and ``m = (1 - beta) * p + beta * q``, all at the same temperature, the divergence is

    * forward KL, ``KL(q || p)``, with ``beta=0``: the student covers all that the teacher finds likely;
    * reverse KL, ``KL(p || q)``, with ``beta=1``: the student keeps to what the teacher finds likely;
    * ``beta * KL(q || m) + (1 - beta) * KL(p || m)`` in between (generalized Jensen-Shannon), as in TRL's GKD.

    With ``intermediate_layer_pairs``, ``intermediate_weight`` times the distance of hidden states is added to it.

    Args:
        teacher: Folder, hub name or checkpoint of the teacher, a text model with the student's tokenizer.
        beta: The kind of divergence, 0 to 1, as above.
        temperature: Divides the logits of both models. The divergence is not multiplied by its square.
        kd_ratio: Weight of the divergence, above 0, up to 1, which leaves the token loss out of the gradient.
        top_k: Compare the teacher's ``top_k`` most likely tokens one by one, and all other tokens as a single one. None
            compares every token of the vocabulary.
        stored: Folder for the teacher's logits. The first run computes them for all training data before it trains,
            and later runs read them there instead of running the teacher. Needs ``top_k``.
        on_policy: Fraction of the batches, 0 to 1, whose answers the student writes itself, as ``lmbda`` of TRL's GKD.
            Their loss is the divergence alone.
        max_new_tokens: Longest answer of the student, in tokens.
        stop_token: Token that ends an answer of the student; None if none does.
        seed: Seed for choosing these batches, and for sampling the answers at ``temperature``.
        intermediate_layer_pairs: Pairs of a student layer and a teacher layer, such as ``[[2, 4], [4, 8]]``, whose
            hidden states are matched; None for none. Layers are counted from 1, as in the ``hidden_states`` of
            transformers: the last layer's are those after the final norm. If the models have different hidden sizes, a
            linear projection of the student's states is trained for each pair.
        intermediate_loss: Distance of a token's hidden states: ``"mse"``, the mean squared difference of their
            channels, or ``"cosine"``, 1 minus their cosine. It is averaged over the pairs.
        intermediate_weight: Weight of this distance in the loss.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type.

    Examples:
        >>> from lightning_mcore import Distillation
        >>> forward_kl = Distillation("Qwen/Qwen2.5-7B", kd_ratio=0.5)
        >>> jensen_shannon = Distillation("Qwen/Qwen2.5-7B", beta=0.5, temperature=2.0)
        >>> computed_before = Distillation("Qwen/Qwen2.5-7B", top_k=64, stored="logits-of-7b")
    """

    argument = "distillation"
    teacher: str
    beta: float = 0.0
    temperature: float = 1.0
    kd_ratio: float = 1.0
    top_k: int | None = None
    stored: str | None = None
    on_policy: float = 0.0
    max_new_tokens: int = 128
    stop_token: int | None = None
    seed: int = 1234
    intermediate_layer_pairs: list[list[int]] | None = None
    intermediate_loss: HiddenLoss = "mse"
    intermediate_weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.teacher, str) or not self.teacher:
            raise TypeError(f"teacher={self.teacher!r} is not the path or name of a model; give one")
        for name in ("beta", "temperature", "kd_ratio", "on_policy", "intermediate_weight"):
            require_number(name, getattr(self, name), at_least=0)
        for name in ("beta", "kd_ratio", "on_policy"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)} is too large; choose 0 to 1")
        for name, effect in (
            ("temperature", "divides by zero"),
            ("kd_ratio", "learns nothing from the teacher"),
            ("intermediate_weight", "learns nothing from hidden states"),
        ):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}=0 {effect}; choose a number above 0")
        self._check_teacher_use()
        self._check_pairs()

    def check_seeing(self) -> None:
        """Raise ValueError for a setting that a student who sees images does not support."""
        if self.on_policy:
            raise ValueError(
                f"on_policy={self.on_policy} lets the student continue prompts, which is not supported with images;"
                " leave on_policy out"
            )

    def _check_teacher_use(self) -> None:
        if self.top_k is not None:
            require_size("top_k", self.top_k)
        require_size("max_new_tokens", self.max_new_tokens)
        require_size("seed", self.seed, at_least=0)
        if self.stop_token is not None:
            require_size("stop_token", self.stop_token, at_least=0)
        if self.stored is not None and self.on_policy:
            raise ValueError(
                f"on_policy={self.on_policy} needs the teacher in each step, and stored={self.stored!r} has its logits"
                " of the data only; leave one of them out"
            )
        if self.stored is not None and (not isinstance(self.stored, str) or not self.stored):
            raise TypeError(f"stored={self.stored!r} is not the path of a folder; give one, or None")
        if self.stored is not None and self.top_k is None:
            raise ValueError(
                f"stored={self.stored!r} would store the whole vocabulary's logits of each token; set top_k, such as 64"
            )

    def _check_pairs(self) -> None:
        require_choice("intermediate_loss", self.intermediate_loss, HiddenLoss)
        if self.intermediate_layer_pairs is None:
            return
        pairs = plain_values(self.intermediate_layer_pairs)
        is_list = isinstance(pairs, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
        if not is_list or not pairs or not all(type(layer) is int for pair in pairs for layer in pair):
            raise TypeError(
                f"intermediate_layer_pairs={pairs!r} is not a list of pairs of layers; give one such as"
                " [[2, 4], [4, 8]], or None"
            )
        pairs = [list(pair) for pair in pairs]
        object.__setattr__(self, "intermediate_layer_pairs", pairs)
        shown = f"intermediate_layer_pairs={pairs!r}"
        if any(pairs.count(pair) > 1 for pair in pairs):
            raise ValueError(f"{shown} has a pair twice; leave one of them out")
        if self.stored is not None:
            raise ValueError(
                f"{shown} needs the teacher in each step, and stored={self.stored!r} has its logits only; leave one of"
                " them out"
            )

    @property
    def copies_of_logits(self) -> float:
        """How many fp32 copies of a chunk's logits the divergence needs at once; ``layers/distillation.py`` says why.

        With ``top_k``, the logits in fp32 and two masks of one byte each.
        """
        if self.top_k is not None:
            return 1.5
        return 3.0 if self.beta in (0, 1) else 4.0


def check_sight(path: str, teacher: bool, student: bool) -> None:
    """Raise ValueError if only one of a student and its teacher, which is at ``path``, sees images."""
    if teacher and not student:
        raise ValueError(
            f"teacher={path!r} sees images, and the student does not; give a text-only teacher, or train a"
            " vision-language student with MCoreVisionDistillation"
        )
    if student and not teacher:
        raise ValueError(
            f"teacher={path!r} is a text-only model, and the student sees images; give a vision-language teacher"
        )


def check_teacher(path: str, shape: ModelShape, layout: ParallelLayout) -> None:
    """Raise ValueError if the student's layout cannot divide its teacher, which is at ``path``.

    A dense teacher has no part in the expert parallelism of a student with experts.
    """
    if not shape.num_moe_experts:
        layout = dataclasses.replace(layout, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    try:
        layout.validate_model(shape)
    except ValueError as error:
        raise ValueError(f"the teacher {path} does not fit this run: {error}") from error


def check_layer_pairs(
    pairs: Sequence[Sequence[int]], student: Sequence[int], teacher: Sequence[int], recomputes: bool
) -> None:
    """Raise ValueError if the layers of a pair do not exist, or do not keep hidden states.

    ``student`` and ``teacher`` are the numbers of layers of each chunk, in the order of the layers. ``recomputes`` says
    whether the student's layers are recomputed in full.
    """
    counts = {"student": sum(student), "teacher": sum(teacher)}
    for pair in pairs:
        shown = f"intermediate_layer_pairs has {list(pair)}"
        for (name, count), layer in zip(counts.items(), pair, strict=True):
            if not 1 <= layer <= count:
                raise ValueError(f"{shown}, and layer {layer} of the {name} does not exist; choose 1 to {count}")
        if recomputes and pair[0] < counts["student"]:
            raise ValueError(
                f"{shown}, and recompute_granularity='full' keeps no hidden states of layer {pair[0]} of the student;"
                " set recompute_granularity='selective', or pair only the last layer"
            )


class StatesOf(NamedTuple):
    """The hidden states of one layer."""

    is_teacher: bool
    layer: int  # counted from 1


@dataclass(frozen=True)
class PairPlaces:
    """Which chunks have the hidden states of paired layers, and which states go from chunk to chunk.

    A pair is compared in the chunk of the later of its two layers. The earlier layer's states travel there, from chunk
    to chunk, behind the activations. With 2 chunks of 2 student layers and of 4 teacher layers, the student's layer 1
    is in chunk 0 and the teacher's layer 7 in chunk 1, so chunk 0 sends the student's states, and the pair [1, 7] is
    compared in chunk 1. For [4, 2], the teacher's states travel.
    """

    pairs: tuple[tuple[int, int], ...]  # a layer of the student and one of the teacher
    student: tuple[int, ...]  # the chunk of each layer's hidden states
    teacher: tuple[int, ...]

    @classmethod
    def of(
        cls, pairs: Sequence[Sequence[int]], student: Sequence[int], teacher: Sequence[int], multi_token: bool
    ) -> "PairPlaces":
        """Return them from the numbers of layers of each chunk; ``multi_token`` as in :func:`chunks_of_layers`."""
        places = chunks_of_layers(student, multi_token), chunks_of_layers(teacher)
        return cls(tuple((own, taught) for own, taught in pairs), tuple(places[0]), tuple(places[1]))

    def _chunks(self, pair: tuple[int, int]) -> tuple[int, int]:
        return self.student[pair[0] - 1], self.teacher[pair[1] - 1]

    def compared_in(self, chunk: int) -> list[tuple[int, int]]:
        """Return the pairs that a chunk compares."""
        return [pair for pair in self.pairs if max(self._chunks(pair)) == chunk]

    def kept_in(self, chunk: int) -> list[StatesOf]:
        """Return the states of a chunk's own layers that it compares or sends."""
        found = {
            StatesOf(bool(which), pair[which])
            for pair in self.pairs
            for which, place in enumerate(self._chunks(pair))
            if place == chunk
        }
        return sorted(found)

    def sent_by(self, chunk: int) -> list[StatesOf]:
        """Return the states that a chunk sends to the next one, in the order in which it sends them."""
        found = set()
        for pair in self.pairs:
            own, taught = self._chunks(pair)
            if min(own, taught) <= chunk < max(own, taught):
                found.add(StatesOf(taught < own, pair[taught < own]))
        return sorted(found)


def chunks_of_layers(counts: Sequence[int], multi_token: bool = False) -> list[int]:
    """Return which chunk has the hidden states of each layer; the last layer's come from the final norm.

    Chunks of 2, 2 and 0 layers give ``[0, 0, 1, 2]``: the norm is in the last chunk, unless the model predicts several
    tokens, which puts it behind the last layer.
    """
    ends = list(accumulate(counts))
    places = [next(place for place, end in enumerate(ends) if layer < end) for layer in range(ends[-1])]
    return places if multi_token else [*places[:-1], len(counts) - 1]
