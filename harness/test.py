"""One test as a value: everything that determines a run.

A `Test` is created from the command line and saved as test.json before anything starts; `analyze` and the replay line
are based on it. It contains only names and numbers, so that it can be written, read and compared; the registry provides
the objects for the names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import OperatorError
from harness.registry import short_name
from harness.seeded import MAX_SEED
from nemesis.forms import is_of_all
from nemesis.protocol import Nemesis

__all__ = [
    "ALL",
    "MAX_CONCURRENCY",
    "MAX_NODES",
    "WORKLOAD_PREFIX",
    "NemesisChoice",
    "Test",
    "split_settings",
    "test_from_json",
]

ALL = "all"
"""Instead of a nemesis's name: every nemesis that the cluster supports."""

MAX_NODES = 15
"""Limit of replicas per run. Beyond this the quadratic number of links costs a lot and reveals nothing new."""

MAX_CONCURRENCY = 1000
"""Limit of logical clients per run; each has connections to several nodes, so this bounds descriptors."""


WORKLOAD_PREFIX = "workload."
"""Prefix of the workload's settings: `--set workload.keys=20`."""


def split_settings(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(settings of the system, settings of the workload without their prefix)."""
    of_system = {name: value for name, value in settings.items() if not name.startswith(WORKLOAD_PREFIX)}
    of_workload = {
        name.removeprefix(WORKLOAD_PREFIX): value
        for name, value in settings.items()
        if name.startswith(WORKLOAD_PREFIX)
    }
    return of_system, of_workload


@dataclass(frozen=True, slots=True)
class NemesisChoice:
    """A nemesis by name, with a variant or a part of one; without it the run cycles through all variants."""

    name: str
    variant: str | None = None

    def __str__(self) -> str:
        return self.name if self.variant is None else f"{self.name}={self.variant}"

    @classmethod
    def parse(cls, text: str) -> NemesisChoice:
        """Parse "name", "name=variant" or, for a target alone, "name@target"."""
        name, separator, variant = text.partition("=")
        if not separator and "@" in name:
            name, _, word = name.partition("@")
            return cls(name=name.strip(), variant=f"@{word.strip()}")
        return cls(name=name.strip(), variant=variant.strip() if separator else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Everything that determines a run. Times are seconds, `rate` operations per second (0: no limit)."""

    __test__ = False  # not a test case for pytest, despite the name

    system: str
    cluster: str
    nodes: int
    workload: str
    nemesis: tuple[NemesisChoice, ...]
    nemesis_interval_s: float
    time_limit_s: float
    concurrency: int
    rate: float
    seed: int
    nemesis_schedule: str | None = None
    """A file of timed faults, instead of `nemesis`; a copy is stored with the run."""
    settings: Mapping[str, str] = field(default_factory=dict)
    cluster_options: Mapping[str, str] = field(default_factory=dict)
    """Further options of the cluster, such as inventory or image."""
    operation_timeout_s: float = 3.0
    checker_timeout_s: float = 60.0
    checker_memory_mb: int = 2048
    fail_fast: bool = False
    """Whether the first violation found by an online checker ends the load."""
    metrics: tuple[str, ...] = ()
    """Series to read besides those that the system declares; or only NO_METRICS."""
    client: str | None = None
    """The command of a client program, instead of the system's own client."""

    @property
    def name(self) -> str:
        """The folder of the store for runs of this kind."""
        faults = "+".join(dict.fromkeys(choice.name for choice in self.nemesis)) or "none"
        if self.nemesis_schedule is not None:
            faults = "schedule"
        name = f"{self.system_name}-{self.workload}-{faults}"  # a file may have any name, the store's folders may not
        return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._+=,-]", "_", name))

    @property
    def system_name(self) -> str:
        """The system's name; for one in a file, the file's name without directory."""
        return short_name(self.system)

    @property
    def faults(self) -> str:
        """The faults of a run, as text for comparing runs: "partition=halves+kill", "schedule=FILE"."""
        if self.nemesis_schedule is not None:
            return f"schedule={os.path.basename(self.nemesis_schedule)}"
        return "+".join(map(str, self.nemesis)) or "none"

    @property
    def system_settings(self) -> Mapping[str, str]:
        """The system's settings, without those of the workload."""
        return split_settings(self.settings)[0]

    def problems(self) -> list[str]:
        """All problems with the values, each as one line. Names are checked by the registry."""
        found = []
        if not 1 <= self.nodes <= MAX_NODES:
            found.append(f"--nodes must be 1 to {MAX_NODES}, not {self.nodes}")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            found.append(f"--concurrency must be 1 to {MAX_CONCURRENCY}, not {self.concurrency}")
        for option, value in (
            ("--time-limit", self.time_limit_s),
            ("--nemesis-interval", self.nemesis_interval_s),
            ("--operation-timeout", self.operation_timeout_s),
            ("--checker-timeout", self.checker_timeout_s),
        ):
            if not 0 < value <= 7 * 86400:
                found.append(f"{option} must be above 0 and at most 604800 (a week), not {value:g}")
        if not 0 <= self.seed <= MAX_SEED:
            found.append(f"--seed must be 0 to {MAX_SEED}, not {self.seed}")
        if self.nemesis and self.nemesis_schedule is not None:
            found.append("--nemesis-schedule already names the faults: omit --nemesis")
        if any(choice.name == ALL and choice.variant is not None for choice in self.nemesis):
            found.append(f"--nemesis {ALL} cannot be limited to a form or target: name a nemesis")
        if not 0 <= self.rate <= 1_000_000:
            found.append(f"--rate must be 0 (no limit) to 1000000 operations per second, not {self.rate:g}")
        if self.checker_memory_mb < 16:
            found.append(f"--checker-memory must be at least 16 MB, not {self.checker_memory_mb}")
        return found

    def nemesis_problems(self, nemeses: Mapping[str, Nemesis]) -> list[str]:
        """Problems of `all` in combination with other nemeses, which may only be those that `all` leaves out. `nemeses`
        are all nemeses by name."""
        named = {choice.name for choice in self.nemesis}
        twice = sorted(name for name in named & nemeses.keys() if is_of_all(nemeses[name]))
        if ALL not in named or not twice:
            return []
        others = sorted(name for name, nemesis in nemeses.items() if not is_of_all(nemesis))
        return [
            f"--nemesis {ALL} already includes {', '.join(twice)}: combine it only with what it does not include "
            f"({', '.join(others)})"
        ]

    def to_json(self) -> dict[str, Any]:
        """The test as plain JSON data, which `test_from_json` reads."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["nemesis"] = [str(choice) for choice in self.nemesis]
        data["metrics"] = list(self.metrics)
        data["settings"] = dict(self.settings)
        data["cluster_options"] = dict(self.cluster_options)
        return data

    def replay_line(self) -> str:
        """The command that repeats this run: same seed, same options."""
        is_file = self.system_name != self.system
        words = ["harness", "run", *([self.system] if is_file else []), "--cluster", self.cluster]
        words += [*([] if is_file else ["--system", self.system]), "--nodes", str(self.nodes)]
        words += ["--workload", self.workload]
        if self.nemesis_schedule is None:
            words += ["--nemesis", ",".join(map(str, self.nemesis)) or "none"]
        else:
            words += ["--nemesis-schedule", self.nemesis_schedule]
        words += ["--nemesis-interval", _exact(self.nemesis_interval_s), "--time-limit", _exact(self.time_limit_s)]
        words += ["--concurrency", str(self.concurrency), "--rate", _exact(self.rate), "--seed", str(self.seed)]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for option, name in (
            ("--operation-timeout", "operation_timeout_s"),
            ("--checker-timeout", "checker_timeout_s"),
            ("--checker-memory", "checker_memory_mb"),
        ):
            if getattr(self, name) != defaults[name]:
                words += [option, _exact(getattr(self, name))]
        if self.fail_fast:
            words.append("--fail-fast")
        if self.client is not None:
            words += ["--client", self.client]
        for text in self.metrics:
            words += ["--metrics", text]
        for key, value in sorted(self.cluster_options.items()):
            words += [f"--{key}", value]
        for key, value in sorted(self.settings.items()):
            words += ["--set", f"{key}={value}"]
        return shlex.join(words)


def _exact(number: float) -> str:
    """A number with the fewest digits that are read back as the same: in simulation any other number is another run."""
    short = f"{number:g}"
    return short if "e" not in short and float(short) == number else str(number).removesuffix(".0")


def test_from_json(data: Mapping[str, Any]) -> Test:
    """The inverse of `Test.to_json`; fields of newer versions are ignored. Raises OperatorError."""
    values = {}
    for each in dataclasses.fields(Test):
        if each.name in data:
            value = data[each.name]
            if not _FITS[str(each.type)](value):
                what = json.dumps(value)[:100]
                raise OperatorError(f"test.json does not describe a run: {each.name} cannot be {what}")
            values[each.name] = value
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise OperatorError(f"test.json does not describe a run: it has no {each.name}")
    values["metrics"] = tuple(values.get("metrics", ()))
    values["nemesis"] = tuple(NemesisChoice.parse(text) for text in values["nemesis"])
    return Test(**values)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)  # a larger one does not fit a float


def _is_map_of_words(value: Any) -> bool:
    return isinstance(value, dict) and all(type(word) is str for pair in value.items() for word in pair)


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is str for each in value)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: type(value) is str,
    "str | None": lambda value: value is None or type(value) is str,
    "int": lambda value: type(value) is int,
    "float": _is_number,
    "bool": lambda value: type(value) is bool,
    "Mapping[str, str]": _is_map_of_words,
    "tuple[NemesisChoice, ...]": _is_list_of_words,
    "tuple[str, ...]": _is_list_of_words,
}
"""Annotation of a field of `Test` -> whether a JSON value has this type."""


test_from_json.__test__ = False  # type: ignore[attr-defined]
