# SPDX-License-Identifier: Apache-2.0
"""A step on preferences equals a plain loop over transformers with a frozen copy, on every layout, padded and packed.

The reference's log-probabilities are computed by the pass before training, on the layout of the run, from the folder of
another model. The plain loop runs in fp64, sequence by sequence, and knows nothing of padding, packing or ranks.
"""

import dataclasses
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCorePreference, MCoreStrategy, Preference, Recipe, SaveHFModel
from lightning_mcore.data.packing.best_fit import RowPart, TokenSample
from lightning_mcore.data.packing.rows import build_parts
from lightning_mcore.data.preference.pairs import (
    Pair,
    PairDataset,
    build_pair_row,
    collate_padded_pairs,
    collate_pair_rows,
    with_last_token,
)
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.interop.export import export_checkpoint
from lightning_mcore.parallel.groups import process_group
from tests.parity.hf_training import KeepsGradients, Part, differing_values, on_disk
from tests.support.hf_models import VOCAB_SIZE, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.toy import Watch, make_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("preferences"),  # they share references
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
]

LENGTH = 48
MULTIPLE = 8  # what cp4 asks of a sequence
ROWS = ((0, 1, 2), (3,))  # the pairs in packed rows
IN_PARTS = {  # by context-parallel ranks: rows, the ranks of their parts, and the pairs in these
    2: (((1, (0,)), (1, (2, 1))), ((2, (3,)),)),
    4: (((1, (2,)), (1, (1,)), (2, (3,))), ((4, (0,)),)),
}
LOSS = 1e-5

