# SPDX-License-Identifier: Apache-2.0
"""Experts: what their routers log, how much their losses weigh, what is counted, and what is refused."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from lightning_mcore import MCoreGPT, MCoreStrategy
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.strategy.logs.auxiliary import layers_with_experts, router_losses
from tests.parity import bare_loop, lightning_loop
from tests.parity.global_tensors import assemble, spread
from tests.support import tiny, toy
from tests.support.hf_models import tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import RanksFailedError, on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.tiny import Recipe

pytestmark = pytest.mark.distributed

LOSSES = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.01, 0.01),
    "moe_z_loss_coeff": 0.01,
    "moe_layer_freq": (0, 0, 1, 1),
    "moe_per_layer_logging": True,
}
RECIPE = Recipe(steps=2, global_batch_size=4, micro_batch_size=2, mask="full", options=tuple(LOSSES.items()))
ONE = Layout(moe=True)
LAYOUTS = (
    Layout(moe=True, tp=2, sp=True),
    Layout(moe=True, cp=2),
    Layout(moe=True, dp=2, ep=2),
    Layout(moe=True, pp=2),
)


class Logging(lightning_loop.TinyGPT):
    """Keeps what is logged in each step; on one rank also computes it, from what the routers see."""

    def __init__(self, layout: Layout, recipe: Recipe) -> None:
        super().__init__(layout, recipe)
        self.logged: list[dict[str, float]] = []
        self.computed: list[dict[str, float]] = []
        self.seen: list[dict[str, float]] = []

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.layout.world_size == 1:
            for router in _routers(self):
                router.register_forward_hook(self._see)

    def _see(self, router: TopKRouter, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        logits = (inputs[0] @ router.weight.T).detach().double()  # [s, b, experts]
        chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2).indices, 1.0)
        weights = logits.softmax(-1)
        experts = logits.size(-1)
        whole = experts * (chosen.mean((0, 1)) / 2 * weights.mean((0, 1))).sum()
        each = experts * (chosen.mean(0) / 2 * weights.mean(0)).sum(-1).mean()
        layer = router.layer_number - 1
        self.seen.append(
            {
                f"moe/load_balancing_loss_layer_{layer}": whole.item(),
                f"moe/seq_load_balancing_loss_layer_{layer}": each.item(),
                f"moe/z_loss_layer_{layer}": logits.logsumexp(-1).square().mean().item(),
            }
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            metrics = self.trainer.callback_metrics
            self.logged.append({name: value.item() for name, value in metrics.items() if "loss" in name})
            names = {name for seen in self.seen for name in seen}
            self.computed.append({name: _mean(seen[name] for seen in self.seen if name in seen) for name in names})
            self.seen = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = self.model(**tiny.model_arguments(batch, self.config))
        self.log("val_loss", losses.mean())

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _routers(module: torch.nn.Module) -> list[TopKRouter]:
    return [child for child in module.modules() if isinstance(child, TopKRouter)]


def _logged(layout: Layout, recipe: Recipe) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    module = Logging(layout, recipe)
    strategy = MCoreStrategy(**layout.strategy_arguments)
    trainer = lightning_loop.make_trainer(layout.world_size, strategy, recipe.num_microbatches(layout))
    trainer.fit(module)
    return module.logged, module.computed


def _logged_on(layouts: list[Layout], recipe: Recipe) -> list[list[dict[str, float]]]:
    return [_logged(layout, recipe)[0] for layout in layouts]


def test_losses_of_routers_are_logged_on_every_rank_of_every_layout() -> None:
    ((logged, computed),) = run_ranks(1, _logged, ONE, RECIPE, timeout=120)
    for step, (values, wanted) in enumerate(zip(logged, computed, strict=True)):
        for name, value in wanted.items():
            assert values[name] == pytest.approx(value, rel=1e-5), f"{name} in step {step}"
        for kind in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss"):
            layers = {name: value for name, value in wanted.items() if name.startswith(f"moe/{kind}_layer_")}
            assert sorted(layers) == [f"moe/{kind}_layer_2", f"moe/{kind}_layer_3"]
            assert values[kind] == pytest.approx(_mean(layers.values()), rel=1e-5)
    assert logged[0] != logged[1]
    for rank in run_ranks(2, _logged_on, list(LAYOUTS), RECIPE, timeout=240):
        for _, values in zip(LAYOUTS, rank, strict=True):
            for step in range(RECIPE.steps):
                names = [name for name in logged[step] if name != "val_loss"]
                assert {n: values[step][n] for n in names} == pytest.approx(
                    {n: logged[step][n] for n in names}, rel=1e-4
                )


def _gradients(layout: Layout, recipe: Recipe) -> list[Any]:
    return bare_loop.train(layout, recipe, keep_gradients=True).gradients[0]


@pytest.mark.parametrize("token_weighted", [False, True])
def test_the_loss_over_all_model_copies_weighs_the_same_however_many_there_are(token_weighted: bool) -> None:
    options = (("moe_router_load_balancing_type", "global_aux_loss"),)
    recipe = Recipe(steps=1, global_batch_size=2, aux_loss=0.1, mask="full", options=options)
    recipe = replace(recipe, token_weighted=token_weighted)
    (one,) = run_ranks(1, _gradients, ONE, replace(recipe, micro_batch_size=2), timeout=120)
    whole = assemble(one)
    without = assemble(run_ranks(1, _gradients, ONE, replace(recipe, micro_batch_size=2, aux_loss=0.0), timeout=120)[0])
    key = "decoder.layers.mlp.router.weight"
    assert (whole[key] - without[key]).abs().max() > 0.05 * whole[key].abs().max()
    ranks = run_ranks(2, _gradients, Layout(moe=True, dp=2), recipe, timeout=120)
    assert max(spread([part for rank in ranks for part in rank], whole).values()) < 1e-5


@on_ranks(1, timeout=120)
def test_tokens_of_experts_and_their_bias_are_counted_in_fp32_in_a_bf16_model() -> None:
    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    options |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    sizes = {"precision": "bf16-mixed", "micro_batch_size": 8, "global_batch_size": 8, "steps": 2}
    recipe = Recipe(**sizes, options=tuple(options.items()))
    module = lightning_loop.TinyGPT(ONE, recipe)
    strategy = MCoreStrategy(**ONE.strategy_arguments)
    trainer = lightning_loop.make_trainer(1, strategy, recipe.num_microbatches(ONE), recipe.precision)
    counted = []

    def look(router: TopKRouter, inputs: Any) -> None:
        counted.append(router.local_tokens_per_expert.dtype)

    module.on_train_start = lambda: [  # type: ignore[method-assign]
        lightning_loop.TinyGPT.on_train_start(module),
        *(router.register_forward_pre_hook(look) for router in _routers(module)),
    ][0]
    trainer.fit(module)
    biases = [router.expert_bias for router in _routers(module)]
    assert len(biases) == 4
    assert all(bias.dtype == torch.float32 and bias.any() for bias in biases)
    assert set(counted) == {torch.float32}


@pytest.mark.parametrize(
    ("fields", "losses", "layers"),
    [
        ({}, [], [0, 1, 2, 3]),
        ({"moe_aux_loss_coeff": 0.1}, ["load_balancing_loss"], [0, 1, 2, 3]),
        ({"moe_layer_freq": 2, "moe_z_loss_coeff": 0.1}, ["z_loss"], [0, 2]),
        ({"moe_layer_freq": [0, 0, 1, 1], "mtp_num_layers": 1}, [], [2, 3, 4]),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, [], [0, 1, 2, 3]),
        (
            {"moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.0]},
            ["global_load_balancing_loss"],
            [0, 1, 2, 3],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
def test_what_routers_record_follows_from_the_config(
    fields: dict[str, Any], losses: list[str], layers: list[int]
) -> None:
    config = tiny.make_config({**tiny.TRANSFORMER, **tiny.EXPERTS, **fields})
    assert (router_losses(config), layers_with_experts(config)) == (losses, layers)
    dense = tiny.make_config(tiny.TRANSFORMER)
    assert (router_losses(dense), layers_with_experts(dense)) == ([], [])


# ---- batches of different shapes on ranks that share experts

LENGTHS = (9, 5, 12, 12, 3, 8, 7, 7)
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.1}
SGD |= {"lr_scheduler_type": "constant"}


def _rows() -> list[dict[str, torch.Tensor]]:
    """Return rows of 3 to 12 tokens, each a batch of its own."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(100, (1, length + 1), generator=generator) for length in LENGTHS]
    return [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in drawn]


