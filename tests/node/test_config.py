"""Configuration: defaults, every kind of mistake in one list, overrides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config import (
    ConfigError,
    LimitsConfig,
    TopicConfig,
    check_topic_name,
    parse_broker_config,
    parse_name_server_config,
    split_address,
)

SMALLEST = """
self_id = "n1"
listen = "127.0.0.1:10911"
data_dir = "/data/n1"
[dledger]
listen = "127.0.0.1:20911"
"""

THREE_NODES = """
self_id = "n2"
group = "ledger-x"
broker_name = "broker-x"
cluster_name = "cluster-x"
listen = "10.0.0.2:10911"
advertise = "192.0.2.2:10911"
data_dir = "/data//n2/"
name_servers = ["10.0.0.9:9876", "10.0.0.10:9876"]
read_mode = "lease"
flush_mode = "async"
flush_interval_ms = 50
flush_least_pages = 2
flush_thorough_interval_ms = 4000
timing = "fast"
uvloop = "off"
log_level = "debug"
[dledger]
listen = "10.0.0.2:20911"
[dledger.peers]
n10 = "10.0.0.1:20911"
n2 = "10.0.0.2:20911"
n3 = "10.0.0.3:20911"
[dledger.clients]
n2 = "10.0.0.2:10911"
[[topics]]
name = "register"
queues = 8
[[topics]]
name = "log"
queues = 1
perm = 4
[limits]
max_message_size_bytes = 1000
"""


def problems_of(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_broker_config(text, overrides)
    return caught.value.problems


def test_defaults_are_a_single_node_that_reads_and_flushes_safely() -> None:
    config = parse_broker_config(SMALLEST)
    assert config.dledger_peers == {"n1": "127.0.0.1:20911"}
    assert (config.broker_name, config.group, config.advertise) == ("broker-a", "broker-a", "127.0.0.1:10911")
    assert (config.read_mode, config.flush_mode, config.timing) == ("read_index", "sync", "default")
    assert (config.uvloop, config.log_level, config.name_servers, config.topics) == ("auto", "info", (), ())
    assert (config.flush_interval_ms, config.flush_least_pages, config.flush_thorough_interval_ms) == (10, 0, 10_000)
    assert config.limits == LimitsConfig()
    assert config.slave_broker_id == 2


def test_the_classic_log_has_the_flush_defaults_of_rocketmq() -> None:
    config = parse_broker_config(SMALLEST.partition("[dledger]")[0] + "[classic]\n")
    assert (config.flush_interval_ms, config.flush_least_pages, config.flush_thorough_interval_ms) == (500, 4, 10_000)


def test_every_key_of_the_file_is_read() -> None:
    config = parse_broker_config(THREE_NODES)
    assert (config.self_id, config.group, config.broker_name) == ("n2", "ledger-x", "broker-x")
    assert (config.cluster_name, config.listen, config.advertise) == (
        "cluster-x",
        "10.0.0.2:10911",
        "192.0.2.2:10911",
    )
    assert (config.data_dir, config.dledger_listen) == ("/data/n2", "10.0.0.2:20911")
    assert config.name_servers == ("10.0.0.9:9876", "10.0.0.10:9876")
    assert (config.read_mode, config.flush_mode, config.timing) == ("lease", "async", "fast")
    assert (config.flush_interval_ms, config.flush_least_pages, config.flush_thorough_interval_ms) == (50, 2, 4000)
    assert (config.uvloop, config.log_level) == ("off", "debug")
    assert list(config.dledger_peers) == ["n2", "n3", "n10"]
    assert config.client_addresses == {"n2": "10.0.0.2:10911"}
    assert config.topics == (
        TopicConfig(name="register", queues=8, perm=6),
        TopicConfig(name="log", queues=1, perm=4),
    )
    assert config.limits == LimitsConfig(max_message_size_bytes=1000)
    assert config.topics[1].readable and not config.topics[1].writable


def test_all_problems_are_listed_at_once() -> None:
    problems = problems_of(
        """
        self_id = "one"
        lisen = "127.0.0.1:1"
        data_dir = "relative"
        read_mode = "linearizable"
        name_servers = ["localhost:9876"]
        [dledger]
        listen = "127.0.0.1:99999"
        [dledger.peers]
        n1 = "0.0.0.0:1"
        [[topics]]
        name = "bad topic"
        queues = 0
        prem = 6
        [limits]
        max_connections = true
        """
    )
    assert [problem.partition(":")[0] for problem in problems] == [
        "self_id",
        "listen",
        "dledger.listen",
        "data_dir",
        "name_servers",
        "read_mode",
        "dledger.peers",
        "topics[0].name",
        "topics[0].queues",
        "topics[0].prem",
        "limits.max_connections",
        "lisen",
    ]
    assert "did you mean 'listen'?" in problems[-1]
    assert "did you mean 'perm'?" in problems[9]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("read_mode=leese", "read_mode: 'leese' is not one of read_index, lease, log, unsafe; did you mean 'lease'?"),
        ("timing=quick", "timing: 'quick' is not one of default, fast"),
        ("flush_mode=asynch", "flush_mode: 'asynch' is not one of sync, async; did you mean 'async'?"),
        ("classic.flush_disk_type=SYNC", "classic.flush_disk_type: 'SYNC' is not one of SYNC_FLUSH, ASYNC_FLUSH"),
        ("classic.broker_role=MASTER", "classic.broker_role: 'MASTER' is not one of ASYNC_MASTER, SYNC_MASTER, SLAVE"),
        ("data_dir=7", "data_dir: must be a non-empty string, not 7"),
        ("zzz=1", "zzz: is no known key; known are self_id"),
        ("dledger.peers={n2 = '127.0.0.2:1'}", "dledger.peers: has no entry for this node, n1"),
        ("dledger.peers={n1 = '127.0.0.2:1', n2 = '127.0.0.2:1'}", "is given to more than one member"),
        ("dledger.clients={n2 = '127.0.0.2:1'}", "dledger.clients: n2 is not in dledger.peers"),
        ("dledger.joins=true", "dledger.joins: is for groups whose members_may_change"),
        ("dledger.preferred_leaders=['n2']", "dledger.preferred_leaders: n2 is not in dledger.peers"),
        ("dledger.preferred_leaders=['n1', 'n1']", "must be a list of different member ids"),
        ("dledger.preferred_leaders='n1'", "must be a list of different member ids"),
        ("dledger.snapshots_kept=0", "dledger.snapshots_kept: must be a whole number from 1 to 100, not 0"),
        ("dledger.snapshot_threshold=-1", "dledger.snapshot_threshold: must be a whole number from 0 to"),
        ("dledger.listen=127.0.0.1:10911", "dledger.listen: is the same address as listen"),
        ("classic={}", "dledger.listen: [dledger] and [classic] are two kinds of log and exclude each other"),
        ("topics=[{name = 't'}, {name = 't'}]", "topics[1].name: topic 't' is given twice"),
        ("topics=[1]", "topics: must be an array of tables"),
        ("limits=1", "limits: must be a table"),
        ("topics=[{name = 't', perm = 8}]", "topics[0].perm: must be a whole number from 0 to 7, not 8"),
        ("broker_name=a b", "broker_name: 'a b' may hold up to 100 letters"),
        ("self_id.x=1", "--set self_id.x=1: self_id is not a table"),
        ("read_mode", "--set read_mode: must be key=value"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(override: str, problem: str) -> None:
    assert any(problem in line for line in problems_of(SMALLEST, override))


def test_more_than_7_members_are_refused() -> None:
    peers = ", ".join(f"n{number} = '127.0.0.{number}:1'" for number in range(1, 9))
    assert "at most 7" in problems_of(SMALLEST, f"dledger.peers={{{peers}}}")[0]


def test_a_wildcard_listen_address_with_name_servers_needs_an_advertised_one() -> None:
    wildcard = "listen=0.0.0.0:10911"
    assert parse_broker_config(SMALLEST, [wildcard]).listen == "0.0.0.0:10911"
    with_name_server = (wildcard, "name_servers=['127.0.0.1:9876']")
    assert problems_of(SMALLEST, *with_name_server) == ("advertise: is required when listen is not a definite address",)
    config = parse_broker_config(SMALLEST, [*with_name_server, "advertise=192.0.2.1:10911"])
    assert config.advertise == "192.0.2.1:10911"


def test_overrides_take_toml_values_and_bare_strings() -> None:
    config = parse_broker_config(
        SMALLEST, ["read_mode=unsafe", "limits.max_held_pulls=5", 'broker_name="quoted"', "broker_name=last"]
    )
    assert (config.read_mode, config.limits.max_held_pulls, config.broker_name) == ("unsafe", 5, "last")


@pytest.mark.parametrize("text", ["self_id = ", "x = " + "[" * 100_000, "x = " + "9" * 5000])
def test_text_that_is_not_toml_is_one_problem(text: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith("not TOML: ")


def test_an_override_that_is_not_toml_is_taken_as_a_string() -> None:
    (problem,) = problems_of(SMALLEST, "read_mode=" + "[" * 100_000)
    assert problem.startswith("read_mode: ")


def test_a_name_server_configuration_is_read_and_checked() -> None:
    config = parse_name_server_config('listen = "127.0.0.1:9876"', ["log_level=error"])
    assert (config.listen, config.uvloop, config.log_level) == ("127.0.0.1:9876", "auto", "error")
    with pytest.raises(ConfigError) as caught:
        parse_name_server_config('lisen = "127.0.0.1:9876"')
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(("address", "parts"), [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:9876", ("::1", 9876))])
def test_an_address_is_split_into_ip_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:", "host:1", "127.0.0.1:65536", "1.2.3.4:-1", ":1"])
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"is not ip:port|has a port above 65535"):
        split_address(address)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "t" * 128, "é", "a\n"])
def test_invalid_topic_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="topic name"):
        check_topic_name(name)


@given(st.text(max_size=60))
def test_random_text_gives_a_list_of_problems_and_no_other_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker_config(text)
    assert caught.value.problems


def test_a_trace_is_off_unless_a_file_is_named() -> None:
    assert parse_broker_config(SMALLEST).trace_file == ""
    assert parse_broker_config(SMALLEST + 'trace_file = "/log/n1.jsonl"').trace_file == "/log/n1.jsonl"
    with pytest.raises(ConfigError, match=r"dledger\.trace_file"):
        parse_broker_config(SMALLEST + 'trace_file = "n1.jsonl"')
