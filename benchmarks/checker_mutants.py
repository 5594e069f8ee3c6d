"""Mutation testing of the checker: do its tests notice small mistakes? Makes docs/checker-mutants.md.

    python -m benchmarks.checker_mutants [FILE ...] [--count 200] [--seed 1] [--jobs N] [--touched FILE]

Mistakes are changed comparisons, numbers off by one, conditions that are left out or negated, `and` for `or`, `+` for
`-`, crashed operations treated as failed: `--count` of them over all files of `checker/` except `checker/testing`,
chosen by the seed, at least one of every file, and those that once survived (`ONCE_ALIVE`). Each is made in a copy of
the tree, never in the checkout, and tried with those tests of the checker that call the changed function, the quickest
first, until one fails; a test that takes ten times its CPU time counts as failed. Which test calls what is found by
running all of them once (`--touched` keeps that). Running `--quick`, and then `--again` for the survivors with tests
that were left out or are new, takes less time in total.

Exits with status 1 if a mutant survives that benchmarks/checker_mutants_equivalent.toml does not list with a reason.
Results are kept in docs/checker-mutants.json; the table is written from those that fit the current code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._checker_mutant_runner import PASSED, QUICK_CPU_S, arguments
from benchmarks._checker_mutations import Mutation, everything_of, once_alive, sample

__all__ = ["main", "sources", "table"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "checker-mutants.json"
PAGE = ROOT / "docs" / "checker-mutants.md"
EQUIVALENT = Path(__file__).with_name("checker_mutants_equivalent.toml")
COPIED = ("benchmarks", "checker", "docs", "harness", "nemesis", "node", "scripts", "spark_analysis", "tests")
"""Folders that tests of the checker import or read, with the files beside them."""


class BadRun(Exception):
    """The tests cannot judge mutants; the message is the reason."""


def sources() -> dict[str, str]:
    """The text of every file to be mutated, by name."""
    paths = [path for path in (ROOT / "checker").rglob("*.py") if "testing" not in path.relative_to(ROOT).parts]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def equivalent() -> dict[str, str]:
    """The reason why each equivalent mutant cannot be noticed, by key."""
    with EQUIVALENT.open("rb") as file:
        return {each["key"]: each["reason"] for each in tomllib.load(file)["mutant"]}


def copy_of_the_tree(folder: Path) -> None:
    """Copy everything that the tests need into an empty folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, folder / path.name)


def run_copy(orders: dict[str, Any], heard: Callable[[dict[str, Any]], None]) -> None:
    """Run a pytest with the runner in a copy of the tree; `heard` gets each result. Raises :class:`BadRun`."""
    with tempfile.TemporaryDirectory(prefix="checker-mutants-") as name:
        folder = Path(name).resolve()
        copy_of_the_tree(folder)
        reading, writing = os.pipe()
        path = folder / "orders.json"
        path.write_text(json.dumps({**orders, "results_fd": writing}), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(folder), "CI": "1", "SPLITBRAIN_MUTANT_ORDERS": str(path)}
        with (folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments(["tests/checker"])],
                cwd=folder,
                env=environment,
                pass_fds=[writing],
                stdout=output,
                stderr=output,
            )
            os.close(writing)
            try:
                with os.fdopen(reading, encoding="utf-8") as lines:
                    for line in lines:
                        heard(json.loads(line))
            except BaseException:
                process.kill()
                raise
            finally:
                status = process.wait()
            if status:
                output.seek(0)
                raise BadRun(output.read().decode(errors="replace")[-2000:])


def what_tests_call(kept: Path | None) -> dict[str, Any]:
    """The functions that each test calls, and its CPU seconds. What the file `kept` has for the same checker is reused,
    and only tests that are missing there are run. Raises :class:`BadRun`.
    """
    digest = hashlib.sha256("".join(sources().values()).encode()).hexdigest()
    known: dict[str, Any] = {}
    if kept is not None and kept.exists():
        known = json.loads(kept.read_text(encoding="utf-8"))
    if known.get("digest") != digest:
        known = {"digest": digest, "touched": {}, "cpu_s": {}}
    found: dict[str, Any] = {}
    run_copy({"known": list(known["touched"])}, found.update)
    if found["failed"]:
        raise BadRun(f"without any mutant these fail: {', '.join(found['failed'])}")
    for name in ("touched", "cpu_s"):
        known[name] |= found[name]
    if kept is not None:
        kept.write_text(json.dumps(known), encoding="utf-8")
    return known


