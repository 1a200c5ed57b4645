# SPDX-License-Identifier: Apache-2.0
"""An exported folder reaches a repository on the hub with a model card; a server on this machine stands for the hub."""

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCoreGPT, MCoreStrategy
from lightning_mcore.interop import hub
from lightning_mcore.interop.callback import SaveHFModel
from lightning_mcore.interop.export import export_checkpoint
from tests.support.hf_models import VOCAB_SIZE, save_tiny
from tests.support.ranks import run_ranks
from tests.support.sentences import refuses
from tests.support.toy import make_trainer

REPOSITORY = "team/tuned"


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one upload, and keeps what it was asked and sent."""

    asked: list[str]
    files: dict[str, bytes]
    made: list[dict[str, Any]]
    has_card = False
    refuses_with: int | None = None

    def _answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _take(self) -> bytes:
        self.asked.append(f"{self.command} {self.path}")
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self._take()
        self.send_response(200 if self.has_card else 404)
        for name, value in {"X-Repo-Commit": "0" * 40, "ETag": '"1"', "X-Error-Code": "EntryNotFound"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self._take()
        self._answer({"id": REPOSITORY, "sha": "0" * 40, "siblings": [], "private": True})

    def do_POST(self) -> None:
        content = self._take()
        if self.refuses_with is not None:
            self._answer({"error": "not yours"}, self.refuses_with)
        elif self.path == "/api/repos/create":
            self.made.append(json.loads(content))
            self._answer({"url": f"http://{self.headers['Host']}/{REPOSITORY}"})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(content)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitUrl": f"/{REPOSITORY}/commit/1", "commitOid": "1" * 40, "hookOutput": ""})
        else:
            self._answer({})

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("OwnHub", (Hub,), {"asked": [], "files": {}, "made": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as listening:
        address = f"http://127.0.0.1:{listening.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(huggingface_hub.HfApi, "__init__", _at(address, huggingface_hub.HfApi.__init__))
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield kind
        listening.shutdown()
        thread.join()


def _at(address: str, begin: Any) -> Any:
    """Return the constructor of HfApi, for another hub than the environment's, which is read on import."""
    return lambda self, *args, **options: begin(self, address, "hf_token", *args, **options)


ORIGIN = hub.Origin("org/base", "MCoreFinetuningData, chats.jsonl", 1200, 4, {"tensor_model_parallel_size": 2, "a": 1})


def folder_of(path: Path, **files: str) -> str:
    path.mkdir()
    for name, text in {"config": "{}", **files}.items():
        (path / f"{name}.json").write_text(text)
    return str(path)


def test_all_files_of_a_folder_and_a_card_are_uploaded_to_a_private_repository(
    tmp_path: Path, server: type[Hub]
) -> None:
    folder = folder_of(tmp_path / "out", tokenizer="[1]")
    hub.open_repository(REPOSITORY)
    hub.upload(folder, REPOSITORY, ORIGIN)
    assert [(made["name"], made["organization"]) for made in server.made] == [("tuned", "team")] * 2
    assert all(made.get("private", made.get("visibility") == "private") for made in server.made)
    assert server.files.keys() == {"config.json", "tokenizer.json", "README.md"}
    assert server.files["tokenizer.json"] == b"[1]"
    card = server.files["README.md"].decode()
    assert huggingface_hub.ModelCard(card).data.to_dict() == {
        "base_model": "org/base",
        "library_name": "transformers",
        "tags": ["lightning-mcore"],
    }
    for row in (
        "| Base model | org/base |",
        "| Training data | MCoreFinetuningData, chats.jsonl |",
        "| Steps | 1,200 |",
        "| Layout | 4 ranks: `tensor_model_parallel_size=2` |",
    ):
        assert row in card.splitlines()
    assert f"torch {torch.__version__}" in card


def test_a_card_on_the_hub_is_not_replaced(tmp_path: Path, server: type[Hub]) -> None:
    server.has_card = True
    hub.upload(folder_of(tmp_path / "out"), REPOSITORY, ORIGIN)
    assert server.files.keys() == {"config.json"}


