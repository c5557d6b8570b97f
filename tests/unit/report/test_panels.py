"""Each panel shows the numbers of the run; panels without numbers are left out."""

import json
import math

import numpy as np
import pytest

from mfwrap.records.run_record import Curve, RunRecord, read_run
from mfwrap.report.panels import axes_of, has_averages, panels_of, spans_of
from support.run_folders import write_lines, write_run, write_trainer_run


def panels(*folders):
    """Return the panels by name."""
    return {panel.name: panel for panel in panels_of([read_run(folder) for folder in folders])}


def traces(panel):
    """Return the traces of a panel by name."""
    return {trace["name"]: trace for trace in panel.content["traces"]}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return the panels of a run on two ranks."""
    return panels(write_run(tmp_path_factory.mktemp("runs") / "one", num_ranks=2))


def test_which_panels_there_are(shown):
    """A run on two ranks has all panels, in this order."""
    assert list(shown) == [
        *("loss", "learning_rate", "loss_scale", "global_norm", "local-norms"),
        *("ranks-0", "rank-norms-0", "throughput", "others"),
    ]


def test_panels_without_numbers_are_left_out(tmp_path):
    """A run that recorded only its loss has one panel."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])

    assert list(panels(tmp_path)) == ["loss"]


def test_memory(tmp_path):
    """Bytes are shown in GiB, counts and shares as they are, and nothing of it is shown twice."""
    gib = 2**30
    record = {"step": 1, "max_memory_allocated": 3 * gib, "num_alloc_retries": 2}
    write_lines(tmp_path / "memory.jsonl", [record | {"max_memory_section": "update"}])
    shown = panels(tmp_path)

    assert list(shown) == ["memory"]
    assert shown["memory"].content["choices"] == ["allocated, peak", "allocation retries"]
    assert shown["memory"].content["units"] == ["GiB", ""]
    assert [trace["y"] for trace in shown["memory"].content["traces"]] == [[3], [2]]


def test_rewards(tmp_path):
    """They come first in a training that generates; in any other they are some of the rest."""
    rewards = {"rewards/b/mean": 0.5, "rewards/a/mean": 0.25}
    for run, more in (("grpo", {"reward": 0.75, "reward_std": 0.1}), ("dpo", {})):
        write_lines(tmp_path / run / "metrics.jsonl", [{"step": 1, "loss": 0.0} | rewards | more])
    shown = panels(tmp_path / "grpo")

    assert list(shown) == ["rewards", "loss"]
    names = ["reward", "reward_std", "rewards/a/mean", "rewards/b/mean"]
    assert shown["rewards"].content["choices"] == names
    assert [trace["y"] for trace in shown["rewards"].content["traces"]] == [
        *([0.75], [0.1], [0.25], [0.5])
    ]
    shown = panels(tmp_path / "dpo")
    assert list(shown) == ["loss", "others"]
    assert shown["others"].content["choices"] == names[2:]


def test_evaluations_by_rewards(tmp_path):
    """The reward is shown at first; statistics of answers are curves, not layers."""
    names = ("num_tokens", "clip_ratio/low", "clip_ratio/high", "clip_ratio/max", "clip_ratio/min")
    evaluation = {f"eval_{name}": 1.0 for name in (*names, "reward")}
    lengths = {f"completions/{name}": 1.0 for name in ("mean", "min", "max", "clipped")}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 0.5} | evaluation | lengths])
    shown = panels(tmp_path)

    assert list(shown) == ["rewards", "evaluations", "others"]
    assert shown["evaluations"].content["choices"][0] == "eval_reward"
    assert shown["others"].content["choices"] == sorted(lengths)