CASES = {
    "dpo": Preference(beta=0.5, label_smoothing=0.1, ld_alpha=0.4, sft_weight=0.3),
    "hinge": Preference("hinge", beta=0.3),
    "robust": Preference("robust", beta=0.3, label_smoothing=0.2, bco_weight=0.7),
    "ipo": Preference("ipo", beta=0.2),
    "orpo": Preference("orpo", beta=0.7),
    "simpo": Preference("simpo", beta=2.0, simpo_gamma=0.8),
    "kto": Preference("kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.6),
    "reward": Preference("reward", center_weight=0.05),
}
FIRST = {Preference(): math.log(2), Preference("ipo"): 1 / (4 * 0.1**2)}
"""Losses of a model that is its own reference."""
DESIRABLE = (True, False, False, True)

Form = bool | Literal["hybrid"]  # whether rows are packed, perhaps with hybrid_context_parallel
Run = tuple[str, str, Form]  # a case, a family, and the form of the rows
SCORED: tuple[Run, ...] = (("reward", "qwen2, scores", False), ("reward", "qwen2, scores", True))
DENSE: tuple[Run, ...] = (("dpo", "qwen2", False), ("dpo", "qwen2", True))
HYBRID: tuple[Run, ...] = (("dpo", "qwen2", "hybrid"), ("reward", "qwen2, scores", "hybrid"))
LAYOUTS: dict[str, dict[Layout, tuple[Run, ...]]] = {  # each name begins with the number of ranks
    "1": {
        Layout(): (
            *((case, "qwen2", False) for case in CASES if case != "reward"),
            ("orpo", "qwen2", True),
            ("kto", "qwen2", True),
            *SCORED,
        )
    },
    "2": {
        Layout(tp=2, sp=True): (*DENSE, SCORED[1]),
        Layout(pp=2): (DENSE[1], ("kto", "qwen2", False), SCORED[0]),
        Layout(cp=2): (DENSE[0], ("ipo", "qwen2", True), SCORED[0], *HYBRID),
        Layout(dp=2, distributed_optimizer=True): (DENSE[0], ("kto", "qwen2", True), SCORED[1]),
        Layout(moe=True, dp=2, ep=2): (("dpo", "qwen2_moe", True),),
    },
    "2 more": {
        Layout(tp=2, sp=True): (DENSE[0], SCORED[0]),
        Layout(pp=2): DENSE[:1],
        Layout(cp=2): (DENSE[1], ("kto", "qwen2", False), SCORED[1]),
        Layout(dp=2, distributed_optimizer=True): DENSE[1:],
        Layout(moe=True, dp=2, ep=2): (("dpo", "qwen2_moe", False),),
        Layout(tp=2): DENSE,
        Layout(pp=2, vp=2): DENSE,
        Layout(dp=2): (*DENSE, ("kto", "qwen2", False), ("kto", "qwen2", True), ("robust", "qwen2", False)),
    },
    "4": {
        Layout(tp=2, cp=2, sp=True): (*DENSE[1:], ("kto", "qwen2", False), ("orpo", "qwen2", True), SCORED[1], *HYBRID),
        Layout(pp=2, cp=2): (*DENSE[1:], *HYBRID),
        Layout(tp=2, pp=2, sp=True): (*DENSE[:1], ("kto", "qwen2", True), ("orpo", "qwen2", True), SCORED[1]),
        Layout(dp=2, cp=2): (
            *(*DENSE[1:], ("kto", "qwen2", True), ("orpo", "qwen2", False), SCORED[0]),
            *(*HYBRID, ("kto", "qwen2", "hybrid")),
        ),
    },
    "4 that share rows": {Layout(cp=4): HYBRID},
}


@functools.cache
def pairs() -> list[Pair]:
    """Return four pairs of answers of uneven lengths."""
    random = np.random.default_rng(3)
    found = []
    for number, (prompt, chosen, rejected) in enumerate(((3, 5, 9), (1, 4, 2), (6, 1, 5), (4, 11, 6))):
        start = random.integers(1, VOCAB_SIZE, prompt)
        answers = [np.concatenate([start, random.integers(1, VOCAB_SIZE, n)]) for n in (chosen, rejected)]
        found.append(Pair(*(TokenSample(t, np.arange(len(t)) >= prompt, number) for t in answers)))
    return found


# ---- the plain loop


@functools.cache
def folder_of(family: str) -> str:
    """Return the folder of the tiny model, or of one with a score layer."""
    family, _, is_scored = family.partition(", ")
    if not is_scored:
        return str(tiny_folder(family))
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tiny_folder(family), num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(4))
    folder = Path(_folders().name) / f"{family}-scores"
    model.save_pretrained(folder)
    return str(folder)


@functools.cache
def other_folder(family: str) -> str:
    """Return the folder of the reference model: the tiny model with other weights."""
    from transformers import AutoModelForCausalLM

    folder = Path(_folders().name) / family
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(family), dtype=torch.float32)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return str(folder)


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="references_")


def answer_logps(model: Any) -> Tensor:
    """Return the log-probability of each token of each answer, [pairs, 2, longest answer], 0 where there is none."""
    found = []
    for sample in (sample for pair in pairs() for sample in pair.sequences):
        tokens = torch.from_numpy(sample.tokens)[None]
        logps = model(tokens[:, :-1]).logits.double().log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]
        answer = logps[torch.from_numpy(sample.loss_mask[1:])]  # type: ignore[index]
        found.append(torch.nn.functional.pad(answer, (0, LENGTH - len(answer))))
    return torch.stack(found).view(-1, 2, LENGTH)


@dataclass(frozen=True)
class Wanted:
    """What the plain loop computes.

    Attributes:
        values: The loss and some of the logged values.
        gradients: By the name of the tensor on the disk.
    """

    values: dict[str, float]
    gradients: dict[str, Tensor]


@functools.cache
def _models(family: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    folders = (str(tiny_folder(family)), other_folder(family))
    dtype = torch.float32 if "moe" in family else torch.float64  # grouped products have no fp64
    policy, frozen = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").train()
        for folder in folders
    )
    return policy, frozen.requires_grad_(False)


