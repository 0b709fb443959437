"""A headless browser for tests of what is drawn in one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Why there is no browser here; None where there is one."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs Playwright, of the extra 'test'"
    if not any(map(shutil.which, PROGRAMS)):
        return f"needs one of {', '.join(PROGRAMS)}"
    return None


@contextmanager
def launched() -> Iterator:
    """A Chromium of this machine; skips with the reason where there is none.

    Where OOMB_BROWSER is 1, as in continuous integration, that is a failure instead.
    """
    reason = missing()
    if reason is not None:
        if os.environ.get("OOMB_BROWSER") == "1":
            pytest.fail(f"OOMB_BROWSER is 1, but the test {reason}")
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, PROGRAMS)))
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()
