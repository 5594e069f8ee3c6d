"""Raft, as the node of this project runs it, as a model of its replicas' traces.

What the replicas log (``node/dledger/tracing.py``), besides the fields that ``checker.trace.events`` names:

    start     a process has recovered: term, vote, last, last_term, last_crc, commit, group, group_index, sync,
              may_change
    vote      term and vote are durable: term, for (null: none yet)
    stand     it asks for votes in its term: term
    granted   an answer with a vote has come: term, by
    lead      it leads: term, and the group that it counts: group, group_index
    follow    it follows: term, leader
    candidate it neither leads nor follows any more: term
    append    entries are in its log: first, term, crcs, and groups ({index: members}) if some define the group
    truncate  nothing after an entry is in its log any more: last.  cut: the oldest truncation is durable
    reset     its whole log is forgotten and begins again: first
    sync      its log is durable: last
    ack       it tells its leader that it has its log: term, last
    acked     such an answer has come: by, last
    commit    its committed index: last
    answer    a client is told that an entry is committed: last
    snapshot  it has taken or received a snapshot that ends with an entry: index, last_term

What must hold (numbers of sections are those of Ongaro's thesis):

    votes         terms never go back and a vote is never forgotten, restarts included; a term has one vote of a member,
                  which it may only transfer to the leader of that term (node.dledger.membership); it goes to a log that
                  is at least as good (3.6.1)
    election      a leader has the votes of a majority of the group in its log, and a term is led once
    completeness  a leader has every entry that was committed in an earlier term (3.6.3)
    matching      entries come from the leader of their term, and behind the same entries as there
    appending     a leader removes nothing; a follower removes nothing committed, nothing that it has acknowledged in
                  this term, and nothing that its leader has too
    commitment    a leader commits entries of its own term that a majority has acknowledged (3.6.2); a follower what
                  some leader has committed; no two commit different entries; a client hears of nothing else
    durability    what was acknowledged was synced, and what was synced is there after a restart; what had been removed
                  durably is not.  Entries that were not synced may be lost
    membership    a group changes by one member at a time, after the leader's own entry and the change before are
                  committed (4.1 and its correction); a leader that has committed its own removal commits nothing that
                  it appended after that

The state keeps everything that was ever said, so events of different replicas commute: each check is made by whichever
of two events comes second, and what an event needs from another replica stays true once it is.  Every event may
therefore be taken as soon as it is possible, and a trace is judged in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from checker.trace.events import Event, TraceError
from checker.trace.model import TraceModel
from checker.trace.models.raft_log import EMPTY, Entry, Group

__all__ = ["Raft", "RaftState"]

LEADER, FOLLOWER, CANDIDATE = "leader", "follower", "candidate"


@dataclass(frozen=True, slots=True)
class _Replica:
    """What is known of one replica.  ``log`` is what it has in memory, ``ghosts`` are its logs before truncations that
    may not be durable yet."""

    name: str
    starts: int = 0
    sync: bool = True
    may_change: bool = False
    configured: frozenset[str] = frozenset()
    term: int = 0
    vote: str | None = None
    role: str = CANDIDATE
    leader: str | None = None
    votes: tuple[tuple[int, str], ...] = ()
    """(term, candidate) of every vote that it ever gave."""
    stands: tuple[tuple[int, Entry], ...] = ()
    """(term, log) of every round of votes that it began."""
    granted: frozenset[str] = frozenset()
    """Whose votes of its term it has got."""
    log: Entry = EMPTY
    begins_at: int = 0
    synced: Entry = EMPTY
    ghosts: tuple[Entry, ...] = ()
    kept: Group | None = None
    """A group that it knows to be committed although its log ends before, from a snapshot or a log that is gone."""
    commit: Entry = EMPTY
    acks: tuple[tuple[int, Entry], ...] = ()
    """(term, newest entry) that it has acknowledged to the leader of a term, by term."""
    marks: tuple[tuple[str, int], ...] = ()
    """While it leads: (member, index) of the newest acknowledgement that it got from each."""
    removed_at: int | None = None
    """While it leads: the end of its log when it had committed that it does not belong to the group any more."""

    @property
    def group(self) -> Group:
        """The group that counts for it."""
        own = self.log.group or Group(-1, self.configured)
        return own if self.kept is None or self.kept.index <= own.index else self.kept

    def acked_in(self, term: int) -> Entry:
        return self.acks[-1][1] if self.acks and self.acks[-1][0] == term else EMPTY

    def ever_acked(self, term: int) -> Entry:
        return next((entry for each, entry in reversed(self.acks) if each == term), EMPTY)

    def ever_voted(self, term: int, candidate: str) -> bool:
        return (term, candidate) in reversed(self.votes)


@dataclass(frozen=True, slots=True)
class _Leader:
    """A term's leader: its log when it was elected, its newest entry of the term, and how far it has committed."""

    term: int
    name: str
    elected: Entry
    last: Entry
    commit: Entry = EMPTY


