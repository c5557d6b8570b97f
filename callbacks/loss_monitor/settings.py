"""Settings of the loss monitor."""

from dataclasses import dataclass

from mfwrap.arguments import check_bool, check_int, check_positive_number

__all__ = ["LossMonitorSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMonitorSettings:
    """Settings of `MFLossMonitor`, which describes them; numbers, bools and strings alone."""

    per_print_times: int
    origin_epochs: int | None
    dataset_size: int | None
    initial_epoch: int
    initial_step: int
    global_batch_size: int
    loss_over_ranks: bool
    flops_per_step: float | None
    count_flops: bool
    peak_tflops: float | None
    tensorboard_dir: str | None
    log_loss_scale_to_tensorboard: bool
    log_timers_to_tensorboard: bool

    def __post_init__(self) -> None:
        """Refuse what does not fit.

        Raises:
            TypeError: If a setting has the wrong type.
            ValueError: If one is out of range, or two do not go together.
        """
        check_int("per_print_times", self.per_print_times, minimum=1)
        for name in ("origin_epochs", "dataset_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=1)
        for name in ("initial_epoch", "initial_step", "global_batch_size"):
            check_int(name, getattr(self, name), minimum=0)
        for name in ("flops_per_step", "peak_tflops"):
            if getattr(self, name) is not None:
                check_positive_number(name, getattr(self, name), finite=True)
        for name in ("loss_over_ranks", "count_flops", *_TENSORBOARD_FLAGS):
            check_bool(name, getattr(self, name))
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.count_flops and self.flops_per_step is not None:
            msg = f"`count_flops` must be False where `flops_per_step` is {self.flops_per_step}"
            raise ValueError(msg)
        if self.peak_tflops is not None and not self.shows_flops:
            msg = f"`peak_tflops` needs `flops_per_step` or `count_flops`, got {self.peak_tflops}"
            raise ValueError(msg)
        for name in _TENSORBOARD_FLAGS:
            if getattr(self, name) and self.tensorboard_dir is None:
                msg = f"`{name}` must be False without `tensorboard_dir`, got True"
                raise ValueError(msg)

    @property
    def shows_flops(self) -> bool:
        """FLOPs are given or to be counted."""
        return self.count_flops or self.flops_per_step is not None


_TENSORBOARD_FLAGS = ("log_loss_scale_to_tensorboard", "log_timers_to_tensorboard")
