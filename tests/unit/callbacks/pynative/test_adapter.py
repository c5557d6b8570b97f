"""Callbacks of MindFormers' PyNative trainer get their events and values from a Trainer."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mfwrap import Model, StepOutput
from mfwrap.callbacks import (
    Callback,
    History,
    PyNativeCallback,
    adapt_pynative,
    is_pynative_callback,
)
from mfwrap.trainer import MFTrainer
from support.host_reads import HostReads
from support.model_runs import batches, classifier, sgd
from support.pynative_callbacks import (
    ConfigWriter,
    LossLogger,
    RateRecorder,
    Regression,
    expected,
    regression,
)
from support.ranks.pynative import refuse_a_lone_callback, train_with_pynative
from support.trainer_runs import messages_of


def test_values_of_each_step(tmp_path):
    """Loss, norm before clipping and rate are those of a torch loop in float64."""
    recorder, logger = RateRecorder(), LossLogger(log_interval=2)
    trainer = regression(MFTrainer, tmp_path, [adapt_pynative(recorder), adapt_pynative(logger)])
    trainer.train()

    wanted = expected(trainer.model.met)
    assert recorder.steps == [1, 2, 3, 4, 5, 6]
    found = torch.stack([*map(torch.stack, (recorder.rates, recorder.losses, recorder.norms))], 1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.tensor(wanted).double(), rtol=1e-5, atol=1e-9)
    assert max(norm for *_, norm in wanted) > 0.5
    pattern = r"\{ step:\[ +(\d)/ +6\], loss: +(\S+), lr: +(\S+), grad_norm: +(\S+) \}"
    lines = [re.fullmatch(pattern, line).groups() for line in logger.lines]
    # The line has the rate of the next update, as MindFormers' own line.
    rates = [*(rate for rate, *_ in wanted), 0.0]
    assert [int(step) for step, *_ in lines] == [2, 4, 6]
    for step, loss, rate, norm in lines:
        _, wanted_loss, wanted_norm = wanted[int(step) - 1]
        assert float(loss) == pytest.approx(wanted_loss, abs=1e-5)
        assert float(rate) == pytest.approx(rates[int(step)], rel=1e-5)
        assert float(norm) == pytest.approx(wanted_norm, abs=1e-5)


def test_values_are_kept(tmp_path):
    """The tensors that a callback keeps do not change later, and are not the step's own."""
    recorder = RateRecorder()
    trainer = regression(MFTrainer, tmp_path, [adapt_pynative(recorder)], max_steps=1)
    trainer.train()
    output = trainer.attached.last_output
    for given, of_step in ((recorder.losses, output.loss), (recorder.norms, output.global_norm)):
        given[0].add_(1)
        assert of_step.item() == pytest.approx(given[0].item() - 1)


def test_arguments_and_state(tmp_path):
    """A callback reads the settings and the progress of the training by PyNative's names."""
    writer = ConfigWriter()
    trainer = regression(MFTrainer, tmp_path, [adapt_pynative(writer)], optim="adamw_torch")
    trainer.train()

    assert writer.numbers == (
        *(6, 4, 8, 0.5),
        *("AdamW", [0.9, 0.999], 0.1),
        *("linear", 0.05, "none", "train", 1),
    )
    assert writer.config["training"]["seed"] == 42
    assert writer.config["training_arguments"]["max_steps"] == 6
    assert writer.config["lr_scheduler"]["warmup_steps"] == 2
    assert writer.state == (0, 6, 2, True)
    assert writer.consumed == (48, 2)
    assert (writer.weights, writer.batches) == (4, 4)


def test_a_batch_that_grows(tmp_path):
    """The state has the samples of each update, and of all updates so far."""
    seen = []

    class Sizes:
        def on_step_begin(self, args, state, **kwargs):
            seen.append((state.global_batch_size, state.consumed_samples))

        def on_step_end(self, args, state, **kwargs):
            sizes = (state.global_batch_size, state.num_accumulation_steps)
            seen.append((*sizes, state.consumed_samples))
            with pytest.raises(AttributeError, match=r"write `state\.global_batch_size`"):
                _ = args.training.rampup_batch_size

    growth = {"rampup_batch_size": {0: 4, 1: 8}}
    regression(MFTrainer, tmp_path, [adapt_pynative(Sizes())], growth, max_steps=3).train()

    assert seen == [(4, 0), (4, 1, 4), (8, 4), (8, 2, 12), (4, 12), (4, 1, 16)]


