"""A slave's log becomes, and stays, the master's: byte for byte, through restarts, cuts and a slave that was away."""

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
def test_a_slave_has_the_same_log_and_makes_queues_and_index_of_it(ha: Any, mode: str) -> None:
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
def test_the_master_comes_back_and_its_slaves_with_it(ha: Any, end: str) -> None:
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
def test_an_empty_slave_begins_with_the_master_s_last_file(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        bodies = await group.fill(400)
        await group.start("n2", "SLAVE")
        await group.following("n2")
        master, slave = group.content("n1"), group.content("n2")
        assert len(master) > 2 and slave == dict([max(master.items())]), "older files stay away, by design"
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
def test_an_empty_slave_that_is_promoted_numbers_queues_on_that_it_has_no_message_of(ha: Any, end: str) -> None:
    """Delayed messages too: those that get numbers which the log says were delivered would never be."""

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


async def _promoted_goes_on(group: Any) -> None:
    """The slave, made the master, numbers on behind three messages that were popped and three that were delayed."""
    await group.stop("n1")
    await group.stop("n2")
    await group.start("n2", "ASYNC_MASTER")
    assert (await group.send(b"popped", at="n2", queue_id=1)).ext_fields["queueOffset"] == "3"
    assert b"popped" in (await group.ask("n2", 200050, POP)).body
    assert (await group.send(b"later", at="n2", i="DELAY\x011\x02")).code == 0
    await group.until(lambda: group["n2"].delays.delivered_total == 1)


def test_what_the_log_says_was_delivered_or_given_out_is_numbered_on_where_nobody_told_the_slave(ha: Any) -> None:
    """Without a name server it does not know whom to ask, and says so."""

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
        await _promoted_goes_on(group)

    ha(scenario, roles=("ASYNC_MASTER",))


def test_what_the_log_says_was_delivered_or_given_out_counts_before_a_table_of_the_former_log(ha: Any) -> None:
    """A slave that begins anew has the ends of queues that it knew before; meanwhile they went on."""

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
        await _promoted_goes_on(group)

    ha(scenario, roles=("ASYNC_MASTER",))


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("has_former", [False, True])
def test_what_the_master_told_counts_before_the_checkpoint_of_a_slave_that_began_anew(
    ha: Any, end: str, has_former: bool
) -> None:
    """Killed before the next checkpoint it has that of the table alone."""

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


def test_a_slave_takes_no_messages_and_says_where_the_master_is(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        for code, fields in ((310, {"b": "t", "e": 0}), (11, {"topic": "t", "queueId": 0, "queueOffset": 0})):
            reply = await group.ask("n2", code, fields, b"x" if code == 310 else b"")
            assert reply.code == 14
            assert reply.remark == f"NOT_LEADER leader=- addr={group.hosts['n1'].address}:10911"
        assert (await group.ask("n2", 41, {}, b'{"consumerGroup":"g","clientId":"c","mqSet":[]}')).code == 14

    ha(scenario)


def test_a_slave_that_answers_reads_hands_out_no_locks(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        body = b'{"consumerGroup":"g","clientId":"c","mqSet":[]}'
        assert (await group.ask("n2", 41, {}, body)).code == (await group.ask("n2", 42, {}, body)).code == 14
        assert (await group.ask("n1", 41, {}, body)).code == 0

    ha(scenario, READS)


def test_name_servers_list_master_and_slaves_by_their_numbers(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        addresses = {name: f"{group.hosts[name].address}:10911" for name in group.names}
        assert await group.route() == {"0": addresses["n1"], "1": addresses["n2"], "2": addresses["n3"]}
        table = await group.table("n2")
        assert (table["brokerRole"], table["brokerId"], table["role"]) == ("SLAVE", "1", "FOLLOWER")
        assert table["haMasterAddress"] == f"{group.hosts['n1'].address}:10912"
        assert (await group.table("n1"))["brokerRole"] == "ASYNC_MASTER"

    ha(scenario, roles=("ASYNC_MASTER", "SLAVE", "SLAVE"))


@pytest.mark.parametrize("end", ["stop", "kill", "power_fail"])
def test_a_master_that_comes_back_with_other_settings_is_listed_with_them(ha: Any, end: str) -> None:
    """Its topics are of the same version as before, and a slave has kept its name listed; after a power cut its own
    entry is there as well."""

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
def test_files_of_another_size_are_refused(ha: Any, before: int) -> None:
    """Whether the slave sees it by where the master's newest file begins, or by where one ends."""

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


def test_a_name_server_that_knows_no_master_makes_nobody_leave_his(ha: Any) -> None:
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


def test_an_operator_promotes_a_slave(ha: Any) -> None:
    """There is no election: starting a slave as master is how it becomes one."""

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
def test_what_a_transient_buffer_held_goes_to_slaves_when_it_is_written(ha: Any, role: str) -> None:
    """Not when the next message comes: the last one would wait for that, and its sender with it."""

    async def scenario(group: Any) -> None:
        master = group.ledger("n1").log
        for body in (b"first", b"last"):
            began_s = group.loop.time()
            assert (await group.send(body)).code == 0
            await group.until(lambda: group.ledger("n2").log.end_position == master.end_position)
            assert group.loop.time() - began_s < 0.5

    ha(scenario, "flush_mode=async", "classic.transient_pool=true", roles=(role, "SLAVE"))


def test_a_slave_whose_disk_stands_still_is_not_taken_for_a_liar(ha: Any) -> None:
    """It compares what it has in memory too, and what it says to have is less than what it asked for."""

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
