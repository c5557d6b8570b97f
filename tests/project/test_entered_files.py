"""One training step runs code in few files, so that a reader can follow it."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    Model,
    StepConfig,
)
from mfwrap.accelerate import attach
from mfwrap.callbacks import Callback, LossMonitor, MFLossMonitor, TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.paths import ROOT
from support.small_networks import Classifier, labelled_batches
from support.trainer_runs import Counting, padded, tiny_llama


@cache
def source_file(name: str) -> str | None:
    """Return a file's path relative to the repository.

    Return None for an ``__init__.py``, and for a file that belongs to no package of the project.
    Files of ``mfwrap.compatibility`` do not count: each of its functions reads one name of another
    library, which its own name says, so a reader need not open it.
    """
    # Resolve links: an editable install may contain links to the files of the repository.
    path = Path(name).resolve()
    if path.name == "__init__.py" or not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    if relative.is_relative_to("mfwrap/compatibility"):
        return None
    return str(relative) if relative.parts[0] in {"mfwrap", "callbacks", "recipes"} else None


@contextmanager
def entered(files: set[str]) -> Iterator[None]:
    """Add to `files` each file whose functions are called within the ``with`` block.

    See `source_file` for the files that are left out.
    """

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and (path := source_file(frame.f_code.co_filename)) is not None:
            files.add(path)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _cell(*, everything: bool) -> set[str]:
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    more: dict[str, Any] = {}
    if everything:
        more = {
            "scale_sense": DynamicLossScaleUpdateCell(1024.0, 2, 100),
            "local_norm": True,
            "gradient_accumulation_steps": 2,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            "ema": ExponentialMovingAverage(network, 0.9),
            "use_skip_data_by_global_norm": True,
            "global_norm_spike_threshold": 100.0,
        }
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, **more)
    batches = labelled_batches(3, size=8)
    files: set[str] = set()
    for number, batch in enumerate(batches):
        if number == 2:
            with entered(files):
                cell(*batch)
        else:
            cell(*batch)
    return files


def _attached() -> set[str]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    attach(accelerator, StepConfig(local_norm=True))
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    files: set[str] = set()

    def step(batch: Any) -> None:
        with accelerator.accumulate(network):
            accelerator.backward(network(*batch))
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    first, second, third = labelled_batches(3, size=8)
    step(first)
    step(second)
    with entered(files):
        step(third)
    return files


class _TraceThirdStep:
    """Collect the files whose functions the third step calls."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._tracing: Any = None

    def at_step(self, number: int) -> None:
        """Start tracing at the start of step 2, counted from 0; stop at the start of step 3."""
        if number == 2:
            self._tracing = entered(self.files)
            self._tracing.__enter__()
        elif self._tracing is not None:
            self._tracing.__exit__(None, None, None)
            self._tracing = None


def _model() -> set[str]:
    trace = _TraceThirdStep()

    class Tracer(Callback):
        def on_train_step_begin(self, run_context: Any) -> None:
            trace.at_step(run_context.original_args().cur_step_num - 1)

    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    scale = DynamicLossScaleUpdateCell(1024.0, 2, 100)
    model = Model(MFTrainOneStepCell(network, optimizer, use_clip_grad=True, scale_sense=scale))
    data = DataLoader([pair for batch in labelled_batches(5) for pair in zip(*batch, strict=True)])
    model.train(1, data, callbacks=[Tracer(), LossMonitor()])
    return trace.files


def _trainer(*monitors: TrainerCallback) -> set[str]:
    trace = _TraceThirdStep()

    class Tracer(TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            trace.at_step(state.global_step)

    trainer = MFTrainer(
        tiny_llama(),
        TrainingArguments(
            "unused",
            max_steps=5,
            per_device_train_batch_size=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=Counting(20),
        data_collator=padded,
        callbacks=[Tracer(), *monitors],
        step=StepConfig(local_norm=True),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trace.files


LOOPS: dict[str, tuple[Callable[[], set[str]], int]] = {
    "cell, clipping": (lambda: _cell(everything=False), 16),
    "cell, everything": (lambda: _cell(everything=True), 20),
    "attached step": (_attached, 19),
    "Model, LossMonitor": (_model, 24),
    "MFTrainer, MFLossMonitor": (lambda: _trainer(MFLossMonitor()), 37),
    "MFTrainer, both monitors": (lambda: _trainer(MFLossMonitor(), TrainingStateMonitor()), 55),
}
"""Ways to train, each with the largest number of files that its step may enter."""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_enters_few_files(loop, tmp_path, monkeypatch, request):
    """One step runs code in at most as many files of mfwrap as LOOPS allows for this loop."""
    monkeypatch.chdir(tmp_path)
    train, most = LOOPS[loop]

    # A test before this one may have given a monitor's own logger a level.
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    logging.disable(logging.WARNING)
    assert len(train()) <= most
