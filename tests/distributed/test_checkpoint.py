# SPDX-License-Identifier: Apache-2.0
"""Lightning's own checkpointing of sharded models: written as directories, resumed bit for bit."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_mcore import MCoreGPT, Recipe, build_from_checkpoint
from lightning_mcore.checkpoint.commands import verify
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.strategy import checkpointing
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.toy import (
    ADAMW,
    OVERLAPPED,
    PP2,
    SHARDED,
    VP2,
    Batch,
    MakeOptimizer,
    PlainNet,
    Seen,
    StagedNet,
    loader,
    make_trainer,
    run_fit,
    texts,
    two_groups,
    weights,
)

pytestmark = pytest.mark.distributed

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYER_WISE = {"use_layer_wise_distributed_optimizer": True}
EP2 = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}

MOMENTUM: MakeOptimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
NADAM: MakeOptimizer = partial(torch.optim.NAdam, lr=1e-2)
ASGD: MakeOptimizer = partial(torch.optim.ASGD, lr=1e-2, t0=3)
ADAFACTOR: MakeOptimizer = partial(torch.optim.Adafactor, lr=1e-2)
RMSPROP: MakeOptimizer = partial(torch.optim.RMSprop, lr=1e-3)


class Stateful(pl.LightningModule):
    """What a module has beside its model: a schedule of the learning rate, a buffer, a payload in the checkpoint."""

    def __init__(self, make_optimizer: MakeOptimizer = two_groups) -> None:
        super().__init__(make_optimizer)  # type: ignore[call-arg]
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.long))
        self.payload: dict[str, Any] = {}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.num_batches += 1

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        peaks = [2 * group["lr"] for group in optimizer.param_groups]
        moves_betas = bool({"betas", "momentum"} & set(optimizer.defaults))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=peaks, total_steps=9, cycle_momentum=moves_betas
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["payload"] = {"epoch": self.current_epoch, "note": "a text", "numbers": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.payload = checkpoint["payload"]


class Plain(Stateful, PlainNet):
    pass


class Staged(Stateful, StagedNet):
    pass


@dataclass(frozen=True)
class Trained:
    """What came of a run on one rank."""

    seen: Seen
    weights: dict[str, Tensor]
    rates: list[float]
    num_batches: int
    payload: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to interrupt."""

    module: Any
    strategy: Any
    precision: Any = "32-true"
    world_size: int = 2


def fit(run: Run, epochs: int, folder: str | None = None, resume: str | None = None) -> Trained:
    """Train for some epochs, saving each into ``folder`` if there is one."""
    module = run.module()
    seen = run_fit(
        module,
        run.strategy,
        loader(16, 2),
        loader(5, 2),
        ckpt_path=resume,
        max_epochs=epochs,
        precision=run.precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        enable_checkpointing=folder is not None,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_last=True, save_top_k=-1)] if folder is not None else [],
    )
    rates = [group["lr"] for group in module.optimizers().param_groups]
    return Trained(seen, weights(module), rates, int(module.num_batches), module.payload)


def interrupt_and_resume(runs: dict[str, Run], folder: str) -> dict[str, tuple[Trained, Trained]]:
    """Return for each run what came of it whole, saving each epoch, and of its second epoch resumed after the first."""
    results = {}
    for name, run in runs.items():
        whole = fit(run, 2, folder=f"{folder}/{name}")
        results[name] = whole, fit(run, 2, resume=f"{folder}/{name}/epoch=0.ckpt")
    return results


