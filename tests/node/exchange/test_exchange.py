"""import-store and export-store: what is preserved, what is refused, and what an interrupted command leaves."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.broker.controller import BrokerController
from node.command_line import main
from node.config import parse_broker_config
from node.exchange import staging
from node.exchange.exporting import export_store
from node.exchange.importing import import_store
from node.exchange.recognition import mark_of_apache
from node.exchange.staging import ExchangeError
from node.exchange.tables import decode_apache_table, encode_apache_table
from node.real_runtime import real_runtime
from node.store.table_file import encode_table

from .apache_store import CONFIG, HALF, OP, SCHEDULE, SEGMENT_BYTES, ApacheStore, topic_json, tree


def configured(data_dir: Path) -> Any:
    return parse_broker_config(CONFIG.format(data_dir=data_dir))


async def opened(data_dir: Path) -> dict[str, Any]:
    """What our broker reads from a store: messages by queue, open transactions, delivered delays, offsets, topics."""
    runtime = real_runtime(1)
    broker = BrokerController(configured(data_dir), runtime)
    await broker.start()
    try:
        for _ in range(2000):
            if broker.store.is_master:
                break
            await asyncio.sleep(0.005)
        assert broker.store.is_master and broker.dispatcher.failure is None
        # Read within one turn of the loop: messages with a short delay are due at once, as the store's times are past.
        log = broker.ledger.store
        return {
            "queues": {
                (topic, queue_id): (queue.min_offset, queue.max_offset, [
                    log.read_bytes(unit.physical_offset, unit.size_bytes)
                    for unit in queue.read(queue.min_offset, queue.max_offset - queue.min_offset)
                ])
                for (topic, queue_id), queue in broker.queues.items()
            },
            "open": sorted(broker.transactions.halves),
            "delivered": broker.delay_progress.delivered[1:],
            "offsets": broker.offsets.document()["offsetTable"],
            "topics": {topic.name for topic in broker.topics},
            "groups": set(broker.groups.document()["subscriptionGroupTable"]),
        }  # fmt: skip
    finally:
        await broker.stop()
        runtime.disk.close()  # type: ignore[attr-defined]


SIZES = st.integers(0, 9000)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["t", "%RETRY%g", "%DLQ%g"]), st.integers(0, 3), SIZES),
        st.tuples(st.just("delay"), st.integers(1, 18)),
        st.tuples(st.just("deliver"), st.integers(1, 18)),
        st.tuples(st.just("half"), st.sampled_from(["t", "u"])),
        st.tuples(st.sampled_from(["commit", "roll back"]), st.integers(0, 5)),
        st.tuples(st.just("ask")),
        st.tuples(st.just("offset"), st.integers(0, 3), st.integers(0, 50)),
    ),
    max_size=60,
)  # fmt: skip


def perform(store: ApacheStore, actions: list[Any]) -> None:
    for at, (name, *arguments) in enumerate(actions):
        if name == "put":
            topic, queue_id, size = arguments
            store.put(topic, queue_id, bytes(size), f"TAGS\x01tag\x02KEYS\x01k{at}\x02UNIQ_KEY\x01u{at}\x02")
        elif name in ("commit", "roll back"):
            if store.open:
                position = sorted(store.open)[arguments[0] % len(store.open)]
                store.end(position, commit=name == "commit")
        elif name == "offset":
            store.offsets.setdefault("t@g", {})[arguments[0]] = arguments[1]
        elif name == "delay":
            store.delay(arguments[0], b"later")
        elif name == "half":
            store.half(arguments[0], b"half")
        else:
            getattr(store, name)(*arguments)


def open_for_apache(root: Path, halves: dict[int, int]) -> list[int]:
    """Half messages that Apache's broker would check: those from its offset on that no op message names."""
    table = decode_apache_table((root / "config" / "consumerOffset.json").read_text())["offsetTable"]
    at_half = int(table.get(f"{HALF}@CID_RMQ_SYS_TRANS", {}).get("0", 0))
    at_op = int(table.get(f"{OP}@CID_RMQ_SYS_TRANS", {}).get("0", 0))
    ended = {int(body) for number, body in ops_of(root) if number >= at_op}
    return [position for position, number in halves.items() if number >= at_half and number not in ended]


