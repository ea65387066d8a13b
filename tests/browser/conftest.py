"""A browser, and pages of it at the widths and themes that people have."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.scripted import scripted
from tests.integration.system import System, running

CHROMIUM = os.environ.get("CHORUS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = {"width": 1200, "height": 800}
PHONE = {"width": 390, "height": 844}
WAIT_MS = 20_000  # a loaded machine is no reason to fail

Open = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a browser, and time on a loaded machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(180))
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip("no Chromium here: install it, or name it in CHORUS_CHROMIUM"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Playwright's own event loop counts as running in this thread until it is closed, so it may not outlive the
    module: the tests of other modules, which run theirs in the same thread, come in any order."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        expect.set_options(timeout=WAIT_MS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def chorus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("page") / "data", "--stub", "--stub-tps", "40") as system:
        yield system


@pytest.fixture(scope="module")
def script() -> Iterator[str]:
    with scripted() as address:
        yield address


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages, each in a browser profile of its own; an uncaught error in any of them fails the test."""
    errors: list[str] = []
    contexts = []

    def open_(address: str, key: str = "k", *, phone: bool = False, scheme: str = "light") -> Page:
        look: dict[str, Any] = (
            {"viewport": PHONE, "is_mobile": True, "has_touch": True} if phone else {"viewport": DESKTOP}
        )
        context = browser.new_context(color_scheme=scheme, permissions=["clipboard-read", "clipboard-write"], **look)
        contexts.append(context)
        return tab(context.new_page(), f"{address}/#key={key}")

    def tab(page: Page, address: str) -> Page:
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(address)
        expect(page.locator("#model option")).not_to_have_count(0)
        return page

    open_.tab = lambda page: tab(page.context.new_page(), page.url)  # type: ignore[attr-defined]
    yield open_
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    folder = os.environ.get("CHORUS_SCREENSHOTS")

    def take(page: Page, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            width = "phone" if page.viewport_size == PHONE else "desktop"
            page.screenshot(path=str(Path(folder) / f"{name}-{width}.png"))

    return take


def ask(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def status(page: Page, word: str) -> None:
    """Wait until the last reply is this far."""
    expect(page.locator(".reply").last).to_have_attribute("data-status", re.compile(word))


def words(page: Page) -> str:
    """The text of the last reply."""
    return page.locator(".reply .prose").last.inner_text()
