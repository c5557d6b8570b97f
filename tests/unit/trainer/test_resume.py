"""A training that was stopped and resumed is bit-identical to one that was never stopped."""

import functools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from mfwrap import DynamicLossScaleUpdateCell
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from support.half_precision import StockHalf
from support.killed_training import start_process
from support.resumed_training import (
    NUM_STEPS,
    PLAIN,
    STEPS_AN_EPOCH,
    RunSettings,
    StopAfter,
    end_of,
    logged,
    new_trainer,
    resume,
    spoil_random_states,
    trained,
)
from support.spoilt.gpt2 import padded
from support.training_state import assert_same_state, training_state

CASES = {
    "fused": RunSettings(),
    "not fused": RunSettings(optim="adamw_torch"),
    "no scale, no average, spikes are clipped": RunSettings(
        dynamic_scale=False, ema=False, spike_policy="clip"
    ),
    "grouped by length, logs between": RunSettings(sampling="group_by_length", logging_steps=5),
    "worker": RunSettings(workers=1),
    "evaluations, callbacks with a state": RunSettings(evaluates=True),
}
SKIPPED, EPOCH_END = 4, STEPS_AN_EPOCH
FAST = [
    *(("fused", step) for step in range(1, NUM_STEPS)),
    *((name, step) for name in list(CASES)[1:] for step in (SKIPPED, EPOCH_END, 8)),
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return a function that takes a case and returns its uninterrupted run's folder and state."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("unbroken")
        return folder, end_of(trained(folder, CASES[name]))

    return run


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize(("name", "step"), FAST)
def test_a_resumed_run_is_the_unbroken_run(unbroken, tmp_path, name, step):
    """A run resumed after any step ends bitwise like the uninterrupted run."""
    folder, expected = unbroken(name)
    saves = {} if CASES[name].evaluates else {"save_strategy": "no"}

    resumed = resume(folder / f"checkpoint-{step}", tmp_path, CASES[name], **saves)

    assert_same_state(expected, end_of(resumed))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=40, phases=[Phase.generate])
@given(data=st.data())
def test_whatever_a_run_consists_of_it_can_be_stopped_anywhere(data, tmp_path_factory):
    """For random settings and a random step, a resumed run ends like the uninterrupted run."""
    run_settings = data.draw(
        st.builds(
            RunSettings,
            optim=st.sampled_from(["adamw_torch_fused", "adamw_torch", "adafactor", "sgd"]),
            spoilt_rows=st.lists(st.integers(0, 42), max_size=4, unique=True).map(tuple),
            dynamic_scale=st.booleans(),
            max_grad_norm=st.sampled_from([0.0, 0.5]),
            ema=st.booleans(),
            sampling=st.sampled_from(["random", "sequential", "group_by_length"]),
            workers=st.integers(0, 1),
            dropout=st.sampled_from([0.0, 0.2]),
            logging_steps=st.integers(1, 5),
            evaluates=st.booleans(),
        )
    )
    step = 2 * data.draw(st.integers(1, NUM_STEPS // 2 - 1))
    folder = tmp_path_factory.mktemp("drawn")
    expected = end_of(trained(folder / "unbroken", run_settings))

    checkpoint = folder / "unbroken" / f"checkpoint-{step}"
    resumed = resume(checkpoint, folder / "resumed", run_settings)

    assert_same_state(expected, end_of(resumed))


def test_these_runs_skip_and_draw(unbroken):
    """The compared runs skip updates, change the loss scale, average weights and use dropout."""
    folder, end = unbroken("fused")
    log = json.loads(end["/_Rest/log"])
    skipped = np.diff([0, *(entry["skipped_updates"] for entry in log)])
    scales = np.diff([2.0**10, *(entry["loss_scale"] for entry in log)])

    assert skipped[0] == skipped[SKIPPED - 1] == 1
    assert 0 < sum(skipped[:EPOCH_END]) < EPOCH_END
    assert 0 < sum(skipped[EPOCH_END:]) < EPOCH_END
    assert min(scales) < 0 < max(scales)
    assert {entry["non_finite_losses"] for entry in log} > {1}
    assert len({entry.get("loss") for entry in log}) == len(log) == NUM_STEPS
    average = "/_Rest/step/ema/averages/transformer.wte.weight"
    assert not torch.equal(end[average], end["/network/transformer.wte.weight"])
    without = end_of(trained(folder / "no dropout", RunSettings(dropout=0.0)))
    assert without["/_Rest/log"] != end["/_Rest/log"]


def test_a_run_that_is_resumed_twice(unbroken, tmp_path):
    """A resumed run's checkpoints can be resumed, in the same epoch and in the next one."""
    name = "grouped by length, logs between"
    folder, expected = unbroken(name)
    resume(folder / "checkpoint-2", tmp_path / "second", CASES[name])
    resume(tmp_path / "second" / "checkpoint-4", tmp_path / "third", CASES[name])
    fourth = resume(tmp_path / "third" / "checkpoint-9", tmp_path / "fourth", CASES[name])

    assert_same_state(expected, end_of(fourth))


def test_resumed_from_the_last_one(unbroken, tmp_path):
    """``resume_from_checkpoint=True`` resumes the newest checkpoint of ``output_dir``."""
    trained(tmp_path, callbacks=[StopAfter(5)])

    trainer = new_trainer(tmp_path, seed=1)
    trainer.train(resume_from_checkpoint=True)

    assert_same_state(unbroken("fused")[1], end_of(trainer))


@pytest.mark.parametrize("last_step", [SKIPPED, EPOCH_END])
def test_a_finished_run_makes_no_further_update(tmp_path, last_step):
    """A resumed run that is finished keeps its state, also if it ended amid an epoch."""
    ended = end_of(trained(tmp_path, max_steps=last_step))

    again = resume(tmp_path / f"checkpoint-{last_step}", tmp_path, max_steps=last_step)

    assert again.state.global_step == last_step
    expected = {name: value for name, value in ended.items() if "generator" not in name}
    found = {name: value for name, value in end_of(again).items() if name in expected}
    assert_same_state(expected, found)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("value", [None, False, ""])
def test_not_resumed(unbroken, tmp_path, value):
    """Without ``resume_from_checkpoint``, training ignores checkpoints in its folder."""
    trained(tmp_path, callbacks=[StopAfter(2)])

    trainer = new_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=value)

    assert_same_state(unbroken("fused")[1], end_of(trainer))


def test_resumed_in_the_trainer_that_has_written_it(unbroken, tmp_path):
    """A trainer that has finished can resume from one of its own earlier checkpoints."""
    trainer = trained(tmp_path)

    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))

    assert_same_state(unbroken("fused")[1], end_of(trainer))


