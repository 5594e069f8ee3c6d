"""`harness doctor`: a cell for every form on every cluster, with what is missing, and proof if requested."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.commands import doctor, doctor_programs
from harness.commands.new import source_for
from harness.errors import OperatorError
from harness.faults.prove import prove_variants
from harness.report import OutputConsole
from harness.run_state import load_run, state_path
from nemesis.mechanisms.shim import why_no_shim

NO_SHIM = why_no_shim()


class KillOnly:
    """A cluster whose only ability is to kill processes."""

    name = "kill-only"
    description = "a test's"
    start = stop = spawn = hosts = network = None

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        return None if (interface, ability) == ("processes", "kill") else f"{interface} cannot {ability} here: buy some"


@pytest.fixture
def kill_only_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    load = registry.load
    monkeypatch.setattr(registry, "load", lambda kind, name: KillOnly if name == "kill-only" else load(kind, name))


def test_every_form_has_a_cell_that_names_what_is_missing(kill_only_cluster: None) -> None:
    nemeses = registry.load_all("nemeses")
    cells = doctor.diagnose("kill-only", doctor.forms_of(nemeses), {})
    by_form = {(cell.nemesis, cell.form): cell for cell in cells}
    forms = {(name, form) for name, n in nemeses.items() for form in getattr(n, "forms", n.variants)}
    assert by_form.keys() == forms and len(cells) == len(forms)
    assert by_form["kill", "sigkill"].state == doctor.WORKS
    power = by_form["power", "cut"]
    assert power.state == doctor.MISSING and power.reason == "power: disks cannot power here: buy some"
    assert by_form["pause", "sigstop"].state == doctor.MISSING


def test_no_fault_is_available_on_a_cluster_that_cannot_run_the_system() -> None:
    asked = doctor.forms_of(registry.names("nemeses"))
    cells = doctor.diagnose("sim", asked, {}, "toy")
    assert {cell.state for cell in cells} == {doctor.MISSING}
    assert {cell.reason for cell in cells} == {"cluster sim simulates the broker and cannot run other systems"}
    assert doctor.WORKS in {cell.state for cell in doctor.diagnose("sim", asked, {})}


class WithPrograms:
    """A system that names its programs."""

    name = "runs"
    commands: Mapping[str, Sequence[str]] = {}

    @classmethod
    def program_commands(cls, settings: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
        return cls.commands


def test_doctor_says_which_mechanism_reaches_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    for name in ("why_no_shim", "why_no_traps", "why_not_attached", "why_no_clock"):
        monkeypatch.setattr(doctor_programs, name, lambda: None)
    monkeypatch.setattr(
        WithPrograms, "commands", {"a": [sys.executable, "-c", ""], "b": [str(script)], "c": ["/no/such"]}
    )
    dynamic, wrapper, nothing = doctor_programs.mechanism_lines(WithPrograms, {})
    assert dynamic.startswith(f"a: {sys.executable} is linked dynamically") and "by the preloaded shim" in dynamic
    assert "disk and power faults by seccomp; wall clocks by the vDSO" in wrapper
    assert nothing == "c: /no/such: No such file or directory"
    assert "by seccomp" in doctor_programs.mechanism_lines(WithPrograms, {}, "seccomp")[0]
    assert "is not guaranteed to reach it" in doctor_programs.mechanism_lines(WithPrograms, {}, "preload")[1]
    monkeypatch.setattr(doctor_programs, "why_not_attached", lambda: "no ptrace")
    assert (
        "seccomp, attached when it starts, not at the first fault (no ptrace);"
        in (doctor_programs.mechanism_lines(WithPrograms, {})[1])
    )
    monkeypatch.setattr(doctor_programs, "why_no_traps", lambda: "the kernel is too old")
    assert (
        "seccomp, which is not available here: the kernel is too old"
        in doctor_programs.mechanism_lines(WithPrograms, {})[1]
    )


def test_doctor_says_if_the_programs_of_a_system_are_not_yet_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is known only once they are started" in doctor_programs.mechanism_lines(KillOnly, {})[0]
    assert "once the first run has fetched them" in doctor_programs.mechanism_lines(WithPrograms, {})[0]
    broker = doctor_programs.mechanism_lines(registry.load("systems", "broker"), {})
    assert len(broker) == 1 and broker[0].startswith(f"broker: {sys.executable} is ")


def test_programs_are_named_unless_the_first_run_has_to_fetch_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPLITBRAIN_CACHE", str(tmp_path))
    etcd = registry.load("systems", "etcd")
    assert doctor_programs.mechanism_lines(etcd, {})[0].endswith("once the first run has fetched them")
    toy = registry.load("systems", "toy")  # its program is already on this machine
    [line] = doctor_programs.mechanism_lines(toy, {})
    assert line.startswith("toy: ") and "python" in line


def test_doctor_accepts_a_plug_in_file_as_the_system(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source_for("mine"))
    argv = [sys.executable, "-m", "harness", "doctor", "mine.py", "--cluster", "local", "--nemesis", "power,kill"]
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {(cell["nemesis"], cell["form"]): cell for cell in json.loads(done.stdout)}
    assert cells["kill", "sigkill"]["state"] == "works"
    assert "nothing is kept on disk" in cells["power", "cut"]["reason"]


def test_an_unavailable_cluster_gives_its_reason_in_every_cell() -> None:
    cells = doctor.diagnose("ssh", doctor.forms_of(["kill"]), {})
    assert {cell.state for cell in cells} == {doctor.MISSING}
    assert all("--inventory" in cell.reason for cell in cells)


def test_the_command_prints_json(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "harness", "doctor", "--cluster", "local", "--nemesis", "link,kill", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {(cell["nemesis"], cell["form"]): cell for cell in json.loads(done.stdout)}
    assert cells["kill", "sigkill"]["state"] == "works"
    assert cells["link", "loss"]["state"] == "-" and "netns" in cells["link", "loss"]["reason"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["partition=leader", "kill=sigkill"], [("kill", "sigkill", "sigkill@one"), ("partition", "leader", "leader")]),
        (["kill=terminate@leader"], [("kill", "terminate", "terminate@leader")]),
        (["kill=sigkill@all", "kill=sigkill@one"], [("kill", "sigkill", "sigkill@all")]),
    ],
)
def test_forms_are_selected_by_the_syntax_of_run(words: list[str], asked: list[tuple[str, str, str]]) -> None:
    assert doctor.forms_of(words) == [doctor.AskedForm(*each) for each in asked]


def test_unknown_names_are_refused_in_one_line(
    tmp_path: Path, harness_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for words in (["--cluster", "locl"], ["--nemesis", "kil"], ["--nemesis", "partition=leadr"]):
        done = harness_here("doctor", *words, cwd=tmp_path)
        assert done.returncode == 254 and "did you mean" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.skipif(NO_SHIM is not None, reason=str(NO_SHIM))
def test_faults_are_proven_on_a_real_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two forms of each mechanism of the local cluster."""
    monkeypatch.setenv("SPLITBRAIN_STATE_DIR", str(tmp_path / "states"))
    told: list[Any] = []
    nemeses: Mapping[str, Any] = registry.load_all("nemeses")
    wanted: Sequence[tuple[str, str]] = [
        ("bit-flip", "log@n1"),
        ("bit-flip", "checkpoint@n2"),
        ("pause", "sigstop@leader"),
        ("clock", "bump@n1"),
        ("disk-stall", "fsync@n2"),
        ("power", "cut@n3"),
        ("link", "delay@n1"),
        ("partition", "one"),
    ]
    trials = asyncio.run(
        prove_variants(
            cluster_class=registry.load("clusters", "local"),
            cluster_options={},
            system_class=registry.load("systems", "broker"),
            nemeses=nemeses,
            variants=wanted,
            settings={},
            node_count=3,
            tell=told.append,
            run_id=f"doctor-test-{tmp_path.name}"[:60],
        )
    )
    assert [(trial.nemesis, trial.variant) for trial in trials] == list(wanted) and told == trials
    assert [trial.detail for trial in trials if not trial.is_good] == []
    assert not (tmp_path / "states").exists() or not list((tmp_path / "states").iterdir())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a file system")
