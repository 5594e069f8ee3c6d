"""Whole runs in memory: how they end, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import itertools
import json
import logging
import math
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import left_behind, runner
from harness.cli_parser import build_parser
from harness.commands.run import prepare
from harness.errors import HarnessError, InterruptedStartError, SystemUnderTestError
from harness.execution import perform
from harness.generator import Op
from harness.history_writer import HistoryWriteError, HistoryWriter, read_history
from harness.report import OutputConsole
from harness.runner import Run
from harness.store import RunStatus, Store
from harness.systems.base import CheckOutcome
from harness.test import NemesisChoice
from harness.workloads.register import RegisterWorkload
from nemesis.partition import Partition


class Panic(BaseException):
    """As raised by a library written in Rust."""


def test_a_correct_system_is_valid_and_all_files_are_written(memory_run: Any) -> None:
    run_dir, results, _ = memory_run()
    assert results["valid"] is True, results["reason"]
    assert results["faults"] and all(fault["proven"] and fault["healed"] for fault in results["faults"])
    assert results["ops"]["ok"] > 100
    events = list(read_history(run_dir.history_path))
    assert [event["index"] for event in events] == list(range(len(events)))
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(events))
    assert json.loads(Path(run_dir.results_path).read_text())["valid"] is True
    assert json.loads(Path(run_dir.test_path).read_text())["seed"] == 5
    assert "<html" in Path(run_dir.report_path).read_text()[:2000]
    if sys.implementation.name != "pypy":  # which has no pyarrow
        import pyarrow.parquet

        assert pyarrow.parquet.read_table(run_dir.parquet_path).num_rows == len(events)


def test_without_pyarrow_all_files_but_the_parquet_are_written(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "harness.history_parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    run_dir, results, _ = memory_run()
    assert results["valid"] is True, results["reason"]
    assert "no history.parquet: pyarrow is missing" in run_dir.harness_log_path.read_text()
    assert not run_dir.parquet_path.exists()
    page = Path(run_dir.report_path).read_text()
    assert "history.jsonl" in page and "history.parquet" not in page
    assert run_dir.status is RunStatus.FINISHED


def test_stale_reads_make_the_run_invalid(memory_run: Any) -> None:
    def stale(system: Any) -> None:
        system.stale_reads = True

    _, results, _ = memory_run(system=stale)
    assert results["valid"] is False
    assert 2 <= len(results["checks"]["linearizable"]["witness"]["operations"]) <= 6


def test_an_ineffective_nemesis_makes_the_run_unknown(memory_run: Any) -> None:
    def deaf(system: Any) -> None:
        system.cluster.network.ignores_cuts = True

    _, results, _ = memory_run(system=deaf)
    assert results["valid"] == "unknown"
    assert "was not effective" in results["reason"]
    assert all(fault["proven"] is False for fault in results["faults"])


def test_notes_on_links_are_printed_before_the_load_if_there_are_partitions(memory_run: Any) -> None:
    def noting(system: Any) -> None:
        system.cluster.notes_on_links = lambda: ["there is another route"]

    _, _, text = memory_run(system=noting)
    assert text.index("note: there is another route") < text.index("driving the load")
    _, _, text = memory_run(system=noting, nemesis=(), time_limit_s=0.2)
    assert "note:" not in text and "driving the load" in text


def test_a_fault_that_is_not_healed_makes_the_run_unknown(memory_run: Any) -> None:
    def stuck(system: Any) -> None:
        system.cluster.network.ignores_heals = True

    _, results, _ = memory_run(system=stuck)
    assert results["valid"] == "unknown"
    assert "not proven healed" in results["reason"]


def test_diverged_replicas_make_the_run_invalid(memory_run: Any) -> None:
    def diverged(system: Any) -> None:
        system.checks = {"replicas": CheckOutcome(False, "n1 and n2 differ at byte 7")}

    _, results, _ = memory_run(system=diverged)
    assert results["valid"] is False
    assert "differ at byte 7" in results["reason"]


def test_a_system_that_does_not_start_ends_the_run_and_is_taken_down(memory_run: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    def broken(system: Any) -> None:
        system.fail_to_start = SystemUnderTestError("no leader was elected")
        seen.append(system)

    with pytest.raises(SystemUnderTestError, match="no leader"):
        memory_run(system=broken)
    assert seen[0].cluster.stopped
    (run_dir,) = Store(tmp_path / "store").runs()
    assert run_dir.status is RunStatus.BROKEN


def test_ctrl_c_heals_and_still_gives_a_verdict(memory_run: Any) -> None:
    seen: list[Any] = []

    def interrupt_later(system: Any) -> None:
        seen.append(system)
        append_count = 0

        class Interrupting(type(system.connection("queue", process=0, thread=0))):  # type: ignore[misc]
            async def append(self, key: int, value: Any) -> int:
                nonlocal append_count
                append_count += 1
                if append_count == 100:
                    os.kill(os.getpid(), signal.SIGINT)
                offset: int = await super().append(key, value)
                return offset

        system.connection = lambda kind, *, process, thread: Interrupting(system)

    _, results, _ = memory_run(system=interrupt_later, time_limit_s=30.0)
    assert results["interrupted"].startswith("SIGINT after ")
    assert results["valid"] == "unknown" and "interrupted: SIGINT" in results["reason"]
    assert all(check["valid"] is True for check in results["checks"].values())
    assert seen[0].cluster.network.cuts == {} and seen[0].cluster.stopped


def test_a_second_ctrl_c_names_the_pending_step_and_a_third_abandons_it(memory_run: Any) -> None:
    seen: list[Any] = []

    def interrupt_thrice(system: Any) -> None:
        seen.append(system)
        pressed = 0

        class Pressing(type(system.connection("queue", process=0, thread=0))):  # type: ignore[misc]
            async def append(self, key: int, value: Any) -> int:
                nonlocal pressed
                pressed += 1
                if pressed == 50:
                    os.kill(os.getpid(), signal.SIGINT)
                offset: int = await super().append(key, value)
                return offset

        async def recover_never(*, timeout_s: float) -> CheckOutcome:
            await asyncio.sleep(0)  # by then the handler of the first signal has been called
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")

        system.connection = lambda kind, *, process, thread: Pressing(system)
        system.recover = recover_never

    _, results, said = memory_run(system=interrupt_thrice, time_limit_s=30.0)
    assert "SIGINT: stopping the load; the run is healed and judged" in said
    assert "SIGINT: still waiting for recovery; signal once more to stop waiting for it" in said
    assert "SIGINT: abandoning waiting for recovery" in said
    assert "waiting for recovery: abandoned after a third signal" in results["trouble"]
    assert results["valid"] == "unknown" and results["interrupted"] is not None
    assert seen[0].cluster.stopped, "the cluster is taken down all the same"


async def ignore_cancellation() -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("what", ["cluster", "system"])
def test_a_third_ctrl_c_abandons_a_start_that_ignores_cancellation(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    monkeypatch.setattr(left_behind, "END_S", 0.1)
    clusters: list[Any] = []

    async def start(*_: Any) -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        await ignore_cancellation()

    def prepare(system: Any) -> None:
        clusters.append(system.cluster)
        if what == "system":
            system.start = start
        else:
            system.cluster.start = start

    with pytest.raises(InterruptedStartError, match=f"interrupted before the {what} had started"):
        memory_run(system=prepare)
    assert clusters[0].stopped


def test_a_start_that_raises_when_it_is_cancelled_leaves_no_traceback(
    memory_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("the driver's own words") from None

    def prepare(system: Any) -> None:
        system.start = start

    with pytest.raises(InterruptedStartError, match="interrupted before the system had started"):
        memory_run(system=prepare)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_status_request_that_ignores_cancellation_does_not_hold_up_the_end(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_behind, "END_S", 0.1)

    def prepare(system: Any) -> None:
        async def status(host: str, *, timeout_s: float) -> Any:
            await ignore_cancellation()

        system.status, system.cannot, system.tells_leader = status, {}, True

    _, results, _ = memory_run(system=prepare)
    assert results["valid"] is True, results["reason"]


@pytest.mark.parametrize("phase", ["waiting for recovery", "final reads", "waiting for replicas to agree"])
def test_ctrl_c_after_the_load_makes_the_verdict_unknown(memory_run: Any, phase: str) -> None:
    pressed = False

    def press() -> None:
        nonlocal pressed
        if not pressed:
            pressed = True
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(system: Any) -> None:
        recoveries = 0

        class Pressing(type(system.connection("queue", process=0, thread=0))):  # type: ignore[misc]
            async def latest(self, key: int) -> Any:
                if recoveries == 1 and phase == "final reads":
                    press()
                return await super().latest(key)

        async def recover(*, timeout_s: float) -> CheckOutcome:
            nonlocal recoveries
            recoveries += 1
            if recoveries == (1 if phase == "waiting for recovery" else 2):
                press()
                await asyncio.sleep(0)
            return CheckOutcome(True, "back at once")

        system.connection = lambda kind, *, process, thread: Pressing(system)
        system.recover = recover

    _, results, said = memory_run(system=interrupt)
    assert f"SIGINT: still {phase}; signal twice more to stop waiting for it" in said
    assert results["valid"] == "unknown" and results["reason"].startswith("interrupted: SIGINT after ")


def test_ctrl_c_during_teardown_does_not_change_the_verdict(memory_run: Any) -> None:
    def interrupt(system: Any) -> None:
        async def stop() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)

        system.stop = stop

    _, results, said = memory_run(system=interrupt)
    assert "SIGINT: still taking the cluster down" in said
    assert results["valid"] is True and results["interrupted"] is None


def test_a_value_that_json_cannot_represent_ends_the_load_and_is_named(memory_run: Any) -> None:
    def unwritable(system: Any) -> None:
        class Unwritable(type(system.connection("queue", process=0, thread=0))):  # type: ignore[misc]
            async def latest(self, key: int) -> Any:
                return math.nan

        system.connection = lambda kind, *, process, thread: Unwritable(system)

    _, results, _ = memory_run(system=unwritable)
    told = r"driving the load: process \d+'s read holds what JSON cannot: Out of range float values .*"
    assert re.fullmatch(told, results["trouble"][0])
    assert results["valid"] == "unknown" and "ExceptionGroup" not in " ".join(results["trouble"])


def test_a_client_with_a_bug_makes_the_run_unknown(memory_run: Any) -> None:
    def buggy(system: Any) -> None:
        class Buggy(type(system.connection("queue", process=0, thread=0))):  # type: ignore[misc]
            async def latest(self, key: int) -> Any:
                raise KeyError("a bug")

        system.connection = lambda kind, *, process, thread: Buggy(system)

    _, results, _ = memory_run(system=buggy)
    assert results["valid"] == "unknown"
    assert "unexpected errors" in results["reason"] and "a bug" in results["reason"]


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_check_ends_the_command_and_keeps_the_history(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    def interrupted(self: Any, history: Any, context: Any) -> Any:
        assert signal.getsignal(number) is not signal.SIG_DFL  # which would end this process
        os.kill(os.getpid(), number)
        return {"linearizable": CheckOutcome(True, "nothing to say")}

    monkeypatch.setattr(RegisterWorkload, "check", interrupted)
    with pytest.raises(HarnessError, match="interrupted while checking the history, which is stored"):
        memory_run()
    (run_dir,) = Store(tmp_path / "store").runs()
    assert any(read_history(run_dir.history_path))


def test_a_signal_while_the_report_is_written_keeps_the_verdict(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("harness.report.page.write_report", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(HarnessError, match="interrupted while writing the report; the verdict is stored"):
        memory_run()
    (run_dir,) = Store(tmp_path / "store").runs()
    assert run_dir.read_results()["valid"] is True


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError("of its own"), Panic("no")], ids=repr)
@pytest.mark.parametrize("method", ["generator", "next", "update", "client", "final_generator", "final next"])
def test_a_workload_that_raises_a_base_exception_ends_only_the_load(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    class Broken:
        def next(self, context: Any) -> Any:
            if method != "update":
                raise error
            return Op("read", key=0), self

        def update(self, context: Any, event: Any) -> Any:
            raise error

    def broken(self: Any, *arguments: Any) -> Any:
        if method in ("next", "update", "final next"):
            return Broken()
        raise error

    name = {"next": "generator", "update": "generator", "final next": "final_generator"}.get(method, method)
    monkeypatch.setattr(RegisterWorkload, name, broken)
    run_dir, results, _ = memory_run()
    assert results["valid"] == "unknown"
    phase = "final reads" if "final" in method else "driving the load"
    said = f"RuntimeError: raised {type(error).__name__}"
    assert results["trouble"][0].startswith(f"{phase}: {said}")
    assert run_dir.status is RunStatus.FINISHED


def test_a_seed_repeats_faults_and_operations_whatever_the_speed_of_the_system(memory_run: Any) -> None:
    def slow(system: Any) -> None:
        system.delay_s = 0.05  # a sixth of the rate: the first fault comes among the first operations

    def asked(run_dir: Any) -> tuple[list[Any], list[Any]]:
        invoked = [event for event in read_history(run_dir.history_path) if event["type"] == "invoke"]
        # Those of the load, whose processes are its threads; how many there are until the time is over is chance.
        operations = [(e["f"], e.get("key"), e["value"]) for e in invoked if e["process"] in range(4)]
        return operations, [e["value"]["grudge"] for e in invoked if e["process"] == "nemesis"]

    at_random = {"nemesis": (NemesisChoice("partition", "one"),)}
    (fast, faults), (again, same_faults) = (asked(memory_run(system=each, **at_random)[0]) for each in (None, slow))
    shorter = min(len(fast), len(again))
    assert shorter >= 10 and fast[:shorter] == again[:shorter]
    assert faults[0] == same_faults[0]
    others, other_faults = asked(memory_run(seed=6, **at_random)[0])
    assert others[:10] != fast[:10] and other_faults[0] != faults[0]


def test_a_full_disk_ends_the_run_and_takes_the_cluster_down(
    memory_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_: Any) -> None:
        raise full

    systems: list[Any] = []
    waited_for: list[Any] = []

    async def wait_for_recovery(system: Any, **_: Any) -> None:
        waited_for.append(system)

    def fill(system: Any) -> None:
        systems.append(system)
        monkeypatch.setattr(runner, "wait_for_recovery", wait_for_recovery)
        monkeypatch.setattr(HistoryWriter, "flush", lambda self: refuse_history(self))
        monkeypatch.setattr(logging.FileHandler, "close", refuse)
        monkeypatch.setattr(logging.FileHandler, "emit", lambda self, record: self.handleError(record))

    def refuse_history(writer: HistoryWriter) -> None:
        raise HistoryWriteError(f"cannot write {writer.path}: {full.strerror}")

    with pytest.raises(HistoryWriteError, match="No space left on device"):
        memory_run(system=fill)
    assert systems[0].cluster.stopped
    assert waited_for == [], "recovery that cannot be recorded is not waited for"


def simulated(directory: Path, *, terminal: bool) -> tuple[bytes, str]:
    """The history of a simulated run, and what its console showed."""
    words = (
        "run --cluster sim --nodes 3 --nemesis partition=leader --nemesis-interval 2 --time-limit 6 --rate 50 --seed 4"
    )
    output = io.StringIO()
    console = OutputConsole(file=output, width=80, force_terminal=terminal, color_system=None)
    run_dir, _ = perform(prepare(build_parser().parse_args(words.split())).parts, Store(directory), console)
    return run_dir.history_path.read_bytes(), output.getvalue()


def test_the_live_panel_does_not_change_a_simulated_run_and_shows_the_leader(tmp_path: Path) -> None:
    plain, without = simulated(tmp_path / "plain", terminal=False)
    watched, panel = simulated(tmp_path / "watched", terminal=True)
    assert watched == plain
    assert "cut off" not in without and "no violation" not in without
    leaders = set(re.findall(r" leader  (\S+)", panel))
    assert len(leaders & {"n1", "n2", "n3"}) >= 2, "the first was cut off"
    assert re.search(r"cut off  n\d \| n\d n\d", panel) and "no violation" in panel


def test_a_client_that_blocks_without_await_is_interrupted_and_named(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is answered nothing else can run: neither the healing of the fault that it waits for nor Ctrl-C."""
    monkeypatch.setattr(runner, "BLOCKED_MARGIN_S", 0.3)
    ours, theirs = socket.socketpair()
    seen: list[Any] = []
    asked: list[int] = []

    def blocking(system: Any) -> None:
        class Blocking(type(system.connection("queue", process=0, thread=0))):  # type: ignore[misc]
            async def latest(self, key: int) -> Any:
                asked.append(key)
                ours.recv(1)  # which is never answered
                raise AssertionError("nothing comes")

        seen.append(system)
        system.code_files, system.set_up_timeout_s = {__file__}, 60.0
        system.connection = lambda kind, *, process, thread: Blocking(system)

    before = signal.getsignal(signal.SIGUSR2)
    with ours, theirs:
        _, results, said = memory_run(system=blocking, time_limit_s=60.0, operation_timeout_s=0.2)
    assert results["valid"] == "unknown"
    assert re.search(r"test_runner\.py:\d+ blocked the harness for \d+ s: a plug-in", results["reason"])
    assert "a plug-in must await whatever it waits for; stopping the load" in " ".join(said.split())
    assert len(asked) <= 2 * 4, "once each of four clients under load, and once in the final reads"
    assert seen[0].cluster.stopped and signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.parametrize("part", ["nemesis", "workload"])
