"""One embedded Spark for all tests of this folder, and its modules of helpers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent

FOR_SMALL_TABLES = {
    "spark.sql.shuffle.partitions": "2",
    # Compiling a query, and planning it again after every stage, takes longer than answering it for a few rows. Tests
    # that start their own process have both switched on, as users have.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist puts the groups into the tests' names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the embedded Spark run in one process: the first analysis of a Java process costs some 25 s of
    processor time, the next ones a third of it. A test that has another group keeps it."""
    for item in items:
        is_ours = HERE in item.path.parents and "spark" in getattr(item, "fixturenames", ())
        if is_ours and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("embedded spark"))


def _module_of_this_folder(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"spark_tests_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module that makes up runs."""
    return _module_of_this_folder("synthetic")


@pytest.fixture(scope="session")
def recounting() -> ModuleType:
    """The module that recomputes the figures in plain Python."""
    return _module_of_this_folder("recount")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """An embedded Spark on two cores, with as many partitions as small tables need."""
    from spark_analysis.session import open_session

    with open_session(master="local[2]", memory="1g", settings=FOR_SMALL_TABLES) as session:
        yield session.spark


CONFIGURATIONS = ("read_index", "lease", "log", "unsafe")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, synthetic: ModuleType) -> Path:
    """Forty register runs of four configurations, four log runs, one run that died.

    SPLITBRAIN_RECOUNT_STORE names a store of real runs to recount instead.
    """
    real = os.environ.get("SPLITBRAIN_RECOUNT_STORE")
    if real:
        return Path(real)
    root = tmp_path_factory.mktemp("spark") / "store"
    for number in range(40):
        mode = CONFIGURATIONS[number % 4]
        synthetic.make_run(root, number, settings={"read_mode": mode}, wrong=0.02 if mode == "unsafe" else 0.0)
    for number in range(40, 44):
        synthetic.make_run(root, number, workload="log", faults=number % 2, wrong=0.03 if number > 41 else 0.0)
    # Beside invalid runs, so that a rate that counts it among the decided or the judged ones is wrong.
    died = synthetic.make_run(root, 44, settings={"read_mode": "unsafe"}, finished=False)
    with open(died.history_path, "a", encoding="utf-8") as file:
        file.write('{"index":9999,"time":1')
    return root


@pytest.fixture(scope="session")
def selected(spark: Any, store: Path) -> Any:
    """The table of all runs of `store`, read once."""
    from spark_analysis.analysis import Options, selected_runs

    return selected_runs(spark, str(store), Options())
