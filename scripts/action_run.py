"""The main step of the GitHub Action (action.yml): `harness run`, a JUnit file, a step summary, a verdict.

Environment: ACTION_RUN (arguments of `harness run`), ACTION_STORE, ACTION_JUNIT, and GitHub's own
GITHUB_STEP_SUMMARY and GITHUB_OUTPUT. Exits with the status of `harness run`. Hosts are created as root, with sudo if
it needs no password.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

VERDICTS = {0: "valid", 1: "invalid", 2: "unknown"}


def as_root() -> list[str]:
    """The prefix that runs a command as root; empty if this is root already, or cannot become root."""
    sudo = shutil.which("sudo")
    if os.geteuid() == 0 or sudo is None:
        return []
    allowed = subprocess.run([sudo, "-n", "true"], capture_output=True).returncode == 0
    return [sudo, "-E", "env", f"PATH={os.environ.get('PATH', '')}"] if allowed else []


def main() -> int:
    """Run it, and report the outcome even if no run took place. Returns the exit status."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    before = stamp_of(os.environ["ACTION_JUNIT"])
    try:
        words = shlex.split(os.environ["ACTION_RUN"])
    except ValueError as error:
        status, reason = 254, f"run: {error}"
        print(reason, file=sys.stderr)
    else:
        status, reason = run(words, summary), "its arguments are no run: the log of this step has the reason"
    verdict = VERDICTS.get(status, "did-not-run")
    if "GITHUB_OUTPUT" in os.environ:
        with open(os.environ["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
            file.write(f"verdict={verdict}\n")
    if verdict == "did-not-run" and stamp_of(os.environ["ACTION_JUNIT"]) == before:
        write_did_not_run(reason, summary)  # `harness run` ended before it could write it
    return status


def run(words: list[str], summary: str | None) -> int:
    """`harness run`, as root if possible. Returns its exit status."""
    store, junit = os.environ["ACTION_STORE"], os.environ["ACTION_JUNIT"]
    prefix = as_root()
    command = [*prefix, sys.executable, "-m", "harness", "run", *words, "--store", store, "--junit", junit]
    if summary is not None:
        command += ["--step-summary", summary]
    status = subprocess.run(command).returncode
    if prefix:  # the step that uploads these files must be able to read them
        made = [path for path in (store, junit) if os.path.exists(path)]
        subprocess.run([*prefix, "chown", "-R", f"{os.getuid()}:{os.getgid()}", *made])
    return status


def stamp_of(path: str) -> tuple[int, int] | None:
    """A value that changes when the file is rewritten; None if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def write_did_not_run(reason: str, summary: str | None) -> None:
    """Write the JUnit file and the step summary for a run that did not take place."""
    from harness.errors import OperatorError
    from harness.report.junit import Case, write_junit
    from harness.report.step_summary import append_summary

    cases = [Case("run", "did-not-run", reason)]
    try:
        if summary is not None:
            append_summary(summary, cases)
        write_junit(os.environ["ACTION_JUNIT"], cases)
    except OperatorError as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