def test_a_directory_that_proving_cannot_remove_stays_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITBRAIN_STATE_DIR", str(tmp_path / "states"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_id = f"doctor-{os.getpid()}-busy"
    busy = tmp_path / f"splitbrain-{run_id}-doctor"

    def make_cluster(**given: Any) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "busy", given["work_dir"]], check=True)
        raise OperatorError("no cluster here")

    proving = prove_variants(
        cluster_class=make_cluster, cluster_options={}, system_class=registry.load("systems", "broker"), nemeses={},
        variants=[], settings={}, node_count=1, tell=lambda trial: None, run_id=run_id,
    )  # fmt: skip
    try:
        with pytest.raises(OperatorError, match=f"run {run_id} left something behind: run `harness clean`"):
            asyncio.run(proving)
        claims = load_run(state_path(run_id, str(tmp_path / "states"))).claims
        assert [claim.ident for claim in claims] == [str(busy)] and busy.is_mount()
    finally:
        subprocess.run(["umount", str(busy)], check=True)


def test_a_cluster_without_an_engine_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    [cell] = doctor.diagnose("docker", doctor.forms_of(["kill=sigkill"]), {})
    assert cell.reason.startswith(f"--cluster docker: no engine answers at unix://{tmp_path}/none: ")


def test_clusters_with_the_same_link_mechanism_share_a_line(
    tmp_path: Path, harness_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = harness_here("doctor", "--cluster", "docker,local,ssh", "--nemesis", "link=loss", cwd=tmp_path)
    assert [line for line in done.stdout.splitlines() if line.startswith("links on ")] == [
        "links on docker, ssh are shaped by netem if every host's kernel has it, else by the relay",
        "links on local are shaped by proxies",
    ]


def test_a_reason_of_several_nemeses_is_one_note_that_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    def cell(nemesis: str, cluster: str, *reasons: str) -> doctor.Cell:
        return doctor.Cell(nemesis, "a", cluster, doctor.MISSING if reasons else doctor.WORKS, "; ".join(reasons))

    cells = [
        cell("disk-full", "local", "disk-full: one file system", "disk-full: no room"),
        cell("disk-full", "ssh", "give it"),
        cell("power", "local", "power: one file system; no room"), cell("power", "ssh", "give it"),
        cell("resources", "local", "resources: one file system"), cell("resources", "ssh"),
    ]  # fmt: skip
    doctor._print(cells, ["local", "ssh"], OutputConsole(width=80))
    *table, first, second, third = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in table if "=a" in line]
    assert rows == ["disk-full=a - (1) - (2)", "power=a - (1) - (2)", "resources=a - (3) works"]
    assert first == "(1) disk-full, power: one file system; no room"
    assert (second, third) == ("(2) give it", "(3) resources: one file system")
