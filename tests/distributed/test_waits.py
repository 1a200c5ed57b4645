# SPDX-License-Identifier: Apache-2.0
"""Where a training step waits for the device, counted on the CPU: each place that needs a number of a tensor.

On a GPU the host runs ahead of the kernels, and each such place stops it until they are done. So a step may read only
what decides whether and how the optimizer steps, and, after it, what the step has logged.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import megatron.core
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import lightning_mcore
from lightning_mcore import MCoreGPT, MCorePreference, MCoreVisionGPT
from lightning_mcore.strategy.logs.pipeline import HostCopy
from tests.parity.hf_modules import FineTuning, Texts, collate
from tests.support.hf_models import tiny_folder
from tests.support.ranks import on_ranks, run_ranks
from tests.support.rehearsed import Texts as Pairs
from tests.support.toy import PP2, PlainNet
from tests.support.toy import loader as toy_loader
from tests.support.vision_models import vision_batch, vision_folder
from tests.te.runs import LENGTH, TRANSFORMER, VOCABULARY, Run, make_loader, make_model, make_trainer

pytestmark = pytest.mark.distributed

MEASURED = 2  # the third step, because the first two make new things known
RUN = Run(impl="local", steps=MEASURED + 2, transformer={"hidden_size": 64, "ffn_hidden_size": 128})
PACKAGES = {str(Path(package.__file__).parent): package.__name__ for package in (lightning_mcore, megatron.core, pl)}
ON_THE_HOST = (  # in this file, or in this function of it: the tensor is never on the device
    "torch/optim/",  # counters of steps, on a GPU on the device and not read
    "layers/inputs.py",  # batches before they are moved
    "data/multimodal.py",
    "layers/vision.py _known_indices",  # sizes of images, on the host
    "parallel/groups.py random_state_of_stage",
    "parallel/groups.py tell_stages",  # messages between hosts
    "parallel/stage_shapes.py",
    "tensor_parallel/random.py",
)
OF_EXPERTS = "megatron.core/transformer/moe/"  # on the CPU they multiply one by one, so their sizes are read
COPIES = (torch.tensor, torch.as_tensor)  # not those of the CPU runtime, which replaces the names
NEW = (torch.arange, torch.full, torch.ones, torch.zeros)
STEP = "the optimizer has stepped"


class Waits(TorchFunctionMode):
    """Notes the file, of Megatron, Lightning or this package, that asks for something that waits for the device.

    It sees what asks for numbers; and what is copied to the device: lists as an index or as numbers, and a number to
    which one item of a tensor is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.below = WaitsOfOperators(self)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.detach and sys._getframe(1).f_code.co_name == "keep_on_host":
            return function(*args, **kwargs).as_subclass(OnHost)
        if function is Tensor.to and isinstance(args[0], OnHost) and "device" in str(args[1:]):
            return function(*args, **kwargs).as_subclass(Tensor)
        if function in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self.note(args[0])
        elif function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_one = all(isinstance(part, int) for part in index)  # others are filled
            is_number_set = function is Tensor.__setitem__ and is_one and not isinstance(args[2], Tensor)
            if is_number_set or any(isinstance(part, list) for part in index):
                self.note(args[0])
        elif function in COPIES and not isinstance(args[0], Tensor):
            if not kwargs.get("device"):
                return function(*args, **kwargs).as_subclass(OnHost)
            self.note()
        elif function in NEW and not kwargs.get("device"):
            return function(*args, **kwargs).as_subclass(OnHost)
        result = function(*args, **kwargs)
        if isinstance(result, OnHost) and any(isinstance(a, Tensor) and not isinstance(a, OnHost) for a in args):
            return result.as_subclass(Tensor)  # a number of the host changes a tensor of the device
        return result

    def note(self, tensor: Tensor | None = None) -> None:
        """Add the innermost file of a known package, unless it reads what is on the host in any case."""
        if isinstance(tensor, OnHost):
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if any(part in f"{file} {frame.f_code.co_name}" for part in ON_THE_HOST):
                return
            if not file.endswith("cpu_runtime.py"):  # which passes calls on
                for folder, package in PACKAGES.items():
                    if file.startswith(folder):
                        self.places.append(package + file.removeprefix(folder))
                        return
            frame = frame.f_back


class WaitsOfOperators(TorchDispatchMode):
    """Notes ``item()`` and all that goes through it (truth, comparisons, an index), and sizes that depend on values."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        is_set = name in ("index_put", "index_put_") and args[2].numel() > 1  # one number is filled in
        masks = args[1] if name == "index" or is_set else ()
        if name in self.WAITING or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.waits.note(args[0])
        return function(*args, **(kwargs or {}))


class OnHost(Tensor):
    """A tensor that would be on the host in a run on a GPU."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnHost":
        return self.clone()


