"""Callbacks read the same weights, whatever their order: monitors those of the training."""

import itertools
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.average.swap import training_weights
from mfwrap.callbacks import (
    CheckpointMonitor,
    EMACallback,
    EvalCallback,
    MFLossMonitor,
    TrainingStateMonitor,
)
from mfwrap.records.json_lines import read_json_lines
from mfwrap.trainer import MFTrainer

NUM_CALLBACKS = 6
ORDERS = list(itertools.permutations(range(NUM_CALLBACKS)))
SAMPLE = [ORDERS[-1], ORDERS[250], ORDERS[500]]
FILES = ("training_state.jsonl", "anomalies.jsonl", "checkpoint_health.jsonl")
WEIGHTS = "model.safetensors"
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_") and "init" not in name]
OF_EVALUATIONS = {"on_prediction_step", "on_evaluate", "on_log of results"}


class Line(nn.Module):
    """A linear regression that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs, labels):
        """Return the loss."""
        return {"loss": (self.layer(inputs).squeeze(-1) - labels).square().mean()}


class Weights(TrainerCallback):
    """Record the weights of the training, and those in the model, at each event."""

    def __init__(self) -> None:
        self.seen, self.plain = [], []
        for event in EVENTS:
            setattr(self, event, self._recording(event))

    def _recording(self, event):
        def record(_args, state, _control, model=None, logs=(), **_):
            of_results = any("eval_" in name for name in logs)
            when = state.global_step, f"{event} of results" if of_results else event
            self.plain.append((*when, model.state_dict()["layer.weight"].tolist()))
            with training_weights():
                self.seen.append((*when, model.layer.weight.tolist()))

        return record


def points(number):
    """Return rows for `Line`."""
    made = torch.randn(number, 4, generator=torch.Generator().manual_seed(number))
    return [{"inputs": point, "labels": point.sum()} for point in made]


def run(folder, order, *, evaluate=True, names=("one", "two")):
    """Train with callbacks in an order; return what each of them has recorded and written."""
    AcceleratorState._reset_state(reset_partial_state=True)
    args = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = points(8)
    trainer = MFTrainer(
        Line(),
        args,
        train_dataset=points(32),
        eval_dataset=dict.fromkeys(names, rows) if names else rows,
        step=StepConfig(local_norm=True),
        ema=lambda model: ExponentialMovingAverage(model, 0.5),
    )
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("inputs", "labels")}
    losses, weights = [], Weights()

    def evaluated():
        with torch.no_grad():
            losses.append(trainer.model(**batch)["loss"].item())

    callbacks = [
        EMACallback(evaluate=evaluate),
        TrainingStateMonitor(
            step_interval=1,
            state_interval=1,
            weight_state_format="jsonl",
            update_ratio_format="jsonl",
            local_norm_format="jsonl",
            fingerprints=True,
        ),
        CheckpointMonitor(save_checkpoint_steps=2),
        EvalCallback(evaluated, step_interval=1),
        MFLossMonitor(),
        weights,
    ]
    for number in order:
        trainer.add_callback(callbacks[number])
    trainer.train()
    records = {name: read_json_lines(folder / name) for name in FILES if (folder / name).exists()}
    for record in itertools.chain.from_iterable(records.values()):
        for key in [key for key in record if "eval_" in key]:
            del record[key]
    saved = {
        path.relative_to(folder): load_file(path)["layer.weight"].tolist()
        for path in folder.rglob(WEIGHTS)
    }
    log = [
        {name: value for name, value in entry.items() if name.endswith("_loss")}
        for entry in trainer.state.log_history
    ]
    final = trainer.model.layer.weight.tolist()
    return records, saved, losses, weights.seen, final, log, weights.plain


def assert_same_in_each_order(folder, orders, names):
    """Check the runs, and that their records are those of a run that evaluates no averages."""
    first = run(folder / "first", ORDERS[0], names=names)
    *raw, log, _ = run(folder / "raw", ORDERS[0], evaluate=False, names=names)

    assert first[0]["training_state.jsonl"]
    assert all(one["healthy"] for one in first[0].get("checkpoint_health.jsonl", ()))
    assert not first[0].get("anomalies.jsonl")
    assert len(first[2]) == 6
    assert list(first[:-2]) == raw
    assert first[-2] != log  # the averages are evaluated
    differ = [seen[1] for seen, plain in zip(first[3], first[-1], strict=True) if seen != plain]
    assert set(differ) == OF_EVALUATIONS
    assert len(differ) == sum(seen[1] in OF_EVALUATIONS for seen in first[3])
    for number, order in enumerate(orders):
        assert run(folder / str(number), order, names=names) == first, order


@pytest.mark.parametrize("names", [(), ("one", "two")], ids=["one data set", "two data sets"])
def test_some_orders(tmp_path, names):
    """Records, weights, evaluations and files are the same."""
    assert_same_in_each_order(tmp_path, SAMPLE, names)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_orders(tmp_path, part):
    """Records, weights, evaluations and files are the same in all 720 orders."""
    assert_same_in_each_order(tmp_path, ORDERS[part::8], ("one", "two"))


class Saving(TrainerCallback):
    """Save the model and a checkpoint, and read the weights, in an event of an evaluation."""

    def __init__(self, event) -> None:
        self.saved = []
        setattr(self, event, self._save)

    def _save(self, args, state, _control, model=None, **_):
        if state.global_step in {step for step, _ in self.saved}:
            return  # the second data set
        before = model.layer.weight.clone()
        folder = Path(args.output_dir)
        self.trainer.save_model(str(folder / "own"))
        self.trainer._save_checkpoint(model, None)
        files = [folder / name / WEIGHTS for name in ("own", f"checkpoint-{state.global_step}")]
        assert torch.equal(before, model.layer.weight)
        saved = [load_file(file)["layer.weight"].tolist() for file in files]
        self.saved.append((state.global_step, saved))


@pytest.mark.parametrize("event", ["on_prediction_step", "on_evaluate"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_saved_within_an_evaluation(tmp_path, event, is_first):
    """It has the weights of the training, and the evaluation goes on with the averages."""
    saving, weights, average = Saving(event), Weights(), EMACallback(0.5)
    callbacks = [saving, average] if is_first else [average, saving]
    args = TrainingArguments(
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=0.1,
        use_cpu=True,
        report_to="none",
    )
    data = {"one": points(8), "two": points(4)}
    saving.trainer = MFTrainer(
        Line(), args, train_dataset=points(32), eval_dataset=data, callbacks=[*callbacks, weights]
    )
    saving.trainer.train()

    ends = {step: weight for step, event, weight in weights.seen if event == "on_step_end"}
    assert saving.saved == [(step, [ends[step]] * 2) for step in (2, 4)]
    evaluated = [(step, weight) for step, event, weight in weights.plain if event in OF_EVALUATIONS]
    assert {step for step, _ in evaluated} == {2, 4}
    assert all(weight != ends[step] for step, weight in evaluated)


def test_weights_that_a_callback_loads_within_an_evaluation(tmp_path):
    """They stay when the evaluation ends."""

    class Loading(TrainerCallback):
        def on_evaluate(self, _args, state, _control, model=None, **_):
            if state.global_step == 2:
                zeros = {name: 0 * value for name, value in model.state_dict().items()}
                model.load_state_dict(zeros)

    weights = Weights()
    args = TrainingArguments(
        tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2, use_cpu=True, report_to="none"
    )
    callbacks = [Loading(), EMACallback(0.5), weights]
    MFTrainer(
        Line(), args, train_dataset=points(32), eval_dataset=points(4), callbacks=callbacks
    ).train()

    begun = {step: weight for step, event, weight in weights.plain if event == "on_step_begin"}
    assert begun[2] == [[0.0] * 4]


def test_an_evaluation_of_the_users_own_within_a_step(tmp_path):
    """A swap of the user's own in an event changes nothing that a later callback reads."""

    class Swapping(TrainerCallback):
        def on_step_end(self, *arguments, **known):
            with trainer.ema.swap():
                monitor.on_step_end(*arguments, **known)

    settings = {"step_interval": 1, "weight_state_format": "jsonl", "update_ratio_format": "jsonl"}
    found = []
    for swaps in (False, True):
        folder = tmp_path / str(swaps)
        monitor = TrainingStateMonitor(**settings, folder=folder)
        trainer = MFTrainer(
            Line(),
            TrainingArguments(folder, max_steps=4, use_cpu=True, report_to="none"),
            train_dataset=points(32),
            ema=lambda model: ExponentialMovingAverage(model, 0.5),
        )
        if swaps:
            begins = TrainerCallback()
            for event in (
                "on_train_begin",
                "on_step_begin",
                "on_pre_optimizer_step",
                "on_train_end",
            ):
                setattr(begins, event, getattr(monitor, event))
            trainer.add_callback(begins)
            trainer.add_callback(Swapping())
        else:
            trainer.add_callback(monitor)
        trainer.train()
        found.append(read_json_lines(folder / "training_state.jsonl"))
    assert found[0] == found[1]
    assert len(found[0]) == 4
