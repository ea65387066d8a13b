"""What the page's first load costs on a phone: `python -m tests.browser.first_load`. Figures, no verdict.

"Interactive" is when everything is wired and the models are shown. The main thread's time is CPU time, so that it
holds on a busy machine too, where the other figures do not.
"""

from typing import Any

from playwright.sync_api import Browser, expect, sync_playwright

from tests.browser.conftest import CHROMIUM, PHONE, QUIET
from tests.browser.scripted import scripted

ROUNDS = 5
SLOWDOWNS = (1, 4)
_WATCH = """new MutationObserver(() => {
  if (!window.ready && document.getElementById('model')?.options.length) window.ready = performance.now();
}).observe(document, { childList: true, subtree: true });"""
_READ = """() => {
  const loaded = [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')];
  const files = new Map(loaded.filter((each) => !each.name.includes('/v1/')).map((each) => [each.name, each.encodedBodySize]));
  return {
    kb: [...files.values()].reduce((sum, bytes) => sum + bytes, 0) / 1000,
    files: files.size,
    paint_ms: performance.getEntriesByName('first-contentful-paint')[0].startTime,
    interactive_ms: window.ready,
  };
}"""


def load(browser: Browser, address: str, slowdown: int) -> dict[str, float]:
    """One first load, in a profile of its own."""
    context = browser.new_context(viewport=PHONE, is_mobile=True)
    page = context.new_page()
    chrome = context.new_cdp_session(page)
    chrome.send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
    chrome.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.add_init_script(_WATCH)
    page.goto(f"{address}/#key=k")
    expect(page.locator("#model option")).not_to_have_count(0)
    metrics = {one["name"]: one["value"] for one in chrome.send("Performance.getMetrics")["metrics"]}
    figures: dict[str, Any] = {**page.evaluate(_READ), "main_thread_ms": metrics["TaskDuration"] * 1000}
    context.close()
    return figures


def main() -> None:
    with scripted() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        for slowdown in SLOWDOWNS:
            rounds = [load(browser, address, slowdown) for _ in range(ROUNDS)]
            middle = {name: sorted(one[name] for one in rounds)[ROUNDS // 2] for name in rounds[0]}
            print(f"{slowdown}x:", ", ".join(f"{name} {value:.0f}" for name, value in middle.items()))  # noqa: T201
        browser.close()


if __name__ == "__main__":
    main()
