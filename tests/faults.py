# SPDX-License-Identifier: Apache-2.0
"""A table of faults, and how the ranks of a run end after each: ``python -m tests.faults`` runs it, about 20 minutes.

A scenario is a fault, the place and the rank where it happens, a layout, saves that are asynchronous or not, and a
*door*: ``processes`` starts each rank by itself, as schedulers and torchrun do, with nobody who ends the others;
``launcher`` starts a script that Lightning's launcher starts again for the second rank. Within ``LIMIT`` seconds of the
fault all ranks, and every process that they have started, have to be gone, with an exit code that is not zero and a
sentence that names the rank and the cause. Some scenarios are not faults: they have to go on to the end.

A rank is a fork of this process, which has imported everything and started no thread: that is two seconds for a
scenario instead of twenty. ``tests/distributed/test_faults.py`` runs the short table.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.support import economy  # noqa: F401 - before torch, Lightning and megatron-core

# isort: split

from tests.support import faulty_run
from tests.support.faulty_run import SAYING, Plan
from tests.support.ranks import free_port

LIMIT = 30.0  # seconds from the cause to the end of the last process
START_LIMIT = 180.0  # seconds until the cause
SUSPENDED = 15.0  # seconds in which all ranks are stopped

PROCESSES, LAUNCHER = "processes", "launcher"
ENDS, DONE, REFUSED = "ends", "done", "refused"
_SIGNALS = {"SIGKILL", "SIGHUP", "SIGSEGV", "os._exit"}  # and the like: the rank says nothing
_AFTER_THE_RUN = {"on_train_end", "on_fit_end", "teardown", "end"}  # the other rank may have done all it had to
_TEXTS = {
    "StopIteration": "RuntimeError: StopIteration was raised in a step",
    "stops the other": f"ValueError: {SAYING}",
    "SystemExit": "SystemExit: 3",
    "UnpicklableError": "UnpicklableError",
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What happens, and what has to follow.

    Attributes:
        plan: What each rank does.
        door: How ranks are started.
        expected: ``ENDS``: as the module says. ``DONE``: every rank ends with exit code 0. ``REFUSED``: ``ENDS``, and
            a second run was refused.
        port_in_use: Whether something else listens where rank 0 wants to.
        sentence: What has to be on the standard error, a regular expression; None: what follows from the fault.
    """

    plan: Plan
    door: str = PROCESSES
    expected: str = ENDS
    port_in_use: bool = False
    sentence: str | None = None

    @property
    def name(self) -> str:
        """Name it in a line."""
        plan = self.plan
        words = [self.door, plan.layout, "async" if plan.asynchronous else "sync", plan.fault, plan.place]
        words.append(f"rank{plan.rank}" if plan.rank >= 0 else "all")
        flags = {"again": plan.again, "rescue": plan.rescue, "lingers": plan.lingers, "port": self.port_in_use}
        return "-".join([*words, *(flag for flag, is_set in flags.items() if is_set)])

    @property
    def says(self) -> str:
        """Return what has to be on the standard error."""
        rank, fault = self.plan.rank, self.plan.fault
        if self.sentence is not None:
            return self.sentence
        if self.plan.place == "dataset" and fault in _SIGNALS:
            return rf"DataLoader worker (.|\n){{0,200}}\(on rank {rank} of 2\)"
        if fault in _SIGNALS:
            return rf"rank {rank} ended without an error message"
        if fault == "SIGSTOP":
            return rf"rank {rank} was stopped \(SIGSTOP\)"
        if fault in ("SIGINT", "KeyboardInterrupt"):
            return rf"rank {rank} was interrupted"
        if fault == "SIGTERM":
            return rf"rank {rank} of 2 was ended by SIGTERM"
        text = re.escape(_TEXTS.get(fault, f"{fault}: {SAYING}"))
        return rf"rank {rank} (of 2 )?failed: {text}|{text}(.|\n){{0,60}}\(on rank {rank} of 2\)"


@dataclasses.dataclass
class Outcome:
    """What came of a scenario.

    Attributes:
        seconds: From the cause to the end of the last process.
        codes: The exit codes of the processes that were started here.
        wrong: What is wrong with it, in words.
        printed: What the ranks printed.
    """

    seconds: float
    codes: list[int]
    wrong: list[str]
    printed: str


