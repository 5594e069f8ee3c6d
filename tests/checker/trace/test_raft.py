"""The model of Raft: a run that it explains, and for each of its rules a run that breaks it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checker.testing.trace_oracle import explained_by_force
from checker.trace import Event, Trace, TraceError, check_traces
from checker.trace.models.raft import Raft
from checker.trace.models.raft_log import EMPTY, Entry
from checker.verdict import Result, Verdict

START = 'start term=0 vote=null last=-1 last_term=-1 last_crc=0 commit=-1 group=["n1","n2","n3"] group_index=-1'

ELECTION = f"""
n1: {START}
n2: {START}
n3: {START}
n1: vote term=1 for=n1
n1: stand term=1
n2: vote term=1 for=null
n2: vote term=1 for=n1
n1: granted term=1 by=n2
n1: lead term=1 group=["n1","n2","n3"] group_index=-1
n1: append first=0 term=1 crcs=[10]
n2: follow term=1 leader=n1
"""
REPLICATION = """
n2: append first=0 term=1 crcs=[10]
n1: sync last=0
n2: sync last=0
n2: ack term=1 last=0
n1: acked by=n2 last=0
n1: commit last=0
n1: append first=1 term=1 crcs=[11]
n2: append first=1 term=1 crcs=[11]
n2: commit last=0
"""
SECOND = """
n2: candidate term=1
n2: vote term=2 for=n2
n2: stand term=2
n3: vote term=2 for=null
n3: vote term=2 for=n2
n2: granted term=2 by=n3
n2: lead term=2 group=["n1","n2","n3"] group_index=-1
n2: append first=2 term=2 crcs=[22]
n3: follow term=2 leader=n2
"""
REST = """
n3: append first=0 term=1 crcs=[10,11]
n3: append first=2 term=2 crcs=[22]
n3: sync last=2
n3: ack term=2 last=2
n2: acked by=n3 last=2
n2: sync last=2
n2: commit last=2
n2: answer last=2
n1: append first=2 term=1 crcs=[12]
n1: candidate term=1
n1: vote term=2 for=null
n1: follow term=2 leader=n2
n1: truncate last=1
n1: append first=2 term=2 crcs=[22]
n1: cut
n1: sync last=2
n1: ack term=2 last=2
n1: commit last=2
"""


def events_of(*texts: str) -> list[Event]:
    """The events of lines such as ``n1: vote term=1 for=n2``."""
    found: list[Event] = []
    for line in "\n".join(texts).splitlines():
        if not line.strip():
            continue
        node, _, rest = line.partition(": ")
        name, *words = rest.split()
        fields = {key: _value(text) for key, _, text in (word.partition("=") for word in words)}
        number = sum(each.node == node for each in found) + 1
        found.append(Event(node, name, fields, line=number, time=float(len(found))))
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def traces_of(events: Sequence[Event]) -> list[Trace]:
    nodes = sorted({event.node for event in events})
    return [Trace(node, [event for event in events if event.node == node]) for node in nodes]


def judged(*texts: str) -> Result:
    return check_traces(Raft(), traces_of(events_of(*texts)))


def test_a_correct_run_is_explained() -> None:
    result = judged(ELECTION, REPLICATION, SECOND, REST)
    assert result.verdict is Verdict.VALID and result.stats["states"] == 0


def test_an_acknowledgement_that_comes_late_takes_nothing_back() -> None:
    late = """
