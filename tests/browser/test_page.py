"""The chat page in a real browser, against the whole of Chorus with scripted replicas."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Open, ask, status, words
from tests.integration.system import System, eventually

Shot = Callable[[Page, str], None]


@pytest.fixture
def page(open_page: Open, chorus: System) -> Page:
    return open_page(chorus.gateways[0], chorus.key())


@pytest.fixture(params=["desktop", "phone"])
def either(request: pytest.FixtureRequest, open_page: Open, chorus: System) -> Page:
    """A page at each width."""
    return open_page(chorus.gateways[0], chorus.key(), phone=request.param == "phone")


def grown(page: Page, length: int) -> None:
    """Wait until the last reply is longer than that."""
    eventually(lambda: len(words(page)) > length, f"more than {length} characters", 20)


def answer(page: Page, path: str) -> Any:
    """What the server says to the page's own key."""
    return page.evaluate(
        """async (path) => {
          const headers = { Authorization: `Bearer ${localStorage.getItem('chorus.key')}` };
          return (await fetch(path, { headers })).json();
        }""",
        path,
    )


def conversation(page: Page) -> str:
    """The id of the open conversation; empty for a new one."""
    return page.evaluate("location.hash.slice(2)")


def replies(page: Page) -> list[dict[str, Any]]:
    """The replies of the open conversation, every branch, as the server has them."""
    items = answer(page, f"/v1/conversations/{conversation(page)}/items?include=branches&order=asc&limit=100")["data"]
    return [item for item in items if item["role"] == "assistant"]


