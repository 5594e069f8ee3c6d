"""The three timestamps of the checkpoint, for the inspection of a store."""

from __future__ import annotations

import asyncio
from typing import Any

from node.store.queue_store import DispatchMark, QueueStore, StoreTimestamps

MARK = DispatchMark(index=7, term=1, store_timestamp_ms=300)
TIMES = StoreTimestamps(physic_msg_ms=200, logics_msg_ms=300, index_msg_ms=100)


def test_timestamps_are_those_of_the_last_checkpoint(disk: Any) -> None:
    store = QueueStore(disk, "/q", units_per_file=4)
    store.append("t", 0, 0, physical_offset=0, size_bytes=100, tag_hash=0)
    assert store.timestamps == StoreTimestamps()
    asyncio.run(store.checkpoint(MARK, timestamps=lambda: TIMES))
    assert store.timestamps == TIMES
    assert b'"physicMsgTimestamp":200,"logicsMsgTimestamp":300,"indexMsgTimestamp":100' in disk.files["/q.checkpoint"]
    again = QueueStore(disk, "/q", units_per_file=4)
    assert asyncio.run(again.restore(lambda index, term: True)) == MARK
    assert again.timestamps == TIMES
