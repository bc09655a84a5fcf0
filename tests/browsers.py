"""A headless Chromium for tests, where there is one."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def why_no_browser() -> str | None:
    """Why there is none; None where there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[browser]'"
    if not any(map(shutil.which, NAMES)):
        return f"no browser is installed: none of {', '.join(NAMES)} is on the path (Debian: apt install chromium)"
    return None


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser that may reach no network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = next(path for path in map(shutil.which, NAMES) if path)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()
