"""Which package may import which: the rules of the five packages, read from the code itself."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("checker", "nemesis", "node", "spark_analysis", "harness")
STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)

ALLOWED = {
    "checker": {"checker"},
    "nemesis": {"nemesis"},
    "node": {"node"},
    "spark_analysis": {"spark_analysis", "checker"},
    "harness": {"harness", "checker", "nemesis", "node", "spark_analysis"},
}
STANDARD_LIBRARY_ONLY = ("checker", "node")
OPTIONAL_ON_THE_HOST = {"node": {"uvloop"}}
"""Used where the host happens to have it, imported behind a guard and never required."""


@functools.cache
def imports_of(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """(line, module, at module level) of every import in a file; relative ones are resolved."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    module_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in module_level
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join((*package[: len(package) - node.level + 1], base)).rstrip(".")
            yield node.lineno, base, id(node) in module_level


def files_of(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"package {package} has no files"
    return found


@pytest.mark.parametrize("package", OURS)
def test_a_package_imports_only_the_packages_that_it_may(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files_of(package)
        for line, module, _ in imports_of(path)
        if module.split(".")[0] in OURS and module.split(".")[0] not in ALLOWED[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", STANDARD_LIBRARY_ONLY)
def test_the_checker_and_the_node_need_only_the_standard_library(package: str) -> None:
    allowed = STANDARD_LIBRARY | {package} | OPTIONAL_ON_THE_HOST.get(package, set())
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files_of(package)
        for line, module, _ in imports_of(path)
        if module.split(".")[0] not in allowed
    ]
    assert wrong == []


OPEN_TO_THE_HARNESS = ("node.client", "node.runtime", "node.real_runtime", "node.mutants")
"""The client, the interfaces it lives on, and the catalogue of known bugs: `--set mutant=NAME` is checked by name, and
the one bug that is the client's own is switched on where the client is."""


def test_harness_uses_only_the_client_of_the_node() -> None:
    """The harness knows the node as a client does; only the simulated cluster hosts its classes."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files_of("harness")
        if "sim" not in path.relative_to(ROOT / "harness").parts[1:2]
        for line, module, _ in imports_of(path)
        if module.split(".")[0] == "node" and not module.startswith(OPEN_TO_THE_HARNESS)
    ]
    assert wrong == []


def test_spark_is_imported_lazily() -> None:
    """`harness run` must not need Spark or Java: only the commands that use it import it, inside a function."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module} at module level"
        for path in files_of("harness")
        for line, module, module_level in imports_of(path)
        if module.split(".")[0] in ("spark_analysis", "pyspark") and module_level
    ]
    assert wrong == []


NOT_IN_THE_NODE = {
    "time": "clocks come from node.runtime and the loop",
    "threading": "a node has one thread",
    "concurrent.futures": "a node has one thread",
    "uuid": "randomness comes from node.runtime",
    "secrets": "randomness comes from node.runtime",
    "socket": "the network is the event loop's",
    "multiprocessing": "a node has one process",
    "subprocess": "a node starts nothing",
    "os": "files are behind the runtime's disk",
    "os.path": "files are behind the runtime's disk",
    "fcntl": "files are behind the runtime's disk",
}
BEFORE_THE_RUNTIME = {"command_line.py": {"os", "fcntl"}, "staging.py": {"os", "fcntl"}}
"""Lock the data directory, raise limits and rename whole directories, which the simulation has none of."""

REAL_WORLD = {"real_runtime.py", "disk_thread.py", "__main__.py"}
"""The only files of the node that know the real clock, disk and threads."""


def test_the_node_touches_the_world_only_through_its_runtime() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}: {NOT_IN_THE_NODE[module]}"
        for path in files_of("node")
        if path.name not in REAL_WORLD
        for line, module, _ in imports_of(path)
        if module in NOT_IN_THE_NODE and module not in BEFORE_THE_RUNTIME.get(path.name, set())
    ]
    assert wrong == []


def test_known_bugs_stay_out_of_production_code() -> None:
    """A mutant replaces methods from outside: only the configuration knows its name, only the start-up switches it."""
    knowing = {
        str(path.relative_to(ROOT))
        for path in files_of("node")
        if "mutants" not in path.relative_to(ROOT).parts
        for _, module, _ in imports_of(path)
        if module.startswith("node.mutants")
    }
    assert knowing <= {"node/config.py", "node/serving.py"}


def test_workloads_and_node_do_not_ask_which_cluster_they_run_on() -> None:
    """One code path from client to report, whatever the hosts are made of."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in [*files_of("node"), *sorted((ROOT / "harness" / "workloads").rglob("*.py"))]
        for line, module, _ in imports_of(path)
        if module.startswith("harness.clusters")
    ]
    assert wrong == []


def test_hosts_know_no_system() -> None:
    """A system says which hosts it needs; only the simulation, which runs a node in its own process, knows one."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / "harness" / "clusters").rglob("*.py"))
        if "sim" not in path.relative_to(ROOT / "harness" / "clusters").parts
        for line, module, _ in imports_of(path)
        if module.startswith("harness.systems") or module.split(".")[0] == "node"
    ]
    assert wrong == []