def short_table() -> list[Scenario]:
    """Return a few scenarios of different kinds."""
    return [
        Scenario(Plan("ValueError", rank=1, layout="dp2", asynchronous=True)),
        Scenario(Plan("SIGKILL", rank=0, layout="pp2")),
        Scenario(Plan("ValueError", rank=-1, again=True), expected=DONE),
        Scenario(Plan("ValueError", rank=1, again=True), expected=REFUSED),
        Scenario(Plan("ValueError", "on_fit_end", rank=1), LAUNCHER),
        Scenario(
            Plan("ValueError", rank=1, lingers=True),
            LAUNCHER,
            sentence=r"has not ended by itself in 10 s(.|\n)*before the run",
        ),
        Scenario(
            Plan("ValueError", "end", rank=1), LAUNCHER, sentence=rf"ValueError: {SAYING}(.|\n)*rank 1 of this machine"
        ),
    ]


def table() -> list[Scenario]:
    """Return all scenarios."""
    in_step = ["ValueError", "StopIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit", "MemoryError"]
    in_step += ["UnpicklableError", "os._exit", "SIGKILL", "SIGTERM", "SIGHUP", "SIGSTOP", "SIGSEGV", "SIGINT"]
    places = ["configure_model", "configure_optimizers", "setup", "on_train_start", "on_train_batch_end"]
    places += ["validation_step", "optimizer_step", "save", "on_train_end", "on_fit_end", "teardown", "dataset"]
    layouts = list(faulty_run.LAYOUTS)
    plans = [Plan(fault, rank=rank) for rank in (0, 1) for fault in in_step]
    plans += [Plan("ValueError", place, rank) for rank in (0, 1) for place in places]
    plans += [Plan("SIGKILL", place, rank=1) for place in ("configure_model", "validation_step", "save", "dataset")]
    rotated = [
        dataclasses.replace(plan, layout=layouts[index % 3], asynchronous=index // 3 % 2 == 0)
        for index, plan in enumerate(plans)
    ]
    flying = [
        Plan(fault, rank=rank, layout=layout, asynchronous=True)
        for fault in ("ValueError", "SIGKILL")
        for rank in (0, 1)
        for layout in layouts
    ]
    scenarios = [Scenario(plan) for plan in dict.fromkeys([*rotated, *flying])]
    scenarios += [
        Scenario(
            Plan("none", "files", rank, layout), sentence=rf"(Too many open files|EMFILE)(.|\n)*on rank {rank} of 2"
        )
        for rank, layout in ((0, "dp2"), (1, "tp2"), (1, "pp2"))
    ]
    launched = ["ValueError", "StopIteration", "KeyboardInterrupt", "SystemExit", "SIGKILL", "SIGTERM", "SIGSTOP"]
    launched += ["stops the other"]
    scenarios += [
        Scenario(Plan(fault, rank=rank, layout=layouts[index % 3], asynchronous=index % 2 == 0), LAUNCHER)
        for rank in (0, 1)
        for index, fault in enumerate(launched)
    ]
    early = r"rank 1 of this machine ended|ValueError: a bad batch|the process that started it ended before"
    scenarios += [
        Scenario(Plan("ValueError", "script", rank=1), LAUNCHER, sentence=early),
        Scenario(Plan("SIGKILL", "script", rank=1), LAUNCHER, sentence=early),
        Scenario(Plan("SIGKILL", "setup_environment", rank=0), LAUNCHER, sentence=early),
        Scenario(Plan("ValueError", "setup_environment", rank=0), LAUNCHER, sentence=early),
        Scenario(Plan("ValueError", "setup_environment", rank=1), LAUNCHER, sentence=early),
        Scenario(Plan("none", "files", 1, "dp2"), LAUNCHER, sentence="Too many open files|EMFILE"),
        Scenario(Plan("none", "port", 0), LAUNCHER, port_in_use=True, sentence="EADDRINUSE|in use"),
        Scenario(Plan("SIGKILL", "setup_environment", 1), sentence="rank 1 of 2 did not reach .* in time"),
        Scenario(Plan("SIGKILL", "setup_environment", 0), sentence="rank 0 did not answer at .* in 20 s"),
        Scenario(Plan("none", "port", 0), port_in_use=True, sentence=r"(EADDRINUSE|in use)(.|\n)*another program uses"),
    ]
    return [
        *scenarios,
        Scenario(Plan("ValueError", rank=0, layout="tp2", rescue=True)),
        Scenario(Plan("ValueError", rank=1, layout="pp2", rescue=True, asynchronous=True)),
        Scenario(
            Plan("ValueError", rank=-1, again=True, rescue=True, asynchronous=True),
            expected=DONE,
            sentence=r"Restored all states from the checkpoint at .*/on_exception\.ckpt",
        ),
        *(scenario for scenario in short_table() if scenario not in scenarios),
        Scenario(Plan("slow", rank=1, layout="tp2"), expected=DONE),
        Scenario(Plan("holds the interpreter", rank=0), expected=DONE),
        Scenario(Plan("holds the interpreter", rank=1, layout="pp2"), expected=DONE),
        Scenario(Plan("SIGSTOP", rank=-1), expected=DONE),
        Scenario(Plan("SIGSTOP", rank=-1, layout="tp2"), LAUNCHER, expected=DONE),
        Scenario(Plan("none"), LAUNCHER, expected=DONE),
    ]


class RankBegins(BaseException):
    """Unwinds the stack of this program in a forked process, which then is a rank.

    Args:
        plan: What the rank does.
    """

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = plan


def run(scenario: Scenario) -> Outcome:
    """Run a scenario and judge it."""
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    plan = dataclasses.replace(scenario.plan, folder=str(folder))
    port = free_port()
    server = socket.create_server(("127.0.0.1", port))
    if not scenario.port_in_use:
        server.close()
    ranks = range(2 if scenario.door == PROCESSES else 1)
    processes = [_start(plan, rank, scenario.door, port, folder) for rank in ranks]  # nothing to unwind around it
    try:
        return _judge(scenario, folder, processes)
    finally:
        for process in _in_sessions(processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start(plan: Plan, rank: int, door: str, port: int, folder: Path) -> int:
    """Fork a process that becomes a rank, and return its number."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT):  # ignored by what runs in the background
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{stream}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ["MASTER_PORT"] = str(port)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["OMP_NUM_THREADS"] = "1"
    if door == PROCESSES:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        os.environ.update({name: str(value) for name, value in names.items()}, TORCHELASTIC_RUN_ID="faults")
    sys.argv = [sys.argv[0], "--rank", plan.dumps()]  # with which the launcher starts the second one
    raise RankBegins(plan.dumps())


def _judge(scenario: Scenario, folder: Path, processes: list[int]) -> Outcome:
    codes: dict[int, int] = {}
    began = time.monotonic()
    cause: float | None = began if scenario.port_in_use else None
    is_suspended = scenario.plan.fault == "SIGSTOP" and scenario.plan.rank < 0
    left = processes
    while left and time.monotonic() < _deadline(scenario, began, cause):
        time.sleep(0.05)
        codes |= _codes(set(processes) - set(codes), os.WNOHANG)
        left = [*{*_in_sessions(processes), *processes} - codes.keys()]  # a session may not have begun yet
        if cause is None:
            cause = _cause(scenario, folder)
        elif is_suspended and time.monotonic() > cause + SUSPENDED:
            is_suspended = False
            for process in left:
                os.kill(process, signal.SIGCONT)
    codes |= _codes(set(processes) - set(codes) - set(left), 0)
    seconds = time.monotonic() - (cause if cause is not None else began)
    outcome = Outcome(seconds, [codes.get(process, -1000) for process in processes], [], _printed(folder))
    outcome.wrong = list(_wrongs(scenario, outcome, cause, left))
    return outcome


def _codes(processes: Collection[int], options: int) -> dict[int, int]:
    """Return the exit codes of those that have ended."""
    waited = {process: os.waitpid(process, options) for process in processes}
    return {process: os.waitstatus_to_exitcode(status) for process, (ended, status) in waited.items() if ended}


def _cause(scenario: Scenario, folder: Path) -> float | None:
    """Return when the ranks that it happens to noted that it did, if they have."""
    notes = sorted(folder.glob("cause_*"))
    if len(notes) < (2 if scenario.plan.rank < 0 else 1):
        return None
    with contextlib.suppress(ValueError):  # half of it is written
        return max(float(note.read_text()) for note in notes)
    return None


def _deadline(scenario: Scenario, began: float, cause: float | None) -> float:
    return began + START_LIMIT if cause is None or scenario.expected == DONE else cause + LIMIT


def _wrongs(scenario: Scenario, outcome: Outcome, cause: float | None, left: list[int]) -> Iterator[str]:
    if left:
        yield f"{len(left)} processes are left after {outcome.seconds:.0f} s"
    if scenario.expected == DONE:
        if any(outcome.codes):
            yield f"exit codes {outcome.codes}"
        if scenario.sentence is not None and not re.search(scenario.sentence, outcome.printed):
            yield f"nothing printed matches {scenario.sentence!r}"
        return
    if cause is None:
        yield "it did not come to the fault"
    may_be_done = scenario.plan.place in _AFTER_THE_RUN and scenario.door == PROCESSES
    needed = [scenario.plan.rank] if may_be_done else range(len(outcome.codes))
    if not all(outcome.codes[rank] for rank in needed if rank < len(outcome.codes)):
        yield f"exit codes {outcome.codes}"
    if not re.search(scenario.says, outcome.printed):
        yield f"nothing printed matches {scenario.says!r}"
    if scenario.expected == REFUSED and "a run needs all ranks" not in outcome.printed:
        yield "the second run was not refused"


def _in_sessions(leaders: list[int]) -> list[int]:
    """Return the living processes of the sessions that these began."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and os.getsid(int(entry)) in leaders:
                    found.append(int(entry))
    return found


def _printed(folder: Path) -> str:
    return "".join(
        f"--- {path.name}\n{path.read_text(errors='replace')}"
        for path in sorted([*folder.glob("err_*"), *folder.glob("out_*")])
    )


def _run_table(scenarios: list[Scenario], report: str | None, verbose: bool) -> int:
    outcomes = []
    for number, scenario in enumerate(scenarios, start=1):
        outcome = run(scenario)
        outcomes.append(outcome)
        verdict = "; ".join(outcome.wrong) or "ok"
        print(f"{number:3} of {len(scenarios)}  {outcome.seconds:5.1f} s  {scenario.name}: {verdict}", flush=True)
        if verbose or outcome.wrong:
            print("\n".join(f"      {line}" for line in outcome.printed.splitlines()[-60:]), flush=True)
    failed = [scenario.name for scenario, outcome in zip(scenarios, outcomes, strict=True) if outcome.wrong]
    ends = [o.seconds for s, o in zip(scenarios, outcomes, strict=True) if s.expected != DONE]
    print(f"{len(scenarios)} scenarios, {len(failed)} failed; the slowest end took {max(ends, default=0):.1f} s")
    if report is not None:
        text = json.dumps({s.name: o.wrong and [*o.wrong, o.printed] for s, o in zip(scenarios, outcomes, strict=True)})
        Path(report).write_text(text)
    return int(bool(failed))


def main() -> int:
    """Run the table, or be a rank that Lightning's launcher started."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="run faulty trainings")
    parser.add_argument("--rank", metavar="PLAN", help="be a rank of one run")
    parser.add_argument("--short", action="store_true", help="a few scenarios only")
    parser.add_argument("-k", metavar="PATTERN", default="", help="those whose names match")
    parser.add_argument("--report", metavar="FILE", help="write what was wrong as JSON")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks print")
    arguments = parser.parse_args()
    gc.freeze()  # what was imported; the ranks are forks
    gc.enable()
    begins: RankBegins | None = None
    try:
        if arguments.rank is None:
            scenarios = [s for s in (short_table() if arguments.short else table()) if re.search(arguments.k, s.name)]
            return _run_table(scenarios, arguments.report, arguments.verbose)
    except RankBegins as rank:
        begins = rank
    faulty_run.main(begins.plan if begins is not None else arguments.rank)
    return 0


if __name__ == "__main__":
    sys.exit(main())
