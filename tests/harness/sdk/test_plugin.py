"""Mistakes in a plug-in: all are reported before anything is started, with file and line."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.commands.new import source_for
from harness.errors import OperatorError
from harness.sdk.plugin import PluginError, hints_of, load_file, place_of, recipes_of, require_client, settings_of
from harness.systems.base import Setting, setting_problems

Write = Callable[[str], str]

HEAD = "from harness.sdk import Client, Refused, Status, System, by_setting, go, path, pip\n"
BUILT_IN = {
    "toy": 25, "etcd": 60, "etcd-lock": 60, "redis": 60, "nats": 60, "zookeeper": 234, "postgres": 200, "mariadb": 236,
    "patroni": 155, "hazelcast": 270, "tarantool": 135, "cassandra": 183, "consul": 170,
}  # fmt: skip
"""System -> the maximum number of lines of its plug-in, empty ones not counted."""

GOOD_SYSTEM = """
class Mine(System):
    ports = {"client": 7000}
    def command(self, host):
        return ["server"]
"""
GOOD_CLIENT = """
class Talk(Client):
    async def read(self, key):
        return None
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a plug-in's file, its imports before it; returns its path."""

    def make(source: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(HEAD + textwrap.dedent(source))
        return str(path)

    return make


def test_a_plug_in_with_a_system_and_a_client_is_loaded(write: Write) -> None:
    plugin = load_file(write(GOOD_SYSTEM + GOOD_CLIENT))
    assert (plugin.name, plugin.system_class.__name__, plugin.client_class.__name__) == ("mine", "Mine", "Talk")


def test_a_changed_plug_in_is_loaded_again(write: Write) -> None:
    path = write(GOOD_SYSTEM + GOOD_CLIENT)
    assert load_file(path).client_class.__name__ == "Talk"
    write(GOOD_SYSTEM + GOOD_CLIENT.replace("Talk", "TalkMore"))
    assert load_file(path).client_class.__name__ == "TalkMore"


def test_one_of_several_systems_is_chosen_by_name_after_a_colon(write: Write) -> None:
    path = write(GOOD_SYSTEM + GOOD_SYSTEM.replace("Mine", "Other") + GOOD_CLIENT)
    with pytest.raises(PluginError, match=r"^mine.py:8: several systems \(Mine, Other\): choose one, as in .*:Other$"):
        load_file(path)
    assert load_file(f"{path}:Other").name == "mine:Other"
    with pytest.raises(PluginError, match="has no class Third that is a System"):
        load_file(f"{path}:Third")


def test_the_base_class_of_a_system_is_not_taken_for_another_system(write: Write) -> None:
    plugin = load_file(write(GOOD_SYSTEM + GOOD_CLIENT + "class Broken(Mine):\n    settings = {'bug': ('on',)}\n"))
    assert plugin.system_class.__name__ == "Broken"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = (", r"^mine.py:2: '\(' was never closed$"),
        ("x = 1\ny = x / 0\n", "^mine.py:3: its import raised ZeroDivisionError: division by zero$"),
        ("import sys\nsys.exit(3)\n", "^mine.py:3: its import raised SystemExit: 3$"),
        ("raise GeneratorExit('no etcd3')\n", "^mine.py:2: its import raised GeneratorExit: no etcd3$"),
        (GOOD_CLIENT, "^.*mine.py:1: has no class that is a harness.sdk.System$"),
        (GOOD_SYSTEM + GOOD_CLIENT + GOOD_CLIENT.replace("Talk", "Chat"), "^mine.py:3: several clients .Talk, Chat."),
        ("class Mine(System):\n    pass\n" + GOOD_CLIENT, r"^mine.py:2: system Mine has no command\(host\)$"),
        (GOOD_SYSTEM.replace("command", "comand") + GOOD_CLIENT, r"has no command\(host\) \(did you mean comand\?\)$"),
        (GOOD_SYSTEM.replace("self, host", "self") + GOOD_CLIENT, r"^mine.py:5: Mine.command must take \(self, host\)"),
        (GOOD_SYSTEM.replace("def", "async def") + GOOD_CLIENT, "^mine.py:5: Mine.command must not be async$"),
        (GOOD_SYSTEM + "    def ready(self, host):\n        return True\n" + GOOD_CLIENT, "Mine.ready must be async$"),
        (GOOD_SYSTEM.replace("7000", "70000") + GOOD_CLIENT, "^mine.py:3: port 'client' is 70000, not a"),
        (GOOD_SYSTEM.replace('7000}', '7000, "peer": 7000}') + GOOD_CLIENT, "two of the ports are equal"),
        (GOOD_SYSTEM + "    long_request = 'peer', b'?'\n" + GOOD_CLIENT, "long_request is .'peer', b'.'., not"),
        (GOOD_SYSTEM + "    settings = {'size': 3}\n" + GOOD_CLIENT, "setting 'size' is 3, not a string or"),
        (GOOD_SYSTEM + "    settings = ['size']\n" + GOOD_CLIENT, r"settings is \['size'\], not a mapping"),
        (GOOD_SYSTEM + "    install = ('curl',)\n" + GOOD_CLIENT, "install has 'curl', which is not pip, apt"),
        (GOOD_SYSTEM + "    install = None\n" + GOOD_CLIENT, "^mine.py:3: install has None, which is not pip"),
        (GOOD_SYSTEM + "    install = 'curl'\n" + GOOD_CLIENT, "^mine.py:3: install has 'curl', which is not pip"),
        (GOOD_SYSTEM + "    install = pip()\n" + GOOD_CLIENT, r"^mine.py:3: install has pip\(\), which does not name"),
        (
            GOOD_SYSTEM + "    install = go('example.org/a@v1', 'example.org/b')\n" + GOOD_CLIENT,
            r"^mine.py:3: install has go\('example.org/b'\), which names no version \(@v1.2.3\)",
        ),
        (GOOD_SYSTEM + "    install = (pip(3),)\n" + GOOD_CLIENT, r"^mine.py:3: install has pip\(3\), which does not"),
        (GOOD_SYSTEM + "    install = by_setting('version', {'2': pip('a'), '1': pip('b')})\n"
         "    settings = {'version': ('2',)}\n" + GOOD_CLIENT,
         "^mine.py:3: install needs exactly one recipe for each value of setting 'version'$"),
        (GOOD_SYSTEM + "    stored = {'wal': '*.wal'}\n" + GOOD_CLIENT,
         "^mine.py:3: stored has 'wal', which bit-flip does not know; known: log, vote, checkpoint$"),
        (GOOD_SYSTEM + "    stored = {'log': '/var/lib/kv/*'}\n" + GOOD_CLIENT,
         r"^mine.py:3: stored\['log'\] is '/var/lib/kv/\*', which is not a pattern below host.data$"),
        (GOOD_SYSTEM + "    stored = {'log': 'a/../../b'}\n" + GOOD_CLIENT, "'a/../../b', which is not a pattern"),
        (GOOD_SYSTEM + "    user = 3\n" + GOOD_CLIENT, "^mine.py:3: user is 3, not a user name$"),
        (GOOD_SYSTEM + "    logs = ('a/*.log')\n" + GOOD_CLIENT, r"^mine.py:3: logs is a single .* \('a/.*',\), "),
        (GOOD_SYSTEM + "    logs = ['/var/log/x']\n" + GOOD_CLIENT, "^mine.py:3: logs has '/var/log/x', which is no"),
        (GOOD_SYSTEM + "    logs = ['../x.log']\n" + GOOD_CLIENT, "^mine.py:3: logs has '../x.log', which is not a "),
        (GOOD_SYSTEM + "    logs = (3,)\n" + GOOD_CLIENT, r"^mine.py:3: logs is \(3,\), not a sequence of strings$"),
        (GOOD_SYSTEM + "    ready_line = ['x']\n" + GOOD_CLIENT, r"^mine.py:3: ready_line is \['x'\], not a text"),
        (GOOD_SYSTEM + "    ready_timeout_s = '3'\n" + GOOD_CLIENT, "^mine.py:3: ready_timeout_s is '3', not a num"),
        (GOOD_SYSTEM + "    recovery_timeout_s = -1\n" + GOOD_CLIENT, "^mine.py:3: recovery_timeout_s is -1, not a"),
        (GOOD_SYSTEM + "    cannot = {'clok': 'x'}\n" + GOOD_CLIENT,
         r"^mine.py:3: cannot has 'clok', which is not a nemesis \(did you mean clock\?\)$"),
        (GOOD_SYSTEM + "    cannot = {'kill=terminat': 'x'}\n" + GOOD_CLIENT,
         r"^mine.py:3: cannot has 'kill=terminat', which is not a form of kill \(did you mean terminate\?\)$"),
        (GOOD_SYSTEM + "    cannot = {'kill=@most': 'x'}\n" + GOOD_CLIENT,
         "^mine.py:3: cannot has 'kill=@most': unknown target 'most'; targets are one, "),
        (GOOD_SYSTEM + "    extra_hosts = 'directory'\n" + GOOD_CLIENT, "^mine.py:3: extra_hosts is a single"),
        (GOOD_SYSTEM + "    extra_hosts = ('n1',)\n" + GOOD_CLIENT, "^mine.py:3: extra_hosts has 'n1', not a"),
        (GOOD_SYSTEM + "    extra_hosts = ('a', 'a')\n" + GOOD_CLIENT, "^mine.py:3: extra_hosts has 'a', not a"),
        (GOOD_SYSTEM + "    def __init__(self, x):\n        pass\n" + GOOD_CLIENT, r"Mine\(\) must not need"),
        (GOOD_SYSTEM + GOOD_CLIENT.replace("self, key", "self"), r"^mine.py:9: Talk.read must take \(self, key\)"),
        (GOOD_SYSTEM + GOOD_CLIENT.replace("async def", "def"), "^mine.py:9: Talk.read must be async$"),
        (GOOD_SYSTEM + GOOD_CLIENT.replace("async def read(self, key)", "read = 3\n    def f(self)"), "read is 3"),
    ],
)  # fmt: skip
def test_each_mistake_is_reported_with_its_line(write: Write, source: str, expected: str) -> None:
    with pytest.raises(PluginError, match=expected) as caught:
        load_file(write(source))
    assert "\n" not in str(caught.value)


