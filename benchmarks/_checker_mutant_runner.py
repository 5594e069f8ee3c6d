"""A pytest plugin that collects the tests once and, for each mutant, runs the relevant tests in a forked process.

It runs in a copy of the tree. Without ``touched`` in its orders it runs every test that is not ``known`` and reports
which functions of ``checker`` each one calls, and how long it takes. With it, it writes one changed file after the
other into the copy and forks a child of the collected session; there the changed functions get their new code, and the
tests that call them run, quickest first, until one fails. Changes outside functions (constants, classes) are tried in a
newly started pytest. Orders come from a JSON file named by SPLITBRAIN_MUTANT_ORDERS; each result goes to the descriptor
named in it, as a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from benchmarks._checker_mutations import Mutation

MEMORY_LIMIT_BYTES = 4 << 30
"""Limit of a child's address space: a mutant that allocates without end must not exhaust the machine's memory."""

TIMEOUT_FACTOR = 10
"""A test counts as hung after `LEAST_CPU_S` plus this multiple of the CPU time that it took without a mutant."""

WATCHED_CPU_S = 1.0
"""CPU time for which a test is traced: by then it has called nearly all of its functions, and tracing is slow."""

LEAST_CPU_S = 5
LEAST_WALL_S = 120
FAILED, HUNG, PASSED = "failed", "hung", "passed"


class NeedsNewProcess(Exception):
    """The change is outside functions, so it cannot be applied to modules that are already imported."""


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """The code objects of functions, classes and comprehensions directly inside."""
    return [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _own(code: types.CodeType) -> tuple[Any, ...]:
    constants = [repr(each) for each in code.co_consts if not isinstance(each, types.CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants


def changed_codes(old: types.CodeType, new: types.CodeType) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """Pairs of function codes that differ, each before those nested in it. Raises :class:`NeedsNewProcess`."""
    is_function = bool(old.co_flags & 1)
    inside, inside_new = codes_of(old), codes_of(new)
    if not is_function and (_own(old) != _own(new) or len(inside) != len(inside_new)):
        raise NeedsNewProcess
    if is_function:
        if old == new:
            return
        yield old, new
    for one, other in zip(inside, inside_new, strict=False):
        if not is_function and one.co_name.startswith("<") and one != other:
            raise NeedsNewProcess
        yield from changed_codes(one, other)


def named(code: types.CodeType, root: Path) -> str:
    """The identifier of a function: file, qualified name and line."""
    return f"{os.path.relpath(code.co_filename, root)}:{code.co_qualname}:{code.co_firstlineno}"


def changes(mutation: Mutation, path: Path) -> list[tuple[types.CodeType, types.CodeType]]:
    """The codes that a mutation changes. Raises :class:`NeedsNewProcess`."""
    source = path.read_text(encoding="utf-8")
    old = compile(source, str(path), "exec", dont_inherit=True)
    return list(changed_codes(old, compile(mutation.applied(source), str(path), "exec", dont_inherit=True)))


def functions_below(root: Path) -> dict[str, list[types.FunctionType]]:
    """The functions that exist whose code is in files below a directory, by :func:`named`."""
    gc.unfreeze()  # tests/conftest.py freezes what was collected, and frozen objects are not listed
    found: dict[str, list[types.FunctionType]] = {}
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__code__.co_filename.startswith(str(root)):
            found.setdefault(named(each.__code__, root), []).append(each)
    return found


def is_replaceable(
    old: types.CodeType, new: types.CodeType, functions: dict[str, list[types.FunctionType]], root: Path
) -> bool:
    """Whether the code of a function can be replaced while it exists: there is such a function, or it is nested in one
    that exists, which makes it anew."""
    is_nested = "<locals>" in old.co_qualname
    return old.co_freevars == new.co_freevars and (is_nested or named(old, root) in functions)


QUICK_CPU_S = 0.5
"""Largest CPU time, while traced, of a test that is part of a quick run."""


class Runner:
    """Replaces pytest's own loop."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.root = Path.cwd()
        self.orders = orders
        self.touched: dict[str, list[str]] = {}
        self.cpu_s: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replaces the loop."""
        if session.testsfailed:
            raise session.Interrupted("tests could not be collected")
        items = {item.nodeid: item for item in session.items}
        if "touched" not in self.orders:
            known = set(self.orders["known"])
            self._report(self._watched([item for name, item in items.items() if name not in known]))
            return True
        self.touched, self.cpu_s = self.orders["touched"], self.orders["cpu_s"]
        self.fork_all([Mutation(**each) for each in self.orders["mutations"]], items)
        return True

    def _report(self, result: dict[str, Any]) -> None:
        os.write(self.orders["results_fd"], (json.dumps(result) + "\n").encode())

    def _watched(self, items: Sequence[pytest.Item]) -> dict[str, Any]:
        """Every test with the functions that it calls in this process, and its CPU time (s) while traced."""
        here = str(self.root / "checker") + os.sep
        seen: dict[int, types.CodeType] = {}

        def watch(frame: types.FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            seen.setdefault(id(code), code)
            if time.process_time() > until_s:
                sys.settrace(None)

        touched: dict[str, list[str]] = {}
        cpu_s: dict[str, float] = {}
        failed: list[str] = []
        until_s = 0.0
        for item, following in zip_longest(items, items[1:]):
            seen.clear()
            began_s = time.process_time()
            until_s = began_s + WATCHED_CPU_S
            threading.settrace(watch)
            sys.settrace(watch)
            reports = runtestprotocol(item, log=False, nextitem=following)
            sys.settrace(None)
            threading.settrace(None)
            cpu_s[item.nodeid] = round(time.process_time() - began_s, 3)
            # A thread of the test that has not ended yet may still be traced.
            codes = [code for code in list(seen.values()) if code.co_filename.startswith(here)]
            touched[item.nodeid] = sorted(named(code, self.root) for code in codes)
            failed += [item.nodeid for report in reports if report.failed]
        return {"touched": touched, "cpu_s": cpu_s, "failed": failed}

    def fork_all(self, mutations: Sequence[Mutation], items: dict[str, pytest.Item]) -> None:
        """Try one mutation after the other."""
        functions = functions_below(self.root)
        for mutation in mutations:
            path = self.root / mutation.file
            source = path.read_text(encoding="utf-8")
            began_s = time.monotonic()
            try:
                changed = changes(mutation, path)
                if not all(is_replaceable(old, new, functions, self.root) for old, new in changed):
                    raise NeedsNewProcess
                wanted = {named(changed[-1][0], self.root)}
            except NeedsNewProcess:
                changed = None
                wanted = {name for names in self.touched.values() for name in names if name.startswith(mutation.file)}
            tests = [name for name, names in self.touched.items() if name in items and not wanted.isdisjoint(names)]
            if changed is None and not tests:
                tests = list(items)  # a file without functions of its own: any test may use it
            tests = [name for name in tests if name not in self.orders["left_out"]]
            if self.orders["quick"]:
                tests = [name for name in tests if self.cpu_s[name] <= QUICK_CPU_S]
            tests.sort(key=lambda name: self.cpu_s.get(name, 0.0))
            path.write_text(mutation.applied(source), encoding="utf-8")
            try:
                status, by = self._fork([items[name] for name in tests], changed, functions)
            finally:
                path.write_text(source, encoding="utf-8")
            self._report(
                {"key": mutation.key, "status": status, "by": by, "tests": len(tests),
                 "wall_s": round(time.monotonic() - began_s, 1)}
            )  # fmt: skip

    def _fork(
        self,
        items: Sequence[pytest.Item],
        changed: Sequence[tuple[types.CodeType, types.CodeType]] | None,
        functions: dict[str, list[types.FunctionType]],
    ) -> tuple[str, str]:
        """The status of a mutant, and the test that decided it."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._be_the_child(items, changed, functions, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as reports:
            lines = reports.read().decode().split("\n")
        status = os.waitpid(child, 0)[1]
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass  # no descendant is left
        if status == 0:
            return PASSED, ""
        if not lines[1:]:
            raise RuntimeError(f"a child ended with {status} before its first test")
        if os.WIFEXITED(status):
            return FAILED, lines[-2]
        return HUNG if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM) else FAILED, lines[-2]

    def _be_the_child(
        self,
        items: Sequence[pytest.Item],
        changed: Sequence[tuple[types.CodeType, types.CodeType]] | None,
        functions: dict[str, list[types.FunctionType]],
        report_fd: int,
    ) -> None:
        """Run the tests with the changed code, reporting each name before it begins; never returns."""
        status = 1
        try:
            os.setpgid(0, 0)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(nowhere, standard)
            for kind in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(kind, signal.SIG_DFL)
            if changed is None:
                self._anew(items, report_fd)
            for old, new in changed or ():
                for function in functions.get(named(old, self.root), ()):
                    function.__code__ = new
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            status = int(self._fails(items, report_fd))
        finally:
            os._exit(status)

    def _fails(self, items: Sequence[pytest.Item], report_fd: int) -> bool:
        for item, following in zip_longest(items, items[1:]):
            os.write(report_fd, f"{item.nodeid}\n".encode())
            cpu_s = self.cpu_s.get(item.nodeid, 0.0)
            signal.setitimer(signal.ITIMER_PROF, LEAST_CPU_S + TIMEOUT_FACTOR * cpu_s)
            signal.setitimer(signal.ITIMER_REAL, LEAST_WALL_S + TIMEOUT_FACTOR * TIMEOUT_FACTOR * cpu_s)
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                return True
        return False

    def _anew(self, items: Sequence[pytest.Item], report_fd: int) -> None:
        """Replace this process by a pytest that imports the changed file and runs the same tests in the same order."""
        orders = self.root / "anew.json"
        names = [item.nodeid for item in items]
        os.set_inheritable(report_fd, True)
        orders.write_text(json.dumps({"only": names, "cpu_s": self.cpu_s, "report_fd": report_fd}), encoding="utf-8")
        files = sorted({name.partition("::")[0] for name in names}) or ["tests/checker"]
        environment = {**os.environ, "SPLITBRAIN_MUTANT_ORDERS": str(orders)}
        os.execve(sys.executable, [sys.executable, *arguments(files)], environment)


