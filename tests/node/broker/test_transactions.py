"""Transactions on a whole broker with a fake log: half messages, their end, checks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from node.broker import transactions as transactions_module
from node.broker.internal_topics import HALF_TOPIC, OP_TOPIC, tells_by_body
from node.broker.ledger import DLedgerCode, Role, StoredInPart
from node.broker.transactions import DONE_BEFORE, OpenTransactions, _Half
from node.remoting import Command, Credentials, RemotingClient
from node.store.record import Message, decode_record, decode_records, summarize_record
from node.store.record_batch import batch_of_one

TRANSACTION_MECHANISM = (
    "Transactions: prepared/rollback never queued; END checks group, tranStateTableOffset, commitLogOffset;"
    " commit writes a copy; rollback empties body; unknown → no reply"
)


@pytest.fixture(autouse=True)
def recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions_module, "RECHECK_S", 0.005)


class Producer:
    """A producer that records the checks that it gets."""

    def __init__(self, port: int, client_id: str = "c") -> None:
        self._address = f"127.0.0.1:{port}"
        self._client_id = client_id
        self.client = RemotingClient()
        self.checks: list[Command] = []
        self.client.register(39, self._note)

    def _note(self, command: Command, connection: Any) -> None:
        self.checks.append(command)

    async def register(self) -> None:
        body = json.dumps({"clientID": self._client_id, "producerDataSet": [{"groupName": "p"}]}).encode()
        reply = await self.client.invoke(self._address, Command.request(34, {}, body), timeout_ms=5000)
        assert reply.code == 0


async def send_half(case: Any, body: bytes, extra: str = "") -> dict[str, Any]:
    """Send a half message; returns the fields of an END for it."""
    properties = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01KEY1\x02TAGS\x01a\x02{extra}"
    reply = await case.ask(310, {"b": "t", "e": 1, "f": 4, "i": properties}, body)
    assert (reply.code, reply.ext_fields["transactionId"]) == (0, "KEY1")
    return {
        "producerGroup": "p",
        "tranStateTableOffset": reply.ext_fields["queueOffset"],
        "commitLogOffset": int(reply.ext_fields["msgId"][-16:], 16),
        "msgId": "KEY1",
    }


async def messages(case: Any, topic: str = "t", queue_id: int = 1) -> list[Message]:
    reply = await case.pull(0, topic=topic, queue_id=queue_id)
    return decode_records(reply.body)


@pytest.mark.mechanism(TRANSACTION_MECHANISM)
def test_a_half_message_is_visible_only_after_its_commit(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        first, second = await send_half(case, b"yes"), await send_half(case, b"no")
        assert await messages(case) == []
        assert (await case.ask(37, {**first, "commitOrRollback": 8})).code == 0
        assert (await case.ask(37, {**second, "commitOrRollback": 12})).code == 0
        (committed,) = await messages(case)
        assert (committed.body, committed.tags, committed.sys_flag & 12) == (b"yes", "a", 8)
        assert committed.prepared_transaction_offset == first["commitLogOffset"]
        assert {"TRAN_MSG", "REAL_TOPIC"}.isdisjoint(committed.properties)
        assert (await case.table())["openTransactions"] == "0"
        assert (await case.ask(37, {**first, "commitOrRollback": 8})).code == 1
        assert len(await messages(case)) == 1

    run_case(scenario)


@pytest.mark.mechanism(TRANSACTION_MECHANISM)
@pytest.mark.parametrize(
    "wrong", [{"producerGroup": "q"}, {"tranStateTableOffset": 7}, {"commitLogOffset": 5}, {"commitLogOffset": 10**9}]
)
def test_an_end_that_does_not_match_its_half_message_is_refused(run_case: Any, wrong: dict[str, Any]) -> None:
    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x")
        assert (await case.ask(37, {**end, **wrong, "commitOrRollback": 8})).code == 1
        assert await messages(case) == []
        assert (await case.ask(37, {**end, "commitOrRollback": 8})).code == 0

    run_case(scenario)


def test_concurrent_ends_commit_a_transaction_once(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x")
        replies = await asyncio.gather(*(case.ask(37, {**end, "commitOrRollback": 8}) for _ in range(5)))
        assert sorted(reply.code for reply in replies) == [0, 1, 1, 1, 1]
        assert len(await messages(case)) == 1

    run_case(scenario)


@pytest.mark.mechanism("Check-back")
def test_a_producer_is_asked_about_an_open_transaction_until_it_ends(run_case: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            end = await send_half(case, b"orphan")
            case.clock.now_ms += 5_999
            await asyncio.sleep(0.03)
            assert producer.checks == []
            case.clock.now_ms += 1
            await helpers.until(lambda: len(producer.checks) == 1)
            question = producer.checks[0]
            assert question.ext_fields["commitLogOffset"] == str(end["commitLogOffset"])
            assert question.ext_fields["tranStateTableOffset"] == end["tranStateTableOffset"]
            assert (question.ext_fields["transactionId"], question.is_oneway) == ("KEY1", True)
            half, _ = decode_record(question.body)
            assert (half.topic, half.queue_id, half.body) == ("t", 1, b"orphan")
            case.clock.now_ms += 59_999
            await asyncio.sleep(0.03)
            assert len(producer.checks) == 1
            case.clock.now_ms += 1
            await helpers.until(lambda: len(producer.checks) == 2)
            answer = {**end, "commitOrRollback": 8, "fromTransactionCheck": "true"}
            assert (await case.ask(37, answer)).code == 0
            case.clock.now_ms += 600_000
            await asyncio.sleep(0.03)
            assert len(producer.checks) == 2
            assert [message.body for message in await messages(case)] == [b"orphan"]
        finally:
            await producer.client.close()

    run_case(scenario)


def test_a_producer_without_write_permission_gets_no_checks_and_ends_no_transaction(
    run_case: Any, helpers: Any
) -> None:
    async def scenario(case: Any) -> None:
        def signed(key: str) -> Credentials:
            return Credentials(access_key=key, secret_key=f"{key}-secret")

        producers = {key: Producer(case.broker.port, key) for key in ("stranger", "partner")}
        case.client._sign = signed("partner").sign
        try:
            for key, producer in producers.items():
                producer.client._sign = signed(key).sign
                await producer.register()
            end = {**await send_half(case, b"orphan"), "commitOrRollback": 8}
            for count in (1, 2):
                case.clock.now_ms += 60_000
                await helpers.until(lambda count=count: len(producers["partner"].checks) == count)
            assert producers["stranger"].checks == []
            case.client._sign = signed("stranger").sign
            assert (await case.ask(37, end)).code == 16
            case.client._sign = signed("partner").sign
            assert await messages(case) == [] and (await case.ask(37, end)).code == 0
            assert [message.body for message in await messages(case)] == [b"orphan"]
        finally:
            for producer in producers.values():
                await producer.client.close()

    accounts = """[
        {access_key = "partner", secret_key = "partner-secret", topics = {t = "PUB|SUB"}, default_group_perm = "SUB"},
        {access_key = "stranger", secret_key = "stranger-secret", topics = {u = "PUB"}},
    ]""".replace("\n", "")
    run_case(scenario, **{"acl.accounts": accounts})


@pytest.mark.mechanism("Check-back")
def test_an_open_transaction_is_given_up_after_the_maximum_number_of_checks(run_case: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            await send_half(case, b"orphan")
            for number in range(3):
                case.clock.now_ms += 60_000
                await helpers.until(lambda number=number: len(producer.checks) == number + 1)
            case.clock.now_ms += 60_000
            await helpers.until(lambda: not case.broker.transactions.halves)
            assert await messages(case) == []
            (given_up,) = await messages(case, "TRANS_CHECK_MAX_TIME_TOPIC", 0)
            assert given_up.body == b"orphan"
        finally:
            await producer.client.close()

    run_case(scenario, **{"transactions.max_checks": "3"})


def test_open_transactions_survive_restarts_with_and_without_the_checkpoint(
    run_case: Any, helpers: Any, tmp_path: Any
) -> None:
    ledger = helpers.FakeLedger()
    ends: list[dict[str, Any]] = []

    async def first(case: Any) -> None:
        ends.extend([await send_half(case, b"a"), await send_half(case, b"b"), await send_half(case, b"c")])
        assert (await case.ask(37, {**ends[0], "commitOrRollback": 8})).code == 0

    async def second(case: Any) -> None:
        assert (await case.table())["openTransactions"] == "2"
        assert (await case.ask(37, {**ends[0], "commitOrRollback": 8})).code == 1
        assert (await case.ask(37, {**ends[1], "commitOrRollback": 8})).code == 0

    async def third(case: Any) -> None:
        assert (await case.table())["openTransactions"] == "1"
        assert [message.body for message in await messages(case)] == [b"a", b"b"]
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            case.clock.now_ms += 600_000
            await helpers.until(lambda: len(producer.checks) == 1)
            assert decode_record(producer.checks[0].body)[0].body == b"c"
        finally:
            await producer.client.close()

    run_case(first, ledger=ledger)
    run_case(second, ledger=ledger)
    (tmp_path / "data" / "consumequeue.checkpoint").unlink()
    run_case(third, ledger=ledger)


@pytest.mark.parametrize(
    ("prepared", "body", "left"),
    [
        (0, b"1", [0, 500]), (0, b"", [0, 500]), (0, b"10", [0, 500]),
        (0, b"0", [500]), (0, b"1,0", [500]), (0, DONE_BEFORE, [500]), (500, b"1", [0]),
    ],
)  # fmt: skip
def test_an_op_message_of_apaches_broker_ends_only_the_half_message_that_it_names(
    prepared: int, body: bytes, left: list[int]
) -> None:
    """Apache's gives 0 as the half message's position in any case; ours gives 0 only for the one at 0."""
    derived = OpenTransactions(timeout_ms=6000)

    def dispatch_message(topic: str, number: int, position: int, *, prepared: int = 0, body: bytes = b"") -> None:
        batch = batch_of_one(topic=topic, queue_id=0, body=body, prepared_transaction_offset=prepared)
        summary = summarize_record(batch.record(position, number, 1))
        derived.dispatch(summary._replace(body=body) if tells_by_body(summary) else summary)

    dispatch_message(HALF_TOPIC, 0, 0)
    dispatch_message(HALF_TOPIC, 1, 500)
    dispatch_message(OP_TOPIC, 0, 1000, prepared=prepared, body=body)
    assert list(derived.halves) == left


def test_an_overlong_check_immunity_time_is_ignored(run_case: Any) -> None:
    """Python parses no number of more than 4,300 digits, and an error there would end every member's dispatch."""

    async def scenario(case: Any) -> None:
        half = await send_half(case, b"x", f"CHECK_IMMUNITY_TIME_IN_SECONDS\x01{'9' * 4301}\x02")
        assert (await case.table())["openTransactions"] == "1"
        assert [each.due_ms - each.stored_ms for each in case.broker.transactions.halves.values()] == [
            case.broker.transactions.timeout_ms
        ]
        assert (await case.ask(37, {**half, "commitOrRollback": 8})).code == 0
        assert [message.body for message in await messages(case)] == [b"x"]

    run_case(scenario)