def test_a_method_with_a_common_name_is_a_capability_only_beside_the_related_ones(write: Write) -> None:
    helper = "    def get(self, path, times=3):\n        return path\n"
    assert load_file(write(GOOD_SYSTEM + GOOD_CLIENT + helper)).client_class.__name__ == "Talk"
    others = "".join(f"    async def {name}(self, key, text):\n        pass\n" for name in ("put", "concat"))
    with pytest.raises(PluginError, match=r"Talk.get must be async"):
        load_file(write(GOOD_SYSTEM + GOOD_CLIENT + helper + others))


def test_a_plug_in_without_a_client_is_refused_only_where_one_is_required(write: Write) -> None:
    plugin = load_file(write(GOOD_SYSTEM))
    with pytest.raises(PluginError, match=r"^mine.py:3: has no class that is a harness.sdk.Client: write one, or use"):
        require_client(plugin)
    require_client(load_file(write(GOOD_SYSTEM + GOOD_CLIENT)))


def test_all_mistakes_are_reported_at_once(write: Write) -> None:
    source = GOOD_SYSTEM.replace("self, host", "self") + GOOD_CLIENT.replace("async def", "def")
    with pytest.raises(PluginError, match=r"Mine.command must take.*; mine.py:9: Talk.read must be async"):
        load_file(write(source))