def test_a_nemesis_or_workload_that_blocks_without_await_is_interrupted_and_named(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Ctrl-C is pressed meanwhile, which the blocked loop would never notice."""
    monkeypatch.setattr(runner, "BLOCKED_MARGIN_S", 0.3)
    ours, theirs = socket.socketpair()

    def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ours.settimeout(20.0)
        with contextlib.suppress(TimeoutError):
            ours.recv(1)  # which is never answered

    class BlockingPartition(Partition):
        async def inject(self, target: Any, injection: Any) -> None:
            wait()

    class BlockingWorkload(RegisterWorkload):
        def client(self, connection: Any) -> Any:
            wait()
            return super().client(connection)

    made = Run.__init__

    def with_parts(self: Any, **given: Any) -> None:
        if part == "nemesis":
            given["nemeses"] = {"partition": BlockingPartition()}
        else:
            given["workload"] = BlockingWorkload(keys=2)
        made(self, **given)

    monkeypatch.setattr(Run, "__init__", with_parts)
    with ours, theirs:
        _, results, _ = memory_run(time_limit_s=60.0, operation_timeout_s=0.2)
    assert results["valid"] == "unknown" and results["interrupted"]
    assert any("test_runner.py" in trouble and "must await" in trouble for trouble in results["trouble"])


def test_final_reads_that_take_too_long_leave_the_verdict_unknown(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread reads key after key, so that the keys that it would have read last are not read at all."""
    monkeypatch.setattr(runner, "FINAL_READ_LIMIT_S", 0.0)
    _, results, _ = memory_run(nemesis=())
    assert results["valid"] == "unknown" and results["trouble"] == []
    assert results["reason"] == "the final reads were ended after 0 s, before everything was read"


def test_final_reads_that_end_by_themselves_leave_no_doubt(memory_run: Any) -> None:
    _, results, _ = memory_run(nemesis=())
    assert results["valid"] is True and results["final_reads_cut"] is None


def test_a_teardown_that_fails_leaves_the_verdict_unknown_and_the_rest_is_still_taken_down(memory_run: Any) -> None:
    seen: list[Any] = []

    def stuck(system: Any) -> None:
        async def stop() -> None:
            raise OSError("no route to n1")

        seen.append(system)
        system.stop = stop

    _, results, _ = memory_run(nemesis=(), system=stuck)
    assert results["valid"] == "unknown" and results["reason"] == "stopping the system: OSError: no route to n1"
    assert seen[0].cluster.stopped


def test_an_error_in_tracking_the_leader_leaves_the_verdict_unknown(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(self: Run) -> None:
        raise ValueError("no such role")

    monkeypatch.setattr(Run, "_follow_leaders", follow)
    _, results, _ = memory_run(nemesis=())
    assert results["valid"] == "unknown" and results["reason"] == "tracking the leader: ValueError: no such role"


def test_a_teardown_that_is_abandoned_leaves_the_verdict_unknown(memory_run: Any) -> None:
    def hanging(system: Any) -> None:
        async def stop() -> None:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.01)
            await asyncio.Event().wait()

        system.stop = stop

    _, results, _ = memory_run(nemesis=(), system=hanging)
    assert results["valid"] == "unknown" and results["interrupted"] is None
    assert results["reason"] == "stopping the system: abandoned; harness clean removes what it left"
