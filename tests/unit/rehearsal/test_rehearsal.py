# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal counts, held against arithmetic; and what it says of a run that it cannot play."""

import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from lightning_mcore.rehearsal import RankReport, rehearse
from lightning_mcore.rehearsal.device import Answers
from lightning_mcore.rehearsal.processes import Failure, Played
from tests.support import rehearsed
from tests.support.rehearsed import gpt_run, job, plain_run, play, run_of_file, watched_trainer


def line_of(text: str) -> str:
    lines = Path(rehearsed.__file__).read_text(encoding="utf-8").splitlines()
    return f"tests/support/rehearsed.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


PROJECT = "/projects/torch/lightning_mcore/train.py"
LOSS, SELECTION = line_of("loss.item() > 1"), line_of("output > 0")
JOBS = {
    "plain": job(plain_run),
    "project": job(partial(run_of_file, PROJECT)),
    "one": job(gpt_run),
    "pp2": job(partial(gpt_run, world=4, pipeline_model_parallel_size=2)),
    "watched": job(partial(gpt_run, world=4, pipeline_model_parallel_size=2, trainer=watched_trainer)),
    "outside": job(gpt_run, 1),
    "undivided": job(partial(gpt_run, world=2, tensor_model_parallel_size=4)),
    "value": job(partial(plain_run, "value")),
    "device": job(partial(plain_run, "device")),
    "short": job(partial(plain_run, rows=8)),
    "file": job(partial(plain_run, "file")),
    "operator": job(partial(plain_run, "operator")),
    "large": job(plain_run, assume={LOSS: 2}),
    "selected": job(partial(plain_run, "value"), assume={SELECTION: 7, LOSS.removeprefix("tests/"): 0.5}),
    "nothing": job(plain_run, assume={"rehearsed.py:1": 2}),
}
# Layers, and how many gradient norms a step reads: tests/distributed/test_waits.py reads as many on real ranks.
HEADS = {"multi-token": ({"mtp_num_layers": 1}, 1)}
if "mtp_detach_heads" in TransformerConfig.__dataclass_fields__:  # megatron-core 0.19 clips such heads by themselves
    HEADS["heads"] = {"mtp_num_layers": 1, "mtp_detach_heads": True}, 2
for name, (layers, _) in HEADS.items():
    JOBS[name] = job(partial(gpt_run, world=2, pipeline_model_parallel_size=2, transformer=layers))
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def found() -> dict[str, Played | Failure]:
    return play(JOBS)


def ranks_of(found: Played | Failure) -> tuple[RankReport, ...]:
    assert isinstance(found, Played), found.trace
    return found.ranks


def held(rank: RankReport, kind: str) -> int:
    return sum(holder.bytes for holder in rank.holders if holder.kind == kind)


def test_memory_of_a_linear_layer_is_what_arithmetic_says(found: dict[str, Played | Failure]) -> None:
    [rank] = ranks_of(found["plain"])
    assert rank.parameters == 1024 * 256
    assert held(rank, "weights") == held(rank, "gradients") == 1 * MEBIBYTE
    # Besides: a batch of 8 x 1024 and an output of 8 x 256 in fp32, the gradient of the weight before it is added to
    # the buffer, and some scalars of 512 bytes.
    rest = rank.step_peak_bytes - (2 * MEBIBYTE + 8 * 1024 * 4 + MEBIBYTE)
    assert 0 <= rest <= 8 * 256 * 4 + 16 * 512


def test_a_wait_is_named_by_file_and_line(found: dict[str, Played | Failure]) -> None:
    [rank] = ranks_of(found["plain"])
    [wait] = [wait for wait in rank.waits if "rehearsed.py" in wait.where]
    assert (wait.where, wait.what, wait.times) == (
        f"{line_of('loss.item() > 1')} training_step",
        "reads a value",
        1,
    )


def test_state_of_a_gpt_is_2_4_and_12_bytes_for_each_parameter(found: dict[str, Played | Failure]) -> None:
    [rank] = ranks_of(found["one"])
    layer = 4 * 64**2 + 2 * 4 * 64**2 + 2 * 2 * 64  # attention, feed-forward, two norms with biases
    assert rank.parameters == 2 * 128 * 64 + 4 * layer + 2 * 64
    for kind, size in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        # The allocator rounds each tensor up to 512 bytes.
        assert 0 <= held(rank, kind) - size * rank.parameters <= 0.02 * size * rank.parameters + 4096, kind
    assert rank.peak_bytes >= sum(held(rank, kind) for kind in ("weights", "gradients", "optimizer"))


def test_a_steady_step_reads_its_logs_once(found: dict[str, Played | Failure]) -> None:
    for rank in ranks_of(found["pp2"]):
        logs = [(wait.where.partition(" ")[2], wait.times) for wait in rank.waits if "/logs/" in wait.where]
        assert logs == [("read", 1)]


