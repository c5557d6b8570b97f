"""The numbers of a step are shown when the next one ends, and a skipped update is one line."""

import logging

import pytest
import torch

from mfwrap import StepOutput, StepReport
from mfwrap.memory import peak_memory
from mfwrap.trainer.display.step_numbers import ShownStep


@pytest.fixture
def shown():
    """Return numbers that are shown in two lists: texts of the last step, and lines."""
    texts, lines = [], []
    numbers = ShownStep(texts.append, lines.append)
    yield numbers, texts, lines
    numbers.close()


def report(loss, norm=1.5, scale=1.0, *, skipped=False, num_skipped=0):
    """Return the report of a step."""
    norm = None if norm is None else torch.tensor(norm)
    count = torch.tensor(num_skipped)
    tensors = (torch.tensor(one) for one in (loss, skipped, scale, 0.01))
    output = StepOutput(*tensors, norm)
    return StepReport(
        output=output,
        skipped=torch.tensor(skipped),
        applied_updates=count,
        skipped_updates=count,
        consecutive_skips=count,
        learning_rates=torch.ones(1),
        local_norm_names=(),
    )


def test_a_step_is_shown_when_the_next_one_ends(shown):
    """The values of a step are read one step later, the last ones by `flush`."""
    numbers, texts, lines = shown
    numbers.copy(1, report(2.0, scale=1024.0))
    assert texts == []
    numbers.copy(2, report(1.0, None))
    assert [text[:-1] for text in texts] == [
        ["step 1: loss 2", "norm 1.5", "lr 0.01", "scale 1024"]
    ]
    numbers.flush()

    assert [text[:-1] for text in texts[1:]] == [["step 2: loss 1", "lr 0.01"]]
    value, unit = texts[0][-1].split()
    assert unit == "GiB"
    assert float(value) == pytest.approx(peak_memory(torch.device("cpu")) / 2**30, rel=0.05)
    assert lines == []


def test_a_skipped_update_is_one_line(shown, monkeypatch):
    """A skipped update is a line and a count; if a monitor has said it, there is no second line."""
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest
    numbers, texts, lines = shown
    numbers.copy(1, report(2.0, float("inf"), skipped=True, num_skipped=3))
    numbers.copy(2, report(3.0, None, skipped=True, num_skipped=4))
    logging.getLogger("mfwrap.callbacks").warning("step 2: layer 3 is\nbad; update skipped")
    numbers.flush()

    assert lines == [
        "step 1: update skipped, loss 2, norm inf",
        "step 2: layer 3 is bad; update skipped",
    ]
    assert [text[-2] for text in texts] == ["skipped 3", "skipped 4"]  # two before a resume


def test_records_of_steps_are_not_lines(shown, monkeypatch):
    """The records of MFLossMonitor are not shown, its warnings are."""
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest
    _, _, lines = shown
    logger = logging.getLogger("mfwrap.callbacks.loss_monitor")
    logger.setLevel(logging.INFO)
    logger.info("{ Epoch:[1/1] }")
    logger.warning("no throughput")
    logger.setLevel(logging.NOTSET)

    assert lines == ["no throughput"]


def test_the_log_is_left_to_other_handlers(shown, monkeypatch):
    """If the root logger has handlers, or the numbers are closed, nothing of the log is shown."""
    numbers, texts, lines = shown
    logger = logging.getLogger("mfwrap.callbacks")
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    logger.warning("one")
    monkeypatch.setattr(logging.root, "handlers", [])
    numbers.copy(1, report(2.0))
    numbers.close()
    logger.warning("two")
    numbers.flush()

    assert (texts, lines) == ([], [])
