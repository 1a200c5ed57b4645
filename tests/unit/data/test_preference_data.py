# SPDX-License-Identifier: Apache-2.0
"""Files of preferences: rows, tokens, cuts, batches, and what is left out or refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_mcore import MCoreFinetuningData, MCoreGPT, MCorePreference, MCorePreferenceData
from lightning_mcore.data.finetuning.conversations import ConversationReader
from lightning_mcore.data.preference.pairs import Pair, check_pairs
from lightning_mcore.data.preference.rows import PARTNER, PreferenceReader
from tests.support.chats import END, characters, write
from tests.support.sentences import refuses

USER = {"role": "user", "content": "Hi"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TALK = [{"from": "human", "value": "Hi"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "Hi", "chosen": "yes", "rejected": "no"},
    {"prompt": [USER], "chosen": [said("yes")], "rejected": [said("no")]},
    {"prompt": [USER], "chosen": "yes", "rejected": "no"},
    {"prompt": "Hi", "chosen": [said("yes")], "rejected": [said("no")]},
    {"chosen": [USER, said("yes")], "rejected": [USER, said("no")]},
    {"chosen": "Hi yes", "rejected": "Hi no"},
    {"conversations": TALK, "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}},
    {"instruction": "Hi", "input": "", "chosen": "yes", "rejected": "no"},
]
TAGGED: list[dict[str, Any]] = [
    {"prompt": "Hi", "completion": "yes", "label": True},
    {"prompt": [USER], "completion": [said("yes")], "label": True},
    {"conversations": [*TALK, {"from": "gpt", "value": "yes"}], "kto_tag": True},
    {"instruction": "Hi", "output": "yes", "kto_tag": True},
]


def test_rows_of_all_forms_are_the_same_pair() -> None:
    for row in ROWS:
        found = PreferenceReader(row).messages(row, "row 0")
        assert found.prompt == [USER]
        assert [answer["content"].strip() for answer in found[1:3]] == ["yes", "no"]
        assert found.desirable is None
    for row in TAGGED:
        both = row | {PARTNER + name: value for name, value in row.items()}
        assert PreferenceReader(row).messages(both, "row 0") == ([USER], said("yes"), said("yes"), True)


def test_rows_of_all_forms_have_a_system_text() -> None:
    for row in [*ROWS, *TAGGED]:
        told = row | {"system": "Be brief."}
        found = PreferenceReader(told).messages(told | {PARTNER + name: value for name, value in told.items()}, "row 0")
        assert found.prompt == [{"role": "system", "content": "Be brief."}, USER]


def test_rows_of_alpaca_have_a_system_text_and_earlier_exchanges() -> None:
    before = {"system": "Be brief.", "history": [["One?", "1"], ["Two?", "2"]]}
    system = {"role": "system", "content": "Be brief."}
    talk = [{"role": "user", "content": "One?"}, said("1"), {"role": "user", "content": "Two?"}, said("2"), USER]
    for row in (ROWS[-1], TAGGED[-1]):
        partner = {PARTNER + name: value for name, value in row.items()}
        found = PreferenceReader([*row, *before]).messages(row | before | partner, "row 0")
        assert found.prompt == [system, *talk]
        assert found.chosen == said("yes")
        none = {"system": "", "history": None}
        assert PreferenceReader([*row, *none]).messages(row | none | partner, "row 0").prompt == [USER]


@pytest.mark.parametrize(
    "row",
    [
        {**ROWS[-1], "system": 3},
        {**ROWS[-1], "history": "One?"},
        {**ROWS[-1], "history": [["One?"]]},
        {"prompt": "Hi", "answer": "x"},
        {**TAGGED[0], "label": 1},
        {**ROWS[0], "chosen": 3},
        {**ROWS[1], "prompt": [{"role": "judge", "content": "x"}]},
    ],
)
def test_a_row_that_cannot_be_read_is_one_sentence(row: dict[str, Any]) -> None:
    both = row | {PARTNER + name: value for name, value in row.items()}
    with refuses((ValueError, TypeError)):
        PreferenceReader(row).messages(both, "row 0")


def test_preferences_are_refused_where_single_answers_are_read() -> None:
    with refuses(ValueError, "hold preferences, but this data module"):
        ConversationReader(["prompt", "chosen", "rejected"])


def opened(folder: Path, rows: list[dict[str, Any]], **options: Any) -> MCorePreferenceData:
    """Return the data of a file, ready to be asked for pairs."""
    values: dict[str, Any] = {"seq_length": 256, "cache_dir": str(folder / "cache"), "template": "default", **options}
    module = MCorePreferenceData(write(folder / "rows.jsonl", rows), characters(), **values)
    module.prepare_data()
    module.setup("fit")
    return module


def pairs(module: MCorePreferenceData) -> list[Pair]:
    source = module.pair_sources()["train"]
    return source.take(list(range(len(source))))


def halves(module: MCorePreferenceData) -> list[tuple[str, str, str, str]]:
    """Return prompt and learnt answer of both sequences of each pair, as text."""
    decode = module.tokenizer.decode
    found = []
    for pair in pairs(module):
        parts = [decode(s.tokens[s.loss_mask == learnt]) for s in pair.sequences for learnt in (False, True)]
        found.append((parts[0], parts[1], parts[2], parts[3]))
    return found


def test_rows_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    rows = [
        {"prompt": [USER], "chosen": [said("yes")], "rejected": [said("no")]},
        {"prompt": [USER, said("Ho")], "chosen": [said("yes")], "rejected": [said("no")]},  # an even number
        {"prompt": [USER], "chosen": [said("  ")], "rejected": [said("no")]},
        {"prompt": [USER], "chosen": [said("yes")], "rejected": [said("yes")]},
        {"prompt": [USER], "chosen": [said("aaaaaaab")], "rejected": [said("aaaaaaac")]},  # equal once they are cut
    ]
    monkeypatch.setattr("lightning_mcore.data.finetuning.datamodule.rank_zero_info", lines.append)
    module = opened(tmp_path, rows, seq_length=12, overlong="cut")
    text = "\n".join(lines)
    assert "train data: 1 of 5 pairs, 2" in text
    for reason in ("1 whose turns are not", "1 without an answer", "2 with equal answers"):
        assert f"left out {reason}" in text
    assert len(pairs(module)) == 1
    with refuses(ValueError, "has no pair to learn from (0 of 1 pairs"):
        opened(tmp_path / "none", rows[2:3])
    with refuses(ValueError, "have a sequence of more than 12 tokens"):
        opened(tmp_path / "long", rows[:1], seq_length=12)
    with refuses(ValueError, "overlong='split'"):
        opened(tmp_path, rows, overlong="split")


def test_packed_rows_hold_the_pairs_of_padded_ones(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "chosen": "a" * (n % 5 + 1), "rejected": "b" * (n % 3 + 1)} for n in range(12)]
    padded, packed = opened(tmp_path, rows, batch_size=3), opened(tmp_path, rows, packing=True, batch_size=2)
    for module, sequences in ((padded, 6), (packed, None)):
        batch = next(iter(module.train_dataloader()))
        check_pairs(batch, "sigmoid")
        assert sequences in (None, len(batch["tokens"]))
    rows_of: Any = packed._opened("train")
    seen = [rows_of[number]["sample_ids"].tolist() for number in range(len(rows_of))]
    assert sorted(number for ids in seen for number in ids) == sorted([*range(12), *range(12)])
    assert all(ids[::2] == ids[1::2] for ids in seen)
    assert halves(packed) == halves(padded)
    assert halves(padded)[4] == (
        f"Human: q4{END}\nAssistant:",
        f"aaaaa{END}\n",
        f"Human: q4{END}\nAssistant:",
        f"bb{END}\n",
    )
    source = padded.pair_sources()["train"]
    source.reference = np.arange(24.0).reshape(12, 2)
    assert source[4].reference == (8.0, 9.0)
    assert source.key == opened(tmp_path, rows).pair_sources()["train"].key
    assert source.key != opened(tmp_path, rows, template="vicuna").pair_sources()["train"].key


def test_the_tokenizers_own_template_writes_the_turns(tmp_path: Path) -> None:
    [found] = halves(opened(tmp_path, ROWS[:1], template=None))
    assert found == ("<|user|>Hi<|end|>\n<|assistant|>", "yes<|end|>", "<|user|>Hi<|end|>\n<|assistant|>", "no<|end|>")


def test_the_partner_of_kto_has_the_answer_of_the_row_before(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "completion": f"a{n}" if n != 2 else "", "label": n % 2 == 0} for n in range(5)]
    module = opened(tmp_path, rows)
    found = pairs(module)
    assert [pair.desirable for pair in found] == [True, False, True]
    assert [text[3] for text in halves(module)] == [f"a{n}{END}\n" for n in (4, 0, 3)]
    assert [text[2] for text in halves(module)] == [f"Human: q{n}{END}\nAssistant:" for n in (0, 1, 4)]
    counts = module.pair_sources()["train"].counts()
    assert counts == "3 of 5 pairs; left out 1 without an answer; left out 1 whose partner has no answer"
    check_pairs(next(iter(module.train_dataloader())), "kto")


def test_a_module_that_learns_from_other_data_is_refused(tmp_path: Path) -> None:
    pairs, tagged = opened(tmp_path / "pairs", ROWS[:1]), opened(tmp_path / "tagged", TAGGED[:1])
    answers = MCoreFinetuningData("rows.jsonl", characters(), 64)
    transformer = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    dpo, kto = (MCorePreference(384, 16, transformer, preference={"loss": loss}) for loss in ("sigmoid", "kto"))
    for data, module in ((pairs, MCoreGPT(384, 16, transformer)), (answers, dpo), (pairs, kto), (tagged, dpo)):
        trainer: Any = SimpleNamespace(lightning_module=module, strategy=None)
        data.trainer = trainer
        with refuses(ValueError):
            data.setup("fit")