class RunnerAnew(Runner):
    """The loop of a pytest that was started for one mutant."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replaces the loop; ends the process."""
        items = {item.nodeid: item for item in session.items}
        self.cpu_s = self.orders["cpu_s"]
        if session.testsfailed or not set(self.orders["only"]) <= items.keys():
            os.write(self.orders["report_fd"], b"collection\n")
            os._exit(1)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        chosen = [items[name] for name in self.orders["only"]]
        status = 1
        try:
            status = int(self._fails(chosen, self.orders["report_fd"]))
        finally:
            os._exit(status)


def arguments(paths: Sequence[str]) -> list[str]:
    """Python's arguments for a pytest with this plugin in a copy of the tree."""
    off = ["no:cacheprovider", "no:randomly"]
    return [
        *("-B", "-m", "pytest", "-q", "-s", "-p", "benchmarks._checker_mutant_runner"),
        *(part for name in off for part in ("-p", name)),
        *("--basetemp", ".pytest-files", *paths),
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Replace the loop, and turn off the shrinking of failing examples, which nobody looks at."""
    with open(os.environ["SPLITBRAIN_MUTANT_ORDERS"], encoding="utf-8") as file:
        orders = json.load(file)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", hypothesis.settings(), derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutants")
    config.pluginmanager.register(RunnerAnew(orders) if "only" in orders else Runner(orders), "checker-mutants")
