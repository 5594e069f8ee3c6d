"""The pages in headless Chromium: they open without an error, fit into 400 pixels, and the replay plays.

Needs the distribution's Chromium and the extra `browser` (Playwright's package, without its browsers).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.report.fleet import GROUP, FleetData, render_fleet
from harness.report.page import write_report
from harness.report.replay import collect_replay, replay_page
from harness.report.store_page import update_store_page
from harness.serve import app
from harness.serve.launch import Launch, Launcher
from harness.serve.live import HistoryTail
from harness.store import RunDir, Store

from .report import conftest as reports
from .report import test_fleet as fleet
from .report.test_replay import run as run
from .serve.conftest import Client, make_run
from .serve.conftest import serve as serve
from .serve.conftest import store as store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (400, 1280)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens an address at a width; an error on the browser's console fails the test."""
    contexts = []
    complaints: list[str] = []

    def open_page(address: str, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def until(page: Any, condition: str, within_s: float = 10) -> None:
    """Wait until an expression holds on the page.

    Polled from here, because the page's content security policy forbids what `wait_for_function` does.
    """
    deadline = time.monotonic() + within_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"{condition}: not within {within_s} s: {page.inner_text('body')[:2000]}"
        page.wait_for_timeout(20)


def until_clock(page: Any, moment: str) -> None:
    """Wait until a replay shows this moment."""
    until(page, f"document.getElementById('clock').textContent === '{moment} s'")


def overflow_px(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_pages_of_a_store_fit_narrow_and_wide_windows(
    store: Store, serve: Callable[..., Client], look: Callable[..., Any], width: int
) -> None:
    runs = [
        make_run(store, minutes, name="broker-register-" + "x" * 40, valid=False, reason="y" * 200)
        for minutes in (0, 1)
    ]
    update_store_page(store)
    client = serve()
    home = f"http://127.0.0.1:{client.port}"
    compare = f"/compare?first={runs[0].name}&second={runs[1].name}"
    for path in ("/", f"/runs/{runs[0].name}", compare, f"/runs/{runs[0].name}/live"):
        assert overflow_px(look(home + path, width)) <= 0, path
    page = look(f"file://{store.root}/index.html", width, "dark")
    assert overflow_px(page) <= 0
    page.fill("#words", "120100")
    assert page.locator("#runs tr:visible").count() == 1


def test_a_live_page_shows_the_verdict_when_the_run_ends(
    store: Store, serve: Callable[..., Client], look: Callable[..., Any]
) -> None:
    run = store.create("t")
    run.write_test({"cluster": "sim"})
    client = serve()
    page = look(f"http://127.0.0.1:{client.port}/runs/{run.name}/live")
    until(page, "document.getElementById('time').textContent === '0.0 s'")
    run.write_results({"valid": "unknown", "reason": "<b>who knows</b>"})
    run.finish()
    page.wait_for_selector("#verdict.unknown")
    assert page.inner_text("#reason") == "<b>who knows</b>"


def test_a_live_page_gives_the_scale_of_its_rates_and_three_digits_of_a_latency(
    store: Store, serve: Callable[..., Client], look: Callable[..., Any]
) -> None:
    run = store.create("t")
    run.write_test({"cluster": "sim"})
    operation = {"process": 0, "f": "read", "value": None}
    with run.history_path.open("w") as history:
        for begin_ns in [*(each * 30_000_000 for each in range(30)), 1_500_000_000, 2_500_000_000]:
            for type_, time_ns in (("invoke", begin_ns), ("ok", begin_ns + 12_345_678)):
                history.write(json.dumps({**operation, "type": type_, "time": time_ns}) + "\n")
    page = look(f"http://127.0.0.1:{serve().port}/runs/{run.name}/live")
    until(page, "document.getElementById('highest').textContent === 'highest 30'")
    assert page.inner_text("#latency") == "12.3 ms, 12.3 ms"
    run.finish()


def test_pages_in_dark_mode_print_with_dark_ink(
    store: Store, serve: Callable[..., Client], look: Callable[..., Any], report_path: Path
) -> None:
    name = make_run(store).name
    home = f"http://127.0.0.1:{serve().port}"
    update_store_page(store)
    for address in (home, f"{home}/runs/{name}", f"file://{store.root}/index.html", f"file://{report_path}"):
        page = look(address, scheme="dark")
        page.emulate_media(media="print", color_scheme="dark")
        ink = page.evaluate("getComputedStyle(document.querySelector('h1')).color")
        assert max(map(int, re.findall(r"\d+", ink)[:3])) < 128, (address, ink)


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[[str], Any]]:
    """A function that opens an address whose server may stop: only errors of the page's script fail the test."""
    contexts, errors = [], []

    def open_page(address: str) -> Any:
        contexts.append(browser.new_context())
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def create_running_run(store: Store) -> RunDir:
    run = store.create("t")
    run.write_test({"cluster": "sim"})
    return run


def test_a_live_page_reports_a_lost_server_and_resumes_when_it_returns(
    store: Store, serve: Callable[..., Client], watch: Callable[[str], Any]
) -> None:
    run = create_running_run(store)
    client = serve()
    page = watch(f"http://127.0.0.1:{client.port}/runs/{run.name}/live")
    until(page, "document.getElementById('time').textContent === '0.0 s'")
    assert not page.is_visible("#lost") and page.inner_text("#verdict").lower() == "running"
    client.end()
    page.wait_for_selector("#lost:visible")
    until(page, "document.getElementById('lost').textContent.startsWith('The connection to the server is lost.')")
    assert page.inner_text("#verdict").lower() == "not connected"
    serve(port=client.port)
    page.wait_for_selector("#lost", state="hidden")
    assert page.inner_text("#verdict").lower() == "running"
    run.write_results({"valid": True, "reason": "so"})
    run.finish()
    page.wait_for_selector("#verdict.valid")


def test_a_live_page_beyond_the_stream_limit_says_so_and_retries(
    store: Store, serve: Callable[..., Client], watch: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_running_run(store)
    address = f"http://127.0.0.1:{serve().port}/runs/{run.name}/live"
    monkeypatch.setattr(app, "MAX_STREAMS", 0)
    page = watch(address)
    until(page, "document.getElementById('lost').textContent.startsWith('Too many live views are open')")
    monkeypatch.setattr(app, "MAX_STREAMS", 1)
    page.wait_for_selector("#lost", state="hidden")
    run.release()
    page.wait_for_selector("#verdict.unfinished")
    assert page.inner_text("#verdict").lower() == "unfinished"


def test_a_live_page_of_a_removed_run_says_so(
    store: Store, serve: Callable[..., Client], watch: Callable[[str], Any]
) -> None:
    run = create_running_run(store)
    client = serve()
    page = watch(f"http://127.0.0.1:{client.port}/runs/{run.name}/live")
    other = watch(f"http://127.0.0.1:{client.port}/runs/{run.name}/live")
    for each in (page, other):
        until(each, "document.getElementById('time').textContent === '0.0 s'")
    client.end()
    other.wait_for_selector("#lost:visible")
    page.close()
    run.release()
    store.remove(run)
    serve(port=client.port)
    until(other, "document.getElementById('lost').textContent.startsWith('The server does not have this run.')")


def test_a_live_page_reports_a_silent_server_and_resumes(
    store: Store, serve: Callable[..., Client], watch: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_running_run(store)
    page = watch(f"http://127.0.0.1:{serve().port}/runs/{run.name}/live")
    until(page, "document.getElementById('time').textContent === '0.0 s'")
    is_silent, read_on = threading.Event(), HistoryTail.read_on

    def wait(tail: HistoryTail) -> bool:
        while is_silent.is_set():
            time.sleep(0.05)
        return read_on(tail)

    monkeypatch.setattr(HistoryTail, "read_on", wait)
    is_silent.set()
    try:
        page.wait_for_selector("#lost:visible")
        assert page.inner_text("#verdict").lower() == "not connected"
    finally:
        is_silent.clear()
    page.wait_for_selector("#lost", state="hidden")
    assert page.inner_text("#verdict").lower() == "running"


def test_the_page_of_started_runs_survives_a_restart_of_the_server(
    store: Store, serve: Callable[..., Client], watch: Callable[[str], Any]
) -> None:
    launcher = Launcher(store.root)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        launcher.launches.append(Launch(["run"], process))
        client = serve(launcher)
        page = watch(f"http://127.0.0.1:{client.port}/started")
        page.wait_for_selector(".pill.running")
        client.end()
        page.wait_for_selector("#lost:visible")
        serve(Launcher(store.root), port=client.port)
        page.wait_for_selector("text=No runs have been started here yet")
        process.kill()


@pytest.fixture
def replay_path(run: Any, tmp_path: Path) -> Path:
    path = tmp_path / "replay.html"
    path.write_text(replay_page(collect_replay(run)))
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_a_replay_opens_at_the_violation(replay_path: Path, look: Callable[..., Any], width: int) -> None:
    page = look(f"file://{replay_path}", width)
    until(page, "document.getElementById('clock').textContent !== ''")
    assert page.inner_text("#clock") == "0.042000 s"
    assert "91 was stale" in page.inner_text("#content")
    assert "in force: f1 partition leader" in page.inner_text("#content")
    assert overflow_px(page) <= 0


BEYOND_THE_EDGE = """() => [...document.querySelectorAll("main *")].filter(each => {
    for (let around = each; around; around = around.parentElement)
        if (around !== each && /auto|scroll|hidden/.test(getComputedStyle(around).overflowX)) return false;
    const box = each.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map(each => each.outerHTML.slice(0, 200))"""
"""Elements beyond the page's width that no element around them scrolls or clips on purpose, as a zoomed chart does."""


@pytest.fixture
def report_path(tmp_path: Path) -> Path:
    """A minute of reads and writes, six partitions, a leader before and after the first, a contradiction, errors."""
    run = Store(tmp_path / "reports").create("t")
    faults = reports.make_faults(60)
    reports.write_run(run.history_path, faults=faults)
    results = reports.make_results(faults, valid=False, reason="linearizable: key 5 is not linearizable")
    terms = [{"term": 1, "leader": "n2", "start_ns": -(10**7)}, {"term": 2, "leader": "n3", "start_ns": 6 * 10**9}]
    results["checks"]["leaders"] = {"valid": True, "terms": terms}
    results["checks"]["linearizable"] = {"valid": False, "reason": "stale", "witness": reports.make_witness()}
    return write_report(run.path, reports.TEST, results, run.history_path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_fits_the_window_and_no_label_is_cut(
    report_path: Path, look: Callable[..., Any], width: int, scheme: str
) -> None:
    page = look(f"file://{report_path}", width, scheme)
    assert overflow_px(page) <= 0
    assert page.evaluate(BEYOND_THE_EDGE) == []
    names = page.locator(".track .name, .leaders .term")
    cut = """each => each.style.display !== 'none'
        && each.getComputedTextLength() > each.dataset.room * each.closest('.chart').clientWidth"""
    assert names.count() >= 8 and not any(names.evaluate_all(f"all => all.map({cut})"))


BROKEN_WORDS = """() => {
  const broken = [], range = document.createRange();
  for (const cell of document.querySelectorAll('thead th')) {
    if (!cell.getClientRects().length || !cell.firstChild) continue;
    for (const word of cell.firstChild.textContent.matchAll(/\\S+/g)) {
      range.setStart(cell.firstChild, word.index);
      range.setEnd(cell.firstChild, word.index + word[0].length);
      if (range.getClientRects().length > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""
"""Words of table headers that are broken over several lines."""


@pytest.fixture
def fleet_path(tmp_path: Path) -> Path:
    """Three configurations with all tables of a report over many runs."""
    rates = [fleet.rate(f"read_index, a setting with a long value {number}", 9, number) for number in range(3)]
    groups = [{name: row[name] for name in GROUP} for row in rates]
    quantiles = {f"p{name}_ns": 10**6 * int(name) for name in (50, 90, 99, 999)} | {"max_ns": 2 * 10**9}
    numbers = {"n": 9, "missing": 1, "mean": 1.0, "p50": 10**9, "p90": 2 * 10**9, "max": 3 * 10**9}
    measures = ("unavailable_ns", "recovery_after_start_ns", "recovery_after_heal_ns", "lost", "duplicated")
    tables: dict[str, list[dict[str, Any]]] = {
        "rates": rates,
        "outcomes": [
            {**one, "in_fault": within, "ok": 90, "fail": 3, "info": 7} for one in groups for within in (False, True)
        ],
        "availability": [{**one, **numbers, "measure": measure} for one in groups for measure in measures],
        "latency": [
            {**one, **quantiles, "outcome": "ok", "node": node, "phase": phase, "f": "write", "operations": 1234567,
             "relative_error": 0.0}
            for one in groups for node, phase in (("all", "before"), ("all", "during"), ("n1", "all"))
        ],
        "notable_runs": [
            {**one, "run_id": str(place), "run_dir": f"/store/test/{place}", "test_name": "broker-register-partition",
             "verdict": "invalid", "seed": 10**9, "reason": "linearizable: key 5 is not linearizable " * 9}
            for place, one in enumerate(groups)
        ],
    }  # fmt: skip
    data = FleetData(
        place="/store", runs=30, operations=3000, first_started_at=None, last_started_at=None,
        unavailable_after_ms=1000, took_s=1.0, tables=tables,
    )  # fmt: skip
    path = tmp_path / "fleet.html"
    path.write_text(render_fleet(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [*WIDTHS, 700])
def test_a_fleet_report_fits_the_window_and_breaks_no_header_word(
    fleet_path: Path, look: Callable[..., Any], width: int
) -> None:
    page = look(f"file://{fleet_path}", width)
    assert overflow_px(page) <= 0
    assert page.evaluate(BEYOND_THE_EDGE) == []
    for details in page.locator("details").all():
        details.locator("summary").click()
    assert page.locator("thead th:visible").count() >= 8
    assert page.evaluate(BROKEN_WORDS) == []


def test_hovering_over_a_chart_shows_what_happened_at_that_time(report_path: Path, look: Callable[..., Any]) -> None:
    page = look(f"file://{report_path}")
    assert not page.locator(".readout").is_visible()
    chart = page.locator(".panel.latency .drawing").first
    chart.hover(position={"x": chart.bounding_box()["width"] * 0.16, "y": 50})
    said = page.inner_text(".readout")
    for words in ("fault 1: partition halves", "leader n3, term 2", "ok/s, median"):
        assert words in said
    assert page.locator(".cursor:visible").count() == page.locator(".panels .drawing").count()
    page.mouse.move(1, 1)
    assert not page.locator(".readout").is_visible()


@pytest.mark.parametrize("width", WIDTHS)
def test_dragging_over_a_chart_zooms_into_that_range(report_path: Path, look: Callable[..., Any], width: int) -> None:
    page = look(f"file://{report_path}", width)
    chart = page.locator(".panel.latency .drawing").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=3)
    page.mouse.up()
    assert page.inner_text(".range").startswith("15.") and " to 30." in page.inner_text(".range")
    drawn = chart.locator("svg").first.bounding_box()
    assert drawn["width"] == pytest.approx(4 * box["width"], rel=0.05), "a quarter of the run fills the chart"
    ticks = page.locator(".axis .tick:visible").all_text_contents()
    assert "20 s" in ticks and not {"0", "10 s", "40 s"} & set(ticks)
    assert overflow_px(page) <= 0
    for _ in range(12):
        page.keyboard.press("+")
    page.focus(".panels")
    for _ in range(12):
        page.keyboard.press("+")
    begin, end = (float(word.removesuffix(" s")) for word in page.inner_text(".range").split(" to "))
    assert 0 < end - begin < 3, "the zoom is limited"
    page.keyboard.press("ArrowRight")
    assert page.locator(".readout").is_visible()
    page.keyboard.press("Escape")
    assert page.inner_text(".range") == ""
    assert chart.locator("svg").first.bounding_box()["width"] == pytest.approx(box["width"], abs=1)


def test_the_charts_are_visible_without_javascript(report_path: Path, browser: Any) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(f"file://{report_path}")
    assert page.locator(".panel.latency .dots").count() > 0
    assert page.locator(".axis .tick:visible").count() > 3
    assert not page.locator(".zoom").is_visible()
    page.context.close()


def click_at(page: Any, canvas: str, x: float, y: float) -> None:
    """Click at a place of a canvas, and wait until the page has drawn what that changes."""
    page.locator(canvas).click(position={"x": x, "y": y})
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("width", WIDTHS)
def test_clicking_a_host_or_message_in_a_replay_shows_its_details(
    replay_path: Path, look: Callable[..., Any], width: int
) -> None:
    page = look(f"file://{replay_path}", width)
    page.select_option("#jump", label="0.010 s n1 leads term 1")
    while "n1 sends n2 append" not in page.inner_text("#content"):
        page.keyboard.press("ArrowRight")
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = page.locator("#ring").bounding_box()
    top = 62 + 4  # where the ring's first replica stands; the second is right below it
    click_at(page, "#ring", box["width"] / 2, top)
    assert page.inner_text("#what") == "n1"
    assert "leader in term 1" in page.inner_text("#content")
    assert "log up to 480, committed up to 478" in page.inner_text("#content")
    click_at(page, "#ring", box["width"] / 2 - 5, top + 36)  # at the edge of its sender, which it has just left
    assert page.inner_text("#what") == "Message"
    for text in ("n1 → n2", "append 480", "sent at 0.020000 s", "arrives after 1000 µs"):
        assert text in page.inner_text("#content")
    page.click("#forget")
    until(page, "document.getElementById('what').textContent === 'Now'")


def test_clicking_an_operation_in_a_replay_shows_its_details(replay_path: Path, look: Callable[..., Any]) -> None:
    page = look(f"file://{replay_path}")
    until_clock(page, "0.042000")
    box = page.locator("#near").bounding_box()
    # 0.1 ms of time is a pixel: the read of the contradiction ends in the middle, and began 120 pixels before it.
    click_at(page, "#near", box["width"] / 2 - 60, box["height"] / 28)
    assert page.inner_text("#what") == "Operation"
    for text in ("process 3", "key 7: read → 91 on n1", "from 0.030000 s", "ok after 12000 µs"):
        assert text in page.inner_text("#content")
    click_at(page, "#near", box["width"] / 2 - 60, box["height"] * 3 / 28)
    assert "never completed" in page.inner_text("#content")


def test_a_replay_can_jump_to_its_violation(replay_path: Path, look: Callable[..., Any]) -> None:
    page = look(f"file://{replay_path}")
    page.select_option("#jump", label="0.005 s f1 partition leader")
    until_clock(page, "0.005000")
    page.select_option("#jump", label="0.042 s linearizable: 91 was stale")
    until_clock(page, "0.042000")
    assert "91 was stale" in page.inner_text("#content .violation")


def test_a_partial_replay_begins_and_ends_with_its_range(run: Any, tmp_path: Path, look: Callable[..., Any]) -> None:
    path = tmp_path / "part.html"
    path.write_text(replay_page(collect_replay(run, from_ns=45_000_000, to_ns=55_000_000)))
    page = look(f"file://{path}")
    until_clock(page, "0.045000")
    assert "in force: f1 partition leader" in page.inner_text("#content")
    jumps = page.locator("#jump option").all_inner_texts()
    assert jumps == ["…"], (
        "the election, the fault's beginning and the violation are before the range, the fault's end after it"
    )
    for moment in ("0.050000", "0.051000", "0.051000"):
        page.keyboard.press("ArrowRight")
        until_clock(page, moment)
    page.evaluate("scrub.value = 1e6; scrub.dispatchEvent(new Event('input'))")
    until_clock(page, "0.055000")


def test_a_replay_lasts_until_the_last_operation_has_ended(run: Any, tmp_path: Path, look: Callable[..., Any]) -> None:
    with run.history_path.open("a") as history:
        history.write('{"time": 2000000000, "process": 4, "type": "info", "f": "write", "key": 7, "value": 92}\n')
    path = tmp_path / "long.html"
    path.write_text(replay_page(collect_replay(run)))
    page = look(f"file://{path}")
    page.fill("#find", "process 4 completes info")
    page.click("#search")
    until_clock(page, "2.000000")


def test_a_replay_can_be_stepped_searched_and_played(replay_path: Path, look: Callable[..., Any]) -> None:
    page = look(f"file://{replay_path}")

    def wait_for(clock: str, text: str) -> None:
        until_clock(page, clock)
        assert text in page.inner_text("#content")

    wait_for("0.042000", "stale")
    page.keyboard.press("ArrowRight")
    wait_for("0.050000", "clients sends n1 pull")
    page.keyboard.press("ArrowRight")
    wait_for("0.051000", "n1 receives from clients pull")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    wait_for("0.042000", "violation")
    page.evaluate("scrub.value = 0; scrub.dispatchEvent(new Event('input'))")
    wait_for("0.005000", "in force")
    page.fill("#find", "n2 append")
    page.fill("#after", "n1 becomes leader")
    page.click("#search")
    wait_for("0.020000", "n1 sends n2 append 480")
    page.select_option("#jump", label="0.010 s n1 leads term 1")
    wait_for("0.010000", "in force")
    page.select_option("#speed", "5")
    page.click("#play")
    until(page, "document.getElementById('play').textContent === 'Play'")
    until(page, "parseFloat(document.getElementById('clock').textContent) > 0.05")
