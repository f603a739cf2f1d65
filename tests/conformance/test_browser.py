"""The page in a real browser: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from gradparity.conformance.report.page import write_page
from gradparity.conformance.report.records import Location, Report
from gradparity.conformance.report.table import render
from gradparity.conformance.status import Verdict
from gradparity.tests.conformance.test_report import HOSTILE

if TYPE_CHECKING:  # each worker collects this module, and one or two drive a browser
    from playwright.sync_api import Browser, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no browser on PATH: none of {', '.join(NAMES)}"
)
PHONE, DESKTOP = 390, 1280
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    # Its shared memory is files there, and a browser that is killed leaves them behind.
    # pytest's own folder is too deep for the sockets that it makes beside them.
    with TemporaryDirectory(prefix="browser-") as folder, sync_playwright() as driver:
        env: dict[str, str | float | bool] = {**os.environ, "TMPDIR": folder}
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env=env)
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """An open page, with its requests and its console messages."""

    page: Page
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)


@dataclass
class Visitor:
    """Opens pages in the browser, and records what each page requests and prints."""

    browser: Browser
    visits: list[Visit] = field(default_factory=list)

    def __call__(
        self,
        file: Path,
        fragment: str = "",
        *,
        width: int = DESKTOP,
        dark: bool = False,
        script: bool = False,
    ) -> Page:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,  # the page has none: nothing may need it
        )
        visit = Visit(context.new_page())
        self.visits.append(visit)
        visit.page.on("request", lambda request: self._request(visit, request))
        visit.page.on("console", lambda said: visit.console.append(said.text))
        visit.page.on("pageerror", lambda error: visit.console.append(str(error)))
        visit.page.goto(file.as_uri() + fragment)
        return visit.page

    def _request(self, visit: Visit, request: Request) -> None:
        if not request.url.startswith("data:"):
            visit.requests.append(request.url)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visitor]:
    """Open pages; at the end check that none has loaded other files or had errors."""
    visitor = Visitor(browser)
    yield visitor
    for each in visitor.visits:
        asked = {url.partition("#")[0] for url in each.requests}
        assert asked == {each.page.url.partition("#")[0]}
        assert each.console == []
        each.page.context.close()


@pytest.fixture
def failing(real_report: Path) -> Path:
    """Page of a run in which torch's scaler fails under tp, and ours does not."""
    return real_report.with_name("index.html")


@pytest.fixture
def passing(real: Report, tmp_path: Path) -> Path:
    cases = tuple(c for c in real.cases if c.status == "pass")
    assert cases
    return write_page(replace(real, cases=cases), tmp_path)


@pytest.fixture
def hostile(real: Report, tmp_path: Path) -> Path:
    """Return the page of a report in which every name is an attack."""
    (good, bad) = (next(c for c in real.cases if c.status == s) for s in STATUSES)
    verdict = Verdict(
        law=HOSTILE, status="fail", message=HOSTILE, step=0, parameter=HOSTILE
    )
    assert good.curves is not None
    case = replace(
        bad,
        scaler=HOSTILE,
        topology=HOSTILE,
        scenario=HOSTILE,
        precision=HOSTILE,
        model=HOSTILE,
        problem=HOSTILE,
        replay=HOSTILE,
        verdicts=(verdict, *bad.verdicts),
        curves=replace(good.curves, parameters={HOSTILE: 2.0}),
    )
    header = replace(
        real.header,
        command=HOSTILE,
        commit=HOSTILE,
        data={HOSTILE: HOSTILE},
        environment={HOSTILE: HOSTILE},
    )
    return write_page(Report(header=header, cases=(good, case), footer=None), tmp_path)


STATUSES = ("pass", "fail")
PAGES = (
    "failing",
    "hostile",
    pytest.param("passing", marks=pytest.mark.slow),  # a part of the failing one
)


@pytest.fixture(params=PAGES)
def any_page(request: pytest.FixtureRequest) -> Path:
    path = request.getfixturevalue(request.param)
    assert isinstance(path, Path)
    return path


def test_a_failing_run_tells_its_story(failing: Path, visit: Visitor) -> None:
    page = visit(failing)
    assert page.title() == "fail: digits · gradparity report"
    assert page.locator("h1").inner_text() == "gradparity report: digits"
    assert "gradparity" in page.locator("header pre").inner_text()
    tallies = page.locator(".tallies li").all_inner_texts()
    assert tallies[0].startswith("gradparity.scaler:GradScaler passes all 2 runs")
    assert tallies[0].endswith("2 pass")
    assert tallies[1].startswith("torch.amp:GradScaler fails on tp: 1 of 2 runs.")
    assert tallies[1].endswith("1 fail, 1 pass")
    headings = page.locator("main h2").all_inner_texts()
    assert headings[:2] == ["Results by topology", "Topology, precision and check"]
    story = page.locator(".story[data-verdict=fail]")
    assert story.count() == 1
    told = story.inner_text()
    for words in (
        "tp/2/fp32/sgd/none",
        "liveness.completes",
        "Every call of a legal training step returns",  # the sentence of the law
        "step 0",
        "ranks 0, 1",
        "gradparity replay tp/2/fp32/sgd/none/steps=4 --scaler torch.amp",
    ):
        assert words in told, words
    assert story.locator("svg").count() == 0  # a call that raised has no curve


