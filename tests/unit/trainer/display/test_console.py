"""In a terminal a training is one progress bar, and elsewhere the lines of its monitor."""

import json
import logging
import re
import signal
import subprocess
import sys

import pytest
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from mfwrap import StepConfig
from mfwrap.callbacks import EMACallback, MFLossMonitor, TrainingStateMonitor
from mfwrap.termination import RankTermination
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.display.console import StepProgressCallback
from support.recipe_texts import PERCEPTRON, recipe_text
from support.terminal import COLUMNS, command_in_terminal, screen, written_in_terminal
from support.trainer_runs import Counting, new_trainer, tiny_llama


@pytest.fixture
def recipe(tmp_path):
    """Return a recipe of 6 updates over 48 rows, of which one has an infinite loss."""
    rows = [{"features": [n / 48.0, 1.0], "target": 1e25 if n == 20 else 0.5} for n in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = tmp_path / "small.yaml"
    file.write_text(
        recipe_text(
            data=None,
            # Standardized, the targets would be finite.
            model={"config": PERCEPTRON["config"] | {"standardize": False}},
            training={"disable_tqdm": False},
            callbacks=[{"type": "MFLossMonitor"}],
        )
        + "data: {type: json_lines, path: rows.jsonl}\n"
    )
    return file


def shown(recipe, *options):
    """Return what `mfwrap train` writes to a terminal of 100 columns."""
    words = [sys.executable, "-P", "-m", "mfwrap", "train", str(recipe), *options]
    return written_in_terminal(words, recipe.parent)


@pytest.mark.parametrize("anomalies", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_in_a_terminal(recipe, anomalies, is_forked):
    """There is one bar, one line for the skipped update, no dict, no record, no wrapped line."""
    options = ["--set", "monitor_config.monitor_on=true"] if anomalies else []
    if is_forked:
        written = command_in_terminal(["train", str(recipe), *options], recipe.parent)
    else:
        written = shown(recipe, *options)
    parts = re.split(r"[\r\n]+", written)
    bars = [part for part in parts if re.search(r"\d+/6 \[", part)]
    last = bars[-1]

    assert [part for part in parts if len(part) > COLUMNS] == []
    numbers = r"loss [\d.e+-]+, norm [\d.e+-]+, lr .*skipped 1, [\d.]+( GiB\])?"  # cut by the width
    assert re.search(rf"100%\|.*6/6 \[.*{numbers}", last)
    left = [line for line in screen(written) if re.search(r"\d+/\d+ \[", line)]
    assert len(left) == 1, left
    skips = [part for part in parts if "update skipped" in part]
    assert len(skips) == 1
    says = "non-finite loss.*" if anomalies else "update skipped, loss (inf|nan), norm"
    assert re.match(rf"step [1-6]: {says}", skips[0])
    assert "Epoch:[" not in written
    assert "{'loss'" not in written


def test_a_long_line_keeps_its_end(tmp_path, monkeypatch):
    """A terminal cuts the middle of a long anomaly, and says whether the update was skipped."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    lines = []
    monkeypatch.setattr(tqdm, "write", lambda _, line, **__: lines.append(line))
    anomaly = (
        "step 2: non-finite loss in layer model.layers.2 on rank 0, micro-batch 1: the first "
        "non-finite output is that of model.layers.2.mlp"
    )

    sample = f"Samples of step 2: {'a question':.<40} -> 'I have refunded it; it takes 3 days'"
    fitting = f"fitting; see {'file':->{COLUMNS - 1 - len('fitting; see ')}}"

    class Warns(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            file = tmp_path / "anomalies.jsonl"
            for line in (
                f"{anomaly}; update skipped; see {file}",
                f"{anomaly}; see {file}",
                sample,
                "short",
                fitting,
            ):
                logging.getLogger("mfwrap.callbacks").warning(line)

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    options = {"max_steps": 1, "disable_tqdm": False, "callbacks": [Warns()]}
    new_trainer(MFTrainer, tmp_path, **options).train()

    said = [line for line in lines if line.startswith(("step 2", "Samples", "short", "fitting"))]
    skipped, other, quoted, short, whole = said
    assert skipped == f"{anomaly[: COLUMNS - 1 - 19]}...; update skipped"
    assert other == f"{anomaly[: COLUMNS - 1 - 3]}..."
    assert quoted == f"{sample[: COLUMNS - 1 - 3]}..."
    assert short == "short"
    assert whole == fitting


def test_the_bar_is_drawn_when_tqdm_draws_it(tmp_path, monkeypatch, capfd):
    """The numbers of a step are in the bar, and do not draw it in every step."""

    class Rarely(TrainerCallback):
        def on_step_begin(self, *_, **__):
            for bar in tqdm._instances:
                bar.mininterval = 1e9

    settings = {"callbacks": [Rarely()], "save_strategy": "no", "eval_strategy": "no"}
    _, err = displayed(tmp_path, monkeypatch, capfd, is_terminal=True, **settings)

    assert re.findall(r"\d/4 \[", err) == ["0/4 [", "4/4 ["]
    assert re.search(r"4/4 \[.*loss [\d.]+, norm [\d.]+, lr", err)


def test_the_rate_of_a_resumed_training(tmp_path, monkeypatch):
    """It is that of the steps since the checkpoint: the bar begins at the checkpoint's step."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    settings = {"save_strategy": "steps", "save_steps": 2, "disable_tqdm": False}
    new_trainer(MFTrainer, tmp_path, max_steps=2, **settings).train()
    begun = []

    class Looks(TrainerCallback):
        def on_step_begin(self, *_, **__):
            (bar,) = tqdm._instances
            begun.append((bar.initial, bar.n))

    trainer = new_trainer(MFTrainer, tmp_path, max_steps=4, callbacks=[Looks()], **settings)
    trainer.train(resume_from_checkpoint=True)

    assert begun == [(2, 2), (2, 3)]


def test_a_step_without_a_report(tmp_path, monkeypatch):
    """The bar of a loop of the user's own counts a step that has no report."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    bar = StepProgressCallback(CallbackHandler([], None, None, None, None), RankTermination())
    args, state = TrainingArguments(str(tmp_path)), TrainerState(max_steps=4, global_step=1)
    bar.on_train_begin(args, state, None)
    bar.on_step_end(args, state, None)

    assert bar.training_bar.n == 1
    bar.end_with_error()


@pytest.mark.slow
def test_lines_in_a_terminal(recipe):
    """With ``console="lines"``, the records are printed instead of the bar."""
    written = shown(recipe, "--set", "callbacks.0.console=lines")

    assert written.count("Epoch:[") == 6
    assert not re.search(r"\d+/6 \[", written)
    assert "{'loss'" not in written


@pytest.mark.slow
def test_in_a_file(recipe):
    """Where standard error is a file, there are the monitor's records, no bar and no dict."""
    log = recipe.parent / "log"
    with log.open("w") as file:
        words = [sys.executable, "-P", "-m", "mfwrap", "train", str(recipe)]
        subprocess.run(words, cwd=recipe.parent, stdout=file, stderr=file, check=True)
    written = log.read_text()

    assert written.count("Epoch:[") == 6
    assert not re.search(r"\d+/6 \[", written)
    assert "\r" not in written
    assert "{'loss'" not in written


@pytest.mark.parametrize("is_quiet", [True, False])
def test_norms_of_each_parameter_are_not_printed(tmp_path, capfd, is_quiet):
    """They would fill the screen at each log; the Trainer's log has them."""
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=is_quiet,
    )
    step, monitor = StepConfig(local_norm=True), TrainingStateMonitor(local_norm_format="trackers")
    trainer = MFTrainer(
        tiny_llama(), arguments, train_dataset=Counting(8), callbacks=[monitor], step=step
    )
    trainer.train()
    printed = capfd.readouterr().out

    assert "'loss_scale'" in printed
    assert "local_norm" not in printed
    assert "local_norm/lm_head.weight" in trainer.state.log_history[0]


def _written(kind, folder, capfd, *, is_quiet):
    """Train two steps with a monitor that says them, and return what was written."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=is_quiet,
    )
    callbacks = [MFLossMonitor()]
    kind(tiny_llama(), arguments, train_dataset=Counting(8), callbacks=callbacks).train()
    return "".join(capfd.readouterr())


class _LogsMore(MFTrainer):
    def compute_loss(self, *args, **keywords):
        self.log({"distillation": 0.25})
        return super().compute_loss(*args, **keywords)


@pytest.mark.parametrize("is_quiet", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_subclass_logs_is_shown(tmp_path, monkeypatch, capfd, is_terminal, is_quiet):
    """A monitor that says the steps in place of the Trainer's dict does not know it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    written = _written(_LogsMore, tmp_path, capfd, is_quiet=is_quiet)

    assert len(re.findall(r"distillation'?:? '?0\.25", written)) == 2
    assert "{'loss'" not in written


class _LogsRewards(MFTrainer):
    def log(self, logs, *args, **keywords):
        more = {"reward": 0.25, "rewards/length/mean": 0.5, "clip_ratio": 0.0}
        super().log({**logs, **more} if "loss" in logs else logs, *args, **keywords)


@pytest.mark.parametrize("is_quiet", [True, False])
def test_rewards_that_are_logged_with_the_loss(tmp_path, capfd, is_quiet):
    """TRL's trainers do so; a monitor that says the steps knows none of them."""
    written = _written(_LogsRewards, tmp_path, capfd, is_quiet=is_quiet)

    assert len(re.findall(r"\breward'?:? '?0\.25", written)) == 2
    assert len(re.findall(r"rewards/length/mean'?:? '?0\.5", written)) == 2
    assert "clip_ratio" not in written


@pytest.mark.parametrize("monitored", [True, False])
def test_without_a_bar(tmp_path, capfd, caplog, monitored):
    """With an MFLossMonitor, the Trainer prints no dict of a step; evaluations stay."""
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    MFTrainer(
        tiny_llama(),
        arguments,
        train_dataset=Counting(8),
        eval_dataset=Counting(4),
        callbacks=[MFLossMonitor()] if monitored else [],
    ).train()
    printed = capfd.readouterr().out

    assert caplog.text.count("Epoch:[") == (3 if monitored else 0)
    assert printed.count("{'loss'") == (0 if monitored else 3)
    assert printed.count("{'train_runtime'") == (not monitored)
    assert printed.count("{'eval_loss'") == 1


def test_an_error_leaves_the_terminal(tmp_path, monkeypatch):
    """After a training that raised, the logger has no handler of the bar, and the bar is closed."""

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                msg = "no more"
                raise OSError(msg)

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    before = list(logging.getLogger("mfwrap").handlers)
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[Failing()], disable_tqdm=False)
    [bar] = [one for one in trainer.callback_handler.callbacks if hasattr(one, "training_bar")]

    with pytest.raises(OSError, match="no more"):
        trainer.train()

    assert logging.getLogger("mfwrap").handlers == before
    assert bar.training_bar is None


