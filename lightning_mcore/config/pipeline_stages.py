# SPDX-License-Identifier: Apache-2.0
"""Split layers into pipeline stages: read Megatron's layout string, and reject uneven splits.

Megatron has four ways to split: evenly, evenly with the embedding or the loss counted as a layer, with a first or last
stage of a different size, and by a layout that lists each stage. Each has its own rule. ``ParallelLayout`` calls
:func:`check_stages` when it is built and :func:`check_layers` when the model's shape is known. Pure arithmetic.
"""

import re
from typing import TYPE_CHECKING

from lightning_mcore.config.value_checks import choices, divisors, neighbours, require_divides

if TYPE_CHECKING:
    from lightning_mcore.config.layout import ModelShape

PipelineLayout = str | list[list[str]]

_LETTER_OF_LAYER = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def parse_stages(layout: PipelineLayout) -> list[list[str]]:
    """Return the letters of each pipeline stage: E embedding, t decoder layer, m MTP layer, L loss.

    ``"E,t*3|(tt|)*2,t,L"`` has four stages: E t t t, t t, t t, and t L. ``layout`` may also list layer names for each
    stage. Raises TypeError if it is neither, and ValueError for a letter or name that is not a layer.

    Source: ``PipelineParallelLayerLayout.parse_str_to_list`` and ``__init__`` (0.16.1).
    """
    if isinstance(layout, str):
        text = layout.replace(",", "")
        # First groups, "(tt|)*2", then single letters, "t*3"
        for repeat in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(repeat, lambda match: match[1] * int(match[2]), text)
        letters, stages = {letter: letter for letter in "EtmL"}, [list(stage) for stage in text.split("|")]
    elif isinstance(layout, list) and all(isinstance(stage, list) for stage in layout):
        letters, stages = _LETTER_OF_LAYER, [[str(layer).strip().lower() for layer in stage] for stage in layout]
    else:
        raise TypeError(
            f"pipeline_model_parallel_layout={layout!r} is neither a string nor a list of lists of layer names;"
            " give one, such as 'Et|tL'"
        )
    unknown = [layer for stage in stages for layer in stage if layer not in letters]
    if unknown:
        grammar = ", with | between stages and *n to repeat" if isinstance(layout, str) else ""
        raise ValueError(
            f"pipeline_model_parallel_layout={layout!r} holds {unknown[0]!r}, which is not a layer;"
            f" choose from {choices(letters)}{grammar}"
        )
    return [[letters[layer] for layer in stage] for stage in stages]


def check_stages(layout: PipelineLayout, pp: int, vp: int | None) -> None:
    """Raise ValueError for a layout that contradicts the pipeline sizes or itself; ``vp=None`` is not compared.

    Source: ``PipelineParallelLayerLayout.__init__`` and ``validate_layer_layout`` (0.16.1), but stricter in one point:
    Megatron accepts empty stages before E and after L, and still builds the embedding in the first stage and the loss
    in the last.
    """
    stages = parse_stages(layout)
    given = f"pipeline_model_parallel_layout={layout!r}"
    # Stages are dealt to ranks in turn: of 4 stages on 2 ranks, rank 0 has the first and the third.
    chunks, rest = divmod(len(stages), pp)
    if rest or not stages:
        raise ValueError(
            f"{given} has {len(stages)} stages, not a multiple of pipeline_model_parallel_size={pp};"
            f" write {neighbours(len(stages), pp)} stages or change the size"
        )
    if pp == 1 and chunks > 1:
        raise ValueError(
            f"{given} has {chunks} stages but pipeline_model_parallel_size=1; write 1 stage or raise the size"
        )
    if vp not in (None, chunks):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={vp} disagrees with {given}, whose stages make {chunks} for each of"
            f" {pp} pipeline ranks; leave it None"
        )
    _check_places(given, stages, pp)


