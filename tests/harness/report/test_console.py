"""The console: a panel on a terminal, plain lines elsewhere, nothing on standard output."""

import asyncio
import io
import os
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

import harness.report.console as module
from harness.live_stats import FaultStatus, LiveStats
from harness.pasteable import harness_command
from harness.report import LiveProgress, OutputConsole, print_summary
from harness.report.console import UNLIMITED_COLUMNS, sparkline
from tests.terminals import open_terminal

S = 1_000_000_000


def console(*, terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None, legacy_windows=False)


def stats_of_a_run():
    stats = LiveStats(events=12)
    stats.counts["write"] = {"invoke": 7, "ok": 4, "fail": 1, "info": 1}
    for number in range(6):
        stats.completion("ok", number * S, number * S + 2_000_000)
    stats.faults["f1"] = FaultStatus("f1", "partition", "halves", "proven", 3 * S)
    return stats


def progress(stats, where, now_ns=6 * S):
    return LiveProgress(stats, clock_ns=lambda: now_ns, time_limit_s=30, title="broker-register", console=where)


def show(item):
    where = console()
    where.print(item)
    return where.file.getvalue()


def test_the_panel_shows_phase_rates_latency_and_faults():
    live = progress(stats_of_a_run(), console())
    live.phase("driving the load")
    text = show(live.render())
    for words in (
        "broker-register",
        "driving the load, 24 s left",
        "1 ops/s",
        "4 ok",
        "1 fail",
        "1 info",
        "median 2 ms",
        "partition halves: in force, proven, 3 s",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("state", "words"),
    [("injecting", "injecting"), ("unproven", "NOT PROVEN"), ("healing", "healing"), ("unhealed", "NOT PROVEN HEALED")],
)
def test_the_state_of_a_fault_is_shown_in_words(state, words):
    stats = stats_of_a_run()
    stats.faults["f1"].state = state
    live = progress(stats, console())
    assert f"partition halves: {words}" in show(live.render())
    assert f"partition halves: {words}" in live.line().plain


def test_a_fault_whose_healing_is_not_proven_stays_in_the_panel():
    stats = stats_of_a_run()
    proof = {"proven": False, "detail": "n1 does not hear n2"}
    stats.nemesis("info", "heal", {"id": "f1", "proof": proof}, 5 * S)
    for number in range(4):
        stats.nemesis("invoke", "inject", {"id": f"g{number}", "nemesis": "clock"}, 5 * S)
    assert [fault.id for fault in stats.faults_now()] == ["g0", "g1", "g2", "g3", "f1"]
    for number in range(4):
        stats.nemesis("info", "heal", {"id": f"g{number}", "proof": {"proven": True}}, 6 * S)
    assert "partition halves: NOT PROVEN HEALED" in show(progress(stats, console()).render())
    stats.nemesis("info", "heal", {"id": "f1", "proof": {"proven": True}}, 7 * S)  # tried again at the end
    assert stats.faults == {}


def test_faults_that_the_panel_has_no_room_for_are_counted():
    stats = stats_of_a_run()
    for number in range(9):
        stats.faults[f"g{number}"] = FaultStatus(f"g{number}", "clock", "", "proven", 0)
    assert "and 6 more" in show(progress(stats, console()).render())


def watched(stats, width=80):
    """A panel with leaders and findings, and a function that returns its lines at this width."""
    live = progress(stats, Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None))
    live.leads(["n3", "n2"])
    live.so_far(None)

    def rows():
        where = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
        where.print(live.render())
        lines = where.file.getvalue().splitlines()
        assert max(map(cell_len, lines)) <= width
        return [" ".join(line.strip("│ ").split()) for line in lines]

    return live, rows


def test_the_panel_shows_leaders_cut_off_hosts_and_violations_at_80_columns():
    stats = stats_of_a_run()
    grudge = {"n1": ["n2", "n3"], "n2": ["n1"], "n3": ["n1"]}
    stats.nemesis("invoke", "inject", {"id": "f1", "grudge": grudge, "hosts": ["n1"]}, 3 * S)
    stats.nemesis("info", "inject", {"id": "f2", "nemesis": "kill", "hosts": ["n2"], "proof": {"proven": True}}, 3 * S)
    live, rows = watched(stats)
    assert live.is_watched
    shown = rows()
    for line in (
        "fault partition halves: in force, proven, 3 s",
        "cut off n1 | n2 n3",
        "fault kill: in force, proven, 3 s",
        "on n2",
        "leader n3; n2 also claims to lead",
        "so far no violation",
    ):
        assert line in shown
    live.leads([])
    live.so_far("key 3: 17 was stale (after 2.0 s)")
    shown = rows()
    assert "leader none" in shown and "so far VIOLATION: key 3: 17 was stale (after 2.0 s)" in shown
    live.leads(None)
    assert "leader unknown: no replica answered in time" in rows()


def test_the_panel_leaves_out_leaders_and_findings_that_are_not_known():
    text = show(progress(stats_of_a_run(), console()).render())
    assert "leader" not in text and "so far" not in text and "cut off" not in text
    assert not progress(stats_of_a_run(), console()).is_watched