@pytest.fixture
def disagreeing(real: Report, tmp_path: Path) -> Path:
    """Page with a case that fails checks of scale and parity, and one that passes."""
    good, bad = (next(c for c in real.cases if c.status == s) for s in STATUSES)
    laws = ("agreement.scale", "parity.gradient")
    broken = tuple(Verdict(law=law, status="fail", message=law) for law in laws)
    case = replace(bad, curves=good.curves, verdicts=broken, problem="")
    return write_page(replace(real, cases=(good, case)), tmp_path)


def test_plots_show_what_is_broken(disagreeing: Path, visit: Visitor) -> None:
    page = visit(disagreeing)
    story = page.locator(".story[data-verdict=fail]")
    titles = story.locator("svg > title").all_text_contents()
    assert [title.removesuffix(", torch.amp:GradScaler") for title in titles] == [
        "log2 of the scale",
        "decisions by rank and step",
        "error / bound (line: 1, in decades)",
        "log10 of |loss - fp64|",
    ]
    boxes = [line.bounding_box() for line in story.locator("svg .line").all()]
    assert max(box["width"] for box in boxes if box) > 200  # curves are drawn
    assert page.locator(".story[data-verdict=pass] svg").count() == 0
    assert page.locator(".story").first.get_attribute("data-verdict") == "fail"


def test_a_passing_run_is_short(passing: Path, visit: Visitor) -> None:
    page = visit(passing)
    assert page.title() == "pass: digits · gradparity report"
    assert page.locator("details[open]").count() == 0
    assert page.locator("main .fail").count() == 0


def test_where_it_begins_comes_first(
    real: Report, tmp_path: Path, visit: Visitor
) -> None:
    """Each place has a link to its run; equal places are listed once."""
    text = "forward of up differs on rank 1"
    (bad,) = (c for c in real.cases if c.status == "fail")
    where = Location(where="forward", module="up", text=text)
    apart = (Verdict(law="parity.gradient", status="fail", message="differs"),)
    cases = [
        replace(bad, verdicts=apart, location=where, scenario=name)
        for name in (bad.scenario, "x")
    ]
    page = visit(write_page(replace(real, cases=tuple(cases)), tmp_path))
    assert page.locator("main h2").first.inner_text() == "Where it begins"
    (place,) = page.locator(".begins li").all()
    assert text in place.inner_text() and "(and in 1 more run)" in place.inner_text()
    place.locator("a").click()
    assert page.locator(".story:has(:target) .where").first.is_visible()


def test_a_wide_layout_keeps_its_line(
    real: Report, tmp_path: Path, visit: Visitor
) -> None:
    wide = "dp_replicate2-dp_shard2-cp2-tp2"
    cases = tuple(replace(c, topology=wide) for c in real.cases)
    page = visit(write_page(replace(real, cases=cases), tmp_path), script=True)
    for place in (".matrix tbody th", ".marks tbody th >> nth=0"):
        box = page.locator(place).first.bounding_box()
        line = page.evaluate("parseFloat(getComputedStyle(document.body).lineHeight)")
        assert box is not None
        heights = page.locator(place).first.evaluate(LINES)
        assert heights == 1, place
        assert box["height"] >= line


LINES = """e => { const r = document.createRange(); r.selectNodeContents(e);
    return new Set([...r.getClientRects()].map(b => Math.round(b.top))).size }"""


def test_the_table_can_be_copied(failing: Path, real: Report, visit: Visitor) -> None:
    page = visit(failing)
    page.locator("summary", has_text="in Markdown").click()
    assert page.locator(".paste").inner_text().strip() == render(real).strip()


def test_a_script_keeps_its_lines(real: Report, tmp_path: Path, visit: Visitor) -> None:
    script = "import torch\n\nif torch:\n    print('<b>')\n"
    bad = next(c for c in real.cases if c.status == "fail")
    changed = replace(real, cases=(replace(bad, script=script),))
    page = visit(write_page(changed, tmp_path))
    page.locator("summary", has_text="torch alone").click()
    shown = page.get_by_label("script for a bug report").inner_text()
    assert shown.strip() == script.strip()