n2: sync last=1
n2: ack term=1 last=1
n1: acked by=n2 last=1
n1: acked by=n2 last=0
n1: sync last=1
n1: commit last=1
"""
    assert judged(ELECTION, REPLICATION, late).verdict is Verdict.VALID
    missing = late.replace("n1: acked by=n2 last=1\n", "")
    assert "which only n1 of n1, n2, n3 are known to have" in judged(ELECTION, REPLICATION, missing).reason


WITH_CHANGES = START + " may_change=true"


def with_changes(*texts: str) -> list[str]:
    return [text.replace(START, WITH_CHANGES) for text in texts]


def group(index: int, *members: str, term: int = 1) -> str:
    listed = json.dumps(members, separators=(",", ":"))
    return f'n1: append first={index} term={term} crcs=[{10 + index}] groups={{"{index}":{listed}}}'


def test_a_group_may_change_and_a_vote_follow_its_leader() -> None:
    transfer = """
    n3: vote term=1 for=n3
    n3: stand term=1
    n3: vote term=1 for=n1
    n3: follow term=1 leader=n1
    """
    change = f"""
    {group(2, "n1", "n2")}
    n1: sync last=2
    n2: append first=2 term=1 crcs=[12]
    n2: sync last=2
    n2: ack term=1 last=2
    n1: acked by=n2 last=2
    n1: commit last=2
    {group(3, "n1")}
    n1: sync last=3
    n1: commit last=3
    """
    lines = with_changes(ELECTION, REPLICATION, transfer, change)
    result = judged(*["\n".join(line.strip() for line in text.splitlines()) for text in lines])
    assert result.verdict is Verdict.VALID, result.reason


def restart(node: str, **changes: Any) -> str:
    """The line of a start of ``node`` behind ELECTION and REPLICATION, with some fields changed."""
    fields: dict[str, Any] = {
        "term": 1, "vote": "n1", "last": 1, "last_term": 1, "last_crc": 11, "commit": 0,
        "group": ["n1", "n2", "n3"], "group_index": -1, **changes,
    }  # fmt: skip
    return f"{node}: start " + " ".join(
        f"{name}={json.dumps(value).replace(' ', '')}" for name, value in fields.items()
    )


@pytest.mark.parametrize(
    "line",
    [
        restart("n2"),
        restart("n2", commit=-1),
        restart("n2", last=0, last_crc=10),  # the second entry was not synced
        restart("n2", term=2, vote=None),  # durable in the process's last moment, and not written down
        restart("n2", term=3, vote="n3"),
        restart("n3", last=-1, last_term=-1, last_crc=0, commit=-1, term=0, vote=None),
    ],
)
def test_a_restart_keeps_what_was_durable(line: str) -> None:
    assert judged(ELECTION, REPLICATION, line).verdict is Verdict.VALID


def test_a_truncation_that_was_not_durable_may_be_undone_by_a_crash() -> None:
    behind = [ELECTION, REPLICATION, SECOND, REST[: REST.index("n1: cut")]]
    old = restart("n1", term=2, vote=None, last=2, last_crc=12)
    assert judged(*behind, old).verdict is Verdict.VALID
    result = judged(*behind, "n1: cut", old)
    assert result.verdict is Verdict.INVALID and "entry 2 of term 1 that its log did not have" in result.reason


def test_with_asynchronous_flush_a_crash_may_lose_anything() -> None:
    lost = restart("n2", last=-1, last_term=-1, last_crc=0, commit=-1)
    behind = (ELECTION.replace("group_index=-1", "group_index=-1 sync=false"), REPLICATION, lost)
    assert judged(*behind).verdict is Verdict.VALID
    assert judged(ELECTION, REPLICATION, lost).verdict is Verdict.INVALID


BROKEN: dict[str, tuple[Sequence[str], str]] = {
    "a term goes back": ((ELECTION, REPLICATION, restart("n2", term=0, vote=None)), "starts in term 0, but was in"),
    "a term goes back in a life": ((ELECTION, "n2: vote term=0 for=null"), "n2 goes back from term 1 to 0"),
    "a vote is forgotten": ((ELECTION, REPLICATION, restart("n2", vote=None)), "starts without its vote of term 1"),
    "a vote is given twice": ((ELECTION, "n2: vote term=1 for=n3"), "n2 votes for n3 in term 1, but had voted for n1"),
    "a vote is transferred to a candidate": (
        with_changes(ELECTION, "n3: vote term=1 for=n3", "n3: vote term=1 for=n2"),
        "n3 votes for n2 in term 1, but had voted for n3",
    ),
    "a leader enters another term": ((ELECTION, "n1: vote term=2 for=null"), "while it leads term 1"),
    "a vote for a shorter log": (
        (ELECTION, REPLICATION, "n3: vote term=2 for=n3", "n3: stand term=2", "n2: vote term=2 for=n3"),
        "n2, whose log ends with entry 1 of term 1, votes in term 2 for n3, whose log ends with nothing",
    ),
    "a vote that nobody asked for": (
        (ELECTION, "n3: vote term=1 for=n2"), "votes in term 1 for n2, which has not asked for votes in it"
    ),
    "a follower asks for votes": ((ELECTION, "n2: stand term=1"), "n2 asks for votes in term 1 as a follower"),
    "a vote is counted that was not given": (
        (ELECTION, "n1: granted term=1 by=n3"), "n1 counts a vote of n3 in term 1, which n3 has not given to it"
    ),
    "a minority elects": ((ELECTION.replace("n1: granted term=1 by=n2\n", ""),), "with votes of n1 only"),
    "a leader counts another group": (
        (ELECTION.replace('lead term=1 group=["n1","n2","n3"]', 'lead term=1 group=["n1","n2"]'),),
        "n1 takes n1, n2 (as configured) for the group, but it is n1, n2, n3 (as configured)",
    ),
    "a restart forgets the group": (
        (ELECTION, REPLICATION, restart("n2", group=["n2"])), "n2 takes n2 (as configured) for the group, but it is n1"
    ),
    "a restart knows a group that is not committed": (
        (ELECTION, REPLICATION, restart("n2", group=["n2"], group_index=1)),
        "n2 takes n2 (by entry 1) for the group, which is not committed, and not in its log",
    ),
    "a restart knows a group that was never made": (
        (ELECTION, REPLICATION, restart("n2", group=["n2"], group_index=0)),
        "n2 takes n2 (by entry 0) for the group, but no entry that is committed there says so",
    ),
    "a term is led twice": (
        (ELECTION, 'n1: candidate term=1', 'n1: lead term=1 group=["n1","n2","n3"] group_index=-1'),
        "n1 leads for the second time term 1",
    ),
    "a leader lacks what is committed": (
        (ELECTION, REPLICATION,
         """
