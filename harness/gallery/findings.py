"""The findings, as data. To add one, add a `Finding` here; nothing else is needed."""

from __future__ import annotations

from collections.abc import Mapping

from harness.gallery.finding import Finding

__all__ = ["FINDINGS"]

_NATS = Finding(
    name="nats-power-loss",
    title="JetStream loses acknowledged messages when all servers lose power at once",
    version="NATS 2.15.1",
    options="--system nats --nodes 3 --workload log --nemesis power=cut@all --nemesis-interval 8 --time-limit 20",
    finding="--set sync=2m",
    control="--set sync=always",
    control_says="with `sync_interval: always` a server syncs before it acknowledges",
    check="log",
    names=("lost",),
    promised="The developer guide says that an acknowledged message has been persisted; the documentation of "
    "`sync_interval` says that files are synced every two minutes by default.",
    reported="Kyle Kingsbury, nats-server #7564 and Jepsen: NATS 2.12.1, December 2025",
    link="https://jepsen.io/analyses/nats-2.12.1",
)

_REDIS = Finding(
    name="redis-failover-loss",
    title="A primary that is cut off acknowledges writes that are lost once a replica has been promoted",
    version="Valkey 9.1.0, a fork of Redis, with Sentinel",
    options="--system redis --nodes 3 --workload set --nemesis partition=leader --nemesis-interval 10 --time-limit 30",
    finding="--set quorum=2",
    control="--set quorum=9",
    control_says="the quorum is larger than the number of Sentinels, so no replica is promoted: one primary takes all "
    "writes, and its replicas follow it again",
    check="set-full",
    names=("lost",),
    promised="The documentation of Sentinel says that acknowledged writes may be lost, since replication is "
    "asynchronous.",
    reported="Kyle Kingsbury, Call me maybe: Redis, May 2013",
    link="https://aphyr.com/posts/283-call-me-maybe-redis",
)

_ETCD_STALE = Finding(
    name="etcd-serializable-reads",
    title="Serializable reads from a member behind a partition are stale",
    version="etcd 3.5.1",
    options="--system etcd --nodes 3 --workload register --nemesis partition --time-limit 40",
    finding="--set read=serializable",
    control="--set read=linearizable",
    control_says="linearizable reads, the default, ask a quorum",
    check="linearizable",
    names=("read",),
    promised="The API documentation says that serializable reads may be stale.",
    reported="Kyle Kingsbury, Jepsen: etcd and Consul, June 2014",
    link="https://aphyr.com/posts/316-jepsen-etcd-and-consul",
)

_ETCD_LOCK = Finding(
    name="etcd-lock-pause",
    title="Data protected by etcd's lock is lost if the lock holder's member is paused for longer than the lease",
    version="etcd 3.5.1",
    options="--system etcd-lock --nodes 3 --workload set --nemesis pause=sigstop@n1 --nemesis-interval 4 "
    "--concurrency 2 --operation-timeout 10 --time-limit 50",
    finding="--set fenced=no",
    control="--set fenced=yes",
    control_says="each write is a transaction that checks that the lock's key still exists, so the late write is "
    "refused",
    check="set-full",
    names=("lost",),
    promised="Since 2020 the documentation says that a lock's lease may expire unnoticed, and that writes should be "
    "transactions that check the lock's key.",
    reported="Jepsen, etcd 3.4.3, January 2020",
    link="https://jepsen.io/analyses/etcd-3.4.3",
)

