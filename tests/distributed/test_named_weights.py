# SPDX-License-Identifier: Apache-2.0
"""Weights streamed from a run are those it would export, and a model that receives them computes the same logits."""

import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCoreGPT, Recipe, single_process
from lightning_mcore.hf import export_model, hf_model, named_weights
from lightning_mcore.interop.export_adapter import save_adapter
from tests.distributed.test_hf_export import identical
from tests.support.hf_models import VOCAB_SIZE, read_tensors, tiny_folder
from tests.support.ranks import run_ranks
from tests.support.sentences import refuses
from tests.support.toy import OVERLAPPED, PP2, make_trainer, texts

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# The vocabulary of 101 is padded under tensor parallelism; qwen2's embedding is its output layer too
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "tp2": ("qwen2", TP2 | OVERLAPPED),
        "pp2": ("qwen2", PP2),
        "pp2-vp2": ("llama", {**PP2, "virtual_pipeline_model_parallel_size": 2}),
        "ep2": ("mixtral", {"expert_model_parallel_size": 2} | OVERLAPPED),
        "dp2": ("llama", OVERLAPPED),
    },
    4: {
        "tp2-pp2": ("qwen2", TP2 | PP2),
        "tp2-ep2": ("qwen3_moe", {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
        "ep2-pp2": ("deepseek_v3", {**PP2, "expert_model_parallel_size": 2}),
    },
}
LOGITS = 1e-5  # of logits around 1
PROBES = torch.randint(1, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(7))
PIECE = 20_000


class Tuned(pl.LightningModule):
    """A module written for transformers, which hands its weights on after its second step."""

    def __init__(self, path: str, out: str) -> None:
        super().__init__()
        self.path, self.out = path, out

    def configure_model(self) -> None:
        self.model = hf_model(self, self.path)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch).loss
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2 and not hasattr(self, "streamed"):
            self.streamed = dict(named_weights(self.model, piece_size=PIECE))
            self.logits = self.model(PROBES).logits
            self.trainer.save_checkpoint(f"{self.out}.ckpt")  # which gathers all parameters by itself
            self.model.save_pretrained(self.out)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows() -> Any:
    text = torch.randint(1, VOCAB_SIZE, (16, 16), generator=torch.Generator().manual_seed(3))
    return DataLoader(text, batch_size=2)  # type: ignore[arg-type]


def stream_each(runs: dict[str, tuple[str, dict[str, Any], str]]) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """Train on each layout; return the weights that this rank received halfway, and the logits of that moment."""
    found = {}
    for name, (folder, layout, out) in runs.items():
        pl.seed_everything(1, verbose=False)
        module = Tuned(folder, out)
        make_trainer(layout, max_steps=3, accumulate_grad_batches=2).fit(module, rows())
        found[name] = module.streamed, module.logits.detach()
    return found