RUNS: dict[str, Run] = {
    "pp2": Run(module=Staged, strategy=PP2),
    "pp2-bf16-true": Run(module=Staged, strategy=PP2, precision="bf16-true"),
    "pp2-momentum-bf16": Run(module=partial(Staged, MOMENTUM), strategy=PP2, precision="bf16-mixed"),
    "pp2-nadam": Run(module=partial(Staged, NADAM), strategy=PP2),
    "pp2-asgd": Run(module=partial(Staged, ASGD), strategy=PP2),
    "pp2-adafactor-bf16": Run(module=partial(Staged, ADAFACTOR), strategy=PP2, precision="bf16-mixed"),
    "pp2-rmsprop-bf16": Run(module=partial(Staged, RMSPROP), strategy=PP2, precision="bf16-mixed"),
    "pp2-vp2-bf16": Run(module=Staged, strategy=VP2, precision="bf16-mixed"),
    "dp2-sharded": Run(module=Staged, strategy=SHARDED),
    "dp2-overlapped-bf16": Run(module=Staged, strategy=OVERLAPPED, precision="bf16-mixed"),
    "plain-overlapped-bf16-true": Run(module=Plain, strategy=OVERLAPPED, precision="bf16-true"),
    "staged-bf16": Run(module=Staged, strategy={}, precision="bf16-mixed"),
    "cp2": Run(module=Staged, strategy={"context_parallel_size": 2}),
    "dp2-pp2-overlapped-bf16": Run(module=Staged, strategy={**VP2, **OVERLAPPED}, precision="bf16-mixed", world_size=4),
}
ONE_FILE: dict[str, Run] = {
    "plain": Run(module=Plain, strategy={}),
    "plain-rmsprop": Run(module=partial(Plain, RMSPROP), strategy={}),
    "plain-bf16": Run(module=Plain, strategy={}, precision="bf16-mixed"),
    "plain-bf16-true": Run(module=Plain, strategy={}, precision="bf16-true"),
}
STAY = (
    *("pp2", "pp2-momentum-bf16", "pp2-nadam", "pp2-rmsprop-bf16", "pp2-vp2-bf16", "plain-overlapped-bf16-true"),
    *("cp2", "dp2-pp2-overlapped-bf16", "plain", "plain-rmsprop", "plain-bf16"),
)
of_every_run = pytest.mark.parametrize("name", thorough_but(RUNS | ONE_FILE, *STAY))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[tuple[Trained, Trained]]]]:
    """Return what looks up an interrupted run; runs of a mark and a number of ranks start at once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def launched(world_size: int, stays: bool) -> list[dict[str, tuple[Trained, Trained]]]:
        runs = {n: r for n, r in (RUNS | ONE_FILE).items() if r.world_size == world_size and (n in STAY) == stays}
        return run_ranks(world_size, interrupt_and_resume, runs, str(folder), timeout=240)

    def look_up(name: str) -> tuple[Path, list[tuple[Trained, Trained]]]:
        ranks = launched((RUNS | ONE_FILE)[name].world_size, name in STAY)
        return folder / name, [rank[name] for rank in ranks]

    return look_up


@of_every_run
def test_a_resumed_run_continues_bit_for_bit(resumed: Any, name: str) -> None:
    for whole, second in resumed(name)[1]:
        steps = len(second.seen.losses)
        assert 0 < steps == len(whole.seen.losses) // 2
        for kind in ("losses", "logged", "grad_norms"):
            assert getattr(second.seen, kind) == getattr(whole.seen, kind)[steps:], kind
        assert second.seen.batches == whole.seen.batches[len(whole.seen.batches) // 2 :]
        assert second.weights.keys() == whole.weights.keys()
        for parameter, value in whole.weights.items():
            assert torch.equal(second.weights[parameter], value), parameter
        assert second.rates == whole.rates
        assert len(set(whole.rates)) == len(whole.rates)
        assert second.num_batches == whole.num_batches == 2 * len(second.seen.batches)
        assert second.payload["note"] == "a text"
        assert second.payload["epoch"] == 0
        assert second.payload["numbers"].tolist() == [0, 1, 2]


@of_every_run
def test_a_model_of_chunks_is_a_directory_and_a_plain_one_a_file(resumed: Any, name: str) -> None:
    paths = sorted(resumed(name)[0].iterdir())
    assert [path.name for path in paths] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]  # and nothing unfinished
    for path in paths:
        assert path.is_dir() == (name in RUNS)
        assert not path.is_dir() or verify(str(path))


# Between Lightning's strategies and ours


def move(first: Any, second: Any, module: Any, folder: str) -> list[Trained]:
    """Resume a run of ``first`` under ``second`` and under ``first`` itself."""
    fit(Run(module=module, strategy=first), 1, folder=folder)
    return [fit(Run(module=module, strategy=strategy), 2, resume=f"{folder}/last.ckpt") for strategy in (second, first)]


@pytest.mark.parametrize(
    ("module", "ways"),
    [
        (Plain, ("ddp", {})),
        (Plain, ({}, "ddp")),
        (Staged, ("ddp", {})),
        pytest.param(Staged, ("ddp", SHARDED), marks=pytest.mark.thorough),
        (Staged, ("ddp", LAYER_WISE)),
    ],
    ids=["plain-to-ours", "plain-to-ddp", "staged", "staged-to-shards", "staged-to-layer-wise"],
)
def test_one_file_goes_from_ddp_to_ours_and_back(module: Any, ways: tuple[Any, Any], tmp_path: Path) -> None:
    for moved, stayed in run_ranks(2, move, *ways, module, str(tmp_path)):
        assert moved.rates == stayed.rates
        assert moved.num_batches == stayed.num_batches
        assert moved.weights.keys() == stayed.weights.keys()
        for parameter, value in stayed.weights.items():  # clipping sums in another order; measured: 1.2e-7
            assert (moved.weights[parameter] - value).abs().max().item() <= 1e-6, parameter


# Refusals


@on_ranks(2, timeout=120)
def test_what_a_run_cannot_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir(exist_ok=True)
    (tmp_path / "text.ckpt").write_text("epoch 3")
    staged, plain = Run(module=Staged, strategy=PP2), Run(module=Plain, strategy={})
    halved = replace(plain, precision="bf16-true")
    for name, run in {"pp2": staged, "file": plain, "copies": halved}.items():
        fit(run, 1, folder=f"{tmp_path}/{name}")
    for path, run, about in (
        ("absent.ckpt", staged, "absent.ckpt does not exist; give the path of a checkpoint"),
        ("nothing", staged, "nothing is a directory, but not a checkpoint"),
        ("text.ckpt", staged, "text.ckpt is not a checkpoint: torch.save did not write it"),
        ("pp2/last.ckpt", replace(staged, strategy=VP2), "the model that wrote it, on the same pipeline stages"),
        ("pp2/last.ckpt", replace(staged, module=partial(Staged, MOMENTUM)), "contains the state of AdamW, but"),
        ("file/last.ckpt", staged, "this run splits the model into tp1 pp2 cp1 dp1"),
        ("file/last.ckpt", Run(module=partial(Plain, ADAMW), strategy=SHARDED), "parameter groups of [2, 2] tensors"),
        ("file/last.ckpt", halved, "lacks the fp32 copies of the parameters"),
        ("copies/last.ckpt", plain, "with fp32 copies of the parameters, which this run does not have"),
    ):
        with refuses((ValueError, FileNotFoundError), about):
            fit(run, 2, resume=f"{tmp_path}/{path}")
    fit(staged, 2, resume=f"{tmp_path}/pp2/last.ckpt")  # nothing is left over from what was refused


@on_ranks(1)
def test_a_flipped_bit_in_one_file_is_found_by_every_reader(tmp_path: Path) -> None:
    module, path = PlainNet(), f"{tmp_path}/a.ckpt"
    trainer = make_trainer({}, max_steps=1)
    trainer.fit(module, loader(8, 2))
    trainer.save_checkpoint(path)
    weight = next(module.parameters()).detach().numpy().tobytes()
    if dist.get_rank() == 0:
        content = Path(path).read_bytes()
        Path(path).write_bytes(content.replace(weight, weight[:-1] + bytes([weight[-1] ^ 0x20]), 1))
    dist.barrier()
    remote = f"memory://{tmp_path}/a.ckpt"
    fsspec.filesystem("memory").pipe(remote, Path(path).read_bytes())
    readers: list[Callable[[], Any]] = [
        lambda: make_trainer({}, max_steps=2).fit(PlainNet(), loader(8, 2), ckpt_path=path),
        lambda: make_trainer({}, max_steps=2).fit(PlainNet(), loader(8, 2), ckpt_path=remote),
        lambda: make_trainer({}).validate(PlainNet(), loader(8, 2), ckpt_path=path),
        lambda: make_trainer({}).test(PlainNet(), loader(8, 2), ckpt_path=path),
        lambda: make_trainer({}).predict(PlainNet(), loader(8, 2), ckpt_path=path),
        lambda: StagedNet.load_from_checkpoint(path),
        lambda: StagedNet.load_from_checkpoint(remote),
    ]
    for read in readers:
        with refuses(ValueError, "is damaged: the checksum of its record"):
            read()
    MCoreCheckpointIO(verify="sizes").load_checkpoint(path)


# The rest of what ModelCheckpoint and the trainer do


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(PP2, id="pp2"),
        pytest.param(OVERLAPPED, marks=pytest.mark.thorough, id="dp2-overlapped"),
        pytest.param({}, id="dp2"),
    ],
)
@on_ranks(2, timeout=120)
def test_what_a_user_knows_of_checkpoints_works(strategy: dict[str, Any], tmp_path: Path) -> None:
    trainer_arguments = {
        "enable_checkpointing": True,
        "accumulate_grad_batches": 2,
        "default_root_dir": f"{tmp_path}/own",
    }
    keep = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last="link", filename="{epoch}")
    bare = ModelCheckpoint(tmp_path, save_weights_only=True, filename="weights")
    trainer = make_trainer(strategy, max_epochs=4, callbacks=[keep, bare], **trainer_arguments)
    module = StagedNet()
    trainer.fit(module, loader(8, 2), loader(4, 2))
    val_loss = float(trainer.validate(module, loader(4, 2), verbose=False)[0]["val_loss"])
    trainer.save_checkpoint(f"{tmp_path}/afterwards.ckpt")
    after = weights(module)
    kept = [path.name for path in tmp_path.iterdir()]
    assert len(kept) == 5
    assert {"afterwards.ckpt", "last.ckpt", "weights.ckpt"} < set(kept)
    assert (tmp_path / "last.ckpt").is_symlink()
    assert float(keep.best_model_score or 0) == min(float(score) for score in keep.best_k_models.values())
    for name, path in (("weights", bare.best_model_path), ("afterwards", f"{tmp_path}/afterwards.ckpt")):
        other = StagedNet(make_optimizer=ADAMW)
        [logged] = make_trainer(strategy).validate(other, loader(4, 2), ckpt_path=path, verbose=False)
        assert logged["val_loss"] == val_loss, name
        assert all(torch.equal(after[key], value) for key, value in weights(other).items()), name
    scores = {Path(path).name: float(score) for path, score in keep.best_k_models.items()}
    for which, path in (("best", keep.best_model_path), ("last", f"{tmp_path}/last.ckpt")):
        [logged] = trainer.validate(module, loader(4, 2), ckpt_path=which, verbose=False)
        assert logged["val_loss"] == scores[Path(path).resolve().name], which
    epochs: list[int] = []
    watch = LambdaCallback(on_train_epoch_start=lambda trainer, _: epochs.append(trainer.current_epoch))
    resumed = make_trainer(strategy, max_epochs=5, callbacks=[watch], **trainer_arguments)
    resumed.fit(StagedNet(), loader(8, 2), ckpt_path=f"{tmp_path}/afterwards.ckpt")
    assert epochs == [4]
    with pytest.raises(KeyError, match="contains only the model"):
        make_trainer(strategy, max_epochs=9).fit(StagedNet(), loader(8, 2), ckpt_path=bare.best_model_path)


class Remembers(pl.Callback):
    """Has a state of its own."""

    def __init__(self, number: int = 0) -> None:
        self.number, self.times_loaded = number, 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.number = state_dict["number"]
        self.times_loaded += 1


def restore_callbacks(strategy: Any, folder: str) -> dict[str, tuple[int, int]]:
    """Save and validate, test and predict from it; first also read the callbacks' states alone, as Lightning can."""
    found = {}
    for module in (PlainNet, StagedNet):
        path = f"{folder}/{module.__name__}.ckpt"
        trainer = make_trainer(strategy, callbacks=[Remembers(7)])
        trainer.fit(module(), loader(4, 2))
        trainer.save_checkpoint(path)
        for way in ("validate", "test", "predict"):
            remembers, net = Remembers(), module()
            trainer = make_trainer(strategy, callbacks=[remembers])
            trainer.strategy.connect(net)
            trainer._checkpoint_connector.resume_start(path)
            trainer._checkpoint_connector.restore_callbacks()
            alone = remembers.number, remembers.times_loaded
            getattr(trainer, way)(net, loader(4, 2), ckpt_path=path)
            found[f"{module.__name__} {way}"] = (*alone, remembers.number, remembers.times_loaded)
    return found