def step(number, epoch):
    """Return the events of a step."""
    return [("step_begin", number - 1, epoch), ("step_end", number, epoch)]


def test_events_of_pynative(tmp_path):
    """Epochs of two steps begin and end as in PyNative's loop, which skips the first begin."""
    writer = ConfigWriter()
    regression(MFTrainer, tmp_path, [adapt_pynative(writer)], max_steps=5).train()

    assert writer.calls == [
        *step(1, 0),
        *step(2, 0),
        ("epoch_end", 2, 0),
        ("epoch_begin", 2, 0),
        *step(3, 1),
        *step(4, 1),
        ("epoch_end", 4, 1),
        ("epoch_begin", 4, 1),
        *step(5, 2),
        ("train_end", 5, True),
    ]


def test_a_resumed_training_counts_on(tmp_path):
    """After a resume within an epoch, steps and epochs continue, with the same values."""
    alone, resumed, writer = RateRecorder(), RateRecorder(), ConfigWriter()
    regression(
        MFTrainer, tmp_path, [adapt_pynative(alone)], save_strategy="steps", save_steps=3
    ).train()
    again = regression(MFTrainer, tmp_path, [adapt_pynative(resumed), adapt_pynative(writer)])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert resumed.steps == [4, 5, 6]
    for name in ("losses", "norms", "rates"):
        assert torch.equal(
            torch.stack(getattr(resumed, name)), torch.stack(getattr(alone, name)[3:])
        )
    assert writer.state == (3, 6, 2, True)
    assert writer.calls == [
        *step(4, 1),
        ("epoch_end", 4, 1),
        ("epoch_begin", 4, 1),
        *step(5, 2),
        *step(6, 2),
        ("epoch_end", 6, 2),
        ("train_end", 6, True),
    ]
    assert writer.consumed == (48, 2)


def test_on_two_ranks(two_ranks, tmp_path):
    """The loss is the mean over all micro-batches of all ranks; a group of ranks is refused."""
    first, second = two_ranks.run(train_with_pynative, str(tmp_path))

    of_ranks = torch.stack([first["micro_losses"], second["micro_losses"]]).double()
    assert not torch.allclose(of_ranks[0], of_ranks[1])
    wanted = of_ranks.mean(0).reshape(-1, 2).mean(1)
    for found in (first, second):
        torch.testing.assert_close(found["losses"].double(), wanted, rtol=1e-6, atol=0)
        assert found["error"] == (
            "`metric_reduce_group_size` is unknown in a Trainer; write "
            "`torch.distributed.get_world_size()`"
        )


def test_a_callback_on_one_rank_is_refused(two_ranks, tmp_path):
    """If only one rank has the callback, all ranks raise before the first step; none hangs."""
    first, second = two_ranks.run(refuse_a_lone_callback, str(tmp_path))

    assert first == second
    assert "list of mfwrap's callbacks" in first
    assert "AdaptedRateRecorder" in first


def test_a_stock_trainer_says_once_what_it_cannot_give(tmp_path):
    """Without a step's output, loss and norm are None, and one warning says so."""
    recorder = RateRecorder()
    with messages_of("mfwrap.callbacks") as said:
        regression(Trainer, tmp_path, [adapt_pynative(recorder)]).train()

    assert recorder.steps == [1, 2, 3, 4, 5, 6]
    assert recorder.losses == recorder.norms == [None] * 6
    assert len(said) == 1
    assert "RateRecorder gets no `loss`, `grad_norm` and `state.loss_scale`" in said[0]


