"""The page of a run in a browser: filters, drill-down, keyboard, its address, and that it asks for nothing."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.matrix.caseid import case_id
from harness.plugins.release.commands import gate_front
from harness.plugins.release.gate import GatePolicy, gate
from harness.report.html.page import html_report
from harness.report.sections import Section, Table
from harness.result import CaseResult, CastRange, Curve, Errors, Measured, Sent, Timeline
from harness.text import printable
from harness.verdict import NotJudged, Verdict
from tests.builders import a_finding, make_case, make_failure, make_result, make_results, run_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

HOSTILE = "</script><img src=x onerror=document.title='owned'>\u2028&amp;"
CRASHED = "tp2-rowwise-v2048-f32"
WRONG = "fsdp2-tensorwise-v2048-f32"
IDS = (CRASHED, WRONG, "single-bf16-v2048-f32", "single-rowwise-v2048-f32", "tp2-tensorwise-v2048-f32")
VERDICTS = (Verdict.CRASH, Verdict.NUMERIC, Verdict.PASSED, Verdict.PASSED, Verdict.KNOWN)
LINEARS = [
    f"layers.{layer}.{name}"
    for layer in range(2)
    for name in ("attention.wq", "attention.wk", "attention.wv", "attention.wo", *(f"feed_forward.w{n}" for n in "123"))
]
STEPS = 5


def measured() -> Measured:
    """As much as is measured of a case of two layers and five steps."""
    curve = Curve(losses=tuple(8.0 - step / 7 for step in range(STEPS)), grad_norms=(1.0,) * STEPS)
    casts = tuple(
        CastRange(
            fqn=fqn,
            role=role,
            step=step,
            amax=1.2345 * step,
            scale_min=362.88,
            scale_max=362.9,
            saturated=0.0,
            flushed=0.00123 if fqn.endswith("wo") else 0.0,
        )
        for fqn in LINEARS
        for role in ("input", "weight", "grad_output")
        for step in range(1, STEPS + 1)
    )
    sent = {"all_gather in uint8 along dp_shard": Sent(calls=24, payload_bytes=123456)}
    return Measured(
        curves=dict.fromkeys(("case", "golden", "solo"), curve),
        allowed_loss=(0.01,) * STEPS,
        loss_distance=0.001,
        casts=casts,
        wire=sent,
        expected_wire=sent,
        saved_bytes=4096,
        expected_saved_bytes=2048,
        fused={"fused_all_gather_scaled_matmul in forward": 4},
        gradient_errors=Errors(
            steps=tuple(range(1, STEPS + 1)),
            rows={f"{fqn}.weight": tuple(10.0 ** -(20 - 3 * step) for step in range(STEPS)) for fqn in LINEARS},
            tolerance=(1e-11,) * STEPS,
        ),
        timeline=Timeline(
            rank=0,
            step=STEPS,
            kinds=("all_gather in uint8 along dp_shard", "all_reduce (sum) in float32 along tp"),
            calls=tuple((number % 2, 0.75 * number, 4096) for number in range(40)),
        ),
    )


def result(name: str, verdict: Verdict) -> CaseResult:
    good = verdict.good
    return make_result(
        name,
        verdict,
        findings=() if good else (a_finding(check="parity", message=HOSTILE, step=2, expected="1", found="2"),),
        run=run_of(make_failure(1, "boom", traceback=HOSTILE)) if verdict is Verdict.CRASH else None,
        checks=("finite", "parity"),
        not_judged=(NotJudged(check="traffic", reason=HOSTILE),),
        measured=None if verdict is Verdict.CRASH else measured(),
    )


def written(folder: Path, results: Sequence[CaseResult]) -> Path:
    """The page of these results, with one section and a history."""
    listing = Table(columns=("run", "verdict"), rows=(("before", "passed"), (HOSTILE, "numeric")), verdict=1)
    section = Section(name="other", title="Other", blocks=(HOSTILE, listing))
    path = folder / "report.html"
    run = make_results(*results, name="release")
    path.write_bytes(html_report(run, sections=(section,), history={WRONG: listing}))
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = [result(name, verdict) for name, verdict in zip(IDS, VERDICTS, strict=True)]
    return written(tmp_path_factory.mktemp("report"), [*results, result(HOSTILE, Verdict.INVARIANT)])


Opener = Callable[..., "Page"]


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 900})
    yield made
    made.close()


@pytest.fixture
def opened(context: BrowserContext, report: Path) -> Iterator[Opener]:
    """Opens the page at an address; at the end of the test nothing was asked for and nothing complained of."""
    asked: list[str] = []
    complaints: list[str] = []

    def at(address: str = "", path: Path = report, **media: Any) -> Page:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        if media:
            page.emulate_media(**media)
        page.goto(f"{path.as_uri()}{address}")
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield at
    assert asked and all(url.partition("#")[0].endswith("/report.html") for url in asked)
    assert complaints == []
    assert not any(page.title() == "owned" for page in context.pages)


def shown(page: Page) -> list[str]:
    return page.locator("#list tbody tr:not([hidden]) a").all_text_contents()


def address(page: Page) -> str:
    return str(page.evaluate("decodeURIComponent(location.hash)"))


def narrow_soon(page: Page) -> None:
    """Wait until the page is as narrow as a phone: curves take a moment. The page forbids eval: ask from outside."""
    until_s = time.monotonic() + 10
    while page.evaluate("document.documentElement.scrollWidth") > 360:
        assert time.monotonic() < until_s, "the page stays wider than a phone"
        page.wait_for_timeout(20)


def test_all_cases_are_listed_the_worst_first(opened: Opener) -> None:
    page = opened()
    hostile = printable(HOSTILE)
    assert shown(page) == [CRASHED, hostile, WRONG, IDS[4], *IDS[2:4]]
    assert page.locator("#count").inner_text() == "6 cases"
    assert page.locator("img").count() == 0


def test_filters_by_verdict_text_axis_and_check(opened: Opener) -> None:
    page = opened()
    page.locator("#verdicts button", has_text="passed").click()
    assert shown(page) == list(IDS[2:4])
    page.locator("#clear").click()
    page.fill("#text", "TENSORWISE tp2")
    assert shown(page) == [IDS[4]] and page.locator("#count").inner_text() == "1 of 6 cases"
    page.locator("#clear").click()
    page.select_option("#axis", "recipe")
    page.select_option("#value", "rowwise")
    assert shown(page) == [CRASHED, IDS[3]]
    page.locator("#where button").click()
    page.select_option("#check", "found:parity")
    assert len(shown(page)) == 3
    page.select_option("#check", "unjudged:traffic")
    assert len(shown(page)) == 6


def test_a_cell_of_the_heat_map_says_the_worst_verdict_and_selects_its_cases(opened: Opener) -> None:
    page = opened()
    cell = page.locator("#heat button[aria-label^='recipe rowwise, layout tp2']")
    assert cell.get_attribute("aria-label") == "recipe rowwise, layout tp2: 1 crash"
    assert cell.inner_text().split() == ["!", "1"]
    cell.click()
    assert shown(page) == [CRASHED]
    pressed = page.locator("#heat button[aria-pressed='true']")
    assert pressed.count() == 1
    pressed.click()
    assert len(shown(page)) == 6
    page.select_option("#rows", "tp")
    page.select_option("#columns", "recipe")
    cell = page.locator("#heat button[aria-label^='tp 1, recipe rowwise']")
    assert cell.get_attribute("aria-label") == "tp 1, recipe rowwise: 1 passed"


def test_it_opens_on_the_case_that_failed_worst_and_the_title_says_so(opened: Opener) -> None:
    page = opened()
    first = page.locator("#first")
    assert CRASHED in first.inner_text() and printable(HOSTILE) in first.locator("strong").inner_text()
    assert first.locator(".command code").inner_text() == f"fp8-harness bug shrink {CRASHED}"
    assert page.title() == "3 of 6 cases failed: fp8-harness release"
    first.get_by_role("link", name=CRASHED).click()
    assert page.title() == f"! crash: {CRASHED}" and page.locator("article h2 .id").inner_text() == CRASHED
    page.keyboard.press("Escape")
    assert page.title().startswith("3 of 6 cases failed")


def test_a_run_of_one_case_opens_on_it_and_a_good_run_on_its_list(opened: Opener, tmp_path: Path) -> None:
    page = opened("", written(tmp_path, [result(WRONG, Verdict.NUMERIC)]))
    assert page.locator("article h2 .id").inner_text() == WRONG and not page.locator("#cases").is_visible()
    page.keyboard.press("Escape")
    assert shown(page) == [WRONG]
    good = opened("", written(tmp_path, [result(name, Verdict.PASSED) for name in IDS[:2]]))
    assert not good.locator("#first").is_visible() and good.title().startswith("good: ")


def test_a_case_is_opened_and_left_again(opened: Opener) -> None:
    page = opened()
    page.get_by_role("link", name=WRONG).click()
    assert page.locator("article h2 .id").inner_text() == WRONG
    assert not page.locator("#cases").is_visible()
    assert page.locator(".uplot").count() == 3
    commands = [f"fp8-harness bug shrink {WRONG}", f"fp8-harness run {WRONG}"]
    assert page.locator("#case .command code").all_inner_texts() == commands
    assert "saved for backward" in page.locator("#case tr.differs").inner_text()
    assert page.get_by_role("heading", name="History").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#cases").is_visible()
    page.go_back()
    assert page.locator("article h2 .id").inner_text() == WRONG


def part(page: Page, title: str) -> Any:
    """The part of a case with this heading."""
    return page.locator("article section").filter(has=page.get_by_role("heading", name=title))


def test_errors_scales_and_collectives_are_drawn(opened: Opener) -> None:
    page = opened(f"#case={WRONG}")
    errors = part(page, "Error by module")
    assert f"{2 * len(LINEARS) // 2} values above the tolerance" in errors.locator("caption").inner_text()
    assert errors.locator("tbody th").all_inner_texts()[:2] == ["tolerance", "layers.0.attention.wk.weight"]
    assert errors.locator("tbody tr").nth(1).locator("td.over").count() == 1
    scales = part(page, "Scales of casts to float8")
    assert scales.locator("tbody tr").count() == 12 and scales.locator("tbody td.tint-0").count()
    scales.get_by_role("button", name="show all 42").click()
    assert scales.locator("tbody tr").count() == 42
    scales.locator("select").select_option("amax")
    assert "1.23" in scales.locator("tbody tr").first.inner_text() and scales.locator("tbody td.tint-5").count()
    lost = part(page, "Values that casts lose")
    assert lost.locator("tbody th").first.inner_text().endswith("wo") and lost.locator("tbody tr").count() == 6
    lanes = part(page, "Collectives in time").locator(".lane svg")
    labels = ["20 collectives along dp_shard", "20 collectives along tp"]
    assert [lanes.nth(number).get_attribute("aria-label") for number in range(lanes.count())] == labels
    assert lanes.first.locator("rect").count() == 20


def test_what_is_between_backticks_is_code(opened: Opener, tmp_path: Path) -> None:
    told = a_finding(check="parity", message="call `a < b` first", step=1)
    section = Section(name="other", title="Other", blocks=("see `fp8-harness show`.", HOSTILE))
    path = tmp_path / "report.html"
    path.write_bytes(
        html_report(make_results(make_result(WRONG, Verdict.NUMERIC, findings=(told,))), sections=(section,))
    )
    page = opened("", path)
    assert (
        page.locator("article strong code").first.inner_text() == "a < b"
        and "`" not in page.locator("article").inner_text()
    )
    page.get_by_role("link", name="Other").click()
    assert page.locator("#section-other code").inner_text() == "fp8-harness show" and page.locator("img").count() == 0


def test_a_hostile_case_is_text(opened: Opener) -> None:
    page = opened()
    page.locator("#list a").nth(1).click()
    assert "onerror" in page.locator("article h2 .id").inner_text()
    assert "<img src=x" in page.locator(".findings").inner_text()
    assert page.locator("img").count() == 0


def test_stacks_and_a_case_without_numbers(opened: Opener) -> None:
    page = opened(f"#case={CRASHED}")
    assert "boom" in page.locator(".stack summary").inner_text()
    assert page.locator(".stack pre").inner_text().startswith("</script>")
    assert page.locator(".uplot").count() == 0


def test_the_address_restores_everything(opened: Opener) -> None:
    page = opened()
    page.fill("#text", "v2048")
    page.locator("#verdicts button", has_text="numeric").click()
    page.locator("#verdicts button", has_text="crash").click()
    page.select_option("#rows", "tp")
    page.select_option("#axis", "recipe")
    page.select_option("#value", "tensorwise")
    page.locator("#list th button", has_text="case").click()
    again = opened(page.evaluate("location.hash"))
    assert shown(again) == shown(page) == [WRONG]
    assert again.locator("#text").input_value() == "v2048"
    assert again.locator("#rows").input_value() == "tp"
    assert again.locator("#verdicts button[aria-pressed='true']").count() == 2
    assert again.locator("th[aria-sort='ascending']").inner_text().strip().startswith("case")
    page.get_by_role("link", name=WRONG).click()
    assert opened(page.evaluate("location.hash")).locator("article h2 .id").inner_text() == WRONG


@pytest.mark.parametrize("text", ["#case=nowhere&rows=x&where=tp=9&check=&view=none", "#%", "#where==&verdicts=,,good"])
def test_an_address_that_means_nothing_shows_all_cases(opened: Opener, text: str) -> None:
    assert len(shown(opened(text))) == 6


def test_parts_of_the_report(opened: Opener) -> None:
    page = opened("#view=other")
    assert page.get_by_role("heading", name="Other").is_visible() and not page.locator("#cases").is_visible()
    assert "<img src=x" in page.locator("#section-other").inner_text()
    page.get_by_role("link", name="Run", exact=True).click()
    assert "release" in page.locator("#section-run .facts").inner_text()
    assert address(page) == "#view=run"


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a gate: one case fails now, and one is gone."""
    good = [result(name, Verdict.PASSED) for name in IDS[:3]]
    before, after = make_results(*good), make_results(result(WRONG, Verdict.NUMERIC), good[0])
    decision = gate(before, after, GatePolicy(now=datetime.datetime.now(datetime.UTC)), names=(HOSTILE, "v2"))
    path = tmp_path_factory.mktemp("gate") / "report.html"
    path.write_bytes(html_report(after, front=gate_front(decision, after)))
    return path


