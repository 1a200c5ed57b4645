# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and Hugging Face folders of runs on TransformerEngine's layers, in fp32, with each recipe, and in FP8."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
from lightning_mcore.checkpoint.optimizer_state import _ranges
from lightning_mcore.checkpoint.weights import load_weights
from lightning_mcore.interop.export import export_model
from lightning_mcore.optimizer.parts import optimizer_parts
from tests.distributed.test_hf_export import check_same
from tests.support.hf_models import VOCAB_SIZE, read_tensors, save_tiny
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.te.runs import Counting, Numbers, Run, make_model, make_trainer

pytestmark = pytest.mark.distributed

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
GATHERED_LATE = dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True)
GROUPED = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}


def run_of(recipe: str | None, steps: int = 4, **fp8: Any) -> Run:
    fp8 |= {"fp8_recipe": recipe} if recipe else {}
    fp8 |= {"reuse_grad_buf_for_mxfp8_param_ag": True} if recipe == "mxfp8" and fp8.get("fp8_param") else {}
    return Run(precision="bf16-mixed" if recipe else "32-true", fp8=fp8, layout=SHARDED, steps=steps)


RUNS = {
    "fp32": run_of(None),
    "local": replace(run_of(None), impl="local"),
    "delayed": run_of("delayed", fp8_amax_history_len=3, fp8_amax_compute_algo="max"),
    "experts": replace(run_of("delayed"), transformer=GROUPED),
    "tensorwise": run_of("tensorwise"),
    "blockwise": run_of("blockwise"),
    "mxfp8": run_of("mxfp8"),
    "delayed-weights": run_of("delayed", fp8_param=True),
    "tensorwise-weights": run_of("tensorwise", fp8_param=True),
    "blockwise-weights": run_of("blockwise", fp8_param=True),
    "mxfp8-weights": run_of("mxfp8", fp8_param=True),
    "blockwise-weights-gathered-late": replace(run_of("blockwise", fp8_param=True), layout=GATHERED_LATE),
}


def fit(run: Run, ranks: int, *callbacks: pl.Callback, path: str | None = None, **options: Any) -> tuple[Any, MCoreGPT]:
    """Train, and return the losses and gradient norms, and the module."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    numbers, model = Numbers(), make_model(run)
    trainer = make_trainer(run, ranks, numbers, *callbacks, **options)
    trainer.fit(model, DataLoader(Counting(), batch_size=4), ckpt_path=path)
    return (numbers.losses, numbers.norms), model


def save_and_resume(folder: str, layout: dict[str, Any], runs: dict[str, Run]) -> dict[str, Any]:
    """Train each run for four steps and save it after two; go on from there; return the numbers of both."""
    found = {}
    for name, run in runs.items():
        run = replace(run, layout=run.layout | layout)
        saving = ModelCheckpoint(f"{folder}/{name}", "{step}", every_n_train_steps=2, save_top_k=-1)
        whole, _ = fit(run, 2, saving, enable_checkpointing=True)
        rest, _ = fit(run, 2, path=f"{folder}/{name}/step=2.ckpt")
        found[name] = (whole, rest)
    return found


def go_on(folder: str, layout: dict[str, Any], runs: dict[str, Run], ranks: int) -> dict[str, Any]:
    """Go on with runs from the checkpoint of the run whose name comes first in theirs."""
    found = {}
    for name, run in runs.items():
        path = f"{folder}/{name.split(' ')[0]}/step=2.ckpt"
        found[name], _ = fit(replace(run, layout=run.layout | layout), ranks, path=path)
    return found


THOROUGH = ("blockwise", "mxfp8", "blockwise-weights")  # with weights and gathered late they stay
Trained = Callable[[bool], tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return what gives the folder of the runs of a mark, and their numbers; they are trained once."""
    folder = str(tmp_path_factory.mktemp("runs"))

    @functools.cache
    def of_mark(thorough: bool) -> tuple[str, dict[str, Any]]:
        runs = {name: run for name, run in RUNS.items() if (name in THOROUGH) == thorough}
        return folder, run_ranks(2, save_and_resume, folder, TP2, runs, timeout=400)[0]

    return of_mark


@pytest.mark.parametrize("name", thorough_but(RUNS, *RUNS.keys() - {*THOROUGH}))
def test_a_resumed_run_goes_on_bit_for_bit(name: str, trained: Trained) -> None:
    (losses, norms), rest = trained(name in THOROUGH)[1][name]
    assert rest == (losses[2:], norms[2:])


APART = run_of("delayed", fp8_amax_history_len=3, fp8_amax_compute_algo="max", tp_only_amax_red=True)


