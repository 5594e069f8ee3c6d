"""The protocol on the wire, from either side: what is sent when, and what happens to a peer that violates it.

Times are virtual, so tests can assert them."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.ha.frames import Frame, FrameError, FrameReader, ReportReader, encode_report

CLIENT_MECHANISM = (
    "HAClient: 8 B offset at once when advanced, else every 5 s (R: so first report ≤5 s after connect);"
    " connect retry 5 s"
)
WRITE_MECHANISM = (
    "Write: 12 B header (offset8,size4)+body ≤32 KB; request 0 → start of master's last file;"
    " heartbeat size 0 every 5 s"
)
READ_MECHANISM = "HAConnection read: newest whole 8-byte report; first = slaveRequestOffset; wakes waiters"
MASTER = ("ASYNC_MASTER",)
TO_N1 = "classic.ha_master_address=10.0.0.1:10912"


def near(times: list[float], *expected: float) -> bool:
    return len(times) == len(expected) and all(abs(a - b) < 0.05 for a, b in zip(times, expected, strict=True))


@given(positions=st.lists(st.integers(0, 2**62), min_size=1, max_size=8), cuts=st.lists(st.integers(1, 20)))
def test_reports_survive_any_fragmentation(positions: list[int], cuts: list[int]) -> None:
    data, reader, found = b"".join(map(encode_report, positions)), ReportReader(), []
    for size in [*cuts, len(data)]:
        piece, data = data[:size], data[size:]
        found += reader.feed(piece)
    assert found[0] == positions[0] and found[-1] == positions[-1]
    assert set(found) <= set(positions)


@given(
    frames=st.lists(st.tuples(st.integers(0, 2**62), st.binary(max_size=50)), max_size=8),
    cuts=st.lists(st.integers(1, 30)),
)
def test_frames_survive_any_fragmentation(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data, reader, found = b"".join(Frame(*frame).encode() for frame in frames), FrameReader(), []
    for size in [*cuts, len(data)]:
        piece, data = data[:size], data[size:]
        found += reader.feed(piece)
    assert found == frames


@pytest.mark.parametrize("head", [(-1, 5), (0, -1), (0, 1 << 30)])
def test_an_invalid_frame_head_is_refused(head: tuple[int, int]) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(struct.pack(">qi", *head))


@pytest.mark.mechanism("AcceptSocketService")
def test_connections_are_counted_and_removed(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        service = group.ledger("n1").service
        peers = [await group.raw_peer() for _ in range(3)]
        await group.until(lambda: service.connection_count == 3)
        await peers[0].close()
        await group.until(lambda: service.connection_count == 2)
        assert (await group.table("n1"))["haConnections"] == "2"
        await group.stop("n1")
        assert await peers[1].frame() is None

    ha(scenario, roles=MASTER)


def test_a_master_closes_connections_above_the_limit_on_slaves(ha: Any, monkeypatch: Any) -> None:
    from node.ha import service as module

    monkeypatch.setattr(module, "MAX_SLAVES", 2)

    async def scenario(group: Any) -> None:
        kept = [await group.raw_peer() for _ in range(2)]
        assert await (await group.raw_peer()).frame() is None
        await kept[0].report(0)
        assert (await kept[0].frame()) == (0, b"")

    ha(scenario, roles=MASTER)


@pytest.mark.mechanism(READ_MECHANISM)
def test_the_first_report_is_the_start_position_and_may_arrive_in_pieces(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(20)
        log = group.ledger("n1").log
        peer = await group.raw_peer()
        wanted = struct.pack(">q", 1000)
        for at in range(8):
            await peer.send_bytes(wanted[at : at + 1])
            await asyncio.sleep(0.1)
            assert group.ledger("n1").service.slaves()[0]["sent"] == (-1 if at < 7 else log.end_position)
        position, body = await peer.frame()
        assert position == 1000 and body == log.read_range(1000, len(body))
        connection = next(iter(group.ledger("n1").service._connections))
        await peer.send_bytes(struct.pack(">qq", 1500, 2000) + struct.pack(">q", 3000)[:5])
        await group.until(lambda: connection.ack_position == 2000)
        await peer.send_bytes(struct.pack(">q", 3000)[5:])
        await group.until(lambda: connection.ack_position == 3000)

    ha(scenario, roles=MASTER)


@pytest.mark.mechanism(WRITE_MECHANISM)
def test_a_master_sends_its_log_in_frames_and_heartbeats_while_idle(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(250)
        log = group.ledger("n1").log
        peer = await group.raw_peer()
        await peer.report(1)
        position, sizes = 1, []
        while position < log.end_position:
            frame = await peer.frame()
            assert frame is not None and frame[0] == position
            assert frame[1] == log.read_range(position, len(frame[1]))
            sizes.append(len(frame[1]))
            position += len(frame[1])
        assert max(sizes) == 32 << 10 and 65536 - 1 in [sum(sizes[:n]) for n in range(len(sizes))]
        began_s = group.loop.time()
        times = []
        for _ in range(3):
            assert await peer.frame() == (position, b"")
            times.append(group.loop.time() - began_s)
            await peer.report(position)
        assert near(times, 5, 10, 15)

    ha(scenario, roles=MASTER)


@pytest.mark.mechanism(WRITE_MECHANISM)
def test_a_slave_without_a_log_gets_the_masters_last_file(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(400)
        peer = await group.raw_peer()
        await peer.report(0)
        position, _ = await peer.frame()
        end = group.ledger("n1").log.end_position
        assert position == end - end % 65536 > 0

    ha(scenario, roles=MASTER)


@pytest.mark.mechanism("Wake on put; 100 ms idle wait")
def test_a_message_is_sent_to_slaves_as_soon_as_it_is_durable(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        peer = await group.raw_peer()
        await peer.report(0)
        assert await peer.frame() == (0, b"")
        await asyncio.sleep(1)
        await group.send(b"news")
        answered_s = group.loop.time()
        position, body = await peer.frame()
        assert position == 0 and b"news" in body and group.loop.time() - answered_s < 0.05

    ha(scenario, roles=MASTER)


@pytest.mark.mechanism(CLIENT_MECHANISM)
def test_a_slave_reports_progress_at_once_and_otherwise_every_five_seconds(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        record = await _one_record(group)
        played = await group.play_master()
        await group.start("n2", "SLAVE", TO_N1)
        await group.until(lambda: bool(played.reports))
        began_s = played.connected_s[0]
        assert played.reports[0][1] == 0 and played.reports[0][0] - began_s < 0.05
        for _ in range(3):
            await asyncio.sleep(5)
            await played.send(0)
        await asyncio.sleep(1)
        assert near([time - began_s for time, _ in played.reports], 0, 5, 10, 15)
        await played.send(0, record)
        sent_s = group.loop.time()
        await group.until(lambda: played.reports[-1][1] == len(record))
        assert played.reports[-1][0] - sent_s < 0.05

    async def _one_record(group: Any) -> bytes:
        await group.start("n1", "ASYNC_MASTER")
        await group.send(b"x")
        record = bytes(group.ledger("n1").log.record_at(0)[0])
        group.kill("n1")
        return record

    ha(scenario, roles=())


@pytest.mark.mechanism(CLIENT_MECHANISM)
def test_a_slave_reconnects_every_five_seconds(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        played = await group.play_master()
        await group.start("n2", "SLAVE", TO_N1)
        for _ in range(3):
            await group.until(lambda: len(played.connected_s) > len(played.closed_s))
            writer = played.writer
            group.on("n1", writer.close)
            await group.until(lambda: len(played.connected_s) == len(played.closed_s))
        await group.until(lambda: len(played.connected_s) == 4)
        began_s = played.connected_s[0]
        assert near([time - began_s for time in played.connected_s], 0, 5, 10, 15)

    ha(scenario, roles=())


def test_a_slave_told_of_a_new_master_while_dialling_the_old_one_switches(ha: Any, monkeypatch: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start("n2", "SLAVE", TO_N1)
        client = group.ledger("n2").client
        old, new = [await group.play_master(name) for name in ("n1", "n3")]
        dial = group.loop.create_connection

        async def switch_meanwhile(protocol: Any, host: str, port: int) -> Any:
            if host == "10.0.0.1":
                client.set_master("10.0.0.3:10912")
            return await dial(protocol, host, port)

        monkeypatch.setattr(group.loop, "create_connection", switch_meanwhile)
        await group.until(lambda: bool(new.reports))
        await group.until(lambda: len(old.closed_s) == len(old.connected_s))
        assert near(new.connected_s, old.connected_s[0]) and client.state == "FOLLOWING"

    ha(scenario, roles=(), size=3)


def test_the_begin_of_the_old_masters_log_is_not_assumed_for_the_new_master(ha: Any, monkeypatch: Any) -> None:
    """The slave learns of the new master after the old one has refused, and before it asks the old one again."""

    async def scenario(group: Any) -> None:
        await group.start("n1", "ASYNC_MASTER")
        await group.start("n2", "SLAVE")
        await group.fill(10)
        await group.following("n2")
        end = group.ledger("n2").log.end_position
        group.kill("n1")
        await group.stop("n2")
        old, new = [await group.play_master(name) for name in ("n1", "n3")]
        await group.start("n2", "SLAVE", TO_N1)
        client = group.ledger("n2").client
        await group.until(lambda: bool(old.reports))
        settle = client._settle

        async def switch_meanwhile() -> None:
            client.set_master("10.0.0.3:10912")
            await settle()

        monkeypatch.setattr(client, "_settle", switch_meanwhile)
        await old.send(end - 1)  # the old master's log begins there
        await group.until(lambda: bool(new.reports))
        assert [position for _, position in new.reports] == [old.reports[0][1]] == [1]

    ha(scenario, roles=(), size=3)


def test_no_heartbeat_is_sent_before_the_requested_data(ha: Any) -> None:
    """A slave that compares would take it for the end of the master's log."""

    async def scenario(group: Any) -> None:
        await group.fill(3)
        peer = await group.raw_peer()
        service = group.ledger("n1").service
        await group.until(lambda: service.connection_count == 2)
        connection = list(service._connections)[-1]

        def ask_as_a_heartbeat_is_due() -> None:
            connection._last_write_s -= 5
            connection.data_received(struct.pack(">q", 1))
            connection._tick()

        group.on("n1", ask_as_a_heartbeat_is_due)
        position, body = await peer.frame()
        assert position == 1 and body

    ha(scenario)


