"""`python -m benchmarks [NAME ...]` runs the benchmarks that take minutes, or the named ones, one after the other.

`python -m benchmarks NAME --option ...` runs one of them with its options.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from harness.nursery import restart_with_nursery

ONLY_BY_NAME = frozenset(
    (
        *(
            "catch_up",
            "checker_mutants",
            "checker_oracle",
            "crash_loop",
            "explain",
            "explore_cluster",
            "fault_trials",
            "fuzz_broker",
            "fuzz_dledger",
            "guarantees",
        ),
        *(
            "mutants",
            "node_compatibility",
            "power_cuts",
            "real_runs",
            "real_systems",
            "search_seeds",
            "seeds",
            "side_by_side",
            "spark",
        ),
        "store_exchange",
    )
)
"""Benchmarks that take hours or gigabytes: 100,000 histories per model, mutants until found, 20M operations."""


def main(words: list[str]) -> int:
    """Run benchmarks by module name; everything from the first option on is passed to the one named before it.
    Returns 254 if a name is unknown, or if options do not follow exactly one name."""
    first_option = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    names, options = words[:first_option], words[first_option:]
    if options and len(names) != 1:
        print(f"options such as {options[0]} are for one benchmark: name it before them", file=sys.stderr)
        return 254
    here = Path(__file__).parent
    known = sorted(path.stem for path in here.glob("*.py") if not path.stem.startswith("_"))
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 254
    for name in names or [name for name in known if name not in ONLY_BY_NAME]:
        print(f"== {name}", flush=True)
        sys.argv = [name, *options]
        importlib.import_module(f"benchmarks.{name}").main()
        print(flush=True)
    return 0


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