def test_a_member_with_a_misspelt_name_is_reported(write: Write) -> None:
    def hints(more: str) -> list[str]:
        return list(hints_of(load_file(write(GOOD_SYSTEM + more + GOOD_CLIENT)).system_class))

    assert hints("    store = {'log': '*'}\n") == [
        "mine.py:3: Mine.store is not used by the harness (did you mean stored?)"
    ]
    assert hints("    def file(self, host):\n        return {}\n    def files(self, host):\n        return {}\n") == []
    assert hints("    _store = {}\n    quorum = 2\n    def path_of(self, host):\n        return host.data\n") == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_systems_have_no_misspelt_members(name: str) -> None:
    assert list(hints_of(registry.load("systems", name).plugin.system_class)) == []


def test_the_path_of_a_plug_in_may_contain_a_colon(tmp_path: Path) -> None:
    path = tmp_path / "a:b" / "mine.py"
    path.parent.mkdir()
    path.write_text(f"{HEAD}{GOOD_SYSTEM}{GOOD_CLIENT}")
    for name in (str(path), f"{path}:Mine"):
        assert registry.is_file(name)
        assert load_file(name).system_class.__name__ == "Mine"
    assert registry.short_name(f"{path}:Mine") == "mine-Mine"


def test_a_missing_plug_in_is_reported() -> None:
    with pytest.raises(PluginError, match=r"nowhere\.py: there is no such file"):
        load_file("nowhere.py")


def test_settings_are_checked_and_their_default_comes_first(write: Write) -> None:
    source = GOOD_SYSTEM + "    settings = {'read': ('safe', 'fast'), 'flags': ''}\n" + GOOD_CLIENT
    read, flags = settings_of(load_file(write(source)).system_class)
    assert (read.name, read.default, read.choices) == ("read", "safe", ("safe", "fast"))
    assert read.problem("sfae") == "read must be one of safe, fast, not 'sfae' (did you mean safe?)"
    assert flags.default == "" and flags.problem("-v") is None