class Receiver:
    """Stands for an engine that generates: it has a model of its own, and takes weights as vLLM's models do."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(self.folder)
        self.model, info = getattr(transformers, config.architectures[0]).from_pretrained(
            None, config=config, state_dict=dict(weights), output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]

    @torch.no_grad()
    def logits(self) -> Tensor:
        logits: Tensor = self.model.eval()(PROBES).logits
        return logits


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_engine_that_receives_the_weights_of_any_layout_computes_the_same_logits(
    tmp_path: Path, world_size: int
) -> None:
    runs = {
        name: (str(tiny_folder(model)), layout, str(tmp_path / name))
        for name, (model, layout) in LAYOUTS[world_size].items()
    }
    ranks = run_ranks(world_size, stream_each, runs, timeout=240)
    for name, (folder, _, out) in runs.items():
        exported, before = dict(read_tensors(out)), dict(read_tensors(folder))
        assert not torch.equal(exported["model.embed_tokens.weight"], before["model.embed_tokens.weight"]), name
        for found in ranks:
            assert_same(found[name][0], exported, name)
        streamed, logits = ranks[-1][name]
        engine = Receiver(folder)
        engine.load_weights(iter(streamed.items()))
        torch.testing.assert_close(engine.logits(), logits, rtol=0, atol=LOGITS, msg=name)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], name: str) -> None:
    assert found.keys() == wanted.keys(), name
    assert not [key for key in wanted if not identical(found[key], wanted[key])], name


# ---- adapters, and what has changed


class Engine(pl.Callback):
    """Receives after each of two steps: all weights on one rank, changed ones on all, and the adapters alone."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.sent: dict[str, dict[str, bytes]] = {"model": {}, "adapter": {}}
        self.seen: list[dict[str, dict[str, Tensor]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        module, sent, step = pl_module, self.sent, trainer.global_step
        self.seen.append(
            {
                "adapter": dict(named_weights(module, adapter=True)),
                "model": dict(named_weights(module, receivers="first", piece_size=PIECE)),
                "changed": dict(named_weights(module, sent=sent["model"], piece_size=PIECE)),
                "changed adapter": dict(named_weights(module, adapter=True, sent=sent["adapter"], receivers="first")),
                "again": dict(named_weights(module, sent=sent["model"])),
            }
        )
        trainer.save_checkpoint(f"{self.out}/{step}.ckpt")  # which gathers all parameters by itself
        export_model(module, f"{self.out}/model-{step}")
        save_adapter(module, f"{self.out}/adapter-{step}")


def train_adapters(runs: dict[str, tuple[str, dict[str, Any], str]]) -> dict[str, list[dict[str, dict[str, Tensor]]]]:
    """Train adapters on some projections for two steps on each layout; return what an engine received."""
    found = {}
    for name, (folder, layout, out) in runs.items():
        lora = LoRA(r=2, target_modules=["q_proj", "down_proj"])
        module = MCoreGPT.from_pretrained(folder, seq_length=16, lora=lora, recipe=Recipe(learning_rate=1e-2))
        engine = Engine(out)
        make_trainer(layout, max_steps=2, callbacks=[engine]).fit(module, texts(8, 16, VOCAB_SIZE, batch_size=2))
        found[name] = engine.seen
    return found


def test_adapters_are_merged_or_streamed_alone_and_only_what_changed_is_sent_again(tmp_path: Path) -> None:
    layouts = {"tp2": ("qwen3", TP2 | OVERLAPPED), "pp2": ("qwen3", PP2), "dp2": ("qwen3", OVERLAPPED)}
    runs = {name: (str(tiny_folder(model)), layout, str(tmp_path / name)) for name, (model, layout) in layouts.items()}
    for rank, found in enumerate(run_ranks(2, train_adapters, runs, timeout=120)):
        for name, (_, _, out) in runs.items():
            first, second = found[name]
            for step, seen in enumerate(found[name], 1):
                model = dict(read_tensors(f"{out}/model-{step}"))
                adapter = dict(read_tensors(f"{out}/adapter-{step}"))
                assert_same(seen["model"], model if rank == 0 else {}, name)
                assert_same(seen["adapter"], adapter, name)
                assert not seen["again"], name
            assert_same(first["changed"], dict(read_tensors(f"{out}/model-1")), name)
            assert {key.split(".")[-2] for key in second["changed"]} == {"q_proj", "down_proj"}, name
            assert_same(second["changed"], {key: model[key] for key in second["changed"]}, name)
            assert_same(second["changed adapter"], adapter if rank == 0 else {}, name)


# ---- the contract


def break_off(folder: str) -> list[str]:
    """Let one rank stop reading, in several ways; return what each rank is told."""
    module = MCoreGPT.from_pretrained(folder, seq_length=16)
    loader: Any = DataLoader([{"tokens": torch.arange(16)}] * 2)  # type: ignore[arg-type]
    make_trainer(TP2, limit_predict_batches=1).predict(module, loader)
    told = []
    for reader, receivers in ((1, "all"), (0, "first")):
        try:
            for _ in named_weights(module, receivers=receivers, piece_size=PIECE):  # type: ignore[arg-type]
                if dist.get_rank() == reader:
                    break
            told.append("nothing")
        except RuntimeError as error:
            told.append(str(error))
    alive: dict[int, int] = {}
    most = 0
    for _, tensor in named_weights(module, piece_size=PIECE):
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        most = max(most, sum(alive.values()))
    return [*told, str(most <= PIECE)]


def test_a_rank_that_stops_reading_is_not_waited_for_and_a_piece_is_all_that_is_held() -> None:
    sentence = "named_weights() was not read to its end on another rank; read it to its end on every rank"
    first, second = run_ranks(2, break_off, str(tiny_folder("llama")), timeout=60)
    assert first == [sentence, "nothing", "True"]
    assert second == ["nothing", "nothing", "True"]


def test_a_wrong_argument_is_refused_before_anything_is_gathered() -> None:
    module = MCoreGPT.from_pretrained(str(tiny_folder("llama")), seq_length=16)
    with refuses(RuntimeError, "named_weights()"):
        named_weights(module)
    with single_process():
        module.configure_model()
        for option in ({"receivers": "rank 1"}, {"piece_size": "many"}, {"adapter": True}, {"dtype": "int8"}):
            [(name, value)] = option.items()
            with refuses(ValueError, "adapter=False" if name == "adapter" else f"{name}={value!r}"):
                named_weights(module, **option)  # type: ignore[arg-type]
        streamed: Iterator[tuple[str, Tensor]] = named_weights(module)
        assert len(dict(streamed)) == len(dict(read_tensors(tiny_folder("llama"))))
