"""How often an update of MFTrainer reads on the host, compared with the stock Trainer."""

from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
from mfwrap.callbacks import MFLossMonitor
from mfwrap.trainer import MFTrainer
from support.host_reads import HostReads
from support.trainer_runs import Counting, new_trainer, padded, spoilt_llama, tiny_llama

# On a CPU the results of an update are known at once; let them arrive late, as on a device.
pytestmark = pytest.mark.usefixtures("_late_results")

NAN = float("nan")
STOCK_READS = 12
"""Host reads of a stock Trainer's update with four micro-batches, with transformers 5.23."""

COUNTED_UPDATES = 4
NUM_UPDATES = COUNTED_UPDATES + 3


class CountsReads(TrainerCallback):
    """Count host reads in and between updates, from the third update on."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._modes = HostReads()

    def on_step_end(self, _args, state, *_, **__):
        if state.global_step == 2:
            self._modes.__enter__()
        if state.global_step == 2 + COUNTED_UPDATES:
            self._modes.__exit__(None, None, None)
            # On CPU, `to` copies nothing between devices, so do not count it as a host read.
            self.names = [name for name in self._modes.names if name != "to"]


def reads_per_update(kind, folder, *, monitor=False, factors=(), **settings) -> float:
    """Train, and return the number of host reads per update."""
    counter = CountsReads()
    callbacks = [counter, *([MFLossMonitor()] if monitor else [])]
    arguments: dict[str, Any] = {
        "max_steps": NUM_UPDATES,
        "data": Counting(64, length=8),
        "logging_strategy": "no",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    model = spoilt_llama(factors)
    trainer = new_trainer(kind, folder, model=model, callbacks=callbacks, **arguments | settings)
    trainer.train()
    assert trainer.state.global_step == NUM_UPDATES
    return len(counter.names) / COUNTED_UPDATES


def reads_of_the_model() -> int:
    """Return the number of reads in forward and backward of four micro-batches."""
    model, rows = tiny_llama(), Counting(8, length=8)
    # The Trainer turns the cache off, so this reference must do the same.
    model.config.use_cache = False
    batches = [padded([rows[first], rows[first + 1]]) for first in range(0, 8, 2)]
    with HostReads() as counted:
        for batch in batches:
            model(**batch).loss.backward()
    return len([name for name in counted.names if name != "to"])


def everything() -> dict[str, Any]:
    """Return settings with all features on."""
    return {
        "step": StepConfig(local_norm=True, local_norm_groups="layer"),
        "ema": lambda model: ExponentialMovingAverage(model, 0.99, warmup=True),
        "scale_sense": DynamicLossScaleUpdateCell(2.0**16, 2, 2),
    }


def test_the_stock_trainer_reads_a_dozen_times(tmp_path):
    """The stock Trainer reads 12 times per update: 8 in its loss filter, 4 in the model."""
    reads = reads_per_update(Trainer, tmp_path)

    assert reads == STOCK_READS
    assert reads == reads_of_the_model() + 8


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_with_everything_on_only_the_model_reads(max_grad_norm, precision, tmp_path):
    """With all features on, MFTrainer reads no more often than the model alone."""
    settings = {"extras": everything(), "max_grad_norm": max_grad_norm, **precision}
    reads = reads_per_update(MFTrainer, tmp_path, monitor=True, **settings)

    assert reads <= reads_of_the_model()
    assert reads < STOCK_READS


def test_a_skipped_update_reads_nothing_more(tmp_path):
    """With skipped updates, MFTrainer reads no more often than the model alone."""
    factors = [1.0] * 12 + [NAN] + [1.0] * 7 + [NAN]
    reads = reads_per_update(
        MFTrainer, tmp_path, monitor=True, factors=factors, extras=everything()
    )

    assert reads <= reads_of_the_model()


def test_an_optimizer_that_cannot_skip_on_the_device_reads_once_more(tmp_path):
    """An optimizer that cannot skip on the device adds one read per update, of the skip flag."""
    settings = {"optim": "sgd", "learning_rate": 0.1}
    reads = reads_per_update(MFTrainer, tmp_path, extras=everything(), **settings)

    assert reads <= reads_of_the_model() + 1


def test_nothing_waits_for_the_update_before_the_next_one(tmp_path):
    """At the end of each step, one copy to the host is still pending: no step waits for it.

    On CPU, such a wait would not be counted as a read, so the pending copies are counted.
    """

    class Pending(TrainerCallback):
        trainer: Trainer
        num_pending = ()

        def on_step_end(self, *_, **__):
            (window,) = self.trainer.attached.attachment.step.windows.values()
            self.num_pending += (len(window.update.counts._reads),)

    callback = Pending()
    settings = {"extras": everything(), "logging_strategy": "no", "lr_scheduler_type": "cosine"}
    callback.trainer = new_trainer(MFTrainer, tmp_path, callbacks=[callback], **settings)
    callback.trainer.train()

    assert callback.num_pending == (1, 1, 1, 1)


def test_a_log_reads_once_for_all_that_is_added(tmp_path):
    """A log adds at most one read to the stock Trainer's, for all values of the step."""
    logged = {"logging_strategy": "steps", "logging_steps": 1}
    reads = reads_per_update(MFTrainer, tmp_path, extras=everything(), **logged)
    without = reads_per_update(MFTrainer, tmp_path, extras=everything())
    stock = reads_per_update(Trainer, tmp_path, **logged) - reads_per_update(Trainer, tmp_path)

    assert reads - without <= stock + 1


def test_the_counter_sees_reads(tmp_path):
    """The counter counts the reads of a callback that reads each update's loss."""

    class Reads(TrainerCallback):
        def on_step_end(self, *_, step_output, **__):
            step_output.loss.item()

    counter = CountsReads()
    settings = {"max_steps": NUM_UPDATES, "logging_strategy": "no"}
    new_trainer(MFTrainer, tmp_path, callbacks=[Reads(), counter], **settings).train()

    assert counter.names.count("item") == COUNTED_UPDATES


def test_empty_micro_batches_are_not_read(tmp_path):
    """An update of a batch that grows reads as often as its own micro-batches need."""
    extras = everything() | {"rampup_batch_size": {0: 2, 100: 8}}

    # One micro-batch of four.
    assert reads_per_update(MFTrainer, tmp_path, extras=extras) <= reads_of_the_model() / 4
