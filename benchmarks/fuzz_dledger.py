"""Fuzzing the ports that members of a DLedger group have for each other, with generated and mutated frames.

    python -m benchmarks.fuzz_dledger [--frames 100000] [--seconds 280] [--seed N]

Three broker processes form a group, and a bystander sends and reads through the leader. The fuzzer sends to all three
ports, in the binary form and in DLedger's JSON: votes, heartbeats, pushes, pieces of snapshots, leadership transfers,
changes of members, and requests of DLedger clients; first from strangers, then from forgers.

    strangers   well-formed messages of another group or of unknown members, and bytes that are no message. The group
                must not be affected: no leader is deposed, and no request of the bystander fails.
    forgers     mutated messages that name real members. Members trust each other, as in every Raft, so these may
                depose leaders; but acknowledged messages stay, once and intact, and the group recovers.

Throughout, every process stays up, logs no traceback, and does not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._bystander import Bystander
from benchmarks.fuzz_broker import MEMORY_SLACK_BYTES, Subject, free_ports, mutate
from node.dledger.entry import NORMAL_MAGIC, encode_entry
from node.dledger.json_form import to_json
from node.dledger.messages import (
    AppendEntryRequest,
    ChangeMembersRequest,
    GetEntriesRequest,
    HeartBeatRequest,
    InstallSnapshotRequest,
    LeadershipTransferRequest,
    MembersRequest,
    Message,
    MetadataRequest,
    PushEntryRequest,
    VoteRequest,
)
from node.dledger.rpc import JSON_CODES, DLedgerRequestCode, PushType
from node.remoting import Command, RemotingClient, RemotingError, encode
from node.store.record import decode_records

__all__ = ["fuzz", "main"]

MEMBERS = ("n1", "n2", "n3")
GROUP = "broker-a"
RECOVERY_S = 60.0
"""Longest time until the group must serve again after forged votes and heartbeats."""
TWO_LEADERS = r"in term \d+ both \w+ and \w+ claim to lead$"
"""A legitimate alarm of a member that gets forged heartbeats from a second leader of its term."""
FRAMES_AT_ONCE = 40
LEDGER = """[dledger]
listen = "127.0.0.1:{port}"
[dledger.peers]
{peers}
"""


def messages(group: str, sender: str, to: str, rng: random.Random) -> list[tuple[DLedgerRequestCode, Message]]:
    """One message of every kind, from `sender`, with plausible numbers."""
    code = DLedgerRequestCode
    term = rng.choice((0, 1, 2, 3, 10, 1 << 40))
    base: dict[str, Any] = {"group": group, "remote_id": to, "local_id": sender}
    led = base | {"term": term, "leader_id": sender}
    index = rng.choice((-1, 0, 1, 5, 1000))
    entry = encode_entry(
        magic=NORMAL_MAGIC, index=max(index, 0), term=max(term, 1), pos=rng.choice((0, 48, 4096)),
        previous_chain_crc=0, body=b"forged " * 9,
    )  # fmt: skip
    pushes: list[tuple[DLedgerRequestCode, Message]] = [
        (code.PUSH, PushEntryRequest(**led, type=kind, commit_index=index, entries=entry.raw, previous_term=term))
        for kind in (PushType.APPEND, PushType.COMPARE, PushType.TRUNCATE)
    ]
    return [
        *pushes,
        (code.PUSH, PushEntryRequest(**led, type=PushType.COMMIT, commit_index=index)),
        (code.VOTE, VoteRequest(**led, ledger_end_index=1 << 40, ledger_end_term=1 << 40)),
        (code.VOTE, VoteRequest(**led, ledger_end_index=index, ledger_end_term=term, transferred_term=term)),
        (code.HEART_BEAT, HeartBeatRequest(**led)),
        (code.INSTALL_SNAPSHOT, InstallSnapshotRequest(
            **led, last_included_index=max(index, 0), last_included_term=term, size_bytes=100, digest="ab" * 32,
            offset=0, data_crc=7, data=b"x" * 100)),
        (code.LEADERSHIP_TRANSFER, LeadershipTransferRequest(
            **base, term=term, transfer_id=sender, transferee_id=to, take_index=index)),
        (code.CHANGE_MEMBERS, ChangeMembersRequest(**base, member="n9", address="127.0.0.1:9")),
        (code.MEMBERS, MembersRequest(**base)),
        (code.METADATA, MetadataRequest(**base)),
        (code.GET, GetEntriesRequest(**base, begin_index=index)),
        (code.APPEND, AppendEntryRequest(**base, body=b"no record")),
    ]  # fmt: skip


def frames_of(code: DLedgerRequestCode, message: Message) -> list[bytes]:
    """A message as a request in both forms."""
    binary = replace(Command.request(code, body=message.to_body()), opaque=1, serializer="binary")
    return [encode(binary), encode(replace(Command.request(code + JSON_CODES, body=to_json(message)), opaque=2))]


def strange_frames(rng: random.Random, count: int) -> list[bytes]:
    """Frames from outside the group, and bytes that are no frame."""
    names = rng.choice(((GROUP, "stranger"), ("other", "n2"), ("", ""), (GROUP, "n" * 200), ("ü" * 60, "n1")))
    valid = [frame for pair in messages(*names, rng.choice((*MEMBERS, "nobody")), rng) for frame in frames_of(*pair)]
    frames = [rng.choice(valid) for _ in range(count)]
    if rng.random() < 0.3:
        frames.append(rng.randbytes(rng.choice((3, 40, 400))))
    return frames


def forged_frames(rng: random.Random, count: int) -> list[bytes]:
    """Mutated frames in the name of members."""
    sender, to = rng.sample(MEMBERS, 2)
    valid = [frame for pair in messages(GROUP, sender, to, rng) for frame in frames_of(*pair)]
    return [mutate(rng.choice(valid), valid, rng) for _ in range(count)]


class _Sender(Bystander):
    """Sends one message after the other to the leader, and reads all of them in the end."""

    def __init__(self, ports: list[int]) -> None:
        super().__init__()
        self._addresses = [f"127.0.0.1:{port}" for port in ports]
        self.placed: dict[int, bytes] = {}
        """Acknowledged bodies by offset."""
        self.failed = 0
        """Requests that no member acknowledged immediately."""

    async def step(self, client: RemotingClient) -> None:
        body = self.body(self.sent)
        self.sent += 1
        for address in list(self._addresses):
            request = Command.request(310, {"b": "bystander", "e": 0}, body)
            try:
                reply = await client.invoke(address, request, timeout_ms=10_000)
            except RemotingError:
                break  # it is unknown whether it is stored
            if reply.code == 0:
                offset = int(reply.ext_fields["queueOffset"])
                assert offset not in self.placed, f"two messages were stored as number {offset}"
                self.placed[offset] = body
                self._addresses.sort(key=lambda other: other != address)  # the leader first, the next time
                return
            if reply.code != 14:
                break
        self.failed += 1

    async def look_again(self, client: RemotingClient) -> None:
        deadline_s = time.monotonic() + RECOVERY_S
        found: dict[int, bytes] = {}
        last = max(self.placed, default=-1)
        while len(found) <= last:
            assert time.monotonic() < deadline_s, f"{len(found)} of {last + 1} messages could be read in the end"
            for address in self._addresses:
                pull: dict[str, str | int] = {"topic": "bystander", "queueId": 0, "queueOffset": len(found)}
                with contextlib.suppress(RemotingError):
                    reply = await client.invoke(address, Command.request(11, pull), timeout_ms=10_000)
                    for message in decode_records(reply.body):
                        found[message.queue_offset] = message.body
            await asyncio.sleep(0.01)
        for offset, body in self.placed.items():
            assert found[offset] == body, f"number {offset} was acknowledged as {body[:20]!r}, it is {found[offset]!r}"
        acknowledged = set(self.placed.values())
        twice = [body for body, count in Counter(found.values()).items() if count > 1 and body in acknowledged]
        assert not twice, f"stored twice: {twice[0][:20]!r}"


@contextmanager
def _group(directory: Path) -> Iterator[tuple[list[Subject], list[int]]]:
    """Run three broker processes; yields them with the ports that they have for each other."""
    ports = dict(zip(MEMBERS, free_ports(len(MEMBERS)), strict=True))
    peers = "\n".join(f'{name} = "127.0.0.1:{port}"' for name, port in ports.items())
    with ExitStack() as stack:
        subjects = []
        for name in MEMBERS:
            subject = Subject(directory / name, LEDGER.format(port=ports[name], peers=peers), self_id=name)
            stack.callback(subject.process.wait)
            stack.callback(subject.process.terminate)
            subjects.append(subject)
        yield subjects, list(ports.values())


async def _throw(port: int, frames: list[bytes]) -> None:
    """Send frames over one connection and read whatever comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"".join(frames))
        writer.write_eof()
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
    except (ConnectionError, TimeoutError):
        pass  # bytes that are no frame close their connection
    finally:
        writer.close()


