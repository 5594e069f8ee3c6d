"""Each safety mechanism of classic HA has a test that fails without it: here they are switched off, one by one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.sim.errors import SimulationError
from node.broker import slave_sync
from node.ha import replica
from node.ha.client import _Link
from node.ha.replica import Replica
from node.ha.service import HAConnection, HAService


def any_offset_counts(patch: pytest.MonkeyPatch) -> None:
    """rocketmq#3015, #1155."""

    def reported(self: Any, position: int) -> None:
        self.ack_position = position
        self._service.confirmed(position)

    patch.setattr(HAConnection, "_reported", reported)


def request_acknowledges(patch: pytest.MonkeyPatch) -> None:
    """A slave's first report releases messages."""
    requested = HAConnection._requested

    def asked(self: Any, position: int) -> None:
        requested(self, position)
        self._service.confirmed(position)

    patch.setattr(HAConnection, "_requested", asked)


def no_comparison(patch: pytest.MonkeyPatch) -> None:
    """A slave requests the position after its end and writes whatever arrives."""
    original = Replica.__init__

    def init(self: Any, log: Any, *, compare_bytes: int = 0) -> None:
        original(self, log, compare_bytes=0)
        self.request_position = self._due = 0 if log.end_position == log.begin_position else log.end_position
        self.is_compared = True

    patch.setattr(Replica, "__init__", init)


def unsafe_report(patch: pytest.MonkeyPatch) -> None:
    """A slave reports what it has received."""

    def progressed(self: Any) -> None:
        if self._transport and self._replica.is_compared and self._log.end_position > self._reported:
            self._report(self._log.end_position)

    patch.setattr(_Link, "progressed", progressed)


def silent_out_of_range(patch: pytest.MonkeyPatch) -> None:
    """rocketmq#3388."""

    def requested(self: Any, position: int) -> None:
        log, end = self._service.log, self._service.end_position
        self.request_position = position
        self._first = self._next = position or max(log.begin_position, end - end % log.segment_size_bytes)
        self.wake()

    patch.setattr(HAConnection, "_requested", requested)


def records_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A slave appends records without looking at them."""
    patch.setattr(replica, "_check", lambda record, position, room: None)


def no_housekeeping(patch: pytest.MonkeyPatch) -> None:
    """A silent slave stays connected."""
    patch.setattr(HAConnection, "_silent_at_s", lambda self: 1e18)


def offsets_forgotten(patch: pytest.MonkeyPatch) -> None:
    """rocketmq#1094."""

    async def give_back(self: Any, address: str, content: Any) -> Any:
        return content

    patch.setattr(slave_sync.SlaveSynchronize, "_give_back", give_back)


def any_slave_is_ok(patch: pytest.MonkeyPatch) -> None:
    """A SYNC_MASTER waits for slaves that are not connected."""
    patch.setattr(HAService, "is_slave_ok", lambda self, position: True)


MUTATIONS: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, Mapping[str, Any]]] = {
    "any-offset": (any_offset_counts, "transfer", "a_bogus_offset_releases_no_waiting_send", {"bogus": 1 << 40}),
    "asking": (request_acknowledges, "transfer", "a_slaves_request_acknowledges_nothing", {}),
    "no-comparison": (no_comparison, "mismatch", "a_former_master_that_heals_rejoins_as_a_slave", {}),
    "unsafe-report": (unsafe_report, "transfer", "a_slave_does_not_report_what_is_not_durable", {}),
    "out-of-range": (
        silent_out_of_range, "mismatch", "a_slave_that_ends_before_the_masters_log_begins_refuses_or_starts_over",
        {"heals": False},
    ),
    "unchecked": (
        records_unchecked, "protocol", "a_slave_writes_only_records_that_continue_its_log", {"wrong": "damaged"},
    ),
    "no-housekeeping": (no_housekeeping, "protocol", "both_ends_close_a_silent_connection", {}),
    "forgotten": (offsets_forgotten, "reading", "a_restarted_master_learns_the_offsets_committed_at_the_slave", {}),
    "any-slave": (any_slave_is_ok, "transfer", "without_a_slave_a_message_is_stored_and_answered_as_not_available", {}),
}  # fmt: skip


def scenario(file: str, name: str) -> Callable[..., None]:
    """Load a test function of this directory."""
    path = Path(__file__).with_name(f"test_{file}.py")
    spec = importlib.util.spec_from_file_location(f"mutated_{file}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    test: Callable[..., None] = getattr(module, f"test_{name}")
    return test


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_the_mechanism_its_test_fails(name: str, ha: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, file, test, arguments = MUTATIONS[name]
    run = scenario(file, test)
    run(ha=ha, **arguments)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, SimulationError)):
        run(ha=ha, **arguments)
