"""Questions to the name server and its answers, as bytes and over its socket."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.host_names import HostNames, NamedHost, hosts_file, nsswitch_file
from harness.clusters.name_server import NameServer, answer_to, parse_question, question_for
from nemesis.mechanisms.shell import ShellError

NAMES = {"n2": "127.0.0.2", "n3": "127.0.0.3"}
WRONG = {"n2": "127.0.0.3", "n3": "127.0.0.2"}
SERVED: dict[str, Any] = {"listen": "127.0.0.1", "names": NAMES, "wrong": WRONG, "unused": "127.0.0.9"}


def test_a_question_is_parsed_and_answered_with_an_address() -> None:
    question = parse_question(question_for("n2", 7))
    assert (question.ident, question.name, question.kind) == (7, "n2", 1)
    answer = answer_to(question, "10.0.0.2")
    ident, flags, questions, records, _, _ = struct.unpack_from("!6H", answer)
    assert (ident, flags & 0x8000, flags & 0xF, questions, records) == (7, 0x8000, 0, 1, 1)
    assert answer.endswith(bytes([0, 0, 0, 0, 0, 4, 10, 0, 0, 2])), "an address with a lifetime of zero"


def test_a_known_name_without_an_ipv6_address_gets_an_empty_answer() -> None:
    asked = bytearray(question_for("n2", 7))
    asked[-4:-2] = struct.pack("!H", 28)
    answer = answer_to(parse_question(bytes(asked)), "10.0.0.2")
    assert struct.unpack_from("!6H", answer)[1:4] == (0x8580, 1, 0), "no error and no record"
    assert struct.unpack_from("!6H", answer_to(parse_question(bytes(asked)), None))[1] & 0xF == 3


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * 11,
        question_for("n2", 1)[:-1],
        question_for("n2", 1)[:-2] + b"\0\3",
        answer_to(parse_question(question_for("n2", 1)), "10.0.0.2"),
        struct.pack("!6H", 1, 0, 2, 0, 0, 0) + question_for("n2", 1)[12:],
        question_for("n2", 1)[:12] + b"\xc0\x0c\0\1\0\1",
        question_for("n2", 1)[:12] + b"\x3fn2",
    ],
)
def test_malformed_questions_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"question|message"):
        parse_question(message)


def test_hosts_are_looked_up_in_files_and_then_dns_and_other_databases_as_before() -> None:
    text = nsswitch_file("passwd: files\nhosts:  files mdns4 [NOTFOUND=return] dns\n")
    assert text.splitlines() == ["passwd: files", "hosts: files dns"]
    assert hosts_file("::1\tlocalhost\n", {"n1": "10.0.0.1"}) == "::1\tlocalhost\n10.0.0.1\tn1\n"


def served(scenario: Callable[[NameServer], Awaitable[None]]) -> None:
    async def main() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = NameServer(port=port)
        await server.open({"hosts": {"n1": SERVED}})
        await scenario(server)

    asyncio.run(main())


async def looked_up(server: NameServer, wait_s: float = 0.3) -> dict[str, tuple[str, float]]:
    found = (await server.look_up({"host": "n1", "wait_s": wait_s}))["lookups"]
    return {name: (answer, seconds) for name, answer, seconds in found}


class Asker(asyncio.DatagramProtocol):
    """A program that asks for n2; `answers` are the bytes that came."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    def connection_made(self, transport: Any) -> None:
        transport.sendto(question_for("n2", 1))

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.answers.put_nowait(data)


async def ask(server: NameServer) -> Asker:
    made = await asyncio.get_running_loop().create_datagram_endpoint(Asker, remote_addr=("127.0.0.1", server.port))
    return made[1]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("gone", {"n2": "gone", "n3": "gone"}),
        ("silent", {"n2": "silent", "n3": "silent"}),
        ("wrong", WRONG),
        ("unused", dict.fromkeys(NAMES, "127.0.0.9")),
        ("slow", NAMES),
    ],
)
def test_each_kind_of_fault_affects_every_answer_until_it_is_released(kind: str, found: dict[str, str]) -> None:
    async def scenario(server: NameServer) -> None:
        assert {name: answer for name, (answer, _) in (await looked_up(server)).items()} == NAMES
        await server.disturb({"fault": "f1", "hosts": {"n1": {"kind": kind, "delay_ms": 120}}})
        answers = await looked_up(server)
        assert {name: answer for name, (answer, _) in answers.items()} == found
        assert all(seconds >= 0.115 for _, seconds in answers.values()) is (kind in ("slow", "silent"))
        await server.release({"fault": "f1"})
        assert {name: answer for name, (answer, _) in (await looked_up(server)).items()} == NAMES

    served(scenario)


def test_only_questions_of_programs_during_the_fault_are_counted() -> None:
    async def scenario(server: NameServer) -> None:
        await (await ask(server)).answers.get()
        await server.disturb({"fault": "f1", "hosts": {"n1": {"kind": "wrong", "delay_ms": 0}}})
        await looked_up(server)
        assert (await server.met({"fault": "f1"}))["hosts"] == {"n1": [0, 0]}, "questions of the harness do not count"
        answer = await (await ask(server)).answers.get()
        assert answer.endswith(bytes([127, 0, 0, 3]))
        await server.release_all({})
        await (await ask(server)).answers.get()
        assert (await server.met({"fault": "f1"}))["hosts"] == {"n1": [1, 1]}

    served(scenario)