async def _leader_of(subjects: list[Subject]) -> tuple[str, int]:
    """The leader and its term; waits until there is one."""
    client = RemotingClient()
    deadline_s = time.monotonic() + RECOVERY_S
    try:
        while True:
            for subject in subjects:
                with contextlib.suppress(RemotingError):
                    reply = await client.invoke(f"127.0.0.1:{subject.port}", Command.request(28), timeout_ms=5000)
                    table = json.loads(reply.body)["table"]
                    if table["takesWrites"] == "true":
                        return table["selfId"], int(table["term"])
            assert time.monotonic() < deadline_s, "nobody leads"
            await asyncio.sleep(0.05)
    finally:
        await client.close()


def fuzz(frames: int, *, seconds: float = 1e9, seed: int = 1) -> dict[str, Any]:
    """Send `frames` frames to a group, half of each kind. Returns figures; raises AssertionError with what is wrong."""
    rng = random.Random(seed)
    began_s = time.monotonic()
    memory: list[int] = []
    thrown: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="splitbrain-fuzz-") as directory,
        _group(Path(directory)) as (subjects, ports),
        asyncio.Runner() as runner,
    ):
        leader = runner.run(_leader_of(subjects))
        with _Sender([subject.port for subject in subjects]) as bystander:

            def round_of(kind: str) -> None:
                make = strange_frames if kind == "strangers" else forged_frames
                for _ in range(20):
                    data = make(rng, rng.choice((1, 8, FRAMES_AT_ONCE)))
                    thrown[kind] += len(data)
                    runner.run(_throw(rng.choice(ports), data))
                for subject in subjects:
                    subject.check(TWO_LEADERS if kind == "forgers" else "$^")
                memory.append(sum(subject.memory_bytes() for subject in subjects))
                assert bystander.failure is None, f"the bystander noticed: {bystander.failure!r}"

            def is_over(kind: str, share: float) -> bool:
                return thrown[kind] >= frames / 2 or time.monotonic() - began_s > seconds * share

            while not (is_over("strangers", 0.5) and bystander.placed):
                round_of("strangers")
            assert runner.run(_leader_of(subjects)) == leader, "strangers have deposed the leader"
            assert bystander.failed == 0, f"{bystander.failed} requests failed because of strangers"
            undisturbed = len(bystander.placed)
            while not is_over("forgers", 1):
                round_of("forgers")
            after = runner.run(_leader_of(subjects))
            before = len(bystander.placed)
            deadline_s = time.monotonic() + RECOVERY_S
            while len(bystander.placed) < before + 5:
                assert time.monotonic() < deadline_s, "the group does not serve any more"
                time.sleep(0.05)
        for subject in subjects:
            subject.check(TWO_LEADERS)
        assert bystander.failure is None, f"the bystander noticed: {bystander.failure!r}"
    half = memory[len(memory) // 2 :]
    grown_bytes = max(half[-max(1, len(half) // 4) :]) - half[0] if len(memory) >= 8 else 0
    assert grown_bytes <= 3 * MEMORY_SLACK_BYTES, f"memory grew by {grown_bytes} bytes in the second half"
    return {
        "frames": sum(thrown.values()), **thrown, "acknowledged": len(bystander.placed), "undisturbed": undisturbed,
        "failed": bystander.failed, "terms": after[1] - leader[1], "memory_mb": round(memory[-1] / 1e6),
        "grown_mb": round(grown_bytes / 1e6, 1),
    }  # fmt: skip


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(fuzz(options.frames, seconds=options.seconds, seed=options.seed)))
    print("no crash, no alarm but of two that claim to lead, what was acknowledged is there once and intact")


if __name__ == "__main__":
    main()