def test_a_gate_opens_with_its_answer_and_leads_to_the_cases(
    opened: Opener, context: BrowserContext, decided: Path
) -> None:
    page = opened("", decided)
    assert page.locator("h1 .state.bad").inner_text() == "NO-GO"
    assert page.locator("#section-gate").is_visible() and not page.locator("#cases").is_visible()
    groups = page.locator("#section-gate details[open] summary").all_inner_texts()
    assert [text.partition(" ")[0] for text in groups] == ["gates:", "gates:", "changes", "moved,", "moved,"]
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy").first.click()
    page.wait_for_selector("text=copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"fp8-harness run {WRONG}"
    page.get_by_role("link", name=WRONG).first.click()
    assert page.locator("article h2 .id").inner_text() == WRONG and address(page) == f"#case={WRONG}"
    page.go_back()
    page.wait_for_selector("#section-gate", state="visible")
    page.get_by_role("link", name="Cases", exact=True).click()
    page.wait_for_selector("#list", state="visible")
    assert shown(page) == [WRONG, CRASHED] and address(page) == "#view=cases"
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("link", name="Gate", exact=True).click()
    narrow_soon(page)


def test_keys_move_in_the_heat_map_and_the_list(opened: Opener) -> None:
    page = opened()
    page.locator("#heat button[tabindex='0']").focus()
    labels = []
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
        labels.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert labels[-2].startswith("recipe") and len(set(labels)) > 1
    assert page.locator("#heat button[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    assert len(shown(page)) == 1
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.locator("#clear").click()
    page.locator("#list tbody a").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("article h2 .id").inner_text() == WRONG
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == WRONG
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "text"


def test_the_command_is_copied(opened: Opener, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = opened(f"#case={WRONG}")
    page.get_by_role("button", name="copy").first.click()
    page.wait_for_selector("text=copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"fp8-harness bug shrink {WRONG}"


def test_dark_light_and_print_have_colors_of_their_own(opened: Opener) -> None:
    def background(**media: Any) -> str:
        return str(opened("", **media).evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = background(color_scheme="light"), background(color_scheme="dark")
    assert light == "rgb(255, 255, 255)" and dark != light
    page = opened(f"#case={CRASHED}", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light
    assert not page.locator("header nav").is_visible()
    after = "getComputedStyle(document.querySelector('article h3')).breakAfter"
    assert page.evaluate(after) == "avoid", "a heading stays with what follows it"


@pytest.mark.parametrize("address", ["", f"#case={WRONG}", "#view=run"])
def test_a_phone_does_not_scroll_sideways(opened: Opener, context: BrowserContext, address: str) -> None:
    page = opened(address)
    page.set_viewport_size({"width": 360, "height": 740})
    narrow_soon(page)


@pytest.mark.parametrize(("count", "most_mb"), [(155, 3.0), (1000, 19.0)])
def test_a_large_run_is_small_and_opens(
    opened: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, most_mb: float
) -> None:
    layouts: list[dict[str, Any]] = [{}, {"tp": 2}, {"dp_shard": 2}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}]
    recipes = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")
    ids = [
        case_id(make_case(recipe=recipe, seed=seed, **layout))
        for seed in range(50)
        for layout in layouts
        for recipe in recipes
    ]
    path = written(tmp_path, [result(name, Verdict.PASSED) for name in ids[:count]])
    size = path.stat().st_size / 1e6
    assert size < most_mb
    started = time.monotonic()
    page = opened("", path)
    wall_s = time.monotonic() - started
    assert page.locator("#count").inner_text() == f"{count} cases"
    started = time.monotonic()
    page.fill("#text", "seed7 ")
    filtered_s = time.monotonic() - started
    assert len(shown(page)) == min(20, max(0, count - 140))
    with capsys.disabled():  # told in every run, and asserted in none: other jobs use the machine too
        print(f"\n{count:,} cases: {size:.1f} MB, open in {wall_s:.2f} s, filtered in {filtered_s:.2f} s")  # noqa: T201