_ROCKETMQ = Finding(
    name="rocketmq-async-ha-loss",
    title="An ASYNC_MASTER acknowledges messages that no slave has, and they are lost once a slave is promoted",
    version="Apache RocketMQ 4.9.7",
    options="--system rocketmq --nodes 2 --workload log --set workload.polls=eventual --nemesis promote=failover "
    "--nemesis-interval 12 --time-limit 45",
    finding="--set replication=async",
    control="--set replication=sync",
    control_says="a SYNC_MASTER answers SEND_OK only when a slave has the message",
    check="log",
    names=("lost", "divergent"),
    promised="The documentation says that with asynchronous replication slaves lag by milliseconds, and that losing "
    "the master's disk loses some messages; with synchronous double write a message is acknowledged when both have it.",
    reported="Apache RocketMQ's own documentation of its deployments",
    link="https://github.com/apache/rocketmq/blob/develop/docs/en/operation.md",
)

_ROCKETMQ_POWER = Finding(
    name="rocketmq-topics-power-loss",
    title="After a power cut of master and slave the topic table, which was never synced, is empty on both, and no "
    "message can be sent or read any more",
    version="Apache RocketMQ 5.3.3",
    options="--system rocketmq --nodes 2 --workload log --set replication=sync --set workload.polls=eventual "
    "--nemesis power=cut@all --nemesis-interval 12 --time-limit 30",
    finding="--set version=5.3.3",
    control="--set version=5.5.0",
    control_says="5.5.0 syncs the table and its directory before it considers them written",
    check="recovers",
    names=("final operations succeeded", "answered nobody"),
    promised="The features page lists a power cut among the events that lose no message if the flush is synchronous, "
    "as here, and few otherwise.",
    reported="apache/rocketmq #5905, January 2023; fixed by #9706, September 2025",
    link="https://github.com/apache/rocketmq/issues/5905",
)

_KAFKA = Finding(
    name="kafka-acks-1-loss",
    title="A leader that is cut off acknowledges records with acks=1 that are lost once another leader is elected",
    version="Apache Kafka 3.9.1",
    options="--system kafka --nodes 3 --workload log --set workload.polls=eventual --nemesis partition=leader "
    "--nemesis-interval 15 --time-limit 40",
    finding="--set acks=1",
    control="--set acks=all",
    control_says="with acks=all and at least two in-sync replicas required, a leader that is cut off acknowledges "
    "nothing",
    check="log",
    names=("lost", "divergent"),
    promised="The producer documentation says that with acks=1 a record is lost if the leader fails immediately after "
    "acknowledging it and before its followers have it.",
    reported="Kyle Kingsbury, Jepsen: Kafka, September 2013",
    link="https://aphyr.com/posts/293-jepsen-kafka",
)

_ZOOKEEPER = Finding(
    name="zookeeper-local-reads",
    title="A server behind a partition answers reads from its own, stale state",
    version="ZooKeeper 3.9.3",
    options="--system zookeeper --nodes 3 --workload register --nemesis partition=one --nemesis-interval 3 --rate 1000 "
    "--time-limit 40",
    finding="--set reads=local",
    control="--set reads=quorum",
    control_says="before each read the client has a write committed, which needs a leader with a quorum",
    check="linearizable",
    names=("read",),
    promised="The programmer's guide says that different clients do not always see the same data at the same time, and "
    "that a client for which that matters should call sync before a read.",
    reported="ZooKeeper's own programmer's guide",
    link="https://zookeeper.apache.org/doc/current/zookeeperProgrammers.html#ch_zkGuarantees",
)

_ZOOKEEPER_SYNC = Finding(
    name="zookeeper-sync-reads",
    title="A leader that was paused and replaced answers sync alone, and then serves stale reads",
    version="ZooKeeper 3.9.3",
    options="--system zookeeper --nodes 3 --workload register --nemesis pause=sigstop@leader --nemesis-interval 6 "
    "--operation-timeout 20 --concurrency 30 --rate 600 --time-limit 30",
    finding="--set reads=sync",
    control="--set reads=quorum",
    control_says="before each read the client has a write committed, which needs a leader with a quorum",
    check="linearizable",
    names=("read",),
    promised="The programmer's guide says to call sync before a read if a client must see what others have written; "
    "the internals page says that reads are not linearizable.",
    reported="ZOOKEEPER-1675, which asks for sync to be a quorum operation",
    link="https://issues.apache.org/jira/browse/ZOOKEEPER-1675",
)

