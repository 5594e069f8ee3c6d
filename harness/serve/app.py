"""The routes of `harness serve` and their handlers."""

from __future__ import annotations

__all__ = ["RunList", "make_app"]

import asyncio
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from harness.errors import OperatorError
from harness.run_index import RunIndex, RunSummary, SummaryCache, read_index, read_summary
from harness.serve.comparison import Side, compare_runs
from harness.serve.files import MAX_SHOWN_BYTES, NotThere, chunks, list_files, media_type, open_beneath, parts_of
from harness.serve.files import read_json as read_json_file
from harness.serve.guard import MAX_BODY_BYTES, App, Guard
from harness.serve.launch import NUMBERS, Launcher, form_choices, read_form
from harness.serve.live import POLL_INTERVAL_S, HistoryTail, snapshot
from harness.serve.pages import Query, environment, list_view, report_policy, run_view
from harness.store import Store, StoreError

MAX_STREAMS = 16
"""Concurrent live views: each reads a history as it grows."""

MAX_COMPARISONS = 2
"""Concurrent comparisons: each reads two histories."""

FRESH_S = 0.25
"""Maximum age of the list of runs: reading 10,000 runs takes 0.1 s, and a new run should appear within a second."""

REMOVED = "the run is no longer in the store"

_STATIC = {
    "report.css": ("report", "text/css"), "store.css": ("report", "text/css"), "serve.css": ("serve", "text/css"),
    "serve.js": ("serve", "text/javascript"), "live.js": ("serve", "text/javascript"),
}  # fmt: skip


