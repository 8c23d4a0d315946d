"""Pages in headless Chromium: their network requests, errors and screenshots."""

import base64
import contextlib
import os
from pathlib import Path

from playwright.sync_api import Browser, Page

from flows.server.prefect_settings import PASSWORD

OUTPUT = Path(__file__).parents[2] / "test-output"
WIDE, NARROW = (1200, 900), (390, 844)  # desktop and phone


class Visit:
    """An open page. `complaints`: errors of scripts and console; `asked`: requests to other hosts."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self._address = page, address
        self._own = address.split("/", 3)[2]  # host and port; empty for a file
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self._note_request(request.url))
        page.on("pageerror", lambda error: self._note_error(str(error), getattr(error, "stack", None) or ""))
        page.on("console", lambda message: self._note_message(message.type, message.text))
        page.goto(address)

    def _note_request(self, url: str) -> None:
        own = url == self._address or (self._own and url.split("/", 3)[2] == self._own)
        if not url.startswith(("data:", "blob:")) and not own:
            self.asked.append(url)

    def _note_error(self, message: str, stack: str) -> None:
        # Prefect's own scripts may measure an element that its page has just removed.
        if "/assets/" not in stack:
            self.complaints.append(message)

    def _note_message(self, kind: str, text: str) -> None:
        # Prefect's UI polls for objects that do not exist yet.
        if kind == "error" and "404" not in text:
            self.complaints.append(text)

    def picture(self, name: str, *, whole: bool = False) -> None:
        """Save a screenshot to test-output/."""
        OUTPUT.mkdir(exist_ok=True)
        self.page.screenshot(path=OUTPUT / f"{name}.png", full_page=whole)

    def overflows(self) -> bool:
        """Whether the page scrolls horizontally."""
        return self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth")

    def has_broken_image(self) -> bool:
        return self.page.evaluate("[...document.images].some(image => image.complete && !image.naturalWidth)")


@contextlib.contextmanager
def visit(browser: Browser, address: str, size=WIDE, scheme="light"):
    """Open the page at an address for the length of the block."""
    password = base64.b64encode(os.environ[PASSWORD].encode()).decode()
    stored = {
        "origin": "/".join(address.split("/", 3)[:3]),
        "localStorage": [{"name": "prefect-password", "value": password}],  # as the page LOGIN stores it
    }
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        storage_state={"origins": [stored] if address.startswith("http") else []},
    )
    try:
        yield Visit(context.new_page(), address)
    finally:
        context.close()
