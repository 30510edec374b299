"""How fast `bench view` is: the first view of a job of many rollouts; first paint and scrolling of a long sequence.

    python -m benchmarks.train.view [--rollouts 1000] [--tokens 100000] [--rounds 3] [--work FOLDER]

Needs Chromium. Real server, real browser; the job and the sequence are synthetic (`make_jobs.py`), so that they can be
large. Scrolling is measured by the frames that the browser presents while the pane moves a screen or more per frame.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.train.make_jobs import make_job  # noqa: E402
from tests.train.view.browser import ARGUMENTS, chromium, served  # noqa: E402
from tests.train.view.view_job import long_journal  # noqa: E402

#: Milliseconds between frames while a pane scrolls for two seconds, `step` pixels per frame.
SCROLL = """async (step) => {
  const pane = document.querySelector('.pane'), times = [];
  let empty = 0;
  for (let n = 0; n < 120; n += 1) {
    pane.scrollTop += step;
    await new Promise(requestAnimationFrame);
    times.push(performance.now());
    const box = pane.getBoundingClientRect();
    if (!document.elementFromPoint(box.left + 120, box.top + box.height / 2)?.closest('.line')) empty += 1;
  }
  const gaps = times.slice(1).map((time, at) => time - times[at]).sort((one, other) => one - other);
  return {median: gaps[gaps.length >> 1], p95: gaps[Math.floor(gaps.length * .95)], worst: gaps.at(-1), empty,
          elements: document.querySelectorAll('*').length, travelled: pane.scrollTop};
}"""


def first_view(browser: Browser, job: Path) -> dict[str, Any]:
    """Seconds until the first rows are painted, from the command's start and from the page's request."""
    began = time.monotonic()
    with served(job) as address:
        listening = time.monotonic() - began
        page = browser.new_page()
        asked = time.monotonic()
        page.goto(address, wait_until="commit")
        page.locator("tbody tr:not(.spacer)").nth(5).wait_for()
        painted = time.monotonic() - asked
        shown = page.locator(".table table").get_attribute("aria-rowcount")
        page.locator(".top [role=status]").wait_for(state="detached", timeout=600_000)
        read = time.monotonic() - asked
        page.close()
    return {"listening": listening, "first_view": painted, "rows": int(shown or 0) - 1, "all_logs_read": read}


def long_sequence(browser: Browser, journal: Path) -> dict[str, Any]:
    with served(journal) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(address)
        path = page.locator("a.name").get_attribute("title")
        page.locator(".top [role=status]").wait_for(state="detached")
        asked = time.monotonic()
        page.goto(f"{address}#{urlencode({'view': 'tokens', 'path': path})}")
        page.locator(".t:not(.waits)").first.wait_for()
        painted = time.monotonic() - asked
        record: dict[str, Any] = {"first_paint": painted}
        for name, step in (("reading", 40), ("dragging", 2500)):
            page.evaluate("document.querySelector('.pane').scrollTop = 0")
            record[name] = page.evaluate(SCROLL, step)
        page.close()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="Keep the made job here, and use it again.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        work = asked.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        job = make_job(work / f"job-{asked.rollouts}", asked.rollouts, calls=4, prompt_ids=2000)
        journal = long_journal(work / f"long-{asked.tokens}.jsonl", asked.tokens)
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        for _ in range(asked.rounds):
            result = first_view(browser, job)
            print(
                f"{result['rows']} rollouts: first view {result['first_view']:.2f} s after the request; the command "
                f"listened after {result['listening']:.2f} s; all logs read after {result['all_logs_read']:.1f} s"
            )
        for _ in range(asked.rounds):
            result = long_sequence(browser, journal)
            print(f"{asked.tokens} tokens: first paint {result['first_paint']:.2f} s")
            for name in ("reading", "dragging"):
                figures = result[name]
                print(
                    f"  {name}: a frame each {figures['median']:.1f} ms (95%: {figures['p95']:.1f}, "
                    f"worst {figures['worst']:.1f}), "
                    f"{figures['empty']} of 120 frames without text, {figures['elements']} elements in the page"
                )
        browser.close()


if __name__ == "__main__":
    main()
