"""The documentation site: built as `make site` does, every link followed, and as a reader meets it, in Chromium.

It is served as a version of a deployed site: `DIR/dev` beside `DIR/versions.json`.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_view import HEIGHT, NARROW, WIDE, found_by_axe, page_of
from tests.scripts import load_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not find_spec("zensical"), reason="zensical is not installed: make site"),
]
SCRIPT = load_script("scripts/build_site.py")
READ = (
    "", "quickstart/", "how-to/package-a-plugin/", "how-to/look-at-a-run/", "concepts/settings/", "plugins/",
    "reference/flags/", "reference/plugins/", "reference/api/",
)  # fmt: skip
"""Pages that are looked at closely; how wide a page is, is measured of all."""


OF_THE_THEME = ("md-version__current", "md-typeset__scrollwrap")
"""Parts of findings of axe-core in zensical's own elements: the menu of versions is labelled by another text, and its
boxes around wide tables have no tabindex (Chromium reaches them by Tab all the same)."""


@pytest.fixture(scope="module")
def site() -> Path:
    return SCRIPT.build()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("deployed")
    SCRIPT.add_version(site, SCRIPT.DEV, folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/dev/"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_every_link_leads_somewhere(site: Path) -> None:
    assert SCRIPT.broken_links(site) == []
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="images/view/run.png"' in home
    assert "slime train --config demo.yaml" in re.sub(r"<[^>]+>", "", home)
    api = re.sub(r"<[^>]+>", "", (site / "reference/api/index.html").read_text(encoding="utf-8"))
    assert "Prompt group of the sample; unique over the run" in api
    for page in ("flags", "commands", "hooks", "plugins"):
        assert (site / f"reference/{page}/index.html").is_file()
    assert (site / "search.json").is_file()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read(browser: Any, url: str, tmp_path: Path, scheme: str) -> None:
    pictures = Path(os.environ.get("SLIME_TEST_SCREENSHOTS", tmp_path))
    found = {}
    with page_of(browser, color_scheme=scheme) as page:
        for name in READ:
            page.goto(url + name)
            page.wait_for_load_state("networkidle")
            assert page.locator("h1").count() == 1, name
            for width in (WIDE, NARROW):
                page.set_viewport_size({"width": width, "height": HEIGHT})
                page.evaluate("Promise.all(document.getAnimations().map(a => a.finished))")  # tabs fade in
                if findings := [one for one in found_by_axe(page) if not any(known in one for known in OF_THE_THEME)]:
                    found[name, width] = findings
                stem = f"site-{name.strip('/').replace('/', '-') or 'home'}"
                page.screenshot(path=pictures / f"{stem}-{width}-{scheme}.png")
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", back)[0]) < 60) == (scheme == "dark")
    assert found == {}


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_no_page_is_wider_than_the_window(browser: Any, url: str, site: Path, width: int) -> None:
    with page_of(browser) as page:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        wide = {}
        for file in sorted(site.rglob("index.html")):
            name = file.parent.relative_to(site).as_posix()
            page.goto(url + f"{name}/" * (name != "."))
            beside = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if beside > 0:
                wide[name] = beside
        assert wide == {}


def test_search_finds_a_page(browser: Any, url: str) -> None:
    with page_of(browser, reduced_motion="reduce") as page:
        page.goto(url)
        page.wait_for_load_state("networkidle")
        page.keyboard.press("/")
        page.keyboard.type("gspo")
        page.get_by_text(re.compile(r"^\d+ results$")).wait_for()
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/estimators/"))
        assert "Estimators" in page.title()


def test_a_reader_chooses_the_dark_and_walks_by_tabs_and_menu(browser: Any, url: str) -> None:
    with page_of(browser) as page:
        page.goto(url)
        page.locator("label[title='Dark mode']").click()
        page.locator("body[data-md-color-scheme=slate]").wait_for()
        page.get_by_role("navigation", name="Tabs").get_by_role("link", name="How to").click()
        page.wait_for_url(re.compile("/how-to/"))
        page.locator("body[data-md-color-scheme=slate]").wait_for()
        page.set_viewport_size({"width": NARROW, "height": HEIGHT})
        page.locator("header label[for=__drawer]").click()
        page.locator("nav.md-nav--primary").get_by_role("link", name="Debug").click()
        page.wait_for_url(re.compile("/how-to/debug/"))