class RunList:
    """The runs of a store, read at most every `FRESH_S` and by one thread at a time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: SummaryCache = {}
        self._lock = threading.Lock()
        self._index = RunIndex([])
        self._read_at_s = float("-inf")

    def get(self, *, is_kept: bool = False) -> RunIndex:
        """The runs, newest first; with `is_kept` their summaries are cached in the store. Raises StoreError."""
        with self._lock:
            if time.monotonic() - self._read_at_s > FRESH_S:
                self._index = read_index(self.store, is_kept=is_kept, known=self._known)
                self._read_at_s = time.monotonic()
            return self._index


class _Pages:
    """The request handlers."""

    def __init__(self, runs: RunList, launcher: Launcher | None, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self._store = runs.store
        self._runs = runs
        self._launcher = launcher
        self._token = secrets.token_urlsafe(24)
        self._streams = _Streams()
        self._comparing = asyncio.Semaphore(MAX_COMPARISONS)

    def routes(self) -> list[Any]:
        """All routes; those that start runs only if there is a launcher."""
        run = "/runs/{test}/{time}"
        routes = [
            Route("/", self.overview),
            Route(run, self.run),
            Route(f"{run}/files/{{path:path}}", self.file),
            Route(f"{run}/download/{{path:path}}", self.download),
            Route(f"{run}/live", self.live),
            Route(f"{run}/events", self.events),
            Route("/compare", self.compare),
            Route("/static/{name}", self.static),
        ]
        if self._launcher is not None:
            routes += [
                Route("/new", self.new, methods=["GET"]),
                Route("/new", self.start, methods=["POST"]),
                Route("/started", self.started),
            ]
        return routes

    def _page(self, template: str, http_status: int = 200, /, **values: Any) -> Response:
        shared = {"store": self._store.root.name, "may_run": self._launcher is not None}
        html = environment().get_template(template).render(**shared, **values)
        return HTMLResponse(html.encode("utf-8", "backslashreplace"), status_code=http_status)

    def problem(self, status: int, text: str) -> Response:
        """An error page."""
        return self._page("problem.html", status, status=status, text=text)

    def _find(self, request: Request) -> RunSummary:
        name = f"{request.path_params['test']}/{request.path_params['time']}"
        run = read_summary(self._store, name)
        if run is None:
            raise NotThere(name)
        return run

    def _side(self, run: RunSummary) -> Side:
        test, results = (
            read_json_file(self._store.root, [run.test, run.time, name]) for name in ("test.json", "results.json")
        )
        return Side(run, test, results)

    async def overview(self, request: Request) -> Response:
        query = Query.read(request.query_params)

        def view() -> dict[str, Any]:
            view = list_view(self._runs.get(), query)
            # With a launcher the first run creates the store.
            is_gone = self._launcher is None and not view["total"] and not os.path.isdir(self._store.root)
            return {**view, "is_gone": is_gone, "place": str(self._store.root)}

        return self._page("list.html", **await run_in_threadpool(view))

    async def run(self, request: Request) -> Response:
        def view() -> dict[str, Any]:
            run = self._find(request)
            side = self._side(run)
            return run_view(run, side.test, side.results, list_files(self._store.root / run.name))

        return self._page("run.html", **await run_in_threadpool(view))

    def _open(self, request: Request) -> tuple[BinaryIO, list[str]]:
        run = self._find(request)
        parts = parts_of(request.path_params["path"])
        return os.fdopen(open_beneath(self._store.root, [run.test, run.time, *parts]), "rb"), parts

    async def file(self, request: Request) -> Response:
        file, parts = await run_in_threadpool(self._open, request)
        kind = media_type(parts)
        headers = {"content-security-policy": report_policy()} if kind == "text/html" else {}
        if kind is None:
            return self._attachment(request, file, parts)
        most_bytes = MAX_SHOWN_BYTES if kind == "text/plain" else None
        return _content(request, file, most_bytes, media_type=f"{kind}; charset=utf-8", headers=headers)

    async def download(self, request: Request) -> Response:
        return self._attachment(request, *await run_in_threadpool(self._open, request))

    def _attachment(self, request: Request, file: BinaryIO, parts: list[str]) -> Response:
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(parts[-1], safe='')}"}
        return _content(request, file, None, media_type="application/octet-stream", headers=headers)

    async def compare(self, request: Request) -> Response:
        names = [request.query_params.get(side, "") for side in ("first", "second")]

        def view() -> dict[str, Any]:
            runs = [read_summary(self._store, name) for name in names]
            if runs[0] is None or runs[1] is None:
                raise NotThere(" and ".join(names))
            sides = [self._side(run) for run in runs if run is not None]
            return {"runs": runs, "comparison": compare_runs(self._store, *sides)}

        async with self._comparing:
            return self._page("compare.html", **await run_in_threadpool(view))

    async def live(self, request: Request) -> Response:
        return self._page("live.html", run=await run_in_threadpool(self._find, request))

    async def events(self, request: Request) -> Response:
        run = await run_in_threadpool(self._find, request)
        if self._streams.open >= MAX_STREAMS:
            return PlainTextResponse("too many live views are open\n", status_code=429)
        if request.method == "HEAD":  # no body is wanted, and this one would last as long as the run
            return _without_body("text/event-stream", {})
        tail = HistoryTail(self._store.root, [run.test, run.time, "history.jsonl"])
        return _LiveView(self._follow(run, tail), tail, self._streams)

    async def _follow(self, run: RunSummary, tail: HistoryTail) -> AsyncIterator[str]:
        """Events of a run until it is judged or dead: its state every POLL_INTERVAL_S, sooner while it is behind."""
        while not self._is_ending():
            is_behind = await run_in_threadpool(tail.read_on)
            current = await run_in_threadpool(read_summary, self._store, run.name)
            state = snapshot(tail, is_real_time=run.cluster != "sim")
            yield _event("state", {**state, "is_behind": is_behind})
            if is_behind:
                continue
            if current is None or current.verdict != "running" or tail.damage is not None:
                verdict, reason = ("unknown", REMOVED) if current is None else (current.verdict, current.reason)
                yield _event("end", {"verdict": verdict, "reason": reason})
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC:
            raise NotThere(name)
        package, kind = _STATIC[name]
        path = Path(__file__).parent.parent / package / "static" / name
        return Response(path.read_bytes(), media_type=f"{kind}; charset=utf-8")

    def _form(self, status: int = 200, problem: str = "", given: Mapping[str, list[str]] | None = None) -> Response:
        values = {"token": self._token, "choices": form_choices(), "numbers": NUMBERS}
        return self._page("new.html", status, **values, problem=problem, given=given or {})

    async def new(self, request: Request) -> Response:
        return self._form()

    async def start(self, request: Request) -> Response:
        assert self._launcher is not None
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return self.problem(413, "The form is too large.")
        try:
            fields = parse_qs(bytes(body).decode("utf-8"), keep_blank_values=True, max_num_fields=100)
        except ValueError:
            return self.problem(400, "This form does not belong to this page.")
        if not hmac.compare_digest(fields.get("token", [""])[0].encode(), self._token.encode()):
            return self.problem(403, "The form was loaded from another server, or before a restart: reload the page.")
        try:
            form = await run_in_threadpool(read_form, fields)
            await run_in_threadpool(self._launcher.start, form)
        except OperatorError as error:
            return self._form(422, str(error), fields)
        return RedirectResponse("/started", status_code=303)

    async def started(self, request: Request) -> Response:
        assert self._launcher is not None
        launches = [(" ".join(one.words), one.status, list(one.output)) for one in reversed(self._launcher.launches)]
        running = [run for run in (await run_in_threadpool(self._runs.get)).runs if run.verdict == "running"]
        return self._page("started.html", launches=launches, running=running[:10])


@dataclass(slots=True)
class _Streams:
    """Counts the open live views."""

    open: int = 0


class _FileAnswer(StreamingResponse):  # type: ignore[misc]
    """A response that closes its file, even if the client disconnects before the end or before the beginning."""

    def __init__(self, file: BinaryIO, most_bytes: int | None, *, media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(chunks(file, most_bytes), media_type=media_type, headers=headers)
        self._file = file

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the file, and close it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


class _LiveView(StreamingResponse):  # type: ignore[misc]
    """A live view. It is counted before its first event, so that simultaneous requests are counted; its history is
    closed with it."""

    def __init__(self, events: AsyncIterator[str], tail: HistoryTail, streams: _Streams) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._tail = tail
        self._streams = streams

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events until they end or the client disconnects."""
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1
            self._tail.close()


