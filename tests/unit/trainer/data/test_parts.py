"""Empty micro-batches fill up an update that has fewer than the Trainer expects."""

from types import SimpleNamespace

import pytest
import torch

from mfwrap.trainer.data.parts import Part, UpdateParts


def test_empty_micro_batches_come_first():
    """They have the keys of a micro-batch without its rows, and leave the divisor alone."""
    trainer = SimpleNamespace(current_gradient_accumulation_steps=4)
    parts = UpdateParts(trainer)
    number = torch.tensor(7)
    batch = {"rows": torch.ones(3, 2), "texts": ["a", "b", "c"], "number": number, "name": "x"}
    found = parts.begin_with_empty(2, [Part.STAND_IN, Part.ROWS], [batch, batch], 1.5)

    for each in found[:2]:
        assert each.pop("rows").shape == (0, 2)
        assert each == {"texts": [], "number": number, "name": "x"}
    assert found[2:] == [batch, batch]
    assert [parts.next(), parts.next(), parts.present] == [Part.NOTHING] * 3
    assert trainer.current_gradient_accumulation_steps == 4
    assert [parts.next(), parts.next()] == [Part.STAND_IN, Part.ROWS]
    assert trainer.current_gradient_accumulation_steps == 1.5
    assert parts.begin_with_empty(1, [Part.ROWS], ["text"], 1) == [{}, "text"]


def test_an_update_is_read_and_trained_by_the_trainer():
    """What a subclass has replaced is named."""
    parts = UpdateParts(SimpleNamespace())
    with pytest.raises(RuntimeError, match="need the trainer's `get_batch_samples`, got that of"):
        parts.check_update()
    parts.begin()
    parts.check_update()
    parts.begin_with_empty(1, [Part.ROWS], [{}], 1)
    with pytest.raises(RuntimeError, match=r"does not call `super\(\).training_step`"):
        parts.check_update()
    parts.clear()
    with pytest.raises(RuntimeError, match="get_batch_samples"):
        parts.check_update()