@functools.cache
def plain_reward_step(family: str) -> Wanted:
    """Run a step of a reward model by transformers over all pairs."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder_of(family), dtype=torch.float64).train()
    sequences = [sample for pair in pairs() for sample in pair.sequences]
    scores = torch.stack([model(torch.from_numpy(s.tokens)[None]).logits.squeeze() for s in sequences]).view(-1, 2)
    margins = scores[:, 0] - scores[:, 1]
    loss = ((1 + torch.exp(-margins)).log() + CASES["reward"].center_weight * scores.sum(1) ** 2).mean()
    loss.backward()
    values = {"train_loss": loss, "rewards/chosen": scores[:, 0].mean(), "rewards/margins": margins.mean()}
    return Wanted(
        {name: value.item() for name, value in values.items()},
        {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None},
    )


@functools.cache
def plain_step(case: str, family: str) -> Wanted:
    """Run a step of the plain loop over all pairs."""
    if case == "reward":
        return plain_reward_step(family)
    policy, frozen = _models(family)
    policy.zero_grad()
    setting = CASES[case]
    tokens, reference = answer_logps(policy), answer_logps(frozen).sum(2)
    lengths = torch.tensor([[s.num_targets for s in pair.sequences] for pair in pairs()])
    losses, values = (of_kto if case == "kto" else of_pairs)(setting, tokens, reference, lengths)
    loss = losses.mean()
    loss.backward()
    values |= {"train_loss": loss}
    return Wanted(
        {name: float(torch.as_tensor(value).detach()) for name, value in values.items()},
        on_disk(family, dict(policy.named_parameters())),
    )


def of_pairs(setting: Preference, tokens: Tensor, reference: Tensor, lengths: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of each pair, [n], and logged values, from the log-probabilities of tokens."""
    place = torch.arange(LENGTH)
    shorter = lengths.amin(1)[:, None, None]
    weights = torch.where(place < shorter, 1.0, 1.0 if setting.ld_alpha is None else setting.ld_alpha)
    lp = (tokens * weights).sum(2)
    if setting.loss in ("ipo", "orpo", "simpo"):
        lp, reference = lp / lengths, reference / lengths
    beta, (c, r) = setting.beta, lp.unbind(1)
    rewards = beta * (lp if setting.loss in ("orpo", "simpo") else lp - reference)
    margin = rewards[:, 0] - rewards[:, 1]
    yes, no = torch.sigmoid(margin).log(), torch.sigmoid(-margin).log()
    smoothing = setting.label_smoothing
    if setting.loss == "orpo":
        odds = [torch.exp(x) / (1 - torch.exp(x)) for x in (c, r)]
        losses = -c - beta * torch.sigmoid(torch.log(odds[0] / odds[1])).log()
    else:
        losses = {
            "sigmoid": -(1 - smoothing) * yes - smoothing * no,
            "robust": ((smoothing - 1) * yes + smoothing * no) / (1 - 2 * smoothing),
            "hinge": (1 - margin).clamp(min=0),
            "ipo": (margin / beta - 0.5 / beta) ** 2,
            "simpo": -torch.sigmoid(margin - setting.simpo_gamma).log(),
        }[setting.loss]
    if setting.bco_weight:
        baseline = rewards.mean().detach()
        term = -torch.sigmoid(rewards[:, 0] - baseline).log() - torch.sigmoid(baseline - rewards[:, 1]).log()
        losses = (losses + setting.bco_weight * term) / (1 + setting.bco_weight)
    losses = losses - setting.sft_weight * (tokens * weights).sum(2)[:, 0] / lengths[:, 0]
    return losses, {
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/margins": margin.mean(),
        "rewards/accuracies": (margin > 0).double().mean(),
        "logps/chosen": c.mean(),
        "logps/rejected": r.mean(),
    }