_ZOOKEEPER_SNAPSHOT = Finding(
    name="zookeeper-empty-snapshot",
    title="A server does not restart after a power cut emptied its first snapshot, which was never synced",
    version="ZooKeeper 3.9.3",
    options="--system zookeeper --nodes 3 --workload register --nemesis power=cut@majority --nemesis-interval 8 "
    "--time-limit 20",
    finding="--set trust_empty_snapshot=false",
    control="--set trust_empty_snapshot=true",
    control_says="with `zookeeper.snapshot.trust.empty` a server accepts an empty snapshot as empty state, and replays "
    "its log, which was synced",
    check="recovers",
    names=("not recovered after", "not back after"),
    promised="The administrator's guide says that the service is available while a majority is, and that failed "
    "servers may be restarted; it describes the property as meant for upgrades.",
    reported="seen here; ZOOKEEPER-2325 added the check that refuses to start, ZOOKEEPER-3056 the workaround",
    link="https://issues.apache.org/jira/browse/ZOOKEEPER-2325",
)

_POSTGRES_G2 = Finding(
    name="postgres-12-g2-item",
    title="Transactions under SERIALIZABLE have no serial order, without any fault",
    version="PostgreSQL 12.2",
    options="--system postgres --nodes 1 --workload list-append --nemesis none --concurrency 20 --rate 2000 "
    "--set workload.keys=10 --set workload.writes_per_key=4 --set workload.isolation=serializable --time-limit 40",
    finding="--set version=12.2",
    control="--set version=12.6",
    control_says="12.4 and later detect the conflict of an upsert with a row that changed meanwhile",
    check="isolation",
    names=("G2-item", "G2", "G-single", "lost-update"),
    promised="The documentation says that SERIALIZABLE has the same effect as running all transactions one at a time "
    "in some order.",
    reported="Kyle Kingsbury, Jepsen: PostgreSQL 12.3, June 2020",
    link="https://jepsen.io/analyses/postgresql-12.3",
)

_POSTGRES_COMMIT = Finding(
    name="postgres-synchronous-commit-off",
    title="Transactions that were acknowledged before they were on disk are lost in a power cut",
    version="PostgreSQL 17.5",
    options="--system postgres --nodes 1 --workload set --nemesis power=crash --time-limit 30",
    finding="--set synchronous_commit=off",
    control="--set synchronous_commit=on",
    control_says="with `synchronous_commit = on`, the default, a commit is on disk before it is acknowledged",
    check="set-full",
    names=("lost",),
    promised="The documentation says that with `synchronous_commit = off` transactions that were reported as committed "
    "may be lost in a crash.",
    reported="PostgreSQL's own documentation of asynchronous commit",
    link="https://www.postgresql.org/docs/17/wal-async-commit.html",
)

_POSTGRES_SKEW = Finding(
    name="postgres-write-skew",
    title="Two transactions under REPEATABLE READ each find no row of a key, and both insert one, without any fault",
    version="PostgreSQL 17.5",
    options="--system postgres --nodes 1 --workload write-skew --nemesis none --time-limit 20",
    finding="--set 'isolation=repeatable read'",
    control="--set isolation=serializable",
    control_says="SERIALIZABLE tracks what each transaction read by predicate, and aborts one of the two",
    check="write-skew",
    names=("write-skew",),
    promised="The documentation says that REPEATABLE READ is implemented as snapshot isolation, under which "
    "serialization anomalies are possible.",
    reported="PostgreSQL's own documentation of transaction isolation; the anomaly: Berenson and others, A Critique of "
    "ANSI SQL Isolation Levels, June 1995",
    link="https://www.postgresql.org/docs/17/transaction-iso.html",
)

