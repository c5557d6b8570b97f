"""Callbacks of MindSpore and of transformers are called in the order of their libraries."""

import pytest
from torch import nn
from transformers import TrainerCallback

from mfwrap import FixedLossScaleManager, Model
from mfwrap.callbacks import Callback
from mfwrap.callbacks.metrics_recorder import MetricsRecorder
from mfwrap.checkpoints.written_files import LIST
from mfwrap.trainer import MonitorCallback
from support.model_runs import Notes, ScriptedMetric, batches, classifier, sgd
from support.programs import Program


def model(**settings) -> Model:
    """Return a model to train."""
    network = classifier()
    return Model(network, nn.CrossEntropyLoss(), sgd(network), **settings)


OWNER = """
import sys
from pathlib import Path
from mfwrap.checkpoints.locks import RUN_LOCK, owning
with owning(Path(sys.argv[1], RUN_LOCK)):
    print("owned", flush=True)
    sys.stdin.read()
"""


def test_monitors_in_the_folder_of_another_program(tmp_path):
    """A training whose monitors would write there is refused; afterwards the folder is free."""
    with Program(OWNER, tmp_path) as other:
        other.stdout.readline()
        before = {path.name for path in tmp_path.iterdir()}
        with pytest.raises(BlockingIOError, match="has been writing it since"):
            model().train(1, batches(2), MetricsRecorder(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} == before

    model().train(1, batches(2), MetricsRecorder(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {LIST}


STEP = ["on_train_step_begin", "on_train_step_end"]
EVALUATION = [
    *("on_eval_begin", "on_eval_epoch_begin", "on_eval_step_begin", "on_eval_step_end"),
    *("on_eval_epoch_end", "on_eval_end"),
]


def test_a_training_is_told_in_mindspores_order():
    """Hooks are called in MindSpore's order: an evaluation comes before the end of its epoch."""
    notes = Notes()
    model(metrics={"loss"}).fit(2, batches(2), batches(1), 2, callbacks=notes)

    epoch = ["on_train_epoch_begin", *STEP, *STEP]
    assert notes.calls == [
        "on_train_begin",
        *(*epoch, "on_train_epoch_end"),
        *(*epoch, *EVALUATION, "on_train_epoch_end"),
        "on_train_end",
    ]


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_stop_ends_the_step_and_still_ends_epoch_and_training(evaluates):
    """After a stop, an evaluation that is due still runs, and epoch and training end properly."""
    notes = Notes(stop_at=1)
    valid = batches(1) if evaluates else None
    model(metrics={"loss"}).fit(3, batches(3), valid, callbacks=notes)

    assert notes.calls == [
        *("on_train_begin", "on_train_epoch_begin", *STEP),
        *(EVALUATION if evaluates else []),
        *("on_train_epoch_end", "on_train_end"),
    ]


def test_a_stop_is_a_stop_for_both_kinds():
    """MindSpore's context shows that a callback of transformers has stopped the training."""
    notes = Notes()

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    class Sees(Callback):
        def on_train_end(self, run_context):
            notes.calls.append(run_context.get_stop_requested())

    model().train(3, batches(3), callbacks=[Stops(), notes, Sees()])

    assert notes.calls.count("on_train_step_end") == 2
    assert notes.calls[-1] is True


def test_an_epoch_may_be_broken_off_alone():
    """`should_epoch_stop` ends only the current epoch; the next epoch begins."""

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_epoch_stop = True

    notes = Notes("cur_epoch_num")
    model().train(3, batches(3), callbacks=[Breaks(), notes])

    ends = [t for c, t in zip(notes.calls, notes.told, strict=True) if c == "on_train_step_end"]
    assert ends == [(1,), (2,), (3,)]


def test_what_a_run_tells():
    """Epochs and steps are counted from 1; steps are counted over all epochs of this training."""
    notes = Notes("cur_epoch_num", "cur_step_num", "batch_num", "epoch_num", "mode")
    model().train(4, batches(2), callbacks=notes, initial_epoch=2)

    ends = [t for c, t in zip(notes.calls, notes.told, strict=True) if c == "on_train_step_end"]
    assert ends == [
        (3, 1, 2, 2, "train"),
        (3, 2, 2, 2, "train"),
        (4, 3, 2, 2, "train"),
        (4, 4, 2, 2, "train"),
    ]


TOLD = (
    *("batch_num", "cur_step_num", "dataset_sink_mode", "device_number", "epoch_num"),
    *("initial_step", "last_save_ckpt_step", "latest_ckpt_file", "list_callback", "loss_fn"),
    *("loss_scale_mananger", "mode", "network", "optimizer", "parallel_mode", "train_dataset"),
    *("train_network", "cur_epoch_num", "net_outputs"),
)
"""Names of the run parameters when a training begins, as MindSpore spells them."""


def test_what_mindspores_callbacks_look_up():
    """When a training begins, all of MindSpore's run parameters exist and have their values."""
    manager = FixedLossScaleManager(8.0)
    found = {}

    class Looks(Callback):
        def on_train_begin(self, run_context):
            parameters = run_context.original_args()
            found.update({name: getattr(parameters, name) for name in TOLD})

    trained, looks, data = model(loss_scale_manager=manager), Looks(), batches(2)
    trained.train(1, data, callbacks=looks)

    assert found["list_callback"] == [looks]
    assert found["loss_scale_mananger"] is manager
    assert found["train_network"] is trained.train_network
    assert found["network"] is trained.predict_network.network
    assert found["train_dataset"] is data
    assert (found["parallel_mode"], found["device_number"]) == ("stand_alone", 1)
    assert (found["last_save_ckpt_step"], found["latest_ckpt_file"]) == (None, None)
    assert (found["initial_step"], found["dataset_sink_mode"]) == (0, False)
    assert isinstance(found["loss_fn"], nn.CrossEntropyLoss)


def test_what_transformers_callbacks_are_told():
    """Callbacks of transformers get a state and metrics with the Trainer's names."""
    seen = []

    class Sees(TrainerCallback):
        def on_step_end(self, args, state, control, model, optimizer, train_dataloader, **_):
            seen.append((state.global_step, state.max_steps, state.epoch, len(train_dataloader)))

        def on_epoch_end(self, args, state, control, **_):
            seen.append(control.should_evaluate)

        def on_evaluate(self, args, state, control, metrics, **_):
            seen.append((sorted(metrics), control.should_evaluate))

    fitted = model(metrics={"value": ScriptedMetric(1.0)})
    fitted.fit(3, batches(2), batches(1), [3], callbacks=[Sees()], initial_epoch=1)

    assert seen == [
        *((3, 6, 1.5, 2), (4, 6, 2.0, 2), False),
        *((5, 6, 2.5, 2), (6, 6, 3.0, 2), True),
        (["eval_loss", "eval_value"], False),
    ]


class Wishes(TrainerCallback):
    """Set a flag of the `TrainerControl` after each step."""

    def __init__(self, wish):
        self.wish = wish

    def on_step_end(self, args, state, control, **_):
        setattr(control, self.wish, True)


@pytest.mark.parametrize("wish", ["should_save", "should_evaluate"])
def test_a_wish_that_nothing_comes_of_is_told_once(wish):
    """A flag that `Model` does not support is ignored with one warning, and training continues."""
    notes = Notes()
    with pytest.warns(UserWarning, match=f"ignores `{wish}`, .* set in on_step_end") as told:
        model().train(2, batches(2), callbacks=[Wishes(wish), notes])

    assert len(told) == 1
    assert notes.calls == [
        "on_train_begin",
        *(["on_train_epoch_begin", *STEP, *STEP, "on_train_epoch_end"] * 2),
        "on_train_end",
    ]


def test_older_names_are_called_in_train_and_refused_in_fit():
    """`train` and `eval` call hooks with older names; `fit` refuses them as ambiguous."""
    calls = []

    class Older(Callback):
        def step_end(self, run_context):
            calls.append(run_context.original_args().mode)

    trained = model(metrics={"loss"})
    trained.train(1, batches(2), callbacks=Older())
    trained.eval(batches(1), callbacks=Older())

    assert calls == ["train", "train", "eval"]
    with pytest.raises(ValueError, match=r"Older with \['step_end'\]"):
        trained.fit(1, batches(1), callbacks=Older())


def test_callbacks_are_left_when_a_run_raises():
    """If a run raises, `__exit__` of callbacks is called, and monitors restore the raw weights."""
    left = []

    class Context(Callback):
        def __exit__(self, kind, error, traceback):
            left.append(kind)

        def on_train_step_end(self, run_context):
            raise KeyError

    class Averages(MonitorCallback):
        def put_weights_back(self):
            left.append("weights")

    with pytest.raises(KeyError):
        model().train(1, batches(1), callbacks=[Context(), Averages()])
    model().train(1, batches(1), callbacks=[Averages()])

    assert left == ["weights", KeyError]
