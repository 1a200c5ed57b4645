# SPDX-License-Identifier: Apache-2.0
"""LightningModules of public repositories, unchanged: on two ranks they have the numbers of ``"ddp"``.

Their weights and buffers are equal bit for bit. Logged means differ in their last digits: ours are in fp64.

Each repository is cloned at one commit. ``PUBLIC_MODULES`` may name a folder of checkouts instead, called
``owner+name``. Nothing of them is part of this project.
"""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer, weights

ROWS, BATCH, EPOCHS = 48, 4, 2
LOGGED_TOLERANCE = 1e-7  # measured: 3.9e-8

Built = tuple[pl.LightningModule, Any]  # a module, and rows, a DataLoader or None if the module brings its own


def template() -> Built:
    """Logs metric objects of torchmetrics, in validation too, which its learning rate depends on."""
    from src.models.components.simple_dense_net import SimpleDenseNet
    from src.models.mnist_module import MNISTLitModule

    optimizer = partial(torch.optim.Adam, lr=0.001)
    scheduler = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", patience=0)
    module = MNISTLitModule(SimpleDenseNet(), optimizer, scheduler, compile=False)
    rows = _Rows([(torch.randn(1, 28, 28), row % 10) for row in range(ROWS)])
    return module, pl.LightningDataModule.from_datasets(rows, rows, batch_size=BATCH, num_workers=0)


def gan() -> Built:
    """Manual optimization with two optimizers, which take turns."""
    from generative_adversarial_net import GAN

    return GAN(img_shape=(1, 8, 8)), [(torch.rand(1, 8, 8) * 2 - 1, 0) for _ in range(ROWS)]


def ppo() -> Built:
    """Every rank plays in an environment of its own, and makes its batches from what it sees."""
    import gym
    from reinforce_learn_ppo import PPOLightning

    gym.register(
        id="Poles-v0",
        entry_point="gym.envs.classic_control.cartpole:CartPoleEnv",
        max_episode_steps=200,
        disable_env_checker=True,  # it needs NumPy 1
    )
    module = PPOLightning("Poles-v0", batch_size=32, steps_per_epoch=128)
    module.state = torch.FloatTensor(module.env.reset(seed=int(os.environ["RANK"])))
    return module, None


def gin() -> Built:
    """Its batches are graphs, not tensors."""
    from gin import Model
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    def graph(row: int) -> Any:
        nodes = 5 + row % 4
        return Data(x=torch.randn(nodes, 6), edge_index=torch.randint(nodes, (2, 12)), y=torch.tensor([row % 3]))

    rows = [graph(row) for row in range(ROWS)]
    share = rows[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    return Model(6, 3), GraphLoader(share, batch_size=BATCH)


def text_to_speech() -> Built:
    """Manual optimization with an optimizer of its own, which steps once in four batches."""
    from AR.models.t2s_lightning_module import Text2SemanticLightningModule

    model = {"hidden_dim": 32, "embedding_dim": 32, "head": 2, "n_layer": 2, "dropout": 0}
    schedule = {"lr": 0.01, "lr_init": 1e-5, "lr_end": 1e-4, "warmup_steps": 2, "decay_steps": 100}
    sizes = {"vocab_size": 33, "EOS": 32, "phoneme_vocab_size": 20}
    config = {"model": model | sizes, "optimizer": schedule, "train": {}}

    def row() -> dict[str, Tensor]:
        return {
            "phoneme_ids": torch.randint(20, (6,)),
            "phoneme_ids_len": torch.tensor(6),
            "semantic_ids": torch.randint(32, (8,)),
            "semantic_ids_len": torch.tensor(8),
            "bert_feature": torch.randn(1024, 6),
        }

    return Text2SemanticLightningModule(config, Path.cwd()), [row() for _ in range(ROWS)]


def perceiver_ar() -> Built:
    """Asks the trainer's data module for its tokenizer, and has no ``training_step`` of its own class."""
    from perceiver.model.text.clm.lightning import LitCausalLanguageModel

    module = LitCausalLanguageModel(
        vocab_size=40, max_seq_len=16, max_latents=8, num_channels=32, num_heads=2, num_self_attention_layers=2
    )

    class Text(pl.LightningDataModule):
        tokenizer = types.SimpleNamespace(pad_token="[PAD]", padding_side="left")
        ds_valid = None

        def text_preprocessor(self) -> None:
            """Not needed without samples in validation."""

        def train_dataloader(self) -> Any:
            rows = [torch.randint(40, (17,)) for _ in range(ROWS)]
            return DataLoader(
                [(row[1:], row[:-1], torch.zeros(16, dtype=torch.bool)) for row in rows],  # type: ignore[arg-type]
                batch_size=BATCH,
            )

    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=0.001)  # LightningCLI adds it
    return module, Text()


def simclr() -> Built:
    """Gathers the views of all ranks for its loss, with an optimizer of its own and batch norms."""
    from omegaconf import OmegaConf
    from solo.methods import SimCLR

    config = {
        "method": "simclr",
        "backbone": {"name": "resnet18"},
        "data": {"dataset": "cifar10", "num_large_crops": 2, "num_small_crops": 0, "num_classes": 10},
        "optimizer": {"name": "lars", "batch_size": BATCH, "lr": 0.3, "classifier_lr": 0.1, "weight_decay": 1e-5},
        "scheduler": {"name": "warmup_cosine"},
        "method_kwargs": {"proj_output_dim": 16, "proj_hidden_dim": 32, "temperature": 0.2},
        "max_epochs": EPOCHS,
    }
    rows = [(row, [torch.randn(3, 32, 32), torch.randn(3, 32, 32)], row % 10) for row in range(ROWS)]
    return SimCLR(OmegaConf.create(config)), rows