@pytest.mark.parametrize("name", HEADS)
def test_a_norm_is_read_for_each_part_that_is_clipped_by_itself(found: dict[str, Played | Failure], name: str) -> None:
    for rank in ranks_of(found[name]):
        norms = [wait.times for wait in rank.waits if "/clip_grads.py" in wait.where]
        assert norms == [HEADS[name][1]], rank.stage


def test_both_stages_of_a_pipeline_are_played(found: dict[str, Played | Failure]) -> None:
    first, last = ranks_of(found["pp2"])
    assert [(first.rank, first.stage), (last.rank, last.stage)] == [(0, 0), (2, 1)]
    # 2 microbatches of 2 x 32 x 64 numbers in bf16
    for rank in (first, last):
        moved = {item.kind: (item.calls, item.bytes) for item in rank.traffic if item.group == "pp"}
        assert moved["send"] == moved["receive"] == (2, 2 * 2 * 32 * 64 * 2)


def test_every_stage_logs_the_validation_loss(found: dict[str, Played | Failure]) -> None:
    assert [rank.stage for rank in ranks_of(found["watched"])] == [0, 1]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("outside", "rank=1 is outside world_size=1; choose 0 to 0"),
        ("undivided", "tensor_model_parallel_size=4 does not divide the number of ranks"),
        ("value", "{output > 0}: aten.nonzero.default needs the values of a tensor"),
        ("value", "say how many elements it selects with --assume {output > 0}=COUNT"),
        ("file", "{torch.load}: no-such-rows.pt does not exist; a rehearsal builds the run's own module and data"),
        ("operator", "{double(output)}: "),
        ("operator", "an operator has no fake kernel, which a rehearsal needs"),
        ("large", "the loss is too large (a rehearsal assumed 2 for {loss.item() > 1}"),
        ("nothing", "rehearsed.py:1 reads no value; lines that do: {loss.item() > 1}"),
        ("device", "{torch.ones(256)}: Expected all tensors to be on the same device"),
        ("short", "the data ended after 1 of 2 optimizer steps; give more batches"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(found: dict[str, Played | Failure], name: str, sentence: str) -> None:
    failure = found[name]
    assert isinstance(failure, Failure)
    sentence = re.sub("{(.*?)}", lambda match: line_of(match[1]), sentence)
    assert sentence in failure.sentence
    assert "\n" not in failure.sentence


def test_a_line_reads_what_is_assumed_for_it(found: dict[str, Played | Failure]) -> None:
    [rank] = ranks_of(found["plain"])
    assert rank.reads == {LOSS: 1}
    [rank] = ranks_of(found["selected"])
    assert rank.reads == {LOSS: 0.5, SELECTION: 7}
    assert {wait.where.partition(" ")[0]: wait.what for wait in rank.waits if "rehearsed.py" in wait.where} == {
        LOSS: "reads a value",
        SELECTION: "counts what values select",
    }


def test_a_project_may_lie_in_folders_that_are_named_like_packages(found: dict[str, Played | Failure]) -> None:
    [rank] = ranks_of(found["project"])
    assert rank.reads == {f"{PROJECT}:2": 1}


def test_without_a_compiler_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_MCORE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler, and no-such-compiler is not installed"):
        rehearse(plain_run)


def test_a_compiler_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_MCORE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"false could not build .*: exit code 1"):
        rehearse(plain_run)


def test_processes_of_a_rehearsal_end_when_the_one_that_asked_for_it_is_killed(tmp_path: Path) -> None:
    record = tmp_path / "processes"
    code = (
        "from functools import partial; from pathlib import Path; from tests.support.rehearsed import *;"
        " from lightning_mcore.rehearsal.processes import run_jobs;"
        f"__name__ == '__main__' and run_jobs([job(partial(stuck_run, Path({str(record)!r})))], print)"
    )
    asking = subprocess.Popen([sys.executable, "-c", code])
    started = time.monotonic()
    while not record.exists():
        assert time.monotonic() - started < 120
        assert asking.poll() is None
        time.sleep(0.1)
    processes = [psutil.Process(int(number)) for number in record.read_text().split()]
    asking.kill()
    asking.wait()
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_a_slow_stage_is_waited_for(tmp_path: Path) -> None:
    stores = [dist.FileStore(str(tmp_path / "store"), -1) for _ in range(2)]  # type: ignore[attr-defined]
    for store in stores:
        store.set_timeout(timedelta(milliseconds=10))
    slow, fast = (Answers(store, rank, (0, 1)) for rank, store in enumerate(stores))
    # A file is looked at once a second.
    late = threading.Timer(2.5, slow.broadcast, (["late"], 0, (0, 1)))
    late.start()
    received = [None]
    fast.broadcast(received, 0, (0, 1))
    late.join()
    assert received == ["late"]
