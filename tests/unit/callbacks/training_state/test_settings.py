"""The settings of the training state monitor."""

import dataclasses
import json
import math
import re

import pytest

from mfwrap.callbacks import TrainingStateMonitor

DEFAULTS = {
    "target": (".*",),
    "invert": False,
    "step_interval": 1,
    "local_norm_format": (),
    "device_local_norm_format": (),
    "local_loss_format": (),
    "device_local_loss_format": (),
    "optimizer_state_format": (),
    "weight_state_format": (),
    "max_attention_logit_format": (),
    "throughput_baseline": None,
    "print_struct": False,
    "check_for_nan_in_loss_and_grad": False,
    "check_for_global_norm": False,
    "global_norm_spike_threshold": 3.0,
    "global_norm_spike_count_threshold": 10,
}


def test_defaults_are_those_of_mindformers():
    """Defaults equal those of MindFormers: no metric is shown, all parameters are selected."""
    settings = TrainingStateMonitor()._settings

    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS
    assert dataclasses.asdict(settings.stable_rank_config) == {
        "format": (),
        "step_interval": 100,
        "target": (".*",),
        "do_aggregation": False,
        "moe_show_mode": "all",
        "power_iteration_num": 5,
    }


def test_a_configuration_of_mindformers(tmp_path):
    """MindFormers' ``monitor_config`` is accepted; a format is null, a word or a list."""
    both = ["log", "tensorboard"]
    settings = TrainingStateMonitor(
        **json.loads(
            '{"target": ["layers.0.", "layers.1."], "invert": false, "step_interval": 1,'
            ' "local_loss_format": ["log", "tensorboard"], "local_norm_format": "log",'
            ' "device_local_norm_format": ["tensorboard", "tensorboard"],'
            ' "optimizer_state_format": null, "throughput_baseline": null, "print_struct": false,'
            ' "global_norm_spike_threshold": 3, "global_norm_spike_count_threshold": 10}'
        ),
        tensorboard_dir=tmp_path,
    )._settings

    assert settings.target == ("layers.0.", "layers.1.")
    assert (settings.local_loss_format, settings.local_norm_format) == (tuple(both), ("log",))
    assert settings.device_local_norm_format == ("tensorboard",)
    assert settings.optimizer_state_format == ()


def test_state_makes_the_same_monitor(tmp_path):
    """The saved state survives JSON, and a monitor made from it has the same settings."""
    monitor = TrainingStateMonitor(
        target=["a", "b"],
        local_norm_format=["log", "jsonl"],
        stable_rank_config={"format": "log", "target": ["c"]},
        folder=tmp_path,
        replay=True,
    )
    state = json.loads(json.dumps(monitor.state()))

    assert TrainingStateMonitor.from_state(state)._settings == monitor._settings


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"target": "layers"}, TypeError, "`target` must be a list of str or None, got 'layers'"),
        ({"target": [1]}, TypeError, "`target` must be a list of str or None, got [1]"),
        ({"target": []}, ValueError, "`target` must hold at least one pattern, got an empty list"),
        ({"target": ["("]}, ValueError, "`target` must hold regular expressions, got '('"),
        ({"invert": 1}, TypeError, "`invert` must be a bool, got 1"),
        ({"step_interval": 0}, ValueError, "`step_interval` must be >= 1, got 0"),
        ({"step_interval": 1.0}, TypeError, "`step_interval` must be an int, got 1.0"),
        (
            {"local_norm_format": 3},
            TypeError,
            "`local_norm_format` must be a str, a list of str or None, got 3 of type int",
        ),
        (
            {"weight_state_format": ["log", "csv"]},
            ValueError,
            (
                "`weight_state_format` must have formats among ['log', 'tensorboard', 'jsonl', "
                "'trackers'], got ['csv']"
            ),
        ),
        (
            {"local_loss_format": "tensorboard"},
            ValueError,
            "`local_loss_format` must not hold 'tensorboard' without `tensorboard_dir`",
        ),
        ({"throughput_baseline": 0.0}, ValueError, "`throughput_baseline` must be > 0"),
        ({"throughput_baseline": "1"}, TypeError, "`throughput_baseline` must be a number"),
        ({"print_struct": "yes"}, TypeError, "`print_struct` must be a bool, got 'yes'"),
        ({"global_norm_spike_threshold": math.nan}, ValueError, "`global_norm_spike_threshold`"),
        ({"global_norm_spike_count_threshold": 0}, ValueError, "must be >= 1, got 0"),
        ({"spike_factor": 1.0}, ValueError, "`spike_factor` must be > 1, got 1.0"),
        ({"folder": 3}, TypeError, "`folder` must be a path or None, got 3"),
        (
            {"check_for_global_norm": True, "use_skip_data_by_global_norm": True},
            ValueError,
            "`check_for_global_norm` and `use_skip_data_by_global_norm` must not both be True",
        ),
        ({"show_samples": True}, ValueError, "`show_samples` must be False without `replay`"),
        (
            {"update_ratio_format": "jsonl", "find_culprit": False},
            ValueError,
            "`update_ratio_format` must be None without `find_culprit`, got ",
        ),
        (
            {"replay": True, "find_culprit": False},
            ValueError,
            "`replay` must be False without `find_culprit`",
        ),
        (
            {"check_for_nan_in_loss_and_grad": True, "find_culprit": False},
            ValueError,
            "`check_for_nan_in_loss_and_grad` must be False without `find_culprit`",
        ),
        ({"origin_epochs": 0}, ValueError, "`origin_epochs` must be >= 1, got 0"),
        ({"initial_step": -1}, ValueError, "`initial_step` must be >= 0, got -1"),
        ({"dump_path": "./dump"}, TypeError, "dump_path"),
        ({"expert_capacity_factor": 0}, ValueError, "`expert_capacity_factor` must be > 0"),
        ({"stable_rank_config": "log"}, TypeError, "`stable_rank_config` must be a dict or None"),
        (
            {"stable_rank_config": {"interval": 3}},
            ValueError,
            "`stable_rank_config` must have keys among ['format', 'step_interval', 'target', ",
        ),
        (
            {"stable_rank_config": {"format": "csv"}},
            ValueError,
            "`stable_rank_config.format` must have formats among",
        ),
        (
            {"stable_rank_config": {"format": "tensorboard"}},
            ValueError,
            "`stable_rank_config.format` must not hold 'tensorboard' without `tensorboard_dir`",
        ),
        (
            {"stable_rank_config": {"power_iteration_num": 0}},
            ValueError,
            "`power_iteration_num` must be >= 1, got 0",
        ),
        (
            {"stable_rank_config": {"moe_show_mode": "some"}},
            ValueError,
            "`moe_show_mode` must be one of ['full', 'statistics', 'all'], got 'some'",
        ),
        (
            {"stable_rank_config": {"do_aggregation": 1}},
            TypeError,
            "`do_aggregation` must be a bool, got 1",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(settings, error, message):
    """A wrong argument raises an error with the argument's name and value."""
    with pytest.raises(error, match=re.escape(message)):
        TrainingStateMonitor(**settings)
