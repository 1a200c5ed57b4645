# SPDX-License-Identifier: Apache-2.0
"""MCoreGPT at work: it learns, logs, predicts and generates, alike under every strategy and on every layout."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_mcore import LoRA, MCoreGPT, Recipe, single_process
from lightning_mcore.hf import find_family
from lightning_mcore.hf.family import split_fields
from lightning_mcore.hf.source import complete_config
from tests.support.hf_models import CONFIGS, MORE_CONFIGS
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import CP2, PP2, Memory, make_trainer

VOCAB_SIZE = 40
PERIOD = VOCAB_SIZE  # samples after which the texts are the same again
SEQ_LENGTH = 16
STEPS = 40
PROMPT = [3, 4, 5, 6]

TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_token_dispatcher_type": "alltoall"}


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count upwards; with ``masked`` a growing prefix of each is left out of the loss."""

    def __init__(self, masked: bool = False) -> None:
        self.masked = masked

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)  # what ends a for loop over the samples
        text = (torch.arange(SEQ_LENGTH + 1) + 7 * index) % VOCAB_SIZE
        item = {"tokens": text[:-1], "labels": text[1:]}
        if self.masked:
            item["loss_mask"] = (torch.arange(SEQ_LENGTH) >= index % SEQ_LENGTH).float()
        return item


class StepMemory(Memory):
    """Keeps what Lightning sends to loggers, and knows what came of an optimizer step."""

    def steps(self) -> list[dict[str, float]]:
        """What was logged at each optimizer step."""
        return [row for row in self.rows if "grad_norm" in row]


class Generate(pl.Callback):
    """Generates when training ends, and asks ``predict_step`` about the same text."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.predicted: list[int] = []
        self.sampled: list[int] = []
        self.modes_restored = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        modes = [child.training for child in pl_module.modules()]
        self.text = pl_module.generate(PROMPT, 5, temperature=0)
        self.sampled = pl_module.generate(PROMPT, 4, temperature=2.0, top_k=20, seed=1)
        whole = torch.tensor([self.text + [0] * (SEQ_LENGTH - len(self.text))])
        self.predicted = pl_module.run_forward("predict_step", {"tokens": whole})[0].tolist()
        self.modes_restored = modes == [child.training for child in pl_module.modules()]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How to train the tiny GPT."""

    strategy: str = "mcore"
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    transformer: dict[str, Any] = field(default_factory=dict)
    precision: Any = "32-true"
    accumulate: int = 1
    masked: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return STEPS if self.learns_slowly else 28

    @property
    def learns_slowly(self) -> bool:
        """Whether not every token counts, or the model is another one."""
        return self.masked or bool(self.model)


