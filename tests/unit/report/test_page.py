"""The page loads nothing from elsewhere, and works in a browser."""

import re
import shutil

import pytest

from mfwrap.report.page import write_run_page
from support.run_folders import write_lines, write_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """Return a page of two runs, one of them on two ranks."""
    folder = tmp_path_factory.mktemp("page")
    runs = [write_run(folder / "a" / "run"), write_run(folder / "b" / "run", 60, num_ranks=2)]
    write_run_page(runs, folder / "report" / "page.html")
    return folder / "report" / "page.html"


def test_nothing_is_loaded_from_elsewhere(page_file):
    """The page loads no script, style, picture or font from a URL."""
    text = page_file.read_text(encoding="utf-8")
    elements = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)

    assert not re.search(r"(src|href)=\"(?!#)", elements)
    assert "url(" not in elements
    assert [path.name for path in page_file.parent.iterdir()] == ["page.html"]


def test_names_are_no_markup(page_file):
    """The name of a layer is never interpreted as HTML."""
    assert "<script>alert(1)" not in page_file.read_text(encoding="utf-8")


def test_what_was_first_is_named(page_file):
    """The page begins with the episodes, and names the module where an anomaly began."""
    text = page_file.read_text(encoding="utf-8")

    assert text.index('<div class="event">') < text.index('<table id="summary">')
    assert "gradient of layers.1.mlp" in text


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        ([{"skipped": True}, {"skipped": False}, {"skipped": True}], "2"),
        ([{"skipped_updates": 1}, {"skipped_updates": 4}], "4"),
        ([{}, {}], "\N{EN DASH}"),
    ],
)
def test_skipped_updates_are_counted(tmp_path, records, shown):
    """The summary counts the steps that were skipped, or uses the count in a Trainer's log."""
    lines = [{"step": step, "loss": 1.0, **each} for step, each in enumerate(records, 1)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    write_run_page([tmp_path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")

    row = re.search(r'<table id="summary">.*?<tbody>(.*?)</tbody>', text, flags=re.DOTALL)[1]
    assert re.findall(r'<td class="number">(.*?)</td>', row)[-2] == shown


def test_runs_of_one_name_are_numbered(page_file):
    """Runs whose folders have the same name are numbered."""
    assert "run (1), run (2)</h1>" in page_file.read_text(encoding="utf-8")


def test_no_run(tmp_path):
    """Without a run folder an error is raised, and no page is written."""
    with pytest.raises(
        ValueError, match="`folders` must contain at least one run folder, got none"
    ):
        write_run_page([], tmp_path / "page.html")
    with pytest.raises(FileNotFoundError, match="none is not a run folder"):
        write_run_page([tmp_path / "none"], tmp_path / "page.html")

    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def browser():
    """Return a headless browser; the test is skipped on a machine without one."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, page_file):
    """Return a function that opens the page offline, in a light or dark color scheme."""
    contexts = []

    def open_page(scheme="light"):
        context = browser.new_context(color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.faults = []
        page.on("console", lambda message: page.faults.append(message.text))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_page
    for context in contexts:
        context.close()


def test_all_panels_are_drawn(opened):
    """Each panel has a plot with its traces, and the console stays empty."""
    page = opened()

    sections = page.locator("section")
    names = [sections.nth(i).get_attribute("id") for i in range(sections.count())]
    assert names == [
        *("loss", "learning_rate", "loss_scale", "global_norm", "local-norms"),
        *("ranks-1", "throughput", "others"),
    ]
    assert page.locator("section .plot .main-svg").count() >= len(names)
    assert page.locator("#loss .scatterlayer .trace").count() == 10
    assert page.locator("#local-norms .heatmaplayer .hm, #local-norms .heatmaplayer image").count()
    rows = page.locator("#summary tbody tr")
    assert rows.nth(1).inner_text().split() == [
        *("run", "(2)", "60", "0.19915", "1.25", "1.125", "\N{EN DASH}", "2")
    ]
    assert page.faults == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 22, 28)")]
)
def test_light_and_dark(opened, scheme, paper):
    """Page and plots use the system's color scheme until the button is clicked."""
    page = opened(scheme)
    background = "getComputedStyle(document.querySelector({})).backgroundColor"
    plot = "document.querySelector('#loss .plot').layout.paper_bgcolor"
    before = page.evaluate(plot)

    assert page.evaluate(background.format("'body'")) == paper
    page.click("#theme")
    page.wait_for_function(f"{plot} !== '{before}'")
    assert page.evaluate(background.format("'body'")) != paper


def test_an_anomaly_leads_to_its_place(opened):
    """A click on an episode zooms all panels to its steps and marks the first."""
    page = opened()
    page.locator("a[data-step='30']").first.click()
    page.wait_for_function(
        "document.querySelector('#global_norm .plot').layout.shapes.length === 7"
    )

    for name in ("loss", "learning_rate", "local-norms"):
        low, high = page.evaluate(f"document.querySelector('#{name} .plot').layout.xaxis.range")
        assert (low, high) == (20, 40)
    assert page.url.endswith("#loss")


@pytest.mark.slow
def test_panels_move_together(opened):
    """When one panel is zoomed, the others follow."""
    page = opened()
    page.evaluate("Plotly.relayout(document.querySelector('#loss .plot'), {'xaxis.range': [5, 9]})")
    page.wait_for_function(
        "document.querySelector('#global_norm .plot').layout.xaxis.range.join() === '5,9'"
    )

    assert page.faults == []