def test_concurrent_faults_give_the_strongest_answer_and_keep_their_delays() -> None:
    async def scenario(server: NameServer) -> None:
        for number, kind in enumerate(("wrong", "gone", "slow")):
            fault = {"kind": kind, "delay_ms": 60 * (number == 2)}
            await server.disturb({"fault": f"f{number}", "hosts": {"n1": fault}})
        answers = await looked_up(server)
        assert {answer for answer, _ in answers.values()} == {"gone"}
        await (await ask(server)).answers.get()
        counts = [(await server.met({"fault": f"f{number}"}))["hosts"]["n1"] for number in range(3)]
        assert counts == [[0, 0], [1, 1], [1, 1]], "the wrong name was in no answer"

    served(scenario)


@pytest.mark.parametrize("question", ["another name", "an IPv6 address"])
def test_only_questions_for_the_address_of_another_host_are_counted(question: str) -> None:
    message = bytearray(question_for("n2" if question == "an IPv6 address" else "example", 1))
    if question == "an IPv6 address":
        message[-4:-2] = struct.pack("!H", 28)

    async def scenario(server: NameServer) -> None:
        await server.disturb({"fault": "f1", "hosts": {"n1": {"kind": "gone", "delay_ms": 0}}})
        server.take("n1", server._served["n1"], bytes(message), ("127.0.0.1", 1))
        assert (await server.met({"fault": "f1"}))["hosts"] == {"n1": [0, 0]}

    served(scenario)


def test_a_file_that_was_written_since_counts_as_changed(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.write_text("nameserver 10.0.0.1\n")
    seen = {"pids": [os.getpid()], "path": str(ours), "file": str(ours), "text": "nameserver 127.0.0.1\n"}
    assert asyncio.run(NameServer(port=0).sees(seen)) == {"astray": [], "is_changed": True}


@pytest.mark.parametrize(
    ("other", "expected"),
    [("wrong", {"other": [1, 0], "slow": [1, 1]}), ("silent", {"other": [1, 1], "slow": [0, 0]})],
    ids=["a wrong address that is the right one", "a late answer that never comes"],
)
def test_a_lookup_meets_only_the_faults_that_have_changed_its_answer(
    other: str, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SERVED, "wrong", NAMES)

    async def scenario(server: NameServer) -> None:
        await server.disturb({"fault": "other", "hosts": {"n1": {"kind": other, "delay_ms": 0}}})
        await server.disturb({"fault": "slow", "hosts": {"n1": {"kind": "slow", "delay_ms": 1}}})
        served = server._served["n1"]
        server.take("n1", served, question_for("n2", 1), ("127.0.0.1", 1))
        counts = {fault: (await server.met({"fault": fault}))["hosts"]["n1"] for fault in expected}
        assert counts == expected

    served(scenario)


class FixedAnswers:
    """A name server's process whose lookups are fixed."""

    async def request(self, operation: str, **_: Any) -> dict[str, Any]:
        addresses = ("127.0.0.2", "127.0.0.1", "127.0.0.9", "gone")
        return {"lookups": [[f"n{number}", address, 0.0] for number, address in enumerate(addresses, 2)]}


def test_a_lookup_says_whether_its_address_is_that_of_any_host() -> None:
    """The host that asks is one of them."""
    link: Any = object()
    names = {f"n{number}": f"127.0.0.{number}" for number in range(2, 6)}
    host = NamedHost(link, listen="127.0.0.1", own="127.0.0.1", names=names, unused="127.0.0.9")
    helpers: Any = {link: FixedAnswers()}
    members: Any = None
    lookups = asyncio.run(HostNames({"n1": host}, helpers, members=members).look_up("n1", timeout_s=1.0))
    assert {each.name: each.leads_to_host for each in lookups} == {"n2": True, "n3": True, "n4": False, "n5": False}


def test_a_process_that_has_ended_does_not_count_as_seeing_another_file(tmp_path: Path) -> None:
    """A zombie still has a process id, but no root directory."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    for file in (ours, other):
        file.write_text("text")
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)

    async def seen(path: Path) -> dict[str, Any]:
        pids = [ended.pid, os.getpid()]
        return await NameServer(port=0).sees({"pids": pids, "path": str(path), "file": str(ours), "text": "text"})

    assert asyncio.run(seen(ours)) == {"astray": [], "is_changed": False}
    for astray in (other, tmp_path / "none"):
        assert asyncio.run(seen(astray))["astray"] == [os.getpid()]
    assert ended.wait() == 0


class Service:
    """A name service that notes what it is asked for, and may not answer."""

    def __init__(self, *, answers: bool) -> None:
        self.asked: list[str] = []
        self._answers = answers

    async def request(self, op: str, **_: Any) -> dict[str, Any]:
        self.asked.append(op)
        if not self._answers:
            raise ShellError("n1", [op], 1, "no answer")
        return {}


def test_names_of_every_host_are_right_again_even_if_one_host_does_not_answer() -> None:
    async def body() -> None:
        services = {"n1": Service(answers=False), "n2": Service(answers=True)}
        names = HostNames({}, services, members=None)  # type: ignore[arg-type]
        with pytest.raises(ShellError, match="no answer"):
            await names.release("f")
        with pytest.raises(ShellError, match="no answer"):
            await names.release_all()
        assert services["n2"].asked == ["release", "release_all"]

    asyncio.run(body())
