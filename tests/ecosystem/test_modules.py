# SPDX-License-Identifier: Apache-2.0
"""Modules of other kinds: on two ranks, ``MCoreStrategy()`` gives them the numbers of ``"ddp"``.

They are equal bit for bit until gradients are clipped: Megatron adds up the squares of a norm in another order. A
network with batch norms multiplies such a difference in every step, so a clipped run has one step. Its learning rate is
1, so that its weights contain the gradient.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.support.ranks import run_ranks
from tests.support.toy import run_fit, weights

ROWS, BATCH = 48, 4
CLIPPED: dict[str, Any] = {"lr": 1.0, "max_steps": 1, "gradient_clip_val": 0.1}
CLIP_TOLERANCE = 1e-8  # measured: 3.7e-9
Sample = dict[str, Tensor]
Built = tuple[nn.Module, Callable[[nn.Module, Sample], Tensor], list[Sample]]


def _classifier(model: nn.Module, size: int) -> Built:
    samples = [{"image": torch.randn(3, size, size), "label": torch.tensor(row % 5)} for row in range(ROWS)]

    def loss(model: nn.Module, batch: Sample) -> Tensor:
        return functional.cross_entropy(model(batch["image"]), batch["label"])

    return model, loss, samples


def _transformers(model: nn.Module, sample: Callable[[], Sample]) -> Built:
    return model, lambda model, batch: model(**batch).loss, [sample() for _ in range(ROWS)]


def timm_vit() -> Built:
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 5}
    return _classifier(timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.1, **sizes), 32)


def timm_convnext() -> Built:
    import timm

    sizes = {"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64), "num_classes": 5}
    return _classifier(timm.create_model("convnext_atto", **sizes), 64)


def resnet() -> Built:
    """With running statistics of batches, which are buffers that ranks do not share."""
    from torchvision.models import resnet18

    return _classifier(resnet18(num_classes=5), 32)


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

    def sample() -> Sample:
        tokens = torch.randint(4, 100, (16,))
        masked = torch.rand(16) < 0.3
        masked[0] = True
        return {"input_ids": tokens.masked_fill(masked, 3), "labels": tokens.masked_fill(~masked, -100)}

    return _transformers(BertForMaskedLM(BertConfig(vocab_size=100, **sizes)), sample)


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}

    def sample() -> Sample:
        return {"input_ids": torch.randint(1, 100, (12,)), "labels": torch.randint(1, 100, (7,))}

    return _transformers(T5ForConditionalGeneration(T5Config(vocab_size=100, **sizes)), sample)


def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, num_mel_bins=16,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip

    def sample() -> Sample:
        return {"input_features": torch.randn(16, 40), "labels": torch.randint(3, 100, (6,))}

    return _transformers(WhisperForConditionalGeneration(config), sample)


def diffusion_transformer() -> Built:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=100,
    )

    def loss(model: nn.Module, batch: Sample) -> Tensor:
        noised = batch["image"] + batch["noise"]
        found = model(noised, timestep=batch["time"], class_labels=batch["label"]).sample
        return functional.mse_loss(found, batch["noise"])

    samples = [
        {
            "image": torch.randn(4, 8, 8),
            "noise": torch.randn(4, 8, 8),
            "time": torch.tensor(row * 3),
            "label": torch.tensor(row % 10),
        }
        for row in range(ROWS)
    ]
    return model, loss, samples


class Task(pl.LightningModule):
    """A model and its loss, without a word about any strategy."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Sample], Tensor], lr: float) -> None:
        super().__init__()
        self.net, self.loss, self.lr = model, loss, lr
        self.losses: list[float] = []

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def train(
    build: Callable[[], Built], strategy: Any, lr: float, **arguments: Any
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train in windows of two batches; return losses, weights and buffers of this rank."""
    pl.seed_everything(7)
    model, loss, samples = build()
    task = Task(model, loss, lr)
    torch.manual_seed(11)  # of dropout
    loader = DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]
    run_fit(task, strategy, loader, accumulate_grad_batches=2, **arguments)
    return task.losses, weights(task), {name: buffer.clone() for name, buffer in task.named_buffers()}


MODULES = {
    timm_vit: ("timm", "a vision transformer with stochastic depth"),
    timm_convnext: ("timm", "ConvNeXt"),
    resnet: ("torchvision", "ResNet with batch norms"),
    bert: ("transformers", "BERT, masked tokens"),
    t5: ("transformers", "T5, encoder and decoder"),
    whisper: ("transformers", "Whisper"),
    diffusion_transformer: ("diffusers", "a diffusion transformer"),
}


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, marks=pytest.mark.works_with(package, f'{what}: same numbers as `"ddp"` on 2 ranks'))
        for build, (package, what) in MODULES.items()
    ],
    ids=[build.__name__ for build in MODULES],
)
def test_a_module_of_another_kind_has_the_numbers_of_ddp(build: Callable[[], Built]) -> None:
    for arguments, tolerance in (({"lr": 0.002, "max_epochs": 2}, 0.0), (CLIPPED, CLIP_TOLERANCE)):
        expected = run_ranks(2, train, build, "ddp_find_unused_parameters_true", **arguments)
        found = run_ranks(2, train, build, {}, **arguments)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[0] == theirs[0]
            for mine, of_ddp in zip(ours[1:], theirs[1:], strict=True):
                assert mine.keys() == of_ddp.keys()
                for name, tensor in of_ddp.items():
                    torch.testing.assert_close(
                        mine[name], tensor, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
                    )
