"""The same seed gives the same run in every process; another seed gives another run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
TOY = HERE / "toy_cluster.py"


def load_toy() -> Any:
    spec = importlib.util.spec_from_file_location("toy_cluster", TOY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_in_a_process(
    seed: int, hash_seed: str, garbage: int, python: str = sys.executable, collection: str = "sets"
) -> str:
    done = subprocess.run(
        [python, str(TOY), str(seed), str(garbage), collection],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == ""
    return done.stdout.strip()


def implementation_of(python: str) -> str:
    done = subprocess.run(
        [python, "-c", "import sys; print(sys.implementation.name)"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_same_seed_gives_the_same_run_in_every_process() -> None:
    here = load_toy().run(11)
    assert int(here.split()[2]) > 10  # lines were logged, so its faults had an effect
    assert {run_in_a_process(11, hash_seed, garbage) for hash_seed, garbage in (("0", 0), ("77", 50_000))} == {here}
    assert load_toy().run(11) == here


def test_another_seed_gives_another_run() -> None:
    toy = load_toy()
    assert len({toy.run(seed) for seed in range(4)}) == 4


def test_the_same_seed_gives_the_same_shuffled_run() -> None:
    toy = load_toy()
    assert toy.run(5, shuffle=True) == toy.run(5, shuffle=True)
    assert toy.run(5, shuffle=True) != toy.run(5)


def test_every_version_of_python_gives_the_same_run(other_python: str) -> None:
    for collection in ("lists", "sets") if implementation_of(other_python) == sys.implementation.name else ("lists",):
        assert run_in_a_process(11, "0", 0, other_python, collection) == run_in_a_process(
            11, "0", 0, collection=collection
        )
