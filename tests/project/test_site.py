"""The site of the documentation opens from its folder, and can be searched, without a server."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.slow

WIDTHS = (1400, 390)
LOST_PICTURES = """Promise.all([...document.images].map(
    (one) => one.decode().then(() => [], () => [one.src])
)).then((all) => all.flat())"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, in which a warning is an error, and return its folder."""
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONSAFEPATH": "1"},
        check=True,
    )
    return folder


@pytest.fixture(params=WIDTHS)
def page(request, browser):
    """Return an empty page without network. At the end, nothing may have been asked of a server."""
    width = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    requested = []
    opened.on("request", lambda one: requested.append(one.url))
    yield opened
    context.close()
    assert [url for url in requested if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_search_finds_a_page(site, page):
    """A word that is typed into the search has a result, which leads to a page with that word."""
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")  # opens the search at all widths
    page.locator(".md-search__input").press_sequentially("hysteresis")
    result = page.locator(".md-search-result__item a").first
    result.click()
    page.wait_for_url(lambda url: "index.html" not in url)

    assert page.url.startswith(site.as_uri())
    assert "hysteresis" in page.locator("article").inner_text()


def test_pages_fit_their_window(site, page):
    """No page is wider than the window, and each picture is shown."""
    files = sorted(site.glob("**/*.html"))
    wide, lost = [], []
    for file in files:
        page.goto(file.as_uri())
        name = file.relative_to(site).as_posix()
        needed, shown = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        wide += [name] if needed > shown else []
        lost += page.evaluate(LOST_PICTURES)

    assert len(files) > 40
    assert (wide, lost) == ([], [])
