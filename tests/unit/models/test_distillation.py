# SPDX-License-Identifier: Apache-2.0
"""Which settings and teachers are refused before a model is built, and what ``plan`` counts of a teacher."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mcore import Distillation, MCoreDistillation, MCoreStrategy
from lightning_mcore.config.distillation import PairPlaces, StatesOf, chunks_of_layers
from lightning_mcore.config.run import RunSettings
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.rehearsal.settings import build_of
from tests.support.hf_models import VOCAB_SIZE, save_tiny, tiny_folder
from tests.support.sentences import refuses

SETTINGS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"teacher": ""}, TypeError, "teacher=''"),
    ({"teacher": "big", "beta": 1.5}, ValueError, "beta=1.5"),
    ({"teacher": "big", "beta": -0.5}, ValueError, "beta=-0.5"),
    ({"teacher": "big", "temperature": 0}, ValueError, "temperature=0"),
    ({"teacher": "big", "kd_ratio": 0}, ValueError, "kd_ratio=0"),
    ({"teacher": "big", "kd_ratio": 2}, ValueError, "kd_ratio=2"),
    ({"teacher": "big", "top_k": 0}, ValueError, "top_k=0"),
    ({"teacher": "big", "top_k": 8, "stored": ""}, TypeError, "stored=''"),
    ({"teacher": "big", "stored": "logits"}, ValueError, "stored='logits'"),
    ({"teacher": "big", "on_policy": 1.5}, ValueError, "on_policy=1.5"),
    ({"teacher": "big", "on_policy": 0.5, "max_new_tokens": 0}, ValueError, "max_new_tokens=0"),
    ({"teacher": "big", "on_policy": 0.5, "stop_token": "<|im_end|>"}, TypeError, "stop_token='<|im_end|>'"),
    ({"teacher": "big", "on_policy": 0.5, "stop_token": -1}, ValueError, "stop_token=-1"),
    ({"teacher": "big", "on_policy": 0.5, "seed": -1}, ValueError, "seed=-1"),
    ({"teacher": "big", "top_k": 8, "stored": "logits", "on_policy": 0.5}, ValueError, "on_policy=0.5"),
    ({"teacher": "big", "intermediate_layer_pairs": []}, TypeError, "intermediate_layer_pairs=[]"),
    ({"teacher": "big", "intermediate_layer_pairs": [[1, 2, 3]]}, TypeError, "intermediate_layer_pairs=[[1, 2, 3]]"),
    ({"teacher": "big", "intermediate_layer_pairs": {1: 2}}, TypeError, "intermediate_layer_pairs={1: 2}"),
    (
        {"teacher": "big", "intermediate_layer_pairs": [[1, 2], [1, 2]]},
        ValueError,
        "intermediate_layer_pairs=[[1, 2], [1, 2]]",
    ),
    (
        {"teacher": "big", "intermediate_layer_pairs": [[1, 2]], "top_k": 8, "stored": "logits"},
        ValueError,
        "intermediate_layer_pairs=[[1, 2]]",
    ),
    ({"teacher": "big", "intermediate_loss": "l1"}, ValueError, "intermediate_loss='l1'"),
    ({"teacher": "big", "intermediate_weight": 0}, ValueError, "intermediate_weight=0"),
)


@pytest.mark.parametrize(("given", "kind", "said"), SETTINGS, ids=[said for *_, said in SETTINGS])
def test_settings_out_of_range_are_refused(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with refuses(kind, said):
        Distillation.of(given)


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sentences name folders without their place."""
    monkeypatch.chdir(tmp_path)


def folder(name: str, vocab_size: int, tokens: int | None = None, **sizes: Any) -> str:
    """Write a model, and a tokenizer.json of so many tokens."""
    path = save_tiny("llama", Path(name), vocab_size=vocab_size, **sizes)
    if tokens is not None:
        vocabulary = {f"{name[0]}{number}" if number > 5 else str(number): number for number in range(tokens)}
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return str(path)


def student(path: str, teacher: str, **arguments: Any) -> MCoreDistillation:
    return MCoreDistillation.from_pretrained(path, Distillation(teacher), seq_length=32, **arguments)