def ops_of(root: Path) -> list[tuple[int, bytes]]:
    """Numbers and bodies of the op messages in a log."""
    found, log = [], b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))
    for match in re.finditer(re.escape(bytes((len(OP),)) + OP.encode()), log):
        body_at = log.rindex(bytes.fromhex("daa320a7"), 0, match.start()) + 84
        start = body_at - 88
        found.append((int.from_bytes(log[start + 20 : start + 28], "big"), log[body_at : match.start()]))
    return found


FIRST_OF_ALL = [("half", "t"), ("half", "t"), ("commit", 1)]
"""Apache's op messages give 0 for the half message's position, which is also that of the log's first message."""


@settings(max_examples=15)
@example(FIRST_OF_ALL, False, 0)
@example([("half", "t"), ("half", "t"), ("roll back", 0)], False, 0)
@given(ACTIONS, st.booleans(), st.sampled_from([0, 5 * SEGMENT_BYTES]))
def test_import_and_export_preserve_messages_transactions_delays_and_offsets(
    actions: list[Any], ahead: bool, begin: int
) -> None:
    store = ApacheStore(begin=begin, clock_ms=int(time.time() * 1000))
    perform(store, actions)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        store.write(root / "apache", ahead=ahead)
        untouched = tree(root / "apache")
        import_store(configured(root / "ours"), root / "apache")
        assert tree(root / "apache") == untouched
        marks = len(ops_of(root / "ours")) - store.numbers.get((OP, 0), 0)
        log = b"".join(content for path, content in tree(root / "ours").items() if path.startswith("commitlog"))
        assert log.startswith(store.log) and (marks or len(log) == len(store.log))

        untouched = tree(root / "ours")
        export_store(configured(root / "ours"), root / "back")
        assert tree(root / "ours") == untouched
        exported = {path: content for path, content in tree(root / "back").items() if path.startswith("commitlog")}
        assert all(len(content) == SEGMENT_BYTES for content in exported.values())
        assert b"".join(exported.values()).startswith(log)
        halves = {position: number for position, (number, _) in store.open.items()}
        assert sorted(open_for_apache(root / "back", halves)) == sorted(store.open)
        levels = json.loads(re.sub(r"(\d+):", r'"\1":', (root / "back" / "config" / "delayOffset.json").read_text()))
        assert {int(level): offset for level, offset in levels["offsetTable"].items()} == store.delivered

        shutil.rmtree(root / "back")
        found = asyncio.run(opened(root / "ours"))
        assert found["open"] == sorted(store.open)
        assert all(found["delivered"][level - 1] >= offset for level, offset in store.delivered.items())
        assert found["offsets"] == {  # none beyond the end of its queue
            key: {
                str(queue_id): min(offset, store.numbers.get((key.partition("@")[0], queue_id), 0))
                for queue_id, offset in queues.items()
            }
            for key, queues in store.offsets.items()
        }
        assert {name for name, _ in store.numbers} <= found["topics"] and found["groups"] == {"g"}
        for queue, units in store.units.items():
            records = [
                bytes(store.log[position - begin : position - begin + size_bytes])
                for position, size_bytes in ((int.from_bytes(unit[:8]), int.from_bytes(unit[8:12])) for unit in units)
            ]
            first, _, own = found["queues"][queue]
            assert first == 0 and own[: len(records)] == records, queue