_RABBITMQ = Finding(
    name="rabbitmq-autoheal-loss",
    title="Confirmed messages of a mirrored queue are lost when RabbitMQ's autoheal resolves a partition",
    version="RabbitMQ 3.10 (of Debian 12)",
    options="--system rabbitmq --nodes 3 --workload queue --set workload.dequeues=20 --nemesis partition=leader "
    "--nemesis-interval 10 --time-limit 29 --rate 40",
    finding="--set queue=mirrored --set partitions=autoheal",
    control="--set queue=quorum",
    control_says="a quorum queue, which uses Raft, confirms only what a majority of its members has",
    check="total-queue",
    names=("lost",),
    promised="The guide to confirms says that a persistent message is confirmed once all mirrors have accepted it. The "
    "guide to partitions recommends autoheal if continuity of service matters more than consistency.",
    reported="Kyle Kingsbury, Jepsen: RabbitMQ, June 2014",
    link="https://aphyr.com/posts/315-jepsen-rabbitmq",
)

_REDIS_POWER = Finding(
    name="redis-power-loss",
    title="Redis loses the last second of acknowledged writes when its primary loses power",
    version="Valkey 9.1.0, a fork of Redis, with Sentinel",
    options="--system redis --nodes 3 --workload set --set quorum=9 --nemesis power=cut@leader --time-limit 20",
    finding="--set fsync=everysec",
    control="--set fsync=always",
    control_says="with `appendfsync always` a write is synced before it is acknowledged",
    check="set-full",
    names=("lost",),
    promised="The documentation of persistence says that with `appendfsync everysec`, the default, a second of writes "
    "may be lost in a disaster.",
    reported="The documentation of Redis, Redis persistence",
    link="https://redis.io/docs/latest/operate/oss_and_stack/management/persistence/",
)

_GALERA = "https://jepsen.io/blog/2026-03-16-mariadb-galera-cluster-12.1.2"

_MARIADB_UPDATE = Finding(
    name="mariadb-lost-update",
    title="Galera loses updates when transactions run on several hosts, without any fault",
    version="MariaDB 10.11 with Galera 26.4, of Debian 12",
    options="--system mariadb --nodes 3 --workload list-append --set workload.isolation=snapshot-isolation "
    "--time-limit 20",
    finding="--set writes=own --set isolation=repeatable-read",
    control="--set writes=first --set isolation=serializable",
    control_says="all transactions go to one host, which locks what they read",
    check="isolation",
    names=("lost-update", "G-single"),
    promised="The documentation said that the isolation of a cluster is between Serializable and Repeatable Read.",
    reported="Kyle Kingsbury, Jepsen: MariaDB Galera Cluster 12.1.2, March 2026",
    link=_GALERA,
)

_MARIADB_SKEW = Finding(
    name="mariadb-write-skew",
    title="Two transactions under SERIALIZABLE on two hosts of Galera each find no row of a key, and both insert one",
    version="MariaDB 10.11 with Galera 26.4, of Debian 12",
    options="--system mariadb --nodes 3 --workload write-skew --nemesis none --time-limit 15 "
    "--set isolation=serializable",
    finding="--set writes=own",
    control="--set writes=first",
    control_says="all transactions go to one host, which locks what they read",
    check="write-skew",
    names=("write-skew",),
    promised="The documentation said that the isolation of a cluster is between Serializable and Repeatable Read.",
    reported="Kyle Kingsbury, galera #336, on transactions under SERIALIZABLE without even snapshot isolation, "
    "September 2015",
    link="https://github.com/codership/galera/issues/336",
)

