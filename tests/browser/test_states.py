"""What the page shows and says in every state, against a scripted gateway; and that everybody can use it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Open, ask, status
from tests.browser.scripted import SAMPLE, WEB

Shot = Callable[[Page, str], None]
FIRST_LOAD_BYTES_MAX = 100_000
LOOKS = [(False, "light"), (True, "dark")]  # each width and each theme once: neither depends on the other


@pytest.fixture
def page(open_page: Open, script: str) -> Page:
    return open_page(script)


def finished(page: Page, text: str = "tips") -> None:
    ask(page, text)
    status(page, "complete")


def violations(page: Page) -> list[str]:
    """What axe finds serious or critical."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:160]} {one['nodes'][0]['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def colour(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


# --- what a reply looks like -----------------------------------------------------------------------------


def test_markdown_is_rendered(page: Page) -> None:
    """Headings, emphasis, nested lists, code, tables, quotes and links become elements; a link opens elsewhere, safely."""
    finished(page)
    prose = page.locator(".reply .prose")
    expect(prose.locator("h4")).to_have_text("Sleeping well")
    expect(prose.locator("p > em")).to_have_text("most")
    expect(prose.locator("ol > li")).to_have_count(3)
    expect(prose.locator("ol ul > li")).to_have_text(["no bright screens,", "a book instead."])
    expect(prose.locator("pre code")).to_have_text(re.compile(r"^def hours.*% 24$", re.DOTALL))
    expect(prose.locator("tbody td.right")).to_have_text(["7 to 9", "7 to 8"])
    link = prose.locator("blockquote a")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    expect(link).to_have_attribute("href", "https://example.org/sleep")


def test_code_and_replies_can_be_copied(page: Page) -> None:
    """The copy button of a block gives its code; that of the reply gives its text as it was written."""
    finished(page)
    page.click("[aria-label='Copy code']")
    expect(page.locator("[aria-label='Copy code'][data-done]")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def hours")
    page.click("[aria-label='Copy reply']")
    expect(page.locator("[aria-label='Copy reply'][data-done]")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == SAMPLE


def test_what_is_settled_is_not_drawn_again(page: Page) -> None:
    """A block that is followed by another keeps its element while the rest is written."""
    ask(page, "tips")
    heading = page.locator(".reply .prose h4")
    expect(page.locator(".reply .prose li").first).to_be_visible()
    heading.evaluate("(element) => { element.dataset.mine = 'yes'; }")
    items = page.locator(".reply .prose ol > li > p")
    first = items.first
    expect(items.nth(1)).to_be_visible()
    first.evaluate("(element) => { element.dataset.mine = 'yes'; }")
    status(page, "complete")
    expect(heading).to_have_attribute("data-mine", "yes")
    expect(first).to_have_attribute("data-mine", "yes")


def test_hostile_markdown_stays_text(page: Page) -> None:
    """Markup, script addresses and event handlers in a reply make no element and no link."""
    page.evaluate(
        """async () => {
          const { MarkdownView } = await import('/web/render.js');
          const root = document.body.appendChild(document.createElement('div'));
          root.id = 'hostile';
          new MarkdownView(root).update([
            '<img src=x onerror="window.ran=1"> <script>window.ran=1</script>',
            '[a](javascript:window.ran=1) [b](data:text/html,x) ![c](https://example.org/x.png)',
            '```<b>\\n</code></pre><script>window.ran=1</script>\\n```',
          ].join('\\n\\n'), false);
        }"""
    )
    hostile = page.locator("#hostile")
    assert hostile.locator("img, script, b, [onerror]").count() == 0
    expect(hostile.locator("a")).to_have_text(["c"])
    assert page.evaluate("window.ran") is None


# --- notices ---------------------------------------------------------------------------------------------


def test_a_reply_in_line_says_its_place_and_how_long(page: Page, screenshot: Shot) -> None:
    """While a reply waits the page shows the place in line and an estimate, and Stop works."""
    ask(page, "queue")
    expect(page.locator(".reply .note")).to_have_text(re.compile(r"You are number \d+ in line: about \d+ s\."))
    screenshot(page, "queued")
    page.click("#stop")
    status(page, "stopped")


def test_a_limit_says_when_to_come_again(page: Page, screenshot: Shot) -> None:
    """A refusal for the user's own limit says when to try again; until then the button waits too."""
    ask(page, "limit")
    note = page.locator(".reply .note")
    expect(note).to_have_text(re.compile(r"You have reached your limit of messages\. You can try again in \d+ s\."))
    expect(page.locator(".again")).to_be_disabled()
    screenshot(page, "limit")
    page.evaluate("() => { const now = Date.now; Date.now = () => now() + 60_000; }")
    expect(page.locator(".again")).to_be_enabled()
    page.click(".again")
    expect(note).to_contain_text("try again in")
    expect(page.locator(".message")).to_have_count(1)


def test_another_model_that_answers_is_said(page: Page, screenshot: Shot) -> None:
    """When the mini model answers instead, the reason stands over the reply, also after a reload."""
    finished(page, "fallback")
    expect(page.locator(".fallback")).to_contain_text("chorus-mini answers until 14:30")
    screenshot(page, "fallback")
    page.reload()
    expect(page.locator(".fallback")).to_contain_text("chorus-mini answers until 14:30")


def test_a_filtered_reply_says_so(page: Page, screenshot: Shot) -> None:
    """A reply that the content filter stopped keeps what was shown, and says what happened."""
    ask(page, "filter")
    status(page, "filtered")
    expect(page.locator(".reply .note")).to_have_text("This reply was stopped by the content filter.")
    screenshot(page, "filtered")


def test_a_failed_reply_can_be_tried_again(page: Page, screenshot: Shot) -> None:
    """A reply that failed says why, and Try again asks for another one beside it."""
    ask(page, "fail")
    status(page, "failed")
    expect(page.locator(".reply .note")).to_have_text("The replica was lost. Try it again.")
    screenshot(page, "failed")
    page.click(".again")
    expect(page.locator(".reply .count")).to_have_text("2/2")


def test_a_server_on_its_way_back_is_waited_for(page: Page) -> None:
    """A page that opens while the server cannot be reached says so, and begins by itself when it can."""
    finished(page)
    down = [True]

    def refuse(route: Route) -> None:
        route.abort() if down[0] else route.continue_()

    page.route("**/v1/**", refuse)
    page.reload()
    expect(page.locator("#status")).to_have_text("The server cannot be reached. Trying again…")
    down[0] = False
    expect(page.locator(".message .words")).to_have_text("tips")
    expect(page.locator("#model option")).not_to_have_count(0)
    expect(page.locator("#status")).to_be_hidden()


# --- keys, themes, readers -------------------------------------------------------------------------------


def test_the_keyboard_is_enough(page: Page, screenshot: Shot) -> None:
    """Shift+Enter breaks the line, Enter sends, Esc stops; search, a new chat and the list of keys have theirs."""
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".message .words")).to_have_text("one\ntwo")
    status(page, "writing")
    page.keyboard.press("Escape")
    status(page, "stopped")
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#text")).to_be_focused()
    expect(page.locator("#hello")).to_be_visible()
    page.keyboard.press("Control+/")
    expect(page.locator("#keys-box")).to_be_visible()
    screenshot(page, "keys")
    page.keyboard.press("Escape")
    expect(page.locator("#keys-box")).to_be_hidden()
    expect(page.locator("#text")).to_be_focused()