def test_an_export_has_the_layout_that_apaches_broker_writes(tmp_path: Path) -> None:
    """Names, sizes and texts as its broker writes them."""
    store = ApacheStore()
    store.put("t", 3, b"first", "TAGS\x01a\x02")
    store.delay(2, b"waits")
    store.delay(2, b"waits longer")
    store.deliver(2)
    store.half("t", b"kept open")
    store.offsets["t@g"] = {3: 1}
    store.write(tmp_path / "apache")
    import_store(configured(tmp_path / "ours"), tmp_path / "apache")
    lines = export_store(configured(tmp_path / "ours"), tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == [
        f"commitlog/{0:020d}", "config/consumerOffset.json", "config/delayOffset.json", "config/subscriptionGroup.json",
        "config/topics.json",
    ]  # fmt: skip
    log = (tmp_path / "out" / "commitlog" / f"{0:020d}").read_bytes()
    assert len(log) == SEGMENT_BYTES and log.startswith(store.log) and log.endswith(bytes(1000))
    assert (tmp_path / "out" / "config" / "delayOffset.json").read_text() == '{"offsetTable":{2:1}}'
    offsets = (tmp_path / "out" / "config" / "consumerOffset.json").read_text()
    assert offsets == '{"offsetTable":{"t@g":{3:1},"RMQ_SYS_TRANS_OP_HALF_TOPIC@CID_RMQ_SYS_TRANS":{0:1}}}'
    topics = json.loads((tmp_path / "out" / "config" / "topics.json").read_text())
    assert topics["topicConfigTable"]["t"] == topic_json("t") and SCHEDULE not in topics["topicConfigTable"]
    assert lines[1] == "1 delayed messages wait, 1 transactions are open; added 0 ends of transactions"
    assert f"mappedFileSizeCommitLog={SEGMENT_BYTES}" in lines[-1]


@pytest.mark.parametrize("checkpoint", ["whole", "damaged", "gone"])
def test_queues_whose_messages_have_expired_keep_their_offsets(tmp_path: Path, checkpoint: str) -> None:
    """Without the checkpoint of the queues, queueEnds.json has them."""
    store = ApacheStore(begin=7 * SEGMENT_BYTES, numbers={("t", 0): 60})
    store.put("t", 0, b"still there")
    store.numbers["t", 1], store.units["t", 1] = 130, [pack_unit(9)] * 30
    store.numbers["u", 0], store.units["u", 0] = 50, [pack_unit(11)] * 50
    store.write(tmp_path / "apache")
    import_store(configured(tmp_path / "ours"), tmp_path / "apache")
    path = tmp_path / "ours" / "consumequeue.checkpoint"
    if checkpoint == "damaged":
        path.write_bytes(bytes(100))
    elif checkpoint == "gone":
        path.unlink()
    export_store(configured(tmp_path / "ours"), tmp_path / "out")
    assert ends_of(tmp_path / "out") == {"t/1": 130, "u/0": 50}
    queues = asyncio.run(opened(tmp_path / "ours"))["queues"]
    assert {queue: bounds[:2] for queue, bounds in queues.items()} == {
        ("t", 0): (60, 61), ("t", 1): (130, 130), ("u", 0): (50, 50)
    }  # fmt: skip
    (tmp_path / "ours" / "queueEnds.json").write_text('{"queueEnds":{},"crc32":"00000000"}')
    with pytest.raises(ExchangeError, match=r"queueEnds.json is damaged"):
        export_store(configured(tmp_path / "ours"), tmp_path / "not made")


def ends_of(root: Path) -> dict[str, int]:
    """End offsets of an export's queues, from their files of 50 units."""
    ends = {}
    for path in sorted((root / "consumequeue").glob("*/*/*")):
        data = path.read_bytes()
        assert len(data) == 1000
        units = [data[at : at + 20] for at in range(0, 1000, 20)]
        count = next((at for at, unit in enumerate(units) if unit == bytes(20)), 50)
        ends[str(path.parent.relative_to(root / "consumequeue"))] = int(path.name) // 20 + count
    return ends


def test_queue_ends_that_a_slave_learned_since_its_checkpoint_are_exported(tmp_path: Path) -> None:
    """If a queue's end is only presumed, the higher one counts: the checkpoint's or the table's."""
    store = ApacheStore(begin=7 * SEGMENT_BYTES)
    for queue_id, end in ((1, 130), (2, 70)):
        store.numbers["t", queue_id], store.units["t", queue_id] = end, [pack_unit(9)] * (end % 50)
    store.put("t", 0, b"still there")
    store.write(tmp_path / "apache")
    import_store(configured(tmp_path / "ours"), tmp_path / "apache")
    (tmp_path / "ours" / "consumequeue.checkpoint").unlink()
    asyncio.run(opened(tmp_path / "ours"))  # a checkpoint in which both ends are presumed
    learned = encode_table({"queueEnds": {"t": {"1": 200, "2": 60}}})
    (tmp_path / "ours" / "queueEnds.json").write_bytes(learned)
    export_store(configured(tmp_path / "ours"), tmp_path / "out")
    assert ends_of(tmp_path / "out") == {"t/1": 200, "t/2": 70}
    queues = asyncio.run(opened(tmp_path / "ours"))["queues"]
    assert queues["t", 1][:2] == (200, 200) and queues["t", 2][:2] == (70, 70)


def pack_unit(position: int) -> bytes:
    return position.to_bytes(8, "big") + (100).to_bytes(4, "big") + bytes(8)


def test_a_torn_record_at_the_end_of_a_crashed_apache_store_is_left_out(tmp_path: Path) -> None:
    store = ApacheStore()
    store.put("t", 0, b"whole")
    whole = len(store.log)
    store.put("t", 0, b"torn apart" * 10)
    del store.log[-20:]
    store.write(tmp_path / "apache", killed=True, ahead=True)
    lines = import_store(configured(tmp_path / "ours"), tmp_path / "apache")
    assert lines[2] == f"left out {len(store.log) - whole} bytes at the end that are no whole record"
    assert tree(tmp_path / "ours")[f"commitlog/{0:020d}"] == bytes(store.log[:whole])


@pytest.mark.parametrize(
    ("durable", "was_killed", "refused"),
    [
        (20, True, ""),
        (0, True, "no record begins there, and the log goes on to"),
        (20, False, "no record begins there, and the log goes on to"),
        (21, True, "stored at 1700000000147 ms was durable"),
    ],
)
def test_the_log_behind_a_gap_is_left_out_only_after_a_crash_and_if_none_was_durable(
    tmp_path: Path, durable: int, was_killed: bool, refused: str
) -> None:
    store = ApacheStore()
    for at in range(60):
        store.put("t", 0, b"x" * 1500, f"KEYS\x01{at}\x02")
    twenty = int.from_bytes(store.units["t", 0][20][:8])
    store.write(tmp_path / "apache", killed=was_killed)
    first = tmp_path / "apache" / f"commitlog/{0:020d}"
    first.write_bytes(first.read_bytes()[:twenty].ljust(SEGMENT_BYTES, b"\0"))
    durable_ms = durable and 1_700_000_000_000 + 7 * durable
    (tmp_path / "apache" / "checkpoint").write_bytes(durable_ms.to_bytes(8).ljust(4096, b"\0"))
    if refused:
        with pytest.raises(ExchangeError, match=refused):
            import_store(configured(tmp_path / "ours"), tmp_path / "apache")
        assert not (tmp_path / "ours").exists()
    else:
        lines = import_store(configured(tmp_path / "ours"), tmp_path / "apache")
        assert lines[2] == f"left out {len(store.log) - twenty} bytes at the end that are no whole record"
        assert tree(tmp_path / "ours")[f"commitlog/{0:020d}"] == bytes(store.log[:twenty])


def damage(name: str, at: int) -> Callable[[Path], None]:
    def flip(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[at] ^= 1
        (root / name).write_bytes(data)

    return flip


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(text) and None


FIRST, SECOND, THIRD = (f"commitlog/{at * SEGMENT_BYTES:020d}" for at in range(3))
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a body": (damage(FIRST, 90), "byte 0 is damaged: body CRC"),
    "a size": (damage(FIRST, 1), "byte 0 is damaged: a record of"),
    "behind the end": (damage(THIRD, SEGMENT_BYTES - 1), "no record begins there, and the log goes on to"),
    "a missing file": (lambda root: (root / SECOND).unlink(), "the file is missing, and the log goes on to"),
    "a short file": (lambda root: (root / SECOND).write_bytes(b""), "has 0 bytes"),
    "another size": (lambda root: [path.write_bytes(bytes(131072)) for path in (root / "commitlog").iterdir()],
                     r"is no file of a log|limits.segment_size_bytes"),
    "no topics": (lambda root: (root / "config/topics.json").unlink(), "is no store of RocketMQ 4.9"),
    "half a table": (write("config/consumerOffset.json", '{"offsetTable":{'), "consumerOffset.json is damaged"),
    "no offset": (write("config/delayOffset.json", '{"offsetTable":{1:"x"}}'), "'x' is no offset"),
    "no object": (write("config/topics.json", '{"topicConfigTable":[]}'), "topicConfigTable is no object"),
    "no queues": (write("config/topics.json", '{"topicConfigTable":{"t":{"topicName":"t"}}}'), "no topic table"),
    "light messages": (lambda root: (root / "consumequeue/%LMQ%a/0").mkdir(parents=True), "light messages"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_damaged_or_unsupported_store_is_refused_and_not_changed(tmp_path: Path, what: str) -> None:
    store = ApacheStore()
    for at in range(120):
        store.put("t", 0, b"x" * 1500, f"KEYS\x01{at}\x02")
    store.write(tmp_path / "apache")
    spoil, reason = REFUSED[what]
    spoil(tmp_path / "apache")
    before = tree(tmp_path)
    with pytest.raises(ExchangeError, match=reason) as caught:
        import_store(configured(tmp_path / "ours"), tmp_path / "apache")
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == before and not (tmp_path / "ours").exists()


def ours(tmp_path: Path) -> Path:
    """A store of ours with three files of log."""
    store = ApacheStore()
    for at in range(120):
        store.put("t", 0, b"x" * 1500, f"KEYS\x01{at}\x02")
    store.write(tmp_path / "apache")
    import_store(configured(tmp_path / "ours"), tmp_path / "apache")
    return tmp_path / "ours"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage(FIRST, 90), "byte 0 is damaged: body CRC .* was durable"),
        (lambda root: (root / SECOND).unlink(), "is missing or short"),
        (lambda root: (root / THIRD).unlink(), "bytes that were durable are missing"),
        (write("topics.json", '{"topicConfigTable":{},"crc32":"00000000"}'), "topics.json is damaged"),
    ],
)
def test_a_damaged_store_of_ours_is_not_exported(tmp_path: Path, spoil: Callable[[Path], Any], reason: str) -> None:
    data_dir = ours(tmp_path)
    spoil(data_dir)
    before = tree(tmp_path)
    with pytest.raises(ExchangeError, match=reason):
        export_store(configured(data_dir), tmp_path / "out")
    assert tree(tmp_path) == before and not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_store_leaves_nothing_out_of_an_export(tmp_path: Path) -> None:
    """The checkpoint of an empty log after an orderly stop, with a log that is not empty."""
    data_dir = ours(tmp_path)
    before = export_store(configured(data_dir), tmp_path / "before")
    write("checkpoint", '{"position":0,"isClean":true,"writtenAtMs":0}')(data_dir)
    assert export_store(configured(data_dir), tmp_path / "out") == before
    assert tree(tmp_path / "out") == tree(tmp_path / "before")


