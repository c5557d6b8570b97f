"""Settings of the training state monitor."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from mfwrap.arguments import check_int, check_positive_number, described, directory_name
from mfwrap.callbacks.shared.progress import RunSettings
from mfwrap.callbacks.shared.settings import check_bools
from mfwrap.callbacks.training_state.stable_rank import StableRankSettings

Formats: TypeAlias = str | Sequence[str] | None
"""Where a metric is written: a name of `FORMATS`, several names, or ``None`` for nowhere. Settings
keep it as a tuple."""

FORMATS = ("log", "tensorboard", "jsonl", "trackers")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStateSettings(RunSettings):
    """Arguments of `mfwrap.callbacks.TrainingStateMonitor`.

    A setting ``..._format`` says where a metric is written: ``"log"``, ``"tensorboard"``,
    ``"jsonl"`` or ``"trackers"``, a list of these, or ``None``. A metric with ``None`` is not
    computed.

    Source: MindFormers, ``monitor_config``. Not in MindFormers: `expert_load_format`,
    `expert_capacity_factor`, `noise_scale_format`, `noise_scale_steps`, `find_culprit`, `replay`,
    `spike_factor`, `state_interval`, `fingerprints`, `folder`, `log_to`, and the formats
    ``"jsonl"`` and ``"trackers"``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range or contradicts another one.
    """

    target: Sequence[str] | None = None
    """Regular expressions that select parameters for ``local_norm/`` and ``adam_*_norm/``. A
    parameter is reported if at least one expression is found in its name. ``None`` selects all
    parameters."""

    invert: bool = False
    """Report the parameters that `target` does not select, instead of those that it selects."""

    step_interval: int = 1
    """Steps from one record to the next."""

    local_norm_format: Formats = None
    """``local_norm/<parameter>``: L2 norm of this rank's unscaled gradients of a parameter, or of a
    group of parameters if the step has ``local_norm_groups``."""

    device_local_norm_format: Formats = None
    """``device_local_norm``: L2 norm of all of this rank's unscaled gradients."""

    local_loss_format: Formats = None
    """``local_loss``: loss of this rank over all of its micro-batches."""

    device_local_loss_format: Formats = None
    """``device_accum_local_loss``: the same number as ``local_loss``."""

    optimizer_state_format: Formats = None
    """``adam_m_norm/<parameter>`` and ``adam_v_norm/<parameter>``: L2 norms of Adam's moments after
    the update. Each reported step reads the moments once."""

    weight_state_format: Formats = None
    """``weight_norm``: L2 norm of all trainable weights after the update. Each reported step
    reads the weights once."""

    update_ratio_format: Formats = None
    """``update_ratio/<parameter>``: root mean square of the update of a weight, divided by that of
    the weight, from at most 256 of its elements; about 0.001 is ordinary. The culprit finder
    measures it in each step anyway, so it needs `find_culprit`. NaN for a weight of zeros."""

    max_attention_logit_format: Formats = None
    """``max_attention_logit/<module>/head_<i>``, ``/mean`` and ``/max``: largest attention logit of
    each head over all micro-batches. The logits are computed a second time.
    `mfwrap.tensors.attention_logits.AttentionLogits` lists the kinds of attention
    that are recognized."""

    expert_load_format: Formats = None
    """``expert_load/<module>/expert_<i>``: share of the tokens that an expert gets, in a
    mixture-of-experts network. ``expert_imbalance/<module>``: ratio of the largest share to the
    mean share. ``expert_bias_spread/<module>``: largest minus smallest of the biases by which a
    router chooses experts, see `mfwrap.optimizers.ExpertBias`; not for sharded biases."""

    expert_capacity_factor: float | None = None
    """Capacity of an expert as a multiple of the mean share. If set, ``expert_load_format`` also
    writes ``drop_rate/<module>``, the share of assignments that experts of this capacity would
    drop."""

    noise_scale_format: Formats = None
    """``noise_scale``: gradient noise scale in samples, the batch size from which on larger batches
    gain little. It needs two ranks with samples of their own, and local norms. See
    `mfwrap.callbacks.training_state.noise_scale.NoiseScale`."""

    noise_scale_steps: int = 100
    """Number of steps over which ``noise_scale`` is averaged. It is written at the multiples."""

    stable_rank_config: Mapping[str, Any] | StableRankSettings | None = None
    """Mapping with the fields of `StableRankSettings` as keys. It configures the metrics
    ``weight_stable_rank/<parameter>`` and ``weight_eigenvalue/<parameter>``. For the weights of
    experts, ``/expert_<i>``, ``/expert_max``, ``/expert_min`` or ``/expert_mean`` follows."""

    throughput_baseline: float | None = None
    """Samples per second and process to compare with. ``throughput_linearity`` is the ratio of the
    measured throughput to this baseline. It is written to the log, to TensorBoard if
    `tensorboard_dir` is given, and in every format that another metric has. ``None`` writes
    nothing."""

    print_struct: bool = False
    """Log names and shapes of all trainable parameters, and stop after the first step."""

    check_for_nan_in_loss_and_grad: bool = False
    """Raise ``ValueError`` when the loss is non-finite, or when the gradients are non-finite for
    another reason than a loss scale that is too high. An update with non-finite gradients has been
    skipped by then."""

    check_for_global_norm: bool = False
    """Raise ``RuntimeError`` at a global norm of at least `global_norm_spike_threshold`. A resumed
    run continues if there is a spike again at the same step."""

    use_skip_data_by_global_norm: bool = False
    """Raise ``ValueError`` after `global_norm_spike_count_threshold` spikes in a row. A spike is a
    global norm of at least `global_norm_spike_threshold`. To skip the update of each spike, also
    set ``StepConfig(use_skip_data_by_global_norm=True)``."""

    global_norm_spike_threshold: float = 3.0
    """Smallest global norm that counts as a spike, for `check_for_global_norm` and
    `use_skip_data_by_global_norm`."""

    global_norm_spike_count_threshold: int = 10
    """Number of spikes in a row that stops the training."""

    find_culprit: bool = True
    """Write ``anomalies.jsonl``, which names the layer and rank where a step went wrong."""

    replay: bool = False
    """Repeat a step that has non-finite gradients, with the same inputs and random numbers, to name
    the first module whose output or gradient is non-finite. Also run the rows of a bad step one by
    one, to name the samples that stand out. For this, the monitor keeps references to the inputs of
    two steps."""

    show_samples: bool = False
    """Also write the texts of the samples that `replay` names, up to 500 characters each. Texts are
    decoded with the Trainer's ``processing_class``; without one, the token ids are written."""

    spike_factor: float = 2.0
    """Smallest ratio of a global norm to the usual one that is an anomaly. It must also be eight
    deviations above the usual norm, see `mfwrap.tensors.robust_window.RobustWindow`."""

    state_interval: int = 10
    """Steps from one look at weights, optimizer state and buffers to the next, to find those that
    have changed by themselves. A look reads each of them once."""

    fingerprints: bool = False
    """Write ``fingerprints.jsonl``: hashes of each reported step's random states, inputs, gradients
    and weights, by which ``mfwrap compare`` finds the first difference of two runs. Each rank reads
    its inputs once, and its gradients and weights twice. A record has 38 bytes per gradient and
    weight tensor, and 20 bytes per row of the inputs. The inputs are recorded from
    ``on_step_begin`` on, which a loop of your own must send. The gradients are recorded at
    ``on_pre_optimizer_step``. In a loop that does not send this event, such as `Model` or a loop
    around `MFTrainOneStepCell`, they are recorded when the optimizer's step begins, if
    ``on_step_begin`` has the keywords ``model`` and ``optimizer``. Then an update that is skipped
    without a fused kernel has no gradients in the record."""

    folder: str | os.PathLike[str] | None = None
    """Run folder; ``None`` takes ``args.output_dir``."""

    tensorboard_dir: str | os.PathLike[str] | None = None
    """Folder of the curves. Ranks other than 0 write to ``rank_<n>`` in it."""

    log_to: Callable[[dict[str, float], int], None] | None = field(
        default=None, repr=False, compare=False
    )
    """Function that writes the format ``"trackers"`` in a loop of your own, for example
    `accelerate.Accelerator.log`. The main process calls it with a dict of numbers by tag, and the
    step."""

    def __post_init__(self) -> None:
        forms = {
            "target": _target(self.target),
            **{name: _formats(name, getattr(self, name)) for name in _format_settings()},
            "stable_rank_config": stable_rank_settings(self.stable_rank_config),
            "folder": directory_name("folder", self.folder),
            "tensorboard_dir": directory_name("tensorboard_dir", self.tensorboard_dir),
        }
        for name, value in forms.items():
            object.__setattr__(self, name, value)
        check_bools(self)
        self.check_run()
        counts = ("step_interval", "noise_scale_steps", "state_interval")
        for name in (*counts, "global_norm_spike_count_threshold"):
            check_int(name, getattr(self, name), minimum=1)
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
        for name, needed in (
            # The culprit finder distinguishes an ordinary overflow from a fault.
            ("replay", "find_culprit"),
            ("check_for_nan_in_loss_and_grad", "find_culprit"),
            ("show_samples", "replay"),
        ):
            if getattr(self, name) and not getattr(self, needed):
                msg = f"`{name}` must be False without `{needed}`, got True"
                raise ValueError(msg)
        if self.update_ratio_format and not self.find_culprit:
            formats = self.update_ratio_format
            msg = f"`update_ratio_format` must be None without `find_culprit`, got {formats!r}"
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
        """All formats that are set for at least one metric."""
        return frozenset(one for formats in self._formats_by_name().values() for one in formats)

    @property
    def throughput_formats(self) -> tuple[str, ...]:
        """Formats of ``throughput_linearity``."""
        curves = set() if self.tensorboard_dir is None else {"tensorboard"}
        return tuple(sorted({"log"} | curves | self.formats))

    def _formats_by_name(self) -> dict[str, Sequence[str]]:
        by_name = {name: getattr(self, name) for name in _format_settings()}
        of_stable_rank = stable_rank_settings(self.stable_rank_config).format
        return {**by_name, "stable_rank_config.format": of_stable_rank}


