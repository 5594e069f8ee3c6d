"""Clients that are programs: their messages, and every mistake that they can make."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import cli, client_processes, json_lines
from harness.cleanup import clean
from harness.client_processes import CLIENT_VARIABLE, marked_clients
from harness.errors import OperatorError
from harness.in_process import InProcessRun, run_in_process
from harness.json_lines import ProgramClient, client_program, program_class
from harness.run_state import RUN_VARIABLE, STATE_DIR_VARIABLE, RunState
from harness.sdk.client import CAPABILITIES
from harness.systems import toy_server
from harness.tracing import Operation, ids_of, operation_under_way
from harness.workloads.client_register import ClientRegisterWorkload
from harness.workloads.unique_ids import UniqueIdsWorkload
from tests.ports import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "clients"

LOOP = """
import json, os, subprocess, sys, time
def say(**words): print(json.dumps({"id": message["id"], **words}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    kind = message["type"]
    if kind == "hello":
        say(type="hello", capabilities=["generate", "read", "write"])
    elif kind == "invoke":
        {invoke}
    else:
        say(type="ok")
"""


class NamedHost:
    """The part of a host that a client uses."""

    name = "n1"
    port_names = ("client",)

    def __init__(self, address: str) -> None:
        self._address = address

    def address(self, port: str) -> str:
        return self._address


def client_factory(client_class: type[ProgramClient], *, address: str = "127.0.0.1:1", timeout_s: float = 10.0) -> Any:
    """A function that creates clients as a system does."""
    numbers = iter(range(1_000_000))

    def new() -> ProgramClient:
        client = client_class()
        host: Any = NamedHost(address)
        client.host, client.hosts, client.process = host, [host], next(numbers)
        client.settings, client.timeout_s, client.environment = {"read": "any"}, timeout_s, {"MARKED": "yes"}
        return client

    return new


def write_client(folder: Path, invoke: str) -> list[str]:
    path = folder / "client.py"
    path.write_text(LOOP.replace("{invoke}", invoke.replace("\n", "\n        ")))
    return [sys.executable, str(path)]


def drive(words: list[str], *, f: str = "generate", operations: int = 3, timeout_s: float = 20.0) -> InProcessRun:
    """Run operations of one logical client."""
    client_class = program_class(shlex.join(words), words, ["generate", "read", "write"])
    workload = UniqueIdsWorkload() if f == "generate" else ClientRegisterWorkload()
    return run_in_process(
        workload,
        client_factory(client_class, timeout_s=timeout_s),
        operations=operations,
        concurrency=1,
        operation_timeout_s=timeout_s + 10,
    )


def completions(done: InProcessRun) -> list[tuple[str, str]]:
    return [(event["type"], event.get("error", "")) for event in done.events if event["type"] != "invoke"]


def test_a_program_answers_ok_fail_and_info(tmp_path: Path) -> None:
    in_turn = """
kinds = globals().setdefault("kinds", ["ok", "fail", "info"])
kind = kinds.pop(0)
told = {"value": [os.getpid(), os.environ["MARKED"]]} if kind == "ok" else {"error": "because of " + kind}
say(type=kind, **told)
"""
    done = drive(write_client(tmp_path, in_turn), operations=4)
    assert [kind for kind, _ in completions(done)] == ["ok", "fail", "info", "ok"]
    assert [event["error"] for event in done.events if "error" in event] == [
        "Refused: because of fail",
        "generate: ProgramError: because of info",
    ]
    ids = [event["value"][0] for event in done.events if event["type"] == "ok"]
    assert ids[0] != ids[1]  # after `info` a new logical client continues, in a new program
    assert not any(_runs(pid) for pid in ids)


def test_an_operation_of_a_run_has_its_traceparent_and_another_has_none(tmp_path: Path) -> None:
    words = write_client(tmp_path, 'say(type="ok", value=message.get("traceparent"))')
    new = client_factory(program_class("client", words, ["generate"]))

    async def main() -> list[Any]:
        client = new()
        await client.open()
        found = [await client.invoke("generate", ())]
        operation_under_way.set(Operation("r1", 7))
        found.append(await client.invoke("generate", ()))
        await client.close()
        return found

    ids = ids_of("r1", 7)
    assert asyncio.run(main()) == [None, f"00-{ids.trace}-{ids.span}-01"]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_open_message_has_host_addresses_settings_and_timeout(tmp_path: Path) -> None:
    words = write_client(tmp_path, 'say(type="ok", value=opened)')
    path = Path(words[1])
    path.write_text(path.read_text().replace("    else:\n", "    else:\n        opened = message\n"))
    done = drive(words, operations=1)
    assert done.events[1]["value"] == {
        "id": 2, "type": "open", "process": 0, "host": "n1", "timeout_ms": 19000,
        "addresses": {"client": {"n1": "127.0.0.1:1"}}, "settings": {"read": "any"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("invoke", "kind", "said"),
    [
        ('print("boom", file=sys.stderr); sys.exit(3)', "info", "ended with status 3; its last output: boom"),
        ("os.close(1); time.sleep(60)", "info", "closed its standard output"),
        ("os.kill(os.getpid(), 9)", "info", "ended with status -9"),
    ],
)
def test_when_a_program_ends_its_read_fails_and_its_write_is_indeterminate(
    tmp_path: Path, invoke: str, kind: str, said: str
) -> None:
    words = write_client(tmp_path, invoke)
    done = drive(words)
    assert all(each == kind and said in error and str(tmp_path) in error for each, error in completions(done))
    assert not any(".py:" in error for _, error in completions(done)), "no line of the harness is named"
    assert done.unexpected_errors == {}
    both = drive(words, f="register", operations=12)
    assert {(e["f"], e["type"]) for e in both.events if e["type"] != "invoke"} == {("read", "fail"), ("write", "info")}


@pytest.mark.parametrize(
    ("invoke", "said"),
    [
        ('print("hello there", flush=True)', "answered generate with 'hello there', which is not a JSON object"),
        ('print("[1]", flush=True)', "answered generate with '[1]', which is not a JSON object with a type"),
        ('say(type="maybe")', "answered generate with type 'maybe': it must be ok, fail or info"),
        ('say(type="ok", value=1, node="n9")', "answered generate with node 'n9': it must be the host that"),
        ('say(type="ok", value=1, node=["n1"])', "answered generate with node ['n1']: it must be the host that"),
        ('sys.stdout.write("{}\\n{}\\n"); sys.stdout.flush()', "wrote a line that is not an answer: '{}\\n{}'"),
        ('say(type="ok", value=message["id"], id=message["id"] - 1)', "answered generate with id 2: it must be 3"),
        ('print(json.dumps({"type": "ok"}), flush=True)', "answered generate without an id: it must be 3"),
        ('sys.stdout.write("x" * 3000000); sys.stdout.flush(); time.sleep(60)', "bytes without a newline"),
        ('say(type="ok")', 'answered generate with ok and no "value"'),
        ('say(type="ok", value=None)', "generate returned None"),
    ],
)
def test_a_malformed_answer_is_a_client_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: str, said: str
) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1 << 20)
    done = drive(write_client(tmp_path, invoke), operations=2)
    assert any(said in text for text in done.unexpected_errors), done.unexpected_errors or completions(done)
    assert "info" in {kind for kind, _ in completions(done)}


def test_the_answer_to_a_read_needs_a_value_which_may_be_null(tmp_path: Path) -> None:
    words = write_client(tmp_path, 'say(type="ok")')
    done = drive(words, f="register", operations=12)
    [(text, _)] = done.unexpected_errors.items()
    assert text.startswith(f"ClientMistake: client program {shlex.join(words)!r} answered read with ok and no")
    assert {event["type"] for event in done.events if event["f"] == "read"} == {"invoke", "info"}
    assert {event["type"] for event in done.events if event["f"] == "write"} == {"invoke", "ok"}
    null = drive(write_client(tmp_path, 'say(type="ok", value=None)'), f="register", operations=12)
    assert null.unexpected_errors == {} and not null.valid  # written values are lost


@pytest.mark.parametrize(
    ("answer", "said"),
    [("'7'", "'7' of type str"), ("True", "True of type bool"), ('{"value": 7}', "{'value': 7} of type dict")],
)
def test_a_value_of_the_wrong_type_is_a_client_mistake_that_names_the_program(
    tmp_path: Path, answer: str, said: str
) -> None:
    words = write_client(tmp_path, f'say(type="ok", value={answer})')
    done = drive(words, f="register", operations=12)
    program = f"(client program {shlex.join(words)!r})"
    due = "it must be a whole number, like the values put in, or None"
    assert list(done.unexpected_errors) == [f"ClientMistake: read returned {said}: {due} {program}"]
    assert {event["type"] for event in done.events if event["f"] == "read"} == {"invoke", "info"}
    assert done.outcomes["linearizable"].valid == "unknown", "no read was answered"


def test_the_page_lists_the_answers_that_need_a_value() -> None:
    page = (Path(json_lines.__file__).parents[1] / "docs" / "clients-in-any-language.md").read_text()
    table = page.partition("| f | fields |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    told = {name.strip("` "): value for names, _, value, _ in rows for name in names.split(",")}
    assert set(told) == set(CAPABILITIES)
    assert {name for name, value in told.items() if value and "may be left out" not in value} == json_lines.WITH_VALUE


def test_what_a_program_writes_to_standard_error_is_kept_in_part(caplog: pytest.LogCaptureFixture) -> None:
    async def written() -> json_lines._Program:
        program = json_lines._Program("the client")
        for _ in range(2):
            program.pipe_data_received(2, b"a line\n" * 10_000 + b"the end\n")
        return program

    caplog.set_level("INFO", "harness.json_lines")
    program = asyncio.run(written())
    assert caplog.messages == ["the client: a line"] * json_lines.MAX_LOGGED_LINES
    assert len(program._last_words) == json_lines.MAX_STDERR_BYTES
    assert program._quoted_words() == "; its last output: the end"


def test_an_answer_may_come_after_the_end_of_its_program_but_only_once() -> None:
    """What is left in the pipes is read a little later; and a closed standard error is no end."""

    async def scenario() -> None:
        program = json_lines._Program("the client")
        later: list[Any] = []
        program._loop = SimpleNamespace(call_later=lambda delay_s, call: later.append(call))  # type: ignore[assignment]
        program.pipe_connection_lost(2, None)
        assert later == []
        program._answer = asyncio.get_running_loop().create_future()
        program.process_exited()
        program.pipe_data_received(1, b'{"id": 1, ')
        program.pipe_data_received(1, b'"type": "ok"}\n')
        assert await program._answer == b'{"id": 1, "type": "ok"}'
        for call in later:
            call()
        assert isinstance(program._problem, json_lines.ProgramError), "for the next request"

    async def twice() -> None:
        program = json_lines._Program("the client")
        program._answer = asyncio.get_running_loop().create_future()
        for _ in range(2):
            program.pipe_data_received(1, b"{}\n")
        assert await program._answer == b"{}"
        assert "wrote a line that is not an answer: '{}'" in str(program._problem)

    asyncio.run(scenario())
    asyncio.run(twice())


def test_a_hanging_program_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hang = f"""
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, file=open({str(pids)!r}, "w"), flush=True)
time.sleep(600)
"""
    done = drive(write_client(tmp_path, hang), operations=1, timeout_s=5.0)
    assert [kind for kind, _ in completions(done)] == ["info"]
    assert (
        "did not answer generate within 4.8 s" in completions(done)[0][1] and str(tmp_path) in completions(done)[0][1]
    )
    started = [int(word) for word in pids.read_text().split()]
    assert len(started) == 2
    deadline_s = time.monotonic() + 30
    while any(_is_alive(pid) for pid in started) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(_is_alive(pid) for pid in started)


HARNESS = """
import asyncio, sys, time
from harness.json_lines import _greet, _start
async def main():
    program = await _start(sys.argv[1:], "a client", {})
    await _greet(program, 60.0)
    print(program._transport.get_pid(), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_programs_die_with_a_harness_that_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HARNESS, *write_client(tmp_path, 'say(type="ok")')]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        pid = int(harness.stdout.readline())
        assert _is_alive(pid)
        harness.kill()
    deadline_s = time.monotonic() + 30
    while _is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# Processes that a program starts and does not end

DAEMON = """
sleeper = subprocess.Popen(
    ["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
with open({pids!r}, "a") as file:
    print(sleeper.pid, file=file, flush=True)
"""


def with_daemon(folder: Path, *, before: str = "for line in sys.stdin:") -> tuple[str, Path]:
    """The command of a client that starts a sleeper in its own session, as daemons do, and the file of the pids."""
    words, pids = write_client(folder, 'say(type="fail", error="not now")'), folder / "pids"
    path = Path(words[1])
    path.write_text(path.read_text().replace(before, DAEMON.format(pids=str(pids)) + before, 1))
    return shlex.join(words), pids


def run_words(folder: Path, command: str, time_limit: str, *more: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a run on this machine that keeps all its files below `folder`."""
    words = ["run", "--system", "toy", "--client", command, "--cluster", "local", "--nodes", "1", "--nemesis", "none"]
    words += ["--concurrency", "2", "--time-limit", time_limit, "--store", str(folder / "store"), *more]
    environment = {**os.environ, STATE_DIR_VARIABLE: str(folder / "state"), "TMPDIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return [sys.executable, "-m", "harness", *words], environment


def pids_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same name that belongs to another run."""
    environment = {**os.environ, RUN_VARIABLE: f"other{os.getpid()}", CLIENT_VARIABLE: f"other{os.getpid()}"}
    with subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) as process:
        yield process
        process.kill()


@pytest.mark.cluster
def test_processes_that_a_client_leaves_running_end_with_the_run(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    command, pids = with_daemon(tmp_path)
    words, environment = run_words(tmp_path, command, "1")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no operation succeeded" in done.stdout, done.stdout + done.stderr
    started = pids_in(pids)
    assert len(started) >= 3  # one of the trial and two of the logical clients
    assert not [pid for pid in started if _is_alive(pid)]
    assert bystander.poll() is None
    assert not (tmp_path / "state").exists() or not list((tmp_path / "state").iterdir())


@pytest.mark.cluster
def test_processes_that_a_client_leaves_running_end_with_a_refused_run(tmp_path: Path) -> None:
    command, pids = with_daemon(tmp_path)
    words, environment = run_words(tmp_path, command, "1", "--workload", "set")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 254 and "workload set needs the methods" in done.stderr
    assert len(pids_in(pids)) == 1
    assert not [pid for pid in pids_in(pids) if _is_alive(pid)]


@pytest.mark.cluster
@pytest.mark.parametrize("stage", ["tried", "run"])
def test_clean_kills_the_processes_of_clients_whose_harness_was_killed(
    tmp_path: Path, bystander: subprocess.Popen[bytes], stage: str
) -> None:
    command, pids = with_daemon(tmp_path)
    if stage == "tried":  # it never says hello
        path = Path(shlex.split(command)[1])
        path.write_text(path.read_text().replace("for line in", "time.sleep(600)\nfor line in", 1))
    words, environment = run_words(tmp_path, command, "600")
    due = 1 if stage == "tried" else 3
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as harness:
        deadline_s = time.monotonic() + 120
        while len(pids_in(pids)) < due and time.monotonic() < deadline_s:
            assert harness.poll() is None
            time.sleep(0.02)
        harness.kill()
    left = [pid for pid in pids_in(pids) if _is_alive(pid)]
    assert left
    report = clean(state_root=environment[STATE_DIR_VARIABLE], report=lambda line: None)
    assert report.exit_status == 0, report.left
    assert not [pid for pid in left if _is_alive(pid)]
    assert all(any(f"process {pid} (sleep 600)" in line for line in report.removed) for pid in left)
    assert bystander.poll() is None


def test_marked_clients_kills_leftover_processes_however_the_block_ends(tmp_path: Path) -> None:
    for error in (None, ValueError, KeyboardInterrupt):
        state = RunState.create(f"jl{os.getpid()}", state_root=str(tmp_path / "state"))
        with contextlib.suppress(ValueError, KeyboardInterrupt), marked_clients(state) as environment:
            child = subprocess.Popen(["sleep", "600"], env={**os.environ, **environment}, start_new_session=True)
            if error is not None:
                raise error
        assert child.wait(timeout=60) == -signal.SIGKILL
        assert state.close()


def test_a_process_that_cannot_be_killed_stays_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_processes, "kill_until_gone", lambda find, *, timeout_s: [])
    state = RunState.create(f"jl{os.getpid()}", state_root=str(tmp_path / "state"))
    with marked_clients(state) as environment:
        child = subprocess.Popen(["sleep", "600"], env={**os.environ, **environment}, start_new_session=True)
    assert [claim.ident for claim in state.claims] == [str(child.pid)]
    assert not state.close()
    assert clean(state_root=str(tmp_path / "state"), report=lambda line: None).live
    child.kill()
    child.wait()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('say(type="ok")', 'answered read with ok and no "value"'),
        ('say(type="ok", value="7")', "read returned '7' of type"),
    ],
)
def test_a_client_mistake_makes_the_verdict_unknown_and_names_the_program(
    tmp_path: Path, answer: str, said: str
) -> None:
    command = shlex.join(write_client(tmp_path, answer))
    words, environment = run_words(tmp_path, command, "1", "--rate", "20")  # each mistake costs a process
    done = subprocess.run(
        words, env={**environment, "COLUMNS": "2000"}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    [verdict] = [line for line in done.stdout.splitlines() if line.startswith("UNKNOWN:")]
    assert said in verdict and f"client program {command!r}" in verdict


# Before a run


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('no')", "answered hello with 'no', which is not a JSON object"),
        ("raise SystemExit('no license')", "ended with status 1; its last output: no license"),
        ('print(\'{"type": "ok", "id": 1}\')', 'must be {"id": 1, "type": "hello", "capabilities": ["read", "write"]}'),
        (
            'print(\'{"id": 1, "type": "hello", "capabilities": ["raed"]}\')',
            "has unknown capabilities raed; known: read,",
        ),
        (
            'print(\'{"id": 1, "type": "hello", "capabilities": ["read", ["write"], {"cas": 1}]}\')',
            "has unknown capabilities ['write'], {'cas': 1}; known: read,",
        ),
        ("print('[' * 200_000)", "[[[[...', which is not a JSON object"),
        ("import time; time.sleep(600)", "did not answer hello within 3.0 s"),
    ],
)
def test_a_client_command_that_fails_its_trial_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setattr(json_lines, "START_TIMEOUT_S", 3.0)
    path = tmp_path / "client.py"
    path.write_text(f"input()\n{source}")  # so that it answers only after the hello
    with pytest.raises(OperatorError) as caught:
        client_program(f"{sys.executable} {path}")
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_client_command_that_cannot_be_run_or_parsed_is_refused() -> None:
    with pytest.raises(OperatorError, match="--client: '/no/such-program -x' cannot be run: No such file or directory"):
        client_program("/no/such-program -x")
    for command in ("", "unclosed 'quote"):
        with pytest.raises(OperatorError, match="--client"):
            client_program(command)