n3: vote term=2 for=n3
n3: stand term=2
n2: vote term=2 for=null
n3: vote term=3 for=n3
n3: stand term=3
n2: start term=3 vote="n3" last=1 last_term=1 last_crc=11 commit=0 group=["n1","n2","n3"] group_index=-1
n3: granted term=3 by=n2
n3: lead term=3 group=["n1","n2","n3"] group_index=-1
"""),
        "n3 leads term 3 without entry 0 of term 1, which was committed in term 1: it has nothing there",
    ),
    "one follows who does not lead": (
        (ELECTION, "n3: vote term=1 for=null", "n3: follow term=1 leader=n2"), "n3 follows n2 in term 1, which n1 leads"
    ),
    "a leader of no term is followed": (
        (ELECTION, "n3: vote term=7 for=null", "n3: follow term=7 leader=n2"), "in term 7, which n2 does not lead"
    ),
    "an entry from nowhere": ((ELECTION, "n2: append first=0 term=1 crcs=[10,99]"), "which no leader of that term"),
    "another entry": ((ELECTION, "n2: append first=0 term=1 crcs=[99]"), "entry 0 of term 1 of n2 is another one"),
    "a gap": ((ELECTION, "n2: append first=3 term=1 crcs=[13]"), "n2 appends entry 3 behind entry -1"),
    "an entry behind another one": (
        (ELECTION, REPLICATION, SECOND,
         """
