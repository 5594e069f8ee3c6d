"""Rows of keys in etcd: the requests to its gateway, here a fake one with keys in memory."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from harness.systems.etcd_rows import RowsClient


class Gateway:
    """Transactions of the JSON gateway of etcd, as far as rows need them."""

    def __init__(self) -> None:
        self.kept: dict[bytes, str] = {}
        self.asked: list[dict[str, Any]] = []

    def within(self, asked: dict[str, Any]) -> list[str]:
        first, end = (base64.b64decode(asked[name]) for name in ("key", "range_end"))
        return [value for key, value in sorted(self.kept.items()) if first <= key < end]

    async def post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        assert path == "/v3/kv/txn"
        self.asked.append(asked)
        for compared in asked.get("compare", []):
            assert compared["target"] == "CREATE" and compared["createRevision"] == "0"
            if self.within(compared):
                return {"header": {}}  # fields that are false are left out
        responses: list[dict[str, Any]] = []
        for step in asked["success"]:
            if "requestPut" in step:
                self.kept[base64.b64decode(step["requestPut"]["key"])] = step["requestPut"]["value"]
                responses.append({"response_put": {}})
            else:
                found = self.within(step["requestRange"])
                responses.append({"response_range": {"kvs": [{"value": each} for each in found]} if found else {}})
        return {"succeeded": True, "responses": responses}


def client_of(gateway: Gateway, read: str = "linearizable") -> Any:
    client: Any = RowsClient()
    client.http, client.settings = gateway, {"read": read}
    return client


def test_a_row_is_inserted_only_if_no_table_has_one_of_the_same_key() -> None:
    async def scenario() -> Any:
        client = client_of(Gateway())
        inserted = [await client.insert_if_absent(*asked) for asked in ((1, 0, 5), (1, 0, 6), (1, 1, 7), (11, 1, 8))]
        return inserted, [await client.rows(key) for key in (1, 11, 2)]

    assert asyncio.run(scenario()) == ([True, False, False, True], [[5], [8], []])


def test_reads_ask_the_leader_unless_they_may_be_stale() -> None:
    for read in ("linearizable", "serializable"):
        gateway = Gateway()
        asyncio.run(client_of(gateway, read).rows(1))
        ranges = [step["requestRange"] for step in gateway.asked[0]["success"]]
        assert [each["serializable"] for each in ranges] == [read == "serializable"] * 2
