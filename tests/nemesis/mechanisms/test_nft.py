"""Cuts by nftables: every host drops the union of the cuts in force, even after commands have failed."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemesis.mechanisms.nft import (
    COUNTERS_TABLE,
    NftCounters,
    NftCuts,
    counters_script,
    install_script,
    parse_counter,
    parse_counters,
    remove_script,
    replace_peers_script,
)
from nemesis.mechanisms.shell import ShellError
from nemesis.target import Link, LinkTraffic

HOSTS = ("a", "b", "c")
ADDRESSES = {host: f"10.0.0.{number}" for number, host in enumerate(HOSTS, 1)}
HOST_OF = {address: host for host, address in ADDRESSES.items()}


class FakeNft:
    """A shell whose hosts execute the scripts of NftCuts as nft does: as a whole or not at all."""

    def __init__(self) -> None:
        self.tables: dict[str, set[str] | None] = dict.fromkeys(HOSTS)
        self.runs: list[str] = []
        self.broken: set[str] = set()

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        self.runs.append(host)
        await asyncio.sleep(0)
        if host in self.broken:
            raise ShellError(host, argv, 1, "out of order")
        peers = None if self.tables[host] is None else set(self.tables[host] or ())
        for line in stdin.splitlines():
            if line == "add table inet splitbrain":
                peers = set() if peers is None else peers
            elif line == "delete table inet splitbrain":
                peers = None
            elif line.startswith(("add set", "add chain", "add rule")):
                assert peers is not None
            elif peers is None:
                raise ShellError(host, argv, 1, "No such file or directory")
            elif line == "flush set inet splitbrain peers":
                peers.clear()
            else:
                match = re.fullmatch(r"add element inet splitbrain peers \{ (.*) \}", line)
                assert match, line
                peers.update(match[1].split(", "))
        self.tables[host] = peers
        return ""

    def dropped(self) -> dict[str, set[str] | None]:
        return {
            host: None if peers is None else {HOST_OF[peer] for peer in peers} for host, peers in self.tables.items()
        }


GRUDGES = st.dictionaries(st.sampled_from(HOSTS), st.frozensets(st.sampled_from(HOSTS)))
STEPS = st.one_of(
    st.tuples(st.just("cut"), st.sampled_from(["f1", "f2", "f3"]), GRUDGES),
    st.tuples(st.just("heal"), st.sampled_from(["f1", "f2", "f3"]), st.none()),
    st.tuples(st.just("heal_all"), st.none(), st.none()),
    st.tuples(st.just("break"), st.frozensets(st.sampled_from(HOSTS)), st.none()),
    st.tuples(st.just("mend"), st.none(), st.none()),
)


@given(st.lists(STEPS, max_size=20))
def test_every_host_drops_the_union_of_the_faults_in_force(steps: list[tuple[str, object, object]]) -> None:
    async def scenario() -> None:
        nft = FakeNft()
        cuts = NftCuts(nft, ADDRESSES)
        await cuts.install()
        faults: dict[object, dict[str, frozenset[str]]] = {}
        for action, name, grudge in steps:
            if action == "break":
                nft.broken = set(name)  # type: ignore[call-overload]
                continue
            if action == "mend":
                nft.broken = set()
                continue
            if action == "cut":
                faults[name] = grudge  # type: ignore[assignment]
                work = cuts.cut(name, grudge)  # type: ignore[arg-type]
            elif action == "heal":
                faults.pop(name, None)
                work = cuts.heal(name)  # type: ignore[arg-type]
            else:
                faults.clear()
                work = cuts.heal_all()
            try:
                await work
            except ShellError as error:
                assert error.host in nft.broken
            wanted = {host: {source for fault in faults.values() for source in fault.get(host, ())} for host in HOSTS}
            reachable = [host for host in HOSTS if host not in nft.broken]
            assert {host: nft.dropped()[host] for host in reachable} == {host: wanted[host] for host in reachable}
        # A host that failed catches up at the next heal, even of an unknown fault.
        nft.broken = set()
        await cuts.heal("never-was")
        assert nft.dropped() == {
            host: {source for fault in faults.values() for source in fault.get(host, ())} for host in HOSTS
        }

    asyncio.run(scenario())


def test_only_hosts_whose_set_changes_are_touched() -> None:
    async def scenario() -> None:
        nft = FakeNft()
        cuts = NftCuts(nft, ADDRESSES)
        await cuts.install()
        nft.runs.clear()
        await cuts.cut("f1", {"b": frozenset({"a"})})
        await cuts.cut("f2", {"b": frozenset({"a"})})
        await cuts.heal("f1")
        assert nft.runs == ["b"]
        assert nft.dropped() == {"a": set(), "b": {"a"}, "c": set()}

    asyncio.run(scenario())


def test_concurrent_cuts_and_heals_do_not_undo_each_other() -> None:
    async def scenario() -> None:
        nft = FakeNft()
        cuts = NftCuts(nft, ADDRESSES)
        await cuts.install()
        await asyncio.gather(
            cuts.cut("f1", {"a": frozenset({"b"})}), cuts.cut("f2", {"a": frozenset({"c"})}), cuts.heal("f1")
        )
        assert nft.dropped()["a"] == {"c"}

    asyncio.run(scenario())


def test_a_cancelled_cut_is_healed() -> None:
    async def scenario() -> None:
        nft = FakeNft()
        cuts = NftCuts(nft, ADDRESSES)
        await cuts.install()
        task = asyncio.ensure_future(cuts.cut("f1", {"a": frozenset({"b"}), "b": frozenset({"a"})}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cuts.heal("f1")
        assert nft.dropped() == {"a": set(), "b": set(), "c": set()}

    asyncio.run(scenario())


def test_heal_all_creates_a_missing_table() -> None:
    async def scenario() -> None:
        nft = FakeNft()
        cuts = NftCuts(nft, ADDRESSES)
        await cuts.heal_all()
        assert nft.dropped() == {"a": set(), "b": set(), "c": set()}
        await cuts.cut("f1", {"a": frozenset({"b"})})
        nft.tables["a"] = None
        await cuts.heal_all()
        assert nft.dropped() == {"a": set(), "b": set(), "c": set()}

    asyncio.run(scenario())


def test_an_unknown_host_is_named_and_nothing_is_cut() -> None:
    async def scenario() -> None:
        nft = FakeNft()
        cuts = NftCuts(nft, ADDRESSES)
        await cuts.install()
        with pytest.raises(ValueError, match="not in this cluster: x, y"):
            await cuts.cut("f1", {"a": frozenset({"b", "x"}), "y": frozenset()})
        assert nft.dropped() == {"a": set(), "b": set(), "c": set()}

    asyncio.run(scenario())


def test_a_shell_error_names_host_command_and_status_in_one_line() -> None:
    error = ShellError("n1", ["nft", "-f", "-"], 1, "Error: no\n  such thing\n")
    assert str(error) == "n1: `nft -f -` ended with status 1: Error: no such thing"


CAN_NFT = (
    os.geteuid() == 0
    and shutil.which("nft") is not None
    and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
)


@pytest.mark.root
@pytest.mark.netns
@pytest.mark.skipif(not CAN_NFT, reason="needs root, nft and network namespaces")
def test_the_real_nft_accepts_the_scripts() -> None:
    """In one throw-away namespace: install twice, two peers, one, none, remove twice."""
    show = "nft -a list ruleset | grep -c 10.0.0 ; "
    scripts = [
        install_script(),
        install_script("ip6 saddr { fe80::1, fd00::2 }") + counters_script([], "ip6 saddr { fe80::1 }"),
        install_script('iifname "eth0" meta nfproto ipv6') + counters_script(["10.0.1.1"], "ip6 saddr { fe80::1 }"),
        install_script() + counters_script(["10.0.1.1"], further=["192.168.0.7", "192.168.0.8"]),
        install_script() + replace_peers_script(["10.0.0.2", "10.0.0.1"]),
        replace_peers_script(["10.0.0.9"]),
        replace_peers_script([]),
        remove_script(),
        remove_script(),
    ]
    steps = "".join(f"nft -f - <<'END' || exit 9\n{script}END\n{show}\n" for script in scripts)
    done = subprocess.run(["unshare", "--net", "sh", "-c", steps], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == ([*"000011000"], "")


SEND = """
import socket, sys
for address, port, size in zip(sys.argv[1::3], map(int, sys.argv[2::3]), map(int, sys.argv[3::3])):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind((address, 0))
        sender.sendto(bytes(size), ("127.0.0.1", port))