@pytest.mark.mechanism("start/shutdownProcessorByHa")
def test_a_slave_sends_no_checks(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            end = await send_half(case, b"x")
            case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
            case.clock.now_ms += 600_000
            await asyncio.sleep(0.05)
            assert producer.checks == []
            assert (await case.ask(37, {**end, "commitOrRollback": 8})).code == 14
        finally:
            await producer.client.close()

    run_case(scenario)


def test_the_delay_of_a_transactional_message_starts_at_the_commit(run_case: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("node.broker.delay.RECHECK_S", 0.005)

    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x", "DELAY\x011\x02")
        assert (await case.ask(37, {**end, "commitOrRollback": 8})).code == 0
        assert await messages(case) == []
        case.clock.now_ms += 1000
        deadline = asyncio.get_running_loop().time() + 5
        while not (found := await messages(case)):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        assert [message.body for message in found] == [b"x"]
        assert (await case.table())["openTransactions"] == "0"

    run_case(scenario)


def test_the_number_of_open_transactions_is_bounded(run_case: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(transactions_module, "MAX_OPEN_TRANSACTIONS", 1)

    async def scenario(case: Any) -> None:
        await send_half(case, b"x")
        assert (await case.ask(310, {"b": "t", "e": 1, "f": 4, "i": "TRAN_MSG\x01true\x02"}, b"y")).code == 2

    run_case(scenario)


@pytest.mark.mechanism(
    "Pre-checks: start-accept time, msgCheck, queueId<0→random, transaction-reject flag, REGION/TRACE reply fields"
)
def test_transactions_can_be_rejected(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(310, {"b": "t", "e": 1, "i": "TRAN_MSG\x01true\x02"}, b"y")).code == 16
        reply = await case.ask(310, {"b": "t", "e": -1}, b"y")
        assert reply.code == 0 and reply.ext_fields["queueId"] in ("0", "1")
        assert (reply.ext_fields["MSG_REGION"], reply.ext_fields["TRACE_ON"]) == ("DefaultRegion", "true")

    run_case(scenario, **{"transactions.reject": "true"})


@pytest.mark.mechanism(TRANSACTION_MECHANISM)
def test_an_end_of_unknown_outcome_gets_no_reply(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x")
        asking = asyncio.ensure_future(case.ask(37, {**end, "commitOrRollback": 0}))
        assert (await case.ask(28)).code == 0  # sent later over the same connection, and answered
        assert not asking.done()
        asking.cancel()
        assert (await case.table())["openTransactions"] == "1"

    run_case(scenario)


@pytest.mark.mechanism("Check-back")
def test_a_clock_that_is_set_back_does_not_delay_checks(run_case: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            case.clock.now_ms += 86_400_000
            await send_half(case, b"from tomorrow")
            await asyncio.sleep(0.03)
            assert producer.checks == []
            case.clock.now_ms -= 86_400_000
            await helpers.until(lambda: len(producer.checks) == 1)
            case.clock.now_ms += 59_999
            await asyncio.sleep(0.03)
            assert len(producer.checks) == 1
            case.clock.now_ms -= 3_600_000
            await asyncio.sleep(0.03)
            assert len(producer.checks) == 1
            case.clock.now_ms += 60_000
            await helpers.until(lambda: len(producer.checks) == 2)
        finally:
            await producer.client.close()

    run_case(scenario)


@pytest.mark.mechanism("Check-back")
def test_a_check_without_a_producer_is_not_postponed_by_a_clock_that_was_ahead(run_case: Any, helpers: Any) -> None:
    """A producer that registers later is asked an interval after the clock is right again, not a day."""

    async def scenario(case: Any) -> None:
        await send_half(case, b"x")
        before = len(case.ledger.barriers)
        case.clock.now_ms += 86_400_000
        await helpers.until(lambda: len(case.ledger.barriers) > before)
        await asyncio.sleep(0.03)
        case.clock.now_ms -= 86_400_000
        await asyncio.sleep(0.03)
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            case.clock.now_ms += 60_000
            await helpers.until(lambda: len(producer.checks) == 1)
        finally:
            await producer.client.close()

    run_case(scenario)


@pytest.mark.mechanism("Check-back")
@pytest.mark.parametrize("was_put_off", [False, True])
def test_no_transaction_is_given_up_while_the_clock_is_briefly_ahead(
    run_case: Any, helpers: Any, was_put_off: bool
) -> None:
    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x")
        (half,) = case.broker.transactions.halves.values()
        if was_put_off:
            case.clock.now_ms += 6000
            await helpers.until(lambda: half.is_put_off)
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            case.clock.now_ms += 73 * 3_600_000
            await helpers.until(lambda: len(producer.checks) == 1)
            case.clock.now_ms -= 73 * 3_600_000
            assert (await case.ask(37, {**end, "commitOrRollback": 8})).code == 0
        finally:
            await producer.client.close()
        assert [message.body for message in await messages(case)] == [b"x"]

    run_case(scenario)


def test_a_half_message_is_too_old_only_after_it_looked_so_for_a_whole_minute() -> None:
    half, old_ms = _Half(0, 1000, 7000), 1000 + transactions_module.MAX_AGE_MS + 1
    looks = [(old_ms, 0.0), (old_ms, 59.9), (old_ms - 1, 60.0), (old_ms, 61.0), (old_ms + 1, 120.9), (old_ms, 121.0)]
    assert [half.is_too_old(*look) for look in looks] == [False, False, False, False, False, True]


def test_a_snapshot_keeps_whether_a_check_was_postponed() -> None:
    before, after = (OpenTransactions(timeout_ms=6000) for _ in range(2))
    before.halves = {144: _Half(0, 1000, 7000), 839: _Half(1, 2000, 3_602_000, 2, True)}
    after.restore(json.loads(json.dumps(before.snapshot())))
    assert after.halves == before.halves
    after.restore([[144, 0, 1000, 7000, 0], [839, 1, 2000, 3_602_000, 2]])  # of an earlier version
    assert after.halves == before.halves


@pytest.mark.mechanism("Check-back")
def test_a_half_message_stored_after_the_clock_was_ahead_is_checked_in_time(run_case: Any, helpers: Any) -> None:
    """Its store timestamp is that of the message before it, a day ahead."""

    async def scenario(case: Any) -> None:
        producer = Producer(case.broker.port)
        try:
            await producer.register()
            case.clock.now_ms += 86_400_000
            assert (await case.ask(310, {"b": "t", "e": 1}, b"from tomorrow")).code == 0
            case.clock.now_ms -= 86_400_000
            await send_half(case, b"x")
            case.clock.now_ms += 5_999
            await asyncio.sleep(0.03)
            assert producer.checks == []
            case.clock.now_ms += 1
            await helpers.until(lambda: len(producer.checks) == 1)
        finally:
            await producer.client.close()

    run_case(scenario)


@pytest.mark.mechanism("END reply: 10/11/12-type put statuses count as SUCCESS")
@pytest.mark.parametrize("status", [10, 11, 12])
@pytest.mark.parametrize("verdict", [8, 12])
def test_an_end_stored_without_timely_flush_or_replication_is_a_success(
    run_case: Any, helpers: Any, status: int, verdict: int
) -> None:
    """The disk or the slave was too slow, but the message is stored (S1: the slave is down)."""

    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x")
        ledger = case.ledger
        ledger.commit_by_hand = True
        ending = asyncio.ensure_future(case.ask(37, {**end, "commitOrRollback": verdict}))
        await helpers.until(lambda: bool(ledger._pending))
        pending, ledger._pending = ledger._pending, []
        for _, then in pending:
            then(StoredInPart(status, "not as safe as it should be"))
        assert (await ending).code == 0
        assert (await case.ask(37, {**end, "commitOrRollback": 8})).code == 1, "it is ending, though not dispatched yet"
        ledger.commit()
        assert [message.body for message in await messages(case)] == ([b"x"] if verdict == 8 else [])
        assert (await case.table())["openTransactions"] == "0"

    run_case(scenario)


def test_an_end_whose_append_timed_out_is_not_stored_twice(run_case: Any, helpers: Any) -> None:
    """While this node leads, what it appended is in its log and may still be committed."""

    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x")
        ledger = case.ledger
        ledger.commit_by_hand = True
        ending = asyncio.ensure_future(case.ask(37, {**end, "commitOrRollback": 8}))
        await helpers.until(lambda: bool(ledger._pending))
        ledger.fail_pending(DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT)
        assert (await ending).code == 1
        assert (await case.ask(37, {**end, "commitOrRollback": 8})).code == 1
        ledger.commit()
        assert [message.body for message in await messages(case)] == [b"x"]

    run_case(scenario)


@pytest.mark.parametrize("is_ended_first", [True, False])
def test_a_transaction_is_either_ended_or_given_up_never_both(
    run_case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, is_ended_first: bool
) -> None:
    """The producer ends it about when it becomes too old, while the log is slow."""
    monkeypatch.setattr(transactions_module, "OLD_FOR_S", 0)

    async def scenario(case: Any) -> None:
        end = await send_half(case, b"x")
        ledger = case.ledger
        ledger.commit_by_hand = True
        if is_ended_first:
            ending = asyncio.ensure_future(case.ask(37, {**end, "commitOrRollback": 12}))
            await helpers.until(lambda: bool(ledger._pending))
        put = len(ledger._pending)
        before = len(ledger.barriers)
        case.clock.now_ms += transactions_module.MAX_AGE_MS + 1
        if is_ended_first:
            await helpers.until(lambda: len(ledger.barriers) > before)
            await asyncio.sleep(0.03)
            assert len(ledger._pending) == put, "given up"
            ledger.commit()
            assert (await ending).code == 0
        else:
            await helpers.until(lambda: bool(ledger._pending))
            assert (await case.ask(37, {**end, "commitOrRollback": 8})).code == 1
            ledger.commit()
            await helpers.until(lambda: not case.broker.transactions.halves)
        assert await messages(case) == []
        given_up = await messages(case, "TRANS_CHECK_MAX_TIME_TOPIC", 0)
        assert [message.body for message in given_up] == ([] if is_ended_first else [b"x"])

    run_case(scenario)


def test_giving_up_a_transaction_is_retried_if_the_log_refuses_it(
    run_case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions_module, "OLD_FOR_S", 0)

    async def scenario(case: Any) -> None:
        await send_half(case, b"x")
        before = len(case.ledger.barriers)
        case.ledger.refuse_with = DLedgerCode.DISK_FULL
        case.clock.now_ms += transactions_module.MAX_AGE_MS + 1
        await helpers.until(lambda: len(case.ledger.barriers) > before)
        await asyncio.sleep(0.03)
        case.ledger.refuse_with = None
        case.clock.now_ms += transactions_module.RETRY_MS
        await helpers.until(lambda: not case.broker.transactions.halves)
        (given_up,) = await messages(case, "TRANS_CHECK_MAX_TIME_TOPIC", 0)
        assert given_up.body == b"x"

    run_case(scenario)
