"""Whole runs of third-party systems: short ones in `make test`, others in `make test-systems`.

A system's parts are fetched once, into a cache. If they cannot be fetched, its test is skipped with the reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_systems import SAFE, words_of
from harness import registry
from harness.cli_parser import build_parser
from harness.clusters.select import choose
from harness.commands.run import prepare
from harness.embedding import judged_run
from harness.errors import OperatorError
from harness.execution import perform
from harness.gallery.finding import Finding, outcome_of
from harness.gallery.findings import FINDINGS
from harness.report import OutputConsole
from harness.seeded import random_seed
from harness.store import Store
from tests.mounts import MAY_MOUNT

pytestmark = [pytest.mark.cluster, pytest.mark.serial]

FIRST_RUN_S = 2400
"""A system's first test also fetches it, and Consul is built from source: seven minutes on two idle cores."""


@pytest.fixture
def fetch(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Fetch the packages of a system and print what is fetched; skip the test if they are not available."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", flush=True)

    def fetch_system(name: str, settings: Mapping[str, str] | None = None) -> None:
        try:
            registry.load("systems", name).fetch(say, settings or {})
        except OperatorError as error:
            pytest.skip(f"system {name} could not be fetched: {error}")

    return fetch_system


def require_namespaces() -> None:
    choice = choose("auto")
    if choice.name != "netns" or choice.in_user_namespace:
        pytest.skip(f"these systems listen on every address of their host, and hosts of their own need root here "
                    f"(found: {choice.name}, {choice.reason})")  # fmt: skip


def run_of(words: Sequence[str], fetch: Callable[..., None], store: Path) -> Mapping[str, Any]:
    """The results of `harness run` with these options."""
    prepared = prepare(build_parser().parse_args(["run", *words]))
    fetch(words[words.index("--system") + 1], prepared.parts.test.system_settings)
    require_namespaces()
    _, results = perform(prepared.parts, Store(str(store)), OutputConsole(stderr=True))
    return results


def assert_valid(run: Any) -> None:
    assert_results_valid(run.results)


def assert_results_valid(results: Mapping[str, Any]) -> None:
    assert results["valid"] is True, results["reason"]
    assert results["ops"]["ok"] > 0 and results["faults"]
    assert all(fault["proven"] and fault["healed"] for fault in results["faults"])


@pytest.mark.skipif(not MAY_MOUNT, reason="without mount namespaces for names the hosts tell each other addresses")
@pytest.mark.parametrize(
    ("system", "options"),
    [("etcd", {"workload": "cas-register"}), ("nats", {"workload": "log", "settings": {"workload.polls": "eventual"}})],
)
def test_a_short_run_without_root_is_valid(
    fetch: Callable[..., None], tmp_path: Path, system: str, options: Mapping[str, Any]
) -> None:
    """With processes and link proxies, so a wheel is all that it needs."""
    fetch(system)
    assert_valid(
        judged_run(
            system, cluster="local", nemesis="partition,kill", nemesis_interval=1.5,
            time_limit=7, rate=50, concurrency=6, seed=3, store=str(tmp_path), **options,
        )
    )  # fmt: skip


@pytest.mark.systems
@pytest.mark.timeout(FIRST_RUN_S)
@pytest.mark.parametrize("system", sorted(SAFE))
def test_safe_systems_are_valid_under_partitions_kills_and_pauses(
    fetch: Callable[..., None], tmp_path: Path, system: str
) -> None:
    assert_results_valid(run_of(words_of(system, random_seed()), fetch, tmp_path))


@pytest.mark.systems
@pytest.mark.timeout(600)
def test_etcd_removes_members_and_adds_them_again_without_data(fetch: Callable[..., None], tmp_path: Path) -> None:
    fetch("etcd")
    require_namespaces()
    run = judged_run(
        "etcd", nodes=3, workload="cas-register", nemesis="members", nemesis_interval=4, time_limit=40, seed=3,
        store=str(tmp_path),
    )  # fmt: skip
    assert_valid(run)
    assert all(fault["exercised"] for fault in run.results["faults"])


@pytest.mark.systems
@pytest.mark.timeout(600)
def test_snapshot_isolation_lets_write_skew_through_and_serializable_does_not(
    fetch: Callable[..., None], tmp_path: Path
) -> None:
    words = shlex.split("--system postgres --nodes 1 --workload write-skew --nemesis none --time-limit 5 --set")
    skewed = run_of([*words, "isolation=repeatable read"], fetch, tmp_path)["checks"]["write-skew"]
    assert skewed["valid"] is False and skewed["stats"]["counts"]["write-skew"] > 100
    right = run_of([*words, "isolation=serializable"], fetch, tmp_path)
    assert right["valid"] is True, right["reason"]
    assert right["checks"]["write-skew"]["stats"]["contended"] > 100


@pytest.mark.systems
@pytest.mark.timeout(600)
def test_transactions_of_etcd_have_no_write_skew(fetch: Callable[..., None], tmp_path: Path) -> None:
    words = "--system etcd --nodes 3 --workload write-skew --nemesis partition,kill --time-limit 15 --seed 3"
    assert_results_valid(run_of(shlex.split(words), fetch, tmp_path))


@pytest.mark.systems
@pytest.mark.timeout(FIRST_RUN_S)
@pytest.mark.parametrize("finding", FINDINGS.values(), ids=list(FINDINGS))
def test_the_control_of_a_finding_is_valid(fetch: Callable[..., None], tmp_path: Path, finding: Finding) -> None:
    words = finding.words("control")
    results = run_of([*words, "--seed", "43"], fetch, tmp_path)
    assert outcome_of(finding, results) == "valid", results["reason"]
