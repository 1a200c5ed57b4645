# SPDX-License-Identifier: Apache-2.0
"""The launcher of ``tests/support/ranks.py``: every other distributed test stands on what it promises."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.support.ranks import RanksFailedError, _wait_for_news, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _sum_over_ranks(offset: float, *, factor: float = 1.0) -> tuple[int, torch.Tensor]:
    value = torch.tensor([factor * (dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    results = run_ranks(world_size, _sum_over_ranks, 1.0, factor=2.0)
    total = 2.0 * sum(rank + 1.0 for rank in range(world_size))
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(value.item() == total for _, value in results)


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"threads": str(torch.get_num_threads())}


def test_a_rank_has_the_environment_of_torchrun_and_that_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_THIS_TEST", "yes")
    environments = run_ranks(2, _environment)
    for rank, environment in enumerate(environments):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["TOKENIZERS_PARALLELISM"] == "false"
        assert environment["SET_BY_THIS_TEST"] == "yes"
        assert environment["threads"] == "1"
    assert environments[0]["MASTER_PORT"] == environments[1]["MASTER_PORT"]
    assert "RANK" not in os.environ


def _big_tensor(elements: int) -> torch.Tensor:
    return torch.full((elements,), float(dist.get_rank()))


def test_a_result_larger_than_a_pipe_arrives_whole() -> None:
    first, second = run_ranks(2, _big_tensor, 3_000_000)
    assert first.shape == second.shape == (3_000_000,)
    assert second.min() == second.max() == 1.0


def _return_at_once() -> int:
    return dist.get_rank()


def test_a_rank_that_returns_early_waits_for_peers_that_are_still_connecting() -> None:
    for _ in range(5):
        assert run_ranks(4, _return_at_once) == [0, 1, 2, 3]


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the first cause")
    dist.all_reduce(torch.zeros(1))


def test_the_rank_that_raised_is_named_and_not_the_peers_that_lost_it() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(4, _raise_on_rank_one)
    message = str(failure.value)
    assert message.startswith("rank 1 of 4 failed first: ValueError: the first cause")
    assert "in _raise_on_rank_one" in message  # the traceback
    assert set(failure.value.errors) | set(failure.value.unfinished) == {0, 1, 2, 3}


def _raise_before_and_after_a_consequence() -> None:
    dist.barrier()  # both are connected: a rank that is not yet would fail by itself
    if dist.get_rank() == 0:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    time.sleep(0.5)
    raise ValueError("the first cause")


def test_a_consequence_is_not_shown_as_the_cause_even_if_it_came_first() -> None:
    with pytest.raises(RanksFailedError, match="rank 1 of 2 failed first: ValueError: the first cause"):
        run_ranks(2, _raise_before_and_after_a_consequence, grace=30.0)


def _bare_assertion() -> None:
    measured_loss = 41
    assert measured_loss == 42


def test_a_bare_assertion_shows_the_values() -> None:
    with pytest.raises(RanksFailedError, match="measured_loss = 41"):
        run_ranks(1, _bare_assertion)


def _wait_for_a_rank_that_sleeps() -> str:
    if dist.get_rank() == 2:
        return "done"
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.recv(torch.zeros(1), src=1)
    return "unreachable"


def test_a_hang_fails_at_the_timeout_with_the_stack_of_every_stuck_rank() -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(3, _wait_for_a_rank_that_sleeps, timeout=4.0)
    assert 4.0 <= time.monotonic() - begin < 60.0  # the ranks alone would wait for ten minutes
    message = str(failure.value)
    assert "ranks [0, 1] of 3 did not finish in" in message
    assert "--- stack of rank 0 ---" in message
    assert "distributed_c10d.py" in message  # where rank 0 stands
    assert message.count("in _wait_for_a_rank_that_sleeps") == 2
    assert failure.value.unfinished == [0, 1]
    assert failure.value.results == {2: "done"}


def _die(signal_number: int | None, exit_code: int) -> str:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)  # rank 1 has its group: nothing but the function can notice the end
        if signal_number is None:
            os._exit(exit_code)
        os.kill(os.getpid(), signal_number)
    try:
        dist.send(torch.zeros(1), dst=0)
        dist.recv(torch.zeros(1), src=0)
    except RuntimeError:
        return "noticed"
    return "unreachable"


@pytest.mark.parametrize(
    ("signal_number", "exit_code", "text"),
    [
        pytest.param(None, 7, "died with exit code 7", id="exit-code"),
        pytest.param(None, 0, "died with exit code 0", id="exit-without-a-result"),
        pytest.param(signal.SIGKILL, 0, "died with signal SIGKILL", id="signal"),
    ],
)
def test_a_rank_that_dies_is_a_failure_with_its_exit_code(signal_number: int | None, exit_code: int, text: str) -> None:
    with pytest.raises(RanksFailedError, match=f"rank 0 of 2 failed first: {text}") as failure:
        run_ranks(2, _die, signal_number, exit_code, grace=30.0)
    assert failure.value.results == {1: "noticed"}


def _return_a_lambda() -> Any:
    return lambda: None


def test_a_result_that_cannot_be_handed_over_is_a_failure() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 0 of 1 failed first: .*local object"):
        run_ranks(1, _return_a_lambda)


def _leave_a_thread() -> str:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "returned"


def test_a_thread_that_outlives_the_function_is_a_hang() -> None:
    with pytest.raises(RanksFailedError, match=r"stack of rank 0 \(it had returned its result\)"):
        run_ranks(1, _leave_a_thread, timeout=3.0)


def _start_a_child_and_fail(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    raise RuntimeError("the child is still running")


def test_nobody_waits_for_ranks_that_have_just_ended() -> None:
    started = time.monotonic()
    _wait_for_news([], deadline=started + 60)
    assert time.monotonic() - started < 10


def test_no_process_outlives_the_run(tmp_path: Path) -> None:
    path = tmp_path / "processes"
    with pytest.raises(RanksFailedError, match="the child is still running"):
        run_ranks(1, _start_a_child_and_fail, str(path))
    deadline = time.monotonic() + 30.0
    processes = [int(word) for word in path.read_text().split()]
    assert len(processes) == 2
    while any(_is_running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_running(process) for process in processes)


def _is_running(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def _print_something() -> None:
    print(f"standard output {dist.get_rank()}")
    os.write(2, b"written by C++\n")


def test_what_ranks_print_is_printed_by_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, _print_something)
    output = capsys.readouterr().out
    of_gloo = r"(\[Gloo\] .*\n)*"  # which the gloo of torch 2.8 prints
    assert re.search(rf"--- printed by rank 1 of 2 ---\n{of_gloo}standard output 1\nwritten by C\+\+", output)


def _open_own_group() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method="env://")
    value = torch.ones(1)
    dist.all_reduce(value)
    return int(value.item())


def test_a_function_may_open_the_process_group_itself() -> None:
    assert run_ranks(2, _open_own_group, open_group=False) == [2, 2]


def _load_with_workers() -> list[int]:
    loader = DataLoader(torch.arange(4), num_workers=2)
    return [int(batch) for batch in loader]


def test_a_rank_may_have_data_loader_workers() -> None:
    assert run_ranks(2, _load_with_workers) == [[0, 1, 2, 3]] * 2


def _threads_of_new_groups(groups: int) -> int:
    before = psutil.Process().num_threads()
    for _ in range(groups):
        dist.new_group([0, 1])
    return psutil.Process().num_threads() - before


def test_a_group_adds_threads_that_compute_and_none_that_listens() -> None:
    assert run_ranks(2, _threads_of_new_groups, 8) == [8 * 2] * 2


def test_workers_of_a_session_share_the_fork_server_of_its_controller() -> None:
    (server,) = run_ranks(1, os.getppid, open_group=False)
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    assert psutil.Process(server).ppid() == owner


def test_the_fork_server_has_one_thread() -> None:
    """A fork has none of the others, and waits forever for a lock that one of them held."""
    (server,) = run_ranks(1, os.getppid, open_group=False)
    assert psutil.Process(server).num_threads() == 1