"""
HEADERS_BYTES = 28
"""IP's and UDP's."""


@pytest.mark.root
@pytest.mark.netns
@pytest.mark.skipif(not CAN_NFT, reason="needs root, nft and network namespaces")
def test_the_real_nft_counts_traffic_from_addresses_that_no_cut_applies_to() -> None:
    """Addresses of a host on two networks. A connection of the harness over SSH does not count."""
    send = [sys.executable, "-c", SEND, "127.0.0.2", "9", "10", "127.0.0.5", "9", "20", "127.0.0.4", "9", "40"]
    connect = (
        "import socket, sys\n"
        "with socket.create_server(('127.0.0.1', int(sys.argv[2]))) as server:\n"
        "    address = server.getsockname()\n"
        "    socket.create_connection(address, source_address=(sys.argv[1], 0)).close()\n"
    )
    script = install_script() + counters_script(["127.0.0.2"], further=["127.0.0.5", "127.0.0.6"])
    show = f"nft list table {COUNTERS_TABLE}; echo ---"
    steps = ["ip link set lo up", f"nft -f - <<'END'\n{script}END"]
    steps += [shlex.join([sys.executable, "-c", connect, "127.0.0.6", "22"]), show, shlex.join(send), show]
    steps += [shlex.join([sys.executable, "-c", connect, "127.0.0.6", "7000"]), show]
    done = subprocess.run(["unshare", "--net", "sh", "-ec", "\n".join(steps)], capture_output=True, text=True)
    assert done.stderr == ""
    counted = [parse_counter(listing, "further") for listing in done.stdout.split("---")[:-1]]
    assert counted[:2] == [0, HEADERS_BYTES + 20] and counted[2] > counted[1]


class CounterListing:
    """A shell whose nft shows these counters."""

    def __init__(self, **counted: int) -> None:
        self._counted = counted

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        each = "".join(
            f"\tcounter {name} {{\n\t\tpackets 1 bytes {size}\n\t}}\n" for name, size in self._counted.items()
        )
        return f"table {COUNTERS_TABLE} {{\n{each}}}\n"


def test_traffic_that_bypasses_cuts_is_reported_by_host() -> None:
    further = {"n2": ["192.168.121.11", "192.168.121.13"]}

    async def bypasses(**counted: int) -> list[str]:
        return list(
            await NftCounters(CounterListing(**counted), {"n1": "10.0.0.1", "n2": "10.0.0.2"}, {}, further).bypasses(
                ["n2"]
            )
        )

    assert asyncio.run(bypasses()) == [] == asyncio.run(bypasses(ipv6=0, further=0))
    found = asyncio.run(bypasses(ipv6=7, further=52))
    assert len(found) == 2, found
    over_ipv6, elsewhere = found
    assert over_ipv6 == "7 bytes from other hosts reached n2 over IPv6, which should be blocked between hosts"
    assert elsewhere == (
        "52 bytes from other hosts reached n2 from addresses that no cut applies to (192.168.121.11, "
        "192.168.121.13): have them use only the addresses of the run, such as 10.0.0.2 of n2"
    )


@pytest.mark.root
@pytest.mark.netns
@pytest.mark.skipif(not CAN_NFT, reason="needs root, nft and network namespaces")
def test_the_real_nft_counts_passed_and_dropped_traffic() -> None:
    """Of two peers: before a cut, under it, and while the rule of the cut does not match. A third address, the port of
    the harness and the kernel's answers (port unreachable) count nowhere."""
    send = [sys.executable, "-c", SEND]
    before = [*send, "127.0.0.2", "9", "10", "127.0.0.3", "9", "20", "127.0.0.4", "9", "40", "127.0.0.2", "7777", "80"]
    under = [*send, "127.0.0.2", "9", "100", "127.0.0.3", "9", "200", "127.0.0.2", "7777", "400"]
    beside = [*send, "127.0.0.2", "9", "1000"]
    show = f"nft list table {COUNTERS_TABLE}; echo ---"
    steps = [
        "ip link set lo up",
        f"nft -f - <<'END'\n{install_script()}{counters_script(['127.0.0.2', '127.0.0.3'])}END",
        f"nft add element {COUNTERS_TABLE} own '{{ 7777 }}'",
        show,
        shlex.join(before),
        show,
        f"nft -f - <<'END'\n{replace_peers_script(['127.0.0.2'])}END",
        shlex.join(under),
        show,
        f"nft -f - <<'END'\n{replace_peers_script(['127.0.0.9'])}END",
        shlex.join(beside),
        show,
        f"nft -f - <<'END'\n{remove_script()}END",
        "nft list ruleset",
    ]
    done = subprocess.run(["unshare", "--net", "sh", "-ec", "\n".join(steps)], capture_output=True, text=True)
    assert done.stderr == ""
    *listings, left = done.stdout.split("---\n")
    assert left == ""
    payloads = [
        {address: tuple(size - HEADERS_BYTES * number for size, number in zip(sizes, numbers, strict=True))
         for (address, sizes), numbers in zip(sorted(parse_counters(listing).items()), packets, strict=True)}
        for listing, packets in zip(
            listings,
            ([], [(1, 1), (1, 1)], [(2, 1), (2, 2)], [(3, 2), (2, 2)]),
            strict=True,
        )
    ]  # fmt: skip
    assert payloads == [
        {},
        {"127.0.0.2": (10, 10), "127.0.0.3": (20, 20)},
        {"127.0.0.2": (110, 10), "127.0.0.3": (220, 220)},
        {"127.0.0.2": (1110, 1010), "127.0.0.3": (220, 220)},
    ]


