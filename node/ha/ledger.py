"""A broker's commit log in classic HA: a master's, which slaves copy, or a slave's, which is a copy.

    ASYNC_MASTER  answers when a message is as safe here as the flush mode promises; slaves get it at some later time
    SYNC_MASTER   also waits until one slave has it: SLAVE_NOT_AVAILABLE if none is near, FLUSH_SLAVE_TIMEOUT if none
                  has confirmed it in time. Either way the message is stored here, and may be lost with this machine
    SLAVE         takes no messages; dispatches what it has copied to its own queues and index

Roles are configured and do not change while the process runs (RocketMQ 4.x): there is no election. An operator promotes
a slave by starting it with another `broker_role`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from node.broker.classic import ClassicLedger, ClassicLogOptions
from node.broker.ledger import DLedgerCode, DLedgerError, ReadMode, Role, StoredInPart
from node.ha.client import HAClient
from node.ha.config import HaConfig
from node.ha.group_transfer import GroupTransferService
from node.ha.service import HAService
from node.listening import listening
from node.remoting import ResponseCode
from node.runtime import Runtime

__all__ = ["HaLedger"]


async def _nothing() -> None:
    return None


class HaLedger(ClassicLedger):
    """See the module. A master listens for slaves on `host` and `port`; `slave_reads` says whether a slave answers
    reads."""

    def __init__(
        self,
        options: ClassicLogOptions,
        runtime: Runtime,
        *,
        ha: HaConfig,
        slave_reads: bool,
        timing: str,
        host: str,
        port: int,
    ) -> None:
        super().__init__(options, runtime, role=Role.FOLLOWER if ha.is_slave else Role.LEADER)
        self.ha = ha
        self._slave_reads = slave_reads
        timings = ha.timings(timing)
        self.before_cut: Callable[[], None] = lambda: None
        """Called before the log is cut: what is derived from it must not change meanwhile."""
        self.after_cut: Callable[[], Awaitable[None]] = _nothing
        """Called after the cut, and again if this fails: what is derived from the log follows it. Raises OSError."""
        self._owes_after_cut = False
        self.transfers = GroupTransferService(timeout_s=timings.slave_timeout_s)
        self.service: HAService | None = None
        self.client: HAClient | None = None
        if ha.is_slave:
            self.client = HAClient(
                log=self.log,
                timings=timings,
                cut=self._cut_everything,
                settle=self._settle_cut,
                heals=ha.mismatch == "heal",
            )
            self.add_commit_listener(self.client.progressed)
            if ha.master_address:
                self.client.set_master(ha.master_address)
        else:
            self.service = HAService(
                host=host,
                port=port,
                log=self.log,
                timings=timings,
                batch_bytes=ha.batch_bytes,
                fallbehind_max_bytes=ha.fallbehind_max_bytes,
                on_confirmed=self.transfers.confirmed,
            )
            self.add_commit_listener(self.service.wake)

    async def start(self) -> None:
        """Recover; a master then listens for slaves. A slave dials its master when its `client` is started, once
        everything derived from the log is recovered. Raises as ClassicLedger; OSError for a port in use."""
        await super().start()
        if self.service is not None:
            with listening("classic.ha_listen_port"):
                await self.service.start()

    async def stop(self) -> None:
        """Disconnect from master or slaves, then close the log."""
        if self.client is not None:
            await self.client.stop()
        if self.service is not None:
            await self.service.stop()
        self.transfers.close()
        await super().stop()

    def master_is_at(self, ha_address: str) -> None:
        """A name server has reported where the master listens for slaves; a configured address takes precedence."""
        if self.client is not None and not self.ha.master_address:
            self.client.set_master(ha_address)

    async def _cut_everything(self, position: int) -> None:
        self._owes_after_cut = True
        self.before_cut()
        try:
            await self.cut(position)
        finally:
            await self._settle_cut()

    async def _settle_cut(self) -> None:
        """Make sure that what is derived from the log has followed its last cut. Raises OSError."""
        if self._owes_after_cut:
            await self.after_cut()
            self._owes_after_cut = False

    def append_batch(
        self,
        sizes: Sequence[int],
        encode: Callable[[Sequence[int]], Sequence[bytes]],
        on_done: Callable[[Exception | None], object],
    ) -> tuple[int, int, int]:
        """As ClassicLedger; `on_done` may also get StoredInPart SLAVE_NOT_AVAILABLE or FLUSH_SLAVE_TIMEOUT.

        Raises DLedgerError NOT_LEADER on a slave, LEADER_PENDING_FULL also when too many messages wait for slaves.
        """
        service = self.service
        if service is None:
            raise DLedgerError(DLedgerCode.NOT_LEADER, "a slave takes no messages")
        if not self.ha.is_sync:
            return super().append_batch(sizes, encode, on_done)
        if not self.transfers.has_room(len(sizes)):
            raise DLedgerError(
                DLedgerCode.LEADER_PENDING_FULL, f"{self.transfers.waiting_count} messages wait for a slave"
            )
        combined = _CombinedOutcome(on_done)
        placed = super().append_batch(sizes, encode, combined.here)
        end = self.log.end_position
        if service.is_slave_ok(end):
            self.transfers.tell(end, combined.there, len(sizes))
        else:
            combined.there(None)
        return placed

    def takes_together(self, count: int, size_bytes: int) -> bool:
        """False on a SYNC_MASTER if the first messages are near enough to a slave and the others are not, or if too
        many wait already."""
        service = self.service
        if service is None or not self.ha.is_sync:
            return True
        end = self.log.end_position
        is_alike = service.is_slave_ok(end + size_bytes) or not service.is_slave_ok(end)
        return is_alike and self.transfers.has_room(count)

    def read_barrier_now(self) -> int | None:
        return None if self.ha.is_slave and not self._slave_reads else super().read_barrier_now()

    async def read_barrier(self, mode: ReadMode) -> int:
        """The committed index here. A slave answers reads only if it may (`slave_read_enable`), from what it has.

        Raises DLedgerError NOT_LEADER.
        """
        if self.ha.is_slave and not self._slave_reads:
            raise DLedgerError(DLedgerCode.NOT_LEADER, "this slave answers no reads")
        return await super().read_barrier(mode)

    def status(self) -> dict[str, Any]:
        """The runtime table's fields about replication."""
        if self.client is not None:
            return {
                "haState": self.client.state,
                "haMasterAddress": self.client.master_address,
                "haTrouble": self.client.trouble,
                "haCutBytesTotal": self.client.cut_bytes_total,
            }
        assert self.service is not None
        service = self.service
        return {
            "haConnections": service.connection_count,
            "haSlaveMaxOffset": service.push_to_slave_max_position,
            "haSlaves": ",".join(f"{each['address']}={each['confirmed']}" for each in service.slaves()),
            "haWaiting": self.transfers.waiting_count,
        }


