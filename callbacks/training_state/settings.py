"""Settings of the training state monitor."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mfwrap.arguments import check_bool, check_int, check_positive_number
from mfwrap.callbacks.training_state.stable_rank import StableRankSettings

__all__ = [
    "FORMAT_SETTINGS",
    "TrainingStateSettings",
    "checked_formats",
    "checked_stable_rank",
    "checked_target",
]

FORMATS = ("log", "tensorboard", "jsonl", "trackers")
FORMAT_SETTINGS = (
    "local_norm_format",
    "device_local_norm_format",
    "local_loss_format",
    "device_local_loss_format",
    "optimizer_state_format",
    "weight_state_format",
    "max_attention_logit_format",
    "expert_load_format",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStateSettings:
    """Settings of `TrainingStateMonitor`, which describes them; what JSON can hold alone."""

    target: tuple[str, ...]
    invert: bool
    step_interval: int
    local_norm_format: tuple[str, ...]
    device_local_norm_format: tuple[str, ...]
    local_loss_format: tuple[str, ...]
    device_local_loss_format: tuple[str, ...]
    optimizer_state_format: tuple[str, ...]
    weight_state_format: tuple[str, ...]
    max_attention_logit_format: tuple[str, ...]
    expert_load_format: tuple[str, ...]
    expert_capacity_factor: float | None
    stable_rank_config: StableRankSettings
    throughput_baseline: float | None
    print_struct: bool
    check_for_nan_in_loss_and_grad: bool
    check_for_global_norm: bool
    use_skip_data_by_global_norm: bool
    global_norm_spike_threshold: float
    global_norm_spike_count_threshold: int
    find_culprit: bool
    replay: bool
    spike_factor: float
    folder: str | None
    tensorboard_dir: str | None
    origin_epochs: int | None
    dataset_size: int | None
    initial_epoch: int
    initial_step: int
    global_batch_size: int

    def __post_init__(self) -> None:
        """Refuse what does not fit.

        Raises:
            TypeError: If a setting has the wrong type.
            ValueError: If one is out of range, or two do not go together.
        """
        for name in _BOOLS:
            check_bool(name, getattr(self, name))
        for name in ("step_interval", "global_norm_spike_count_threshold"):
            check_int(name, getattr(self, name), minimum=1)
        for name in ("origin_epochs", "dataset_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=1)
        for name in ("initial_epoch", "initial_step", "global_batch_size"):
            check_int(name, getattr(self, name), minimum=0)
        for name in ("global_norm_spike_threshold", "spike_factor"):
            check_positive_number(name, getattr(self, name), finite=True)
        for name in ("throughput_baseline", "expert_capacity_factor"):
            if getattr(self, name) is not None:
                check_positive_number(name, getattr(self, name), finite=True)
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.check_for_global_norm and self.use_skip_data_by_global_norm:
            msg = (
                "`check_for_global_norm` and `use_skip_data_by_global_norm` must not both be True; "
                "choose one"
            )
            raise ValueError(msg)
        for name in ("replay", "check_for_nan_in_loss_and_grad"):
            # What tells an ordinary overflow from a fault is the search for who is to blame.
            if getattr(self, name) and not self.find_culprit:
                msg = f"`{name}` must be False without `find_culprit`, got True"
                raise ValueError(msg)
        if self.spike_factor <= 1:
            msg = f"`spike_factor` must be > 1, got {self.spike_factor}"
            raise ValueError(msg)
        for name, formats in self._formats_by_name().items():
            if "tensorboard" in formats and self.tensorboard_dir is None:
                msg = f"`{name}` must not hold 'tensorboard' without `tensorboard_dir`"
                raise ValueError(msg)

    @property
    def formats(self) -> frozenset[str]:
        """All formats that something is written in."""
        return frozenset(one for formats in self._formats_by_name().values() for one in formats)

    def _formats_by_name(self) -> dict[str, tuple[str, ...]]:
        named = {name: getattr(self, name) for name in FORMAT_SETTINGS}
        return {**named, "stable_rank_config.format": self.stable_rank_config.format}


_BOOLS = (
    "invert",
    "print_struct",
    "check_for_nan_in_loss_and_grad",
    "check_for_global_norm",
    "use_skip_data_by_global_norm",
    "find_culprit",
    "replay",
)


def checked_formats(**settings: Any) -> dict[str, tuple[str, ...]]:
    """Return settings of formats as tuples, without repetitions.

    Args:
        settings: By name: ``None``, one of ``"log"``, ``"tensorboard"``, ``"jsonl"`` and
            ``"trackers"``, or a list of them.

    Raises:
        TypeError: If one is none of these.
        ValueError: If one holds another word.
    """
    return {name: _formats(name, value) for name, value in settings.items()}


def _formats(name: str, value: Any) -> tuple[str, ...]:
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, str) for one in listed):
        msg = (
            f"`{name}` must be a str, a list of str or None, got {value!r} of type "
            f"{type(value).__name__}"
        )
        raise TypeError(msg)
    unknown = [one for one in listed if one not in FORMATS]
    if unknown:
        msg = f"`{name}` must be of {list(FORMATS)}, got {unknown}"
        raise ValueError(msg)
    return tuple(dict.fromkeys(listed))


def checked_target(value: Any) -> tuple[str, ...]:
    """Return patterns of parameters' names as a tuple; ``None`` is ``(".*",)``.

    Raises:
        TypeError: If `value` is no list of str.
        ValueError: If it is empty, or a pattern is no regular expression.
    """
    if value is None:
        return (".*",)
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        msg = (
            f"`target` must be a list of str or None, got {value!r} of type {type(value).__name__}"
        )
        raise TypeError(msg)
    if not value:
        msg = "`target` must hold at least one pattern, got none"
        raise ValueError(msg)
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            msg = f"`target` must hold regular expressions, got {pattern!r}: {error}"
            raise ValueError(msg) from error
    return tuple(value)


def checked_stable_rank(value: Any) -> StableRankSettings:
    """Return MindFormers' ``stable_rank_config`` as settings; ``None`` shows nothing.

    Raises:
        TypeError: If `value` is no mapping, or a setting in it has the wrong type.
        ValueError: If it has another key than MindFormers', or a setting is out of range.
    """
    if value is None:
        return StableRankSettings()
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        msg = f"`stable_rank_config` must be a dict or None, got {value!r} of type {kind}"
        raise TypeError(msg)
    known = [field.name for field in fields(StableRankSettings)]
    unknown = [key for key in value if key not in known]
    if unknown:
        msg = f"`stable_rank_config` must have keys of {known}, got {unknown}"
        raise ValueError(msg)
    given = dict(value)
    formats = checked_formats(**{"stable_rank_config.format": given.pop("format", None)})
    return StableRankSettings(
        format=formats["stable_rank_config.format"],
        target=checked_target(given.pop("target", None)),
        **given,
    )
