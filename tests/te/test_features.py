# SPDX-License-Identifier: Apache-2.0
"""What models of TransformerEngine's layers can have: experts, compressed attention, recomputation, FP8 weights."""

import functools
import pickle
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.checkpoint.extra_state import checked_extra_state
from lightning_mcore.config.field_homes import fusion_defaults
from tests.support.ranks import run_ranks
from tests.te.runs import LENGTH, TRANSFORMER, VOCABULARY, Counting, Run, make_model, make_trainer, train

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("te-features")]  # they share runs

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "rope_type": "rope",
    "qk_layernorm": True,
}


CP2: dict[str, Any] = {"context_parallel_size": 2}
SHARDED = {"ddp_config": DistributedDataParallelConfig(use_distributed_optimizer=True)}
GROUPED = EXPERTS | {"moe_grouped_gemm": True}  # which draws its first weights in another order
FUSED = fusion_defaults(TRANSFORMER | GROUPED)
IN_BF16 = Run(precision="bf16-mixed")
IN_FP32 = Run()
PACKED = Run(precision="bf16-mixed", packed=True)

TRAINS = {  # with a recipe, and the number of ranks
    "experts-grouped": (Run(transformer=GROUPED), 1),
    "experts-grouped-ep2": (Run(transformer=GROUPED, layout={"expert_model_parallel_size": 2}), 2),
    "experts-sequential": (Run(transformer=EXPERTS), 1),
    "latent": (Run(transformer=LATENT), 1),
    "multi-token": (Run(transformer={"mtp_num_layers": 1}), 1),
    "cp2": (Run(layout=CP2), 2),
    "recompute": (
        Run(transformer={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        1,
    ),
    "pp2": (Run(layout={"pipeline_model_parallel_size": 2}), 2),
}
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
WITH_DELAYED = ("experts-grouped", "recompute", "pp2")
"""Trained with delayed scaling in ``make test``, where the others are with tensorwise."""


def with_fp8(run: Run, recipe: str, **fp8: Any) -> Run:
    """Return a run in bf16, with a recipe."""
    return replace(run, precision="bf16-mixed", fp8={"fp8_recipe": recipe, **fp8})


def runs_of(ranks: int) -> dict[str, Run]:
    """Return the runs that the tests compare, by name."""
    runs = {}
    for name, (run, size) in TRAINS.items():
        if size == ranks:
            runs[name] = replace(run, precision="bf16-mixed")
            runs |= {f"{name} {recipe}": with_fp8(run, recipe) for recipe in ("delayed", "tensorwise")}
    for recipe in RECIPES:
        more: dict[str, Any] = {"reuse_grad_buf_for_mxfp8_param_ag": True} if recipe == "mxfp8" else {}
        sharded = Run(layout=SHARDED, steps=2)  # the second on weights that were gathered
        runs[f"{recipe} sharded"] = with_fp8(sharded, recipe)
        runs[f"{recipe} weights"] = with_fp8(sharded, recipe, fp8_param=True, **more)
    packed = replace(PACKED, layout={"context_parallel_size": ranks})
    runs |= {"packed": packed, "packed local": replace(packed, impl="local")}
    if ranks == 2:
        runs |= {"tp2": replace(IN_BF16, layout=TP2), "tp2 local": replace(IN_BF16, layout=TP2, impl="local")}
        runs["cp2 local"] = replace(IN_BF16, layout=CP2, impl="local")
        for kind in ("all_gather", "a2a"):
            runs[f"cp2 {kind}"] = replace(IN_BF16, layout=CP2, transformer={"cp_comm_type": kind})
        return runs
    for backend in ("unfused", "fused"):
        runs[f"packed {backend}"] = replace(PACKED, steps=1, transformer={"attention_backend": backend})
    for name, run in (("fp32", IN_FP32), ("packed", PACKED)):
        runs[f"{name} experts"] = replace(run, transformer=GROUPED)
        runs[f"{name} experts fused"] = replace(run, transformer=GROUPED | FUSED)
    runs["fp32 experts permuted"] = Run(transformer=GROUPED | {"moe_permute_fusion": True})
    return runs


def is_thorough(name: str, ranks: int) -> bool:
    """Whether a run is for ``make test-thorough`` alone: a case with its other recipe, FP8 weights on one rank."""
    case, _, kind = name.rpartition(" ")
    if case in TRAINS:
        return (kind == "delayed") != (case in WITH_DELAYED)
    return ranks == 1 and kind in ("sharded", "weights")


Trained = dict[str, tuple[list[float], list[float]]]


def train_each(ranks: int, thorough: bool) -> Trained:
    """Train the runs of a mark, one after the other; return losses and gradient norms."""
    runs = runs_of(ranks).items()
    return {name: train(run, ranks) for name, run in runs if name in TRAINS or is_thorough(name, ranks) == thorough}


@functools.cache
def _trained(ranks: int, thorough: bool) -> Trained:
    return run_ranks(ranks, train_each, ranks, thorough, timeout=300)[0]


def trained(ranks: int, thorough: bool = False) -> Trained:
    """Return the losses and gradient norms of the runs of a mark on so many ranks, which are trained once."""
    return _trained(ranks, thorough)


@pytest.mark.parametrize("kind", ["", " all_gather", " a2a"])
def test_context_parallelism_computes_the_same(kind: str) -> None:
    # bf16, because fused attention has no fp32; measured: losses 1.3e-4, gradient norms 3e-4
    (losses, norms), (local_losses, local_norms) = trained(2)[f"cp2{kind}"], trained(2)["cp2 local"]
    assert losses == pytest.approx(local_losses, rel=1e-3)
    assert norms == pytest.approx(local_norms, rel=3e-3)


def test_tensor_parallel_layers_compute_nearly_the_same_in_bf16() -> None:
    # which is rounded at other places; measured: 3e-4; tests/te/test_layouts.py compares fp32
    (losses, norms), (local_losses, local_norms) = trained(2)["tp2"], trained(2)["tp2 local"]
    assert losses == pytest.approx(local_losses, rel=5e-3)
    assert norms == pytest.approx(local_norms, rel=5e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_rows_compute_the_same_in_bf16(ranks: int) -> None:
    (losses, norms), (local_losses, local_norms) = trained(ranks)["packed"], trained(ranks)["packed local"]
    assert losses == pytest.approx(local_losses, rel=2e-3)
    assert norms == pytest.approx(local_norms, rel=1e-2)


@pytest.mark.parametrize("backend", ["unfused", "fused"])
def test_packed_rows_with_padding_have_every_kind_of_attention(backend: str) -> None:
    assert trained(1)[f"packed {backend}"][0] == pytest.approx(trained(1)["packed local"][0][:1], rel=2e-3)


@pytest.mark.parametrize("kind", ["fp32", "packed"])
def test_the_fusions_of_a_gpu_compute_the_same(kind: str) -> None:
    assert len(FUSED) == 4
    (losses, norms), (plain_losses, plain_norms) = trained(1)[f"{kind} experts fused"], trained(1)[f"{kind} experts"]
    assert losses == pytest.approx(plain_losses, rel=2e-3 if kind == "packed" else 1e-5)
    assert norms == pytest.approx(plain_norms, rel=1e-2 if kind == "packed" else 1e-4, nan_ok=True)


def test_fused_permutation_moves_tokens_as_the_plain_one_does() -> None:
    assert trained(1)["fp32 experts permuted"][0] == pytest.approx(trained(1)["fp32 experts"][0], rel=1e-6)


def marked(name: str, ranks: int, *values: Any) -> Any:
    """Return the parameters of a test that looks at a run."""
    return pytest.param(*values, marks=[pytest.mark.thorough] if is_thorough(name, ranks) else [])


@pytest.mark.parametrize(
    ("case", "recipe"),
    [marked(f"{case} {kind}", ranks, case, kind) for case, (_, ranks) in TRAINS.items() for kind in RECIPES[:2]],
)
def test_a_recipe_trains_close_to_bf16(case: str, recipe: str) -> None:
    ranks = TRAINS[case][1]
    found = trained(ranks, is_thorough(f"{case} {recipe}", ranks))
    losses, in_bf16 = found[f"{case} {recipe}"][0], found[case][0]
    assert losses != in_bf16
    assert losses == pytest.approx(in_bf16, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "recipe"), [marked(f"{kind} weights", ranks, ranks, kind) for ranks in (1, 2) for kind in RECIPES]
)
def test_fp8_weights_are_gathered(recipe: str, ranks: int) -> None:
    """The layers get the FP8 numbers that they get from bf16 weights, so that nothing changes but for ``delayed``."""
    found = trained(ranks, is_thorough(f"{recipe} weights", ranks))
    losses, plain = found[f"{recipe} weights"][0], found[f"{recipe} sharded"][0]
    assert losses == pytest.approx(plain, rel=0.01 if recipe == "delayed" else 1e-3)


def scales_in(state: torch.Tensor) -> torch.Tensor:
    scales: torch.Tensor = pickle.loads(state.numpy().tobytes()).get("scale_fwd", torch.ones(0))
    return scales


def saved_extra_state(recipe: str) -> list[bool]:
    """Return for each layer with an extra state after a step whether it has the same scales after it was loaded."""
    model = make_model(Run())
    run = Run(precision="bf16-mixed", fp8={"fp8_recipe": recipe}, steps=1)
    loader = DataLoader(Counting(), batch_size=4)
    trainer = make_trainer(run, 1)
    same = []

    class Reload(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *rest: Any) -> None:
            chunk = trainer.strategy.chunks.bare[0]
            state = {name: value for name, value in chunk.state_dict().items() if name.endswith("_extra_state")}
            state = {name: value for name, value in state.items() if value is not None and value.numel()}
            with checked_extra_state(state):
                chunk.load_state_dict(state, strict=False)
            again = chunk.state_dict()
            same.extend(torch.equal(scales_in(again[name]), scales_in(value)) for name, value in state.items())

    trainer.callbacks.append(Reload())  # type: ignore[attr-defined]
    trainer.fit(model, loader)
    return same


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_the_extra_state_of_a_recipe_passes_the_check_for_code(recipe: str) -> None:
    same = run_ranks(1, saved_extra_state, recipe, timeout=60)[0]
    assert len(same) >= 8 or recipe == "tensorwise"  # of which later releases keep nothing
    assert all(same)


class Shorter(Counting):
    """Rows for evaluation, of a length that no recipe can divide into blocks."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:97] for name, tensor in super().__getitem__(index).items()}


def validated() -> tuple[float, float, list[float]]:
    """Return the validation loss after a step of FP8 and of bf16 on rows that FP8 cannot divide, and what followed."""
    found, after = [], []
    for fp8 in ({"fp8_recipe": "tensorwise"}, {}):
        run = Run(precision="bf16-mixed", fp8=fp8, steps=2)
        pl.seed_everything(1, verbose=False)
        trainer = make_trainer(run, 1, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=0)
        trainer.fit(make_model(run), DataLoader(Counting(), 4), DataLoader(Shorter(), 1))
        found.append(float(trainer.callback_metrics["val_loss"]))
        after.append(float(trainer.callback_metrics["train_loss"]))
    return found[0], found[1], after


def test_a_batch_of_evaluation_that_fp8_cannot_divide_is_computed_in_bf16() -> None:
    loss, in_bf16, after = run_ranks(1, validated, timeout=90)[0]
    assert loss == pytest.approx(in_bf16, rel=0.02)
    assert after[0] != after[1]  # training goes on in FP8


class WithoutShapes(MCoreGPT):
    """A module of a user that does not tell the shapes of its microbatches."""

    def microbatch_shape(self, batch: Any) -> Any:
        return super(MCoreGPT, self).microbatch_shape(batch)


def trained_on_odd_rows() -> str:
    run = Run(precision="bf16-mixed", fp8={"fp8_recipe": "delayed"}, steps=1)
    module = WithoutShapes(VOCABULARY, LENGTH, TRANSFORMER, transformer_impl="transformer_engine")
    with pytest.raises(ValueError, match="fp8_recipe='delayed' needs a multiple of 16 tokens in each micro") as error:
        make_trainer(run, 1).fit(module, DataLoader(Shorter(), 1))
    return str(error.value)


def test_rows_of_unknown_length_that_fp8_cannot_divide_are_named() -> None:
    [message] = run_ranks(1, trained_on_odd_rows)
    assert "pad the rows of each batch" in message
    assert "dims=[97, 256]" in message


def first_sinks() -> list[list[float]]:
    """Return the sinks of each layer of a fresh model, in memory that torch fills with NaN unless it is written."""
    torch.use_deterministic_algorithms(True)
    model = make_model(Run(transformer={"softmax_type": "learnable", "attention_backend": "unfused"}))
    with single_process():
        model.configure_model()
    return [p.tolist() for name, p in model.named_parameters() if name.endswith("softmax_offset")]


def test_sinks_begin_at_zero() -> None:
    assert run_ranks(1, first_sinks, open_group=False) == [[[0.0] * 4] * 2]