def test_data_parallel_ranks_get_the_scales_back_that_they_keep_apart(tmp_path: Path) -> None:
    ranks = run_ranks(2, save_and_resume, str(tmp_path), {}, {"apart": APART}, timeout=120)
    for found in ranks:
        (losses, norms), rest = found["apart"]
        assert rest == (losses[2:], norms[2:])
    one = run_ranks(1, go_on, str(tmp_path), {}, {"apart": APART}, 1, timeout=120)[0]["apart"]
    assert one[0] == pytest.approx(ranks[0]["apart"][1][0], rel=0.1)  # it reads other rows


class Scales(pl.Callback):
    """Keeps the scales and histories of each expert's matrix products, by the places TransformerEngine reads."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, str], list[list[float]]] = {}

    def keep(self, module: pl.LightningModule) -> None:
        first = parallel_state.get_expert_model_parallel_rank()
        for name, layer in module.model.named_modules():  # type: ignore[union-attr]
            for number in range(layer.num_gemms if hasattr(layer, "fp8_meta") and hasattr(layer, "num_gemms") else 0):
                expert = first * layer.num_gemms + number
                for kind, direction in (("input", "fwd"), ("weight", "fwd"), ("grad_output", "bwd")):
                    state = layer.fp8_meta[f"scaling_{direction}"]
                    place = layer._offsets[kind] + number * layer._num_fp8_tensors_per_gemm[direction]
                    numbers = [state.scale[place].reshape(1), state.amax_history[:, place]]
                    self.found[name, expert, kind] = [values.tolist() for values in numbers]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step > 0:  # it has been loaded
            self.keep(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.found:
            self.keep(pl_module)


def scales_of_experts(path: str, layout: dict[str, Any], ranks: int) -> dict[tuple[str, int, str], list[list[float]]]:
    """Train for two steps and save, or load what is there, and return the scales at the end, or as loaded."""
    is_there = Path(path).exists()
    run = replace(RUNS["experts"], layout=layout, steps=3 if is_there else 2)
    scales, saving = Scales(), ModelCheckpoint(Path(path).parent, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(
        run,
        ranks,
        scales,
        *([] if is_there else [saving]),
        path=path if is_there else None,
        enable_checkpointing=not is_there,
    )
    return scales.found


def test_each_expert_gets_its_own_scales_back_where_ranks_have_other_numbers_of_experts(tmp_path: Path) -> None:
    path = str(tmp_path / "step=2.ckpt")
    saved = run_ranks(2, scales_of_experts, path, {"expert_model_parallel_size": 2}, 2, timeout=120)
    loaded = run_ranks(1, scales_of_experts, path, {}, 1, timeout=120)[0]
    assert len(loaded) == 2 * 2 * 4 * 3  # layers, matrix products, experts, kinds
    assert len({str(numbers) for numbers in loaded.values()}) > 12  # they differ, so a mix-up shows
    assert loaded == saved[0] | saved[1]


NOT_RESHARDED = ("local", "delayed-weights", "mxfp8-weights", "blockwise-weights-gathered-late")
RESHARDED = {name: RUNS[name] for name in RUNS if name not in NOT_RESHARDED}
OTHERS = {
    "fp32 by local layers": RUNS["local"],
    "local by TransformerEngine's": RUNS["fp32"],
    "delayed by another recipe": RUNS["tensorwise"],
    "delayed by local layers": replace(RUNS["local"], precision="bf16-mixed"),
    "tensorwise by delayed": RUNS["delayed"],
}
# Measured, losses of the two steps after the other layout or layers go on: fp32 2e-7, FP8 and bf16 1.2e-3.
TOLERANCES = {"fp32": 1e-6, "local": 1e-6}


@pytest.mark.parametrize(
    ("layout", "ranks", "thorough"),
    [
        pytest.param({}, 1, False, id="one-rank"),
        pytest.param(PP2, 2, False, id="pp2"),
        pytest.param({}, 1, True, marks=pytest.mark.thorough, id="one-rank-more"),
        pytest.param(PP2, 2, True, marks=pytest.mark.thorough, id="pp2-more"),
    ],
)
def test_other_layouts_recipes_and_layers_go_on(
    layout: dict[str, Any], ranks: int, thorough: bool, trained: Trained
) -> None:
    folder, numbers = trained(thorough)
    runs = {name: run for name, run in RESHARDED.items() if (name in THOROUGH) == thorough}
    runs |= OTHERS if ranks == 1 and not thorough else {}
    found = run_ranks(ranks, go_on, folder, layout, runs, ranks, timeout=400)[0]
    for name, (losses, _) in found.items():
        origin = name.split(" ")[0]
        print(name, losses, numbers[origin][0][0][2:])
        assert losses == pytest.approx(numbers[origin][0][0][2:], rel=TOLERANCES.get(origin, 5e-3)), name


class Copies(pl.Callback):
    """Keeps the fp32 copies that the optimizer has of the weights before the first step.

    Args:
        path: A checkpoint of weights alone, which is read first.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.copies: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.path is not None:
            trainer.strategy.load_checkpoint(self.path)
            trainer.strategy.checkpoints.load_pending(fitting=True)  # type: ignore[attr-defined]
        parts = optimizer_parts(trainer.optimizers[0].megatron)  # type: ignore[attr-defined]
        self.copies = [stepped.detach().clone() for part in parts for _, stepped, _, _ in _ranges(part)]