@pytest.mark.mechanism("Housekeeping 20 s, both ends")
def test_both_ends_close_a_silent_connection(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        service, client = group.ledger("n1").service, group.ledger("n2").client
        await group.until(lambda: service.connection_count == 1)
        await group.cut("n2")
        cut_s = group.loop.time()
        await group.until(lambda: service.connection_count == 0)
        master_s = group.loop.time() - cut_s
        await group.until(lambda: client.state == "CONNECTING")
        assert 14.9 < master_s < 20.1 and 14.9 < group.loop.time() - cut_s < 20.1
        assert "silent for 20 s" in group.lines("n1") and "silent for 20 s" in group.lines("n2")
        await group.heal()
        await group.following("n2")

    ha(scenario)


@pytest.mark.mechanism("Housekeeping 20 s, both ends")
def test_a_master_closes_a_connection_that_sends_nothing(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        peer = await group.raw_peer()
        began_s = group.loop.time()
        assert await peer.frame() is None
        assert near([group.loop.time() - began_s], 20)

    ha(scenario, roles=MASTER)


@pytest.mark.parametrize("said", [b"", b"GET / HT", bytes(8), struct.pack(">qq", 0, 1 << 40)])
def test_invalid_connections_do_not_flood_the_masters_log_lines(ha: Any, said: bytes) -> None:
    """Each connection comes from another port."""

    async def scenario(group: Any) -> None:
        before = len(group.lines("n1").splitlines())
        for _ in range(50):
            peer = await group.raw_peer()
            await peer.send_bytes(said)
            group.on("clients", peer._writer.close)
            await asyncio.sleep(0.1)
        assert group.ledger("n1").service.accepted_total >= 50
        assert len(group.lines("n1").splitlines()) - before <= 3

    ha(scenario, roles=MASTER)


@pytest.mark.mechanism("Offset mismatch → slave drops link")
@pytest.mark.parametrize("wrong", ["ahead", "behind", "damaged", "elsewhere"])
def test_a_slave_writes_only_records_that_continue_its_log(ha: Any, wrong: str) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(10)
        log = group.ledger("n1").log
        first = bytes(log.record_at(0)[0])
        following = bytes(log.record_at(len(first))[0])
        group.kill("n1")
        played = await group.play_master()
        await group.start("n2", "SLAVE", TO_N1)
        await group.until(lambda: bool(played.reports))
        await played.send(0, first)
        await group.until(lambda: played.reports[-1][1] == len(first))
        if wrong == "ahead":
            await played.send(len(first) + 8, following)
        elif wrong == "behind":
            await played.send(0, first)
        elif wrong == "damaged":
            await played.send(len(first), _flip(following))
        else:
            await played.send(len(first), first)
        await group.until(lambda: bool(played.closed_s))
        assert group.ledger("n2").log.end_position == len(first)
        assert "master at 10.0.0.1:10912: the master sends" in group.lines("n2")

    ha(scenario, roles=MASTER)


def _flip(record: bytes) -> bytes:
    """The record with one bit of its body flipped."""
    return record[:89] + bytes([record[89] ^ 1]) + record[90:]
