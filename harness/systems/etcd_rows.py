"""Rows by key in etcd; a transaction inserts a row for a key only if the key has none.

Tables are key prefixes. The predicate is a comparison over a range of keys: none of them was ever created.
"""

import base64
import json
from typing import Any

from harness.sdk import Client, JsonHttp

TABLES = (0, 1)
END = "~"
"""Sorts after every row number."""


class RowsClient(Client):
    """The part of an etcd client that handles rows."""

    http: JsonHttp

    async def insert_if_absent(self, key: int, table: int, row: int) -> bool:
        absent = [{**rows_of(each, key), "target": "CREATE", "createRevision": "0"} for each in TABLES]
        change = {"requestPut": {"key": under(table, key, f"{row}"), "value": text(row)}}
        return bool((await self.http.post("/v3/kv/txn", {"compare": absent, "success": [change]})).get("succeeded"))

    async def rows(self, key: int) -> list[int]:
        is_local = self.settings["read"] == "serializable"
        wanted = [{"requestRange": {**rows_of(each, key), "serializable": is_local}} for each in TABLES]
        answers = (await self.http.post("/v3/kv/txn", {"success": wanted}))["responses"]
        found = [each for answer in answers for each in answer["response_range"].get("kvs", [])]
        return [json.loads(base64.b64decode(each["value"])) for each in found]


def rows_of(table: int, key: int) -> dict[str, str]:
    """The key range of all rows of a key in a table."""
    return {"key": under(table, key), "range_end": under(table, key, END)}


def under(table: int, key: int, rest: str = "") -> str:
    """The etcd key for a table, a key and the rest, as base64, which is how the gateway takes bytes."""
    return base64.b64encode(f"rows{table}/{key}/{rest}".encode()).decode()


def text(value: Any) -> str:
    """The value as base64 of JSON."""
    return base64.b64encode(json.dumps(value).encode()).decode()
