"""`harness new system NAME`: the file is a working plug-in, and no file of the user is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from harness.sdk.plugin import load_file


def test_new_writes_a_plug_in_of_the_given_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "system", "my_store.py"]) == 0
    said = capsys.readouterr().out
    assert said == (
        "wrote my_store.py; run it with: harness run my_store.py --nodes 3 --nemesis partition --time-limit 20\n"
    )
    plugin = load_file("my_store.py")
    assert (plugin.name, plugin.system_class.__name__, plugin.client_class.__name__) == (
        "my_store", "MyStore", "MyStoreClient",
    )  # fmt: skip
    assert "tarter" not in Path("my_store.py").read_text(encoding="utf-8")


def test_an_existing_file_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("precious")
    assert cli.main(["new", "system", "mine"]) == 254
    assert capsys.readouterr().err == "harness: mine.py already exists\n"
    assert Path("mine.py").read_text() == "precious"


@pytest.mark.parametrize("name", ["../mine", "my-store", "Mine", "9lives", "class", ""])
def test_a_name_that_is_not_a_module_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "system", name]) == 254
    assert f"{name!r} is not a module name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("json", "the module json"), ("asyncio", "the module asyncio"), ("nemesis", "the module nemesis"),
        ("pytest", "the module pytest"), ("status", "Status, which the file itself needs"), ("client", "Client"),
    ],
)  # fmt: skip
def test_a_name_that_would_hide_a_module_or_a_class_is_refused(
    name: str, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "system", name]) == 254
    assert f"{name}.py would hide {hidden}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["new", "system", "starter"]) == 0


def test_help_and_list_show_the_settings_of_a_plug_in_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["new", "system", "mine"])
    with pytest.raises(SystemExit):
        cli.main(["run", "mine.py", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    description = "the host that answers reads: the primary, or the client's own"
    assert said.endswith(f"settings of mine.py, defaults first: --set read=primary|any ({description})")
    assert cli.main(["list", "mine.py"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("systems mine ") and f"--set read=primary: {description} (primary, any)" in said
    assert "broker" not in said
    assert cli.main(["run", "mine.py", "--set", "read=anny"]) == 254
    assert "read must be one of primary, any, not 'anny' (did you mean any?)" in capsys.readouterr().err