class RaftState(NamedTuple):
    """Replicas by name, leaders by term, and the newest entry that any replica has committed."""

    replicas: tuple[_Replica, ...]
    leaders: tuple[_Leader, ...] = ()
    committed: Entry = EMPTY


class _Refused(Exception):
    """An event is impossible; ``is_final``: and stays so."""

    def __init__(self, why: str, *, is_final: bool = True) -> None:
        super().__init__(why)
        self.is_final = is_final


def _later(why: str) -> _Refused:
    """An event is impossible until another replica has done something."""
    return _Refused(why, is_final=False)


Step = Callable[[RaftState, _Replica, Event], RaftState]


class Raft(TraceModel):
    """See the module."""

    name = "raft"

    def init(self, nodes: Sequence[str]) -> Iterable[RaftState]:
        return [RaftState(tuple(_Replica(node) for node in nodes))]

    def next(self, state: RaftState, event: Event) -> Iterable[RaftState]:
        try:
            return [self._step(state, event)]
        except _Refused:
            return []

    def commutes(self, event: Event) -> bool:
        return True

    def never(self, state: RaftState, event: Event) -> bool:
        refused = self._refusal(state, event)
        return refused is not None and refused.is_final

    def why(self, state: RaftState, event: Event) -> str:
        refused = self._refusal(state, event)
        return "" if refused is None else str(refused)

    def describe(self, state: RaftState) -> str:
        said = []
        for each in state.replicas:
            role = f"follows {each.leader}" if each.role == FOLLOWER else each.role
            vote = f", voted for {each.vote}" if each.vote is not None else ""
            said.append(
                f"{each.name}: term {each.term}{vote}, {role}, log ends with {each.log}, committed {each.commit.index}"
            )
        leaders = ", ".join(f"{each.term}: {each.name}" for each in state.leaders[-5:])
        return "\n".join([*said, f"last leaders by term: {leaders or 'none'}", f"committed: {state.committed}"])

    def _refusal(self, state: RaftState, event: Event) -> _Refused | None:
        try:
            self._step(state, event)
        except _Refused as refused:
            return refused
        return None

    def _step(self, state: RaftState, event: Event) -> RaftState:
        step = _STEPS.get(event.name)
        if step is None:
            raise TraceError(f"{event.place}: {event.name!r} is no event of model {self.name}")
        replica = next(each for each in state.replicas if each.name == event.node)
        if not replica.starts and event.name != "start":
            raise TraceError(f"{event.place}: the trace does not begin with the replica's start")
        return step(state, replica, event)


# Starts


