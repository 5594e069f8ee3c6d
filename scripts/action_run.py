"""The step of the GitHub Action (action.yml) that runs: `harness run`, a JUnit file, a step summary, a verdict.

Environment: ACTION_RUN (arguments of `harness run`), ACTION_STORE, ACTION_JUNIT, and GitHub's own
GITHUB_STEP_SUMMARY and GITHUB_OUTPUT. Ends with the exit status of `harness run`. Hosts are made as root, by sudo where
that asks for no password.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

VERDICTS = {0: "valid", 1: "invalid", 2: "unknown"}


def as_root() -> list[str]:
    """What to put before a command to run it as root; nothing where that cannot be had, or is so already."""
    sudo = shutil.which("sudo")
    if os.geteuid() == 0 or sudo is None:
        return []
    allowed = subprocess.run([sudo, "-n", "true"], capture_output=True).returncode == 0
    return [sudo, "-E", "env", f"PATH={os.environ.get('PATH', '')}"] if allowed else []


def main() -> int:
    """Run it. Returns the exit status."""
    try:
        words = shlex.split(os.environ["ACTION_RUN"])
    except ValueError as error:
        print(f"run: {error}", file=sys.stderr)
        return 254
    store, junit = os.environ["ACTION_STORE"], os.environ["ACTION_JUNIT"]
    prefix = as_root()
    command = [*prefix, sys.executable, "-m", "harness", "run", *words, "--store", store, "--junit", junit]
    if "GITHUB_STEP_SUMMARY" in os.environ:
        command += ["--step-summary", os.environ["GITHUB_STEP_SUMMARY"]]
    status = subprocess.run(command).returncode
    if prefix:  # what root made must be readable for the step that uploads it
        made = [path for path in (store, junit) if os.path.exists(path)]
        subprocess.run([*prefix, "chown", "-R", f"{os.getuid()}:{os.getgid()}", *made])
    if "GITHUB_OUTPUT" in os.environ:
        with open(os.environ["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
            file.write(f"verdict={VERDICTS.get(status, 'did-not-run')}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