class FromCheckpoint(MCoreGPT):
    """Starts from the weights of a checkpoint."""

    source = ""

    def configure_model(self) -> None:
        super().configure_model()
        load_weights(self, self.source)


def start_and_write(folder: str, llama: str) -> dict[str, Any]:
    """Start from a Hugging Face folder, a checkpoint's weights and a checkpoint of weights alone, and write again."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    data = DataLoader([{"tokens": text[:-1], "labels": text[1:]} for text in TEXT], batch_size=4)  # type: ignore[arg-type]
    FromCheckpoint.source = f"{folder}/local/step=2.ckpt"
    for name, run in STARTS.items():
        copies, numbers = Copies(), Numbers()
        module = MCoreGPT.from_pretrained(llama, seq_length=32, transformer_impl=run.impl)  # type: ignore[arg-type]
        trainer = make_trainer(run, 2, copies, numbers)
        trainer.fit(module, data)
        found[f"{name} folder"] = (copies.copies, numbers.losses, numbers.norms)
        untouched = MCoreGPT.from_pretrained(llama, seq_length=32, transformer_impl=run.impl)  # type: ignore[arg-type]
        make_trainer(run, 2, limit_predict_batches=1).predict(untouched, data)
        export_model(untouched, f"{folder}/{name} written")
        copies = Copies()
        whole = make_model(run)
        other = FromCheckpoint(**dict(whole.hparams))
        trainer = make_trainer(run, 2, copies)
        trainer.fit(other, DataLoader(Counting(), batch_size=4))
        found[f"{name} weights"] = copies.copies
        if name == "local":
            trainer.save_checkpoint(f"{folder}/local alone", weights_only=True)
        copies = Copies(f"{folder}/local alone")
        make_trainer(run, 2, copies).fit(make_model(run), DataLoader(Counting(), batch_size=4))
        found[f"{name} alone"] = copies.copies
    return found


STARTS = {
    "local": Run(impl="local", precision="bf16-mixed", layout=SHARDED, steps=1),
    "te": Run(precision="bf16-mixed", layout=SHARDED, steps=1),
    **{name: replace(RUNS[f"{name}-weights"], steps=1) for name in ("delayed", "tensorwise")},
}
TEXT = torch.randint(VOCAB_SIZE, (16, 33), generator=torch.Generator().manual_seed(1))


def test_weights_that_are_read_reach_the_copies_bit_for_bit(tmp_path: Path, trained: Trained) -> None:
    folder = trained(False)[0]
    llama = str(save_tiny("llama", tmp_path / "llama", dtype=torch.bfloat16, hidden_size=64, intermediate_size=64))
    ranks = run_ranks(2, start_and_write, folder, llama, timeout=400)
    _, losses, norms = ranks[0]["local folder"]
    for name in STARTS:
        _, of_run, norms_of_run = ranks[0][f"{name} folder"]
        assert of_run == pytest.approx(losses, rel=5e-3)
        assert norms_of_run == pytest.approx(norms, rel=5e-2)
        for kind in ("folder", "weights", "alone"):
            assert torch.equal(values_of(ranks, f"{name} {kind}"), values_of(ranks, f"local {kind}")), (name, kind)
    for name in ("local", "te"):
        check_same(llama, f"{folder}/{name} written")
    for name in ("delayed", "tensorwise"):  # values that FP8 has rounded
        written = dict(read_tensors(f"{folder}/{name} written"))
        for tensor_name, values in read_tensors(llama):
            worst = (written[tensor_name].float() - values.float()).abs().max()
            assert worst <= values.float().abs().max() / 16, tensor_name


def values_of(ranks: list[dict[str, Any]], name: str) -> Tensor:
    """Return all values of the copies of all ranks, sorted: layers differ in the order of their weights."""
    found = [rank[name][0] if name.endswith("folder") else rank[name] for rank in ranks]
    return torch.cat([copy.flatten() for copies in found for copy in copies]).sort().values
