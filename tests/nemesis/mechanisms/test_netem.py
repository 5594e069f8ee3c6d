"""Bad links by netem: the commands against a tc that simulates the kernel's state, and against the real one."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemesis.mechanisms.netem import (
    MARK,
    MAX_SHAPES,
    Netem,
    Pair,
    install_lines,
    netem_can,
    remove_argv,
    remove_trial_argv,
    trial_argv,
)
from nemesis.mechanisms.shell import ShellError
from nemesis.target import LinkShape

HERE = "10.0.0.1"
DEVICES = {"10.0.0.2": "eth0", "10.0.0.3": "eth0", "10.1.0.4": "eth1"}
LATE, LOSSY, TWICE = LinkShape(delay_ms=80, jitter_ms=20), LinkShape(loss_percent=10), LinkShape(duplicate_percent=30)


class Kernel:
    """A tc that refuses what the real one refuses: adding what exists, deleting what does not, and a netem that
    duplicates beside another one."""

    def __init__(self) -> None:
        self.root: dict[str, tuple[str, str]] = {"eth0": ("fq_codel", "0:"), "eth1": ("noqueue", "0:")}
        self.classes: dict[str, dict[str, str]] = {"eth0": {}, "eth1": {}}
        self.leaves: dict[str, dict[str, tuple[str, str]]] = {"eth0": {}, "eth1": {}}
        self.filters: dict[str, dict[str, tuple[Pair, str]]] = {"eth0": {}, "eth1": {}}
        self.said: list[str] = []
        self.fails_at: str | None = None

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        assert host == "n1"
        if argv[:2] == ["sh", "-c"]:
            assert argv == remove_argv([argv[4]])
            self.said.append(f"remove {argv[4]}")
            if self.root[argv[4]] == ("htb", MARK):
                self.clear(argv[4])
            return ""
        if argv[1:3] == ["qdisc", "show"]:
            device = argv[4]
            kind, handle = self.root[device]
            lines = [f"qdisc {kind} {handle} root refcnt 2"]
            lines += [f"qdisc netem {leaf} parent {at} limit 9" for at, (leaf, _) in self.leaves[device].items()]
            return "\n".join(lines) + "\n"
        assert list(argv) == ["tc", "-batch", "-"]
        for line in stdin.splitlines():
            self.said.append(line)
            if self.fails_at is not None and self.fails_at in line:
                self.fails_at = None
                raise ShellError(host, argv, 1, "as the test wants")
            self.perform(line)
        return ""

    def clear(self, device: str) -> None:
        self.root[device] = ("fq_codel", "0:")
        for there in (self.classes, self.leaves, self.filters):
            there[device].clear()

    def perform(self, line: str) -> None:
        words = line.split()
        device = words[words.index("dev") + 1]
        if line.startswith("qdisc add") and "root" in words:
            assert line == f"qdisc add dev {device} root handle {MARK} htb default 0"
            assert self.root[device][1] == "0:"
            self.root[device] = ("htb", MARK)
            return
        assert self.root[device] == ("htb", MARK)
        if line.startswith("class add"):
            ident = words[words.index("classid") + 1]
            assert ident not in self.classes[device]
            self.classes[device][ident] = line
        elif line.startswith("qdisc add"):
            parent, handle = words[words.index("parent") + 1], words[words.index("handle") + 1]
            assert parent in self.classes[device] and parent not in self.leaves[device]
            assert handle not in [leaf for leaf, _ in self.leaves[device].values()]
            self.leaves[device][parent] = (handle, line)
            several = len(self.leaves[device]) > 1
            assert not (several and any("duplicate" in text for _, text in self.leaves[device].values()))
        elif line.startswith("filter add"):
            number = words[words.index("prio") + 1]
            match = re.search(r"ip src (\S+)/32 match ip dst (\S+)/32 flowid (\S+)$", line)
            assert match is not None and number not in self.filters[device] and match[3] in self.classes[device]
            self.filters[device][number] = ((match[1], match[2]), match[3])
        elif line.startswith("filter del"):
            del self.filters[device][words[words.index("prio") + 1]]
        else:
            ident = words[words.index("classid") + 1]
            assert line.startswith("class del")
            assert ident not in [at for _, at in self.filters[device].values()], (
                "a filter still directs packets to this class"
            )
            del self.classes[device][ident]
            del self.leaves[device][ident]

    def shapes(self) -> dict[Pair, str]:
        """For each pair the parameters of its class and of its netem."""
        found: dict[Pair, str] = {}
        for device, filters in self.filters.items():
            for pair, at in filters.values():
                assert pair not in found, "two filters for one pair"
                rate = self.classes[device][at].split(" htb ")[1]
                found[pair] = f"{rate}; {self.leaves[device][at][1].split(' netem ')[1]}"
        return found


def netem() -> tuple[Netem, Kernel]:
    kernel = Kernel()
    return Netem(kernel, "n1", DEVICES), kernel


def to(*peers: str) -> list[Pair]:
    return [(HERE, peer) for peer in peers]


def test_each_shape_is_translated_into_tc_parameters() -> None:
    direct = "rate 10gbit burst 1mb cburst 1mb quantum 60000"
    for shape, words in (
        (LATE, f"{direct}; limit 20000 delay 80.000ms 20.000ms rate 100gbit"),
        (LOSSY, f"{direct}; limit 20000 loss random 10.0000% rate 100gbit"),
        (TWICE, f"{direct}; limit 20000 duplicate 30.0000% rate 100gbit"),
        (LinkShape(corrupt_percent=7), f"{direct}; limit 20000 corrupt 7.0000% rate 100gbit"),
        (LinkShape(delay_ms=20, reorder_percent=40), f"{direct}; limit 20000 delay 20.000ms reorder 40.0000%"),
        (LinkShape(reorder_percent=40), f"{direct}; limit 20000 rate 100gbit"),
        (LinkShape(rate_bytes_per_s=50_000), "rate 400000bit quantum 60000; limit 33 rate 100gbit"),
        (
            LinkShape(rate_bytes_per_s=50_000, delay_ms=300, jitter_ms=100),  # packets held back by the delay as well
            "rate 400000bit quantum 60000; limit 47 delay 300.000ms 100.000ms rate 100gbit",
        ),
    ):

        async def body(shape: LinkShape = shape, words: str = words) -> None:
            shaping, kernel = netem()
            await shaping.apply(dict.fromkeys(to("10.0.0.2"), shape))
            assert kernel.shapes() == {(HERE, "10.0.0.2"): words}
            assert kernel.root["eth1"] == ("noqueue", "0:"), "an unconcerned device is not touched"

        asyncio.run(body())


def test_unchanged_shapes_are_left_alone_and_the_last_one_takes_the_tree_with_it() -> None:
    async def body() -> None:
        shaping, kernel = netem()
        (two, three, four) = to("10.0.0.2", "10.0.0.3", "10.1.0.4")
        await shaping.apply({two: LATE, three: LATE, four: LOSSY})
        assert len(kernel.classes["eth0"]) == 1, "pairs of one shape share a class"
        kernel.said.clear()
        await shaping.apply({two: LATE, three: LATE, four: LOSSY})
        assert kernel.said == []
        await shaping.apply({two: LATE, three: LOSSY, four: LOSSY})
        assert not any("5b1a:1" in line for line in kernel.said), "the remaining class keeps its queued packets"
        assert kernel.shapes()[three].startswith("rate 10gbit burst 1mb cburst 1mb quantum 60000; limit 20000 loss")
        await shaping.apply({four: LOSSY})
        assert kernel.root["eth0"] == ("fq_codel", "0:") and kernel.root["eth1"] == ("htb", MARK)
        await shaping.apply({})
        await shaping.apply({})
        assert kernel.shapes() == {} and kernel.root["eth1"][1] == "0:"

    asyncio.run(body())


def test_a_device_is_rebuilt_after_a_failure() -> None:
    async def body() -> None:
        shaping, kernel = netem()
        (two, three) = to("10.0.0.2", "10.0.0.3")
        await shaping.apply({two: LATE})
        kernel.fails_at = "filter add"
        with pytest.raises(ShellError, match="as the test wants"):
            await shaping.apply({two: LATE, three: LOSSY})
        await shaping.apply({two: LATE, three: LOSSY})
        assert set(kernel.shapes()) == {two, three}
        kernel.clear("eth0")  # removed by another program
        shaping.forget()
        await shaping.apply({})
        assert kernel.root["eth0"][1] == "0:"

    asyncio.run(body())


def test_a_tree_that_another_program_has_removed_is_built_anew_once_it_is_forgotten() -> None:
    async def body() -> None:
        shaping, kernel = netem()
        wanted = dict.fromkeys(to("10.0.0.2"), LATE)
        await shaping.apply(wanted)
        kernel.clear("eth0")
        shaping.forget()
        await shaping.apply(wanted)
        assert set(kernel.shapes()) == set(wanted)

    asyncio.run(body())


def test_a_queue_that_is_missing_afterwards_is_an_error() -> None:
    class Idle(Kernel):
        def perform(self, line: str) -> None:
            return None

    async def body() -> None:
        shaping = Netem(Idle(), "n1", DEVICES)
        with pytest.raises(ShellError, match="the device should have 5b21:, and has fq_codel 0:"):
            await shaping.apply(dict.fromkeys(to("10.0.0.2"), LATE))

    asyncio.run(body())


def test_each_queue_that_is_not_as_wanted_is_an_error() -> None:
    """Whatever the commands have answered: only what the device shows counts."""
    wanted = dict.fromkeys(to("10.0.0.2"), LATE)

    class WithoutLeaf(Kernel):
        def perform(self, line: str) -> None:
            super().perform(line)
            self.leaves["eth0"].clear()

    class WithoutRoot(Kernel):
        def perform(self, line: str) -> None:
            super().perform(line)
            if line.startswith("filter"):
                self.root["eth0"] = ("fq_codel", "0:")

    class Kept(Kernel):
        def clear(self, device: str) -> None:
            return None

    async def body() -> None:
        for kernel, said in (
            (WithoutLeaf(), "the device should have 5b21:, and has htb 5b1a:"),
            (WithoutRoot(), "the device should have 5b21:, and has fq_codel 0:, netem 5b21:"),
        ):
            with pytest.raises(ShellError, match=f"{said}$"):
                await Netem(kernel, "n1", DEVICES).apply(wanted)
        shaping = Netem(Kept(), "n1", DEVICES)
        await shaping.apply(wanted)
        for _ in range(2):
            with pytest.raises(ShellError, match=r"should have no queue of ours, and has htb 5b1a:, netem 5b21:$"):
                await shaping.apply({})

    asyncio.run(body())


FAKE_TC = """#!/bin/sh
echo "$@" >> "$SAID"
case "$1 $2" in "qdisc show") cat "$SHOWS" ;; "qdisc del") exit "$STATUS" ;; esac
"""


def with_fake_tc(directory: Path, *, status: int) -> dict[str, str]:
    """The environment for a `tc` in `directory` that shows what is in the file `shows` and notes its arguments."""
    said, shows = f"{directory}/said", f"{directory}/shows"
    return {"PATH": f"{directory}:/usr/bin:/bin", "SAID": said, "SHOWS": shows, "STATUS": str(status)}


@pytest.mark.parametrize(
    ("shown", "status", "said"),
    [
        (f"qdisc htb {MARK} root refcnt 2", 0, ["d0", "d1"]),
        (f"qdisc htb {MARK} root refcnt 2", 2, ["d0"]),
        ("qdisc htb 8001: root refcnt 2", 0, []),
        (f"qdisc prio 1: root refcnt 2\nqdisc htb {MARK} parent 1:2", 0, []),
        (f"qdisc prio {MARK} root refcnt 2", 0, []),
    ],
)
def test_only_our_tree_is_removed_and_a_tree_that_stays_is_reported(
    tmp_path: Path, shown: str, status: int, said: list[str]
) -> None:
    (tmp_path / "tc").write_text(FAKE_TC)
    (tmp_path / "tc").chmod(0o755)
    (tmp_path / "shows").write_text(f"{shown}\n")
    done = subprocess.run(remove_argv(["d0", "d1"]), env=with_fake_tc(tmp_path, status=status), check=False)
    lines = (tmp_path / "said").read_text().splitlines()
    assert [line for line in lines if " del " in line] == [
        f"qdisc del dev {device} root handle {MARK}" for device in said
    ]
    assert (done.returncode != 0) == (status != 0)


def test_a_kernel_that_accepts_a_tree_and_does_not_show_it_has_no_netem(tmp_path: Path) -> None:
    for name, script in (("tc", FAKE_TC), ("ip", '#!/bin/sh\ntest "$2" != show\n')):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    found = []
    for shown in ("qdisc htb 5b1a: root", "qdisc netem 5b21: parent 5b1a:1"):
        (tmp_path / "shows").write_text(f"{shown}\n")
        found.append(subprocess.run(trial_argv(), env=with_fake_tc(tmp_path, status=0), check=False).returncode)
    assert found == [1, 0]


def test_a_foreign_queue_is_named_and_never_removed() -> None:
    async def body() -> None:
        shaping, kernel = netem()
        assert await shaping.foreign_root() is None
        kernel.root["eth1"] = ("cake", "8001:")
        assert await shaping.foreign_root() == "eth1 has a queue of its own (cake 8001:)"
        shaping.forget()
        await shaping.apply({})
        assert kernel.root["eth1"] == ("cake", "8001:")

    asyncio.run(body())


SHAPES = st.sampled_from([LATE, LOSSY, TWICE, LinkShape(rate_bytes_per_s=9000), LATE.on_top_of(LOSSY)])
WANTED = st.dictionaries(st.sampled_from(to(*DEVICES)), SHAPES)


@settings(max_examples=200)
@given(st.lists(WANTED, max_size=8), st.integers(0, 60))
def test_after_any_sequence_of_changes_the_kernel_has_exactly_the_last_shapes(
    changes: list[dict[Pair, LinkShape]], broken_at: int
) -> None:
    """Even if a command among them fails and the change is applied again."""

    async def body() -> None:
        shaping, kernel = netem()
        for wanted in changes:
            by_device = {name: [s for (_, peer), s in wanted.items() if DEVICES[peer] == name] for name in kernel.root}
            if not all(netem_can(shapes) for shapes in by_device.values()):
                continue
            if len(kernel.said) <= broken_at < len(kernel.said) + 4:
                kernel.fails_at = "dev"
                try:
                    await shaping.apply(wanted)
                except ShellError:
                    pass
                kernel.fails_at = None
            await shaping.apply(wanted)
            at_once, fresh = netem()
            await at_once.apply(wanted)
            assert kernel.shapes() == fresh.shapes()
            assert {name: root == ("htb", MARK) for name, root in kernel.root.items()} == {
                name: bool(shapes) for name, shapes in by_device.items()
            }

    asyncio.run(body())


def test_a_duplicating_shape_cannot_be_combined_with_another() -> None:
    assert netem_can([TWICE]) and netem_can([TWICE, TWICE]) and netem_can([LATE, LOSSY]) and netem_can([])
    assert not netem_can([TWICE, LATE])
    many = [LinkShape(delay_ms=number) for number in range(MAX_SHAPES + 1)]
    assert netem_can(many[1:]) and not netem_can(many)


def why_no_netem() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin") is None:
        return "tc is missing"
    tried = subprocess.run(["unshare", "--net", *trial_argv()], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"this kernel has no netem: {tried.stderr.strip().splitlines()[:1]}"


def in_namespace(script: str) -> str:
    done = subprocess.run(["unshare", "--net", "sh", "-ec", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def quoted(argv: Sequence[str]) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in argv)


needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root")


@pytest.mark.root
@needs_root
def test_the_trial_and_the_removals_leave_a_device_as_it_was() -> None:
    shown = in_namespace(
        f"ip link add sb-trial type veth peer name sb-trial2; {quoted(remove_trial_argv())};"
        f"{quoted(remove_trial_argv())};"
        f"{quoted(trial_argv())} >/dev/null 2>&1 || true; ip -o link; ip link add d0 type veth peer name d1;"
        f"tc qdisc add dev d0 root handle 7: pfifo; {quoted(remove_argv(['d0', 'd1', 'no-such-device']))};"
        f"tc qdisc show dev d0; tc qdisc replace dev d0 root handle {MARK} htb; {quoted(remove_argv(['d0']))};"
        "tc qdisc show dev d0"
    )
    assert "sb-trial" not in shown
    assert "qdisc pfifo 7: root" in shown and f"htb {MARK}" not in shown


@pytest.mark.root
@pytest.mark.skipif(why_no_netem() is not None, reason=str(why_no_netem()))
def test_the_kernel_accepts_every_tree() -> None:
    every = LinkShape(delay_ms=9.5, jitter_ms=2.25, loss_percent=3.3333, rate_bytes_per_s=12_345)
    for wanted in ({to("10.0.0.2")[0]: TWICE}, {to("10.0.0.2")[0]: every, to("10.0.0.3")[0]: LATE}):
        lines = "\n".join(install_lines("d0", wanted))
        shown = in_namespace(
            f"ip link add d0 type veth peer name d1; printf '%s\\n' '{lines}' | tc -batch -; tc qdisc show dev d0;"
            f"{quoted(remove_argv(['d0']))}; tc qdisc show dev d0"
        )
        assert len(re.findall(r"^qdisc netem 5b2", shown, re.MULTILINE)) == len(set(wanted.values()))
        assert shown.count(f"htb {MARK}") == 1, "it is gone after the removal"
