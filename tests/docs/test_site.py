"""The site that `make docs` builds, as a reader sees it: served on loopback, in headless Chromium."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.docs.blocks import ROOT

CHROMIUM = Path("/usr/bin/chromium")
PHONE = 375
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no chromium on this machine"),
]

# What of a page is wrong at once: markup that was left as text, pictures that did not load, and
# what sticks out of the window without a box around it that scrolls.
WRONG = r"""() => {
  const wrong = [];
  for (const p of document.querySelectorAll(".md-content p"))
    if (/^\s*([-*]|\d+\.|\|) /m.test(p.textContent.trim())) wrong.push(p.textContent.slice(0, 80));
  for (const img of document.images)
    if (!img.complete || !img.naturalWidth) wrong.push(img.src);
  if (document.documentElement.scrollWidth > innerWidth)
    wrong.push(`${document.documentElement.scrollWidth} px wide`);
  return wrong;
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a strict build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=240,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the folder is served."""
    handler = functools.partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Browser, *, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """A tab whose every request and message of the console is checked when it closes."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    requests: list[str] = []
    messages: list[str] = []
    context.on("request", lambda request: requests.append(request.url))
    context.on("console", lambda message: messages.append(message.text))
    context.on("weberror", lambda error: messages.append(str(error.error)))
    yield context.new_page()
    context.close()
    hosts = {urlsplit(url).hostname for url in requests if not url.startswith(("data:", "blob:"))}
    assert hosts == {"127.0.0.1"}
    assert messages == []


def test_a_word_is_searched_and_its_page_found(browser: Browser, address: str) -> None:
    with opened(browser) as page:
        page.goto(address)
        page.locator("[data-md-component=search-query]").click()
        page.keyboard.type("mmdebstrap")
        page.locator(".md-search-result__link").first.click()
        page.wait_for_url("**/containers/**")
        assert page.locator("h1").inner_text().startswith("containers: what steps run in")
        assert "mmdebstrap" in page.locator(".md-content").inner_text()


def test_no_page_scrolls_sideways_on_a_phone_or_lacks_a_picture(
    browser: Browser, address: str, site: Path
) -> None:
    pages = sorted(p.relative_to(site).parent.as_posix() for p in site.rglob("index.html"))
    assert len(pages) > 50
    wrong = {}
    with opened(browser, width=PHONE) as page:
        for name in pages:
            page.goto(f"{address}/{name}/")
            if found := page.evaluate(WRONG):
                wrong[name] = found
    assert wrong == {}


def test_a_file_that_a_page_links_to_is_shown_by_the_site(browser: Browser, address: str) -> None:
    with opened(browser) as page:
        page.goto(f"{address}/docs/own-code/")
        page.get_by_role("link", name="tasks/base.py").click()
        page.wait_for_url("**/rekindle/tasks/base.py/")
        assert "class Task(abc.ABC)" in page.locator(".md-content").inner_text()


@pytest.mark.parametrize(("scheme", "palette"), [("light", "default"), ("dark", "slate")])
def test_the_palette_follows_the_system(
    browser: Browser, address: str, scheme: str, palette: str
) -> None:
    with opened(browser, scheme=scheme) as page:
        page.goto(address)
        assert page.locator("body").get_attribute("data-md-color-scheme") == palette
