"""Link faults on fake agents: what is stored before anything is made, who shapes, and the order of each change."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from harness.clusters.agent_helper import AgentHelper
from harness.clusters.agent_links import AgentLinks, AgentRelays
from harness.clusters.shaped_links import NETEM, RELAY, ShapedLinks
from nemesis.mechanisms.netem import remove_argv, remove_trial_argv, trial_argv
from nemesis.mechanisms.shell import ShellError
from nemesis.target import Link, LinkShape
from tests.harness.clusters.test_link_pump import VirtualLoop

HOSTS = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
THERE, BACK, OTHER = Link("n1", "n2"), Link("n2", "n1"), Link("n1", "n3")
LATE, LOSSY = LinkShape(delay_ms=5), LinkShape(loss_percent=5)
PAIR, OTHER_PAIR = "10.0.0.1 . 10.0.0.2", "10.0.0.1 . 10.0.0.3"


class Host:
    """An agent, a shell and the helpers of one host: everything that is done there, in order."""

    def __init__(self, host: str) -> None:
        self.host, self.directory, self.python = host, "/run/agent", "python3"
        self.done: list[tuple[str, Any]] = []
        self.has_netem = True
        self.root = "qdisc noqueue 0: root refcnt 2"
        self.failing = ""
        """A part of the command or request that fails, once."""

    def _fail(self, text: str) -> bool:
        is_now = bool(self.failing) and self.failing in text
        self.failing = "" if is_now else self.failing
        return is_now

    async def run(self, argv: Sequence[str], *, stdin: str = "", **_: Any) -> tuple[int, str, str]:
        self.done.append(("trial" if list(argv) == trial_argv() else argv[0], stdin))
        if list(argv) == trial_argv():
            return (0, "", "") if self.has_netem else (1, "", "Unknown qdisc")
        return (1, "", "no such set") if self._fail(stdin) else (0, "", "")

    async def request(self, op: str, arguments: Mapping[str, Any] | None = None, **_: Any) -> Mapping[str, Any]:
        arguments = arguments or {}
        if op == "undo":
            self.done.append(("undo", (arguments["argv"], arguments.get("stdin", ""))))
        if op == "spawn":
            self.done.append(("spawn", arguments["argv"][-2]))
        if op == "ask":
            line = json.loads(arguments["line"])
            self.done.append((line["op"], line))
            if self._fail(line["op"]):
                raise ShellError(self.host, ["ask"], 1, "it does not listen")
        return {"pid": 1, "answer": '{"ok": true, "port": 9}'}

    request_to_its_end = request

    def since(self, at: int) -> list[str]:
        """What was done since, in a word or two each."""
        return [_in_words(what, how) for what, how in self.done[at:]]


def _in_words(what: str, how: Any) -> str:
    if what == "nft":
        assert how.startswith("flush set netdev splitbrain pairs\n"), "what was redirected before is forgotten"
        return f"redirect {', '.join(re.findall(r'[0-9.]+ [.] [0-9.]+', how)) or 'nothing'}"
    if what == "shape":
        return f"shape {', '.join(' . '.join(pair[:2]) for pair in how['pairs']) or 'nothing'}"
    return what


class Shell:
    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = hosts

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        if "show" in argv:
            return f"{self._hosts[host].root}\n"
        return "".join(f"{line.split()[-1]} dev eth0 src x\n" for line in stdin.splitlines())


def made(**changed: str) -> dict[str, Host]:
    hosts = {name: Host(name) for name in HOSTS}
    for name, value in changed.items():
        hosts[name].root = value
    return hosts


async def prepared(hosts: Mapping[str, Host]) -> AgentLinks:
    return await AgentLinks.prepared(hosts, HOSTS, shell=Shell(hosts), seed="s")  # type: ignore[arg-type]


async def relays_on(host: Host) -> AgentRelays:
    """Relays of a run of one host whose links are shaped, which were prepared."""
    relay = AgentHelper(host, module="harness.clusters.link_relay")  # type: ignore[arg-type]
    devices = {"n1": {"10.0.0.2": "eth0", "10.0.0.3": "eth0"}}
    made = AgentRelays({"n1": host}, {"n1": relay}, addresses=HOSTS, devices=devices, seed="s")  # type: ignore[dict-item]
    await made.prepare()
    return made


def test_what_removes_queues_is_stored_on_a_host_before_a_queue_is_tried_there() -> None:
    async def body() -> None:
        hosts = made()
        links = await prepared(hosts)
        assert links.mechanism == NETEM and links.why_no_netem is None
        for host in hosts.values():
            stored = [how[0] for what, how in host.done[: host.since(0).index("trial")] if what == "undo"]
            assert stored == [remove_trial_argv(), remove_argv(["eth0"])]

    asyncio.run(body())


def test_a_relay_shapes_if_one_host_has_no_netem_or_a_queue_of_its_own() -> None:
    async def body() -> None:
        hosts = made()
        hosts["n2"].has_netem = False
        links = await prepared(hosts)
        assert (links.mechanism, links.why_no_netem) == (RELAY, "n2: this kernel has no netem (Unknown qdisc)")
        links = await prepared(made(n3="qdisc cake 8001: root refcnt 2"))
        assert (links.mechanism, links.why_no_netem) == (RELAY, "n3: eth0 has a queue of its own (cake 8001:)")

    asyncio.run(body())


def test_what_removes_the_relay_s_devices_and_rules_is_stored_before_they_are_made() -> None:
    async def body() -> None:
        host = Host("n1")
        await relays_on(host)
        first, second, *made = host.done
        assert [what for what, _ in made] == ["ip", "nft", "spawn", "open"] and "sb-aside" in made[0][1]
        assert first[0] == "undo" and "ip link delete dev sb-aside" in first[1][0][2]
        table = "add table netdev splitbrain\ndelete table netdev splitbrain\n"
        assert second == ("undo", (["nft", "-f", "-"], table))

    asyncio.run(body())


def test_packets_are_redirected_only_while_the_relay_knows_their_link() -> None:
    async def body() -> None:
        host = Host("n1")
        relays = await relays_on(host)
        at = len(host.done)
        await relays.apply({THERE: LATE})
        assert host.since(at) == [f"shape {PAIR}", f"redirect {PAIR}"]
        at = len(host.done)
        await relays.apply({THERE: LOSSY})
        assert host.since(at) == [f"shape {PAIR}"]
        at = len(host.done)
        await relays.apply({OTHER: LATE})
        assert host.since(at) == ["redirect nothing", f"shape {OTHER_PAIR}", f"redirect {OTHER_PAIR}"]
        at = len(host.done)
        await relays.apply({})
        await relays.apply({})
        assert host.since(at) == ["redirect nothing", "shape nothing"]

    asyncio.run(body())


@pytest.mark.parametrize("failing", ["flush", "shape"])
def test_a_change_that_fails_is_an_error_and_is_made_completely_the_next_time(failing: str) -> None:
    async def body() -> None:
        host = Host("n1")
        relays = await relays_on(host)
        host.failing = failing
        with pytest.raises(ShellError, match=r"no such set|does not listen"):
            await relays.apply({THERE: LATE})
        at = len(host.done)
        await relays.apply({THERE: LATE})
        assert host.since(at) == ["redirect nothing", f"shape {PAIR}", f"redirect {PAIR}"]
        host.failing = "flush"
        with pytest.raises(ShellError, match="no such set"):
            await relays.apply({})
        at = len(host.done)
        await relays.apply({})
        assert host.since(at) == ["redirect nothing", "shape nothing"]

    asyncio.run(body())


def test_a_relay_that_has_ended_does_not_prevent_healing(caplog: pytest.LogCaptureFixture) -> None:
    """No packet is redirected to it any more."""

    async def body() -> None:
        host = Host("n1")
        relays = await relays_on(host)
        await relays.apply({THERE: LATE})
        host.failing = "shape"
        at = len(host.done)
        await relays.apply({})
        assert host.since(at)[:2] == ["redirect nothing", "shape nothing"]

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert "healing links of n1" in caplog.text


def test_healing_that_failed_is_done_when_it_is_repeated() -> None:
    async def body() -> None:
        host = Host("n1")
        links = ShapedLinks(HOSTS, await relays_on(host))
        await links.shape("f", {THERE: LATE})
        host.failing = "flush"
        with pytest.raises(ShellError, match="no such set"):
            await links.release("f")
        at = len(host.done)
        await links.release("f")
        assert host.since(at) == ["redirect nothing", "shape nothing"]
        at = len(host.done)
        await links.release("f")
        assert host.since(at) == [], "nothing is left to do"

    asyncio.run(body())


class Readings:
    """A host's clock, by the answers of its agent: how long each took, and how far the clock is ahead."""

    def __init__(self, *answers: tuple[float, int]) -> None:
        self._answers = list(answers)

    async def request(self, op: str) -> Mapping[str, Any]:
        took_s, ahead_ns = self._answers.pop(0)
        loop = asyncio.get_running_loop()
        wall_ns = round(loop.time() * 1e9) + round(took_s * 5e8) + ahead_ns
        await asyncio.sleep(took_s)
        return {"wall_ns": wall_ns}