def test_a_token_that_no_answer_can_end_with_is_refused() -> None:
    setting = Distillation("big", on_policy=0.5, stop_token=VOCAB_SIZE)
    module = MCoreDistillation.from_pretrained(folder("small", VOCAB_SIZE), setting, seq_length=32)
    with refuses(ValueError, f"stop_token={VOCAB_SIZE}"):
        module.check_settings()


def test_a_teacher_with_a_vocabulary_of_its_own_is_refused() -> None:
    module = student(folder("small", VOCAB_SIZE), folder("big", 120))
    with refuses(ValueError, "has a vocabulary of 120 and the student of 101"):
        _ = module.teacher


def test_a_teacher_with_another_tokenizer_is_refused() -> None:
    module = student(folder("small", VOCAB_SIZE, 90), folder("big", VOCAB_SIZE, 90))
    with refuses(ValueError, "has another tokenizer than the student"):
        _ = module.teacher


def test_vocabularies_that_differ_in_padding_alone_need_the_same_rows() -> None:
    path, teacher = folder("small", 120, 90), folder("big", 250)
    shutil.copy(f"{path}/tokenizer.json", teacher)
    module = student(path, teacher)
    with refuses(ValueError, "make_vocab_size_divisible_by=256"):
        _ = module.teacher
    module = student(path, teacher, make_vocab_size_divisible_by=256)
    assert module.teacher.padded_vocab_size == 256


def test_a_teacher_that_the_layout_cannot_divide_is_refused() -> None:
    module = student(folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE, num_hidden_layers=3))
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=MCoreStrategy(pipeline_model_parallel_size=2))
    module._trainer = trainer
    trainer.state.fn = TrainerFn.VALIDATING
    module.check_settings()
    trainer.state.fn = TrainerFn.FITTING
    with refuses(ValueError, "the teacher big does not fit this run"):
        module.check_settings()


def test_a_teacher_that_hybrid_context_parallelism_does_not_support_is_named() -> None:
    module = student(folder("small", VOCAB_SIZE), str(save_tiny("qwen3_next", Path("big"), vocab_size=VOCAB_SIZE)))
    strategy = MCoreStrategy(context_parallel_size=2, hybrid_context_parallel=True, micro_batch_size=1)
    module._trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy)
    module._trainer.state.fn = TrainerFn.FITTING
    with refuses(ValueError, "the teacher big does not fit this run: hybrid_context_parallel=True"):
        module.check_settings()


def test_rows_that_the_layout_cannot_split_are_refused_with_stages_too() -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    module = student(folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE))
    module._trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=MCoreStrategy(**layout))
    assert module.microbatch_shape({"tokens": torch.zeros(1, 16)}) is None
    with refuses(ValueError, "is not a multiple of 2"):
        module.microbatch_shape({"tokens": torch.zeros(1, 15)})


WRONG_PAIRS: tuple[tuple[list[int], dict[str, Any], str], ...] = (
    ([5, 2], {}, "layer 5 of the student does not exist; choose 1 to 4"),
    ([2, 0], {}, "layer 0 of the teacher does not exist; choose 1 to 8"),
    ([3, 6], {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "[3, 6]"),
)


@pytest.mark.parametrize(("pair", "transformer", "said"), WRONG_PAIRS, ids=[str(pair) for pair, *_ in WRONG_PAIRS])
def test_layers_that_cannot_be_compared_are_refused_by_run_and_plan(
    pair: list[int], transformer: dict[str, Any], said: str
) -> None:
    path, teacher = folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE, num_hidden_layers=8)
    setting: dict[str, Any] = {"teacher": teacher, "intermediate_layer_pairs": [[4, 8], pair]}
    module = MCoreDistillation.from_pretrained(path, setting, seq_length=32, transformer=transformer)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=MCoreStrategy(pipeline_model_parallel_size=2))
    module._trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    with refuses(ValueError, said):
        module.check_settings()
    asked = settings(path, teacher, pipeline_model_parallel_size=2)
    asked.model.update(distillation=setting, transformer=transformer)
    assert said in " ".join(make_plan(asked, 2).errors)


def test_a_chunk_without_layers_has_the_final_norm() -> None:
    assert chunks_of_layers([2, 2, 0]) == [0, 0, 1, 2]
    assert chunks_of_layers([2, 2, 0], multi_token=True) == [0, 0, 1, 1]