def test_a_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    data_dir = ours(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "something").touch()
    with pytest.raises(ExchangeError, match="exists and is not empty"):
        export_store(configured(data_dir), tmp_path / "out")
    with pytest.raises(ExchangeError, match="exists and is not empty"):
        import_store(configured(data_dir), tmp_path / "apache")


def test_an_interrupted_export_leaves_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at each sync. A killed process leaves its `.partial` directory; the next export refuses it."""
    data_dir, real_sync = ours(tmp_path), staging._sync
    left = 0

    def interrupted(path: Path, flags: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        real_sync(path, flags)

    monkeypatch.setattr(staging, "_sync", interrupted)
    for syncs in range(1, 100):
        left = syncs
        try:
            export_store(configured(data_dir), tmp_path / "out")
        except KeyboardInterrupt:
            if not (tmp_path / "out").exists():
                assert not (tmp_path / "out.partial").exists()
                continue
        break  # the last sync is that of the parent directory: by then the target exists and is complete
    assert syncs > 8 and (tmp_path / "out" / "config" / "topics.json").exists()

    (tmp_path / "other.partial").mkdir()
    with pytest.raises(ExchangeError, match="is left of a command that was interrupted"):
        export_store(configured(data_dir), tmp_path / "other")


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    data_dir = ours(tmp_path)
    with (data_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ExchangeError, match="in use by a broker"):
            export_store(configured(data_dir), tmp_path / "out")


def test_the_commands_print_a_summary_or_the_reason_of_a_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours(tmp_path)
    configuration = tmp_path / "broker.toml"
    configuration.write_text(CONFIG.format(data_dir=tmp_path / "ours"))
    export = ["export-store", "--config", str(configuration), "--to", str(tmp_path / "out")]
    assert main(export) == 0
    assert capsys.readouterr().out.startswith("exported 120 messages in 1 queues (120 plain; of these 120 with keys)")
    assert main(export) == 254
    assert "out exists and is not empty" in capsys.readouterr().err
    again = ["import-store", "--config", str(configuration), "--from", str(tmp_path / "out")]
    assert main([*again, "--set", f"data_dir={tmp_path / 'again'}"]) == 0
    assert capsys.readouterr().out.startswith("imported 120 messages")
    assert main([*again, "--set", f"data_dir={tmp_path / 'more'}", "--set", "limits.segment_size_bytes=131072"]) == 254
    assert f"set limits.segment_size_bytes = {SEGMENT_BYTES}" in capsys.readouterr().err
    assert main(["import-store", "--config", str(configuration), "--from", str(tmp_path / "nowhere")]) == 254
    assert "there is no store" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["", "config", "checkpoint"])
def test_a_broker_does_not_start_on_a_store_of_apache_rocketmq(tmp_path: Path, gone: str) -> None:
    """It would cut the zeros after the last record, and whatever else it took for damage."""
    root = tmp_path / "apache"
    store = ApacheStore()
    store.put("t", 0, b"x")
    store.write(root)
    (root / "checkpoint").write_bytes(struct.pack(">3q", 1_700_000_000_000, 1_700_000_000_000, 0).ljust(4096, b"\0"))
    if gone == "config":
        shutil.rmtree(root / "config")
    elif gone:
        (root / gone).unlink()
    before = tree(root)
    configuration = tmp_path / "broker.toml"
    configuration.write_text(CONFIG.format(data_dir=root))
    command = [sys.executable, "-m", "node", "broker", "--config", str(configuration)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert (ended.returncode, ended.stderr.count("\n")) == (254, 1)
    assert f"data_dir {root} is a store of Apache RocketMQ, as {root}/" in ended.stderr
    assert f"run import-store --from {root}" in ended.stderr
    assert tree(root) == before


def test_our_own_stores_are_not_taken_for_apaches(tmp_path: Path) -> None:
    assert mark_of_apache(tmp_path / "nowhere") == "" == mark_of_apache(tmp_path)
    data_dir = ours(tmp_path)
    assert mark_of_apache(tmp_path / "apache") == str(tmp_path / "apache" / "config" / "topics.json")
    for name in ("checkpoint", "topics.json"):
        assert mark_of_apache(data_dir) == ""
        (data_dir / name).unlink()
    assert mark_of_apache(data_dir) == ""
    (data_dir / "checkpoint").write_bytes(bytes(60))  # what a power cut may leave of ours
    assert mark_of_apache(data_dir) == ""


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_with_one_line_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    ours(tmp_path)
    configuration = tmp_path / "broker.toml"
    configuration.write_text(CONFIG.format(data_dir=tmp_path / "ours"))
    export = ["export-store", "--config", str(configuration), "--to", str(tmp_path / "out")]
    real_sync, before = staging._sync, signal.getsignal(number)

    def hit(path: Path, flags: int) -> None:
        os.kill(os.getpid(), number)
        real_sync(path, flags)

    monkeypatch.setattr(staging, "_sync", hit)
    assert main(export) == 254
    assert capsys.readouterr().err == f"node: interrupted; nothing is left of {tmp_path / 'out'}\n"
    assert not list(tmp_path.glob("out*"))
    assert signal.getsignal(number) == before
    monkeypatch.setattr(staging, "_sync", real_sync)
    assert main(export) == 0


def test_a_full_disk_is_reported_with_the_target_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours(tmp_path)
    configuration = tmp_path / "broker.toml"
    configuration.write_text(CONFIG.format(data_dir=tmp_path / "ours"))

    def full(path: Path, flags: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging, "_sync", full)
    assert main(["export-store", "--config", str(configuration), "--to", str(tmp_path / "out")]) == 254
    assert capsys.readouterr().err == f"node: {tmp_path / 'out'}: No space left on device\n"
    assert main(["export-store", "--config", str(configuration), "--to", ""]) == 254
    assert capsys.readouterr().err == "node: --to: the path is empty\n"


def test_an_export_succeeds_although_its_output_pipe_is_closed(tmp_path: Path) -> None:
    ours(tmp_path)
    configuration = tmp_path / "broker.toml"
    configuration.write_text(CONFIG.format(data_dir=tmp_path / "ours"))
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ["export-store", "--config", str(configuration), "--to", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "node", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "config" / "topics.json").exists()


@given(
    st.dictionaries(st.text(min_size=1), st.dictionaries(st.integers(-5, 1 << 40), st.integers(0, 1 << 60))),
    st.dictionaries(st.text(), st.text()),
)
def test_integer_keys_of_tables_are_written_without_quotes_and_read_back(
    offsets: dict[str, dict[int, int]], others: dict[str, str]
) -> None:
    table = {"offsetTable": {f"{name}@g": queues for name, queues in offsets.items()}, "others": others}
    text = encode_apache_table(table)
    assert decode_apache_table(text) == json.loads(json.dumps(table))
    for queues in offsets.values():
        for queue_id in queues:
            assert f'"{queue_id}":' not in text or str(queue_id) in others


def test_a_message_that_is_not_the_next_of_its_queue_is_refused_and_named(tmp_path: Path) -> None:
    store = ApacheStore()
    store.put("t", 0, b"first")
    store.numbers["t", 0] = 0
    store.put("t", 0, b"of a topic that was made again")
    store.write(tmp_path / "apache")
    with pytest.raises(ExchangeError, match="is number 0 of queue t/0, where 1 is next"):
        import_store(configured(tmp_path / "ours"), tmp_path / "apache")


TIMED = "TIMER_OUT_MS\x019\x02REAL_TOPIC\x01t\x02REAL_QID\x010\x02"
POP_CHECKPOINT = b'{"so":0,"pt":5,"it":9,"bm":0,"n":2,"q":0,"t":"t","c":"g","d":[0,1]}'


@pytest.mark.parametrize(
    ("topic", "body", "properties", "reason"),
    [
        ("rmq_sys_wheel_timer", b"later", TIMED, "1 timer messages wait"),
        ("rmq_sys_REVIVE_LOG_c", POP_CHECKPOINT, "TAGS\x01ck\x02", "have 2 messages in hand"),
    ],
)
def test_a_store_with_messages_that_rocketmq_4_would_never_deliver_is_refused(
    tmp_path: Path, topic: str, body: bytes, properties: str, reason: str
) -> None:
    store = ApacheStore()
    store.put(topic, 0, body, properties)
    store.write(tmp_path / "apache")
    with pytest.raises(ExchangeError, match=reason):
        import_store(configured(tmp_path / "ours"), tmp_path / "apache")
