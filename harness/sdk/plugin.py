"""Loads a plug-in from a file or an entry point and validates its classes.

All problems are reported at once, with file and line, before anything is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from checker.trace import TraceModel
from harness.clusters.base import CLIENTS_HOST
from harness.errors import OperatorError, nearest
from harness.metrics.expression import declared_problems
from harness.plugin_files import split_file
from harness.sdk.client import CAPABILITIES, TOGETHER, Client
from harness.sdk.install import BySetting, Recipe
from harness.sdk.system import System
from harness.systems.base import Setting
from nemesis.corruption import BitFlip
from nemesis.forms import HasForms, split_variant
from nemesis.victims import target_problem

__all__ = [
    "NoExceptionError",
    "Plugin",
    "PluginError",
    "blamed",
    "hints_of",
    "load_file",
    "place_of",
    "plugin_of",
    "recipes_of",
    "require_client",
    "settings_of",
    "source_line",
]

SUFFIX = ".py"

NEAR = 0.8
"""Similarity, from 0 to 1, from which a name may be a misspelling of another: `store` and `stored` have 0.91."""

_METHODS: Mapping[str, Sequence[str]] = {"open": (), "close": (), **CAPABILITIES}

_TIMES = ("ready_timeout_s", "recovery_timeout_s")

_EXTRA_HOST = re.compile(r"(?!n[0-9]+$)[A-Za-z][A-Za-z0-9-]*")

_ASYNC = ("setup", "start_together", "stop_together", "ready", "status", "promote", "members", "leave", "join", "state")
_PLAIN = ("command", "programs", "files", "environment")


class PluginError(OperatorError):
    """Something is wrong with a plug-in; the message is one line that begins with its file and line."""


class NoExceptionError(Exception):
    """Wraps a BaseException that a plug-in raised and that is not an Exception; it is the cause."""


@dataclass(frozen=True)
class Plugin:
    """The classes of a plug-in. `name` is the name of its system."""

    name: str
    system_class: type[System]
    client_class: type[Client]


def load_file(name: str) -> Plugin:
    """The plug-in in FILE.py, which has a single system, or FILE.py:CLASS. Raises PluginError."""
    path, class_name = split_file(name)
    if not os.path.isfile(path):
        what = "this is a directory, not a file" if os.path.isdir(path) else "there is no such file"
        raise PluginError(f"{path}: {what}")
    stem = os.path.basename(path).removesuffix(SUFFIX)
    state = os.stat(path)
    module = _imported(os.path.realpath(path), state.st_mtime_ns, state.st_size)
    systems = _defined(module, System)
    if class_name:
        systems = [found for found in systems if found.__name__ == class_name]
    if not systems:
        what = f"class {class_name} that is a System" if class_name else "class that is a harness.sdk.System"
        raise PluginError(f"{path}:1: has no {what}")
    if len(systems) > 1:
        names = [found.__name__ for found in systems]
        raise PluginError(
            f"{source_line(systems[-1])}: several systems ({', '.join(names)}): choose one, as in {path}:{names[-1]}"
        )
    return _checked(Plugin(stem if not class_name else f"{stem}:{class_name}", systems[0], _client_of(systems[0])))


def plugin_of(system_class: type[System], name: str, client_class: type[Client] | None = None) -> Plugin:
    """The plug-in of a system, with its own or the given client class. Raises PluginError."""
    return _checked(Plugin(name, system_class, client_class or _client_of(system_class)))


@cache
def _imported(path: str, changed_ns: int, size_bytes: int) -> ModuleType:
    """Import a file as a module, once per state of the file. Raises PluginError."""
    name = f"splitbrain_plugin_{os.path.basename(path).removesuffix(SUFFIX)}_{changed_ns:x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)  # for modules in the same directory
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints must not mix with a command's results
            spec.loader.exec_module(module)
    except SyntaxError as error:
        raise PluginError(f"{os.path.basename(path)}:{error.lineno or 1}: {error.msg}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest.importorskip, for example, raises one that is no Exception
        raise blamed(error, path, "its import") from None
    return module


def _defined(module: ModuleType, base: type[Any]) -> list[Any]:
    """The most derived subclasses of `base` in a module; imported ones only if it defines none."""
    found = [
        member
        for member in vars(module).values()
        if inspect.isclass(member) and issubclass(member, base) and member is not base
    ]
    bases = {base for one in found for base in one.__mro__[1:]}
    last = [one for one in dict.fromkeys(found) if one not in bases]
    return [one for one in last if one.__module__ == module.__name__] or last


def _client_of(system_class: type[System]) -> type[Client]:
    named = system_class.client
    if named is not None:
        return named
    clients = _defined(sys.modules[system_class.__module__], Client)
    if len(clients) == 1:
        return clients[0]  # type: ignore[no-any-return]
    if not clients:
        return Client  # without capabilities: `require_client` reports it, unless the run has its own client
    names = ", ".join(found.__name__ for found in clients)
    raise PluginError(
        f"{source_line(system_class)}: several clients ({names}): choose one with client = ... in the system"
    )


def require_client(plugin: Plugin) -> None:
    """Raise PluginError for a plug-in without a client."""
    if plugin.client_class is Client:
        where = source_line(plugin.system_class)
        raise PluginError(f"{where}: has no class that is a harness.sdk.Client: write one, or use --client")


def source_line(found: Any) -> str:
    """ "file.py:12" of a class or function; its name if it has no source."""
    with contextlib.suppress(OSError, TypeError):
        return f"{os.path.basename(inspect.getsourcefile(found) or '')}:{inspect.getsourcelines(found)[1]}"
    return str(found.__name__)


def blamed(error: BaseException, path: str, what: str) -> PluginError:
    """An exception of a plug-in's code as one line with its place in the plug-in's file."""
    text = " ".join(str(error).split())
    raised = error.__cause__ if isinstance(error, NoExceptionError) else error
    said = f"{type(raised).__name__}: {text}" if text else type(raised).__name__
    if isinstance(error, PluginError):
        return error
    return PluginError(f"{place_of(error, path)}: {what} raised {said[:400]}")


def place_of(error: BaseException, path: str) -> str:
    """Where in a plug-in's file an exception was raised, as "file.py:12"; for a timeout, where the plug-in waited."""
    cause = error.__cause__ or error.__context__  # the second in Python 3.11.2 and older
    told_by = cause if isinstance(error, TimeoutError) and isinstance(cause, asyncio.CancelledError) else error
    trace = traceback.extract_tb(told_by.__traceback__)
    frames = [frame for frame in trace if os.path.realpath(frame.filename) == path]
    return f"{os.path.basename(path)}:{frames[-1].lineno}" if frames else os.path.basename(path)


