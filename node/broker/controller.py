"""The broker: a replicated log, consume queues derived from it, and a server for clients.

Wiring only. Each mechanism has its own module; this one creates the parts, starts them in an order in which each
finds what it needs, and stops them in the reverse order.

Start: the client port is opened first (a port in use is found before any file is touched) and answers
SERVICE_NOT_AVAILABLE until the parts behind it are ready. Then the log recovers and joins its group, the queues are
restored and dispatch begins, the role handler and the registrations start.

Stop: no more messages are accepted, name servers are told, messages under way get a moment to be committed, the
clients' connections are closed, queues and log are flushed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import node
from node.broker.acl import AccessControl, own_signature
from node.broker.admin import AdminProcessor
from node.broker.assignments import Assignments
from node.broker.broker_snapshots import BrokerSnapshots
from node.broker.classic import ClassicLedger
from node.broker.client_manager import ClientManager
from node.broker.client_processor import ClientProcessor
from node.broker.client_tools import ClientTools
from node.broker.consumer_offsets import ConsumerOffsets
from node.broker.delay import DelayProgress, DelayService
from node.broker.disk_watch import DiskWatch
from node.broker.dispatcher import Dispatcher, Queue
from node.broker.group_tools import GroupTools
from node.broker.internal_topics import REVIVE_PREFIX, SCHEDULE_TOPIC, named_topics
from node.broker.ledger import Ledger
from node.broker.live_settings import LiveSettings
from node.broker.log_expiry import new_log_expiry
from node.broker.memory_window import MemoryWindow
from node.broker.message_store import MessageStore
from node.broker.metrics import MetricsServer, render
from node.broker.new_ledger import new_ledger
from node.broker.pop import PopProcessor
from node.broker.pop_acks import PopAckProcessor
from node.broker.pop_checkpoints import OpenCheckpoints, ReviveLog
from node.broker.pop_revive import PopRevival
from node.broker.ports import PULL_CODES, Ports
from node.broker.pull import PullHolds, PullProcessor
from node.broker.query import QueryProcessor
from node.broker.query_context import QueryContext
from node.broker.queue_ends import QueueEnds
from node.broker.reads import ReadGate
from node.broker.rebalance_locks import RebalanceLocks
from node.broker.registration import Identity, NameServerRegistrar, registration_body
from node.broker.reply_messages import ReplyMessageProcessor
from node.broker.role import RoleChangeHandler
from node.broker.send import VARIABLE_FIELDS, SendProcessor
from node.broker.send_back import RetryTopics, SendBackProcessor
from node.broker.send_hooks import SendHooks
from node.broker.slave import SlaveSide, read_mode_of
from node.broker.subscription_groups import SubscriptionGroups
from node.broker.timers import OpenTimers, TimerService
from node.broker.tool_status import settings_of, tool_status
from node.broker.topics import TopicTable
from node.broker.transactions import EndTransactionProcessor, OpenTransactions, TransactionChecks
from node.config import BrokerConfig, split_address
from node.remoting import Command, Connection, RemotingClient, RequestCode, ResponseCode
from node.runtime import Runtime
from node.store.index_file import MessageIndex
from node.store.queue_store import QueueStore

__all__ = ["BrokerController"]

logger = logging.getLogger("node.broker")

REGISTER_INTERVAL_S: Mapping[str, float] = {"default": 30.0, "fast": 1.0}
"""Time between two registrations at a name server, by timing profile (R: 30 s)."""
DRAIN_TIMEOUT_S = 3.0
"""How long a shutdown waits for messages under way: a little more than the log waits for its quorum (2.5 s)."""


class BrokerController:
    """One broker process. `make_ledger` creates its log; the default, `new_ledger`, goes by the configuration."""

    def __init__(
        self,
        config: BrokerConfig,
        runtime: Runtime,
        *,
        make_ledger: Callable[[BrokerConfig, Runtime], Ledger] | None = None,
    ) -> None:
        self.config = config
        self._runtime = runtime
        self.ledger: Ledger = (make_ledger or new_ledger)(config, runtime)
        self._access = AccessControl(config.acl) if config.acl is not None else None
        self._server = Ports(config, guard=self._access.check if self._access is not None else None)
        self._client = RemotingClient(
            name="broker",
            tls=config.tls.dialling_context() if config.tls else None,
            sign=own_signature(config.acl),
        )
        self.topics = TopicTable(
            runtime.disk,
            f"{config.data_dir}/topics.json",
            config.topics,
            named=named_topics(config.cluster_name, config.broker_name),
        )
        self.offsets = ConsumerOffsets(
            runtime.disk, f"{config.data_dir}/consumerOffset.json", lambda: self.topics.table
        )
        self.groups = SubscriptionGroups(runtime.disk, f"{config.data_dir}/subscriptionGroup.json")
        self.clients = ClientManager(may_notify=self.groups.may_notify)
        self.send_hooks = SendHooks()
        """Called around every send; add to it before clients connect."""
        self._boot_ms = runtime.clock.wall_ms()
        self._live = LiveSettings(config, disk=runtime.disk, clock=runtime.clock, apply=self._configure)
        self._assemble_store()
        self._assemble_role()
        self._assemble_services()
        self.metrics = MetricsServer(config.metrics_listen, self._metrics) if config.metrics_listen else None
        self.expiry = new_log_expiry(self.ledger, self.dispatcher, config, runtime.clock, self._log_removed)
        self._group_makers: tuple[RetryTopics | ClientProcessor, ...] = (self._retries,)
        self._removals: list[asyncio.Task[None]] = []
        self._started = False

    def _assemble_store(self) -> None:
        """The log's store, and what is derived from the log."""
        config, runtime = self.config, self._runtime
        self.queues = QueueStore(
            runtime.disk, f"{config.data_dir}/consumequeue", units_per_file=config.limits.queue_file_units
        )
        self.queues.is_deleted = lambda topic: self.topics.get(topic) is None
        self._holds = PullHolds(max_held=config.limits.max_held_pulls)
        self.delay_progress = DelayProgress()
        self.open_timers = OpenTimers()
        self.checkpoints = OpenCheckpoints()
        self.transactions = OpenTransactions(timeout_ms=config.transactions.timeout_s * 1000)
        self.index = MessageIndex(
            runtime.disk,
            f"{config.data_dir}/index",
            slots=config.limits.index_slots,
            entries=config.limits.index_entries,
        )
        self.snapshots = BrokerSnapshots(self.ledger, self.queues)
        self._queue_ends = QueueEnds(runtime.disk, f"{config.data_dir}/queueEnds.json", self.queues, self.ledger.store)
        self.dispatcher = Dispatcher(
            self.ledger.store,
            self.queues,
            on_arrival=self._messages_arrived,
            derivations=self.snapshots.derivations(
                self._queue_ends,
                delay=self.delay_progress,
                timers=self.open_timers,
                pop=self.checkpoints,
                transactions=self.transactions,
                index=self.index,
            ),
            index_timestamp_ms=lambda: self.index.last_update[0],
            read_batches=self.ledger.store.read_committed,
        )
        self._disk_watch = DiskWatch(
            runtime.disk,
            config.data_dir,
            full_percent=config.limits.disk_full_percent,
            counters=lambda: (self.store.put_total, self._pulls.get_total),
        )
        self.store = MessageStore(
            ledger=self.ledger,
            queues=self.queues,
            clock=runtime.clock,
            is_disk_full=lambda: self._disk_watch.is_full,
            pending=self.dispatcher.pending,
            least_ends=self._least_ends,
        )
        self._memory = MemoryWindow(
            self.ledger.store, memory_bytes=runtime.memory_bytes, percent=config.limits.in_memory_percent
        )
        self.snapshots.attach(self.dispatcher, self.topics, self.offsets, self.groups)

    def _assemble_role(self) -> None:
        """The parts that follow the role: registration, and what a slave copies."""
        config = self.config
        self._roles = RoleChangeHandler(
            ledger=self.ledger, dispatcher=self.dispatcher, store=self.store, on_changed=self._role_changed
        )
        self._registrar = NameServerRegistrar(
            client=self._client,
            name_servers=config.name_servers,
            interval_s=REGISTER_INTERVAL_S[config.timing],
            describe=self._registration,
            on_registered=lambda fields: self.slave.registered(fields),
        )
        self.slave = SlaveSide(
            config=config,
            ledger=self.ledger,
            dispatcher=self.dispatcher,
            client=self._client,
            topics=self.topics,
            offsets=self.offsets,
            groups=self.groups,
            queues=self.queues,
            ends=self._queue_ends,
            disk=self._runtime.disk,
            register_again=self._registrar.announce,
        )

    def _assemble_services(self) -> None:
        """The services that deliver and check messages and answer reads."""
        config, runtime = self.config, self._runtime
        self.delays = DelayService(
            store=self.store,
            queues=self.queues,
            log=self.ledger.store,
            progress=self.delay_progress,
            clock=runtime.clock,
            store_host=lambda: self.address,
        )
        self.timers = TimerService(
            store=self.store,
            log=self.ledger.store,
            timers=self.open_timers,
            clock=runtime.clock,
            store_host=lambda: self.address,
        )
        self._gate = ReadGate(
            ledger=self.ledger,
            dispatcher=self.dispatcher,
            mode=read_mode_of(config),
            not_leader_remark=self.not_leader_remark,
        )
        self._checks = TransactionChecks(
            ledger=self.ledger,
            store=self.store,
            clients=self.clients,
            transactions=self.transactions,
            clock=runtime.clock,
            config=config.transactions,
            store_host=lambda: self.address,
            may_ask=self._access.may_be_asked if self._access is not None else None,
        )
        self._pulls = PullProcessor(
            gate=self._gate,
            log=self.ledger.store,
            queues=self.queues,
            topics=self.topics,
            holds=self._holds,
            groups=self.groups,
            clients=self.clients,
            offsets=self.offsets,
            memory=self._memory,
            put_total=lambda: self.store.put_total,
            auto_create_groups=config.auto_create_groups,
            slave_read_enable=config.slave_read_enable,
            is_slave=config.ha is not None and config.ha.is_slave,
        )
        self._pulls.configure(config)
        self._assemble_pop()
        self._masters_services = (self.delays, self.timers, self.revival, self._checks, self._pops)

    def _assemble_pop(self) -> None:
        """The parts that serve consumers of RocketMQ 5."""
        config, runtime = self.config, self._runtime
        self._retries = RetryTopics(
            topics=self.topics,
            groups=self.groups,
            auto_create_groups=config.auto_create_groups,
            on_topics_changed=self._registrar.announce,
        )
        revive_log = ReviveLog(REVIVE_PREFIX + config.cluster_name, config.broker_name, lambda: self.address)
        self.revival = PopRevival(
            store=self.store,
            log=self.ledger.store,
            checkpoints=self.checkpoints,
            revive_log=revive_log,
            retries=self._retries,
            store_host=lambda: self.address,
        )
        self._pops = PopProcessor(
            store=self.store,
            pulls=self._pulls,
            gate=self._gate,
            topics=self.topics,
            holds=self._holds,
            offsets=self.offsets,
            memory=self._memory,
            checkpoints=self.checkpoints,
            revive_log=revive_log,
            runtime=runtime,
        )
        self._pop_acks = PopAckProcessor(
            store=self.store,
            log=self.ledger.store,
            dispatcher=self.dispatcher,
            topics=self.topics,
            holds=self._holds,
            checkpoints=self.checkpoints,
            revive_log=revive_log,
            revival=self.revival,
            pops=self._pops,
            not_leader_remark=self.not_leader_remark,
        )
        self._assignments = Assignments(
            disk=runtime.disk,
            path=f"{config.data_dir}/messageRequestMode.json",
            broker_name=config.broker_name,
            name_servers=config.name_servers,
            client=self._client,
            topics=self.topics,
            clients=self.clients,
        )

    @property
    def port(self) -> int:
        """The port that clients use; known once started."""
        return self._server.port

    @property
    def fast_port(self) -> int | None:
        """The port for clients that send over the VIP channel; None without one."""
        return self._server.fast_port

    @property
    def address(self) -> str:
        """The address under which clients find this broker: as advertised, or where it listens."""
        host, port = split_address(self.config.advertise)
        if port == 0:
            port = self._server.port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        """Start everything; the broker answers clients on return, though it may not be master yet.

        Raises OSError (address in use, data directory not usable), ValueError (a damaged topic table), and
        what the log raises when it is damaged. Whatever was started is stopped again.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._server.register_default(self._not_ready)
        await self._server.start()
        if self.metrics is not None:
            await self.metrics.start()
        self._runtime.disk.make_dirs(self.config.data_dir)
        # The previous process may have replaced a table and been killed before its name was synced: sync it now.
        await self._runtime.disk.sync_dir(self.config.data_dir)
        self._disk_watch.start()
        self._live.load()
        self.topics.load()
        self.groups.load()
        self.offsets.load()
        self._assignments.load()
        self.ledger.add_commit_listener(self.dispatcher.notify)
        if isinstance(self.ledger, ClassicLedger):
            self.ledger.before_removed = self._keep_queue_ends
            self.ledger.on_removed = self._log_removed
        await self.ledger.start()
        await self.dispatcher.start()
        if isinstance(self.ledger, ClassicLedger):
            self._log_removed(self.ledger.store.ledger_begin_index)  # the last process may have ended between removals
        if self.expiry is not None:
            self.expiry.start()
        self.slave.follow()
        self._register_processors()
        self._roles.start()
        self._registrar.start()
        self._started = True

    def _configure(self, config: BrokerConfig) -> None:
        """Apply another configuration; LiveSettings says what may change in it."""
        self.config = config
        self._pulls.configure(config)
        self._memory.set_percent(config.limits.in_memory_percent)
        self._checks.configure(config.transactions)
        for processor in self._group_makers:
            processor.auto_create_groups = config.auto_create_groups
        if self._started:
            self._sends.configure(config, self.transactions)
            self._registrar.announce()

    def _register_processors(self) -> None:
        send_back = SendBackProcessor(
            store=self.store,
            log=self.ledger.store,
            retries=self._retries,
            runtime=self._runtime,
            store_host=self.address,
            not_leader_remark=self.not_leader_remark,
            check_read=self._access.check_read if self._access is not None else None,
        )
        end_transaction = EndTransactionProcessor(
            ledger=self.ledger,
            store=self.store,
            dispatcher=self.dispatcher,
            transactions=self.transactions,
            store_host=lambda: self.address,
            not_leader_remark=self.not_leader_remark,
            check_write=self._access.check_write if self._access is not None else None,
        )
        self._sends = self._send_processor(self._retries)
        self._sends.configure(self.config, self.transactions)
        context = QueryContext(
            gate=self._gate,
            log=self.ledger.store,
            queues=self.queues,
            topics=self.topics,
            offsets=self.offsets,
            clients=self.clients,
            broker_name=self.config.broker_name,
        )
        admin = AdminProcessor(
            context,
            describe=self._status,
            settings=lambda: settings_of(self.config, self.runtime_table()),
            live=self._live,
            on_topics_changed=self._registrar.announce,
        )
        server = self._server
        for code, variable in VARIABLE_FIELDS.items():
            server.register(code, self._sends.process)
            server.register_template(code, variable, self._sends.process_together)
        server.register(RequestCode.CONSUMER_SEND_MSG_BACK, send_back.process)
        server.register(RequestCode.END_TRANSACTION, end_transaction.process)
        for code in PULL_CODES:
            server.register(code, self._pulls.process)
        queries = QueryProcessor(gate=self._gate, log=self.ledger.store, queues=self.queues, index=self.index)
        server.register(RequestCode.QUERY_MESSAGE, queries.by_key)
        server.register(RequestCode.VIEW_MESSAGE_BY_ID, queries.by_id)
        server.register(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queries.by_time)
        client_processor = ClientProcessor(
            context,
            groups=self.groups,
            locks=RebalanceLocks(asyncio.get_running_loop().time),
            memory=self._memory,
            delay_offsets=self.delay_progress.document,
            on_topics_changed=self._registrar.announce,
            auto_create_groups=self.config.auto_create_groups,
        )
        self._group_makers = (self._retries, client_processor)
        groups = GroupTools(context, rates=self._pulls.rates, clock=self._runtime.clock, address=lambda: self.address)
        replies = ReplyMessageProcessor(self._sends, self.clients, self._runtime.clock, address=lambda: self.address)
        server.register(RequestCode.POP_MESSAGE, self._pops.process)
        parts = (client_processor, admin, groups, ClientTools(context), replies, self._pop_acks, self._assignments)
        for part in parts:
            for tool_code, processor in part.processors().items():
                server.register(tool_code, processor)
        server.register_default(self._not_supported)

    def _send_processor(self, retries: RetryTopics) -> SendProcessor:
        return SendProcessor(
            store=self.store,
            topics=self.topics,
            runtime=self._runtime,
            store_host=self.address,
            max_message_size_bytes=self.config.limits.max_message_size_bytes,
            not_leader_remark=self.not_leader_remark,
            retries=retries,
            timers=self.open_timers,
            hooks=self.send_hooks,
            honours_wait=isinstance(self.ledger, ClassicLedger),
            transactions=None if self.config.transactions.reject else self.transactions,
            auto_create_topics=self.config.auto_create_topics,
            on_topics_changed=self._registrar.announce,
            cluster_name=self.config.cluster_name,
            region_id=self.config.region_id,
            trace_on=self.config.trace_on,
            accept_from_ms=self.config.start_accept_send_timestamp_ms,
        )

    def _not_ready(self, command: Command, connection: Connection) -> Command:
        return command.reply(ResponseCode.SERVICE_NOT_AVAILABLE, remark="the broker is starting")

    def _not_supported(self, command: Command, connection: Connection) -> Command:
        return command.reply(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"request code {command.code} is not supported"
        )

    async def stop(self) -> None:
        """Shut down in order, losing nothing that was acknowledged. Idempotent."""
        self._holds.close()
        self._disk_watch.stop()
        for service in self._masters_services:
            service.stop()
        self.slave.stop()
        await self._roles.stop()
        await self._registrar.stop()
        if self._started:
            self._started = False
            await self._sends.drain(DRAIN_TIMEOUT_S)
        self.clients.stop()
        await self._server.stop()
        if self.metrics is not None:
            await self.metrics.stop()
        await self._client.close()
        await self.offsets.stop()
        await self.groups.stop()
        await self._assignments.stop()
        if self.expiry is not None:
            await self.expiry.stop()
        await asyncio.gather(*self._removals, return_exceptions=True)
        await self.dispatcher.stop()
        self.index.close()
        await self.ledger.stop()

    async def wait_failed(self) -> str:
        """Wait until the broker cannot go on serving; returns why, in one line that names what was found."""
        await self.dispatcher.failed.wait()
        return f"the commit log below {self.config.data_dir} is damaged: {self.dispatcher.failure}"

    async def _keep_queue_ends(self, position: int) -> bool:
        """Save the ends of queues before files of the log are removed. False if one of these is not dispatched yet."""
        if self.dispatcher.dispatched_index < position - 1:
            return False
        await self._queue_ends.save()
        return True

    def _end_of_queue(self, topic: str, queue_id: int) -> int:
        queue = self.queues.find(topic, queue_id)
        return queue.max_offset if queue is not None else 0

    def _least_ends(self) -> Mapping[Queue, int]:
        """Lower bounds of the ends of queues, from what the log says of their messages. Needed if it holds none of them
        and nobody has reported the ends: a new message under a number already delivered would never be delivered."""
        ends = {(SCHEDULE_TOPIC, level - 1): end for level, end in enumerate(self.delay_progress.delivered) if end}
        for (_, topic, queue_id), end in self.checkpoints.next_offsets.items():
            ends[topic, queue_id] = max(end, ends.get((topic, queue_id), 0))
        return ends

    def _log_removed(self, begin_position: int) -> None:
        """Files of the log are being removed, or are gone: remove what points into them."""
        self.dispatcher.trim(begin_position)
        self.index.begin_at(begin_position)
        self._removals.append(asyncio.get_running_loop().create_task(self._remove_from_index(begin_position)))
        self._removals = [task for task in self._removals if not task.done()]

    async def _remove_from_index(self, begin_position: int) -> None:
        try:
            await self.index.remove_before(begin_position)
        except OSError as error:  # tried again when the next files of the log are removed, and at a restart
            logger.warning("old files of the index could not be removed: %s", error)

    def _messages_arrived(self, queues: Iterable[Queue]) -> None:
        self._holds.wake(queues)
        for topic, queue_id in queues:
            if topic == SCHEDULE_TOPIC:
                self.delays.arrived(queue_id)

    def _role_changed(self) -> None:
        self.slave.role_changed(self.store.is_master)
        if self.store.is_master:
            if isinstance(self.ledger, ClassicLedger):
                self.offsets.keep_within(self._end_of_queue)
            for service in self._masters_services:
                service.start()
        else:
            for service in self._masters_services:
                service.stop()
            self._holds.wake_all()
        self._registrar.announce()

    @property
    def broker_id(self) -> int:
        """The broker id under which name servers know this broker now."""
        return self.slave.broker_id(self.store.is_master)

    def not_leader_remark(self) -> str:
        """ "NOT_LEADER leader=ID addr=ADDRESS" for a request that only the leader may answer; "-" is unknown."""
        state = self.ledger.member_state
        leader = state.leader_id
        if leader == self.config.self_id:
            return f"NOT_READY leader={leader} addr={self.address}"
        address = self.config.client_addresses.get(leader) if leader else self.slave.master_address
        return f"NOT_LEADER leader={leader or '-'} addr={address or '-'}"

    def _registration(self) -> tuple[Identity, bytes]:
        fields: Identity = {
            "brokerName": self.config.broker_name,
            "brokerAddr": self.address,
            "clusterName": self.config.cluster_name,
            "haServerAddr": self.slave.ha_address,
            "brokerId": self.broker_id,
            "dledgerTerm": self.ledger.member_state.term,
        }
        config = self.config
        topics = self.topics.announced(auto_create=config.auto_create_topics, permission=config.broker_permission)
        version = self.topics.data_version + self._live.version["counter"]
        return fields, registration_body(topics, version, started_ms=self._boot_ms)

    def _metrics(self) -> bytes:
        return render(self.runtime_table(), self.store.put_times, self.store.topic_puts())

    def _status(self) -> dict[str, object]:
        table = self.runtime_table()
        return table | tool_status(
            table,
            self._disk_watch,
            self.ledger.store,
            boot_ms=self._boot_ms,
            accept_from_ms=self.config.start_accept_send_timestamp_ms,
        )

    def runtime_table(self) -> dict[str, object]:
        """This node's state at this moment, for code 28."""
        config, log, state, clock = self.config, self.ledger.store, self.ledger.member_state, self._runtime.clock
        return {
            "selfId": config.self_id,
            "group": config.group,
            "brokerName": config.broker_name,
            "clusterName": config.cluster_name,
            "brokerId": self.broker_id,
            "brokerRole": self.slave.role or ("SYNC_MASTER" if self.store.is_master else "SLAVE"),
            "takesWrites": self.store.is_master,
            "role": state.role.name,
            "term": state.term,
            "leaderId": state.leader_id or "",
            "ledgerBeginIndex": log.ledger_begin_index,
            "ledgerEndIndex": log.ledger_end_index,
            "committedIndex": log.committed_index,
            "committedPos": log.committed_pos,
            "dispatchedIndex": self.dispatcher.dispatched_index,
            "dispatchRepeated": self.dispatcher.repeated_total,
            "dispatchFailure": str(self.dispatcher.failure or ""),
            "wallClockMs": clock.wall_ms(),
            "monotonicNs": clock.monotonic_ns(),
            "readMode": config.read_mode,
            "flushMode": config.flush_mode,
            "timing": config.timing,
            "version": node.__version__,
            "putTotal": self.store.put_total,
            "putCommittedTotal": self.store.committed_total,
            "putMaxSeconds": round(self.store.put_times.max_s, 6),
            "putSlowTotal": self.store.put_times.slow_total,
            **self._disk_watch.document(),
            "dispatchBehind": log.committed_index - self.dispatcher.dispatched_index,
            "flushBehind": log.ledger_end_index - log.durable_index,
            **self.queues.timestamps.document(),
            "getTotal": self._pulls.get_total,
            "openTransactions": len(self.transactions.halves),
            "transactionChecks": self._checks.checks_total,
            "delayedDelivered": self.delays.delivered_total,
            "openTimers": len(self.open_timers.due_ms),
            "timersDelivered": self.timers.delivered_total,
            "openPopMessages": self.checkpoints.open_messages,
            "popRevived": self.revival.revived_total,
            "heldPulls": self._holds.count,
            "connections": self._server.connection_count,
            "topics": len(self.topics),
            "producers": self.clients.producer_count,
            "consumers": self.clients.consumer_count,
            "subscriptionGroups": len(self.groups),
            "nameServersRegistered": sum(self._registrar.registered.values()),
        } | self.slave.status()
