"""The configuration keys of classic HA, and the errors for invalid ones."""

from __future__ import annotations

import pytest

from node.config import ConfigError, parse_broker_config

BASE = """
self_id = "n1"
listen = "127.0.0.1:10911"
data_dir = "/data"
name_servers = ["127.0.0.1:9876"]
[classic]
"""


def test_a_master_and_a_slave_configuration_are_parsed() -> None:
    master = parse_broker_config(BASE + 'broker_role = "SYNC_MASTER"\nflush_disk_type = "ASYNC_FLUSH"')
    assert master.ha is not None and master.ha.is_sync and not master.ha.is_slave
    assert (master.flush_mode, master.ha.broker_id, master.ha.fallbehind_max_bytes) == ("async", 0, 256 << 20)
    timings = master.ha.timings("default")
    assert (timings.heartbeat_s, timings.housekeeping_s, timings.retry_s, timings.slave_timeout_s) == (5, 20, 5, 3)
    slave = parse_broker_config(BASE + 'broker_role = "SLAVE"\nslave_timeout_ms = 5000')
    assert slave.ha is not None and slave.ha.is_slave and slave.slave_broker_id == 1
    assert slave.ha.timings("fast").slave_timeout_s == 5
    assert parse_broker_config(BASE).ha is None


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('broker_role = "SLAVE"\nbroker_id = 0', "classic.broker_id: is 0 for a master and at least 1 for a slave"),
        ('broker_role = "ASYNC_MASTER"\nbroker_id = 2', "classic.broker_id: is 0 for a master"),
        ('broker_role = "MASTER"', "classic.broker_role: 'MASTER' is not one of"),
        ('flush_disk_type = "SYNC"', "did you mean 'SYNC_FLUSH'?"),
        ('ha_master_adress = "127.0.0.1:1"', "did you mean 'ha_master_address'?"),
        ('ha_mismatch = "truncate"', "classic.ha_mismatch: 'truncate' is not one of refuse, heal"),
    ],
)
def test_the_error_names_the_invalid_key_or_value(keys: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="classic") as raised:
        parse_broker_config(BASE + keys)
    assert any(problem in line for line in raised.value.problems), raised.value.problems


def test_contradictory_or_missing_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        parse_broker_config(BASE + 'flush_disk_type = "ASYNC_FLUSH"', ["flush_mode=sync"])
    with pytest.raises(ConfigError, match="is required where no name_servers say where the master is"):
        parse_broker_config(BASE + 'broker_role = "SLAVE"', ["name_servers=[]"])


def test_dial_maps_addresses_and_refuses_an_invalid_one() -> None:
    config = parse_broker_config(BASE + '[dial]\n"10.0.0.1:10911" = "127.0.0.1:5000"')
    assert config.dial == {"10.0.0.1:10911": "127.0.0.1:5000"}
    with pytest.raises(ConfigError, match="dial"):
        parse_broker_config(BASE + '[dial]\n"somewhere" = "127.0.0.1:5000"')