KNOW_THE_BROKER = ("registry.py", "exploration/mutants.py", "systems/broker", "clusters/sim/")
"""Its name as the default, the search for its known bugs, its own modules, and the hosts that are simulated for it."""


def test_the_harness_treats_the_broker_as_any_other_system() -> None:
    """Only the modules of KNOW_THE_BROKER import the broker's system or compare with its name."""
    others = [
        path for path in files_of("harness")
        if not str(path.relative_to(ROOT / "harness")).startswith(KNOW_THE_BROKER)
    ]  # fmt: skip
    imports = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in others
        for line, module, _ in imports_of(path)
        if module.startswith("harness.systems.broker")
    ]
    assert imports == []
    names = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in others
        if path.parent.name != "systems"  # where "broker" is what a system calls one of its programs or ports
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == "broker"
    ]
    assert names == []


def import_graph(sources: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Module -> those of the modules in `sources` (name -> text) that it imports, be that at its top, inside a
    function, or for its types only: a cycle of types, too, keeps two modules from being read one after the other."""
    graph = {}
    packages = {
        ".".join(parts[:length]) for parts in (name.split(".") for name in sources) for length in range(len(parts))
    }
    for module, text in sources.items():
        imported = set()
        for node in ast.walk(ast.parse(text, module)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = (
                    module.split(".")[: 1 - node.level or None]
                    if module in packages
                    else module.split(".")[: -node.level]
                )
                base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
                whole = {f"{base}.{alias.name}" for alias in node.names}
                imported |= whole & sources.keys()
                if not whole <= sources.keys():
                    imported.add(base)
        graph[module] = frozenset(imported & sources.keys() - {module})
    return graph


def cycles_of(graph: Mapping[str, frozenset[str]]) -> set[frozenset[str]]:
    """The strongly connected components of a graph that have two members or more, after Tarjan."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = set()

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            members = frozenset(path[path.index(module) :])
            del path[path.index(module) :]
            if len(members) > 1:
                found.add(members)

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_one_another_in_a_cycle() -> None:
    sources = {}
    for path in (path for package in OURS for path in files_of(package)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    assert [sorted(cycle) for cycle in cycles_of(import_graph(sources))] == []


def test_import_cycles_are_found_wherever_the_imports_are() -> None:
    sources = {
        "p": "",
        "p.a": "from p import b, c",
        "p.b": "def late():\n    from p.a import x",
        "p.c": "import p.d",
        "p.d": "if TYPE_CHECKING:\n    import p.c",
        "p.e": "from p import NAME\nfrom . import a\nfrom .d import x",
    }
    graph = import_graph(sources)
    assert graph["p.a"] == {"p.b", "p.c"} and graph["p.e"] == {"p", "p.a", "p.d"}
    assert cycles_of(graph) == {frozenset({"p.a", "p.b"}), frozenset({"p.c", "p.d"})}


PROBES = {
    ("harness/cli.py", "cluster"): "an option that not every command has",
    ("harness/commands/report.py", "check"): "an option that not every command has",
    ("harness/clusters/docker_engine.py", "_sock"): "what only some versions of the docker package wrap",
    ("harness/clusters/docker_engine.py", "explanation"): "what only some errors have",
    ("harness/clusters/link_proxy.py", "TCP_INFO"): "what the interpreter was built with",
    ("harness/clusters/local.py", "port"): "what only some errors have",
    ("harness/exploration/continuations.py", "freeze"): "what only some interpreters have",
    ("harness/pidfds.py", "pidfd_open"): "what the interpreter was built with",
    ("harness/pidfds.py", "pidfd_send_signal"): "what the interpreter was built with",
    ("harness/registry.py", "description"): "of a plug-in that was never seen",
    ("harness/report/trace_window.py", "strerror"): "what only some errors have",
}
"""Names that objects are asked for without knowing whether they have them, and why."""


def test_optional_abilities_are_protocols_and_not_probed_for() -> None:
    """What only some clusters, systems, workloads and nemeses can do has a Protocol with a name in the base module of
    its kind, and is asked for by `isinstance`."""
    wrong = []
    for path in [*files_of("harness"), *files_of("nemesis")]:
        place = str(path.relative_to(ROOT))
        if place.startswith(("harness/clusters/sim/", "nemesis/mechanisms/")):
            continue  # asyncio and the interpreter, taken apart
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
                continue
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            is_probe = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if is_probe and name is not None and (place, name) not in PROBES:
                wrong.append(f"{place}:{node.lineno} asks for {name!r}")
    assert wrong == []
