"""Random small histories of every model, judged by the brute-force oracle, the chosen engine and the general one.

    python benchmarks/checker_oracle.py [HISTORIES_PER_MODEL] [MODEL ...] [--seed N]

A long run can be cut into several, each with a seed of its own.  Prints one line per model and ends with status 1 at
the first disagreement.  Every witness of an invalid history is judged by the oracle too: it must be invalid by itself.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checker.testing import SAMPLED_MODELS
from checker.testing.agreement import draw_history, judge


def compare(name: str, histories: int, seed: int = 20_000) -> Counter[str]:
    """Counts of agreement by kind; raises AssertionError at a disagreement."""
    model = SAMPLED_MODELS[name][0]
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for number in range(histories):
        truth, engine = judge(draw_history(name, rng), model, f"{name} number {number} of seed {seed}")
        counts["valid" if truth else "invalid"] += 1
        counts[engine or "left unknown"] += 1
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Run over all models, or those named."""
    parser = argparse.ArgumentParser(description="The checker's engines against brute force")
    parser.add_argument("histories", nargs="?", type=int, default=100_000, help="histories per model")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(SAMPLED_MODELS)}; default: all")
    parser.add_argument("--seed", type=int, default=20_000, help="where the random histories begin")
    options = parser.parse_args(arguments)
    histories = options.histories
    for name in options.models or SAMPLED_MODELS:
        if name not in SAMPLED_MODELS:
            parser.error(f"no model {name!r}; known: {', '.join(SAMPLED_MODELS)}")
        started = time.perf_counter()
        try:
            counts = compare(name, histories, options.seed)
        except AssertionError as error:
            print(f"{name}: DISAGREEMENT: {error}")
            return 1
        told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        print(f"{name}: {histories} histories agree in {time.perf_counter() - started:.0f} s: {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