# What is wrong with a plug-in


def _checked(plugin: Plugin) -> Plugin:
    problems = [*_system_problems(plugin.system_class), *_client_problems(plugin.client_class)]
    if problems:
        raise PluginError("; ".join(problems))
    return plugin


def _system_problems(cls: type[System]) -> Iterator[str]:
    if cls.command is System.command and cls.programs is System.programs:
        own = [name for name in _own_names(cls) if inspect.isfunction(inspect.getattr_static(cls, name))]
        yield f"{source_line(cls)}: system {cls.__name__} has no command(host){nearest('command', own)}"
    for name in (*_PLAIN, *_ASYNC):
        words = () if name.endswith("_together") else ("host",)
        yield from _method_problems(cls, name, words, is_async=name in _ASYNC)
    yield from _method_problems(cls, "trace_event", ("line",), is_async=False)
    if cls.trace_model is not None and not _is_model(cls.trace_model):
        wanted = "a class that is a checker.trace.TraceModel"
        yield f"{source_line(cls)}: trace_model is {cls.trace_model!r:.60}, not {wanted}"
    yield from _constructor_problems(cls)
    for name, port in _pairs(cls, "ports"):
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            yield f"{source_line(cls)}: port {name!r} is {port!r}, not a number from 1 to 65535"
    if len({port for _, port in _pairs(cls, "ports")}) < len(_pairs(cls, "ports")):
        yield f"{source_line(cls)}: two of the ports are equal"
    if cls.long_request is not None and not _is_request(cls):
        yield f"{source_line(cls)}: long_request is {cls.long_request!r}, not (name of a port, bytes)"
    for name, values in _pairs(cls, "settings"):
        choices = (values,) if isinstance(values, str) else values
        if not isinstance(choices, Sequence) or not choices or not all(isinstance(value, str) for value in choices):
            yield f"{source_line(cls)}: setting {name!r} is {values!r}, not a string or a sequence of strings"
    for name in ("cannot", "stored", "setting_descriptions"):
        for key, value in _pairs(cls, name):
            if not isinstance(value, str):
                yield f"{source_line(cls)}: {name}[{key!r}] is {value!r}, not a string"
    for role, pattern in _pairs(cls, "stored"):
        if role not in BitFlip.forms:
            known = f"{nearest(str(role), BitFlip.forms)}; known: {', '.join(BitFlip.forms)}"
            yield f"{source_line(cls)}: stored has {role!r}, which bit-flip does not know{known}"
        if isinstance(pattern, str) and not _is_below_data(pattern):
            yield f"{source_line(cls)}: stored[{role!r}] is {pattern!r}, which is not a pattern below host.data"
    _pairs(cls, "metrics")
    yield from (f"{source_line(cls)}: {problem}" for problem in declared_problems(cls.metrics, cls.ports))
    yield from _description_problems(cls)
    yield from _plain_problems(cls)
    yield from _cannot_problems(cls)
    for choice in _installed(cls):
        values = dict(_pairs(cls, "settings")).get(choice.setting, ()) if isinstance(choice, BySetting) else ()
        if isinstance(choice, BySetting) and [*choice.recipes] != [*values]:
            yield f"{source_line(cls)}: install needs exactly one recipe for each value of setting {choice.setting!r}"
    for recipe in recipes_of(cls):
        if not isinstance(recipe, Recipe):
            yield f"{source_line(cls)}: install has {recipe!r:.60}, which is not pip, apt, maven, npm, go or path"
        elif not recipe.what or not all(isinstance(word, str) and word for word in recipe.what):
            given = ", ".join(map(repr, recipe.what))
            yield f"{source_line(cls)}: install has {recipe.kind}({given:.60}), which does not name what to install"
        elif unpinned := [word for word in recipe.what if recipe.kind == "go" and "@" not in word]:
            yield f"{source_line(cls)}: install has go({unpinned[0]!r:.60}), which names no version (@v1.2.3)"