class Meter:
    """The probe packet that was sent at 1 s by the source's clock, and arrived at `at_ns` by the destination's."""

    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns

    async def request(self, op: str, **_: Any) -> Mapping[str, Any]:
        addresses = HOSTS.values()
        if op == "send":
            return {"sent_ns": {address: [1_000_000_000] for address in addresses}}
        arrivals = {address: [[0, self._at_ns]] for address in addresses}
        return {"arrivals": arrivals, "damaged": dict.fromkeys(addresses, 0)}


def test_a_delay_is_known_to_within_half_of_the_shortest_round_trips_to_both_hosts() -> None:
    async def body() -> None:
        slow = (0.4, 999_999_999)
        hosts = {
            "n1": Readings(slow, (0.01, 0), slow, slow, slow),
            "n2": Readings(slow, slow, (0.03, 50_000_000), slow, slow),
        }
        meters = {host: Meter(1_070_000_000) for host in hosts}
        links = AgentLinks(hosts, HOSTS, meters=meters, shaper=None, why_no_netem=None)  # type: ignore[arg-type]
        links.meter_ports = dict.fromkeys(hosts, 9)
        measured = (await links.measure([THERE], count=1, size_bytes=64, timeout_s=1.0))[THERE]
        assert measured.delays_ms == [pytest.approx(20)], "70 ms later by a clock that is 50 ms ahead"
        assert measured.within_ms == pytest.approx((10 + 30) / 2)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(body())
