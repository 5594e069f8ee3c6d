"""The command line of a real process: exit statuses, one line per problem, signals, the single file."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import node
from node.client.broker_client import BrokerClient
from node.client.errors import ClientError
from node.command_line import main
from node.real_runtime import real_runtime
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python -m node ...`; kills what is left at the end."""
    running: list[subprocess.Popen[str]] = []

    def run(
        *arguments: str, command: Sequence[str] = (sys.executable, "-m", "node"), cwd: Path = ROOT
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], *, timeout_s: float = 30) -> tuple[int, str]:
    """Wait for a process to end; returns its exit status and stderr."""
    _, errors = process.communicate(timeout=timeout_s)
    return process.returncode, errors


def wait_until_ready(process: subprocess.Popen[str], *, timeout_s: float = 30) -> str:
    """The READY line, read from stderr."""
    assert process.stderr is not None
    deadline = time.monotonic() + timeout_s
    lines = []
    while time.monotonic() < deadline:
        line = process.stderr.readline()
        lines.append(line)
        if "READY" in line:
            return line
        if not line:
            break
    raise AssertionError(f"never ready: {lines}")


def write_config(tmp_path: Path, *, port: int = 0, ledger_port: int | None = None, data_dir: str = "data") -> str:
    path = tmp_path / f"broker{len(list(tmp_path.glob('broker*')))}.toml"
    path.write_text(
        f"""
        self_id = "n1"
        listen = "127.0.0.1:{port}"
        data_dir = "{tmp_path / data_dir}"
        timing = "fast"
        [dledger]
        listen = "127.0.0.1:{free_ports(1)[0] if ledger_port is None else ledger_port}"
        [[topics]]
        name = "t"
        """
    )
    return str(path)


