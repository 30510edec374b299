"""Takes the pictures of docs/view.md: `make screenshots`. Real rollouts of the embedded engine, a real browser.

Conversations at temperature 1 by a model of 135 million parameters: what they say is what it said.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright

from sandbox.embedded_engine import EmbeddedEngine
from tests.train.smollm import smollm
from tests.train.view.browser import ARGUMENTS, ROOT, chromium, served
from tests.train.view.view_job import demo_job, sea_job

SIZE = {"width": 1280, "height": 760}
#: GitHub shows a page in a second or two when its pictures are no larger than this.
MOST = 250_000


def main(made: Path | None = None) -> None:
    """`made`: a folder with jobs that were made before."""
    with tempfile.TemporaryDirectory() as temporary:
        root = made or make(Path(temporary) / "jobs")
        smollm().save(f"{temporary}/tokenizer.json")
        with served(root, "--tokenizer", temporary) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
                for name, picture in PICTURES.items():
                    picture(page, address)
                    page.wait_for_timeout(300)
                    file = ROOT / "docs" / f"view-{name}{'-dark' if scheme == 'dark' else ''}.png"
                    page.screenshot(path=file)
                    assert file.stat().st_size < MOST, f"{file} is too large"
                    print(f"{file.relative_to(ROOT)}  {file.stat().st_size // 1000} kB", file=sys.stderr)
                page.close()
            browser.close()


def make(root: Path) -> Path:
    with EmbeddedEngine() as engine:
        sea_job(root / "sea", engine, rollouts=8, tokens=140)
        demo_job(root / "write", engine, trials=8)
    return root


def jobs(page: Page, address: str) -> None:
    page.goto(address)
    page.locator("a.name").first.wait_for()
    page.locator(".top [role=status]").wait_for(state="detached")


def paths(page: Page, address: str, task: str) -> list[str]:
    jobs(page, f"{address}#q=task:{task}")
    return [path for link in page.locator("a.name").all() if (path := link.get_attribute("title"))]


def rollout(page: Page, address: str) -> None:
    page.goto(f"{address}#{urlencode({'view': 'rollout', 'path': paths(page, address, 'sea')[0], 'call': 2})}")
    page.locator(".message").first.wait_for()


def tokens(page: Page, address: str) -> None:
    page.goto(f"{address}#{urlencode({'view': 'tokens', 'path': longest(page, address), 'of': 's0'})}")
    page.locator(".t:not(.waits)").first.wait_for()
    page.get_by_role("listbox").focus()
    page.keyboard.press("l")
    page.locator(".card").wait_for()


def longest(page: Page, address: str) -> str:
    """The conversation whose first sequence holds most of what was sampled."""
    found = []
    for path in paths(page, address, "sea"):
        body = page.request.get(f"{address}api/rollout", params={"path": path}).json()
        found.append((body["segments"][0]["sampled"], path))
    return max(found)[1]


def compare(page: Page, address: str) -> None:
    rows = page.request.get(f"{address}api/job").json()["rows"]
    pair = [
        next(row["path"] for row in rows if row["task"] == "sea" and row["reward"] == reward) for reward in (1.0, 0.0)
    ]
    page.goto(f"{address}#{urlencode({'view': 'compare', 'a': pair[0], 'b': pair[1]})}")
    page.locator(".t.differs").first.wait_for()


PICTURES = {"jobs": jobs, "rollout": rollout, "tokens": tokens, "compare": compare}

if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