@given(
    st.dictionaries(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=9), max_size=9),
    st.lists(st.text(max_size=40), max_size=9),
    st.text(max_size=900),
)
def test_the_panel_stays_within_80_columns_whatever_it_shows(grudge, hosts, violation):
    stats = stats_of_a_run()
    value = {"id": "f1", "grudge": grudge, "hosts": hosts, "proof": {"proven": True}}
    stats.nemesis("info", "inject", value, 3 * S)
    live, rows = watched(stats)
    live.leads(hosts)
    live.so_far(violation)
    assert len(rows()) < 30


def test_the_panel_is_shown_before_the_first_event():
    assert "getting ready" in show(progress(LiveStats(), console(), now_ns=0).render())


def test_progress_is_printed_as_plain_lines_without_a_terminal(monkeypatch):
    monkeypatch.setattr(module, "LINE_INTERVAL_S", 0.001)
    where = console()

    async def run():
        async with progress(stats_of_a_run(), where) as live:
            live.phase("starting the cluster")
            async with asyncio.timeout(10):
                while where.file.getvalue().count("ops/s") < 3:  # noqa: ASYNC110 (a buffer gives no notice)
                    await asyncio.sleep(0.001)

    asyncio.run(run())
    text = where.file.getvalue()
    assert text.startswith("starting the cluster\n")
    assert "\x1b" not in text
    assert (
        "   6.0 s  1 ops/s  ok 4 fail 1 info 1  median 2 ms p99 2 ms  partition halves: in force, proven, 3 s" in text
    )


def fault_event(f, proof, kind="info", **more):
    value = {"id": "f3", "nemesis": "kill", "variant": "sigkill@one", "hosts": ["n2"], "proof": proof, **more}
    return {"time": 2_500_000_000, "type": kind, "f": f, "value": value}


def test_the_beginning_and_end_of_a_fault_are_lines_without_a_terminal():
    where = console()

    async def run():
        async with progress(LiveStats(), where) as live:
            live.fault(fault_event("inject", {}, kind="invoke"))
            live.fault(fault_event("inject", {"proven": True}))
            live.fault(fault_event("heal", {"proven": True}))
            live.fault(fault_event("inject", {"proven": False, "detail": "n2 still answers"}))
            live.fault(fault_event("heal", None))
            live.fault(fault_event("heal", {"proven": True}, met={"proven": True, "exercised": True}))
            live.fault(fault_event("heal", {"proven": True}, met={"proven": True, "exercised": False}))
            live.fault(fault_event("heal", {"proven": True}, met={"proven": False, "detail": "n2 ran again"}))

    asyncio.run(run())
    assert where.file.getvalue().splitlines() == [
        "   2.5 s  fault f3 begins: kill sigkill@one on n2: proven",
        "   2.5 s  fault f3 ends: kill sigkill@one on n2: proven healed",
        "   2.5 s  fault f3 begins: kill sigkill@one on n2: NOT PROVEN (n2 still answers)",
        "   2.5 s  fault f3 ends: kill sigkill@one on n2: NOT PROVEN HEALED (no proof recorded)",
        "   2.5 s  fault f3 ends: kill sigkill@one on n2: proven healed",
        "   2.5 s  fault f3 ends: kill sigkill@one on n2: proven healed, not exercised (no details recorded)",
        "   2.5 s  fault f3 ends: kill sigkill@one on n2: proven healed, NOT PROVEN while it lasted (n2 ran again)",
    ]