_MARIADB_CRASH = Finding(
    name="mariadb-crash-loss",
    title="Galera loses committed transactions when all hosts crash at once",
    version="MariaDB 10.11 with Galera 26.4, of Debian 12",
    options="--system mariadb --nodes 3 --workload set --nemesis kill=sigkill@all --nemesis-interval 8 --time-limit 30",
    finding="--set flush=0",
    control="--set flush=1",
    control_says="with `innodb_flush_log_at_trx_commit=1`, MariaDB's default, a host syncs before it acknowledges",
    check="set-full",
    names=("lost",),
    promised="The documentation said that no transactions are lost, and recommended "
    "`innodb_flush_log_at_trx_commit=0`.",
    reported="Kyle Kingsbury, Jepsen: MariaDB Galera Cluster 12.1.2, March 2026",
    link=_GALERA,
)

_PATRONI = Finding(
    name="patroni-async-loss",
    title="A primary that is cut off acknowledges transactions until it demotes itself, and they are lost once Patroni "
    "has promoted a standby",
    version="Patroni 4.1.5 with PostgreSQL 18.6 and etcd 3.5.1",
    options="--system patroni --nodes 3 --workload set --nemesis partition=leader --nemesis-interval 25 "
    "--time-limit 60",
    finding="--set synchronous_mode=off",
    control="--set synchronous_mode=strict",
    control_says="with `synchronous_mode_strict` a primary acknowledges only what its synchronous standby has on disk, "
    "and no other standby is promoted",
    check="set-full",
    names=("lost",),
    promised="The documentation of replication modes says that in asynchronous mode the cluster may lose some "
    "committed transactions to stay available.",
    reported="Patroni's own documentation; a test with Jepsen in patroni #3194, October 2024",
    link="https://patroni.readthedocs.io/en/latest/replication_modes.html",
)

_HAZELCAST_LOCK = Finding(
    name="hazelcast-map-lock",
    title="Both sides of a partition grant the same lock of a map",
    version="Hazelcast 5.3.8",
    options="--system hazelcast --nodes 3 --workload mutex --set workload.locks=20 --set workload.hold_ms=100 "
    "--nemesis partition=halves --nemesis-interval 12 --time-limit 25",
    finding="--set structure=ap",
    control="--set structure=cp",
    control_says="a `FencedLock` of the CP subsystem is held by a session that a majority of its members knows",
    check="exclusion",
    names=("overlapping",),
    promised="The API documentation of `IMap` says that during a split each side continues with its own copy, and that "
    "split-brain protection reduces the window of inconsistency without eliminating it.",
    reported="Jepsen: Hazelcast 3.8.3, October 2017, of a lock that no longer exists",
    link="https://jepsen.io/analyses/hazelcast-3-8-3",
)

_HAZELCAST_RETRY = Finding(
    name="hazelcast-repeated-additions",
    title="An addition to a linearizable number is applied twice if its answer is lost between two members",
    version="Hazelcast 5.3.8",
    options="--system hazelcast --nodes 3 --workload fetch-and-add --nemesis partition=n2+n3>n1 --nemesis-interval 8 "
    "--operation-timeout 25 --concurrency 30 --rate 300 --time-limit 33",
    finding="--set indeterminate=retry",
    control="--set indeterminate=fail",
    control_says="with `fail-on-indeterminate-operation-state` a member reports an unknown outcome and does not repeat "
    "the operation",
    check="linearizable",
    names=("is not possible",),
    promised="The API documentation calls the CP subsystem linearizable, and says that by default its operations are "
    "executed at least once.",
    reported="Hazelcast's own documentation of `fail-on-indeterminate-operation-state`",
    link="https://docs.hazelcast.org/docs/5.3.8/javadoc/com/hazelcast/config/cp/CPSubsystemConfig.html",
)

_TARANTOOL_READ = Finding(
    name="tarantool-dirty-reads",
    title="A primary without a quorum returns values that it rolls back later",
    version="Tarantool 2.6.0",
    options="--system tarantool --nodes 3 --workload cas-register --nemesis partition=leader --time-limit 30",
    finding="--set reads=primary",
    control="--set reads=confirmed",
    control_says="each read writes a row in its own transaction, which is confirmed only after all that it has seen",
    check="linearizable",
    names=("is not possible", "must come before"),
    promised="The documentation says that a synchronous transaction is not considered committed until it is replicated "
    "onto some number of replicas.",
    reported="tarantool/tarantool #5229, August 2020, of reads on a replica",
    link="https://github.com/tarantool/tarantool/issues/5229",
)

