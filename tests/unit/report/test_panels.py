"""Each panel shows the numbers of the run; panels without numbers are left out."""

import numpy as np
import pytest

from mfwrap.records.run_record import read_run
from mfwrap.report.panels import panels_of
from support.run_folders import write_lines, write_run, write_trainer_run


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
    """A run on two ranks has all panels, in this order."""
    assert list(shown) == [
        *("loss", "learning_rate", "loss_scale", "global_norm", "local-norms"),
        *("ranks-0", "throughput", "others"),
    ]


def test_panels_without_numbers_are_left_out(tmp_path):
    """A run that recorded only its loss has one panel."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])

    assert list(panels(tmp_path)) == ["loss"]


def test_attention_logits(tmp_path):
    """The panel shows the largest logit of each module, the modules with the largest ones first."""
    ends = {f"max_attention_logit/layers.{number}/max": 10.0 * number for number in range(8)}
    head = {"max_attention_logit/layers.7/head_0": 1.0}
    records = [{"step": step, "loss": 2.0, **ends, **head} for step in (5, 10)]
    write_lines(tmp_path / "training_state.jsonl", records)
    shown = traces(panels(tmp_path)["attention_logits"])

    assert list(shown) == [f"layers.{number}" for number in (7, 6, 5, 4, 3, 2)]
    assert shown["layers.7"].y == (70.0, 70.0)


def test_loss(shown):
    """The panel shows the training loss, both evaluation losses and the non-finite step."""
    loss = traces(shown["loss"])

    assert loss["training, each step"].y[0] == pytest.approx(4 * np.exp(-1 / 20))
    assert loss["training, each step"].y[19] is None
    assert loss["loss not finite"].x == (20,)
    assert (loss["evaluation"].x, loss["evaluation"].y) == ((0, 40), (5.0, 1.25))
    assert loss["evaluation, averaged weights"].y == (1.125,)


def test_loss_scale(shown, tmp_path):
    """The axis has powers of two; overflows of a cell and of a Trainer's log are marked."""
    scale = traces(shown["loss_scale"])

    assert (scale["overflow"].x, scale["overflow"].y) == ((20,), (512.0,))
    assert shown["loss_scale"].figure.layout.yaxis.ticktext == ("2^9", "2^10")
    of_trainer = panels(write_trainer_run(tmp_path))
    assert traces(of_trainer["loss_scale"])["overflow"].x == (4, 8)


def test_global_norm(shown):
    """The panel shows the non-finite step and the clipping limit."""
    norm = traces(shown["global_norm"])

    assert norm["norm not finite"].x == (20,)
    layout = shown["global_norm"].figure.layout
    assert layout.shapes[0].y0 == 1.5
    # On a logarithmic axis, plotly positions labels by the logarithm.
    assert 10 ** layout.annotations[0].y == pytest.approx(1.5)


def test_episodes_are_spans(shown):
    """Each episode is a span in every panel with steps, and in no other panel."""
    for panel in shown.values():
        spans = [shape for shape in panel.figure.layout.shapes if shape.name == "episode"]
        expected = [(11.5, 12.5), (29.5, 30.5)] if panel.has_steps else []
        assert [(span.x0, span.x1) for span in spans] == expected


def test_noise_scale(tmp_path):
    """The gradient noise scale has a panel of its own."""
    records = [{"step": step, "noise_scale": 64.0} for step in (100, 200)]
    write_lines(tmp_path / "metrics.jsonl", records)

    assert list(panels(tmp_path)) == ["noise_scale"]


def test_several_runs(tmp_path):
    """Each run has a name and a color of its own, and all panels have the same range of steps."""
    both = panels(write_run(tmp_path / "a"), write_run(tmp_path / "<b>", num_steps=60))

    lines = list(both["learning_rate"].figure.data)
    assert [line.name for line in lines] == ["a: Learning rate", "&lt;b&gt;: Learning rate"]
    assert lines[0].line.color != lines[1].line.color
    assert both["loss"].figure.layout.xaxis.range == both["global_norm"].figure.layout.xaxis.range


def test_curves_of_the_training_come_before_those_of_evaluations(tmp_path):
    """The panel shows the throughput of training steps first; evaluations are hidden."""
    rows = [{"step": s, "eval_steps_per_second": 2.0, "throughput": 3.0} for s in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    drawn = panels(tmp_path)["throughput"].figure.data

    assert [(trace.name, trace.visible) for trace in drawn] == [
        ("throughput", True),
        ("eval_steps_per_second", False),
    ]


def test_everything_else_is_shown(shown):
    """Curves without a panel of their own are shown in the last panels."""
    assert [trace.name for trace in shown["throughput"].figure.data] == ["throughput"]
    assert [trace.name for trace in shown["others"].figure.data] == ["weight_norm"]
