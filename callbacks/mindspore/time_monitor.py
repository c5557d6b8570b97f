"""Print how long epochs and their steps take."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from mfwrap.arguments import check_bool, check_int
from mfwrap.callbacks.shared.run_log import print_line
from mfwrap.model import Callback, RunContext


@dataclass(slots=True)
class _Pass:
    """Times of a pass over a dataset, in seconds."""

    start: float
    last_step_end: float
    num_steps: int = 0
    data_seconds: float = 0.0


@final
class TimeMonitor(Callback):
    """Print the time of each epoch and the mean time of its steps, on the main process.

    ::

        Train epoch time: 581.132 ms, per step time: 193.711 ms (data time: 0.725 ms)

    Synchronizes with the device at the end of each epoch, so that the time includes all work of the
    epoch.

    Source: MindSpore, ``train.TimeMonitor``.

    Args:
        data_size: Number of steps by which the epoch's time is divided for the mean; ``None`` for
            the number of steps in the epoch.
        data_time: Also print the mean time between steps, in which data is loaded.
        clock: Returns seconds from an arbitrary start.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `data_size` is below 1.
    """

    def __init__(
        self,
        data_size: int | None = None,
        data_time: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if data_size is not None:
            check_int("data_size", data_size, minimum=1)
        check_bool("data_time", data_time)
        self._data_size = data_size
        self._shows_data_time = data_time
        self._clock = clock
        self._passes: list[_Pass] = []

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Start the clock. An evaluation within a training epoch has times of its own."""
        del run_context
        now = self._clock()
        self._passes.append(_Pass(now, now))

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Count the time since the last step as loading time."""
        del run_context
        present = self._passes[-1]
        present.data_seconds += self._clock() - present.last_step_end

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Count the step."""
        del run_context
        self._passes[-1].num_steps += 1
        self._passes[-1].last_step_end = self._clock()

    on_eval_epoch_begin = on_train_epoch_begin
    on_eval_step_begin = on_train_step_begin
    on_eval_step_end = on_train_step_end

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Print the times."""
        self._end("Train", run_context)

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """Print the times."""
        self._end("Eval", run_context)

    def _end(self, mode: str, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        parameter = next(parameters.network.parameters(), None)
        if parameter is not None and parameter.device.type != "cpu":
            torch.accelerator.synchronize(parameter.device)
        ended = self._passes.pop()
        milliseconds = (self._clock() - ended.start) * 1000
        num_steps = self._data_size or max(ended.num_steps, 1)
        line = (
            f"{mode} epoch time: {milliseconds:5.3f} ms, "
            f"per step time: {milliseconds / num_steps:5.3f} ms"
        )
        if self._shows_data_time:
            data_milliseconds = ended.data_seconds * 1000 / num_steps
            line += f" (data time: {data_milliseconds:5.3f} ms)"
        if parameters.get("is_world_process_zero", True):
            print_line(line)