def of_kto(setting: Preference, tokens: Tensor, reference: Tensor, lengths: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of each example, [n], and logged values; the second answer of a pair gives the KL term."""
    ratios = tokens.sum(2) - reference
    kl = ratios[:, 1].mean().detach().clamp(min=0)
    good = torch.tensor(DESIRABLE)
    value = torch.sigmoid(setting.beta * torch.where(good, ratios[:, 0] - kl, kl - ratios[:, 0]))
    weights = torch.where(good, setting.desirable_weight, setting.undesirable_weight)
    rewards = setting.beta * ratios[:, 0]
    chosen, rejected = rewards[good].mean(), rewards[~good].mean()
    values = {"kl": kl, "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    return weights * (1 - value), values


# ---- a run


class Data(pl.LightningDataModule):
    """The pairs in one global batch, packed or padded (to ``length``, or to the longest answer)."""

    def __init__(self, folder: str, packed: Form, case: str = "dpo", length: int | None = None) -> None:
        super().__init__()
        self.batches = 1
        given = pairs() if case != "reward" else [with_last_token(pair) for pair in pairs()]
        if case == "kto":
            given = [dataclasses.replace(p, desirable=good) for p, good in zip(given, DESIRABLE, strict=True)]
        self.source = PairDataset(given, folder, batch_size=3)
        self._packed, self._length = packed, length

    def pair_sources(self) -> dict[str, PairDataset]:
        return {"train": self.source}

    def train_dataloader(self) -> DataLoader[Any]:
        rank, ranks = data_parallel_place(self.trainer)
        if self._packed:
            rows: Any = IN_PARTS[process_group("cp").size()] if self._packed == "hybrid" else ROWS
            rows = rows[rank::ranks] if ranks > 1 else rows
            return DataLoader([rows], batch_size=None, collate_fn=self._pack)  # type: ignore[arg-type]
        mine = list(range(len(pairs())))[rank::ranks]
        batches = [mine, mine[::-1], mine[:1]][: self.batches]
        return DataLoader(batches, batch_size=None, collate_fn=self._pad)  # type: ignore[arg-type]

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def _pack(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        if self._packed == "hybrid":
            wide = [[RowPart(width, self.source.take(part)) for width, part in row] for row in rows]
            multiple = 2 * process_group("cp").size()
            return collate_pair_rows([build_parts(build_pair_row, row, LENGTH + 24, multiple) for row in wide])
        return collate_pair_rows([build_pair_row(self.source.take(row), LENGTH + 24, MULTIPLE) for row in rows])

    def _pad(self, chosen: Sequence[int]) -> dict[str, Tensor]:
        return collate_padded_pairs(self.source.take(chosen), MULTIPLE, self._length)


class Watched(KeepsGradients, MCorePreference):
    """Keeps finished gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


Seen = tuple[dict[str, float], list[Part]]


def first_losses(layout: Layout, folder: str, cache: str) -> list[float]:
    """Return the losses of a model that is its own reference: of DPO on padded rows, of IPO on packed ones."""
    found = []
    for setting, packed in zip(FIRST, (False, True), strict=True):
        module = MCorePreference.from_pretrained(folder, seq_length=LENGTH, preference=setting)
        trainer = make_trainer(layout.strategy_arguments, use_distributed_sampler=False)
        data = Data(cache, packed, length=LENGTH if layout.moe else None)
        [values] = trainer.validate(module, data, verbose=False)
        found.append(values["val_loss"])
    return found


def train(
    layouts: dict[Layout, tuple[Run, ...]], folders: dict[str, tuple[str, str]], cache: str
) -> list[tuple[list[Seen], list[float]]]:
    """Train one step of each run on each layout, one after the other, on this rank; and return the first losses."""
    found = []
    for layout, runs in layouts.items():
        place = f"{cache}/{layout.id}"
        seen = [_train(layout, run, *folders[run[1]], place) for run in runs]
        found.append((seen, first_losses(layout, folders[runs[0][1]][0], place)))
    return found


def _train(layout: Layout, run: Run, folder: str, other: str, cache: str) -> Seen:
    case, _, packed = run
    setting = CASES[case]
    if setting.needs_reference:
        setting = dataclasses.replace(setting, reference=other)
    module = Watched.from_pretrained(folder, seq_length=LENGTH, preference=setting)
    in_parts: dict[str, Any] = (
        {} if layout.dp > 1 or case in ("kto", "robust") else {"micro_batch_size": 1 if packed else 2}
    )
    in_parts |= {"hybrid_context_parallel": packed == "hybrid"}
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments | in_parts),
        max_steps=1,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    trainer.fit(module, Data(cache, packed, case, LENGTH if layout.moe else None))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.gradients


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, "1", "2"))
def test_a_step_on_every_layout_is_that_of_a_plain_loop_with_a_frozen_copy(name: str, tmp_path: Path) -> None:
    layouts = LAYOUTS[name]
    families = {family for runs in layouts.values() for _, family, _ in runs}
    folders = {name: (folder_of(name), other_folder(name.partition(",")[0])) for name in families}
    ranks = run_ranks(int(name[0]), train, layouts, folders, str(tmp_path), timeout=240)
    wrong: dict[str, Any] = {}
    for index, (layout, runs) in enumerate(layouts.items()):
        for number, run in enumerate(runs):
            wanted = plain_step(*run[:2])
            found = differing_values(wanted.values, wanted.gradients, [rank[index][0][number] for rank in ranks])
            if found:
                wrong[f"{layout.id} {run}"] = found
        for rank in ranks:
            assert rank[index][1] == pytest.approx([*FIRST.values()], rel=1e-6), layout.id
    assert wrong == {}


