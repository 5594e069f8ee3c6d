"""The page of the node's speed, made of what `node_bench --json` wrote.

python -m benchmarks.node_bench --kills 0 --reading --json FIGURES
python -m benchmarks._node_page FIGURES docs/node-speed.md
python -m benchmarks node_versus --page docs/node-speed.md
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BESIDE_OTHERS", "main", "page", "ratios", "section_of", "share_of_bare", "with_section"]

BESIDE_OTHERS = "## Beside other brokers"
"""What `node_versus --page` writes is under this heading; a new page keeps it."""

NAMES = {"single": "one broker", "async": "ASYNC_MASTER", "sync": "SYNC_MASTER", "dledger": "DLedger"}
PUBLISHED = (
    ("ASYNC_MASTER", "95,000 to 116,000"),
    ("SYNC_MASTER, waiting for the slave", "about 10,600"),
    ("DLedger, 4.7.1", "3,000"),
    ("DLedger, 4.8.0", "14,000"),
)
"""What Apache RocketMQ 4.x is said to do, messages a second, on servers much larger than a machine of two cores."""


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| replication | flush | load | senders | batch | keys | messages/s | p50 ms | p99 ms"
        " | CPU of the master, us/message | messages/fsync | entries/push | errors |",
        "|---|---|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        words = (
            NAMES[row["replication"]], row["flush_mode"], row["generator"], row["senders"], row["batch"],
            "no" if row["properties"] == "none" else "yes",
        )  # fmt: skip
        figures = (
            _number(row["messages_per_s"]), _number(row["p50_ms"], 2), _number(row["p99_ms"], 2),
            _number(row["cpu_us"], 1), _number(row["per_fsync"], 1), _number(row["per_push"], 1), row["errors"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, (*words, *figures)))} |")
    return lines


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each kind of replication against its cheaper neighbour, under the same load, as a table."""
    kinds = ("replication", "flush_mode", "generator", "senders", "batch", "properties")
    rates = {tuple(row[kind] for kind in kinds): row["messages_per_s"] for row in rows}
    loads = list(dict.fromkeys(key[2:] for key in rates))
    flushes = list(dict.fromkeys(key[1] for key in rates))
    columns = [
        f"{senders} senders, batches of {batch}, {generator}{', no keys' if properties == 'none' else ''}"
        for generator, senders, batch, properties in loads
    ]
    lines = [f"| ratio | {' | '.join(columns)} |", f"|---|{'--:|' * len(loads)}"]

    def line(name: str, first: tuple[str, str], second: tuple[str, str]) -> None:
        shares = [
            _number(rates[*first, *load] / rates[*second, *load], 2)
            if rates.get((*first, *load)) and rates.get((*second, *load))
            else "-"
            for load in loads
        ]
        if any(share != "-" for share in shares):
            lines.append(f"| {name} | {' | '.join(shares)} |")

    for flush in flushes:
        line(f"SYNC_MASTER : ASYNC_MASTER, flush {flush}", ("sync", flush), ("async", flush))
        line(f"DLedger : one broker, flush {flush}", ("dledger", flush), ("single", flush))
    line("one broker, flush sync : async", ("single", "sync"), ("single", "async"))
    return lines


def share_of_bare(rows: Sequence[Mapping[str, Any]], bare: Sequence[float]) -> list[str]:
    """What a bare server took under the first load of the rows, and the share of it that a single broker takes."""
    if not bare:
        return []
    mean = sum(bare) / len(bare)
    shares = []
    for flush in ("async", "sync"):
        rates = [row["messages_per_s"] for row in rows if (row["replication"], row["flush_mode"]) == ("single", flush)]
        if rates:
            shares.append(f"{rates[0] / mean:.2f} of that with flush {flush}")
    return [
        "A bare server, which parses the frame, packs the record and appends it, takes"
        f" {' and '.join(map(_number, bare))} messages/s of 64 senders one by one here and now; one broker takes"
        f" {', '.join(shares)}."
    ]


def page(figures: Mapping[str, Any]) -> str:
    """The whole page, in Markdown."""
    conditions, reading = figures["conditions"], figures["reading"]
    lines = [
        "# How fast the node is",
        "",
        "Made by `benchmarks/_node_page.py` of what `benchmarks/node_bench.py` has measured; do not edit.",
        "",
        f"{conditions['cpus']} CPUs shared by the load generator and all brokers (load average of the quarter of an"
        f" hour before: {conditions['load_average']:.1f}); Python {conditions['python']}, loop of"
        f" {conditions['loop']}; messages of 128 bytes; {conditions['nodes']} nodes where there is replication;"
        f" {conditions['seconds']:g} s for each row after one of warming up. Every sender waits for its answer before"
        " it sends the next message or batch. `lean` is a process that sends frames made beforehand over 4 connections"
        " and reads no more of an answer than it must, so that the broker is what is slow; `client` is this project's"
        " remoting client, one process and one connection.",
        "",
        "Every message has a UNIQ_KEY of its own and WAIT, as RocketMQ's clients send them, but where the column says"
        " that it has no properties at all. Pages before this one measured all their batches without properties, and"
        " single messages without a key: no client sends such, and each key costs a hash and an entry in the index.",
        "",
        *_rows(figures["throughput"]),
        "",
        *ratios(figures["throughput"]),
        "",
    ]
    if figures["bare"]:
        lines += [*share_of_bare(figures["throughput"], figures["bare"]), ""]
    if reading:
        pull, wake = reading["pull"], reading["wake"]
        lines += [
            f"Pulls of up to 32 messages by 8 readers: {_number(pull['per_s'])} messages/s in"
            f" {_number(pull['pulls_per_s'])} pulls/s. From the send of a message until a reader whose pull was held"
            f" has it: median {_number(wake['p50_ms'], 2)} ms, p99 {_number(wake['p99_ms'], 2)} ms.",
            "",
        ]
    lines += [
        "Published for Apache RocketMQ 4.x, on servers much larger than two cores:",
        "",
        "| | messages/s |",
        "|---|--:|",
        *(f"| {name} | {figure} |" for name, figure in PUBLISHED),
        "",
        "What limits it is said in [node.md](node.md#what-limits-its-speed).",
    ]
    return "\n".join(lines) + "\n"


def with_section(text: str, section: str) -> str:
    """A page with `section` in the place of what stands under `BESIDE_OTHERS`, or at its end."""
    before, found, after = text.partition(f"{BESIDE_OTHERS}\n")
    rest = after[after.index("\n## ") + 1 :] if found and "\n## " in after else ""
    return f"{before.rstrip()}\n\n{BESIDE_OTHERS}\n\n{section.strip()}\n" + (f"\n{rest}" if rest else "")


def section_of(text: str) -> str:
    """What stands under `BESIDE_OTHERS` in a page; "" where there is none."""
    return text.partition(f"{BESIDE_OTHERS}\n")[2].partition("\n## ")[0].strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the page; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if len(words) != 2:
        print("usage: python -m benchmarks._node_page FIGURES.json PAGE.md", file=sys.stderr)
        return 254
    path = Path(words[1])
    kept = section_of(path.read_text(encoding="utf-8")) if path.exists() else ""
    text = page(json.loads(Path(words[0]).read_text(encoding="utf-8")))
    path.write_text(with_section(text, kept) if kept else text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
