"""The pages: the list with its filters, a run with its files, two runs side by side. All content is shown as text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from harness.report.page import write_report
from harness.run_index import RunIndex
from harness.serve import app, comparison, files, pages
from harness.serve.guard import POLICY
from harness.serve.launch import Launcher
from harness.store import Store

from .conftest import Client, make_run

MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def runs_of(html: str) -> list[str]:
    return re.findall(r'<a href="(/runs/[^"]*)">', html)


def test_the_list_is_filtered_sorted_searched_and_paged(store: Store, serve: Callable[..., Client]) -> None:
    for minutes in range(60):
        make_run(store, minutes, valid=[True, False, "unknown"][minutes % 3], duration_s=float(minutes % 7))
    other = make_run(store, 90, "etcd-log-none", test={"workload": "log", "nemesis": [], "cluster": "netns"})
    client = serve()
    first = client.page("/")
    assert runs_of(first)[0] == f"/runs/{other.name}" and len(runs_of(first)) == 50
    assert "61 runs" in first and "page 1 of 2" in first and 'href="/?sort=time&amp;page=2"' in first
    second = client.page("/?page=2")
    assert len(runs_of(second)) == 11 and not set(runs_of(first)) & set(runs_of(second))
    assert (
        runs_of(client.page("/?workload=log"))
        == runs_of(client.page("/?words=ETCD%20netns"))
        == [f"/runs/{other.name}"]
    )
    invalid = client.page("/?verdict=invalid")
    assert "20 runs" in invalid and "20 invalid" in invalid and len(runs_of(invalid)) == 20
    longest = client.page("/?sort=duration_s&nemesis=kill")
    assert re.findall(r'data-label="Took">([\d.]+) s', longest)[:8] == ["6"] * 8
    worst = re.findall(r'data-label="Verdict"><span class="pill (\w+)"', client.page("/?sort=verdict"))
    assert worst[:40] == ["invalid"] * 20 + ["unknown"] * 20


@pytest.mark.parametrize(
    "query", ["page=0", "page=-1", "page=999999999999", "page=x", "sort=x", "verdict=x", "words=%00"]
)
def test_invalid_queries_do_not_break_the_list(store: Store, serve: Callable[..., Client], query: str) -> None:
    make_run(store)
    assert serve().ask(f"/?{query}")[0] == 200


@pytest.mark.parametrize("number", [1e308, float("inf"), float("nan"), 10**400])
def test_numbers_that_are_no_valid_times_do_not_break_pages(
    store: Store, serve: Callable[..., Client], number: float
) -> None:
    fault = {"id": "f1", "nemesis": "kill", "proven": True, "start_ns": -number, "end_ns": number}
    checks = {"mine": {"valid": True, "search_s": number, "rows": [{"start_ns": number, "end_s": number}]}}
    run = make_run(store, duration_s=number, faults=[fault], checks=checks)
    client = serve()
    for page in ("/", f"/runs/{run.name}", f"/compare?first={run.name}&second={run.name}"):
        assert client.ask(page)[0] == 200, page


def test_a_store_that_was_removed_is_reported(store: Store, serve: Callable[..., Client]) -> None:
    make_run(store)
    client, launching = serve(), serve(Launcher(store.root))
    assert "no longer exists" not in client.page("/")
    store.root.rename(store.root.with_name("moved"))
    time.sleep(app.FRESH_S)
    assert f"The store {store.root} no longer exists." in client.page("/")
    assert "No runs yet." in launching.page("/")


def test_folders_that_cannot_be_read_are_named(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = RunIndex([], unreadable=["<b> (Permission denied)"])
    monkeypatch.setattr(app, "read_index", lambda *_, **__: index)
    page = serve().page("/")
    assert "1 folder of the store cannot be read: &lt;b&gt; (Permission denied)." in page
    assert "No readable runs." in page and "No runs yet." not in page


def test_a_store_without_runs_is_shown_as_empty(store: Store, serve: Callable[..., Client]) -> None:
    store.root.mkdir()
    assert "No runs yet" in serve().page("/")


def test_the_page_of_a_run_shows_its_results_and_files(store: Store, serve: Callable[..., Client]) -> None:
    run = make_run(store, valid=False, reason="key 7 was stale", doubts=["f1 was not proven"])
    (run.nodes_path / "n1" / "data").mkdir(parents=True)
    (run.nodes_path / "n1" / "broker.log").write_text("<b>ready</b>\n")
    (run.nodes_path / "n1" / "data" / "0001").write_bytes(b"\x00\xff")
    client = serve()
    page = client.page(f"/runs/{run.name}")
    for text in ("key 7 was stale", "f1 was not proven", "sigkill", "nodes/n1/data/0001", "Linearizability", "proven"):
        assert text in page, text
    address = f"/runs/{run.name}/files"
    status, headers, text = client.ask(f"{address}/nodes/n1/broker.log")
    assert (status, text) == (200, "<b>ready</b>\n")
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert json.loads(client.ask(f"{address}/results.json")[2])["valid"] is False
    _, headers, text = client.ask(f"/runs/{run.name}/download/results.json")
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''results.json"
    assert headers["content-type"].startswith("application/octet-stream")
    assert text == run.results_path.read_text()


def test_the_page_of_a_run_names_the_victims_of_faults_and_omits_no_unproven_fault(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_FAULT_ROWS", 4)
    fine = {"nemesis": "kill", "variant": "sigkill", "proven": True, "healed": True, "start_ns": 10**9, "end_ns": 2**31}
    apart = {"n1": ["n2", "n3"], "n2": ["n1"], "n3": ["n1"]}
    faults = [
        {**fine, "id": "f1", "nemesis": "partition", "variant": "leader", "grudge": apart, "leader": "n1"},
        {**fine, "id": "f2", "nemesis": "partition", "variant": "one-way", "grudge": {"n1": ["n3"]}},
        *({**fine, "id": f"f{number}", "hosts": ["n2"]} for number in range(3, 9)),
        {**fine, "id": "f9", "proven": False, "proof": {"failed": ["n1 still <hears> n2"]}, "hosts": ["n1", "n2"]},
    ]
    page = serve().page(f"/runs/{make_run(store, faults=faults, test={'nodes': 3}).name}")
    rows = re.findall(
        r"<tr>\s*<td data-label=\"Fault\"><span>(f\d).*?<span class=\"cutwords\">([^<]*)</span>", page, re.S
    )
    assert rows == [("f1", "n1  |  n2 n3"), ("f2", "n1 deaf to n3"), ("f3", "n2"), ("f9", "n1 n2")]
    assert "5 more faults in results.json" in page and "leader: n1" in page
    assert "n1 still &lt;hears&gt; n2" in page


def test_files_that_are_not_text_are_downloaded(store: Store, serve: Callable[..., Client]) -> None:
    run = make_run(store)
    (run.path / "evil.html").write_text("<script>alert(1)</script>")
    (run.path / "evil.svg").write_text("<svg onload='alert(1)'/>")
    client = serve()
    for name in ("evil.html", "evil.svg"):
        _, headers, _ = client.ask(f"/runs/{run.name}/files/{name}")
        assert headers["content-type"].startswith("application/octet-stream")
        assert headers["content-disposition"].startswith("attachment")


def test_a_report_is_sandboxed_and_runs_only_our_scripts(store: Store, serve: Callable[..., Client]) -> None:
    run = make_run(store)
    write_report(run.path, run.read_test(), run.read_results(), run.history_path)
    status, headers, text = serve().ask(f"/runs/{run.name}/files/report.html")
    policy = headers["content-security-policy"]
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert policy.startswith("sandbox allow-scripts") and "allow-same-origin" not in policy
    own = re.search(r"script-src '(sha256-[^']+)'", text)
    assert own is not None and own[1] in policy and "unsafe-inline" not in policy.partition("script-src")[2]


def test_every_answer_has_the_security_headers(store: Store, serve: Callable[..., Client]) -> None:
    run = make_run(store)
    client = serve()
    for path in (
        "/",
        f"/runs/{run.name}",
        "/static/serve.css",
        "/nothing",
        "/static/live.js",
        f"/runs/{run.name}/live",
    ):
        _, headers, _ = client.ask(path)
        assert headers["content-security-policy"] == POLICY, path
        assert (headers["x-frame-options"], headers["cache-control"]) == ("DENY", "no-store")
        assert "server" not in headers
    assert "unsafe" not in POLICY


def test_a_comparison_marks_the_differences_of_two_runs(store: Store, serve: Callable[..., Client]) -> None:
    first = make_run(store, 1, test={"settings": {"read_mode": "unsafe"}})
    second = make_run(
        store, 2, valid=False, reason="stale", checks={"linearizable": {"valid": False, "reason": "key 7"}}
    )
    page = serve().page(f"/compare?first={first.name}&second={second.name}")
    rows = re.findall(r'<tr class="different"><th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td>', page)
    assert ("settings read_mode", "unsafe", "–") in rows
    assert ("seed", "1", "2") in rows
    assert ("verdict", "valid", "invalid") in rows
    assert ("linearizable", "valid: one key", "invalid: key 7") in rows
    assert not [row for row in rows if row[0] == "system"]
    assert re.search(r'<th scope="row">read, median</th><td>1(\.\d+)? ms</td><td>1(\.\d+)? ms</td>', page)


@pytest.mark.parametrize(("rate", "said"), [(0.0, "no limit"), (0.5, "0.5"), (200.0, "200")])
def test_a_rate_of_zero_is_shown_as_no_limit(
    store: Store, serve: Callable[..., Client], rate: float, said: str
) -> None:
    run = make_run(store, test={"rate": rate})
    assert f"<dt>Rate per second</dt><dd>{said}</dd>" in serve().page(f"/runs/{run.name}")


def test_values_that_differ_only_where_they_are_cut_are_marked_as_different(
    store: Store, serve: Callable[..., Client]
) -> None:
    long, commit = "a" * 300, "0123456789abcdef" * 2
    first = make_run(
        store, 1, reason=f"{long}1", git_commit=commit, git_dirty=True, test={"settings": {"x": f"{long}1"}}
    )
    second = make_run(
        store, 2, reason=f"{long}2", git_commit=commit, git_dirty=False, test={"settings": {"x": f"{long}2"}}
    )
    page = serve().page(f"/compare?first={first.name}&second={second.name}")
    rows = re.findall(r'<tr class="different"><th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td>', page)
    assert {"settings x", "reason"} <= {name for name, one, other in rows if "differs further on" in one == other}
    assert ("git commit", "0123456789ab with local changes", "0123456789ab") in rows


@pytest.mark.parametrize("query", ["", "?first=x/y&second=x/y", "?first=../x&second=..", "?first=latest&second=latest"])
def test_a_comparison_of_missing_runs_is_not_found(store: Store, serve: Callable[..., Client], query: str) -> None:
    make_run(store)
    assert serve().ask(f"/compare{query}")[0] == 404


@pytest.mark.parametrize("missing", ["first", "second"])
def test_a_run_is_not_compared_with_one_that_is_not_there(
    store: Store, serve: Callable[..., Client], missing: str
) -> None:
    names = {"first": make_run(store).name, "second": make_run(store, minutes=1).name, missing: "no/run"}
    status, _, page = serve().ask(f"/compare?first={names['first']}&second={names['second']}")
    assert status == 404 and "There is no such page, run or file." in page


def test_a_comparison_names_missing_damaged_and_oversized_files(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, damaged = make_run(store, 1), make_run(store, 2)
    missing = make_run(store, 3)
    damaged.history_path.write_text("{}\n")
    missing.history_path.unlink()
    client = serve()
    assert "is damaged" in client.page(f"/compare?first={whole.name}&second={damaged.name}")
    assert "has no history.jsonl" in client.page(f"/compare?first={whole.name}&second={missing.name}")
    page = client.page(f"/compare?first={whole.name}&second={store.create('t').name}")
    assert "results.json" not in page
    damaged.results_path.write_text("{")
    page = client.page(f"/compare?first={whole.name}&second={damaged.name}")
    assert f"results.json of {damaged.name} cannot be read or is too large" in page
    assert f"results.json of {whole.name}" not in page
    monkeypatch.setattr(comparison, "MAX_HISTORY_BYTES", 10)
    assert "too large" in client.page(f"/compare?first={whole.name}&second={whole.name}")


def hostile_values() -> dict[str, Any]:
    fault = {name: MARKUP for name in ("id", "nemesis", "variant")}
    return {
        "test": {**dict.fromkeys(("system", "workload", "cluster", "nodes"), MARKUP), "nemesis": [MARKUP]},
        "valid": False, "reason": MARKUP, "doubts": [MARKUP], "replay": MARKUP,
        "faults": [{**fault, "hosts": [MARKUP]}],
        "checks": {MARKUP: {"valid": MARKUP, "reason": MARKUP}}, "ops_by_f": {MARKUP: {MARKUP: 1}}, "version": MARKUP,
    }  # fmt: skip


def test_markup_in_every_field_is_text_on_every_page(store: Store, serve: Callable[..., Client]) -> None:
    run = make_run(store, **hostile_values())
    event = json.dumps({"index": 0, "time": 0, "process": 0, "type": "invoke", "f": MARKUP, "value": MARKUP})
    run.history_path.write_text(event + "\n" + event.replace("invoke", "ok") + "\n")
    (run.path / "<img src=x onerror=alert(1)>.log").write_text("x")
    odd = store.root / "<img src=x onerror=alert(1)>"
    run.path.rename(odd.with_name("moved"))
    odd.mkdir()
    store_run = odd / "'\"><b>20260131"
    (odd.with_name("moved")).rename(store_run)
    client = serve()
    (address,) = runs_of(client.page("/"))
    name = f"{odd.name}/{store_run.name}"
    compare = f"/compare?first={quote(name)}&second={quote(name)}"
    for path in ("/", f"/?words={quote(MARKUP)}", f"/?test={quote(MARKUP)}", address, f"{address}/live", compare):
        found = Tags(client.page(path)).found
        assert not [tag for tag, _ in found if tag in ("img", "b")], path
        assert not [attributes for tag, attributes in found if tag == "script" and "src" not in attributes], path
        names = [(name, str(value)) for _, attributes in found for name, value in attributes.items()]
        assert not [pair for pair in names if pair[0].startswith("on") or pair[1].startswith("javascript")], path


def test_the_number_of_listed_files_is_bounded(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(store)
    for name in ("back\\slash", "line\nfeed"):  # such a file cannot be opened by its address
        (run.path / name).touch()
    (run.path / "link").symlink_to(run.report_path)
    there, more = files.list_files(run.path)
    assert {file.path for file in there} == {"history.jsonl", "report.html", "results.json", "test.json"} and not more
    monkeypatch.setattr(files, "MAX_FILES", 2)
    assert files.list_files(run.path) == (there[:2], 2)
    assert "2 more files in the run" in serve().page(f"/runs/{run.name}")


def test_content_that_is_too_large_for_a_page_is_cut_and_reported(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(store, valid=False, reason="key 7 was stale")
    run.harness_log_path.write_bytes(b"a" * 100 + b"b" * 100)
    client = serve()
    assert client.page(f"/runs/{run.name}/files/harness.log") == "a" * 100 + "b" * 100
    assert "too large" not in client.page(f"/runs/{run.name}")
    monkeypatch.setattr(app, "MAX_SHOWN_BYTES", 100)
    monkeypatch.setattr(files, "MAX_READ_JSON_BYTES", 100)
    said = "\n[cut: 100 of 200 bytes; the download has all of them]\n"
    assert client.page(f"/runs/{run.name}/files/harness.log") == "a" * 100 + said
    assert client.page(f"/runs/{run.name}/download/harness.log") == "a" * 100 + "b" * 100
    assert client.page(f"/runs/{run.name}/files/report.html") == run.report_path.read_text()
    page = client.page(f"/runs/{run.name}")
    assert "too large for this page" in page and "key 7 was stale" in page


@pytest.mark.parametrize("name", ["../x", "a/../b", "", "/", "a//b", ".", "a\\b", "a\nb", "a/./b"])
def test_ambiguous_paths_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(files.NotThere):
        files.parts_of(name)
