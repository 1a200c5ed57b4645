# SPDX-License-Identifier: Apache-2.0
"""Every family after the first nine equals transformers on every layout, and comes back bit for bit.

One start of the ranks of a layout proves of each family that it allows: logits, the loss and each gradient after two
updates in fp32 as in ``test_hf_families.py``, the tokens of a greedy continuation, every bit of the exported weights,
and that ``plan`` counts exactly the parameters of each rank.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from lightning_mcore.interop.export import export_model
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import count_of, rank_tensors
from tests.parity.hf_training import (
    LENGTH,
    STEPS,
    Seen,
    Watched,
    differences,
    predict_and_step,
    reference,
    reference_model,
)
from tests.support.hf_models import MORE_FAMILIES, read_tensors, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # in this process warnings are errors, and Megatron has many
]

EXPERTS = (
    "kimi_k2",
    "dots1",
    "granitemoe",
    "olmoe",
    "minimax_m2",
    "gpt_oss",
    "ernie4_5_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "nemotron_h",
    "kimi_linear",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "solar_open",
    "exaone_moe",
    "hunyuan_v1_moe",
    "afmoe",
    "mistral4",
    "llama4_text",
)
DENSE = tuple(name for name in MORE_FAMILIES if name not in EXPERTS)
STRETCHED = ("llama, other constants", "llama, stretched with the length", "phi3, longrope")
LATENT = "nemotron_h, latent experts"
VARIED = (
    *MORE_FAMILIES,
    *STRETCHED,
    "llama, all biases",
    "granitemoehybrid, dense",
    "granitemoehybrid, no Mamba",
    LATENT,
    "llama4_text, dense",
)
PROMPT, CONTINUED = [5, 17, 3], 4

LAYOUTS: dict[Layout, tuple[str, ...]] = {
    Layout(tp=2): (*DENSE, "olmo2, one key head", "granitemoehybrid, dense", "llama4_text, dense"),
    Layout(moe=True, tp=2, sp=True, ep=2, etp=1): (*EXPERTS, "minimax_m2, one key head", LATENT),
}
MORE_LAYOUTS: dict[Layout, tuple[str, ...]] = {
    Layout(): VARIED,
    Layout(tp=2, sp=True): VARIED,
    Layout(pp=2): VARIED,
    Layout(cp=2): VARIED,
    Layout(tp=2, pp=2, sp=True): VARIED,
    Layout(pp=2, vp=2): VARIED,
    Layout(tp=2, cp=2, sp=True): VARIED,
    Layout(tp=4, sp=True): ("olmo2", "olmo2, one key head", "olmo3"),
    Layout(moe=True, dp=2, ep=2): (*EXPERTS, LATENT),
}


class Proven(Watched):
    """Also continues a prompt and writes itself, before it is trained."""

    out: str
    continued: list[int]

    def on_predict_end(self) -> None:
        self.continued = self.generate(PROMPT, CONTINUED, temperature=0)
        export_model(self, self.out)


def prove(jobs: dict[str, tuple[str, str]], layout: Layout) -> dict[str, tuple[Seen, list[int]]]:
    """Predict, continue a prompt, export and train for three steps with each model, on this rank of a layout."""
    found = {}
    for name, (folder, out) in jobs.items():
        try:
            module = Proven.from_pretrained(folder, seq_length=LENGTH)
            module.out = out
            found[name] = predict_and_step(module, layout, STEPS), module.continued
            here = count_of(rank_tensors(GPTFields.of(module.hparams), module.trainer.strategy.layout, _stage()))
            trained = sum(parameter.numel() for parameter in module.model.parameters())
            kept = sum(tensor.numel() for key, tensor in module.model.named_buffers() if ".indexer." in key)
            assert (here.total, here.trained_dense + here.trained_expert) == (trained + kept, trained)
        except Exception as error:
            raise RuntimeError(f"{name}: {error}") from error
    return found


def _stage() -> int:
    stage: int = parallel_state.get_pipeline_model_parallel_rank()
    return stage


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_three_steps_the_weights_and_the_words_are_those_of_transformers(layout: Layout, tmp_path: Path) -> None:
    _compare(layout, LAYOUTS[layout], tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", MORE_LAYOUTS, ids=lambda layout: layout.id)
def test_they_are_on_every_other_layout(layout: Layout, tmp_path: Path) -> None:
    _compare(layout, MORE_LAYOUTS[layout], tmp_path)


def _compare(layout: Layout, names: Iterable[str], out: Path) -> None:
    jobs = {name: (str(tiny_folder(name)), str(out / name)) for name in names}
    ranks = run_ranks(layout.world_size, prove, jobs, layout, timeout=600)
    wrong = {name: found for name in jobs if (found := differences(reference(name), [seen[name][0] for seen in ranks]))}
    assert wrong == {}
    for name, (folder, written) in jobs.items():
        before, after = dict(read_tensors(folder)), dict(read_tensors(written))
        assert before.keys() == after.keys(), name
        different = [key for key, tensor in before.items() if not _identical(tensor, after[key])]
        assert not different, name
        assert all(seen[name][1] == _continued(name) for seen in ranks), name


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _continued(name: str) -> list[int]:
    model = reference_model(name)
    tokens = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=CONTINUED, do_sample=False, eos_token_id=None, use_cache=False
    )
    found: list[int] = tokens[0].tolist()
    return found