def test_what_the_hub_refuses_is_one_sentence_and_the_folder_stays(tmp_path: Path, server: type[Hub]) -> None:
    server.refuses_with = 403
    folder = folder_of(tmp_path / "out")
    with pytest.raises(
        RuntimeError, match=f"^push_to_hub='{REPOSITORY}': the hub cannot be written to .*hf auth login"
    ):
        hub.open_repository(REPOSITORY)
    with pytest.raises(RuntimeError, match=f"is complete, but was not uploaded .*`hf upload {REPOSITORY} {folder}`$"):
        hub.upload(folder, REPOSITORY, ORIGIN)
    assert (tmp_path / "out" / "config.json").exists()


def test_an_adapter_of_a_local_model_has_a_card_without_paths() -> None:
    card = hub.model_card("tuned", hub.Origin(hub.base_of({"hf": {"path": "/data/secret/mine/"}})), is_adapter=True)
    assert huggingface_hub.ModelCard(card).data.to_dict() == {"library_name": "peft", "tags": ["lightning-mcore"]}
    assert "| Base model | mine |" in card
    assert "secret" not in card


def test_a_wrong_repository_is_refused_when_the_callback_is_made() -> None:
    with refuses(ValueError, "push_to_hub='a/b/c'"):
        SaveHFModel("out", push_to_hub="a/b/c")
    with refuses(ValueError, "push_to_hub='a/b'"):
        SaveHFModel(every_checkpoint=True, push_to_hub="a/b")


# ---- from a run, and from its checkpoint


class Calls:
    """What HfApi was asked to do, on this rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.files: dict[str, str] = {}
        patch.setattr(
            huggingface_hub.HfApi, "create_repo", lambda api, repo_id, *, private, exist_ok: self.made.append(repo_id)
        )
        patch.setattr(huggingface_hub.HfApi, "file_exists", lambda api, repo_id, filename: False)
        patch.setattr(huggingface_hub.HfApi, "upload_folder", self.upload)

    def upload(self, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: Any) -> Any:
        self.files = {path.name: str(path) for path in Path(folder_path).iterdir()}

        class Written:
            commit_url = "there"

        return Written()


def train_and_push(path: str, out: str) -> tuple[list[str], list[str]]:
    """Train adapters for a step, and let the callback upload them; return what this rank asked for."""
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        module = MCoreGPT.from_pretrained(path, seq_length=16, lora=LoRA(r=2, target_modules=["q_proj"]))
        rows = [{"tokens": row[:-1], "labels": row[1:]} for row in torch.randint(VOCAB_SIZE, (4, 17))]
        trainer = make_trainer(
            MCoreStrategy(tensor_model_parallel_size=2),
            max_steps=1,
            callbacks=[SaveHFModel(f"{out}/run", adapter=True, push_to_hub=REPOSITORY)],
        )
        trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        trainer.save_checkpoint(f"{out}/end.ckpt")
        return calls.made, sorted(calls.files)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_a_run_and_an_export_of_its_checkpoint_upload_what_they_wrote(tmp_path: Path) -> None:
    base = str(save_tiny("llama", tmp_path / "base", tokenizer=True))
    first, second = run_ranks(2, train_and_push, base, str(tmp_path), timeout=60)
    assert second == ([], [])  # rank 0 uploads
    made, files = first
    assert made == [REPOSITORY] * 2  # when training starts, and for the upload
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= {*files}
    run_ranks(1, export_and_push, str(tmp_path))
    for card in ((tmp_path / name / "README.md").read_text() for name in ("run", "exported")):
        assert "| Layout | 2 ranks: `tensor_model_parallel_size=2` |" in card
        assert "| Base model | base |" in card
        assert "| Steps | 1 |" in card
        assert str(tmp_path) not in card


def export_and_push(out: str) -> None:
    """Export the adapters of a checkpoint to the hub."""
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        export_checkpoint(f"{out}/end.ckpt", f"{out}/exported", adapter=True, push_to_hub=REPOSITORY)
        assert calls.made == [REPOSITORY]
        assert "README.md" in calls.files
