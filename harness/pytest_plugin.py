"""Runs as pytest tests: the fixture `splitbrain` and the marker of the same name.

    @pytest.mark.splitbrain(nodes=3, time_limit=40)
    @pytest.mark.parametrize("nemesis", ["partition", "kill,pause", "all"])
    def test_etcd(splitbrain, nemesis):
        splitbrain.run(MyKV(), KV, workload="register", nemesis=nemesis).assert_valid()

An invalid run fails its test; an unknown one, or one that did not run, is an error: pytest and its JUnit file
distinguish the two. A test that asks for a run's verdict decides what it means; otherwise `assert_valid` is called at
its end. The output of a failing test begins with the verdict, the seed, the command that repeats it and the report. A
run's directory is removed if the run was valid and its test passed. docs/pytest.md is the page for users.

pytest loads this module in every session if Splitbrain is installed, so it imports the rest of the harness lazily.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.embedding import JudgedRun

__all__ = ["RunInvalid", "RunUndecided", "Splitbrain", "SplitbrainRun"]

MAX_LINE_CHARS = 400
"""Limit of the verdict's sentence in the output of a failing test; the report has all of it."""

_VERDICTS: Mapping[bool | str, str] = {True: "valid", False: "invalid"}
_RUNS = pytest.StashKey[list["SplitbrainRun"]]()
_PASSED = pytest.StashKey[bool]()


class RunInvalid(AssertionError):
    """A run was invalid: the system under test violated its guarantees."""


class RunUndecided(Exception):
    """A run is unknown, or did not take place: nothing is known about the system under test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("splitbrain")
    group.addoption(
        "--splitbrain-seed", type=int, metavar="N",
        help="seed of each test's first run, unless the test passes one to `run` (default: random)",
    )  # fmt: skip
    group.addoption(
        "--splitbrain-store", metavar="DIR", help="where runs are kept that were not valid, or whose test did not pass "
        "(default: splitbrain-store in the root directory)",
    )  # fmt: skip
    group.addoption("--splitbrain-keep", action="store_true", help="also keep valid runs of tests that passed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "splitbrain(**options): options for the test's runs, as for `harness run`: nodes, time_limit, cluster, "
        "rate, concurrency, nemesis, nemesis_interval, workload, operation_timeout, settings (a dict), seed",
    )


class SplitbrainRun:
    """A completed run."""

    def __init__(self, run: JudgedRun, repeat: str) -> None:
        self._results = run.results
        self._is_asked = False
        self.path: str = run.path
        """The run's directory."""
        self.report: str = run.report_path
        self.seed: int = run.seed
        self.repeat = repeat
        """The command that runs the test with the same seed."""

    @property
    def results(self) -> Mapping[str, Any]:
        """The content of results.json. A test that reads it, or the verdict, decides what the verdict means."""
        self._is_asked = True
        return self._results

    @property
    def valid(self) -> bool | str:
        """True, False or "unknown"."""
        return self.results["valid"]  # type: ignore[no-any-return]

    @property
    def verdict(self) -> str:
        """valid, invalid or unknown."""
        return _VERDICTS.get(self.valid, "unknown")

    def assert_valid(self) -> None:
        """Raises RunInvalid for an invalid run, RunUndecided for one that is unknown."""
        if self.valid is True:
            return
        text = f"{self.verdict.upper()}: {_clip(str(self.results['reason']))}\n{self._lines()}"
        raise (RunInvalid if self.valid is False else RunUndecided)(text)

    def assert_invalid(self) -> None:
        """For tests that a broken system is detected. Raises RunUndecided for an unknown run, RunInvalid for a valid
        one."""
        if self.valid is True:
            raise RunInvalid(f"VALID, and it should not be: {_clip(str(self.results['reason']))}\n{self._lines()}")
        if self.valid is not False:
            self.assert_valid()

    def assert_asked(self) -> None:
        """Called at the end of a test: raises like `assert_valid`, unless the test has asked for the verdict."""
        if not self._is_asked:
            self.assert_valid()

    @property
    def is_to_keep(self) -> bool:
        """Whether its directory is kept although its test passed."""
        return self._results["valid"] is not True

    def _lines(self) -> str:
        return f"seed    {self.seed}\nrepeat  {self.repeat}\nreport  {self.report}"


