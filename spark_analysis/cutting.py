"""A run as histories for the checkers: one per key, or one of all its operations.

Runs inside executors, over columns that are decoded once for the whole run. `rows` holds the positions of a key's
operations in the whole run, and positions of events are those of the run.
"""

from __future__ import annotations

__all__ = ["Cut", "cut_by_key", "whole"]

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from checker.history import NEVER as CHECKER_NEVER
from checker.history import History, key_of_text
from spark_analysis.operations import INFO, STATUS_NAMES, Ints, RunData


class Cut(NamedTuple):
    """Some operations of a run. `place` is the key's rank by first use, `key` its text (None: no key, or all of
    them), `rows` the operations' positions in the run, in order."""

    place: int
    key: str | None
    history: History
    rows: Ints


def cut_by_key(run: RunData) -> Iterator[Cut]:
    """One cut per key, in order of first use. `run` must have been read with values."""
    if not len(run):
        return
    order = np.argsort(run.key.codes, kind="stable")
    codes = run.key.codes[order]
    starts = np.concatenate(([0], np.flatnonzero(codes[1:] != codes[:-1]) + 1))
    ends: Any = np.append(starts[1:], len(codes))
    columns, errors, keys = _columns(run, order), _errors(run), _keys(run)
    for place, group in enumerate(np.argsort(order[starts]).tolist()):
        start, end = int(starts[group]), int(ends[group])
        rows = order[start:end]
        code = int(codes[start])
        history = History(
            **{name: column[start:end] for name, column in columns.items()},
            key=[keys[code]] * (end - start),
            errors={at: errors[row] for at, row in enumerate(rows.tolist()) if row in errors} if errors else {},
            keyed=code >= 0,
        )
        yield Cut(place, None if code < 0 else run.key.names[code], history, rows)


def whole(run: RunData) -> Cut:
    """All operations as one history, for checkers of properties that span keys."""
    rows = np.arange(len(run))
    if run.history is not None:
        return Cut(0, None, run.history, rows)
    keys = _keys(run)
    history = History(
        **_columns(run, rows),
        key=[keys[code] for code in run.key.codes.tolist()],
        errors=_errors(run),
        keyed=bool((run.key.codes >= 0).any()),
        problems=list(run.problems),
    )
    return Cut(0, None, history, rows)


def _columns(run: RunData, order: Ints) -> dict[str, Any]:
    """The lists of a `History` except its keys, for the operations in this order."""
    returned = np.where((run.completed < 0) | (run.status == INFO), CHECKER_NEVER, run.completed)
    ended = run.completed_ns[order].astype(object)
    ended[run.completed_ns[order] < 0] = None
    processes = run.process if run.processes is None else _object_array(run.processes)
    return {
        "process": processes[order].tolist(),
        "f": np.array([*run.f.names, ""], object)[run.f.codes[order]].tolist(),
        "value": _objects(run.values)[order].tolist(),
        "result": _objects(run.results)[order].tolist(),
        "status": np.array(STATUS_NAMES, object)[run.status[order]].tolist(),
        "invoked": run.invoked[order].tolist(),
        "returned": returned[order].tolist(),
        "invoked_ns": run.invoked_ns[order].tolist() if run.timed else [None] * len(order),
        "returned_ns": ended.tolist(),
        "node": np.array([*run.node.names, None], object)[run.node.codes[order]].tolist(),
    }


def _errors(run: RunData) -> dict[int, str]:
    """Errors by row; few operations have one."""
    if run.errors is None or run.errors.null_count == len(run.errors):
        return {}
    rows = np.flatnonzero(np.asarray(run.errors.is_valid()))
    return dict(zip(rows.tolist(), run.errors.drop_null().to_pylist(), strict=True))


def _keys(run: RunData) -> list[Any]:
    """The keys by code, with None at the end for code -1."""
    if run.key_objects is not None:
        return [*run.key_objects, None]
    return [*map(key_of_text, run.key.names), None]


def _objects(column: Any) -> Any:
    """The values of JSON texts, all parsed at once."""
    if isinstance(column, list):
        return _object_array(column)
    texts = column.fill_null("null").to_pylist()
    try:
        values = json.loads(f"[{','.join(texts)}]")
    except ValueError:
        values = []
    return _object_array(values if len(values) == len(texts) else [_value(text) for text in texts])


def _value(text: str) -> Any:
    """One value; text that is not JSON is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _object_array(values: list[Any]) -> Any:
    return np.fromiter(values, object, len(values))