def stored(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"]).strip()


def stop(page: Page) -> None:
    page.click("#stop")
    status(page, "stopped")


def test_the_key_leaves_the_address_bar(page: Page) -> None:
    """A key handed over in the address is kept in the browser and taken out of the address."""
    assert "key=" not in page.url


def test_a_wrong_key_is_asked_for_again(open_page: Open, chorus: System) -> None:
    """Whoever comes with a key that is not valid is told so, and can give another."""
    page = open_page(chorus.gateways[0], chorus.key())
    page.evaluate("localStorage.setItem('chorus.key', 'sk-chorus-wrong')")
    page.reload()
    expect(page.locator("#key-wrong")).to_be_visible()
    page.fill("#key-text", chorus.key())
    page.press("#key-text", "Enter")
    expect(page.locator("#key")).to_be_hidden()
    ask(page, "hello")
    status(page, "writing")
    stop(page)


def test_a_reply_streams_and_can_be_stopped(either: Page, screenshot: Shot) -> None:
    """Text appears while it is written; Stop ends it, says so, and keeps what was shown."""
    page = either
    screenshot(page, "empty")
    ask(page, "Tell me about <b>Hampi</b> & its river")
    status(page, "writing")
    grown(page, 40)
    expect(page.locator(".message .words")).to_have_text("Tell me about <b>Hampi</b> & its river")
    screenshot(page, "writing")
    page.click("#stop")
    status(page, "stopped")
    expect(page.locator(".reply .note")).to_have_text("You stopped this reply.")
    screenshot(page, "stopped")
    shown = words(page)
    eventually(lambda: stored(replies(page)[0]) == shown.strip(), "the stored text is the one shown")
    ask(page, "and then?")
    expect(page.locator(".reply")).to_have_count(2)
    grown(page, 10)
    assert page.locator(".reply .prose").first.inner_text() == shown
    stop(page)


def test_a_stop_before_the_reply_has_a_name_counts(page: Page) -> None:
    """Stop pressed while the message is still on its way ends the reply as soon as it exists."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/v1/responses", hold)
    ask(page, "too fast")
    eventually(lambda: conversation(page) and held, "the message is on its way")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    held[0].continue_()
    status(page, "stopped")
    eventually(lambda: [reply["end_reason"] for reply in replies(page)] == ["user_stop"], "the server stopped it")


def test_two_conversations_at_once(either: Page, screenshot: Shot) -> None:
    """A new chat while a reply is written leaves it running; both are in the list, found by search, and open again."""
    page = either
    side = page.locator("#side")

    def chats() -> None:
        if page.locator("#side-open").is_visible():
            page.click("#side-open")

    mark = uuid.uuid4().hex
    ask(page, f"first topic, of zebras {mark}")
    grown(page, 20)
    first = conversation(page)
    chats()
    page.click("#new")
    expect(page.locator("#hello")).to_be_visible()
    ask(page, "second topic, of quaggas")
    grown(page, 20)
    assert conversation(page) != first
    chats()
    expect(side.locator(".dot.writing")).to_have_count(2)
    screenshot(page, "chats")
    page.fill("#search", f"Zebras {mark}")
    expect(side.locator("#list a")).to_have_count(1)
    side.locator("#list a").click()
    expect(page.locator(".message .words")).to_have_text(f"first topic, of zebras {mark}")
    assert conversation(page) == first
    length = len(words(page))
    grown(page, length + 20)
    stop(page)
    page.go_back()
    expect(page.locator(".message .words")).to_have_text("second topic, of quaggas")
    stop(page)


def test_five_presses_of_regenerate_cost_one_live_reply(page: Page, screenshot: Shot) -> None:
    """Regenerate pressed five times leaves the newest reply running, and the others, superseded, as branches."""
    ask(page, "again and again")
    grown(page, 20)
    page.evaluate(
        """() => { for (let at = 0; at < 5; at += 1) document.querySelector("[aria-label='Regenerate reply']").click(); }"""
    )
    expect(page.locator(".reply .count")).to_have_text("6/6")
    status(page, "writing")
    grown(page, 20)
    ends = [reply["end_reason"] for reply in replies(page)]
    assert ends == ["superseded"] * 5 + [None]
    screenshot(page, "regenerated")
    page.click("[aria-label='Previous version of the reply']")
    expect(page.locator(".reply .count")).to_have_text("5/6")
    status(page, "superseded")
    page.click("[aria-label='Next version of the reply']")
    stop(page)
    page.reload()
    expect(page.locator(".reply .count")).to_have_text("6/6")


def test_a_message_can_be_edited_and_sent_again(either: Page, screenshot: Shot) -> None:
    """An edited message is a branch beside the old one, with its own reply; arrows lead back, and on from there."""
    page = either
    ask(page, "one")
    grown(page, 10)
    stop(page)
    ask(page, "two")
    grown(page, 10)
    stop(page)
    old = words(page)
    page.locator(".message").last.hover()
    page.locator("[aria-label='Edit message']").last.click()
    page.keyboard.type(", better")
    screenshot(page, "editing")
    page.keyboard.press("Enter")
    expect(page.locator(".message .words").last).to_have_text("two, better")
    grown(page, 10)
    stop(page)
    expect(page.locator(".message .count").last).to_have_text("2/2")
    screenshot(page, "edited")
    page.locator("[aria-label='Previous version of the message']").last.click()
    expect(page.locator(".message .words").last).to_have_text("two")
    assert words(page) == old
    ask(page, "three")
    grown(page, 10)
    stop(page)
    page.reload()
    expect(page.locator(".message .words")).to_have_text(["one", "two", "three"])


def test_a_first_message_can_be_edited(page: Page) -> None:
    """An edited first message begins the conversation anew, and the old beginning stays as a branch."""
    ask(page, "a beginning")
    grown(page, 10)
    stop(page)
    page.press("#text", "ArrowUp")
    page.keyboard.press("Control+a")
    page.keyboard.type("another beginning")
    page.keyboard.press("Enter")
    grown(page, 10)
    stop(page)
    page.reload()
    expect(page.locator(".message .words")).to_have_text(["another beginning"])
    expect(page.locator(".message .count")).to_have_text("2/2")


def test_a_reload_mid_reply_goes_on_where_it_was(either: Page) -> None:
    """The page reloaded while a reply is written shows all of it, once."""
    page = either
    ask(page, "a long one")
    grown(page, 20)
    start = words(page)[:20]
    page.reload()
    status(page, "writing")
    expect(page.locator(".reply .prose")).to_contain_text(start)
    grown(page, len(words(page)) + 100)
    stop(page)
    shown = words(page).strip()
    eventually(lambda: stored(replies(page)[0]) == shown, "the stored text is the one shown")


def test_a_reload_before_the_reply_has_a_name_sends_once(page: Page) -> None:
    """A message that a reload cuts off on its way is sent again with the same key, and answered once."""
    page.route("**/v1/responses", lambda route: None)
    ask(page, "cut off")
    eventually(lambda: conversation(page), "the conversation is made")
    page.unroute("**/v1/responses")
    page.reload()
    grown(page, 10)
    stop(page)
    expect(page.locator(".message .words")).to_have_text(["cut off"])
    eventually(lambda: len(replies(page)) == 1, "one reply")


def test_a_lost_network_is_said_and_mended(either: Page, screenshot: Shot) -> None:
    """Offline in the middle of a reply the page says so, and goes on by itself when the network is back, missing nothing."""
    page = either
    ask(page, "another long one")
    grown(page, 20)
    page.context.set_offline(True)
    expect(page.locator("#status")).to_contain_text("offline")
    screenshot(page, "offline")
    length = len(words(page))
    page.context.set_offline(False)
    expect(page.locator("#status")).to_be_hidden()
    grown(page, length + 100)
    stop(page)
    shown = words(page).strip()
    eventually(lambda: stored(replies(page)[0]) == shown, "the stored text is the one shown")


def test_a_second_tab_and_a_second_device_show_the_same_reply(page: Page, open_page: Open, chorus: System) -> None:
    """One reply, seen while it is written in two tabs and on another device at another gateway; stopped in one, it stops in all."""
    ask(page, "for everybody")
    grown(page, 20)
    tab = open_page.tab(page)  # type: ignore[attr-defined]
    device = open_page(chorus.gateways[1], chorus.key(), phone=True)
    device.click("#side-open")
    device.locator("#list a", has_text="for everybody").click()
    for one in (tab, device):
        grown(one, 20)
    tab.click("#stop")
    for one in (page, tab, device):
        status(one, "stopped")
    assert words(page) == words(tab) == words(device)


def test_a_tab_hears_of_what_another_sends(page: Page, open_page: Open) -> None:
    """A message sent in one tab appears in another that has the same conversation open."""
    ask(page, "one")
    grown(page, 10)
    stop(page)
    tab = open_page.tab(page)  # type: ignore[attr-defined]
    expect(tab.locator(".message .words")).to_have_text(["one"])
    ask(page, "two")
    expect(tab.locator(".message .words")).to_have_text(["one", "two"])
    grown(tab, 20)
    stop(page)
    status(tab, "stopped")


def test_a_chat_can_be_renamed_and_deleted(page: Page) -> None:
    """A title can be given; a deleted chat is gone from the list and from the server."""
    ask(page, "a chat to be gone")
    grown(page, 10)
    stop(page)
    id_ = conversation(page)
    page.click("#menu summary")
    page.click("#rename")
    page.fill("#rename-text", "A short life")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("A short life")
    expect(page.locator("#list a[aria-current]")).to_have_text("A short life")
    page.click("#menu summary")
    page.click("#remove")
    page.click("#remove-box button[type=submit]")
    expect(page.locator("#hello")).to_be_visible()
    expect(page.locator(f"#list a[href='#/{id_}']")).to_have_count(0)
    assert answer(page, f"/v1/conversations/{id_}")["error"]["code"] == "not_found"


def test_a_chat_keeps_its_title_when_the_list_leaves_it_out(page: Page) -> None:
    """A search that does not find the open chat changes nothing about it."""
    ask(page, "a chat to be looked for")
    grown(page, 10)
    stop(page)
    page.fill("#search", "nothing like it")
    expect(page.locator("#list")).to_have_text("Nothing found.")
    expect(page.locator("#title")).to_have_text("a chat to be looked for")
    page.click("#menu summary")
    page.click("#rename")
    expect(page.locator("#rename-text")).to_have_value("a chat to be looked for")
    page.fill("#rename-text", "Found")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Found")
    expect(page).to_have_title("Found · Chorus")


def test_markup_in_a_message_never_runs(page: Page) -> None:
    """Text from people is text, whatever it contains."""
    page.evaluate("() => { window.ran = false; }")
    ask(page, "<img src=x onerror='window.ran = true'><script>window.ran = true</script>")
    status(page, "writing")
    stop(page)
    assert page.evaluate("() => window.ran") is False
    assert page.locator("#talk img, #talk script").count() == 0