@pytest.mark.slow
def test_resumed_in_a_new_process(unbroken, tmp_path):
    """A new process can resume a run from the checkpoint alone."""
    trained(tmp_path, callbacks=[StopAfter(SKIPPED)])
    with start_process(tmp_path, RunSettings()) as process:
        told, _ = process.communicate()

    assert process.returncode == 0
    assert told.startswith(f"micro-batch {SKIPPED}\n")
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    assert_same_state(unbroken("fused")[1], end)


def test_resumed_under_another_seed(unbroken, tmp_path):
    """A resumed run keeps its data order, whatever seed is set before it resumes."""
    folder, expected = unbroken("fused")
    trainer = new_trainer(tmp_path, seed=1)
    torch.manual_seed(5)

    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))

    assert_same_state(expected, end_of(trainer))


def masked(rows):
    """Return rows as a batch in which about 30% of the targets, at random, are ignored."""
    batch = padded(rows)
    left_out = torch.rand(batch["labels"].shape) < 0.3
    return batch | {"labels": batch["labels"].masked_fill(left_out, -100)}


class Drawing(Dataset):
    """Rows of a data set, with tokens drawn from the random generators of Python and NumPy.

    Args:
        rows: The data set.
    """

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        row = {name: values.clone() for name, values in self._rows[index].items()}
        row["input_ids"][0] = random.randrange(16)  # noqa: S311  (test data, not cryptography)
        row["input_ids"][1] = np.random.randint(16)  # noqa: NPY002  (what augmentations use)
        return row


UNEVEN = 5
"""An accumulation that leaves four micro-batches for the last update of an epoch."""


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(
    ("accumulation", "step"),
    [*((4, step) for step in (1, 5, 6, 7, 11)), *((UNEVEN, step) for step in (1, 4, 5, 6, 9))],
)
def test_resumed_with_batches_that_are_drawn(drawn_run, tmp_path, step, accumulation):
    """A resumed run draws the same masks, rows and random numbers as the uninterrupted run."""
    folder, expected = drawn_run(accumulation)
    trainer = drawing_trainer(tmp_path, accumulation, seed=1)
    spoil_random_states()

    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))

    assert_same_state(expected, end_of(trainer))


def test_resumed_twice_with_batches_that_are_drawn(drawn_run, tmp_path):
    """A run that was resumed, and stopped one step later, can be resumed again."""
    folder, expected = drawn_run(4)
    for step in (2, 3):
        trainer = drawing_trainer(tmp_path, 4, seed=step)
        trainer.add_callback(StopAfter(step + 1))
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        folder = tmp_path
    trainer = drawing_trainer(tmp_path, 4)

    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert_same_state(expected, end_of(trainer))


def drawing_trainer(folder, accumulation, **settings):
    """Return a trainer that draws rows and masks at random when it makes a batch."""
    trainer = new_trainer(folder, gradient_accumulation_steps=accumulation, **settings)
    trainer.data_collator = masked
    trainer.train_dataset = Drawing(trainer.train_dataset)
    return trainer


