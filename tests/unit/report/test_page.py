"""The page loads nothing from elsewhere, and works in a browser."""

import json
import re

import numpy as np
import pytest

from mfwrap.report.page import RunPage, write_run_page
from support.run_folders import write_lines, write_run


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

    assert text.index('<div class="event">') < text.index('<table id="summary"')
    assert "gradient of layers.1.mlp" in text.replace("<wbr>", "")


def test_runs_of_one_name_are_numbered(page_file):
    """Runs whose folders have the same name are numbered."""
    assert "run (1), run (2)</h1>" in page_file.read_text(encoding="utf-8")


def test_a_run_that_failed_in_its_first_step(tmp_path):
    """Its page has the error and the settings, also beside other runs."""
    other = write_run(tmp_path / "other")
    failed = tmp_path / "failed"
    failed.mkdir()
    error = "ValueError: row 3"
    facts = {"state": "failed after step 0 (ValueError)", "error": error, "command": ["train"]}
    (failed / "run.json").write_text(json.dumps(facts))
    for folders in ([failed], [failed, other]):
        write_run_page(folders, tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        said = "The run failed after step 0 (ValueError). Its error: <code>ValueError: row 3</code>"
        assert said in text


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
def folders(tmp_path_factory):
    """Return run folders by name: two with settings and times, and one that diverged."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, rate in (("timed", 0.001), ("other", 0.1)):
        found[name] = write_run(folder / name)
        facts = {
            "configuration": {"training": {"learning_rate": rate, "output_dir": name, "seed": 0}},
            "command": "python train.py",
        }
        (found[name] / "run.json").write_text(json.dumps(facts), encoding="utf-8")
        lines = [{"step": s, "seconds": 30.0 * s, "tokens": 4096 * s} for s in (5, 10, 40)]
        write_lines(found[name] / "progress.jsonl", lines)
    found["diverged"] = write_run(folder / "diverged")
    grown = [{"step": s, "loss": 1.5**s, "global_norm": 3.0**s} for s in range(1, 61)]
    write_lines(found["diverged"] / "more.jsonl", grown)
    for name in ("a/run", "b/run"):
        found[name] = write_run(folder / name, num_ranks=2)
    return found


@pytest.fixture
def opened(browser, page_file, folders, tmp_path):
    """Return a function that opens a page offline, by default that of two runs."""
    contexts = []

    def open_page(scheme="light", *, names=(), width=1400, watch=0):
        file = page_file
        if names:
            file = tmp_path / "page.html"
            write_run_page([folders[name] for name in names], file, watch=watch)
        size = {"width": width, "height": 900}
        context = browser.new_context(color_scheme=scheme, offline=True, viewport=size)
        contexts.append(context)
        page = context.new_page()
        page.faults = []
        page.on("console", lambda message: page.faults.append(message.text))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_page
    for context in contexts:
        context.close()


PLOT = "document.querySelector('#{} .plot')"


def layout_of(page, panel, what):
    """Return a part of the layout of a panel's plot."""
    return page.evaluate(f"{PLOT.format(panel)}.layout.{what}")


def names_of(page, panel):
    """Return the names of the traces that a panel shows."""
    return page.evaluate(f"{PLOT.format(panel)}.data.map((trace) => trace.name)")


def test_all_panels_are_drawn(opened):
    """Each panel has a plot with its traces, and the console stays empty."""
    page = opened()

    sections = page.locator("section")
    names = [sections.nth(i).get_attribute("id") for i in range(sections.count())]
    assert names == [
        *("loss", "learning_rate", "loss_scale", "global_norm", "local-norms"),
        *("ranks-1", "rank-norms-1", "throughput", "others"),
    ]
    assert page.locator("section .plot .main-svg").count() >= len(names)
    # For each run: the loss, its mean, the steps that are not finite, and two kinds of evaluations.
    assert page.locator("#loss .scatterlayer .trace").count() == 10
    assert page.locator("#local-norms .heatmaplayer .hm, #local-norms .heatmaplayer image").count()
    assert page.locator("#throughput .unit").inner_text() == "samples/s"
    rows = page.locator("#summary tbody tr")
    assert rows.nth(1).inner_text().split() == ["run", "(2)", "60", "0.19915", "1.25", "1.125", "2"]
    assert page.faults == []


@pytest.mark.parametrize(
    ("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 22, 28)")]
)
def test_light_and_dark(opened, scheme, paper):
    """Page and plots use the system's color scheme until the button is clicked."""
    page = opened(scheme)
    background = "getComputedStyle(document.querySelector({})).backgroundColor"
    before = layout_of(page, "loss", "paper_bgcolor")

    assert page.evaluate(background.format("'body'")) == paper
    page.click("#theme")
    page.wait_for_function(f"{PLOT.format('others')}.layout.paper_bgcolor !== '{before}'")
    assert page.evaluate(background.format("'body'")) != paper