_TARANTOOL_ACK = Finding(
    name="tarantool-early-acknowledgement",
    title="A primary rolls back a transaction in memory that its log and its replicas have as confirmed, without any "
    "fault",
    version="Tarantool 2.6.0",
    options="--system tarantool --nodes 3 --workload set --nemesis none --time-limit 30",
    finding="--set pipeline=on",
    control="--set pipeline=off",
    control_says="only one transaction at a time waits for its quorum, so that none after it can be confirmed before "
    "it is rolled back",
    check="replicas",
    names=("replicas differ",),
    promised="The documentation says that a transaction was not committed if it did not achieve the quorum in the "
    "given time.",
    reported="tarantool/tarantool #5144, July 2020, of transactions confirmed twice; we know no report of this",
    link="https://github.com/tarantool/tarantool/issues/5144",
)

_TARANTOOL_ROWS = Finding(
    name="tarantool-recovery-by-row",
    title="After a restart the first row of a transaction that was rolled back is in force",
    version="Tarantool 2.6.0",
    options="--system tarantool --nodes 3 --workload set --nemesis kill=sigkill@n2+n3 --time-limit 30",
    finding="--set rows=2",
    control="--set rows=1",
    control_says="every transaction writes one row, so that a restart recovers all of it or nothing",
    check="replicas",
    names=("replicas differ",),
    promised="A pull request of March 2023 says that recovery worked row by row until 2.8.1 made it transactional.",
    reported="tarantool/tarantool #8518, March 2023, which does not mention synchronous replication",
    link="https://github.com/tarantool/tarantool/pull/8518",
)

_CASSANDRA_CLOCK = Finding(
    name="cassandra-clock-skew",
    title="Acknowledged writes have no effect if another coordinator's clock was ahead when it wrote before them",
    version="Cassandra 5.0.2",
    options="--system cassandra --nodes 3 --workload register --nemesis clock=bump --time-limit 20",
    finding="--set writes=quorum",
    control="--set writes=transaction",
    control_says="a lightweight transaction has a timestamp greater than that of any earlier one of its row, whatever "
    "the clocks show",
    check="linearizable",
    names=("read",),
    promised="The documentation says that the last write wins by the timestamp of its client or coordinator, and that "
    "correctness depends on these clocks.",
    reported="Kyle Kingsbury, Jepsen: Cassandra, September 2013",
    link="https://aphyr.com/posts/294-jepsen-cassandra",
)

_CASSANDRA_ONE = Finding(
    name="cassandra-reads-at-one",
    title="Reads at consistency level ONE from a replica behind a partition are stale",
    version="Cassandra 5.0.2",
    options="--system cassandra --nodes 3 --workload register --nemesis partition=one --time-limit 20",
    finding="--set reads=one",
    control="--set reads=serial",
    control_says="a read at SERIAL is a round of Paxos, which needs a quorum",
    check="linearizable",
    names=("read",),
    promised="The documentation says that a read sees what was written if W + R > RF; here W + R is 2 + 1, RF 3.",
    reported="Cassandra's own documentation of its architecture, tunable consistency",
    link="https://cassandra.apache.org/doc/5.0/cassandra/architecture/dynamo.html#tunable-consistency",
)

