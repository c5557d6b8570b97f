"""The sections of a recipe, as dataclasses."""

from dataclasses import dataclass, field
from typing import Any, Literal, final

from mfwrap.config import StepConfig
from mfwrap.recipes.data.sections import Section

__all__ = ["RunnerWrapperSection", "Sections"]


@final
@dataclass(frozen=True, kw_only=True)
class RunnerWrapperSection(Section):
    """MindFormers' section of the same name, and the settings of the step that are ours.

    Source: MindFormers, ``runner_wrapper``, ``use_skip_data_by_global_norm``,
    ``calculate_per_token_loss`` and ``monitor_config.global_norm_spike_threshold``.

    Raises:
        ValueError: If two values exclude each other.
    """

    type: Literal["MFTrainOneStepCell", "mf_wrapper"] = "MFTrainOneStepCell"
    """MindFormers' name of the step."""

    scale_sense: float | dict[str, Any] | None = None
    """Loss scale: a number, or an update cell with ``type``; by default as `MFTrainer`'s."""

    use_clip_grad: bool | None = None
    """Clip gradients by their global norm; by default if ``training.max_grad_norm`` is given."""

    max_grad_norm: float | None = None
    """Largest global norm; by default ``training.max_grad_norm``, and 1 without it."""

    local_norm: bool = False
    """As in `StepConfig`."""

    local_norm_groups: Literal["layer"] | list[str] | None = None
    """As in `StepConfig`."""

    calculate_per_token_loss: bool | None = None
    """``True``: divide by the number of targets of the whole update, which the model must allow;
    ``False``: the mean over micro-batches. By default as the Trainer does."""

    use_skip_data_by_global_norm: bool = False
    """As in `StepConfig`."""

    global_norm_spike_threshold: float | None = None
    """As in `StepConfig`; by default that of ``monitor_config``, and 1 without it."""

    max_consecutive_skips: int | None = StepConfig().max_consecutive_skips
    """As in `StepConfig`."""

    def __post_init__(self) -> None:
        """Refuse a limit that is none, and skipping without clipping."""
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            msg = f"`max_grad_norm` must be > 0, got {self.max_grad_norm}"
            raise ValueError(msg)
        if self.use_clip_grad is False and self.use_skip_data_by_global_norm:
            msg = (
                "`use_skip_data_by_global_norm` must go with `use_clip_grad`, which computes the "
                "norm, got use_clip_grad=False"
            )
            raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class Sections(Section):
    """A recipe as it is written: what each section must hold is checked when it is built."""

    task: str
    """What is trained: a name of `mfwrap.recipes.tasks.table.TASKS`."""

    model: dict[str, Any]
    """See `mfwrap.recipes.models.settings.ModelSettings`."""

    data: dict[str, Any]
    """``type``, a name of `mfwrap.recipes.tasks.table.SOURCES`, and the keys of that source."""

    training: dict[str, Any] = field(default_factory=dict)
    """Fields of ``transformers.TrainingArguments``, or of the task's own arguments."""

    runner_wrapper: dict[str, Any] | None = None
    """See `RunnerWrapperSection`."""

    optimizer: dict[str, Any] | None = None
    """MindFormers' section."""

    lr_schedule: dict[str, Any] | None = None
    """MindFormers' section."""

    ema: dict[str, Any] | None = None
    """Arguments of `ExponentialMovingAverage`."""

    peft: dict[str, Any] | None = None
    """``type``, ``lora`` for one, and arguments of PEFT's configuration of that type."""

    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """``type``, a name of `mfwrap.callbacks`, and the arguments of that callback."""

    monitor_config: dict[str, Any] | None = None
    """MindFormers' section: arguments of `TrainingStateMonitor`, and ``monitor_on``."""
