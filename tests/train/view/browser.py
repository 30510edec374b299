"""A real Chromium without a window, and a page in it that keeps what went wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
]  # fmt: skip
ROOT = Path(__file__).parents[3]


def chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def a_browser() -> Iterator[Browser]:
    """Without Chromium: skipped on a person's machine, failed in CI."""
    path = chromium()
    if path is None:
        reason = "no Chromium here: on Debian, apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Watched:
    """A page; `trouble` has every error of the console and every request that left this machine."""

    def __init__(self, browser: Browser, *, wide: int = 1280, high: int = 800, **more: Any) -> None:
        self.context = browser.new_context(viewport={"width": wide, "height": high}, **more)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.trouble: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        self.page.on("request", lambda request: self._request(request.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.trouble.append(f"{message.type}: {message.text}")

    def _request(self, url: str) -> None:
        if not re.match(r"(http://(127\.0\.0\.1|localhost|\[::1\])[:/]|file:|data:|blob:)", url):
            self.trouble.append(f"request: {url}")


@contextmanager
def served(*words: str | Path) -> Iterator[str]:
    """`bench view ... --no-open` as a person runs it; the address that it prints."""
    command = [sys.executable, str(ROOT / "bench.py"), "view", *map(str, words), "--no-open"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        result = process.stderr.readline()
        found = re.search(r"http://\S+", result)
        assert found, result + process.stderr.read()
        yield found[0]
    finally:
        process.terminate()
        process.wait(20)
        if process.stderr is not None:
            process.stderr.close()