# ---- the two kinds of KTO


def kinds_apart(layout: Layout, folder: str, reference: list[list[float]], cuts: bool) -> list[dict[str, float]]:
    """Train and validate with one example in each microbatch; return what was logged in both."""
    given = [
        dataclasses.replace(pair, desirable=good, reference=tuple(logps))
        for pair, good, logps in zip(pairs(), DESIRABLE, reference, strict=True)
    ]
    parts = [given] if cuts else [[pair] for pair in given]
    batches: Any = [collate_padded_pairs(part, multiple=8) for part in parts]
    recipe = Recipe(learning_rate=0.0, min_learning_rate=0.0)
    module = MCorePreference.from_pretrained(folder, LENGTH, preference=CASES["kto"], recipe=recipe)
    data: Any = DataLoader(batches, batch_size=None)
    strategy = {**layout.strategy_arguments, "micro_batch_size": 2}
    steps = len(batches) // layout.dp
    trainer = make_trainer(strategy, max_steps=steps, log_every_n_steps=steps, limit_val_batches=0)
    trainer.fit(module, data)
    [validated] = make_trainer(strategy).validate(module, data, verbose=False)
    trained = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [trained, {name.removeprefix("val_"): value for name, value in validated.items()}]


@pytest.mark.parametrize(
    ("layout", "cuts"),
    [
        (Layout(), False),
        (Layout(pp=2), True),
        (Layout(dp=2), False),
        pytest.param(Layout(pp=2, dp=2), False, marks=pytest.mark.thorough),
        pytest.param(Layout(cp=2), True, marks=pytest.mark.thorough),
    ],
    ids=lambda value: getattr(value, "id", ""),
)
def test_the_margin_of_kto_is_that_of_all_examples_though_each_microbatch_has_one_kind(
    layout: Layout, cuts: bool
) -> None:
    policy, frozen = (answer_logps(model).sum(2).detach() for model in _models("qwen2"))
    rewards, good = CASES["kto"].beta * (policy - frozen)[:, 0], torch.tensor(DESIRABLE)
    wanted = {
        "rewards/chosen": rewards[good].mean(),
        "rewards/rejected": rewards[~good].mean(),
        "rewards/margins": rewards[good].mean() - rewards[~good].mean(),
        "logps/chosen": policy[good, 0].mean(),
        "logps/rejected": policy[~good, 0].mean(),
    }
    for rank in run_ranks(layout.world_size, kinds_apart, layout, folder_of("qwen2"), frozen.tolist(), cuts):
        for found in rank:
            assert {name: found[name] for name in wanted} == pytest.approx(
                {name: value.item() for name, value in wanted.items()}, rel=LOSS, abs=LOSS
            )