def _description_problems(cls: type[System]) -> Iterator[str]:
    """Descriptions of settings that neither the class nor one that it derives from has."""
    known = {name for base in cls.__mro__ if issubclass(base, System) for name, _ in _pairs(base, "settings")}
    for name, _ in _pairs(cls, "setting_descriptions"):
        if name not in known:
            yield f"{source_line(cls)}: setting_descriptions has {name!r}, not a setting{nearest(str(name), known)}"


def _plain_problems(cls: type[System]) -> Iterator[str]:
    """Problems of attributes that must be a string, a number, or a sequence of strings."""
    if cls.user is not None and not isinstance(cls.user, str):
        yield f"{source_line(cls)}: user is {cls.user!r}, not a user name"
    line: Any = cls.ready_line
    if line is not None and not (isinstance(line, str) and line):
        yield f"{source_line(cls)}: ready_line is {line!r:.60}, not a text that a program prints"
    for name in _TIMES:
        seconds = getattr(cls, name)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            yield f"{source_line(cls)}: {name} is {seconds!r:.60}, not a number of seconds"
    for name in ("logs", "extra_hosts"):
        texts = getattr(cls, name)
        if isinstance(texts, str):
            yield f"{source_line(cls)}: {name} is a single string: write a tuple, ({texts!r},), with a comma"
        elif not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            yield f"{source_line(cls)}: {name} is {texts!r:.60}, not a sequence of strings"
        elif name == "logs":
            for pattern in texts:
                if not _is_below_data(pattern):
                    yield f"{source_line(cls)}: logs has {pattern!r}, which is not a pattern below host.data"
        else:
            for host in texts:
                if not _EXTRA_HOST.fullmatch(host) or host in (CLIENTS_HOST, "net") or list(texts).count(host) > 1:
                    yield f"{source_line(cls)}: extra_hosts has {host!r}, not a unique name such as 'directory'"


def _is_below_data(pattern: str) -> bool:
    """Whether a pattern matches only files below the directory that it is joined to."""
    return bool(pattern) and not os.path.isabs(pattern) and os.pardir not in pattern.split(os.sep)


def _cannot_problems(cls: type[System]) -> Iterator[str]:
    """Keys of `cannot` that are not nemeses, or not forms or targets of one."""
    known = {point.name: point for point in entry_points(group="splitbrain.nemeses")} if cls.cannot else {}
    for key, _ in _pairs(cls, "cannot") if known else ():
        name, _, variant = str(key).partition("=")
        form, target = split_variant(variant)
        if name not in known:
            yield f"{source_line(cls)}: cannot has {key!r}, which is not a nemesis{nearest(name, known)}"
        elif form and isinstance(nemesis := known[name].load(), HasForms) and form not in nemesis.forms:
            yield f"{source_line(cls)}: cannot has {key!r}, which is not a form of {name}{nearest(form, nemesis.forms)}"
        elif target and (problem := target_problem(target)) is not None:
            yield f"{source_line(cls)}: cannot has {key!r}: {problem}"