class _CombinedOutcome:
    """The outcome of a message that is to be here and on a slave. A slave's failure takes precedence over the disk's
    delay, as in RocketMQ; an unknown outcome takes precedence over both."""

    __slots__ = ("_error", "_is_called", "_is_here", "_is_there", "_on_done", "_slave")

    def __init__(self, on_done: Callable[[Exception | None], object]) -> None:
        self._on_done = on_done
        self._is_here = self._is_there = self._is_called = False
        self._error: Exception | None = None
        self._slave: bool | None = None

    def here(self, error: Exception | None) -> None:
        """The outcome on this node's disk is known."""
        self._is_here, self._error = True, error
        self._call()

    def there(self, transferred: bool | None) -> None:
        """Whether a slave has it; None if none is near enough to wait for."""
        self._is_there, self._slave = True, transferred
        self._call()

    def _call(self) -> None:
        if self._is_called or not self._is_here:
            return
        error = self._error
        if error is None or isinstance(error, StoredInPart):
            if not self._is_there:
                return
            if self._slave is None:
                error = StoredInPart(ResponseCode.SLAVE_NOT_AVAILABLE, "no slave is near enough")
            elif not self._slave:
                error = StoredInPart(ResponseCode.FLUSH_SLAVE_TIMEOUT, "no slave had it in time")
        self._is_called = True
        self._on_done(error)