n1: append first=2 term=1 crcs=[12]
n1: candidate term=1
n1: vote term=2 for=null
n1: follow term=2 leader=n2
n2: append first=3 term=2 crcs=[23]
n1: append first=3 term=2 crcs=[23]
"""),
        "behind entry 2 of term 1; in the log of n2 it is behind entry 2 of term 2",
    ),
    "a candidate appends": ((ELECTION, "n3: append first=0 term=1 crcs=[10]"), "it neither leads nor follows"),
    "a leader appends of another term": (
        (ELECTION, "n1: append first=1 term=2 crcs=[11]"), "leads term 1 and appends entry 1 of term 2"
    ),
    "a committed entry is removed": (
        (ELECTION, REPLICATION, "n2: truncate last=-1"), "n2 removes entries after -1, but has committed up to 0"
    ),
    "a leader removes entries": ((ELECTION, REPLICATION, "n1: truncate last=0"), "as a leader"),
    "nothing is removed": ((ELECTION, REPLICATION, "n2: truncate last=5"), "but its log ends at 1"),
    "an acknowledged entry is removed": (
        (ELECTION, REPLICATION, "n2: sync last=1", "n2: ack term=1 last=1", "n2: truncate last=0"),
        "n2 removes entries after 0, but has acknowledged entry 1 to n1",
    ),
    "an entry is removed that the leader has": (
        (ELECTION, REPLICATION, "n2: truncate last=0"), "n2 removes entry 1 of term 1, which n1, its leader, has too"
    ),
    "a log begins again within what is committed": (
        (ELECTION, REPLICATION, "n2: reset first=0"), "n2 begins its log again at 0, but has committed up to 0"
    ),
    "a sync beyond the end": ((ELECTION, "n2: sync last=4"), "n2 has synced entry 4, but its log ends at -1"),
    "an acknowledgement before the sync": (
        (ELECTION, "n2: append first=0 term=1 crcs=[10]", "n2: ack term=1 last=0"), "but has synced only up to -1"
    ),
    "an acknowledgement beyond the end": ((ELECTION, "n2: ack term=1 last=3"), "n2 acknowledges entry 3, but its log"),
    "an acknowledgement of another entry": (
        (ELECTION, REPLICATION, SECOND,
         """
n1: append first=2 term=1 crcs=[12]
n1: sync last=2
n1: candidate term=1
n1: vote term=2 for=null
n1: follow term=2 leader=n2
n1: ack term=2 last=2
"""),
        "n1 acknowledges entry 2 of term 1 to n2, whose log does not have it",
    ),
    "an acknowledgement that was not sent": (
        (ELECTION, "n1: acked by=n2 last=0"), "takes entry 0 for acknowledged by n2 in term 1, and n2 has not"
    ),
    "a minority commits": (
        (ELECTION, "n1: sync last=0", "n1: commit last=0"), "which only n1 of n1, n2, n3 are known to have"
    ),
    "a leader commits what it has not synced": (
        (ELECTION, REPLICATION.replace("n1: sync last=0\n", "")), "which only n2 of n1, n2, n3 are known to have"
    ),
    "an entry of an earlier term is committed by counting": (
        (ELECTION, REPLICATION, SECOND,
         """
