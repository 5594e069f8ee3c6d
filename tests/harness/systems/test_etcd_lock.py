"""The set under etcd's lock, against a fake gateway."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from harness.sdk import HttpError, Refused
from harness.systems import etcd_lock
from harness.systems.etcd_lock import LockedSetClient


class Gateway:
    """A gateway with a free lock and one key, which raises an error for one of the paths."""

    def __init__(self, path: str, error: Exception) -> None:
        self._path, self._error = path, error
        self.kept: list[int] = []

    async def post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        if path == self._path:
            raise self._error
        if path == "/v3/kv/range":
            return {"kvs": [{"value": base64.b64encode(json.dumps(self.kept).encode()).decode()}]}
        if path == "/v3/kv/txn":
            self.kept = json.loads(base64.b64decode(asked["success"][0]["requestPut"]["value"]))
            return {"succeeded": True}
        return {"ID": "7", "key": "bG9jaw=="}


def added(gateway: Gateway) -> None:
    client: Any = LockedSetClient()
    client.http, client.settings = gateway, {"fenced": "yes"}
    asyncio.run(client.add(5))


@pytest.mark.parametrize("error", [Refused("cannot connect"), HttpError(503, ""), ConnectionError(), ValueError()])
def test_a_written_add_succeeds_even_if_releasing_the_lock_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed after the write refuses the next connection: the add still happened."""
    monkeypatch.setattr(etcd_lock, "WORK_S", 0)
    gateway = Gateway("/v3/lease/revoke", error)
    added(gateway)
    assert gateway.kept == [5]


def test_an_add_whose_write_is_refused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_lock, "WORK_S", 0)
    gateway = Gateway("/v3/kv/txn", Refused("cannot connect"))
    with pytest.raises(Refused):
        added(gateway)
    assert gateway.kept == []
