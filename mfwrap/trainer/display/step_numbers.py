"""Say what the last step of a training was, for the display in a terminal."""

import collections
import logging
import math
from collections.abc import Callable, Sequence
from typing import final

import torch

from mfwrap.memory import GIB, peak_memory
from mfwrap.outputs import StepReport
from mfwrap.tensors.deferred import DeferredReads

_STEPS_BETWEEN_PEAKS = 10


@final
class ShownStep:
    """Say what the last step was, as soon as its values have arrived on the host.

    While this object is open, it also writes what callbacks log, except for records of steps.

    Args:
        show: Called with a text for each number of a step, such as ``"loss 2.1"``.
        write: Called with a line about a step whose update was skipped, or from the log.
    """

    def __init__(self, show: Callable[[Sequence[str]], None], write: Callable[[str], None]) -> None:
        self._show = show
        self._reads = DeferredReads()
        self._memory = ""
        self._log = _LineHandler(write)
        logging.getLogger("mfwrap").addHandler(self._log)

    def copy(self, step: int, report: StepReport) -> None:
        """Show the previous step, and start to copy the values of this one."""
        self._reads.flush()
        output = report.output
        values = {"loss": output.loss, "norm": output.global_norm, "lr": output.learning_rate}
        values |= {"scale": output.loss_scale, "skipped": report.skipped}
        values["num_skipped"] = report.skipped_updates
        known = {name: value for name, value in values.items() if value is not None}
        device = next(iter(known.values())).device
        tensors = [value.detach().float().mean().to(device) for value in known.values()]

        if step % _STEPS_BETWEEN_PEAKS == 0 or not self._memory:
            peak = peak_memory(device)
            self._memory = "" if peak is None else f"{peak / GIB:.3g} GiB"

        def receive(numbers: Sequence[float]) -> None:
            self._receive(step, dict(zip(known, numbers, strict=True)))

        self._reads.submit(torch.stack(tensors), receive)

    def flush(self) -> None:
        """Show the last step; this reads its values on the host."""
        self._reads.flush()

    def say(self, line: str) -> None:
        """Write a line."""
        self._log.write(line)

    def close(self) -> None:
        """Forget the step whose values have not arrived, and leave the log to others."""
        self._reads.discard()
        logging.getLogger("mfwrap").removeHandler(self._log)

    def _receive(self, step: int, values: dict[str, float]) -> None:
        scale = values.pop("scale", 1.0)
        is_skipped = bool(values.pop("skipped", 0.0))
        num_skipped = int(values.pop("num_skipped", 0.0))
        texts = [f"{name} {value:.4g}" for name, value in values.items() if not math.isnan(value)]
        if scale != 1:
            texts.append(f"scale {scale:g}")
        if is_skipped:
            norm = f"norm {values['norm']:.4g}" if "norm" in values else "non-finite gradients"
            # A monitor may have said more about it.
            if not self._log.has_said(f"step {step}: "):
                self._log.write(f"step {step}: update skipped, loss {values['loss']:.4g}, {norm}")
        if num_skipped:
            texts.append(f"skipped {num_skipped}")
        # The last one: a narrow terminal cuts the end of the line.
        if self._memory:
            texts.append(self._memory)
        # The bar may already count the next step.
        self._show([f"step {step}: {texts[0]}", *texts[1:]] if texts else texts)


@final
class _LineHandler(logging.Handler):
    """Write what callbacks log as lines, except for records of steps.

    Args:
        write: Writes one line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        # By this name, mfwrap.callbacks.shared.run_log knows that there is a bar.
        self.name = "mfwrap-bar"
        self._write = write
        self._said: collections.deque[str] = collections.deque(maxlen=16)

    def has_said(self, beginning: str) -> bool:
        """Return whether one of the last lines says of a step that its update was skipped."""
        return any(said.startswith(beginning) and "update skipped" in said for said in self._said)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record in one line, unless the root logger's handlers write it."""
        is_step = record.levelno < logging.WARNING and record.name.endswith(".loss_monitor")
        if not is_step and not logging.getLogger().handlers:
            self.write(record.getMessage())

    def write(self, text: str) -> None:
        """Write a text in one line."""
        line = " ".join(text.split())
        self._said.append(line)
        self._write(line)
