# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore rehearse``: what it prints, and what it says of wrong input."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.cli import main
from lightning_mcore.cli.rehearse import assumed_values
from lightning_mcore.config.preference import Preference
from lightning_mcore.config.vision import Vision
from lightning_mcore.data.preference.pairs import check_pairs
from lightning_mcore.layers.packed_sequences import packed_sequences
from lightning_mcore.rehearsal.settings import MadeUpRows, batch_with_images

RUN: dict[str, Any] = {
    "trainer": {
        "accelerator": "gpu",
        "devices": 4,
        "precision": "bf16-mixed",
        "max_steps": 1000,
        "accumulate_grad_batches": 2,
        "strategy": {
            "class_path": "lightning_mcore.MCoreStrategy",
            "init_args": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
        },
    },
    "model": {
        "class_path": "lightning_mcore.MCoreGPT",
        "init_args": {
            "vocab_size": 1024,
            "seq_length": 512,
            "transformer": {
                "num_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "normalization": "RMSNorm",
                "bias_dropout_fusion": False,
            },
        },
    },
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Rehearse the file; return the report, and what is on the standard error."""
    path = tmp_path_factory.mktemp("played") / "run.yaml"
    path.write_text(json.dumps(RUN), encoding="utf-8")
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        assert main(["rehearse", str(path), "--json", "--trainer.max_steps=500"]) == 0
    return json.loads(output.getvalue()), errors.getvalue()


def test_two_stages_of_a_file_are_played_and_compared_with_the_plan(played: tuple[dict[str, Any], str]) -> None:
    found, errors = played
    assert (found["world_size"], found["layout"]) == (4, "tp1 pp2 cp1 dp2")
    assert [(rank["rank"], rank["stage"]) for rank in found["ranks"]] == [(0, 0), (2, 1)]
    for rank in found["ranks"]:
        held = {holder["kind"]: holder["bytes"] for holder in rank["holders"]}
        # The optimizer's state is in fp32: a copy and two moments, on two data-parallel ranks.
        assert held["weights"] == pytest.approx(2 * rank["parameters"], rel=0.01)
        assert held["optimizer"] == pytest.approx(12 * rank["parameters"] / 2, rel=0.01)
        assert rank["peak_bytes"] == pytest.approx(found["planned_bytes"][str(rank["stage"])], rel=0.03)
    assert "rank 2: step 2" in errors
    assert "microbatches a step" not in errors


def test_fewer_microbatches_that_have_the_same_peak_are_named(
    file: str, played: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", file, "--trainer.accumulate_grad_batches=12", "--rank", "2"]) == 0
    shown = capsys.readouterr()
    assert "plays 12 microbatches a step; with 2, by" in shown.err
    above, below = shown.out.split("RANK 2: WHAT HOLDS MEMORY")
    assert "here and in the column plan: the torch backend" in above
    assert "torch backend" not in below
    [peak] = re.findall(r"([\d.]+) MiB", above)[:1]
    wanted = played[0]["ranks"][1]["peak_bytes"] / 2**20
    assert float(peak) == pytest.approx(wanted, rel=0.005)  # logged scalars of each microbatch, 512 bytes each


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--devices", "3"], "pipeline_model_parallel_size=2 does not divide the number of ranks"),
        (["--trainer.accelerator=cpu"], "accelerator='cpu' has no GPU to rehearse; set trainer.accelerator to 'gpu'"),
        (["--devices", "4", "--nodes", "3"], "nodes=3 does not divide devices=4"),
        (["--rnk", "1"], "unknown option 'rnk'; did you mean 'rank'?"),
        (["--assume", "net.py=1"], "--assume net.py=1 is not FILE:LINE=VALUE; give a number for a line"),
        (["--assume", "net.py:1=no"], "--assume net.py:1=no is not FILE:LINE=VALUE"),
        (["--image-tokens", "8"], "image_tokens=8 is given, but the model has no vision tower"),
        (
            ["--model.transformer_impl=transformer_engine"],
            "layers of TransformerEngine, and so FP8, are rehearsed with its Python code",
        ),
        # A run of its own process; tests/unit/rehearsal has the sentence too.
        pytest.param(["--rank", "4"], "rank=4 is outside world_size=4; choose 0 to 3", marks=pytest.mark.thorough),
    ],
)
def test_wrong_input_is_one_sentence(
    file: str, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["rehearse", file, *words]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert sentence in shown[0]


def test_fp4_and_a_wrong_recipe_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"class_path": "MCorePrecision"}
    trainer = {name: value for name, value in RUN["trainer"].items() if name != "precision"}
    file = tmp_path / "run.yaml"
    for arguments, sentence in (
        ({"fp4_recipe": "nvfp4"}, "fp4_recipe='nvfp4' cannot be rehearsed"),
        ({"fp8_recipe": "nvfp4"}, "trainer.plugins.fp8_recipe='nvfp4' does not fit"),
    ):
        given["init_args"] = {"precision": "bf16-mixed", **arguments}
        file.write_text(json.dumps({**RUN, "trainer": {**trainer, "plugins": given}}), encoding="utf-8")
        assert main(["rehearse", str(file), "--device", "b200"]) == 2
        assert sentence in capsys.readouterr().err


def test_a_missing_file_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "none.yaml", "--devices", "8"]) == 2
    assert capsys.readouterr().err == (
        "error: none.yaml is not a file; give a YAML or JSON file with the settings of a run\n"
    )


def test_values_that_lines_read_are_given_by_file_and_line() -> None:
    assert assumed_values(["a=b/net.py:12=0.5", "net.py:3=False"]) == {"a=b/net.py:12": 0.5, "net.py:3": 0.0}


def test_made_up_images_have_as_many_tokens_as_the_settings_say() -> None:
    vision = Vision("qwen2_5_vl", {"spatial_merge_size": 2, "patch_size": 14, "in_channels": 3}, 7, 8, (1, 1, 1))
    batch = batch_with_images(vision, 2, 512, 384)
    assert batch["image_grid_thw"].tolist() == [[1, 32, 48]] * 2
    assert batch["pixel_values"].shape == (2 * 32 * 48, 3 * 2 * 14 * 14)
    assert ((batch["tokens"] == 7).sum(1) == 384).all()
    shared = batch_with_images(vision, 2, 1024, 768, ranks=2)
    assert shared["image_grid_thw"].tolist() == [[1, 32, 48]] * 4
    assert shared["pixel_values"].shape == (4 * 32 * 48, 3 * 2 * 14 * 14)
    assert shared["tokens"][0].nonzero().flatten().tolist() == [*range(384), *range(385, 769)]
    full = batch_with_images(vision, 1, 768, 768, ranks=2)  # no room for text between two images
    assert full["image_grid_thw"].tolist() == [[1, 48, 64]]
    assert (full["tokens"] == 7).all()


def test_made_up_rows_have_the_form_of_the_data() -> None:
    plain, packed = MadeUpRows(4, 512, False)[3], MadeUpRows(4, 512, True, Preference(loss="kto"), True)[3]
    assert len(MadeUpRows(4, 512, False)) == 4
    assert plain.keys() == {"tokens", "labels", "lengths"}
    assert packed["cu_seqlens"].tolist() == [0, 128, 256, 384, 512]
    assert packed["loss_mask"].sum() == 508


@pytest.mark.parametrize("loss", ["orpo", "kto", "reward"])
@pytest.mark.parametrize("shared_by", [1, 2, 4])
def test_made_up_pairs_pass_the_checks_of_batches_and_hybrid_rows_are_split(loss: Any, shared_by: int) -> None:
    row = MadeUpRows(1, 64, True, Preference(loss), shared_by=shared_by)[0]
    batch = {name: values[None] for name, values in row.items()}
    check_pairs(batch, loss)
    if shared_by > 1:
        packed = packed_sequences(batch["cu_seqlens"], batch["cu_seqlens_padded"], 64, shared_by, hybrid_rank=0)
        assert packed.boundaries is not None
        assert packed.boundaries.shared_by is None  # all ranks share each document