def test_every_link_leads_somewhere(any_page: Path, visit: Visitor) -> None:
    page = visit(any_page)
    links = page.locator("a").all()
    assert len(links) > 20
    for link in links:
        target = link.get_attribute("href") or ""
        assert target.startswith("#"), target
        assert page.locator(f'[id="{target[1:]}"]').count() == 1, target
    found = [each.get_attribute("id") for each in page.locator("[id]").all()]
    assert len(set(found)) == len(found)


def test_a_mark_opens_the_run_that_shows_it(failing: Path, visit: Visitor) -> None:
    page = visit(failing)
    closed = page.locator(".story[data-verdict=pass]")
    assert closed.locator("p").first.is_hidden()
    page.locator(".marks a.pass").first.click()
    assert closed.locator("p").first.is_visible()


def test_filters_are_links_that_hide_other_runs(failing: Path, visit: Visitor) -> None:
    page = visit(failing)
    assert page.locator(".story:visible").count() == 2
    page.locator(".filters a", has_text="fail").click()
    assert page.locator(".story:visible").count() == 1
    assert page.locator(".story:visible").get_attribute("data-verdict") == "fail"
    assert page.locator("section:visible h3").all_inner_texts() == ["tp"]
    page.get_by_text("Show all runs").locator("visible=true").click()
    assert page.locator(".story:visible").count() == 2
    page.locator(".filters a", has_text="single").click()
    assert page.locator("section:visible h3").all_inner_texts() == ["single"]


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_nothing_is_wider_than_the_screen(
    any_page: Path, width: int, visit: Visitor
) -> None:
    page = visit(any_page, width=width, script=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").is_visible()
    small = page.evaluate(
        "[...document.querySelectorAll('svg')].map(s => s.getScreenCTM().a)"
    )
    assert all(scale > 0.8 for scale in small)  # letters of plots stay readable


def luminance(page: Page, what: str) -> float:
    colour = page.evaluate(f"getComputedStyle(document.body).{what}")
    red, green, blue = (int(x) for x in colour[4:-1].split(", "))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_light_dark_and_print(failing: Path, visit: Visitor) -> None:
    light, dark = (visit(failing, dark=each, script=True) for each in (False, True))
    assert luminance(light, "backgroundColor") > 200 > 60 > luminance(light, "color")
    assert luminance(dark, "backgroundColor") < 60 < 200 < luminance(dark, "color")
    dark.emulate_media(media="print", color_scheme="dark")  # ink on white paper
    assert luminance(dark, "backgroundColor") > 200 > luminance(dark, "color")
    assert dark.locator("nav:visible").count() == 0


def test_a_printed_page_shows_failures_that_are_closed(
    failing: Path, visit: Visitor
) -> None:
    page = visit(failing, script=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
    story = page.locator(".story[data-verdict=fail] .verdicts")
    assert not story.evaluate("e => e.checkVisibility()")
    page.emulate_media(media="print")
    assert story.evaluate("e => e.checkVisibility()")
    assert page.pdf().startswith(b"%PDF")


def test_the_keyboard_reaches_all_in_order(failing: Path, visit: Visitor) -> None:
    page = visit(failing, script=True)
    wanted = "a[href], summary, [tabindex='0']"
    visible = [e for e in page.locator(wanted).all() if e.is_visible()]
    expected = [each.evaluate(WHO) for each in visible]
    reached = []
    for _ in expected:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(f"({WHO})(document.activeElement)"))
    assert reached == expected
    assert len(expected) > 20
    page.locator(".story[data-verdict=pass] summary").focus()
    page.keyboard.press("Enter")
    assert page.locator(".story[data-verdict=pass][open]").count() == 1
    style = "e => getComputedStyle(e).outlineStyle"
    assert page.locator(".story[data-verdict=pass] summary").evaluate(style) == "solid"


WHO = "e => e.tagName + '|' + e.textContent + '|' + e.getAttribute('href')"


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (DESKTOP, False),
        # each takes a second and more of CPU for each page
        pytest.param(DESKTOP, True, marks=pytest.mark.slow),
        pytest.param(PHONE, False, marks=pytest.mark.slow),
        pytest.param(PHONE, True, marks=pytest.mark.slow),
    ],
)
def test_axe_finds_no_barrier(
    any_page: Path, width: int, dark: bool, visit: Visitor
) -> None:
    page = visit(any_page, width=width, dark=dark, script=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]  # ships no types

    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_hostile_names_are_text(hostile: Path, visit: Visitor) -> None:
    page = visit(hostile, script=True)
    assert page.locator("script, img, iframe, object, embed").count() == 0
    assert page.locator("th", has_text="<script>alert(1)</script>").count() > 0
    assert "\x1b" not in page.content()