def deep_ar() -> Built:
    """An LSTM that learns a distribution."""
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    module = DeepARLightningModule({"freq": "D", "context_length": 8, "prediction_length": 4, "lags_seq": [1, 2, 7]})

    def row() -> dict[str, Tensor]:
        drawn = {
            name: value[0] if value.dtype == torch.long else torch.randn_like(value[0])
            for name, value in module.inputs.zeros().items()
        }
        drawn["past_observed_values"] = torch.ones_like(drawn["past_observed_values"])
        return drawn | {"future_target": torch.randn(4), "future_observed_values": torch.ones(4)}

    return module, [row() for _ in range(ROWS)]


@dataclass(frozen=True)
class Public:
    """Where a module comes from, and what it is."""

    repository: str
    commit: str
    folder: str  # that its own scripts import from
    what: str


_EXAMPLES = "examples/pytorch/domain_templates"
_LIGHTNING = ("Lightning-AI/pytorch-lightning", "be98784a1a03581b7051a355ae1084fd352d7cea", _EXAMPLES)
PUBLIC: dict[Callable[[], Built], Public] = {
    template: Public(
        "ashleve/lightning-hydra-template",
        "bddbc24b82ab6ccfa6243e815a49dc5bfe8d4144",
        "",
        "MNISTLitModule, an image classifier",
    ),
    gan: Public(*_LIGHTNING, "GAN, with manual optimization"),
    ppo: Public(*_LIGHTNING, "PPOLightning, reinforcement learning with manual optimization"),
    gin: Public(
        "pyg-team/pytorch_geometric",
        "5c6461b2305ad068a6d61165b3c55852a11aaa41",
        "examples/pytorch_lightning",
        "GIN, a graph classifier",
    ),
    text_to_speech: Public(
        "RVC-Boss/GPT-SoVITS",
        "48b1a0169a28582a8984402f82cf438d3bfa6aca",
        "GPT_SoVITS",
        "Text2SemanticLightningModule, text to speech with manual optimization",
    ),
    perceiver_ar: Public(
        "krasserm/perceiver-io",
        "46c63250d93eb351bcd8ff8ba9113f5025941dd9",
        "",
        "LitCausalLanguageModel, a language model",
    ),
    simclr: Public(
        "vturrisi/solo-learn",
        "9187ea39c2c3f43c455ab06664d2b019a9802954",
        "",
        "SimCLR, self-supervised learning on images",
    ),
    deep_ar: Public(
        "awslabs/gluonts", "3d05d465f97096583d87a6827948e0d0d3cb7e92", "src", "DeepAR, a time-series forecaster"
    ),
}


def checkout(public: Public, folder: Path) -> Path:
    """Return a checkout of the repository at its commit: a given one, or a clone in ``folder``."""
    given = os.environ.get("PUBLIC_MODULES")
    path = Path(given or folder) / public.repository.replace("/", "+")
    git = ["git", "-C", str(path)]
    if given is None:
        path.mkdir(parents=True)
        fetch = ["fetch", "--quiet", "--depth=1", f"https://github.com/{public.repository}", public.commit]
        for command in (["init", "--quiet"], fetch, ["checkout", "--quiet", "FETCH_HEAD"]):
            if subprocess.run([*git, *command], capture_output=True).returncode:
                pytest.skip(
                    "the repositories of public modules cannot be cloned; set PUBLIC_MODULES to their checkouts"
                )
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert found == public.commit, f"{path} is at {found or 'no commit'}; check out {public.commit}"
    return path


def train(
    build: Callable[[], Built], sources: str, strategy: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Train for two epochs; return this rank's weights, its buffers, and what was logged."""
    sys.path.insert(0, sources)
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith("lightning.pytorch."):  # some repositories call it by its other name
            sys.modules[f"pytorch_lightning{name.removeprefix('lightning.pytorch')}"] = module
    pl.seed_everything(7)
    task, data = build()
    torch.manual_seed(11)  # of dropout and of noise
    trainer = make_trainer(strategy, max_epochs=EPOCHS)
    if isinstance(data, list):
        data = DataLoader(_Rows(data), batch_size=BATCH)
    trainer.fit(task, data)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(task), {name: buffer.clone() for name, buffer in task.named_buffers()}, logged


class _Rows(Dataset[Any]):
    """A list as a dataset."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            build,
            marks=pytest.mark.works_with(
                f"{public.repository}@{public.commit[:7]}", f'{public.what}: same numbers as `"ddp"` on 2 ranks'
            ),
        )
        for build, public in PUBLIC.items()
    ],
    ids=[build.__name__ for build in PUBLIC],
)
def test_a_public_module_has_the_numbers_of_ddp(
    build: Callable[[], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = str(checkout(PUBLIC[build], tmp_path / "sources") / PUBLIC[build].folder)
    monkeypatch.chdir(tmp_path)
    expected = run_ranks(2, train, build, sources, "ddp_find_unused_parameters_true")
    found = run_ranks(2, train, build, sources, {})
    for (*ours, logged), (*theirs, expected_logged) in zip(found, expected, strict=True):
        for mine, of_ddp in zip(ours, theirs, strict=True):
            assert mine.keys() == of_ddp.keys()
            for name, value in of_ddp.items():
                torch.testing.assert_close(
                    mine[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
                )
        assert logged == pytest.approx(expected_logged, rel=LOGGED_TOLERANCE, nan_ok=True)