def test_hidden_states_travel_to_the_later_layer_of_their_pair() -> None:
    """Once, even if two pairs need them; pairs on one chunk stay there."""
    places = PairPlaces.of([[1, 6], [4, 1], [3, 1], [2, 2]], [2, 1, 1], [2, 2, 2], multi_token=False)
    student, teacher = (partial(StatesOf, is_teacher) for is_teacher in (False, True))
    assert [places.sent_by(chunk) for chunk in range(-1, 3)] == [
        [],
        [student(1), teacher(1)],
        [student(1), teacher(1)],
        [],
    ]
    assert [places.compared_in(chunk) for chunk in range(3)] == [[(2, 2)], [(3, 1)], [(1, 6), (4, 1)]]
    assert [places.kept_in(chunk) for chunk in range(3)] == [
        [student(1), student(2), teacher(1), teacher(2)],
        [student(3)],
        [student(4), teacher(6)],
    ]


def test_there_must_be_a_teacher() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _ = student(str(tiny_folder("llama")), "nowhere").teacher


# ---- planned


def settings(path: str, teacher: str | None, **strategy: Any) -> RunSettings:
    model: dict[str, Any] = {"path": path, "seq_length": 64}
    if teacher is not None:
        model["distillation"] = {"teacher": teacher}
    return RunSettings(model=model, strategy=strategy, trainer={"accelerator": "gpu"}, data={"batch_size": 1})


def test_a_plan_lists_a_wrong_setting() -> None:
    path = folder("small", VOCAB_SIZE)
    asked = settings(path, path)
    asked.model["distillation"]["on_policy"] = True
    assert make_plan(asked, 2).errors == ("on_policy=True is not a number; give one of 0 or more",)


def test_a_plan_counts_the_weights_and_forward_pass_of_a_teacher() -> None:
    path, teacher = folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE, num_hidden_layers=8)
    layout = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    alone, taught, big = (
        make_plan(settings(*given, **layout), 4) for given in ((path, None), (path, teacher), (teacher, None))
    )
    assert taught.errors == ()
    assert taught.parameters == alone.parameters
    for one, both, other in zip(alone.stages, taught.stages, big.stages, strict=True):
        assert both.memory.weights == one.memory.weights + other.memory.weights
        assert both.memory.optimizer == one.memory.optimizer
        assert both.memory.gradients == one.memory.gradients
    flops = [plan.work.hardware_flops for plan in (alone, taught, big) if plan.work is not None]
    assert flops[1] == pytest.approx(flops[0] + flops[2] / 3)
    assert not any("teacher" in assumption for assumption in taught.assumptions)


def test_a_plan_counts_the_activations_and_messages_of_a_teacher() -> None:
    """Messages between stages have its hidden states too; its layers reduce theirs in the forward pass only."""
    path, teacher = folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE, num_hidden_layers=8, hidden_size=128)
    layout: dict[str, Any] = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "loss_chunk_size": 32}
    alone, taught = (make_plan(settings(path, name, **layout), 4) for name in (None, teacher))
    first, other = taught.stages[0], alone.stages[0]
    more = {volume.axis: volume.sent for volume in first.traffic}
    for volume in other.traffic:
        more[volume.axis] -= volume.sent
    assert (taught.errors, alone.batch) == ((), taught.batch)
    assert alone.batch is not None
    numbers = alone.batch.num_microbatches * alone.batch.micro_batch_size * 64 * 128  # of hidden states, fp32
    assert more["pp"] == numbers * 4
    assert more["tp"] == numbers * 4 * (4 * 2 + 1)  # four layers of two all-reduces, and the embedding's
    kept = [
        both.memory.activations - one.memory.activations for one, both in zip(alone.stages, taught.stages, strict=True)
    ]
    # The last stage receives and keeps hidden states for the loss, whose chunk has the teacher's logits and three fp32
    # copies; the token loss alone has one
    assert kept == [0, 2 * 64 * 128 * 4 + 32 * 64 * (4 + (3 - 1) * 4)]


