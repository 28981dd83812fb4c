"""Chromium, for the tests of pages; where there is none they are skipped, and fail with SLIME_TEST_BROWSER=required."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_MISSING = "no browser: make browser installs Chromium, and make install playwright"


@pytest.fixture(scope="module")  # no longer: while it is there its event loop counts as running in this thread
def browser() -> Iterator[Any]:
    """One for the tests of a file; each takes a context of its own."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        if os.environ.get("SLIME_TEST_BROWSER") == "required":
            pytest.fail(_MISSING)
        pytest.skip(_MISSING)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()