def test_a_client_has_the_methods_that_its_program_announced(tmp_path: Path) -> None:
    made = client_program(shlex.join(write_client(tmp_path, 'say(type="ok")')))
    assert all(hasattr(made, name) for name in ("read", "write", "generate")) and not hasattr(made, "cas")


def test_bad_client_options_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.join(write_client(tmp_path, 'say(type="ok")'))
    for words, said in (
        (["--system", "broker", "--client", command], "--client: system broker has its own clients"),
        (["--system", "toy", "--client", command, "--workload", "set"], "workload set needs the methods add, members"),
        (["--system", "toy", "--client", "no-such-program"], "--client: 'no-such-program' cannot be run"),
    ):
        assert cli.main(["run", *words, "--store", str(tmp_path / "store")]) == 254
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "store").exists()


# The examples


@pytest.fixture
def toy_address() -> Iterator[str]:
    """The address of a running toy server."""
    port = free_port()
    server = subprocess.Popen([sys.executable, toy_server.__file__, "127.0.0.1", str(port)])
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert time.monotonic() < deadline_s and server.poll() is None
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def check_example(command: str, address: str) -> None:
    made = client_program(command)
    done = run_in_process(
        ClientRegisterWorkload(), client_factory(made, address=address, timeout_s=60.0), operations=200, concurrency=2,
        operation_timeout_s=90.0,
    )  # fmt: skip
    assert done.valid, (done.unexpected_errors, done.outcomes)
    assert {event["type"] for event in done.events} == {"invoke", "ok"}
    assert any(event["f"] == "read" and event["type"] == "ok" and event["value"] is not None for event in done.events)
    nowhere = run_in_process(
        ClientRegisterWorkload(),
        client_factory(made, timeout_s=60.0),
        operations=2,
        concurrency=1,
        operation_timeout_s=90.0,
    )
    assert {event["type"] for event in nowhere.events} == {"invoke", "fail"}


