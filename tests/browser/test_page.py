"""The chat page in a real browser, against the whole of Chorus with scripted replicas."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.integration.system import System, eventually, running

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
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install it, or name it in CHORUS_CHROMIUM"),
]


@pytest.fixture(scope="module")
def chorus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("page") / "data", "--stub", "--stub-tps", "40") as system:
        yield system


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, chorus: System) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 900, "height": 700})
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(f"{chorus.gateways[0]}/#key={chorus.key()}")
    expect(opened.locator("#model option")).not_to_have_count(0)
    yield opened
    context.close()
    assert errors == []


def ask(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def grows(turn: Locator, length: int) -> None:
    """Wait until the reply is longer than that."""
    eventually(lambda: len(turn.locator(".reply").inner_text()) > length, f"more than {length} characters")


def screenshot(page: Page, name: str) -> None:
    folder = os.environ.get("CHORUS_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_the_key_leaves_the_address_bar(page: Page) -> None:
    """A key handed over in the address is kept in the browser and taken out of the address."""
    assert "key=" not in page.url


def test_a_reply_streams_and_can_be_stopped(page: Page) -> None:
    """Text appears while it is written; Stop ends it, says so, and keeps what was shown."""
    ask(page, "Tell me about <b>Hampi</b> & its river")
    turn = page.locator(".turn").last
    expect(turn).to_have_attribute("data-status", "writing")
    expect(turn.locator(".reply")).to_contain_text("w")
    expect(turn.locator(".message")).to_have_text("Tell me about <b>Hampi</b> & its river")
    screenshot(page, "writing")
    page.click("#stop")
    expect(turn).to_have_attribute("data-status", "stopped")
    expect(turn.locator(".note")).to_have_text("You stopped this reply.")
    shown = turn.locator(".reply").inner_text()
    ask(page, "and then?")
    expect(page.locator(".turn").last).to_have_attribute("data-status", "writing")
    assert page.locator(".turn").first.locator(".reply").inner_text() == shown
    page.click("#stop")


def test_a_reload_mid_reply_goes_on_where_it_was(page: Page) -> None:
    """The page reloaded while a reply is written shows all of it, once."""
    ask(page, "a long one")
    before = page.locator(".turn").last.locator(".reply")
    expect(before).to_contain_text("w")
    start = before.inner_text()[:20]
    page.reload()
    turn = page.locator(".turn").last
    expect(turn).to_have_attribute("data-status", "writing")
    expect(turn.locator(".reply")).to_contain_text(start)
    length = len(turn.locator(".reply").inner_text())
    grows(turn, length + 100)
    words = turn.locator(".reply").inner_text().split()
    page.click("#stop")
    expect(turn).to_have_attribute("data-status", "stopped")
    stored = page.evaluate(
        """async () => {
          const talk = JSON.parse(localStorage.getItem('chorus.talk.v1'));
          const id = talk.at(-1).reply.id;
          const key = localStorage.getItem('chorus.key');
          const answer = await fetch(`/v1/responses/${id}`, { headers: { Authorization: `Bearer ${key}` } });
          return (await answer.json()).output[0].content[0].text;
        }"""
    )
    assert turn.locator(".reply").inner_text().strip() == stored.strip()
    assert stored.split()[: len(words) - 1] == words[:-1]


def test_a_lost_network_is_said_and_mended(page: Page) -> None:
    """Offline in the middle of a reply the page says so, and goes on by itself when the network is back."""
    ask(page, "another long one")
    turn = page.locator(".turn").last
    expect(turn.locator(".reply")).to_contain_text("w")
    page.context.set_offline(True)
    page.evaluate("() => 0")
    page.context.set_offline(False)
    length = len(turn.locator(".reply").inner_text())
    grows(turn, length + 50)
    page.click("#stop")
    expect(turn).to_have_attribute("data-status", "stopped")


def test_markup_in_a_reply_never_runs(page: Page) -> None:
    """Text from people and models is text, whatever it contains."""
    page.evaluate("() => { window.ran = false; }")
    ask(page, "<img src=x onerror='window.ran = true'><script>window.ran = true</script>")
    expect(page.locator(".turn").last).to_have_attribute("data-status", "writing")
    page.click("#stop")
    assert page.evaluate("() => window.ran") is False
    assert page.locator("#talk img, #talk script").count() == 0
