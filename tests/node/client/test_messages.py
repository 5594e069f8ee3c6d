"""Messages, batches, compression, the allocation of queues: each checked against an independent computation."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.broker.send_request import split_batches
from node.client.allocation import allocate_averagely, allocate_in_circle
from node.client.messages import (
    MAX_INFLATED_BYTES,
    BodyError,
    MessageQueue,
    NewMessage,
    ReceivedMessage,
    UniqueKeys,
    deflate,
    encode_batch,
    inflate,
)
from node.client.reader import OffsetTracker
from node.client.subscriptions import Subscription
from node.runtime import Runtime
from node.store.properties import PropertyError, decode_properties
from node.store.record import Message

QUEUE = MessageQueue("t", "b", 0)


def received(body: bytes, sys_flag: int, **properties: str) -> ReceivedMessage:
    stored = Message(topic="t", queue_id=0, body=body, properties=properties, sys_flag=sys_flag, queue_offset=5)
    return ReceivedMessage(stored, QUEUE)


def test_tags_keys_and_delay_level_become_stored_properties() -> None:
    message = NewMessage("t", b"", tags="a", keys=("k1", "k2"), properties={"colour": "red"}, delay_level=3)
    assert message.stored_properties("U") == {
        "colour": "red", "KEYS": "k1 k2", "TAGS": "a", "DELAY": "3", "UNIQ_KEY": "U", "WAIT": "true",
    }  # fmt: skip
    assert NewMessage("t", b"").stored_properties("U") == {"UNIQ_KEY": "U", "WAIT": "true"}


@pytest.mark.parametrize(
    "message",
    [
        NewMessage("t", b"", keys=("a b",)),
        NewMessage("t", b"", keys=("",)),
        NewMessage("t", b"", keys="abc"),
        NewMessage("t", b"", properties={"TAGS": "x"}),
        NewMessage("t", b"", properties={"UNIQ_KEY": "x"}),
        NewMessage("t", b"", properties={"TRAN_MSG": "true"}),
    ],
)
def test_properties_that_could_not_be_read_back_are_refused(message: NewMessage) -> None:
    with pytest.raises(PropertyError):
        message.stored_properties("U")


def test_a_received_message_has_its_original_topic_and_id() -> None:
    message = received(b"x", 0, RETRY_TOPIC="orders", KEYS="a  b", TAGS="t1", UNIQ_KEY="U")
    assert (message.topic, message.keys, message.tags, message.message_id) == ("orders", ("a", "b"), "t1", "U")
    plain = received(b"x", 0)
    assert (plain.topic, plain.message_id, plain.queue_offset) == ("t", plain.stored.message_id, 5)


@given(st.binary(max_size=5000), st.integers(0, 6000))
def test_a_compressed_body_is_received_unchanged(body: bytes, over_bytes: int) -> None:
    travelling, sys_flag = deflate(body, over_bytes)
    assert len(travelling) <= len(body)
    assert (sys_flag == 0) == (travelling == body)
    assert received(travelling, sys_flag).body == body


def test_bodies_of_every_zlib_level_are_inflated() -> None:
    for level in range(10):
        assert inflate(zlib.compress(b"abc" * 1000, level)) == b"abc" * 1000


def test_zip_bombs_and_damaged_bodies_are_refused() -> None:
    whole = zlib.compress(bytes(1000))
    for damaged in (b"", b"plain", whole[:-1], whole[:5], b"x" + whole):
        with pytest.raises(BodyError):
            inflate(damaged)
    with pytest.raises(BodyError, match="more than"):
        inflate(zlib.compress(bytes(MAX_INFLATED_BYTES + 1)))
    assert len(inflate(zlib.compress(bytes(MAX_INFLATED_BYTES)))) == MAX_INFLATED_BYTES


@given(st.lists(st.tuples(st.binary(max_size=50), st.dictionaries(st.sampled_from("abc"), st.just("v"))), min_size=1))
def test_the_broker_splits_a_batch_into_its_messages(messages: list[tuple[bytes, dict[str, str]]]) -> None:
    _, bodies, texts, _, counts = split_batches((encode_batch(messages),))
    assert list(counts) == [len(messages)]
    split = zip(bodies, [decode_properties(text.decode()) for text in texts], strict=True)
    assert list(split) == messages


def test_unique_keys_differ_between_clients_and_messages() -> None:
    def keys(seed: int) -> UniqueKeys:
        return UniqueKeys(Runtime(clock=None, disk=None, random=random.Random(seed)))  # type: ignore[arg-type]

    one, other = keys(1), keys(2)
    names = [one.next() for _ in range(1000)] + [other.next() for _ in range(1000)]
    assert len(set(names)) == 2000 and {len(name) for name in names} == {32}
    assert keys(1).next() == names[0]


QUEUES = st.integers(0, 40).map(lambda count: [MessageQueue("t", "b", number) for number in range(count)])
MEMBERS = st.integers(1, 12).map(lambda count: [f"c{number:02}" for number in range(count)])


@given(QUEUES, MEMBERS, st.sampled_from([allocate_averagely, allocate_in_circle]))
def test_every_queue_has_one_consumer_and_shares_differ_by_at_most_one(
    queues: list[MessageQueue], members: list[str], allocate: object
) -> None:
    assert callable(allocate)
    shares: list[Sequence[MessageQueue]] = [allocate(member, queues, members) for member in members]
    assert sorted(queue for share in shares for queue in share) == queues
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert allocate("stranger", queues, members) == []


def test_queues_are_allocated_in_blocks_or_in_turn() -> None:
    queues = [MessageQueue("t", "b", number) for number in range(5)]
    assert [[q.queue_id for q in allocate_averagely(m, queues, ["a", "b"])] for m in "ab"] == [[0, 1, 2], [3, 4]]
    assert [[q.queue_id for q in allocate_in_circle(m, queues, ["a", "b"])] for m in "ab"] == [[0, 2, 4], [1, 3]]


@given(st.lists(st.integers(0, 19)))
def test_the_committed_offset_never_passes_an_open_message(order: list[int]) -> None:
    tracker = OffsetTracker(0)
    for offset in range(20):
        tracker.opened(offset, 10)
    tracker.next_offset = 20
    still_open = set(range(20))
    for offset in order:
        tracker.done(offset)
        still_open.discard(offset)
        assert tracker.committed_offset == min(still_open, default=20)
        assert (tracker.open_count, tracker.open_bytes) == (len(still_open), 10 * len(still_open))


@pytest.mark.parametrize(
    ("expression", "tags", "passing"),
    [
        ("*", (), ["a", "b", None]),
        ("", (), ["a", "b", None]),
        ("a", ("a",), ["a"]),
        ("a || b|| ", ("a", "b"), ["a", "b"]),
    ],
)
def test_a_tag_expression_passes_only_its_tags(
    expression: str, tags: tuple[str, ...], passing: list[str | None]
) -> None:
    subscription = Subscription(topic="t", expression=expression)
    assert subscription.tags == tags
    for tag in ("a", "b", "c", None):
        message = Message(topic="t", queue_id=0, body=b"", properties={"TAGS": tag} if tag else {})
        assert subscription.passes(message) is (tag in passing or not tags)


def test_tags_with_the_same_hash_are_told_apart() -> None:
    """The tags "Aa" and "BB" have the same Java hash: a broker that filters by it lets both through."""
    subscription = Subscription(topic="t", expression="Aa")
    assert not subscription.passes(Message(topic="t", queue_id=0, body=b"", properties={"TAGS": "BB"}))
    assert subscription.data()["codeSet"] == [2112]
