"""The sections of the step set its configuration, loss scale and average."""

import pytest

from mfwrap import AdaptiveLossScaleUpdateCell, DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from mfwrap.runner.document import RecipeError
from mfwrap.trainer import Rollback
from support.recipe_texts import SMALL_LLAMA, parsed
from support.versions import needs

SCALE = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 4096, "scale_factor": 2}


@needs("torch", "2.10", "Tensor.grad_dtype")
def test_runner_wrapper_becomes_the_step():
    """MindFormers' keys set the step, the loss scale and the Trainer."""
    wrapper = {
        "type": "MFTrainOneStepCell",
        "scale_sense": SCALE | {"scale_window": 50},
        "use_clip_grad": True,
        "max_grad_norm": 0.5,
        "local_norm": True,
        "use_skip_data_by_global_norm": True,
        "global_norm_spike_threshold": 3,
        "max_consecutive_skips": None,
        "spike_policy": "clip",
        "spike_z": 3,
        "accumulate_allreduce_grads_in_fp32": True,
    }
    recipe = parsed(runner_wrapper=wrapper)
    scale = recipe.step.make_scale()

    assert recipe.arguments.max_grad_norm == 0.5
    assert recipe.step.config.local_norm
    assert recipe.step.config.use_skip_data_by_global_norm
    assert recipe.step.config.global_norm_spike_threshold == 3
    assert recipe.step.config.max_consecutive_skips is None
    assert (recipe.step.config.spike_policy, recipe.step.config.spike_limit) == ("clip", 3)
    assert recipe.step.config.accumulate_allreduce_grads_in_fp32
    assert isinstance(scale, DynamicLossScaleUpdateCell)
    assert (scale.get_loss_scale(), scale.scale_window) == (4096, 50)
    assert recipe.step.make_scale() is not scale


@pytest.mark.parametrize(
    ("scale_sense", "kind"),
    [
        ({"type": "FixedLossScaleUpdateCell", "loss_scale_value": 8}, FixedLossScaleUpdateCell),
        (
            {
                "type": "AdaptiveLossScaleUpdateCell",
                "loss_scale_value": 8,
                "scale_factor": 2,
                "scale_window": 20,
                "max_scale_window": 100,
                "min_scale_window": 20,
            },
            AdaptiveLossScaleUpdateCell,
        ),
        (2.0, float),
        (1, float),
    ],
)
def test_loss_scales(scale_sense, kind):
    """Every kind of loss scale can be configured."""
    made = parsed(runner_wrapper={"scale_sense": scale_sense}).step.make_scale()

    assert isinstance(made, kind)


def test_the_threshold_of_spikes_comes_from_the_monitor():
    """As in MindFormers, ``monitor_config`` sets the threshold, even if the monitor is off."""
    recipe = parsed(
        runner_wrapper={"use_clip_grad": True},
        monitor_config={"monitor_on": False, "global_norm_spike_threshold": 7.5},
    )

    assert recipe.step.config.global_norm_spike_threshold == 7.5
    assert recipe.make_callbacks == ()


def test_rollback():
    """The section `rollback` has the fields of `Rollback`."""
    assert parsed().rollback is None
    recipe = parsed(rollback={"kinds": ["spike"], "max_rollbacks": 2})
    assert recipe.rollback == Rollback(kinds=("spike",), max_rollbacks=2)
    with pytest.raises(RecipeError, match=r"rollback\.max_rollback: unknown key"):
        parsed(rollback={"max_rollback": 2})
    with pytest.raises(RecipeError, match=r"rollback.* must be >= 1, got 0"):
        parsed(rollback={"max_rollbacks": 0})


@pytest.mark.filterwarnings("ignore")  # of TRL
def test_the_loss_of_evaluations():
    """`eval_per_token_loss` must be true or false, and the task must have targets."""
    assert not parsed().eval_per_token_loss
    assert parsed(eval_per_token_loss=True).eval_per_token_loss
    with pytest.raises(RecipeError, match="eval_per_token_loss"):
        parsed(eval_per_token_loss=1.5)
    pairs = {
        "task": "preference_tuning",
        "model": {"config": SMALL_LLAMA, "tokenizer": "bytes"},
        "data": {"type": "docstrings"},
    }
    with pytest.raises(
        RecipeError, match=r"eval_per_token_loss: .* preference_tuning have no targ"
    ):
        parsed(**pairs, eval_per_token_loss=True)


def test_checkpoints_in_the_background():
    """`async_save` must be true or false."""
    assert not parsed().async_save
    assert parsed(async_save=True).async_save
    with pytest.raises(RecipeError, match="async_save"):
        parsed(async_save="thread")


def test_skipped_data():
    """`data_skip_steps` at the top of a recipe, as in MindFormers, must be an integer >= 0."""
    assert parsed().data_skip_steps is None
    assert parsed(data_skip_steps=100).data_skip_steps == 100
    for value in (-1, 1.5):
        with pytest.raises(RecipeError, match="data_skip_steps"):
            parsed(data_skip_steps=value)


def test_a_batch_that_grows():
    """`rampup_batch_size` has three numbers, or a table of sizes by updates."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert parsed().rampup_batch_size is None
    grown = parsed(rampup_batch_size=[4, 2, 20], training=sizes)
    assert grown.rampup_batch_size == [4, 2, 20]
    table = parsed(rampup_batch_size={0: 4, 10: 8}, training=sizes)
    assert table.rampup_batch_size == {0: 4, 10: 8}
    # The table is for two processes, whose number is not known yet.
    assert parsed(rampup_batch_size={0: 4, 10: 16}, training=sizes).rampup_batch_size


@pytest.mark.parametrize(
    ("growth", "says"),
    [
        ([4, 2], r"rampup_batch_size: must be \[start, increment, samples\] with"),
        ([4, 0, 20], "rampup_batch_size: must be .* an increment >= 1"),
        ({1: 4, 2: 8}, "rampup_batch_size: must have rising updates from 0 on"),
        ([3, 1, 20], "rampup_batch_size: each size must be a multiple of 2, .*, got 3"),
        ([4, 1, 20], "rampup_batch_size: each size must be a multiple of 2, .*, got 1"),
        ({0: 4, 2: 12}, "a last size that is a multiple of 8, the rows of an update .*, got 12"),
        ({0: 2, 2: 16}, "each size must be a multiple of 4, .*, got 2"),
        ("often", "rampup_batch_size"),
        ([4, 2.5, 20], "rampup_batch_size"),
        ({"x": 4}, "rampup_batch_size"),
    ],
)
def test_growths_that_fit_no_number_of_processes(growth, says):
    """The error names the key."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    with pytest.raises(RecipeError, match=says):
        parsed(rampup_batch_size=growth, training=sizes)


@pytest.mark.parametrize("other", [{"data_skip_steps": 2}, {"rollback": {}}])
def test_what_counts_updates_of_one_size(other):
    """It cannot be combined with a batch that grows."""
    name = next(iter(other))
    with pytest.raises(RecipeError, match=f"rampup_batch_size: expected no value beside {name}"):
        parsed(rampup_batch_size=[4, 2, 20], **other)


def test_streamed_rows_that_keep_their_place():
    """`use_stateful_dataloader` must be true or false, and is false by default."""
    assert not parsed().use_stateful_dataloader
    assert parsed(use_stateful_dataloader=True).use_stateful_dataloader
    with pytest.raises(RecipeError, match="use_stateful_dataloader"):
        parsed(use_stateful_dataloader=1.5)