class InEachStep(pl.Callback):
    """Notes the waits of each step but the last, from its first batch to the first batch of the next."""

    def __init__(self) -> None:
        self.waits = Waits()
        self.of_steps: list[list[str]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.waits.places.append(STEP))
        self.waits.__enter__()
        self.waits.below.__enter__()
        # of the CPU runtime, which restores the original
        torch.cuda.synchronize = lambda *_: self.waits.note()  # type: ignore[assignment]

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step > len(self.of_steps):
            self.of_steps.append(list(self.waits.places))
            self.waits.places.clear()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.waits.below.__exit__(None, None, None)
        self.waits.__exit__(None, None, None)


class Extremes(pl.Callback):
    """Logs values of a step that ranks merge in every way."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: MCoreGPT) -> None:
        step = pl_module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            output = step(batch, batch_idx)
            for way in ("mean", "sum", "min", "max"):
                pl_module.log(way, batch_idx + 0.5, reduce_fx=way, sync_dist=True)
                pl_module.log(f"{way}_of_this_copy", output["loss"], reduce_fx=way)
            return output

        pl_module.training_step = training_step


def waits_of_a_step(run: Run, size: int, batches: int) -> list[str]:
    """Return the waits of an optimizer step of this many batches, each of four microbatches."""
    return measured(make_model(run), make_loader(run), run, size, batches)


def measured(module: pl.LightningModule, loader: Any, run: Run, size: int, batches: int = 1) -> list[str]:
    """Train a module; return the waits of the measured step."""
    seen = InEachStep()
    read = HostCopy.read

    def read_on_host(copy: HostCopy) -> Tensor:
        seen.waits.note()
        return read(copy).as_subclass(OnHost)

    HostCopy.read = read_on_host
    callbacks = [seen, Extremes()] if isinstance(module, MCoreGPT) else [seen]
    options = {"accumulate_grad_batches": batches, "gradient_clip_val": 1.0 if isinstance(module, MCoreGPT) else None}
    trainer = make_trainer(run, size, *callbacks, use_distributed_sampler=False, **options)
    trainer.fit(module, loader)
    HostCopy.read = read
    return seen.of_steps[MEASURED]


def with_layout(run: Run, **layout: Any) -> Run:
    return replace(run, layout={"micro_batch_size": 1} | layout)


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "moe_per_layer_logging": True,
    "moe_token_dispatcher_type": "alltoall",
}
RUNS: dict[str, tuple[int, Run]] = {
    "one": (1, with_layout(RUN)),
    "bf16": (1, with_layout(replace(RUN, precision="bf16-mixed"))),
    "experts": (1, with_layout(replace(RUN, transformer=RUN.transformer | EXPERTS))),
    "dp2": (2, with_layout(RUN)),
    "dp2-do": (2, with_layout(RUN, use_distributed_optimizer=True)),
    "tp2-sp": (2, with_layout(RUN, tensor_model_parallel_size=2, sequence_parallel=True)),
    "cp2": (2, with_layout(RUN, context_parallel_size=2)),
    "pp2": (2, with_layout(RUN, pipeline_model_parallel_size=2)),
    "multi-token-pp2": (
        2,
        with_layout(replace(RUN, transformer=RUN.transformer | {"mtp_num_layers": 1}), pipeline_model_parallel_size=2),
    ),
    "pp2-vp2": (
        2,
        with_layout(
            replace(RUN, transformer=RUN.transformer | {"num_layers": 4}),
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
        ),
    ),
}
# On the CPU, two functions read the norm, the first of which gpu_runtime() replaces.
DECISION = ["megatron.core/utils.py", "megatron.core/optimizer/clip_grads.py"]


@pytest.mark.parametrize(("case", "batches"), [*((case, 1) for case in RUNS), ("one", 2), ("pp2", 2)])
def test_a_step_waits_for_its_gradient_norm_and_after_the_optimizer_for_its_logs(case: str, batches: int) -> None:
    size, run = RUNS[case]
    for places in run_ranks(size, waits_of_a_step, run, size, batches, timeout=90):
        places = [place for place in places if not place.startswith(OF_EXPERTS)]
        assert places == [*DECISION, STEP, "lightning_mcore/strategy/logs/pipeline.py"]


HEADS = {"mtp_num_layers": 1, "mtp_detach_heads": True}


@pytest.mark.skipif(
    "mtp_detach_heads" not in TransformerConfig.__dataclass_fields__, reason="new in megatron-core 0.19"
)
@pytest.mark.parametrize("stages", [1, 2])
def test_heads_that_are_clipped_by_themselves_have_a_second_norm(stages: int) -> None:
    run = with_layout(replace(RUN, transformer=RUN.transformer | HEADS), pipeline_model_parallel_size=stages)
    for places in run_ranks(stages, waits_of_a_step, run, stages, 1, timeout=90):
        # The first function is called only for gradients, and the first of two stages has none of the heads.
        assert [place for place in places if place != DECISION[0]] == [DECISION[1], DECISION[1], STEP, LOGS]


class WithoutShapes(MCoreGPT):
    """A module of a user, as in README, that does not tell the shapes of its microbatches."""

    def microbatch_shape(self, batch: Any) -> Any:
        return super(MCoreGPT, self).microbatch_shape(batch)


def without_shapes(run: Run, folder: str) -> tuple[pl.LightningModule, Any]:
    return WithoutShapes(VOCABULARY, LENGTH, TRANSFORMER | run.transformer), make_loader(run)


def seeing(run: Run, folder: str) -> tuple[pl.LightningModule, Any]:
    """Rows with no, one and several images, and a video."""
    images: list[Any] = [[(1, 4, 4)], [], [(1, 2, 2), (1, 6, 4), (1, 2, 4)], [(1, 2, 2)]]
    videos: list[Any] = [[], [], [], [(3, 4, 2)]]
    batches = [vision_batch("qwen3_vl", 48, images, videos, seed) for seed in range(run.steps)]
    return MCoreVisionGPT.from_pretrained(folder, 48), DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def with_masks(run: Run, folder: str) -> tuple[pl.LightningModule, Any]:
    """Rows of different lengths for a model of ``hf_model``."""
    return FineTuning(folder, ours=True), DataLoader(Texts(), batch_size=4, collate_fn=collate)


def preferring(run: Run, folder: str) -> tuple[pl.LightningModule, Any]:
    """Pairs of answers, whose reference is the model without its adapters."""
    module = MCorePreference(VOCABULARY, LENGTH, TRANSFORMER | run.transformer, lora={"r": 4})
    return module, DataLoader(Pairs(pairs=True), batch_size=4)


def plain(run: Run, folder: str) -> tuple[pl.LightningModule, Any]:
    return PlainNet(), toy_loader(64, 4)


LOGS = "lightning_mcore/strategy/logs/pipeline.py"
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
USUAL = [*DECISION, STEP, LOGS]
# ranks, layout, module and the waits of a step
MODULES: dict[str, tuple[int, dict[str, Any], Any, list[str]]] = {
    "without-shapes-pp2": (2, PP2, without_shapes, USUAL),
    "vision": (1, {}, seeing, USUAL),
    "vision-tp2-sp": (2, TP2, seeing, USUAL),
    "vision-cp2": (2, {"context_parallel_size": 2}, seeing, USUAL),
    "hf-masks": (1, {}, with_masks, USUAL),
    "hf-masks-pp2": (2, PP2, with_masks, USUAL),
    "preference": (1, {"micro_batch_size": 2}, preferring, USUAL),
    "plain": (1, {}, plain, [STEP]),  # not clipped, and Lightning logs it
    "plain-dp2-do": (2, {"use_distributed_optimizer": True}, plain, [*DECISION, STEP]),
}


def waits_of_a_module(name: str, folder: str) -> list[str]:
    size, layout, build, _ = MODULES[name]
    run = with_layout(RUN, **layout)
    if build is plain:
        run = replace(run, layout=layout | {"micro_batch_size": None})
    return measured(*build(run, folder), run, size)


@pytest.mark.parametrize("name", MODULES)
def test_other_modules_wait_no_more_often(name: str) -> None:
    size, _, build, wanted = MODULES[name]
    folders = {seeing: lambda: vision_folder("qwen3_vl"), with_masks: lambda: tiny_folder("qwen3")}
    folder = str(folders[build]()) if build in folders else ""
    for places in run_ranks(size, waits_of_a_module, name, folder, timeout=90):
        assert places == wanted


class InEachEvaluation(pl.Callback):
    """Notes the waits of each validation batch but the last, until the next batch begins."""

    def __init__(self) -> None:
        self.waits = Waits()
        self.of_batches: list[list[str]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.waits.__enter__()
        self.waits.below.__enter__()

    def on_validation_batch_start(self, *_: Any) -> None:
        self.of_batches.append(list(self.waits.places))
        self.waits.places.clear()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.waits.below.__exit__(None, None, None)
        self.waits.__exit__(None, None, None)


@pytest.mark.parametrize(("size", "layout"), [(1, {}), (2, TP2), (2, PP2)])
@on_ranks("size", timeout=90)
def test_evaluation_waits_for_the_logs_of_each_batch(size: int, layout: dict[str, Any]) -> None:
    run, seen = with_layout(RUN, **layout), InEachEvaluation()
    trainer = make_trainer(run, size, seen, use_distributed_sampler=False, limit_val_batches=4)
    trainer.validate(make_model(run), make_loader(run), verbose=False)
    assert seen.of_batches[-1] == [LOGS]
