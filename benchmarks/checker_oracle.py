"""Random small but difficult histories, judged by the checker and by the definitions of consistency.

    python -m benchmarks.checker_oracle [HISTORIES_PER_ROW] [MODEL ...] [--part PART] [--seed N] [--jobs N]

The definitions (``checker.testing.definitions``) share no code with the checker and try every order.  Every model is
judged with each of its options by the engine that ``check`` chooses, by the general engine alone, for sequential
consistency, and event by event if there is an online checker; transactions are judged at every level.  Every
witness of a violation must be a violation on its own.  A long run can be split into several with different seeds.

Prints a line per row, then every kind of disagreement with its smallest histories, and exits with status 1 if there is
any.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checker.testing.comparison import PARTS, Comparison, Row, compare, rows


def run(row: Row, histories: int, seed: int) -> tuple[Row, Comparison, float]:
    """Compare one row; returns it with the result and the seconds that it took."""
    started = time.perf_counter()
    comparison = compare(row, histories=histories, seed=seed)
    return row, comparison, time.perf_counter() - started


def line(row: Row, comparison: Comparison, elapsed_s: float) -> str:
    """The row in one line, with the share of every verdict of the definitions."""
    histories = comparison.verdicts.total()
    shares = ", ".join(f"{word} {count / histories:.1%}" for word, count in sorted(comparison.verdicts.items()))
    wrong = comparison.kinds.total()
    outcome = f"{wrong} DISAGREE" if wrong else "agree"
    return f"{row}: {histories} histories, {outcome}, {comparison.undecided} undecided ({shares}; {elapsed_s:.0f} s)"


def disagreements(row: Row, comparison: Comparison) -> str:
    """Every kind of disagreement of a row with its smallest histories."""
    lines = []
    for kind, count in comparison.kinds.most_common():
        lines.append(f"{row}: {kind}: {count}")
        for sample, judgement in comparison.shown[kind]:
            lines.append(f"  the checker: {judgement.answer}; the definitions: {judgement.truth}")
            lines += [f"    {json.dumps(event)}" for event in sample.events]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run all rows, or those of the named models and parts."""
    parser = argparse.ArgumentParser(description="The checker against the definitions of consistency")
    parser.add_argument("count", nargs="?", type=int, metavar="HISTORIES", help="histories per row; default: 100000")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="some of the models; default: all")
    parser.add_argument("--histories", type=int, default=100_000, help="the same as HISTORIES")
    parser.add_argument("--part", action="append", default=[], choices=sorted(PARTS), help="some of the parts")
    parser.add_argument("--seed", type=int, default=20_000, help="where the random histories begin")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the rows")
    options = parser.parse_intermixed_args(arguments)
    known = {row.name for row in rows()}
    for name in options.models:
        if name not in known:
            parser.error(f"no model {name!r}; known: {', '.join(sorted(known))}")
    histories = options.histories if options.count is None else options.count
    found = []
    with ProcessPoolExecutor(options.jobs) as pool:
        chosen = rows(options.part, options.models)
        for result in [pool.submit(run, row, histories, options.seed) for row in chosen]:
            row, comparison, elapsed_s = result.result()
            print(line(row, comparison, elapsed_s), flush=True)
            if comparison.kinds:
                found.append(disagreements(row, comparison))
    print("\n\n".join(found) or "no disagreement")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
