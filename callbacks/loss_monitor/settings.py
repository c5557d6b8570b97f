"""Settings of the loss monitor."""

import os
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from mfwrap.arguments import check_choice, check_int, check_positive_number, directory_name
from mfwrap.callbacks.shared.progress import RunSettings
from mfwrap.callbacks.shared.settings import check_bools


@dataclass(frozen=True, slots=True)
class LossMonitorSettings(RunSettings):
    """Arguments of `mfwrap.callbacks.MFLossMonitor`.

    Source: MindFormers, ``MFLossMonitor``; `console` and the arguments after it are ours.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range or contradicts another one.
    """

    per_print_times: int = 1
    """Steps from one record to the next."""

    _: KW_ONLY

    console: Literal["auto", "lines"] = "auto"
    """``"lines"`` prints the records. With ``"auto"``, they are not printed while an `MFTrainer`
    shows its progress bar in a terminal."""

    loss_over_ranks: bool = True
    """Print the mean of all ranks' losses. ``False``: print the main process's own loss, without
    communication."""

    flops_per_step: float | None = None
    """FLOPs of one update on this device; ``None`` if unknown. If the batch grows, those of an
    update of the global batch."""

    count_flops: bool = False
    """Count the FLOPs of the first update, from ``on_step_begin`` to ``on_step_end``. Counting
    makes that update slow. A compiled network cannot be counted.
    `mfwrap.callbacks.loss_monitor.flops.StepFlops` lists the operations that count."""

    peak_tflops: float | None = None
    """Peak rate of this device in dense half-precision TFLOP/s, for the ``mfu``. ``None`` takes the
    rate from the maker's data sheet, if the device is a known GPU."""

    tensorboard_dir: str | os.PathLike[str] | None = None
    """Folder of the events file with MindFormers' curves. ``None`` writes no curves."""

    log_loss_scale_to_tensorboard: bool = False
    """Also write the loss scale as a curve."""

    log_timers_to_tensorboard: bool = False
    """Also write step time and throughput as curves."""

    def __post_init__(self) -> None:
        folder = directory_name("tensorboard_dir", self.tensorboard_dir)
        object.__setattr__(self, "tensorboard_dir", folder)
        check_int("per_print_times", self.per_print_times, minimum=1)
        self.check_run()
        for name in ("flops_per_step", "peak_tflops"):
            if getattr(self, name) is not None:
                check_positive_number(name, getattr(self, name), finite=True)
        check_choice("console", self.console, ("auto", "lines"))
        check_bools(self)
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.count_flops and self.flops_per_step is not None:
            msg = (
                f"`count_flops` must be False if `flops_per_step` is given, got flops_per_step="
                f"{self.flops_per_step}"
            )
            raise ValueError(msg)
        if self.peak_tflops is not None and not self.shows_flops:
            msg = (
                f"`peak_tflops` needs `flops_per_step` or `count_flops=True`, got peak_tflops="
                f"{self.peak_tflops} alone"
            )
            raise ValueError(msg)
        for name in ("log_loss_scale_to_tensorboard", "log_timers_to_tensorboard"):
            if getattr(self, name) and self.tensorboard_dir is None:
                msg = f"`{name}` must be False without `tensorboard_dir`, got True"
                raise ValueError(msg)

    @property
    def shows_flops(self) -> bool:
        """Whether FLOPs are given or will be counted."""
        return self.count_flops or self.flops_per_step is not None
