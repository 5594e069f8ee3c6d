"""Tools and clients of RocketMQ on Apache's broker and on ours, compared; makes docs/rocketmq-compatibility.md.

    python -m benchmarks node_compatibility                 # every difference, and which have no explanation
    python -m benchmarks node_compatibility --page          # the page as well
    python -m benchmarks node_compatibility --only mqadmin  # one guest

Every guest is unmodified, as from its registry. It makes the same calls to both brokers; answers are compared line by
line, without what varies between runs. Each difference must have a reason in `benchmarks/_compatibility_calls.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._apache_broker import APACHE_VERSION, PROXY_VERSION
from benchmarks._compatibility_calls import EXPLANATIONS, NOT_RUN, Explanation, mqadmin_lines, normal_lines
from benchmarks._compatibility_guests import (
    Side,
    build_go_peer,
    create_topics,
    run_ali_ons,
    run_grpc,
    run_java,
    run_mqadmin,
    run_peer,
    serve_both_sides,
)

__all__ = ["GUESTS", "PAGE", "Row", "compare", "main", "render"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rocketmq-compatibility.md"
SHOWN = 90
"""Answers are cut to this many characters in the table."""
Answers = list[tuple[str, tuple[str, ...]]]
"""Calls in order, each with the lines of its answer."""
Run = Callable[[Side], Answers]
Guest = Callable[[Path], Run]


@dataclass(frozen=True)
class Row:
    """A call, and the lines that only one broker's answer has. `common` is the number of lines that both have."""

    guest: str
    call: str
    answer: tuple[str, ...]
    apache: tuple[str, ...]
    ours: tuple[str, ...]

    def explanations(self, known: Iterable[Explanation] = EXPLANATIONS) -> list[Explanation]:
        """The explanations of at least one line of the difference."""
        lines = (*self.apache, *self.ours)
        call = f"{self.guest}: {self.call}"
        return [
            each for each in known
            if re.search(each.call, call) and any(re.search(each.line, line) for line in lines)
        ]  # fmt: skip

    def unexplained(self) -> list[str]:
        """Lines of the difference without an explanation."""
        reasons = self.explanations()
        return [line for line in (*self.apache, *self.ours) if not any(re.search(each.line, line) for each in reasons)]


def _mqadmin(side: Side) -> Answers:
    """Runs mqadmin's command lines. Raises AssertionError if mqadmin has a command that is not listed."""
    lines = mqadmin_lines(side)
    answers = run_mqadmin(side, "4.9.8", [["@commands"], *lines])
    known = set(answers[0]["out"].split())
    unknown = known - {line[0] for line in lines} - NOT_RUN.keys()
    assert not unknown, f"mqadmin has commands that are neither run nor listed: {sorted(unknown)}"
    named = ((answer["line"].replace("\t", " ").replace(side.broker, "BROKER"), answer) for answer in answers)
    return [
        (re.sub(r"\S*/files\b", "DIRECTORY", name), normal_lines(answer["out"] + answer["err"]))
        for name, answer in named
        if not name.startswith("@")
    ]  # fmt: skip