n3: append first=0 term=1 crcs=[10,11]
n3: sync last=1
n3: ack term=2 last=1
n2: acked by=n3 last=1
n2: sync last=1
n2: commit last=1
"""),
        "n2 leads term 2 and commits entry 1 of term 1 by counting replicas",
    ),
    "a commit beyond the end": ((ELECTION, "n2: commit last=0"), "n2 commits entry 0, but its log ends at -1"),
    "a follower commits before any leader": (
        (ELECTION, "n2: append first=0 term=1 crcs=[10]", "n2: commit last=0"),
        "n2 commits entry 0 of term 1, which no leader has committed",
    ),
    "two entries are committed at an index": (
        (ELECTION, REPLICATION, SECOND, REST[: REST.index("n1: append")],
         "n1: append first=2 term=1 crcs=[12]", "n1: commit last=2"),
        "n1 commits entry 2 of term 1, behind entry 2 of term 1; another replica has committed entry 2 of term 2",
    ),
    "a commit goes back": ((ELECTION, REPLICATION, "n2: commit last=-1"), "n2 had committed up to 0, and now only up"),
    "an answer before the commit": ((ELECTION, REPLICATION, "n1: answer last=1"), "tells a client that entry 1"),
    "two members at once": (
        (ELECTION, REPLICATION, group(2, "n1")), "n1 changes the group from n1, n2, n3 to n1 at once"
    ),
    "changes overlap": (
        (ELECTION, REPLICATION, group(2, "n1", "n2"), group(3, "n1")),
        "n1 changes the group by entry 3 before its change by 2 is committed",
    ),
    "a change before an own commit": (
        (ELECTION, group(1, "n1", "n2")), "before it has committed an entry of its own term"
    ),
    "a durable entry is gone": (
        (ELECTION, REPLICATION, restart("n2", last=-1, last_term=-1, last_crc=0, commit=-1)),
        "n2 starts with a log up to -1, but had synced entries up to 0",
    ),
    "entries appear in a restart": (
        (ELECTION, REPLICATION, restart("n2", last=2, last_crc=12)), "n2 starts with entries after 1 that its log did"
    ),
    "an entry is another one after a restart": (
        (ELECTION, REPLICATION, restart("n2", last_crc=99)), "n2 starts with an entry 1 of term 1 that its log did not"
    ),
    "a restart commits more than it has": (
        (ELECTION, REPLICATION, restart("n2", commit=7)), "starts with 7 as its committed index, and its log ends at 1"
    ),
    "a snapshot of nothing committed": (
        (ELECTION, "n1: snapshot index=0 last_term=1"), "a snapshot of entry 0, which no replica has committed"
    ),
    "a snapshot of another term": (
        (ELECTION, REPLICATION, "n1: snapshot index=0 last_term=4"), "of entry 0 of term 4; entry 0 of term 1 was"
    ),
    "another term than its own": ((ELECTION, "n1: stand term=4"), "n1 is in term 1, not 4"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_named(what: str) -> None:
    texts, said = BROKEN[what]
    result = judged(*texts)
    assert result.verdict is Verdict.INVALID
    assert said in result.reason
    assert "log ends with" in result.stats["state"][0]["state"]


def test_a_removed_leader_commits_nothing_more() -> None:
    removed = f"""
{group(2, "n2", "n3")}
n2: append first=2 term=1 crcs=[12]
n2: sync last=2
n2: ack term=1 last=2
n1: acked by=n2 last=2
n3: vote term=1 for=null
n3: follow term=1 leader=n1
n3: append first=0 term=1 crcs=[10,11,12]
n3: sync last=2
n3: ack term=1 last=2
n1: acked by=n3 last=2
n1: commit last=2
"""
    more = """