def _content(
    request: Request, file: BinaryIO, most_bytes: int | None, *, media_type: str, headers: Mapping[str, str]
) -> Response:
    """A file as a response; for HEAD nothing of it is read."""
    if request.method == "HEAD":
        file.close()
        return _without_body(media_type, headers)
    return _FileAnswer(file, most_bytes, media_type=media_type, headers=headers)


def _without_body(media_type: str, headers: Mapping[str, str]) -> Response:
    """The headers of a response of unknown length."""
    answer = Response(media_type=media_type, headers=dict(headers))
    del answer.headers["content-length"]
    return answer


def _event(name: str, data: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def make_app(runs: RunList, *, hosts: frozenset[str], launcher: Launcher | None, is_ending: Callable[[], bool]) -> App:
    """The application for the runs of a store, accepting requests to one of `hosts`; with a launcher it may start runs.

    `is_ending` tells whether the server is shutting down, upon which live views end.
    """
    pages = _Pages(runs, launcher, is_ending)

    async def not_there(request: Request, error: Exception) -> Response:
        return pages.problem(404, "There is no such page, run or file.")

    async def not_taken(request: Request, error: Exception) -> Response:
        return pages.problem(405, "This address does not accept this method.")

    async def no_store(request: Request, error: Exception) -> Response:
        return pages.problem(503, str(error))

    handlers = {404: not_there, NotThere: not_there, 405: not_taken, StoreError: no_store}
    return Guard(Starlette(routes=pages.routes(), exception_handlers=handlers), hosts=hosts)