def test_losses_by_name(tmp_path):
    """They have a menu of their own, with the losses of all steps and the means of others."""
    records = [{"step": step, "loss": 2.0, "losses": {"kl_loss": step / 2}} for step in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", records)
    log = [{"step": 2, "losses/kl_loss": 9.0, "losses/ce_loss": 3.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    shown = panels(tmp_path)

    assert list(shown) == ["loss", "terms"]
    assert shown["terms"].content["choices"] == ["losses/ce_loss", "losses/kl_loss"]
    terms = traces(shown["terms"])
    assert [trace["y"] for trace in terms.values()] == [[3.0], [0.5, 1.0]]


def test_loss_by_source(tmp_path):
    """One run has its sources in one panel, each in a color; several runs have a menu of them."""
    names = ("web", "books", "code", "forum")
    for run in ("one", "two"):
        records = [
            {"step": step, "loss": 2.0}
            | {f"loss/{name}": 2 + step * place for place, name in enumerate(names)}
            | {f"tokens/{name}": 10 * step for name in names}
            for step in (10, 20)
        ]
        write_lines(tmp_path / run / "metrics.jsonl", records)
    alone = panels(tmp_path / "one")
    sources = traces(alone["sources"])

    assert list(alone) == ["loss", "sources", "others"]
    assert list(sources) == list(names)
    assert [trace["color"] for trace in sources.values()] == [0, 1, 2, 3]
    assert (sources["code"]["x"], sources["code"]["y"]) == ([10, 20], [22, 42])
    assert alone["others"].content["choices"] == sorted(f"tokens/{name}" for name in names)
    both = panels(tmp_path / "one", tmp_path / "two")
    assert both["sources"].content["choices"] == sorted(f"loss/{name}" for name in names)


def test_loss(shown):
    """The panel shows the training loss, both evaluation losses and the non-finite step."""
    loss = traces(shown["loss"])

    assert loss["training"]["y"][0] == pytest.approx(4 * np.exp(-1 / 20), rel=1e-4)
    assert loss["training"]["y"][19] is None
    assert loss["training"]["bad"] == [20]
    evaluation, averaged = loss["evaluation"], loss["evaluation, averaged weights"]
    assert (evaluation["x"], evaluation["y"]) == ([0, 40], [5, 1.25])
    assert averaged["y"] == [1.125]
    assert (evaluation["weights"], averaged["weights"]) == ("raw", "averaged")
    assert not shown["loss"].content["log"]


def test_a_diverged_run_needs_a_logarithmic_axis(tmp_path):
    """If the loss of a run is far above all others, the axis is logarithmic at first."""
    lines = [{"step": s, "loss": 2.0 if s < 90 else 10.0 ** (s - 80)} for s in range(1, 101)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    negative = [{"step": s, "loss": -1.0 if s < 90 else 1e6} for s in range(1, 101)]
    write_lines(tmp_path / "negative" / "metrics.jsonl", negative)

    assert panels(tmp_path)["loss"].content["log"]
    assert not panels(tmp_path / "negative")["loss"].content["log"]


def test_rates_that_differ_by_far_have_a_logarithmic_axis(tmp_path):
    """A run with a small learning rate is not a line at zero beside one with a large rate."""
    for name, rate in (("small", 0.003), ("large", 1.0), ("near", 0.01)):
        lines = [{"step": s, "learning_rate": rate * s / 5} for s in range(6)]
        write_lines(tmp_path / name / "metrics.jsonl", lines)

    assert panels(tmp_path / "small", tmp_path / "large")["learning_rate"].content["log"]
    assert not panels(tmp_path / "small", tmp_path / "near")["learning_rate"].content["log"]


def test_counts_are_stairs(tmp_path):
    """What only grows in whole numbers is not smoothed, because there are no fractions of it."""
    lines = [
        {"step": s, "skipped_steps": s // 4, "falls": -s, "share": s / 3} for s in range(1, 10)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    found = traces(panels(tmp_path)["others"])

    assert found["skipped_steps"]["shape"] == "hv"
    assert "smooth" not in found["skipped_steps"]
    for name in ("falls", "share"):
        assert found[name]["smooth"]
        assert "shape" not in found[name]


def test_what_is_constant_is_the_last_choice(tmp_path):
    """The menu of other curves opens with one that changes."""
    lines = [{"step": s, "constant": 0.0, "varies": 1.0 * s, "zeros": "nan"} for s in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", lines)

    assert panels(tmp_path)["others"].content["choices"] == ["varies", "zeros", "constant"]


def test_evaluations(tmp_path):
    """Metrics of evaluations have a panel; a metric and that of averaged weights are one choice."""
    metrics = {"eval_accuracy": 0.5, "ema_eval_accuracy": 0.6, "eval_f1": 0.4, "eval_loss": 1.0}
    times = {"eval_samples_per_second": 9.0, "eval_runtime": 2.0}
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, **metrics, **times} for s in (1, 2)])
    shown = panels(tmp_path)

    assert shown["evaluations"].content["choices"] == ["eval_accuracy", "eval_f1"]
    found = traces(shown["evaluations"])
    assert found["eval_accuracy"]["choice"] == 0
    assert found["eval_accuracy, averaged weights"]["choice"] == 0
    assert found["eval_f1"]["choice"] == 1
    assert has_averages(shown.values())
    assert shown["throughput"].content["choices"] == ["eval_samples_per_second", "eval_runtime"]
    assert shown["throughput"].content["units"] == ["samples/s", "s"]


def test_loss_scale(shown, tmp_path):
    """The axis has powers of two; overflows of a cell and of a Trainer's log are marked."""
    scale = traces(shown["loss_scale"])

    assert (scale["overflow"]["x"], scale["overflow"]["y"]) == ([20], [512])
    assert shown["loss_scale"].content["ticks"] == [9, 10]
    of_trainer = panels(write_trainer_run(tmp_path))
    assert traces(of_trainer["loss_scale"])["overflow"]["x"] == [4, 8]


def test_no_loss_scale(tmp_path):
    """A run whose scale is always 1 and without overflows has no panel of it."""
    for scale in (1.0, 1024.0):
        lines = [{"step": step, "loss": 1.0, "loss_scale": scale} for step in (1, 2)]
        write_lines(tmp_path / str(scale) / "metrics.jsonl", lines)

    assert "loss_scale" not in panels(tmp_path / "1.0")
    assert "loss_scale" in panels(tmp_path / "1024.0")


def test_global_norm(shown):
    """The panel shows the non-finite step and the clipping limit."""
    content = shown["global_norm"].content

    assert traces(shown["global_norm"])["global norm"]["bad"] == [20]
    assert content["limits"] == [{"run": 0, "y": 1.5, "text": "clipped above 1.5"}]
    assert content["log"]


def test_episodes_are_spans(tmp_path):
    """Each episode is a span with its run."""
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]

    assert spans_of(runs) == [[0, 12, 12], [0, 30, 30], [1, 12, 12], [1, 30, 30]]


def test_noise_scale(tmp_path):
    """The gradient noise scale has a panel of its own, in samples."""
    records = [{"step": step, "noise_scale": 64.0} for step in (100, 200)]
    write_lines(tmp_path / "metrics.jsonl", records)

    assert list(panels(tmp_path)) == ["noise_scale"]
    assert panels(tmp_path)["noise_scale"].content["unit"] == "samples"


def test_several_runs(tmp_path):
    """Each trace has the name and the number of its run."""
    both = panels(write_run(tmp_path / "a"), write_run(tmp_path / "<b>", num_steps=60))

    lines = both["learning_rate"].content["traces"]
    assert [line["name"] for line in lines] == ["a: Learning rate", "<b>: Learning rate"]
    assert [line["run"] for line in lines] == [0, 1]


def test_curves_of_the_training_come_before_those_of_evaluations(tmp_path):
    """The panel shows the throughput of training steps first, and each curve has its unit."""
    rows = [{"step": s, "eval_steps_per_second": 2.0, "throughput": 3.0} for s in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    content = panels(tmp_path)["throughput"].content

    assert content["choices"] == ["throughput", "eval_steps_per_second"]
    assert content["units"] == ["samples/s", "steps/s"]
    assert [trace["choice"] for trace in content["traces"]] == [0, 1]


def test_everything_else_is_shown(shown):
    """Curves without a panel of their own are shown in the last panels."""
    assert shown["throughput"].content["choices"] == ["throughput"]
    assert shown["others"].content["choices"] == ["weight_norm"]


def test_axes():
    """Tokens and seconds can take the place of the step, unless they fall or have one value."""
    curves = {
        "tokens": Curve([10, 20], [4096.0, 8192.0]),
        "seconds": Curve([10, 20], [3.0, 2.0]),
    }

    assert axes_of(RunRecord("run", curves, {}, [])) == {
        "tokens": {"x": [10, 20], "y": [4096, 8192]}
    }
    assert axes_of(RunRecord("run", {"tokens": Curve([1], [math.pi])}, {}, [])) == {}
