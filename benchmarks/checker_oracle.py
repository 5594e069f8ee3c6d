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

from checker import History, Verdict, check
from checker.linearizability.budget import Budget
from checker.linearizability.engine import decide
from checker.testing import SAMPLED_MODELS, linearizable_by_force, random_history


def compare(name: str, histories: int, seed: int = 20_000) -> Counter[str]:
    """Counts of agreement by kind; raises AssertionError at a disagreement."""
    model = SAMPLED_MODELS[name][0]
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for number in range(histories):
        history = random_history(
            name,
            rng,
            operations=rng.randrange(2, 9),
            processes=rng.randrange(1, 5),
            spread=rng.choice([0, 0, 2, 3]),
            crash=rng.choice([0, 0.1, 0.4]),
            lie=rng.choice([0, 0.2, 0.5]),
        )
        truth = linearizable_by_force(history, model)
        counts["valid" if truth else "invalid"] += 1
        result = check(history, model)
        label = f"{name} number {number} of seed {seed}"
        if result.verdict is Verdict.UNKNOWN:
            counts["left unknown"] += 1
        else:
            assert (result.verdict is Verdict.VALID) == truth, f"{label}: {result.reason}"
            counts[next(iter(result.stats["engines"]), "nothing to decide")] += 1
        if result.witness is not None:
            alone = History.from_operations(result.witness.operations)
            assert not linearizable_by_force(alone, model), f"{label}: the witness alone is valid"
        for outcome in decide(history, history.rows_by_key(), model, Budget(), general_only=True):
            if outcome.verdict is not Verdict.UNKNOWN:
                assert (outcome.verdict is Verdict.VALID) == truth, f"{label}: general engine"
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
