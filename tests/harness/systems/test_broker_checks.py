"""Replica agreement and leaders per term, from files and logs as the nodes leave them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.systems import broker_checks
from harness.systems.broker_checks import compare_copies, compare_replicas, one_leader_per_term


def write_log(root: Path, host: str, content: bytes, segment_bytes: int, begin: int = 0) -> Path:
    directory = root / host
    directory.mkdir(parents=True)
    for start in range(0, max(1, len(content)), segment_bytes):
        (directory / f"{begin + start:020d}").write_bytes(content[start : start + segment_bytes])
    return directory


def test_equal_prefixes_are_valid_whatever_follows(tmp_path: Path) -> None:
    dirs = {
        "n1": write_log(tmp_path, "n1", b"abcdefgh", 3),
        "n2": write_log(tmp_path, "n2", b"abcdefXY", 3),
    }
    outcome = compare_replicas(dirs, {"n1": 6, "n2": 6}, caught_up=True)
    assert outcome.valid is True
    assert outcome.details["compared_to"] == 6


def test_a_difference_is_found_at_its_byte(tmp_path: Path) -> None:
    dirs = {
        "n1": write_log(tmp_path, "n1", b"abcdefgh", 3),
        "n2": write_log(tmp_path, "n2", b"abcdefgh", 3),
        "n3": write_log(tmp_path, "n3", b"abcdXfgh", 3),
    }
    outcome = compare_replicas(dirs, {"n1": 8, "n2": 8, "n3": 8}, caught_up=True)
    assert outcome.valid is False
    assert "n3" in outcome.reason and "byte 4" in outcome.reason


def test_a_log_shorter_than_its_committed_position_is_a_violation(tmp_path: Path) -> None:
    dirs = {
        "n1": write_log(tmp_path, "n1", b"abcd", 10),
        "n2": write_log(tmp_path, "n2", b"abcd", 10),
    }
    assert compare_replicas(dirs, {"n1": 6, "n2": 6}, caught_up=True).valid is False
    dirs["n3"] = write_log(tmp_path, "n3", b"abcdef", 10)
    assert compare_replicas(dirs, {"n1": 6, "n2": 6, "n3": 6}, caught_up=True).valid is False


def test_missing_positions_and_lagging_replicas_are_unknown(tmp_path: Path) -> None:
    dirs = {"n1": write_log(tmp_path, "n1", b"abcd", 10), "n2": write_log(tmp_path, "n2", b"abcd", 10)}
    assert compare_replicas(dirs, {"n1": 4}, caught_up=True).valid == "unknown"
    assert compare_replicas(dirs, {"n1": 4, "n2": 2}, caught_up=False).valid == "unknown"
    assert compare_replicas(dirs, {}, caught_up=False).valid == "unknown"


def test_files_that_could_not_be_fetched_are_unknown_and_no_violation(tmp_path: Path) -> None:
    dirs = {host: write_log(tmp_path, host, b"abcd", 10) for host in ("n1", "n2")}
    dirs["n3"] = tmp_path / "n3" / "nowhere"
    committed = dict.fromkeys(dirs, 4)
    assert compare_replicas(dirs, committed, caught_up=True).valid is False
    outcome = compare_replicas(dirs, committed, caught_up=True, unfetched=["n3"])
    assert (outcome.valid, outcome.reason) == ("unknown", "the files of n3 could not be fetched")
    copies = compare_copies(dirs, committed, {}, caught_up=True, unfetched=["n3"])
    assert (copies.valid, copies.reason) == ("unknown", "the files of n3 could not be fetched")
    assert compare_replicas(dirs, committed, caught_up=True, unfetched=list(dirs)).valid == "unknown"
    dirs["n2"] = write_log(tmp_path, "other", b"abXd", 10)
    assert compare_replicas(dirs, committed, caught_up=True, unfetched=["n3"]).valid is False


def test_expired_beginnings_of_logs_are_not_compared(tmp_path: Path) -> None:
    dirs = {
        "n1": write_log(tmp_path, "n1", b"XXXdefgh", 3),
        "n2": write_log(tmp_path, "n2", b"defgh", 3, begin=3),
    }
    outcome = compare_replicas(dirs, {"n1": 8, "n2": 8}, caught_up=True)
    assert outcome.valid is True and outcome.details["compared_from"] == 3


@settings(max_examples=60, deadline=None)
@given(content=st.binary(min_size=1, max_size=200), segment=st.integers(1, 64), flip=st.integers(0, 400))
def test_comparing_logs_by_blocks_agrees_with_comparing_them_whole(
    tmp_path_factory: object, content: bytes, segment: int, flip: int
) -> None:
    root: Path = tmp_path_factory.mktemp("logs")  # type: ignore[attr-defined]
    other = bytearray(content)
    if flip < len(other):
        other[flip] ^= 1
    dirs = {"n1": write_log(root, "n1", content, segment), "n2": write_log(root, "n2", bytes(other), segment)}
    before = broker_checks.BLOCK_BYTES
    broker_checks.BLOCK_BYTES = 7
    try:
        outcome = compare_replicas(dirs, {"n1": len(content), "n2": len(content)}, caught_up=True)
    finally:
        broker_checks.BLOCK_BYTES = before
    assert outcome.valid is (content == bytes(other))
    if flip < len(content):
        assert f"byte {flip} " in outcome.reason


def log_file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def leader_line(node: str, term: int, second: int = 1) -> str:
    return f"2026-01-01T00:00:0{second}.500Z INFO node.dledger.role role_change self={node} role=LEADER term={term}"


def test_one_leader_in_each_term_is_valid(tmp_path: Path) -> None:
    logs = {
        "n1": log_file(tmp_path / "1", leader_line("n1", 1), "noise role=LEADER", leader_line("n1", 3, 3)),
        "n2": log_file(tmp_path / "2", leader_line("n2", 2, 2)),
    }
    started_wall_ms = 1767225600_000
    outcome = one_leader_per_term(logs, started_wall_ms=started_wall_ms)
    assert outcome.valid is True
    assert outcome.details["terms"] == [
        {"term": 1, "leader": "n1", "start_ns": 1_500_000_000},
        {"term": 2, "leader": "n2", "start_ns": 2_500_000_000},
        {"term": 3, "leader": "n1", "start_ns": 3_500_000_000},
    ]


def test_two_leaders_in_a_term_are_a_violation(tmp_path: Path) -> None:
    logs = {
        "n1": log_file(tmp_path / "1", leader_line("n1", 4)),
        "n2": log_file(tmp_path / "2", leader_line("n2", 4)),
    }
    outcome = one_leader_per_term(logs, started_wall_ms=0)
    assert outcome.valid is False
    assert "term 4 had 2 leaders: n1, n2" in outcome.reason


def test_missing_logs_and_logs_without_a_leader_are_unknown(tmp_path: Path) -> None:
    assert one_leader_per_term({"n1": log_file(tmp_path / "1", "x")}, started_wall_ms=0).valid == "unknown"
    logs = {"n1": log_file(tmp_path / "2", leader_line("n1", 1)), "n2": tmp_path / "missing"}
    assert one_leader_per_term(logs, started_wall_ms=0).valid == "unknown"


def test_a_slave_that_reports_not_following_is_unknown_and_not_compared(tmp_path: Path) -> None:
    dirs = {
        "n1": write_log(tmp_path, "n1", b"abcdefgh", 3),
        "n2": write_log(tmp_path, "n2", b"abcdefgh", 3),
        "n3": write_log(tmp_path, "n3", b"abcdXfghijkl", 3),
    }
    committed = {"n1": 8, "n2": 8, "n3": 12}
    said = {"n1": "", "n2": "", "n3": "it has 4 bytes that the master lacks"}
    outcome = compare_copies(dirs, committed, said, caught_up=False)
    assert outcome.valid == "unknown" and "n3 does not follow: it has 4 bytes" in outcome.reason
    assert compare_copies(dirs, committed, dict.fromkeys(said, ""), caught_up=True).valid is False
    (dirs["n2"] / f"{3:020d}").write_bytes(b"dXf")
    assert compare_copies(dirs, committed, said, caught_up=True).valid is False