def stable_rank_settings(
    value: Mapping[str, Any] | StableRankSettings | None,
) -> StableRankSettings:
    """Return MindFormers' ``stable_rank_config`` as settings. ``None`` reports no stable rank.

    Raises:
        TypeError: If `value` is not a mapping, or a setting in it has the wrong type.
        ValueError: If `value` has an unknown key, or a setting in it is out of range.
    """
    if value is None:
        return StableRankSettings()
    if isinstance(value, StableRankSettings):
        return value
    if not isinstance(value, Mapping):
        msg = f"`stable_rank_config` must be a dict or None, got {described(value)}"
        raise TypeError(msg)
    known = [each.name for each in fields(StableRankSettings)]
    unknown = [key for key in value if key not in known]
    if unknown:
        msg = f"`stable_rank_config` must have keys among {known}, got {unknown}"
        raise ValueError(msg)
    settings = dict(value)
    return StableRankSettings(
        format=_formats("stable_rank_config.format", settings.pop("format", None)),
        target=_target(settings.pop("target", None)),
        **settings,
    )


def _format_settings() -> list[str]:
    return [each.name for each in fields(TrainingStateSettings) if each.name.endswith("_format")]


def _formats(name: str, value: Any) -> tuple[str, ...]:
    """Return formats as a tuple without repetitions."""
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, str) for one in listed):
        msg = f"`{name}` must be a str, a list of str or None, got {described(value)}"
        raise TypeError(msg)
    unknown = [one for one in listed if one not in FORMATS]
    if unknown:
        msg = f"`{name}` must have formats among {list(FORMATS)}, got {unknown}"
        raise ValueError(msg)
    return tuple(dict.fromkeys(listed))


def _target(value: Any) -> tuple[str, ...]:
    """Return regular expressions as a tuple; ``None`` becomes an expression for every name."""
    if value is None:
        return (".*",)
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        msg = f"`target` must be a list of str or None, got {described(value)}"
        raise TypeError(msg)
    if not value:
        msg = "`target` must hold at least one pattern, got an empty list"
        raise ValueError(msg)
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            msg = f"`target` must hold regular expressions, got {pattern!r}: {error}"
            raise ValueError(msg) from error
    return tuple(value)