n1: append first=3 term=1 crcs=[13]
n2: append first=3 term=1 crcs=[13]
n2: sync last=3
n2: ack term=1 last=3
n1: acked by=n2 last=3
n3: append first=3 term=1 crcs=[13]
n3: sync last=3
n3: ack term=1 last=3
n1: acked by=n3 last=3
n1: commit last=3
"""
    assert judged(ELECTION, REPLICATION, removed).verdict is Verdict.VALID
    result = judged(ELECTION, REPLICATION, removed, more)
    assert "n1 commits entry 3 of term 1, although it has committed its own removal by entry 2" in result.reason
    early = removed.replace("n1: commit last=2", "n1: append first=3 term=1 crcs=[13]\nn1: commit last=2")
    late = more.replace("n1: append first=3 term=1 crcs=[13]\n", "")
    assert judged(ELECTION, REPLICATION, early, late).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("n1: vote term=1 for=n1",), "does not begin with the replica's start"),
        ((START.join(("n1: ", "")), "n1: dance"), "'dance' is no event of model raft"),
        (("n1: " + START, "n1: granted term=1 by=n9"), "there is no trace of n9"),
        (("n1: " + START, "n1: vote term=1"), "has no field 'for'"),
        (("n1: " + START, "n1: sync last=true"), "last must be a number"),
        (("n1: " + START.replace('["n1","n2","n3"]', "n1"),), "group must be a list of names"),
        ((restart("n1"),), "traces begin with an empty one"),
        (("n1: " + START, "n1: append first=0 term=1 crcs=7"), "crcs must be a list of checksums"),
        (("n1: " + START, "n1: append first=0 term=1 crcs=[]"), "crcs must be a list of checksums"),
        ((ELECTION, 'n1: append first=1 term=1 crcs=[1] groups={"1":2}'), "groups must map indices to lists"),
    ],
)
def test_what_is_no_trace_of_raft_is_no_violation(lines: Sequence[str], said: str) -> None:
    with pytest.raises(TraceError, match=re.escape(said)):
        judged(*lines)


# The order in which events are tried, and the shortcuts, make no difference


class Slow(Raft):
    """The same model without its shortcuts."""

    def commutes(self, event: Event) -> bool:
        return False

    def never(self, state: Any, event: Event) -> bool:
        return False


SHORT = events_of(ELECTION, REPLICATION)


def changed(events: Sequence[Event], rng: random.Random) -> list[Event]:
    """The events with one of them left out, moved, or changed in a number or a name."""
    found = list(events)
    at = rng.randrange(3, len(found))
    kind = rng.choice(["leave out", "move", "change", "change", "change"])
    event = found.pop(at)
    if kind == "move":
        found.insert(rng.randrange(3, len(found) + 1), event)
    elif kind == "change":
        fields = dict(event.fields)
        name = rng.choice(sorted(fields) or ["last"])
        value = fields.get(name)
        if isinstance(value, int):
            fields[name] = max(value + rng.choice([-1, 1]), -1)
        elif isinstance(value, str):
            fields[name] = rng.choice(["n1", "n2", "n3"])
        found.insert(at, replace(event, fields=fields))
    return found


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_shortcuts_change_no_verdict(seed: int) -> None:
    rng = random.Random(seed)
    traces = traces_of(changed(SHORT, rng))
    expected = explained_by_force(Raft(), traces)
    assert check_traces(Raft(), traces).valid is expected
    assert check_traces(Slow(), traces).valid is expected


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_clocks_change_no_verdict(seed: int) -> None:
    rng = random.Random(seed)
    events = events_of(ELECTION, REPLICATION, SECOND, REST)
    events = changed(events, rng) if rng.random() < 0.8 else events
    shifts = {node: rng.uniform(-40, 40) for node in ("n1", "n2", "n3")}
    shifted = [replace(event, time=(event.time or 0) + shifts[event.node]) for event in events]
    assert check_traces(Raft(), traces_of(events)).valid is check_traces(Raft(), traces_of(shifted)).valid


# Logs


@given(st.integers(0, 300), st.randoms(use_true_random=False))
def test_an_entry_is_found_in_a_log_of_any_length(length: int, rng: random.Random) -> None:
    entries = [EMPTY]
    for index in range(length):
        entries.append(Entry(index, 1 + index // 7, rng.randrange(2**32), entries[-1]))
    log = entries[-1]
    for index in {-1, *(rng.randrange(length) for _ in range(min(length, 20)))}:
        assert log.at(index) is entries[index + 1]
        assert log.holds(entries[index + 1]) and entries[index + 1].at(length) is entries[index + 1]
    other = Entry(length - 1, 9999, 0, entries[-2] if length else None)
    assert not log.holds(other)


def test_an_entry_is_found_in_few_steps() -> None:
    log = EMPTY
    for index in range(100_000):
        log = Entry(index, 1, index, log)
    steps, entry = 0, log
    while entry.index > 3:
        entry = entry.jump if entry.jump.index >= 3 else entry.parent
        steps += 1
    assert steps < 60
