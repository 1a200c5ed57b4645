# SPDX-License-Identifier: Apache-2.0
"""Settings, pairs and batches of preference training: what is refused, and what a module makes of them."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCorePreference, MCorePreferenceData, MCoreStrategy, Preference
from lightning_mcore.arguments import DPOConfig, TrainingArguments, parse_arguments
from lightning_mcore.config.preference import faults_with_model
from lightning_mcore.config.rules import raise_first
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.preference.pairs import (
    Pair,
    build_pair_row,
    check_pairs,
    collate_padded_pairs,
    collate_pair_rows,
    with_last_token,
)
from lightning_mcore.strategy.logs.evaluation import num_new_samples
from tests.support.chats import characters, write
from tests.support.hf_models import save_tiny
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import make_trainer

TRANSFORMER: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def sample(length: int, prompt: int, number: int = 0, answer: int = 8) -> TokenSample:
    is_answer = np.arange(length) >= prompt
    return TokenSample(np.arange(1, length + 1) + answer * is_answer, is_answer, number)


def pair(number: int = 0, **more: Any) -> Pair:
    return Pair(sample(5 + number, 2, number), sample(7, 2, number, 20), **more)


def module(**arguments: Any) -> MCorePreference:
    return MCorePreference(32, 16, **{"transformer": TRANSFORMER, **arguments})


# ---- settings


@pytest.mark.parametrize(
    "given",
    [
        {"loss": "kto_pair"},
        {"loss": "sigmod"},
        {"loss": "dpo"},
        {"loss": "hinge", "label_smoothing": 0.1},
        {"loss": "orpo", "reference": "folder"},
        {"loss": "simpo", "precompute_reference": True},
        {"loss": "orpo", "bco_weight": 0.5},
        {"loss": "kto", "sft_weight": 0.5},
        {"simpo_gamma": 1.0},
        {"desirable_weight": 2.0},
        {"label_smoothing": 0.6},
        {"loss": "robust", "label_smoothing": 0.5},
        {"beta": 0},
        {"beta": -0.1},
        {"ld_alpha": 1.5},
        {"reference": "folder", "precompute_reference": False},
        {"betta": 0.2},
    ],
)
def test_a_setting_that_is_out_of_range_or_without_meaning_is_refused(given: dict[str, Any]) -> None:
    with refuses(ValueError, *given):
        Preference.of(given)


@pytest.mark.parametrize(
    "given",
    [
        {"beta": "0.1"},
        {"reference": 3},
        {"precompute_reference": 1},
        "sigmoid",
    ],
)
def test_a_setting_of_another_type_is_refused(given: Any) -> None:
    with refuses(TypeError):
        Preference.of(given)


def test_settings_become_plain_data_and_return() -> None:
    setting = Preference("ipo", beta=0.3, ld_alpha=0.5)
    assert Preference.of(setting.plain()) == setting
    assert module(preference=setting).hparams["preference"] == setting.plain()
    assert module(preference=setting.plain()).preference == setting


def test_dropout_and_multi_token_prediction_are_off() -> None:
    fields = {**TRANSFORMER, "hidden_dropout": 0.1, "attention_dropout": 0.2, "mtp_num_layers": 1}
    found = module(transformer=fields, lora=LoRA(lora_dropout=0.3))
    assert (found.config.hidden_dropout, found.config.attention_dropout, found.config.mtp_num_layers) == (0, 0, None)
    assert found.lora is not None
    assert found.lora.lora_dropout == 0


def test_the_work_of_a_reward_model_counts_a_score_and_no_vocabulary() -> None:
    language, reward = module(), module(preference=Preference("reward"))
    matrix = 6 * 16 * (language.padded_vocab_size - 1)  # forward, and two products backward
    assert language.flops_per_token() - reward.flops_per_token() == matrix


def test_losses_of_routers_make_the_loss_a_mean_over_microbatches() -> None:
    experts = {**TRANSFORMER, "num_moe_experts": 2, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.01}
    assert module().config.calculate_per_token_loss
    assert module(transformer={**experts, "moe_aux_loss_coeff": 0.0}).config.calculate_per_token_loss
    found = module(transformer=experts)
    assert not found.config.calculate_per_token_loss
    found.check_settings()
    with refuses(ValueError, "calculate_per_token_loss=True"):
        module(transformer={**experts, "calculate_per_token_loss": True}).check_settings()


def test_a_live_reference_needs_adapters_that_can_be_off() -> None:
    live = Preference(precompute_reference=False)
    with refuses(ValueError, "precompute_reference=False"):
        module(preference=live).check_settings()
    assert not module(preference=live, lora=LoRA()).precomputes_reference
    in_4_bits = {"quantization": "nf4"}
    for given in (
        {"preference": Preference(reference="b"), "lora": in_4_bits},
        {"lora": {**in_4_bits, "modules_to_save": ["norm"]}},
    ):
        of = module(**given)
        with refuses(ValueError, "quantization='nf4'"):
            raise_first(faults_with_model(of.preference, of.lora, of.config))
    assert module(lora=LoRA(modules_to_save=["lm_head"])).precomputes_reference
    assert module(train_only=["layers.0."]).precomputes_reference
    assert not module(preference=Preference("orpo")).precomputes_reference


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"pref_loss": "ipo"}, ValueError),
        ({"pref_loss": "orpo", "label_smoothing": 0.1}, ValueError),
        ({"label_smoothing": 0.7}, ValueError),
        ({"beta": "0.1"}, TypeError),
    ],
)
def test_what_roll_cannot_train_is_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *given):
        DPOConfig(**given)


# ---- pairs


def test_a_pair_has_two_answers_and_one_number() -> None:
    with refuses(ValueError, "the rejected answer of sample 3 has no"):
        Pair(sample(5, 2, 3), sample(5, 5, 3))
    with refuses(ValueError, "the answers of a pair have the sample_ids"):
        Pair(sample(5, 2, 3), sample(5, 2, 4))


def test_neighbours_of_a_batch_are_a_pair_padded_and_packed() -> None:
    given = [pair(number, reference=(-1.5 - number, -2.0), desirable=number == 1) for number in range(3)]
    padded = collate_padded_pairs(given, multiple=4)
    assert padded["tokens"].shape == (6, 8)
    assert padded["sample_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert padded["reference_logps"].tolist() == [-1.5, -2.0, -2.5, -2.0, -3.5, -2.0]
    assert padded["desirable"].tolist() == [False, False, True, True, False, False]
    packed = collate_pair_rows([build_pair_row(given[:2], 32), build_pair_row(given[2:], 32)])
    assert packed["sample_ids"].tolist() == [[0, 0, 1, 1], [2, 2, -1, -1]]
    assert packed["reference_logps"].tolist() == [[-1.5, -2.0, -2.5, -2.0], [-3.5, -2.0, 0.0, 0.0]]
    assert packed["desirable"].dtype == torch.bool
    for batch in (padded, packed):
        assert batch["reference_logps"].dtype == torch.float64
        check_pairs(batch, "kto")


def test_a_batch_without_pairs_is_refused() -> None:
    batch = collate_padded_pairs([pair(0), pair(1)])
    with refuses(ValueError, "a batch has 3 sequences, an odd number"):
        check_pairs({name: value[:3] for name, value in batch.items()}, "sigmoid")
    with refuses(ValueError, "sequences 2 and 3 of a batch come from"):
        check_pairs({**batch, "sample_ids": torch.tensor([0, 0, 1, 5])}, "sigmoid")
    with refuses(ValueError, "'kto'"):
        check_pairs(batch, "kto")
    with refuses(ValueError, "'desirable'"):
        check_pairs({**batch, "desirable": torch.ones(4).bool()}, "sigmoid")
    with refuses(ValueError, "has no sample_ids, which say that"):
        check_pairs({name: value for name, value in batch.items() if name != "sample_ids"}, "sigmoid")


def test_a_reward_model_refuses_pairs_whose_last_token_is_a_label_only() -> None:
    given = [pair(0), pair(1), pair(2)]
    for make in (list, lambda pairs: [with_last_token(pair) for pair in pairs]):
        padded = collate_padded_pairs(make(given), multiple=4)
        packed = collate_pair_rows([build_pair_row(make(given[:2]), 32, 4), build_pair_row(make(given[2:]), 32, 4)])
        for batch in (padded, packed):
            if make is list:
                with refuses(ValueError, "a reward model scores the last token"):
                    check_pairs(batch, "reward")
            else:
                check_pairs(batch, "reward")


@on_ranks(1)
def test_supervised_rows_are_no_pairs() -> None:
    rows = torch.randint(0, 32, (4, 9))
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    with refuses(ValueError, "a batch with tokens, labels has no sample_ids"):
        make_trainer({}).fit(module(preference=Preference("orpo")), loader(batch))


def test_a_row_for_each_answer_of_a_repeated_pair_is_cut_off() -> None:
    sampler = torch.utils.data.DistributedSampler(range(3), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(range(3), 2, sampler=sampler)  # type: ignore[arg-type]
    assert num_new_samples(loader, 0) == (1, 2)


# ---- a run


def loader(*batches: dict[str, Tensor]) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def learn(strategy: Any) -> dict[str, Tensor]:
    """Train on two pairs; return the logged values."""
    pl.seed_everything(2)
    model = module(preference=Preference("simpo", beta=2.0), recipe={"learning_rate": 0.02, "min_learning_rate": 0.02})
    trainer = make_trainer(strategy, max_epochs=12)
    trainer.fit(model, loader(collate_padded_pairs([pair(0), pair(2)])))
    return dict(trainer.callback_metrics)


def refuse_without_reference() -> None:
    with refuses(ValueError, "'sigmoid'"):
        make_trainer(MCoreStrategy()).fit(module(), loader(collate_padded_pairs([pair()])))


def refuse_to_cut_a_pair() -> None:
    with refuses(ValueError, "a microbatch has 1 rows, which cuts a pair"):
        make_trainer(MCoreStrategy(micro_batch_size=1)).fit(
            module(preference=Preference("orpo")), loader(collate_padded_pairs([pair()]))
        )


def with_bco(folder: str, epochs: int, ckpt_path: str | None = None) -> tuple[float, float]:
    """Train with BCO's term; return the last loss and the mean reward of the run."""
    pl.seed_everything(2)
    recipe = {"learning_rate": 0.01, "min_learning_rate": 0.01}
    model = module(preference=Preference(bco_weight=1.0, beta=1.0), recipe=recipe)
    trainer = make_trainer(MCoreStrategy(), max_epochs=epochs)
    batches = [collate_padded_pairs([pair(0, reference=(-9.0, -20.0)), pair(1, reference=(-12.0, -14.0))])] * 2
    trainer.fit(model, loader(*batches), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    return float(trainer.callback_metrics["train_loss"]), float(model.baseline.mean)


def of_roll(folder: str, base: str) -> float:
    """Train as ROLL's arguments say; return the loss of the only step."""
    words = f"--output_dir {folder}/roll --report_to none --use_cpu --max_steps 1 --per_device_train_batch_size 2"
    args, dpo = parse_arguments(
        [*words.split(), "--beta", "0.3", "--label_smoothing", "0.1"], TrainingArguments, DPOConfig
    )
    model = args.model(base, seq_length=64, **dpo.model_settings())
    assert isinstance(model, MCorePreference)
    assert model.preference == Preference(beta=0.3, label_smoothing=0.1)
    rows = [{"prompt": "Hi", "chosen": "yes", "rejected": answer} for answer in ("no", "maybe")]
    more = {"template": "default", "cache_dir": f"{folder}/cache"}
    data = args.data(write(Path(folder) / "rows.jsonl", rows), characters(), 64, pairs=True, overrides=more)
    assert isinstance(data, MCorePreferenceData)
    trainer = args.trainer(devices=1, enable_progress_bar=False)
    trainer.fit(model, data)
    return float(trainer.callback_metrics["train_loss"])


def runs(folder: str, base: str) -> tuple[list[dict[str, Tensor]], list[tuple[float, float]], float]:
    """Learn under two strategies; be refused; train, resume and train whole with BCO's term; train as ROLL says."""
    refuse_without_reference()
    refuse_to_cut_a_pair()
    learnt = [learn(strategy) for strategy in ("auto", MCoreStrategy())]
    bco = [with_bco(folder, 1), with_bco(folder, 2, f"{folder}/1.ckpt"), with_bco(folder, 2)]
    return learnt, bco, of_roll(folder, base)


@pytest.mark.distributed
def test_a_preference_is_learnt_under_any_strategy_and_the_mean_reward_of_bco_goes_on(tmp_path: Path) -> None:
    base = str(save_tiny("llama", tmp_path / "base", vocab_size=384))
    [(learnt, (first, resumed, whole), of_roll)] = run_ranks(1, runs, str(tmp_path), base)
    assert of_roll == pytest.approx(math.log(2), abs=1e-6)
    for values in learnt:
        assert values["rewards/accuracies"] == 1
        assert values["rewards/margins"] > 0.5
    assert resumed == whole
    assert first != whole
