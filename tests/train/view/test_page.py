"""`bench view` in a real browser: real rollouts looked at as a person does, and text that means harm stays text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from sandbox.embedded_engine import EmbeddedEngine
from tests.train.build import conversation, end_job, finish_rollout, make_job, make_rollout
from tests.train.view.browser import Watched, a_browser, served
from tests.train.view.view_job import NASTY, demo_job, long_journal, nasty_job, sea_job

#: Of axe-core's findings these are failures.
SERIOUS = {"serious", "critical"}
expect.set_options(timeout=30_000)  # a machine that does other things too


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def real(engine: EmbeddedEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's rollouts and a conversation that breaks: a real model, the real proxy, the real runner."""
    root = tmp_path_factory.mktemp("real")
    sea_job(root / "sea", engine, rollouts=1, tokens=32)
    demo_job(root / "jobs", engine, trials=2, steps=1)
    return root


@pytest.fixture(scope="module")
def address(real: Path) -> Iterator[str]:
    with served(real) as found:
        yield found


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    made.context.close()
    assert made.trouble == []


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page


@contextmanager
def served_to(page: Page, path: Path) -> Iterator[str]:
    """A server of its own, that the page is done with before it ends."""
    with served(path) as address:
        yield address
        page.goto("about:blank")


def at(address: str, **words: Any) -> str:
    return f"{address}#{urlencode(words)}" if words else address


def open_rollout(page: Page, address: str, name: str, **words: Any) -> None:
    """By its link in the table; then to the view that `words` name."""
    page.goto(address)
    link = page.locator(f'a.name[title*="{name}"]')
    link.wait_for()
    path = link.get_attribute("title")
    page.goto(at(address, path=path, **words))


def test_a_job_is_filtered_sorted_and_a_rollout_opened(page: Page, address: str) -> None:
    page.goto(address)
    rows = page.locator("tbody tr:not(.group):not(.spacer)")
    expect(rows).to_have_count(3)
    expect(page.get_by_text("2 rollouts").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("task:sea")
    expect(rows).to_have_count(1)
    page.get_by_role("searchbox").fill("tokens>1000000")
    expect(page.get_by_text("No rollout is as the filter wants it.")).to_be_visible()
    page.get_by_role("searchbox").fill("nosuch>3")
    expect(page.get_by_text("There is no column nosuch")).to_be_visible()
    page.get_by_role("searchbox").fill("")
    page.get_by_role("checkbox", name="groups").uncheck()
    page.get_by_role("button", name="Tokens").click()
    expect(page.locator("th.c-tokens")).to_have_attribute("aria-sort", "ascending")
    expect(rows.get_by_text("reading…")).to_have_count(0)
    counts = [int(text) for text in rows.locator("td.c-tokens").all_inner_texts()]
    assert counts == sorted(counts) and counts[0] > 0
    name = rows.first.get_by_role("link").inner_text()
    rows.first.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.get_by_role("link", name="call 0")).to_be_visible()


def test_a_call_shows_messages_tools_sampling_and_times(page: Page, address: str) -> None:
    open_rollout(page, address, "sea__00000000", view="rollout", call=2)
    detail = page.get_by_role("region", name="Call 2")
    expect(detail.get_by_text("And why are rivers not salty?")).to_be_visible()
    for fact in ("finish reason", "latency", "first token", "policy version"):
        expect(detail.get_by_text(fact, exact=True)).to_be_visible()
    expect(detail.get_by_text("step-7")).to_be_visible()
    expect(detail.get_by_text("1 tool: write")).to_be_visible()
    detail.get_by_role("button", name="as in call").click()
    expect(detail.get_by_text("Why is the sea salty? Answer in three sentences.")).to_be_visible()


def test_tokens_are_hovered_focused_and_colored(page: Page, address: str, real: Path) -> None:
    open_rollout(page, address, "sea__00000000", view="tokens")
    result = json.loads(next((real / "sea").rglob("llm_trajectory.jsonl")).read_text().splitlines()[0])
    choice = result["metadata"]["token_capture"]["completions"][0]
    prompt = len(result["metadata"]["token_capture"]["prompt_token_ids"])
    token = page.locator(f'[data-at="{prompt + 3}"]')
    token.hover()
    card = page.locator(".card")
    expect(card.locator("dd").first).to_have_text(str(choice["token_ids"][3]))
    assert f"{abs(choice['logprobs'][3]):.3f}" in card.inner_text() or abs(choice["logprobs"][3]) < 0.01
    expect(card.get_by_text("alternatives captured")).to_be_visible()
    page.mouse.move(2, 2)
    expect(card).to_have_count(0)
    pane = page.get_by_role("listbox")
    pane.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(card.locator("dd").first).to_have_text(str(choice["token_ids"][2]))
    page.wait_for_url(re.compile(rf"at={prompt + 2}\b"))
    expect(page.locator(".active")).to_have_attribute("aria-selected", "true")
    sandbox = page.locator(".strip-box")
    for key, color in (("2", "entropy"), ("3", "mask"), ("4", "call"), ("1", "logprob")):
        page.keyboard.press(key)
        expect(sandbox).to_have_attribute("data-color", color)
    page.keyboard.press("l")
    least = min(range(len(choice["logprobs"])), key=lambda place: choice["logprobs"][place])
    expect(page.locator(".active")).to_have_attribute("data-at", str(prompt + least))
    page.keyboard.press("p")
    expect(page.locator('[data-at="0"]')).to_have_count(1)
    page.wait_for_url(re.compile(rf"at={prompt + least}\b"))
    page.reload()
    expect(page.locator(".active")).to_have_attribute("data-at", str(prompt + least))


