# SPDX-License-Identifier: Apache-2.0
"""Stages dpo, kto and rm of a LLaMA-Factory file: its keys as settings, and its rows as pairs, row by row."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_mcore import Preference
from lightning_mcore.arguments.llamafactory.datasets import read_datasets
from lightning_mcore.arguments.llamafactory.pairs import FactoryPairReading, FactoryPairs
from lightning_mcore.arguments.llamafactory.run import read_run
from lightning_mcore.data.finetuning.chat import named_template
from tests.support.chats import characters, write
from tests.support.factory_files import LLAMA3, write_run
from tests.support.sentences import refuses

CUTOFF = 60
SYSTEM = "Be brief."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["stage=dpo"], Preference("sigmoid")),
        (["stage=dpo", "pref_loss=ipo", "pref_beta=0.3", "pref_bco_weight=2"], Preference("ipo", 0.3, bco_weight=2)),
        (["stage=dpo", "dpo_label_smoothing=0.1", "pref_ftx=1"], Preference(label_smoothing=0.1, sft_weight=1)),
        (
            ["stage=dpo", "pref_loss=simpo", "simpo_gamma=1", "ld_alpha=0.5"],
            Preference("simpo", simpo_gamma=1, ld_alpha=0.5),
        ),
        (["stage=dpo", "pref_loss=hinge", "ref_model=a"], Preference("hinge", reference="a")),
        (["stage=dpo", "pref_loss=orpo"], Preference("orpo")),
        (
            ["stage=kto", "dataset=kto_en_demo", "kto_chosen_weight=2", "kto_rejected_weight=3"],
            Preference("kto", desirable_weight=2, undesirable_weight=3),
        ),
        (["stage=rm"], Preference("reward")),
    ],
)
def test_keys_become_settings(file: str, words: list[str], expected: Preference) -> None:
    asked = read_run(file, words)
    assert Preference.of(asked.settings().model["preference"]) == expected
    assert asked.settings().data["batch_size"] == 2 * asked.data_settings()["batch_size"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("dpo"), {**LLAMA3, "dataset": "dpo_en_demo"})


# ---- rows: what LLaMA-Factory documents, written once more for one template


def tokens(text: str) -> list[int]:
    found: list[int] = characters()(text, add_special_tokens=False)["input_ids"]
    return found


END = characters().eos_token_id


def asked(history: list[tuple[str, str]], question: str, system: str) -> list[int]:
    """Return the prompt under vicuna's template: the system text, earlier exchanges, the question."""
    found = tokens(system)
    for before, answer in history:
        found += [*tokens(f"USER: {before} ASSISTANT:"), *tokens(answer), END]
    return found + tokens(f"USER: {question} ASSISTANT:")


def cut(prompt: list[int], answers: list[list[int]], room: int) -> list[tuple[list[int], list[int]]]:
    """Return prompt and answer of each sequence; the longest answer decides for all."""
    source, target = len(prompt), max(map(len, answers))
    if target < room / 2:
        most = room  # the prompt is cut
    elif source < room / 2:
        most = room - source  # the answers are cut
    else:
        most = room * target // (source + target)  # both, in proportion
    most = min(most, target)
    return [(prompt[: room - most], answer[:most]) for answer in answers]


def data(
    folder: Path, rows: list[dict[str, Any]], says: dict[str, Any], name: str = "vicuna", **more: Any
) -> FactoryPairs:
    write(folder / "rows.jsonl", rows)
    (folder / "dataset_info.json").write_text(json.dumps({"d": {"file_name": "rows.jsonl", **says}}))
    [entry] = read_datasets("d", str(folder))
    template = named_template(name)
    reading = FactoryPairReading(loss_on="last_assistant", template=template, entry=entry, **more)
    module = FactoryPairs([reading], characters(), CUTOFF, cache_dir=str(folder / "cache"))
    module.prepare_data()
    module.setup("fit")
    return module


def check(module: FactoryPairs, expected: list[list[tuple[list[int], list[int]]]]) -> None:
    source = module.pair_sources()["train"]
    assert len(source) == len(expected)
    for pair, wanted in zip(source.take(range(len(source))), expected, strict=True):
        for sample, (prompt, answer) in zip(pair.sequences, wanted, strict=True):
            assert sample.tokens.tolist() == prompt + answer
            assert sample.loss_mask is not None
            assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)