def _given_names(cls: type[System]) -> set[str]:
    """Names of the members that the plug-in's own classes define."""
    return {name for base in cls.__mro__ if base not in System.__mro__ for name in vars(base)}


def _own_names(cls: type[System]) -> list[str]:
    """The public ones among them that System does not have."""
    return sorted(name for name in _given_names(cls) if not name.startswith("_") and not hasattr(System, name))


def hints_of(cls: type[System]) -> Iterator[str]:
    """Members of a system that the harness ignores and whose names nearly match one that it uses. They may be the
    plug-in's own, so they are reported as hints and not as mistakes."""
    given = _given_names(cls)
    known = [name for name in dir(System) if not name.startswith("_") and name not in given]
    for name in _own_names(cls):
        near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
        if near:
            what = f"{cls.__name__}.{name} is not used by the harness"
            yield f"{source_line(cls)}: {what} (did you mean {near[0]}?)"


def _is_model(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, TraceModel) and found is not TraceModel


def _is_request(cls: type[System]) -> bool:
    match cls.long_request:
        case (str(port), bytes()):
            return port in cls.ports
    return False


def _pairs(cls: type[System], name: str) -> list[tuple[Any, Any]]:
    """The items of a class attribute that must be a mapping. Raises PluginError if it is not."""
    value = getattr(cls, name)
    if not isinstance(value, Mapping):
        raise PluginError(f"{source_line(cls)}: {name} is {value!r:.60}, not a mapping")
    return list(value.items())


def _client_problems(cls: type[Client]) -> Iterator[str]:
    alone = {name for group in TOGETHER if not all(hasattr(cls, name) for name in group) for name in group}
    for name, words in _METHODS.items():
        if name not in alone and hasattr(cls, name):
            yield from _method_problems(cls, name, words, is_async=True)
    yield from _constructor_problems(cls)


def _method_problems(cls: type[Any], name: str, words: Sequence[str], *, is_async: bool) -> Iterator[str]:
    function = inspect.getattr_static(cls, name)
    where = f"{cls.__name__}.{name}"
    if not inspect.isfunction(function):
        if not isinstance(function, staticmethod | classmethod):
            yield f"{source_line(cls)}: {where} is {function!r:.60}, not a method"
        return
    try:
        inspect.signature(function).bind(None, *words)
    except TypeError as error:
        yield f"{source_line(function)}: {where} must take ({', '.join(('self', *words))}): {error}"
    if is_async and not inspect.iscoroutinefunction(function):
        yield f"{source_line(function)}: {where} must be async"
    elif not is_async and inspect.iscoroutinefunction(function):
        yield f"{source_line(function)}: {where} must not be async"


def _constructor_problems(cls: type[Any]) -> Iterator[str]:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        yield f"{source_line(cls)}: {cls.__name__}() must not need arguments: {error}"


def _installed(cls: type[System]) -> Sequence[Recipe | BySetting]:
    install: Any = cls.install  # not validated yet
    return tuple(install) if isinstance(install, list | tuple) else (install,)


def recipes_of(cls: type[System], settings: Mapping[str, str] | None = None) -> Sequence[Recipe]:
    """The recipes of a system with these settings (missing ones have their defaults); for None, all its recipes."""
    found = list[Recipe]()
    for choice in _installed(cls):
        if not isinstance(choice, BySetting):
            found.append(choice)
        elif settings is None:
            found += [recipe for recipes in choice.recipes.values() for recipe in recipes]
        else:
            found += choice.recipes[settings.get(choice.setting, next(iter(choice.recipes)))]
    return tuple(found)


def settings_of(cls: type[System]) -> tuple[Setting, ...]:
    """A system's settings as the harness checks and lists them."""
    settings = []
    for name, values in _pairs(cls, "settings"):
        description = cls.setting_descriptions.get(name, "")
        if isinstance(values, str):
            settings.append(Setting(name, values, f"{description}; any string" if description else "any string"))
        else:
            settings.append(Setting(name, values[0], description, tuple(values)))
    return tuple(settings)
