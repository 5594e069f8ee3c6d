"""``harness check --trace-model M TRACE...``: traces from anywhere, judged together by one model."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from checker.limits import within_limits
from checker.models.base import ModelError
from checker.nearest import nearest
from checker.number_options import NumberOptions
from checker.trace.events import Trace, TraceError, merge_by_time, read_trace
from checker.trace.model import TraceModel
from checker.trace.models.raft import Raft
from checker.trace.search import MAX_STATES, check_traces
from checker.verdict import Result, Verdict

__all__ = ["OPTION", "load_model", "main"]

OPTION = "--trace-model"

BAD_ARGUMENTS = 254

MODELS: dict[str, type[TraceModel]] = {"raft": Raft}
"""The models that have a name."""


class _Parser(NumberOptions):
    def error(self, message: str) -> NoReturn:
        raise TraceError(f"{self.prog}: {message}")


def _parser() -> _Parser:
    parser = _Parser(
        prog="harness check",
        description="Check what replicas logged against a model of their protocol: one verdict for all traces.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="the trace of one replica, JSON lines")
    parser.add_argument(
        OPTION, required=True, metavar="M", help=f"{', '.join(MODELS)}, FILE.py with one TraceModel, or FILE.py:CLASS"
    )
    parser.add_argument(
        "--by-time",
        action="store_true",
        help="take the events in the order of their times: all replicas have the same clock",
    )
    parser.add_argument("--max-states", type=int, default=MAX_STATES, metavar="N", help="remembered states at most")
    parser.add_argument("--timeout", type=float, metavar="S", help="time limit in seconds (default: none)")
    parser.add_argument(
        "--memory", type=float, metavar="MB", help="memory limit, in MiB (default: half of the free memory)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else, to stdout")
    return parser


def main(argv: Sequence[str], *, say: Callable[[str], None], complain: Callable[[str], None]) -> int:
    """Run the command; returns the exit status: 0 valid, 1 invalid, 2 unknown, 254 for bad arguments or files.

    ``say`` prints a text, ``complain`` an error.
    """
    try:
        options = _parser().parse_args(argv)
        for name in ("max_states", "timeout", "memory"):
            value = getattr(options, name)
            if value is not None and not 0 < value < math.inf:
                raise TraceError(f"harness check: --{name.replace('_', '-')} must be positive and finite, not {value}")
        model = load_model(options.trace_model)
        result = within_limits(lambda: _judge(model, options), options.timeout, options.memory)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except (TraceError, ModelError) as error:
        complain(str(error))
        return BAD_ARGUMENTS
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}")
        return BAD_ARGUMENTS
    say(_as_json(options.traces, result) if options.json else _in_words(result))
    return result.verdict.exit_status


def _judge(model: TraceModel, options: argparse.Namespace) -> Result:
    traces: list[Trace] = []
    for path in options.traces:
        trace = read_trace(path)
        if any(each.node == trace.node for each in traces):
            raise TraceError(f"{path}: there is another trace of {trace.node}; give the lines of a replica as one file")
        traces.append(trace)
    if options.by_time:
        traces = merge_by_time(traces)
    try:
        return check_traces(model, traces, max_states=options.max_states, timeout_s=None)
    except (TraceError, ModelError, MemoryError):
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(at.filename)}:{at.lineno}"
        raise ModelError(f"{place}: model {model.name} raised {type(error).__name__}: {error}") from error


def load_model(name: str) -> TraceModel:
    """The model that is called so, or the one in FILE.py or FILE.py:CLASS.  Raises ModelError."""
    if name in MODELS:
        return MODELS[name]()
    directory, base = os.path.split(name)
    file, _, wanted = base.partition(":")
    path = os.path.join(directory, file)
    if not file.endswith(".py"):
        known = nearest(name, list(MODELS)) or f"; known: {', '.join(MODELS)}, and files that end in .py"
        raise ModelError(f"no trace model {name!r}{known}")
    classes = [
        each
        for each in vars(_imported(path)).values()
        if inspect.isclass(each) and issubclass(each, TraceModel) and each.__module__ == _MODULE
    ]
    found = [each for each in classes if not wanted or each.__name__ == wanted]
    if not found:
        raise ModelError(f"{path}: has no class {wanted or 'that is a TraceModel (checker.trace)'}")
    if len(found) > 1:
        raise ModelError(f"{path}: has several models: choose one, as in {path}:{found[-1].__name__}")
    try:
        return found[0]()
    except Exception as error:
        raise ModelError(f"{path}: {found[0].__name__}() raised {type(error).__name__}: {error}") from error


_MODULE = "splitbrain_trace_model"


def _imported(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except Exception as error:
        raise ModelError(f"{path}: its import raised {type(error).__name__}: {error}") from error
    return module


def _as_json(paths: Sequence[str], result: Result) -> str:
    return json.dumps({"files": list(paths), "exit_status": result.verdict.exit_status, **result.to_json()})


def _in_words(result: Result) -> str:
    """The verdict; unless it is valid, the last explained events, and the state behind them."""
    lines = [f"{result.verdict}: {result.reason}"]
    stats = result.stats
    if result.verdict is not Verdict.VALID and "state" in stats:
        lines += ["  explained last:", *(f"    {_line(each)}" for each in stats["explained_last"])]
        lines += ["  then impossible:", *(f"    {_line(each)}: {each['why']}" for each in stats["then_impossible"])]
        lines += ["  in the state:", *(f"    {each['state']}" for each in stats["state"])]
    return "\n".join(lines)


def _line(event: Mapping[str, Any]) -> str:
    return f"{event['node']}, line {event['line']}: {event['event']}"