def keep(results: dict[str, Any]) -> None:
    """Save the results, so that an interrupted run loses nothing."""
    text = json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def try_all(
    mutations: Sequence[Mutation], calls: dict[str, Any], results: dict[str, Any], *, jobs: int, quick: bool
) -> None:
    """Try mutants in `jobs` copies at a time, with quick tests only or with all; each result is added to `results` by
    key and saved.
    """
    lock = threading.Lock()
    lines = {each.key: f"{each.file}:{each.line} {each.function}: {each.change}" for each in mutations}
    bad: list[BadRun] = []

    def heard(result: dict[str, Any]) -> None:
        with lock:
            key = result.pop("key")
            result["quick"] = quick and results.get(key, {}).get("quick", True)
            results[key] = result
            keep(results)
            print(f"{result['status']:7} {lines[key]}  [{result['by']}] {result['wall_s']} s", flush=True)

    def work(share: Sequence[Mutation]) -> None:
        try:
            run_copy({**calls, "quick": quick, "mutations": [each.as_json() for each in share]}, heard)
        except BadRun as error:
            bad.append(error)

    threads = [threading.Thread(target=work, args=(mutations[number::jobs],)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if bad:
        raise bad[0]


def present(results: dict[str, Any]) -> list[tuple[Mutation, dict[str, Any]]]:
    """The results whose mutation is still possible, in the order of files and lines."""
    return [(each, results[each.key]) for each in everything_of(sources()) if each.key in results]


def table(results: dict[str, Any], reasons: dict[str, str]) -> str:
    """The page, from the results by key and the reasons for equivalent mutants."""
    tried = present(results)
    alive = [each for each, result in tried if result["status"] == PASSED]
    unexcused = [each for each in alive if each.key not in reasons]
    excused = [each for each in alive if each.key in reasons]
    hasty = [each for each in unexcused if results[each.key].get("quick", True)]
    lines = [
        "# Mutants of the checker",
        "",
        "<!-- made by: python -m benchmarks.checker_mutants -->",
        "",
        "Small mistakes are put into the checker one at a time, in a copy of the tree: a changed comparison, a number",
        "off by one, a condition removed or negated, `and` for `or`, `+` for `-`, crashed operations treated as failed",
        "ones. A mutant is *killed* when a test of `tests/checker` that calls the changed function fails, or takes ten",
        "times its processor time. A mutant that no test can notice is *equivalent*:",
        "`benchmarks/checker_mutants_equivalent.toml` has the reason for each. Texts of explanations and drawings are",
        "mutated like everything else; `checker/testing` is not.",
        "",
        f"Of {len(everything_of(sources())):,} mistakes that it can make, {len(tried)} were tried: "
        f"{len(tried) - len(alive)} killed, {len(excused)} equivalent, {len(unexcused)} alive.",
        *(["", f"{len(hasty)} of those alive were tried only by tests of at most half a second."] if hasty else []),
        "",
        "| file | tried | killed | equivalent | alive |",
        "|---|---|---|---|---|",
    ]
    counts: dict[str, Counter[str]] = {}
    for each, result in tried:
        kind = "killed" if result["status"] != PASSED else "equivalent" if each.key in reasons else "alive"
        counts.setdefault(each.file, Counter()).update([kind])
    for file, count in counts.items():
        lines.append(
            f"| `{file}` | {count.total()} | {count['killed']} | {count['equivalent'] or ''} | {count['alive'] or ''} |"
        )
    for title, listed in (("Alive", unexcused), ("Equivalent", excused)):
        if listed:
            lines += ["", f"## {title}", ""]
            lines += [f"- {_line(each)}{' ' + reasons[each.key] if each.key in reasons else ''}" for each in listed]
    return "\n".join(lines) + "\n"


def _line(mutation: Mutation) -> str:
    where = f"`{mutation.file}`, `{mutation.function}`"
    return f"{where}: {mutation.change} in `{mutation.text}`."


def main() -> int:
    """Make mutants, try them and write the page. Returns 1 if one survives without a reason, 254 for a bad run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checker_mutants", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="of checker/; all without one")
    parser.add_argument("--count", type=int, default=200, help="mutants over all files")
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutants")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of the tree")
    parser.add_argument("--touched", type=Path, metavar="FILE", help="keep here, or take from here, what tests call")
    parser.add_argument("--quick", action="store_true", help="leave out tests of more than half a second")
    parser.add_argument("--again", action="store_true", help="only those kept as alive")
    parser.add_argument("--table-only", action="store_true", help="write the page from the kept results")
    options = parser.parse_args()
    if options.count < 1 or options.jobs < 1:
        parser.error("--count and --jobs must be 1 or more")
    unknown = [file for file in options.files if file not in sources()]
    if unknown:
        parser.error(f"no file of the checker: {', '.join(unknown)}; name them from the root, as checker/history.py")
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    reasons = equivalent()
    if not options.table_only:
        if options.again:
            alive_of = [each for each, result in present(results) if result["status"] == PASSED]
            chosen = [each for each in alive_of if each.key not in reasons]
        else:
            chosen = [*once_alive(sources()), *sample(sources(), options.count, options.seed)]
        chosen = [each for each in chosen if not options.files or each.file in options.files]
        try:
            calls = what_tests_call(options.touched)
            calls["left_out"] = calls.get("tried", []) if options.again else []
            try_all(chosen, calls, results, jobs=options.jobs, quick=options.quick)
            if options.touched is not None and options.quick:
                tried = [name for name, cpu_s in calls["cpu_s"].items() if cpu_s <= QUICK_CPU_S]
                options.touched.write_text(json.dumps({**calls, "tried": tried}), encoding="utf-8")
        except BadRun as error:
            print(f"checker_mutants: {error}", file=sys.stderr)
            return 254
    results = {each.key: result for each, result in present(results)}
    keep(results)
    PAGE.write_text(table(results, reasons), encoding="utf-8")
    alive = [key for key, result in results.items() if result["status"] == PASSED and key not in reasons]
    print(f"{len(results)} mutants, {len(alive)} alive; {PAGE.relative_to(ROOT)}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