@pytest.fixture(scope="module")
def drawn_run(tmp_path_factory):
    """Return a function that trains on random batches, and returns folder and final state."""

    @functools.cache
    def run(accumulation):
        folder = tmp_path_factory.mktemp("drawn")
        trainer = drawing_trainer(folder, accumulation)
        trainer.train()
        return folder, end_of(trainer)

    return run


# The tests below resume checkpoints of the stock Trainer in MFTrainer, and the other way round.
# Without clipping, the two trainers are bit-identical.


class Half(MFTrainerMixin, StockHalf):
    """`StockHalf` with MindFormers' step."""


KINDS = {"float32": (Trainer, MFTrainer, {}), "fp16": (StockHalf, Half, {"fp16": True})}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function that trains with a trainer class and returns folder, state and losses."""

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp("plain")
        arguments = {"fp16": True} if issubclass(kind, StockHalf) else {}
        trainer = trained(folder, PLAIN, kind=kind, **arguments)
        return folder, trained_part(trainer), losses(trainer)

    return run


def trained_part(trainer):
    """Return copies of weights, optimizer state and schedule, which both trainers have."""
    return training_state(trainer.model, trainer.optimizer.optimizer, trainer.lr_scheduler)


def losses(trainer):
    """Return the loss and the learning rate of each log."""
    return [(entry["loss"], entry["learning_rate"]) for entry in logged(trainer)]


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("step", [4, EPOCH_END, 9])
@pytest.mark.parametrize("precision", KINDS)
@pytest.mark.filterwarnings("ignore:no state of the step")
def test_a_stock_checkpoint_is_resumed(plain, tmp_path, precision, step):
    """If MFTrainer resumes a stock Trainer's run, the result equals the uninterrupted stock run."""
    stock, ours, arguments = KINDS[precision]
    folder, expected, expected_losses = plain(stock)
    extras = {} if precision == "float32" else {"trainer_settings": fp16_scale()}

    checkpoint = folder / f"checkpoint-{step}"
    resumed = resume(checkpoint, tmp_path, PLAIN, kind=ours, **arguments, **extras)

    assert_same_state(expected, trained_part(resumed))
    assert losses(resumed) == expected_losses


def fp16_scale():
    """Return MFTrainer's argument for a loss scale that grows and falls like the stock scaler's."""
    return {"scale_sense": DynamicLossScaleUpdateCell(2.0, 2, 3)}


def test_what_a_stock_checkpoint_does_not_say(tmp_path):
    """Resuming a checkpoint without the step's files starts the counts at 0, with a warning."""
    trained(tmp_path / "stock", PLAIN, kind=Trainer, callbacks=[StopAfter(5)])

    with pytest.warns(UserWarning, match="no state of the step in .*checkpoint-5.*counts start"):
        resumed = resume(tmp_path / "stock" / "checkpoint-5", tmp_path / "ours", PLAIN)

    assert resumed.attached.last_report.applied_updates == NUM_STEPS - 5


class AtTrainBegin(TrainerCallback):
    """Keep copies of weights and averages at the start of a training."""

    trainer = None

    def on_train_begin(self, _args, _state, _control, model=None, **_) -> None:
        """Copy weights and averages."""
        self.averages = {name: value.clone() for name, value in self.trainer.ema.named_averages()}
        self.weights = {name: model.get_parameter(name).detach().clone() for name in self.averages}


@pytest.mark.filterwarnings("ignore:no state of the step")
def test_the_average_after_a_stock_checkpoint(tmp_path):
    """After a stock checkpoint, the average starts from the loaded weights, with a warning."""
    trained(tmp_path / "stock", PLAIN, kind=Trainer, callbacks=[StopAfter(5)])
    begin = AtTrainBegin()
    trainer = new_trainer(tmp_path / "ours", replace(PLAIN, ema=True), seed=1, callbacks=[begin])
    begin.trainer = trainer

    with pytest.warns(UserWarning, match="no average in .*checkpoint-5.*loaded weights"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-5"))

    saved = load_file(tmp_path / "stock" / "checkpoint-5" / "model.safetensors")
    assert_same_state(begin.weights, begin.averages)
    assert torch.equal(begin.averages["transformer.wpe.weight"], saved["transformer.wpe.weight"])


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("step", [4, EPOCH_END, 9])
@pytest.mark.parametrize("precision", KINDS)
def test_our_checkpoint_is_resumed_by_the_stock_trainer(plain, tmp_path, precision, step):
    """If the stock Trainer resumes an MFTrainer run, the result equals the uninterrupted run."""
    stock, ours, arguments = KINDS[precision]
    folder, expected, expected_losses = plain(ours)

    checkpoint = folder / f"checkpoint-{step}"
    resumed = resume(checkpoint, tmp_path, PLAIN, kind=stock, **arguments)

    assert_same_state(expected, trained_part(resumed))
    assert losses(resumed) == expected_losses