def words(draw: random.Random, most: int = 40) -> str:
    return "".join(draw.choice("abcdef") for _ in range(draw.randint(1, most)))


def test_rows_of_pairs_are_cut_as_llamafactory_cuts_them(tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = [[words(draw) for _ in range(5)] for _ in range(30)]
    alpaca = [
        {"p": p, "q": q, "c": c, "r": r, "s": SYSTEM if len(h) % 2 else "", "h": [[h, "ho"]]} for p, q, c, r, h in texts
    ]
    names = {"prompt": "p", "query": "q", "chosen": "c", "rejected": "r", "system": "s", "history": "h"}
    default = named_template("vicuna").default_system
    system = [SYSTEM if len(h) % 2 else default for *_, h in texts]
    expected = [
        cut(asked([(h, "ho")], f"{p}\n{q}", s), [[*tokens(c), END], [*tokens(r), END]], CUTOFF + 1)
        for (p, q, c, r, h), s in zip(texts, system, strict=True)
    ]
    check(data(tmp_path / "1", alpaca, {"ranking": True, "columns": names}), expected)
    shared = [
        {
            "m": [
                *([{"from": "system", "value": SYSTEM}] if len(h) % 2 else []),
                {"from": "human", "value": h},
                {"from": "gpt", "value": "ho"},
                {"from": "human", "value": f"{p}\n{q}"},
            ],
            "c": {"from": "gpt", "value": c},
            "r": {"from": "gpt", "value": r},
        }
        for p, q, c, r, h in texts
    ]
    says = {"ranking": True, "formatting": "sharegpt", "columns": {"messages": "m", "chosen": "c", "rejected": "r"}}
    broken = [{**shared[0], "m": shared[0]["m"][:-1]}, {**shared[0], "c": {"from": "human", "value": "x"}}]
    module = data(tmp_path / "2", [*shared, *broken], says)
    check(module, expected)
    counts = module.pair_sources()["train"].counts()
    assert (
        counts == "30 of 32 pairs; left out 2 whose turns are not those of user and assistant in turn, with one answer"
    )
    with refuses(TypeError, "is of type str; give one message"):
        data(tmp_path / "3", [{**row, "c": "text"} for row in shared], says)


def test_a_template_with_one_eos_writes_it_behind_the_answers_of_a_long_conversation(tmp_path: Path) -> None:
    row = {"q": "a", "c": "bc", "r": "d", "h": [["e", "f"], ["g", ""]]}
    columns = {"prompt": "q", "chosen": "c", "rejected": "r", "history": "h"}
    module = data(tmp_path, [row], {"ranking": True, "columns": columns}, "glm4")
    before = (
        "[gMASK]<sop>",
        "<|user|>\ne<|assistant|>",
        "\nf",
        "<|user|>\ng<|assistant|>",
        "\n",
        "<|user|>\na<|assistant|>",
    )
    prompt = [token for piece in before for token in tokens(piece)]
    check(module, [cut(prompt, [[*tokens("\nbc"), END], [*tokens("\nd"), END]], CUTOFF + 1)])


def test_rows_of_tagged_answers_have_partners_in_blocks(tmp_path: Path) -> None:
    draw = random.Random(4)
    texts = [(words(draw), words(draw), draw.random() < 0.5) for _ in range(17)]
    rows = [{"instruction": q, "input": None, "output": a, "tag": tag} for q, a, tag in texts]
    columns = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "tag"}
    module = data(tmp_path, rows, {"columns": columns}, block=7)
    default = named_template("vicuna").default_system
    answers = [[*tokens(answer), END] for _, answer, _ in texts]
    partner = np.concatenate([np.roll(np.arange(start, min(start + 7, 17)), 1) for start in (0, 7, 14)])
    expected = []
    for number, (question, _, _) in enumerate(texts):
        prompt = asked([], question, default)
        each = [cut(prompt, [answers[n]], CUTOFF + 1)[0] for n in (number, partner[number])]
        expected.append(each)
    check(module, expected)
    pairs = module.pair_sources()["train"]
    assert [pair.desirable for pair in pairs.take(range(17))] == [tag for *_, tag in texts]
