"""The console: progress of a run, and its result.

On a terminal a panel is redrawn a few times a second; anywhere else (a pipe, a CI log) a plain line appears at
each phase, when a fault begins and ends, and every few seconds. Both go to standard error; the verdict goes to standard
output.
"""

from __future__ import annotations

__all__ = ["LiveProgress", "OutputConsole", "print_summary"]

import asyncio
import contextlib
import os
import re
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from checker.faults import count_unmet, exercised_by
from harness.live_stats import FaultStatus, LiveStats
from harness.metrics.expression import METRICS
from harness.pasteable import as_typed_here
from harness.report.checks import verdict_word
from harness.report.faults import cut_in_a_line
from harness.report.witness import fault_after, witness_from
from harness.units import clip, count, duration, instant, per_second, plural

REDRAW_INTERVAL_S = 0.25
"""Time between redraws of the panel: smooth to the eye, and it costs next to no CPU."""

LINE_INTERVAL_S = 5.0
"""Time between progress lines without a terminal: a run of one minute leaves a dozen in the log."""

MAX_FAULTS_SHOWN = 4
VALUE_CHARACTERS = 64
"""Width of a value in the panel; with the row's name and the frame it fits into 80 columns."""

UNLIMITED_COLUMNS = 1_000_000
"""Width of a pipe or a file. A table cropped at the 80 columns of no window has lost what was cropped."""

MAX_HOSTS_NAMED = 6
SPARKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"valid": "green", "invalid": "red", "unknown": "magenta"}
_FAULT_STATES = {
    "injecting": ("injecting", "yellow"),
    "proven": ("in force, proven", "green"),
    "unproven": ("NOT PROVEN", "bold magenta"),
    "healing": ("healing", "cyan"),
    "unhealed": ("NOT PROVEN HEALED", "bold magenta"),
}