def test_an_anomaly_leads_to_its_place(opened):
    """A click on an episode zooms all panels to its steps and marks the first."""
    page = opened()
    page.locator("a[data-step='30']").first.click()
    page.wait_for_function(f"{PLOT.format('others')}.layout.xaxis.range.join() === '20,40'")

    for name in ("loss", "learning_rate", "local-norms"):
        assert layout_of(page, name, "xaxis.range") == [20, 40]
        names = page.evaluate(f"{PLOT.format(name)}.layout.shapes.map((shape) => shape.name)")
        assert names.count("chosen") == 1
    assert page.url.endswith("#loss")
    page.click("#whole")
    page.wait_for_function(f"{PLOT.format('others')}.layout.xaxis.range[1] > 60")


def test_panels_move_together(opened):
    """When one panel is zoomed, the others follow."""
    page = opened()
    page.evaluate("Plotly.relayout(document.querySelector('#loss .plot'), {'xaxis.range': [5, 9]})")
    for name in ("global_norm", "local-norms", "throughput"):
        page.wait_for_function(f"{PLOT.format(name)}.layout.xaxis.range.join() === '5,9'")

    assert page.faults == []


def test_the_map_is_aligned_with_the_curves(opened):
    """The same step is at the same place of the screen in all panels, also in maps."""
    page = opened()
    places = [
        page.evaluate(
            f"(() => {{ const plot = {PLOT.format(name)}, axis = plot._fullLayout.xaxis;"
            " return [10, 50].map((step) => plot.getBoundingClientRect().left + axis._offset"
            " + axis.l2p(step)); })()"
        )
        for name in ("loss", "global_norm", "local-norms", "throughput")
    ]

    assert all(place == pytest.approx(places[0]) for place in places)


def test_a_map_frames_the_episodes_of_its_run(opened, folders):
    """The frame has the place of the span in the curves; a map has only its own run's frames."""
    for name in ("calm run", "bad run"):
        folders[name] = write_run(folders["timed"].parent / name)
    (folders["calm run"] / "anomalies.jsonl").unlink()
    record = {"step": 6, "kind": "spike", "last_step": 10, "num_steps": 5}
    write_lines(folders["bad run"] / "anomalies.jsonl", [record])
    page = opened(names=["calm run", "bad run"])
    shapes = (
        "{}.layout.shapes.filter(({{name}}) => name === 'episode').map(({{x0, x1}}) => [x0, x1])"
    )

    for name in ("loss", "local-norms"):
        assert page.evaluate(shapes.format(PLOT.format(name))) == [[5.5, 10.5]]
    page.locator("#local-norms select").select_option("0")
    page.wait_for_function(f"{PLOT.format('local-norms')}.layout.shapes.length === 0")
    assert page.evaluate(shapes.format(PLOT.format("loss"))) == [[5.5, 10.5]]


def test_rows_of_a_map_have_different_labels(opened, folders):
    """The name of a row that does not fit keeps what tells it from the other rows."""
    names = ("q_proj", "k_proj", "input_layernorm", "post_attention_layernorm")
    rows = [
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(12) for name in names
    ]
    record = {"step": 1, **{f"update_ratio/{row}": 0.001 for row in rows}}
    folder = folders["timed"].parent / "rows"
    write_lines(folder / "training_state.jsonl", [record])
    folders["rows"] = folder

    for width, last in ((1400, "11.self_attn.q_proj"), (390, "11.…q_proj")):
        page = opened(names=["rows"], width=width)
        labels = layout_of(page, "update_ratio", "yaxis.ticktext")
        assert len(set(labels)) == len(labels)
        assert labels[0][:2] == "0."
        assert len(labels) < len(rows) or labels[-4] == last
        starts = page.evaluate(
            "[...document.querySelectorAll('#update_ratio .ytick text')].map((text) => "
            "text.getBoundingClientRect().left - text.closest('svg').getBoundingClientRect().left)"
        )
        assert len(starts) == len(labels)
        assert min(starts) >= 0