def test_version_is_printed_and_is_that_of_pyproject(start: Start) -> None:
    process = start("--version")
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, f"node {node.__version__}\n")
    assert f'version = "{node.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "a command is missing (see node --help)"),
        (("brokr",), "unknown command 'brokr'; known: broker, nameserver"),
        (("brokr",), "; did you mean 'broker'? (see node --help)"),
        (("--versoin",), "unknown option --versoin; did you mean '--version'? (see node --help)"),
        (("broker",), "required: --config"),
        (
            ("broker", "--config", "x", "--st=a=b"),
            "unknown option --st; did you mean '--set'? (see node broker --help)",
        ),
        (("broker", "--config", "x", "--zzz"), "unknown option --zzz; known: --config, --help, --set ("),
        (("nameserver", "here"), "what is 'here' for? (see node nameserver --help)"),
        (("members", "--config", "x", "--add", "n2", "--remvoe"), "did you mean '--remove'? (see node members --help)"),
        (("nameserver", "--lisetn=127.0.0.1:1"), "unknown option --lisetn; did you mean '--listen'?"),
        (("broker", "--confg", "x"), "unknown option --confg; did you mean '--config'? (see node broker --help)"),
        (("broker", "--config", "/nonexistent/x.toml"), "/nonexistent/x.toml cannot be read: No such file"),
        (("broker", "--config", "/"), "/ cannot be read: Is a directory"),
        (("broker", "--config", "/dev/zero"), "/dev/zero is no configuration: it has more than"),
        (("nameserver", "--config", "/dev/full"), "/dev/full is no configuration: it has more than"),
        (("nameserver",), "options: listen: is required"),
        (("nameserver", "--listen", "localhost:1"), "'localhost:1' is not ip:port"),
        (("nameserver", "--listen", "127.0.0.1:1", "--set", "x"), "--set x: must be key=value"),
        (("nameserver", "--listen", "192.0.2.1:1"), "192.0.2.1"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line_with_status_254(
    start: Start, arguments: tuple[str, ...], problem: str
) -> None:
    status, errors = finish(start(*arguments))
    assert status == 254
    assert errors.count("\n") == 1 and errors.startswith("node: ")
    assert problem in errors


def test_every_problem_of_a_configuration_is_reported_on_a_line(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('self_id = "x"\nlisen = "127.0.0.1:1"\n')
    status, errors = finish(start("broker", "--config", str(path)))
    assert status == 254
    lines = errors.splitlines()
    assert len(lines) == 5 and all(line.startswith(f"node: {path}: ") for line in lines)
    assert lines[-1].endswith("lisen: is no known key; did you mean 'listen'?")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_name_server_ends_on_a_signal(start: Start, number: signal.Signals) -> None:
    process = start("nameserver", "--listen", "127.0.0.1:0")
    line = wait_until_ready(process)
    assert re.fullmatch(r"\S+Z INFO node READY nameserver listen=127\.0\.0\.1:[1-9]\d*\n", line)
    process.send_signal(number)
    status, errors = finish(process)
    assert status == 0 and errors.endswith(" INFO node stopped\n")


def test_a_port_in_use_is_named(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for process in (
            start("nameserver", "--listen", f"127.0.0.1:{port}"),
            start("broker", "--config", write_config(tmp_path, port=port)),
            start("broker", "--config", write_config(tmp_path, ledger_port=port, data_dir="other")),
        ):
            status, errors = finish(process)
            assert status == 254
            assert errors.splitlines()[-1].startswith("node: ") and str(port) in errors.splitlines()[-1]
            assert "in use" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ("listen=127.0.0.1:{port}", "stop what uses it, or change listen"),
        ("metrics_listen=127.0.0.1:{port}", "stop what uses it, or change metrics_listen"),
        ("dledger.listen=127.0.0.1:{port}", "stop what uses it, or change dledger.listen"),
        (
            "fast_port=true listen=127.0.0.1:{above}",
            "stop what uses it, or change listen, which is 2 above it, or switch fast_port off",
        ),
        (
            "classic.broker_role=ASYNC_MASTER classic.ha_listen_port={port}",
            "stop what uses it, or change classic.ha_listen_port",
        ),
        ("metrics_listen=192.0.2.1:1", "; change metrics_listen"),
    ],
)
def test_the_key_of_a_port_that_cannot_be_opened_is_named(
    start: Start, tmp_path: Path, settings: str, fix: str
) -> None:
    path = Path(write_config(tmp_path))
    if "classic" in settings:
        text = path.read_text()
        path.write_text(text[: text.index("[dledger]")] + text[text.index("[[topics]]") :])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = settings.format(port=port, above=port + 2).split()
        status, errors = finish(start("broker", "--config", str(path), *(f"--set={each}" for each in words)))
    (line,) = [line for line in errors.splitlines() if line.startswith("node: ")]
    assert status == 254 and line.endswith(fix) and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.cluster
def test_a_broker_ends_on_a_signal(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start("broker", "--config", write_config(tmp_path))
    line = wait_until_ready(process)
    assert re.search(r" INFO node READY broker self_id=n1 listen=127\.0\.0\.1:[1-9]\d* dledger=127", line)
    process.send_signal(number)
    status, errors = finish(process)
    assert status == 0 and errors.endswith(" INFO node stopped\n")


@pytest.mark.cluster
def test_a_second_broker_on_the_same_data_directory_is_refused(start: Start, tmp_path: Path) -> None:
    wait_until_ready(start("broker", "--config", write_config(tmp_path)))
    status, errors = finish(start("broker", "--config", write_config(tmp_path)))
    assert status == 254
    assert errors == f"node: data_dir {tmp_path / 'data'} is in use by another broker\n"


@pytest.mark.cluster
@pytest.mark.parametrize("first", ["classic", "dledger"])
def test_a_log_of_the_other_kind_is_refused(start: Start, tmp_path: Path, first: str) -> None:
    """An empty log would begin beside it, without the messages that the consumers have read."""
    path = Path(write_config(tmp_path))
    text, places = path.read_text(), {"classic": "commitlog", "dledger": "dledger/data"}
    classic = text[: text.index("[dledger]")] + "[classic]\n" + text[text.index("[[topics]]") :]
    for other, content in sorted({"classic": classic, "dledger": text}.items(), reverse=first == "dledger"):
        path.write_text(content)
        process = start("broker", "--config", str(path))
        if other == first:
            wait_until_ready(process)
            process.send_signal(signal.SIGTERM)
        status, errors = finish(process)
        if other == first:  # the first file comes with the first entry
            (tmp_path / "data" / places[first] / ("0" * 20)).write_bytes(b"x")
    assert (status, errors) == (
        254,
        f"node: data_dir {tmp_path / 'data'} has a log of [{first}], {places[first]}, and the configuration says "
        f"[{other}]: set another data_dir, or the configuration back\n",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_data_directory_without_permission_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    status, errors = finish(start("broker", "--config", write_config(tmp_path, data_dir="closed/data")))
    assert status == 254 and "Permission denied" in errors and errors.count("\n") == 1


def test_a_data_directory_that_is_a_file_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, errors = finish(start("broker", "--config", write_config(tmp_path, data_dir="file/data")))
    assert status == 254 and str(tmp_path / "file") in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/dev/null", "/dev/null: File exists; it has to be a directory"),
        ("/dev/null/data", "/dev/null/data: Not a directory; what is above it has to be a directory"),
        ("/sys/splitbrain", "/sys/splitbrain: "),  # not permitted or read-only, depending on the machine
        ("/" + "x" * 300, ": File name too long; name it shorter"),
    ],
    ids=["a device", "below a device", "no writing there", "long"],
)
def test_the_key_of_a_path_that_cannot_be_used_is_named(
    start: Start, tmp_path: Path, path: str, complaint: str
) -> None:
    for key, words in (
        ("data_dir", ("broker", "--config", write_config(tmp_path), "--set", f"data_dir={path}")),
        ("kv_config_path", ("nameserver", "--listen", "127.0.0.1:0", "--set", f"kv_config_path={path}/kv.json")),
    ):
        status, errors = finish(start(*words))
        assert (status, errors.count("\n")) == (254, 1), errors
        assert errors.startswith(f"node: {key} {path}"), errors
        assert errors.endswith(f", or change {key}\n") and complaint in errors, errors


def test_a_trace_that_cannot_be_written_is_named(start: Start, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    status, errors = finish(start("broker", "--config", config, "--set", f"dledger.trace_file={tmp_path}/no/trace"))
    problem = f"dledger.trace_file: {tmp_path}/no/trace: No such file or directory; name a file that can be written"
    assert (status, errors) == (254, f"node: {config}: {problem}\n")


def in_store(data: Path, pattern: str) -> Path:
    """The first file of the store that matches the pattern."""
    return sorted(path for path in data.glob(pattern) if path.is_file())[0]


LEDGER_FILES = (
    "dledger/data/*", "dledger/index/*", "dledger/checkpoint", "dledger/member_state", "consumequeue/t/0/*",
    "consumequeue.checkpoint", "index/*",
)  # fmt: skip
CLASSIC_FILES = ("commitlog/*", "checkpoint", "checkpoint.bak", "consumequeue/t/0/*", "index/*")


@pytest.mark.cluster
@pytest.mark.parametrize(("table", "patterns"), [("", LEDGER_FILES), ("[classic]", CLASSIC_FILES)])
def test_a_directory_in_place_of_a_file_of_the_store_is_named(
    start: Start, tmp_path: Path, table: str, patterns: tuple[str, ...]
) -> None:
    """The directory is left alone, and nothing is lost once the file is back."""
    path = Path(write_config(tmp_path))
    text = path.read_text()
    (port,) = free_ports(1)
    path.write_text(text.replace('listen = "127.0.0.1:0"', f'listen = "127.0.0.1:{port}"') + table)
    if table:
        ledger, topics = text.index("[dledger]"), text.index("[[topics]]")
        path.write_text(path.read_text().replace(text[ledger:topics], ""))
    process = start("broker", "--config", str(path))
    wait_until_ready(process)
    sent = asyncio.run(send_until_stored(f"127.0.0.1:{port}", 10))
    process.terminate()
    assert finish(process)[0] == 0
    for pattern in patterns:
        file = in_store(tmp_path / "data", pattern)
        file.rename(tmp_path / "kept")
        file.mkdir()
        (file / "of somebody else").write_text("x")
        status, errors = finish(start("broker", "--config", str(path)))
        (line,) = [line for line in errors.splitlines() if line.startswith("node: ")]
        assert status == 254 and "Traceback" not in errors
        assert line.startswith(f"node: {file} is a directory where the store has a file: move it away")
        (file / "of somebody else").unlink()
        file.rmdir()
        (tmp_path / "kept").rename(file)
    process = start("broker", "--config", str(path))
    wait_until_ready(process)
    assert asyncio.run(stored(f"127.0.0.1:{port}")) == sent
    process.terminate()
    assert finish(process)[0] == 0


async def send_until_stored(address: str, number: int) -> list[bytes]:
    """Send messages one after the other, each until the broker accepts it."""
    bodies = [b"%d" % each for each in range(number)]
    async with BrokerClient(name_servers=[], runtime=real_runtime(1)) as client, asyncio.timeout(30):
        for body in bodies:
            while True:
                try:
                    await client.send("t", 0, body, address=address, properties={"KEYS": "k"})
                    break
                except ClientError as error:
                    assert error.is_definite, error  # the broker does not lead yet
                    await asyncio.sleep(0.05)
    return bodies


async def stored(address: str) -> list[bytes]:
    """The messages that a broker returns, once it returns any."""
    async with BrokerClient(name_servers=[], runtime=real_runtime(1)) as client, asyncio.timeout(30):
        while True:
            try:
                found = await client.pull("t", 0, 0, 32, address=address)
                if found.messages:
                    return [message.body for message in found.messages]
            except ClientError:
                pass
            await asyncio.sleep(0.05)


def test_a_damaged_topic_table_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "topics.json").write_text("{")
    status, errors = finish(start("broker", "--config", write_config(tmp_path)))
    assert status == 1 and "Traceback" not in errors
    assert f"{tmp_path / 'data' / 'topics.json'} is damaged" in errors.splitlines()[-1]


def test_the_single_file_is_reproducible_and_needs_nothing_but_python(start: Start, tmp_path: Path) -> None:
    for name in ("one.pyz", "other.pyz"):
        built = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "build_pyz.py"), str(tmp_path / name)],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": str(len(name))},
        )  # fmt: skip
        assert built.stdout.startswith(str(tmp_path / name))
    assert (tmp_path / "one.pyz").read_bytes() == (tmp_path / "other.pyz").read_bytes()
    bare = (sys.executable, "-I", "-S", str(tmp_path / "one.pyz"))
    process = start("nameserver", "--listen", "127.0.0.1:0", command=bare, cwd=tmp_path)
    wait_until_ready(process)
    process.terminate()
    assert finish(process)[0] == 0
    assert finish(start("broker", command=bare, cwd=tmp_path))[0] == 254


