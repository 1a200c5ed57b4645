# SPDX-License-Identifier: Apache-2.0
"""Classes with the arguments of another class: the same types, defaults, values and help."""

import inspect
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_mcore import (
    MCoreDistillation,
    MCoreEmbedding,
    MCoreEmbeddingData,
    MCoreFinetuningData,
    MCoreGPT,
    MCorePreference,
    MCorePreferenceData,
    MCoreReranker,
    MCoreRerankingData,
    MCoreVisionData,
    MCoreVisionDistillation,
    MCoreVisionGPT,
)
from lightning_mcore.config.inherited_arguments import inherit_help, passed_on

OF_STREAMS = {"streaming", "shuffle_buffer"}
OF_CONVERSATIONS = {*OF_STREAMS, "format", "prompt_column", "response_column", "loss_on", "log_sources"}
OF_POSITIONS = {
    "position_embedding_type",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
    "yarn",
}
OF_IMAGES = {"image_processor", "video_processor", "media_dir", "broken_images", "video_fps", "video_maxlen"}
MODELS = [  # a class, the arguments of its own, and those of MCoreGPT that it lacks
    (MCorePreference, {"preference"}, {"loss_normalization"}),
    (MCoreDistillation, {"distillation"}, set()),
    (MCoreEmbedding, {"embedding"}, {"loss_normalization"}),
    (MCoreReranker, {"reranker"}, {"loss_normalization"}),
    (MCoreVisionGPT, {"vision", "freeze"}, {*OF_POSITIONS, "train_only"}),
    (MCoreVisionDistillation, {"vision", "freeze", "distillation"}, {*OF_POSITIONS, "train_only"}),
]
DATA = [
    (MCorePreferenceData, set(), OF_CONVERSATIONS),
    (MCoreEmbeddingData, set(), {*OF_CONVERSATIONS, "template"}),
    (MCoreRerankingData, set(), {*OF_CONVERSATIONS, "template"}),
    (MCoreVisionData, OF_IMAGES, OF_STREAMS),
]


def parameters(function: Any) -> dict[str, tuple[Any, Any, Any]]:
    given = inspect.signature(function).parameters
    return {name: (value.annotation, value.default, value.kind) for name, value in given.items()}


def same_arguments(kind: Any, base: Any, own: set[str], lacking: set[str]) -> list[str]:
    """Return the names whose type or default differs from the base's."""
    extended, original = parameters(kind), parameters(base)
    assert extended.keys() - original.keys() == own
    assert original.keys() - extended.keys() == lacking
    return [name for name in extended.keys() & original.keys() if extended[name] != original[name]]


@pytest.mark.parametrize(("kind", "own", "lacking"), MODELS)
def test_models_take_the_arguments_of_a_language_model(kind: Any, own: set[str], lacking: set[str]) -> None:
    assert same_arguments(kind, MCoreGPT, own, lacking) == []
    of_folder = lacking & parameters(MCoreGPT.from_pretrained).keys()
    assert same_arguments(kind.from_pretrained, MCoreGPT.from_pretrained, own - {"vision"}, of_folder) == []


@pytest.mark.parametrize(("kind", "own", "lacking"), DATA)
def test_data_modules_take_the_arguments_of_finetuning(kind: Any, own: set[str], lacking: set[str]) -> None:
    differing = [] if kind is MCoreVisionData else ["packing"]  # off by default
    assert same_arguments(kind, MCoreFinetuningData, own, lacking) == differing


@pytest.mark.parametrize("kind", [kind for kind, *_ in MODELS + DATA])
def test_the_command_line_explains_every_argument(kind: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "of_class")
    if hasattr(kind, "from_pretrained"):
        parser.add_method_arguments(kind, "from_pretrained", "of_folder")
    arguments = [action for action in parser._actions if action.dest.startswith("of_") and ".recipe" not in action.dest]
    assert len(arguments) > 15
    silent = [action.dest for action in arguments if action.help in (None, "", "%(default)s")]
    assert [name for name in silent if name not in ("of_class", "of_folder")] == []


class Base:
    """A base.

    Args:
        size: Its size,
            in bytes.
        seed: Its seed.
    """

    def __init__(self, size: int, seed: int = 1) -> None:
        self.given = size, seed


@inherit_help(Base)
class Extended(Base):
    """An extension.

    Args:
        name: Its name.
        seed: Another seed.
    """

    def __init__(self, size: int, name: str, seed: int = 1) -> None:
        arguments = passed_on(locals(), "name")
        super().__init__(**arguments)


def test_values_are_passed_on_and_help_is_taken_over() -> None:
    assert Extended(3, "a", seed=4).given == (3, 4)
    parser = ArgumentParser()
    parser.add_class_arguments(Extended)
    found = {action.dest: action.help for action in parser._actions}
    assert {name: found[name] for name in ("size", "name", "seed")} == {
        "size": "Its size,\nin bytes.",
        "name": "Its name.",
        "seed": "Another seed.",
    }


class AnyArguments(MCoreEmbedding):
    def __init__(self, extra: int = 3, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.extra = extra


@pytest.mark.parametrize("kind", [MCorePreference, MCoreEmbedding, MCoreReranker, AnyArguments])
def test_hyper_parameters_are_arguments_of_the_class(kind: type[MCoreGPT]) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    recorded = kind(vocab_size=64, seq_length=16, transformer=sizes).hparams  # type: ignore[call-arg]
    assert kind(**recorded).hparams == recorded