@pytest.mark.parametrize("strategy", ["ddp", {}], ids=["ddp", "mcore"])
def test_callbacks_get_their_states_back_in_every_evaluation(strategy: Any, tmp_path: Path) -> None:
    [found] = run_ranks(1, restore_callbacks, strategy, str(tmp_path))
    assert set(found.values()) == {(7, 1, 7, 2)}


def save_through(number: int, path: str) -> list[str]:
    """Save through so many AsyncCheckpointIO around each other; return the classes, from the outermost."""
    wrapped: Any = None
    for _ in range(number):
        wrapped = AsyncCheckpointIO(wrapped)
    trainer = make_trainer({"checkpoint_io": wrapped})
    first = PlainNet()
    trainer.fit(first, loader(4, 2))
    trainer.save_checkpoint(path)
    names: list[str] = []
    io: Any = trainer.strategy.checkpoint_io
    while io is not None:
        names.append(type(io).__name__)
        io.teardown()  # waits for its thread
        io = getattr(io, "checkpoint_io", None)
    second = PlainNet()
    make_trainer({}).validate(second, loader(4, 2), ckpt_path=path, verbose=False)
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())
    return names


@on_ranks(1)
def test_a_wrapped_checkpoint_io_gets_ours_inside_however_deep(tmp_path: Path) -> None:
    found = [save_through(number, f"{tmp_path}/{number}.ckpt") for number in (1, 2, 3)]
    assert found == [[*["AsyncCheckpointIO"] * number, "MCoreCheckpointIO"] for number in (1, 2, 3)]