def test_building_the_single_file_into_a_missing_directory_fails_in_one_line(tmp_path: Path) -> None:
    failed = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_pyz.py"), str(tmp_path / "none" / "node.pyz")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert failed.returncode == 254 and failed.stderr.count("\n") == 1


def test_transfer_makes_a_member_the_leader_or_says_why_not(start: Start, tmp_path: Path) -> None:
    config = write_config(tmp_path, ledger_port=free_ports(1)[0])
    status, errors = finish(start("transfer", "--config", config, "--to", "n1"))
    assert (status, errors.count("\n")) == (1, 1) and "nobody leads" in errors
    for words, complaint in (
        (("--add", "n4"), "--add or --remove"),
        (("--add", "four=127.0.0.1:1"), "must be n and a number"),
        ((), "one of the arguments --add --remove is required"),
    ):
        status, errors = finish(start("members", "--config", config, *words))
        assert (status, errors.count("\n")) == (254, 1) and complaint in errors
    broker = start("broker", "--config", config)
    wait_until_ready(broker)
    deadline = time.monotonic() + 30
    while True:
        asked = start("transfer", "--config", config, "--to", "n1")
        output, _ = asked.communicate(timeout=30)
        if asked.returncode == 0 or time.monotonic() > deadline:
            break
    assert re.fullmatch(r"n1 leads \S+ in term \d+\n", output)
    status, errors = finish(start("transfer", "--config", config, "--to", "n7"))
    assert (status, errors.count("\n")) == (254, 1) and "n7 is no member of group broker-a: n1" in errors


