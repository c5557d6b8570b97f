"""MindSpore's callbacks get the same calls and parameters from `Model` and from a Trainer."""

import re

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from mfwrap import Model, TrainOneStepCell
from mfwrap.callbacks import EarlyStopping, History
from mfwrap.mindspore.callback import Callback, CallbackParameters, RunContext, as_trainer_callback
from mfwrap.outputs import StepOutput
from mfwrap.trainer import MFTrainer
from support.model_runs import HOOKS, Notes


def test_parameters_are_keys_and_attributes():
    """Each run parameter can be set and read as a key and as an attribute."""
    parameters = CallbackParameters(cur_step_num=1)
    parameters.own = 2
    parameters["other"] = 3

    assert (parameters.cur_step_num, parameters["own"], parameters.other) == (1, 2, 3)
    assert not hasattr(parameters, "metrics")
    with pytest.raises(AttributeError, match=r"no `metrics`; they have .*'cur_step_num'"):
        _ = parameters.metrics


def test_a_stop_stays_requested():
    """A request to stop is remembered."""
    context = RunContext(CallbackParameters())
    assert not context.get_stop_requested()
    context.request_stop()

    assert context.get_stop_requested()


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_call_the_older_names(hook):
    """A hook such as `on_train_step_end` calls the hook with the older name, `step_end`."""
    calls = []
    older = hook.replace("on_train_", "").replace("on_eval_", "")
    callback = type("Older", (Callback,), {older: lambda _, context: calls.append(context)})()
    context = RunContext(CallbackParameters())
    getattr(callback, hook)(context)

    assert calls == [context]


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean(), "logits": self.linear(x)}


def train(kind, folder, callbacks, num_samples=16, **settings):
    """Train for two epochs in batches of eight."""
    arguments = TrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        **{"num_train_epochs": 2, "disable_tqdm": True, **settings},
    )
    data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * num_samples
    trainer = kind(
        Regression(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )
    trainer.train()
    return trainer


STEP = ["on_train_step_begin", "on_train_step_end"]
EPOCH = ["on_train_epoch_begin", *STEP, *STEP, "on_train_epoch_end"]


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_a_trainer_sends_events_in_mindspores_order(kind, strategy, tmp_path):
    """`on_train_epoch_end` is called after the epoch's evaluation, and gets its metrics."""
    notes = Notes("cur_epoch_num", "cur_step_num", "batch_num", "epoch_num", "metrics")
    train(kind, tmp_path, [as_trainer_callback(notes)], eval_strategy=strategy)

    assert notes.calls == ["on_train_begin", *EPOCH, *EPOCH, "on_train_end"]
    facts_at = dict(zip(enumerate(notes.calls), notes.told, strict=True))
    ends = [facts for (_, call), facts in facts_at.items() if call == "on_train_epoch_end"]
    assert [facts[:4] for facts in ends] == [(1, 2, 2, 2), (2, 4, 2, 2)]
    for facts in ends:
        assert (facts[4] is not None and "eval_loss" in facts[4]) is (strategy == "epoch")
    assert {type(output) for output in notes.outputs} == {
        StepOutput if kind is MFTrainer else type(None)
    }


def test_accumulated_batches_are_one_step(tmp_path):
    """A step is an update, not a micro-batch."""
    notes = Notes("batch_num", "cur_step_num")
    train(Trainer, tmp_path, [as_trainer_callback(notes)], gradient_accumulation_steps=2)

    assert notes.calls.count("on_train_step_end") == 2
    assert notes.told[-1] == (1, 2)


def test_a_stop_stops_the_trainer(tmp_path):
    """A stop that is requested after a step or after an evaluation ends the training there."""
    notes = Notes(stop_at=1)
    train(Trainer, tmp_path, [as_trainer_callback(notes)])
    assert notes.calls.count("on_train_step_end") == 1

    history = History()
    stopping = EarlyStopping(min_delta=1e3)
    callbacks = [as_trainer_callback(callback) for callback in (history, stopping)]
    trainer = train(MFTrainer, tmp_path, callbacks, eval_strategy="epoch", num_train_epochs=9)
    assert trainer.state.global_step == 4
    assert history.epoch == {"epoch": [1, 2]}
    assert len(history.history["eval_loss"]) == 2
    assert stopping.stopped_epoch == 2


def test_a_metric_is_found_without_its_prefix(tmp_path):
    """A Trainer adds ``eval_`` to the names of metrics; a callback may leave the prefix out."""
    stopping = EarlyStopping("runtime", mode="max", min_delta=1e9)
    train(Trainer, tmp_path, [as_trainer_callback(stopping)], eval_strategy="epoch")

    assert stopping.stopped_epoch == 2


def test_each_adapted_class_is_a_class_of_its_own():
    """Two adapted callbacks have different classes, so that a Trainer does not warn about them."""
    one, other = as_trainer_callback(History()), as_trainer_callback(EarlyStopping())

    assert type(one).__name__ == "AdaptedHistory"
    assert type(one) is not type(other)


def test_only_callbacks_are_adapted():
    """Anything but a `Callback` is refused."""
    with pytest.raises(TypeError, match="`callback` must be a Callback, got 3 of type int"):
        as_trainer_callback(3)


class Reads(Callback):
    """Read an attribute of the facts of a run, as a callback written for MindSpore does."""

    def __init__(self, read):
        self.read = read

    def on_train_step_end(self, run_context):
        """Read it in a training."""
        self.read(run_context.original_args())

    def on_eval_step_end(self, run_context):
        """Read it in an evaluation."""
        self.read(run_context.original_args())


def run_model(callback, *, evaluates=False):
    """Train or evaluate a model with a callback; return the network and its optimizer."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(network.parameters(), 0.1)
    model = Model(network, nn.MSELoss(), optimizer, metrics={"loss"})
    pairs = [(torch.ones(4, 2), torch.ones(4, 1))] * 2
    if evaluates:
        model.eval(pairs, callback)
    else:
        model.train(1, pairs, callback)
    return network, optimizer


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda p: p.optimizer.global_step, "`Adam` has no `global_step`, which MindSpore's optim"),
        (lambda p: p.optimizer.learning_rate, "write `optimizer.param_groups[0]['lr']`"),
        (lambda p: p.optimizer.get_lr(), "write `optimizer.param_groups[0]['lr']`, a number, or"),
        (lambda p: p.optimizer.parameters, "write `[p for group in optimizer.param_groups for p"),
        (lambda p: p.optimizer.moments1, "write `optimizer.state[parameter]['exp_avg']`"),
        (lambda p: p.train_network.optimizer.global_step, "write `cb_params.train_network.last_re"),
        (lambda p: p.network.network, "`Linear` has no `network`, which MindSpore's network has; "),
        (lambda p: p.network.optimizer, "write `cb_params.optimizer`"),
        (lambda p: p.train_network.set_train(), "write `network.train()`"),
        (lambda p: p.train_network.network.trainable_params(), "write `parameters()`"),
        (lambda p: p.net_outputs.asnumpy(), "write `detach().cpu().numpy()`"),
        (lambda p: p.train_dataset.get_dataset_size(), "write `len(loader)`"),
        (lambda p: p.train_dataset_element, "no `train_dataset_element`, and nothing replaces it"),
        (lambda p: p.dataset_helper, "no `dataset_helper`; write `train_dataset`"),
    ],
)
def test_an_attribute_of_mindspores_objects(read, says):
    """The error of an attribute that only MindSpore's object has says what to write."""
    with pytest.raises(AttributeError, match=re.escape(says)) as raised:
        run_model(Reads(read))

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda p: p.optimizer.nonsense, "^'Adam' object has no attribute 'nonsense'$"),
        # The same name, but an object that is not of the run.
        (lambda _: nn.Linear(1, 1).optimizer, "^'Linear' object has no attribute 'optimizer'$"),
        (lambda _: [].get_lr(), "^'list' object has no attribute 'get_lr'$"),
    ],
)
def test_any_other_attribute(read, says):
    """An error that has nothing to do with MindSpore stays as it is."""
    with pytest.raises(AttributeError, match=says):
        run_model(Reads(read))