# Layers of Megatron with a state dict of their own


EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}


@pytest.mark.parametrize(
    ("strategy", "precision", "optimizer"),
    [
        pytest.param(TP2, "32-true", "adamw", marks=pytest.mark.thorough, id="tp2"),
        pytest.param(TP2, "bf16-mixed", "adamw", id="tp2-bf16"),
        pytest.param(PP2, "bf16-mixed", "adamw", marks=pytest.mark.thorough, id="pp2-bf16"),
        pytest.param(EP2, "32-true", "adamw", id="ep2-sharded"),
        pytest.param(LAYER_WISE, "bf16-mixed", "muon", id="layer-wise-muon-bf16"),
        pytest.param(LAYER_WISE, "16-mixed", "adamw", marks=pytest.mark.thorough, id="layer-wise-fp16"),
        pytest.param(TP2, "32-true", "muon", marks=pytest.mark.thorough, id="tp2-muon"),
    ],
)
@on_ranks(2, timeout=120)
def test_a_gpt_resumes_bit_for_bit(strategy: dict[str, Any], precision: str, optimizer: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    sizes |= EXPERTS if strategy == EP2 else {}
    losses = []
    for epochs, resume in ((1, None), (2, None), (2, f"{tmp_path}/last.ckpt")):
        pl.seed_everything(1, verbose=False)
        module = MCoreGPT(
            vocab_size=16,
            seq_length=8,
            transformer=sizes,
            recipe=Recipe(learning_rate=1e-2, min_learning_rate=1e-2, optimizer=optimizer),  # type: ignore[arg-type]
        )
        seen = run_fit(
            module,
            strategy,
            texts(16, 8, 16, batch_size=2),
            ckpt_path=resume,
            callbacks=[ModelCheckpoint(tmp_path, save_last=True)] if epochs == 1 else [],
            enable_checkpointing=epochs == 1,
            accumulate_grad_batches=2,
            max_epochs=epochs,
            gradient_clip_val=1.0,
            precision=precision,
        )
        losses.append(seen.losses)
    _, whole, second = losses
    assert len(second) == (2 if strategy in (EP2, LAYER_WISE) else 4)  # two model copies share the samples
    assert second == whole[len(second) :]


# A plain module goes between a file and a directory, and between numbers of ranks


def start(run: Run, folder: str) -> Trained:
    """Train the first epoch on this rank."""
    return fit(run, 1, folder)


def go_on(run: Run, folder: str) -> Trained:
    """Train the second."""
    return fit(run, 2, resume=f"{folder}/last.ckpt")


WAYS = {"file-to-shards": ({}, SHARDED), "shards-to-file": (SHARDED, {}), "ddp-to-shards": ("ddp", OVERLAPPED)}


@pytest.mark.parametrize("way", thorough_but(WAYS, "file-to-shards", "shards-to-file"))
def test_a_plain_module_goes_between_files_and_shards(way: str, tmp_path: Path) -> None:
    first, second = WAYS[way]
    run_ranks(2, start, Run(module=Plain, strategy=first), str(tmp_path), timeout=120)
    moved = run_ranks(2, go_on, Run(module=Plain, strategy=second), str(tmp_path), timeout=120)
    stayed = run_ranks(2, go_on, Run(module=Plain, strategy=first), str(tmp_path), timeout=120)
    for rank, same in zip(moved, stayed, strict=True):
        assert rank.rates == same.rates
        for parameter, value in same.weights.items():  # sums in another order; measured: 1.2e-7
            assert (rank.weights[parameter] - value).abs().max().item() <= 1e-6, parameter


def load_only(run: Run, folder: str) -> Trained:
    """Load a run that is over on this rank."""
    return fit(run, 1, resume=f"{folder}/last.ckpt")


@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.thorough)])
def test_a_plain_module_goes_to_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    saved = run_ranks(before, start, Run(module=Plain, strategy=SHARDED, world_size=before), str(tmp_path), timeout=120)
    then = Run(module=Plain, strategy=OVERLAPPED, world_size=after)
    for rank in run_ranks(after, load_only, then, str(tmp_path), timeout=120):
        assert all(torch.equal(rank.weights[name], value) for name, value in saved[0].weights.items())
    for rank in run_ranks(after, go_on, then, str(tmp_path), timeout=120):
        assert any(not torch.equal(rank.weights[name], value) for name, value in saved[0].weights.items())