# ---- the reference of a run


def fit(folder: str, layout: Layout, cache: str, ckpt_path: str | None = None, **arguments: Any) -> list[float]:
    """Train over three batches, and keep a checkpoint after each; return the losses of the steps."""
    module = MCorePreference.from_pretrained(folder, seq_length=LENGTH, **arguments)
    keep = pl.callbacks.ModelCheckpoint(f"{cache}/kept", "{step}", save_top_k=-1, every_n_train_steps=1)
    watch = Watch()
    trainer = make_trainer(
        layout.strategy_arguments,
        use_distributed_sampler=False,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[keep, watch],
    )
    data = Data(cache, packed=False)
    data.batches = 3
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return watch.seen.logged


def runs_with_adapters(folder: str, other: str, cache: str) -> list[list[float]]:
    """Train adapters with a live reference, with one computed before, and with another model as the reference."""
    found = []
    for number, setting in enumerate(
        (Preference(), Preference(precompute_reference=True), Preference(reference=other), Preference("orpo"))
    ):
        recipe = Recipe(learning_rate=0.05, min_learning_rate=0.05)
        lora = LoRA(r=4, lora_dropout=0.5)  # which is off here
        arguments = {"preference": setting, "recipe": recipe, "lora": lora}
        pl.seed_everything(1, verbose=False)  # the same adapters
        found.append(fit(folder, Layout(pp=2), f"{cache}/{number}", **arguments))
    return found


def first_dpo_loss(family: str) -> Tensor:
    """Return the loss of DPO of the tiny model with the other one as its reference, over the first batch."""
    policy, frozen = (answer_logps(model).sum(2).detach() for model in _models(family))
    delta = (policy - frozen) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    return (1 + torch.exp(-0.1 * delta)).log().mean()


def test_adapters_that_are_off_are_the_reference_that_is_computed_before(tmp_path: Path) -> None:
    folders = str(tiny_folder("qwen2")), other_folder("qwen2")
    [live, computed, other, _], _ = run_ranks(2, runs_with_adapters, *folders, str(tmp_path), timeout=120)
    assert live[0] == pytest.approx(math.log(2), abs=1e-7)
    assert computed == pytest.approx(live, abs=1e-6)
    assert abs(live[2] - math.log(2)) > 0.01
    assert other[0] == pytest.approx(float(first_dpo_loss("qwen2")), abs=1e-6)


def interrupted_runs(folder: str, cache: str) -> tuple[list[float], list[float], list[float]]:
    """Train; again after a pass that was interrupted; resume; and be refused without the reference's file."""
    layout, setting = Layout(dp=2), Preference(beta=0.5)
    arguments = {"preference": setting, "recipe": Recipe(learning_rate=0.01, min_learning_rate=0.01)}
    whole = fit(folder, layout, cache, **arguments)
    [path] = Path(cache).glob("reference-*")
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(path.read_bytes()[: 2 * 16 + 5])
    dist.barrier()
    again = fit(folder, layout, cache, **arguments)
    kept = f"{cache}/kept/step=1.ckpt"
    resumed = fit(folder, layout, cache, kept, **arguments)
    if dist.get_rank() == 0:
        path.unlink()
    dist.barrier()
    with pytest.raises(ValueError, match=r"its weights have changed; give Preference\(reference="):
        fit(folder, layout, cache, kept, **arguments)
    return whole, again, resumed


def test_a_run_that_resumes_has_the_reference_that_it_began_with(tmp_path: Path) -> None:
    for whole, again, resumed in run_ranks(2, interrupted_runs, str(tiny_folder("qwen2")), str(tmp_path), timeout=120):
        assert whole[0] == pytest.approx(math.log(2), abs=1e-6)
        assert again == whole
        assert resumed == whole[1:]