def test_a_color_means_the_same_in_all_runs(opened, folders):
    """Maps open with the run that has an episode, and share their colors with the runs shown."""
    for name, norm in (("calm", 0.001), ("wild", 1e5)):
        folders[name] = folders["timed"].parent / name
        record = {"step": 1, "local_norm": {"a": norm, "b": norm}}
        write_lines(folders[name] / "metrics.jsonl", [record])
    write_lines(folders["wild"] / "anomalies.jsonl", [{"step": 1, "kind": "spike"}])
    page = opened(names=["calm", "wild"])
    limits = f"(({{zmin, zmax}}) => [zmin, zmax].join())({PLOT.format('local-norms')}.data[0])"

    assert page.locator("#local-norms select").input_value() == "1"
    assert page.evaluate(limits) == "-3,5"
    page.locator("button.run").nth(1).click()
    page.wait_for_function(f"{limits} === '-3,-2'")
    assert page.faults == []


def test_an_episode_at_the_end_is_shown_within_the_run(opened, folders):
    """A jump shows no steps before the run or behind it."""
    folders["late"] = write_run(folders["timed"].parent / "late")
    record = {"step": 36, "kind": "spike", "last_step": 40, "num_steps": 5}
    write_lines(folders["late"] / "anomalies.jsonl", [record])
    page = opened(names=["late"])
    page.locator("a[data-step='36']").first.click()
    page.wait_for_function(f"{PLOT.format('others')}.layout.xaxis.range[0] === 26")

    assert 40 < layout_of(page, "loss", "xaxis.range[1]") < 42


def test_a_run_can_be_hidden(opened):
    """A click on a run's button takes its curves out of all panels; another brings them back."""
    page = opened()
    button = page.locator("button.run").nth(0)
    button.click()
    page.wait_for_function(f"{PLOT.format('others')}.data.length === 2")

    assert button.get_attribute("aria-pressed") == "false"
    assert all("(1)" not in name for name in names_of(page, "loss"))
    assert "run (1)" not in page.locator("#loss .legend").inner_text()
    assert page.locator("#local-norms option:not([hidden])").count() == 2
    button.click()
    page.wait_for_function(f"{PLOT.format('others')}.data.length === 4")
    assert any("(1)" in name for name in names_of(page, "loss"))


def test_the_axis_of_a_panel_can_be_logarithmic(opened):
    """The box of a panel switches its axis between linear and logarithmic."""
    page = opened()

    assert layout_of(page, "loss", "yaxis.type") == "linear"
    page.locator("#loss .menu input").check()
    page.wait_for_function(f"{PLOT.format('loss')}.layout.yaxis.type === 'log'")
    assert layout_of(page, "learning_rate", "yaxis.type") == "linear"


def test_smoothing_and_weights_can_be_chosen(opened):
    """Without smoothing there are no means; results of one kind of weights can be left out."""
    page = opened()
    page.select_option("select[name=smoothing]", label="none")
    page.wait_for_function(f"{PLOT.format('others')}.data.length === 2")

    assert not any("smoothed" in name for name in names_of(page, "loss"))
    page.select_option("select[name=weights]", label="averaged")
    page.wait_for_function(f"{PLOT.format('loss')}.data.length === 6")
    kinds = {name.partition(": ")[2] for name in names_of(page, "loss")}
    assert kinds == {"training", "training: not finite", "evaluation, averaged weights"}


def test_tokens_and_time(opened):
    """The horizontal axis can be tokens or time, which are interpolated between the records."""
    page = opened(names=["timed"])

    assert page.locator("select[name=x] option").all_inner_texts() == ["step", "tokens", "time"]
    page.select_option("select[name=x]", "tokens")
    page.wait_for_function(f"{PLOT.format('others')}.layout.xaxis.title.text === 'tokens'")
    xs = page.evaluate(f"Array.from({PLOT.format('loss')}.data[0].x)")
    assert xs[4] == pytest.approx(5 * 4096)
    assert xs[7] == pytest.approx(8 * 4096)
    page.select_option("select[name=x]", "seconds")
    page.wait_for_function(
        f"{PLOT.format('others')}.layout.xaxis.title.text === 'time of training (min)'"
    )
    xs = page.evaluate(f"Array.from({PLOT.format('local-norms')}.data[0].x)")
    assert xs[9] == pytest.approx(10 * 30 / 60)


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_nothing_is_wider_than_the_screen(opened, width):
    """The page does not scroll sideways, no labels of an axis touch, no control covers another."""
    page = opened(width=width, names=["a/run", "b/run", "diverged"])

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    overlaps = page.evaluate(OVERLAPS)
    assert overlaps == []


