"""Checks whether an object conforms to a protocol: it has every member, and every method can be called as declared.

The type checker covers our own code, but not plug-ins of other distributions. All problems are found at once, before
anything of the plug-in is used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["ability_problems", "constructor_problem", "protocol_problems"]

_PLAIN_TYPES: Mapping[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
"""Annotations of data whose values can be checked with `isinstance`."""

_OF_TEXTS = re.compile(r"(Sequence|Collection|Iterable|tuple|frozenset)\[str\b")
"""Annotations of collections of strings. A single string would be iterated by character."""

_AWAITABLE = ("Awaitable", "Coroutine", "Future", "Task")
"""Parts of a return annotation with which a plain function may replace an `async def`."""


def protocol_problems(found: Any, protocol: type) -> list[str]:
    """The members of a protocol that `found` lacks or has in another form, one short text each; empty if it conforms.

    `found` is an object, or a class whose instances must conform. Data of a class may be only declared, since it may be
    set in the constructor, which cannot be checked without calling it.
    """
    problems = (_member_problem(found, name, declared) for name, declared in _members(protocol))
    return [problem for problem in problems if problem is not None]


def ability_problems(found: Any, protocol: type) -> list[str]:
    """Like `protocol_problems`, for an optional protocol: no problem if `found` has none of its methods (or none of its
    data, if the protocol has no methods)."""
    members = list(_members(protocol))
    methods = [name for name, declared in members if _function_of(declared) is not None]
    if not any(hasattr(found, name) for name in methods or [name for name, _ in members]):
        return []
    wanted = [item for item in members if item[0] in methods or hasattr(found, item[0]) or not inspect.isclass(found)]
    problems = (_member_problem(found, name, declared) for name, declared in wanted)
    return [problem for problem in problems if problem is not None]


def constructor_problem(found: Any, keywords: Sequence[str]) -> str | None:
    """Why `found` is not a class that can be instantiated with exactly these keywords; None if it is."""
    if not inspect.isclass(found):
        return f"is a {type(found).__name__}, not a class"
    signature = _signature(found)
    if signature is None or _binds(signature, (), dict.fromkeys(keywords)):
        return None
    return f"its constructor takes {_names(signature)} but is called with {', '.join(keywords) or 'nothing'}"


def _members(protocol: type) -> Iterator[tuple[str, Any]]:
    """(name, declaration) of the public members; the declaration of data is its annotation as a string."""
    seen = set()
    for base in protocol.__mro__:
        if Protocol not in base.__bases__:
            continue
        for name, declared in (*vars(base).items(), *inspect.get_annotations(base).items()):
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, declared


def _function_of(declared: Any) -> Callable[..., Any] | None:
    """The function of a declared method; None for data, including properties."""
    if isinstance(declared, (staticmethod, classmethod)):
        return declared.__func__
    return declared if inspect.isfunction(declared) else None


def _member_problem(found: Any, name: str, declared: Any) -> str | None:
    try:
        plain = inspect.getattr_static(found, name)
    except AttributeError:
        is_declared = inspect.isclass(found) and any(name in inspect.get_annotations(c) for c in found.__mro__)
        return None if is_declared else f"lacks {name}"
    function = _function_of(declared)
    if function is None:
        return _data_problem(name, plain if inspect.isclass(found) else getattr(found, name), declared)
    return _method_problem(found, name, plain, declared, function)


def _data_problem(name: str, plain: Any, declared: Any) -> str | None:
    if isinstance(declared, property):
        declared = declared.fget.__annotations__.get("return") if declared.fget is not None else None
    if isinstance(declared, str) and _OF_TEXTS.match(declared) and isinstance(plain, str):
        return f"{name} is a single string: write a tuple, ({plain!r:.40},), with a comma"
    types = _PLAIN_TYPES.get(declared) if isinstance(declared, str) else None
    is_descriptor = inspect.isdatadescriptor(plain) or inspect.ismethoddescriptor(plain)  # such as a property
    if types is None or is_descriptor or isinstance(plain, types):
        return None
    return f"{name} is {plain!r:.40}, not of type {declared}"


def _method_problem(found: Any, name: str, plain: Any, declared: Any, function: Callable[..., Any]) -> str | None:
    value = getattr(found, name)
    if not callable(value):
        return f"{name} is a {type(value).__name__}, not a method"
    wanted = _signature(function)
    taken = _signature(value)
    if wanted is None or taken is None:
        return None
    if not isinstance(declared, staticmethod):
        wanted = _without_first(wanted)
    if inspect.isclass(found) and inspect.isfunction(plain):
        taken = _without_first(taken)
    if wanted is None or taken is None:
        return f"{name} does not take self"
    if not _takes(taken, wanted):
        return f"{name} takes {_names(taken)} but is called with {_names(wanted)}"
    is_async, should_be_async = inspect.iscoroutinefunction(value), inspect.iscoroutinefunction(function)
    if is_async and not should_be_async:
        return f"{name} must not be async"
    returned = str(taken.return_annotation)
    if should_be_async and not is_async and not any(word in returned for word in _AWAITABLE):
        return f"{name} must be async"
    return None


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _without_first(signature: inspect.Signature) -> inspect.Signature | None:
    parameters = list(signature.parameters.values())
    if not parameters:
        return None
    if parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=parameters[1:])


def _takes(taken: inspect.Signature, wanted: inspect.Signature) -> bool:
    """Whether `taken` accepts a call with all parameters of `wanted`, and one with only the required ones."""
    return all(
        _binds(
            taken,
            [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY],
            {p.name: None for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY},
        )
        for parameters in (
            list(wanted.parameters.values()),
            [p for p in wanted.parameters.values() if p.default is inspect.Parameter.empty],
        )
    )


def _binds(signature: inspect.Signature, positional: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def _names(signature: inspect.Signature) -> str:
    """The parameters as written, without types."""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))
