"""A slave's log becomes, and stays, a byte-for-byte copy of the master's, through restarts and cuts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

READS = "slave_read_enable=true"
LAST_FILE = (
    "Write: 12 B header (offset8,size4)+body ≤32 KB; request 0 → start of master's last file;"
    " heartbeat size 0 every 5 s"
)


@pytest.mark.mechanism("Only commitlog copied")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_slave_copies_the_log_and_builds_its_queues_and_index_from_it(ha: Any, mode: str) -> None:
    async def scenario(group: Any) -> None:
        bodies = await group.fill(200)
        await group.send(b"found", i="KEYS\x01k\x02")
        bodies.append(b"found")
        await group.following("n2")
        assert group.content("n1") == group.content("n2") and len(group.content("n1")) > 1
        assert await group.bodies("n2") == bodies
        assert b"found" in (await group.ask("n2", 12, {"topic": "t", "key": "k", "maxNum": 3})).body
        await group.stop("n2")
        await group.remove_files("n2", "/consumequeue", "/index")
        await group.start("n2", "SLAVE")
        await group.following("n2")
        assert await group.bodies("n2") == bodies
        assert b"found" in (await group.ask("n2", 12, {"topic": "t", "key": "k", "maxNum": 3})).body

    ha(scenario, READS, f"flush_mode={mode}")


@pytest.mark.parametrize("end", ["stop", "kill", "power_fail", "cut"])
def test_a_slave_that_was_away_catches_up(ha: Any, end: str) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(30)
        await group.following("n2")
        if end == "stop":
            await group.stop("n2")
        elif end == "cut":
            await group.cut("n2")
        else:
            getattr(group, end)("n2")
        await group.fill(120, mark=b"while away ")
        if end == "cut":
            await group.heal()
        else:
            await group.start("n2", "SLAVE")
        await group.following("n2")
        assert group.content("n1") == group.content("n2")
        assert (await group.table("n2"))["haTrouble"] == ""

    ha(scenario)


@pytest.mark.parametrize("end", ["stop", "kill", "power_fail"])
def test_slaves_follow_a_master_again_after_its_restart(ha: Any, end: str) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(40)
        if end == "stop":
            await group.stop("n1")
        else:
            getattr(group, end)("n1")
        await group.start("n1", "SYNC_MASTER")
        await group.fill(40, mark=b"again ")
        await group.following("n2", "n3")
        assert group.content("n1") == group.content("n2") == group.content("n3")

    ha(scenario, roles=("SYNC_MASTER", "SLAVE", "SLAVE"))


@pytest.mark.mechanism(LAST_FILE)
def test_an_empty_slave_begins_with_the_masters_last_file(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        bodies = await group.fill(400)
        await group.start("n2", "SLAVE")
        await group.following("n2")
        master, slave = group.content("n1"), group.content("n2")
        assert len(master) > 2 and slave == dict([max(master.items())]), "older files are not copied, by design"
        low = int((await group.ask("n2", 31, {"topic": "t", "queueId": 0})).ext_fields["offset"])
        assert 0 < low < len(bodies)
        reply = await group.ask("n2", 11, {"topic": "t", "queueId": 0, "queueOffset": 0})
        assert (reply.code, reply.ext_fields["nextBeginOffset"]) == (20, "0"), "ask the master"
        more = await group.fill(100, mark=b"more ")
        await group.stop("n2")
        await group.start("n2", "SLAVE")
        await group.following("n2")
        reply = await group.ask("n2", 11, {"topic": "t", "queueId": 0, "queueOffset": len(bodies)})
        assert more[0] in reply.body

    ha(scenario, READS, roles=("ASYNC_MASTER",))


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_promoted_slave_continues_the_offsets_of_queues_whose_messages_it_lacks(ha: Any, end: str) -> None:
    """Delayed messages too: one with the offset of a delivered message would never be delivered."""

    async def scenario(group: Any) -> None:
        for number in range(3):
            assert (await group.send(b"plain %d" % number, queue_id=1)).code == 0
            assert (await group.send(b"delayed %d" % number, i="DELAY\x011\x02")).code == 0
        await group.fill(180)
        await group.until(lambda: group["n1"].delays.delivered_total == 3)
        await group.start("n2", "SLAVE")
        await group.following("n2")
        assert group.ledger("n2").log.begin_position > 0
        assert group["n2"].delay_progress.delivered[1] == 3 and not group["n2"].queues.find("t", 1)
        await group.until(lambda: group["n2"].slave.synchronize.rounds_total == 1)
        await group.stop("n1")
        if end == "stop":
            await group.stop("n2")
        else:
            group.kill("n2")
        await group.start("n2", "ASYNC_MASTER")
        assert (await group.send(at="n2", queue_id=1)).ext_fields["queueOffset"] == "3"
        before = int((await group.ask("n2", 30, {"topic": "t", "queueId": 0})).ext_fields["offset"])
        assert (await group.send(b"later", at="n2", i="DELAY\x011\x02")).code == 0
        await group.until(lambda: group["n2"].delays.delivered_total == 1)
        reply = await group.ask("n2", 11, {"topic": "t", "queueId": 0, "queueOffset": before})
        assert b"later" in reply.body

    ha(scenario, roles=("ASYNC_MASTER",))


POP = {
    "consumerGroup": "g", "topic": "t", "queueId": 1, "maxMsgNums": 9, "invisibleTime": 60_000, "pollTime": 0,
    "bornTime": 0, "initMode": 0, "expType": "TAG", "exp": "*",
}  # fmt: skip


async def _promote_and_check_offsets(group: Any) -> None:
    """Promote the slave: its offsets continue after three popped and three delayed messages."""
    await group.stop("n1")
    await group.stop("n2")
    await group.start("n2", "ASYNC_MASTER")
    assert (await group.send(b"popped", at="n2", queue_id=1)).ext_fields["queueOffset"] == "3"
    assert b"popped" in (await group.ask("n2", 200050, POP)).body
    assert (await group.send(b"later", at="n2", i="DELAY\x011\x02")).code == 0
    await group.until(lambda: group["n2"].delays.delivered_total == 1)


def test_offsets_continue_from_the_log_if_the_slave_never_copied_the_tables(ha: Any) -> None:
    """Without a name server it does not know which broker to copy them from, and logs that."""

    async def scenario(group: Any) -> None:
        for number in range(3):
            assert (await group.send(b"plain %d" % number, queue_id=1)).code == 0
            assert (await group.send(b"delayed %d" % number, i="DELAY\x011\x02")).code == 0
        await group.fill(150)
        assert (await group.ask("n1", 200050, POP)).ext_fields["msgOffsetInfo"] == "0 1 0,1,2"
        await group.fill(30)
        await group.until(lambda: group["n1"].delays.delivered_total == 3)
        master = f'classic.ha_master_address="{group.hosts["n1"].address}:10912"'
        await group.start("n2", "SLAVE", "name_servers=[]", master)
        await group.following("n2")
        assert "none of its topics, consumer offsets and subscription groups" in group.lines("n2")
        assert group.ledger("n2").log.begin_position > 0 and not group["n2"].queues.find("t", 1)
        await _promote_and_check_offsets(group)

    ha(scenario, roles=("ASYNC_MASTER",))


def test_offsets_from_the_log_take_precedence_over_a_table_of_the_former_log(ha: Any) -> None:
    """A slave that starts over has a table of the queue ends that it knew before; the queues have grown since."""

    async def scenario(group: Any) -> None:
        for numbers in ((0,), (1, 2)):
            for number in numbers:
                assert (await group.send(b"plain %d" % number, queue_id=1)).code == 0
                assert (await group.send(b"delayed %d" % number, i="DELAY\x011\x02")).code == 0
            await group.fill(150)
            given = ",".join(map(str, numbers))
            assert (await group.ask("n1", 200050, POP)).ext_fields["msgOffsetInfo"] == f"0 1 {given}"
            await group.fill(30)
            await group.until(lambda last=numbers[-1]: group["n1"].delays.delivered_total == last + 1)
            if numbers == (0,):
                await group.start("n2", "SLAVE")
                await group.until(lambda: group["n2"].slave.synchronize.rounds_total == 1)
                await group.stop("n2")
                await group.remove_files("n2", "/data/commitlog", "/data/checkpoint", "/data/consumequeue")
        master = f'classic.ha_master_address="{group.hosts["n1"].address}:10912"'
        await group.start("n2", "SLAVE", "name_servers=[]", master)
        await group.following("n2")
        assert group.ledger("n2").log.begin_position > 0
        await _promote_and_check_offsets(group)

    ha(scenario, roles=("ASYNC_MASTER",))


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("has_former", [False, True])
def test_queue_ends_from_the_master_take_precedence_over_the_slaves_checkpoint(
    ha: Any, end: str, has_former: bool
) -> None:
    """Killed before its next checkpoint, it has them in the copied table only."""

    async def scenario(group: Any) -> None:
        await group.send(b"plain 0", queue_id=1)
        await group.fill(180)
        master = f'classic.ha_master_address="{group.hosts["n1"].address}:10912"'
        if has_former:
            await group.start("n2", "SLAVE")
            await group.until(lambda: group["n2"].slave.synchronize.rounds_total == 1)
            await group.stop("n2")
            await group.remove_files("n2", "/data/commitlog", "/data/checkpoint", "/data/consumequeue")
        await group.send(b"plain 1", queue_id=1)
        await group.fill(180)
        await group.start("n2", "SLAVE", "name_servers=[]", master)
        await group.following("n2")
        await group.stop("n2")
        assert not group.lines("n2").count("consume queues do not fit")
        await group.start("n2", "SLAVE")
        await group.until(lambda: group["n2"].slave.synchronize.rounds_total == 1)
        await group.stop("n1")
        if end == "stop":
            await group.stop("n2")
        else:
            group.kill("n2")
        await group.start("n2", "ASYNC_MASTER")
        assert (await group.send(at="n2", queue_id=1)).ext_fields["queueOffset"] == "2"

    ha(scenario, roles=("ASYNC_MASTER",))


def test_a_slave_refuses_sends_pulls_and_locks_and_names_the_master(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        for code, fields in ((310, {"b": "t", "e": 0}), (11, {"topic": "t", "queueId": 0, "queueOffset": 0})):
            reply = await group.ask("n2", code, fields, b"x" if code == 310 else b"")
            assert reply.code == 14
            assert reply.remark == f"NOT_LEADER leader=- addr={group.hosts['n1'].address}:10911"
        assert (await group.ask("n2", 41, {}, b'{"consumerGroup":"g","clientId":"c","mqSet":[]}')).code == 14

    ha(scenario)


def test_a_slave_with_reads_enabled_grants_no_queue_locks(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        body = b'{"consumerGroup":"g","clientId":"c","mqSet":[]}'
        assert (await group.ask("n2", 41, {}, body)).code == (await group.ask("n2", 42, {}, body)).code == 14
        assert (await group.ask("n1", 41, {}, body)).code == 0

    ha(scenario, READS)


def test_name_servers_list_master_and_slaves_by_broker_id(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        addresses = {name: f"{group.hosts[name].address}:10911" for name in group.names}
        assert await group.route() == {"0": addresses["n1"], "1": addresses["n2"], "2": addresses["n3"]}
        table = await group.table("n2")
        assert (table["brokerRole"], table["brokerId"], table["role"]) == ("SLAVE", "1", "FOLLOWER")
        assert table["haMasterAddress"] == f"{group.hosts['n1'].address}:10912"
        assert (await group.table("n1"))["brokerRole"] == "ASYNC_MASTER"

    ha(scenario, roles=("ASYNC_MASTER", "SLAVE", "SLAVE"))


@pytest.mark.parametrize("end", ["stop", "kill", "power_fail"])
def test_a_restarted_master_is_listed_with_its_new_settings(ha: Any, end: str) -> None:
    """Its topics have the same version as before, and a slave has kept its name listed; after a power cut its own
    entry is still listed too."""

    async def scenario(group: Any) -> None:
        assert (await group.whole_route())["queueDatas"][0]["perm"] == 6
        ended = getattr(group, end)("n1")
        if end == "stop":
            await ended
        await group.start("n1", "ASYNC_MASTER", "broker_permission=4")
        await asyncio.sleep(1)
        assert (await group.whole_route())["queueDatas"][0]["perm"] == 4

    ha(scenario, roles=("ASYNC_MASTER", "SLAVE"))


@pytest.mark.parametrize("before", [10, 300])
def test_a_slave_with_another_segment_size_refuses_the_masters_log(ha: Any, before: int) -> None:
    """The slave detects it at the begin of the master's newest file, or at the end of a file."""

    async def scenario(group: Any) -> None:
        await group.fill(before)
        await group.start("n2", "SLAVE", "limits.segment_size_bytes=81920")
        await group.fill(300 - before)
        await group.until(lambda: "both need the same" in group.lines("n2"))
        master = b"".join(content for _, content in sorted(group.content("n1").items()))
        assert (
            b"".join(group.content("n2").values())
            == (master[:65536] if before == 10 else b"")[: group.ledger("n2").log.end_position]
        )

    ha(scenario, roles=("ASYNC_MASTER",))


