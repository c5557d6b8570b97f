"""The picture of a run shows a panel for each kind of number that was recorded."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mfwrap.report.page import write_run_page
from mfwrap.report.picture import draw_run
from support.run_folders import write_lines, write_run, write_trainer_run

NOT_FINITE = (192, 57, 43)
"""The color of non-finite local norms, as red, green and blue."""


def colors_of(file):
    """Return the number of pixels of each color in a picture."""
    with Image.open(file) as picture:
        found = picture.convert("RGB").getcolors(maxcolors=2**24)
    return {color: number for number, color in found}


def height_of(file):
    """Return the height of a picture in pixels."""
    with Image.open(file) as picture:
        return picture.size[1]


def test_non_finite_numbers(tmp_path):
    """Non-finite local norms have a special color in the picture."""
    lines = [
        {
            "step": step,
            "loss": "nan" if step == 2 else 3.0 / step,
            "overflow": step == 2,
            "global_norm": "nan" if step == 2 else 1.0,
            "local_norm": {"a": "nan" if step == 2 else 0.5, "b": 0.0},
            "max_grad_norm": 1.0,
        }
        for step in range(1, 5)
    ]
    lines.append({"step": 4, "eval_loss": 1.0})
    write_lines(tmp_path / "metrics.jsonl", lines)

    draw_run(tmp_path, tmp_path / "run.png", title="overflow at step 2")

    # The map has about 1200 x 350 pixels, and one of its eight cells is non-finite.
    assert colors_of(tmp_path / "run.png")[NOT_FINITE] > 20_000


@pytest.mark.parametrize("norm", [0.0, "nan"])
def test_no_positive_local_norm(tmp_path, norm):
    """A map without a positive norm is drawn, although a logarithmic scale is not possible."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0, "local_norm": {"a": norm}}])

    draw_run(tmp_path, tmp_path / "run.png")

    assert (tmp_path / "run.png").exists()