def test_names_break_between_their_words(opened, folders):
    """A long name of a run is broken after an underscore or a dot, however many columns follow."""
    long = folders["timed"].parent / "fine_tuned_image_classification.second_attempt"
    facts = {
        "configuration": {"training": {"gradient_accumulation_steps": 1}},
        "state": "stopped early at step 40 of 100",
        "parameters": {"total": 1_240_000},
        "hardware": {"name": "AMD EPYC 9654 96-Core Processor, 192 cores"},
    }
    (write_run(long) / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    folders["long"] = long

    for names in (["long"], ["long", "timed"]):
        page = opened(names=names, width=1100)
        lines = page.evaluate(LINES_OF_WORDS)
        assert {"fine_", "attempt"} <= lines.keys()
        assert set(lines.values()) == {1}


LINES_OF_WORDS = """() => Object.fromEntries(
  [...document.querySelectorAll("#summary td.name, #differences td.name, #differences th")]
    .flatMap((cell) => [...cell.childNodes])
    .map((word) => {
      const range = document.createRange();
      range.selectNodeContents(word);
      return [word.textContent, range.getClientRects().length];
    })
    .filter(([word]) => word)
)"""


OVERLAPS = """() => {
  const boxes = (selector, root) => [...root.querySelectorAll(selector)]
    .map((one) => [one.textContent, one.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0);
  const touch = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const found = [];
  const compare = (boxes, where) => boxes.forEach(([text, a], i) => {
    boxes.slice(i + 1).forEach(([other, b]) => {
      if (touch(a, b)) found.push(`${where}: ${text} and ${other}`);
    });
  });
  document.querySelectorAll("section").forEach((section) => {
    for (const ticks of [".xtick text", ".ytick text", ".cbaxis text"])
      compare(boxes(ticks, section), section.id);
    compare(boxes("h2, .unit, .menu > *, .note, .legend > *, .plot", section), section.id);
    compare(boxes(".annotation-text-g", section), section.id);
  });
  compare(boxes(".switches > *", document), "switches");
  return found;
}"""


def test_what_differs_between_runs(opened):
    """The settings that differ are in a table; what is the same is not."""
    page = opened(names=["timed", "other"])

    rows = page.locator("#differences tbody tr")
    assert [rows.nth(i).inner_text().split("\t") for i in range(rows.count())] == [
        ["training.learning_rate", "0.001", "0.1"],
    ]


def test_a_page_that_follows_a_run_keeps_its_state(opened):
    """The page is loaded again after some seconds, with the reader's choices."""
    page = opened(names=["timed"], watch=1)
    page.locator("#loss .menu input").check()
    # The page may be loading again, without a plot.
    page.wait_for_function(f"{PLOT.format('loss')}?.layout?.yaxis.type === 'log'")
    with page.expect_navigation():
        pass
    page.wait_for_selector("html[data-ready=true]")

    assert layout_of(page, "loss", "yaxis.type") == "log"
    assert page.locator("#loss .menu input").is_checked()


def test_the_page_in_a_notebook(browser, folders, tmp_path):
    """In a notebook the page is in a frame of the output."""
    shown = RunPage(folders["timed"])._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<html><body>{shown}</body></html>", encoding="utf-8")
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")

    frame.locator("html[data-ready=true]").wait_for()
    assert frame.locator("h1").inner_text() == "timed"
    assert frame.locator("#loss .scatterlayer .trace").count() > 0
    context.close()


@pytest.mark.slow
def test_ten_thousand_steps_are_less_than_two_megabytes(tmp_path):
    """The page of a long run of many layers on two ranks has at most 2 MB."""
    steps = range(1, 10_001)
    noise = np.random.default_rng(0).lognormal(size=(len(steps), 40))
    for name in ("metrics.jsonl", "metrics_rank1.jsonl"):
        records = (
            {"step": s, "loss": row[0], "global_norm": row[1]}
            | {"local_norm": {f"model.layers.{i}": value for i, value in enumerate(row)}}
            for s, row in zip(steps, noise.tolist(), strict=True)
        )
        write_lines(tmp_path / name, records)
    states = (
        {"step": s}
        | {f"adam_{m}_norm/model.layers.{i}.weight": v for m in "mv" for i, v in enumerate(row)}
        | {f"max_attention_logit/model.layers.{i}/max": v for i, v in enumerate(row)}
        for s, row in zip(steps, noise.tolist(), strict=True)
    )
    write_lines(tmp_path / "training_state.jsonl", states)
    write_run_page([tmp_path], tmp_path / "page.html")

    assert (tmp_path / "page.html").stat().st_size < 2e6