def displayed(tmp_path, monkeypatch, capfd, *, is_terminal, **arguments):
    """Train for four updates with evaluations and checkpoints; return what is written."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    trainer = new_trainer(
        MFTrainer,
        tmp_path / "run",
        disable_tqdm=False,
        **{"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        | arguments,
    )
    trainer.train()
    captured = capfd.readouterr()
    return captured.out, captured.err


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("monitored", [True, False])
def test_evaluations_are_shown(tmp_path, monkeypatch, capfd, is_terminal, monitored):
    """Each evaluation is shown once, also beside the records of `MFLossMonitor`."""
    callbacks = [MFLossMonitor()] if monitored else []
    texts = displayed(tmp_path, monkeypatch, capfd, is_terminal=is_terminal, callbacks=callbacks)
    found = [line for line in "".join(texts).split("\n") if "eval_loss" in line]

    assert len(found) == 2, texts
    if is_terminal or monitored:
        assert [re.search(r"step (\d): eval_loss [\d.]+$", line)[1] for line in found] == ["2", "4"]


def test_evaluations_of_averages_are_called_so(tmp_path, monkeypatch, capfd):
    """With an `EMACallback`, evaluations during training have the prefix ``ema_``."""
    callbacks = [EMACallback(0.5)]
    texts = displayed(tmp_path, monkeypatch, capfd, is_terminal=True, callbacks=callbacks)

    found = re.findall(r"step (\d): (\w*eval_\w+) ", "".join(texts))
    assert found == [("2", "ema_eval_loss"), ("4", "ema_eval_loss")]


def test_three_lines_at_the_end(tmp_path, monkeypatch, capfd):
    """The last lines are the result, the folder, and the command that shows the run."""
    enable_progress_bar()  # another test may have disabled it
    out, err = displayed(tmp_path, monkeypatch, capfd, is_terminal=True)
    folder = tmp_path / "run"

    assert re.fullmatch(
        rf"result: 4 steps, loss [\d.]+\nrun folder: {folder}\nnext: mfwrap report {folder}\n", out
    )
    assert "Writing model shards" not in err
    assert is_progress_bar_enabled()


def test_the_end_of_early_stopping(tmp_path, monkeypatch, capfd):
    """The result says that a callback has ended the training, and the best metric."""
    out, _ = displayed(
        tmp_path,
        monkeypatch,
        capfd,
        is_terminal=True,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        max_steps=8,
        callbacks=[EarlyStoppingCallback(1, early_stopping_threshold=100.0)],
    )

    assert re.match(
        r"result: 4 of 8 steps, ended by a callback, loss [\d.]+, best eval_loss [\d.]+\n", out
    )


def test_no_lines_after_a_signal(tmp_path, monkeypatch, capfd):
    """A training that a signal has stopped says how to continue, and nothing about its end."""

    class Signal(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        displayed(tmp_path, monkeypatch, capfd, is_terminal=True, callbacks=[Signal()])
    captured = capfd.readouterr()

    assert "result:" not in captured.out
    assert "continue with" in captured.err


def test_without_records_the_weights_are_next(tmp_path, monkeypatch, capfd):
    """Without records and checkpoints, there is no page of the run."""
    out, _ = displayed(
        tmp_path, monkeypatch, capfd, is_terminal=True, save_strategy="no", eval_strategy="no"
    )

    assert out.endswith("next: trainer.save_model() writes the weights\n")
