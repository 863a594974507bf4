"""Local HTML files opened in the machine's Chromium, headless and offline, for tests, which are skipped without it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
START_TIMEOUT_MS = 120_000


@dataclass
class Seen:
    """Record of what a web page did in the browser: its errors, and the addresses that it requested."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def started() -> Iterator[Browser]:
    """Run Chromium, the machine's or the one that Playwright has installed, until the `with` block ends."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=FLAGS, timeout=START_TIMEOUT_MS)
        except Error as error:
            if program:
                raise
            pytest.skip(f"no {', '.join(NAMES)}, and none of Playwright's: {str(error).splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, file: Path, width: int = 1280, scheme: str = "light") -> Iterator[tuple[Page, Seen]]:
    """Open a local HTML file in a new browser page without network; yield the page and its errors and requests."""
    seen = Seen()
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: seen.requests.append(request.url))
    try:
        page.goto(file.as_uri(), timeout=START_TIMEOUT_MS)
        yield page, seen
    finally:
        context.close()
