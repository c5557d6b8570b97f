"""A headless Chromium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["CHROMIUM", "open_browser"]

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
"""Path of the browser, or ``None`` on a machine without one."""


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start the browser, and close it at the end."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  (not every machine has it)

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()