class Splitbrain:
    """The fixture: runs systems. Options of the marker apply to every run; `run` may override them."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._options: dict[str, Any] = {}
        for mark in reversed(list(request.node.iter_markers("splitbrain"))):
            if mark.args:
                raise pytest.UsageError("pytest.mark.splitbrain takes options by name: nodes=3, time_limit=40")
            self._options |= mark.kwargs
        self._runs: list[SplitbrainRun] = []
        request.node.stash[_RUNS] = self._runs
        self._base_seed: int | None = request.config.getoption("--splitbrain-seed")

    def run(self, system: Any, client: Any = None, **options: Any) -> SplitbrainRun:
        """Run a system: a subclass of `harness.sdk.System`, an instance, or a name for `harness run --system`. `client`
        is a subclass of `harness.sdk.Client`, needed if the system's module has several, or the command of a program
        that speaks JSON lines.

        Raises RunUndecided if it cannot be run.
        """
        from harness.embedding import judged_run
        from harness.errors import HarnessError, OperatorError, SystemUnderTestError

        try:
            seed = self._seed(options.get("seed"))
        except (TypeError, ValueError) as error:
            self._note("did-not-run", "", "", "")
            raise RunUndecided(f"DID NOT RUN: a seed must be a whole number: {error}") from None
        repeat = self._repeat_line()
        print(f"splitbrain: seed {seed}; {repeat}")
        given = {**self._options, **options, "seed": seed}
        try:
            if "store" in given:
                raise OperatorError("store is an option of pytest's command line: --splitbrain-store DIR")
            judged = judged_run(system, client, **given, store=self._store())
        except (OperatorError, SystemUnderTestError, HarnessError) as error:
            text = f"DID NOT RUN: {error}\nseed    {seed}\nrepeat  {repeat}\nstore   {self._store()}"
            self._note("did-not-run", seed, repeat, "")
            raise RunUndecided(text) from None
        run = SplitbrainRun(judged, repeat)
        self._runs.append(run)
        self._note(_VERDICTS.get(judged.valid, "unknown"), seed, repeat, run.report)
        if judged.results.get("interrupted"):
            raise KeyboardInterrupt
        return run

    def _seed(self, given: Any) -> int:
        """The seed of the next run: the one given to `run`, else one derived from the base seed (of the command line,
        of the marker, or the first one given)."""
        from harness.commands.series import derived_seed
        from harness.seeded import random_seed

        if self._base_seed is None:
            base = self._options.get("seed") if given is None else given
            self._base_seed = random_seed() if base is None else int(base)
        return derived_seed(self._base_seed, len(self._runs)) if given is None else int(given)

    def _repeat_line(self) -> str:
        where = self._request.config.cwd_relative_nodeid(self._request.node.nodeid)  # ids begin at the root directory
        return f"pytest {shlex.quote(where)} --splitbrain-seed {self._base_seed}"

    def _store(self) -> str:
        given = self._request.config.getoption("--splitbrain-store")
        return os.path.join(str(self._request.config.rootpath), given or "splitbrain-store")

    def _note(self, verdict: str, seed: int | str, repeat: str, report: str) -> None:
        """Add properties to the test case in the JUnit file."""
        self._request.node.user_properties += [
            ("splitbrain.verdict", verdict), ("splitbrain.seed", str(seed)), ("splitbrain.repeat", repeat),
            ("splitbrain.report", report),
        ]  # fmt: skip


@pytest.fixture
def splitbrain(request: pytest.FixtureRequest) -> Iterator[Splitbrain]:
    """Runs systems under faults; see `Splitbrain.run`."""
    yield Splitbrain(request)
    if request.node.stash.get(_PASSED, False) and not request.config.getoption("--splitbrain-keep"):
        from harness.store import RunDir, Store

        for run in request.node.stash.get(_RUNS, []):
            if run.is_to_keep:
                continue
            run_dir = RunDir(Path(run.path))
            Store(run_dir.path.parents[1]).remove(run_dir)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail a test that passed, or skipped itself, without looking at the verdict of an invalid or unknown run."""
    outcome = yield
    if outcome.excinfo is not None and not isinstance(outcome.excinfo[1], pytest.skip.Exception):
        return
    try:
        for run in item.stash.get(_RUNS, []):
            run.assert_asked()
    except (RunInvalid, RunUndecided) as error:
        outcome.force_exception(error)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, None]:
    """Put the message of an invalid or unknown run first, and report an undecided one as an error."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    if call.excinfo is None or not isinstance(call.excinfo.value, RunInvalid | RunUndecided):
        return
    frames = [entry for entry in call.excinfo.traceback if str(entry.path) == str(item.path)]
    file = item.config.cwd_relative_nodeid(item.nodeid).partition("::")[0]
    where = f"\nat      {file}:{frames[-1].lineno + 1}" if frames else ""
    report.longrepr = f"{call.excinfo.value}{where}"
    if isinstance(call.excinfo.value, RunUndecided):
        # pytest reports failures in a test's call as failures, and those before it as errors.
        report.when = "setup"


def _clip(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_LINE_CHARS else f"{flat[:MAX_LINE_CHARS]}..."
