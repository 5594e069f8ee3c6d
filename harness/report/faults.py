"""The faults of a run as table rows: when, what, which hosts were cut from each other, and whether it was proven."""

from __future__ import annotations

__all__ = ["FaultRow", "cut_in_a_line", "cut_words", "fault_rows", "hosts_of", "matrix"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from harness.report.svg import element
from harness.units import clip, duration, instant

CELL_PX = 9
LABEL_PX = 18
MAX_HOSTS_DRAWN = 16
"""Most hosts in the small matrix; more would be unreadable, and the text names them anyway."""

MAX_HOSTS = 64
"""Most hosts taken from the results; a run has a handful."""

HOST_CHARACTERS = 24
"""Host names are cut to this length."""

MAX_WORDS_HOSTS = 6
"""Most receiving hosts whose cut links are listed one by one."""


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One fault as the table shows it."""

    number: int
    ident: str
    nemesis: str
    variant: str
    note: str
    start: str
    length: str
    words: str
    picture: Markup | None
    proven: bool
    proof: str
    exercised: bool | None
    met: str
    healed: bool
    heal_proof: str
    lasted: bool


def hosts_of(results: Mapping[str, Any], test: Mapping[str, Any]) -> list[str]:
    """The hosts of a run from results.json, else "n1", "n2", ... by the number of nodes in test.json."""
    hosts, nodes = results.get("hosts"), test.get("nodes")
    if isinstance(hosts, list) and hosts:
        return [str(host) for host in hosts[:MAX_HOSTS]]
    return [f"n{number}" for number in range(1, nodes + 1)] if isinstance(nodes, int) and 0 < nodes <= MAX_HOSTS else []


def fault_rows(faults: Sequence[Mapping[str, Any]], hosts: Sequence[str], limit: int) -> list[FaultRow]:
    """At most `limit` rows in order of time; unproven, unhealed and unexercised faults are kept before all others."""
    numbered = list(enumerate(faults, 1))
    doubtful = [item for item in numbered if _is_doubtful(item[1])]
    kept = {number for number, _ in doubtful[:limit]}
    for number, _ in numbered:
        if len(kept) >= limit:
            break
        kept.add(number)
    return [_row(number, fault, hosts) for number, fault in numbered if number in kept]


def _is_doubtful(fault: Mapping[str, Any]) -> bool:
    return fault.get("proven") is not True or not fault.get("healed", True) or fault.get("exercised") is False


def _row(number: int, fault: Mapping[str, Any], hosts: Sequence[str]) -> FaultRow:
    start_ns, end_ns = fault.get("start_ns"), fault.get("end_ns")
    grudge = _grudge(fault.get("grudge"))
    everyone = sorted(
        {
            *(clip(host, HOST_CHARACTERS) for host in hosts),
            *grudge,
            *(s for sources in grudge.values() for s in sources),
        },
        key=_by_name,
    )
    leader = fault.get("leader")
    return FaultRow(
        number=number,
        ident=clip(fault.get("id", ""), 20),
        nemesis=clip(fault.get("nemesis", "fault"), 40),
        variant=clip(fault.get("variant") or "", 40),
        note=f"leader: {clip(leader, 20)}" if leader else "",
        start=instant(start_ns) if isinstance(start_ns, (int, float)) else "never",
        length=_length(start_ns, end_ns),
        words=cut_words(grudge, everyone) or _struck(fault.get("hosts")),
        picture=matrix(grudge, everyone) if grudge and len(everyone) <= MAX_HOSTS_DRAWN else None,
        proven=fault.get("proven") is True,
        proof=_detail(fault.get("proof")),
        exercised=fault.get("exercised") if isinstance(fault.get("exercised"), bool) else None,
        met=_detail(fault.get("met")),
        healed=fault.get("healed") is True,
        heal_proof=_detail(fault.get("heal_proof")),
        lasted=isinstance(end_ns, (int, float)),
    )


def _struck(hosts: Any) -> str:
    return clip(" ".join(clip(host, HOST_CHARACTERS) for host in hosts), 160) if isinstance(hosts, list) else ""


def _length(start_ns: Any, end_ns: Any) -> str:
    both = isinstance(start_ns, (int, float)) and isinstance(end_ns, (int, float))
    return duration(end_ns - start_ns) if both else ""


def _grudge(raw: Any) -> dict[str, frozenset[str]]:
    if not isinstance(raw, Mapping):
        return {}
    return {
        clip(destination, HOST_CHARACTERS): frozenset(clip(source, HOST_CHARACTERS) for source in sources)
        for destination, sources in raw.items()
        if isinstance(sources, (list, tuple, set, frozenset)) and sources
    }


def _by_name(host: str) -> tuple[int, str]:
    return len(host), host


def _detail(proof: Any) -> str:
    if not isinstance(proof, Mapping):
        return "" if proof is None else clip(proof, 160)
    if proof.get("detail"):
        return clip(proof["detail"], 160)
    failed = proof.get("failed")
    return clip("; ".join(map(str, failed)), 160) if isinstance(failed, list) and failed else ""


def cut_words(grudge: Mapping[str, frozenset[str]], hosts: Sequence[str]) -> str:
    """A grudge as text: "n1 n2 | n3 n4 n5" if groups are cut from each other and connected within, otherwise a line
    for each host with the hosts it cannot receive from."""
    cut = {(source, destination) for destination, sources in grudge.items() for source in sources}
    if not cut:
        return ""
    both_ways = all((destination, source) in cut for source, destination in cut)
    if both_ways:
        groups: list[list[str]] = []
        for host in hosts:
            home = next((group for group in groups if all((host, member) not in cut for member in group)), None)
            if home is None:
                groups.append([host])
            else:
                home.append(host)
        pairs = {(a, b) for group in groups for other in groups if group is not other for a in group for b in other}
        if pairs == cut:
            return "  |  ".join(" ".join(group) for group in groups)
    lines = [
        f"{destination} deaf to {' '.join(sorted(sources, key=_by_name))}"
        for destination, sources in sorted(grudge.items(), key=lambda item: _by_name(item[0]))
    ]
    if len(lines) > MAX_WORDS_HOSTS:
        lines = [*lines[:MAX_WORDS_HOSTS], f"and {len(lines) - MAX_WORDS_HOSTS} more"]
    return "\n".join(lines)


def cut_in_a_line(raw: Any, limit: int) -> str:
    """A grudge of the history on one line of at most `limit` characters; empty if no link is cut."""
    grudge = _grudge(raw)
    everyone = sorted({*grudge, *(source for sources in grudge.values() for source in sources)}, key=_by_name)
    return clip(cut_words(grudge, everyone).replace("\n", "; ").replace("  |  ", " | "), limit)


def matrix(grudge: Mapping[str, frozenset[str]], hosts: Sequence[str]) -> Markup:
    """The cut links as a small picture: a row for each sender, a column for each receiver."""
    size = len(hosts) * CELL_PX
    whole, cut, own = [], [], []
    for row, source in enumerate(hosts):
        for column, destination in enumerate(hosts):
            square = f"M{LABEL_PX + column * CELL_PX} {row * CELL_PX}h{CELL_PX - 1}v{CELL_PX - 1}h-{CELL_PX - 1}z"
            if row == column:
                own.append(square)
            elif source in grudge.get(destination, ()):
                cut.append(square)
            else:
                whole.append(square)
    labels = [
        element("text", clip(host, 3), x=LABEL_PX - 3, y=row * CELL_PX + 7, text_anchor="end")
        for row, host in enumerate(hosts)
    ]
    return element(
        "svg",
        *labels,
        element("path", d="".join(own), class_="own"),
        element("path", d="".join(whole), class_="whole"),
        element("path", d="".join(cut), class_="cut"),
        width=LABEL_PX + size,
        height=size,
        class_="matrix",
        role="img",
        aria_label="rows send, columns receive; filled: cut",
    )