class KeepsLosses(MCoreGPT):
    """Keeps the loss of each step; each model copy reads every second row."""

    def train_dataloader(self) -> Any:
        copies, rows = process_group("dp"), _rows()
        sampler = DistributedSampler(rows, copies.size(), copies.rank(), shuffle=False)  # type: ignore[arg-type]
        return DataLoader(rows, sampler=sampler, collate_fn=lambda taken: taken[0])  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))


def _losses_of_unequal_rows(folder: str, strategy: dict[str, Any], transformer: dict[str, Any]) -> list[float]:
    module = KeepsLosses.from_pretrained(folder, seq_length=16, transformer=transformer, recipe=SGD)
    toy.make_trainer({"expert_model_parallel_size": 2, **strategy}, use_distributed_sampler=False).fit(module)
    return module.losses


def _losses_of_transformers(folder: str) -> list[float]:
    """Return the losses of four steps of two rows each, with transformers and a step written out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    rows = _rows()
    for pair in zip(rows[::2], rows[1::2], strict=True):
        summed = [
            functional.cross_entropy(model(row["tokens"]).logits[0], row["labels"][0], reduction="sum") for row in pair
        ]
        loss = sum(summed) / sum(row["tokens"].numel() for row in pair)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("strategy", [{}, {"pipeline_model_parallel_size": 2}], ids=["ep2", "ep2-pp2"])
def test_ranks_that_share_experts_may_have_rows_of_different_lengths(strategy: dict[str, Any]) -> None:
    folder = str(tiny_folder("mixtral"))
    ranks = 2 * strategy.get("pipeline_model_parallel_size", 1)
    found = run_ranks(ranks, _losses_of_unequal_rows, folder, strategy, {})
    assert found == [pytest.approx(_losses_of_transformers(folder), rel=2e-5)] * ranks


@pytest.mark.parametrize(
    "transformer",
    [
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=["allgather", "padded to capacity"],
)
def test_what_needs_rows_of_one_length_says_so_on_every_rank(transformer: dict[str, Any]) -> None:
    with refuses(RanksFailedError, "have 1 x 5 and 1 x 9 tokens") as raised:
        run_ranks(2, _losses_of_unequal_rows, str(tiny_folder("mixtral")), {}, transformer)
    assert all("1 x 5 and 1 x 9" in raised.value.errors[rank] for rank in (0, 1))


def _losses_with_jitter(jitter: float | None) -> tuple[float, float]:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4}
    transformer = {**sizes, "moe_input_jitter_eps": jitter, "moe_ffn_hidden_size": 16, "add_bias_linear": False}
    module = MCoreGPT(64, seq_length=16, transformer={**transformer, "init_method_std": 1.0})
    trainer = toy.make_trainer({}, max_steps=1)
    [metrics] = trainer.validate(module, toy.texts(4, 16, 64), verbose=False)
    trainer.fit(module, toy.texts(4, 16, 64))
    return metrics["val_loss"], float(trainer.callback_metrics["train_loss"])


def test_jitter_of_routers_is_for_training_alone() -> None:
    [(evaluated, trained)] = run_ranks(1, _losses_with_jitter, 0.9)
    [(quiet, quiet_trained)] = run_ranks(1, _losses_with_jitter, None)
    assert evaluated == quiet
    assert trained != quiet_trained


class ValidatesUnequally(MCoreGPT):
    """Validates one row twice on the first half of the data-parallel ranks, and once on the others."""

    def val_dataloader(self) -> Any:
        copies = process_group("dp")
        row = _rows()[2]
        return DataLoader([row] * (2 if 2 * copies.rank() < copies.size() else 1), collate_fn=lambda taken: taken[0])


def _loss_of_unequal_numbers(folder: str, strategy: dict[str, Any]) -> float:
    transformer = {"moe_token_dispatcher_type": "allgather"}
    module = ValidatesUnequally.from_pretrained(folder, seq_length=16, transformer=transformer)
    [metrics] = toy.make_trainer(strategy, use_distributed_sampler=False).validate(module, verbose=False)
    return metrics["val_loss"]


@pytest.mark.parametrize(
    "strategy",
    [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"expert_model_parallel_size": 2}],
    ids=["tp2-dp2", "dp4-ep2"],
)
def test_ranks_that_share_no_experts_may_validate_different_numbers_of_batches(strategy: dict[str, Any]) -> None:
    folder = str(tiny_folder("mixtral"))
    row = _rows()[2]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = float(functional.cross_entropy(model(row["tokens"]).logits[0], row["labels"][0]))
    assert run_ranks(4, _loss_of_unequal_numbers, folder, strategy) == [pytest.approx(wanted, rel=2e-5)] * 4