class OutputConsole(Console):
    """A console whose reader may go away, as in a pipe into head(1).

    It then raises BrokenPipeError, which the command line turns into an exit status of its own. Code that must
    complete whether or not somebody reads runs within `without_reader`.
    """

    reader_is_gone: bool = False
    """Whether output was lost because the reader is gone."""
    _needs_reader: bool = True

    def __init__(self, *, width: int | None = None, **options: Any) -> None:
        """Like `Console`; but in a pipe or a file, lines are as long as they have to be, unless $COLUMNS is set."""
        super().__init__(width=width, **options)
        self._is_wide = width is None and "COLUMNS" not in os.environ and not _is_on_terminal(self.file)
        if self._is_wide:
            self.width = UNLIMITED_COLUMNS

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Without the blanks that fill the rows of a table up to its longest one: a viewer that wraps lines (a CI log)
        would show them as empty lines."""
        text = super()._render_buffer(buffer)
        return re.sub("[ ]+$", "", text, flags=re.MULTILINE) if self._is_wide else text

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print one line as it is: no markup, and no line breaks, which would end up in pipes and files as well."""
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Stop printing; raises BrokenPipeError unless within `without_reader`."""
        self.quiet = True
        self.reader_is_gone = True
        if self._needs_reader:
            raise BrokenPipeError

    def _write_buffer(self) -> None:
        """Within `without_reader`, treat a stream that cannot be written (a full disk) as one without a reader."""
        try:
            super()._write_buffer()
        except OSError:
            if self._needs_reader:
                raise
            self.on_broken_pipe()

    @contextlib.contextmanager
    def without_reader(self) -> Iterator[None]:
        """Continue silently if the reader goes away; `reader_is_gone` then becomes true."""
        before, self._needs_reader = self._needs_reader, False
        try:
            yield
        finally:
            self._needs_reader = before


def _is_on_terminal(file: IO[str]) -> bool:
    """Not whether it takes colours, which $FORCE_COLOR decides."""
    try:
        return file.isatty()
    except (ValueError, AttributeError):  # a closed file, or what a notebook has in place of one
        return False


@contextlib.contextmanager
def _keys_unseen() -> Iterator[None]:
    """Turn the terminal's echo off: a typed "^C" or Enter would push the panel down and leave a part of it behind.
    If the harness is killed, the shell turns the echo on again."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):  # no terminal, or no standard input at all
        yield
        return
    changed = [*before]
    changed[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed in the meantime
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def sparkline(values: list[int]) -> str:
    """One character for each value; the highest is a full block, and a value above 0 is never the lowest block."""
    highest = max(values, default=0)
    if highest <= 0:
        return SPARKS[0] * len(values)
    steps = len(SPARKS) - 1
    return "".join(SPARKS[0] if value <= 0 else SPARKS[max(1, round(value / highest * steps))] for value in values)


class LiveProgress:
    """Shows the progress of a run; an async context manager.

    `stats` is the history writer's; `clock_ns` returns nanoseconds since the load began (0 before);
    `time_limit_s` is the length of the load; `console` defaults to standard error.
    """

    def __init__(
        self,
        stats: LiveStats,
        *,
        clock_ns: Callable[[], int],
        time_limit_s: float,
        title: str,
        console: Console | None = None,
    ) -> None:
        self._stats = stats
        self._clock_ns = clock_ns
        self._time_limit_s = time_limit_s
        self._title = title
        self._console = console if console is not None else Console(stderr=True)
        self._phase = ""
        self._leaders: Sequence[str] | None = None
        self._asks_for_leaders = False
        self._verdict: Text | None = None
        self._live: Live | None = None
        self._terminal = contextlib.ExitStack()
        self._task: asyncio.Task[None] | None = None

    def phase(self, text: str) -> None:
        """Show what the run is doing now; without a terminal, print it as a line."""
        self._phase = clip(text, 200)
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
        elif self._task is not None:
            self._console.print(Text(self._phase), soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a permanent line: above the panel, or among the other lines."""
        self._console.print(Text(text))

    @property
    def is_watched(self) -> bool:
        """Whether there is a panel, which shows the leader and violations found during the run."""
        return self._console.is_terminal

    def leads(self, hosts: Sequence[str] | None) -> None:
        """Set the hosts that claim to lead, newest term first; None if none could be asked in time."""
        self._asks_for_leaders, self._leaders = True, hosts

    def so_far(self, violation: str | None) -> None:
        """Set the verdict so far: None for no violation yet, else the text of the first violation."""
        if violation is None:
            self._verdict = Text("no violation", style="green")
        else:
            self._verdict = Text(f"VIOLATION: {clip(violation, 3 * VALUE_CHARACTERS)}", style="bold red")

    def fault(self, event: Mapping[str, Any]) -> None:
        """Take a completed nemesis event; without a panel, print it as a line."""
        if self._live is None and self._task is not None and event["type"] == "info":
            self._console.print(_fault_line(event), soft_wrap=True)

    async def __aenter__(self) -> LiveProgress:
        if self._console.is_terminal:
            self._terminal.enter_context(_keys_unseen())
            self._live = Live(
                self.render(), console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start(refresh=True)
        self._task = asyncio.get_running_loop().create_task(self._keep_showing(), name="progress")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._terminal.close()
        if self._stats.events:
            self._console.print(self.line(), soft_wrap=True)

    async def _keep_showing(self) -> None:
        while True:
            if self._live is not None:
                await asyncio.sleep(REDRAW_INTERVAL_S)
                self._live.update(self.render(), refresh=True)
            else:
                await asyncio.sleep(LINE_INTERVAL_S)
                if self._stats.events:
                    self._console.print(self.line(), soft_wrap=True)

    def _left_s(self) -> float:
        return max(0.0, self._time_limit_s - self._clock_ns() / 1e9)

    def line(self) -> Text:
        """The progress as one line of text."""
        now_ns, stats = self._clock_ns(), self._stats
        totals = stats.by_type
        outcomes = " ".join(f"{kind} {count(totals[kind])}" for kind in ("ok", "fail", "info"))
        parts = [f"{now_ns / 1e9:6.1f} s", f"{per_second(stats.rate_per_s(now_ns))} ops/s", outcomes]
        if marks := stats.latency_quantiles_ns():
            parts.append(f"median {duration(marks[0])} p99 {duration(marks[1])}")
        parts += [_fault_words(fault, now_ns) for fault in stats.faults_now()[:MAX_FAULTS_SHOWN]]
        return Text("  ".join(parts))

    def render(self) -> Panel:
        """The panel of a terminal."""
        now_ns, stats = self._clock_ns(), self._stats
        totals = stats.by_type
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right", no_wrap=True)
        grid.add_column()
        left_s = self._left_s()
        if now_ns:
            state = f"{self._phase}, {duration(left_s * 1e9)} left" if left_s > 0 else self._phase
        else:
            state = self._phase
        grid.add_row("now", Text(state or "getting ready"))
        if stats.events:
            rates = stats.rates(now_ns, seconds=40)
            grid.add_row(
                "rate", Text.assemble(f"{per_second(stats.rate_per_s(now_ns)):>7} ops/s  ", (sparkline(rates), "blue"))
            )
            grid.add_row(
                "outcomes",
                Text.assemble(
                    (f"{count(totals['ok'])} ok", "blue"),
                    "   ",
                    (f"{count(totals['fail'])} fail", "yellow"),
                    "   ",
                    (f"{count(totals['info'])} info", "magenta"),
                    f"   {stats.open_operations} open",
                ),
            )
            if marks := stats.latency_quantiles_ns((0.5, 0.99, 1.0)):
                grid.add_row(
                    "latency", f"median {duration(marks[0])}   p99 {duration(marks[1])}   max {duration(marks[2])}"
                )
            self._add_faults(grid, now_ns)
            if self._asks_for_leaders:
                grid.add_row("leader", self._leader_words())
            if self._verdict is not None:
                grid.add_row("so far", self._verdict)
        return Panel(grid, title=Text(self._title), title_align="left", border_style="dim", padding=(0, 1))

    def _add_faults(self, grid: Table, now_ns: int) -> None:
        faults = self._stats.faults_now()
        shown = faults[:MAX_FAULTS_SHOWN]
        for fault in shown:
            grid.add_row("fault", Text(_fault_words(fault, now_ns), style=_FAULT_STATES[fault.state][1]))
            if cut := cut_in_a_line(fault.grudge, VALUE_CHARACTERS):
                grid.add_row("cut off", Text(cut))
            elif fault.hosts:
                grid.add_row("on", Text(clip(_named(fault.hosts), VALUE_CHARACTERS)))
        if len(faults) > len(shown):
            grid.add_row("", f"and {len(faults) - len(shown)} more")
        if not shown:
            grid.add_row("fault", Text("none", style="dim"))

    def _leader_words(self) -> Text:
        if self._leaders is None:
            return Text("unknown: no replica answered in time", style="yellow")
        if not self._leaders:
            return Text("none", style="yellow")
        first, *others = self._leaders
        also = f"; {_named(others)} also {'claims' if len(others) == 1 else 'claim'} to lead" if others else ""
        return Text(clip(f"{first}{also}", VALUE_CHARACTERS))


def _named(hosts: Sequence[str]) -> str:
    more = len(hosts) - MAX_HOSTS_NAMED
    return ", ".join(hosts[:MAX_HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _fault_words(fault: FaultStatus, now_ns: int) -> str:
    name = clip(f"{fault.nemesis} {fault.variant}".strip(), 40)
    return f"{name}: {_FAULT_STATES[fault.state][0]}, {duration(max(0, now_ns - fault.since_ns))}"


def _fault_line(event: Mapping[str, Any]) -> Text:
    """A line for a fault that began or ended, and whether that is proven."""
    value = event.get("value")
    value = value if isinstance(value, Mapping) else {}
    proof = value.get("proof")
    proof = proof if isinstance(proof, Mapping) else {}
    began, is_proven = event["f"] == "inject", proof.get("proven") is True
    hosts = value.get("hosts")
    where = f" on {', '.join(map(str, hosts))}" if isinstance(hosts, list) and hosts else ""
    words = ("proven" if began else "proven healed") if is_proven else ("NOT PROVEN" if began else "NOT PROVEN HEALED")
    why = "" if is_proven else f" ({proof.get('detail') or 'no proof recorded'})"
    met = value.get("met")
    if not began and isinstance(met, Mapping):
        if met.get("proven") is not True:
            why += f", NOT PROVEN while it lasted ({met.get('detail') or 'no proof recorded'})"
        elif exercised_by(None, met) is False:
            why += f", not exercised ({met.get('detail') or 'no details recorded'})"
    name = f"{value.get('nemesis', 'fault')} {value.get('variant') or ''}".strip()
    text = f"fault {value.get('id')} {'begins' if began else 'ends'}: {name}{where}: {words}{why}"
    return Text(f"{event['time'] / 1e9:6.1f} s  {clip(text, 400)}")


def print_summary(
    results: Mapping[str, Any],
    console: Console,
    *,
    test: Mapping[str, Any] | None = None,
    report_path: Path | None = None,
) -> None:
    """Print the verdict and its grounds for a person; colour never carries meaning alone."""
    verdict = verdict_word(results.get("valid"))
    colour = _COLOURS[verdict]
    lines: list[Text | Table] = [
        Text.assemble(
            (verdict.upper(), f"bold {colour}"), f": {clip(results.get('reason') or 'no reason given', 1200)}"
        )
    ]
    checks = results.get("checks")
    checks = checks if isinstance(checks, Mapping) else {}
    for check in checks.values():
        witness = witness_from(check) if isinstance(check, Mapping) and check.get("valid") is False else None
        if witness is not None and witness.text and witness.text not in str(results.get("reason")):
            lines.append(Text(clip(witness.text, 1200)))
            break
    faults = results.get("faults")
    lines += [Text(line) for line in _last_words(checks)]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column()
    ops = results.get("ops")
    if isinstance(ops, Mapping):
        table.add_row(
            "operations", Text("   ".join(f"{_count(ops.get(kind))} {kind}" for kind in ("ok", "fail", "info")))
        )
    if isinstance(faults, list):
        proven = sum(isinstance(fault, Mapping) and fault.get("proven") is True for fault in faults)
        style = "" if proven == len(faults) else "bold magenta"
        words = f"{plural(len(faults), 'fault')}, {proven} proven" if faults else "none"
        if unmet := count_unmet(faults):
            words += f", {unmet} not exercised"
        words += _too_late(checks, faults)
        table.add_row("faults", Text(words, style=style))
    if words := _metrics_words(results):
        table.add_row("metrics", Text(words))
    for name, check in checks.items():
        if isinstance(check, Mapping):
            word = verdict_word(check.get("valid"))
            reason = clip(check.get("reason") or "", 200)
            table.add_row(Text(clip(name, 30)), Text.assemble((word, _COLOURS[word]), f"  {reason}"))
    if results.get("stopped_at_first_violation") is not None:
        table.add_row("stopped at", Text(clip(results["stopped_at_first_violation"], 300)))
    seed = results.get("seed", (test or {}).get("seed"))
    if seed is not None:
        table.add_row("seed", Text(clip(seed, 40)))
    lines.append(table)
    console.print()
    console.print(Group(*lines))
    # Paths and command lines are printed unwrapped and unstyled, so that they can be copied.
    if report_path is not None:
        console.print(Text(f"report  {clip(str(report_path), 1000)}"), soft_wrap=True)
    if isinstance(results.get("replay"), str) and results["replay"]:
        console.print(Text(f"repeat  {clip(as_typed_here(results['replay']), 2000)}"), soft_wrap=True)


def _too_late(checks: Mapping[str, Any], faults: Sequence[Any]) -> str:
    """Which checks failed before any fault began; empty if faults may have had a part in every failure."""
    found = [each for each in faults if isinstance(each, Mapping)]
    for name, check in checks.items():
        witness = witness_from(check) if isinstance(check, Mapping) and check.get("valid") is False else None
        began_ns = None if witness is None else fault_after(witness, found)
        if began_ns is not None:
            return f"; {clip(name, 30)} failed before the first one, which began at {instant(began_ns)}"
    return ""


def _count(value: Any) -> str:
    return count(value) if isinstance(value, int) else "?"


def _metrics_words(results: Mapping[str, Any]) -> str:
    """How often the hosts were asked for their metrics, and what is missing; empty if they were not asked."""
    system = results.get("system")
    said = system.get(METRICS) if isinstance(system, Mapping) else None
    if not isinstance(said, Mapping):
        return ""
    reads, silent = (
        {name: number for name, number in found.items() if type(number) is int} if isinstance(found, Mapping) else {}
        for found in (said.get("reads"), said.get("unanswered"))
    )
    asked, failed = sum(reads.values()), sum(silent.values())
    words = f"read {asked:,} times from {plural(len(reads), 'host')}" if asked else "never read"
    if failed:
        words += (
            f", {failed:,} without an answer ({', '.join(f'{clip(name, 20)} {silent[name]:,}' for name in silent)})"
        )
    errors = said.get("last_errors")
    if asked and failed == asked and isinstance(errors, Mapping) and errors:
        words += f": {clip(next(iter(errors.values())), 120)}"
    elif isinstance(said.get("never_seen"), list) and said["never_seen"]:
        words += f"; on no page: {', '.join(clip(text, 60) for text in said['never_seen'][:4])}"
    return words + (f"; stopped: {clip(said['stopped'], 80)}" if said.get("stopped") else "")


def _last_words(checks: Mapping[str, Any]) -> Iterator[str]:
    """The last log lines of programs that did not come back."""
    for check in checks.values():
        words = check.get("last_words") if isinstance(check, Mapping) and check.get("valid") is False else None
        for host, lines in words.items() if isinstance(words, Mapping) else ():
            yield f"last log lines of {clip(host, 40)}:"
            yield from (f"    {clip(line, 300)}" for line in lines)
