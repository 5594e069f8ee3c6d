"""Runs from within another program: a pytest test, a script, a notebook.

`judged_run` is `harness run` as a function: it plans, performs and judges a run and stores it. It may be called while
an event loop is running: the run then has its own thread and loop, as it always has outside the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from harness import registry
from harness.commands.run import Prepared, make_test, prepare_test
from harness.errors import OperatorError, nearest
from harness.execution import perform
from harness.json_lines import client_program
from harness.report import OutputConsole
from harness.sdk import Client, System
from harness.sdk.plugin import plugin_of, require_client
from harness.store import Store
from harness.systems.base import Fetched
from harness.systems.guest import GuestSystem, adapted, with_client
from harness.test import Test

__all__ = ["OPTIONS", "JudgedRun", "in_own_thread", "judged_run"]

T = TypeVar("T")

OPTIONS: Mapping[str, Any] = {
    "workload": "register",
    "nemesis": "none",
    "cluster": "auto",
    "nodes": 3,
    "time_limit": 30.0,
    "nemesis_interval": 5.0,
    "nemesis_schedule": None,
    "concurrency": 10,
    "rate": 200.0,
    "operation_timeout": 3.0,
    "checker_timeout": 60.0,
    "checker_memory": 2048,
    "settings": {},
    "cluster_options": {},
    "metrics": [],
    "fail_fast": False,
    "seed": None,
    "store": "store",
}
"""Option of a run -> its default. The options are those of `harness run`, times in seconds."""

_KINDS: Mapping[type, str] = {
    bool: "True or False",
    dict: "a dict",
    list: "a list of strings",
    int: "a whole number",
    float: "a number",
}
"""Type of a default -> description of a valid value."""


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A completed run: its verdict and the paths of its files."""

    results: Mapping[str, Any]
    path: str
    report_path: str
    seed: int

    @property
    def valid(self) -> bool | str:
        """True, False or "unknown"."""
        valid: bool | str = self.results["valid"]
        return valid


def judged_run(system: Any, client: Any = None, **options: Any) -> JudgedRun:
    """Perform and judge a run.

    `system` is a subclass of `harness.sdk.System`, an instance, or a name as for `--system`; `client` a subclass of
    `harness.sdk.Client`, an instance, the command of a program that speaks JSON lines, or None for the system's own.
    Options are those of `OPTIONS`. Raises OperatorError, SystemUnderTestError, HarnessError.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise OperatorError(f"no option {unknown[0]!r}{nearest(unknown[0], OPTIONS)}; known: {', '.join(OPTIONS)}")
    given = {**OPTIONS, **options}
    _require_kinds(given)
    name, system_class = _system(system, client)
    test = make_test({**given, "system": name, "client": client if isinstance(client, str) else None})
    return in_own_thread(lambda: _perform(test, system_class, str(given["store"])))


def _require_kinds(given: Mapping[str, Any]) -> None:
    """Raise OperatorError for an option whose value has another type than its default: the command line would refuse it
    too, and 2.5 nodes are not 2."""
    for name, value in given.items():
        default = OPTIONS[name]
        kind = int if name == "seed" else type(default)
        if kind not in _KINDS or (value is None and default is None):
            continue
        if not _has_type(value, kind):
            raise OperatorError(f"{name} must be {_KINDS[kind]}, not {value!r:.80}")


def _has_type(value: Any, kind: type) -> bool:
    """Whether a value is of a type in `_KINDS`, or a string that is such a number."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is dict:
        return isinstance(value, Mapping)
    if kind is list:
        return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return isinstance(value, str) or bool(number == value)


def _perform(test: Test, system_class: Any, store: str) -> JudgedRun:
    prepared = prepare_test(test, system_class=system_class)
    if prepared.in_user_namespace:
        if test.cluster != "auto":
            raise OperatorError(f"cluster {test.cluster} needs root here: run as root, or use cluster='local'")
        prepared = prepare_test(replace(test, cluster="local"), system_class=system_class)
    return _performed(prepared, store)


def _performed(prepared: Prepared, store: str) -> JudgedRun:
    test = prepared.parts.test
    system_class = prepared.parts.system_class
    if isinstance(system_class, Fetched):
        system_class.fetch(lambda line: None, test.system_settings)
    run_dir, results = perform(prepared.parts, Store(store), OutputConsole(file=io.StringIO()))
    return JudgedRun(results, str(run_dir.path), str(run_dir.report_path), test.seed)


def in_own_thread(work: Callable[[], T]) -> T:
    """Call `work` and return its result, or raise its exception. In the main thread without a running event loop it is
    called directly, so that Ctrl-C ends a run cleanly; otherwise in a new thread, which has no loop yet."""
    if threading.current_thread() is threading.main_thread() and not _loop_runs():
        return work()
    outcome: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="splitbrain-run")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _system(system: Any, client: Any) -> tuple[str, Any]:
    """The name of a system, and its class for the harness. Raises OperatorError."""
    if isinstance(system, str):
        name, found = system, registry.load("systems", system)
    else:
        system_class = system if isinstance(system, type) else type(system)
        if not issubclass(system_class, System):
            raise OperatorError(f"{system!r:.80} is neither a harness.sdk.System nor the name of a system")
        _require_no_attributes(system, "settings={...} of the run")
        name = _name_of(system_class)
        of_its_own = None if client is None else Client if isinstance(client, str) else _client_class(client)
        found = adapted(plugin_of(system_class, system_class.__name__.lower(), of_its_own))
    if client is None:
        if isinstance(found, type) and issubclass(found, GuestSystem):
            require_client(found.plugin)
        return name, found
    if not (isinstance(found, type) and issubclass(found, GuestSystem)):
        raise OperatorError(f"system {name} has its own clients; only systems of harness.sdk accept others")
    if isinstance(client, str):
        return name, with_client(found, client_program(client))
    return name, with_client(found, _client_class(client))


def _require_no_attributes(given: Any, instead: str) -> None:
    """Raise OperatorError for an instance with attributes: only its class is used, since each run creates its own
    systems and clients, so the attributes would be silently lost."""
    try:
        names = "" if isinstance(given, type | str) else ", ".join(vars(given))
    except TypeError:  # a class with slots
        return
    if names:
        kind = type(given).__name__
        raise OperatorError(
            f"{kind} is created anew for each run, without this object's attributes ({names}): use {instead}"
        )


def _client_class(client: Any) -> type[Client]:
    found = client if isinstance(client, type) else type(client)
    _require_no_attributes(client, "attributes of a class")
    if not issubclass(found, Client):
        raise OperatorError(f"{client!r:.80} is neither a harness.sdk.Client nor the command of a client program")
    _file_of(found)
    return found


def _file_of(found: type) -> str:
    """The file of a plug-in's class, needed for repeating a run and for reporting mistakes. Raises OperatorError."""
    path = None
    with contextlib.suppress(OSError, TypeError):  # raised for code that was typed in
        path = inspect.getsourcefile(found)
    if path is None or not os.path.isfile(path):
        raise OperatorError(
            f"{found.__name__} is not defined in a file: move it to one and import it (a notebook cell, a prompt, "
            "python -c and standard input are not files)"
        )
    return path


def _name_of(system_class: type[System]) -> str:
    """The system's name for `harness run`: FILE.py:CLASS. Raises OperatorError."""
    path = _file_of(system_class)
    try:
        shown = str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        shown = path
    return f"{shown}:{system_class.__name__}"
