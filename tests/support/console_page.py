"""The console page in a browser, for tests that look at it and use it."""

from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from servers import wait_until

# What is wider than its place, and which two of the elements of one part of the page overlap.
_LAYOUT = """
    const PARTS = ".top, .key, .ask, .live, #log";
    const LEAVES = "h1, h2, h3, h4, p, dt, dd, button, input, textarea, label, summary, .state, .age, .curve, "
      + ".cells, .text, .exchange .problem";
    const isSeen = (element) => element.checkVisibility() && element.getBoundingClientRect().height
      && !element.closest(".visually-hidden");
    const shown = [...document.querySelectorAll(`${PARTS}, ${LEAVES}`)].filter(isSeen);
    const name = (element) => element.id || element.className || `${element.tagName} ${element.textContent}`;
    const part = (element) => element.parentElement.closest(`${PARTS}, body`);
    const boxes = shown.map((element) => element.getBoundingClientRect());
    const overlaps = [];
    for (const [i, a] of boxes.entries()) {
      for (const [j, b] of boxes.entries()) {
        const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (i < j && width > 1 && height > 1 && part(shown[i]) === part(shown[j]))
          overlaps.push([name(shown[i]), name(shown[j])]);
      }
    }
    const wide = [...document.querySelectorAll("*")].filter(
      (element) => element.clientWidth && element.scrollWidth > element.clientWidth + 1
        && element.tagName !== "INPUT" && !element.closest(".visually-hidden"));
    return {
      overlaps,
      wide: wide.map(name),
      right: Math.max(...boxes.map((box) => box.right)),
      inside: document.documentElement.clientWidth,
      n: shown.length,
    };
"""


class Page:
    """The page of the server at `url` in its window; what it waits for comes within `seen_s`."""

    def __init__(self, window: webdriver.Chrome, url: str, key: str, seen_s: float) -> None:
        self.window = window
        self._url = url
        self._key = key
        self._seen_s = seen_s

    def open(self, *, has_key: bool = True) -> None:
        """Anew, in a tab that keeps the key, or none."""
        key = self._key if has_key else None
        self.window.get(f"{self._url}/health")
        self.run("sessionStorage.clear(); if (arguments[0]) sessionStorage['bakehouse-key'] = arguments[0]", key)
        self.window.get(self._url)
        state = "live" if has_key else "waits for an API key"
        wait_until(lambda: self.text("#news") == state, self._seen_s, state)

    def run(self, script: str, *arguments: object) -> Any:
        return self.window.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.window.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of the last element that fits, "" where none does; as it is in the document."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''"
        found: str = self.run(script, selector)
        return found

    def figure(self, name: str, within: str = "#sums") -> str:
        return self.text(f"{within} [data-figure={name}]")

    def fill(self, selector: str, text: str) -> None:
        self.find(selector).clear()
        self.find(selector).send_keys(text)

    def ask(self, question: str) -> None:
        self.fill("#question", question)
        self.find("#send").click()

    def wait_for_end(self) -> None:
        wait_until(lambda: not self.find("#stop").is_enabled(), self._seen_s, "the end of the answer")

    def resize(self, width: int, height: int, scheme: str) -> None:
        """Until `restore`; `scheme`: `light` or `dark`."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme_asked = [{"name": "prefers-color-scheme", "value": scheme}]
        self.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme_asked})

    def restore(self) -> None:
        """The window's own size."""
        self.window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def layout(self) -> dict[str, Any]:
        """`overlaps`: pairs of elements; `wide`: what needs scrolling sideways; `right`: where the last one ends,
        of `inside` pixels; `n`: elements looked at."""
        found: dict[str, Any] = self.run(_LAYOUT)
        return found