def _start(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    name, term, vote = replica.name, _number(event, "term"), event["vote"]
    last, last_term = _number(event, "last"), _number(event, "last_term")
    if not replica.starts:
        if last >= 0:
            raise TraceError(f"{event.place}: the log has {last + 1} entries already: traces begin with an empty one")
        replica = replace(replica, configured=_names(event, "group"))
    elif term < replica.term:
        raise _Refused(f"{name} starts in term {term}, but was in term {replica.term} before")
    elif term == replica.term and replica.vote is not None and vote != replica.vote:
        raise _Refused(f"{name} starts without its vote of term {term}, which it gave to {replica.vote}")
    log = _recovered(replica, last, last_term, event["last_crc"])
    commit = _number(event, "commit")
    if commit > last:
        raise _Refused(f"{name} starts with {commit} as its committed index, and its log ends at {last}")
    replica = _with_group(state, replace(replica, log=log), event)
    votes = replica.votes if vote is None else (*replica.votes, (term, vote))
    return _with(
        state,
        replace(
            replica,
            starts=replica.starts + 1,
            sync=bool(event.get("sync", True)),
            may_change=bool(event.get("may_change", False)),
            term=term,
            vote=vote,
            votes=votes,
            role=CANDIDATE,
            leader=None,
            granted=frozenset(),
            log=log,
            synced=log,
            ghosts=(),
            commit=log.at(commit),
            marks=(),
        ),
    )


def _with_group(state: RaftState, replica: _Replica, event: Event) -> _Replica:
    """The replica with the group that the event says it counts: that of its log, or a later one that is committed."""
    group, found = replica.group, Group(_number(event, "group_index"), _names(event, "group"))
    if found == group:
        return replica
    said = f"{replica.name} takes {found} for the group"
    if found.index <= group.index:
        raise _Refused(f"{said}, but it is {group}")
    if found.index > state.committed.index:
        raise _later(f"{said}, which is not committed, and not in its log")
    if state.committed.at(found.index).group != found:
        raise _Refused(f"{said}, but no entry that is committed there says so")
    return replace(replica, kept=found)


def _recovered(replica: _Replica, last: int, last_term: int, crc: Any) -> Entry:
    """The log that a start has found: the one in memory before or what was left of it, with nothing missing that was
    durable; or an older one if a truncation was not durable."""
    name = replica.name
    for log in (replica.log, *replica.ghosts):
        entry = log.at(last)
        if entry.index == last and (entry.term, entry.crc) == ((last_term, crc) if last >= 0 else (-1, 0)):
            if replica.sync and last < replica.synced.index:
                break
            return entry
    if replica.sync and last < replica.synced.index:
        raise _Refused(f"{name} starts with a log up to {last}, but had synced entries up to {replica.synced.index}")
    if last > replica.log.index:
        raise _Refused(f"{name} starts with entries after {replica.log.index} that its log did not have, up to {last}")
    raise _Refused(
        f"{name} starts with an entry {last} of term {last_term} that its log did not have: there was "
        f"{replica.log.at(last)}"
    )


# Elections


def _vote(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    term, candidate, name = _number(event, "term"), event["for"], replica.name
    if term < replica.term:
        raise _Refused(f"{name} goes back from term {replica.term} to {term}")
    if term > replica.term and replica.role == LEADER:
        raise _Refused(f"{name} enters term {term} while it leads term {replica.term}")
    if term == replica.term and replica.vote not in (None, candidate):
        _check_transfer(state, replica, term, candidate)
    elif candidate not in (None, name):
        _check_restriction(state, replica, term, candidate)
    is_new = term > replica.term
    return _with(
        state,
        replace(
            replica,
            term=term,
            vote=candidate,
            votes=replica.votes if candidate is None else (*replica.votes, (term, candidate)),
            granted=frozenset() if is_new else replica.granted,
            leader=None if is_new else replica.leader,
        ),
    )


def _check_transfer(state: RaftState, replica: _Replica, term: int, candidate: str | None) -> None:
    leader = _leader_of(state, term)
    said = f"{replica.name} votes for {candidate} in term {term}, but had voted for {replica.vote}"
    if candidate is None or not replica.may_change or (leader is not None and leader.name != candidate):
        raise _Refused(said)
    if leader is None:
        raise _later(f"{said}, and {candidate} does not lead that term")


def _check_restriction(state: RaftState, replica: _Replica, term: int, candidate: str) -> None:
    """The election restriction; a vote that follows a leader has no such condition."""
    leader = _leader_of(state, term)
    if replica.may_change and leader is not None and leader.name == candidate:
        return
    other = _replica(state, candidate)
    logs = [log for each, log in other.stands if each == term]
    if not any(log.is_at_least(replica.log) for log in logs):
        has = f"whose log ends with {logs[-1]}" if logs else "which has not asked for votes in it"
        raise _later(f"{replica.name}, whose log ends with {replica.log}, votes in term {term} for {candidate}, {has}")


def _stand(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    term = _current(replica, event)
    if replica.role != CANDIDATE:
        raise _Refused(f"{replica.name} asks for votes in term {term} as a {replica.role}")
    return _with(state, replace(replica, stands=(*replica.stands, (term, replica.log)), granted=frozenset()))


def _granted(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    term, voter = _number(event, "term"), event["by"]
    if not _replica(state, voter).ever_voted(term, replica.name):
        raise _later(f"{replica.name} counts a vote of {voter} in term {term}, which {voter} has not given to it")
    if term != replica.term:
        return state  # it came too late
    return _with(state, replace(replica, granted=replica.granted | {voter}))


def _lead(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    term, name = _current(replica, event), replica.name
    before = _leader_of(state, term)
    if before is not None:
        others = f"{before.name} and {name} both lead" if before.name != name else f"{name} leads for the second time"
        raise _Refused(f"{others} term {term}")
    replica = _with_group(state, replica, event)
    members = replica.group.members
    own = {name} if replica.ever_voted(term, name) else frozenset()
    voters = (replica.granted | own) & members
    if len(voters) < replica.group.quorum_size:
        raise _Refused(f"{name} leads term {term} with votes of {_listed(voters)} only, out of {_listed(members)}")
    for each in state.leaders:
        if each.term < term and not replica.log.holds(each.commit):
            raise _Refused(_incomplete(name, term, replica.log, each.commit, each.term))
    leader = _Leader(term, name, replica.log, replica.log)
    place = sum(each.term < term for each in state.leaders)
    return _with(
        state._replace(leaders=(*state.leaders[:place], leader, *state.leaders[place:])),
        replace(replica, role=LEADER, leader=name, marks=(), removed_at=None),
    )


def _incomplete(name: str, term: int, log: Entry, entry: Entry, committed_in: int) -> str:
    has = log.at(entry.index) if log.index >= entry.index else EMPTY
    return f"{name} leads term {term} without {entry}, which was committed in term {committed_in}: it has {has} there"


def _follow(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    term, name = _current(replica, event), event["leader"]
    leader = _leader_of(state, term)
    if leader is None:
        raise _later(f"{replica.name} follows {name} in term {term}, which {name} does not lead")
    if leader.name != name:
        raise _Refused(f"{replica.name} follows {name} in term {term}, which {leader.name} leads")
    return _with(state, replace(replica, role=FOLLOWER, leader=name))


def _candidate(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    return _with(state, replace(replica, role=CANDIDATE, leader=None, marks=()))


# The log


def _append(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    first, term = _number(event, "first"), _number(event, "term")
    if not isinstance(event["crcs"], list) or not event["crcs"]:
        raise TraceError(f"{event.place}: crcs must be a list of checksums, not {event['crcs']!r:.40}")
    if (replica.log is not EMPTY or first != replica.begins_at) and first != replica.log.index + 1:
        raise _Refused(f"{replica.name} appends entry {first} behind entry {replica.log.index}")
    if replica.role == LEADER:
        return _append_as_leader(state, replica, event, term)
    if replica.role != FOLLOWER:
        raise _Refused(f"{replica.name} appends entry {first} although it neither leads nor follows")
    leader = _leader_of(state, term)
    last = first + len(event["crcs"]) - 1
    if leader is None or leader.last.index < last:
        raise _later(f"{replica.name} appends entry {last} of term {term}, which no leader of that term has appended")
    log = leader.last.at(last)
    for entry in _backwards(log, first):
        if entry.term != term or entry.crc != event["crcs"][entry.index - first]:
            raise _Refused(f"entry {entry.index} of term {term} of {replica.name} is another one than {leader.name}'s")
    before = log.at(first - 1)
    if replica.log is not EMPTY and before != replica.log:
        raise _Refused(
            f"{replica.name} appends entry {first} of term {term} behind {replica.log}; in the log of {leader.name} it "
            f"is behind {before}"
        )
    return _with(state, replace(replica, log=log))


def _backwards(log: Entry, first: int) -> Iterable[Entry]:
    while log.index >= first:
        yield log
        log = log.parent


def _append_as_leader(state: RaftState, replica: _Replica, event: Event, term: int) -> RaftState:
    first = event["first"]
    if term != replica.term:
        raise _Refused(f"{replica.name} leads term {replica.term} and appends entry {first} of term {term}")
    groups: Any = event.get("groups", {})
    if not isinstance(groups, dict) or not all(isinstance(each, list) for each in groups.values()):
        raise TraceError(f"{event.place}: groups must map indices to lists of names, not {groups!r:.40}")
    log = replica.log
    if first != log.index + 1:
        raise TraceError(f"{event.place}: a leader's log that begins at {first} is beyond this model")
    for index, crc in enumerate(event["crcs"], first):
        members = groups.get(str(index))
        if members is not None:
            _check_change(replace(replica, log=log), index, frozenset(members))
        log = Entry(index, term, crc, log, None if members is None else frozenset(members))
    leaders = tuple(replace(each, last=log) if each.term == term else each for each in state.leaders)
    return _with(state._replace(leaders=leaders), replace(replica, log=log))


def _check_change(replica: _Replica, index: int, members: frozenset[str]) -> None:
    group, name = replica.group, replica.name
    if len(group.members ^ members) > 1:
        raise _Refused(f"{name} changes the group from {_listed(group.members)} to {_listed(members)} at once")
    if group.members == members:
        return  # restated
    if group.index > replica.commit.index:
        raise _Refused(f"{name} changes the group by entry {index} before its change by {group.index} is committed")
    if replica.commit.term != replica.term:
        raise _Refused(f"{name} changes the group by entry {index} before it has committed an entry of its own term")


def _truncate(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    last, name = _number(event, "last"), replica.name
    if last >= replica.log.index:
        raise _Refused(f"{name} removes what follows entry {last}, but its log ends at {replica.log.index}")
    if last < replica.commit.index:
        raise _Refused(f"{name} removes entries after {last}, but has committed up to {replica.commit.index}")
    if replica.role != FOLLOWER:
        raise _Refused(f"{name} removes entries after {last} as a {replica.role}")
    if last < replica.acked_in(replica.term).index:
        acked = replica.acked_in(replica.term).index
        raise _Refused(f"{name} removes entries after {last}, but has acknowledged entry {acked} to {replica.leader}")
    removed = replica.log.at(last + 1)
    if _is_leaders(state, replica.term, removed):
        raise _Refused(f"{name} removes {removed}, which {replica.leader}, its leader, has too")
    kept = replica.log.at(last)
    return _with(
        state,
        replace(
            replica,
            log=kept,
            synced=kept if replica.synced.index > last else replica.synced,
            ghosts=(*replica.ghosts, replica.log),
        ),
    )


def _cut(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    return _with(state, replace(replica, ghosts=replica.ghosts[1:]))


def _reset(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    first = _number(event, "first")
    if first <= replica.commit.index:
        committed = replica.commit.index
        raise _Refused(f"{replica.name} begins its log again at {first}, but has committed up to {committed}")
    if replica.role != FOLLOWER:
        raise _Refused(f"{replica.name} begins its log again at {first} as a {replica.role}")
    ghosts = (*replica.ghosts, replica.log)
    return _with(state, replace(replica, log=EMPTY, synced=EMPTY, ghosts=ghosts, begins_at=first))


def _sync(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    last = _number(event, "last")
    if last > replica.log.index:
        raise _Refused(f"{replica.name} has synced entry {last}, but its log ends at {replica.log.index}")
    # What is left of a log that is being forgotten is none of the new one's.
    return _with(state, replace(replica, synced=replica.log.at(last) if last >= replica.begins_at else EMPTY))


def _ack(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    term, last, name = _current(replica, event), _number(event, "last"), replica.name
    if replica.role != FOLLOWER:
        raise _Refused(f"{name} acknowledges entry {last} as a {replica.role}")
    if last > replica.log.index:
        raise _Refused(f"{name} acknowledges entry {last}, but its log ends at {replica.log.index}")
    if last > replica.synced.index:
        raise _Refused(f"{name} acknowledges entry {last}, but has synced only up to {replica.synced.index}")
    entry = replica.log.at(last)
    if not _is_leaders(state, term, entry):
        raise _Refused(f"{name} acknowledges {entry} to {replica.leader}, whose log does not have it")
    if last <= replica.acked_in(term).index:
        return state
    acks = replica.acks[:-1] if replica.acks and replica.acks[-1][0] == term else replica.acks
    return _with(state, replace(replica, acks=(*acks, (term, entry))))


def _acked(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    member, last = event["by"], _number(event, "last")
    if replica.role != LEADER:
        raise _Refused(f"{replica.name} counts an acknowledgement of {member} as a {replica.role}")
    if _replica(state, member).ever_acked(replica.term).index < last:
        raise _later(
            f"{replica.name} takes entry {last} for acknowledged by {member} in term {replica.term}, and {member} has "
            "not acknowledged it"
        )
    known = dict(replica.marks)
    if last <= known.get(member, -1):
        return state  # it was on its way for longer than a later one
    return _with(state, replace(replica, marks=tuple({**known, member: last}.items())))


# Commitment


def _commit(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    last, name = _number(event, "last"), replica.name
    if last > replica.log.index:
        raise _Refused(f"{name} commits entry {last}, but its log ends at {replica.log.index}")
    if last < replica.commit.index:
        raise _Refused(f"{name} had committed up to {replica.commit.index}, and now only up to {last}")
    entry, newest = replica.log.at(last), state.committed
    if not newest.holds(entry) and not entry.holds(newest):
        at = min(last, newest.index)
        raise _Refused(f"{name} commits {entry}, behind {entry.at(at)}; another replica has committed {newest.at(at)}")
    if replica.role == LEADER:
        state = _commit_as_leader(state, replica, entry)
    elif not newest.holds(entry):
        raise _later(f"{name} commits {entry}, which no leader has committed")
    newest = entry if entry.index > newest.index else newest
    removed_at, group = replica.removed_at, replica.group
    if removed_at is None and replica.role == LEADER and name not in group.members and group.index <= last:
        removed_at = replica.log.index
    return _with(state._replace(committed=newest), replace(replica, commit=entry, removed_at=removed_at))


def _commit_as_leader(state: RaftState, replica: _Replica, entry: Entry) -> RaftState:
    name, term, group = replica.name, replica.term, replica.group
    if entry.term != term:
        raise _Refused(f"{name} leads term {term} and commits {entry} by counting replicas")
    if replica.removed_at is not None and entry.index > replica.removed_at:
        removed = f"it has committed its own removal by entry {group.index} before it appended that"
        raise _Refused(f"{name} commits {entry}, although {removed}")
    holders = {member for member, index in replica.marks if index >= entry.index} & group.members
    if name in group.members and replica.synced.index >= entry.index:
        holders.add(name)
    if len(holders) < group.quorum_size:
        raise _Refused(
            f"{name} commits {entry}, which only {_listed(holders)} of {_listed(group.members)} are known to have"
        )
    for each in state.leaders:
        if each.term > term and not each.elected.holds(entry):
            raise _Refused(_incomplete(each.name, each.term, each.elected, entry, term))
    leaders = tuple(replace(each, commit=entry) if each.term == term else each for each in state.leaders)
    return state._replace(leaders=leaders)


def _answer(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    last = _number(event, "last")
    if last > replica.commit.index:
        committed = replica.commit.index
        raise _Refused(
            f"{replica.name} tells a client that entry {last} is committed, but has committed up to {committed}"
        )
    return state


def _snapshot(state: RaftState, replica: _Replica, event: Event) -> RaftState:
    index, term = _number(event, "index"), _number(event, "last_term")
    entry = state.committed.at(index)
    if entry.index < index:
        raise _later(f"{replica.name} has a snapshot of entry {index}, which no replica has committed")
    if entry.term != term:
        raise _Refused(f"{replica.name} has a snapshot of entry {index} of term {term}; {entry} was committed there")
    return state


_STEPS: Mapping[str, Step] = {
    "start": _start,
    "vote": _vote,
    "stand": _stand,
    "granted": _granted,
    "lead": _lead,
    "follow": _follow,
    "candidate": _candidate,
    "append": _append,
    "truncate": _truncate,
    "cut": _cut,
    "reset": _reset,
    "sync": _sync,
    "ack": _ack,
    "acked": _acked,
    "commit": _commit,
    "answer": _answer,
    "snapshot": _snapshot,
}


# What the steps share


def _with(state: RaftState, replica: _Replica) -> RaftState:
    replicas = tuple(replica if each.name == replica.name else each for each in state.replicas)
    return state._replace(replicas=replicas)


def _replica(state: RaftState, name: str) -> _Replica:
    found = next((each for each in state.replicas if each.name == name), None)
    if found is None:
        raise TraceError(f"there is no trace of {name}")
    return found


def _leader_of(state: RaftState, term: int) -> _Leader | None:
    return next((each for each in reversed(state.leaders) if each.term == term), None)


def _is_leaders(state: RaftState, term: int, entry: Entry) -> bool:
    """Whether the leader of ``term`` has an entry: it had it when it was elected, or appended it itself."""
    leader = _leader_of(state, term)
    return leader is not None and (entry.term == term or leader.elected.holds(entry))


def _current(replica: _Replica, event: Event) -> int:
    """The event's term, which must be the replica's."""
    term = _number(event, "term")
    if term != replica.term:
        raise _Refused(f"{replica.name} is in term {replica.term}, not {term}")
    return term


def _number(event: Event, name: str) -> int:
    value = event[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise TraceError(f"{event.place}: {name} must be a number from -1 on, not {value!r:.40}")
    return value


def _names(event: Event, name: str) -> frozenset[str]:
    value = event[name]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TraceError(f"{event.place}: {name} must be a list of names, not {value!r:.40}")
    return frozenset(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"