def train(run: Run, folder: str) -> dict[str, Any]:
    """Fit, predict with the result, and tell what happened."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    memory, generate = StepMemory(), Generate()
    trainer = make_trainer(
        run.layout if run.strategy == "mcore" else run.strategy,
        precision=run.precision,
        max_steps=run.steps,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        limit_val_batches=3,
        limit_test_batches=5,
        val_check_interval=20,
        num_sanity_val_steps=1,
        callbacks=[generate],
        logger=memory,
        default_root_dir=folder,
    )
    module = MCoreGPT(
        vocab_size=VOCAB_SIZE,
        seq_length=SEQ_LENGTH,
        transformer={**TRANSFORMER, **run.transformer},
        make_vocab_size_divisible_by=16,
        recipe=Recipe(learning_rate=1e-2, warmup_steps=2),
        **run.model,
    )
    data = DataLoader(Counting(run.masked), batch_size=2)
    trainer.fit(module, data, data)
    val_loss = float(trainer.callback_metrics["val_loss"])
    result = {"steps": memory.steps(), "text": generate.text, "predicted": generate.predicted}
    result |= {"sampled": generate.sampled, "modes_restored": generate.modes_restored}
    trainer.test(module, data, verbose=False)
    test_loss = float(trainer.callback_metrics["test_loss"])
    period = Subset(Counting(), range(PERIOD))
    predictions = trainer.predict(module, DataLoader(period, batch_size=4))
    assert predictions is not None
    labels = torch.stack([sample["labels"] for sample in period])
    accuracy = float((torch.cat(predictions) == labels).float().mean())
    return {**result, "val_loss": val_loss, "test_loss": test_loss, "accuracy": accuracy}


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LEARNED = {"position_embedding_type": "learned_absolute"}

AVERAGED = {**EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "calculate_per_token_loss": False}
AUXILIARY = {**EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "mtp_num_layers": 1}

ONE_RANK: dict[str, Run] = {
    "mcore-accumulate": Run(accumulate=2),
    "mcore-two-tokens-ahead": Run(transformer={"mtp_num_layers": 1}),
}
AS_LIGHTNING: dict[str, Run] = {  # on one rank, under "auto" and under ours
    "all": Run(),
    "masked": Run(masked=True),
    "losses-of-layers": Run(accumulate=2, transformer=AUXILIARY),
    "losses-of-layers-in-a-short-window": Run(accumulate=3, transformer=AVERAGED),
}
TWO_RANKS: dict[str, Run] = {
    "ddp": Run(strategy="ddp"),
    "dp2-bf16": Run(precision="bf16-mixed", layout={"use_distributed_optimizer": True}),
    "tp2-sp": Run(layout=TP2),
    "pp2": Run(layout=PP2),
    "pp2-learned-tied": Run(layout=PP2, model={**LEARNED, "share_embeddings_and_output_weights": True}),
    "pp2-two-tokens-ahead": Run(layout=PP2, transformer={"mtp_num_layers": 1}),
    "ep2": Run(layout={"expert_model_parallel_size": 2}, transformer=EXPERTS),
}
HALVES: dict[str, Run] = {  # on two ranks, and on one
    "cp2": Run(layout=CP2),
    "cp2-learned-masked": Run(layout=CP2, model=LEARNED, masked=True),
    "cp2-mean-of-means": Run(layout=CP2, masked=True, transformer={"calculate_per_token_loss": False}),
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank_learns_logs_and_generates(name: str, tmp_path: Any) -> None:
    train_alone(ONE_RANK[name], str(tmp_path))


@pytest.mark.parametrize("name", thorough_but(TWO_RANKS, *TWO_RANKS.keys() - {"pp2", "ep2"}))
def test_two_ranks_learn_log_and_generate_alike(name: str, tmp_path: Any) -> None:
    train_alike(TWO_RANKS[name], str(tmp_path))


@pytest.mark.parametrize("name", thorough_but(HALVES, "cp2-learned-masked"))
def test_half_a_sequence_on_each_of_two_ranks_learns_as_the_whole_on_one(name: str, tmp_path: Any) -> None:
    run = HALVES[name]
    whole = train_alone(replace(run, layout={}), str(tmp_path))
    halves = train_alike(run, str(tmp_path))
    for metric in ("train_loss", "grad_norm"):
        expected, ours = ([step[metric] for step in result["steps"][:10]] for result in (whole, halves))
        assert ours == pytest.approx(expected, rel=1e-5)  # measured: 3e-6


@pytest.mark.parametrize(
    "name", thorough_but(AS_LIGHTNING, *AS_LIGHTNING.keys() - {"all", "losses-of-layers-in-a-short-window"})
)
def test_one_rank_of_ours_learns_as_lightning_does(name: str, tmp_path: Any) -> None:
    run = AS_LIGHTNING[name]
    runs = [train_alone(replace(run, strategy=strategy), str(tmp_path)) for strategy in ("auto", "mcore")]
    for metric in ("train_loss", "grad_norm") if run.accumulate == 1 else ("grad_norm",):  # Lightning logs the last one
        lightning, ours = ([step[metric] for step in result["steps"]] for result in runs)
        assert ours == pytest.approx(lightning, rel=5e-5)  # measured: 6e-6
    assert runs[0]["text"] == runs[1]["text"]


def train_alone(run: Run, folder: str) -> dict[str, Any]:
    """Train on one rank, check what holds of every run, and return the result."""
    [result] = run_ranks(1, train, run, folder, open_group=run.strategy != "auto")
    check(result, run)
    return result


def train_alike(run: Run, folder: str) -> dict[str, Any]:
    """Train on two ranks, check each and that they have the same, and return the result of the first."""
    results = run_ranks(2, train, run, folder, timeout=120)
    for result in results:
        check(result, run)
        assert (result["text"], result["sampled"]) == (results[0]["text"], results[0]["sampled"])
        for metric in ("accuracy", "val_loss", "test_loss"):
            assert result[metric] == results[0][metric], metric
        assert result["steps"][-1]["train_loss"] == results[0]["steps"][-1]["train_loss"]
        assert result["steps"][-1]["grad_norm"] == results[0]["steps"][-1]["grad_norm"]
    return results[0]


def check(result: dict[str, Any], run: Run) -> None:
    """What holds of every run: the counting is learned, everything is logged, text is generated."""
    losses = [step["train_loss"] for step in result["steps"]]
    assert len(losses) == run.steps
    assert losses[-1] < 0.5 * losses[0]
    assert all(step["grad_norm"] > 0 for step in result["steps"])
    assert all(step["tokens_per_second"] > 0 and step["model_tflops"] > 0 for step in result["steps"])
    assert 0 < result["test_loss"] < losses[0]
    assert 0 < result["val_loss"] < losses[0]
    assert result["text"][: len(PROMPT)] == PROMPT
    assert result["text"][len(PROMPT) :] == result["predicted"][len(PROMPT) - 1 :][:5]
    assert len(result["sampled"]) == len(PROMPT) + 4
    assert all(0 <= token < VOCAB_SIZE for token in result["sampled"])
    assert result["modes_restored"]
    if not run.learns_slowly:
        assert result["accuracy"] > 0.7
        assert result["text"] == list(range(3, 12))


# ---- overlap_param_gather


def uncalled(texts: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, list[str]]:
    """Return for each model the modules that own trained parameters and are not called in a forward pass."""
    found = {}
    tokens = torch.randint(0, 64, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    for name, arguments, fields in texts:
        with single_process():
            module = MCoreGPT(seq_length=SEQ_LENGTH, transformer=fields, **arguments)
            module.configure_model()
            called: set[nn.Module] = set()
            for child in module.model.modules():
                child.register_forward_pre_hook(lambda child, inputs, called=called: called.add(child))
            module.model(tokens, positions, None, labels=tokens)
        owners = [
            (path, child)
            for path, child in module.model.named_modules()
            if any(parameter.requires_grad for parameter in child.parameters(recurse=False))
        ]
        found[name] = [path for path, child in owners if child not in called]
        assert owners
    return found


def models_of_every_kind() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return the name, the arguments and the fields of a model of each family, and what no family has."""
    models = []
    for family, content in (CONFIGS | MORE_CONFIGS).items():
        read = find_family(family)
        config = complete_config(read, {"model_type": family, **copy.deepcopy(content)})
        arguments, fields = split_fields(read.read_config(config))
        models.append((family, arguments, fields))
    for name, fields in {
        "multi-token": {"mtp_num_layers": 1},
        "sinks": {"softmax_type": "learnable"},
        "experts": EXPERTS | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True},
        "biases": {"add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False},
    }.items():
        models.append((name, {"vocab_size": 64}, TRANSFORMER | fields))
    adapters = LoRA(target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"])
    return [*models, ("adapters", {"vocab_size": 64, "lora": adapters}, TRANSFORMER)]


def test_every_module_with_trained_parameters_is_called() -> None:
    models = models_of_every_kind()
    (found,) = run_ranks(1, uncalled, models, open_group=False, timeout=120)
    assert found == {name: [] for name, *_ in models}