@pytest.mark.parametrize("words", [("transfer", "--to", "n1"), ("members", "--remove", "n1")])
def test_transfer_and_members_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Sequence[str]
) -> None:
    """A line says what is known of the outcome; there is no traceback."""

    async def waits(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    monkeypatch.setattr("node.dledger.tools.give_lead", waits)
    monkeypatch.setattr("node.dledger.tools.change_members", waits)
    command, *options = words
    assert main([command, "--config", write_config(tmp_path, ledger_port=20911), *options]) == 1
    assert capsys.readouterr().err == "node: interrupted; the group may do it yet, or have done it\n"


@pytest.mark.parametrize("kind", ["broker", "nameserver"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_imported_stops_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: signal.Signals
) -> None:
    """Imports take most of the time of a start."""
    stopped = []

    class Loading(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            if not name.startswith("serve_"):
                raise AttributeError(name)
            os.kill(os.getpid(), number)
            return serve

    async def serve(config: object, runtime: object, stop: asyncio.Event) -> str:
        await asyncio.wait_for(stop.wait(), 10)
        stopped.append(kind)
        return ""

    monkeypatch.setitem(sys.modules, "node.serving", Loading("node.serving"))
    monkeypatch.setitem(sys.modules, "node.nameserver.serving", Loading("node.nameserver.serving"))
    monkeypatch.setattr("node.command_line.configure_logging", lambda level, stream: None)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # which would end this process
    try:
        options = ["--config", write_config(tmp_path)] if kind == "broker" else ["--listen", "127.0.0.1:9876"]
        assert (main([kind, *options]), stopped) == (0, [kind])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_running_out_of_descriptors_is_logged_in_one_line(start: Start) -> None:
    """Not with thousands of tracebacks: each second the loop tries to accept as often as its backlog is long."""
    process = start("nameserver", "--listen", "127.0.0.1:0", "--set", "uvloop=off")
    port = int(re.search(r"listen=127\.0\.0\.1:(\d+)", wait_until_ready(process))[1])  # type: ignore[index]
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (20, 20))
    connections = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(30)]
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "no further connection can be accepted: Too many open files" in first
    for connection in connections:
        connection.close()
    process.terminate()
    status, errors = finish(process)
    assert (status, errors.count("WARNING"), errors.count("Traceback")) == (0, 0, 0)


def test_a_member_listens_on_ipv6(start: Start, tmp_path: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            port = free.getsockname()[1]
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    config = write_config(tmp_path)
    ready = wait_until_ready(start("broker", "--config", config, "--set", f"dledger.listen=[::1]:{port}"))
    assert f"dledger=[::1]:{port}" in ready
    with socket.create_connection(("::1", port), timeout=10):
        pass


def test_an_address_of_another_member_is_refused(start: Start, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config = Path(write_config(tmp_path, ledger_port=port))
    config.write_text(config.read_text().replace("[dledger]", "[dledger]\nmembers_may_change = true"))
    wait_until_ready(start("broker", "--config", str(config)))
    deadline = time.monotonic() + 30
    while True:
        status, errors = finish(start("members", "--config", str(config), "--add", f"n4=127.0.0.1:{port}"))
        if "nobody leads" not in errors or time.monotonic() > deadline:
            break
    assert (status, errors.count("\n")) == (254, 1)
    assert f"127.0.0.1:{port} is the address of n1, which belongs to the group: n4 needs one of its own" in errors


def test_adding_a_member_at_another_address_says_which_address_is_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Members dial the address in their own configuration, whatever is added."""

    async def change_members(group: str, peers: object, member: str, address: str | None) -> int:
        return 7

    monkeypatch.setattr("node.dledger.tools.change_members", change_members)
    config = write_config(tmp_path, ledger_port=20911)
    for address, lines in (("127.0.0.1:20911", 1), ("127.0.0.1:20912", 2)):
        assert main(["members", "--config", config, "--add", f"n1={address}"]) == 0
        told = capsys.readouterr().out
        assert told.count("\n") == lines and ("n1 at 127.0.0.1:20911" in told) == (lines == 2)


def test_the_environment_overrides_the_file_and_options_override_both(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = free_ports(2)
    monkeypatch.setenv("SPLITBRAIN_NODE_LISTEN", f"127.0.0.1:{first}")
    monkeypatch.setenv("SPLITBRAIN_NODE_LIMITS__MAX_CONNECTIONS", "7")
    path = write_config(tmp_path)
    assert f"127.0.0.1:{first}" in wait_until_ready(start("broker", "--config", path))
    again = write_config(tmp_path, data_dir="other")
    ready = wait_until_ready(start("broker", "--config", again, "--set", f"listen=127.0.0.1:{second}"))
    assert f"127.0.0.1:{second}" in ready


def test_problems_of_environment_variables_are_listed_with_the_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITBRAIN_NODE_LIMITS__MAX_CONECTIONS", "7")
    monkeypatch.setenv("SPLITBRAIN_NODE_READ_MODE", "safe")
    status, errors = finish(start("broker", "--config", write_config(tmp_path)))
    assert status == 254
    assert "limits.max_conections: is no known key; did you mean 'max_connections'?" in errors
    assert "read_mode: 'safe' is not one of" in errors


def test_a_name_server_reads_and_checks_its_configuration_file(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "ns.toml"
    path.write_text(
        f"""
        listen = "127.0.0.1:0"
        broker_expiry_s = 30
        scan_interval_s = 5
        max_connections = 100
        kv_config_path = "{tmp_path / "new" / "er" / "kv.json"}"
        """
    )
    wait_until_ready(start("nameserver", "--config", str(path)))
    assert (tmp_path / "new" / "er").is_dir()  # made, as a broker's data_dir is
    path.write_text('listen = "127.0.0.1:0"\nbroker_expiry = 0\nscan_interval_s = 0\nkv_config_path = "kv.json"\n')
    status, errors = finish(start("nameserver", "--config", str(path)))
    assert status == 254 and len(errors.splitlines()) == 3
    assert "broker_expiry: is no known key; did you mean 'broker_expiry_s'?" in errors


def test_a_name_server_imports_no_broker_modules() -> None:
    code = "import sys, node.command_line, node.nameserver.serving; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = loaded.stdout.split()
    assert "node.nameserver.server" in names
    assert [name for name in names if name.startswith(("node.broker", "node.dledger", "node.exchange"))] == []
