"""Rows of keys in etcd, of which a transaction inserts one where a key has none.

Tables are prefixes, and a transaction compares a range of keys, which is the predicate: no key in it was ever created.
"""

import base64
import json
from typing import Any

from harness.sdk import Client, JsonHttp

TABLES = (0, 1)
END = "~"
"""Comes after every number of a row."""


class RowsClient(Client):
    """The part of a client of etcd that is about rows."""

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
    """The range of all rows of a key in a table."""
    return {"key": under(table, key), "range_end": under(table, key, END)}


def under(table: int, key: int, rest: str = "") -> str:
    """The key in etcd that begins with a table and a key, as base64, which is how the gateway takes bytes."""
    return base64.b64encode(f"rows{table}/{key}/{rest}".encode()).decode()


def text(value: Any) -> str:
    """As JSON, and that as base64."""
    return base64.b64encode(json.dumps(value).encode()).decode()