def test_the_example_in_python(toy_address: str) -> None:
    check_example(f"{sys.executable} {EXAMPLES / 'toy_client.py'}", toy_address)


@pytest.mark.go
def test_the_example_in_go(toy_address: str, tmp_path: Path) -> None:
    if shutil.which("go") is None:
        pytest.skip("needs Go")
    program = tmp_path / "toy_client"
    subprocess.run(["go", "build", "-o", str(program), str(EXAMPLES / "toy_client.go")], check=True, timeout=170)
    check_example(str(program), toy_address)


@pytest.mark.java
def test_the_example_in_java(toy_address: str, tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    if shutil.which("javac") is None:
        check_example(f"java {EXAMPLES / 'ToyClient.java'}", toy_address)  # compiled at each start
        return
    subprocess.run(["javac", "-d", str(tmp_path), str(EXAMPLES / "ToyClient.java")], check=True, timeout=170)
    check_example(f"java -cp {tmp_path} ToyClient", toy_address)


def test_a_successful_operation_records_the_node_that_answered(tmp_path: Path) -> None:
    answer = 'say(type="ok", value=message["id"], node=["n1", None][message["id"] % 2])'
    done = drive(write_client(tmp_path, answer), operations=2)
    assert [event.get("node") for event in done.events if event["type"] == "ok"] in (["n1", None], [None, "n1"])


def test_a_failed_operation_does_not_inherit_the_node_of_an_earlier_one(tmp_path: Path) -> None:
    answer = 'say(type="ok", value=1, node="n1") if message["id"] == 3 else say(type="fail", error="no", node="n1")'
    done = drive(write_client(tmp_path, answer), operations=2)
    ended = [(event["type"], event.get("node")) for event in done.events if event["type"] != "invoke"]
    assert ended == [("ok", "n1"), ("fail", None)]
