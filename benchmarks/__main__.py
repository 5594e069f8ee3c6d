"""`python -m benchmarks [NAME ...]`: the benchmarks that take minutes, or those named, one after the other.

`python -m benchmarks NAME --option ...` gives one of them its options.
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
"""These take an hour, or gigabytes: a hundred thousand histories a model, mutants until found, 20M operations."""


def main(words: list[str]) -> int:
    """Run benchmarks by module name; what comes from the first option on is for the one that is named before it.
    Returns 254 when a name is unknown, or options are for no one in particular."""
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
