"""Drive the loss monitor with made-up step outputs and a clock that the test sets."""

import re

import torch
from transformers import DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from mfwrap import StepOutput
from mfwrap.callbacks import MFLossMonitor

__all__ = ["Clock", "Loop", "output", "records", "shown"]


class Clock:
    """A clock that returns `now`, which a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """Send the events of a hand-written training loop to a loss monitor."""

    def __init__(self, *, max_steps=6, epochs=2, batch_size=4, args=None, model=None, **settings):
        self.clock = Clock()
        self.monitor = MFLossMonitor(clock=self.clock, **settings)
        self.state = TrainerState(
            max_steps=max_steps, num_train_epochs=epochs, train_batch_size=batch_size
        )
        self.args = args
        self.control = TrainerControl()
        callbacks = [DefaultFlowCallback(), self.monitor] if args else [self.monitor]
        self.handler = CallbackHandler(callbacks, model, None, None, None)

    def send(self, event: str, **keywords) -> None:
        """Send an event as the Trainer does."""
        self.handler.call_event(event, self.args, self.state, self.control, **keywords)

    def step(self, output, *, seconds=1.0, **keywords) -> None:
        """Begin a step, let `seconds` pass, and end it with `output`."""
        self.send("on_step_begin")
        self.clock.now += seconds
        self.state.global_step += 1
        self.send("on_step_end", step_output=output, **keywords)


def output(loss=1.0, *, overflow=False, scale=131072.0, rate=0.1, norm=3.0) -> StepOutput:
    """Return a step output with these values."""
    return StepOutput(
        loss=torch.tensor(loss),
        overflow=torch.tensor(overflow),
        loss_scale=torch.tensor(scale),
        learning_rate=torch.tensor(rate),
        global_norm=None if norm is None else torch.tensor(norm),
    )


def records(caplog) -> list[str]:
    """Return the monitor's log messages so far that begin with ``{ Epoch``."""
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("{ Epoch")]


def shown(caplog, pattern) -> list[str]:
    """Search each of the `records` for `pattern`, and return the first group of each match."""
    return [re.search(pattern, line).group(1) for line in records(caplog)]
