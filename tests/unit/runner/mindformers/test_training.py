"""Sizes and parallel layout of a MindFormers file become the batch of the recipe."""

import pytest

from mfwrap.runner import RecipeError
from support.mindformers_files import imported, imported_recipe, lost

LAYOUTS = {
    "pipeline": (
        {"parallel_config": {"data_parallel": 2, "pipeline_stage": 4, "micro_batch_num": 8}},
        (2, 8),
    ),
    "no_pipeline": ({"parallel_config": {"data_parallel": 8, "micro_batch_num": 16}}, (8, 1)),
    "accumulation": (
        {"parallel_config.data_parallel": 2, "runner_config.gradient_accumulation_steps": 4},
        (2, 4),
    ),
    "interleaved": ({"micro_batch_interleave_num": 2}, (1, 2)),
    "data_parallel": (
        {
            "parallel": {"parallel_mode": 0, "gradients_mean": True},
            "parallel_config.data_parallel": 4,
            "runner_config.gradient_accumulation_steps": 4,
        },
        (4, 1),
    ),
    "stand_alone": (
        {"use_parallel": False, "parallel_config.data_parallel": 8},
        (1, 1),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_batch_of_an_update(name):
    """MindFormers' batch is divided into processes and micro-batches as MindFormers does it."""
    changes, (processes, micro_batches) = LAYOUTS[name]
    result, recipe = imported(changes)
    training = recipe["training"]
    launch = next(note for note in result.notes if note.startswith("launch: "))

    assert training["per_device_train_batch_size"] == 4
    assert training.get("gradient_accumulation_steps", 1) == micro_batches
    assert f"(an update has {4 * processes * micro_batches} rows: " in launch
    assert (f"--nproc-per-node {processes} " in launch) == (processes > 1)


def test_the_loss_of_an_update():
    """MindFormers counts the targets of all processes only if it trains them as one network."""
    joint = {"parallel_config.data_parallel": 2}
    separate = joint | {"parallel": {"parallel_mode": 0, "gradients_mean": True}}
    in_parts = joint | {"runner_config.gradient_accumulation_steps": 2}
    counts = [
        imported(changes)[1]["runner_wrapper"]["calculate_per_token_loss"]
        for changes in ({}, joint, separate, in_parts, {"calculate_per_token_loss": True})
    ]

    assert counts == [False, True, False, False, True]
    assert "equal if all rows have equally many targets" in " ".join(imported(in_parts)[0].notes)


def test_added_gradients_are_a_loss():
    """In data-parallel training MindFormers may add the gradients of the processes."""
    assert lost({"parallel": {"parallel_mode": 0, "gradients_mean": False}}, "gradients") == [
        "gradients"
    ]


def test_values_reach_the_trainer():
    """Length, seeds, order of the data and recomputation are the Trainer's arguments."""
    arguments = imported_recipe({
        "runner_config.epochs": 3,
        "train_dataset.repeat": 2,
        "train_dataset.seed": 7,
        "train_dataset.drop_remainder": True,
        "train_dataset.data_loader.shuffle": False,
        "recompute_config": {"recompute": True, "mp_comm_recompute": True},
        "ignore_data_skip": True,
    }).arguments  # fmt: skip

    assert (arguments.num_train_epochs, arguments.seed, arguments.data_seed) == (6, 1, 7)
    assert (arguments.dataloader_drop_last, arguments.ignore_data_skip) == (True, True)
    assert (arguments.train_sampling_strategy, arguments.bf16) == ("sequential", True)
    assert arguments.gradient_checkpointing


@pytest.mark.parametrize(
    ("recompute", "recomputes", "has_note"),
    [
        ({"recompute": False, "select_recompute": False}, False, False),
        ({"recompute": [0, 0]}, False, False),
        ({"recompute": [6, 0]}, True, True),
        ({"recompute": False, "select_recompute": {"feed_forward.mul": True}}, True, True),
    ],
)
def test_partial_recomputation(recompute, recomputes, has_note):
    """Recomputation of some layers becomes that of all, with a note."""
    result, recipe = imported({"recompute_config": recompute})

    assert any("checkpointing" in key for key in recipe["training"]) == recomputes
    assert any("recomputation of every layer" in note for note in result.notes) == has_note


def test_a_later_position_is_a_loss():
    """A position in an earlier run is a loss; data that are skipped are the recipe's."""
    assert lost({"runner_config.initial_epoch": 1}, "resume") == ["resume"]
    assert imported_recipe({"data_skip_steps": 10}).data_skip_steps == 10


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"runner_config.batch_size": 0}, "runner_config.batch_size: expected an integer >= 1"),
        ({"runner_config.epoch": 3}, "runner_config.epoch: unknown key; did you mean 'epochs'"),
        ({"parallel_config.micro_batch_num": "x"}, "micro_batch_num: expected an integer >= 1"),
    ],
)
def test_wrong_values(changes, says):
    """A wrong value and an unknown key are errors."""
    with pytest.raises(RecipeError, match=says):
        imported(changes)
