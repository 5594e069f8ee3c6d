"""Plug-ins: a lookup reports everything that is wrong with one, by name, and a broken one does not end the list."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import cli, registry
from harness.errors import OperatorError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that installs a distribution: a module with this source and entry points `kind=name:OBJECT` in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    numbers = iter(range(100))

    def make(source: str, *entries: str) -> None:
        module = f"plug_in_{tmp_path.name}_{next(numbers)}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = []
        for entry in entries:
            kind, _, rest = entry.partition("=")
            name, _, attribute = rest.partition(":")
            lines.append(f"[splitbrain.{kind}]\n{name} = {module}:{attribute}\n")
        (info / "entry_points.txt").write_text("".join(lines))

    return make


GOOD_NEMESIS = """
    class Quake:
        name = "quake"
        description = "shakes the rack"
        variants = ("mild", "strong")
        is_of_all = False
        def requires(self, target, variant=None):
            return []
        async def plan(self, target, rng, *, fault_id, variant):
            ...
        async def inject(self, target, injection):
            ...
        async def prove(self, target, injection, *, in_force=()):
            ...
        async def heal(self, target, injection):
            ...
        async def prove_healed(self, target, injection, *, in_force=()):
            ...
    QUAKE = Quake()
"""

BAD_NEMESIS = """
    class Quake:
        name = 7
        description = "shakes the rack"
        variants = ("mild",)
        is_of_all = "no"
        step_timeout_s = "long"
        async def requires(self, target, variant=None):
            return []
        async def plan(self, target, rng, fault_id):
            ...
        def inject(self, target, injection):
            ...
        prove = "not a method"
        async def heal(self, target, injection):
            ...
        def needs(self):
            ...
    QUAKE = Quake()
"""


@pytest.mark.parametrize("kind", list(registry.KINDS))
def test_all_built_in_parts_conform(kind: str) -> None:
    found = registry.survey(kind)
    assert found and list(found) == registry.names(kind)
    assert {name: item.reason for name, item in found.items() if isinstance(item, registry.Broken)} == {}
    assert registry.load_all(kind) == found


def test_a_plug_in_that_conforms_is_found(install: Install) -> None:
    install(GOOD_NEMESIS, "nemeses=quake:QUAKE")
    assert registry.load("nemeses", "quake").variants == ("mild", "strong")


def test_a_class_in_place_of_a_nemesis_instance_is_refused(install: Install) -> None:
    """The class has all members of a nemesis, but its properties and methods are not bound."""
    install(GOOD_NEMESIS, "nemeses=quake:Quake")
    with pytest.raises(OperatorError, match="is the class Quake, not an instance: name an instance in the module"):
        registry.load("nemeses", "quake")


def test_all_problems_of_a_plug_in_are_reported_at_once(install: Install) -> None:
    install(BAD_NEMESIS, "nemeses=quake:QUAKE")
    with pytest.raises(OperatorError) as caught:
        registry.load("nemeses", "quake")
    said = str(caught.value)
    assert said.startswith("nemesis 'quake' (plug_in_") and ":QUAKE) is not a nemesis: " in said
    assert "\n" not in said
    assert set(said.partition("is not a nemesis: ")[2].split("; ")) == {
        "name is 7, not of type str",
        "requires must not be async",
        "plan takes (target, rng, fault_id) but is called with (target, rng, *, fault_id, variant)",
        "inject must be async",
        "prove is a str, not a method",
        "lacks prove_healed",
        "is_of_all is 'no', not of type bool (AskedForByName)",
        "step_timeout_s is 'long', not of type float (StepTimeout)",
        "needs takes () but is called with (variant) (UsesAbilities)",
    }


def test_the_constructor_and_the_members_of_a_plug_in_class_are_checked(install: Install) -> None:
    install(
        """
        class Bank:
            name = "bank"
            description = "moves money"
            requires = "queue"
            keys: int
            check_names = ("money")
            def __init__(self, accounts):
                self.keys = accounts
            def generator(self):
                return "pay ever on"
            def final_generator():
                ...
            def client(self, connection):
                ...
            def online(self):
                ...
            @staticmethod
            def check(history, context):
                ...
        def bank():
            ...
        """,
        "workloads=vault:Bank",
        "workloads=teller:bank",
    )
    found = registry.survey("workloads")
    assert found["vault"].reason.partition("is not a workload: ")[2] == (
        "final_generator does not take self; check_names is a single string: write a tuple, ('money',), with a comma; "
        "its constructor takes (accounts) but is called with nothing"
    )
    assert "is a function, not a class" in found["teller"].reason and "lacks generator" in found["teller"].reason


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("def broken(:", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise GeneratorExit('no')", "GeneratorExit: no"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("", "AttributeError: "),
    ],
)
def test_a_plug_in_that_cannot_be_imported_affects_neither_list_nor_other_parts(
    install: Install, capsys: pytest.CaptureFixture[str], source: str, expected: str
) -> None:
    install(source, "nemeses=quake:QUAKE")
    assert cli.main(["list"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "quake broken: nemesis 'quake' (plug_in_" in listed and f"cannot be loaded: {expected}" in listed
    assert "partition " in listed and "broker " in listed and "sim " in listed
    assert cli.main(["run", "--cluster", "sim", "--nemesis", "quake"]) == 254
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert "harness: nemesis 'quake' (plug_in_" in said.err and expected in said.err
    assert registry.load("nemeses", "kill").name == "kill"


def test_a_system_must_implement_an_ability_completely(install: Install) -> None:
    install(
        """
        from harness.systems.broker import BrokerSystem
        class Half(BrokerSystem):
            name = "half"
            @staticmethod
            def stored_files():
                return {}
            operation_missing = None
        """,
        "systems=half:Half",
    )
    assert registry.survey("systems")["half"].reason.partition("is not a system: ")[2].split("; ") == [
        "operation_missing is a NoneType, not a method (Operated)",
        "stored_files takes () but is called with (settings) (StoresFiles)",
    ]


def test_a_plug_in_that_cannot_be_described_does_not_end_the_list(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        """
        from harness.systems.broker import BrokerSystem
        from nemesis.process import Kill
        class Words(BrokerSystem):
            name = "words"
            settings = ("speed",)
        class Absent(Kill):
            @property
            def variants(self):
                raise KeyError("none today")
        ABSENT = Absent()
        """,
        "systems=words:Words",
        "nemeses=absent:ABSENT",
    )
    assert cli.main(["list"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "words broken: system 'words' cannot be described: AttributeError: " in listed
    assert "absent broken: nemesis 'absent' (plug_in_" in listed and "KeyError: 'none today'" in listed
    assert "partition " in listed and "sim " in listed
