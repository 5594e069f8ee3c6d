"""Models by name, as the command line gives them: ``register``, ``cas-register:initial=0``."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from typing import Any

from checker.models.base import Model, ModelError
from checker.models.collections import FIFOQueue, GrowOnlySet, PriorityQueue, Set, Stack, UnorderedQueue
from checker.models.counters import Counter, FetchAndAdd
from checker.models.keyvalue import KeyValue
from checker.models.logs import Log, Topic
from checker.models.registers import CASRegister, MultiRegister, Mutex, Register, VersionedRegister

__all__ = ["MODELS", "parse_fields", "parse_model"]

MODELS: dict[str, type[Model]] = {
    cls.name: cls
    for cls in (
        Register,
        CASRegister,
        MultiRegister,
        VersionedRegister,
        Mutex,
        Set,
        GrowOnlySet,
        Counter,
        FetchAndAdd,
        FIFOQueue,
        Stack,
        PriorityQueue,
        UnorderedQueue,
        Log,
        KeyValue,
        Topic,
    )
}


def parse_model(text: str) -> Model:
    """The model that ``NAME`` or ``NAME:FIELD=JSON,...`` names.  Raises :class:`ModelError`, which names the fix."""
    name, _, rest = text.partition(":")
    cls = MODELS.get(name)
    if cls is None:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(MODELS))}"
        raise ModelError(f"no model {name!r}{hint}")
    return cls(**parse_fields(f"model {name}", [field.name for field in dataclasses.fields(cls)], rest))


def parse_fields(title: str, known: Sequence[str], text: str) -> dict[str, Any]:
    """The fields in ``FIELD=JSON,...``; a value that is not JSON is a string.  Raises :class:`ModelError`."""
    fields: dict[str, Any] = {}
    for part in _split(text):
        field_name, equals, value = part.partition("=")
        if not equals and field_name in known:
            raise ModelError(f"{title}: {field_name} needs a value: {title.split()[-1]}:{field_name}=...")
        if not equals or field_name not in known:
            raise ModelError(f"{title} has no field {field_name!r}; it has: {', '.join(known) or 'none'}")
        if field_name in fields:
            raise ModelError(f"{title}: {field_name} is given twice")
        try:
            fields[field_name] = json.loads(value, parse_constant=_refuse)
        except ValueError:
            fields[field_name] = value
        except RecursionError:
            raise ModelError(f"{title}: the value of {field_name} is nested too deeply") from None
    return fields


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")  # NaN does not equal itself, so it stays a string


def _split(text: str) -> list[str]:
    """``text`` split at the commas outside braces, brackets and quotes."""
    parts, depth, quoted, current = [], 0, False, ""
    for char in text:
        if char == '"':
            quoted = not quoted
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0 and not quoted:
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current] if current else parts