def test_an_attribute_in_an_evaluation():
    """An evaluation explains attributes, too."""
    with pytest.raises(AttributeError, match="no `trainable_params`, which Mind") as raised:
        run_model(Reads(lambda p: p.network.trainable_params()), evaluates=True)

    assert isinstance(raised.value.__cause__, AttributeError)


def test_an_attribute_in_a_step():
    """A step of one's own that reads MindSpore's attributes gets the same sentence."""

    class Step(TrainOneStepCell):
        def __call__(self, *inputs):
            return self.optimizer.get_lr()

    network = nn.Linear(2, 1)
    step = Step(network, torch.optim.SGD(network.parameters(), 0.1))
    with pytest.raises(AttributeError, match="`SGD` has no `get_lr`, which MindSpore's optimizer"):
        Model(step).train(1, [(torch.ones(4, 2),)])


def test_the_facts_are_the_users_objects():
    """The optimizer and the network are the user's own, and nothing is put on them."""
    seen = []
    network, optimizer = run_model(Reads(seen.append))
    untouched = torch.optim.Adam(nn.Linear(2, 1).parameters(), 0.1)

    assert seen[0].optimizer is optimizer
    assert seen[0].network is network
    assert not hasattr(seen[0].optimizer, "global_step")
    assert vars(optimizer).keys() == vars(untouched).keys()
    assert vars(network).keys() == vars(nn.Linear(2, 1)).keys()


def test_a_trainer_explains_attributes(tmp_path):
    """A callback that is adapted to a Trainer gets the same sentence."""
    with pytest.raises(AttributeError, match="`AdamW` has no `get_lr`, which MindSpore's optim"):
        train(Trainer, tmp_path, [as_trainer_callback(Reads(lambda p: p.optimizer.get_lr()))])