#: Whether the band beside the strip is painted in the colors that its variables have now, and in no other.
PAINTED = """() => {
  const band = document.querySelector(".map"), canvas = band.firstElementChild;
  const copy = new OffscreenCanvas(1, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const column = copy.getImageData(0, 0, 1, canvas.height).data;
  const found = new Set();
  for (let at = 0; at < column.length; at += 4) if (column[at + 3]) found.add(column.slice(at, at + 3).join(", "));
  const probe = band.appendChild(document.createElement("i"));
  const told = ["--map", "--p1", "--p2", "--p3", "--p4", "--p5", "--p6", "--p7"].map((name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.slice(4, -1);
  });
  probe.remove();
  return found.size > 0 && [...found].every((color) => told.includes(color));
}"""


def test_the_band_is_painted_in_the_colors_of_the_theme(page: Page, address: str) -> None:
    page.emulate_media(color_scheme="light")
    open_rollout(page, address, "sea__00000000", view="tokens")
    page.locator("[data-at]").first.wait_for()
    page.wait_for_function(PAINTED)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(PAINTED)
    page.get_by_role("button", name="Dark or light").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.wait_for_function(PAINTED)


#: Keys as fast as hands and key repeats give them: before a frame, after one, between tasks, at once.
MANY_KEYS = """async (count) => {
  const pane = document.querySelector('.pane'), channel = new MessageChannel();
  const frame = () => new Promise(requestAnimationFrame);
  const task = () => new Promise((done) => { channel.port1.onmessage = done; channel.port2.postMessage(0); });
  for (let n = 0; n < count; n += 1) {
    pane.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true, cancelable: true }));
    await [() => new Promise((done) => setTimeout(done, n % 7)), frame, task, () => null][n % 4]();
  }
}"""


def test_every_key_counts_however_fast(page: Page, address: str) -> None:
    """The token that the address names runs after the reader; where it was gone back to, the two chased each other."""
    open_rollout(page, address, "sea__00000000", view="tokens")
    page.get_by_role("listbox").focus()
    first = int(page.locator(".active").get_attribute("data-at") or "")
    page.evaluate(MANY_KEYS, 40)
    expect(page.locator(".active")).to_have_attribute("data-at", str(first + 40))
    page.wait_for_url(re.compile(rf"at={first + 40}\b"))


def test_a_break_is_followed_to_both_its_sides(page: Page, address: str) -> None:
    open_rollout(page, address, "sea__00000000", view="rollout")
    card = page.get_by_role("article", name="Break at call 3")
    expect(card.get_by_text("The system prompt or the tools changed.")).to_be_visible()
    assert card.locator(".tag").inner_text() in ("certain", "likely", "possible")
    expect(card.get_by_text("What to change")).to_be_visible()
    assert card.locator("td.differs .w").count() > 0
    expected_row, sent_row = (row.inner_text() for row in card.locator("tr").all())
    assert expected_row != sent_row
    card.get_by_role("button", name="Where the new sequence differs").click()
    expect(page.locator(".active")).to_be_visible()
    page.wait_for_url(re.compile("view=tokens"))
    page.keyboard.press("b")
    expect(page.locator(".seam").first).to_be_visible()