# What a module has beside its parameters, and a disk that refuses


class Furnished(Plain):
    """A plain module with state of every kind."""

    def __init__(self, more: bool = False, left_out: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.history = ["begun"]
        self.left_out = left_out
        self.register_buffer("empty", torch.zeros(0))
        if more:
            self.register_buffer("added", torch.ones(2))

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = state["history"]

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for name, value in super().state_dict().items() if name not in self.left_out}

    def on_train_end(self) -> None:
        self.history.append("ended")


class FurnishedStaged(Staged):
    """A module of chunks with another buffer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.ones(2))


def furnish(folder: str) -> dict[str, Tensor]:
    """Save and load such a module on this rank, expect what is refused, and return the weights."""
    sharded = Run(module=Furnished, strategy=SHARDED)
    module = Furnished()
    trainer = make_trainer(SHARDED, enable_checkpointing=True, callbacks=[ModelCheckpoint(folder, save_last=True)])
    with mock.patch.object(checkpointing, "rank_zero_info") as info:
        trainer.fit(module, loader(8, 2), loader(4, 2))
        trainer.save_checkpoint(f"{folder}/ended.ckpt")
    [[[said], _]] = info.call_args_list  # once in a run
    assert said.endswith(
        "Furnished.load_from_checkpoint cannot read; use lightning_mcore.build_from_checkpoint(Furnished, path)"
    )
    other = Furnished()
    make_trainer(SHARDED).validate(other, loader(4, 2), ckpt_path=f"{folder}/ended.ckpt", verbose=False)
    assert other.history == ["begun", "ended"]
    with refuses(RuntimeError, "connected ranks"):
        build_from_checkpoint(Furnished, f"{folder}/ended.ckpt")
    assert fit(sharded, 2, resume=f"{folder}/last.ckpt").num_batches == 2 + 4
    first = next(iter(dict(module.named_parameters())))
    with refuses(ValueError, "1 parameters are trained but not in state_dict()"):
        fit(replace(sharded, module=partial(Furnished, left_out=(first,))), 1, f"{folder}/less")
    fit(Run(module=Staged, strategy=PP2), 1, f"{folder}/staged")
    for run, path in (
        (replace(sharded, module=partial(Furnished, more=True)), f"{folder}/last.ckpt"),
        (Run(module=FurnishedStaged, strategy=PP2), f"{folder}/staged/last.ckpt"),
    ):
        with refuses(ValueError, "last.ckpt does not fit this model: it lacks added;"):
            fit(run, 2, resume=path)
    for strategy in (SHARDED, {}):
        trainer = make_trainer(strategy)
        trainer.fit(Plain(), loader(8, 2))
        with refuses(OSError, "checkpoint.json/x.ckpt could not be saved: not a directory"):
            trainer.save_checkpoint(f"{folder}/last.ckpt/checkpoint.json/x.ckpt")
    return weights(module)


def test_state_of_every_kind_is_kept_and_a_refused_save_ends_on_every_rank(tmp_path: Path) -> None:
    saved, _ = run_ranks(2, furnish, str(tmp_path), timeout=120)
    whole = build_from_checkpoint(Furnished, tmp_path / "ended.ckpt")
    assert whole.history == ["begun", "ended"]
    for name, value in saved.items():
        assert torch.equal(dict(whole.named_parameters())[name], value)
