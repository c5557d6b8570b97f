"""Each panel shows the numbers of the run, and only panels that have some are there."""

import numpy as np
import pytest

from mfwrap.records.run_record import read_run
from mfwrap.report.panels import panels_of
from support.run_folders import GROUPS, write_lines, write_run, write_trainer_run


def panels(*folders):
    """Return the panels by name."""
    return {panel.name: panel for panel in panels_of([read_run(folder) for folder in folders])}


def traces(panel):
    """Return the traces of a panel by name."""
    return {trace.name: trace for trace in panel.figure.data}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return the panels of a run on two ranks."""
    return panels(write_run(tmp_path_factory.mktemp("runs") / "one", num_ranks=2))


def test_which_panels_there_are(shown):
    """In the order in which they are read."""
    assert list(shown) == [
        *("loss", "learning_rate", "loss_scale", "global_norm", "local-norms"),
        *("ranks-0", "throughput", "others"),
    ]


def test_panels_without_numbers_are_left_out(tmp_path):
    """A run that has recorded its loss alone has one panel."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])

    assert list(panels(tmp_path)) == ["loss"]


def test_loss(shown):
    """Training, both evaluations, and the step that has no finite one."""
    loss = traces(shown["loss"])

    assert loss["training, each step"].y[0] == pytest.approx(4 * np.exp(-1 / 20))
    assert loss["training, each step"].y[19] is None
    assert loss["loss not finite"].x == (20,)
    assert (loss["evaluation"].x, loss["evaluation"].y) == ((0, 40), (5.0, 1.25))
    assert loss["evaluation, averaged weights"].y == (1.125,)


def test_loss_scale(shown, tmp_path):
    """Powers of two, with the steps that overflowed, or in whose log the count had risen."""
    scale = traces(shown["loss_scale"])

    assert (scale["overflow"].x, scale["overflow"].y) == ((20,), (512.0,))
    assert shown["loss_scale"].figure.layout.yaxis.ticktext == ("2^9", "2^10")
    of_trainer = panels(write_trainer_run(tmp_path))
    assert traces(of_trainer["loss_scale"])["overflow"].x == (4, 8)


def test_global_norm(shown):
    """With the spike and the limit."""
    norm = traces(shown["global_norm"])

    assert (norm["spike"].x, norm["spike"].y) == ((12,), (40.0,))
    assert norm["norm not finite"].x == (20,)
    layout = shown["global_norm"].figure.layout
    assert layout.shapes[0].y0 == 1.5
    # On a logarithmic axis a label stands at a power of ten.
    assert 10 ** layout.annotations[0].y == pytest.approx(1.5)


def test_local_norms(shown):
    """A map for each rank, of which one is shown; the numbers themselves are in the hover text."""
    first, second = shown["local-norms"].figure.data

    assert (first.visible, second.visible) == (True, False)
    assert first.y == GROUPS
    assert first.customdata[1][3] == pytest.approx(2 / 4)
    assert second.customdata[2][9] == pytest.approx(6 / 10)
    assert first.z[1][3] == pytest.approx(np.log10(2 / 4))
    assert first.z[0][19] is None


def test_many_steps_share_a_column(tmp_path):
    """It shows the largest norm of them."""
    lines = [{"step": s, "local_norm": {"a": 100.0 if s == 1999 else 1.0}} for s in range(1, 2001)]
    write_lines(tmp_path / "metrics.jsonl", lines)

    (norms,) = panels(tmp_path)["local-norms"].figure.data

    assert len(norms.x) <= 800
    assert [x for x, z in zip(norms.x, norms.customdata[0], strict=True) if z == 100.0] == [1999]


def test_layer_by_rank(shown):
    """A map for each step, of which the last is shown."""
    figure = shown["ranks-0"].figure

    *others, last = figure.data
    assert (last.visible, {other.visible for other in others}) == (True, {False})
    assert last.x == ("rank 0", "rank 1")
    assert last.customdata[2] == pytest.approx((3 / 40, 6 / 40))
    assert figure.layout.sliders[0].steps[-1].label == "40"


def test_several_runs(tmp_path):
    """Each has its name and colour in every panel."""
    both = panels(write_run(tmp_path / "a"), write_run(tmp_path / "<b>", num_steps=60))

    lines = list(both["learning_rate"].figure.data)
    assert [line.name for line in lines] == ["a: Learning rate", "&lt;b&gt;: Learning rate"]
    assert lines[0].line.color != lines[1].line.color
    assert both["loss"].figure.layout.xaxis.range == both["global_norm"].figure.layout.xaxis.range


def test_curves_of_the_training_come_before_those_of_evaluations(tmp_path):
    """The menu begins with the throughput of steps."""
    rows = [{"step": s, "eval_steps_per_second": 2.0, "throughput": 3.0} for s in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    drawn = panels(tmp_path)["throughput"].figure.data

    assert [(trace.name, trace.visible) for trace in drawn] == [
        ("throughput", True),
        ("eval_steps_per_second", False),
    ]


def test_everything_else_is_shown(shown):
    """Nothing that was recorded is lost."""
    assert [trace.name for trace in shown["throughput"].figure.data] == ["throughput"]
    assert [trace.name for trace in shown["others"].figure.data] == ["weight_norm"]