def test_a_slave_keeps_its_master_if_a_name_server_knows_none(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(5)
        group.hosts["ns1"].kill()
        await group.start_name_server()
        slave = group["n2"]
        group.on("n2", lambda: slave.slave.registered({"haServerAddr": "", "masterAddr": ""}))
        assert group.ledger("n2").client.state == "FOLLOWING"
        assert slave.slave.master_address.startswith(group.hosts["n1"].address)
        await group.fill(5, mark=b"more ")
        await group.following("n2")
        assert group.ledger("n1").service.accepted_total == 1

    ha(scenario)


def test_a_slave_restarted_as_master_takes_over(ha: Any) -> None:
    """There is no election: an operator promotes a slave by starting it as master."""

    async def scenario(group: Any) -> None:
        bodies = await group.fill(50)
        group.kill("n1")
        await group.stop("n2")
        await group.start("n2", "SYNC_MASTER")
        await group.until(lambda: group.ledger("n3").client.master_address.startswith(group.hosts["n2"].address))
        await group.following("n3")
        more = await group.fill(50, at="n2", mark=b"new master ")
        assert await group.bodies("n2") == bodies + more
        await group.start("n1", "SLAVE")
        await group.following("n1", "n3")
        assert group.content("n1") == group.content("n2") == group.content("n3")

    ha(scenario, roles=("SYNC_MASTER", "SLAVE", "SLAVE"))


@pytest.mark.parametrize("role", ["ASYNC_MASTER", "SYNC_MASTER"])
def test_messages_from_the_transient_buffer_are_sent_to_slaves_once_written(ha: Any, role: str) -> None:
    """Not with the next message: the last one, and its sender, would wait for that."""

    async def scenario(group: Any) -> None:
        master = group.ledger("n1").log
        for body in (b"first", b"last"):
            began_s = group.loop.time()
            assert (await group.send(body)).code == 0
            await group.until(lambda: group.ledger("n2").log.end_position == master.end_position)
            assert group.loop.time() - began_s < 0.5

    ha(scenario, "flush_mode=async", "classic.transient_pool=true", roles=(role, "SLAVE"))


def test_a_master_accepts_a_slave_that_reports_less_than_it_requested(ha: Any) -> None:
    """With its disk stalled, a slave requests a position that it has in memory, and reports only what is durable."""

    async def scenario(group: Any) -> None:
        await group.fill(3)
        await group.following("n2")
        disk = group.hosts["n2"].disk
        disk.stall(("sync",))
        await group.fill(60, size=6000)
        await group.cut("n2")
        await asyncio.sleep(30)
        await group.heal()
        await asyncio.sleep(60)
        client = group.ledger("n2").client
        assert client._link._replica.request_position > group.ledger("n2").log.committed_position
        lines = group.lines("n1")
        assert "is gone" not in lines.split("asked for")[-1] and "closing" not in lines.split("asked for")[-1]
        disk.unstall(("sync",))
        await group.following("n2")

    ha(scenario)
