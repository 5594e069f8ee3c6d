"""Runs from within another program: what is passed on, what is refused, and in which thread a run happens."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from harness import embedding
from harness.cli_parser import build_parser
from harness.commands.run import make_test
from harness.embedding import OPTIONS, JudgedRun, in_own_thread, judged_run
from harness.errors import OperatorError
from harness.sdk import Client, Host, System
from harness.sdk.plugin import PluginError
from harness.systems.guest import GuestSystem
from harness.test import Test


class Talk(Client):
    async def read(self, key: Any) -> Any:
        return None

    async def write(self, key: Any, value: Any) -> None:
        pass


class Another(Talk):
    __slots__ = ()


class KV(System):
    def command(self, host: Host) -> list[str]:
        return ["true"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Test, Any, str]]:
    """The runs that were asked for, none of which happens: test, class of the system, store."""
    found: list[tuple[Test, Any, str]] = []

    def perform(test: Test, system_class: Any, store: str) -> JudgedRun:
        found.append((test, system_class, store))
        return JudgedRun({"valid": "unknown"}, "path", "report", test.seed)

    monkeypatch.setattr(embedding, "_perform", perform)
    return found


def test_options_are_those_of_a_run_with_their_defaults(asked: list[tuple[Test, Any, str]]) -> None:
    run = judged_run("toy", seed=7, nemesis="kill,pause", settings={"workload.keys": 3}, nodes="4", store="there")
    [(test, _, store)] = asked
    assert (run.valid, run.seed, store) == ("unknown", 7, "there")
    assert (test.system, test.nodes, test.workload, test.time_limit_s) == ("toy", 4, "register", 30.0)
    assert [choice.name for choice in test.nemesis] == ["kill", "pause"]
    assert (dict(test.settings), test.client) == ({"workload.keys": "3"}, None)
    judged_run("toy")
    assert asked[1][0].nemesis == () and asked[1][2] == OPTIONS["store"]


def test_defaults_are_those_of_the_command_except_for_short_runs_of_few_hosts() -> None:
    command = vars(build_parser().parse_args(["run"]))
    different = {"nodes", "time_limit"}
    shared = OPTIONS.keys() - different - {"settings", "cluster_options"}
    assert {name: command[name] for name in shared} == {name: OPTIONS[name] for name in shared}
    assert all(OPTIONS[name] < command[name] for name in different)


def test_a_store_may_be_a_path(asked: list[tuple[Test, Any, str]], tmp_path: Path) -> None:
    judged_run("toy", store=tmp_path)
    assert asked[0][2] == str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (bool, [True, False], [1, 0, "true", None]),
        (int, [3, 3.0, "3"], [2.5, "3.5", True, math.inf, math.nan, None, "three", [3]]),
        (float, [3, 0.5, "0.5"], [False, math.nan, None, "half", {}]),
        (list, [[], ["up"], ("up",)], ["up", [1], {}, None, True]),
        (dict, [{}, MappingProxyType({"a": 1})], [[], "a=1", None, True]),
    ],
)
def test_values_of_options_have_the_type_of_their_default(kind: type, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not embedding._has_type(value, kind)] == []
    assert [value for value in wrong if embedding._has_type(value, kind)] == []


@pytest.mark.parametrize("option", [name for name, default in OPTIONS.items() if default is None])
def test_an_option_without_a_default_may_be_none(asked: list[tuple[Test, Any, str]], option: str) -> None:
    judged_run("toy", **{option: None})
    assert len(asked) == 1


def test_a_class_is_named_by_its_file_and_keeps_the_clients_that_it_is_given(
    asked: list[tuple[Test, Any, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Path(__file__)
    for system, client in ((KV, Talk), (KV(), Talk()), (KV, Another())):
        judged_run(system, client)
        test, found, _ = asked.pop()
        assert issubclass(found, GuestSystem) and found.plugin.system_class is KV
        assert found.plugin.client_class is (client if isinstance(client, type) else type(client))
        assert test.client is None
    monkeypatch.chdir(here.parent)
    judged_run(KV, Talk)
    assert asked.pop()[0].system == f"{here.name}:KV"
    monkeypatch.chdir(tmp_path)
    judged_run(KV, Talk)
    assert asked.pop()[0].system == f"{here}:KV"


def test_a_command_becomes_a_client_program(
    asked: list[tuple[Test, Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "client_program", {"talk --fast": Another}.__getitem__)
    for system in (KV, "toy"):
        judged_run(system, "talk --fast")
        test, found, _ = asked.pop()
        assert test.client == "talk --fast" and found.plugin.client_class is Another


def test_a_system_without_a_client_is_refused_before_the_run(
    asked: list[tuple[Test, Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.sdk.plugin._client_of", lambda _: Client)
    with pytest.raises(PluginError, match=r"has no class that is a harness\.sdk\.Client: write one, or use --client"):
        judged_run(KV)
    assert asked == []


def where() -> tuple[bool, bool]:
    """Whether this is the main thread, and whether its event loop runs."""
    return threading.current_thread() is threading.main_thread(), embedding._loop_runs()


def test_a_run_has_the_main_thread_only_if_no_loop_runs_there() -> None:
    async def within() -> tuple[bool, bool]:
        return in_own_thread(where)

    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append((threading.get_ident(), in_own_thread(threading.get_ident))))
    other.start()
    other.join()
    assert in_own_thread(where) == (True, False)
    assert asyncio.run(within()) == (False, False)
    [(mine, its)] = found
    assert mine != its


@pytest.mark.parametrize("error", [OperatorError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_exceptions_leave_the_thread_of_a_run(error: BaseException) -> None:
    def fails() -> None:
        raise error

    async def within() -> None:
        in_own_thread(fails)

    with pytest.raises(type(error)) as caught:
        asyncio.run(within())
    assert caught.value is error


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, on a machine where all clusters but "local" and "sim" need a user namespace."""
    found: list[str] = []

    def prepare(test: Test, *, system_class: Any) -> Any:
        found.append(f"prepare {test.cluster}")
        parts = SimpleNamespace(test=test, system_class=system_class)
        return SimpleNamespace(parts=parts, in_user_namespace=test.cluster not in ("local", "sim"))

    def perform(parts: Any, store: Any, console: Any) -> Any:
        found.append(f"run on {parts.test.cluster}")
        return SimpleNamespace(path=Path("p"), report_path=Path("p/report.html")), {"valid": False}

    monkeypatch.setattr(embedding, "prepare_test", prepare)
    monkeypatch.setattr(embedding, "perform", perform)
    return found


def test_a_run_that_would_need_a_user_namespace_is_on_local_hosts(events: list[str]) -> None:
    run = judged_run("toy", seed=5)
    assert events == ["prepare auto", "prepare local", "run on local"]
    assert (run.path, run.report_path, run.seed, run.valid) == ("p", "p/report.html", 5, False)
    with pytest.raises(OperatorError, match="cluster netns needs root here: run as root, or use cluster='local'"):
        judged_run("toy", cluster="netns")
    assert events[3:] == ["prepare netns"]


def test_a_run_fetches_its_system_first(events: list[str]) -> None:
    class Downloaded:
        @classmethod
        def fetch(cls, say: Callable[[str], None], settings: Any) -> None:
            say("a line for each package")
            events.append(f"fetch {dict(settings)}")

    given = {**OPTIONS, "system": "toy", "client": None, "cluster": "sim", "settings": {"version": "7"}}
    embedding._perform(make_test(given), Downloaded, "store")
    assert events == ["prepare sim", "fetch {'version': '7'}", "run on sim"]
