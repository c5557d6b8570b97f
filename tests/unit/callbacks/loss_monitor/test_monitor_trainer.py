"""The loss monitor in a stock Trainer and in other loops that pass no `step_output`."""

import json
import re

import pytest
import torch
from transformers import Trainer, TrainingArguments

from mfwrap.callbacks import MFLossMonitor
from support.monitored_loop import Loop, records, shown
from support.small_llama import byte_batch, small_llama


class LlamaTexts(torch.utils.data.Dataset):
    """Ten short texts."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        return {name: values[0] for name, values in byte_batch([16], start=3 * index).items()}


class EndlessTexts(torch.utils.data.IterableDataset):
    """The same texts over and over, in a data set without a length."""

    def __iter__(self):
        while True:
            yield from LlamaTexts()


def trainer(folder, monitor, *, data=None, **settings) -> Trainer:
    """Return a stock Trainer of a small Llama with three updates per epoch."""
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **(defaults | settings),
    )
    texts = data or LlamaTexts()
    return Trainer(
        small_llama(), args, train_dataset=texts, eval_dataset=LlamaTexts(), callbacks=[monitor]
    )


RECORD = re.compile(
    r"Epoch:\[ *(?P<epoch>\d+)/  2\], step:\[ *(?P<step>\d+)/    3\], loss:\[ *(?P<loss>[\d.]+)/"
    r".*lr: (?P<rate>\S+), .*global_norm: \[(?P<norm>.*)\]"
)


def test_stock_trainer(tmp_path, caplog):
    """Each entry of the Trainer's log becomes a record with the same numbers."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    run = trainer(tmp_path, MFLossMonitor(), **often)
    run.train()
    found = [RECORD.search(line) for line in records(caplog)]
    logged = [entry for entry in run.state.log_history if "loss" in entry]

    assert [3 * int(f["epoch"]) - 3 + int(f["step"]) for f in found] == list(range(1, 7))
    assert [f["loss"] for f in found] == [f"{entry['loss']:.3f}" for entry in logged]
    for name, key in (("norm", "grad_norm"), ("rate", "learning_rate")):
        numbers = [float(f[name]) for f in found]
        assert numbers == pytest.approx([entry[key] for entry in logged], rel=1e-6)


THREE = ("1/  2 1/    3", "1/  2 2/    3", "1/  2 3/    3")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_train_epochs": 1.5}, [*THREE, "2/  2 1/    3", "2/  2 2/    3"]),
        ({"max_steps": 4}, [*THREE, "2/  2 1/    3"]),
        ({"max_steps": 2, "data": EndlessTexts()}, ["1/  1 1/    2", "1/  1 2/    2"]),
    ],
    ids=["part of an epoch", "max_steps", "no length"],
)
def test_place_in_a_stock_trainer(settings, expected, tmp_path, caplog):
    """Epochs and steps agree with the Trainer's, and the last record says 100 %."""
    trainer(tmp_path, MFLossMonitor(), **settings).train()
    epochs, steps = (shown(caplog, rf"{what}:\[ *(.*?)\]") for what in ("Epoch", "step"))

    assert [f"{epoch} {step}" for epoch, step in zip(epochs, steps, strict=True)] == expected
    assert caplog.records[-1].getMessage().startswith("  100.0% |")


def test_samples_of_a_stock_trainer(tmp_path, caplog):
    """The throughput counts the samples of all batches of an update; the last one has two."""

    class Second:
        """A clock that advances half a second per reading."""

        now = 0.0

        def __call__(self) -> float:
            self.now += 0.5
            return self.now

    trainer(tmp_path, MFLossMonitor(clock=Second()), num_train_epochs=1).train()
    rates = [
        r.getMessage().split("| ")[1].split()[0]
        for r in caplog.records
        if "samples/s" in r.msg % r.args
    ]

    assert rates == ["8.00000", "8.00000", "4.00000"]


def test_resumed_stock_trainer(tmp_path, caplog):
    """With restored callbacks, a resumed run continues the step count and the mean."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    first = trainer(tmp_path, MFLossMonitor(), **settings)
    first.train()
    patterns = (r"step:\[ *(\d+)", r"loss:\[ *(.*?)\]")
    whole = [shown(caplog, pattern) for pattern in patterns]
    caplog.clear()
    again = trainer(
        tmp_path, MFLossMonitor(), restore_callback_states_from_checkpoint=True, **settings
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    assert [shown(caplog, pattern) for pattern in patterns] == [found[2:] for found in whole]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["MFLossMonitor"]["attributes"]["saved_mean"]
    assert (saved["global_step"], saved["num_losses"]) == (2, 2)


def test_a_loop_without_outputs(caplog):
    """Without `step_output` the logged means are printed, and one warning says what is missing."""
    loop = Loop(max_steps=6, epochs=1)
    for _ in range(2):
        loop.state.global_step = 0
        loop.send("on_train_begin")
        for number in range(1, 7):
            loop.step(None, seconds=number / 4)
            if number in (2, 6):
                logs = {"loss": float(number), "grad_norm": 0.5, "learning_rate": 5e-5}
                loop.send("on_log", logs=logs)
                loop.send("on_log", logs={"eval_loss": 9.0})
        loop.send("on_log", logs={"train_loss": 9.0})
        loop.send("on_train_end")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]

    assert [w for w in warnings if "step_output" in w] == [
        (
            "MFLossMonitor gets no `step_output` in this loop. It prints only the numbers that the "
            "loop logs, without overflow, loss scale and the loss of each step."
        )
    ]
    rest = "lr: 5e-05, overflow cond: unavailable, loss_scale: unavailable, global_norm: [0.5]"
    assert records(caplog) == 2 * [
        "{ Epoch:[  1/  1], step:[    2/    6], loss:[2.000/2.000], per_step_time: 375ms, " + rest,
        "{ Epoch:[  1/  1], step:[    6/    6], loss:[6.000/4.667], per_step_time: 1125ms, " + rest,
    ]