def _flattened(value: Any, place: str = "") -> Iterable[str]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _flattened(each, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for each in value:
            yield f"{place} {json.dumps(each, sort_keys=True)}".lstrip()
    else:
        yield f"{place}: {json.dumps(value)}" if place else json.dumps(value)


def _peer(lines: Sequence[Mapping[str, Any]]) -> Answers:
    """The answers of a peer that prints a line for each step or call."""
    answers: Answers = []
    for line in lines:
        name = line.get("step") or line["call"]
        result = _flattened(line["result"]) if "result" in line else [str(line.get("error"))]
        answers.append((name, normal_lines("\n".join(result))))
    return answers


JAVA_TOPICS = {
    **{"plain": 4, "ordered": 3, "transfers": 2, "prices": 4, "work": 4, "difficult": 1, "later": 1, "numbers": 2},
    **{"requests": 2},
}
GO_TOPICS = {"plain": 4, "ordered": 1, "transfers": 2, "prices": 1, "difficult": 1, "later": 1, "numbers": 1}
SENT_BY_ALI_ONS = 20


def _java_client(version: str) -> Guest:
    def run(side: Side) -> Answers:
        asyncio.run(create_topics(side, JAVA_TOPICS))
        return _peer(run_java(side, "ClientPeer", version, side.name_server))

    return lambda work: run


def _admin_calls(side: Side) -> Answers:
    return _peer(run_java(side, "AdminPeer", "4.9.8", side.name_server, side.broker, "2500"))


def _go_client(work: Path) -> Run:
    program = build_go_peer(work / "go")

    def run(side: Side) -> Answers:
        asyncio.run(create_topics(side, GO_TOPICS))
        return _peer(run_peer([str(program), side.name_server], side.directory, {"HOME": str(side.directory)}))

    return run


def _ali_ons(side: Side) -> Answers:
    """Sends messages and consumes two of three tags; one message is returned and redelivered."""
    asyncio.run(create_topics(side, {"orders": 4}))
    task: dict[str, Any] = {"topic": "orders", "group": "theirs"}
    sent = run_ali_ons(side, 0, action="produce", first=0, count=SENT_BY_ALI_ONS, **task)
    options = {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "pollNameServerInteval": 1000}
    task |= {"options": options | {"rebalanceInterval": 1000}, "expression": "tag-1 || tag-2", "failFirst": "k-7"}
    expected = sum(number % 3 > 0 for number in range(SENT_BY_ALI_ONS))
    came = run_ali_ons(side, expected, action="consume", **task)
    lines = (
        f"{each['keys']} {each['tags']} {len(each['body'])} again {each['reconsumeTimes']}"
        for each in came
        if "body" in each
    )
    errors = (f"error: {each['error']}" for each in (*sent, *came) if "error" in each)
    return [
        ("send 20 messages", normal_lines("\n".join(str(each.get("status", each)) for each in sent))),
        ("consume by tag, one message given back", normal_lines("\n".join(lines))),
        ("errors", normal_lines("\n".join(errors))),
    ]


def _grpc_client(side: Side) -> Answers:
    topics = {"normal": 2, "fifo": 2, "later": 2, "transactional": 2}
    types = {"fifo": "FIFO", "later": "DELAY", "transactional": "TRANSACTION"}
    asyncio.run(create_topics(side, topics, types=types, ordered_group="ordered"))
    return _peer(run_grpc(side))


def _popping_client(side: Side) -> Answers:
    """Java's push consumer in POP mode, and timer messages."""
    asyncio.run(create_topics(side, {"popped": 4, "timed": 2}))
    return _peer(run_java(side, "PopPeer", "5.3.1", side.name_server, side.broker))


GUESTS: Mapping[str, Guest] = {
    "mqadmin 4.9.8": lambda work: _mqadmin,
    "DefaultMQAdminExt 4.9.8": lambda work: _admin_calls,
    "Java client 4.9.8": _java_client("4.9.8"),
    "Java client 5.3.1": _java_client("5.3.1"),
    f"Java client 5.3.1 in POP mode, broker {PROXY_VERSION}": lambda work: _popping_client,
    "Go client 2.1.2": _go_client,
    "ali-ons 3.12.0": lambda work: _ali_ons,
    f"gRPC client 5.0.7, proxy {PROXY_VERSION}": lambda work: _grpc_client,
}
"""Functions that prepare each guest in a directory and return what to run on a side, in the order of the page. Each
guest has its own brokers."""


def compare(guest: str, work: Path) -> list[Row]:
    """Compare the answers of both brokers to a guest. Raises OperatorError if something cannot be fetched,
    AssertionError if a guest or a broker fails."""
    run = GUESTS[guest](work)
    version = PROXY_VERSION if guest.endswith(PROXY_VERSION) else APACHE_VERSION
    with serve_both_sides(work, version) as sides, ThreadPoolExecutor(len(sides)) as threads:
        apache, ours = threads.map(run, sides)
    assert [call for call, _ in apache] == [call for call, _ in ours], f"{guest} made other calls"
    rows = []
    for (call, theirs), (_, own) in zip(apache, ours, strict=True):
        left, right = Counter(theirs), Counter(own)
        rows.append(Row(guest, call, theirs, tuple((left - right).elements()), tuple((right - left).elements())))
    return rows


def _cell(lines: Sequence[str]) -> str:
    if not lines:
        return "nothing more"
    text = lines[0] if len(lines[0]) <= SHOWN else f"{lines[0][:SHOWN]}..."
    text = text.replace("|", "\\|").replace("`", "'")
    return f"`{text}`" + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")


def _section(guest: str, rows: Sequence[Row]) -> str:
    text = [f"## {guest}", "", "| call | Apache | ours | why |", "|---|---|---|---|"]
    for row in rows:
        if row.apache or row.ours:
            reasons = "; ".join(dict.fromkeys(each.reason for each in row.explanations()))
            text.append(f"| `{row.call}` | {_cell(row.apache)} | {_cell(row.ours)} | {reasons} |")
        else:
            text.append(f"| `{row.call}` | {_cell(row.answer)} | the same | |")
    if guest.startswith("mqadmin"):
        text += ["", "Not run: " + "; ".join(f"`{name}` ({why})" for name, why in NOT_RUN.items()) + "."]
    return "\n".join(text) + "\n"


def render(rows: Sequence[Row], old: str = "") -> str:
    """The page; guests without rows keep their section of the old page."""
    sections = []
    for guest in GUESTS:
        if found := [row for row in rows if row.guest == guest]:
            sections.append(_section(guest, found))
        elif f"## {guest}\n" in old:
            kept = old.partition(f"## {guest}\n")[2].partition("\n## ")[0]
            sections.append(f"## {guest}\n{kept.rstrip()}\n")
    lines = [line for section in sections for line in section.splitlines() if line.startswith("| `")]
    same = sum(" | the same | " in line for line in lines)
    return f"""# RocketMQ's tools and clients on both brokers

<!-- made by: python -m benchmarks node_compatibility --page -->

The same unmodified program made each command and call to a broker of Apache RocketMQ {APACHE_VERSION}
({PROXY_VERSION} with the proxy) with its name server, and to this project's. Answers are compared line by line, without
addresses, times, identities and rates; the table shows the first line, or the first that only one broker has.
A difference without a reason fails `make test-systems`.

{same} of {len(lines)} are the same.

""" + "\n".join(sections)


def main() -> int:
    """Compare; returns 1 if a difference has no explanation."""
    parser = argparse.ArgumentParser(prog="node_compatibility", description=__doc__)
    parser.add_argument("--only", choices=sorted(GUESTS), action="append", help="a guest (more than once)")
    parser.add_argument("--page", action="store_true", help="write their part of docs/rocketmq-compatibility.md")
    options = parser.parse_args()
    rows: list[Row] = []
    for guest in options.only or GUESTS:
        with tempfile.TemporaryDirectory(prefix="compatibility-") as work:
            rows += compare(guest, Path(work))
    for row in rows:
        if row.apache or row.ours:
            print(f"{row.guest}: {row.call}")
            for mark, lines in (("-", row.apache), ("+", row.ours)):
                for line in lines:
                    print(f"  {'?' if line in row.unexplained() else ' '} {mark} {line[:300]}")
    if options.page:
        old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        PAGE.write_text(render(rows, old), encoding="utf-8")
    missing = sum(bool(row.unexplained()) for row in rows)
    print(f"{len(rows)} calls, {sum(bool(row.apache or row.ours) for row in rows)} differ, {missing} without a reason")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