def test_two_rollouts_are_compared_from_where_they_differ(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("searchbox").fill("task:write-number")
    boxes = page.get_by_role("checkbox", name="to compare")
    expect(boxes).to_have_count(2)
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("link", name="Compare both").click()
    expect(page.locator(".parted")).to_contain_text(re.compile("part at|differ from token"))
    expect(page.get_by_role("listbox")).to_have_count(2)
    expect(page.locator(".t.differs")).to_have_count(2)
    first, second = page.locator(".t.differs").all()
    assert first.get_attribute("data-at") == second.get_attribute("data-at")


@pytest.mark.parametrize("wide", [360, 700, 1900])
def test_every_view_fits(page: Page, address: str, wide: int) -> None:
    page.set_viewport_size({"width": wide, "height": 800})
    for words in ({}, {"view": "rollout"}, {"view": "tokens"}):
        open_rollout(page, address, "sea__00000000", **words) if words else page.goto(address)
        page.locator("main :is(.table, .pane, ol.calls)").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= wide
    assert page.locator(".line").count() > 0
    columns = page.evaluate("document.querySelector('.line').getBoundingClientRect().width")
    page.set_viewport_size({"width": wide + 100, "height": 800})
    page.wait_for_function(f"document.querySelector('.line').getBoundingClientRect().width > {columns}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_problem_is_found(browser: Browser, address: str, scheme: str) -> None:
    made = Watched(browser, color_scheme=scheme)
    page = made.page
    found = []
    for words in ({}, {"view": "rollout"}, {"view": "tokens"}, {"view": "tokens", "color": "entropy"}):
        open_rollout(page, address, "sea__00000000", **words) if words else page.goto(address)
        page.locator("main :is(.table, .t, ol.calls)").first.wait_for()
        if words.get("view") == "tokens":
            page.keyboard.press("l")
        violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        found += [
            (words, violation["id"], violation["nodes"][0]["html"])
            for violation in violations
            if violation["impact"] in SERIOUS
        ]
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    made.context.close()
    assert found == [] and made.trouble == []


def test_hostile_text_stays_text(page: Page, tmp_path: Path) -> None:
    with served_to(page, nasty_job(tmp_path / "job")) as address:
        for words in ({}, {"view": "rollout"}, {"view": "tokens"}):
            open_rollout(page, address, "nasty__00000001", **words) if words else page.goto(address)
            page.locator("main :is(.table, .t, .message)").first.wait_for()
            assert page.evaluate("window.hurt") is None
            assert page.locator("main img, main script").count() == 0
        shown = page.locator(".field").inner_text()
        assert "<script>window.hurt=1</script>" in shown.replace("\n", "")
        for symbol in ("⟨RLO⟩", "␛[31mred␇", "␀", "⟨ZWSP⟩", "◌", "⇥", "⏎", "⟨U+E0041⟩", "␍", "مرحبا", "漢字"):
            assert symbol in shown, symbol
        assert "\x1b" not in shown and "\u202e" not in shown
        for place, text in enumerate(NASTY):
            label = page.locator(f'[data-at="{3 + place}"]').first.get_attribute("aria-label")
            assert label is not None and f"id {1000 + place}" in label, text
        expect(page.locator('[data-at="20"]')).to_have_text("⟨1017⟩")


def test_the_file_works_from_disk_with_no_network(browser: Browser, real: Path, tmp_path: Path) -> None:
    from train.view.api import View
    from train.view.export import write_html

    file = tmp_path / "view.html"
    list(write_html(View(real), file, most=40 << 20))
    made = Watched(browser, offline=True)
    page = made.page
    open_rollout(page, file.as_uri(), "sea__00000000", view="tokens")
    page.locator(".t").first.hover()
    expect(page.locator(".card")).to_be_visible()
    paths = [path for path in (link.get_attribute("title") for link in rows_of(page, file.as_uri()).all()) if path]
    pair = [path for path in paths if "write-number" in path]
    page.goto(at(file.as_uri(), view="compare", a=pair[0], b=pair[1]))
    expect(page.locator(".t.differs")).to_have_count(2)
    page.goto(at(file.as_uri(), view="rollout", path=pair[0]))
    expect(page.get_by_role("region", name="Call 0")).to_contain_text("Write the number 42")
    made.context.close()
    assert made.trouble == []


@pytest.mark.parametrize(
    "script",
    [
        "<script>window.hurt = 1</script>",
        '<script type="module">window.hurt = 1</script>',
        '<script src="data:text/javascript,window.hurt=1"></script>',
        '<script type="module" src="data:text/javascript,window.hurt=1"></script>',
    ],
)
def test_a_script_that_somebody_puts_into_the_file_does_not_run(browser: Browser, tmp_path: Path, script: str) -> None:
    from train.view.api import View
    from train.view.export import write_html

    file = tmp_path / "view.html"
    list(write_html(View(make_job(tmp_path / "job", [{}])), file, most=4 << 20))
    file.write_text(file.read_text().replace('<div id="app">', f'{script}<div id="app">'))
    made = Watched(browser)
    rows_of(made.page, file.as_uri()).wait_for()
    assert made.page.evaluate("window.hurt") is None
    made.context.close()
    assert made.trouble and all("Content Security Policy" in line for line in made.trouble)


def rows_of(page: Page, address: str) -> Any:
    page.goto(address)
    page.locator("a.name").first.wait_for()
    return page.locator("a.name")


def test_a_file_that_is_too_large_says_what_it_leaves_out(browser: Browser, real: Path, tmp_path: Path) -> None:
    from train.view.api import View
    from train.view.export import PAGE, write_html

    file = tmp_path / "view.html"
    result = list(write_html(View(real), file, most=PAGE + 20_000))
    assert any("left out" in line for line in result)
    made = Watched(browser)
    links = rows_of(made.page, file.as_uri())
    expect(made.page.get_by_text("rollouts whole; of the others only their rows")).to_be_visible()
    shown = []
    for path in [link.get_attribute("title") for link in links.all()]:
        made.page.goto(at(file.as_uri(), view="rollout", path=path))
        made.page.locator("main :is(.call, .note)").first.wait_for()
        shown.append("was left out" in made.page.locator("main").inner_text())
    assert any(shown)
    made.context.close()


def test_a_running_job_updates_as_it_goes_and_a_lost_folder_is_reported(watched: Watched, tmp_path: Path) -> None:
    page = watched.page
    job = make_job(tmp_path / "job", [{"name": "first__00000001"}], state="running")
    with served_to(page, job) as address:
        page.goto(address)
        expect(page.locator(".state")).to_have_text("running")
        rollout = make_rollout(job, name="second__00000002", calls=conversation(1), finished=False)
        row = page.locator("tr", has_text="second__00000002")
        expect(row).to_contain_text("unfinished")
        finish_rollout(rollout, reward=0.0)
        expect(row).to_contain_text("failed")
        shutil.rmtree(rollout)
        expect(row).to_contain_text("folder gone")
        end_job(job)
        expect(page.locator(".state")).to_have_text("finished")
        row.get_by_role("link").click()
        expect(page.get_by_role("alert")).to_contain_text("is gone")
        assert all("404" in message for message in watched.trouble)  # Chromium tells of the answer itself
        watched.trouble.clear()
        page.get_by_role("link", name="job", exact=True).click()
        expect(page.locator("tr", has_text="first__00000001")).to_contain_text("passed")


def test_what_is_wrong_with_a_log_is_reported_where_it_is_seen(page: Page, tmp_path: Path) -> None:
    whole = b"".join(json.dumps(call_line).encode() + b"\n" for call_line in conversation(2))
    other = conversation(2)
    other[1]["metadata"]["token_capture"]["schema_version"] = "benchflow.token_capture.v9"
    silent = conversation(1)
    silent[0]["metadata"]["token_capture"]["completions"][0]["tokens"] = None
    job = make_job(
        tmp_path / "job",
        [
            {"name": "torn__00000001", "journal": whole[:-40]},
            {"name": "schema__00000002", "calls": other},
            {"name": "silent__00000003", "calls": silent},
            {"name": "alien__00000004", "journal": b'{"hello": "world"}\n'},
        ],
    )
    (job / "noresult__00000005").mkdir()
    (job / "noresult__00000005/result.json").write_text("{")
    with served_to(page, job) as address:
        open_rollout(page, address, "torn__00000001", view="rollout")
        expect(page.get_by_text("cut off while it was being written")).not_to_have_count(0)
        expect(page.get_by_role("link", name="call 0")).to_be_visible()
        open_rollout(page, address, "schema__00000002", view="rollout", call=1)
        expect(page.get_by_role("region", name="Call 1")).to_contain_text("this version reads")
        expect(page.get_by_role("region", name="Call 1")).to_contain_text("and then? 0")
        open_rollout(page, address, "silent__00000003", view="tokens")
        expect(page.get_by_role("note")).to_contain_text("have no text in the log")
        expect(page.get_by_role("note")).to_contain_text("--tokenizer DIR")
        expect(page.locator(".t").first).to_have_text("⟨1100⟩")
        open_rollout(page, address, "alien__00000004", view="rollout")
        expect(page.get_by_text("another program wrote it")).to_be_visible()
        page.goto(address)
        expect(page.get_by_text("not a readable JSON object")).to_be_visible()


def test_of_a_hundred_thousand_tokens_only_what_is_seen_is_in_the_page(page: Page, tmp_path: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with served_to(page, long_journal(tmp_path / "long.jsonl", 100_000)) as address:
        open_rollout(page, address, "long.jsonl", view="tokens")
        page.locator(".t:not(.waits)").first.wait_for()
        assert page.evaluate("document.querySelectorAll('*').length") < 4000
        pane = page.get_by_role("listbox")
        pane.focus()
        page.keyboard.press("End")
        expect(page.locator(".active")).to_have_attribute("data-at", "100002")
        page.keyboard.press("Home")
        page.keyboard.press("l")
        expect(page.locator(".active")).to_have_attribute("data-at", str(3 + 99_910))
        assert page.evaluate("document.querySelectorAll('*').length") < 4000
        assert len([url for url in asked if "/api/slice" in url]) < 12