def test_a_host_without_peers_has_no_counters() -> None:
    assert "counter" not in counters_script([]).replace(COUNTERS_TABLE, "")
    assert parse_counters("") == {}


class PeerListing:
    """A shell whose nft shows, on every host, how many bytes arrived from two addresses and how many passed."""

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        sets = {"arrived": {"10.0.0.1": 500, "10.0.0.3": 60}, "passed": {"10.0.0.1": 300, "10.0.0.3": 60}}
        shown = ""
        for name, counted in sets.items():
            elements = ", ".join(f"{address} counter packets 1 bytes {size}" for address, size in counted.items())
            shown += f"\tset {name} {{\n\t\telements = {{ {elements} }}\n\t}}\n"
        return f"table {COUNTERS_TABLE} {{\n{shown}}}\n"


def test_traffic_that_arrived_and_did_not_pass_was_stopped() -> None:
    addresses = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3", "n4": "10.0.0.4"}
    links = [Link(source, "n2") for source in ("n1", "n3", "n4")]
    traffic = asyncio.run(NftCounters(PeerListing(), addresses).read(links))
    assert traffic == {
        links[0]: LinkTraffic(passed_bytes=300, stopped_bytes=200),
        links[1]: LinkTraffic(passed_bytes=60),
        links[2]: LinkTraffic(),
    }