def test_install_recipes_may_depend_on_a_setting(write: Write) -> None:
    choice = "(pip('common'), by_setting('version', {'2': pip('kv==2'), '1': (pip('kv==1'), pip('old'))}))"
    source = f"{GOOD_SYSTEM}    install = {choice}\n    settings = {{'version': ('2', '1')}}\n"
    cls = load_file(write(source + GOOD_CLIENT)).system_class

    def installed(settings: dict[str, str] | None) -> list[str]:
        return [str(recipe) for recipe in recipes_of(cls, settings)]

    assert installed({"version": "1"}) == ["pip common", "pip kv==1", "pip old"]
    assert installed({}) == ["pip common", "pip kv==2"]
    assert installed(None) == ["pip common", "pip kv==2", "pip kv==1", "pip old"]


def test_the_registry_loads_a_system_from_a_file(write: Write) -> None:
    found = registry.load("systems", write(GOOD_SYSTEM + GOOD_CLIENT))
    assert (found.name, found.ports, found.offers) == ("mine", (7000,), {"client"})
    assert found.client_class.__name__ == "Talk"
    with pytest.raises(OperatorError, match="there is no such file"):
        registry.load("systems", "nowhere.py")


def test_built_in_systems_meet_the_requirements_of_the_registry() -> None:
    for name in BUILT_IN:
        found = registry.load("systems", name)
        assert found.name == name and registry._problems("systems", found) == []


def test_built_in_systems_stay_within_their_numbers_of_lines() -> None:
    for name, most in BUILT_IN.items():
        source = Path(registry.__file__).parent / "systems" / f"{name.replace('-', '_')}.py"
        lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(lines) <= most, name


@pytest.mark.parametrize("names_cause", [True, False])
def test_a_timeout_is_reported_with_the_line_that_waited(names_cause: bool, tmp_path: Path) -> None:
    """asyncio names the cause of its TimeoutError from Python 3.11.3 on; before, it is only its context."""
    path = tmp_path / "waits.py"
    path.write_text("def wait(error):\n    pass\n    raise error\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    try:
        try:
            names["wait"](asyncio.CancelledError())
        except asyncio.CancelledError as cause:
            if names_cause:
                raise TimeoutError from cause
            raise TimeoutError  # noqa: B904 (as asyncio did)
    except TimeoutError as error:
        assert place_of(error, str(path)) == "waits.py:3"


DESCRIBED = GOOD_SYSTEM + "    settings = {'read': ('safe', 'fast'), 'flags': '', 'size': ('1',)}\n"


def test_a_system_describes_its_settings(write: Write) -> None:
    source = (
        DESCRIBED
        + "    setting_descriptions = {'read': 'which copy answers', 'flags': 'of the program'}\n"
        + GOOD_CLIENT
    )
    settings = settings_of(load_file(write(source)).system_class)
    assert [each.description for each in settings] == ["which copy answers", "of the program; any string", ""]
    [problem] = setting_problems(settings, {"reed": "safe"})
    known = "flags (of the program; any string), read (which copy answers), size"
    assert problem == f"unknown setting 'reed' (did you mean read?); known: {known}"


def test_descriptions_that_would_fill_the_screen_are_left_out_of_the_message() -> None:
    settings = [Setting(name, "1", "what it decides, " * 20) for name in ("b", "a")]
    assert setting_problems(settings, {"xyz": "1"}) == ["unknown setting 'xyz'; known: a, b"]


@pytest.mark.parametrize(
    ("descriptions", "expected"),
    [
        ("{'raed': 'which copy'}", r"setting_descriptions has 'raed', not a setting \(did you mean read\?\)$"),
        ("{'read': 3}", r"setting_descriptions\['read'\] is 3, not a string$"),
        ("['read']", r"setting_descriptions is \['read'\], not a mapping$"),
    ],
)
def test_descriptions_must_be_of_settings(write: Write, descriptions: str, expected: str) -> None:
    with pytest.raises(PluginError, match=expected):
        load_file(write(f"{DESCRIBED}    setting_descriptions = {descriptions}\n{GOOD_CLIENT}"))


def test_a_class_may_have_other_settings_than_the_one_whose_descriptions_it_inherits(write: Write) -> None:
    source = DESCRIBED + "    setting_descriptions = {'read': 'which copy answers'}\n" + GOOD_CLIENT
    plugin = load_file(write(source + "class Broken(Mine):\n    settings = {'bug': ('on',)}\n"))
    assert [each.description for each in settings_of(plugin.system_class)] == [""]


@pytest.mark.parametrize("name", registry.names("systems"))
def test_every_setting_of_a_built_in_system_has_a_description(name: str) -> None:
    assert [each.name for each in registry.load("systems", name).settings if not each.description] == []


def test_the_file_of_a_new_system_describes_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source_for("mine"))
    assert all(each.description for each in settings_of(load_file(str(path)).system_class))