def test_a_reader_hears_sentences(page: Page) -> None:
    """The live region gets whole sentences without marks, each once, then that the reply is complete; the text itself is not live."""
    page.evaluate(
        """() => {
          window.said = [];
          const take = (changes) => changes.forEach((each) => each.addedNodes.forEach((p) => said.push(p.textContent)));
          new MutationObserver(take).observe(document.getElementById('said'), { childList: true });
        }"""
    )
    finished(page)
    expect(page.locator("#said p").last).to_have_text("The reply is complete.")
    said = " ".join(page.evaluate("said"))
    assert said.count("Keep the same hours, also at weekends.") == 1
    assert "**" not in said
    assert page.locator("#talk [aria-live]").count() == 0
    expect(page.locator("#said")).to_have_attribute("aria-live", "polite")


def test_the_theme_follows_the_system_until_one_is_chosen(page: Page) -> None:
    """Dark when the system is; the switch fixes one, also over a reload."""
    light = colour(page)
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = colour(page)
    assert dark != light
    page.click("#theme")
    assert colour(page) == light
    page.reload()
    assert colour(page) == light
    page.click("#theme")
    page.click("#theme")
    assert colour(page) == dark


def test_the_list_is_a_drawer_on_a_phone(open_page: Open, script: str, screenshot: Shot) -> None:
    """On a phone the chats slide over the page, take the focus and the page's place for readers, and give both back."""
    page = open_page(script, phone=True)
    finished(page, "a chat to come back to")
    page.click("#side-open")
    expect(page.locator("#new")).to_be_focused()
    assert page.evaluate("document.getElementById('main').inert") is True
    screenshot(page, "drawer")
    page.keyboard.press("Escape")
    expect(page.locator("#side-open")).to_be_focused()
    assert page.evaluate("[document.getElementById('main').inert, document.getElementById('side').inert]") == [
        False,
        True,
    ]
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width == page.viewport_size["width"]


@pytest.mark.parametrize(("phone", "scheme"), LOOKS)
def test_axe_finds_nothing_serious(open_page: Open, script: str, screenshot: Shot, phone: bool, scheme: str) -> None:
    """No serious or critical finding on the page with replies, notices and an editor, in the list, and in a dialog."""
    page = open_page(script, phone=phone, scheme=scheme)
    finished(page, "fallback")
    screenshot(page, f"reply-{scheme}")
    ask(page, "limit")
    status(page, "failed")
    page.locator("[aria-label='Edit message']").last.click()
    found = violations(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    found += violations(page)
    page.keyboard.press("Control+/")
    found += violations(page)
    assert found == []


def test_the_page_is_light(page: Page) -> None:
    """All that the first load fetches is small, and comes from the gateway itself."""
    loaded: list[dict[str, Any]] = page.evaluate(
        "performance.getEntriesByType('resource').map(({ name, encodedBodySize }) => ({ name, bytes: encodedBodySize }))"
    )
    fetched = {one["name"].rsplit("/", 1)[1]: one["bytes"] for one in loaded if "/web/" in one["name"]}
    assert set(fetched) == {path.name for path in Path(WEB).iterdir()} - {"index.html"}
    assert sum(fetched.values()) + (WEB / "index.html").stat().st_size <= FIRST_LOAD_BYTES_MAX