def _check_places(given: str, stages: list[list[str]], pp: int) -> None:
    order = "".join("".join(stage) for stage in stages)
    if stages[0][:1] != ["E"] or stages[-1][-1:] != ["L"] or order.count("E") != 1 or order.count("L") != 1:
        raise ValueError(
            f"{given} must begin its first stage with its only embedding and end its last with its only loss;"
            " write it as 'E...|...L'"
        )
    # The last pp stages are the last chunk of each rank.
    homes = [index for index, stage in enumerate(stages) if "m" in stage]
    if homes and (len(homes) > 1 or homes[0] < len(stages) - pp or "t" in order[order.index("m") :]):
        raise ValueError(
            f"{given} must have its MTP layers in one of its last {pp} stages, after every decoder layer;"
            " move each m there"
        )


def check_layers(layout: PipelineLayout | None, pp: int, vp: int | None, shape: "ModelShape") -> None:
    """Raise ValueError for layers that cannot be split into the given stages, or for two ways to split them.

    ``layout`` has passed :func:`check_stages`; None means that Megatron splits. 30 layers on 4 stages raise; with the
    embedding and the loss counted as layers, 32 / 4 = 8 for each.

    Source: ``TransformerConfig.__post_init__`` and ``get_num_layers_to_build`` (0.16.1).
    """
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    uneven = {name: getattr(shape, name) for name in ends if getattr(shape, name) is not None}
    flags = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    counted = [name for name in flags if getattr(shape, name)]
    ways = [*(["pipeline_model_parallel_layout"] if layout is not None else []), *list(uneven)[:1], *counted[:1]]
    if len(ways) > 1:
        raise ValueError(f"{ways[0]} and {ways[1]} both say how to split the layers; set only one")
    if shape.num_layers is None:
        return
    if layout is not None:
        _check_counts(layout, shape.num_layers, shape.mtp_num_layers or 0)
    elif uneven:
        _check_uneven(pp, vp, shape.num_layers, uneven)
    else:
        total = shape.num_layers + len(counted)
        require_divides("pipeline_model_parallel_size", pp, " + ".join(["num_layers", *counted]), total)
        _check_chunks(vp, total // pp, "each pipeline stage")


def _check_counts(layout: PipelineLayout, num_layers: int, mtp_num_layers: int) -> None:
    letters = [letter for stage in parse_stages(layout) for letter in stage]
    for name, wanted, letter, layer in (
        ("num_layers", num_layers, "t", "decoder"),
        ("mtp_num_layers", mtp_num_layers, "m", "MTP"),
    ):
        if letters.count(letter) != wanted:
            raise ValueError(
                f"pipeline_model_parallel_layout={layout!r} holds {letters.count(letter)} {layer} layers"
                f" but {name}={wanted}; make them equal"
            )


def _check_uneven(pp: int, vp: int | None, num_layers: int, uneven: dict[str, int]) -> None:
    given = " with ".join(f"{name}={layers}" for name, layers in uneven.items())
    others, left = pp - len(uneven), num_layers - sum(uneven.values())
    if others < 0:
        raise ValueError(
            f"{given} needs pipeline_model_parallel_size of 2 or more, but it is 1; raise it or leave both None"
        )
    # Megatron itself accepts a negative rest if it divides evenly.
    if left < others or (left % others if others else left):
        wanted = f"a multiple of {others}, at least {others}" if others else "0"
        raise ValueError(
            f"{given} leaves {left} of num_layers={num_layers} to the other {others} pipeline stages; leave {wanted}"
        )
    for name, layers in uneven.items():
        _check_chunks(vp, layers, name)
    if others:
        _check_chunks(vp, left // others, "each other pipeline stage")


def _check_chunks(vp: int | None, layers: int, where: str) -> None:
    if vp is not None and layers % vp:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={vp} does not divide the {layers} layers of {where};"
            f" choose {choices([*divisors(layers)[1:], None])}"
        )
