"""Settings changed while the broker runs (code 25): applied all or none, kept across restarts."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from node.broker.live_settings import with_setting
from node.config import parse_broker_config
from node.store.table_file import decode_table

HALF = {"b": "t", "e": 0, "f": 4, "i": "TRAN_MSG\x01true\x02PGROUP\x01p\x02"}
NEW = {"c": "TBW102", "d": 4, "e": 0}


async def change(case: Any, *lines: str) -> Any:
    return await case.ask(25, body="".join(f"{line}\n" for line in lines).encode())


async def settings(case: Any) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (await case.ask(26)).body.decode().splitlines())


def test_changes_take_effect_and_survive_a_restart(run_case: Any) -> None:
    lines = (
        "# from a tool", "autoCreateTopicEnable = false", "maxMessageSize=10", "rejectTransactionMessage=TRUE",
        "autoCreateSubscriptionGroup=false", "transactionTimeOut=7000", "transactionCheckInterval=30000",
        "transactionCheckMax=3", "accessMessageInMemoryMaxRatio=0",
    )  # fmt: skip

    async def check_effect(case: Any) -> None:
        assert (await case.ask(310, {"b": "new", **NEW}, b"x")).code == 17
        assert (await case.ask(310, {"b": "t", "e": 0}, bytes(11))).code == 13
        assert (await case.ask(310, HALF, b"x")).code == 16
        assert (await case.pull(consumerGroup="unknown", sysFlag=4)).code == 26
        assert (await case.ask(36, {"offset": 0, "group": "unknown"})).code == 26
        shown = await settings(case)
        assert [shown[line.partition("=")[0].strip()] for line in lines[1:]] == [
            "false", "10", "true", "false", "7000", "30000", "3", "0"
        ]  # fmt: skip
        assert '"counter":1' in (await case.ask(26)).ext_fields["version"].replace(" ", "")

    async def scenario(case: Any) -> None:
        assert (await case.ask(310, {"b": "made", **NEW}, bytes(11))).code == 0
        assert (await case.ask(310, HALF, b"x")).code == 0
        assert (await change(case, *lines)).code == 0
        await check_effect(case)
        assert case.broker.transactions.timeout_ms == 7000
        assert (await case.ask(310, {"b": "made", "e": 0}, b"x")).code == 0
        assert (await change(case, *lines)).code == 0  # the same values: the version does not change

    run_case(scenario)
    run_case(check_effect)


def test_sends_are_refused_before_a_start_time_set_at_runtime(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await change(case, f"startAcceptSendRequestTimeStamp={case.clock.now_ms + 1}")).code == 0
        assert (await case.send()).code == 1
        case.clock.now_ms += 1
        assert (await case.send()).code == 0

    run_case(scenario)


def test_the_broker_permission_limits_pulls_ordered_sends_and_registrations(run_case: Any) -> None:
    """As in RocketMQ: without R pulls are refused, without W only sends to ordered topics; every topic's permission is
    registered with no more than it."""

    versions = []

    def registered_permissions(case: Any) -> dict[str, int]:
        wrapper = json.loads(case.broker._registration()[1])["topicConfigSerializeWrapper"]
        versions.append(wrapper["dataVersion"]["counter"])
        table = wrapper["topicConfigTable"]
        return {name: table[name]["perm"] for name in ("t", "ordered", "reading", "TBW102")}

    async def scenario(case: Any) -> None:
        for topic, fields in (("ordered", {"order": True}), ("reading", {"perm": 4})):
            assert (await case.ask(17, {"topic": topic, "writeQueueNums": 1, "readQueueNums": 1, **fields})).code == 0
        assert (await case.send(topic="ordered")).code == (await case.send()).code == 0
        assert registered_permissions(case) == {"t": 6, "ordered": 6, "reading": 4, "TBW102": 7}
        assert (await change(case, "brokerPermission=4")).code == 0
        assert ((await case.send(topic="ordered")).code, (await case.send()).code) == (16, 0)
        assert (await case.pull()).code == 0
        assert registered_permissions(case) == {"t": 4, "ordered": 4, "reading": 4, "TBW102": 4}
        assert (await change(case, "brokerPermission=2")).code == 0
        assert ((await case.send(topic="ordered")).code, (await case.pull()).code) == (0, 16)
        assert registered_permissions(case) == {"t": 2, "ordered": 2, "reading": 0, "TBW102": 2}
        assert versions == sorted(set(versions))  # a name server takes over topics with another version only

    run_case(scenario)


@pytest.mark.parametrize(
    ("line", "code", "remark"),
    [
        ("brokerName=other", 16, "brokerName does not change while the broker runs"),
        ("flushDiskType=ASYNC_FLUSH\nregionId=x", 16, "flushDiskType does not .*; regionId does not"),
        ("brokerNmae=other", 1, "brokerNmae is no setting of this broker"),
        ("maxMessageSize=8388609", 1, "maxMessageSize=8388609 must be a whole number from 1 to 8388608"),
        ("maxMessageSize=1_0", 1, "maxMessageSize=1_0 is no integer"),
        ("transactionTimeOut=1500", 1, "is no whole number of seconds"),
        ("autoCreateTopicEnable=yes", 1, "autoCreateTopicEnable=yes is neither true nor false"),
        ("brokerPermission=8", 1, "from 0 to 7"),
        ("brokerPermission", 1, "'brokerPermission' is not NAME=VALUE"),
        ("# nothing", 1, "no setting is named"),
        ("\n".join(f"x{at}=1" for at in range(5)), 1, "; and 2 more"),
        ("x" * 5000 + "=" + "y" * 5000, 1, "xxx is no setting"),
        ("\n".join(f"x{at}=1" for at in range(1001)), 1, "more than 1000 settings"),
    ],
)
def test_a_refused_change_names_the_setting_and_changes_nothing(
    run_case: Any, tmp_path: Path, line: str, code: int, remark: str
) -> None:
    async def scenario(case: Any) -> None:
        before = (await case.ask(26)).body
        for lines in ((line,), ("transactionCheckMax=3", line)):
            if line.startswith("#") and len(lines) > 1:
                continue
            reply = await change(case, *lines)
            assert reply.code == code and len(reply.remark) < 300
            assert re.search(remark, reply.remark), reply.remark
        assert (await case.ask(26)).body == before
        # Sending back the current settings changes nothing.
        assert (await case.ask(25, body=before)).code == 0

    run_case(scenario)
    assert not (tmp_path / "data" / "brokerConfig.json").exists()


def test_changing_reads_from_slaves_needs_a_restart_with_classic_ha(new_broker: Any) -> None:
    broker, _ = new_broker()
    assert with_setting(broker.config, "slaveReadEnable", "true").slave_read_enable
    text = 'self_id = "n1"\nlisten = "127.0.0.1:0"\ndata_dir = "/nowhere"\n[classic]\nbroker_role = "SYNC_MASTER"'
    with pytest.raises(ValueError, match="needs a restart where there is classic HA"):
        with_setting(parse_broker_config(text), "slaveReadEnable", "true")


def test_a_change_that_cannot_be_saved_changes_nothing(run_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(case: Any) -> None:
        async def fail(path: str, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(case.broker._runtime.disk, "write_file_atomic", fail)
        before = await settings(case)
        reply = await change(case, "transactionCheckMax=3")
        assert reply.code == 1 and "nothing was changed: [Errno 28]" in reply.remark
        assert await settings(case) == before

    run_case(scenario)


def test_concurrent_changes_are_all_saved(run_case: Any, tmp_path: Path) -> None:
    async def scenario(case: Any) -> None:
        lines = ("transactionCheckMax=3", "maxMessageSize=10", "brokerPermission=4")
        assert [reply.code for reply in await asyncio.gather(*(change(case, line) for line in lines))] == [0, 0, 0]

    run_case(scenario)
    table = decode_table((tmp_path / "data" / "brokerConfig.json").read_bytes())
    assert table["brokerConfig"] == {"transactionCheckMax": "3", "maxMessageSize": "10", "brokerPermission": "4"}
    assert table["dataVersion"]["counter"] == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"brokerConfig":[]}', "is no table of settings: fix it, or remove it"),
        ('{"brokerConfig":{},"dataVersion":{"counter":"x"}}', "is no table of settings: fix it, or remove it"),
        ("{", "is damaged"),
    ],
)
def test_a_damaged_table_of_settings_is_refused_at_the_start(
    new_broker: Any, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "brokerConfig.json").write_text(text)
    broker, _ = new_broker()
    with pytest.raises(ValueError, match=f"brokerConfig.json .*{reason}"):
        asyncio.run(broker.start())


def test_saved_settings_that_are_no_longer_valid_are_ignored_with_a_warning(
    new_broker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The configuration was changed since they were saved."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "brokerConfig.json"
    stored = {"maxMessageSize": "8388608", "transactionCheckMax": "3", "brokerName": "x", "brokerPermission": "y"}
    path.write_text(json.dumps({"brokerConfig": stored, "dataVersion": {"timestamp": 1, "counter": 4}}))
    broker, _ = new_broker(**{"limits.segment_size_bytes": 8_000_000})

    async def scenario() -> None:
        await broker.start()
        await broker.stop()

    asyncio.run(scenario())
    assert broker.config.transactions.max_checks == 3
    assert broker.config.limits.max_message_size_bytes < 8_000_000
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for entry, reason in (
        ("maxMessageSize=8388608", "does not fit into a file of the log, of 8000000 bytes"),
        ("brokerName=x", "is no setting that changes while the broker runs"),
        ("brokerPermission=y", "is no integer"),
    ):
        assert any(str(path) in line and entry in line and reason in line for line in warnings), warnings