def losses_with_one_cache(folders: list[str], cache: str) -> list[list[float]]:
    """Return the first losses of models that are their own references, one after the other."""
    return [first_losses(Layout(), folder, cache) for folder in folders]


def test_a_model_with_another_row_of_its_embedding_has_another_reference(tmp_path: Path) -> None:
    other = shutil.copytree(tiny_folder("qwen2"), tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"][5:] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    folders = [str(tiny_folder("qwen2")), str(other)]
    for losses in run_ranks(1, losses_with_one_cache, folders, str(tmp_path / "cache"), timeout=60)[0]:
        assert losses == pytest.approx(list(FIRST.values()), abs=1e-5)


def with_config(folder: Path, **changes: Any) -> str:
    """Copy a model, with changes to its config, and return the new folder."""
    other = shutil.copytree(tiny_folder("qwen2"), folder)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | changes))
    return str(other)


def test_a_model_with_another_config_has_another_reference(tmp_path: Path) -> None:
    folders = [str(tiny_folder("qwen2")), with_config(tmp_path / "other", rms_norm_eps=0.1)]
    for losses in run_ranks(1, losses_with_one_cache, folders, str(tmp_path / "cache"), timeout=60)[0]:
        assert losses == pytest.approx(list(FIRST.values()), abs=1e-5)


def refused_reference(folder: str, other: str, cache: str) -> None:
    with refuses(ValueError, "layernorm_epsilon=0.1"):
        fit(folder, Layout(tp=2), cache, preference=Preference(reference=other))


def test_a_reference_whose_config_spells_out_a_default_is_read(tmp_path: Path) -> None:
    other = with_config(tmp_path / "other", head_dim=8, use_cache=False, eos_token_id=3)
    arguments = {"preference": Preference(reference=other)}
    losses = run_ranks(1, fit, str(tiny_folder("qwen2")), Layout(), str(tmp_path / "cache"), **arguments)[0]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)


def test_a_reference_that_computes_in_another_way_is_rejected(tmp_path: Path) -> None:
    other = with_config(tmp_path / "other", rms_norm_eps=0.1)
    run_ranks(2, refused_reference, str(tiny_folder("qwen2")), other, str(tmp_path / "cache"))


def fresh_with_earlier_reference(folder: str) -> list[float]:
    """Train a fresh model, and then another one with a checkpoint of the first as its reference; return the losses."""
    fields = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    data, watch = Data(folder, packed=False), Watch()
    for reference in (None, f"{folder}/first.ckpt"):
        pl.seed_everything(1, verbose=False)  # the same weights
        recipe = Recipe(learning_rate=0.0, min_learning_rate=0.0)
        module = MCorePreference(VOCAB_SIZE, LENGTH, fields, preference=Preference(reference=reference), recipe=recipe)
        trainer = make_trainer({}, use_distributed_sampler=False, limit_val_batches=0, max_steps=1, callbacks=[watch])
        trainer.fit(module, data)
        trainer.save_checkpoint(f"{folder}/first.ckpt")
    return watch.seen.logged


def test_a_checkpoint_of_a_model_that_began_fresh_is_a_reference(tmp_path: Path) -> None:
    [losses] = run_ranks(1, fresh_with_earlier_reference, str(tmp_path))
    assert losses == pytest.approx([math.log(2)] * 2, abs=1e-6)


def first_losses_of_runs(folders: list[str], cache: str) -> list[float]:
    """Train a model twice and then another one, all with one data module; return each run's first loss."""
    data, found = Data(cache, packed=False), []
    recipe = Recipe(learning_rate=0.01, min_learning_rate=0.01)
    first, second = (MCorePreference.from_pretrained(folder, seq_length=LENGTH, recipe=recipe) for folder in folders)
    for module in (first, first, second):
        watch = Watch()
        trainer = make_trainer({}, use_distributed_sampler=False, limit_val_batches=0, max_steps=1, callbacks=[watch])
        trainer.fit(module, data)
        found.append(watch.seen.logged[0])
    return found


