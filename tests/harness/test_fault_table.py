"""The table before the start: every requested fault, with its mechanism or the reason why there is none."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.clusters.local import LocalCluster
from harness.clusters.netns import NetnsCluster
from harness.clusters.sim.cluster import SimCluster
from harness.errors import OperatorError
from harness.execution import plan_faults
from harness.fault_table import BY_NAME_ONLY, FaultRow, fault_rows, fault_table
from harness.report import OutputConsole
from harness.test import NemesisChoice, Test


def rows_for(nemesis: str, system: str, *, nodes: int = 3, cluster: Any = LocalCluster, **more: Any) -> list[FaultRow]:
    names = [NemesisChoice.parse(name) for name in nemesis.split(",")]
    test = Test(
        system=system, cluster=cluster.name, nodes=nodes, workload="register", nemesis=tuple(names), seed=1,
        nemesis_interval_s=1.0, time_limit_s=9.0, concurrency=1, rate=1.0, **more,
    )  # fmt: skip
    nemeses = registry.load_all("nemeses")
    return list(fault_rows(test, nemeses, cluster, registry.load("systems", system)))


def refused(rows: Sequence[FaultRow], nemesis: str) -> dict[str, str]:
    return {form: str(row.why_not) for row in rows if row.nemesis == nemesis and row.how is None for form in row.forms}


def test_the_table_for_all_lists_every_fault_with_available_ones_first() -> None:
    rows = rows_for("all", "etcd")
    assert {row.nemesis for row in rows} == set(registry.names("nemeses"))
    can = [row.how is not None for row in rows]
    assert can == sorted(can, reverse=True) and True in can and False in can
    assert all(row.how is not None or row.why_not for row in rows)


def test_an_available_fault_names_its_mechanism() -> None:
    found = {row.nemesis: (row.how, row.forms) for row in rows_for("kill,partition", "etcd") if row.how is not None}
    assert found["kill"] == ("signals to all programs of a host", ("sigkill", "terminate", "crash-loop"))
    assert found["partition"][0] == "proxies"


def test_a_row_names_the_mechanisms_that_its_forms_need_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in rows_for("power,kill,disk-full", "broker", cluster=SimCluster) if row.how is not None]
    assert [(row.nemesis, row.forms, row.how) for row in rows] == [
        ("disk-full", ("full",), "disks of cluster sim"),
        ("kill", ("sigkill", "terminate", "crash-loop"), "processes of cluster sim"),
        ("power", ("cut", "cut-torn"), "disks of cluster sim and processes of cluster sim"),
    ]
    monkeypatch.setattr(NetnsCluster, "missing", classmethod(lambda cls, interface, ability: None))
    signals = "signals to all programs of a host"
    assert [(row.forms, row.how) for row in rows_for("power", "broker", cluster=NetnsCluster)] == [
        (("cut", "cut-torn"), f"interception of the program's calls and {signals}"),
        (("crash",), f"a file system per host and {signals}"),
    ]


def test_leader_faults_are_refused_if_the_system_does_not_report_its_leader() -> None:
    rows = rows_for("kill,partition,pause", "toy")
    assert set(refused(rows, "kill")) == {"sigkill@leader", "terminate@leader", "crash-loop@leader"}
    assert set(refused(rows, "partition")) == {"leader", "leader-minority"}
    assert "cannot tell which host leads" in refused(rows, "kill")["sigkill@leader"]
    assert refused(rows_for("kill", "etcd"), "kill") == {}


def test_monotonic_clock_faults_are_refused_unless_the_mechanism_is_the_shim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(LocalCluster, "missing", classmethod(lambda cls, interface, ability: None))
    toy = registry.load("systems", "toy")
    for argv, mechanism, is_refused in (
        ([str(script)], "auto", True),
        ([str(script)], "preload", False),
        ([sys.executable], "auto", False),
        ([sys.executable], "seccomp", True),
    ):
        monkeypatch.setattr(toy, "program_commands", lambda settings, argv=argv: {"main": argv})
        rows = rows_for("clock=slow-monotonic@all", "toy", cluster_options={"mechanism": mechanism})
        reason = "".join(refused(rows, "clock").values())
        assert ("only the wall clock" in reason) is is_refused, (argv, mechanism)
        mend = "may not reach them: one is a script" if argv == [str(script)] else "use --mechanism preload"
        assert (mend in reason) is is_refused, "the other mechanism is advised only if it reaches the program"


def test_faults_that_a_plug_in_excludes_are_refused_with_its_reason(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from harness.sdk import Client, System\n"
        "class Mine(System):\n"
        "    cannot = {'kill': 'it holds everything in memory', 'pause=sigstop': 'it watches itself'}\n"
        "    def command(self, host):\n        return ['x']\n"
        "class Talk(Client):\n    pass\n"
    )
    rows = rows_for("all", str(tmp_path / "mine.py"))
    assert set(refused(rows, "kill").values()) >= {"it holds everything in memory"}
    struck = [row for row in rows if row.nemesis in ("kill", "pause")]
    assert len(struck) >= 2 and all(row.how is None for row in struck)


def test_a_plug_in_may_exclude_targets_of_a_fault_or_of_one_of_its_forms(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from harness.sdk import Client, System\n"
        "class Mine(System):\n"
        "    cannot = {'kill=@majority': 'one copy must stay', 'kill=terminate@one': 'it never ends'}\n"
        "    def command(self, host):\n        return ['x']\n"
        "class Talk(Client):\n    pass\n"
    )
    excluded = refused(
        rows_for("kill=@majority,kill=sigkill@one,kill=terminate@one", str(tmp_path / "mine.py")), "kill"
    )
    assert excluded["sigkill@majority"] == "one copy must stay" and excluded["terminate@one"] == "it never ends"
    assert "sigkill@one" not in excluded


def test_faults_outside_all_are_listed_as_such_and_available_by_name() -> None:
    assert set(refused(rows_for("all", "broker", cluster=SimCluster), "promote").values()) == {BY_NAME_ONLY}
    by_name = rows_for("promote", "broker", cluster=SimCluster, settings={"replication": "sync"})
    assert all("the system itself" in str(row.how) for row in by_name) and len(by_name) > 0
    beside = rows_for("all,promote=failover", "broker", cluster=SimCluster, settings={"replication": "sync"})
    assert [(row.forms, row.how is None) for row in beside if row.nemesis == "promote"] == [(("failover",), False)]
    assert set(refused(beside, "name-service").values()) == {BY_NAME_ONLY}, "faults that are not named stay excluded"
    assert any(row.nemesis == "kill" and row.how for row in beside), "and the faults of `all` stay available"


def test_the_table_is_empty_for_a_schedule_and_prints_reasons() -> None:
    assert rows_for("none", "toy", nemesis_schedule="x.json") == []
    console = OutputConsole(width=200, record=True)
    console.print(fault_table(rows_for("kill", "toy")))
    text = console.export_text()
    assert "kill" in text.splitlines()[1] and "not available: the system cannot tell which host leads" in text
    console.print(fault_table(rows_for("all", "broker", cluster=SimCluster)))
    assert re.search(rf"^promote +{re.escape(BY_NAME_ONLY)} ", console.export_text(), re.MULTILINE)


def test_a_run_whose_only_faults_the_system_never_meets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCluster, "missing", classmethod(lambda cls, interface, ability: None))

    def planned(nemesis: str, system: str) -> set[str]:
        names = tuple(map(NemesisChoice.parse, nemesis.split(",")))
        test = Test(
            system=system, cluster="local", nodes=3, workload="register", nemesis=names, seed=1,
            nemesis_interval_s=1.0, time_limit_s=20.0, concurrency=1, rate=1.0,
        )  # fmt: skip
        schedule = plan_faults(test, registry.load_all("nemeses"), LocalCluster, registry.load("systems", system))
        return {event.nemesis for event in schedule.events}

    expected = (
        "--nemesis name-service alone: the brokers are given addresses and look up no name, so the run could only end "
        "unknown: combine it with faults that system broker meets (--nemesis name-service,kill), or use another system "
        "(--system etcd)"
    )
    with pytest.raises(OperatorError, match=f"^{re.escape(expected)}$"):
        planned("name-service=gone,name-service=slow", "broker")
    assert planned("name-service,kill", "broker") == {"name-service", "kill"}
    assert planned("name-service=gone@all", "toy") == {"name-service"}