@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_a_plan_counts_hidden_states_that_are_compared(loss: str) -> None:
    path, teacher = folder("small", 1024), folder("big", 1024, num_hidden_layers=8, hidden_size=128)
    layout: dict[str, Any] = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    asked = [settings(path, teacher, **layout) for _ in range(2)]
    pairs = {"intermediate_layer_pairs": [[2, 4], [3, 6], [4, 8]], "intermediate_loss": loss}
    asked[1].model["distillation"].update(pairs)
    alone, matched = (make_plan(given, 4) for given in asked)
    assert matched.errors == ()
    assert alone.batch is not None
    assert alone.work is not None
    assert matched.work is not None
    tokens, width = 64 * alone.batch.num_microbatches, 32 * 128
    own = [stage.memory for stage in alone.stages]
    for stage, before, pairs_of_stage in zip(matched.stages, own, (1, 2), strict=True):
        assert stage.memory.weights - before.weights == pairs_of_stage * width * 4
        assert stage.memory.optimizer - before.optimizer == pairs_of_stage * width * 8
    kept = [stage.memory.activations - before.activations for stage, before in zip(matched.stages, own, strict=True)]
    states = 64 * 128 * 4 * (1 if loss == "mse" else 2)
    assert kept[1] == 2 * states  # the output layer needs more at once than a comparison
    assert states < kept[0] <= states + 3 * 64 * 128 * 4  # the teacher's, and both of a pair while they are compared
    more = matched.work.hardware_flops_of_rank[0] - alone.work.hardware_flops_of_rank[0]
    assert more == 6 * width * tokens  # on both tensor-parallel ranks
    sent = [{volume.axis: volume.sent for volume in plan.stages[0].traffic} for plan in (alone, matched)]
    assert sent[1]["pp"] - sent[0]["pp"] == tokens * 4


def test_a_plan_counts_no_teacher_whose_logits_are_stored() -> None:
    path, teacher = folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE)
    stored = Path("stored")
    stored.mkdir()
    (stored / "logits.json").write_text(json.dumps({"targets": 2, "top_k": 1}))
    weights = []
    for numbers in (5, 6):  # of two times three
        (stored / "logits.f32").write_bytes(bytes(4 * numbers))
        asked = settings(path, teacher)
        asked.model["distillation"] |= {"stored": str(stored), "top_k": 1}
        weights.append(make_plan(asked, 1).stages[0].memory.weights)
    assert weights[0] == 2 * weights[1]


@pytest.mark.parametrize("change", [{"stored": "logits", "top_k": 8}, {"on_policy": 0.5}], ids=["stored", "on_policy"])
def test_what_depends_on_answers_is_not_rehearsed(change: dict[str, Any]) -> None:
    given = settings(folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE))
    given.model["distillation"].update(change)
    with refuses(ValueError, "cannot be rehearsed"):
        build_of(given, 1, 1)


def test_a_plan_refuses_a_teacher_that_does_not_fit() -> None:
    given = folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE, num_hidden_layers=3)
    errors = " ".join(make_plan(settings(*given, pipeline_model_parallel_size=2), 2).errors)
    assert "big does not fit this run: pipeline_model_parallel_size=2" in errors


def test_a_plan_counts_hidden_states_that_travel() -> None:
    """Both ways, behind the activations: a student's 32 channels, and a teacher's 128."""
    path, teacher = folder("small", VOCAB_SIZE), folder("big", VOCAB_SIZE, num_hidden_layers=8, hidden_size=128)
    sent = []
    for pairs in ([[1, 4]], [[1, 7]], [[4, 2]], [[1, 7], [4, 2]]):
        asked = settings(path, teacher, pipeline_model_parallel_size=2)
        asked.model["distillation"].update(intermediate_layer_pairs=pairs)
        plan = make_plan(asked, 2)
        assert plan.errors == ()
        assert plan.batch is not None
        sent.append([next(v.sent for v in stage.traffic if v.axis == "pp") for stage in plan.stages])
    of_channel = 4 * 64 * plan.batch.num_microbatches * plan.batch.micro_batch_size
    more = [[(own - first) / of_channel for own, first in zip(each, sent[0], strict=True)] for each in sent]
    assert more == [[0, 0], [32, 32], [128, 128], [160, 160]]
