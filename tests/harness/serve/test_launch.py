"""Starting runs from a form: its command line, what is refused, and what happens when the server ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

from harness.cli_parser import build_parser
from harness.errors import OperatorError
from harness.serve import launch as module
from harness.serve.launch import NUMBERS, Form, Launcher, read_form
from harness.signals import ended_by_signals
from harness.store import Store

from .conftest import DEADLINE_S, Client, make_run

FIELDS = {
    "system": ["broker"], "workload": ["register"], "cluster": ["sim"], "settings": [""],
    **{name: [standard] for name, (_, standard) in NUMBERS.items()},
}  # fmt: skip
KIND = "application/x-www-form-urlencoded"


def fields(**changes: list[str]) -> dict[str, list[str]]:
    return {**FIELDS, **changes}


def test_a_form_becomes_the_arguments_of_a_command_line() -> None:
    given = fields(
        nemesis=["partition", "kill"], settings=["read_mode=unsafe timing=default"], seed=["7"], rate=["50.5"]
    )
    arguments = build_parser().parse_args(["run", *read_form(given).words])
    assert (arguments.system, arguments.workload, arguments.cluster) == ("broker", "register", "sim")
    assert arguments.nemesis == "partition,kill"
    assert (arguments.seed, arguments.rate, arguments.nodes, arguments.time_limit) == (7, 50.5, 5, 30)
    assert arguments.settings == [("read_mode", "unsafe"), ("timing", "default")]
    assert build_parser().parse_args(["run", *read_form(FIELDS).words]).seed is None


def test_workload_settings_in_a_form_are_passed_to_the_run() -> None:
    given = fields(system=["etcd"], workload=["cas-register"], settings=["workload.keys=20  workload.keys=20"])
    arguments = build_parser().parse_args(["run", *read_form(given).words])
    assert arguments.settings == [("workload.keys", "20")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": ["read_mode=log read_mode=unsafe"]}, "settings: read_mode is given twice with different values"),
        (
            {"settings": ["workload.keys=3"]},
            "--set workload.keys: workload register has no settings with system broker",
        ),
        ({"system": ["etcd"], "settings": ["workload.keys=0"]}, "keys"),
        ({"system": ["etcd"], "settings": ["workload.kyes=3"]}, "did you mean keys"),
        ({"system": ["etcd"], "workload": ["delay"]}, "delay"),
        ({"settings": ["read_mode"]}, "settings: read_mode is not NAME=VALUE"),
        ({"settings": ["=unsafe"]}, "settings: =unsafe is not NAME=VALUE"),
    ],
)
def test_settings_that_harness_run_would_refuse_are_reported(changes: dict[str, list[str]], said: str) -> None:
    with pytest.raises(OperatorError) as caught:
        read_form(fields(**changes))
    assert said in str(caught.value)


def test_all_may_be_combined_with_a_nemesis_that_it_leaves_out() -> None:
    assert "--nemesis=all,promote" in read_form(fields(nemesis=["all", "promote"])).words


def test_the_numbers_of_a_form_are_passed_on_exactly() -> None:
    numbers = {"time_limit": "86400.125", "rate": "1234.5678", "nodes": "5"}
    arguments = build_parser().parse_args(["run", *read_form(fields(**{n: [t] for n, t in numbers.items()})).words])
    assert (arguments.time_limit, arguments.rate, arguments.nodes) == (86400.125, 1234.5678, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"system": ["brokr"]}, {"system": []}, {"system": ["broker", "broker"]}, {"workload": ["../x"]},
        {"cluster": ["; rm -rf /"]}, {"nemesis": ["partition=leader"]}, {"nemesis": ["kill", "kill"]},
        {"nemesis": ["all", "kill"]}, {"nodes": ["0"]}, {"nodes": ["1e3"]}, {"nodes": ["five"]}, {"nodes": [""]},
        {"rate": ["nan"]}, {"rate": ["-1"]}, {"time_limit": ["inf"]}, {"concurrency": ["100000"]}, {"seed": ["-1"]},
        {"seed": ["99999999999999999999"]}, {"settings": ["read_mode"]}, {"settings": ["--store=/x"]},
        {"settings": ["read_mode=$(id)"]}, {"settings": ["unknown=1"]}, {"time_limit": ["9" * 5_000]},
    ],
)  # fmt: skip
def test_unknown_values_and_values_out_of_bounds_are_refused(changes: dict[str, list[str]]) -> None:
    with pytest.raises(OperatorError):
        read_form(fields(**changes))


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
    """A program in the place of the harness: it prints its arguments and sleeps until it is interrupted."""
    path = tmp_path / "sleeper"
    path.write_text(
        f"#!{sys.executable}\n"
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try:\n"
        "    print(*sys.argv[1:], flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('healed', flush=True)\n"
        "    sys.exit(2)\n"
    )
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return str(path)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return found


def test_one_run_at_a_time_is_started_and_stopping_the_server_interrupts_it(store: Store, sleeper: str) -> None:
    launcher = Launcher(store.root)
    launcher.stop([].append)
    launch = launcher.start(Form(["--seed=7", "--nemesis=$(id); <b>"]))
    wait_for(lambda: launch.output)
    assert launch.output[0] == f"-m harness run --store={store.root} --seed=7 --nemesis=$(id); <b>"
    with pytest.raises(OperatorError, match="still running"):
        launcher.start(Form([]))
    said: list[str] = []
    launcher.stop(said.append)
    assert said == [
        f"waiting for the run that was started here (process {launch.process.pid}) to end: it is healed and judged"
    ]
    assert launch.status == 2
    wait_for(lambda: "healed" in launch.output)
    again = launcher.start(Form([]))
    wait_for(lambda: again.output)
    launcher.stop(said.append)
    assert again.status == 2


def test_a_run_can_be_interrupted_even_if_the_server_ignores_sigint(store: Store, sleeper: str) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launcher = Launcher(store.root)
        launch = launcher.start(Form([]))
        wait_for(lambda: launch.output)
        launcher.stop([].append)
        assert launch.status == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_does_not_end_is_named(store: Store, sleeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.01)
    launcher = Launcher(store.root)
    launch = launcher.start(Form([]))
    wait_for(lambda: launch.output)
    launch.process.send_signal(19)  # SIGSTOP: it cannot end before it is resumed
    said: list[str] = []
    launcher.stop(said.append)
    assert said[-1] == f"the run that was started here (process {launch.process.pid}) is still running"
    launch.process.kill()
    launch.process.wait(DEADLINE_S)


def test_further_ctrl_c_interrupts_the_run_and_the_server_keeps_waiting_for_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    path = tmp_path / "stubborn"
    path.write_text(
        f"#!{sys.executable}\n"
        "import signal, sys, time\n"
        "print('at work', flush=True)\n"
        "for number in range(1, 4):\n"
        "    try:\n"
        "        time.sleep(600)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', number, flush=True)\n"
        "sys.exit(2)\n"
    )
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    launcher = Launcher(store.root)
    launch = launcher.start(Form([]))
    wait_for(lambda: launch.output)

    def press_again() -> None:
        for number in (1, 2):
            wait_for(lambda number=number: launch.output[-1] == f"interrupted {number}")
            os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press_again)
    pressing.start()
    launcher.stop([].append)
    pressing.join(DEADLINE_S)
    assert launch.status == 2
    wait_for(lambda: launch.output[-1] == "interrupted 3")


def test_sigterm_while_waiting_for_a_run_names_the_run(store: Store, sleeper: str) -> None:
    launcher = Launcher(store.root)
    launch = launcher.start(Form([]))
    wait_for(lambda: launch.output)
    launch.process.send_signal(signal.SIGSTOP)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            signal.raise_signal(signal.SIGTERM)

    with ended_by_signals(), pytest.raises(SystemExit):
        launcher.stop(say)
    assert (
        said[-1]
        == f"the run that was started here (process {launch.process.pid}) is still running, and was asked to end"
    )
    launch.process.send_signal(signal.SIGCONT)
    assert launch.process.wait(DEADLINE_S) == 2


def test_a_killed_run_is_shown_with_the_command_that_cleans_up(
    store: Store, serve: Callable[..., Client], sleeper: str
) -> None:
    launcher = Launcher(store.root)
    client = serve(launcher)
    launch = launcher.start(Form([]))
    wait_for(lambda: launch.output)
    assert "harness clean" not in client.page("/started")
    launch.process.kill()
    launch.process.wait(DEADLINE_S)
    page = client.page("/started")
    assert "killed by signal 9" in page and "remove what it left with <code>harness clean</code>" in page


def test_the_kept_output_of_a_run_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    path = tmp_path / "talker"
    path.write_text(f"#!{sys.executable}\nprint('x' * 5000)\nfor n in range(1000): print('<b>', n)\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    launch = Launcher(store.root).start(Form([]))
    wait_for(lambda: launch.output and launch.output[-1] == "<b> 999")
    assert len(launch.output) == module.MAX_OUTPUT_LINES
    assert launch.process.wait(DEADLINE_S) == 0


def test_the_form_on_the_page_starts_a_run(store: Store, serve: Callable[..., Client], sleeper: str) -> None:
    launcher = Launcher(store.root)
    client = serve(launcher)
    token = re.search(r'name="token" value="([^"]+)"', client.page("/new"))
    assert token is not None

    def send(**changes: Any) -> tuple[int, dict[str, str], str]:
        body = urlencode({**fields(nemesis=["kill"]), "token": token[1], **changes}, doseq=True).encode()
        return client.ask("/new", method="POST", body=body, Content_Type=KIND)

    status, _, text = send(nodes="99")
    assert status == 422 and "--nodes must be 1 to" in text and 'value="99"' in text
    assert list(launcher.launches) == []
    status, headers, _ = send()
    assert (status, headers["location"]) == (303, "/started")
    assert "--nemesis=kill" in client.page("/started")
    status, _, text = send()
    assert status == 422 and "still running" in text
    wait_for(lambda: launcher.launches[0].output)  # while an interpreter starts, an interrupt may be lost
    launcher.stop([].append)
    assert len(launcher.launches) == 1


def test_the_page_of_started_runs_links_those_of_the_store_that_are_still_running(
    store: Store, serve: Callable[..., Client]
) -> None:
    finished, running = make_run(store), store.create("broker-log-pause")
    running.write_test({})
    try:
        page = serve(Launcher(store.root)).page("/started")
        assert f"/runs/{running.name}/live" in page and finished.name not in page
    finally:
        running.release()