class NoReader(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_broken_pipe_is_an_error_except_within_without_reader():
    where = OutputConsole(file=NoReader())
    with pytest.raises(BrokenPipeError):
        where.print("to nobody")
    where = OutputConsole(file=NoReader())
    with where.without_reader():
        where.print("to nobody")
        where.print("still to nobody")
    assert where.reader_is_gone


def test_typed_keys_are_not_echoed_while_the_panel_is_shown(monkeypatch):
    main, terminal = open_terminal()
    try:
        with open(terminal, "rb", closefd=False) as typed:
            monkeypatch.setattr(sys, "stdin", typed)
            before = termios.tcgetattr(terminal)

            async def run():
                async with progress(LiveStats(), console(terminal=True)):
                    return termios.tcgetattr(terminal)

            during = asyncio.run(run())
            assert before[3] & termios.ECHO and not during[3] & termios.ECHO
            assert termios.tcgetattr(terminal) == before
    finally:
        os.close(main)
        os.close(terminal)


def test_the_panel_is_redrawn_on_a_terminal_and_ends_as_a_line(monkeypatch):
    monkeypatch.setattr(module, "REDRAW_INTERVAL_S", 0.001)
    where = console(terminal=True)

    async def run():
        async with progress(stats_of_a_run(), where) as live:
            live.phase("final reads")
            before = len(where.file.getvalue())
            async with asyncio.timeout(10):
                while len(where.file.getvalue()) == before:  # noqa: ASYNC110 (a buffer gives no notice)
                    await asyncio.sleep(0.001)

    asyncio.run(run())
    assert "final reads" in where.file.getvalue()
    assert where.file.getvalue().rstrip().endswith("in force, proven, 3 s")


def test_an_error_within_the_display_is_propagated():
    where = console()

    async def run():
        async with progress(LiveStats(), where):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


def test_progress_goes_to_standard_error(capsys):
    async def run():
        async with LiveProgress(stats_of_a_run(), clock_ns=lambda: 6 * S, time_limit_s=30, title="t") as live:
            live.phase("driving the load")

    asyncio.run(run())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "driving the load" in captured.err


@given(st.lists(st.integers(0, 10**6)))
def test_a_sparkline_keeps_order_and_zero(values):
    drawn = sparkline(values)
    assert len(drawn) == len(values)
    for value, mark in zip(values, drawn, strict=True):
        assert (mark == "▁") == (value == 0)
    ranked = [mark for _, mark in sorted(zip(values, drawn, strict=True))]
    assert ranked == sorted(ranked)


RESULTS = {
    "valid": False,
    "reason": "linearizable: key 5 is not linearizable",
    "ops": {"invoke": 10, "ok": 12345, "fail": 1, "info": 2},
    "faults": [{"proven": True, "exercised": False}, {"proven": False, "exercised": None}],
    "checks": {
        "linearizable": {
            "valid": False,
            "reason": "stale",
            "witness": {"text": "the read of 17 was stale", "operations": [{"f": "read"}]},
        },
        "replicas": {"valid": "unknown", "reason": "no word from n2"},
    },
    "seed": 7,
    "replay": "harness run --seed 7 --set 'a=[b]'",
}


def summary(results, **options):
    where = console()
    print_summary(results, where, **options)
    return where.file.getvalue()


def test_the_summary_begins_with_the_verdict_and_has_counts_checks_report_and_command():
    text = summary(RESULTS, report_path=Path("/store/run/report.html"))
    assert text.strip().startswith("INVALID: linearizable: key 5 is not linearizable")
    for words in (
        "the read of 17 was stale",
        "12,345 ok   1 fail   2 info",
        "2 faults, 1 proven, 1 not exercised",
        "linearizable  invalid  stale",
        "replicas  unknown  no word from n2",
        "report  /store/run/report.html",
        f"repeat  {harness_command()} run --seed 7 --set 'a=[b]'",
    ):
        assert words in text


def test_the_summary_has_the_last_log_lines_of_hosts_that_did_not_recover():
    check = {"valid": False, "reason": "n1 ended", "last_words": {"n1": ["reading the log", "panic: no log"]}}
    text = summary({"valid": False, "reason": "r", "checks": {"recovers": check}})
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("last log lines of n1:")
    assert lines[at + 1 : at + 3] == ["reading the log", "panic: no log"]


@pytest.mark.parametrize(("valid", "word"), [(True, "VALID"), ("unknown", "UNKNOWN"), (None, "UNKNOWN")])
def test_the_summary_begins_with_the_word_of_the_verdict(valid, word):
    assert summary({"valid": valid, "reason": "r"}).strip().startswith(f"{word}: r")


def test_malformed_results_and_escape_sequences_are_printed_safely():
    text = summary({"valid": True, "reason": "\x1b[2J[bold]x[/]", "faults": 3, "checks": [1], "ops": {"ok": "x"}})
    assert "\x1b" not in text
    assert "[bold]x[/]" in text


def test_a_line_that_is_not_for_a_terminal_is_printed_unbroken_and_without_markup() -> None:
    out = io.StringIO()
    line = "seed 7: UNKNOWN: fault f2 (link rate@minority): [bold] " + "a long reason " * 20
    OutputConsole(file=out).print_line(line.rstrip())
    assert out.getvalue() == line.rstrip() + "\n"


@pytest.mark.parametrize("forced", [False, True])
def test_a_table_that_is_not_for_a_terminal_is_neither_cropped_nor_padded(
    forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours may be wanted in a CI log, which has no width either."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1" if forced else "")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("fault", "how"):
        table.add_column(name, no_wrap=True)
    table.add_row("kill", "a signal")
    table.add_row("disk-stall", "a long reason " * 20 + "ends")
    OutputConsole(file=(out := io.StringIO()), color_system=None, force_terminal=None).print(table)
    assert [line for line in out.getvalue().splitlines() if line] == [
        "fault       how", "kill        a signal", "disk-stall  " + "a long reason " * 20 + "ends",
    ]  # fmt: skip


def test_a_table_that_is_not_for_a_terminal_has_the_width_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    OutputConsole(file=(out := io.StringIO())).print("a long reason " * 20)
    assert 1 < max(map(len, out.getvalue().splitlines())) <= 30


def test_a_terminal_keeps_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    reader, writer = open_terminal()
    try:
        with open(writer, "w") as terminal:
            assert OutputConsole(file=terminal).width < UNLIMITED_COLUMNS
    finally:
        os.close(reader)