def test_an_error_ends_the_training(tmp_path):
    """An error of a callback ends the training at its step."""

    class Fails(PyNativeCallback):
        def on_step_end(self, args, state, **kwargs):
            if state.global_step == 2:
                raise ArithmeticError(kwargs["loss"].item())

    trainer = regression(MFTrainer, tmp_path, [adapt_pynative(Fails())])
    with pytest.raises(ArithmeticError):
        trainer.train()

    assert trainer.state.global_step == 2


def test_a_monitor_is_refused_when_it_is_used(tmp_path):
    """`monitor`, which a Trainer does not have, raises an error that names the replacement."""

    class Flushes(PyNativeCallback):
        def on_step_end(self, args, state, **kwargs):
            monitor = kwargs.get("monitor")
            if monitor and monitor.active:
                monitor.flush(step=state.global_step)

    with pytest.raises(
        RuntimeError,
        match=r"`monitor` is unknown in a Trainer; write `.*TrainingState",
    ):
        regression(MFTrainer, tmp_path, [adapt_pynative(Flushes())]).train()


def test_no_host_reads():
    """An event reads no tensor on the host."""
    recorder = RateRecorder()
    adapted = adapt_pynative(recorder)
    network = Regression()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    args = TrainingArguments("unused", max_steps=2, report_to="none", use_cpu=True)
    state, control = TrainerState(max_steps=2, train_batch_size=4), TrainerControl()
    facts = {
        "model": network,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    }
    adapted.on_train_begin(args, state, control, **facts)
    state.global_step = 1
    numbers = [*map(torch.tensor, (2.0, False, 8.0, 0.1, 3.0))]
    with HostReads() as seen:
        adapted.on_step_end(args, state, control, step_output=StepOutput(*numbers), **facts)

    assert seen.names == []
    assert (recorder.losses[0].item(), recorder.norms[0].item()) == (2.0, 3.0)


def test_other_loops_are_refused():
    """`Model` and a loop without arguments raise an error before the first step."""
    adapted = adapt_pynative(RateRecorder())
    network = classifier()
    with pytest.raises(TypeError, match="RateRecorder must run in a Trainer"):
        Model(network, torch.nn.CrossEntropyLoss(), sgd(network)).train(1, batches(1), [adapted])
    with pytest.raises(TypeError, match="RateRecorder must run in a Trainer"):
        adapted.on_train_begin(None, TrainerState(), TrainerControl())


class Lacks(PyNativeCallback):
    def on_step_end(self, args, state, loss):
        """Do not take the other keywords."""


class OfMindSpore:
    def on_train_begin(self, run_context):
        """Take the context of a run."""


class OfTransformers:
    def on_step_end(self, args, state, control, **kwargs):
        """Take transformers' arguments."""


@pytest.mark.parametrize("is_class", [False, True])
@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (PyNativeCallback, True),
        (LossLogger, True),
        (RateRecorder, True),
        (Lacks, False),
        (OfMindSpore, False),
        (OfTransformers, False),
        (TrainerCallback, False),
        (Callback, False),
        (History, False),
        (SimpleNamespace, False),
    ],
)
def test_callbacks_are_recognized_by_their_methods(kind, fits, is_class):
    """An object or class counts if it has such methods, and all of them take PyNative's call."""
    given = kind if is_class else kind()

    assert is_pynative_callback(given) is fits
    if fits:
        assert isinstance(adapt_pynative(given).callback, kind)
    else:
        with pytest.raises(TypeError, match=r"`callback` must have methods of PyNative's .* got "):
            adapt_pynative(given)


def test_each_adapted_class_is_a_class_of_its_own():
    """Two adapted callbacks have different classes, so that a Trainer does not warn about them."""
    one, other = adapt_pynative(LossLogger()), adapt_pynative(LossLogger())

    assert type(one).__name__ == "AdaptedLossLogger"
    assert type(one) is not type(other)


def test_a_callback_is_not_changed(tmp_path):
    """Nothing is put on the user's callback."""
    callback = LossLogger()
    regression(MFTrainer, tmp_path, [adapt_pynative(callback)]).train()

    assert set(vars(callback)) == {"log_interval", "lines"}
