"""A broker as a slave: where its master is, the master's log, the master's tables.

Name servers tell a slave, in the answer to each registration, where the master of its name is and where that master
accepts slaves (R: RegisterBrokerResult). None of it is remembered across a change of roles: the next registration,
which a change triggers at once, tells it again (S3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from node.broker.classic import ClassicLedger
from node.broker.consumer_offsets import ConsumerOffsets
from node.broker.dispatcher import Dispatcher
from node.broker.ledger import Ledger, ReadMode
from node.broker.queue_ends import QueueEnds
from node.broker.slave_sync import SlaveSynchronize
from node.broker.subscription_groups import SubscriptionGroups
from node.broker.topics import TopicTable
from node.config import BrokerConfig, split_address
from node.dledger import DLedgerServer
from node.ha.ledger import HaLedger
from node.remoting import RemotingClient
from node.runtime import Disk
from node.store.queue_store import QueueStore

__all__ = ["SlaveSide", "read_mode_of"]

logger = logging.getLogger("node.broker")


def read_mode_of(config: BrokerConfig) -> ReadMode:
    """The configured mode; but a slave of classic HA that may answer uses what it has (R: slaveReadEnable)."""
    reads_as_slave = config.ha is not None and config.ha.is_slave and config.slave_read_enable
    return ReadMode.UNSAFE if reads_as_slave else ReadMode(config.read_mode)


class SlaveSide:
    """The slave's part of one broker; idle on a master. `register_again` triggers a registration, whose answer tells
    where the master is."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        ledger: Ledger,
        dispatcher: Dispatcher,
        client: RemotingClient,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        groups: SubscriptionGroups,
        queues: QueueStore,
        ends: QueueEnds,
        disk: Disk,
        register_again: Callable[[], None],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._ha = ledger if isinstance(ledger, HaLedger) else None
        self.master_address = ""
        """The master as it advertises itself to clients; "" while unknown, and on the master itself."""
        self.synchronize = SlaveSynchronize(
            client=client,
            master=self._dialled_master,
            ask_for_master=register_again,
            may_copy=lambda: self._ha is None or self._is_copy(),
            may_give_back=self._is_copy,
            topics=topics,
            offsets=offsets,
            groups=groups,
            queues=queues,
            ends=ends,
            disk=disk,
            delay_path=f"{config.data_dir}/delayOffset.json",
            timing=config.timing,
        )
        if self._ha is not None:
            self._ha.before_cut = dispatcher.pause
            self._ha.after_cut = dispatcher.resume

    def follow(self) -> None:
        """Everything is recovered: copy the master's log from now on."""
        if self._ha is not None and self._ha.client is not None:
            if not self._config.name_servers:
                logger.warning(
                    "without name_servers nobody says where the master serves clients: only its log is copied, none of"
                    " its topics, consumer offsets and subscription groups"
                )
            self._ha.client.start()

    def registered(self, fields: Mapping[str, str]) -> None:
        """A name server has answered a registration. If it knows no master, because it has just started or does not
        hear from the master, the slave keeps the one that it has (R)."""
        if self._ledger.member_state.is_leader:
            return
        self.master_address = fields.get("masterAddr", "") or self.master_address
        if self._ha is not None and fields.get("haServerAddr"):
            self._ha.master_is_at(self._dialled(fields["haServerAddr"]))

    def role_changed(self, is_master: bool) -> None:
        """The broker's role has changed, or was found to be the same."""
        self.master_address = ""
        if is_master:
            self.synchronize.stop()
        else:
            self.synchronize.start()

    def stop(self) -> None:
        """Stop copying tables."""
        self.synchronize.stop()

    def broker_id(self, is_master: bool) -> int:
        """0 while master, otherwise the slave's number. In classic HA the role never changes (R)."""
        is_master = is_master if self._ha is None else self._ha.client is None
        return 0 if is_master else self._config.slave_broker_id

    @property
    def ha_address(self) -> str:
        """The advertised address at which this master accepts slaves; "" if it does not."""
        service = self._ha.service if self._ha is not None else None
        if service is None:
            return ""
        host, _ = split_address(self._config.advertise)
        return f"[{host}]:{service.port}" if ":" in host else f"{host}:{service.port}"

    @property
    def role(self) -> str:
        """The role as named in the configuration; "" if that names none."""
        return self._ha.ha.role if self._ha is not None else ""

    def status(self) -> dict[str, Any]:
        """For the runtime table."""
        table: dict[str, Any] = {
            "masterAddress": self.master_address,
            "slaveSyncTotal": self.synchronize.rounds_total,
        }
        if isinstance(self._ledger, DLedgerServer):  # the members as this one knows them, and the entry with them
            members = self._ledger.member_state.members
            table |= {"members": ",".join(members.ids), "membersIndex": members.index}
            writer, dispatchers = self._ledger.store.writer, self._ledger.pusher.dispatchers.values()
            table |= {
                "logFlushTotal": writer.group_total,
                "logPushTotal": sum(each.push_total for each in dispatchers),
                "logPushedTotal": sum(each.entry_total for each in dispatchers),
            }
        elif isinstance(self._ledger, ClassicLedger):
            table["logFlushTotal"] = self._ledger.log.flushes
        return table | (self._ha.status() if self._ha is not None else {})

    def _dialled(self, address: str) -> str:
        return self._config.dial.get(address, address)

    def _dialled_master(self) -> str:
        """The master's address for clients, as this node dials it; "" while it is this node or unknown."""
        state = self._ledger.member_state
        if state.is_leader:
            return ""
        known = self._config.client_addresses.get(state.leader_id or "", "") or self.master_address
        return self._dialled(known) if known != self._config.advertise else ""

    def _is_copy(self) -> bool:
        client = self._ha.client if self._ha is not None else None
        return client is not None and client.state == "FOLLOWING"