_CASSANDRA_POWER = Finding(
    name="cassandra-power-loss",
    title="Acknowledged writes of the last seconds are lost if all replicas lose power",
    version="Cassandra 5.0.2",
    options="--system cassandra --nodes 3 --workload set --nemesis power=crash@all --nemesis-interval 8 "
    "--time-limit 20",
    finding="--set commitlog_sync=periodic",
    control="--set commitlog_sync=batch",
    control_says="with `commitlog_sync: batch` a replica syncs its commit log before it acknowledges",
    check="set-full",
    names=("lost",),
    promised="The comments of cassandra.yaml, which sets periodic, say that writes may then be acknowledged "
    "immediately, and that the commit log is simply synced every 10 s.",
    reported="Cassandra's own documentation of `commitlog_sync`",
    link="https://cassandra.apache.org/doc/5.0/cassandra/architecture/storage-engine.html#commit-log",
)

_CASSANDRA_MIXED = Finding(
    name="cassandra-mixed-writes",
    title="Lightweight transactions overwrite plain writes that they have not seen, without any fault",
    version="Cassandra 5.0.2",
    options="--system cassandra --nodes 3 --workload cas-register --nemesis none --time-limit 40",
    finding="--set writes=quorum",
    control="--set writes=transaction",
    control_says="all writes of a row are lightweight transactions, and so in one order",
    check="linearizable",
    names=("is not possible", "must come before", "was stale"),
    promised="DataStax's documentation says that lightweight transactions use other timestamps than normal operations, "
    "and that a row that they write should be read and written by nothing else.",
    reported="DataStax's own documentation of lightweight transactions",
    link="https://docs.datastax.com/en/ddac/doc/datastax_enterprise/dbInternals/dbIntLtwtTransactions.html",
)

_CONSUL_READ = Finding(
    name="consul-stale-reads",
    title="In the mode stale a server answers reads from its own state, which is behind even without a fault",
    version="Consul 1.14.11",
    options="--system consul --nodes 3 --workload register --nemesis partition --time-limit 20",
    finding="--set read=stale",
    control="--set read=consistent",
    control_says="the leader answers, after it has asked a quorum whether it still leads",
    check="linearizable",
    names=("read",),
    promised="The documentation says that any server may answer such reads, and that there is no limit to how old what "
    "they return may be.",
    reported="Consul's own documentation of its consistency modes",
    link="https://developer.hashicorp.com/consul/api-docs/features/consistency",
)

_CONSUL_ID = Finding(
    name="consul-node-id-power-loss",
    title="A server that loses power soon after its first start has lost its identity and never starts again",
    version="Consul 1.14.11",
    options="--system consul --nodes 3 --workload register --nemesis power=crash@all --time-limit 10",
    finding="--set node_id=generated",
    control="--set node_id=configured",
    control_says="each server's identity is in its configuration, so that none is read from the file that was not "
    "synced; the Raft log is whole",
    check="recovers",
    names=("failed to setup node ID",),
    promised="The documentation says that the generated ID is persisted in the data directory, so that it remains the "
    "same across restarts.",
    reported="hashicorp/consul #3489, September 2017, after a forced reboot",
    link="https://github.com/hashicorp/consul/issues/3489",
)

FINDINGS: Mapping[str, Finding] = {
    each.name: each
    for each in (
        _NATS, _REDIS, _REDIS_POWER, _ETCD_STALE, _ETCD_LOCK, _ROCKETMQ, _ROCKETMQ_POWER, _KAFKA, _ZOOKEEPER,
        _ZOOKEEPER_SYNC, _ZOOKEEPER_SNAPSHOT, _POSTGRES_G2, _POSTGRES_SKEW, _POSTGRES_COMMIT, _MARIADB_UPDATE,
        _MARIADB_SKEW, _MARIADB_CRASH, _PATRONI, _RABBITMQ, _HAZELCAST_LOCK, _HAZELCAST_RETRY, _TARANTOOL_READ,
        _TARANTOOL_ACK, _TARANTOOL_ROWS, _CASSANDRA_CLOCK, _CASSANDRA_ONE, _CASSANDRA_POWER, _CASSANDRA_MIXED,
        _CONSUL_READ, _CONSUL_ID,
    )
}  # fmt: skip
"""Findings by name, in the order in which they are listed and run."""