def test_each_run_has_the_weights_that_it_begins_with_as_its_reference(tmp_path: Path) -> None:
    folders = [str(tiny_folder("qwen2")), other_folder("qwen2")]
    [losses] = run_ranks(1, first_losses_of_runs, folders, str(tmp_path), timeout=60)
    assert losses == pytest.approx([math.log(2)] * 3, abs=1e-6)


def reward_runs(folder: str, with_value_head: str, out: str) -> list[Tensor]:
    """Train reward models from a language model, whole and with adapters, and export them; return the last scores."""
    found = []
    for name, lora in (("whole", None), ("adapters", LoRA(r=2))):
        setting = Preference("reward")
        module = MCorePreference.from_pretrained(
            folder, seq_length=LENGTH, preference=setting, lora=lora, recipe=Recipe(learning_rate=0.02)
        )
        trainer = make_trainer(
            MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True),
            use_distributed_sampler=False,
            limit_val_batches=0,
            callbacks=[SaveHFModel(f"{out}/{name}"), *([SaveHFModel(f"{out}/alone", adapter=True)] if lora else [])],
        )
        data = Data(out, packed=False, case="reward")
        trainer.fit(module, data)
        trainer.save_checkpoint(f"{out}/{name}.ckpt")
        [scores] = trainer.predict(module, data)  # type: ignore[misc]
        found.append(scores)
        with pytest.raises(ValueError, match=r"a reward model gives scores and no next tokens"):
            module.generate([1], 1)
    for path in (f"{out}/whole.ckpt", f"{out}/adapters.ckpt", with_value_head):
        module = MCorePreference.from_pretrained(path, seq_length=LENGTH, preference=setting)
        [scores] = trainer.predict(module, data)  # type: ignore[misc]
        found.append(scores)
    return found


def test_a_reward_model_begins_with_a_language_model_and_is_read_by_transformers(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    folder, factory = str(tiny_folder("qwen2")), tmp_path / "of LLaMA-Factory"
    shutil.copytree(folder, factory)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(6))
    save_file({"v_head.summary.weight": head, "v_head.summary.bias": torch.ones(1)}, factory / "value_head.safetensors")
    [whole, adapted, again, continued, of_factory], _ = run_ranks(
        2, reward_runs, folder, str(factory), str(tmp_path), timeout=120
    )
    assert torch.equal(again, whole)
    assert torch.equal(continued, adapted)
    sequences = [torch.from_numpy(sample.tokens)[None] for pair in pairs() for sample in pair.sequences]
    run_ranks(1, export_checkpoint, str(tmp_path / "adapters.ckpt"), str(tmp_path / "merged"))
    base = AutoModelForSequenceClassification.from_pretrained(tiny_folder("qwen2"), num_labels=1, dtype=torch.float64)
    models = {"alone": PeftModel.from_pretrained(base, tmp_path / "alone")}
    own = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64)
    own.score.weight.data.copy_(head)
    models["of LLaMA-Factory"] = own
    for name in ("whole", "adapters", "merged"):
        written = load_file(tmp_path / name / "value_head.safetensors")
        stored = load_file(tmp_path / name / "model.safetensors")["score.weight"]
        assert torch.equal(written["v_head.summary.weight"], stored)
        assert written["v_head.summary.bias"].tolist() == [0]
        models[name] = AutoModelForSequenceClassification.from_pretrained(tmp_path / name, dtype=torch.float64)
    for name, model in models.items():
        scores = {"whole": whole, "of LLaMA-Factory": of_factory}.get(name, adapted)
        wanted = torch.stack([model(tokens).logits.detach().squeeze() for tokens in sequences])
        torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-5)