def test_panels_without_numbers_are_left_out(tmp_path):
    """Panels without numbers are left out, so a run with only losses has a smaller picture."""
    write_lines(tmp_path / "losses" / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    draw_run(tmp_path / "losses", tmp_path / "losses.png")
    draw_run(write_run(tmp_path / "all"), tmp_path / "all.png")

    assert height_of(tmp_path / "losses.png") < height_of(tmp_path / "all.png") / 2


def test_the_log_of_a_stock_trainer(tmp_path):
    """A run without metrics.jsonl is drawn from the Trainer's log."""
    draw_run(write_trainer_run(tmp_path), tmp_path / "run.png")

    assert len(colors_of(tmp_path / "run.png")) > 50


def test_a_limit_of_infinity_is_not_drawn(tmp_path):
    """With `max_grad_norm=inf`, which never clips, the picture is drawn without a limit."""
    pictures = {}
    for name, limit in {
        "none": {},
        "inf": {"max_grad_norm": "inf"},
        "1": {"max_grad_norm": 1.0},
    }.items():
        line = {"step": 2, "loss": 1.0, "global_norm": 2.0, **limit}
        write_lines(tmp_path / name / "metrics.jsonl", [line])
        draw_run(tmp_path / name, tmp_path / f"{name}.png", title="run")
        pictures[name] = colors_of(tmp_path / f"{name}.png")

    assert pictures["inf"] == pictures["none"] != pictures["1"]


def drawn_lines(folder, monkeypatch):
    """Draw a run, and return the points of the lines of its loss by their labels."""
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda one, *_, **__: figures.append(one)
    )
    draw_run(folder, folder / "run.png")
    lines = figures[0].axes[0].lines
    return {line.get_label(): line.get_xydata().tolist() for line in lines}


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("num_steps", [40, 300, 5000])
def test_the_smoothed_line_is_that_of_the_page(tmp_path, monkeypatch, browser, num_steps):
    """The picture and the page of a run show the same smoothed loss."""
    noise = np.random.default_rng(0).normal(0, 0.1, num_steps)
    losses = (2 + 3 * np.exp(-6 * np.arange(num_steps) / num_steps) + noise).tolist()
    lines = [{"step": n, "loss": "nan" if n == 20 else x} for n, x in enumerate(losses, 1)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    write_run_page([tmp_path], tmp_path / "run.html")
    page = browser.new_page()
    page.goto((tmp_path / "run.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    wanted = page.evaluate(
        "document.querySelector('#loss .plot').data.filter((one) => one.name.includes('smoothed'))"
        ".flatMap((one) => one.x.map((x, i) => [x, one.y[i]]))"
    )
    page.close()

    assert len(wanted) == min(num_steps, 1667)
    drawn = drawn_lines(tmp_path, monkeypatch)["training, smoothed"]
    assert drawn == [pytest.approx(point, rel=1e-4) for point in wanted]


def test_the_smoothed_line_does_not_lag(tmp_path, monkeypatch):
    """Where the loss falls fast, the smoothed line is as often below the loss as above it."""
    true = 5 - 0.02 * np.arange(250)
    losses = (true + np.random.default_rng(0).normal(0, 0.05, 250)).tolist()
    lines = [{"step": n, "loss": loss} for n, loss in enumerate(losses, 1)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    drawn = drawn_lines(tmp_path, monkeypatch)

    smooth = np.array(drawn["training, smoothed"])[:, 1]
    assert 100 < (smooth > losses).sum() < 150
    assert np.abs(smooth - true).max() < 0.15


def test_no_loss(tmp_path):
    """A run without a loss is refused, and no file is written."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "eval_loss": 2.0}])

    with pytest.raises(ValueError, match="has no step with a loss"):
        draw_run(tmp_path, tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()


def test_a_run_that_failed_in_its_first_step(tmp_path):
    """There is nothing to plot; the message has the error."""
    (tmp_path / "run.json").write_text('{"error": "ValueError: row 3"}')

    with pytest.raises(FileNotFoundError, match=r"no step; it failed: ValueError: row 3$"):
        draw_run(tmp_path, tmp_path / "run.png")


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    """If writing fails, the old picture stays, and no partial file is left."""
    folder = write_run(tmp_path / "run")
    draw_run(folder, folder / "run.png")
    old = (folder / "run.png").read_bytes()

    def break_off(_, file, **__) -> None:
        file.write_bytes(old[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", break_off)
    with pytest.raises(OSError, match="No space left"):
        draw_run(folder, folder / "run.png")

    assert (folder / "run.png").read_bytes() == old
    assert not list(folder.glob("*.partial"))


def drawn(folder, monkeypatch):
    """Return the figure that is drawn of a run."""
    figures, save = [], Figure.savefig

    def saved(figure, *args, **keywords):
        figures.append(figure)
        save(figure, *args, **keywords)

    monkeypatch.setattr(Figure, "savefig", saved)
    draw_run(folder, folder / "run.png")
    return figures[0]


def test_many_layers_have_labels_that_do_not_overlap(tmp_path, monkeypatch):
    """An adapter has two matrices with long names for each weight that it adapts."""
    names = [
        f"base_model.model.model.layers.{number}.q_proj.lora_{one}.default.weight"
        for number in range(40)
        for one in "AB"
    ]
    norms = {name: 1.0 + number for number, name in enumerate(names)}
    lines = [{"step": step, "loss": 1.0, "local_norm": norms} for step in (1, 2)]
    write_lines(tmp_path / "training_state.jsonl", lines)
    figure = drawn(tmp_path, monkeypatch)

    labels = [one for one in figure.axes[-2].get_yticklabels() if one.get_text()]
    places = sorted((one.get_window_extent().y0, one.get_window_extent().y1) for one in labels)
    assert labels[0].get_text() == "layers.0.q_proj.lora_A"
    assert len(labels) > 8
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(places))


@pytest.mark.parametrize(
    ("norm", "labels"), [(2.4e6, {"1e+06", "100000"}), (1.2, {"1"}), (30.0, {"20"})]
)
def test_texts_of_the_picture(tmp_path, monkeypatch, norm, labels):
    """The axis of the norms has labels for any range, and the last result is above the curve."""
    lines = [
        {"step": n, "loss": 9.0 / n, "global_norm": norm * (1 + n / 9), "max_grad_norm": 1.0}
        for n in range(1, 9)
    ]
    write_lines(tmp_path / "metrics.jsonl", [*lines, {"step": 8, "eval_loss": 1.25}])
    loss, norms = drawn(tmp_path, monkeypatch).axes
    low, high = norms.get_ylim()
    seen = [one.label1.get_text() for one in norms.yaxis.majorTicks if low <= one.get_loc() <= high]
    assert labels & {*seen}
    assert len(seen) >= 2
    assert loss.get_title(loc="right") == "last loss on held-out data: 1.25 with raw weights"
    assert not loss.texts
